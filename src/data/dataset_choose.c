/* Chooses the members of samples, and finds class folders. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/dataset_parts.h"
#include "data/label.h"

/* ---- Class folders ---- */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Returns whether a sample is in a folder and, if `with_image` is set, has a member that --image or --member
 * EXT names. */
static bool in_folder(const struct dataset *dataset, const struct dataset_sample *sample, bool with_image)
{
    const struct members *choice = &dataset->choice;
    bool found = !with_image;
    for (uint32_t m = 0; !found && m < sample->members; m++) {
        const char *extension = dataset->members[sample->member + m].extension;
        const struct member_rule *rule;
        found = members_find(choice->only.count ? &choice->only : &choice->image, &extension, 1, false,
                             &rule) == 0;
    }
    return found && strchr(sample->key, '/');
}

static uint32_t count_in_folders(const struct dataset *dataset, bool with_image)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < dataset->sample_count; i++)
        count += in_folder(dataset, &dataset->samples[i], with_image);
    return count;
}

/* Returns whether the latest warning was about this folder. A run with lists of options opens one folder
 * several times. */
static bool is_known(const char *path)
{
    static char known[PATH_MAX];
    bool same = strcmp(known, path) == 0;
    snprintf(known, sizeof known, "%s", path);
    return same;
}

/* If most samples are images in folders, removes the other samples from the list, with one warning. */
static void drop_strays(struct dataset *dataset)
{
    uint32_t images = count_in_folders(dataset, true), strays = dataset->sample_count - images, kept = 0;
    const char *first = NULL;
    if (dataset->indexed || strays == 0 || strays >= images)
        return;
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        if (in_folder(dataset, sample, true)) {
            dataset->samples[kept] = *sample;
            dataset->samples[kept].number = kept;
            kept++;
        } else if (!first)
            first = dataset->files[dataset->members[sample->member].file].name;
    }
    dataset->sample_count = kept;
    if (is_known(dataset->path))
        return;
    status_warn(
        "%s: ignored %u of %u samples, which are not in class folders or have no member for --%s; the "
        "first is %s",
        dataset->path, strays, strays + images, dataset->choice.only.count ? "member" : "image", first);
}

/* Returns whether the samples may be in class folders: they are single files, and none has a member "cls". */
static bool allows_classes(const struct dataset *dataset)
{
    if (dataset->shards || dataset->sample_count == 0)
        return false;
    for (uint32_t m = 0; m < dataset->member_count; m++)
        if (strcasecmp(dataset->members[m].extension, "cls") == 0)
            return false;
    return true;
}

/* Adds the names of the folders in an open directory. Ignores names that begin with a dot. */
static enum status list_folders(struct dataset *dataset, DIR *stream)
{
    struct dirent *entry;
    while (errno = 0, (entry = readdir(stream))) {
        struct stat info;
        if (entry->d_name[0] == '.' || fstatat(dirfd(stream), entry->d_name, &info, 0) != 0 ||
            !S_ISDIR(info.st_mode))
            continue;
        TRY(dataset_grow(&dataset->classes, dataset->class_count, sizeof *dataset->classes));
        TRY(dataset_keep_name(dataset, entry->d_name, strlen(entry->d_name),
                              &dataset->classes[dataset->class_count++]));
    }
    return errno ? status_set(STATUS_FAILED, "%s: cannot list the folder: %s", dataset->path, strerror(errno))
                 : STATUS_OK;
}

enum status dataset_find_classes(struct dataset *dataset)
{
    if (!allows_classes(dataset))
        return STATUS_OK;
    drop_strays(dataset);
    if (count_in_folders(dataset, false) < dataset->sample_count)
        return STATUS_OK;
    int fd = openat(dataset->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (!stream) {
        status_set(STATUS_FAILED, "%s: cannot list the folder: %s", dataset->path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return STATUS_FAILED;
    }
    enum status status = list_folders(dataset, stream);
    closedir(stream);
    if (status == STATUS_OK && dataset->class_count)
        qsort(dataset->classes, dataset->class_count, sizeof *dataset->classes, by_text);
    return status;
}

/* Returns the number of a sample's class folder. */
static int32_t class_of(const struct dataset *dataset, const struct dataset_sample *sample)
{
    FREED char *name = dataset->classes ? strndup(sample->key, strcspn(sample->key, "/")) : NULL;
    const char *const *found =
        name ? bsearch(&name, dataset->classes, dataset->class_count, sizeof *dataset->classes, by_text)
             : NULL;
    return found ? (int32_t)(found - dataset->classes) : LABEL_NONE;
}

/* ---- Members ---- */

/* Collects the extensions of a sample. Upper and lower case do not matter, so "cls" and "CLS" are the same.
 * On failure, sets `*at` to the member with the fault. */
static enum status list_extensions(const struct dataset *dataset, const struct dataset_sample *sample,
                                   const char *extensions[DATASET_MEMBERS_MAX], uint32_t *at)
{
    if (sample->members > DATASET_MEMBERS_MAX)
        return status_set(STATUS_FAILED, "it has %u members, more than %d", sample->members,
                          DATASET_MEMBERS_MAX);
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
    sample->class_folder = class_of(dataset, sample);
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
