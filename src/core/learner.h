/* The trainer's own step, for those who have batches and want them learnt from: an interface, so that rooms
 * need not include each other. src/train/learner.c knows the networks, cuda/train/learner.cu makes the steps.
 *
 * C, no CUDA header. A learner is a table of functions and its state behind it. */
#ifndef FDSL_CORE_LEARNER_H
#define FDSL_CORE_LEARNER_H

#include <stdint.h>

#include "core/batch.h"
#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* What is learnt, and from what: pictures of one shape, in classes that are told apart. */
struct lesson {
    char model[16]; /* the network's name; "" until lesson_choose() */
    uint32_t channels, height, width, classes;
    uint32_t batch; /* samples of a step, at most */
    uint32_t share; /* of a whole batch of this rank: fewer where the ranks share one out */
};

/* Whether there is a network of that name that takes pictures: STATUS_USAGE, with the nearest one suggested,
 * where there is none. */
enum status lesson_check_name(const char *model);

/* Chooses a network where none is named: cnn for 1 x 28 x 28, else cnn-fdsl. STATUS_USAGE where the name is
 * unknown, or the network does not fit the pictures. */
enum status lesson_choose(struct lesson *lesson);

struct learner;

struct learner_type {
    enum status (*begin)(struct learner *learner);
    enum status (*step)(struct learner *learner, const struct batch *batch);
    enum status (*loss)(struct learner *learner, double *loss);
    void (*close)(struct learner *learner);
};

/* The first member of each implementation's own struct. */
struct learner {
    const struct learner_type *type;
    void *stream; /* of its steps: a cudaStream_t of the default priority, the lowest; the learner's */
};

/* Makes a learner of a lesson that was chosen, on CUDA device `device`, as learner_begin() leaves it. The
 * caller closes it. STATUS_USAGE where its memory does not fit. */
enum status learner_open(int device, const struct lesson *lesson, struct learner **learner);

/* Forgets all: the parameters are those that training begins with. Waits for the steps before. */
static inline enum status learner_begin(struct learner *learner)
{
    return learner->type->begin(learner);
}

/* Enqueues the next step of the training: forward, backward and optimizer, on a batch that lies on the device
 * until the step has ended, its values from addresses that their size divides. Returns at once. One thread at
 * a time. */
static inline enum status learner_step(struct learner *learner, const struct batch *batch)
{
    return learner->type->step(learner, batch);
}

/* The mean loss of the samples of the latest steps, LEARNER_RECENT at most, each before its step; NaN before
 * the first. Waits for them. STATUS_FAILED where the loss of a step was no finite number. */
#define LEARNER_RECENT 64
static inline enum status learner_loss(struct learner *learner, double *loss)
{
    return learner->type->loss(learner, loss);
}

/* Waits for its steps and frees it; NULL is allowed. */
static inline void learner_close(struct learner *learner)
{
    if (learner)
        learner->type->close(learner);
}

FDSL_C_END

#endif
