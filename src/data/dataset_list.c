/* Lists the samples of shards: from an index of --prepare, from the list of a wids index, or by reading the
 * tar headers. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/array.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/dataset.h"
#include "data/mds.h"
#include "data/plain_reader.h"
#include "data/remote.h"
#include "data/tar.h"
#include "data/remote_cache.h"

#define INDEX_BYTES_MAX   ((uint64_t)4 << 30) /* largest index that is read from a URL */
#define OTHER_BYTES_MAX   ((uint64_t)1 << 20) /* a smaller file may be a Git LFS pointer or an HTML page */
#define OTHER_BEGIN_BYTES 64                  /* enough to recognise it */
#define WINDOW_BYTES      8192                /* size of a read while searching for headers */

#define KEPT_BYTES        ((uint64_t)1 << 30) /* of shards that are unpacked in memory */

#define NONE              UINT32_MAX
#define LOST              UINT32_MAX /* number of a sample that is removed when the shard is complete */

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
struct named_file {
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
    uint32_t first, open;     /* the shard's first sample, and the sample of the latest member, or NONE */
    struct table keys;        /* the shard's samples, by their keys */
    uint32_t lost;            /* number of samples that are LOST */
    struct named_file *files; /* owned */
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
        TRY(DATASET_ALLOCATED(larger.entries));
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
        TRY(DATASET_ALLOCATED(entry->name));
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
static enum status record_name(struct scan *scan, const struct tar_member *found, struct named_file file)
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
    const struct named_file *target = number == NONE ? NULL : &scan->files[number];
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
        return status_set(STATUS_FAILED,
                          "offset %llu: '%.200s' is a symbolic link to '%.200s', which is not followed; "
                          "write the shard with tar --dereference",
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
    TRY(record_name(
        scan, found,
        (struct named_file){member.offset, member.size,
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
        TRY(DATASET_ALLOCATED(to));
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

/* Implements add() of mds_list(): adds a sample, with a member per column. Its key is its number. */
static enum status add_columns(void *context, const struct mds_sample *found)
{
    struct dataset *dataset = context;
    const struct mds *mds = dataset->columns;
    char key[24];
    const char *kept;
    const int length = snprintf(key, sizeof key, "%08" PRIu64, found->number);
    TRY(dataset_keep_name(dataset, key, (size_t)length, &kept));
    TRY(dataset_add_sample(dataset, kept));
    for (uint32_t c = 0; c < mds->count; c++)
        TRY(dataset_add_member(dataset, (struct dataset_member){.extension = mds->columns[c].member,
                                                                .offset = found->offsets[c],
                                                                .size = found->sizes[c],
                                                                .file = dataset->file_count - 1}));
    dataset->samples[dataset->sample_count - 1].members = mds->count;
    return STATUS_OK;
}

static enum status scan_file(struct scan *scan, uint32_t file)
{
    struct stat status_;
    struct dataset *dataset = scan->dataset;
    if (fstat(scan->fd, &status_) != 0 || !S_ISREG(status_.st_mode))
        return status_set(STATUS_FAILED, "not a regular file");
    dataset_know_file(&dataset->files[file], &status_);
    enum status status = dataset->columns ? mds_list(dataset->columns, file, scan->fd,
                                                     (uint64_t)status_.st_size, add_columns, dataset)
                                          : scan_open_shard(scan, (uint64_t)status_.st_size);
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
        return status_set(STATUS_FAILED, "the shard holds %llu samples but its index says %llu",
                          (unsigned long long)samples, (unsigned long long)listed->samples);
    if (listed->bytes && bytes != listed->bytes)
        return status_set(STATUS_FAILED, "the shard has %llu bytes but its index says %llu",
                          (unsigned long long)bytes, (unsigned long long)listed->bytes);
    return STATUS_OK;
}

/* Sets `*bytes` to the size of a shard, as it is stored. */
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

/* Records that a shard is compressed, and which file it is. */
static void find_packed(const struct dataset *dataset, struct dataset_file *shard)
{
    struct stat info;
    shard->packed = unpack_is_packed(shard->name);
    if (shard->packed && !dataset->remote && fstatat(dataset->directory, shard->name, &info, 0) == 0)
        shard->identity = file_identify(&info); /* otherwise, opening the shard fails */
}

/* Checks that the unpacked copies of all shards fit into the cache together: every epoch would write those
 * again that do not fit. */
static enum status check_copies(const struct dataset *dataset)
{
    uint64_t bytes = 0;
    for (uint32_t f = 0; f < dataset->file_count; f++)
        bytes += dataset->files[f].packed ? dataset->files[f].bytes : 0;
    if (!dataset->options->cache_bytes || bytes <= dataset->options->cache_bytes)
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      "%s: the unpacked copies of the shards have more than the %llu bytes of the cache "
                      "folder; raise %s",
                      dataset->path, (unsigned long long)dataset->options->cache_bytes, REMOTE_CACHE_BYTES);
}

/* Returns whether the digest of a shard is compared when its samples are listed: also in an MDS set of which
 * the whole shard was just read or unpacked. */
static bool compares_digest(const struct dataset *dataset, uint32_t file)
{
    return dataset->compare || (dataset->columns && (dataset->remote != NULL) != dataset->files[file].packed);
}

/* Keeps the contents of a local shard, which were unpacked in memory to list its samples, until the set is
 * closed: otherwise, they would be unpacked again at the next use. Returns false if there is no room. */
static bool keep_unpacked(struct dataset *dataset, uint32_t number, int fd)
{
    struct dataset_file *file = &dataset->files[number];
    if (dataset->remote || !dataset_in_memory(dataset) || !file->packed ||
        dataset->kept_bytes + file->bytes > KEPT_BYTES)
        return false;
    dataset->kept_bytes += file->bytes;
    file->unpacked = true;
    file->memory = fd;
    return true;
}

/* Adds the samples of one shard. `listed` is the shard's entry in a wids index, or NULL. If the shard is
 * broken and dataset->skip is set, keeps the samples before the broken part. */
static enum status scan_shard(struct dataset *dataset, const char *name, const struct wids_shard *listed)
{
    TRY(dataset_add_file(dataset, name, 0));
    uint32_t file = dataset->file_count - 1, first = dataset->sample_count;
    dataset->shard_first[file] = first;
    struct scan *scan = calloc(1, sizeof *scan);
    TRY(DATASET_ALLOCATED(scan));
    scan->dataset = dataset;
    scan->name = name;
    scan->first = first;
    scan->open = NONE;
    scan->fd = -1;
    find_packed(dataset, &dataset->files[file]);
    enum status status = dataset_file_open(dataset, file, 0, &scan->fd);
    if (status == STATUS_OK)
        status = scan_file(scan, file);
    uint64_t found = dataset->sample_count - first, bytes = dataset->files[file].bytes;
    const bool scanned = status == STATUS_OK;
    bool same = true;
    if (scanned && listed && dataset->files[file].packed)
        status = shard_size(dataset, &dataset->files[file], &bytes);
    if (status == STATUS_OK && listed)
        status = check_listed(listed, found, bytes);
    if (status == STATUS_OK && listed && listed->unpacked_bytes &&
        dataset->files[file].bytes != listed->unpacked_bytes)
        status = status_set(STATUS_FAILED, "the shard has %llu unpacked bytes but its index says %llu",
                            (unsigned long long)dataset->files[file].bytes,
                            (unsigned long long)listed->unpacked_bytes);
    if (status == STATUS_OK && listed && listed->digest && compares_digest(dataset, file)) {
        status = dataset_check_digest(dataset, file, scan->fd, listed->digest);
        same = status == STATUS_OK;
    }
    if (status != STATUS_OK && scan->fd >= 0)
        status_prefix(status, "%s/%s", dataset->path, name);
    if (status == STATUS_OK)
        status = check_copies(dataset);
    if (scan->fd >= 0 && !(scanned && keep_unpacked(dataset, file, scan->fd)))
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

/* ---- Building the sample list ---- */

/* Allocates `shard_first` for up to `shards` shards. */
static enum status shards_room(struct dataset *dataset, size_t shards)
{
    dataset->shards = true;
    dataset->shard_first = calloc(shards + 1, sizeof *dataset->shard_first);
    return DATASET_ALLOCATED(dataset->shard_first);
}

/* Returns the name of the first MDS shard, or NULL. */
static const char *first_mds(const struct dataset_names *names)
{
    for (uint32_t i = 0; i < names->count; i++)
        if (mds_is_shard(names->items[i]))
            return names->items[i];
    return NULL;
}

/* Returns the name of the first shard that is compressed, or NULL. */
static const char *first_packed(const struct dataset_names *names)
{
    for (uint32_t i = 0; i < names->count; i++)
        if (unpack_is_packed(names->items[i]))
            return names->items[i];
    return NULL;
}

/* Removes all names but those of shards. `shard` is the first of them. Shards that are compressed are read
 * only if there are no others: they may be the same ones. */
static void keep_shards(const struct dataset *dataset, struct dataset_names *names, const char *shard)
{
    const bool packed = unpack_is_packed(shard);
    const char *other = first_packed(names);
    uint32_t kept = 0;
    if (!packed && other && !dataset->remote)
        status_warn("%s: only the shards whose names end in .tar are read, not %s", dataset->path, other);
    for (uint32_t i = 0; i < names->count; i++)
        if (packed ? unpack_is_packed(names->items[i]) : text_ends_in(names->items[i], ".tar"))
            names->items[kept++] = names->items[i];
    names->count = kept;
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

/* ---- Places of shards ---- */

/* Removes the percent codes of bytes that need none, so that two spellings of a URL become equal. */
static void normalise(char *url)
{
    char *to = url;
    for (; *url; url++) {
        unsigned value;
        bool coded = *url == '%' && isxdigit((unsigned char)url[1]) && isxdigit((unsigned char)url[2]) &&
                     sscanf(url + 1, "%2x", &value) == 1 &&
                     (isalnum((int)value) || strchr("-._~", (int)value));
        *to++ = coded && value ? (char)value : *url;
        url += coded && value ? 2 : 0;
    }
    *to = '\0';
}

static int by_spelling(const void *a, const void *b)
{
    return strcmp(((const char *const *)a)[0], ((const char *const *)b)[0]);
}

/* Refuses a list of shards of a URL that names a shard twice. */
static enum status check_distinct_urls(struct dataset *dataset, const char *const names[], size_t count)
{
    FREED const char **spellings = calloc(count + 1, 2 * sizeof *spellings); /* normalised, then as given */
    TRY(DATASET_ALLOCATED(spellings));
    for (size_t i = 0; i < count; i++) {
        TRY(dataset_keep_name(dataset, names[i], strlen(names[i]), &spellings[2 * i]));
        if (remote_encoded(dataset->remote))
            normalise((char *)spellings[2 * i]);
        spellings[2 * i + 1] = names[i];
    }
    qsort(spellings, count, 2 * sizeof *spellings, by_spelling);
    for (size_t i = 1; i < count; i++)
        if (strcmp(spellings[2 * i - 2], spellings[2 * i]) == 0)
            return paths_refuse_twice(spellings[2 * i - 1], spellings[2 * i + 1]);
    return STATUS_OK;
}

/* Refuses a list of shards that names a shard twice: its samples would have twice the weight of others.
 * `place` has the list: a folder, or a file. */
static enum status check_distinct(struct dataset *dataset, const char *place, const char *const names[],
                                  size_t count)
{
    enum status status = dataset->remote ? check_distinct_urls(dataset, names, count)
                                         : paths_check_distinct(dataset->directory, names, count);
    return status_prefix(status, "%s%s %s", OPTION_DASHES, dataset->option, place);
}

/* Scans these shards. `place` has the list of them, for messages. `wids` is the index that names them, or
 * NULL. */
static enum status scan_shards(struct dataset *dataset, const char *place, const char *const names[],
                               size_t count, const struct wids *wids)
{
    struct remote *remote = dataset->remote;
    TRY(check_distinct(dataset, place, names, count));
    TRY(shards_room(dataset, count));
    for (size_t i = 0; remote && i < count; i++)
        remote_ask_size(remote, names[i]);
    for (size_t i = 0; i < count; i++) {
        const char *digest = NULL;
        TRY(dataset_check_cancelled(dataset));
        if (remote && i + 1 < count)
            remote_ask(remote, names[i + 1]);
        if (wids && wids->shards[i].digest)
            TRY(dataset_keep_name(dataset, wids->shards[i].digest, strlen(wids->shards[i].digest), &digest));
        TRY(scan_shard(dataset, names[i], wids ? &wids->shards[i] : NULL));
        dataset->files[dataset->file_count - 1].digest = digest;
    }
    dataset->shard_first[dataset->file_count] = dataset->sample_count;
    return STATUS_OK;
}

/* ---- Shards of a wids index ---- */

static bool is_url(const char *place)
{
    return remote_is(place) && !remote_local(place);
}

/* Returns the length of the scheme and the host of a URL. */
static size_t origin_length(const char *url)
{
    const char *host = strstr(url, "://") + 3;
    return (size_t)(host - url) + strcspn(host, "/?");
}

static enum status refuse_place(const struct wids_shard *shard, const char *why)
{
    char shown[PATH_MAX];
    remote_shown(shard->url, shown, sizeof shown);
    return status_set(STATUS_FAILED, "'%.200s' %s", shown, why);
}

static enum status check_url(const struct wids_shard *shard)
{
    const char *path = shard->url + origin_length(shard->url);
    size_t length = strcspn(path, "?");
    return length > 1 && path[length - 1] != '/' ? STATUS_OK : refuse_place(shard, "names no file");
}

/* Replaces the place of a shard by the formatted text. */
__attribute__((format(printf, 2, 3))) static enum status set_place(struct wids_shard *shard,
                                                                   const char *format, ...)
{
    char *place = NULL;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&place, format, arguments);
    va_end(arguments);
    TRY(ALLOCATED(length >= 0, "out of memory"));
    free(shard->url);
    shard->url = place;
    return STATUS_OK;
}

/* Removes the query from the URLs of all shards, which must be the same. Sets `query` to it. */
static enum status take_query(struct wids *wids, char query[PATH_MAX])
{
    const char *first = wids->shards[0].url;
    snprintf(query, PATH_MAX, "%s", first + strcspn(first, "?"));
    for (size_t i = 0; i < wids->count; i++) {
        char *at = wids->shards[i].url + strcspn(wids->shards[i].url, "?");
        if (strcmp(at, query) != 0)
            return refuse_place(&wids->shards[i],
                                "has another query than the first shard, perhaps a signature of its "
                                "own: download the shards into the folder of the index");
        *at = '\0';
    }
    return STATUS_OK;
}

/* Moves the data set to the folder that all shards have in common. Their places are URLs or absolute paths,
 * and become names in that folder. */
static enum status move_to_shards(struct dataset *dataset, struct wids *wids, const char *query)
{
    const char *first = wids->shards[0].url;
    size_t common = (size_t)(strrchr(first, '/') + 1 - first);
    for (size_t i = 1; i < wids->count; i++)
        while (strncmp(wids->shards[i].url, first, common) != 0)
            for (common--; first[common - 1] != '/';) /* all begin with a slash, or with the same server */
                common--;
    free(dataset->path);
    dataset->path = strndup(common > 1 ? first : "/.", common > 1 ? common - 1 : 2);
    FREED char *url = NULL;
    TRY(DATASET_ALLOCATED(dataset->path && asprintf(&url, "%.*s%s", (int)common, first, query) >= 0));
    for (size_t i = 0; i < wids->count; i++)
        memmove(wids->shards[i].url, wids->shards[i].url + common, strlen(wids->shards[i].url + common) + 1);
    remote_close(dataset->remote);
    dataset->remote = NULL;
    if (dataset->directory >= 0)
        close(dataset->directory);
    dataset->directory = -1;
    if (is_url(url)) {
        struct remote_options options = *dataset->options;
        options.unlisted = true;
        return remote_open(url, &options, &dataset->remote);
    }
    dataset->directory = open(dataset->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return dataset->directory >= 0 ? STATUS_OK
                                   : status_set(STATUS_FAILED, "%s: %s", dataset->path, strerror(errno));
}

/* Finds the shards of an index that is itself at a URL: in its folder, or on the same server. Such an index
 * must not make this program read local files or connect to other servers. */
static enum status place_remote(struct dataset *dataset, struct wids *wids)
{
    size_t origin = origin_length(dataset->path), absolute = 0;
    const char *own_query = dataset->url + strcspn(dataset->url, "?");
    char query[PATH_MAX];
    for (size_t i = 0; i < wids->count; i++) {
        struct wids_shard *shard = &wids->shards[i];
        bool url = is_url(shard->url);
        if (url)
            TRY(check_url(shard));
        if (url && (origin_length(shard->url) != origin || strncmp(shard->url, dataset->path, origin) != 0))
            return refuse_place(shard, "is on another server than the index, which is refused; copy the "
                                       "index to this machine if you trust it");
        if (!url && (shard->url[0] == '/' || strncmp(shard->url, "file:", 5) == 0 || climbs(shard->url)))
            return refuse_place(shard, "is outside the folder of the index, which is at a URL");
        absolute += url;
    }
    for (size_t i = 0; absolute && i < wids->count; i++) {
        struct wids_shard *shard = &wids->shards[i];
        if (!is_url(shard->url))
            TRY(set_place(shard, "%s/%s%s", dataset->path, shard->url, own_query));
        else if (!strchr(shard->url, '?'))
            TRY(set_place(shard, "%s%s", shard->url, own_query));
    }
    if (!absolute)
        return STATUS_OK;
    TRY(take_query(wids, query));
    return move_to_shards(dataset, wids, query);
}

/* Replaces URLs by the names of files in the folder of the index, if these have been downloaded. Sets `*urls`
 * to the number of URLs that are left: all or none. */
static enum status find_copies(const struct dataset *dataset, struct wids *wids, size_t *urls)
{
    const struct wids_shard *missing = NULL;
    size_t copies = 0;
    *urls = 0;
    for (int replace = 0; replace < 2; replace++)
        for (size_t i = 0; i < wids->count; i++) {
            struct wids_shard *shard = &wids->shards[i];
            if (!is_url(shard->url))
                continue;
            char leaf[PATH_MAX];
            TRY(check_url(shard));
            const char *path = shard->url + origin_length(shard->url);
            snprintf(leaf, sizeof leaf, "%.*s", (int)strcspn(path, "?"), path);
            char *name = strrchr(leaf, '/') + 1;
            normalise(name);
            bool there = *name && faccessat(dataset->directory, name, F_OK, 0) == 0;
            *urls += !replace && !there;
            copies += !replace && there;
            if (!there)
                missing = shard;
            else if (replace)
                TRY(set_place(shard, "%s", name));
        }
    return *urls == 0 || copies == 0 ? STATUS_OK
                                     : refuse_place(missing, "is not in the folder of the index, but other "
                                                             "shards of the index are; download it, too");
}

/* Finds the shards of an index on this machine: paths, which may be outside of its folder, and URLs. */
static enum status place_local(struct dataset *dataset, struct wids *wids)
{
    char folder[PATH_MAX], query[PATH_MAX];
    size_t urls, outside = 0;
    TRY(find_copies(dataset, wids, &urls));
    for (size_t i = 0; i < wids->count; i++) {
        struct wids_shard *shard = &wids->shards[i];
        if (strncmp(shard->url, "file:", 5) == 0)
            TRY(set_place(shard, "%s", shard->url + (remote_local(shard->url) ? 7 : 5)));
        outside += shard->url[0] == '/' || climbs(shard->url);
        if (urls && !is_url(shard->url))
            return refuse_place(shard,
                                "is a path, but other shards of the index have URLs; use one or the other");
        if (urls && (origin_length(shard->url) != origin_length(wids->shards[0].url) ||
                     strncmp(shard->url, wids->shards[0].url, origin_length(shard->url)) != 0))
            return refuse_place(shard, "is on another server than the first shard; download the shards into "
                                       "the folder of the index");
    }
    if (urls) {
        TRY(take_query(wids, query));
        return move_to_shards(dataset, wids, query);
    }
    if (!outside)
        return STATUS_OK;
    if (!realpath(dataset->path, folder))
        return status_set(STATUS_FAILED, "%s: %s", dataset->path, strerror(errno));
    for (size_t i = 0; i < wids->count; i++)
        if (wids->shards[i].url[0] != '/')
            TRY(set_place(&wids->shards[i], "%s/%s", folder, wids->shards[i].url));
    return move_to_shards(dataset, wids, "");
}

/* Reads a whole index file into `*text`, from malloc. Sets `path` to its path, for messages. */
static enum status read_index_text(const struct dataset *dataset, const char *name, char path[2 * PATH_MAX],
                                   char **text, size_t *size)
{
    snprintf(path, 2 * PATH_MAX, "%s/%s", dataset->path, name);
    if (!dataset->remote)
        return file_read(path, text, size);
    TRY(remote_text(dataset->remote, name, INDEX_BYTES_MAX, text, size));
    enum status status = file_refuse_pointer(*text, *size);
    if (status == STATUS_OK)
        return STATUS_OK;
    free(*text);
    return status_prefix(status, "%s", path);
}

static enum status open_shards(struct dataset *dataset, struct dataset_names *names, const char *shard)
{
    if (names->folder && dataset_warns(dataset))
        status_warn("%s: only its shards are read, not its folders, such as %s; if the folders are classes, "
                    "move the .tar files elsewhere, such as %s",
                    dataset->path, names->folder, shard);
    keep_shards(dataset, names, shard);
    return scan_shards(dataset, dataset->path, names->items, names->count, NULL);
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
    TRY(status_prefix(status, "%s", path));
    if (wids.count > 0) {
        status = (dataset->remote ? place_remote : place_local)(dataset, &wids);
        TRY(status_prefix(status, "%s", path));
    }
    FREED const char **names = calloc(wids.count + 1, sizeof *names);
    TRY(DATASET_ALLOCATED(names));
    for (size_t i = 0; i < wids.count; i++)
        TRY(dataset_keep_name(dataset, wids.shards[i].url, strlen(wids.shards[i].url), &names[i]));
    return scan_shards(dataset, path, names, wids.count, &wids);
}

/* Implements exists() of mds_parse(). At a URL, only compressed shards are there. */
static bool has_file(void *context, const char *name)
{
    const struct dataset *dataset = context;
    return !dataset->remote && faccessat(dataset->directory, name, F_OK, 0) == 0;
}

/* Adds the samples of an MDS set. Sets `*found` to false if the index is one of another program. Not inlined:
 * small stacks must suffice for other sets. */
static __attribute__((noinline)) enum status open_mds(struct dataset *dataset, bool *found)
{
    char path[2 * PATH_MAX], *text;
    size_t size;
    struct mds *mds = dataset->columns = calloc(1, sizeof *mds);
    TRY(DATASET_ALLOCATED(mds));
    if (dataset->options->prepare) /* libcrypto computes most digests */
        TRY(dataset->options->prepare(NULL));
    TRY(read_index_text(dataset, MDS_INDEX, path, &text, &size));
    enum status status = mds_parse(text, size, has_file, dataset, mds, found);
    free(text);
    if (status == STATUS_OK && *found)
        status = mds_choose(mds, &dataset->choice);
    TRY(status_prefix(status, "%s", path));
    if (!*found) {
        free(mds);
        dataset->columns = NULL;
        return STATUS_OK;
    }
    FREED const char **names = calloc(mds->list.count + 1, sizeof *names);
    TRY(DATASET_ALLOCATED(names));
    for (size_t i = 0; i < mds->list.count; i++)
        names[i] = mds->list.shards[i].url;
    TRY(scan_shards(dataset, path, names, mds->list.count, &mds->list));
    dataset->raw = mds->raw;
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
            const int used = snprintf(path, sizeof path, "%s%s", here ? "" : index->units[sample->unit].name,
                                      here ? "" : "/");
            if (used < PATH_MAX)
                index_member_path(index->layout, sample->key, from->extension, path + used,
                                  sizeof path - (size_t)used);
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

/* Checks that a shard exists and has the size that the index gives. */
static enum status check_shard(struct dataset *dataset, uint32_t file)
{
    const struct dataset_file *shard = &dataset->files[file];
    uint64_t bytes;
    TRY(shard_size(dataset, shard, &bytes));
    if (bytes == shard->bytes)
        return STATUS_OK;
    char begin[OTHER_BEGIN_BYTES];
    ssize_t count = 0;
    int fd;
    if (bytes < OTHER_BYTES_MAX && dataset_file_open(dataset, file, 0, &fd) == STATUS_OK) {
        count = pread(fd, begin, sizeof begin, 0);
        dataset_file_close(dataset, fd);
    }
    if (count > 0 && (file_refuse_pointer(begin, (size_t)count) != STATUS_OK ||
                      tar_refuse_other(begin, (size_t)count) != STATUS_OK))
        return status_prefix(STATUS_FAILED, "%s/%s", dataset->path, shard->name);
    return status_set(STATUS_FAILED, "%s/%s: offset %llu: the shard has %llu bytes but its index says %llu",
                      dataset->path, shard->name,
                      (unsigned long long)(bytes < shard->bytes ? bytes : shard->bytes),
                      (unsigned long long)bytes, (unsigned long long)shard->bytes);
}

/* Returns whether more than one header block precedes the first member. The extra bytes may be a pax header
 * for all members. */
static bool begins_extended(const struct index *index, const struct index_unit *unit)
{
    return unit->count > 0 && index->members[index->samples[unit->first].first].offset > TAR_BLOCK_BYTES;
}

static enum status refuse_files(const struct dataset *dataset)
{
    return status_set(STATUS_USAGE, "%s%s %s: only tar shards can be read from a URL, not single files",
                      OPTION_DASHES, dataset->option, dataset->path);
}

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
    TRY(status_prefix(status, "%s", path));
    if (dataset->remote && index->layout != INDEX_SHARDS)
        return refuse_files(dataset);
    dataset->indexed = true;
    if (index->layout == INDEX_SHARDS) {
        FREED const char **names = calloc(index->unit_count + 1, sizeof *names);
        TRY(DATASET_ALLOCATED(names));
        for (uint64_t p = 0; p < index->unit_count; p++)
            names[p] = index->units[p].name;
        TRY(check_distinct(dataset, dataset->path, names, index->unit_count));
        TRY(shards_room(dataset, index->unit_count));
    }
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

/* ---- What the folder holds ---- */

/* Sets `*found` to the name that has this ending, or NULL if there is none. STATUS_USAGE if there are two. */
static enum status find_one(const struct dataset *dataset, const struct dataset_names *names, const char *end,
                            const char *remedy, const char **found)
{
    *found = NULL;
    for (uint32_t i = 0; i < names->count; i++) {
        if (!text_ends_in(names->items[i], end))
            continue;
        if (*found)
            return status_set(STATUS_USAGE, "%s%s %s: the folder contains both %s and %s; %s", OPTION_DASHES,
                              dataset->option, dataset->path, *found, names->items[i], remedy);
        *found = names->items[i];
    }
    return STATUS_OK;
}

/* Returns the name of the first shard, or NULL. In a folder with class folders, an archive is a left-over if
 * it cannot be read. */
static const char *first_shard(const struct dataset *dataset, const struct dataset_names *names)
{
    for (uint32_t i = 0; i < names->count; i++)
        if (text_ends_in(names->items[i], ".tar"))
            return names->items[i];
    return dataset->options->cache_dir || !names->folder ? first_packed(names) : NULL;
}

static bool has_name(const struct dataset_names *names, const char *name)
{
    for (uint32_t i = 0; i < names->count; i++)
        if (strcmp(names->items[i], name) == 0)
            return true;
    return false;
}

/* Warns of shards and images that were added to a prepared set, because they are not read. Counts the images
 * in class folders without their names, which is far less work than to open each indexed image. */
static void warn_of_added(struct dataset *dataset, const struct dataset_names *names, const char *index)
{
    uint64_t added = 0, listed = 0;
    for (uint64_t i = 0; dataset->shards && i < dataset->index.unit_count; i++)
        listed += text_ends_in(dataset->index.units[i].name, ".tar");
    for (uint32_t i = 0; i < names->count; i++)
        added += dataset->shards ? text_ends_in(names->items[i], ".tar")
                                 : dataset_is_image(dataset, names->items[i]);
    if (dataset->index.layout == INDEX_IMAGEFOLDER) {
        added += dataset_count_images(dataset);
        listed = dataset->file_count;
    }
    if (added > listed && dataset->choice.image.preset && !dataset->choice.only.count &&
        dataset_warns(dataset))
        status_warn("%s: files that are not in %s are not read (%s that were added: %llu); prepare the data "
                    "set again, or remove %s to read the files without it",
                    dataset->path, index, dataset->shards ? "shards" : "images",
                    (unsigned long long)(added - listed), index);
}

/* Returns whether classes.txt is in the folder, also if dataset->shard is the only file to read. */
static bool has_classes(const struct dataset *dataset, const struct dataset_names *names)
{
    return dataset->shard && !dataset->remote ? faccessat(dataset->directory, CLASSES_NAME, F_OK, 0) == 0
                                              : has_name(names, CLASSES_NAME);
}

/* Finds out what kind of data set the folder is, and lists the samples. */
static enum status open_listed(struct dataset *dataset, struct dataset_names *names)
{
    const char *index, *wids, *shard = first_shard(dataset, names);
    TRY(find_one(dataset, names, ".index", "keep each data set in its own folder", &index));
    if (index) {
        TRY(open_indexed(dataset, index));
        if (has_name(names, CLASSES_NAME))
            TRY(read_classes(dataset));
        if (!dataset->remote)
            warn_of_added(dataset, names, index);
        return STATUS_OK;
    }
    if (!dataset->remote && faccessat(dataset->directory, ".prepare", F_OK, 0) == 0)
        return status_set(STATUS_USAGE,
                          "%s is incomplete: %s was interrupted; repeat that command to continue",
                          dataset->path, OPTION_OR_FIELD("its --prepare", "the command that prepares it"));
    TRY(find_one(dataset, names, ".wids.json", "name one of them in place of the folder", &wids));
    const char *mds = first_mds(names);
    bool found = false;
    if (has_name(names, MDS_INDEX) && !wids && (!shard || mds))
        TRY(open_mds(dataset, &found));
    if (found)
        return STATUS_OK;
    if (mds || (!wids && !shard && has_name(names, MDS_INDEX) && (dataset->shard || dataset->remote)))
        return status_set(STATUS_USAGE, "%s%s %s: the folder has no " MDS_INDEX " of an MDS set%s%s; add it",
                          OPTION_DASHES, dataset->option, dataset->path, mds ? ", but shards, such as " : "",
                          mds ? mds : "");
    if (!wids && !shard)
        return dataset->remote ? refuse_files(dataset) : dataset_open_files(dataset);
    if (has_classes(dataset, names))
        TRY(read_classes(dataset)); /* first, because a wids index may name shards in another folder */
    return wids ? open_wids(dataset, wids) : open_shards(dataset, names, shard);
}

enum status dataset_list_samples(struct dataset *dataset)
{
    struct dataset_names names = {0};
    enum status status = dataset_list(dataset, false, &names);
    if (status == STATUS_OK && names.count)
        qsort(names.items, names.count, sizeof *names.items, text_compare);
    if (status == STATUS_OK)
        status = open_listed(dataset, &names);
    free(names.items);
    return status;
}
