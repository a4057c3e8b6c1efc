/* Helpers for the suites of libfdsl: a small generator, the images that the program generates for it, and the
 * parts of streams and batches. */
#ifndef FDSL_TESTS_LIB_SUPPORT_H
#define FDSL_TESTS_LIB_SUPPORT_H

#include <criterion/criterion.h>

#include <string.h>

#include "lib/fdsl.h"
#include "shell.h"

#define good(call) cr_assert_eq(call, FDSL_OK, "%s", fdsl_error())

enum { CLASSES = 7, COUNT = 23 };

/* Returns the configuration of a small generator with the classes that the program draws for --classes 7. */
static inline struct fdsl_config small(void)
{
    struct fdsl_config config;
    good(fdsl_config_init(&config, sizeof config));
    config.classes = CLASSES;
    config.res = 96;
    config.batch = COUNT;
    config.threads = 2;
    return config;
}

static inline struct fdsl_generator *opened(const struct fdsl_config *config)
{
    struct fdsl_generator *generator;
    good(fdsl_open(config, &generator));
    return generator;
}

static inline uint64_t image_bytes(const struct fdsl_generator *generator)
{
    struct fdsl_layout layout = {.size = sizeof layout};
    good(fdsl_describe(generator, &layout));
    return layout.image_bytes;
}

static inline struct fdsl_stream *opened_stream(struct fdsl_source *source,
                                                const struct fdsl_stream_config *config)
{
    struct fdsl_stream *stream;
    good(fdsl_stream_open(source, config, &stream));
    return stream;
}

static inline struct fdsl_batch *taken(struct fdsl_stream *stream)
{
    struct fdsl_batch *batch;
    good(fdsl_stream_next(stream, NULL, &batch));
    return batch;
}

static inline struct fdsl_batch_info described(const struct fdsl_batch *batch)
{
    struct fdsl_batch_info info = {.size = sizeof info};
    good(fdsl_batch_describe(batch, &info));
    return info;
}

static inline struct fdsl_tensor tensor_of(struct fdsl_batch *batch, enum fdsl_field field)
{
    struct fdsl_tensor tensor;
    good(fdsl_batch_tensor(batch, field, &tensor));
    return tensor;
}

static inline void *allocated(size_t bytes)
{
    void *memory;
    good(fdsl_alloc(FDSL_CPU, bytes, &memory));
    memset(memory, 0xaa, bytes);
    return memory;
}

static uint8_t reference[COUNT * 3 * 96 * 96 * 4];
static int64_t reference_labels[COUNT];

/* Sets `values` to the last `bytes` bytes of a file in the test's folder: the values of an .npy file. */
static inline void read_tail(const char *name, void *values, size_t bytes)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    cr_assert_not_null(file, "%s", path);
    cr_assert_eq(fseek(file, -(long)bytes, SEEK_END), 0);
    cr_assert_eq(fread(values, 1, bytes, file), bytes);
    fclose(file);
}

/* Fills `reference` and `reference_labels` with the images and labels of the program's variant naive. */
static inline void run_program(const struct fdsl_config *config, const char *words, size_t bytes)
{
    EXPECT(0,
           "$P --variant naive --batch %d --classes %d --res 96 --out-res %u --channels %u --layout %s "
           "--dtype %s "
           "--fit %s --formula %s --seed %llu %s --npy x.npy --min-samples 1 --min-time 0 --max-time 0 "
           "--warmups 0 "
           "--warmup-time 0 2>&1",
           COUNT, CLASSES, config->out_res, config->channels ? config->channels : 1, config->layout,
           config->dtype, config->fit, strcmp(config->formula, "auto") == 0 ? "uji" : config->formula,
           (unsigned long long)config->seed, words);
    read_tail("x.npy", reference, COUNT * bytes);
    read_tail("x.labels.npy", reference_labels, sizeof reference_labels);
}

/* Generates all images in calls of `step` images and compares them with the reference. */
static inline void expect_reference(struct fdsl_generator *generator, uint32_t step)
{
    size_t bytes = image_bytes(generator);
    uint8_t *images = allocated(COUNT * bytes);
    int64_t labels[COUNT];
    for (uint32_t first = 0; first < COUNT; first += step) {
        uint32_t count = COUNT - first < step ? COUNT - first : step;
        good(fdsl_generate(generator, first, count, images + first * bytes, labels + first, NULL));
    }
    cr_expect_eq(memcmp(images, reference, COUNT * bytes), 0, "in steps of %u", step);
    cr_expect_eq(memcmp(labels, reference_labels, sizeof labels), 0);
    fdsl_free(FDSL_CPU, images);
}

#endif
