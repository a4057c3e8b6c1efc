/* Tests training on rows of embeddings: files and labels, the reference of softmax regression, feeds,
 * checkpoints and errors. */
#include <math.h>

#include "data/npy.h"
#include "data/tensor_file.h"
#include "train/trainer.h"
#include "train_support.h"

#include "cells.h"
#include "torch_writer.h"
#include "train_cli.h"

TestSuite(train_rows, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

#ifdef _OPENMP
#define ENGINES "train-naive,train-omp"
#define ENGINE  "train-omp"
#else
#define ENGINES "train-naive"
#define ENGINE  "train-naive"
#endif

/* ---- Two Gaussian clouds ---- */

#define ROWS    1200
#define COLUMNS 37 /* odd, and not a multiple of 8 */
#define CLASSES 2

static float rows[ROWS][COLUMNS];
static int64_t labels[ROWS];

/* Returns a number of the normal distribution. */
static double normal(uint32_t i, uint32_t k, uint32_t stream)
{
    const struct philox_block words = philox(philox_key(5), i, k, stream, 0);
    return sqrt(-2 * log((words.word[0] + 0.5) * 0x1p-32)) * cos(6.283185307179586 * words.word[1] * 0x1p-32);
}

/* The centres of the clouds have a distance of 6 standard deviations, so a plane separates 99.8 % of the
 * rows. */
static void make_clouds(void)
{
    for (uint32_t i = 0; i < ROWS; i++) {
        labels[i] = philox(philox_key(6), i, 0, 0, 0).word[0] % CLASSES;
        for (uint32_t k = 0; k < COLUMNS; k++)
            rows[i][k] =
                (float)(normal(i, k, 0) + (labels[i] ? 3.0 : -3.0) * (k % 2 ? 1 : -1) / sqrt(COLUMNS));
    }
}

static void put_array(const char *name, const char *type, const char *shape, const void *values, size_t bytes)
{
    static char file[NPY_HEADER_MAX + sizeof rows];
    const size_t header = npy_header_make(file, type, shape);
    memcpy(file + header, values, bytes);
    put(name, file, header + bytes);
}

/* Writes rows first .. end - 1 and their labels as a safetensors file. `type` is f32, f16 or bf16. */
static inline void put_tensors(const char *name, enum dtype type, uint32_t first, uint32_t end)
{
    static uint16_t halves[ROWS][COLUMNS];
    static const char *const types[] = {[DTYPE_F32] = "F32", [DTYPE_F16] = "F16", [DTYPE_BF16] = "BF16"};
    char path[PATH_MAX];
    for (uint32_t i = first; i < end; i++)
        for (uint32_t k = 0; k < COLUMNS; k++)
            halves[i][k] = type == DTYPE_F16 ? half_from_float(rows[i][k]) : bf16_from_float(rows[i][k]);
    const struct safetensor tensors[] = {
        {.name = "rows",
         .type = types[type],
         .axes = 2,
         .shape = {end - first, COLUMNS},
         .values = type == DTYPE_F32 ? (const void *)rows[first] : halves[first],
         .bytes = (end - first) * COLUMNS * dtype_bytes(type)},
        {.name = "labels",
         .type = "I64",
         .axes = 1,
         .shape = {end - first},
         .values = &labels[first],
         .bytes = (end - first) * sizeof *labels}};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    cr_assert_eq(safetensors_write(path, (const char *const[]){"fdsl-bench", "test", NULL}, tensors, 2),
                 STATUS_OK, "%s", status_text());
}

#define TEXT(number)  TEXT_(number)
#define TEXT_(number) #number
#define SHAPE         TEXT(ROWS) ", " TEXT(COLUMNS)

/* The same rows as x.npy with y.npy, and in the folder emb. */
static inline void put_clouds(void)
{
    make_clouds();
    put_array("x.npy", "<f4", SHAPE, rows, sizeof rows);
    put_array("y.npy", "<i8", TEXT(ROWS) ",", labels, sizeof labels);
    EXPECT(0, "mkdir emb");
    put_tensors("emb/a.safetensors", DTYPE_F32, 0, 500);
    put_tensors("emb/b.safetensors", DTYPE_F32, 500, ROWS);
}

#define TRAIN  "$P --variant " ENGINE " --epochs 4 --lr 0.01 --format csv "
#define ARRAYS "--data x.npy --labels y.npy "

#ifdef HAVE_JANSSON

/* ---- The reference ---- */

#define STEPS 5
#define RATE  0.5

/* Softmax regression in double precision, independent of the trainer: full-batch gradient descent.
 * `parameters` has the weights (CLASSES x COLUMNS) and then the biases. Returns the loss before the step. */
static double descend(double parameters[CLASSES * COLUMNS + CLASSES])
{
    double gradients[CLASSES * COLUMNS + CLASSES] = {0}, loss = 0;
    for (uint32_t i = 0; i < ROWS; i++) {
        double logits[CLASSES], sum = 0;
        for (uint32_t c = 0; c < CLASSES; c++) {
            logits[c] = parameters[CLASSES * COLUMNS + c];
            for (uint32_t k = 0; k < COLUMNS; k++)
                logits[c] += parameters[c * COLUMNS + k] * (double)rows[i][k];
            sum += exp(logits[c]);
        }
        loss += log(sum) - logits[labels[i]];
        for (uint32_t c = 0; c < CLASSES; c++) {
            const double delta = (exp(logits[c]) / sum - (labels[i] == c)) / ROWS;
            gradients[CLASSES * COLUMNS + c] += delta;
            for (uint32_t k = 0; k < COLUMNS; k++)
                gradients[c * COLUMNS + k] += delta * (double)rows[i][k];
        }
    }
    for (uint32_t p = 0; p < CLASSES * COLUMNS + CLASSES; p++)
        parameters[p] -= RATE * gradients[p];
    return loss / ROWS;
}

/* Adds the values of a tensor of an exported file to `values`. */
static void take_tensor(const char *file, const char *name, double *values, size_t count)
{
    char path[PATH_MAX];
    float buffer[CLASSES * COLUMNS];
    struct tensor_file tensors;
    size_t i = 0;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    cr_assert_eq(tensor_file_open(path, &tensors), STATUS_OK, "%s", status_text());
    while (i < tensors.count && strcmp(tensors.tensors[i].name, name) != 0)
        i++;
    cr_assert(i < tensors.count && tensors.tensors[i].bytes == count * sizeof *buffer, "%s: %s", file, name);
    must(tensor_file_read(&tensors, tensors.tensors[i].offset, buffer, count * sizeof *buffer));
    for (size_t p = 0; p < count; p++)
        values[p] = buffer[p];
    tensor_file_close(&tensors);
}

/* The test set is the training set again, so all rows are trained on. */
Test(train_rows, logreg_computes_softmax_regression)
{
    double wanted[CLASSES * COLUMNS + CLASSES], mine[CLASSES * COLUMNS + CLASSES], loss = 0, worst = 0;
    static const char *const feeds[] = {"stored", "load"};
    put_clouds();
    EXPECT(0, TRAIN "--data emb --test-data emb --model logreg --raw --dry-run --export-data d.safetensors");
    take_tensor("d.safetensors", "initial.fc1.weight", wanted, CLASSES * COLUMNS);
    take_tensor("d.safetensors", "initial.fc1.bias", wanted + CLASSES * COLUMNS, CLASSES);
    for (int step = 0; step < STEPS; step++)
        loss = descend(wanted);
    for (size_t i = 0; i < COUNT_OF(feeds); i++) {
        EXPECT(0,
               "$P --variant " ENGINES
               " --model logreg --format csv --data emb --test-data emb --raw --optimizer sgd "
               "--momentum 0 --lr " TEXT(RATE) " --batch " TEXT(ROWS) " --epochs " TEXT(
                   STEPS) " --feed %s --verify",
               feeds[i]);
        for (size_t row = STEPS; row < count_of(out, "\n"); row += STEPS)
            cr_expect_float_eq(number(out, row, "train_loss"), loss, 1e-6 * loss, "%s", out);
        EXPECT(0,
               "$P --variant " ENGINE
               " --model logreg --data emb --test-data emb --raw --optimizer sgd --momentum 0 "
               "--lr " TEXT(RATE) " --batch " TEXT(ROWS) " --epochs " TEXT(
                   STEPS) " --feed %s --export e%zu.safetensors",
               feeds[i], i);
        char name[32];
        snprintf(name, sizeof name, "e%zu.safetensors", i);
        take_tensor(name, "fc1.weight", mine, CLASSES * COLUMNS);
        take_tensor(name, "fc1.bias", mine + CLASSES * COLUMNS, CLASSES);
        for (uint32_t p = 0; p < CLASSES * COLUMNS + CLASSES; p++)
            worst = worse(worst, fabs(mine[p] - wanted[p]));
        cr_expect_lt(worst, 1e-6, "--feed %s: off by %g", feeds[i], worst);
    }
}

/* ---- Formats and feeds ---- */

Test(train_rows, both_networks_separate_two_clouds)
{
    static const char *const networks[] = {"logreg", "mlp"}, *const feeds[] = {"stored", "load"};
    put_clouds();
    for (size_t i = 0; i < COUNT_OF(networks); i++)
        for (size_t k = 0; k < COUNT_OF(feeds); k++) {
            EXPECT(0,
                   "$P --variant " ENGINES
                   " --epochs 6 --lr 0.01 --batch 16 --format csv --verify --data emb --model %s --feed %s",
                   networks[i], feeds[k]);
            for (size_t row = 6; row < count_of(out, "\n"); row += 6) {
                cr_expect_gt(number(out, row, "test_acc"), 0.99, "%s, %s: %s", networks[i], feeds[k], out);
                cr_expect_gt(number(out, row, "train_acc"), 0.99, "%s, %s: %s", networks[i], feeds[k], out);
                cr_expect_eq(number(out, row, "wrong"), 0);
            }
        }
}

/* Returns the training loss of the last epoch with these options, as text. */
static const char *loss_of(const char *options)
{
    static char loss[64];
    EXPECT(0, TRAIN "--model logreg %s", options);
    snprintf(loss, sizeof loss, "%.63s", value(out, 4, "train_loss"));
    return loss;
}

Test(train_rows, formats_and_divisions_into_files_make_no_difference)
{
    char wanted[64];
    put_clouds();
    snprintf(wanted, sizeof wanted, "%s", loss_of(ARRAYS));
    cr_expect_str_eq(value(out, 4, "dim"), TEXT(COLUMNS));
    cr_expect_str_eq(value(out, 4, "dtype"), "f32");
    cr_expect_str_eq(value(out, 4, "train_samples"), "1080", "a tenth of each class is held out");
    cr_expect_str_eq(value(out, 4, "test_samples"), "120");
    const double rate = number(out, 4, "end_to_end_per_s");
    cr_expect_float_eq(rate, 4 * 1080 / (number(out, 4, "opening_s") + number(out, 4, "trained_s")),
                       1e-3 * rate);
    cr_expect_str_eq(loss_of("--data emb"), wanted);
    cr_expect_str_eq(loss_of("--data emb/a.safetensors,emb/b.safetensors"), wanted);
    cr_expect_str_eq(loss_of("--data 'emb/?.safetensors' --labels y.npy"), wanted);
    cr_expect_str_eq(loss_of("--data emb --tensor 'r*' --labels labels --threads 3"), wanted);
    put_tensors("h.safetensors", DTYPE_F16, 0, ROWS);
    const double half = atof(loss_of("--data h.safetensors"));
    cr_expect_float_eq(half, atof(wanted), 1e-3 * half);
    cr_expect_str_eq(value(out, 4, "dtype"), "f16");
    put_tensors("b.safetensors", DTYPE_BF16, 0, ROWS);
    const double coarse = atof(loss_of("--data b.safetensors"));
    cr_expect_float_eq(coarse, atof(wanted), 1e-2 * coarse);
    cr_expect_str_eq(value(out, 4, "dtype"), "bf16");
}

/* A file of torch.save({"x": rows, "labels": labels}). */
Test(train_rows, a_dictionary_of_pytorch_has_rows_and_labels)
{
    static struct blob blob;
    static struct archive archive;
    char wanted[64];
    put_clouds();
    snprintf(wanted, sizeof wanted, "%s", loss_of("--data emb"));
    pickle_begin(&blob);
    blob_text(&blob, "}(");
    pickle_text(&blob, "x");
    pickle_tensor(&blob, &(struct written){"FloatStorage", "0", ROWS * COLUMNS, 0, ROWS, COLUMNS});
    pickle_text(&blob, "labels");
    pickle_tensor(&blob, &(struct written){"LongStorage", "1", ROWS, 0, ROWS, 0});
    blob_text(&blob, "u.");
    archive_begin(&archive);
    archive_add(&archive, "x/data.pkl", blob.bytes, blob.count);
    archive_add(&archive, "x/data/0", rows, sizeof rows);
    archive_add(&archive, "x/data/1", labels, sizeof labels);
    archive_end(&archive);
    put("x.pt", archive.file.bytes, archive.file.count);
    cr_expect_str_eq(loss_of("--data x.pt"), wanted);
    EXPECT(0, "mkdir torch && mv x.pt torch");
    cr_expect_str_eq(loss_of("--data torch"), wanted);
}

#ifdef HAVE_ZLIB
/* Labels in an .npz, which may be compressed: beside the rows, or in a file of their own. */
Test(train_rows, npz_files_have_labels)
{
    static const char *const methods[] = {"ZIP_STORED", "ZIP_DEFLATED"};
    char wanted[64], options[64];
    put_clouds();
    snprintf(wanted, sizeof wanted, "%s", loss_of("--data emb"));
    for (size_t i = 0; i < COUNT_OF(methods); i++) {
        EXPECT(0,
               "python3 -c 'import zipfile as z\n"
               "f = z.ZipFile(\"both%zu.npz\", \"w\", z.%s)\n"
               "f.write(\"x.npy\", \"x.npy\"), f.write(\"y.npy\", \"labels.npy\"), f.close()\n"
               "f = z.ZipFile(\"l%zu.npz\", \"w\", z.%s)\n"
               "f.write(\"x.npy\", \"x.npy\"), f.write(\"y.npy\", \"classes.npy\"), f.close()'",
               i, methods[i], i, methods[i]);
        snprintf(options, sizeof options, "--data both%zu.npz", i);
        cr_expect_str_eq(loss_of(options), wanted, "%s", methods[i]);
        snprintf(options, sizeof options, "--data emb --labels l%zu.npz", i);
        cr_expect_str_eq(loss_of(options), wanted, "%s", methods[i]);
    }
}
#endif

/* Removes a row and its label. */
static void remove_row(uint32_t row)
{
    memmove(rows[row], rows[row + 1], (ROWS - 1 - row) * sizeof *rows);
    memmove(&labels[row], &labels[row + 1], (ROWS - 1 - row) * sizeof *labels);
}

/* --prepare drops rows, and keeps the labels of the others. */
Test(train_rows, prepared_rows_keep_their_labels)
{
    static const uint32_t bad[] = {1100, 700, 5};
    char wanted[64];
    put_clouds();
    for (size_t i = 0; i < COUNT_OF(bad); i++)
        rows[bad[i]][i] = i % 2 ? NAN : INFINITY;
    put_array("x.npy", "<f4", SHAPE, rows, sizeof rows);
    run(TRAIN "--model logreg " ARRAYS);
    expect(1, "x.npy: row 5 has a value that is not finite; --prepare DIR --from embeddings --labels NAME");
    for (int odd = 0; odd < 2; odd++)
        EXPECT(0,
               "$P --prepare clean%d --from embeddings --source x.npy --labels y.npy --norm-min 0 --norm-max "
               "1e19 --rows-per-file 333 %s && $P --verify-set clean%d",
               odd, odd ? "--to f16" : "", odd);
    for (size_t i = 0; i < COUNT_OF(bad); i++)
        remove_row(bad[i]);
    put_tensors("left.safetensors", DTYPE_F32, 0, ROWS - 3);
    put_tensors("half.safetensors", DTYPE_F16, 0, ROWS - 3);
    snprintf(wanted, sizeof wanted, "%s", loss_of("--data left.safetensors"));
    cr_expect_str_eq(loss_of("--data clean0 --labels labels"), wanted);
    snprintf(wanted, sizeof wanted, "%s", loss_of("--data half.safetensors"));
    cr_expect_str_eq(loss_of("--data clean1 --labels labels"), wanted);
    EXPECT_PRINTS(2, "other options (--labels=y.npy there, none now)",
                  "$P --prepare clean0 --from embeddings --source x.npy --norm-min 0 --norm-max 1e19 "
                  "--rows-per-file 333");
    EXPECT_PRINTS(2, "--labels: a .npy file has no room for labels",
                  "$P --prepare none --from embeddings --source x.npy --labels y.npy --encode npy");
    EXPECT_PRINTS(2, "--labels: emb/a.safetensors: it has no tensor 'z'",
                  "$P --prepare none --from embeddings --source emb --labels z");
}

/* A file of tensors beside class folders is not a set of rows. */
Test(train_rows, a_folder_of_images_may_have_a_file_of_tensors)
{
    put_clouds();
    EXPECT(0, "$P --prepare photos --store imagefolder --from digits --samples 60 && "
              "cp emb/a.safetensors photos/model.safetensors");
    EXPECT(0, TRAIN "--model logreg --data photos 2>/dev/null");
    cr_expect_str_empty(value(out, 1, "dim"));
}

/* Both feeds have one order. It depends neither on files nor on threads, nor on how far a thread reads ahead.
 */
Test(train_rows, rows_that_are_read_have_one_order)
{
    char wanted[64];
    put_clouds();
    snprintf(wanted, sizeof wanted, "%s", loss_of("--raw --feed load " ARRAYS));
    cr_expect_gt(number(out, 4, "read_bytes_per_s"), 0);
    cr_expect_str_eq(value(out, 4, "decoder"), "cpu");
    cr_expect_str_eq(loss_of("--raw --feed stored " ARRAYS), wanted);
    cr_expect_str_eq(loss_of("--raw --feed load --threads 3 --prefetch 5 --data emb"), wanted);
    cr_expect_str_neq(loss_of("--raw --feed load --shuffle 0 --data emb"), wanted);
    EXPECT(0, "$P --variant train-naive --data emb --model logreg --raw --feed load --epochs 4 --lr 0.01 "
              "--format csv --verify");
    cr_expect_float_eq(number(out, 4, "train_loss"), atof(wanted), 1e-6);
}

/* Rows whose labels are sorted are held out from every class, and the choice does not depend on other rows.
 */
Test(train_rows, each_class_holds_out_a_share)
{
    put_clouds();
    for (uint32_t i = 0; i < ROWS; i++)
        labels[i] = i / (ROWS / 3);
    put_array("y.npy", "<i8", TEXT(ROWS) ",", labels, sizeof labels);
    EXPECT(0, TRAIN ARRAYS "--model logreg --test-share 0.25 --dry-run --export-data d.safetensors");
    struct tensor_file file;
    char path[PATH_MAX];
    uint32_t held[ROWS], counts[3] = {0};
    snprintf(path, sizeof path, "%s/d.safetensors", folder);
    must(tensor_file_open(path, &file));
    for (size_t i = 0; i < file.count; i++)
        if (strcmp(file.tensors[i].name, "test.labels") == 0) {
            cr_assert_eq(file.tensors[i].bytes, ROWS / 4 * sizeof *held);
            must(tensor_file_read(&file, file.tensors[i].offset, held, file.tensors[i].bytes));
        }
    tensor_file_close(&file);
    for (uint32_t i = 0; i < ROWS / 4; i++)
        counts[held[i]]++;
    cr_expect(counts[0] == 100 && counts[1] == 100 && counts[2] == 100);
}

/* ---- Checkpoints ---- */

#ifdef HAVE_XXHASH
Test(train_rows, runs_resume_bit_for_bit_and_infer_tests_the_same_rows)
{
    static const char *const feeds[] = {"stored", "load"};
    char accuracy[64];
    put_clouds();
    for (size_t i = 0; i < COUNT_OF(feeds); i++) {
        EXPECT(0, TRAIN "--model mlp --data emb --feed %s --export whole%zu.safetensors", feeds[i], i);
        EXPECT(0,
               "$P --variant " ENGINE
               " --lr 0.01 --model mlp --data emb --feed %s --checkpoint k%zu --epochs 2",
               feeds[i], i);
        EXPECT(0,
               TRAIN "--model mlp --data emb --feed %s --checkpoint k%zu --resume --export parts.safetensors "
                     "--threads 2",
               feeds[i], i);
        snprintf(accuracy, sizeof accuracy, "%s", value(out, 2, "test_acc"));
        EXPECT(0, "cmp whole%zu.safetensors parts.safetensors", i);
        EXPECT(0,
               "$P --workload infer --variant auto --checkpoint k%zu --verify --format csv --max-time 0.1 "
               "--min-time 0",
               i);
        cr_expect_str_eq(value(out, 1, "test_acc"), accuracy);
        EXPECT(0,
               "$P --variant infer-naive --checkpoint k%zu --data x.npy --labels y.npy --test-size 100 "
               "--format csv "
               "--max-time 0.1 --min-time 0 2>&1",
               i);
    }
    labels[7] ^= 1;
    put_tensors("emb/a.safetensors", DTYPE_F32, 0, 500);
    run("$P --variant " ENGINE " --lr 0.01 --model mlp --data emb --checkpoint k0 --resume --epochs 5");
    expect(2, "the samples of --data emb have changed");
    EXPECT_PRINTS(0, "these are not the test samples",
                  "$P --variant infer-naive --checkpoint k0 --max-time 0.1 --min-time 0 2>&1");
}
#endif

/* ---- Errors ---- */

Test(train_rows, wrong_options_and_files_are_named)
{
    static const struct {
        int status;
        const char *words, *options;
    } cases[] = {
        {2, "--flip augments images, but --data x.npy has rows of embeddings; drop --flip", ARRAYS "--flip"},
        {2, "--shift augments images", ARRAYS "--shift 1"},
        {2, "--erasing augments images", ARRAYS "--erasing 0.1"},
        {2, "--cutmix augments images", ARRAYS "--cutmix 1"},
        {2, "--repeats augments images", ARRAYS "--repeats 2"},
        {2, "--rand-augment augments images", ARRAYS "--rand-augment 5"},
        {2, "--model cnn is for images, but --data x.npy has rows of embeddings; use --model logreg or mlp",
         ARRAYS "--model cnn"},
        {2, "--model vit-micro is for images", ARRAYS "--model vit-micro"},
        {2, "--out-res is for images", ARRAYS "--out-res 32"},
        {2, "--label is for images, but --data x.npy has rows of embeddings; drop --label, or use --labels",
         ARRAYS "--label cls"},
        {2, "--on-error is for images", ARRAYS "--on-error skip"},
        {2, "--lanes is for images, but --data x.npy has rows", ARRAYS "--feed load --lanes 4"},
        {2, "--shuffle is for images, but --data x.npy has rows", ARRAYS "--feed load --shuffle 256"},
        {2,
         "x.npy: it has no tensor 'labels' for the labels, but one without a name; name the tensor, or a "
         "file of labels, with --labels",
         "--data x.npy"},
        {2, "--data: gone.npy: No such file", "--data gone.npy --labels y.npy"},
        {2, "gone.npy: ", "--data x.npy --labels gone.npy"},
        {2, "x.npy: the labels have the type <f4; convert them to integers", "--data x.npy --labels x.npy"},
        {2, "short.npy: there are 5 labels for 1200 rows", "--data x.npy --labels short.npy"},
        {2, "there are 7 labels for 5 rows", "--data nan.npy --labels short.npy,two.npy"},
        {1, "negative.npy: label 3 is -7; labels are 0 to 16777215", "--data x.npy --labels negative.npy"},
        {2, "wide.npy: the labels have 2 axes", "--data x.npy --labels wide.npy"},
        {2, "it has no tensor 'z' for the labels, but 'rows', 'labels'", "--data emb --labels z"},
        {2, "--test-labels needs --test-data", ARRAYS "--test-labels y.npy"},
        {2, "--test-data emb: name the labels of its rows with --test-labels", ARRAYS "--test-data emb"},
        {2, "the training set has rows of 37 values of f32, but the test set has rows of 37 values of f16",
         "--data emb --test-data h.safetensors"},
        {2, "--labels needs --data with rows of embeddings", "--data digits --labels y.npy"},
        {2, " is a URL, but rows of embeddings are read from local files",
         "--data http://x/y --labels y.npy"},
        {2,
         ": its label is 1, the largest of the data, but there are only 1 classes; give --classes 2 or more",
         "--data emb --classes 1"},
        {2, "--train-size 1081: there are only 1080 samples", "--data emb --train-size 1081"},
        {1, "nan.npy: row 2 has a value that is not finite", "--data nan.npy --labels short.npy"},
        {1, "nan.npy: row 2 has a value that is not finite", "--data nan.npy --labels short.npy --feed load"},
    };
    static const int8_t negative[ROWS] = {[3] = -7};
    static const float bad[5][3] = {[2] = {0, INFINITY, NAN}};
    put_clouds();
    put_tensors("h.safetensors", DTYPE_F16, 0, ROWS);
    put_array("short.npy", "<i8", "5,", labels, 5 * sizeof *labels);
    put_array("two.npy", "<i8", "2,", labels, 2 * sizeof *labels);
    put_array("negative.npy", "|i1", TEXT(ROWS) ",", negative, sizeof negative);
    put_array("wide.npy", "<i8", "600, 2", labels, sizeof labels);
    put_array("nan.npy", "<f4", "5, 3", bad, sizeof bad);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        run("timeout 60 $P --variant train-naive --epochs 1 %s %s",
            strstr(cases[i].options, "--model") ? "" : "--model logreg", cases[i].options);
        expect_line(cases[i].status, cases[i].words);
    }
}

Test(train_rows, labels_set_the_number_of_classes)
{
    static const uint32_t classes[] = {1, 5, 500};
    static const char *const feeds[] = {"stored", "load"};
    char wanted[200];
    put_clouds();
    for (size_t i = 0; i < COUNT_OF(classes); i++) {
        for (uint32_t row = 0; row < ROWS; row++)
            labels[row] = row % classes[i];
        put_array("y.npy", "<i8", TEXT(ROWS) ",", labels, sizeof labels);
        for (size_t k = 0; k < COUNT_OF(feeds); k++) {
            EXPECT(0, TRAIN "--model logreg " ARRAYS "--feed %s", feeds[k]);
            cr_expect_eq(number(out, 1, "parameters"), classes[i] * (COLUMNS + 1), "%s", out);
            run(TRAIN "--model logreg " ARRAYS "--feed %s --classes %u", feeds[k], classes[i] / 2 + 1);
            snprintf(wanted, sizeof wanted, ": its label is %u, the largest of the data", classes[i] - 1);
            if (classes[i] > 1)
                expect_line(2, wanted);
        }
    }
}

/* All integer types of .npy files are labels. */
Test(train_rows, labels_have_any_integer_type)
{
    static const char *const types[] = {"|u1", "|i1", "|b1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8"};
    char wanted[64], options[64];
    put_clouds();
    snprintf(wanted, sizeof wanted, "%s", loss_of("--data emb"));
    for (size_t i = 0; i < COUNT_OF(types); i++) {
        const size_t bytes = (size_t)(types[i][2] - '0');
        static uint8_t values[ROWS * 8];
        for (uint32_t row = 0; row < ROWS; row++)
            memcpy(values + row * (types[i][1] == 'b' ? 1 : bytes), &labels[row], bytes);
        put_array("l.npy", types[i], i % 2 ? TEXT(ROWS) ", 1" : TEXT(ROWS) ",", values, ROWS * bytes);
        snprintf(options, sizeof options, "--data emb --labels l.npy");
        cr_expect_str_eq(loss_of(options), wanted, "%s", types[i]);
    }
}

#endif

/* ---- In the process ---- */

/* Opens the rows of the folder emb of the test. */
static void open_data(enum data_feed feed, struct data *data)
{
    static char path[PATH_MAX], label_path[PATH_MAX];
    snprintf(path, sizeof path, "%s/x.npy", folder);
    snprintf(label_path, sizeof label_path, "%s/y.npy", folder);
    const struct data_request request = {.name = path,
                                         .labels = label_path,
                                         .fit = {.channels = 3},
                                         .feed = feed,
                                         .batch = 8,
                                         .lanes = 4,
                                         .shuffle = 64,
                                         .ahead = 2,
                                         .resources = {.threads = 2}};
    must(data_open(&request, data));
    data_normalise(data, true);
}

static uint32_t list_first(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    (void)context, (void)epoch;
    for (uint32_t i = 0; i < 8; i++)
        numbers[i] = (uint32_t)step * 8 + i;
    return 8;
}

static void put_small(void)
{
    make_clouds();
    put_array("x.npy", "<f4", SHAPE, rows, sizeof rows);
    put_array("y.npy", "<i8", TEXT(ROWS) ",", labels, sizeof labels);
}

static void open_rows_stream(const struct data *data, struct stream **stream)
{
    const struct data_stream_request request = {
        .plan = {.steps = 100, .capacity = 8, .list = list_first}, .copies = 1, .threads = 2, .held = 1};
    must(data_stream(data, &request, stream));
}

Test(train_rows, a_stream_delivers_the_stored_rows)
{
    struct data stored, loaded;
    struct stream *stream;
    struct stream_batch batch;
    put_small();
    open_data(DATA_STORED, &stored);
    open_data(DATA_LOAD, &loaded);
    cr_expect_eq(loaded.sets[DATA_TRAIN].count, stored.sets[DATA_TRAIN].count);
    cr_expect_eq(memcmp(loaded.sets[DATA_TRAIN].labels, stored.sets[DATA_TRAIN].labels,
                        stored.sets[DATA_TRAIN].count * sizeof(uint32_t)),
                 0);
    cr_expect_float_eq(loaded.scale[0], stored.scale[0], 0.05F * stored.scale[0]);
    open_rows_stream(&loaded, &stream);
    for (uint32_t step = 0; step < 100; step++) {
        must(stream_next(stream, &batch));
        cr_expect_eq(
            memcmp(batch.samples.values, data_sample(&stored, DATA_TRAIN, step * 8), 8 * stored.sample_bytes),
            0, "step %u", step);
        for (uint32_t i = 0; i < 8; i++) {
            cr_expect_eq(batch.read[i], data_read_hash(&loaded, 0, step * 8 + i));
            cr_expect_eq((uint32_t)batch.labels[i], stored.sets[DATA_TRAIN].labels[step * 8 + i]);
        }
        must(stream_release(stream, &batch, NULL));
    }
    stream_close(stream);
    data_close(&stored);
    data_close(&loaded);
}

/* A file that changes ends the stream with its name. */
Test(train_rows, a_file_that_changes_is_named)
{
    struct data data;
    struct stream *stream;
    struct stream_batch batch;
    put_small();
    open_data(DATA_LOAD, &data);
    put_small(); /* the same bytes in another file */
    open_rows_stream(&data, &stream);
    cr_expect_eq(stream_next(stream, &batch), STATUS_FAILED);
    cr_expect(strstr(status_text(), "x.npy was changed while it was read"), "%s", status_text());
    stream_close(stream);
    data_close(&data);
}

Test(train_rows, a_file_that_shrinks_is_named)
{
    struct data data;
    struct stream *stream;
    struct stream_batch batch;
    char path[PATH_MAX];
    put_small();
    open_data(DATA_LOAD, &data);
    snprintf(path, sizeof path, "%s/x.npy", folder);
    open_rows_stream(&data, &stream);
    must(stream_next(stream, &batch));
    must(stream_release(stream, &batch, NULL));
    cr_assert_eq(truncate(path, 8192), 0);
    enum status last = STATUS_OK;
    for (uint32_t step = 0; step < 100 && last == STATUS_OK; step++) {
        last = stream_next(stream, &batch);
        if (last == STATUS_OK)
            must(stream_release(stream, &batch, NULL));
    }
    cr_expect_eq(last, STATUS_FAILED);
    cr_expect(strstr(status_text(), "x.npy was changed while it was read"), "%s", status_text());
    stream_close(stream);
    data_close(&data);
}

/* Central differences of the oracle, for rows of each type. */
Test(train_rows, gradients_of_rows_equal_central_differences)
{
    static const char *const networks[] = {"logreg", "mlp"};
    for (size_t n = 0; n < COUNT_OF(networks); n++) {
        struct net net;
        const float reach = 0x1p-20F;
        net_open(&net, &engine_oracle, table_of(networks[n]), (struct shape){1, 1, 1, 5}, 3, 7, 7, 0.1F);
        data_close(&net.data);
        data_random(&net.data, (struct shape){1, 1, 1, 5}, 3, 7, 5);
        net.data.type = DTYPE_F32;
        net.data.sample_bytes = 5 * sizeof(float);
        for (int part = 0; part < DATA_PARTS; part++) {
            struct data_set *set = &net.data.sets[part];
            float *values = malloc(set->count * net.data.sample_bytes);
            for (uint32_t i = 0; i < set->count * 5; i++)
                values[i] = (float)normal(i, (uint32_t)part, 1);
            free(set->values);
            set->values = values;
        }
        data_normalise(&net.data, true);
        net_reopen(&net, &engine_oracle);
        float *gradients = calloc(net.model.arena_values, sizeof *gradients);
        struct train_totals totals;
        const struct train_state state = {net.initial, net.zeros, net.zeros, {0, 0}, NULL};
        for (size_t i = 0; i < net.model.arena_values; i++)
            net.initial[i] = roundf(net.initial[i] / reach) * reach;
        must(engine_oracle.set(net.state, &state));
        must(engine_oracle.steps(net.state, 0, 0, 1));
        must(engine_oracle.totals(net.state, &totals));
        must(engine_oracle.gradients(net.state, gradients));
        double largest = 0, worst = 0;
        for (uint32_t t = 0; t < net.model.tensor_count; t++)
            for (size_t i = 0; i < net.model.tensors[t].values; i += net.model.tensors[t].values / 12 + 1) {
                const size_t at = net.model.tensors[t].first + i;
                double losses[2];
                for (int side = 0; side < 2; side++) {
                    net.initial[at] += side ? -2 * reach : reach;
                    must(engine_oracle.set(net.state, &state));
                    must(engine_oracle.steps(net.state, 0, 0, 1));
                    must(engine_oracle.totals(net.state, &totals));
                    losses[side] = totals.loss / (double)totals.samples;
                }
                net.initial[at] += reach;
                largest = fmax(largest, fabs((double)gradients[at]));
                worst = worse(worst, fabs((losses[0] - losses[1]) / (2.0 * reach) - gradients[at]));
            }
        cr_expect_gt(largest, 0.01, "%s", networks[n]);
        cr_expect_leq(worst, 1e-6 * largest, "%s: off by %g of %g", networks[n], worst, largest);
        free(gradients);
        net_close(&net);
    }
}
