#include "data/dataset_open.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/class_folders.h"
#include "data/dataset_parts.h"
#include "data/label.h"
#include "data/md5.h"
#include "data/paths.h"
#include "data/plain.h"
#include "data/remote.h"

#define INDEX_BYTES_MAX   ((uint64_t)4 << 30) /* largest index that is read from a URL */
#define OTHER_BYTES_MAX   ((uint64_t)1 << 20) /* a smaller file may be a Git LFS pointer or an HTML page */
#define OTHER_BEGIN_BYTES 64                  /* enough to recognise it */

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
    if (!spellings)
        return dataset_out_of_memory();
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
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "--data %s", place);
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
        const char *md5 = NULL;
        if (remote && i + 1 < count)
            remote_ask(remote, names[i + 1]);
        if (wids && *wids->shards[i].md5)
            TRY(dataset_keep_name(dataset, wids->shards[i].md5, strlen(wids->shards[i].md5), &md5));
        TRY(dataset_scan_shard(dataset, names[i], wids ? &wids->shards[i] : NULL));
        dataset->files[dataset->file_count - 1].md5 = md5;
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
    if (!dataset->path || asprintf(&url, "%.*s%s", (int)common, first, query) < 0)
        return dataset_out_of_memory();
    for (size_t i = 0; i < wids->count; i++)
        memmove(wids->shards[i].url, wids->shards[i].url + common, strlen(wids->shards[i].url + common) + 1);
    remote_close(dataset->remote);
    dataset->remote = NULL;
    if (dataset->directory >= 0)
        close(dataset->directory);
    dataset->directory = -1;
    if (is_url(url)) {
        struct remote_options options = dataset->options ? *dataset->options : (struct remote_options){0};
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
            return refuse_place(shard,
                                "is on another server than the index, which is refused; copy the index to "
                                "this machine if you trust it");
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
    return *urls == 0 || copies == 0
               ? STATUS_OK
               : refuse_place(missing,
                              "is not in the folder of the index, but other shards of the index are; "
                              "download it, too");
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
            return refuse_place(shard,
                                "is on another server than the first shard; download the shards into the "
                                "folder of the index");
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
    keep_shards(names);
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
    if (status != STATUS_OK)
        return status_prefix(status, "%s", path);
    if (wids.count > 0) {
        status = (dataset->remote ? place_remote : place_local)(dataset, &wids);
        if (status != STATUS_OK)
            return status_prefix(status, "%s", path);
    }
    FREED const char **names = calloc(wids.count + 1, sizeof *names);
    if (!names)
        return dataset_out_of_memory();
    for (size_t i = 0; i < wids.count; i++)
        TRY(dataset_keep_name(dataset, wids.shards[i].url, strlen(wids.shards[i].url), &names[i]));
    return scan_shards(dataset, path, names, wids.count, &wids);
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
    if (index->layout == INDEX_SHARDS) {
        FREED const char **names = calloc(index->unit_count + 1, sizeof *names);
        if (!names)
            return dataset_out_of_memory();
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

/* The samples whose classes are known. */
struct candidates {
    struct dataset_candidate *items; /* room for all samples; NULL: no sample is held out */
    uint32_t count;
};

/* Hashes the key of a sample without its class folder and its extension. So the name of the folder does not
 * matter, and --prepare --store imagefolder and shards have the same hashes. */
static uint64_t hash_key(const struct dataset_sample *sample)
{
    const char *slash = strchr(sample->key, '/');
    const char *name = sample->class_folder != LABEL_NONE && slash ? slash + 1 : sample->key;
    const char *last = strrchr(name, '/'), *dot = strrchr(last ? last : name, '.');
    return checksum_key(name, dot ? (size_t)(dot - name) : strlen(name));
}

/* Adds a sample, after dataset_choose(). If its label cannot be read, leaves it out: a reader of the sample
 * reports that. */
static void add_candidate(struct candidates *candidates, struct plain *plain,
                          const struct dataset_sample *sample)
{
    int32_t label;
    if (candidates->items && plain_label(plain, sample, 0, &label) == STATUS_OK)
        candidates->items[candidates->count++] =
            (struct dataset_candidate){label, sample->number, hash_key(sample)};
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
        for (; dataset->shards && shard < dataset->file_count && dataset->shard_first[shard] == i; shard++)
            ask_shards(dataset, shard, &next);
        if (dataset_choose(dataset, &dataset->samples[i]) == STATUS_OK)
            add_candidate(candidates, &plain, &dataset->samples[i]);
    }
    plain_close(&plain);
}

/* Chooses the members of every sample, reads their edges or all their bytes, and removes skipped samples from
 * the list. Adds the samples to `candidates`, also those that it skips. */
static enum status read_all_samples(struct dataset *dataset, bool whole, struct candidates *candidates)
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
        if (!is_wanted(dataset, sample))
            continue;
        bool said = closed && dataset->members[sample->member].file == plain.file;
        status = dataset_choose(dataset, sample);
        const bool chosen = status == STATUS_OK;
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
            if (status == STATUS_OK && chosen && !(closed && dataset->shards))
                add_candidate(candidates, &plain, sample);
            continue;
        }
        add_candidate(candidates, &plain, sample);
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

/* Compares a shard's md5 with the md5 in the wids index, if this build has libcrypto. A mismatch does not
 * tell which sample changed, so it is a failure even if dataset->skip is set. */
static enum status check_md5(const struct dataset *dataset, uint32_t file)
{
    const struct dataset_file *shard = &dataset->files[file];
    int fd;
    enum status status = dataset_file_open(dataset, file, 0, &fd);
    if (status != STATUS_OK) /* read_all_samples() skips and counts the shard's samples */
        return dataset->skip && status == STATUS_FAILED ? STATUS_OK : status;
    status = md5_check_file(fd, shard->md5);
    dataset_file_close(dataset, fd);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s/%s", dataset->path, shard->name);
}

enum status dataset_hash(struct dataset *dataset)
{
    if (dataset->hashed)
        return STATUS_OK;
    for (uint32_t f = 0; f < dataset->file_count; f++)
        if (dataset->files[f].md5)
            TRY(check_md5(dataset, f));
    return read_all_samples(dataset, true, &(struct candidates){0});
}

/* ---- Opening ---- */

/* Sets `*found` to the name that has this ending, or NULL if there is none. STATUS_USAGE if there are two. */
static enum status find_one(const struct dataset *dataset, const struct dataset_names *names, const char *end,
                            const char *remedy, const char **found)
{
    *found = NULL;
    for (uint32_t i = 0; i < names->count; i++) {
        if (!text_ends_in(names->items[i], end))
            continue;
        if (*found)
            return status_set(STATUS_USAGE, "--data %s: the folder contains both %s and %s; %s",
                              dataset->path, *found, names->items[i], remedy);
        *found = names->items[i];
    }
    return STATUS_OK;
}

/* Returns the name of the first shard, or NULL. */
static const char *first_shard(const struct dataset_names *names)
{
    for (uint32_t i = 0; i < names->count; i++)
        if (text_ends_in(names->items[i], ".tar"))
            return names->items[i];
    return NULL;
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
        listed = dataset->sample_count;
    }
    if (added > listed && dataset->choice.image.preset && !dataset->choice.only.count &&
        dataset_warns(dataset))
        status_warn(
            "%s: files that are not in %s are not read (%s that were added: %llu); prepare the data set "
            "again, or remove %s to read the files without it",
            dataset->path, index, dataset->shards ? "shards" : "images", (unsigned long long)(added - listed),
            index);
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
    const char *index, *wids, *shard = first_shard(names);
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
                          "%s is incomplete: its --prepare was interrupted; repeat that command to continue",
                          dataset->path);
    TRY(find_one(dataset, names, ".wids.json", "name one of them in place of the folder", &wids));
    if (!wids && !shard)
        return dataset->remote ? refuse_files(dataset) : dataset_open_files(dataset);
    if (has_classes(dataset, names))
        TRY(read_classes(dataset)); /* first, because a wids index may name shards in another folder */
    return wids ? open_wids(dataset, wids) : open_shards(dataset, names, shard);
}

static enum status list_samples(struct dataset *dataset)
{
    struct dataset_names names = {0};
    enum status status = dataset_list(dataset, false, &names);
    if (status == STATUS_OK && names.count)
        qsort(names.items, names.count, sizeof *names.items, by_text);
    if (status == STATUS_OK)
        status = open_listed(dataset, &names);
    free(names.items);
    return status;
}

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
    if (errno == ENOTDIR &&
        (text_ends_in(dataset->path, ".tar") || text_ends_in(dataset->path, ".wids.json")))
        return open_shard_alone(dataset);
    return status_set(
        STATUS_USAGE, "--data %s: %s%s", path, strerror(errno),
        errno == ENOTDIR ? "; name a folder, a shard (.tar) or a list of shards (.wids.json)"
        : errno == ENOENT && strpbrk(path, "{*?[")
            ? "; patterns are only for URLs, as in https://HOST/PATH/{000..003}.tar: here, name "
              "the folder, whose shards are all read"
            : "");
}

enum status dataset_find(const char *path, bool skip, bool compare, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset)
{
    *dataset = (struct dataset){.path = strdup(path),
                                .directory = -1,
                                .skip = skip,
                                .compare = compare,
                                .options = options,
                                .url = path};
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
        "images, or copy the data set with --prepare --store shards, which keeps the numbers of the classes; "
        "to remove the folder would give the following classes smaller numbers",
        dataset->path, dataset->empty_class, dataset->empty_classes, dataset->empty_classes == 1 ? "" : "s");
    if (!dataset->skip)
        return status;
    status_warn("%s", status_text());
    return STATUS_OK;
}

/* Reads the samples, and chooses those that are held out. With dataset->only_held, chooses them first. */
static enum status read_and_hold_out(struct dataset *dataset)
{
    FREED struct dataset_candidate *items = NULL;
    const bool holds = dataset->test_share > 0;
    if (holds && !(items = calloc((size_t)dataset->sample_count + 1, sizeof *items)))
        return dataset_out_of_memory();
    struct candidates all = {items, 0}, none = {NULL, 0};
    if (holds && dataset->only_held) {
        find_candidates(dataset, &all);
        TRY(dataset_hold_out(dataset, items, all.count));
    }
    TRY(read_all_samples(dataset, dataset->skip && dataset->indexed, dataset->only_held ? &none : &all));
    return holds && !dataset->only_held ? dataset_hold_out(dataset, items, all.count) : STATUS_OK;
}

enum status dataset_check(const char *url, struct dataset *dataset)
{
    char path[PATH_MAX]; /* without secrets */
    remote_shown(url, path, sizeof path);
    TRY(check_empty_classes(dataset));
    TRY(read_and_hold_out(dataset));
    if (!dataset->shards)
        dataset_drop_files(dataset);
    if (dataset->faults > DATASET_WARNINGS_MAX)
        status_warn("%s: %llu more faults like these; %llu samples skipped in total%s", path,
                    (unsigned long long)(dataset->faults - DATASET_WARNINGS_MAX),
                    (unsigned long long)dataset->skipped,
                    dataset->uncounted ? ", and an unknown number more" : "");
    if (dataset->sample_count == 0 && (dataset->only_held || dataset->wanted) &&
        (dataset->listed > 0 || dataset->uncounted))
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
    TRY(dataset_find(path, skip, false, choice, options, dataset));
    return dataset_check(path, dataset);
}

/* ---- The classes of two data sets ---- */

const char *const *dataset_class_names(const struct dataset *dataset, uint32_t *count)
{
    const struct member_rule *rule = dataset->sample_count ? dataset->samples[0].rule : NULL;
    bool folder = rule && rule->folder, cls = rule && strcasecmp(rule->extension, "cls") == 0;
    bool listed = dataset->class_names && dataset->class_name_count >= dataset->class_count;
    *count = folder || cls ? (listed ? dataset->class_name_count : dataset->class_count) : 0;
    return *count == 0 ? NULL : (const char *const *)(listed ? dataset->class_names : dataset->classes);
}

/* Does the same as dataset_class_names(), before dataset_check(). */
static const char *const *find_class_names(struct dataset *dataset, uint32_t *count)
{
    bool known = dataset->sample_count && (dataset->classes || dataset->class_names) &&
                 dataset_choose(dataset, dataset->samples) == STATUS_OK;
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
            return status_set(
                STATUS_USAGE,
                "class %u is '%s' in %s, but '%s' in %s; labels are the numbers of the classes, "
                "so prepare both from folders with the same classes",
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
