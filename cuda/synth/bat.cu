/* The variants of the paper's ladder whose kernels launch kernels (dynamic parallelism): `bat`, `bat-reuse`
 * and `gbase-device`. They need relocatable device code. */
#include <stdlib.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "synth/ladder.cuh"

/* ---- Errors of launches ---- */

/* Error reporting for kernels that launch kernels: the device stores the cudaError_t of a failed launch in a
 * word of pinned host memory. */
/* Allocates the word of pinned memory and sets it to cudaSuccess. The caller frees it with
 * device_launch_close(), which accepts NULL. */
static inline enum status device_launch_open(int **failure)
{
    CUDA_TRY(cudaMallocHost(failure, sizeof **failure));
    **failure = cudaSuccess;
    return STATUS_OK;
}

static inline void device_launch_close(int *failure)
{
    (void)cudaFreeHost(failure); /* errors are ignored, because no result depends on them */
}

/* Records the error of the calling thread's last launch, if it failed. */
static __device__ __forceinline__ void device_launch_check(int *failure)
{
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess)
        atomicExch_system(failure, (int)error);
}

/* Returns STATUS_FAILED if a launch failed on the device. Call it after the launching kernels have ended. */
static inline enum status device_launch_status(const int *failure)
{
    return cuda_status((cudaError_t) * (const volatile int *)failure, "a launch on the device", __FILE__,
                       __LINE__);
}

/* ---- Batches ---- */

/* The variants `bat` and `bat-reuse`. The host launches one parent kernel per batch, or several for a large
 * batch. The device launches the kernels of each image (dynamic parallelism).
 *
 * The parent grid has one block per image. The block launches the image's noise kernel (fire-and-forget).
 * The noise kernel launches the vertex kernel and then the painting kernel as tail launches, which run in
 * this order. Images run concurrently as far as device resources allow.
 *
 * If the pool of pending launches is full, a device-side launch fails, and its image is lost. setup()
 * therefore enlarges the pool. It also splits batches that are larger than BAT_SPLIT_MAX or whose scratch
 * memory does not fit. The device checks every launch and reports errors to the host through `failure`. */
#define BAT_SPLIT_MAX          1024 /* images per launch; more would use more memory and be no faster */
#define BAT_LAUNCHES_PER_IMAGE 3
#define BAT_LAUNCHES_SPARE     64
#define BAT_SCRATCH_SHARE      0.8 /* scratch may use this share of the memory that the images leave free */

/* Scratch memory of one launch, one slot per image. */
struct bat_scratch {
    char *base;
    size_t slot_bytes, points_offset, grays_offset; /* a slot has noise, points, grays */
    int *failure;                                   /* see device_launch_open() */
};

/* Arguments of a launch. The launch generates images first .. first + gridDim.x - 1 of run `run`. If
 * `numbers` is not NULL, it generates these entries of the list `numbers` instead.
 *
 * `stages` contains all stages, unless stages are timed separately. `paint_blocks` is the maximum number of
 * blocks that paint one image. It equals the number of multiprocessors, so that blocks of several images run
 * at the same time. The orbits of one image write to the same 32-byte sectors. If all orbits of an image were
 * painted at once, these writes would contend in the L2 cache (docs/notes/synth.md has measurements). */
struct bat_launch {
    struct device_input input;
    struct bat_scratch scratch;
    const uint64_t *numbers;
    uint64_t run, first;
    unsigned stages, paint_blocks;
};

/* The stages that an image's noise kernel launches, and their arguments. */
struct bat_rest {
    unsigned stages, paint_blocks; /* see struct bat_launch */
    int *failure;
};

static __device__ __forceinline__ image_work<noise_half2> bat_work(const struct bat_launch &launch,
                                                                   uint64_t slot)
{
    char *memory = launch.scratch.base + slot * launch.scratch.slot_bytes;
    image_work<noise_half2> work;
    work.input = image_input_listed(launch.input, launch.input.classes, launch.input.spoke_offset,
                                    launch.numbers, launch.run, launch.first + slot);
    work.noise = noise_half2::at(memory, 0);
    work.points = reinterpret_cast<int2 *>(memory + launch.scratch.points_offset);
    work.grays = reinterpret_cast<uint8_t *>(memory + launch.scratch.grays_offset);
    return work;
}

/* Launches the requested stages that follow the noise. Exactly one thread per image calls this. */
static __device__ __forceinline__ void bat_follow(const image_work<noise_half2> &work, const bat_rest &rest,
                                                  cudaStream_t stream)
{
    if (rest.stages & STAGE_VERTICES) {
        vertex_kernel<<<blocks_for(work.vertices(), VERTEX_BLOCK), VERTEX_BLOCK, 0, stream>>>(work);
        device_launch_check(rest.failure);
    }
    if (rest.stages & STAGE_PAINTING) {
        unsigned grid = paint_grid(work.vertices(), work.orbits());
        paint_kernel<<<min(grid, rest.paint_blocks), PAINT_BLOCK, 0, stream>>>(work);
        device_launch_check(rest.failure);
    }
}

/* The parent kernel. `Step` defines how it launches an image's noise kernel:
 *     static __device__ void launch(const image_work<noise_half2> &work, const bat_rest &rest);
 * The first block of the noise kernel calls bat_follow() with cudaStreamTailLaunch. Without the noise stage,
 * the parent launches at most one stage, because fire-and-forget launches are not ordered. */
template <class Step> static __global__ void bat_parent_kernel(struct bat_launch launch)
{
    const bat_rest rest = {launch.stages, launch.paint_blocks, launch.scratch.failure};
    if (launch.stages & STAGE_NOISE) {
        Step::launch(bat_work(launch, blockIdx.x), rest);
        device_launch_check(rest.failure);
    } else
        bat_follow(bat_work(launch, blockIdx.x), rest, cudaStreamFireAndForget);
}

template <class Step> struct bat_batch : staged<bat_batch<Step>> {
    using staged<bat_batch<Step>>::batch;
    struct bat_scratch scratch;
    uint64_t split; /* images per launch */
    int multiprocessors;

    static void teardown(void *state)
    {
        bat_batch *self = static_cast<bat_batch *>(state);
        device_launch_close(self->scratch.failure);
        (void)cudaFree(self->scratch.base);
        device_batch_close(&self->batch);
        free(self);
    }

    void lay_out_slot(const struct synth *synth)
    {
        size_t align = 256, noise_bytes = synth->segments_max * noise_half2::bytes;
        scratch.points_offset = (noise_bytes + align - 1) / align * align;
        scratch.grays_offset = scratch.points_offset + synth->segments_max * sizeof(int2);
        scratch.slot_bytes = (scratch.grays_offset + synth->orbits_max + align - 1) / align * align;
    }

    /* Sets `split`: as many images per launch as BAT_SPLIT_MAX and scratch memory allow. The launches of a
     * batch have about equal sizes. */
    enum status choose_split(const struct synth *synth)
    {
        size_t free_bytes;
        TRY(device_free_bytes(batch.device, &free_bytes));
        uint64_t most = (uint64_t)(BAT_SCRATCH_SHARE * (double)free_bytes) / scratch.slot_bytes;
        most = most > BAT_SPLIT_MAX ? BAT_SPLIT_MAX : most < 1 ? 1 : most;
        uint64_t launches = (synth->batch + most - 1) / most;
        split = (synth->batch + launches - 1) / launches;
        return STATUS_OK;
    }

    /* Enlarges the pool of pending launches if needed. Never shrinks it, because the whole device context
     * shares it. */
    enum status grow_pending_launches() const
    {
        size_t needed = BAT_LAUNCHES_PER_IMAGE * split + BAT_LAUNCHES_SPARE, limit;
        CUDA_TRY(cudaDeviceGetLimit(&limit, cudaLimitDevRuntimePendingLaunchCount));
        if (limit < needed)
            CUDA_TRY(cudaDeviceSetLimit(cudaLimitDevRuntimePendingLaunchCount, needed));
        return STATUS_OK;
    }

    enum status make(const struct resources *resources, const struct synth *synth)
    {
        lay_out_slot(synth);
        TRY(device_batch_open(&batch, resources, synth, scratch.slot_bytes));
        CUDA_TRY(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, batch.device));
        TRY(choose_split(synth));
        batch.bytes += (split - 1) * scratch.slot_bytes; /* device_batch_open() has counted one slot */
        TRY(grow_pending_launches());
        CUDA_TRY(cudaMalloc(&scratch.base, split * scratch.slot_bytes));
        return device_launch_open(&scratch.failure);
    }

    /* Enqueues stages of images first .. first + split - 1, or up to the end of the batch. */
    enum status launch(uint64_t first, unsigned stages) const
    {
        uint64_t left = batch.synth->batch - first, count = left < split ? left : split;
        struct bat_launch launch = {
            batch.input, scratch, batch.numbers, batch.run, first, stages, (unsigned)multiprocessors};
        RANGE(DRAW);
        bat_parent_kernel<Step><<<(unsigned)count, 1, 0, batch.clock.stream>>>(launch);
        CUDA_TRY_LAUNCH("bat_parent_kernel");
        return STATUS_OK;
    }

    uint64_t step() const
    {
        return split;
    }
    enum status finish() const
    {
        return device_launch_status(scratch.failure);
    }
};

#define BAT_VARIANT(symbol, step) \
    STAGED_VARIANT(symbol, bat_batch<step>, SYNTH_NOISE_COUNTER, noise_half2::half, nullptr)

/* ---- The variants ---- */

/* `bat`: BAT of the paper. The host launches one kernel per batch, or several for a large
 * batch. The device launches the stages of `rng` for each image. */

static __global__ void __launch_bounds__(NOISE_BLOCK)
    bat_noise_kernel(image_work<noise_half2> work, bat_rest rest)
{
    if (blockIdx.x == 0 && threadIdx.x == 0)
        bat_follow(work, rest, cudaStreamTailLaunch);
    noise_by_sample(work);
}

struct bat {
    static __device__ void launch(const image_work<noise_half2> &work, const bat_rest &rest)
    {
        bat_noise_kernel<<<work.orbits() * blocks_per_orbit(work.vertices(), NOISE_BLOCK), NOISE_BLOCK, 0,
                           cudaStreamFireAndForget>>>(work, rest);
    }
};

BAT_VARIANT(variant_bat, bat)

/* `bat-reuse`, an alternative from the paper: `bat` with the noise kernel of `rng-reuse`. That kernel has
 * little parallelism within an image, but many images of a batch run concurrently. */

static __global__ void __launch_bounds__(STREAM_BLOCK)
    bat_reuse_noise_kernel(image_work<noise_half2> work, bat_rest rest)
{
    if (blockIdx.x == 0 && threadIdx.x == 0)
        bat_follow(work, rest, cudaStreamTailLaunch);
    noise_by_orbit(work);
}

struct bat_reuse {
    static __device__ void launch(const image_work<noise_half2> &work, const bat_rest &rest)
    {
        bat_reuse_noise_kernel<<<blocks_for(work.orbits(), STREAM_BLOCK), STREAM_BLOCK, 0,
                                 cudaStreamFireAndForget>>>(work, rest);
    }
};

BAT_VARIANT(variant_bat_reuse, bat_reuse)

/* `gbase-device`: `gbase`, but the host launches only one kernel per image. This parent kernel has one
 * thread, which launches the three kernels of the image (dynamic parallelism). As in `gbase`, each image
 * waits for the previous one. */

/* Launches `stages` of an image. Tail launches run in launch order, and each waits until the previous one has
 * ended. The parent kernel completes when all its tail launches have completed. */
static __global__ void gbase_parent_kernel(image_work<noise_apart> work, unsigned stages, int *failure)
{
    if (stages & STAGE_NOISE) {
        gbase_noise_kernel<<<gbase_noise_grid(work), NOISE_BLOCK, 0, cudaStreamTailLaunch>>>(work);
        device_launch_check(failure);
    }
    if (stages & STAGE_VERTICES) {
        vertex_kernel<<<blocks_for(work.vertices(), VERTEX_BLOCK), VERTEX_BLOCK, 0, cudaStreamTailLaunch>>>(
            work);
        device_launch_check(failure);
    }
    if (stages & STAGE_PAINTING) {
        paint_kernel<<<paint_grid(work.vertices(), work.orbits()), PAINT_BLOCK, 0, cudaStreamTailLaunch>>>(
            work);
        device_launch_check(failure);
    }
}

struct gbase_parent {
    using noise = noise_apart;
    int *failure;

    enum status open()
    {
        return device_launch_open(&failure);
    }
    void close()
    {
        device_launch_close(failure);
    }
    enum status launch(const image_work<noise> &work, unsigned stages, cudaStream_t stream) const
    {
        RANGE(DRAW);
        gbase_parent_kernel<<<1, 1, 0, stream>>>(work, stages, failure);
        CUDA_TRY_LAUNCH("gbase_parent_kernel");
        return STATUS_OK;
    }
    enum status finish() const
    {
        return device_launch_status(failure);
    }
};

using state = ladder_by<gbase_parent>;

LADDER_VARIANT(variant_gbase_device, state, SYNTH_NOISE_XORWOW)
