/* A batch as it is handed over, in host memory or on a device: where its samples lie, what their values are,
 * and their labels. */
#ifndef FDSL_CORE_BATCH_H
#define FDSL_CORE_BATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"

/* Who takes it without learning from it looks at `values` and `bytes` alone. */
struct batch {
    const void *values;
    size_t bytes;  /* from the first sample to the end of the last one's room */
    size_t stride; /* from a sample to the next */
    uint32_t count;
    enum dtype type;
    bool interleaved; /* the channels of a pixel stand together; else a sample is (channel, row, column) */
    const int32_t *labels; /* in the same memory; NULL: sample j is of class (first + j) mod classes */
    uint64_t first;
};

#endif
