/* fdsl-bench advise --data DIR --compute MS: measures several ways to get images, and names the best one. The
 * ways are to generate images, to read the data set from a URL, from disk or from memory, and to keep it in
 * GPU memory. With --compute train:MODEL, each measurement is a training run of the network. */
#ifndef FDSL_RUN_ADVISE_H
#define FDSL_RUN_ADVISE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/options.h"
#include "core/record.h"
#include "core/status.h"
#include "core/variant.h"
#include "machine/nvml.h"
#include "run/compare.h"

/* Measures and prints the advice; argv[0] is the word "advise". Each measurement is a run of this program in
 * a child process; if a run reports an error, the other ways are still measured. After a signal, prints the
 * advice of the finished rounds if there are at least ADVISE_ROUNDS_MIN, before the signal ends the program.
 * STATUS_USAGE for wrong options or if there is no such data set; STATUS_UNAVAILABLE if an option needs a GPU
 * that does not exist; STATUS_FAILED if no way could be measured. */
enum status advise_run(int argc, char *argv[]);

/* ---- The decision and the output, for tests ---- */

/* Where images come from, in ascending order of what a place needs on this machine. */
enum advise_place {
    ADVISE_GENERATED,  /* nothing is stored */
    ADVISE_REMOTE,     /* the set is at a URL */
    ADVISE_DISK,       /* the set is on disk */
    ADVISE_PREPARED,   /* a set of generated images is on disk and in the page cache */
    ADVISE_MEMORY,     /* the set is on disk and in the page cache */
    ADVISE_MIXED,      /* a part of each step is generated, a part is read as from ADVISE_MEMORY */
    ADVISE_RESIDENT,   /* the files of the set are also in the memory of the trainer */
    ADVISE_GPU_MEMORY, /* the set is also in GPU memory */
    ADVISE_CONSTANT    /* no images: one batch again and again, which no way can exceed. Never the best way */
};

#define ADVISE_ROUNDS_MIN 3 /* no decision after fewer rounds */
#define ADVISE_ROUNDS_MAX 100
#define ADVISE_SHOWN      0.95 /* confidence of the intervals that are printed */

/* One way to get batches, and what was measured. Unknown numbers are NaN. */
struct advice {
    const char *name, *variant; /* "shards from memory", "shards-omp"; of training runs: --feed */
    char mix[64];               /* --mix of a mixture; empty: none */
    enum advise_place place;
    bool measured;
    bool dropped;                            /* was clearly slower, and was not repeated */
    struct failure reason;                   /* why it was not measured */
    size_t rounds;                           /* number of measurements */
    double images_per_s[ADVISE_ROUNDS_MAX];  /* per round: delivered without a training step */
    double reached_per_s[ADVISE_ROUNDS_MAX]; /* per round: images that steps consume per second; measured on a
                                                GPU, otherwise computed */
    double stall_share;      /* share of the time that a step waits; measured on a GPU, otherwise computed */
    double disk_bytes;       /* on this machine */
    double memory_bytes;     /* buffers on host and device, and the data in the page cache */
    double joules_per_image; /* energy of the GPU */
    char *command;           /* trains the network on images that come in this way; NULL if unknown */
    bool off[ADVISE_ROUNDS_MAX]; /* per round: the rate does not count, because another process delayed this
                                    run or most others of the round: advise_note_noise() */
};

/* The training step for which the ways are compared. */
struct advice_question {
    double step_s;     /* duration of a step alone */
    uint64_t batch;    /* images per step */
    uint32_t res;      /* width and height of the images */
    bool estimated;    /* waits are computed, not measured, because there is no GPU */
    double margin;     /* ways whose rates differ by at most this share are equally fast */
    double time_s;     /* the maximum time that was announced */
    double took_s;     /* the time that all rounds took */
    double load;       /* average number of busy threads of the machine, before the first round */
    int threads;       /* that this process may use */
    uint64_t samples;  /* of the data set */
    uint64_t measured; /* samples that were read */
    double bytes, measured_bytes;
    const char *model, *engine; /* the network, and the variant that trains it; NULL: step_s was given */

    /* With a network only: */
    bool over;              /* nothing more is measured, so what is still open counts as equal */
    double noise;           /* variance of the logarithm of a rate, from all ways: advise_note_noise() */
    double noise_freedom;   /* its degrees of freedom; 0: unknown */
    struct ratio prepare_s; /* per image: generating and writing a set; NaN if unknown */
    double prepare_bytes;   /* per image of such a set */
    struct failure prepare_reason;  /* why prepare_s is unknown */
    uint32_t nodes;                 /* machines to which rates are extrapolated; 1: none */
    bool overlaps;                  /* the engine computes while it exchanges gradients */
    double gradient_bytes;          /* of the network */
    struct ratio exchange_s;        /* an all-reduce of the gradients over `nodes`; NaN if unknown */
    uint32_t exchange_ranks;        /* of the all-reduce that was measured */
    struct failure exchange_reason; /* why exchange_s is unknown */
};

/* Returns the images per second that a step consumes if it never waits. */
double advise_needed(const struct advice_question *question);

/* Adds a round. If waits are computed, `reached_per_s` and `stall_share` are ignored, and computed as if the
 * training step and the production of batches did not slow each other down. */
void advise_add(const struct advice_question *question, struct advice *advice, double images_per_s,
                double reached_per_s, double stall_share);

/* Adds a round in which the way could not be measured. */
void advise_miss(struct advice *advice);

/* Returns the geometric mean of the known values, with its confidence interval. All NaN if none is known. The
 * interval is NaN if fewer than ADVISE_ROUNDS_MIN are known: rates that are capped at what the step consumes
 * are equal after two lucky rounds, and such an interval would have no width. */
struct ratio advise_mean(const double *values, size_t count, double confidence);

/* Returns advise_mean() of the rates at which steps consume images, without the rounds that are off. */
struct ratio advise_reached(const struct advice *advice, double confidence);

/* With a network: estimates the noise that all ways have in common from what remains of their rates without
 * the median of each way and of each round. A few rounds of two ways may agree, or not, by chance. Runs that
 * are far from both medians are off. */
void advise_note_noise(struct advice_question *question, struct advice *advice, size_t count);

/* With a network: returns whether two ways that may be the best have fewer than ADVISE_ROUNDS_MIN rounds in
 * common that count. */
bool advise_lacks_rounds(const struct advice_question *question, const struct advice *advice, size_t count);

/* Returns the ratio of `b` to `a`, of images that steps consume. Compares values of the same round, so slow
 * changes of the machine's load do not matter. If the noise is known, the variance of these ratios is
 * moderated by it (Smyth, "Linear models and empirical Bayes methods", 2004), and the interval is at least as
 * wide as consecutive training runs differ. */
struct ratio advise_ratio(const struct advice_question *question, const struct advice *a,
                          const struct advice *b);

struct advice_decision {
    bool decided;
    size_t best;        /* decided: the best way. Otherwise: the way that needs least and may be the best.
                           The number of ways if none was measured */
    size_t rival;       /* undecided: another way that may be more than the margin faster, or the number of
                           ways if no way that reads the set was measured */
    struct ratio ratio; /* undecided: of `rival` to `best` */
};

/* Decides between ways. question->over turns what is still open into equality, unless the interval is so wide
 * that it says nothing: no way is certainly superior to the best. Otherwise: the ways are in ascending order
 * of their needs. The best way is the first to which no other way is superior. B is superior to A if the
 * whole interval of the ratio B / A is above 1 + margin, and not superior if the whole interval is at or
 * below 1 + margin; otherwise the decision is open. So as long as the intervals contain the true ratios, two
 * decisions on the same machine cannot contradict each other. Reading with the same variant from disk, or
 * from a URL, is never superior to reading from memory: the same bytes cannot come faster from there. */
struct advice_decision advise_decide(const struct advice_question *question, const struct advice *advice,
                                     size_t count);

/* Sets `dropped` of the ways to which another way is superior. */
void advise_drop(const struct advice_question *question, struct advice *advice, size_t count);

/* Writes the details of the verdict, and the verdict itself: one sentence, which starts with "Best here: " or
 * "Undecided: ". Both are empty if no way was measured. */
void advise_details(const struct advice_question *question, const struct advice *advice, size_t count,
                    const struct advice_decision *decision, char *text, size_t size);
void advise_verdict(const struct advice_question *question, const struct advice *advice, size_t count,
                    const struct advice_decision *decision, char *text, size_t size);

/* Ends the measurements with a network: what is still open counts as equal from now on, and step_s is the
 * mean over all rounds without input. */
void advise_conclude(struct advice_question *question, struct advice *advice, size_t count);

/* Returns the images per second of question->nodes machines. A step of each takes as long as here, plus the
 * exchange of gradients. If the engine overlaps them, the exchange may be hidden: the upper end of the
 * interval. NaN if the exchange is unknown. */
struct ratio advise_on_nodes(const struct advice_question *question, const struct advice *advice);

/* Returns the number of epochs from which on generating and writing a set, and then reading it, takes less
 * time than generating in each epoch: the time to prepare an image / the time that reading it saves. INFINITY
 * if reading is not faster; NaN if the intervals do not tell, or something is unknown. */
struct ratio advise_pays(const struct advice_question *question, const struct advice *live,
                         const struct advice *prepared);

/* Prints the table, details and verdict or, with --format csv or json, rows. `data` is the name of the data
 * set. STATUS_FAILED if nothing could be measured. */
enum status advise_print(const char *data, int format, const struct advice_question *question,
                         const struct advice *advice, size_t count);

/* ---- Shared by advise.c and advise_train.c: the options, the data set, the ways, and runs ---- */

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

/* Free memory; 0: unknown. */
struct advise_room {
    uint64_t host_bytes, device_bytes;
};

/* The data set to measure, the options and the machine. */
struct situation {
    const struct advise_options *options;
    const struct options *given;
    struct resources resources;
    const char *step; /* the value of --compute of the runs */
    int threads;      /* that read and decode */
    bool gpu;
    char pci_bus_id[GPU_ID_BYTES]; /* of the GPU */
    struct advise_set set;
    const char *rows; /* folder of the CSV files with the rows */
    struct advice_question question;
    double begin_s;          /* start of the measurements */
    const char *evict;       /* folder whose files leave the page cache after each epoch of a run, or NULL */
    struct advise_room room; /* free at the start of the measurements */
    bool alone;              /* a run failed, perhaps because of others that waited, so runs no longer wait */
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

/* A run in a child process. */
struct advise_child {
    pid_t pid;       /* 0: none */
    int errors;      /* its stderr */
    int turns;       /* socket to a run that waits after each epoch (RUNNER_TURNS); negative: none */
    bool waits;      /* an epoch has ended, and the run waits */
    char text[4096]; /* the end of what it printed to stderr */
    size_t held;     /* bytes of `text` */

    /* Before the last `counted` epochs: the energy that the GPU had consumed, and the time. */
    uint64_t counted;
    double begin_j, begin_s;
};

/* Starts a program, whose name is argv[0] ("fdsl-bench": this program), and waits for it. `argv` ends with
 * NULL. STATUS_UNAVAILABLE if the program failed; the message is the last line that it printed to stderr.
 * STATUS_FAILED if a signal ended it, or if this program received a signal (file_signal_held()). */
enum status advise_start(const struct situation *situation, const char *const *argv);

/* Runs this program, which appends its rows to a file; reads this file. STATUS_UNAVAILABLE and STATUS_FAILED
 * as from advise_start(); STATUS_FAILED also if the rows cannot be read. */
enum status advise_run_child(const struct situation *situation, const char *workload,
                             const struct arguments *arguments, struct table *table);

/* Continues a run of this program, or starts it if there is none, until `epochs` more epochs have ended. Then
 * it waits for the next call, or for advise_end(). After each epoch, evicts the files of situation->evict.
 * Reads the rows. Before the last `counted` epochs, notes the energy and the time in `child`. After a
 * failure, the run may have ended. STATUS_UNAVAILABLE also if it cannot be started or is killed: other runs
 * that wait may hold what it lacked. */
enum status advise_run_epochs(const struct situation *situation, const char *workload,
                              const struct arguments *arguments, uint64_t epochs, uint64_t counted,
                              struct advise_child *child, struct table *table);

/* Returns the energy that the GPU has consumed; NaN if it is unknown, or there is no GPU. */
double advise_energy_j(const struct situation *situation);

/* advise_release() lets a run that waits end. advise_end() does this, too, and waits for its end; warns if it
 * fails then. */
void advise_release(struct advise_child *child);
void advise_end(const struct situation *situation, struct advise_child *child);

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

/* The run of a way, which waits between its measurements, and what decides how long they are. */
struct advise_pace {
    struct advise_child run;
    double steps;          /* of an epoch of this run */
    double step_s;         /* 0: not measured; as long as without input */
    double share;          /* of the samples of a mixture that are read; 0: not chosen */
    char mix[64];          /* --mix, with this share */
    double joules, images; /* of all measurements that were long enough; the energy of the whole GPU */
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

/* Measures a way once, in epochs of a training run that together take about `time_s`. The run waits for the
 * next call as long as there is room: see advise_run_epochs(). The caller ends it with advise_end(). */
enum status advise_train_once(struct situation *situation, const struct candidate *candidate, double time_s,
                              struct advise_pace *pace, struct advice *advice);

/* Generates a part of a data set, and measures how long that takes per sample. Sets set.prepared and the
 * question's prepare_s, or its prepare_reason. STATUS_FAILED after a signal. */
enum status advise_measure_prepare(struct situation *situation);

/* Measures an all-reduce of the network's gradients, or takes it from --exchange-rows. Sets the question's
 * exchange_s, or its exchange_reason. STATUS_FAILED after a signal; STATUS_USAGE if the file has no such
 * rows. */
enum status advise_measure_exchange(struct situation *situation);

/* Returns the memory that is free now. */
struct advise_room advise_room(const struct situation *situation);

/* Returns the command that trains the network on images that come in this way. The caller frees it. NULL if
 * memory runs out. */
char *advise_command(const struct situation *situation, const struct advice *way);

/* Evicts the files of a folder from the page cache. STATUS_UNAVAILABLE if they stay there. */
enum status advise_evict(const char *folder);

#endif
