/* A variant: one way to do a workload's job, and the table of all of them.
 *
 * A new variant is one file that defines a `const struct variant`, and
 * one line of variants.def. */
#ifndef FDSL_CORE_VARIANT_H
#define FDSL_CORE_VARIANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* What a variant may use of the machine. */
struct resources {
    int threads; /* CPU threads, at least 1 */
    int device;  /* CUDA device number */
};

/* The time of one run. A variant that works on a device also times the work there, on its own stream. */
struct run_time {
    double device_s; /* negative where nothing but the wall clock applies */
};

struct variant {
    /* "cpu" or "cuda": which device the rows name, and whose peaks the roofline takes. */
    const char *platform;

    bool threaded; /* uses resources.threads CPU threads, not one */

    /* Slower where the driver compiles its kernels from PTX for an older architecture than the device's. */
    bool wants_own_architecture;

    /* The vector instructions that the arithmetic of later set-ups uses on this machine: "scalar" (plain
     * loops), "avx2" or "avx512". NULL where the variant does no arithmetic on the CPU: on devices, and in
     * loaders. */
    const char *(*instruction_set)(void);

    /* What the workload's oracle must know of this variant; the workload defines the type (or NULL). */
    const void *traits;

    /* STATUS_OK where this machine can run the variant, or STATUS_UNAVAILABLE and the reason. May be NULL:
     * always available. */
    enum status (*probe)(const struct resources *resources);

    /* Makes `*state` from the workload's input, which outlives it. Nothing here is timed. On failure
     * nothing is left allocated. */
    enum status (*setup)(const struct resources *resources, const void *input, void **state);

    /* Before each run, untimed: what the run must find, such as an empty page cache. May be NULL. */
    enum status (*ready)(void *state, uint64_t number);

    /* The only timed part; blocks until the results are complete. Run number n works on inputs that are a
     * pure function of n, so stale results of an earlier run can never pass for fresh ones. */
    enum status (*run)(void *state, uint64_t number, struct run_time *time);

    /* Copies the results of the latest run out, in the form that the workload defines. Untimed. */
    enum status (*fetch)(void *state, void *result);

    /* Frees the state. */
    void (*teardown)(void *state);
};

/* A run that nobody times. */
static inline enum status variant_run(const struct variant *variant, void *state, uint64_t number,
                                      struct run_time *time)
{
    if (variant->ready)
        TRY(variant->ready(state, number));
    return variant->run(state, number, time);
}

/* A line of the table. `variant` is NULL where this build leaves it out; `needs` says for what. */
struct variant_entry {
    const char *name, *workload, *needs, *summary;
    const struct variant *variant;
};

extern const struct variant_entry variant_table[];
extern const size_t variant_count;

/* Checks the table: unique names, known workloads, every callback there. STATUS_FAILED names the culprit. */
enum status variant_table_check(void);

/* The entry of that name, or NULL. */
const struct variant_entry *variant_find(const char *name);

/* STATUS_USAGE for a name that no entry has, with the nearest one suggested. The message begins with
 * `option`. */
enum status variant_unknown(const char *option, const char *name);

/* Whether the entry can run here: STATUS_OK, or STATUS_UNAVAILABLE with the reason ("not built: ..." where
 * the build leaves it out). */
enum status variant_available(const struct variant_entry *entry, const struct resources *resources);

/* Turns "a,b,c" or "all" into entries of one workload, in the order asked. `workload` may be NULL: then the
 * first name decides (and "all" means synth). `*chosen` (the caller frees it) gets `*count` entries.
 * STATUS_USAGE for an unknown name, with the nearest one suggested, a missing one, and "all" among others. */
enum status variant_select(const char *list, const char *workload, const struct variant_entry ***chosen,
                           size_t *count);

FDSL_C_END

#endif
