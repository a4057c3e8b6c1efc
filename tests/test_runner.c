/* Tests the status, messages and rows of the runner, with variants that give wrong results or fail. */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run/runner.h"
#include "run/settings.h"
#include "synth/input.h"

static const struct variant *naive(void)
{
    return variant_find("naive")->variant;
}

/* The fetch() of a variant that corrupts one pixel of image 1. */
static enum status spoiled_fetch(void *state, void *result)
{
    struct synth_fetch *fetch = result;
    enum status status = naive()->fetch(state, result);
    if (fetch->j == 1)
        fetch->pixels[0] ^= 1;
    return status;
}

/* The run() of a variant whose third run fails. The third run is the warm-up after the verification. */
static uint64_t runs;

static enum status failing_run(void *state, uint64_t number, struct run_time *time)
{
    if (++runs == 3)
        return status_set(STATUS_FAILED, "the device caught fire");
    return naive()->run(state, number, time);
}

static const char *batch = "3";                /* the value of --batch */
static char out[] = "/tmp/fdsl-runner-XXXXXX"; /* the value of --out */

static void set_up(void)
{
    close(mkstemp(out));
    cr_redirect_stdout();
    cr_redirect_stderr();
}

static void tear_down(void)
{
    unlink(out);
}

TestSuite(runner, .init = set_up, .fini = tear_down, .timeout = 60);

/* Runs the program with --verify on a tiny batch. `variant` runs under the name "fake". `names` is the value
 * of --variant, and `type` of --dtype. `baseline` is the value of --baseline, or NULL to omit this option.
 * The baseline runs first. */
static enum status run_with(const struct variant *variant, const char *names, const char *baseline,
                            const char *type)
{
    char line[512], *argv[64], *rest = line, *word;
    int argc = 0;
    snprintf(line, sizeof line,
             "fdsl-bench --variant naive --verify --batch %s --res 32 --vertices 7 --orbits 5 --min-time 0 "
             "--max-time 0 "
             "--warmups 1 --warmup-time 0 --min-samples 2 --dtype %s --out %s",
             batch, type, out);
    while ((word = strsep(&rest, " ")))
        argv[argc++] = word;
    const struct variant_entry fake = {"fake", "synth", "NOTHING", "made up", variant};
    struct settings settings;
    argv[argc] = NULL;
    enum status status = settings_read(&settings, &(struct config){.argc = argc, .argv = argv});
    cr_assert_eq(status, STATUS_OK, "%s", status_text());
    const struct variant_entry *both[] = {&fake, settings.variants[0]};
    const struct variant_entry **own = settings.variants;
    settings.variants = both;
    settings.variant_count = 2;
    settings.variant_names = names;
    settings.baseline = baseline;
    status = runner_run(&settings);
    settings.variants = own;
    settings_free(&settings);
    return status;
}

/* Returns the rows that the latest run wrote. The next call overwrites them. */
static const char *rows(void)
{
    static char text[65536];
    FILE *stream = fopen(out, "r");
    cr_assert_not_null(stream);
    text[fread(text, 1, sizeof text - 1, stream)] = '\0';
    fclose(stream);
    return text;
}

static int count_lines(const char *text)
{
    int count = 0;
    for (; (text = strchr(text, '\n')); text++)
        count++;
    return count;
}

Test(runner, variants_with_wrong_results_have_no_row)
{
    struct variant wrong = *naive();
    wrong.fetch = spoiled_fetch;
    cr_expect_eq(run_with(&wrong, "fake,naive", NULL, "u8"), STATUS_WRONG);
    cr_expect(strstr(status_text(), "1 of 2 variants gave wrong results"), "%s", status_text());
    cr_expect(!strstr(rows(), ",fake,"), "a variant with wrong results has a row");
    cr_expect(strstr(rows(), ",naive,"), "variants after the wrong one did not run");
}

/* The corrupted image is the second one, so a batch of one image is correct. */
Test(runner, a_wrong_combination_does_not_stop_the_others)
{
    struct variant wrong = *naive();
    wrong.fetch = spoiled_fetch;
    batch = "3,1";
    cr_expect_eq(run_with(&wrong, "fake,naive", NULL, "u8"), STATUS_WRONG);
    cr_expect_str_eq(status_text(), "1 of 2 combinations failed");
    fflush(stderr);
    char text[4096] = "";
    FILE *messages = cr_get_redirected_stderr();
    text[fread(text, 1, sizeof text - 1, messages)] = '\0';
    cr_expect(strstr(text, "fdsl-bench: --batch 3: fake: 1 of 3 images are wrong; the time"), "%s", text);
    cr_expect(strstr(text, "fdsl-bench: --batch 3: 1 of 2 variants gave wrong results\n"), "%s", text);
    cr_expect(strstr(rows(), ",fake,") && count_lines(rows()) == 4, "%s", rows());
}

Test(runner, a_failure_ends_all_combinations)
{
    struct variant failing = *naive();
    failing.run = failing_run;
    batch = "3,1";
    cr_expect_eq(run_with(&failing, "fake,naive", "fake", "u8"), STATUS_FAILED);
    cr_expect_str_eq(status_text(), "--batch 3: combination 1 of 2: the device caught fire");
    cr_expect_str_empty(rows(), "rows were written: %s", rows());
}

Test(runner, a_failure_ends_the_runs)
{
    struct variant failing = *naive();
    failing.run = failing_run;
    cr_expect_eq(run_with(&failing, "fake,naive", "fake", "u8"), STATUS_FAILED);
    cr_expect_str_eq(status_text(), "the device caught fire");
    cr_expect_str_empty(rows(), "rows were written: %s", rows());
}

/* Returns naive, declared as a variant that does not convert its images to the output. */
static struct variant canvas_only(void)
{
    static struct synth_traits traits;
    struct variant plain = *naive();
    traits = *(const struct synth_traits *)plain.traits;
    traits.outputs = false;
    plain.traits = &traits;
    return plain;
}

/* A variant that cannot convert its images must be refused if --variant names it, and skipped with --variant
 * all. */
Test(runner, variants_without_the_output_are_refused_or_skipped)
{
    struct variant plain = canvas_only();
    cr_expect_eq(run_with(&plain, "fake,naive", NULL, "f16"), STATUS_USAGE);
    cr_expect(strstr(status_text(), "variant 'fake' cannot run with these options: supports only u8"), "%s",
              status_text());
    cr_expect(strstr(status_text(), "use naive"), "%s", status_text());
    cr_expect_str_empty(rows(), "a variant ran: %s", rows());

    cr_expect_eq(run_with(&plain, "all", NULL, "f16"), STATUS_OK, "%s", status_text());
    fflush(stderr);
    cr_expect_stderr_neq_str("", "no note about the skipped variant");
    cr_expect(!strstr(rows(), ",fake,") && strstr(rows(), ",naive,"), "%s", rows());
}

/* A variant that --variant all skips in one combination of options must run in the next one. */
Test(runner, each_combination_has_all_variants)
{
    struct variant plain = canvas_only();
    cr_expect_eq(run_with(&plain, "all", NULL, "f16,u8"), STATUS_OK, "%s", status_text());
    cr_expect(strstr(rows(), ",fake,") && count_lines(rows()) == 4, "%s", rows());
}

Test(runner, a_variant_of_canvases_runs_for_canvases)
{
    struct variant plain = canvas_only();
    cr_expect_eq(run_with(&plain, "fake,naive", NULL, "u8"), STATUS_OK, "%s", status_text());
    cr_expect(strstr(rows(), ",fake,") && strstr(rows(), ",naive,"), "%s", rows());
}

/* ---- --variant auto, with the candidates fake and naive ---- */

static void expect_said(const char *words)
{
    fflush(stderr);
    char text[4096] = "";
    FILE *messages = cr_get_redirected_stderr();
    text[fread(text, 1, sizeof text - 1, messages)] = '\0';
    const char *at = strstr(text, words);
    cr_expect(at && !strstr(at + 1, "--variant auto chose"), "not once: '%s' in: %s", words, text);
}

Test(runner, auto_runs_only_the_first_candidate_that_can_run)
{
    cr_expect_eq(run_with(naive(), "auto", NULL, "u8"), STATUS_OK, "%s", status_text());
    cr_expect(strstr(rows(), ",fake,") && count_lines(rows()) == 2, "%s", rows());
    expect_said("--variant auto chose fake\n");
}

static enum status broken_probe(const struct resources *resources)
{
    return status_set(STATUS_UNAVAILABLE, "device %d is away", resources->device);
}

Test(runner, auto_says_once_why_a_better_candidate_cannot_run)
{
    struct variant away = *naive();
    away.probe = broken_probe;
    batch = "3,1";
    cr_expect_eq(run_with(&away, "auto", NULL, "u8"), STATUS_OK, "%s", status_text());
    cr_expect(!strstr(rows(), ",fake,") && count_lines(rows()) == 3, "%s", rows());
    expect_said("--variant auto chose naive; better variants cannot run here: fake (device 0 is away)\n");
}

/* The choice depends on the options: fake supports only one of the two types. */
Test(runner, auto_chooses_again_for_each_combination)
{
    struct variant plain = canvas_only();
    cr_expect_eq(run_with(&plain, "auto", NULL, "f16,u8"), STATUS_OK, "%s", status_text());
    cr_expect(strstr(rows(), ",fake,") && strstr(rows(), ",naive,") && count_lines(rows()) == 3, "%s",
              rows());
}

static enum status broken_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources, (void)input, (void)state;
    return status_set(STATUS_UNAVAILABLE, "the GPUs cannot see each other");
}

Test(runner, auto_runs_the_next_candidate_if_the_setup_says_unavailable)
{
    struct variant alone = *naive();
    alone.setup = broken_setup;
    cr_expect_eq(run_with(&alone, "auto", NULL, "u8"), STATUS_OK, "%s", status_text());
    cr_expect(!strstr(rows(), ",fake,") && count_lines(rows()) == 2, "%s", rows());
    fflush(stderr);
    char text[4096] = "";
    FILE *messages = cr_get_redirected_stderr();
    text[fread(text, 1, sizeof text - 1, messages)] = '\0';
    cr_expect(strstr(text, "auto chose naive; better variants cannot run here: fake (the GPUs cannot see"),
              "%s", text);
}

Test(runner, auto_does_not_hide_wrong_results)
{
    struct variant wrong = *naive();
    wrong.fetch = spoiled_fetch;
    cr_expect_eq(run_with(&wrong, "auto", NULL, "u8"), STATUS_WRONG);
    cr_expect_str_empty(rows(), "%s", rows());
}
