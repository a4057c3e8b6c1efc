/* Many runs from one command line: every combination of the values in lists and ranges, and the rows of
 * --table. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "machine/comm.h"
#include "run/report.h"
#include "run/rows.h"
#include "run/runner.h"

/* ---- Combinations ---- */

#define TEXT_BYTES 512 /* for a combination as text: "--res 224 --batch 8" */

/* Which combinations have run. */
struct combinations {
    size_t count, failed; /* number of combinations, and how many of them have failed so far */
    enum status worst;
    struct failure failure; /* of the latest combination; STATUS_OK if it succeeded */
    size_t repeated; /* number of later combinations with the same failure, which is printed only once */
};

/* Prints how many further combinations failed with the latest printed message, and forgets the message. */
static void end_repetition(struct combinations *combinations)
{
    if (combinations->repeated > 0)
        status_say("the next %zu combination%s failed in the same way", combinations->repeated,
                   combinations->repeated == 1 ? "" : "s");
    combinations->repeated = 0;
    combinations->failure.status = STATUS_OK;
}

/* Counts a failure, and prints it unless it repeats the previous one. */
static void add_failure(struct combinations *combinations, enum status status, const char *combination)
{
    if (status_repeats(status, &combinations->failure))
        combinations->repeated++;
    else {
        end_repetition(combinations);
        combinations->failure = status_save(status);
        status_set_context(combination);
        status_print();
        status_set_context("");
    }
    combinations->failed++;
    if (status_severity(status) > status_severity(combinations->worst))
        combinations->worst = status;
}

/* Sets the message that is printed if a signal ends the program while combination `number` runs. `text` has
 * the options of the combination. */
static void prepare_combination_farewell(const struct settings *settings,
                                         const struct combinations *combinations, size_t number,
                                         const char *text)
{
    char done[64], rest[TEXT_BYTES];
    if (comm_rank() != 0)
        return;
    snprintf(done, sizeof done, "%zu of %zu combinations are done", number, combinations->count);
    if (runner_loses_rows(settings)) {
        file_say_on_signal("%s, but their rows are lost, because --format json prints all rows at the end; "
                           "to start again, repeat the same command with --out FILE",
                           done);
        return;
    }
    const char *where = settings->out ? settings->out : "stdout only, because --out FILE was not given";
    const char *in = settings->out ? "in" : "on";
    if (settings->options.config->is_row) /* a table refuses --res and other options of its columns */
        file_say_on_signal("%s, with their rows %s %s; the task starts again from its beginning", done, in,
                           where);
    else if (axes_describe_rest(&settings->axes, number, rest, sizeof rest))
        file_say_on_signal("%s, with their rows %s %s; to continue, repeat the same command%s%s", done, in,
                           where, *rest ? " with " : "", rest);
    else
        file_say_on_signal("%s, with their rows %s %s; to continue, measure the combinations from %s on, "
                           "which --dry-run lists",
                           done, in, where, text);
}

/* Runs one combination. Warnings begin with the options of the combination. A failure while running, for
 * example a full disk or a broken device, ends the combinations; any other failure is printed and counted. */
static enum status run_one(struct settings *settings, size_t number, struct combinations *combinations,
                           struct report **report)
{
    char text[TEXT_BYTES];
    TRY(comm_agree(settings_combine(settings, number)));
    axes_describe(&settings->axes, number, text, sizeof text);
    prepare_combination_farewell(settings, combinations, number, text);
    status_set_context(text);
    enum status status = runner_combination(settings, report);
    status_set_context("");
    if (status_exit(status) == STATUS_FAILED)
        return status_prefix(status, "%s: combination %zu of %zu", text, number + 1, combinations->count);
    if (status != STATUS_OK) {
        add_failure(combinations, status, text);
        return STATUS_OK;
    }
    end_repetition(combinations);
    if (settings->dry_run && comm_rank() == 0)
        puts(text);
    return STATUS_OK;
}

/* Refuses values with the same effect: weak and strong scaling with one rank, and --threads 0 together with
 * the number that 0 means. With several ranks, that number is known only later
 * (runner_warn_about_cores()). */
static enum status check_values_differ(const struct settings *settings, uint64_t ranks)
{
    if (ranks > 1)
        return STATUS_OK;
    if (axes_find(&settings->axes, "scaling"))
        return status_set(STATUS_USAGE, "--scaling: weak and strong are the same with one rank; give one of "
                                        "them, or start more ranks: mpirun --bind-to none -n N");
    if (!settings->ranks && runner_repeats_threads(settings)) /* --ranks may be for another machine */
        return status_set(STATUS_USAGE, "--threads: 0 means %d here, so %d occurs twice; drop one of them",
                          settings->allowed_threads, settings->allowed_threads);
    return STATUS_OK;
}

static enum status run_combinations(struct settings *settings, size_t count, struct report **report)
{
    struct combinations combinations = {.count = count};
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < count; i++)
        status = run_one(settings, i, &combinations, report);
    end_repetition(&combinations);
    file_say_on_signal("%s", "");
    if (status == STATUS_OK && combinations.failed > 0)
        status = status_set(combinations.worst, "%zu of %zu combinations failed", combinations.failed, count);
    return status;
}

enum status runner_run(struct settings *settings)
{
    size_t count = axes_combinations(&settings->axes);
    uint64_t ranks = settings->ranks ? settings->ranks : (uint64_t)comm_size();
    struct report *report = NULL;
    /* This check comes first: --best-gpu may choose a different device per rank, and runner_check_alike()
     * would then only report that options differ. */
    TRY(comm_agree(runner_check_no_device(settings, ranks)));
    TRY(comm_agree(check_values_differ(settings, ranks)));
    TRY(runner_check_alike(
        settings)); /* also compares lists and ranges, so that all ranks run the same combinations */
    enum status status =
        count == 1 ? runner_combination(settings, &report) : run_combinations(settings, count, &report);
    struct failure failure = status_save(status);
    enum status ended = report ? report_end(report) : STATUS_OK;
    return status == STATUS_OK ? ended : status_restore(&failure);
}

/* ---- The runs of a table ---- */

#define OPTIONS_MAX 512 /* more options than the program has */
#define HINT_MAX    600 /* longest arguments that fit into a message, in bytes */

/* A run of the program. */
struct run {
    size_t line; /* of the table */
    uint64_t ranks;
    char **options; /* owned: `count` texts "--name=value" or "--flag", owned too */
    size_t count;
    const char *scaling; /* with --scale: the row's value of `scaling`, or NULL; otherwise NULL */
    char *command;       /* owned: the command line, as a shell reads it, without the launcher */
};

struct sweep {
    const struct settings *settings;
    uint64_t ranks; /* of this run of the program; 0: unknown */
    int argc;       /* the command line */
    char **argv;
    sweep_perform *perform;
    const char *path;
    struct table table;
    struct run *runs; /* owned */
    size_t count;
};

static enum status refuse(const struct sweep *sweep, size_t line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static enum status refuse(const struct sweep *sweep, size_t line, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return status_set(STATUS_USAGE, "%s, line %zu: %s", sweep->path, line, text);
}

static enum status out_of_memory(const struct sweep *sweep)
{
    return status_set(STATUS_EXHAUSTED, "%s: out of memory for its tasks", sweep->path);
}

/* ---- Runs ---- */

/* Adds an option to a run. */
static bool add_option(struct run *run, const char *name, const char *value)
{
    char *option = NULL;
    if (!array_grow(&run->options, run->count, sizeof *run->options) ||
        asprintf(&option, "--%s%s%s", name, value ? "=" : "", value ? value : "") < 0)
        return false;
    run->options[run->count++] = option;
    return true;
}

static bool write_command(struct run *run)
{
    size_t bytes;
    FILE *stream = open_memstream(&run->command, &bytes);
    if (!stream)
        return false;
    fputs("fdsl-bench", stream);
    for (size_t i = 0; i < run->count; i++)
        text_print_word(stream, run->options[i]);
    return text_close(stream);
}

static void free_run(struct run *run)
{
    for (size_t i = 0; i < run->count; i++)
        free(run->options[i]);
    free(run->options);
    free(run->command);
    *run = (struct run){0};
}

/* Adds a run, and takes ownership of it. */
static enum status add_run(struct sweep *sweep, struct run *run)
{
    if (!write_command(run) || !array_grow(&sweep->runs, sweep->count, sizeof *run)) {
        free_run(run);
        return out_of_memory(sweep);
    }
    sweep->runs[sweep->count++] = *run;
    return STATUS_OK;
}

static void free_runs(struct sweep *sweep)
{
    for (size_t i = 0; i < sweep->count; i++)
        free_run(&sweep->runs[i]);
    free(sweep->runs);
    sweep->runs = NULL;
    sweep->count = 0;
}

/* ---- The command line ---- */

/* Returns the common option that an argument of the command line names, in full or abbreviated, or NULL. */
static const struct option_spec *option_of(const struct sweep *sweep, const char *argument)
{
    const struct option_table *common = &sweep->settings->options.tables[0];
    const struct option_spec *found = NULL;
    size_t length = strncmp(argument, "--", 2) == 0 ? strcspn(argument + 2, "=") : 0;
    for (size_t i = 0; length > 0 && i < common->count; i++) {
        const char *name = common->specs[i].name;
        if (strncmp(name, argument + 2, length) == 0 && (!found || strlen(name) == length))
            found = &common->specs[i];
    }
    return found;
}

/* Returns the index of the argument after the option at `at`, which has been parsed without an error. */
static int next_option(const struct sweep *sweep, int at)
{
    const struct option_spec *spec = option_of(sweep, sweep->argv[at]);
    return at + (spec && spec->kind != OPTION_FLAG && !strchr(sweep->argv[at], '=') ? 2 : 1);
}

/* Returns whether the command line has the option, also if it only switches it off (--verify=no). */
static bool on_command_line(const struct sweep *sweep, const char *name)
{
    for (int i = 1; i < sweep->argc; i = next_option(sweep, i)) {
        const struct option_spec *spec = option_of(sweep, sweep->argv[i]);
        if (spec && strcmp(spec->name, name) == 0)
            return true;
    }
    return false;
}

/* Writes the command line without the options in `left_out`, as a shell reads it. */
static void write_arguments(FILE *stream, const struct sweep *sweep, const char *const *left_out)
{
    for (int i = 1, next; i < sweep->argc; i = next) {
        const struct option_spec *spec = option_of(sweep, sweep->argv[i]);
        next = next_option(sweep, i);
        for (int j = i; (!spec || !is_one_of(spec->name, left_out)) && j < next && j < sweep->argc; j++)
            text_print_word(stream, sweep->argv[j]);
    }
}

/* Returns the command of a task, with the options for all tasks: as a text that the caller frees, or NULL if
 * memory runs out. */
static char *describe_command(const struct sweep *sweep, const struct run *run)
{
    static const char *const own[] = {"table", "task", "scale", "list", "dry-run", "format", NULL};
    char *text = NULL;
    size_t bytes;
    FILE *stream = open_memstream(&text, &bytes);
    if (!stream)
        return NULL;
    fputs(run->command, stream);
    write_arguments(stream, sweep, own);
    if (text_close(stream))
        return text;
    free(text);
    return NULL;
}

/* ---- The table ---- */

/* Returns whether a run may have the option. All runs would write to one file if an option named a file that
 * the program writes. An INI file may contain any option, and some options run nothing. */
static bool is_allowed(const struct option_spec *spec)
{
    static const char *const inputs[] = {"checkpoint", "class", "data", "init", "preset-file", NULL};
    static const char *const refused[] = {"columns", "dry-run", "list", "env",   "verbose", "version",
                                          "help",    "prepare", "task", "scale", NULL};
    const char *argument = spec->argument ? spec->argument : "";
    return !is_one_of(spec->name, refused) &&
           (is_one_of(spec->name, inputs) || (!strstr(argument, "FILE") && !strstr(argument, "DIR")));
}

static enum status check_column(const struct sweep *sweep, size_t column, size_t line)
{
    const char *names[OPTIONS_MAX], *name = sweep->table.cells[column];
    const struct option_spec *spec, *known = NULL;
    size_t count = 0;
    for (size_t i = 0; count < OPTIONS_MAX && (spec = settings_option(i)); i++) {
        names[count++] = spec->name;
        if (strcmp(spec->name, name) == 0)
            known = spec;
    }
    if (known && !is_allowed(known))
        return refuse(sweep, line, "column '%s' cannot be used in a table", name);
    if (table_column(&sweep->table, name) != column)
        return refuse(sweep, line, "column '%s' occurs twice", name);
    if (known)
        return STATUS_OK;
    if (strchr(name, ' '))
        return refuse(sweep, line, "unknown column '%s'; separate columns by tabs or commas, not blanks",
                      name);
    if (*name == '-')
        return refuse(sweep, line, "unknown column '%s'; write it without dashes", name);
    const char *nearest = nearest_word(name, names, count);
    if (nearest)
        return refuse(sweep, line, "unknown column '%s'; did you mean '%s'?", name, nearest);
    return refuse(
        sweep, line,
        "unknown column '%s'; columns are options of --help -v, in full, separated by tabs or commas", name);
}

/* Returns whether the row's variant or workload reads --checkpoint. The others write it. */
static bool reads_checkpoint(const struct table *table, size_t row)
{
    return strncmp(table_cell(table, row, table_column(table, "variant")), "infer", 5) == 0 ||
           strcmp(table_cell(table, row, table_column(table, "workload")), "infer") == 0;
}

/* Fills `run` with a row. With `scaled`, keeps `scaling` apart, because add_scaled() replaces it. */
static enum status read_row(const struct sweep *sweep, size_t row, bool scaled, struct run *run)
{
    const struct table *table = &sweep->table;
    *run = (struct run){.line = table->lines[row], .ranks = 1};
    for (size_t i = 0; i < table->columns; i++) {
        const char *name = table->cells[i], *value = table_cell(table, row, i);
        if (!*value)
            return refuse(sweep, run->line, "column '%s' is empty; write - to omit the option", name);
        if (strcmp(value, "-") == 0)
            continue;
        if (on_command_line(sweep, name))
            return refuse(sweep, run->line, "--%s is given here and on the command line; drop one of them",
                          name);
        if (strcmp(name, "checkpoint") == 0 && !reads_checkpoint(table, row))
            return refuse(sweep, run->line,
                          "column 'checkpoint' can be used only with infer, which reads it");
        if (strcmp(name, "ranks") == 0 &&
            parse_count("--ranks", value, 1, SETTINGS_RANKS_MAX, &run->ranks) != STATUS_OK)
            return status_prefix(STATUS_USAGE, "%s, line %zu", sweep->path, run->line);
        if (strcmp(name, "ranks") == 0)
            continue;
        if (scaled && strcmp(name, "scaling") == 0)
            run->scaling = value;
        else if (!add_option(run, name, strcmp(value, "yes") == 0 ? NULL : value))
            return out_of_memory(sweep);
    }
    return run->count > 0 ? STATUS_OK : refuse(sweep, run->line, "no option is given");
}

/* Returns the first run with the same command and, unless `scaled`, the same ranks. */
static const struct run *find_run(const struct sweep *sweep, const struct run *like, bool scaled)
{
    for (const struct run *run = sweep->runs;; run++)
        if (strcmp(run->command, like->command) == 0 && (scaled || run->ranks == like->ranks))
            return run;
}

static enum status read_rows(struct sweep *sweep, bool scaled)
{
    for (size_t row = 0; row < sweep->table.rows; row++) {
        struct run run;
        enum status status = read_row(sweep, row, scaled, &run);
        if (status != STATUS_OK)
            free_run(&run);
        TRY(status);
        TRY(add_run(sweep, &run));
        const struct run *last = &sweep->runs[sweep->count - 1], *first = find_run(sweep, last, scaled);
        if (!scaled && first != last)
            return refuse(sweep, last->line, "the same task as line %zu", first->line);
    }
    return STATUS_OK;
}

/* ---- --scale ---- */

static enum status add_scaled_run(struct sweep *to, const struct run *row, uint64_t ranks,
                                  const char *scaling)
{
    struct run run = {.line = row->line, .ranks = ranks};
    bool added = true;
    for (size_t i = 0; added && i < row->count; i++)
        added = add_option(&run, row->options[i] + 2, NULL);
    if (added && (!scaling || add_option(&run, "scaling", scaling)))
        return add_run(to, &run);
    free_run(&run);
    return out_of_memory(to);
}

static enum status add_doubled_runs(struct sweep *to, const struct run *row, uint64_t most,
                                    const char *scaling)
{
    for (uint64_t ranks = 2; ranks < most; ranks *= 2)
        TRY(add_scaled_run(to, row, ranks, scaling));
    return most > 1 ? add_scaled_run(to, row, most, scaling) : STATUS_OK;
}

/* Returns the kind of scaling that a row asks for in the case of `row`, or NULL: if it is of another case, or
 * of one rank, which is the baseline of every kind. */
static const char *kind_of(const struct run *other, const struct run *row)
{
    if (strcmp(other->command, row->command) != 0 || (!other->scaling && other->ranks == 1))
        return NULL;
    return other->scaling ? other->scaling : "weak";
}

/* Adds the runs of one case: the rows that differ from `row`, the first of them, only in ranks and scaling.
 */
static enum status add_case(const struct sweep *from, const struct run *row, uint64_t most, struct sweep *to)
{
    size_t kinds = 0;
    TRY(add_scaled_run(to, row, 1, NULL));
    for (const struct run *other = row; other < from->runs + from->count; other++) {
        const char *kind = kind_of(other, row), *earlier = NULL;
        for (const struct run *before = row; kind && !earlier && before < other; before++)
            earlier = kind_of(before, row) && strcmp(kind_of(before, row), kind) == 0 ? kind : NULL;
        if (!kind || earlier)
            continue;
        TRY(add_doubled_runs(to, row, most, kind));
        kinds++;
    }
    return kinds > 0 ? STATUS_OK : add_doubled_runs(to, row, most, "weak");
}

/* Replaces the runs by the cases of the table, each on 1, 2, 4, ... and `most` ranks. */
static enum status scale_runs(struct sweep *sweep, uint64_t most)
{
    struct sweep scaled = *sweep;
    scaled.runs = NULL;
    scaled.count = 0;
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < sweep->count; i++)
        if (find_run(sweep, &sweep->runs[i], true) == &sweep->runs[i])
            status = add_case(sweep, &sweep->runs[i], most, &scaled);
    free_runs(sweep);
    *sweep = scaled;
    return status;
}

static enum status read_table(struct sweep *sweep, uint64_t most)
{
    struct table *table = &sweep->table;
    if (on_command_line(sweep, "ranks"))
        return status_set(STATUS_USAGE, "--ranks does not apply to --table: ranks is a column of the table");
    if (table_read_by_hand(sweep->path, table) != STATUS_OK)
        return status_prefix(STATUS_USAGE, "--table");
    for (size_t i = 0; i < table->columns; i++)
        TRY(check_column(sweep, i, table->header_line));
    if (table->rows == 0)
        return status_set(STATUS_USAGE, "%s: no tasks; give a line of option names, then one line per task",
                          sweep->path);
    TRY(read_rows(sweep, most > 0));
    return most > 0 ? scale_runs(sweep, most) : STATUS_OK;
}

/* ---- Checking ---- */

/* Performs a run, or checks it as with --dry-run. The command line's own options come after those of the row.
 */
static enum status perform_run(const struct sweep *sweep, const struct run *run, bool check, int *exit_status)
{
    char dry_run[] = "--dry-run", ranks[32];
    FREED char **arguments = calloc(run->count + (size_t)sweep->argc + 3, sizeof *arguments);
    TRY(ALLOCATED(arguments, "out of memory for the options"));
    int count = 0;
    arguments[count++] = sweep->argv[0];
    if (check) {
        snprintf(ranks, sizeof ranks, "--ranks=%llu", (unsigned long long)run->ranks);
        arguments[count++] = dry_run;
        arguments[count++] = ranks;
    }
    for (size_t i = 0; i < run->count; i++)
        arguments[count++] = run->options[i];
    for (int i = 1; i < sweep->argc; i++)
        arguments[count++] = sweep->argv[i];
    enum status status = sweep->perform(count, arguments, exit_status);
    return status == STATUS_OK || (check && status == STATUS_UNAVAILABLE)
               ? status
               : status_prefix(status, "%s, line %zu", sweep->path, run->line);
}

static void write_header(FILE *stream, int format)
{
    if (format == FORMAT_CSV)
        fputs("task,line,ranks,status,reason,command,option\n", stream);
}

/* Writes a line about a run. `reason` says why it cannot run here, or what is wrong with it, and `option`
 * names the option or file at fault; both are "" if `status` is STATUS_OK. */
static enum status write_answer(FILE *stream, const struct sweep *sweep, size_t number, enum status status,
                                const char *reason, const char *option)
{
    const struct run *run = &sweep->runs[number - 1];
    unsigned long long ranks = (unsigned long long)run->ranks;
    FREED char *command = describe_command(sweep, run);
    TRY(ALLOCATED(command, "out of memory for the command of a task"));
    if (sweep->settings->format == FORMAT_CSV) {
        fprintf(stream, "%zu,%zu,%llu,%d,", number, run->line, ranks, status_exit(status));
        text_csv_field(stream, reason);
        fputc(',', stream);
        text_csv_field(stream, command);
        fputc(',', stream);
        text_csv_field(stream, option);
        fputc('\n', stream);
        return STATUS_OK;
    }
    fprintf(stream, "task %zu, line %zu", number, run->line);
    if (run->ranks > 1)
        fprintf(stream, ", %llu ranks", ranks);
    fprintf(stream, "%s%s: %s\n", status == STATUS_OK ? "" : ", cannot run here: ", reason, command);
    return STATUS_OK;
}

/* Checks a run, and writes its line to `answers`. The caller has directed stdout to /dev/null and stderr to
 * `said`. On an error, prints the messages of the run to descriptor `errors` and returns its status. */
static enum status check_run(const struct sweep *sweep, size_t number, FILE *answers, FILE *said, int errors)
{
    static char messages[4096]; /* static: a small stack must suffice for a run */
    int exit_status;
    rewind(said);
    if (ftruncate(fileno(said), 0) != 0)
        return status_set(STATUS_FAILED, "--table: %s", strerror(errno));
    enum status status = perform_run(sweep, &sweep->runs[number - 1], true, &exit_status);
    struct failure failure = status_save(status);
    bool wrong = status != STATUS_OK && status != STATUS_UNAVAILABLE;
    rewind(said);
    size_t count = fread(messages, 1, sizeof messages - 1, said);
    messages[count] = '\0';
    if (wrong)
        (void)file_write_all(errors, messages, count);
    for (char *end = messages; (end = strchr(end, '\n'));)
        *end = ' ';
    text_append(messages, sizeof messages, "%s", status == STATUS_OK ? "" : status_text());
    if (!wrong || sweep->settings->format == FORMAT_CSV)
        TRY(write_answer(answers, sweep, number, status, status == STATUS_OK ? "" : messages,
                         status == STATUS_OK || !status_subject() ? "" : status_subject()));
    return wrong ? status_restore(&failure) : STATUS_OK;
}

/* Checks the runs from `first` to `last`; see check_run(). The first error ends the check, but CSV has a line
 * for every run. Then the most severe error is returned, the first of several. */
static enum status check_runs(const struct sweep *sweep, size_t first, size_t last, FILE *answers, FILE *said,
                              int errors)
{
    struct failure worst = {.status = STATUS_OK};
    write_header(answers, sweep->settings->format);
    for (size_t number = first; number <= last; number++) {
        enum status status = check_run(sweep, number, answers, said, errors);
        if (status_severity(status) > status_severity(worst.status))
            worst = status_save(status);
        if (status != STATUS_OK && sweep->settings->format != FORMAT_CSV)
            break;
    }
    return worst.status == STATUS_OK ? STATUS_OK : status_restore(&worst);
}

/* Prints the runs without checking them. */
static enum status list(const struct sweep *sweep, size_t first, size_t last)
{
    write_header(stdout, sweep->settings->format);
    for (size_t number = first; number <= last; number++)
        TRY(write_answer(stdout, sweep, number, STATUS_OK, "", ""));
    return format_flush();
}

static bool redirect(int from, int to)
{
    return fflush(stdout) == 0 && dup2(from, to) >= 0;
}

/* Calls check_runs() with stdout and stderr redirected. `lists`: whether the answers are printed. */
static enum status check(const struct sweep *sweep, size_t first, size_t last, bool lists)
{
    FILE *said = tmpfile();
    int nothing = open("/dev/null", O_WRONLY | O_CLOEXEC), errors = dup(STDERR_FILENO);
    int output = dup(lists ? STDOUT_FILENO : nothing);
    FILE *answers = output < 0 ? NULL : fdopen(output, "w");
    enum status status = STATUS_OK;
    if (!said || !answers || errors < 0 || !redirect(nothing, STDOUT_FILENO) ||
        !redirect(fileno(said), STDERR_FILENO))
        status = status_set(STATUS_FAILED, "--table: %s", strerror(errno));
    else
        status = check_runs(sweep, first, last, answers, said, errors);
    bool wrote = (errors < 0 || redirect(errors, STDERR_FILENO)) && answers && text_close(answers);
    if (status == STATUS_OK && !wrote)
        status = status_set(STATUS_FAILED, "--table: stdout: %s", strerror(errno));
    if (said)
        fclose(said);
    close(errors);
    close(nothing);
    return status;
}

/* ---- Running ---- */

/* Sets `*first` and `*last` to the runs that --task selects, counted from 1. */
static enum status select_runs(const struct sweep *sweep, size_t *first, size_t *last)
{
    const char *task = sweep->settings->task;
    size_t count = sweep->count;
    uint64_t from = 1, to = count;
    if (task) {
        char text[64];
        snprintf(text, sizeof text, "%s", task);
        char *colon = strchr(text, ':');
        if (colon)
            *colon = '\0';
        TRY(parse_count("--task", text, 1, (double)count, &from));
        to = from;
        if (colon)
            TRY(parse_count("--task N:M", colon + 1, (double)from, (double)count, &to));
    }
    *first = (size_t)from;
    *last = (size_t)to;
    return STATUS_OK;
}

/* Checks that this process has the ranks of the run. */
static enum status check_ranks(const struct sweep *sweep, size_t number)
{
    const struct run *run = &sweep->runs[number - 1];
    if (sweep->ranks == 0 || sweep->ranks == run->ranks)
        return STATUS_OK;
    FREED char *text = NULL;
    size_t bytes;
    FILE *stream = open_memstream(&text, &bytes);
    TRY(ALLOCATED(stream, "out of memory"));
    write_arguments(stream, sweep, (const char *const[]){"task", NULL});
    TRY(ALLOCATED(text_close(stream), "out of memory"));
    unsigned long long ranks = (unsigned long long)run->ranks;
    if (strlen(text) > HINT_MAX)
        return status_set(STATUS_UNAVAILABLE,
                          "%s, line %zu: this task needs %llu rank%s: repeat the command with --task %zu "
                          "under mpirun --bind-to none -n %llu",
                          sweep->path, run->line, ranks, ranks == 1 ? "" : "s", number, ranks);
    return status_set(
        STATUS_UNAVAILABLE,
        "%s, line %zu: this task needs %llu rank%s: mpirun --bind-to none -n %llu fdsl-bench%s --task %zu",
        sweep->path, run->line, ranks, ranks == 1 ? "" : "s", ranks, text, number);
}

/* Returns the value of an option in a run, or `fallback` if the run does not have the option. */
static const char *option_value(const struct run *run, const char *name, const char *fallback)
{
    size_t length = strlen(name);
    for (size_t i = 0; i < run->count; i++) {
        const char *option = run->options[i] + 2;
        if (strncmp(option, name, length) == 0 && option[length] == '=')
            return option + length + 1;
    }
    return fallback;
}

/* Returns the workload of a run, or NULL if its options are wrong; check() then reports the error. */
static const struct workload *workload_of(const struct sweep *sweep, const struct run *run)
{
    const struct variant_entry **variants = NULL;
    size_t count = 0;
    const char *names = option_value(run, "variant", sweep->settings->variant_names);
    const char *workload = option_value(run, "workload", sweep->settings->workload_name);
    bool found = names && variant_select(names, workload, &variants, &count) == STATUS_OK && count > 0;
    const struct workload *result = found ? workload_find(variants[0]->workload) : NULL;
    free(variants);
    return result;
}

/* Refuses one file for the rows of several workloads, because their columns differ. */
static enum status check_one_workload(const struct sweep *sweep, size_t first, size_t last)
{
    const char *option = sweep->settings->out ? "out" : sweep->settings->samples ? "samples-out" : NULL;
    const struct workload *workload = NULL;
    size_t line = 0;
    for (size_t number = first; option && number <= last; number++) {
        const struct run *run = &sweep->runs[number - 1];
        const struct workload *other = workload_of(sweep, run);
        if (workload && other && other != workload)
            return refuse(sweep, run->line,
                          "the workload is %s, in line %zu it is %s, and one file of --%s cannot hold the "
                          "rows of both; use one table per workload, or --task N:M with another file",
                          other->name, line, workload->name, option);
        if (!workload)
            line = run->line;
        workload = workload ? workload : other;
    }
    return STATUS_OK;
}

/* ---- Processes ---- */

/* The process of the current run, for run_all(). */
struct process {
    pid_t pid;
    int output; /* the process's stdout, if it prints CSV; otherwise -1 */
    char *line; /* owned: the first line of this output, as far as it was read; NULL after it */
    size_t length;
    char *header;      /* owned: the latest header that was printed; NULL: none */
    int signal_number; /* a signal that this process got while it waited; 0: none */
};

/* The signals that end a sweep, except those that are ignored, and SIGCHLD. */
static void signals_awaited(sigset_t *set)
{
    static const int ending[] = {SIGHUP, SIGINT, SIGTERM};
    sigemptyset(set);
    sigaddset(set, SIGCHLD);
    for (size_t i = 0; i < COUNT_OF(ending); i++) {
        struct sigaction action;
        if (sigaction(ending[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(set, ending[i]);
    }
}

/* Prints bytes of a run's CSV. Leaves out the first line if it is the header that was printed before. */
static void pass_on(struct process *process, const char *bytes, size_t count)
{
    const char *end = process->length == SIZE_MAX ? NULL : memchr(bytes, '\n', count);
    size_t head = process->length == SIZE_MAX ? 0 : end ? (size_t)(end - bytes) + 1 : count;
    char *line = head > 0 ? realloc(process->line, process->length + head + 1) : NULL;
    if (line) {
        memcpy(line + process->length, bytes, head);
        process->length += head;
        line[process->length] = '\0';
        process->line = line;
    } else {
        head = 0; /* print all bytes; also if memory runs out */
    }
    if (line && end) {
        if (process->header && strcmp(process->header, line) == 0) {
            free(line);
        } else {
            fputs(line, stdout);
            free(process->header);
            process->header = line;
        }
        process->line = NULL;
        process->length = SIZE_MAX;
    }
    if (!line || end)
        fwrite(bytes + head, 1, count - head, stdout);
    fflush(stdout);
}

/* Reads the output that is there. At its end, closes it. */
static void read_output(struct process *process)
{
    char bytes[4096];
    ssize_t count;
    while ((count = read(process->output, bytes, sizeof bytes)) > 0)
        pass_on(process, bytes, (size_t)count);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    close(process->output);
    process->output = -1;
}

/* Waits until the process ends, and passes its output and signals on. The awaited signals are blocked, and
 * `notices` is a signalfd for them. Returns the status as of waitpid(). */
static int await(struct process *process, int notices)
{
    int ended = 0;
    while (waitpid(process->pid, &ended, WNOHANG) == 0) {
        struct pollfd ready[] = {{.fd = notices, .events = POLLIN},
                                 {.fd = process->output, .events = POLLIN}};
        struct signalfd_siginfo notice;
        if (poll(ready, COUNT_OF(ready), -1) < 0 && errno != EINTR)
            continue;
        if (ready[1].revents)
            read_output(process);
        if ((ready[0].revents & POLLIN) && read(notices, &notice, sizeof notice) == sizeof notice &&
            notice.ssi_signo != SIGCHLD) {
            process->signal_number = (int)notice.ssi_signo;
            kill(process->pid, process->signal_number);
        }
    }
    if (process->output >= 0)
        read_output(process);
    if (process->output >= 0)
        close(process->output);
    if (process->line) /* a line without an end */
        fputs(process->line, stdout);
    free(process->line);
    process->line = NULL;
    return ended;
}

/* Performs a run, or checks the runs from `first` to `last` if `number` is 0, in a child process. */
static void be_child(const struct sweep *sweep, size_t number, size_t first, size_t last)
{
    int exit_status = 0;
    file_say_on_signal("%s", "");
    enum status status = number == 0 ? check(sweep, first, last, false)
                                     : perform_run(sweep, &sweep->runs[number - 1], false, &exit_status);
    if (status != STATUS_OK)
        status_print();
    if (fflush(stdout) != 0 && status == STATUS_OK)
        status = STATUS_FAILED;
    _exit(status_exit(status));
}

/* Calls be_child() in a new process, so that no run inherits the state of another one. Returns its status.
 * The process ends when this process ends. A signal that ends this process is passed on to it first. */
static enum status in_child(const struct sweep *sweep, size_t number, size_t first, size_t last,
                            struct process *process)
{
    bool csv = number > 0 && sweep->settings->format == FORMAT_CSV;
    int ends[2] = {-1, -1};
    sigset_t awaited, before;
    pid_t parent = getpid();
    signals_awaited(&awaited);
    int notices = signalfd(-1, &awaited, SFD_CLOEXEC);
    if (notices < 0 || (csv && pipe2(ends, O_CLOEXEC) != 0))
        return status_set(STATUS_FAILED, "--table: no process can be started: %s", strerror(errno));
    fflush(NULL);
    sigprocmask(SIG_BLOCK, &awaited, &before);
    process->pid = fork();
    if (process->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != parent || (csv && dup2(ends[1], STDOUT_FILENO) < 0))
            _exit(STATUS_FAILED);
        sigprocmask(SIG_SETMASK, &before, NULL);
        be_child(sweep, number, first, last);
    }
    int cause = errno, ended = 0;
    if (csv)
        close(ends[1]);
    process->output = ends[0];
    process->length = 0;
    if (csv)
        (void)fcntl(ends[0], F_SETFL, O_NONBLOCK);
    if (process->pid > 0)
        ended = await(process, notices);
    else if (csv)
        close(ends[0]);
    close(notices);
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (process->signal_number)
        raise(process->signal_number); /* ends this process, with the message of file_say_on_signal() */
    if (process->pid < 0)
        return status_set(STATUS_FAILED, "--table: no process can be started: %s", strerror(cause));
    if (WIFEXITED(ended))
        return (enum status)WEXITSTATUS(ended);
    char line[32] = "";
    if (number > 0)
        snprintf(line, sizeof line, ", line %zu", sweep->runs[number - 1].line);
    enum status status =
        status_set(STATUS_FAILED, "%s%s: %s was ended by signal %d (%s)", sweep->path, line,
                   number > 0 ? "the task" : "the check", WTERMSIG(ended), strsignal(WTERMSIG(ended)));
    status_print();
    return status;
}

/* Sets the message that is printed if a signal ends the sweep during run `number`. */
static void prepare_farewell(const struct sweep *sweep, size_t number, size_t first, size_t last,
                             size_t failed)
{
    char which[64], failures[64] = "";
    snprintf(which, sizeof which, number < last ? "%zu:%zu" : "%zu", number, last);
    if (failed > 0)
        snprintf(failures, sizeof failures, " (%zu failed)", failed);
    file_say_on_signal("%zu of %zu tasks are done%s; continue with --task %s: task %zu (line %zu) starts "
                       "again from its beginning",
                       number - first, last - first + 1, failures, which, number,
                       sweep->runs[number - 1].line);
}

static enum status run_all(const struct sweep *sweep, size_t first, size_t last)
{
    struct process process = {.output = -1};
    enum status worst = in_child(sweep, 0, first, last, &process);
    if (worst != STATUS_OK)
        return status_set(worst, "%s: nothing was run", sweep->path);
    size_t failed = 0;
    for (size_t number = first; number <= last; number++) {
        prepare_farewell(sweep, number, first, last, failed);
        enum status status = check_ranks(sweep, number);
        if (status != STATUS_OK)
            status_print();
        else
            status = in_child(sweep, number, first, last, &process);
        failed += status != STATUS_OK;
        if (status_severity(status) > status_severity(worst))
            worst = status;
    }
    file_say_on_signal("%s", "");
    free(process.header);
    return worst == STATUS_OK
               ? STATUS_OK
               : status_set(worst, "%s: %zu of %zu tasks failed", sweep->path, failed, last - first + 1);
}

enum status sweep_run(const struct settings *settings, uint64_t ranks, int argc, char *argv[],
                      sweep_perform *perform, int *exit_status)
{
    struct sweep sweep = {.settings = settings,
                          .ranks = ranks,
                          .argc = argc,
                          .argv = argv,
                          .perform = perform,
                          .path = settings->table};
    size_t first = 0, last = 0;
    enum status status = read_table(&sweep, settings->scale);
    if (status == STATUS_OK)
        status = select_runs(&sweep, &first, &last);
    bool lists = settings->list || settings->dry_run;
    if (status == STATUS_OK && !settings->list)
        status = check_one_workload(&sweep, first, last);
    if (status == STATUS_OK && settings->format == FORMAT_JSON && lists)
        status = status_set(STATUS_USAGE, "--table: tasks are listed as a table or as CSV; use --format csv");
    if (status == STATUS_OK && settings->format == FORMAT_JSON && first < last && !lists)
        status = status_set(STATUS_USAGE, "--table: several tasks would print several JSON documents; use "
                                          "--format csv, or --out FILE for their rows");
    if (status == STATUS_OK && (lists ? ranks > 1 : ranks != 1 && first < last)) /* 0: unknown */
        status = status_set(STATUS_USAGE, "--table: a launcher starts one task; name it with --task N");
    if (status != STATUS_OK)
        ;
    else if (settings->list)
        status = list(&sweep, first, last);
    else if (settings->dry_run)
        status = check(&sweep, first, last, true);
    else if (first < last)
        status = run_all(&sweep, first, last);
    else if ((status = check_ranks(&sweep, first)) == STATUS_OK)
        status = perform_run(&sweep, &sweep.runs[first - 1], false, exit_status);
    free_runs(&sweep);
    table_free(&sweep.table);
    return status;
}
