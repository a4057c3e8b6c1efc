/* Tests streams of generated images in libfdsl.so, and the arguments of streams that concern devices: on this
 * side of the bus, where batches are in host memory. tests/gpu_lib.cu tests batches in device memory. */
#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/timer.h"
#include "data/generated_stream.h"
#include "data/random_draws.h"
#include "data/source.h"
#include "must.h"
#include "train/feed.h"

#include "lib_support.h" /* included last, because `out` and `status` would shadow names in other headers */

TestSuite(lib_images, .timeout = 120, .init = shell_set_up, .fini = shell_tear_down);

enum { SAMPLES = 50, BATCH = 8, STEPS = 7 };

#ifdef HAVE_XXHASH
static struct fdsl_config images_config(void)
{
    struct fdsl_config config = small();
    config.threads = 0;
    config.res = 32;
    config.out_res = 24;
    config.channels = 3;
    return config;
}

static struct fdsl_source *opened_images(const struct fdsl_config *config, int fresh)
{
    struct fdsl_source *source;
    good(fdsl_images_open(config, SAMPLES, fresh, &source));
    return source;
}

static struct fdsl_stream_config stream_config(void)
{
    struct fdsl_stream_config config;
    good(fdsl_stream_config_init(&config, sizeof config));
    config.batch_size = BATCH;
    config.seed = 9;
    config.num_threads = 2;
    return config;
}

static struct fdsl_stream_info info_of(const struct fdsl_stream *stream)
{
    struct fdsl_stream_info info = {.size = sizeof info};
    good(fdsl_stream_describe(stream, &info));
    return info;
}

/* What a stream should deliver, computed with the generator alone. */
struct expected {
    struct fdsl_generator *generator;
    uint64_t fresh, image_bytes;
    uint64_t numbers[BATCH];
    int64_t labels[BATCH];
    uint8_t images[BATCH * 24 * 24 * 3 * 4];
};

/* Computes the samples of a step from position `first` of the epoch on. */
static void generate_expected(struct expected *expected, const struct fdsl_stream_config *config,
                              uint64_t epoch, uint32_t first, uint32_t count)
{
    const struct draw_order order = draw_order(config->seed, (uint32_t)epoch, SAMPLES);
    for (uint32_t i = 0; i < count; i++)
        expected->numbers[i] = config->shuffle ? draw_order_at(&order, first + i) : first + i;
    uint64_t images[BATCH];
    for (uint32_t i = 0; i < count; i++)
        images[i] = expected->numbers[i] + epoch * expected->fresh;
    good(fdsl_generate_list(expected->generator, images, count, expected->images, expected->labels, NULL));
}

/* Compares a batch with the samples of its step of one rank. */
static void expect_batch(struct expected *expected, const struct fdsl_stream_config *config,
                         struct fdsl_batch *batch)
{
    struct fdsl_batch_info info = {.size = sizeof info};
    good(fdsl_batch_describe(batch, &info));
    const uint32_t global = config->batch_size * config->world_size, first = (uint32_t)info.step * global;
    const uint32_t all = SAMPLES - first < global ? SAMPLES - first : global;
    const uint32_t least = all / config->world_size, more = all % config->world_size;
    const uint32_t count = least + (config->rank < more);
    cr_assert_eq(info.count, count);
    generate_expected(expected, config, info.epoch,
                      first + config->rank * least + (config->rank < more ? config->rank : more), count);
    const struct fdsl_tensor images = tensor_of(batch, FDSL_IMAGES);
    cr_expect(images.device_type == 1 && (uintptr_t)images.data % 256 == 0 && images.shape[0] == count);
    cr_expect_eq(memcmp(images.data, expected->images, count * expected->image_bytes), 0, "epoch %d, step %d",
                 (int)info.epoch, (int)info.step);
    cr_expect_eq(memcmp(tensor_of(batch, FDSL_LABELS).data, expected->labels, count * sizeof(int64_t)), 0);
    cr_expect_eq(memcmp(tensor_of(batch, FDSL_NUMBERS).data, expected->numbers, count * sizeof(int64_t)), 0);
}

static struct expected *opened_expected(const struct fdsl_config *config, int fresh)
{
    static struct expected expected;
    struct fdsl_config own = *config;
    own.generator = "naive";
    expected.generator = opened(&own);
    expected.image_bytes = image_bytes(expected.generator);
    expected.fresh = fresh ? generated_stream_fresh(CLASSES) : 0;
    return &expected;
}

/* ---- Batches ---- */

/* Every type, the order of the trainer, one to three ranks, fresh images, and both generators. */
Test(lib_images, batches_are_those_of_the_generator)
{
    static const struct {
        const char *dtype, *layout, *generator;
        int fresh, shuffle, drop_last;
        uint32_t ranks, batch, prefetch;
        int threads;
    } trials[] = {{"u8", "nchw", "auto", 0, 1, 0, 1, 8, 2, 2},  {"u8", "nhwc", "naive", 1, 1, 0, 1, 8, 1, 1},
                  {"f32", "nchw", "omp", 1, 0, 0, 3, 5, 3, 2},  {"bf16", "nhwc", "auto", 1, 1, 1, 1, 7, 2, 3},
                  {"f16", "nchw", "auto", 0, 1, 0, 2, 8, 1, 1}, {"u8", "nchw", "auto", 1, 0, 0, 2, 8, 2, 2}};
    for (size_t t = 0; t < COUNT_OF(trials); t++) {
        struct fdsl_config images = images_config();
        images.dtype = trials[t].dtype;
        images.layout = trials[t].layout;
        images.generator = trials[t].generator;
        images.mean[1] = t == 2 ? 0.25 : 0;
        struct expected *expected = opened_expected(&images, trials[t].fresh);
        struct fdsl_source *source = opened_images(&images, trials[t].fresh);
        struct fdsl_stream_config config = stream_config();
        config.shuffle = trials[t].shuffle;
        config.drop_last = trials[t].drop_last;
        config.batch_size = trials[t].batch;
        config.world_size = trials[t].ranks;
        config.prefetch = trials[t].prefetch;
        config.num_threads = trials[t].threads;
        for (; config.rank < config.world_size; config.rank++) {
            struct fdsl_stream *stream = opened_stream(source, &config);
            struct fdsl_batch *batch;
            const struct fdsl_stream_info info = info_of(stream);
            cr_expect_eq(info.image_bytes, expected->image_bytes);
            for (uint64_t step = 0; step < 3 * info.steps; step++) {
                batch = taken(stream);
                expect_batch(expected, &config, batch);
                good(fdsl_batch_release(batch, NULL));
                if ((step + 1) % info.steps == 0)
                    cr_assert_eq(fdsl_stream_next(stream, NULL, &batch), FDSL_END);
            }
            fdsl_stream_close(stream);
        }
        fdsl_source_close(source);
        fdsl_close(expected->generator);
    }
}

/* The steps of `train --data synth --feed live --fresh` on two ranks. */
static void compare_with_trainer(const char *formula)
{
    const struct data_request request = {.name = "synth",
                                         .formula = formula,
                                         .train_size = SAMPLES,
                                         .test_size = 1,
                                         .classes = CLASSES,
                                         .res = 32,
                                         .batch = 2 * BATCH,
                                         .feed = DATA_LIVE,
                                         .fresh = true,
                                         .resources = {.threads = 2}};
    struct data data;
    struct model model = {.classes = CLASSES};
    must(data_open(&request, &data));
    struct fdsl_config images = images_config();
    images.formula = formula ? formula : "auto";
    images.out_res = 0;
    images.channels = 1;
    struct fdsl_source *source = opened_images(&images, 1);
    struct fdsl_stream_config config = stream_config();
    config.world_size = 2;
    for (; config.rank < 2; config.rank++) {
        const struct train train = {
            .model = &model, .data = &data, .seed = 9, .batch = 2 * BATCH, .rank = config.rank, .ranks = 2};
        struct feed_stream feed;
        struct fdsl_stream *stream = opened_stream(source, &config);
        must(feed_stream_open(&train, 2, 1, DECODER_CPU, NULL, NULL, &feed));
        for (uint32_t step = 0; step < 8; step++) {
            const struct draw_order order = train_order(&train, step / 4);
            uint32_t numbers[2 * BATCH];
            struct stream_batch wanted;
            struct fdsl_batch *batch = taken(stream);
            const uint32_t count = train_batch(&train, &order, step % 4, numbers);
            must(feed_stream_next(&feed, step / 4, step % 4, numbers, count, &wanted));
            const int64_t *labels = tensor_of(batch, FDSL_LABELS).data;
            cr_assert_eq(tensor_of(batch, FDSL_IMAGES).shape[0], count);
            cr_expect_eq(
                memcmp(tensor_of(batch, FDSL_IMAGES).data, wanted.samples.values, wanted.samples.bytes), 0,
                "%s, step %u", images.formula, step);
            for (uint32_t j = 0; j < count; j++)
                cr_expect_eq(labels[j], wanted.labels[j]);
            must(stream_release(feed.stream, &wanted, NULL));
            good(fdsl_batch_release(batch, NULL));
            if (step % 4 == 3)
                cr_assert_eq(fdsl_stream_next(stream, NULL, &batch), FDSL_END);
        }
        feed_stream_close(&feed);
        fdsl_stream_close(stream);
    }
    fdsl_source_close(source);
    data_close(&data);
}

Test(lib_images, batches_are_those_of_the_trainer)
{
    static const char *const formulas[] = {NULL, "visualatom", "rcdb"};
    for (size_t i = 0; i < COUNT_OF(formulas); i++)
        compare_with_trainer(formulas[i]);
}

Test(lib_images, fill_and_describe)
{
    const struct fdsl_config images = images_config();
    struct expected *expected = opened_expected(&images, 1);
    struct fdsl_source *source = opened_images(&images, 1);
    struct fdsl_stream_config config = stream_config();
    struct fdsl_source_info from = {.size = sizeof from};
    good(fdsl_source_describe(source, &from));
    cr_expect(from.samples == SAMPLES && from.classes == 0 && from.files == 0 && !from.shards && from.hash);
    cr_expect_null(fdsl_source_class(source, 0));
    struct fdsl_stream *stream = opened_stream(source, &config);
    fdsl_source_close(source);
    static uint8_t memory[BATCH * 24 * 24 * 3];
    int64_t labels[BATCH];
    uint32_t count;
    for (uint32_t step = 0; step < STEPS; step++) {
        good(fdsl_stream_fill(stream, memory, labels, &count, NULL));
        cr_assert_eq(count, step < 6 ? BATCH : 2);
        generate_expected(expected, &config, 0, step * BATCH, count);
        cr_expect_eq(memcmp(memory, expected->images, count * expected->image_bytes), 0);
        cr_expect_eq(memcmp(labels, expected->labels, count * sizeof *labels), 0);
    }
    cr_expect_eq(fdsl_stream_fill(stream, memory, labels, &count, NULL), FDSL_END);
    struct fdsl_stream_stats stats = {.size = sizeof stats};
    good(fdsl_stream_stats(stream, &stats));
    cr_expect(stats.batches == STEPS && stats.samples == SAMPLES && stats.memory_bytes > sizeof memory);
    fdsl_stream_close(stream);
    fdsl_close(expected->generator);
}

/* ---- Masks ---- */

enum { MASK_SIDE = 31, MASK_BYTES = MASK_SIDE * MASK_SIDE };

static struct fdsl_config masks_config(void)
{
    struct fdsl_config config = images_config();
    config.formula = "segrcdb";
    config.res = 64;
    config.out_res = MASK_SIDE;
    return config;
}

/* Compares images and masks with those of the generator. */
static void expect_masks(struct expected *expected, const struct fdsl_stream_config *config, uint64_t epoch,
                         uint32_t first, uint32_t count, const void *images, const uint8_t *masks)
{
    static uint8_t wanted[BATCH * 3 * MASK_BYTES], wanted_masks[BATCH * MASK_BYTES];
    const struct fdsl_targets targets = {.size = sizeof targets, .masks = wanted_masks};
    const struct draw_order order = draw_order(config->seed, (uint32_t)epoch, SAMPLES);
    uint64_t numbers[BATCH];
    size_t shown = 0;
    for (uint32_t i = 0; i < count; i++)
        numbers[i] =
            (config->shuffle ? draw_order_at(&order, first + i) : first + i) + epoch * expected->fresh;
    good(fdsl_generate_targets(expected->generator, numbers, 0, count, wanted, &targets, NULL));
    cr_expect_eq(memcmp(images, wanted, count * expected->image_bytes), 0, "image %u", first);
    cr_expect_eq(memcmp(masks, wanted_masks, count * MASK_BYTES), 0, "mask %u", first);
    for (size_t i = 0; i < count * MASK_BYTES; i++)
        shown += wanted_masks[i] != 0;
    cr_expect_gt(shown, 0);
}

/* next() and fill(), shuffled or not, the same and fresh images, with one and with two ranks. */
Test(lib_images, batches_have_the_masks_of_the_generator)
{
    static uint8_t images[BATCH * 3 * MASK_BYTES], masks[BATCH * MASK_BYTES];
    for (int trial = 0; trial < 4; trial++) {
        const struct fdsl_config from = masks_config();
        struct expected *expected = opened_expected(&from, trial % 2);
        expected->fresh = trial % 2 ? generated_stream_fresh(1) : 0;
        struct fdsl_source *source = opened_images(&from, trial % 2);
        struct fdsl_stream_config config = stream_config();
        config.shuffle = trial / 2;
        config.batch_size = trial < 2 ? BATCH : BATCH / 2;
        config.world_size = trial < 2 ? 1 : 2;
        config.rank = config.world_size - 1;
        struct fdsl_stream *next = opened_stream(source, &config), *fill = opened_stream(source, &config);
        cr_expect_eq(info_of(next).mask_bytes, MASK_BYTES);
        for (uint32_t step = 0; step < STEPS + 2; step++) {
            const uint64_t epoch = step / STEPS;
            const uint32_t in_epoch = step % STEPS, all = in_epoch + 1 == STEPS ? 2 : BATCH;
            struct fdsl_batch *batch = taken(next);
            uint32_t count, mine = all / config.world_size;
            const uint32_t first = in_epoch * BATCH + config.rank * mine;
            const struct fdsl_tensor tensor = tensor_of(batch, FDSL_MASKS);
            cr_expect(tensor.ndim == 3 && tensor.code == 1 && tensor.bits == 8 && tensor.device_type == 1 &&
                      (uintptr_t)tensor.data % 256 == 0);
            cr_expect(tensor.shape[0] == mine && tensor.shape[1] == MASK_SIDE &&
                      tensor.shape[2] == MASK_SIDE);
            cr_expect(tensor.strides[0] == MASK_BYTES && tensor.strides[1] == MASK_SIDE &&
                      tensor.strides[2] == 1);
            expect_masks(expected, &config, epoch, first, mine, tensor_of(batch, FDSL_IMAGES).data,
                         tensor.data);
            good(fdsl_batch_release(batch, NULL));
            good(fdsl_stream_fill_masks(fill, images, masks, &count, NULL));
            cr_assert_eq(count, mine);
            expect_masks(expected, &config, epoch, first, mine, images, masks);
            if (in_epoch + 1 == STEPS) {
                cr_assert_eq(fdsl_stream_next(next, NULL, &batch), FDSL_END);
                cr_assert_eq(fdsl_stream_fill_masks(fill, images, masks, &count, NULL), FDSL_END);
            }
        }
        /* A state, and images without their masks. */
        struct fdsl_state state = {.size = sizeof state};
        uint32_t count;
        good(fdsl_stream_save(fill, &state));
        cr_expect(state.epoch == 1 && state.sample == 2 * BATCH);
        good(fdsl_stream_seek(fill, 0, 0));
        good(fdsl_stream_load(fill, &state));
        memset(masks, 0xaa, sizeof masks);
        good(fdsl_stream_fill(fill, images, NULL, &count, NULL));
        for (size_t i = 0; i < sizeof masks; i++)
            cr_assert_eq(masks[i], 0xaa);
        good(fdsl_stream_load(fill, &state));
        good(fdsl_stream_fill_masks(fill, images, masks, &count, NULL));
        expect_masks(expected, &config, 1, 2 * BATCH + config.rank * count, count, images, masks);
        fdsl_stream_close(next);
        fdsl_stream_close(fill);
        fdsl_source_close(source);
        fdsl_close(expected->generator);
    }
}

/* ---- Positions and lifetimes ---- */

Test(lib_images, a_state_moves_to_other_ranks)
{
    const struct fdsl_config images = images_config();
    struct expected *expected = opened_expected(&images, 0);
    struct fdsl_source *source = opened_images(&images, 0);
    struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &config);
    for (int step = 0; step < 3; step++)
        good(fdsl_batch_release(taken(stream), NULL));
    struct fdsl_state state = {.size = sizeof state};
    good(fdsl_stream_save(stream, &state));
    cr_expect(state.sample == 3 * BATCH && state.lanes == 0 && state.shuffle_buffer == SAMPLES);
    fdsl_stream_close(stream);
    config.batch_size = BATCH / 2;
    config.world_size = 2;
    for (; config.rank < 2; config.rank++) {
        stream = opened_stream(source, &config);
        good(fdsl_stream_load(stream, &state));
        struct fdsl_batch *batch = taken(stream);
        expect_batch(expected, &config, batch);
        struct fdsl_batch_info info = {.size = sizeof info};
        good(fdsl_batch_describe(batch, &info));
        cr_expect(info.epoch == 0 && info.step == 3);
        good(fdsl_batch_release(batch, NULL));
        fdsl_stream_close(stream);
    }
    fdsl_source_close(source);
    fdsl_close(expected->generator);
}

/* Expects that a state does not belong to the stream of a source. */
static void expect_other(struct fdsl_source *source, const struct fdsl_stream_config *config,
                         const struct fdsl_state *state, const char *words)
{
    struct fdsl_stream *stream = opened_stream(source, config);
    cr_expect_eq(fdsl_stream_load(stream, state), FDSL_INVALID, "%s", words);
    cr_expect(strstr(fdsl_error(), words), "%s: %s", words, fdsl_error());
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

Test(lib_images, states_of_other_images_are_refused)
{
    struct fdsl_config images = images_config();
    struct fdsl_source *source = opened_images(&images, 0), *other;
    struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_state state = {.size = sizeof state};
    good(fdsl_stream_save(stream, &state));
    fdsl_stream_close(stream);
    expect_other(opened_images(&images, 1), &config, &state, "another data set");
    images.seed = 1;
    expect_other(opened_images(&images, 0), &config, &state, "another data set");
    images = images_config();
    images.classes++;
    expect_other(opened_images(&images, 0), &config, &state, "another data set");
    images = images_config();
    good(fdsl_images_open(&images, SAMPLES - 1, 0, &other));
    expect_other(other, &config, &state, "number of samples");
    images.fit = "crop";
    expect_other(opened_images(&images, 0), &config, &state, "another transform");
    images = images_config();
    images.dtype = "f32";
    expect_other(opened_images(&images, 0), &config, &state, "another transform");
    images = images_config();
    images.formula = "visualatom";
    expect_other(opened_images(&images, 0), &config, &state, "another data set");
    images = images_config();
    config.shuffle = 0;
    expect_other(opened_images(&images, 0), &config, &state, "shuffle_buffer");
    fdsl_source_close(source);
}

Test(lib_images, batches_outlive_seeks_and_streams)
{
    const struct fdsl_config images = images_config();
    struct expected *expected = opened_expected(&images, 1);
    struct fdsl_source *source = opened_images(&images, 1);
    struct fdsl_stream_config config = stream_config();
    config.held = 3;
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_batch *batches[5], *none;
    batches[0] = taken(stream);
    for (uint64_t step = 1; step < 5; step++) {
        good(fdsl_stream_seek(stream, 4, step));
        batches[step] = taken(stream);
    }
    cr_expect_eq(fdsl_stream_next(stream, NULL, &none), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "release one"), "%s", fdsl_error());
    good(fdsl_batch_release(batches[2], NULL));
    batches[2] = taken(stream);
    fdsl_stream_close(stream);
    fdsl_source_close(source);
    for (int i = 0; i < 5; i++) {
        expect_batch(expected, &config, batches[i]);
        good(fdsl_batch_release(batches[i], NULL));
    }
    fdsl_close(expected->generator);
}

static void *cancel_later(void *context)
{
    usleep(20000);
    fdsl_stream_cancel(context);
    return NULL;
}

Test(lib_images, cancel_and_wait)
{
    const struct fdsl_config images = images_config();
    struct fdsl_source *source = opened_images(&images, 1);
    const struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &config);
    static uint8_t memory[BATCH * 24 * 24 * 3];
    uint32_t count;
    pthread_t thread;
    enum fdsl_status result = FDSL_PENDING;
    while (result == FDSL_PENDING)
        result = fdsl_stream_wait(stream, 0.001);
    good(result);
    cr_assert_eq(pthread_create(&thread, NULL, cancel_later, stream), 0);
    while ((result = fdsl_stream_fill(stream, memory, NULL, &count, NULL)) == FDSL_OK || result == FDSL_END)
        ;
    pthread_join(thread, NULL);
    cr_expect_eq(result, FDSL_FAILED);
    cr_expect(strstr(fdsl_error(), "cancelled"), "%s", fdsl_error());
    good(fdsl_stream_wait(stream, 0));
    good(fdsl_stream_seek(stream, 0, 1));
    good(fdsl_stream_fill(stream, memory, NULL, &count, NULL));
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

Test(lib_images, a_forked_child_needs_a_stream_of_its_own)
{
    const struct fdsl_config images = images_config();
    struct fdsl_source *source = opened_images(&images, 0);
    const struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_batch *batch = taken(stream), *other;
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        struct fdsl_source *own_source;
        struct fdsl_stream *own;
        int wrong = fdsl_stream_next(stream, NULL, &other) != FDSL_FAILED || !strstr(fdsl_error(), "fork()");
        wrong |= fdsl_stream_open(source, &config, &own) != FDSL_FAILED ? 2 : 0;
        wrong |= fdsl_images_open(&images, SAMPLES, 0, &own_source) != FDSL_OK ? 4 : 0;
        wrong |= fdsl_stream_open(own_source, &config, &own) != FDSL_OK ? 8 : 0;
        wrong |= fdsl_stream_next(own, NULL, &other) != FDSL_OK ? 16 : 0;
        _exit(wrong);
    }
    int result;
    cr_assert_eq(waitpid(child, &result, 0), child);
    cr_expect(WIFEXITED(result) && WEXITSTATUS(result) == 0, "%x", result);
    good(fdsl_batch_release(batch, NULL));
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* ---- Errors ---- */

static void expect_error(enum fdsl_status result, enum fdsl_status expected, const char *name)
{
    cr_expect_eq(result, expected, "%s: %d, %s", name, result, fdsl_error());
    cr_expect_eq(strncmp(fdsl_error(), name, strlen(name)), 0, "%s: %s", name, fdsl_error());
}

/* A stream has either labels or masks. */
Test(lib_images, parts_that_a_stream_lacks_are_refused)
{
    static uint8_t images[BATCH * 3 * 32 * 32], masks[BATCH * MASK_BYTES];
    int64_t labels[BATCH];
    uint32_t count;
    struct fdsl_tensor tensor;
    for (int masked = 0; masked < 2; masked++) {
        const struct fdsl_config from = masked ? masks_config() : images_config();
        struct fdsl_source *source = opened_images(&from, 0);
        const struct fdsl_stream_config config = stream_config();
        struct fdsl_stream *stream = opened_stream(source, &config);
        struct fdsl_batch *batch = taken(stream);
        expect_error(fdsl_batch_tensor(batch, masked ? FDSL_LABELS : FDSL_MASKS, &tensor), FDSL_INVALID,
                     masked ? "field: the images have masks instead of labels"
                            : "field: the stream has no masks");
        if (masked)
            expect_error(fdsl_stream_fill(stream, images, labels, &count, NULL), FDSL_INVALID,
                         "labels: the images have masks");
        else
            expect_error(fdsl_stream_fill_masks(stream, images, masks, &count, NULL), FDSL_INVALID,
                         "masks: the stream has no masks");
        expect_error(fdsl_stream_fill_masks(stream, images, NULL, &count, NULL), FDSL_INVALID,
                     "masks: it is NULL");
        expect_error(fdsl_stream_fill_masks(stream, NULL, masks, &count, NULL), FDSL_INVALID, "images: ");
        expect_error(fdsl_stream_fill_masks(NULL, images, masks, &count, NULL), FDSL_INVALID, "stream: ");
        good(fdsl_batch_release(batch, NULL));
        fdsl_stream_close(stream);
        fdsl_source_close(source);
    }
}

/* ---- Masks of data sets ---- */

static struct fdsl_source *opened_set(const char *name, const char *label)
{
    struct fdsl_source_config config;
    struct fdsl_source *source;
    char path[PATH_MAX];
    good(fdsl_source_config_init(&config, sizeof config));
    snprintf(path, sizeof path, "%s/%s", folder, name);
    config.path = path;
    config.label = label;
    good(fdsl_source_open(&config, &source));
    return source;
}

/* A prepared set in each layout, and copies of it, have the images and masks of the generator: for next() and
 * fill(), from files and from memory, on two ranks. */
Test(lib_images, prepared_sets_have_the_masks_of_the_generator)
{
    enum { SIDE = MASK_SIDE, PREPARED = 21 };
    static const char *const sets[] = {"s", "i", "f", "si", "is", "ii", "bare"};
    static uint8_t images[PREPARED * MASK_BYTES], masks[PREPARED * MASK_BYTES], found[PREPARED * MASK_BYTES];
    EXPECT(
        0,
        "M='--from synth --preset segrcdb --classes 7 --res 64 --out-res %d --samples %d' && "
        "$P --prepare s $M --shards 2 && $P --prepare i $M --store imagefolder && $P --prepare f $M --store "
        "files && $P --prepare si --from dataset --source s --store imagefolder && $P --prepare is --from "
        "dataset --source i --shards 3 && $P --prepare ii --from dataset --source i --store imagefolder && "
        "diff -r i/image si/image && diff -r i/mask si/mask && diff -r i ii -x '*.index' -x samples.csv 2>&1 "
        "&& "
        "mkdir bare && cp -r i/image i/mask bare",
        SIDE, PREPARED);
    struct fdsl_config config = masks_config();
    config.batch = PREPARED;
    config.channels = 1;
    struct fdsl_generator *generator = opened(&config);
    const struct fdsl_targets targets = {.size = sizeof targets, .masks = masks};
    good(fdsl_generate_targets(generator, NULL, 0, PREPARED, images, &targets, NULL));
    fdsl_close(generator);
    for (size_t s = 0; s < COUNT_OF(sets); s++) {
        struct fdsl_source *source = opened_set(sets[s], NULL);
        struct fdsl_stream_config how = stream_config();
        how.channels = s % 2; /* 0: as the images have them */
        how.world_size = 2;
        how.rank = s % 2;
        how.resident_bytes = s % 3 ? 1 << 16 : 0;
        struct fdsl_stream *stream = opened_stream(source, &how), *fill = opened_stream(source, &how);
        cr_assert_eq(info_of(stream).mask_bytes, MASK_BYTES);
        for (uint64_t i = 0; i < 2 * info_of(stream).steps; i++) {
            struct fdsl_batch *batch;
            uint32_t count;
            enum fdsl_status result = fdsl_stream_next(stream, NULL, &batch);
            if (result == FDSL_END)
                good(fdsl_stream_next(stream, NULL, &batch));
            result = fdsl_stream_fill_masks(fill, found, found + BATCH * MASK_BYTES, &count, NULL);
            if (result == FDSL_END)
                good(fdsl_stream_fill_masks(fill, found, found + BATCH * MASK_BYTES, &count, NULL));
            const struct fdsl_tensor shown = tensor_of(batch, FDSL_MASKS);
            const uint8_t *image = tensor_of(batch, FDSL_IMAGES).data, *mask = shown.data;
            const int64_t *numbers = tensor_of(batch, FDSL_NUMBERS).data;
            cr_expect((uintptr_t)mask % 256 == 0 && shown.shape[0] == count && described(batch).masked == 0);
            for (uint32_t j = 0; j < count; j++) {
                const size_t at = j * MASK_BYTES, wanted = (size_t)numbers[j] * MASK_BYTES;
                cr_expect(!memcmp(image + at, images + wanted, MASK_BYTES) &&
                              !memcmp(mask + at, masks + wanted, MASK_BYTES) &&
                              !memcmp(found + at, images + wanted, MASK_BYTES) &&
                              !memcmp(found + BATCH * MASK_BYTES + at, masks + wanted, MASK_BYTES),
                          "%s: sample %d", sets[s], (int)numbers[j]);
            }
            good(fdsl_batch_release(batch, NULL));
        }
        fdsl_stream_close(stream);
        fdsl_stream_close(fill);
        fdsl_source_close(source);
    }
    /* Chosen labels are delivered instead. */
    struct fdsl_source *source = opened_set("s", "cls");
    struct fdsl_stream_config how = stream_config();
    struct fdsl_stream *stream;
    how.out_res = 8;
    how.channels = 0;
    expect_error(fdsl_stream_open(source, &how, &stream), FDSL_INVALID,
                 "channels: 0 is neither 1 nor 3, which out_res needs");
    how.channels = 3;
    stream = opened_stream(source, &how);
    struct fdsl_batch *batch = taken(stream);
    cr_expect_eq(info_of(stream).mask_bytes, 0);
    cr_expect_eq(((const int64_t *)tensor_of(batch, FDSL_LABELS).data)[0], 0);
    good(fdsl_batch_release(batch, NULL));
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

enum { RAMP_WIDTH = 64, RAMP_HEIGHT = 40 };

/* Writes a file of a sample whose red is 3 times the column, and whose green is 3 times the row: its image
 * (3 channels), or as a mask its red (even samples) or its green. */
static void put_ramp(uint32_t number, uint32_t channels, bool jpeg)
{
    uint8_t pixels[RAMP_WIDTH * RAMP_HEIGHT * 3];
    const struct png_shape shape = {RAMP_WIDTH, RAMP_HEIGHT, channels};
    char name[32];
    void *bytes;
    size_t size;
    for (uint32_t i = 0; i < RAMP_WIDTH * RAMP_HEIGHT; i++)
        for (uint32_t c = 0; c < channels; c++)
            pixels[i * channels + c] =
                (uint8_t)(c + (channels == 1 ? number : 0)) % 2 ? 3 * (i / RAMP_WIDTH) : 3 * (i % RAMP_WIDTH);
    must(source_encode(jpeg ? SOURCE_JPEG : SOURCE_PNG, 100, pixels, &shape, &bytes, &size));
    snprintf(name, sizeof name, "r/%02u.%s", number, channels == 1 ? "mask.png" : jpeg ? "jpg" : "png");
    put(name, bytes, size);
    free(bytes);
}

/* A mask shows the same part of its sample as the image: the two differ by less than what the filter of the
 * image makes of a pixel and its neighbours. Without resizing they are equal. */
Test(lib_images, masks_are_cut_and_mirrored_like_images)
{
    enum { RAMPS = 12, OUT = 24 };
    static const struct {
        const char *fit;
        uint32_t res;
        int tolerance;
    } fits[] = {{"resize", 0, 0},
                {"resize", OUT, 5},
                {"crop", OUT, 0},
                {"center-crop", OUT, 4},
                {"random-resized-crop", OUT, 5},
                {"random-resized-crop", 90, 4}};
    EXPECT(0, "mkdir r");
    for (uint32_t number = 0; number < RAMPS; number++) {
        put_ramp(number, 3, number % 3 == 2);
        put_ramp(number, 1, false);
    }
    EXPECT(0, "mkdir t && cd r && tar --sort=name -cf ../t/r.tar *");
    struct fdsl_source *source = opened_set("t", NULL);
    for (size_t f = 0; f < COUNT_OF(fits); f++)
        for (int flip = 0; flip < 4; flip++) {
            struct fdsl_stream_config config = stream_config();
            config.batch_size = RAMPS;
            config.fit = fits[f].fit;
            config.out_res = fits[f].res;
            config.flip = flip % 2;
            config.layout = flip < 2 ? "nchw" : "nhwc";
            struct fdsl_stream *stream = opened_stream(source, &config);
            const uint32_t width = fits[f].res ? fits[f].res : RAMP_WIDTH,
                           height = fits[f].res ? fits[f].res : RAMP_HEIGHT;
            int64_t mirrored = 0;
            for (int epoch = 0; epoch < 3; epoch++) {
                struct fdsl_batch *batch = taken(stream);
                const struct fdsl_tensor shown = tensor_of(batch, FDSL_MASKS);
                const uint8_t *image = tensor_of(batch, FDSL_IMAGES).data, *mask = shown.data;
                const int64_t *numbers = tensor_of(batch, FDSL_NUMBERS).data;
                cr_assert(shown.shape[1] == height && shown.shape[2] == width);
                for (uint32_t i = 0; i < RAMPS * height * width; i++) {
                    const uint32_t j = i / (height * width), pixel = i % (height * width), c = numbers[j] % 2;
                    const int value = image[flip < 2 ? (3 * j + c) * height * width + pixel : 3 * i + c];
                    const int most = fits[f].tolerance + (numbers[j] % 3 == 2 ? 8 : 0); /* JPEG loses some */
                    cr_assert(abs(value - mask[i]) <= most, "%s %u, sample %d, pixel %u: %d, %d", fits[f].fit,
                              fits[f].res, (int)numbers[j], pixel, value, mask[i]);
                    mirrored += pixel == 0 && c == 0 && mask[i] > mask[i + width - 1];
                }
                good(fdsl_batch_release(batch, NULL));
                cr_assert_eq(fdsl_stream_next(stream, NULL, &batch), FDSL_END);
            }
            cr_expect(flip % 2 ? mirrored > 3 && mirrored < 3 * RAMPS / 2 : mirrored == 0, "%d",
                      (int)mirrored);
            fdsl_stream_close(stream);
        }
    fdsl_source_close(source);
}

/* A mask with a palette has the classes of the gray mask with the same numbers, whatever its colours are. The
 * widths leave bits in the last byte of a row. */
Test(lib_images, palettes_are_masks)
{
    enum { MASKS = 9, OUT = 20 };
    EXPECT(
        0,
        "mkdir g c gs cs && python3 - <<'END'\n"
        "import struct, zlib\n"
        "def chunk(kind, data):\n"
        "    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))\n"
        "def png(path, rows, bits, kind):\n"
        "    data = b''\n"
        "    for row in rows:\n"
        "        text = ''.join(format(value, '0%%db' %% bits) for value in row)\n"
        "        text += '0' * (-len(text) %% 8)\n"
        "        data += bytes([0] + [int(text[i:i + 8], 2) for i in range(0, len(text), 8)])\n"
        "    head = struct.pack('>IIBBBBB', len(rows[0]), len(rows), bits, kind, 0, 0, 0)\n"
        "    colours = bytes((7 * i * i + 3) %% 256 for i in range(3 << bits)) if kind == 3 else b''\n"
        "    clear = chunk(b'tRNS', b'\\0\\x80') if kind == 3 else b''\n"
        "    with open(path, 'wb') as file:\n"
        "        file.write(b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', head) +\n"
        "                   (chunk(b'PLTE', colours) + clear if kind == 3 else b'') +\n"
        "                   chunk(b'IDAT', zlib.compress(data)) + chunk(b'IEND', b''))\n"
        "for i in range(%d):\n"
        "    bits, width, height = (1, 2, 4, 8)[i %% 4], 29 + 2 * i, 31 + i\n"
        "    classes = [[(x * 3 + y * 5 + i) %% (1 << bits) for x in range(width)] for y in range(height)]\n"
        "    image = [[(x + y) %% 256 for x in range(width)] for y in range(height)]\n"
        "    for place, of, kind in (('g', 8, 0), ('c', bits, 3)):\n"
        "        png('%%s/%%02d.png' %% (place, i), image, 8, 0)\n"
        "        png('%%s/%%02d.mask.png' %% (place, i), classes, of, kind)\n"
        "END\n"
        "for d in g c; do (cd $d && tar --sort=name -cf ../${d}s/x.tar *); done",
        MASKS);
    static const char *const sets[] = {"g", "c", "gs", "cs"};
    static uint8_t wanted[MASKS * OUT * OUT];
    for (size_t s = 0; s < COUNT_OF(sets); s++) {
        struct fdsl_source *source = opened_set(sets[s], NULL);
        struct fdsl_stream_config config = stream_config();
        config.batch_size = MASKS;
        config.fit = "random-resized-crop";
        config.out_res = OUT;
        config.flip = 1;
        struct fdsl_stream *stream = opened_stream(source, &config);
        struct fdsl_batch *batch = taken(stream);
        const struct fdsl_tensor masks = tensor_of(batch, FDSL_MASKS);
        cr_assert(described(batch).masked == 0 && masks.shape[0] == MASKS);
        if (s == 0)
            memcpy(wanted, masks.data, sizeof wanted);
        cr_expect_arr_eq(masks.data, wanted, sizeof wanted, "%s", sets[s]);
        good(fdsl_batch_release(batch, NULL));
        fdsl_stream_close(stream);
        fdsl_source_close(source);
    }
}

/* Each fault is one error that names the sample and the reason, or a sample whose image is 0 and whose mask
 * is 255. */
Test(lib_images, broken_masks_are_errors_or_masked)
{
    static const struct {
        const char *command, *words;
    } faults[] = {
        {"rm 05.mask.png", "it has no mask ('mask.png'), unlike other samples of the data set"},
        {"truncate -s 60 05.mask.png", "its mask: libpng: "},
        {": >05.mask.png", "its mask: "},
        {"cp 05.jpg 05.mask.png", "its mask: libpng: "},
        {"cp 04.png 05.mask.png", "its mask has 8 bits per value and PNG colour type 2, but a mask is 8-bit"},
        {"png 64 40 1 0 9", "its mask has 1 bits per value and PNG colour type 0"},
        {"png 64 40 16 0 129", "its mask has 16 bits per value"},
        {"png 40 64 8 0 41", "its mask has 40 x 64 pixels, but its image has 64 x 40"},
    };
    static const char png[] =
        "png() { python3 -c 'import struct,sys,zlib; w,h,b,t,n = map(int,sys.argv[1:]); c = lambda k,d: "
        "struct.pack(\">I\",len(d))+k+d+struct.pack(\">I\",zlib.crc32(k+d)); open(\"05.mask.png\",\"wb\")."
        "write(b\"\\x89PNG\\r\\n\\x1a\\n\"+c(b\"IHDR\",struct.pack(\">IIBBBBB\",w,h,b,t,0,0,0))+c(b\"IDAT\","
        "zlib.compress(bytes(n*h)))+c(b\"IEND\",b\"\"))' \"$@\"; }";
    EXPECT(0, "mkdir r");
    for (uint32_t number = 0; number < 8; number++) {
        put_ramp(number, 3, number == 5);
        put_ramp(number, 1, false);
    }
    for (size_t f = 0; f < COUNT_OF(faults); f++)
        for (int mask = 0; mask < 2; mask++) {
            EXPECT(0, "rm -rf x t; cp -r r x; mkdir t; %s; cd x && %s && tar --sort=name -cf ../t/r.tar *",
                   png, faults[f].command);
            struct fdsl_source *source = opened_set("t", NULL);
            struct fdsl_stream_config config = stream_config();
            struct fdsl_stream *stream;
            struct fdsl_batch *batch = NULL;
            config.out_res = 16;
            config.on_error = mask ? "mask" : "fail";
            enum fdsl_status result = fdsl_stream_open(source, &config, &stream);
            if (result == FDSL_OK)
                result = fdsl_stream_next(stream, NULL, &batch);
            const char *said = mask ? fdsl_warnings() : fdsl_error();
            cr_expect(strstr(said, faults[f].words) && strstr(said, "05"), "%s: %s", faults[f].command, said);
            cr_assert_eq(result == FDSL_OK, mask, "%s: %s", faults[f].command, fdsl_error());
            for (uint32_t j = 0; mask && j < 8; j++) {
                const uint8_t *image = (const uint8_t *)tensor_of(batch, FDSL_IMAGES).data + j * 3 * 256;
                const uint8_t *shown = (const uint8_t *)tensor_of(batch, FDSL_MASKS).data + j * 256;
                const bool broken = ((const int64_t *)tensor_of(batch, FDSL_NUMBERS).data)[j] == 5;
                cr_expect_eq(described(batch).masked, 1);
                for (int i = 0; i < 256; i++)
                    cr_assert((shown[i] == 255) == broken && (!broken || image[i] == 0));
            }
            if (batch)
                good(fdsl_batch_release(batch, NULL));
            fdsl_stream_close(stream);
            fdsl_source_close(source);
        }
    /* An index has the hash of a mask. */
    EXPECT(0, "rm -rf t; mkdir t; cd r && tar --sort=name -cf ../t/r.tar * && cd .. && $P --prepare q --from "
              "dataset --source t --store imagefolder && printf X | dd of=q/mask/000002.png bs=1 seek=70 "
              "conv=notrunc 2>/dev/null");
    struct fdsl_source *source = opened_set("q", NULL);
    const struct fdsl_stream_config config = stream_config();
    struct fdsl_batch *batch;
    struct fdsl_stream *stream = opened_stream(source, &config);
    expect_error(fdsl_stream_next(stream, NULL, &batch), FDSL_FAILED, "");
    cr_expect(strstr(fdsl_error(), "its mask does not match the hash in the index"), "%s", fdsl_error());
    fdsl_stream_close(stream);
    /* Changes that masks cannot follow. */
    for (int field = 0; field < 3; field++) {
        static const char *const names[] = {"rand_augment: ", "mixup: ", "cutmix: "};
        struct fdsl_stream_config with = stream_config();
        with.rand_augment = field == 0 ? 9 : -1;
        with.mixup = field == 1;
        with.cutmix = field == 2;
        expect_error(fdsl_stream_open(source, &with, &stream), FDSL_INVALID, names[field]);
        cr_expect(strstr(fdsl_error(), "not their masks"), "%s", fdsl_error());
    }
    fdsl_source_close(source);
}

/* fdsl_images_begin() opens what fdsl_images_open() opens; errors come from fdsl_source_wait(). Closing the
 * source ends the first use of a published set, which takes most of a minute, and of long lists of classes.
 */
Test(lib_images, images_can_be_opened_in_a_thread)
{
    struct fdsl_config images = images_config();
    struct fdsl_source *source, *plain = opened_images(&images, 1);
    struct fdsl_source_info info = {.size = sizeof info}, wanted = {.size = sizeof wanted};
    good(fdsl_images_begin(&images, SAMPLES, 1, &source));
    good(fdsl_source_wait(source, 100));
    good(fdsl_source_describe(source, &info));
    good(fdsl_source_describe(plain, &wanted));
    cr_expect(info.hash == wanted.hash && info.samples == SAMPLES);
    fdsl_source_close(source);
    fdsl_source_close(plain);
    good(fdsl_images_begin(&images, SAMPLES, 2, &source));
    cr_expect_eq(fdsl_source_wait(source, 100), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "fresh: 2 is neither 0 nor 1"), "%s", fdsl_error());
    fdsl_source_close(source);
    expect_error(fdsl_images_begin(NULL, SAMPLES, 1, &source), FDSL_INVALID, "config: it is NULL");
    setenv("XDG_CACHE_HOME", folder, 1);
    good(fdsl_config_init(&images, sizeof images));
    static const char *const presets[] = {"visualatom-script-1k", "ofdb-21k", "mv-fractaldb-1k"};
    for (size_t i = 0; i < COUNT_OF(presets); i++) {
        images.preset = presets[i];
        images.random = i == 0 ? "published" : "philox";
        good(fdsl_images_begin(&images, SAMPLES, 0, &source));
        cr_expect_eq(fdsl_source_wait(source, i == 0 ? 0.5 : 0.02), FDSL_PENDING);
        const double begin_s = timer_now_s();
        fdsl_source_close(source);
        cr_expect(timer_now_s() - begin_s < 10, "%s", presets[i]);
        EXPECT(0, "! test -d fdsl-bench");
    }
}

Test(lib_images, arguments_of_images_are_checked)
{
    const struct fdsl_class class_ = {
        .id = UINT32_C(1) << 31, .vertices = 8, .orbits = 2, .oval_x = 1, .oval_y = 1};
    struct fdsl_config config = images_config();
    struct fdsl_source *source;
    expect_error(fdsl_images_open(&config, 0, 0, &source), FDSL_INVALID, "count: ");
    expect_error(fdsl_images_open(&config, UINT64_C(1) << 31, 0, &source), FDSL_INVALID, "count: ");
    expect_error(fdsl_images_open(&config, 1, 2, &source), FDSL_INVALID, "fresh: ");
    expect_error(fdsl_images_open(NULL, 1, 0, &source), FDSL_INVALID, "config: ");
    expect_error(fdsl_images_open(&config, 1, 0, NULL), FDSL_INVALID, "source: ");
    config.device = 0;
    expect_error(fdsl_images_open(&config, 1, 0, &source), FDSL_INVALID, "device: ");
    config = images_config();
    config.threads = 2;
    expect_error(fdsl_images_open(&config, 1, 0, &source), FDSL_INVALID, "threads: ");
    config = images_config();
    config.generator = "omq";
    expect_error(fdsl_images_open(&config, 1, 0, &source), FDSL_INVALID, "generator: ");
    config = images_config();
    config.classes = 1048577;
    expect_error(fdsl_images_open(&config, 1, 0, &source), FDSL_INVALID, "classes: ");
    config = images_config();
    config.class_list = &class_;
    config.class_count = 1;
    expect_error(fdsl_images_open(&config, 1, 0, &source), FDSL_INVALID, "class_list: ");
    config = images_config();
    config.size--;
    expect_error(fdsl_images_open(&config, 1, 0, &source), FDSL_INVALID, "config->size: ");
    cr_expect_null(source);
}

#define REFUSED(field, value, status, name)                                    \
    do {                                                                       \
        struct fdsl_stream_config wrong = stream_config();                     \
        wrong.field = value;                                                   \
        struct fdsl_stream *stream = (struct fdsl_stream *)source;             \
        expect_error(fdsl_stream_open(source, &wrong, &stream), status, name); \
        cr_expect_null(stream);                                                \
    } while (0)

Test(lib_images, fields_of_streams_are_checked)
{
    struct fdsl_config images = images_config();
    struct fdsl_source *source = opened_images(&images, 0);
    REFUSED(out_res, 24, FDSL_INVALID, "out_res: it has no effect on generated images");
    REFUSED(fit, "crop", FDSL_INVALID, "fit: it has no effect on generated images");
    REFUSED(fit, NULL, FDSL_INVALID, "fit: ");
    REFUSED(flip, 1, FDSL_INVALID, "flip: it has no effect on generated images");
    REFUSED(channels, 1, FDSL_INVALID, "channels: it has no effect on generated images");
    REFUSED(layout, "nhwc", FDSL_INVALID, "layout: it has no effect on generated images");
    REFUSED(dtype, "f32", FDSL_INVALID, "dtype: it has no effect on generated images");
    REFUSED(mean[2], 0.5, FDSL_INVALID, "mean: it has no effect on generated images");
    REFUSED(std[1], NAN, FDSL_INVALID, "std: it has no effect on generated images");
    REFUSED(batch_size, SAMPLES + UINT32_C(4000000000), FDSL_INVALID, "batch_size: ");
    REFUSED(num_threads, -1, FDSL_INVALID, "num_threads: ");
    REFUSED(device, -2, FDSL_INVALID, "device: ");
    REFUSED(decoder, "gpu", FDSL_INVALID, "decoder: ");
    REFUSED(decoder, NULL, FDSL_INVALID, "decoder: ");
    REFUSED(decoder, "hybrid", FDSL_INVALID, "decoder: ");
    REFUSED(device_share, 1.5, FDSL_INVALID, "device_share: ");
    REFUSED(device_share, NAN, FDSL_INVALID, "device_share: ");
    REFUSED(shuffle_buffer, 100, FDSL_INVALID, "shuffle_buffer: it has no effect on generated images");
    REFUSED(lanes, 1, FDSL_INVALID, "lanes: it has no effect on generated images");
    REFUSED(on_error, "mask", FDSL_INVALID, "on_error: it has no effect on generated images");
    REFUSED(shard_bytes, 1, FDSL_INVALID, "shard_bytes: it has no effect on generated images");
    REFUSED(resident_bytes, 1, FDSL_INVALID, "resident_bytes: it has no effect on generated images");
    REFUSED(rand_augment, 9, FDSL_INVALID, "rand_augment: it has no effect on generated images");
    REFUSED(rand_augment_ops, 3, FDSL_INVALID, "rand_augment_ops: it has no effect on generated images");
    REFUSED(rand_augment_policy, "rand-m9", FDSL_INVALID,
            "rand_augment_policy: it has no effect on generated images");
    REFUSED(erasing, 0.5, FDSL_INVALID, "erasing: it has no effect on generated images");
    REFUSED(brightness[1], 2, FDSL_INVALID, "brightness: it has no effect on generated images");
    REFUSED(hue[0], -0.5, FDSL_INVALID, "hue: it has no effect on generated images");
    REFUSED(grayscale_p, 0.5, FDSL_INVALID, "grayscale_p: it has no effect on generated images");
    REFUSED(blur_p, 0.5, FDSL_INVALID, "blur_p: it has no effect on generated images");
    REFUSED(blur_kernel, 5, FDSL_INVALID, "blur_kernel: it has no effect on generated images");
    REFUSED(mixup, 0.5, FDSL_INVALID, "mixup: it has no effect on generated images");
    REFUSED(cutmix, 0.5, FDSL_INVALID, "cutmix: it has no effect on generated images");
    REFUSED(classes, 10, FDSL_INVALID, "classes: it has no effect on generated images");
    REFUSED(wait_s, -1, FDSL_INVALID, "wait_s: ");
    if (fdsl_cuda_devices() == 0)
        REFUSED(device, 0, FDSL_UNAVAILABLE, "device: ");
    fdsl_source_close(source);
    images.generator = "fused";
    source = opened_images(&images, 0);
    REFUSED(rank, 0, FDSL_INVALID, "generator: 'fused' works on CUDA devices");
    fdsl_source_close(source);
}

/* Batches in host memory take no CUDA stream. */
Test(lib_images, cuda_streams_are_refused_on_the_cpu)
{
    const struct fdsl_config images = images_config();
    struct fdsl_source *source = opened_images(&images, 0);
    const struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_batch *batch = taken(stream), *other;
    static uint8_t memory[BATCH * 24 * 24 * 3];
    uint32_t count;
    expect_error(fdsl_stream_next(stream, &count, &other), FDSL_INVALID, "cuda_stream: ");
    expect_error(fdsl_stream_fill(stream, memory, NULL, &count, &count), FDSL_INVALID, "cuda_stream: ");
    expect_error(fdsl_batch_release(batch, &count), FDSL_INVALID, "cuda_stream: ");
    good(fdsl_batch_release(batch, NULL));
    expect_error(fdsl_batch_release(batch, NULL), FDSL_INVALID, "batch: ");
    expect_error(fdsl_stream_next(stream, NULL, NULL), FDSL_INVALID, "batch: ");
    expect_error(fdsl_stream_next(NULL, NULL, &other), FDSL_INVALID, "stream: ");
    expect_error(fdsl_stream_fill(NULL, memory, NULL, &count, NULL), FDSL_INVALID, "stream: ");
    expect_error(fdsl_stream_fill(stream, NULL, NULL, &count, NULL), FDSL_INVALID, "images: ");
    expect_error(fdsl_stream_fill(stream, memory, NULL, NULL, NULL), FDSL_INVALID, "count: ");
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}
#endif
