/* The trainer's own step, for rooms that have batches and may not include the room `train`.
 * src/train/task.c knows the networks, cuda/train/step_backend.cu runs the steps. */
#ifndef FDSL_CORE_STEP_BACKEND_H
#define FDSL_CORE_STEP_BACKEND_H

#include <stdint.h>

#include "core/batch.h"
#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* What is learnt, and from what: pictures of one shape, in classes that are told apart. */
struct task {
    char model[16]; /* the network's name; "" until task_choose() */
    uint32_t channels, height, width, classes;
    uint32_t batch; /* samples of a step, at most */
    uint32_t share; /* of a whole batch of this rank: fewer where the ranks share one out */
};

/* Whether there is a network of that name that takes pictures: STATUS_USAGE, with the nearest one suggested,
 * where there is none. */
enum status task_check_name(const char *model);

/* Chooses a network where none is named: cnn for 1 x 28 x 28, else cnn-fdsl. STATUS_USAGE where the name is
 * unknown, or the network does not fit the pictures. */
enum status task_choose(struct task *task);

/* A model on a device and the optimizer's state: cuda/train/step_backend.cu. One thread at a time. */
struct step_backend;

/* Creates a learner for a task that task_choose() completed, on CUDA device `device`, with initial
 * parameters. The caller closes it. STATUS_USAGE where its memory does not fit. */
enum status step_backend_open(int device, const struct task *task, struct step_backend **backend);

/* Resets the parameters to their initial values, after the steps that were enqueued. */
enum status step_backend_reset(struct step_backend *backend);

/* Enqueues the next training step (forward, backward, optimizer) on a batch in device memory, and returns at
 * once. The batch must stay valid until the step has ended; its values are aligned to their size. */
enum status step_backend_step(struct step_backend *backend, const struct batch *batch);

/* The stream of the steps: a cudaStream_t of the lowest priority, owned by the learner. */
void *step_backend_stream(const struct step_backend *backend);

/* Waits for the steps and returns the mean loss per sample of the latest STEP_BACKEND_RECENT steps, each loss
 * before its update; NaN before the first step. STATUS_FAILED where the loss of a step was not finite. */
#define STEP_BACKEND_RECENT 64
enum status step_backend_loss(struct step_backend *backend, double *loss);

/* Waits for the steps and frees the learner; NULL is allowed. */
void step_backend_close(struct step_backend *backend);

FDSL_C_END

#endif
