/* The interface between the workload `ops` and its variants. A variant passes a set of rows through steps:
 * norm mask, compaction, permutation, conversion, hash. docs/ops.md defines the steps and their results. */
#ifndef FDSL_OPS_JOB_H
#define FDSL_OPS_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/philox.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/embeddings.h"
#include "ops/row.h"

/* Steps in the order in which they run. OPS_DEDUP cannot be named in --steps; the option --dedup adds it. */
enum ops_step { OPS_MASK, OPS_DEDUP, OPS_COMPACT, OPS_PERMUTE, OPS_CONVERT, OPS_HASH, OPS_STEPS };

/* Consecutive rows without gaps, of the type struct ops_format.from. Rows of files may be unaligned. */
struct ops_part {
    const uint8_t *rows;
    uint64_t first, count; /* `first` is the position of the first row within this rank's rows */
};

/* Settings that change between runs. */
struct ops_control {
    bool timed; /* measure the time of each step, also in variants that combine steps in one pass */
};

/* The input. Run n processes the rows of this rank rotated by n: row i of the run is row (i + n) mod count of
 * the rank. The permutation of run n has the seed `seed` + n. The results of consecutive runs therefore
 * differ. If `sample` is not 0, the rows are not rotated, and consecutive runs draw consecutive batches of
 * one permutation (ops_draw()).
 *
 * Between runs, the owner of the input may change the rows: `parts`, and `count` to a value that is not
 * larger than at setup(). Rows must not be resident then. */
struct ops {
    bool steps[OPS_STEPS];
    struct ops_format format; /* `to` is the stored type if rows are not converted */
    bool scaled;              /* format.tensor_scale is given; otherwise the variant computes it */
    float norm_min, norm_max;
    uint64_t sample; /* number of output rows that a permutation selects; 0: all rows */
    uint64_t seed;
    uint64_t first, count; /* this rank's rows; `first` is the number of the first row within the set */
    const struct ops_part *parts; /* the rows; empty parts are left out */
    size_t part_count;
    size_t row_bytes;
    const struct embeddings *set; /* NULL: generated rows */
    struct ops_control *control;

    /* For variants on a GPU. */
    bool resident; /* the rows are copied to the device before the timing */
    bool async;    /* chunks are filled, copied and processed at the same time */
    bool pool;     /* memory of a run comes from a pool */
    uint32_t ring; /* chunks in flight */
    uint64_t chunk_bytes;
    uint64_t memory_limit; /* bytes of device memory; 0: all free memory */
};

#define OPS_ALIGNMENT 64 /* cache line */

/* A permutation of candidate rows, and the index of its element for output row 0. */
struct ops_draw {
    struct permutation permutation;
    uint64_t first;
};

/* Returns the candidate row for output row j. */
FDSL_HD uint64_t ops_drawn(const struct ops_draw *draw, uint64_t j)
{
    return permutation_at(&draw->permutation, draw->first + j);
}

/* The results of a run. Each output row is computed from one input row. */
enum ops_array {
    OPS_KEPT, /* uint8_t per input row of the run: 1 if it is valid (and, with dedup, no duplicate), else 0 */
    OPS_ORDER,  /* uint64_t per output row: the number of its input row within the set */
    OPS_VALUES, /* the values of the output rows, ops_value_bytes() each */
    OPS_SCALES, /* the scales of the output rows, ops_scale_bytes() each */
    OPS_HASHES, /* uint64_t per output row: XXH3-64 of the stored bytes of its input row */
    OPS_ARRAYS
};

struct ops_summary {
    uint64_t number;          /* number of the run; UINT64_MAX before the first */
    uint64_t kept;            /* input rows that the mask and dedup kept; all rows without these steps */
    uint64_t outputs;         /* output rows */
    float tensor_scale;       /* NVFP4 */
    double step_s[OPS_STEPS]; /* mean over the threads; negative if unknown */
    uint64_t copied_bytes;    /* bytes of rows copied to the device during the run; 0: none */
    uint64_t memory_bytes;    /* allocated for results and scratch memory; excludes the input */
};

/* fetch() copies elements [first, first + count) of one array to host memory, unless `to` is NULL, and fills
 * `summary`. */
struct ops_fetch {
    enum ops_array array;
    uint64_t first, count;
    void *to;
    struct ops_summary summary;
};

/* Properties of a variant of `ops`. */
struct ops_traits {
    /* Measures the reference bandwidth of the memory that stores the rows, in bytes per second. On the CPU,
     * this is STREAM triad with the threads of the variant; on a device, a copy. */
    enum status (*stream)(void *state, double *bytes_per_s);
    bool device; /* uses the options for GPUs */
};

FDSL_C_BEGIN

/* Returns the shift of run `number`: the position, within this rank's rows, of row 0 of the run. */
static inline uint64_t ops_shift(const struct ops *ops, uint64_t number)
{
    return ops->count && !ops->sample ? number % ops->count : 0;
}

/* Converts row number `i` of a run with this shift to a position within this rank's rows. */
static inline uint64_t ops_position(const struct ops *ops, uint64_t shift, uint64_t i)
{
    return i < ops->count - shift ? i + shift : i + shift - ops->count;
}

/* Returns the row at a position, and sets `*count` to the number of rows that are contiguous from this row
 * on. Thread safe. */
const uint8_t *ops_span(const struct ops *ops, uint64_t position, uint64_t *count);

/* Returns the row at a position. Thread safe. */
static inline const uint8_t *ops_row(const struct ops *ops, uint64_t position)
{
    uint64_t count;
    return ops->part_count == 1 ? ops->parts->rows + position * ops->row_bytes
                                : ops_span(ops, position, &count);
}

/* Variants call this function after they have read rows. STATUS_FAILED if rows of a file could not be read,
 * for example because the file became shorter: the values of these rows are then wrong. */
enum status ops_check_rows(const struct ops *ops);

/* Returns the bytes per element of a result; 0 if no step of `ops` has this result. */
size_t ops_array_bytes(const struct ops *ops, enum ops_array array);

/* Returns the draw of run `number` if the mask and dedup keep `kept` rows. The candidate rows are the kept
 * rows if the step compact runs, else all rows. With `sample`, an epoch is floor(candidates / sample)
 * consecutive runs, which draw no row twice. The next epoch has another permutation. */
struct ops_draw ops_draw(const struct ops *ops, uint64_t number, uint64_t kept);

/* Returns the number of output rows if the mask and dedup keep `kept` rows. */
uint64_t ops_outputs(const struct ops *ops, uint64_t kept);

/* Returns the least number of bytes that any implementation of these steps must read and write: the input
 * rows that it needs, and the results. */
double ops_least_bytes(const struct ops *ops, uint64_t kept);

/* ---- For variants on the CPU ---- */

/* Results in host memory. An array is NULL if no step has this result. */
struct ops_results {
    struct ops_summary summary;
    uint8_t *kept;
    uint64_t *order;
    uint8_t *values, *scales;
    uint64_t *hashes;
    uint64_t *rows;               /* the kept rows of the run, in order; NULL unless needed */
    uint64_t *table, *row_hashes; /* dedup: the hash table, and one hash per row of the run */
};

/* Allocates results for the largest number of output rows. The caller frees them, even after a failure. */
enum status ops_results_open(const struct ops *ops, struct ops_results *results);
void ops_results_free(struct ops_results *results);

/* Implements fetch() of a variant whose results are in host memory. */
enum status ops_results_fetch(const struct ops *ops, const struct ops_results *results,
                              struct ops_fetch *fetch);

/* Allocates memory that is aligned to OPS_ALIGNMENT bytes. Asks Linux for huge pages if it is large. Returns
 * NULL if memory runs out. */
void *ops_allocate(size_t bytes);

/* Returns the number of slots of the hash table for `count` rows: a power of two, at least twice the count.
 */
static inline uint64_t duplicates_slots(uint64_t count)
{
    uint64_t slots = 2;
    while (slots < 2 * count)
        slots *= 2;
    return slots;
}

/* Sets kept[i] to 0 for every kept row whose hash equals that of an earlier kept row. `table` has
 * duplicates_slots(count) elements and is overwritten. The result does not depend on the number of threads.
 */
void duplicates_drop(int threads, const uint64_t *hashes, uint64_t count, uint8_t *kept, uint64_t *table);

/* Converts a row with the vector instructions of this machine: the bits of ops_convert_row(). Only in builds
 * with OpenMP and xxHash. Thread safe. */
void ops_convert_fast(const struct ops_format *format, const void *row, uint8_t *values, uint8_t *scales);

/* Measures STREAM triad, a[i] = b[i] + 3 c[i], on `threads` threads: 24 bytes per element, the best of a few
 * repetitions. The three arrays together have `bytes` bytes, but at least 192 KiB and at most 384 MiB.
 * STATUS_EXHAUSTED if memory runs out. */
enum status stream_triad(int threads, uint64_t bytes, double *bytes_per_s);

FDSL_C_END

#endif
