/* Implements the functions of fdsl.h. They check their arguments, call the generator, and restore the
 * caller's environment: locale, floating point and current device. */
#include "lib/fdsl.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/generator.h"
#include "core/parallel.h"
#include "core/text.h"
#include "lib/call.h"
#include "machine/device.h"
#include "synth/input.h"
#include "machine/host.h"
#include "synth/class.h"
#include "synth/ifs_classes.h"

struct fdsl_generator {
    struct generator *generator;
    struct synth synth;
    struct pool *pool; /* CPU threads; NULL if the variant uses only the caller's thread */
    int device;
    pid_t process;                                  /* the process that opened the generator */
    struct fdsl_class_table table;                  /* of fdsl_get_classes() */
    const char *parameters[FORMULA_PARAMETERS_MAX]; /* its names */
    uint32_t *ids;
    double *values;
};

/* ---- Errors ---- */

static _Thread_local char error_text[1024];

/* Messages name fields (OPTION_OR_FIELD), and nothing is printed. */
const bool status_in_library = true;

enum fdsl_status lib_relay(enum status status)
{
    if (status != STATUS_OK)
        snprintf(error_text, sizeof error_text, "%s", status_text());
    return (enum fdsl_status)status_exit(status);
}

enum fdsl_status lib_invalid(const char *text)
{
    return lib_relay(status_set(STATUS_USAGE, "%s", text));
}

const char *fdsl_error(void)
{
    return error_text;
}

const char *fdsl_version(void)
{
    return FDSL_VERSION;
}

/* ---- The caller's environment ---- */

/* Placed before the declaration of a device number. Makes this device current again at the end of the scope.
 */
#define RESTORED CLOSED_BY(restore) __attribute__((unused))
static void restore(const int *device)
{
    device_restore(*device);
}

int fdsl_cuda_devices(void)
{
    RESTORED int before = device_current();
    int count = device_count();
    if (count == 0)
        lib_relay(device_probe(0));
    return count;
}

enum status lib_enter(struct environment *before)
{
    *before = (struct environment){.device = device_current()};
    before->c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    TRY(ALLOCATED(before->c_locale, "out of memory"));
    before->locale = uselocale(before->c_locale);
    fegetenv(&before->floating_point);
    fesetenv(FE_DFL_ENV);
    return STATUS_OK;
}

void lib_leave(struct environment *before)
{
    if (!before->c_locale)
        return;
    fesetenv(&before->floating_point);
    uselocale(before->locale);
    freelocale(before->c_locale);
    device_restore(before->device);
}

/* ---- The CPU threads of a generator ---- */

/* Implements core/parallel.h. Threads sleep between calls, block all signals, and belong to one generator, so
 * generators do not disturb each other or the OpenMP runtime of the process. */

struct pool_thread {
    struct pool *pool;
    int number;
    pthread_t id;
};

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    int threads;  /* including the caller's */
    int started;  /* number of threads in `members` */
    int busy;     /* threads in `members` that have not finished the current job */
    uint64_t job; /* number of the current job */
    bool closing;
    parallel_task *task;
    void *context;
    uint64_t count;
    atomic_uint_fast64_t next; /* number of the first task that no thread has taken */
    struct pool_thread members[];
};

static _Thread_local struct pool *current; /* the pool that parallel_for() uses in this thread */

static void work(struct pool *pool, int thread)
{
    uint64_t task;
    while ((task = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed)) < pool->count)
        pool->task(pool->context, task, thread);
}

static void *run_thread(void *argument)
{
    struct pool_thread *self = argument;
    struct pool *pool = self->pool;
    uint64_t done = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->job == done && !pool->closing)
            pthread_cond_wait(&pool->begin, &pool->lock);
        if (pool->closing)
            break;
        done = pool->job;
        pthread_mutex_unlock(&pool->lock);
        work(pool, self->number);
        pthread_mutex_lock(&pool->lock);
        if (--pool->busy == 0)
            pthread_cond_signal(&pool->end);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Starts the threads with all signals blocked, so that only the caller's threads receive signals. */
static enum status start_threads(struct pool *pool)
{
    sigset_t all, before;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool->started < pool->threads - 1 && error == 0; pool->started += error == 0) {
        struct pool_thread *member = &pool->members[pool->started];
        *member = (struct pool_thread){.pool = pool, .number = pool->started + 1};
        error = pthread_create(&member->id, NULL, run_thread, member);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "cannot start %d threads: %s; lower threads", pool->threads,
                      strerror(error));
}

static void pool_close(struct pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    pthread_cond_broadcast(&pool->begin);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++)
        pthread_join(pool->members[i].id, NULL);
    pthread_cond_destroy(&pool->end);
    pthread_cond_destroy(&pool->begin);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* Starts threads - 1 threads; the caller of parallel_for() is the remaining thread. The caller closes the
 * pool, in the process that opened it. */
static enum status pool_open(int threads, struct pool **pool)
{
    struct pool *self = calloc(1, sizeof *self + (size_t)threads * sizeof *self->members);
    TRY(ALLOCATED(self, "out of memory"));
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->begin, NULL);
    pthread_cond_init(&self->end, NULL);
    self->threads = threads;
    enum status status = start_threads(self);
    if (status != STATUS_OK)
        pool_close(self);
    else
        *pool = self;
    return status;
}

/* `threads` is the size of the pool, or 1 if the variant uses no pool. */
void parallel_for(int threads, uint64_t count, parallel_task *task, void *context)
{
    struct pool *pool = current;
    if (!pool || threads == 1 || count <= 1) {
        for (uint64_t i = 0; i < count; i++)
            task(context, i, 0);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->task = task;
    pool->context = context;
    pool->count = count;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    pool->busy = pool->started;
    pool->job++;
    pthread_cond_broadcast(&pool->begin);
    pthread_mutex_unlock(&pool->lock);
    work(pool, 0);
    pthread_mutex_lock(&pool->lock);
    while (pool->busy > 0)
        pthread_cond_wait(&pool->end, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

int parallel_threads(void)
{
    return current ? current->threads : 1;
}

/* ---- From a configuration to the input of a variant ---- */

enum status lib_check_count(const char *field, uint32_t value, uint32_t least, uint32_t most)
{
    if (value >= least && value <= most)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "%s: %u is out of range; it must be %u to %u", field, value, least, most);
}

enum status lib_find_name(const char *field, const char *text, const char *const *names, int *index)
{
    char all[256];
    size_t count = 0;
    if (!text)
        return status_set(STATUS_USAGE, "%s: it is NULL; call fdsl_config_init() first", field);
    for (; names[count]; count++)
        if (strcmp(text, names[count]) == 0) {
            *index = (int)count;
            return STATUS_OK;
        }
    list_words(all, sizeof all, names, count);
    const char *nearest = nearest_word(text, names, count);
    return status_set(STATUS_USAGE, "%s: '%.80s' is unknown; valid values: %s%s%s%s", field, text, all,
                      nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
}

static struct class_row class_of(const struct formula *formula, const struct fdsl_class *given)
{
    const struct {
        const char *name;
        double value;
    } values[] = {
        {"vertices", given->vertices},
        {"orbits", given->orbits},
        {"oval_x", (double)given->oval_x},
        {"oval_y", (double)given->oval_y},
        {"freq1", given->freq1},
        {"freq2", given->freq2},
        {"noise", (double)given->noise},
        {"radius", given->radius},
        {"line_width", (double)given->line_width},
    };
    struct class_row row = {.id = given->id};
    for (size_t i = 0; i < COUNT_OF(values); i++)
        (void)formula_set(formula, &row, values[i].name, values[i].value);
    return row;
}

static enum status copy_classes(const struct fdsl_config *config, struct synth *synth)
{
    const struct formula *formula = formulas[synth->formula];
    TRY(lib_check_count("class_count", config->class_count, 1, CLASS_COUNT_MAX));
    synth->class_count = config->class_count;
    synth->rows = calloc(config->class_count, sizeof *synth->rows);
    TRY(ALLOCATED(synth->rows, "out of memory for %u classes", config->class_count));
    for (uint32_t c = 0; c < config->class_count; c++) {
        synth->rows[c] = class_of(formula, &config->class_list[c]);
        TRY(status_prefix(class_check(formula, &synth->rows[c]), "class_list[%u]", c));
    }
    return status_prefix(class_check_unique(synth->rows, synth->class_count), "class_list");
}

/* Copies the rows of a class table, after checking that it is of the formula. */
static enum status copy_table(const struct fdsl_class_table *table, struct synth *synth)
{
    const struct formula *formula = formulas[synth->formula];
    TRY(lib_check_struct("class_table", table, sizeof *table));
    if (!table->formula || strcmp(table->formula, formula->name) != 0)
        return status_set(STATUS_USAGE, "class_table: its formula is '%.80s', but formula is '%s'",
                          table->formula ? table->formula : "NULL", formula->name);
    if (table->parameters != formula->parameter_count)
        return status_set(STATUS_USAGE, "class_table: it has %u parameters; the formula %s has %zu",
                          table->parameters, formula->name, formula->parameter_count);
    for (size_t i = 0; table->names && i < formula->parameter_count; i++)
        if (!table->names[i] || strcmp(table->names[i], formula->parameters[i].name) != 0)
            return status_set(STATUS_USAGE, "class_table: name %zu is '%.80s'; it must be '%s'", i,
                              table->names[i] ? table->names[i] : "NULL", formula->parameters[i].name);
    if (!table->ids || !table->values)
        return status_set(STATUS_USAGE, "class_table: %s is NULL", table->ids ? "values" : "ids");
    TRY(lib_check_count("class_table->count", table->count, 1, CLASS_COUNT_MAX));
    synth->class_count = table->count;
    synth->rows = calloc(table->count, sizeof *synth->rows);
    TRY(ALLOCATED(synth->rows, "out of memory for %u classes", table->count));
    for (uint32_t c = 0; c < table->count; c++) {
        synth->rows[c].id = table->ids[c];
        memcpy(synth->rows[c].value, table->values + (size_t)c * table->parameters,
               table->parameters * sizeof *table->values);
        TRY(status_prefix(class_check(formula, &synth->rows[c]), "class_table"));
    }
    return status_prefix(class_check_unique(synth->rows, synth->class_count), "class_table");
}

static enum status get_classes(const struct fdsl_config *config, uint32_t classes, struct synth *synth)
{
    size_t count = 0;
    if (config->class_table && (config->class_list || config->class_file))
        return status_set(STATUS_USAGE,
                          "class_table: class_list or class_file already gives the classes; set only one of "
                          "them");
    if (config->class_table)
        return copy_table(config->class_table, synth);
    if (config->class_list && config->class_file)
        return status_set(STATUS_USAGE,
                          "class_file: class_list already gives the classes; set only one of them");
    if (config->class_list)
        return copy_classes(config, synth);
    if (config->class_count)
        return status_set(STATUS_USAGE, "class_count: it is %u, but class_list is NULL", config->class_count);
    if (config->class_file) {
        enum status status = class_read(config->class_file, formulas[synth->formula], &synth->rows, &count);
        synth->class_count = (uint32_t)count;
        return status_prefix(status, "class_file");
    }
    return synth_draw_classes(synth, config->preset_file,
                              config->preset ? config->preset : formula_names[synth->formula], classes);
}

static enum status check_scale(const char *field, const double *values, uint32_t channels, double least,
                               double most)
{
    for (uint32_t c = 0; c < channels; c++)
        if (!(values[c] >= least && values[c] <= most)) /* rejects NaN, too */
            return status_set(STATUS_USAGE, "%s[%u]: %g is out of range; it must be %g to %g", field, c,
                              values[c], least, most);
    return STATUS_OK;
}

/* Refuses a `mean` or `std` other than the defaults: they apply only to floating-point types. */
static enum status check_no_scale(const double *mean, const double *std, uint32_t channels)
{
    for (uint32_t c = 0; c < channels; c++)
        if (mean[c] != 0 || std[c] != 1)
            return status_set(STATUS_USAGE,
                              "%s[%u]: u8 images are not normalised; choose a floating-point dtype",
                              mean[c] != 0 ? "mean" : "std", c);
    return STATUS_OK;
}

enum status lib_check_scale(const double *mean, const double *std, uint32_t channels, bool bytes)
{
    TRY(check_scale("mean", mean, channels, -OUTPUT_MEAN_MAX, OUTPUT_MEAN_MAX));
    TRY(check_scale("std", std, channels, OUTPUT_DEVIATION_MIN, OUTPUT_DEVIATION_MAX));
    return bytes ? check_no_scale(mean, std, channels) : STATUS_OK;
}

/* Sets the output; synth->res is the side of the canvas. */
static enum status get_output(const struct fdsl_config *config, struct synth *synth)
{
    static const char *const fits[] = {"resize", "crop", NULL};  /* enum output_fit, without OUTPUT_WHOLE */
    static const char *const layouts[] = {"nchw", "nhwc", NULL}; /* enum output_layout */
    const uint32_t res = synth->res, out_res = config->out_res ? config->out_res : res;
    int fit, layout, dtype;
    TRY(lib_check_count("out_res", out_res, 1, OUTPUT_RES_MAX));
    TRY(lib_find_name("fit", config->fit, fits, &fit));
    TRY(lib_find_name("layout", config->layout, layouts, &layout));
    TRY(lib_find_name("dtype", config->dtype, dtype_names, &dtype));
    const uint32_t channels = synth_channels(synth, config->channels);
    if (channels != 1 && channels != 3)
        return status_set(STATUS_USAGE, "channels: %u is neither 1 nor 3", channels);
    if (synth_is_color(synth) && channels != COLOR_CHANNELS)
        return status_set(STATUS_USAGE, "channels: the images of the formula %s have colours; set it to 3",
                          formula_names[synth->formula]);
    if (fit + 1 == OUTPUT_CROP && out_res > res)
        return status_set(STATUS_USAGE, "out_res: %u is larger than res (%u), so it cannot be cropped",
                          out_res, res);
    TRY(lib_check_scale(config->mean, config->std, channels, dtype == DTYPE_U8));
    synth->output = (struct synth_output){.type = (enum dtype)dtype,
                                          .layout = (enum output_layout)layout,
                                          .fit = out_res == res ? OUTPUT_WHOLE : (enum output_fit)(fit + 1),
                                          .res = out_res,
                                          .channels = channels,
                                          .color = synth_is_color(synth)};
    double mean[OUTPUT_CHANNELS_MAX] = {0}, deviation[OUTPUT_CHANNELS_MAX] = {1, 1, 1};
    memcpy(mean, config->mean, channels * sizeof *mean);
    memcpy(deviation, config->std, channels * sizeof *deviation);
    output_set_scale(&synth->output, res, mean, deviation);
    return STATUS_OK;
}

#define CLASSES 1000 /* default number of classes of formulas with a benchmark class */

enum status lib_images_input(const struct fdsl_config *config, struct synth *synth)
{
    static const char *const randoms[] = {"philox", "published", NULL};
    static const char *const draws[] = {"auto", IFS_DRAW_NAMES, NULL};
    const char *names[FORMULA_COUNT + 2] = {"auto"};
    int formula, random, draw;
    for (size_t i = 0; i < FORMULA_COUNT; i++)
        names[i + 1] = formula_names[i];
    TRY(lib_find_name("formula", config->formula, names, &formula));
    TRY(lib_find_name("random", config->random, randoms, &random));
    TRY(lib_find_name("draw", config->draw, draws, &draw));
    if (!(config->min_lit >= 0 && config->min_lit <= 0.5)) /* rejects NaN, too */
        return status_set(STATUS_USAGE, "min_lit: %g is out of range; it must be 0 to 0.5", config->min_lit);
    if (random && config->seed)
        return status_set(STATUS_USAGE, "seed: it has no effect on published images; leave it at 0");
    TRY(lib_check_count("res", config->res, 0, SYNTH_RES_MAX));
    TRY(lib_check_count("classes", config->classes, 0, CLASS_COUNT_MAX));
    struct synth_wish wish = {
        .formula = formula - 1,
        .draw = draw - 1,
        .preset = config->preset,
        .preset_file = config->preset_file,
        .class_file = config->class_table || config->class_list ? NULL : config->class_file,
        .listed = config->class_table || config->class_list || config->class_file,
        .published = random != 0,
        .classes = config->classes,
        .res = config->res,
        .min_lit = config->min_lit,
        .cache_dir = config->cache_dir,
    };
    TRY(synth_choose(synth, &wish));
    TRY(lib_check_count("batch", config->batch, 1, 1u << 24));
    synth->res = wish.res;
    synth->seed = config->seed;
    synth->batch = synth->stride = config->batch;
    TRY(get_output(config, synth));
    TRY(get_classes(config, wish.classes ? wish.classes : CLASSES, synth));
    return synth_fill_tables(synth);
}

extern const struct variant variant_naive, variant_omp, variant_fused, variant_bat, variant_gbase;

#ifdef HAVE_CUDA
#define CUDA_VARIANT(variant) &variant
#else
#define CUDA_VARIANT(variant) NULL
#endif

/* Names the argument if a device does not exist, or the build has no CUDA. */
static enum status of_device(enum status status)
{
    return status == STATUS_UNAVAILABLE ? status_prefix(status, "device") : status;
}

/* All generators. "auto" selects the first entry for the kind of device in the configuration. */
static const struct {
    const char *name;
    bool on_device, host_numbers;  /* host_numbers: the host must know the image numbers */
    const struct variant *variant; /* NULL: not in this build */
} generators[] = {
    {"omp", false, true, &variant_omp},
    {"naive", false, true, &variant_naive},
    {"fused", true, false, CUDA_VARIANT(variant_fused)},
    {"bat", true, true, CUDA_VARIANT(variant_bat)},
    {"gbase", true, true, CUDA_VARIANT(variant_gbase)},
};

enum status lib_find_generator(const char *name, int *index)
{
    const char *names[COUNT_OF(generators) + 2] = {"auto"};
    for (size_t i = 0; i < COUNT_OF(generators); i++)
        names[i + 1] = generators[i].name;
    return lib_find_name("generator", name, names, index);
}

/* Finds the variant of a generator, by its index of lib_find_generator(), for a device. */
static enum status find_variant(int index, int device, const struct variant **variant)
{
    const bool on_device = device >= 0;
    size_t chosen = index == 0 ? 0 : (size_t)index - 1;
    while (index == 0 && generators[chosen].on_device != on_device)
        chosen++;
    if (generators[chosen].on_device != on_device)
        return on_device
                   ? status_set(STATUS_USAGE,
                                "generator: '%s' works on the CPU, but device is %d; set it to FDSL_CPU",
                                generators[chosen].name, device)
                   : status_set(STATUS_USAGE,
                                "generator: '%s' works on CUDA devices, but device is FDSL_CPU; set it to 0 "
                                "or another CUDA device",
                                generators[chosen].name);
    *variant = generators[chosen].variant;
    return *variant ? STATUS_OK : of_device(device_probe(device));
}

enum status lib_threads(const char *field, int given, int *threads)
{
    cpu_set_t allowed;
    uint64_t requested = 0;
    if (given < 0 || given > THREADS_MAX)
        return status_set(STATUS_USAGE, "%s: %d is out of range; it must be 0 to %d", field, given,
                          THREADS_MAX);
    *threads = given;
    if (*threads == 0 && threads_requested(&requested))
        *threads = (int)requested;
    if (*threads == 0)
        *threads = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
    return STATUS_OK;
}

/* ---- Opening and closing ---- */

/* Checks the size of a caller's struct. This is the first version of the library, so only one size is valid.
 */
static enum status check_size(const char *name, size_t size, size_t own)
{
    return size == own ? STATUS_OK
                       : status_set(STATUS_USAGE,
                                    "%s->size: it is %zu, but this libfdsl (%s) expects %zu; set it with "
                                    "sizeof, and compile with the fdsl.h of the library",
                                    name, size, FDSL_VERSION, own);
}

enum status lib_check_given(const char *name, const void *pointer)
{
    return pointer ? STATUS_OK : status_set(STATUS_USAGE, "%s: it is NULL", name);
}

enum status lib_check_struct(const char *name, const void *given, size_t own)
{
    TRY(lib_check_given(name, given));
    return check_size(name, *(const size_t *)given, own);
}

enum fdsl_status lib_set_config(void *config, size_t size, const void *defaults, size_t own)
{
    enum status status = lib_check_given("config", config);
    if (status == STATUS_OK)
        status = check_size("config", size, own);
    if (status == STATUS_OK)
        memcpy(config, defaults, own);
    return lib_relay(status);
}

enum status lib_check_flag(const char *name, int value)
{
    return value == 0 || value == 1 ? STATUS_OK
                                    : status_set(STATUS_USAGE, "%s: %d is neither 0 nor 1", name, value);
}

enum fdsl_status fdsl_config_init(struct fdsl_config *config, size_t size)
{
    static const struct fdsl_config defaults = {.size = sizeof defaults,
                                                .formula = "auto",
                                                .fit = "resize",
                                                .layout = "nchw",
                                                .dtype = "u8",
                                                .std = {1, 1, 1},
                                                .generator = "auto",
                                                .device = FDSL_CPU,
                                                .batch = 256,
                                                .random = "philox",
                                                .draw = "auto"};
    return lib_set_config(config, size, &defaults, sizeof defaults);
}

enum status lib_check_device(int device)
{
    if (device >= FDSL_CPU)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "device: %d is neither FDSL_CPU (%d) nor the number of a CUDA device",
                      device, FDSL_CPU);
}

/* Checks a device number and a stream of this device. `name` is the name of the stream argument, for
 * messages. */
static enum status check_stream(int device, const char *name, const void *stream)
{
    TRY(lib_check_device(device));
    return device < 0 && stream ? status_set(STATUS_USAGE, "%s: it must be NULL on the CPU", name)
                                : STATUS_OK;
}

/* Fills self->table. */
static enum status make_table(struct fdsl_generator *self)
{
    const struct synth *synth = &self->synth;
    const struct formula *formula = formulas[synth->formula];
    const size_t parameters = formula->parameter_count;
    self->ids = malloc(synth->class_count * sizeof *self->ids);
    self->values = malloc(synth->class_count * parameters * sizeof *self->values);
    TRY(ALLOCATED(self->ids && self->values, "out of memory for %u classes", synth->class_count));
    for (size_t i = 0; i < parameters; i++)
        self->parameters[i] = formula->parameters[i].name;
    for (uint32_t c = 0; c < synth->class_count; c++) {
        self->ids[c] = synth->rows[c].id;
        memcpy(self->values + c * parameters, synth->rows[c].value, parameters * sizeof *self->values);
    }
    self->table = (struct fdsl_class_table){.size = sizeof self->table,
                                            .formula = formula->name,
                                            .count = synth->class_count,
                                            .parameters = (uint32_t)parameters,
                                            .names = self->parameters,
                                            .ids = self->ids,
                                            .values = self->values};
    return STATUS_OK;
}

struct reading {
    const struct fdsl_config *config;
    struct synth *synth;
};

static enum status read_images(void *context)
{
    const struct reading *reading = context;
    return lib_images_input(reading->config, reading->synth);
}

static enum status open_all(const struct fdsl_config *config, struct fdsl_generator *self)
{
    const struct variant *variant;
    struct generator_request request = {
        .on_device = config->device >= 0, .batch = config->batch, .background = true};
    int index;
    TRY(lib_check_device(config->device));
    TRY(lib_find_generator(config->generator, &index));
    TRY(find_variant(index, config->device, &variant));
    TRY(lib_threads("threads", config->threads, &request.resources.threads));
    request.resources.device = request.on_device ? config->device : 0;
    if (variant->probe) /* only those of devices have one */
        TRY(of_device(variant->probe(&request.resources)));
    TRY(lib_on_threads(request.resources.threads, read_images, &(struct reading){config, &self->synth}));
    TRY(make_table(self));
    TRY(synth_check_cache(&self->synth, variant));
    if (request.on_device)
        TRY(of_device(device_load(config->device)));
    TRY(synth_generator_open(&self->synth, variant, &request, &self->generator));
    return variant->threaded ? pool_open(request.resources.threads, &self->pool) : STATUS_OK;
}

static void close_all(struct fdsl_generator *self)
{
    generator_close(self->generator);
    pool_close(self->pool);
    synth_free(&self->synth);
    free(self->ids);
    free(self->values);
    free(self);
}

enum fdsl_status fdsl_open(const struct fdsl_config *config, struct fdsl_generator **generator)
{
    struct environment before;
    if (!generator)
        return lib_invalid("generator: it is NULL");
    *generator = NULL;
    enum status status = lib_check_struct("config", config, sizeof *config);
    struct fdsl_generator *self = status == STATUS_OK ? calloc(1, sizeof *self) : NULL;
    if (!self)
        return lib_relay(status == STATUS_OK ? status_set(STATUS_EXHAUSTED, "out of memory") : status);
    self->device = config->device;
    self->process = getpid();
    status = lib_enter(&before);
    if (status == STATUS_OK)
        status = open_all(config, self);
    if (status == STATUS_OK)
        *generator = self;
    else
        close_all(self);
    lib_leave(&before);
    return lib_relay(status);
}

/* Frees nothing in a forked child: the threads of the generator do not exist there, and its CUDA context must
 * not be used. */
void fdsl_close(struct fdsl_generator *generator)
{
    if (!generator || generator->process != getpid())
        return;
    bool on_device = generator->device >= 0;
    RESTORED int before = device_current();
    int mode = on_device ? device_relax_capture() : 0;
    close_all(generator);
    if (on_device)
        device_restore_capture(mode);
}

/* ---- Generators of streams ---- */

/* A generator on the host with its own threads. */
struct pooled_generator {
    struct generator generator; /* must be the first member */
    struct generator *inner;
    struct pool *pool; /* NULL if the variant uses only the caller's thread */
};

static enum status pooled_make(struct generator *generator, const struct generator_numbers *numbers,
                               uint32_t count, void *samples, const struct generator_targets *targets,
                               void *stream)
{
    struct pooled_generator *self = (struct pooled_generator *)generator;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    current = self->pool;
    const enum status status = generator_make(self->inner, numbers, count, samples, targets, stream);
    current = NULL;
    fesetenv(&before);
    return status;
}

static uint64_t pooled_memory_bytes(const struct generator *generator)
{
    return generator_memory_bytes(((const struct pooled_generator *)generator)->inner);
}

static void pooled_close(struct generator *generator)
{
    struct pooled_generator *self = (struct pooled_generator *)generator;
    generator_close(self->inner);
    pool_close(self->pool);
    free(self);
}

static const struct generator_type pooled_type = {pooled_make, pooled_memory_bytes, pooled_close};

enum status lib_pooled_open(int threads, struct generator **generator)
{
    struct pooled_generator *self = calloc(1, sizeof *self);
    enum status status = ALLOCATED(self, "out of memory");
    if (status == STATUS_OK) {
        *self = (struct pooled_generator){.generator = {&pooled_type}, .inner = *generator};
        if (threads > 1)
            status = pool_open(threads, &self->pool);
    }
    struct generator *opened = self ? &self->generator : *generator;
    if (status != STATUS_OK) {
        const struct failure failure = status_save(status);
        generator_close(opened);
        *generator = NULL;
        return status_restore(&failure);
    }
    *generator = opened;
    return STATUS_OK;
}

enum status lib_on_threads(int threads, enum status (*work_on)(void *context), void *context)
{
    struct pool *pool = NULL, *const before = current;
    if (threads > 1)
        TRY(pool_open(threads, &pool));
    current = pool;
    const struct failure result = status_save(work_on(context));
    current = before;
    pool_close(pool);
    return result.status == STATUS_OK ? STATUS_OK : status_restore(&result);
}

enum status lib_generator_open(const struct synth *synth, int index, int device, int threads, uint32_t batch,
                               struct generator **generator)
{
    const struct variant *variant;
    struct generator_request request = {.on_device = device >= 0, .batch = batch, .background = true};
    *generator = NULL;
    TRY(find_variant(index, device, &variant));
    TRY(lib_threads("num_threads", threads, &request.resources.threads));
    request.resources.device = request.on_device ? device : 0;
    if (variant->probe) /* only those of devices have one */
        TRY(of_device(variant->probe(&request.resources)));
    TRY(synth_check_cache(synth, variant));
    if (request.on_device)
        return synth_generator_open(synth, variant, &request, generator);
    TRY(synth_generator_open(synth, variant, &request, generator));
    return lib_pooled_open(variant->threaded ? request.resources.threads : 1, generator);
}

bool lib_generator_needs_host(int index)
{
    return index > 0 && generators[index - 1].host_numbers;
}

/* ---- Queries ---- */

enum fdsl_status fdsl_describe(const struct fdsl_generator *generator, struct fdsl_layout *layout)
{
    enum status status = lib_check_given("generator", generator);
    if (status == STATUS_OK)
        status = lib_check_struct("layout", layout, sizeof *layout);
    if (status != STATUS_OK)
        return lib_relay(status);
    const struct synth_output *output = &generator->synth.output;
    uint32_t element = (uint32_t)dtype_bytes(output->type), side = output->res, channels = output->channels;
    uint64_t plane = (uint64_t)side * side * element;
    bool planar = output->layout == OUTPUT_NCHW;
    if (planar)
        *layout = (struct fdsl_layout){.shape = {channels, side, side},
                                       .strides_bytes = {plane, (uint64_t)side * element, element}};
    else
        *layout = (struct fdsl_layout){
            .shape = {side, side, channels},
            .strides_bytes = {(uint64_t)side * channels * element, (uint64_t)channels * element, element}};
    layout->size = sizeof *layout;
    layout->element_bytes = element;
    layout->image_bytes = plane * channels;
    layout->mask_bytes = synth_mask_bytes(&generator->synth);
    layout->points = (uint32_t)(synth_cloud_bytes(&generator->synth) / (3 * sizeof(float)));
    layout->multi_hot = synth_multi_hot(&generator->synth);
    return FDSL_OK;
}

uint32_t fdsl_classes(const struct fdsl_generator *generator, struct fdsl_class *classes, uint32_t capacity)
{
    if (!generator || (capacity > 0 && !classes)) {
        (void)lib_invalid(generator ? "classes: it is NULL" : "generator: it is NULL");
        return 0;
    }
    uint32_t count = generator->synth.class_count;
    for (uint32_t c = 0; c < count && c < capacity; c++) {
        const struct atom_class *from = &generator->synth.classes[c];
        classes[c] = (struct fdsl_class){.id = from->id,
                                         .vertices = from->vertices,
                                         .orbits = from->orbits,
                                         .oval_x = from->oval_x,
                                         .oval_y = from->oval_y,
                                         .freq1 = from->freq1,
                                         .freq2 = from->freq2,
                                         .noise = from->noise / generator->synth.rules.noise_factor,
                                         .radius = from->radius,
                                         .line_width = from->line_width};
    }
    return count;
}

enum fdsl_status fdsl_get_classes(const struct fdsl_generator *generator, struct fdsl_class_table *table)
{
    enum status status = lib_check_given("generator", generator);
    if (status == STATUS_OK)
        status = lib_check_struct("table", table, sizeof *table);
    if (status == STATUS_OK)
        *table = generator->table;
    return lib_relay(status);
}

struct describing {
    const struct synth *synth;
    struct ifs_report report;
};

static enum status describe_on_threads(void *context)
{
    struct describing *describing = context;
    const struct synth *synth = describing->synth;
    if (synth_is_color(synth))
        return synth_describe_colors(synth, &describing->report);
    return ifs_describe(&synth->ifs, synth->systems, synth->class_count, synth->uniforms, synth->res,
                        &describing->report);
}

static struct fdsl_shares shares_of(const struct ifs_shares *from)
{
    _Static_assert(FDSL_DARKS == IFS_DARKS && FDSL_OBJECTS == IFS_OBJECTS_MAX,
                   "the limits of fdsl.h are those of the report");
    struct fdsl_shares shares = {.mean = from->mean};
    memcpy(shares.quartiles, from->quartiles, sizeof shares.quartiles);
    memcpy(shares.limits, ifs_darks, sizeof shares.limits);
    memcpy(shares.below, from->below, sizeof shares.below);
    return shares;
}

/* Checks the arguments, except `threads`. */
static enum status check_describing(const struct fdsl_generator *generator,
                                    const struct fdsl_fractals *fractals)
{
    TRY(lib_check_given("generator", generator));
    TRY(lib_check_struct("fractals", fractals, sizeof *fractals));
    return synth_is_ifs(&generator->synth) || synth_is_color(&generator->synth)
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "generator: its formula %s draws no fractals of the plane to describe; choose "
                            "fractals such as those of the preset fractaldb-1k",
                            formula_names[generator->synth.formula]);
}

enum fdsl_status fdsl_describe_fractals(const struct fdsl_generator *generator, int threads,
                                        struct fdsl_fractals *fractals)
{
    struct environment before;
    enum status status = check_describing(generator, fractals);
    if (status == STATUS_OK)
        status = lib_threads("threads", threads, &threads);
    if (status != STATUS_OK)
        return lib_relay(status);
    struct describing describing = {.synth = &generator->synth};
    status = lib_enter(&before);
    if (status == STATUS_OK)
        status = lib_on_threads(threads, describe_on_threads, &describing);
    lib_leave(&before);
    const struct ifs_report *report = &describing.report;
    if (status == STATUS_OK)
        *fractals = (struct fdsl_fractals){.size = sizeof *fractals,
                                           .classes = report->classes,
                                           .orbits = report->orbits,
                                           .points = report->points,
                                           .flips = report->flips,
                                           .res = report->res,
                                           .maps = report->maps,
                                           .overflows = report->overflows,
                                           .overflow_classes = report->overflow_classes,
                                           .cells = shares_of(&report->fill),
                                           .set_pixels = shares_of(&report->lit),
                                           .images = report->images,
                                           .shown_least = report->shown_least,
                                           .shown_most = report->shown_most,
                                           .shown_mean = report->shown_mean};
    if (status == STATUS_OK)
        memcpy(fractals->objects, report->objects, sizeof fractals->objects);
    return lib_relay(status);
}

/* The arguments of fdsl_search_fractals(). */
struct fractal_search {
    struct ifs_search wish;
    struct ifs_found *found;
};

static enum status search_on_threads(void *context)
{
    struct fractal_search *search = context;
    return ifs_search(&search->wish, search->found);
}

static enum status search_fractals(const struct ifs_search *wish, double *values)
{
    struct class_row row;
    FREED struct ifs_found *found = malloc(wish->classes * sizeof *found);
    TRY(ALLOCATED(found, "out of memory for %u classes", wish->classes));
    TRY(lib_on_threads(wish->threads, search_on_threads, &(struct fractal_search){*wish, found}));
    for (uint32_t c = 0; c < wish->classes; c++) {
        ifs_row(&found[c].system, &row);
        memcpy(values + (size_t)c * IFS_PARAMETERS, row.value, IFS_PARAMETERS * sizeof *values);
    }
    return STATUS_OK;
}

enum fdsl_status fdsl_search_fractals(uint32_t seed, double threshold, uint32_t count, int threads,
                                      double *values, uint32_t parameters)
{
    struct ifs_search wish = {.seed = seed, .classes = count, .threshold = threshold, .quiet = true};
    struct environment before;
    if (!values || parameters != IFS_PARAMETERS)
        return lib_invalid(values ? "parameters: it must be 50" : "values: it is NULL");
    enum status status = lib_check_count("count", count, 1, CLASS_COUNT_MAX);
    if (status == STATUS_OK)
        status = lib_threads("threads", threads, &wish.threads);
    if (status != STATUS_OK)
        return lib_relay(status);
    status = lib_enter(&before);
    if (status == STATUS_OK)
        status = search_fractals(&wish, values);
    lib_leave(&before);
    return lib_relay(status);
}

static enum status write_classes(const struct fdsl_class_table *table, const char *path, bool published)
{
    const struct formula *formula = table->formula ? formula_of_preset(table->formula) : NULL;
    struct synth synth = {.formula = formula ? formula->id : FORMULA_UJI};
    if (!formula || strcmp(formula->name, table->formula) != 0)
        return status_set(STATUS_USAGE, "table: its formula '%.80s' is unknown",
                          table->formula ? table->formula : "NULL");
    enum status status = copy_table(table, &synth);
    if (status == STATUS_OK)
        status = published ? published_files_write(path, formula, synth.rows, synth.class_count)
                           : class_write_csv(path, formula, synth.rows, synth.class_count);
    free(synth.rows);
    return status;
}

enum fdsl_status fdsl_write_classes(const struct fdsl_class_table *table, const char *path, int published)
{
    if (!table || !path)
        return lib_invalid(table ? "path: it is NULL" : "table: it is NULL");
    struct environment before;
    enum status status = lib_enter(&before);
    if (status == STATUS_OK)
        status = write_classes(table, path, published != 0);
    lib_leave(&before);
    return lib_relay(status);
}

uint64_t fdsl_memory_bytes(const struct fdsl_generator *generator)
{
    return generator ? generator_memory_bytes(generator->generator) : 0;
}

/* ---- Generating ---- */

#define DEVICE_ALIGNMENT 16

/* The arguments that all fdsl_generate functions share. */
struct call {
    uint32_t count;
    void *images;
    int64_t *labels;
    void *stream;
    uint8_t *masks; /* NULL: not wanted */
    float *points;  /* NULL: not wanted */
};

static enum status check_pointer(const struct fdsl_generator *self, const char *name, const void *pointer,
                                 size_t alignment)
{
    TRY(lib_check_given(name, pointer));
    if ((uintptr_t)pointer % alignment != 0)
        return status_set(STATUS_USAGE, "%s: %p is not aligned to %zu bytes", name, pointer, alignment);
    return self->device >= 0 ? device_check_pointer(self->device, name, pointer) : STATUS_OK;
}

static enum status check_call(const struct fdsl_generator *self, const struct call *call)
{
    bool on_device = self->device >= 0;
    if (call->count < 1 || call->count > self->synth.batch)
        return status_set(STATUS_USAGE,
                          "count: %u is out of range; it must be 1 to the generator's batch, %llu",
                          call->count, (unsigned long long)self->synth.batch);
    TRY(check_stream(self->device, "stream", call->stream));
    TRY(check_pointer(self, "images", call->images,
                      on_device ? DEVICE_ALIGNMENT : dtype_bytes(self->synth.output.type)));
    if (call->labels)
        TRY(check_pointer(self, "labels", call->labels, sizeof *call->labels));
    if (call->masks && !synth_mask_bytes(&self->synth))
        return status_set(STATUS_USAGE, "masks: the formula %s defines no masks; set it to NULL",
                          formula_names[self->synth.formula]);
    if (call->masks)
        TRY(check_pointer(self, "masks", call->masks, on_device ? DEVICE_ALIGNMENT : 1));
    if (call->points && !synth_cloud_bytes(&self->synth))
        return status_set(STATUS_USAGE,
                          "points: the images have no point clouds; set it to NULL, or preset to "
                          "pc-fractaldb-1k");
    return call->points ? check_pointer(self, "points", call->points, sizeof *call->points) : STATUS_OK;
}

static enum status check_first(const char *name, uint64_t first, uint32_t count)
{
    if (first <= UINT64_MAX - (count - 1))
        return STATUS_OK;
    return status_set(STATUS_USAGE, "%s: image %llu and the following %u exceed the last number, 2^64 - 1",
                      name, (unsigned long long)first, count - 1);
}

static enum status generate(struct fdsl_generator *self, const struct generator_numbers *numbers,
                            const struct call *call)
{
    const struct generator_targets targets = {
        .labels = call->labels, .masks = call->masks, .points = call->points};
    if (self->device >= 0)
        return generator_make(self->generator, numbers, call->count, call->images, &targets, call->stream);
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    current = self->pool;
    enum status status = generator_make(self->generator, numbers, call->count, call->images, &targets, NULL);
    current = NULL;
    fesetenv(&before);
    return status;
}

/* Checks the generator and the arguments, and makes the generator's device current. If another device was
 * current, sets `*before` to it, and the caller must later restore it. */
static enum status begin_call(const struct fdsl_generator *self, const struct call *call, int *before)
{
    TRY(lib_check_given("generator", self));
    if (self->process != getpid())
        return status_set(STATUS_FAILED,
                          "generator: it was opened before fork(); open another one in this process (for "
                          "CUDA, start the process with exec or spawn instead of fork)");
    int device = self->device >= 0 ? device_current() : self->device;
    if (device !=
        self->device) { /* usually it is current already, and the caller needs no other call of CUDA */
        *before = device;
        device_restore(self->device);
    }
    return check_call(self, call);
}

/* Generates the images of these numbers: of a list, or consecutive ones. */
static enum fdsl_status generate_numbers(struct fdsl_generator *generator,
                                         const struct generator_numbers *numbers, bool listed,
                                         const struct call *call)
{
    RESTORED int before = -1;
    enum status status = begin_call(generator, call, &before);
    if (status == STATUS_OK)
        status = listed ? check_pointer(generator, "numbers", numbers->list, sizeof *numbers->list)
                        : check_first("first", numbers->first, call->count);
    if (status == STATUS_OK)
        status = generate(generator, numbers, call);
    return lib_relay(status);
}

enum fdsl_status fdsl_generate(struct fdsl_generator *generator, uint64_t first, uint32_t count, void *images,
                               int64_t *labels, void *stream)
{
    const struct call call = {.count = count, .images = images, .labels = labels, .stream = stream};
    const struct generator_numbers numbers = {.first = first};
    return generate_numbers(generator, &numbers, false, &call);
}

enum fdsl_status fdsl_generate_list(struct fdsl_generator *generator, const uint64_t *numbers, uint32_t count,
                                    void *images, int64_t *labels, void *stream)
{
    const struct call call = {.count = count, .images = images, .labels = labels, .stream = stream};
    const struct generator_numbers listed = {.list = numbers};
    return generate_numbers(generator, &listed, true, &call);
}

enum fdsl_status fdsl_generate_targets(struct fdsl_generator *generator, const uint64_t *numbers,
                                       uint64_t first, uint32_t count, void *images,
                                       const struct fdsl_targets *targets, void *stream)
{
    struct call call = {.count = count, .images = images, .stream = stream};
    const struct generator_numbers wanted = {.list = numbers, .first = numbers ? 0 : first};
    const enum status status = targets ? lib_check_struct("targets", targets, sizeof *targets) : STATUS_OK;
    if (status != STATUS_OK)
        return lib_relay(status);
    if (targets) {
        call.labels = targets->labels;
        call.masks = targets->masks;
        call.points = targets->points;
    }
    return generate_numbers(generator, &wanted, numbers != NULL, &call);
}

static enum status generate_next(struct fdsl_generator *self, uint64_t *next, uint64_t step,
                                 const struct call *call)
{
    struct generator_numbers numbers = {.counter = next};
    if (self->device >= 0) {
        TRY(generate(self, &numbers, call));
        return device_add(self->device, next, step, call->stream);
    }
    numbers = (struct generator_numbers){.first = *next};
    TRY(check_first("*next", *next, call->count));
    TRY(generate(self, &numbers, call));
    *next += step;
    return STATUS_OK;
}

enum fdsl_status fdsl_generate_next(struct fdsl_generator *generator, uint64_t *next, uint64_t step,
                                    uint32_t count, void *images, int64_t *labels, void *stream)
{
    const struct call call = {.count = count, .images = images, .labels = labels, .stream = stream};
    RESTORED int before = -1;
    enum status status = begin_call(generator, &call, &before);
    if (status == STATUS_OK)
        status = check_pointer(generator, "next", next, sizeof *next);
    if (status == STATUS_OK)
        status = generate_next(generator, next, step, &call);
    return lib_relay(status);
}

/* ---- Memory and streams ---- */

#define HOST_ALIGNMENT 64

enum fdsl_status fdsl_alloc(int device, size_t bytes, void **memory)
{
    if (!memory)
        return lib_invalid("memory: it is NULL");
    *memory = NULL;
    if (bytes == 0)
        return lib_invalid("bytes: it is 0");
    enum status status = lib_check_device(device);
    if (status == STATUS_OK && device < 0) {
        *memory = bytes > SIZE_MAX - HOST_ALIGNMENT
                      ? NULL
                      : aligned_alloc(HOST_ALIGNMENT,
                                      (bytes + HOST_ALIGNMENT - 1) / HOST_ALIGNMENT * HOST_ALIGNMENT);
        if (!*memory)
            status = status_set(STATUS_EXHAUSTED, "out of memory for %zu bytes", bytes);
    } else if (status == STATUS_OK) {
        RESTORED int before = device_current();
        status = of_device(device_alloc(device, bytes, memory));
    }
    return lib_relay(status);
}

void fdsl_free(int device, void *memory)
{
    if (!memory)
        return;
    if (device < 0) {
        free(memory);
        return;
    }
    RESTORED int before = device_current();
    device_free(device, memory);
}

enum fdsl_status fdsl_copy(int device, void *to, const void *from, size_t bytes, void *stream)
{
    if (!to || !from)
        return lib_invalid(to ? "from: it is NULL" : "to: it is NULL");
    enum status status = check_stream(device, "stream", stream);
    if (status == STATUS_OK && device < 0)
        memmove(to, from, bytes);
    else if (status == STATUS_OK) {
        RESTORED int before = device_current();
        status = of_device(device_copy(device, to, from, bytes, stream));
    }
    return lib_relay(status);
}

enum fdsl_status fdsl_wait(int device, void *stream)
{
    enum status status = check_stream(device, "stream", stream);
    if (status == STATUS_OK && device >= 0) {
        RESTORED int before = device_current();
        status = of_device(device_wait(device, stream));
    }
    return lib_relay(status);
}

enum fdsl_status fdsl_order(int device, void *before_stream, void *after)
{
    enum status status = check_stream(device, "before", before_stream);
    if (status == STATUS_OK)
        status = check_stream(device, "after", after);
    if (status == STATUS_OK && device >= 0 && before_stream != after) {
        RESTORED int before = device_current();
        status = of_device(device_order(device, before_stream, after));
    }
    return lib_relay(status);
}

int fdsl_capturing(int device, void *stream)
{
    if (device < 0)
        return 0;
    RESTORED int before = device_current();
    return device_capturing(device, stream);
}

/* ---- Parts of the program that trainers use, without those that the library does not link ---- */

/* Trainers generate the images of the option data=synth with variants of synth. */
#define LINKS_WORKLOAD(name) (__builtin_strcmp(name, "train") == 0 || __builtin_strcmp(name, "synth") == 0)
#include "core/variant.c"
#undef HAVE_HWLOC
#include "machine/env.c"
