/* --init: training begins with what another training of the same model has learnt, such as fine-tuning on few
 * samples behind a pre-training on many. */
#ifndef FDSL_TRAIN_INIT_H
#define FDSL_TRAIN_INIT_H

#include <stdint.h>

#include "core/status.h"
#include "train/model.h"

/* Writes the parameters of a checkpoint (a file, or a folder's latest) over those of `parameters`, an arena
 * of the model's. Its pictures may have had another size, where no shape of weights depends on that. The last
 * layer's become zeros where it has other shapes there, as with another number of classes. One line says what
 * was taken. `*hash` is of all parameters of the checkpoint. STATUS_USAGE where it is of another model, or
 * its other tensors have other shapes, or nothing is left to take; then `parameters` are as they were. */
enum status init_take(const char *path, const struct model *model, float *parameters, uint64_t *hash);

#endif
