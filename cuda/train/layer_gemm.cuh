/* The GEMMs of layers, in the precision of their pass: multiply.cuh computes fp32, and tensor_multiply()
 * below the other precisions. Each GEMM of a convolution instantiates many CUDA kernels (with or without
 * padding, for two tile sizes, in four precisions, for both orders of axes). For short compile times,
 * conv.cu, conv_backward.cu, conv_weights.cu and linear.cu have one GEMM or layer each.
 *
 * tensor_multiply() is the GEMM of multiply.cuh on tensor cores, with the same operands, outputs and slices:
 *
 *     out[row][column] = sum over k of left(row, k) * right(column, k)
 *
 * Both factors are rounded to a format of tensor_tile.cuh before they are stored in shared memory; sums
 * are fp32. Any matrix size works.
 *
 * The speed is limited by reading the operands, not by arithmetic: values are read one by one, at the
 * addresses that an operand computes. A thread collects 16 bytes (a unit) in the direction in which memory is
 * not contiguous. Adjacent threads then read adjacent memory, and each thread writes its unit with one store.
 * A tile is therefore stored by lines if memory is contiguous across lines, and by depth if memory is
 * contiguous along the depth. ldmatrix transposes tiles of 16-bit values that are stored by depth. */
#ifndef FDSL_CUDA_TRAIN_LAYER_GEMM_CUH
#define FDSL_CUDA_TRAIN_LAYER_GEMM_CUH

#include "train/network.cuh"
#include "train/tensor_tile.cuh"

/* ---- Global memory to tiles ---- */

/* A thread's part of loading a tile. Lines past the end are read as the last line; their sums are not
 * stored. Points past the end are 0. */
template <class Operand, class Format, int EXTENT, bool BY_DEPTH = Operand::ALONG_DEPTH> struct tensor_loader;

/* Loader of tiles that are stored by lines. A thread keeps its lines in registers, and computes each point
 * once for all of them. */
template <class Operand, class Format, int EXTENT> struct tensor_loader<Operand, Format, EXTENT, false> {
    static constexpr int UNIT = Format::UNIT, APART = TENSOR_THREADS / TENSOR_UNITS, LINES = EXTENT / APART;
    static constexpr int KEPT = 1; /* keeps no lines in shared memory, but an array needs one element */
    static_assert(EXTENT % APART == 0);
    typedef struct tensor_tile<Format, false, EXTENT> tile;

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

/* Loader of tiles that are stored by depth. A thread reads one point of each tile, for many lines. The lines
 * are in shared memory. */
template <class Operand, class Format, int EXTENT> struct tensor_loader<Operand, Format, EXTENT, true> {
    static constexpr int UNIT = Format::UNIT, DEPTH = TENSOR_UNITS * UNIT, APART = TENSOR_THREADS / DEPTH,
                         GROUPS = EXTENT / UNIT / APART;
    static constexpr int KEPT = EXTENT;
    static_assert(EXTENT % (UNIT * APART) == 0);
    typedef struct tensor_tile<Format, true, EXTENT> tile;

    Operand operand;
    const typename Operand::line *lines;
    float values[GROUPS][UNIT];

    /* The caller synchronises the block before the first read. */
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

/* ---- GEMM ---- */

/* Number of blocks per multiprocessor that __launch_bounds__ requests. Large tiles need more than 128
 * registers per thread. */
static constexpr int tensor_blocks_held(int sums)
{
    return sums > 64 * 64 ? 3 : 4;
}

template <class Format, int ROWS, int COLUMNS, class Left, class Right, class Into>
static __global__ void __launch_bounds__(TENSOR_THREADS, tensor_blocks_held(ROWS *COLUMNS))
    tensor_kernel(const Left left, const Right right, const Into into, float *slices, const struct gemm size)
{
    typedef struct tensor_loader<Left, Format, ROWS> left_loader;
    typedef struct tensor_loader<Right, Format, COLUMNS> right_loader;
    typedef typename left_loader::tile left_tile;
    typedef typename right_loader::tile right_tile;
    typedef struct tensor_share<ROWS, COLUMNS> share;
    constexpr uint32_t DEPTH = left_tile::DEPTH;
    __shared__ __align__(16) uint4 lefts[2][left_tile::SIZE], rights[2][right_tile::SIZE];
    __shared__ __align__(16) typename Left::line left_lines[left_loader::KEPT];
    __shared__ __align__(16) typename Right::line right_lines[right_loader::KEPT];
    uint32_t begin = blockIdx.z * size.slice, end = min(begin + size.slice, size.depth);
    left_loader from_left(left, blockIdx.y * ROWS, size.rows, left_lines);
    right_loader from_right(right, blockIdx.x * COLUMNS, size.columns, right_lines);
    struct tensor_sums<share::DOWN / 16, share::ACROSS / 8> sums = {
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
            add_units<Format, left_tile, right_tile>(sums, lefts[now], rights[now], share::row(),
                                                     share::column(), unit);
        if (more) {
            from_left.store(lefts[now ^ 1]);
            from_right.store(rights[now ^ 1]);
        }
        __syncthreads();
    }

    put_block<share>(into, slices, size, sums, blockIdx.y * ROWS, blockIdx.x * COLUMNS);
}

/* Launches the GEMM with tiles of ROWS x COLUMNS; `workspace` has room for WORKSPACE_VALUES floats. */
template <class Format, int ROWS, int COLUMNS, class Left, class Right, class Into>
static enum status tensor_multiply(cudaStream_t stream, float *workspace, const Left &left,
                                   const Right &right, const Into &into, struct gemm size)
{
    constexpr uint32_t HELD = tensor_blocks_held(ROWS * COLUMNS);
    static_assert((size_t)FULL_BLOCKS(HELD) * ROWS * COLUMNS <= WORKSPACE_VALUES);
    dim3 grid = tensor_grid<ROWS, COLUMNS, TENSOR_UNITS * Format::UNIT>(&size, HELD);
    tensor_kernel<Format, ROWS, COLUMNS>
        <<<grid, TENSOR_THREADS, 0, stream>>>(left, right, into, workspace, size);
    CUDA_TRY_LAUNCH("tensor_kernel");
    return grid.z == 1 ? STATUS_OK : add_slices(stream, workspace, grid.z, into, size);
}

/* ---- The GEMMs of layers ---- */

/* Launches a GEMM with tiles of 32 * DOWN rows and 64 * ACROSS columns. Stored tensors among its operands
 * have type T. */
template <class T, int DOWN, int ACROSS, class Left, class Right, class Into>
static enum status multiply_layer(const struct pass *pass, const Left &left, const Right &right,
                                  const Into &into, const struct gemm &size)
{
    constexpr int ROWS = WARP_ROWS * DOWN, COLUMNS = WARP_SUMS * ACROSS;
    if constexpr (sizeof(T) < sizeof(float))
        return tensor_multiply<as_16_bits<T>, ROWS, COLUMNS>(pass->stream, pass->workspace, left, right, into,
                                                             size);
    else if (pass->precision == PRECISION_TF32)
        return tensor_multiply<as_tf32, ROWS, COLUMNS>(pass->stream, pass->workspace, left, right, into,
                                                       size);
    else
        return multiply<DOWN, ACROSS>(pass->stream, pass->workspace, left, right, into, size);
}

/* A convolution of the tensor `from` that writes `into`, both stored tensors: the forward pass, or the
 * gradient of the input. */
struct convolution {
    const void *from;
    struct windows windows; /* over `from` */
    void *into;
    const float *bias; /* may be NULL */
    uint32_t channels; /* of `into` */
    bool relu;
    const void *above; /* for finish(); may be NULL */
    bool last;         /* whether `into` is channels last */
};

/* Rows are channels, columns are (sample, position). */
template <class T, bool PADDED, class Weights>
static enum status convolve_first(const struct pass *pass, const Weights &weights,
                                  const struct convolution &of)
{
    const struct gemm size = {.rows = of.channels,
                              .columns = pass->count * of.windows.position_count.by,
                              .depth = of.windows.tap_count};
    const window_rows<PADDED, T> matrix = {static_cast<const T *>(of.from), of.windows};
    const struct channel_out<T> into = {
        .values = static_cast<T *>(of.into), .bias = of.bias, .channels = of.channels,
        .positions = of.windows.position_count, .relu = of.relu, .above = static_cast<const T *>(of.above)
    };
    if (of.channels > WARP_ROWS)
        return multiply_layer<T, 2, 2>(pass, weights, matrix, into, size);
    return multiply_layer<T, 1, 2>(pass, weights, matrix, into, size);
}

/* Rows are (sample, position), columns are channels. */
template <class T, bool PADDED, class Weights>
static enum status convolve_last(const struct pass *pass, const Weights &weights,
                                 const struct convolution &of)
{
    const uint32_t positions = of.windows.position_count.by;
    return by_samples<128>(pass->count, positions, [&](uint32_t first, uint32_t count) {
        const struct gemm size = {
            .rows = count * positions, .columns = of.channels, .depth = of.windows.tap_count};
        const window_rows<PADDED, T> matrix = {
            static_cast<const T *>(of.from) + (size_t)first * of.windows.sample_values, of.windows};
        const size_t done = (size_t)first * positions * of.channels;
        const struct matrix_out<T> into = {
            .values = static_cast<T *>(of.into) + done, .bias = of.bias, .stride = of.channels,
            .relu = of.relu, .above = of.above ? static_cast<const T *>(of.above) + done : nullptr
        };
        if (of.channels > WARP_ROWS)
            return tensor_multiply<as_16_bits<T>, 128, 64>(pass->stream, pass->workspace, matrix, weights,
                                                           into, size);
        return tensor_multiply<as_16_bits<T>, 128, 32>(pass->stream, pass->workspace, matrix, weights, into,
                                                       size);
    });
}

template <class Weights>
static enum status convolve(const struct pass *pass, const Weights &weights, const struct convolution &of)
{
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        if constexpr (sizeof(T) < sizeof(float))
            if (of.last)
                return of.windows.padded ? convolve_last<T, true>(pass, weights, of)
                                         : convolve_last<T, false>(pass, weights, of);
        return of.windows.padded ? convolve_first<T, true>(pass, weights, of)
                                 : convolve_first<T, false>(pass, weights, of);
    });
}

/* Writes the gradient of the weights to pass->gradients, as [out channel][in channel, tap]. */
enum status conv_weights_backward(const struct device_layer *layer, const struct pass *pass);

#endif
