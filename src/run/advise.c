#include "run/advise.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/compute.h"
#include "core/file.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/plain_reader.h"
#include "data/remote.h"
#include "machine/device.h"
#include "machine/host.h"
#include "machine/nvml.h"
#include "run/report.h"
#include "run/runner.h"
#include "train/model.h"

/* ---- Options ---- */

#define TIME_S       30.0  /* default of --time */
#define TIME_GPU_S   120.0 /* default of --time with a GPU, where each run takes seconds to start */
#define TIME_TRAIN_S 240.0 /* default of --time with train:MODEL and no GPU, where steps are long */

#define AT(field)    offsetof(struct advise_options, field)
static const struct option_spec specs[] = {
    {"data", "DIR", OPTION_TEXT, AT(data), .help = "a folder of samples or tar shards, or a URL of shards"},
    {"compute", "MS|train:MODEL", OPTION_TEXT, AT(compute),
     .help = "time of a training step, or a network to measure all ways with"},
    {"batch", "N", OPTION_COUNT, AT(batch), .fallback = "256", .minimum = 1, .maximum = 1 << 20,
     .help = "images per step"},
    {"classes", "N", OPTION_COUNT, AT(classes), .fallback = "1000", .minimum = 1, .maximum = 1 << 24,
     .help = "of generated images and the network"},
    {"out-res", "PIXELS", OPTION_COUNT, AT(out_res), .minimum = 1, .maximum = FIT_RES_MAX,
     .help = "width and height (default: as stored; JPEG, PNG: 224)"},
    {"fit", "HOW", OPTION_CHOICE, AT(fit), .fallback = "resize", .choices = fit_names,
     .help = "how images get this size"},
    {"image", "LIST", OPTION_TEXT, AT(image), .help = "image of a sample, as in --workload load"},
    {"label", "LIST", OPTION_TEXT, AT(label), .help = "label of a sample, as in --workload load"},
    {"member", "EXT", OPTION_TEXT, AT(member), .help = "read only this member of a sample, or all"},
    {"cache-dir", "DIR", OPTION_TEXT, AT(cache_dir),
     .help = "keeps copies of shards of a URL, which are measured, too"},
    {"cache-bytes", "N[K|M|G]", OPTION_BYTES, AT(cache_bytes), .fallback = "0", .maximum = 1e18,
     .help = "size of --cache-dir at most; 0: no limit"},
    {"subset", "N[K|M|G]", OPTION_BYTES, AT(subset), .fallback = "512M", .minimum = 1, .maximum = 1e18,
     .help = "measure at most this part of a folder"},
    {"on-error", "WHAT", OPTION_CHOICE, AT(on_error), .fallback = "fail", .choices = dataset_on_error,
     .help = "what to do with broken images"},
    {"threads", "N", OPTION_COUNT, AT(threads), .fallback = "0", .maximum = 4096,
     .help = "that read and decode; 0: all"},
    {"device", "N", OPTION_COUNT, AT(device), .fallback = "0", .maximum = 1024, .help = "CUDA device"},
    {"time", "S", OPTION_REAL, AT(time_s), .minimum = 0.1, .maximum = 86400,
     .help = "maximum time; a certain verdict ends it earlier (default: 30; with a GPU 120; train:MODEL "
             "without one 240)"},
    {"margin", "PERCENT", OPTION_REAL, AT(margin), .fallback = "10", .minimum = 0.1, .maximum = 1000,
     .help = "rates are equal within this margin"},
    {"nodes", "N", OPTION_COUNT, AT(nodes), .fallback = "1", .minimum = 1, .maximum = 1 << 20,
     .help = "also estimate the rates of N machines"},
    {"exchange-rows", "FILE", OPTION_TEXT, AT(exchange_rows),
     .help = "for --nodes: rows of --workload exchange"},
    {"out", "DIR", OPTION_TEXT, AT(out), .help = "keeps the rows of all measurements"},
    {"format", "FORMAT", OPTION_CHOICE, AT(format), .fallback = "table", .choices = format_names,
     .help = "of stdout"},
    {"help", NULL, OPTION_FLAG, AT(help), .help = "print this help"},
};

static void print_help(void)
{
    puts("fdsl-bench advise - generate images, keep them in GPU memory, or read them from memory, disk or a "
         "URL?\n"
         "\n"
         "usage: fdsl-bench advise --data DIR|URL --compute MS|train:MODEL [options]\n"
         "\n"
         "Measures each source of images in turn until the verdict is certain or --time is over. The last\n"
         "line says with which source training steps consume the most images per second. If sources are\n"
         "equally fast, the one that needs least is best. docs/advise.md explains the verdict.\n"
         "\n"
         "examples:\n"
         "  fdsl-bench advise --data photos --compute 5                     # a step of 5 ms per 256 images\n"
         "  fdsl-bench advise --data s3://bucket/train/ --compute train:vit-tiny --out advice\n"
         "\n"
         "options:");
    options_help(stdout, specs, COUNT_OF(specs), NULL);
    puts("\nexit status: 0 advice is printed, or the verdict is undecided; 1 the data cannot be read, or\n"
         "             nothing could be measured; 2 usage, or no such data set; 4 no such GPU");
}

/* ---- Candidates ---- */

/* In ascending order of needs (enum advise_place). If two ways need the same, the GPU variant comes first,
 * because it leaves the CPU free. */
static const struct candidate candidates[] = {
    {"generating on the GPU", NULL, ADVISE_GENERATED, true, "synth", "fused", NULL, NULL},
    {"generating on the CPU", NULL, ADVISE_GENERATED, false, "synth", "omp", NULL, NULL},
    {"shards from the URL", NULL, ADVISE_REMOTE, true, "load", "shards-gpu", NULL, NULL},
    {"shards from the URL", NULL, ADVISE_REMOTE, false, "load", "shards-omp", NULL, NULL},
    {"shards from disk", "files from disk", ADVISE_DISK, true, "load", "shards-gpu", "files-gpu", "cold"},
    {"shards from disk", "files from disk", ADVISE_DISK, false, "load", "shards-omp", "files-omp", "cold"},
    {"shards from memory", "files from memory", ADVISE_MEMORY, true, "load", "shards-gpu", "files-gpu",
     "warm"},
    {"shards from memory", "files from memory", ADVISE_MEMORY, false, "load", "shards-omp", "files-omp",
     "warm"},
    {"the set in GPU memory", NULL, ADVISE_GPU_MEMORY, true, "load", "gpu-resident", NULL, "warm"},
};

static const char *variant_of(const struct situation *situation, const struct candidate *candidate)
{
    return !situation->set.shards && candidate->variant_of_files ? candidate->variant_of_files
                                                                 : candidate->variant;
}

enum status advise_check_room(const char *what, double bytes, uint64_t room)
{
    return room == 0 || bytes <= (double)room
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE, "the data set has %.3g GB, but only %.3g GB of %s are free",
                            1e-9 * bytes, 1e-9 * (double)room, what);
}

/* Returns STATUS_UNAVAILABLE, with the reason, if this candidate certainly cannot work here. After STATUS_OK,
 * its run may still fail. */
static enum status is_possible(const struct situation *situation, const struct candidate *candidate)
{
    const struct advise_set *set = &situation->set;
    struct device_info device;
    if ((candidate->place == ADVISE_MEMORY || candidate->place == ADVISE_DISK) && set->remote &&
        !situation->options->cache_dir)
        return status_set(
            STATUS_UNAVAILABLE,
            "the data set is at a URL; to measure this, add --cache-dir DIR, which keeps a copy");
    if (situation->question.model)
        return advise_training_possible(situation, candidate);
    TRY(variant_available(variant_find(variant_of(situation, candidate)), &situation->resources));
    if (candidate->place == ADVISE_MEMORY)
        return advise_check_room("memory", set->bytes, memory_available_bytes());
    if (candidate->place == ADVISE_GPU_MEMORY && set->measured_samples < set->samples) {
        TRY(device_describe(situation->resources.device, &device));
        return advise_check_room("GPU memory", set->bytes, device.memory_free_bytes);
    }
    return STATUS_OK;
}

void advise_add_text(struct arguments *arguments, const char *option, const char *value)
{
    if (!value)
        return;
    arguments->of[arguments->count++] = option;
    arguments->of[arguments->count++] = value;
}

void advise_add_number(struct arguments *arguments, const char *option, double value)
{
    char *text = arguments->texts[arguments->text_count++];
    snprintf(text, sizeof arguments->texts[0], "%.17g", value);
    advise_add_text(arguments, option, text);
}

void advise_add_set(const struct advise_options *options, bool copy, struct arguments *arguments)
{
    advise_add_text(arguments, "--image", options->image);
    advise_add_text(arguments, "--label", options->label);
    if (copy && options->cache_dir) {
        advise_add_text(arguments, "--cache-dir", options->cache_dir);
        advise_add_number(arguments, "--cache-bytes", (double)options->cache_bytes);
    }
}

bool advise_is_fitted(const struct situation *situation)
{
    return situation->set.coded || situation->options->out_res;
}

void advise_add_fit(const struct situation *situation, struct arguments *arguments)
{
    advise_add_number(arguments, "--out-res", situation->set.res);
    advise_add_text(arguments, "--fit", fit_names[situation->options->fit]);
    advise_add_number(arguments, "--channels", situation->set.channels);
}

/* Adds the options of a run that reads. CPU variants decode every image, because a step needs its pixels. */
static void add_reading(const struct situation *situation, const struct candidate *candidate,
                        struct arguments *arguments)
{
    const struct advise_options *options = situation->options;
    const struct advise_set *set = &situation->set;
    advise_add_text(arguments, "--data", set->data);
    /* "warm" is the default, which is not checked if the files are of another user. */
    if (candidate->cache && strcmp(candidate->cache, "warm") != 0)
        advise_add_text(arguments, "--cache", candidate->cache);
    advise_add_text(arguments, "--member", options->member);
    advise_add_set(options, candidate->place != ADVISE_REMOTE, arguments);
    if (options->on_error)
        advise_add_text(arguments, "--on-error", dataset_on_error[options->on_error]);
    if (candidate->place == ADVISE_GPU_MEMORY ||
        set->depth > 1) /* volumes are delivered as they are stored */
        return;
    if (advise_is_fitted(situation))
        advise_add_fit(situation, arguments);
    else if (!candidate->gpu)
        arguments->of[arguments->count++] = "--decode";
}

/* `time_s` is the time of the timed runs. */
static void fill_arguments(const struct situation *situation, const struct candidate *candidate,
                           bool with_step, double time_s, struct arguments *arguments)
{
    const struct advise_options *options = situation->options;
    const struct advise_set *set = &situation->set;
    bool generated = candidate->place == ADVISE_GENERATED;
    advise_add_text(arguments, "--variant", variant_of(situation, candidate));
    advise_add_number(arguments, "--batch",
                      (double)(situation->question.batch / (generated ? 1 : set->depth)));
    advise_add_number(arguments, "--min-time", time_s);
    advise_add_number(arguments, "--max-time", time_s);
    advise_add_text(arguments, "--min-samples", "1");
    advise_add_text(arguments, "--warmups", "0"); /* run 0, which is not timed, warms up */
    advise_add_text(arguments, "--warmup-time", "0");
    advise_add_number(arguments, "--device", (double)options->device);
    advise_add_number(arguments, "--threads", (double)options->threads);
    if (with_step)
        advise_add_text(arguments, "--compute", situation->step);
    if (!generated) {
        add_reading(situation, candidate, arguments);
        arguments->of[arguments->count++] = "--rates-only";
        return;
    }
    advise_add_number(arguments, "--res", set->res);
    advise_add_number(arguments, "--channels", set->channels);
    /* Generate the element types that the variants of `load` deliver. */
    advise_add_text(arguments, "--dtype", candidate->gpu ? "f16" : "u8");
    advise_add_number(arguments, "--classes", (double)options->classes);
}

/* ---- One run of this program ---- */

/* The measures of a run; NaN if unknown. */
struct measured {
    double items, time_s, memory_bytes, joules_per_item;
    double stall_share, step_s, busy_share; /* of the training step */
};

#define LOOK_MS   100  /* interval at which pending signals are checked */
#define PATIENCE  4    /* a run is ended after this multiple of --time, ... */
#define PATIENT_S 60.0 /* ... but not before this time */

/* Runs in the child process. `errors` becomes its stderr; it inherits `turns`, unless that is negative. */
static void become(const char *const *argv, int errors, int turns)
{
    bool own = strcmp(argv[0], "fdsl-bench") == 0;
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM); /* the run ends if this program ends */
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (nothing >= 0 && dup2(nothing, STDIN_FILENO) >= 0 && dup2(nothing, STDOUT_FILENO) >= 0 &&
        dup2(errors, STDERR_FILENO) >= 0 && (turns < 0 || fcntl(turns, F_SETFD, 0) == 0))
        execvp(own ? "/proc/self/exe" : argv[0], (char *const *)argv);
    dprintf(errors, "cannot start %s: %s\n", argv[0], strerror(errno));
    _exit(STATUS_FAILED);
}

static void close_two(const int fds[2])
{
    for (int i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

/* Starts a program; see advise_start(). With `in_turns`, it waits after each epoch. */
static enum status launch(const char *const *argv, bool in_turns, struct advise_child *child)
{
    int report[2] = {-1, -1}, turns[2] = {-1, -1};
    char number[16];
    pid_t pid = -1;
    if (pipe2(report, O_CLOEXEC) == 0 &&
        (!in_turns ||
         (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, turns) == 0 &&
          snprintf(number, sizeof number, "%d", turns[1]) > 0 && setenv(RUNNER_TURNS, number, 1) == 0)))
        pid = fork();
    if (pid == 0)
        become(argv, report[1], turns[1]);
    int error = errno;
    unsetenv(RUNNER_TURNS);
    if (pid < 0) {
        close_two(report);
        close_two(turns);
        return status_set(in_turns ? STATUS_UNAVAILABLE : STATUS_FAILED, "cannot start a run: %s",
                          strerror(error));
    }
    close(report[1]);
    if (in_turns)
        close(turns[1]);
    *child = (struct advise_child){.pid = pid, .errors = report[0], .turns = turns[0]};
    return STATUS_OK;
}

/* Reads what a child printed to stderr, and keeps the end of it. Returns false when there is no more. */
static bool read_errors(struct advise_child *child)
{
    const size_t size = sizeof child->text;
    ssize_t count = read(child->errors, child->text + child->held, size - 1 - child->held);
    if (count == 0 || (count < 0 && errno != EINTR))
        return false;
    child->held += count > 0 ? (size_t)count : 0;
    if (child->held > size / 2) { /* drop the older text; the last line is needed */
        memmove(child->text, child->text + child->held - size / 4, size / 4);
        child->held = size / 4;
    }
    return true;
}

#define TURNS_MAX 64 /* that a run has at once */

/* Lets a run that waits train up to `epochs` epochs, and returns how many. It has several turns at once,
 * because it reads ahead while it waits for one. If it has ended, its stderr says so. */
static uint64_t give_turns(const struct situation *situation, struct advise_child *child, uint64_t epochs)
{
    static const char turns[TURNS_MAX];
    const uint64_t count = situation->evict ? 1 : epochs < TURNS_MAX ? epochs : TURNS_MAX;
    (void)send(child->turns, turns, count, MSG_NOSIGNAL);
    child->waits = false;
    return count;
}

double advise_energy_j(const struct situation *situation)
{
    return situation->gpu ? nvml_gpu_energy_j(situation->pci_bus_id) : NAN;
}

/* Waits until a child has ended `epochs` more epochs, and then waits for its next turn, or until it has
 * ended itself. Ends it if this program receives a signal, or at the time `end_s`; returns whether that time
 * was reached. */
static bool watch(const struct situation *situation, struct advise_child *child, uint64_t epochs,
                  double end_s)
{
    struct pollfd sources[] = {{child->errors, POLLIN, 0}, {epochs > 0 ? child->turns : -1, POLLIN, 0}};
    /* The first epoch of a run needs no turn. */
    uint64_t given = child->waits && epochs > 0 ? give_turns(situation, child, epochs) : 1;
    bool late = false;
    char turn;
    while (true) {
        late |= timer_now_s() > end_s;
        if (file_signal_held() || late)
            kill(child->pid, late ? SIGKILL : SIGTERM);
        if (poll(sources, 2, LOOK_MS) <= 0)
            continue;
        if (sources[0].revents && !read_errors(child))
            return late;
        if (!sources[1].revents)
            continue;
        if (read(child->turns, &turn, 1) != 1) {
            sources[1].fd = -1; /* it ends */
            continue;
        }
        if (--epochs == child->counted) {
            child->begin_j = advise_energy_j(situation);
            child->begin_s = timer_now_s();
        }
        if (--given > 0)
            continue;
        /* The next epoch must not find what this one read in the page cache. */
        if (situation->evict)
            (void)advise_evict(situation->evict); /* it worked before the run */
        child->waits = true;
        if (epochs == 0)
            return late;
        given = give_turns(situation, child, epochs);
    }
}

/* Returns the last line that a child printed to stderr. */
static const char *last_line(struct advise_child *child)
{
    while (child->held > 0 && child->text[child->held - 1] == '\n')
        child->held--;
    child->text[child->held] = '\0';
    const char *last = strrchr(child->text, '\n');
    last = last ? last + 1 : child->text;
    return last + (strncmp(last, "fdsl-bench: ", 12) == 0 ? 12 : 0);
}

/* Waits for `epochs` epochs of a child or, if it has none or ends, for its end. */
static enum status attend(const struct situation *situation, struct advise_child *child, uint64_t epochs)
{
    const double limit_s = fmax(PATIENCE * situation->question.time_s, PATIENT_S);
    int outcome = 0;
    bool late = watch(situation, child, epochs, timer_now_s() + limit_s);
    if (child->waits && epochs > 0 && !late)
        return STATUS_OK;
    close_two((int[]){child->errors, child->turns});
    while (waitpid(child->pid, &outcome, 0) < 0 && errno == EINTR)
        ;
    child->pid = 0;
    if (file_signal_held())
        return status_set(STATUS_FAILED, "interrupted");
    if (late)
        return status_set(STATUS_UNAVAILABLE, "one run took longer than %.0f s; raise --time", limit_s);
    if (WIFSIGNALED(outcome) && WTERMSIG(outcome) == SIGKILL && epochs > 0)
        return status_set(STATUS_UNAVAILABLE, "a run was killed; perhaps memory ran out");
    if (WIFSIGNALED(outcome))
        return status_set(STATUS_FAILED, "a run was ended by signal %d", WTERMSIG(outcome));
    if (WEXITSTATUS(outcome) != STATUS_OK)
        return status_set(STATUS_UNAVAILABLE, "%s", last_line(child));
    return epochs == 0 ? STATUS_OK : status_set(STATUS_FAILED, "a run ended before its last epoch");
}

enum status advise_start(const struct situation *situation, const char *const *argv)
{
    struct advise_child child;
    TRY(launch(argv, false, &child));
    return attend(situation, &child, 0);
}

void advise_release(struct advise_child *child)
{
    if (child->pid != 0)
        (void)shutdown(child->turns, SHUT_RDWR);
}

void advise_end(const struct situation *situation, struct advise_child *child)
{
    if (child->pid == 0)
        return;
    advise_release(child);
    if (attend(situation, child, 0) != STATUS_OK && !file_signal_held())
        status_warn("the measurements of a run count, but it failed at its end: %s", status_text());
}

/* Returns the command line of a run whose rows are appended to the file `rows`. */
static void fill_command(const struct situation *situation, const char *workload,
                         const struct arguments *arguments, char rows[PATH_MAX],
                         const char *argv[ARGUMENTS_MAX + 8])
{
    const char *const first[] = {"fdsl-bench", "--workload", workload, "--out", rows};
    snprintf(rows, PATH_MAX, "%s/%s.csv", situation->rows, workload);
    memcpy(argv, first, sizeof first);
    memcpy(&argv[COUNT_OF(first)], arguments->of, arguments->count * sizeof *argv);
}

static enum status read_rows(const char *rows, struct table *table)
{
    TRY(table_read(rows, table));
    return table->rows > 0 ? STATUS_OK : status_set(STATUS_FAILED, "%s has no rows", rows);
}

enum status advise_run_child(const struct situation *situation, const char *workload,
                             const struct arguments *arguments, struct table *table)
{
    char rows[PATH_MAX];
    const char *argv[ARGUMENTS_MAX + 8] = {NULL};
    fill_command(situation, workload, arguments, rows, argv);
    TRY(advise_start(situation, argv));
    return read_rows(rows, table);
}

enum status advise_run_epochs(const struct situation *situation, const char *workload,
                              const struct arguments *arguments, uint64_t epochs, uint64_t counted,
                              struct advise_child *child, struct table *table)
{
    char rows[PATH_MAX];
    const char *argv[ARGUMENTS_MAX + 8] = {NULL};
    fill_command(situation, workload, arguments, rows, argv);
    if (child->pid == 0)
        TRY(launch(argv, true, child));
    child->counted = counted;
    TRY(attend(situation, child, epochs));
    return read_rows(rows, table);
}

double advise_number(const struct table *table, size_t row, const char *column)
{
    const char *cell = table_cell(table, row, table_column(table, column));
    char *end;
    double value = strtod(cell, &end);
    return *cell && *end == '\0' ? value : NAN;
}

/* Measures a candidate once, in a child process; see advise_run_child(). */
static enum status run_once(const struct situation *situation, const struct candidate *candidate,
                            bool with_step, double time_s, struct measured *measured)
{
    struct arguments arguments = {0};
    CLOSED_BY(table_free) struct table table = {0};
    fill_arguments(situation, candidate, with_step, time_s, &arguments);
    TRY(advise_run_child(situation, candidate->workload, &arguments, &table));
    *measured =
        (struct measured){.items = advise_number(&table, table.rows - 1, "items"),
                          .time_s = advise_number(&table, table.rows - 1, "time_mean_s"),
                          .memory_bytes = advise_number(&table, table.rows - 1, "peak_memory_bytes"),
                          .joules_per_item = advise_number(&table, table.rows - 1, "energy_j_per_item"),
                          .stall_share = advise_number(&table, table.rows - 1, "stall_share"),
                          .step_s = advise_number(&table, table.rows - 1, "step_s"),
                          .busy_share = advise_number(&table, table.rows - 1, "busy_share")};
    return STATUS_OK;
}

/* ---- Rounds ---- */

/* A way that takes part in the rounds. */
struct contender {
    size_t number; /* in the array of contenders, which is in the order of the candidates */
    const struct candidate *candidate;
    struct advice *advice;
    double took_s;           /* by its latest measurement */
    int failures;            /* consecutive */
    struct advise_pace pace; /* of training runs */
};

/* The memory of generators is computed from the size of a batch, and not from `memory_bytes`. */
void advise_count_costs(const struct situation *situation, const struct candidate *candidate,
                        double memory_bytes, double samples, struct advice *advice)
{
    const struct advise_set *set = &situation->set;
    const enum advise_place place = candidate->place;
    bool trains = situation->question.model, generated = place == ADVISE_GENERATED;
    bool local = !generated && place != ADVISE_CONSTANT && place != ADVISE_REMOTE &&
                 (!set->remote || situation->options->cache_dir);
    double pixels = (double)set->res * set->res * set->channels * (double)situation->question.batch;
    double bytes = place == ADVISE_PREPARED ? situation->question.prepare_bytes * (double)set->samples
                                            : set->bytes;         /* of the whole set */
    double missing = 1 - fmin(1, samples / (double)set->samples); /* share of the set that a run left out */
    advice->disk_bytes = place == ADVISE_PREPARED || local ? bytes : 0;
    advice->memory_bytes = memory_bytes;
    if (generated && !trains)
        advice->memory_bytes = candidate->gpu ? 2 * 2 * pixels : pixels; /* two batches of two-byte values */
    if (place == ADVISE_MEMORY || place == ADVISE_PREPARED || (place == ADVISE_MIXED && local))
        advice->memory_bytes += bytes; /* the page cache */
    if (place == ADVISE_RESIDENT)
        advice->memory_bytes += missing * bytes;
    if (place == ADVISE_GPU_MEMORY)
        advice->memory_bytes +=
            trains ? missing * advise_device_bytes(situation) : set->bytes - set->measured_bytes;
}

#define MIX_SHARE    (2.0 / 3) /* of the largest share with which steps do not wait, so that they never do */
#define MIX_NEEDLESS 0.98      /* a rate from this share of the step's on needs no mixture */

/* Returns which share of the images that a step needs the fastest way that reads the set delivered. */
static double readable_share(const struct advice_question *question, const struct contender *contender)
{
    double best = 0;
    for (const struct contender *other = contender - contender->number; other < contender; other++)
        if (other->advice->measured && strcmp(other->candidate->variant, "load") == 0 &&
            other->advice->place != ADVISE_PREPARED)
            best = fmax(best, other->advice->reached_per_s[other->advice->rounds - 1]);
    return best / advise_needed(question);
}

/* Chooses the share of the samples of a mixture that are read: MIX_SHARE of what can be read, as --mix
 * synth:auto does after a search that takes longer. */
static enum status choose_share(double readable, struct advise_pace *pace)
{
    if (!(readable > 0))
        return status_set(STATUS_UNAVAILABLE, "no way that reads all images could be measured");
    if (readable > MIX_NEEDLESS)
        return status_set(STATUS_UNAVAILABLE,
                          "steps wait for at most %.0f %% of their time even if all images are read",
                          100 * (1 - MIX_NEEDLESS));
    pace->share = 1e-4 * round(1e4 * fmax(0.01, MIX_SHARE * readable)); /* --mix takes four decimals */
    snprintf(pace->mix, sizeof pace->mix, "synth:%.4g,load:%.4g", 1 - pace->share, pace->share);
    return STATUS_OK;
}

/* Measures a way once. If there is a GPU, a training step consumes the images; the rate without a step is
 * then only measured in the first round. */
static enum status measure(struct situation *situation, double time_s, struct contender *contender)
{
    const struct candidate *candidate = contender->candidate;
    struct advice *advice = contender->advice;
    struct advice_question *question = &situation->question;
    if (question->model) {
        if (candidate->place == ADVISE_MIXED && contender->pace.share == 0) {
            const double readable = readable_share(question, contender);
            advice->dropped = readable > MIX_NEEDLESS; /* other runs would not change that */
            TRY(choose_share(readable, &contender->pace));
        }
        return advise_train_once(situation, candidate, time_s, &contender->pace, advice);
    }
    struct measured alone = {.items = NAN}, step;
    double images = candidate->place == ADVISE_GENERATED ? 1 : situation->set.depth; /* per item */
    if (!situation->gpu || !advice->measured) {
        TRY(run_once(situation, candidate, false, time_s, &alone));
        advice->joules_per_image = alone.joules_per_item / images;
        advise_count_costs(situation, candidate, alone.memory_bytes, NAN, advice);
    }
    double images_per_s = images * alone.items / alone.time_s;
    if (!situation->gpu) {
        advise_add(question, advice, images_per_s, NAN, NAN);
        return STATUS_OK;
    }
    TRY(run_once(situation, candidate, true, time_s, &step));
    double reached = step.busy_share * (double)question->batch / step.step_s;
    advise_add(question, advice, images_per_s, reached, step.stall_share);
    return STATUS_OK;
}

/* Returns the way on the GPU that gets images from the same place as this way on the CPU, if it is possible.
 * If it was measured, the way on the CPU is needless. */
static const struct advice *substitute(const struct contender *contender)
{
    const struct contender *before = contender - 1;
    return !contender->candidate->gpu && contender->number > 0 && before->candidate->gpu &&
                   before->candidate->place == contender->candidate->place
               ? before->advice
               : NULL;
}

#define FAILURES_MAX 2 /* a way that fails so often in a row is not measured again */

/* Returns whether a way is left out of a round; in the first round, sets the reason. */
static bool is_left_out(const struct situation *situation, size_t round, const struct contender *contender)
{
    struct advice *advice = contender->advice;
    const struct advice *instead = substitute(contender);
    const double limit_s = situation->question.time_s;
    if (round > 0 || advice->dropped)
        return advice->dropped;
    if (instead && instead->measured)
        status_set(STATUS_UNAVAILABLE, "%s is measured instead", instead->variant);
    else if (timer_now_s() - situation->begin_s > limit_s)
        status_set(STATUS_UNAVAILABLE,
                   "--time %.4g was over before the first measurement of this way; raise it", limit_s);
    else
        return false;
    advice->reason = status_save(STATUS_UNAVAILABLE);
    return advice->dropped = true;
}

/* Ends the runs of the ways that were dropped, or of all ways. They end at the same time. */
static void end_runs(const struct situation *situation, struct contender *contenders, size_t count, bool all)
{
    for (size_t i = 0; i < count; i++)
        if (all || contenders[i].advice->dropped)
            advise_release(&contenders[i].pace.run);
    for (size_t i = 0; i < count; i++)
        if (all || contenders[i].advice->dropped)
            advise_end(situation, &contenders[i].pace.run);
}

/* Measures every contender once, in reverse order in every other round, so that a steady change of the
 * machine's load favours none. A way may fail once: other processes may just have emptied the page cache. */
static enum status play_round(struct situation *situation, size_t round, double time_s,
                              struct contender *contenders, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct contender *next = &contenders[round % 2 ? count - 1 - i : i];
        struct advice *advice = next->advice;
        double begin_s = timer_now_s();
        if (is_left_out(situation, round, next))
            continue;
        if (situation->progress.shown)
            progress_show(&situation->progress, "round %zu: %s (%s), %.0f of at most %.0f s", round + 1,
                          advice->name, advice->variant, begin_s - situation->begin_s,
                          situation->question.time_s);
        enum status status = measure(situation, time_s, next);
        if (status_exit(status) == STATUS_FAILED)
            return file_signal_held() ? status
                                      : status_prefix(status, "%s (%s)", advice->name, advice->variant);
        next->took_s = timer_now_s() - begin_s;
        next->failures = status == STATUS_OK ? 0 : next->failures + 1;
        if (status == STATUS_OK)
            continue;
        advice->reason = status_save(status);
        advise_miss(advice);
        if (situation->alone)
            end_runs(situation, contenders, count, true);
        advice->dropped |= next->failures == FAILURES_MAX;
        advice->measured &= !advice->dropped;
    }
    return STATUS_OK;
}

#define ROUNDS_GUESS 12 /* about as many rounds should fit into --time */
#define OVERTIME \
    2 /* --time may be exceeded by this factor to finish ADVISE_ROUNDS_MIN rounds of training runs */
#define ROUNDS_TRAIN 5 /* of training runs, which take longer to start and are measured longer */

/* Repeats the ways in turn until the verdict is certain or the time is over. The verdict is looked at only a
 * few times, after 3, 4, 5, 7, 9, 11, 14, ... rounds: each look is another chance to err. A signal ends the
 * rounds. If enough are finished, the unfinished one does not count, and the result is STATUS_OK. */
static enum status play(struct situation *situation, struct contender *contenders, size_t count,
                        struct advice *advice, size_t advice_count)
{
    FREED struct advice *finished = calloc(advice_count, sizeof *finished);
    size_t ways = 0;
    TRY(ALLOCATED(finished, "out of memory for the rounds"));
    for (size_t i = 0; i < count; i++)
        ways += !substitute(&contenders[i]);
    status_say(
        "measures %zu way%s in turn, for at most %.3g s (--time); ends earlier when the verdict is certain",
        ways, ways == 1 ? "" : "s", situation->question.time_s);
    situation->begin_s = timer_now_s();
    situation->room = advise_room(situation);
    struct advice_question *question = &situation->question;
    /* Half of the time goes to starting runs, to warming up and to waiting for the cache. */
    double time_s = question->time_s /
                    (2.0 * (question->model ? ROUNDS_TRAIN : ROUNDS_GUESS) * (double)(ways ? ways : 1));
    enum status status = STATUS_OK;
    for (size_t round = 0, look = ADVISE_ROUNDS_MIN; round < ADVISE_ROUNDS_MAX;) {
        memcpy(finished, advice, advice_count * sizeof *advice);
        status = play_round(situation, round, time_s, contenders, count);
        if (status != STATUS_OK && file_signal_held() && round >= ADVISE_ROUNDS_MIN) {
            memcpy(advice, finished, advice_count * sizeof *advice);
            progress_clear(&situation->progress);
            status_warn("interrupted: the verdict is that of the %zu finished rounds", round);
            return STATUS_OK;
        }
        if (status != STATUS_OK && file_signal_held()) {
            progress_clear(&situation->progress);
            status_warn("interrupted: no verdict, which needs %d finished rounds", ADVISE_ROUNDS_MIN);
        }
        question->took_s = timer_now_s() - situation->begin_s;
        /* How long the next round will probably take; 0 if nothing is left to be measured. */
        double next_s = 0;
        for (size_t i = 0; i < count; i++)
            next_s += contenders[i].advice->dropped ? 0 : contenders[i].took_s;
        if (status != STATUS_OK)
            break;
        if (++round == look) {
            advise_note_noise(question, advice, advice_count);
            advise_drop(question, advice, advice_count);
            end_runs(situation, contenders, count, false);
            struct advice_decision decision = advise_decide(question, advice, advice_count);
            if (decision.decided || decision.rival == advice_count) /* more rounds change nothing */
                break;
            look += 1 + look / 5;
        }
        /* Training runs take long to start, and two rounds decide nothing. */
        bool needed = advise_lacks_rounds(question, advice, advice_count);
        if (next_s == 0 || question->took_s + next_s > question->time_s * (needed ? OVERTIME : 1))
            break;
    }
    progress_clear(&situation->progress);
    return status;
}

#define WAYS_MAX (COUNT_OF(candidates) > ADVISE_TRAININGS ? COUNT_OF(candidates) : ADVISE_TRAININGS)

/* Measures the candidates that the machine and the data set permit. Sets `*count` to the number of lines in
 * the table, which also lists candidates that could not be measured. */
static enum status measure_all(struct situation *situation, struct advice *advice, size_t *count)
{
    const bool trains = situation->question.model;
    struct contender contenders[WAYS_MAX];
    size_t contender_count = 0;
    *count = 0;
    for (size_t i = 0; i < (trains ? ADVISE_TRAININGS : COUNT_OF(candidates)); i++) {
        const struct candidate *candidate = trains ? &advise_trainings[i] : &candidates[i];
        bool of_files = !situation->set.shards && candidate->name_of_files;
        if (candidate->place == ADVISE_REMOTE && !situation->set.remote)
            continue;
        struct advice *next = &advice[(*count)++];
        *next = (struct advice){.name = of_files ? candidate->name_of_files : candidate->name,
                                .variant = variant_of(situation, candidate),
                                .place = candidate->place,
                                .stall_share = NAN,
                                .disk_bytes = NAN,
                                .memory_bytes = NAN,
                                .joules_per_image = NAN};
        enum status possible = is_possible(situation, candidate);
        if (possible == STATUS_OK) {
            contenders[contender_count] =
                (struct contender){.number = contender_count, .candidate = candidate, .advice = next};
            contender_count++;
        } else
            next->reason = status_save(possible);
    }
    enum status status = play(situation, contenders, contender_count, advice, *count);
    const struct failure failure = status_save(status);
    end_runs(situation, contenders, contender_count, true);
    return status_restore(&failure);
}

/* ---- The data set ---- */

#define CODED_RES     224  /* default of --out-res for JPEG and PNG files */
#define LOOKED        64   /* samples that are read to find the properties of the set */
#define RAW_BYTES     64e6 /* minimum size of the measured part of a set of arrays: reading is fast */
#define BATCHES_GPU   8    /* measured batches per thread with a GPU, which pipelines them */
#define SAMPLES_CPU   128  /* measured samples per thread without a GPU */
#define BATCHES_TRAIN 64   /* measured steps per epoch with a network, at least */
#define SLACK         1.25 /* the whole set is measured if it is not larger than the part by this factor */

/* Decodes the image of a sample, and sets the properties of the set's images from it. */
static enum status look_at_image(const struct dataset *dataset, const struct dataset_sample *sample,
                                 struct image_scratch *scratch, struct advise_set *set)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    const struct dataset_member *member = &dataset->members[sample->member + sample->image % sample->members];
    struct image image;
    bool is_image = false;
    FREED uint8_t *bytes = malloc(member->size + 1);
    enum status status = bytes ? plain_bytes(&plain, member, member->size, bytes)
                               : status_set(STATUS_EXHAUSTED, "out of memory for an image");
    if (status == STATUS_OK)
        status =
            image_decode(members_format(member->extension), bytes, member->size, scratch, &image, &is_image);
    if (status == STATUS_OK && !is_image)
        status = status_set(STATUS_USAGE,
                            "'%s' is not an image, and advise compares images; name them with --image",
                            member->extension);
    if (status == STATUS_OK) {
        set->coded = image_format(members_format(member->extension), bytes, member->size) != IMAGE_NPY;
        set->channels = set->coded || image.channels == 3 ? 3 : 1;
        set->depth = image.depth;
        set->pixels = (double)image.width * image.height;
        if (!set->coded)
            set->res = image.height > image.width ? image.height : image.width;
    }
    plain_close(&plain);
    return status == STATUS_OK ? status : dataset_at(dataset, sample, member, status);
}

/* Looks at the first image or, with --on-error skip, at the first image that can be read. */
static enum status look_at_images(const struct advise_options *options, const struct dataset *dataset,
                                  struct advise_set *set)
{
    struct image_scratch scratch = {0};
    enum status status = STATUS_FAILED;
    for (uint32_t i = 0; status == STATUS_FAILED && i < dataset->sample_count; i++) {
        status = look_at_image(dataset, &dataset->samples[i], &scratch, set);
        if (!options->on_error)
            break;
    }
    image_scratch_close(&scratch);
    if (status != STATUS_FAILED || options->on_error)
        return status;
    return dataset_advise_skip(STATUS_FAILED);
}

/* Every look_every-th sample is inspected, so that the inspected files cover all classes. */
static uint64_t look_every = 1;

static bool is_looked_at(uint64_t number)
{
    return number % look_every == 0 && number / look_every < LOOKED;
}

/* Lists the samples of the set, without reading them. */
static enum status list(const struct advise_options *options, const struct remote_options *remote,
                        struct dataset *dataset)
{
    struct members members;
    TRY(members_parse(options->image, options->label, options->member, &members));
    return dataset_find(options->data, options->on_error, false, &members, remote, dataset);
}

/* Lists the set and reads its first samples. Sets `*sample_bytes` to their mean size. */
static enum status look(const struct advise_options *options, const struct remote_options *remote,
                        struct advise_set *set, double *sample_bytes)
{
    CLOSED_BY(dataset_close) struct dataset dataset = {.directory = -1};
    TRY(list(options, remote, &dataset));
    set->shards = dataset.shards;
    set->remote = dataset.remote;
    if (!set->remote && options->cache_dir)
        return status_set(STATUS_USAGE, "--cache-dir is for data at a URL; drop it");
    for (uint32_t i = 0; dataset.shards && i < dataset.file_count; i++)
        set->bytes += (double)dataset.files[i].bytes;
    set->samples = dataset.sample_count;
    look_every = dataset.shards ? 1 : set->samples / LOOKED + 1;
    if (!set->remote)
        dataset.wanted = is_looked_at;
    enum status status = dataset_check(options->data, &dataset);
    if (status != STATUS_OK && !options->on_error && dataset.faults)
        status = dataset_advise_skip(status);
    TRY(status);
    if (dataset.sample_count == 0)
        return status_set(STATUS_FAILED, "--data %s: none of %d samples can be read", options->data, LOOKED);
    *sample_bytes = (double)dataset.bytes / dataset.sample_count;
    if (!dataset.shards)
        set->bytes = *sample_bytes * (double)set->samples;
    return look_at_images(options, &dataset, set);
}

static enum status cannot_link(const char *path)
{
    return status_set(STATUS_FAILED, "%s: cannot link a file: %s", path, strerror(errno));
}

/* Links a file of the data set into the folder set->data, under the same name. */
static enum status link_file(const struct advise_set *set, const char *whole, const char *name)
{
    char target[PATH_MAX * 2], path[PATH_MAX * 2];
    snprintf(target, sizeof target, "%s/%s", whole, name);
    snprintf(path, sizeof path, "%s/%s", set->data, name);
    for (char *slash = strchr(path + strlen(set->data) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(path, 0700) != 0 && errno != EEXIST)
            return cannot_link(path);
        *slash = '/';
    }
    return symlink(target, path) == 0 || errno == EEXIST ? STATUS_OK : cannot_link(path);
}

/* Links the members of every `stride`-th sample. */
static enum status link_samples(const struct dataset *dataset, const char *whole, uint64_t stride,
                                struct advise_set *set)
{
    struct stat info;
    for (uint64_t i = 0; i < dataset->sample_count; i += stride) {
        const struct dataset_sample *sample = &dataset->samples[i];
        for (uint32_t m = 0; m < sample->members; m++) {
            const char *name = dataset->files[dataset->members[sample->member + m].file].name;
            TRY(link_file(set, whole, name));
            if (fstatat(dataset->directory, name, &info, 0) == 0)
                set->measured_bytes += (double)info.st_size;
        }
        set->measured_samples++;
    }
    set->bytes = set->measured_bytes / (double)set->measured_samples * (double)set->samples;
    return STATUS_OK;
}

#ifdef HAVE_XXHASH
/* Adds a sample to the index. Returns false if an index cannot store it. */
static bool add_sample(const struct dataset *dataset, const struct dataset_sample *sample, uint32_t unit,
                       struct index *index)
{
    if (index_check_name(sample->key) != STATUS_OK)
        return false;
    index->samples[index->sample_count++] =
        (struct index_sample){sample->key, unit, index->member_count, sample->members};
    for (uint32_t m = 0; m < sample->members; m++) {
        const struct dataset_member *member = &dataset->members[sample->member + m];
        if (member->linked || index_check_name(member->extension) != STATUS_OK)
            return false;
        index->members[index->member_count++] =
            (struct index_member){member->extension, member->offset, member->size, member->whole};
    }
    return true;
}

/* Writes an index of the first `count` samples, which are in the first `shards` shards, so that a run reads
 * only these. Writes none if a sample cannot be read, which a run will report, or if an index cannot store
 * its names or hard links. */
static enum status index_part(struct dataset *dataset, uint32_t shards, uint32_t count,
                              struct advise_set *set)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    FREED struct index_unit *units = calloc(shards, sizeof *units);
    FREED struct index_sample *samples = calloc(count, sizeof *samples);
    FREED struct index_member *members = calloc(dataset->member_count, sizeof *members);
    struct index index = {.layout = INDEX_SHARDS,
                          .provenance = "",
                          .units = units,
                          .samples = samples,
                          .members = members,
                          .unit_count = shards};
    TRY(ALLOCATED(units && samples && members, "out of memory for an index of %u samples", count));
    enum status status = STATUS_OK;
    double bytes = 0;
    bool storable = true;
    for (uint32_t f = 0; storable && f < shards; f++) {
        uint32_t first = dataset->shard_first[f],
                 end = dataset->shard_first[f + 1] < count ? dataset->shard_first[f + 1] : count;
        units[f] =
            (struct index_unit){dataset->files[f].name, dataset->files[f].bytes, "", first, end - first};
        storable = !strchr(units[f].name, '/') && index_check_name(units[f].name) == STATUS_OK;
        for (uint32_t i = first; storable && i < end; i++) {
            status = plain_sample(&plain, &dataset->samples[i], true);
            storable = status == STATUS_OK && add_sample(dataset, &dataset->samples[i], f, &index);
            bytes += (double)dataset->samples[i].bytes;
        }
    }
    plain_close(&plain);
    if (!storable)
        return status == STATUS_FAILED ? STATUS_OK : status;
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/part.index", set->data);
    TRY(index_save(path, &index, 0, shards));
    set->measured_samples = count;
    set->measured_bytes = bytes;
    return STATUS_OK;
}
#endif

/* Links the first shards: enough for `samples` samples, but at most --subset bytes, and at least one. */
static enum status link_shards(const struct advise_options *options, struct dataset *dataset,
                               const char *whole, double samples, struct advise_set *set)
{
    uint32_t linked = 0;
    for (; linked < dataset->file_count; linked++) {
        const struct dataset_file *shard = &dataset->files[linked];
        if (linked > 0 && ((double)set->measured_samples >= samples ||
                           set->measured_bytes + (double)shard->bytes > (double)options->subset))
            break;
        TRY(link_file(set, whole, shard->name));
        set->measured_bytes += (double)shard->bytes;
        set->measured_samples = dataset->shard_first[linked + 1];
    }
#ifdef HAVE_XXHASH
    if (linked == 1) /* it may be larger than --subset */
        samples = fmax(
            1, fmin(samples, (double)options->subset / set->measured_bytes * (double)set->measured_samples));
    if ((double)set->measured_samples > SLACK * samples)
        return index_part(dataset, linked, (uint32_t)ceil(samples), set);
#endif
    return STATUS_OK;
}

/* Fills the temporary folder with links to a part of the set that has about `samples` samples. */
static enum status link_part(const struct advise_options *options, const struct remote_options *remote,
                             double samples, struct advise_set *set)
{
    char whole[PATH_MAX];
    CLOSED_BY(dataset_close) struct dataset dataset = {.directory = -1};
    TRY(list(options, remote, &dataset));
    set->measured_samples = 0;
    set->measured_bytes = 0;
    snprintf(set->data, sizeof set->data, "%s/subset", set->folder);
    if (!realpath(remote_is(dataset.path) ? remote_local(dataset.path) : dataset.path, whole) ||
        mkdir(set->data, 0700) != 0)
        return cannot_link(set->data);
    if (dataset.shards)
        return link_shards(options, &dataset, whole, samples, set);
    return link_samples(&dataset, whole, (uint64_t)ceil((double)set->samples / samples), set);
}

/* Creates the temporary folder. Holds signals back until close_set() has removed the folder. */
static enum status open_folder(struct advise_set *set)
{
    const char *temporary = getenv("TMPDIR");
    file_hold_signals();
    snprintf(set->folder, sizeof set->folder, "%s/fdsl-advise-XXXXXX",
             temporary && *temporary ? temporary : "/tmp");
    if (mkdtemp(set->folder))
        return STATUS_OK;
    *set->folder = '\0';
    return status_set(STATUS_FAILED, "cannot create a temporary folder: %s; set TMPDIR", strerror(errno));
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *at)
{
    (void)info, (void)kind, (void)at;
    return remove(path);
}

void advise_remove(const char *folder)
{
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void remove_folder(struct advise_set *set)
{
    if (*set->folder)
        advise_remove(set->folder);
    *set->folder = '\0';
}

static void close_set(struct advise_set *set)
{
    remove_folder(set);
    file_release_signals();
}

/* Opens the data set, and chooses the part of it that is measured. A part suffices, because the rate of a way
 * does not depend on the number of samples; so a verdict takes no longer for a large set. Call close_set(),
 * even after a failure. Until then, signals that would end the program are held back
 * (file_hold_signals()). */
static enum status open_set(struct situation *situation)
{
    const struct advise_options *options = situation->options;
    const struct remote_options remote = {.cache_dir = remote_is(options->data) ? options->cache_dir : NULL,
                                          .cache_bytes = options->cache_bytes};
    struct advise_set *set = &situation->set;
    double sample_bytes = 0;
    *set = (struct advise_set){.res = CODED_RES, .channels = 1, .depth = 1};
    TRY(look(options, &remote, set, &sample_bytes));
    if (set->depth > 1 && options->out_res)
        return status_set(STATUS_USAGE, "--out-res: a sample has %u images, which cannot be resized; drop it",
                          set->depth);
    if (options->out_res)
        set->res = (uint32_t)options->out_res;
    if (snprintf(set->data, sizeof set->data, "%s", options->data) >= (int)sizeof set->data)
        return status_set(STATUS_USAGE, "--data: the name is too long; use a shorter path");
    TRY(open_folder(set));
    set->measured_samples = set->samples;
    set->measured_bytes = set->bytes;
    double samples =
        situation->threads * (situation->gpu ? BATCHES_GPU * (double)options->batch : SAMPLES_CPU);
    if (situation->question.model)
        samples = fmax(samples, BATCHES_TRAIN * (double)options->batch);
    if (!set->coded)
        samples = fmax(samples, RAW_BYTES / sample_bytes);
    double most = fmax(1, (double)options->subset / (set->bytes / (double)set->samples));
    if (set->remote || ((double)set->samples <= SLACK * samples && set->bytes <= (double)options->subset))
        return STATUS_OK;
    return link_part(options, &remote, set->shards ? samples : fmin(samples, most), set);
}

/* ---- The whole command ---- */

/* Creates the folder of --out before anything is measured. Locks it until the end of the process: the rows of
 * a run are the last ones of a file in it, so another process must not append any. */
static enum status make_out(const char *folder)
{
    struct stat info;
    bool locked;
    if (!folder)
        return STATUS_OK;
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return status_set(STATUS_USAGE, "--out %s: cannot create the folder: %s", folder, strerror(errno));
    if (stat(folder, &info) == 0 && !S_ISDIR(info.st_mode))
        return status_set(STATUS_USAGE, "--out %s: this is a file; name a folder", folder);
    if (access(folder, W_OK) != 0)
        return status_set(STATUS_USAGE, "--out %s: cannot write to the folder: %s", folder, strerror(errno));
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return status_set(STATUS_USAGE, "--out %s: cannot open the folder: %s", folder, strerror(errno));
    TRY(lock_take(fd, folder, LOCK_EX, &locked));
    if (!locked)
        status_warn("--out %s: this file system has no locks; no other advise may write to this folder",
                    folder);
    return STATUS_OK;
}

/* Reads --compute: the time of a step, or the network whose step measure_step() measures. */
static enum status read_compute(struct situation *situation)
{
    static const struct option_spec network = {"compute", "train:MODEL", OPTION_CHOICE, 0,
                                               .choices = model_names};
    struct advice_question *question = &situation->question;
    struct compute compute = {.text = situation->options->compute};
    const char *text = situation->step = compute.text;
    int model;
    if (!text)
        return status_set(
            STATUS_USAGE,
            "say how long a training step takes: --compute MS, or --compute train:MODEL to measure it");
    if (strncmp(text, "train", 5) != 0 || (text[5] && text[5] != ':')) {
        TRY(compute_read(&compute));
        question->step_s = compute.step_s;
        return STATUS_OK;
    }
    TRY(option_set(&network, &model, text + (text[5] ? 6 : 5)));
    question->model = model_names[model];
    return advise_choose_engine(situation);
}

/* Rejects options without effect, and sets what depends on --compute train:MODEL. */
static enum status check_network_options(struct situation *situation)
{
    const struct advise_options *options = situation->options;
    struct advice_question *question = &situation->question;
    if (!question->model && options->nodes > 1)
        return status_set(STATUS_USAGE, "--nodes is for --compute train:MODEL; add that, or drop --nodes");
    if (options->exchange_rows && options->nodes == 1)
        return status_set(STATUS_USAGE, "--exchange-rows is for --nodes; add that, or drop --exchange-rows");
    if (!question->model)
        return STATUS_OK;
    question->estimated = false;
    if (!(options->time_s > 0) && !situation->gpu)
        question->time_s = TIME_TRAIN_S;
    return STATUS_OK;
}

#define ROWS_BYTES (UINT64_C(16) << 20) /* the rows of all rounds have fewer */

static enum status check_options(struct situation *situation, struct advise_options *options)
{
    if (!options->data)
        return status_set(STATUS_USAGE, "name the data set with --data DIR or URL; see advise --help");
    device_use_all_queues();
    situation->resources = (struct resources){.threads = 1, .device = (int)options->device};
    enum status probed = device_probe((int)options->device);
    situation->gpu = probed == STATUS_OK;
    if (situation->gpu) /* without it, the energy is unknown */
        (void)device_pci_bus_id((int)options->device, situation->pci_bus_id, sizeof situation->pci_bus_id);
    if (!situation->gpu && options_given(situation->given, "device"))
        return status_prefix(probed, "--device %d", (int)options->device);
    situation->question = (struct advice_question){.batch = options->batch,
                                                   .nodes = (uint32_t)options->nodes,
                                                   .prepare_s = {NAN, NAN, NAN},
                                                   .exchange_s = {NAN, NAN, NAN},
                                                   .estimated = !situation->gpu,
                                                   .margin = options->margin / 100,
                                                   .time_s = options->time_s > 0 ? options->time_s
                                                             : situation->gpu    ? TIME_GPU_S
                                                                                 : TIME_S};
    TRY(read_compute(situation));
    TRY(format_check(options->format));
    TRY(make_out(options->out));
    TRY(check_network_options(situation));
    TRY(file_check_limit(ROWS_BYTES));
    struct env env;
    env_capture(&env);
    situation->threads = options->threads ? (int)options->threads : env.allowed_threads;
    situation->question.threads = env.allowed_threads;
    (void)getloadavg(&situation->question.load, 1); /* 0 if it is unknown */
    progress_begin(&situation->progress, false);
    return STATUS_OK;
}

static enum status measure_and_print(struct situation *situation)
{
    const struct advise_options *options = situation->options;
    const struct advise_set *set = &situation->set;
    struct advice_question *question = &situation->question;
    struct advice advice[WAYS_MAX];
    size_t count = 0;
    TRY(open_set(situation));
    situation->rows = options->out ? options->out : set->folder;
    question->res = set->res;
    question->batch = (question->batch + set->depth - 1) / set->depth * set->depth;
    question->samples = set->samples;
    question->measured = set->measured_samples;
    question->bytes = set->bytes;
    question->measured_bytes = set->measured_bytes;
    if (question->model) {
        TRY(advise_measure_step(situation));
        if (question->nodes > 1)
            TRY(advise_measure_exchange(situation));
        TRY(advise_measure_prepare(situation));
    }
    TRY(measure_all(situation, advice, &count));
    if (question->model) {
        advise_conclude(question, advice, count);
        for (size_t i = 0; i < count; i++)
            advice[i].command = advice[i].measured ? advise_command(situation, &advice[i]) : NULL;
    }
    remove_folder(&situation->set); /* printing to a pipe that is closed ends the program */
    enum status status = advise_print(options->data, options->format, question, advice, count);
    for (size_t i = 0; i < count; i++)
        free(advice[i].command);
    return status;
}

enum status advise_run(int argc, char *argv[])
{
    struct advise_options values = {0};
    struct options options = {.tables = {{specs, COUNT_OF(specs), &values}},
                              .table_count = 1,
                              .operand = "data",
                              .help = "advise --help"};
    struct situation situation = {.options = &values, .given = &options};
    enum status status = options_parse(&options, argc, argv);
    if (status == STATUS_OK && values.help)
        print_help();
    else if (status == STATUS_OK)
        status = check_options(&situation, &values);
    options_free(&options);
    if (status != STATUS_OK || values.help)
        return status;
    status = measure_and_print(&situation);
    close_set(&situation.set); /* a signal that was held back ends the program here */
    return status;
}
