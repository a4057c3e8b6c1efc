#include "data/prepare.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/text.h"
#include "data/checksum.h"
#include "data/tar.h"

#define BUFFER_BYTES (1 << 20)

#define KEY_MAX      (NAME_MAX + 32)
#define WORK         "/.prepare"

/* ---- Writing a unit ---- */

/* Formats the key of a sample: its number in decimal with leading zeros. With INDEX_IMAGEFOLDER, its class
 * folder comes first, and the sample can have a name in place of the number. */
static void make_key(char key[KEY_MAX], const struct unit_writer *writer, uint64_t number,
                     const struct source_sample *sample)
{
    int used = 0;
    if (writer->layout == INDEX_IMAGEFOLDER)
        used = snprintf(key, KEY_MAX, "%.*s/", NAME_MAX, writer->class_folders[sample->class_folder]);
    if (writer->layout == INDEX_IMAGEFOLDER && sample->name[0])
        snprintf(key + used, (size_t)(KEY_MAX - used), "%s", sample->name);
    else
        snprintf(key + used, (size_t)(KEY_MAX - used), "%0*" PRIu64, writer->key_digits, number);
}

enum status unit_path(char path[PATH_MAX], const char *folder, const char *name)
{
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX
               ? STATUS_OK
               : status_set(STATUS_USAGE, "the path '%.80s...' is too long", folder);
}

/* ---- Starting ---- */

/* Returns whether a name is a temporary name of file_begin(), which ends in ".PID-N.tmp". */
static bool is_temporary(const char *name)
{
    size_t length = strlen(name);
    if (length < 8 || strcmp(name + length - 4, ".tmp") != 0)
        return false;
    const char *dot = memrchr(name, '.', length - 4);
    unsigned pid, number;
    int used = 0;
    return dot && sscanf(dot, ".%u-%u.tmp%n", &pid, &number, &used) == 2 && dot[used] == '\0' && used > 0;
}

/* Removes temporary files of killed runs from a folder. */
static void unit_sweep(const char *folder)
{
    DIR *list = opendir(folder);
    for (struct dirent *entry; list && (entry = readdir(list));)
        if (is_temporary(entry->d_name))
            unlinkat(dirfd(list), entry->d_name, 0);
    if (list)
        closedir(list);
}

static enum status begin_folder(const char *path)
{
    if (mkdir(path, 0777) != 0 && errno != EEXIST)
        return status_set(STATUS_FAILED, "cannot create folder '%s': %s", path, strerror(errno));
    unit_sweep(path);
    return STATUS_OK;
}

enum status unit_begin(struct unit_writer *writer, enum index_layout layout, const char *folder,
                       const char *name, int key_digits, const char *const *class_folders)
{
    char path[PATH_MAX];
    *writer = (struct unit_writer){.layout = layout,
                                   .folder = folder,
                                   .name = name,
                                   .key_digits = key_digits,
                                   .class_folders = class_folders,
                                   .file = {.fd = -1}};
    writer->lines = open_memstream(&writer->lines_text, &writer->lines_size);
    writer->dali = open_memstream(&writer->dali_text, &writer->dali_size);
    writer->buffer = malloc(BUFFER_BYTES);
    TRY(ALLOCATED(writer->lines && writer->dali && writer->buffer, "out of memory"));
    TRY(unit_path(path, folder, name));
    TRY(md5_begin(&writer->md5));
    return layout == INDEX_SHARDS ? file_begin(&writer->file, path) : begin_folder(path);
}

/* ---- Shards ---- */

static enum status flush(struct unit_writer *writer)
{
    TRY(md5_add(writer->md5, writer->buffer, writer->buffered));
    size_t count = writer->buffered;
    writer->buffered = 0;
    return file_add(&writer->file, writer->buffer, count);
}

/* Appends `count` bytes to the shard. If `bytes` is NULL, the bytes are zeros. */
static enum status add_bytes(struct unit_writer *writer, const uint8_t *bytes, size_t count)
{
    writer->bytes += count;
    while (count > 0) {
        size_t room = BUFFER_BYTES - writer->buffered, part = count < room ? count : room;
        if (bytes)
            memcpy(writer->buffer + writer->buffered, bytes, part);
        else
            memset(writer->buffer + writer->buffered, 0, part);
        writer->buffered += part;
        bytes = bytes ? bytes + part : NULL;
        count -= part;
        if (writer->buffered == BUFFER_BYTES)
            TRY(flush(writer));
    }
    return STATUS_OK;
}

static enum status add_to_shard(struct unit_writer *writer, const char *key,
                                const struct source_member *member, struct index_member *entry)
{
    uint8_t headers[TAR_HEADERS_MAX];
    size_t count;
    char name[TAR_NAME_MAX +
              2]; /* a name that is too long stays too long after truncation, so tar_headers() refuses it */
    snprintf(name, sizeof name, "%s.%s", key, member->extension);
    TRY(tar_headers(headers, name, member->size, &count));
    TRY(add_bytes(writer, headers, count));
    entry->offset = writer->bytes;
    TRY(add_bytes(writer, member->bytes, member->size));
    return add_bytes(writer, NULL, tar_padding(member->size));
}

/* ---- Files ---- */

static enum status write_file(const struct unit_writer *writer, const char *key,
                              const struct source_member *member)
{
    char path[PATH_MAX];
    const int used = snprintf(path, sizeof path, "%s/%s/", writer->folder, writer->name);
    if (used >= PATH_MAX || used + index_member_path(writer->layout, key, member->extension, path + used,
                                                     sizeof path - (size_t)used) >=
                                PATH_MAX)
        return status_set(STATUS_USAGE, "the path '%.80s...' is too long", writer->folder);
    return file_write_atomic(path, member->bytes, member->size);
}

static enum status write_files(const struct unit_writer *writer, uint64_t number,
                               const struct source_sample *sample)
{
    char key[KEY_MAX];
    make_key(key, writer, number, sample);
    for (size_t i = 0; i < sample->count; i++)
        TRY(write_file(writer, key, &sample->members[i]));
    return STATUS_OK;
}

/* Writes files in parallel, because each write waits for the disk. Error messages are per thread. After a
 * failure, the calling thread therefore writes the samples again, to set its own message. */
static enum status write_all_files(const struct unit_writer *writer, uint64_t first, uint64_t count,
                                   const struct source_sample *samples)
{
    bool failed = false;
#pragma omp parallel for schedule(dynamic) num_threads(16)
    for (uint64_t i = 0; i < count; i++)
        if (write_files(writer, first + i, &samples[i]) != STATUS_OK)
#pragma omp atomic write
            failed = true;
    for (uint64_t i = 0; failed && i < count; i++)
        TRY(write_files(writer, first + i, &samples[i]));
    return STATUS_OK;
}

/* ---- Shards and files ---- */

static enum status add_sample(struct unit_writer *writer, uint64_t number, const struct source_sample *sample)
{
    struct index_member entries[SOURCE_MEMBERS_MAX];
    char key[KEY_MAX];
    make_key(key, writer, number, sample);
    for (size_t i = 0; i < sample->count; i++) {
        const struct source_member *member = &sample->members[i];
        entries[i] = (struct index_member){.extension = member->extension,
                                           .size = member->size,
                                           .hash = checksum_whole(member->bytes, member->size)};
        if (writer->layout != INDEX_SHARDS)
            writer->bytes += member->size;
        else
            TRY(add_to_shard(writer, key, member, &entries[i]));
    }
    if (writer->layout == INDEX_SHARDS)
        TRY(dali_add_sample(writer->dali, key, entries, sample->count));
    TRY(index_text_add_sample(writer->lines, key, entries, sample->count));
    writer->samples++;
    return STATUS_OK;
}

enum status unit_add(struct unit_writer *writer, uint64_t first, uint64_t count,
                     const struct source_sample *samples)
{
    if (writer->layout != INDEX_SHARDS)
        TRY(write_all_files(writer, first, count, samples));
    for (uint64_t i = 0; i < count; i++)
        TRY(add_sample(writer, first + i, &samples[i]));
    return STATUS_OK;
}

/* ---- Ending ---- */

/* Closes a memory stream and checks that no text was lost. */
static enum status end_text(FILE **stream)
{
    bool whole = text_close(*stream);
    *stream = NULL;
    return ALLOCATED(whole, "out of memory for an index");
}

/* Writes the shard's DALI index: "x.idx" for "x.tar". */
static enum status write_dali(struct unit_writer *writer)
{
    char path[PATH_MAX];
    FREED char *text = NULL;
    size_t size = 0;
    TRY(end_text(&writer->dali));
    TRY(unit_path(path, writer->folder, writer->name));
    strcpy(strrchr(path, '.'), ".idx");
    FILE *stream = open_memstream(&text, &size);
    TRY(ALLOCATED(stream, "out of memory"));
    fprintf(stream, DALI_HEAD "%s", writer->samples, writer->dali_text);
    TRY(end_text(&stream));
    return file_write_atomic(path, text, size);
}

static enum status write_part(struct unit_writer *writer, const char *provenance, const char *md5,
                              const char *part_path)
{
    const struct index_unit unit = {.name = writer->name, .bytes = writer->bytes, .md5 = md5};
    TRY(end_text(&writer->lines));
    CLOSED_BY(index_text_free) struct index_text text;
    TRY(index_text_begin(&text, writer->layout, provenance));
    index_text_add_unit(&text, &unit);
    fputs(writer->lines_text, text.stream);
    TRY(index_text_end(&text));
    return file_write_atomic(part_path, text.text, text.size);
}

enum status unit_end(struct unit_writer *writer, const char *provenance, const char *part_path)
{
    char md5[33] = "";
    if (writer->layout == INDEX_SHARDS) {
        TRY(add_bytes(writer, NULL, TAR_END_BYTES));
        TRY(flush(writer));
        TRY(md5_end(writer->md5, md5));
        TRY(file_complete(&writer->file));
        TRY(write_dali(writer));
        TRY(file_end(&writer->file));
    }
    return write_part(writer, provenance, md5, part_path);
}

void unit_abandon(struct unit_writer *writer)
{
    if (writer->file.target)
        file_abandon(&writer->file);
    if (writer->lines)
        fclose(writer->lines);
    if (writer->dali)
        fclose(writer->dali);
    md5_free(writer->md5);
    free(writer->lines_text);
    free(writer->dali_text);
    free(writer->buffer);
    *writer = (struct unit_writer){.file = {.fd = -1}};
}

/* ---- samples.csv ---- */

/* The contents of samples.csv, for write_columns() and write_sample(). */
struct list {
    const struct source *source;
    const void *state;
    const struct index *index;
    struct index_extensions extensions; /* one column per extension */
};

static bool has_member(const struct index *index, const struct index_sample *sample, const char *extension)
{
    for (uint64_t m = sample->first; m < sample->first + sample->count; m++)
        if (strcmp(index->members[m].extension, extension) == 0)
            return true;
    return false;
}

/* Writes one record: the key, the source's columns, the shard, and one file name per extension. The file name
 * is empty if the sample has no member with that extension. */
static void write_sample(FILE *stream, const struct list *list, uint64_t number)
{
    const struct index_sample *sample = &list->index->samples[number];
    const char *unit = list->index->units[sample->unit].name;
    bool files = list->index->layout == INDEX_FILES, shards = list->index->layout == INDEX_SHARDS;
    char texts[SOURCE_COLUMNS_MAX][SOURCE_TEXT_MAX], file[2 * PATH_MAX];
    text_csv_field(stream, sample->key);
    source_describe(list->source, list->state, number, texts);
    for (size_t i = 0; list->source->columns[i]; i++) {
        fputc(',', stream);
        text_csv_field(stream, texts[i]);
    }
    if (shards)
        fprintf(stream, ",%s", unit);
    for (size_t i = 0; i < list->extensions.count; i++) {
        const char *extension = list->extensions.names[i];
        snprintf(file, sizeof file, "%s%s%s.%s", files ? unit : "", files ? "/" : "", sample->key, extension);
        fputc(',', stream);
        if (has_member(list->index, sample, extension))
            text_csv_field(stream, file);
    }
    fputc('\n', stream);
}

static void write_columns(FILE *stream, const struct list *list)
{
    fputs("key", stream);
    for (size_t i = 0; list->source->columns[i]; i++)
        fprintf(stream, ",%s", list->source->columns[i]);
    if (list->index->layout == INDEX_SHARDS)
        fputs(",shard", stream);
    for (size_t i = 0; i < list->extensions.count; i++) {
        char column[PATH_MAX];
        snprintf(column, sizeof column, "file_%s", list->extensions.names[i]);
        fputc(',', stream);
        text_csv_field(stream, column);
    }
    fputc('\n', stream);
}

enum status samples_format(const struct source *source, const void *state, const struct index *index,
                           char **text, size_t *size)
{
    struct list list = {.source = source, .state = state, .index = index};
    *text = NULL;
    for (uint64_t m = 0; m < index->member_count; m++)
        TRY(index_extensions_add(&list.extensions, index->members[m].extension));
    FILE *stream = open_memstream(text, size);
    TRY(ALLOCATED(stream, "out of memory for " SAMPLES_NAME));
    write_columns(stream, &list);
    for (uint64_t i = 0; i < index->sample_count; i++)
        write_sample(stream, &list, i);
    return ALLOCATED(text_close(stream), "out of memory for " SAMPLES_NAME);
}

enum status samples_write(const char *folder, const struct source *source, const void *state,
                          const struct index *index)
{
    char path[PATH_MAX];
    FREED char *text = NULL;
    size_t size = 0;
    TRY(unit_path(path, folder, SAMPLES_NAME));
    TRY(samples_format(source, state, index, &text, &size));
    return file_write_atomic(path, text, size);
}

/* Returns whether samples.csv exists, has a header record and one record per sample, and ends with a newline.
 */
static bool samples_are_whole(const char *folder, const struct index *index)
{
    char path[PATH_MAX], *text = NULL;
    size_t size = 0;
    bool whole = false;
    if (unit_path(path, folder, SAMPLES_NAME) != STATUS_OK || access(path, F_OK) != 0 ||
        file_read(path, &text, &size) != STATUS_OK)
        return false;
    bool counts = text_csv_records(text, size, &whole) == index->sample_count + 1;
    free(text);
    return counts && whole;
}

/* ---- The folder ---- */

void folder_unit_name(const struct folder *folder, uint64_t unit, char name[PATH_MAX])
{
    if (folder->layout == INDEX_FILES)
        snprintf(name, PATH_MAX, "%s%0*" PRIu64, folder->above, folder->unit_count > 1000 ? 6 : 3, unit);
    else if (folder->layout == INDEX_IMAGEFOLDER)
        strcpy(name, INDEX_HERE);
    else
        snprintf(name, PATH_MAX, "%s-%06" PRIu64 ".tar", folder->name, unit);
}

/* Writes the folder's path, followed by the formatted text, to `path`. STATUS_USAGE if the result is too
 * long. */
__attribute__((format(printf, 3, 4))) static enum status inside(const struct folder *folder,
                                                                char path[PATH_MAX], const char *format, ...)
{
    va_list arguments;
    int used = snprintf(path, PATH_MAX, "%s", folder->path);
    va_start(arguments, format);
    if (used < PATH_MAX)
        used += vsnprintf(path + used, (size_t)(PATH_MAX - used), format, arguments);
    va_end(arguments);
    return used < PATH_MAX ? STATUS_OK
                           : status_set(STATUS_USAGE, "the path '%.80s...' is too long", folder->path);
}

enum status folder_part_path(const struct folder *folder, uint64_t unit, char path[PATH_MAX])
{
    return inside(folder, path, WORK "/%06" PRIu64 ".part", unit);
}

static enum status index_path(const struct folder *folder, char path[PATH_MAX])
{
    return inside(folder, path, "/%s.index", folder->name);
}

/* ---- Checks ---- */

static bool has_size(const char *path, uint64_t bytes)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size == bytes;
}

static bool file_is_whole(const struct folder *folder, const struct index_unit *unit, const char *key,
                          const struct index_member *member)
{
    char path[PATH_MAX], name[PATH_MAX];
    return index_member_path(folder->layout, key, member->extension, name, sizeof name) < PATH_MAX &&
           inside(folder, path, "/%s/%s", unit->name, name) == STATUS_OK && has_size(path, member->size);
}

/* Returns whether a file contains exactly this text. */
static bool has_text(const char *path, const char *text, size_t size)
{
    FREED char *bytes = NULL;
    size_t count = 0;
    return has_size(path, size) && file_read(path, &bytes, &count) == STATUS_OK && count == size &&
           memcmp(bytes, text, size) == 0;
}

/* Returns whether a shard and its DALI index are complete. */
static bool shard_is_whole(const struct folder *folder, const struct index *index, uint64_t number)
{
    const struct index_unit *unit = &index->units[number];
    FREED char *dali = NULL;
    char path[PATH_MAX];
    size_t size = 0;
    if (inside(folder, path, "/%s", unit->name) != STATUS_OK || !has_size(path, unit->bytes))
        return false;
    char *dot = strrchr(path, '.');
    if (dot)
        strcpy(dot, ".idx");
    return dot && dali_format(index, number, &dali, &size) == STATUS_OK && has_text(path, dali, size);
}

/* Returns whether a unit is complete: its files have the sizes that the index gives, and a shard's DALI index
 * is complete. A unit is a shard, or a folder of files. */
static bool is_whole(const struct folder *folder, const struct index *index, uint64_t number)
{
    const struct index_unit *unit = &index->units[number];
    if (index->layout == INDEX_SHARDS)
        return shard_is_whole(folder, index, number);
    for (uint64_t s = unit->first; s < unit->first + unit->count; s++) {
        const struct index_sample *sample = &index->samples[s];
        for (uint64_t m = sample->first; m < sample->first + sample->count; m++)
            if (!file_is_whole(folder, unit, sample->key, &index->members[m]))
                return false;
    }
    return true;
}

/* Returns whether the wids index is complete. Builds without jansson cannot write one and return true. */
static bool wids_is_whole(const struct folder *folder, const struct index *index)
{
    FREED char *text = NULL;
    char path[PATH_MAX];
    if (inside(folder, path, "/%s.wids.json", folder->name) != STATUS_OK)
        return false;
    enum status status = wids_format(folder->name, index, &text);
    return status == STATUS_OK ? has_text(path, text, strlen(text)) : status == STATUS_UNAVAILABLE;
}

/* Returns whether classes.txt, samples.csv and, for shards, the wids index are complete. */
static bool lists_are_whole(const struct folder *folder, const struct index *index)
{
    char path[PATH_MAX];
    if (folder->class_list && (inside(folder, path, "/" CLASSES_NAME) != STATUS_OK ||
                               !has_text(path, folder->class_list, strlen(folder->class_list))))
        return false;
    return samples_are_whole(folder->path, index) &&
           (index->layout != INDEX_SHARDS || wids_is_whole(folder, index));
}

/* Reads a unit's part of the index. Fails if the part is missing or belongs to another unit or dataset. */
static enum status read_part(const struct folder *folder, uint64_t unit, struct index *part)
{
    char path[PATH_MAX], name[PATH_MAX];
    *part = (struct index){0};
    folder_unit_name(folder, unit, name);
    TRY(folder_part_path(folder, unit, path));
    TRY(index_read(path, part));
    if (part->unit_count == 1 && part->layout == folder->layout && strcmp(part->units[0].name, name) == 0 &&
        strcmp(part->provenance, folder->provenance) == 0)
        return STATUS_OK;
    return status_set(
        STATUS_FAILED,
        "%s: part %" PRIu64
        " of the index belongs to another unit or data set; is another program using the folder?",
        folder->path, unit);
}

bool folder_finished(const struct folder *folder, uint64_t unit)
{
    CLOSED_BY(index_free) struct index part;
    return read_part(folder, unit, &part) == STATUS_OK && is_whole(folder, &part, 0);
}

/* ---- Claiming ---- */

/* Returns the length of the first word. A line of options consists of words that are separated by blanks,
 * such as "--name=value". */
static int word_length(const char *word)
{
    return (int)strcspn(word, " \n");
}

static const char *next_word(const char *word)
{
    word += word_length(word);
    return word + strspn(word, " \n");
}

/* Returns the word of `line` that sets the same option as `word`, or "". */
static const char *same_option(const char *line, const char *word)
{
    size_t length = strcspn(word, "=/ \n"); /* the name of the option, or of this program */
    while (*line && (strcspn(line, "=/ \n") != length || strncmp(line, word, length) != 0))
        line = next_word(line);
    return line;
}

/* Returns the first word of `line` that is not in `other`, or "". Ignores --samples and --shards unless
 * `derived` is set: if they are not given, they follow from the other options and the source. */
static const char *first_change(const char *line, const char *other, bool derived)
{
    for (; *line; line = next_word(line)) {
        const char *same = same_option(other, line);
        bool follows = strncmp(line, "--samples=", 10) == 0 || strncmp(line, "--shards=", 9) == 0;
        if ((derived || !follows) &&
            (word_length(same) != word_length(line) || strncmp(same, line, (size_t)word_length(line)) != 0))
            return line;
    }
    return line;
}

/* Refuses to continue a data set that was begun with other options or another source. The message names one
 * option that differs. */
static enum status refuse_options(const struct folder *folder, const char *theirs)
{
    const char *ours = folder->provenance, *now = "", *there = "";
    for (int derived = 0; derived < 2 && !*now && !*there; derived++) {
        now = first_change(ours, theirs, derived);
        there = *now ? same_option(theirs, now) : first_change(theirs, ours, derived);
    }
    if (strncmp(now, "inputs=", 7) == 0) { /* an option that is missing now may have changed the inputs */
        there = first_change(theirs, ours, false);
        now = strncmp(there, "inputs=", 7) == 0 ? there : same_option(ours, there);
    }
    if (strncmp(now, "inputs=", 7) == 0)
        return status_set(STATUS_USAGE,
                          "%.300s was prepared from other files, or its source files have changed; name "
                          "another folder, or remove this one",
                          folder->path);
    return status_set(STATUS_USAGE,
                      "%.300s was prepared with other options (%.*s there, %.*s now); name another folder, "
                      "or remove this one",
                      folder->path, *there ? word_length(there) : 4, *there ? there : "none",
                      *now ? word_length(now) : 4, *now ? now : "none");
}

static enum status make_folder(const char *path)
{
    if (mkdir(path, 0777) == 0 || errno == EEXIST)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "cannot create folder '%s': %s", path, strerror(errno));
}

/* Creates a folder and its parents. */
static enum status make_folders(const char *path)
{
    char above[PATH_MAX];
    if (snprintf(above, sizeof above, "%s", path) >= (int)sizeof above)
        return status_set(STATUS_USAGE, "the path '%.80s...' is too long", path);
    for (char *slash = above + 1; *above && (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        TRY(make_folder(above));
        *slash = '/';
    }
    return make_folder(path);
}

/* Opens and locks the folder. Linux releases the lock when the process ends. On a file system without locks,
 * continues without a lock. */
static enum status lock_folder(struct folder *folder)
{
    folder->lock = open(folder->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder->lock < 0)
        return status_set(STATUS_USAGE, "cannot open folder '%s': %s", folder->path, strerror(errno));
    if (flock(folder->lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return status_set(STATUS_USAGE, "another run is preparing %s; wait until it ends", folder->path);
    if (access(folder->path, W_OK | X_OK) != 0)
        return status_set(STATUS_USAGE, "cannot write into folder '%s': %s", folder->path, strerror(errno));
    return STATUS_OK;
}

void folder_release(struct folder *folder)
{
    if (folder->lock >= 0)
        close(folder->lock);
    folder->lock = -1;
}

/* Checks that the folder contains nothing but .prepare/. If it has a data set whose index is lost, the
 * message says how to get another index. */
static enum status check_empty(const struct folder *folder)
{
    char other[256] = "", ours[256] = "";
    bool indexed = false;
    DIR *list = opendir(folder->path);
    if (!list)
        return status_set(STATUS_USAGE, "cannot read folder '%s': %s", folder->path, strerror(errno));
    for (struct dirent *entry; (entry = readdir(list));) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strcmp(name, WORK + 1) == 0)
            continue;
        snprintf(other, sizeof other, "%s", name);
        indexed |= text_ends_in(name, ".index");
        if (strcmp(name, "samples.csv") == 0 || text_ends_in(name, ".wids.json"))
            snprintf(ours, sizeof ours, "%s", name);
    }
    closedir(list);
    if (*ours && !indexed)
        return status_set(STATUS_USAGE,
                          "%.300s has a data set ('%.100s') without its index, %.100s.index; copy it with "
                          "--prepare NEW --from dataset --source %.300s, which writes an index, or remove "
                          "this folder and repeat the command",
                          folder->path, ours, folder->name, folder->path);
    return *other
               ? status_set(STATUS_USAGE, "%s contains other files ('%.100s'): name a new or an empty folder",
                            folder->path, other)
               : STATUS_OK;
}

/* Creates the folders that all ranks write to, and removes temporary files of killed runs from them. */
static enum status make_subfolders(const struct folder *folder)
{
    char path[PATH_MAX];
    if (folder->layout == INDEX_FILES && *folder->above) {
        TRY(inside(folder, path, "/%s", folder->above));
        TRY(make_folder(path));
    }
    for (uint64_t i = 0; i < folder->class_count; i++) {
        TRY(inside(folder, path, "/%s", folder->class_folders[i]));
        TRY(make_folder(path));
        unit_sweep(path);
    }
    return STATUS_OK;
}

/* Starts a new dataset in an empty folder. */
static enum status begin(const struct folder *folder)
{
    char work[PATH_MAX], spec[PATH_MAX];
    TRY(check_empty(folder));
    TRY(inside(folder, work, WORK));
    TRY(inside(folder, spec, WORK "/spec"));
    TRY(make_folder(work));
    return file_write_atomic(spec, folder->provenance, strlen(folder->provenance));
}

/* Continues an incomplete dataset, or starts a new one. */
static enum status resume(const struct folder *folder)
{
    char spec[PATH_MAX], work[PATH_MAX], *theirs;
    size_t size;
    TRY(inside(folder, spec, WORK "/spec"));
    TRY(inside(folder, work, WORK));
    if (access(spec, F_OK) != 0)
        return begin(folder);
    TRY(file_read(spec, &theirs, &size));
    enum status status = strcmp(theirs, folder->provenance) == 0 ? STATUS_OK : refuse_options(folder, theirs);
    free(theirs);
    if (status != STATUS_OK)
        return status;
    unit_sweep(folder->path);
    unit_sweep(work);
    return STATUS_OK;
}

/* ---- A dataset that has an index ---- */

/* Makes a data set unfinished again, so that --prepare writes its missing or damaged files. Keeps complete
 * units. */
static enum status reopen(const struct folder *folder, const struct index *index, const char *path)
{
    char work[PATH_MAX], spec[PATH_MAX], part[PATH_MAX];
    uint64_t kept = 0;
    TRY(inside(folder, work, WORK));
    TRY(inside(folder, spec, WORK "/spec"));
    TRY(make_folder(work));
    for (uint64_t i = 0; i < index->unit_count; i++)
        if (is_whole(folder, index, i)) {
            TRY(folder_part_path(folder, i, part));
            TRY(index_save(part, index, i, 1));
            kept++;
        }
    TRY(file_write_atomic(spec, folder->provenance, strlen(folder->provenance)));
    if (index->unit_count == 0)
        status_warn("%s was truncated or changed: preparing all files again", path);
    else if (kept < index->unit_count)
        status_warn("%s: %" PRIu64 " of %" PRIu64
                    " %s have missing files, or files of the wrong size; preparing them again",
                    folder->path, index->unit_count - kept, index->unit_count,
                    folder->layout == INDEX_SHARDS  ? "shards"
                    : folder->layout == INDEX_FILES ? "folders"
                                                    : "parts");
    else
        status_warn("%s: samples.csv, classes.txt or the wids index is missing or incomplete; writing the "
                    "lists again",
                    folder->path);
    return unlink(path) == 0 ? STATUS_OK
                             : status_set(STATUS_FAILED, "cannot remove %s: %s", path, strerror(errno));
}

static void remove_work(const struct folder *folder)
{
    char path[PATH_MAX];
    for (uint64_t i = 0; i < folder->unit_count; i++)
        if (folder_part_path(folder, i, path) == STATUS_OK)
            unlink(path);
    if (inside(folder, path, WORK "/spec") == STATUS_OK)
        unlink(path);
    if (inside(folder, path, WORK) == STATUS_OK) {
        unit_sweep(path);
        rmdir(path);
    }
}

/* Handles an index that was truncated or changed and therefore no longer describes the units. If the first
 * line of the index has the options of this run, all units are prepared again, which produces the same bytes.
 * Otherwise the index may belong to another dataset, and the run fails. */
static enum status replace_index(const struct folder *folder, const char *path)
{
    FREED char *theirs = NULL;
    size_t size;
    CLOSED_BY(index_text_free) struct index_text ours;
    const struct index none = {0};
    TRY(index_text_begin(&ours, folder->layout, folder->provenance));
    fflush(ours.stream);
    TRY(file_read(path, &theirs, &size));
    bool same = size >= ours.size && memcmp(theirs, ours.text, ours.size) == 0;
    return same ? reopen(folder, &none, path)
                : status_set(
                      STATUS_USAGE,
                      "%s was truncated or changed, and its first line has other options; remove the folder "
                      "and prepare it again, or remove only the index to read the data set without it",
                      path);
}

/* Checks a dataset that has an index, and reopens it if it is not complete. */
static enum status look_at_index(const struct folder *folder)
{
    char path[PATH_MAX];
    TRY(index_path(folder, path));
    CLOSED_BY(index_free) struct index index;
    enum status status = index_read(path, &index);
    if (status == STATUS_FAILED)
        return replace_index(folder, path);
    TRY(status);
    if (strcmp(index.provenance, folder->provenance) != 0)
        return refuse_options(folder, index.provenance);
    bool complete = lists_are_whole(folder, &index);
    for (uint64_t i = 0; i < index.unit_count; i++)
        complete &= is_whole(folder, &index, i);
    if (!complete)
        return reopen(folder, &index, path);
    remove_work(folder); /* a previous run may have been killed just before this step */
    return STATUS_OK;
}

bool folder_complete(const struct folder *folder)
{
    char path[PATH_MAX];
    return index_path(folder, path) == STATUS_OK && access(path, F_OK) == 0;
}

static uint64_t count_parts(const struct folder *folder)
{
    char path[PATH_MAX];
    uint64_t parts = 0;
    for (uint64_t i = 0; i < folder->unit_count; i++)
        parts += folder_part_path(folder, i, path) == STATUS_OK && access(path, F_OK) == 0;
    return parts;
}

enum status folder_claim(struct folder *folder)
{
    TRY(make_folders(folder->path));
    TRY(lock_folder(folder));
    TRY(folder_complete(folder) ? look_at_index(folder) : resume(folder));
    if (!folder_complete(folder))
        TRY(make_subfolders(folder));
    folder->part_count = count_parts(folder);
    return STATUS_OK;
}

/* ---- Finishing ---- */

static enum status add_part(const struct folder *folder, uint64_t unit, struct index_text *text)
{
    CLOSED_BY(index_free) struct index part;
    TRY(read_part(folder, unit, &part));
    return index_text_add_all(text, &part, 0);
}

enum status folder_gather(const struct folder *folder, struct index *index)
{
    struct index_text text;
    *index = (struct index){0};
    TRY(index_text_begin(&text, folder->layout, folder->provenance));
    enum status status = STATUS_OK;
    for (uint64_t i = 0; i < folder->unit_count && status == STATUS_OK; i++)
        status = add_part(folder, i, &text);
    if (status == STATUS_OK)
        status = index_text_end(&text);
    if (status == STATUS_OK)
        return index_parse(text.text, text.size, index); /* takes ownership of the text */
    index_text_free(&text);
    return status;
}

/* Writes the wids index. Warns instead in builds without jansson. */
static enum status write_wids(const struct folder *folder, const struct index *index)
{
    FREED char *text = NULL;
    char path[PATH_MAX];
    TRY(inside(folder, path, "/%s.wids.json", folder->name));
    enum status status = wids_format(folder->name, index, &text);
    if (status == STATUS_UNAVAILABLE) {
        status_warn("%s is not written: %s", path, status_text());
        return STATUS_OK;
    }
    return status == STATUS_OK ? file_write_atomic(path, text, strlen(text)) : status;
}

enum status folder_conclude(const struct folder *folder, const struct index *index)
{
    char path[PATH_MAX];
    if (folder->class_list) {
        TRY(inside(folder, path, "/" CLASSES_NAME));
        TRY(file_write_atomic(path, folder->class_list, strlen(folder->class_list)));
    }
    if (folder->layout == INDEX_SHARDS)
        TRY(write_wids(folder, index));
    TRY(index_path(folder, path));
    TRY(index_save(path, index, 0, index->unit_count));
    remove_work(folder);
    return STATUS_OK;
}
