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
#ifndef FDSL_CUDA_SYNTH_BAT_CUH
#define FDSL_CUDA_SYNTH_BAT_CUH

#include <stdlib.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "synth/device_launch.cuh"
#include "synth/stages.cuh"

#define BAT_SPLIT_MAX          1024 /* images per launch; more would use more memory and be no faster */
#define BAT_LAUNCHES_PER_IMAGE 3
#define BAT_LAUNCHES_SPARE     64
#define BAT_SCRATCH_SHARE      0.8 /* scratch may use this share of the memory that the images leave free */

/* Scratch memory of one launch, one slot per image. */
struct bat_scratch {
    char *base;
    size_t slot_bytes, points_offset, grays_offset; /* a slot has noise, points, grays */
    int *failure;                                   /* see device_launch.cuh */
};

/* Arguments of a launch. The launch generates images first .. first + gridDim.x - 1 of run `run`. If
 * `numbers` is not NULL, it generates these entries of the list `numbers` instead.
 *
 * `stages` contains all stages, unless stages are timed separately. `paint_blocks` is the maximum number of
 * blocks that paint one image. It equals the number of multiprocessors, so that blocks of several images run
 * at the same time. The orbits of one image write to the same 32-byte sectors. If all orbits of an image were
 * painted at once, these writes would contend in the L2 cache (docs/notes/ladder.md has measurements). */
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

#endif
