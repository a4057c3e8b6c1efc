/* Chooses the members of samples, and the samples that are held out for testing. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "data/dataset_parts.h"
#include "data/label.h"

bool dataset_looks_split(const struct dataset *dataset, const struct dataset_sample *sample)
{
    const char *extensions[DATASET_MEMBERS_MAX];
    const uint32_t count = sample->members < DATASET_MEMBERS_MAX ? sample->members : DATASET_MEMBERS_MAX;
    for (uint32_t m = 0; m < count; m++)
        extensions[m] = dataset->members[sample->member + m].extension;
    return members_look_split(extensions, count);
}

/* Collects the extensions of a sample. Upper and lower case do not matter, so "cls" and "CLS" are the same.
 * On failure, sets `*at` to the member with the fault. */
static enum status list_extensions(const struct dataset *dataset, const struct dataset_sample *sample,
                                   const char *extensions[DATASET_MEMBERS_MAX], uint32_t *at)
{
    if (sample->members > DATASET_MEMBERS_MAX)
        return status_set(STATUS_FAILED, "it has %u members, more than %d%s", sample->members,
                          DATASET_MEMBERS_MAX,
                          dataset_looks_split(dataset, sample) ? "; " MEMBERS_SPLIT : "");
    for (uint32_t m = 0; m < sample->members; m++) {
        extensions[m] = dataset->members[sample->member + m].extension;
        for (uint32_t other = 0; other < m; other++)
            if (strcasecmp(extensions[m], extensions[other]) == 0) {
                *at = m;
                return status_set(STATUS_FAILED, "it has '%s' twice", extensions[m]);
            }
    }
    return STATUS_OK;
}

/* Removes all members except `first` and `second` from a sample. */
static void keep_members(struct dataset *dataset, struct dataset_sample *sample, uint32_t first,
                         uint32_t second)
{
    struct dataset_member *members = &dataset->members[sample->member];
    uint32_t kept = 0, places[DATASET_MEMBERS_MAX + 1]; /* new number of each member that is kept */
    memset(places, 0xff, sizeof places);
    for (uint32_t m = 0; m < sample->members; m++)
        if (m == first || m == second) {
            members[kept] = members[m];
            places[m] = kept++;
        }
    sample->image = places[sample->image] < kept ? places[sample->image] : kept;
    sample->label = places[sample->label] < kept ? places[sample->label] : kept;
    if (sample->label == kept && sample->rule && !sample->rule->folder)
        sample->rule = NULL;
    sample->members = kept;
}

static enum status choose(struct dataset *dataset, struct dataset_sample *sample, uint32_t *at)
{
    const struct members *choice = &dataset->choice;
    const char *extensions[DATASET_MEMBERS_MAX];
    const struct member_rule *rule;
    uint32_t count = sample->members;
    TRY(list_extensions(dataset, sample, extensions, at));
    sample->class_folder = dataset_class_of(dataset, sample->key);
    sample->image = members_find(&choice->image, extensions, count, false, &rule);
    sample->label =
        members_find(&choice->label, extensions, count, sample->class_folder != LABEL_NONE, &sample->rule);
    if (choice->only.count) {
        uint32_t only = members_find(&choice->only, extensions, count, false, &rule);
        if (only == count)
            return members_lack(&choice->only, "member", extensions, count);
        keep_members(dataset, sample, only, only);
    } else if (dataset->chosen) {
        if (sample->image == count)
            return members_lack(&choice->image, "image", extensions, count);
        if (!sample->rule && choice->label.given)
            return members_lack(&choice->label, "label", extensions, count);
        keep_members(dataset, sample, sample->image, sample->label);
    }
    return STATUS_OK;
}

enum status dataset_choose(struct dataset *dataset, struct dataset_sample *sample)
{
    uint32_t at = 0;
    enum status status = choose(dataset, sample, &at);
    return status == STATUS_OK ? STATUS_OK
                               : dataset_at(dataset, sample, &dataset->members[sample->member + at], status);
}

void dataset_decide(struct dataset *dataset)
{
    const struct members *choice = &dataset->choice;
    const struct dataset_sample *first = dataset->samples;
    dataset->chosen = choice->image.given || choice->label.given;
    for (uint32_t m = 0; dataset->sample_count && m < first->members; m++) {
        const char *extension = dataset->members[first->member + m].extension;
        const struct member_rule *rule;
        dataset->chosen |= members_find(&choice->image, &extension, 1, false, &rule) == 0;
    }
    dataset->chosen &= !choice->all && !choice->only.count;
    if (dataset->sample_count && !dataset->indexed && !choice->image.given && !choice->only.count &&
        dataset_looks_split(dataset, first) && dataset_warns(dataset))
        status_warn("%s: the sample '%s' has %u images (.%s, .%s, ...); " MEMBERS_SPLIT, dataset->path,
                    first->key, first->members, dataset->members[first->member].extension,
                    dataset->members[first->member + 1].extension);
}

void dataset_drop_files(struct dataset *dataset)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < dataset->sample_count; i++)
        for (uint32_t m = 0; m < dataset->samples[i].members; m++) {
            struct dataset_member *member = &dataset->members[dataset->samples[i].member + m];
            dataset->files[kept] = dataset->files[member->file];
            member->file = kept++;
        }
    dataset->file_count = kept;
}

/* ---- Holding out samples ---- */

static int by_class_and_key(const void *a, const void *b)
{
    const struct dataset_candidate *left = a, *right = b;
    if (left->label != right->label)
        return left->label < right->label ? -1 : 1;
    if (left->key != right->key)
        return left->key < right->key ? -1 : 1;
    return (left->number > right->number) - (left->number < right->number);
}

/* Returns how many of `count` samples of a class are held out. */
static uint32_t held_of(uint32_t count, double share)
{
    const uint32_t held = (uint32_t)llround(count * share);
    if (held == 0)
        return count > 1;
    return held < count ? held : count - 1;
}

enum status dataset_hold_out(struct dataset *dataset, struct dataset_candidate *candidates, uint32_t count)
{
    dataset->held = calloc((size_t)dataset->listed + 1, 1);
    if (!dataset->held)
        return dataset_out_of_memory();
    if (count > 0)
        qsort(candidates, count, sizeof *candidates, by_class_and_key);
    for (uint32_t first = 0, next; first < count; first = next) {
        for (next = first; next < count && candidates[next].label == candidates[first].label;)
            next++;
        for (uint32_t i = first; i < first + held_of(next - first, dataset->test_share); i++)
            dataset->held[candidates[i].number] = 1;
    }
    return STATUS_OK;
}
