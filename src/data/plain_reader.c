#include "data/plain_reader.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "data/checksum.h"
#include "data/members.h"
#include "data/mixing.h"

void plain_close(struct plain *plain)
{
    if (plain->fd >= 0)
        dataset_file_close(plain->dataset, plain->fd);
    free(plain->buffer);
    plain->fd = -1;
    plain->buffer = NULL;
    plain->buffer_bytes = 0;
}

static enum status plain_fail(const struct plain *plain, uint64_t offset, const char *reason)
{
    const struct dataset *dataset = plain->dataset;
    return status_set(STATUS_FAILED, "%s/%s: offset %llu: %s", dataset->path,
                      dataset->files[plain->file].name, (unsigned long long)offset, reason);
}

/* Opens the member's file and sets `*info` to its status. If the file is already open, does nothing. */
static enum status plain_open_file(struct plain *plain, const struct dataset_member *member,
                                   struct stat *info)
{
    const struct dataset *dataset = plain->dataset;
    if (plain->fd >= 0 && plain->file == member->file)
        return STATUS_OK;
    if (plain->fd >= 0)
        dataset_file_close(plain->dataset, plain->fd);
    plain->file = member->file;
    tar_open(&plain->parser, dataset->files[member->file].bytes);
    TRY(dataset_file_await(dataset, member->file, plain->stopped, &plain->fd));
    return fstat(plain->fd, info) == 0 && S_ISREG(info->st_mode) ? STATUS_OK
                                                                 : plain_fail(plain, 0, "not a regular file");
}

/* Refuses a member that is a pointer of Git LFS. `bytes` are its first `size` bytes. */
static enum status refuse_pointer(const struct plain *plain, const struct dataset_member *member,
                                  const void *bytes, size_t size)
{
    return file_refuse_pointer(bytes, size) == STATUS_OK
               ? STATUS_OK
               : status_prefix(STATUS_FAILED, "%s/%s: offset %llu", plain->dataset->path,
                               plain->dataset->files[plain->file].name, (unsigned long long)member->offset);
}

/* If the member's file is not open yet, opens it and records its identity. If there is an index, a single
 * file must have the size that the index gives. */
static enum status plain_open_new(struct plain *plain, struct dataset_member *member)
{
    const struct dataset *dataset = plain->dataset;
    struct dataset_file *file = &dataset->files[member->file];
    struct stat info;
    bool opens = plain->fd < 0 || plain->file != member->file;
    TRY(plain_open_file(plain, member, &info));
    if (!opens)
        return STATUS_OK;
    const struct dataset_file listed = *file;
    dataset_know_file(file, &info);
    if (listed.known && !dataset_copied(dataset, member->file) &&
        file_compare(&listed.identity, &file->identity) != 0)
        return status_set(
            STATUS_FAILED,
            "%s/%s: the file changed while the data set was opened; start again when it is complete",
            dataset->path, file->name);
    const uint64_t file_bytes = file->bytes;
    if (dataset->shards)
        return STATUS_OK;
    if (member->size == UINT64_MAX)
        member->size = file_bytes;
    if (member->size == file_bytes)
        return STATUS_OK;
    char begin[FILE_POINTER_BYTES];
    if (pread(plain->fd, begin, sizeof begin, 0) == sizeof begin)
        TRY(refuse_pointer(plain, member, begin, sizeof begin));
    return status_set(STATUS_FAILED, "%s/%s: offset %llu: the file has %llu bytes but its index says %llu",
                      dataset->path, dataset->files[plain->file].name,
                      (unsigned long long)(member->size < file_bytes ? member->size : file_bytes),
                      (unsigned long long)file_bytes, (unsigned long long)member->size);
}

/* Grows the buffer to at least `size` bytes, for a read at `offset`. An index may claim more bytes than the
 * file has; such a member is broken. */
static enum status plain_room(struct plain *plain, uint64_t offset, uint64_t size)
{
    struct stat info;
    if (size <= plain->buffer_bytes)
        return STATUS_OK;
    free(plain->buffer);
    plain->buffer = malloc(size);
    plain->buffer_bytes = plain->buffer ? size : 0;
    if (plain->buffer)
        return STATUS_OK;
    enum status status = plain_fail(plain, offset, "the member does not fit in memory");
    bool there = plain->fd >= 0 && fstat(plain->fd, &info) == 0 && (uint64_t)info.st_size >= offset &&
                 (uint64_t)info.st_size - offset >= size;
    return there ? STATUS_EXHAUSTED : status;
}

static enum status plain_read(struct plain *plain, uint8_t *bytes, uint64_t size, uint64_t offset)
{
    size_t done;
    const bool read = file_read_at(plain->fd, bytes, size, offset, &done);
    if (read && done == size)
        return STATUS_OK;
    return plain_fail(plain, offset + done, read ? "the file ends inside a member" : strerror(errno));
}

enum status plain_bytes(struct plain *plain, const struct dataset_member *member, uint64_t size,
                        uint8_t *bytes)
{
    struct stat unused;
    TRY(plain_open_file(plain, member, &unused));
    return plain_read(plain, bytes, size, member->offset);
}

/* ---- Comparing tar headers with the index ---- */

static enum status compare_name(const struct plain *plain, const struct dataset_sample *sample,
                                const struct dataset_member *member, const struct tar_member *found)
{
    const struct dataset *dataset = plain->dataset;
    size_t length;
    const char *extension;
    if (found->data == member->offset && found->size == member->size &&
        key_split(found->name, &length, &extension) && strlen(sample->key) == length &&
        memcmp(sample->key, found->name, length) == 0 && strcasecmp(extension, member->extension) == 0)
        return STATUS_OK;
    return status_set(
        STATUS_FAILED,
        "%s/%s: offset %llu: the header names '%s' of %llu bytes, but the index lists '%s.%s' of %llu bytes",
        dataset->path, dataset->files[plain->file].name, (unsigned long long)found->header, found->name,
        (unsigned long long)found->size, sample->key, member->extension, (unsigned long long)member->size);
}

/* Parses the headers in `bytes` and compares the last header with the index. `bytes` ends where the member's
 * data begins. Skips members that belong to no sample. */
static enum status parse_headers(struct plain *plain, const struct dataset_sample *sample,
                                 const struct dataset_member *member, const uint8_t *bytes, size_t available)
{
    struct tar_parser *parser = &plain->parser;
    struct tar_member found;
    enum tar_step step = TAR_MORE;
    size_t need, length;
    const char *extension;
    uint64_t end = member->offset;
    tar_move(parser, end - available);
    while (parser->position < end) {
        const uint8_t *at = bytes + (available - (size_t)(end - parser->position));
        TRY(status_prefix(tar_next(parser, at, (size_t)(end - parser->position), false, &found, &step, &need),
                          "%s/%s", plain->dataset->path, plain->dataset->files[plain->file].name));
        if (step == TAR_MEMBER && (found.data >= end || key_split(found.name, &length, &extension)))
            return compare_name(plain, sample, member, &found);
        if (step != TAR_MEMBER)
            break;
    }
    return plain_fail(plain, end - available, "the header of the next member in the index is missing");
}

static enum status plain_headers(struct plain *plain, const struct dataset_sample *sample,
                                 const struct dataset_member *member)
{
    uint64_t begin = member->headers;
    if (begin >= member->offset)
        return plain_fail(plain, member->offset, "the index leaves no room for the member's header");
    size_t bytes = (size_t)(member->offset - begin);
    TRY(plain_room(plain, begin, bytes));
    TRY(plain_read(plain, plain->buffer, bytes, begin));
    return parse_headers(plain, sample, member, plain->buffer, bytes);
}

/* ---- Data ---- */

static enum status plain_edges(struct plain *plain, struct dataset_member *member)
{
    uint8_t edges[2 * CHECKSUM_EDGE];
    size_t bytes = checksum_edge_bytes(member->size), head = bytes < member->size ? bytes / 2 : bytes;
    TRY(plain_read(plain, edges, head, member->offset));
    TRY(refuse_pointer(plain, member, edges, head));
    TRY(plain_read(plain, edges + head, bytes - head, member->offset + member->size - (bytes - head)));
    member->edges = checksum_edges_only(edges, member->size);
    return STATUS_OK;
}

/* Compares the hash of a member's data with the index. */
static enum status compare_whole(const struct plain *plain, const struct dataset_member *member,
                                 uint64_t whole)
{
    return !plain->dataset->indexed || whole == member->whole
               ? STATUS_OK
               : plain_fail(plain, member->offset,
                            "the member's data do not match the hash in the index; they may be damaged");
}

static enum status plain_whole(struct plain *plain, struct dataset_member *member)
{
    TRY(plain_room(plain, member->offset, member->size));
    TRY(plain_read(plain, plain->buffer, member->size, member->offset));
    uint64_t whole = checksum_whole(plain->buffer, member->size);
    TRY(compare_whole(plain, member, whole));
    member->whole = whole;
    member->edges = checksum_edges(plain->buffer, member->size);
    return STATUS_OK;
}

enum status plain_member(struct plain *plain, const struct dataset_sample *sample,
                         const struct dataset_member *member, uint8_t *bytes)
{
    const struct dataset *dataset = plain->dataset;
    struct stat unused;
    TRY(plain_open_file(plain, member, &unused));
    if (dataset->shards && dataset->indexed)
        TRY(plain_headers(plain, sample, member));
    TRY(plain_read(plain, bytes, member->size, member->offset));
    return dataset->indexed ? compare_whole(plain, member, checksum_whole(bytes, member->size)) : STATUS_OK;
}

/* Reads the edges of a member, or all of it. A dangling link becomes a member without bytes if the data set
 * keeps incomplete samples. */
static enum status read_member(struct plain *plain, const struct dataset_sample *sample,
                               struct dataset_member *member, bool whole)
{
    const struct dataset *dataset = plain->dataset;
    struct dataset_file *file = &dataset->files[member->file];
    const enum status status = plain_open_new(plain, member);
    if (status == STATUS_FAILED && dataset->incomplete && !dataset->shards &&
        dataset_dangles(dataset, file->name)) {
        file->dangling = true;
        member->size = 0;
        member->edges = checksum_edges(NULL, 0);
        member->whole = checksum_whole(NULL, 0);
        return STATUS_OK;
    }
    TRY(status);
    if (whole && dataset->shards && dataset->indexed)
        TRY(plain_headers(plain, sample, member));
    return (whole ? plain_whole : plain_edges)(plain, member);
}

enum status plain_sample(struct plain *plain, struct dataset_sample *sample, bool whole)
{
    const struct dataset *dataset = plain->dataset;
    uint64_t edges[DATASET_MEMBERS_MAX], wholes[DATASET_MEMBERS_MAX];
    sample->bytes = 0;
    for (uint32_t m = 0; m < sample->members; m++) {
        struct dataset_member *member = &dataset->members[sample->member + m];
        TRY(read_member(plain, sample, member, whole));
        sample->bytes += member->size;
        edges[m] = member->edges;
        wholes[m] = member->whole;
    }
    sample->key_hash = checksum_key(sample->key, strlen(sample->key));
    sample->edges = checksum_sample(sample->key_hash, edges, sample->members);
    sample->whole = checksum_sample(sample->key_hash, wholes, sample->members);
    return STATUS_OK;
}

/* ---- Labels ---- */

/* Reads the bytes of the member that is the label into the buffer: as many as its format allows. */
static enum status read_label(struct plain *plain, const struct dataset_sample *sample,
                              const struct dataset_member **found)
{
    struct dataset_member *member = &plain->dataset->members[sample->member + sample->label];
    *found = member;
    if (member->size == UINT64_MAX)
        TRY(plain_open_new(plain, member));
    uint64_t most = *sample->rule->field ? MEMBER_JSON_BYTES_MAX : LABEL_BYTES_MAX;
    uint64_t bytes = member->size < most ? member->size : most;
    TRY(plain_room(plain, member->offset, bytes));
    return plain_bytes(plain, member, bytes, plain->buffer);
}

enum status plain_label(struct plain *plain, const struct dataset_sample *sample, uint32_t classes,
                        int32_t *label)
{
    const struct dataset *dataset = plain->dataset;
    if (sample->label == sample->members)
        return dataset_label(dataset, sample, NULL, 0, classes, label);
    const struct dataset_member *member;
    TRY(read_label(plain, sample, &member));
    return dataset_label(dataset, sample, plain->buffer, member->size, classes, label);
}

enum status plain_multi_hot(struct plain *plain, const struct dataset_sample *sample, uint32_t *classes,
                            uint32_t *row)
{
    const struct dataset *dataset = plain->dataset;
    const bool lacks = sample->label >= sample->members;
    struct dataset_member *member = &dataset->members[sample->member + (lacks ? 0 : sample->label)];
    const uint8_t *label = NULL;
    if (lacks)
        return dataset_at(dataset, sample, member,
                          dataset_lacks(dataset, sample, &dataset->choice.label, "label"));
    TRY(plain_open_new(plain, member)); /* sets the size of a file */
    FREED uint8_t *bytes = malloc(member->size + 1);
    TRY(ALLOCATED(bytes, "out of memory for a multi-hot label"));
    TRY(plain_member(plain, sample, member, bytes));
    const enum status status = members_multi_hot(bytes, member->size, classes, &label);
    for (uint32_t w = 0; status == STATUS_OK && row && w < multi_hot_words(*classes); w++)
        row[w] = multi_hot_pack(label, *classes, w);
    return dataset_at(dataset, sample, member, status);
}

enum status plain_label_text(struct plain *plain, const struct dataset_sample *sample,
                             char text[LABEL_BYTES_MAX + 1], bool *number)
{
    const struct dataset_member *member;
    TRY(plain_open_new(plain, &plain->dataset->members[sample->member + sample->label]));
    TRY(read_label(plain, sample, &member));
    return members_label_text(sample->rule, plain->buffer, member->size, text, number);
}
