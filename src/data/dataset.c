#include "data/dataset.h"

#include <limits.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/array.h"
#include "data/dataset_parts.h"
#include "data/remote.h"
#include "data/label.h"

#define AHEAD_BYTES \
    (UINT64_C(256) << 20) /* at most this many bytes, but at least one shard, are requested ahead */

const char *const dataset_on_error[] = {"fail", "skip", NULL};

enum status dataset_advise_skip(enum status status)
{
    return status_set(status, "%s; --on-error skip omits such samples", status_text());
}

enum status dataset_out_of_memory(void)
{
    return status_set(STATUS_EXHAUSTED, "out of memory for the list of samples");
}

enum status dataset_grow(void *array, uint32_t count, size_t size)
{
    if (count >= UINT32_MAX / 2)
        return status_set(STATUS_FAILED, "more than %u samples or files; split the data set", count);
    return array_grow(array, count, size) ? STATUS_OK : dataset_out_of_memory();
}

enum status dataset_keep_name(struct dataset *dataset, const char *name, size_t length, const char **kept)
{
    char *copy = NULL;
    if (!array_grow(&dataset->names, dataset->name_count, sizeof *dataset->names) ||
        !(copy = strndup(name, length)))
        return dataset_out_of_memory();
    dataset->names[dataset->name_count++] = copy;
    *kept = copy;
    return STATUS_OK;
}

enum status dataset_add_file(struct dataset *dataset, const char *name, uint64_t bytes)
{
    TRY(dataset_grow(&dataset->files, dataset->file_count, sizeof *dataset->files));
    dataset->files[dataset->file_count++] = (struct dataset_file){.name = name, .bytes = bytes};
    return STATUS_OK;
}

enum status dataset_add_member(struct dataset *dataset, struct dataset_member member)
{
    TRY(dataset_grow(&dataset->members, dataset->member_count, sizeof *dataset->members));
    dataset->members[dataset->member_count++] = member;
    return STATUS_OK;
}

enum status dataset_add_sample(struct dataset *dataset, const char *key)
{
    TRY(dataset_grow(&dataset->samples, dataset->sample_count, sizeof *dataset->samples));
    dataset->samples[dataset->sample_count] =
        (struct dataset_sample){.key = key,
                                .number = dataset->sample_count + (uint32_t)dataset->skipped,
                                .member = dataset->member_count};
    dataset->sample_count++;
    return STATUS_OK;
}

bool dataset_warns(struct dataset *dataset)
{
    static char known[PATH_MAX]; /* the folder of the latest warning */
    dataset->warns |= strcmp(known, dataset->path) != 0;
    snprintf(known, sizeof known, "%s", dataset->path);
    return dataset->warns;
}

enum status dataset_skip(struct dataset *dataset, enum status status, uint64_t samples)
{
    if (status != STATUS_FAILED)
        return status;
    dataset->faults++;
    if (!dataset->skip)
        return status;
    if (dataset->faults <= DATASET_WARNINGS_MAX)
        status_warn("%s%s",
                    samples == DATASET_UNKNOWN ? "skipped an unknown number of samples: "
                    : samples == DATASET_KEPT  ? ""
                                               : "skipped: ",
                    status_text());
    dataset->uncounted |= samples == DATASET_UNKNOWN;
    dataset->skipped += samples < DATASET_KEPT ? samples : 0;
    return STATUS_OK;
}

/* Opens a file of a remote data set. */
static enum status open_remote(const struct dataset *dataset, uint32_t file, int flags, int *fd)
{
    enum status status = remote_fd(dataset->remote, dataset->files[file].name, fd);
    if (status != STATUS_OK) {
        errno = EIO;
        return status;
    }
    if (!flags || !remote_cached(dataset->remote) || fcntl(*fd, F_SETFL, flags) == 0)
        return STATUS_OK;
    int failure = errno;
    close(*fd);
    *fd = -1;
    status_set(STATUS_FAILED, "%s/%s: cannot open: %s", dataset->path, dataset->files[file].name,
               strerror(failure));
    errno = failure;
    return STATUS_FAILED;
}

void dataset_file_close(const struct dataset *dataset, int fd)
{
    if (dataset->remote)
        remote_done(dataset->remote, fd);
    else
        close(fd);
}

void dataset_range(const struct dataset *dataset, uint32_t first, uint32_t count, uint64_t *begin,
                   uint64_t *end)
{
    const struct dataset_sample *last = &dataset->samples[first + count - 1];
    const struct dataset_member *from = &dataset->members[dataset->samples[first].member];
    const struct dataset_member *to = &dataset->members[last->member + last->members - 1];
    while (from < to && from->linked)
        from++;
    while (from < to && to->linked)
        to--;
    *begin = from->linked ? 0 : from->offset;
    *end = from->linked ? 0 : to->offset + to->size;
}

void dataset_file_ask(const struct dataset *dataset, uint32_t file)
{
    if (dataset->remote) {
        remote_ask(dataset->remote, dataset->files[file].name);
        return;
    }
    int fd;
    if (dataset_file_open(dataset, file, 0, &fd) != STATUS_OK)
        return; /* the caller opens the file later, and reports the error */
    posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED);
    close(fd);
}

bool dataset_ask_ahead(const struct dataset *dataset, uint32_t reached, uint32_t file, uint32_t *next)
{
    uint64_t bytes = 0;
    if (!dataset->remote)
        return false;
    if (file < reached || file < *next)
        return true;
    for (uint32_t f = reached; f <= file; f++)
        bytes += dataset->files[f].bytes;
    if (file > reached && (bytes > AHEAD_BYTES || file - reached >= REMOTE_CONNECTIONS))
        return false;
    dataset_file_ask(dataset, file);
    *next = file + 1;
    return true;
}

enum status dataset_file_open(const struct dataset *dataset, uint32_t file, int flags, int *fd)
{
    const char *name = dataset->files[file].name;
    struct stat info;
    if (dataset->remote)
        return open_remote(dataset, file, flags, fd);
    /* With O_NONBLOCK, opening a pipe does not wait for its writer. The flag is cleared after the file is
     * open. */
    *fd = openat(dataset->directory, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
    int failure = *fd < 0 ? errno : 0;
    if (!failure && fcntl(*fd, F_SETFL, flags) != 0)
        failure = errno;
    bool known = *fd < 0 ? fstatat(dataset->directory, name, &info, 0) == 0 : fstat(*fd, &info) == 0;
    if (known && !S_ISREG(info.st_mode)) {
        failure = S_ISDIR(info.st_mode) ? EISDIR : ESPIPE;
        status_set(STATUS_FAILED, "%s/%s: not a regular file", dataset->path, name);
    } else if (failure)
        status_set(STATUS_FAILED, "%s/%s: cannot open: %s%s", dataset->path, name, strerror(failure),
                   failure == EMFILE ? "; raise the limit of open files (ulimit -n)" : "");
    if (!failure)
        return STATUS_OK;
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    errno = failure;
    return status_of_errno(failure);
}

enum status dataset_at(const struct dataset *dataset, const struct dataset_sample *sample,
                       const struct dataset_member *member, enum status status)
{
    const char *name = dataset->files[member->file].name;
    return dataset->shards ? status_prefix(status, "%s/%s: offset %llu: sample '%s'", dataset->path, name,
                                           (unsigned long long)member->offset, sample->key)
           : strcmp(name, sample->key) == 0
               ? status_prefix(status, "%s/%s", dataset->path, name)
               : status_prefix(status, "%s/%s: sample '%s'", dataset->path, name, sample->key);
}

enum status dataset_lacks(const struct dataset *dataset, const struct dataset_sample *sample,
                          const struct member_list *list, const char *option)
{
    const char *extensions[DATASET_MEMBERS_MAX];
    for (uint32_t m = 0; m < sample->members; m++)
        extensions[m] = dataset->members[sample->member + m].extension;
    return members_lack(list, option, extensions, sample->members);
}

enum status dataset_label(const struct dataset *dataset, const struct dataset_sample *sample,
                          const uint8_t *bytes, uint64_t size, uint32_t classes, int32_t *label)
{
    if (!sample->rule)
        return dataset_lacks(dataset, sample, &dataset->choice.label, "label");
    *label = sample->class_folder;
    if (!sample->rule->folder)
        TRY(members_label(sample->rule, bytes, size, label));
    return classes ? label_check(*label, classes) : STATUS_OK;
}

void dataset_close(struct dataset *dataset)
{
    if (dataset->directory >= 0)
        close(dataset->directory);
    remote_close(dataset->remote);
    for (size_t i = 0; i < dataset->name_count; i++)
        free(dataset->names[i]);
    free(dataset->names);
    free(dataset->files);
    free(dataset->members);
    free(dataset->samples);
    free(dataset->shard_first);
    free(dataset->classes);
    free(dataset->class_names);
    free(dataset->held);
    index_free(&dataset->index);
    free(dataset->path);
}
