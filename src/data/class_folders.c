#include "data/class_folders.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"
#include "data/members.h"
#include "data/samples.h"

#define DIGITS 4 /* minimum number of digits of a class folder that is named by its number */

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
    TRY(members_parse(MEMBERS_IMAGEFOLDER, NULL, NULL, &members));
    for (uint32_t m = 0; m < count; m++)
        extensions[m] = sample->members[m].extension;
    uint32_t image = members_find(&members.image, extensions, count, false, &rule);
    if (image == count)
        return status_set(STATUS_FAILED,
                          "sample %" PRIu64 ": --store imagefolder needs an image that ImageFolder reads "
                          "(%s); drop --encode npy, or --store",
                          number, MEMBERS_IMAGEFOLDER);
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

/* ---- Names ---- */

/* Returns the reason why a name cannot be that of a class folder in a set called `set`, or NULL. `before` is
 * the name of the class before it, or NULL. */
static const char *unfit(const char *name, const char *before, const char *set)
{
    const size_t length = strlen(name);
    if (length == 0 || length > NAME_MAX || *name == '.' || strchr(name, '/') || strstr(name, ".."))
        return "is not a usable name of a folder";
    if (strcmp(name, SAMPLES_NAME) == 0 || strcmp(name, CLASSES_NAME) == 0 ||
        (strncmp(name, set, strlen(set)) == 0 && strcmp(name + strlen(set), ".index") == 0))
        return "is the name of a file of the data set";
    return before && text_order(before, name) >= 0
               ? "does not follow the name before it in sorted order, so ImageFolder would number the "
                 "classes differently"
               : NULL;
}

/* Returns whether the class folders get the names of the classes. Warns if the names do not fit. */
static bool names_fit(const struct source_facts *facts, const char *set, const struct class_folders *folders)
{
    const char *reason = NULL;
    if (!facts->class_names)
        return false;
    for (uint64_t c = 0; c < folders->count && !reason; c++) {
        const char *name = c < facts->class_count ? facts->class_names[c] : "";
        reason = c < facts->class_count ? unfit(name, c ? facts->class_names[c - 1] : NULL, set)
                                        : "is the name of a class that " CLASSES_NAME " does not list";
        if (reason)
            status_warn("--store imagefolder: the class folders are named by numbers, because '%s' (class "
                        "%" PRIu64 ") %s; " CLASSES_NAME " lists the names",
                        name, c, reason);
    }
    return !reason;
}

static bool is_printable(const char *name)
{
    while (*name && (unsigned char)*name >= ' ' && *name != 127)
        name++;
    return !*name;
}

enum status class_folders_name(const struct source_facts *source, const char *set,
                               struct class_folders *folders)
{
    struct source_facts facts = *source;
    size_t size;
    int digits = snprintf(NULL, 0, "%" PRIu64, folders->count ? folders->count - 1 : 0);
    for (uint32_t c = 0; facts.class_names && c < facts.class_count; c++)
        if (!is_printable(facts.class_names[c])) {
            status_warn("the name of class '%s' has a control character, so " CLASSES_NAME
                        " is not written, and class folders are named by numbers",
                        facts.class_names[c]);
            facts.class_names = NULL;
        }
    bool fit = names_fit(&facts, set, folders);
    folders->names = calloc(folders->count + 1, sizeof *folders->names);
    TRY(ALLOCATED(folders->names, "out of memory for class folders"));
    for (uint64_t c = 0; c < folders->count; c++) {
        char number[24];
        snprintf(number, sizeof number, "%0*" PRIu64, digits > DIGITS ? digits : DIGITS, c);
        folders->names[c] = strdup(fit ? facts.class_names[c] : number);
        TRY(ALLOCATED(folders->names[c], "out of memory for class folders"));
    }
    if (!facts.class_names && !folders->count)
        return STATUS_OK;
    FILE *stream = open_memstream(&folders->list, &size);
    TRY(ALLOCATED(stream, "out of memory for " CLASSES_NAME));
    uint64_t count = facts.class_names ? facts.class_count : folders->count;
    for (uint64_t c = 0; c < count; c++)
        fprintf(stream, "%s\n", facts.class_names ? facts.class_names[c] : folders->names[c]);
    return ALLOCATED(text_close(stream), "out of memory for " CLASSES_NAME);
}

void class_folders_free(struct class_folders *folders)
{
    for (uint64_t c = 0; folders->names && c < folders->count; c++)
        free(folders->names[c]);
    free(folders->names);
    free(folders->labels);
    free(folders->list);
    *folders = (struct class_folders){0};
}
