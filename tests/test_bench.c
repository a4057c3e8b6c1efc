/* Tests bench_measure(): the warm-up, the limits of sampling, and the votes of several ranks. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/timer.h"
#include "run/bench.h"

enum { RUNS_MAX = 100000 };

/* Controls the fake variant, and records the calls to it and to the progress callback. */
struct script {
    double (*device_s)(uint64_t sample); /* the device time of run `sample`, counted from 0; NULL: none */
    double sleep_s;
    uint64_t fail_at; /* the run that fails; 0: none */

    uint64_t runs, numbers[RUNS_MAX];
    double begin_s, last_begin_s; /* when bench_measure() and the latest run began */
    size_t shown, samples[RUNS_MAX];
    double elapsed_s[RUNS_MAX], shown_max_time_s;
};

static struct script script;

static void sleep_for(double seconds)
{
    struct timespec left = {0, (long)(1e9 * seconds)};
    while (nanosleep(&left, &left) != 0)
        ;
}

static enum status fake_run(void *state, uint64_t number, struct run_time *time)
{
    struct script *s = state;
    s->last_begin_s = timer_now_s();
    cr_assert(s->runs < RUNS_MAX, "the runs never end");
    s->numbers[s->runs++] = number;
    if (s->sleep_s > 0)
        sleep_for(s->sleep_s);
    if (s->device_s)
        time->device_s = s->device_s(number - 1);
    if (number == s->fail_at)
        return status_set(STATUS_WRONG, "run %d broke", (int)number);
    return STATUS_OK;
}

static const struct variant fake = {.platform = "cpu", .run = fake_run};

static void note(void *context, size_t samples, double elapsed_s, double max_time_s)
{
    struct script *s = context;
    s->samples[s->shown] = samples;
    s->elapsed_s[s->shown++] = elapsed_s;
    s->shown_max_time_s = max_time_s;
}

static struct bench bench;
static struct bench_together together;

static void free_both(void)
{
    bench_free(&bench);
    bench_free(&together.bench);
}

TestSuite(bench, .fini = free_both, .timeout = 60);

static void measure(struct bench_limits limits)
{
    memset(&bench, 0xff, sizeof bench); /* earlier contents must not matter */
    script.begin_s = timer_now_s();
    cr_assert(bench_measure(&fake, &script, &limits, note, &script, &bench, NULL) == STATUS_OK, "%s",
              status_text());
    cr_assert(script.runs == bench.warmups + bench.count);
    cr_expect(script.shown == bench.count, "progress must report every sample");
}

static double constant(uint64_t sample)
{
    (void)sample;
    return 1e-3;
}

static double bimodal(uint64_t sample)
{
    return sample % 2 ? 2e-3 : 1e-3;
}

/* Times that vary at first and then are 1 ms. */
static double settling(uint64_t sample)
{
    return sample < 10 ? 1e-3 * (double)(1 + sample) : 1e-3;
}

static double rising(uint64_t sample)
{
    return (double)(sample + 1);
}

Test(bench, runs_are_numbered_from_one_without_a_gap)
{
    script.device_s = constant;
    measure((struct bench_limits){.warmups = 4, .min_samples = 7, .max_time_s = 0, .max_median_error = 0.01});
    cr_expect(bench.warmups == 4);
    cr_expect(bench.count == 7);
    for (uint64_t i = 0; i < script.runs; i++)
        cr_expect(script.numbers[i] == i + 1, "run %d is number %d", (int)i, (int)script.numbers[i]);
}

Test(bench, warms_up_for_the_given_time_and_number_of_runs)
{
    script.device_s = constant;
    script.sleep_s = 3e-4;
    measure((struct bench_limits){
        .warmups = 2, .warmup_time_s = 0.02, .min_samples = 1, .max_time_s = 0, .max_median_error = 0.01});
    cr_expect(bench.warmups >= 2);
    cr_expect(bench.count == 1);
    cr_expect(script.last_begin_s - script.begin_s >= 0.02, "the sample does not follow the warm-up");
}

Test(bench, without_a_warm_up_the_first_run_is_a_sample)
{
    script.device_s = rising;
    measure((struct bench_limits){.min_samples = 3, .max_time_s = 0, .max_median_error = 0.01});
    cr_expect(bench.warmups == 0);
    cr_expect(bench.count == 3);
    cr_expect(bench.samples[0].device_s == 1 && bench.samples[2].device_s == 3);
}

Test(bench, never_takes_fewer_than_min_samples)
{
    static const uint64_t counts[] = {1, 2, 10, 63, 64, 65, 1000};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        script = (struct script){.device_s = bimodal};
        measure((struct bench_limits){.min_samples = counts[i], .max_time_s = 0, .max_median_error = 1e-6});
        cr_expect(bench.count == counts[i], "%zu samples, not %d, with a max_time of 0", bench.count,
                  (int)counts[i]);
        bench_free(&bench);
    }
}

Test(bench, stops_at_min_samples_if_they_agree)
{
    script.device_s = constant;
    measure((struct bench_limits){.min_samples = 10, .max_time_s = 30, .max_median_error = 0.01});
    cr_expect(bench.count == 10, "%zu", bench.count);
    cr_expect(bench.settled);
    cr_expect(bench.time.median == 1e-3 && bench.time.median_error == 0);
}

Test(bench, samples_for_at_least_min_time)
{
    script.device_s = constant;
    script.sleep_s = 3e-4;
    measure((struct bench_limits){
        .min_samples = 2, .min_time_s = 0.03, .max_time_s = 30, .max_median_error = 0.01});
    cr_expect(bench.settled);
    cr_expect(script.elapsed_s[bench.count - 1] >= 0.03);
    cr_expect(bench.count == 2 || script.elapsed_s[bench.count - 2] < 0.03,
              "sampling continues after min_time, although all samples are equal");
}

Test(bench, bimodal_times_never_settle_and_max_time_ends_sampling)
{
    script.device_s = bimodal;
    script.sleep_s = 2e-4;
    measure((struct bench_limits){.min_samples = 5, .max_time_s = 0.05, .max_median_error = 0.01});
    cr_expect_not(bench.settled);
    cr_expect(bench.time.median_error > 0.2, "%g", bench.time.median_error);
    cr_expect(script.elapsed_s[bench.count - 1] >= 0.05);
    cr_expect(bench.count == 5 || script.elapsed_s[bench.count - 2] < 0.05,
              "sampling does not stop at max_time");
}

Test(bench, max_time_overrides_min_time_but_not_min_samples)
{
    script.device_s = bimodal;
    measure((struct bench_limits){
        .min_samples = 20, .min_time_s = 30, .max_time_s = 0, .max_median_error = 0.01});
    cr_expect(bench.count == 20, "%zu", bench.count);
    cr_expect_not(bench.settled);
}

Test(bench, samples_until_the_median_is_known)
{
    script.device_s = settling;
    measure((struct bench_limits){.min_samples = 10, .max_time_s = 30, .max_median_error = 0.01});
    cr_expect(bench.settled);
    cr_expect(bench.time.median_error < 0.01);
    cr_expect(bench.count > 10 && bench.count < 120, "%zu", bench.count);
    cr_expect(bench.time.median == 1e-3);
}

Test(bench, max_error_ends_sampling)
{
    script.device_s = bimodal;
    measure((struct bench_limits){.min_samples = 10, .max_time_s = 30, .max_median_error = 2});
    cr_expect(bench.settled, "an error of at most 0.5 must count as settled, because the limit is 2");
    cr_expect(bench.count == 10, "%zu", bench.count);
}

Test(bench, device_time_is_used_if_the_variant_reports_it)
{
    script.device_s = rising;
    script.sleep_s = 1e-4;
    measure((struct bench_limits){.min_samples = 5, .max_time_s = 0, .max_median_error = 0.01});
    cr_expect(bench.on_device);
    cr_expect(bench.time.count == 5);
    cr_expect(bench.time.min == 1 && bench.time.median == 3 && bench.time.mean == 3);
    for (size_t i = 0; i < bench.count; i++) {
        cr_expect(bench.samples[i].device_s == (double)(i + 1));
        cr_expect(bench.samples[i].wall_s >= 1e-4 && bench.samples[i].wall_s < 1);
    }
    cr_expect(bench.wall_s >= 1e-4 && bench.wall_s < 1, "wall time is not reported");
}

Test(bench, wall_time_is_used_without_device_time)
{
    script.sleep_s = 1e-4;
    measure((struct bench_limits){.min_samples = 5, .max_time_s = 0, .max_median_error = 0.01});
    cr_expect_not(bench.on_device);
    cr_expect(bench.time.min >= 1e-4);
    cr_expect(bench.time.median == bench.wall_s);
    for (size_t i = 0; i < bench.count; i++)
        cr_expect(bench.samples[i].device_s < 0);
}

Test(bench, progress_counts_up_and_has_the_time_limit)
{
    script.device_s = constant;
    measure((struct bench_limits){.warmups = 3, .min_samples = 6, .max_time_s = 5, .max_median_error = 0.01});
    cr_expect(script.shown_max_time_s == 5);
    for (size_t i = 0; i < script.shown; i++) {
        cr_expect(script.samples[i] == i + 1);
        cr_expect(script.elapsed_s[i] >= (i ? script.elapsed_s[i - 1] : 0));
    }
}

#define BUSY_S 0.01

/* Computes until this thread has used BUSY_S of CPU time, however long that takes on a busy machine. */
static enum status busy_run(void *state, uint64_t number, struct run_time *time)
{
    (void)state, (void)number, (void)time;
    struct timespec begin, now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    do
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    while ((double)(now.tv_sec - begin.tv_sec) + 1e-9 * (double)(now.tv_nsec - begin.tv_nsec) < BUSY_S);
    return STATUS_OK;
}

/* Sleeping runs use hardly any CPU time. Computing runs use BUSY_S each. The warm-up does not count. */
Test(bench, cpu_time_and_span_of_the_timed_runs)
{
    const struct variant busy = {.platform = "cpu", .run = busy_run};
    struct bench_limits limits = {.warmups = 3, .min_samples = 5, .max_median_error = 0.01};
    script.sleep_s = 0.01;
    measure(limits);
    cr_expect(bench.span_s >= 0.05 && bench.timed_s >= 0.05 && bench.timed_s <= bench.span_s);
    cr_expect(bench.cpu_s < 0.5 * bench.span_s, "%g of %g s", bench.cpu_s, bench.span_s);
    bench_free(&bench);
    cr_assert(bench_measure(&busy, NULL, &limits, NULL, NULL, &bench, NULL) == STATUS_OK);
    double timed_s = 0;
    for (size_t i = 0; i < bench.count; i++)
        timed_s += bench.samples[i].wall_s;
    cr_expect(fabs(bench.timed_s - timed_s) < 1e-9);
    cr_expect(bench.cpu_s > 0.9 * BUSY_S * (double)bench.count && bench.cpu_s < bench.span_s + 0.02,
              "%g of %g s in %zu runs", bench.cpu_s, bench.span_s, bench.count);
}

Test(bench, progress_is_optional)
{
    const struct bench_limits limits = {.min_samples = 2, .max_median_error = 0.01};
    cr_assert(bench_measure(&fake, &script, &limits, NULL, NULL, &bench, NULL) == STATUS_OK);
    cr_expect(bench.count == 2);
    bench_free(&bench);
    cr_expect_null(bench.samples);
    bench_free(&bench); /* a second call must free nothing */
}

/* Runs 1 to 3 are warm-ups. So runs 1 and 2 fail in the warm-up, and runs 4 and 6 during sampling. */
Test(bench, a_failing_run_ends_the_measurement_and_its_message_is_relayed)
{
    static const uint64_t failing[] = {1, 2, 4, 6};
    const struct bench_limits limits = {.warmups = 3, .min_samples = 10, .max_median_error = 0.01};
    for (size_t i = 0; i < COUNT_OF(failing); i++) {
        script = (struct script){.device_s = constant, .fail_at = failing[i]};
        char expected[32];
        snprintf(expected, sizeof expected, "run %d broke", (int)failing[i]);
        cr_expect(bench_measure(&fake, &script, &limits, note, &script, &bench, NULL) == STATUS_WRONG);
        cr_expect_str_eq(status_text(), expected);
        cr_expect(script.runs == failing[i], "a run follows the run that failed");
        cr_expect(bench.samples == NULL && bench.count == 0, "the samples were not freed");
    }
}

/* ---- Several ranks ---- */

/* A simulated second rank. Ranks vote between runs on whether to continue. The second rank is warm from vote
 * `warm_at` on and fails at vote `fail_at`. `device_s` gives its sample times, and `elapsed_s` its elapsed
 * time. In the vote on statistics, the second rank agrees with the tested rank. */
static struct {
    uint64_t votes, warm_at, fail_at, samples;
    double (*device_s)(uint64_t sample);
    double elapsed_s;
} other;

static enum status vote(enum status status, double *values, size_t count)
{
    other.votes++;
    if (status != STATUS_OK)
        return status;
    if (other.votes == other.fail_at)
        return status_set(STATUS_FAILED, "rank 1: it broke");
    if (count == 1 && other.votes < other.warm_at)
        values[0] = 1;
    if (count == 3 && other.device_s)
        values[1] = fmax(values[1], other.device_s(other.samples++));
    if (count == 3)
        values[2] = fmax(values[2], other.elapsed_s);
    return STATUS_OK;
}

static enum status measure_together(struct bench_limits limits)
{
    together.vote = vote;
    memset(&together.bench, 0xff, sizeof together.bench);
    return bench_measure(&fake, &script, &limits, note, &script, &bench, &together);
}

Test(bench, warms_up_until_every_rank_is_warm)
{
    script.device_s = constant;
    other.warm_at = 41;
    cr_assert(measure_together((struct bench_limits){
                  .warmups = 3, .min_samples = 10, .max_time_s = 30, .max_median_error = 0.01}) == STATUS_OK);
    cr_expect(bench.warmups == 40 && together.bench.warmups == 40, "%d", (int)bench.warmups);
    cr_expect(bench.count == 10 && together.bench.count == 10);
    cr_expect(other.votes == 52, "%d votes, not 41 of the warm-up, 10 of samples and 1 of statistics",
              (int)other.votes);
}

/* Times of the second rank. The first nine alternate, and the tested rank's times are constant. A sample
 * of all ranks has the time of the slower rank. So the median of all ranks settles later than the median of
 * the tested rank. */
static double odd_ones(uint64_t sample)
{
    return sample < 9 && sample % 2 ? 3e-3 : 1e-3;
}

Test(bench, the_median_of_all_ranks_decides)
{
    script.device_s = constant;
    other.device_s = odd_ones;
    cr_assert(measure_together((struct bench_limits){
                  .min_samples = 7, .max_time_s = 30, .max_median_error = 0.01}) == STATUS_OK);
    cr_expect(bench.settled && bench.time.median == 1e-3 && bench.time.sd < 1e-9);
    cr_expect(together.bench.settled && together.bench.time.sd > 1e-6);
    cr_expect(together.bench.count > 7, "%zu samples, as many as this rank alone needs",
              together.bench.count);
    cr_expect(bench.count == together.bench.count && bench.time.count == bench.count);
    for (size_t i = 0; i < bench.count; i++) {
        cr_expect(together.bench.samples[i].device_s == odd_ones(i));
        cr_expect(together.bench.samples[i].wall_s == bench.samples[i].wall_s);
    }
}

Test(bench, a_median_of_all_ranks_that_never_settles_is_reported)
{
    script.device_s = constant;
    script.sleep_s = 2e-4;
    other.device_s = bimodal;
    cr_assert(measure_together((struct bench_limits){
                  .min_samples = 10, .max_time_s = 0.05, .max_median_error = 0.01}) == STATUS_OK);
    cr_expect(bench.settled);
    cr_expect_not(together.bench.settled);
    cr_expect(together.bench.on_device && together.bench.looked == together.bench.count);
}

Test(bench, max_time_on_any_rank_ends_sampling)
{
    script.device_s = bimodal;
    other.elapsed_s = 1e3;
    cr_assert(measure_together((struct bench_limits){
                  .min_samples = 10, .max_time_s = 30, .max_median_error = 0.01}) == STATUS_OK);
    cr_expect(bench.count == 10, "%zu", bench.count);
}

/* The warm-up of 3 runs has 4 votes: one before each run, and a last one. Each sample has one vote. The
 * 10th sample has a second vote, for the statistics. */
Test(bench, a_failure_on_another_rank_ends_the_measurement_before_the_next_run)
{
    static const struct {
        uint64_t fail_at, runs;
    } cases[] = {{1, 0}, {4, 3}, {5, 4}, {14, 13}, {15, 13}};
    const struct bench_limits limits = {
        .warmups = 3, .min_samples = 10, .max_time_s = 30, .max_median_error = 0.01};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        script = (struct script){.device_s = constant};
        other.votes = 0;
        other.fail_at = cases[i].fail_at;
        cr_expect(measure_together(limits) == STATUS_FAILED);
        cr_expect_str_eq(status_text(), "rank 1: it broke");
        cr_expect(script.runs == cases[i].runs, "vote %d: %d runs", (int)cases[i].fail_at, (int)script.runs);
        cr_expect(!bench.samples && !together.bench.samples, "the samples were not freed");
    }
}

/* After the failing run, exactly one vote reports the failure to the other ranks. */
Test(bench, other_ranks_learn_of_a_failure)
{
    const struct bench_limits limits = {.warmups = 3, .min_samples = 10, .max_median_error = 0.01};
    for (uint64_t at = 2; at <= 6; at += 4) {
        script = (struct script){.device_s = constant, .fail_at = at};
        other.votes = 0;
        cr_expect(measure_together(limits) == STATUS_WRONG);
        cr_expect(other.votes == at + 1, "%d", (int)other.votes);
    }
}
