/* Tests rows of embeddings in libfdsl.so: streams deliver the values of the files, fdsl_rows_select() keeps
 * the rows that the workload `ops` keeps, files that change are errors by name, and every wrong argument is
 * an error that names it. */
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "core/philox.h"
#include "core/timer.h"
#include "data/checksum.h"
#include "data/npy.h"
#include "data/tensor_file.h"
#include "must.h"
#include "ops/ops.h"
#include "train/feed.h"

#include "lib_support.h" /* included last, because `out` and `status` would shadow names in other headers */

TestSuite(lib_rows, .timeout = 120, .init = shell_set_up, .fini = shell_tear_down);

#ifdef HAVE_XXHASH

/* A set with bad rows and duplicates. Its files have more than 64 KiB, so they are mapped. */
enum { ROWS = 1501, COLUMNS = 37, WIDTH = 40, CLASSES_OF_ROWS = 7 };

static float rows[ROWS * COLUMNS];
static int64_t labels[ROWS];

static void put_npy(const char *name, const char *type, const char *shape, const void *values, size_t bytes)
{
    char header[NPY_HEADER_MAX];
    const size_t length = npy_header_make(header, type, shape);
    uint8_t *file = allocated(length + bytes + 1);
    memcpy(file, header, length);
    memcpy(file + length, values, bytes);
    put(name, file, length + bytes);
    free(file);
}

/* Writes x.npy and y.npy (labels), and sets `rows` and `labels`. */
static void prepare(void)
{
    char shape[64];
    const struct generated_rows generated = generated_begin(5, COLUMNS, DTYPE_F32, 0.1, 0.2);
    for (uint32_t i = 0; i < ROWS; i++) {
        generated_fill(&generated, i, rows + i * COLUMNS);
        labels[i] = (int64_t)((i * 5 + i / 11) % CLASSES_OF_ROWS) - 1;
    }
    snprintf(shape, sizeof shape, "%d, %d", ROWS, COLUMNS);
    put_npy("x.npy", "<f4", shape, rows, sizeof rows);
    snprintf(shape, sizeof shape, "%d,", ROWS);
    put_npy("y.npy", "<i8", shape, labels, sizeof labels);
}

static char paths[2][PATH_MAX];

static struct fdsl_rows_config rows_config(const char *name, const char *label_name)
{
    struct fdsl_rows_config config;
    good(fdsl_rows_config_init(&config, sizeof config));
    snprintf(paths[0], sizeof paths[0], "%s/%s", folder, name);
    snprintf(paths[1], sizeof paths[1], "%s/%s", folder, label_name ? label_name : "");
    config.path = paths[0];
    config.labels = label_name ? paths[1] : NULL;
    return config;
}

static struct fdsl_source *opened_rows(const char *name, const char *label_name)
{
    struct fdsl_rows_config config = rows_config(name, label_name);
    struct fdsl_source *source;
    config.align = 8;
    good(fdsl_rows_open(&config, &source));
    return source;
}

static struct fdsl_select_config select_config(void)
{
    struct fdsl_select_config config;
    good(fdsl_select_config_init(&config, sizeof config));
    config.num_threads = 3;
    return config;
}

static struct fdsl_source *selected(struct fdsl_source *from, const struct fdsl_select_config *config)
{
    struct fdsl_source *source;
    good(fdsl_rows_select(from, config, &source));
    return source;
}

static struct fdsl_source_info info_of(const struct fdsl_source *source)
{
    struct fdsl_source_info info = {.size = sizeof info};
    good(fdsl_source_describe(source, &info));
    return info;
}

static struct fdsl_stream_config stream_config(void)
{
    struct fdsl_stream_config config;
    good(fdsl_stream_config_init(&config, sizeof config));
    config.batch_size = 64;
    config.seed = 9;
    config.num_threads = 2;
    return config;
}

/* ---- What batches hold ---- */

/* Compares a batch with the rows whose numbers it has: the definition in ops/row.h, padded with zeros. */
static void expect_rows(struct fdsl_batch *batch, const void *stored, enum dtype from, enum ops_type to)
{
    const struct fdsl_tensor values = tensor_of(batch, FDSL_ROWS), numbers = tensor_of(batch, FDSL_NUMBERS);
    const struct ops_format format = {.from = from, .to = to, .columns = COLUMNS};
    const size_t element = to == OPS_F32 ? 4 : 2;
    cr_assert(values.ndim == 2 && values.shape[1] == WIDTH && values.shape[0] == numbers.shape[0]);
    cr_assert(values.strides[0] == WIDTH && values.strides[1] == 1 && values.bits == 8 * element);
    cr_assert(values.code == (to == OPS_BF16 ? 4 : 2) && (uintptr_t)values.data % 256 == 0);
    for (int64_t i = 0; i < values.shape[0]; i++) {
        uint8_t wanted[WIDTH * 4] = {0};
        const int64_t number = ((const int64_t *)numbers.data)[i];
        ops_convert_row(&format, (const uint8_t *)stored + number * COLUMNS * dtype_bytes(from), wanted,
                        NULL);
        cr_assert_eq(memcmp((const uint8_t *)values.data + i * WIDTH * element, wanted, WIDTH * element), 0,
                     "row %lld", (long long)number);
    }
}

/* All types of files and streams; a set of three files; any number of threads. */
Test(lib_rows, batches_have_the_values_of_the_files)
{
    static const char *const types[] = {"f32", "f16", "bf16"}, *const safe[] = {"F32", "F16", "BF16"};
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    static uint8_t stored[sizeof rows];
    static const char *const about[] = {"fdsl-bench", "test", NULL};
    prepare();
    for (int from = 0; from < 3; from++) {
        struct ops_format format = {.from = DTYPE_F32, .to = (enum ops_type)from, .columns = COLUMNS};
        const size_t bytes = COLUMNS * dtype_bytes(dtypes[from]);
        EXPECT(0, "rm -rf e && mkdir e");
        for (uint64_t i = 0; i < ROWS; i++)
            ops_convert_row(&format, (const uint8_t *)(rows + i * COLUMNS), stored + i * bytes, NULL);
        for (uint64_t part = 0; part < 3; part++) { /* 1000 rows, 1 row, the rest */
            static const uint64_t firsts[] = {0, 1000, 1001, ROWS};
            const uint64_t count = firsts[part + 1] - firsts[part];
            char name[PATH_MAX];
            struct safetensor tensor = {.type = safe[from],
                                        .axes = 2,
                                        .shape = {count, COLUMNS},
                                        .values = stored + firsts[part] * bytes,
                                        .bytes = count * bytes};
            snprintf(tensor.name, sizeof tensor.name, "emb");
            snprintf(name, sizeof name, "%s/e/%llu.safetensors", folder, (unsigned long long)part);
            must(safetensors_write(name, about, &tensor, 1));
        }
        struct fdsl_source *source = opened_rows("e", NULL);
        const struct fdsl_source_info info = info_of(source);
        cr_assert(info.samples == ROWS && info.columns == COLUMNS && info.width == WIDTH && !info.labelled);
        cr_assert(info.rows_found == ROWS && info.files == 3 && info.bytes == ROWS * bytes);
        cr_assert_str_eq(info.dtype, types[from]);
        for (int to = 0; to < 4; to++) {
            struct fdsl_stream_config config = stream_config();
            struct fdsl_batch *batch;
            config.dtype = to < 3 ? types[to] : "auto";
            config.num_threads = 1 + to;
            config.shuffle = to % 2;
            struct fdsl_stream *stream = opened_stream(source, &config);
            uint32_t seen = 0;
            while (fdsl_stream_next(stream, NULL, &batch) == FDSL_OK) {
                expect_rows(batch, stored, dtypes[from], (enum ops_type)(to < 3 ? to : from));
                seen += (uint32_t)tensor_of(batch, FDSL_ROWS).shape[0];
                struct fdsl_tensor tensor;
                cr_expect_eq(fdsl_batch_tensor(batch, FDSL_LABELS, &tensor), FDSL_INVALID);
                cr_expect_eq(fdsl_batch_tensor(batch, FDSL_IMAGES, &tensor), FDSL_INVALID);
                good(fdsl_batch_release(batch, NULL));
            }
            cr_assert_eq(seen, ROWS, "%s", fdsl_error());
            fdsl_stream_close(stream);
        }
        fdsl_source_close(source);
    }
}

/* The order is the permutation of `ops`; ranks divide each step. */
Test(lib_rows, order_is_the_permutation_of_ops)
{
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", "y.npy");
    for (uint32_t ranks = 1; ranks <= 3; ranks += 2)
        for (uint32_t rank = 0; rank < ranks; rank++) {
            struct fdsl_stream_config config = stream_config();
            struct fdsl_batch *batch;
            const uint32_t global = ranks * 50, steps = ROWS / global;
            config.batch_size = 50;
            config.rank = rank;
            config.world_size = ranks;
            config.drop_last = 1;
            struct fdsl_stream *stream = opened_stream(source, &config);
            for (uint32_t run_number = 0; run_number < 2 * steps; run_number++) {
                const struct ops ops = {.steps = {[OPS_COMPACT] = true}, .seed = 9, .sample = global};
                const struct ops_draw draw = ops_draw(&ops, run_number, ROWS);
                good(fdsl_stream_next(stream, NULL, &batch));
                const int64_t *numbers = tensor_of(batch, FDSL_NUMBERS).data;
                const int64_t *given = tensor_of(batch, FDSL_LABELS).data;
                cr_assert_eq(tensor_of(batch, FDSL_ROWS).shape[0], 50);
                for (uint32_t i = 0; i < 50; i++) {
                    cr_assert_eq((uint64_t)numbers[i], ops_drawn(&draw, rank * 50 + i), "run %u", run_number);
                    cr_assert_eq(given[i], labels[numbers[i]]);
                }
                good(fdsl_batch_release(batch, NULL));
                if ((run_number + 1) % steps == 0)
                    cr_assert_eq(fdsl_stream_next(stream, NULL, &batch), FDSL_END);
            }
            fdsl_stream_close(stream);
        }
    fdsl_source_close(source);
}

/* Returns the rows of z.npy with labels z-y.npy, as `train --feed load` opens them. No row is held out. */
static void open_training(struct data *data)
{
    static char label_path[PATH_MAX];
    snprintf(paths[0], sizeof paths[0], "%s/z.npy", folder);
    snprintf(label_path, sizeof label_path, "%s/z-y.npy", folder);
    const struct data_request request = {.name = paths[0],
                                         .test_name = paths[0],
                                         .labels = label_path,
                                         .test_labels = label_path,
                                         .feed = DATA_LOAD,
                                         .batch = 70,
                                         .lanes = 3,
                                         .shuffle = 60,
                                         .ahead = 2,
                                         .resources = {.threads = 2}};
    must(data_open(&request, data));
}

/* One and two ranks, over the end of an epoch. */
Test(lib_rows, batches_are_those_of_the_trainer)
{
    static int64_t classes[ROWS];
    struct data data;
    const struct model model = {.classes = CLASSES_OF_ROWS};
    char shape[64];
    prepare();
    for (uint32_t i = 0; i < ROWS * COLUMNS; i++)
        rows[i] = isfinite(rows[i]) ? rows[i] : 0;
    for (uint32_t i = 0; i < ROWS; i++)
        classes[i] = labels[i] + 1;
    snprintf(shape, sizeof shape, "%d, %d", ROWS, COLUMNS);
    put_npy("z.npy", "<f4", shape, rows, sizeof rows);
    snprintf(shape, sizeof shape, "%d,", ROWS);
    put_npy("z-y.npy", "<i8", shape, classes, sizeof classes);
    open_training(&data);
    for (uint32_t ranks = 1; ranks <= 2; ranks++)
        for (uint32_t rank = 0; rank < ranks; rank++) {
            const struct train train = {
                .model = &model, .data = &data, .seed = 9, .batch = 70, .rank = rank, .ranks = ranks};
            struct fdsl_stream_config config = stream_config();
            struct feed_stream feed;
            config.batch_size = 70 / ranks;
            config.rank = rank;
            config.world_size = ranks;
            struct fdsl_rows_config opened = rows_config("z.npy", "z-y.npy");
            struct fdsl_source *source;
            good(fdsl_rows_open(&opened, &source));
            struct fdsl_stream *stream = opened_stream(source, &config);
            must(feed_stream_open(&train, 2, 1, DECODER_CPU, NULL, NULL, &feed));
            const uint32_t steps = ROWS / 70 + 1;
            for (uint32_t at = 0; at < 2 * steps; at++) {
                const uint32_t epoch = at / steps, step = at % steps;
                const struct draw_order order = train_order(&train, epoch);
                uint32_t numbers[70];
                struct stream_batch wanted;
                struct fdsl_batch *batch;
                const uint32_t count = train_batch(&train, &order, step, numbers);
                must(feed_stream_next(&feed, epoch, step, numbers, count, &wanted));
                good(fdsl_stream_next(stream, NULL, &batch));
                const int64_t *given = tensor_of(batch, FDSL_LABELS).data;
                const int64_t *listed = tensor_of(batch, FDSL_NUMBERS).data;
                const struct fdsl_tensor tensor = tensor_of(batch, FDSL_ROWS);
                cr_assert_eq(tensor.shape[0], count, "step %u", at);
                cr_assert_eq(memcmp(tensor.data, wanted.samples.values, count * COLUMNS * sizeof *rows), 0);
                for (uint32_t j = 0; j < count; j++) {
                    cr_assert_eq(listed[j], numbers[j], "step %u, row %u", at, j);
                    cr_assert_eq(given[j], wanted.samples.labels[j]);
                    cr_assert_eq(given[j], classes[numbers[j]]);
                }
                must(stream_release(feed.stream, &wanted, NULL));
                good(fdsl_batch_release(batch, NULL));
                if (step + 1 == steps)
                    cr_assert_eq(fdsl_stream_next(stream, NULL, &batch), FDSL_END);
            }
            feed_stream_close(&feed);
            fdsl_stream_close(stream);
            fdsl_source_close(source);
        }
    data_close(&data);
}

/* ---- Selecting ---- */

/* Runs `ops` on x.npy. Returns the columns rows_kept and digest of its row. */
static void run_ops(const char *options, uint64_t *kept, uint64_t *digest)
{
    unsigned long long numbers[2];
    EXPECT(0,
           "rm -f r.csv && $P --workload ops --variant ops-naive --data x.npy --out r.csv "
           "--min-samples 1 --min-time 0 --max-time 0 --warmups 0 --warmup-time 0 %s %s >log 2>&1 || cat log",
           strstr(options, "permute") ? "--seed 21" : "", options);
    EXPECT(0, "python3 -c 'import csv; r = next(csv.DictReader(open(\"r.csv\"))); "
              "print(r[\"rows_kept\"], int(r[\"digest\"], 16))'");
    cr_assert_eq(sscanf(out, "%llu %llu", &numbers[0], &numbers[1]), 2, "%s", out);
    *kept = numbers[0];
    *digest = numbers[1];
}

/* Computes the digest of `ops` from the batches of a source (docs/ops.md). With `hashed`, the steps of `ops`
 * include the hash. */
static uint64_t digest_of(struct fdsl_source *source, bool hashed)
{
    struct fdsl_stream_config config = stream_config();
    struct fdsl_batch *batch;
    uint64_t sum = 0;
    struct fdsl_stream *stream = opened_stream(source, &config);
    while (fdsl_stream_next(stream, NULL, &batch) == FDSL_OK) {
        const struct fdsl_tensor values = tensor_of(batch, FDSL_ROWS);
        const int64_t *numbers = tensor_of(batch, FDSL_NUMBERS).data;
        const size_t bytes = COLUMNS * (size_t)values.bits / 8, stride = WIDTH * (size_t)values.bits / 8;
        for (int64_t i = 0; i < values.shape[0]; i++) {
            const float *row = rows + numbers[i] * COLUMNS;
            const uint64_t members[] = {
                checksum_whole((const uint8_t *)values.data + (size_t)i * stride, bytes),
                checksum_whole(NULL, 0),
                hashed ? checksum_whole((const uint8_t *)row, COLUMNS * sizeof *row) : 0};
            sum += checksum_sample((uint64_t)numbers[i], members, 3);
        }
        good(fdsl_batch_release(batch, NULL));
    }
    fdsl_stream_close(stream);
    return sum;
}

static double norm_of(uint32_t row)
{
    double sum = 0;
    for (int i = 0; i < COLUMNS; i++)
        sum += (double)rows[row * COLUMNS + i] * (double)rows[row * COLUMNS + i];
    return sqrt(sum);
}

/* The same rows as the program: their number, their numbers in the file, and their bits. */
Test(lib_rows, selected_rows_are_those_of_ops)
{
    static const struct {
        const char *options;
        bool hashed, validate, dedup;
        uint64_t sample;
        const char *dtype;
    } cases[] = {
        {"--steps mask,compact --norm-min 0.1 --norm-max 100", false, true, false, 0, "auto"},
        {"--steps mask,compact,hash --dedup --norm-min 0.1 --norm-max 100", true, true, true, 0, "auto"},
        {"--steps compact,hash --dedup", true, false, true, 0, "auto"},
        {"--steps mask,compact,convert --to bf16 --norm-min 0.1 --norm-max 100", false, true, false, 0,
         "bf16"},
        {"--steps mask,compact,permute,hash --dedup --sample 333 --norm-min 0.1 --norm-max 100", true, true,
         true, 333, "auto"},
    };
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", NULL);
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        struct fdsl_select_config config = select_config();
        uint64_t kept, digest;
        run_ops(cases[c].options, &kept, &digest);
        config.validate = cases[c].validate;
        if (config.validate) {
            config.norm_min = 0.1;
            config.norm_max = 100;
        }
        config.dedup = cases[c].dedup;
        config.sample = cases[c].sample;
        config.seed = 21;
        config.dtype = cases[c].dtype;
        struct fdsl_source *chosen = selected(source, &config);
        const struct fdsl_source_info info = info_of(chosen);
        cr_expect_eq(info.samples + info.unsampled, kept, "case %zu: %llu and %llu", c,
                     (unsigned long long)info.samples, (unsigned long long)kept);
        cr_expect_eq(info.samples + info.unsampled + info.invalid + info.duplicates, ROWS);
        cr_expect(config.sample == 0 || info.samples == config.sample);
        cr_expect_eq(digest_of(chosen, cases[c].hashed), digest, "case %zu", c);
        fdsl_source_close(chosen);
    }
    fdsl_source_close(source);
}

/* Independently of `ops`: norms in double precision, and a comparison of all pairs of rows. */
Test(lib_rows, validation_and_duplicates_by_brute_force)
{
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", NULL);
    struct fdsl_select_config config = select_config();
    struct fdsl_stream_config ordered = stream_config();
    bool wanted[ROWS];
    uint32_t invalid = 0, duplicates = 0, kept = 0;
    config.validate = config.dedup = 1;
    config.norm_min = 0.5;
    config.norm_max = 2;
    for (uint32_t i = 0; i < ROWS; i++) {
        const double norm = norm_of(i);
        cr_assert(!(fabs(norm - 0.5) < 1e-5) && !(fabs(norm - 2) < 1e-5), "row %u is too near a bound", i);
        wanted[i] = norm >= 0.5 && norm <= 2;
        invalid += !wanted[i];
        bool equal = false;
        for (uint32_t j = 0; wanted[i] && !equal && j < i; j++)
            equal = wanted[j] && memcmp(rows + i * COLUMNS, rows + j * COLUMNS, COLUMNS * sizeof *rows) == 0;
        duplicates += equal;
        wanted[i] &= !equal;
    }
    cr_assert(invalid > 50 && duplicates > 50);
    struct fdsl_source *chosen = selected(source, &config);
    const struct fdsl_source_info info = info_of(chosen);
    cr_expect(info.invalid == invalid && info.duplicates == duplicates && info.filtered == 0,
              "%llu and %llu, not %u and %u", (unsigned long long)info.invalid,
              (unsigned long long)info.duplicates, invalid, duplicates);
    ordered.shuffle = 0;
    struct fdsl_stream *stream = opened_stream(chosen, &ordered);
    struct fdsl_batch *batch;
    int64_t before = -1;
    while (fdsl_stream_next(stream, NULL, &batch) == FDSL_OK) {
        const struct fdsl_tensor numbers = tensor_of(batch, FDSL_NUMBERS);
        for (int64_t i = 0; i < *numbers.shape; i++, kept++) {
            const int64_t number = ((const int64_t *)numbers.data)[i];
            cr_assert(number > before && wanted[number], "row %lld", (long long)number);
            before = number;
        }
        good(fdsl_batch_release(batch, NULL));
    }
    cr_expect_eq(kept, ROWS - invalid - duplicates);
    fdsl_stream_close(stream);
    fdsl_source_close(chosen);
    fdsl_source_close(source);
}

/* `keep` has a byte per row of the source, not of the files. */
Test(lib_rows, keep_is_about_the_rows_of_the_source)
{
    static uint8_t keep[ROWS];
    static const int64_t label[] = {3};
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", "y.npy");
    struct fdsl_select_config config = select_config();
    config.labels = label;
    config.label_count = 1;
    struct fdsl_source *some = selected(source, &config);
    config = select_config();
    config.keep = keep;
    config.keep_count = info_of(some).samples;
    keep[1] = keep[config.keep_count - 1] = 1;
    struct fdsl_source *two = selected(some, &config);
    struct fdsl_stream_config ordered = stream_config();
    struct fdsl_batch *batch;
    ordered.shuffle = 0;
    struct fdsl_stream *stream = opened_stream(two, &ordered);
    good(fdsl_stream_next(stream, NULL, &batch));
    int64_t wanted[] = {-1, -1}, found = 0;
    for (int64_t i = 0; i < ROWS; i++)
        if (labels[i] == 3) {
            found++;
            if (found >= 2)
                wanted[found > 2] = i;
        }
    const int64_t *numbers = tensor_of(batch, FDSL_NUMBERS).data;
    cr_expect_eq(tensor_of(batch, FDSL_ROWS).shape[0], 2);
    cr_expect(numbers[0] == wanted[0] && numbers[1] == wanted[1]);
    good(fdsl_batch_release(batch, NULL));
    fdsl_stream_close(stream);
    fdsl_source_close(two);
    fdsl_source_close(some);
    fdsl_source_close(source);
}

/* Steps one after another are the same as all at once. The counts of each step stay. */
Test(lib_rows, selections_can_be_repeated)
{
    static uint8_t keep[ROWS];
    static const int64_t wanted[] = {5, -1, 3, 77};
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", "y.npy");
    struct fdsl_select_config all = select_config(), one = select_config();
    for (uint32_t i = 0; i < ROWS; i++)
        keep[i] = i % 3 != 1;
    all.keep = keep;
    all.keep_count = ROWS;
    all.labels = wanted;
    all.label_count = 4;
    all.validate = all.dedup = 1;
    all.norm_min = 0.1;
    all.norm_max = 100;
    all.sample = 100;
    all.seed = 4;
    struct fdsl_source *together = selected(source, &all), *steps[6];
    one.keep = keep;
    one.keep_count = ROWS;
    steps[0] = selected(source, &one);
    one = select_config();
    one.labels = wanted;
    one.label_count = 4;
    steps[1] = selected(steps[0], &one);
    one = select_config();
    one.validate = 1;
    one.norm_min = 0.1;
    one.norm_max = 100;
    steps[2] = selected(steps[1], &one);
    one = select_config();
    one.dedup = 1;
    steps[3] = selected(steps[2], &one);
    one = select_config();
    one.sample = 100;
    one.seed = 4;
    steps[4] = selected(steps[3], &one);
    steps[5] =
        selected(steps[4], &(struct fdsl_select_config){
                               .size = sizeof one, .norm_max = 1e19, .dtype = "auto", .device = FDSL_CPU});
    fdsl_source_close(source); /* the others keep the files */
    const struct fdsl_source_info a = info_of(together), b = info_of(steps[5]);
    cr_expect(a.samples == 100 && a.hash == b.hash && a.filtered == b.filtered && a.invalid == b.invalid);
    cr_expect(a.duplicates == b.duplicates && a.unsampled == b.unsampled && a.filtered > 0 && a.invalid > 0);
    cr_expect_eq(a.samples + a.filtered + a.invalid + a.duplicates + a.unsampled, ROWS);
    cr_expect_neq(a.hash, info_of(steps[3]).hash);
    struct fdsl_stream_config ordered = stream_config();
    ordered.shuffle = 0;
    ordered.batch_size = 100;
    struct fdsl_stream *streams[] = {opened_stream(together, &ordered), opened_stream(steps[5], &ordered)};
    struct fdsl_batch *batches[2];
    for (int i = 0; i < 2; i++)
        good(fdsl_stream_next(streams[i], NULL, &batches[i]));
    const int64_t *numbers = tensor_of(batches[0], FDSL_NUMBERS).data,
                  *given = tensor_of(batches[0], FDSL_LABELS).data;
    cr_expect_eq(memcmp(numbers, tensor_of(batches[1], FDSL_NUMBERS).data, 100 * sizeof *numbers), 0);
    bool ascending = true;
    for (int i = 0; i < 100; i++) {
        cr_expect(keep[numbers[i]] && (given[i] == 5 || given[i] == -1 || given[i] == 3));
        cr_expect_eq(given[i], labels[numbers[i]]);
        ascending &= i == 0 || numbers[i] > numbers[i - 1];
    }
    cr_expect_not(ascending, "a sample has the order of the draw");
    expect_rows(batches[0], rows, DTYPE_F32, OPS_F32);
    for (int i = 0; i < 2; i++) {
        good(fdsl_batch_release(batches[i], NULL));
        fdsl_stream_close(streams[i]);
    }
    for (int i = 0; i < 6; i++)
        fdsl_source_close(steps[i]);
    fdsl_source_close(together);
}

/* A selection in a thread has the same result. Closing the source ends it early. */
Test(lib_rows, selections_in_a_thread_can_be_ended)
{
    prepare();
    struct fdsl_select_config config = select_config();
    struct fdsl_source *from = opened_rows("x.npy", NULL), *source;
    config.validate = config.dedup = 1;
    struct fdsl_source *wanted = selected(from, &config);
    good(fdsl_rows_begin(from, &config, &source));
    fdsl_source_close(from);
    cr_expect_eq(fdsl_rows_select(source, &config, &from), FDSL_INVALID, "it is not open yet");
    enum fdsl_status result;
    while ((result = fdsl_source_wait(source, 0.01)) == FDSL_PENDING) {
    }
    good(result);
    cr_expect_eq(info_of(source).hash, info_of(wanted).hash);
    fdsl_source_close(source);
    config.norm_min = config.norm_max = 1e9;
    good(fdsl_rows_begin(wanted, &config, &source));
    while ((result = fdsl_source_wait(source, 0.01)) == FDSL_PENDING) {
    }
    cr_expect(result == FDSL_INVALID && strstr(fdsl_error(), "no row is left"), "%s", fdsl_error());
    fdsl_source_close(source);
    fdsl_source_close(wanted);
    /* A sparse file of 1 GiB. */
    char header[NPY_HEADER_MAX], path[PATH_MAX];
    const size_t length = npy_header_make(header, "<f4", "1048576, 256");
    put("large.npy", header, length);
    snprintf(path, sizeof path, "%s/large.npy", folder);
    cr_assert_eq(truncate(path, (off_t)(length + (UINT64_C(1) << 30))), 0);
    from = opened_rows("large.npy", NULL);
    config = select_config();
    config.validate = 1;
    fdsl_source_close(selected(from, &config)); /* then the file is in memory */
    double begin_s = timer_now_s();
    fdsl_source_close(selected(from, &config));
    const double whole_s = timer_now_s() - begin_s;
    begin_s = timer_now_s();
    good(fdsl_rows_begin(from, &config, &source));
    cr_expect_eq(fdsl_source_wait(source, whole_s / 10), FDSL_PENDING);
    fdsl_source_close(source);
    const double ended_s = timer_now_s() - begin_s;
    cr_expect_lt(ended_s, 0.9 * whole_s, "%g s of %g s", ended_s, whole_s);
    fdsl_source_close(from);
}

/* More rows than a chunk has. Each value is a row. */
Test(lib_rows, selections_read_all_chunks)
{
    enum { MANY = 150001, VALUES = 1009 };
    static float many[MANY];
    bool seen[VALUES] = {false};
    uint64_t valid = 0, distinct = 0;
    char shape[64];
    for (uint32_t i = 0; i < MANY; i++) {
        const uint32_t value = i * 7919u % (i < 140000 ? VALUES - 9 : VALUES); /* some values come last */
        many[i] = (float)value;
        valid += value >= 100 && value <= 1004;
        distinct += value >= 100 && value <= 1004 && !seen[value];
        seen[value] = true;
    }
    snprintf(shape, sizeof shape, "%d, 1", MANY);
    put_npy("many.npy", "<f4", shape, many, sizeof many);
    struct fdsl_source *source = opened_rows("many.npy", NULL);
    struct fdsl_select_config config = select_config();
    config.validate = config.dedup = 1;
    config.norm_min = 100;
    config.norm_max = 1004;
    struct fdsl_source *chosen = selected(source, &config);
    const struct fdsl_source_info info = info_of(chosen);
    cr_expect(info.samples == distinct && info.invalid == MANY - valid && info.duplicates == valid - distinct,
              "%llu rows, not %llu", (unsigned long long)info.samples, (unsigned long long)distinct);
    fdsl_source_close(chosen);
    fdsl_source_close(source);
}

/* The hash of a source depends on the values, the labels, and which rows were chosen. */
Test(lib_rows, hashes_tell_sources_apart)
{
    prepare();
    struct fdsl_source *sources[6] = {opened_rows("x.npy", NULL), opened_rows("x.npy", "y.npy")};
    struct fdsl_select_config config = select_config();
    config.sample = 100;
    for (uint64_t i = 0; i < 2; i++) {
        config.seed = i;
        sources[2 + i] = selected(sources[0], &config);
    }
    labels[70]++;
    put_npy("z.npy", "<i8", "1501,", labels, sizeof labels);
    rows[(ROWS - 1) * COLUMNS] += 1;
    put_npy("w.npy", "<f4", "1501, 37", rows, sizeof rows);
    sources[4] = opened_rows("x.npy", "z.npy");
    sources[5] = opened_rows("w.npy", NULL);
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < i; j++)
            cr_expect_neq(info_of(sources[i]).hash, info_of(sources[j]).hash, "%d and %d", i, j);
    for (int i = 0; i < 6; i++)
        fdsl_source_close(sources[i]);
}

/* ---- Labels ---- */

Test(lib_rows, labels_come_from_a_tensor_or_a_file)
{
    static const char *const about[] = {"fdsl-bench", "test", NULL};
    static const char *const types[] = {"<i4", "<i2", "|i1", "<u2", "|u1", "<u8"};
    static int32_t packed[2 * ROWS];
    char name[PATH_MAX], shape[64];
    prepare();
    struct safetensor tensors[] = {{.name = "emb",
                                    .type = "F32",
                                    .axes = 2,
                                    .shape = {ROWS, COLUMNS},
                                    .values = rows,
                                    .bytes = sizeof rows},
                                   {.name = "y",
                                    .type = "I64",
                                    .axes = 2,
                                    .shape = {ROWS, 1},
                                    .values = labels,
                                    .bytes = sizeof labels}};
    snprintf(name, sizeof name, "%s/both.safetensors", folder);
    must(safetensors_write(name, about, tensors, 2));
    struct fdsl_rows_config config = rows_config("both.safetensors", NULL);
    config.labels = "y";
    struct fdsl_source *source;
    good(fdsl_rows_open(&config, &source));
    struct fdsl_source *other = opened_rows("x.npy", "y.npy");
    cr_expect(info_of(source).labelled && info_of(source).hash == info_of(other).hash);
    fdsl_source_close(source);
    snprintf(shape, sizeof shape, "%d,", ROWS);
    for (int type = 0; type < 6; type++) {
        const size_t bytes = (size_t)(types[type][2] - '0');
        const bool has_sign = types[type][1] == 'i';
        for (uint32_t i = 0; i < ROWS; i++) {
            const int64_t label = labels[i] + !has_sign;
            memcpy((uint8_t *)packed + i * bytes, &label, bytes);
        }
        put_npy("z.npy", types[type], shape, packed, ROWS * bytes);
        source = opened_rows("x.npy", "z.npy");
        struct fdsl_stream_config plain = stream_config();
        plain.batch_size = ROWS;
        plain.shuffle = 0;
        struct fdsl_stream *stream = opened_stream(source, &plain);
        float *values = allocated(ROWS * WIDTH * sizeof *values);
        int64_t *given = allocated(sizeof labels);
        uint32_t count;
        good(fdsl_stream_fill(stream, values, given, &count, NULL));
        cr_assert_eq(count, ROWS);
        for (uint32_t i = 0; i < ROWS; i++)
            cr_assert_eq(given[i], labels[i] + !has_sign, "%s, row %u", types[type], i);
        cr_expect_eq(memcmp(values + WIDTH, rows + COLUMNS, COLUMNS * sizeof *rows), 0);
        fdsl_stream_close(stream);
        fdsl_source_close(source);
        free(values);
        free(given);
    }
    fdsl_source_close(other);
}

Test(lib_rows, wrong_labels_are_refused)
{
    prepare();
    static int64_t many[ROWS + 1];
    put_npy("short.npy", "<i8", "3,", labels, 3 * sizeof *labels);
    put_npy("long.npy", "<i8", "1502,", many, sizeof many);
    put_npy("axes.npy", "<i8", "2, 3", many, 6 * sizeof *many);
    many[77] = INT64_C(1) << 31;
    put_npy("large.npy", "<i8", "1501,", many, ROWS * sizeof *many);
    put_npy("huge.npy", "<u8", "1501,", memset(many, 0xFF, sizeof many), ROWS * sizeof *many);
    static const struct {
        const char *name, *words;
        enum fdsl_status wanted;
    } cases[] = {
        {"short.npy", "3 labels", FDSL_INVALID},
        {"long.npy", "1502 labels", FDSL_INVALID},
        {"axes.npy", "2 axes", FDSL_INVALID},
        {"large.npy", "label 77 is 2147483648", FDSL_FAILED},
        {"huge.npy", "label 0 is 9223372036854775807; labels are -2147483648 to 2147483647", FDSL_FAILED},
        {"x.npy", "the type <f4", FDSL_INVALID},
        {"none.npy", "none.npy", FDSL_INVALID},
        {"nothing", "no tensor", FDSL_INVALID}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct fdsl_rows_config config = rows_config("x.npy", cases[i].name);
        if (!strchr(cases[i].name, '.')) /* without a slash, it is the name of a tensor */
            config.labels = cases[i].name;
        struct fdsl_source *source = (struct fdsl_source *)1;
        cr_expect_eq(fdsl_rows_open(&config, &source), cases[i].wanted, "%s: %s", cases[i].name,
                     fdsl_error());
        cr_expect(!source && strncmp(fdsl_error(), "labels: ", 8) == 0 &&
                      strstr(fdsl_error(), cases[i].words),
                  "%s", fdsl_error());
    }
}

/* ---- The state ---- */

/* A state from two ranks continues on one, with the rows that are missing. Other rows refuse it. */
Test(lib_rows, a_state_continues_on_other_ranks)
{
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", NULL);
    struct fdsl_stream_config config = stream_config();
    struct fdsl_state state = {.size = sizeof state}, states[2];
    static uint8_t seen[ROWS];
    config.batch_size = 35;
    config.world_size = 2;
    for (uint32_t rank = 0; rank < 2; rank++) {
        config.rank = rank;
        struct fdsl_stream *stream = opened_stream(source, &config);
        struct fdsl_batch *batch;
        for (int i = 0; i < 9; i++) {
            good(fdsl_stream_next(stream, NULL, &batch));
            const struct fdsl_tensor numbers = tensor_of(batch, FDSL_NUMBERS);
            for (int64_t j = 0; j < *numbers.shape; j++)
                seen[((const int64_t *)numbers.data)[j]]++;
            good(fdsl_batch_release(batch, NULL));
        }
        good(fdsl_stream_save(stream, &state));
        states[rank] = state;
        fdsl_stream_close(stream);
    }
    cr_expect_eq(memcmp(&states[0], &states[1], sizeof state), 0);
    config.batch_size = 70;
    config.world_size = 1;
    config.rank = 0;
    struct fdsl_stream *stream = opened_stream(source, &config);
    struct fdsl_batch *batch;
    good(fdsl_stream_load(stream, &state));
    while (fdsl_stream_next(stream, NULL, &batch) == FDSL_OK) {
        const struct fdsl_tensor numbers = tensor_of(batch, FDSL_NUMBERS);
        for (int64_t j = 0; j < *numbers.shape; j++)
            seen[((const int64_t *)numbers.data)[j]]++;
        good(fdsl_batch_release(batch, NULL));
    }
    for (uint32_t i = 0; i < ROWS; i++)
        cr_assert_eq(seen[i], 1, "row %u", i);
    fdsl_stream_close(stream);

    struct fdsl_select_config select = select_config();
    select.sample = ROWS; /* the same rows in another order */
    struct fdsl_source *other = selected(source, &select);
    stream = opened_stream(other, &config);
    cr_expect(fdsl_stream_load(stream, &state) == FDSL_INVALID && strstr(fdsl_error(), "data set"), "%s",
              fdsl_error());
    fdsl_stream_close(stream);
    fdsl_source_close(other);
    config.dtype = "f16";
    stream = opened_stream(source, &config);
    cr_expect(fdsl_stream_load(stream, &state) == FDSL_INVALID && strstr(fdsl_error(), "transform"), "%s",
              fdsl_error());
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* ---- Files ---- */

/* A file that is cut or written again ends a stream and a selection with an error that names it. No handler
 * of a signal is installed for this. */
Test(lib_rows, a_changed_file_is_an_error)
{
    static const char *const changes[] = {"truncate -s 100000 x.npy", "cp x.npy z && mv z x.npy",
                                          "printf 1 | dd of=x.npy bs=1 seek=3000 conv=notrunc 2>/dev/null",
                                          "rm x.npy"};
    struct sigaction before, action;
    cr_assert_eq(sigaction(SIGBUS, NULL, &before), 0);
    for (size_t i = 0; i < COUNT_OF(changes); i++) {
        EXPECT(0, "rm -f x.npy");
        prepare();
        struct fdsl_source *source = opened_rows("x.npy", NULL), *chosen = NULL;
        struct fdsl_stream_config config = stream_config();
        struct fdsl_stream *stream = opened_stream(source, &config);
        struct fdsl_select_config select = select_config();
        struct fdsl_batch *batch;
        select.dedup = 1;
        good(fdsl_stream_next(stream, NULL, &batch));
        cr_assert_eq(sigaction(SIGBUS, NULL, &action), 0);
        cr_expect_eq(action.sa_handler, before.sa_handler);
        EXPECT(0, "%s", changes[i]);
        good(fdsl_batch_release(batch, NULL));
        enum fdsl_status result = FDSL_OK;
        for (int j = 0; j < 8 && result == FDSL_OK; j++) {
            result = fdsl_stream_next(stream, NULL, &batch);
            if (result == FDSL_OK)
                good(fdsl_batch_release(batch, NULL));
        }
        cr_expect(result == FDSL_FAILED && strstr(fdsl_error(), "x.npy"), "case %zu: %s", i, fdsl_error());
        cr_expect_eq(fdsl_stream_next(stream, NULL, &batch), FDSL_FAILED);
        cr_expect_eq(fdsl_rows_select(source, &select, &chosen), FDSL_FAILED);
        cr_expect(!chosen && strstr(fdsl_error(), "x.npy"), "case %zu: %s", i, fdsl_error());
        fdsl_stream_close(stream);
        fdsl_source_close(source);
    }
}

/* More files than may stay open: the others are opened for each read. */
Test(lib_rows, more_files_than_descriptors)
{
    prepare();
    char shape[64], name[64];
    struct rlimit limit;
    snprintf(shape, sizeof shape, "%d, %d", ROWS, COLUMNS);
    EXPECT(0, "mkdir many");
    for (int i = 0; i < 80; i++) {
        snprintf(name, sizeof name, "many/%02d.npy", i);
        put_npy(name, "<f4", shape, rows, sizeof rows);
    }
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = 64;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    struct fdsl_source *source = opened_rows("many", NULL);
    struct fdsl_stream_config config = stream_config();
    struct fdsl_batch *batch;
    config.batch_size = 4000;
    struct fdsl_stream *stream = opened_stream(source, &config);
    good(fdsl_stream_next(stream, NULL, &batch));
    const int64_t *numbers = tensor_of(batch, FDSL_NUMBERS).data;
    const float *values = tensor_of(batch, FDSL_ROWS).data;
    for (int i = 0; i < 4000; i++)
        cr_assert_eq(memcmp(values + i * WIDTH, rows + numbers[i] % ROWS * COLUMNS, COLUMNS * sizeof *rows),
                     0);
    good(fdsl_batch_release(batch, NULL));
    EXPECT(0, "truncate -s 100 many/79.npy");
    for (int i = 0; i < 4 && fdsl_stream_next(stream, NULL, &batch) == FDSL_OK; i++)
        good(fdsl_batch_release(batch, NULL));
    cr_expect(strstr(fdsl_error(), "79.npy"), "%s", fdsl_error());
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

/* ---- Lifetime ---- */

/* Batches stay valid after a seek and after the stream was closed. */
Test(lib_rows, batches_that_are_held_stay_valid)
{
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", NULL);
    struct fdsl_stream_config config = stream_config();
    struct fdsl_batch *batches[3];
    config.held = 3;
    struct fdsl_stream *stream = opened_stream(source, &config);
    for (int i = 0; i < 3; i++) {
        good(fdsl_stream_next(stream, NULL, &batches[i]));
        good(fdsl_stream_seek(stream, 3 - (uint64_t)i, 2));
    }
    struct fdsl_batch_info info = {.size = sizeof info};
    good(fdsl_batch_describe(batches[2], &info));
    cr_expect(info.epoch == 2 && info.step == 2);
    fdsl_stream_close(stream);
    fdsl_source_close(source);
    for (int i = 2; i >= 0; i--) {
        expect_rows(batches[i], rows, DTYPE_F32, OPS_F32);
        good(fdsl_batch_release(batches[i], NULL));
    }
}

static void open_and_leave(struct fdsl_source *source)
{
    struct fdsl_stream_config config = stream_config();
    struct fdsl_select_config select = select_config();
    struct fdsl_batch *batch;
    select.dedup = 1;
    struct fdsl_source *chosen = selected(source, &select);
    struct fdsl_stream *stream = opened_stream(chosen, &config);
    good(fdsl_stream_next(stream, NULL, &batch));
    fdsl_stream_close(stream);
    good(fdsl_batch_release(batch, NULL));
    fdsl_source_close(chosen);
}

/* Returns the number of threads and open files of this process. */
static int handles_in_use(void)
{
    EXPECT(0, "ls /proc/%d/fd /proc/%d/task | wc -l", getpid(), getpid());
    return atoi(out);
}

Test(lib_rows, memory_and_descriptors_are_flat)
{
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", "y.npy");
    size_t begin = 0;
    int before = 0;
    for (int i = 0; i < 300; i++) {
        open_and_leave(source);
        if (i == 99) {
            before = handles_in_use();
            begin = mallinfo2().uordblks;
        }
    }
#ifndef FDSL_SANITIZED
    cr_expect_leq(mallinfo2().uordblks, begin + 8192);
#else
    (void)begin;
#endif
    int after = handles_in_use();
    for (int i = 0; i < 100 && after != before;
         i++) { /* the kernel removes a thread a little after it ended */
        usleep(10000);
        after = handles_in_use();
    }
    cr_expect_eq(after, before);
    fdsl_source_close(source);
}

static void *use_source(void *context)
{
    for (int i = 0; i < 5; i++)
        open_and_leave(context);
    return NULL;
}

Test(lib_rows, threads_share_a_source)
{
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", "y.npy");
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, use_source, source), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    fdsl_source_close(source);
}

#ifndef FDSL_SANITIZED
static void *use_all(void *context)
{
    (void)context;
    struct fdsl_source *source = opened_rows("x.npy", "y.npy");
    open_and_leave(source);
    fdsl_source_close(source);
    return NULL;
}

/* Programs may call the library in threads with small stacks. */
Test(lib_rows, a_stack_of_64_kib_is_enough)
{
    prepare();
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    cr_assert_eq(pthread_attr_setstacksize(&attributes, 65536), 0);
    cr_assert_eq(pthread_create(&thread, &attributes, use_all, NULL), 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
}
#endif

Test(lib_rows, a_forked_child_gets_an_error)
{
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", NULL);
    const struct fdsl_select_config select = select_config();
    const pid_t child = fork();
    if (child == 0) {
        struct fdsl_source *own;
        int wrong = fdsl_rows_select(source, &select, &own) != FDSL_FAILED || !strstr(fdsl_error(), "fork");
        const struct fdsl_rows_config config = rows_config("x.npy", NULL);
        wrong |= fdsl_rows_open(&config, &own) != FDSL_OK ? 2 : 0;
        wrong |= fdsl_rows_select(own, &select, &own) != FDSL_OK ? 4 : 0;
        _exit(wrong);
    }
    int result;
    cr_assert_eq(waitpid(child, &result, 0), child);
    cr_expect(WIFEXITED(result) && WEXITSTATUS(result) == 0, "%x", result);
    fdsl_source_close(source);
}

/* ---- Wrong arguments ---- */

static void expect_refused_rows(const struct fdsl_rows_config *config, const char *name)
{
    struct fdsl_source *source = (struct fdsl_source *)1;
    cr_expect_eq(fdsl_rows_open(config, &source), FDSL_INVALID, "%s", name);
    cr_expect(!source && strncmp(fdsl_error(), name, strlen(name)) == 0, "%s: %s", name, fdsl_error());
}

static void expect_refused_select(struct fdsl_source *from, const struct fdsl_select_config *config,
                                  const char *name)
{
    struct fdsl_source *source = (struct fdsl_source *)1;
    cr_expect_eq(fdsl_rows_select(from, config, &source), FDSL_INVALID, "%s", name);
    cr_expect(!source && strncmp(fdsl_error(), name, strlen(name)) == 0, "%s: %s", name, fdsl_error());
}

static void expect_refused_stream(struct fdsl_source *source, const struct fdsl_stream_config *config,
                                  const char *name)
{
    struct fdsl_stream *stream = (struct fdsl_stream *)1;
    cr_expect_eq(fdsl_stream_open(source, config, &stream), FDSL_INVALID, "%s", name);
    cr_expect(!stream && strncmp(fdsl_error(), name, strcspn(name, "[")) == 0, "%s: %s", name, fdsl_error());
}

#define REFUSED_ROWS(field, value)              \
    do {                                        \
        struct fdsl_rows_config wrong = config; \
        wrong.field = value;                    \
        expect_refused_rows(&wrong, #field);    \
    } while (0)
#define REFUSED_SELECT(field, value)                   \
    do {                                               \
        struct fdsl_select_config wrong = select;      \
        wrong.field = value;                           \
        expect_refused_select(source, &wrong, #field); \
    } while (0)
#define REFUSED_STREAM(field, value)                   \
    do {                                               \
        struct fdsl_stream_config wrong = stream;      \
        wrong.field = value;                           \
        expect_refused_stream(source, &wrong, #field); \
    } while (0)

Test(lib_rows, every_field_is_checked)
{
    static const uint8_t none[ROWS];
    static const int64_t unknown[] = {4000};
    prepare();
    put_npy("empty.npy", "<f4", "0, 4", rows, 0);
    EXPECT(0, "mkdir empty");
    struct fdsl_rows_config config = rows_config("x.npy", NULL);
    REFUSED_ROWS(path, NULL);
    REFUSED_ROWS(path, "");
    REFUSED_ROWS(path, "/nowhere/x.npy");
    REFUSED_ROWS(tensor, "");
    REFUSED_ROWS(labels, "");
    REFUSED_ROWS(align, 0);
    REFUSED_ROWS(align, 65);
    config = rows_config("empty.npy", NULL);
    expect_refused_rows(&config, "path: ");
    config = rows_config("empty", NULL);
    expect_refused_rows(&config, "path: ");
    config = rows_config("x.npy", NULL);
    config.tensor = "emb";
    struct fdsl_source *source;
    cr_expect(fdsl_rows_open(&config, &source) == FDSL_FAILED &&
                  strstr(fdsl_error(), "no tensor matches tensor 'emb'"),
              "%s", fdsl_error());
    config = rows_config("x.npy", NULL);
    config.size++;
    cr_expect(fdsl_rows_open(&config, &source) == FDSL_INVALID && strstr(fdsl_error(), "config->size"));
    cr_expect_eq(fdsl_rows_open(NULL, &source), FDSL_INVALID);
    cr_expect_eq(fdsl_rows_open(&config, NULL), FDSL_INVALID);
    cr_expect_eq(fdsl_rows_config_init(NULL, sizeof config), FDSL_INVALID);
    cr_expect_eq(fdsl_rows_config_init(&config, 1), FDSL_INVALID);

    source = opened_rows("x.npy", NULL);
    struct fdsl_select_config select = select_config();
    REFUSED_SELECT(keep, none); /* keep_count is 0 */
    REFUSED_SELECT(labels, unknown);
    select.keep_count = ROWS;
    expect_refused_select(source, &select, "keep: ");
    select = select_config();
    select.label_count = 1;
    expect_refused_select(source, &select, "labels: ");
    select = select_config();
    REFUSED_SELECT(validate, 2);
    REFUSED_SELECT(dedup, -1);
    REFUSED_SELECT(sample, ROWS + 1);
    REFUSED_SELECT(dtype, NULL);
    REFUSED_SELECT(dtype, "u8");
    REFUSED_SELECT(num_threads, -1);
    REFUSED_SELECT(device, -2);
    select.norm_min = 1;
    expect_refused_select(source, &select, "validate: ");
    select.validate = 1;
    REFUSED_SELECT(norm_min, NAN);
    REFUSED_SELECT(norm_min, 1e-16);
    REFUSED_SELECT(norm_min, 1e20);
    REFUSED_SELECT(norm_min, -1);
    REFUSED_SELECT(norm_max, NAN);
    REFUSED_SELECT(norm_max, INFINITY);
    select.norm_min = 3;
    select.norm_max = 2;
    expect_refused_select(source, &select, "norm_min: ");
    select = select_config();
    select.keep = none;
    select.keep_count = ROWS;
    expect_refused_select(source, &select, "no row is left");
    select.size--;
    expect_refused_select(source, &select, "config->size");
    struct fdsl_source *none_opened;
    cr_expect_eq(fdsl_rows_select(NULL, &select, &none_opened), FDSL_INVALID);
    cr_expect_eq(fdsl_rows_select(source, NULL, &none_opened), FDSL_INVALID);
    cr_expect_eq(fdsl_rows_select(source, &select, NULL), FDSL_INVALID);
    cr_expect_eq(fdsl_select_config_init(NULL, sizeof select), FDSL_INVALID);

    struct fdsl_source *halves;
    select = select_config();
    select.dtype = "f16";
    good(fdsl_rows_select(source, &select, &halves));
    cr_expect_str_eq(info_of(halves).dtype, "f16");
    select.dtype = "bf16";
    expect_refused_select(halves, &select, "dtype: ");
    select = select_config();
    select.dedup = 1;
    expect_refused_select(halves, &select, "dedup: ");
    struct fdsl_stream_config stream = stream_config();
    stream.dtype = "f32";
    expect_refused_stream(halves, &stream, "dtype: ");
    fdsl_source_close(halves);
    fdsl_source_close(source);
}

Test(lib_rows, fields_of_images_are_refused)
{
    prepare();
    struct fdsl_source *source = opened_rows("x.npy", NULL);
    struct fdsl_stream_config stream = stream_config();
    REFUSED_STREAM(batch_size, 0);
    REFUSED_STREAM(rank, 1);
    REFUSED_STREAM(shuffle, 2);
    REFUSED_STREAM(drop_last, 2);
    REFUSED_STREAM(shuffle_buffer, 100);
    REFUSED_STREAM(lanes, 1);
    REFUSED_STREAM(out_res, 8);
    REFUSED_STREAM(fit, "crop");
    REFUSED_STREAM(flip, 1);
    REFUSED_STREAM(channels, 1);
    REFUSED_STREAM(layout, "nhwc");
    REFUSED_STREAM(dtype, "u8");
    REFUSED_STREAM(dtype, NULL);
    stream.mean[1] = 0.5;
    expect_refused_stream(source, &stream, "mean: ");
    stream = stream_config();
    stream.std[2] = 0.5;
    expect_refused_stream(source, &stream, "std: ");
    stream = stream_config();
    REFUSED_STREAM(num_threads, -1);
    REFUSED_STREAM(prefetch, 0);
    REFUSED_STREAM(held, 0);
    REFUSED_STREAM(shard_bytes, 1);
    REFUSED_STREAM(resident_bytes, 1);
    REFUSED_STREAM(on_error, "mask");
    REFUSED_STREAM(decoder, "cpu");
    REFUSED_STREAM(device_share, 0.5);
    REFUSED_STREAM(rand_augment, 9);
    REFUSED_STREAM(rand_augment_ops, 3);
    REFUSED_STREAM(erasing, 0.5);
    REFUSED_STREAM(contrast[1], 2);
    REFUSED_STREAM(blur_p, 1);
    REFUSED_STREAM(mixup, 0.5);
    REFUSED_STREAM(cutmix, 0.5);
    REFUSED_STREAM(classes, 10);
    REFUSED_STREAM(wait_s, NAN);
    REFUSED_STREAM(resident, 2);
    REFUSED_STREAM(resident, 1); /* on the CPU */
    REFUSED_STREAM(device, -2);
    stream.batch_size = ROWS + 1;
    REFUSED_STREAM(drop_last, 1);
    stream = stream_config();
    if (fdsl_cuda_devices() == 0) {
        struct fdsl_select_config select = select_config();
        struct fdsl_source *none = NULL;
        struct fdsl_stream *absent = NULL;
        stream.device = select.device = 0;
        cr_expect(fdsl_rows_select(source, &select, &none) == FDSL_UNAVAILABLE && !none, "%s", fdsl_error());
        cr_expect(fdsl_stream_open(source, &stream, &absent) == FDSL_UNAVAILABLE && !absent);
        cr_expect(strncmp(fdsl_error(), "device: ", 8) == 0, "%s", fdsl_error());
        stream.device = FDSL_CPU;
    }
    struct fdsl_stream *opened = opened_stream(source, &stream);
    static float room[64 * WIDTH];
    int64_t given[64];
    uint32_t count;
    cr_expect(fdsl_stream_fill(opened, room, given, &count, NULL) == FDSL_INVALID &&
                  strstr(fdsl_error(), "labels: "),
              "%s", fdsl_error());
    good(fdsl_stream_fill(opened, room, NULL, &count, NULL));
    cr_expect_eq(count, 64);
    fdsl_stream_close(opened);
    fdsl_source_close(source);
}

#endif
