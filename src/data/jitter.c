#include "data/jitter.h"

#include <string.h>

#include "core/options.h"

/* ---- Checks ---- */

/* Returns STATUS_OK if `least` <= low <= high <= `most`. */
static enum status check_range(const char *name, float low, float high, double least, double most)
{
    if (low >= (float)least && high >= low && high <= (float)most) /* false for NaN */
        return STATUS_OK;
    return low == high ? status_set(STATUS_USAGE, "%s: %g is out of range; it must be %g to %g", name,
                                    (double)low, least, most)
                       : status_set(STATUS_USAGE, "%s: %g to %g is no range within %g to %g", name,
                                    (double)low, (double)high, least, most);
}

static enum status check_kernel(const struct jitter *jitter, const struct shape *shape, const char *name)
{
    const uint32_t side = shape->height < shape->width ? shape->height : shape->width;
    if (jitter->kernel < 1 || jitter->kernel > JITTER_KERNEL_MAX)
        return status_set(STATUS_USAGE, "%s: %u is out of range; it must be 1 to %d", name, jitter->kernel,
                          JITTER_KERNEL_MAX);
    if (jitter->kernel % 2 == 0)
        return status_set(STATUS_USAGE, "%s: %u is even; give an odd number of pixels, such as %u", name,
                          jitter->kernel, jitter->kernel + 1);
    if (jitter->kernel / 2 < side)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "%s: a kernel of %u pixels is too large for images of %ux%u; lower it",
                      name, jitter->kernel, shape->width, shape->height);
}

enum status jitter_check(const struct jitter *jitter, const struct shape *shape,
                         const struct jitter_names *names)
{
    TRY(check_range(names->probability, jitter->probability, jitter->probability, 0, 1));
    for (uint32_t step = 0; step < JITTER_STEPS; step++) {
        const bool hue = step == JITTER_HUE;
        TRY(check_range(names->steps[step], jitter->low[step], jitter->high[step], hue ? -JITTER_HUE_MAX : 0,
                        hue ? JITTER_HUE_MAX : JITTER_FACTOR_MAX));
        if (step >= JITTER_SATURATION && shape->channels == 1 && jitter_step_on(jitter, step))
            return status_set(STATUS_USAGE,
                              "%s: images of one channel have neither saturation nor hue; give 0 for both",
                              names->steps[step]);
    }
    TRY(check_range(names->grayscale, jitter->grayscale, jitter->grayscale, 0, 1));
    if (jitter->grayscale > 0 && shape->channels == 1)
        return status_set(STATUS_USAGE, "%s: it has no effect on images of one channel; leave it out",
                          names->grayscale);
    TRY(check_range(names->blur, jitter->blur, jitter->blur, 0, 1));
    if (jitter->blur <= 0)
        return STATUS_OK;
    TRY(check_range(names->sigma, jitter->sigma_min, jitter->sigma_max, JITTER_SIGMA_MIN, JITTER_SIGMA_MAX));
    return check_kernel(jitter, shape, names->kernel);
}

/* ---- Options ---- */

const struct jitter_names jitter_options = {
    "--color-jitter-p", {"--color-jitter", "--color-jitter", "--color-jitter", "--color-jitter"},
    "--grayscale",      "--blur",
    "--blur-kernel",    "--blur-sigma"};

enum status jitter_read(const struct jitter_parameters *parameters, struct jitter *jitter)
{
    double sigma[2], strengths[JITTER_STEPS] = {0};
    uint32_t count;
    bool changes = false;
    *jitter = (struct jitter){.grayscale = (float)parameters->grayscale,
                              .blur = (float)parameters->blur,
                              .kernel = (uint32_t)parameters->kernel};
    TRY(parse_reals("--blur-sigma", parameters->sigma, 0, JITTER_SIGMA_MAX, 2, sigma, &count));
    jitter->sigma_min = (float)sigma[0];
    jitter->sigma_max = (float)sigma[count - 1];
    if (!parameters->jitter)
        return STATUS_OK;
    TRY(parse_reals("--color-jitter", parameters->jitter, 0, JITTER_FACTOR_MAX - 1, JITTER_STEPS, strengths,
                    &count));
    if (count != 1 && count != JITTER_STEPS)
        return status_set(STATUS_USAGE,
                          "--color-jitter: '%.80s' has %u values; give four, or one for brightness, contrast "
                          "and saturation",
                          parameters->jitter, count);
    jitter->probability = (float)parameters->probability;
    for (uint32_t step = 0; step < JITTER_STEPS; step++) {
        const bool hue = step == JITTER_HUE;
        const double strength = count == 1 ? (hue ? 0 : strengths[0]) : strengths[step];
        jitter->low[step] = (float)(hue ? -strength : strength < 1 ? 1 - strength : 0);
        jitter->high[step] = (float)(hue ? strength : 1 + strength);
        changes |= strength > 0;
    }
    return changes ? STATUS_OK
                   : status_set(STATUS_USAGE, "--color-jitter: '%.80s' changes nothing; leave it out",
                                parameters->jitter);
}

/* ---- Colours ---- */

/* Applies a step to a frame. `plane`: values between two channels. */
static void change_frame(enum jitter_step step, float factor, uint32_t channels, uint32_t pixels,
                         size_t plane, uint8_t *frame)
{
    struct jitter_pixel pixel = {{0}};
    uint8_t table[AUGMENT_LEVELS];
    uint64_t sum = 0;
    float mean = 0;
    for (uint32_t i = 0; step == JITTER_CONTRAST && i < pixels; i++) {
        for (uint32_t c = 0; c < channels; c++)
            pixel.of[c] = frame[c * plane + i];
        sum += (uint64_t)jitter_gray(&pixel, channels);
    }
    if (step == JITTER_CONTRAST)
        mean = jitter_mean(sum, pixels);
    if (step >= JITTER_SATURATION) {
        for (uint32_t i = 0; channels > 1 && i < pixels; i++) {
            for (uint32_t c = 0; c < channels; c++)
                pixel.of[c] = frame[c * plane + i];
            jitter_change(step, factor, channels, 0, &pixel);
            for (uint32_t c = 0; c < channels; c++)
                frame[c * plane + i] = (uint8_t)pixel.of[c];
        }
        return;
    }
    for (uint32_t value = 0; value < AUGMENT_LEVELS; value++) {
        pixel.of[0] = (float)value;
        jitter_change(step, factor, 1, mean, &pixel);
        table[value] = (uint8_t)pixel.of[0];
    }
    for (uint32_t c = 0; c < channels; c++)
        for (uint32_t i = 0; i < pixels; i++)
            frame[c * plane + i] = table[frame[c * plane + i]];
}

void jitter_apply_step(enum jitter_step step, float factor, const struct shape *shape, uint8_t *image)
{
    const uint32_t pixels = shape->height * shape->width;
    for (uint32_t frame = 0; frame < shape->depth; frame++)
        change_frame(step, factor, shape->channels, pixels, (size_t)shape->depth * pixels,
                     image + (size_t)frame * pixels);
}

static void make_gray(const struct shape *shape, uint8_t *image)
{
    const size_t plane = (size_t)shape->depth * shape->height * shape->width;
    for (size_t i = 0; shape->channels > 1 && i < plane; i++) {
        const struct jitter_pixel pixel = {{image[i], image[plane + i], image[2 * plane + i]}};
        const uint8_t gray = (uint8_t)jitter_gray(&pixel, 3);
        image[i] = image[plane + i] = image[2 * plane + i] = gray;
    }
}

/* ---- Blur ---- */

#define RUN 512 /* outputs of a row that are computed at a time */

void jitter_blur(double sigma, uint32_t radius, uint32_t height, uint32_t width, const uint8_t *from,
                 uint8_t *to)
{
    double gauss[JITTER_RADIUS_MAX + 1];
    uint16_t weights[JITTER_RADIUS_MAX + 1], columns[RUN + 2 * JITTER_RADIUS_MAX];
    uint32_t sums[RUN + 2 * JITTER_RADIUS_MAX];
    for (uint32_t d = 0; d <= radius; d++)
        gauss[d] = jitter_gauss(sigma, d);
    jitter_round_weights(gauss, radius, weights);
    for (uint32_t y = 0; y < height; y++)
        for (uint32_t begin = 0; begin < width; begin += RUN) {
            const uint32_t count = width - begin < RUN ? width - begin : RUN;
            const uint32_t first = begin < radius ? 0 : begin - radius;
            const uint32_t end = begin + count + radius < width ? begin + count + radius : width;
            memset(sums, 0, sizeof sums);
            for (int32_t d = -(int32_t)radius; d <= (int32_t)radius; d++) {
                const uint8_t *row = from + (size_t)jitter_reflected((int32_t)y + d, height) * width + first;
                const uint32_t weight = weights[d < 0 ? -d : d];
                for (uint32_t x = 0; x < end - first; x++)
                    sums[x] += weight * row[x];
            }
            /* columns[i] is at begin - radius + i. */
            for (uint32_t i = 0; i < count + 2 * radius; i++) {
                const uint32_t x = jitter_reflected((int32_t)(begin + i) - (int32_t)radius, width);
                columns[i] = jitter_column(sums[x - first]);
            }
            memset(sums, 0, count * sizeof *sums);
            for (uint32_t i = 0; i <= 2 * radius; i++) {
                const uint32_t weight = weights[i < radius ? radius - i : i - radius];
                for (uint32_t x = 0; x < count; x++)
                    sums[x] += weight * columns[x + i];
            }
            for (uint32_t x = 0; x < count; x++)
                to[(size_t)y * width + begin + x] = jitter_row(sums[x]);
        }
}

void jitter_apply(const struct jitter *jitter, const struct shape *shape, uint64_t seed, uint32_t epoch,
                  uint32_t sample, uint8_t *image, uint8_t *other)
{
    if (!jitter_on(jitter))
        return;
    const struct jitter_drawn drawn = jitter_draw(jitter, seed, epoch, sample);
    const size_t plane = (size_t)shape->height * shape->width;
    for (uint32_t i = 0; i < drawn.steps; i++)
        jitter_apply_step((enum jitter_step)drawn.order[i], drawn.factors[drawn.order[i]], shape, image);
    if (drawn.gray)
        make_gray(shape, image);
    for (uint32_t k = 0; drawn.blurs && k < shape->channels * shape->depth; k++) {
        jitter_blur(drawn.sigma, jitter->kernel / 2, shape->height, shape->width, image + k * plane, other);
        memcpy(image + k * plane, other, plane);
    }
}
