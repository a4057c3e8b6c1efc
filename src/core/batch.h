/* A batch of samples in host or device memory: the address, layout and type of its values, and its labels. */
#ifndef FDSL_CORE_BATCH_H
#define FDSL_CORE_BATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"

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
