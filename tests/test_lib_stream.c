/* Tests the sources and streams of libfdsl.so: their batches are those of the trainer, each sample occurs
 * once, states continue on other numbers of ranks, and every wrong argument is an error that names it. */
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "core/timer.h"
#include "must.h"
#include "train/augment.h"
#include "train/feed.h"

#include "lib_support.h" /* included last, because `out` and `status` would shadow names in other headers */

TestSuite(lib_stream, .timeout = 120, .init = shell_set_up, .fini = shell_tear_down);

#if defined HAVE_PNG && defined HAVE_XXHASH
enum { DIGITS = 120, SIDE = 20, ROOM = 64 * 3 * SIDE * SIDE };

/* Writes DIGITS digits as class folders (f) and as shards (m), in the same order. */
static void prepare(void)
{
    EXPECT(0,
           "$P --prepare all --from digits --samples %d --store imagefolder && mkdir f && cp -r all/*/ f && "
           "$P --prepare m --from dataset --source f --shards 3 --name s",
           DIGITS);
}

static char path[PATH_MAX];

static struct fdsl_source_config source_config(const char *name)
{
    struct fdsl_source_config config;
    good(fdsl_source_config_init(&config, sizeof config));
    snprintf(path, sizeof path, "%s/%s", folder, name);
    config.path = path;
    return config;
}

static struct fdsl_source *opened_source(const char *name)
{
    const struct fdsl_source_config config = source_config(name);
    struct fdsl_source *source;
    good(fdsl_source_open(&config, &source));
    return source;
}

static struct fdsl_stream_config stream_config(void)
{
    struct fdsl_stream_config config;
    good(fdsl_stream_config_init(&config, sizeof config));
    config.batch_size = 16;
    config.seed = 9;
    config.lanes = 3;
    config.shuffle_buffer = 60;
    config.out_res = SIDE;
    config.num_threads = 2;
    return config;
}

/* ---- The trainer's batches ---- */

static void open_data(const struct image_fit *fit, struct data *data)
{
    char folder_path[PATH_MAX];
    snprintf(folder_path, sizeof folder_path, "%s/f", folder);
    const struct data_request request = {.name = folder_path,
                                         .test_name = folder_path,
                                         .fit = *fit,
                                         .batch = 35,
                                         .feed = DATA_LOAD,
                                         .lanes = 3,
                                         .shuffle = 60,
                                         .ahead = 2,
                                         .resources = {.threads = 2}};
    static const double mean[DATA_CHANNELS_MAX] = {0.485, 0.456, 0.406};
    static const double deviation[DATA_CHANNELS_MAX] = {0.229, 0.224, 0.225};
    must(data_open(&request, data));
    data_normalise_by(data, mean, deviation);
}

/* What the trainer makes of the samples of a step. */
struct step {
    const struct train *train;
    const struct stream_batch *stored;
    const uint32_t *numbers;
    uint32_t epoch;
    struct augment_plan plan;
    struct augment_scratch scratch;
};

/* Computes the values of entry `j` of a step, not mixed. */
static void gather(struct step *step, uint32_t j, float *values)
{
    const struct train *train = step->train;
    const uint32_t number = step->numbers[j];
    const uint8_t *stored = (const uint8_t *)step->stored->samples.values + j * step->stored->samples.stride;
    uint8_t changed[3 * SIDE * SIDE];
    const bool changes = augment_computes(&train->augment);
    if (changes)
        augment_image(&step->plan, stored, step->epoch, number, &step->scratch, changed);
    data_gather(train->data, changes ? changed : stored,
                box_move(&train->augment, train->seed, step->epoch, number), values);
}

/* Compares the targets of image `j` with those of the trainer's loss. */
static void expect_targets(const struct stream_batch *stored, uint32_t count, uint32_t j, float share,
                           const float *targets)
{
    const uint32_t other = mix_partner(count, stored->samples.count, j);
    const struct target target = {(uint32_t)stored->samples.labels[j],
                                  (uint32_t)stored->samples.labels[other], share};
    for (uint32_t k = 0; k < 10; k++)
        cr_expect_eq(targets[k], target_of(&target, NULL, 0, 10, k), "image %u, class %u", j, k);
}

/* Compares a batch of floats with the samples of the trainer's step as the network sees them. */
static void expect_step(const struct train *train, struct feed_stream *feed, uint32_t epoch, uint32_t step,
                        struct fdsl_batch *batch)
{
    const struct draw_order order = train_order(train, epoch);
    uint32_t numbers[256];
    struct stream_batch wanted;
    const uint32_t count = train_batch(train, &order, step, numbers);
    must(feed_stream_next(feed, epoch, step, numbers, train_generated(train, count), &wanted));
    const struct fdsl_batch_info info = described(batch);
    cr_assert(info.count == count && info.epoch == epoch && info.step == step && info.masked == 0);
    cr_expect_eq(info.last, wanted.last);
    const int64_t *labels = tensor_of(batch, FDSL_LABELS).data, *listed = tensor_of(batch, FDSL_NUMBERS).data;
    const float *images = tensor_of(batch, FDSL_IMAGES).data;
    float values[3 * SIDE * SIDE], partner[3 * SIDE * SIDE];
    const struct mix mix = train_mix(train, epoch, step);
    struct step own = {.train = train, .stored = &wanted, .numbers = numbers, .epoch = epoch};
    must(augment_plan(train, &own.plan));
    must(augment_scratch_open(&own.plan, &own.scratch));
    for (uint32_t j = 0; j < count; j++) {
        cr_expect(listed[j] == numbers[j] && labels[j] == wanted.samples.labels[j], "step %u, image %u", step,
                  j);
        gather(&own, j, values);
        if (mix.share < 1) {
            gather(&own, mix_partner(count, wanted.samples.count, j), partner);
            mix_samples(&mix, &train->data->shape, partner, values);
        }
        if (train_mixes(train))
            expect_targets(&wanted, count, j, mix.share,
                           (const float *)tensor_of(batch, FDSL_TARGETS).data + 10 * j);
        cr_expect_eq(memcmp(images + j * COUNT_OF(values), values, sizeof values), 0, "step %u, image %u",
                     step, j);
    }
    augment_scratch_close(&own.scratch);
    must(stream_release(feed->stream, &wanted, NULL));
}

/* Sets the fields of a configuration for changes of colour. */
static void set_jitter(const struct jitter *jitter, struct fdsl_stream_config *config)
{
    double *const ranges[] = {config->brightness, config->contrast, config->saturation, config->hue};
    for (uint32_t step = 0; step < JITTER_STEPS; step++) {
        ranges[step][0] = (double)jitter->low[step];
        ranges[step][1] = (double)jitter->high[step];
    }
    config->color_jitter_p = (double)jitter->probability;
    config->grayscale_p = (double)jitter->grayscale;
    config->blur_p = (double)jitter->blur;
    config->blur_kernel = jitter->kernel;
    config->blur_sigma[0] = (double)jitter->sigma_min;
    config->blur_sigma[1] = (double)jitter->sigma_max;
}

#define POLICY "rand-m9-n3-mstd0.5-inc1"

/* Random crops, flips and normalised floats, on one to five ranks, over the end of an epoch; with `augment`,
 * also what it describes. */
static void expect_training(const struct augment *augment, struct mixing mixing)
{
    static const char *const names[] = {"f", "m"};
    const struct image_fit fit = {.how = FIT_RANDOM_RESIZED_CROP, .res = SIDE, .channels = 3};
    struct data data;
    struct model model = {.classes = 10, .input = {3, 1, SIDE, SIDE}};
    prepare();
    open_data(&fit, &data);
    struct fdsl_stream_config config = stream_config();
    config.fit = "random-resized-crop";
    config.flip = 1;
    config.dtype = "f32";
    memcpy(config.mean, (double[]){0.485, 0.456, 0.406}, sizeof config.mean);
    memcpy(config.std, (double[]){0.229, 0.224, 0.225}, sizeof config.std);
    config.rand_augment = augment->operations ? augment->magnitude : -1;
    config.rand_augment_ops = augment->operations ? augment->operations : 2;
    if (augment->policy.kind == AUGMENT_TIMM) {
        config.rand_augment = -1;
        config.rand_augment_policy = POLICY;
    }
    config.erasing = augment->erasing;
    config.mixup = mixing.mixup;
    config.cutmix = mixing.cutmix;
    if (jitter_on(&augment->color))
        set_jitter(&augment->color, &config);
    for (uint32_t ranks = 1; ranks <= 5; ranks += 4)
        for (uint32_t rank = 0; rank < ranks; rank++) {
            struct fdsl_source *source = opened_source(names[rank % 2]);
            struct feed_stream feed;
            const struct train train = {.model = &model,
                                        .data = &data,
                                        .seed = 9,
                                        .batch = 35,
                                        .rank = rank,
                                        .ranks = ranks,
                                        .augment = *augment,
                                        .mixing = mixing};
            config.batch_size = 35 / ranks;
            config.rank = rank;
            config.world_size = ranks;
            config.resident_bytes = rank % 3 == 2 ? UINT64_MAX : rank * 5000; /* changes no bit */
            struct fdsl_stream *stream = opened_stream(source, &config);
            fdsl_source_close(source); /* the stream keeps it open */
            must(feed_stream_open(&train, 2, 1, DECODER_CPU, NULL, NULL, &feed));
            for (uint32_t at = 0; at < 6; at++) {
                struct fdsl_batch *batch = taken(stream);
                expect_step(&train, &feed, at / 4, at % 4, batch);
                good(fdsl_batch_release(batch, NULL));
                if (at == 3)
                    cr_assert_eq(fdsl_stream_next(stream, NULL, &batch), FDSL_END);
            }
            feed_stream_close(&feed);
            fdsl_stream_close(stream);
        }
    data_close(&data);
}

Test(lib_stream, colours_and_blur_are_those_of_the_trainer)
{
    const struct augment augment = {.flip = true,
                                    .operations = 1,
                                    .magnitude = 20,
                                    .color = {.probability = 0.8f,
                                              .low = {0.6f, 0.6f, 0.6f, -0.1f},
                                              .high = {1.4f, 1.4f, 1.4f, 0.1f},
                                              .grayscale = 0.2f,
                                              .blur = 0.5f,
                                              .kernel = 7,
                                              .sigma_min = 0.1f,
                                              .sigma_max = 2}};
    expect_training(&augment, (struct mixing){0});
    EXPECT(0, "rm -rf all f m");
    expect_training(&augment, (struct mixing){0.8, 1});
}

Test(lib_stream, batches_are_those_of_the_trainer)
{
    expect_training(&(struct augment){.flip = true}, (struct mixing){0});
}

Test(lib_stream, randaugment_and_erasing_are_those_of_the_trainer)
{
    expect_training(
        &(struct augment){
            .flip = true, .operations = 3, .magnitude = 25, .erasing = 0.5f, .height = SIDE, .width = SIDE},
        (struct mixing){0});
}

/* Outside of an image is the mean, as timm fills. */
Test(lib_stream, policies_of_timm_are_those_of_the_trainer)
{
    struct rand_augment rand;
    must(rand_augment_parse("", POLICY, &rand));
    memcpy(rand.policy.fill, (uint8_t[]){124, 116, 104}, sizeof rand.policy.fill);
    expect_training(
        &(struct augment){
            .flip = true, .operations = rand.operations, .magnitude = rand.magnitude, .policy = rand.policy},
        (struct mixing){0});
}

Test(lib_stream, mixtures_are_those_of_the_trainer)
{
    const struct augment augment = {.flip = true, .erasing = 0.5f, .height = SIDE, .width = SIDE};
    expect_training(&augment, (struct mixing){0.8, 1});
    EXPECT(0, "rm -rf all f m");
    expect_training(&augment, (struct mixing){0, 1});
    EXPECT(0, "rm -rf all f m");
    expect_training(&augment, (struct mixing){0.8, 0});
}

/* ---- Mixtures in all types ---- */

static double element(enum dtype type, const void *values, size_t i)
{
    switch (type) {
    case DTYPE_U8:
        return ((const uint8_t *)values)[i];
    case DTYPE_F16:
        return half_to_float(((const uint16_t *)values)[i]);
    case DTYPE_BF16:
        return bf16_to_float(((const uint16_t *)values)[i]);
    default:
        return ((const float *)values)[i];
    }
}

/* The largest error of one rounding to the type, for values below 4. */
static double rounding(enum dtype type)
{
    return type == DTYPE_U8 ? 0.5001 : type == DTYPE_F16 ? 0x1p-10 : type == DTYPE_BF16 ? 0x1p-7 : 0x1p-22;
}

/* Compares a batch with the mixture of a batch that is not mixed: computed in double, to one rounding. */
static void expect_mixture(const struct mix *mix, enum dtype type, bool interleaved, struct fdsl_batch *is,
                           struct fdsl_batch *plain)
{
    const uint32_t count = described(is).count, values = 3 * SIDE * SIDE;
    const void *mixed = tensor_of(is, FDSL_IMAGES).data, *own = tensor_of(plain, FDSL_IMAGES).data;
    const int64_t *labels = tensor_of(plain, FDSL_LABELS).data;
    const struct fdsl_tensor targets = tensor_of(is, FDSL_TARGETS);
    cr_assert(targets.ndim == 2 && targets.shape[0] == count && targets.shape[1] == 10 && targets.code == 2 &&
              targets.bits == 32 && targets.strides[0] == 10 && targets.strides[1] == 1);
    for (uint32_t j = 0; j < count; j++) {
        const uint32_t other = count - 1 - j;
        for (uint32_t i = 0; i < values; i++) {
            const uint32_t pixel = interleaved ? i / 3 : i % (SIDE * SIDE), y = pixel / SIDE,
                           x = pixel % SIDE;
            const double first = element(type, own, (size_t)j * values + i);
            const double second = element(type, own, (size_t)other * values + i);
            const bool inside = y >= mix->top && y < mix->bottom && x >= mix->left && x < mix->right;
            const double wanted = !mix->cut ? mix->share * first + (1 - mix->share) * second
                                  : inside  ? second
                                            : first;
            cr_assert(fabs(element(type, mixed, (size_t)j * values + i) - wanted) <=
                          (mix->cut ? 0 : rounding(type)),
                      "type %d, image %u, value %u", (int)type, j, i);
        }
        for (int64_t k = 0; k < 10; k++) {
            const double wanted = mix->share * (labels[j] == k) + (1 - mix->share) * (labels[other] == k);
            cr_expect_float_eq(((const float *)targets.data)[j * 10 + k], wanted, 1e-6);
        }
    }
}

/* Every type and layout, with 1 and 3 threads. */
Test(lib_stream, mixtures_match_those_of_plain_batches)
{
    static const char *const dtypes[] = {"u8", "f16", "f32", "bf16"}, *const layouts[] = {"nchw", "nhwc"};
    static const enum dtype types[] = {DTYPE_U8, DTYPE_F16, DTYPE_F32, DTYPE_BF16};
    const struct shape shape = {3, 1, SIDE, SIDE};
    uint32_t mixed = 0, cut = 0;
    prepare();
    struct fdsl_source *source = opened_source("f");
    for (int way = 0; way < 16; way++) {
        struct fdsl_stream_config config = stream_config();
        config.dtype = dtypes[way % 4];
        config.layout = layouts[way / 4 % 2];
        config.num_threads = way < 8 ? 1 : 3;
        config.flip = 1;
        for (int c = 0; c < 3 && way % 4; c++)
            config.std[c] = 0.3;
        struct fdsl_stream *plain = opened_stream(source, &config);
        config.mixup = 0.8;
        config.cutmix = 1;
        struct fdsl_stream *stream = opened_stream(source, &config);
        for (uint32_t step = 0; step < 8; step++) {
            struct fdsl_batch *is = taken(stream), *from = taken(plain);
            const struct mix mix = mix_draw(&(struct mixing){0.8, 1}, 9, 0, step, &shape);
            expect_mixture(&mix, types[way % 4], way / 4 % 2, is, from);
            mixed += mix.share < 1 && !mix.cut;
            cut += mix.share < 1 && mix.cut;
            good(fdsl_batch_release(is, NULL));
            good(fdsl_batch_release(from, NULL));
        }
        fdsl_stream_close(stream);
        fdsl_stream_close(plain);
    }
    cr_expect(mixed >= 16 && cut >= 16, "%u and %u", mixed, cut);
    fdsl_source_close(source);
}

/* fill() delivers the same as next(), also on ranks that read partners, and counts no partners. */
Test(lib_stream, fill_delivers_mixtures_and_their_targets)
{
    static float images[16 * 3 * SIDE * SIDE], targets[16 * 10];
    static int64_t labels[16];
    prepare();
    struct fdsl_source *source = opened_source("f");
    for (uint32_t rank = 0; rank < 3; rank++) {
        struct fdsl_stream_config config = stream_config();
        config.dtype = "f32";
        config.mixup = 0.5;
        config.rank = rank;
        config.world_size = 3;
        struct fdsl_stream *next = opened_stream(source, &config), *fill = opened_stream(source, &config);
        uint32_t count, samples = 0;
        for (int step = 0; step < 3; step++) {
            struct fdsl_batch *batch = taken(next);
            good(fdsl_stream_fill_targets(fill, images, labels, targets, &count, NULL));
            cr_assert_eq(count, described(batch).count);
            cr_expect_eq(
                memcmp(images, tensor_of(batch, FDSL_IMAGES).data, count * sizeof *images * 3 * SIDE * SIDE),
                0);
            cr_expect_eq(memcmp(labels, tensor_of(batch, FDSL_LABELS).data, count * sizeof *labels), 0);
            cr_expect_eq(memcmp(targets, tensor_of(batch, FDSL_TARGETS).data, count * 10 * sizeof *targets),
                         0);
            good(fdsl_batch_release(batch, NULL));
            samples += count;
        }
        struct fdsl_stream_stats stats = {.size = sizeof stats};
        good(fdsl_stream_stats(fill, &stats));
        cr_expect_eq(stats.samples, samples);
        fdsl_stream_close(next);
        fdsl_stream_close(fill);
    }
    fdsl_source_close(source);
}

/* A broken image has the weight 0 in its own mixture and in that of its partner, and is counted once. */
Test(lib_stream, masked_parts_of_mixtures_have_no_weight)
{
    prepare();
    EXPECT(0, "for f in f/0003/*; do echo broken >$f; done");
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    config.on_error = "mask";
    config.dtype = "f32";
    config.mixup = 1;
    uint32_t masked = 0, parts = 0;
    for (uint32_t rank = 0; rank < 2; rank++) {
        config.rank = rank;
        config.world_size = 2;
        struct fdsl_stream *stream = opened_stream(source, &config);
        for (int step = 0; step < 4; step++) {
            struct fdsl_batch *batch = taken(stream);
            const int64_t *labels = tensor_of(batch, FDSL_LABELS).data;
            const float *targets = tensor_of(batch, FDSL_TARGETS).data;
            uint32_t counted = 0;
            for (uint32_t j = 0; j < described(batch).count; j++) {
                float sum = 0;
                for (int k = 0; k < 10; k++)
                    sum += targets[10 * j + k];
                counted += labels[j] == -1;
                parts += sum < 0.999f;
                cr_expect(labels[j] == -1 ? sum < 0.999f : labels[j] != 3 && targets[10 * j + labels[j]] > 0);
                cr_expect_eq(targets[10 * j + 3], 0);
            }
            cr_expect_eq(counted, described(batch).masked);
            masked += counted;
            good(fdsl_batch_release(batch, NULL));
        }
        fdsl_stream_close(stream);
    }
    cr_expect(masked == DIGITS / 10 && parts > masked, "%u, %u", masked, parts);
    fdsl_source_close(source);
}

/* Expects that label 9 of a source is broken in a stream with this configuration, which has nine classes. */
static void expect_nine_classes(const char *name, struct fdsl_stream_config config)
{
    struct fdsl_batch *batch;
    struct fdsl_source *source = opened_source(name);
    struct fdsl_stream *stream = opened_stream(source, &config);
    enum fdsl_status result = FDSL_OK;
    while (result == FDSL_OK && (result = fdsl_stream_next(stream, NULL, &batch)) == FDSL_OK)
        result = fdsl_batch_release(batch, NULL);
    cr_expect(result == FDSL_FAILED && strstr(fdsl_error(), "label 9 is not a class from 0 to 8"), "%s: %s",
              name, fdsl_error());
    fdsl_stream_close(stream);
    config.on_error = "mask";
    stream = opened_stream(source, &config);
    uint32_t masked = 0;
    while (fdsl_stream_next(stream, NULL, &batch) == FDSL_OK) {
        masked += described(batch).masked;
        good(fdsl_batch_release(batch, NULL));
    }
    cr_expect_eq(masked, DIGITS / 10, "%s: %u", name, masked);
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* A label that is not below `classes` is a broken sample, also if its array is read directly. */
Test(lib_stream, labels_without_a_target_are_refused)
{
    prepare();
    EXPECT(0, "$P --prepare a --from digits --samples %d --encode npy --name s", DIGITS);
    struct fdsl_stream_config config = stream_config();
    config.cutmix = 1;
    config.classes = 9;
    config.num_threads = 1;
    expect_nine_classes("f", config);
    config.out_res = 0;
    config.channels = 1;
    expect_nine_classes("a", config);
}

/* Targets that exceed the memory are refused before any of them is written. */
Test(lib_stream, targets_beyond_the_memory_are_refused)
{
    prepare();
    struct fdsl_stream *stream;
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    config.mixup = 1;
    config.classes = 1u << 24;
    config.batch_size = DIGITS;
    config.prefetch = config.held = 1024;
    cr_expect_eq(fdsl_stream_open(source, &config, &stream), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "the targets: ") && strstr(fdsl_error(), "lower classes"), "%s",
              fdsl_error());
    fdsl_source_close(source);
}

/* ---- Types and layouts ---- */

/* Every type and layout has the values of the batch of bytes in NCHW. */
Test(lib_stream, types_and_layouts_hold_the_same_values)
{
    static const char *const dtypes[] = {"u8", "f16", "bf16", "f32"}, *const layouts[] = {"nchw", "nhwc"};
    prepare();
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *bytes = opened_stream(source, &config);
    struct fdsl_batch *wanted = taken(bytes);
    const uint8_t *from = tensor_of(wanted, FDSL_IMAGES).data;
    for (int type = 0; type < 4; type++)
        for (int layout = 0; layout < 2; layout++) {
            config.dtype = dtypes[type];
            config.layout = layouts[layout];
            for (int c = 0; c < 3; c++) {
                config.mean[c] = type ? 0.1 * c : 0;
                config.std[c] = type ? 0.25 : 1;
            }
            struct fdsl_stream *stream = opened_stream(source, &config);
            struct fdsl_stream_info info = {.size = sizeof info};
            good(fdsl_stream_describe(stream, &info));
            cr_expect(info.steps == 8 && info.samples == DIGITS && info.capacity == 16);
            cr_expect_eq(info.shape[0], layout ? SIDE : 3);
            struct fdsl_batch *batch = taken(stream);
            const struct fdsl_tensor tensor = tensor_of(batch, FDSL_IMAGES);
            cr_expect(tensor.ndim == 4 && tensor.shape[0] == 16 && tensor.shape[1] == info.shape[0] &&
                      tensor.strides[3] == 1 && tensor.strides[0] == 3 * SIDE * SIDE &&
                      tensor.bits == 8 * info.element_bytes && (uintptr_t)tensor.data % 256 == 0);
            for (int64_t i = 0; i < 16 * 3 * SIDE * SIDE; i++) {
                const int64_t image = i / (3 * SIDE * SIDE), c = i / (SIDE * SIDE) % 3,
                              pixel = i % (SIDE * SIDE);
                const int64_t at = layout ? image * 3 * SIDE * SIDE + pixel * 3 + c : i;
                const float want =
                    type ? fmaf(from[i], (float)(1 / (255 * 0.25)), (float)(-0.1 * (double)c / 0.25))
                         : from[i];
                const float have = type == 0   ? ((uint8_t *)tensor.data)[at]
                                   : type == 1 ? half_to_float(((uint16_t *)tensor.data)[at])
                                   : type == 2 ? bf16_to_float(((uint16_t *)tensor.data)[at])
                                               : ((float *)tensor.data)[at];
                const float step = type == 1 ? 0x1p-11f : type == 2 ? 0x1p-8f : 0;
                cr_assert(fabsf(have - want) <= step * fabsf(want) + (type == 1 ? 0x1p-25f : 0),
                          "%s %s: value %d: %g, not %g", dtypes[type], layouts[layout], (int)i, have, want);
            }
            good(fdsl_batch_release(batch, NULL));
            fdsl_stream_close(stream);
        }
    good(fdsl_batch_release(wanted, NULL));
    fdsl_stream_close(bytes);
    fdsl_source_close(source);
}

/* Images keep their size, and get the one of the centre. */
Test(lib_stream, images_of_one_size_need_no_fit)
{
    prepare();
    struct fdsl_source *source = opened_source("m");
    struct fdsl_stream_config config = stream_config();
    config.out_res = 0;
    config.channels = 1;
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_stream_info info = {.size = sizeof info};
    good(fdsl_stream_describe(stream, &info));
    cr_expect(info.shape[0] == 1 && info.shape[1] == 28 && info.shape[2] == 28 && info.image_bytes == 784);
    fdsl_stream_close(stream);
    config.channels = 3;
    cr_expect_eq(fdsl_stream_open(source, &config, &stream), FDSL_INVALID);
    cr_expect(strncmp(fdsl_error(), "channels: ", 10) == 0, "%s", fdsl_error());
    config.out_res = SIDE;
    config.fit = "center-crop";
    stream = opened_stream(source, &config);
    good(fdsl_batch_release(taken(stream), NULL));
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* Only with on_error "mask", a broken first sample does not decide the size. */
Test(lib_stream, the_size_comes_from_a_sample_that_can_be_decoded)
{
    prepare();
    EXPECT(0, "first=$(ls f/*/*.png | head -1) && echo broken >$first && echo -n $first");
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream;
    config.out_res = 0;
    config.channels = 1;
    cr_expect_eq(fdsl_stream_open(source, &config, &stream), FDSL_FAILED);
    cr_expect(strncmp(fdsl_error(), "path: ", 6) == 0 && strstr(fdsl_error(), out), "%s", fdsl_error());
    config.on_error = "mask";
    stream = opened_stream(source, &config);
    struct fdsl_stream_info info = {.size = sizeof info};
    good(fdsl_stream_describe(stream, &info));
    cr_expect(info.shape[0] == 1 && info.shape[1] == 28 && info.shape[2] == 28);
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* ---- Exactly once, and the state ---- */

/* What the ranks of a job receive, by their steps. */
struct job {
    struct fdsl_stream *streams[5];
    uint32_t ranks;
};

static struct job opened_job(struct fdsl_source *source, uint32_t ranks)
{
    struct job job = {.ranks = ranks};
    struct fdsl_stream_config config = stream_config();
    config.world_size = ranks;
    config.batch_size = 60 / ranks; /* 60 is divisible by 1 to 5 */
    config.shuffle_buffer = 40;
    for (config.rank = 0; config.rank < ranks; config.rank++)
        job.streams[config.rank] = opened_stream(source, &config);
    return job;
}

static void close_job(struct job *job)
{
    for (uint32_t rank = 0; rank < job->ranks; rank++)
        fdsl_stream_close(job->streams[rank]);
}

/* Appends the numbers of the samples of a step, and an image per rank. Returns whether there was a step. */
static bool take_step(struct job *job, int64_t *numbers, uint32_t *count)
{
    for (uint32_t rank = 0; rank < job->ranks; rank++) {
        struct fdsl_batch *batch;
        const enum fdsl_status result = fdsl_stream_next(job->streams[rank], NULL, &batch);
        cr_assert(result == FDSL_OK || result == FDSL_END, "%s", fdsl_error());
        if (result == FDSL_END) {
            for (uint32_t other = rank + 1; other < job->ranks; other++)
                cr_assert_eq(fdsl_stream_next(job->streams[other], NULL, &batch), FDSL_END);
            cr_assert(rank == 0 && !batch);
            return false;
        }
        const uint32_t own = described(batch).count;
        memcpy(numbers + *count, tensor_of(batch, FDSL_NUMBERS).data, own * sizeof *numbers);
        *count += own;
        good(fdsl_batch_release(batch, NULL));
    }
    return true;
}

/* 60 of 250 samples per step: the last step has 10, and on 5 ranks 2 each. */
Test(lib_stream, each_sample_is_delivered_once_and_a_state_moves_to_other_ranks)
{
    enum { MANY = 250, STEPS = 5 };
    static int64_t wanted[3 * MANY], found[3 * MANY];
    uint32_t total = 0;
    EXPECT(0, "$P --prepare m --from digits --samples %d --store shards --shards 4", MANY);
    struct fdsl_source *source = opened_source("m");
    struct job whole = opened_job(source, 1);
    for (int epoch = 0; epoch < 3; epoch++)
        while (take_step(&whole, wanted, &total))
            ;
    cr_assert_eq(total, 3 * MANY);
    for (int epoch = 0; epoch < 3; epoch++) {
        uint8_t seen[MANY] = {0};
        for (int i = 0; i < MANY; i++)
            cr_expect_eq(seen[wanted[epoch * MANY + i]]++, 0, "epoch %d: twice", epoch);
    }
    /* One job after the other, each with another number of ranks, takes 1, 2, ... steps. */
    struct fdsl_state state = {.size = sizeof state};
    uint32_t ranks = 1, steps = 1, count = 0;
    struct job job = opened_job(source, ranks);
    while (count < 3 * MANY) {
        for (uint32_t step = 0; step < steps && count < 3 * MANY; step += take_step(&job, found, &count))
            ;
        for (uint32_t rank = 0; rank < ranks; rank++) {
            struct fdsl_state other = {.size = sizeof other};
            good(fdsl_stream_save(job.streams[rank], &other));
            cr_expect(rank == 0 || memcmp(&state, &other, sizeof state) == 0, "the states of ranks differ");
            state = other;
        }
        close_job(&job);
        ranks = ranks % 5 + 1;
        steps = steps % 3 + 1;
        job = opened_job(source, ranks);
        for (uint32_t rank = 0; rank < ranks; rank++)
            good(fdsl_stream_load(job.streams[rank], &state));
    }
    cr_expect_arr_eq(found, wanted, sizeof wanted);
    cr_expect(state.epoch == 3 && state.sample == 0, "the end of an epoch is the beginning of the next one");
    close_job(&job);
    close_job(&whole);
    fdsl_source_close(source);
}

/* drop_last leaves out the last step; without shuffle, the order is that of the set. */
Test(lib_stream, drop_last_and_the_order_of_the_files)
{
    prepare();
    struct fdsl_source *source = opened_source("m");
    struct fdsl_stream_config config = stream_config();
    config.batch_size = 50;
    config.drop_last = 1;
    config.shuffle = 0;
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_batch *batch;
    for (int64_t step = 0; step < 2; step++) {
        batch = taken(stream);
        const int64_t *numbers = tensor_of(batch, FDSL_NUMBERS).data;
        cr_assert_eq(described(batch).count, 50);
        for (int64_t i = 0; i < 50; i++)
            cr_expect_eq(numbers[i], 50 * step + i);
        good(fdsl_batch_release(batch, NULL));
    }
    cr_expect_eq(fdsl_stream_next(stream, NULL, &batch), FDSL_END);
    fdsl_stream_close(stream);
    config.batch_size = DIGITS + 1;
    cr_expect_eq(fdsl_stream_open(source, &config, &stream), FDSL_INVALID);
    cr_expect(strncmp(fdsl_error(), "drop_last: ", 11) == 0, "%s", fdsl_error());
    fdsl_source_close(source);
}

/* The targets of mixtures have a column per class, and larger labels are masked. */
Test(lib_stream, states_with_mixtures_have_a_number_of_classes)
{
    prepare();
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    struct fdsl_state state = {.size = sizeof state};
    config.mixup = 1;
    struct fdsl_stream *stream = opened_stream(source, &config);
    good(fdsl_batch_release(taken(stream), NULL));
    good(fdsl_stream_save(stream, &state));
    fdsl_stream_close(stream);
    for (config.classes = 10; config.classes < 12; config.classes++) { /* the data set names 10 */
        stream = opened_stream(source, &config);
        cr_expect_eq(fdsl_stream_load(stream, &state), config.classes == 10 ? FDSL_OK : FDSL_INVALID);
        fdsl_stream_close(stream);
    }
    cr_expect(strstr(fdsl_error(), "another transform") && strstr(fdsl_error(), "classes"), "%s",
              fdsl_error());
    fdsl_source_close(source);
}

/* Each difference is refused with its name, and the position stays. */
Test(lib_stream, states_of_other_streams_are_refused)
{
    prepare();
    EXPECT(0, "cp -r f g && rm $(ls g/*/*.png | head -1)");
    struct fdsl_source *source = opened_source("f"), *other = opened_source("g");
    const struct fdsl_stream_config first = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &first);
    struct fdsl_state state = {.size = sizeof state}, after = {.size = sizeof after};
    good(fdsl_batch_release(taken(stream), NULL));
    good(fdsl_stream_save(stream, &state));
    cr_expect_eq(state.sample, 16);
    for (int fault = 0; fault < 12; fault++) {
        static const char *const names[] = {"number of samples", "transform",    "transform",    "transform",
                                            "transform",         "global batch", "seed",         "lanes",
                                            "shuffle",           "drop_last",    "rand_augment", "mixup"};
        struct fdsl_stream_config config = first;
        if (fault == 1)
            config.out_res++;
        else if (fault == 2)
            config.flip = 1;
        else if (fault == 3)
            config.dtype = "f16";
        else if (fault == 4)
            config.fit = "center-crop";
        else if (fault == 5)
            config.world_size = 2;
        else if (fault == 6)
            config.seed++;
        else if (fault == 7)
            config.lanes++;
        else if (fault == 8)
            config.shuffle = 0;
        else if (fault == 9)
            config.drop_last = 1;
        else if (fault == 10)
            config.rand_augment = 9;
        else if (fault == 11)
            config.cutmix = 1;
        struct fdsl_stream *changed = opened_stream(fault == 0 ? other : source, &config);
        cr_expect_eq(fdsl_stream_load(changed, &state), FDSL_INVALID, "fault %d", fault);
        cr_expect(strncmp(fdsl_error(), "state: ", 7) == 0 && strstr(fdsl_error(), names[fault]),
                  "fault %d: %s", fault, fdsl_error());
        good(fdsl_stream_save(changed, &after));
        cr_expect(after.epoch == 0 && after.sample == 0);
        fdsl_stream_close(changed);
    }
    state.data++;
    cr_expect(fdsl_stream_load(stream, &state) == FDSL_INVALID && strstr(fdsl_error(), "another data set"),
              "%s", fdsl_error());
    state.data--;
    state.sample++;
    cr_expect(fdsl_stream_load(stream, &state) == FDSL_INVALID && strstr(fdsl_error(), "sample 17"), "%s",
              fdsl_error());
    fdsl_stream_close(stream);
    fdsl_source_close(other);
    fdsl_source_close(source);
}

/* The same files with another label are another data set. */
/* A state comes back from its file as it was; every wrong argument and file is an error. */
Test(lib_stream, states_are_stored_in_files)
{
    struct fdsl_state state = {.size = sizeof state,
                               .epoch = 1,
                               .sample = UINT64_MAX,
                               .samples = 3,
                               .seed = UINT64_MAX - 1,
                               .data = 5,
                               .transform = UINT64_MAX - 2,
                               .global_batch = UINT32_MAX,
                               .lanes = 8,
                               .shuffle_buffer = 9,
                               .drop_last = 1};
    struct fdsl_state back = {.size = sizeof back}, odd = {.size = 8};
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s/state", folder);
    good(fdsl_state_write(&state, file));
    good(fdsl_state_read(file, &back));
    cr_expect_eq(memcmp(&state, &back, sizeof state), 0);
    const enum fdsl_status wrong[] = {fdsl_state_write(NULL, file), fdsl_state_write(&state, NULL),
                                      fdsl_state_write(&odd, file), fdsl_state_write(&state, folder),
                                      fdsl_state_read(NULL, &back), fdsl_state_read(file, NULL),
                                      fdsl_state_read(file, &odd)};
    for (size_t i = 0; i < COUNT_OF(wrong); i++)
        cr_expect_eq(wrong[i], FDSL_INVALID, "case %zu", i);
    cr_expect_eq(fdsl_state_read("/nowhere/state", &back), FDSL_FAILED);
    cr_expect(strncmp(fdsl_error(), "/nowhere/state: ", 16) == 0, "%s", fdsl_error());
    cr_expect_eq(memcmp(&state, &back, sizeof state), 0, "an error changed the state");
    /* Each byte of the file counts. */
    FILE *from = fopen(file, "re");
    char text[512];
    const size_t size = fread(text, 1, sizeof text, from);
    fclose(from);
    cr_assert(size > 200 && size < sizeof text);
    for (size_t i = 0; i <= size; i++) {
        FILE *to = fopen(file, "we");
        const char before = text[i % size];
        text[i % size] ^= 1;
        fwrite(text, 1, i < size ? size : size - 1, to);
        fclose(to);
        text[i % size] = before;
        cr_expect(fdsl_state_read(file, &back) != FDSL_OK, "byte %zu", i);
    }
}

Test(lib_stream, states_of_other_labels_are_refused)
{
    static const char *const labels[] = {"json:a", "json:b", "json:a"};
    struct fdsl_state state = {.size = sizeof state};
    EXPECT(0, "$P --prepare d --from digits --samples 8 --store imagefolder && mkdir s && i=0 && "
              "for f in d/*/*.png; do cp $f s/$i.png && printf '{\"a\": 1, \"b\": 2}' >s/$i.json && "
              "i=$((i + 1)); done && tar cf two.tar -C s --sort=name .");
    for (int i = 0; i < 3; i++) {
        struct fdsl_source_config from = source_config("two.tar");
        const struct fdsl_stream_config config = stream_config();
        struct fdsl_source *source;
        from.label = labels[i];
        good(fdsl_source_open(&from, &source));
        struct fdsl_stream *stream = opened_stream(source, &config);
        if (i == 0)
            good(fdsl_stream_save(stream, &state));
        cr_expect_eq(fdsl_stream_load(stream, &state), i == 1 ? FDSL_INVALID : FDSL_OK, "case %d", i);
        cr_expect(i != 1 || strstr(fdsl_error(), "another data set"), "%s", fdsl_error());
        fdsl_stream_close(stream);
        fdsl_source_close(source);
    }
}

/* ---- Memory ---- */

static struct fdsl_stream_stats stats_of(const char *name)
{
    struct fdsl_stream_stats stats = {.size = sizeof stats};
    struct fdsl_source *source = opened_source(name);
    const struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &config);
    good(fdsl_batch_release(taken(stream), NULL));
    good(fdsl_stream_stats(stream, &stats));
    fdsl_stream_close(stream);
    fdsl_source_close(source);
    return stats;
}

/* Files are not read in blocks, and differ from shards in nothing else. */
Test(lib_stream, small_samples_of_shards_are_read_in_blocks)
{
    prepare();
    const uint64_t files = stats_of("f").memory_bytes, shards = stats_of("m").memory_bytes;
    cr_expect(shards >= files + (64 << 10), "%llu and %llu bytes", (unsigned long long)files,
              (unsigned long long)shards);
}

/* Files that stay in memory are read once. */
Test(lib_stream, files_stay_in_memory)
{
    struct fdsl_stream_config config = stream_config();
    struct fdsl_stream_stats stats[2] = {{.size = sizeof *stats}, {.size = sizeof *stats}};
    prepare();
    struct fdsl_source *source = opened_source("m");
    for (int kept = 0; kept < 2; kept++) {
        config.resident_bytes = kept ? UINT64_MAX : 0;
        struct fdsl_stream *stream = opened_stream(source, &config);
        struct fdsl_batch *batch;
        for (int epoch = 0; epoch < 3; epoch++)
            while (fdsl_stream_next(stream, NULL, &batch) == FDSL_OK)
                good(fdsl_batch_release(batch, NULL));
        good(fdsl_stream_stats(stream, &stats[kept]));
        fdsl_stream_close(stream);
    }
    struct fdsl_source_info info = {.size = sizeof info};
    good(fdsl_source_describe(source, &info));
    cr_expect(stats[0].resident_samples == 0 && stats[1].resident_samples == info.samples);
    cr_expect_geq(stats[0].bytes, 3 * stats[1].bytes);
    cr_expect_geq(stats[1].memory_bytes, stats[0].memory_bytes + stats[1].bytes);
    fdsl_source_close(source);
}

Test(lib_stream, all_parts_of_a_batch_are_aligned)
{
    prepare();
    struct fdsl_source *source = opened_source("m");
    struct fdsl_stream_config config = stream_config();
    config.held = 3;
    config.batch_size = 17;
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_batch *batches[3];
    for (int i = 0; i < 3; i++) {
        batches[i] = taken(stream);
        for (int field = FDSL_IMAGES; field <= FDSL_NUMBERS; field++)
            cr_expect_eq((uintptr_t)tensor_of(batches[i], (enum fdsl_field)field).data % 256, 0,
                         "batch %d, field %d", i, field);
        int64_t *strides = tensor_of(batches[i], FDSL_LABELS).strides;
        cr_expect_eq(*strides, 1);
        *strides = 9; /* reaches no other batch */
    }
    for (int i = 0; i < 3; i++)
        good(fdsl_batch_release(batches[i], NULL));
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* ---- URLs ---- */

/* Opens a source at a URL of a local server. Skips the test if this build cannot. */
static struct fdsl_source *source_at(const char *url, const char *cache)
{
    struct fdsl_source_config config = source_config("none");
    struct fdsl_source *source;
    config.path = url;
    config.cache_dir = cache;
    config.cache_bytes = cache ? 150000 : 0;
    const enum fdsl_status result = fdsl_source_open(&config, &source);
    if (result == FDSL_UNAVAILABLE)
        cr_skip_test("%s", fdsl_error());
    good(result);
    return source;
}

/* Of shards at a URL, blocks are read. Shuffled shards that are read whole must fit into memory or cache. */
Test(lib_stream, shards_at_a_url_are_read_in_blocks)
{
    static const char *const names[] = {"web", "norange", "norange", "web"};
    char url[128], cache[PATH_MAX];
    int port = 0;
    prepare();
    EXPECT(0, "mkfifo gate");
    snprintf(cache, sizeof cache, "%s/gate", folder);
    const int gate = open(cache, O_RDWR | O_CLOEXEC); /* the server ends when it is closed */
    cr_assert_geq(gate, 0);
    EXPECT(0, "(python3 %s/tests/remote_server.py . >port 2>/dev/null <gate &)", root);
    EXPECT(0, "while [ ! -s port ]; do sleep 0.05; done; cat port");
    cr_assert_eq(sscanf(out, "%d", &port), 1);
    setenv("no_proxy", "127.0.0.1", 1);
    snprintf(cache, sizeof cache, "%s/cache", folder);
    for (int i = 0; i < 4; i++) {
        struct fdsl_stream_config config = stream_config();
        struct fdsl_stream *stream;
        snprintf(url, sizeof url, "http://127.0.0.1:%d/%s/m/s.index", port, names[i]);
        struct fdsl_source *source = source_at(url, i == 3 ? cache : NULL);
        config.shard_bytes = 1;
        config.shuffle = i != 2;
        const enum fdsl_status result = fdsl_stream_open(source, &config, &stream);
        cr_expect_eq(result, i % 2 ? FDSL_INVALID : FDSL_OK, "case %d: %s", i, fdsl_error());
        if (i % 2 == 0)
            good(fdsl_batch_release(taken(stream), NULL));
        else
            cr_expect(strstr(fdsl_error(), i == 1 ? "set cache_dir" : "raise cache_bytes"), "%s",
                      fdsl_error());
        fdsl_stream_close(stream);
        fdsl_source_close(source);
    }
    close(gate);
}

/* The path is local, but libcurl is needed all the same. */
Test(lib_stream, a_local_index_names_shards_at_a_url)
{
    prepare();
    EXPECT(0, "mkdir idx && sed 's|\"url\": \"|&http://127.0.0.1:9/|' m/s.wids.json >idx/x.wids.json && "
              "grep -c 127.0.0.1:9/s-000002 idx/x.wids.json");
    struct fdsl_source_config config = source_config("idx");
    struct fdsl_source *source;
    setenv("no_proxy", "127.0.0.1", 1);
    const enum fdsl_status result = fdsl_source_open(&config, &source);
    cr_expect(result == FDSL_FAILED || result == FDSL_UNAVAILABLE, "%d", (int)result);
    cr_expect(strstr(fdsl_error(), result == FDSL_FAILED ? "127.0.0.1:9" : "libcurl"), "%s", fdsl_error());
}

/* ---- Broken samples ---- */

/* With "fail", the error comes at its step and stays; a seek ends it. With "mask", the label is -1. */
Test(lib_stream, broken_samples_fail_or_are_masked)
{
    prepare();
    EXPECT(0,
           "dd if=/dev/zero of=$(ls f/*/*.png | sed -n 51p) bs=1 seek=60 count=100 conv=notrunc 2>/dev/null");
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    static uint8_t images[ROOM];
    int64_t labels[16];
    uint32_t count, good_steps = 0, masked = 0;
    config.shuffle = 0;
    struct fdsl_stream *stream = opened_stream(source, &config);
    while (fdsl_stream_fill(stream, images, labels, &count, NULL) == FDSL_OK)
        good_steps++;
    cr_expect_eq(good_steps, 3, "sample 50 is in step 3");
    cr_expect(strstr(fdsl_error(), ".png"), "%s", fdsl_error());
    cr_expect_eq(fdsl_stream_fill(stream, images, labels, &count, NULL), FDSL_FAILED);
    good(fdsl_stream_seek(stream, 0, 4));
    good(fdsl_stream_fill(stream, images, labels, &count, NULL));
    fdsl_stream_close(stream);

    config.on_error = "mask";
    stream = opened_stream(source, &config);
    for (int step = 0; fdsl_stream_fill(stream, images, labels, &count, NULL) == FDSL_OK; step++) {
        cr_expect_eq(*fdsl_warnings() != '\0', step == 3, "step %d: %s", step, fdsl_warnings());
        for (uint32_t i = 0; i < count; i++) {
            const bool broken = step == 3 && i == 2;
            cr_expect_eq(labels[i] == -1, broken, "step %d, image %u", step, i);
            uint32_t sum = 0;
            for (uint32_t v = 0; v < 3 * SIDE * SIDE; v++)
                sum += images[i * 3 * SIDE * SIDE + v];
            cr_expect_eq(sum == 0, broken);
            masked += broken;
        }
    }
    struct fdsl_stream_stats stats = {.size = sizeof stats};
    good(fdsl_stream_stats(stream, &stats));
    cr_expect(masked == 1 && stats.masked == 1 && stats.samples == DIGITS && stats.batches == 8);
    fdsl_stream_close(stream);
    fdsl_source_close(source);

    /* a link whose target does not exist */
    EXPECT(0, "ln -sf /none/x.png $(ls f/*/*.png | sed -n 51p)");
    source = opened_source("f");
    config.on_error = "fail";
    cr_expect_eq(fdsl_stream_open(source, &config, &stream), FDSL_FAILED);
    cr_expect(strstr(fdsl_error(), "a symbolic link to '/none/x.png'") &&
                  strstr(fdsl_error(), "on_error \"mask\""),
              "%s", fdsl_error());
    config.on_error = "mask";
    stream = opened_stream(source, &config);
    for (masked = 0; fdsl_stream_fill(stream, images, labels, &count, NULL) == FDSL_OK;)
        for (uint32_t i = 0; i < count; i++)
            masked += labels[i] == -1;
    cr_expect_eq(masked, 1);
    fdsl_stream_close(stream);
    fdsl_source_close(source);

    /* a sample without a label */
    EXPECT(0, "mkdir u && cd u && tar xf ../m/s-000000.tar && rm $(ls *.cls | head -1) && "
              "mkdir ../n && tar cf ../n/s.tar --sort=name *");
    source = opened_source("n");
    config.on_error = "fail";
    cr_expect_eq(fdsl_stream_open(source, &config, &stream), FDSL_FAILED);
    cr_expect(strstr(fdsl_error(), "no member for label") && strstr(fdsl_error(), "on_error \"mask\""), "%s",
              fdsl_error());
    config.on_error = "mask";
    stream = opened_stream(source, &config);
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* ---- Lifetimes ---- */

/* A batch outlives its stream and its source, and stays as it is after a seek. */
Test(lib_stream, batches_outlive_seeks_and_streams)
{
    prepare();
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    config.held = 2;
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_batch *first = taken(stream), *second, *none;
    const struct fdsl_tensor images = tensor_of(first, FDSL_IMAGES);
    static uint8_t kept[ROOM];
    memcpy(kept, images.data, 16 * 3 * SIDE * SIDE);
    for (uint64_t step = 0; step < 8; step++) {
        good(fdsl_stream_seek(stream, 5, step));
        second = taken(stream);
        cr_expect(described(second).epoch == 5 && described(second).step == step);
        good(fdsl_batch_release(second, NULL));
    }
    good(fdsl_stream_seek(stream, 0, 0));
    second = taken(stream);
    cr_expect_eq(memcmp(tensor_of(second, FDSL_IMAGES).data, kept, 16 * 3 * SIDE * SIDE), 0);
    struct fdsl_batch *third = taken(stream), *fourth = taken(stream);
    cr_expect_eq(fdsl_stream_next(stream, NULL, &none), FDSL_INVALID, "prefetch + held batches are held");
    cr_expect(strstr(fdsl_error(), "release one"), "%s", fdsl_error());
    fdsl_source_close(source);
    fdsl_stream_close(stream);
    good(fdsl_batch_release(third, NULL));
    good(fdsl_batch_release(fourth, NULL));
    good(fdsl_batch_release(second, NULL));
    cr_expect_eq(memcmp(images.data, kept, 16 * 3 * SIDE * SIDE), 0);
    good(fdsl_batch_release(first, NULL));
    good(fdsl_batch_release(NULL, NULL));
}

static int threads_now(void)
{
    char text[64];
    FILE *file = popen("ls /proc/$PPID/task | wc -l", "r");
    cr_assert(file && fgets(text, sizeof text, file));
    pclose(file);
    return atoi(text);
}

#ifndef __SANITIZE_ADDRESS__
Test(lib_stream, streams_leak_neither_memory_nor_threads)
{
    prepare();
    size_t begin = 0;
    const int threads = threads_now();
    for (int i = 0; i < 300; i++) {
        struct fdsl_source *source = opened_source(i % 2 ? "f" : "m");
        const struct fdsl_stream_config config = stream_config();
        struct fdsl_stream *stream = opened_stream(source, &config);
        struct fdsl_batch *batch = taken(stream);
        fdsl_source_close(source);
        fdsl_stream_close(stream);
        good(fdsl_batch_release(batch, NULL));
        if (i == 99)
            begin = mallinfo2().uordblks;
    }
    cr_expect_leq(mallinfo2().uordblks, begin + 8192);
    cr_expect_eq(threads_now(), threads);
}
#endif

static void *read_epochs(void *argument)
{
    struct fdsl_source *source = argument;
    struct fdsl_stream_config config = stream_config();
    config.flip = 1;
    struct fdsl_stream *stream = opened_stream(source, &config);
    static _Thread_local uint8_t images[ROOM];
    uint64_t sum = 0;
    for (int epoch = 0; epoch < 3; epoch++) {
        uint32_t count;
        enum fdsl_status result;
        while ((result = fdsl_stream_fill(stream, images, NULL, &count, NULL)) == FDSL_OK)
            for (uint32_t i = 0; i < count * 3 * SIDE * SIDE; i++)
                sum = sum * 31 + images[i];
        cr_expect_eq(result, FDSL_END);
    }
    fdsl_stream_close(stream);
    return (void *)(uintptr_t)sum;
}

/* Several threads have a stream each, of one source. */
Test(lib_stream, streams_work_in_several_threads)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    prepare();
    struct fdsl_source *source = opened_source("m");
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, read_epochs, source), 0);
    const void *wanted = read_epochs(source);
    for (int i = 0; i < THREADS; i++) {
        void *sum;
        cr_assert_eq(pthread_join(threads[i], &sum), 0);
        cr_expect_eq(sum, wanted);
    }
    fdsl_source_close(source);
}

static void *cancel_soon(void *stream)
{
    usleep(100000);
    fdsl_stream_cancel(stream);
    return NULL;
}

/* Another thread cancels a stream while this one takes batches. */
Test(lib_stream, cancel_and_wait)
{
    prepare();
    struct fdsl_source *source = opened_source("f");
    const struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &config);
    enum fdsl_status result = FDSL_PENDING;
    while (result == FDSL_PENDING)
        result = fdsl_stream_wait(stream, 0.001);
    cr_expect_eq(result, FDSL_OK);
    struct fdsl_batch *batch = taken(stream);
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, cancel_soon, stream), 0);
    static uint8_t images[ROOM];
    uint32_t count;
    while ((result = fdsl_stream_fill(stream, images, NULL, &count, NULL)) == FDSL_OK || result == FDSL_END)
        usleep(1000);
    pthread_join(thread, NULL);
    cr_expect(result == FDSL_FAILED && strstr(fdsl_error(), "cancelled"), "%s", fdsl_error());
    cr_expect_eq(fdsl_stream_wait(stream, 100), FDSL_OK, "a cancelled stream does not wait");
    fdsl_batch_release(batch, NULL);
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* With `wait_s`, calls return instead of waiting, and lose no batch. */
Test(lib_stream, calls_that_wait_for_a_limited_time)
{
    prepare();
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *patient = opened_stream(source, &config);
    config.wait_s = 1e-9;
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_stream_info info = {.size = sizeof info};
    good(fdsl_stream_describe(stream, &info));
    static uint8_t images[ROOM], wanted[ROOM];
    uint32_t count, others, pending = 0, turn = 0;
    enum fdsl_status result, other;
    do {
        struct fdsl_batch *batch = NULL;
        other = fdsl_stream_fill(patient, wanted, NULL, &others, NULL);
        while ((result = turn % 2 ? fdsl_stream_next(stream, NULL, &batch)
                                  : fdsl_stream_fill(stream, images, NULL, &count, NULL)) == FDSL_PENDING) {
            cr_assert_null(batch);
            pending++;
            usleep(100);
        }
        cr_assert_eq(result, other);
        if (batch) {
            struct fdsl_tensor tensor;
            good(fdsl_batch_tensor(batch, FDSL_IMAGES, &tensor));
            count = (uint32_t)tensor.shape[0];
            memcpy(images, tensor.data, (size_t)count * info.image_bytes);
            good(fdsl_batch_release(batch, NULL));
        }
        cr_assert(count == others && memcmp(images, wanted, (size_t)count * info.image_bytes) == 0);
        turn++;
    } while (result == FDSL_OK);
    cr_expect_eq(result, FDSL_END); /* how often a call had to wait is a matter of luck */
    printf("%u calls returned FDSL_PENDING\n", pending);
    fdsl_stream_close(stream);
    fdsl_stream_close(patient);
    fdsl_source_close(source);
}

/* Waits until the threads of this process sleep: its CPU time has stood still for 50 ms. The allocator of
 * AddressSanitizer may be locked in a child that is forked while another thread allocates. */
static void let_threads_sleep(void)
{
    struct timespec before, now = {0};
    do {
        before = now;
        usleep(50000);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    } while ((now.tv_sec - before.tv_sec) * 1000000000L + now.tv_nsec - before.tv_nsec > 2000000);
}

Test(lib_stream, a_forked_child_needs_a_stream_of_its_own)
{
    prepare();
    struct fdsl_source *source = opened_source("f");
    const struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_batch *batch = taken(stream);
    fflush(NULL);
    let_threads_sleep();
    const pid_t child = fork();
    if (child == 0) {
        struct fdsl_source *own_source;
        struct fdsl_stream *own;
        struct fdsl_batch *other;
        const struct fdsl_source_config from = source_config("f");
        int wrong =
            fdsl_stream_next(stream, NULL, &other) != FDSL_FAILED || !strstr(fdsl_error(), "before fork()");
        wrong |= fdsl_stream_open(source, &config, &own) != FDSL_FAILED ? 2 : 0;
        wrong |= fdsl_batch_release(batch, NULL) != FDSL_FAILED ? 4 : 0;
        fdsl_stream_close(stream);
        fdsl_source_close(source);
        wrong |= fdsl_source_open(&from, &own_source) != FDSL_OK ? 8 : 0;
        wrong |= fdsl_stream_open(own_source, &config, &own) != FDSL_OK ? 16 : 0;
        wrong |= fdsl_stream_next(own, NULL, &other) != FDSL_OK ? 32 : 0;
        _exit(wrong);
    }
    int result;
    cr_assert_eq(waitpid(child, &result, 0), child);
    cr_expect(WIFEXITED(result) && WEXITSTATUS(result) == 0, "%x", result);
    good(fdsl_batch_release(batch, NULL));
    good(fdsl_batch_release(taken(stream), NULL));
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* ---- Errors ---- */

/* Expects that the field `name` of a configuration is refused. */
static void expect_refused_field(struct fdsl_source *source, const struct fdsl_stream_config *config,
                                 const char *name)
{
    struct fdsl_stream *stream = (struct fdsl_stream *)source;
    cr_expect_eq(fdsl_stream_open(source, config, &stream), FDSL_INVALID, "%s", name);
    cr_expect(!stream && strncmp(fdsl_error(), name, strcspn(name, "[")) == 0, "%s: %s", name, fdsl_error());
}

#define REFUSED(field, value)                         \
    do {                                              \
        struct fdsl_stream_config wrong = config;     \
        wrong.field = value;                          \
        expect_refused_field(source, &wrong, #field); \
    } while (0)

Test(lib_stream, every_field_is_checked)
{
    prepare();
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    REFUSED(batch_size, 0);
    REFUSED(batch_size, UINT32_MAX);
    REFUSED(rank, 1);
    REFUSED(world_size, 0);
    REFUSED(shuffle, 2);
    REFUSED(shuffle_buffer, 0);
    REFUSED(lanes, 0);
    REFUSED(drop_last, -1);
    REFUSED(out_res, 16385);
    REFUSED(fit, "fill");
    REFUSED(fit, NULL);
    REFUSED(flip, 3);
    REFUSED(channels, 2);
    REFUSED(layout, "chw");
    REFUSED(dtype, "f64");
    REFUSED(mean[1], 0.5);
    REFUSED(std[0], 0);
    REFUSED(num_threads, -1);
    REFUSED(num_threads, 8193);
    REFUSED(prefetch, 0);
    REFUSED(prefetch, 1025);
    REFUSED(held, 0);
    REFUSED(on_error, "skip");
    REFUSED(rand_augment, 30.5);
    REFUSED(brightness[0], 2);
    REFUSED(contrast[1], 11);
    REFUSED(hue[1], 0.6);
    REFUSED(saturation[0], NAN);
    REFUSED(grayscale_p, -0.1);
    REFUSED(color_jitter_p, 0.5); /* there is nothing to apply */
    REFUSED(rand_augment, NAN);
    REFUSED(rand_augment_policy, "rand-m9-m5");
    REFUSED(rand_augment_policy, "9");
    REFUSED(rand_augment_ops, 0);
    REFUSED(rand_augment_ops, 17);
    REFUSED(erasing, 0.5); /* of bytes */
    REFUSED(mixup, -0.1);
    REFUSED(mixup, NAN);
    REFUSED(mixup, 1001);
    REFUSED(cutmix, -0.1);
    REFUSED(cutmix, NAN);
    REFUSED(cutmix, 1001);
    REFUSED(classes, 10); /* without mixtures */
    REFUSED(device, -2);
    REFUSED(decoder, "gpu");
    REFUSED(decoder, NULL);
    REFUSED(decoder, "hardware");
    REFUSED(device_share, 2);
    REFUSED(device_share, 0.5); /* of the CPU */
    REFUSED(device_share, NAN);
    config.dtype = "f32";
    REFUSED(erasing, 1.5);
    REFUSED(erasing, NAN);
    config.mixup = 1;
    REFUSED(classes, 1);
    REFUSED(classes, 1u << 25);
    REFUSED(std[2], 0);
    REFUSED(mean[2], NAN);
    config.size--;
    struct fdsl_stream *stream;
    cr_expect(fdsl_stream_open(source, &config, &stream) == FDSL_INVALID &&
              strstr(fdsl_error(), "config->size"));
    cr_expect_eq(fdsl_stream_open(NULL, &config, &stream), FDSL_INVALID);
    cr_expect_eq(fdsl_stream_open(source, NULL, &stream), FDSL_INVALID);
    cr_expect_eq(fdsl_stream_open(source, &config, NULL), FDSL_INVALID);
    fdsl_source_close(source);
    fdsl_source_close(NULL);
    fdsl_stream_close(NULL);
}

Test(lib_stream, sources_are_checked)
{
    prepare();
    struct fdsl_source *source;
    struct fdsl_source_config config = source_config("f");
    struct fdsl_source_info info = {.size = sizeof info};
    good(fdsl_source_open(&config, &source));
    good(fdsl_source_describe(source, &info));
    cr_expect(info.samples == DIGITS && info.classes == 10 && !info.shards && info.files == DIGITS);
    cr_expect_str_eq(fdsl_source_class(source, 3), "0003");
    cr_expect_null(fdsl_source_class(source, 10));
    fdsl_source_close(source);
    static const char *const kinds[] = {"shards", "folder", "tar"}, *const names[] = {"f", "m", "m"};
    for (int i = 0; i < 3; i++) {
        config = source_config(names[i]);
        config.kind = kinds[i];
        cr_expect_eq(fdsl_source_open(&config, &source), FDSL_INVALID);
        cr_expect(!source && strncmp(fdsl_error(), i < 2 ? "path: " : "kind: ", 6) == 0, "%s", fdsl_error());
    }
    config = source_config("none");
    cr_expect(fdsl_source_open(&config, &source) == FDSL_INVALID && strncmp(fdsl_error(), "path ", 5) == 0,
              "%s", fdsl_error());
    /* The images of two classes in one folder. */
    config = source_config("flat");
    EXPECT(0, "mkdir flat && cp f/0000/* f/0001/* flat");
    good(fdsl_source_open(&config, &source));
    cr_expect_null(fdsl_source_class(source, 0));
    fdsl_source_close(source);
    config.kind = "folder";
    cr_expect_eq(fdsl_source_open(&config, &source), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "flat has no class folders") && strstr(fdsl_error(), "/flat/CLASS/IMAGE"),
              "%s", fdsl_error());
    config = source_config("m");
    config.cache_dir = folder;
    cr_expect_eq(fdsl_source_open(&config, &source), FDSL_INVALID);
    cr_expect_eq(strncmp(fdsl_error(), "cache_dir: it is for data at a URL", 34), 0, "%s", fdsl_error());
    config = source_config("m");
    config.label = "json:a;cls:b;";
    cr_expect(fdsl_source_open(&config, &source) == FDSL_INVALID && strncmp(fdsl_error(), "label: ", 7) == 0,
              "%s", fdsl_error());
    config = source_config("m");
    config.cache_bytes = 1;
    cr_expect(fdsl_source_open(&config, &source) == FDSL_INVALID &&
              strncmp(fdsl_error(), "cache_bytes: ", 13) == 0);
    config.path = NULL;
    config.cache_bytes = 0;
    cr_expect(fdsl_source_open(&config, &source) == FDSL_INVALID && strncmp(fdsl_error(), "path: ", 6) == 0);
}

/* Waits until a source is open. */
static enum fdsl_status opening_ends(struct fdsl_source *source)
{
    enum fdsl_status result;
    while ((result = fdsl_source_wait(source, 0.01)) == FDSL_PENDING) {
    }
    return result;
}

static struct fdsl_source *begun_source(const char *name)
{
    struct fdsl_source_config config = source_config(name);
    struct fdsl_source *source;
    good(fdsl_source_begin(&config, &source));
    memset(path, 'x', sizeof path - 1); /* the library has copied the string */
    return source;
}

Test(lib_stream, a_source_may_be_opened_in_a_thread)
{
    prepare();
    EXPECT(0, "mkdir w && cp -r f/* w && touch w/0000/readme.txt");
    struct fdsl_source_info info = {.size = sizeof info}, same = {.size = sizeof same};
    struct fdsl_source *direct = opened_source("m"), *source = begun_source("m"), *none;
    good(opening_ends(source));
    good(opening_ends(source));
    good(fdsl_source_describe(direct, &same));
    good(fdsl_source_describe(source, &info));
    cr_expect_eq(memcmp(&info, &same, sizeof info), 0);
    const struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream = opened_stream(source, &config);
    fdsl_source_close(source);
    good(fdsl_batch_release(taken(stream), NULL));
    fdsl_stream_close(stream);
    good(fdsl_source_wait(direct, 0));
    fdsl_source_close(direct);
    source = begun_source("w");
    good(opening_ends(source));
    cr_expect(strstr(fdsl_warnings(), "ignored 1 of"), "%s", fdsl_warnings());
    cr_expect_eq(fdsl_source_wait(source, -1), FDSL_INVALID);
    cr_expect(strncmp(fdsl_error(), "seconds: ", 9) == 0, "%s", fdsl_error());
    cr_expect_eq(fdsl_source_wait(source, NAN), FDSL_INVALID);
    fdsl_source_close(source);
    source = begun_source("none");
    for (int i = 0; i < 2; i++) {
        cr_expect_eq(opening_ends(source), FDSL_INVALID);
        cr_expect(strstr(fdsl_error(), "none: No such file"), "%s", fdsl_error());
    }
    cr_expect_eq(fdsl_source_describe(source, &info), FDSL_INVALID);
    fdsl_source_close(source);
    cr_expect(fdsl_source_begin(NULL, &none) == FDSL_INVALID && !none);
    cr_expect_eq(fdsl_source_begin(NULL, NULL), FDSL_INVALID);
    cr_expect_eq(fdsl_source_wait(NULL, 0), FDSL_INVALID);
}

/* Returns a port that accepts connections, but no program answers. */
static int silent_port(int *to)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    *to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert(bind(*to, (struct sockaddr *)&address, size) == 0 && listen(*to, 9) == 0 &&
              getsockname(*to, (struct sockaddr *)&address, &size) == 0);
    return ntohs(address.sin_port);
}

static int files_now(void)
{
    int count = 0;
    DIR *files = opendir("/proc/self/fd");
    while (readdir(files))
        count++;
    closedir(files);
    return count;
}

/* fdsl_stream_begin() opens the same stream; errors come from fdsl_stream_wait(), and other functions wait
 * for it. */
Test(lib_stream, a_stream_may_be_opened_in_a_thread)
{
    prepare();
    struct fdsl_source *source = opened_source("f");
    struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *plain = opened_stream(source, &config), *stream;
    char fit[] = "resize", type[] = "f16";
    struct fdsl_stream_info info = {.size = sizeof info};
    struct fdsl_state state = {.size = sizeof state}, same = {.size = sizeof same};
    enum fdsl_status result;
    config.fit = fit;
    good(fdsl_stream_begin(source, &config, &stream));
    memset(fit, 'x', sizeof fit - 1); /* the library has copied the string */
    while ((result = fdsl_stream_wait(stream, 0.01)) == FDSL_PENDING) {
    }
    good(result);
    good(fdsl_stream_describe(stream, &info));
    good(fdsl_stream_save(plain, &state));
    good(fdsl_stream_save(stream, &same));
    cr_expect_eq(memcmp(&state, &same, sizeof state), 0);
    struct fdsl_batch *one = taken(plain), *other = taken(stream);
    cr_expect_eq(
        memcmp(tensor_of(one, FDSL_IMAGES).data, tensor_of(other, FDSL_IMAGES).data, 16 * 3 * SIDE * SIDE),
        0);
    good(fdsl_batch_release(one, NULL));
    good(fdsl_batch_release(other, NULL));
    fdsl_stream_close(stream);
    fdsl_stream_close(plain);
    /* A wrong field, reported twice; then a stream that is closed while it opens. */
    config = stream_config();
    config.dtype = type;
    config.lanes = 0;
    good(fdsl_stream_begin(source, &config, &stream));
    cr_expect_eq(fdsl_stream_save(stream, &state), FDSL_INVALID);
    cr_expect(strncmp(fdsl_error(), "stream: it is not open", 22) == 0, "%s", fdsl_error());
    cr_expect_eq(fdsl_stream_describe(stream, &info), FDSL_INVALID);
    fdsl_stream_cancel(stream);
    for (int i = 0; i < 2; i++) {
        while ((result = fdsl_stream_wait(stream, 0.01)) == FDSL_PENDING) {
        }
        cr_expect(result == FDSL_INVALID && strncmp(fdsl_error(), "lanes: ", 7) == 0, "%s", fdsl_error());
    }
    fdsl_stream_close(stream);
    config.lanes = 3;
    good(fdsl_stream_begin(source, &config, &stream));
    fdsl_stream_close(stream);
    cr_expect_eq(fdsl_stream_begin(NULL, &config, &stream), FDSL_INVALID);
    cr_expect_eq(fdsl_stream_begin(source, NULL, &stream), FDSL_INVALID);
    cr_expect_eq(fdsl_stream_begin(source, &config, NULL), FDSL_INVALID);
    fdsl_source_close(source);
}

/* A server accepts the connection and does not answer. Closing ends the opening, its threads and its
 * connection. */
Test(lib_stream, an_opening_can_be_given_up)
{
    int to;
    char url[64];
    struct fdsl_source_config config = source_config("none");
    const struct fdsl_stream_config stream = stream_config();
    struct fdsl_source_info info = {.size = sizeof info};
    struct fdsl_source *source;
    struct fdsl_stream *opened;
    snprintf(url, sizeof url, "http://127.0.0.1:%d/a-{0..3}.tar", silent_port(&to));
    setenv("no_proxy", "127.0.0.1", 1);
    config.path = url;
    for (int i = 0, files = 0, threads = 0; i < 3; i++) {
        good(fdsl_source_begin(&config, &source));
        const enum fdsl_status result = fdsl_source_wait(source, i * 0.3);
        if (result == FDSL_UNAVAILABLE)
            cr_skip_test("%s", fdsl_error());
        cr_expect_eq(result, FDSL_PENDING);
        cr_expect_eq(fdsl_source_describe(source, &info), FDSL_INVALID);
        cr_expect(strncmp(fdsl_error(), "source: it is not open", 22) == 0, "%s", fdsl_error());
        cr_expect_eq(fdsl_stream_open(source, &stream, &opened), FDSL_INVALID);
        cr_expect_null(fdsl_source_class(source, 0));
        const double begin_s = timer_now_s();
        fdsl_source_close(source);
        cr_expect_lt(timer_now_s() - begin_s, 2);
        if (i > 0) { /* the first opening loads the libraries */
            cr_expect_eq(files_now(), files);
            cr_expect_eq(threads_now(), threads);
        }
        files = files_now();
        threads = threads_now();
    }
    close(to);
}

/* A message names fields of a struct, never options of the program. Each case ends with an error or a warning
 * that contains `words`. */
Test(lib_stream, messages_name_fields)
{
    static const struct {
        const char *name, *image, *label, *fit, *cache, *words;
    } cases[] = {
        {"f", NULL, NULL, "crop", NULL, "lower out_res"},
        {"long", NULL, NULL, "center-crop", NULL, "set fit to"},
        {"half.tar", NULL, NULL, "resize", NULL, "as bytes"},
        {"two.tar", NULL, "json:b", "resize", NULL, "with label json:FIELD"},
        {"two.tar", NULL, "txt", "resize", NULL, "with label"},
        {"two.tar", "gif", NULL, "resize", NULL, "for image gif; its members are: json, png, txt"},
        {"two.tar", NULL, "lbl;cls", "resize", NULL, "for label lbl;cls; its members are: json, png, txt"},
        {"two.tar", "png:a", NULL, "resize", NULL, "which only label can"},
        {"empty", NULL, NULL, "resize", NULL, "no samples found"},
        {"lacks", NULL, NULL, "resize", NULL, "read the data set as shards"},
        {"w", NULL, NULL, "resize", NULL, "which are not images in class folders; the first is"},
        {"http://127.0.0.1:9/a.tar", NULL, NULL, "resize", "two.tar", "cache_dir"},
        {"http://127.0.0.1:9/a.tar", NULL, NULL, "resize", "none/cache", "cache_dir"},
    };
    prepare();
    EXPECT(
        0,
        "mkdir -p empty s long/a lacks/b w && cp -r f/* w && touch w/0000/readme.txt && "
        "cp -r f/0000 lacks && cp f/0000/$(ls f/0000 | head -1) s/0.png && echo '{\"a\": 1}' >s/0.json && "
        "printf 'one\\ntwo' >s/0.txt && tar cf two.tar -C s --sort=name . && "
        "python3 -c \"import struct, zlib; c = lambda t, d: struct.pack('>I', len(d)) + t + d + "
        "struct.pack('>I', zlib.crc32(t + d)); open('long/a/0.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + "
        "c(b'IHDR', struct.pack('>IIBBBBB', 16384, 2, 8, 0, 0, 0, 0)) + "
        "c(b'IDAT', zlib.compress(bytes(2 * 16385))) + c(b'IEND', b''))\" && "
        "$P --prepare half --samples 1 --shards 1 && mkdir h && tar xf half/*.tar -C h && echo 1 "
        ">h/000000.cls && tar cf half.tar -C h --sort=name .");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct fdsl_source_config from = source_config(cases[i].name);
        struct fdsl_stream_config config = stream_config();
        struct fdsl_source *source;
        struct fdsl_stream *stream = NULL;
        struct fdsl_batch *batch = NULL;
        char cache[PATH_MAX], text[8192];
        if (cases[i].cache) {
            snprintf(cache, sizeof cache, "%s/%s", folder, cases[i].cache);
            from.path = cases[i].name;
            from.cache_dir = cache;
        }
        from.image = cases[i].image;
        from.label = cases[i].label;
        config.fit = cases[i].fit;
        config.out_res = 64;
        enum fdsl_status result = fdsl_source_open(&from, &source);
        snprintf(text, sizeof text, "%s", fdsl_warnings());
        if (result == FDSL_OK)
            result = fdsl_stream_open(source, &config, &stream);
        if (result == FDSL_OK)
            result = fdsl_stream_next(stream, NULL, &batch);
        if (result != FDSL_OK)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s", fdsl_error());
        cr_expect(result == FDSL_UNAVAILABLE || (strstr(text, cases[i].words) && !strstr(text, "--")),
                  "case %zu: %s", i, text);
        fdsl_batch_release(batch, NULL);
        fdsl_stream_close(stream);
        fdsl_source_close(source);
    }
}

/* docs/examples/stream.c reads every sample of both epochs. */
Test(lib_stream, the_example_reads_a_folder)
{
    if (access("build/examples/stream", X_OK) != 0)
        cr_skip_test("build/examples/stream is missing");
    prepare();
    EXPECT(0,
           "%s/build/examples/stream f | awk '{ n += $5; e += $2 } END { print NR, n, e }' && "
           "! %s/build/examples/stream none 2>says && cat says",
           root, root);
    cr_expect_str_eq(out, "8 240 4\nstream: path none: No such file or directory\n");
}

/* The library prints nothing. */
Test(lib_stream, warnings_are_returned_and_not_printed)
{
    prepare();
    EXPECT(0, "mkdir w && cp -r f/* w && touch w/0000/readme.txt w/0001/notes.txt");
    char printed_path[PATH_MAX];
    snprintf(printed_path, sizeof printed_path, "%s/printed", folder);
    fflush(NULL);
    const int before = dup(2);
    FILE *printed = fopen(printed_path, "w+");
    cr_assert(printed && dup2(fileno(printed), 2) == 2);
    struct fdsl_source *source = opened_source("w");
    dup2(before, 2);
    cr_expect(strstr(fdsl_warnings(), "ignored 2 of"), "%s", fdsl_warnings());
    cr_expect_eq(lseek(fileno(printed), 0, SEEK_END), 0);
    fdsl_source_close(source);
    source = opened_source("f");
    cr_expect_str_eq(fdsl_warnings(), "");
    fdsl_source_close(source);
    EXPECT(0, "mkdir p && cp -r f p/val && cp -r f p/train");
    source = opened_source("p");
    cr_expect(strstr(fdsl_warnings(),
                     "its folders train and val become classes; if they contain class folders, "
                     "name one of them, such as ") &&
                  strstr(fdsl_warnings(), "p/train"),
              "%s", fdsl_warnings());
    fdsl_source_close(source);
    fclose(printed);
}
#endif
