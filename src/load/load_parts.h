/* What load.c and load_measures.c (columns of the rows) share. */
#ifndef FDSL_LOAD_LOAD_PARTS_H
#define FDSL_LOAD_LOAD_PARTS_H

#include "core/variant.h"
#include "core/workload.h"
#include "load/input.h"
#include "load/verifier.h"

/* Returns the work of a run: the samples of this rank, without the samples that the latest run lost. `input`
 * is a struct load. */
struct work load_work(const void *input, const struct variant *variant);

/* Returns the order plan of this variant for `threads` threads per rank. The number of threads does not
 * affect which samples a rank reads. */
struct order_plan load_variant_plan(const struct load *load, const struct variant *variant, int threads);

/* The workload's columns. load_observe() fills the columns about the latest timed run. load_measure() makes
 * further runs and fills the other columns. */
extern const struct column load_columns[];
enum status load_observe(const void *input, const struct variant *variant, void *state, struct row *row);
enum status load_measure(const void *input, const struct variant *variant, void *state, struct row *row);

/* workload->ranks.check_total(): checks that the ranks together delivered every sample once per epoch. Checks
 * nothing if a run lost samples. STATUS_WRONG if they did not. */
enum status load_check_total(const void *input, const struct row *total);

#endif
