/* Shared by the parts of the trainer: trainer.c (epochs), trainer_folder.c (the folder of --checkpoint),
 * trainer_same.c (whether a checkpoint belongs to the run), trainer_stops.c (tests, rows of --log,
 * checkpoints within an epoch), trainer_verify.c (verification), trainer_ranks.c (communication between
 * ranks), and trainer_balance.c (shares). No other file includes this header. */
#ifndef FDSL_TRAIN_TRAINER_PARTS_H
#define FDSL_TRAIN_TRAINER_PARTS_H

#include "train/display.h"
#include "train/step_log.h"
#include "train/trainer.h"

/* Results of a verification: the number of losses compared, the number of wrong losses, and one flag per
 * parameter tensor, set if the tensor is wrong. */
struct found {
    uint32_t losses, wrong_losses;
    bool astray[MODEL_TENSORS_MAX];
    /* For messages, of wrong tensors: the largest error of the change, and the error of the optimizer's first
     * moments in that comparison. Both are relative to the oracle's change. */
    double drift[MODEL_TENSORS_MAX], moment_drift[MODEL_TENSORS_MAX];
};

struct trainer {
    const struct train_job *job;
    struct train train;       /* job->train, with the exchange of this run */
    struct exchange exchange; /* its method is NULL with one rank */
    const struct engine *engine;
    struct engine_bounds bounds; /* the largest of all ranks, whose engines may differ */
    /* job->pipeline, with the engine of the stages. In a pipeline, `engine` points to `piped`. */
    struct pipeline_plan pipeline;
    struct engine piped;
    struct pipe_measured piped_epoch; /* measurements of the latest call of steps() */
    void *state;                      /* state of the engine */
    struct display *display;          /* NULL: no display */
    struct step_log *log;             /* on rank 0; NULL: no log */
    struct checkpoint now; /* state after the latest epoch that trainer_finish() saw, or the state with which
                            * this run began */
    struct train_partial done;   /* the current epoch so far; after trainer_run(), the whole epoch */
    struct train_totals part;    /* of all ranks, since the latest stop within the epoch */
    double part_s;               /* seconds of these steps */
    struct train_state within;   /* room for the state within an epoch, for --checkpoint-steps */
    struct train_totals *shares; /* room for the totals of each rank */
    uint64_t own_bad_step;       /* as totals.bad_step, but only for the samples of this rank */
    float *logits;               /* logits of the test set */
    uint32_t *next;              /* shares of the next epoch; NULL with one rank */
    double *speeds;              /* room for one number per rank */
    bool reported;               /* whether a straggler was reported */
    int lock;                    /* lock of the checkpoint folder; negative: none */

    struct found found; /* results of trainer_verify() */
    uint32_t drawn;     /* step drawn at random to verify an epoch; UINT32_MAX: no epoch was verified */
};

/* ---- trainer_same.c ---- */

/* Checks that a checkpoint belongs to this training run. If `batch_known` is false, does not compare the
 * options. STATUS_USAGE with a remedy if the model, the samples or an option differs. The message
 * names the model, the options of the samples that differ, or the first other option that differs. */
enum status trainer_check_same(const struct train_job *job, const struct checkpoint *checkpoint,
                               bool batch_known);

/* ---- trainer_folder.c ---- */

/* On rank 0: locks the folder of --checkpoint. With --resume, sets trainer->now to the latest checkpoint, if
 * there is one; otherwise checks that the folder has no checkpoints. */
enum status trainer_take_folder(struct trainer *trainer);

/* STATUS_USAGE if --export-step is given, but training continues after the first step. */
enum status trainer_check_first_step(const struct train_job *job, const struct checkpoint *latest);

/* ---- trainer_stops.c ---- */

/* Computes loss and accuracy of the test set. */
enum status trainer_test(struct trainer *trainer, double *loss, double *accuracy);

/* Appends a row about the steps since the latest stop to the log, with the test results in `tested`. */
enum status trainer_log_part(struct trainer *trainer, const struct train_epoch *tested);

/* Collective, within an epoch: tests the network if a test is due after `step` steps, appends a row about the
 * steps since the previous stop, and writes a checkpoint if one is due. A checkpoint always ends a row, so
 * that a resumed run has the same rows as an uninterrupted run. */
enum status trainer_stop(struct trainer *trainer, uint64_t step);

/* Returns the next step after `step` at which training stops: a multiple of an option, or `end`. */
uint64_t trainer_next_stop(const struct train_job *job, uint64_t step, uint64_t end);

/* ---- trainer_ranks.c: all but trainer_leave() are collective ---- */

/* Sets trainer->train, and opens the exchange if there are several ranks. */
enum status trainer_join(struct trainer *trainer, const struct resources *resources);
void trainer_leave(struct trainer *trainer);

/* Copies the state of rank 0, with which training begins, to all ranks. STATUS_USAGE if the initial
 * parameters that the ranks computed or read differ. */
enum status trainer_share_state(struct trainer *trainer);

/* Call engine->steps(), set() and get(). If one of them fails on one rank, it fails on all. */
enum status trainer_steps(struct trainer *trainer, uint32_t epoch, uint32_t first, uint32_t count);
enum status trainer_set(struct trainer *trainer, const struct train_state *from);
enum status trainer_get(struct trainer *trainer, struct train_state *into);

/* Gets the engine's totals, added up over all ranks. The members data_s and generate_s are those of this
 * rank. */
enum status trainer_totals(struct trainer *trainer, struct train_totals *totals);

/* Fails on all ranks if the parameters in trainer->now differ between ranks. */
enum status trainer_check_parameters(const struct trainer *trainer);

/* Pipelines only: describes the stage of this rank and its latest epoch. */
enum status trainer_report_stage(const struct trainer *trainer, struct train_epoch *epoch);

/* Combines the verification results of all ranks, so that all ranks make the same decisions. */
enum status trainer_combine_found(struct found *found);

/* ---- trainer_balance.c: the shares of the ranks. These functions do nothing with one rank ---- */

/* Collective: sets the shares of the first epoch and trainer->train.share_max, before the engine is opened.
 * On rank 0, trainer->now has the checkpoint to resume. STATUS_UNAVAILABLE if the free memory is unknown. */
enum status trainer_take_shares(struct trainer *trainer, const struct resources *resources);

/* Makes trainer->next the shares of the ranks. Call only between epochs. */
void trainer_use_shares(struct trainer *trainer);

/* Collective, after an epoch: computes trainer->next from the speeds of the ranks in this epoch (--balance
 * measured), or warns once on rank 0 if the ranks are uneven. */
enum status trainer_rebalance(struct trainer *trainer);

/* Writes trainer->next to trainer->now, if a resumed run would need it. */
enum status trainer_note_shares(struct trainer *trainer);

#endif
