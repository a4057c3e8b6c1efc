/* Checkpoints store all the state that training needs to continue bit-exactly after an epoch, or within one.
 * A file appears complete or not at all. Checkpoints do not depend on the engine: one variant can continue
 * where another stopped. All numbers in a file are little-endian; options are stored as values. */
#ifndef FDSL_TRAIN_CHECKPOINT_H
#define FDSL_TRAIN_CHECKPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/options.h"
#include "core/portable.h"
#include "core/status.h"
#include "train/data.h"
#include "train/engine.h"
#include "train/model.h"

/* ---- Options and their values ---- */

/* As a training run compares them and as checkpoints store them: typed values, not texts. Whether a run may
 * continue from a checkpoint is decided by comparing values. */

/* The kinds of values. Checkpoints store these numbers, so they must not change. */
enum option_value_kind {
    OPTION_VALUE_FLAG = 1, /* 0 or 1 */
    OPTION_VALUE_WHOLE = 2,
    OPTION_VALUE_REAL = 3, /* finite */
    OPTION_VALUE_WORD = 4, /* also the name of a choice, and a list of numbers */
    OPTION_VALUE_HASH = 5  /* not an option: a hash of an input of the run */
};

#define OPTION_VALUE_NAME_MAX 32 /* with the terminating zero */

struct option_value {
    char name[OPTION_VALUE_NAME_MAX]; /* of the option, without the dashes */
    enum option_value_kind kind;
    uint64_t whole; /* of a flag, a whole number or a hash */
    double real;
    char *word; /* owned; NULL unless the kind is OPTION_VALUE_WORD */
};

/* A zeroed struct is an empty list. */
struct option_values {
    struct option_value *of; /* owned */
    size_t count;
};

/* Appends the value of an option in the struct `values`, unless it has none. An unchanged list of numbers has
 * an unchanged word, however the user wrote it. STATUS_EXHAUSTED if memory runs out. */
enum status option_values_add(struct option_values *list, const struct option_spec *spec, const void *values);
enum status option_values_add_hash(struct option_values *list, const char *name, uint64_t hash);

/* Sets `*copy` to a copy of a list. The caller frees it, even after a failure. */
enum status option_values_copy(const struct option_values *list, struct option_values *copy);
void option_values_free(struct option_values *list);

/* Returns the value with this name, or NULL. */
const struct option_value *option_values_find(const struct option_values *list, const char *name);

/* Returns whether two values are equal. Either may be NULL: no value. */
bool option_value_same(const struct option_value *a, const struct option_value *b);

/* Writes a value as options_text() does; a hash as 16 hexadecimal digits. */
void option_value_text(const struct option_value *value, char *text, size_t size);

/* Returns "name=value name=value ..." for people and other programs. The caller frees the text; NULL if
 * memory runs out. */
char *option_values_text(const struct option_values *list);

/* Stores a value in the struct `values`. Words are not copied. STATUS_FAILED if the option does not accept
 * the value. */
enum status option_value_store(const struct option_value *value, const struct option_spec *spec,
                               void *values);

/* Decodes a list from bytes that may be hostile. STATUS_FAILED if they are malformed; STATUS_EXHAUSTED if
 * memory runs out. The caller frees `list`, even after a failure. */
enum status option_values_decode(const unsigned char *bytes, size_t size, struct option_values *list);

/* ---- Checkpoints ---- */

/* Training progress of a network. Random numbers are functions of the epoch and the step or sample, so there
 * is no state of a random number generator. */
struct train_history {
    uint32_t epochs;         /* completed epochs */
    double trained_s;        /* seconds spent in the training steps of these epochs */
    double to_98_s, to_99_s; /* value of trained_s when test accuracy first reached 98 % and 99 %; negative:
                              * not reached yet */
};

/* The part of the current epoch that is done: sums over its first `steps` steps. All zero between epochs. In
 * a checkpoint, the seconds are those of rank 0. */
struct train_partial {
    uint32_t steps;
    struct train_totals totals; /* of all ranks */
    double epoch_s, exchange_s; /* seconds of these steps; the part of them spent in the exchange */
};

/* A checkpoint in memory. */
struct checkpoint {
    char model[MODEL_NAME_MAX];
    struct shape input;
    uint32_t classes;
    float scale[DATA_CHANNELS_MAX], offset[DATA_CHANNELS_MAX]; /* normalisation of the samples */
    struct train_history history;
    struct train_partial partial;
    uint64_t hashes[DATA_PARTS]; /* of the training set and the test set */
    char *data;                  /* owned: value of --data */
    char *row; /* owned: the CSV rows of the epoch (header and lines); "" if there are none */
    struct option_values
        identity; /* owned: the options that affect the parameters, and hashes of the inputs */
    struct option_values samples; /* owned: the other options that choose the samples (job_samples()) */
    /* The samples per step of each rank in the next epoch, if they depend on measurements (trainer.h). */
    uint32_t *shares;              /* owned: `share_count` numbers */
    uint32_t share_count, balance; /* `balance`: the enum balance of the run */
    struct train_state state;      /* owned: arenas of `arena_values` values each */
    uint64_t arena_values;
};

FDSL_C_BEGIN

/* Checks that checkpoints can be written into the folder. If `change` is true, creates it if it is missing;
 * otherwise only checks that it could be created. STATUS_USAGE with the reason if not; STATUS_UNAVAILABLE if
 * the build has no xxHash. */
enum status checkpoint_check_folder(const char *folder, bool change);

/* Locks a folder and removes temporary files that killed processes left there. If `change` is false, changes
 * no file: takes the lock only if an earlier run has created the lock file. `*lock` is for
 * checkpoint_unlock(), which ignores negative values. The end of the process also releases the lock.
 * STATUS_USAGE if another process holds the lock. If the file system does not support locks, only prints a
 * warning. */
enum status checkpoint_lock(const char *folder, bool change, int *lock);
void checkpoint_unlock(int lock);

/* Sets `*exists` to whether the folder holds any checkpoint. A folder that does not exist holds none. */
enum status checkpoint_exists(const char *folder, bool *exists);

/* STATUS_USAGE if the folder holds a checkpoint of a later step than `steps` steps after `epochs` epochs: it
 * would be taken in place of one that is written now. */
enum status checkpoint_refuse_later(const char *folder, uint32_t epochs, uint32_t steps);

/* Writes FOLDER/epoch-000012.ckpt for 12 completed epochs, or FOLDER/epoch-000012.step-0000000300.ckpt for
 * 300 more steps. Then removes older checkpoints until `keep` >= 1 remain, including this one. If writing
 * fails, the older checkpoints remain. STATUS_FAILED, before anything is written, if a part other than the
 * parameters has more than 16 MiB. */
enum status checkpoint_write(const char *folder, uint32_t keep, const struct checkpoint *checkpoint);

/* Reads one checkpoint file. STATUS_FAILED with path and reason if the file is not a checkpoint, has another
 * schema, is truncated, or has a wrong checksum. The caller frees the checkpoint, even after a failure. */
enum status checkpoint_read(const char *path, struct checkpoint *checkpoint);

/* Reads the latest checkpoint of a folder. Skips files that are truncated or damaged (for example by a power
 * failure), with a warning if `warn` is true. Any other failure (another schema, permissions, memory, disk)
 * is an error: if the file were skipped, training would later overwrite it. `*found` is false if there is no
 * checkpoint; STATUS_FAILED if all are damaged. The caller frees the checkpoint, even after a failure. */
enum status checkpoint_read_latest(const char *folder, bool warn, struct checkpoint *checkpoint, bool *found);
void checkpoint_free(struct checkpoint *checkpoint);

/* Reads the checkpoint that the user named with an option: a file, or the latest checkpoint of a folder that
 * is not damaged. STATUS_USAGE if there is no checkpoint; the message begins with `option`.
 * The caller frees the checkpoint, even after a failure. */
enum status checkpoint_find(const char *option, const char *path, struct checkpoint *checkpoint);

/* Returns the parameters that are exported and tested: their moving average if the checkpoint has one,
 * otherwise the parameters themselves. */
static inline float *checkpoint_parameters(const struct checkpoint *checkpoint)
{
    return checkpoint->state.ema ? checkpoint->state.ema : checkpoint->state.parameters;
}

/* Sets what a checkpoint says of its model. */
void checkpoint_describe(const struct model *model, struct checkpoint *checkpoint);

/* Rebuilds the checkpoint's model. STATUS_FAILED if this program does not know the model, or if its arena
 * size differs. */
enum status checkpoint_model(const struct checkpoint *checkpoint, struct model *model);

/* Returns the XXH3-64 hash of checkpoint_parameters(). Returns 0 if the build has no xxHash; such a build has
 * no checkpoints either. */
uint64_t checkpoint_hash(const struct checkpoint *checkpoint);

FDSL_C_END

/* ---- Parameters from other runs, and files for other programs (import_export.c) ---- */

/* --init reads the parameters of an earlier training run of the same model, for example to fine-tune on few
 * samples after pre-training on many. The other functions export a training run for comparison with other
 * programs. Safetensors files hold the parameters under PyTorch's names, the data sets, or everything about
 * one step. PNG files show samples of one step. `identity` has the options; their text becomes part of a
 * safetensors file's metadata. Errors: STATUS_FAILED with path and reason. */

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

/* `before` is the state of the engine. Runs a step of an epoch, writes the file, and restores the state. The
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
