#include "core/origin.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/npy.h"

extern const struct origin origin_counter, origin_synth, origin_idx, origin_cifar;

const struct origin *const origin_table[] = {
    &origin_counter, /* tensors of a counter: their content is known */
    &origin_synth,   /* VisualAtom images */
    &origin_idx,     /* MNIST and its kin */
    &origin_cifar,   /* CIFAR-10 */
    NULL,
};

const char *const origin_encodings[] = {"png", "npy", NULL};

const struct origin *origin_find(const char *name)
{
    for (size_t i = 0; origin_table[i]; i++)
        if (strcmp(origin_table[i]->name, name) == 0)
            return origin_table[i];
    return NULL;
}

void origin_add(struct origin_sample *sample, const char *extension, void *bytes, size_t size)
{
    sample->members[sample->count++] = (struct origin_member){extension, bytes, size};
}

enum status origin_add_label(struct origin_sample *sample, uint64_t label)
{
    char *text = malloc(24);
    if (!text)
        return status_set(STATUS_FAILED, "out of memory for a label");
    origin_add(sample, "cls", text, (size_t)snprintf(text, 24, "%" PRIu64, label));
    return STATUS_OK;
}

enum status origin_add_array(struct origin_sample *sample, const char *type, const char *shape,
                             const void *values, size_t bytes, void **room)
{
    char header[NPY_HEADER_MAX];
    size_t length = npy_header(header, type, shape);
    char *file = calloc(1, length + bytes);
    if (!file)
        return status_set(STATUS_FAILED, "out of memory for a sample of %zu bytes", bytes);
    memcpy(file, header, length);
    if (values)
        memcpy(file + length, values, bytes);
    if (room)
        *room = file + length;
    origin_add(sample, "npy", file, length + bytes);
    return STATUS_OK;
}

void origin_sample_free(struct origin_sample *sample)
{
    for (size_t i = 0; i < sample->count; i++)
        free(sample->members[i].bytes);
    *sample = (struct origin_sample){0};
}

/* A message belongs to the thread that failed: so what failed is tried again by this one. */
enum status origin_make_all(origin_make_one *make, const void *state, uint64_t first, uint64_t count,
                            struct origin_sample *samples)
{
#pragma omp parallel for schedule(dynamic)
    for (uint64_t i = 0; i < count; i++)
        if (make(state, first + i, &samples[i]) != STATUS_OK)
            origin_sample_free(&samples[i]);
    for (uint64_t i = 0; i < count; i++)
        if (samples[i].count == 0)
            TRY(make(state, first + i, &samples[i]));
    return STATUS_OK;
}
