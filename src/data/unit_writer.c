#include "data/unit_writer.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/text.h"
#include "data/md5.h"
#include "data/tar.h"

#define BUFFER_BYTES (1 << 20)

#define KEY_MAX      (NAME_MAX + 32)

/* Formats the key of a sample: its number in decimal with leading zeros; with INDEX_IMAGEFOLDER, its class
 * folder comes first. */
static void make_key(char key[KEY_MAX], const struct unit_writer *writer, uint64_t number,
                     uint64_t class_folder)
{
    int used = 0;
    if (writer->layout == INDEX_IMAGEFOLDER)
        used = snprintf(key, KEY_MAX, "%.*s/", NAME_MAX, writer->class_folders[class_folder]);
    snprintf(key + used, (size_t)(KEY_MAX - used), "%0*" PRIu64, writer->key_digits, number);
}

enum status unit_path(char path[PATH_MAX], const char *folder, const char *name)
{
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX
               ? STATUS_OK
               : status_set(STATUS_USAGE, "the path '%.80s...' is too long", folder);
}

static uint64_t hash_of(const void *bytes, size_t size)
{
#ifdef HAVE_XXHASH
    return XXH3_64bits(bytes, size);
#else
    (void)bytes, (void)size; /* unreachable: --prepare needs xxHash */
    return 0;
#endif
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

void unit_sweep(const char *folder)
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
    if (snprintf(path, sizeof path, "%s/%s/%s.%s", writer->folder, writer->name, key, member->extension) >=
        PATH_MAX)
        return status_set(STATUS_USAGE, "the path '%.80s...' is too long", writer->folder);
    return file_write_atomic(path, member->bytes, member->size);
}

static enum status write_files(const struct unit_writer *writer, uint64_t number,
                               const struct source_sample *sample)
{
    char key[KEY_MAX];
    make_key(key, writer, number, sample->class_folder);
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
    make_key(key, writer, number, sample->class_folder);
    for (size_t i = 0; i < sample->count; i++) {
        const struct source_member *member = &sample->members[i];
        entries[i] = (struct index_member){.extension = member->extension,
                                           .size = member->size,
                                           .hash = hash_of(member->bytes, member->size)};
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
