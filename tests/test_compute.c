/* Tests the option --compute and the batches that training steps receive. A fake consumer checks the batches
 * of the variants that read single files. */
#include "load_support.h"

#include <math.h>
#include <pthread.h>

#include "core/compute.h"
#include "core/array.h"
#include "core/dtype.h"
#include "data/image_formats.h"
#include "data/npy.h"
#include "synth/input.h"

TestSuite(compute, .timeout = 60);

/* ---- The option ---- */

static void expect_read(const char *text, double step_s, const char *model)
{
    struct compute compute = {.text = text};
    cr_assert_eq(compute_read(&compute), STATUS_OK, "%s: %s", text, status_text());
    cr_expect_eq(compute.step_s, step_s, "%s", text);
    cr_expect_eq(compute_learns(&compute), model != NULL, "%s", text);
    if (model)
        cr_expect_str_eq(compute.task.model, model);
}

Test(compute, a_step_has_a_duration_or_trains_a_network)
{
    expect_read("0.1", 1e-3 * 0.1, NULL);
    expect_read("5.0", 5e-3, NULL);
    expect_read("1e3", 1, NULL);
    expect_read("train", 0, "");
    expect_read("train:cnn-fdsl", 0, "cnn-fdsl");
    struct compute none = {.text = NULL};
    cr_expect_eq(compute_read(&none), STATUS_OK);
    cr_expect(!compute_learns(&none));
}

Test(compute, invalid_values_are_refused)
{
    static const struct {
        const char *text, *words;
    } refused[] = {
        {"0.09", "out of range; it must be 0.1 to 1000"},
        {"1001", "out of range"},
        {"5x", "'5x' is not a number"},
        {"trainer", "'trainer' is neither a number of milliseconds nor train[:MODEL]"},
        {"train:", "name a network"},
        {"train:a-name-that-is-too-long", "name a network"},
        {"train:lenett", "has no network 'lenett' for images; choose from logreg, lenet, cnn, cnn-fdsl, "
                         "cnn-deep; did you mean train:lenet?"},
        {"train:cnn3d", "has no network 'cnn3d' for images"},
        {"train:vit-tiny", "train:MODEL has no network 'vit-tiny' for images"},
    };
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        struct compute compute = {.text = refused[i].text};
        cr_expect_eq(compute_read(&compute), STATUS_USAGE, "%s", refused[i].text);
        cr_expect(strstr(status_text(), refused[i].words), "%s", status_text());
    }
}

static void expect_taught(struct task task, const char *name)
{
    struct compute compute = {.text = "train", .task = task};
    must(compute_teach(&compute));
    cr_expect_str_eq(compute.text, name, "the row would have the value '%s'", compute.text);
}

static void expect_untaught(struct task task, const char *words)
{
    struct compute compute = {.text = "train", .task = task};
    cr_expect_eq(compute_teach(&compute), STATUS_USAGE);
    expect_words(words);
    expect_words("--compute train");
}

Test(compute, the_default_network_depends_on_the_images)
{
    expect_taught((struct task){"", 1, 28, 28, 10, 256, 256}, "train:cnn");
    expect_taught((struct task){"", 3, 28, 28, 10, 256, 256}, "train:cnn-fdsl");
    expect_taught((struct task){"", 3, 224, 224, 1000, 256, 256}, "train:cnn-fdsl");
    expect_taught((struct task){"lenet", 1, 28, 28, 10, 256, 256}, "train:lenet");
    expect_untaught((struct task){"resnet", 1, 28, 28, 10, 256, 256},
                    "logreg, lenet, cnn, cnn-fdsl, cnn-deep");
    expect_untaught((struct task){"cnn3d", 1, 28, 28, 10, 256, 256}, "has no network 'cnn3d' for images");
    expect_untaught((struct task){"", 1, 28, 28, 1, 256, 256}, "there is nothing to learn");
    expect_untaught((struct task){"", 17, 28, 28, 2, 256, 256}, "at most 16");
    expect_untaught((struct task){"", 1, 4, 4, 2, 256, 256}, "too small");
    expect_untaught((struct task){"lenet", 1, 4, 4, 2, 256, 256},
                    "choose another network with train:MODEL, for example train:logreg");
}

/* ---- A data set for training steps ---- */

#define SAMPLES 23
#define SIDE    8
#define CLASSES 4

static void put(const char *extension, int sample, const void *bytes, size_t size)
{
    char name[64];
    snprintf(name, sizeof name, "%06d.%s", sample, extension);
    put_file(name, bytes, size);
}

static void put_label(int sample, int label)
{
    char text[16];
    put("cls", sample, text, (size_t)snprintf(text, sizeof text, "%d\n", label));
}

/* All pixels of an image equal the number of the sample. */
static void put_array(int sample, const char *type, const char *shape, size_t values)
{
    uint8_t bytes[NPY_HEADER_MAX + 3 * SIDE * SIDE * sizeof(float)];
    size_t at = npy_header_make((char *)bytes, type, shape);
    for (size_t i = 0; i < values; i++) {
        float single = (float)sample;
        uint16_t half = half_from_float(single);
        size_t size = type[2] == '1' ? 1 : type[2] == '2' ? 2 : 4;
        const void *value = size == 1   ? (const void *)&(uint8_t){(uint8_t)sample}
                            : size == 2 ? &half
                                        : (void *)&single;
        memcpy(bytes + at, value, size);
        at += size;
    }
    put("npy", sample, bytes, at);
}

static void make_arrays(const char *type)
{
    make_folder();
    for (int i = 0; i < SAMPLES; i++) {
        put_array(i, type, "3, 8, 8", 3 * SIDE * SIDE);
        put_label(i, i % CLASSES);
    }
}

#ifdef HAVE_PNG
static void put_picture(int sample, uint32_t side)
{
    const struct png_shape shape = {side, side, 3};
    uint8_t pixels[3 * 2 * SIDE * 2 * SIDE];
    void *bytes;
    size_t size;
    memset(pixels, sample, sizeof pixels);
    must(png_encode(pixels, &shape, &bytes, &size));
    put("png", sample, bytes, size);
    free(bytes);
}

static void make_labelled_pictures(void)
{
    make_folder();
    for (int i = 0; i < SAMPLES; i++) {
        put_picture(i, SIDE);
        put_label(i, i % CLASSES);
    }
}
#endif

#ifdef HAVE_JPEG
/* Sample n is a JPEG of 20 + n by 31 pixels. With `flat`, all its pixels are 8 n. */
static void make_photographs(bool flat)
{
    make_folder();
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const struct jpeg_shape shape = {.width = 20 + i, .height = 31, .channels = 3};
        uint8_t pixels[3 * (20 + SAMPLES) * 31];
        void *bytes;
        size_t size;
        for (size_t p = 0; p < sizeof pixels; p++)
            pixels[p] = (uint8_t)(flat ? 8 * i : (p * p >> 7) + 5 * i);
        must(jpeg_encode(pixels, &shape, 95, &bytes, &size));
        put("jpeg", (int)i, bytes, size);
        put_label((int)i, flat ? (int)i % CLASSES : (int)i);
        free(bytes);
    }
}
#endif

/* ---- The consumer ---- */

struct looking {
    struct consumer consumer;
    pthread_mutex_t lock;
    enum dtype type;
    bool interleaved;
    double scale; /* the values of sample n are n * scale */
    int seen[SAMPLES], short_batches;
};

static double value_in(const struct batch *batch, uint32_t j, size_t i)
{
    const uint8_t *at = (const uint8_t *)batch->values + j * batch->stride + i * dtype_bytes(batch->type);
    uint16_t half;
    float single;
    memcpy(&half, at, sizeof half);
    memcpy(&single, at, sizeof single);
    return batch->type == DTYPE_U8 ? *at : batch->type == DTYPE_F16 ? half_to_float(half) : single;
}

/* Checks the label and one value of each image. In NCHW, the value is at the centre. Augmentation shifts
 * images by at most one pixel, so it moves no zeros to the centre. */
static enum status look(struct consumer *consumer, const struct batch *batch)
{
    struct looking *self = (struct looking *)consumer;
    size_t values = 3 * SIDE * SIDE, bytes = values * dtype_bytes(batch->type);
    pthread_mutex_lock(&self->lock);
    cr_expect(batch->type == self->type && batch->interleaved == self->interleaved);
    cr_expect_eq(batch->stride, bytes);
    cr_expect_eq(batch->bytes, batch->count * bytes);
    cr_assert_not_null(batch->labels);
    for (uint32_t j = 0; j < batch->count; j++) {
        long sample = lround(value_in(batch, j, values / 2 + SIDE / 2) / self->scale);
        cr_assert(sample >= 0 && sample < SAMPLES, "%ld", sample);
        cr_expect_eq(batch->labels[j], sample % CLASSES, "sample %ld has label %d", sample, batch->labels[j]);
        self->seen[sample]++;
    }
    self->short_batches += batch->count < 4;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

/* Reads three epochs with every variant that reads single files. Expects each sample three times, with its
 * label. */
static void expect_learnt(const char *line, enum dtype type, bool interleaved, double scale)
{
    static const struct consumer_type type_of_look = {.take_host = look};
    for (size_t v = 0; v < COUNT_OF(file_variants); v++) {
        struct looking looking = {
            .consumer = {.type = &type_of_look}, .type = type, .interleaved = interleaved, .scale = scale};
        struct job job;
        pthread_mutex_init(&looking.lock, NULL);
        must(open_job(&job, line));
        job.workload->batches.set_consumer(job.input, &looking.consumer);
        if (start(&job, file_variants[v])) {
            run_well(&job, 1);
            stop(&job);
            for (int i = 0; i < SAMPLES; i++)
                cr_expect_eq(looking.seen[i], 3, "%s: sample %d was delivered %d times", file_variants[v], i,
                             looking.seen[i]);
            cr_expect_gt(looking.short_batches, 0, "the last batch of an epoch must be short");
        }
        close_job(&job);
        pthread_mutex_destroy(&looking.lock);
    }
    remove_folder();
}

#ifdef HAVE_XXHASH
Test(compute, labels_come_with_arrays_of_every_type)
{
    static const char *const types[] = {"|u1", "<f2", "<f4"};
    static const enum dtype batch_types[] = {DTYPE_U8, DTYPE_F16, DTYPE_F32};
    for (size_t i = 0; i < COUNT_OF(types); i++) {
        make_arrays(types[i]);
        expect_learnt("--cache any --compute train --decode --batch 4 --epochs 3", batch_types[i], false, 1);
    }
}

Test(compute, augmented_arrays_are_floats)
{
    make_arrays("|u1");
    expect_learnt("--cache any --compute train --augment --shift 1 --batch 4 --epochs 3", DTYPE_F32, false,
                  1.0 / 255);
}

#ifdef HAVE_JPEG
Test(compute, images_of_any_size_become_a_batch)
{
    static const char *const fits[] = {"resize", "crop", "random-resized-crop"};
    for (size_t i = 0; i < COUNT_OF(fits); i++) {
        char line[160];
        make_photographs(true);
        snprintf(line, sizeof line, "--cache any --compute train --out-res 8 --fit %s --batch 4 --epochs 3",
                 fits[i]);
        expect_learnt(line, DTYPE_U8, true, 8);
    }
    make_photographs(true);
    expect_learnt(
        "--cache any --compute train --out-res 8 --augment --mean 0,0,0 --std 1,1,1 --batch 4 --epochs 3",
        DTYPE_F32, false, 8.0 / 255);
}

/* Sums of hashes of the images of each sample, over three epochs. */
struct hashing {
    struct consumer consumer;
    pthread_mutex_t lock;
    uint64_t sums[SAMPLES];
};

static enum status hash(struct consumer *consumer, const struct batch *batch)
{
    struct hashing *self = (struct hashing *)consumer;
    pthread_mutex_lock(&self->lock);
    for (uint32_t j = 0; j < batch->count; j++) {
        const uint8_t *image = (const uint8_t *)batch->values + j * batch->stride;
        self->sums[batch->labels[j]] += fnv_add(FNV_BEGIN, image, batch->stride);
    }
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static void sum_hashes(const char *name, const char *line, uint64_t sums[SAMPLES])
{
    static const struct consumer_type type_of_hash = {.take_host = hash};
    struct hashing hashing = {.consumer = {.type = &type_of_hash}, .lock = PTHREAD_MUTEX_INITIALIZER};
    struct job job;
    must(open_job(&job, line));
    job.workload->batches.set_consumer(job.input, &hashing.consumer);
    cr_assert(start(&job, name));
    run_well(&job, 1);
    close_job(&job);
    memcpy(sums, hashing.sums, sizeof hashing.sums);
}

Test(compute, random_crops_do_not_depend_on_threads_but_on_seed_and_sample)
{
    static const char line[] = "--cache any --compute train --out-res 8 --fit random-resized-crop --augment "
                               "--batch 4 --epochs 3 --seed 1",
                      other[] = "--cache any --compute train --out-res 8 "
                                "--fit random-resized-crop --augment --batch 4 --epochs 3 --seed 2";
    uint64_t alone[SAMPLES], together[SAMPLES], seeded[SAMPLES];
    make_photographs(false);
    sum_hashes("files", line, alone);
    sum_hashes("files", other, seeded);
    for (int i = 0; i < SAMPLES; i++)
        cr_expect_neq(alone[i], seeded[i], "sample %d is the same with another seed", i);
    if (variant_find("files-omp")->variant) {
        sum_hashes("files-omp", line, together); /* with three threads */
        cr_expect_arr_eq(alone, together, sizeof alone);
    }
    remove_folder();
}
#endif

/* Sample 5 is a valid array but differs in shape or type. When the input is opened, only the first sample is
 * checked, so the run fails. */
Test(compute, an_array_that_is_not_an_image_fails_the_run)
{
    static const struct {
        const char *type, *shape;
        size_t values;
    } arrays[] = {
        {"<i4", "3, 8, 8", 3 * SIDE * SIDE}, {"|u1", "64,", 64}, {"|u1", "1, 3, 8, 8", 3 * SIDE * SIDE}};
    make_arrays("|u1");
    for (size_t i = 0; i < COUNT_OF(arrays); i++) {
        struct job job;
        put_array(5, arrays[i].type, arrays[i].shape, arrays[i].values);
        cr_assert(start_job(&job, "files", "--cache any --compute train --decode"));
        cr_expect_eq(run(&job, 0), STATUS_FAILED, "%s %s", arrays[i].type, arrays[i].shape);
        expect_words("sample '000005': its npy is not an image");
        close_job(&job);
    }
    remove_folder();
}

#ifdef HAVE_PNG
Test(compute, decoded_pictures_are_nhwc)
{
    make_labelled_pictures();
    expect_learnt("--cache any --compute train --decode --batch 4 --epochs 3", DTYPE_U8, true, 1);
    make_labelled_pictures();
    expect_learnt("--cache any --compute train --augment --shift 1 --batch 4 --epochs 3", DTYPE_F32, false,
                  1.0 / 255);
}

/* The last image has another shape. When the input is opened, only the first image is checked, so the run
 * fails. */
Test(compute, a_picture_of_another_shape_fails_the_run)
{
    struct job job;
    make_labelled_pictures();
    put_picture(SAMPLES - 1, 2 * SIDE);
    cr_assert(start_job(&job, "files", "--cache any --compute train --decode"));
    expect_failure(&job, 0, "this image (3x16x16) and the first image (3x8x8) differ");
    expect_words("sample '000022'");
    close_job(&job);
    remove_folder();
}
#endif

#endif

/* ---- Generated images ---- */

struct keeping {
    struct consumer consumer;
    struct batch batch;
};

static enum status keep(struct consumer *consumer, const struct batch *batch)
{
    ((struct keeping *)consumer)->batch = *batch;
    return STATUS_OK;
}

Test(compute, labels_of_images_follow_from_their_numbers)
{
    static const struct consumer_type type_of_keep = {.take_host = keep};
    struct keeping keeping = {.consumer = {.type = &type_of_keep}};
    struct job job;
    void *done = NULL;
    enum status status =
        open_workload(&job, "synth",
                      "--classes 3 --batch 5 --res 16 --instance 7 --channels 3 --layout nhwc "
                      "--dtype f16 --compute train",
                      (struct partition){.ranks = 1});
#ifndef HAVE_INIH
    cr_expect_neq(status, STATUS_OK);
    cr_skip_test("this build cannot draw classes");
#endif
    cr_assert_eq(status, STATUS_OK, "%s", status_text());
    cr_expect_str_eq(job.workload->batches.step(job.parameters)->text, "train:cnn-fdsl");
    cr_assert(start(&job, "naive"));
    for (uint64_t number = 0; number < 3; number++) {
        run_well(&job, number);
        must(job.workload->batches.hand_over(job.input, job.variant, job.state, number, &keeping.consumer,
                                             &done));
        const struct batch *batch = &keeping.batch;
        cr_expect(batch->count == 5 && batch->type == DTYPE_F16 && batch->interleaved && !batch->labels);
        cr_expect(batch->stride == 16 * 16 * 3 * 2 && batch->bytes == 5 * batch->stride && !done);
        for (uint32_t j = 0; j < batch->count; j++) {
            uint8_t pixels[16 * 16 * 3 * 2];
            struct synth_fetch fetch = {.j = j, .pixels = pixels};
            must(job.variant->fetch(job.state, &fetch));
            cr_expect_eq((batch->first + j) % 3, (uint64_t)fetch.label);
            cr_expect_arr_eq(pixels, (const uint8_t *)batch->values + j * batch->stride, batch->stride);
        }
    }
    close_job(&job);
}

/* With strong scaling, each rank generates a part of the batch. The training step of the rank has `share`
 * samples, the size of this part. */
Test(compute, a_training_step_has_the_share_of_the_rank)
{
    static const struct {
        struct partition partition;
        uint32_t share;
    } cases[] = {
        {{0, 1, false, NULL}, 5}, {{1, 2, false, NULL}, 5}, {{0, 2, true, NULL}, 3}, {{1, 2, true, NULL}, 2}};
    const char classes[] = "class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width\n"
                           "0,100,10,1,1,2,3,1,5,0.002\n1,100,10,1,1,2,3,1,6,0.002\n";
    make_folder();
    put("csv", 0, classes, sizeof classes - 1);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct job job;
        char line[2 * PATH_MAX + 64];
        snprintf(line, sizeof line, "--class %s --batch 5 --res 16 --compute train", in_folder("000000.csv"));
        must(open_workload(&job, "synth", line, cases[i].partition));
        const struct task *task = &job.workload->batches.step(job.parameters)->task;
        cr_expect_eq(task->batch, 5);
        cr_expect_eq(task->share, cases[i].share, "%u", task->share);
        close_job(&job);
    }
    remove_folder();
}

#ifdef HAVE_XXHASH
/* ---- Refusals before the run ---- */

static void expect_no_task(const char *line, const char *words)
{
    struct job job;
    cr_expect_eq(open_job(&job, line), STATUS_USAGE, "%s", words);
    expect_words(words);
    expect_words("--compute train");
    close_job(&job);
}

Test(compute, sets_without_labelled_images_are_refused)
{
    static const char line[] = "--cache any --compute train --decode";
    make_arrays("|u1");
    expect_no_task("--cache any --compute train --on-error skip", "drop --on-error skip");
    put_label(5, -1);
    expect_no_task(line, "sample '000005': its label -1 is not a class");
    put("cls", 5, "five", 4);
    expect_no_task(line, "its cls is not a label");
    cr_assert_eq(remove(in_folder("000005.cls")), 0);
    expect_no_task(line, "sample '000005': it has no member for --label");
    put_label(5, 1);
    put_array(0, "|u1", "64, 3", 64 * 3);
    expect_no_task(line, "too small");
    put_array(0, "|u1", "64,", 64);
    expect_no_task(line, "sample '000000': its array is not an image");
    cr_assert_eq(remove(in_folder("000000.npy")), 0);
    expect_no_task(line, "sample '000000': it has no member for --image "
                         "jpg;jpeg;png;npy;ppm;bmp;pgm;tif;tiff;webp; its members are: cls;");
    remove_folder();
}

Test(compute, undecoded_files_are_refused)
{
    struct job job;
    make_arrays("|u1");
    must(open_job(&job, "--cache any --compute train:logreg"));
    const struct compute *compute = job.workload->batches.step(job.parameters);
    cr_expect_str_eq(compute->text, "train:logreg");
    cr_expect_eq(compute->task.classes, CLASSES);
    cr_expect(compute->task.batch == 32 && compute->task.share == 32);
    cr_expect(compute->task.channels == 3 && compute->task.height == 8 && compute->task.width == 8);
    cr_expect_eq(job.workload->accepts(job.input, variant_find("files")->variant), STATUS_USAGE);
    expect_words("add --decode");
    close_job(&job);
    remove_folder();
}
#endif

/* ---- Scripts that read the rows ---- */

#define FIXTURES "tests/data/figures"

/* Adds rows with a step of 7 ms, a duration that no other row has. The table that break_even.py prints must
 * change if these rows are of --compute 7, and must not change if they are of --compute train. */
Test(compute, break_even_ignores_real_training_steps)
{
    static const struct {
        const char *step;
        bool same;
    } cases[] = {{"train:cnn-fdsl", true}, {"7", false}};
    make_folder();
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        cr_assert(command(
            "for pair in fused:synth gpu-resident:load; do "
            "awk -F , -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } { print } "
            "$at[\"variant\"] == \"'${pair%%:*}'\" && $at[\"compute_ms\"] == 5 { $at[\"compute_ms\"] = 7; "
            "$at[\"items_per_s\"] = 1e9; $at[\"compute\"] = \"%s\"; $at[\"loss\"] = 0.5; print }' " FIXTURES
            "/break_even_${pair#*:}.csv >$D/${pair#*:}.csv || exit; done",
            cases[i].step));
        cr_assert(command("scripts/figures/break_even.py " FIXTURES "/break_even_synth.csv " FIXTURES
                          "/break_even_load.csv >$D/old && scripts/figures/break_even.py $D/synth.csv "
                          "$D/load.csv >$D/new"));
        cr_expect_eq(command("cmp -s $D/old $D/new"), cases[i].same, "%s", cases[i].step);
    }
    remove_folder();
}
