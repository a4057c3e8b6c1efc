/* The operands of the GEMM in multiply.cuh, and the outputs for its sums.
 *
 * An operand returns the value at a line and a point. A line is a row of the left operand or a column of the
 * right operand. A point is a value of k, the index that the sums run over. The range of k is the "depth".
 * Index computation is separate from reading: line_at() is called once per thread and line, point_at() once
 * per tile and point. If ALONG_DEPTH is true, the next element in memory is the next point; otherwise it is
 * the next line. All offsets are below 2^31 (check_size() in engine.cu checks this).
 *
 * A tensor of activations is (sample, channel, depth, height, width), or channels last (stored.cuh). A
 * "position" is (depth, height, width) in a sample. In the GEMMs of a convolution, except for the gradient of
 * the weights, a column is a sample and a position; if the result is channels last, a row. */
#ifndef FDSL_CUDA_TRAIN_OPERANDS_CUH
#define FDSL_CUDA_TRAIN_OPERANDS_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "train/stored.cuh"

#ifndef __CUDACC__
/* Files without kernels are compiled as C++ (HOST_CU in the Makefile). They never call these functions. */
template <class T> T __ldg(const T *address);
uint32_t __umulhi(uint32_t left, uint32_t right);
extern const uint3 blockIdx, threadIdx;
#endif

/* Division of numbers below 2^31 by an invariant divisor: Granlund and Montgomery, "Division by invariant
 * integers using multiplication", 1994. */
struct divider {
    uint32_t by, factor, shift;
    __device__ __forceinline__ uint32_t quotient(uint32_t n) const
    {
        return (__umulhi(factor, n) + n) >> shift;
    }
};

static inline struct divider divider_of(uint32_t by)
{
    struct divider divider = {by, 0, 0};
    while (UINT64_C(1) << divider.shift < by)
        divider.shift++;
    divider.factor = (uint32_t)((UINT64_C(1) << 32) * ((UINT64_C(1) << divider.shift) - by) / by + 1);
    return divider;
}

/* ---- Operands ---- */

/* A matrix that is stored row by row. If ALONG, a line is a row; otherwise a line is a column. */
template <bool ALONG, class T = float> struct matrix {
    static constexpr bool ALONG_DEPTH = ALONG;
    typedef const T *line;
    typedef uint32_t point;
    const T *values;
    uint32_t stride; /* distance in values between lines if ALONG, otherwise between points */

    __device__ line line_at(uint32_t i) const
    {
        return values + (ALONG ? (size_t)i * stride : i);
    }
    __device__ point point_at(uint32_t k) const
    {
        return ALONG ? k : k * stride;
    }
    static __device__ float value(line from, point at)
    {
        return to_float(__ldg(from + at));
    }
};

/* A convolution's windows in the tensor that it reads. Output position p and weight k = (channel, tap) use
 * the sample's element positions[p].offset + taps[k].offset. taps[k].bits has one bit per axis, for the tap's
 * coordinate. The element is inside the tensor if positions[p].bits contains all of these bits. */
struct window_part {
    int32_t offset;
    uint32_t bits;
};

#define AXIS_BITS 10 /* maximum kernel length along an axis */

struct windows {
    const struct window_part *taps, *positions; /* device memory */
    uint32_t tap_count;                         /* channels * kernel taps */
    struct divider position_count;
    uint32_t sample_values;
    bool padded; /* some window extends outside the tensor */
};

/* A window: the address of its position in a sample, and the bits of the taps that are inside the tensor. */
template <class T> struct window_position {
    const T *values;
    uint32_t bits;
};

/* Returns the value that a tap reads at a position. */
template <bool PADDED, class T>
static __device__ __forceinline__ float window_value(const struct window_position<T> &position,
                                                     const struct window_part &tap)
{
    if (PADDED && (~position.bits & tap.bits) != 0)
        return 0;
    return to_float(__ldg(position.values + tap.offset));
}

static __device__ __forceinline__ struct window_part read_part(const struct window_part *from)
{
    int2 part = __ldg(reinterpret_cast<const int2 *>(from));
    return {part.x, (uint32_t)part.y};
}

/* Returns the window of column i. A column is a sample and a position. */
template <class T>
static __device__ __forceinline__ struct window_position<T> position_at(const struct windows &windows,
                                                                        const T *values, uint32_t i) {
    uint32_t sample = windows.position_count.quotient(i);
    struct window_part part = read_part(&windows.positions[i - sample * windows.position_count.by]);
    return {values + ((int32_t)(sample * windows.sample_values) + part.offset), part.bits};
}

/* All windows as a matrix that is never stored: a line is (sample, position), a point is a weight. */
template <bool PADDED, class T>
struct window_rows {
    static constexpr bool ALONG_DEPTH = false;
    typedef struct window_position<T> line;
    typedef struct window_part point;
    const T *values;
    struct windows windows;

    __device__ line line_at(uint32_t i) const
    {
        return position_at(windows, values, i);
    }
    __device__ point point_at(uint32_t k) const
    {
        return read_part(&windows.taps[k]);
    }
    static __device__ float value(const line &position, const point &tap)
    {
        return window_value<PADDED, T>(position, tap);
    }
};

/* ---- Storing sums ---- */

/* An output has put_one(), which stores one sum, and put(), which stores the sums of four adjacent columns.
 * put() omits columns at or past `columns`, the number of output columns. put_four() implements put(). If
 * `together` is true, it stores the four sums with one 16-byte write. */
template <class Into>
static __device__ __forceinline__ void put_four(const Into &into, bool together, uint32_t row,
                                                uint32_t column, uint32_t columns, const float sums[4])
{
    if (together && column < columns) { /* `columns` is then also a multiple of 4 */
        size_t at = into.index(row, column);
        store_four(into.values + at, make_float4(into.finished(row, column, sums[0], at),
                                                 into.finished(row, column + 1, sums[1], at + 1),
                                                 into.finished(row, column + 2, sums[2], at + 2),
                                                 into.finished(row, column + 3, sums[3], at + 3)));
    }
    for (int j = 0; !together && j < 4; j++)
        if (column + j < columns)
            into.put_one(row, column + j, sums[j]);
}

/* Finishes a sum: adds bias[i] unless `bias` is NULL, then applies ReLU if `relu`. `above` is NULL, or the
 * output of a preceding ReLU for a backward pass: the result is 0 if above[at] is not positive. NaN passes
 * through. `above` may be the array that gets the result. */
template <class T>
static __device__ __forceinline__ float finish(float sum, const float *bias, uint32_t i, bool relu,
                                               const T *above, size_t at)
{
    float value = bias ? sum + __ldg(bias + i) : sum;
    return (relu && value <= 0) || (above && to_float(above[at]) <= 0) ? 0 : value;
}

/* Stores a matrix, with one bias per column. A channels-last tensor is a matrix whose rows are (sample,
 * position). */
template <class T> struct matrix_out {
    T *values;
    const float *bias; /* may be NULL */
    uint32_t stride;
    bool relu;
    const T *above; /* for finish(), in the layout of `values`; may be NULL */

    __device__ size_t index(uint32_t row, uint32_t column) const
    {
        return (size_t)row * stride + column;
    }
    __device__ float finished(uint32_t, uint32_t column, float sum, size_t at) const
    {
        return finish(sum, bias, column, relu, above, at);
    }
    __device__ void put_one(uint32_t row, uint32_t column, float sum) const
    {
        size_t at = index(row, column);
        store(values + at, finished(row, column, sum, at));
    }
    __device__ void put(uint32_t row, uint32_t column, uint32_t columns, const float sums[4]) const
    {
        put_four(*this, stride % 4 == 0 && columns % 4 == 0, row, column, columns, sums);
    }
};

/* Stores a tensor of activations. A row is a channel, with one bias; a column is (sample, position). */
template <class T> struct channel_out {
    T *values;
    const float *bias; /* may be NULL */
    uint32_t channels;
    struct divider positions;
    bool relu;
    const T *above; /* for finish(), in the layout of `values`; may be NULL */

    __device__ size_t index(uint32_t channel, uint32_t column) const
    {
        uint32_t sample = positions.quotient(column);
        return (size_t)(sample * (channels - 1) + channel) * positions.by + column;
    }
    __device__ void put_one(uint32_t channel, uint32_t column, float sum) const
    {
        size_t at = index(channel, column);
        store(values + at, finish(sum, bias, channel, relu, above, at));
    }
    /* This function has few instructions, because it is inlined once per four sums of a thread. Values that
     * the four sums share are read once. If the sums are not adjacent in memory, a loop stores them; it is
     * not unrolled. */
    __device__ void put(uint32_t channel, uint32_t column, uint32_t columns, const float sums[4]) const
    {
        if (positions.by % 4 == 0) {
            if (column < columns) /* `columns` is then also a multiple of 4 */
                put_together(channel, column, sums);
            return;
        }
#pragma unroll 1
        for (uint32_t j = 0; j < 4 && column + j < columns; j++)
            put_one(channel, column + j, j == 0 ? sums[0] : j == 1 ? sums[1] : j == 2 ? sums[2] : sums[3]);
    }
    __device__ void put_together(uint32_t channel, uint32_t column, const float sums[4]) const
    {
        size_t at = index(channel, column);
        float own = bias ? __ldg(bias + channel) : 0;
        float4 gate = above ? load_four(above + at) : make_float4(1, 1, 1, 1);
        store_four(values + at, make_float4(gated(sums[0] + own, gate.x), gated(sums[1] + own, gate.y),
                                            gated(sums[2] + own, gate.z), gated(sums[3] + own, gate.w)));
    }
    __device__ float gated(float value, float gate) const
    {
        return (relu && value <= 0) || gate <= 0 ? 0 : value;
    }
};

#endif
