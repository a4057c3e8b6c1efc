/* Inside `omp`: what the parts of the variant that are written per instruction set share.
 *
 * An image is drawn orbit by orbit. A kernel moves the vertices by two orbits at a time, as one Philox block
 * serves two, and then turns the lines of each orbit into a list of pixels. Within an orbit the order of
 * pixels is irrelevant, as all get the same gray: that is what lets lines be walked side by side.
 */
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

/* The octant of a line: which way it goes along x and y, and whether y is its major axis. */
enum { OCTANT_LEFT = 1, OCTANT_UP = 2, OCTANT_STEEP = 4, OCTANT_COUNT = 8 };

/* Constant tables, one set a run of the program. */
struct omp_tables {
    float gradients[NOISE_TABLE_COUNT]; /* those of noise.h */
    uint32_t hashes[2][32];           /* hash & 15 of cell c, and of c + 1, at nibble c >> 5 of word c & 31 */
    float hash_gradients[16];         /* the gradient of a hash, times 2^-24 */
    int32_t step_x[OCTANT_COUNT];     /* (major step) | (minor step) << 16, along x */
    int32_t step_y[OCTANT_COUNT];     /* along y */
    int32_t step_pixel[OCTANT_COUNT]; /* and in pixels of the canvas */
    uint64_t compress[256];           /* for every mask of 8 lanes, the lanes set, a byte each */
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
    struct philox_key keys[PHILOX_ROUNDS];

    float *cosine, *sine, *advance; /* of these vertices */
    float *x, *y;                   /* where they stand */
    uint64_t *stir[2];           /* the kernel's own: what Philox has made of the vertices' numbers alone */
    int32_t *column[2], *row[2]; /* their pixels after the even and the odd orbit of a pair */
};

/* Where pixels go. */
struct omp_pen {
    void (*paint)(const struct omp_pen *pen, const uint32_t *pixels, size_t count);
    void *canvas;
    uint32_t value;
};

struct omp_kernel {
    const char *name;
    bool (*supported)(void);
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

/* Walks one line by the reference's own steps: for what is too long for vectors, or where there are none. */
void omp_trace_line(const struct omp_arc *arc, int parity, uint32_t i, const struct omp_pen *pen);

#endif
