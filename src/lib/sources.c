/* Sources of streams: opens, describes and closes them. Data sets can be opened in a thread, so that callers
 * can handle signals. */
#include "lib/sources.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/parallel.h"
#include "data/stream_state.h"
#include "synth/published.h"

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
