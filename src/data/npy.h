/* Writes and reads headers of NumPy files (.npy). */
#ifndef FDSL_DATA_NPY_H
#define FDSL_DATA_NPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define NPY_HEADER_MAX  256   /* size of the largest header that npy_header_make() writes, in bytes */
#define NPY_HEADER_READ 65547 /* size of the largest header that npy_header_parse() accepts, in bytes */
#define NPY_SHAPE_MAX   128   /* bytes of a shape's text, including the terminating zero */

#define NPY_AXES_MAX    32

struct npy_header {
    char type[16];        /* NumPy's notation with byte order: "<f2", "|u1" */
    uint32_t value_bytes; /* bytes per value */
    bool fortran;         /* the first axis varies fastest */
    uint32_t axes;        /* 0: a single value */
    uint64_t shape[NPY_AXES_MAX];
    uint64_t values; /* the product of the shape */
    size_t data;     /* offset of the values in the file, in bytes */
};

FDSL_C_BEGIN

/* Writes a version 1.0 header for an array in C order. Examples of `type` and `shape`: "<f2" and "2, 3", or
 * "5," for one axis. Returns the header's length in bytes, a multiple of 64 and at most NPY_HEADER_MAX. */
size_t npy_header_make(char header[NPY_HEADER_MAX], const char *type, const char *shape);

/* Parses the header of a .npy file, version 1 to 3. `bytes` may hold the whole file or only its beginning, as
 * long as the header is complete. Supported types are numbers and booleans of 1 to 16 bytes, but not records,
 * objects (pickles) or text. STATUS_FAILED with the reason. */
enum status npy_header_parse(const uint8_t *bytes, size_t size, struct npy_header *header);

/* Checks that a file of `size` bytes ends exactly after its last value. STATUS_FAILED with both sizes
 * otherwise. */
enum status npy_header_check(const struct npy_header *header, uint64_t size);

FDSL_C_END

#endif
