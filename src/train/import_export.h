/* --init reads the parameters of an earlier training run of the same model, for example to fine-tune on few
 * samples after pre-training on many. The other functions export a training run for comparison with other
 * programs. Safetensors files hold the parameters under PyTorch's names, the data sets, or everything about
 * one step. PNG files show samples of one step. `identity` has the options; their text becomes part of a
 * safetensors file's metadata. Errors: STATUS_FAILED with path and reason. */
#ifndef FDSL_TRAIN_IMPORT_EXPORT_H
#define FDSL_TRAIN_IMPORT_EXPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "train/checkpoint.h"
#include "train/engine.h"

/* Whether the moving average of the parameters is read: if there is one, always or never. */
enum init_ema { INIT_EMA_AUTO, INIT_EMA_YES, INIT_EMA_NO };
extern const char *const init_ema_names[]; /* values of --init-ema */

struct init_request {
    const char *option; /* that names the file, with its dashes, for messages */
    /* A checkpoint file, a folder whose latest checkpoint is used, or a file of tensors with the names and
     * shapes of the model, as --export and timm write it. */
    const char *path;
    enum init_ema ema;
};

/* Reads parameters into `parameters`, an arena of the model. Values of 16 bits become floats. In a file of
 * tensors, keys and prefixes before the names (state_dict, model, module, _orig_mod, in any nesting) are
 * skipped. The image size may differ if no weight tensor depends on it; the positions of a transformer are
 * interpolated, within 1e-6 of timm's relative to the largest position. If the file lacks the last layer or
 * has it in other shapes (another number of classes), that layer is set to zeros. Prints one line that says
 * what was copied. Sets `*hash` to checkpoint_hash() of what was read, before the interpolation. STATUS_USAGE
 * if the checkpoint belongs to another model, if other tensors differ in shape, if the file has two sets of
 * the tensors, if a value is not finite, or if nothing could be copied. `parameters` are then unchanged. */
enum status init_take(const struct init_request *request, const struct model *model, float *parameters,
                      uint64_t *hash);

/* Reads the network in a file of tensors: builds `model` for samples of the shape of `data`, with the classes
 * of the file, and fills `checkpoint` with its parameters as init_take() does. `name` is the model, or NULL
 * for the one that a file of --export names. Sets `*normalised` to whether the file says how samples are
 * normalised; checkpoint->scale and `offset` are then set. The caller frees the checkpoint, even after a
 * failure. STATUS_USAGE also if the file names no model, or another one, or lacks the last layer. */
enum status init_network(const struct init_request *request, const char *name, const struct data *data,
                         struct model *model, struct checkpoint *checkpoint, bool *normalised);

/* Writes the tensors "conv1.weight", "conv1.bias", ... The metadata holds, as JSON: "input" (the shape of a
 * sample), "classes", and "scale" and "offset" with one value per channel. A sample's value v enters the
 * network as v * scale + offset. */
enum status export_parameters(const struct train *train, const float *parameters,
                              const struct option_values *identity, const char *path);

/* Writes both sets as stored (train.values, train.labels, test.values, test.labels), the normalisation
 * (scale, offset), and the initial parameters (initial.conv1.weight, ...). STATUS_USAGE if the training
 * samples are not DATA_STORED, if every epoch crops them again, or if labels are multi-hot. */
enum status export_data(const struct train *train, const float *initial, const struct option_values *identity,
                        const char *path);

/* Runs a step of an epoch on an engine whose state is `before`, writes the file, and restores the state. The
 * file holds `inputs` as the network sees them (augmented, normalised and mixed), `labels` (not if they
 * are multi-hot), `targets` (one probability per class) and `loss` (the mean). Each parameter has the tensors
 * before.NAME, gradient.NAME and after.NAME. Each dropout layer has factor.NAME, the factors that multiplied
 * its inputs; stochastic depth has one factor per sample. */
enum status export_step(const struct train *train, const struct engine *engine, void *state,
                        const struct train_state *before, uint32_t epoch, uint32_t step,
                        const struct option_values *identity, const char *path);

/* Checks the text "COUNT:FOLDER" of --save-batch. STATUS_USAGE unless the folder is new or empty. */
enum status export_batch_check(const char *text);

/* Writes the first COUNT samples of step 0 of epoch 0 to FOLDER/000000.png and so on, as the network sees
 * them: augmented and mixed, with the normalisation undone and clipped to bytes. `text` is "COUNT:FOLDER".
 * STATUS_USAGE if the step has fewer samples, or if the samples are not 8-bit images; STATUS_UNAVAILABLE in
 * builds without libpng. */
enum status export_batch(const struct train *train, const struct resources *resources, const char *text);

#endif
