#include "data/dataset.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/label_names.h"
#include "data/mds.h"
#include "data/plain_reader.h"
#include "data/remote.h"
#include "data/remote_cache.h"

#define WARNINGS_MAX 8 /* number of reported faults; further faults are only counted */
#define AHEAD_BYTES \
    (UINT64_C(256) << 20) /* at most this many bytes, but at least one shard, are requested ahead */

const char *const on_error_names[] = {"fail", "skip", "mask", NULL};
const char *const dataset_on_error[] = {"fail", "skip", NULL};

enum status dataset_advise_skip(enum status status)
{
    return status_append(status, "; --on-error skip omits such samples");
}

enum status dataset_refuse_skip(const char *stream)
{
    return status_set(STATUS_USAGE,
                      "--on-error skip would change the batches of %s; use --on-error mask: a broken sample "
                      "then keeps its place, with weight 0",
                      stream);
}

enum status dataset_advise_mask(enum status status)
{
    return status_append(status, "; %s",
                         OPTION_OR_FIELD("--on-error mask gives such samples weight 0",
                                         "on_error \"mask\" gives such samples the label -1"));
}

enum status dataset_grow(void *array, uint32_t count, size_t size)
{
    if (count >= UINT32_MAX / 2)
        return status_set(STATUS_FAILED, "more than %u samples or files; split the data set", count);
    return DATASET_ALLOCATED(array_grow(array, count, size));
}

enum status dataset_keep_name(struct dataset *dataset, const char *name, size_t length, const char **kept)
{
    char *copy = NULL;
    TRY(DATASET_ALLOCATED(array_grow(&dataset->names, dataset->name_count, sizeof *dataset->names) &&
                          (copy = strndup(name, length))));
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
    static _Thread_local char known[PATH_MAX]; /* the folder of the latest warning */
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
    if (dataset->faults <= WARNINGS_MAX)
        status_warn("%s%s",
                    samples == DATASET_UNKNOWN ? "skipped an unknown number of samples: "
                    : samples == DATASET_KEPT  ? ""
                                               : "skipped: ",
                    status_text());
    dataset->uncounted |= samples == DATASET_UNKNOWN;
    dataset->skipped += samples < DATASET_KEPT ? samples : 0;
    return STATUS_OK;
}

enum status dataset_check_cancelled(const struct dataset *dataset)
{
    const struct remote_cancel *cancel = dataset->options ? dataset->options->cancel : NULL;
    return cancel && atomic_load(&cancel->set)
               ? status_set(STATUS_FAILED, "%s: reading was stopped", dataset->path)
               : STATUS_OK;
}

static enum status open_remote(const struct dataset *dataset, uint32_t file, int flags, const bool *stopped,
                               int *fd)
{
    enum status status = remote_fd(dataset->remote, dataset->files[file].name, stopped, fd);
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

enum status dataset_file_await(const struct dataset *dataset, uint32_t file, const bool *stopped, int *fd)
{
    return dataset->remote ? open_remote(dataset, file, 0, stopped, fd)
                           : dataset_file_open(dataset, file, 0, fd);
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
    if (dataset_in_memory(dataset)) /* it would be unpacked twice */
        return;
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

bool dataset_dangles(const struct dataset *dataset, const char *name)
{
    char target[256];
    struct stat info;
    const ssize_t length = readlinkat(dataset->directory, name, target, sizeof target - 1);
    if (length < 0 || fstatat(dataset->directory, name, &info, 0) == 0 ||
        (errno != ENOENT && errno != ENOTDIR && errno != ELOOP))
        return false;
    const int cause = errno;
    target[length] = '\0';
    status_set(STATUS_FAILED, "%s/%s: a symbolic link to '%s', which cannot be opened: %s", dataset->path,
               name, target, strerror(cause));
    return true;
}

enum status dataset_check_links(const struct dataset *dataset, const struct dataset_sample *sample)
{
    for (uint32_t m = 0; !dataset->shards && m < sample->members; m++) {
        const struct dataset_file *file = &dataset->files[dataset->members[sample->member + m].file];
        if (file->dangling)
            return dataset_dangles(dataset, file->name)
                       ? STATUS_FAILED
                       : status_set(STATUS_FAILED,
                                    "%s/%s: a symbolic link, whose target did not exist when the data set "
                                    "was opened",
                                    dataset->path, file->name);
    }
    return STATUS_OK;
}

/* Implements cache_stop.is_set(). */
static bool is_cancelled(void *context)
{
    const struct remote_cancel *cancel = context;
    return cancel && atomic_load(&cancel->set);
}

/* Opens the unpacked copy of a local shard, whose open file is `packed`. */
static enum status open_copy(const struct dataset *dataset, const struct dataset_file *file, int packed,
                             int *fd)
{
    const struct cache_stop stop = {is_cancelled, (void *)(uintptr_t)dataset->options->cancel};
    const struct file_identity *identity = &file->identity;
    const uint64_t words[] = {identity->bytes, (uint64_t)identity->modified_ns,
                              (uint64_t)identity->changed_ns};
    const struct unpack_input input = {.fd = packed, .tar = !dataset->columns};
    struct cache_entry copy = {.bytes = file->bytes ? file->bytes : CACHE_UNKNOWN};
    if (!dataset->options->cache_dir)
        return unpack_to_memory(&stop, &input, identity, fd);
    char *folder = realpath(dataset->path, NULL);
    if (!folder)
        return status_set(STATUS_FAILED, "%s", strerror(errno));
    copy.source = checksum_seeded(folder, strlen(folder), 0);
    copy.source = checksum_seeded(file->name, strlen(file->name), copy.source);
    copy.source = checksum_seeded(words, sizeof words, copy.source);
    free(folder);
    return unpack_open(dataset->options, &stop, &copy, &input, identity, fd);
}

bool dataset_in_memory(const struct dataset *dataset)
{
    return dataset->remote
               ? !remote_cached(dataset->remote)
               : dataset->file_count > 0 && dataset->files[0].packed && !dataset->options->cache_dir;
}

/* Replaces the open file of a shard that is compressed by its unpacked copy, with these flags of open(2). */
static enum status replace_by_copy(const struct dataset *dataset, uint32_t file, int flags, int *fd)
{
    const int packed = *fd;
    *fd = -1;
    enum status status = open_copy(dataset, &dataset->files[file], packed, fd);
    close(packed);
    if (status == STATUS_OK && flags && dataset->options->cache_dir && fcntl(*fd, F_SETFL, flags) != 0) {
        status = status_set(STATUS_FAILED, "cannot open the unpacked copy: %s", strerror(errno));
        close(*fd);
        *fd = -1;
    }
    errno = EIO;
    return status_prefix(status, "%s/%s", dataset->path, dataset->files[file].name);
}

enum status dataset_file_open(const struct dataset *dataset, uint32_t file, int flags, int *fd)
{
    const bool packed = dataset->files[file].packed;
    const int wanted = packed ? 0 : flags;
    const char *name = dataset->files[file].name;
    char path[32];
    struct stat info;
    if (dataset->remote)
        return open_remote(dataset, file, flags, NULL, fd);
    if (dataset->files[file].unpacked) {
        /* not dup(2): each reader needs an offset of its own for read(2) */
        snprintf(path, sizeof path, "/proc/self/fd/%d", dataset->files[file].memory);
        *fd = open(path, O_RDONLY | O_CLOEXEC);
        return *fd >= 0
                   ? STATUS_OK
                   : status_set(status_of_errno(errno), "%s/%s: %s", dataset->path, name, strerror(errno));
    }
    /* With O_NONBLOCK, opening a pipe does not wait for its writer. The flag is cleared after the file is
     * open. */
    const int from = dataset->directory;
    *fd = openat(from, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | wanted);
    int failure = *fd < 0 ? errno : 0;
    if (!failure && fcntl(*fd, F_SETFL, wanted) != 0)
        failure = errno;
    bool known = *fd < 0 ? fstatat(from, name, &info, 0) == 0 : fstat(*fd, &info) == 0;
    if (failure && dataset_dangles(dataset, name)) {
        errno = failure;
        return STATUS_FAILED;
    }
    if (known && !S_ISREG(info.st_mode)) {
        failure = S_ISDIR(info.st_mode) ? EISDIR : ESPIPE;
        status_set(STATUS_FAILED, "%s/%s: not a regular file", dataset->path, name);
    } else if (failure)
        status_set(STATUS_FAILED, "%s/%s: cannot open: %s%s", dataset->path, name, strerror(failure),
                   failure == EMFILE ? "; raise the limit of open files (ulimit -n)" : "");
    if (!failure)
        return packed ? replace_by_copy(dataset, file, flags, fd) : STATUS_OK;
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    errno = failure;
    return status_of_errno(failure);
}

void dataset_name(const struct dataset *dataset, const struct dataset_sample *sample,
                  const struct dataset_member *member, char *text, size_t size)
{
    const char *file = dataset->files[member->file].name;
    if (dataset->shards)
        snprintf(text, size, "%s/%s: offset %llu: sample '%s'", dataset->path, file,
                 (unsigned long long)member->offset, sample->key);
    else if (strcmp(file, sample->key) == 0)
        snprintf(text, size, "%s/%s", dataset->path, file);
    else
        snprintf(text, size, "%s/%s: sample '%s'", dataset->path, file, sample->key);
}

enum status dataset_at(const struct dataset *dataset, const struct dataset_sample *sample,
                       const struct dataset_member *member, enum status status)
{
    char name[2048];
    if (status == STATUS_OK)
        return STATUS_OK;
    dataset_name(dataset, sample, member, name, sizeof name);
    return status_prefix(status, "%s", name);
}

/* Lists the extensions of a sample, at most DATASET_MEMBERS_MAX of them. Returns their number. */
static uint32_t extensions_of(const struct dataset *dataset, const struct dataset_sample *sample,
                              const char *extensions[DATASET_MEMBERS_MAX])
{
    const uint32_t count = sample->members < DATASET_MEMBERS_MAX ? sample->members : DATASET_MEMBERS_MAX;
    for (uint32_t m = 0; m < count; m++)
        extensions[m] = dataset->members[sample->member + m].extension;
    return count;
}

enum status dataset_lacks(const struct dataset *dataset, const struct dataset_sample *sample,
                          const struct member_list *list, const char *option)
{
    const char *extensions[DATASET_MEMBERS_MAX];
    if (dataset->masks && list == &dataset->choice.label)
        return status_set(STATUS_FAILED,
                          "it has no mask ('" MASK_MEMBER "'), unlike other samples of the data set; add the "
                          "mask, or choose labels instead of masks with %slabel",
                          OPTION_DASHES);
    if (dataset->multi_hot && list == &dataset->choice.label)
        return status_set(STATUS_FAILED,
                          "it has no multi-hot label ('" MULTI_HOT_MEMBER
                          "'), unlike the first sample of the "
                          "data set; add the label, or choose other labels with %slabel",
                          OPTION_DASHES);
    if (dataset->choice.labels_file && list == &dataset->choice.label)
        return status_set(STATUS_FAILED, "%s has no line for it; add one with its key as the name",
                          dataset->choice.labels_file);
    return members_lack(list, option, extensions, extensions_of(dataset, sample, extensions));
}

enum status dataset_label(const struct dataset *dataset, const struct dataset_sample *sample,
                          const uint8_t *bytes, uint64_t size, uint32_t classes, int32_t *label)
{
    if (!sample->rule)
        return dataset_lacks(dataset, sample, &dataset->choice.label, "label");
    *label = sample->rule->mask ? 0 : sample->class_folder;
    if (!sample->rule->folder && !sample->rule->mask)
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
    for (uint32_t f = 0; f < dataset->file_count; f++)
        if (dataset->files[f].unpacked)
            close(dataset->files[f].memory);
    free(dataset->files);
    free(dataset->members);
    free(dataset->samples);
    free(dataset->shard_first);
    free(dataset->classes);
    free(dataset->class_names);
    free(dataset->held);
    index_free(&dataset->index);
    if (dataset->columns)
        mds_free(dataset->columns);
    free(dataset->columns);
    free(dataset->path);
    free(dataset->options);
}

/* ---- Choosing the members of samples ---- */

bool dataset_looks_split(const struct dataset *dataset, const struct dataset_sample *sample)
{
    const char *extensions[DATASET_MEMBERS_MAX];
    return members_look_split(extensions, extensions_of(dataset, sample, extensions));
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

/* Reports that a sample lacks its image or its label. */
static enum status lacks(const struct dataset *dataset, const struct dataset_sample *sample,
                         const struct member_list *list, const char *option)
{
    const enum status status = dataset_lacks(dataset, sample, list, option);
    return dataset->streamed ? dataset_advise_mask(status) : status;
}

/* Finds the mask or the multi-hot label of a sample, as members_find() finds a label. */
static uint32_t find_mask(const struct dataset *dataset, const char *const extensions[], uint32_t count,
                          const struct member_rule **rule)
{
    static const struct member_rule mask = {.extension = MASK_MEMBER, .mask = true},
                                    multi_hot = {.extension = MULTI_HOT_MEMBER, .mask = true};
    const struct member_rule *const wanted = dataset->masks ? &mask : &multi_hot;
    for (uint32_t m = 0; m < count; m++)
        if (strcasecmp(extensions[m], wanted->extension) == 0) {
            *rule = wanted;
            return m;
        }
    *rule = NULL;
    return count;
}

static enum status choose(struct dataset *dataset, struct dataset_sample *sample, uint32_t *at)
{
    const struct members *choice = &dataset->choice;
    const char *extensions[DATASET_MEMBERS_MAX];
    const struct member_rule *rule, *image;
    uint32_t count = sample->members;
    TRY(list_extensions(dataset, sample, extensions, at));
    if (!dataset->records && !dataset->labelled) /* otherwise, the label is known */
        sample->class_folder = dataset_class_of(dataset, sample->key);
    sample->image = members_find(&choice->image, extensions, count, false, &image);
    if (dataset->named) {
        sample->image = 0;
        image = NULL;
    }
    const bool masked = dataset->masks || dataset->multi_hot;
    sample->label = masked ? find_mask(dataset, extensions, count, &sample->rule)
                           : members_find(&choice->label, extensions, count,
                                          sample->class_folder != LABEL_NONE, &sample->rule);
    if (members_ambiguous(image, "image", extensions, count, sample->image) ||
        (!dataset->labelled && members_ambiguous(sample->rule, "label", extensions, count, sample->label)))
        return STATUS_FAILED;
    label_names_apply(dataset, sample, count);
    if (choice->only.count) {
        uint32_t only = dataset->named ? 0 : members_find(&choice->only, extensions, count, false, &rule);
        if (only == count)
            return members_lack(&choice->only, "member", extensions, count);
        if (!dataset->named && members_ambiguous(rule, "member", extensions, count, only))
            return STATUS_FAILED;
        keep_members(dataset, sample, only, only);
    } else if (dataset->chosen) {
        if (sample->image == count && !dataset->incomplete)
            return lacks(dataset, sample, &choice->image, "image");
        if (!sample->rule && (choice->label.given || (choice->labels_file && dataset->labelled) || masked) &&
            !dataset->incomplete)
            return lacks(dataset, sample, &choice->label, "label");
        keep_members(dataset, sample, sample->image, sample->label);
    }
    return STATUS_OK;
}

enum status dataset_choose_members(struct dataset *dataset, struct dataset_sample *sample)
{
    uint32_t at = 0;
    enum status status = choose(dataset, sample, &at);
    return dataset_at(dataset, sample, &dataset->members[sample->member + at], status);
}

/* Decides whether samples are reduced to their image and label, and sets dataset->chosen. They are reduced if
 * --image or --label was given, or if the first sample has an image, but never with --member. Sets
 * dataset->masks and dataset->multi_hot. */
static void decide_members(struct dataset *dataset)
{
    const struct members *choice = &dataset->choice;
    const struct dataset_sample *first = dataset->samples;
    dataset->chosen = choice->image.given || choice->label.given || choice->labels_file;
    for (uint32_t m = 0; dataset->sample_count && m < first->members; m++) {
        const char *extension = dataset->members[first->member + m].extension;
        const struct member_rule *rule;
        dataset->chosen |= members_find(&choice->image, &extension, 1, false, &rule) == 0;
        dataset->multi_hot |= strcasecmp(extension, MULTI_HOT_MEMBER) == 0;
    }
    dataset->chosen &= !choice->all && !choice->only.count;
    for (uint32_t m = 0;
         !dataset->masks && choice->label.preset && !choice->labels_file && m < dataset->member_count; m++)
        dataset->masks = !choice->only.count && strcasecmp(dataset->members[m].extension, MASK_MEMBER) == 0;
    dataset->multi_hot &=
        !dataset->masks && choice->label.preset && !choice->labels_file && !choice->only.count;
    if (dataset->sample_count && !dataset->indexed && !choice->image.given && !choice->only.count &&
        dataset_looks_split(dataset, first) && dataset_warns(dataset))
        status_warn("%s: the sample '%s' has %u images (.%s, .%s, ...); " MEMBERS_SPLIT, dataset->path,
                    first->key, first->members, dataset->members[first->member].extension,
                    dataset->members[first->member + 1].extension);
}

/* Removes from the list of files those that hold no chosen member. Only for samples in single files. */
static void drop_files(struct dataset *dataset)
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

void dataset_hold_out(struct dataset_candidate *candidates, uint32_t count, double share, uint8_t *held)
{
    if (count > 0)
        qsort(candidates, count, sizeof *candidates, by_class_and_key);
    for (uint32_t first = 0, next; first < count; first = next) {
        for (next = first; next < count && candidates[next].label == candidates[first].label;)
            next++;
        for (uint32_t i = first; i < first + held_of(next - first, share); i++)
            held[candidates[i].number] = 1;
    }
}

/* Holds out dataset->test_share of the candidates of each class: allocates and sets dataset->held. */
static enum status hold_out(struct dataset *dataset, struct dataset_candidate *candidates, uint32_t count)
{
    dataset->held = calloc((size_t)dataset->listed + 1, 1);
    TRY(DATASET_ALLOCATED(dataset->held));
    dataset_hold_out(candidates, count, dataset->test_share, dataset->held);
    return STATUS_OK;
}

/* ---- Checking the samples ---- */

/* Reads a label, if --label was given, so that a wrong --label fails before the run. It may be a word, also
 * where words are not numbered, because nothing needs the labels. */
static enum status try_label(struct plain *plain, const struct dataset_sample *sample)
{
    int32_t label;
    char text[LABEL_BYTES_MAX + 1];
    bool number;
    if (!plain->dataset->choice.label.given || plain->dataset->incomplete)
        return STATUS_OK;
    const bool words = !plain->dataset->needs_labels && sample->label < sample->members;
    enum status status =
        words ? plain_label_text(plain, sample, text, &number) : plain_label(plain, sample, 0, &label);
    if (status == STATUS_FAILED && plain->dataset->streamed)
        dataset_advise_mask(status);
    return status_prefix(status, "%s: sample '%s'", plain->dataset->path, sample->key);
}

/* Requests `shard`, which is read next, and the shards after it. */
static void ask_shards(const struct dataset *dataset, uint32_t shard, uint32_t *next)
{
    if (dataset->remote && *next <= shard && dataset->shard_first[shard] < dataset->shard_first[shard + 1]) {
        dataset_file_ask(dataset, shard);
        *next = shard + 1;
    }
    for (uint32_t f = shard + 1; f < dataset->file_count; f++)
        if (dataset->shard_first[f] < dataset->shard_first[f + 1] &&
            !dataset_ask_ahead(dataset, shard + 1, f, next))
            return;
}

void dataset_ask_sample(const struct dataset *dataset, uint32_t i, uint32_t *shard, uint32_t *next)
{
    for (; dataset->shards && *shard < dataset->file_count && dataset->shard_first[*shard] == i; ++*shard)
        ask_shards(dataset, *shard, next);
}

/* The samples whose classes are known. */
struct candidates {
    struct dataset_candidate *items; /* room for all samples; NULL: no sample is held out */
    uint32_t count;
};

/* Hashes the key of a sample without its class folder and its extension. So the name of the folder does not
 * matter, and --prepare --store imagefolder and shards have the same hashes. */
static uint64_t hash_key(const struct dataset *dataset, const struct dataset_sample *sample)
{
    const char *slash = strchr(sample->key, '/');
    const bool folder = dataset->labelled ? dataset_class_of(dataset, sample->key) != LABEL_NONE
                                          : sample->class_folder != LABEL_NONE;
    const char *name = folder && slash ? slash + 1 : sample->key;
    const char *last = strrchr(name, '/'), *dot = strrchr(last ? last : name, '.');
    return checksum_key(name, dot ? (size_t)(dot - name) : strlen(name));
}

/* Adds a sample, after dataset_choose_members(). If its label cannot be read, leaves it out: a reader of the
 * sample reports that. */
static void add_candidate(struct candidates *candidates, struct plain *plain,
                          const struct dataset_sample *sample)
{
    int32_t label;
    if (candidates->items && plain_label(plain, sample, 0, &label) == STATUS_OK)
        candidates->items[candidates->count++] =
            (struct dataset_candidate){label, sample->number, hash_key(plain->dataset, sample)};
}

static bool is_wanted(const struct dataset *dataset, const struct dataset_sample *sample)
{
    return (!dataset->wanted || dataset->wanted(sample->number)) &&
           (!dataset->only_held || (dataset->held && dataset->held[sample->number]));
}

/* Adds all samples, without reading more than their labels. Not inlined: `plain` needs a third of the
 * smallest stack that must suffice. */
static __attribute__((noinline)) void find_candidates(struct dataset *dataset, struct candidates *candidates)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    uint32_t shard = 0, next = 0;
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        dataset_ask_sample(dataset, i, &shard, &next);
        if (dataset_choose_members(dataset, &dataset->samples[i]) == STATUS_OK)
            add_candidate(candidates, &plain, &dataset->samples[i]);
    }
    plain_close(&plain);
}

/* Chooses the members of every sample, reads their edges or all their bytes, and removes skipped samples from
 * the list. Adds the samples to `candidates`, also those that it skips. Continues and closes `reading`. */
static enum status read_all_samples(struct dataset *dataset, bool whole, struct candidates *candidates,
                                    struct label_reading *reading)
{
    struct plain *plain = &reading->plain;
    uint32_t kept = 0, shard = 0;
    bool closed = false; /* the latest file could not be opened; this is already reported */
    enum status status = STATUS_OK;
    dataset->bytes = dataset->sample_bytes_max = 0;
    for (uint32_t i = 0; status == STATUS_OK && i < dataset->sample_count; i++) {
        struct dataset_sample *sample = &dataset->samples[i];
        for (; dataset->shards && shard < dataset->file_count && dataset->shard_first[shard] == i; shard++) {
            ask_shards(dataset, shard, &reading->next);
            dataset->shard_first[shard] = kept;
        }
        if (!is_wanted(dataset, sample))
            continue;
        status = dataset_check_cancelled(dataset);
        if (status != STATUS_OK)
            break;
        bool said = closed && dataset->members[sample->member].file == plain->file;
        status = dataset_choose_members(dataset, sample);
        const bool chosen = status == STATUS_OK;
        if (status == STATUS_OK)
            status = plain_sample(plain, sample, whole);
        if (status == STATUS_OK && kept == 0)
            status = try_label(plain, sample);
        closed = plain->fd < 0;
        if (status != STATUS_OK && said && dataset->skip) {
            status = STATUS_OK;
            dataset->skipped++;
            continue;
        }
        if (status != STATUS_OK) {
            status = dataset_skip(dataset, status, 1);
            if (status == STATUS_OK && chosen && !(closed && dataset->shards))
                add_candidate(candidates, plain, sample);
            continue;
        }
        add_candidate(candidates, plain, sample);
        dataset->bytes += sample->bytes;
        if (sample->bytes > dataset->sample_bytes_max)
            dataset->sample_bytes_max = sample->bytes;
        dataset->samples[kept++] = *sample;
    }
    plain_close(plain);
    if (status != STATUS_OK)
        return status;
    for (; dataset->shards && shard <= dataset->file_count; shard++)
        dataset->shard_first[shard] = kept;
    dataset->sample_count = kept;
    dataset->hashed = whole;
    return STATUS_OK;
}

enum status dataset_check_digest(const struct dataset *dataset, uint32_t file, int fd, const char *digest)
{
    const struct dataset_file *shard = &dataset->files[file];
    int packed = -1;
    if (!shard->packed)
        return digest_check_file(fd, digest);
    if (dataset->remote)
        TRY(remote_packed_fd(dataset->remote, shard->name, &packed));
    else if ((packed = openat(dataset->directory, shard->name, O_RDONLY | O_CLOEXEC)) < 0)
        return status_set(STATUS_FAILED, "cannot open: %s", strerror(errno));
    const enum status status = digest_check_file(packed, digest);
    close(packed);
    return status;
}

/* Compares a shard's digest with that in its index. A mismatch does not tell which sample changed, so it is a
 * failure even if dataset->skip is set. */
static enum status check_digest(const struct dataset *dataset, uint32_t file)
{
    const struct dataset_file *shard = &dataset->files[file];
    int fd;
    enum status status = dataset_file_open(dataset, file, 0, &fd);
    if (status != STATUS_OK) /* read_all_samples() skips and counts the shard's samples */
        return dataset->skip && status == STATUS_FAILED ? STATUS_OK : status;
    status = dataset_check_digest(dataset, file, fd, shard->digest);
    dataset_file_close(dataset, fd);
    return status_prefix(status, "%s/%s", dataset->path, shard->name);
}

enum status dataset_hash(struct dataset *dataset)
{
    if (dataset->hashed)
        return STATUS_OK;
    for (uint32_t f = 0; f < dataset->file_count; f++)
        if (dataset->files[f].digest)
            TRY(check_digest(dataset, f));
    return read_all_samples(dataset, true, &(struct candidates){0},
                            &(struct label_reading){.plain = {.dataset = dataset, .fd = -1}});
}

/* ---- Opening ---- */

/* Opens the folder of the tar file or wids index that dataset->path names, to read only this file. */
static enum status open_shard_alone(struct dataset *dataset)
{
    char *slash = strrchr(dataset->path, '/');
    const char *leaf = slash ? slash + 1 : dataset->path;
    TRY(dataset_keep_name(dataset, leaf, strlen(leaf), &dataset->shard));
    strcpy(slash ? slash : dataset->path, slash ? "/" : "."); /* shorter than the name of the file */
    dataset->directory = open(dataset->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (slash && slash > dataset->path)
        *slash = '\0'; /* messages add a slash */
    return dataset->directory >= 0 ? STATUS_OK
                                   : status_set(STATUS_USAGE, "%s%s %s: %s", OPTION_DASHES, dataset->option,
                                                dataset->path, strerror(errno));
}

/* Opens the folder, the tar file or the URL. */
static enum status open_place(const char *path, const struct remote_options *options, struct dataset *dataset)
{
    const char *local = remote_local(path);
    if (!local && remote_is(path)) {
        dataset->path[strcspn(dataset->path, "?")] = '\0'; /* the query may contain a secret */
        char *slash = strrchr(dataset->path, '/');
        const char *leaf = slash + 1;
        if (!*leaf || strpbrk(leaf, ".{"))
            *slash = '\0'; /* messages add a slash and the name of a file */
        return remote_open(path, options, &dataset->remote);
    }
    if (local) /* remove "file://", because indexes are opened by path */
        memmove(dataset->path, dataset->path + (local - path), strlen(local) + 1);
    dataset->directory = open(dataset->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dataset->directory >= 0)
        return STATUS_OK;
    if (errno == ENOTDIR &&
        (text_ends_in(dataset->path, ".tar") || unpack_is_packed(dataset->path) ||
         text_ends_in(dataset->path, ".wids.json") || text_ends_in(dataset->path, "/" MDS_INDEX)))
        return open_shard_alone(dataset);
    return status_set(STATUS_USAGE, "%s%s %s: %s%s", OPTION_DASHES, dataset->option, path, strerror(errno),
                      errno == ENOTDIR ? "; name a folder, a shard (.tar) or a list of shards (.wids.json)"
                      : errno == ENOENT && strpbrk(path, "{*?[")
                          ? "; patterns are only for URLs, as in https://HOST/PATH/{000..003}.tar: here, "
                            "name the folder, whose shards are all read"
                          : "");
}

/* Opens the place of a data set, and sets what does not depend on its samples. */
static enum status begin(const char *path, bool skip, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset)
{
    *dataset = (struct dataset){.path = strdup(path),
                                .directory = -1,
                                .option = options && options->option ? options->option : "data",
                                .skip = skip,
                                .options = calloc(1, sizeof *dataset->options),
                                .url = path};
    TRY(DATASET_ALLOCATED(dataset->path && dataset->options));
    if (options)
        *dataset->options = *options;
    if (choice)
        dataset->choice = *choice;
    else
        TRY(members_parse(NULL, NULL, "all", &dataset->choice));
    return open_place(path, options, dataset);
}

/* Refuses files of records, unless --image or --member names others. Their names are not those of samples. */
static enum status refuse_records(const struct dataset *dataset)
{
    const struct record_format *format = dataset->directory >= 0 && !dataset->shard &&
                                                 !dataset->choice.image.given && !dataset->choice.only.count
                                             ? record_format_find(dataset->path)
                                             : NULL;
    if (!format)
        return STATUS_OK;
    status_set(STATUS_USAGE, "%s%s %s: the folder has files of %s, which %s", OPTION_DASHES, dataset->option,
               dataset->path, format->name,
               OPTION_OR_FIELD("only train, infer and load --variant stream read",
                               "the library does not read; convert them to single files or tar shards"));
    return status_in_library ? STATUS_USAGE
                             : status_append(STATUS_USAGE,
                                             "; --prepare DIR --from %s --source FILE writes their images as "
                                             "single files or shards",
                                             format->source);
}

enum status dataset_find(const char *path, bool skip, bool compare, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset)
{
    TRY(begin(path, skip, choice, options, dataset));
    TRY(refuse_records(dataset));
    dataset->compare = compare;
    TRY(dataset_list_samples(dataset));
    dataset->listed = dataset->sample_count + (uint32_t)dataset->skipped;
    decide_members(dataset);
    return STATUS_OK;
}

enum status dataset_find_records(const char *folder, const struct record_format *format, bool test_set,
                                 const struct members *choice, struct dataset *dataset)
{
    TRY(begin(folder, false, choice, NULL, dataset));
    TRY(dataset_add_records(dataset, format, test_set));
    dataset->listed = dataset->sample_count;
    decide_members(dataset);
    return STATUS_OK;
}

/* Refuses class folders without an image, as ImageFolder does. */
static enum status check_empty_classes(const struct dataset *dataset)
{
    if (!dataset->empty_classes || dataset->allow_empty || dataset->choice.labels_file)
        return STATUS_OK;
    enum status status = status_set(
        STATUS_FAILED,
        "%s/%s: the class folder has no image, so ImageFolder refuses the data set (%u such folder%s); %s; "
        "to remove the folder would give the following classes smaller numbers",
        dataset->path, dataset->empty_class, dataset->empty_classes, dataset->empty_classes == 1 ? "" : "s",
        OPTION_OR_FIELD("add images, or copy the data set with --prepare --store shards, which keeps the "
                        "numbers of the classes",
                        "add images, or read the data set as shards, which keep the numbers of the classes"));
    if (!dataset->skip)
        return status;
    status_warn("%s", status_text());
    return STATUS_OK;
}

/* Returns whether a sample has a member that a list names. */
static bool has_member(const struct dataset *dataset, const struct dataset_sample *sample,
                       const struct member_list *list)
{
    const char *extensions[DATASET_MEMBERS_MAX];
    const uint32_t count = extensions_of(dataset, sample, extensions);
    const struct member_rule *rule;
    members_find(list, extensions, count, dataset_class_of(dataset, sample->key) != LABEL_NONE, &rule);
    return rule != NULL;
}

/* Refuses --image and --label if no sample has such a member. Otherwise, all samples would be skipped or
 * masked. */
static enum status check_choice(const struct dataset *dataset)
{
    const struct member_list *const lists[] = {&dataset->choice.image, &dataset->choice.label};
    for (int i = 0; dataset->chosen && (dataset->skip || dataset->incomplete) && i < 2; i++) {
        bool found = !lists[i]->given || (i == 0 && dataset->named) ||
                     (i == 1 && (dataset->choice.labels_file || dataset->multi_hot)) ||
                     dataset->sample_count == 0;
        for (uint32_t n = 0; !found && n < dataset->sample_count; n++)
            found = has_member(dataset, &dataset->samples[n], lists[i]);
        if (!found)
            return dataset_at(dataset, dataset->samples, &dataset->members[dataset->samples->member],
                              dataset_lacks(dataset, dataset->samples, lists[i], i ? "label" : "image"));
    }
    return STATUS_OK;
}

/* Reads the samples, and chooses those that are held out. With dataset->only_held, chooses them first. */
static enum status read_and_hold_out(struct dataset *dataset, struct label_reading *reading)
{
    FREED struct dataset_candidate *items = NULL;
    const bool holds = dataset->test_share > 0;
    TRY(DATASET_ALLOCATED(!holds || (items = calloc((size_t)dataset->sample_count + 1, sizeof *items))));
    struct candidates all = {items, 0}, none = {NULL, 0};
    if (holds && dataset->only_held) {
        find_candidates(dataset, &all);
        TRY(hold_out(dataset, items, all.count));
    }
    TRY(read_all_samples(dataset, dataset->skip && dataset->indexed, dataset->only_held ? &none : &all,
                         reading));
    return holds && !dataset->only_held ? hold_out(dataset, items, all.count) : STATUS_OK;
}

/* Finds labels that are words or in a table, and reads the samples. The reader has 24 KB, which would not fit
 * onto small stacks. */
static enum status read_labels_and_samples(struct dataset *dataset)
{
    FREED struct label_reading *reading = calloc(1, sizeof *reading);
    TRY(ALLOCATED(reading, "out of memory for the labels"));
    reading->plain.dataset = dataset;
    reading->plain.fd = -1;
    enum status status = label_names_find(dataset, reading);
    if (status == STATUS_OK)
        status = read_and_hold_out(dataset, reading);
    plain_close(&reading->plain);
    return status;
}

/* Sets dataset->multi_hot_classes: from the first label that can be read, because others may be broken. Not
 * inlined: as find_candidates(). */
static __attribute__((noinline)) enum status count_multi_hot(struct dataset *dataset)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    enum status status = STATUS_FAILED;
    for (uint32_t i = 0; status == STATUS_FAILED && i < dataset->sample_count; i++)
        status = plain_multi_hot(&plain, &dataset->samples[i], &dataset->multi_hot_classes, NULL);
    plain_close(&plain);
    return status;
}

enum status dataset_check(const char *url, struct dataset *dataset)
{
    char path[PATH_MAX]; /* without secrets */
    remote_shown(url, path, sizeof path);
    TRY(check_empty_classes(dataset));
    TRY(check_choice(dataset));
    TRY(read_labels_and_samples(dataset));
    if (!dataset->shards)
        drop_files(dataset);
    if (dataset->faults > WARNINGS_MAX)
        status_warn("%s: %llu more faults like these; %llu samples skipped in total%s", path,
                    (unsigned long long)(dataset->faults - WARNINGS_MAX),
                    (unsigned long long)dataset->skipped,
                    dataset->uncounted ? ", and an unknown number more" : "");
    if (dataset->sample_count == 0 && (dataset->only_held || dataset->wanted) &&
        (dataset->listed > 0 || dataset->uncounted))
        return STATUS_OK; /* the caller decides whether it needs samples */
    if (dataset->sample_count == 0 && (dataset->skipped > 0 || dataset->uncounted))
        return status_set(STATUS_FAILED, "%s%s %s: all samples are broken; see the warnings above",
                          OPTION_DASHES, dataset->option, path);
    if (dataset->sample_count == 0)
        return status_set(STATUS_USAGE, "%s%s %s: no samples found%s%s%s", OPTION_DASHES, dataset->option,
                          path, OPTION_OR_FIELD("; fdsl-bench --prepare ", ""), OPTION_OR_FIELD(path, ""),
                          OPTION_OR_FIELD(" creates some", ""));
    if (dataset->bytes == 0)
        return status_set(STATUS_USAGE,
                          "%s%s %s: the samples contain no data; copy or write their empty files again",
                          OPTION_DASHES, dataset->option, path);
    return dataset->multi_hot ? count_multi_hot(dataset) : STATUS_OK;
}

enum status dataset_open(const char *path, bool skip, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset)
{
    TRY(dataset_find(path, skip, false, choice, options, dataset));
    return dataset_check(path, dataset);
}

/* ---- The classes of two data sets ---- */

const char *const *dataset_class_names(const struct dataset *dataset, uint32_t *count)
{
    const struct member_rule *rule = dataset->sample_count ? dataset->samples[0].rule : NULL;
    if (dataset->labelled) {
        *count = dataset->class_name_count;
        return *count ? dataset->class_names : NULL;
    }
    bool folder = rule && rule->folder, cls = rule && strcasecmp(rule->extension, "cls") == 0;
    bool listed = dataset->class_names && dataset->class_name_count >= dataset->class_count;
    *count = folder || cls ? (listed ? dataset->class_name_count : dataset->class_count) : 0;
    return *count == 0 ? NULL : (const char *const *)(listed ? dataset->class_names : dataset->classes);
}

/* Does the same as dataset_class_names(), before dataset_check(). */
static const char *const *find_class_names(struct dataset *dataset, uint32_t *count)
{
    bool known = dataset->sample_count && !dataset->choice.labels_file &&
                 (dataset->classes || dataset->class_names) &&
                 dataset_choose_members(dataset, dataset->samples) == STATUS_OK;
    *count = 0; /* if the choice failed, dataset_check() reports it */
    return known ? dataset_class_names(dataset, count) : NULL;
}

enum status dataset_same_classes(struct dataset *train, struct dataset *test)
{
    uint32_t count, other_count;
    const char *const *names = find_class_names(train, &count);
    const char *const *others = find_class_names(test, &other_count);
    const bool folders = train->classes && test->classes;
    for (uint32_t i = 0; names && others && (i < count || i < other_count); i++) {
        const char *one = i < count ? names[i] : NULL, *other = i < other_count ? others[i] : NULL;
        if ((one && other && strcmp(one, other) == 0) || (!folders && (!one || !other)))
            continue;
        if (!folders)
            return status_set(STATUS_USAGE,
                              "class %u is '%s' in %s, but '%s' in %s; labels are the numbers of the "
                              "classes, so prepare both from folders with the same classes",
                              i, one, train->path, other, test->path);
        bool ours = !other || (one && text_order(one, other) < 0);
        return status_set(STATUS_USAGE,
                          "%s has the class folder '%s', but %s does not; labels are the numbers of the "
                          "folders, so both need the same folders, which may be empty",
                          ours ? train->path : test->path, ours ? one : other,
                          ours ? test->path : train->path);
    }
    return STATUS_OK;
}
