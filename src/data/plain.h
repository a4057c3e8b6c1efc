/* The plain reader: open, pread, no tricks. What it reads is what every variant must deliver. */
#ifndef FDSL_DATA_PLAIN_H
#define FDSL_DATA_PLAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"
#include "data/tar.h"

/* It keeps the latest file open, as the next sample of a shard is in it. Begins with a dataset and the
 * descriptor -1. */
struct plain {
    struct dataset *dataset;
    int fd;
    uint32_t file;
    uint8_t *buffer; /* owned */
    uint64_t buffer_bytes;
    struct tar_parser parser; /* of the shard's headers: it knows those that hold for all that follow */
};

FDSL_C_BEGIN

/* Reads a sample of the set, all of it or the edges of its members, and fills in its bytes and hashes, and
 * sizes that are not known yet. `whole`, with an index: compares hashes with it, and in shards the headers in
 * front of the data too, from where the member before ends. STATUS_FAILED with file and offset. */
enum status plain_sample(struct plain *plain, struct dataset_sample *sample, bool whole);

/* Reads the first `size` bytes of a member of the set, at most its own. STATUS_FAILED
 * with file and offset. */
enum status plain_bytes(struct plain *plain, const struct dataset_member *member, uint64_t size,
                        uint8_t *bytes);

/* Closes the file and frees the buffer. */
void plain_close(struct plain *plain);

FDSL_C_END

#endif
