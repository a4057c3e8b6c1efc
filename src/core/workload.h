/* A workload: a job's inputs, the work that is in it, and the oracle that says what is right. */
#ifndef FDSL_CORE_WORKLOAD_H
#define FDSL_CORE_WORKLOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "core/compute.h"
#include "core/consumer.h"
#include "core/options.h"
#include "core/place.h"
#include "core/roofline.h"
#include "core/status.h"
#include "core/variant.h"

struct row;

/* The work of one run. */
struct work {
    double items;            /* images, samples, ... */
    double bytes;            /* of the finished images, or of the samples: the numerator of bytes_per_s */
    struct least_work least; /* for the roofline */
};

/* What a column of the row of all ranks holds, given those of the ranks; and so what it is: words, a hash, or
 * else a number. */
enum combine {
    COMBINE_FIRST,  /* rank 0's words, which are the same on all */
    COMBINE_SAME,   /* rank 0's number, which is the same on all */
    COMBINE_COMMON, /* rank 0's words where all ranks have the same, else nothing */
    COMBINE_NONE,   /* nothing: it means something for one rank alone */
    COMBINE_MIN,    /* the smallest number */
    COMBINE_MEAN,
    COMBINE_MAX,    /* the largest number: the slowest rank's */
    COMBINE_SUM,    /* the sum of whole numbers */
    COMBINE_HASHES, /* the sum of 16 hexadecimal digits modulo 2^64 */
};

struct measure {
    const char *column;
    enum combine combine;
};

#define MEASURES_MAX 64 /* columns of a workload's own */

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

    /* Every run checks what it made, and fails with STATUS_WRONG: rows have their `wrong` without --verify
     * too, which looks closer. */
    bool checks_runs;

    /* Ranks share a run's items, however many they are, so scaling is always strong. */
    bool shares_items;

    /* Checks the parameters, completes those whose default depends on others, and makes the input that
     * variants work on, as at `place`. The caller closes it. */
    enum status (*open)(const struct options *options, void *parameters, const struct place *place,
                        void **input);
    void (*close)(void *input);

    /* A hash of what the options name but do not hold, the contents of files: ranks that work together have
     * the same. May be NULL: there is no such thing. */
    uint64_t (*identity)(const void *input);

    /* With several ranks, on rank 0: whether they did together what one rank would have done, by the row of
     * all of them. STATUS_WRONG and what is wrong; then the row is not written. May be NULL: there is nothing
     * to see. */
    enum status (*check_total)(const void *input, const struct row *total);

    /* Makes the input that of another place, while no variant is set up, and the parameters those that a row
     * of it shows. STATUS_USAGE where nothing is left for a rank. */
    enum status (*move)(void *input, void *parameters, const struct place *place);

    /* Whether a parameter means anything among these to the variant (NULL: to some variant); where not, its
     * column stays empty. May be NULL: always. */
    bool (*applies)(const void *parameters, const struct variant *variant, const char *option);

    /* Whether the variant can make what `input` asks for: STATUS_OK, or STATUS_USAGE and the reason, which
     * speaks of the variant as "it". May be NULL: always. */
    enum status (*accepts)(const void *input, const struct variant *variant);

    /* The state of the page cache that runs begin with, for the column `cache`. May be NULL: none. */
    const char *(*cache)(const void *input);

    /* The training step that is to consume every batch (--compute), as parameters have it; whole once the
     * input is open, before that only whether there is one. May be NULL: none. With it comes one of the two
     * below; core/consumed.h does the rest. */
    const struct compute *(*compute)(const void *parameters);

    /* A run makes one batch: hands that of run `number`, the latest of `state`, to the consumer.
     * `*done_event` becomes that behind its step where the batch must stay as it is until then, and stays
     * NULL where it need not. */
    enum status (*hand_over)(const void *input, const struct variant *variant, void *state, uint64_t number,
                             struct consumer *consumer, void **done_event);

    /* A run delivers many: from now on variants hand each to the consumer (NULL: to nobody). */
    void (*set_consumer)(void *input, struct consumer *consumer);

    /* Whether another run is to come, where each run is a row of its own (an epoch): then no other run comes
     * before the first or between them, and verify() comes before all. May be NULL: runs repeat the same
     * work, and one row holds their statistics. */
    bool (*more)(const void *input, void *state);

    /* The work of one run of the variant on `input`: before any, and of the latest ones. */
    struct work (*work)(const void *input, const struct variant *variant);

    /* Counts the items in the latest run of `state` that differ from the oracle. `number` is the run that it
     * should be: the result of another one is wrong as a whole. Does not run the variant, whose results stay
     * as they are. With more(), 0 comes before the first run and has steps checked from there on. */
    enum status (*verify)(const void *input, const struct variant *variant, void *state, uint64_t number,
                          uint64_t *wrong);

    /* Where verify() cannot see afterwards all that a run has delivered: from now on runs check each item as
     * they deliver it, or (`closely` is false) no longer. Such a run is not timed. May be NULL. */
    enum status (*check_closely)(void *input, bool closely);

    /* What verify() found wrong, in words: "9 of 10 losses". May be NULL: the count of the items. */
    void (*verdict)(const void *input, void *state, char *text, size_t size);

    /* Fills those of the workload's own columns that tell of the latest timed run, before anything else
     * happens to `state` or to the machine; `texts` has a text per column in `measures`, empty as yet. May be
     * NULL. */
    enum status (*observe)(const void *input, const struct variant *variant, void *state, char texts[][64]);

    /* Fills the rest of these columns, after the last run has been verified; may run the variant again. May
     * be NULL. */
    enum status (*measure)(const void *input, const struct variant *variant, void *state, char texts[][64]);

    /* Run number 0 has been made by `state`: writes what the user asked to see of it. May be NULL.
     * `name` is the variant's where several variants deliver, else NULL. */
    enum status (*deliver)(const void *input, const char *name, const struct variant *variant, void *state);

    /* Only with more(), and all or none: a kill at any moment loses neither what a run has done nor its row.
     * The row is known and not yet written: keeps `state` and, with it, the row as CSV (a header and a line).
     */
    enum status (*keep)(const void *input, void *state, const char *row);

    /* The row that was kept with what `state` goes on from, "" for none; the state's. It may not have been
     * written. */
    const char *(*kept)(const void *state);

    /* No run is left to come, and all rows are written: `runs` were made. Writes what the user asked to have
     * of the end. */
    enum status (*end)(const void *input, void *state, uint64_t runs);
};

/* All workloads, NULL-terminated. */
extern const struct workload *const workload_table[];

/* The workload of that name, or NULL. */
const struct workload *workload_find(const char *name);

#endif
