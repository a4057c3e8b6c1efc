/* Sources of streams: opens, describes and closes them. Data sets can be opened in a thread, so that callers
 * can handle signals. */
#include "lib/sources.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/generator.h"
#include "core/parallel.h"
#include "data/checksum.h"
#include "data/generated_stream.h"
#include "data/stream_state.h"
#include "synth/published.h"

/* ---- Generated images ---- */

/* The checks of the configuration, and the generator of a stream. */

#define COUNT_MAX ((UINT64_C(1) << 31) - 1) /* the limit of draw_order() */

/* Hashes everything that determines the pixels of the canvases, which images they are, and their targets. */
static uint64_t hash_images(const struct images *images)
{
    const struct synth *synth = &images->synth;
    const uint64_t words[] = {images->count, images->fresh,     synth->seed, (uint64_t)synth->formula,
                              synth->res,    synth->class_count};
    uint64_t hash = checksum_seeded(words, sizeof words, 2);
    if (synth->set) /* the published random stream of the set */
        hash = checksum_seeded(synth->set->name, strlen(synth->set->name), hash);
    if (formula_is_system(formulas[synth->formula])) {
        hash = checksum_seeded(&synth->ifs, sizeof synth->ifs, hash);
        hash = checksum_seeded(&synth->points, sizeof synth->points, hash);
    }
    if (synth_is_color(synth))
        hash = checksum_seeded(&synth->color, sizeof synth->color, hash);
    _Static_assert(sizeof *synth->colors == 34 * sizeof(uint32_t) && sizeof synth->color == 16,
                   "the parameters of colours have no gaps");
    _Static_assert(sizeof *synth->classes == 40 &&
                       sizeof *synth->systems == 16 + IFS_MAPS_MAX * IFS_MAP_VALUES * sizeof(double) &&
                       sizeof *synth->solids == 40 + IFS_MAPS_MAX * IFS3D_COEFFICIENTS * sizeof(double) &&
                       sizeof synth->ifs == 28,
                   "the parameters of a class have no gaps");
    size_t bytes;
    const void *table = synth_class_table(synth, &bytes);
    return checksum_seeded(table, bytes, hash);
}

/* Streams hold labels as int32_t, and -1 means that a sample is masked. */
static enum status check_ids(const struct synth *synth)
{
    for (uint32_t c = 0; c < synth->class_count; c++)
        if (synth->classes[c].id > INT32_MAX)
            return status_set(STATUS_USAGE,
                              "class_list: class %u is out of range; in streams, an id must be below 2^31",
                              synth->classes[c].id);
    return STATUS_OK;
}

/* Reads the random numbers of a published set, so that streams need not do so. */
static enum status prepare_published(const struct synth *synth)
{
    const struct published_stream *stream = formulas[synth->formula]->published;
    struct published *published;
    int threads;
    if (!synth->set || !stream)
        return STATUS_OK;
    TRY(lib_threads("threads", 0, &threads));
    TRY(stream->open(synth, threads, &published));
    stream->close(published);
    return STATUS_OK;
}

/* Opens the images of fdsl_images_open(). The caller closes them with images_free(), even after an error. */
static enum status images_open(const struct fdsl_config *config, uint64_t count, int fresh,
                               struct images *images)
{
    if (count < 1 || count > COUNT_MAX)
        return status_set(STATUS_USAGE, "count: %llu is out of range; it must be 1 to %llu",
                          (unsigned long long)count, (unsigned long long)COUNT_MAX);
    if (fresh != 0 && fresh != 1)
        return status_set(STATUS_USAGE, "fresh: %d is neither 0 nor 1", fresh);
    if (config->device != FDSL_CPU)
        return status_set(STATUS_USAGE, "device: it is %d; set the device of a stream in its configuration",
                          config->device);
    if (config->threads != 0)
        return status_set(STATUS_USAGE, "threads: it is %d; set num_threads of a stream's configuration",
                          config->threads);
    TRY(lib_find_generator(config->generator, &images->generator));
    TRY(lib_images_input(config, &images->synth));
    TRY(check_ids(&images->synth));
    if (synth_cloud_bytes(&images->synth))
        return status_set(STATUS_USAGE, "preset: streams have no point clouds; set it to mv-fractaldb-1k, "
                                        "which has the same images and labels");
    TRY(prepare_published(&images->synth));
    images->count = (uint32_t)count;
    images->fresh = fresh ? generated_stream_fresh(images->synth.turns) : 0;
    images->hash = hash_images(images);
    return STATUS_OK;
}

static void images_free(struct images *images)
{
    synth_free(&images->synth);
}

/* ---- Streams ---- */

void images_get_format(const struct images *images, struct image_output *output, uint64_t *transform)
{
    const struct synth_output *own = &images->synth.output;
    const uint32_t words[] = {own->res, (uint32_t)own->fit, own->channels, (uint32_t)own->layout,
                              (uint32_t)own->type};
    output->type = own->type;
    output->interleaved = own->layout == OUTPUT_NHWC;
    *transform = checksum_seeded(words, sizeof words, 3);
    if (own->type != DTYPE_U8) {
        *transform = checksum_seeded(own->scale, own->channels * sizeof *own->scale, *transform);
        *transform = checksum_seeded(own->bias, own->channels * sizeof *own->bias, *transform);
    }
}

static uint64_t label_of(const void *state, uint64_t number)
{
    const struct synth *synth = &((const struct images *)state)->synth;
    return synth_label(synth, synth_image_at(synth->first, 1, synth->turns, number, 0));
}

enum status images_mixed_source(const struct images *images, const struct fdsl_stream_config *config,
                                uint32_t batch, struct device_mixed_source *source)
{
    *source = (struct device_mixed_source){
        .host_numbers = lib_generator_needs_host(images->generator), .label = label_of, .state = images};
    return lib_generator_open(&images->synth, images->generator, config->device, config->num_threads, batch,
                              &source->generator);
}

enum status images_stream_open(const struct images *images, const struct fdsl_stream_config *config,
                               const struct images_plan *plan, struct stream **stream,
                               struct device_batches **batches)
{
    struct generated_stream_request request = {.fresh = images->fresh,
                                               .number = plan->number,
                                               .count = images->count,
                                               .sample_bytes = synth_output_bytes(&images->synth),
                                               .mask_bytes = synth_mask_bytes(&images->synth),
                                               .type = images->synth.output.type,
                                               .plan = plan->plan,
                                               .ahead = config->prefetch,
                                               .held = config->held};
    TRY(lib_generator_open(&images->synth, images->generator, config->device, config->num_threads,
                           plan->plan.capacity, &request.generator));
    if (config->device < 0)
        return generated_stream_open(&request, stream);
    struct device_order order = plan->order;
    order.fresh = images->fresh;
    order.host_numbers = lib_generator_needs_host(images->generator);
    order.captures = plan->even && !order.host_numbers;
    TRY(device_images_open(config->device, &request, &order, batches));
    *stream = &(*batches)->stream;
    return STATUS_OK;
}

/* ---- Mixtures (fdsl_source_mix()) ---- */

/* The checks of the configuration, and what the sources have together. stream.c opens their streams. */

enum fdsl_status fdsl_mix_config_init(struct fdsl_mix_config *config, size_t size)
{
    static const struct fdsl_mix_config defaults = {
        .size = sizeof defaults, .epoch = FDSL_MIX_FIRST, .labels = "joined"};
    return lib_set_config(config, size, &defaults, sizeof defaults);
}

/* Returns a source's number of samples; 0: it is generated, and has no end in a mixture. */
static uint32_t finite_samples(const struct fdsl_source *source)
{
    return source->generates ? 0 : lib_source_samples(source);
}

static enum status check_part(const struct fdsl_source *source, uint32_t k)
{
    if (!source)
        return status_set(STATUS_USAGE, "sources: source %u is NULL", k);
    TRY(lib_source_check(source));
    TRY(lib_check_process("source", source->process));
    if (source->rows || source->mix)
        return status_set(STATUS_USAGE, "sources: source %u has %s; mix data sets and generated images", k,
                          source->rows ? "rows" : "other sources itself");
    return finite_samples(source) || source->generates
               ? STATUS_OK
               : status_set(STATUS_USAGE, "sources: source %u has no samples", k);
}

static enum status take_weight(const char *field, double weight, uint32_t *units)
{
    const double exact = weight * MIXTURE_UNITS;
    if (!(weight >= 0 && weight <= MIXTURE_MOST) || fabs(exact - rint(exact)) > 1e-6)
        return status_set(STATUS_USAGE,
                          "%s: %.17g is not a weight; it must be 0 to %d, with at most four decimals", field,
                          weight, MIXTURE_MOST);
    *units = (uint32_t)lrint(exact);
    return STATUS_OK;
}

static enum status take_weights(const struct fdsl_mix_config *config, struct mixture_request *request)
{
    TRY(lib_check_given("weights", config->weights));
    TRY(lib_check_count("change_count", config->change_count, 0, MIXTURE_PHASES - 1));
    if (config->change_count > 0) {
        TRY(lib_check_given("change_steps", config->change_steps));
        TRY(lib_check_given("change_weights", config->change_weights));
    }
    request->phase_count = 1 + config->change_count;
    for (uint32_t k = 0; k < config->count; k++)
        TRY(take_weight("weights", config->weights[k], &request->phases[0].of[k]));
    for (uint32_t i = 0; i < config->change_count; i++) {
        struct mixture_weights *phase = &request->phases[i + 1];
        phase->step = config->change_steps[i];
        if (phase->step == 0 || phase->step > UINT32_MAX)
            return status_set(STATUS_USAGE, "change_steps: %llu is out of range; it must be 1 to 2^32 - 1",
                              (unsigned long long)phase->step);
        for (uint32_t k = 0; k < config->count; k++)
            TRY(take_weight("change_weights", config->change_weights[i * config->count + k], &phase->of[k]));
    }
    return STATUS_OK;
}

/* Sets the classes of the mixture and their names. Joined classes have the names of the source with the most
 * classes. */
static enum status join_classes(const struct fdsl_mix_config *config, struct fdsl_source *self, bool offset)
{
    struct source_mixture *mix = self->mix;
    uint64_t total = 0;
    uint32_t largest = 0;
    for (uint32_t k = 0; k < mix->request.count; k++) {
        const struct fdsl_source *part = mix->sources[k];
        const uint32_t given = config->classes ? config->classes[k] : 0;
        mix->classes[k] = part->generates ? images_classes(&part->images) : part->classes;
        if (given && given < mix->classes[k])
            return status_set(STATUS_USAGE, "classes: source %u has %u classes, not %u", k, mix->classes[k],
                              given);
        mix->classes[k] = given ? given : mix->classes[k];
        if (offset && mix->classes[k] == 0 && k + 1 < mix->request.count)
            return status_set(STATUS_USAGE,
                              "classes: labels 'offset' needs the number of classes of source %u, which has "
                              "no class folders; set it",
                              k);
        if (offset)
            mix->request.sources[k].label_offset = (uint32_t)total;
        total += mix->classes[k];
        if (offset && total > INT32_MAX)
            return status_set(STATUS_USAGE,
                              "classes: sources 0 to %u have %llu classes together, but labels 'offset' must "
                              "be below 2^31 - 1; set the numbers of classes that they have",
                              k, (unsigned long long)total);
        if (part->classes > mix->sources[largest]->classes)
            largest = k;
    }
    if (!offset) {
        self->class_names = mix->sources[largest]->class_names;
        self->classes = mix->sources[largest]->classes;
        return STATUS_OK;
    }
    bool named = true;
    for (uint32_t k = 0; k < mix->request.count; k++)
        named &= mix->sources[k]->classes > 0 && mix->sources[k]->classes == mix->classes[k];
    if (!named)
        return STATUS_OK;
    mix->class_names = malloc((size_t)(total + 1) * sizeof *mix->class_names);
    TRY(ALLOCATED(mix->class_names, "out of memory for the names of classes"));
    for (uint32_t k = 0; k < mix->request.count; k++)
        for (uint32_t c = 0; c < mix->sources[k]->classes; c++)
            mix->class_names[self->classes++] = mix->sources[k]->class_names[c];
    self->class_names = mix->class_names;
    return STATUS_OK;
}

static enum status open_mix(const struct fdsl_mix_config *config, struct fdsl_source *self)
{
    static const char *const kinds[] = {"joined", "offset", NULL};
    int labels;
    TRY(lib_check_count("count", config->count, 1, MIXTURE_SOURCES));
    TRY(lib_check_given("sources", config->sources));
    TRY(lib_find_name("labels", config->labels, kinds, &labels));
    for (uint32_t k = 0; k < config->count; k++)
        TRY(check_part(config->sources[k], k));
    struct source_mixture *mix = self->mix = calloc(1, sizeof *mix);
    TRY(ALLOCATED(mix, "out of memory"));
    struct mixture_request *request = &mix->request;
    request->named = config->epoch;
    for (uint32_t k = 0; k < config->count; k++) {
        struct fdsl_source *part = config->sources[k];
        atomic_fetch_add(&part->users, 1);
        mix->sources[request->count++] = part;
        snprintf(request->sources[k].name, MIXTURE_NAME, "%u", k);
        request->sources[k].samples = finite_samples(part);
        if (request->named == FDSL_MIX_FIRST && !part->generates)
            request->named = k;
    }
    if (request->named == FDSL_MIX_FIRST)
        return status_set(STATUS_USAGE, "sources: all of them are generated; one must have an end");
    TRY(lib_check_count("epoch", request->named, 0, config->count - 1));
    TRY(take_weights(config, request));
    TRY(mixture_count(request, &mix->positions));
    TRY(join_classes(config, self, labels == 1));
    self->hash = mixture_hash(request);
    for (uint32_t k = 0; k < request->count; k++) {
        self->hash = checksum_seeded(&mix->sources[k]->hash, sizeof self->hash, self->hash);
        self->dataset.bytes += mix->sources[k]->dataset.bytes;
    }
    return STATUS_OK;
}

enum fdsl_status fdsl_source_mix(const struct fdsl_mix_config *config, struct fdsl_source **source)
{
    enum status status = lib_source_new(config, sizeof *config, source);
    if (status == STATUS_OK)
        status = open_mix(config, *source);
    return lib_source_end(status, source);
}

/* Ignores NULL. */
static void mix_free(struct source_mixture *mix)
{
    if (!mix)
        return;
    for (uint32_t k = 0; k < mix->request.count; k++)
        lib_source_release(mix->sources[k]);
    free(mix->class_names);
    free(mix);
}

/* ---- All sources ---- */

/* The arguments of fdsl_images_open(). */
struct images_wish {
    struct fdsl_config config;
    uint64_t count;
    int fresh;
};

/* A source that a thread opens. */
struct opening {
    struct fdsl_source_config config;
    char *texts[6];           /* copies of its strings */
    struct fdsl_source *from; /* of fdsl_rows_begin(); NULL: open what `config` or `images` describes */
    struct fdsl_select_config select;
    struct images_wish images; /* of fdsl_images_begin(); if source->generates is set */
    struct background background;
};

const char *fdsl_warnings(void)
{
    return status_warnings();
}

enum status lib_check_seconds(const char *name, double seconds)
{
    if (!(seconds >= 0 && seconds <= 1e6)) /* rejects NaN, too */
        return status_set(STATUS_USAGE, "%s: %g is out of range; it must be 0 to 1e6", name, seconds);
    return STATUS_OK;
}

enum status lib_check_process(const char *name, pid_t process)
{
    return process == getpid()
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "%s: it was opened before fork(); open another one in this process", name);
}

enum fdsl_status fdsl_source_config_init(struct fdsl_source_config *config, size_t size)
{
    static const struct fdsl_source_config defaults = {.size = sizeof defaults, .kind = "auto"};
    return lib_set_config(config, size, &defaults, sizeof defaults);
}

/* Ignores NULL. */
static void free_opening(struct opening *opening)
{
    if (!opening)
        return;
    lib_background_end(&opening->background);
    for (size_t i = 0; i < COUNT_OF(opening->texts); i++)
        free(opening->texts[i]);
    free(opening);
}

void lib_source_release(struct fdsl_source *source)
{
    if (atomic_fetch_sub(&source->users, 1) > 1)
        return;
    atomic_store(&source->cancel.set, true);
    struct fdsl_source *from = source->opening ? source->opening->from : NULL;
    free_opening(source->opening);
    if (from)
        lib_source_release(from);
    images_free(&source->images);
    rows_free(source->rows);
    mix_free(source->mix);
    dataset_close(&source->dataset);
    free(source->path);
    free(source->cache_dir);
    free(source->labels);
    free(source);
}

void fdsl_source_close(struct fdsl_source *source)
{
    if (source && source->process == getpid())
        lib_source_release(source);
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

/* Refuses a folder of kind "folder" that has no label at all. */
static enum status check_class_folders(const struct fdsl_source *source, const char *kind)
{
    const struct dataset *dataset = &source->dataset;
    bool labelled = strcmp(kind, "folder") != 0;
    for (uint32_t i = 0; !labelled && i < dataset->sample_count; i++)
        labelled = dataset->samples[i].rule != NULL;
    return labelled
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "path: %s has no class folders; move the images of each class into a folder: "
                            "%s/CLASS/IMAGE",
                            dataset->path, dataset->path);
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
    self->labels = config->labels ? strdup(config->labels) : NULL;
    TRY(ALLOCATED(self->path && (self->cache_dir || !config->cache_dir) && (self->labels || !config->labels),
                  "out of memory"));
    self->remote = (struct remote_options){.option = "path",
                                           .cache_dir = self->cache_dir,
                                           .cache_bytes = config->cache_bytes,
                                           .cancel = &self->cancel,
                                           .prepare = late_open};
    TRY(members_parse(config->image, config->label, NULL, &members));
    TRY(members_take_table(self->labels, config->label, &members));
    TRY(dataset_find(self->path, false, false, &members, &self->remote, &self->dataset));
    TRY(check_kind(self, config->kind));
    self->dataset.incomplete =
        true; /* fdsl_stream_open() decides about samples without an image or a label */
    self->dataset.needs_labels = true;
    TRY(dataset_check(self->path, &self->dataset));
    TRY(check_class_folders(self, config->kind));
    if (config->cache_dir && !dataset_uses_cache(&self->dataset))
        return status_set(STATUS_USAGE,
                          "cache_dir: it is for data at a URL and for shards that are compressed, but %s is "
                          "neither; leave it out",
                          self->dataset.path);
    if (self->dataset.sample_count >= LIB_SAMPLES_MAX)
        return status_set(STATUS_TOO_LARGE, "path: %s has more than %u samples", self->dataset.path,
                          LIB_SAMPLES_MAX - 1);
    self->class_names = dataset_class_names(&self->dataset, &self->classes);
    self->hash = stream_state_hash(&self->dataset);
    return STATUS_OK;
}

/* ---- Opening ---- */

enum status lib_source_new(const void *config, size_t size, struct fdsl_source **source)
{
    TRY(lib_check_given("source", source));
    *source = NULL;
    TRY(lib_check_struct("config", config, size));
    struct fdsl_source *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    self->dataset.directory = -1;
    self->users = 1;
    self->process = getpid();
    *source = self;
    return STATUS_OK;
}

enum fdsl_status lib_source_end(enum status status, struct fdsl_source **source)
{
    const enum fdsl_status result = lib_relay(status);
    if (status != STATUS_OK && source && *source) {
        lib_source_release(*source);
        *source = NULL;
    }
    return result;
}

static enum status enter(struct environment *before)
{
    status_forget_warnings();
    return lib_enter(before);
}

/* Opens a data set in the environment that the library needs. */
static enum status enter_and_open(const struct fdsl_source_config *config, struct fdsl_source *self)
{
    struct environment before;
    enum status status = enter(&before);
    if (status == STATUS_OK)
        status = open_source(config, self);
    lib_leave(&before);
    return status;
}

enum fdsl_status fdsl_source_open(const struct fdsl_source_config *config, struct fdsl_source **source)
{
    enum status status = lib_source_new(config, sizeof *config, source);
    if (status == STATUS_OK)
        status = enter_and_open(config, *source);
    return lib_source_end(status, source);
}

struct images_opening {
    const struct images_wish *wish;
    struct fdsl_source *source;
};

static enum status open_images(void *context)
{
    const struct images_opening *opening = context;
    const struct images_wish *wish = opening->wish;
    published_cancel_by(&opening->source->cancel);
    const enum status status = images_open(&wish->config, wish->count, wish->fresh, &opening->source->images);
    published_cancel_by(NULL);
    return status;
}

/* Opens generated images in the environment that the library needs. Reading classes can take a while, on all
 * threads. */
static enum status enter_and_open_images(const struct images_wish *wish, struct fdsl_source *self)
{
    struct environment before;
    struct images_opening opening = {wish, self};
    int threads = 1;
    enum status status = enter(&before);
    if (status == STATUS_OK)
        status = lib_threads("threads", 0, &threads);
    if (status == STATUS_OK)
        status = lib_on_threads(threads, open_images, &opening);
    self->hash = self->images.hash;
    lib_leave(&before);
    return status;
}

enum fdsl_status fdsl_images_open(const struct fdsl_config *config, uint64_t count, int fresh,
                                  struct fdsl_source **source)
{
    enum status status = lib_source_new(config, sizeof *config, source);
    if (status != STATUS_OK)
        return lib_source_end(status, source);
    (*source)->generates = true;
    return lib_source_end(enter_and_open_images(&(struct images_wish){*config, count, fresh}, *source),
                          source);
}

enum fdsl_status fdsl_rows_open(const struct fdsl_rows_config *config, struct fdsl_source **source)
{
    struct environment before;
    enum status status = lib_source_new(config, sizeof *config, source);
    if (status != STATUS_OK)
        return lib_source_end(status, source);
    struct fdsl_source *self = *source;
    status = enter(&before);
    if (status == STATUS_OK)
        status = rows_open(config, &self->rows);
    self->hash = status == STATUS_OK ? rows_hash(self->rows) : 0;
    lib_leave(&before);
    return lib_source_end(status, source);
}

/* Returns STATUS_OK if `from` is an open source of rows. */
static enum status check_rows(const struct fdsl_source *from)
{
    TRY(lib_check_given("from", from));
    TRY(lib_check_process("from", from->process));
    if (from->opening)
        return status_set(STATUS_USAGE,
                          "from: it is not open; call fdsl_source_wait() until it returns FDSL_OK");
    return from->rows ? STATUS_OK
                      : status_set(STATUS_USAGE, "from: it has images; open rows with fdsl_rows_open()");
}

/* Selects rows in the environment that the library needs. */
static enum status enter_and_select(const struct fdsl_source *from, const struct fdsl_select_config *config,
                                    struct fdsl_source *self)
{
    struct environment before;
    enum status status = enter(&before);
    if (status == STATUS_OK)
        status = rows_select(from->rows, config, &self->cancel.set, &self->rows);
    self->hash = status == STATUS_OK ? rows_hash(self->rows) : 0;
    lib_leave(&before);
    return status;
}

enum fdsl_status fdsl_rows_select(struct fdsl_source *from, const struct fdsl_select_config *config,
                                  struct fdsl_source **source)
{
    enum status status = lib_source_new(config, sizeof *config, source);
    if (status == STATUS_OK)
        status = check_rows(from);
    if (status != STATUS_OK)
        return lib_source_end(status, source);
    atomic_fetch_add(&from->users, 1); /* another thread may close it */
    status = enter_and_select(from, config, *source);
    lib_source_release(from);
    return lib_source_end(status, source);
}

/* ---- Opening in a thread ---- */

static void *work_in_thread(void *context)
{
    struct background *background = context;
    const struct failure failure = status_save(background->work(background->context));
    pthread_mutex_lock(&background->lock);
    background->failure = failure;
    snprintf(background->warnings, sizeof background->warnings, "%s", status_warnings());
    background->done = true;
    pthread_cond_signal(&background->changed);
    pthread_mutex_unlock(&background->lock);
    return NULL;
}

enum status lib_background_start(struct background *background, enum status (*work)(void *context),
                                 void *context)
{
    pthread_condattr_t attributes;
    *background = (struct background){.work = work, .context = context};
    pthread_mutex_init(&background->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&background->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    const int error = parallel_start(&background->thread, work_in_thread, background);
    background->joined = error != 0;
    return error == 0 ? STATUS_OK
                      : status_set(STATUS_EXHAUSTED, "cannot start a thread: %s", strerror(error));
}

static void join(struct background *background)
{
    if (!background->joined)
        pthread_join(background->thread, NULL);
    background->joined = true;
}

void lib_background_end(struct background *background)
{
    if (!background->work)
        return;
    join(background);
    pthread_mutex_destroy(&background->lock);
    pthread_cond_destroy(&background->changed);
    *background = (struct background){0};
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

bool lib_background_wait(struct background *background, double seconds, enum status *status)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)seconds;
    until.tv_nsec += (long)((seconds - floor(seconds)) * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&background->lock);
    while (!background->done &&
           pthread_cond_timedwait(&background->changed, &background->lock, &until) != ETIMEDOUT) {
    }
    const bool done = background->done;
    pthread_mutex_unlock(&background->lock);
    if (!done)
        return false;
    join(background);
    repeat_warnings(background->warnings);
    *status = background->failure.status == STATUS_OK ? STATUS_OK : status_restore(&background->failure);
    return true;
}

/* Opens what the caller of fdsl_source_begin(), fdsl_images_begin() or fdsl_rows_begin() wants. */
static enum status open_in_thread(void *context)
{
    struct fdsl_source *self = context;
    struct opening *opening = self->opening;
    return self->generates ? enter_and_open_images(&opening->images, self)
           : opening->from ? enter_and_select(opening->from, &opening->select, self)
                           : enter_and_open(&opening->config, self);
}

enum status lib_copy_text(const char **text, char **copy)
{
    if (!*text)
        return STATUS_OK;
    *text = *copy = strdup(*text);
    return ALLOCATED(*copy, "out of memory");
}

static enum status copy_config(const struct fdsl_source_config *config, struct opening *opening)
{
    struct fdsl_source_config *copy = &opening->config;
    const char **const fields[] = {&copy->path,  &copy->kind,      &copy->image,
                                   &copy->label, &copy->cache_dir, &copy->labels};
    *copy = *config;
    for (size_t i = 0; i < COUNT_OF(fields); i++)
        TRY(lib_copy_text(fields[i], &opening->texts[i]));
    return STATUS_OK;
}

static enum status new_opening(struct fdsl_source *self)
{
    self->opening = calloc(1, sizeof *self->opening);
    return ALLOCATED(self->opening, "out of memory");
}

static enum status start_opening(struct fdsl_source *self)
{
    return lib_background_start(&self->opening->background, open_in_thread, self);
}

enum fdsl_status fdsl_source_begin(const struct fdsl_source_config *config, struct fdsl_source **source)
{
    enum status status = lib_source_new(config, sizeof *config, source);
    if (status == STATUS_OK)
        status = new_opening(*source);
    if (status == STATUS_OK)
        status = copy_config(config, (*source)->opening);
    if (status == STATUS_OK)
        status = start_opening(*source);
    return lib_source_end(status, source);
}

enum fdsl_status fdsl_images_begin(const struct fdsl_config *config, uint64_t count, int fresh,
                                   struct fdsl_source **source)
{
    enum status status = lib_source_new(config, sizeof *config, source);
    if (status == STATUS_OK)
        status = new_opening(*source);
    if (status != STATUS_OK)
        return lib_source_end(status, source);
    (*source)->generates = true;
    (*source)->opening->images = (struct images_wish){*config, count, fresh};
    return lib_source_end(start_opening(*source), source);
}

enum fdsl_status fdsl_rows_begin(struct fdsl_source *from, const struct fdsl_select_config *config,
                                 struct fdsl_source **source)
{
    enum status status = lib_source_new(config, sizeof *config, source);
    if (status == STATUS_OK)
        status = check_rows(from);
    if (status == STATUS_OK)
        status = new_opening(*source);
    if (status != STATUS_OK)
        return lib_source_end(status, source);
    atomic_fetch_add(&from->users, 1);
    (*source)->opening->from = from;
    (*source)->opening->select = *config;
    return lib_source_end(start_opening(*source), source);
}

enum fdsl_status fdsl_source_wait(struct fdsl_source *source, double seconds)
{
    enum status status = lib_check_given("source", source);
    if (status == STATUS_OK)
        status = lib_check_process("source", source->process);
    if (status == STATUS_OK)
        status = lib_check_seconds("seconds", seconds);
    if (status != STATUS_OK)
        return lib_relay(status);
    struct opening *opening = source->opening;
    if (!opening)
        return FDSL_OK;
    if (!lib_background_wait(&opening->background, seconds, &status))
        return FDSL_PENDING;
    if (status != STATUS_OK)
        return lib_relay(status);
    struct fdsl_source *from = opening->from;
    source->opening = NULL;
    free_opening(opening);
    if (from)
        lib_source_release(from);
    return FDSL_OK;
}

enum status lib_source_check(const struct fdsl_source *source)
{
    TRY(lib_check_given("source", source));
    return source->opening ? status_set(STATUS_USAGE, "source: it is not open; call fdsl_source_wait() until "
                                                      "it returns FDSL_OK")
                           : STATUS_OK;
}

uint32_t lib_source_samples(const struct fdsl_source *source)
{
    return source->generates ? source->images.count
           : source->rows    ? rows_count(source->rows)
           : source->mix     ? source->mix->positions
                             : source->dataset.sample_count;
}

enum fdsl_status fdsl_source_describe(const struct fdsl_source *source, struct fdsl_source_info *info)
{
    enum status status = lib_source_check(source);
    if (status == STATUS_OK)
        status = lib_check_struct("info", info, sizeof *info);
    if (status != STATUS_OK)
        return lib_relay(status);
    *info = (struct fdsl_source_info){.size = sizeof *info,
                                      .samples = lib_source_samples(source),
                                      .bytes = source->dataset.bytes,
                                      .classes = source->classes,
                                      .files = source->dataset.file_count,
                                      .shards = source->dataset.shards,
                                      .hash = source->hash};
    if (source->rows)
        rows_describe(source->rows, info);
    return FDSL_OK;
}

const char *fdsl_source_class(const struct fdsl_source *source, uint32_t label)
{
    return source && !source->opening && label < source->classes ? source->class_names[label] : NULL;
}
