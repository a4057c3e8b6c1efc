/* The plain reader reads files with open(2) and pread(2) only. Its results are the reference for every
 * variant of `load`. */
#ifndef FDSL_DATA_PLAIN_READER_H
#define FDSL_DATA_PLAIN_READER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"
#include "data/tar.h"

/* State of a plain reader. Keeps the latest file open, because the next sample of a shard is in the same
 * file. The caller sets `dataset`, sets `fd` to -1, and zeroes the other fields. */
struct plain {
    const struct dataset *dataset;
    int fd;          /* descriptor of the open file; -1 if none is open */
    uint32_t file;   /* number of the open file */
    uint8_t *buffer; /* owned */
    uint64_t buffer_bytes;
    struct tar_parser parser; /* for the shard's headers; keeps global pax headers */
    const bool *stopped;      /* as for remote_fd(); NULL: reading cannot be stopped */
};

FDSL_C_BEGIN

/* Reads every byte of a sample (`whole`), or only the edges of its members. Sets the sample's size and
 * hashes, and the sizes of its members if they are unknown. If `whole` is set and the data set has an index
 * of --prepare, also compares the hashes and, in shards, the tar header of each member with the index.
 * STATUS_FAILED with file and offset. */
enum status plain_sample(struct plain *plain, struct dataset_sample *sample, bool whole);

/* Reads the first `size` bytes of a member into `bytes`. `size` must not exceed the size of the member.
 * STATUS_FAILED with file and offset. */
enum status plain_bytes(struct plain *plain, const struct dataset_member *member, uint64_t size,
                        uint8_t *bytes);

/* Reads a whole member of a sample into `bytes`. If the data set has an index of --prepare, compares the hash
 * of the data and, in shards, the tar header with the index. STATUS_FAILED with file and offset. */
enum status plain_member(struct plain *plain, const struct dataset_sample *sample,
                         const struct dataset_member *member, uint8_t *bytes);

/* Reads the label of a sample from its member or its folder. STATUS_FAILED if the sample has no label, or if
 * the label is not a class from 0 to `classes` - 1; if `classes` is 0, any integer is accepted. */
enum status plain_label(struct plain *plain, const struct dataset_sample *sample, uint32_t classes,
                        int32_t *label);

/* Reads the multi-hot label of a sample, as members_multi_hot(). `row` receives its words (data/mixing.h);
 * NULL: they are not wanted. STATUS_FAILED, with file and offset, if there is none, or if it is broken. */
enum status plain_multi_hot(struct plain *plain, const struct dataset_sample *sample, uint32_t *classes,
                            uint32_t *row);

/* Reads the label of a sample, which is in a member, as text: members_label_text(). Records the identity of
 * its file if it was not open, as plain_sample() does. */
enum status plain_label_text(struct plain *plain, const struct dataset_sample *sample,
                             char text[LABEL_BYTES_MAX + 1], bool *number);

/* Closes the file and frees the buffer. Closing again does nothing. */
void plain_close(struct plain *plain);

FDSL_C_END

#endif
