/* The fp32 GEMM kernel for training and inference. Every convolution and every linear layer, forward and
 * backward, is a GEMM:
 *
 *     out[row][column] = sum over k of left(row, k) * right(column, k)
 *
 * These GEMMs differ only in the sources of the two operands and the destination of the sums (operands.cuh).
 * A warp computes 32 x 64 sums. A thread keeps 8 x 8 of them in registers. For each k, a thread reads 16
 * floats from shared memory and does 64 multiply-adds. The DOWN x ACROSS warps of a block share one tile of
 * each operand, TILE_DEPTH deep. The next tiles are loaded while the current tiles are multiplied.
 *
 * If there are few tiles and the sums are long, each sum is split into slices (split-k). slices_kernel adds
 * the slices in a fixed order, so the result does not depend on the order in which blocks run. */
#ifndef FDSL_CUDA_TRAIN_MULTIPLY_CUH
#define FDSL_CUDA_TRAIN_MULTIPLY_CUH

#include "common/check.cuh"
#include "train/operands.cuh"

#define TILE_DEPTH 8
#define WARP_ROWS  32
#define WARP_SUMS  64 /* columns per warp */

/* WARPS_HELD is the number of warps per multiprocessor at 128 registers per thread. FULL_WARPS is the number
 * of warps that fill an H200. Both are constants, not device queries, so that every GPU uses the same slices
 * and gets the same rounding. */
#define WARPS_HELD 16
#define FULL_WARPS (132 * WARPS_HELD)
#define SLICES_MIN 4 /* with fewer slices, adding them takes longer than the split saves */
#define SLICES_MAX 1024
#define SLICE_MIN  32 /* minimum number of terms per slice */

/* Size in floats of the buffer for slices: one tile of 32 x 64 sums for each of FULL_WARPS warps. */
#define WORKSPACE_VALUES ((size_t)FULL_WARPS * WARP_ROWS * WARP_SUMS)

struct gemm {
    uint32_t rows, columns, depth;
    uint32_t slice; /* terms per slice; a multiple of TILE_DEPTH */
};

/* Stores the sums of this block's slice. */
static __device__ __forceinline__ matrix_out<float> slice_out(float *slices, const struct gemm &size)
{
    return {.values = slices + (size_t)blockIdx.z * size.rows * size.columns, .stride = size.columns};
}

/* ---- Global to shared memory ---- */

/* One thread's part of loading tiles of EXTENT lines, TILE_DEPTH deep. Adjacent threads read adjacent memory:
 * along the depth (8 values per line, the 32 bytes of a sector), or across the lines. The results of
 * line_at() are kept for all tiles. Lines past the end are read as the last line; their sums are not
 * stored. */
template <class Operand, int EXTENT, int THREADS> struct loader {
    static constexpr int COUNT = EXTENT * TILE_DEPTH / THREADS;
    static constexpr int LINES = Operand::ALONG_DEPTH ? COUNT : EXTENT > THREADS ? EXTENT / THREADS : 1;
    static constexpr int POINTS = COUNT / LINES;
    static_assert(THREADS % TILE_DEPTH == 0 && (EXTENT % THREADS == 0 || THREADS % EXTENT == 0));

    Operand operand;
    typename Operand::line lines[LINES];
    float values[LINES][POINTS];

    static __device__ uint32_t line(int i)
    {
        if (Operand::ALONG_DEPTH)
            return threadIdx.x / TILE_DEPTH + i * (THREADS / TILE_DEPTH);
        return threadIdx.x % EXTENT + i * THREADS;
    }

    static __device__ uint32_t point(int j)
    {
        if (Operand::ALONG_DEPTH)
            return threadIdx.x % TILE_DEPTH;
        return EXTENT >= THREADS ? j : threadIdx.x / EXTENT + j * (THREADS / EXTENT);
    }

    __device__ loader(const Operand &from, uint32_t first, uint32_t count) : operand(from)
    {
#pragma unroll
        for (int i = 0; i < LINES; i++)
            lines[i] = operand.line_at(min(first + line(i), count - 1));
    }

    /* Starts to read the tile at `k` into registers. Elements at or past `end` are 0. */
    template <bool WHOLE> __device__ void read(uint32_t k, uint32_t end)
    {
#pragma unroll
        for (int j = 0; j < POINTS; j++) {
            bool inside = WHOLE || k + point(j) < end;
            typename Operand::point at = operand.point_at(inside ? k + point(j) : k);
#pragma unroll
            for (int i = 0; i < LINES; i++)
                values[i][j] = inside ? operand.value(lines[i], at) : 0;
        }
    }

    /* Calls read(), without bounds checks if the tile is whole. Nearly all tiles are. */
    __device__ void fetch(uint32_t k, uint32_t end)
    {
        if (k + TILE_DEPTH <= end)
            read<true>(k, end);
        else
            read<false>(k, end);
    }

    /* Writes the tile to shared memory. Rows are padded by 4 floats, so that the 32 words of a warp are in 32
     * banks. */
    __device__ void store(float (*tile)[EXTENT + 4]) const
    {
#pragma unroll
        for (int j = 0; j < POINTS; j++)
#pragma unroll
            for (int i = 0; i < LINES; i++)
                tile[point(j)][line(i)] = values[i][j];
    }
};

/* ---- GEMM ---- */

/* A thread's 8 x 8 sums are four squares of 4 x 4, half a warp tile apart. Each access to shared memory and
 * each store is therefore 16 bytes wide, and neighbouring threads access adjacent 16 bytes.
 *
 * A warp is 4 threads down and 8 across. When each lane reads 16 bytes, shared memory needs two passes if
 * lanes that differ in bit 0 (or in bit 1) read the same address. Otherwise it needs four passes. Bit 0
 * therefore selects the column and bit 1 the row: each operand is then read in two passes. */
static __device__ __forceinline__ uint32_t lane_down(uint32_t lane)
{
    return (lane >> 1 & 1) | (lane >> 4) << 1;
}

static __device__ __forceinline__ uint32_t lane_across(uint32_t lane)
{
    return (lane & 1) | (lane >> 2 & 3) << 1;
}

static __device__ __forceinline__ uint32_t sum_row(int i)
{
    return i / 4 * (WARP_ROWS / 2) + i % 4;
}

static __device__ __forceinline__ void read_halves(float values[8], const float *from, int apart)
{
    *reinterpret_cast<float4 *>(values) = *reinterpret_cast<const float4 *>(from);
    *reinterpret_cast<float4 *>(values + 4) = *reinterpret_cast<const float4 *>(from + apart);
}

/* Adds the products of one tile to a thread's sums. */
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void add_tile(float sums[8][8], const float (*left)[ROWS],
                                                const float (*right)[COLUMNS], uint32_t row, uint32_t column)
{
#pragma unroll
    for (int k = 0; k < TILE_DEPTH; k++) {
        float a[8], b[8];
        read_halves(a, &left[k][row], WARP_ROWS / 2);
        read_halves(b, &right[k][column], WARP_SUMS / 2);
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
}

/* Stores a thread's sums. `row` and `column` are the position of its first sum. */
template <class Into>
static __device__ __forceinline__ void put_sums(const Into &into, const struct gemm &size,
                                                const float sums[8][8], uint32_t row, uint32_t column)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (row + sum_row(i) < size.rows)
                into.put(row + sum_row(i), column + half * (WARP_SUMS / 2), size.columns, &sums[i][4 * half]);
}

/* Returns the number of blocks per multiprocessor that __launch_bounds__ requests. Blocks of one warp need
 * more than 128 registers per thread, because the warp loads its tiles alone. Blocks of four warps also need
 * more, because their tiles are large. For both, lower occupancy costs less time than spilling. */
static constexpr int blocks_held(int warps)
{
    return (warps == 2 ? WARPS_HELD : WARPS_HELD * 3 / 4) / warps;
}

template <int DOWN, int ACROSS, class Left, class Right, class Into>
static __global__ void __launch_bounds__(32 * DOWN * ACROSS, blocks_held(DOWN *ACROSS))
    multiply_kernel(const Left left, const Right right, const Into into, float *slices,
                    const struct gemm size)
{
    constexpr int ROWS = WARP_ROWS * DOWN, COLUMNS = WARP_SUMS * ACROSS, THREADS = 32 * DOWN * ACROSS;
    __shared__ __align__(16) float lefts[2][TILE_DEPTH][ROWS + 4], rights[2][TILE_DEPTH][COLUMNS + 4];
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t row = warp / ACROSS * WARP_ROWS + lane_down(lane) * 4;
    uint32_t column = warp % ACROSS * WARP_SUMS + lane_across(lane) * 4;
    uint32_t begin = blockIdx.z * size.slice, end = min(begin + size.slice, size.depth);
    loader<Left, ROWS, THREADS> from_left(left, blockIdx.y * ROWS, size.rows);
    loader<Right, COLUMNS, THREADS> from_right(right, blockIdx.x * COLUMNS, size.columns);
    float sums[8][8] = {};

    from_left.fetch(begin, end);
    from_right.fetch(begin, end);
    from_left.store(lefts[0]);
    from_right.store(rights[0]);
    __syncthreads();
    for (uint32_t k = begin, now = 0; k < end; k += TILE_DEPTH, now ^= 1) {
        bool more = k + TILE_DEPTH < end;
        if (more) {
            from_left.fetch(k + TILE_DEPTH, end);
            from_right.fetch(k + TILE_DEPTH, end);
        }
        add_tile(sums, lefts[now], rights[now], row, column);
        if (more) {
            from_left.store(lefts[now ^ 1]);
            from_right.store(rights[now ^ 1]);
        }
        __syncthreads();
    }

    row += blockIdx.y * ROWS;
    column += blockIdx.x * COLUMNS;
    if (gridDim.z == 1)
        return put_sums(into, size, sums, row, column);
    put_sums(slice_out(slices, size), size, sums, row, column);
}

/* ---- Adding the slices ---- */

#define ADDERS 16 /* threads per sum */

/* Thread (x, y) adds slices y, y + ADDERS, ... of sum x, with eight loads in flight. Then thread (x, 0) adds
 * the partial sums of threads (x, 0), (x, 1), ... and stores the result. */
template <class Into>
static __global__ void slices_kernel(const float *slices, uint32_t count, const Into into,
                                     const struct gemm size)
{
    __shared__ float parts[ADDERS][32];
    uint32_t values = size.rows * size.columns, at = blockIdx.x * 32 + threadIdx.x;
    uint32_t end = at < values ? count : 0;
    float sum = 0;
#pragma unroll 8
    for (uint32_t z = threadIdx.y; z < end; z += ADDERS)
        sum += slices[(size_t)z * values + at];
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || at >= values)
        return;
    for (uint32_t y = 1; y < ADDERS; y++)
        sum += parts[y][threadIdx.x];
    into.put_one(at / size.columns, at % size.columns, sum);
}

/* Launches slices_kernel for `count` slices of size.rows x size.columns sums. */
template <class Into>
static enum status add_slices(cudaStream_t stream, const float *slices, uint32_t count, const Into &into,
                              const struct gemm &size)
{
    uint32_t blocks = (size.rows * size.columns - 1) / 32 + 1;
    slices_kernel<<<blocks, dim3(32, ADDERS), 0, stream>>>(slices, count, into, size);
    return CUDA_LAUNCHED("slices_kernel");
}

/* ---- The launch ---- */

static inline uint32_t round_up(uint32_t count, uint32_t unit)
{
    return (count + unit - 1) / unit * unit;
}

/* Returns the number of terms per slice, a multiple of TILE_DEPTH. The GEMM has `tiles` tiles, and `blocks`
 * blocks fill the GPU. Without a split, one slice covers the whole depth. */
static inline uint32_t slice_of(uint32_t depth, uint64_t tiles, uint32_t blocks)
{
    uint64_t slices = min(min(blocks / tiles, (uint64_t)depth / SLICE_MIN), (uint64_t)SLICES_MAX);
    return round_up(slices < SLICES_MIN ? depth : (depth - 1) / (uint32_t)slices + 1, TILE_DEPTH);
}

/* Launches the GEMM with blocks of DOWN x ACROSS warps: tiles of 32 * DOWN rows and 64 * ACROSS columns.
 * `workspace` has room for WORKSPACE_VALUES floats. */
template <int DOWN, int ACROSS, class Left, class Right, class Into>
static enum status multiply(cudaStream_t stream, float *workspace, const Left &left, const Right &right,
                            const Into &into, struct gemm size)
{
    dim3 grid((size.columns - 1) / (WARP_SUMS * ACROSS) + 1, (size.rows - 1) / (WARP_ROWS * DOWN) + 1);
    size.slice = slice_of(size.depth, (uint64_t)grid.x * grid.y, FULL_WARPS / (DOWN * ACROSS));
    grid.z = (size.depth - 1) / size.slice + 1;
    multiply_kernel<DOWN, ACROSS>
        <<<grid, 32 * DOWN * ACROSS, 0, stream>>>(left, right, into, workspace, size);
    CUDA_TRY_LAUNCH("multiply_kernel");
    return grid.z == 1 ? STATUS_OK : add_slices(stream, workspace, grid.z, into, size);
}

#endif
