#include "synth/npy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "core/text.h"
#include "data/npy.h"

enum status npy_labels_path(const char *path, char labels_path[PATH_MAX])
{
    size_t length = strlen(path);
    int stem = (int)(text_ends_in(path, ".npy") ? length - 4 : length);
    int bytes = snprintf(labels_path, PATH_MAX, "%.*s.labels.npy", stem, path);
    return bytes < PATH_MAX ? STATUS_OK
                            : status_set(STATUS_USAGE, "the file name '%.80s...' is too long", path);
}

/* Begins a NumPy file. Examples: `type` is "<f4"; `shape` is "2, 3". */
static enum status begin_array(struct file_writer *writer, const char *path, const char *type,
                               const char *shape)
{
    char header[NPY_HEADER_MAX];
    TRY(file_begin(writer, path));
    return file_add(writer, header, npy_header_make(header, type, shape));
}

/* Formats the shape of the batch, such as "256, 3, 224, 224". */
static void shape_of(const struct synth *synth, char shape[NPY_SHAPE_MAX])
{
    const struct synth_output *output = &synth->output;
    if (output->layout == OUTPUT_NCHW)
        snprintf(shape, NPY_SHAPE_MAX, "%" PRIu64 ", %u, %u, %u", synth->batch, output->channels, output->res,
                 output->res);
    else
        snprintf(shape, NPY_SHAPE_MAX, "%" PRIu64 ", %u, %u, %u", synth->batch, output->res, output->res,
                 output->channels);
}

static enum status begin_images(struct file_writer *writer, const char *path, const struct synth *synth)
{
    char shape[NPY_SHAPE_MAX];
    shape_of(synth, shape);
    return begin_array(writer, path, dtype_npy(synth->output.type), shape);
}

/* Copies the images of the batch to the file, and their labels to `labels`. Sets each label before it calls
 * fetch(), because some variants do not set labels. */
static enum status add_images(struct file_writer *writer, const struct synth *synth,
                              const struct variant *variant, void *state, void *pixels, int64_t *labels)
{
    for (uint64_t j = 0; j < synth->batch; j++) {
        struct synth_image image = synth_image_at(synth->first, synth->stride, synth->class_count, 0, j);
        struct synth_fetch fetch = {.j = j, .pixels = pixels, .label = synth->classes[image.class_index].id};
        TRY(variant->fetch(state, &fetch));
        TRY(file_add(writer, pixels, synth_output_bytes(synth)));
        labels[j] = fetch.label;
    }
    return STATUS_OK;
}

/* Writes all images to a file, but does not yet rename this file from its temporary name to `path`. */
static enum status complete_images(struct file_writer *writer, const char *path, const struct synth *synth,
                                   const struct variant *variant, void *state, int64_t *labels)
{
    FREED void *pixels = malloc(synth_output_bytes(synth));
    TRY(ALLOCATED(pixels, "%s: out of memory; lower --out-res", path));
    TRY(begin_images(writer, path, synth));
    TRY(add_images(writer, synth, variant, state, pixels, labels));
    return file_complete(writer);
}

/* Writes all labels to a file, but does not yet rename this file from its temporary name. */
static enum status complete_labels(struct file_writer *writer, const char *path, const int64_t *labels,
                                   uint64_t count)
{
    char shape[32], labels_path[PATH_MAX];
    snprintf(shape, sizeof shape, "%" PRIu64 ",", count);
    TRY(npy_labels_path(path, labels_path));
    TRY(begin_array(writer, labels_path, "<i8", shape));
    TRY(file_add(writer, labels, count * sizeof *labels));
    return file_complete(writer);
}

/* Prints a note about the files. The hint about bfloat16 is printed even if stderr is not a terminal, so that
 * logs contain it. */
static void report_written(const char *path, const struct synth *synth)
{
    static const char *const types[] = {
        [DTYPE_U8] = "uint8", [DTYPE_F16] = "float16", [DTYPE_BF16] = "uint16", [DTYPE_F32] = "float32"};
    char shape[NPY_SHAPE_MAX], labels_path[PATH_MAX];
    shape_of(synth, shape);
    if (npy_labels_path(path, labels_path) == STATUS_OK)
        status_note("wrote %s (%s) %s and %s (%" PRIu64 ")", path, shape, types[synth->output.type],
                    labels_path, synth->batch);
    if (synth->output.type == DTYPE_BF16)
        status_say("%s stores bfloat16 as <u2; to convert the loaded array a in PyTorch: "
                   "torch.from_numpy(a.view('int16')).view(torch.bfloat16)",
                   path);
}

enum status npy_write_batch(const char *path, const struct synth *synth, const struct variant *variant,
                            void *state)
{
    CLOSED_BY(file_abandon) struct file_writer image_file = {.fd = -1}, label_file = {.fd = -1};
    FREED int64_t *labels = malloc(synth->batch * sizeof *labels);
    TRY(ALLOCATED(labels, "%s: out of memory; lower --batch", path));
    TRY(complete_images(&image_file, path, synth, variant, state, labels));
    TRY(complete_labels(&label_file, path, labels, synth->batch));
    TRY(file_end(&label_file));
    TRY(file_end(&image_file));
    report_written(path, synth);
    return STATUS_OK;
}
