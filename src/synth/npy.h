/* The batch as NumPy files: images in one, labels in another beside it. */
#ifndef FDSL_SYNTH_NPY_H
#define FDSL_SYNTH_NPY_H

#include <limits.h>

#include "core/status.h"
#include "core/variant.h"
#include "synth/input.h"

/* The labels' file: "a/b.labels.npy" for "a/b.npy", and for any other name with that added. */
enum status npy_labels_path(const char *path, char labels_path[PATH_MAX]);

/* Fetches the images of the latest run, which must be run 0, and writes them to `path`: C order, (N, C, H, W)
 * or (N, H, W, C) by the layout, of type |u1, <f2, <f4, or <u2 for the bits of bfloat16, which NumPy lacks.
 * Their labels go to the labels' file, int64, (N). Image by image: memory for one is enough. Both files
 * are complete before either takes its name, the images last: a failure leaves what was there. */
enum status npy_write_batch(const char *path, const struct synth *synth, const struct variant *variant,
                            void *state);

#endif
