/* Helpers for kernels that process one row per warp, and for their launches. */
#ifndef FDSL_CUDA_OPS_WRITE_CUH
#define FDSL_CUDA_OPS_WRITE_CUH

#include "ops/gpu.cuh"
#include "ops/row.cuh"

#define WARP_OF_GRID  ((blockIdx.x * BLOCK_THREADS + threadIdx.x) / WARP_LANES)
#define WARPS_OF_GRID (gridDim.x * BLOCK_WARPS)

/* Returns row `k` of a chunk. */
static __device__ __forceinline__ const uint8_t *chunk_row(const struct gpu_job &job,
                                                           const struct chunk &chunk, uint64_t k)
{
    uint64_t at = k + chunk.shift;
    return chunk.rows + (at < chunk.count ? at : at - chunk.count) * job.row_stride;
}

/* Writes the zeros at the end of an output row. */
static __device__ __forceinline__ void warp_pad(uint8_t *values, uint64_t value_bytes, uint32_t pad_bytes)
{
    uint16_t *zeros = reinterpret_cast<uint16_t *>(values + value_bytes - pad_bytes);
    for (uint32_t i = threadIdx.x % WARP_LANES; i < pad_bytes / 2; i += WARP_LANES)
        zeros[i] = 0;
}

/* Returns the index in the run of the row that becomes output row `j`. `draw` is job.draw, or a copy of it.
 */
static __device__ __forceinline__ uint64_t source_by(const struct gpu_job &job, const struct ops_draw &draw,
                                                     uint64_t j)
{
    uint64_t at = job.permutes ? ops_drawn(&draw, j) : j;
    return job.arrays.rows ? job.arrays.rows[at] : at;
}

static __device__ __forceinline__ uint64_t source_of(const struct gpu_job &job, uint64_t j)
{
    return source_by(job, job.draw, j);
}

/* Returns the index in the set of row `i` of the run. */
static __device__ __forceinline__ uint64_t number_of(const struct gpu_job &job, uint64_t i)
{
    uint64_t position = i + job.shift;
    return job.first + (position < job.count ? position : position - job.count);
}

/* for_rows() calls launch.operator()<TYPE, KIND, FP4>(). The arguments are the stored type and the kind of
 * the rows, and FP4 of warp_convert() (row.cuh). */
template <enum dtype TYPE, bool FP4, class LAUNCH>
static enum status for_rows_of(const struct gpu_job &job, LAUNCH launch)
{
    enum row_kind kind = job.unaligned ? ROW_ANY : row_kind_of(job.row_bytes, job.format.columns);
    if (kind == ROW_ANY)
        return launch.template operator()<TYPE, ROW_ANY, false>();
    if (kind == ROW_ALIGNED)
        return launch.template operator()<TYPE, ROW_ALIGNED, FP4>();
    return launch.template operator()<TYPE, ROW_WHOLE, FP4>();
}

template <enum dtype TYPE, class LAUNCH>
static enum status for_rows_to(const struct gpu_job &job, LAUNCH launch)
{
    if (job.format.to == OPS_NVFP4 || job.format.to == OPS_MXFP4)
        return for_rows_of<TYPE, true>(job, launch);
    return for_rows_of<TYPE, false>(job, launch);
}

template <class LAUNCH> static enum status for_rows(const struct gpu_job &job, LAUNCH launch)
{
    if (job.format.from == DTYPE_F32)
        return for_rows_to<DTYPE_F32>(job, launch);
    if (job.format.from == DTYPE_F16)
        return for_rows_to<DTYPE_F16>(job, launch);
    return for_rows_to<DTYPE_BF16>(job, launch);
}

/* Sets `*blocks` for `count` rows: as many blocks as the device runs concurrently, but at most one warp per
 * row. */
template <class KERNEL>
static enum status grid_for(const struct gpu_ops *gpu, KERNEL kernel, uint64_t count, unsigned *blocks)
{
    int per_multiprocessor;
    CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, BLOCK_THREADS, 0));
    uint64_t most = (uint64_t)per_multiprocessor * (uint64_t)gpu->multiprocessors;
    uint64_t wanted = (count + BLOCK_WARPS - 1) / BLOCK_WARPS;
    *blocks = (unsigned)(wanted < most ? wanted : most);
    return STATUS_OK;
}

#endif
