#include "train/init.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/text.h"
#include "data/tensor_file.h"
#include "train/checkpoint.h"

#define PREFIX_BYTES 32 /* of a prefix of names, such as "state_dict.module." */

static bool same_shape(const struct model_tensor *a, const struct model_tensor *b)
{
    return a->axes == b->axes && memcmp(a->shape, b->shape, a->axes * sizeof *a->shape) == 0;
}

/* Formats the shape of a tensor: "64x32x3x3". */
static void shape_text(const uint64_t *shape, uint32_t axes, char text[64])
{
    *text = '\0';
    for (uint32_t i = 0; i < axes; i++)
        text_join(text, 64, "x", "%" PRIu64, shape[i]);
}

/* Sets `*taken` to the number of tensors to copy: all, or all except the two of the last layer. */
static enum status fit(const struct model *model, const struct model *theirs, uint32_t *taken)
{
    *taken = model->tensor_count;
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *here = &model->tensors[t], *there = &theirs->tensors[t];
        char ours[64], others[64];
        if (same_shape(here, there))
            continue;
        if (t + 2 >= model->tensor_count) {
            *taken = model->tensor_count - 2;
            continue;
        }
        shape_text(here->shape, here->axes, ours);
        shape_text(there->shape, there->axes, others);
        return status_set(
            STATUS_USAGE,
            "its %s is %s, but these samples need %s; use samples of "
            "%" PRIu32 "x%" PRIu32 "x%" PRIu32 "x%" PRIu32 " (channels, depth, height, width)%s",
            here->name, others, ours, theirs->input.channels, theirs->input.depth, theirs->input.height,
            theirs->input.width,
            theirs->input.channels == model->input.channels ? ", or cnn-fdsl, which supports any size" : "");
    }
    return *taken > 0 ? STATUS_OK
                      : status_set(STATUS_USAGE, "no layer can be copied: its only layer has another shape; "
                                                 "use other samples, or drop --init");
}

/* Checks the values of the first `count` tensors. */
static enum status check_finite(const struct model *model, const float *parameters, uint32_t count)
{
    for (uint32_t t = 0; t < count; t++)
        for (uint64_t i = 0; i < model->tensors[t].values; i++)
            if (!isfinite(parameters[model->tensors[t].first + i]))
                return status_set(
                    STATUS_USAGE,
                    "its %s has values that are NaN or infinite; use parameters that were saved "
                    "before training diverged",
                    model->tensors[t].name);
    return STATUS_OK;
}

static enum status take(const struct checkpoint *checkpoint, const struct model *model, float *parameters,
                        uint32_t *taken)
{
    struct model theirs;
    if (strcmp(checkpoint->model, model->name) != 0)
        return status_set(STATUS_USAGE,
                          "its model is %.15s, but this is %s; use --model %.15s, or another checkpoint",
                          checkpoint->model, model->name, checkpoint->model);
    TRY(checkpoint_model(checkpoint, &theirs));
    TRY(fit(model, &theirs, taken));
    TRY(check_finite(&theirs, checkpoint_parameters(checkpoint), *taken));
    for (uint32_t t = 0; t < *taken; t++)
        memcpy(parameters + model->tensors[t].first,
               checkpoint_parameters(checkpoint) + theirs.tensors[t].first,
               model->tensors[t].values * sizeof *parameters);
    /* A last layer that is not copied starts with zeros, as in Dosovitskiy et al., "An image is worth 16x16
     * words", 2021. After long training, features are large. Random weights in the last layer would send
     * large gradients back into the trained layers. */
    for (uint32_t t = *taken; t < model->tensor_count; t++)
        memset(parameters + model->tensors[t].first, 0, model->tensors[t].values * sizeof *parameters);
    return STATUS_OK;
}

/* ---- Files of tensors ---- */

static const struct tensor *find(const struct tensor_file *file, const char *name)
{
    for (size_t i = 0; i < file->count; i++)
        if (strcmp(file->tensors[i].name, name) == 0)
            return &file->tensors[i];
    return NULL;
}

static bool is_of(const struct model *model, const char *name)
{
    for (uint32_t t = 0; t < model->tensor_count; t++)
        if (strcmp(model->tensors[t].name, name) == 0)
            return true;
    return false;
}

/* Drops the tensors whose names do not begin with `prefix`, and removes `prefix` from the other names. */
static void keep_prefixed(struct tensor_file *file, const char *prefix)
{
    const size_t length = strlen(prefix), count = file->count;
    file->count = 0;
    for (size_t i = 0; i < count; i++) {
        char *name = file->tensors[i].name;
        if (strncmp(name, prefix, length) != 0) {
            free(name);
            continue;
        }
        memmove(name, name + length, strlen(name + length) + 1);
        file->tensors[file->count++] = file->tensors[i];
    }
}

/* Returns how many tensors of the model the file has under names that begin with `prefix`. */
static uint32_t count_prefixed(const struct tensor_file *file, const struct model *model, const char *prefix)
{
    uint32_t count = 0;
    char name[TENSOR_NAME_MAX + PREFIX_BYTES];
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        snprintf(name, sizeof name, "%s%s", prefix, model->tensors[t].name);
        count += find(file, name) != NULL;
    }
    return count;
}

/* Many training scripts save the parameters under a key, next to the state of the optimizer and other values.
 * DistributedDataParallel and torch.compile() add a prefix to all names. Sets `prefix` to the combination of
 * key and prefix under which the file has most tensors of the model, and keeps only the tensors under this
 * combination. A moving average of the parameters is preferred to the parameters, as in timm. */
static void take_inner(struct tensor_file *file, const struct model *model, char prefix[PREFIX_BYTES])
{
    static const char *const keys[] = {"state_dict_ema.", "model_ema.", "", "state_dict.", "model."};
    static const char *const wrappers[] = {"", "module.", "_orig_mod."};
    uint32_t most = 0;
    *prefix = '\0';
    for (size_t i = 0; i < COUNT_OF(keys) * COUNT_OF(wrappers); i++) {
        char tried[PREFIX_BYTES];
        snprintf(tried, sizeof tried, "%s%s", keys[i / COUNT_OF(wrappers)], wrappers[i % COUNT_OF(wrappers)]);
        const uint32_t count = count_prefixed(file, model, tried);
        if (count > most) {
            most = count;
            memcpy(prefix, tried, sizeof tried);
        }
    }
    keep_prefixed(file, prefix);
}

/* Checks a tensor of a file, which has the name of the tensor `wanted` of a model. */
static enum status check_tensor(const struct tensor *tensor, const struct model *model,
                                const struct model_tensor *wanted)
{
    char ours[64], others[64];
    shape_text(wanted->shape, wanted->axes, ours);
    shape_text(tensor->shape, tensor->axes < TENSOR_AXES_MAX ? tensor->axes : TENSOR_AXES_MAX, others);
    if (strcmp(ours, others) != 0)
        return status_set(STATUS_USAGE,
                          "its %s is %s, but %s with these samples needs %s; use another --model or image "
                          "size",
                          wanted->name, others, model->name, ours);
    if (tensor->fault)
        return status_set(STATUS_USAGE, "its %s cannot be read: %s", wanted->name, tensor->fault);
    if (!tensor->readable || tensor->dtype != DTYPE_F32)
        return status_set(STATUS_USAGE, "its %s is of type %s; convert all tensors to 32-bit floats",
                          wanted->name, tensor->type);
    return STATUS_OK;
}

/* Checks that a file has all tensors of a model, except perhaps the two of the last layer, and no other
 * tensors. Sets `*count` to the number of the model's tensors that the file has. */
static enum status check_names(const struct tensor_file *file, const struct model *model, uint32_t *count)
{
    const struct model_tensor *tensors = model->tensors;
    uint32_t missing = 0, first = 0;
    for (uint32_t t = model->tensor_count; t > 0; t--)
        if (!find(file, tensors[t - 1].name)) {
            missing++;
            first = t - 1;
        }
    *count = model->tensor_count - missing;
    if (missing > 0 && (first == 0 || first != *count || missing != 2))
        return status_set(STATUS_USAGE,
                          "it lacks %" PRIu32 " of the %" PRIu32 " tensors of %s (the first: %s); "
                          "use the right --model, or another file",
                          missing, model->tensor_count, model->name, tensors[first].name);
    for (size_t i = 0; i < file->count; i++)
        if (!is_of(model, file->tensors[i].name))
            return status_set(
                STATUS_USAGE,
                "it also has a tensor %.48s, which %s does not have; use another --model, or remove it",
                file->tensors[i].name, model->name);
    return STATUS_OK;
}

/* Reads the parameters of a network that has the layers of `model`. Its number of classes, which is the
 * length of the last tensor, may differ from that of `model`. A file without the last layer counts as one
 * with another number of classes. */
static enum status read_tensors(const struct tensor_file *file, const struct model *model,
                                struct checkpoint *checkpoint)
{
    const struct model_table *table = model_tables;
    const struct tensor *last = find(file, model->tensors[model->tensor_count - 1].name);
    struct model theirs;
    uint32_t count = 0;
    while (strcmp(table->name, model->name) != 0)
        table++;
    const bool usable = last && last->axes == 1 && last->shape[0] > 0 && last->shape[0] <= INT32_MAX;
    const uint32_t classes = usable ? (uint32_t)last->shape[0] : model->classes + !last;
    TRY(check_names(file, model, &count));
    TRY(model_build(table, model->input, classes, &theirs));
    snprintf(checkpoint->model, sizeof checkpoint->model, "%s", model->name);
    checkpoint->input = theirs.input;
    checkpoint->classes = theirs.classes;
    checkpoint->arena_values = theirs.arena_values;
    for (uint32_t t = 0; t < count; t++)
        TRY(check_tensor(find(file, theirs.tensors[t].name), &theirs, &theirs.tensors[t]));
    TRY(ALLOCATED(train_state_new(theirs.arena_values, &checkpoint->state),
                  "out of memory for its parameters"));
    for (uint32_t t = 0; t < count; t++) {
        const struct model_tensor *tensor = &theirs.tensors[t];
        TRY(tensor_file_read(file, find(file, tensor->name)->offset,
                             checkpoint->state.parameters + tensor->first, tensor->values * sizeof(float)));
    }
    return STATUS_OK;
}

/* Sets `prefix` as take_inner() does. */
static enum status read_file(const char *path, const struct model *model, struct checkpoint *checkpoint,
                             char prefix[PREFIX_BYTES])
{
    CLOSED_BY(tensor_file_close) struct tensor_file file;
    enum status status = tensor_file_open(path, &file);
    if (status != STATUS_OK)
        return status_prefix(status, "--init");
    take_inner(&file, model, prefix);
    status = read_tensors(&file, model, checkpoint);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "--init %s", path);
}

enum status init_take(const char *path, const struct model *model, float *parameters, uint64_t *hash)
{
    struct checkpoint checkpoint = {0};
    uint32_t taken = 0;
    char prefix[PREFIX_BYTES] = "";
    const bool tensors = tensor_file_named(path);
    if (text_ends_in(path, ".npy"))
        return status_set(
            STATUS_USAGE,
            "--init %s: a .npy file holds one tensor; give a checkpoint, or a file that ends in "
            ".safetensors, .pt, .pth or .pth.tar",
            path);
    if (tensors && access(path, F_OK) != 0)
        return status_set(STATUS_USAGE, "--init %s: %s", path, strerror(errno));
    enum status status =
        tensors ? read_file(path, model, &checkpoint, prefix) : checkpoint_find("--init", path, &checkpoint);
    if (status == STATUS_OK) {
        status = take(&checkpoint, model, parameters, &taken);
        if (status != STATUS_OK)
            status_prefix(status, "--init %s", path);
    }
    if (status == STATUS_OK) {
        *hash = checkpoint_hash(&checkpoint);
        char after[128] = "";
        if (!tensors)
            snprintf(after, sizeof after, " after %" PRIu32 " epoch%s of %.64s", checkpoint.history.epochs,
                     checkpoint.history.epochs == 1 ? "" : "s", checkpoint.data);
        else if (*prefix)
            snprintf(after, sizeof after, " (%s*)", prefix);
        status_say("--init: %" PRIu32 " of %" PRIu32 " tensors taken from %s%s%s", taken, model->tensor_count,
                   path, after, taken < model->tensor_count ? "; the last layer starts with zeros" : "");
    }
    checkpoint_free(&checkpoint);
    return status;
}
