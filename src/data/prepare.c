#include "data/prepare.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "core/file.h"
#include "core/array.h"
#include "core/text.h"
#include "core/timer.h"
#include "core/workload.h"
#include "data/image.h"
#include "data/index.h"
#include "data/members.h"
#include "data/source.h"
#include "machine/comm.h"
#include "machine/host.h"

#ifndef FDSL_VERSION
#define FDSL_VERSION "unknown"
#endif

#define FOLDER_SAMPLES 1000                /* samples per folder, with --store files */
#define SHARD_SAMPLES  10000               /* limit of samples per shard without --shards */
#define SHARD_BYTES    (UINT64_C(1) << 30) /* approximate limit of bytes per shard without --shards */
#define CHUNK_SAMPLES  256 /* samples in memory at a time; fewer if that exceeds CHUNK_BYTES */
#define CHUNK_BYTES    (UINT64_C(64) << 20)
#define KEY_DIGITS     6 /* minimum number of digits of a key */
#define BROKEN_TOLD    8 /* warnings about broken images per rank; further ones are only counted */
#define DIGITS         4 /* minimum number of digits of a class folder that is named by its number */
#define SHARDS_MAX     1000000

/* Programs that read class folders would treat each folder of --store files as a class. Therefore, these
 * folders are stored inside a folder with this name; such programs then find this folder as the only
 * class. */
#define NOT_IMAGEFOLDER "not-imagefolder/"

/* ---- Class folders ---- */

/* The classes of the samples of a source. The caller calls class_folders_free(), even after a failure.
 * `labels` and `names` are only for --store imagefolder. */
struct class_folders {
    uint32_t *labels; /* class of each sample */
    uint64_t count;   /* number of classes; each has at least one sample */
    char **names;     /* names of the class folders, in sorted order */
    char *list;       /* content of classes.txt, or NULL */
    bool masks;       /* there are no classes, but one folder of images and one of masks */
};

/* Fails if a class has no sample. `seen` has one element per sample. The search ends inside `seen`: if the
 * largest class is `samples` or larger, at least one of the classes 0 to `samples` - 1 has no sample. */
static enum status check_gaps(const struct class_folders *folders, const uint8_t *seen)
{
    for (uint64_t i = 0; i < folders->count; i++)
        if (!seen[i])
            return status_set(
                STATUS_USAGE,
                "--store imagefolder: no sample has class %" PRIu64 ", but one has class %" PRIu64
                ", so ImageFolder would number the classes differently; use more samples, or --store shards",
                i, folders->count - 1);
    return STATUS_OK;
}

/* Refuses a sample that has a mask and another label than 0, which would be lost: beside the folders of
 * images and of masks, there are no class folders. */
static enum status check_masked(uint64_t number, const struct source_sample *sample,
                                const char *const extensions[])
{
    struct members members;
    const struct member_rule *rule;
    int32_t label = 0;
    TRY(members_parse(NULL, NULL, NULL, &members));
    const uint32_t at = members_find(&members.label, extensions, (uint32_t)sample->count, false, &rule);
    const struct source_member *found = &sample->members[at % sample->count];
    if (!rule || members_label(rule, found->bytes, found->size, &label) != STATUS_OK || label == 0)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "sample %" PRIu64 ": it has the label %" PRIi32 " and a mask, and --store imagefolder "
                      "keeps only one of them; drop --store, or choose the labels with --label %s",
                      number, label, rule->extension);
}

/* Reduces sample `number` to its image and its mask, and sets its class folder. STATUS_FAILED if the sample
 * has no image of a format that ImageFolder reads. */
static enum status class_folders_keep(const struct class_folders *folders, uint64_t number,
                                      struct source_sample *sample)
{
    struct members members;
    const char *extensions[SOURCE_MEMBERS_MAX];
    const struct member_rule *rule;
    uint32_t count = (uint32_t)sample->count;
    TRY(members_parse(MEMBERS_IMAGEFOLDER, NULL, NULL, &members));
    for (uint32_t m = 0; m < count; m++)
        extensions[m] = sample->members[m].extension;
    uint32_t image = members_find(&members.image, extensions, count, false, &rule);
    if (image == count)
        return status_set(STATUS_FAILED,
                          "sample %" PRIu64 ": --store imagefolder needs an image that ImageFolder reads "
                          "(%s); drop --encode npy, or --store",
                          number, MEMBERS_IMAGEFOLDER);
    if (folders->masks)
        TRY(check_masked(number, sample, extensions));
    struct source_sample kept = {.key = sample->key, .class_folder = folders->labels[number]};
    memcpy(kept.name, sample->name, sizeof kept.name);
    for (uint32_t m = 0; m < count; m++) {
        struct source_member *member = &sample->members[m];
        if (m != image && !(folders->masks && strcasecmp(member->extension, MASK_MEMBER) == 0))
            continue;
        source_add(&kept, member->extension, member->bytes, member->size);
        member->bytes = NULL;
    }
    source_sample_free(sample);
    *sample = kept;
    return STATUS_OK;
}

static enum status check_first(const struct source *source, void *state, const struct class_folders *folders)
{
    CLOSED_BY(source_sample_free) struct source_sample sample = {0};
    TRY(source_make(source, state, 0, 1, &sample));
    return class_folders_keep(folders, 0, &sample);
}

/* Reads the labels of the first `samples` samples. STATUS_USAGE if the source has no labels, or if a class
 * below the largest has no sample. ImageFolder refuses an empty class folder; without the folder, it would
 * give all larger classes other numbers. Before anything is written, also checks that the first sample has an
 * image. */
static enum status class_folders_read(const struct source *source, void *state, uint64_t samples,
                                      struct class_folders *folders)
{
    if (!source->label)
        return status_set(STATUS_USAGE,
                          "--store imagefolder needs labels, and --from %s has none; drop --store",
                          source->name);
    folders->labels = calloc(samples, sizeof *folders->labels);
    FREED uint8_t *seen = calloc(samples, 1);
    TRY(ALLOCATED(folders->labels && seen, "out of memory for %" PRIu64 " labels", samples));
    for (uint64_t i = 0, asked = 0; i < samples; i++) {
        source_ask(source, state, &asked, samples);
        uint64_t label = source->label(state, i);
        if (label > INT32_MAX) /* source->label() has set the message */
            return STATUS_FAILED;
        folders->labels[i] = (uint32_t)label;
        folders->count = label >= folders->count ? label + 1 : folders->count;
        if (label < samples)
            seen[label] = 1;
    }
    TRY(check_gaps(folders, seen));
    folders->count += folders->masks;
    return check_first(source, state, folders);
}

/* ---- Names ---- */

/* Returns the reason why a name cannot be that of a class folder in a set called `set`, or NULL. `before` is
 * the name of the class before it, or NULL. */
static const char *unfit(const char *name, const char *before, const char *set)
{
    const size_t length = strlen(name);
    if (length == 0 || length > NAME_MAX || *name == '.' || strchr(name, '/') || strstr(name, ".."))
        return "is not a usable name of a folder";
    if (strcmp(name, SAMPLES_NAME) == 0 || strcmp(name, CLASSES_NAME) == 0 ||
        (strncmp(name, set, strlen(set)) == 0 && strcmp(name + strlen(set), ".index") == 0))
        return "is the name of a file of the data set";
    return before && text_order(before, name) >= 0 ? "does not follow the name before it in sorted order, so "
                                                     "ImageFolder would number the classes differently"
                                                   : NULL;
}

/* Returns whether the class folders get the names of the classes. Warns if the names do not fit. */
static bool names_fit(const struct source_facts *facts, const char *set, const struct class_folders *folders)
{
    const char *reason = NULL;
    if (!facts->class_names)
        return false;
    for (uint64_t c = 0; c < folders->count && !reason; c++) {
        const char *name = c < facts->class_count ? facts->class_names[c] : "";
        reason = c < facts->class_count ? unfit(name, c ? facts->class_names[c - 1] : NULL, set)
                                        : "is the name of a class that " CLASSES_NAME " does not list";
        if (reason)
            status_warn("--store imagefolder: the class folders are named by numbers, because '%s' (class "
                        "%" PRIu64 ") %s; " CLASSES_NAME " lists the names",
                        name, c, reason);
    }
    return !reason;
}

static bool is_printable(const char *name)
{
    while (*name && (unsigned char)*name >= ' ' && *name != 127)
        name++;
    return !*name;
}

/* Names the class folders after the classes of the source, and formats classes.txt. The folders get numbers
 * if the source has no names, or, with a warning, if a name cannot be that of a folder or would change the
 * order. `set` is the name of the data set. Call after class_folders_read(). */
static enum status class_folders_name(const struct source_facts *source, const char *set,
                                      struct class_folders *folders)
{
    struct source_facts facts = *source;
    size_t size;
    int digits = snprintf(NULL, 0, "%" PRIu64, folders->count ? folders->count - 1 : 0);
    digits = facts.published_digits ? facts.published_digits : digits > DIGITS ? digits : DIGITS;
    for (uint32_t c = 0; facts.class_names && c < facts.class_count; c++)
        if (!is_printable(facts.class_names[c])) {
            status_warn("the name of class '%s' has a control character, so " CLASSES_NAME
                        " is not written, and class folders are named by numbers",
                        facts.class_names[c]);
            facts.class_names = NULL;
        }
    bool fit = names_fit(&facts, set, folders);
    folders->names = calloc(folders->count + 1, sizeof *folders->names);
    TRY(ALLOCATED(folders->names, "out of memory for class folders"));
    if (folders->masks) {
        folders->names[0] = strdup(INDEX_IMAGES);
        folders->names[1] = strdup(INDEX_MASKS);
        return ALLOCATED(folders->names[0] && folders->names[1], "out of memory for class folders");
    }
    for (uint64_t c = 0; c < folders->count; c++) {
        char number[32];
        snprintf(number, sizeof number, "%0*" PRIu64, digits, c);
        folders->names[c] = strdup(fit ? facts.class_names[c] : number);
        TRY(ALLOCATED(folders->names[c], "out of memory for class folders"));
    }
    if (!facts.class_names && !folders->count)
        return STATUS_OK;
    FILE *stream = open_memstream(&folders->list, &size);
    TRY(ALLOCATED(stream, "out of memory for " CLASSES_NAME));
    uint64_t count = facts.class_names ? facts.class_count : folders->count;
    for (uint64_t c = 0; c < count; c++)
        fprintf(stream, "%s\n", facts.class_names ? facts.class_names[c] : folders->names[c]);
    return ALLOCATED(text_close(stream), "out of memory for " CLASSES_NAME);
}

static void class_folders_free(struct class_folders *folders)
{
    for (uint64_t c = 0; folders->names && c < folders->count; c++)
        free(folders->names[c]);
    free(folders->names);
    free(folders->labels);
    free(folders->list);
    *folders = (struct class_folders){0};
}

struct prepare_values {
    const char *folder, *from, *name, *config;
    uint64_t samples, shards, threads, device;
    int store;
    bool help;
};

struct job {
    bool (*is_option)(const char *name); /* whether the program has this option outside --prepare */
    struct prepare_values parameters;
    const struct source *source;
    void *source_parameters, *workload_parameters; /* owned */
    const struct workload *workload;               /* workload of the source, or NULL */
    struct options options;
    struct source_facts facts;
    void *state;      /* state of the source */
    char *provenance; /* owned */
    struct folder folder;
    struct class_folders classes; /* labels and folders: only for --store imagefolder */
    int key_digits;
    uint64_t chunk;                   /* samples in memory at a time */
    struct image_scratch scratch;     /* to check the headers of copied images */
    uint64_t broken;                  /* copied samples of this rank whose image has a broken header */
    struct members members;           /* how readers of the copy find the image and the label of a sample */
    struct image first_image;         /* shape of the first PNG or JPEG image that this rank copied */
    bool mixed_sizes, mixed_channels; /* whether other images have another size or number of channels */

    /* Progress of this rank */
    struct progress progress;
    double began_s, writing_s; /* times when the run began and when writing began */
    uint64_t samples_written, samples_earlier, samples_total, samples_kept, units_finished;
};

static const char *const stores[] = {"files", "shards", "imagefolder",
                                     NULL}; /* in the order of enum index_layout */

#define AT(field) offsetof(struct prepare_values, field)
static const struct option_spec specs[] = {
    {"prepare", "DIR", OPTION_TEXT, AT(folder),
     .help = "folder to write; it must be new, empty, or begun by an earlier run of the same command"},
    {"from", "SOURCE", OPTION_TEXT, AT(from), .fallback = "counter",
     .help = "source of the samples; the sources are listed below"},
    {"store", "HOW", OPTION_CHOICE, AT(store), .fallback = "shards", .choices = stores, .column = COLUMN,
     .help = "how samples are stored. files writes single files, such as an image and its label, into "
             "folders of 1000 samples; shards writes tar files; imagefolder writes the image of each sample "
             "into the folder of its class, as torchvision's ImageFolder reads them, or, if it has a mask, "
             "both into the folders image and mask. HOW is one of"},
    {"samples", "N", OPTION_COUNT, AT(samples), .minimum = 1, .maximum = 1e12, .column = COLUMN,
     .help = "number of samples (default: all, if the source is finite)"},
    {"shards", "N", OPTION_COUNT, AT(shards), .minimum = 1, .maximum = SHARDS_MAX, .column = COLUMN,
     .help = "number of tar files (default: the smallest number with at most 10000 samples and about 1 GiB "
             "per file)"},
    {"name", "NAME", OPTION_TEXT, AT(name), .column = COLUMN,
     .help =
         "prefix of the file names, as in NAME-000000.tar and NAME.index (default: the name of the source)"},
    {"config", "FILE", OPTION_TEXT, AT(config),
     .help = "an INI file with any of these options, as \"name = value\"; the command line overrides it"},
    {"threads", "N", OPTION_COUNT, AT(threads), .maximum = THREADS_MAX,
     .help = "CPU threads; 0 means all that this process may use (default: OMP_NUM_THREADS, else 0)"},
    {"device", "N", OPTION_COUNT, AT(device), .fallback = "0", .maximum = 1024,
     .help = "CUDA device, if --variant names a variant that runs on a GPU"},
    {"help", NULL, OPTION_FLAG, AT(help), .help = "print this help"},
};

/* ---- The command line ---- */

void prepare_help(FILE *stream)
{
    fputs("fdsl-bench --prepare DIR - writes a data set for reading and training\n"
          "\n"
          "usage: fdsl-bench --prepare DIR [--from SOURCE] [options]\n"
          "\n"
          "examples:\n"
          "  fdsl-bench --prepare data --samples 1000 --shards 10    # generated tensors, f16 (3, 8, 64, "
          "64)\n"
          "  fdsl-bench --prepare train --from synth --classes 1000 --samples 100000 --res 224\n"
          "  fdsl-bench --prepare mnist --from idx --source train-images-idx3-ubyte.gz --store files\n"
          "\n"
          "options:\n",
          stream);
    options_help(stream, specs, COUNT_OF(specs), NULL);
    for (size_t i = 0; source_table[i]; i++) {
        const struct source *source = source_table[i];
        fprintf(stream, "\noptions of the source %s (%s):\n", source->name, source->summary);
        options_help(stream, source->options, source->option_count, NULL);
        if (source->workload)
            fprintf(stream,
                    "  and the options of the workload %s that define an image; see fdsl-bench --workload "
                    "synth --help\n",
                    source->workload);
    }
}

/* ---- Reading options ---- */

#define SOURCES_MAX 16 /* at least the number of entries in source_table */

static enum status find_source(struct job *job, int argc, char *argv[])
{
    const char *name = options_peek(specs, COUNT_OF(specs), argc, argv, "from");
    job->source = source_find(name ? name : "counter");
    if (job->source)
        return STATUS_OK;
    const char *names[SOURCES_MAX];
    size_t count = 0;
    for (; source_table[count]; count++)
        names[count] = source_table[count]->name;
    const char *nearest = nearest_word(name, names, count);
    return nearest
               ? status_set(STATUS_USAGE, "unknown source '%.80s'; did you mean '%s'?", name, nearest)
               : status_set(STATUS_USAGE, "unknown source '%.80s'; --prepare --help lists the sources", name);
}

bool prepare_has_option(const char *name)
{
    bool found = option_in_table(specs, COUNT_OF(specs), name);
    for (size_t i = 0; source_table[i]; i++)
        found |= option_in_table(source_table[i]->options, source_table[i]->option_count, name);
    return found;
}

/* Sets the error message for an option of another source, or of fdsl-bench without --prepare. */
static enum status explain_elsewhere(void *context, const char *name)
{
    const struct job *job = context;
    const char *owners[SOURCES_MAX] = {NULL};
    size_t count = 0;
    for (size_t i = 0; source_table[i]; i++) {
        const struct source *source = source_table[i];
        const struct workload *workload = source->workload ? workload_find(source->workload) : NULL;
        if (option_in_table(source->options, source->option_count, name) ||
            (workload && option_in_table(workload->options, workload->option_count, name)))
            owners[count++] = source->name;
    }
    char known[256];
    list_words(known, sizeof known, owners, count);
    if (count > 0)
        return status_set(STATUS_USAGE, "--%s is an option of --from %s; --prepare --help lists all options",
                          name, known);
    return job->is_option(name)
               ? status_set(STATUS_USAGE,
                            "--%s does not apply to --prepare; --prepare --help lists the options that do",
                            name)
               : STATUS_OK;
}

/* Parses the command line and the configuration file into `job`: the source, the options of --prepare, and
 * those of the source and its workload. STATUS_USAGE with the option and a remedy, STATUS_EXHAUSTED if memory
 * runs out. The caller frees job->options and the parameters, even after a failure. */
static enum status read_options(struct job *job, const struct config *config)
{
    TRY(find_source(job, config->argc, config->argv));
    const struct source *source = job->source;
    job->workload = source->workload ? workload_find(source->workload) : NULL;
    job->source_parameters = calloc(1, source->parameters_bytes);
    job->workload_parameters = calloc(1, job->workload ? job->workload->parameters_bytes : 1);
    TRY(ALLOCATED(job->source_parameters && job->workload_parameters, "out of memory"));
    job->options =
        (struct options){.tables = {{specs, COUNT_OF(specs), &job->parameters},
                                    {source->options, source->option_count, job->source_parameters}},
                         .table_count = 2,
                         .config = config,
                         .explain = explain_elsewhere,
                         .explain_context = job};
    if (job->workload)
        job->options.tables[job->options.table_count++] = (struct option_table){
            job->workload->options, job->workload->option_count, job->workload_parameters};
    return options_parse(&job->options, config->argc, config->argv);
}

/* Allows only characters that are safe in shells, URLs and lists of shards. */
static enum status check_name(const char *name)
{
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    if (strlen(name) <= 64 && name[strspn(name, allowed)] == '\0')
        return STATUS_OK;
    return status_set(STATUS_USAGE, "--name '%.80s': use up to 64 letters, digits, '_' and '-'", name);
}

/* For sources whose samples are complete files (source->whole_files): refuses --samples and every --store
 * except files, and selects --store files. */
static enum status check_whole_files(struct job *job)
{
    struct prepare_values *parameters = &job->parameters;
    if (options_given(&job->options, "samples"))
        return status_set(STATUS_USAGE, "--samples does not apply to --from %s; drop it", job->source->name);
    if (options_given(&job->options, "store") && parameters->store != INDEX_FILES)
        return status_set(STATUS_USAGE, "--from %s writes only --store files; drop --store",
                          job->source->name);
    parameters->store = INDEX_FILES;
    return STATUS_OK;
}

/* Sets --name and --store if the source determines them, and checks them. */
static enum status check_options(struct job *job)
{
    if (!job->parameters.name)
        job->parameters.name = job->source->name;
    TRY(check_name(job->parameters.name));
    return job->source->whole_files ? check_whole_files(job) : STATUS_OK;
}

/* ---- Options that determine the data set ---- */

/* Returns whether an option of the workload does not affect the samples. */
static bool is_indifferent(const struct job *job, const struct option_spec *spec)
{
    if (job->source->indifferent && is_one_of(spec->name, job->source->indifferent))
        return true;
    return job->workload && job->workload->applies &&
           !job->workload->applies(job->workload_parameters, NULL, spec->name);
}

/* Adds " --name=value". Replaces blanks and control characters in the value by '_'. */
static void add_option(FILE *stream, const struct option_spec *spec, const void *values)
{
    char text[256];
    options_text(spec, values, text, sizeof text);
    if (!*text)
        return;
    for (char *c = text; *c; c++)
        if ((unsigned char)*c <= ' ' || *c == 127)
            *c = '_';
    fprintf(stream, " --%s=%s", spec->name, text);
}

/* Formats job->provenance: one line with all options that affect the bytes of the data set, and a hash of the
 * inputs. Equal lines mean equal data sets. Call after the source has been opened. STATUS_EXHAUSTED if memory
 * runs out. */
static enum status describe(struct job *job)
{
    size_t size = 0;
    FILE *stream = open_memstream(&job->provenance, &size);
    TRY(ALLOCATED(stream, "out of memory"));
    fprintf(stream, "fdsl-bench/" FDSL_VERSION " --from=%s", job->source->name);
    for (size_t t = 0; t < job->options.table_count; t++) {
        const struct option_table *table = &job->options.tables[t];
        for (size_t i = 0; i < table->count; i++)
            if (table->specs[i].column && !(t == 2 && is_indifferent(job, &table->specs[i])))
                add_option(stream, &table->specs[i], table->values);
    }
    fprintf(stream, " inputs=%016" PRIx64, job->facts.identity);
    return ALLOCATED(text_close(stream), "out of memory");
}

/* ---- Opening the source ---- */

static enum status check_counts(struct prepare_values *parameters, const struct source_facts *facts)
{
    bool shards = parameters->store == INDEX_SHARDS;
    if (facts->samples == 0)
        return status_set(STATUS_FAILED, "--from %s: the source has no samples; name another source",
                          parameters->from);
    if (parameters->samples == 0 && facts->samples == SOURCE_ENDLESS)
        return status_set(STATUS_USAGE, "set the number of samples with --samples N; --from %s is unlimited",
                          parameters->from);
    if (parameters->samples == 0)
        parameters->samples = facts->samples;
    if (parameters->samples > facts->samples)
        return status_set(STATUS_USAGE, "--samples %" PRIu64 ": the source has only %" PRIu64,
                          parameters->samples, facts->samples);
    if (!shards && parameters->shards > 0)
        return status_set(STATUS_USAGE, "--shards needs --store shards; drop --shards");
    if (!shards)
        return STATUS_OK;
    if (parameters->shards > parameters->samples)
        return status_set(STATUS_USAGE,
                          "--shards %" PRIu64 ": there are only %" PRIu64 " samples; use fewer shards",
                          parameters->shards, parameters->samples);
    uint64_t bytes = facts->stored_bytes ? facts->stored_bytes : facts->sample_bytes;
    uint64_t by_bytes = SHARD_BYTES / (bytes + 2048);
    uint64_t most = by_bytes < 1 ? 1 : by_bytes < SHARD_SAMPLES ? by_bytes : SHARD_SAMPLES;
    if (parameters->shards == 0)
        parameters->shards = (parameters->samples + most - 1) / most;
    return parameters->shards <= SHARDS_MAX
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "%" PRIu64 " samples of %" PRIu64
                            " bytes would need more than %d shards; set their number with --shards N",
                            parameters->samples, bytes, SHARDS_MAX);
}

static int digits_of(uint64_t number)
{
    return snprintf(NULL, 0, "%" PRIu64, number);
}

static enum status open_job(struct job *job)
{
    struct prepare_values *parameters = &job->parameters;
    struct env env;
    env_capture(&env);
    if (!options_given(&job->options, "threads"))
        parameters->threads = env_openmp_threads();
    int threads = parameters->threads ? (int)parameters->threads : env.allowed_threads;
#ifdef _OPENMP
    omp_set_num_threads(threads < 1 ? 1 : threads);
#endif
    TRY(check_options(job));
    TRY(members_parse(NULL, NULL, NULL, &job->members));
    const struct source_request request = {
        .options = &job->options,
        .parameters = job->source_parameters,
        .workload_parameters = job->workload_parameters,
        .resources = {.threads = threads < 1 ? 1 : threads, .device = (int)parameters->device},
        .target = parameters->folder,
        .allow_empty = parameters->store != INDEX_IMAGEFOLDER};
    TRY(job->source->open(&request, &job->facts, &job->state));
    TRY(check_counts(parameters, &job->facts));
    TRY(describe(job));
    uint64_t units = parameters->store == INDEX_SHARDS
                         ? parameters->shards
                         : (parameters->samples + FOLDER_SAMPLES - 1) / FOLDER_SAMPLES;
    int digits = digits_of(parameters->samples - 1);
    uint64_t by_bytes = CHUNK_BYTES / job->facts.sample_bytes;
    job->key_digits = digits > KEY_DIGITS ? digits : KEY_DIGITS;
    job->chunk = by_bytes < 1 ? 1 : by_bytes < CHUNK_SAMPLES ? by_bytes : CHUNK_SAMPLES;
    job->folder = (struct folder){.path = parameters->folder,
                                  .name = parameters->name,
                                  .provenance = job->provenance,
                                  .above = job->source->whole_files ? "" : NOT_IMAGEFOLDER,
                                  .layout = (enum index_layout)parameters->store,
                                  .unit_count = units,
                                  .lock = -1};
    if (job->facts.multi_hot && job->folder.layout == INDEX_IMAGEFOLDER)
        return status_value(STATUS_USAGE, "store", "imagefolder",
                            " needs one class per image, but these images have multi-hot labels; drop it: "
                            "shards have them as the member " MULTI_HOT_MEMBER);
    job->classes.masks = job->facts.masks && job->folder.layout == INDEX_IMAGEFOLDER;
    if (job->folder.layout == INDEX_IMAGEFOLDER)
        TRY(class_folders_read(job->source, job->state, parameters->samples, &job->classes));
    else if (job->facts.published_digits)
        return status_value(STATUS_USAGE, "names", "published", " needs --store imagefolder");
    TRY(class_folders_name(&job->facts, parameters->name, &job->classes));
    job->folder.class_folders = (const char *const *)job->classes.names;
    job->folder.class_count = job->classes.count;
    job->folder.class_list = job->classes.list;
    return STATUS_OK;
}

/* ---- Writing units ---- */

/* Number of the first sample of a unit. The unit ends before unit_begins(job, unit + 1). */
static uint64_t unit_begins(const struct job *job, uint64_t unit)
{
    uint64_t samples = job->parameters.samples, units = job->folder.unit_count;
    if (job->folder.layout != INDEX_SHARDS)
        return unit * FOLDER_SAMPLES < samples ? unit * FOLDER_SAMPLES : samples;
    uint64_t least = samples / units, larger = samples % units; /* the first `larger` units have one more */
    return unit * least + (unit < larger ? unit : larger);
}

static const char *unit_word(const struct job *job)
{
    static const char *const words[] = {"folder", "shard", "part"}; /* in the order of enum index_layout */
    return words[job->folder.layout];
}

static const char *sample_word(const struct job *job)
{
    return job->source->whole_files ? "file" : "sample";
}

/* Counts the samples and finished units of this rank. Finished units are from an earlier run. */
static void count_samples(struct job *job)
{
    uint64_t step = (uint64_t)comm_size();
    for (uint64_t unit = (uint64_t)comm_rank(); unit < job->folder.unit_count; unit += step) {
        uint64_t samples = unit_begins(job, unit + 1) - unit_begins(job, unit);
        bool finished = folder_finished(&job->folder, unit);
        job->samples_total += samples;
        job->samples_earlier += finished ? samples : 0;
        job->samples_kept = job->samples_earlier;
        job->units_finished += finished;
    }
}

static void show(struct job *job, uint64_t unit)
{
    char left[32];
    if (!progress_due(&job->progress))
        return;
    double elapsed_s = fmax(timer_now_s() - job->writing_s, 1e-9);
    double rate = (double)job->samples_written / elapsed_s;
    uint64_t done = job->samples_earlier + job->samples_written;
    progress_show(&job->progress,
                  "preparing%s: %s %" PRIu64 " of %" PRIu64 ", %" PRIu64 " of %" PRIu64
                  " %ss, %.*f %ss/s, %s left",
                  comm_size() > 1 ? ", rank 0" : "", unit_word(job), unit + 1, job->folder.unit_count, done,
                  job->samples_total, sample_word(job), rate < 10 ? 1 : 0, rate, sample_word(job),
                  progress_duration((double)(job->samples_total - done) / rate, left, sizeof left));
}

/* Sets the message that is printed if a signal ends the program. With several ranks the message has no
 * numbers, because a rank knows only its own units. */
static void say_what_is_kept(const struct job *job)
{
    if (comm_rank() != 0)
        return;
    if (comm_size() > 1)
        file_say_on_signal("finished %ss are kept in %s; to continue, repeat the same command",
                           unit_word(job), job->folder.path);
    else
        file_say_on_signal("%" PRIu64 " of %" PRIu64 " %ss with %" PRIu64
                           " %ss are kept in %s; to continue, repeat the same command",
                           job->units_finished, job->folder.unit_count, unit_word(job), job->samples_kept,
                           sample_word(job), job->folder.path);
}

/* Compares the shape of an image, as stored, with that of the first one. */
static void compare_shapes(struct job *job, const struct image *image)
{
    struct image *first = &job->first_image;
    if (first->channels == 0)
        *first = *image;
    job->mixed_sizes |= image->width != first->width || image->height != first->height;
    job->mixed_channels |= image->channels != first->channels;
}

/* Returns the member that readers of the copy take for the image of a sample, or sample->count. */
static size_t image_member(const struct job *job, const struct source_sample *sample)
{
    const char *extensions[SOURCE_MEMBERS_MAX];
    const struct member_rule *rule;
    for (size_t m = 0; m < sample->count; m++)
        extensions[m] = sample->members[m].extension;
    return members_find(&job->members.image, extensions, (uint32_t)sample->count, false, &rule);
}

/* Warns if an image of a copied sample is known to be broken, or has a broken header. The sample is copied
 * nevertheless, unchanged. */
static void check_images(struct job *job, uint64_t number, const struct source_sample *sample)
{
    const size_t shown = image_member(job, sample);
    for (size_t m = 0; m < sample->count; m++) {
        const struct source_member *member = &sample->members[m];
        const char *format = members_format(member->extension);
        struct image image;
        bool is_image;
        enum status status = image_check_header(format, member->bytes, member->size, &job->scratch, &image);
        if (status == STATUS_OK && !sample->broken && m == shown && image.channels)
            compare_shapes(job, &image);
        if (status == STATUS_OK && sample->broken)
            status = image_decode(format, member->bytes, member->size, &job->scratch, &image, &is_image);
        if (status == STATUS_FAILED && job->broken++ < BROKEN_TOLD) {
            if (m != shown) /* the location is that of the image */
                status = status_prefix(status, "its member '%s'", member->extension);
            job->source->locate(job->state, number, status);
            status_warn_own("copied a broken image: %s", status_text());
        }
    }
}

static void tell_broken(const struct job *job)
{
    if (job->broken)
        status_warn_own("copied %" PRIu64
                        " broken image%s unchanged; remove %s from the source and prepare into a new folder, "
                        "or read the copy with --on-error skip. Only the headers of unchanged images are "
                        "checked; to check all pixels: fdsl-bench --variant %s --decode --data %s",
                        job->broken, job->broken == 1 ? "" : "s", job->broken == 1 ? "it" : "them",
                        job->folder.layout == INDEX_SHARDS ? "shards" : "files", job->folder.path);
}

/* Warns of images of one size that `train` would refuse nevertheless. With images of several sizes it needs
 * --out-res, which also gives all images the same channels. */
static void tell_mixed_channels(const struct job *job)
{
    if (job->mixed_channels && !job->mixed_sizes)
        status_warn_own("the images have different numbers of channels, and training needs one number: "
                        "prepare into a new folder with %s--channels 3 (or 1)",
                        options_given(&job->options, "out-res") ? "" : "--out-res PIXELS ");
}

static enum status make_chunk(struct job *job, struct unit_writer *writer, uint64_t first, uint64_t count)
{
    FREED struct source_sample *samples = calloc(count, sizeof *samples);
    TRY(ALLOCATED(samples, "out of memory"));
    enum status status = source_make(job->source, job->state, first, count, samples);
    for (uint64_t i = 0; status == STATUS_OK && job->source->locate && i < count; i++)
        check_images(job, first + i, &samples[i]);
    for (uint64_t i = 0; status == STATUS_OK && job->classes.labels && i < count; i++)
        status = class_folders_keep(&job->classes, first + i, &samples[i]);
    if (status == STATUS_OK)
        status = unit_add(writer, first, count, samples);
    for (uint64_t i = 0; i < count; i++)
        source_sample_free(&samples[i]);
    return status;
}

static enum status fill_unit(struct job *job, struct unit_writer *writer, uint64_t unit, const char *name)
{
    char part[PATH_MAX];
    uint64_t asked = unit_begins(job, unit), end = unit_begins(job, unit + 1);
    TRY(folder_part_path(&job->folder, unit, part));
    TRY(unit_begin(writer, job->folder.layout, job->folder.path, name, job->key_digits,
                   job->folder.class_folders));
    for (uint64_t at = unit_begins(job, unit); at < end;) {
        uint64_t count = end - at < job->chunk ? end - at : job->chunk;
        source_ask(job->source, job->state, &asked, end);
        TRY(make_chunk(job, writer, at, count));
        at += count;
        job->samples_written += count;
        show(job, unit);
    }
    return unit_end(writer, job->provenance, part);
}

/* Writes the units of this rank: comm_rank(), comm_rank() + comm_size(), ... */
static enum status write_units(struct job *job)
{
    count_samples(job);
    say_what_is_kept(job);
    job->writing_s = timer_now_s();
    progress_begin(&job->progress, comm_rank() == 0);
    for (uint64_t unit = (uint64_t)comm_rank(); unit < job->folder.unit_count;
         unit += (uint64_t)comm_size()) {
        struct unit_writer writer;
        char name[PATH_MAX];
        if (folder_finished(&job->folder, unit))
            continue;
        folder_unit_name(&job->folder, unit, name);
        enum status status = fill_unit(job, &writer, unit, name);
        unit_abandon(&writer);
        if (status != STATUS_OK) {
            status_prefix(status, "cannot write %s %s", job->classes.labels ? "data set" : unit_word(job),
                          job->classes.labels ? job->folder.path : name);
            return status_append(
                status, "; finished %ss are kept: repeat the command to continue%s", unit_word(job),
                job->source->locate
                    ? ", or, if you change the source, prepare into a new folder or remove this one"
                    : "");
        }
        job->units_finished++;
        job->samples_kept += unit_begins(job, unit + 1) - unit_begins(job, unit);
        say_what_is_kept(job);
    }
    return STATUS_OK;
}

/* ---- Finishing ---- */

/* Checks the number of samples in the index, which was merged from parts on disk. A part with a valid
 * checksum may still have more or fewer samples than this run would write. */
static enum status check_gathered(const struct job *job, const struct index *index)
{
    return index->sample_count == job->parameters.samples
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "%s: its index has %" PRIu64 " samples, but %" PRIu64
                            " were expected; remove the folder and prepare it again",
                            job->folder.path, index->sample_count, job->parameters.samples);
}

static void tell(const struct job *job, const struct index *index)
{
    uint64_t bytes = 0, classes = job->classes.count, folders = classes ? classes : index->unit_count;
    for (uint64_t i = 0; i < index->unit_count; i++)
        bytes += index->units[i].bytes;
    text_print(stdout, job->folder.path);
    printf(": %" PRIu64 " %s%s", index->sample_count, sample_word(job), index->sample_count == 1 ? "" : "s");
    if (job->facts.rows > 0)
        printf(" with %" PRIu64 " row%s", job->facts.rows, job->facts.rows == 1 ? "" : "s");
    printf(" in %" PRIu64 " %s%s, %.3f MB, in %.1f s", folders,
           job->classes.masks ? "folder"
           : classes          ? "class folder"
                              : unit_word(job),
           folders == 1 ? "" : "s", 1e-6 * (double)bytes, timer_now_s() - job->began_s);
    if (job->folder.part_count > 0)
        printf(" (%" PRIu64 " of %" PRIu64 " %s%s %s already finished)", job->folder.part_count,
               index->unit_count, unit_word(job), index->unit_count == 1 ? "" : "s",
               job->folder.part_count == 1 ? "was" : "were");
    putchar('\n');
}

static enum status conclude(const struct job *job)
{
    CLOSED_BY(index_free) struct index index;
    TRY(folder_gather(&job->folder, &index));
    TRY(check_gathered(job, &index));
    TRY(samples_write(job->folder.path, job->source, job->state, &index));
    TRY(folder_conclude(&job->folder, &index));
    tell(job, &index);
    return STATUS_OK;
}

/* Claims the folder, writes the units and finishes the dataset. Runs on all ranks, which agree on the status
 * after each phase. */
static enum status make_dataset(struct job *job)
{
    bool lead = comm_rank() == 0;
    TRY(comm_agree(lead ? folder_claim(&job->folder) : STATUS_OK));
    bool complete = folder_complete(&job->folder);
    if (lead && complete) {
        text_print(stdout, job->folder.path);
        puts(": already complete");
    }
    enum status status = complete ? STATUS_OK : write_units(job);
    progress_clear(&job->progress);
    if (status == STATUS_OK)
        tell_broken(job);
    if (status == STATUS_OK)
        tell_mixed_channels(job);
    TRY(comm_agree(status));
    return comm_agree(lead && !complete ? conclude(job) : STATUS_OK);
}

static enum status prepare(struct job *job, const struct config *config)
{
    TRY(comm_agree(read_options(job, config)));
    TRY(comm_check_same(job->parameters.help, "options", "give all ranks the same options"));
    if (job->parameters.help) {
        if (comm_rank() == 0)
            prepare_help(stdout);
        return STATUS_OK;
    }
#ifndef HAVE_XXHASH
    return status_set(
        STATUS_UNAVAILABLE,
        "--prepare: not available, because xxHash was not found; install libxxhash-dev and build again");
#endif
    job->began_s = timer_now_s();
    TRY(comm_agree(open_job(job)));
    TRY(comm_check_same(fnv_add(FNV_BEGIN, job->provenance, strlen(job->provenance)),
                        "options or the files that they name", "give all ranks the same"));
    return make_dataset(job);
}

enum status prepare_run(const struct config *config, bool (*is_option)(const char *name))
{
    struct job job = {.is_option = is_option, .folder = {.lock = -1}};
    enum status status = prepare(&job, config);
    if (job.folder.lock >= 0)
        folder_release(&job.folder);
    if (job.state && job.source->close)
        job.source->close(job.state);
    image_scratch_close(&job.scratch);
    options_free(&job.options);
    free(job.source_parameters);
    free(job.workload_parameters);
    free(job.provenance);
    class_folders_free(&job.classes);
    return status;
}
