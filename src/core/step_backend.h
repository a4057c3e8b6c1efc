/* Training steps on batches, for code that must not include the headers of src/train. src/train/task.c
 * chooses the network; cuda/train/step_backend.cu runs the steps. */
#ifndef FDSL_CORE_STEP_BACKEND_H
#define FDSL_CORE_STEP_BACKEND_H

#include <stdint.h>

#include "core/batch.h"
#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* A training task: classify images of one shape with one model. */
struct task {
    char model[16]; /* name of the network; "": task_choose() chooses one */
    uint32_t channels, height, width, classes;
    uint32_t batch; /* maximum number of samples per step */
    uint32_t share; /* number of this rank's samples in a whole batch; less than `batch` if the ranks divide a
                     * batch */
};

/* Checks that an image network of this name exists. If not, returns STATUS_USAGE and suggests the nearest
 * name. */
enum status task_check_name(const char *model);

/* Sets task->model if it is "": cnn for 1 x 28 x 28, else cnn-fdsl. STATUS_USAGE if the name is unknown, the
 * network does not fit the images, or there are fewer than 2 classes. */
enum status task_choose(struct task *task);

/* A model and its optimizer state on a device. Not thread safe. */
struct step_backend;

/* Creates a step backend with initial parameters on CUDA device `device`, for a task that task_choose() has
 * completed. The caller closes it with step_backend_close(). STATUS_USAGE if the model does not fit in
 * device memory. */
enum status step_backend_open(int device, const struct task *task, struct step_backend **backend);

/* Resets the parameters to their initial values, after all enqueued steps. */
enum status step_backend_reset(struct step_backend *backend);

/* Enqueues the next training step (forward, backward, optimizer) on a batch in device memory and returns
 * immediately. The batch must stay valid until the step has ended. Its values must be aligned to the size of
 * one value. */
enum status step_backend_step(struct step_backend *backend, const struct batch *batch);

/* Returns the stream of the steps: a cudaStream_t of the lowest priority, owned by the step backend. */
void *step_backend_stream(const struct step_backend *backend);

/* Waits for all steps and computes the mean loss per sample over the last STEP_BACKEND_RECENT steps. The loss
 * of a step is computed before the step updates the parameters. `*loss` is NaN before the first step.
 * STATUS_FAILED if a loss was not finite. */
#define STEP_BACKEND_RECENT 64
enum status step_backend_loss(struct step_backend *backend, double *loss);

/* Waits for all steps and frees the step backend; NULL is allowed. */
void step_backend_close(struct step_backend *backend);

FDSL_C_END

#endif
