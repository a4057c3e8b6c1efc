/* `ops-cuda`: one kernel per step. Each kernel reads the rows that it needs from device memory. */
#include "machine/device.h"
#include "ops/write.cuh"

#define LOADS 6 /* loads in flight per lane */

template <enum dtype TYPE, enum row_kind KIND>
static __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    mask_rows(const __grid_constant__ struct gpu_job job, const struct chunk chunk)
{
    uint32_t kept = 0;
    for (uint64_t k = WARP_OF_GRID; k < chunk.count; k += WARPS_OF_GRID) {
        struct window<TYPE, LOADS> window;
        float sum = warp_square_sum<KIND>(window, chunk_row(job, chunk, k), job.format.columns);
        bool valid = ops_in_bounds(sum, job.norm_min, job.norm_max);
        kept += valid;
        if (threadIdx.x % WARP_LANES == 0)
            job.arrays.kept[chunk.first + k] = valid;
    }
    if (kept && threadIdx.x % WARP_LANES == 0)
        atomicAdd((unsigned long long *)&job.arrays.words->kept, kept);
}

/* Hashes the kept rows. */
template <enum dtype TYPE, enum row_kind KIND>
static __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    hash_rows(const __grid_constant__ struct gpu_job job, const struct chunk chunk)
{
    __shared__ struct hash_keys keys;
    if (threadIdx.x < WARP_LANES)
        hash_keys_begin(keys);
    __syncthreads();
    for (uint64_t k = WARP_OF_GRID; k < chunk.count; k += WARPS_OF_GRID) {
        if (!job.arrays.kept[chunk.first + k])
            continue;
        struct window<TYPE, LOADS> window;
        uint64_t hash = warp_hash<KIND>(keys, window, chunk_row(job, chunk, k), job.row_bytes);
        if (threadIdx.x % WARP_LANES == 0)
            job.arrays.row_hashes[chunk.first + k] = hash;
    }
}

template <enum dtype TYPE, enum row_kind KIND>
static __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    measure_rows(const __grid_constant__ struct gpu_job job, const struct chunk chunk)
{
    for (uint64_t k = WARP_OF_GRID; k < chunk.count; k += WARPS_OF_GRID) {
        uint32_t largest = warp_largest<TYPE>(chunk_row(job, chunk, k), job.format.columns);
        if (threadIdx.x % WARP_LANES == 0)
            job.arrays.row_largest[chunk.first + k] = largest;
    }
}

template <enum dtype TYPE, enum row_kind KIND>
static enum status read_rows(struct gpu_ops *gpu, const struct chunk *chunk)
{
    const bool *steps = gpu->ops->steps;
    unsigned blocks;
    if (steps[OPS_MASK]) {
        TRY(grid_for(gpu, mask_rows<TYPE, KIND>, chunk->count, &blocks));
        mask_rows<TYPE, KIND><<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->job, *chunk);
        CUDA_TRY_LAUNCH("mask_rows");
        TRY(gpu_step_done(gpu, OPS_MASK));
    }
    if (steps[OPS_DEDUP]) {
        if (!steps[OPS_MASK])
            CUDA_TRY(cudaMemsetAsync(gpu->arrays.kept + chunk->first, 1, chunk->count, gpu->compute));
        TRY(grid_for(gpu, hash_rows<TYPE, KIND>, chunk->count, &blocks));
        hash_rows<TYPE, KIND><<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->job, *chunk);
        CUDA_TRY_LAUNCH("hash_rows");
        TRY(gpu_step_done(gpu, OPS_DEDUP));
    }
    if (gpu->scaled) {
        TRY(grid_for(gpu, measure_rows<TYPE, KIND>, chunk->count, &blocks));
        measure_rows<TYPE, KIND><<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->job, *chunk);
        CUDA_TRY_LAUNCH("measure_rows");
        TRY(gpu_step_done(gpu, OPS_CONVERT));
    }
    return STATUS_OK;
}

enum status gpu_read_steps(struct gpu_ops *gpu, const struct chunk *chunk)
{
    return for_rows(
        gpu->job, [&]<enum dtype TYPE, enum row_kind KIND, bool>() {
            return read_rows<TYPE, KIND>(gpu, chunk);
        });
}

/* Writes each result with a separate kernel. Adds the kernel's time to the step that produces the result, as
 * `ops-naive` does. */
static enum status steps_write(struct gpu_ops *gpu, const struct chunk *chunk)
{
    const bool *steps = gpu->ops->steps;
    enum ops_step ordered = steps[OPS_PERMUTE] ? OPS_PERMUTE : OPS_COMPACT;
    struct gpu_arrays values = gpu->arrays, hashes = gpu->arrays;
    values.order = hashes.order = NULL;
    values.hashes = NULL;
    hashes.values = NULL;
    if (gpu->arrays.order && chunk->first == 0) {
        TRY(gpu_write_order(gpu));
        TRY(gpu_step_done(gpu, ordered));
    }
    if (gpu->arrays.values) {
        TRY(gpu_write(gpu, chunk, &values));
        TRY(gpu_step_done(gpu, steps[OPS_CONVERT] ? OPS_CONVERT : ordered));
    }
    if (gpu->arrays.hashes) {
        TRY(gpu_write(gpu, chunk, &hashes));
        TRY(gpu_step_done(gpu, OPS_HASH));
    }
    return STATUS_OK;
}

static const struct gpu_steps steps = {.fused = false, .read = gpu_read_steps, .write = steps_write};

static enum status steps_setup(const struct resources *resources, const void *input, void **state)
{
    return gpu_ops_open(resources, input, &steps, state);
}

extern "C" const struct variant variant_ops_cuda = {.platform = "cuda",
                                                    .wants_own_architecture = true,
                                                    .traits = &gpu_ops_traits,
                                                    .probe = device_probe_variant,
                                                    .setup = steps_setup,
                                                    .run = gpu_ops_run,
                                                    .fetch = gpu_ops_fetch,
                                                    .teardown = gpu_ops_teardown};
