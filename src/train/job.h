/* Shared by the workloads `train` and `infer`: the options that choose the data, and the functions that open
 * the data. */
#ifndef FDSL_TRAIN_JOB_H
#define FDSL_TRAIN_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "core/options.h"
#include "core/partition.h"
#include "core/status.h"
#include "data/members.h"
#include "train/data.h"

/* The parameters that both workloads share. They must be the first member of each workload's parameters. */
struct job_parameters {
    const char *data, *image, *label, *preset;
    uint64_t train_size, test_size, classes, res, out_res, channels, batch;
    int fit;  /* enum fit_how */
    int feed; /* `feed` and `fresh` as in struct data_request */
    bool fresh;
};

/* The rows of the option table for struct job_parameters. `parameters` is the workload's struct; its first
 * member is `job`. `use` says what --data is for. `data_` and `res_` are the defaults of
 * --data and --res, or NULL. `train_sizes`, `test_sizes` and `class_counts` are texts that say the defaults;
 * `train_words` and `res_words` are added to the help of --train-size and --res. */
/* clang-format off */
#define JOB_OPTIONS(parameters, data_, use, train_words, train_sizes, test_sizes, class_counts, res_, res_words)                                                                                \
    {"data", "DIR|NAME", OPTION_TEXT, offsetof(parameters, job.data), data_, 0, 0, NULL, true,                 \
     use ": a folder with MNIST (IDX), with CIFAR-10 (binary) or with a data set of --prepare; "                         \
     "or the name of generated data: digits, clips (for cnn3d) or synth"},                                                        \
    MEMBER_IMAGE_LABEL(offsetof(parameters, job.image), offsetof(parameters, job.label), true), \
    {"train-size", "N", OPTION_COUNT, offsetof(parameters, job.train_size), NULL, 1, 2147483647, NULL, true,   \
     "take the first N training samples" train_words " (default: " train_sizes ")"},                               \
    {"test-size", "N", OPTION_COUNT, offsetof(parameters, job.test_size), NULL, 1, 2147483647, NULL, true,     \
     "take the first N test samples (default: " test_sizes ")"},                                    \
    {"classes", "N", OPTION_COUNT, offsetof(parameters, job.classes), NULL, 1, 1 << 20, NULL, true,            \
     "number of classes; labels are 0 to N - 1 (default: " class_counts ")"},                       \
    {"preset", "NAME", OPTION_TEXT, offsetof(parameters, job.preset), NULL, 0, 0, NULL, true,                 \
     "source of the classes of synth: uji, visualatom, lowercompute, paper-1000 or lowercompute-1000 (default: uji)"}, \
    {"res", "PIXELS", OPTION_COUNT, offsetof(parameters, job.res), res_, 1, 4096, NULL, true,                  \
     "width and height of the canvas of synth images" res_words},                                                            \
    {"out-res", "PIXELS", OPTION_COUNT, offsetof(parameters, job.out_res), NULL, 1, 4096, NULL, true,          \
     "resize the images of other data to this width and height (default: as stored)"},                         \
    {"fit", "HOW", OPTION_CHOICE, offsetof(parameters, job.fit), "resize", 0, 0, fit_names, true,              \
     "how images get the size --out-res: resize changes width and height; crop cuts out a part at a random "   \
     "position, once per sample; random-resized-crop cuts out a random part of a training sample in each "     \
     "epoch and resizes it, and only resizes test samples. HOW is one of"},                                                                                         \
    {"channels", "1|3", OPTION_COUNT, offsetof(parameters, job.channels), "3", 1, 3, NULL, true,               \
     "channels of the images with --out-res"}
/* clang-format on */

/* Returns what an option of JOB_OPTIONS needs to have an effect, as a text for a message; NULL if it has
 * one. */
const char *job_lacking(const struct job_parameters *parameters, const char *option);

/* Opens the data that these parameters choose. The caller closes the data, also after a failure. */
enum status job_open_data(const struct job_parameters *parameters, struct data *data);

/* Returns STATUS_USAGE if the batch is larger than the set `part`. */
enum status job_check_batch(const struct job_parameters *parameters, enum data_part part,
                            const struct data *data);

/* Implements largest.given() of both workloads. */
uint64_t job_batch(const void *parameters);

/* Implements repartition() of `train`, `infer` and `exchange`: does nothing. `infer` runs on one rank, and
 * the other two workloads never time rank 0 alone. */
enum status job_stay(void *input, void *parameters, const struct partition *partition);

#endif
