/* Tests of the sources of streams: files of records, arrays and clips, generated samples, a constant batch.
 * Whatever the source is, an epoch has each sample once. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "core/timer.h"
#include "data/dataset.h"
#include "data/generated_stream.h"
#include "data/labelled_files.h"
#include "data/npy.h"
#include "data/set_stream.h"
#include "must.h"
#include "train/feed.h"
#include "train_support.h"

#include "shell.h" /* included last, because its `out` and `status` would shadow names in other headers */

#include "cells.h"

TestSuite(sources, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* ---- Files of records ---- */

#define SIDE 6
enum { IMAGES = 97, IMAGE_BYTES = SIDE * SIDE, RECORDS = 31 };

/* The values of image `i`. */
static uint8_t pixel(uint32_t i, uint32_t at)
{
    return (uint8_t)(i * 37 + at * 11 + (i * at) % 13);
}

/* Writes IDX files of `count` images into the folder. */
static void put_idx(const char *name, const char *set, uint8_t count)
{
    static uint8_t images[16 + 255 * IMAGE_BYTES], labels[8 + 255];
    const uint8_t head[16] = {0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, SIDE, 0, 0, 0, SIDE};
    const uint8_t label_head[8] = {0, 0, 8, 1, 0, 0, 0, count};
    char path[PATH_MAX];
    memcpy(images, head, sizeof head);
    memcpy(labels, label_head, sizeof label_head);
    for (uint32_t i = 0; i < count; i++) {
        labels[8 + i] = (uint8_t)(i * 3 % 10);
        for (uint32_t at = 0; at < IMAGE_BYTES; at++)
            images[16 + i * IMAGE_BYTES + at] = pixel(i, at);
    }
    snprintf(path, sizeof path, "%s/%s-images-idx3-ubyte", name, set);
    put(path, images, 16 + (size_t)count * IMAGE_BYTES);
    snprintf(path, sizeof path, "%s/%s-labels-idx1-ubyte", name, set);
    put(path, labels, 8 + (size_t)count);
}

/* Writes a CIFAR file whose first image has number `first`. */
static void put_cifar(const char *name, uint32_t first, uint32_t count)
{
    uint8_t *records = malloc(count * (1 + CIFAR_IMAGE_BYTES));
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *record = records + i * (1 + CIFAR_IMAGE_BYTES);
        record[0] = (uint8_t)((first + i) * 3 % 10);
        for (uint32_t at = 0; at < CIFAR_IMAGE_BYTES; at++)
            record[1 + at] = pixel(first + i, at);
    }
    put(name, records, count * (1 + CIFAR_IMAGE_BYTES));
    free(records);
}

/* Writes MNIST's files to m/ (plain) and CIFAR-10's to c/, in two files of the training set. */
static void put_records(void)
{
    EXPECT(0, "mkdir m c");
    put_idx("m", "train", IMAGES);
    put_idx("m", "t10k", 9);
    put_cifar("c/data_batch_2.bin", 0, RECORDS);
    put_cifar("c/data_batch_5.bin", RECORDS, IMAGES - RECORDS);
    put_cifar("c/test_batch.bin", 0, 9);
}

/* Lists the samples in order, in steps of 10. */
static uint32_t list_in_order(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    (void)context, (void)epoch;
    uint32_t count = 0;
    while (count < 10 && step * 10 + count < IMAGES) {
        numbers[count] = (uint32_t)step * 10 + count;
        count++;
    }
    return count;
}

static struct dataset dataset;

/* Opens a stream of a training set of records. */
static void open_records(const char *name, uint32_t res, int threads, struct stream **stream)
{
    char path[PATH_MAX];
    struct members choice;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    must(members_parse(RECORD_EXTENSION, NULL, NULL, &choice));
    const struct record_format *format = record_format_find(path);
    cr_assert_not_null(format);
    must(dataset_find_records(path, format, false, &choice, &dataset));
    must(dataset_check(path, &dataset));
    cr_assert_eq(dataset.sample_count, IMAGES);
    const struct set_stream_request request = {
        .dataset = &dataset,
        .fit = {.how = FIT_RESIZE, .res = res, .channels = dataset.raw.channels},
        .channels = dataset.raw.channels,
        .depth = 1,
        .height = res ? res : dataset.raw.height,
        .width = res ? res : dataset.raw.width,
        .type = DTYPE_U8,
        .plan = {.steps = (IMAGES + 9) / 10, .capacity = 10, .list = list_in_order},
        .threads = threads,
        .ahead = 2};
    must(set_stream_open(&request, stream));
}

static void expect_records(const char *name, uint32_t image_bytes)
{
    for (int threads = 1; threads <= 3; threads++) {
        struct stream *stream;
        struct stream_batch batch;
        open_records(name, 0, threads, &stream);
        for (uint32_t n = 0; n < IMAGES; n += 10) {
            must(stream_next(stream, &batch));
            cr_assert_eq(batch.samples.stride, image_bytes);
            for (uint32_t j = 0; j < batch.samples.count; j++) {
                const uint8_t *values = (const uint8_t *)batch.samples.values + j * image_bytes;
                cr_expect_eq(batch.samples.labels[j], (int32_t)((n + j) * 3 % 10));
                for (uint32_t at = 0; at < image_bytes; at++)
                    cr_assert_eq(values[at], pixel(n + j, at), "%s: image %u, byte %u", name, n + j, at);
            }
            must(stream_release(stream, &batch, NULL));
        }
        struct stream_stats stats;
        stream_stats(stream, &stats);
        cr_expect(stats.samples == IMAGES && stats.bytes >= (uint64_t)IMAGES * image_bytes);
        stream_close(stream);
        dataset_close(&dataset);
    }
}

/* The list of the records and their bytes must be of one version of a file. */
Test(sources, a_file_that_is_replaced_after_it_was_listed_is_an_error)
{
    static const char *const sets[] = {"m", "c"}, *const files[] = {"train-images-idx3-ubyte",
                                                                    "data_batch_5.bin"};
    put_records();
    for (size_t i = 0; i < 2; i++) {
        struct members members;
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/%s", folder, sets[i]);
        must(members_parse(RECORD_EXTENSION, NULL, NULL, &members));
        must(dataset_find_records(path, record_format_find(path), false, &members, &dataset));
        EXPECT(0, "cd %s && cp %s new && mv new %s", sets[i], files[i], files[i]);
        cr_expect_eq(dataset_check(path, &dataset), STATUS_FAILED);
        cr_expect(strstr(status_text(), files[i]) &&
                      strstr(status_text(), "changed while the data set was opened"),
                  "%s", status_text());
        dataset_close(&dataset);
    }
}

Test(sources, records_are_the_bytes_of_their_files)
{
    put_records();
    expect_records("m", IMAGE_BYTES);
    expect_records("c", CIFAR_IMAGE_BYTES);
#ifdef HAVE_ZLIB
    EXPECT(0, "gzip m/*");
    expect_records("m", IMAGE_BYTES);
    EXPECT(0, "gunzip m/train-labels*");
    expect_records("m", IMAGE_BYTES);
#endif
}

/* A batch must never mix two versions of a file. The unpacked copy of a gzipped file does not change. */
Test(sources, files_of_records_must_not_change)
{
    static const char *const names[] = {"m", "c"};
    put_records();
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        struct stream *stream;
        struct stream_batch batch;
        open_records(names[i], 0, 2, &stream);
        EXPECT(0,
               "for f in %s/train-images* %s/data_batch_2*; do [ ! -e $f ] || printf x | dd of=$f bs=1 "
               "seek=2000 conv=notrunc 2>says; done",
               names[i], names[i]);
        cr_expect_eq(stream_next(stream, &batch), STATUS_FAILED, "%s", names[i]);
        cr_expect(strstr(status_text(), "changed after the data set was opened"), "%s", status_text());
        stream_close(stream);
        dataset_close(&dataset);
    }
}

static void expect_fault(const char *name, enum status wanted, const char *words)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    cr_expect_eq(dataset_find_records(path, record_format_find(path), false, NULL, &dataset), wanted, "%s",
                 words);
    cr_expect(strstr(status_text(), words), "%s: %s", words, status_text());
    dataset_close(&dataset);
}

Test(sources, faults_of_records_name_the_file)
{
    put_records();
    EXPECT(0, "truncate -s -1 m/train-images-idx3-ubyte");
    expect_fault("m", STATUS_FAILED, "m/train-images-idx3-ubyte: its IDX header requires 3508 bytes");
    EXPECT(0, "printf 'version https://git-lfs.github.com/spec/v1\\noid' >m/train-images-idx3-ubyte");
    expect_fault("m", STATUS_FAILED, "m/train-images-idx3-ubyte: a Git LFS pointer");
    put_idx("m", "train", IMAGES);
    EXPECT(0, "rm m/train-labels-idx1-ubyte");
    expect_fault("m", STATUS_FAILED, "m/train-labels-idx1-ubyte: cannot be read");
    EXPECT(0, "mv m/train-images-idx3-ubyte x");
    expect_fault("m", STATUS_USAGE, "there is no train-images-idx3-ubyte");
    EXPECT(0, "mkdir m/train-images-idx3-ubyte");
    expect_fault("m", STATUS_FAILED, "m/train-images-idx3-ubyte: not a regular file");
    EXPECT(0, "printf '\\017' | dd of=c/data_batch_5.bin bs=1 seek=6146 conv=notrunc 2>says");
    expect_fault("c", STATUS_FAILED, "c/data_batch_5.bin: not a binary CIFAR-10 file: record 2 has label 15");
    EXPECT(0, "ln -sf data_batch_2.bin c/data_batch_5.bin");
    expect_fault("c", STATUS_USAGE, "'data_batch_2.bin' and 'data_batch_5.bin' are the same file");
    EXPECT(0, "mkdir none");
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/none", folder);
    cr_expect_null(record_format_find(path));
}

/* ---- Every source: each sample once per epoch ---- */

enum { SAMPLES = 60, STEP = 14 };

/* The data of a case, opened for its feed. `name` is a folder, or generated data. */
struct source_case {
    const char *name;
    enum data_feed feed;
    bool fresh;
};

static void open_case(const struct source_case *of, struct data *data)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, of->name);
    const struct data_request request = {.name = data_is_generated(of->name) ? of->name : path,
                                         .train_size = SAMPLES,
                                         .test_size = 8,
                                         .classes = 10,
                                         .res = 12,
                                         .batch = STEP,
                                         .feed = (int)of->feed,
                                         .fresh = of->fresh,
                                         .lanes = 1,
                                         .shuffle = 40,
                                         .ahead = 2,
                                         .resources = {.threads = 2}};
    must(data_open(&request, data));
    cr_assert_eq(data->sets[DATA_TRAIN].count, SAMPLES);
}

/* What stream_batch.read must be. */
static uint64_t wanted_hash(const struct data *data, uint32_t epoch, uint32_t number)
{
    if (data->feed == DATA_LOAD)
        return data_read_hash(data, 0, number);
    const uint32_t sample = number % SAMPLES;
    return generated_stream_hash(data->feed == DATA_LIVE ? data_number(data->fresh, epoch, sample) : sample,
                                 number);
}

/* Takes an epoch of all ranks. Counts each sample in `seen`, and adds the hashes to `sum`. */
static void take_epoch(const struct train *train, uint32_t ranks, int threads, uint32_t epoch, uint32_t *seen,
                       uint64_t *sum)
{
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct train own = *train;
        struct feed_stream feed;
        struct stream_batch batch;
        struct train_totals totals = {0};
        uint32_t numbers[SAMPLES];
        own.rank = rank;
        own.ranks = ranks;
        const struct draw_order order = train_order(&own, epoch);
        must(feed_stream_open(&own, threads, 1, DECODER_CPU, NULL, NULL, &feed));
        for (uint32_t step = 0; step < train_steps(&own); step++) {
            const uint32_t count = train_batch(&own, &order, step, numbers);
            must(feed_stream_next(&feed, epoch, step, numbers, count, &batch));
            for (uint32_t j = 0; j < count; j++) {
                seen[batch.numbers[j]]++;
                cr_expect_eq(batch.samples.labels[j],
                             (int32_t)own.data->sets[DATA_TRAIN].labels[batch.numbers[j]]);
            }
            must(stream_release(feed.stream, &batch, NULL));
        }
        feed_stream_totals(&feed, &totals);
        *sum += totals.delivered;
        feed_stream_close(&feed);
    }
}

static void expect_once(const struct data *data, uint32_t ranks, bool drop_last, int threads)
{
    struct model model = {.classes = 10};
    const uint32_t epoch = 2, steps = drop_last ? SAMPLES / STEP : (SAMPLES - 1) / STEP + 1;
    const bool constant = data->feed == DATA_CONSTANT;
    uint32_t seen[SAMPLES] = {0};
    uint64_t sum = 0, wanted = 0;
    const struct train train = {
        .model = &model, .data = data, .seed = 9, .batch = STEP, .drop_last = drop_last};
    take_epoch(&train, ranks, threads, epoch, seen, &sum);
    const struct draw_order order = train_order(&train, epoch);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const bool has = i < steps * STEP;
        const uint32_t n = constant ? i % STEP : draw_order_at(&order, i); /* constant: the first batch */
        wanted += has ? wanted_hash(data, epoch, n) : 0;
        if (!constant)
            cr_expect_eq(seen[n], has, "%u ranks: sample %u: %u times", ranks, n, seen[n]);
        else
            cr_expect(i < STEP || seen[i] == 0);
    }
    cr_expect_eq(sum, wanted, "%u ranks, %u lanes, %d threads, drop_last %d", ranks, data->lanes, threads,
                 drop_last);
}

static void expect_all_once(const struct source_case *of)
{
    static const uint32_t lanes[] = {1, 3, 64};
    struct data data;
    open_case(of, &data);
    for (uint32_t ranks = 1; ranks <= 5; ranks++)
        for (int drop_last = 0; drop_last <= 1; drop_last++)
            for (size_t l = 0; l < (of->feed == DATA_LOAD ? COUNT_OF(lanes) : 1); l++)
                for (int threads = 1; threads <= 3; threads++) {
                    data.lanes = lanes[l];
                    expect_once(&data, ranks, drop_last, threads);
                }
    data_close(&data);
}

Test(sources, each_record_occurs_once_per_epoch)
{
    put_records();
    expect_all_once(&(struct source_case){"m", DATA_LOAD, false});
    expect_all_once(&(struct source_case){"c", DATA_LOAD, false});
}

Test(sources, each_generated_sample_occurs_once_per_epoch)
{
    expect_all_once(&(struct source_case){"synth", DATA_LIVE, false});
    expect_all_once(&(struct source_case){"synth", DATA_LIVE, true});
}

Test(sources, a_constant_feed_repeats_its_first_batch)
{
    put_records();
    expect_all_once(&(struct source_case){"synth", DATA_CONSTANT, false});
    expect_all_once(&(struct source_case){"m", DATA_CONSTANT, false});
}

#ifdef HAVE_XXHASH
/* ---- Arrays and clips ---- */

Test(sources, each_file_occurs_once_per_epoch)
{
    EXPECT(0, "$P --prepare i --from digits --samples 100 --encode npy --store files && "
              "$P --prepare s --from clips --samples 100 --shards 3");
    expect_all_once(&(struct source_case){"i", DATA_LOAD, false});
    expect_all_once(&(struct source_case){"s", DATA_LOAD, false});
}

/* Writes 20 arrays of each of two classes; `length` values of `type` each. */
static void put_arrays(const char *name, const char *type, const char *shape, uint32_t length, uint32_t bytes)
{
    static uint8_t file[NPY_HEADER_MAX + 8 * 1024];
    char path[PATH_MAX];
    EXPECT(0, "mkdir -p %s/0 %s/1", name, name);
    for (uint32_t i = 0; i < 40; i++) {
        const size_t head = npy_header_make((char *)file, type, shape);
        for (uint32_t at = 0; at < length; at++) {
            const uint32_t n = (i * 29 + at * 7) % 100;
            const uint16_t half = (uint16_t)(0x3C00 + n);
            const float single = (float)n / 16;
            memcpy(file + head + at * bytes,
                   bytes == 1   ? (const void *)&n
                   : bytes == 2 ? (const void *)&half
                                : (const void *)&single,
                   bytes);
        }
        snprintf(path, sizeof path, "%s/%u/%02u.npy", name, i % 2, i);
        put(path, file, head + length * bytes);
    }
}

/* With --train-size, the first samples of each class are read: stored data have the same ones. */
Test(sources, arrays_and_clips_are_those_of_stored_data)
{
    static const struct {
        const char *name, *type, *shape;
        uint32_t length, bytes;
    } cases[] = {{"bytes", "|u1", "3, 5, 4", 60, 1},
                 {"gray", "|u1", "5, 4", 20, 1},
                 {"halves", "<f2", "2, 5, 4", 40, 2},
                 {"clips2", "<f2", "1, 3, 5, 4", 60, 2},
                 {"clips3", "|u1", "2, 3, 5, 4", 120, 1}};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        put_arrays(cases[c].name, cases[c].type, cases[c].shape, cases[c].length, cases[c].bytes);
        EXPECT(0, "$P --prepare s%s --from dataset --source %s --shards 3 --name s", cases[c].name,
               cases[c].name);
        for (int shards = 0; shards <= 1; shards++) {
            char path[PATH_MAX];
            struct data load, stored;
            struct model model = {.classes = 2};
            struct feed_stream feed;
            struct stream_batch batch;
            uint32_t numbers[40];
            snprintf(path, sizeof path, "%s/%s%s", folder, shards ? "s" : "", cases[c].name);
            struct data_request request = {.name = path,
                                           .batch = 40,
                                           .feed = DATA_LOAD,
                                           .lanes = 3,
                                           .shuffle = 9,
                                           .ahead = 1,
                                           .resources = {.threads = 2}};
            must(data_open(&request, &load));
            request.feed = DATA_STORED;
            must(data_open(&request, &stored));
            cr_assert(load.sample_bytes == cases[c].length * cases[c].bytes &&
                      load.sets[DATA_TRAIN].count == stored.sets[DATA_TRAIN].count);
            const struct train train = {.model = &model, .data = &load, .seed = 9, .batch = 36};
            const struct draw_order order = train_order(&train, 0);
            const uint32_t count = train_batch(&train, &order, 0, numbers);
            must(feed_stream_open(&train, 2, 1, DECODER_CPU, NULL, NULL, &feed));
            must(feed_stream_next(&feed, 0, 0, numbers, count, &batch));
            cr_assert_eq(count, 36);
            for (uint32_t j = 0; j < count; j++) {
                cr_expect_arr_eq((const uint8_t *)batch.samples.values + j * load.sample_bytes,
                                 data_sample(&stored, DATA_TRAIN, batch.numbers[j]), load.sample_bytes);
                cr_expect_eq(batch.samples.labels[j],
                             (int32_t)stored.sets[DATA_TRAIN].labels[batch.numbers[j]]);
            }
            feed_stream_close(&feed);
            data_close(&load);
            data_close(&stored);
        }
    }
}

/* Networks do not take floats, but a stream does. A value that is not finite is a fault of the sample. */
Test(sources, a_stream_of_floats)
{
    char path[PATH_MAX];
    struct members choice;
    struct stream *stream;
    struct stream_batch batch;
    put_arrays("f", "<f4", "2, 5, 4", 40, 4);
    snprintf(path, sizeof path, "%s/f", folder);
    for (int broken = 0; broken <= 1; broken++) {
        must(members_parse(NULL, NULL, NULL, &choice));
        must(dataset_open(path, false, &choice, NULL, &dataset));
        const struct set_stream_request request = {
            .dataset = &dataset,
            .channels = 2,
            .depth = 1,
            .height = 5,
            .width = 4,
            .type = DTYPE_F32,
            .plan = {.steps = 4, .capacity = 10, .list = list_in_order},
            .threads = 2,
            .ahead = 1};
        must(set_stream_open(&request, &stream));
        cr_expect_eq(stream_next(stream, &batch), broken ? STATUS_FAILED : STATUS_OK);
        cr_expect(!broken || strstr(status_text(), "f/0/04.npy: its value number 39 of 40 is NaN"), "%s",
                  status_text());
        for (uint32_t at = 0; !broken && at < 40; at++)
            cr_expect_eq(((const float *)batch.samples.values)[40 + at],
                         (float)((2 * 29 + at * 7) % 100) / 16);
        stream_close(stream);
        dataset_close(&dataset);
        EXPECT(0, "printf '\\001\\000\\300\\177' | dd of=f/0/04.npy bs=1 seek=$(($(stat -c %%s f/0/04.npy) - "
                  "4)) conv=notrunc 2>says");
    }
    run("$P --variant train-naive --model logreg --data f --feed load");
    cr_expect(status == 1 &&
                  says("f/0/00.npy: its npy is neither a PNG or JPEG image nor an array of |u1 or"),
              "%s", out);
}

Test(sources, arrays_of_other_shapes_are_refused)
{
    put_arrays("b", "|u1", "3, 5, 4", 60, 1);
    put_arrays("v", "<f2", "1, 3, 5, 4", 60, 2);
    EXPECT(0, "cp v/0/00.npy b/0/99.npy");
    run("$P --variant train-naive --model logreg --data b --feed load --on-error mask");
    cr_expect(status == 2 && says("b/0/99.npy: it is f16 of 1x3x5x4"), "%s", out);
    put_arrays("w", "<f2", "1, 3, 4, 5", 60, 2);
    EXPECT(0, "cp w/1/01.npy v/1/99.npy");
    run("$P --variant train-naive --model cnn3d --data v --feed load");
    cr_expect(status == 2 && says("v/1/99.npy: it is f16 of 1x3x4x5"), "%s", out);
}
#endif

/* ---- The command ---- */

#ifdef _OPENMP
#define ENGINE "train-omp"
#else
#define ENGINE "train-naive"
#endif

/* The order of --feed load is another one, so the results of a whole-set step are compared. */
Test(sources, records_are_trained_on_as_they_are_read)
{
    static const char *const names[] = {"m", "c"};
    put_records();
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        char loss[2][64], one[64];
        for (int load = 0; load <= 1; load++) {
            EXPECT(0,
                   "$P --variant " ENGINE " --model logreg --data %s --feed %s --batch %d --epochs 1 --raw "
                   "--format csv",
                   names[i], load ? "load" : "stored", IMAGES);
            snprintf(loss[load], sizeof *loss, "%.5s", value(out, 1, "train_loss"));
            cr_expect_str_eq(value(out, 1, "train_samples"), "97");
            cr_expect_str_eq(value(out, 1, "skipped"), "");
        }
        cr_expect_str_eq(loss[0], loss[1]);
        for (int threads = 1; threads <= 3; threads++) {
            EXPECT(0,
                   "$P --variant " ENGINE " --model logreg --data %s --feed load --batch 16 --epochs 2 "
                   "--threads %d --verify --format csv",
                   names[i], threads);
            cr_expect_str_eq(value(out, 2, "wrong"), "0");
            if (threads > 1)
                cr_expect_str_eq(value(out, 2, "train_loss"), one);
            snprintf(one, sizeof one, "%s", value(out, 2, "train_loss"));
        }
    }
    run("$P --variant train-naive --model logreg --data m --image png");
    cr_expect(status == 2 &&
                  says("--image and --label are for class folders and tar shards, but --data m has"),
              "%s", out);
    run("$P --variant train-naive --model logreg --data c --on-error skip");
    cr_expect(status == 2 && says("the folder has files of CIFAR-10; drop --on-error"), "%s", out);
    EXPECT(0, "cp -r m other && printf '\\4\\0\\0\\0\\11' | dd of=other/t10k-images-idx3-ubyte bs=1 seek=11 "
              "conv=notrunc "
              "2>/dev/null");
    for (size_t i = 0; i < 2; i++) {
        static const char *const feeds[] = {"stored", "load"};
        run("$P --variant train-naive --model logreg --data other --feed %s", feeds[i]);
        cr_expect(status == 2 && says("are 6 x 6 pixels in the training set, but 4 x 9 in the test set"),
                  "%s", out);
    }
    run("$P --variant train-naive --model logreg --data c --test-data m");
    cr_expect(status == 2 && says("--data c has files of CIFAR-10, with a test set of their own"), "%s", out);
}

#ifdef HAVE_XXHASH
/* A gzipped file has the same samples as the plain one. */
Test(sources, training_on_records_resumes_with_the_same_bits)
{
#define RECORDS_RUN "$P --variant train-naive --model logreg --feed load --batch 16 --format csv "
    char loss[64];
    put_records();
    EXPECT(0, RECORDS_RUN "--data m --epochs 2");
    snprintf(loss, sizeof loss, "%s", value(out, 2, "train_loss"));
    EXPECT(0, RECORDS_RUN "--data m --epochs 1 --checkpoint k");
#ifdef HAVE_ZLIB
    EXPECT(0, "gzip m/*");
#endif
    EXPECT(0, "cp -r k k2 && " RECORDS_RUN "--data m --epochs 2 --threads 3 --checkpoint k --resume");
    cr_expect_str_eq(value(out, 1, "train_loss"), loss);
    put_idx("m", "train", IMAGES - 1);
    run(RECORDS_RUN "--data m --epochs 2 --checkpoint k2 --resume");
    cr_expect(status == 2 && says("the samples of --data m have changed"), "%s", out);
}
#endif

/* ---- Generated streams ---- */

/* A generator of samples of 8 bytes. */
struct counting {
    struct generator generator;
    uint64_t refused; /* a sample that it cannot make */
    uint32_t calls, closed;
};

static uint64_t value_of(uint64_t sample)
{
    return stream_hash(sample + 5);
}

static enum status count_make(struct generator *generator, const struct generator_numbers *numbers,
                              uint32_t count, void *samples, const struct generator_targets *targets,
                              void *stream)
{
    struct counting *self = (struct counting *)generator;
    (void)stream;
    self->calls++;
    for (uint32_t j = 0; j < count; j++) {
        if (numbers->list[j] == self->refused)
            return status_set(STATUS_FAILED, "sample %llu is refused", (unsigned long long)self->refused);
        ((uint64_t *)samples)[j] = value_of(numbers->list[j]);
        if (targets && targets->labels)
            targets->labels[j] = (int64_t)(numbers->list[j] % 7);
    }
    return STATUS_OK;
}

static uint64_t count_bytes(const struct generator *generator)
{
    (void)generator;
    return 1000;
}

static void count_close(struct generator *generator)
{
    ((struct counting *)generator)->closed++;
}

static const struct generator_type counting_type = {count_make, count_bytes, count_close};

enum { PLANNED = 23, BATCH = 5, STEPS = 5, FRESH = 1000 };

/* Epochs of PLANNED samples, each in another order. */
static uint32_t list_shuffled(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    (void)context;
    const struct draw_order order = draw_order(4, (uint32_t)epoch, PLANNED);
    uint32_t count = 0;
    for (; count < BATCH && step * BATCH + count < PLANNED; count++)
        numbers[count] =
            draw_order_at(&order, (uint32_t)step * BATCH + count) + (uint32_t)(epoch % 2) * PLANNED;
    return count;
}

static struct counting counting;

static void open_counting(uint32_t ahead, uint32_t held, struct stream **stream)
{
    counting = (struct counting){.generator = {&counting_type}, .refused = UINT64_MAX};
    const struct generated_stream_request request = {
        .generator = &counting.generator,
        .fresh = FRESH,
        .count = PLANNED,
        .sample_bytes = 8,
        .plan = {.steps = STEPS, .capacity = BATCH, .list = list_shuffled},
        .ahead = ahead,
        .held = held};
    must(generated_stream_open(&request, stream));
}

/* Compares a batch with its definition. */
static void expect_batch(const struct stream_batch *batch, uint64_t at)
{
    uint32_t numbers[BATCH];
    const uint64_t epoch = at / STEPS, step = at % STEPS;
    const uint32_t count = list_shuffled(NULL, epoch, step, numbers);
    cr_assert(batch->epoch == epoch && batch->step == step && batch->samples.count == count);
    cr_expect(batch->last == (step + 1 == STEPS) && batch->masked == 0 && batch->samples.bytes == 8u * count);
    for (uint32_t j = 0; j < count; j++) {
        const uint64_t sample = numbers[j] % PLANNED + epoch * FRESH;
        cr_expect_eq(batch->numbers[j], numbers[j]);
        cr_expect_eq(((const uint64_t *)batch->samples.values)[j], value_of(sample));
        cr_expect_eq(batch->samples.labels[j], (int32_t)(sample % 7));
        cr_expect_eq(batch->read[j], generated_stream_hash(sample, numbers[j]));
    }
}

static void take(struct stream *stream, uint64_t at, uint64_t batches)
{
    struct stream_batch batch;
    for (uint64_t i = 0; i < batches; i++) {
        must(stream_next(stream, &batch));
        expect_batch(&batch, at + i);
        must(stream_release(stream, &batch, NULL));
    }
}

static const uint32_t aheads[] = {0, 1, 4};

Test(sources, generated_batches_are_those_of_the_plan)
{
    for (size_t a = 0; a < COUNT_OF(aheads); a++) {
        struct stream *stream;
        struct stream_stats stats;
        uint64_t values[BATCH];
        int32_t labels[BATCH];
        uint32_t count, numbers[BATCH];
        open_counting(aheads[a], 1, &stream);
        usleep(3000);
        cr_expect_eq(counting.calls, 0, "nothing is generated before the first call");
        take(stream, 0, 3 * STEPS);
        cr_expect(stream->at.epoch == 3 && stream->at.step == 0);
        must(stream_fill(stream, values, labels, &count));
        list_shuffled(NULL, 3, 0, numbers);
        cr_expect_eq(count, BATCH);
        for (uint32_t j = 0; j < BATCH; j++)
            cr_expect_eq(values[j], value_of(numbers[j] % PLANNED + 3 * FRESH));
        stream_stats(stream, &stats);
        cr_expect(stats.batches == 3 * STEPS + 1 && stats.samples == 3 * PLANNED + BATCH);
        cr_expect(stats.generate_s > 0 && stats.wait_s >= 0 && stats.bytes == 0 && stats.memory_bytes > 1000);
        stream_close(stream);
        cr_expect_eq(counting.closed, 1);
    }
}

Test(sources, generated_streams_seek)
{
    static const uint64_t places[] = {0, 3, 17, 16, 4, 4, 999};
    for (size_t a = 0; a < COUNT_OF(aheads); a++) {
        struct stream *stream;
        struct stream_batch batch;
        open_counting(aheads[a], 1, &stream);
        for (size_t i = 0; i < COUNT_OF(places); i++) {
            must(stream_seek(stream, (struct stream_position){places[i] / STEPS, places[i] % STEPS}));
            take(stream, places[i], 3);
        }
        cr_expect_eq(stream_seek(stream, (struct stream_position){0, STEPS}), STATUS_USAGE);
        must(stream_next(stream, &batch));
        must(stream_seek(stream, (struct stream_position){0, 0})); /* the batch stays held */
        must(stream_release(stream, &batch, NULL));
        cr_expect_eq(stream_release(stream, &batch, NULL), STATUS_USAGE);
        take(stream, 0, 3);
        stream_close(stream);
    }
}

/* The batch of the failure is the one that has the sample, after all earlier batches. */
Test(sources, a_failed_generator_ends_the_stream_at_its_step)
{
    for (size_t a = 0; a < COUNT_OF(aheads); a++) {
        struct stream *stream;
        struct stream_batch batch;
        uint32_t numbers[BATCH];
        open_counting(aheads[a], 1, &stream);
        list_shuffled(NULL, 1, 2, numbers);
        counting.refused = numbers[3] % PLANNED + FRESH;
        take(stream, 0, STEPS + 2);
        for (int again = 0; again < 3; again++) {
            cr_expect_eq(stream_next(stream, &batch), STATUS_FAILED);
            cr_expect(strstr(status_text(), "is refused"), "%s", status_text());
        }
        must(stream_seek(stream, (struct stream_position){1, 1}));
        take(stream, STEPS + 1, 1);
        cr_expect_eq(stream_next(stream, &batch), STATUS_FAILED);
        counting.refused = UINT64_MAX;
        must(stream_seek(stream, (struct stream_position){1, 2}));
        take(stream, STEPS + 2, 4);
        stream_close(stream);
    }
}

Test(sources, generated_batches_are_released_in_any_order)
{
    for (size_t a = 0; a < COUNT_OF(aheads); a++) {
        struct stream *stream;
        struct stream_batch held[3], more;
        open_counting(aheads[a], 3, &stream);
        for (uint64_t i = 0; i < 30; i += 3) {
            for (int h = 0; h < 3; h++)
                must(stream_next(stream, &held[h]));
            for (int h = 0; h < 3; h++)
                expect_batch(&held[h], i + (uint64_t)h); /* later batches do not change them */
            for (int h = 0; h < 3; h++)
                must(stream_release(stream, &held[(h * 2 + 1) % 3], NULL));
        }
        for (uint32_t h = 0; h < 3 + aheads[a]; h++)
            must(stream_next(stream, &more));
        cr_expect_eq(stream_next(stream, &more), STATUS_USAGE);
        cr_expect_eq(stream_release(stream, &more, &more), STATUS_USAGE);
        stream_close(stream);
    }
}

static void *cancel_soon(void *stream)
{
    usleep(20000);
    stream_cancel(stream);
    return NULL;
}

/* Waits until it is cancelled: the thread of the stream cannot list the batch. */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

static uint32_t list_at_gate(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
    return list_shuffled(context, epoch, step, numbers);
}

Test(sources, a_cancel_ends_a_waiting_call)
{
    struct stream *stream;
    struct stream_batch batch;
    pthread_t thread;
    counting = (struct counting){.generator = {&counting_type}, .refused = UINT64_MAX};
    const struct generated_stream_request request = {
        .generator = &counting.generator,
        .fresh = FRESH,
        .count = PLANNED,
        .sample_bytes = 8,
        .plan = {.steps = STEPS, .capacity = BATCH, .list = list_at_gate},
        .ahead = 2};
    must(generated_stream_open(&request, &stream));
    pthread_mutex_lock(&gate);
    pthread_create(&thread, NULL, cancel_soon, stream);
    cr_expect_eq(stream_next(stream, &batch), STATUS_FAILED);
    cr_expect_eq(stream_next(stream, &batch), STATUS_FAILED);
    pthread_join(thread, NULL);
    pthread_mutex_unlock(&gate);
    must(stream_seek(stream, (struct stream_position){2, 1}));
    take(stream, 2 * STEPS + 1, 7);
    stream_close(stream);
}

/* A constant batch is copied once; other samples are found by their numbers. */
Test(sources, samples_in_memory_are_those_of_the_plan)
{
    uint64_t values[PLANNED];
    uint32_t labels[PLANNED];
    struct stream *stream;
    struct stream_batch batch;
    for (uint32_t n = 0; n < PLANNED; n++) {
        values[n] = value_of(n);
        labels[n] = n % 7;
    }
    struct generated_stream_request request = {
        .values = values,
        .in_memory = PLANNED,
        .count = PLANNED,
        .labels = labels,
        .sample_bytes = 8,
        .plan = {.steps = STEPS, .capacity = BATCH, .list = list_shuffled},
        .ahead = 3};
    must(generated_stream_open(&request, &stream));
    for (uint64_t at = 0; at < 3 * STEPS; at++) {
        must(stream_next(stream, &batch));
        for (uint32_t j = 0; j < batch.samples.count; j++) {
            cr_expect_eq(((const uint64_t *)batch.samples.values)[j], value_of(batch.numbers[j] % PLANNED));
            cr_expect_eq(batch.samples.labels[j], (int32_t)(batch.numbers[j] % PLANNED % 7));
            cr_expect_eq(batch.read[j], generated_stream_hash(batch.numbers[j] % PLANNED, batch.numbers[j]));
        }
        must(stream_release(stream, &batch, NULL));
    }
    stream_close(stream);
    request.in_memory = 10; /* the plan names others */
    must(generated_stream_open(&request, &stream));
    cr_expect_eq(stream_next(stream, &batch), STATUS_USAGE);
    stream_close(stream);
    request.labels = NULL;
    cr_expect_eq(generated_stream_open(&request, &stream), STATUS_USAGE);
    cr_expect_null(stream);
}
