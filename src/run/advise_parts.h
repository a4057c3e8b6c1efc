/* What the files of `advise` share: the options, the data set, the ways, and runs of this program. */
#ifndef FDSL_RUN_ADVISE_PARTS_H
#define FDSL_RUN_ADVISE_PARTS_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/options.h"
#include "core/record.h"
#include "core/status.h"
#include "core/variant.h"
#include "run/advise.h"

struct advise_options {
    const char *data, *out, *image, *label, *member, *cache_dir, *compute, *exchange_rows;
    uint64_t batch, out_res, device, threads, cache_bytes, subset, classes, nodes;
    double time_s, margin;
    int fit, on_error, format;
    bool help;
};

/* A way to get images. `name_of_files` and `variant_of_files` are the name and variant for a data set of
 * single files; NULL if they are the same as for shards. */
struct candidate {
    const char *name, *name_of_files;
    enum advise_place place;
    bool gpu;                                                  /* delivers images in GPU memory */
    const char *workload, *variant, *variant_of_files, *cache; /* workload "train": `variant` is --feed */
};

/* The facts about a data set that the candidates depend on. */
struct advise_set {
    bool shards, remote; /* a remote set always has shards */
    bool coded;          /* images are JPEG or PNG files */
    uint32_t res;        /* width and height of the images that the step gets */
    uint32_t channels;   /* channels of the images that the step gets */
    uint32_t depth;      /* images per sample; more than 1 in sets of volumes, such as --prepare's default */
    double pixels;       /* of the image that was looked at */
    uint64_t samples, measured_samples;
    double bytes, measured_bytes; /* `bytes` of single files is estimated from the measured ones */
    char folder[PATH_MAX / 2];    /* temporary; empty if there is none */
    char data[PATH_MAX];          /* what is measured: the set, or a folder with links to some of its files */
    char prepared[PATH_MAX];      /* a set of generated images, in the temporary folder; empty if none */
    uint64_t prepared_samples;
};

/* The data set to measure, the options and the machine. */
struct situation {
    const struct advise_options *options;
    const struct options *given;
    struct resources resources;
    const char *step; /* the value of --compute of the runs */
    int threads;      /* that read and decode */
    bool gpu;
    struct advise_set set;
    const char *rows; /* folder of the CSV files with the rows */
    struct advice_question question;
    double begin_s;    /* start of the measurements */
    const char *evict; /* folder whose files leave the page cache whenever a run writes rows, or NULL */
    struct progress progress;
};

#define ARGUMENTS_MAX 64
struct arguments {
    const char *of[ARGUMENTS_MAX];
    size_t count;
    char texts[16][32];
    size_t text_count;
};

/* Adds an option and its value, unless the value is NULL. */
void advise_add_text(struct arguments *arguments, const char *option, const char *value);
void advise_add_number(struct arguments *arguments, const char *option, double value);

/* Adds the members of a sample, and with `copy` the folder of the local copy. */
void advise_add_set(const struct advise_options *options, bool copy, struct arguments *arguments);

/* Adds --out-res, --fit and --channels. */
void advise_add_fit(const struct situation *situation, struct arguments *arguments);

/* Returns whether the images of the set get the size --out-res. */
bool advise_is_fitted(const struct situation *situation);

/* Starts a program, whose name is argv[0] ("fdsl-bench": this program), and waits for it. `argv` ends with
 * NULL. While it runs, evicts the files of situation->evict whenever `rows` grows. STATUS_UNAVAILABLE if the
 * program failed; the message is the last line that it printed to stderr. STATUS_FAILED if a signal ended it,
 * or if this program received a signal (file_signal_held()). */
enum status advise_start(const struct situation *situation, const char *const *argv, const char *rows);

/* Runs this program, which appends its rows to a file; reads this file. STATUS_UNAVAILABLE and STATUS_FAILED
 * as from advise_start(); STATUS_FAILED also if the rows cannot be read. */
enum status advise_run_child(const struct situation *situation, const char *workload,
                             const struct arguments *arguments, struct table *table);

/* Returns a value of a row; NaN if it is empty. */
double advise_number(const struct table *table, size_t row, const char *column);

/* Returns STATUS_UNAVAILABLE if `bytes` are more than `room`, which is 0 if it is unknown. */
enum status advise_check_room(const char *what, double bytes, uint64_t room);

/* Sets the disk space and the memory that a way takes. `memory_bytes` is the memory that a run on `samples`
 * samples allocated. */
void advise_count_costs(const struct situation *situation, const struct candidate *candidate,
                        double memory_bytes, double samples, struct advice *advice);

/* Deletes a folder. */
void advise_remove(const char *folder);

/* ---- With --compute train:MODEL (advise_train.c) ---- */

#define ADVISE_TRAININGS 9
extern const struct candidate advise_trainings[ADVISE_TRAININGS];

/* How long the runs of a way are, which its earlier runs decide. */
struct advise_pace {
    double step_s; /* 0: not measured; as long as without input */
    double share;  /* of the samples of a mixture that are read; 0: the run chooses it */
    double guess;  /* of `share`, for the length of the first run */
    char mix[64];  /* --mix; empty: the run chooses the share */
};

/* Returns the bytes of all images of the set as a GPU keeps them: as in a batch, or with random crops as
 * whole images. */
double advise_device_bytes(const struct situation *situation);

/* Chooses the variant that trains the network situation->question.model. */
enum status advise_choose_engine(struct situation *situation);

/* Measures the step without input, to know how long runs must be. */
enum status advise_measure_step(struct situation *situation);

/* Returns STATUS_UNAVAILABLE, with the reason, if this way certainly cannot work here. */
enum status advise_training_possible(const struct situation *situation, const struct candidate *candidate);

/* Measures a way once, in a training run whose counted epochs take about `time_s`. */
enum status advise_train_once(struct situation *situation, const struct candidate *candidate, double time_s,
                              struct advise_pace *pace, struct advice *advice);

/* Generates a part of a data set, and measures how long that takes per sample. Sets set.prepared and the
 * question's prepare_s, or its prepare_reason. STATUS_FAILED after a signal. */
enum status advise_measure_prepare(struct situation *situation);

/* Measures an all-reduce of the network's gradients, or takes it from --exchange-rows. Sets the question's
 * exchange_s, or its exchange_reason. STATUS_FAILED after a signal; STATUS_USAGE if the file has no such
 * rows. */
enum status advise_measure_exchange(struct situation *situation);

/* Returns the command that trains the network on images that come in this way. The caller frees it. NULL if
 * memory runs out. */
char *advise_command(const struct situation *situation, const struct advice *way);

/* Evicts the files of a folder from the page cache. STATUS_UNAVAILABLE if they stay there. */
enum status advise_evict(const char *folder);

#endif
