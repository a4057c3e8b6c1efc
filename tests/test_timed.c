/* Tests variants whose timed runs are wrong although the runs before the timing are correct. --verify checks
 * timed runs, so wrong runs and epochs must not get a row. */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include <string.h>

#include "core/phase.h"
#include "run/runner.h"
#include "run/settings.h"
#include "folder.h"

static char folder[] = "/tmp/fdsl-timed-XXXXXX", program[PATH_MAX];

static void start(void)
{
    find_program(program);
    enter_folder(folder);
    cr_redirect_stdout();
    cr_redirect_stderr();
}

static void stop(void)
{
    leave_folder(folder);
}

TestSuite(timed, .init = start, .fini = stop, .timeout = 120);

/* ---- Faults ---- */

static const struct variant *real; /* the correct variant */
static uint64_t calls;

/* Performs only runs 0 and 1. */
static enum status first_two(void *state, uint64_t number, struct run_time *time)
{
    return number >= 2 ? STATUS_OK : real->run(state, number, time);
}

/* Performs only runs that are not timed. */
static enum status unless_timed(void *state, uint64_t number, struct run_time *time)
{
    return phase_now() == PHASE_TIMED ? STATUS_OK : real->run(state, number, time);
}

/* From run 2 on, performs run number - 1 in place of run `number`. */
static enum status late_by_one(void *state, uint64_t number, struct run_time *time)
{
    return real->run(state, number >= 2 ? number - 1 : number, time);
}

/* Two warm-ups and 13 timed runs; the last run is number 15. */
#define RUNS " --warmups 2 --warmup-time 0 --loops 13 "
#define LAST 15

/* From run 2 on, performs run number + 1 in place of run `number`, except for the last run. So only the run
 * that --verify draws at random shows the fault, whichever run it draws. */
static enum status early_unless_last(void *state, uint64_t number, struct run_time *time)
{
    return real->run(state, number >= 2 && number != LAST ? number + 1 : number, time);
}

/* Performs only the first call. In training, all epochs have the same run number. */
static enum status once(void *state, uint64_t number, struct run_time *time)
{
    return calls++ > 0 ? STATUS_OK : real->run(state, number, time);
}

typedef enum status faulty_run(void *state, uint64_t number, struct run_time *time);

/* ---- Running ---- */

static bool file_has_rows(const char *path)
{
    int lines = 0;
    FILE *file = fopen(path, "r");
    for (int c; file && (c = getc(file)) != EOF;)
        lines += c == '\n';
    if (file)
        fclose(file);
    return lines > 1;
}

static enum status run_words(const char *arguments, const char *variant_name, faulty_run *fault)
{
    static char text[2048];
    char *argv[64] = {(char *)"fdsl-bench"}, *rest = text;
    int argc = 1;
    struct settings settings;
    snprintf(text, sizeof text, "--variant %s --verify --out rows.csv %s", variant_name, arguments);
    for (char *word; (word = strsep(&rest, " "));)
        if (*word)
            argv[argc++] = word;
    enum status status = settings_read(&settings, &(struct config){.argc = argc, .argv = argv});
    cr_assert_eq(status, STATUS_OK, "%s", status_text());
    real = settings.variants[0]->variant;
    struct variant faulty = *real;
    if (fault)
        faulty.run = fault;
    struct variant_entry entry = *settings.variants[0];
    entry.variant = &faulty;
    const struct variant_entry *one[] = {&entry}, **own = settings.variants;
    settings.variants = one;
    calls = 0;
    unlink("rows.csv");
    status = runner_run(&settings);
    settings.variants = own;
    settings_free(&settings);
    return status;
}

static bool available(const char *name)
{
    const struct resources resources = {.threads = 2};
    return variant_available(variant_find(name), &resources) == STATUS_OK;
}

/* Expects the variant to pass without the fault. With the fault, expects wrong results, a message with
 * `words`, and no row. */
static void expect_caught(const char *name, const char *arguments, faulty_run *fault, const char *words)
{
    if (!available(name))
        return;
    cr_assert_eq(run_words(arguments, name, NULL), STATUS_OK, "%s %s: %s", name, arguments, status_text());
    cr_assert(file_has_rows("rows.csv"), "%s", name);
    cr_assert_eq(run_words(arguments, name, fault), STATUS_WRONG, "%s %s is not detected", name, arguments);
    cr_assert(strstr(status_text(), words), "%s: '%s' is not in: %s", name, words, status_text());
    cr_assert(!file_has_rows("rows.csv"), "%s: a row was written", name);
}

/* Images of this size differ from run to run; smaller ones are often equal. */
#define SMALL RUNS "--res 64 --batch 3 --vertices 50 --orbits 20 "

static const char one_wrong[] = "1 of 1 variants gave wrong results";

Test(timed, wrong_timed_images_are_detected)
{
    static faulty_run *const faults[] = {first_two, unless_timed, late_by_one, early_unless_last};
    for (size_t i = 0; i < COUNT_OF(faults); i++)
        expect_caught("naive", SMALL, faults[i], one_wrong);
    expect_caught("omp", SMALL "--threads 2 ", first_two, one_wrong);
    expect_caught("omp", SMALL "--threads 2 ", early_unless_last, one_wrong);
    expect_caught("omp", RUNS "--classes 5 --batch 5 --res 40 --out-res 24 --dtype f16 ", first_two,
                  one_wrong);
}

#define FILES  "--data files --batch 4 --shuffle 9 --threads 2" RUNS
#define SHARDS "--data shards --batch 4 --shuffle 9 --threads 2" RUNS

Test(timed, wrong_timed_samples_are_detected)
{
    static const char *const file_variants[] = {"files", "files-omp", "files-uring", "stream"};
    static const char *const shard_variants[] = {"shards", "shards-mmap", "shards-omp", "shards-uring"};
    char command[PATH_MAX + 256];
    snprintf(
        command, sizeof command,
        "for layout in files shards; do '%s' --prepare $layout --store $layout --samples 60 --sample-shape "
        "3,8,8 --dtype u8 >/dev/null 2>&1 || exit; done",
        program);
    if (!available("files"))
        cr_skip_test("this build cannot prepare data sets");
    cr_assert_eq(system(command), 0, "%s", command);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        for (int f = 0; f < 2; f++)
            expect_caught(file_variants[v], FILES, f ? early_unless_last : first_two, one_wrong);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        expect_caught(shard_variants[v], SHARDS, first_two, one_wrong);
        expect_caught(shard_variants[v], SHARDS "--epochs 3 ", unless_timed, one_wrong);
    }
    expect_caught("shards-mmap", SHARDS, late_by_one, one_wrong);
    expect_caught("shards-mmap", SHARDS, early_unless_last, one_wrong);
}

#define TRAINING "--data digits --train-size 60 --test-size 20 --model logreg --batch 20 "

Test(timed, wrong_timed_epochs_are_detected)
{
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "train-omp" : "train-naive";
        if (!available(name))
            continue;
        cr_assert_eq(run_words(TRAINING "--epochs 2", name, NULL), STATUS_OK, "%s", status_text());
        cr_assert_eq(run_words(TRAINING "--epochs 1", name, unless_timed), STATUS_WRONG, "%s", name);
        cr_assert(!file_has_rows("rows.csv"));
        cr_assert_eq(run_words(TRAINING "--epochs 2", name, once), STATUS_WRONG, "%s", name);
        cr_assert(file_has_rows("rows.csv"), "the row of the first epoch, which was correct, is missing");
    }
}

/* With --batch 4, runs evaluate five different batches. With --batch 20, all runs evaluate the same batch and
 * have the same logits. */
Test(timed, wrong_timed_inference_is_detected)
{
    if (!available("files")) /* checkpoints need xxHash, like the variant `files` */
        cr_skip_test("this build has no checkpoints");
    cr_assert_eq(run_words(TRAINING "--epochs 1 --checkpoint net", "train-naive", NULL), STATUS_OK, "%s",
                 status_text());
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "infer-omp" : "infer-naive";
        expect_caught(name, "--checkpoint net --batch 4" RUNS, first_two, one_wrong);
        expect_caught(name, "--checkpoint net --batch 4" RUNS, early_unless_last, one_wrong);
        expect_caught(name, "--checkpoint net --batch 20" RUNS, first_two, one_wrong);
        expect_caught(name, "--checkpoint net --batch 20" RUNS, unless_timed, one_wrong);
    }
}

Test(timed, wrong_timed_rows_are_detected)
{
    static faulty_run *const faults[] = {first_two, late_by_one, early_unless_last};
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        expect_caught("ops-naive", "--rows 100 --dim 8" RUNS, faults[i], one_wrong);
        expect_caught("ops-omp", "--rows 100 --dim 8 --threads 2" RUNS, faults[i], one_wrong);
    }
}
