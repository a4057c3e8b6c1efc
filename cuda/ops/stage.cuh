/* What a batch of a set in device memory takes from the host: rows that are not in device memory, and lists
 * of numbers. Both are written to slots of pinned memory, from which a kernel reads them. Threads fill the
 * slot of the next batch while the device works on the current one. */
#ifndef FDSL_CUDA_OPS_STAGE_CUH
#define FDSL_CUDA_OPS_STAGE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/parallel.h"
#include "core/status.h"
#include "ops/job.h"

/* Where rows in host memory come from. Row k of the set is row kept[k] of the input. */
struct stage_source {
    const struct ops *ops; /* the input rows, unless `copy` is set */
    enum status (*copy)(void *context, uint64_t first, uint64_t count, void *to);
    enum status (*check)(void *context); /* called after each batch, with `copy`; NULL: none */
    void *context;
    const uint32_t *kept;       /* NULL: all rows are kept */
    uint64_t resident;          /* rows before this one are in device memory */
    bool streams;               /* there are rows that are not in device memory */
    uint64_t row_bytes, stride; /* of a row in a slot; the stride is a multiple of 16 */
    int device, threads;
};

/* A batch: `count` elements of permutation_begin(seed + epoch, rows), from element `first` on; or `count`
 * rows from row `first` on; or `numbers`. */
struct stage_batch {
    uint64_t rows, seed, epoch, first, count;
    const uint32_t *numbers; /* in host memory; NULL: the permutation, or consecutive rows */
    bool consecutive;
};

/* A filled slot; both pointers are valid on the device too. Row j of the batch is at rows + j * stride if it
 * is not in device memory. */
struct stage_slot {
    uint8_t *rows;
    uint32_t *numbers; /* a copy of batch.numbers */
    uint32_t index;
};

struct stage;

/* Opens a stage without memory. The caller closes the stage, when the device
 * has finished the batches. The arrays of `source` must outlive it. Only one thread at a time may use a
 * stage. */
enum status stage_open(const struct stage_source *source, struct stage **stage);
void stage_close(struct stage *stage);

/* Fills a slot, unless stage_ahead() did, and waits for the end. Returns the failure of `copy`. */
enum status stage_take(struct stage *stage, const struct stage_batch *batch, struct stage_slot *slot);

/* The slot may be filled again after the work that is enqueued on `stream`. */
enum status stage_done(struct stage *stage, const struct stage_slot *slot, cudaStream_t stream);

/* Allocates memory for batches of up to `count` rows; otherwise, the first batch does. */
enum status stage_reserve(struct stage *stage, uint64_t count);

/* Begins to fill a slot for a batch without a list of numbers. Failures are returned by stage_take(). */
void stage_ahead(struct stage *stage, const struct stage_batch *batch);

/* Returns the bytes of pinned memory. Thread safe. */
uint64_t stage_bytes(const struct stage *stage);

/* Calls task(context, 0 .. count - 1, ...) on up to `threads` threads that end before the function returns.
 * In contrast to parallel_for(), any thread may call it, also in libfdsl. */
void stage_spread(int threads, uint64_t count, parallel_task *task, void *context);

#endif
