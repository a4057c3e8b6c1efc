#include "data/mixing.h"

#include "core/philox.h"
#include "data/random_draws.h"

/* ---- Draws ---- */

/* Maps a random word to (0, 1). */
static double open_unit(uint32_t word)
{
    return (word + 0.5) * 0x1p-32;
}

/* Returns the logarithm of a random number of the distribution Gamma(alpha, 1), by the method of Marsaglia
 * and Tsang, "A simple method for generating gamma variables", 2000. The method needs alpha >= 1. For a
 * smaller alpha, the number is Gamma(alpha + 1, 1) * u^(1 / alpha), with u uniform in (0, 1). It can
 * underflow for small alpha; its logarithm cannot. The Philox counter of attempt i is (1 + 2 i + which, step,
 * epoch); `which` is 0 or 1. */
static double log_gamma_draw(double alpha, uint32_t which, uint64_t seed, uint32_t epoch, uint32_t step)
{
    const double d = (alpha < 1 ? alpha + 1 : alpha) - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (uint32_t attempt = 0;; attempt++) { /* more than 95 % of the attempts are accepted */
        const struct philox_block words =
            philox(philox_key(seed), 1 + 2 * attempt + which, step, epoch, DRAW_MIX);
        const double radius = sqrt(-2 * log(open_unit(words.word[0])));
        const double normal = radius * cos(6.28318530717958647692 * open_unit(words.word[1]));
        const double root = 1 + c * normal, v = root * root * root;
        if (root <= 0 || log(open_unit(words.word[2])) >= normal * normal / 2 + d * (1 - v + log(v)))
            continue;
        return log(d * v) + (alpha < 1 ? log(open_unit(words.word[3])) / alpha : 0);
    }
}

double mix_beta(double alpha, uint64_t seed, uint32_t epoch, uint32_t step)
{
    const double one = log_gamma_draw(alpha, 0, seed, epoch, step);
    const double other = log_gamma_draw(alpha, 1, seed, epoch, step);
    return 1 / (1 + exp(other - one));
}

/* Sets `*begin` and `*end` to the part of an axis of `size` pixels that a rectangle covers, as timm's
 * rand_bbox() does: the centre is random, and the rectangle is clipped at the border. */
static void cut_axis(uint32_t size, double side, uint32_t word, uint32_t *begin, uint32_t *end)
{
    const uint32_t half = (uint32_t)(size * side) / 2, centre = philox_below(word, size);
    *begin = centre > half ? centre - half : 0;
    *end = centre + half < size ? centre + half : size;
}

struct mix mix_draw(const struct mixing *mixing, uint64_t seed, uint32_t epoch, uint32_t step,
                    const struct shape *shape)
{
    const struct philox_block words = philox(philox_key(seed), 0, step, epoch, DRAW_MIX);
    struct mix mix = {.cut = mixing->mixup > 0 ? mixing->cutmix > 0 && words.word[0] >> 31 : true};
    const double share = mix_beta(mix.cut ? mixing->cutmix : mixing->mixup, seed, epoch, step);
    mix.share = (float)share;
    if (!mix.cut)
        return mix;
    const double side = sqrt(1 - share);
    cut_axis(shape->height, side, words.word[1], &mix.top, &mix.bottom);
    cut_axis(shape->width, side, words.word[2], &mix.left, &mix.right);
    const double area = (double)(mix.bottom - mix.top) * (mix.right - mix.left);
    mix.share = (float)(1 - area / ((double)shape->height * shape->width));
    return mix;
}

/* ---- Values ---- */

FDSL_FMA_CLONES
void mix_samples(const struct mix *mix, const struct shape *shape, const float *partner, float *values)
{
    const size_t planes = (size_t)shape->channels * shape->depth;
    for (size_t plane = 0; plane < planes; plane++)
        for (uint32_t y = 0; y < shape->height; y++)
            for (uint32_t x = 0; x < shape->width; x++, values++)
                *values = mix_value(mix, y, x, *values, *partner++);
}

/* Copies `bytes` bytes of the partner, or exchanges them. */
static void cut_bytes(bool both, size_t bytes, uint8_t *own, uint8_t *partner)
{
    if (own == partner)
        return;
    for (size_t i = 0; i < bytes; i++) {
        const uint8_t before = own[i];
        own[i] = partner[i];
        if (both)
            partner[i] = before;
    }
}

/* Exchanges the rectangle of CutMix. Adjacent pixels of a row are adjacent in memory. */
static void cut_images(const struct mix *mix, const struct shape *shape, size_t element, bool interleaved,
                       bool both, uint8_t *own, uint8_t *partner)
{
    const size_t planes = interleaved ? 1 : shape->channels;
    const size_t pixel = interleaved ? shape->channels * element : element;
    for (size_t plane = 0; plane < planes; plane++)
        for (uint32_t y = mix->top; y < mix->bottom; y++) {
            const size_t at = ((plane * shape->height + y) * shape->width + mix->left) * pixel;
            cut_bytes(both, (mix->right - mix->left) * pixel, own + at, partner + at);
        }
}

static uint8_t byte_from_float(float value)
{
    return (uint8_t)rintf(value);
}

static float byte_to_float(uint8_t value)
{
    return value;
}

static float same(float value)
{
    return value;
}

/* Defines a function that mixes two arrays of `count` elements of one type by MixUp. */
#define DEFINE_MIX(name, element, to_float, from_float)                                              \
    FDSL_FMA_CLONES                                                                                  \
    static void name(const struct mix *mix, size_t count, bool both, element *own, element *partner) \
    {                                                                                                \
        for (size_t i = 0; i < count; i++) {                                                         \
            const float value = to_float(own[i]), other = to_float(partner[i]);                      \
            own[i] = from_float(mix_value(mix, 0, 0, value, other));                                 \
            if (both)                                                                                \
                partner[i] = from_float(mix_value(mix, 0, 0, other, value));                         \
        }                                                                                            \
    }
DEFINE_MIX(mix_u8, uint8_t, byte_to_float, byte_from_float)
DEFINE_MIX(mix_f16, uint16_t, half_to_float, half_from_float)
DEFINE_MIX(mix_bf16, uint16_t, bf16_to_float, bf16_from_float)
DEFINE_MIX(mix_f32, float, same, same)

void mix_images(const struct mix *mix, const struct shape *shape, enum dtype type, bool interleaved,
                bool both, void *own, void *partner)
{
    const size_t count = shape_values(shape);
    if (mix->share >= 1)
        return;
    if (mix->cut)
        cut_images(mix, shape, dtype_bytes(type), interleaved, both, own, partner);
    else if (type == DTYPE_F32)
        mix_f32(mix, count, both, own, partner);
    else if (type == DTYPE_F16)
        mix_f16(mix, count, both, own, partner);
    else if (type == DTYPE_BF16)
        mix_bf16(mix, count, both, own, partner);
    else
        mix_u8(mix, count, both, own, partner);
}
