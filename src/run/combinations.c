/* Runs every combination of the values in lists and ranges. */
#include "run/runner.h"

#include <stdio.h>
#include <string.h>

#include "core/file.h"
#include "machine/comm.h"
#include "run/ranks.h"
#include "run/report.h"

#define TEXT_BYTES 512 /* for a combination as text: "--res 224 --batch 8" */

/* The state of a sweep. */
struct sweep {
    size_t count, failed; /* number of combinations, and how many of them have failed so far */
    enum status worst;
    struct failure failure; /* of the latest combination; STATUS_OK if it succeeded */
    size_t repeated; /* number of later combinations with the same failure, which is printed only once */
};

/* Prints how many further combinations failed with the latest printed message, and forgets the message. */
static void end_repetition(struct sweep *sweep)
{
    if (sweep->repeated > 0)
        status_say("the next %zu combination%s failed in the same way", sweep->repeated,
                   sweep->repeated == 1 ? "" : "s");
    sweep->repeated = 0;
    sweep->failure.status = STATUS_OK;
}

/* Counts a failure, and prints it unless it repeats the previous one. */
static void add_failure(struct sweep *sweep, enum status status, const char *combination)
{
    if (status_repeats(status, &sweep->failure))
        sweep->repeated++;
    else {
        end_repetition(sweep);
        sweep->failure = status_save(status);
        status_set_context(combination);
        status_print();
        status_set_context("");
    }
    sweep->failed++;
    if (status_severity(status) > status_severity(sweep->worst))
        sweep->worst = status;
}

/* Sets the message that is printed if a signal ends the program while combination `number` runs. `text` has
 * the options of the combination. */
static void prepare_farewell(const struct settings *settings, const struct sweep *sweep, size_t number,
                             const char *text)
{
    char done[64], rest[TEXT_BYTES];
    if (comm_rank() != 0)
        return;
    snprintf(done, sizeof done, "%zu of %zu combinations are done", number, sweep->count);
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
 * example a full disk or a broken device, ends the sweep; any other failure is printed and counted. */
static enum status run_one(struct settings *settings, size_t number, struct sweep *sweep,
                           struct report **report)
{
    char text[TEXT_BYTES];
    TRY(comm_agree(settings_combine(settings, number)));
    axes_describe(&settings->axes, number, text, sizeof text);
    prepare_farewell(settings, sweep, number, text);
    status_set_context(text);
    enum status status = runner_combination(settings, report);
    status_set_context("");
    if (status_exit(status) == STATUS_FAILED)
        return status_prefix(status, "%s: combination %zu of %zu", text, number + 1, sweep->count);
    if (status != STATUS_OK) {
        add_failure(sweep, status, text);
        return STATUS_OK;
    }
    end_repetition(sweep);
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
    struct sweep sweep = {.count = count};
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < count; i++)
        status = run_one(settings, i, &sweep, report);
    end_repetition(&sweep);
    file_say_on_signal("%s", "");
    if (status == STATUS_OK && sweep.failed > 0)
        status = status_set(sweep.worst, "%zu of %zu combinations failed", sweep.failed, count);
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
