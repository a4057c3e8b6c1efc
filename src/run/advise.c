#include "run/advise.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/compute.h"
#include "core/options.h"
#include "core/text.h"
#include "data/dataset_open.h"
#include "data/image_fit.h"
#include "data/plain.h"
#include "data/remote.h"
#include "machine/device.h"
#include "run/advise_parts.h"
#include "run/formats.h"

#define CODED_RES 224 /* default of --out-res for JPEG and PNG files */

struct parameters {
    const char *data, *out;
    uint64_t batch, out_res, device, threads;
    double seconds;
    struct compute compute;
    int format;
    bool help;
};

#define AT(field) offsetof(struct parameters, field)
static const struct option_spec specs[] = {
    {"data", "DIR", OPTION_TEXT, AT(data), NULL, 0, 0, NULL, false,
     "the data set: a folder of samples or tar shards, or a URL of shards, as in --workload load"},
    {"compute", "MS|train[:MODEL]", OPTION_TEXT, AT(compute.text), NULL, 0, 0, NULL, false,
     "the training step that consumes each batch: its time in milliseconds, or the network whose step is "
     "measured "
     "(needs a GPU)"},
    {"batch", "N", OPTION_COUNT, AT(batch), "256", 1, 1 << 20, NULL, false, "images per step"},
    {"out-res", "PIXELS", OPTION_COUNT, AT(out_res), NULL, 1, FIT_RES_MAX, NULL, false,
     "width and height of the images that the step gets (default: as stored; 224 for JPEG and PNG files)"},
    {"threads", "N", OPTION_COUNT, AT(threads), "0", 0, 4096, NULL, false,
     "CPU threads that read and decode; 0 means all that this process may use"},
    {"device", "N", OPTION_COUNT, AT(device), "0", 0, 1024, NULL, false, "CUDA device"},
    {"seconds", "S", OPTION_REAL, AT(seconds), "2", 0.01, 3600, NULL, false,
     "time per measurement, without set-up"},
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
         "Measures each way for a few seconds on this machine and says which one lets a training step wait "
         "least,\n"
         "and what each costs in disk, memory and energy.\n"
         "\n"
         "examples:\n"
         "  fdsl-bench advise --data photos --compute 5                     # a step of 5 ms per 256 images\n"
         "  fdsl-bench advise --data photos --compute 12 --batch 128 --out-res 160\n"
         "  fdsl-bench advise --data s3://bucket/train/ --compute train:cnn-fdsl --out advice\n"
         "\n"
         "options:");
    options_help(stdout, specs, COUNT_OF(specs));
    puts("\nexit status: 0 advice is printed; 1 nothing could be measured; 2 usage, or data that cannot be "
         "opened");
}

/* ---- The data set ---- */

/* What the candidates depend on. */
struct situation {
    const struct parameters *parameters;
    bool gpu;
    bool shards, remote; /* a remote set is of shards */
    bool coded;          /* images are JPEG or PNG files */
    uint64_t samples, bytes;
    uint32_t res;          /* of the images that the step gets */
    char folder[PATH_MAX]; /* of the rows */
    struct advice_question question;
};

/* Reads the first image, for its format and size. A set without images is of arrays or records. */
static enum status look_at_image(const struct dataset *dataset, struct situation *situation)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    const struct dataset_sample *sample = &dataset->samples[0];
    const struct dataset_member *member = &dataset->members[sample->member + sample->image % sample->members];
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image = false;
    uint8_t *bytes = malloc(member->size + 1);
    enum status status = bytes ? plain_bytes(&plain, member, member->size, bytes)
                               : status_set(STATUS_FAILED, "out of memory for an image");
    if (status == STATUS_OK)
        status =
            image_decode(members_format(member->extension), bytes, member->size, &scratch, &image, &is_image);
    if (status == STATUS_OK && is_image) {
        enum image_format format = image_format(members_format(member->extension), bytes, member->size);
        situation->coded = format != IMAGE_NPY;
        situation->res = situation->coded             ? CODED_RES
                         : image.height > image.width ? image.height
                                                      : image.width;
    }
    plain_close(&plain);
    image_scratch_close(&scratch);
    free(bytes);
    return status;
}

static enum status look_at_data(struct situation *situation)
{
    const struct parameters *parameters = situation->parameters;
    struct members members;
    struct dataset dataset = {0};
    TRY(members_parse(NULL, NULL, NULL, &members));
    enum status status =
        dataset_open(parameters->data, false, &members, &(struct remote_options){0}, &dataset);
    situation->remote = remote_is(parameters->data) && !remote_local(parameters->data);
    situation->res = CODED_RES;
    if (status == STATUS_OK) {
        situation->shards = dataset.shards;
        situation->samples = dataset.sample_count;
        situation->bytes = dataset.bytes;
        status = look_at_image(&dataset, situation);
    }
    dataset_close(&dataset);
    if (parameters->out_res)
        situation->res = (uint32_t)parameters->out_res;
    return status;
}

/* ---- Candidates ---- */

enum place { GENERATED, GPU_MEMORY, MEMORY, DISK, REMOTE };

struct candidate {
    const char *name;
    enum place place;
    bool gpu;    /* delivers on a GPU; the others are for machines without one */
    bool shards; /* reads shards; otherwise single files. Not used for GENERATED and GPU_MEMORY */
    const char *workload, *variant, *cache;
};

static const struct candidate candidates[] = {
    {"generating on the GPU", GENERATED, true, true, "synth", "fused", NULL},
    {"generating on the CPU", GENERATED, false, true, "synth", "omp", NULL},
    {"the set in GPU memory", GPU_MEMORY, true, true, "load", "gpu-resident", "warm"},
    {"shards from memory", MEMORY, true, true, "load", "shards-gpu", "warm"},
    {"shards from disk", DISK, true, true, "load", "shards-gpu", "cold"},
    {"shards from the URL", REMOTE, true, true, "load", "shards-gpu", NULL},
    {"files from memory", MEMORY, true, false, "load", "files-gpu", "warm"},
    {"files from disk", DISK, true, false, "load", "files-gpu", "cold"},
    {"shards from memory", MEMORY, false, true, "load", "shards-omp", "warm"},
    {"shards from disk", DISK, false, true, "load", "shards-omp", "cold"},
    {"shards from the URL", REMOTE, false, true, "load", "shards-omp", NULL},
    {"files from memory", MEMORY, false, false, "load", "files-omp", "warm"},
    {"files from disk", DISK, false, false, "load", "files-omp", "cold"},
};

/* Whether a candidate suits the machine and the set. Other candidates are not mentioned. */
static bool is_possible(const struct candidate *candidate, const struct situation *situation)
{
    if (candidate->gpu != situation->gpu)
        return false;
    if (candidate->place == GENERATED || candidate->place == GPU_MEMORY)
        return true;
    return candidate->shards == situation->shards && (candidate->place == REMOTE) == situation->remote;
}

#define ARGUMENTS_MAX 32
struct arguments {
    const char *of[ARGUMENTS_MAX];
    size_t count;
    char texts[8][32];
    size_t text_count;
};

static void add(struct arguments *arguments, const char *option, const char *value)
{
    arguments->of[arguments->count++] = option;
    if (value)
        arguments->of[arguments->count++] = value;
}

static void add_number(struct arguments *arguments, const char *option, double value)
{
    char *text = arguments->texts[arguments->text_count++];
    snprintf(text, sizeof arguments->texts[0], "%.9g", value);
    add(arguments, option, text);
}

static void fill_arguments(const struct situation *situation, const struct candidate *candidate,
                           bool beside_step, struct arguments *arguments)
{
    const struct parameters *parameters = situation->parameters;
    add(arguments, "--variant", candidate->variant);
    add_number(arguments, "--batch", (double)parameters->batch);
    add_number(arguments, "--min-time", parameters->seconds);
    add_number(arguments, "--max-time", 2 * parameters->seconds);
    add(arguments, "--min-samples", "3");
    add(arguments, "--warmup-time", "0");
    add_number(arguments, "--device", (double)parameters->device);
    add_number(arguments, "--threads", (double)parameters->threads);
    if (beside_step)
        add(arguments, "--compute", parameters->compute.text);
    if (candidate->place == GENERATED) {
        add_number(arguments, "--res", situation->res);
        add(arguments, "--classes", "1000");
        return;
    }
    add(arguments, "--data", parameters->data);
    if (candidate->cache)
        add(arguments, "--cache", candidate->cache);
    if (candidate->place == GPU_MEMORY)
        return;
    if (situation->coded || parameters->out_res)
        add_number(arguments, "--out-res", situation->res);
}

/* Adds what a way keeps on disk and in memory. */
static void count_costs(const struct situation *situation, const struct candidate *candidate,
                        struct advice *advice)
{
    bool local = !situation->remote && candidate->place != GENERATED;
    advice->disk_bytes = local ? (double)situation->bytes : 0;
    if (candidate->place == MEMORY) /* the page cache holds the set */
        advice->memory_bytes += (double)situation->bytes;
}

static enum status measure(struct situation *situation, const struct candidate *candidate,
                           struct advice *advice)
{
    struct arguments alone = {0}, beside = {0};
    struct advise_row row, step;
    fill_arguments(situation, candidate, false, &alone);
    TRY(advise_measure(&(struct advise_run){situation->folder, candidate->workload, alone.of}, &row));
    advice->images_per_s = row.items_per_s;
    advice->memory_bytes = row.memory_bytes;
    advice->joules_per_image = row.joules_per_item;
    count_costs(situation, candidate, advice);
    if (situation->gpu) {
        fill_arguments(situation, candidate, true, &beside);
        TRY(advise_measure(&(struct advise_run){situation->folder, candidate->workload, beside.of}, &step));
        advice->stall_share = step.stall_share;
        if (isnan(situation->question.step_s))
            situation->question.step_s = step.step_s;
    }
    if (isnan(advice->stall_share)) {
        double share = row.items_per_s / advise_needed(&situation->question);
        advice->stall_share = share < 1 ? 1 - share : 0;
    }
    return STATUS_OK;
}

/* Measures all candidates that suit. Returns their number. Only an interrupt is an error. */
static enum status measure_all(struct situation *situation, struct advice *advice, size_t *count)
{
    *count = 0;
    for (size_t i = 0; i < COUNT_OF(candidates); i++) {
        struct advice *next = &advice[*count];
        if (!is_possible(&candidates[i], situation))
            continue;
        *next = (struct advice){.name = candidates[i].name,
                                .images_per_s = NAN,
                                .stall_share = NAN,
                                .disk_bytes = NAN,
                                .memory_bytes = NAN,
                                .joules_per_image = NAN};
        if (isatty(STDERR_FILENO))
            status_say("measuring: %s", next->name);
        enum status status = measure(situation, &candidates[i], next);
        if (status == STATUS_FAILED)
            return status;
        next->measured = status == STATUS_OK;
        if (!next->measured)
            snprintf(next->reason, sizeof next->reason, "%s", status_text());
        ++*count;
    }
    return STATUS_OK;
}

/* ---- Printing ---- */

/* Writes a number with three digits in units of 1 / `scale`, or "-" if it is unknown. */
static const char *cell(double value, double scale, char *text, size_t size)
{
    if (isnan(value))
        snprintf(text, size, "-");
    else
        snprintf(text, size, "%.3g", value * scale);
    return text;
}

static void print_table(const struct advice *advice, size_t count)
{
    char texts[4][32];
    printf("%-24s %12s %10s %10s %10s %16s\n", "way", "images/s", "waits/%", "disk/GB", "memory/GB",
           "J/1000 images");
    for (size_t i = 0; i < count; i++) {
        const struct advice *row = &advice[i];
        if (!row->measured) {
            printf("%-24s not possible: ", row->name);
            text_print(stdout, row->reason);
            putchar('\n');
            continue;
        }
        printf("%-24s %12.0f %10s %10s %10s %16s\n", row->name, row->images_per_s,
               cell(row->stall_share, 100, texts[0], sizeof texts[0]),
               cell(row->disk_bytes, 1e-9, texts[1], sizeof texts[1]),
               cell(row->memory_bytes, 1e-9, texts[2], sizeof texts[2]),
               cell(row->joules_per_image, 1000, texts[3], sizeof texts[3]));
    }
}

static enum status print_rows(const struct situation *situation, const struct advice *advice, size_t count,
                              size_t best)
{
    struct row_printer printer;
    rows_begin(&printer, situation->parameters->format);
    for (size_t i = 0; i < count; i++) {
        struct row row = {0};
        row_text(&row, "way", advice[i].name);
        row_count(&row, "best", i == best);
        row_real(&row, "images_per_s", advice[i].images_per_s);
        row_real(&row, "stall_share", advice[i].stall_share);
        row_real(&row, "disk_bytes", advice[i].disk_bytes);
        row_real(&row, "memory_bytes", advice[i].memory_bytes);
        row_real(&row, "joules_per_image", advice[i].joules_per_image);
        row_text(&row, "reason", advice[i].reason);
        rows_add(&printer, &row);
        row_free(&row);
    }
    struct row about = {0};
    char verdict[1024];
    advise_verdict(&situation->question, advice, count, best, verdict, sizeof verdict);
    row_text(&about, "verdict", verdict);
    row_count(&about, "batch", situation->question.batch);
    row_real(&about, "step_s", situation->question.step_s);
    row_count(&about, "res", situation->res);
    enum status status = rows_end(&printer, "advice", &about);
    row_free(&about);
    return status;
}

static enum status print_advice(const struct situation *situation, const struct advice *advice, size_t count)
{
    char verdict[1024];
    size_t best = advise_best(&situation->question, advice, count);
    if (situation->parameters->format != FORMAT_TABLE)
        TRY(print_rows(situation, advice, count, best));
    else
        print_table(advice, count);
    if (best == count)
        return status_set(STATUS_FAILED, "nothing could be measured: %s",
                          count ? advice[0].reason : "no way suits");
    advise_verdict(&situation->question, advice, count, best, verdict, sizeof verdict);
    if (situation->parameters->format == FORMAT_TABLE)
        printf("\n%s\n", verdict);
    return STATUS_OK;
}

/* ---- From start to end ---- */

/* Creates the folder of the rows. */
static enum status open_folder(struct situation *situation)
{
    const char *out = situation->parameters->out, *temporary = getenv("TMPDIR");
    if (out) {
        snprintf(situation->folder, sizeof situation->folder, "%s", out);
        return mkdir(out, 0777) == 0 || errno == EEXIST
                   ? STATUS_OK
                   : status_set(STATUS_FAILED, "--out %s: cannot create the folder: %s", out,
                                strerror(errno));
    }
    snprintf(situation->folder, sizeof situation->folder, "%s/fdsl-advise-XXXXXX",
             temporary ? temporary : "/tmp");
    return mkdtemp(situation->folder)
               ? STATUS_OK
               : status_set(STATUS_FAILED, "cannot create a temporary folder: %s; set TMPDIR",
                            strerror(errno));
}

static void close_folder(const struct situation *situation)
{
    static const char *const files[] = {"synth.csv", "load.csv"};
    char path[PATH_MAX + 16];
    for (size_t i = 0; !situation->parameters->out && i < COUNT_OF(files); i++) {
        snprintf(path, sizeof path, "%s/%s", situation->folder, files[i]);
        unlink(path);
    }
    if (!situation->parameters->out)
        rmdir(situation->folder);
}

static enum status advise(struct parameters *parameters)
{
    struct situation situation = {.parameters = parameters};
    struct advice advice[COUNT_OF(candidates)];
    size_t count = 0;
    if (!parameters->data)
        return status_set(STATUS_USAGE, "name the data set with --data DIR or URL; see advise --help");
    if (!parameters->compute.text)
        return status_set(STATUS_USAGE,
                          "say how long a training step takes: --compute MS, or --compute train:MODEL "
                          "to measure it on the GPU");
    TRY(format_check(parameters->format));
    TRY(compute_read(&parameters->compute));
    situation.gpu = device_count() > (int)parameters->device;
    situation.question.batch = parameters->batch;
    situation.question.step_s = compute_learns(&parameters->compute) ? NAN : parameters->compute.step_s;
    if (!situation.gpu && compute_learns(&parameters->compute))
        return status_set(STATUS_USAGE,
                          "--compute %s needs a GPU, and there is none; give the time of your step in "
                          "milliseconds: --compute MS",
                          parameters->compute.text);
    TRY(look_at_data(&situation));
    TRY(open_folder(&situation));
    enum status status = measure_all(&situation, advice, &count);
    close_folder(&situation);
    return status == STATUS_OK ? print_advice(&situation, advice, count) : status;
}

enum status advise_run(int argc, char *argv[])
{
    struct parameters parameters = {0};
    struct options options = {
        .tables = {{specs, COUNT_OF(specs), &parameters}}, .table_count = 1, .help = "advise --help"};
    enum status status = options_parse(&options, argc, argv);
    if (status == STATUS_OK && parameters.help)
        print_help();
    else if (status == STATUS_OK)
        status = advise(&parameters);
    options_free(&options);
    return status;
}
