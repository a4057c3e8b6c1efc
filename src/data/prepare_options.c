/* The command line of --prepare. */
#include "data/prepare_parts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"
#include "machine/host.h"

#ifndef FDSL_VERSION
#define FDSL_VERSION "unknown"
#endif

static const char *const stores[] = {"files", "shards", "imagefolder",
                                     NULL}; /* in the order of enum index_layout */

#define AT(field) offsetof(struct parameters, field)
static const struct option_spec specs[] = {
    {"prepare", "DIR", OPTION_TEXT, AT(folder),
     .help = "folder to write; it must be new, empty, or begun by an earlier run of the same command"},
    {"from", "SOURCE", OPTION_TEXT, AT(from), .fallback = "counter",
     .help = "source of the samples; the sources are listed below"},
    {"store", "HOW", OPTION_CHOICE, AT(store), .fallback = "shards", .choices = stores, .column = COLUMN,
     .help = "how samples are stored. files writes single files, such as an image and its label, into "
             "folders of 1000 samples; shards writes tar files; imagefolder writes the image of each sample "
             "into the folder of its class, as torchvision's ImageFolder reads them. HOW is one of"},
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
     .help = "CUDA device, if the --variant of --from synth runs on a GPU"},
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

enum status prepare_read_options(struct job *job, const struct config *config)
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
    struct parameters *parameters = &job->parameters;
    if (options_given(&job->options, "samples"))
        return status_set(STATUS_USAGE, "--samples does not apply to --from %s; drop it", job->source->name);
    if (options_given(&job->options, "store") && parameters->store != INDEX_FILES)
        return status_set(STATUS_USAGE, "--from %s writes only --store files; drop --store",
                          job->source->name);
    parameters->store = INDEX_FILES;
    return STATUS_OK;
}

enum status prepare_check_options(struct job *job)
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

enum status prepare_describe(struct job *job)
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
