#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/dtype.h"
#include "core/file.h"
#include "core/text.h"
#include "data/image.h"
#include "data/resample.h"
#include "data/tensor_file.h"
#include "train/checkpoint.h"
#include "train/feed.h"

/* ---- --init ---- */

#define PREFIX_BYTES 96   /* of a prefix of names, such as "state_dict.module." */
#define PREFIXES_MAX 64   /* per file */
#define SIDE_MAX     1000 /* patches along a side */

const char *const init_ema_names[] = {"auto", "yes", "no", NULL};

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

/* ---- Positions ----
 * A transformer for images of another size has positions for another number of patches. They are interpolated
 * as in timm (resample_abs_pos_embed: bicubic with a = -1/2, antialiased), here in double precision. */

/* The patches of a network along each axis. */
struct grid {
    uint32_t rows, columns;
};

static struct grid grid_of(const struct model *model)
{
    const struct layer *patches = &model->layers[0];
    return model->transformer ? (struct grid){patches->in.height / patches->spec.kernel[1],
                                              patches->in.width / patches->spec.kernel[2]}
                              : (struct grid){0, 0};
}

static bool is_positions(const struct model *model, const struct model_tensor *tensor)
{
    return model->transformer && tensor->first == model->layers[1].weight;
}

/* Returns whether a tensor must be interpolated. */
static bool moves(const struct model *model, const struct model *theirs, uint32_t t)
{
    const struct grid here = grid_of(model), there = grid_of(theirs);
    return is_positions(model, &model->tensors[t]) &&
           (here.rows != there.rows || here.columns != there.columns);
}

/* Interpolates along one axis. An element of the array (outer, axis->in, inner) is followed by the next one
 * along the innermost axis. */
static void resample_values(const struct resample_axis *axis, size_t outer, size_t inner, const double *from,
                            double *to)
{
    for (uint32_t i = 0; i < axis->out; i++) {
        const double centre = (i + 0.5) * axis->in / axis->out;
        const double reach = axis->scale * resample_reach(axis->bicubic);
        const double low = centre - reach + 0.5, high = centre + reach + 0.5;
        const uint32_t begin = low > 0 ? (uint32_t)low : 0, end = high < axis->in ? (uint32_t)high : axis->in;
        double total = 0;
        for (uint32_t x = begin; x < end; x++)
            total += resample_filter(axis, x, centre);
        for (size_t o = 0; o < outer; o++)
            for (size_t k = 0; k < inner; k++) {
                double sum = 0;
                for (uint32_t x = begin; x < end; x++)
                    sum += resample_filter(axis, x, centre) * from[(o * axis->in + x) * inner + k];
                to[(o * axis->out + i) * inner + k] = sum / total;
            }
    }
}

/* Interpolates positions (1 + rows x columns, width). The first one is that of the class token. */
static enum status resample_positions(const float *from, struct grid there, float *to, struct grid here,
                                      size_t width)
{
    const struct resample_axis x = resample_axis_with(there.columns, here.columns, true),
                               y = resample_axis_with(there.rows, here.rows, true);
    const size_t first = (size_t)there.rows * there.columns * width,
                 half = (size_t)there.rows * here.columns * width,
                 last = (size_t)here.rows * here.columns * width;
    FREED double *values = malloc((first + half + last) * sizeof *values);
    TRY(ALLOCATED(values, "out of memory for the positions"));
    for (size_t i = 0; i < first; i++)
        values[i] = from[width + i];
    resample_values(&x, there.rows, width, values, values + first);
    resample_values(&y, 1, here.columns * width, values + first, values + first + half);
    memcpy(to, from, width * sizeof *to);
    for (size_t i = 0; i < last; i++)
        to[width + i] = (float)values[first + half + i];
    return STATUS_OK;
}

/* Sets `*taken` to the number of tensors to copy: all, or all except the two of the last layer. */
static enum status fit(const struct model *model, const struct model *theirs, uint32_t *taken)
{
    *taken = model->tensor_count;
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *here = &model->tensors[t], *there = &theirs->tensors[t];
        char ours[64], others[64];
        if (same_shape(here, there) || moves(model, theirs, t))
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

/* Copies the parameters of a checkpoint. `*taken` is the number of tensors; `theirs` becomes the network of
 * the checkpoint. */
static enum status take(const struct checkpoint *checkpoint, const struct model *model, float *parameters,
                        struct model *theirs, uint32_t *taken)
{
    if (strcmp(checkpoint->model, model->name) != 0)
        return status_set(STATUS_USAGE,
                          "its model is %.15s, but this is %s; use --model %.15s, or another checkpoint",
                          checkpoint->model, model->name, checkpoint->model);
    TRY(checkpoint_model(checkpoint, theirs));
    TRY(fit(model, theirs, taken));
    TRY(check_finite(theirs, checkpoint_parameters(checkpoint), *taken));
    for (uint32_t t = 0; t < *taken; t++) {
        const float *from = checkpoint_parameters(checkpoint) + theirs->tensors[t].first;
        float *to = parameters + model->tensors[t].first;
        if (moves(model, theirs, t))
            TRY(resample_positions(from, grid_of(theirs), to, grid_of(model), model->tensors[t].shape[2]));
        else
            memcpy(to, from, model->tensors[t].values * sizeof *parameters);
    }
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

/* Returns whether a tensor is a number of steps that PyTorch's BatchNorm saves and does not use if it has a
 * momentum. */
static bool is_step_counter(const struct model *model, const char *name)
{
    return model->normalises && text_ends_in(name, ".num_batches_tracked");
}

/* ---- Prefixes of names ---- Many training scripts save the parameters under a key, next to the state of the
 * optimizer and other values. DistributedDataParallel, torch.compile() and modules that hold the network put
 * a prefix before all names. */

/* Returns the length of the longest prefix of a name that consists of such keys and prefixes, in any order
 * and nesting. `*average` says whether it contains the key of a moving average of the parameters. */
static size_t prefix_length(const char *name, bool *average)
{
    static const char *const parts[] = {"state_dict_ema.",   "model_ema.", "state_dict.", "model.",
                                        "model_state_dict.", "module.",    "_orig_mod."};
    size_t length = 0;
    *average = false;
    for (size_t i = 0; i < COUNT_OF(parts);) {
        const size_t part = strlen(parts[i]);
        const bool found = strncmp(name + length, parts[i], part) == 0;
        *average |= found && i < 2;
        length += found ? part : 0;
        i = found ? 0 : i + 1;
    }
    return length;
}

/* A prefix that a file has. */
struct prefix {
    const char *name; /* a name that begins with it */
    size_t length;
    bool average;
    uint32_t count; /* of the model's tensors */
};

/* Lists the prefixes of the tensors of the model that the file has. */
static enum status list_prefixes(const struct tensor_file *file, const struct model *model,
                                 struct prefix prefixes[PREFIXES_MAX], size_t *count)
{
    *count = 0;
    for (size_t i = 0; i < file->count; i++) {
        struct prefix own = {.name = file->tensors[i].name};
        size_t k = 0;
        own.length = prefix_length(own.name, &own.average);
        if (!is_of(model, own.name + own.length))
            continue;
        while (k < *count &&
               (prefixes[k].length != own.length || memcmp(prefixes[k].name, own.name, own.length) != 0))
            k++;
        if (k == PREFIXES_MAX || own.length >= PREFIX_BYTES)
            return status_set(STATUS_USAGE,
                              "it has the tensors of %s under too many or too long prefixes; save only one "
                              "state_dict()",
                              model->name);
        if (k == *count)
            prefixes[(*count)++] = own;
        prefixes[k].count++;
    }
    return STATUS_OK;
}

/* Keeps only the tensors under a prefix, and removes it from their names. */
static void keep_prefixed(struct tensor_file *file, const char *prefix)
{
    const size_t length = strlen(prefix), count = file->count;
    bool average;
    file->count = 0;
    for (size_t i = 0; i < count; i++) {
        char *name = file->tensors[i].name;
        if (prefix_length(name, &average) != length || strncmp(name, prefix, length) != 0) {
            free(name);
            continue;
        }
        memmove(name, name + length, strlen(name + length) + 1);
        file->tensors[file->count++] = file->tensors[i];
    }
}

/* Sets `prefix` to the prefix under which the file has most tensors of the model, among those that `ema`
 * allows, and keeps only the tensors under it. With INIT_EMA_AUTO, a moving average of the parameters is
 * preferred to the parameters, as in timm. Two complete networks are refused: either could be meant. */
static enum status take_inner(struct tensor_file *file, const struct model *model, enum init_ema ema,
                              char prefix[PREFIX_BYTES])
{
    struct prefix prefixes[PREFIXES_MAX];
    const struct prefix *best = NULL, *equal = NULL;
    size_t count;
    bool averages = false, plain = false;
    *prefix = '\0';
    TRY(list_prefixes(file, model, prefixes, &count));
    for (size_t i = 0; i < count; i++) {
        averages |= prefixes[i].average;
        plain |= !prefixes[i].average;
    }
    if (ema == INIT_EMA_YES && !averages)
        return status_set(STATUS_USAGE,
                          "it has no moving average (state_dict_ema or model_ema); drop --init-ema yes");
    if (ema == INIT_EMA_NO && averages && !plain)
        return status_set(STATUS_USAGE,
                          "it has only a moving average (state_dict_ema or model_ema); drop --init-ema no");
    for (size_t i = 0; i < count; i++) {
        const struct prefix *own = &prefixes[i];
        if (own->average != (ema != INIT_EMA_NO && averages))
            continue;
        if (best && own->count == best->count)
            equal = own;
        if (!best || own->count > best->count) {
            best = own;
            equal = NULL;
        }
    }
    if (equal)
        return status_set(STATUS_USAGE,
                          "it has the tensors of %s twice, as %.*s* and %.*s*; save only one of them",
                          model->name, (int)best->length, best->name, (int)equal->length, equal->name);
    if (best)
        snprintf(prefix, PREFIX_BYTES, "%.*s", (int)best->length, best->name);
    keep_prefixed(file, prefix);
    return STATUS_OK;
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
    if (tensor->code != TENSOR_PLAIN)
        return status_set(STATUS_USAGE,
                          "its %s is of type %s; convert all tensors to floats of 32 or 16 bits",
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
        if (!is_of(model, file->tensors[i].name) && !is_step_counter(model, file->tensors[i].name))
            return status_set(
                STATUS_USAGE,
                "it also has a tensor %.48s, which %s does not have; use another --model, or remove it",
                file->tensors[i].name, model->name);
    return STATUS_OK;
}

/* Sets `*input` to the shape of the samples for which the file has positions. A file that is not square, or
 * that has as many positions as the model, counts as one for samples of the model's shape. */
static void find_input(const struct tensor_file *file, const struct model *model, struct shape *input)
{
    *input = model->input;
    if (!model->transformer)
        return;
    const struct layer *tokens = &model->layers[1];
    const struct tensor *positions = find(file, "pos_embed");
    const uint64_t count = positions && positions->axes == 3 ? positions->shape[1] : 0;
    for (uint32_t side = 1; side <= SIDE_MAX && count != tokens->out.channels; side++)
        if ((uint64_t)side * side + 1 == count) {
            input->height = side * model->layers[0].spec.kernel[1];
            input->width = side * model->layers[0].spec.kernel[2];
        }
}

/* Reads the values of a tensor as floats. */
static enum status read_floats(const struct tensor_file *file, const struct tensor *tensor, float *values)
{
    if (tensor->dtype == DTYPE_F32)
        return tensor_read(file, tensor, values);
    FREED uint16_t *halves = malloc(tensor->bytes + 1);
    TRY(ALLOCATED(halves, "out of memory for its parameters"));
    TRY(tensor_read(file, tensor, halves));
    for (uint64_t i = 0; i < tensor->bytes / sizeof *halves; i++)
        values[i] = tensor->dtype == DTYPE_F16 ? half_to_float(halves[i]) : bf16_to_float(halves[i]);
    return STATUS_OK;
}

/* Reads the parameters of a network that has the layers of `model`. Its number of classes, which is the
 * length of the last tensor, may differ from that of `model`. A file without the last layer counts as one
 * with another number of classes. */
static enum status read_tensors(const struct tensor_file *file, const struct model *model,
                                struct checkpoint *checkpoint)
{
    const struct tensor *last = find(file, model->tensors[model->tensor_count - 1].name);
    struct model theirs;
    struct shape input;
    uint32_t count = 0;
    const bool usable = last && last->axes == 1 && last->shape[0] > 0 && last->shape[0] <= INT32_MAX;
    const uint32_t classes = usable ? (uint32_t)last->shape[0] : model->classes + !last;
    TRY(check_names(file, model, &count));
    find_input(file, model, &input);
    TRY(model_build(model_find(model->name), input, classes, &theirs));
    checkpoint_describe(&theirs, checkpoint);
    for (uint32_t t = 0; t < count; t++)
        TRY(check_tensor(find(file, theirs.tensors[t].name), &theirs, &theirs.tensors[t]));
    TRY(ALLOCATED(train_state_new(theirs.arena_values, &checkpoint->state),
                  "out of memory for its parameters"));
    for (uint32_t t = 0; t < count; t++) {
        const struct model_tensor *tensor = &theirs.tensors[t];
        TRY(read_floats(file, find(file, tensor->name), checkpoint->state.parameters + tensor->first));
    }
    return STATUS_OK;
}

/* Sets `prefix` as take_inner() does. */
static enum status read_file(const struct init_request *request, const struct model *model,
                             struct checkpoint *checkpoint, char prefix[PREFIX_BYTES])
{
    CLOSED_BY(tensor_file_close) struct tensor_file file;
    TRY(status_prefix(tensor_file_open(request->path, &file), "%s", request->option));
    enum status status = take_inner(&file, model, request->ema, prefix);
    if (status == STATUS_OK)
        status = read_tensors(&file, model, checkpoint);
    return status_prefix(status, "%s %s", request->option, request->path);
}

/* Reads a checkpoint of this program. */
static enum status read_checkpoint(const struct init_request *request, struct checkpoint *checkpoint)
{
    TRY(checkpoint_find(request->option, request->path, checkpoint));
    if (request->ema == INIT_EMA_YES && !checkpoint->state.ema)
        return status_set(STATUS_USAGE, "%s %s: it has no moving average; drop --init-ema yes",
                          request->option, request->path);
    if (request->ema == INIT_EMA_NO) {
        free(checkpoint->state.ema);
        checkpoint->state.ema = NULL;
    }
    return STATUS_OK;
}

/* Says what was taken. `prefix` is that of the names in a file of tensors; NULL: a checkpoint. */
static void say_taken(const struct init_request *request, const struct checkpoint *checkpoint,
                      const char *prefix, const struct model *model, const struct model *theirs,
                      uint32_t taken)
{
    char after[PREFIX_BYTES + 128] = "";
    const struct grid from = grid_of(theirs), to = grid_of(model);
    if (!prefix)
        snprintf(after, sizeof after, " after %" PRIu32 " epoch%s of %.64s", checkpoint->history.epochs,
                 checkpoint->history.epochs == 1 ? "" : "s", checkpoint->data);
    else if (*prefix)
        snprintf(after, sizeof after, " (%s*)", prefix);
    if (from.rows != to.rows || from.columns != to.columns)
        text_append(after, sizeof after,
                    "; positions interpolated from %" PRIu32 "x%" PRIu32 " to %" PRIu32 "x%" PRIu32,
                    from.rows, from.columns, to.rows, to.columns);
    status_say("%s: %" PRIu32 " of %" PRIu32 " tensors taken from %s%s%s", request->option, taken,
               model->tensor_count, request->path, after,
               taken < model->tensor_count ? "; the last layer starts with zeros" : "");
}

enum status init_take(const struct init_request *request, const struct model *model, float *parameters,
                      uint64_t *hash)
{
    struct checkpoint checkpoint = {0};
    struct model theirs;
    uint32_t taken = 0;
    char prefix[PREFIX_BYTES] = "";
    const bool tensors = tensor_file_named(request->path);
    if (text_ends_in(request->path, ".npy"))
        return status_set(STATUS_USAGE,
                          "%s %s: a .npy file holds one tensor; give a checkpoint, or a file that ends in "
                          ".safetensors, .npz, .pt, .pth or .pth.tar",
                          request->option, request->path);
    if (tensors && access(request->path, F_OK) != 0)
        return status_set(STATUS_USAGE, "%s %s: %s", request->option, request->path, strerror(errno));
    enum status status =
        tensors ? read_file(request, model, &checkpoint, prefix) : read_checkpoint(request, &checkpoint);
    if (status == STATUS_OK)
        status = status_prefix(take(&checkpoint, model, parameters, &theirs, &taken), "%s %s",
                               request->option, request->path);
    if (status == STATUS_OK) {
        *hash = checkpoint_hash(&checkpoint);
        say_taken(request, &checkpoint, tensors ? prefix : NULL, model, &theirs, taken);
    }
    checkpoint_free(&checkpoint);
    return status;
}

/* ---- Networks for inference ---- */

/* Finds the model that --model or the metadata of a file of --export name. */
static enum status find_table(const struct tensor_file *file, const char *name,
                              const struct model_table **table)
{
    const char *found = tensor_file_note(file, "fdsl-bench") ? tensor_file_note(file, "model") : NULL;
    if (name && found && strcmp(name, found) != 0)
        return status_set(STATUS_USAGE, "its model is %.80s, not %s; drop --model", found, name);
    if (!name && !found)
        return status_set(STATUS_USAGE, "it does not name its model; add --model NAME");
    *table = model_find(name ? name : found);
    return *table ? STATUS_OK
                  : status_set(STATUS_USAGE, "its model %.80s is unknown; name it with --model", found);
}

/* Parses "[0.1, 0.2]": one value per channel. */
static enum status read_list(const char *key, const char *text, uint32_t count, float *values)
{
    char *end = (char *)(uintptr_t)text; /* const cast: strtof() only reads */
    bool good = *end == '[';
    for (uint32_t i = 0; good && i < count; i++) {
        const char *begin = end + 1;
        values[i] = strtof(begin, &end);
        good = end != begin && isfinite(values[i]) && *end == (i + 1 < count ? ',' : ']');
    }
    return good
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "its metadata \"%s\" are not %" PRIu32 " numbers, one per channel of the samples",
                            key, count);
}

/* Reads what the metadata of a file of --export say about the normalisation. */
static enum status read_normalisation(const struct tensor_file *file, uint32_t channels,
                                      struct checkpoint *checkpoint, bool *normalised)
{
    const char *scale = tensor_file_note(file, "scale"), *offset = tensor_file_note(file, "offset");
    *normalised = tensor_file_note(file, "fdsl-bench") && scale && offset;
    if (!*normalised)
        return STATUS_OK;
    TRY(read_list("scale", scale, channels, checkpoint->scale));
    for (uint32_t c = 0; c < channels; c++)
        if (checkpoint->scale[c] <= 0) /* all samples would look alike, or be negatives */
            return status_set(STATUS_USAGE, "its metadata \"scale\" have %g, which is not above 0",
                              (double)checkpoint->scale[c]);
    return read_list("offset", offset, channels, checkpoint->offset);
}

/* Builds the model for the number of classes in the file. */
static enum status find_network(struct tensor_file *file, const struct init_request *request,
                                const char *name, const struct data *data, struct model *model,
                                struct checkpoint *checkpoint, bool *normalised)
{
    const struct model_table *table = NULL;
    char prefix[PREFIX_BYTES];
    TRY(find_table(file, name, &table));
    TRY(read_normalisation(file, data->shape.channels, checkpoint, normalised));
    TRY(model_build(table, data->shape, 1, model)); /* for the names of its tensors */
    TRY(take_inner(file, model, request->ema, prefix));
    const struct model_tensor *last = &model->tensors[model->tensor_count - 1];
    const struct tensor *own = find(file, last->name);
    if (!own || own->axes != 1 || own->shape[0] < 1 || own->shape[0] > INT32_MAX)
        return status_set(STATUS_USAGE,
                          "it lacks %s, the last layer of %s; use a file of a whole network, or the right "
                          "--model",
                          last->name, table->name);
    return model_build(table, data->shape, (uint32_t)own->shape[0], model);
}

enum status init_network(const struct init_request *request, const char *name, const struct data *data,
                         struct model *model, struct checkpoint *checkpoint, bool *normalised)
{
    uint64_t unused;
    CLOSED_BY(tensor_file_close) struct tensor_file file;
    TRY(status_prefix(tensor_file_open(request->path, &file), "%s", request->option));
    TRY(status_prefix(find_network(&file, request, name, data, model, checkpoint, normalised), "%s %s",
                      request->option, request->path));
    checkpoint_describe(model, checkpoint);
    TRY(ALLOCATED(train_state_new(model->arena_values, &checkpoint->state),
                  "out of memory for the parameters"));
    return init_take(request, model, checkpoint->state.parameters, &unused);
}

/* ---- --export, --export-data, --export-step ---- */

/* Tensors that are to be written; there is room for more. */
struct listing {
    struct safetensor *tensors;
    size_t count;
};

/* Adds a tensor, whose values must outlive the list. */
static void list_tensor(struct listing *list, const char *name, const char *type, const void *values,
                        size_t value_bytes, uint32_t axes, const uint64_t *shape)
{
    struct safetensor *tensor = &list->tensors[list->count++];
    *tensor = (struct safetensor){.type = type, .axes = axes, .values = values, .bytes = value_bytes};
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    for (uint32_t i = 0; i < axes; i++) {
        tensor->shape[i] = shape[i];
        tensor->bytes *= shape[i];
    }
}

/* Adds an array of `count` samples. */
static void list_samples(struct listing *list, const char *name, const char *type, const void *values,
                         size_t value_bytes, uint32_t count, const struct model *model)
{
    const struct shape *in = &model->input;
    const uint64_t volume[] = {count, in->channels, in->depth, in->height, in->width};
    const uint64_t picture[] = {count, in->channels, in->height, in->width};
    list_tensor(list, name, type, values, value_bytes, model->volumetric ? 5 : 4,
                model->volumetric ? volume : picture);
}

/* Adds all tensors of a model whose values are in `arena`. Each name begins with `prefix`. */
static void list_arena(struct listing *list, const struct model *model, const char *prefix,
                       const float *arena)
{
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *of = &model->tensors[t];
        char name[64];
        snprintf(name, sizeof name, "%.15s%.47s", prefix, of->name);
        list_tensor(list, name, "F32", arena + of->first, sizeof *arena, of->axes, of->shape);
    }
}

/* Writes a file whose metadata have the text of the options, and the pairs in `others`, which ends with NULL.
 */
static enum status write_tensors(const char *path, const struct option_values *identity,
                                 const char *const *others, const struct listing *list)
{
    const char *about[16] = {"fdsl-bench"};
    FREED char *text = option_values_text(identity);
    TRY(ALLOCATED(text, "%s: out of memory", path));
    about[1] = text;
    for (size_t i = 0; others && others[i]; i++)
        about[2 + i] = others[i];
    return safetensors_write(path, about, list->tensors, list->count);
}

/* ---- One step ---- */

#define STEP_TENSORS (3 * MODEL_TENSORS_MAX + MODEL_LAYERS_MAX + 4)

/* Returns the factors by which a dropout layer multiplies its inputs in a step of an epoch. The caller
 * frees the array; NULL if memory runs out. */
static float *dropout_factors(const struct train *train, const struct layer *layer, uint32_t epoch,
                              const uint32_t *numbers, uint32_t count)
{
    uint32_t threshold = (uint32_t)(layer->spec.rate * 256);
    float *factors = malloc(count * layer->out_values * sizeof *factors);
    for (uint32_t j = 0; factors && j < count; j++)
        for (uint32_t i = 0; i < layer->out_values; i++) {
            struct philox_block block = draw_dropout(train->seed, epoch, numbers[j], layer->number, i);
            factors[j * layer->out_values + i] =
                draw_kept(block, i, threshold) ? 256.0f / (float)(256 - threshold) : 0;
        }
    return factors;
}

/* Returns the factors that stochastic depth applies in a step of an epoch, one per sample. The caller frees
 * the array; NULL if memory runs out. */
static float *path_factors(const struct train *train, const struct layer *layer, uint32_t epoch,
                           const uint32_t *numbers, uint32_t count)
{
    float *factors = malloc(count * sizeof *factors);
    for (uint32_t j = 0; factors && j < count; j++)
        factors[j] = draw_path(train->seed, epoch, numbers[j], layer->number, layer->spec.rate);
    return factors;
}

/* Contents of the --export-step file; owned. */
struct step_parts {
    uint32_t epoch, step;
    uint32_t *numbers, count;
    float *inputs, *partner, *targets, *gradients, *factors[MODEL_LAYERS_MAX]; /* partner: one sample */
    int64_t *labels;
    double loss;
    struct train_state after;
    struct feed feed;
    struct safetensor tensors[STEP_TENSORS];
};

static void step_free(struct step_parts *parts)
{
    free(parts->numbers);
    free(parts->inputs);
    free(parts->partner);
    free(parts->targets);
    free(parts->gradients);
    free(parts->labels);
    for (size_t i = 0; i < MODEL_LAYERS_MAX; i++)
        free(parts->factors[i]);
    train_state_free(&parts->after);
    feed_close(&parts->feed);
    free(parts);
}

#define MASKED_LABEL (-100) /* PyTorch's cross_entropy() ignores it */

/* Writes the samples of the step as the network sees them, and their targets. */
static void step_fill(const struct train *train, struct step_parts *parts)
{
    const struct data *data = train->data;
    const struct mix mix = train_mix(train, parts->epoch, parts->step);
    const uint32_t *numbers = parts->numbers;
    for (uint32_t j = 0; j < parts->count; j++) {
        const struct target target = train_target(train, &mix, numbers, parts->count, j);
        feed_gather(&parts->feed, &mix, parts->epoch, numbers, parts->count, j, parts->partner,
                    parts->inputs + j * data->sample_values);
        parts->labels[j] = target.label == DATA_MASKED ? MASKED_LABEL : (int64_t)target.label;
        for (uint32_t k = 0; k < data->classes; k++)
            parts->targets[(size_t)j * data->classes + k] =
                target_of(&target, data->sets[DATA_TRAIN].multi_hot, train->smoothing, data->classes, k);
    }
}

/* Collects the samples of the step. */
static enum status step_samples(const struct train *train, struct step_parts *parts)
{
    const struct data *data = train->data;
    struct draw_order order = train_order(train, parts->epoch);
    parts->numbers = malloc(train_entries(train, train->batch) * sizeof *parts->numbers);
    parts->inputs = malloc(train->batch * data->sample_values * sizeof *parts->inputs);
    parts->partner = malloc(data->sample_values * sizeof *parts->partner);
    parts->labels = malloc(train->batch * sizeof *parts->labels);
    parts->targets = malloc((size_t)train->batch * data->classes * sizeof *parts->targets);
    parts->gradients = malloc(train->model->arena_values * sizeof *parts->gradients);
    TRY(ALLOCATED(parts->numbers && parts->inputs && parts->partner && parts->labels && parts->targets &&
                      parts->gradients && train_state_new(train->model->arena_values, &parts->after),
                  "--export-step: out of memory"));
    parts->count = train_batch(train, &order, parts->step, parts->numbers);
    TRY(feed_open(train, &(struct resources){.threads = 1}, &parts->feed));
    TRY(feed_step(&parts->feed, parts->epoch, parts->step, parts->numbers, parts->count));
    step_fill(train, parts);
    for (uint32_t i = 0; i < train->model->layer_count; i++) {
        const struct layer *layer = &train->model->layers[i];
        const bool path = layer->spec.kind == LAYER_DROP_PATH;
        if (!path && layer->spec.kind != LAYER_DROPOUT)
            continue;
        parts->factors[i] =
            (path ? path_factors : dropout_factors)(train, layer, parts->epoch, parts->numbers, parts->count);
        TRY(ALLOCATED(parts->factors[i], "--export-step: out of memory"));
    }
    return STATUS_OK;
}

/* Lists the tensors: inputs, labels (unless they are multi-hot), targets, loss, dropout factors, parameters
 * before and after, gradients. */
static void step_list(const struct train *train, const struct train_state *before,
                      const struct step_parts *parts, struct listing *list)
{
    const struct model *model = train->model;
    const uint64_t targets[] = {parts->count, model->classes};
    list_samples(list, "inputs", "F32", parts->inputs, sizeof(float), parts->count, model);
    if (!train->data->multi_hot) /* otherwise, `targets` tell the classes */
        list_tensor(list, "labels", "I64", parts->labels, sizeof(int64_t), 1, targets);
    list_tensor(list, "targets", "F32", parts->targets, sizeof(float), 2, targets);
    list_tensor(list, "loss", "F64", &parts->loss, sizeof parts->loss, 0, NULL);
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (parts->factors[i]) {
            char name[48];
            const uint64_t shape[] = {parts->count, model->layers[i].out_values};
            const bool path = model->layers[i].spec.kind == LAYER_DROP_PATH;
            snprintf(name, sizeof name, "factor.%s", model->layers[i].name);
            list_tensor(list, name, "F32", parts->factors[i], sizeof(float), path ? 1 : 2, shape);
        }
    list_arena(list, model, "before.", before->parameters);
    list_arena(list, model, "gradient.", parts->gradients);
    list_arena(list, model, "after.", parts->after.parameters);
}

enum status export_step(const struct train *train, const struct engine *engine, void *state,
                        const struct train_state *before, uint32_t epoch, uint32_t step,
                        const struct option_values *identity, const char *path)
{
    struct train_totals totals;
    struct step_parts *parts = calloc(1, sizeof *parts);
    TRY(ALLOCATED(parts, "--export-step: out of memory"));
    struct listing list = {parts->tensors, 0};
    parts->epoch = epoch;
    parts->step = step;
    enum status status = step_samples(train, parts);
    if (status == STATUS_OK)
        status = engine->steps(state, epoch, step, 1);
    if (status == STATUS_OK)
        status = engine->totals(state, &totals);
    if (status == STATUS_OK)
        status = engine->gradients(state, parts->gradients);
    if (status == STATUS_OK)
        status = engine->get(state, &parts->after);
    if (status == STATUS_OK) {
        parts->loss = totals.loss / (double)totals.samples;
        step_list(train, before, parts, &list);
        status = write_tensors(path, identity, NULL, &list);
    }
    step_free(parts);
    return status == STATUS_OK ? engine->set(state, before) : status;
}

/* ---- The data ---- */

enum status export_data(const struct train *train, const float *initial, const struct option_values *identity,
                        const char *path)
{
    static const char *const types[] = {
        [DTYPE_U8] = "U8", [DTYPE_F16] = "F16", [DTYPE_F32] = "F32", [DTYPE_BF16] = "BF16"};
    static const char *const names[] = {"train.values", "train.labels", "test.values", "test.labels"};
    const struct data *data = train->data;
    const uint64_t channels = data->shape.channels;
    struct safetensor tensors[MODEL_TENSORS_MAX + 6];
    struct listing list = {tensors, 0};
    if (data->feed != DATA_STORED) /* other feeds may keep only part of the training set in memory */
        return status_set(STATUS_USAGE, "--export-data writes only stored samples; add --feed stored");
    if (data->canvas_bytes) /* the sets have samples of different sizes */
        return status_set(STATUS_USAGE,
                          "--export-data cannot write the samples of --fit random-resized-crop; "
                          "use --fit resize or crop");
    if (data->multi_hot)
        return status_set(STATUS_USAGE, "--export-data writes one class per sample, but these samples have "
                                        "multi-hot labels; drop it");
    for (int part = 0; part < DATA_PARTS; part++) {
        const struct data_set *set = &data->sets[part];
        const uint64_t count = set->count;
        list_samples(&list, names[2 * part], types[data->type], set->values, dtype_bytes(data->type),
                     set->count, train->model);
        list_tensor(&list, names[2 * part + 1], "I32", set->labels, sizeof *set->labels, 1, &count);
    }
    list_tensor(&list, "scale", "F32", data->scale, sizeof(float), 1, &channels);
    list_tensor(&list, "offset", "F32", data->offset, sizeof(float), 1, &channels);
    list_arena(&list, train->model, "initial.", initial);
    return write_tensors(path, identity, NULL, &list);
}

/* ---- The parameters ---- */

#define LIST_MAX (24 * (DATA_CHANNELS_MAX + 1))

/* Formats values as a JSON array: "[0.0127, 0.0131]". */
static void list(const float *values, uint32_t count, char text[LIST_MAX])
{
    *text = '\0';
    for (uint32_t i = 0; i < count; i++)
        text_append(text, LIST_MAX, "%s%.9g", i ? ", " : "[", (double)values[i]);
    text_append(text, LIST_MAX, "]");
}

enum status export_parameters(const struct train *train, const float *parameters,
                              const struct option_values *identity, const char *path)
{
    const struct model *model = train->model;
    const struct shape *in = &model->input;
    struct safetensor tensors[MODEL_TENSORS_MAX];
    struct listing written = {tensors, 0};
    char input[64], classes[16], scale[LIST_MAX], offset[LIST_MAX], depth[16] = "";
    if (model->volumetric)
        snprintf(depth, sizeof depth, "%" PRIu32 ", ", in->depth);
    snprintf(input, sizeof input, "[%" PRIu32 ", %s%" PRIu32 ", %" PRIu32 "]", in->channels, depth,
             in->height, in->width);
    snprintf(classes, sizeof classes, "%" PRIu32, model->classes);
    list(train->data->scale, in->channels, scale);
    list(train->data->offset, in->channels, offset);
    const char *const about[] = {"model", model->name, "input",  input,  "classes", classes,
                                 "scale", scale,       "offset", offset, NULL};
    list_arena(&written, model, "", parameters);
    return write_tensors(path, identity, about, &written);
}

/* ---- --save-batch ---- */

/* Splits "COUNT:FOLDER". */
static enum status split(const char *text, uint32_t *count, const char **folder)
{
    char *end;
    errno = 0;
    const uint64_t number = isdigit((unsigned char)*text) ? strtoull(text, &end, 10) : 0;
    if (number == 0 || number > UINT32_MAX || errno || *end != ':' || !end[1])
        return status_set(STATUS_USAGE, "--save-batch %.80s: give a number and a folder, as in 16:samples",
                          text);
    *count = (uint32_t)number;
    *folder = end + 1;
    return STATUS_OK;
}

enum status export_batch_check(const char *text)
{
    uint32_t count = 0;
    const char *folder = NULL;
    bool empty = true;
    TRY(split(text, &count, &folder));
    DIR *list = opendir(folder);
    if (!list)
        return errno == ENOENT
                   ? STATUS_OK
                   : status_set(STATUS_USAGE, "--save-batch: %s cannot be used: %s; name another folder",
                                folder, strerror(errno));
    for (struct dirent *entry; empty && (entry = readdir(list));)
        empty = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
    closedir(list);
    return empty ? STATUS_OK
                 : status_set(STATUS_USAGE,
                              "--save-batch: the folder %s contains files; name a new or an empty folder",
                              folder);
}

/* Converts normalised values to bytes with interleaved channels. */
static void to_pixels(const struct data *data, const float *values, uint8_t *pixels)
{
    const size_t channels = data->shape.channels, plane = data->sample_values / channels;
    for (size_t i = 0; i < data->sample_values; i++) {
        const size_t c = i / plane;
        const float value = roundf((values[i] - data->offset[c]) / data->scale[c]);
        pixels[i % plane * channels + c] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

#define LABEL_NAME 64

/* Writes a label as it occurs in the name of a file: several classes as 3.17.40, the first ones that fit. */
static void name_label(const struct data *data, uint32_t label, char name[LABEL_NAME])
{
    const uint32_t *const rows = data->sets[DATA_TRAIN].multi_hot;
    *name = '\0';
    if (label == DATA_MASKED)
        snprintf(name, LABEL_NAME, "masked");
    else if (!rows)
        snprintf(name, LABEL_NAME, "%u", label);
    for (uint32_t k = 0; rows && label != DATA_MASKED && k < data->classes; k++)
        if (target_has(rows, data->classes, label, k) && strlen(name) < LABEL_NAME - 12)
            text_join(name, LABEL_NAME, ".", "%u", k);
}

/* Writes the image of the sample at `index` of the step. The name of the file has the index and the label:
 * LABEL+OTHER if two samples are mixed, and "masked" for a broken sample. */
static enum status write_png(const struct data *data, const uint8_t *pixels, uint32_t index,
                             const struct target *target, const char *folder)
{
    const struct shape *shape = &data->shape;
    const bool mixed = target->share < 1;
    const struct png_shape png = {shape->width, shape->height, shape->channels};
    char path[PATH_MAX], label[LABEL_NAME], other[LABEL_NAME];
    FREED void *bytes = NULL;
    size_t size;
    name_label(data, target->label, label);
    name_label(data, target->other, other);
    if (snprintf(path, sizeof path, "%s/%06u-%s%s%s.png", folder, index, label, mixed ? "+" : "",
                 mixed ? other : "") >= PATH_MAX)
        return status_set(STATUS_USAGE,
                          "--save-batch: the name of the folder is too long; use a shorter path");
    TRY(png_encode(pixels, &png, &bytes, &size));
    return file_write_atomic(path, bytes, size);
}

/* `numbers` has room for a step (train_entries()), `values` has room for two samples, and `pixels` for
 * one. */
static enum status write_samples(const struct train *train, struct feed *feed, uint32_t count,
                                 const char *folder, uint32_t *numbers, float *values, uint8_t *pixels)
{
    const struct data *data = train->data;
    const struct draw_order order = train_order(train, 0);
    const struct mix mix = train_mix(train, 0, 0);
    const uint32_t there = train_batch(train, &order, 0, numbers);
    if (count > there)
        return status_set(STATUS_USAGE,
                          "--save-batch: the first step has only %u samples; give at most this number",
                          there);
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return status_set(STATUS_USAGE, "--save-batch: %s cannot be created: %s; name another folder", folder,
                          strerror(errno));
    TRY(feed_step(feed, 0, 0, numbers, there));
    for (uint32_t j = 0; j < count; j++) {
        feed_gather(feed, &mix, 0, numbers, there, j, values + data->sample_values, values);
        to_pixels(data, values, pixels);
        const struct target target = train_target(train, &mix, numbers, there, j);
        TRY(write_png(data, pixels, j, &target, folder));
    }
    return STATUS_OK;
}

enum status export_batch(const struct train *train, const struct resources *resources, const char *text)
{
    uint32_t count = 0;
    const char *folder = NULL;
    TRY(split(text, &count, &folder));
    const struct data *data = train->data;
    const struct shape *shape = &data->shape;
    if (data->type != DTYPE_U8 || shape->depth > 1 || (shape->channels != 1 && shape->channels != 3))
        return status_set(STATUS_USAGE, "--save-batch writes 8-bit images with one or three channels; drop "
                                        "it, or use other --data");
    CLOSED_BY(feed_close) struct feed feed = {0};
    FREED uint32_t *numbers = malloc(train_entries(train, train_share_max(train)) * sizeof *numbers);
    FREED float *values = malloc(2 * data->sample_values * sizeof *values);
    FREED uint8_t *pixels = malloc(data->sample_values);
    TRY(ALLOCATED(numbers && values && pixels, "--save-batch: out of memory"));
    TRY(feed_open(train, resources, &feed));
    TRY(write_samples(train, &feed, count, folder, numbers, values, pixels));
    status_say("%" PRIu32 " images written to %s", count, folder);
    return STATUS_OK;
}
