/* Inside `omp`: what the parts of the variant that are written per instruction set share.
 *
 * An image is drawn orbit by orbit. A kernel moves the vertices by two orbits at a time, as one Philox block
 * serves two, and then turns the lines of each orbit into a list of pixels. Within an orbit the order of
 * pixels is irrelevant, as all get the same gray: that is what lets lines be
 * walked side by side. */
#ifndef FDSL_CPU_SYNTH_OMP_KERNEL_H
#define FDSL_CPU_SYNTH_OMP_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "synth/atom.h"
#include "synth/noise.h"

#define OMP_LANES_MAX 16

/* Lines of up to this many pixels are walked in vectors; omp_simd.h gives the reason. */
#define OMP_MAJOR_MAX 1024

/* Those of up to this many come from a table. */
#define OMP_SHORT_BITS 5
#define OMP_SHORT      (1 << OMP_SHORT_BITS)

/* A canvas goes on beyond the image by so many pixels on every side. A line up to so long of which anything
 * can be seen lies on it, so that its pixels need no test. */
#define OMP_GUARD 32

/* The octant of a line: which way it goes along x and y, and whether y is its major axis. */
enum { OCTANT_LEFT = 1, OCTANT_UP = 2, OCTANT_STEEP = 4, OCTANT_COUNT = 8 };

/* Constant tables, one set a run of the program. */
struct omp_tables {
    float gradients[NOISE_TABLE_COUNT]; /* those of noise.h */
    uint32_t hashes[2][32];           /* hash & 15 of cell c, and of c + 1, at nibble c >> 5 of word c & 31 */
    float hash_gradients[16];         /* the gradient of a hash, times 2^-24 */
    float noise_low, noise_high;      /* bounds of the noise */
    int32_t step_pixel[OCTANT_COUNT]; /* omp_pack_step() in pixels of the canvas */

    /* s | m << 16 for steps s = 0, 1, ... of the line with `major` and `minor`, m that it has made along its
     * minor axis: at OMP_SHORT major + minor. */
    _Alignas(64) int32_t patterns[OMP_SHORT * (OMP_SHORT + 1) + 1][OMP_SHORT];
    uint64_t compress[256]; /* for every mask of 8 lanes, the lanes set, a byte each */
};

/* A run of consecutive vertices of one image, with the first vertex beyond it, where the last line ends. All
 * vertices count: then that is vertex 0 once more. Arrays are padded to whole vectors. */
struct omp_arc {
    const struct omp_tables *tables;
    enum formula formula;
    uint32_t res, pitch;   /* pixels from row to row of the canvas */
    uint32_t vertices;     /* of the polygon */
    uint32_t first, count; /* vertices first .. first + count - 1, and as many lines */
    float p;               /* the noise coefficient */
    float noise_bounds[2]; /* of p times the noise, in either order */
    uint32_t orbits;       /* of the image */
    struct philox_key keys[PHILOX_ROUNDS];

    float *cosine, *sine, *advance; /* of these vertices */
    float *x, *y;                   /* where they stand */
    uint64_t *stir[2];           /* the kernel's own: what Philox has made of the vertices' numbers alone */
    int32_t *column[2], *row[2]; /* their pixels after the even and the odd orbit of a pair */

    /* The kernel's own: the first vertices of the vectors to move, and of those whose lines may be seen */
    uint32_t *moved, *traced;
    uint32_t moved_count, traced_count;
    void *room; /* kernel->room_bytes for trace(), which the arcs of a worker share: stacks of threads may be
                   small */
};

/* Where pixels go: to y pitch + x. */
struct omp_pen {
    void (*paint)(const struct omp_pen *pen, const int32_t *pixels, size_t count);
    void *origin; /* pixel (0, 0) of the image, on its canvas */
    uint32_t value;
};

struct omp_kernel {
    const char *name;
    bool (*supported)(void);
    size_t room_bytes;
    void (*begin)(struct omp_arc *arc);                  /* x and y are the start; prepares the rest */
    void (*advance)(struct omp_arc *arc, uint32_t pair); /* orbits 2 pair and 2 pair + 1 */
    void (*trace)(const struct omp_arc *arc, int parity, const struct omp_pen *pen); /* draws one of them */
};

extern const struct omp_kernel omp_kernel_scalar;
#if defined(__x86_64__)
extern const struct omp_kernel omp_kernel_avx2, omp_kernel_avx512;
#endif

/* For tests: makes every later set-up use the kernel of this name, or the best one again where it is NULL.
 * False where there is none, or this machine cannot run it. */
bool omp_force_isa(const char *name);

/* The vertex's number in the polygon. */
static inline uint32_t omp_vertex(const struct omp_arc *arc, uint32_t i)
{
    return arc->first + i < arc->vertices ? arc->first + i : arc->first + i - arc->vertices;
}

/* A step along a line's major axis, and one along its minor axis, for a multiply-add of 16-bit numbers. */
static inline int32_t omp_pack_step(int32_t major, int32_t minor)
{
    return (int32_t)(((uint32_t)major & 0xFFFF) | (uint32_t)minor << 16);
}

/* Walks one line by the reference's own steps: for what is too long for vectors, or where there are none. */
void omp_trace_line(const struct omp_arc *arc, int parity, uint32_t i, const struct omp_pen *pen);

#endif
