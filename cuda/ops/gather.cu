/* Gathers rows that are only copied: batches of `ops`, and batches of sets in device memory. The kernels
 * compute which row becomes an output row, so no list of numbers has to be read. */
#include "common/barrier.cuh"
#include "ops/write.cuh"

#define GATHER_BYTES     24576 /* bytes of rows per block of gather_rows(), for 1 to 32 rows */
#define GATHER_MAX_BYTES 49024 /* maximum bytes per row; a row, the draw and the barrier fit in 48 KiB */
#define LOADS            6     /* loads in flight per lane */
#define NAN_HALVES       0x7FFF7FFFu /* NaN in f32, f16 and bf16 */

/* Copies job.draw to shared memory. If job.step is set, computes the draw of that batch. The first warp of a
 * block calls this function. */
static __device__ __forceinline__ void draw_begin(const struct gpu_job &job, struct ops_draw &draw)
{
    uint32_t lane = threadIdx.x;
    const uint32_t *from = reinterpret_cast<const uint32_t *>(&job.draw);
    uint32_t *to = reinterpret_cast<uint32_t *>(&draw);
    for (uint32_t i = lane; i < sizeof draw / sizeof *to; i += WARP_LANES)
        to[i] = from[i];
    __syncwarp();
    if (!job.step)
        return;
    uint64_t step = *job.step, batches = job.candidates / job.outputs, epoch = step / batches;
    if (lane < PERMUTATION_ROUNDS)
        permutation_key(job.seed + epoch, job.candidates, lane, draw.permutation.keys[lane]);
    if (lane == 0)
        draw.first = (step - epoch * batches) * job.outputs;
    __syncwarp();
}

/* Returns the row that becomes output row `j`. */
static __device__ __forceinline__ uint64_t gathered(const struct gpu_job &job, const struct ops_draw &draw,
                                                    uint64_t j)
{
    return job.consecutive ? draw.first + j : source_by(job, draw, j);
}

/* Writes the order and the label of output row `j`, which is row `i`. */
static __device__ __forceinline__ void write_about(const struct gpu_job &job, uint64_t i, uint64_t j)
{
    if (job.arrays.order)
        job.arrays.order[j] = number_of(job, i);
    if (job.arrays.labels)
        job.arrays.labels[j] = i < job.count ? job.arrays.row_labels[i] : -1;
}

/* One warp per block. Lane l finds row l of the block's output rows and begins to copy it to shared memory.
 * When all rows have arrived, one copy writes them to the output. The kernel needs few instructions and
 * registers, so a multiprocessor soon has many copies in flight. */
static __global__ void __launch_bounds__(WARP_LANES)
    gather_rows(const __grid_constant__ struct gpu_job job, const struct chunk chunk, uint32_t block_rows)
{
    extern __shared__ __align__(128) uint8_t rows[];
    __shared__ uint64_t loaded;
    __shared__ struct ops_draw draw;
    uint64_t first = (uint64_t)blockIdx.x * block_rows, j = first + threadIdx.x, left = job.outputs - first;
    uint32_t count = left < block_rows ? (uint32_t)left : block_rows;
    draw_begin(job, draw);
    if (threadIdx.x == 0) {
        barrier_init(&loaded, count);
        bulk_fence();
    }
    __syncwarp();
    if (threadIdx.x < count) {
        uint64_t i = gathered(job, draw, j);
        uint8_t *to = rows + threadIdx.x * job.row_bytes;
        if (i < chunk.count) {
            bulk_load(to, chunk_row(job, chunk, i), job.row_bytes, &loaded);
        } else {
            for (uint32_t at = 0; at < job.row_bytes; at += 4)
                *reinterpret_cast<uint32_t *>(to + at) = NAN_HALVES;
            bulk_fence();
            barrier_arrive(&loaded);
        }
        write_about(job, i, j);
    }
    if (threadIdx.x != 0)
        return;
    barrier_wait(&loaded, 0);
    bulk_store(job.arrays.values + first * job.value_bytes, rows, count * job.row_bytes);
    bulk_store_wait();
}

bool gpu_gather_fits(const struct gpu_job *job, bool bulk)
{
    return bulk && !job->unaligned && job->row_bytes % 16 == 0 && job->row_bytes <= GATHER_MAX_BYTES &&
           job->row_bytes == job->value_bytes && ops_copies(job->format.from, job->format.to);
}

enum status gpu_gather_bulk(const struct gpu_job *job, const struct chunk *chunk, cudaStream_t stream)
{
    uint32_t block_rows = GATHER_BYTES / job->row_bytes;
    block_rows = block_rows < 1 ? 1 : block_rows < WARP_LANES ? block_rows : WARP_LANES;
    unsigned blocks = (unsigned)((job->outputs + block_rows - 1) / block_rows);
    gather_rows<<<blocks, WARP_LANES, block_rows * job->row_bytes, stream>>>(*job, *chunk, block_rows);
    CUDA_TRY_LAUNCH("gather_rows");
    return STATUS_OK;
}

/* ---- Rows of any size and alignment ---- */

/* Copies a row in units. All loads of a lane are in flight together. */
template <class UNIT>
static __device__ __forceinline__ void warp_copy(uint8_t *to, const uint8_t *from, uint32_t bytes)
{
    uint32_t units = bytes / sizeof(UNIT);
    for (uint32_t first = threadIdx.x % WARP_LANES; first < units; first += LOADS * WARP_LANES) {
        UNIT unit[LOADS];
#pragma unroll
        for (uint32_t k = 0; k < LOADS; k++)
            if (first + k * WARP_LANES < units)
                unit[k] = reinterpret_cast<const UNIT *>(from)[first + k * WARP_LANES];
#pragma unroll
        for (uint32_t k = 0; k < LOADS; k++)
            if (first + k * WARP_LANES < units)
                reinterpret_cast<UNIT *>(to)[first + k * WARP_LANES] = unit[k];
    }
}

static __device__ __forceinline__ void copy_row(uint8_t *to, const uint8_t *from, uint32_t bytes,
                                                uint32_t unit)
{
    if (unit == 16)
        warp_copy<uint4>(to, from, bytes);
    else if (unit == 4)
        warp_copy<uint32_t>(to, from, bytes);
    else
        warp_copy<uint16_t>(to, from, bytes);
}

/* One row per warp, copied in units of `unit` bytes. If STAGED is true, rows that are not resident are
 * converted from `staged`. */
template <bool STAGED, enum dtype TYPE, enum row_kind KIND>
static __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    gather_any(const __grid_constant__ struct gpu_job job, const struct chunk chunk,
               const struct gpu_staged staged, uint32_t unit)
{
    __shared__ struct ops_draw draw;
    if (threadIdx.x < WARP_LANES)
        draw_begin(job, draw);
    __syncthreads();
    uint64_t j = (uint64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP_LANES;
    if (j >= job.outputs)
        return;
    uint64_t i = gathered(job, draw, j);
    uint8_t *to = job.arrays.values + j * job.value_bytes;
    if (i < chunk.count) {
        copy_row(to, chunk_row(job, chunk, i), job.row_bytes, unit);
    } else if (STAGED && i < job.candidates) {
        struct window<TYPE, LOADS> window;
        warp_convert<KIND, false>(staged.format, window, staged.rows + j * staged.stride, to, NULL);
        warp_pad(to, job.value_bytes, staged.pad_bytes);
    } else {
        for (uint32_t at = threadIdx.x % WARP_LANES; at < job.row_bytes / 2; at += WARP_LANES)
            reinterpret_cast<uint16_t *>(to)[at] = (uint16_t)NAN_HALVES;
    }
    if (threadIdx.x % WARP_LANES == 0)
        write_about(job, i, j);
}

/* Calls launch.operator()<STAGED, TYPE, KIND>() for the type and the kind of the staged rows. */
template <enum dtype TYPE, class LAUNCH>
static enum status for_staged_of(const struct gpu_staged &staged, bool unaligned, LAUNCH launch)
{
    enum row_kind kind = row_kind_of(staged.row_bytes, staged.format.columns);
    if (unaligned || kind == ROW_ANY)
        return launch.template operator()<true, TYPE, ROW_ANY>();
    if (kind == ROW_ALIGNED)
        return launch.template operator()<true, TYPE, ROW_ALIGNED>();
    return launch.template operator()<true, TYPE, ROW_WHOLE>();
}

template <class LAUNCH>
static enum status for_staged(const struct gpu_staged &staged, bool unaligned, LAUNCH launch)
{
    if (!staged.rows)
        return launch.template operator()<false, DTYPE_F32, ROW_ANY>();
    if (staged.format.from == DTYPE_F32)
        return for_staged_of<DTYPE_F32>(staged, unaligned, launch);
    if (staged.format.from == DTYPE_F16)
        return for_staged_of<DTYPE_F16>(staged, unaligned, launch);
    return for_staged_of<DTYPE_BF16>(staged, unaligned, launch);
}

/* Returns the largest unit of copy_row() that divides all these addresses and sizes. */
static uint32_t copy_unit(const struct gpu_job *job, const struct chunk *chunk)
{
    uint64_t all = (uint64_t)(uintptr_t)chunk->rows | job->row_stride | job->row_bytes | job->value_bytes |
                   (uint64_t)(uintptr_t)job->arrays.values;
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

enum status gpu_gather_any(const struct gpu_job *job, const struct chunk *chunk,
                           const struct gpu_staged *staged, cudaStream_t stream)
{
    unsigned blocks = (unsigned)((job->outputs + BLOCK_WARPS - 1) / BLOCK_WARPS);
    uint32_t unit = copy_unit(job, chunk);
    bool unaligned = ((uint64_t)(uintptr_t)job->arrays.values | job->value_bytes) % 16 != 0;
    return for_staged(
        *staged, unaligned, [&]<bool STAGED, enum dtype TYPE, enum row_kind KIND>() {
            gather_any<STAGED, TYPE, KIND><<<blocks, BLOCK_THREADS, 0, stream>>>(*job, *chunk, *staged, unit);
            CUDA_TRY_LAUNCH("gather_any");
            return STATUS_OK;
        });
}

enum status gpu_gather_load(void)
{
    const struct gpu_staged none = {};
    cudaFuncAttributes attributes;
    CUDA_TRY(cudaFuncGetAttributes(&attributes, gather_rows));
    return for_staged(
        none, true, [&]<bool STAGED, enum dtype TYPE, enum row_kind KIND>() {
            CUDA_TRY(cudaFuncGetAttributes(&attributes, gather_any<STAGED, TYPE, KIND>));
            return STATUS_OK;
        });
}
