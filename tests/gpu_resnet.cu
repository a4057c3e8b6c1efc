/* Compares the kernels of the engine `resnet` with plain loops in double precision, over odd sizes, and their
 * partial sums with the values that they stored. Every kernel runs twice and must give the same bits. Planted
 * faults must exceed the bounds. gpu_train compares whole networks.
 *
 *     gpu_resnet [--times [BATCH]]
 *
 * --times: instead, print the time of each convolution of resnet50 at 224 x 224 pixels next to the least time
 * that its arithmetic and its memory traffic need on an H200 (default: batch 256).
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_learner.cuh"

#include <functional>
#include <type_traits>
#include <vector>

#include "core/philox.h"
#include "machine/device.h"
#include "train/resnet/kernels.cuh"

static int failures;

static void tell(bool well, const char *name, double off, double bound)
{
    printf("%s  %-60s error %.1e (bound %.0e)\n", well ? "ok    " : "FAILED", name, off, bound);
    failures += !well;
}

/* ---- Arrays in device memory, with a guard after the last value ---- */

#define GUARD 64

template <class T> struct array {
    std::vector<T> host;
    T *device = nullptr;

    explicit array(size_t count) : host(count)
    {
        must(cudaMalloc(&device, (count + GUARD) * sizeof(T)));
        must(cudaMemset(device, 0xff, (count + GUARD) * sizeof(T))); /* NaN in bf16, fp16 and fp32 */
    }
    array(const array &) = delete;
    ~array()
    {
        (void)cudaFree(device);
    }
    void up()
    {
        must(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    /* Copies the values to the host. Returns whether the guard is intact. */
    bool down()
    {
        std::vector<uint8_t> guard(GUARD * sizeof(T));
        must(cudaDeviceSynchronize());
        must(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
        must(cudaMemcpy(guard.data(), device + host.size(), guard.size(), cudaMemcpyDeviceToHost));
        for (uint8_t byte : guard)
            if (byte != 0xff)
                return false;
        return true;
    }
};

static uint32_t stream_number;

/* Fills an array with random values in +-size, and copies it to the device. */
template <class T> static void fill(array<T> &values, float size)
{
    const uint32_t stream = ++stream_number;
    for (size_t i = 0; i < values.host.size(); i++) {
        const uint32_t word = philox(philox_key(3), (uint32_t)i, stream, 0, 0).word[0];
        values.host[i] = (T)(size * ((float)(word >> 8) / 8388608.0f - 1));
    }
    values.up();
}

typedef std::vector<double> reals;

template <class T> static reals doubles(const array<T> &values)
{
    reals all(values.host.size());
    for (size_t i = 0; i < all.size(); i++)
        all[i] = (double)(float)values.host[i];
    return all;
}

static double distance(const reals &mine, const reals &right)
{
    double off = 0, all = 0;
    for (size_t i = 0; i < right.size(); i++) {
        off += (mine[i] - right[i]) * (mine[i] - right[i]);
        all += right[i] * right[i];
    }
    return off == 0 ? 0 : sqrt(off / fmax(all, 1e-30));
}

/* Bounds of relative errors: of results that are rounded to the 16-bit type T, and of sums in fp32. */
template <class T> static constexpr double bound_of = std::is_same<T, bf16>::value ? 4e-3 : 5e-4;
#define BOUND_SUMS 1e-4

/* Runs `work`, which writes `result`, twice. Compares it with `right`. A faulty result, one value of which is
 * replaced by that of its neighbour with the opposite sign, must exceed the bound of bit equality. */
template <class T>
static void compare(const char *name, array<T> &result, const reals &right, double bound,
                    const std::function<void()> &work)
{
    work();
    bool well = result.down();
    const std::vector<T> first = result.host;
    const double off = distance(doubles(result), right);
    work();
    well &= result.down() && memcmp(first.data(), result.host.data(), first.size() * sizeof(T)) == 0;
    tell(well && off <= bound, name, off, bound);
}

/* ---- References ---- */

/* Calls `visit` with the offsets of every product of a convolution: input, weight and output. */
template <class VISIT> static void each_product(const struct conv_shape &shape, uint32_t samples, VISIT visit)
{
    for (uint32_t n = 0; n < samples; n++)
        for (uint32_t p = 0; p < shape.out_height; p++)
            for (uint32_t q = 0; q < shape.out_width; q++)
                for (uint32_t i = 0; i < shape.kernel_y; i++)
                    for (uint32_t j = 0; j < shape.kernel_x; j++) {
                        const int64_t y = (int64_t)p * shape.stride + i - shape.padding;
                        const int64_t x = (int64_t)q * shape.stride + j - shape.padding;
                        if (y < 0 || x < 0 || y >= shape.height || x >= shape.width)
                            continue;
                        const size_t in = n * shape.image + (size_t)y * shape.line + (size_t)x * shape.pixel;
                        const size_t out =
                            (((size_t)n * shape.out_height + p) * shape.out_width + q) * shape.outputs;
                        const size_t tap = (size_t)i * shape.kernel_x + j;
                        const size_t taps = (size_t)shape.kernel_y * shape.kernel_x;
                        for (uint32_t o = 0; o < shape.outputs; o++)
                            for (uint32_t c = 0; c < shape.channels; c++)
                                visit(in + c, (o * taps + tap) * shape.channels + c, out + o);
                    }
}

/* Adds up the two sums per channel over the parts. */
static reals add_parts(const array<float> &partial, uint32_t parts, uint32_t channels)
{
    reals sums(2 * channels);
    for (uint32_t part = 0; part < parts; part++)
        for (uint32_t i = 0; i < 2 * channels; i++)
            sums[i] += partial.host[(size_t)part * 2 * channels + i];
    return sums;
}

static void check_sums(const char *name, array<float> &partial, uint32_t parts, uint32_t channels,
                       const reals &right)
{
    const bool whole = partial.down();
    const double off = distance(add_parts(partial, parts, channels), right);
    tell(whole && off <= BOUND_SUMS, name, off, BOUND_SUMS);
}

/* Sums of the values of each channel, and of their products with `others`. */
static reals sums_of(const reals &values, const std::function<double(size_t, uint32_t)> &others,
                     uint32_t channels)
{
    reals sums(2 * channels);
    for (size_t i = 0; i < values.size(); i++) {
        const uint32_t c = (uint32_t)(i % channels);
        sums[c] += values[i];
        sums[channels + c] += values[i] * others(i, c);
    }
    return sums;
}

/* ---- Convolutions ---- */

struct trial {
    uint32_t samples, height, width, channels, outputs, kernel, stride;
};

static const struct trial trials[] = {
    {1, 1, 1, 8, 8, 1, 1},      {1, 1, 1, 8, 8, 3, 2},     {3, 5, 7, 8, 16, 3, 1},
    {17, 3, 3, 24, 8, 3, 2},    {2, 7, 5, 40, 72, 1, 2},   {3, 13, 11, 64, 64, 3, 1},
    {1, 17, 19, 64, 136, 1, 1}, {2, 9, 16, 136, 64, 3, 2}, {5, 8, 8, 128, 128, 3, 2},
    {2, 16, 16, 72, 200, 3, 1}, {1, 8, 9, 512, 40, 1, 1},  {9, 14, 14, 16, 256, 1, 2},
};

template <class T> static void check_conv(const struct trial &trial)
{
    const struct conv_shape shape =
        conv_shape_of(trial.height, trial.width, trial.channels, trial.outputs, trial.kernel, trial.stride);
    const uint32_t samples = trial.samples, taps = trial.kernel * trial.kernel;
    const size_t in_rows = (size_t)samples * shape.height * shape.width;
    const size_t rows = (size_t)samples * shape.out_height * shape.out_width;
    const size_t weight_count = (size_t)taps * shape.channels * shape.outputs;
    array<T> inputs(samples * shape.image), weights(weight_count), opposite(weight_count);
    array<T> outputs(rows * shape.outputs), deltas(outputs.host.size()), in_deltas(inputs.host.size());
    fill(inputs, 1);
    fill(weights, 1);
    fill(deltas, 1);
    for (uint32_t o = 0; o < shape.outputs; o++)
        for (uint32_t t = 0; t < taps; t++)
            for (uint32_t c = 0; c < shape.channels; c++)
                opposite.host[((size_t)c * taps + t) * shape.outputs + o] =
                    weights.host[((size_t)o * taps + t) * shape.channels + c];
    opposite.up();
    const reals in = doubles(inputs), weight = doubles(weights), delta = doubles(deltas);
    reals out(outputs.host.size()), in_delta(in.size()), gradient(weight_count), ordered(weight_count);
    each_product(shape, samples, [&](size_t i, size_t w, size_t o) {
        out[o] += in[i] * weight[w];
        in_delta[i] += delta[o] * weight[w];
        gradient[w] += delta[o] * in[i];
    });
    for (uint32_t o = 0; o < shape.outputs; o++)
        for (uint32_t t = 0; t < taps; t++)
            for (uint32_t c = 0; c < shape.channels; c++)
                ordered[((size_t)o * shape.channels + c) * taps + t] =
                    gradient[((size_t)o * taps + t) * shape.channels + c];
    char name[128];
    const auto title = [&](const char *what) {
        snprintf(name, sizeof name, "%ux%ux%ux%u to %u, %ux%u/%u: %s", samples, trial.height, trial.width,
                 trial.channels, trial.outputs, trial.kernel, trial.kernel, trial.stride, what);
        return name;
    };

    const uint32_t parts = resnet_parts(rows);
    array<float> partial((size_t)parts * 2 * shape.outputs);
    compare(title("forward"), outputs, out, bound_of<T>, [&] {
        must(resnet_forward(&shape, samples, inputs.device, weights.device, outputs.device, partial.device,
                            0));
    });
    const reals stored = doubles(outputs);
    check_sums(title("sums of outputs and squares"), partial, parts, shape.outputs,
               sums_of(
                   stored, [&](size_t i, uint32_t) { return stored[i]; }, shape.outputs));

    const struct resnet_after<T> nothing = {
    };
    uint32_t in_parts = 0;
    compare(title("inputs"), in_deltas, in_delta, bound_of<T>, [&] {
        must(resnet_inputs(&shape, samples, deltas.device, opposite.device, &nothing, in_deltas.device,
                           &in_parts, 0));
    });

    /* With a shortcut, a ReLU and two normalisations. */
    array<T> added(in.size()), relu(in.size()), first(in.size()), second(in.size());
    array<float> values((size_t)NORM_VALUES * shape.channels), more((size_t)NORM_VALUES * shape.channels);
    const uint32_t most = resnet_input_parts(&shape, samples);
    array<float> sums0((size_t)most * 2 * shape.channels), sums1((size_t)most * 2 * shape.channels);
    for (array<T> *each : {&added, &relu, &first, &second})
        fill(*each, 1);
    fill(values, 1);
    fill(more, 1);
    const struct resnet_norm norms[2] = {{shape.channels, nullptr, nullptr, values.device, sums0.device},
                                         {shape.channels, nullptr, nullptr, more.device, sums1.device}};
    const struct resnet_after<T> after = {
        added.device, relu.device,
        {
            {&norms[0], first.device},
            {
                &norms[1], second.device
            }
        }
    };
    reals joined(in.size());
    for (size_t i = 0; i < joined.size(); i++)
        joined[i] = (float)relu.host[i] > 0 ? in_delta[i] + (double)(float)added.host[i] : 0;
    compare(title("inputs with shortcut, ReLU, norms"), in_deltas, joined, bound_of<T>, [&] {
        must(resnet_inputs(&shape, samples, deltas.device, opposite.device, &after, in_deltas.device,
                           &in_parts, 0));
    });
    const reals kept = doubles(in_deltas);
    for (int s = 0; s < 2; s++) {
        const array<T> &with = s ? second : first;
        check_sums(
            title(s ? "sums of the second norm" : "sums of the first norm"), s ? sums1 : sums0, in_parts,
            shape.channels,
            sums_of(
                kept, [&](size_t i, uint32_t) { return (double)(float)with.host[i]; }, shape.channels));
    }
    failures += in_parts != most || in_rows == 0;

    array<float> room(resnet_room(&shape, samples)), gradients(weight_count);
    compare(title("weights"), gradients, ordered, BOUND_SUMS, [&] {
        must(resnet_weights(&shape, samples, inputs.device, deltas.device, 0, room.device, gradients.device,
                            0));
    });
}

/* The first convolution: padded images of `channels` channels, and its packed weights. */
template <class T>
static void check_stem(uint32_t samples, uint32_t height, uint32_t width, uint32_t channels, uint32_t outputs)
{
    const struct conv_shape shape = stem_shape_of(height, width, outputs);
    const struct conv_shape plain = [&] {
        struct conv_shape of = conv_shape_of(height, width, channels, outputs, STEM_KERNEL, 2);
        return of;
    }();
    const size_t rows = (size_t)samples * shape.out_height * shape.out_width;
    const size_t weight_count = (size_t)outputs * channels * STEM_KERNEL * STEM_KERNEL;
    array<T> images(samples * shape.image), packed((size_t)outputs * STEM_KERNEL * STEM_CHANNELS);
    array<T> parameters(weight_count), outs(rows * outputs), deltas(rows * outputs);
    std::vector<double> in(samples * plain.image), weight(weight_count);
    fill(parameters, 1);
    fill(deltas, 1);
    for (size_t i = 0; i < images.host.size(); i++)
        images.host[i] = 0;
    for (uint32_t n = 0; n < samples; n++)
        for (uint32_t y = 0; y < height; y++)
            for (uint32_t x = 0; x < width; x++)
                for (uint32_t c = 0; c < channels; c++) {
                    const size_t at = n * plain.image + (size_t)y * plain.line + (size_t)x * plain.pixel + c;
                    const T value =
                        (T)((float)(philox(philox_key(4), (uint32_t)at, 0, 0, 0).word[0] >> 8) / 8388608.0f -
                            1);
                    in[at] = (double)(float)value;
                    images.host[n * shape.image + (size_t)(y + STEM_PADDING) * shape.line +
                                (size_t)(x + STEM_PADDING) * shape.pixel + c] = value;
                }
    images.up();
    must(cudaMemset(packed.device, 0, packed.host.size() * sizeof(T)));
    struct resnet_packing<T> packing = {0, outputs, channels, STEM_KERNEL, 0, true, packed.device, nullptr},
                             *packs;
    const uint32_t blocks = resnet_pack_blocks(&packing, 1);
    must(cudaMalloc(&packs, sizeof packing));
    must(cudaMemcpy(packs, &packing, sizeof packing, cudaMemcpyHostToDevice));
    must(resnet_pack(packs, 1, blocks, parameters.device, 0));
    const reals of = doubles(parameters), delta = doubles(deltas);
    for (uint32_t o = 0; o < outputs; o++) /* (out, in, tap) to (out, tap, in) */
        for (uint32_t c = 0; c < channels; c++)
            for (uint32_t t = 0; t < STEM_KERNEL * STEM_KERNEL; t++)
                weight[((size_t)o * STEM_KERNEL * STEM_KERNEL + t) * channels + c] =
                    of[((size_t)o * channels + c) * STEM_KERNEL * STEM_KERNEL + t];
    reals out(rows * outputs), gradient(weight_count), ordered(weight_count);
    each_product(plain, samples, [&](size_t i, size_t w, size_t o) {
        out[o] += in[i] * weight[w];
        gradient[w] += delta[o] * in[i];
    });
    for (uint32_t o = 0; o < outputs; o++)
        for (uint32_t c = 0; c < channels; c++)
            for (uint32_t t = 0; t < STEM_KERNEL * STEM_KERNEL; t++)
                ordered[((size_t)o * channels + c) * STEM_KERNEL * STEM_KERNEL + t] =
                    gradient[((size_t)o * STEM_KERNEL * STEM_KERNEL + t) * channels + c];
    char name[128];
    snprintf(name, sizeof name, "%ux%ux%ux%u to %u, first convolution: forward", samples, height, width,
             channels, outputs);
    compare(name, outs, out, bound_of<T>, [&] {
        must(resnet_forward(&shape, samples, images.device, packed.device, outs.device, nullptr, 0));
    });
    array<float> room(resnet_room(&shape, samples)), gradients(weight_count);
    compare("first convolution: weights", gradients, ordered, BOUND_SUMS, [&] {
        must(resnet_weights(&shape, samples, images.device, deltas.device, channels, room.device,
                            gradients.device, 0));
    });
    must(cudaFree(packs));
}

/* ---- Normalisation, pooling and means ---- */

/* A normalisation of `rows` rows, its inputs, and what its definition gives. */
template <class T> struct norm_case {
    uint32_t channels;
    size_t rows;
    array<T> inputs;
    array<float> weight, bias, values, partial, gradients;
    struct resnet_norm norm;
    reals x; /* normalised inputs */
    reals mean, inverse;

    norm_case(uint32_t channel_count, size_t row_count)
        : channels(channel_count), rows(row_count), inputs(rows * channels), weight(channels), bias(channels),
          values((size_t)NORM_VALUES * channels), partial((size_t)RESNET_PARTS * 2 * channels),
          gradients(2 * channels), x(rows * channels), mean(channels), inverse(channels)
    {
        fill(inputs, 2);
        fill(weight, 1);
        fill(bias, 1);
        norm = {channels, weight.device, bias.device, values.device, partial.device};
        const reals in = doubles(inputs);
        for (uint32_t c = 0; c < channels; c++) {
            double sum = 0, squares = 0;
            for (size_t r = 0; r < rows; r++)
                sum += in[r * channels + c];
            mean[c] = sum / (double)rows;
            for (size_t r = 0; r < rows; r++)
                squares += (in[r * channels + c] - mean[c]) * (in[r * channels + c] - mean[c]);
            inverse[c] = 1 / sqrt(squares / (double)rows + BATCH_NORM_EPSILON);
            for (size_t r = 0; r < rows; r++)
                x[r * channels + c] = (in[r * channels + c] - mean[c]) * inverse[c];
        }
        /* One part per row is the simplest division of the sums. */
        const size_t parts = rows < RESNET_PARTS ? rows : RESNET_PARTS;
        for (size_t i = 0; i < parts * 2 * channels; i++)
            partial.host[i] = 0;
        for (size_t r = 0; r < rows; r++)
            for (uint32_t c = 0; c < channels; c++) {
                const double value = in[r * channels + c];
                partial.host[(r % parts * 2) * channels + c] += (float)value;
                partial.host[(r % parts * 2 + 1) * channels + c] += (float)(value * value);
            }
        partial.up();
        must(resnet_moments(&norm, (uint32_t)parts, rows, 0.5f, gradients.device, gradients.device + channels,
                            0));
    }
    double output(size_t i) const
    {
        return x[i] * weight.host[i % channels] + bias.host[i % channels];
    }
};

template <class T> static void check_norm(uint32_t channels, size_t rows)
{
    struct norm_case<T> one(channels, rows), other(channels, rows);
    char name[128];
    const auto title = [&](const char *what) {
        snprintf(name, sizeof name, "norm of %zu rows, %u channels: %s", rows, channels, what);
        return name;
    };
    const bool whole = one.values.down() && one.gradients.down();
    reals right(2 * channels), mine = doubles(one.gradients);
    for (uint32_t c = 0; c < channels; c++) {
        right[c] = 0.5 * one.mean[c];
        right[channels + c] = 0.5 * (1 / (one.inverse[c] * one.inverse[c]) - BATCH_NORM_EPSILON) *
                              (double)rows / (rows > 1 ? (double)rows - 1 : 1);
    }
    const double off = distance(mine, right);
    tell(whole && off <= BOUND_SUMS, title("statistics"), off, BOUND_SUMS);

    array<T> outputs(rows * channels), shortcut(rows * channels), deltas(rows * channels),
        in_deltas(rows * channels);
    fill(shortcut, 1);
    fill(deltas, 1);
    const reals added = doubles(shortcut), delta = doubles(deltas);
    for (int kind = 0; kind < 3; kind++) {
        reals result(rows * channels);
        for (size_t i = 0; i < result.size(); i++)
            result[i] = fmax(0, one.output(i) + (kind == 1 ? added[i] : kind == 2 ? other.output(i) : 0));
        compare(title(kind == 0   ? "apply"
                      : kind == 1 ? "apply with shortcut"
                                  : "apply with normalised shortcut"),
                outputs, result, bound_of<T>, [&] {
                    must(resnet_apply(&one.norm, rows, one.inputs.device, kind == 2 ? &other.norm : nullptr,
                                      kind == 0   ? nullptr
                                      : kind == 1 ? shortcut.device
                                                  : other.inputs.device,
                                      outputs.device, 0));
                });
    }
    /* Backward: the gradients of the outputs have two sums per channel, here in one part. */
    const reals sums = sums_of(
        delta, [&](size_t i, uint32_t) { return one.x[i]; }, channels);
    const reals raw = doubles(one.inputs);
    const reals given = sums_of(
        delta, [&](size_t i, uint32_t) { return raw[i]; }, channels);
    for (uint32_t i = 0; i < 2 * channels; i++)
        one.partial.host[i] = (float)given[i];
    one.partial.up();
    must(resnet_slopes(&one.norm, 1, rows, one.gradients.device, one.gradients.device + channels, 0));
    reals in_delta(rows * channels), gradients(2 * channels);
    for (uint32_t c = 0; c < channels; c++) {
        gradients[c] = sums[channels + c];
        gradients[channels + c] = sums[c];
    }
    for (size_t i = 0; i < in_delta.size(); i++) {
        const uint32_t c = (uint32_t)(i % channels);
        in_delta[i] = one.inverse[c] * one.weight.host[c] *
                      (delta[i] - sums[c] / (double)rows - one.x[i] * sums[channels + c] / (double)rows);
    }
    const bool kept = one.gradients.down();
    const double gap = distance(doubles(one.gradients), gradients);
    tell(kept && gap <= BOUND_SUMS, title("gradients of weight and bias"), gap, BOUND_SUMS);
    if (rows > 1) /* the gradients of one row are zero but for rounding */
        compare(title("backward"), in_deltas, in_delta, bound_of<T>, [&] {
            must(
                resnet_norm_backward(&one.norm, rows, deltas.device, one.inputs.device, in_deltas.device, 0));
        });
}

template <class T>
static void check_pool(uint32_t samples, uint32_t height, uint32_t width, uint32_t channels)
{
    const size_t rows = (size_t)samples * height * width;
    struct norm_case<T> before(channels, rows);
    const struct resnet_pool pool = {height, width, (height - 1) / 2 + 1, (width - 1) / 2 + 1, before.norm};
    const size_t out_rows = (size_t)samples * pool.out_height * pool.out_width;
    array<T> outputs(out_rows * channels), deltas(out_rows * channels), in_deltas(rows * channels);
    array<uint8_t> largest(out_rows * channels);
    fill(deltas, 1);
    const reals delta = doubles(deltas);
    reals out(out_rows * channels), in_delta(rows * channels);
    must(before.values.down() ? STATUS_OK
                              : status_set(STATUS_FAILED, "the guard of the statistics is damaged"));
    /* The kernel's own fp32 coefficients, so that it chooses the same maxima. */
    const auto relu = [&](size_t i) {
        const uint32_t c = (uint32_t)(i % channels);
        const float value = fmaf((float)before.inputs.host[i], before.values.host[NORM_SCALE * channels + c],
                                 before.values.host[NORM_SHIFT * channels + c]);
        return value <= 0 ? 0 : value;
    };
    for (size_t o = 0; o < out.size(); o++) {
        const uint32_t c = (uint32_t)(o % channels);
        const size_t pixel = o / channels, n = pixel / pool.out_width / pool.out_height;
        const int64_t p = (int64_t)(pixel / pool.out_width % pool.out_height),
                      q = (int64_t)(pixel % pool.out_width);
        size_t best = SIZE_MAX;
        for (int64_t y = 2 * p - 1; y < 2 * p + 2; y++)
            for (int64_t x = 2 * q - 1; x < 2 * q + 2; x++) {
                if (y < 0 || x < 0 || y >= height || x >= width)
                    continue;
                const size_t at = ((n * height + (size_t)y) * width + (size_t)x) * channels + c;
                if (best == SIZE_MAX || relu(at) > relu(best))
                    best = at;
            }
        out[o] = relu(best);
        if (relu(best) > 0)
            in_delta[best] += delta[o];
    }
    char name[128];
    snprintf(name, sizeof name, "pooling of %ux%ux%ux%u: forward", samples, height, width, channels);
    compare(name, outputs, out, bound_of<T>, [&] {
        must(resnet_pool_forward(&pool, samples, before.inputs.device, outputs.device, largest.device, 0));
    });
    uint32_t parts = 0;
    compare("pooling: backward", in_deltas, in_delta, bound_of<T>, [&] {
        must(resnet_pool_backward(&pool, samples, deltas.device, largest.device, before.inputs.device,
                                  in_deltas.device, &parts, 0));
    });
    const reals kept = doubles(in_deltas);
    check_sums("pooling: sums of the norm", before.partial, parts, channels,
               sums_of(
                   kept, [&](size_t i, uint32_t) { return (double)(float)before.inputs.host[i]; }, channels));
}

template <class T> static void check_mean(uint32_t samples, uint32_t pixels, uint32_t channels)
{
    const size_t rows = (size_t)samples * pixels;
    struct norm_case<T> first(channels, rows), second(channels, rows);
    array<T> relu(rows * channels), means((size_t)samples * channels), deltas(means.host.size()),
        in_deltas(rows * channels);
    fill(relu, 1);
    fill(deltas, 1);
    const reals in = doubles(relu), delta = doubles(deltas);
    reals mean(means.host.size()), in_delta(in.size());
    for (size_t i = 0; i < in.size(); i++) {
        const size_t at = i / channels / pixels * channels + i % channels;
        mean[at] += in[i] / pixels;
        in_delta[i] = in[i] > 0 ? delta[at] / pixels : 0;
    }
    char name[128];
    snprintf(name, sizeof name, "mean of %ux%u rows, %u channels: forward", samples, pixels, channels);
    compare(name, means, mean, bound_of<T>,
            [&] { must(resnet_mean(samples, pixels, channels, relu.device, means.device, 0)); });
    const struct resnet_after<T> after = {
        nullptr, relu.device,
        {
            {&first.norm, first.inputs.device},
            {
                &second.norm, second.inputs.device
            }
        }
    };
    uint32_t parts = 0;
    compare("mean: backward", in_deltas, in_delta, bound_of<T>, [&] {
        must(resnet_mean_backward(samples, pixels, channels, deltas.device, &after, in_deltas.device, &parts,
                                  0));
    });
    const reals kept = doubles(in_deltas);
    for (struct norm_case<T> *each : {&first, &second})
        check_sums(
            "mean: sums of a norm", each->partial, parts, channels,
            sums_of(
                kept, [&](size_t i, uint32_t) { return (double)(float)each->inputs.host[i]; }, channels));
}

/* ---- Weights ---- */

template <class T> static void check_pack(uint32_t outputs, uint32_t inputs, uint32_t kernel)
{
    const uint32_t taps = kernel * kernel;
    const size_t count = (size_t)outputs * inputs * taps;
    array<T> parameters(count), weights(count), opposite(count);
    fill(parameters, 1);
    const reals of = doubles(parameters);
    reals right(count), turned(count);
    for (uint32_t o = 0; o < outputs; o++)
        for (uint32_t c = 0; c < inputs; c++)
            for (uint32_t t = 0; t < taps; t++) {
                const double value = of[((size_t)o * inputs + c) * taps + t];
                right[((size_t)o * taps + t) * inputs + c] = value;
                turned[((size_t)c * taps + t) * outputs + o] = value;
            }
    struct resnet_packing<T> packing = {0, outputs, inputs,         kernel,
                                        0, false,   weights.device, opposite.device},
                             *packs;
    const uint32_t blocks = resnet_pack_blocks(&packing, 1);
    must(cudaMalloc(&packs, sizeof packing));
    must(cudaMemcpy(packs, &packing, sizeof packing, cudaMemcpyHostToDevice));
    const auto work = [&] { must(resnet_pack(packs, 1, blocks, parameters.device, 0)); };
    char name[128];
    snprintf(name, sizeof name, "weights %ux%ux%ux%u: (out, tap, in)", outputs, inputs, kernel, kernel);
    compare(name, weights, right, 0, work);
    compare("weights: (in, tap, out)", opposite, turned, 0, work);
    must(cudaFree(packs));
}

/* ---- Planted faults: the comparisons above must find them ---- */

static void check_faults(void)
{
    const struct conv_shape shape = conv_shape_of(9, 9, 16, 16, 3, 2);
    struct conv_shape wrong = shape;
    const size_t rows = (size_t)2 * shape.out_height * shape.out_width;
    array<bf16> inputs(2 * shape.image), weights(16 * 9 * 16), outputs(rows * 16);
    fill(inputs, 1);
    fill(weights, 1);
    const reals in = doubles(inputs), weight = doubles(weights);
    reals out(outputs.host.size());
    each_product(shape, 2, [&](size_t i, size_t w, size_t o) { out[o] += in[i] * weight[w]; });
    wrong.padding = 0; /* windows that begin one pixel later */
    must(resnet_forward(&wrong, 2, inputs.device, weights.device, outputs.device, nullptr, 0));
    outputs.down();
    const double off = distance(doubles(outputs), out);
    printf("%s  planted: windows one pixel off: error %.1e\n", off > bound_of<bf16> ? "ok    " : "FAILED",
           off);
    failures += !(off > bound_of<bf16>);
}

/* ---- Times ---- */

#define PEAK_FLOPS 989e12 /* of an H200 in bf16 without sparsity (data sheet) */
#define PEAK_BYTES 4.8e12 /* per second, of its memory (data sheet) */
#define TIMED_RUNS 10

static double time_us(const std::function<void()> &work)
{
    cudaEvent_t begin, end;
    float ms;
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
    work();
    must(cudaEventRecord(begin));
    for (int i = 0; i < TIMED_RUNS; i++)
        work();
    must(cudaEventRecord(end));
    must(cudaEventSynchronize(end));
    must(cudaEventElapsedTime(&ms, begin, end));
    must(cudaEventDestroy(begin));
    must(cudaEventDestroy(end));
    return 1e3 * ms / TIMED_RUNS;
}

/* The convolutions of resnet50: those of equal shape once. */
struct timed {
    uint32_t size, channels, outputs, kernel, stride, times;
};
static const struct timed convolutions[] = {
    {56, 64, 64, 1, 1, 1},    {56, 64, 64, 3, 1, 3},    {56, 64, 256, 1, 1, 4},   {56, 256, 64, 1, 1, 2},
    {56, 256, 128, 1, 1, 1},  {56, 128, 128, 3, 2, 1},  {28, 128, 512, 1, 1, 4},  {56, 256, 512, 1, 2, 1},
    {28, 512, 128, 1, 1, 3},  {28, 128, 128, 3, 1, 3},  {28, 512, 256, 1, 1, 1},  {28, 256, 256, 3, 2, 1},
    {14, 256, 1024, 1, 1, 6}, {28, 512, 1024, 1, 2, 1}, {14, 1024, 256, 1, 1, 5}, {14, 256, 256, 3, 1, 5},
    {14, 1024, 512, 1, 1, 1}, {14, 512, 512, 3, 2, 1},  {7, 512, 2048, 1, 1, 3},  {14, 1024, 2048, 1, 2, 1},
    {7, 2048, 512, 1, 1, 2},  {7, 512, 512, 3, 1, 2},
};

/* Times of the three products of a convolution, and the least times, in microseconds. */
static void time_conv(const struct conv_shape &shape, uint32_t samples, uint32_t image_channels,
                      uint32_t times, double totals[4])
{
    const size_t in_values = samples * shape.image;
    const size_t out_values = (size_t)samples * shape.out_height * shape.out_width * shape.outputs;
    const size_t weight_count = (size_t)shape.kernel_y * shape.kernel_x * shape.channels * shape.outputs;
    const uint32_t parts = resnet_parts(out_values / shape.outputs),
                   in_parts = resnet_input_parts(&shape, samples);
    array<bf16> inputs(in_values), outputs(out_values), weights(weight_count), deltas(in_values);
    array<float> partial((size_t)parts * 2 * shape.outputs), room(resnet_room(&shape, samples)),
        gradients(weight_count), values((size_t)NORM_VALUES * shape.channels),
        sums((size_t)in_parts * 2 * shape.channels);
    for (array<bf16> *each : {&inputs, &outputs, &weights})
        must(cudaMemset(each->device, 0, each->host.size() * sizeof(bf16)));
    must(cudaMemset(values.device, 0, values.host.size() * sizeof(float)));
    const struct resnet_norm norm = {shape.channels, nullptr, nullptr, values.device, sums.device};
    const struct resnet_after<bf16> after = {
        nullptr, inputs.device,
        {
            {&norm, inputs.device},
            {
            }
        }
    };
    uint32_t used;
    const double forward = time_us([&] {
        must(resnet_forward(&shape, samples, inputs.device, weights.device, outputs.device, partial.device,
                            0));
    });
    const double back = image_channels ? 0 : time_us([&] {
        must(resnet_inputs(&shape, samples, outputs.device, weights.device, &after, deltas.device, &used, 0));
    });
    const double weight = time_us([&] {
        must(resnet_weights(&shape, samples, inputs.device, outputs.device, image_channels, room.device,
                            gradients.device, 0));
    });
    const double flops = 2.0 * (double)out_values * shape.kernel_y * shape.kernel_x * shape.channels;
    const double bytes = 2.0 * (double)(in_values + out_values);
    const double least = 1e6 * fmax(flops / PEAK_FLOPS, bytes / PEAK_BYTES);
    printf(
        "%3ux%-3u %4u to %4u, %ux%u/%u, %u times: floor %6.1f us, forward %6.1f, inputs %6.1f (with ReLU and "
        "sums), weights %6.1f\n",
        shape.height, shape.width, shape.channels, shape.outputs, shape.kernel_y, shape.kernel_x,
        shape.stride, times, least, forward, back, weight);
    const double each[4] = {least, forward, back, weight};
    for (int i = 0; i < 4; i++)
        totals[i] += times * each[i];
}

static void print_times(uint32_t samples)
{
    double totals[4] = {};
    const struct conv_shape stem = stem_shape_of(224, 224, 64);
    time_conv(stem, samples, 3, 1, totals);
    for (const struct timed &of : convolutions) {
        const struct conv_shape shape =
            conv_shape_of(of.size, of.size, of.channels, of.outputs, of.kernel, of.stride);
        time_conv(shape, samples, 0, of.times, totals);
    }
    printf("all convolutions, batch %u: floor %.0f us per product; forward %.0f, inputs %.0f, weights %.0f: "
           "%.0f us\n",
           samples, totals[0], totals[1], totals[2], totals[3], totals[1] + totals[2] + totals[3]);
    const size_t rows = (size_t)samples * 56 * 56;
    array<bf16> a(rows * 256), b(rows * 256), c(rows * 256);
    array<float> values((size_t)NORM_VALUES * 256), partial((size_t)resnet_parts(rows) * 2 * 256),
        gradients(512);
    const struct resnet_norm norm = {256, gradients.device, gradients.device, values.device, partial.device};
    const double bytes = 2.0 * (double)rows * 256;
    printf(
        "56x56x256: apply %.1f us, with shortcut %.1f, norm backward %.1f, moments %.1f; %.1f us per tensor "
        "read or written\n",
        time_us([&] { must(resnet_apply<bf16>(&norm, rows, a.device, nullptr, nullptr, c.device, 0)); }),
        time_us([&] { must(resnet_apply<bf16>(&norm, rows, a.device, nullptr, b.device, c.device, 0)); }),
        time_us([&] { must(resnet_norm_backward(&norm, rows, a.device, b.device, c.device, 0)); }),
        time_us([&] {
            must(resnet_moments(&norm, resnet_parts(rows), rows, 1, gradients.device, gradients.device + 256,
                                0));
        }),
        1e6 * bytes / PEAK_BYTES);
    const size_t stem_rows = (size_t)samples * 112 * 112;
    array<bf16> raw(stem_rows * 64), pooled(rows * 64), delta(rows * 64), back(stem_rows * 64);
    array<uint8_t> largest(rows * 64);
    array<float> sums((size_t)RESNET_PARTS * 2 * 64);
    const struct resnet_norm stem_norm = {64, gradients.device, gradients.device, values.device, sums.device};
    const struct resnet_pool pool = {112, 112, 56, 56, stem_norm};
    uint32_t used;
    printf("pooling: forward %.1f us, backward %.1f\n", time_us([&] {
               must(resnet_pool_forward(&pool, samples, raw.device, pooled.device, largest.device, 0));
           }),
           time_us([&] {
               must(resnet_pool_backward(&pool, samples, delta.device, largest.device, raw.device,
                                         back.device, &used, 0));
           }));
}

template <class T> static void check_kernels(void)
{
    printf("in %s:\n", std::is_same<T, bf16>::value ? "bf16" : "fp16");
    for (const struct trial &trial : trials)
        check_conv<T>(trial);
    check_stem<T>(1, 1, 1, 1, 8);
    check_stem<T>(3, 28, 28, 1, 8);
    check_stem<T>(2, 33, 31, 3, 64);
    check_stem<T>(2, 32, 18, 4, 72);
    for (const auto &size : {std::pair<uint32_t, size_t>{8, 1}, {64, 3}, {24, 131}, {256, 1057}, {2048, 49}})
        check_norm<T>(size.first, size.second);
    check_pool<T>(1, 1, 1, 8);
    check_pool<T>(3, 14, 14, 8);
    check_pool<T>(2, 17, 15, 64);
    check_pool<T>(17, 5, 8, 24);
    check_mean<T>(1, 1, 8);
    check_mean<T>(3, 7, 64);
    check_mean<T>(17, 49, 2048);
    check_pack<T>(8, 8, 1);
    check_pack<T>(40, 72, 3);
    check_pack<T>(128, 64, 3);
    check_pack<T>(72, 200, 1);
}

int main(int argc, char **argv)
{
    if (device_probe(0) != STATUS_OK) {
        printf("gpu_resnet: %s\n", status_text());
        return 4;
    }
    if (argc > 1 && strcmp(argv[1], "--times") == 0) {
        print_times(argc > 2 ? (uint32_t)atoi(argv[2]) : 256);
        return 0;
    }
    check_kernels<bf16>();
    check_kernels<fp16>();
    check_faults();
    printf("%d failures\n", failures);
    return failures ? 3 : 0;
}
