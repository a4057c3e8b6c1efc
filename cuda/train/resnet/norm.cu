/* Batch normalisation with its neighbours: ReLU and the addition of a shortcut. The convolutions write the
 * partial sums over the batch; the kernels here add them up, and visit each tensor once per pass. */
#include "common/check.cuh"
#include "train/resnet/kernels.cuh"

#define SUM_CHANNELS 8  /* channels per block of the sums */
#define SUM_LANES    64 /* threads per channel */
#define ROWS_EACH    8  /* rows per thread */
#define BATCH        4  /* rows whose values a thread loads before it stores the first of them */

/* ---- Sums over the batch ---- */

struct sums_plan {
    struct resnet_norm norm;
    uint32_t parts;
    double rows;
    float share;           /* forward only */
    float *first, *second; /* forward: mean and variance; backward: gradients of weight and bias */
    float *sums; /* two arrays of `channels` values that the ranks add up; NULL: normalises over own rows */
    double all;  /* rows of all ranks */
};

/* The two sums of a channel. */
struct channel_sums {
    double first, second;
};

/* Adds up the partial sums of a channel in order. The result is valid in the threads of lane 0. */
static __device__ struct channel_sums add_up(const struct sums_plan &plan, uint32_t channel, uint32_t lane)
{
    __shared__ struct channel_sums all[SUM_LANES][SUM_CHANNELS];
    const uint32_t own = threadIdx.x % SUM_CHANNELS, channels = plan.norm.channels;
    struct channel_sums sums = {0, 0};
    if (channel < channels)
#pragma unroll 4
        for (uint32_t part = lane; part < plan.parts; part += SUM_LANES) {
            sums.first += plan.norm.partial[(size_t)part * 2 * channels + channel];
            sums.second += plan.norm.partial[((size_t)part * 2 + 1) * channels + channel];
        }
    all[lane][own] = sums;
    for (uint32_t half = SUM_LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) {
            all[lane][own].first += all[lane + half][own].first;
            all[lane][own].second += all[lane + half][own].second;
        }
    }
    return all[0][own];
}

static __device__ __forceinline__ void set_forward(const struct resnet_norm &norm, uint32_t channel,
                                                   double mean, double variance)
{
    float *values = norm.values + channel;
    const uint32_t channels = norm.channels;
    const float inverse = (float)(1 / sqrt(variance + BATCH_NORM_EPSILON));
    const float scale = norm.weight[channel] * inverse;
    values[NORM_SCALE * channels] = scale;
    values[NORM_SHIFT * channels] = (float)(norm.bias[channel] - mean * scale);
    values[NORM_MEAN * channels] = (float)mean;
    values[NORM_INVERSE * channels] = inverse;
}

/* Writes a rank's share of the gradients of the running statistics; the variance is the unbiased one. */
static __device__ __forceinline__ void set_statistics(const struct sums_plan &plan, uint32_t channel,
                                                      double mean, double variance, double rows)
{
    plan.first[channel] = (float)(plan.share * mean);
    plan.second[channel] = (float)(plan.share * variance * rows / (rows > 1 ? rows - 1 : 1));
}

/* Sets what the gradients of the inputs need from the means of g and of g times the normalised input. */
static __device__ __forceinline__ void set_backward(const struct resnet_norm &norm, uint32_t channel,
                                                    double mean, double products)
{
    float *values = norm.values + channel;
    const uint32_t channels = norm.channels;
    const double scale = values[NORM_SCALE * channels];
    const double bend = -scale * values[NORM_INVERSE * channels] * products;
    values[NORM_SLOPE * channels] = (float)scale;
    values[NORM_BEND * channels] = (float)bend;
    values[NORM_REST * channels] = (float)(-scale * mean - bend * values[NORM_MEAN * channels]);
}

static __global__ void __launch_bounds__(SUM_CHANNELS *SUM_LANES) moments_kernel(const struct sums_plan plan)
{
    const uint32_t lane = threadIdx.x / SUM_CHANNELS;
    const uint32_t channel = blockIdx.x * SUM_CHANNELS + threadIdx.x % SUM_CHANNELS;
    const struct channel_sums sums = add_up(plan, channel, lane);
    if (lane > 0 || channel >= plan.norm.channels)
        return;
    const double mean = sums.first / plan.rows, squares = sums.second / plan.rows - mean * mean;
    const double variance = squares < 0 ? 0 : squares; /* keeps NaN */
    set_forward(plan.norm, channel, mean, variance);
    set_statistics(plan, channel, mean, variance, plan.rows);
}

static __global__ void __launch_bounds__(BLOCK)
    running_kernel(const struct resnet_norm norm, const float *mean, const float *variance)
{
    const uint32_t channel = own_element();
    if (channel < norm.channels)
        set_forward(norm, channel, mean[channel], variance[channel]);
}

/* With the normalised input x, the gradient of the input is scale * (g - mean(g) - x * mean(g x)) (Ioffe and
 * Szegedy, "Batch normalization", 2015). */
static __global__ void __launch_bounds__(SUM_CHANNELS *SUM_LANES) slopes_kernel(const struct sums_plan plan)
{
    const uint32_t lane = threadIdx.x / SUM_CHANNELS, channels = plan.norm.channels;
    const uint32_t channel = blockIdx.x * SUM_CHANNELS + threadIdx.x % SUM_CHANNELS;
    const struct channel_sums sums = add_up(plan, channel, lane);
    if (lane > 0 || channel >= channels)
        return;
    const float *values = plan.norm.values + channel;
    const double inverse = values[NORM_INVERSE * channels];
    const double products = inverse * (sums.second - values[NORM_MEAN * channels] * sums.first); /* g x */
    plan.first[channel] = (float)products;
    plan.second[channel] = (float)sums.first;
    if (plan.sums) {
        plan.sums[channel] = (float)(sums.first / plan.all);
        plan.sums[channels + channel] = (float)(products / plan.all);
    } else
        set_backward(plan.norm, channel, sums.first / plan.rows, products / plan.rows);
}

/* ---- Sums over all ranks. They are means over all rows, in fp32, of values minus `shift`, which is near
 * their mean: the difference of the square of a mean and a mean of squares then keeps its digits. ---- */

static __global__ void __launch_bounds__(SUM_CHANNELS *SUM_LANES)
    shared_sums_kernel(const struct sums_plan plan, const float *shift)
{
    const uint32_t lane = threadIdx.x / SUM_CHANNELS, channels = plan.norm.channels;
    const uint32_t channel = blockIdx.x * SUM_CHANNELS + threadIdx.x % SUM_CHANNELS;
    const struct channel_sums sums = add_up(plan, channel, lane);
    if (lane > 0 || channel >= channels)
        return;
    const double by = shift[channel];
    plan.sums[channel] = (float)((sums.first - plan.rows * by) / plan.all);
    plan.sums[channels + channel] =
        (float)((sums.second - 2 * by * sums.first + plan.rows * by * by) / plan.all);
}

static __global__ void __launch_bounds__(BLOCK)
    shared_moments_kernel(const struct sums_plan plan, const float *shift)
{
    const uint32_t channel = own_element(), channels = plan.norm.channels;
    if (channel >= channels)
        return;
    const double off = plan.sums[channel], squares = plan.sums[channels + channel] - off * off;
    const double mean = shift[channel] + off, variance = squares < 0 ? 0 : squares; /* keeps NaN */
    set_forward(plan.norm, channel, mean, variance);
    set_statistics(plan, channel, mean, variance, plan.all);
}

static __global__ void __launch_bounds__(BLOCK) shared_slopes_kernel(const struct sums_plan plan)
{
    const uint32_t channel = own_element(), channels = plan.norm.channels;
    if (channel < channels)
        set_backward(plan.norm, channel, plan.sums[channel], plan.sums[channels + channel]);
}

static uint32_t sum_blocks(const struct resnet_norm *norm)
{
    return (norm->channels + SUM_CHANNELS - 1) / SUM_CHANNELS;
}

enum status resnet_moments(const struct resnet_norm *norm, uint32_t parts, size_t rows, float share,
                           float *mean, float *variance, cudaStream_t stream)
{
    const struct sums_plan plan = {*norm, parts, (double)rows, share, mean, variance, nullptr, 0};
    moments_kernel<<<sum_blocks(norm), SUM_CHANNELS * SUM_LANES, 0, stream>>>(plan);
    return CUDA_LAUNCHED("moments_kernel");
}

enum status resnet_running(const struct resnet_norm *norm, const float *mean, const float *variance,
                           cudaStream_t stream)
{
    running_kernel<<<blocks_for(norm->channels), BLOCK, 0, stream>>>(*norm, mean, variance);
    return CUDA_LAUNCHED("running_kernel");
}

enum status resnet_slopes(const struct resnet_norm *norm, uint32_t parts, size_t rows, float *weight,
                          float *bias, cudaStream_t stream)
{
    const struct sums_plan plan = {*norm, parts, (double)rows, 1, weight, bias};
    slopes_kernel<<<sum_blocks(norm), SUM_CHANNELS * SUM_LANES, 0, stream>>>(plan);
    return CUDA_LAUNCHED("slopes_kernel");
}

enum status resnet_shared_moments_begin(const struct resnet_norm *norm, const struct resnet_shared *shared,
                                        uint32_t parts, const float *shift, cudaStream_t stream)
{
    const struct sums_plan plan = {*norm,   parts,   (double)shared->rows, 0,
                                   nullptr, nullptr, shared->sums,         (double)shared->all};
    shared_sums_kernel<<<sum_blocks(norm), SUM_CHANNELS * SUM_LANES, 0, stream>>>(plan, shift);
    return CUDA_LAUNCHED("shared_sums_kernel");
}

enum status resnet_shared_moments_end(const struct resnet_norm *norm, const struct resnet_shared *shared,
                                      const float *shift, float *mean, float *variance, cudaStream_t stream)
{
    const struct sums_plan plan = {
        *norm, 0,        (double)shared->rows, (float)shared->rows / (float)shared->all,
        mean,  variance, shared->sums,         (double)shared->all};
    shared_moments_kernel<<<blocks_for(norm->channels), BLOCK, 0, stream>>>(plan, shift);
    return CUDA_LAUNCHED("shared_moments_kernel");
}

enum status resnet_shared_slopes_begin(const struct resnet_norm *norm, const struct resnet_shared *shared,
                                       uint32_t parts, float *weight, float *bias, cudaStream_t stream)
{
    const struct sums_plan plan = {*norm,  parts, (double)shared->rows, 0,
                                   weight, bias,  shared->sums,         (double)shared->all};
    slopes_kernel<<<sum_blocks(norm), SUM_CHANNELS * SUM_LANES, 0, stream>>>(plan);
    return CUDA_LAUNCHED("slopes_kernel");
}

enum status resnet_shared_slopes_end(const struct resnet_norm *norm, const struct resnet_shared *shared,
                                     cudaStream_t stream)
{
    const struct sums_plan plan = {*norm,   0,       (double)shared->rows, 0,
                                   nullptr, nullptr, shared->sums,         (double)shared->all};
    shared_slopes_kernel<<<blocks_for(norm->channels), BLOCK, 0, stream>>>(plan);
    return CUDA_LAUNCHED("shared_slopes_kernel");
}

/* ---- Forward ---- */

enum shortcut { SHORTCUT_NONE, SHORTCUT_PLAIN, SHORTCUT_NORM };

template <class T, enum shortcut SHORTCUT>
static __global__ void __launch_bounds__(BLOCK)
    apply_kernel(size_t rows, uint32_t channels, const float *values, const T *inputs,
                 const float *other_values, const T *shortcut, T *outputs)
{
    const struct spread own = spread_of(rows, channels);
    if (own.idle)
        return;
    const struct eight scale = load8(values + NORM_SCALE * channels + own.channel);
    const struct eight shift = load8(values + NORM_SHIFT * channels + own.channel);
    struct eight other_scale = {}, other_shift = {};
    if (SHORTCUT == SHORTCUT_NORM) {
        other_scale = load8(other_values + NORM_SCALE * channels + own.channel);
        other_shift = load8(other_values + NORM_SHIFT * channels + own.channel);
    }
    for (size_t first = own.first; first < own.end; first += BATCH * own.step) {
        uint4 words[BATCH], added_words[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const size_t at = (first + k * own.step) * channels + own.channel;
            if (first + k * own.step >= own.end)
                continue;
            words[k] = *reinterpret_cast<const uint4 *>(inputs + at);
            if (SHORTCUT != SHORTCUT_NONE)
                added_words[k] = *reinterpret_cast<const uint4 *>(shortcut + at);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const size_t at = (first + k * own.step) * channels + own.channel;
            if (first + k * own.step >= own.end)
                continue;
            struct eight value = unpack8<T>(words[k]), added = {};
            if (SHORTCUT != SHORTCUT_NONE)
                added = unpack8<T>(added_words[k]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float sum = fmaf(value.value[i], scale.value[i], shift.value[i]);
                if (SHORTCUT == SHORTCUT_PLAIN)
                    sum += added.value[i];
                if (SHORTCUT == SHORTCUT_NORM)
                    sum += fmaf(added.value[i], other_scale.value[i], other_shift.value[i]);
                value.value[i] = sum <= 0 ? 0 : sum; /* NaN passes through */
            }
            *reinterpret_cast<uint4 *>(outputs + at) = pack8<T>(value);
        }
    }
}

template <class T>
enum status resnet_apply(const struct resnet_norm *norm, size_t rows, const T *inputs,
                         const struct resnet_norm *other, const T *shortcut, T *outputs, cudaStream_t stream)
{
    auto *kernel = !shortcut ? apply_kernel<T, SHORTCUT_NONE>
                   : other   ? apply_kernel<T, SHORTCUT_NORM>
                             : apply_kernel<T, SHORTCUT_PLAIN>;
    kernel<<<spread_blocks(rows, norm->channels, ROWS_EACH, UINT32_MAX), BLOCK, 0, stream>>>(
        rows, norm->channels, norm->values, inputs, other ? other->values : nullptr, shortcut, outputs);
    return CUDA_LAUNCHED("apply_kernel");
}

/* ---- Backward ---- */

template <class T>
static __global__ void __launch_bounds__(BLOCK)
    norm_backward_kernel(size_t rows, uint32_t channels, const float *values, const T *deltas,
                         const T *inputs, T *in_deltas)
{
    const struct spread own = spread_of(rows, channels);
    if (own.idle)
        return;
    const struct eight slope = load8(values + NORM_SLOPE * channels + own.channel);
    const struct eight bend = load8(values + NORM_BEND * channels + own.channel);
    const struct eight rest = load8(values + NORM_REST * channels + own.channel);
    for (size_t first = own.first; first < own.end; first += BATCH * own.step) {
        uint4 words[BATCH], input_words[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const size_t at = (first + k * own.step) * channels + own.channel;
            if (first + k * own.step >= own.end)
                continue;
            words[k] = *reinterpret_cast<const uint4 *>(deltas + at);
            input_words[k] = *reinterpret_cast<const uint4 *>(inputs + at);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const size_t at = (first + k * own.step) * channels + own.channel;
            if (first + k * own.step >= own.end)
                continue;
            struct eight delta = unpack8<T>(words[k]);
            const struct eight input = unpack8<T>(input_words[k]);
#pragma unroll
            for (int i = 0; i < 8; i++)
                delta.value[i] =
                    fmaf(delta.value[i], slope.value[i], fmaf(input.value[i], bend.value[i], rest.value[i]));
            *reinterpret_cast<uint4 *>(in_deltas + at) = pack8<T>(delta);
        }
    }
}

template <class T>
enum status resnet_norm_backward(const struct resnet_norm *norm, size_t rows, const T *deltas,
                                 const T *inputs, T *in_deltas, cudaStream_t stream)
{
    norm_backward_kernel<T><<<spread_blocks(rows, norm->channels, ROWS_EACH, UINT32_MAX), BLOCK, 0, stream>>>(
        rows, norm->channels, norm->values, deltas, inputs, in_deltas);
    return CUDA_LAUNCHED("norm_backward_kernel");
}

EACH_HALF(resnet_apply)
EACH_HALF(resnet_norm_backward)
