/* Types and functions that the files of `fused` share. docs/notes/synth.md has measurements.
 *
 * An image has one or several shapes. A shape is a polygon that is drawn many times. Each drawing is called
 * an orbit. The vertices move from orbit to orbit. 31 adjacent lines of the polygon are a group. The lines of
 * a group in four consecutive orbits are a unit.
 *
 *   vertices  A warp computes the ends of a group's lines, orbit by orbit. It stores them per unit, with the
 *             bounding box of the unit's ends.
 *   painting  A block processes a tile of an image: it finds the units whose boxes touch the tile, and
 *             draws their lines on a canvas in shared memory.
 *
 * A canvas pixel is a word: the number of the orbit, from 1 on, above the gray. Drawing is an atomic maximum,
 * so the latest orbit wins in any order of execution. Orbits therefore need no synchronisation. If the
 * formula has masks, the class number is between the two, and orbits are counted over all shapes of the
 * image. */
#ifndef FDSL_CUDA_SYNTH_FUSED_CUH
#define FDSL_CUDA_SYNTH_FUSED_CUH

#include <cuda_runtime.h>
#include <type_traits>

#include "synth/batch.cuh"

struct fused_plan;

/* The images of a run and their destination. All pointers are to device memory. */
struct fused_call {
    const uint64_t *listed;  /* image numbers, relative to synth->first; NULL: the images of a run */
    uint64_t number;         /* run number; used only if `listed` is NULL */
    const uint64_t *counter; /* if not NULL, the kernels add `*counter` to `number` */
    uint8_t *images;         /* consecutive images of synth_output_bytes() each; 16-byte aligned */
    int64_t *labels;         /* class numbers of the images; 0 if an image has several shapes */
    uint8_t *masks; /* consecutive masks, one byte per output pixel; 16-byte aligned; NULL: no masks */
    float *points;  /* consecutive point clouds of synth_cloud_bytes() each; NULL: none */
};

#define FUSED_WARP   32u
#define FUSED_ALL    0xFFFFFFFFu /* all lanes of a warp */
#define FUSED_LINES  31u         /* lines per unit and orbit: the warp's 32 ends bound 31 lines */
#define FUSED_ORBITS 4u          /* orbits per unit: two Philox blocks per vertex */
#define FUSED_PART   (FUSED_WARP / FUSED_ORBITS) /* lines per part of a unit */
#define FUSED_PARTS  (FUSED_WARP / FUSED_PART)   /* parts per unit */

/* The position of the orbit's number in a canvas word. If there are masks, the class number is below it. */
#define FUSED_ORDER       8u
#define FUSED_MASK_SHIFT  8u
#define FUSED_MASK_ORDER  16u
#define FUSED_MASK_ORBITS 0xFFFFu /* maximum number of orbits of an image with masks */

/* Maximum side of a tile's canvas in pixels, chosen so that two blocks fit on one H100 multiprocessor. */
#define TILE_MOST 136

/* Packs a corner of a box, or an end of a line, into one word: y * 65536 + x. x and y may be negative, so the
 * 16-bit fields are valid only after adding a bias that makes both non-negative. */
#define FUSED_PACK(x, y) ((uint32_t)((y)*65536 + (x)))

/* Packed coordinates must be within +-FUSED_NEAR pixels of every tile, so that 14 bits and a sign suffice.
 * FUSED_BIAS makes both fields non-negative. */
#define FUSED_NEAR 0x4000
#define FUSED_BIAS (FUSED_NEAR * 65537u)

/* The value of both corners of a box that touches no tile. */
#define FUSED_NOWHERE FUSED_PACK(-1, -1)

/* One of the 32 line ends of a unit. `at` is its position in each of the unit's orbits: packed, or as (x, y)
 * if Wide. */
template <bool Wide> struct alignas(16) fused_end {
    std::conditional_t<Wide, int2, uint32_t> at[FUSED_ORBITS];
};

/* The parameters of an image that painting needs. */
struct fused_card {
    uint8_t *image;              /* destination, in the format job.output */
    uint8_t *mask;               /* destination of the mask, with the side of the output; NULL: no mask */
    struct output_corner corner; /* upper left corner of the crop; (0, 0) without a crop */
    uint32_t units;              /* number of units */
    uint32_t place;              /* index of the image in the slice */
    float middle_x, middle_y;    /* position of the shape, in tiles from the middle of the first tile */
};

/* The division of images into tiles; lengths in pixels. */
struct fused_tiling {
    uint32_t columns, rows;         /* tiles per image */
    uint32_t out_width, out_height; /* size of a tile's output; smaller at the right and lower edges */
    uint32_t width, height, pitch;  /* `width`, `height`: maximum canvas of a tile; `pitch`: words per row */
};

/* The arguments of the kernels for one slice of a batch. A slice is the images that one lane of the plan
 * (struct fused_lane) processes at a time, in the lane's scratch memory. */
struct fused_job {
    struct device_input input;
    struct synth_output output; /* format that painting writes */
    struct fused_call call;
    const struct fused_call *stored; /* the call in device memory; NULL: use `call` */
    /* Canvases and masks of whole images, which painting writes instead of the call's images. NULL: painting
     * writes the call's images and masks. */
    uint8_t *canvases, *mask_canvases;
    uint64_t begin;  /* index in the call of the slice's first image */
    uint32_t count;  /* images in the slice */
    uint32_t *order; /* the slice's image indices by decreasing work; NULL: 0, 1, 2, ... */
    /* Number of warps (or blocks, if blocks compute groups) per image in the grid of the first kernel. With
     * one shape per image, this is the maximum number of groups. Otherwise, each warp takes several groups.
     */
    uint32_t groups;
    size_t units; /* units allocated per image (maximum over classes) */
    uint2 *boxes; /* low and high corner per unit, or per part of a unit; count * units * parts entries */
    /* Per unit, the canvas words that its four orbits paint, or 0 past the last orbit. */
    uint4 *values;
    void *ends;               /* FUSED_WARP entries of fused_end per unit */
    struct fused_card *cards; /* `count` entries, by rank: rank 0 has the most work */
    struct fused_tiling tiling;
};

typedef void fused_kernel(const struct fused_job job);

/* The kernels of a formula. Each pair has the kernel for packed coordinates, and the kernel for images whose
 * coordinates may not fit packed words. */
struct fused_kernels {
    fused_kernel *vertices[2], *vertices_split[2];
    uint32_t split_block; /* threads per block of vertices_split */
    size_t split_bytes;   /* its shared memory */
    fused_kernel *paint[2];
    uint32_t parts;                     /* boxes per unit: 1 or FUSED_PARTS */
    uint32_t paint_block, paint_blocks; /* threads per block of `paint`, and blocks per multiprocessor */
    size_t paint_fixed;                 /* its shared memory without the canvas */
};

/* The kernels of each formula that draws lines: fused_uji, ... */
#define FORMULA(symbol, name, ...) extern const struct fused_kernels fused_##name;
#include "synth/formulas.def"
#undef FORMULA

static __device__ __forceinline__ fused_call fused_call_of(const fused_job &job)
{
    return job.stored ? *job.stored : job.call;
}

/* The run number and the image number for synth_image_at(). Listed images belong to run 0. */
struct fused_number {
    uint64_t run, j;
};

/* Returns the run number and the image number of image `place` of the slice. */
static __device__ __forceinline__ fused_number fused_number_at(const fused_job &job, uint32_t place)
{
    const fused_call call = fused_call_of(job);
    uint64_t j = job.begin + place;
    if (call.listed)
        return {0, call.listed[j]};
    return {call.number + (call.counter ? *call.counter : 0), j};
}

/* Returns the index in the slice of the image with rank `rank`; rank 0 has the most work. */
static __device__ __forceinline__ uint32_t fused_place(const fused_job &job, uint32_t rank)
{
    return job.order ? job.order[rank] : rank;
}

/* Returns the amount of work of image `place` of the slice, for fused_job.order. */
static __device__ __forceinline__ float fused_work(const fused_job &job, uint32_t place)
{
    const fused_number of = fused_number_at(job, place);
    struct synth_image id = synth_image_at(job.input.first, job.input.stride, job.input.turns, of.run, of.j);
    const struct atom_class &class_ = job.input.classes[id.class_index];
    /* The second term is for the lines of polygons with few vertices, which are long. */
    return (float)class_.vertices * (float)class_.orbits + 64.0f * (float)class_.orbits;
}

/* Returns whether image `a` with work `work_a` precedes image `b` with work `work_b` in fused_job.order. */
static __device__ __forceinline__ bool fused_before(float work_a, uint32_t a, float work_b, uint32_t b)
{
    return work_a > work_b || (work_a == work_b && a < b);
}

/* Returns the index of the first unit of image `place` of the slice. */
static __device__ __forceinline__ size_t fused_first_unit(const fused_job &job, uint32_t place)
{
    return place * job.units;
}

#ifdef __CUDACC__ /* host compilers lack the functions of warps */
/* Lets the compiler know that a value is equal in all lanes. It can then keep the value in a uniform
 * register, and knows that branches on it do not diverge. */
static __device__ __forceinline__ uint32_t fused_uniform(uint32_t value)
{
    return __reduce_or_sync(FUSED_ALL, value);
}

/* Returns the sum of the values of this lane and all lower ones. */
static __device__ __forceinline__ uint32_t fused_running_sum(uint32_t value)
{
    const uint32_t lane = threadIdx.x % FUSED_WARP;
#pragma unroll
    for (uint32_t step = 1; step < FUSED_WARP; step *= 2) {
        uint32_t below = __shfl_up_sync(FUSED_ALL, value, step);
        value += lane >= step ? below : 0;
    }
    return value;
}
#endif

/* ---- The plan: fused.cu ---- */

/* A plan generates images on the caller's stream into the caller's memory. fused_enqueue() does not wait for
 * the device and does not allocate memory. It can be captured into a CUDA graph. */

/* Creates a plan for batches of `synth` on a device: tables, scratch memory and CUDA kernels. `background`:
 * see struct generator_request. `synth` must outlive the plan. The caller closes the plan with fused_close().
 * STATUS_TOO_LARGE if there is not enough device memory, or if an image has too many lines. */
enum status fused_open(int device, const struct synth *synth, bool background, struct fused_plan **plan);

/* Enqueues the generation of the first `count` images of a call; `count` is at most synth->batch. The plan's
 * device must be current. A plan supports one run in flight at a time. STATUS_FAILED if a launch fails. */
enum status fused_enqueue(const struct fused_plan *plan, const struct fused_call *call, uint64_t count,
                          cudaStream_t stream);

/* Like fused_enqueue(), but the kernels read the call from device memory when they run. */
enum status fused_enqueue_stored(const struct fused_plan *plan, const struct fused_call *stored,
                                 uint64_t count, cudaStream_t stream);

/* Generates the images of a call one stage at a time, without overlap. Adds the device times of the stages,
 * in seconds, to `*vertices_s` (which includes the noise) and `*painting_s` (which includes the output). Uses
 * the clock's stream and waits for it. */
enum status fused_time_stages(const struct fused_plan *plan, const struct fused_call *call,
                              const struct device_clock *clock, double *vertices_s, double *painting_s);

/* Returns whether a run is one kernel, which a CUDA graph would not launch faster. */
bool fused_single(const struct fused_plan *plan);

/* Computes the orbits that the plan's bank does not have yet, and waits for them: those of the images of run
 * `number`, or all orbits. Does nothing if the formula draws lines. Must not be called while a run is in
 * flight or a stream is captured. STATUS_TOO_LARGE if there is not enough device memory. */
enum status fused_need(const struct fused_plan *plan, uint64_t number);
enum status fused_need_all(const struct fused_plan *plan);

/* Returns what the plan's bank has; zeros if the formula draws lines. */
struct ifs_bank_facts fused_bank(const struct fused_plan *plan);

/* Returns the bytes of device memory that the plan has allocated. */
uint64_t fused_memory_bytes(const struct fused_plan *plan);

/* Frees the plan; accepts NULL. */
void fused_close(struct fused_plan *plan);

/* ---- The plan for fractals in colour: fused_color.cu ---- */

struct color_plan;
enum status color_plan_open(int device, const struct synth *synth, struct color_plan **plan);

/* Enqueues the first `count` images of a call, which is `stored`, in device memory, if that is not NULL. */
enum status color_plan_enqueue(const struct color_plan *plan, const struct fused_call *call,
                               const struct fused_call *stored, uint64_t count, cudaStream_t stream);

/* Times the clouds and objects, and the composition: see fused_time_stages(). */
enum status color_plan_time(const struct color_plan *plan, const struct fused_call *call,
                            const struct device_clock *clock, double *objects_s, double *composing_s);

uint64_t color_plan_bytes(const struct color_plan *plan);
void color_plan_close(struct color_plan *plan); /* accepts NULL */

#endif
