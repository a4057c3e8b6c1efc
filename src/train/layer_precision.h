/* Layers that engines of lower precision compute in fp32 (--fp32-layers), and the report of the layers in
 * which overflows began, which tells a user which layers to name. */
#ifndef FDSL_TRAIN_LAYER_PRECISION_H
#define FDSL_TRAIN_LAYER_PRECISION_H

#include "train/engine.h"

/* Sets layer.fp32 of the layers that have parameters and whose names match one of the patterns, which are
 * those of fnmatch(), separated by commas. STATUS_USAGE if a pattern matches no such layer. */
enum status layer_precision_choose(const char *patterns, struct model *model);

/* Returns STATUS_OK if the engine can compute all layers with layer.fp32 in fp32, and has a lower precision
 * for at least one of them; otherwise STATUS_USAGE with a reason that calls the engine "it". Also STATUS_OK
 * if no layer has layer.fp32. */
enum status layer_precision_accepts(const struct engine *engine, const struct model *model);

#define LAYER_OVERFLOWS_MAX  8 /* layers in a text */
#define LAYER_OVERFLOWS_TEXT (LAYER_OVERFLOWS_MAX * (LAYER_NAME_MAX + 12))

/* Writes the layers in which the overflows of `steps` skipped steps began, per layer of the model, as "fc1=12
 * conv2=3": the layers with the most steps first, and at most LAYER_OVERFLOWS_MAX layers. `text` has room for
 * LAYER_OVERFLOWS_TEXT bytes. */
void layer_overflows_text(const struct model *model, const uint32_t *steps, char *text);

/* Tells the user of these steps, unless there are none. */
void layer_overflows_say(const struct model *model, const uint32_t *steps);

#endif
