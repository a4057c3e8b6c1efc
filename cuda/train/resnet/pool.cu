/* Kernels before, between and after the blocks of a residual network: the images of a batch, max-pooling, the
 * mean of each channel, and the weights of the convolutions in 16 bits. */
#include "common/check.cuh"
#include "train/augment.h"
#include "train/resnet/kernels.cuh"

#define WINDOW    3 /* of the max-pooling, with stride 2 and padding 1 */
#define ROWS_EACH 4 /* rows per thread */

/* ---- Images ---- */

struct image_plan : gather_plan {
    uint32_t count;              /* pixels of the batch */
    struct divider sample, line; /* pixels per sample, and per line */
    uint32_t pixel, row;         /* distances in values in the padded image */
    size_t image;
};

template <class T, bool MIXES>
static __global__ void __launch_bounds__(BLOCK)
    images_kernel(const __grid_constant__ struct image_plan plan, const uint8_t *stored,
                  const __grid_constant__ struct device_batch batch, T *images)
{
    const uint32_t i = own_element();
    if (i >= plan.count)
        return;
    const uint32_t j = plan.sample.quotient(i), at = i - j * plan.sample.by;
    const uint32_t y = plan.line.quotient(at), x = at - y * plan.line.by;
    const uint32_t plane = plan.shape.height * plan.shape.width;
    const uint8_t *own = stored_sample(plan, stored, batch, j);
    const uint8_t *partner = MIXES ? stored_sample(plan, stored, batch, plan.samples + j) : own;
    const bool erases = !MIXES || !batch.erase_last;
    float values[IMAGE_CHANNELS] = {};
#pragma unroll
    for (uint32_t c = 0; c < IMAGE_CHANNELS; c++) {
        if (c >= plan.shape.channels)
            continue;
        values[c] = gathered(plan, own, batch.moves[j], erases, c, c * plane, y, x);
        if (MIXES)
            values[c] =
                mix_value(&batch.mix, y, x, values[c],
                          gathered(plan, partner, batch.moves[plan.samples + j], erases, c, c * plane, y, x));
        if (!erases)
            values[c] =
                box_erased(&batch.moves[j].erase, y, x, c * plane + y * plan.shape.width + x, values[c]);
    }
    T *to = images + j * plan.image + (size_t)(y + STEM_PADDING) * plan.row + (x + STEM_PADDING) * plan.pixel;
    *reinterpret_cast<uint2 *>(to) = {pack<T>(values[0], values[1]), pack<T>(values[2], values[3])};
}

template <class T>
enum status resnet_gather(const struct data *data, const struct device_set *set,
                          const struct device_batch *batch, uint32_t count, const struct conv_shape *stem,
                          T *images, cudaStream_t stream)
{
    const uint32_t pixels = data->shape.height * data->shape.width;
    const struct image_plan plan = {gather_plan_of(data, set, count),
                                    count * pixels,
                                    divider_of(pixels),
                                    divider_of(data->shape.width),
                                    stem->pixel,
                                    stem->line,
                                    stem->image};
    auto *kernel = batch->mix.share < 1 ? images_kernel<T, true> : images_kernel<T, false>;
    kernel<<<blocks_for(plan.count), BLOCK, 0, stream>>>(plan, static_cast<const uint8_t *>(set->values),
                                                         *batch, images);
    return CUDA_LAUNCHED("images_kernel");
}

/* ---- Max-pooling ---- */

/* The rows of a tensor as pixels of samples. */
struct pool_plan {
    uint32_t height, width, out_height, out_width, channels;
    size_t rows;                 /* of the outputs, or in the backward pass of the inputs */
    struct divider sample, line; /* rows per sample, and per line */
    const float *values;         /* of the normalisation */
};

struct pool_pixel {
    uint32_t n, y, x;
};

static __device__ __forceinline__ struct pool_pixel pixel_of(const struct pool_plan &plan, uint32_t row)
{
    const uint32_t n = plan.sample.quotient(row), at = row - n * plan.sample.by, y = plan.line.quotient(at);
    return {n, y, at - y * plan.line.by};
}

/* The output of ReLU never is below 0, so the first element of a window inside the image wins over the
 * padding. */
template <class T>
static __global__ void __launch_bounds__(BLOCK)
    pool_kernel(const __grid_constant__ struct pool_plan plan, const T *inputs, T *outputs, uint8_t *largest)
{
    const struct spread own = spread_of(plan.rows, plan.channels);
    if (own.idle)
        return;
    const struct eight scale = load8(plan.values + NORM_SCALE * plan.channels + own.channel);
    const struct eight shift = load8(plan.values + NORM_SHIFT * plan.channels + own.channel);
    for (size_t row = own.first; row < own.end; row += own.step) {
        const struct pool_pixel to = pixel_of(plan, (uint32_t)row);
        struct eight best;
        uint32_t index[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            best.value[i] = -1;
            index[i] = 0;
        }
#pragma unroll
        for (uint32_t tap = 0; tap < WINDOW * WINDOW; tap++) {
            const uint32_t y = 2 * to.y + tap / WINDOW - 1, x = 2 * to.x + tap % WINDOW - 1;
            if (y >= plan.height || x >= plan.width) /* also if it is -1 */
                continue;
            const size_t at =
                ((size_t)(to.n * plan.height + y) * plan.width + x) * plan.channels + own.channel;
            const struct eight value = load8(inputs + at);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float norm = fmaf(value.value[i], scale.value[i], shift.value[i]);
                const float relu = norm <= 0 ? 0 : norm;
                if (relu > best.value[i] || isnan(relu)) {
                    best.value[i] = relu;
                    index[i] = tap;
                }
            }
        }
        const size_t at = row * plan.channels + own.channel;
        *reinterpret_cast<uint4 *>(outputs + at) = pack8<T>(best);
        *reinterpret_cast<uint2 *>(largest +
                                   at) = {index[0] | index[1] << 8 | index[2] << 16 | index[3] << 24,
                                          index[4] | index[5] << 8 | index[6] << 16 | index[7] << 24};
    }
}

static struct pool_plan plan_of(const struct resnet_pool *pool, uint32_t samples, bool backward)
{
    const uint32_t height = backward ? pool->height : pool->out_height;
    const uint32_t width = backward ? pool->width : pool->out_width;
    return {pool->height,
            pool->width,
            pool->out_height,
            pool->out_width,
            pool->norm.channels,
            (size_t)samples * height * width,
            divider_of(height * width),
            divider_of(width),
            pool->norm.values};
}

template <class T>
enum status resnet_pool_forward(const struct resnet_pool *pool, uint32_t samples, const T *inputs, T *outputs,
                                uint8_t *largest, cudaStream_t stream)
{
    const struct pool_plan plan = plan_of(pool, samples, false);
    pool_kernel<T><<<spread_blocks(plan.rows, plan.channels, ROWS_EACH, UINT32_MAX), BLOCK, 0, stream>>>(
        plan, inputs, outputs, largest);
    return CUDA_LAUNCHED("pool_kernel");
}

/* An input is in up to four windows: those of the outputs (y + 1) / 2 and, if y is odd, also (y + 1) / 2 - 1
 * along each axis. */
template <class T>
static __global__ void __launch_bounds__(BLOCK)
    pool_backward_kernel(const __grid_constant__ struct pool_plan plan, const T *deltas,
                         const uint8_t *largest, const T *inputs, T *in_deltas, float *partial)
{
    __shared__ float scratch[8 * BLOCK];
    const struct spread own = spread_of(plan.rows, plan.channels);
    const uint32_t channel = own.idle ? 0 : own.channel;
    const struct eight scale = load8(plan.values + NORM_SCALE * plan.channels + channel);
    const struct eight shift = load8(plan.values + NORM_SHIFT * plan.channels + channel);
    float sums[8] = {}, products[8] = {};
    for (size_t row = own.first; row < own.end; row += own.step) {
        const struct pool_pixel to = pixel_of(plan, (uint32_t)row);
        struct eight delta = {};
#pragma unroll
        for (uint32_t window = 0; window < 4; window++) {
            const uint32_t p = (to.y + 1) / 2 - window / 2, q = (to.x + 1) / 2 - window % 2;
            const uint32_t tap_y = to.y + 1 - 2 * p, tap_x = to.x + 1 - 2 * q;
            if (p >= plan.out_height || q >= plan.out_width || tap_y >= WINDOW || tap_x >= WINDOW)
                continue;
            const size_t at =
                ((size_t)(to.n * plan.out_height + p) * plan.out_width + q) * plan.channels + own.channel;
            const struct eight value = load8(deltas + at);
            const uint2 words = *reinterpret_cast<const uint2 *>(largest + at);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (((i < 4 ? words.x : words.y) >> 8 * (i % 4) & 255u) == tap_y * WINDOW + tap_x)
                    delta.value[i] += value.value[i];
        }
        const size_t at = row * plan.channels + own.channel;
        const struct eight input = load8(inputs + at);
#pragma unroll
        for (int i = 0; i < 8; i++)
            delta.value[i] = fmaf(input.value[i], scale.value[i], shift.value[i]) > 0 ? delta.value[i] : 0;
        const uint4 words = pack8<T>(delta);
        delta = unpack8<T>(words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sums[i] += delta.value[i];
            products[i] = fmaf(delta.value[i], input.value[i], products[i]);
        }
        *reinterpret_cast<uint4 *>(in_deltas + at) = words;
    }
    partial += (size_t)blockIdx.x * 2 * plan.channels;
    spread_sums(own, sums, plan.channels, scratch, partial);
    spread_sums(own, products, plan.channels, scratch, partial + plan.channels);
}

template <class T>
enum status resnet_pool_backward(const struct resnet_pool *pool, uint32_t samples, const T *deltas,
                                 const uint8_t *largest, const T *inputs, T *in_deltas, uint32_t *parts,
                                 cudaStream_t stream)
{
    const struct pool_plan plan = plan_of(pool, samples, true);
    *parts = spread_blocks(plan.rows, plan.channels, ROWS_EACH, RESNET_PARTS);
    pool_backward_kernel<T>
        <<<*parts, BLOCK, 0, stream>>>(plan, deltas, largest, inputs, in_deltas, pool->norm.partial);
    return CUDA_LAUNCHED("pool_backward_kernel");
}

/* ---- The mean of each channel ---- */

/* A thread computes the means of 8 channels of a sample. */
template <class T>
static __global__ void __launch_bounds__(BLOCK)
    mean_kernel(uint32_t samples, uint32_t pixels, uint32_t channels, const T *inputs, T *means)
{
    const uint32_t i = own_element(), groups = channels / 8;
    if (i >= samples * groups)
        return;
    const uint32_t sample = i / groups, channel = (i - sample * groups) * 8;
    struct eight sums = {};
#pragma unroll 4
    for (uint32_t pixel = 0; pixel < pixels; pixel++) {
        const struct eight value = load8(inputs + ((size_t)sample * pixels + pixel) * channels + channel);
#pragma unroll
        for (int k = 0; k < 8; k++)
            sums.value[k] += value.value[k];
    }
#pragma unroll
    for (int k = 0; k < 8; k++)
        sums.value[k] /= (float)pixels;
    *reinterpret_cast<uint4 *>(means + (size_t)sample * channels + channel) = pack8<T>(sums);
}

template <class T>
enum status resnet_mean(uint32_t samples, uint32_t pixels, uint32_t channels, const T *inputs, T *means,
                        cudaStream_t stream)
{
    mean_kernel<T><<<blocks_for((size_t)samples * channels / 8), BLOCK, 0, stream>>>(samples, pixels,
                                                                                     channels, inputs, means);
    return CUDA_LAUNCHED("mean_kernel");
}

template <class T> struct mean_plan {
    uint32_t pixels, channels;
    struct divider sample;
    size_t rows;
    const T *relu, *inputs[2]; /* inputs of normalisations; NULL: none */
    float *partial[2];
};

template <class T>
static __global__ void __launch_bounds__(BLOCK)
    mean_backward_kernel(const __grid_constant__ struct mean_plan<T> plan, const T *deltas, T *in_deltas)
{
    __shared__ float scratch[8 * BLOCK];
    const struct spread own = spread_of(plan.rows, plan.channels);
    const float factor = 1 / (float)plan.pixels;
    float sums[8] = {}, products[2][8] = {};
    for (size_t row = own.first; row < own.end; row += own.step) {
        const size_t at = row * plan.channels + own.channel;
        struct eight delta =
            load8(deltas + (size_t)plan.sample.quotient((uint32_t)row) * plan.channels + own.channel);
        const struct eight relu = load8(plan.relu + at);
#pragma unroll
        for (int i = 0; i < 8; i++)
            delta.value[i] = relu.value[i] > 0 ? delta.value[i] * factor : 0;
        const uint4 words = pack8<T>(delta);
        delta = unpack8<T>(words);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sums[i] += delta.value[i];
#pragma unroll
        for (int s = 0; s < 2; s++)
            if (plan.inputs[s]) {
                const struct eight input = load8(plan.inputs[s] + at);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    products[s][i] = fmaf(delta.value[i], input.value[i], products[s][i]);
            }
        *reinterpret_cast<uint4 *>(in_deltas + at) = words;
    }
#pragma unroll
    for (int s = 0; s < 2; s++)
        if (plan.inputs[s]) {
            float *to = plan.partial[s] + (size_t)blockIdx.x * 2 * plan.channels;
            spread_sums(own, sums, plan.channels, scratch, to);
            spread_sums(own, products[s], plan.channels, scratch, to + plan.channels);
        }
}

template <class T>
enum status resnet_mean_backward(uint32_t samples, uint32_t pixels, uint32_t channels, const T *deltas,
                                 const struct resnet_after<T> *after, T *in_deltas, uint32_t *parts,
                                 cudaStream_t stream)
{
    struct mean_plan<T> plan = {
        pixels, channels, divider_of(pixels), (size_t)samples *pixels, after->relu
    };
    for (int s = 0; s < 2; s++)
        if (after->summed[s].norm) {
            plan.inputs[s] = after->summed[s].inputs;
            plan.partial[s] = after->summed[s].norm->partial;
        }
    *parts = spread_blocks(plan.rows, channels, ROWS_EACH, RESNET_PARTS);
    mean_backward_kernel<T><<<*parts, BLOCK, 0, stream>>>(plan, deltas, in_deltas);
    return CUDA_LAUNCHED("mean_backward_kernel");
}

/* ---- Weights ---- */

#define EDGE 32 /* outputs and inputs per block */

template <class T> uint32_t resnet_pack_blocks(struct resnet_packing<T> *packs, uint32_t count)
{
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < count; i++) {
        packs[i].first_block = blocks;
        blocks += (packs[i].outputs + EDGE - 1) / EDGE * ((packs[i].inputs + EDGE - 1) / EDGE);
    }
    return blocks;
}

/* A block converts EDGE x EDGE pairs of outputs and inputs of a convolution, one tap after another. Its
 * threads read and write adjacent inputs, and, after an exchange in shared memory, write adjacent outputs. */
template <class T>
static __global__ void __launch_bounds__(BLOCK)
    pack_kernel(const struct resnet_packing<T> *packs, uint32_t count, const T *parameters)
{
    __shared__ T tile[EDGE][EDGE + 2];
    uint32_t which = 0;
    while (which + 1 < count && packs[which + 1].first_block <= blockIdx.x)
        which++;
    const struct resnet_packing<T> packing = packs[which];
    const uint32_t across = (packing.inputs + EDGE - 1) / EDGE, own = blockIdx.x - packing.first_block;
    const uint32_t output = own / across * EDGE, input = own % across * EDGE;
    const uint32_t lane = threadIdx.x % EDGE, taps = packing.kernel * packing.kernel;
    for (uint32_t tap = 0; tap < taps; tap++) {
        __syncthreads();
        for (uint32_t r = threadIdx.x / EDGE; r < EDGE; r += BLOCK / EDGE) {
            const uint32_t o = output + r, c = input + lane;
            if (o >= packing.outputs || c >= packing.inputs)
                continue;
            const T value = parameters[packing.from + ((size_t)o * packing.inputs + c) * taps + tap];
            tile[r][lane] = value;
            const size_t at = packing.stem ? ((size_t)o * STEM_KERNEL + tap / STEM_KERNEL) * STEM_CHANNELS +
                                                 tap % STEM_KERNEL * IMAGE_CHANNELS + c
                                           : ((size_t)o * taps + tap) * packing.inputs + c;
            packing.weights[at] = value;
        }
        __syncthreads();
        for (uint32_t r = threadIdx.x / EDGE; packing.opposite && r < EDGE; r += BLOCK / EDGE) {
            const uint32_t o = output + lane, c = input + r;
            if (o < packing.outputs && c < packing.inputs)
                packing.opposite[((size_t)c * taps + tap) * packing.outputs + o] = tile[lane][r];
        }
    }
}

template <class T>
enum status resnet_pack(const struct resnet_packing<T> *packs, uint32_t count, uint32_t blocks,
                        const T *parameters, cudaStream_t stream)
{
    pack_kernel<T><<<blocks, BLOCK, 0, stream>>>(packs, count, parameters);
    return CUDA_LAUNCHED("pack_kernel");
}

EACH_HALF(resnet_gather)
EACH_HALF(resnet_pool_forward)
EACH_HALF(resnet_pool_backward)
EACH_HALF(resnet_mean)
EACH_HALF(resnet_mean_backward)
EACH_HALF(resnet_pack_blocks)
EACH_HALF(resnet_pack)
