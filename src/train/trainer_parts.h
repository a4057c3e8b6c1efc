/* What the parts of the trainer share: trainer.c (epochs, checkpoints, rows) and trainer_verify.c (whether
 * they are right). Nothing else includes this. */
#ifndef FDSL_TRAIN_TRAINER_PARTS_H
#define FDSL_TRAIN_TRAINER_PARTS_H

#include "train/display.h"
#include "train/trainer.h"

/* What was compared, and is wrong: losses, and tensors of parameters. */
struct found {
    uint32_t losses, wrong_losses;
    bool astray[MODEL_TENSORS_MAX];
};

struct trainer {
    const struct train_job *job;
    const struct engine *engine;
    void *state;                /* the engine's */
    struct display *display;    /* NULL: no display */
    struct checkpoint now;      /* after the latest epoch that trainer_finish() has seen, or the beginning */
    struct train_totals totals; /* of the latest epoch */
    double epoch_s;
    float *logits; /* of the test set */
    int lock;      /* of the folder of checkpoints; negative: none */

    struct found found; /* by trainer_verify() */
    uint32_t drawn;     /* step of the epoch from which on it compared; UINT32_MAX: there was no epoch yet */
};

#endif
