/* One launch a batch: the device launches the kernels of each image itself (dynamic parallelism).
 *
 * A parent grid, one block an image, fires off each image's noise kernel and forgets it; that kernel's grid
 * then has the vertex kernel and the painting kernel follow it as tail launches, in this order. Images run
 * beside each other as far as the device has room.
 *
 * A device-side launch that finds the pool of pending launches full is lost, and with it the image. So the
 * pool is made large enough, a batch beyond that (or beyond the memory for scratch) is split, and every
 * launch is checked on the device: an error reaches the host through `failure`.
 */
#ifndef FDSL_CUDA_SYNTH_BAT_CUH
#define FDSL_CUDA_SYNTH_BAT_CUH

#include <stdlib.h>

#include "common/check.cuh"
#include "synth/stages.cuh"

#define BAT_SPLIT_MAX         1024 /* images a launch: more gain nothing, and their scratch grows without end */
#define BAT_LAUNCHES_AN_IMAGE 3
#define BAT_LAUNCHES_SPARE    64
#define BAT_SCRATCH_SHARE     0.8 /* of the memory that is free beside the images, at most */

/* Scratch for the images of one launch; each has a slot. */
struct bat_scratch {
    char *base;
    size_t slot_bytes, points_offset, grays_offset; /* a slot holds noise, points, grays */
    int *failure;                                   /* host memory that the device sees: a cudaError_t */
};

/* What a launch makes. `paint_blocks`: at most so many blocks paint an image, one a multiprocessor, so that
 * the device paints several images at once. Orbits of one image write the same 32-byte sectors again and
 * again; painted all at once they queue at the L2 cache for each other (docs/ladder.md has the measurements).
 *
 * The launch makes images first .. first + gridDim.x - 1 of run `run`. */
struct bat_launch {
    struct device_input input;
    struct bat_scratch scratch;
    uint64_t run, first;
    unsigned paint_blocks;
};

static __device__ __forceinline__ void bat_check(cudaError_t error, int *failure)
{
    if (error != cudaSuccess)
        atomicExch_system(failure, (int)error);
}

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

/* Has the two stages after the noise follow the calling grid. One thread of the grid calls it. */
static __device__ __forceinline__ void bat_follow(const image_work<noise_half2> &work, unsigned paint_blocks,
                                                  int *failure)
{
    vertex_kernel<<<blocks_for(work.vertices(), VERTEX_BLOCK), VERTEX_BLOCK, 0, cudaStreamTailLaunch>>>(work);
    bat_check(cudaGetLastError(), failure);
    unsigned grid = paint_grid(work.vertices(), work.orbits());
    paint_kernel<<<min(grid, paint_blocks), PAINT_BLOCK, 0, cudaStreamTailLaunch>>>(work);
    bat_check(cudaGetLastError(), failure);
}

/* `Step` says how the parent launches an image's noise:
 *     static __device__ void launch(const image_work<noise_half2> &work, unsigned paint_blocks,
 *                                   int *failure);  */
template <class Step> static __global__ void bat_parent_kernel(struct bat_launch launch)
{
    Step::launch(bat_work(launch, blockIdx.x), launch.paint_blocks, launch.scratch.failure);
    bat_check(cudaGetLastError(), launch.scratch.failure);
}

template <class Step> struct bat_batch {
    struct device_batch batch;
    struct bat_scratch scratch;
    uint64_t split; /* images a launch */
    int multiprocessors;

    static const uint8_t *images(const void *state)
    {
        return static_cast<const bat_batch *>(state)->batch.input.pixels;
    }

    static void teardown(void *state)
    {
        bat_batch *self = static_cast<bat_batch *>(state);
        (void)cudaFreeHost(self->scratch.failure);
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

    /* As many images a launch as scratch has room for, in launches of equal size. */
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

    /* The pool of pending launches belongs to the device's context, so it only ever grows. */
    enum status grow_pending_launches() const
    {
        size_t needed = BAT_LAUNCHES_AN_IMAGE * split + BAT_LAUNCHES_SPARE, limit;
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
        CUDA_TRY(cudaMallocHost(&scratch.failure, sizeof *scratch.failure));
        *scratch.failure = cudaSuccess;
        return STATUS_OK;
    }

    static enum status setup(const struct resources *resources, const void *input, void **state)
    {
        return device_batch_setup<bat_batch>(resources, input, state);
    }

    static enum status run(void *state, uint64_t number, struct run_time *time)
    {
        bat_batch *self = static_cast<bat_batch *>(state);
        uint64_t images = self->batch.synth->batch;
        TRY(device_batch_begin(&self->batch, number));
        for (uint64_t first = 0; first < images; first += self->split) {
            struct bat_launch launch = {self->batch.input, self->scratch, number, first,
                                        (unsigned)self->multiprocessors};
            uint64_t count = images - first < self->split ? images - first : self->split;
            bat_parent_kernel<Step><<<(unsigned)count, 1, 0, self->batch.clock.stream>>>(launch);
            CUDA_TRY_LAUNCH("bat_parent_kernel");
        }
        TRY(device_batch_end(&self->batch, time));
        return cuda_status((cudaError_t)*self->scratch.failure, "a launch on the device", __FILE__, __LINE__);
    }

    static enum status fetch(void *state, void *result)
    {
        bat_batch *self = static_cast<bat_batch *>(state);
        return device_batch_fetch(&self->batch, static_cast<struct synth_fetch *>(result));
    }
};

#define BAT_VARIANT(symbol, step)                                                          \
    static const struct synth_traits symbol##_traits = {.noise = SYNTH_NOISE_COUNTER,      \
                                                        .half = true,                      \
                                                        .racy = true,                      \
                                                        .outputs = false,                  \
                                                        .timed = "clear+draw",             \
                                                        .fetch_noise = nullptr,            \
                                                        .images = bat_batch<step>::images, \
                                                        .stages = nullptr};                \
    extern "C" {                                                                           \
    extern const struct variant symbol;                                                    \
    const struct variant symbol = {.platform = "cuda",                                     \
                                   .threaded = false,                                      \
                                   .traits = &symbol##_traits,                             \
                                   .probe = device_batch_probe,                            \
                                   .setup = bat_batch<step>::setup,                        \
                                   .run = bat_batch<step>::run,                            \
                                   .fetch = bat_batch<step>::fetch,                        \
                                   .teardown = bat_batch<step>::teardown};                 \
    }

#endif
