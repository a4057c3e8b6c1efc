/* `fused`: what its kernels share. docs/fused.md tells why it is made as it is.
 *
 *   vertices  a warp takes 31 neighbouring lines outwards over the orbits and stores where their ends stand,
 *             four orbits at a time: a unit, with the box that its ends span
 *   painting  a block takes a tile of an image, finds the units whose boxes touch it, and draws their lines
 *             on a canvas in shared memory
 *
 * A canvas pixel is a word, (orbit + 1) << 8 | gray, and drawing is an atomic maximum: the latest orbit wins
 * whatever the order, so nothing ever waits for an orbit to be complete.
 */
#ifndef FDSL_CUDA_SYNTH_FUSED_CUH
#define FDSL_CUDA_SYNTH_FUSED_CUH

#include <cuda_runtime.h>
#include <type_traits>

#include "synth/batch.cuh"

#define FUSED_WARP   32u
#define FUSED_ALL    0xFFFFFFFFu /* all lanes of a warp */
#define FUSED_LINES  31u         /* lines of a unit and orbit: one less than ends */
#define FUSED_ORBITS 4u          /* orbits of a unit: two Philox blocks a vertex */

#define TILE_MOST    136 /* side of a tile's canvas: two blocks fit an H100's multiprocessor */

/* A corner (x, y) of a box, or an end of a line, in one word: y * 65536 + x. As both may be negative, its
 * fields are only good once a bias has made them so. */
#define FUSED_PACK(x, y) ((uint32_t)((y)*65536 + (x)))

/* Packed coordinates must lie within +-FUSED_NEAR of any tile: 14 bits and a sign. */
#define FUSED_NEAR 0x4000
#define FUSED_BIAS (FUSED_NEAR * 65537u)

/* Both corners of a box that touches no tile. */
#define FUSED_NOWHERE FUSED_PACK(-1, -1)

/* Where one of the 32 ends of a unit stands after each of its orbits: packed, or where that is too narrow as
 * (x, y). */
template <bool Wide> struct alignas(16) fused_end {
    std::conditional_t<Wide, int2, uint32_t> at[FUSED_ORBITS];
};

/* What painting must know of an image. */
struct alignas(16) fused_card {
    uint32_t units;
    uint32_t class_id;
    struct output_corner corner; /* of the crop; 0 where there is none */
};

/* How images are cut into tiles; all lengths in pixels. */
struct fused_tiling {
    uint32_t columns, rows;         /* tiles of an image */
    uint32_t out_width, out_height; /* of a tile in the output, but for the last ones */
    uint32_t width, height, pitch;  /* the most that a tile needs of the canvas; words from row to row */
};

/* A slice of a batch: the images that are in work at a time in a lane, which lends it scratch memory. */
struct fused_job {
    struct device_input input;
    struct synth_output output; /* what painting writes */
    uint8_t *images;            /* where: count of them */
    int64_t *labels;            /* count of them */
    uint64_t number;            /* of the run, */
    const uint64_t *counter;    /* to which this word of device memory is added, if not NULL */
    const uint64_t *listed;     /* numbers of all images, counted from input.first; NULL: the run's */
    uint64_t begin;             /* first image of the slice */
    uint32_t count;             /* its images */
    uint32_t *order;            /* count of them, by falling work: places in the slice; NULL: as they come */
    uint32_t groups;            /* most over the classes: warps of 31 lines */
    size_t units;               /* most over the classes: room for an image's */
    uint2 *boxes;               /* low and high corner of a unit; count * units */
    uint4 *values;              /* what its orbits paint: (orbit + 1) << 8 | gray; 0: no such orbit */
    void *ends;                 /* FUSED_WARP fused_end of a unit */
    struct fused_card *cards;   /* count */
    struct fused_tiling tiling;
};

typedef void fused_kernel(const struct fused_job job);

static __device__ __forceinline__ uint64_t fused_run(const fused_job &job)
{
    return job.number + (job.counter ? *job.counter : 0);
}

/* The run and the image of it that stand at a place of the slice, as synth_image_at() has them: listed images
 * are all of run 0. */
struct fused_number {
    uint64_t run, j;
};

static __device__ __forceinline__ fused_number fused_number_at(const fused_job &job, uint32_t place)
{
    uint64_t j = job.begin + place;
    return job.listed ? fused_number{0, job.listed[j]} : fused_number{fused_run(job), j};
}

/* The place in the slice of the image that is number `rank` in the order of work. */
static __device__ __forceinline__ uint32_t fused_place(const fused_job &job, uint32_t rank)
{
    return job.order ? job.order[rank] : rank;
}

/* Where the units of the image at a place begin. */
static __device__ __forceinline__ size_t fused_first_unit(const fused_job &job, uint32_t place)
{
    return place * job.units;
}

#endif
