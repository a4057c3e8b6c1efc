/* Shared by the parts of the trainer: trainer.c (epochs, checkpoints, rows), trainer_verify.c
 * (verification), and trainer_ranks.c (communication between ranks). No other file includes this header. */
#ifndef FDSL_TRAIN_TRAINER_PARTS_H
#define FDSL_TRAIN_TRAINER_PARTS_H

#include "train/display.h"
#include "train/trainer.h"

/* Results of a verification: the number of losses compared, the number of wrong losses, and one flag per
 * parameter tensor, set if the tensor is wrong. */
struct found {
    uint32_t losses, wrong_losses;
    bool astray[MODEL_TENSORS_MAX];
};

struct trainer {
    const struct train_job *job;
    struct train train;       /* job->train, with the exchange of this run */
    struct exchange exchange; /* its method is NULL with one rank */
    const struct engine *engine;
    void *state;             /* state of the engine */
    struct display *display; /* NULL: no display */
    struct checkpoint now; /* state after the latest epoch that trainer_finish() saw, or the initial state */
    struct train_totals totals;  /* totals of the latest epoch, over all ranks */
    struct train_totals *shares; /* room for the totals of each rank */
    uint64_t own_bad_step;       /* as totals.bad_step, but only for the samples of this rank */
    double epoch_s, exchange_s;  /* seconds of the latest epoch, and those spent in the exchange */
    float *logits;               /* logits of the test set */
    int lock;                    /* lock of the checkpoint folder; negative: none */

    struct found found; /* results of trainer_verify() */
    uint32_t drawn;     /* step drawn at random to verify an epoch; UINT32_MAX: no epoch was verified */
};

/* ---- trainer_ranks.c: all but trainer_join() and trainer_leave() are collective ---- */

/* Sets trainer->train, and opens the exchange if there are several ranks. */
enum status trainer_join(struct trainer *trainer, const struct resources *resources);
void trainer_leave(struct trainer *trainer);

/* Gives all ranks the state of rank 0, from which training begins. STATUS_USAGE if the initial parameters
 * that the ranks computed or read differ. */
enum status trainer_share_state(struct trainer *trainer);

/* As engine->steps(), set() and get(). If one of them fails on one rank, it fails on all. */
enum status trainer_steps(struct trainer *trainer, uint32_t epoch, uint32_t first, uint32_t count);
enum status trainer_set(struct trainer *trainer, const struct train_state *from);
enum status trainer_get(struct trainer *trainer, struct train_state *into);

/* Gets the engine's totals, added up over all ranks. The members data_s and generate_s are those of this
 * rank. */
enum status trainer_totals(struct trainer *trainer, struct train_totals *totals);

/* Fails on all ranks if the parameters in trainer->now differ between ranks. */
enum status trainer_check_parameters(const struct trainer *trainer);

/* Combines what the ranks found wrong, so that all ranks take the same decisions. */
enum status trainer_combine_found(struct found *found);

#endif
