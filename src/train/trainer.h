/* What all train and infer variants share: an engine and what drives it. A variant is an engine and two of
 * these, each with a setup of one line:
 *
 *     static enum status setup(const struct resources *resources, const void *input, void **state)
 *     {
 *         return trainer_open(&engine_x, resources, input, state);
 *     }
 *     const struct variant variant_train_x = {.platform = "cpu", .traits = &engine_x, .setup = setup,
 *         .run = trainer_run, .fetch = trainer_fetch, .teardown = trainer_close}; */
#ifndef FDSL_TRAIN_TRAINER_H
#define FDSL_TRAIN_TRAINER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "core/variant.h"
#include "train/checkpoint.h"
#include "train/engine.h"

/* The input of the workload `train`. */
struct train_job {
    struct train train;
    const float *initial; /* the parameters that it begins with: an arena */
    uint32_t epochs;
    uint32_t verify_steps;
    const char *checkpoints; /* a folder; NULL: none */
    uint32_t keep;           /* checkpoints in it */
    bool resume, allow_nan;
    const char *identity; /* the options that decide the parameters, as text */
    const char *data;     /* --data, and the rest of what says which samples */
    struct train_samples samples;
    const char *export_path; /* NULL: none */
    const char *step_path;   /* of the first step, NULL: none */
};

/* What the latest epoch came to. */
struct train_epoch {
    struct train_history history; /* of all epochs so far */
    uint32_t steps;
    double loss, train_accuracy; /* means over the epoch, while the parameters changed */
    double test_loss, test_accuracy;
    double rate;            /* of its last step */
    bool scales_loss;       /* the engine does; else these are nothing: */
    uint64_t skipped;       /* steps that overflowed */
    double loss_scale;      /* behind its last step */
    double data_s, epoch_s; /* data_s negative where it is not known */
    double generate_s;      /* how long live samples were being made */
    uint64_t memory_bytes;
};

FDSL_C_BEGIN

/* ---- Training: run() is the next epoch, whatever its number ---- */

enum status trainer_open(const struct engine *engine, const struct resources *resources, const void *job,
                         void **state);
enum status trainer_run(void *state, uint64_t number, struct run_time *time);
enum status trainer_fetch(void *state, void *result); /* nothing: trainer_finish() tells all */
void trainer_close(void *state);

/* Whether there is another epoch to come. */
bool trainer_more(const void *state);

/* After an epoch, untimed: tests, and takes the parameters. */
enum status trainer_finish(void *state, struct train_epoch *epoch);

/* After that: writes the checkpoint with the epoch's row. */
enum status trainer_keep(void *state, const char *row);

/* The row in the checkpoint that this training went on from; "" where there is none. */
const char *trainer_kept(const void *state);

/* Behind the last epoch of all: exports. `runs` epochs were made now. */
enum status trainer_end(void *state, uint64_t runs);

/* Compares with the oracle, and counts the losses and the tensors of parameters that are off by more than
 * engine->bounds. The state is then as it was.
 *
 * `number` 0, before the first epoch: job->verify_steps steps from the present state; the engine takes over
 * the oracle's state every five of them.
 *
 * Else, after an epoch and before trainer_finish(): the epoch is made again, and must come to the same loss
 * and, bit by bit, to the same parameters; a step that is drawn at random, and the last one, must be the
 * oracle's. Where one is not, its neighbour decides.
 *
 * STATUS_FAILED where the oracle's own loss is no finite number. */
enum status trainer_verify(void *state, uint64_t number, uint64_t *wrong);

/* What trainer_verify() found wrong: "9 of 10 losses and 10 of 10 tensors". */
void trainer_verdict(const void *state, char *text, size_t size);

/* Adds an epoch that took `epoch_s` seconds and ended with this accuracy on the test set. */
void train_note_epoch(struct train_history *history, double epoch_s, double accuracy);

/* Mean cross-entropy (without smoothing) and share of right answers. */
void logits_judge(const float *logits, const uint32_t *labels, uint32_t count, uint32_t classes, double *loss,
                  double *accuracy);

FDSL_C_END

#endif
