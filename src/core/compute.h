/* The option --compute: a training step on the GPU consumes every batch. The step is either a kernel of a
 * given duration or a real training step. The workloads that have this option share its parser and its CSV
 * columns. */
#ifndef FDSL_CORE_COMPUTE_H
#define FDSL_CORE_COMPUTE_H

#include <stdbool.h>

#include "core/step_backend.h"
#include "core/options.h"
#include "core/status.h"

/* Range of the step time. Two steps are about 2 us apart; the minimum keeps this gap at or below 2 % of a
 * step. */
#define COMPUTE_MIN_MS 0.1
#define COMPUTE_MAX_MS 1000

/* A workload embeds this struct in its parameters. */
struct compute {
    const char *text; /* the value of the option and of its CSV column; NULL: no step */
    double step_s;    /* duration of the kernel in seconds; 0: a real training step */
    struct task task; /* for a real training step: the model and its input */
    char name[32];    /* "train:MODEL", set by compute_teach() */
};

/* The entry for a workload's option table; `at`: offset of struct compute in the workload's parameters. */
#define COMPUTE_OPTION(at)                                                                                  \
    {                                                                                                       \
        "compute", "MS|train[:MODEL]", OPTION_TEXT, (at) + offsetof(struct compute, text),                  \
            .column = COLUMN,                                                                               \
            .help =                                                                                         \
                "run a training step on the GPU for every batch while the next batches are produced. With " \
                "MS, the step multiplies matrices for that many milliseconds. With train, the step trains " \
                "the network MODEL on the batch (default MODEL: cnn for samples of 1x28x28, else cnn-fdsl)" \
    }

/* Parses compute->text into step_s or task.model; the model may be "". STATUS_USAGE unless the text is a
 * number of milliseconds within the range, "train" or "train:MODEL". */
enum status compute_read(struct compute *compute);

/* Returns whether the step is a real training step. Call after compute_read(). */
static inline bool compute_learns(const struct compute *compute)
{
    return compute->text && compute->step_s == 0;
}

/* Chooses the model of a real training step and sets `text` to "train:MODEL", so that the row names the
 * model. The workload must have filled all other fields of the task. STATUS_USAGE if no model fits the task.
 */
enum status compute_teach(struct compute *compute);

/* The columns that every workload with --compute includes in its columns, in this order. */
#define COMPUTE_COLUMNS                                                                                      \
    {"compute_ms", VALUE_REAL, COMBINE_MEAN, "ms",                                                           \
     .about =                                                                                                \
         "length of a training step of --compute: the given value, or the time of the step measured alone"}, \
        {"steps", VALUE_INTEGER, COMBINE_SUM, "",                                                            \
         .about = "batches that training steps consumed in the timed runs"},                                 \
        {"stall_share",                                                                                      \
         VALUE_REAL,                                                                                         \
         COMBINE_MAX,                                                                                        \
         "",                                                                                                 \
         .about = "share of the time after the very first wait in which training steps waited for batches",  \
         .digits = 6,                                                                                        \
         .better = BETTER_LOWER},                                                                            \
        {"first_batch_s", VALUE_REAL, COMBINE_MAX, "s",                                                      \
         .about =                                                                                            \
             "time until the first training step of the first timed run begins; without --compute, time "    \
             "until the first batch of the variant stream in the last timed run"},                           \
        {"step_s", VALUE_REAL, COMBINE_MEAN, "s",                                                            \
         .about = "mean time of a training step during the timed runs; only steps on full batches count"},   \
        {"busy_share",                                                                                       \
         VALUE_REAL,                                                                                         \
         COMBINE_MIN,                                                                                        \
         "",                                                                                                 \
         .about = "share of the time in which a training step ran",                                          \
         .digits = 6,                                                                                        \
         .better = BETTER_HIGHER},                                                                           \
        {"slowdown",                                                                                         \
         VALUE_REAL,                                                                                         \
         COMBINE_MAX,                                                                                        \
         "",                                                                                                 \
         .about = "step_s divided by the time of the training step alone",                                   \
         .digits = 6,                                                                                        \
         .better = BETTER_LOWER},                                                                            \
        {"bus_share",                                                                                        \
         VALUE_REAL,                                                                                         \
         COMBINE_MIN,                                                                                        \
         "",                                                                                                 \
         .about = "rate of copies over the bus while training steps run, relative to copies alone",          \
         .digits = 6},                                                                                       \
        {"bus_slowdown",                                                                                     \
         VALUE_REAL,                                                                                         \
         COMBINE_MAX,                                                                                        \
         "",                                                                                                 \
         .about = "time of a training step during copies over the bus, relative to the step alone",          \
         .digits = 6,                                                                                        \
         .better = BETTER_LOWER},                                                                            \
    {                                                                                                        \
        "loss", VALUE_REAL, COMBINE_MEAN, "",                                                                \
            .about = "with --compute train: mean loss of the samples of the last 64 steps", .digits = 6,     \
            .better = BETTER_LOWER                                                                           \
    }

#endif
