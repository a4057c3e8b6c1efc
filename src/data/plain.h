/* The plain reader: open and pread only. Its results are the reference for every variant. */
#ifndef FDSL_DATA_PLAIN_H
#define FDSL_DATA_PLAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"
#include "data/tar.h"

/* Keeps the last file open, because the next sample of a shard is in the same file. Initialise with the
 * dataset and fd = -1. */
struct plain {
    const struct dataset *dataset;
    int fd;
    uint32_t file;
    uint8_t *buffer; /* owned */
    uint64_t buffer_bytes;
    struct tar_parser parser; /* for the shard's headers; remembers global pax headers */
};

FDSL_C_BEGIN

/* Reads a sample, every byte (`whole`) or only the edges of its members. Sets its size and hashes, and any
 * unknown member sizes. With `whole` and an index, compares hashes with the index; in shards also the headers
 * between the previous member and this one. STATUS_FAILED with file and offset. */
enum status plain_sample(struct plain *plain, struct dataset_sample *sample, bool whole);

/* Reads the first `size` bytes of a member; `size` must not exceed the member's. STATUS_FAILED with file and
 * offset. */
enum status plain_bytes(struct plain *plain, const struct dataset_member *member, uint64_t size,
                        uint8_t *bytes);

/* Closes the file and frees the buffer. */
void plain_close(struct plain *plain);

FDSL_C_END

#endif
