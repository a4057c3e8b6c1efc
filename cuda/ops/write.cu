/* Writes output rows. If all rows are in device memory, each warp gathers: it computes which input row
 * becomes its output row, and reads that row. Otherwise each warp scatters: it reads a row of a chunk and
 * computes the index of the output row. */
#include "ops/write.cuh"

#define LOADS 6 /* loads in flight per lane */

/* Sets `*at` to the number of kept rows before row `i`. Returns false if the row is not kept. */
static __device__ __forceinline__ bool find_row(const struct gpu_job &job, uint64_t i, uint64_t *at)
{
    const uint32_t *rows = job.arrays.rows;
    uint64_t begin = 0, end = job.candidates;
    *at = i;
    if (!rows)
        return true;
    while (begin < end) {
        uint64_t middle = (begin + end) / 2;
        if (rows[middle] < i)
            begin = middle + 1;
        else
            end = middle;
    }
    *at = begin;
    return begin < job.candidates && rows[begin] == i;
}

/* Sets `*j` to the output row that row `i` of the run becomes. Returns false if there is none. */
static __device__ __forceinline__ bool output_of(const struct gpu_job &job, uint64_t i, uint64_t *j)
{
    uint64_t at;
    if (!find_row(job, i, &at))
        return false;
    *j = job.permutes ? permutation_inverse(&job.draw.permutation, at) - job.draw.first : at;
    return *j < job.outputs;
}

template <enum dtype TYPE, enum row_kind KIND, bool FP4>
static __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    write_rows(const __grid_constant__ struct gpu_job job, const struct chunk chunk, bool scatter,
               uint64_t count)
{
    const struct gpu_arrays &arrays = job.arrays;
    __shared__ struct hash_keys keys;
    if (arrays.hashes && threadIdx.x < WARP_LANES)
        hash_keys_begin(keys);
    __syncthreads();
    for (uint64_t m = WARP_OF_GRID; m < count; m += WARPS_OF_GRID) {
        uint64_t i = chunk.first + m, j = m;
        if (!scatter)
            i = source_of(job, j);
        else if (!output_of(job, i, &j))
            continue;
        const uint8_t *row = chunk_row(job, chunk, i - chunk.first);
        struct window<TYPE, LOADS> window;
        if (arrays.values) {
            warp_convert<KIND, FP4>(job.format, window, row, arrays.values + j * job.value_bytes,
                                    arrays.scales + j * job.scale_bytes);
            warp_pad(arrays.values + j * job.value_bytes, job.value_bytes, job.pad_bytes);
        }
        uint64_t hash = 0;
        if (arrays.hashes)
            hash =
                arrays.row_hashes ? arrays.row_hashes[i] : warp_hash<KIND>(keys, window, row, job.row_bytes);
        if (threadIdx.x % WARP_LANES == 0) {
            if (arrays.hashes)
                arrays.hashes[j] = hash;
            if (arrays.order)
                arrays.order[j] = number_of(job, i);
        }
    }
}

enum status gpu_write(struct gpu_ops *gpu, const struct chunk *chunk, const struct gpu_arrays *arrays)
{
    struct gpu_job job = gpu->job;
    bool scatter = !gpu->resident;
    uint64_t count = scatter ? chunk->count : job.outputs;
    job.arrays = *arrays;
    if (!scatter && !arrays->hashes && gpu_gather_fits(&job, gpu->bulk))
        return gpu_gather_bulk(&job, chunk, gpu->compute);
    return for_rows(
        job, [&]<enum dtype TYPE, enum row_kind KIND, bool FP4>() {
            unsigned blocks;
            TRY(grid_for(gpu, write_rows<TYPE, KIND, FP4>, count, &blocks));
            write_rows<TYPE, KIND, FP4>
                <<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(job, *chunk, scatter, count);
            CUDA_TRY_LAUNCH("write_rows");
            return STATUS_OK;
        });
}

static __global__ void __launch_bounds__(BLOCK_THREADS)
    write_order(const __grid_constant__ struct gpu_job job)
{
    for (uint64_t j = blockIdx.x * BLOCK_THREADS + threadIdx.x; j < job.outputs;
         j += gridDim.x * BLOCK_THREADS)
        job.arrays.order[j] = number_of(job, source_of(job, j));
}

enum status gpu_write_order(struct gpu_ops *gpu)
{
    unsigned blocks;
    TRY(grid_for(gpu, write_order, (gpu->job.outputs + WARP_LANES - 1) / WARP_LANES, &blocks));
    write_order<<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->job);
    CUDA_TRY_LAUNCH("write_order");
    return STATUS_OK;
}
