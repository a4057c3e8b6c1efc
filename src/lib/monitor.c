/* The monitor in libfdsl: the sampler of the program (machine/monitor.h), and a thread that writes its
 * samples. */
#include "machine/monitor.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "core/parallel.h"
#include "lib/call.h"
#include "machine/device.h"

#define WRITE_S        10 /* seconds between writes; a killed program loses the samples since the last write */
#define NAME_MAX_BYTES 255

struct fdsl_monitor {
    struct monitor *sampler;
    struct ticker *writer;
    struct env env;
    struct monitor_gpus gpus;
    char *path, *name;
    pid_t process; /* the process that started the monitor */
};

enum fdsl_status fdsl_monitor_config_init(struct fdsl_monitor_config *config, size_t size)
{
    static const struct fdsl_monitor_config defaults = {
        .size = sizeof defaults, .interval_s = 1e-3 * MONITOR_PERIOD_MS, .device = FDSL_ALL_DEVICES};
    return lib_set_config(config, size, &defaults, sizeof defaults);
}

/* ---- Checks ---- */

static enum status check_name(const char *field, const char *name)
{
    if (!name || !*name || strlen(name) > NAME_MAX_BYTES)
        return status_set(STATUS_USAGE, "%s: it %s; it must have 1 to %d bytes", field,
                          !name    ? "is NULL"
                          : !*name ? "is empty"
                                   : "is too long",
                          NAME_MAX_BYTES);
    for (const char *c = name; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            return status_set(STATUS_USAGE, "%s: it contains a control character", field);
    return STATUS_OK;
}

static enum status check_device(int device)
{
    if (device == FDSL_ALL_DEVICES || device == FDSL_CPU)
        return STATUS_OK;
    TRY(lib_check_device(device));
    return device < device_count()
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE, "device: this process sees %d CUDA devices, but no device %d",
                            device_count(), device);
}

static enum status check_config(const struct fdsl_monitor_config *config)
{
    const double least_s = 1e-3 * MONITOR_PERIOD_MIN_MS, most_s = 1e-3 * MONITOR_PERIOD_MAX_MS;
    TRY(lib_check_struct("config", config, sizeof *config));
    if (!config->path || !*config->path)
        return status_set(STATUS_USAGE, "path: it is %s", config->path ? "empty" : "NULL");
    if (!(config->interval_s >= least_s && config->interval_s <= most_s)) /* refuses NaN, too */
        return status_set(STATUS_USAGE, "interval_s: %g is out of range; it must be %g to %g",
                          config->interval_s, least_s, most_s);
    TRY(check_device(config->device));
    if (config->name)
        TRY(check_name("name", config->name));
    return status_prefix(monitor_check(config->path), "path");
}

/* ---- Starting and stopping ---- */

/* Writes the samples so far. After an error they stay in memory for the next call, or for
 * fdsl_monitor_stop(), which returns the error. */
static void write_samples(void *context, uint64_t missed)
{
    struct fdsl_monitor *self = context;
    struct environment before;
    (void)missed;
    if (lib_enter(&before) == STATUS_OK)
        (void)monitor_try_flush(self->sampler);
    lib_leave(&before);
}

static enum status start(const struct fdsl_monitor_config *config, struct fdsl_monitor *self)
{
    self->process = getpid();
    self->path = strdup(config->path);
    self->name = strdup(config->name ? config->name : program_invocation_short_name);
    TRY(ALLOCATED(self->path && self->name, "out of memory"));
    env_identify(&self->env);
    if (config->device != FDSL_CPU)
        monitor_find_gpus(config->device, &self->gpus);
    const struct monitor_subject subject = {.env = &self->env,
                                            .rank = config->rank,
                                            .gpus = self->gpus.list,
                                            .gpu_count = self->gpus.count,
                                            .variant = self->name};
    TRY(monitor_open(self->path, (uint64_t)lround(1e3 * config->interval_s), &subject, &self->sampler));
    const int error = ticker_open(WRITE_S, write_samples, self, &self->writer);
    return error ? status_set(STATUS_FAILED, "monitor: cannot start its thread: %s", strerror(error))
                 : STATUS_OK;
}

/* Returns the error of writing the remaining samples. Ignores NULL. */
static enum status stop(struct fdsl_monitor *self)
{
    if (!self)
        return STATUS_OK;
    ticker_close(self->writer);
    const enum status status = monitor_stop(self->sampler);
    monitor_free(self->sampler);
    free(self->path);
    free(self->name);
    free(self);
    return status;
}

static enum status checked_start(const struct fdsl_monitor_config *config, struct fdsl_monitor **monitor)
{
    TRY(check_config(config));
    struct fdsl_monitor *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    const enum status status = start(config, self);
    if (status != STATUS_OK) {
        const struct failure failure = status_save(status);
        (void)stop(self);
        return status_restore(&failure);
    }
    *monitor = self;
    return STATUS_OK;
}

enum fdsl_status fdsl_monitor_start(const struct fdsl_monitor_config *config, struct fdsl_monitor **monitor)
{
    struct environment before;
    status_forget_warnings();
    if (!monitor)
        return lib_invalid("monitor: it is NULL");
    *monitor = NULL;
    enum status status = lib_enter(&before);
    if (status == STATUS_OK)
        status = checked_start(config, monitor);
    lib_leave(&before);
    return lib_relay(status);
}

static enum status check_process(const struct fdsl_monitor *monitor)
{
    return monitor->process == getpid()
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "monitor: it was started before fork(); start another one in this process");
}

enum fdsl_status fdsl_monitor_phase(struct fdsl_monitor *monitor, const char *name)
{
    if (!monitor)
        return lib_invalid("monitor: it is NULL");
    enum status status = check_process(monitor);
    if (status == STATUS_OK)
        status = check_name("name", name);
    if (status == STATUS_OK)
        status = monitor_phase(monitor->sampler, name);
    return lib_relay(status);
}

enum fdsl_status fdsl_monitor_stop(struct fdsl_monitor *monitor)
{
    struct environment before;
    status_forget_warnings();
    if (!monitor)
        return FDSL_OK;
    enum status status = check_process(monitor);
    if (status != STATUS_OK)
        return lib_relay(status);
    status = lib_enter(&before);
    if (status == STATUS_OK)
        status = stop(monitor);
    lib_leave(&before);
    return lib_relay(status);
}
