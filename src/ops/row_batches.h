/* Streams of batches of rows in device memory, for libfdsl: data/device_batches.h over ops/rows_device.h.
 * This header is plain C. cuda/ops/row_batches.cu implements it; cuda/ops/rows_device_none.c in builds
 * without CUDA or xxHash. */
#ifndef FDSL_OPS_ROW_BATCHES_H
#define FDSL_OPS_ROW_BATCHES_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/device_batches.h"
#include "ops/rows_device.h"

struct row_batches_request {
    struct rows_device *rows; /* must outlive the stream, unless `owned` is set */
    bool owned;               /* the stream closes `rows`, also if it cannot be opened */
    bool labels;              /* the rows have labels */

    /* Epoch e has the elements of permutation_begin(seed + e, rows), or the rows in their order. A step has
     * `global` rows, the last one perhaps fewer; the ranks divide each step (partition_step()). */
    uint64_t seed;
    bool shuffle;
    uint32_t global, rank, ranks;
    uint64_t steps;    /* per epoch */
    uint32_t capacity; /* largest number of rows in a batch of this rank */
    uint32_t slots;    /* batches of next() that the caller holds at a time */
};

FDSL_C_BEGIN

/* Opens a stream. Batches are gathered on the caller's CUDA stream when they are requested. Their numbers are
 * not listed: stream_batch.numbers is NULL. device_batches_fill() allocates nothing. It
 * waits for rows that are not resident until they are copied from the host. It can be captured into a
 * graph if all rows are resident, there is one rank, and all steps have equal numbers of rows. Launches of
 * the graph must be ordered with each other and with the other calls. The caller closes the stream with
 * stream_close(), which waits for the work that uses its memory. STATUS_EXHAUSTED if memory runs out;
 * STATUS_UNAVAILABLE in builds without CUDA. */
enum status row_batches_open(const struct row_batches_request *request, struct device_batches **batches);

FDSL_C_END

#endif
