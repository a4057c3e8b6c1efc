/* fdsl-bench: parse, select, run, report. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/options.h"
#include "core/file.h"
#include "core/parallel.h"
#include "core/status.h"
#include "core/variant.h"
#include "core/text.h"
#include "machine/comm.h"
#include "run/advise.h"
#include "run/compare.h"
#include "run/report.h"
#include "run/rows.h"
#include "run/runner.h"
#include "run/settings.h"
#include "data/prepare.h"

#ifndef FDSL_VERSION
#define FDSL_VERSION "unknown"
#endif

/* Commands such as `fdsl-bench compare`. They run on one rank and have their own options. Their argv[0] is
 * the name of the command. */
static const struct command {
    const char *name;
    enum status (*run)(int argc, char *argv[]);
} commands[] = {{"advise", advise_run}, {"compare", compare_run}, {"verify-published", verify_published_run}};

/* Returns the command whose name equals or resembles a word; NULL if there is none. */
static const struct command *find_command(const char *word)
{
    const char *names[COUNT_OF(commands)];
    for (size_t i = 0; i < COUNT_OF(commands); i++)
        names[i] = commands[i].name;
    const bool other = !word || word[0] == '-' || settings_has_option(word);
    const char *nearest = other ? NULL : nearest_word(word, names, COUNT_OF(commands));
    for (size_t i = 0; nearest && i < COUNT_OF(commands); i++)
        if (strcmp(nearest, commands[i].name) == 0)
            return &commands[i];
    return NULL;
}

/* Makes `--help NAME` the same as `NAME --help`, if NAME is a command. */
static void put_command_first(int argc, char *argv[])
{
    if (argc != 3 || (strcmp(argv[1], "--help") != 0 && strcmp(argv[1], "-h") != 0))
        return;
    for (size_t i = 0; i < COUNT_OF(commands); i++)
        if (strcmp(argv[2], commands[i].name) == 0) {
            char *help = argv[1];
            argv[1] = argv[2];
            argv[2] = help;
            return;
        }
}

static enum status suggest_command(const char *word, const struct command *command)
{
    return status_set(STATUS_USAGE, "unknown command '%.80s'; did you mean '%s'?", word, command->name);
}

static enum status run_command(const struct command *command, int argc, char *argv[])
{
    return strcmp(argv[0], command->name) == 0 ? command->run(argc, argv) : suggest_command(argv[0], command);
}

/* Writes the file or the report of a member of workload->alone. */
static enum status write_alone(struct settings *settings, const struct workload_alone *alone)
{
    const struct workload *workload = settings->workload;
    const struct partition partition = {.ranks = 1};
    void *input = NULL;
    settings_take_threads(settings);
    enum status status = workload->open(&settings->options, settings->parameters, &partition, &input);
    if (status == STATUS_OK)
        status = alone->write(input);
    if (input)
        workload->close(input);
    return status;
}

/* Performs --help, --version, --list, --columns, --env, --verify-set or a member of workload->alone. These
 * need no variant and no other ranks. */
static enum status inform(struct settings *settings)
{
    if (settings->help && settings->prepare) {
        prepare_help(stdout);
        return STATUS_OK;
    }
    if (settings->help) {
        const enum status status = settings_help(settings, stdout);
        const struct command *command = status == STATUS_USAGE ? find_command(settings->topic) : NULL;
        return command ? suggest_command(settings->topic, command) : status;
    }
    if (settings->version) {
        puts("fdsl-bench " FDSL_VERSION);
        return STATUS_OK;
    }
    if (settings->verify_set)
        return verify_set_run(settings->verify_set);
    const struct workload_alone *alone = settings_alone(settings);
    if (alone)
        return write_alone(settings, alone);
    if (settings->columns)
        return columns_print(settings->workload_name || settings->variant_names ? settings->workload : NULL,
                             settings->format);
    struct resources resources = {.threads = 1, .device = (int)settings->device};
    if (settings->list)
        return report_list(&resources, settings);
    return report_env((int)settings->device, settings->format);
}

/* Performs the action that the options request. `read` is the status of parsing the options. A rank reports
 * an invalid command line (`read`) only after all ranks have joined, except with a command after "--". */
static enum status dispatch(struct settings *settings, enum status read, const struct config *config,
                            int *exit_status)
{
    if (read == STATUS_OK && settings_informational(settings))
        return launcher_rank() == 0 ? inform(settings) : STATUS_OK;
    if (config->command)
        return read == STATUS_OK ? command_run(settings, launcher_rank(), exit_status) : read;
    TRY(runner_join(settings, read));
    return settings->prepare ? prepare_run(config, settings_has_option) : runner_run(settings);
}

/* Returns the number of ranks that a launcher started: 1 without a launcher, 0 if unknown. */
static uint64_t launched_ranks(void)
{
    struct launcher launcher;
    return launcher_find(&launcher) ? (uint64_t)launcher.ranks : 1;
}

/* Parses the options and performs the action that they request. `is_row`: whether the arguments are a row of
 * --table and the options for all rows. */
static enum status perform(int argc, char *argv[], bool is_row, int *exit_status);
static enum status perform_row(int argc, char *argv[], int *exit_status)
{
    return perform(argc, argv, true, exit_status);
}

static enum status perform(int argc, char *argv[], bool is_row, int *exit_status)
{
    FREED struct settings *settings = calloc(1, sizeof *settings); /* too large for a small stack */
    struct config config = {0};
    TRY(ALLOCATED(settings, "out of memory for the options"));
    enum status status = config_read(argc, argv, &config);
    config.is_row = is_row;
    if (status == STATUS_OK)
        status = settings_read(settings, &config);
    if (status == STATUS_OK && !is_row && settings->table && !settings_informational(settings))
        status = sweep_run(settings, launched_ranks(), argc, argv, perform_row, exit_status);
    else
        status = dispatch(settings, status, &config, exit_status);
    settings_free(settings);
    config_free(&config);
    return status;
}

/* Prints the error, if there is one, and flushes stdout. Returns the exit status. Called before comm_close(),
 * because the launcher ends all ranks when the first one fails. A rank that has not joined the others sleeps
 * before it prints. If rank 0 has the same error, rank 0 prints it, and the launcher ends the other ranks
 * before they print it too. */
static enum status conclude(enum status status)
{
    if (status != STATUS_OK && comm_size() == 1)
        launcher_let_rank_0_print();
    if (status != STATUS_OK)
        status_print();
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == STATUS_OK) {
        perror("fdsl-bench: stdout");
        status = STATUS_FAILED;
    }
    return status;
}

int main(int argc, char *argv[])
{
    signal(SIGXFSZ, SIG_IGN); /* at the file-size limit, write() fails instead of ending the program */
    file_remove_on_signals();
    struct launcher launcher;
    if (launcher_find(&launcher))
        status_launched((int)launcher.rank, (int)launcher.ranks);
    put_command_first(argc, argv);
    const struct command *command = find_command(argc > 1 ? argv[1] : NULL);
    if (command && launcher_rank() > 0)
        return 0;
    if (command) {
        launcher_forget();
        return status_exit(conclude(run_command(command, argc - 1, argv + 1)));
    }
    enum status status = variant_table_check();
    int exit_status = 0; /* exit status of the command after "--"; 0 without a command */
    if (status == STATUS_OK)
        status = perform(argc, argv, false, &exit_status);
    bool joined = comm_size() > 1;
    status = conclude(status);
    comm_close();
    if (status != STATUS_OK && joined)
        launcher_let_rank_0_print();
    return exit_status ? exit_status : status_exit(status);
}
