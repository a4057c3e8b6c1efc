#include "data/source.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "data/npy.h"

extern const struct source source_counter, source_synth, source_idx, source_cifar, source_dataset,
    source_digits, source_clips, source_embeddings, source_scenes, source_cifar100;

const struct source *const source_table[] = {
    &source_counter,    /* generated tensors of known content */
    &source_synth,      /* VisualAtom images */
    &source_idx,        /* MNIST and similar data sets */
    &source_cifar,      /* CIFAR-10 */
    &source_dataset,    /* an existing data set */
    &source_digits,     /* generated digits */
    &source_clips,      /* generated clips of a moving blob */
    &source_embeddings, /* cleaned embeddings */
    &source_scenes,     /* point clouds of rooms with fractals */
    &source_cifar100,   /* CIFAR-100 */
    NULL,
};

const char *const source_encodings[] = {"png", "npy", "jpeg", NULL};
const char *const source_extensions[] = {"png", "npy", "jpg"};
const char *const source_label_columns[] = {"class", NULL};

const struct source *source_find(const char *name)
{
    for (size_t i = 0; source_table[i]; i++)
        if (strcmp(source_table[i]->name, name) == 0)
            return source_table[i];
    return NULL;
}

enum status source_check_target(const char *source, const char *target)
{
    return target && file_is_inside(target, source)
               ? status_set(
                     STATUS_USAGE,
                     "--prepare %s: this folder is inside its source, %s; name a folder outside the source",
                     target, source)
               : STATUS_OK;
}

enum status source_open(const char *name, const struct source_request *request, struct source_reader *reader)
{
    *reader = (struct source_reader){.source = source_find(name), .skip = request->skip};
    return reader->source->open(request, &reader->facts, &reader->state);
}

void source_close(struct source_reader *reader)
{
    if (reader->state && reader->source->close)
        reader->source->close(reader->state);
    *reader = (struct source_reader){0};
}

const struct source_member *source_member(const struct source_sample *sample, const char *extension)
{
    for (size_t i = 0; i < sample->count; i++)
        if (strcmp(sample->members[i].extension, extension) == 0)
            return &sample->members[i];
    return NULL;
}

void source_add(struct source_sample *sample, const char *extension, void *bytes, size_t size)
{
    sample->members[sample->count++] = (struct source_member){extension, bytes, size};
}

enum status source_encode(int encoding, int quality, const uint8_t *pixels, const struct png_shape *shape,
                          void **bytes, size_t *size)
{
    const struct jpeg_shape jpeg = {
        .width = shape->width, .height = shape->height, .channels = shape->channels};
    return encoding == SOURCE_JPEG ? jpeg_encode(pixels, &jpeg, quality, bytes, size)
                                   : png_encode(pixels, shape, bytes, size);
}

enum status source_add_image(struct source_sample *sample, int encoding, const uint8_t *pixels,
                             const struct png_shape *shape)
{
    void *bytes;
    size_t size;
    TRY(source_encode(encoding, SOURCE_JPEG_QUALITY, pixels, shape, &bytes, &size));
    source_add(sample, source_extensions[encoding], bytes, size);
    return STATUS_OK;
}

enum status source_add_label(struct source_sample *sample, uint64_t label)
{
    char *text = malloc(24);
    TRY(ALLOCATED(text, "out of memory for a label"));
    source_add(sample, "cls", text, (size_t)snprintf(text, 24, "%" PRIu64, label));
    return STATUS_OK;
}

enum status source_add_array(struct source_sample *sample, const char *type, const char *shape,
                             const void *values, size_t bytes, void **room)
{
    char header[NPY_HEADER_MAX];
    size_t length = npy_header_make(header, type, shape);
    char *file = calloc(1, length + bytes);
    TRY(ALLOCATED(file, "out of memory for a sample of %zu bytes", bytes));
    memcpy(file, header, length);
    if (values)
        memcpy(file + length, values, bytes);
    if (room)
        *room = file + length;
    source_add(sample, "npy", file, length + bytes);
    return STATUS_OK;
}

void source_sample_free(struct source_sample *sample)
{
    for (size_t i = 0; i < sample->count; i++)
        free(sample->members[i].bytes);
    *sample = (struct source_sample){0};
}

/* Error messages are per thread. The calling thread therefore produces a failed sample again, to set its own
 * message. */
enum status source_make_all(source_make_one *make, const void *state, uint64_t first, uint64_t count,
                            struct source_sample *samples)
{
#pragma omp parallel for schedule(dynamic)
    for (uint64_t i = 0; i < count; i++)
        if (make(state, first + i, &samples[i]) != STATUS_OK)
            source_sample_free(&samples[i]);
    for (uint64_t i = 0; i < count; i++)
        if (samples[i].count == 0)
            TRY(make(state, first + i, &samples[i]));
    return STATUS_OK;
}

enum status source_make(const struct source *source, void *state, uint64_t first, uint64_t count,
                        struct source_sample *samples)
{
    return source->make ? source->make(state, first, count, samples)
                        : source_make_all(source->make_one, state, first, count, samples);
}

void source_ask(const struct source *source, void *state, uint64_t *next, uint64_t end)
{
    while (source->ask && *next < end && source->ask(state, *next))
        ++*next;
}

enum status source_make_listed(const struct source *source, void *state, const uint64_t *numbers,
                               uint64_t count, struct source_sample *samples)
{
    for (uint64_t i = 0, next; i < count; i = next) {
        for (next = i + 1; next < count && numbers[next] == numbers[i] + (next - i);)
            next++;
        TRY(source_make(source, state, numbers[i], next - i, &samples[i]));
    }
    return STATUS_OK;
}

void source_describe(const struct source *source, const void *state, uint64_t number,
                     char texts[][SOURCE_TEXT_MAX])
{
    if (source->describe)
        source->describe(state, number, texts);
    else
        snprintf(texts[0], SOURCE_TEXT_MAX, "%" PRIu64, source->label(state, number));
}
