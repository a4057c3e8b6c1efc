/* A variant is one implementation of a workload. This header also declares the table of all variants.
 *
 * To add a variant, write a file that defines a `const struct variant`, and add one line to variants.def. */
#ifndef FDSL_CORE_VARIANT_H
#define FDSL_CORE_VARIANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* The resources that a variant may use. */
struct resources {
    int threads; /* CPU threads, at least 1 */
    int device;  /* CUDA device number */
};

/* The times of one run that the variant reports. The runner measures wall time itself. */
struct run_time {
    double device_s; /* in seconds, from events on the variant's stream; negative if only wall time applies */
    double other_s;  /* in seconds, added to the wall time; may be negative. Time that an earlier process
                      * spent on this run (--resume), minus pauses that are not part of the run */
};

struct variant {
    /* "cpu" or "cuda": selects the device named in the rows and the peaks for the roofline. */
    const char *platform;

    bool threaded; /* uses resources.threads CPU threads instead of one */

    /* true: the variant is slower if the driver compiles its kernels from PTX of an older architecture. */
    bool wants_own_architecture;

    /* Returns the vector instructions that the variant uses on this machine: "scalar" (plain loops), "avx2"
     * or "avx512". This function is NULL for variants without arithmetic on the CPU, such as GPU variants and
     * loaders. */
    const char *(*instruction_set)(void);

    /* Properties of this variant that the workload needs to verify it; the workload defines the type. May be
     * NULL. */
    const void *traits;

    /* Returns STATUS_OK if this machine can run the variant, else STATUS_UNAVAILABLE with the reason. If this
     * function is NULL, the variant is always available. */
    enum status (*probe)(const struct resources *resources);

    /* Creates `*state` from the workload's input. `*state` is NULL before the call; `input` must outlive the
     * state. Not timed. The caller tears the state down unless it is NULL, even after a failure. */
    enum status (*setup)(const struct resources *resources, const void *input, void **state);

    /* Called before each run, not timed: prepares the machine, for example empties the page cache. May be
     * NULL. */
    enum status (*ready)(void *state, uint64_t number);

    /* The only timed part. Blocks until the results are complete. The inputs of run `number` are a pure
     * function of `number`, so that verification can detect results of an earlier run. */
    enum status (*run)(void *state, uint64_t number, struct run_time *time);

    /* Copies the results of the latest run into `result`, whose type the workload defines. Not timed. */
    enum status (*fetch)(void *state, void *result);

    /* Frees the state, even if setup() failed. */
    void (*teardown)(void *state);
};

/* Prepares and performs one untimed run. */
static inline enum status variant_run(const struct variant *variant, void *state, uint64_t number,
                                      struct run_time *time)
{
    if (variant->ready)
        TRY(variant->ready(state, number));
    return variant->run(state, number, time);
}

/* One line of variants.def. `variant` is NULL if this build lacks the feature named by `needs`. */
struct variant_entry {
    const char *name, *workload, *needs, *summary;
    const struct variant *variant;
};

extern const struct variant_entry variant_table[];
extern const size_t variant_count;

/* Checks that names are unique, workloads exist and no callback is missing. STATUS_FAILED with the name of
 * the entry if not. */
enum status variant_table_check(void);

/* Returns the entry with this name, or NULL. */
const struct variant_entry *variant_find(const char *name);

/* Sets the error message for an unknown variant and suggests the nearest name. The message begins with
 * `option`. Always returns STATUS_USAGE. */
enum status variant_unknown(const char *option, const char *name);

/* Returns STATUS_OK if the variant can run here, else STATUS_UNAVAILABLE with the reason ("not built: ..." if
 * the build lacks it). */
enum status variant_available(const struct variant_entry *entry, const struct resources *resources);

/* Returns whether a value of --variant asks for the best variant that can run. */
static inline bool variant_is_auto(const char *list)
{
    return strcmp(list, "auto") == 0;
}

/* Parses "a,b,c", "all" or "auto" into entries of one workload, in the given order. "auto" gives the
 * candidates, the best first. If `workload` is NULL, the first name selects it, and "all" and "auto" mean
 * synth. `*chosen` becomes an array of `*count` entries, which the caller frees. STATUS_USAGE for an unknown
 * name (suggests the nearest one), an empty or repeated name, a name of another workload, or "all" or "auto"
 * in a list. */
enum status variant_select(const char *list, const char *workload, const struct variant_entry ***chosen,
                           size_t *count);

FDSL_C_END

#endif
