/* A workload defines the inputs, the amount of work, and the reference that results are checked against. */
#ifndef FDSL_CORE_WORKLOAD_H
#define FDSL_CORE_WORKLOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "core/compute.h"
#include "core/consumer.h"
#include "core/options.h"
#include "core/record.h"
#include "core/parallel.h"
#include "core/roofline.h"
#include "core/status.h"
#include "core/variant.h"

/* The work of one run. */
struct work {
    double items; /* images, samples, ... */
    double bytes; /* bytes of the generated images or delivered samples: the numerator of bytes_per_s */
    struct least_work least; /* for the roofline */
};

struct workload {
    const char *name, *summary;
    const char *schema; /* name and version of the row format: "synth/8" */
    const char *item;   /* the unit of work.items, plural: "images" */

    /* Options of this workload. Options with `column` set become CSV columns, in this order. */
    const struct option_spec *options;
    size_t option_count;
    const struct option_section *option_sections; /* the sections of --help, as in struct option_group */
    size_t parameters_bytes;                      /* size of the struct that the options fill */

    /* Returns the new defaults (struct options) that a command line asks for. NULL: the workload replaces no
     * defaults. */
    const char *const *(*defaults)(int argc, char *const argv[]);

    /* Names of options that are allowed only with a single variant, because several variants would write to
     * the same file. NULL-terminated. NULL if there are none. */
    const char *const *single;

    /* Name of the CPU variant that replaces GPU variants on ranks that --rank-device assigns to the CPU.
     * NULL: there is none. */
    const char *cpu_stand_in;

    /* Names of variants that can be the baseline of the column `speedup`. Without --baseline, the first name
     * that is among the chosen variants is used. NULL-terminated. */
    const char *const *baselines;

    /* The workload's own columns; ends with an entry whose name is NULL. */
    const struct column *columns;

    /* Columns that the table on stdout shows in addition to the common columns, NULL-terminated. NULL if
     * there are none. */
    const char *const *shown;

    bool shows_p99; /* the table on stdout also shows the 99th percentile of the time, because it matters as a
                       latency */

    /* Checks the parameters, fills in defaults that depend on other parameters, and creates the input for
     * this rank's share of `partition`. `*input` is NULL before the call. The caller closes it unless it is
     * still NULL, even after a failure. */
    enum status (*open)(const struct options *options, void *parameters, const struct partition *partition,
                        void **input);
    void (*close)(void *input);

    /* Changes the input to this rank's share of another `partition`. Sets the values in `parameters` that
     * depend on the share, because the rows show them. Called only while no variant is set up. STATUS_USAGE
     * if a rank has no share. */
    enum status (*repartition)(void *input, void *parameters, const struct partition *partition);

    /* Returns whether an option has an effect on the variant (NULL: on any variant) with these parameters. If
     * not, its column stays empty. If this function is NULL, all options have an effect. */
    bool (*applies)(const void *parameters, const struct variant *variant, const char *option);

    /* Does the part of accepts() that needs no input, so that a wrong option is an error before the data are
     * read. Called before open() for variants that are given by name, after validate(), and for all variants
     * after accepts(). If this function is NULL, every variant supports all options.
     *
     * validate() checks the options as open() does, before it reads data. It changes nothing. NULL: nothing
     * to check. */
    enum status (*validate)(const struct options *given, const void *parameters,
                            const struct partition *partition);
    enum status (*suits)(const struct options *given, const void *parameters, const struct variant *variant);

    /* Returns STATUS_OK if the variant supports `input`, else STATUS_USAGE with the reason, which calls the
     * variant "it"; STATUS_UNAVAILABLE if this build or machine is the reason. If this function is NULL,
     * every variant supports every input. */
    enum status (*accepts)(const void *input, const struct variant *variant);

    /* Returns the state of the page cache at the start of a run, for the column `cache`. If this function is
     * NULL, the column stays empty. */
    const char *(*cache)(const void *input);

    /* Returns the work of one run of the variant on `input`. Before the first run it is the expected work,
     * afterwards the work of the latest runs. */
    struct work (*work)(const void *input, const struct variant *variant);

    /* Counts the items of the latest run that differ from the reference. `number` is the number of that run;
     * results of any other run count as wrong. Does not run the variant and does not change its results. For
     * workloads with epochs.more(), a call with number 0 before the first run enables the checks of all later
     * steps. */
    enum status (*verify)(const void *input, const struct variant *variant, void *state, uint64_t number,
                          uint64_t *wrong);

    /* Sets the columns that describe the latest timed run. Called right after that run, before anything
     * changes. May be NULL. */
    enum status (*observe)(const void *input, const struct variant *variant, void *state, struct row *row);

    /* Sets the columns that observe() does not set. Called after the last verification; may run the variant
     * again. May be NULL. */
    enum status (*measure)(const void *input, const struct variant *variant, void *state, struct row *row);

    /* Sets the columns that follow from the median time of a run, in seconds. Called for the row of each
     * rank, and for the row rank=all with the median time of the slowest rank. May be NULL. */
    void (*rates)(const void *input, double median_s, struct row *row);

    /* Writes the output files that the user requested, from the results of run 0, the latest run of `state`.
     * `name` is the variant's name if several variants write output, else NULL. May be NULL. */
    enum status (*deliver)(const void *input, const char *name, const struct variant *variant, void *state);

    /* Options that need no variant: without --variant, the program only calls write() of the opened input for
     * the first of them that is given, which writes a file or a report. NULL: there are no more. */
    struct workload_alone {
        const char *option;
        enum status (*write)(const void *input);
    } alone[2];

    /* Checks in addition to verify(). */
    struct {
        bool every_run; /* every run checks its results, and fails with STATUS_WRONG if they are wrong, so
                         * the column `wrong` has a value even without --verify */

        /* Switches per-item checks at delivery on or off, for results that do not outlive the run. Runs with
         * these checks are not timed. May be NULL. */
        enum status (*closely)(void *input, bool closely);

        /* The unit of the wrong items that verify() counts, plural; NULL: `item`. */
        const char *item;

        /* Describes what verify() found wrong, for example "9 of 10 losses". `text` has the number of wrong
         * items, which is shown if this function is NULL. */
        void (*verdict)(const void *input, void *state, char *text, size_t size);
    } checks;

    /* For workloads whose ranks share data. */
    struct {
        bool share_items; /* ranks always divide the items of a run: strong scaling only */

        /* All ranks together process each item, and one rank alone cannot. The row rank=all has the items
         * and bytes of one rank. Rank 0 is not timed alone, and the rows have no scaling or efficiency. */
        bool joint;

        /* Returns a hash of the input files, which must be the same on all ranks. May be NULL. */
        uint64_t (*identity)(const void *input);

        /* Checks that all ranks together did the work that a single rank would do. `total` is the row with
         * rank=all. Called on rank 0 if there are several ranks. Returns STATUS_WRONG with the reason if they
         * did not; the row is then not written. May be NULL. */
        enum status (*check_total)(const void *input, const struct row *total);
    } ranks;

    /* For workloads whose batches a training step can consume (--compute). Set step() and either hand_over()
     * or set_consumer(). run/bench.c implements the rest. */
    struct {
        /* Returns the training step in `parameters`. Before the input is open, only the member `text` is set.
         * NULL: the workload does not support --compute. */
        const struct compute *(*step)(const void *parameters);

        /* For one batch per run: passes the batch of the latest run of `state` to the consumer. If the batch
         * must not change until its step has ended, `*done_event` becomes the event after that step;
         * otherwise it stays NULL. */
        enum status (*hand_over)(const void *input, const struct variant *variant, void *state,
                                 struct consumer *consumer, void **done_event);

        /* For many batches per run: sets the consumer that variants pass each batch to (NULL: none). */
        void (*set_consumer)(void *input, struct consumer *consumer);
    } batches;

    /* For workloads that accept --batch max, which the runner replaces by the largest batch that fits into
     * memory (run/runner.c). open() uses the smallest batch. All functions are NULL in other workloads. */
    struct {
        /* Returns the value of --batch in `parameters`; before open(), the value OPTION_MAX stands for
         * --batch max. */
        uint64_t (*given)(const void *parameters);

        /* Sets the smallest and the largest value of --batch. */
        void (*range)(const void *input, const void *parameters, const struct partition *partition,
                      uint64_t *least, uint64_t *most);

        /* Changes the input and the parameters to another value of --batch. Called only while no variant is
         * set up. `probes` is the number of batches that the search tried, for the rows. 0 means that this
         * call sets a batch to try: the variant must then neither read nor write files. */
        enum status (*set)(void *input, void *parameters, const struct partition *partition, uint64_t batch,
                           uint32_t probes);

        /* Runs one step of `state`. Collective. */
        enum status (*probe)(void *state);

        /* For the batch that set() has set: plans the memory of the variant. Sets `*needed_bytes` to it, and
         * `*room_bytes` to the memory that there is, of the rank with the least room. Collective. May be
         * NULL: the search then knows nothing. */
        enum status (*plan)(void *input, const struct variant *variant, const struct resources *resources,
                            uint64_t *needed_bytes, uint64_t *room_bytes);
    } largest;

    /* For workloads that choose values of their options from measurements. Both functions are NULL in other
     * workloads. */
    struct {
        /* Returns whether a choice is to be made. */
        bool (*open)(const void *parameters);

        /* Makes the choice for a variant: changes input and parameters. Called only while no variant is set
         * up. `given` are the options of the command line. Collective. */
        enum status (*choose)(const struct options *given, void *input, void *parameters,
                              const struct partition *partition, const struct variant *variant,
                              const struct resources *resources);
    } choice;

    /* For workloads that mix sources, and can choose the share of those that are read from measured stalls
     * (run/runner.c). All functions are NULL in other workloads. */
    struct {
        /* Returns whether the share is still to be chosen. */
        bool (*open)(const void *input);

        /* Changes the input and the parameters to a share, from 1 to `parts`. Called only while no variant is
         * set up. `last`: the share is chosen; otherwise it is to be tried, and the variant must then neither
         * read nor write files. */
        enum status (*set)(void *input, void *parameters, const struct partition *partition, uint32_t share,
                           bool last);

        /* Runs some steps of `state`. Sets `*stall` to the largest share of their time, of all ranks, in
         * which they waited for samples, and `*step_s` to the seconds per step. Collective. */
        enum status (*probe)(void *state, double *stall, double *step_s);
        uint32_t parts;
    } mix;

    /* For workloads whose runs are epochs. Each run gives one row; there are no warm-up runs or other extra
     * runs. verify() is called with number 0 before the first run. In other workloads, all these functions
     * are NULL. */
    struct {
        /* With --dry-run: checks what the variant's set-up checks in a run, and writes files that need no
         * training. Called on rank 0. */
        enum status (*check)(const void *input, const struct variant *variant,
                             const struct resources *resources);

        /* Returns whether another epoch follows. */
        bool (*more)(const void *input, void *state);

        /* Saves `state`, and `rows`: the rows of its last epoch in CSV format, after a header. Called on rank
         * 0 before the rows are appended to the CSV file. So if the process is killed at any moment, neither
         * the state nor the rows are lost. */
        enum status (*keep)(const void *input, void *state, const char *rows);

        /* Returns the folder in which keep() saves states for --resume, or NULL if the user named none. */
        const char *(*folder)(const void *input);

        /* Returns the rows saved with the checkpoint that `state` continues from; "" if none. The CSV file
         * may lack these rows. Owned by `state`. */
        const char *(*kept)(const void *state);

        /* Writes the final results that the user requested. Called after the last epoch and its row; `runs`
         * is the number of epochs run. */
        enum status (*end)(const void *input, void *state, uint64_t runs);
    } epochs;
};

/* All workloads, NULL-terminated. */
extern const struct workload *const workload_table[];

/* For workloads without `largest`: STATUS_USAGE if --batch is OPTION_MAX. */
enum status workload_refuse_max(uint64_t batch);

/* Returns the workload with this name, or NULL. */
const struct workload *workload_find(const char *name);

#endif
