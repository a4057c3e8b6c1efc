/* Writes and reads the safetensors format, which PyTorch, JAX and other programs read: a length (8 bytes,
 * little-endian), a JSON header with names, types, shapes and offsets, then the values. */
#ifndef FDSL_DATA_SAFETENSORS_H
#define FDSL_DATA_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/tensor_file.h"

/* A tensor in C order. Names and strings must not need JSON escapes. */
struct safetensor {
    char name[48];
    const char *type; /* "F32", "I64", "U8" */
    uint32_t axes;    /* 0: a scalar */
    uint64_t shape[5];
    const void *values;
    size_t bytes;
};

FDSL_C_BEGIN

/* Writes a file atomically. `about` is the metadata: alternating keys and values, then NULL; the first key is
 * "fdsl-bench". STATUS_FAILED with the reason if writing fails. */
enum status safetensors_write(const char *path, const char *const about[], const struct safetensor *tensors,
                              size_t count);

/* Formats what precedes the values in such a file: the length, and the header. The caller frees `*header`.
 * The values of `tensors` are not used. STATUS_EXHAUSTED if memory runs out. */
enum status safetensors_header(const char *const about[], const struct safetensor *tensors, size_t count,
                               char **header, size_t *size);

/* Checks that safetensors_write() can write `path` without destroying other data. An existing file must be
 * empty or begin with the header of safetensors_header(). STATUS_USAGE with the reason and a remedy. */
enum status safetensors_check(const char *path);

/* Lists the tensors of an open file. STATUS_FAILED with the reason; STATUS_UNAVAILABLE in builds without
 * jansson. The header may have at most 100 MB. Its names must be unique, and its tensors must follow one
 * another without holes until the end of the file. */
enum status safetensors_list(struct tensor_file *file);

FDSL_C_END

#endif
