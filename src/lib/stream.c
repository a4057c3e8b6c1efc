/* Streams: checks the configuration, makes the plan of a rank from it, and hands on the batches of
 * data/set_stream.h, data/generated_stream.h and data/device_batches.h. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/parallel.h"
#include "data/checksum.h"
#include "data/device_batches.h"
#include "data/image.h"
#include "data/mixing.h"
#include "data/mixture.h"
#include "data/random_draws.h"
#include "data/remote.h"
#include "data/set_stream.h"
#include "data/stream_state.h"
#include "lib/sources.h"
#include "machine/device.h"
#include "machine/host.h"

#define BATCHES_MAX 1024
#define ALIGNMENT   256 /* of struct fdsl_tensor.data, in bytes */
#define AXES        5   /* at most, with that of the batch */

/* What the caller knows as a batch. There is one for each slot of the stream. */
struct fdsl_batch {
    struct fdsl_stream *owner;
    struct stream_batch batch;
    void *images; /* in the memory of the stream, like `labels` and `targets` */
    int64_t *labels, *numbers, *host_labels;
    float *targets, *host_targets; /* (count, classes) */
    uint8_t *masks; /* (count, height, width), or (count, classes) if info.multi_hot; NULL: there are none */
    int64_t extents[2 * AXES + 1]; /* the shape of the images, their strides, and the stride of labels and
                                      numbers */
    int64_t target_extents[4];     /* the shape and the strides of the targets */
    int64_t mask_extents[6];       /* and those of the masks */
    bool held;
};

/* Of the fields of a configuration, those that determine the order. */
struct order {
    uint64_t seed;
    uint32_t count, global, lanes, shuffle; /* in samples; `shuffle` 0: the order of the files; `lanes` 0:
                                               that of draw_order(), or without `shuffle` of the numbers */
    uint32_t rank, ranks;
    bool drop_last, mixes;
    uint32_t mixed_lanes, mixed_shuffle; /* of a mixture: `lanes` and `shuffle` of its data sets */
    const struct rows *rows;             /* NULL: none; otherwise numbers are those of rows in the files */
};

/* A stream that a thread opens. */
struct opening {
    struct fdsl_stream_config config;
    char *texts[6]; /* copies of its strings */
    struct background background;
    bool stopped; /* for remote_stop() */
};

struct fdsl_stream {
    struct fdsl_source *source;
    struct stream *stream;
    int device;                       /* FDSL_CPU: batches are in host memory */
    struct device_batches *on_device; /* NULL on the CPU; `stream` is its stream */
    const void *checked[4];           /* memory of the latest fdsl_stream_fill(): CUDA's addresses of device
                                         memory never become those of host memory */
    struct order order;
    struct image_output output;
    struct image_output changes; /* what CPU threads do before the device stores images as `output` says */
    struct fdsl_stream_info info;
    struct mixing mixing; /* of MixUp and CutMix */
    uint64_t transform;
    double wait_s; /* 0: calls wait as long as it takes */
    bool ended;    /* the last batch of an epoch was delivered, but not the end of the epoch */
    pid_t process;
    /* Members for a mixture: */
    struct mixture mixture;
    struct fdsl_stream *parts[MIXTURE_SOURCES]; /* owned; `stream` owns their streams */
    /* Members for a part of a mixture: */
    bool is_part;
    uint32_t copies;         /* 0: one */
    uint32_t class_limit;    /* a sample of a data set with a larger label is broken; 0: none is */
    struct opening *opening; /* of fdsl_stream_begin(); NULL when fdsl_stream_wait() has returned FDSL_OK */

    struct fdsl_batch *batches;
    int64_t *words; /* labels and numbers of all batches */
    float *targets; /* of all batches in host memory */
    uint32_t batch_count;

    pthread_mutex_t lock; /* protects `held`, `closed`, and `held` of the batches */
    uint32_t held;
    bool closed;
};

/* The defaults of a configuration. */
static const struct fdsl_stream_config plain = {.size = sizeof plain,
                                                .batch_size = 256,
                                                .world_size = 1,
                                                .shuffle = 1,
                                                .shuffle_buffer = STREAM_SHUFFLE,
                                                .lanes = STREAM_LANES,
                                                .fit = "resize",
                                                .channels = 3,
                                                .layout = "nchw",
                                                .dtype = "auto",
                                                .std = {1, 1, 1},
                                                .prefetch = 2,
                                                .held = 1,
                                                .on_error = "fail",
                                                .device = FDSL_CPU,
                                                .decoder = "auto",
                                                .device_share = -1,
                                                .rand_augment = -1,
                                                .rand_augment_ops = 2,
                                                .brightness = {1, 1},
                                                .contrast = {1, 1},
                                                .saturation = {1, 1},
                                                .color_jitter_p = 1,
                                                .blur_sigma = {0.1, 2},
                                                .blur_kernel = 23,
                                                .axes = "cthw",
                                                .crop_scale = {0.08, 1},
                                                .crop_ratio = {3.0 / 4, 4.0 / 3}};

enum fdsl_status fdsl_stream_config_init(struct fdsl_stream_config *config, size_t size)
{
    return lib_set_config(config, size, &plain, sizeof plain);
}

/* ---- The order ---- */

/* Returns the samples of this rank in a step, counted from the beginning of the step. */
static struct share share_in_step(const struct order *order, uint64_t step)
{
    const struct partition ranks = {.rank = order->rank, .ranks = order->ranks, .strong = true};
    return partition_step(&ranks, order->count, order->global, (uint32_t)step);
}

/* Returns the samples of this rank in a step, counted from the beginning of the epoch. */
static struct share share_of(const struct order *order, uint64_t step)
{
    struct share share = share_in_step(order, step);
    share.first += step * order->global;
    return share;
}

/* Implements set_stream_request.own. */
static uint32_t own_samples(const void *context, uint64_t epoch, uint64_t step)
{
    (void)epoch;
    return (uint32_t)share_in_step(context, step).count;
}

/* Implements stream_plan.list for rows. */
static uint32_t list_rows(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct order *order = context;
    const struct rows_order drawn = rows_order(order->rows, order->shuffle > 0, order->seed, epoch);
    const struct share share = share_of(order, step);
    for (uint32_t i = 0; i < share.count; i++)
        numbers[i] = rows_order_at(&drawn, (uint32_t)share.first + i);
    return (uint32_t)share.count;
}

/* Implements stream_plan.list, as the trainer does (train_batch()). If samples are mixed, and their partners
 * are not those of this rank, the partners follow: sample i of a step is mixed with sample total - 1 - i. */
static uint32_t list_step(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct order *order = context;
    struct draw_memo memo = {0};
    struct draw_order drawn =
        order->lanes ? draw_lanes(order->seed, (uint32_t)epoch, order->count, order->lanes, order->shuffle)
                     : draw_order(order->seed, (uint32_t)epoch, order->count);
    const bool drawing = order->lanes || order->shuffle;
    const struct share share = share_in_step(order, step);
    drawn.memo = &memo;
    const uint64_t begin = step * order->global, last = share.total - 1;
    const bool apart = order->mixes && last - share.first != share.first + share.count - 1;
    const uint32_t count = (uint32_t)share.count, entries = apart ? 2 * count : count;
    for (uint32_t i = 0; i < entries; i++) {
        const uint64_t in_step = i < count ? share.first + i : last - (share.first + i - count);
        const uint32_t at = (uint32_t)(begin + in_step);
        numbers[i] = drawing ? draw_order_at(&drawn, at) : at;
    }
    return entries;
}

static enum status set_order(const struct fdsl_stream_config *config, struct fdsl_stream *self)
{
    struct order *order = &self->order;
    const uint32_t count = lib_source_samples(self->source);
    /* Whether an epoch is a permutation of all samples: that of the trainer's generated samples, or of `ops`.
     */
    const bool whole = self->source->generates || self->source->rows;
    TRY(lib_check_count("world_size", config->world_size, 1, 1u << 24));
    TRY(lib_check_count("rank", config->rank, 0, config->world_size - 1));
    TRY(lib_check_count("batch_size", config->batch_size, 1, (LIB_SAMPLES_MAX - 1) / config->world_size));
    TRY(lib_check_count("lanes", config->lanes, 1, 1u << 20));
    TRY(lib_check_count("shuffle_buffer", config->shuffle_buffer, 1, INT32_MAX));
    TRY(lib_check_flag("shuffle", config->shuffle));
    TRY(lib_check_flag("drop_last", config->drop_last));
    *order = (struct order){.seed = config->seed,
                            .count = count,
                            .global = config->batch_size * config->world_size,
                            .lanes = whole ? 0 : config->lanes,
                            .shuffle = !config->shuffle ? 0
                                       : whole          ? count
                                                        : config->shuffle_buffer,
                            .rank = config->rank,
                            .ranks = config->world_size,
                            .drop_last = config->drop_last,
                            .rows = self->source->rows};
    if (self->source->mix) {
        order->mixed_lanes = order->lanes;
        order->mixed_shuffle = order->shuffle;
        order->lanes = order->shuffle = 0;
    }
    if (config->drop_last && count < order->global)
        return status_set(STATUS_USAGE,
                          "drop_last: the data set has %u samples, fewer than one step of %u (batch_size * "
                          "world_size), so an epoch would have no step; lower batch_size",
                          count, order->global);
    self->info.steps = count / order->global + (!config->drop_last && count % order->global > 0);
    self->info.samples = config->drop_last ? self->info.steps * order->global : count;
    const uint32_t first = count < order->global ? count : order->global; /* the largest step is the first */
    self->info.capacity = first / order->ranks + (first % order->ranks != 0);
    return STATUS_OK;
}

/* ---- The images ---- */

static const char *const fit_choices[] = {"resize", "crop", "random-resized-crop", "center-crop", NULL};
static const enum fit_how fits[] = {FIT_RESIZE, FIT_CROP, FIT_RANDOM_RESIZED_CROP, FIT_CENTRE};

/* Finds the shape of the images, which must suit the configuration. */
static enum status check_shape(struct set_stream_request *request)
{
    const uint32_t channels = request->channels;
    TRY(status_prefix(set_stream_find_shape(request), "path: cannot find the size of the images"));
    if (request->fit.res)
        return STATUS_OK;
    if (request->type != DTYPE_U8)
        return status_set(STATUS_USAGE,
                          "path: streams deliver images and clips of bytes, but the first one is %s",
                          dtype_names[request->type]);
    if (request->channels != 1 && request->channels != 3)
        return status_set(STATUS_USAGE, "path: the first image has %u channels, neither 1 nor 3",
                          request->channels);
    return channels == 0 || request->channels == channels
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "channels: it is %u, but the first image has %u; set channels to %u, or choose a "
                            "transform, which converts them",
                            channels, request->channels, request->channels);
}

/* Sets the shapes and strides that do not depend on the batch. */
static void set_shape(struct fdsl_stream *self, uint32_t channels, uint32_t depth, uint32_t height,
                      uint32_t width)
{
    const struct image_output *output = &self->output;
    const uint32_t planar[] = {channels, height, width, 0}, interleaved[] = {height, width, channels, 0};
    const uint32_t cthw[] = {channels, depth, height, width}, tchw[] = {depth, channels, height, width};
    const uint32_t thwc[] = {depth, height, width, channels};
    const uint32_t *const shape = depth == 1 ? (output->interleaved ? interleaved : planar)
                                             : (output->interleaved ? thwc
                                                : output->frames    ? tchw
                                                                    : cthw);
    self->info.element_bytes = (uint32_t)dtype_bytes(self->output.type);
    memcpy(self->info.shape, shape, sizeof self->info.shape);
    self->info.image_bytes = (uint64_t)channels * depth * height * width * self->info.element_bytes;
}

static bool same_range(const double *range, const double *other)
{
    return range[0] == other[0] && range[1] == other[1];
}

/* Returns whether the parts of random-resized-crop have their default range. */
static bool has_plain_crop(const struct fdsl_stream_config *config)
{
    return same_range(config->crop_scale, plain.crop_scale) &&
           same_range(config->crop_ratio, plain.crop_ratio);
}

/* Sets the parts of random-resized-crop. Refuses fields that have no effect. */
static enum status get_crop(const struct fdsl_stream_config *config, struct image_fit *fit)
{
    static const char *const names[] = {"crop_scale", "crop_ratio"};
    if (has_plain_crop(config))
        return STATUS_OK;
    if (!config->out_res || fit->how != FIT_RANDOM_RESIZED_CROP)
        return status_set(STATUS_USAGE,
                          "crop_scale and crop_ratio: they need out_res and fit \"random-resized-crop\"");
    return crop_range_set(names, config->crop_scale, config->crop_ratio, &fit->range);
}

static bool rand_augments(const struct fdsl_stream_config *config)
{
    return config->rand_augment >= 0 || config->rand_augment_policy;
}

/* Hashes the fields that determine the images and, with mixtures, the targets, which have `classes` columns.
 */
static uint64_t hash_transform(const struct fdsl_stream_config *config, int fit, uint32_t channels,
                               uint32_t classes, const struct image_output *output)
{
    const uint32_t words[] = {config->out_res, config->out_res ? (uint32_t)fit : 0, config->flip != 0,
                              channels,        (uint32_t)output->interleaved,       (uint32_t)output->type};
    uint64_t hash = checksum_seeded(words, sizeof words, 1);
    for (uint32_t c = 0; c < channels; c++) {
        const double scale[] = {config->mean[c] + 0.0, config->std[c]}; /* + 0.0: -0 is 0 */
        hash = checksum_seeded(scale, sizeof scale, hash);
    }
    if (config->rand_augment_policy)
        hash = checksum_seeded(config->rand_augment_policy, strlen(config->rand_augment_policy), hash);
    if (rand_augments(config)) {
        hash = checksum_seeded(&config->rand_augment, sizeof config->rand_augment, hash);
        hash = checksum_seeded(&config->rand_augment_ops, sizeof config->rand_augment_ops, hash);
    }
    if (output->frames)
        hash = checksum_seeded("tchw", 4, hash);
    if (config->exact_resize)
        hash = checksum_seeded("exact", 5, hash);
    if (!has_plain_crop(config)) {
        hash = checksum_seeded(config->crop_scale, sizeof config->crop_scale, hash);
        hash = checksum_seeded(config->crop_ratio, sizeof config->crop_ratio, hash);
    }
    if (config->erasing > 0)
        hash = checksum_seeded(&config->erasing, sizeof config->erasing, hash);
    if (jitter_on(&output->color)) /* a struct without gaps */
        hash = checksum_seeded(&output->color, sizeof output->color, hash);
    if (config->mixup > 0 || config->cutmix > 0) {
        const double mixing[] = {config->mixup + 0.0, config->cutmix + 0.0, classes};
        hash = checksum_seeded(mixing, sizeof mixing, hash);
    }
    return hash;
}

#define RAND_AUGMENT_OPS_MAX 16

/* Refuses changes of images that their masks cannot follow. */
static enum status check_mask_changes(const struct fdsl_stream_config *config, const struct dataset *dataset)
{
    const bool distorts = rand_augments(config) && !dataset->multi_hot;
    const char *field = distorts             ? "rand_augment"
                        : config->mixup > 0  ? "mixup"
                        : config->cutmix > 0 ? "cutmix"
                                             : NULL;
    if (field && dataset->multi_hot)
        return status_set(STATUS_USAGE,
                          "%s: it mixes images, but not their multi-hot labels; leave it at its default, and "
                          "mix batches in the training loop",
                          field);
    return field && dataset->masks
               ? status_set(STATUS_USAGE,
                            "%s: it changes images, but not their masks; leave it at its default, or choose "
                            "labels instead of masks with label of the data set",
                            field)
               : STATUS_OK;
}

static const struct jitter_names jitter_fields = {
    "color_jitter_p", {"brightness", "contrast", "saturation", "hue"}, "grayscale_p", "blur_p", "blur_kernel",
    "blur_sigma"};

/* Gets the changes of colour. Refuses fields that have no effect. */
static enum status get_jitter(const struct fdsl_stream_config *config, const struct shape *shape,
                              struct jitter *jitter)
{
    const double *const ranges[JITTER_STEPS] = {config->brightness, config->contrast, config->saturation,
                                                config->hue};
    bool adjusts = false;
    *jitter = (struct jitter){.probability = (float)config->color_jitter_p,
                              .grayscale = (float)config->grayscale_p,
                              .blur = (float)config->blur_p,
                              .kernel = config->blur_kernel,
                              .sigma_min = (float)config->blur_sigma[0],
                              .sigma_max = (float)config->blur_sigma[1]};
    for (uint32_t step = 0; step < JITTER_STEPS; step++) {
        jitter->low[step] = (float)ranges[step][0];
        jitter->high[step] = (float)ranges[step][1];
    }
    TRY(jitter_check(jitter, shape, &jitter_fields));
    for (uint32_t step = 0; step < JITTER_STEPS; step++)
        adjusts |= jitter_step_on(jitter, step);
    if (!adjusts && config->color_jitter_p != 0 && config->color_jitter_p != 1)
        return status_set(
            STATUS_USAGE,
            "color_jitter_p: it has an effect only with brightness, contrast, saturation or hue");
    jitter->probability = adjusts ? jitter->probability : 0;
    return STATUS_OK;
}

/* Sets the order of the axes of clips. Refuses what clips cannot have. */
static enum status set_axes(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                            const struct set_stream_request *request)
{
    static const char *const names[] = {"cthw", "tchw", "thwc", NULL};
    const bool clips = request->depth > 1;
    int axes;
    TRY(lib_find_name("axes", config->axes, names, &axes));
    if (!clips)
        return axes == 0 ? STATUS_OK
                         : status_set(STATUS_USAGE, "axes: it is for clips, but the samples are images; "
                                                    "leave it at its default, or set layout");
    const char *field = rand_augments(config) ? "rand_augment"
                        : config->mixup > 0   ? "mixup"
                        : config->cutmix > 0  ? "cutmix"
                                              : NULL;
    if (field)
        return status_set(
            STATUS_USAGE,
            "%s: it is for images, but the samples are clips of %u frames; leave it at its default", field,
            request->depth);
    if (self->output.interleaved)
        return status_set(STATUS_USAGE, "layout: it is for images, but the samples are clips; leave it at "
                                        "its default, and set axes to \"thwc\"");
    self->output.interleaved = axes == 2;
    self->output.frames = axes == 1;
    return STATUS_OK;
}

/* Sets the policy of RandAugment, and what timm's operations fill areas outside an image with. */
static enum status set_policy(const struct fdsl_stream_config *config, struct rand_augment *rand)
{
    const char *text = config->rand_augment_policy;
    if (!text)
        return STATUS_OK;
    if (config->rand_augment >= 0)
        return status_set(STATUS_USAGE, "rand_augment_policy: rand_augment is also set; leave that at -1");
    if (strncmp(text, "rand", 4) != 0 && strncmp(text, "pdp2026", 7) != 0)
        return status_set(STATUS_USAGE,
                          "rand_augment_policy: '%.80s' is no policy; write rand-m9-mstd0.5-inc1 or "
                          "pdp2026-m28, or set rand_augment to a number",
                          text);
    TRY(rand_augment_parse("rand_augment_policy", text, rand));
    const bool known = memcmp(config->mean, plain.mean, sizeof plain.mean) != 0 ||
                       memcmp(config->std, plain.std, sizeof plain.std) != 0;
    for (uint32_t c = 0; c < COUNT_OF(rand->policy.fill) && rand->policy.kind == AUGMENT_TIMM; c++)
        rand->policy.fill[c] = known ? (uint8_t)fmin(fmax(rint(255 * config->mean[c]), 0), 255) : 128;
    return STATUS_OK;
}

/* Sets the random changes of images. On a device, CPU threads mirror and change the images of bytes, and the
 * device stores them in their type and layout. */
static enum status set_changes(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                               struct set_stream_request *request)
{
    static const double zeros[FDSL_CHANNELS_MAX] = {0}, ones[FDSL_CHANNELS_MAX] = {1, 1, 1};
    const struct shape shape = {request->channels, request->depth, request->height, request->width};
    struct image_output *output = &self->output;
    if (!(config->rand_augment <= AUGMENT_MAGNITUDE_MAX)) /* rejects NaN, too */
        return status_set(STATUS_USAGE, "rand_augment: %g is out of range; it must be at most %d",
                          config->rand_augment, AUGMENT_MAGNITUDE_MAX);
    TRY(lib_check_count("rand_augment_ops", config->rand_augment_ops, 1, RAND_AUGMENT_OPS_MAX));
    if (!(config->erasing >= 0 && config->erasing <= 1))
        return status_set(STATUS_USAGE, "erasing: %g is out of range; it must be 0 to 1", config->erasing);
    if (config->erasing > 0 && output->type == DTYPE_U8)
        return status_set(STATUS_USAGE, "erasing: its noise is normalised; set dtype to f16, bf16 or f32");
    output->erase = (struct augment){
        .erasing = (float)config->erasing, .height = request->height, .width = request->width};
    TRY(get_jitter(config, &shape, &output->color));
    if (!rand_augments(config))
        return STATUS_OK;
    output->rand = (struct rand_augment){config->rand_augment_ops, config->rand_augment, {0}};
    TRY(set_policy(config, &output->rand));
    if (self->device < 0)
        return STATUS_OK;
    self->changes = *output;
    image_output_set(&self->changes, DTYPE_U8, false, zeros, ones);
    self->changes.color = (struct jitter){0}; /* the device changes the colours */
    request->output = &self->changes;
    output->flip = false;
    return STATUS_OK;
}

#define MIXING_ALPHA_MAX 1000.0
#define CLASSES_MAX      (1u << 24)

/* Checks the fields of MixUp and CutMix, and sets `mixes` of the order and the classes of the targets. */
static enum status set_mixing(const struct fdsl_stream_config *config, struct fdsl_stream *self)
{
    const struct fdsl_source *source = self->source;
    const struct mixing mixing = {config->mixup, config->cutmix};
    if (!(mixing.mixup >= 0 && mixing.mixup <= MIXING_ALPHA_MAX))
        return status_set(STATUS_USAGE, "mixup: %g is out of range; it must be 0 to %g", mixing.mixup,
                          MIXING_ALPHA_MAX);
    if (!(mixing.cutmix >= 0 && mixing.cutmix <= MIXING_ALPHA_MAX))
        return status_set(STATUS_USAGE, "cutmix: %g is out of range; it must be 0 to %g", mixing.cutmix,
                          MIXING_ALPHA_MAX);
    if (!mixing_on(&mixing))
        return config->classes == 0
                   ? STATUS_OK
                   : status_set(STATUS_USAGE, "classes: it has an effect only with mixup or cutmix");
    if (config->classes == 0 && source->classes < 2)
        return status_set(STATUS_USAGE, "classes: the targets of mixup and cutmix need the number of "
                                        "classes, and the data set does not name its classes; set it");
    self->info.classes = config->classes ? config->classes : source->classes;
    self->order.mixes = true;
    self->mixing = mixing;
    return lib_check_count("classes", self->info.classes, 2, CLASSES_MAX);
}

/* Gets the type of images by its name. */
static enum status find_type(const char *name, enum dtype *type)
{
    static const char *const names[] = {"auto", "u8", "f16", "f32", "bf16", NULL};
    static const enum dtype types[] = {DTYPE_U8, DTYPE_U8, DTYPE_F16, DTYPE_F32, DTYPE_BF16};
    int index;
    TRY(lib_find_name("dtype", name, names, &index));
    *type = types[index];
    return STATUS_OK;
}

static enum status set_images(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                              struct set_stream_request *request)
{
    static const char *const layouts[] = {"nchw", "nhwc", NULL};
    double mean[FDSL_CHANNELS_MAX] = {0}, deviation[FDSL_CHANNELS_MAX] = {1, 1, 1};
    enum dtype dtype;
    int fit, layout;
    TRY(lib_check_count("out_res", config->out_res, 0, FIT_RES_MAX));
    TRY(lib_find_name("fit", config->fit, fit_choices, &fit));
    TRY(lib_check_flag("flip", config->flip));
    TRY(lib_check_flag("exact_resize", config->exact_resize));
    if (config->exact_resize && !config->out_res)
        return status_set(STATUS_USAGE, "exact_resize: it needs out_res");
    TRY(lib_find_name("layout", config->layout, layouts, &layout));
    TRY(find_type(config->dtype, &dtype));
    if (config->channels != 1 && config->channels != 3 && (config->channels != 0 || config->out_res > 0))
        return status_set(STATUS_USAGE, "channels: %u is neither 1 nor 3%s", config->channels,
                          config->channels == 0 ? ", which out_res needs" : "");
    const uint32_t scaled = config->channels ? config->channels : FDSL_CHANNELS_MAX;
    TRY(lib_check_scale(config->mean, config->std, scaled, dtype == DTYPE_U8));
    memcpy(mean, config->mean, scaled * sizeof *mean);
    memcpy(deviation, config->std, scaled * sizeof *deviation);
    self->output.flip = config->flip;
    self->output.seed = config->seed;
    image_output_set(&self->output, dtype, layout == 1, mean, deviation);
    request->channels = config->channels;
    request->depth = 1;
    request->height = request->width = config->out_res;
    request->type = DTYPE_U8;
    request->output = self->device < 0 ? &self->output : NULL;
    request->fit = (struct image_fit){.how = fits[fit],
                                      .res = config->out_res,
                                      .channels = config->channels,
                                      .seed = config->seed,
                                      .unscaled = config->exact_resize};
    TRY(get_crop(config, &request->fit));
    TRY(check_shape(request));
    TRY(set_axes(config, self, request));
    TRY(set_changes(config, self, request));
    self->transform = hash_transform(config, fit, request->channels, self->info.classes, &self->output);
    set_shape(self, request->channels, request->depth, request->height, request->width);
    return STATUS_OK;
}

/* ---- Opening ---- */

/* Refuses samples without an image or a label, or with a dangling link. */
static enum status check_complete(const struct dataset *dataset)
{
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        const bool lacks_image = sample->image == sample->members;
        const enum status links = dataset_check_links(dataset, sample);
        if (links != STATUS_OK)
            return dataset_advise_mask(links);
        if (!lacks_image && sample->rule)
            continue;
        const enum status status = lacks_image
                                       ? dataset_lacks(dataset, sample, &dataset->choice.image, "image")
                                       : dataset_lacks(dataset, sample, &dataset->choice.label, "label");
        return dataset_advise_mask(dataset_at(dataset, sample, &dataset->members[sample->member], status));
    }
    return STATUS_OK;
}

/* Allocates the targets of all batches, if the stream has targets in host memory. */
static enum status allocate_targets(struct fdsl_stream *self)
{
    const uint64_t classes = self->info.classes;
    const size_t unit = ALIGNMENT / sizeof *self->targets;
    const uint64_t values = (self->info.capacity * classes + unit - 1) / unit * unit;
    if (classes == 0)
        return STATUS_OK;
    if (self->device < 0) {
        const uint64_t most = UINT64_MAX / sizeof *self->targets / self->batch_count;
        TRY(memory_check(values > most ? UINT64_MAX : self->batch_count * values * sizeof *self->targets,
                         "the targets", "lower classes, batch_size or prefetch"));
        self->targets = aligned_alloc(ALIGNMENT, self->batch_count * values * sizeof *self->targets);
        TRY(ALLOCATED(self->targets, "out of memory for the targets of %u batches", self->batch_count));
    }
    for (uint32_t i = 0; i < self->batch_count; i++) {
        struct fdsl_batch *batch = &self->batches[i];
        batch->host_targets = self->targets ? self->targets + i * values : NULL;
        batch->target_extents[1] = batch->target_extents[2] = (int64_t)classes;
        batch->target_extents[3] = 1;
    }
    return STATUS_OK;
}

/* Sets the shape and the strides of the masks of all batches, after those of the images. */
static void set_masks(struct fdsl_stream *self)
{
    const uint32_t *plane = &self->info.shape[self->output.interleaved ? 0 : 1];
    const int64_t height = plane[0], width = plane[1];
    self->info.mask_bytes = (uint64_t)height * (uint64_t)width;
    for (uint32_t i = 0; i < self->batch_count; i++) {
        const int64_t extents[] = {0, height, width, height * width, width, 1};
        memcpy(self->batches[i].mask_extents, extents, sizeof extents);
    }
}

/* Does the same for multi-hot labels, which take the place of masks. */
static void set_multi_hot(struct fdsl_stream *self, uint32_t classes)
{
    self->info.mask_bytes = classes;
    self->info.multi_hot = 1;
    for (uint32_t i = 0; i < self->batch_count; i++) {
        const int64_t extents[] = {0, classes, 0, classes, 1, 0};
        memcpy(self->batches[i].mask_extents, extents, sizeof extents);
    }
}

/* Returns the number of axes of a sample. */
static int sample_axes(const struct fdsl_stream *self)
{
    return self->source->rows ? 1 : self->info.shape[3] ? 4 : 3;
}

static enum status allocate_batches(const struct fdsl_stream_config *config, struct fdsl_stream *self)
{
    const size_t unit = ALIGNMENT / sizeof *self->words;
    const size_t capacity = (self->info.capacity + unit - 1) / unit * unit;
    self->batch_count = config->prefetch + config->held;
    self->batches = calloc(self->batch_count, sizeof *self->batches);
    self->words = aligned_alloc(ALIGNMENT, 2 * self->batch_count * capacity * sizeof *self->words);
    TRY(ALLOCATED(self->batches && self->words, "out of memory for %u batches", self->batch_count));
    for (uint32_t i = 0; i < self->batch_count; i++) {
        struct fdsl_batch *batch = &self->batches[i];
        batch->owner = self;
        batch->host_labels = self->words + 2 * i * capacity;
        batch->numbers = batch->host_labels + capacity;
        int64_t step = 1;
        for (int axis = sample_axes(self); axis > 0; axis--) {
            batch->extents[axis] = self->info.shape[axis - 1];
            batch->extents[AXES + axis] = step;
            step *= batch->extents[axis];
        }
        batch->extents[AXES] = step;
        batch->extents[2 * AXES] = 1;
    }
    return allocate_targets(self);
}

/* Checks `decoder` and `device_share`. Sets `*decoder` to the decoder that a stream on a device shall use. */
static enum status choose_decoder(const struct fdsl_stream_config *config, const struct dataset *dataset,
                                  enum decoder *decoder)
{
    const bool fitted = config->out_res > 0 && strcmp(config->fit, "center-crop") != 0;
    const double share = config->device_share;
    int named;
    TRY(lib_find_name("decoder", config->decoder, decoder_names, &named));
    if (!(share <= 1)) /* rejects NaN, too */
        return status_set(STATUS_USAGE, "device_share: %g is out of range; it must be at most 1", share);
    *decoder = (enum decoder)named;
    const bool decodes = *decoder == DECODER_HARDWARE || *decoder == DECODER_HYBRID;
    if (decodes && config->device < 0)
        return status_set(
            STATUS_USAGE,
            "decoder: '%s' works on CUDA devices, but device is FDSL_CPU; set it to 0 or another CUDA device",
            config->decoder);
    if (share > 0 && config->device < 0)
        return status_set(
            STATUS_USAGE,
            "device_share: it is %g, but device is FDSL_CPU, which decodes all samples; leave it at -1",
            share);
    if (decodes && !fitted)
        return status_set(STATUS_USAGE,
                          "decoder: '%s' needs out_res, and a fit other than center-crop; use cpu or auto",
                          config->decoder);
    if (decodes && rand_augments(config))
        return status_set(STATUS_USAGE,
                          "decoder: '%s' excludes rand_augment, which CPU threads apply; use cpu or auto",
                          config->decoder);
    bool jpeg = false;
    for (uint32_t i = 0; *decoder == DECODER_AUTO && !jpeg && i < dataset->sample_count; i++)
        jpeg = set_stream_is_jpeg(dataset, &dataset->samples[i]);
    if (*decoder == DECODER_AUTO &&
        (config->device < 0 || !fitted || share == 0 || !jpeg || rand_augments(config)))
        *decoder = DECODER_CPU;
    return STATUS_OK;
}

/* Opens a stream of a data set. */
static enum status open_set(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                            const struct stream_plan *plan, enum set_stream_error on_error)
{
    struct set_stream_request request = {.dataset = &self->source->dataset,
                                         .plan = *plan,
                                         .ahead = config->prefetch,
                                         .held = config->held,
                                         .lanes = self->order.lanes,
                                         .shuffle = self->order.shuffle,
                                         .shard_bytes = config->shard_bytes,
                                         .resident_bytes = config->resident_bytes,
                                         .device_bytes = config->resident_device_bytes,
                                         .on_error = on_error,
                                         .classes = self->is_part ? self->class_limit : self->info.classes,
                                         .mixing = {config->mixup, config->cutmix},
                                         .mix_seed = config->seed,
                                         .own = self->is_part ? NULL : own_samples,
                                         .copies = self->copies,
                                         .mask_flip = config->flip,
                                         .mask_seed = config->seed,
                                         .stopped = self->opening ? &self->opening->stopped : NULL};
    enum decoder decoder = DECODER_CPU;
    if (self->order.mixes && self->order.ranks > 1)
        request.plan.capacity *= 2; /* the partners */
    TRY(set_images(config, self, &request));
    request.stopped = NULL;
    TRY(choose_decoder(config, request.dataset, &decoder));
    TRY(lib_threads("num_threads", config->num_threads, &request.threads));
    if (on_error == SET_STREAM_FAIL)
        TRY(check_complete(request.dataset));
    TRY(set_stream_plan_shards(request.dataset, self->order.lanes, self->order.shuffle, request.threads,
                               &request.shard_bytes));
    TRY(allocate_batches(config, self));
    if (request.dataset->multi_hot)
        set_multi_hot(self, request.dataset->multi_hot_classes);
    else if (set_stream_masks(&request))
        set_masks(self);
    if (self->device < 0)
        return set_stream_open(&request, &self->stream);
    TRY(device_set_open(self->device, &request, decoder, config->device_share, &self->output, config->held,
                        &self->on_device));
    self->stream = &self->on_device->stream;
    return STATUS_OK;
}

/* Which sources ignore a field of a configuration, which must then have its default. */
enum { IMAGES_IGNORE = 1, ROWS_IGNORE = 2, BOTH_IGNORE = 3 };

static bool same_text(const char *text, const char *other)
{
    return text && strcmp(text, other) == 0;
}

/* `ignoring`: one of the above. `what` names the samples. */
static enum status check_defaults(const struct fdsl_stream_config *config, const char *what, int ignoring)
{
    const struct {
        const char *field;
        bool is_default;
        int ignored;
    } fields[] = {
        {"shuffle_buffer", config->shuffle_buffer == plain.shuffle_buffer, BOTH_IGNORE},
        {"lanes", config->lanes == plain.lanes, BOTH_IGNORE},
        {"out_res", config->out_res == plain.out_res, BOTH_IGNORE},
        {"fit", same_text(config->fit, plain.fit), BOTH_IGNORE},
        {"flip", config->flip == plain.flip, BOTH_IGNORE},
        {"exact_resize", config->exact_resize == plain.exact_resize, BOTH_IGNORE},
        {"channels", config->channels == plain.channels, BOTH_IGNORE},
        {"layout", same_text(config->layout, plain.layout), BOTH_IGNORE},
        {"dtype", same_text(config->dtype, plain.dtype), IMAGES_IGNORE},
        {"mean", memcmp(config->mean, plain.mean, sizeof plain.mean) == 0, BOTH_IGNORE},
        {"std", memcmp(config->std, plain.std, sizeof plain.std) == 0, BOTH_IGNORE},
        {"shard_bytes", config->shard_bytes == plain.shard_bytes, BOTH_IGNORE},
        {"resident_bytes", config->resident_bytes == plain.resident_bytes, BOTH_IGNORE},
        {"resident_device_bytes", config->resident_device_bytes == plain.resident_device_bytes, BOTH_IGNORE},
        {"on_error", same_text(config->on_error, plain.on_error), BOTH_IGNORE},
        {"decoder", same_text(config->decoder, plain.decoder), BOTH_IGNORE},
        {"device_share", config->device_share == plain.device_share, BOTH_IGNORE},
        {"rand_augment", config->rand_augment == plain.rand_augment, BOTH_IGNORE},
        {"rand_augment_ops", config->rand_augment_ops == plain.rand_augment_ops, BOTH_IGNORE},
        {"rand_augment_policy", config->rand_augment_policy == NULL, BOTH_IGNORE},
        {"erasing", config->erasing == plain.erasing, BOTH_IGNORE},
        {"mixup", config->mixup == plain.mixup, BOTH_IGNORE},
        {"cutmix", config->cutmix == plain.cutmix, BOTH_IGNORE},
        {"classes", config->classes == plain.classes, BOTH_IGNORE},
        {"brightness", same_range(config->brightness, plain.brightness), BOTH_IGNORE},
        {"contrast", same_range(config->contrast, plain.contrast), BOTH_IGNORE},
        {"saturation", same_range(config->saturation, plain.saturation), BOTH_IGNORE},
        {"hue", same_range(config->hue, plain.hue), BOTH_IGNORE},
        {"color_jitter_p", config->color_jitter_p == plain.color_jitter_p, BOTH_IGNORE},
        {"grayscale_p", config->grayscale_p == plain.grayscale_p, BOTH_IGNORE},
        {"blur_p", config->blur_p == plain.blur_p, BOTH_IGNORE},
        {"blur_sigma", same_range(config->blur_sigma, plain.blur_sigma), BOTH_IGNORE},
        {"blur_kernel", config->blur_kernel == plain.blur_kernel, BOTH_IGNORE},
        {"axes", same_text(config->axes, plain.axes), BOTH_IGNORE},
        {"crop_scale", same_range(config->crop_scale, plain.crop_scale), BOTH_IGNORE},
        {"crop_ratio", same_range(config->crop_ratio, plain.crop_ratio), BOTH_IGNORE},
    };
    for (size_t i = 0; i < COUNT_OF(fields); i++)
        if ((fields[i].ignored & ignoring) && !fields[i].is_default)
            return status_set(STATUS_USAGE, "%s: it has no effect on %s; leave it at its default",
                              fields[i].field, what);
    return STATUS_OK;
}

/* Opens a stream of generated images. */
static enum status open_images(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                               const struct stream_plan *plan)
{
    const struct images *images = &self->source->images;
    const struct order *order = &self->order;
    const struct images_plan with = {
        .plan = *plan,
        .order = {.seed = order->seed,
                  .steps = self->info.steps,
                  .count = order->count,
                  .global = order->global,
                  .rank = order->rank,
                  .ranks = order->ranks,
                  .shuffle = order->shuffle > 0},
        .number = self->is_part ? mixture_sample : NULL,
        .even = order->count % order->global == 0 || order->drop_last,
    };
    if (!self->is_part)
        TRY(check_defaults(config, "generated images", IMAGES_IGNORE));
    images_get_format(images, &self->output, &self->transform);
    set_shape(self, images->synth.output.channels, 1, images->synth.output.res, images->synth.output.res);
    TRY(allocate_batches(config, self));
    if (synth_multi_hot(&images->synth))
        set_multi_hot(self, images->synth.class_count);
    else if (synth_mask_bytes(&images->synth))
        set_masks(self);
    return self->is_part && self->device >= 0 /* join_on_device() opens it */
               ? STATUS_OK
               : images_stream_open(images, config, &with, &self->stream, &self->on_device);
}

/* Opens a stream of rows. */
static enum status open_rows(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                             const struct stream_plan *plan)
{
    const struct order *order = &self->order;
    struct rows_plan with = {.plan = *plan,
                             .seed = order->seed,
                             .shuffle = order->shuffle > 0,
                             .global = order->global,
                             .rank = order->rank,
                             .ranks = order->ranks};
    struct rows_format format;
    TRY(check_defaults(config, "rows", ROWS_IGNORE));
    TRY(rows_check_format(self->source->rows, config, &format));
    self->transform = format.transform;
    self->output.type = format.type;
    self->info.element_bytes = (uint32_t)dtype_bytes(format.type);
    self->info.shape[0] = format.width;
    self->info.image_bytes = (uint64_t)format.width * self->info.element_bytes;
    with.plan.list = list_rows;
    TRY(allocate_batches(config, self));
    return rows_stream_open(self->source->rows, config, &format, &with, &self->stream, &self->on_device);
}

/* ---- Mixtures ---- */

/* Refuses fields that mix the samples of a batch. */
static enum status check_mixed(const struct fdsl_stream_config *config)
{
    const char *field = config->mixup > 0     ? "mixup"
                        : config->cutmix > 0  ? "cutmix"
                        : config->classes > 0 ? "classes"
                                              : NULL;
    return field ? status_set(
                       STATUS_USAGE,
                       "%s: it has no effect on mixtures; mix the images of a batch in the training loop",
                       field)
                 : STATUS_OK;
}

/* Opens the stream of a source of a mixture. */
static enum status open_part(const struct fdsl_stream_config *config, struct fdsl_stream *whole, uint32_t k,
                             const struct stream_plan *plan, int on_error)
{
    const struct mixture_source *source = &whole->mixture.request.sources[k];
    struct fdsl_stream *self = whole->parts[k] = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    self->source = whole->source->mix->sources[k];
    self->device = whole->device;
    self->is_part = true;
    self->opening = whole->opening;
    self->copies = mixture_copies(&whole->mixture, k);
    self->order = whole->order;
    self->order.count = lib_source_samples(self->source);
    self->order.lanes = source->lanes;
    self->order.shuffle = source->shuffle;
    self->info = whole->info;
    self->class_limit = whole->source->mix->classes[k];
    const enum status status = self->source->generates
                                   ? open_images(config, self, plan)
                                   : open_set(config, self, plan, (enum set_stream_error)on_error);
    return status_prefix(status, "source %u of the mixture", k);
}

/* Checks that the sources of a mixture deliver images of one format, and takes it. */
static enum status join_formats(struct fdsl_stream *self)
{
    const struct fdsl_stream *first = self->parts[0];
    self->output = first->output;
    self->info.element_bytes = first->info.element_bytes;
    self->info.image_bytes = first->info.image_bytes;
    memcpy(self->info.shape, first->info.shape, sizeof first->info.shape);
    for (uint32_t k = 0; k < self->mixture.request.count; k++) {
        const struct fdsl_stream *part = self->parts[k];
        const uint32_t *a = first->info.shape, *b = part->info.shape;
        if (part->info.mask_bytes)
            return status_set(STATUS_USAGE,
                              "source %u of the mixture has masks or multi-hot labels, which cannot be mixed",
                              k);
        if (memcmp(a, b, sizeof first->info.shape) != 0 || part->output.type != first->output.type ||
            part->output.interleaved != first->output.interleaved ||
            part->output.frames != first->output.frames)
            return status_set(STATUS_USAGE,
                              "the images of source %u of the mixture are %s of %ux%ux%u%s, those of source "
                              "0 %s of %ux%ux%u%s; give all sources one size, layout and type",
                              k, dtype_names[part->output.type], b[0], b[1], b[2], b[3] ? " (clips)" : "",
                              dtype_names[first->output.type], a[0], a[1], a[2], a[3] ? " (clips)" : "");
        self->transform = checksum_seeded(&part->transform, sizeof part->transform, self->transform + k);
    }
    return STATUS_OK;
}

/* Joins the streams of the sources, which it takes over, as it does the plans. */
static enum status join_streams(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                                struct mixture_plans *plans)
{
    struct mixture_stream_request request = {.mixture = &self->mixture,
                                             .plans = plans,
                                             .sample_bytes = self->info.image_bytes,
                                             .held = config->held +
                                                     1}; /* the caller may take a batch, then release one */
    for (uint32_t k = 0; k < self->mixture.request.count; k++) {
        request.streams[k] = self->parts[k]->stream;
        self->parts[k]->stream = NULL;
    }
    return mixture_stream_open(&request, &self->stream);
}

/* Does the same on a device. */
static enum status join_on_device(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                                  struct mixture_plans *plans)
{
    struct device_mixed_source sources[MIXTURE_SOURCES] = {{.set = NULL}};
    const uint32_t count = self->mixture.request.count;
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < count; k++) {
        struct fdsl_stream *part = self->parts[k];
        if (status == STATUS_OK && part->source->generates)
            status = images_mixed_source(&part->source->images, config, self->info.capacity, &sources[k]);
        sources[k].set = part->on_device;
        part->stream = NULL;
        part->on_device = NULL;
    }
    if (status == STATUS_OK) {
        TRY(device_mixed_open(config->device, &self->mixture, plans, sources, self->info.image_bytes,
                              self->output.type, config->held, &self->on_device));
        self->stream = &self->on_device->stream;
        return STATUS_OK;
    }
    const struct failure failure = status_save(status);
    for (uint32_t k = 0; k < count; k++) {
        stream_close(sources[k].set ? &sources[k].set->stream : NULL);
        generator_close(sources[k].generator);
    }
    mixture_plans_close(plans);
    return status_restore(&failure);
}

static enum status open_mixture(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                                const struct stream_plan *plan, int on_error)
{
    const struct source_mixture *mix = self->source->mix;
    const struct mixture_request request = mix_request(mix, config);
    struct mixture_plans *plans = NULL;
    TRY(check_mixed(config));
    TRY(mixture_open(&request, &self->mixture));
    TRY(mixture_plans_open(&self->mixture, plan, &plans));
    enum status status = STATUS_OK;
    for (uint32_t k = 0; status == STATUS_OK && k < request.count; k++) {
        const struct stream_plan of_part = mixture_plan_of(plans, k);
        status = open_part(config, self, k, &of_part, on_error);
    }
    if (status == STATUS_OK)
        status = join_formats(self);
    if (status == STATUS_OK)
        status = allocate_batches(config, self);
    if (status == STATUS_OK)
        return (self->device < 0 ? join_streams : join_on_device)(config, self, plans);
    const struct failure failure = status_save(status);
    for (uint32_t k = 0; k < request.count; k++)
        if (self->parts[k]) {
            stream_close(self->parts[k]->stream);
            self->parts[k]->stream = NULL;
        }
    mixture_plans_close(plans);
    return status_restore(&failure);
}

static enum status open_stream(const struct fdsl_stream_config *config, struct fdsl_stream *self)
{
    static const char *const errors[] = {"fail", "mask", NULL}; /* enum set_stream_error */
    int on_error;
    TRY(lib_check_device(config->device));
    self->device = config->device;
    TRY(lib_check_seconds("wait_s", config->wait_s));
    self->wait_s = config->wait_s;
    TRY(set_order(config, self));
    TRY(lib_find_name("on_error", config->on_error, errors, &on_error));
    TRY(lib_check_flag("resident", config->resident));
    TRY(lib_check_count("prefetch", config->prefetch, 1, BATCHES_MAX));
    TRY(lib_check_count("held", config->held, 1, BATCHES_MAX));
    const struct stream_plan plan = {.steps = self->info.steps,
                                     .capacity = self->info.capacity,
                                     .list = list_step,
                                     .context = &self->order};
    if (!self->source->rows && !self->source->generates && !self->source->mix) {
        TRY(check_mask_changes(config, &self->source->dataset));
        TRY(set_mixing(config, self));
    }
    if (config->resident && (!self->source->rows || config->device < 0))
        return status_set(STATUS_USAGE, "resident: it has an effect only on rows on a device");
    if (config->resident_device_bytes && config->device < 0)
        return status_set(STATUS_USAGE, "resident_device_bytes: it has an effect only on a CUDA device");
    if (self->source->rows)
        return open_rows(config, self, &plan);
    if (self->source->mix)
        return open_mixture(config, self, &plan, on_error);
    return self->source->generates ? open_images(config, self, &plan)
                                   : open_set(config, self, &plan, (enum set_stream_error)on_error);
}

static enum status copy_config(const struct fdsl_stream_config *config, struct opening *opening)
{
    struct fdsl_stream_config *copy = &opening->config;
    const char **const fields[] = {&copy->fit,      &copy->layout,  &copy->dtype,
                                   &copy->on_error, &copy->decoder, &copy->axes};
    *copy = *config;
    for (size_t i = 0; i < COUNT_OF(fields); i++)
        TRY(lib_copy_text(fields[i], &opening->texts[i]));
    return STATUS_OK;
}

/* Waits until the opening has ended. */
static void free_opening(struct fdsl_stream *self)
{
    struct opening *opening = self->opening;
    if (!opening)
        return;
    lib_background_end(&opening->background);
    for (size_t i = 0; i < COUNT_OF(opening->texts); i++)
        free(opening->texts[i]);
    free(opening);
    self->opening = NULL;
}

/* Frees a stream that is closed. */
static void free_memory(struct fdsl_stream *self)
{
    for (uint32_t k = 0; k < MIXTURE_SOURCES; k++)
        if (self->parts[k])
            free_memory(self->parts[k]);
    mixture_close(&self->mixture);
    free(self->batches);
    free(self->words);
    free(self->targets);
    free(self);
}

/* On a device, changes no capture of a CUDA stream, and restores the current device. */
static void free_stream(struct fdsl_stream *self)
{
    free_opening(self);
    const bool on_device = self->on_device != NULL;
    const int before = on_device ? device_current() : -1, mode = on_device ? device_relax_capture() : 0;
    stream_close(self->stream);
    if (on_device) {
        device_restore_capture(mode);
        device_restore(before);
    }
    lib_source_release(self->source);
    pthread_mutex_destroy(&self->lock);
    free_memory(self);
}

/* Checks the arguments, and allocates a stream that is not open. */
static enum status new_stream(struct fdsl_source *source, const struct fdsl_stream_config *config,
                              struct fdsl_stream **stream)
{
    TRY(lib_check_given("stream", stream));
    *stream = NULL;
    TRY(lib_source_check(source));
    TRY(lib_check_struct("config", config, sizeof *config));
    TRY(lib_check_process("source", source->process));
    struct fdsl_stream *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    atomic_fetch_add(&source->users, 1);
    self->source = source;
    self->process = getpid();
    pthread_mutex_init(&self->lock, NULL);
    *stream = self;
    return STATUS_OK;
}

/* Returns the result of opening a stream. If opening failed, frees the stream, if there is one. */
static enum fdsl_status end_stream(enum status status, struct fdsl_stream **stream)
{
    const enum fdsl_status result = lib_relay(status);
    if (status != STATUS_OK && stream && *stream) {
        free_stream(*stream);
        *stream = NULL;
    }
    return result;
}

/* Opens a stream in the environment that the library needs. */
static enum status enter_and_open(const struct fdsl_stream_config *config, struct fdsl_stream *self)
{
    struct environment before;
    status_forget_warnings();
    enum status status = lib_enter(&before);
    if (status == STATUS_OK)
        status = open_stream(config, self);
    lib_leave(&before);
    return status;
}

enum fdsl_status fdsl_stream_open(struct fdsl_source *source, const struct fdsl_stream_config *config,
                                  struct fdsl_stream **stream)
{
    enum status status = new_stream(source, config, stream);
    if (status == STATUS_OK)
        status = enter_and_open(config, *stream);
    return end_stream(status, stream);
}

static enum status open_in_thread(void *context)
{
    struct fdsl_stream *self = context;
    return enter_and_open(&self->opening->config, self);
}

enum fdsl_status fdsl_stream_begin(struct fdsl_source *source, const struct fdsl_stream_config *config,
                                   struct fdsl_stream **stream)
{
    enum status status = new_stream(source, config, stream);
    if (status != STATUS_OK)
        return end_stream(status, stream);
    struct fdsl_stream *self = *stream;
    self->opening = calloc(1, sizeof *self->opening);
    status = ALLOCATED(self->opening, "out of memory");
    if (status == STATUS_OK)
        status = copy_config(config, self->opening);
    if (status == STATUS_OK)
        status = lib_background_start(&self->opening->background, open_in_thread, self);
    return end_stream(status, stream);
}

void fdsl_stream_close(struct fdsl_stream *stream)
{
    if (!stream || stream->process != getpid())
        return;
    if (stream->opening) { /* only this thread knows the stream, and nobody holds a batch */
        const struct source_mixture *mix = stream->source->mix;
        if (stream->source->dataset.remote)
            remote_stop(stream->source->dataset.remote, &stream->opening->stopped, true);
        for (uint32_t k = 0; mix && k < mix->request.count; k++)
            if (mix->sources[k]->dataset.remote)
                remote_stop(mix->sources[k]->dataset.remote, &stream->opening->stopped, true);
        free_stream(stream);
        return;
    }
    stream_cancel(stream->stream); /* the threads prepare no more batches */
    pthread_mutex_lock(&stream->lock);
    stream->closed = true;
    const bool unused = stream->held == 0;
    pthread_mutex_unlock(&stream->lock);
    if (unused)
        free_stream(stream);
}

static enum status check_opened(const struct fdsl_stream *stream)
{
    return stream->opening
               ? status_set(STATUS_USAGE,
                            "stream: it is not open; call fdsl_stream_wait() until it returns FDSL_OK")
               : STATUS_OK;
}

enum fdsl_status fdsl_stream_describe(const struct fdsl_stream *stream, struct fdsl_stream_info *info)
{
    enum status status = lib_check_given("stream", stream);
    if (status == STATUS_OK)
        status = lib_check_given("info", info);
    if (status == STATUS_OK)
        status = check_opened(stream);
    if (status == STATUS_OK)
        status = lib_check_struct("info", info, sizeof *info);
    if (status == STATUS_OK) {
        *info = stream->info;
        info->size = sizeof *info;
    }
    return lib_relay(status);
}

/* ---- Batches ---- */

static enum status check_process(const struct fdsl_stream *stream)
{
    TRY(lib_check_given("stream", stream));
    return lib_check_process("stream", stream->process);
}

static enum status check_stream(const struct fdsl_stream *stream)
{
    TRY(check_process(stream));
    return check_opened(stream);
}

enum fdsl_status fdsl_stream_wait(struct fdsl_stream *stream, double seconds)
{
    enum status status = check_process(stream);
    if (status == STATUS_OK)
        status = lib_check_seconds("seconds", seconds);
    if (status != STATUS_OK)
        return lib_relay(status);
    if (stream->opening) {
        if (!lib_background_wait(&stream->opening->background, seconds, &status))
            return FDSL_PENDING;
        if (status != STATUS_OK)
            return lib_relay(status);
        free_opening(stream);
        return FDSL_OK;
    }
    return stream->ended || stream_wait(stream->stream, seconds) ? FDSL_OK : FDSL_PENDING;
}

/* Checks that a stream has labels. */
static enum status check_labels(const struct fdsl_stream *stream, const char *name)
{
    if (stream->info.mask_bytes)
        return status_set(STATUS_USAGE, "%s: the images have %s instead of labels", name,
                          stream->info.multi_hot ? "multi-hot labels, which are the masks of a batch,"
                                                 : "masks");
    return !stream->source->rows || rows_labelled(stream->source->rows)
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%s: the rows have no labels", name);
}

/* Checks that a stream has masks. */
static enum status check_masks(const struct fdsl_stream *stream, const char *name)
{
    return stream->info.mask_bytes
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "%s: the stream has no masks; generated images of some formulas have them, such as "
                     "segrcdb, and data sets whose samples have the member mask.png or multihot.npy",
                     name);
}

/* Checks that a stream has targets. */
static enum status check_targets(const struct fdsl_stream *stream, const char *name)
{
    return stream->info.classes
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%s: the stream has no targets; set mixup or cutmix", name);
}

static enum status check_cuda_stream(const struct fdsl_stream *stream, const void *cuda_stream)
{
    return stream->device < 0 && cuda_stream
               ? status_set(STATUS_USAGE, "cuda_stream: it must be NULL on the CPU")
               : STATUS_OK;
}

/* Returns the number of the last epoch. The numbers of fresh images must fit into 64 bits. */
static uint64_t last_epoch(const struct fdsl_stream *stream)
{
    const struct images *images = &stream->source->images;
    const uint64_t most = stream->source->generates && images->fresh > 0
                              ? (UINT64_MAX - images->count) / images->fresh
                              : UINT64_MAX;
    return most < STREAM_EPOCHS - 1 ? most : STREAM_EPOCHS - 1;
}

/* Begins a call that delivers a batch. FDSL_PENDING if there is none after `wait_s`. FDSL_END if the epoch
 * has ended. Replays of a captured call cannot report this, so a captured call does not report it either. */
static enum fdsl_status begin_batch(struct fdsl_stream *stream, void *cuda_stream)
{
    status_forget_warnings();
    enum status status = check_stream(stream);
    if (status == STATUS_OK)
        status = check_cuda_stream(stream, cuda_stream);
    if (status != STATUS_OK)
        return lib_relay(status);
    if (!stream->ended && stream->stream->at.epoch > last_epoch(stream))
        return lib_relay(status_set(STATUS_USAGE,
                                    "epoch: the last one, %llu, has ended; continue with fdsl_stream_seek()",
                                    (unsigned long long)last_epoch(stream)));
    if (!stream->ended)
        return stream->wait_s == 0 || stream_wait(stream->stream, stream->wait_s) ? FDSL_OK : FDSL_PENDING;
    const bool captured = stream->on_device && device_capturing(stream->device, cuda_stream);
    stream->ended = false;
    return captured ? FDSL_OK : FDSL_END;
}

/* Makes the device of a stream or a batch current. Returns the device for device_restore(): -1 if it was
 * current already. */
static int enter_device(const struct fdsl_stream *stream)
{
    const int before = stream->on_device ? device_current() : -1;
    if (before < 0 || before == stream->device)
        return -1;
    device_restore(stream->device);
    return before;
}

/* Copies labels; STREAM_MASKED is -1. */
static void copy_labels(const struct stream_batch *batch, int64_t *labels)
{
    for (uint32_t i = 0; i < batch->samples.count; i++)
        labels[i] = batch->samples.labels[i];
}

/* Stores the weights of all classes of a batch in host memory. */
static void store_targets(const struct fdsl_stream *stream, const struct stream_batch *batch, float *targets)
{
    for (uint32_t i = 0; i < batch->samples.count; i++) {
        const struct target target = {(uint32_t)batch->labels[i], (uint32_t)batch->partners[i], batch->share};
        for (uint32_t k = 0; k < stream->info.classes; k++)
            *targets++ = mix_weight(&target, k);
    }
}

/* Takes the next batch, and sets the addresses of its parts. */
static enum status take(struct fdsl_stream *stream, void *cuda_stream, struct stream_batch *batch)
{
    struct device_parts parts = {NULL, NULL, NULL, NULL};
    if (stream->on_device)
        TRY(device_batches_next(stream->on_device, cuda_stream, batch, &parts));
    else
        TRY(stream_next(stream->stream, batch));
    struct fdsl_batch *self = &stream->batches[batch->slot];
    self->images = stream->on_device ? parts.images : (void *)(uintptr_t)batch->samples.values;
    self->labels = stream->on_device ? parts.labels : self->host_labels;
    self->targets = stream->on_device ? parts.targets : self->host_targets;
    self->masks = stream->on_device ? parts.masks : (uint8_t *)(uintptr_t)batch->masks;
    if (!stream->on_device)
        copy_labels(batch, self->labels);
    if (self->host_targets)
        store_targets(stream, batch, self->host_targets);
    return STATUS_OK;
}

enum fdsl_status fdsl_stream_next(struct fdsl_stream *stream, void *cuda_stream, struct fdsl_batch **batch)
{
    struct stream_batch taken;
    if (!batch)
        return lib_invalid("batch: it is NULL");
    *batch = NULL;
    const enum fdsl_status result = begin_batch(stream, cuda_stream);
    if (result != FDSL_OK)
        return result;
    const int before = enter_device(stream);
    const enum status status = take(stream, cuda_stream, &taken);
    device_restore(before);
    if (status != STATUS_OK)
        return lib_relay(status);
    struct fdsl_batch *self = &stream->batches[taken.slot];
    stream->ended = taken.last;
    self->batch = taken;
    for (uint32_t i = 0; taken.numbers && i < taken.samples.count; i++)
        self->numbers[i] = taken.numbers[i];
    self->extents[0] = self->target_extents[0] = self->mask_extents[0] = taken.samples.count;
    pthread_mutex_lock(&stream->lock);
    self->held = true;
    stream->held++;
    pthread_mutex_unlock(&stream->lock);
    *batch = self;
    return FDSL_OK;
}

#define DEVICE_ALIGNMENT 16

/* Checks memory of the caller on the device. Asking CUDA takes time, so memory that was checked last time is
 * not checked again. */
static enum status check_memory(struct fdsl_stream *stream, int which, const char *name, const void *memory,
                                size_t alignment)
{
    if (memory == stream->checked[which])
        return STATUS_OK;
    if ((uintptr_t)memory % alignment != 0)
        return status_set(STATUS_USAGE, "%s: %p is not aligned to %zu bytes", name, memory, alignment);
    TRY(device_check_pointer(stream->device, name, memory));
    stream->checked[which] = memory;
    return STATUS_OK;
}

static enum status fill_on_device(struct fdsl_stream *stream, const struct device_parts *to,
                                  void *cuda_stream, struct stream_batch *batch)
{
    TRY(check_memory(stream, 0, "images", to->images, DEVICE_ALIGNMENT));
    if (to->labels)
        TRY(check_memory(stream, 1, "labels", to->labels, sizeof *to->labels));
    if (to->targets)
        TRY(check_memory(stream, 2, "targets", to->targets, sizeof *to->targets));
    if (to->masks)
        TRY(check_memory(stream, 3, "masks", to->masks, DEVICE_ALIGNMENT));
    return device_batches_fill(stream->on_device, to, cuda_stream, batch);
}

static enum status fill_on_host(struct fdsl_stream *stream, const struct device_parts *to,
                                struct stream_batch *batch)
{
    TRY(stream_next(stream->stream, batch));
    if (batch->samples.count > 0)
        memcpy(to->images, batch->samples.values, batch->samples.bytes);
    if (to->labels)
        copy_labels(batch, to->labels);
    if (to->targets)
        store_targets(stream, batch, to->targets);
    if (to->masks && batch->samples.count > 0)
        memcpy(to->masks, batch->masks, batch->samples.count * stream->info.mask_bytes);
    return stream_release(stream->stream, batch, NULL);
}

/* Checks that a stream has the parts that a caller wants. */
static enum status check_parts(const struct fdsl_stream *stream, const struct device_parts *to)
{
    if (to->labels)
        TRY(check_labels(stream, "labels"));
    if (to->targets)
        TRY(check_targets(stream, "targets"));
    return to->masks ? check_masks(stream, "masks") : STATUS_OK;
}

/* Stores the next batch in memory of the caller. */
static enum fdsl_status fill(struct fdsl_stream *stream, const struct device_parts *to, uint32_t *count,
                             void *cuda_stream)
{
    struct stream_batch batch;
    if (!to->images || !count)
        return lib_invalid(to->images ? "count: it is NULL" : "images: it is NULL");
    *count = 0;
    if (stream && check_parts(stream, to) != STATUS_OK)
        return lib_relay(STATUS_USAGE);
    const enum fdsl_status result = begin_batch(stream, cuda_stream);
    if (result != FDSL_OK)
        return result;
    const int before = enter_device(stream);
    const enum status status = stream->on_device ? fill_on_device(stream, to, cuda_stream, &batch)
                                                 : fill_on_host(stream, to, &batch);
    device_restore(before);
    if (status == STATUS_OK) {
        stream->ended = batch.last;
        *count = batch.samples.count;
    } else
        memset(stream->checked, 0, sizeof stream->checked); /* a caller in Python has not kept them */
    return lib_relay(status);
}

enum fdsl_status fdsl_stream_fill(struct fdsl_stream *stream, void *images, int64_t *labels, uint32_t *count,
                                  void *cuda_stream)
{
    const struct device_parts to = {images, labels, NULL, NULL};
    return fill(stream, &to, count, cuda_stream);
}

enum fdsl_status fdsl_stream_fill_targets(struct fdsl_stream *stream, void *images, int64_t *labels,
                                          float *targets, uint32_t *count, void *cuda_stream)
{
    const struct device_parts to = {images, labels, targets, NULL};
    return fill(stream, &to, count, cuda_stream);
}

enum fdsl_status fdsl_stream_fill_masks(struct fdsl_stream *stream, void *images, uint8_t *masks,
                                        uint32_t *count, void *cuda_stream)
{
    const struct device_parts to = {images, NULL, NULL, masks};
    return masks ? fill(stream, &to, count, cuda_stream) : lib_invalid("masks: it is NULL");
}

static enum status check_batch(const struct fdsl_batch *batch)
{
    TRY(lib_check_given("batch", batch));
    TRY(lib_check_process("batch", batch->owner->process));
    pthread_mutex_lock(&batch->owner->lock);
    const bool held = batch->held;
    pthread_mutex_unlock(&batch->owner->lock);
    return held ? STATUS_OK : status_set(STATUS_USAGE, "batch: it was released before");
}

enum fdsl_status fdsl_batch_describe(const struct fdsl_batch *batch, struct fdsl_batch_info *info)
{
    enum status status = check_batch(batch);
    if (status == STATUS_OK)
        status = lib_check_struct("info", info, sizeof *info);
    if (status == STATUS_OK)
        *info = (struct fdsl_batch_info){.size = sizeof *info,
                                         .count = batch->batch.samples.count,
                                         .masked = batch->batch.masked,
                                         .epoch = batch->batch.epoch,
                                         .step = batch->batch.step,
                                         .last = batch->batch.last};
    return lib_relay(status);
}

/* Lists the numbers of a batch of rows on a device, which its stream does not list: few callers need them. */
static enum status list_numbers(struct fdsl_batch *batch)
{
    const struct order *order = &batch->owner->order;
    TRY(rows_list(batch->owner->source->rows));
    const struct rows_order drawn =
        rows_order(order->rows, order->shuffle > 0, order->seed, batch->batch.epoch);
    const struct share share = share_of(order, batch->batch.step);
    pthread_mutex_lock(&batch->owner->lock);
    for (uint32_t i = 0; i < share.count; i++)
        batch->numbers[i] = rows_order_at(&drawn, (uint32_t)share.first + i);
    pthread_mutex_unlock(&batch->owner->lock);
    return STATUS_OK;
}

enum fdsl_status fdsl_batch_tensor(struct fdsl_batch *batch, enum fdsl_field field,
                                   struct fdsl_tensor *tensor)
{
    enum status status = check_batch(batch);
    if (status == STATUS_OK)
        status = lib_check_given("tensor", tensor);
    if (status != STATUS_OK)
        return lib_relay(status);
    const struct fdsl_stream *stream = batch->owner;
    const enum fdsl_field samples = stream->source->rows ? FDSL_ROWS : FDSL_IMAGES;
    if (field != samples && field != FDSL_LABELS && field != FDSL_NUMBERS && field != FDSL_TARGETS &&
        field != FDSL_MASKS)
        status = status_set(STATUS_USAGE, "field: %d is not a part of a batch", (int)field);
    if (status == STATUS_OK && field == FDSL_LABELS)
        status = check_labels(stream, "field");
    if (status == STATUS_OK && field == FDSL_TARGETS)
        status = check_targets(stream, "field");
    if (status == STATUS_OK && field == FDSL_MASKS)
        status = check_masks(stream, "field");
    if (status != STATUS_OK)
        return lib_relay(status);
    const bool on_device = stream->on_device && field != FDSL_NUMBERS;
    if (field == FDSL_NUMBERS && !batch->batch.numbers)
        status = list_numbers(batch);
    if (status != STATUS_OK)
        return lib_relay(status);
    *tensor = (struct fdsl_tensor){.data = field == FDSL_LABELS ? batch->labels : batch->numbers,
                                   .device_type = on_device ? 2 : 1,
                                   .device_id = on_device ? stream->device : 0,
                                   .ndim = 1,
                                   .bits = 64,
                                   .lanes = 1,
                                   .shape = batch->extents,
                                   .strides = batch->extents + 2 * AXES};
    if (field == FDSL_TARGETS) {
        tensor->data = batch->targets;
        tensor->ndim = 2;
        tensor->code = 2;
        tensor->bits = 32;
        tensor->shape = batch->target_extents;
        tensor->strides = batch->target_extents + 2;
    }
    if (field == FDSL_MASKS) {
        tensor->data = batch->masks;
        tensor->ndim = stream->info.multi_hot ? 2 : 3;
        tensor->code = 1;
        tensor->bits = 8;
        tensor->shape = batch->mask_extents;
        tensor->strides = batch->mask_extents + 3;
    }
    if (field != samples)
        return FDSL_OK;
    const enum dtype type = stream->output.type;
    tensor->data = batch->images;
    tensor->ndim = 1 + sample_axes(stream);
    tensor->code = type == DTYPE_U8 ? 1 : type == DTYPE_BF16 ? 4 : 2;
    tensor->bits = (uint8_t)(8 * dtype_bytes(type));
    tensor->strides = batch->extents + AXES;
    return FDSL_OK;
}

/* Returns a batch to its stream. */
static enum status release(struct fdsl_batch *batch, void *cuda_stream)
{
    struct fdsl_stream *stream = batch->owner;
    if (!stream->on_device)
        return stream_release(stream->stream, &batch->batch, NULL);
    const int before = enter_device(stream);
    const enum status status = device_batches_release(stream->on_device, &batch->batch, cuda_stream);
    device_restore(before);
    return status;
}

enum fdsl_status fdsl_batch_release(struct fdsl_batch *batch, void *cuda_stream)
{
    if (!batch)
        return FDSL_OK;
    struct fdsl_stream *stream = batch->owner;
    enum status status = lib_check_process("batch", stream->process);
    if (status == STATUS_OK)
        status = check_cuda_stream(stream, cuda_stream);
    if (status != STATUS_OK)
        return lib_relay(status);
    pthread_mutex_lock(&stream->lock);
    const bool held = batch->held;
    if (held) /* with the lock, so that no other thread frees the stream */
        status = release(batch, cuda_stream);
    if (held && status == STATUS_OK) {
        batch->held = false;
        stream->held--;
    }
    const bool unused = held && stream->closed && stream->held == 0;
    pthread_mutex_unlock(&stream->lock);
    if (unused)
        free_stream(stream);
    return lib_relay(held ? status : status_set(STATUS_USAGE, "batch: it was released before"));
}

/* ---- The position ---- */

static enum status seek(struct fdsl_stream *stream, uint64_t epoch, uint64_t step)
{
    if (epoch > last_epoch(stream))
        return status_set(STATUS_USAGE, "epoch: %llu is out of range; the last epoch is %llu",
                          (unsigned long long)epoch, (unsigned long long)last_epoch(stream));
    if (step >= stream->info.steps)
        return status_set(STATUS_USAGE, "step: %llu is out of range; an epoch has %llu steps",
                          (unsigned long long)step, (unsigned long long)stream->info.steps);
    const int before = enter_device(stream);
    const enum status status = stream_seek(stream->stream, (struct stream_position){epoch, step});
    device_restore(before);
    if (status == STATUS_OK)
        stream->ended = false;
    return status;
}

enum fdsl_status fdsl_stream_seek(struct fdsl_stream *stream, uint64_t epoch, uint64_t step)
{
    const enum status status = check_stream(stream);
    return lib_relay(status == STATUS_OK ? seek(stream, epoch, step) : status);
}

/* Finds the position of a stream that replays of a captured call may have moved. */
static enum status locate(const struct fdsl_stream *stream)
{
    const int before = enter_device(stream);
    const enum status status = device_batches_locate(stream->on_device);
    device_restore(before);
    return status;
}

/* Sets the state of a stream at its position. */
static enum status save(const struct fdsl_stream *stream, struct stream_state *state)
{
    if (stream->on_device)
        TRY(locate(stream));
    const struct order *order = &stream->order;
    *state = (struct stream_state){.epoch = stream->stream->at.epoch,
                                   .sample = stream->stream->at.step * order->global,
                                   .samples = order->count,
                                   .seed = order->seed,
                                   .data = stream->source->hash,
                                   .transform = stream->transform,
                                   .global_batch = order->global,
                                   .lanes = order->shuffle ? order->lanes : 0,
                                   .shuffle_buffer = order->shuffle,
                                   .drop_last = order->drop_last};
    if (stream->source->mix) {
        state->lanes = order->mixed_shuffle ? order->mixed_lanes : 0;
        state->shuffle_buffer = order->mixed_shuffle;
    }
    return STATUS_OK;
}

/* Convert between the state of the interface and that of the files. */
#define STATE(from)                                                                                     \
    .epoch = (from)->epoch, .sample = (from)->sample, .samples = (from)->samples, .seed = (from)->seed, \
    .data = (from)->data, .transform = (from)->transform, .global_batch = (from)->global_batch,         \
    .lanes = (from)->lanes, .shuffle_buffer = (from)->shuffle_buffer, .drop_last = (from)->drop_last
static struct fdsl_state given_state(const struct stream_state *state)
{
    return (struct fdsl_state){.size = sizeof(struct fdsl_state), STATE(state)};
}

static struct stream_state taken_state(const struct fdsl_state *state)
{
    return (struct stream_state){STATE(state)};
}

enum fdsl_status fdsl_stream_save(const struct fdsl_stream *stream, struct fdsl_state *state)
{
    struct stream_state own;
    enum status status = check_stream(stream);
    if (status == STATUS_OK)
        status = lib_check_struct("state", state, sizeof *state);
    if (status == STATUS_OK)
        status = save(stream, &own);
    if (status == STATUS_OK)
        *state = given_state(&own);
    return lib_relay(status);
}

static enum status load(struct fdsl_stream *stream, const struct fdsl_state *given)
{
    const struct stream_state state = taken_state(given);
    struct stream_state own;
    TRY(save(stream, &own));
    TRY(stream_state_check("state", &state, &own, stream->info.steps,
                           stream->source->rows
                               ? "dtype and align"
                               : "out_res, fit, flip, exact_resize, rand_augment, changes of colour, "
                                 "erasing, mixup, cutmix, classes, channels, layout, dtype, mean and std"));
    return seek(stream, state.epoch, state.sample / own.global_batch);
}

enum fdsl_status fdsl_stream_load(struct fdsl_stream *stream, const struct fdsl_state *state)
{
    enum status status = check_stream(stream);
    if (status == STATUS_OK)
        status = lib_check_struct("state", state, sizeof *state);
    return lib_relay(status == STATUS_OK ? load(stream, state) : status);
}

enum fdsl_status fdsl_state_write(const struct fdsl_state *state, const char *path)
{
    enum status status = lib_check_struct("state", state, sizeof *state);
    if (status == STATUS_OK)
        status = lib_check_given("path", path);
    if (status != STATUS_OK)
        return lib_relay(status);
    const struct stream_state own = taken_state(state);
    return lib_relay(stream_state_write(path, &own));
}

enum fdsl_status fdsl_state_read(const char *path, struct fdsl_state *state)
{
    struct stream_state own;
    enum status status = lib_check_struct("state", state, sizeof *state);
    if (status == STATUS_OK)
        status = lib_check_given("path", path);
    if (status == STATUS_OK)
        status = stream_state_read(path, &own);
    if (status == STATUS_OK)
        *state = given_state(&own);
    return lib_relay(status);
}

enum fdsl_status fdsl_stream_stats(struct fdsl_stream *stream, struct fdsl_stream_stats *stats)
{
    enum status status = check_stream(stream);
    if (status == STATUS_OK)
        status = lib_check_struct("stats", stats, sizeof *stats);
    if (status != STATUS_OK)
        return lib_relay(status);
    struct stream_stats own;
    stream_stats(stream->stream, &own);
    *stats = (struct fdsl_stream_stats){.size = sizeof *stats,
                                        .batches = own.batches,
                                        .samples = own.samples,
                                        .masked = own.masked,
                                        .bytes = own.bytes,
                                        .wait_s = own.wait_s,
                                        .read_s = own.read_s,
                                        .decode_s = own.decode_s,
                                        .ready = own.ready,
                                        .memory_bytes = own.memory_bytes,
                                        .shard_bytes = own.shard_bytes,
                                        .resident_samples = own.resident,
                                        .resident_device_samples = own.resident_device};
    return FDSL_OK;
}

void fdsl_stream_cancel(struct fdsl_stream *stream)
{
    if (stream && stream->process == getpid() && !stream->opening)
        stream_cancel(stream->stream);
}

/* ---- For trainers ---- */

enum status lib_stream_facts(const struct fdsl_stream *stream, struct lib_stream_facts *facts)
{
    TRY(check_stream(stream));
    const struct fdsl_stream_info *info = &stream->info;
    const struct image_output *output = &stream->output;
    if (stream->source->rows || (info->mask_bytes && !info->multi_hot))
        return status_set(STATUS_USAGE, "stream: a trainer needs images with labels");
    if (output->interleaved || output->frames)
        return status_set(STATUS_USAGE,
                          "stream: a trainer needs channels first: layout \"nchw\", axes \"cthw\"");
    const struct order *order = &stream->order;
    const bool mix = stream->source->mix;
    const uint64_t decides[] = {order->seed, stream->source->hash, stream->transform,
                                mix ? order->mixed_shuffle : order->shuffle,
                                mix ? order->mixed_lanes : order->lanes};
    *facts = (struct lib_stream_facts){
        .shape = {info->shape[0], info->shape[3] ? info->shape[1] : 1, info->shape[info->shape[3] ? 2 : 1],
                  info->shape[info->shape[3] ? 3 : 2]},
        .type = output->type,
        .samples = stream->order.count,
        .batch = stream->order.global / stream->order.ranks,
        .rank = stream->order.rank,
        .ranks = stream->order.ranks,
        .classes = info->multi_hot             ? (uint32_t)info->mask_bytes
                   : info->classes             ? info->classes
                   : stream->source->generates ? images_classes(&stream->source->images)
                                               : stream->source->classes,
        .multi_hot = info->multi_hot,
        .mixed = stream->order.mixes,
        .drop_last = stream->order.drop_last,
        .device = stream->device,
        .identity = checksum_seeded(decides, sizeof decides, 1)};
    return STATUS_OK;
}

void lib_batch_parts(const struct fdsl_batch *batch, struct lib_batch_parts *parts)
{
    *parts = (struct lib_batch_parts){.images = batch->images,
                                      .labels = batch->labels,
                                      .rows = batch->masks,
                                      .count = batch->batch.samples.count,
                                      .share = 1,
                                      .epoch = batch->batch.epoch,
                                      .step = batch->batch.step};
    const struct fdsl_stream *stream = batch->owner;
    const uint32_t *extents = stream->info.shape;
    const struct shape shape = {extents[0], 1, extents[1], extents[2]};
    if (stream->order.mixes) /* a device mixes its batches itself, with the same draws */
        parts->share = mix_draw(&stream->mixing, stream->order.seed, (uint32_t)parts->epoch,
                                (uint32_t)parts->step, &shape)
                           .share;
}
