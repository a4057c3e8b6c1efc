/* Training samples that the caller of the library hands over, batch by batch (src/lib/trainer.c): the source
 * of training data that have data->given. The number of a training sample is its position in the epoch, and
 * each step sets the labels of its samples. The test set has room for a batch, which the caller fills to have
 * it evaluated. */
#ifndef FDSL_TRAIN_GIVEN_H
#define FDSL_TRAIN_GIVEN_H

#include "train/data.h"

struct given {
    /* Declared by the caller: */
    struct shape shape;
    enum dtype type;
    uint32_t classes, samples; /* of an epoch of all ranks */
    bool multi_hot;
    bool mixed;        /* samples may be mixed already: sample i of a step with its last sample but i */
    uint64_t identity; /* hash of the stream that they are from; 0: batches of the caller, which has none */

    /* The batch of the next step; the stream does not copy its values. */
    const void *values;
    uint32_t count;               /* 0: there is none */
    const int32_t *labels;        /* in host memory; of multi-hot labels, 0 */
    const int64_t *device_labels; /* in device memory, instead of `labels`; NULL: none */
    const uint8_t *rows;          /* of multi-hot labels: one byte per class of each sample, in host memory */
    float share;                  /* weight of a sample in its mixture; 1: not mixed */
    void *ready;                  /* a recorded cudaEvent_t, on a device: the values are complete */

    /* Called when a step no longer reads the values, or will not after `done_event`, a recorded cudaEvent_t
     * (NULL on the CPU). */
    enum status (*release)(void *context, void *done_event);
    void *context;
};

FDSL_C_BEGIN

/* Sets the data to those that `given` declares; it must outlive them. `batch`: the samples of a rank in a
 * step, for the room of the test set. The caller closes `data`, even after a failure. */
enum status given_open(struct given *given, uint32_t batch, struct data *data);

/* Implements data_stream(). STATUS_USAGE if the batch has not as many samples as the step. */
enum status given_stream(const struct data *data, const struct data_stream_request *request,
                         struct stream **stream);

FDSL_C_END

#endif
