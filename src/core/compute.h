/* The option --compute MS: a training step on the GPU consumes every batch. The step is a kernel of a given
 * duration. The workloads that have this option share its parser and its CSV columns. */
#ifndef FDSL_CORE_COMPUTE_H
#define FDSL_CORE_COMPUTE_H

#include <stddef.h>

#include "core/options.h"
#include "core/status.h"

/* Range of the step time. Two steps are about 2 us apart; the minimum keeps this gap at or below 2 % of a
 * step. */
#define COMPUTE_MIN_MS 0.1
#define COMPUTE_MAX_MS 1000

/* A workload embeds this struct in its parameters. */
struct compute {
    const char *text; /* the value of the option and of its CSV column; NULL: no step */
    double step_s;    /* duration of the step in seconds; set by compute_read() */
};

/* The entry for a workload's option table; `at`: offset of struct compute in the workload's parameters. */
#define COMPUTE_OPTION(at)                                                                                 \
    {                                                                                                      \
        "compute", "MS", OPTION_TEXT, (at) + offsetof(struct compute, text),                               \
            .column = COLUMN,                                                                              \
            .help = "run a training step on the GPU for every batch while the next batches are produced. " \
                    "The step multiplies matrices for MS milliseconds; it does not read the batch"         \
    }

/* Parses compute->text into step_s. STATUS_USAGE unless the text is a number of milliseconds within the
 * range. For the text train or train:MODEL, the message names the command that measures training. */
enum status compute_read(struct compute *compute);

/* The columns that every workload with --compute includes in its columns, in this order. */
#define COMPUTE_COLUMNS                                                                                     \
    {"compute_ms", VALUE_REAL, COMBINE_MEAN, "ms",                                                          \
     .about = "requested length of a training step (--compute)"},                                           \
        {"steps", VALUE_INTEGER, COMBINE_SUM, "",                                                           \
         .about = "batches that training steps consumed in the timed runs"},                                \
        {"stall_share",                                                                                     \
         VALUE_REAL,                                                                                        \
         COMBINE_MAX,                                                                                       \
         "",                                                                                                \
         .about = "share of the time after the very first wait in which training steps waited for batches", \
         .digits = 6,                                                                                       \
         .better = BETTER_LOWER},                                                                           \
        {"first_batch_s", VALUE_REAL, COMBINE_MAX, "s",                                                     \
         .about =                                                                                           \
             "time until the first training step of the first timed run begins; without --compute, time "   \
             "until the first batch of the variant stream in the last timed run"},                          \
        {"step_s", VALUE_REAL, COMBINE_MEAN, "s",                                                           \
         .about = "mean time of a training step during the timed runs"},                                    \
        {"busy_share",                                                                                      \
         VALUE_REAL,                                                                                        \
         COMBINE_MIN,                                                                                       \
         "",                                                                                                \
         .about = "share of the time in which a training step ran",                                         \
         .digits = 6,                                                                                       \
         .better = BETTER_HIGHER},                                                                          \
        {"slowdown",                                                                                        \
         VALUE_REAL,                                                                                        \
         COMBINE_MAX,                                                                                       \
         "",                                                                                                \
         .about = "step_s divided by the time of the training step alone",                                  \
         .digits = 6,                                                                                       \
         .better = BETTER_LOWER},                                                                           \
        {"bus_share",                                                                                       \
         VALUE_REAL,                                                                                        \
         COMBINE_MIN,                                                                                       \
         "",                                                                                                \
         .about = "rate of copies over the bus while training steps run, relative to copies alone",         \
         .digits = 6},                                                                                      \
    {                                                                                                       \
        "bus_slowdown", VALUE_REAL, COMBINE_MAX, "",                                                        \
            .about = "time of a training step during copies over the bus, relative to the step alone",      \
            .digits = 6, .better = BETTER_LOWER                                                             \
    }

#endif
