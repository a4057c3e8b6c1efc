/* Writes a batch as two NumPy files: images and labels. */
#ifndef FDSL_SYNTH_NPY_H
#define FDSL_SYNTH_NPY_H

#include <limits.h>

#include "core/status.h"
#include "core/variant.h"
#include "synth/input.h"

/* Stores the name of the labels' file: "a/b.labels.npy" for "a/b.npy"; other names get ".labels.npy"
 * appended. STATUS_USAGE if the name is too long. */
enum status npy_labels_path(const char *path, char labels_path[PATH_MAX]);

/* Fetches the images of the latest run, which must be run 0, and writes them to `path`. The shape is (N, C,
 * H, W) or (N, H, W, C), in C order. The type is |u1, <f2 or <f4; bfloat16, which NumPy lacks, is stored as
 * <u2. The labels, int64 of shape (N), are written to the labels' file. Keeps one image at a time in memory.
 * Renames both files only when both are complete, so a failure while writing leaves existing files
 * unchanged. */
enum status npy_write_batch(const char *path, const struct synth *synth, const struct variant *variant,
                            void *state);

#endif
