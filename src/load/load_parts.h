/* What the parts of the workload `load` share: load.c (options, input, verification), load_cache.c (the page
 * cache before a run) and load_measures.c (its columns). Nothing else includes this. */
#ifndef FDSL_LOAD_LOAD_PARTS_H
#define FDSL_LOAD_LOAD_PARTS_H

#include "core/variant.h"
#include "core/workload.h"
#include "load/input.h"

#define WARM_SHARE_MIN 0.99 /* of the pages of a data set that is called warm */

/* ---- load.c ---- */

/* The orders that `threads` threads of this variant follow on each rank; together they take the same samples
 * for any number. */
struct order_plan load_variant_plan(const struct load *load, const struct variant *variant, int threads);

/* What a run delivers: what was lost in the latest one is not in it. `input` is a struct load. */
struct work load_work(const void *input, const struct variant *variant);

/* ---- load_measures.c ---- */

/* The workload's columns, and what fills them: those of the latest timed run, and those that runs after it
 * are made for. */
extern const struct measure load_measures[];
enum status load_observe(const void *input, const struct variant *variant, void *state,
                         struct measures *measures);
enum status load_measure(const void *input, const struct variant *variant, void *state,
                         struct measures *measures);

/* Whether the ranks together delivered every sample as often as their epochs say:
 * workload->ranks.check_total(). */
enum status load_check_total(const void *input, const struct measures *total);

#endif
