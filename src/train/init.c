#include "train/init.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/tensor_file.h"
#include "train/checkpoint.h"

static bool same_shape(const struct model_tensor *a, const struct model_tensor *b)
{
    return a->axes == b->axes && memcmp(a->shape, b->shape, a->axes * sizeof *a->shape) == 0;
}

/* Formats the shape of a tensor: "64x32x3x3". */
static void shape_text(const uint64_t *shape, uint32_t axes, char text[64])
{
    size_t used = 0;
    *text = '\0';
    for (uint32_t i = 0; i < axes && used < 64; i++)
        used += (size_t)snprintf(text + used, 64 - used, "%s%" PRIu64, i ? "x" : "", shape[i]);
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

/* Many training scripts save the parameters under the key "model" or "state_dict", next to the state of the
 * optimizer and other values. If the file has one of these keys, keeps only the tensors under it. */
static void take_inner(struct tensor_file *file, const struct model *model)
{
    static const char *const prefixes[] = {"model.", "state_dict."};
    const char *name = model->tensors[0].name;
    for (size_t i = 0; i < COUNT_OF(prefixes) && !find(file, name); i++) {
        char inner[TENSOR_NAME_MAX + 16];
        snprintf(inner, sizeof inner, "%s%s", prefixes[i], name);
        if (find(file, inner))
            keep_prefixed(file, prefixes[i]);
    }
}

/* Checks that a file has a tensor of a model. */
static enum status check_tensor(const struct tensor_file *file, const struct model *model,
                                const struct model_tensor *wanted)
{
    const struct tensor *tensor = find(file, wanted->name);
    char ours[64], others[64];
    if (!tensor)
        return status_set(STATUS_USAGE, "it has no tensor %s, so it is not of %s; use the right --model",
                          wanted->name, model->name);
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

/* Reads the parameters of a network that has the layers of `model`. Its number of classes, which is the
 * length of the last tensor, may differ from that of `model`. */
static enum status read_tensors(const struct tensor_file *file, const struct model *model,
                                struct checkpoint *checkpoint)
{
    const struct model_table *table = model_tables;
    const struct tensor *last = find(file, model->tensors[model->tensor_count - 1].name);
    struct model theirs;
    while (strcmp(table->name, model->name) != 0)
        table++;
    bool usable = last && last->axes == 1 && last->shape[0] > 0 && last->shape[0] <= INT32_MAX;
    TRY(model_build(table, model->input, usable ? (uint32_t)last->shape[0] : model->classes, &theirs));
    snprintf(checkpoint->model, sizeof checkpoint->model, "%s", model->name);
    checkpoint->input = theirs.input;
    checkpoint->classes = theirs.classes;
    checkpoint->arena_values = theirs.arena_values;
    for (uint32_t t = 0; t < theirs.tensor_count; t++)
        TRY(check_tensor(file, &theirs, &theirs.tensors[t]));
    for (size_t i = 0; i < file->count; i++)
        if (!is_of(&theirs, file->tensors[i].name))
            return status_set(STATUS_USAGE, "it also has a tensor %.48s, which %s does not have; remove it",
                              file->tensors[i].name, model->name);
    if (!train_state_new(theirs.arena_values, &checkpoint->state))
        return status_set(STATUS_FAILED, "out of memory for its parameters");
    for (uint32_t t = 0; t < theirs.tensor_count; t++) {
        const struct model_tensor *tensor = &theirs.tensors[t];
        TRY(tensor_file_read(file, find(file, tensor->name)->offset,
                             checkpoint->state.parameters + tensor->first, tensor->values * sizeof(float)));
    }
    return STATUS_OK;
}

static enum status read_file(const char *path, const struct model *model, struct checkpoint *checkpoint)
{
    struct tensor_file file;
    enum status status = tensor_file_open(path, &file);
    if (status == STATUS_OK)
        take_inner(&file, model);
    if (status != STATUS_OK)
        status_prefix(status, "--init");
    else if ((status = read_tensors(&file, model, checkpoint)) != STATUS_OK)
        status_prefix(status, "--init %s", path);
    tensor_file_close(&file);
    return status;
}

enum status init_take(const char *path, const struct model *model, float *parameters, uint64_t *hash)
{
    struct checkpoint checkpoint = {0};
    uint32_t taken = 0;
    const bool tensors = tensor_file_named(path);
    const size_t length = strlen(path);
    if (length > 4 && strcmp(path + length - 4, ".npy") == 0)
        return status_set(
            STATUS_USAGE,
            "--init %s: a .npy file holds one tensor; give a checkpoint, or a file that ends in "
            ".safetensors, .pt or .pth",
            path);
    enum status status =
        tensors ? read_file(path, model, &checkpoint) : checkpoint_find("--init", path, &checkpoint);
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
        status_say("--init: %" PRIu32 " of %" PRIu32 " tensors taken from %s%s%s", taken, model->tensor_count,
                   path, after, taken < model->tensor_count ? "; the last layer starts with zeros" : "");
    }
    checkpoint_free(&checkpoint);
    return status;
}
