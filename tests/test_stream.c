/* Tests of streams (core/stream.h), of the order of their samples, and of the stream that reads data sets. */
#include "data/set_stream.h"

#include "shell.h"

#include <string.h>

#include "data/random_draws.h"
#include "must.h"
#include "train/data.h"

TestSuite(stream, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* ---- A stream and its plan ---- */

/* The samples of an epoch in the order of draw_lanes(), in steps of `batch`. */
struct epochs {
    uint32_t count, batch, lanes, shuffle;
};

static uint32_t list(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
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

/* Opens the data set `name` of the test's folder. The caller may change the request before start(). */
static void open_set(struct opened *opened, const char *name)
{
    char path[PATH_MAX];
    struct members choice;
    memset(opened, 0, sizeof *opened);
    snprintf(path, sizeof path, "%s%s%s", strstr(name, "://") ? "" : folder, strstr(name, "://") ? "" : "/",
             name);
    must(members_parse(NULL, NULL, NULL, &choice));
    must(dataset_open(path, false, &choice, NULL, &opened->dataset));
    opened->epochs = (struct epochs){opened->dataset.sample_count, 16, 8, 64};
    opened->request = (struct set_stream_request){.dataset = &opened->dataset,
                                                  .fit = {.how = FIT_RESIZE, .res = 20, .channels = 3},
                                                  .channels = 3,
                                                  .depth = 1,
                                                  .height = 20,
                                                  .width = 20,
                                                  .type = DTYPE_U8,
                                                  .threads = 2,
                                                  .ahead = 2};
}

static void start(struct opened *opened)
{
    struct stream_plan *plan = &opened->request.plan;
    plan->capacity = opened->epochs.batch;
    plan->steps = (opened->epochs.count + opened->epochs.batch - 1) / opened->epochs.batch;
    plan->list = list;
    plan->context = &opened->epochs;
    must(set_stream_open(&opened->request, &opened->stream));
}

static void close_set(struct opened *opened)
{
    stream_close(opened->stream);
    dataset_close(&opened->dataset);
}

/* The batches of a stream, joined. */
struct record {
    uint8_t *values;
    int32_t *labels;
    uint32_t *numbers, count;
    size_t sample_bytes;
};

static void add(struct record *record, const struct stream_batch *batch)
{
    const struct batch *samples = &batch->samples;
    const size_t count = record->count + samples->count;
    record->sample_bytes = samples->stride;
    record->values = realloc(record->values, count * samples->stride + 1);
    record->labels = realloc(record->labels, count * sizeof *record->labels + 1);
    record->numbers = realloc(record->numbers, count * sizeof *record->numbers + 1);
    memcpy(record->values + record->count * samples->stride, samples->values, samples->bytes);
    memcpy(record->labels + record->count, samples->labels, samples->count * sizeof *record->labels);
    memcpy(record->numbers + record->count, batch->numbers, samples->count * sizeof *record->numbers);
    record->count += samples->count;
}

static struct record take(struct stream *stream, uint64_t batches)
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

static bool same(const struct record *a, const struct record *b)
{
    return a->count == b->count && memcmp(a->values, b->values, a->count * a->sample_bytes) == 0 &&
           memcmp(a->labels, b->labels, a->count * sizeof *a->labels) == 0 &&
           memcmp(a->numbers, b->numbers, a->count * sizeof *a->numbers) == 0;
}

static void forget(struct record *record)
{
    free(record->values);
    free(record->labels);
    free(record->numbers);
}

#if defined HAVE_PNG && defined HAVE_XXHASH
/* Writes `samples` digits to m/ as shards and to f/ as class folders. Both have the same order. */
static void prepare(unsigned samples)
{
    EXPECT(0,
           "$P --prepare all --from digits --samples %u --store imagefolder && "
           "mkdir f && cp -r all/*/ f && "
           "$P --prepare m --from dataset --source f --store shards --shards 3",
           samples);
}

/* ---- Contents ---- */

Test(stream, the_batches_do_not_depend_on_threads_or_storage)
{
    static const char *const names[] = {"m", "f"};
    static const int threads[] = {1, 2, 3, 7};
    static const uint32_t ahead[] = {1, 2, 5};
    struct opened opened;
    struct record wanted = {.count = 0};
    prepare(257);
    for (size_t n = 0; n < COUNT_OF(names); n++)
        for (size_t t = 0; t < COUNT_OF(threads); t++)
            for (size_t a = 0; a < COUNT_OF(ahead); a++) {
                open_set(&opened, names[n]);
                opened.request.threads = threads[t];
                opened.request.ahead = ahead[a];
                start(&opened);
                struct record found = take(opened.stream, 2 * opened.request.plan.steps);
                cr_assert_eq(found.count, 2 * 257);
                if (wanted.count == 0) {
                    wanted = found;
                } else {
                    cr_expect(same(&wanted, &found), "%s, %d threads, %u ahead", names[n], threads[t],
                              ahead[a]);
                    forget(&found);
                }
                close_set(&opened);
            }
    forget(&wanted);
}

/* The training set is all of f/. */
Test(stream, the_pixels_and_labels_are_those_of_stored_data)
{
    struct opened opened;
    struct data data;
    char path[PATH_MAX];
    prepare(257);
    EXPECT(0, "mkdir both && cp -r f both/train && cp -r f both/test");
    snprintf(path, sizeof path, "%s/both", folder);
    for (uint32_t res = 0; res <= 20; res += 20) {
        const struct data_request request = {.name = path,
                                             .fit = {.how = FIT_RESIZE, .res = res, .channels = 3},
                                             .batch = 10,
                                             .feed = -1,
                                             .resources = {.threads = 2}};
        must(data_open(&request, &data));
        open_set(&opened, "m");
        opened.request.fit.res = res;
        opened.request.channels = data.shape.channels;
        opened.request.height = opened.request.width = data.shape.width;
        start(&opened);
        struct record found = take(opened.stream, opened.request.plan.steps);
        cr_assert(found.count == 257 && data.sets[DATA_TRAIN].count == 257);
        cr_assert_eq(found.sample_bytes, data.sample_bytes);
        for (uint32_t i = 0; i < found.count; i++) {
            const uint32_t n = found.numbers[i];
            cr_expect_eq(found.labels[i], (int32_t)data.sets[DATA_TRAIN].labels[n]);
            cr_expect_arr_eq(found.values + i * found.sample_bytes, data_sample(&data, DATA_TRAIN, n),
                             found.sample_bytes);
        }
        forget(&found);
        close_set(&opened);
        data_close(&data);
    }
}
#endif
