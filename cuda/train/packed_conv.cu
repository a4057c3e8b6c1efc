/* Forward and backward passes of convolutions in 16-bit formats, for channel counts that are multiples of 8.
 * Each tensor is packed before the first GEMM that reads it. The results are fp32 tensors, so no other layer
 * is affected. The sums have the same terms as in conv.cu, in another order. */
#include "train/network.cuh"
#include "train/tensor_packed.cuh"

static bool is_packed(const struct layer *conv, enum precision precision)
{
    return (precision == PRECISION_BF16 || precision == PRECISION_FP16) &&
           conv->in.channels % PACKED_UNIT == 0 && conv->out.channels % PACKED_UNIT == 0;
}

enum status packed_prepare(struct device_layer *layer, enum precision precision, uint32_t batch, bool learns,
                           struct allocations *allocations)
{
    const struct layer *conv = layer->layer;
    if (conv->spec.kind != LAYER_CONV || !is_packed(conv, precision))
        return STATUS_OK;
    TRY(allocate(allocations, &layer->packed.in, batch * conv->in_values));
    TRY(allocate(allocations, &layer->packed.weights, conv->weight_values));
    if (!learns)
        return STATUS_OK;
    TRY(allocate(allocations, &layer->packed.deltas, batch * conv->out_values));
    return allocate(allocations, &layer->packed.opposite, conv->weight_values);
}

/* ---- Packing ---- */

/* Number of adjacent positions that adjacent threads pack. The threads read 64 contiguous bytes. */
#define PACKED_POSITIONS 16

struct pack_plan {
    uint32_t count;        /* number of threads */
    uint32_t positions;    /* per sample */
    struct divider units;  /* units of eight channels, per position */
    struct divider groups; /* groups of PACKED_POSITIONS positions per sample, rounded up */
};

/* A thread packs eight channels of one position. Consecutive threads take PACKED_POSITIONS consecutive
 * positions, then the next eight channels, so reads and writes cover whole sectors. */
template <class Format>
static __global__ void pack_kernel(const struct pack_plan plan, const float *from, uint4 *to)
{
    uint32_t i = own_element(), rest = i / PACKED_POSITIONS;
    uint32_t outer = plan.units.quotient(rest), unit = rest - outer * plan.units.by;
    uint32_t sample = plan.groups.quotient(outer);
    uint32_t position = (outer - sample * plan.groups.by) * PACKED_POSITIONS + i % PACKED_POSITIONS;
    if (i >= plan.count || position >= plan.positions)
        return;
    const float *first =
        from + (size_t)(sample * plan.units.by + unit) * PACKED_UNIT * plan.positions + position;
    float values[PACKED_UNIT];
#pragma unroll
    for (int j = 0; j < PACKED_UNIT; j++)
        values[j] = __ldg(first + j * plan.positions);
    to[((size_t)sample * plan.positions + position) * plan.units.by + unit] = Format::pack(values);
}

template <class Format>
static enum status pack(const struct pass *pass, const struct shape *shape, const float *from, uint16_t *to)
{
    uint32_t positions = (uint32_t)(shape_values(shape) / shape->channels);
    uint32_t units = shape->channels / PACKED_UNIT, groups = (positions - 1) / PACKED_POSITIONS + 1;
    const struct pack_plan plan = {.count = pass->count * units * groups * PACKED_POSITIONS,
                                   .positions = positions,
                                   .units = divider_of(units),
                                   .groups = divider_of(groups)};
    pack_kernel<Format>
        <<<blocks_for(plan.count), BLOCK, 0, pass->stream>>>(plan, from, reinterpret_cast<uint4 *>(to));
    CUDA_TRY_LAUNCH("pack_kernel");
    return STATUS_OK;
}

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
    CUDA_TRY_LAUNCH("pack_weights_kernel");
    return STATUS_OK;
}

/* ---- Forward, and gradient of the input: rows are channels, columns are (sample, position) ---- */

static struct packed_windows windows_over(const uint16_t *values, const struct windows *windows,
                                          uint32_t channels)
{
    return {.values = values,
            .windows = *windows,
            .channels = channels,
            .units = divider_of(channels / PACKED_UNIT)};
}

template <class Format>
static enum status convolve(const struct pass *pass, const uint16_t *weights,
                            const struct packed_windows &windows, const struct channel_out &into)
{
    const struct gemm size = {.rows = into.channels,
                              .columns = pass->count * windows.windows.position_count.by,
                              .depth = windows.windows.tap_count};
    const struct packed_matrix matrix = {weights, size.depth};
    if (into.channels > 32)
        return packed_multiply<Format, false, 64, 128>(pass->stream, pass->workspace, matrix, windows, into,
                                                       size);
    return packed_multiply<Format, false, 32, 128>(pass->stream, pass->workspace, matrix, windows, into,
                                                   size);
}

template <class Format> static enum status forward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    TRY(pack_weights<Format>(layer, pass));
    TRY(pack<Format>(pass, &conv->in, layer->in, layer->packed.in));
    return convolve<Format>(pass, layer->packed.weights,
                            windows_over(layer->packed.in, &layer->forward, conv->in.channels),
                            {.values = layer->out,
                             .bias = pass->parameters + conv->bias,
                             .channels = conv->out.channels,
                             .positions = layer->forward.position_count,
                             .relu = layer->relu});
}

template <class Format>
static enum status input_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    return convolve<Format>(pass, layer->packed.opposite,
                            windows_over(layer->packed.deltas, &layer->backward, conv->out.channels),
                            {.values = layer->in_delta,
                             .channels = conv->in.channels,
                             .positions = layer->backward.position_count,
                             .above = layer->relu_before ? layer->in : nullptr});
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
    const struct packed_matrix deltas = {layer->packed.deltas, conv->out.channels};
    const struct weights_out into = {.values = pass->gradients + conv->weight,
                                     .channels = divider_of(conv->in.channels),
                                     .taps = taps_of(conv)};
    return packed_multiply<Format, true, 64, 96>(
        pass->stream, pass->workspace, deltas,
        windows_over(layer->packed.in, &layer->forward, conv->in.channels), into,
        {.rows = conv->out.channels,
         .columns = layer->forward.tap_count,
         .depth = pass->count * layer->forward.position_count.by});
}

template <class Format> static enum status backward(const struct device_layer *layer, const struct pass *pass)
{
    if (pass->of & GRADIENTS_OF_INPUTS) /* a later pass of GRADIENTS_OF_WEIGHTS uses the packed deltas */
        TRY(pack<Format>(pass, &layer->layer->out, layer->out_delta, layer->packed.deltas));
    if (pass->of & GRADIENTS_OF_WEIGHTS)
        TRY(weights_backward<Format>(layer, pass));
    return layer->in_delta && pass->of & GRADIENTS_OF_INPUTS ? input_backward<Format>(layer, pass)
                                                             : STATUS_OK;
}

enum status packed_forward(const struct device_layer *layer, const struct pass *pass)
{
    return pass->precision == PRECISION_BF16 ? forward<as_bf16>(layer, pass) : forward<as_fp16>(layer, pass);
}

enum status packed_backward(const struct device_layer *layer, const struct pass *pass)
{
    return pass->precision == PRECISION_BF16 ? backward<as_bf16>(layer, pass)
                                             : backward<as_fp16>(layer, pass);
}
