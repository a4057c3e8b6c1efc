/* Writes output rows. If all rows are in device memory, each warp gathers: it computes which input row
 * becomes its output row, and reads that row. Otherwise each warp scatters: it reads a row of a chunk and
 * computes the index of the output row. */
#include "ops/barrier.cuh"
#include "ops/write.cuh"

#define GATHER_BYTES     24576 /* bytes of rows per block of gather_rows(), for 1 to 32 rows */
#define GATHER_MAX_BYTES 49024 /* maximum bytes per row; a row and the barrier fit in 48 KiB */
#define LOADS            6     /* loads in flight per lane */

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
        const uint8_t *row = chunk_row(chunk, i - chunk.first, job.row_bytes);
        struct window<TYPE, LOADS> window;
        if (arrays.values)
            warp_convert<KIND, FP4>(job.format, window, row, arrays.values + j * job.value_bytes,
                                    arrays.scales + j * job.scale_bytes);
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

/* Gathers rows that are only copied; one warp per block. Lane l finds row l of the block's output rows and
 * begins to copy it to shared memory. When all rows have arrived, one copy writes them to the output. The
 * kernel needs few instructions and registers, so a multiprocessor soon has many copies in flight. */
static __global__ void __launch_bounds__(WARP_LANES)
    gather_rows(const __grid_constant__ struct gpu_job job, const struct chunk chunk, uint32_t block_rows)
{
    extern __shared__ __align__(128) uint8_t rows[];
    __shared__ uint64_t loaded;
    uint64_t first = (uint64_t)blockIdx.x * block_rows, j = first + threadIdx.x, left = job.outputs - first;
    uint32_t count = left < block_rows ? (uint32_t)left : block_rows;
    if (threadIdx.x == 0) {
        barrier_init(&loaded, count);
        bulk_fence();
    }
    __syncwarp();
    if (threadIdx.x < count) {
        uint64_t i = source_of(job, j);
        bulk_load(rows + threadIdx.x * job.row_bytes, chunk_row(chunk, i, job.row_bytes), job.row_bytes,
                  &loaded);
        if (job.arrays.order)
            job.arrays.order[j] = number_of(job, i);
    }
    if (threadIdx.x != 0)
        return;
    barrier_wait(&loaded, 0);
    bulk_store(job.arrays.values + first * job.value_bytes, rows, count * job.row_bytes);
    bulk_store_wait();
}

/* Returns whether gather_rows() can write the output rows. */
static bool gathers(const struct gpu_ops *gpu, const struct gpu_job *job)
{
    return gpu->bulk && gpu->resident && !job->arrays.hashes && job->row_bytes % 16 == 0 &&
           ops_copies(job->format.from, job->format.to) && job->row_bytes <= GATHER_MAX_BYTES;
}

static enum status gather(struct gpu_ops *gpu, const struct gpu_job &job, const struct chunk &chunk)
{
    uint32_t block_rows = GATHER_BYTES / job.row_bytes;
    block_rows = block_rows < 1 ? 1 : block_rows < WARP_LANES ? block_rows : WARP_LANES;
    unsigned blocks = (unsigned)((job.outputs + block_rows - 1) / block_rows);
    gather_rows<<<blocks, WARP_LANES, block_rows * job.row_bytes, gpu->compute>>>(job, chunk, block_rows);
    CUDA_TRY_LAUNCH("gather_rows");
    return STATUS_OK;
}

enum status gpu_write(struct gpu_ops *gpu, const struct chunk *chunk, const struct gpu_arrays *arrays)
{
    struct gpu_job job = gpu->job;
    bool scatter = !gpu->resident;
    uint64_t count = scatter ? chunk->count : job.outputs;
    job.arrays = *arrays;
    if (gathers(gpu, &job))
        return gather(gpu, job, *chunk);
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
