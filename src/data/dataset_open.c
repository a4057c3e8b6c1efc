#include "data/dataset_open.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/text.h"
#include "data/class_folders.h"
#include "data/dataset_parts.h"
#include "data/md5.h"
#include "data/plain.h"
#include "data/remote.h"

#define MD5_BYTES       ((size_t)1 << 20)
#define INDEX_BYTES_MAX ((uint64_t)4 << 30) /* largest index that is read from a URL */

/* ---- Building the sample list ---- */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Allocates `shard_first` for up to `shards` shards. */
static enum status shards_room(struct dataset *dataset, size_t shards)
{
    dataset->shards = true;
    dataset->shard_first = calloc(shards + 1, sizeof *dataset->shard_first);
    return dataset->shard_first ? STATUS_OK : dataset_out_of_memory();
}

/* Removes all names but those of shards. */
static void keep_shards(struct dataset_names *names)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < names->count; i++)
        if (text_ends_in(names->items[i], ".tar"))
            names->items[kept++] = names->items[i];
    names->count = kept;
}

static enum status open_shards(struct dataset *dataset, struct dataset_names *names)
{
    struct remote *remote = dataset->remote;
    TRY(shards_room(dataset, names->count));
    keep_shards(names);
    for (uint32_t i = 0; remote && i < names->count; i++)
        remote_ask_size(remote, names->items[i]);
    for (uint32_t i = 0; i < names->count; i++) {
        if (remote && i + 1 < names->count)
            remote_ask(remote, names->items[i + 1]);
        TRY(dataset_scan_shard(dataset, names->items[i], NULL));
    }
    dataset->shard_first[dataset->file_count] = dataset->sample_count;
    return STATUS_OK;
}

/* Returns whether a path contains a ".." component. */
static bool climbs(const char *path)
{
    for (const char *part = path; part; part = strchr(part, '/')) {
        part += *part == '/';
        if (strncmp(part, "..", 2) == 0 && (part[2] == '/' || part[2] == '\0'))
            return true;
    }
    return false;
}

/* Adds the samples of one shard. `listed` is the shard's entry in the wids index, whose file name is
 * `list`. */
static enum status open_listed(struct dataset *dataset, const char *list, const struct wids_shard *listed)
{
    const char *name = NULL, *md5 = NULL;
    if (listed->url[0] == '/' || strstr(listed->url, "://") || climbs(listed->url))
        return status_set(
            STATUS_FAILED,
            "%s/%s: '%.200s' is outside the folder; keep shards in the folder of their wids index",
            dataset->path, list, listed->url);
    TRY(dataset_keep_name(dataset, listed->url, strlen(listed->url), &name));
    if (*listed->md5)
        TRY(dataset_keep_name(dataset, listed->md5, strlen(listed->md5), &md5));
    TRY(dataset_scan_shard(dataset, name, listed));
    dataset->files[dataset->file_count - 1].md5 = md5;
    return STATUS_OK;
}

/* Reads a whole index file into `*text`, from malloc. Sets `path` to its path, for messages. */
static enum status read_index_text(const struct dataset *dataset, const char *name, char path[2 * PATH_MAX],
                                   char **text, size_t *size)
{
    snprintf(path, 2 * PATH_MAX, "%s/%s", dataset->path, name);
    return dataset->remote ? remote_text(dataset->remote, name, INDEX_BYTES_MAX, text, size)
                           : file_read(path, text, size);
}

/* Adds the samples of all shards that a wids index names. */
static enum status open_wids(struct dataset *dataset, const char *name)
{
    char path[2 * PATH_MAX], *text;
    size_t size;
    CLOSED_BY(wids_free) struct wids wids = {0};
    TRY(read_index_text(dataset, name, path, &text, &size));
    enum status status = wids_parse(text, size, &wids);
    free(text);
    if (status != STATUS_OK)
        return status_prefix(status, "%s", path);
    TRY(shards_room(dataset, wids.count));
    for (size_t i = 0; i < wids.count; i++)
        TRY(open_listed(dataset, name, &wids.shards[i]));
    dataset->shard_first[dataset->file_count] = dataset->sample_count;
    return STATUS_OK;
}

/* Adds one sample of the index of --prepare. */
static enum status add_indexed(struct dataset *dataset, const struct index_sample *sample)
{
    const struct index *index = &dataset->index;
    TRY(dataset_add_sample(dataset, sample->key));
    for (uint64_t m = 0; m < sample->count; m++) {
        const struct index_member *from = &index->members[sample->first + m];
        struct dataset_member member = {.extension = from->extension,
                                        .offset = from->offset,
                                        .size = from->size,
                                        .whole = from->hash,
                                        .file = (uint32_t)sample->unit};
        if (!dataset->shards) {
            char path[PATH_MAX];
            const char *kept = NULL;
            bool here = index->layout == INDEX_IMAGEFOLDER;
            snprintf(path, sizeof path, "%s%s%s.%s", here ? "" : index->units[sample->unit].name,
                     here ? "" : "/", sample->key, from->extension);
            TRY(dataset_keep_name(dataset, path, strlen(path), &kept));
            TRY(dataset_add_file(dataset, kept, from->size));
            member.file = dataset->file_count - 1;
        } else if (dataset->member_count && dataset->members[dataset->member_count - 1].file == member.file) {
            const struct dataset_member *before = &dataset->members[dataset->member_count - 1];
            member.headers = before->offset + before->size + tar_padding(before->size);
        }
        TRY(dataset_add_member(dataset, member));
        dataset->samples[dataset->sample_count - 1].members++;
    }
    return STATUS_OK;
}

/* Sets `*bytes` to the size of a shard. */
static enum status shard_size(const struct dataset *dataset, const struct dataset_file *shard,
                              uint64_t *bytes)
{
    struct stat status_;
    if (dataset->remote)
        return remote_size(dataset->remote, shard->name, bytes);
    if (fstatat(dataset->directory, shard->name, &status_, 0) != 0)
        return status_set(STATUS_FAILED, "%s/%s: the shard is missing: %s", dataset->path, shard->name,
                          strerror(errno));
    if (!S_ISREG(status_.st_mode))
        return status_set(STATUS_FAILED, "%s/%s: not a regular file", dataset->path, shard->name);
    *bytes = (uint64_t)status_.st_size;
    return STATUS_OK;
}

/* Checks that a shard exists and has the size that the index gives. */
static enum status check_shard(struct dataset *dataset, uint32_t file)
{
    const struct dataset_file *shard = &dataset->files[file];
    uint64_t bytes;
    TRY(shard_size(dataset, shard, &bytes));
    if (bytes != shard->bytes)
        return status_set(
            STATUS_FAILED, "%s/%s: offset %llu: the shard has %llu bytes but its index says %llu",
            dataset->path, shard->name, (unsigned long long)(bytes < shard->bytes ? bytes : shard->bytes),
            (unsigned long long)bytes, (unsigned long long)shard->bytes);
    return STATUS_OK;
}

/* Returns whether more than one header block precedes the first member. The extra bytes may be a pax header
 * for all members. */
static bool begins_extended(const struct index *index, const struct index_unit *unit)
{
    return unit->count > 0 && index->members[index->samples[unit->first].first].offset > TAR_BLOCK_BYTES;
}

static enum status refuse_files(const struct dataset *dataset)
{
    return status_set(STATUS_USAGE, "--data %s: only tar shards can be read from a URL, not single files",
                      dataset->path);
}

/* Reads the names of the classes. */
static enum status read_classes(struct dataset *dataset)
{
    char path[2 * PATH_MAX];
    FREED char *text = NULL;
    size_t size;
    TRY(read_index_text(dataset, CLASSES_NAME, path, &text, &size));
    for (const char *line = text; line < text + size && *line;) {
        const size_t length = strcspn(line, "\n");
        const size_t end = length && line[length - 1] == '\r' ? length - 1 : length;
        TRY(dataset_grow(&dataset->class_names, dataset->class_name_count, sizeof *dataset->class_names));
        TRY(dataset_keep_name(dataset, line, end, &dataset->class_names[dataset->class_name_count++]));
        line += length + (line[length] == '\n');
    }
    return STATUS_OK;
}

static enum status open_indexed(struct dataset *dataset, const char *name)
{
    char path[2 * PATH_MAX], *text;
    size_t size;
    struct index *index = &dataset->index;
    TRY(read_index_text(dataset, name, path, &text, &size));
    enum status status = index_parse(text, size, index);
    if (status != STATUS_OK)
        return status_prefix(status, "%s", path);
    if (dataset->remote && index->layout != INDEX_SHARDS)
        return refuse_files(dataset);
    dataset->indexed = true;
    if (index->layout == INDEX_SHARDS)
        TRY(shards_room(dataset, index->unit_count));
    for (uint64_t p = 0; dataset->remote && p < index->unit_count; p++)
        remote_ask_size(dataset->remote, index->units[p].name);
    for (uint64_t p = 0; dataset->shards && p < index->unit_count; p++) {
        TRY(dataset_add_file(dataset, index->units[p].name, index->units[p].bytes));
        status = check_shard(dataset, (uint32_t)p);
        if (status != STATUS_OK) {
            if (!dataset->skip || status != STATUS_FAILED)
                return status;
            status_warn("%s; checking its samples one by one", status_text());
        }
        dataset->shard_first[p] = (uint32_t)index->units[p].first;
        dataset->files[p].global = begins_extended(index, &index->units[p]);
    }
    for (uint64_t i = 0; i < index->sample_count; i++)
        TRY(add_indexed(dataset, &index->samples[i]));
    if (dataset->shards)
        dataset->shard_first[dataset->file_count] = dataset->sample_count;
    return index->layout == INDEX_IMAGEFOLDER ? dataset_index_classes(dataset) : STATUS_OK;
}

/* ---- Checking the samples ---- */

/* Reads a label, if --label was given, so that a wrong --label fails before the run. */
static enum status try_label(struct plain *plain, const struct dataset_sample *sample)
{
    int32_t label;
    if (!plain->dataset->choice.label.given)
        return STATUS_OK;
    enum status status = plain_label(plain, sample, 0, &label);
    return status == STATUS_OK ? status
                               : status_prefix(status, "%s: sample '%s'", plain->dataset->path, sample->key);
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

/* Chooses the members of every sample, reads their edges or all their bytes, and removes skipped samples from
 * the list. */
static enum status read_all_samples(struct dataset *dataset, bool whole)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    uint32_t kept = 0, shard = 0, next = 0;
    bool closed = false; /* the latest file could not be opened; this is already reported */
    enum status status = STATUS_OK;
    dataset->bytes = dataset->sample_bytes_max = 0;
    for (uint32_t i = 0; status == STATUS_OK && i < dataset->sample_count; i++) {
        struct dataset_sample *sample = &dataset->samples[i];
        for (; dataset->shards && shard < dataset->file_count && dataset->shard_first[shard] == i; shard++) {
            ask_shards(dataset, shard, &next);
            dataset->shard_first[shard] = kept;
        }
        if (dataset->wanted && !dataset->wanted(sample->number))
            continue;
        bool said = closed && dataset->members[sample->member].file == plain.file;
        status = dataset_choose(dataset, sample);
        if (status == STATUS_OK)
            status = plain_sample(&plain, sample, whole);
        if (status == STATUS_OK && kept == 0)
            status = try_label(&plain, sample);
        closed = plain.fd < 0;
        if (status != STATUS_OK && said && dataset->skip) {
            status = STATUS_OK;
            dataset->skipped++;
            continue;
        }
        if (status != STATUS_OK) {
            status = dataset_skip(dataset, status, 1);
            continue;
        }
        dataset->bytes += sample->bytes;
        if (sample->bytes > dataset->sample_bytes_max)
            dataset->sample_bytes_max = sample->bytes;
        dataset->samples[kept++] = *sample;
    }
    plain_close(&plain);
    if (status != STATUS_OK)
        return status;
    for (; dataset->shards && shard <= dataset->file_count; shard++)
        dataset->shard_first[shard] = kept;
    dataset->sample_count = kept;
    dataset->hashed = whole;
    return STATUS_OK;
}

/* Computes the md5 of an open file. */
static enum status md5_of(int fd, uint8_t *buffer, char hex[33])
{
    void *md5 = NULL;
    ssize_t count = 0;
    enum status status = md5_begin(&md5);
    while (status == STATUS_OK && (count = read(fd, buffer, MD5_BYTES)) > 0)
        status = md5_add(md5, buffer, (size_t)count);
    if (status == STATUS_OK && count < 0)
        status = status_set(STATUS_FAILED, "cannot read: %s", strerror(errno));
    if (status == STATUS_OK)
        status = md5_end(md5, hex);
    md5_free(md5);
    return status;
}

/* Compares a shard's md5 with the md5 in the wids index, if this build has libcrypto. A mismatch does not
 * tell which sample changed, so it is a failure even if dataset->skip is set. */
static enum status check_md5(const struct dataset *dataset, uint32_t file, uint8_t *buffer)
{
    const struct dataset_file *shard = &dataset->files[file];
    char hex[33];
    int fd;
    enum status status = dataset_file_open(dataset, file, 0, &fd);
    if (status != STATUS_OK) /* read_all_samples() skips and counts the shard's samples */
        return dataset->skip && status == STATUS_FAILED ? STATUS_OK : status;
    status = md5_of(fd, buffer, hex);
    dataset_file_close(dataset, fd);
    if (status == STATUS_OK && *hex && strcasecmp(hex, shard->md5) != 0)
        status = status_set(STATUS_FAILED,
                            "the shard's md5 is %s, but its wids index says %s: the shard may be damaged",
                            hex, shard->md5);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s/%s", dataset->path, shard->name);
}

static enum status check_sums(const struct dataset *dataset)
{
    FREED uint8_t *buffer = malloc(MD5_BYTES);
    if (!buffer)
        return dataset_out_of_memory();
    for (uint32_t f = 0; f < dataset->file_count; f++)
        if (dataset->files[f].md5)
            TRY(check_md5(dataset, f, buffer));
    return STATUS_OK;
}

enum status dataset_hash(struct dataset *dataset)
{
    if (dataset->hashed)
        return STATUS_OK;
    TRY(check_sums(dataset));
    return read_all_samples(dataset, true);
}

/* ---- Opening ---- */

/* Returns the last of `names` that has this ending, or NULL if there is none. Sets `*several` if there is
 * more than one. */
static const char *the_one(const struct dataset_names *names, const char *end, bool *several)
{
    const char *found = NULL;
    for (uint32_t i = 0; i < names->count; i++)
        if (text_ends_in(names->items[i], end)) {
            *several = found != NULL;
            found = names->items[i];
        }
    return found;
}

static bool has_name(const struct dataset_names *names, const char *name)
{
    for (uint32_t i = 0; i < names->count; i++)
        if (strcmp(names->items[i], name) == 0)
            return true;
    return false;
}

static enum status list_samples(struct dataset *dataset)
{
    struct dataset_names names = {0};
    bool several = false, unused = false;
    enum status status = dataset_list(dataset, false, &names);
    if (status == STATUS_OK && names.count)
        qsort(names.items, names.count, sizeof *names.items, by_text);
    const char *index = the_one(&names, ".index", &several), *wids = the_one(&names, ".wids.json", &unused);
    if (status != STATUS_OK)
        ;
    else if (several)
        status =
            status_set(STATUS_USAGE, "%s contains more than one .index; keep each data set in its own folder",
                       dataset->path);
    else if (index) {
        status = open_indexed(dataset, index);
        if (status == STATUS_OK && has_name(&names, CLASSES_NAME))
            status = read_classes(dataset);
    } else if (!dataset->remote && faccessat(dataset->directory, ".prepare", F_OK, 0) == 0)
        status = status_set(
            STATUS_USAGE, "%s is incomplete: its --prepare was interrupted; repeat that command to continue",
            dataset->path);
    else if (wids)
        status = open_wids(dataset, wids);
    else if (the_one(&names, ".tar", &unused))
        status = open_shards(dataset, &names);
    else if (dataset->remote)
        status = refuse_files(dataset);
    else
        status = dataset_open_files(dataset);
    free(names.items);
    return status;
}

/* Opens the folder of the tar file that dataset->path names, to read only this file. */
static enum status open_shard_alone(struct dataset *dataset)
{
    char *slash = strrchr(dataset->path, '/');
    const char *leaf = slash ? slash + 1 : dataset->path;
    TRY(dataset_keep_name(dataset, leaf, strlen(leaf), &dataset->shard));
    strcpy(slash ? slash : dataset->path, slash ? "/" : "."); /* shorter than the name of the file */
    dataset->directory = open(dataset->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (slash && slash > dataset->path)
        *slash = '\0'; /* messages add a slash */
    return dataset->directory >= 0
               ? STATUS_OK
               : status_set(STATUS_USAGE, "--data %s: %s", dataset->path, strerror(errno));
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
    if (errno == ENOTDIR && text_ends_in(dataset->path, ".tar"))
        return open_shard_alone(dataset);
    return status_set(STATUS_USAGE, "--data %s: %s%s", path, strerror(errno),
                      errno == ENOTDIR ? "; name a folder, or a shard that ends in .tar" : "");
}

enum status dataset_find(const char *path, bool skip, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset)
{
    *dataset = (struct dataset){.path = strdup(path), .directory = -1, .skip = skip};
    if (!dataset->path)
        return dataset_out_of_memory();
    if (choice)
        dataset->choice = *choice;
    else
        TRY(members_parse(NULL, NULL, "all", &dataset->choice));
    TRY(open_place(path, options, dataset));
    TRY(list_samples(dataset));
    dataset->listed = dataset->sample_count + (uint32_t)dataset->skipped;
    dataset_decide(dataset);
    return STATUS_OK;
}

/* Refuses class folders without an image, as ImageFolder does. */
static enum status check_empty_classes(const struct dataset *dataset)
{
    if (!dataset->empty_classes || dataset->allow_empty)
        return STATUS_OK;
    enum status status = status_set(
        STATUS_FAILED,
        "%s/%s: the class folder has no image, so ImageFolder refuses the data set (%u such folder%s); add "
        "images, or remove it, which gives the following classes smaller numbers",
        dataset->path, dataset->empty_class, dataset->empty_classes, dataset->empty_classes == 1 ? "" : "s");
    if (!dataset->skip)
        return status;
    status_warn("%s", status_text());
    return STATUS_OK;
}

enum status dataset_check(const char *url, struct dataset *dataset)
{
    char path[PATH_MAX]; /* without secrets */
    remote_shown(url, path, sizeof path);
    TRY(check_empty_classes(dataset));
    TRY(read_all_samples(dataset, dataset->skip && dataset->indexed));
    if (!dataset->shards)
        dataset_drop_files(dataset);
    if (dataset->faults > DATASET_WARNINGS_MAX)
        status_warn("%s: %llu more faults like these; %llu samples skipped in total%s", path,
                    (unsigned long long)(dataset->faults - DATASET_WARNINGS_MAX),
                    (unsigned long long)dataset->skipped,
                    dataset->uncounted ? ", and an unknown number more" : "");
    if (dataset->sample_count == 0 && dataset->wanted && (dataset->listed > 0 || dataset->uncounted))
        return STATUS_OK; /* the caller decides whether it needs samples */
    if (dataset->sample_count == 0 && (dataset->skipped > 0 || dataset->uncounted))
        return status_set(STATUS_FAILED, "--data %s: all samples are broken; see the warnings above", path);
    if (dataset->sample_count == 0)
        return status_set(STATUS_USAGE, "--data %s: no samples found; fdsl-bench --prepare %s creates some",
                          path, path);
    if (dataset->bytes == 0)
        return status_set(STATUS_USAGE, "--data %s: the samples contain no data", path);
    return STATUS_OK;
}

enum status dataset_open(const char *path, bool skip, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset)
{
    TRY(dataset_find(path, skip, choice, options, dataset));
    return dataset_check(path, dataset);
}

/* ---- Class folders of two data sets ---- */

/* Returns the number of class folders if labels are the numbers of these folders, otherwise 0. */
static uint32_t count_labels(struct dataset *dataset)
{
    const struct dataset_sample *first = dataset->samples;
    if (!dataset->class_count || !dataset->sample_count ||
        dataset_choose(dataset, dataset->samples) != STATUS_OK)
        return 0; /* if the choice failed, dataset_check() reports it */
    return first->rule && first->rule->folder ? dataset->class_count : 0;
}

const char *const *dataset_class_names(const struct dataset *dataset, uint32_t *count)
{
    const struct member_rule *rule = dataset->sample_count ? dataset->samples[0].rule : NULL;
    bool folder = rule && rule->folder, cls = rule && strcasecmp(rule->extension, "cls") == 0;
    bool listed = dataset->class_names && dataset->class_name_count >= dataset->class_count;
    *count = folder || cls ? (listed ? dataset->class_name_count : dataset->class_count) : 0;
    return *count == 0 ? NULL : (const char *const *)(listed ? dataset->class_names : dataset->classes);
}

enum status dataset_same_classes(struct dataset *train, struct dataset *test)
{
    const uint32_t ours = count_labels(train), theirs = count_labels(test);
    for (uint32_t i = 0; ours && theirs && (i < ours || i < theirs); i++) {
        const char *one = i < ours ? train->classes[i] : NULL;
        const char *other = i < theirs ? test->classes[i] : NULL;
        int order = !one ? 1 : !other ? -1 : text_order(one, other);
        if (order != 0)
            return status_set(STATUS_USAGE,
                              "%s has the class folder '%s', but %s does not; labels are the "
                              "numbers of the folders, so both need the same folders, which may be empty",
                              order < 0 ? train->path : test->path, order < 0 ? one : other,
                              order < 0 ? test->path : train->path);
    }
    return STATUS_OK;
}
