/* Internal interface of the workload `load`: load.c (options, input, verification), load_cache.c (page cache
 * before a run) and load_measures.c (columns of the rows). No other file includes this header. */
#ifndef FDSL_LOAD_LOAD_PARTS_H
#define FDSL_LOAD_LOAD_PARTS_H

#include "core/variant.h"
#include "core/workload.h"
#include "load/input.h"

#define WARM_SHARE_MIN 0.99 /* a data set counts as warm if at least this share of its pages is resident */

/* ---- load.c ---- */

/* Returns the order plan of this variant for `threads` threads per rank. The number of threads does not
 * affect which samples a rank reads. */
struct order_plan load_variant_plan(const struct load *load, const struct variant *variant, int threads);

/* Returns the work of a run: the samples of this rank, without the samples that the latest run lost. `input`
 * is a struct load. */
struct work load_work(const void *input, const struct variant *variant);

/* ---- load_measures.c ---- */

/* The workload's columns. load_observe() fills the columns about the latest timed run. load_measure() makes
 * further runs and fills the other columns. */
extern const struct measure load_measures[];
enum status load_observe(const void *input, const struct variant *variant, void *state,
                         struct measures *measures);
enum status load_measure(const void *input, const struct variant *variant, void *state,
                         struct measures *measures);

/* workload->ranks.check_total(): checks that the ranks together delivered every sample once per epoch.
 * STATUS_WRONG if they did not. */
enum status load_check_total(const void *input, const struct measures *total);

#endif
