/* The ways of advise --compute train:MODEL: each measurement is a run of the workload train. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for posix_fadvise() and ftw() */
#endif

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "core/portable.h"
#include "core/stats.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/remote.h"
#include "load/input.h"
#include "machine/device.h"
#include "machine/host.h"
#include "run/advise.h"
#include "train/model.h"

/* In ascending order of needs. A prepared set has generated images, the others that are read those of
 * --data. */
const struct candidate advise_trainings[ADVISE_TRAININGS] = {
    {"the step without input", NULL, ADVISE_CONSTANT, false, "train", "constant", NULL, NULL},
    {"generating", NULL, ADVISE_GENERATED, false, "train", "live", NULL, NULL},
    {"shards from the URL", NULL, ADVISE_REMOTE, false, "train", "load", NULL, NULL},
    {"shards from disk", "files from disk", ADVISE_DISK, false, "train", "load", NULL, "cold"},
    {"a prepared set, memory", NULL, ADVISE_PREPARED, false, "train", "load", NULL, NULL},
    {"shards from memory", "files from memory", ADVISE_MEMORY, false, "train", "load", NULL, "warm"},
    {"generated and read", NULL, ADVISE_MIXED, false, "train", "mixed", NULL, NULL},
    {"files in host memory", NULL, ADVISE_RESIDENT, false, "train", "load", NULL, NULL},
    {"the set in GPU memory", NULL, ADVISE_GPU_MEMORY, true, "train", "load", NULL, NULL},
};

#define SLACK      1.25 /* of --resident-device-bytes, for alignment */
#define EPOCHS_MIN 3    /* counted epochs of a run */
#define EPOCHS_MAX 64
/* A GPU's JPEG engines reach their rate after about this many steps and seconds. */
#define WARM_STEPS 100
#define WARM_S     2.0
#define AGAIN_S    0.25 /* after a run has waited for its turn, the epochs of this time do not count */
#define RUN_EPOCHS 1e6  /* more than all rounds need; there are at most ... */
#define RUN_STEPS  2e9  /* ... this many steps */

/* ---- The engine and its runs ---- */

enum status advise_choose_engine(struct situation *situation)
{
    struct advice_question *question = &situation->question;
    const struct resources *resources = &situation->resources;
    int model = 0;
    while (strcmp(model_names[model], question->model) != 0)
        model++;
    const struct layer_spec *layers = model_tables[model].layers;
    const bool normed = layers[0].kind == LAYER_CONV && layers[1].kind == LAYER_BATCH_NORM;
    const char *fastest = layers[0].kind == LAYER_PATCHES ? "train-vit"
                          : normed                        ? "train-resnet"
                                                          : "train-bf16";
    const char *const engines[] = {fastest, normed ? fastest : "train-cuda",
                                   normed ? "train-naive" : "train-omp", "train-naive"};
    enum status status = STATUS_UNAVAILABLE;
    for (size_t i = 0; status != STATUS_OK && i < COUNT_OF(engines); i++) {
        const struct variant_entry *entry = variant_find(engines[i]);
        question->engine = engines[i];
        status = entry ? variant_available(entry, resources) : STATUS_UNAVAILABLE;
        question->overlaps = i < 2;
    }
    return status;
}

double advise_device_bytes(const struct situation *situation)
{
    const struct advise_set *set = &situation->set;
    double crops = situation->options->fit == FIT_RANDOM_RESIZED_CROP ? set->pixels : 0;
    double pixels = fmax((double)set->res * set->res, crops) * set->channels;
    return advise_is_fitted(situation) ? SLACK * pixels * (double)set->samples : SLACK * set->bytes;
}

enum status advise_training_possible(const struct situation *situation, const struct candidate *candidate)
{
    const struct advise_set *set = &situation->set;
    struct device_info device;
    if (candidate->gpu && !situation->gpu)
        return status_set(STATUS_UNAVAILABLE, "there is no GPU");
    if (candidate->place == ADVISE_PREPARED && !*set->prepared)
        return status_set(STATUS_UNAVAILABLE, "%s", situation->question.prepare_reason.text);
    if (candidate->cache && strcmp(candidate->cache, "cold") == 0)
        return advise_evict(set->remote ? situation->options->cache_dir : set->data);
    if (candidate->place == ADVISE_MEMORY || candidate->place == ADVISE_RESIDENT)
        return advise_check_room("memory", set->bytes, memory_available_bytes());
    if (candidate->place == ADVISE_GPU_MEMORY) {
        TRY(device_describe(situation->resources.device, &device));
        return advise_check_room("GPU memory", advise_device_bytes(situation), device.memory_free_bytes);
    }
    return STATUS_OK;
}

/* Fills the options of a run that trains the network on images of a way. `data` is the data set that it
 * reads. */
static void fill_training(const struct situation *situation, const struct candidate *candidate,
                          const char *data, const char *mix, struct arguments *arguments)
{
    const struct advise_options *options = situation->options;
    const struct advise_set *set = &situation->set;
    const enum advise_place place = candidate->place;
    bool prepared = place == ADVISE_PREPARED,
         reads = place != ADVISE_GENERATED && place != ADVISE_CONSTANT && !prepared;
    advise_add_text(arguments, "--variant", situation->question.engine);
    advise_add_text(arguments, "--model", situation->question.model);
    advise_add_number(arguments, "--batch", (double)situation->question.batch);
    if (options->device)
        advise_add_number(arguments, "--device", (double)options->device);
    if (options->threads)
        advise_add_number(arguments, "--threads", (double)options->threads);
    advise_add_text(arguments, "--feed", candidate->variant);
    if (place == ADVISE_MIXED)
        advise_add_text(arguments, "--mix", mix);
    advise_add_text(arguments, "--data", reads || prepared ? data : "synth");
    advise_add_number(arguments, "--classes", (double)options->classes);
    if (place == ADVISE_RESIDENT)
        advise_add_text(arguments, "--resident-bytes", "all");
    if (place == ADVISE_GPU_MEMORY)
        advise_add_number(arguments, "--resident-device-bytes", ceil(advise_device_bytes(situation)));
    if (!reads) {
        if (!prepared)
            advise_add_number(arguments, "--res", set->res);
        advise_add_number(arguments, "--out-res", set->res);
        advise_add_number(arguments, "--channels", set->channels);
        return;
    }
    advise_add_set(options, place != ADVISE_REMOTE, arguments);
    if (options->on_error)
        advise_add_text(arguments, "--on-error", "mask");
    if (advise_is_fitted(situation))
        advise_add_fit(situation, arguments);
    else if (place == ADVISE_MIXED)
        advise_add_number(arguments, "--res", set->res);
}

/* Adds the options that keep everything but the steps short. */
static void shorten(double train_size, double epochs, struct arguments *arguments)
{
    if (train_size > 0)
        advise_add_number(arguments, "--train-size", train_size);
    advise_add_text(arguments, "--test-size", "1");
    advise_add_number(arguments, "--epochs", epochs);
    advise_add_text(arguments, "--mean", "0.5"); /* instead of reading a part of the set to compute it */
    advise_add_text(arguments, "--std", "0.25");
    arguments->of[arguments->count++] = "--allow-nan";
}

/* The measures of some epochs of a run. The rate is the median of the epochs: another process may delay one
 * of them. */
struct measured {
    double items, items_per_s, step_s, stall_share;
    double memory_bytes, samples, parameters, resident; /* `resident`: samples in GPU memory */
};

/* Reads the last `count` rows. */
static enum status read_epochs(const struct table *table, double count, struct measured *measured)
{
    const size_t last = table->rows - 1;
    double time_s = 0, step_s[EPOCHS_MAX], rates[EPOCHS_MAX];
    if (!(count >= 1 && count <= EPOCHS_MAX && count <= advise_number(table, last, "epoch")) ||
        count > (double)table->rows)
        return status_set(STATUS_FAILED, "%s: the rows of a run are incomplete", table->path);
    *measured = (struct measured){.memory_bytes = advise_number(table, last, "memory_bytes"),
                                  .samples = advise_number(table, last, "train_samples"),
                                  .parameters = advise_number(table, last, "parameters"),
                                  .resident = advise_number(table, last, "resident_device_samples")};
    for (size_t i = 0; i < (size_t)count; i++) {
        const size_t row = last - i;
        double row_s = advise_number(table, row, "time_mean_s");
        time_s += row_s;
        const double items = advise_number(table, row, "items");
        measured->items += items;
        rates[i] = items / row_s;
        step_s[i] = row_s / advise_number(table, row, "steps");
        measured->stall_share += advise_number(table, row, "stall_share") * row_s;
    }
    measured->items_per_s = stats_middle(rates, (size_t)count);
    measured->step_s = stats_middle(step_s, (size_t)count);
    measured->stall_share /= time_s;
    return STATUS_OK;
}

#define PROBE_STEPS_GPU 64
#define PROBE_STEPS     2
#define PROBE_EPOCHS    3

enum status advise_measure_step(struct situation *situation)
{
    struct advice_question *question = &situation->question;
    const char *asked = situation->options->compute;
    struct arguments arguments = {0};
    CLOSED_BY(table_free) struct table table = {0};
    struct measured measured;
    if (situation->set.depth > 1)
        return status_value(STATUS_USAGE, "compute", asked,
                            ": a sample has %" PRIu32 " images; give the time of a step: --compute MS",
                            situation->set.depth);
    if (situation->progress.shown)
        progress_show(&situation->progress, "a step of %s (%s)", question->model, question->engine);
    fill_training(situation, &advise_trainings[0], NULL, "", &arguments);
    shorten((double)question->batch * (situation->gpu ? PROBE_STEPS_GPU : PROBE_STEPS), PROBE_EPOCHS,
            &arguments);
    enum status status = advise_run_child(situation, "train", &arguments, &table);
    progress_clear(&situation->progress);
    if (status == STATUS_UNAVAILABLE) /* a network that does not fit, or too little memory */
        status = STATUS_USAGE;
    if (status == STATUS_OK)
        status = read_epochs(&table, PROBE_EPOCHS - 1, &measured);
    TRY(status_prefix(status, "--compute %s", asked));
    question->step_s = measured.step_s;
    question->gradient_bytes = 4 * measured.parameters;
    return STATUS_OK;
}

/* ---- One measurement ---- */

#define TRAINED_SHARE 0.85 /* at least this share of a set is trained on; the rest may be held out */

/* Chooses the number of steps of an epoch, and fills the options of a run of a way. */
static void plan_run(const struct situation *situation, const struct candidate *candidate, double wanted,
                     struct advise_pace *pace, struct arguments *arguments)
{
    const struct advise_set *set = &situation->set;
    const enum advise_place place = candidate->place;
    const bool prepared = place == ADVISE_PREPARED,
               generated = place == ADVISE_GENERATED || place == ADVISE_CONSTANT;
    const double batch = (double)situation->question.batch, share = place != ADVISE_MIXED ? 1 : pace->share;
    const double samples = TRAINED_SHARE * (double)(prepared ? set->prepared_samples : set->measured_samples);
    const double most = generated ? wanted : fmax(1, floor(samples / batch / share));
    pace->steps = fmax(1, fmin(ceil(wanted / EPOCHS_MIN), most));
    fill_training(situation, candidate, prepared ? set->prepared : set->data, pace->mix, arguments);
    if (prepared) /* a class may have too few samples to hold one out */
        advise_add_text(arguments, "--test-data", set->prepared);
    shorten(generated || pace->steps < most ? fmax(1, round(pace->steps * batch * share)) : 0,
            fmin(RUN_EPOCHS, floor(RUN_STEPS / pace->steps)), arguments);
    advise_add_text(arguments, "--gpu-others", "ignore"); /* runs of other ways wait */
}

/* Returns the number of epochs of a measurement that do not count. The first ones of a run load kernels,
 * raise clocks, and warm up decoders. After a pause, an epoch begins with samples that were read before. */
static double warm_epochs(const struct situation *situation, const struct candidate *candidate, double step_s,
                          const struct advise_pace *pace)
{
    const enum advise_place place = candidate->place;
    /* A set in GPU memory is decoded in the first epoch only. */
    const bool decodes = situation->gpu && situation->set.coded && place != ADVISE_GENERATED &&
                         place != ADVISE_CONSTANT && place != ADVISE_PREPARED && place != ADVISE_GPU_MEMORY;
    if (pace->run.pid != 0)
        return fmin(fmax(1, ceil(AGAIN_S / step_s / pace->steps)), EPOCHS_MAX);
    return decodes ? ceil(fmax(WARM_STEPS, WARM_S / step_s) / pace->steps) : 1;
}

struct advise_room advise_room(const struct situation *situation)
{
    struct advise_room room = {.host_bytes = memory_available_bytes()};
    struct device_info device;
    if (situation->gpu && device_describe(situation->resources.device, &device) == STATUS_OK)
        room.device_bytes = device.memory_free_bytes;
    return room;
}

/* Returns whether a run may wait for its next measurement: if the runs that wait take at most half of the
 * memory that was free before them, do not keep threads busy, and their epochs have the right length. */
static bool may_wait(const struct situation *situation, double epoch_s, double time_s)
{
    const struct advise_room now = advise_room(situation), *begin = &situation->room;
    const char *policy = getenv("OMP_WAIT_POLICY");
    return !situation->alone && epoch_s <= time_s && 2 * now.host_bytes >= begin->host_bytes &&
           2 * now.device_bytes >= begin->device_bytes && !(policy && strcasecmp(policy, "active") == 0);
}

/* Runs the epochs of a measurement, and reads the last `count` of them. */
static enum status run_epochs(const struct situation *situation, const struct arguments *arguments,
                              double epochs, double count, struct advise_pace *pace,
                              struct measured *measured)
{
    CLOSED_BY(table_free) struct table table = {0};
    TRY(advise_run_epochs(situation, "train", arguments, (uint64_t)epochs, (uint64_t)count, &pace->run,
                          &table));
    return read_epochs(&table, count, measured);
}

/* Adds the energy of the epochs that were counted, if its error is small. It includes that of the times
 * between these epochs, in which files are evicted. */
static void add_energy(const struct situation *situation, const struct measured *measured,
                       struct advise_pace *pace, struct advice *advice)
{
    const double joules = advise_energy_j(situation) - pace->run.begin_j;
    if (isnan(joules) || timer_now_s() - pace->run.begin_s < ENERGY_SPAN_S)
        return;
    pace->joules += joules;
    pace->images += measured->items;
    advice->joules_per_image = pace->joules / pace->images;
}

enum status advise_train_once(struct situation *situation, const struct candidate *candidate, double time_s,
                              struct advise_pace *pace, struct advice *advice)
{
    const struct advise_set *set = &situation->set;
    const enum advise_place place = candidate->place;
    struct arguments arguments = {0};
    struct measured measured = {0};
    const bool known = pace->step_s > 0;
    const double step_s = known ? pace->step_s : situation->question.step_s, wanted = time_s / step_s;
    if (pace->run.pid == 0)
        plan_run(situation, candidate, wanted, pace, &arguments);
    const double count = known ? fmin(fmax(ceil(wanted / pace->steps), EPOCHS_MIN), EPOCHS_MAX) : EPOCHS_MIN,
                 warm = warm_epochs(situation, candidate, step_s, pace);
    bool cold = candidate->cache && strcmp(candidate->cache, "cold") == 0;
    situation->evict = !cold ? NULL : set->remote ? situation->options->cache_dir : set->data;
    enum status status = cold ? advise_evict(situation->evict) : STATUS_OK;
    if (status == STATUS_OK)
        status = run_epochs(situation, &arguments, warm + count, count, pace, &measured);
    if (status == STATUS_OK && !known) { /* its first epochs tell how many there is time for */
        const double all = fmin(ceil(time_s / measured.step_s / pace->steps), EPOCHS_MAX);
        if (all > count)
            status = run_epochs(situation, &arguments, all - count, all, pace, &measured);
    }
    situation->evict = NULL;
    if (status == STATUS_OK && place == ADVISE_GPU_MEMORY && measured.resident < measured.samples)
        status = status_set(STATUS_UNAVAILABLE, "only %.0f of %.0f samples fit into GPU memory",
                            measured.resident, measured.samples);
    if (status == STATUS_OK)
        add_energy(situation, &measured, pace, advice);
    situation->alone |= status != STATUS_OK; /* it may have lacked what the runs that wait hold */
    TRY(status);
    if (!may_wait(situation, measured.step_s * pace->steps, time_s))
        advise_end(situation, &pace->run);
    pace->step_s = measured.step_s;
    snprintf(advice->mix, sizeof advice->mix, "%s", pace->mix);
    advise_count_costs(situation, candidate, measured.memory_bytes, measured.samples, advice);
    advise_add(&situation->question, advice, NAN, measured.items_per_s, measured.stall_share);
    return STATUS_OK;
}

/* ---- The page cache ---- */

static struct cache_pages left; /* ftw() passes no context */

/* Evicts a file and counts its pages that stay. A file that cannot be opened is left to the run. */
static int evict_file(const char *path, const struct stat *info, int kind)
{
    int fd = kind == FTW_F ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return 0;
    (void)fdatasync(fd); /* dirty pages would stay; read-only file systems have none */
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (cache_count(fd, (uint64_t)info->st_size, &left) != STATUS_OK)
        left.hidden = true;
    close(fd);
    return 0;
}

#define LEFT_MAX 0.05 /* share of the pages that may stay */

enum status advise_evict(const char *folder)
{
    left = (struct cache_pages){0};
    ftw(folder, evict_file, 16);
    return left.hidden || cache_share(&left) <= LEFT_MAX
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE,
                            "%.0f %% of the set stay in the page cache; its file system is in memory, or "
                            "other processes use the files",
                            100 * cache_share(&left));
}

/* ---- Preparing ---- */

#define PREPARE_RUNS  3
#define PREPARE_PILOT 256  /* samples of the first run, which decides the number of samples of the others */
#define PREPARE_SHARE 0.03 /* of --time that each further run takes */

/* Writes a set of generated images into a new folder, and returns the time. */
static enum status prepare_once(const struct situation *situation, const char *folder, double samples,
                                double *time_s)
{
    const struct advise_options *options = situation->options;
    struct arguments arguments = {{"fdsl-bench"}, .count = 1};
    advise_add_text(&arguments, "--prepare", folder);
    advise_add_text(&arguments, "--from", "synth");
    advise_add_number(&arguments, "--classes", (double)options->classes);
    advise_add_number(&arguments, "--samples", samples);
    advise_add_number(&arguments, "--res", situation->set.res);
    advise_add_text(&arguments, "--encode", "npy");
    if (options->threads)
        advise_add_number(&arguments, "--threads", (double)options->threads);
    double begin_s = timer_now_s();
    TRY(advise_start(situation, arguments.of));
    *time_s = timer_now_s() - begin_s;
    return STATUS_OK;
}

static double folder_bytes; /* ftw() passes no context */

static int add_bytes(const char *path, const struct stat *info, int kind)
{
    (void)path;
    folder_bytes += kind == FTW_F ? (double)info->st_size : 0;
    return 0;
}

/* Does the work of advise_measure_prepare(). */
static enum status prepare_all(struct situation *situation)
{
    struct advise_set *set = &situation->set;
    struct advice_question *question = &situation->question;
    char folder[PATH_MAX];
    double least_s, pilot_s, values[PREPARE_RUNS];
    double pixels = (double)set->res * set->res;
    double most =
        fmin(fmax((double)set->samples, PREPARE_PILOT), fmax(1, (double)situation->options->subset / pixels));
    double samples = fmin(PREPARE_PILOT, most);
    snprintf(folder, sizeof folder, "%s/one", set->folder);
    TRY(prepare_once(situation, folder, 1, &least_s));
    advise_remove(folder);
    snprintf(folder, sizeof folder, "%s/pilot", set->folder);
    TRY(prepare_once(situation, folder, samples, &pilot_s));
    advise_remove(folder);
    samples = fmin(most, fmax(samples, floor(samples * PREPARE_SHARE * question->time_s / pilot_s)));
    for (size_t i = 0; i < PREPARE_RUNS; i++) {
        double time_s;
        snprintf(folder, sizeof folder, "%s/prepared", set->folder);
        advise_remove(folder);
        TRY(prepare_once(situation, folder, samples, &time_s));
        /* In a part of the set, starting would count too much. */
        values[i] = samples < (double)set->samples && time_s > least_s ? (time_s - least_s) / (samples - 1)
                                                                       : time_s / samples;
    }
    folder_bytes = 0;
    ftw(folder, add_bytes, 16);
    question->prepare_s = advise_mean(values, PREPARE_RUNS, ADVISE_SHOWN);
    question->prepare_bytes = folder_bytes / samples;
    set->prepared_samples = (uint64_t)samples;
    snprintf(set->prepared, sizeof set->prepared, "%s", folder);
    return STATUS_OK;
}

enum status advise_measure_prepare(struct situation *situation)
{
    if (situation->progress.shown)
        progress_show(&situation->progress, "generates and writes a set (--prepare)");
    enum status status = prepare_all(situation);
    progress_clear(&situation->progress);
    if (status == STATUS_OK || status_exit(status) == STATUS_FAILED)
        return status;
    situation->question.prepare_reason = status_save(status);
    return STATUS_OK;
}

/* ---- The exchange of gradients ---- */

#define EXCHANGE_RUNS  3
#define EXCHANGE_RANKS 2

/* Measures the all-reduce of two ranks on this machine, with the fastest method that works. */
static enum status exchange_here(const struct situation *situation, const char *rows)
{
    static const char *const methods[] = {"peer", "nccl", "mpi"};
    char program[PATH_MAX] = "", bytes[32];
    enum status status = STATUS_OK;
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0)
        return status_set(STATUS_UNAVAILABLE, "cannot find this program in /proc");
    snprintf(bytes, sizeof bytes, "%.0f", situation->question.gradient_bytes);
    for (size_t i = situation->gpu && device_count() >= EXCHANGE_RANKS ? 0 : 2; i < COUNT_OF(methods); i++) {
        const char *const argv[] = {"mpirun",     "--bind-to", "none",      "-n",       "2",       program,
                                    "--workload", "exchange",  "--variant", methods[i], "--bytes", bytes,
                                    "--max-time", "2",         "--out",     rows,       NULL};
        for (size_t run = 0; run < EXCHANGE_RUNS; run++) {
            status = advise_start(situation, argv);
            if (status != STATUS_OK)
                break;
        }
        if (status == STATUS_OK || status_exit(status) == STATUS_FAILED)
            return status;
    }
    return status_set(
        STATUS_UNAVAILABLE,
        "mpirun -n 2 fdsl-bench --workload exchange --variant mpi --bytes %s failed; run it to see "
        "why, or "
        "give rows of your nodes with --exchange-rows",
        bytes);
}

/* Sets exchange_s from rows of the workload exchange: those whose number of ranks and whose size come
 * nearest. The time is proportional to the bytes that cross the links of a rank, 2 (N - 1) / N of the
 * array. */
static enum status read_exchange(const char *path, struct advice_question *question)
{
    CLOSED_BY(table_free) struct table table = {0};
    double values[ADVISE_ROUNDS_MAX], nodes = question->nodes, nearest = INFINITY;
    size_t count = 0;
    if (access(path, R_OK) != 0)
        return status_value(STATUS_USAGE, "exchange-rows", path, ": %s", strerror(errno));
    TRY(table_read(path, &table));
    for (size_t row = 0; row < table.rows; row++) {
        const char *rank = table_cell(&table, row, table_column(&table, "rank"));
        double ranks = advise_number(&table, row, "ranks"), bytes = advise_number(&table, row, "array_bytes"),
               time_us = advise_number(&table, row, "time_us");
        if (strcmp(rank, "all") != 0 || !(ranks >= 2 && bytes > 0 && time_us > 0))
            continue;
        double far = 100 * fabs(log(ranks / nodes)) + fabs(log(bytes / question->gradient_bytes));
        if (far < nearest - 1e-9) {
            nearest = far;
            count = 0;
        }
        if (far <= nearest + 1e-9 && count < ADVISE_ROUNDS_MAX) {
            values[count++] = 1e-6 * time_us * question->gradient_bytes / bytes * ((nodes - 1) / nodes) /
                              ((ranks - 1) / ranks);
            question->exchange_ranks = (uint32_t)ranks;
        }
    }
    question->exchange_s = advise_mean(values, count, ADVISE_SHOWN);
    return count > 0
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "--exchange-rows %s: no rows of --workload exchange on 2 or more ranks (rank 'all')",
                     path);
}

enum status advise_measure_exchange(struct situation *situation)
{
    struct advice_question *question = &situation->question;
    const char *given = situation->options->exchange_rows;
    char rows[PATH_MAX];
    if (given)
        return read_exchange(given, question);
    snprintf(rows, sizeof rows, "%s/exchange.csv", situation->set.folder);
    if (situation->progress.shown)
        progress_show(&situation->progress, "the exchange of gradients between two ranks");
    enum status status = exchange_here(situation, rows);
    progress_clear(&situation->progress);
    if (status == STATUS_OK)
        return read_exchange(rows, question);
    if (status_exit(status) == STATUS_FAILED)
        return status;
    question->exchange_reason = status_save(status);
    return STATUS_OK;
}

/* ---- The command of a way ---- */

char *advise_command(const struct situation *situation, const struct advice *way)
{
    struct arguments arguments = {0};
    char shown[PATH_MAX], *text = NULL;
    size_t bytes, number = 0;
    FILE *stream = open_memstream(&text, &bytes);
    if (!stream)
        return NULL;
    while (advise_trainings[number].place != way->place)
        number++;
    remote_shown(situation->options->data, shown, sizeof shown);
    fill_training(situation, &advise_trainings[number], way->place == ADVISE_PREPARED ? "prepared" : shown,
                  way->mix, &arguments);
    if (way->place == ADVISE_PREPARED)
        fprintf(stream,
                "fdsl-bench --prepare prepared --from synth --classes %" PRIu64 " --samples %" PRIu64
                " --res %" PRIu32 " --encode npy && ",
                situation->options->classes, situation->set.samples, situation->set.res);
    fputs("fdsl-bench --workload train", stream);
    for (size_t i = 0; i < arguments.count; i++)
        text_print_word(stream, arguments.of[i]);
    if (text_close(stream))
        return text;
    free(text);
    return NULL;
}
