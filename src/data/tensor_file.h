/* Files of tensors: NumPy (.npy), safetensors, and PyTorch (.pt, .pth, .pth.tar). An open file lists its
 * tensors with their names, types, shapes and positions. The values stay in the file. */
#ifndef FDSL_DATA_TENSOR_FILE_H
#define FDSL_DATA_TENSOR_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"

#define TENSOR_AXES_MAX 8

/* A tensor in C order. This program reads only values of the types f32, f16 and bf16. */
struct tensor {
    char *name;       /* owned; "" if the format has no names */
    char type[24];    /* the file's name of the type, for messages */
    bool real;        /* a floating-point type, readable or not */
    bool readable;    /* `dtype` is set */
    enum dtype dtype; /* f32, f16 or bf16 */
    uint32_t axes;    /* at most TENSOR_AXES_MAX unless `fault` is set */
    uint64_t shape[TENSOR_AXES_MAX];
    uint64_t offset, bytes; /* position of the values in the file */
    const char *fault;      /* why the values cannot be read, with a remedy; NULL: they can be */
};

struct tensor_file {
    const char *path; /* owned by the caller */
    int fd;
    uint64_t bytes; /* size of the file */
    struct tensor *tensors;
    size_t count;
};

FDSL_C_BEGIN

/* Returns whether the name ends in .npy, .safetensors, .pt, .pth or .pth.tar. */
bool tensor_file_named(const char *path);

/* Opens a file and lists its tensors. The name decides the format. The caller closes the file, even after a
 * failure. STATUS_FAILED with the path and the reason; STATUS_UNAVAILABLE in builds without the library that
 * the format needs. */
enum status tensor_file_open(const char *path, struct tensor_file *file);
void tensor_file_close(struct tensor_file *file);

/* ---- For the readers of the formats ---- */

/* Reads `count` bytes at `offset`. STATUS_FAILED if the file ends before. */
enum status tensor_file_read(const struct tensor_file *file, uint64_t offset, void *bytes, size_t count);

/* Adds a tensor to the list and takes ownership of its name, even after a failure. A name that is NULL counts
 * as out of memory. */
enum status tensor_file_add(struct tensor_file *file, const struct tensor *tensor);

/* Multiplies the lengths of the axes. Returns false if the product exceeds 2^62. */
bool tensor_values(const uint64_t *shape, uint32_t axes, uint64_t *values);

FDSL_C_END

#endif
