/* Internal interface of the workload `ops`: ops.c (options and verification), rows.c (input),
 * measure.c (columns of the rows) and source.c (--prepare). No other file includes this header. */
#ifndef FDSL_OPS_OPS_PARTS_H
#define FDSL_OPS_OPS_PARTS_H

#include "core/record.h"
#include "core/variant.h"
#include "core/workload.h"
#include "machine/guard.h"
#include "ops/input.h"
#include "ops/job.h"
#include "ops/oracle.h"

/* The input, with state that only the workload needs. */
struct ops_job {
    struct ops ops; /* must be the first member: variants cast the input to it */
    struct ops_control control;
    uint64_t rows; /* number of rows of all ranks */
    struct input generated;
    uint8_t *memory;        /* generated rows */
    struct ops_part *parts; /* NULL before the first ops_rows_take() */
    struct embeddings *set; /* NULL: generated rows */
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

/* Opens the files of --data and sets job->set. `tensor` is the value of --tensor, or "". Returns the errors
 * of guard_open() and embeddings_open(). */
enum status ops_rows_open(struct ops_job *job, const char *path, const char *tensor);

/* Generates this rank's rows, or reads its rows of the files into the page cache, unless job->described is
 * set. Replaces the rows of an earlier call. Then sets job->ops.first, count and parts. STATUS_TOO_LARGE if
 * the available memory is too small. STATUS_EXHAUSTED if an allocation fails, STATUS_FAILED if a file cannot
 * be read. */
enum status ops_rows_take(struct ops_job *job, const struct partition *partition);
void ops_rows_free(struct ops_job *job);

/* The names of the steps, indexed by enum ops_step; --steps does not accept "dedup". */
extern const char *const ops_step_names[OPS_STEPS];

/* The workload's columns, and the functions of struct workload that fill them. */
extern const struct column ops_columns[];
enum status ops_observe(const void *input, const struct variant *variant, void *state, struct row *row);
enum status ops_measure(const void *input, const struct variant *variant, void *state, struct row *row);

#endif
