/* Internal interface of the workload `load`: load.c (options, input), load_verify.c (verification),
 * load_cache.c (page cache before a run) and load_measures.c (columns of the rows). No other file includes
 * this header. */
#ifndef FDSL_LOAD_LOAD_PARTS_H
#define FDSL_LOAD_LOAD_PARTS_H

#include "core/variant.h"
#include "core/workload.h"
#include "data/dataset.h"
#include "load/input.h"
#include "load/pictures.h"

#define WARM_SHARE_MIN 0.99 /* a data set counts as warm if at least this share of its pages is resident */

/* The input, and state that variants do not see. */
struct load_job {
    struct load load; /* must be first: variants see only this */
    struct dataset dataset;
    struct load_control control;
    struct pictures pictures; /* training set of --compute train */

    /* Values of `load` and `control`, saved while samples are verified one by one */
    uint32_t epochs;
    struct checksum lost;
};

/* ---- load.c ---- */

/* Returns the work of a run: the samples of this rank, without the samples that the latest run lost. `input`
 * is a struct load. */
struct work load_work(const void *input, const struct variant *variant);

/* ---- load_cache.c ---- */

/* Returns whether Linux hides from this process which pages of the data set are resident. Asks for the first
 * file that can be opened and is not empty. */
bool load_pages_hidden(const struct dataset *dataset);

/* ---- load_verify.c ---- */

/* Returns the order plan of this variant for `threads` threads per rank. The number of threads does not
 * affect which samples a rank reads. */
struct order_plan load_variant_plan(const struct load *load, const struct variant *variant, int threads);

/* Switches verification of individual samples on or off. While it is on, each run is one epoch. Switching it
 * off restores `epochs` and `lost`. */
enum status load_check_closely(void *input, bool closely);

/* Checks that the result belongs to run `number`. Then checks every sample if control->whole is set,
 * otherwise the samples that are still in the buffers. A run without control->whole has already compared its
 * checksum with the expected one. */
enum status load_verify(const void *input, const struct variant *variant, void *state, uint64_t number,
                        uint64_t *wrong);

/* ---- load_measures.c ---- */

/* The workload's columns. load_observe() fills the columns about the latest timed run. load_measure() makes
 * further runs and fills the other columns. */
extern const struct column load_columns[];
enum status load_observe(const void *input, const struct variant *variant, void *state, struct row *row);
enum status load_measure(const void *input, const struct variant *variant, void *state, struct row *row);

/* workload->ranks.check_total(): checks that the ranks together delivered every sample once per epoch. Checks
 * nothing if a run lost samples. STATUS_WRONG if they did not. */
enum status load_check_total(const void *input, const struct row *total);

#endif
