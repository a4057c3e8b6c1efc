#include "data/class_folders.h"

#include <inttypes.h>
#include <stdlib.h>

#include "data/members.h"

/* Extensions of the files that ImageFolder reads: IMG_EXTENSIONS in torchvision/datasets/folder.py */
#define IMAGES "jpg;jpeg;png;ppm;bmp;pgm;tif;tiff;webp"

/* Fails if a class has no sample. `seen` has one element per sample. The search ends inside `seen`: if the
 * largest class is `samples` or larger, at least one of the classes 0 to `samples` - 1 has no sample. */
static enum status check_gaps(const struct class_folders *folders, const uint8_t *seen)
{
    for (uint64_t i = 0; i < folders->count; i++)
        if (!seen[i])
            return status_set(STATUS_USAGE,
                              "--store imagefolder: no sample has class %" PRIu64
                              ", but one has class %" PRIu64
                              ", so ImageFolder would number the classes differently; use more samples, or "
                              "--store shards",
                              i, folders->count - 1);
    return STATUS_OK;
}

enum status class_folders_keep(const struct class_folders *folders, uint64_t number,
                               struct source_sample *sample)
{
    struct members members;
    const char *extensions[SOURCE_MEMBERS_MAX];
    const struct member_rule *rule;
    uint32_t count = (uint32_t)sample->count;
    TRY(members_parse(IMAGES, NULL, NULL, &members));
    for (uint32_t m = 0; m < count; m++)
        extensions[m] = sample->members[m].extension;
    uint32_t image = members_find(&members.image, extensions, count, false, &rule);
    if (image == count)
        return status_set(STATUS_FAILED,
                          "sample %" PRIu64 ": --store imagefolder needs an image that ImageFolder reads "
                          "(%s); drop --encode npy, or --store",
                          number, IMAGES);
    struct source_sample kept = {.key = sample->key, .class_folder = folders->labels[number]};
    source_add(&kept, sample->members[image].extension, sample->members[image].bytes,
               sample->members[image].size);
    sample->members[image].bytes = NULL;
    source_sample_free(sample);
    *sample = kept;
    return STATUS_OK;
}

static enum status check_first(const struct source *source, void *state, const struct class_folders *folders)
{
    CLOSED_BY(source_sample_free) struct source_sample sample = {0};
    TRY(source_make(source, state, 0, 1, &sample));
    return class_folders_keep(folders, 0, &sample);
}

enum status class_folders_read(const struct source *source, void *state, uint64_t samples,
                               struct class_folders *folders)
{
    *folders = (struct class_folders){0};
    if (!source->label)
        return status_set(STATUS_USAGE,
                          "--store imagefolder needs labels, and --from %s has none; drop --store",
                          source->name);
    folders->labels = calloc(samples, sizeof *folders->labels);
    FREED uint8_t *seen = calloc(samples, 1);
    TRY(ALLOCATED(folders->labels && seen, "out of memory for %" PRIu64 " labels", samples));
    for (uint64_t i = 0, asked = 0; i < samples; i++) {
        source_ask(source, state, &asked, samples);
        uint64_t label = source->label(state, i);
        if (label > INT32_MAX) /* source->label() has set the message */
            return STATUS_FAILED;
        folders->labels[i] = (uint32_t)label;
        folders->count = label >= folders->count ? label + 1 : folders->count;
        if (label < samples)
            seen[label] = 1;
    }
    TRY(check_gaps(folders, seen));
    return check_first(source, state, folders);
}
