/* Shared by the parts of the trainer: trainer.c (epochs, checkpoints, rows) and trainer_verify.c
 * (verification). No other file includes this header. */
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
    const struct engine *engine;
    void *state;             /* state of the engine */
    struct display *display; /* NULL: no display */
    struct checkpoint now; /* state after the latest epoch that trainer_finish() saw, or the initial state */
    struct train_totals totals; /* totals of the latest epoch */
    double epoch_s;
    float *logits; /* logits of the test set */
    int lock;      /* lock of the checkpoint folder; negative: none */

    struct found found; /* results of trainer_verify() */
    uint32_t drawn;     /* step drawn at random to verify an epoch; UINT32_MAX: no epoch was verified */
};

#endif
