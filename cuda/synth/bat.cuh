/* One launch per batch: the device launches the kernels of each image (dynamic parallelism).
 *
 * A parent grid with one block per image launches each image's noise kernel as a fire-and-forget launch. That
 * kernel then launches the vertex kernel and the painting kernel as tail launches, in this order. Images run
 * concurrently as far as device resources allow.
 *
 * If the pool of pending launches is full, a device-side launch is lost, and so is its image. Therefore the
 * pool is enlarged, larger batches (or batches whose scratch does not fit in memory) are split, and the
 * device checks every launch and reports errors to the host through `failure`.
 */
#ifndef FDSL_CUDA_SYNTH_BAT_CUH
#define FDSL_CUDA_SYNTH_BAT_CUH

#include <stdlib.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "synth/device_launch.cuh"
#include "synth/stages.cuh"

#define BAT_SPLIT_MAX          1024 /* images per launch; more use more scratch memory and are no faster */
#define BAT_LAUNCHES_PER_IMAGE 3
#define BAT_LAUNCHES_SPARE     64
#define BAT_SCRATCH_SHARE      0.8 /* maximum share of the memory that is free after allocating the images */

/* Scratch memory of one launch, one slot per image. */
struct bat_scratch {
    char *base;
    size_t slot_bytes, points_offset, grays_offset; /* a slot has noise, points, grays */
    int *failure;                                   /* see device_launch.cuh */
};

/* Arguments of a launch, which generates images first .. first + gridDim.x - 1 of run `run`.
 *
 * `stages`: all stages, unless they are timed separately. `paint_blocks`: the maximum number of blocks that
 * paint one image, one per multiprocessor, so that the device paints several images at once. Orbits of one
 * image write the same 32-byte sectors repeatedly; if all are painted at once, they contend in the L2 cache
 * (docs/ladder.md has measurements). */
struct bat_launch {
    struct device_input input;
    struct bat_scratch scratch;
    uint64_t run, first;
    unsigned stages, paint_blocks;
};

/* The stages that an image's noise kernel launches next. */
struct bat_rest {
    unsigned stages, paint_blocks; /* as in bat_launch */
    int *failure;
};

static __device__ __forceinline__ image_work<noise_half2> bat_work(const struct bat_launch &launch,
                                                                   uint64_t slot)
{
    char *memory = launch.scratch.base + slot * launch.scratch.slot_bytes;
    image_work<noise_half2> work;
    work.input = image_input_at(launch.input, launch.input.classes, launch.input.spoke_offset, launch.run,
                                launch.first + slot);
    work.noise = noise_half2::at(memory, 0);
    work.points = reinterpret_cast<int2 *>(memory + launch.scratch.points_offset);
    work.grays = reinterpret_cast<uint8_t *>(memory + launch.scratch.grays_offset);
    return work;
}

/* Launches the requested stages that follow the noise. One thread of the grid must call it. */
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
 * The first block of the noise kernel calls bat_follow() with cudaStreamTailLaunch. A launch without the
 * noise stage has at most one stage. */
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

    /* Sets `split`: as many images per launch as scratch memory allows, in launches of equal size. */
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

    /* The pool of pending launches belongs to the device context, so it is never made smaller. */
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
        TRY(grow_pending_launches());
        CUDA_TRY(cudaMalloc(&scratch.base, split * scratch.slot_bytes));
        return device_launch_open(&scratch.failure);
    }

    /* Enqueues stages of images first .. first + split - 1, up to the end of the batch. */
    enum status launch(uint64_t first, unsigned stages) const
    {
        uint64_t left = batch.synth->batch - first, count = left < split ? left : split;
        struct bat_launch launch = {batch.input, scratch, batch.run,
                                    first,       stages,  (unsigned)multiprocessors};
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
