/* The header of a NumPy file (.npy): written and read. */
#ifndef FDSL_DATA_NPY_H
#define FDSL_DATA_NPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define NPY_HEADER_MAX 256
#define NPY_SHAPE_MAX  128 /* bytes of a shape's text, with its zero */

#define NPY_AXES_MAX   32

struct npy_header {
    char type[16];        /* as NumPy writes it, with its byte order: "<f2", "|u1" */
    uint32_t value_bytes; /* of one value */
    bool fortran;         /* the first axis runs fastest */
    uint32_t axes;        /* 0: a single value */
    uint64_t shape[NPY_AXES_MAX];
    uint64_t values; /* the product of the shape */
    size_t data;     /* bytes before the values */
};

FDSL_C_BEGIN

/* Fills the header, version 1.0, of an array of this type ("<f2") and shape ("2, 3"; "5," for one axis) in C
 * order. Returns its length, a multiple of 64 and at most NPY_HEADER_MAX. */
size_t npy_header_make(char header[NPY_HEADER_MAX], const char *type, const char *shape);

/* Reads the header of a .npy file, versions 1 to 3, from its `size` bytes, or as many of its first as hold
 * the header. Types are numbers and booleans of 1 to 16 bytes: no records, no objects (which are pickles), no
 * text. STATUS_FAILED with the reason. */
enum status npy_header_parse(const uint8_t *bytes, size_t size, struct npy_header *header);

/* Whether the values end where a file of `size` bytes does. STATUS_FAILED with both numbers. */
enum status npy_header_check(const struct npy_header *header, uint64_t size);

FDSL_C_END

#endif
