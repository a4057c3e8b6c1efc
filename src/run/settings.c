#include "run/settings.h"

#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/file.h"
#include "core/text.h"
#include "data/prepare.h"
#include "machine/device.h"
#include "machine/host.h"
#include "machine/nvml.h"
#include "machine/monitor.h"
#include "run/report.h"

static const char *const scalings[] = {"weak", "strong", NULL}; /* indexed by enum scaling */
static const char *const bindings[] = {"auto", "none", NULL};   /* indexed by enum binding */

#define DIGITS(number)  DIGITS_(number)
#define DIGITS_(number) #number
#define MONITOR_PERIODS \
    DIGITS(MONITOR_PERIOD_MS) "; " DIGITS(MONITOR_PERIOD_MIN_MS) " to " DIGITS(MONITOR_PERIOD_MAX_MS)

#define AT(field) offsetof(struct settings, field)
static const struct option_spec specs[] = {
    {"variant", "A,B,...", OPTION_TEXT, AT(variant_names),
     .help = "the variants to run: names from --list; all; or auto, the best one that this machine, this "
             "build and the other options allow"},
    {"workload", "NAME", OPTION_TEXT, AT(workload_name),
     .help = "with --variant all or auto, run the variants of this workload (default: synth)"},
    {"prepare", "DIR", OPTION_TEXT, AT(prepare),
     .help = "write a data set into this folder and measure nothing; --prepare --help lists its options"},
    {"verify-set", "DIR", OPTION_TEXT, AT(verify_set),
     .help = "check the files of an embedding set (--prepare --from embeddings) against the hashes stored "
             "with them, and name bad files and rows; other options do not apply"},
    {"list", NULL, OPTION_FLAG, AT(list),
     .help = "list all variants, or only the variants of --workload or --variant. If a variant cannot run "
             "here, the list says why. Scripts can use --format csv or json"},
    {"columns", NULL, OPTION_FLAG, AT(columns),
     .help = "describe the columns of the rows, of all workloads or of that of --workload or --variant, as a "
             "page of Markdown; scripts can use --format csv or json"},
    {"verify", NULL, OPTION_FLAG, AT(verify),
     .help = "compare results with the reference before and after the timing; if results are wrong, no row "
             "is written"},
    {"baseline", "NAME", OPTION_TEXT, AT(baseline),
     .help = "the variant that the column speedup compares with; it runs first (default: naive, train-naive, "
             "infer-naive or ops-naive; load: files, else shards; exchange: nccl, else mpi)"},
    {"config", "FILE", OPTION_TEXT, AT(config),
     .help = "an INI file with options, as \"name = value\"; the command line overrides it"},
    {"dry-run", NULL, OPTION_FLAG, AT(dry_run),
     .help = "check everything that can be checked before a run, then stop; with lists or ranges, print all "
             "combinations; with --recipe, print the options that the recipe adds. train still writes the "
             "files of --export-data, --export-step and --save-batch"},
    {"table", "FILE", OPTION_TEXT, AT(table),
     .help = "run the rows of this table, each like a separate command: the header names options, separated "
             "by tabs or commas; - omits an option, yes gives one without a value; lists and ranges work as "
             "on the command line. Each row is a task. Options that all workloads share may be added; they "
             "apply to all tasks. With --dry-run, check all tasks and list their commands"},
    {"task", "N[:M]", OPTION_TEXT, AT(task),
     .help = "with --table, run only task N, or tasks N to M, counted from 1"},
    {"scale", "N", OPTION_COUNT, AT(scale), .minimum = 1, .maximum = SETTINGS_RANKS_MAX,
     .help = "with --table, run each case (rows that differ only in ranks and scaling) on 1, 2, 4, ... and N "
             "ranks"},
    {"out", "FILE", OPTION_OUTPUT, AT(out),
     .help = "append the results to this CSV file: one row per variant and combination of values (train: one "
             "row per epoch). With several ranks, each result has one row per rank and one row for all ranks "
             "together"},
    {"lock-timeout", "S", OPTION_REAL, AT(lock_timeout_s), .fallback = DIGITS(LOCK_TIMEOUT_S), .maximum = 1e6,
     .help = "wait at most S seconds for another process that has locked an output CSV file; rows that still "
             "cannot be written are printed to stderr"},
    {"samples-out", "FILE", OPTION_OUTPUT, AT(samples), .help = "append every timed sample to this CSV file"},
    {"monitor", "FILE[:MS]", OPTION_OUTPUT, AT(monitor),
     .help = "sample the GPU and this process every MS milliseconds (default " MONITOR_PERIODS
             ") and append the samples to this CSV file; with -- COMMAND, run that command, and sample it "
             "and all GPUs (with --device N, only GPU N)"},
    {"format", "FORMAT", OPTION_CHOICE, AT(format), .fallback = "table", .choices = format_names,
     .help = "format of stdout"},
    {"threads", "N", OPTION_COUNT, AT(threads), .maximum = THREADS_MAX, .column = COLUMN_APART,
     .help = "CPU threads; 0 means all that this process may use (default: OMP_NUM_THREADS, else 0)"},
    {"device", "N", OPTION_COUNT, AT(device), .fallback = "0", .maximum = 1024,
     .help = "CUDA device, for a single rank; with several ranks, rank i of a machine uses device i modulo "
             "the number of devices"},
    {"best-gpu", NULL, OPTION_FLAG, AT(best_gpu),
     .help = "for a single rank, use the CUDA device with the most free memory"},
    {"gpu-others", "ACTION", OPTION_CHOICE, AT(gpu_others_action), .fallback = "warn",
     .choices = gpu_others_words,
     .help = "what to do before a run on a GPU that other processes use. ACTION is one of"},
    {"ranks", "N", OPTION_COUNT, AT(ranks), .minimum = 1, .maximum = SETTINGS_RANKS_MAX,
     .help = "with --dry-run, check a run on N ranks; to start ranks, use mpirun -n N"},
    {"rank-device", "LIST", OPTION_TEXT, AT(rank_device),
     .help = "which rank uses which GPU, such as 0:cuda:1,1:cuda:0; ranks that LIST does not name use the "
             "GPU described at --device. In train, some ranks can use the CPU and train together with the "
             "ranks on GPUs, such as 0:cuda:0,1:cpu"},
    {"scaling", "HOW", OPTION_CHOICE, AT(scaling), .fallback = "weak", .choices = scalings,
     .column = COLUMN_APART,
     .help = "under mpirun, weak gives every rank a whole batch; strong divides one batch among all ranks. "
             "The ranks of load and ops always divide the data set, as with strong. HOW is one of"},
    {"bind", "HOW", OPTION_CHOICE, AT(binding), .fallback = "auto", .choices = bindings,
     .help = "under mpirun, auto divides a machine's cores among its ranks, unless mpirun has done so; none "
             "leaves the binding unchanged. HOW is one of"},
    {"rank-timeout", "S", OPTION_REAL, AT(rank_timeout_s), .fallback = "0", .maximum = 1e6,
     .help = "under mpirun, end the run when a rank has waited S seconds for another rank, also at the "
             "start. 0 means no limit, except that all ranks must start within 300 s"},
    {"warmups", "N", OPTION_COUNT, AT(limits.warmups), .fallback = "3", .maximum = 1e9,
     .help = "minimum number of runs before the first timed sample (not for train)"},
    {"warmup-time", "S", OPTION_REAL, AT(limits.warmup_time_s), .fallback = "0.25", .maximum = 1e6,
     .help = "minimum time of the warm-up in seconds (not for train)"},
    {"min-samples", "N", OPTION_COUNT, AT(limits.min_samples), .fallback = "10", .minimum = 1, .maximum = 1e9,
     .help = "minimum number of timed samples (not for train)"},
    {"min-time", "S", OPTION_REAL, AT(limits.min_time_s), .fallback = "1", .maximum = 1e6,
     .help = "minimum total sampling time in seconds (not for train)"},
    {"max-time", "S", OPTION_REAL, AT(limits.max_time_s), .fallback = "15", .maximum = 1e6,
     .help = "maximum total sampling time in seconds; sampling then stops even if the median is uncertain, "
             "but not before --min-samples samples, however long they take; a sample is one run, in load one "
             "pass over the data (not for train)"},
    {"max-error", "PERCENT", OPTION_REAL, AT(max_error_percent), .fallback = "1", .minimum = 1e-6,
     .maximum = 100,
     .help = "stop sampling when the 95 % confidence interval of the median is within this percentage of the "
             "median (not for train)"},
    {"loops", "N", OPTION_COUNT, AT(loops), .minimum = 1, .maximum = 1e9,
     .help = "take exactly N timed samples and ignore the time and error limits, for example for a stress "
             "test (not for train)"},
    {"env", NULL, OPTION_FLAG, AT(environment), .help = "print a description of this machine, build and job"},
    {"verbose", NULL, OPTION_FLAG, AT(verbose),
     .help = "with --list, describe each variant; with --help, all options; in a run, warn about each row "
             "that is less reliable, instead of only counting these rows"},
    {"version", NULL, OPTION_FLAG, AT(version), .help = "print the version"},
    {"help", NULL, OPTION_FLAG, AT(help),
     .help = "print an overview. --help TOPIC describes a workload, a group of options (train/loss) or an "
             "option (train/lr)"},
};

static const char list_help[] =
    "lists and ranges: an option that takes one number or one word, and has a column in the CSV file,\n"
    "             accepts several values. The exceptions are --baseline, --compute, --data, --device,\n"
    "             --preset and --warmups. Every combination is measured. With the workload synth, for "
    "example,\n"
    "             --res 224,512 is a list, --batch 1:256:2x means 1, 2, 4, ... 256, and --orbits 50:200:50\n"
    "             means 50, 100, 150, 200. The last option with several values on the command line changes\n"
    "             fastest.\n"
    "none:        --OPTION none unsets an option that takes a number and has no default, or sets a real\n"
    "             number with the default 0 to 0, for example to switch off a part of --recipe or "
    "--config.\n";

static const char exit_statuses[] =
    "\nexit status: 0 done; 1 a failure while running; 2 usage; 3 wrong results,\n"
    "             or a slower row in compare; 4 not supported by this build or machine;\n"
    "             with -- COMMAND, the exit status of the command\n";

static const struct option_section sections[] = {
    {"what to run", "variant"},
    {"output", "out"},
    {"CPU and GPU", "threads"},
    {"ranks", "ranks"},
    {"timing", "warmups"},
    {"information", "env"},
    {NULL, NULL},
};
static const struct option_group common = {specs, COUNT_OF(specs), sections};

static struct option_group group_of(const struct workload *workload)
{
    return (struct option_group){workload->options, workload->option_count, workload->option_sections};
}

/* Prints the names of a workload's variants and options. With `all`, describes all options that apply. */
static void help_with(const struct workload *workload, const char *const *defaults, bool all, FILE *stream)
{
    const struct option_group groups[] = {group_of(workload), common};
    fprintf(
        stream,
        "fdsl-bench --workload %s - %s\n\nusage: fdsl-bench --variant NAME[,NAME...] [options]\n\nvariants:",
        workload->name, workload->summary);
    for (size_t i = 0; i < variant_count; i++)
        if (strcmp(variant_table[i].workload, workload->name) == 0)
            fprintf(stream, " %s", variant_table[i].name);
    fputc('\n', stream);
    if (all) {
        options_help_sections(stream, groups, COUNT_OF(groups), defaults, false);
        fprintf(stream, "\n%s%s", list_help, exit_statuses);
    } else {
        fprintf(stream,
                "\ntopics: --help %s/TOPIC describes their options, --help %s/OPTION one option, --help %s\n"
                "        --verbose all options, --help lists the lists and ranges of values\n",
                workload->name, workload->name, workload->name);
        options_help_sections(stream, groups, COUNT_OF(groups), defaults, true);
    }
}

/* Prints the common help: an overview, or with `all` the options of every workload. */
static void help_common(FILE *stream, bool all)
{
    fputs("fdsl-bench - is it faster to generate training images on the GPU than to read them?\n"
          "\n"
          "usage: fdsl-bench --variant NAME[,NAME...] [options]\n"
          "       fdsl-bench --table FILE [--task N[:M]] [options]\n"
          "       fdsl-bench --prepare DIR [--from SOURCE] [options]\n"
          "       fdsl-bench advise --data DIR|URL --compute MS|train:MODEL [options]\n"
          "       fdsl-bench compare A.csv B.csv [options]\n"
          "       fdsl-bench verify-published DIR --preset SET [options]\n"
          "       fdsl-bench --monitor FILE[:MS] [--device N] -- COMMAND [ARGUMENT...]\n"
          "       fdsl-bench --list [-v] | --columns | --env | --verify-set DIR | --version | --help\n"
          "\n"
          "examples:\n"
          "  fdsl-bench --variant all --verify             # every variant that runs here, verified\n"
          "  fdsl-bench --variant omp --classes 64 --batch 64 --sheet classes.png\n"
          "  fdsl-bench --variant omp --preset segrcdb --batch 4 --png segrcdb   # images and masks\n"
          "  fdsl-bench --prepare train --from synth --classes 1000 --samples 100000 --res 224\n"
          "  fdsl-bench --workload load --variant all --data train\n"
          "  fdsl-bench --workload train --variant all --model lenet --epochs 3\n"
          "  fdsl-bench --variant train-omp --data synth --formula rcdb --epochs 3   # images drawn live\n"
          "  fdsl-bench --variant infer-naive --checkpoint run --batch 1   # median and 99th percentile\n"
          "  mpirun -n 2 fdsl-bench --workload exchange --variant all --bytes 1K:256M:2x   # all-reduces\n"
          "  fdsl-bench advise --data photos --compute 5   # generate or read?\n"
          "\n"
          "workloads, each with more options (fdsl-bench --workload NAME --help):\n",
          stream);
    for (size_t i = 0; workload_table[i]; i++)
        fprintf(stream, "  %-8s %s\n", workload_table[i]->name, workload_table[i]->summary);
    fputs("\noptions of all workloads:\n", stream);
    options_help_sections(stream, &common, 1, NULL, !all);
    for (size_t i = 0; all && workload_table[i]; i++) {
        const struct option_group group = group_of(workload_table[i]);
        fprintf(stream, "\noptions of the workload %s:\n", workload_table[i]->name);
        options_help_sections(stream, &group, 1, NULL, false);
    }
    if (all)
        fprintf(stream, "\n%s", list_help);
    else
        fputs("\nmore help:\n"
              "  fdsl-bench --help TOPIC             a page on train, train/loss, timing, lists, ...\n"
              "  fdsl-bench --prepare --help         and advise, compare or verify-published --help\n"
              "  fdsl-bench --help --verbose         describes all options of all workloads\n",
              stream);
    fputs(exit_statuses, stream);
}

/* Returns the argument after --help, such as "train/loss", or NULL. */
static const char *find_topic(int argc, char *argv[])
{
    for (int i = 1; i + 1 < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return argv[i + 1][0] == '-' ? NULL : argv[i + 1];
    return NULL;
}

/* Returns the workload whose name begins the topic, or NULL. */
static const struct workload *topic_workload(const char *topic)
{
    char name[32] = "";
    if (topic)
        snprintf(name, sizeof name, "%.*s", (int)strcspn(topic, "/"), topic);
    return workload_find(name);
}

/* Describes the options of the named workload that have a word in their name or description; without a
 * workload, lists the names of such options of all workloads. Returns whether there are any. */
static bool search_help(const struct settings *settings, bool named, const char *word, FILE *stream)
{
    bool found = !named && options_help_search(stream, &common, NULL, "all workloads", word, true);
    for (size_t i = 0; workload_table[i]; i++) {
        const struct workload *workload = workload_table[i];
        const struct option_group group = group_of(workload);
        if (!named || workload == settings->workload)
            found |= options_help_search(stream, &group, named ? settings->options.defaults : NULL,
                                         workload->name, word, !named);
    }
    if (found && !named)
        fputs("\n--help WORKLOAD/OPTION describes one, --workload NAME --help WORD those of a workload\n",
              stream);
    return found;
}

enum status settings_help(const struct settings *settings, FILE *stream)
{
    const bool named = settings->workload_name || settings->variant_names;
    const struct option_group groups[] = {named ? group_of(settings->workload) : common, common};
    const char *topic = settings->topic;
    if (named && topic && topic_workload(topic) == settings->workload) /* also "train" */
        topic = strchr(topic, '/') ? strchr(topic, '/') + 1 : NULL;
    if (topic && strcmp(topic, "lists") == 0)
        fputs(list_help, stream);
    else if (topic) {
        enum status status =
            options_help_topic(stream, groups, named ? 2 : 1, settings->options.defaults, topic);
        return status == STATUS_USAGE && search_help(settings, named, topic, stream) ? STATUS_OK : status;
    } else if (named)
        help_with(settings->workload, settings->options.defaults, settings->verbose, stream);
    else
        help_common(stream, settings->verbose);
    return STATUS_OK;
}

#define WORKLOADS_MAX 16 /* at least the number of workloads */

static enum status find_workload(struct settings *settings, int argc, char *argv[])
{
    const char *workload_name = options_peek(specs, COUNT_OF(specs), argc, argv, "workload");
    const char *variants = options_peek(specs, COUNT_OF(specs), argc, argv, "variant");
    if (workload_name && !workload_find(workload_name)) {
        const char *names[WORKLOADS_MAX];
        size_t count = 0;
        for (; workload_table[count]; count++)
            names[count] = workload_table[count]->name;
        const char *nearest = nearest_word(workload_name, names, count);
        if (nearest)
            return status_set(STATUS_USAGE, "unknown workload '%s'; did you mean '%s'?", workload_name,
                              nearest);
        char known[128];
        list_words(known, sizeof known, names, count);
        return status_set(STATUS_USAGE, "unknown workload '%s'; the workloads are %s", workload_name, known);
    }
    settings->workload = !workload_name && !variants ? topic_workload(settings->topic) : NULL;
    if (!settings->workload)
        settings->workload = workload_find(workload_name ? workload_name : "synth");
    settings->unnamed =
        !workload_name && variants && (strcmp(variants, "all") == 0 || variant_is_auto(variants));
    if (!variants)
        return STATUS_OK;
    TRY(variant_select(variants, workload_name, &settings->variants, &settings->variant_count));
    settings->workload = workload_find(settings->variants[0]->workload);
    return STATUS_OK;
}

/* Returns whether an option describes images that --prepare can write for a workload that reads images. */
static bool is_of_images(const struct workload *workload, const char *name)
{
    const struct workload *synth = workload_find("synth");
    bool of_images = false;
    for (size_t i = 0; i < synth->option_count; i++)
        of_images |= strcmp(synth->options[i].name, name) == 0 && synth->options[i].kind != OPTION_OUTPUT;
    return of_images && workload && option_in_table(workload->options, workload->option_count, "out-res");
}

/* Sets the error message for an option that only other workloads or --prepare have, for "--compare", and for
 * the name of a workload. Returns STATUS_OK if `name` is none of these. */
static enum status explain_elsewhere(void *context, const char *name)
{
    const struct settings *settings = context;
    const char *names[WORKLOADS_MAX] = {NULL};
    size_t count = 0;
    for (size_t i = 0; workload_table[i]; i++)
        if (option_in_table(workload_table[i]->options, workload_table[i]->option_count, name))
            names[count++] = workload_table[i]->name;
    if (strcmp(name, "compare") == 0)
        return status_set(STATUS_USAGE,
                          "compare is a command without dashes: fdsl-bench compare A.csv B.csv");
    if (workload_find(name))
        return status_set(STATUS_USAGE, "%s is a workload; its options: --workload %s --help", name, name);
    char owners[128];
    list_words(owners, sizeof owners, names, count);
    if (count > 0 && settings->options.table_count == 1) {
        const struct option_spec *spec = NULL;
        for (size_t i = 0; (spec = settings_option(i)) && strcmp(spec->name, name) != 0; i++)
            ;
        return status_set(STATUS_USAGE,
                          spec && spec->kind == OPTION_OUTPUT
                              ? "--%s does not apply to --table, because all tasks would write the same file"
                              : "--%s does not apply to all workloads; make it a column of the table",
                          name);
    }
    if (count > 0 && settings->unnamed)
        return status_set(STATUS_USAGE, "--%s is an option of the workload%s %s; add --workload %s", name,
                          count == 1 ? "" : "s", owners, names[0]);
    if (count > 0) {
        const enum status status =
            status_set(STATUS_USAGE, "--%s is an option of the workload%s %s; --list shows %s variants", name,
                       count == 1 ? "" : "s", owners, count == 1 ? "its" : "their");
        return is_of_images(settings->workload, name)
                   ? status_append(status,
                                   "; --prepare DIR --from synth --%s writes such images, which %s reads "
                                   "with --data DIR",
                                   name, settings->workload->name)
                   : status;
    }
    return prepare_has_option(name)
               ? status_set(STATUS_USAGE,
                            "--%s is an option of --prepare; --prepare --help lists its options", name)
               : STATUS_OK;
}

const struct option_spec *settings_option(size_t index)
{
    if (index < COUNT_OF(specs))
        return &specs[index];
    index -= COUNT_OF(specs);
    for (size_t i = 0; workload_table[i]; index -= workload_table[i++]->option_count)
        if (index < workload_table[i]->option_count)
            return &workload_table[i]->options[index];
    return NULL;
}

bool settings_has_option(const char *name)
{
    const struct option_spec *spec;
    for (size_t i = 0; (spec = settings_option(i)); i++)
        if (strcmp(spec->name, name) == 0)
            return true;
    return false;
}

const struct workload_alone *settings_alone(const struct settings *settings)
{
    const struct workload *workload = settings->workload;
    const bool other = settings->variant_names || settings->table || settings->prepare || settings->command;
    for (size_t i = 0; !other && workload && i < COUNT_OF(workload->alone); i++)
        if (workload->alone[i].option && options_given(&settings->options, workload->alone[i].option))
            return &workload->alone[i];
    return NULL;
}

bool settings_informational(const struct settings *settings)
{
    bool lists = settings->list && !settings->table; /* sweep_run() lists the rows of a table */
    return settings->help || settings->version || lists || settings->columns || settings->environment ||
           settings->verify_set || settings_alone(settings);
}

/* Returns output file number `number`, counted in the order of the option tables, or NULL after the last one.
 * `*name` becomes the name of its option. */
static const char *output_at(const struct options *options, size_t number, const char **name)
{
    for (size_t t = 0; t < options->table_count; t++)
        for (size_t i = 0; i < options->tables[t].count; i++) {
            const struct option_spec *spec = &options->tables[t].specs[i];
            const char *path = NULL;
            if (spec->kind == OPTION_OUTPUT)
                path = *(const char **)((char *)options->tables[t].values + spec->offset);
            if (path && number-- == 0) {
                *name = spec->name;
                return path;
            }
        }
    return NULL;
}

/* Refuses what a member of workload->alone would ignore: several combinations, and outputs of a run. */
static enum status check_alone(const struct settings *settings)
{
    const struct workload_alone *alone = settings_alone(settings);
    const char *name;
    if (alone && settings->axes.count > 0)
        return status_option(STATUS_USAGE, alone->option,
                             " writes one file or report; give single values instead of lists and ranges");
    for (size_t i = 0; alone && output_at(&settings->options, i, &name); i++)
        if (strcmp(name, alone->option) != 0)
            return status_option(STATUS_USAGE, name,
                                 " has no effect with --%s and without --variant; drop one of them, or add "
                                 "--variant to run with all outputs",
                                 alone->option);
    for (size_t i = 0; alone && i < COUNT_OF(settings->workload->alone); i++) {
        const struct workload_alone *other = &settings->workload->alone[i];
        if (other != alone && other->option && options_given(&settings->options, other->option))
            return status_option(STATUS_USAGE, other->option,
                                 " has no effect with --%s and without --variant; drop one of them",
                                 alone->option);
    }
    return STATUS_OK;
}

/* Refuses to write two outputs to one file, because the second would overwrite the first. */
static enum status check_outputs_differ(const struct options *options)
{
    const char *first, *second, *first_name, *second_name;
    for (size_t i = 0; (first = output_at(options, i, &first_name)); i++)
        for (size_t j = i + 1; (second = output_at(options, j, &second_name)); j++)
            if (file_same(first, second))
                return status_option(STATUS_USAGE, first_name,
                                     " and --%s name the same file, '%s'; name two different files",
                                     second_name, first);
    return STATUS_OK;
}

/* Refuses an output file that is named like an element type, because "--out f16" may be meant as "--dtype
 * f16", and the file "-" for options that do not write to stdout. */
static enum status check_no_slip(const struct options *options)
{
    const char *path, *name;
    for (size_t i = 0; (path = output_at(options, i, &name)); i++)
        for (size_t t = 0; t < options->table_count; t++)
            for (size_t j = 0; j < options->tables[t].count; j++) {
                const struct option_spec *spec = &options->tables[t].specs[j];
                if (strcmp(spec->name, name) == 0 && strcmp(path, "-") == 0 && spec->choices != option_stdout)
                    return status_option(
                        STATUS_USAGE, name,
                        ": it does not write to stdout; name a file, or ./- for a file of this name");
                if (strcmp(spec->name, "dtype") == 0 && options_is_choice(spec, path) &&
                    !options_given(options, spec->name))
                    return status_set(STATUS_USAGE,
                                      "--%s %s: did you mean --%s %s? If not, name the file ./%s", name, path,
                                      spec->name, path, path);
            }
    return STATUS_OK;
}

void settings_take_threads(struct settings *settings)
{
    struct env env;
    env_capture(&env);
    if (!options_given(&settings->options, "threads"))
        settings->threads = env_openmp_threads();
    int threads = settings->threads ? (int)settings->threads : env.allowed_threads;
    settings->resources.threads = threads < 1 ? 1 : threads;
    settings->allowed_threads = env.allowed_threads;
#ifdef _OPENMP
    omp_set_num_threads(settings->resources.threads);
#endif
}

const struct compute *settings_compute(const struct settings *settings)
{
    const struct workload *workload = settings->workload;
    const struct compute *compute =
        workload->batches.step ? workload->batches.step(settings->parameters) : NULL;
    return compute && compute->text ? compute : NULL;
}

const char *settings_scaling(const struct settings *settings)
{
    return scalings[settings->scaling];
}

/* Splits --monitor FILE[:MS]. Digits after the last colon are the period; other colons belong to the file. */
static enum status read_monitor(struct settings *settings)
{
    settings->monitor_period_ms = MONITOR_PERIOD_MS;
    if (!settings->monitor)
        return STATUS_OK;
    const char *colon = strrchr(settings->monitor, ':'), *digits = colon ? colon + 1 : "";
    size_t length = strlen(settings->monitor);
    if (*digits && strspn(digits, "0123456789") == strlen(digits)) {
        TRY(parse_count("--monitor FILE:MS", digits, MONITOR_PERIOD_MIN_MS, MONITOR_PERIOD_MAX_MS,
                        &settings->monitor_period_ms));
        length = (size_t)(colon - settings->monitor);
    }
    settings->monitor_file = strndup(settings->monitor, length);
    TRY(ALLOCATED(settings->monitor_file, "out of memory"));
    settings->monitor = settings->monitor_file;
    return *settings->monitor ? STATUS_OK
                              : status_option(STATUS_USAGE, "monitor", ": name a file before the colon");
}

/* For -- COMMAND: refuses options that only apply to runs of variants. */
static enum status check_command(struct settings *settings)
{
    static const char *const allowed[] = {"monitor", "device", "config", "lock-timeout", NULL};
    if (!*settings->command)
        return status_set(STATUS_USAGE, "name a command after --, e.g. --monitor FILE -- python3 train.py");
    TRY(options_check_only(&settings->options, "-- COMMAND", allowed));
    if (!settings->monitor)
        return status_set(STATUS_USAGE, "-- COMMAND needs --monitor FILE, for the samples of '%s'",
                          settings->command[0]);
    lock_set_timeout(settings->lock_timeout_s);
    return read_monitor(settings);
}

/* Refuses --loops together with the limits that it replaces. */
static enum status check_loops(const struct settings *settings)
{
    static const char *const others[] = {"min-samples", "min-time", "max-time", "max-error"};
    for (size_t i = 0; settings->loops && i < COUNT_OF(others); i++)
        if (options_given(&settings->options, others[i]))
            return status_option(STATUS_USAGE, "loops",
                                 " sets the exact number of samples and ignores --%s; leave one out",
                                 others[i]);
    return STATUS_OK;
}

/* If the workload has epochs, refuses options for repeated runs, because each run is an epoch and gives one
 * row. */
static enum status check_repeats(const struct settings *settings)
{
    static const char *const repeats[] = {"warmups",  "warmup-time", "min-samples", "min-time",
                                          "max-time", "max-error",   "loops"};
    for (size_t i = 0; settings->workload->epochs.more && i < COUNT_OF(repeats); i++)
        if (options_given(&settings->options, repeats[i]))
            return status_option(STATUS_USAGE, repeats[i],
                                 ": %s does not repeat runs; each epoch is one row; use --epochs",
                                 settings->workload->name);
    return STATUS_OK;
}

/* With several variants, refuses options that work with one variant only, because all variants would write to
 * the same file. */
static enum status check_single(const struct settings *settings)
{
    const char *const *single = settings->workload->single;
    const bool several = settings->variant_count > 1 && !variant_is_auto(settings->variant_names);
    for (; single && *single && several; single++)
        if (options_given(&settings->options, *single))
            return status_option(STATUS_USAGE, *single,
                                 " works with one variant at a time, but --variant names %zu; name one",
                                 settings->variant_count);
    return STATUS_OK;
}

/* With several combinations, refuses output files other than --out and --samples-out. Each combination would
 * replace the file of the previous one, and rows of --monitor do not name their combination. */
static enum status check_combined_outputs(const struct settings *settings)
{
    static const char remedy[] =
        " is for one combination, but the lists and ranges have %zu; use single values";
    size_t combinations = axes_combinations(&settings->axes);
    const char *const *single = settings->workload->single;
    const char *name;
    for (size_t i = 0; combinations > 1 && output_at(&settings->options, i, &name); i++)
        if (strcmp(name, "out") != 0 && strcmp(name, "samples-out") != 0)
            return status_option(STATUS_USAGE, name, remedy, combinations);
    for (; combinations > 1 && single && *single; single++)
        if (options_given(&settings->options, *single))
            return status_option(STATUS_USAGE, *single, remedy, combinations);
    return STATUS_OK;
}

/* Refuses --ranks without --dry-run, because only a launcher can start ranks, and options of --table alone.
 */
static enum status check_ranks(const struct settings *settings)
{
    if ((settings->task || settings->scale) && !settings->table)
        return status_set(STATUS_USAGE, "--%s works only with --table FILE",
                          settings->task ? "task" : "scale");
    if (settings->ranks && !settings->dry_run)
        return status_option(
            STATUS_USAGE, "ranks",
            " is for --dry-run; to start %llu ranks: mpirun --bind-to none -n %llu fdsl-bench ...",
            (unsigned long long)settings->ranks, (unsigned long long)settings->ranks);
    return STATUS_OK;
}

/* ---- The choice of devices ---- */

#define DEVICE_MAX 1024
#define RANK_MAX   1e6

struct rank_entry {
    uint64_t rank;
    int device;
};

/* Parses "0:cuda:1" or "0:cpu". */
static enum status parse_entry(const char *text, struct rank_entry *entry)
{
    char rank[32];
    uint64_t device;
    size_t length = strcspn(text, ":");
    snprintf(rank, sizeof rank, "%.*s", (int)length, text);
    const char *name = text + length;
    if (parse_count("", rank, 0, RANK_MAX, &entry->rank) == STATUS_OK) {
        entry->device = RANK_DEVICE_CPU;
        if (strcmp(name, ":cpu") == 0)
            return STATUS_OK;
        if (strncmp(name, ":cuda:", 6) == 0 &&
            parse_count("", name + 6, 0, DEVICE_MAX, &device) == STATUS_OK) {
            entry->device = (int)device;
            return STATUS_OK;
        }
    }
    return status_option(STATUS_USAGE, "rank-device",
                         ": '%.80s' is not RANK:cuda:N or RANK:cpu, such as 0:cuda:0 or 1:cpu", text);
}

/* Parses the entry at `*at` and moves `*at` to the next one, or to NULL after the last one. */
static enum status next_entry(const char **at, struct rank_entry *entry)
{
    char text[128];
    size_t length = strcspn(*at, ",");
    snprintf(text, sizeof text, "%.*s", (int)length, *at);
    *at = (*at)[length] == ',' ? *at + length + 1 : NULL;
    return parse_entry(text, entry);
}

enum status rank_device_find(const char *list, uint64_t ranks, uint64_t rank, int *device)
{
    struct rank_entry entry, later;
    *device = RANK_DEVICE_AUTO;
    while (list) {
        TRY(next_entry(&list, &entry));
        if (entry.rank >= ranks)
            return status_option(
                STATUS_USAGE, "rank-device", " names rank %llu, but the run has %llu rank%s, counted from 0",
                (unsigned long long)entry.rank, (unsigned long long)ranks, ranks == 1 ? "" : "s");
        for (const char *rest = list; rest;) {
            TRY(next_entry(&rest, &later));
            if (later.rank == entry.rank)
                return status_option(STATUS_USAGE, "rank-device", " names rank %llu twice; drop one",
                                     (unsigned long long)entry.rank);
        }
        if (entry.rank == rank)
            *device = entry.device;
    }
    return STATUS_OK;
}

#define DEVICES_MAX 256

size_t gpu_most_free(const int64_t *free_bytes, size_t count)
{
    size_t best = 0;
    for (size_t i = 1; i < count; i++)
        if (free_bytes[i] > free_bytes[best])
            best = i;
    return best;
}

static enum status free_memory(int device, int64_t *free_bytes)
{
    char pci_bus_id[32];
    struct gpu_state state;
    TRY(device_pci_bus_id(device, pci_bus_id, sizeof pci_bus_id));
    TRY(nvml_gpu_state(pci_bus_id, &state));
    *free_bytes = state.memory_free_bytes;
    if (*free_bytes < 0)
        return status_set(STATUS_UNAVAILABLE, "NVML does not report the free memory of the GPU at %s",
                          pci_bus_id);
    return STATUS_OK;
}

/* Sets `*device` to the visible CUDA device with the most free memory; with equal amounts, the first. Queries
 * NVML, because CUDA would create a context on each device, which takes memory. Prints the choice on a
 * terminal. */
static enum status gpu_best(uint64_t *device)
{
    int64_t free_bytes[DEVICES_MAX];
    int count = device_count();
    if (count == 0)
        return status_prefix(device_probe(0), "--best-gpu"); /* device_probe() sets the reason */
    count = count < DEVICES_MAX ? count : DEVICES_MAX;
    for (int i = 0; i < count; i++)
        if (free_memory(i, &free_bytes[i]) != STATUS_OK)
            return status_prefix(STATUS_UNAVAILABLE, "--best-gpu cannot choose; use --device N");
    *device = gpu_most_free(free_bytes, (size_t)count);
    status_note("--best-gpu chose device %d of %d devices, with %.1f GB free", (int)*device, count,
                1e-9 * (double)free_bytes[*device]);
    return STATUS_OK;
}

static enum status choose_device(struct settings *settings)
{
    if (!settings->best_gpu)
        return STATUS_OK;
    if (options_given(&settings->options, "device"))
        return status_option(STATUS_USAGE, "best-gpu",
                             " chooses a device and --device names one; leave one out");
    return gpu_best(&settings->device);
}

/* ---- Reading the command line ---- */

/* Completes settings->limits, whose fields are options. */
static enum status derive_limits(struct settings *settings)
{
    struct bench_limits *limits = &settings->limits;
    bool least = options_given(&settings->options, "min-time"),
         most = options_given(&settings->options, "max-time");
    if (limits->max_time_s < limits->min_time_s && least && most)
        return status_option(STATUS_USAGE, "max-time",
                             " %g is shorter than --min-time %g; change one of them", limits->max_time_s,
                             limits->min_time_s);
    if (limits->max_time_s < limits->min_time_s) /* adjust the limit that was not given */
        *(most ? &limits->min_time_s : &limits->max_time_s) = most ? limits->max_time_s : limits->min_time_s;
    limits->max_median_error = settings->max_error_percent / 100;
    if (settings->loops) { /* with max_time_s = 0, bench_measure() stops after min_samples */
        limits->min_samples = settings->loops;
        limits->max_time_s = 0;
    }
    return STATUS_OK;
}

static enum status derive(struct settings *settings)
{
    if (!settings->variant_names)
        return status_option(STATUS_USAGE, "variant",
                             " NAME is missing; --list shows the names, --help all options");
    TRY(read_monitor(settings));
    TRY(check_outputs_differ(&settings->options));
    TRY(check_repeats(settings));
    TRY(check_single(settings));
    TRY(check_combined_outputs(settings));
    TRY(check_loops(settings));
    TRY(check_ranks(settings));
    TRY(check_no_slip(&settings->options));
    TRY(derive_limits(settings));
    settings->resources.device = (int)settings->device;
    settings_take_threads(settings);
    lock_set_timeout(settings->lock_timeout_s);
    return format_check(settings->format);
}

/* Returns whether the command line is `--prepare --help`, without a folder. */
static bool asks_about_prepare(int argc, char *argv[])
{
    bool help = false, prepare = false;
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        help |= strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
        prepare |= strcmp(argv[i], "--prepare") == 0 && (i + 1 == argc || argv[i + 1][0] == '-');
    }
    return help && prepare;
}

/* Explains `--columns 31`, which may be meant as the size of a row. `--columns` takes no value. */
static enum status check_columns_value(const struct settings *settings, int argc, char *argv[])
{
    const char *value = options_peek(specs, COUNT_OF(specs), argc, argv, "columns");
    if (!value || !*value || strspn(value, "0123456789,:x") != strlen(value) ||
        !option_in_table(settings->workload->options, settings->workload->option_count, "dim"))
        return STATUS_OK;
    return status_option(
        STATUS_USAGE, "columns",
        " describes the columns of the rows and takes no value; the number of values per row is --dim");
}

/* Refuses options that --columns would ignore. */
static enum status check_columns(const struct settings *settings)
{
    if (settings->command)
        return status_option(STATUS_USAGE, "columns", " does not apply to -- COMMAND; leave one out");
    return options_check_only(
        &settings->options, "--columns",
        (const char *const[]){"columns", "workload", "variant", "format", "config", NULL});
}

/* Returns whether a device prepares batches while training steps run: with --compute, and with --feed load or
 * mixed unless the CPU decodes. */
static bool prepares_beside_steps(const struct settings *settings, int argc, char *const argv[])
{
    const struct option_spec *specs_of = settings->workload->options;
    const size_t count = settings->workload->option_count;
    const char *feed = options_peek(specs_of, count, argc, argv, "feed"); /* also a list */
    const char *decoder = options_peek(specs_of, count, argc, argv, "decoder");
    return options_given(&settings->options, "compute") ||
           (feed && (strstr(feed, "load") || strstr(feed, "mixed")) &&
            !(decoder && strcmp(decoder, "cpu") == 0));
}

enum status settings_read(struct settings *settings, const struct config *config)
{
    int argc = config->argc;
    char **argv = config->argv;
    *settings = (struct settings){.command = config->command};
    if (asks_about_prepare(argc, argv)) {
        settings->prepare = "";
        settings->help = true;
        return STATUS_OK;
    }
    settings->prepare = options_peek(NULL, 0, argc, argv, "prepare"); /* accepts no prefix of --prepare */
    if (settings->prepare && settings->command)
        return status_option(STATUS_USAGE, "prepare", " does not apply to -- COMMAND; leave one out");
    if (settings->prepare) /* data/prepare.c parses its options */
        return STATUS_OK;
    bool sweeps = !config->is_row && options_peek(specs, COUNT_OF(specs), argc, argv, "table");
    settings->topic = find_topic(argc, argv);
    enum status found = find_workload(settings, argc, argv);
    if (!settings->workload)
        return found;
    settings->parameters = calloc(1, settings->workload->parameters_bytes);
    TRY(ALLOCATED(settings->parameters, "out of memory"));
    settings->options = (struct options){
        .tables = {{specs, COUNT_OF(specs), settings},
                   {settings->workload->options, settings->workload->option_count, settings->parameters}},
        .table_count = sweeps ? 1 : 2, /* the rows of --table may be of several workloads */
        .defaults = settings->workload->defaults ? settings->workload->defaults(argc, argv) : NULL,
        .axes = &settings->axes,
        .config = config,
        .operands_max = settings->topic != NULL,
        .operands = &settings->topic,
        .explain = explain_elsewhere,
        .explain_context = settings};
    if (found != STATUS_OK)
        return found;
    TRY(check_columns_value(settings, argc, argv));
    TRY(options_parse(&settings->options, argc, argv));
    if (!settings->workload_name && topic_workload(settings->topic))
        settings->workload_name = settings->workload->name;
    if (settings->help || settings->version)
        return STATUS_OK;
    if (settings->verify_set)
        return options_check_only(&settings->options, "--verify-set",
                                  (const char *const[]){"verify-set", "config", NULL});
    if (settings->columns)
        return check_columns(settings);
    if (sweeps && settings->command)
        return status_set(STATUS_USAGE, "--table does not apply to -- COMMAND; leave one out");
    if (sweeps && !settings_informational(settings))
        return STATUS_OK;
    if (settings->command && !settings_informational(settings))
        return check_command(settings);
    if (prepares_beside_steps(settings, argc, argv))
        device_use_all_queues();
    TRY(choose_device(settings));
    TRY(check_alone(settings));
    return settings_informational(settings) || settings->prepare ? STATUS_OK : derive(settings);
}

/* Returns a copy of `bytes` bytes, which the caller frees, or NULL. */
static void *copy_of(const void *original, size_t bytes)
{
    void *copy = malloc(bytes + 1);
    return copy ? memcpy(copy, original, bytes) : NULL;
}

enum status settings_combine(struct settings *settings, size_t combination)
{
    struct settings_given *given = &settings->given;
    size_t bytes = settings->workload->parameters_bytes, entry_bytes = sizeof(struct variant_entry *);
    if (!given->parameters) {
        given->variant_count = settings->variant_count;
        given->parameters = copy_of(settings->parameters, bytes);
        given->variants = copy_of(settings->variants, given->variant_count * entry_bytes);
        TRY(ALLOCATED(given->parameters && given->variants, "out of memory for the options"));
    }
    memcpy(settings->parameters, given->parameters, bytes);
    memcpy(settings->variants, given->variants, given->variant_count * entry_bytes);
    settings->variant_count = given->variant_count;
    settings->combination = combination;
    TRY(axes_select(&settings->axes, combination));
    settings_take_threads(settings);
    return STATUS_OK;
}

bool settings_uses(const struct settings *settings, const char *option)
{
    const struct workload *workload = settings->workload;
    bool used = !workload->applies;
    for (size_t i = 0; !used && i < settings->variant_count; i++)
        used = workload->applies(settings->parameters, settings->variants[i]->variant, option);
    return used;
}

void settings_free(struct settings *settings)
{
    axes_free(&settings->axes);
    free(settings->given.parameters);
    free(settings->given.variants);
    options_free(&settings->options);
    free(settings->variants);
    free(settings->parameters);
    free(settings->monitor_file);
}
