/* Lists the samples of shards without an index of --prepare, by reading the tar headers. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/array.h"
#include "data/dataset_parts.h"
#include "data/key.h"
#include "data/md5.h"
#include "data/tar.h"

#define WINDOW_BYTES 8192 /* size of a read while searching for headers */

#define NONE         UINT32_MAX
#define LOST         UINT32_MAX /* number of a sample that is removed when the shard is complete */

/* A hash table from names, in their normal form, to numbers. */
struct table {
    struct entry {
        char *name; /* owned; NULL: unused */
        uint32_t number;
    } * entries;         /* owned */
    uint32_t size, used; /* `size` is a power of two, or 0 */
};

/* State of a name after a member: what extracting the shard up to there would create. A later member with the
 * same name replaces it. */
struct file {
    uint64_t data, size;
    enum tar_kind kind; /* TAR_FILE: it has data; TAR_LINK: a hard link whose target is no file */
};

/* State of scanning one shard. */
struct scan {
    struct dataset *dataset;
    int fd;
    uint8_t window[WINDOW_BYTES];
    uint8_t *large; /* for requests larger than the window; owned */
    struct tar_parser parser;
    char normal[TAR_NAME_MAX + 1]; /* normal form of a name that is looked up */
    const char *name;              /* of the shard */
    uint32_t first, open; /* the shard's first sample, and the sample of the latest member, or NONE */
    struct table keys;    /* the shard's samples, by their keys */
    uint32_t lost;        /* number of samples that are LOST */
    struct file *files;   /* owned */
    uint32_t file_count;
    struct table names; /* numbers of `files`. Hard links may refer to any name */
};

/* ---- Names ---- */

/* Returns the entry that has the name, or the unused entry for it. `table` has a size. */
static struct entry *find_entry(const struct table *table, const char *name, size_t length)
{
    uint64_t hash = fnv_add(FNV_BEGIN, name, length);
    for (uint32_t at = (uint32_t)(hash ^ hash >> 32);; at++) {
        struct entry *entry = &table->entries[at & (table->size - 1)];
        if (!entry->name || (strncmp(entry->name, name, length) == 0 && entry->name[length] == '\0'))
            return entry;
    }
}

/* Returns the number of a name, or NONE. */
static uint32_t find_name(struct scan *scan, const struct table *table, const char *name, size_t length)
{
    size_t normal = key_normal(name, length, scan->normal);
    const struct entry *entry = table->size ? find_entry(table, scan->normal, normal) : NULL;
    return entry && entry->name ? entry->number : NONE;
}

/* Sets the number of a name. At most half of the entries are used. */
static enum status set_name(struct scan *scan, struct table *table, const char *name, size_t length,
                            uint32_t number)
{
    if (table->used >= table->size / 2) {
        struct table larger = {.size = table->size ? 2 * table->size : 1024};
        larger.entries = calloc(larger.size, sizeof *larger.entries);
        if (!larger.entries)
            return dataset_out_of_memory();
        for (uint32_t i = 0; i < table->size; i++)
            if (table->entries[i].name)
                *find_entry(&larger, table->entries[i].name, strlen(table->entries[i].name)) =
                    table->entries[i];
        free(table->entries);
        larger.used = table->used;
        *table = larger;
    }
    size_t normal = key_normal(name, length, scan->normal);
    struct entry *entry = find_entry(table, scan->normal, normal);
    if (!entry->name) {
        entry->name = strndup(scan->normal, normal);
        if (!entry->name)
            return dataset_out_of_memory();
        table->used++;
    }
    entry->number = number;
    return STATUS_OK;
}

static void free_table(struct table *table)
{
    for (uint32_t i = 0; i < table->size; i++)
        free(table->entries[i].name);
    free(table->entries);
}

/* ---- Lost samples ---- */

/* Handles a fault of one sample, whose message is set. With dataset->skip, marks the sample as lost, with one
 * warning. Its members do not come to the list. */
static enum status lose_sample(struct scan *scan, struct dataset_sample *sample, enum status status)
{
    if (!scan->dataset->skip || status != STATUS_FAILED)
        return status;
    sample->number = LOST;
    scan->lost++;
    status_prefix(status, "%s/%s", scan->dataset->path, scan->name);
    return dataset_skip(scan->dataset, status, 0); /* counted by drop_lost() */
}

/* Removes the lost samples of the shard from the list, and counts them. */
static void drop_lost(const struct scan *scan)
{
    struct dataset *dataset = scan->dataset;
    uint32_t kept = scan->first;
    for (uint32_t i = scan->first; scan->lost && i < dataset->sample_count; i++)
        if (dataset->samples[i].number != LOST)
            dataset->samples[kept++] = dataset->samples[i];
    if (scan->lost) {
        dataset->skipped += dataset->sample_count - kept;
        dataset->sample_count = kept;
    }
}

/* ---- Members ---- */

/* Records what the name of a member is from now on. A file whose name ends with a slash is a folder. */
static enum status record_name(struct scan *scan, const struct tar_member *found, struct file file)
{
    size_t length = strlen(found->name);
    if (length > 0 && found->name[length - 1] == '/')
        file.kind = TAR_FOLDER;
    TRY(dataset_grow(&scan->files, scan->file_count, sizeof *scan->files));
    scan->files[scan->file_count] = file;
    return set_name(scan, &scan->names, found->name, length, scan->file_count++);
}

/* Sets `*member` to the data of the file that the target of a hard link is here. */
static enum status find_target(struct scan *scan, const struct tar_member *link,
                               struct dataset_member *member)
{
    static const char *const kinds[] = {
        [TAR_LINK] =
            "a hard link to no earlier file of this shard; write the shard with tar --hard-dereference",
        [TAR_SYMLINK] = "a symbolic link, which is not followed; write the shard with tar --dereference "
                        "--hard-dereference",
        [TAR_SPECIAL] = "a device or a pipe, not a file",
        [TAR_FOLDER] = "a folder, not a file"};
    uint32_t number = find_name(scan, &scan->names, link->target, strlen(link->target));
    const struct file *target = number == NONE ? NULL : &scan->files[number];
    if (target && target->kind == TAR_FILE) {
        member->offset = target->data;
        member->size = target->size;
        return STATUS_OK;
    }
    return status_set(STATUS_FAILED, "offset %llu: '%.200s' is a hard link to '%.200s', which is %s",
                      (unsigned long long)link->header, link->name, link->target,
                      target ? kinds[target->kind]
                             : "not an earlier file of this shard; write the shard with tar "
                               "--hard-dereference");
}

/* Finds the data of a member. A member without data is a fault of its sample. */
static enum status find_data(struct scan *scan, const struct tar_member *found, struct dataset_member *member)
{
    unsigned long long header = found->header;
    if (found->kind == TAR_FILE || found->kind == TAR_FOLDER) /* a folder belongs to no sample */
        return STATUS_OK;
    if (found->kind == TAR_SYMLINK)
        return status_set(
            STATUS_FAILED,
            "offset %llu: '%.200s' is a symbolic link to '%.200s', which is not followed; write "
            "the shard with tar --dereference",
            header, found->name, found->target);
    if (found->kind == TAR_SPECIAL)
        return status_set(STATUS_FAILED, "offset %llu: '%.200s' is a device or a pipe, not a file", header,
                          found->name);
    member->linked = true;
    member->headers = found->data;
    return find_target(scan, found, member);
}

/* Sets scan->open to the sample of a member with this key: to the current sample, or to a new one. If the key
 * has occurred before, the members of the sample are not adjacent, and readers would deliver it in parts. */
static enum status open_sample(struct scan *scan, const struct tar_member *found, size_t length)
{
    struct dataset *dataset = scan->dataset;
    const char *key = NULL;
    if (scan->open != NONE && key_same(dataset->samples[scan->open].key, found->name, length))
        return STATUS_OK;
    scan->open = find_name(scan, &scan->keys, found->name, length);
    if (scan->open == NONE) {
        scan->open = dataset->sample_count;
        TRY(dataset_keep_name(dataset, found->name, length, &key));
        TRY(dataset_add_sample(dataset, key));
        return set_name(scan, &scan->keys, key, length, scan->open);
    }
    struct dataset_sample *sample = &dataset->samples[scan->open];
    if (sample->number == LOST)
        return STATUS_OK;
    const struct dataset_member *first = &dataset->members[sample->member];
    return lose_sample(
        scan, sample,
        status_set(STATUS_FAILED,
                   "offset %llu: '%.200s': the key '%.200s' occurred before, at offset %llu, with "
                   "other samples in between: the members of a sample must be adjacent; write "
                   "the shard with tar --sort=name",
                   (unsigned long long)found->header, found->name, sample->key,
                   (unsigned long long)(first->linked ? first->headers : first->offset)));
}

/* Adds the member `found` to its sample. Members without a key belong to no sample. */
static enum status scan_member(struct scan *scan, const struct tar_member *found)
{
    struct dataset *dataset = scan->dataset;
    struct dataset_member member = {
        .offset = found->data, .size = found->size, .file = dataset->file_count - 1};
    size_t length;
    const char *extension;
    bool keyed = found->kind != TAR_FOLDER && key_split(found->name, &length, &extension);
    if (keyed)
        TRY(open_sample(scan, found, length));
    enum status status = find_data(scan, found, &member);
    TRY(record_name(scan, found,
                    (struct file){member.offset, member.size,
                                  status == STATUS_OK && found->kind == TAR_LINK ? TAR_FILE : found->kind}));
    struct dataset_sample *sample = keyed ? &dataset->samples[scan->open] : NULL;
    if (!keyed || sample->number == LOST)
        return STATUS_OK;
    if (status != STATUS_OK)
        return lose_sample(scan, sample, status);
    TRY(dataset_keep_name(dataset, extension, strlen(extension), &member.extension));
    TRY(dataset_add_member(dataset, member));
    sample->members++;
    return STATUS_OK;
}

/* ---- Reading the headers ---- */

/* Reads the shard's bytes from the parser's position on: at least `need` bytes, or all remaining bytes of the
 * shard. */
static enum status scan_bytes(struct scan *scan, uint64_t shard_bytes, size_t need, const uint8_t **bytes,
                              size_t *available)
{
    uint64_t left = scan->parser.position < shard_bytes ? shard_bytes - scan->parser.position : 0;
    uint8_t *to = scan->window;
    size_t wanted = need > sizeof scan->window ? need : sizeof scan->window;
    if (wanted > left)
        wanted = (size_t)left;
    if (wanted > sizeof scan->window) {
        free(scan->large);
        to = scan->large = malloc(wanted);
        if (!to)
            return dataset_out_of_memory();
    }
    ssize_t count = pread(scan->fd, to, wanted, (off_t)scan->parser.position);
    if (count < 0 || (size_t)count < wanted)
        return status_set(STATUS_FAILED, "offset %llu: cannot read: %s",
                          (unsigned long long)scan->parser.position,
                          count < 0 ? strerror(errno) : "the file was truncated");
    *bytes = to;
    *available = wanted;
    return STATUS_OK;
}

static enum status scan_open_shard(struct scan *scan, uint64_t shard_bytes)
{
    size_t need = TAR_BLOCK_BYTES;
    uint64_t at = 0; /* offset of `bytes` in the shard */
    const uint8_t *bytes = NULL;
    size_t available = 0;
    tar_open(&scan->parser, shard_bytes);
    scan->parser.folders = true; /* a folder may replace the target of a hard link */
    for (;;) {
        struct tar_member member;
        enum tar_step step;
        uint64_t skipped = scan->parser.position - at;
        if (!bytes || skipped + need > available) {
            TRY(scan_bytes(scan, shard_bytes, need, &bytes, &available));
            at = scan->parser.position;
            skipped = 0;
        }
        enum status status = tar_next(&scan->parser, bytes + skipped, available - (size_t)skipped,
                                      at + available >= shard_bytes, &member, &step, &need);
        if (status != STATUS_OK && at == 0 && scan->dataset->sample_count == scan->first)
            TRY(tar_refuse_other(bytes, available));
        TRY(status);
        if (step == TAR_END)
            return STATUS_OK;
        if (step == TAR_MEMBER) {
            TRY(scan_member(scan, &member));
            need = TAR_BLOCK_BYTES;
        }
    }
}

static enum status scan_file(struct scan *scan, uint32_t file)
{
    struct stat status_;
    struct dataset *dataset = scan->dataset;
    if (fstat(scan->fd, &status_) != 0 || !S_ISREG(status_.st_mode))
        return status_set(STATUS_FAILED, "not a regular file");
    dataset->files[file].bytes = (uint64_t)status_.st_size;
    enum status status = scan_open_shard(scan, (uint64_t)status_.st_size);
    dataset->files[file].global = scan->parser.has_global;
    if (status == STATUS_OK && dataset->sample_count == scan->first)
        status = status_set(STATUS_FAILED, "the shard is empty");
    if (status != STATUS_OK && dataset->sample_count > scan->first)
        dataset->sample_count--; /* this sample may be incomplete */
    return status;
}

/* Compares a shard that was read to its end with the shard's entry in the wids index. */
static enum status check_listed(const struct wids_shard *listed, uint64_t samples, uint64_t bytes)
{
    if (samples != listed->samples)
        return status_set(STATUS_FAILED, "the shard holds %llu samples but its wids index says %llu",
                          (unsigned long long)samples, (unsigned long long)listed->samples);
    if (listed->bytes && bytes != listed->bytes)
        return status_set(STATUS_FAILED, "the shard has %llu bytes but its wids index says %llu",
                          (unsigned long long)bytes, (unsigned long long)listed->bytes);
    return STATUS_OK;
}

enum status dataset_scan_shard(struct dataset *dataset, const char *name, const struct wids_shard *listed)
{
    TRY(dataset_add_file(dataset, name, 0));
    uint32_t file = dataset->file_count - 1, first = dataset->sample_count;
    dataset->shard_first[file] = first;
    struct scan *scan = calloc(1, sizeof *scan);
    if (!scan)
        return dataset_out_of_memory();
    scan->dataset = dataset;
    scan->name = name;
    scan->first = first;
    scan->open = NONE;
    enum status status = dataset_file_open(dataset, file, 0, &scan->fd);
    if (status == STATUS_OK)
        status = scan_file(scan, file);
    uint64_t found = dataset->sample_count - first;
    const bool scanned = status == STATUS_OK;
    bool same = true;
    if (scanned && listed)
        status = check_listed(listed, found, dataset->files[file].bytes);
    if (status == STATUS_OK && listed && *listed->md5 && dataset->compare) {
        status = md5_check_file(scan->fd, listed->md5);
        same = status == STATUS_OK;
    }
    if (status != STATUS_OK && scan->fd >= 0)
        status_prefix(status, "%s/%s", dataset->path, name);
    if (scan->fd >= 0)
        dataset_file_close(dataset, scan->fd);
    drop_lost(scan);
    free_table(&scan->keys);
    free_table(&scan->names);
    free(scan->files);
    free(scan->large);
    free(scan);
    if (status == STATUS_OK || !same) /* the md5 does not tell which samples differ */
        return status;
    uint64_t left = listed && listed->samples > found ? listed->samples - found : 0;
    if (scanned && left == 0 && dataset->skip) {
        status_prefix(status, "all samples of this shard are read, although it differs from its list");
        return dataset_skip(dataset, status, DATASET_KEPT);
    }
    return dataset_skip(dataset, status, listed ? left : DATASET_UNKNOWN);
}
