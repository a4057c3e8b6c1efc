#include <fnmatch.h>
#include <string.h>

#include "core/text.h"
#include "train/layer_precision.h"

#define NAMES_SHOWN 12 /* names of layers in a message */
#define NAMES_TEXT  (NAMES_SHOWN * (LAYER_NAME_MAX + 2) + 24)

static bool has_parameters(const struct layer *layer)
{
    return layer->weight_values > 0;
}

/* Writes the names of the layers that have parameters and, unless `engine` is NULL, that the engine can
 * compute in fp32. */
static void list_names(const struct engine *engine, const struct model *model, char text[NAMES_TEXT])
{
    uint32_t count = 0;
    *text = '\0';
    for (uint32_t i = 0; i < model->layer_count; i++) {
        const struct layer *layer = &model->layers[i];
        if (!has_parameters(layer) || (engine && engine->keeps_fp32(layer) != FP32_CHOSEN))
            continue;
        if (count++ < NAMES_SHOWN)
            text_join(text, NAMES_TEXT, ", ", "%s", layer->name);
    }
    if (count > NAMES_SHOWN)
        text_join(text, NAMES_TEXT, " ", "and %u more", count - NAMES_SHOWN);
}

/* Marks the layers that match the pattern of `bytes` bytes. */
static enum status choose(const char *pattern, size_t bytes, struct model *model)
{
    char own[TENSOR_NAME_MAX], names[NAMES_TEXT];
    bool matched = false;
    snprintf(own, sizeof own, "%.*s", (int)bytes, pattern);
    for (uint32_t i = 0; bytes < sizeof own && i < model->layer_count; i++)
        if (has_parameters(&model->layers[i]) && fnmatch(own, model->layers[i].name, 0) == 0)
            matched = model->layers[i].fp32 = true;
    if (matched)
        return STATUS_OK;
    list_names(NULL, model, names);
    return status_option(STATUS_USAGE, "fp32-layers",
                         ": no layer of %s with parameters matches \"%.*s\"; its layers are %s", model->name,
                         (int)(bytes < sizeof own ? bytes : sizeof own), pattern, names);
}

enum status layer_precision_choose(const char *patterns, struct model *model)
{
    for (const char *pattern = patterns;; pattern++) {
        const size_t bytes = strcspn(pattern, ",");
        TRY(choose(pattern, bytes, model));
        pattern += bytes;
        if (*pattern == '\0')
            return STATUS_OK;
    }
}

enum status layer_precision_accepts(const struct engine *engine, const struct model *model)
{
    const struct layer *first = NULL;
    bool changes = false;
    char names[NAMES_TEXT];
    for (uint32_t i = 0; i < model->layer_count; i++) {
        const struct layer *layer = &model->layers[i];
        if (!layer->fp32)
            continue;
        if (!engine->keeps_fp32)
            return status_set(STATUS_USAGE,
                              "it has one precision for all layers; drop --fp32-layers, or use train-bf16, "
                              "train-amp or train-tf32 (for vit-* train-vit or train-vit-amp, for resnet* "
                              "train-resnet or train-resnet-amp)");
        first = first ? first : layer;
        changes |= engine->keeps_fp32(layer) == FP32_CHOSEN;
        if (engine->keeps_fp32(layer) == FP32_NEVER) {
            list_names(engine, model, names);
            return status_set(STATUS_USAGE,
                              "it cannot compute the layer %s in fp32; --fp32-layers may name %s",
                              layer->name, names);
        }
    }
    if (!first || changes)
        return STATUS_OK;
    list_names(engine, model, names);
    return status_set(STATUS_USAGE,
                      "it always computes the layer %s in fp32; drop --fp32-layers, or name one of %s",
                      first->name, names);
}

void layer_overflows_text(const struct model *model, const uint32_t *steps, char *text)
{
    bool written[MODEL_LAYERS_MAX] = {false};
    *text = '\0';
    for (uint32_t k = 0; k < LAYER_OVERFLOWS_MAX; k++) {
        uint32_t most = model->layer_count;
        for (uint32_t i = 0; i < model->layer_count; i++)
            if (!written[i] && steps[i] > 0 && (most == model->layer_count || steps[i] > steps[most]))
                most = i;
        if (most == model->layer_count)
            return;
        written[most] = true;
        text_join(text, LAYER_OVERFLOWS_TEXT, " ", "%s=%u", model->layers[most].name, steps[most]);
    }
}

void layer_overflows_say(const struct model *model, const uint32_t *steps)
{
    char text[LAYER_OVERFLOWS_TEXT];
    uint32_t all = 0;
    for (uint32_t i = 0; i < model->layer_count; i++)
        all += steps[i];
    layer_overflows_text(model, steps, text);
    if (all > 0)
        status_say("%u step%s skipped because gradients overflowed; skipped steps per layer in which the "
                   "overflow began: %s (if this goes on, compute such a layer in fp32: --fp32-layers)",
                   all, all == 1 ? " was" : "s were", text);
}
