#include "run/advise.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/options.h"
#include "core/variant.h"
#include "data/dataset.h"
#include "data/image_fit.h"
#include "data/members.h"
#include "machine/device.h"
#include "machine/memory.h"
#include "run/advise_parts.h"
#include "run/formats.h"

#define AT(field) offsetof(struct advise_options, field)
static const struct option_spec specs[] = {
    {"data", "DIR", OPTION_TEXT, AT(data), NULL, 0, 0, NULL, false,
     "the data set: a folder of samples or tar shards, or a URL of shards, as in --workload load"},
    {"compute", "MS|train[:MODEL]", OPTION_TEXT, AT(compute.text), NULL, 0, 0, NULL, false,
     "the training step that consumes each batch: its time in milliseconds, or a network whose step is "
     "measured on the GPU"},
    {"batch", "N", OPTION_COUNT, AT(batch), "256", 1, 1 << 20, NULL, false, "images per step"},
    {"out-res", "PIXELS", OPTION_COUNT, AT(out_res), NULL, 1, FIT_RES_MAX, NULL, false,
     "width and height of the images that the step gets (default: as stored; 224 for JPEG and PNG files)"},
    {"fit", "HOW", OPTION_CHOICE, AT(fit), "resize", 0, 0, fit_names, false,
     "how a decoded image gets the size --out-res; see --workload load --help. HOW is one of"},
    MEMBER_OPTIONS(AT(image), AT(label), AT(member)),
    {"cache-dir", "DIR", OPTION_TEXT, AT(cache_dir), NULL, 0, 0, NULL, false,
     "folder that keeps copies of the shards of a URL; reading these copies is then measured too"},
    {"cache-bytes", "N[K|M|G]", OPTION_BYTES, AT(cache_bytes), "0", 0, 1e18, NULL, false,
     "maximum size of --cache-dir; 0 means no limit"},
    {"subset", "N[K|M|G]", OPTION_BYTES, AT(subset), "512M", 1, 1e18, NULL, false,
     "measure only the first shards of a folder: as many as fit into this size, but at least one"},
    {"on-error", "WHAT", OPTION_CHOICE, AT(on_error), "fail", 0, 0, dataset_on_error, false,
     "what to do with an image that cannot be read: fail, or skip it. WHAT is one of"},
    {"threads", "N", OPTION_COUNT, AT(threads), "0", 0, 4096, NULL, false,
     "CPU threads that read and decode; 0 means all that this process may use"},
    {"device", "N", OPTION_COUNT, AT(device), "0", 0, 1024, NULL, false, "CUDA device"},
    {"seconds", "S", OPTION_REAL, AT(seconds), "2", 0.01, 3600, NULL, false,
     "minimum time per measurement, without set-up"},
    {"out", "DIR", OPTION_TEXT, AT(out), NULL, 0, 0, NULL, false,
     "keep the rows of all measurements in DIR/synth.csv and DIR/load.csv"},
    {"format", "FORMAT", OPTION_CHOICE, AT(format), "table", 0, 0, format_names, false, "format of stdout"},
    {"help", NULL, OPTION_FLAG, AT(help), NULL, 0, 0, NULL, false, "print this help"},
};

static void print_help(void)
{
    puts("fdsl-bench advise - generate images, keep them in GPU memory, or read them from memory, disk or a "
         "URL?\n"
         "\n"
         "usage: fdsl-bench advise --data DIR|URL --compute MS|train:MODEL [options]\n"
         "\n"
         "Measures each source of images (generator, GPU memory, memory, disk, URL) for a few seconds on\n"
         "this machine. Says with which source training steps consume the most images per second, and what\n"
         "each source costs in disk, memory and energy.\n"
         "\n"
         "examples:\n"
         "  fdsl-bench advise --data photos --compute 5                     # a step of 5 ms per 256 images\n"
         "  fdsl-bench advise --data photos --compute 12 --batch 128 --out-res 160 --fit "
         "random-resized-crop\n"
         "  fdsl-bench advise --data s3://bucket/train/ --compute train:cnn-fdsl --out advice\n"
         "\n"
         "options:");
    options_help(stdout, specs, COUNT_OF(specs), NULL);
    puts("\nexit status: 0 advice is printed; 1 the data cannot be read, or nothing could be measured;\n"
         "             2 usage, or no such data set; 4 no such GPU, or no GPU for --compute train");
}

/* ---- Candidates ---- */

/* Where images come from. */
enum place { GENERATED, GPU_MEMORY, MEMORY, DISK, REMOTE };

/* A source of images. `name_of_files` and `variant_of_files` are the name and variant for a data set of
 * single files; NULL if they are the same as for shards. */
static const struct candidate {
    const char *name, *name_of_files;
    enum place place;
    bool gpu; /* delivers images in GPU memory */
    const char *workload, *variant, *variant_of_files, *cache;
} candidates[] = {
    {"generating on the GPU", NULL, GENERATED, true, "synth", "fused", NULL, NULL},
    {"generating on the CPU", NULL, GENERATED, false, "synth", "omp", NULL, NULL},
    {"the set in GPU memory", NULL, GPU_MEMORY, true, "load", "gpu-resident", NULL, "warm"},
    {"shards from memory", "files from memory", MEMORY, true, "load", "shards-gpu", "files-gpu", "warm"},
    {"shards from memory", "files from memory", MEMORY, false, "load", "shards-omp", "files-omp", "warm"},
    {"shards from disk", "files from disk", DISK, true, "load", "shards-gpu", "files-gpu", "cold"},
    {"shards from disk", "files from disk", DISK, false, "load", "shards-omp", "files-omp", "cold"},
    {"shards from the URL", NULL, REMOTE, true, "load", "shards-gpu", NULL, NULL},
    {"shards from the URL", NULL, REMOTE, false, "load", "shards-omp", NULL, NULL},
};

/* The data set to measure, the options and the machine. */
struct situation {
    const struct advise_options *options;
    const struct options *given;
    struct resources resources;
    bool gpu;
    struct advise_set set;
    const char *rows; /* folder of the CSV files with the rows */
    struct advice_question question;
};

static const char *variant_of(const struct situation *situation, const struct candidate *candidate)
{
    return !situation->set.shards && candidate->variant_of_files ? candidate->variant_of_files
                                                                 : candidate->variant;
}

static enum status check_room(const char *what, uint64_t bytes, uint64_t room)
{
    return room == 0 || bytes <= room
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE, "the data set has %.3g GB, but only %.3g GB of %s are free",
                            1e-9 * (double)bytes, 1e-9 * (double)room, what);
}

/* Returns STATUS_UNAVAILABLE, with the reason, if this candidate certainly cannot work here. After STATUS_OK,
 * its run may still fail. */
static enum status is_possible(const struct situation *situation, const struct candidate *candidate)
{
    const struct advise_set *set = &situation->set;
    struct device_info device;
    if ((candidate->place == MEMORY || candidate->place == DISK) && set->remote &&
        !situation->options->cache_dir)
        return status_set(
            STATUS_UNAVAILABLE,
            "the data set is at a URL; to measure this, add --cache-dir DIR, which keeps a copy");
    TRY(variant_available(variant_find(variant_of(situation, candidate)), &situation->resources));
    if (candidate->place == MEMORY)
        return check_room("memory", set->bytes, memory_available_bytes());
    if (candidate->place == GPU_MEMORY && set->measured_files < set->files) {
        TRY(device_describe(situation->resources.device, &device));
        return check_room("GPU memory", set->bytes, device.memory_free_bytes);
    }
    return STATUS_OK;
}

#define ARGUMENTS_MAX 48
struct arguments {
    const char *of[ARGUMENTS_MAX];
    size_t count;
    char texts[12][32];
    size_t text_count;
};

static void add(struct arguments *arguments, const char *option, const char *value)
{
    if (!value)
        return;
    arguments->of[arguments->count++] = option;
    arguments->of[arguments->count++] = value;
}

static void add_number(struct arguments *arguments, const char *option, double value)
{
    char *text = arguments->texts[arguments->text_count++];
    snprintf(text, sizeof arguments->texts[0], "%.17g", value);
    add(arguments, option, text);
}

/* Adds the options of a run that reads. CPU variants decode every image, because a step needs its pixels. */
static void add_reading(const struct situation *situation, const struct candidate *candidate,
                        struct arguments *arguments)
{
    const struct advise_options *options = situation->options;
    const struct advise_set *set = &situation->set;
    add(arguments, "--data", set->data);
    add(arguments, "--cache", candidate->cache);
    add(arguments, "--image", options->image);
    add(arguments, "--label", options->label);
    add(arguments, "--member", options->member);
    if (candidate->place != REMOTE && options->cache_dir) {
        add(arguments, "--cache-dir", options->cache_dir);
        add_number(arguments, "--cache-bytes", (double)options->cache_bytes);
    }
    if (options->on_error)
        add(arguments, "--on-error", dataset_on_error[options->on_error]);
    if (candidate->place == GPU_MEMORY)
        return;
    if (set->coded || options->out_res) {
        add_number(arguments, "--out-res", set->res);
        add(arguments, "--fit", fit_names[options->fit]);
        add_number(arguments, "--channels", set->channels);
    } else if (!candidate->gpu)
        arguments->of[arguments->count++] = "--decode";
}

static void fill_arguments(const struct situation *situation, const struct candidate *candidate,
                           bool with_step, struct arguments *arguments)
{
    const struct advise_options *options = situation->options;
    add(arguments, "--variant", variant_of(situation, candidate));
    add_number(arguments, "--batch", (double)options->batch);
    add_number(arguments, "--min-time", options->seconds);
    add_number(arguments, "--max-time", 2 * options->seconds);
    add(arguments, "--min-samples", "3");
    add(arguments, "--warmups", "1");
    add(arguments, "--warmup-time", "0");
    add_number(arguments, "--device", (double)options->device);
    add_number(arguments, "--threads", (double)options->threads);
    if (with_step)
        add(arguments, "--compute", options->compute.text);
    if (candidate->place != GENERATED) {
        add_reading(situation, candidate, arguments);
        return;
    }
    add_number(arguments, "--res", situation->set.res);
    add_number(arguments, "--channels", situation->set.channels);
    /* Generate the element types that the variants of `load` deliver. */
    add(arguments, "--dtype", candidate->gpu ? "f16" : "u8");
    add(arguments, "--classes", "1000");
}

/* Sets the disk space and the memory that a candidate takes. `memory_bytes` is the memory that the run
 * allocated. It is ignored for generators: their memory is computed from the size of a batch. */
static void count_costs(const struct situation *situation, const struct candidate *candidate,
                        double memory_bytes, struct advice *advice)
{
    const struct advise_set *set = &situation->set;
    bool local = candidate->place != GENERATED && candidate->place != REMOTE &&
                 (!set->remote || situation->options->cache_dir);
    double pixels = (double)set->res * set->res * set->channels * (double)situation->options->batch;
    advice->disk_bytes = local ? (double)set->bytes : 0;
    advice->memory_bytes = memory_bytes;
    if (candidate->place == GENERATED)
        advice->memory_bytes = candidate->gpu ? 2 * 2 * pixels : pixels; /* two batches of two-byte values */
    if (candidate->place == MEMORY)                                      /* add the page cache */
        advice->memory_bytes += (double)set->bytes;
    if (candidate->place == GPU_MEMORY)
        advice->memory_bytes += (double)(set->bytes - set->measured_bytes);
}

/* Measures a candidate without a training step and, if there is a GPU, also with one. */
static enum status measure(struct situation *situation, const struct candidate *candidate,
                           struct advice *advice)
{
    struct arguments alone = {0}, with_step = {0};
    struct advice_question *question = &situation->question;
    struct advise_row row, step;
    fill_arguments(situation, candidate, false, &alone);
    TRY(advise_measure(&(struct advise_run){situation->rows, candidate->workload, alone.of}, &row));
    advice->images_per_s = row.items_per_s;
    advice->joules_per_image = row.joules_per_item;
    count_costs(situation, candidate, row.memory_bytes, advice);
    if (!situation->gpu) {
        advise_compute(question, advice);
        return STATUS_OK;
    }
    fill_arguments(situation, candidate, true, &with_step);
    TRY(advise_measure(&(struct advise_run){situation->rows, candidate->workload, with_step.of}, &step));
    if (isnan(question->step_s))
        question->step_s = 1e-3 * step.compute_ms;
    advice->stall_share = step.stall_share;
    advice->reached_per_s = step.busy_share * (double)question->batch / step.step_s;
    if (isnan(advice->reached_per_s)) /* no step had a full batch */
        advice->reached_per_s = advise_needed(question) * (1 - step.stall_share);
    return STATUS_OK;
}

/* Measures the candidates that the machine and the data set permit. Sets `*count` to the number of lines in
 * the table, which also lists candidates that could not be measured. */
static enum status measure_all(struct situation *situation, struct advice *advice, size_t *count)
{
    *count = 0;
    for (size_t i = 0; i < COUNT_OF(candidates); i++) {
        const struct candidate *candidate = &candidates[i];
        struct advice *next = &advice[*count];
        if (candidate->place == REMOTE && !situation->set.remote)
            continue;
        bool of_files = !situation->set.shards && candidate->name_of_files;
        *next = (struct advice){.name = of_files ? candidate->name_of_files : candidate->name,
                                .variant = variant_of(situation, candidate),
                                .reads = candidate->place != GENERATED,
                                .images_per_s = NAN,
                                .stall_share = NAN,
                                .reached_per_s = NAN,
                                .disk_bytes = NAN,
                                .memory_bytes = NAN,
                                .joules_per_image = NAN};
        enum status status = is_possible(situation, candidate);
        if (status == STATUS_OK) {
            status_note("measuring: %s (%s)", next->name, next->variant);
            status = measure(situation, candidate, next);
        }
        if (status_exit(status) == STATUS_FAILED)
            return status;
        next->measured = status == STATUS_OK;
        if (!next->measured)
            snprintf(next->reason, sizeof next->reason, "%s", status_text());
        ++*count;
    }
    return STATUS_OK;
}

/* ---- The whole command ---- */

/* Creates the folder of --out before anything is measured. */
static enum status make_out(const char *folder)
{
    struct stat info;
    if (folder && mkdir(folder, 0777) != 0 && errno != EEXIST)
        return status_set(STATUS_USAGE, "--out %s: cannot create the folder: %s", folder, strerror(errno));
    if (folder && stat(folder, &info) == 0 && !S_ISDIR(info.st_mode))
        return status_set(STATUS_USAGE, "--out %s: this is a file; name a folder", folder);
    return STATUS_OK;
}

static enum status check_options(struct situation *situation, struct advise_options *options)
{
    if (!options->data)
        return status_set(STATUS_USAGE, "name the data set with --data DIR or URL; see advise --help");
    if (!options->compute.text)
        return status_set(STATUS_USAGE,
                          "say how long a training step takes: --compute MS, or --compute train:MODEL "
                          "to measure it on the GPU");
    TRY(format_check(options->format));
    TRY(make_out(options->out));
    TRY(compute_read(&options->compute));
    situation->resources = (struct resources){.threads = 1, .device = (int)options->device};
    enum status probed = device_probe((int)options->device);
    situation->gpu = probed == STATUS_OK;
    if (!situation->gpu && options_given(situation->given, "device"))
        return status_prefix(probed, "--device %d", (int)options->device);
    if (!situation->gpu && compute_learns(&options->compute))
        return status_set(STATUS_UNAVAILABLE,
                          "--compute %s needs a GPU, and there is none; give the time of your step in "
                          "milliseconds: --compute MS",
                          options->compute.text);
    situation->question =
        (struct advice_question){.step_s = compute_learns(&options->compute) ? NAN : options->compute.step_s,
                                 .batch = options->batch,
                                 .estimated = !situation->gpu};
    return STATUS_OK;
}

static enum status measure_set(struct situation *situation, struct advice *advice, size_t *count)
{
    const struct advise_options *options = situation->options;
    TRY(advise_set_open(options, &situation->set));
    situation->rows = options->out ? options->out : situation->set.folder;
    situation->question.res = situation->set.res;
    return measure_all(situation, advice, count);
}

static enum status advise(struct situation *situation)
{
    struct advice advice[COUNT_OF(candidates)];
    size_t count = 0;
    enum status status = measure_set(situation, advice, &count);
    advise_set_close(&situation->set);
    TRY(status);
    return advise_print(situation->options, &situation->set, &situation->question, advice, count);
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
    return status != STATUS_OK || values.help ? status : advise(&situation);
}
