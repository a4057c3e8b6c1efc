/* Tests how data sets are read into memory: several threads decode, and the result does not depend on their
 * number. */
#include "train/data.h"
#include "train/engine.h"

#include "shell.h"

#include <dirent.h>
#include <math.h>
#include <string.h>

TestSuite(data_fill, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* The sums over a large plane of large bytes need more than 32 bits. */
Test(data_fill, the_mean_of_bytes_is_exact)
{
    enum { SIDE = 600, PLANE = SIDE * SIDE };
    static uint8_t values[3 * PLANE];
    struct data data = {.shape = {3, 1, SIDE, SIDE}, .type = DTYPE_U8, .sample_bytes = sizeof values};
    data.sets[DATA_TRAIN] = (struct data_set){.count = 1, .values = values};
    memset(values, 255, sizeof values);
    for (size_t i = 0; i < PLANE; i += 3)
        values[i] = (uint8_t)i;
    data_normalise(&data, true);
    double sum = 0, squares = 0;
    for (size_t i = 0; i < PLANE; i++) {
        sum += values[i];
        squares += (double)values[i] * values[i];
    }
    double mean = sum / PLANE, deviation = sqrt(squares / PLANE - mean * mean);
    cr_expect_eq(data.scale[0], (float)(1 / deviation));
    cr_expect_eq(data.offset[0], (float)(-mean / deviation));
    cr_expect(data.scale[1] == 1 && data.offset[2] == -255, "a constant channel is only shifted");
}

#if defined HAVE_PNG && defined HAVE_XXHASH
static bool skips; /* --on-error skip */

static enum status open_with(const char *name, int threads, uint64_t train_size, struct data *data)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const struct data_request request = {.name = path,
                                         .skip = skips,
                                         .train_size = train_size,
                                         .fit = {.how = FIT_RESIZE, .res = 20, .channels = 3},
                                         .batch = 10,
                                         .feed = -1,
                                         .resources = {.threads = threads}};
    return data_open(&request, data);
}

/* Writes a data set to m/ as shards, and to f/ as files. It has 600 samples, which are read in several
 * requests.
 */
static void prepare_digits(void)
{
    EXPECT(0, "$P --prepare m --from digits --samples 600 --store shards --shards 2 && mkdir f && "
              "for tar in m/*.tar; do tar xf $tar -C f; done");
}

Test(data_fill, the_bits_do_not_depend_on_the_number_of_threads)
{
    static const char *const names[] = {"m", "f"};
    struct data one, several;
    prepare_digits();
    for (size_t n = 0; n < COUNT_OF(names); n++) {
        cr_assert_eq(open_with(names[n], 1, 0, &one), STATUS_OK, "%s", status_text());
        cr_assert_gt(one.sets[DATA_TRAIN].count, 512);
        for (int threads = 2; threads <= 5; threads += 3) {
            cr_assert_eq(open_with(names[n], threads, 0, &several), STATUS_OK, "%s", status_text());
            for (int part = 0; part < DATA_PARTS; part++) {
                const struct data_set *wanted = &one.sets[part], *found = &several.sets[part];
                cr_assert_eq(found->count, wanted->count);
                cr_expect_arr_eq(found->labels, wanted->labels, wanted->count * sizeof *wanted->labels);
                cr_expect_arr_eq(found->values, wanted->values, wanted->count * one.sample_bytes);
            }
            data_close(&several);
        }
        data_close(&one);
    }
}

/* If several samples are broken, the first one is reported. Samples that a set does not need are not
 * decoded. */
Test(data_fill, the_first_broken_sample_is_reported)
{
    struct data data;
    prepare_digits();
    EXPECT(0, "for i in 025 026 027 028 029 500; do echo no > f/000$i.png; done");
    for (int threads = 1; threads <= 5; threads++) {
        cr_assert_eq(open_with("f", threads, 0, &data), STATUS_FAILED);
        cr_expect(strstr(status_text(), "/f/000025.png: sample '000025': "), "%d threads: %s", threads,
                  status_text());
        data_close(&data);
        cr_assert_eq(open_with("f", threads, 20, &data), STATUS_OK, "%s", status_text());
        data_close(&data);
    }
}

/* Returns whether a set has the samples of `all` except those with the numbers in `lost`, in order. */
static bool lacks_only(const struct data *all, const struct data *some, enum data_part part,
                       const uint32_t *lost, uint32_t lost_count)
{
    uint32_t kept = 0, next = 0;
    for (uint32_t i = 0; i < all->sets[part].count; i++) {
        if (next < lost_count && lost[next] == i) {
            next++;
            continue;
        }
        if (kept == some->sets[part].count || all->sets[part].labels[i] != some->sets[part].labels[kept] ||
            memcmp(data_sample(all, part, i), data_sample(some, part, kept++), all->sample_bytes) != 0)
            return false;
    }
    return kept == some->sets[part].count && some->sets[part].skipped == lost_count;
}

/* Skipped samples leave no gap, and do not change which other samples a set takes. The result does not depend
 * on the number of threads. */
Test(data_fill, broken_samples_are_skipped_without_a_gap)
{
    static const uint32_t lost[] = {0, 20, 21, 255, 256};
    struct data some, all;
    prepare_digits();
    EXPECT(0, "mkdir -p g/train g/test && cp f/0000* g/test && cp f/* g/train && "
              "for i in 000 020 021 255 256; do echo no > g/train/000$i.png; done");
    EXPECT(0, "mkdir -p h/train && cp -r g/test h && cp f/* h/train");
    cr_assert_eq(open_with("h", 3, 0, &all), STATUS_OK, "%s", status_text());
    skips = true;
    for (int threads = 1; threads <= 5; threads += 2) {
        cr_assert_eq(open_with("g", threads, 0, &some), STATUS_OK, "%s", status_text());
        cr_expect(lacks_only(&all, &some, DATA_TRAIN, lost, 5), "%d threads", threads);
        cr_expect(lacks_only(&all, &some, DATA_TEST, NULL, 0), "%d threads", threads);
        data_close(&some);
        cr_assert_eq(open_with("g", threads, 256, &some), STATUS_OK, "%s", status_text());
        cr_expect(some.sets[DATA_TRAIN].count == 252 && some.sets[DATA_TRAIN].skipped == 4, "%u and %u",
                  some.sets[DATA_TRAIN].count, some.sets[DATA_TRAIN].skipped);
        data_close(&some);
    }
    data_close(&all);
}

#ifdef _OPENMP
/* Returns the number of threads of this process. */
static int thread_count(void)
{
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry; tasks && (entry = readdir(tasks));)
        count += *entry->d_name != '.';
    cr_assert(tasks && closedir(tasks) == 0);
    return count;
}

/* OpenMP keeps its threads after a parallel region. */
Test(data_fill, all_threads_decode)
{
    struct data data;
    prepare_digits();
    int before = thread_count();
    cr_assert_eq(open_with("m", 4, 0, &data), STATUS_OK, "%s", status_text());
    data_close(&data);
    cr_expect_eq(thread_count() - before, 3);
}
#endif

/* ---- Holding out samples ---- */

/* Opens a data set of which `share` of each class is held out. */
static void open_shared(const char *name, double share, struct data *data)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const struct data_request request = {
        .name = path, .test_share = share, .batch = 1, .feed = -1, .resources = {.threads = 1}};
    cr_assert_eq(data_open(&request, data), STATUS_OK, "%s", status_text());
}

static uint32_t count_label(const struct data *data, enum data_part part, uint32_t label)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < data->sets[part].count; i++)
        count += data->sets[part].labels[i] == label;
    return count;
}

/* Returns how many test samples of `one` are in the test set of `other`, by their pixels. */
static uint32_t shared_tests(const struct data *one, const struct data *other)
{
    uint32_t shared = 0;
    for (uint32_t i = 0; i < one->sets[DATA_TEST].count; i++)
        for (uint32_t k = 0; k < other->sets[DATA_TEST].count; k++)
            if (memcmp(data_sample(one, DATA_TEST, i), data_sample(other, DATA_TEST, k), one->sample_bytes) ==
                0) {
                shared++;
                break;
            }
    return shared;
}

/* Writes 600 digits to f/, and classes of these sizes to c/. */
static const uint32_t class_sizes[] = {1, 2, 4, 5, 14, 15, 100};
static void prepare_classes(void)
{
    prepare_digits();
    for (uint32_t c = 0, next = 0; c < COUNT_OF(class_sizes); next += class_sizes[c++])
        EXPECT(0, "mkdir -p c/%u && for i in $(seq -f %%06g %u %u); do cp f/$i.png c/%u; done", c, next,
               next + class_sizes[c] - 1, c);
}

Test(data_fill, every_class_gives_its_share_to_the_test_set)
{
    static const struct {
        double share;
        uint32_t held[COUNT_OF(class_sizes)];
    } cases[] = {{0, {0, 1, 1, 1, 1, 2, 10}}, /* a tenth */
                 {0.5, {0, 1, 2, 3, 7, 8, 50}},
                 {0.99, {0, 1, 3, 4, 13, 14, 99}},
                 {0.001, {0, 1, 1, 1, 1, 1, 1}}};
    struct data data;
    prepare_classes();
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        open_shared("c", cases[i].share, &data);
        for (uint32_t c = 0; c < COUNT_OF(class_sizes); c++) {
            cr_expect_eq(count_label(&data, DATA_TEST, c), cases[i].held[c], "%g: class %u", cases[i].share,
                         c);
            cr_expect_eq(count_label(&data, DATA_TRAIN, c), class_sizes[c] - cases[i].held[c]);
        }
        cr_expect(data.split);
        data_close(&data);
    }
}

/* A new sample replaces at most one held-out sample, and only in its class. The order of the samples, and
 * whether they are in shards, do not matter. */
Test(data_fill, the_held_out_samples_are_stable)
{
    struct data data, more;
    prepare_classes();
    open_shared("c", 0, &data);
    EXPECT(0, "cp f/000500.png c/6/000000.png && cp f/000501.png c/4/z.png");
    open_shared("c", 0, &more);
    cr_expect_eq(more.sets[DATA_TEST].count, data.sets[DATA_TEST].count + 1); /* 2 of 15 instead of 1 of 14 */
    cr_expect_geq(shared_tests(&data, &more), data.sets[DATA_TEST].count - 1);
    data_close(&data);
    data_close(&more);
    open_shared("m", 0, &data);
    EXPECT(0, "mkdir other && cp m/digits-000000.tar other/b.tar && cp m/digits-000001.tar other/a.tar");
    static const char *const names[] = {"f", "other"};
    for (size_t n = 0; n < COUNT_OF(names); n++) {
        open_shared(names[n], 0, &more);
        cr_expect(more.sets[DATA_TEST].count == 60 && data.sets[DATA_TEST].count == 60);
        cr_expect_eq(shared_tests(&data, &more), 60, "%s", names[n]);
        data_close(&more);
    }
    data_close(&data);
}
#endif

/* Engines on GPUs write the labels of a batch of the caller from its first number on, so a shuffle would give
 * them to other samples. */
Test(data_fill, samples_that_are_handed_over_have_consecutive_numbers)
{
    struct given given = {.shape = {1, 1, 2, 2}, .type = DTYPE_U8, .classes = 10, .samples = 150};
    struct data data = {.lanes = 8, .shuffle = 1000};
    cr_assert_eq(given_open(&given, 64, &data), STATUS_OK);
    const struct train train = {.data = &data, .seed = 7, .batch = 64};
    for (uint32_t epoch = 0; epoch < 3; epoch++) {
        const struct draw_order order = train_order(&train, epoch);
        for (uint32_t i = 0; i < given.samples; i++)
            cr_assert_eq(train_sample_at(data.feed, &order, 0, i), i, "epoch %u, sample %u", epoch, i);
    }
    data_close(&data);
}
