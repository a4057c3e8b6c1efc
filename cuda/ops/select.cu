/* Runs between the passes: drops duplicates, lists the kept rows, and computes the arguments of the second
 * pass. */
#include "common/cub.cuh"
#include "ops/write.cuh"

/* Lists the rows with kept[i] = 1. Stores their number in words->kept. */
static cudaError_t list_rows(struct gpu_ops *gpu, void *scratch, size_t *scratch_bytes)
{
    return list_flagged(scratch, scratch_bytes, gpu->arrays.kept, gpu->arrays.rows, &gpu->arrays.words->kept,
                        static_cast<int64_t>(gpu->ops->count), gpu->compute);
}

/* Sorts `count` listed rows by their hashes. Rows with equal hashes stay in order. */
static cudaError_t sort_rows(struct gpu_ops *gpu, uint64_t count, void *scratch, size_t *scratch_bytes)
{
    return sort_pairs(scratch, scratch_bytes, gpu->sorted_hashes[0], gpu->sorted_hashes[1], gpu->arrays.rows,
                      gpu->sorted_rows, static_cast<int64_t>(count), 64, gpu->compute);
}

enum status gpu_select_plan(struct gpu_ops *gpu)
{
    size_t list_bytes = 0, sort_bytes = 0;
    bool dedup = gpu->ops->steps[OPS_DEDUP];
    gpu->scratch_bytes = 0;
    if (gpu->lists && (dedup || !gpu->steps->fused))
        CUDA_TRY(list_rows(gpu, NULL, &list_bytes));
    if (dedup)
        CUDA_TRY(sort_rows(gpu, gpu->ops->count, NULL, &sort_bytes));
    gpu->scratch_bytes = list_bytes > sort_bytes ? list_bytes : sort_bytes;
    return STATUS_OK;
}

static enum status list_kept(struct gpu_ops *gpu)
{
    size_t bytes = gpu->scratch_bytes;
    if (gpu->ops->count > 0)
        CUDA_TRY(list_rows(gpu, gpu->scratch, &bytes));
    TRY(gpu_fetch_words(gpu));
    return STATUS_OK;
}

static __global__ void __launch_bounds__(BLOCK_THREADS)
    list_hashes(const uint32_t *rows, const uint64_t *row_hashes, uint64_t count, uint64_t *hashes)
{
    for (uint64_t k = blockIdx.x * BLOCK_THREADS + threadIdx.x; k < count; k += gridDim.x * BLOCK_THREADS)
        hashes[k] = row_hashes[rows[k]];
}

/* Keeps only the first of consecutive rows with equal hashes. */
static __global__ void __launch_bounds__(BLOCK_THREADS)
    drop_equal(const uint64_t *hashes, const uint32_t *rows, uint64_t count, uint8_t *kept)
{
    for (uint64_t k = blockIdx.x * BLOCK_THREADS + threadIdx.x + 1; k < count; k += gridDim.x * BLOCK_THREADS)
        if (hashes[k] == hashes[k - 1])
            kept[rows[k]] = 0;
}

static enum status drop_duplicates(struct gpu_ops *gpu)
{
    size_t bytes = gpu->scratch_bytes;
    unsigned blocks;
    TRY(list_kept(gpu));
    uint64_t count = gpu->host_words->kept;
    if (count == 0)
        return STATUS_OK;
    TRY(grid_for(gpu, list_hashes, (count + WARP_LANES - 1) / WARP_LANES, &blocks));
    list_hashes<<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->arrays.rows, gpu->arrays.row_hashes, count,
                                                            gpu->sorted_hashes[0]);
    CUDA_TRY_LAUNCH("list_hashes");
    CUDA_TRY(sort_rows(gpu, count, gpu->scratch, &bytes));
    drop_equal<<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->sorted_hashes[1], gpu->sorted_rows, count,
                                                           gpu->arrays.kept);
    CUDA_TRY_LAUNCH("drop_equal");
    return gpu_step_done(gpu, OPS_DEDUP);
}

static __global__ void __launch_bounds__(BLOCK_THREADS)
    find_largest(const __grid_constant__ struct gpu_job job)
{
    uint32_t largest = 0;
    for (uint64_t j = blockIdx.x * BLOCK_THREADS + threadIdx.x; j < job.outputs;
         j += gridDim.x * BLOCK_THREADS)
        largest = max(largest, job.arrays.row_largest[source_of(job, j)]);
    largest = __reduce_max_sync(ALL_LANES, largest);
    if (threadIdx.x % WARP_LANES == 0)
        atomicMax(&job.arrays.words->largest, largest);
}

static enum status scale_tensor(struct gpu_ops *gpu)
{
    unsigned blocks;
    if (gpu->job.outputs == 0)
        return STATUS_OK;
    TRY(grid_for(gpu, find_largest, (gpu->job.outputs + WARP_LANES - 1) / WARP_LANES, &blocks));
    find_largest<<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->job);
    CUDA_TRY_LAUNCH("find_largest");
    TRY(gpu_fetch_words(gpu));
    gpu->summary.tensor_scale = gpu->job.format.tensor_scale = nvfp4_tensor_scale(gpu->host_words->largest);
    return STATUS_OK;
}

enum status gpu_select(struct gpu_ops *gpu)
{
    const struct ops *ops = gpu->ops;
    struct gpu_job *job = &gpu->job;
    uint64_t kept = ops->count;
    if (ops->steps[OPS_DEDUP])
        TRY(drop_duplicates(gpu));
    if (gpu->lists) {
        if (ops->steps[OPS_DEDUP] || !gpu->steps->fused)
            TRY(list_kept(gpu));
        else
            TRY(gpu_fetch_words(gpu));
        kept = gpu->host_words->kept;
        TRY(gpu_step_done(gpu, OPS_COMPACT));
    }
    job->candidates = kept;
    job->outputs = ops_outputs(ops, kept);
    if (job->permutes)
        job->draw = ops_draw(ops, gpu->summary.number, kept);
    return gpu->scaled ? scale_tensor(gpu) : STATUS_OK;
}
