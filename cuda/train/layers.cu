/* Layers without GEMMs: ReLU, max-pooling, dropout, addition, and the mean of each channel. Also the table of
 * the kinds of layers. */
#include "common/shared.cuh"
#include "train/network.cuh"

/* ---- ReLU, in place; NaN passes through ---- */

static __global__ void relu_kernel(float *values, uint32_t count)
{
    uint32_t i = own_element();
    if (i < count && values[i] <= 0)
        values[i] = 0;
}

/* An output of 0 means that the input was not positive. A later dropout may also have zeroed the output in
 * place; the output's gradient is then already 0. */
static __global__ void relu_back_kernel(const float *values, float *deltas, uint32_t count)
{
    uint32_t i = own_element();
    if (i < count && values[i] <= 0)
        deltas[i] = 0;
}

static enum status relu_forward(const struct device_layer *layer, const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->out_values;
    if (layer->forward_done)
        return STATUS_OK;
    relu_kernel<<<blocks_for(count), BLOCK, 0, pass->stream>>>(layer->out, count);
    return CUDA_LAUNCHED("relu_kernel");
}

enum status relu_mask(const float *values, float *deltas, uint32_t count, cudaStream_t stream)
{
    relu_back_kernel<<<blocks_for(count), BLOCK, 0, stream>>>(values, deltas, count);
    return CUDA_LAUNCHED("relu_back_kernel");
}

static enum status relu_backward(const struct device_layer *layer, const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->out_values;
    if (layer->backward_done || !layer->in_delta)
        return STATUS_OK;
    return relu_mask(layer->out, layer->in_delta, count, pass->stream);
}

/* ---- Max-pooling: the first of equal maxima is selected; NaN takes precedence over any value ---- */

struct pool_plan {
    struct divider width, height, depth, channels; /* lengths of the output */
    uint32_t in_depth, in_height, in_width;
    uint32_t kernel[MODEL_AXES];
    uint32_t in_values; /* per sample */
    uint32_t count;     /* outputs in the batch */
};

/* Splits i into rest * unit.by + position; returns `rest`. */
static __device__ __forceinline__ uint32_t split(uint32_t i, const struct divider &unit, uint32_t *position)
{
    uint32_t rest = unit.quotient(i);
    *position = i - rest * unit.by;
    return rest;
}

/* The pooling window of an output: the sample, and the index of the window's first element in that sample. */
struct window {
    uint32_t sample, first;
};

static __device__ __forceinline__ struct window window_at(const struct pool_plan *plan, uint32_t i)
{
    uint32_t x, y, t, c;
    uint32_t sample =
        split(split(split(split(i, plan->width, &x), plan->height, &y), plan->depth, &t), plan->channels, &c);
    uint32_t plane = c * plan->in_depth + t * plan->kernel[0];
    return {sample, (plane * plan->in_height + y * plan->kernel[1]) * plan->in_width + x * plan->kernel[2]};
}

/* Calls visit(index in the sample) for each element of a window, in order. */
template <class Visit>
static __device__ __forceinline__ void visit_window(const struct pool_plan *plan, uint32_t first,
                                                    const Visit &visit)
{
    for (uint32_t t = 0; t < plan->kernel[0]; t++)
        for (uint32_t y = 0; y < plan->kernel[1]; y++)
            for (uint32_t x = 0; x < plan->kernel[2]; x++)
                visit(first + (t * plan->in_height + y) * plan->in_width + x);
}

static __global__ void pool_kernel(const struct pool_plan plan, const float *in, float *out,
                                   uint32_t *largest)
{
    uint32_t i = own_element();
    if (i >= plan.count)
        return;
    struct window window = window_at(&plan, i);
    const float *sample = in + (size_t)window.sample * plan.in_values;
    uint32_t best = window.first;
    float most = sample[best];
    visit_window(&plan, window.first, [&](uint32_t at) {
        float value = sample[at];
        if (value > most || isnan(value)) {
            most = value;
            best = at;
        }
    });
    out[i] = most;
    largest[i] = best;
}

/* Windows do not overlap, so the thread of each output writes all elements of its window. open_layer() zeroed
 * the elements that are in no window; they stay zero.
 *
 * If this kernel also computes the ReLU before the pooling, `above` is the pooling's output; otherwise it is
 * NULL. With `above`, an output of 0 passes no gradient to its window. A later dropout may also have zeroed
 * the output in place; the output's gradient is then already 0. */
static __global__ void pool_back_kernel(const struct pool_plan plan, const float *out_deltas,
                                        const uint32_t *largest, const float *above, float *in_deltas)
{
    uint32_t i = own_element();
    if (i >= plan.count)
        return;
    struct window window = window_at(&plan, i);
    float *sample = in_deltas + (size_t)window.sample * plan.in_values;
    float delta = above && above[i] <= 0 ? 0 : out_deltas[i];
    uint32_t best = largest[i];
    visit_window(&plan, window.first, [&](uint32_t at) { sample[at] = at == best ? delta : 0; });
}

static struct pool_plan plan_of(const struct layer *pool, uint32_t count)
{
    const uint32_t *kernel = pool->spec.kernel;
    return {.width = divider_of(pool->out.width),
            .height = divider_of(pool->out.height),
            .depth = divider_of(pool->out.depth),
            .channels = divider_of(pool->out.channels),
            .in_depth = pool->in.depth,
            .in_height = pool->in.height,
            .in_width = pool->in.width,
            .kernel = {kernel[0], kernel[1], kernel[2]},
            .in_values = (uint32_t)pool->in_values,
            .count = count * (uint32_t)pool->out_values};
}

static enum status pool_forward(const struct device_layer *layer, const struct pass *pass)
{
    const struct pool_plan plan = plan_of(layer->layer, pass->count);
    pool_kernel<<<blocks_for(plan.count), BLOCK, 0, pass->stream>>>(plan, layer->in, layer->out,
                                                                    layer->largest);
    return CUDA_LAUNCHED("pool_kernel");
}

static enum status pool_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct pool_plan plan = plan_of(layer->layer, pass->count);
    if (!layer->in_delta)
        return STATUS_OK;
    pool_back_kernel<<<blocks_for(plan.count), BLOCK, 0, pass->stream>>>(
        plan, layer->out_delta, layer->largest, layer->relu_before ? layer->out : nullptr, layer->in_delta);
    return CUDA_LAUNCHED("pool_back_kernel");
}

/* ---- Dropout, in place; forward and backward are identical ---- */

#define NEIGHBOURS 4 /* elements per thread; one Philox block has the random bits for all of them */

struct dropout_plan {
    uint64_t seed;
    uint32_t epoch, layer, threshold;
    uint32_t sample_values, count; /* values per sample; samples in the batch */
    struct divider fours;          /* number of groups of NEIGHBOURS elements per sample, rounded up */
    float factor;
};

static __device__ __forceinline__ float kept(const struct dropout_plan &plan,
                                             const struct philox_block &block, uint32_t i, float value)
{
    return value * (draw_kept(block, i, plan.threshold) ? plan.factor : 0);
}

static __global__ void dropout_kernel(const struct dropout_plan plan, const uint32_t *numbers, float *values)
{
    uint32_t four = own_element(), j = plan.fours.quotient(four);
    if (j >= plan.count)
        return;
    uint32_t i = (four - j * plan.fours.by) * NEIGHBOURS;
    struct philox_block block = draw_dropout(plan.seed, plan.epoch, numbers[j], plan.layer, i);
    float *sample = values + (size_t)j * plan.sample_values;
    if (plan.sample_values % NEIGHBOURS == 0) {
        float4 *own = reinterpret_cast<float4 *>(sample + i), value = *own;
        *own = make_float4(kept(plan, block, i, value.x), kept(plan, block, i + 1, value.y),
                           kept(plan, block, i + 2, value.z), kept(plan, block, i + 3, value.w));
        return;
    }
    for (uint32_t end = min(i + NEIGHBOURS, plan.sample_values); i < end; i++)
        sample[i] = kept(plan, block, i, sample[i]);
}

static enum status drop(const struct device_layer *layer, const struct pass *pass, float *values)
{
    const struct layer *dropout = layer->layer;
    uint32_t threshold = (uint32_t)(dropout->spec.rate * 256);
    uint32_t fours = (uint32_t)(dropout->out_values - 1) / NEIGHBOURS + 1;
    const struct dropout_plan plan = {.seed = pass->seed,
                                      .epoch = pass->epoch,
                                      .layer = dropout->number,
                                      .threshold = threshold,
                                      .sample_values = (uint32_t)dropout->out_values,
                                      .count = pass->count,
                                      .fours = divider_of(fours),
                                      .factor = 256.0f / (float)(256 - threshold)};
    dropout_kernel<<<blocks_for((size_t)pass->count * fours), BLOCK, 0, pass->stream>>>(plan, pass->numbers,
                                                                                        values);
    return CUDA_LAUNCHED("dropout_kernel");
}

static enum status dropout_forward(const struct device_layer *layer, const struct pass *pass)
{
    return pass->training ? drop(layer, pass, layer->out) : STATUS_OK;
}

static enum status dropout_backward(const struct device_layer *layer, const struct pass *pass)
{
    return layer->in_delta ? drop(layer, pass, layer->in_delta) : STATUS_OK;
}

/* ---- Addition ---- */

/* Adds two tensors, and applies a ReLU if `relu` is true. The ReLU passes NaN through. */
static __global__ void add_kernel(const float *in, const float *added, uint32_t count, bool relu, float *out)
{
    uint32_t i = own_element();
    if (i >= count)
        return;
    float value = in[i] + added[i];
    out[i] = relu && value <= 0 ? 0 : value;
}

static enum status add_forward(const struct device_layer *layer, const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->out_values;
    add_kernel<<<blocks_for(count), BLOCK, 0, pass->stream>>>(layer->in, layer->added->out, count,
                                                              layer->relu, layer->out);
    return CUDA_LAUNCHED("add_kernel");
}

/* Copies the gradient, because the gradients of the two inputs cannot share a buffer. A dropout before the
 * addition changes in_delta in place, but added_backward() needs the unchanged gradient for the other
 * input. */
static enum status add_backward(const struct device_layer *layer, const struct pass *pass)
{
    size_t bytes = pass->count * layer->layer->out_values * sizeof *layer->in_delta;
    if (layer->in_delta)
        CUDA_TRY(cudaMemcpyAsync(layer->in_delta, layer->out_delta, bytes, cudaMemcpyDeviceToDevice,
                                 pass->stream));
    return STATUS_OK;
}

static __global__ void added_kernel(const float *from, size_t count, float *to)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < count)
        to[i] += from[i];
}

enum status values_add(const float *from, size_t count, float *to, cudaStream_t stream)
{
    added_kernel<<<blocks_for(count), BLOCK, 0, stream>>>(from, count, to);
    return CUDA_LAUNCHED("added_kernel");
}

enum status added_backward(const struct device_layer *layer, const struct device_layer *end,
                           const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->out_values;
    for (const struct device_layer *add = layer + 1; add < end; add++)
        if (add->added == layer)
            TRY(values_add(add->out_delta, count, layer->out_delta, pass->stream));
    return STATUS_OK;
}

/* ---- The mean of each channel ---- */

/* Warp i averages channel i of the batch. Lane j sums positions j, j + 32, ...; a tree reduction adds these
 * sums. */
static __global__ void mean_kernel(const float *in, uint32_t positions, uint32_t count, float *out)
{
    uint32_t i = own_element() / 32, lane = threadIdx.x % 32;
    if (i >= count)
        return;
    float sum = 0;
    for (uint32_t position = lane; position < positions; position += 32)
        sum += in[(size_t)i * positions + position];
    sum = warp_sum(sum);
    if (lane == 0)
        out[i] = sum / (float)positions;
}

static enum status mean_forward(const struct device_layer *layer, const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->out_values;
    uint32_t positions = (uint32_t)(layer->layer->in_values / layer->layer->out_values);
    mean_kernel<<<blocks_for((size_t)count * 32), BLOCK, 0, pass->stream>>>(layer->in, positions, count,
                                                                            layer->out);
    return CUDA_LAUNCHED("mean_kernel");
}

static __global__ void mean_back_kernel(const float *out_deltas, const struct divider positions,
                                        uint32_t count, float *in_deltas)
{
    uint32_t i = own_element();
    if (i < count)
        in_deltas[i] = out_deltas[positions.quotient(i)] / (float)positions.by;
}

static enum status mean_backward(const struct device_layer *layer, const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->in_values;
    uint32_t positions = (uint32_t)(layer->layer->in_values / layer->layer->out_values);
    if (!layer->in_delta)
        return STATUS_OK;
    mean_back_kernel<<<blocks_for(count), BLOCK, 0, pass->stream>>>(layer->out_delta, divider_of(positions),
                                                                    count, layer->in_delta);
    return CUDA_LAUNCHED("mean_back_kernel");
}

/* ---- All kinds of layers that the engines compute layer by layer; the others have no functions ---- */

const struct layer_passes own_passes[LAYER_KINDS] = {
    /* LAYER_CONV */ {conv_prepare, conv_forward, conv_backward, nullptr},
    /* LAYER_RELU */ {nullptr, relu_forward, relu_backward, nullptr},
    /* LAYER_POOL */ {nullptr, pool_forward, pool_backward, nullptr},
    /* LAYER_DROPOUT */ {nullptr, dropout_forward, dropout_backward, nullptr},
    /* LAYER_LINEAR */ {nullptr, linear_forward, linear_backward, nullptr},
    /* LAYER_ADD */ {nullptr, add_forward, add_backward, nullptr},
    /* LAYER_MEAN */ {nullptr, mean_forward, mean_backward, nullptr},
};
