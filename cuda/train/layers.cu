/* Layers without GEMMs: ReLU, max-pooling, dropout, addition, and the mean of each channel; the table of
 * the kinds of layers; and conversions of stored tensors. */
#include "common/shared.cuh"
#include "train/network.cuh"

/* Returns the number of values of a layer's output in a batch. */
static uint32_t outputs_of(const struct device_layer *layer, const struct pass *pass)
{
    return pass->count * (uint32_t)layer->layer->out_values;
}

static uint32_t positions_of(const struct shape *shape)
{
    return (uint32_t)(shape_values(shape) / shape->channels);
}

/* ---- ReLU, in place; NaN passes through ---- */

/* Zeroes each element of `values` where the element of `from` is not positive. As the backward pass, `from`
 * is the ReLU's output: 0 means that the input was not positive. A later dropout may also have zeroed it in
 * place; dropout zeroes its gradient in any case. */
template <class T> static __global__ void relu_kernel(const T *from, T *values, uint32_t count)
{
    uint32_t i = own_element();
    if (i < count && to_float(from[i]) <= 0)
        store(values + i, 0);
}

enum status relu_mask(const struct pass *pass, const void *values, void *deltas, uint32_t count)
{
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        relu_kernel<<<blocks_for(count), BLOCK, 0, pass->stream>>>(static_cast<const T *>(values),
                                                                   static_cast<T *>(deltas), count);
        return CUDA_LAUNCHED("relu_kernel");
    });
}

static enum status relu_forward(const struct device_layer *layer, const struct pass *pass)
{
    return layer->forward_done ? STATUS_OK : relu_mask(pass, layer->out, layer->out, outputs_of(layer, pass));
}

static enum status relu_backward(const struct device_layer *layer, const struct pass *pass)
{
    return layer->backward_done || !layer->in_delta
               ? STATUS_OK
               : relu_mask(pass, layer->out, layer->in_delta, outputs_of(layer, pass));
}

/* ---- Max-pooling: the first of equal maxima is selected; NaN takes precedence over any value ---- */

#define POOL_NONE UINT8_MAX /* in device_layer.largest: the output passes no gradient to its window */

struct pool_plan {
    struct divider width, height, positions, channels; /* lengths of the output */
    struct divider groups;                             /* groups of adjacent positions, per sample */
    uint32_t in_height, in_width, in_positions;
    uint32_t kernel[MODEL_AXES];
    bool out_last;
    bool relu_before;
    uint32_t count; /* threads */
};

/* Splits i into rest * unit.by + position; returns `rest`. */
static __device__ __forceinline__ uint32_t split(uint32_t i, const struct divider &unit, uint32_t *position)
{
    uint32_t rest = unit.quotient(i);
    *position = i - rest * unit.by;
    return rest;
}

/* The outputs of a thread: one, or GROUP adjacent positions of a channel if the input is channels last. Then,
 * adjacent threads have adjacent channels. */
template <bool LAST> struct pool_outputs {
    static constexpr uint32_t GROUP = LAST ? 4 : 1;
    const struct pool_plan &plan;
    uint32_t sample, channel, first, count; /* the first position, and the number of positions */
    uint32_t begin[GROUP];                  /* where the window of each position begins in the input */

    __device__ __forceinline__ pool_outputs(const struct pool_plan &from, uint32_t i) : plan(from)
    {
        if (LAST)
            sample = split(split(i, plan.channels, &channel), plan.groups, &first);
        else
            sample = split(split(i, plan.positions, &first), plan.channels, &channel);
        first *= GROUP;
        count = min(GROUP, plan.positions.by - first);
#pragma unroll
        for (uint32_t j = 0; j < GROUP; j++) /* positions past the end have the first window */
            begin[j] = at(LAST, plan.in_positions, corner(first + (j < count ? j : 0)));
    }
    /* Returns the first position of a window in the input. */
    __device__ __forceinline__ uint32_t corner(uint32_t position) const
    {
        uint32_t x, y, t = split(split(position, plan.width, &x), plan.height, &y);
        return (t * plan.kernel[0] * plan.in_height + y * plan.kernel[1]) * plan.in_width +
               x * plan.kernel[2];
    }
    /* Returns the index of a position of this channel in a tensor with `positions` positions. */
    __device__ __forceinline__ uint32_t at(bool last, uint32_t positions, uint32_t position) const
    {
        return last ? (sample * positions + position) * plan.channels.by + channel
                    : (sample * plan.channels.by + channel) * positions + position;
    }
    /* Returns the index of output j. device_layer.largest has the order of the input. */
    __device__ __forceinline__ uint32_t out_at(bool last, uint32_t j) const
    {
        return at(last, plan.positions.by, first + j);
    }
    /* Returns whether the outputs are adjacent in memory, from a multiple of GROUP on. */
    __device__ __forceinline__ bool together(void) const
    {
        return LAST && !plan.out_last && plan.positions.by % GROUP == 0;
    }
    /* Calls visit(distance from the begin of a window, number in the window) for each element, in order. */
    template <class Visit> __device__ __forceinline__ void visit_window(const Visit &visit) const
    {
        const uint32_t step = LAST ? plan.channels.by : 1;
        uint32_t number = 0;
        for (uint32_t t = 0; t < plan.kernel[0]; t++)
            for (uint32_t y = 0; y < plan.kernel[1]; y++)
                for (uint32_t x = 0; x < plan.kernel[2]; x++)
                    visit(((t * plan.in_height + y) * plan.in_width + x) * step, number++);
    }
};

template <class T, bool LAST>
static __global__ void pool_kernel(const struct pool_plan plan, const T *in, T *out, uint8_t *largest)
{
    typedef struct pool_outputs<LAST> outputs;
    uint32_t i = own_element();
    if (i >= plan.count)
        return;
    const outputs own(plan, i);
    float most[outputs::GROUP];
    uint32_t best[outputs::GROUP];
    own.visit_window([&](uint32_t distance, uint32_t number) {
#pragma unroll
        for (uint32_t j = 0; j < outputs::GROUP; j++) {
            float value = to_float(in[own.begin[j] + distance]);
            if (number == 0 || value > most[j] || isnan(value)) {
                most[j] = value;
                best[j] = number;
            }
        }
    });
    if constexpr (LAST)
        if (own.together())
            store_four(out + own.out_at(false, 0), make_float4(most[0], most[1], most[2], most[3]));
#pragma unroll
    for (uint32_t j = 0; j < outputs::GROUP; j++)
        if (j < own.count) {
            if (!own.together())
                store(out + own.out_at(plan.out_last, j), most[j]);
            largest[own.out_at(LAST, j)] = plan.relu_before && most[j] <= 0 ? POOL_NONE : (uint8_t)best[j];
        }
}

/* Windows do not overlap, so the thread of each output writes all elements of its window. */
template <class T, bool LAST>
static __global__ void pool_back_kernel(const struct pool_plan plan, const T *out_deltas,
                                        const uint8_t *largest, T *in_deltas)
{
    typedef struct pool_outputs<LAST> outputs;
    uint32_t i = own_element();
    if (i >= plan.count)
        return;
    const outputs own(plan, i);
    float delta[outputs::GROUP];
    uint32_t best[outputs::GROUP];
#pragma unroll
    for (uint32_t j = 0; j < outputs::GROUP; j++) {
        const uint32_t inside = j < own.count ? j : 0;
        best[j] = largest[own.out_at(LAST, inside)];
        if (!own.together())
            delta[j] = to_float(out_deltas[own.out_at(plan.out_last, inside)]);
    }
    if constexpr (LAST)
        if (own.together()) {
            const float4 four = load_four(out_deltas + own.out_at(false, 0));
            delta[0] = four.x;
            delta[1] = four.y;
            delta[2] = four.z;
            delta[3] = four.w;
        }
    own.visit_window([&](uint32_t distance, uint32_t number) {
#pragma unroll
        for (uint32_t j = 0; j < outputs::GROUP; j++)
            if (j < own.count)
                store(in_deltas + own.begin[j] + distance, number == best[j] ? delta[j] : 0);
    });
}

static struct pool_plan plan_of(const struct device_layer *layer, uint32_t count)
{
    const struct layer *pool = layer->layer;
    const uint32_t *kernel = pool->spec.kernel, positions = positions_of(&pool->out);
    const uint32_t group = layer->in_last ? pool_outputs<true>::GROUP : pool_outputs<false>::GROUP;
    const uint32_t groups = (positions - 1) / group + 1;
    return {.width = divider_of(pool->out.width),
            .height = divider_of(pool->out.height),
            .positions = divider_of(positions),
            .channels = divider_of(pool->out.channels),
            .groups = divider_of(groups),
            .in_height = pool->in.height,
            .in_width = pool->in.width,
            .in_positions = positions_of(&pool->in),
            .kernel = {kernel[0], kernel[1], kernel[2]},
            .out_last = layer->out_last,
            .relu_before = layer->relu_before,
            .count = count * groups * pool->out.channels};
}

static enum status pool_prepare(struct device_layer *layer, enum precision, uint32_t batch,
                                struct allocations *allocations, cudaStream_t)
{
    const uint32_t *kernel = layer->layer->spec.kernel;
    if ((uint64_t)kernel[0] * kernel[1] * kernel[2] > POOL_NONE)
        return status_set(STATUS_FAILED,
                          "%s: the CUDA engine supports pooling windows of up to %d elements; use a variant "
                          "on the CPU",
                          layer->layer->name, POOL_NONE);
    return allocate(allocations, &layer->largest, batch * layer->layer->out_values);
}

static enum status pool_forward(const struct device_layer *layer, const struct pass *pass)
{
    const struct pool_plan plan = plan_of(layer, pass->count);
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        auto *kernel = layer->in_last ? pool_kernel<T, true> : pool_kernel<T, false>;
        kernel<<<blocks_for(plan.count), BLOCK, 0, pass->stream>>>(
            plan, static_cast<const T *>(layer->in), static_cast<T *>(layer->out), layer->largest);
        return CUDA_LAUNCHED("pool_kernel");
    });
}

/* Zeroes all gradients of the input if some elements are in no window: pool_back_kernel() does not write
 * those. */
static enum status clear_outside(const struct device_layer *layer, const struct pass *pass)
{
    const struct shape *in = &layer->layer->in, *out = &layer->layer->out;
    const uint32_t *kernel = layer->layer->spec.kernel;
    if (out->depth * kernel[0] == in->depth && out->height * kernel[1] == in->height &&
        out->width * kernel[2] == in->width)
        return STATUS_OK;
    return CUDA_STATUS(cudaMemsetAsync(layer->in_delta, 0,
                                       pass->count * layer->layer->in_values * stored_bytes(pass->precision),
                                       pass->stream));
}

static enum status pool_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct pool_plan plan = plan_of(layer, pass->count);
    if (!layer->in_delta)
        return STATUS_OK;
    TRY(clear_outside(layer, pass));
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        auto *kernel = layer->in_last ? pool_back_kernel<T, true> : pool_back_kernel<T, false>;
        kernel<<<blocks_for(plan.count), BLOCK, 0, pass->stream>>>(
            plan, static_cast<const T *>(layer->out_delta), layer->largest,
            static_cast<T *>(layer->in_delta));
        return CUDA_LAUNCHED("pool_back_kernel");
    });
}

/* ---- Dropout, in place; forward and backward are identical ---- */

#define NEIGHBOURS 4 /* elements per thread; one Philox block has the random bits for all of them */

/* Elements are numbered in C order. Unless a sample has one position, the elements of a channels-last tensor
 * are elsewhere in memory. */
struct dropout_plan {
    uint64_t seed;
    uint32_t epoch, layer, threshold;
    uint32_t sample_values, count; /* values per sample; samples in the batch */
    struct divider fours;          /* number of groups of NEIGHBOURS elements per sample, rounded up */
    float factor;
    bool in_order; /* whether elements are stored in C order */
    uint32_t channels;
    struct divider positions;
};

static __device__ __forceinline__ float kept(const struct dropout_plan &plan,
                                             const struct philox_block &block, uint32_t i, float value)
{
    return value * (draw_kept(block, i, plan.threshold) ? plan.factor : 0);
}

template <class T>
static __global__ void dropout_kernel(const struct dropout_plan plan, const uint32_t *numbers, T *values)
{
    uint32_t four = own_element(), j = plan.fours.quotient(four);
    if (j >= plan.count)
        return;
    uint32_t i = (four - j * plan.fours.by) * NEIGHBOURS;
    struct philox_block block = draw_dropout(plan.seed, plan.epoch, numbers[j], plan.layer, i);
    T *sample = values + (size_t)j * plan.sample_values;
    if (plan.in_order && plan.sample_values % NEIGHBOURS == 0) {
        const float4 value = load_four(sample + i);
        store_four(sample + i,
                   make_float4(kept(plan, block, i, value.x), kept(plan, block, i + 1, value.y),
                               kept(plan, block, i + 2, value.z), kept(plan, block, i + 3, value.w)));
        return;
    }
    for (uint32_t end = min(i + NEIGHBOURS, plan.sample_values); i < end; i++) {
        uint32_t channel = plan.positions.quotient(i);
        uint32_t at = plan.in_order ? i : (i - channel * plan.positions.by) * plan.channels + channel;
        store(sample + at, kept(plan, block, i, to_float(sample[at])));
    }
}

static enum status drop(const struct device_layer *layer, const struct pass *pass, void *values)
{
    const struct layer *dropout = layer->layer;
    uint32_t threshold = (uint32_t)(dropout->spec.rate * 256);
    uint32_t fours = (uint32_t)(dropout->out_values - 1) / NEIGHBOURS + 1;
    const uint32_t positions = positions_of(&dropout->out);
    const struct dropout_plan plan = {.seed = pass->seed,
                                      .epoch = pass->epoch,
                                      .layer = dropout->number,
                                      .threshold = threshold,
                                      .sample_values = (uint32_t)dropout->out_values,
                                      .count = pass->count,
                                      .fours = divider_of(fours),
                                      .factor = 256.0f / (float)(256 - threshold),
                                      .in_order = !layer->out_last || positions == 1,
                                      .channels = dropout->out.channels,
                                      .positions = divider_of(positions)};
    return with_stored(pass->precision, [&](auto type) {
        dropout_kernel<<<blocks_for((size_t)pass->count * fours), BLOCK, 0, pass->stream>>>(
            plan, pass->numbers, static_cast<decltype(type) *>(values));
        return CUDA_LAUNCHED("dropout_kernel");
    });
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

/* Adds two tensors, and applies a ReLU if `relu` is true. The ReLU passes NaN through. `out` may be one of
 * the two. */
template <class T>
static __global__ void add_kernel(const T *in, const T *added, size_t count, bool relu, T *out)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= count)
        return;
    float value = to_float(in[i]) + to_float(added[i]);
    store(out + i, relu && value <= 0 ? 0 : value);
}

static enum status add(const struct pass *pass, const void *in, const void *added, uint32_t count, bool relu,
                       void *out)
{
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        add_kernel<<<blocks_for(count), BLOCK, 0, pass->stream>>>(
            static_cast<const T *>(in), static_cast<const T *>(added), count, relu, static_cast<T *>(out));
        return CUDA_LAUNCHED("add_kernel");
    });
}

static enum status add_forward(const struct device_layer *layer, const struct pass *pass)
{
    return add(pass, layer->in, layer->added->out, outputs_of(layer, pass), layer->relu, layer->out);
}

/* Copies the gradient, because the gradients of the two inputs cannot share a buffer. A dropout before the
 * addition changes in_delta in place, but the other input needs the unchanged gradient. */
static enum status add_backward(const struct device_layer *layer, const struct pass *pass)
{
    if (layer->in_delta)
        CUDA_TRY(cudaMemcpyAsync(layer->in_delta, layer->out_delta,
                                 outputs_of(layer, pass) * stored_bytes(pass->precision),
                                 cudaMemcpyDeviceToDevice, pass->stream));
    return STATUS_OK;
}

enum status stored_add(const struct pass *pass, const void *from, uint32_t count, void *to)
{
    return add(pass, to, from, count, false, to);
}

enum status values_add(const float *from, size_t count, float *to, cudaStream_t stream)
{
    add_kernel<<<blocks_for(count), BLOCK, 0, stream>>>(to, from, count, false, to);
    return CUDA_LAUNCHED("add_kernel");
}

/* ---- The mean of each channel ---- */

/* Warp i averages channel i of the batch. Lane j sums positions j, j + 32, ...; a tree reduction adds these
 * sums. */
template <class T> static __global__ void mean_kernel(const T *in, uint32_t positions, uint32_t count, T *out)
{
    uint32_t i = own_element() / 32, lane = threadIdx.x % 32;
    if (i >= count)
        return;
    float sum = 0;
    for (uint32_t position = lane; position < positions; position += 32)
        sum += to_float(in[(size_t)i * positions + position]);
    sum = warp_sum(sum);
    if (lane == 0)
        store(out + i, sum / (float)positions);
}

/* Averages the channels of a channels-last tensor. Thread i averages channel i of the batch, so adjacent
 * threads read adjacent values. */
template <class T>
static __global__ void mean_last_kernel(const T *in, uint32_t positions, const struct divider channels,
                                        uint32_t count, T *out)
{
    uint32_t i = own_element(), sample = channels.quotient(i), channel = i - sample * channels.by;
    if (i >= count)
        return;
    float sum = 0;
#pragma unroll 8
    for (uint32_t position = 0; position < positions; position++)
        sum += to_float(in[(size_t)(sample * positions + position) * channels.by + channel]);
    store(out + i, sum / (float)positions);
}

static enum status mean_forward(const struct device_layer *layer, const struct pass *pass)
{
    const struct shape *shape = &layer->layer->in;
    const uint32_t count = outputs_of(layer, pass), positions = positions_of(shape);
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        const T *in = static_cast<const T *>(layer->in);
        T *out = static_cast<T *>(layer->out);
        if (layer->in_last)
            mean_last_kernel<<<blocks_for(count), BLOCK, 0, pass->stream>>>(
                in, positions, divider_of(shape->channels), count, out);
        else
            mean_kernel<<<blocks_for((size_t)count * 32), BLOCK, 0, pass->stream>>>(in, positions, count,
                                                                                    out);
        return CUDA_LAUNCHED("mean_kernel");
    });
}

/* Element i of the input is one of `adjacent` values of channel i / adjacent of the batch or, channels last,
 * one of channel i % channels of sample i / adjacent. `above` is the output of a ReLU before this layer, or
 * NULL; it may be `in_deltas`. */
template <class T>
static __global__ void mean_back_kernel(const T *out_deltas, const struct divider adjacent, bool last,
                                        const struct divider channels, float positions, const T *above,
                                        uint32_t count, T *in_deltas)
{
    uint32_t i = own_element();
    if (i >= count)
        return;
    uint32_t from = adjacent.quotient(i);
    if (last)
        from = from * channels.by + i - channels.quotient(i) * channels.by;
    float delta = to_float(out_deltas[from]) / positions;
    store(in_deltas + i, above && to_float(above[i]) <= 0 ? 0 : delta);
}

static enum status mean_backward(const struct device_layer *layer, const struct pass *pass)
{
    const uint32_t count = pass->count * (uint32_t)layer->layer->in_values;
    const uint32_t positions = positions_of(&layer->layer->in);
    if (!layer->in_delta)
        return STATUS_OK;
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        mean_back_kernel<<<blocks_for(count), BLOCK, 0, pass->stream>>>(
            static_cast<const T *>(layer->out_delta),
            divider_of(layer->in_last ? (uint32_t)layer->layer->in_values : positions), layer->in_last,
            divider_of(layer->layer->in.channels), (float)positions,
            static_cast<const T *>(layer->relu_before ? layer->in : nullptr), count,
            static_cast<T *>(layer->in_delta));
        return CUDA_LAUNCHED("mean_back_kernel");
    });
}

/* ---- Conversion of stored tensors ---- */

/* Element i of the batch in C order is in one of the two arrays; in the other one, it is stored channels last
 * if `last`. */
template <bool INTO, class From, class To>
static __global__ void convert_kernel(const From *from, const struct divider values,
                                      const struct divider positions, uint32_t channels, bool last,
                                      uint32_t count, To *to)
{
    uint32_t i = own_element(), element, position;
    if (i >= count)
        return;
    const uint32_t sample = split(i, values, &element), channel = split(element, positions, &position);
    const size_t at = last ? (size_t)(sample * positions.by + position) * channels + channel : i;
    store(to + (INTO ? i : at), to_float(from[INTO ? at : i]));
}

template <bool INTO, class From, class To>
static enum status convert(const struct shape *shape, bool last, uint32_t samples, const From *from, To *to,
                           cudaStream_t stream)
{
    const uint32_t values = (uint32_t)shape_values(shape), count = samples * values;
    convert_kernel<INTO><<<blocks_for(count), BLOCK, 0, stream>>>(
        from, divider_of(values), divider_of(positions_of(shape)), shape->channels, last, count, to);
    return CUDA_LAUNCHED("convert_kernel");
}

enum status stored_from(enum precision precision, const struct shape *shape, bool last, uint32_t count,
                        const float *from, void *to, cudaStream_t stream)
{
    return with_stored(precision, [&](auto type) {
        return convert<false>(shape, last, count, from, static_cast<decltype(type) *>(to), stream);
    });
}

enum status stored_into(enum precision precision, const struct shape *shape, bool last, uint32_t count,
                        const void *from, float *to, cudaStream_t stream)
{
    return with_stored(precision, [&](auto type) {
        return convert<true>(shape, last, count, static_cast<const decltype(type) *>(from), to, stream);
    });
}

/* ---- All kinds of layers that the engines compute layer by layer; the others have no functions ---- */

const struct layer_passes own_passes[LAYER_KINDS] = {
    /* LAYER_CONV */ {conv_prepare, conv_forward, conv_backward, nullptr},
    /* LAYER_RELU */ {nullptr, relu_forward, relu_backward, nullptr},
    /* LAYER_POOL */ {pool_prepare, pool_forward, pool_backward, nullptr},
    /* LAYER_DROPOUT */ {nullptr, dropout_forward, dropout_backward, nullptr},
    /* LAYER_LINEAR */ {nullptr, linear_forward, linear_backward, nullptr},
    /* LAYER_ADD */ {nullptr, add_forward, add_backward, nullptr},
    /* LAYER_MEAN */ {nullptr, mean_forward, mean_backward, nullptr},
};
