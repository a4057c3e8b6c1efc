/* The workload `ops` apart from its variants, which see only ops/job.h: ops.c (rows, options, columns),
 * oracle.c (verification) and source.c (--prepare). */
#ifndef FDSL_OPS_OPS_H
#define FDSL_OPS_OPS_H

#include "core/record.h"
#include "core/variant.h"
#include "core/workload.h"
#include "machine/guard.h"
#include "ops/job.h"

/* ---- Generated rows ---- */

#define INPUT_ROWS_MAX 4294967295.0 /* the products in generated_is_bad() fit into 64 bits */

/* Generated rows: any row can be computed alone. docs/ops.md defines them. */
struct generated_rows {
    uint64_t seed;
    uint32_t columns;
    enum dtype dtype;
    uint64_t bad, duplicates; /* shares of the rows, times 2^32 */
};

FDSL_C_BEGIN

/* Returns the definition of the rows. `bad` and `duplicates` are shares of the rows, from 0 to 1. */
struct generated_rows generated_begin(uint64_t seed, uint32_t columns, enum dtype dtype, double bad,
                                      double duplicates);

/* Returns whether a row is bad. Consecutive bad rows are of five kinds in turn: too small, too large, NaN,
 * infinity, zero. */
bool generated_is_bad(const struct generated_rows *rows, uint64_t row);

/* Returns the row that defines the values of `row`: `row` itself, or an earlier row if `row` is a duplicate.
 */
uint64_t generated_source(const struct generated_rows *rows, uint64_t row);

/* Writes the `columns` values of a row, in the type `dtype`. */
void generated_fill(const struct generated_rows *rows, uint64_t row, void *values);

FDSL_C_END

/* ---- Verification ---- */

/* Verifies the results of `ops` variants: recomputes all of them, one row at a time, with the definitions in
 * ops/row.h. */
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

/* ---- The input ---- */

/* The input, with state that only the workload needs. */
struct ops_job {
    struct ops ops; /* must be the first member: variants cast the input to it */
    struct ops_control control;
    uint64_t rows; /* number of rows of all ranks */
    struct generated_rows generated;
    uint8_t *memory;        /* generated rows, or decoded rows of files */
    struct ops_part *parts; /* NULL before the first ops_rows_take() */
    struct embeddings *set; /* NULL: generated rows */
    uint64_t hash;          /* of `set` (embedding_hash()), if there are several ranks */
    struct guard guard;     /* guards the files of `set` */
    double load_s;          /* time until the rows were in memory */
    struct ops_oracle *oracle;
    bool described; /* --dry-run: there are no rows; only their number and size are known */
};

/* Range of --norm-min (if it is not 0) and --norm-max. In this range, the square of a norm is a normal
 * float. */
#define OPS_NORM_LEAST 1e-15
#define OPS_NORM_MOST  1e19

/* The choices of --to, in the order of enum ops_type, and of --fp8. */
extern const char *const ops_type_names[], *const ops_fp8_modes[];

/* Checks --norm-min and --norm-max. STATUS_USAGE with a remedy. */
enum status ops_check_bounds(double norm_min, double norm_max);

/* Returns the output type of rows that are not converted. */
static inline enum ops_type ops_stored_type(enum dtype type)
{
    return type == DTYPE_F32 ? OPS_F32 : type == DTYPE_F16 ? OPS_F16 : OPS_BF16;
}

#endif
