/* Forward and backward passes of convolutions in 16-bit formats, for channel counts that are multiples of 8.
 * Tensors are channels last, so that 16 bytes are eight adjacent channels of a position. cp.async copies the
 * windows of a convolution directly into shared memory, bypassing registers.
 *
 * Weights are ordered as (tap, channel). The sums of a convolution run in this order, and the columns of its
 * weight gradient have this order. The sums have the same terms as in conv.cu, in another order. */
#include "train/network.cuh"
#include "train/tensor_tile.cuh"

#define PACKED_UNIT  8 /* values per 16 bytes */
#define PACKED_DEPTH (TENSOR_UNITS * PACKED_UNIT)
/* Number of rows, of four units each, that a block copies at once: one unit per thread. */
#define PACKED_ROWS   (TENSOR_THREADS / TENSOR_UNITS)
#define PACKED_STAGES 3 /* tiles in flight or in use */

/* ---- Operands: rows in memory, and units along them ---- */

struct packed_row {
    const uint16_t *values;
    uint32_t bits; /* a unit is inside the tensor if the row has all bits of the unit */
};

struct packed_unit {
    int32_t offset; /* in values */
    uint32_t bits;
};

/* A matrix whose rows have a multiple of 8 values. */
struct packed_matrix {
    const uint16_t *values;
    uint32_t stride;

    __device__ __forceinline__ struct packed_row row(uint32_t i) const
    {
        return {values + (size_t)i * stride, 0};
    }
    static __device__ __forceinline__ struct packed_unit unit(uint32_t u)
    {
        return {(int32_t)(u * PACKED_UNIT), 0};
    }
};

/* The windows over a channels-last tensor. A row is an output position of the convolution; a unit is a tap
 * and eight channels. The first taps of `windows`, those of channel 0, give the offsets. */
struct packed_windows {
    const uint16_t *values;
    struct windows windows;
    struct divider units; /* units per tap */

    __device__ __forceinline__ struct packed_row row(uint32_t i) const
    {
        uint32_t sample = windows.position_count.quotient(i);
        struct window_part part = read_part(&windows.positions[i - sample * windows.position_count.by]);
        return {values + ((int32_t)(sample * windows.sample_values) + part.offset), part.bits};
    }
    __device__ __forceinline__ struct packed_unit unit(uint32_t u) const
    {
        uint32_t tap = units.quotient(u);
        struct window_part part = read_part(&windows.taps[tap]);
        return {part.offset + (int32_t)((u - tap * units.by) * PACKED_UNIT), part.bits};
    }
};

/* Copies a unit, or writes zeros if it is outside the tensor. `valid` is any address in the tensor. The copy
 * goes through L1, because windows overlap and read each position repeatedly. Neighbouring blocks also read
 * the same weights. */
static __device__ __forceinline__ void copy_unit(uint4 *to, const struct packed_row &row,
                                                 const struct packed_unit &unit, const uint16_t *valid,
                                                 bool inside)
{
    inside = inside && (~row.bits & unit.bits) == 0;
    copy_async16_cached(to, inside ? row.values + unit.offset : valid, inside);
}

/* ---- Global memory to tiles ---- */

/* A thread's part of copying a tile. The thread copies from row threadIdx.x / 4 of every 32 rows. In this
 * row, it copies unit threadIdx.x % 4 of every four units. If the tile is stored by lines, a row in memory is
 * a line, and its units run along the depth. If it is stored by depth, a row is a point, and its units run
 * across lines. Values that are the same for all tiles stay in registers. */
template <class Operand, bool BY_DEPTH, int EXTENT> struct packed_loader;

template <class Operand, int EXTENT> struct packed_loader<Operand, false, EXTENT> {
    typedef struct tensor_tile<as_bf16, false, EXTENT> tile; /* every 16-bit format has the same tiles */
    static constexpr int COUNT = EXTENT / PACKED_ROWS;

    Operand operand;
    struct packed_row rows[COUNT];

    __device__ packed_loader(const Operand &from, uint32_t first, uint32_t count) : operand(from)
    {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            rows[i] = operand.row(min(first + threadIdx.x / TENSOR_UNITS + i * PACKED_ROWS, count - 1));
    }

    __device__ __forceinline__ void copy(uint4 *to, uint32_t k, uint32_t end) const
    {
        uint32_t own = threadIdx.x % TENSOR_UNITS, u = k / PACKED_UNIT + own;
        bool inside = u * PACKED_UNIT < end;
        const struct packed_unit unit = operand.unit(inside ? u : 0);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            copy_unit(to + (threadIdx.x / TENSOR_UNITS + i * PACKED_ROWS) * tile::ROW + own, rows[i], unit,
                      operand.values, inside);
    }
};

template <class Operand, int EXTENT> struct packed_loader<Operand, true, EXTENT> {
    typedef struct tensor_tile<as_bf16, true, EXTENT> tile;
    static constexpr int COUNT = EXTENT / PACKED_UNIT / TENSOR_UNITS;
    static_assert(PACKED_ROWS == PACKED_DEPTH);

    Operand operand;
    struct packed_unit units[COUNT];

    __device__ packed_loader(const Operand &from, uint32_t first, uint32_t count) : operand(from)
    {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            units[i] = operand.unit(min(first / PACKED_UNIT + threadIdx.x % TENSOR_UNITS + i * TENSOR_UNITS,
                                        (count - 1) / PACKED_UNIT));
    }

    __device__ __forceinline__ void copy(uint4 *to, uint32_t k, uint32_t end) const
    {
        uint32_t own = threadIdx.x / TENSOR_UNITS;
        bool inside = k + own < end;
        const struct packed_row row = operand.row(inside ? k + own : k);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            copy_unit(to + own * tile::ROW + threadIdx.x % TENSOR_UNITS + i * TENSOR_UNITS, row, units[i],
                      operand.values, inside);
    }
};

/* ---- GEMM ---- */

/* Both operands are stored by depth (BY_DEPTH), or both by lines. PACKED_STAGES - 1 tiles are in flight while
 * one is multiplied. The barrier that makes a tile visible has a second purpose. After this barrier, all
 * threads have finished with the previous tile, so the next copies may overwrite that tile's buffer. */
template <class Format, bool BY_DEPTH, int ROWS, int COLUMNS, class Left, class Right, class Into>
static __global__ void __launch_bounds__(TENSOR_THREADS, 4)
    packed_kernel(const Left left, const Right right, const Into into, float *slices, const struct gemm size)
{
    typedef struct packed_loader<Left, BY_DEPTH, ROWS> left_loader;
    typedef struct packed_loader<Right, BY_DEPTH, COLUMNS> right_loader;
    typedef typename left_loader::tile left_tile;
    typedef typename right_loader::tile right_tile;
    typedef struct tensor_share<ROWS, COLUMNS> share;
    __shared__ __align__(16) uint4 lefts[PACKED_STAGES][left_tile::SIZE];
    __shared__ __align__(16) uint4 rights[PACKED_STAGES][right_tile::SIZE];
    uint32_t begin = blockIdx.z * size.slice, end = min(begin + size.slice, size.depth);
    const left_loader from_left(left, blockIdx.y * ROWS, size.rows);
    const right_loader from_right(right, blockIdx.x * COLUMNS, size.columns);
    struct tensor_sums<share::DOWN / 16, share::ACROSS / 8> sums = {
    };
    auto copy = [&](uint32_t k, int stage) {
        if (k < end) {
            from_left.copy(lefts[stage], k, end);
            from_right.copy(rights[stage], k, end);
        }
        copy_commit(); /* commits even an empty group, so that each tile has exactly one group to wait for */
    };

    for (int stage = 0; stage < PACKED_STAGES - 1; stage++)
        copy(begin + stage * PACKED_DEPTH, stage);
    int now = 0, next = PACKED_STAGES - 1;
    for (uint32_t k = begin; k < end; k += PACKED_DEPTH) {
        copy_wait<PACKED_STAGES - 2>();
        __syncthreads();
        copy(k + (PACKED_STAGES - 1) * PACKED_DEPTH, next);
#pragma unroll
        for (int unit = 0; unit < TENSOR_UNITS; unit += 2)
            add_units<Format, left_tile, right_tile>(sums, lefts[now], rights[now], share::row(),
                                                     share::column(), unit);
        now = now == PACKED_STAGES - 1 ? 0 : now + 1;
        next = next == PACKED_STAGES - 1 ? 0 : next + 1;
    }
    put_block<share>(into, slices, size, sums, blockIdx.y * ROWS, blockIdx.x * COLUMNS);
}

/* Launches packed_kernel; `workspace` has room for WORKSPACE_VALUES floats. */
template <class Format, bool BY_DEPTH, int ROWS, int COLUMNS, class Left, class Right, class Into>
static enum status packed_multiply(cudaStream_t stream, float *workspace, const Left &left,
                                   const Right &right, const Into &into, struct gemm size)
{
    constexpr uint32_t HELD = 3;
    static_assert((size_t)FULL_BLOCKS(HELD) * ROWS * COLUMNS <= WORKSPACE_VALUES);
    dim3 grid = tensor_grid<ROWS, COLUMNS, PACKED_DEPTH>(&size, HELD);
    packed_kernel<Format, BY_DEPTH, ROWS, COLUMNS>
        <<<grid, TENSOR_THREADS, 0, stream>>>(left, right, into, workspace, size);
    CUDA_TRY_LAUNCH("packed_kernel");
    return grid.z == 1 ? STATUS_OK : add_slices(stream, workspace, grid.z, into, size);
}

/* ---- Memory ---- */

bool packed_takes(const struct layer *conv, enum precision precision)
{
    return (precision == PRECISION_BF16 || precision == PRECISION_FP16) &&
           conv->in.channels % PACKED_UNIT == 0 && conv->out.channels % PACKED_UNIT == 0;
}

enum status packed_prepare(struct device_layer *layer, enum precision precision,
                           struct allocations *allocations)
{
    const struct layer *conv = layer->layer;
    if (!packed_takes(conv, precision) || !layer->in_last || !layer->out_last)
        return STATUS_OK;
    TRY(allocate(allocations, &layer->packed.weights, conv->weight_values));
    return layer->in_delta ? allocate(allocations, &layer->packed.opposite, conv->weight_values) : STATUS_OK;
}

/* ---- Weights ---- */

/* Copies weights (out, in, tap) to (out, tap, in) and, unless `opposite` is NULL, to (in, opposite tap, out)
 * for the backward pass. */
template <class Format>
static __global__ void pack_weights_kernel(const float *from, struct divider taps, struct divider channels,
                                           uint32_t out, uint32_t count, uint16_t *weights,
                                           uint16_t *opposite)
{
    uint32_t i = own_element();
    if (i >= count)
        return;
    uint32_t rest = taps.quotient(i), tap = i - rest * taps.by;
    uint32_t o = channels.quotient(rest), c = rest - o * channels.by;
    uint16_t value = (uint16_t)Format::pair(from[i], 0);
    weights[(o * taps.by + tap) * channels.by + c] = value;
    if (opposite)
        opposite[(c * taps.by + taps.by - 1 - tap) * out + o] = value;
}

static uint32_t taps_of(const struct layer *conv)
{
    return conv->spec.kernel[0] * conv->spec.kernel[1] * conv->spec.kernel[2];
}

template <class Format>
static enum status pack_weights(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    uint32_t count = (uint32_t)conv->weight_values;
    pack_weights_kernel<Format><<<blocks_for(count), BLOCK, 0, pass->stream>>>(
        pass->parameters + conv->weight, divider_of(taps_of(conv)), divider_of(conv->in.channels),
        conv->out.channels, count, layer->packed.weights, layer->packed.opposite);
    return CUDA_LAUNCHED("pack_weights_kernel");
}

/* ---- Forward, and gradient of the input: rows are (sample, position), columns are channels ---- */

static struct packed_windows windows_over(const void *tensor, const struct windows *windows,
                                          uint32_t channels)
{
    return {.values = static_cast<const uint16_t *>(tensor),
            .windows = *windows,
            .units = divider_of(channels / PACKED_UNIT)};
}

template <class T>
static enum status convolve(const struct pass *pass, const uint16_t *weights,
                            const struct packed_windows &windows, const struct matrix_out<T> &into)
{
    typedef struct as_16_bits<T> format;
    const uint32_t positions = windows.windows.position_count.by;
    return by_samples<128>(pass->count, positions, [&](uint32_t first, uint32_t count) {
        const struct gemm size = {
            .rows = count * positions, .columns = into.stride, .depth = windows.windows.tap_count};
        const struct packed_matrix matrix = {weights, size.depth};
        const size_t done = (size_t)first * positions * into.stride;
        struct packed_windows from = windows;
        struct matrix_out<T> to = into;
        from.values += (size_t)first * windows.windows.sample_values;
        to.values += done;
        to.above += into.above ? done : 0;
        if (size.columns > 32)
            return packed_multiply<format, false, 128, 64>(pass->stream, pass->workspace, from, matrix, to,
                                                           size);
        return packed_multiply<format, false, 128, 32>(pass->stream, pass->workspace, from, matrix, to, size);
    });
}

template <class T> static enum status forward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    const struct matrix_out<T> into = {
        .values = static_cast<T *>(layer->out), .bias = pass->parameters + conv->bias,
        .stride = conv->out.channels, .relu = layer->relu, .above = nullptr
    };
    TRY(pack_weights<as_16_bits<T>>(layer, pass));
    return convolve(pass, layer->packed.weights, windows_over(layer->in, &layer->forward, conv->in.channels),
                    into);
}

template <class T>
static enum status input_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    const struct matrix_out<T> into = {
        .values = static_cast<T *>(layer->in_delta), .bias = nullptr, .stride = conv->in.channels,
        .relu = false, .above = static_cast<const T *>(layer->relu_before ? layer->in : nullptr)
    };
    return convolve(pass, layer->packed.opposite,
                    windows_over(layer->out_delta, &layer->backward, conv->out.channels), into);
}

/* ---- Gradient of the weights: rows are output channels, columns are (tap, channel) ---- */

/* Stores the gradient of the weights as (out, in, tap). The sums run over (sample, position). */
struct weights_out {
    float *values;
    struct divider channels;
    uint32_t taps;

    __device__ void put_one(uint32_t row, uint32_t column, float sum) const
    {
        uint32_t tap = channels.quotient(column), c = column - tap * channels.by;
        values[((size_t)row * channels.by + c) * taps + tap] = sum;
    }
    __device__ void put(uint32_t row, uint32_t column, uint32_t columns, const float sums[4]) const
    {
        for (uint32_t j = 0; j < 4 && column + j < columns; j++)
            put_one(row, column + j, sums[j]);
    }
};

template <class Format>
static enum status weights_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    const struct packed_matrix deltas = {static_cast<const uint16_t *>(layer->out_delta), conv->out.channels};
    const struct weights_out into = {.values = pass->gradients + conv->weight,
                                     .channels = divider_of(conv->in.channels),
                                     .taps = taps_of(conv)};
    return packed_multiply<Format, true, 64, 96>(pass->stream, pass->workspace, deltas,
                                                 windows_over(layer->in, &layer->forward, conv->in.channels),
                                                 into,
                                                 {.rows = conv->out.channels,
                                                  .columns = layer->forward.tap_count,
                                                  .depth = pass->count * layer->forward.position_count.by});
}

/* The gradient of the weights comes first, because in_delta may have the memory of `in`. */
template <class T> static enum status backward(const struct device_layer *layer, const struct pass *pass)
{
    if (pass->of & GRADIENTS_OF_WEIGHTS)
        TRY(weights_backward<as_16_bits<T>>(layer, pass));
    return layer->in_delta && pass->of & GRADIENTS_OF_INPUTS ? input_backward<T>(layer, pass) : STATUS_OK;
}

enum status packed_forward(const struct device_layer *layer, const struct pass *pass)
{
    return pass->precision == PRECISION_BF16 ? forward<__nv_bfloat16>(layer, pass)
                                             : forward<__half>(layer, pass);
}

enum status packed_backward(const struct device_layer *layer, const struct pass *pass)
{
    return pass->precision == PRECISION_BF16 ? backward<__nv_bfloat16>(layer, pass)
                                             : backward<__half>(layer, pass);
}
