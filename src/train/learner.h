/* What learners share that make steps of the trainer on batches that others made (core/learner.h). */
#ifndef FDSL_TRAIN_LEARNER_H
#define FDSL_TRAIN_LEARNER_H

#include "core/learner.h"
#include "train/model.h"

FDSL_C_BEGIN

/* Fills `*model` with the network of a lesson. STATUS_USAGE where its name is unknown, or its layers do not
 * fit the pictures. */
enum status lesson_build(const struct lesson *lesson, struct model *model);

FDSL_C_END

#endif
