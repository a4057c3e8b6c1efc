/* A workload: a job's inputs, the work that is in it, and the oracle that says what is right. */
#ifndef FDSL_CORE_WORKLOAD_H
#define FDSL_CORE_WORKLOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "core/compute.h"
#include "core/consumer.h"
#include "core/measures.h"
#include "core/options.h"
#include "core/partition.h"
#include "core/roofline.h"
#include "core/status.h"
#include "core/variant.h"

/* The work of one run. */
struct work {
    double items;            /* images, samples, ... */
    double bytes;            /* of the finished images, or of the samples: the numerator of bytes_per_s */
    struct least_work least; /* for the roofline */
};

struct workload {
    const char *name, *summary;
    const char *schema; /* of its rows: "synth/3" */
    const char *item;   /* the unit of work.items in the plural: "images" */

    /* Options of this workload. Those with `column` set become CSV columns, in this order. */
    const struct option_spec *options;
    size_t option_count;
    size_t parameters_bytes; /* size of the struct that the options fill */

    /* Names of those that only one variant may be given, as several would write the same; NULL-terminated.
     * May be NULL: none. */
    const char *const *single;

    /* The variants that the column `speedup` compares with: the first one that is among those of a call.
     * NULL-terminated. */
    const char *const *baselines;

    /* The workload's own CSV columns; the last one's name is NULL. */
    const struct measure *measures;

    /* Those of them that the table shows as well, NULL-terminated. May be NULL: none. */
    const char *const *shown;

    /* Checks the parameters, completes those whose default depends on others, and makes the input that
     * variants work on, for the share of `partition`. The caller closes it. */
    enum status (*open)(const struct options *options, void *parameters, const struct partition *partition,
                        void **input);
    void (*close)(void *input);

    /* Changes the input to the share of another rank or number of ranks, while no variant is set up, and
     * `parameters` to what its row shows. STATUS_USAGE where a rank would have no share. */
    enum status (*repartition)(void *input, void *parameters, const struct partition *partition);

    /* Whether a parameter means anything among these to the variant (NULL: to some variant); where not, its
     * column stays empty. May be NULL: always. */
    bool (*applies)(const void *parameters, const struct variant *variant, const char *option);

    /* Whether the variant can make what `input` asks for: STATUS_OK, or STATUS_USAGE and the reason, which
     * speaks of the variant as "it". May be NULL: always. */
    enum status (*accepts)(const void *input, const struct variant *variant);

    /* The state of the page cache that runs begin with, for the column `cache`. May be NULL: none. */
    const char *(*cache)(const void *input);

    /* The work of one run of the variant on `input`: before any, and of the latest ones. */
    struct work (*work)(const void *input, const struct variant *variant);

    /* Counts the items in the latest run of `state` that differ from the oracle. `number` is the run that it
     * should be: the result of another one is wrong as a whole. Does not run the variant, whose results stay
     * as they are. With more(), 0 comes before the first run and has steps checked from there on. */
    enum status (*verify)(const void *input, const struct variant *variant, void *state, uint64_t number,
                          uint64_t *wrong);

    /* Sets the measures that describe the latest timed run, before `state` or the machine changes. May be
     * NULL. */
    enum status (*observe)(const void *input, const struct variant *variant, void *state,
                           struct measures *measures);

    /* Sets the other measures, after the last run has been verified; may run the variant again. May be NULL.
     */
    enum status (*measure)(const void *input, const struct variant *variant, void *state,
                           struct measures *measures);

    /* Writes what the user asked to see of run number 0, which `state` has completed. `name` is the variant's
     * where several variants deliver, else NULL. May be NULL. */
    enum status (*deliver)(const void *input, const char *name, const struct variant *variant, void *state);

    /* For workloads that check more than verify() sees. */
    struct {
        bool every_run; /* every run checks its results and fails with STATUS_WRONG, so rows have `wrong`
                         * without
                         * --verify, too */

        /* Switches checks of each item at its delivery on or off, for results that are gone after a run. Runs
         * with these checks are not timed. May be NULL. */
        enum status (*closely)(void *input, bool closely);

        /* Describes what verify() found wrong: "9 of 10 losses". May be NULL: the number of items is shown.
         */
        void (*verdict)(const void *input, void *state, char *text, size_t size);
    } checks;

    /* For workloads whose ranks share data. */
    struct {
        bool share_items; /* the items of a run are divided among the ranks: scaling is always strong */

        /* A hash of the contents of the files that the options name: all ranks must have the same. May be
         * NULL. */
        uint64_t (*identity)(const void *input);

        /* On rank 0, with several ranks: checks by the measures of the row of all ranks that together they
         * did what one rank would have done. STATUS_WRONG with the reason; the row is not written then. May
         * be NULL. */
        enum status (*check_total)(const void *input, const struct measures *total);
    } ranks;

    /* For workloads whose batches a training step may consume (--compute): `step` and one of the two others.
     * run/consumed.h does the rest. */
    struct {
        /* The training step in `parameters`; complete once the input is open, before that it only tells
         * whether there is one. NULL: batches are never consumed. */
        const struct compute *(*step)(const void *parameters);

        /* One batch per run: passes the batch of run `number`, the latest of `state`, to the consumer.
         * `*done_event` becomes the event after its step where the batch must stay unchanged until then; else
         * it stays NULL. */
        enum status (*hand_over)(const void *input, const struct variant *variant, void *state,
                                 uint64_t number, struct consumer *consumer, void **done_event);

        /* Many batches per run: from now on variants pass each batch to the consumer (NULL: to none). */
        void (*set_consumer)(void *input, struct consumer *consumer);
    } batches;

    /* For workloads whose runs are epochs: every run is a row, and no other run comes before the first or
     * between them. verify() with number 0 is called before the first. All NULL otherwise. */
    struct {
        /* Whether another epoch follows. */
        bool (*more)(const void *input, void *state);

        /* Saves `state` and the row of its last epoch as CSV (header and line), before the row is written: a
         * kill at any moment loses neither. */
        enum status (*keep)(const void *input, void *state, const char *row);

        /* The row that was saved with the state that `state` continues from; "" for none. The state's. It may
         * not have been written. */
        const char *(*kept)(const void *state);

        /* After the last epoch and its row: writes the final results that the user asked for. `runs` epochs
         * were run. */
        enum status (*end)(const void *input, void *state, uint64_t runs);
    } epochs;
};

/* All workloads, NULL-terminated. */
extern const struct workload *const workload_table[];

/* The workload of that name, or NULL. */
const struct workload *workload_find(const char *name);

#endif
