/* Number formats of operands, and tiles in shared memory, for both tensor core kernels. layer_gemm.cuh
 * gathers single values; packed_conv.cu copies 16 bytes of a channels-last tensor at once. */
#ifndef FDSL_CUDA_TRAIN_TENSOR_TILE_CUH
#define FDSL_CUDA_TRAIN_TENSOR_TILE_CUH

#include "train/mma.cuh"
#include "train/multiply.cuh"

/* ---- Formats: tiles store operands in units of 16 bytes; sums are fp32 ---- */

/* Formats of 16 bits. bfloat16 has 8 significant bits (including the hidden bit) and the range of fp32. IEEE
 * half precision has 11 significant bits; values that round to more than 65504 become infinite. */
template <class Value> struct as_16_bits {
    static constexpr int UNIT = 8; /* values per 16 bytes; one mma is two units deep */

    static __device__ __forceinline__ uint32_t pair(float low, float high)
    {
        return ::pack<Value>(low, high);
    }
    static __device__ __forceinline__ uint4 pack(const float values[UNIT])
    {
        return make_uint4(pair(values[0], values[1]), pair(values[2], values[3]), pair(values[4], values[5]),
                          pair(values[6], values[7]));
    }
    static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], const uint32_t b[2])
    {
        mma_16816(c, a, b, Value());
    }
};
typedef struct as_16_bits<__nv_bfloat16> as_bf16;
typedef struct as_16_bits<__half> as_fp16;

/* TF32: 11 significant bits and the range of fp32, one value per 32-bit word. */
struct as_tf32 {
    static constexpr int UNIT = 4;

    static __device__ __forceinline__ uint4 pack(const float values[UNIT])
    {
        return make_uint4(mma_tf32(values[0]), mma_tf32(values[1]), mma_tf32(values[2]), mma_tf32(values[3]));
    }
    static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], const uint32_t b[2])
    {
        mma_1688_tf32(c, a, b);
    }
};

/* ---- Tiles ---- */

#define TENSOR_WARPS   4 /* warps per block */
#define TENSOR_THREADS (32 * TENSOR_WARPS)
#define TENSOR_UNITS   4 /* depth of a tile in units: 64 bytes */

/* Returns the number of blocks that fill an H200 with `held` blocks per multiprocessor. */
#define FULL_BLOCKS(held) (132 * (held))

/* A tile of one operand of a GEMM: EXTENT lines (rows of the left operand or columns of the right one),
 * stored in units of 16 bytes. If the tile is stored by lines, a row is a line of TENSOR_UNITS units. If it
 * is stored by depth, a row has the values of all lines at one index of the depth. Each unit of such a row
 * has adjacent lines. Rows are padded so that eight rows (or four rows of 32-bit words) can be read without
 * bank conflicts. */
template <class Format, bool BY_DEPTH, int EXTENT> struct tensor_tile {
    static constexpr int UNIT = Format::UNIT, DEPTH = TENSOR_UNITS * UNIT;
    static constexpr int ROW = BY_DEPTH ? EXTENT / UNIT + 8 / UNIT : TENSOR_UNITS + 1; /* in units */
    static constexpr int SIZE = (BY_DEPTH ? DEPTH : EXTENT) * ROW;

    /* Loads the fragment for one mma: the 16 lines that begin at `line`, and the two units of depth that
     * begin at `unit`. For the first unit, word 0 has lines 0 to 7 and word 1 has lines 8 to 15. Words 2 and
     * 3 have the same lines for the second unit. The four words are a complete A fragment, or the B fragments
     * of two groups of eight columns. */
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

/* ---- Sums ---- */

/* The division of a tile among four warps: two by two, or side by side if the tile has few rows. Nearly
 * square parts need the fewest reads from shared memory. */
template <int ROWS, int COLUMNS> struct tensor_share {
    static constexpr int WARPS_DOWN = ROWS < 64 ? 1 : 2;
    static constexpr int DOWN = ROWS / WARPS_DOWN, ACROSS = COLUMNS * WARPS_DOWN / TENSOR_WARPS;
    static __device__ __forceinline__ int row(void)
    {
        return (int)threadIdx.x / 32 % WARPS_DOWN * DOWN;
    }
    static __device__ __forceinline__ int column(void)
    {
        return (int)threadIdx.x / 32 / WARPS_DOWN * ACROSS;
    }
};

/* A warp's sums: DOWN x ACROSS mma results of 16 rows and 8 columns each. */
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

/* Stores a warp's sums. A lane has two adjacent values in each of two rows. It exchanges one pair with its
 * neighbour, so that each lane has four adjacent values of one row. */
template <class Into, int DOWN, int ACROSS>
static __device__ __forceinline__ void put_tensor_sums(const Into &into, const struct gemm &size,
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

/* Stores a block's sums in the output or, if sums are split into slices, in this block's slice. */
template <class Share, class Into, int DOWN, int ACROSS>
static __device__ __forceinline__ void put_block(const Into &into, float *slices, const struct gemm &size,
                                                 const struct tensor_sums<DOWN, ACROSS> &sums,
                                                 uint32_t first_row, uint32_t first_column)
{
    uint32_t row = first_row + Share::row(), column = first_column + Share::column();
    if (gridDim.z == 1)
        return put_tensor_sums(into, size, sums, row, column);
    put_tensor_sums(slice_out(slices, size), size, sums, row, column);
}

/* Returns the grid of a GEMM with tiles of ROWS x COLUMNS, DEPTH deep, and sets size->slice. `held` is the
 * number of blocks per multiprocessor. */
template <int ROWS, int COLUMNS, int DEPTH> static dim3 tensor_grid(struct gemm *size, uint32_t held)
{
    dim3 grid((size->columns - 1) / COLUMNS + 1, (size->rows - 1) / ROWS + 1);
    size->slice = round_up(slice_of(size->depth, (uint64_t)grid.x * grid.y, FULL_BLOCKS(held)), DEPTH);
    grid.z = (size->depth - 1) / size->slice + 1;
    return grid;
}

#define GRID_Y_MAX 65535u

/* Calls multiply(first, count) for parts of the samples, from sample `first` on: a GEMM with tiles of ROWS
 * rows, and `positions` rows per sample, has at most GRID_Y_MAX tiles along its rows. */
template <int ROWS, class Multiply>
static enum status by_samples(uint32_t samples, uint32_t positions, Multiply multiply)
{
    const uint32_t fit = GRID_Y_MAX * ROWS / positions, most = fit > 0 ? fit : 1;
    for (uint32_t first = 0; first < samples; first += most)
        TRY(multiply(first, samples - first < most ? samples - first : most));
    return STATUS_OK;
}

#endif
