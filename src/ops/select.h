/* Chooses rows of a set of embeddings, as the steps of `ops` do: with any variant and a caller that has the
 * rows (ops_scan()), or with the variant `ops-omp` (in builds without OpenMP: `ops-naive`) from files
 * (ops_select()). */
#ifndef FDSL_OPS_SELECT_H
#define FDSL_OPS_SELECT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "data/embeddings.h"
#include "ops/job.h"

/* The check of many rows: which are valid, and which have the bytes of an earlier row. */
struct ops_scan {
    uint64_t count, chunk;     /* rows, and rows per run of the variant; both at least 1 */
    bool mask;                 /* drop rows that the variant does not keep */
    bool hash;                 /* `hashes` is wanted, or needed for `dedup` */
    bool dedup;                /* drop rows whose hash equals that of an earlier row that is kept */
    int threads;               /* at least 1 */
    const char *advice;        /* of messages about memory that runs out */
    const atomic_bool *cancel; /* another thread sets it to end the call before the next chunk; NULL: none */
    const struct variant *variant;
    /* Runs the variant, with the step OPS_HASH if `hash` is set, on rows first .. first + count - 1. Sets
     * `*state` to its state, which is valid until the next call. */
    enum status (*run)(void *context, uint64_t first, uint64_t count, void **state);
    void *context;

    uint8_t *kept;        /* result, one per row: whether no step has dropped it; owned */
    uint64_t *hashes;     /* result, one per row: its XXH3-64; NULL without `hash`; owned */
    uint64_t valid, left; /* results: rows that the mask has kept, and all steps */
};

/* The steps, in the order in which they run. */
struct ops_select {
    bool mask;                /* remove rows whose norm is out of bounds or not finite */
    float norm_min, norm_max; /* both inclusive; only with `mask` */
    bool dedup;               /* remove rows whose hash equals that of an earlier row that was kept */
    uint64_t sample; /* draw this many of the remaining rows, as run 0 does with --sample; 0: keep all */
    uint64_t seed;   /* of the draw */
    int threads;     /* at least 1 */
    const atomic_bool *cancel; /* another thread sets it to end the call before the next chunk; NULL: none */
};

struct ops_selected {
    uint32_t *rows; /* numbers of the kept rows in the set; owned */
    uint64_t count;
    uint64_t invalid, duplicates, unsampled; /* rows that each step removed */
};

/* Checks all rows. The caller frees the results with ops_scan_free(), even after a failure. STATUS_TOO_LARGE
 * or STATUS_EXHAUSTED if memory runs out; STATUS_FAILED after a cancellation; or the failure of `run`. */
enum status ops_scan(struct ops_scan *scan);
void ops_scan_free(struct ops_scan *scan);

/* Chooses among the rows rows[0] .. rows[count - 1] of the set (NULL: rows 0 to count - 1). The set has at
 * most 2^32 - 1 rows. The result has the order of `rows`, with `sample` that of the draw. Reads all these
 * rows with embeddings_read(), but only for a mask or dedup; the values pass through a buffer of at most 16
 * MiB.
 *
 * The caller frees selected->rows; NULL after a failure. STATUS_USAGE if fewer than `sample` rows
 * remain. STATUS_FAILED if a file cannot be read or has changed, or after a cancellation. STATUS_TOO_LARGE or
 * STATUS_EXHAUSTED if memory runs out. STATUS_UNAVAILABLE in builds without xxHash. */
enum status ops_select(const struct embeddings *set, const uint32_t *rows, uint64_t count,
                       const struct ops_select *how, struct ops_selected *selected);

#endif
