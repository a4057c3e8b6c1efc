/* Implements the functions of fdsl.h. They check their arguments, call the generator, and restore the
 * caller's environment: locale, floating point and current device. */
#include "lib/fdsl.h"

#include <fenv.h>
#include <locale.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/generator.h"
#include "lib/config.h"
#include "lib/pool.h"
#include "machine/device.h"
#include "machine/device_memory.h"
#include "synth/generator.h"

struct fdsl_generator {
    struct generator *generator;
    struct synth synth;
    struct pool *pool; /* CPU threads; NULL if the variant uses only the caller's thread */
    int device;
    pid_t process; /* the process that opened the generator */
};

/* ---- Errors ---- */

static _Thread_local char error_text[1024];

/* Messages name the fields of struct fdsl_config (OPTION_OR_FIELD). */
const bool status_names_fields = true;

/* Keeps the message of an error until the next one. */
static enum fdsl_status relay(enum status status)
{
    if (status != STATUS_OK)
        snprintf(error_text, sizeof error_text, "%s", status_text());
    return (enum fdsl_status)status_exit(status);
}

static enum fdsl_status invalid(const char *text)
{
    return relay(status_set(STATUS_USAGE, "%s", text));
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
        relay(device_probe(0));
    return count;
}

/* The state of the calling thread that a call must restore. */
struct environment {
    fenv_t floating_point;
    locale_t locale, c_locale;
    int device;
};

/* Sets the default floating-point environment (round to nearest, no flushing of subnormals), so that images
 * do not depend on the caller's environment. Sets the locale "C", because some locales cannot parse "0.5" in
 * files. */
static enum status environment_enter(struct environment *before)
{
    *before = (struct environment){.device = device_current()};
    before->c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    TRY(ALLOCATED(before->c_locale, "out of memory"));
    before->locale = uselocale(before->c_locale);
    fegetenv(&before->floating_point);
    fesetenv(FE_DFL_ENV);
    return STATUS_OK;
}

static void environment_leave(struct environment *before)
{
    if (!before->c_locale)
        return;
    fesetenv(&before->floating_point);
    uselocale(before->locale);
    freelocale(before->c_locale);
    device_restore(before->device);
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

enum fdsl_status fdsl_config_init(struct fdsl_config *config, size_t size)
{
    if (!config)
        return invalid("config: it is NULL");
    enum status status = check_size("config", size, sizeof *config);
    if (status != STATUS_OK)
        return relay(status);
    *config = (struct fdsl_config){.size = size,
                                   .formula = "uji",
                                   .res = 512,
                                   .classes = 1000,
                                   .fit = "resize",
                                   .channels = 1,
                                   .layout = "nchw",
                                   .dtype = "u8",
                                   .std = {1, 1, 1},
                                   .generator = "auto",
                                   .device = FDSL_CPU,
                                   .batch = 256};
    return FDSL_OK;
}

static enum status check_device(int device)
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
    TRY(check_device(device));
    return device < 0 && stream ? status_set(STATUS_USAGE, "%s: it must be NULL on the CPU", name)
                                : STATUS_OK;
}

static enum status open_all(const struct fdsl_config *config, struct fdsl_generator *self)
{
    const struct variant *variant;
    struct generator_request request = {
        .on_device = config->device >= 0, .batch = config->batch, .background = true};
    TRY(check_device(config->device));
    TRY(config_variant(config, &variant));
    TRY(config_threads(config, &request.resources.threads));
    request.resources.device = request.on_device ? config->device : 0;
    if (variant->probe)
        TRY(variant->probe(&request.resources));
    TRY(config_input(config, &self->synth));
    if (request.on_device)
        TRY(device_load(config->device));
    TRY(synth_generator_open(&self->synth, variant, &request, &self->generator));
    return variant->threaded ? pool_open(request.resources.threads, &self->pool) : STATUS_OK;
}

static void close_all(struct fdsl_generator *self)
{
    generator_close(self->generator);
    pool_close(self->pool);
    synth_free(&self->synth);
    free(self);
}

enum fdsl_status fdsl_open(const struct fdsl_config *config, struct fdsl_generator **generator)
{
    struct environment before;
    if (!generator)
        return invalid("generator: it is NULL");
    *generator = NULL;
    if (!config)
        return invalid("config: it is NULL");
    enum status status = check_size("config", config->size, sizeof *config);
    if (status != STATUS_OK)
        return relay(status);
    struct fdsl_generator *self = calloc(1, sizeof *self);
    if (!self)
        return relay(status_set(STATUS_EXHAUSTED, "out of memory"));
    self->device = config->device;
    self->process = getpid();
    status = environment_enter(&before);
    if (status == STATUS_OK)
        status = open_all(config, self);
    if (status == STATUS_OK)
        *generator = self;
    else
        close_all(self);
    environment_leave(&before);
    return relay(status);
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

/* ---- Queries ---- */

enum fdsl_status fdsl_describe(const struct fdsl_generator *generator, struct fdsl_layout *layout)
{
    if (!generator || !layout)
        return invalid(generator ? "layout: it is NULL" : "generator: it is NULL");
    enum status status = check_size("layout", layout->size, sizeof *layout);
    if (status != STATUS_OK)
        return relay(status);
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
    return FDSL_OK;
}

uint32_t fdsl_classes(const struct fdsl_generator *generator, struct fdsl_class *classes, uint32_t capacity)
{
    if (!generator || (capacity > 0 && !classes)) {
        (void)invalid(generator ? "classes: it is NULL" : "generator: it is NULL");
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
                                         .noise = from->noise,
                                         .radius = from->radius,
                                         .line_width = from->line_width};
    }
    return count;
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
};

static enum status check_pointer(const struct fdsl_generator *self, const char *name, const void *pointer,
                                 size_t alignment)
{
    if (!pointer)
        return status_set(STATUS_USAGE, "%s: it is NULL", name);
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
    return call->labels ? check_pointer(self, "labels", call->labels, sizeof *call->labels) : STATUS_OK;
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
    if (self->device >= 0)
        return generator_make(self->generator, numbers, call->count, call->images, call->labels,
                              call->stream);
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    pool_use(self->pool);
    enum status status =
        generator_make(self->generator, numbers, call->count, call->images, call->labels, NULL);
    pool_use(NULL);
    fesetenv(&before);
    return status;
}

/* Checks the generator and the arguments, and makes the generator's device current. If another device was
 * current, sets `*before` to it, and the caller must later restore it. */
static enum status begin_call(const struct fdsl_generator *self, const struct call *call, int *before)
{
    if (!self)
        return status_set(STATUS_USAGE, "generator: it is NULL");
    if (self->process != getpid())
        return status_set(STATUS_FAILED,
                          "generator: it was opened before fork(); open another one in this process (for "
                          "CUDA, start the process with exec or spawn instead of fork)");
    int current = self->device >= 0 ? device_current() : self->device;
    if (current !=
        self->device) { /* usually it is current already, and the caller needs no other call of CUDA */
        *before = current;
        device_restore(self->device);
    }
    return check_call(self, call);
}

enum fdsl_status fdsl_generate(struct fdsl_generator *generator, uint64_t first, uint32_t count, void *images,
                               int64_t *labels, void *stream)
{
    const struct call call = {count, images, labels, stream};
    const struct generator_numbers numbers = {.first = first};
    RESTORED int before = -1;
    enum status status = begin_call(generator, &call, &before);
    if (status == STATUS_OK)
        status = check_first("first", first, count);
    if (status == STATUS_OK)
        status = generate(generator, &numbers, &call);
    return relay(status);
}

enum fdsl_status fdsl_generate_list(struct fdsl_generator *generator, const uint64_t *numbers, uint32_t count,
                                    void *images, int64_t *labels, void *stream)
{
    const struct call call = {count, images, labels, stream};
    const struct generator_numbers listed = {.list = numbers};
    RESTORED int before = -1;
    enum status status = begin_call(generator, &call, &before);
    if (status == STATUS_OK)
        status = check_pointer(generator, "numbers", numbers, sizeof *numbers);
    if (status == STATUS_OK)
        status = generate(generator, &listed, &call);
    return relay(status);
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
    const struct call call = {count, images, labels, stream};
    RESTORED int before = -1;
    enum status status = begin_call(generator, &call, &before);
    if (status == STATUS_OK)
        status = check_pointer(generator, "next", next, sizeof *next);
    if (status == STATUS_OK)
        status = generate_next(generator, next, step, &call);
    return relay(status);
}

/* ---- Memory and streams ---- */

#define HOST_ALIGNMENT 64

enum fdsl_status fdsl_alloc(int device, size_t bytes, void **memory)
{
    if (!memory)
        return invalid("memory: it is NULL");
    *memory = NULL;
    if (bytes == 0)
        return invalid("bytes: it is 0");
    enum status status = check_device(device);
    if (status == STATUS_OK && device < 0) {
        *memory = bytes > SIZE_MAX - HOST_ALIGNMENT
                      ? NULL
                      : aligned_alloc(HOST_ALIGNMENT,
                                      (bytes + HOST_ALIGNMENT - 1) / HOST_ALIGNMENT * HOST_ALIGNMENT);
        if (!*memory)
            status = status_set(STATUS_EXHAUSTED, "out of memory for %zu bytes", bytes);
    } else if (status == STATUS_OK) {
        RESTORED int before = device_current();
        status = device_alloc(device, bytes, memory);
    }
    return relay(status);
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
        return invalid(to ? "from: it is NULL" : "to: it is NULL");
    enum status status = check_stream(device, "stream", stream);
    if (status == STATUS_OK && device < 0)
        memmove(to, from, bytes);
    else if (status == STATUS_OK) {
        RESTORED int before = device_current();
        status = device_copy(device, to, from, bytes, stream);
    }
    return relay(status);
}

enum fdsl_status fdsl_wait(int device, void *stream)
{
    enum status status = check_stream(device, "stream", stream);
    if (status == STATUS_OK && device >= 0) {
        RESTORED int before = device_current();
        status = device_wait(device, stream);
    }
    return relay(status);
}

enum fdsl_status fdsl_order(int device, void *before_stream, void *after)
{
    enum status status = check_stream(device, "before", before_stream);
    if (status == STATUS_OK)
        status = check_stream(device, "after", after);
    if (status == STATUS_OK && device >= 0 && before_stream != after) {
        RESTORED int before = device_current();
        status = device_order(device, before_stream, after);
    }
    return relay(status);
}

int fdsl_capturing(int device, void *stream)
{
    if (device < 0)
        return 0;
    RESTORED int before = device_current();
    return device_capturing(device, stream);
}
