/* A batch as it is handed over, in host memory or on a device: where its samples lie, what their values are,
 * and their labels. */
#ifndef FDSL_CORE_BATCH_H
#define FDSL_CORE_BATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"

enum batch_type { BATCH_U8, BATCH_F16, BATCH_BF16, BATCH_F32 };

/* Who takes it without learning from it looks at `values` and `bytes` alone. */
struct batch {
    const void *values;
    size_t bytes;  /* from the first sample to the end of the last one's room */
    size_t stride; /* from a sample to the next */
    uint32_t count;
    enum batch_type type;
    bool interleaved; /* the channels of a pixel stand together; else a sample is (channel, row, column) */
    const int32_t *labels; /* in the same memory; NULL: sample j is of class (first + j) mod classes */
    uint64_t first;
};

FDSL_HD size_t batch_value_bytes(enum batch_type type)
{
    return type == BATCH_U8 ? 1 : type == BATCH_F32 ? 4 : 2;
}

#endif
