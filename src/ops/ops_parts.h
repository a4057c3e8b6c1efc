/* Internal interface of the workload `ops`: ops.c (options, input, verification) and measure.c (columns of
 * the rows). No other file includes this header. */
#ifndef FDSL_OPS_OPS_PARTS_H
#define FDSL_OPS_OPS_PARTS_H

#include "core/measures.h"
#include "core/variant.h"
#include "ops/input.h"
#include "ops/job.h"
#include "ops/oracle.h"

/* The input, with state that only the workload needs. */
struct ops_job {
    struct ops ops; /* must be the first member: variants cast the input to it */
    struct ops_control control;
    uint64_t rows; /* of all ranks */
    struct input generated;
    uint8_t *memory; /* the rows */
    struct ops_oracle *oracle;
};

/* The names of the steps, indexed by enum ops_step; "dedup" is part of no list of --steps. */
extern const char *const ops_step_names[OPS_STEPS];

/* The workload's columns, and the functions of struct workload that fill them. */
extern const struct measure ops_measures[];
enum status ops_observe(const void *input, const struct variant *variant, void *state,
                        struct measures *measures);
enum status ops_measure(const void *input, const struct variant *variant, void *state,
                        struct measures *measures);

#endif
