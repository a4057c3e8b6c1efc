/* Shared by the step backends that train on batches from another workload (core/step_backend.h). */
#ifndef FDSL_TRAIN_TASK_H
#define FDSL_TRAIN_TASK_H

#include "core/step_backend.h"
#include "train/model.h"

FDSL_C_BEGIN

/* Fills `*model` with the network of a task. STATUS_USAGE if the network's name is unknown or its layers do
 * not fit the images. */
enum status task_build(const struct task *task, struct model *model);

FDSL_C_END

#endif
