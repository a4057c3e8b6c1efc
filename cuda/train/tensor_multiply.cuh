/* multiply.cuh's product on tensor cores: the same operands, the same places for the sums, the same slices,
 *
 *     out[row][column] = sum over k of left(row, k) * right(column, k)
 *
 * with both factors rounded to a format of tensor_formats.cuh on their way into shared memory and sums in
 * fp32. Tensors stay as they are, in fp32: so every layer without products is that of train-cuda, and every
 * size goes.
 *
 * What bounds it is not the multiplying but the reading, a number at a time from wherever an operand finds
 * it, so all is made for that. A thread takes units of 16 bytes: neighbours in the direction that memory does
 * not have, while neighbouring threads read neighbours in memory. A unit is written at once, so a tile lies
 * by lines where memory lies across them, and the other way round; ldmatrix turns it back. */
#ifndef FDSL_CUDA_TRAIN_TENSOR_MULTIPLY_CUH
#define FDSL_CUDA_TRAIN_TENSOR_MULTIPLY_CUH

#include "train/multiply.cuh"
#include "train/tensor_formats.cuh"

#define TENSOR_WARPS_DOWN   2
#define TENSOR_WARPS_ACROSS 2
#define TENSOR_THREADS      (32 * TENSOR_WARPS_DOWN * TENSOR_WARPS_ACROSS)
#define TENSOR_UNITS        4 /* the depth of a tile: 64 bytes */

/* ---- Tiles in shared memory ---- */

/* A tile of EXTENT lines, in units. By lines, a row is a line, TENSOR_UNITS long; by depth, a row is a point
 * of the depth and its units hold neighbouring lines. Rows are longer than they need be, by as much as lets
 * eight of them, or with words four, be read without two lanes in one bank. */
template <class Operand, class Format, int EXTENT> struct tensor_tile {
    static constexpr bool BY_DEPTH = Operand::ALONG_DEPTH;
    static constexpr int UNIT = Format::UNIT, DEPTH = TENSOR_UNITS * UNIT;
    static constexpr int ROW = BY_DEPTH ? EXTENT / UNIT + 8 / UNIT : TENSOR_UNITS + 1; /* in units */
    static constexpr int SIZE = (BY_DEPTH ? DEPTH : EXTENT) * ROW;

    /* What one mma wants of 16 lines from `line` on and two units of depth from `unit` on: word 0 of lines 0
     * to 7 and the first unit, word 1 of lines 8 to 15, words 2 and 3 of the second unit. Such are all of an
     * A, and B of eight columns twice. */
    static __device__ __forceinline__ void fragment(uint32_t word[4], const uint4 *tile, int line, int unit)
    {
        int lane = (int)threadIdx.x % 32;
        if constexpr (!BY_DEPTH)
            mma_load4(word, tile + (line + lane % 16) * ROW + unit + lane / 16);
        else if constexpr (UNIT == 8)
            mma_load4_transposed(word, tile + (unit * 8 + lane % 8 + lane / 16 * 8) * ROW + line / 8 +
                                           lane / 8 % 2);
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                word[i] = reinterpret_cast<const uint32_t *>(tile + (unit * 4 + lane % 4 + i / 2 * 4) *
                                                                        ROW)[line + lane / 4 + i % 2 * 8];
    }
};

/* ---- From memory into tiles ---- */

/* A thread's part of loading. Lines beyond the last read the last one, whose sums nobody stores; points
 * beyond the end are 0. */
template <class Operand, class Format, int EXTENT, bool BY_DEPTH = Operand::ALONG_DEPTH> struct tensor_loader;

/* By lines: the lines of a thread are kept, and a point is found once for all of them. */
template <class Operand, class Format, int EXTENT> struct tensor_loader<Operand, Format, EXTENT, false> {
    static constexpr int UNIT = Format::UNIT, APART = TENSOR_THREADS / TENSOR_UNITS, LINES = EXTENT / APART;
    static constexpr int KEPT = 1; /* lines in shared memory: none */
    static_assert(EXTENT % APART == 0);
    typedef struct tensor_tile<Operand, Format, EXTENT> tile;

    Operand operand;
    typename Operand::line lines[LINES];
    float values[LINES][UNIT];

    __device__ tensor_loader(const Operand &from, uint32_t first, uint32_t count, typename Operand::line *)
        : operand(from)
    {
#pragma unroll
        for (int i = 0; i < LINES; i++)
            lines[i] = operand.line_at(min(first + threadIdx.x % APART + i * APART, count - 1));
    }

    template <bool WHOLE> __device__ __forceinline__ void read(uint32_t k, uint32_t end)
    {
        uint32_t own = k + threadIdx.x / APART * UNIT;
#pragma unroll
        for (int j = 0; j < UNIT; j++) {
            bool inside = WHOLE || own + j < end;
            typename Operand::point at = operand.point_at(inside ? own + j : k);
#pragma unroll
            for (int i = 0; i < LINES; i++)
                values[i][j] = inside ? operand.value(lines[i], at) : 0;
        }
    }

    __device__ __forceinline__ void store(uint4 *to) const
    {
#pragma unroll
        for (int i = 0; i < LINES; i++)
            to[(threadIdx.x % APART + i * APART) * tile::ROW + threadIdx.x / APART] = Format::pack(values[i]);
    }
};

/* By depth: a thread keeps its point, and the block its lines, in shared memory, as a thread reads many. */
template <class Operand, class Format, int EXTENT> struct tensor_loader<Operand, Format, EXTENT, true> {
    static constexpr int UNIT = Format::UNIT, DEPTH = TENSOR_UNITS * UNIT, APART = TENSOR_THREADS / DEPTH,
                         GROUPS = EXTENT / UNIT / APART;
    static constexpr int KEPT = EXTENT;
    static_assert(EXTENT % (UNIT * APART) == 0);
    typedef struct tensor_tile<Operand, Format, EXTENT> tile;

    Operand operand;
    const typename Operand::line *lines;
    float values[GROUPS][UNIT];

    /* A barrier must come before the first read. */
    __device__ tensor_loader(const Operand &from, uint32_t first, uint32_t count,
                             typename Operand::line *shared)
        : operand(from), lines(shared)
    {
        for (uint32_t i = threadIdx.x; i < EXTENT; i += TENSOR_THREADS)
            shared[i] = operand.line_at(min(first + i, count - 1));
    }

    template <bool WHOLE> __device__ __forceinline__ void read(uint32_t k, uint32_t end)
    {
        uint32_t own = k + threadIdx.x % DEPTH;
        bool inside = WHOLE || own < end;
        typename Operand::point at = operand.point_at(inside ? own : k);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int j = 0; j < UNIT; j++)
                values[g][j] =
                    inside ? operand.value(lines[(threadIdx.x / DEPTH + g * APART) * UNIT + j], at) : 0;
    }

    __device__ __forceinline__ void store(uint4 *to) const
    {
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            to[threadIdx.x % DEPTH * tile::ROW + threadIdx.x / DEPTH + g * APART] = Format::pack(values[g]);
    }
};

template <class Loader> static __device__ __forceinline__ void fetch(Loader &loader, uint32_t k, uint32_t end)
{
    if (k + Loader::tile::DEPTH <= end)
        loader.template read<true>(k, end);
    else
        loader.template read<false>(k, end);
}

/* ---- The product ---- */

/* A warp's sums, of DOWN x ACROSS mma: 16 rows and 8 columns each. */
template <int DOWN, int ACROSS> struct tensor_sums {
    float values[DOWN][ACROSS][4];
};

template <class Format, class LeftTile, class RightTile, int DOWN, int ACROSS>
static __device__ __forceinline__ void add_units(struct tensor_sums<DOWN, ACROSS> &sums, const uint4 *left,
                                                 const uint4 *right, int row, int column, int unit)
{
    uint32_t a[DOWN][4];
#pragma unroll
    for (int i = 0; i < DOWN; i++)
        LeftTile::fragment(a[i], left, row + 16 * i, unit);
#pragma unroll
    for (int j = 0; j < ACROSS; j += 2) {
        uint32_t word[4];
        RightTile::fragment(word, right, column + 8 * j, unit);
        const uint32_t b[2][2] = {{word[0], word[2]}, {word[1], word[3]}};
#pragma unroll
        for (int i = 0; i < DOWN; i++) {
            Format::mma(sums.values[i][j], a[i], b[0]);
            Format::mma(sums.values[i][j + 1], a[i], b[1]);
        }
    }
}

/* Stores them. A lane has two neighbours in each of two rows; neighbouring lanes trade a pair, and each has
 * four of one row. */
template <class Into, int DOWN, int ACROSS>
static __device__ __forceinline__ void put_tensor_sums(const Into &into, const struct product &size,
                                                       const struct tensor_sums<DOWN, ACROSS> &sums,
                                                       uint32_t row, uint32_t column)
{
    uint32_t lane = threadIdx.x % 32;
    bool odd = lane % 2;
    row += lane / 4 + (odd ? 8 : 0);
    column += lane % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int j = 0; j < ACROSS; j++) {
            const float *own = sums.values[i][j];
            float got0 = __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[2], 1);
            float got1 = __shfl_xor_sync(0xffffffffu, odd ? own[1] : own[3], 1);
            const float four[4] = {odd ? got0 : own[0], odd ? got1 : own[1], odd ? own[2] : got0,
                                   odd ? own[3] : got1};
            if (row + 16 * i < size.rows)
                into.put(row + 16 * i, column + 8 * j, size.columns, four);
        }
}

/* Blocks that a multiprocessor shall hold: those of large tiles need more than 128 registers a thread. */
static constexpr int tensor_blocks_held(int sums)
{
    return sums > 64 * 64 ? 3 : 4;
}

template <class Format, int ROWS, int COLUMNS, class Left, class Right, class Into>
static __global__ void __launch_bounds__(TENSOR_THREADS, tensor_blocks_held(ROWS *COLUMNS))
    tensor_kernel(const Left left, const Right right, const Into into, float *slices,
                  const struct product size)
{
    typedef struct tensor_loader<Left, Format, ROWS> left_loader;
    typedef struct tensor_loader<Right, Format, COLUMNS> right_loader;
    typedef typename left_loader::tile left_tile;
    typedef typename right_loader::tile right_tile;
    constexpr int WARP_DOWN = ROWS / TENSOR_WARPS_DOWN, WARP_ACROSS = COLUMNS / TENSOR_WARPS_ACROSS;
    constexpr uint32_t DEPTH = left_tile::DEPTH;
    __shared__ __align__(16) uint4 lefts[2][left_tile::SIZE], rights[2][right_tile::SIZE];
    __shared__ __align__(16) typename Left::line left_lines[left_loader::KEPT];
    __shared__ __align__(16) typename Right::line right_lines[right_loader::KEPT];
    int warp = (int)threadIdx.x / 32;
    int row = warp / TENSOR_WARPS_ACROSS * WARP_DOWN, column = warp % TENSOR_WARPS_ACROSS * WARP_ACROSS;
    uint32_t begin = blockIdx.z * size.slice, end = min(begin + size.slice, size.depth);
    left_loader from_left(left, blockIdx.y * ROWS, size.rows, left_lines);
    right_loader from_right(right, blockIdx.x * COLUMNS, size.columns, right_lines);
    struct tensor_sums<WARP_DOWN / 16, WARP_ACROSS / 8> sums = {
    };

    __syncthreads();
    fetch(from_left, begin, end);
    fetch(from_right, begin, end);
    from_left.store(lefts[0]);
    from_right.store(rights[0]);
    __syncthreads();
    for (uint32_t k = begin, now = 0; k < end; k += DEPTH, now ^= 1) {
        bool more = k + DEPTH < end;
        if (more) {
            fetch(from_left, k + DEPTH, end);
            fetch(from_right, k + DEPTH, end);
        }
#pragma unroll
        for (int unit = 0; unit < TENSOR_UNITS; unit += 2)
            add_units<Format, left_tile, right_tile>(sums, lefts[now], rights[now], row, column, unit);
        if (more) {
            from_left.store(lefts[now ^ 1]);
            from_right.store(rights[now ^ 1]);
        }
        __syncthreads();
    }

    uint32_t first_row = blockIdx.y * ROWS + row, first_column = blockIdx.x * COLUMNS + column;
    if (gridDim.z == 1)
        return put_tensor_sums(into, size, sums, first_row, first_column);
    put_tensor_sums(matrix_out{.values = slices + (size_t)blockIdx.z * size.rows * size.columns,
                               .bias = nullptr,
                               .stride = size.columns,
                               .relu = false,
                               .above = nullptr},
                    size, sums, first_row, first_column);
}

/* Launches the product in tiles of ROWS x COLUMNS; `workspace` has room for WORKSPACE_VALUES. */
template <class Format, int ROWS, int COLUMNS, class Left, class Right, class Into>
static enum status tensor_multiply(cudaStream_t stream, float *workspace, const Left &left,
                                   const Right &right, const Into &into, struct product size)
{
    constexpr uint32_t BLOCKS = 132 * tensor_blocks_held(ROWS * COLUMNS); /* that fill an H200 */
    static_assert((size_t)BLOCKS * ROWS * COLUMNS <= WORKSPACE_VALUES);
    dim3 grid((size.columns - 1) / COLUMNS + 1, (size.rows - 1) / ROWS + 1);
    size.slice =
        round_up(slice_of(size.depth, (uint64_t)grid.x * grid.y, BLOCKS), TENSOR_UNITS * Format::UNIT);
    grid.z = (size.depth - 1) / size.slice + 1;
    tensor_kernel<Format, ROWS, COLUMNS>
        <<<grid, TENSOR_THREADS, 0, stream>>>(left, right, into, workspace, size);
    CUDA_TRY_LAUNCH("tensor_kernel");
    return grid.z == 1 ? STATUS_OK : add_slices(stream, workspace, grid.z, into, size);
}

#endif
