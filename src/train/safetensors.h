/* The safetensors format, as PyTorch, JAX and others read it: a length (8 bytes, little-endian), a JSON
 * header of names, types, shapes and places, the values. */
#ifndef FDSL_TRAIN_SAFETENSORS_H
#define FDSL_TRAIN_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "train/model.h"

/* A tensor in C order. Names and texts hold nothing that JSON would escape. */
struct safetensor {
    char name[48];
    const char *type; /* "F32", "I64", "U8" */
    uint32_t axes;    /* 0: a single value */
    uint64_t shape[5];
    const void *values;
    size_t bytes;
};

FDSL_C_BEGIN

/* Writes a file whole or not at all. `about` is the metadata: names and texts in turn, then NULL; the first
 * name is "fdsl-bench". STATUS_FAILED. */
enum status safetensors_write(const char *path, const char *const about[], const struct safetensor *tensors,
                              size_t count);

/* Checks that safetensors_write() could write `path`, and that what is there is nothing that somebody may
 * miss: an empty file, or one that it wrote itself. STATUS_USAGE with the reason and a remedy. */
enum status safetensors_check(const char *path);

/* Describes every tensor of a model in an arena, PREFIX in front of its name: model->tensor_count of them. */
void safetensors_of_arena(const struct model *model, const char *prefix, const float *arena,
                          struct safetensor *tensors);

FDSL_C_END

#endif
