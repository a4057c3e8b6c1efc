#include "load/input.h"

#include <string.h>

#include "core/dtype.h"

/* One channel of an image, and how its values are normalised. */
struct channel {
    const struct image *image;
    size_t begin, step; /* the value at row y and column x has index begin + (y * width + x) * step */
    float mean, scale;
    float of_byte[256]; /* normalised value of each possible byte */
};

static float normalise(const struct channel *channel, float value)
{
    return (value - channel->mean) * channel->scale;
}

static void open_channel(const struct augmentation *augmentation, const struct image *image, uint32_t c,
                         struct channel *channel)
{
    uint32_t of = c < augmentation->channels ? c : 0;
    channel->image = image;
    channel->begin = image->interleaved ? c : (size_t)c * image->height * image->width;
    channel->step = image->interleaved ? image->channels : 1;
    channel->mean = augmentation->mean[of];
    channel->scale = augmentation->scale[of];
    for (uint32_t byte = 0; image->type == DTYPE_U8 && byte < 256; byte++)
        channel->of_byte[byte] = normalise(channel, (float)byte * (1.0f / 255));
}

/* Normalises `count` values of a row; the first has index `first` within the channel. */
static void normalise_row(const struct channel *channel, size_t first, uint32_t count, float *values)
{
    const struct image *image = channel->image;
    size_t begin = channel->begin + first * channel->step, step = channel->step;
    if (image->type == DTYPE_U8)
        for (uint32_t x = 0; x < count; x++)
            values[x] = channel->of_byte[image->pixels[begin + x * step]];
    for (uint32_t x = 0; image->type == DTYPE_F16 && x < count; x++) {
        uint16_t bits;
        memcpy(&bits, image->pixels + 2 * (begin + x * step), sizeof bits);
        values[x] = normalise(channel, half_to_float(bits));
    }
    for (uint32_t x = 0; image->type == DTYPE_F32 && x < count; x++) {
        memcpy(&values[x], image->pixels + 4 * (begin + x * step), sizeof *values);
        values[x] = normalise(channel, values[x]);
    }
}

static void reverse(float *values, uint32_t count)
{
    for (uint32_t x = 0; x < count / 2; x++) {
        float value = values[x];
        values[x] = values[count - 1 - x];
        values[count - 1 - x] = value;
    }
}

/* Computes row `y` of one channel of the result, from row `y` + move.down of the image. */
static void augment_row(const struct channel *channel, struct draw_move move, int64_t y, float *row)
{
    const struct image *image = channel->image;
    int64_t source = y + move.down, width = image->width;
    int64_t begin = move.right < 0 ? -(int64_t)move.right : 0,
            end = move.right > 0 ? width - move.right : width;
    if (source < 0 || source >= image->height || begin >= end)
        begin = end = 0;
    for (int64_t x = 0; x < begin; x++)
        row[x] = normalise(channel, 0);
    for (int64_t x = end; x < width; x++)
        row[x] = normalise(channel, 0);
    if (begin < end)
        normalise_row(channel, (size_t)source * image->width + (size_t)(begin + move.right),
                      (uint32_t)(end - begin), row + begin);
    if (move.flip)
        reverse(row, image->width);
}

void image_augment(const struct augmentation *augmentation, const struct image *image, uint32_t epoch,
                   uint32_t sample, float *values)
{
    struct draw_move move = draw_move(&augmentation->move, augmentation->seed, epoch, sample);
    for (uint32_t c = 0; c < image->channels; c++) {
        struct channel channel;
        open_channel(augmentation, image, c, &channel);
        for (uint32_t y = 0; y < image->height; y++)
            augment_row(&channel, move, y, values + ((size_t)c * image->height + y) * image->width);
    }
}
