/* The part of omp_simd.h for transformers: functions of one token or one row of scores. A sum is computed as
 * one partial sum per lane, so that the order of the additions does not depend on the alignment. */
#ifndef FDSL_CPU_TRAIN_OMP_SIMD_TOKENS_H
#define FDSL_CPU_TRAIN_OMP_SIMD_TOKENS_H

#include <math.h>

/* Returns exp(x) for x <= 0, with a relative error of about 1e-7; below -87, returns exp(-87). Writes x as n
 * log(2) + r with an integer n, computes exp(r) by its Taylor polynomial, and assembles the bits of 2^n.
 * Adding 1.5 * 2^23 rounds a float to an integer and leaves that integer in its low bits. NaN stays NaN. */
INLINE float exp_of(float x)
{
    const float rounder = 12582912.0f;
    x = x < -87 ? -87 : x;
    const float shifted = x * 1.44269504f + rounder, n = shifted - rounder;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* log(2) in two parts */
    float sum = 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1;
    sum = sum * r + 1;
    uint32_t bits;
    float power;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

INLINE float sum_lanes(vreal sum)
{
    float lanes[LANES], total = 0;
    v_store(lanes, sum);
    for (int i = 0; i < LANES; i++)
        total += lanes[i];
    return total;
}

INLINE float total_of(const float *values, size_t count)
{
    const size_t whole = count - count % LANES;
    vreal sum = v_set(0);
    for (size_t i = 0; i < whole; i += LANES)
        sum = v_fma(v_set(1), v_load(values + i), sum);
    float total = sum_lanes(sum);
    for (size_t i = whole; i < count; i++)
        total += values[i];
    return total;
}

INLINE float dot_of(const float *a, const float *b, size_t count)
{
    const size_t whole = count - count % LANES;
    vreal sum = v_set(0);
    for (size_t i = 0; i < whole; i += LANES)
        sum = v_fma(v_load(a + i), v_load(b + i), sum);
    float total = sum_lanes(sum);
    for (size_t i = whole; i < count; i++)
        total += a[i] * b[i];
    return total;
}

/* ---- Softmax ---- */

static void softmax(float *scores, size_t count, float factor)
{
    float most = scores[0];
    for (size_t i = 1; i < count; i++)
        most = scores[i] > most ? scores[i] : most;
    for (size_t i = 0; i < count; i++)
        scores[i] = exp_of((scores[i] - most) * factor);
    const float scale = 1 / total_of(scores, count);
    for (size_t i = 0; i < count; i++)
        scores[i] *= scale;
}

static void softmax_backward(const float *restrict weights, float *restrict deltas, size_t count,
                             float factor)
{
    const float along = dot_of(weights, deltas, count);
    for (size_t i = 0; i < count; i++)
        deltas[i] = weights[i] * (deltas[i] - along) * factor;
}

/* ---- Layer normalisation ---- */

static void norm(const float *restrict in, const float *restrict weight, const float *restrict bias,
                 float *restrict out, size_t count, float *restrict moments)
{
    const float mean = total_of(in, count) / (float)count;
    for (size_t i = 0; i < count; i++)
        out[i] = in[i] - mean;
    const float scale = 1 / sqrtf(dot_of(out, out, count) / (float)count + (float)LAYER_NORM_EPSILON);
    for (size_t i = 0; i < count; i++)
        out[i] = out[i] * scale * weight[i] + bias[i];
    moments[0] = mean;
    moments[1] = scale;
}

static void norm_backward(const float *restrict in, const float *restrict moments,
                          const float *restrict weight, const float *restrict deltas,
                          float *restrict in_deltas, size_t count, bool adds)
{
    const float mean = moments[0], scale = moments[1];
    vreal sum = v_set(0), sum_along = v_set(0);
    const size_t whole = count - count % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        vreal gradient = v_load(deltas + i) * v_load(weight + i);
        sum = v_fma(v_set(1), gradient, sum);
        sum_along = v_fma(gradient, v_load(in + i) - v_set(mean), sum_along);
    }
    float total = sum_lanes(sum), along = sum_lanes(sum_along);
    for (size_t i = whole; i < count; i++) {
        total += deltas[i] * weight[i];
        along += deltas[i] * weight[i] * (in[i] - mean);
    }
    total /= (float)count;
    along *= scale * scale / (float)count;
    for (size_t i = 0; i < count; i++)
        in_deltas[i] =
            (adds ? in_deltas[i] : 0) + scale * (deltas[i] * weight[i] - total - (in[i] - mean) * along);
}

static void norm_weights(const float *restrict in, const float *restrict moments,
                         const float *restrict deltas, float *restrict weights, float *restrict biases,
                         size_t count)
{
    for (size_t i = 0; i < count; i++) {
        weights[i] += deltas[i] * ((in[i] - moments[0]) * moments[1]);
        biases[i] += deltas[i];
    }
}

/* ---- GELU ---- */

/* Returns the normal distribution function of x; `density` receives exp(-x^2 / 2). The formula for erf(),
 * with an error of at most 1.5e-7, is 7.1.26 of Abramowitz and Stegun, "Handbook of mathematical functions".
 */
INLINE float normal_below(float x, float *density)
{
    const float z = fabsf(x) * 0.70710678f, t = 1 / (1 + 0.3275911f * z);
    float sum = 1.061405429f;
    sum = sum * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    *density = exp_of(-0.5f * x * x);
    const float tail = 0.5f * sum * t * *density;
    return x < 0 ? tail : 1 - tail;
}

static void gelu(const float *restrict in, float *restrict out, size_t count)
{
    float density;
    for (size_t i = 0; i < count; i++)
        out[i] = in[i] * normal_below(in[i], &density);
}

static void gelu_backward(const float *restrict in, const float *restrict deltas, float *restrict in_deltas,
                          size_t count, bool adds)
{
    for (size_t i = 0; i < count; i++) {
        float density, below = normal_below(in[i], &density);
        float delta = deltas[i] * (below + in[i] * 0.39894228f * density);
        in_deltas[i] = (adds ? in_deltas[i] : 0) + delta;
    }
}

#endif
