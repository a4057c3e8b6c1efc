/* Verifies the results of `ops` variants: recomputes all of them, one row at a time, with the definitions in
 * ops/row.h. */
#ifndef FDSL_OPS_ORACLE_H
#define FDSL_OPS_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "core/variant.h"
#include "ops/job.h"

/* Properties of this rank's rows, indexed by position. */
struct ops_oracle {
    uint8_t *valid; /* 1 if the mask keeps the row; all 1 without a mask */
    uint64_t valid_count;
    uint64_t *hashes;  /* XXH3-64 of the stored bytes of each row; NULL until ops_oracle_hash() */
    uint64_t *by_hash; /* the valid rows in order of their hashes, then of their positions */
    uint64_t distinct; /* number of different hashes of valid rows */
};

/* Computes which rows are valid. The caller frees the oracle, even after a failure. STATUS_EXHAUSTED if
 * memory runs out. */
enum status ops_oracle_open(const struct ops *ops, struct ops_oracle *oracle);
void ops_oracle_free(struct ops_oracle *oracle);

/* Computes `hashes`, `by_hash` and `distinct`, unless an earlier call has done so. STATUS_EXHAUSTED if memory
 * runs out. */
enum status ops_oracle_hash(const struct ops *ops, struct ops_oracle *oracle);

/* Counts the wrong input rows of run `number`. An input row is wrong if its mask value is wrong, or if its
 * output row has a wrong number, value, scale or hash. All rows count as wrong if the number of the run, the
 * number of kept rows, the number of output rows or the tensor scale is wrong. Returns the errors of fetch(),
 * or STATUS_EXHAUSTED if memory runs out. */
enum status ops_oracle_verify(const struct ops *ops, struct ops_oracle *oracle, const struct variant *variant,
                              void *state, uint64_t number, uint64_t *wrong);

#endif
