/* What others may want to have of a training, as safetensors: parameters under PyTorch's names, the data, and
 * all of one step, to compare with. `identity` is the options as text, for the file's metadata. STATUS_FAILED
 * with path and reason. */
#ifndef FDSL_TRAIN_EXPORT_H
#define FDSL_TRAIN_EXPORT_H

#include "core/portable.h"
#include "core/status.h"
#include "train/engine.h"

FDSL_C_BEGIN

/* "conv1.weight", "conv1.bias", ...; the metadata has what a caller of the network needs as well, each as
 * JSON: "input" (the shape of a sample), "classes", and a "scale" and an "offset" a channel, which normalise:
 * value v goes in as v * scale + offset. */
enum status export_parameters(const struct train *train, const float *parameters, const char *identity,
                              const char *path);

/* Both sets as they are stored (train.values, train.labels, test...), scale and offset that normalise them,
 * and the parameters that training begins with (initial.conv1.weight ...). STATUS_USAGE where the training
 * samples are not DATA_STORED. */
enum status export_data(const struct train *train, const float *initial, const char *identity,
                        const char *path);

/* Makes step 0 of epoch 0 on an engine that was set to `before`, and takes it back: inputs (normalised),
 * labels, loss (the mean), before., gradient. and after. of each parameter, and factor. of each layer of
 * dropout: what it multiplied values by. */
enum status export_step(const struct train *train, const struct engine *engine, void *state,
                        const struct train_state *before, const char *identity, const char *path);

FDSL_C_END

#endif
