/* Writes samples of the first step as PNG files, as the network sees them (--save-batch). */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/file.h"
#include "data/image_formats.h"
#include "train/export.h"
#include "train/feed.h"

/* Splits "COUNT:FOLDER". */
static enum status split(const char *text, uint32_t *count, const char **folder)
{
    char *end;
    errno = 0;
    const uint64_t number = isdigit((unsigned char)*text) ? strtoull(text, &end, 10) : 0;
    if (number == 0 || number > UINT32_MAX || errno || *end != ':' || !end[1])
        return status_set(STATUS_USAGE, "--save-batch %.80s: give a number and a folder, as in 16:samples",
                          text);
    *count = (uint32_t)number;
    *folder = end + 1;
    return STATUS_OK;
}

enum status export_batch_check(const char *text)
{
    uint32_t count = 0;
    const char *folder = NULL;
    bool empty = true;
    TRY(split(text, &count, &folder));
    DIR *list = opendir(folder);
    if (!list)
        return errno == ENOENT ? STATUS_OK
                               : status_set(STATUS_USAGE,
                                            "--save-batch: %s cannot be used: %s; name another "
                                            "folder",
                                            folder, strerror(errno));
    for (struct dirent *entry; empty && (entry = readdir(list));)
        empty = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
    closedir(list);
    return empty ? STATUS_OK
                 : status_set(STATUS_USAGE,
                              "--save-batch: the folder %s contains files; name a new or an empty folder",
                              folder);
}

/* Converts normalised values to bytes with interleaved channels. */
static void to_pixels(const struct data *data, const float *values, uint8_t *pixels)
{
    const size_t channels = data->shape.channels, plane = data->sample_values / channels;
    for (size_t i = 0; i < data->sample_values; i++) {
        const size_t c = i / plane;
        const float value = roundf((values[i] - data->offset[c]) / data->scale[c]);
        pixels[i % plane * channels + c] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

static enum status write_png(const struct shape *shape, const uint8_t *pixels, uint32_t index,
                             const char *folder)
{
    const struct png_shape png = {shape->width, shape->height, shape->channels};
    char path[PATH_MAX];
    FREED void *bytes = NULL;
    size_t size;
    if (snprintf(path, sizeof path, "%s/%06u.png", folder, index) >= PATH_MAX)
        return status_set(STATUS_USAGE,
                          "--save-batch: the name of the folder is too long; use a shorter path");
    TRY(png_encode(pixels, &png, &bytes, &size));
    return file_write_atomic(path, bytes, size);
}

/* `numbers` has room for a step (train_entries()), `values` has room for two samples, and `pixels` for
 * one. */
static enum status write_samples(const struct train *train, struct feed *feed, uint32_t count,
                                 const char *folder, uint32_t *numbers, float *values, uint8_t *pixels)
{
    const struct data *data = train->data;
    const struct draw_order order = draw_order(train->seed, 0, data->sets[DATA_TRAIN].count);
    const struct mix mix = train_mix(train, 0, 0);
    const uint32_t there = train_batch(train, &order, 0, numbers);
    if (count > there)
        return status_set(STATUS_USAGE,
                          "--save-batch: the first step has only %u samples; give at most this number",
                          there);
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return status_set(STATUS_USAGE, "--save-batch: %s cannot be created: %s; name another folder", folder,
                          strerror(errno));
    TRY(feed_step(feed, 0, numbers, there));
    for (uint32_t j = 0; j < count; j++) {
        feed_gather(feed, &mix, 0, numbers, there, j, values + data->sample_values, values);
        to_pixels(data, values, pixels);
        TRY(write_png(&data->shape, pixels, j, folder));
    }
    return STATUS_OK;
}

enum status export_batch(const struct train *train, const struct resources *resources, const char *text)
{
    uint32_t count = 0;
    const char *folder = NULL;
    TRY(split(text, &count, &folder));
    const struct data *data = train->data;
    const struct shape *shape = &data->shape;
    if (data->type != DTYPE_U8 || shape->depth > 1 || (shape->channels != 1 && shape->channels != 3))
        return status_set(STATUS_USAGE, "--save-batch writes 8-bit images with one or three channels; drop "
                                        "it, or use other --data");
    CLOSED_BY(feed_close) struct feed feed = {0};
    FREED uint32_t *numbers = malloc(train_entries(train, train_share_max(train)) * sizeof *numbers);
    FREED float *values = malloc(2 * data->sample_values * sizeof *values);
    FREED uint8_t *pixels = malloc(data->sample_values);
    TRY(ALLOCATED(numbers && values && pixels, "--save-batch: out of memory"));
    TRY(feed_open(train, resources, &feed));
    TRY(write_samples(train, &feed, count, folder, numbers, values, pixels));
    status_say("%" PRIu32 " images written to %s", count, folder);
    return STATUS_OK;
}
