#include "train/init.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "train/checkpoint.h"

static bool same_shape(const struct model_tensor *a, const struct model_tensor *b)
{
    return a->axes == b->axes && memcmp(a->shape, b->shape, a->axes * sizeof *a->shape) == 0;
}

/* Formats the shape of a tensor: "64x32x3x3". */
static void shape_text(const struct model_tensor *tensor, char text[64])
{
    size_t used = 0;
    *text = '\0';
    for (uint32_t i = 0; i < tensor->axes && used < 64; i++)
        used += (size_t)snprintf(text + used, 64 - used, "%s%" PRIu64, i ? "x" : "", tensor->shape[i]);
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
        shape_text(here, ours);
        shape_text(there, others);
        return status_set(
            STATUS_USAGE,
            "its %s is %s, but these samples need %s; use samples of "
            "%" PRIu32 "x%" PRIu32 "x%" PRIu32 "x%" PRIu32 " (channels, depth, height, width)%s",
            here->name, others, ours, theirs->input.channels, theirs->input.depth, theirs->input.height,
            theirs->input.width,
            theirs->input.channels == model->input.channels ? ", or cnn-fdsl, which supports any size" : "");
    }
    return *taken > 0 ? STATUS_OK
                      : status_set(STATUS_USAGE, "no layer can be copied: its only layer has another shape");
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
        memcpy(parameters + model->tensors[t].first, checkpoint->state.parameters + theirs.tensors[t].first,
               model->tensors[t].values * sizeof *parameters);
    /* A last layer that is not copied starts with zeros, as in Dosovitskiy et al., "An image is worth 16x16
     * words", 2021. After long training, features are large. Random weights in the last layer would send
     * large gradients back into the trained layers. */
    for (uint32_t t = *taken; t < model->tensor_count; t++)
        memset(parameters + model->tensors[t].first, 0, model->tensors[t].values * sizeof *parameters);
    return STATUS_OK;
}

enum status init_take(const char *path, const struct model *model, float *parameters, uint64_t *hash)
{
    struct checkpoint checkpoint = {0};
    uint32_t taken = 0;
    enum status status = checkpoint_find("--init", path, &checkpoint);
    if (status == STATUS_OK) {
        status = take(&checkpoint, model, parameters, &taken);
        if (status != STATUS_OK)
            status_prefix(status, "--init %s", path);
    }
    if (status == STATUS_OK) {
        *hash = checkpoint_hash(&checkpoint);
        status_say("--init: %" PRIu32 " of %" PRIu32 " tensors taken from %s after %" PRIu32
                   " epochs of %s%s",
                   taken, model->tensor_count, path, checkpoint.history.epochs, checkpoint.data,
                   taken < model->tensor_count ? "; the last layer starts with zeros" : "");
    }
    checkpoint_free(&checkpoint);
    return status;
}
