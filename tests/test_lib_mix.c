/* Tests the mixtures of libfdsl.so (fdsl_source_mix()): the samples are those of the sources, states continue
 * on other numbers of ranks, and every wrong argument is an error that names it. */
#include "must.h"

#include "lib_support.h" /* included last, because `out` and `status` would shadow names in other headers */

TestSuite(lib_mix, .timeout = 120, .init = shell_set_up, .fini = shell_tear_down);

#if defined HAVE_PNG && defined HAVE_XXHASH
enum { SIDE = 96, BATCH = 12, ROOM = BATCH * 3 * SIDE * SIDE, DIGITS = 40 };

/* A folder of digits, shards of other digits, images, and their mixture. */
struct mixed {
    struct fdsl_source *parts[3], *source;
};

static struct fdsl_source *opened_set(const char *name)
{
    static char path[PATH_MAX];
    struct fdsl_source_config config;
    struct fdsl_source *source;
    good(fdsl_source_config_init(&config, sizeof config));
    snprintf(path, sizeof path, "%s/%s", folder, name);
    config.path = path;
    good(fdsl_source_open(&config, &source));
    return source;
}

static struct fdsl_source *opened_images(uint32_t res, const char *formula)
{
    struct fdsl_config config;
    struct fdsl_source *source;
    good(fdsl_config_init(&config, sizeof config));
    config.classes = 4;
    config.res = res;
    config.channels = 3;
    if (formula)
        config.formula = formula;
    else
        config.preset = "paper-1000"; /* whose images differ */
    good(fdsl_images_open(&config, 1, 0, &source));
    return source;
}

static const double weights[] = {0.5, 0.2, 0.3};
static const uint32_t classes[] = {0, 10, 0};

static struct fdsl_mix_config mix_config(struct fdsl_source *const *parts)
{
    struct fdsl_mix_config config;
    good(fdsl_mix_config_init(&config, sizeof config));
    config.sources = parts;
    config.weights = weights;
    config.count = 3;
    config.labels = "offset";
    config.classes = classes;
    return config;
}

static void open_mixed(struct mixed *mixed)
{
    EXPECT(0,
           "$P --prepare all --from digits --samples %d --store imagefolder && mkdir f && cp -r all/*/ f && "
           "$P --prepare m --from digits --samples 11 --encode png --store shards",
           DIGITS);
    mixed->parts[0] = opened_set("f");
    mixed->parts[1] = opened_set("m");
    mixed->parts[2] = opened_images(SIDE, NULL);
    const struct fdsl_mix_config config = mix_config(mixed->parts);
    good(fdsl_source_mix(&config, &mixed->source));
}

static void close_mixed(struct mixed *mixed)
{
    for (int k = 0; k < 3; k++)
        fdsl_source_close(mixed->parts[k]);
    fdsl_source_close(mixed->source);
}

static struct fdsl_stream_config stream_config(uint32_t ranks, uint32_t rank)
{
    struct fdsl_stream_config config;
    good(fdsl_stream_config_init(&config, sizeof config));
    config.batch_size = BATCH / ranks;
    config.world_size = ranks;
    config.rank = rank;
    config.seed = 9;
    config.out_res = SIDE;
    config.num_threads = 2;
    return config;
}

/* A batch in memory of the caller. */
struct filled {
    uint8_t images[ROOM];
    int64_t labels[BATCH];
    uint32_t count;
};

/* Fills the next batch of all ranks; `at` skips the end of an epoch. */
static void fill(struct fdsl_stream *const *streams, uint32_t ranks, struct filled *filled)
{
    filled->count = 0;
    for (uint32_t r = 0; r < ranks; r++) {
        uint32_t count;
        enum fdsl_status result;
        do
            result = fdsl_stream_fill(streams[r], filled->images + filled->count * 3 * SIDE * SIDE,
                                      filled->labels + filled->count, &count, NULL);
        while (result == FDSL_END);
        good(result);
        filled->count += count;
    }
}

Test(lib_mix, batches_have_all_sources_and_continue_on_other_ranks)
{
    struct mixed mixed;
    open_mixed(&mixed);
    struct fdsl_source_info info = {.size = sizeof info};
    good(fdsl_source_describe(mixed.source, &info));
    cr_expect_eq(info.samples, 2 * DIGITS);
    const struct fdsl_stream_config alone = stream_config(1, 0);
    struct fdsl_stream *stream = opened_stream(mixed.source, &alone);
    enum { STEPS = 2 * DIGITS / BATCH + 1, ALL = 3 * STEPS };
    struct filled *whole = calloc(ALL, sizeof *whole);
    struct fdsl_state *states = calloc(ALL, sizeof *states);
    uint32_t counts[3] = {0};
    for (int i = 0; i < ALL; i++) {
        states[i].size = sizeof states[i];
        good(fdsl_stream_save(stream, &states[i]));
        fill(&stream, 1, &whole[i]);
        for (uint32_t j = 0; j < whole[i].count; j++)
            counts[whole[i].labels[j] < 10 ? 0 : whole[i].labels[j] < 20 ? 1 : 2]++;
    }
    cr_expect_eq(counts[0], 3 * DIGITS);
    cr_expect(counts[1] >= 47 && counts[1] <= 49 && counts[2] >= 71 && counts[2] <= 73, "%u %u", counts[1],
              counts[2]);
    fdsl_stream_close(stream);
    for (uint32_t ranks = 1; ranks <= 4; ranks += ranks)
        for (int begin = 0; begin < ALL; begin += 4) {
            struct fdsl_stream *streams[4];
            struct filled now;
            for (uint32_t r = 0; r < ranks; r++) {
                const struct fdsl_stream_config config = stream_config(ranks, r);
                streams[r] = opened_stream(mixed.source, &config);
                good(fdsl_stream_load(streams[r], &states[begin]));
            }
            for (int i = begin; i < begin + 5 && i < ALL; i++) {
                fill(streams, ranks, &now);
                cr_assert_eq(now.count, whole[i].count);
                cr_assert(memcmp(now.labels, whole[i].labels, now.count * sizeof *now.labels) == 0 &&
                              memcmp(now.images, whole[i].images, now.count * 3 * SIDE * SIDE) == 0,
                          "%u ranks, step %d", ranks, i);
            }
            for (uint32_t r = 0; r < ranks; r++)
                fdsl_stream_close(streams[r]);
        }
    free(whole);
    free(states);
    close_mixed(&mixed);
}

/* Images of the mixture are those of the generator, from number 0 on. */
Test(lib_mix, images_never_repeat)
{
    struct mixed mixed;
    open_mixed(&mixed);
    struct fdsl_config config;
    struct fdsl_generator *generator;
    good(fdsl_config_init(&config, sizeof config));
    config.classes = 4;
    config.res = SIDE;
    config.channels = 3;
    config.preset = "paper-1000";
    config.batch = 1;
    good(fdsl_open(&config, &generator));
    const struct fdsl_stream_config alone = stream_config(1, 0);
    struct fdsl_stream *stream = opened_stream(mixed.source, &alone);
    struct filled batch;
    uint32_t seen[80] = {0};
    uint8_t image[3 * SIDE * SIDE];
    int64_t label;
    for (int i = 0; i < 3 * (2 * DIGITS / BATCH + 1); i++) {
        fill(&stream, 1, &batch);
        for (uint32_t j = 0; j < batch.count; j++)
            for (uint64_t n = 0; batch.labels[j] >= 20 && n < 80; n++) {
                good(fdsl_generate(generator, n, 1, image, &label, NULL));
                seen[n] += memcmp(image, batch.images + j * sizeof image, sizeof image) == 0 &&
                           label == batch.labels[j] - 20;
            }
    }
    uint32_t found = 0;
    while (found < 80 && seen[found] == 1)
        found++;
    cr_expect(found >= 71 && found <= 73, "the first %u images occur once", found);
    for (uint32_t n = found; n < 80; n++)
        cr_expect_eq(seen[n], 0);
    fdsl_stream_close(stream);
    fdsl_close(generator);
    close_mixed(&mixed);
}

static void refuse(const struct fdsl_mix_config *config, const char *words)
{
    struct fdsl_source *source = (struct fdsl_source *)1;
    cr_expect_eq(fdsl_source_mix(config, &source), FDSL_INVALID, "%s", words);
    cr_expect(strncmp(fdsl_error(), words, strlen(words)) == 0, "'%s' instead of '%s'", fdsl_error(), words);
    cr_expect_null(source);
}

Test(lib_mix, wrong_arguments_are_refused)
{
    struct mixed mixed;
    open_mixed(&mixed);
    const struct fdsl_mix_config plain = mix_config(mixed.parts);
    struct fdsl_mix_config config;
#define REFUSED(field, value, words) \
    do {                             \
        config = plain;              \
        config.field = value;        \
        refuse(&config, words);      \
    } while (0)
    REFUSED(size, 8, "config->size: ");
    REFUSED(count, 0, "count: ");
    REFUSED(count, 17, "count: ");
    REFUSED(sources, NULL, "sources: it is NULL");
    REFUSED(weights, NULL, "weights: it is NULL");
    REFUSED(weights, ((const double[]){0.5, -1, 1}), "weights: -1 is not a weight");
    REFUSED(weights, ((const double[]){0.33333, 1, 1}), "weights: 0.33333");
    REFUSED(weights, ((const double[]){0, 1, 1}), "weights: the weight of '0' is 0");
    REFUSED(epoch, 2, "epoch: '2' has no end");
    REFUSED(epoch, 3, "epoch: ");
    REFUSED(labels, "other", "labels: ");
    REFUSED(labels, NULL, "labels: ");
    REFUSED(classes, NULL, "classes: labels 'offset' needs the number of classes of source 1");
    REFUSED(classes, ((const uint32_t[]){9, 10, 0}), "classes: source 0 has 10 classes, not 9");
    REFUSED(classes, ((const uint32_t[]){10, INT32_MAX, 0}),
            "classes: sources 0 to 1 have 2147483657 classes");
    REFUSED(classes, ((const uint32_t[]){UINT32_MAX, 10, 0}),
            "classes: sources 0 to 0 have 4294967295 classes");
    REFUSED(change_count, 1, "change_steps: it is NULL");
    REFUSED(change_count, 16, "change_count: ");
    config = plain;
    config.change_count = 1;
    config.change_steps = (const uint64_t[]){0};
    config.change_weights = weights;
    refuse(&config, "change_steps: 0 is out of range");
    config.change_steps = (const uint64_t[]){5};
    config.change_weights = (const double[]){1, 1, 1};
    refuse(&config, "change_weights: the weights from step 5 on give '0' another share");
    config.change_weights = weights;
    refuse(&config, "change_weights: the weights from step 5 on give all sources the same shares");
    config.change_weights = (const double[]){0.5, 0.5};
    config.count = 2;
    config.classes = NULL;
    config.labels = "joined";
    refuse(&config, "change_weights: weights can change only among three sources");
    refuse(NULL, "config: it is NULL");
    cr_expect_eq(fdsl_source_mix(&plain, NULL), FDSL_INVALID);
    struct fdsl_source *others[3] = {mixed.parts[0], mixed.source, mixed.parts[2]};
    REFUSED(sources, others, "sources: source 1 has other sources itself");
    others[1] = NULL;
    REFUSED(sources, others, "sources: source 1 is NULL");
    others[0] = others[1] = mixed.parts[2];
    REFUSED(sources, others, "sources: all of them are generated");
    close_mixed(&mixed);
}

Test(lib_mix, streams_refuse_what_cannot_be_mixed)
{
    struct mixed mixed;
    struct fdsl_stream *stream;
    struct fdsl_source *other;
    open_mixed(&mixed);
    struct fdsl_stream_config config = stream_config(1, 0);
    config.mixup = 0.5;
    cr_expect_eq(fdsl_stream_open(mixed.source, &config, &stream), FDSL_INVALID);
    cr_expect(strncmp(fdsl_error(), "mixup: ", 7) == 0, "%s", fdsl_error());
    config = stream_config(1, 0);
    config.out_res = SIDE + 1;
    cr_expect_eq(fdsl_stream_open(mixed.source, &config, &stream), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "the images of source 2 of the mixture are u8 of 3x96x96"), "%s",
              fdsl_error());
    struct fdsl_source *const parts[] = {mixed.parts[0], opened_images(SIDE, "segrcdb"), mixed.parts[2]};
    struct fdsl_mix_config mix = mix_config(parts);
    mix.labels = "joined";
    good(fdsl_source_mix(&mix, &other));
    config = stream_config(1, 0);
    cr_expect_eq(fdsl_stream_open(other, &config, &stream), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "source 1 of the mixture has masks"), "%s", fdsl_error());
    fdsl_source_close(other);
    fdsl_source_close(parts[1]);
    /* A state of other weights is one of other data. */
    config = stream_config(1, 0);
    struct fdsl_state state = {.size = sizeof state};
    stream = opened_stream(mixed.source, &config);
    good(fdsl_stream_save(stream, &state));
    mix = mix_config(mixed.parts);
    mix.weights = (const double[]){0.5, 0.3, 0.2};
    good(fdsl_source_mix(&mix, &other));
    struct fdsl_stream *changed = opened_stream(other, &config);
    cr_expect_eq(fdsl_stream_load(changed, &state), FDSL_INVALID);
    fdsl_stream_close(changed);
    fdsl_stream_close(stream);
    fdsl_source_close(other);
    close_mixed(&mixed);
}
#endif
