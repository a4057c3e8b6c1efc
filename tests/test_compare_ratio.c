/* Tests the confidence interval of a ratio of times, and the verdict. Uses known answers, and simulations
 * that count how often the intervals and verdicts are right. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/stats.h"
#include "run/compare.h"

TestSuite(ratio, .timeout = 120);

#define NORMAL 1.959964

static void expect_near(const char *what, double value, double expected, double tolerance)
{
    cr_expect(fabs(value - expected) <= tolerance * fabs(expected), "%s is %.9g, not %.9g", what, value,
              expected);
}

/* ---- Known answers ---- */

Test(ratio, student_quantiles_equal_published_tables)
{
    static const struct {
        double confidence, freedom, t;
    } known[] = {{0.95, 1, 12.7062047},   {0.95, 2, 4.30265273},        {0.95, 3, 3.18244631},
                 {0.95, 4, 2.77644511},   {0.95, 10, 2.22813885},       {0.95, 30, 2.04227246},
                 {0.90, 5, 2.01504837},   {0.99, 7, 3.49948330},        {0.95, 1e5, 1.95998771},
                 {0.95, 1e9, 1.95996398}, {0.95, INFINITY, 1.95996398}, {0.5, 1, 1}};
    for (size_t i = 0; i < COUNT_OF(known); i++)
        expect_near("t", stats_student(known[i].confidence, known[i].freedom), known[i].t, 1e-7);
}

/* Returns the probability that |T| <= t, with v = `freedom`. Integrates Student's density over the angle
 * whose tangent is t / sqrt(v); as a function of the angle, the density is proportional to cos^(v - 1). */
static double probability_within(double t, double freedom)
{
    enum { STEPS = 100000 };
    double inside = 0, all = 0;
    for (size_t i = 0; i < STEPS; i++) {
        double share = ((double)i + 0.5) / STEPS;
        inside += pow(cos(share * atan(t / sqrt(freedom))), freedom - 1) * atan(t / sqrt(freedom));
        all += pow(cos(share * M_PI_2), freedom - 1) * M_PI_2;
    }
    return inside / all;
}

Test(ratio, student_quantiles_are_right_for_fractional_degrees_of_freedom)
{
    static const double freedoms[] = {1.3, 2.5, 3.99, 17.2};
    for (size_t i = 0; i < COUNT_OF(freedoms); i++)
        expect_near("probability", probability_within(stats_student(0.95, freedoms[i]), freedoms[i]), 0.95,
                    1e-5);
}

static struct side side_of(size_t count, const double *logarithms, double error)
{
    struct side side = {0};
    for (size_t i = 0; i < count; i++)
        side_add(&side, exp(logarithms[i]), error);
    return side;
}

static void expect_ratio(struct ratio ratio, double centre, double half)
{
    expect_near("ratio", ratio.value, exp(centre), 1e-6);
    expect_near("low", ratio.low, exp(centre - half), 1e-6);
    expect_near("high", ratio.high, exp(centre + half), 1e-6);
}

Test(ratio, errors_of_single_rows_add_in_quadrature)
{
    struct side a = side_of(1, (double[]){log(2)}, 0.03), b = side_of(1, (double[]){log(3)}, 0.04);
    expect_ratio(side_ratio(&a, &b, 0.95), log(1.5), sqrt(pow(atanh(0.03), 2) + pow(atanh(0.04), 2)));
    expect_ratio(side_ratio(&a, &b, 0.99), log(1.5),
                 2.5758293 / NORMAL * sqrt(pow(atanh(0.03), 2) + pow(atanh(0.04), 2)));
}

/* The means of A and B each have the variance 0.01^2 / 3, with 2 degrees of freedom. Their difference has 4
 * degrees of freedom, so t = 2.776. */
Test(ratio, repeated_rows_have_the_interval_of_welch)
{
    static const double logarithms[] = {0, 0.01, -0.01}, higher[] = {0.05, 0.06, 0.04};
    struct side a = side_of(3, logarithms, 0.001), b = side_of(3, higher, NAN);
    expect_ratio(side_ratio(&a, &b, 0.95), 0.05, 2.77644511 * 0.01 * sqrt(2.0 / 3));
}

/* One run of A shows no scatter, so the scatter of B is assumed for it. B's two values differ by d = 0.02, so
 * their standard deviation is d / sqrt(2), with one degree of freedom. */
Test(ratio, a_single_run_has_the_scatter_of_repeated_runs)
{
    static const double errors[] = {0.001, NAN, INFINITY};
    for (size_t i = 0; i < COUNT_OF(errors); i++) {
        struct side a = side_of(1, (double[]){0}, errors[i]),
                    b = side_of(2, (double[]){0.01, -0.01}, errors[i]);
        double half = 12.7062047 * 0.02 / sqrt(2) * sqrt(1 + 1.0 / 2);
        expect_ratio(side_ratio(&a, &b, 0.95), 0, half);
        expect_ratio(side_ratio(&b, &a, 0.95), 0, half);
    }
}

/* The median of A's run is known to 20 %, and the medians of B's runs to 0.5 %. The variance of A is the
 * scatter of B plus the amount by which A's squared error exceeds B's. */
Test(ratio, an_uncertain_single_run_widens_the_interval)
{
    static const double logarithms[] = {0, 0.01, -0.01};
    struct side a = side_of(1, (double[]){0}, tanh(0.2)), b = side_of(3, logarithms, tanh(0.005));
    double excess = (0.2 * 0.2 - 0.005 * 0.005) / (NORMAL * NORMAL);
    expect_ratio(side_ratio(&a, &b, 0.95), 0, 4.30265273 * sqrt(excess + 0.01 * 0.01 * 4 / 3));
}

/* Four rows agree by chance. Each is known to 2 %, so their mean is known to 1 %. */
Test(ratio, rows_that_agree_by_chance_keep_their_own_error)
{
    struct side a = side_of(4, (double[]){0, 0, 0, 0}, tanh(0.02)),
                b = side_of(4, (double[]){0, 0, 0, 0}, tanh(0.02));
    expect_ratio(side_ratio(&a, &b, 0.95), 0, 0.01 * sqrt(2));
}

Test(ratio, equal_rows_without_errors_give_an_exact_ratio)
{
    struct side a = side_of(2, (double[]){0, 0}, 0), b = side_of(1, (double[]){0}, 0);
    expect_ratio(side_ratio(&a, &b, 0.95), 0, 0);
}

Test(ratio, no_interval_if_a_single_row_has_no_error)
{
    static const double errors[] = {NAN, INFINITY, 1, -0.1};
    for (size_t i = 0; i < COUNT_OF(errors); i++) {
        struct side a = side_of(1, (double[]){0}, errors[i]), b = side_of(3, (double[]){0, 0.1, 0.2}, 0.01);
        struct ratio ratio = side_ratio(&a, &b, 0.95);
        cr_expect(isnan(ratio.low) && isnan(ratio.high) && ratio.value > 1, "%g", errors[i]);
        cr_expect_eq(ratio_judge(&ratio, 0.02, false), VERDICT_UNDECIDED);
    }
}

Test(ratio, verdicts_follow_from_the_interval_and_the_margin)
{
    static const struct {
        double low, high;
        enum verdict lower_is_better, higher_is_better;
    } cases[] = {
        {0.99, 1.01, VERDICT_SAME, VERDICT_SAME},
        {1.005, 1.015, VERDICT_SAME, VERDICT_SAME}, /* excludes 1, but is within the margin */
        {1.01, 1.03, VERDICT_UNDECIDED, VERDICT_UNDECIDED},
        {0.9, 1.1, VERDICT_UNDECIDED, VERDICT_UNDECIDED},
        {1.021, 1.03, VERDICT_WORSE, VERDICT_BETTER},
        {0.981, 1.0, VERDICT_SAME, VERDICT_SAME}, /* 1 / 1.02 = 0.98039 */
        {0.98, 1.0, VERDICT_UNDECIDED, VERDICT_UNDECIDED},
        {0.9, 0.98, VERDICT_BETTER, VERDICT_WORSE},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct ratio ratio = {sqrt(cases[i].low * cases[i].high), cases[i].low, cases[i].high};
        cr_expect_eq(ratio_judge(&ratio, 0.02, false), cases[i].lower_is_better, "%zu", i);
        cr_expect_eq(ratio_judge(&ratio, 0.02, true), cases[i].higher_is_better, "%zu", i);
    }
}

/* ---- Simulations ---- */

static uint64_t state = 1;

static double uniform(void)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return ((double)(state >> 11) + 0.5) * 0x1p-53;
}

static double normal(void)
{
    return sqrt(-2 * log(uniform())) * cos(2 * M_PI * uniform());
}

/* The variation of the simulated times. `between` is the standard deviation of the logarithms of the runs'
 * medians. `within` is the standard deviation of the logarithms of a run's samples. A run has one row with
 * `samples` samples, or `epochs` rows with one sample each if `epochs` is not 0. */
struct noise {
    size_t runs, samples;
    double between, within;
    size_t epochs;
};

/* Simulates runs of a program and evaluates their times as fdsl-bench does. `centre` is the logarithm of the
 * program's median time. */
static struct side measure(const struct noise *noise, double centre)
{
    enum { SAMPLES_MAX = 1000 };
    double samples[SAMPLES_MAX];
    struct side side = {0};
    size_t count = noise->epochs ? noise->epochs : noise->samples;
    for (size_t r = 0; r < noise->runs; r++) {
        struct stats stats;
        double run = centre + noise->between * normal();
        for (size_t i = 0; i < count; i++)
            samples[i] = exp(run + noise->within * normal());
        if (noise->epochs) {
            cr_assert_eq(side_add_epochs(&side, samples, count), STATUS_OK);
            continue;
        }
        cr_assert_eq(stats_compute(samples, count, &stats), STATUS_OK);
        side_add(&side, stats.median, stats.median_error);
    }
    return side;
}

/* Fractions of comparisons; comparisons without an interval are not counted. `covered`: the interval contains
 * the true ratio. `verdicts`: the comparison has this verdict. */
struct shares {
    double covered, verdicts[VERDICTS];
};

static void describe(const struct noise *noise)
{
    cr_log_info("%zu runs of %zu %s, between %.3f, within %.3f\n", noise->runs,
                noise->epochs ? noise->epochs : noise->samples, noise->epochs ? "epochs" : "samples",
                noise->between, noise->within);
}

/* Simulates `times` comparisons of a program with another one that takes exp(centre) times as long. */
static struct shares simulate_both(const struct noise *noise_a, const struct noise *noise_b, double centre,
                                   double margin, size_t times)
{
    struct shares shares = {0};
    double known = 0;
    for (size_t i = 0; i < times; i++) {
        struct side a = measure(noise_a, 0), b = measure(noise_b, centre);
        struct ratio ratio = side_ratio(&a, &b, 0.95);
        if (isnan(ratio.low))
            continue;
        known++;
        shares.covered += ratio.low <= exp(centre) && exp(centre) <= ratio.high;
        shares.verdicts[ratio_judge(&ratio, margin, false)]++;
    }
    shares.covered /= known;
    for (size_t i = 0; i < VERDICTS; i++)
        shares.verdicts[i] /= known;
    describe(noise_a);
    describe(noise_b);
    cr_log_info("change %.3f: %.1f %% covered; faster %.1f %%, slower %.1f %%, same %.1f %%\n", centre,
                100 * shares.covered, 100 * shares.verdicts[VERDICT_BETTER],
                100 * shares.verdicts[VERDICT_WORSE], 100 * shares.verdicts[VERDICT_SAME]);
    return shares;
}

static struct shares simulate(const struct noise *noise, double centre, double margin, size_t times)
{
    return simulate_both(noise, noise, centre, margin, times);
}

static const struct noise single[] = {
    {1, 10, 0, 0.05, 0}, {1, 30, 0, 0.05, 0}, {1, 100, 0, 0.05, 0}, {1, 1000, 0, 0.2, 0}};
static const struct noise repeated[] = {
    {2, 50, 0.02, 0.05, 0}, {3, 50, 0.02, 0.05, 0}, {5, 50, 0.05, 0.01, 0}, {3, 50, 0.005, 0.05, 0},
    {3, 50, 0, 0.05, 0},    {5, 20, 0.01, 0.05, 0}, {2, 20, 0.05, 0.01, 0}};
static const struct noise trainings[] = {
    {2, 0, 0.02, 0.005, 8}, {3, 0, 0.02, 0.005, 8}, {5, 0, 0.02, 0.02, 30}, {3, 0, 0.02, 0.005, 4}};

/* Comparisons of one run of a program with several runs of the other program. */
static const struct noise against[][2] = {
    {{1, 100, 0.02, 0.02, 0}, {2, 100, 0.02, 0.02, 0}},  {{1, 100, 0.02, 0.02, 0}, {3, 100, 0.02, 0.02, 0}},
    {{1, 100, 0.02, 0.02, 0}, {10, 100, 0.02, 0.02, 0}}, {{10, 100, 0.02, 0.02, 0}, {1, 100, 0.02, 0.02, 0}},
    {{1, 30, 0, 0.05, 0}, {5, 1000, 0, 0.05, 0}},        {{1, 30, 0.01, 0.05, 0}, {5, 1000, 0.01, 0.05, 0}},
    {{1, 0, 0.02, 0.005, 8}, {3, 0, 0.02, 0.005, 8}}};

static void expect_covered(size_t i, const struct noise *a, const struct noise *b)
{
    struct shares shares = simulate_both(a, b, 0, 0, 2000);
    cr_expect(shares.covered >= 0.93, "%zu: %g", i, shares.covered);
    cr_expect(shares.verdicts[VERDICT_WORSE] <= 0.035, "%zu: %g", i, shares.verdicts[VERDICT_WORSE]);
    cr_expect(shares.verdicts[VERDICT_BETTER] <= 0.035, "%zu: %g", i, shares.verdicts[VERDICT_BETTER]);
}

static void expect_coverage(const struct noise *noise, size_t count)
{
    for (size_t i = 0; i < count; i++)
        expect_covered(i, &noise[i], &noise[i]);
}
Test(ratio, the_interval_of_single_rows_covers_the_ratio)
{
    expect_coverage(single, COUNT_OF(single));
}

Test(ratio, the_interval_of_repeated_rows_covers_the_ratio)
{
    expect_coverage(repeated, COUNT_OF(repeated));
}

/* An effect that differs between runs is the same in all epochs of one run. So a run counts once, with the
 * median of its epochs. */
Test(ratio, the_interval_of_trainings_covers_the_ratio)
{
    expect_coverage(trainings, COUNT_OF(trainings));
}

Test(ratio, the_interval_of_one_run_against_several_covers_the_ratio)
{
    for (size_t i = 0; i < COUNT_OF(against); i++)
        expect_covered(i, &against[i][0], &against[i][1]);
}

/* If the true change equals the margin, the verdicts `slower` and `same` have a probability of at most 2.5 %
 * each. The test allows 3.5 %, because it estimates the probability from 2000 simulated comparisons. */
Test(ratio, a_change_equal_to_the_margin_is_rarely_judged)
{
    for (size_t i = 0; i < COUNT_OF(single); i++) {
        struct shares shares = simulate(&single[i], log(1.02), 0.02, 2000);
        cr_expect(shares.verdicts[VERDICT_WORSE] <= 0.035, "%zu: %g", i, shares.verdicts[VERDICT_WORSE]);
        cr_expect(shares.verdicts[VERDICT_SAME] <= 0.035, "%zu: %g", i, shares.verdicts[VERDICT_SAME]);
    }
}

/* 100 samples that scatter by 4 % give a median with an error of 1 %, the default of --max-error. */
Test(ratio, finds_a_slowdown_of_5_percent_and_no_false_one)
{
    const struct noise noise = {1, 100, 0, 0.04, 0}, quiet = {1, 100, 0, 0.02, 0};
    cr_expect(simulate(&noise, log(1.05), 0.02, 2000).verdicts[VERDICT_WORSE] >= 0.9);
    cr_expect(simulate(&noise, -log(1.05), 0.02, 2000).verdicts[VERDICT_BETTER] >= 0.9);
    cr_expect(simulate(&noise, 0, 0.02, 2000).verdicts[VERDICT_WORSE] <= 0.001);
    cr_expect(simulate(&quiet, 0, 0.02, 2000).verdicts[VERDICT_SAME] >= 0.99);
}

/* If a single training run has at least six epochs, its interval is computed from the times of these epochs.
 */
Test(ratio, the_interval_of_single_trainings_uses_their_epochs)
{
    static const double times[] = {2, 1, 1.01, 0.99, 1.02, 0.98};
    struct side few = {0}, enough = {0};
    cr_assert_eq(side_add_epochs(&few, times, 5), STATUS_OK);
    cr_assert_eq(side_add_epochs(&enough, times, 6), STATUS_OK);
    expect_near("median", exp(few.log_mean), 1.01, 1e-9);
    expect_near("median", exp(enough.log_mean), 1.005, 1e-9);
    cr_expect_eq(few.count, 1);
    struct ratio unknown = side_ratio(&few, &few, 0.95), known = side_ratio(&enough, &enough, 0.95);
    cr_expect(isnan(unknown.low) && known.low < 1 && known.high > 1);
}

/* The intervals of single runs do not include the variation between runs. docs/compare.md warns of this. */
Test(ratio, single_runs_do_not_show_how_runs_scatter)
{
    const struct noise once = {1, 100, 0.02, 0.02, 0}, thrice = {3, 100, 0.02, 0.02, 0};
    cr_expect(simulate(&once, 0, 0.02, 2000).covered < 0.5);
    cr_expect(simulate(&thrice, 0, 0.02, 2000).covered >= 0.93);
}
