#include "train/given.h"

#include <inttypes.h>
#include <stdlib.h>

#include "train/data_fill.h"

enum status given_open(struct given *given, uint32_t batch, struct data *data)
{
    const uint32_t counts[DATA_PARTS] = {given->samples, batch};
    data->given = given;
    data->feed = DATA_LOAD;
    data->shape = given->shape;
    data->type = given->type;
    data->classes = given->classes;
    data->multi_hot = given->multi_hot;
    data->hashes[DATA_TRAIN] = given->identity;
    data->lanes = 1; /* numbers are positions: the caller has the order */
    data->shuffle = 0;
    data->sample_values = shape_values(&given->shape);
    data->sample_bytes = data->sample_values * dtype_bytes(given->type);
    for (int part = 0; part < DATA_PARTS; part++) {
        struct data_set *set = &data->sets[part];
        TRY(data_room_for_labels(data, counts[part], data_size_options[part], set));
        set->count = counts[part];
        for (uint32_t n = 0; n < set->count; n++)
            set->labels[n] = given->multi_hot ? n : 0;
    }
    data->sets[DATA_TEST].values = calloc(batch, data->sample_bytes);
    return ALLOCATED(data->sets[DATA_TEST].values, "out of memory for a batch of %" PRIu32 " samples", batch);
}

/* ---- The stream ---- */

struct given_batches {
    struct stream stream; /* must be the first member */
    struct given *given;
    struct stream_plan plan;
    size_t sample_bytes;
    uint32_t *numbers;
    uint64_t delivered;
};

static enum status next(struct stream *stream, struct stream_batch *batch)
{
    struct given_batches *self = (struct given_batches *)stream;
    const struct given *given = self->given;
    const struct stream_position at = stream->at;
    const uint32_t count = self->plan.list(self->plan.context, at.epoch, at.step, self->numbers);
    if (given->count != count)
        return status_set(STATUS_USAGE,
                          "epoch %" PRIu64 ", step %" PRIu64 ": the batch has %" PRIu32
                          " samples, but the step has %" PRIu32 " on this rank",
                          at.epoch + 1, at.step + 1, given->count, count);
    self->delivered += count;
    *batch = (struct stream_batch){.samples = {.values = given->values,
                                               .bytes = count * self->sample_bytes,
                                               .stride = self->sample_bytes,
                                               .count = count,
                                               .type = given->type,
                                               .labels = given->device_labels ? NULL : given->labels},
                                   .numbers = self->numbers,
                                   .labels = given->device_labels ? NULL : given->labels,
                                   .masks = given->rows,
                                   .share = given->share,
                                   .epoch = at.epoch,
                                   .step = at.step,
                                   .last = at.step + 1 == self->plan.steps,
                                   .ready = given->ready};
    return STATUS_OK;
}

static enum status release(struct stream *stream, const struct stream_batch *batch, void *done_event)
{
    const struct given *given = ((struct given_batches *)stream)->given;
    (void)batch;
    return given->release(given->context, done_event);
}

static enum status seek(struct stream *stream, struct stream_position to)
{
    return stream_check_position(&((struct given_batches *)stream)->plan, to);
}

static void stats(struct stream *stream, struct stream_stats *counted)
{
    *counted = (struct stream_stats){.samples = ((struct given_batches *)stream)->delivered};
}

static void cancel(struct stream *stream)
{
    (void)stream; /* nothing waits */
}

static void close_batches(struct stream *stream)
{
    free(((struct given_batches *)stream)->numbers);
    free(stream);
}

static const struct stream_type type = {
    .next = next, .release = release, .seek = seek, .stats = stats, .cancel = cancel, .close = close_batches};

enum status given_stream(const struct data *data, const struct data_stream_request *request,
                         struct stream **stream)
{
    struct given_batches *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory for a stream"));
    *self = (struct given_batches){.stream = {.type = &type},
                                   .given = data->given,
                                   .plan = request->plan,
                                   .sample_bytes = data->sample_bytes,
                                   .numbers = calloc(request->plan.capacity, sizeof *self->numbers)};
    *stream = &self->stream;
    return ALLOCATED(self->numbers, "out of memory for a stream");
}
