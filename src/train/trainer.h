/* Drives an engine through training; shared by all variants of `train`. A variant consists of an engine and
 * the functions of this header; TRAINING_BY() and INFERRING_BY() below and cuda/train/engines.cuh define
 * variants in this way. With several ranks, trainer_open(), trainer_run(), trainer_finish() and
 * trainer_verify() are collective. Rank 0 reads and writes the files. */
#ifndef FDSL_TRAIN_TRAINER_H
#define FDSL_TRAIN_TRAINER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/record.h"
#include "core/status.h"
#include "core/variant.h"
#include "data/stream_state.h"
#include "train/checkpoint.h"
#include "train/engine.h"
#include "train/layer_precision.h"
#include "train/pipeline.h"

/* --balance: how the ranks divide the samples of a step. A rank's share is its number of samples per step.
 * docs/distributed.md describes the option. */
enum balance {
    BALANCE_EQUAL,
    BALANCE_MEASURED, /* shares in proportion to the speeds, measured in each epoch */
    BALANCE_MEMORY,   /* shares in proportion to the free memory */
    BALANCE_FIXED,    /* shares in proportion to the numbers in the value of --balance */
};

/* --balance measured changes the shares only if it expects to save more than this part of a step's time. */
#define BALANCE_GAIN_MIN 0.02

/* The input of the workload `train`. */
struct train_job {
    struct train train;
    const float *initial; /* the initial parameters, in one array (an arena, see model.h) */
    uint32_t epochs;
    uint32_t verify_steps;
    const char *checkpoints; /* a folder; NULL: none */
    uint32_t keep;           /* number of checkpoints that the folder keeps */
    /* Intervals in steps, counted over all epochs; 0: never. */
    uint32_t checkpoint_steps, test_steps, log_steps;
    const char *log_path; /* CSV file of --log; NULL: none */
    bool resume, allow_nan;
    bool largest;                  /* --batch max; the batch is not known with --dry-run */
    struct pipeline_plan pipeline; /* stages = 0: data-parallel */
    int sync;                      /* value of --sync, for exchange_open() */
    enum balance balance;
    const double *weights; /* per rank: its weight at the beginning (balance_parse()); NULL with one rank */
    uint32_t *shares;      /* per rank: samples in a full step of the current epoch, written by the trainer;
                            * NULL with one rank. train.shares is this array, or NULL with BALANCE_EQUAL */
    struct option_values identity; /* the options that affect the parameters; not owned */
    const char *data;              /* value of --data */
    struct option_values samples;  /* the options that choose the samples, except --data; not owned */
    const char *export_path;       /* NULL: no export */
    const char *step_path;         /* export of the first step; NULL: none */
    /* The state of a stream with which training begins (NULL: the first step), and its file; it was checked
     * by resume_check_state(). The file to which states are written; NULL: none. */
    const struct stream_state *begin;
    const char *begin_path, *state_path;
    uint32_t *skipped;  /* steps of the current epoch before `begin`, which this run does not train; NULL, or
                         * written by the trainer */
    const char *choice; /* what --parallel auto has chosen, for checkpoints; NULL: nothing. Not owned */
    bool shows_memory;  /* --memory */
    bool tries;         /* this run tries a batch for --batch max: keep a reserve below the limit */
    bool plans; /* trainer_open() only plans the memory: then call trainer_planned(), trainer_close() */
};

/* The results of a set of samples. */
struct judgement {
    double loss; /* mean cross-entropy, without smoothing; of multi-hot labels, mean binary cross-entropy */
    double accuracy; /* share of samples that show the class of their largest logit */
    /* With multi-hot labels: the mean average precision over the classes that a sample shows; else NaN. The
     * average precision of a class is the sum over its distinct logits, largest first, of precision times the
     * increase of recall, as in scikit-learn's average_precision_score(). */
    double precision;
};

/* Results of the latest epoch. */
struct train_epoch {
    struct train_history history; /* totals of all epochs so far */
    uint32_t steps;
    struct train_totals
        totals; /* of all ranks; of this rank: all seconds, and what was read and is resident */
    double loss, train_accuracy; /* means over the epoch; parameters change during it */
    struct judgement test;
    struct judgement ema; /* of the test set, with the averaged parameters; NaN: no average */
    double gradient_norm; /* mean over the steps, before clipping; NaN: not computed */
    double rate;          /* learning rate of the epoch's last step */
    bool scales_loss;     /* whether the engine scales the loss; if not, the next two members are unused */
    double loss_scale;    /* loss scale after the epoch's last step */
    char overflows[LAYER_OVERFLOWS_TEXT]; /* layer_overflows_text() of the epoch's steps in this process */
    double epoch_s;                       /* duration of the epoch in seconds */
    struct train_decoding decoding;       /* DATA_LOAD only: as the engine decodes */
    double cpu_s, cpu_span_s; /* CPU time of this process during the steps that it trained; their duration */
    const char *exchange;     /* the method that adds up the gradients of the ranks; "" with one rank */
    double exchange_s;        /* seconds in which this rank exchanged gradients, including waiting */
    uint64_t memory_bytes;
    /* Pipelines only: the layers of this rank, and the fraction of its time in which it waits. `bubble` is
     * measured; `bubble_ideal` is simulated with the measured times of all stages. */
    char layers[2 * MODEL_NAME_MAX + 1];
    double bubble, bubble_ideal;
    /* With --memory, --memory-limit or --parallel auto: the memory of this rank as planned, and in use after
     * the epoch; else 0. */
    uint64_t planned_bytes, used_bytes;
};

FDSL_C_BEGIN

/* ---- Training: each run() trains the next epoch and ignores the run number ---- */

/* Implement setup(), run(), fetch() and teardown() of a variant (core/variant.h). `job` is a struct
 * train_job. */
enum status trainer_open(const struct engine *engine, const struct resources *resources, const void *job,
                         void **state);
enum status trainer_run(void *state, uint64_t number, struct run_time *time);

/* Position of a trainer between two steps. */
struct trainer_position {
    uint32_t epoch, epochs; /* completed epochs; epochs of the training */
    uint32_t step, steps;   /* steps of the current epoch that were passed to the engine; steps of an epoch */
    uint32_t samples;       /* samples of this rank in the next step */
    uint64_t memory_bytes;  /* that the engine uses */
};
void trainer_position(const void *state, struct trainer_position *position);

/* trainer_left() returns the number of steps that remain in the current epoch. trainer_advance() passes
 * `count` of them to the engine, and stops for tests, rows of --log and checkpoints. Devices may still
 * compute the steps when it returns. trainer_run() runs all of them and waits. When none is left,
 * trainer_finish() ends the epoch. Collective. */
uint32_t trainer_left(const void *state);
enum status trainer_advance(void *state, uint32_t count);

/* Waits for all steps. Sets the loss, `correct` and `samples` to the sums over the steps since the previous
 * call, of all ranks. Collective. */
enum status trainer_read(void *state, struct train_totals *totals);

/* trainer_save() writes a checkpoint of the current step to a folder. trainer_load() continues from the
 * latest checkpoint of a folder: STATUS_USAGE if it is of other options. Both are collective; rank 0 reads
 * and writes. */
enum status trainer_save(void *state, const char *folder);
enum status trainer_load(void *state, const char *folder);

/* trainer_evaluate() judges the test set. Of samples that the caller hands over (train/given.h),
 * trainer_evaluate_given() judges the first ones at trainer_test_samples(), which the caller has filled;
 * `batch` has their number and labels, and `logits` room for their logits. Collective, except the latter. */
enum status trainer_evaluate(void *state, struct judgement *judged);
enum status trainer_evaluate_given(void *state, const struct data_set *batch, float *logits,
                                   struct judgement *judged);
void *trainer_test_samples(void *state);

/* trainer_export() writes the parameters as --export does; trainer_import() reads them as --init does, and
 * clears the moments. STATUS_USAGE within an epoch. Collective. */
enum status trainer_export(void *state, const char *path);
enum status trainer_import(void *state, const char *path);

enum status trainer_probe(void *state); /* runs the first step; collective */
/* Runs steps for a few seconds. Sets `*stall` to the largest share of their time, of all ranks, in which they
 * waited for samples, and `*step_s` to the seconds per step. Collective. */
enum status trainer_probe_stalls(void *state, double *stall, double *step_s);
/* Sets `*needed_bytes` to the planned memory of this rank, `*room_bytes` to the memory that there is, or to
 * its limit, and `*context_bytes` to the part MEMORY_CONTEXT of the plan. Call if job->plans was set. */
enum status trainer_planned(const void *state, const struct resources *resources, uint64_t *needed_bytes,
                            uint64_t *room_bytes, uint64_t *context_bytes);

/* Runs steps for about a second. Sets `*step_s` to the seconds per step of the slowest rank. Collective. */
enum status trainer_probe_step(void *state, double *step_s);
enum status trainer_fetch(void *state,
                          void *result); /* fills nothing: trainer_finish() reports the results */
void trainer_close(void *state);

/* ---- Functions of the workload (core/workload.h); none uses `input` or `variant` ---- */

/* Checks what setup() checks, without training: the folder of --checkpoint. Writes the file of --export-step.
 * Call on rank 0. */
enum status trainer_check(const void *input, const struct variant *variant,
                          const struct resources *resources);

/* Returns whether epochs remain. */
bool trainer_more(const void *input, void *state);

/* Call after an epoch, untimed: tests the network, copies the parameters to the host, and fills `*epoch`. */
enum status trainer_finish(void *state, struct train_epoch *epoch);

/* Call on rank 0 after trainer_finish(): writes the checkpoint with the epoch's rows. */
enum status trainer_keep(const void *input, void *state, const char *rows);

/* Returns the CSV rows in the latest checkpoint that this run read or wrote; "" if there are none. */
const char *trainer_kept(const void *state);

/* Call after the last epoch: writes the file of --export. `runs` is the number of epochs that this process
 * trained; if it is 0, prints a note. */
enum status trainer_end(const void *input, void *state, uint64_t runs);

/* Compares the engine with the oracle. `*wrong` becomes the number of losses and parameter tensors that
 * differ by more than the bounds. The bounds are the largest of all ranks, whose engines may differ. Restores
 * the state afterwards.
 *
 * If `number` is 0 (before the first epoch), compares job->verify_steps steps from the current state. After
 * every five steps, the oracle's state is copied to the engine.
 *
 * Otherwise (after an epoch, before trainer_finish()), trains the epoch again. If this run resumed within the
 * epoch, repeats only the steps after that point. The repetition must give bit-identical parameters and,
 * within bounds.loss, the same loss. Also compares the last step and one step drawn at random with the
 * oracle. If one of these two steps differs, the result of a neighbouring step counts instead.
 *
 * STATUS_FAILED if the oracle's own loss is not finite. */
enum status trainer_verify(const void *input, const struct variant *variant, void *state, uint64_t number,
                           uint64_t *wrong);

/* Formats what trainer_verify() found wrong, for example "9 of 10 losses and 10 of 10 tensors". */
void trainer_verdict(const void *input, void *state, char *text, size_t size);

/* ---- resume.c: continuing from a checkpoint. Call these functions on rank 0 ---- */

/* Before the data are read: compares the options with those of the latest checkpoint to resume, without the
 * initial parameters and the samples. Reads only the members `identity`, `checkpoints` and `largest` of the
 * job. STATUS_USAGE with the first option that differs, and what to give instead. */
enum status resume_check_options(const struct train_job *job, const char *model);

/* With --mix synth:auto: the share that a checkpoint has, and that training keeps, as a value of a struct
 * data_mix_texts. resume_take_share() sets it from the latest checkpoint of a folder, if there is one. */
extern const struct option_spec resume_share_option;
enum status resume_take_share(struct data_mix_texts *mix, const char *folder);

/* The choice of --parallel auto: resume_take_choice() copies it from the latest checkpoint of a folder
 * (NULL: none) to `name`, or sets `name` to ""; resume_note_choice() writes job->choice to the identity of
 * the checkpoints. A run need not repeat it: every choice gives the same parameters, up to rounding. */
enum status resume_take_choice(const char *folder, char *name, size_t size);
enum status resume_note_choice(const struct train_job *job, struct option_values *identity);

/* Reads the latest checkpoint in the folder, if there is one, and checks that training can continue from it.
 * With `batch_known` = false, compares neither the options nor the number of steps. STATUS_USAGE with a
 * remedy if the model, the samples or an option differs. The caller frees `latest` if `*found` is true. */
enum status resume_read(const struct train_job *job, bool batch_known, struct checkpoint *latest,
                        bool *found);

/* STATUS_USAGE if the folder has checkpoints, because --resume is not given. */
enum status resume_refuse_full(const struct train_job *job);

/* After the engine was opened: compares how it decodes with how the run decoded before the checkpoint, or, at
 * the beginning of a run, adds it to `identity`, which is that of the checkpoints. A checkpoint without a
 * decoder is one of samples that the CPU decoded. STATUS_USAGE with the option that differs, and what to
 * give instead. */
enum status resume_take_decoding(const struct train_job *job, const struct train_decoding *decoding,
                                 bool resumed, struct option_values *identity);

/* Checks the state with which training shall begin (job->begin), and whether states can be written
 * (job->state_path). STATUS_USAGE with what differs from this run, and a remedy. To be called on each rank.
 */
enum status resume_check_state(const struct train_job *job);

/* Sets `done` to the part of an epoch before the step with which training begins: nothing was trained, but
 * the samples count as delivered. */
void resume_skip(const struct train_job *job, struct train_history *history, struct train_partial *done);

/* Returns the number of steps of an epoch that are before the step with which training begins. */
uint32_t resume_skipped(const struct train_job *job, uint32_t epoch);

/* Writes the position after these epochs and steps to the file of --export-state, if there is one. */
enum status resume_write_state(const struct train_job *job, uint32_t epochs, uint32_t steps);

/* Returns the sum of the hashes of the samples that the first `steps` steps of an epoch must have. */
uint64_t resume_delivered(const struct train *train, uint32_t epoch, uint32_t steps);

/* STATUS_USAGE if --export-step is given, but training continues after the first step. */
enum status resume_check_first_step(const struct train_job *job, const struct checkpoint *latest);

/* For --dry-run: checks the folder, which the caller has locked, and says from where a run would continue. */
enum status resume_check_folder(const struct train_job *job);

/* ---- parallel.c: shares. All functions are pure ---- */

/* Parses the value of --balance: "equal", "measured", "memory", or one number per rank, such as "3:1". Sets
 * `weights` to these numbers; without numbers, sets all weights to 1. Returns STATUS_USAGE if the value is
 * invalid; the message says what to give instead. */
enum status balance_parse(const char *text, uint32_t ranks, enum balance *balance, double *weights);

/* Returns the part of a step's time that the shares `next` would save, compared with `now`. A step takes as
 * long as its slowest rank. `speeds` are in samples per second, and more than 0 for ranks with a share. */
double balance_gain(const double *speeds, uint32_t ranks, const uint32_t *now, const uint32_t *next);

/* Sets `next` to shares in proportion to `speeds`, at least 1 per rank, with the same sum as `now`, which is
 * at least the number of ranks. If these shares would not save more than `gain_min` of a step's time, sets
 * `next` to `now`. Returns the part that `next` saves: 0 or more than `gain_min`. If a speed is not finite
 * and positive, nothing is known about the rank, so `next` becomes `now`. */
double balance_improve(const double *speeds, uint32_t ranks, double gain_min, const uint32_t *now,
                       uint32_t *next);

/* Returns whether the shares in a checkpoint are those of a run with this value of --balance, this number of
 * ranks, and `batch` samples per step. */
bool balance_continues(const struct checkpoint *checkpoint, enum balance balance, uint32_t ranks,
                       uint32_t batch);

/* ---- Results ---- */

/* Adds to the history an epoch that took `epoch_s` seconds and ended with this test accuracy (0 to 1). */
void train_note_epoch(struct train_history *history, double epoch_s, double accuracy);

/* Judges set->count * classes logits, of which NaN counts as the smallest one, and as a wrong answer.
 * STATUS_EXHAUSTED if memory runs out. */
enum status logits_judge(const float *logits, const struct data_set *set, uint32_t classes,
                         struct judgement *judged);

FDSL_C_END

/* ---- Inference: run number n evaluates batch n mod N, where N is the number of whole batches in the test
 * set ---- */

/* The input of the workload `infer`. */
struct infer_job {
    struct train train;      /* with forward_only set */
    const float *parameters; /* an arena (model.h) */
};

struct inferrer {
    const struct infer_job *job;
    const struct engine *engine;
    void *state; /* state of the engine */
    float *logits;
    uint64_t number; /* of the latest run; UINT64_MAX before the first run */
};

/* Output of inferrer_fetch(). */
struct infer_result {
    float *logits;   /* owned by the caller; room for one batch */
    uint64_t number; /* number of the latest run, which produced `logits`; UINT64_MAX before the first run */
};

FDSL_C_BEGIN

/* Implement setup(), run(), fetch() and teardown() of a variant (core/variant.h). `job` is a struct
 * infer_job. */
enum status inferrer_open(const struct engine *engine, const struct resources *resources, const void *job,
                          void **state);
enum status inferrer_run(void *state, uint64_t number, struct run_time *time);
enum status inferrer_fetch(void *state, void *result);
void inferrer_close(void *state);

FDSL_C_END

/* ---- Variants on the CPU. Arguments after the engine initialise further members of struct variant ---- */

#define VARIANT_BY(driver, symbol, engine, ...)                                                           \
    static enum status symbol##_setup(const struct resources *resources, const void *input, void **state) \
    {                                                                                                     \
        return driver##_open(&engine, resources, input, state);                                           \
    }                                                                                                     \
    const struct variant symbol = {.platform = "cpu",                                                     \
                                   .traits = &engine,                                                     \
                                   .setup = symbol##_setup,                                               \
                                   .run = driver##_run,                                                   \
                                   .fetch = driver##_fetch,                                               \
                                   .teardown = driver##_close,                                            \
                                   __VA_ARGS__}

#define TRAINING_BY(symbol, ...)  VARIANT_BY(trainer, symbol, __VA_ARGS__)
#define INFERRING_BY(symbol, ...) VARIANT_BY(inferrer, symbol, __VA_ARGS__)

/* ---- Reports while an epoch runs (train_measures.c) ---- */

/* ---- The line on the terminal ---- */

struct display;

/* Starts a thread that prints the progress of `engine` to stderr every quarter of a second while an epoch
 * runs. Returns NULL if status_shows_progress() is false or no thread can be started. Of the engine's
 * functions, the thread calls only progress(), which only reads memory. Training therefore makes the same
 * calls with and without a display. */
struct display *display_open(const struct engine *engine, const void *state, const struct train *train,
                             uint32_t epochs);

/* Mark the beginning and the end of an epoch; `epoch` counts from 0. These functions neither block nor make
 * system calls. NULL is allowed. */
void display_begin(struct display *display, uint32_t epoch);
void display_end(struct display *display);

/* Call before the first step of an epoch, and after each engine->totals(), which resets the engine's sums.
 * Passes the sums over all earlier steps of the epoch, and the seconds of the epoch so far. `display` may be
 * NULL. */
void display_pass(struct display *display, const struct train_totals *totals, double epoch_s);

/* Waits while a line is being printed. After display_end() and this function, nothing is printed until the
 * next display_begin(). NULL is allowed. */
void display_wait(struct display *display);

/* Stops the thread. Call this function before engine->close(). NULL is allowed. */
void display_close(struct display *display);

/* ---- --log: a separate CSV file ---- */

extern const struct column step_columns[]; /* ends with an entry whose name is NULL */

/* The values of a row. */
struct step_row {
    uint32_t epoch;                  /* counted from 1 */
    uint64_t step;                   /* steps done, counted over all epochs; at least 1 */
    uint64_t samples_seen;           /* in these steps, by all ranks */
    struct train_totals totals;      /* of all ranks, since the previous row */
    double steps_s;                  /* seconds of the steps since the previous row */
    double test_loss, test_accuracy; /* NaN: not tested */
};

struct step_log;

/* Checks that rows can be appended to the CSV file at `path`. Fails like csv_check(). Call before training.
 */
enum status step_log_check(const char *path);

/* Opens a log of an engine that trains `train`; `path` and `train` must stay valid as long as the log.
 * `ranks` is the number of ranks. Unless the run `resumes`, warns if the file has rows that readers
 * cannot tell apart from the rows of this run. STATUS_EXHAUSTED if memory runs out; for engines on a device,
 * fails like device_describe(). The caller closes the log, even after a failure. */
enum status step_log_open(const char *path, const struct engine *engine, const struct train *train,
                          const struct resources *resources, int ranks, bool resumes, struct step_log **log);

/* Appends a row; fails like csv_append(). */
enum status step_log_add(struct step_log *log, const struct step_row *step);

/* Closes a log; NULL is allowed. */
void step_log_close(struct step_log *log);

#endif
