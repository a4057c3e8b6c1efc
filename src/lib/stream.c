/* Data sets and streams: checks the configuration, makes the plan of a rank from it, and hands the batches of
 * data/set_stream.h on. */
#include <errno.h>
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
#include "data/dataset.h"
#include "data/image_output.h"
#include "data/random_draws.h"
#include "data/remote.h"
#include "data/set_stream.h"
#include "lib/call.h"

#define SAMPLES_MAX (UINT32_C(1) << 31) /* of a global batch and of a data set: the limit of draw_lanes() */
#define BATCHES_MAX 1024
#define ALIGNMENT   256 /* of struct fdsl_tensor.data, in bytes */

/* ---- Sources ---- */

struct fdsl_source {
    struct dataset dataset;
    struct remote_options remote;
    char *path, *cache_dir; /* copies; `dataset` refers to them */
    const char *const *class_names;
    uint32_t classes;
    uint64_t hash;
    atomic_uint users; /* the caller, and each stream */
    pid_t process;
    struct remote_cancel cancel;
    struct opening *opening; /* of fdsl_source_begin(); NULL when fdsl_source_wait() has returned FDSL_OK */
};

/* A source that a thread opens. */
struct opening {
    struct fdsl_source_config config;
    char *texts[5]; /* copies of its strings */
    pthread_t thread;
    bool joined; /* the thread has ended */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done;              /* everything below is set; protected by `lock` */
    struct failure failure; /* STATUS_OK: the source is open */
    char warnings[4096];
};

const char *fdsl_warnings(void)
{
    return status_warnings();
}

/* Checks that a handle belongs to this process. */
static enum status check_process(const char *name, pid_t process)
{
    return process == getpid()
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "%s: it was opened before fork(); open another one in this process", name);
}

enum fdsl_status fdsl_source_config_init(struct fdsl_source_config *config, size_t size)
{
    if (!config)
        return lib_invalid("config: it is NULL");
    const enum status status = lib_check_size("config", size, sizeof *config);
    if (status == STATUS_OK)
        *config = (struct fdsl_source_config){.size = size, .kind = "auto"};
    return lib_relay(status);
}

static void join_opening(struct opening *opening)
{
    if (!opening->joined)
        pthread_join(opening->thread, NULL);
    opening->joined = true;
}

/* Ignores NULL. */
static void free_opening(struct opening *opening)
{
    if (!opening)
        return;
    join_opening(opening);
    pthread_mutex_destroy(&opening->lock);
    pthread_cond_destroy(&opening->changed);
    for (size_t i = 0; i < COUNT_OF(opening->texts); i++)
        free(opening->texts[i]);
    free(opening);
}

static void release_source(struct fdsl_source *source)
{
    if (atomic_fetch_sub(&source->users, 1) > 1)
        return;
    atomic_store(&source->cancel.set, true);
    free_opening(source->opening);
    dataset_close(&source->dataset);
    free(source->path);
    free(source->cache_dir);
    free(source);
}

void fdsl_source_close(struct fdsl_source *source)
{
    if (source && source->process == getpid())
        release_source(source);
}

static enum status check_kind(const struct fdsl_source *source, const char *kind)
{
    static const char *const kinds[] = {"auto", "shards", "folder", NULL};
    int index;
    TRY(lib_find_name("kind", kind, kinds, &index));
    if (index == 0 || source->dataset.shards == (index == 1))
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      index == 1 ? "path: %s has no shards, but class folders or single files"
                                 : "path: %s has shards, but no class folders",
                      source->dataset.path);
}

/* Combines the hashes of all samples, in their order, and which of their members are the image and the label.
 */
static uint64_t hash_samples(const struct dataset *dataset)
{
    uint64_t hash = dataset->sample_count;
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        const char *field = sample->rule ? sample->rule->field : "";
        const uint64_t words[] = {sample->key_hash,
                                  sample->edges,
                                  sample->bytes,
                                  (uint64_t)(int64_t)sample->class_folder,
                                  sample->image,
                                  sample->label,
                                  checksum_seeded(field, strlen(field), sample->rule != NULL)};
        hash = checksum_seeded(words, sizeof words, hash);
    }
    return hash;
}

static enum status open_source(const struct fdsl_source_config *config, struct fdsl_source *self)
{
    struct members members;
#ifndef HAVE_XXHASH
    return status_set(STATUS_UNAVAILABLE,
                      "path: this libfdsl was built without xxHash, which data sets need");
#endif
    if (!config->path || !*config->path)
        return status_set(STATUS_USAGE, "path: it is %s", config->path ? "empty" : "NULL");
    if (config->cache_bytes && !config->cache_dir)
        return status_set(STATUS_USAGE, "cache_bytes: it needs cache_dir");
    self->path = strdup(config->path);
    self->cache_dir = config->cache_dir ? strdup(config->cache_dir) : NULL;
    TRY(ALLOCATED(self->path && (self->cache_dir || !config->cache_dir), "out of memory"));
    self->remote = (struct remote_options){.option = "path",
                                           .cache_dir = self->cache_dir,
                                           .cache_bytes = config->cache_bytes,
                                           .cancel = &self->cancel,
                                           .prepare = late_open};
    TRY(members_parse(config->image, config->label, NULL, &members));
    TRY(dataset_find(self->path, false, false, &members, &self->remote, &self->dataset));
    TRY(check_kind(self, config->kind));
    self->dataset.incomplete =
        true; /* fdsl_stream_open() decides about samples without an image or a label */
    TRY(dataset_check(self->path, &self->dataset));
    if (self->dataset.sample_count >= SAMPLES_MAX)
        return status_set(STATUS_TOO_LARGE, "path: %s has more than %u samples", self->dataset.path,
                          SAMPLES_MAX - 1);
    self->class_names = dataset_class_names(&self->dataset, &self->classes);
    self->hash = hash_samples(&self->dataset);
    return STATUS_OK;
}

/* Opens a source in the environment that the library needs. */
static enum status enter_and_open(const struct fdsl_source_config *config, struct fdsl_source *self)
{
    struct environment before;
    status_forget_warnings();
    enum status status = lib_enter(&before);
    if (status == STATUS_OK)
        status = open_source(config, self);
    lib_leave(&before);
    return status;
}

/* Checks the arguments, and allocates a source that is not open. */
static enum status new_source(const struct fdsl_source_config *config, struct fdsl_source **source)
{
    if (!source)
        return status_set(STATUS_USAGE, "source: it is NULL");
    *source = NULL;
    if (!config)
        return status_set(STATUS_USAGE, "config: it is NULL");
    TRY(lib_check_size("config", config->size, sizeof *config));
    struct fdsl_source *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    self->dataset.directory = -1;
    self->users = 1;
    self->process = getpid();
    *source = self;
    return STATUS_OK;
}

enum fdsl_status fdsl_source_open(const struct fdsl_source_config *config, struct fdsl_source **source)
{
    enum status status = new_source(config, source);
    if (status != STATUS_OK)
        return lib_relay(status);
    struct fdsl_source *self = *source;
    *source = NULL;
    status = enter_and_open(config, self);
    if (status == STATUS_OK) {
        *source = self;
        return FDSL_OK;
    }
    const enum fdsl_status result = lib_relay(status);
    release_source(self);
    return result;
}

/* ---- Opening in a thread ---- */

static void *open_in_thread(void *context)
{
    struct fdsl_source *self = context;
    struct opening *opening = self->opening;
    const enum status status = enter_and_open(&opening->config, self);
    const struct failure failure = status_save(status);
    pthread_mutex_lock(&opening->lock);
    opening->failure = failure;
    snprintf(opening->warnings, sizeof opening->warnings, "%s", status_warnings());
    opening->done = true;
    pthread_cond_signal(&opening->changed);
    pthread_mutex_unlock(&opening->lock);
    return NULL;
}

static enum status copy_config(const struct fdsl_source_config *config, struct opening *opening)
{
    struct fdsl_source_config *copy = &opening->config;
    const char **const fields[] = {&copy->path, &copy->kind, &copy->image, &copy->label, &copy->cache_dir};
    *copy = *config;
    for (size_t i = 0; i < COUNT_OF(fields); i++)
        if (*fields[i]) {
            *fields[i] = opening->texts[i] = strdup(*fields[i]);
            TRY(ALLOCATED(opening->texts[i], "out of memory"));
        }
    return STATUS_OK;
}

static enum status begin_opening(const struct fdsl_source_config *config, struct fdsl_source *self)
{
    struct opening *opening = self->opening = calloc(1, sizeof *opening);
    TRY(ALLOCATED(opening, "out of memory"));
    pthread_condattr_t attributes;
    opening->joined = true; /* there is no thread yet */
    pthread_mutex_init(&opening->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&opening->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    TRY(copy_config(config, opening));
    const int error = parallel_start(&opening->thread, open_in_thread, self);
    opening->joined = error != 0;
    return error == 0 ? STATUS_OK
                      : status_set(STATUS_EXHAUSTED, "cannot start a thread: %s", strerror(error));
}

enum fdsl_status fdsl_source_begin(const struct fdsl_source_config *config, struct fdsl_source **source)
{
    enum status status = new_source(config, source);
    if (status != STATUS_OK)
        return lib_relay(status);
    status = begin_opening(config, *source);
    const enum fdsl_status result = lib_relay(status);
    if (status != STATUS_OK) {
        release_source(*source);
        *source = NULL;
    }
    return result;
}

/* Issues warnings, one per line, as warnings of the calling thread's call. */
static void repeat_warnings(const char *text)
{
    status_forget_warnings();
    for (size_t length; *text; text += length + (text[length] == '\n')) {
        length = strcspn(text, "\n");
        status_warn("%.*s", (int)length, text);
    }
}

enum fdsl_status fdsl_source_wait(struct fdsl_source *source, double seconds)
{
    const enum status status =
        source ? check_process("source", source->process) : status_set(STATUS_USAGE, "source: it is NULL");
    if (status != STATUS_OK)
        return lib_relay(status);
    if (!(seconds >= 0 && seconds <= 1e6)) /* rejects NaN, too */
        return lib_relay(
            status_set(STATUS_USAGE, "seconds: %g is out of range; it must be 0 to 1e6", seconds));
    struct opening *opening = source->opening;
    if (!opening)
        return FDSL_OK;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)seconds;
    until.tv_nsec += (long)((seconds - floor(seconds)) * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&opening->lock);
    while (!opening->done && pthread_cond_timedwait(&opening->changed, &opening->lock, &until) != ETIMEDOUT) {
    }
    const bool done = opening->done;
    pthread_mutex_unlock(&opening->lock);
    if (!done)
        return FDSL_PENDING;
    join_opening(opening);
    repeat_warnings(opening->warnings);
    if (opening->failure.status != STATUS_OK)
        return lib_relay(status_restore(&opening->failure));
    source->opening = NULL;
    free_opening(opening);
    return FDSL_OK;
}

/* Checks that a source is open. */
static enum status check_open(const struct fdsl_source *source)
{
    if (!source)
        return status_set(STATUS_USAGE, "source: it is NULL");
    return source->opening ? status_set(STATUS_USAGE, "source: it is not open; call fdsl_source_wait() until "
                                                      "it returns FDSL_OK")
                           : STATUS_OK;
}

enum fdsl_status fdsl_source_describe(const struct fdsl_source *source, struct fdsl_source_info *info)
{
    enum status status = check_open(source);
    if (status == STATUS_OK && !info)
        status = status_set(STATUS_USAGE, "info: it is NULL");
    if (status == STATUS_OK)
        status = lib_check_size("info", info->size, sizeof *info);
    if (status != STATUS_OK)
        return lib_relay(status);
    *info = (struct fdsl_source_info){.size = sizeof *info,
                                      .samples = source->dataset.sample_count,
                                      .bytes = source->dataset.bytes,
                                      .classes = source->classes,
                                      .files = source->dataset.file_count,
                                      .shards = source->dataset.shards,
                                      .hash = source->hash};
    return FDSL_OK;
}

const char *fdsl_source_class(const struct fdsl_source *source, uint32_t label)
{
    return source && !source->opening && label < source->classes ? source->class_names[label] : NULL;
}

/* ---- Streams ---- */

/* What the caller knows as a batch. There is one for each slot of the stream. */
struct fdsl_batch {
    struct fdsl_stream *owner;
    struct stream_batch batch;
    int64_t *labels, *numbers;
    int64_t extents[9]; /* the shape of the images, their strides, and the stride of labels and numbers */
    bool held;
};

/* Of the fields of a configuration, those that determine the order. */
struct order {
    uint64_t seed;
    uint32_t count, global, lanes, shuffle; /* in samples; `shuffle` 0: the order of the files */
    uint32_t rank, ranks;
    bool drop_last;
};

struct fdsl_stream {
    struct fdsl_source *source;
    struct stream *stream;
    struct order order;
    struct image_output output;
    struct fdsl_stream_info info;
    uint64_t transform;
    bool ended; /* the last batch of an epoch was delivered, but not the end of the epoch */
    pid_t process;

    struct fdsl_batch *batches;
    int64_t *words; /* labels and numbers of all batches */
    uint32_t batch_count;

    pthread_mutex_t lock; /* protects `held`, `closed`, and `held` of the batches */
    uint32_t held;
    bool closed;
};

enum fdsl_status fdsl_stream_config_init(struct fdsl_stream_config *config, size_t size)
{
    if (!config)
        return lib_invalid("config: it is NULL");
    const enum status status = lib_check_size("config", size, sizeof *config);
    if (status == STATUS_OK)
        *config = (struct fdsl_stream_config){.size = size,
                                              .batch_size = 256,
                                              .world_size = 1,
                                              .shuffle = 1,
                                              .shuffle_buffer = 16384,
                                              .lanes = 64,
                                              .fit = "resize",
                                              .channels = 3,
                                              .layout = "nchw",
                                              .dtype = "u8",
                                              .std = {1, 1, 1},
                                              .prefetch = 2,
                                              .held = 1,
                                              .on_error = "fail"};
    return lib_relay(status);
}

/* ---- The order ---- */

/* Implements stream_plan.list, as the trainer does (train_batch()). */
static uint32_t list_step(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct order *order = context;
    const struct draw_order drawn =
        draw_lanes(order->seed, (uint32_t)epoch, order->count, order->lanes, order->shuffle);
    const struct partition ranks = {.rank = order->rank, .ranks = order->ranks, .strong = true};
    const struct share share = partition_step(&ranks, order->count, order->global, (uint32_t)step);
    const uint32_t first = (uint32_t)step * order->global + (uint32_t)share.first;
    for (uint32_t i = 0; i < share.count; i++)
        numbers[i] = draw_order_at(&drawn, first + i);
    return (uint32_t)share.count;
}

static enum status check_flag(const char *name, int value)
{
    return value == 0 || value == 1 ? STATUS_OK
                                    : status_set(STATUS_USAGE, "%s: %d is neither 0 nor 1", name, value);
}

static enum status set_order(const struct fdsl_stream_config *config, struct fdsl_stream *self)
{
    struct order *order = &self->order;
    const uint32_t count = self->source->dataset.sample_count;
    TRY(lib_check_count("world_size", config->world_size, 1, 1u << 24));
    TRY(lib_check_count("rank", config->rank, 0, config->world_size - 1));
    TRY(lib_check_count("batch_size", config->batch_size, 1, (SAMPLES_MAX - 1) / config->world_size));
    TRY(lib_check_count("lanes", config->lanes, 1, 1u << 20));
    TRY(lib_check_count("shuffle_buffer", config->shuffle_buffer, 1, INT32_MAX));
    TRY(check_flag("shuffle", config->shuffle));
    TRY(check_flag("drop_last", config->drop_last));
    *order = (struct order){.seed = config->seed,
                            .count = count,
                            .global = config->batch_size * config->world_size,
                            .lanes = config->lanes,
                            .shuffle = config->shuffle ? config->shuffle_buffer : 0,
                            .rank = config->rank,
                            .ranks = config->world_size,
                            .drop_last = config->drop_last};
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
    const enum status status = set_stream_find_shape(request);
    if (status != STATUS_OK)
        return status_prefix(status, "path: cannot find the size of the images");
    return request->type == DTYPE_U8 && request->depth == 1 && request->channels == channels
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "channels: it is %u, but the first image is %s with %u channels and a depth of "
                            "%u; streams deliver images of bytes with a depth of 1",
                            channels, dtype_names[request->type], request->channels, request->depth);
}

/* Sets the shapes and strides that do not depend on the batch. */
static void set_shape(struct fdsl_stream *self, const struct set_stream_request *request)
{
    const uint32_t channels = request->channels, height = request->height, width = request->width;
    const uint32_t planar[] = {channels, height, width}, interleaved[] = {height, width, channels};
    self->info.element_bytes = (uint32_t)dtype_bytes(self->output.type);
    memcpy(self->info.shape, self->output.interleaved ? interleaved : planar, sizeof self->info.shape);
    self->info.image_bytes = (uint64_t)channels * height * width * self->info.element_bytes;
}

/* Hashes the fields that determine the images. */
static uint64_t hash_transform(const struct fdsl_stream_config *config, int fit,
                               const struct image_output *output)
{
    const uint32_t words[] = {config->out_res,  config->out_res ? (uint32_t)fit : 0, config->flip != 0,
                              config->channels, (uint32_t)output->interleaved,       (uint32_t)output->type};
    uint64_t hash = checksum_seeded(words, sizeof words, 1);
    for (uint32_t c = 0; c < config->channels; c++) {
        const double scale[] = {config->mean[c] + 0.0, config->std[c]}; /* + 0.0: -0 is 0 */
        hash = checksum_seeded(scale, sizeof scale, hash);
    }
    return hash;
}

static enum status set_images(const struct fdsl_stream_config *config, struct fdsl_stream *self,
                              struct set_stream_request *request)
{
    static const char *const layouts[] = {"nchw", "nhwc", NULL};
    double mean[FDSL_CHANNELS_MAX] = {0}, deviation[FDSL_CHANNELS_MAX] = {1, 1, 1};
    int fit, layout, dtype;
    TRY(lib_check_count("out_res", config->out_res, 0, FIT_RES_MAX));
    TRY(lib_find_name("fit", config->fit, fit_choices, &fit));
    TRY(check_flag("flip", config->flip));
    TRY(lib_find_name("layout", config->layout, layouts, &layout));
    TRY(lib_find_name("dtype", config->dtype, dtype_names, &dtype));
    if (config->channels != 1 && config->channels != 3)
        return status_set(STATUS_USAGE, "channels: %u is neither 1 nor 3", config->channels);
    TRY(lib_check_scale(config->mean, config->std, config->channels, dtype == DTYPE_U8));
    memcpy(mean, config->mean, config->channels * sizeof *mean);
    memcpy(deviation, config->std, config->channels * sizeof *deviation);
    self->output.flip = config->flip;
    self->output.seed = config->seed;
    image_output_set(&self->output, (enum dtype)dtype, layout == 1, mean, deviation);
    self->transform = hash_transform(config, fit, &self->output);
    request->channels = config->channels;
    request->depth = 1;
    request->height = request->width = config->out_res;
    request->type = DTYPE_U8;
    request->output = &self->output;
    request->fit = (struct image_fit){
        .how = fits[fit], .res = config->out_res, .channels = config->channels, .seed = config->seed};
    if (config->out_res == 0)
        TRY(check_shape(request));
    set_shape(self, request);
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

static enum status allocate_batches(const struct set_stream_request *request, struct fdsl_stream *self)
{
    const size_t unit = ALIGNMENT / sizeof *self->words;
    const size_t capacity = (self->info.capacity + unit - 1) / unit * unit;
    self->batch_count = request->ahead + request->held;
    self->batches = calloc(self->batch_count, sizeof *self->batches);
    self->words = aligned_alloc(ALIGNMENT, 2 * self->batch_count * capacity * sizeof *self->words);
    TRY(ALLOCATED(self->batches && self->words, "out of memory for %u batches", self->batch_count));
    for (uint32_t i = 0; i < self->batch_count; i++) {
        struct fdsl_batch *batch = &self->batches[i];
        batch->owner = self;
        batch->labels = self->words + 2 * i * capacity;
        batch->numbers = batch->labels + capacity;
        int64_t step = 1;
        for (int axis = 3; axis > 0; axis--) {
            batch->extents[axis] = self->info.shape[axis - 1];
            batch->extents[4 + axis] = step;
            step *= batch->extents[axis];
        }
        batch->extents[4] = step;
        batch->extents[8] = 1;
    }
    return STATUS_OK;
}

static enum status open_stream(const struct fdsl_stream_config *config, struct fdsl_stream *self)
{
    static const char *const errors[] = {"fail", "mask", NULL}; /* enum set_stream_error */
    struct set_stream_request request = {.dataset = &self->source->dataset};
    int on_error;
    TRY(set_order(config, self));
    TRY(lib_find_name("on_error", config->on_error, errors, &on_error));
    request.on_error = (enum set_stream_error)on_error;
    TRY(set_images(config, self, &request));
    TRY(lib_threads("num_threads", config->num_threads, &request.threads));
    TRY(lib_check_count("prefetch", config->prefetch, 1, BATCHES_MAX));
    TRY(lib_check_count("held", config->held, 1, BATCHES_MAX));
    if (on_error == SET_STREAM_FAIL)
        TRY(check_complete(&self->source->dataset));
    request.shard_bytes = config->shard_bytes;
    TRY(set_stream_plan_shards(request.dataset, self->order.lanes, self->order.shuffle, request.threads,
                               &request.shard_bytes));
    request.plan = (struct stream_plan){.steps = self->info.steps,
                                        .capacity = self->info.capacity,
                                        .list = list_step,
                                        .context = &self->order};
    request.ahead = config->prefetch;
    request.held = config->held;
    request.lanes = self->order.lanes;
    request.shuffle = self->order.shuffle;
    TRY(allocate_batches(&request, self));
    return set_stream_open(&request, &self->stream);
}

static void free_stream(struct fdsl_stream *self)
{
    stream_close(self->stream);
    release_source(self->source);
    pthread_mutex_destroy(&self->lock);
    free(self->batches);
    free(self->words);
    free(self);
}

enum fdsl_status fdsl_stream_open(struct fdsl_source *source, const struct fdsl_stream_config *config,
                                  struct fdsl_stream **stream)
{
    struct environment before;
    if (!stream)
        return lib_invalid("stream: it is NULL");
    *stream = NULL;
    enum status status = check_open(source);
    if (status == STATUS_OK && !config)
        status = status_set(STATUS_USAGE, "config: it is NULL");
    if (status == STATUS_OK)
        status = lib_check_size("config", config->size, sizeof *config);
    if (status == STATUS_OK)
        status = check_process("source", source->process);
    if (status != STATUS_OK)
        return lib_relay(status);
    struct fdsl_stream *self = calloc(1, sizeof *self);
    if (!self)
        return lib_relay(status_set(STATUS_EXHAUSTED, "out of memory"));
    atomic_fetch_add(&source->users, 1);
    self->source = source;
    self->process = getpid();
    pthread_mutex_init(&self->lock, NULL);
    status_forget_warnings();
    status = lib_enter(&before);
    if (status == STATUS_OK)
        status = open_stream(config, self);
    lib_leave(&before);
    if (status == STATUS_OK) {
        *stream = self;
        return FDSL_OK;
    }
    const enum fdsl_status result = lib_relay(status);
    free_stream(self);
    return result;
}

void fdsl_stream_close(struct fdsl_stream *stream)
{
    if (!stream || stream->process != getpid())
        return;
    stream_cancel(stream->stream); /* the threads prepare no more batches */
    pthread_mutex_lock(&stream->lock);
    stream->closed = true;
    const bool unused = stream->held == 0;
    pthread_mutex_unlock(&stream->lock);
    if (unused)
        free_stream(stream);
}

enum fdsl_status fdsl_stream_describe(const struct fdsl_stream *stream, struct fdsl_stream_info *info)
{
    if (!stream || !info)
        return lib_invalid(stream ? "info: it is NULL" : "stream: it is NULL");
    const enum status status = lib_check_size("info", info->size, sizeof *info);
    if (status == STATUS_OK) {
        *info = stream->info;
        info->size = sizeof *info;
    }
    return lib_relay(status);
}

/* ---- Batches ---- */

static enum status check_stream(const struct fdsl_stream *stream)
{
    return stream ? check_process("stream", stream->process) : status_set(STATUS_USAGE, "stream: it is NULL");
}

enum fdsl_status fdsl_stream_wait(struct fdsl_stream *stream, double seconds)
{
    const enum status status = check_stream(stream);
    if (status != STATUS_OK)
        return lib_relay(status);
    if (!(seconds >= 0 && seconds <= 1e6)) /* rejects NaN, too */
        return lib_relay(
            status_set(STATUS_USAGE, "seconds: %g is out of range; it must be 0 to 1e6", seconds));
    return stream->ended || stream_wait(stream->stream, seconds) ? FDSL_OK : FDSL_PENDING;
}

/* Takes the next batch from the stream, or returns that the epoch has ended. */
static enum fdsl_status take(struct fdsl_stream *stream, struct stream_batch *batch)
{
    status_forget_warnings();
    enum status status = check_stream(stream);
    if (status == STATUS_OK && stream->ended) {
        stream->ended = false;
        return FDSL_END;
    }
    if (status == STATUS_OK)
        status = stream_next(stream->stream, batch);
    if (status == STATUS_OK)
        stream->ended = batch->last;
    return lib_relay(status);
}

static void copy_labels(const struct stream_batch *batch, int64_t *labels)
{
    for (uint32_t i = 0; i < batch->samples.count; i++)
        labels[i] = batch->samples.labels[i]; /* STREAM_MASKED is -1 */
}

enum fdsl_status fdsl_stream_next(struct fdsl_stream *stream, struct fdsl_batch **batch)
{
    struct stream_batch taken;
    if (!batch)
        return lib_invalid("batch: it is NULL");
    *batch = NULL;
    const enum fdsl_status result = take(stream, &taken);
    if (result != FDSL_OK)
        return result;
    struct fdsl_batch *self = &stream->batches[taken.slot];
    self->batch = taken;
    copy_labels(&taken, self->labels);
    for (uint32_t i = 0; i < taken.samples.count; i++)
        self->numbers[i] = taken.numbers[i];
    self->extents[0] = taken.samples.count;
    pthread_mutex_lock(&stream->lock);
    self->held = true;
    stream->held++;
    pthread_mutex_unlock(&stream->lock);
    *batch = self;
    return FDSL_OK;
}

enum fdsl_status fdsl_stream_fill(struct fdsl_stream *stream, void *images, int64_t *labels, uint32_t *count)
{
    struct stream_batch batch;
    if (!images || !count)
        return lib_invalid(images ? "count: it is NULL" : "images: it is NULL");
    *count = 0;
    const enum fdsl_status result = take(stream, &batch);
    if (result != FDSL_OK)
        return result;
    if (batch.samples.count > 0)
        memcpy(images, batch.samples.values, batch.samples.bytes);
    if (labels)
        copy_labels(&batch, labels);
    *count = batch.samples.count;
    return lib_relay(stream_release(stream->stream, &batch, NULL));
}

static enum status check_batch(const struct fdsl_batch *batch)
{
    TRY(batch ? check_process("batch", batch->owner->process)
              : status_set(STATUS_USAGE, "batch: it is NULL"));
    pthread_mutex_lock(&batch->owner->lock);
    const bool held = batch->held;
    pthread_mutex_unlock(&batch->owner->lock);
    return held ? STATUS_OK : status_set(STATUS_USAGE, "batch: it was released before");
}

enum fdsl_status fdsl_batch_describe(const struct fdsl_batch *batch, struct fdsl_batch_info *info)
{
    enum status status = check_batch(batch);
    if (status == STATUS_OK && !info)
        status = status_set(STATUS_USAGE, "info: it is NULL");
    if (status == STATUS_OK)
        status = lib_check_size("info", info->size, sizeof *info);
    if (status == STATUS_OK)
        *info = (struct fdsl_batch_info){.size = sizeof *info,
                                         .count = batch->batch.samples.count,
                                         .masked = batch->batch.masked,
                                         .epoch = batch->batch.epoch,
                                         .step = batch->batch.step,
                                         .last = batch->batch.last};
    return lib_relay(status);
}

enum fdsl_status fdsl_batch_tensor(struct fdsl_batch *batch, enum fdsl_field field,
                                   struct fdsl_tensor *tensor)
{
    enum status status = check_batch(batch);
    if (status == STATUS_OK && !tensor)
        status = status_set(STATUS_USAGE, "tensor: it is NULL");
    if (status == STATUS_OK && field != FDSL_IMAGES && field != FDSL_LABELS && field != FDSL_NUMBERS)
        status = status_set(STATUS_USAGE, "field: %d is not a part of a batch", (int)field);
    if (status != STATUS_OK)
        return lib_relay(status);
    *tensor = (struct fdsl_tensor){.data = field == FDSL_LABELS ? batch->labels : batch->numbers,
                                   .device_type = 1,
                                   .ndim = 1,
                                   .bits = 64,
                                   .lanes = 1,
                                   .shape = batch->extents,
                                   .strides = batch->extents + 8};
    if (field != FDSL_IMAGES)
        return FDSL_OK;
    const struct batch *samples = &batch->batch.samples;
    tensor->data = (void *)(uintptr_t)samples->values;
    tensor->ndim = 4;
    tensor->code = samples->type == DTYPE_U8 ? 1 : samples->type == DTYPE_BF16 ? 4 : 2;
    tensor->bits = (uint8_t)(8 * dtype_bytes(samples->type));
    tensor->strides = batch->extents + 4;
    return FDSL_OK;
}

enum fdsl_status fdsl_batch_release(struct fdsl_batch *batch)
{
    if (!batch)
        return FDSL_OK;
    struct fdsl_stream *stream = batch->owner;
    enum status status = check_process("batch", stream->process);
    if (status != STATUS_OK)
        return lib_relay(status);
    pthread_mutex_lock(&stream->lock);
    const bool held = batch->held;
    if (held) { /* with the lock, so that no other thread frees the stream */
        batch->held = false;
        status = stream_release(stream->stream, &batch->batch, NULL);
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
    if (epoch >= UINT32_MAX)
        return status_set(STATUS_USAGE, "epoch: %llu is out of range; it must be below 2^32 - 1",
                          (unsigned long long)epoch);
    if (step >= stream->info.steps)
        return status_set(STATUS_USAGE, "step: %llu is out of range; an epoch has %llu steps",
                          (unsigned long long)step, (unsigned long long)stream->info.steps);
    TRY(stream_seek(stream->stream, (struct stream_position){epoch, step}));
    stream->ended = false;
    return STATUS_OK;
}

enum fdsl_status fdsl_stream_seek(struct fdsl_stream *stream, uint64_t epoch, uint64_t step)
{
    const enum status status = check_stream(stream);
    return lib_relay(status == STATUS_OK ? seek(stream, epoch, step) : status);
}

enum fdsl_status fdsl_stream_save(const struct fdsl_stream *stream, struct fdsl_state *state)
{
    enum status status = check_stream(stream);
    if (status == STATUS_OK && !state)
        status = status_set(STATUS_USAGE, "state: it is NULL");
    if (status == STATUS_OK)
        status = lib_check_size("state", state->size, sizeof *state);
    if (status != STATUS_OK)
        return lib_relay(status);
    const struct order *order = &stream->order;
    *state = (struct fdsl_state){.size = sizeof *state,
                                 .epoch = stream->stream->at.epoch,
                                 .sample = stream->stream->at.step * order->global,
                                 .samples = order->count,
                                 .seed = order->seed,
                                 .data = stream->source->hash,
                                 .transform = stream->transform,
                                 .global_batch = order->global,
                                 .lanes = order->shuffle ? order->lanes : 0,
                                 .shuffle_buffer = order->shuffle,
                                 .drop_last = order->drop_last};
    return FDSL_OK;
}

/* Compares a field of a state with that of the stream. */
static enum status check_same(const char *name, uint64_t state, uint64_t own)
{
    return state == own ? STATUS_OK
                        : status_set(STATUS_USAGE, "state: its %s is %llu, but that of the stream is %llu",
                                     name, (unsigned long long)state, (unsigned long long)own);
}

static enum status load(struct fdsl_stream *stream, const struct fdsl_state *state)
{
    struct fdsl_state own = {.size = sizeof own};
    if (fdsl_stream_save(stream, &own) != FDSL_OK)
        return status_set(STATUS_FAILED, "the stream has no state");
    TRY(check_same("number of samples", state->samples, own.samples));
    if (state->data != own.data)
        return status_set(STATUS_USAGE, "state: it belongs to another data set, or to another version of it");
    if (state->transform != own.transform)
        return status_set(
            STATUS_USAGE,
            "state: it belongs to another transform; out_res, fit, flip, channels, layout, dtype, "
            "mean and std must be the same");
    TRY(check_same("global batch (batch_size * world_size)", state->global_batch, own.global_batch));
    TRY(check_same("seed", state->seed, own.seed));
    TRY(check_same("shuffle_buffer (0: no shuffle)", state->shuffle_buffer, own.shuffle_buffer));
    TRY(check_same("lanes (0: no shuffle)", state->lanes, own.lanes));
    TRY(check_same("drop_last", state->drop_last, own.drop_last));
    if (state->sample % own.global_batch != 0 || state->sample / own.global_batch >= stream->info.steps)
        return status_set(STATUS_USAGE, "state: no step of the stream begins at sample %llu",
                          (unsigned long long)state->sample);
    return seek(stream, state->epoch, state->sample / own.global_batch);
}

enum fdsl_status fdsl_stream_load(struct fdsl_stream *stream, const struct fdsl_state *state)
{
    enum status status = check_stream(stream);
    if (status == STATUS_OK && !state)
        status = status_set(STATUS_USAGE, "state: it is NULL");
    if (status == STATUS_OK)
        status = lib_check_size("state", state->size, sizeof *state);
    return lib_relay(status == STATUS_OK ? load(stream, state) : status);
}

enum fdsl_status fdsl_stream_stats(struct fdsl_stream *stream, struct fdsl_stream_stats *stats)
{
    enum status status = check_stream(stream);
    if (status == STATUS_OK && !stats)
        status = status_set(STATUS_USAGE, "stats: it is NULL");
    if (status == STATUS_OK)
        status = lib_check_size("stats", stats->size, sizeof *stats);
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
                                        .shard_bytes = own.shard_bytes};
    return FDSL_OK;
}

void fdsl_stream_cancel(struct fdsl_stream *stream)
{
    if (stream && stream->process == getpid())
        stream_cancel(stream->stream);
}
