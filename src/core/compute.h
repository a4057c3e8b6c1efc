/* What --compute asks for: a training step that consumes every batch, of a given length or the trainer's own.
 * The option, its column and its reading are the same in every workload. */
#ifndef FDSL_CORE_COMPUTE_H
#define FDSL_CORE_COMPUTE_H

#include <stdbool.h>

#include "core/step_backend.h"
#include "core/options.h"
#include "core/status.h"

/* Bounds of a step: shorter ones cannot be told apart within 2 %, longer ones need no GPU to be seen. */
#define COMPUTE_MIN_MS 0.1
#define COMPUTE_MAX_MS 1000

/* A member of a workload's parameters. */
struct compute {
    const char *text; /* the option's value, and the row's; NULL: no step */
    double step_s;    /* of a step of a given length; 0: the trainer's own */
    struct task task; /* what that one learns */
    char name[32];    /* "train:cnn" */
};

/* The line of a workload's table of options; `at` is where the struct stands in its parameters. */
#define COMPUTE_OPTION(at)                                                                                   \
    {                                                                                                        \
        "compute", "MS|train[:MODEL]", OPTION_TEXT, (at) + offsetof(struct compute, text), NULL, 0, 0, NULL, \
            true,                                                                                            \
            "consume every batch by a training step on the GPU, beside which the next ones are made: of "    \
            "so many milliseconds, or the trainer's own, which learns from the batch (MODEL: cnn for "       \
            "1x28x28, else cnn-fdsl)"                                                                        \
    }

/* Reads the text: step_s, or the model that the task names, which may be "". STATUS_USAGE for anything else
 * than a number of milliseconds within the bounds, train and train:MODEL. */
enum status compute_read(struct compute *compute);

/* Whether the batches are learnt from; after compute_read(). */
static inline bool compute_learns(const struct compute *compute)
{
    return compute->text && compute->step_s == 0;
}

/* The workload has filled the task but for the model: chooses one, and has the row name it. STATUS_USAGE
 * where there is nothing to learn, or no network that could. */
enum status compute_teach(struct compute *compute);

/* The columns that every workload with --compute lists in its measures, in this order; the first one's name,
 * and how many they are. */
#define COMPUTE_MEASURES                                                                       \
    {"compute_ms", COMBINE_MEAN}, {"steps", COMBINE_SUM}, {"wait_share", COMBINE_MAX},         \
        {"first_wait_s", COMBINE_MAX}, {"step_s", COMBINE_MEAN}, {"utilisation", COMBINE_MIN}, \
        {"slowdown", COMBINE_MAX}, {"bus_share", COMBINE_MIN}, {"bus_slowdown", COMBINE_MAX},  \
    {                                                                                          \
        "loss", COMBINE_MEAN                                                                   \
    }

#endif
