/* What is learnt from: a training set and a test set of samples of one shape, with labels, in memory as they
 * were stored; what becomes of a value on its way into the network. */
#ifndef FDSL_TRAIN_DATA_H
#define FDSL_TRAIN_DATA_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/dtype.h"
#include "core/generator.h"
#include "core/portable.h"
#include "core/status.h"
#include "core/variant.h"
#include "data/draws.h"
#include "train/model.h"

#define DATA_CHANNELS_MAX 16

enum data_part { DATA_TRAIN, DATA_TEST, DATA_PARTS };

/* Where the training samples of a step come from. */
enum data_feed {
    DATA_STORED,  /* memory: all are made or read at the opening */
    DATA_LIVE,    /* nowhere: they are generated batch by batch, while training */
    DATA_CONSTANT /* memory: every step takes the first batch of the set. Speed without any supply, to compare
                   * with: nothing of use is learnt */
};

/* Samples one behind the other, each in C order (channels, depth, height, width), and a label for each. */
struct data_set {
    uint32_t count;
    void *values;     /* owned */
    uint32_t *labels; /* owned; below data->classes */
};

struct data {
    struct shape shape;
    enum dtype type;
    uint32_t classes;
    size_t sample_values, sample_bytes;
    struct data_set sets[DATA_PARTS]; /* neither is empty */
    /* Normalised, value v of channel c is fmaf(v, scale[c], offset[c]): of bytes 0 to 255 and halves alike
     * that is (v - mean) / standard deviation over the training set. */
    float scale[DATA_CHANNELS_MAX], offset[DATA_CHANNELS_MAX];
    /* How many training samples, the first ones, are in memory, and how many scale, offset and hash are found
     * from: of what can be generated DATA_MEASURED. 0: all. */
    uint32_t held, measured;
    uint64_t hashes[DATA_PARTS]; /* of each set's samples (as measured) and labels */
    double opening_s;            /* that data_open() took */

    /* How the training set comes. Live sample n is in epoch e the generator's number n + e * fresh: with 0
     * the same sample in all epochs, else another one with the same label; none is ever one
     * of the test set. */
    enum data_feed feed;
    uint64_t fresh;
    struct data_source *source; /* of DATA_LIVE: what data_generator() asks; owned */
};

/* How many samples of a set `values` has. */
static inline uint32_t data_held(const struct data *data, enum data_part part)
{
    return part == DATA_TRAIN && data->held ? data->held : data->sets[part].count;
}

/* How many samples of a set say what it is. */
static inline uint32_t data_measured(const struct data *data, enum data_part part)
{
    return part == DATA_TRAIN && data->measured ? data->measured : data->sets[part].count;
}

/* The generator's number of a live sample. */
FDSL_HD uint64_t data_number(uint64_t fresh, uint32_t epoch, uint32_t sample)
{
    return sample + epoch * fresh;
}

/* The float of an IEEE half's bits: exact. */
FDSL_HD float data_half(uint16_t bits)
{
    uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u, sign = (uint32_t)(bits >> 15) << 31,
             word;
    float value;
    if (exponent == 0) {
        value = (float)mantissa * 0x1p-24f; /* zeros and subnormals */
        return sign ? -value : value;
    }
    word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* The value of element `i` of a sample as stored. */
FDSL_HD float data_value(enum dtype type, const void *sample, size_t i)
{
    return type == DTYPE_U8 ? (float)((const uint8_t *)sample)[i] : data_half(((const uint16_t *)sample)[i]);
}

FDSL_C_BEGIN

/* What both sets are made or read from: "digits", "clips" and "synth" are generated; else it is a folder of
 * MNIST's four IDX files, of CIFAR-10's binary ones, of two datasets (train, test), or one dataset, of which
 * a tenth is then held out for tests. */
struct data_request {
    const char *name;
    uint64_t train_size, test_size; /* the first so many samples; 0: all, or DATA_TRAIN_SIZE and
                                     * DATA_TEST_SIZE of those that are generated */
    uint64_t classes;               /* labels are below; 0: 10, and of datasets as many as there are */
    uint64_t res;                   /* pixels a side, of synth */
    uint64_t batch;                 /* samples a step */
    int feed;                       /* enum data_feed, or negative: live where that can be */
    bool fresh;                     /* live samples are others in every epoch */
    struct resources resources;
};

#define DATA_MEASURED   1000
#define DATA_TRAIN_SIZE 10000
#define DATA_TEST_SIZE  2000

/* Opens or makes both sets. The caller closes, also after a failure. STATUS_USAGE where a folder holds
 * nothing that is known or a feed does not suit it, STATUS_FAILED with file and reason where what it holds is
 * broken. */
enum status data_open(const struct data_request *request, struct data *data);
void data_close(struct data *data);

/* Finds scale and offset from the training set, or, where `on` is false, makes them such that bytes become 0
 * to 1 and halves stay. data_open() leaves this to the caller. */
void data_normalise(struct data *data, bool on);

/* Where a sample that is held lies. */
const void *data_sample(const struct data *data, enum data_part part, uint32_t sample);

/* One sample as the network sees it: moved, normalised, in `values` (data->sample_values floats). Pure, for
 * any thread. `stored` is data->sample_bytes of it. Test samples are not moved: (struct draw_move){0}. */
void data_gather(const struct data *data, const void *stored, struct draw_move move, float *values);

/* Makes a generator of the training samples of DATA_LIVE, which the data outlive; the caller closes it. */
enum status data_generator(const struct data *data, const struct generator_request *request,
                           struct generator **generator);

FDSL_C_END

#endif
