#include "run/sweep.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "run/formats.h"

#define OPTIONS_MAX 512 /* more options than the program has */

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
    sweep_perform *perform; /* performs a run */
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
    return status_set(STATUS_EXHAUSTED, "%s: out of memory for its runs", sweep->path);
}

/* ---- Runs ---- */

/* Writes a word so that a shell reads it as it is. */
static void write_quoted(FILE *stream, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+,./:@%";
    if (strspn(word, plain) == strlen(word)) {
        fprintf(stream, " %s", word);
        return;
    }
    fputs(" '", stream);
    for (; *word; word++)
        *word == '\'' ? (void)fputs("'\\''", stream) : (void)fputc(*word, stream);
    fputc('\'', stream);
}

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
        write_quoted(stream, run->options[i]);
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

/* ---- The table ---- */

/* Returns whether a run may have the option. All runs would write to one file if an option named a file that
 * the program writes. An INI file may contain any option, and some options run nothing. */
static bool is_allowed(const struct option_spec *spec)
{
    static const char *const inputs[] = {"checkpoint", "class", "data", "init", "preset-file", NULL};
    static const char *const refused[] = {"dry-run", "list",    "env",  "verbose", "version",
                                          "help",    "prepare", "task", "scale",   NULL};
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
        return refuse(sweep, line, "column '%s' cannot be used in a table of runs", name);
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
            return refuse(sweep, last->line, "the same run as line %zu", first->line);
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
    if (table_read_by_hand(sweep->path, table) != STATUS_OK)
        return status_prefix(STATUS_USAGE, "--table");
    for (size_t i = 0; i < table->columns; i++)
        TRY(check_column(sweep, i, table->header_line));
    if (table->rows == 0)
        return status_set(STATUS_USAGE, "%s: no runs; give a line of option names, then one line per run",
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
        fputs("run,line,ranks,status,reason,command\n", stream);
}

/* Writes a line about a run. `reason` says why it cannot run here, if `status` is STATUS_UNAVAILABLE. */
static void write_answer(FILE *stream, int format, size_t number, const struct run *run, enum status status,
                         const char *reason)
{
    if (format == FORMAT_CSV) {
        fprintf(stream, "%zu,%zu,%llu,%d,", number, run->line, (unsigned long long)run->ranks, (int)status);
        text_csv_field(stream, reason);
        fputc(',', stream);
        text_csv_field(stream, run->command);
        fputc('\n', stream);
        return;
    }
    fprintf(stream, "run %zu, line %zu", number, run->line);
    if (run->ranks > 1)
        fprintf(stream, ", %llu ranks", (unsigned long long)run->ranks);
    fprintf(stream, "%s%s: %s\n", status == STATUS_OK ? "" : ", cannot run here: ", reason, run->command);
}

/* Checks the runs from `first` to `last`. The caller has directed stdout to /dev/null and stderr to `said`.
 * Writes one line for each run to `answers`. On an error, prints the messages of that run to descriptor
 * `errors`. */
static enum status check_runs(const struct sweep *sweep, size_t first, size_t last, FILE *answers, FILE *said,
                              int errors)
{
    static char messages[4096]; /* static: a small stack must suffice for a run */
    write_header(answers, sweep->settings->format);
    for (size_t number = first; number <= last; number++) {
        const struct run *run = &sweep->runs[number - 1];
        int exit_status;
        rewind(said);
        if (ftruncate(fileno(said), 0) != 0)
            return status_set(STATUS_FAILED, "--table: %s", strerror(errno));
        enum status status = perform_run(sweep, run, true, &exit_status);
        rewind(said);
        size_t count = fread(messages, 1, sizeof messages - 1, said);
        messages[count] = '\0';
        if (status != STATUS_OK && status != STATUS_UNAVAILABLE) {
            (void)file_write_all(errors, messages, count);
            return status;
        }
        for (char *end = messages; (end = strchr(end, '\n'));)
            *end = ' ';
        text_append(messages, sizeof messages, "%s", status == STATUS_OK ? "" : status_text());
        write_answer(answers, sweep->settings->format, number, run, status,
                     status == STATUS_OK ? "" : messages);
    }
    return STATUS_OK;
}

/* Prints the runs without checking them. */
static enum status list(const struct sweep *sweep, size_t first, size_t last)
{
    write_header(stdout, sweep->settings->format);
    for (size_t number = first; number <= last; number++)
        write_answer(stdout, sweep->settings->format, number, &sweep->runs[number - 1], STATUS_OK, "");
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
            TRY(parse_count("--task A:B", colon + 1, (double)from, (double)count, &to));
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
    return status_set(
        STATUS_UNAVAILABLE,
        "%s, line %zu: this run needs ranks (%llu): mpirun --bind-to none -n %llu fdsl-bench --table %s "
        "--task %zu",
        sweep->path, run->line, (unsigned long long)run->ranks, (unsigned long long)run->ranks, sweep->path,
        number);
}

/* Calls `check` or performs a run in a process of its own, so that no run inherits the state of another one.
 * Returns its status. The child ends when this process ends. */
static enum status in_child(const struct sweep *sweep, size_t number)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0)
        return status_set(STATUS_FAILED, "--table: no process can be started: %s", strerror(errno));
    if (pid == 0) {
        int exit_status = 0;
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        enum status status = number == 0 ? check(sweep, 1, sweep->count, false)
                                         : perform_run(sweep, &sweep->runs[number - 1], false, &exit_status);
        if (status != STATUS_OK)
            status_print();
        if (fflush(stdout) != 0 && status == STATUS_OK)
            status = STATUS_FAILED;
        _exit(status_exit(status));
    }
    int ended;
    pid_t waited;
    while ((waited = waitpid(pid, &ended, 0)) < 0 && errno == EINTR)
        ;
    return waited == pid && WIFEXITED(ended) ? (enum status)WEXITSTATUS(ended) : STATUS_FAILED;
}

static enum status run_all(const struct sweep *sweep, size_t first, size_t last)
{
    enum status worst = in_child(sweep, 0);
    if (worst != STATUS_OK)
        return status_set(worst, "%s: nothing was run", sweep->path);
    size_t failed = 0;
    for (size_t number = first; number <= last; number++) {
        enum status status = check_ranks(sweep, number);
        if (status != STATUS_OK)
            status_print();
        else
            status = in_child(sweep, number);
        failed += status != STATUS_OK;
        if (status_severity(status) > status_severity(worst))
            worst = status;
    }
    return worst == STATUS_OK
               ? STATUS_OK
               : status_set(worst, "%s: %zu of %zu runs failed", sweep->path, failed, last - first + 1);
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
    if (status == STATUS_OK && settings->format == FORMAT_JSON && lists)
        status = status_set(STATUS_USAGE, "--table: runs are listed as a table or as CSV; use --format csv");
    if (status == STATUS_OK && (lists ? ranks > 1 : ranks != 1 && first < last)) /* 0: unknown */
        status = status_set(STATUS_USAGE, "--table: a launcher starts one run; name it with --task N");
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
