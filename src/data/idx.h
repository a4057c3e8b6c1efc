/* IDX: the format of MNIST and its kin, plain or gzipped. */
#ifndef FDSL_DATA_IDX_H
#define FDSL_DATA_IDX_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define IDX_AXES_MAX 4

/* Values are bytes; axis 0 counts images or labels. */
struct idx {
    uint32_t axes;
    uint32_t shape[IDX_AXES_MAX];
    const uint8_t *values; /* the product of the shape, in C order */
    uint8_t *owned;        /* what idx_take() holds; NULL after idx_parse() */
};

FDSL_C_BEGIN

/* Reads the file in memory: magic 00 00 08 AXES, the lengths big-endian, the values. `idx->values` points
 * into `bytes`. STATUS_FAILED for anything else, types other than bytes, or a size that does not fit. */
enum status idx_parse(const uint8_t *bytes, size_t size, struct idx *idx);

/* The same for a file that may be gzipped: takes `bytes`, which come from malloc, and unpacks no more of them
 * than the header says. `idx->owned` holds the values. The caller frees, also after a failure. STATUS_FAILED
 * also for what memory cannot hold; STATUS_UNAVAILABLE for a gzipped one where the build has no zlib. */
enum status idx_take(uint8_t *bytes, size_t size, struct idx *idx);

/* Reads a file, plain or gzipped, of one or more members. The caller frees, also after a failure. Messages
 * begin with the path. */
enum status idx_read(const char *path, struct idx *idx);
void idx_free(struct idx *idx);

FDSL_C_END

#endif
