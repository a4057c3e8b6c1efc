/* Convolutions as GEMMs. The matrix of windows is never stored; the kernels compute its indices ("implicit
 * GEMM": Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014). With o for an output channel
 * and c for an input channel:
 *
 *     forward   out[o][position]      = sum over (c, tap) of weight[o][c, tap] * in[c, position + tap]
 *     backward  in_delta[c][position] = sum over (o, tap) of
 *                                       weight[o][c, opposite tap] * out_delta[o, position + tap]
 *     weights   gradient[o][c, tap]   = sum over (sample, position) of
 *                                       out_delta[o][position] * in[c, position + tap]
 *
 * This file prepares a layer and has its forward pass. */
#include "train/layer_gemm.cuh"

/* ---- Window offsets ---- */

/* A convolution that reads `from` and writes `into`. `lead` is the number of padding zeros before the first
 * element along each axis of `from`. */
struct window_plan {
    struct shape from, into;
    uint32_t kernel[MODEL_AXES];
    int32_t lead[MODEL_AXES];
    bool last; /* whether `from` is channels last */
};

/* Returns the offset of element (t, y, x) of `from` from the first element of its channel. */
static __device__ __forceinline__ int32_t element_at(const struct window_plan &plan, int32_t t, int32_t y,
                                                     int32_t x)
{
    return ((t * (int32_t)plan.from.height + y) * (int32_t)plan.from.width + x) *
           (plan.last ? (int32_t)plan.from.channels : 1);
}

static __global__ void taps_kernel(const struct window_plan plan, struct window_part *taps)
{
    uint32_t size = plan.kernel[0] * plan.kernel[1] * plan.kernel[2], k = own_element();
    if (k >= plan.from.channels * size)
        return;
    uint32_t tap = k % size;
    uint32_t t = tap / plan.kernel[2] / plan.kernel[1], y = tap / plan.kernel[2] % plan.kernel[1],
             x = tap % plan.kernel[2];
    int32_t positions = (int32_t)(plan.from.depth * plan.from.height * plan.from.width);
    taps[k].offset =
        (int32_t)(k / size) * (plan.last ? 1 : positions) +
        element_at(plan, (int32_t)t - plan.lead[0], (int32_t)y - plan.lead[1], (int32_t)x - plan.lead[2]);
    taps[k].bits = 1u << t | 1u << (AXIS_BITS + y) | 1u << (2 * AXIS_BITS + x);
}

/* Returns a bit mask of the taps along an axis that are inside the tensor for output coordinate `at`. */
static __device__ __forceinline__ uint32_t inside_bits(uint32_t at, int32_t lead, uint32_t kernel,
                                                       uint32_t length)
{
    uint32_t bits = 0;
    for (uint32_t tap = 0; tap < kernel; tap++)
        if ((uint32_t)((int32_t)(at + tap) - lead) <
            length) /* unsigned comparison: a negative coordinate exceeds any length */
            bits |= 1u << tap;
    return bits;
}

static __global__ void positions_kernel(const struct window_plan plan, struct window_part *positions)
{
    uint32_t position = own_element();
    if (position >= plan.into.depth * plan.into.height * plan.into.width)
        return;
    uint32_t t = position / plan.into.width / plan.into.height,
             y = position / plan.into.width % plan.into.height, x = position % plan.into.width;
    positions[position].offset = element_at(plan, (int32_t)t, (int32_t)y, (int32_t)x);
    positions[position].bits = inside_bits(t, plan.lead[0], plan.kernel[0], plan.from.depth) |
                               inside_bits(y, plan.lead[1], plan.kernel[1], plan.from.height) << AXIS_BITS |
                               inside_bits(x, plan.lead[2], plan.kernel[2], plan.from.width)
                                   << (2 * AXIS_BITS);
}

static enum status make_windows(const struct window_plan *plan, struct allocations *allocations,
                                cudaStream_t stream, struct windows *windows)
{
    uint32_t taps = plan->from.channels * plan->kernel[0] * plan->kernel[1] * plan->kernel[2];
    uint32_t positions = (uint32_t)(shape_values(&plan->into) / plan->into.channels);
    struct window_part *tap_parts, *position_parts;
    TRY(allocate(allocations, &tap_parts, taps));
    TRY(allocate(allocations, &position_parts, positions));
    if (!allocations_plan(allocations)) {
        taps_kernel<<<blocks_for(taps), BLOCK, 0, stream>>>(*plan, tap_parts);
        CUDA_TRY_LAUNCH("taps_kernel");
        positions_kernel<<<blocks_for(positions), BLOCK, 0, stream>>>(*plan, position_parts);
        CUDA_TRY_LAUNCH("positions_kernel");
    }
    *windows = {.taps = tap_parts,
                .positions = position_parts,
                .tap_count = taps,
                .position_count = divider_of(positions),
                .sample_values = (uint32_t)shape_values(&plan->from),
                .padded = plan->lead[0] > 0 || plan->lead[1] > 0 || plan->lead[2] > 0};
    return STATUS_OK;
}

enum status conv_prepare(struct device_layer *layer, enum precision precision, uint32_t,
                         struct allocations *allocations, cudaStream_t stream)
{
    const struct layer *conv = layer->layer;
    for (int i = 0; i < MODEL_AXES; i++)
        if (conv->spec.kernel[i] > AXIS_BITS)
            return status_set(
                STATUS_FAILED,
                "%s: the CUDA engine supports convolution kernels of up to %d elements per axis, not %u; use "
                "a variant on the CPU",
                conv->name, AXIS_BITS, conv->spec.kernel[i]);
    struct window_plan forward = {
        .from = conv->in, .into = conv->out, .kernel = {}, .lead = {}, .last = layer->in_last};
    for (int i = 0; i < MODEL_AXES; i++) {
        forward.kernel[i] = conv->spec.kernel[i];
        forward.lead[i] = (int32_t)conv->spec.padding[i];
    }
    /* The backward pass convolves out_delta with the flipped kernel. Output i reads input i + tap - lead, so
     * input j contributes to output j + lead - tap. The first of these outputs belongs to the last tap,
     * kernel - 1: it is output j - (kernel - 1 - lead). */
    struct window_plan backward = forward;
    backward.from = conv->out;
    backward.into = conv->in;
    backward.last = layer->out_last;
    for (int i = 0; i < MODEL_AXES; i++)
        backward.lead[i] = (int32_t)forward.kernel[i] - 1 - forward.lead[i];
    TRY(make_windows(&forward, allocations, stream, &layer->forward));
    if (layer->in_delta)
        TRY(make_windows(&backward, allocations, stream, &layer->backward));
    return packed_prepare(layer, precision, allocations);
}

/* ---- Forward ---- */

enum status conv_forward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    if (layer->packed.weights)
        return packed_forward(layer, pass);
    const matrix<true> weights = {pass->parameters + conv->weight, layer->forward.tap_count};
    const struct convolution convolution = {.from = layer->in,
                                            .windows = layer->forward,
                                            .into = layer->out,
                                            .bias = pass->parameters + conv->bias,
                                            .channels = conv->out.channels,
                                            .relu = layer->relu,
                                            .above = nullptr,
                                            .last = layer->out_last};
    return convolve(pass, weights, convolution);
}
