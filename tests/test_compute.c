/* Tests the option --compute, and the images that variants hand over to a fake consumer. */
#include "load_support.h"

#include <math.h>
#include <pthread.h>

#include "core/array.h"
#include "core/compute.h"
#include "data/image_formats.h"
#include "synth/input.h"

TestSuite(compute, .timeout = 60);

/* ---- The option ---- */

Test(compute, a_step_has_a_duration)
{
    static const struct {
        const char *text;
        double step_s;
    } read[] = {{"0.1", 1e-3 * 0.1}, {"5.0", 5e-3}, {"1e3", 1}, {NULL, 0}};
    for (size_t i = 0; i < COUNT_OF(read); i++) {
        struct compute compute = {.text = read[i].text};
        must(compute_read(&compute));
        cr_expect_eq(compute.step_s, read[i].step_s, "%g", read[i].step_s);
    }
}

Test(compute, invalid_values_are_refused)
{
    static const struct {
        const char *text, *words;
    } refused[] = {
        {"0.09", "out of range; it must be 0.1 to 1000"},
        {"1001", "out of range"},
        {"5x", "'5x' is not a number"},
        {"trainer", "'trainer' is not a number"},
        {"train", "--compute train: give the time of a step in milliseconds"},
        {"train:", "--variant train-cuda --model MODEL with --data DIR --feed load"},
        {"train:vit-tiny", "--variant train-vit --model vit-tiny with --data DIR --feed load"},
        {"train:lenet",
         "--variant train-cuda --model lenet with --data DIR --feed load or --data synth --feed live"},
    };
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        struct compute compute = {.text = refused[i].text};
        cr_expect_eq(compute_read(&compute), STATUS_USAGE, "%s", refused[i].text);
        cr_expect(strstr(status_text(), refused[i].words), "%s", status_text());
    }
}

/* ---- Photographs ---- */

#if defined(HAVE_XXHASH) && defined(HAVE_JPEG)

#define SAMPLES 23
#define VALUES  (3 * 8 * 8)

/* Sample n has a label, which is read before its image, and a JPEG of 20 + n by 31 pixels. With `flat`, all
 * its pixels are 8 n. */
static void make_photographs(bool flat)
{
    make_folder();
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const struct jpeg_shape shape = {.width = 20 + i, .height = 31, .channels = 3};
        uint8_t pixels[3 * (20 + SAMPLES) * 31];
        char name[32];
        void *bytes;
        size_t size;
        for (size_t p = 0; p < sizeof pixels; p++)
            pixels[p] = (uint8_t)(flat ? 8 * i : (p * p >> 7) + 5 * i);
        must(jpeg_encode(pixels, &shape, 95, &bytes, &size));
        snprintf(name, sizeof name, "%06u.jpeg", i);
        put_file(name, bytes, size);
        free(bytes);
        snprintf(name, sizeof name, "%06u.cls", i);
        put_file(name, "7", 1);
    }
}

/* Counts the images of flat photographs by their middle value, and adds up hashes of all images. */
struct looking {
    struct consumer consumer;
    pthread_mutex_t lock;
    size_t value_bytes; /* 1 or sizeof(float) */
    int seen[SAMPLES], batches;
    uint64_t hashes;
};

static enum status look(struct consumer *consumer, const void *values, size_t bytes)
{
    struct looking *self = (struct looking *)consumer;
    const size_t image_bytes = VALUES * self->value_bytes;
    pthread_mutex_lock(&self->lock);
    cr_assert(bytes > 0 && bytes % image_bytes == 0 && bytes <= 4 * image_bytes, "%zu bytes", bytes);
    for (const uint8_t *image = values; image < (const uint8_t *)values + bytes; image += image_bytes) {
        const uint8_t *middle = image + VALUES / 2 * self->value_bytes;
        float value;
        memcpy(&value, middle, sizeof value);
        long sample = lround((self->value_bytes == 1 ? *middle : 255 * (double)value) / 8);
        if (sample >= 0 && sample < SAMPLES)
            self->seen[sample]++;
        self->hashes += fnv_add(FNV_BEGIN, image, image_bytes);
    }
    self->batches++;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

/* Reads three epochs in batches of 4 images of 8 x 8 pixels. Returns false if the variant cannot run here. */
static bool look_at(const char *name, const char *line, struct looking *looking)
{
    static const struct consumer_type type = {.take_host = look};
    struct job job;
    char all[256];
    *looking = (struct looking){.consumer = {.type = &type},
                                .lock = PTHREAD_MUTEX_INITIALIZER,
                                .value_bytes = strstr(line, "--augment") ? sizeof(float) : 1};
    snprintf(all, sizeof all, "--cache any --compute 5 --out-res 8 --batch 4 --epochs 3 %s", line);
    must(open_job(&job, all));
    job.workload->batches.set_consumer(job.input, &looking->consumer);
    bool started = start(&job, name);
    if (started) {
        run_well(&job, 1);
        stop(&job);
    }
    close_job(&job);
    return started;
}

Test(compute, images_of_any_size_become_a_batch)
{
    static const char *const lines[] = {"--fit resize", "--fit crop", "--fit random-resized-crop",
                                        "--augment --mean 0,0,0 --std 1,1,1"};
    struct looking looking;
    make_photographs(true);
    for (size_t i = 0; i < COUNT_OF(lines); i++)
        for (size_t v = 0; v < COUNT_OF(file_variants); v++) {
            if (!look_at(file_variants[v], lines[i], &looking))
                continue;
            for (int n = 0; n < SAMPLES; n++)
                cr_expect_eq(looking.seen[n], 3, "%s %s: image %d was delivered %d times", file_variants[v],
                             lines[i], n, looking.seen[n]);
            cr_expect_geq(looking.batches, 18, "an epoch has at least five batches of 4 and one of 3");
        }
    remove_folder();
}

Test(compute, random_crops_do_not_depend_on_threads_but_on_the_seed)
{
    static const char line[] = "--fit random-resized-crop --augment --seed 1",
                      other[] = "--fit random-resized-crop --augment --seed 2";
    struct looking alone, seeded, together;
    make_photographs(false);
    cr_assert(look_at("files", line, &alone));
    cr_assert(look_at("files", other, &seeded));
    cr_expect_neq(alone.hashes, seeded.hashes);
    if (look_at("files-omp", line, &together)) /* with three threads */
        cr_expect_eq(alone.hashes, together.hashes);
    remove_folder();
}
#endif

/* ---- Generated images ---- */

struct keeping {
    struct consumer consumer;
    const uint8_t *values;
    size_t bytes;
};

static enum status keep(struct consumer *consumer, const void *values, size_t bytes)
{
    ((struct keeping *)consumer)->values = values;
    ((struct keeping *)consumer)->bytes = bytes;
    return STATUS_OK;
}

Test(compute, generated_images_are_handed_over)
{
    static const struct consumer_type type_of_keep = {.take_host = keep};
    struct keeping keeping = {.consumer = {.type = &type_of_keep}};
    const size_t stride = 16 * 16 * 3 * 2;
    struct job job;
    void *done = NULL;
    enum status status = open_workload(
        &job, "synth", "--classes 3 --batch 5 --res 16 --channels 3 --layout nhwc --dtype f16 --compute 5",
        (struct partition){.ranks = 1});
#ifndef HAVE_INIH
    cr_expect_neq(status, STATUS_OK);
    cr_skip_test("this build cannot draw classes");
#endif
    cr_assert_eq(status, STATUS_OK, "%s", status_text());
    cr_assert(start(&job, "naive"));
    for (uint64_t number = 0; number < 3; number++) {
        run_well(&job, number);
        must(job.workload->batches.hand_over(job.input, job.variant, job.state, &keeping.consumer, &done));
        cr_expect(keeping.bytes == 5 * stride && !done, "%zu bytes", keeping.bytes);
        for (uint32_t j = 0; j < 5; j++) {
            uint8_t pixels[16 * 16 * 3 * 2];
            struct synth_fetch fetch = {.j = j, .pixels = pixels};
            must(job.variant->fetch(job.state, &fetch));
            cr_expect_arr_eq(pixels, keeping.values + j * stride, stride);
        }
    }
    close_job(&job);
}
