/* Sets of embeddings in the memory of a CUDA device, for programs that train on them. A set is opened once:
 * the device reads each row once, drops the rows that the steps refuse, converts the others, and keeps them
 * in its memory. Then the caller gathers batches of rows, in an order that a permutation computes inside the
 * kernel. The steps and the permutation are those of the workload `ops` (docs/ops.md), with the same bits.
 *
 * This header is plain C. A stream is a cudaStream_t. Row k of a set is its k-th kept row. Functions restore
 * the caller's current device. cuda/ops/rows_device.cu implements them; builds without CUDA or xxHash have
 * cuda/ops/rows_device_none.c, where opening returns STATUS_UNAVAILABLE. */
#ifndef FDSL_OPS_ROWS_DEVICE_H
#define FDSL_OPS_ROWS_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"
#include "core/stream.h"
#include "data/embeddings.h"

struct rows_device;

/* The steps, in this order. With all fields zero except `to`, all rows are kept. */
struct rows_device_steps {
    bool mask;                /* drop rows with a norm out of bounds, and rows with NaN or infinity */
    float norm_min, norm_max; /* both inclusive; only with `mask` */
    bool dedup;               /* drop rows whose bytes have the same XXH3-64 as an earlier kept row */
    enum dtype to;            /* DTYPE_F32, DTYPE_F16, DTYPE_BF16; DTYPE_STORED: the rows' own type */
    uint32_t align;           /* pad rows with zeros to a multiple of this number of values; 0 or 1: not */
};

/* Copies the stored bytes of rows [first, first + count) to `to`, without gaps. Several threads call it at
 * the same time. A set that does not fit into device memory calls it until it is closed. */
typedef enum status rows_device_copy(void *context, uint64_t first, uint64_t count, void *to);

/* Checks that the rows which were copied are those of the set: called once after the set was opened and after
 * each batch that was copied. Its failure is that of the call. */
typedef enum status rows_device_check(void *context);

/* Rows in host memory or in files. */
struct rows_device_request {
    /* Either a mapped set, which must outlive the rows, or `copy` with the shape of the rows. Files of a
     * mapped set may shrink: a caller that must survive this opens a guard with guard_fill()
     * (machine/guard.h). */
    const struct embeddings *set;
    rows_device_copy *copy;
    rows_device_check *check; /* only with `copy`; NULL: none */
    void *context;
    uint64_t rows;    /* only with `copy`; at most 2^32 - 1 */
    uint32_t width;   /* only with `copy`: values per row, 1 to EMBEDDINGS_COLUMNS_MAX */
    enum dtype dtype; /* only with `copy`: DTYPE_F32, DTYPE_F16 or DTYPE_BF16 */

    const int32_t *labels; /* one per row, in host memory, read only while the set is opened; NULL: none */
    struct rows_device_steps steps;
    int device;
    uint64_t memory_limit; /* bytes of device memory for the set without labels; 0: the memory that is free */
    int threads;           /* threads that copy rows in host memory, at least 1 */
};

/* Rows that are already in device memory. They belong to the caller. */
struct rows_device_tensor {
    const void *values;    /* aligned to the size of a value */
    uint64_t rows;         /* at most 2^32 - 1 */
    uint64_t stride;       /* bytes from one row to the next, a multiple of the size of a value; 0: no gaps */
    uint32_t width;        /* values per row, 1 to EMBEDDINGS_COLUMNS_MAX */
    enum dtype dtype;      /* DTYPE_F32, DTYPE_F16 or DTYPE_BF16 */
    const int32_t *labels; /* one per row, in memory of the host or of the device; NULL: none */
    const uint32_t *numbers; /* one per row, in complete memory of the device: what rows_device_numbers()
                                returns for a kept row; NULL: 0, 1, ... */
    int device;
};

struct rows_device_info {
    int device;
    uint64_t input_rows;
    uint64_t rows;          /* kept rows */
    uint64_t resident_rows; /* rows 0 to resident_rows - 1 are in device memory; the others are in host memory
                               and are copied when they are gathered */
    uint32_t width;         /* values per row, without padding */
    uint32_t padded_width;  /* values per row of a batch */
    enum dtype dtype;       /* of the rows of the set and of its batches */
    uint64_t stride;        /* bytes from one resident row to the next; in a batch: padded_width values */
    uint64_t memory_bytes;  /* device memory that the set holds */
    uint64_t pinned_bytes;  /* pinned host memory that the set holds */
    const void *values;     /* resident rows, in device memory */
    const int32_t *labels;  /* of all kept rows, in device memory; NULL: none */
    const uint32_t *numbers; /* of all kept rows, in device memory; NULL: 0, 1, ... */
    uint64_t numbers_hash;   /* sum of rows_device_number_hash(); 0 if `numbers` is NULL */
};

/* Returns the hash of "row k of a set has this number". The sum over all rows of a set hashes their list. */
FDSL_HD uint64_t rows_device_number_hash(uint64_t k, uint32_t number)
{
    return stream_hash(k << 32 | number);
}

FDSL_C_BEGIN

/* Opens a set of rows in host memory: copies all rows to the device through a ring of pinned memory, applies
 * the steps in one pass (two with `dedup` and for very long rows), and waits for the end. If the kept rows do
 * not fit into the memory limit, the first ones that fit are resident. All labels are on the device, and are
 * not counted.
 *
 * STATUS_USAGE (status_subject() names the field), STATUS_UNAVAILABLE (no such device), STATUS_TOO_LARGE (the
 * limit has no room for one row and the ring), STATUS_EXHAUSTED, or the failure of `copy`. The caller
 * closes the rows; after a failure, `*rows` is NULL. */
enum status rows_device_open(const struct rows_device_request *request, struct rows_device **rows);

/* Opens a set of rows that are in device memory, after the work that is enqueued on `stream`. Waits for the
 * end. Steps that keep all rows as they are copy nothing: batches are then gathered from the caller's memory,
 * which must outlive the set. Otherwise the results are in new memory, and the caller's is not needed again.
 * Errors are those of rows_device_open(); STATUS_TOO_LARGE also if the results do not fit into the limit. */
enum status rows_device_wrap(const struct rows_device_tensor *tensor, const struct rows_device_steps *steps,
                             uint64_t memory_limit, void *stream, struct rows_device **rows);

/* Waits for all batches that were enqueued, also by launches of graphs, and frees the set. Does nothing if
 * `rows` is NULL. Device memory of a closed set is kept for the next one while any set of the same device is
 * open; rows_device_trim() returns it to the device. Closing the last set of a device returns everything. */
void rows_device_close(struct rows_device *rows);
enum status rows_device_trim(int device);

/* Describes the set. The pointers are valid until the set is closed. Thread safe. */
struct rows_device_info rows_device_info(const struct rows_device *rows);

/* Copies the numbers of kept rows [first, first + count) to host memory: those within the input, or those of
 * tensor.numbers. Thread safe. */
enum status rows_device_numbers(const struct rows_device *rows, uint64_t first, uint64_t count, uint32_t *to);

/* The three functions below enqueue the gathering of a batch on `stream`: `count` rows of padded_width values
 * to `out`, without gaps, and their labels to `labels` (int64_t; NULL: not wanted). Both are device memory;
 * `out` is aligned to the size of a value. Batches are written fastest if rows have a multiple of 16 bytes
 * and `out` is aligned to 16 bytes.
 *
 * If all rows are resident: one kernel; no allocation, no synchronisation; thread safe; the call may be
 * captured into a graph. Otherwise: rows that are not resident are copied to pinned memory by threads of the
 * set. The call waits until they are copied; rows_device_ahead() begins before it. Then one thread at
 * a time may gather, and the call cannot be captured. The first call allocates the pinned memory, unless
 * rows_device_reserve() did, and a larger count allocates it again. The bits are the same in both cases.
 *
 * STATUS_USAGE if the set has no labels, or for a capture or an argument that is refused; status_subject()
 * names the argument. */

/* Gathers elements [first, first + count) of the permutation of epoch `epoch`: permutation_begin(seed +
 * epoch, rows) of core/philox.h. Without `shuffle`, the rows in their order. first + count <= rows. */
enum status rows_device_gather(struct rows_device *rows, bool shuffle, uint64_t seed, uint64_t epoch,
                               uint64_t first, uint64_t count, void *out, int64_t *labels, void *stream);

/* Allocates the pinned memory for batches of up to `count` rows. Does nothing if all rows are resident.
 * STATUS_EXHAUSTED or STATUS_TOO_LARGE if there is not enough memory. */
enum status rows_device_reserve(struct rows_device *rows, uint64_t count);

/* Begins to copy the rows of the next call of rows_device_gather(), which has the same arguments. Does
 * nothing if all rows are resident. A failure is returned by that call. */
void rows_device_ahead(struct rows_device *rows, bool shuffle, uint64_t seed, uint64_t epoch, uint64_t first,
                       uint64_t count);

/* Gathers batch number `*step`, which the kernel reads from device memory: an epoch has rows / count batches,
 * and the batch is the one of rows_device_gather() with epoch = step / batches and
 * first = step % batches * count. In a graph that also adds 1 to `*step` (device_add()), each launch gathers
 * the next batch. All rows must be resident, and 1 <= count <= rows. */
enum status rows_device_gather_step(struct rows_device *rows, bool shuffle, uint64_t seed,
                                    const uint64_t *step, uint64_t count, void *out, int64_t *labels,
                                    void *stream);

/* Gathers the rows numbers[0 .. count - 1]; a number may occur more than once.
 * In device memory (`on_device`): all rows must be resident. A number that is not below `rows` gives a row of
 * NaN (each 16 bits are 0x7FFF) and the label -1.
 * In host memory: numbers that are not below `rows` are refused. The numbers are copied before the call
 * returns. The call cannot be captured, and the first call and a larger count allocate pinned memory. */
enum status rows_device_gather_numbers(struct rows_device *rows, const uint32_t *numbers, bool on_device,
                                       uint64_t count, void *out, int64_t *labels, void *stream);

FDSL_C_END

#endif
