#include "train/data.h"

#include <math.h>
#include <stdlib.h>

void data_close(struct data *data)
{
    for (int part = 0; part < DATA_PARTS; part++) {
        free(data->sets[part].values);
        free(data->sets[part].labels);
    }
    *data = (struct data){0};
}

/* ---- On the way into the network ---- */

/* Mean and variance of a channel over the training set: of bytes exact sums, of halves in double. */
static void moments(const struct data *data, uint32_t channel, double *mean, double *variance)
{
    const struct data_set *set = &data->sets[DATA_TRAIN];
    size_t plane = data->sample_values / data->shape.channels;
    double sum = 0, squares = 0, count = (double)plane * set->count;
    for (uint32_t n = 0; n < set->count; n++) {
        const uint8_t *sample = (const uint8_t *)set->values + (size_t)n * data->sample_bytes;
        for (size_t i = 0; i < plane; i++) {
            double value = data_value(data->type, sample, channel * plane + i);
            sum += value;
            squares += value * value;
        }
    }
    *mean = sum / count;
    *variance = squares / count - *mean * *mean;
}

void data_normalise(struct data *data, bool on)
{
    for (uint32_t c = 0; c < data->shape.channels; c++) {
        double mean = 0, variance = data->type == DATA_U8 ? 255.0 * 255.0 : 1;
        if (on)
            moments(data, c, &mean, &variance);
        double deviation = variance > 0 ? sqrt(variance) : 1; /* all alike: only shifted */
        data->scale[c] = (float)(1 / deviation);
        data->offset[c] = (float)(-mean / deviation);
    }
}

void data_gather(const struct data *data, enum data_part part, uint32_t sample, struct draw_move move,
                 float *values)
{
    const struct shape *shape = &data->shape;
    size_t plane = (size_t)shape->height * shape->width;
    const uint8_t *stored = (const uint8_t *)data->sets[part].values + (size_t)sample * data->sample_bytes;
    for (uint32_t c = 0; c < shape->channels; c++)
        for (uint32_t t = 0; t < shape->depth; t++) {
            size_t first = ((size_t)c * shape->depth + t) * plane;
            for (uint32_t y = 0; y < shape->height; y++)
                for (uint32_t x = 0; x < shape->width; x++) {
                    int32_t from = draw_moved(&move, shape->height, shape->width, y, x);
                    float value = from < 0 ? 0 : data_value(data->type, stored, first + (size_t)from);
                    *values++ = fmaf(value, data->scale[c], data->offset[c]);
                }
        }
}
