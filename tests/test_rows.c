/* Tests rows and the table: the error of the median, the state of the machine, and speed-ups over other
 * variants. */
#include "program.h"

#include "run/rows.h"

TestSuite(rows, .init = start, .fini = stop, .timeout = 120);

/* SMALL: options for images that take microseconds. LOOPS(n): SMALL with n samples. */
#define SMALL    "--res 16 --batch 2 --vertices 5 --orbits 3 --radius 3 --warmups 1 --warmup-time 0 "
#define LOOPS(n) SMALL "--loops " #n " "

/* ---- Whether the median settled ---- */

Test(rows, say_whether_the_median_settled)
{
    run_well("--variant naive " SMALL
             "--max-error 100 --min-samples 100 --min-time 0 --max-time 20 --format csv");
    cr_expect_str_eq(value(out, 1, "settled"), "yes");
    cr_expect(number(out, 1, "median_error") >= 0 && number(out, 1, "median_error") < 1);
    run_well("--variant naive " SMALL
             "--max-error 0.000001 --max-time 0 --min-time 0 --min-samples 200 --format csv");
    cr_expect_str_eq(value(out, 1, "settled"), "no");
    run_well("--variant naive " LOOPS(5) "--format csv");
    cr_expect_str_eq(value(out, 1, "settled"), "no");
    cr_expect_str_eq(value(out, 1, "median_error"), "",
                     "must be empty, because five samples are too few for an interval");
}

Test(rows, one_sample_has_no_spread)
{
    run_well("--variant naive " LOOPS(1) "--format csv");
    expect_cells(out, 1, "time_sd_s=;time_cv=");
    cr_expect(number(out, 1, "time_median_s") > 0);
    run_well("--variant naive " LOOPS(2) "--format csv");
    cr_expect(number(out, 1, "time_sd_s") >= 0 && number(out, 1, "time_cv") >= 0);
}

Test(rows, epochs_leave_settled_empty)
{
#define EPOCH                                                                                                \
    "--variant train-naive --data digits --train-size 40 --test-size 10 --model logreg --batch 10 --epochs " \
    "1 "
    run_well(EPOCH "--format csv");
    expect_cells(out, 1, "settled=;median_error=;time_sd_s=");
    run_well(EPOCH);
    cr_expect(!strstr(out, "*"), "%s", out);
    /* One line per epoch, with its number. The word sample means an item of the data here. */
    cr_expect(!strstr(out, "samples") && strstr(out, "  epoch   #wrong train_loss"), "%s", out);
    cr_expect(strstr(out, "        1        - "), "%s", out);
}

Test(rows, the_table_marks_medians_that_did_not_settle)
{
    run_well("--variant naive " SMALL "--max-error 0.000001 --max-time 0 --min-time 0 --min-samples 200");
    /* Slow drift leaves too few independent samples for an interval: the error is then "-". */
    cr_expect(strstr(out, "%* ") || strstr(out, " -* "), "%s", out);
    cr_expect(strstr(out, "\n* not settled: "), "%s", out);
    expect_prints(" -* ", "--variant naive " LOOPS(3));
    run_well("--variant naive " SMALL "--max-error 100 --min-samples 100 --min-time 0 --max-time 20");
    cr_expect(!strstr(out, "*"), "%s", out);
}

#ifdef HAVE_JANSSON
Test(rows, json_has_settled_as_a_flag)
{
    run_well("--variant naive " LOOPS(4) "--format json");
    cr_expect_eq(count_of(out, "\"settled\": false"), 1, "%s", out);
    cr_expect_eq(count_of(out, "\"median_error\": null"), 1, "%s", out);
    cr_expect_eq(count_of(out, "\"time_sd_s\": null"), 0, "%s", out);
}
#endif

/* ---- The machine ---- */

Test(rows, have_the_instruction_set_that_was_used)
{
    run_well("--variant " VARIANTS " " LOOPS(3) "--format csv");
    for (size_t row = 1; row <= VARIANT_COUNT; row++) {
        const char *(*used)(void) = variant_find(value(out, row, "variant"))->variant->instruction_set;
        cr_expect_str_eq(value(out, row, "instruction_set"), used ? used() : "");
        expect_cells(out, row, "sm_clock_mhz=;memory_clock_mhz=;energy_j_per_item=");
    }
}

/* ---- Speed-ups ---- */

static void expect_speedups(const char *csv, size_t rows, const char *baseline)
{
    double base_s = 0;
    for (size_t row = 1; row <= rows; row++)
        if (strcmp(value(csv, row, "variant"), baseline) == 0)
            base_s = number(csv, row, "time_median_s") / number(csv, row, "items");
    for (size_t row = 1; row <= rows; row++) {
        double item_s = number(csv, row, "time_median_s") / number(csv, row, "items");
        cr_expect_str_eq(value(csv, row, "baseline"), baseline);
        cr_expect(fabs(number(csv, row, "speedup") * item_s / base_s - 1) < 1e-6, "row %zu", row);
    }
}

#ifdef _OPENMP
Test(rows, naive_is_the_default_baseline_in_any_order)
{
    run_well("--variant omp,naive " LOOPS(9) "--format csv");
    cr_expect_str_eq(value(out, 1, "variant"), "naive", "the baseline must run first");
    expect_speedups(out, 2, "naive");
    run_well("--variant naive,omp --baseline omp " LOOPS(9) "--format csv");
    cr_expect_str_eq(value(out, 1, "variant"), "omp");
    expect_speedups(out, 2, "omp");
}

Test(rows, without_the_baseline_there_is_no_speed_up)
{
    run_well("--variant omp " LOOPS(9) "--format csv");
    expect_cells(out, 1, "speedup=;baseline=");
    expect_failure(2, "--baseline naive: it is not among the variants that run; add it to --variant",
                   "--variant omp --baseline naive " LOOPS(9));
    expect_failure(2, "--baseline: unknown variant 'nonsense'; --list shows them all",
                   "--variant omp --baseline nonsense " LOOPS(9));
    expect_failure(2, "--baseline: unknown variant 'naivee'; did you mean 'naive'?",
                   "--variant omp --baseline naivee " LOOPS(9));
}

Test(rows, the_header_of_the_table_names_the_baseline)
{
    expect_prints("; speed-up over naive\n", "--variant omp,naive " LOOPS(9));
    cr_expect(count_of(out, " 1.00x ") >= 1, "the speed-up of naive over itself is missing: %s", out);
    expect_prints("; speed-up is unknown without naive\n", "--variant omp " LOOPS(9));
    cr_expect(!strstr(out, "x "), "%s", out);
}

/* The speed-up of an epoch is relative to the median time of the baseline's epochs. */
Test(rows, epochs_have_speed_ups)
{
#define EPOCHS                                                                                        \
    "--workload train --variant train-omp,train-naive --data digits --train-size 200 --test-size 10 " \
    "--model "                                                                                        \
    "logreg --batch 20 --epochs "
    run_well(EPOCHS "3 --format csv");
    double times[3], median;
    for (size_t row = 1; row <= 3; row++) {
        expect_cells(out, row, "variant=train-naive;speedup=1");
        times[row - 1] = number(out, row, "time_median_s");
    }
    median = fmax(fmin(times[0], times[1]), fmin(fmax(times[0], times[1]), times[2]));
    for (size_t row = 4; row <= 6; row++) {
        cr_expect_str_eq(value(out, row, "baseline"), "train-naive");
        cr_expect(fabs(number(out, row, "speedup") * number(out, row, "time_median_s") / median - 1) < 1e-6);
    }
    run_well(EPOCHS "1");
    cr_expect(strstr(out, "; speed-up over train-naive\n") && strstr(out, " 1.00x "), "%s", out);
}
#endif

/* ---- A busy machine ---- */

/* Sets `text` to the warning of runner_warn() for two ranks. On the second rank, the threads got `share` of
 * the CPU time of their cores and were preempted `preempted_per_s` times per second. */
static void warn_of(int threads, double share, double preempted_per_s, char text[1024])
{
    const struct variant variant = {.platform = "cpu", .threaded = threads > 1};
    const struct variant_entry entry = {.name = "naive", .variant = &variant};
    char path[] = "warnings.txt",
         *argv[] = {(char *)"fdsl-bench", (char *)"--variant", (char *)"naive", NULL};
    const struct rank_facts facts[2] = {{.cpu_share = 1, .preempted_per_s = 1},
                                        {.cpu_share = share, .preempted_per_s = preempted_per_s}};
    const struct result result = {
        .bench = {.count = 100, .settled = true, .time.median_error = 0.001, .time.effective = 100}};
    struct settings settings;
    cr_assert_eq(settings_read(&settings, &(struct config){.argc = 3, .argv = argv}), STATUS_OK);
    cr_assert(freopen(path, "w", stderr));
    settings.resources.threads = threads;
    struct runner runner = {.settings = &settings, .entry = &entry, .partition.ranks = 2};
    status_show_caveats(true);
    runner_warn(&runner, &result, facts);
    fflush(stderr);
    settings_free(&settings);
    char *whole = get(path, NULL);
    snprintf(text, 1024, "%s", whole);
    free(whole);
}

Test(rows, a_busy_machine_gives_a_warning)
{
    char text[1024];
    warn_of(4, 0.45, 120, text);
    cr_expect(strstr(text,
                     "naive: its threads got 45 % of the CPU time of their cores and were preempted 120 "
                     "times per second, so times are too long: stop other processes, or lower --threads\n"),
              "not the warning for the rank with the least CPU time: %s", text);
    cr_expect_eq(strchr(text, '\n'), strrchr(text, '\n'), "two warnings: %s", text);
    warn_of(1, 0.45, 120, text);
    cr_expect(strstr(text,
                     "naive: its thread got 45 % of the CPU time of its core and was preempted 120 times "
                     "per second, so times are too long: stop other processes\n"),
              "with one thread, --threads must not be advised: %s", text);
    warn_of(4, 0.45, 3, text);
    cr_expect_str_eq(text, "", "a warning about threads that were rarely preempted");
    warn_of(4, 0.97, 500, text);
    cr_expect_str_eq(text, "");
    warn_of(4, NAN, NAN, text);
    cr_expect_str_eq(text, "", "a warning about a variant on a device, whose CPU share is unknown");
}

/* Four threads used 4 s of CPU time in 2 s, so each got half of a core. */
Test(rows, the_cpu_share_counts_all_threads)
{
    struct variant threaded = {.platform = "cpu", .threaded = true}, device = {.platform = "cuda"};
    struct settings settings = {.workload = workload_find("synth"), .resources.threads = 4};
    struct variant_entry entry = {.variant = &threaded};
    struct runner runner = {.settings = &settings, .entry = &entry, .env.allowed_threads = 8};
    struct bench bench = {.span_s = 2, .cpu_s = 4, .preempted = 100};
    double share, preempted_per_s;
    runner_cpu_use(&runner, &bench, &share, &preempted_per_s);
    cr_expect(share == 0.5 && preempted_per_s == 50, "%g %g", share, preempted_per_s);
    runner.env.allowed_threads = 2;
    runner_cpu_use(&runner, &bench, &share, &preempted_per_s);
    cr_expect(share == 1, "4 s of CPU time in 2 s is all that two hardware threads have: %g", share);
    threaded.threaded = false;
    runner_cpu_use(&runner, &bench, &share, &preempted_per_s);
    cr_expect(share == 2, "%g", share);
    bench.span_s = 0.1;
    runner_cpu_use(&runner, &bench, &share, &preempted_per_s);
    cr_expect(isnan(share) && isnan(preempted_per_s),
              "the share must be unknown, because the span is too short");
    bench.span_s = 2;
    entry.variant = &device;
    runner_cpu_use(&runner, &bench, &share, &preempted_per_s);
    cr_expect(isnan(share) && isnan(preempted_per_s));
}
