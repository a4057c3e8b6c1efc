/* `fused`: what its kernels share. docs/fused.md tells why it is made as it is.
 *
 *   vertices  a warp takes 31 neighbouring lines outwards over the orbits and stores where their ends stand,
 *             two orbits at a time: a unit, with the box that its ends span
 *   painting  a block takes a tile of an image, finds the units whose boxes touch it, and draws their lines
 *             on a canvas in shared memory
 *
 * A canvas pixel is a word, (orbit + 1) << 8 | gray, and drawing is an atomic maximum: the latest orbit wins
 * whatever the order, so nothing ever waits for an orbit to be complete.
 */
#ifndef FDSL_CUDA_SYNTH_FUSED_CUH
#define FDSL_CUDA_SYNTH_FUSED_CUH

#include <cuda_runtime.h>

#include "synth/batch.cuh"
#include "synth/line.h"

#define FUSED_WARP  32u
#define FUSED_ALL   0xFFFFFFFFu /* all lanes of a warp */
#define FUSED_LINES 31u         /* lines of a unit: one less than ends */

/* A corner (x, y) of a box, or an end of a line, in one word: y * 65536 + x. As both may be negative, its
 * fields are only good once a bias has made them so. */
#define FUSED_PACK(x, y) ((uint32_t)((y)*65536 + (x)))

/* Packed coordinates must lie within +-FUSED_NEAR of any tile: 14 bits and a sign. */
#define FUSED_NEAR 0x4000
#define FUSED_BIAS (FUSED_NEAR * 65537u)

/* The lines of 31 neighbouring vertices in two orbits. */
struct alignas(16) fused_unit {
    uint32_t low, high; /* packed corners of the box of all ends; nowhere where nothing of it is visible */
    uint32_t even, odd; /* what the two orbits paint: (orbit + 1) << 8 | gray; 0: no such orbit */
};

/* Both corners of a box that touches no tile. */
#define FUSED_NOWHERE FUSED_PACK(-1, -1)

/* Where the 32 ends of a unit stand, even orbit and odd: packed, or where that is too narrow as they are. */
template <bool Wide> struct fused_ends {
    uint2 packed;
};
template <> struct fused_ends<true> {
    int4 xyxy;
};

/* How images are cut into tiles; all lengths in pixels. */
struct fused_tiling {
    uint32_t columns, rows;         /* tiles of an image */
    uint32_t out_width, out_height; /* of a tile in the output, but for the last ones */
    uint32_t width, height, pitch;  /* the most that a tile needs of the canvas; words from row to row */
};

/* A slice of a batch: the images that are in work at a time. */
struct fused_job {
    struct device_input input;
    struct synth_output output; /* what painting writes */
    uint8_t *images;            /* where: count of them */
    int64_t *labels;            /* count of them */
    uint64_t number;            /* of the run, */
    const uint64_t *counter;    /* to which this word of device memory is added, if not NULL */
    uint64_t begin;             /* first image of the slice */
    uint32_t count;             /* its images */
    uint32_t *order;            /* count of them, by falling work: places in the slice; NULL: as they come */
    uint32_t groups, pairs;     /* most over the classes: units of a pair of orbits, pairs */
    struct fused_unit *units;   /* count * groups * pairs */
    void *ends;                 /* as many times FUSED_WARP fused_ends */
    struct fused_tiling tiling;
};

static __device__ __forceinline__ uint64_t fused_run(const fused_job &job)
{
    return job.number + (job.counter ? *job.counter : 0);
}

/* An image of the slice: number `rank` in the order of work. */
struct fused_image {
    struct image_input input;
    uint32_t place; /* in the slice */
    uint32_t groups, pairs;
    size_t first_unit;
};

static __device__ __forceinline__ fused_image fused_image_at(const fused_job &job, uint32_t rank)
{
    fused_image image;
    image.place = job.order ? job.order[rank] : rank;
    image.input = image_input_at(job.input, job.input.classes, job.input.spoke_offset, fused_run(job),
                                 job.begin + image.place);
    image.groups = (image.input.class_.vertices + FUSED_LINES - 1) / FUSED_LINES;
    image.pairs = (image.input.class_.orbits + 1) / 2;
    image.first_unit = (size_t)image.place * job.groups * job.pairs;
    return image;
}

#endif
