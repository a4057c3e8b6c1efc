/* A batch of samples in host or device memory: the address, layout and type of its values, and its labels. */
#ifndef FDSL_CORE_BATCH_H
#define FDSL_CORE_BATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"

/* The shape of a sample. */
struct shape {
    uint32_t channels, depth, height, width; /* after a linear layer: features, 1, 1, 1; of tokens: tokens, 1,
                                                1, width */
};

/* Returns the number of values of a shape. */
static inline size_t shape_values(const struct shape *shape)
{
    return (size_t)shape->channels * shape->depth * shape->height * shape->width;
}

struct batch {
    const void *values;
    size_t bytes;  /* size of all samples, including the padding after the last one */
    size_t stride; /* bytes from one sample to the next */
    uint32_t count;
    enum dtype type;
    bool interleaved;      /* true: NHWC; false: NCHW */
    const int32_t *labels; /* in the same memory (host or device) as `values`; NULL: none */
    uint64_t first;        /* number of the first sample */
};

#endif
