/* Layers that engines of lower precision compute in fp32 (--fp32-layers), and the report of the layers in
 * which overflows began, which tells a user which layers to name. */
#ifndef FDSL_TRAIN_LAYER_PRECISION_H
#define FDSL_TRAIN_LAYER_PRECISION_H

#include "core/portable.h"
#include "train/engine.h"

/* Sets layer.fp32 of the layers that have parameters and whose names match one of the patterns, which are
 * those of fnmatch(), separated by commas. STATUS_USAGE if a pattern matches no such layer. */
enum status layer_precision_choose(const char *patterns, struct model *model);

/* Returns STATUS_OK if the engine can compute all layers with layer.fp32 in fp32, and has a lower precision
 * for at least one of them; otherwise STATUS_USAGE with a reason that calls the engine "it". Also STATUS_OK
 * if no layer has layer.fp32. */
enum status layer_precision_accepts(const struct engine *engine, const struct model *model);

/* The layers that have parameters, in the order of the arena: their numbers in the model's table, and the
 * offsets of their first parameters. */
struct layer_places {
    uint32_t count, numbers[MODEL_LAYERS_MAX], firsts[MODEL_LAYERS_MAX];
};

static inline void layer_places_of(const struct model *model, struct layer_places *places)
{
    places->count = 0;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].weight_values > 0) {
            places->numbers[places->count] = i;
            places->firsts[places->count++] = (uint32_t)model->layers[i].weight;
        }
}

/* Returns the number of the layer that has parameter `at` of the arena. There must be one. */
FDSL_HD uint32_t layer_places_find(const struct layer_places *places, size_t at)
{
    uint32_t begin = 0, end = places->count;
    while (end - begin > 1) {
        const uint32_t middle = (begin + end) / 2;
        if (places->firsts[middle] <= at)
            begin = middle;
        else
            end = middle;
    }
    return places->numbers[begin];
}

#define LAYER_OVERFLOWS_MAX  8 /* layers in a text */
#define LAYER_OVERFLOWS_TEXT (LAYER_OVERFLOWS_MAX * (LAYER_NAME_MAX + 12))

/* Writes the layers in which the overflows of `steps` skipped steps began, per layer of the model, as "fc1=12
 * conv2=3": the layers with the most steps first, and at most LAYER_OVERFLOWS_MAX layers. `text` has room for
 * LAYER_OVERFLOWS_TEXT bytes. */
void layer_overflows_text(const struct model *model, const uint32_t *steps, char *text);

/* Tells the user of these steps, unless there are none. */
void layer_overflows_say(const struct model *model, const uint32_t *steps);

#endif
