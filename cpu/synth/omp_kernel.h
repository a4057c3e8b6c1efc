/* Internals of the variant `omp`. Each of its kernels is CPU code for one instruction set.
 *
 * An image is drawn orbit by orbit. A kernel moves the vertices by two orbits at a time, because one Philox
 * block contains the random words of two orbits. The kernel then converts the lines of each orbit to a list
 * of pixels. All pixels of an orbit have the same gray, so their order is irrelevant and vector lanes can
 * walk different lines. */
#ifndef FDSL_CPU_SYNTH_OMP_KERNEL_H
#define FDSL_CPU_SYNTH_OMP_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "synth/atom.h"

#define OMP_LANES_MAX 16

/* Maximum number of major steps of lines that are walked in vectors; omp_simd.c gives the reason. */
#define OMP_MAJOR_MAX 1024

/* The steps of lines of up to OMP_SHORT = 2^OMP_SHORT_BITS pixels come from a table. */
#define OMP_SHORT_BITS 5
#define OMP_SHORT      (1 << OMP_SHORT_BITS)

/* A canvas extends beyond the image by this many pixels on every side. A visible line of at most this length
 * is within the canvas, so its pixels need no bounds test. */
#define OMP_GUARD 32

/* The octant of a line: its directions along x and y, and whether y is the major axis. */
enum { OCTANT_LEFT = 1, OCTANT_UP = 2, OCTANT_STEEP = 4, OCTANT_COUNT = 8 };

/* Constant tables, computed once per setup(). */
struct omp_tables {
    float gradients[NOISE_TABLE_COUNT]; /* from noise_gradients() */
    /* (hashes[s][c & 31] >> 4 * (c >> 5)) & 15 is the low four bits of the hash of cell c + s. */
    uint32_t hashes[2][32];
    float hash_gradients[16];         /* indexed by the low four bits of a hash: the scaled gradient, times
                                       * 2^-24 */
    float noise_low, noise_high;      /* bounds of the noise */
    int32_t step_pixel[OCTANT_COUNT]; /* per octant: result of omp_pack_step(), in canvas pixels */

    /* patterns[OMP_SHORT * major + minor][s] is s | m << 16, where m is the number of minor steps after s
     * major steps. */
    _Alignas(64) int32_t patterns[OMP_SHORT * (OMP_SHORT + 1) + 1][OMP_SHORT];
    uint64_t compress[256]; /* indexed by a mask of 8 lanes: the lanes in the mask, one byte each */
};

/* An arc: consecutive vertices of one shape, and the next vertex, where the last line ends. If the arc is the
 * whole polygon, the next vertex is vertex 0. Arrays are padded to whole vectors. */
struct omp_arc {
    const struct omp_tables *tables;
    const struct line_rules *rules;
    uint32_t slot;         /* number of the shape in the image */
    uint32_t res, pitch;   /* side of the image; distance between canvas rows; both in pixels */
    uint32_t vertices;     /* of the whole polygon */
    uint32_t first, count; /* the arc: vertices first .. first + count - 1, and `count` lines */
    float p;               /* the noise factor of the class */
    float noise_bounds[2]; /* bounds of p * noise, in either order */
    uint32_t orbits;       /* of the shape */
    struct philox_key keys[PHILOX_ROUNDS];

    float *cosine, *sine, *advance; /* tables of the arc's vertices */
    float *x, *y;                   /* current positions of the vertices */
    uint64_t *stir[2]; /* private to the kernel: Philox intermediates that do not depend on the orbit */
    int32_t *column[2], *row[2]; /* pixel coordinates after the even and the odd orbit of a pair */

    /* Private to the kernel. `moved` lists the first vertex of each vector to move. `traced` lists the first
     * vertex of each vector with possibly visible lines. */
    uint32_t *moved, *traced;
    uint32_t moved_count, traced_count;
    void *room; /* room_bytes bytes of scratch memory for trace(), shared by the arcs of a worker; too large
                  for some thread stacks */
};

/* The destination of pixels, addressed as y * pitch + x. */
struct omp_pen {
    void (*paint)(const struct omp_pen *pen, const int32_t *pixels, size_t count);
    void *origin; /* pixel (0, 0) of the image, on its canvas */
    uint32_t value;
};

/* Numbers of vectors to which the kernels round patches: blocks of eight masks, and pixels of a row. */
#define OMP_MASK_BLOCKS 8
#define OMP_ROW_PIXELS  64

/* A row of an image of patches. Entry c of `low` is bits 0 to 7 of the mask of cell c of the row of cells 1,
 * 2 or 3 rows below the pixels in the drawing; entry c of `high` is bit 8 of the mask of cell c of the first
 * of these rows, as 0 or 1. Cells -3 to -1 can be read. */
struct omp_patch_row {
    const uint8_t *owners; /* two per byte, as in an owner map */
    const uint8_t *low[3], *high;
    uint8_t *pixels;
};

struct omp_kernel {
    size_t room_bytes;
    void (*begin)(struct omp_arc *arc); /* prepares the arc; x and y must be the start positions */
    void (*advance)(struct omp_arc *arc, uint32_t pair); /* computes orbits 2 * pair and 2 * pair + 1 */
    void (*trace)(const struct omp_arc *arc, int parity,
                  const struct omp_pen *pen); /* draws the even (0) or odd (1) orbit of the latest pair */

    /* For patches (synth/ifs.h). masks() computes the masks of blocks first .. first + count - 1, eight per
     * block: their bits 0 to 7, and their bit 8 as 0 or 1. It rounds `count` up to OMP_MASK_BLOCKS. patches()
     * computes pixels begin .. end - 1 of a row, rounded outwards to OMP_ROW_PIXELS. */
    void (*masks)(const struct philox_key keys[PHILOX_ROUNDS], uint32_t first, uint32_t count, uint8_t *low,
                  uint8_t *high);
    void (*patches)(const struct omp_patch_row *row, uint32_t begin, uint32_t end);
};

struct synth;
struct synth_image;

#if defined(__x86_64__)
extern const struct omp_kernel omp_kernel_avx2, omp_kernel_avx512;
#endif

/* Converts vertex number i of the arc to the vertex number in the polygon. */
static inline uint32_t omp_vertex(const struct omp_arc *arc, uint32_t i)
{
    return arc->first + i < arc->vertices ? arc->first + i : arc->first + i - arc->vertices;
}

/* Packs the address steps along the major and the minor axis for a 16-bit multiply-add. */
static inline int32_t omp_pack_step(int32_t major, int32_t minor)
{
    return (int32_t)(((uint32_t)major & 0xFFFF) | (uint32_t)minor << 16);
}

/* Steps `first` .. `end` - 1 of a line along its major axis; none if first >= end. */
struct omp_span {
    int64_t first, end;
};

/* Returns the first step s with m(s) >= `minor`, where m(s) is the number of minor steps after s steps. */
static inline int64_t omp_step_of(const struct line *line, int64_t minor)
{
    if (minor <= 0)
        return 0;
    return line->minor == 0 ? INT64_MAX
                            : ((2 * minor - 1) * line->major + 2 * line->minor - 1) / (2 * line->minor);
}

/* Returns the steps whose pixels are inside an image of side `res`. They are consecutive, because neither
 * coordinate turns round. */
static inline struct omp_span omp_clip(const struct line *line, int32_t res)
{
    const bool steep = line->major_y != 0;
    const int64_t major = steep ? line->y : line->x, minor = steep ? line->x : line->y, last = res - 1;
    const bool back = line->major_x + line->major_y < 0, minor_back = line->minor_x + line->minor_y < 0;
    struct omp_span span = {back ? major - last : -major, back ? major + 1 : last - major + 1};
    const int64_t enters = omp_step_of(line, minor_back ? minor - last : -minor);
    const int64_t room = minor_back ? minor : last - minor; /* minor steps up to the border */
    const int64_t leaves = room < 0 ? 0 : omp_step_of(line, room + 1);
    span.first = span.first > enters ? span.first : enters;
    span.first = span.first > 0 ? span.first : 0;
    span.end = span.end < leaves ? span.end : leaves;
    span.end = span.end < line->left ? span.end : line->left;
    return span;
}

/* Draws the pixels of a line inside the image, pixel by pixel. Used for lines that are too long for vectors,
 * and by the scalar kernel. `major` of the line must be at least 1, or the line must begin inside the image.
 */
void omp_trace_line(const struct omp_arc *arc, struct line line, const struct omp_pen *pen);

#endif
