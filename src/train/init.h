/* --init: training starts with the parameters of an earlier training run of the same model, for example to
 * fine-tune on few samples after pre-training on many. */
#ifndef FDSL_TRAIN_INIT_H
#define FDSL_TRAIN_INIT_H

#include <stdint.h>

#include "core/status.h"
#include "train/model.h"

/* Reads parameters into `parameters`, an arena of the model. `path` is a checkpoint file, a folder whose
 * latest checkpoint is used, or a file of tensors with the names and shapes of the model, as --export and
 * timm write it. The image size may differ if no weight tensor depends on it. If the file lacks the last
 * layer or has it in other shapes (another number of classes), that layer is set to zeros. Prints one line
 * that says what was copied. Sets `*hash` to checkpoint_hash() of the checkpoint. STATUS_USAGE if the
 * checkpoint belongs to another model, if other tensors differ in shape, if a value is not finite, or if
 * nothing could be copied. `parameters` are then unchanged. */
enum status init_take(const char *path, const struct model *model, float *parameters, uint64_t *hash);

#endif
