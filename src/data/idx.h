/* IDX: the file format of MNIST and similar data sets, plain or gzipped. */
#ifndef FDSL_DATA_IDX_H
#define FDSL_DATA_IDX_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define IDX_AXES_MAX 4

/* A parsed file. Values are bytes. The length of axis 0 is the number of images or labels. */
struct idx {
    uint32_t axes;
    uint32_t shape[IDX_AXES_MAX];
    const uint8_t *values; /* in C order; their number is the product of the axis lengths in `shape` */
    uint8_t *owned;        /* buffer that idx_free() frees; NULL after idx_parse() */
};

FDSL_C_BEGIN

/* Parses a file in memory: magic 00 00 08 AXES, big-endian lengths, values. `idx->values` points into
 * `bytes`. STATUS_FAILED for any other content, value types other than bytes, or a size that does not
 * match. */
enum status idx_parse(const uint8_t *bytes, size_t size, struct idx *idx);

/* Parses a file in memory that may be gzipped. Takes ownership of `bytes` (from malloc). Stops unpacking when
 * there is more data than the IDX header specifies. `idx->owned` holds the values. The caller frees `idx`,
 * even after a failure. STATUS_FAILED for invalid content, STATUS_USAGE or STATUS_EXHAUSTED for lack of
 * memory, STATUS_UNAVAILABLE for gzip in a build without zlib. */
enum status idx_take(uint8_t *bytes, size_t size, struct idx *idx);

/* Reads a file, plain or gzipped (one or more gzip members), with the same errors as idx_take(). The caller
 * frees `idx`, even after a failure. Messages begin with the path. */
enum status idx_read(const char *path, struct idx *idx);
void idx_free(struct idx *idx);

FDSL_C_END

#endif
