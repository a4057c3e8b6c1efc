#include "load/plain.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "load/tally.h"

void plain_close(struct plain *plain)
{
    if (plain->fd >= 0)
        close(plain->fd);
    free(plain->buffer);
}

static enum status plain_fail(const struct plain *plain, uint64_t offset, const char *reason)
{
    const struct dataset *dataset = plain->dataset;
    return status_set(STATUS_FAILED, "%s/%s: offset %llu: %s", dataset->path,
                      dataset->files[plain->file].name, (unsigned long long)offset, reason);
}

/* Opens the member's file unless it is open; then `*file_bytes` becomes its size. */
static enum status plain_turn_to(struct plain *plain, const struct dataset_member *member,
                                 uint64_t *file_bytes)
{
    const struct dataset *dataset = plain->dataset;
    if (plain->fd >= 0 && plain->file == member->file)
        return STATUS_OK;
    struct stat status_;
    if (plain->fd >= 0)
        close(plain->fd);
    plain->file = member->file;
    plain->fd = dataset_file_open(dataset, member->file, 0);
    if (plain->fd < 0)
        return STATUS_FAILED;
    if (fstat(plain->fd, &status_) != 0 || !S_ISREG(status_.st_mode))
        return plain_fail(plain, 0, "it is no regular file");
    *file_bytes = (uint64_t)status_.st_size;
    return STATUS_OK;
}

/* The same when a member is looked at for the first time: then sizes become known. */
static enum status plain_meet(struct plain *plain, struct dataset_member *member)
{
    struct dataset *dataset = plain->dataset;
    uint64_t file_bytes = dataset->files[member->file].bytes;
    bool opens = plain->fd < 0 || plain->file != member->file;
    TRY(plain_turn_to(plain, member, &file_bytes));
    if (!opens)
        return STATUS_OK;
    dataset->files[member->file].bytes = file_bytes;
    if (dataset->shards)
        return STATUS_OK;
    if (member->size == UINT64_MAX)
        member->size = file_bytes;
    if (member->size != file_bytes)
        return plain_fail(plain, member->size, "the file's size is not what its index says");
    return STATUS_OK;
}

static enum status plain_read(struct plain *plain, uint8_t *bytes, uint64_t size, uint64_t offset)
{
    while (size > 0) {
        ssize_t count = pread(plain->fd, bytes, size, (off_t)offset);
        if (count < 0)
            return plain_fail(plain, offset, strerror(errno));
        if (count == 0)
            return plain_fail(plain, offset, "the file ends inside of a member");
        bytes += count;
        size -= (uint64_t)count;
        offset += (uint64_t)count;
    }
    return STATUS_OK;
}

enum status plain_bytes(struct plain *plain, const struct dataset_member *member, uint64_t size,
                        uint8_t *bytes)
{
    uint64_t unused;
    TRY(plain_turn_to(plain, member, &unused));
    return plain_read(plain, bytes, size, member->offset);
}

static enum status plain_edges(struct plain *plain, struct dataset_member *member)
{
    uint8_t edges[2 * TALLY_EDGE];
    size_t bytes = tally_edge_bytes(member->size), head = bytes < member->size ? bytes / 2 : bytes;
    TRY(plain_read(plain, edges, head, member->offset));
    TRY(plain_read(plain, edges + head, bytes - head, member->offset + member->size - (bytes - head)));
    member->edges = tally_edges_only(edges, member->size);
    return STATUS_OK;
}

static enum status plain_whole(struct plain *plain, struct dataset_member *member)
{
    struct dataset *dataset = plain->dataset;
    if (member->size > plain->buffer_bytes) {
        free(plain->buffer);
        plain->buffer_bytes = member->size;
        plain->buffer = malloc(member->size);
        if (!plain->buffer) {
            plain->buffer_bytes = 0;
            return plain_fail(plain, member->offset, "the member is larger than memory");
        }
    }
    TRY(plain_read(plain, plain->buffer, member->size, member->offset));
    uint64_t whole = tally_whole(plain->buffer, member->size);
    if (dataset->indexed && whole != member->whole)
        return plain_fail(plain, member->offset,
                          "the member's data are not what its index says: flipped bits?");
    member->whole = whole;
    member->edges = tally_edges(plain->buffer, member->size);
    return STATUS_OK;
}

#define MEMBERS_MAX 64 /* of a sample: more extensions than any data set has */

enum status plain_sample(struct plain *plain, struct dataset_sample *sample, bool whole)
{
    struct dataset *dataset = plain->dataset;
    uint64_t edges[MEMBERS_MAX], wholes[MEMBERS_MAX];
    sample->bytes = 0;
    if (sample->members > MEMBERS_MAX)
        return status_set(STATUS_FAILED, "%s: sample '%s' has %u members, more than %d", dataset->path,
                          sample->key, sample->members, MEMBERS_MAX);
    for (uint32_t m = 0; m < sample->members; m++) {
        struct dataset_member *member = &dataset->members[sample->member + m];
        TRY(plain_meet(plain, member));
        TRY((whole ? plain_whole : plain_edges)(plain, member));
        sample->bytes += member->size;
        edges[m] = member->edges;
        wholes[m] = member->whole;
    }
    sample->key_hash = tally_key(sample->key, strlen(sample->key));
    sample->edges = tally_sample(sample->key_hash, edges, sample->members);
    sample->whole = tally_sample(sample->key_hash, wholes, sample->members);
    return STATUS_OK;
}
