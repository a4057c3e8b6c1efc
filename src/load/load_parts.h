/* Internal interface of the workload `load`: load.c (options, input, verification), load_cache.c (the page
 * cache before a run) and load_measures.c (its columns). No other file includes this header. */
#ifndef FDSL_LOAD_LOAD_PARTS_H
#define FDSL_LOAD_LOAD_PARTS_H

#include "core/variant.h"
#include "core/workload.h"
#include "load/input.h"

#define WARM_SHARE_MIN 0.99 /* minimum fraction of resident pages for a data set to count as warm */

/* ---- load.c ---- */

/* Returns the order plan of this variant for `threads` threads per rank. All workers together read the same
 * samples for any number of threads. */
struct order_plan load_variant_plan(const struct load *load, const struct variant *variant, int threads);

/* Work of a run: the delivered samples, without those lost in the latest run. `input` is a struct load. */
struct work load_work(const void *input, const struct variant *variant);

/* ---- load_measures.c ---- */

/* The workload's columns. load_observe() fills those of the latest timed run; load_measure() makes further
 * runs and fills the others. */
extern const struct measure load_measures[];
enum status load_observe(const void *input, const struct variant *variant, void *state,
                         struct measures *measures);
enum status load_measure(const void *input, const struct variant *variant, void *state,
                         struct measures *measures);

/* workload->ranks.check_total(): whether the ranks together delivered every sample as often as their epochs
 * require. */
enum status load_check_total(const void *input, const struct measures *total);

#endif
