/* Tests training samples that are generated during training (live samples). They must be bit-identical to
 * stored samples, for any generator and batch size. The test set must not contain live samples. */
#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include "core/workload.h"
#include "data/source.h"
#include "must.h"
#include "train/feed.h"
#include "train/trainer.h"

#define CLASSES 7
#define RES     24
#define LARGE   160 /* large enough that no image is all black, as some are on a small canvas */
#define TRAIN   61
#define TEST    33

TestSuite(live, .timeout = 120);

static void open_data(int feed, bool fresh, uint64_t batch, uint64_t res, struct data *data)
{
    const struct data_request request = {.name = "synth",
                                         .train_size = TRAIN,
                                         .test_size = TEST,
                                         .classes = CLASSES,
                                         .res = res,
                                         .batch = batch,
                                         .feed = feed,
                                         .fresh = fresh,
                                         .resources = {.threads = 2}};
    must(data_open(&request, data));
    data_normalise(data, true);
}

/* ---- Generators ---- */

/* Generates a sample with the variant naive, which is single-threaded scalar C. */
static void make_alone(struct source_reader *naive, uint64_t number, uint8_t *into, uint64_t *label)
{
    struct source_sample sample = {0};
    must(source_make(naive->source, naive->state, number, 1, &sample));
    const struct source_member *array = source_member(&sample, "npy"),
                               *class_ = source_member(&sample, "cls");
    memcpy(into, (const char *)array->bytes + array->size - RES * RES, RES * RES);
    char text[24] = "";
    memcpy(text, class_->bytes, class_->size);
    *label = strtoull(text, NULL, 10);
    source_sample_free(&sample);
}

static const uint64_t numbers[] = {
    5, 0, 6, UINT64_C(1) << 31, 5, 4294967301, 123456789012345, 93, 1000, 7777777, 3, 2047};
#define NUMBERS ((uint32_t)COUNT_OF(numbers))

/* Sample numbers may be large, unordered and repeated. Batch sizes and numbers of threads must not matter. */
Test(live, generators_generate_any_sample)
{
    static const struct synth_values by_naive = {
        .variant = "naive", .encoding = SOURCE_NPY, .classes = CLASSES, .res = RES, .batch = 1};
    static const struct synth_values values = {.encoding = SOURCE_NPY, .classes = CLASSES, .res = RES};
    struct source_request one = {.parameters = &by_naive, .resources = {.threads = 1}};
    struct source_reader naive, reader;
    uint8_t right[NUMBERS][RES * RES];
    must(source_open("synth", &one, &naive));
    one.parameters = &values;
    must(source_open("synth", &one, &reader));
    for (uint32_t i = 0; i < NUMBERS; i++) {
        uint64_t label;
        make_alone(&naive, numbers[i], right[i], &label);
        cr_expect_eq(reader.source->label(reader.state, numbers[i]), label);
        cr_expect_eq(label, numbers[i] % CLASSES);
    }
    for (int threads = 1; threads <= 13; threads += 4)
        for (uint32_t batch = 1; batch <= NUMBERS; batch += batch == 1 ? 4 : 7) {
            const struct generator_request request = {.resources = {.threads = threads}, .batch = batch};
            struct generator *generator;
            uint8_t mine[NUMBERS][RES * RES];
            memset(mine, 0xaa, sizeof mine);
            must(reader.source->generate(reader.state, &request, &generator));
            for (uint32_t at = 0; at < NUMBERS; at += batch) {
                const struct generator_numbers listed = {.list = numbers + at};
                must(generator_make(generator, &listed, NUMBERS - at < batch ? NUMBERS - at : batch, mine[at],
                                    NULL, NULL));
            }
            cr_expect_eq(memcmp(mine, right, sizeof right), 0, "%d threads, batch %u", threads, batch);
            /* With at least two threads per image, the canvases have 16 bits per pixel. */
            uint64_t parts = (uint64_t)threads / batch,
                     bytes = parts < 2 ? (uint64_t)threads : 2 * batch * parts;
            cr_expect_geq(generator_memory_bytes(generator), bytes * RES * RES, "%d threads, batch %u",
                          threads, batch);
            generator_close(generator);
        }
    source_close(&reader);
    source_close(&naive);
}

Test(live, missing_device_is_reported)
{
    static const struct synth_values values = {.encoding = SOURCE_NPY, .classes = CLASSES, .res = RES};
    const struct generator_request request = {
        .on_device = true, .resources = {.threads = 1, .device = 4096}, .batch = 4};
    struct source_reader reader;
    struct generator *generator;
    const struct source_request open = {.parameters = &values, .resources = request.resources};
    must(source_open("synth", &open, &reader));
    cr_expect_eq(reader.source->generate(reader.state, &request, &generator), STATUS_UNAVAILABLE);
    source_close(&reader);
}

/* ---- Sets ---- */

/* Compares the counts, labels, hashes and normalisation of two data sets, and the samples that `data` keeps
 * in memory. */
static void expect_equal(const struct data *stored, const struct data *data)
{
    cr_expect_eq(memcmp(stored->hashes, data->hashes, sizeof data->hashes), 0);
    cr_expect(stored->scale[0] == data->scale[0] && stored->offset[0] == data->offset[0]);
    for (int part = 0; part < DATA_PARTS; part++) {
        const struct data_set *right = &stored->sets[part], *set = &data->sets[part];
        cr_assert_eq(set->count, right->count);
        cr_expect_eq(memcmp(set->labels, right->labels, set->count * sizeof *set->labels), 0);
        cr_expect_eq(memcmp(set->values, right->values, data_held(data, part) * data->sample_bytes), 0);
    }
}

/* A data set must be the same with --feed stored, live and constant. For synth, the default (-1) is live. */
Test(live, sets_of_all_feeds_are_equal)
{
    struct data stored, live, constant;
    open_data(DATA_STORED, false, 8, RES, &stored);
    open_data(-1, false, 8, RES, &live);
    open_data(DATA_CONSTANT, false, 8, RES, &constant);
    cr_expect(stored.feed == DATA_STORED && live.feed == DATA_LIVE && constant.feed == DATA_CONSTANT);
    cr_expect_eq(stored.sets[DATA_TRAIN].count, TRAIN);
    expect_equal(&stored, &live);
    expect_equal(&stored, &constant);
    data_close(&stored);
    data_close(&live);
    data_close(&constant);
}

/* A large live set keeps only some of its samples in memory, but all labels. */
Test(live, live_sets_keep_few_samples_in_memory)
{
    struct data live, constant;
    struct data_request request = {.name = "synth",
                                   .train_size = 100000,
                                   .test_size = 3,
                                   .classes = 11,
                                   .res = 5,
                                   .batch = 1500,
                                   .feed = -1,
                                   .resources = {.threads = 2}};
    must(data_open(&request, &live));
    request.feed = DATA_CONSTANT;
    must(data_open(&request, &constant));
    cr_expect(data_held(&live, DATA_TRAIN) == DATA_MEASURED && data_held(&constant, DATA_TRAIN) == 1500);
    cr_expect(data_measured(&live, DATA_TRAIN) == DATA_MEASURED && data_held(&live, DATA_TEST) == 3);
    cr_expect_eq(live.hashes[DATA_TRAIN], constant.hashes[DATA_TRAIN]);
    for (uint32_t i = 0; i < 100000; i++)
        cr_assert_eq(live.sets[DATA_TRAIN].labels[i], i % 11);
    data_close(&live);
    data_close(&constant);
}

/* If data.gray is true, engines may compute one channel and use it for all channels. */
Test(live, the_channels_of_gray_samples_are_equal)
{
    struct data data;
    const struct data_request request = {.name = "synth",
                                         .train_size = 20,
                                         .test_size = 1,
                                         .classes = CLASSES,
                                         .res = LARGE,
                                         .fit = {.how = FIT_RESIZE, .res = 40, .channels = 3},
                                         .feed = DATA_STORED,
                                         .resources = {.threads = 2}};
    must(data_open(&request, &data));
    cr_assert(data.gray && data.shape.channels == 3);
    for (uint32_t n = 0; n < 20; n++) {
        const uint8_t *sample = data_sample(&data, DATA_TRAIN, n);
        cr_expect(memcmp(sample, sample + 1600, 1600) == 0 && memcmp(sample, sample + 3200, 1600) == 0);
    }
    data_close(&data);
}

/* No training image of any epoch may be in the test set. With fresh samples, no image may occur in two
 * epochs. */
Test(live, test_samples_are_never_training_samples)
{
    struct data data;
    open_data(DATA_LIVE, true, TRAIN, LARGE, &data);
    const struct generator_request request = {.resources = {.threads = 2}, .batch = TRAIN};
    struct generator *generator;
    uint8_t *samples = malloc(3 * TRAIN * data.sample_bytes), *end = samples;
    must(data_generator(&data, &request, &generator));
    for (uint32_t epoch = 0; epoch < 3; epoch++, end += TRAIN * data.sample_bytes) {
        uint64_t of[TRAIN];
        for (uint32_t n = 0; n < TRAIN; n++) {
            of[n] = data_number(data.fresh, epoch, n);
            cr_expect_eq(of[n] % CLASSES, data.sets[DATA_TRAIN].labels[n]);
        }
        const struct generator_numbers listed = {.list = of};
        must(generator_make(generator, &listed, TRAIN, end, NULL, NULL));
    }
    for (const uint8_t *mine = samples; mine < end; mine += data.sample_bytes) {
        for (uint32_t n = 0; n < TEST; n++)
            cr_expect_neq(memcmp(mine, data_sample(&data, DATA_TEST, n), data.sample_bytes), 0);
        for (const uint8_t *other = samples; other < mine; other += data.sample_bytes)
            cr_expect_neq(memcmp(mine, other, data.sample_bytes), 0);
    }
    generator_close(generator);
    free(samples);
    data_close(&data);
    /* In each epoch, the sample numbers of the largest training set are all below or all above those of the
     * test set. */
    for (uint32_t epoch = 0; epoch < 5; epoch++) {
        uint64_t first = data_number(UINT64_C(4294967296), epoch, 0), last = first + INT32_MAX - 1;
        cr_expect(last < UINT64_C(1) << 31 || first >= (UINT64_C(1) << 31) + INT32_MAX);
    }
}

/* ---- Engines ---- */

static struct mixing mixing; /* the mixing of samples in learn() */

/* Trains two epochs and sets `into` to the parameters. */
static void learn(const struct engine *engine, int feed, bool fresh, uint32_t batch, int threads,
                  struct train_state *into)
{
    struct data data;
    struct model model;
    void *state;
    open_data(feed, fresh, batch, RES, &data);
    must(model_build(&model_tables[0], data.shape, data.classes, &model)); /* a weight per pixel and class */
    const struct train train = {.model = &model,
                                .data = &data,
                                .seed = 3,
                                .batch = batch,
                                .augment = {.shift = 1, .flip = true},
                                .mixing = mixing,
                                .optimizer = {.kind = OPTIMIZER_SGD, .momentum = 0.9},
                                .schedule = {.rate = 0.01}};
    const struct resources resources = {.threads = threads};
    cr_assert(train_state_new(model.arena_values, into));
    model_initialise(&model, 3, into->parameters);
    must(engine->open(&train, &resources, &state));
    must(engine->set(state, into));
    for (uint32_t epoch = 0; epoch < 2; epoch++)
        must(engine->steps(state, epoch, 0, train_steps(&train)));
    struct train_totals totals;
    must(engine->totals(state, &totals));
    cr_expect_eq(totals.samples, 2 * TRAIN);
    cr_expect((data.feed == DATA_LIVE) == (totals.generate_s > 0) && totals.data_s >= totals.generate_s);
    must(engine->get(state, into));
    engine->close(state);
    data_close(&data);
}

static bool learn_the_same(const struct engine *engine, int feed, bool fresh, uint32_t batch, int threads,
                           const struct train_state *right, size_t values)
{
    struct train_state mine;
    learn(engine, feed, fresh, batch, threads, &mine);
    bool same = memcmp(mine.parameters, right->parameters, values * sizeof(float)) == 0;
    train_state_free(&mine);
    return same;
}

extern const struct engine engine_omp;

static void compare_feeds(const struct engine *engine)
{
    struct model model;
    must(model_build(&model_tables[0], (struct shape){1, 1, RES, RES}, CLASSES, &model));
    static const uint32_t batches[] = {1, 8, TRAIN};
    for (size_t i = 0; i < COUNT_OF(batches); i++) {
        struct train_state stored;
        learn(engine, DATA_STORED, false, batches[i], 2, &stored);
        for (int threads = 1; threads <= 3; threads += 2)
            cr_expect(
                learn_the_same(engine, DATA_LIVE, false, batches[i], threads, &stored, model.arena_values));
        cr_expect(!learn_the_same(engine, DATA_LIVE, true, batches[i], 2, &stored, model.arena_values));
        cr_expect(!learn_the_same(engine, DATA_CONSTANT, false, batches[i], 2, &stored, model.arena_values) ||
                  batches[i] == TRAIN);
        train_state_free(&stored);
    }
}

Test(live, naive_trains_identically_live_and_stored)
{
    compare_feeds(&engine_naive);
}

Test(live, mixed_samples_are_identical_live_and_stored)
{
    mixing = (struct mixing){0.8, 1};
    compare_feeds(&engine_naive);
#ifdef _OPENMP
    compare_feeds(&engine_omp);
#endif
}

#ifdef _OPENMP
Test(live, omp_trains_identically_live_and_stored)
{
    compare_feeds(&engine_omp);
}
#endif

/* ---- Options ---- */

/* Opens the workload `train` on a small set of synth with the options in `argv`. Calls `check` with the input
 * of the workload and `argument`. */
/* The options of the latest open_train(), for its check. */
static const struct options *given;
static const void *given_parameters;

static void open_train(int argc, char *argv[], void (*check)(const void *input, const void *argument),
                       const void *argument)
{
    const struct workload *workload = workload_find("train");
    const struct partition alone = {.ranks = 1};
    void *parameters = calloc(1, workload->parameters_bytes), *input;
    struct options options = {.tables = {{workload->options, workload->option_count, parameters}},
                              .table_count = 1};
    must(options_parse(&options, argc, argv));
    must(workload->open(&options, parameters, &alone, &input));
    given = &options;
    given_parameters = parameters;
    check(input, argument);
    workload->close(input);
    options_free(&options);
    free(parameters);
}

#define SMALL                                                                                  \
    (char *)"", (char *)"--data", (char *)"synth", (char *)"--train-size", (char *)"80",       \
        (char *)"--test-size", (char *)"10", (char *)"--res", (char *)"16", (char *)"--model", \
        (char *)"logreg"

static void expect_feeds(const void *input, const void *argument)
{
    const struct workload *workload = workload_find("train");
    const bool live = *(const int *)argument;
    struct engine narrow = engine_naive;
    narrow.feeds = false;
    const struct variant variant = {.traits = &narrow}, able = {.traits = &engine_naive};
    cr_expect_eq(workload->accepts(input, &able), STATUS_OK);
    cr_expect_eq(workload->suits(given, given_parameters, &variant), live ? STATUS_USAGE : STATUS_OK);
}

/* Engines that keep all samples in memory must reject --feed live. */
Test(live, engines_without_feeds_reject_live_data)
{
    for (int live = 0; live < 2; live++) {
        char *argv[] = {SMALL, (char *)"--feed", (char *)(live ? "live" : "stored")};
        open_train(COUNT_OF(argv), argv, expect_feeds, &live);
    }
}

static void expect_generator(const void *input, const void *argument)
{
    const char *name = argument;
    const struct workload *workload = workload_find("train");
    const struct train_job *job = input;
    const struct variant on_cpu = {.platform = "cpu", .traits = &engine_naive},
                         on_gpu = {.platform = "cuda", .traits = &engine_naive};
    const bool for_gpu = strcmp(name, "auto") != 0 && strcmp(name, "omp") != 0;
    const bool other_bits = for_gpu && strcmp(name, "fused") != 0;
    cr_expect_eq(workload->suits(given, given_parameters, &on_gpu), STATUS_OK, "%s", name);
    cr_expect_eq(workload->suits(given, given_parameters, &on_cpu), for_gpu ? STATUS_USAGE : STATUS_OK, "%s",
                 name);
    cr_expect_eq(option_values_find(&job->identity, "generator") != NULL, other_bits, "%s", name);
    cr_expect_str_eq(job->train.generator ? job->train.generator : "auto", name);
}

/* Engines on a CPU accept only the generators `auto` and `omp`. Training can resume with another generator if
 * both generate the same bits. */
Test(live, generators_suit_the_device_and_identify_the_training)
{
    static const char *const names[] = {"auto", "omp", "fused", "bat", "gbase"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        char *argv[] = {SMALL, (char *)"--generator", (char *)(uintptr_t)names[i]};
        open_train(COUNT_OF(argv), argv, expect_generator, names[i]);
    }
}
