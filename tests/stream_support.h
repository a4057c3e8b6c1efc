/* Shared by the suites of streams: a data set, a plan of its epochs, and the batches of a stream, joined. */
#ifndef FDSL_TESTS_STREAM_SUPPORT_H
#define FDSL_TESTS_STREAM_SUPPORT_H

#include "data/set_stream.h"

#include "shell.h"

#include <string.h>

#include "data/random_draws.h"
#include "data/remote.h"
#include "must.h"

/* The samples of an epoch in the order of draw_lanes(), in steps of `batch`. */
struct epochs {
    uint32_t count, batch, lanes, shuffle;
};

static inline uint32_t list(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct epochs *epochs = context;
    const struct draw_order order =
        draw_lanes(7, (uint32_t)epoch, epochs->count, epochs->lanes, epochs->shuffle);
    const uint32_t first = (uint32_t)step * epochs->batch, left = epochs->count - first;
    const uint32_t count = left < epochs->batch ? left : epochs->batch;
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = draw_order_at(&order, first + i);
    return count;
}

/* An open data set, and the stream of its samples. */
struct opened {
    struct dataset dataset;
    struct epochs epochs;
    struct set_stream_request request;
    struct stream *stream;
};

static struct remote_options remote;

/* Opens the data set `name` of the test's folder, or at a URL. The caller may change the request before
 * start(). */
static inline void open_set(struct opened *opened, const char *name)
{
    char path[PATH_MAX];
    struct members choice;
    memset(opened, 0, sizeof *opened);
    snprintf(path, sizeof path, "%s%s%s", strstr(name, "://") ? "" : folder, strstr(name, "://") ? "" : "/",
             name);
    must(members_parse(NULL, NULL, NULL, &choice));
    must(dataset_open(path, false, &choice, &remote, &opened->dataset));
    opened->epochs = (struct epochs){opened->dataset.sample_count, 16, 8, 64};
    opened->request = (struct set_stream_request){.dataset = &opened->dataset,
                                                  .fit = {.how = FIT_RESIZE, .res = 20, .channels = 3},
                                                  .channels = 3,
                                                  .depth = 1,
                                                  .height = 20,
                                                  .width = 20,
                                                  .type = DTYPE_U8,
                                                  .lanes = opened->epochs.lanes,
                                                  .shuffle = opened->epochs.shuffle,
                                                  .threads = 2,
                                                  .ahead = 2};
}

static inline void start(struct opened *opened)
{
    struct stream_plan *plan = &opened->request.plan;
    plan->capacity = opened->epochs.batch;
    plan->steps = (opened->epochs.count + opened->epochs.batch - 1) / opened->epochs.batch;
    plan->list = list;
    plan->context = &opened->epochs;
    must(set_stream_open(&opened->request, &opened->stream));
}

static inline void close_set(struct opened *opened)
{
    stream_close(opened->stream);
    dataset_close(&opened->dataset);
}

/* The batches of a stream, joined. */
struct record {
    uint8_t *values;
    int32_t *labels;
    uint32_t *numbers, count;
    size_t sample_bytes, room; /* `room`: the samples that fit into the arrays */
};

/* The arrays grow rarely, because ASan copies them whenever they grow. */
static inline void add(struct record *record, const struct stream_batch *batch)
{
    const struct batch *samples = &batch->samples;
    const size_t count = record->count + samples->count;
    record->sample_bytes = samples->stride;
    if (count >= record->room) {
        record->room = 2 * count + 1;
        record->values = realloc(record->values, record->room * samples->stride);
        record->labels = realloc(record->labels, record->room * sizeof *record->labels);
        record->numbers = realloc(record->numbers, record->room * sizeof *record->numbers);
    }
    memcpy(record->values + record->count * samples->stride, samples->values, samples->bytes);
    memcpy(record->labels + record->count, samples->labels, samples->count * sizeof *record->labels);
    memcpy(record->numbers + record->count, batch->numbers, samples->count * sizeof *record->numbers);
    record->count += samples->count;
}

static inline struct record take(struct stream *stream, uint64_t batches)
{
    struct record record = {.count = 0};
    for (uint64_t i = 0; i < batches; i++) {
        struct stream_batch batch;
        must(stream_next(stream, &batch));
        add(&record, &batch);
        must(stream_release(stream, &batch, NULL));
    }
    return record;
}

static inline bool same(const struct record *a, const struct record *b)
{
    return a->count == b->count && memcmp(a->values, b->values, a->count * a->sample_bytes) == 0 &&
           memcmp(a->labels, b->labels, a->count * sizeof *a->labels) == 0 &&
           memcmp(a->numbers, b->numbers, a->count * sizeof *a->numbers) == 0;
}

static inline void forget(struct record *record)
{
    free(record->values);
    free(record->labels);
    free(record->numbers);
}

#endif
