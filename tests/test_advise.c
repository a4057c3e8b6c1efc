/* Tests fdsl-bench advise: the decision on invented measurements, and the command on small data sets. */
#include "run/report.h"
#include "shell.h"

#include <math.h>

#include "run/advise.h"

TestSuite(advise, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* ---- The decision ---- */

/* 256 images per 5 ms: a step consumes 51,200 images per second. */
static const struct advice_question five_ms = {
    .step_s = 0.005, .batch = 256, .res = 224, .margin = 0.1, .time_s = 30, .took_s = 20, .estimated = true};

/* A way that was measured in `rounds` rounds. The rates alternate between rate * (1 + scatter) and rate /
 * (1 + scatter). */
static struct advice repeated(const char *name, enum advise_place place, double rate, double scatter,
                              size_t rounds)
{
    struct advice advice = {.name = name, .variant = "v", .place = place, .joules_per_image = NAN};
    for (size_t i = 0; i < rounds; i++)
        advise_add(&five_ms, &advice, i % 2 ? rate / (1 + scatter) : rate * (1 + scatter), NAN, NAN);
    return advice;
}

static struct advice way(const char *name, enum advise_place place, double rate)
{
    struct advice advice = repeated(name, place, rate, 0.02, rate > 0 ? 6 : 0);
    advice.disk_bytes = place >= ADVISE_DISK ? 2e9 : 0;
    advice.memory_bytes = place == ADVISE_MEMORY ? 3e9 : 0;
    return advice;
}

static void expect_words(const char *text, const char *words)
{
    cr_expect(strstr(text, words), "'%s' is not in '%s'", words, text);
}

/* Expects that way number `best` is the best, and that the details contain `words`. */
static void expect_best(const struct advice *advice, size_t count, size_t best, const char *words)
{
    char text[4096], expected[256];
    struct advice_decision decision = advise_decide(&five_ms, advice, count);
    cr_expect(decision.best == best && decision.decided, "%zu (%d), not %zu", decision.best, decision.decided,
              best);
    advise_details(&five_ms, advice, count, &decision, text, sizeof text);
    expect_words(text, words);
    advise_verdict(&five_ms, advice, count, &decision, text, sizeof text);
    snprintf(expected, sizeof expected, "Best here: %s (v); no other way is more than 10 %% faster.",
             advice[best].name);
    cr_expect_str_eq(text, expected);
}

static void expect_undecided(const struct advice *advice, size_t count, const char *verdict)
{
    char text[1024];
    struct advice_decision decision = advise_decide(&five_ms, advice, count);
    cr_expect_not(decision.decided);
    advise_verdict(&five_ms, advice, count, &decision, text, sizeof text);
    cr_expect_str_eq(text, verdict);
}

Test(advise, the_fastest_way_is_best)
{
    struct advice advice[] = {way("generating", ADVISE_GENERATED, 61349), way("the URL", ADVISE_REMOTE, 900),
                              way("disk", ADVISE_DISK, 10000), way("memory", ADVISE_MEMORY, 40000)};
    expect_best(
        advice, 4, 0,
        "Generating (v) delivers 61,300 images/s of 224 x 224 pixels. A step of 5 ms on 256 images "
        "consumes 51,200 images/s, and so the step never waits. A million images take 19.5 s, no disk, "
        "no memory and an unknown amount of energy.");
    advice[0] = way("generating", ADVISE_GENERATED, 999.7);
    expect_best(advice, 4, 3,
                "so the step waits 22 % of the time. A million images take 25 s, 2 GB of disk, 3 ");
    advice[2] = way("disk", ADVISE_DISK, 50000);
    expect_best(advice, 4, 2, "so the step waits 2 % of the time.");
    advice[1] = way("the URL", ADVISE_REMOTE, 1e9);
    expect_best(advice, 4, 1, "The URL (v) delivers 1,000,000,000 images/s");
    cr_expect_not(advice[1].dropped);
    advise_drop(&five_ms, advice, 4);
    cr_expect(advice[0].dropped && !advice[1].dropped && !advice[2].dropped && !advice[3].dropped, "%d%d%d%d",
              advice[0].dropped, advice[1].dropped, advice[2].dropped, advice[3].dropped);
}

Test(advise, long_times_are_printed_in_minutes_or_hours)
{
    struct advice advice = way("disk", ADVISE_REMOTE, 1000);
    advice.memory_bytes = NAN;
    expect_best(&advice, 1, 0, "delivers 1,000 images/s");
    expect_best(&advice, 1, 0, "A million images take 16.7 min, no disk, an unknown amount of memory and");
    advice = way("disk", ADVISE_DISK, 100);
    expect_best(&advice, 1, 0, "delivers 100 images/s");
    expect_best(&advice, 1, 0, "A million images take 2.78 h,");
    advice.joules_per_image = 0.1;
    expect_best(&advice, 1, 0, " and 100 kJ of the GPU's energy.");
}

/* Ways that keep the step busy are equally fast, however fast they are. */
Test(advise, of_equally_fast_ways_the_one_that_needs_least_is_best)
{
    struct advice advice[] = {way("slow", ADVISE_GENERATED, 1000), way("disk", ADVISE_DISK, 60000),
                              way("memory", ADVISE_MEMORY, 900000)};
    expect_best(advice, 3, 1,
                " Memory (v) is not slower and at most 10 % faster, but needs more: 2 GB of disk and 3 GB of "
                "memory.");
    advice[0] = way("slow", ADVISE_GENERATED, 0.96 * 51200); /* inside the margin */
    expect_best(
        advice, 3, 0,
        " Disk (v) is not slower and at most 10 % faster, but needs more: 2 GB of disk and no memory.");
    advice[0] = way("slow", ADVISE_GENERATED, 0.8 * 51200);
    expect_best(advice, 3, 1, " Memory (v) is not slower and");
}

/* A step never waits for generated images, but generating them slows the step down. */
Test(advise, a_way_that_slows_the_step_down_ranks_lower)
{
    struct advice_question measured = five_ms;
    struct advice advice[2] = {{.name = "generating", .variant = "v", .place = ADVISE_GENERATED},
                               {.name = "memory", .variant = "v", .place = ADVISE_MEMORY}};
    measured.estimated = false;
    for (size_t i = 0; i < 4; i++) {
        advise_add(&measured, &advice[0], i ? NAN : 2e6, 0.8 * 51200 + (double)i, 0.01 * (double)i);
        advise_add(&measured, &advice[1], i ? NAN : 8e5, 51200 - (double)i, 0);
    }
    cr_expect_float_eq(advice[0].stall_share, 0.015, 1e-12, "%g", advice[0].stall_share);
    cr_expect_float_eq(advise_ratio(&five_ms, &advice[0], &advice[1]).value, 1.25, 1e-3);
    expect_best(advice, 2, 1, "Memory (v) delivers 800,000 images/s");
    advice[1].measured = false;
    struct advice_decision decision = advise_decide(&measured, advice, 2);
    char text[4096];
    advise_details(&measured, advice, 2, &decision, text, sizeof text);
    expect_words(text, "so the step waits 2 % of the time, but runs at 81 % of its speed. A million");
    cr_expect_not(decision.decided);
    expect_words(text, " Generated images would replace the images of this set, such as photographs; only "
                       "pre-training on formulas can use generated images.");
    advise_verdict(&measured, advice, 2, &decision, text, sizeof text);
    cr_expect_str_eq(text,
                     "Undecided: generating (v) or reading the set, because reading could not be measured; "
                     "see the reasons above.");
}

Test(advise, ways_that_were_not_measured_do_not_count)
{
    struct advice advice[] = {way("generating", ADVISE_GENERATED, 0), way("disk", ADVISE_DISK, 100)};
    char text[64] = "text";
    expect_best(advice, 2, 1, "so the step waits 100 % of the time. A million");
    advice[1].measured = false;
    struct advice_decision decision = advise_decide(&five_ms, advice, 2);
    cr_expect(decision.best == 2 && !decision.decided);
    advise_verdict(&five_ms, advice, 2, &decision, text, sizeof text);
    cr_expect_str_eq(text, "");
    cr_expect_eq(advise_decide(&five_ms, advice, 0).best, 0);
}

Test(advise, rounds_that_failed_do_not_count)
{
    struct advice advice[] = {way("generating", ADVISE_GENERATED, 20000), way("disk", ADVISE_DISK, 30000)};
    advise_miss(&advice[0]);
    advise_add(&five_ms, &advice[1], 1, NAN, NAN);
    cr_expect_float_eq(advise_ratio(&five_ms, &advice[0], &advice[1]).value, 1.5, 1e-9);
    expect_best(advice, 2, 1, "Disk (v)");
}

/* Sets three ways whose rates training runs measured. */
static struct advice_question train_three(struct advice advice[3])
{
    struct advice_question question = five_ms;
    question.estimated = false;
    question.model = "cnn";
    advice[0] = way("generating", ADVISE_GENERATED, 0);
    advice[1] = way("disk", ADVISE_DISK, 0);
    advice[2] = way("memory", ADVISE_MEMORY, 0);
    return question;
}

/* A run of half the rate changes neither the rate of its way nor the verdict, and the details name it. */
Test(advise, a_delayed_run_does_not_count)
{
    struct advice advice[3];
    struct advice_question question = train_three(advice);
    for (size_t round = 0; round < 4; round++)
        for (size_t i = 0; i < 3; i++)
            advise_add(&question, &advice[i], NAN,
                       1000 * (double)(i + 10) * (1 + 0.01 * (double)(round * i % 3)) *
                           (i == 1 && round == 2 ? 0.5 : 1),
                       0);
    cr_expect_not(advise_lacks_rounds(&question, advice, 3));
    advise_note_noise(&question, advice, 3);
    for (size_t i = 0; i < 3; i++)
        for (size_t round = 0; round < 4; round++)
            cr_expect_eq(advice[i].off[round], i == 1 && round == 2, "%zu, round %zu", i, round);
    cr_expect(fabs(advise_reached(&advice[1], 0.95).value / 11000 - 1) < 0.02);
    cr_expect(advise_lacks_rounds(&question, advice, 3), "three of six common rounds");
    char text[4096];
    const struct advice_decision decision = advise_decide(&question, advice, 3);
    advise_details(&question, advice, 3, &decision, text, sizeof text);
    expect_words(text, " 1 of 12 runs do not count, because they do not fit the others;");
}

/* A way that was dropped after three rounds, one of which is off, has no interval. It is slower all the same.
 */
Test(advise, a_way_that_was_dropped_is_slower)
{
    struct advice advice[3];
    struct advice_question question = train_three(advice);
    for (size_t round = 0; round < 7; round++)
        for (size_t i = 0; i < 3; i++)
            if (i != 1 || round < 3)
                advise_add(&question, &advice[i], NAN,
                           (i == 1 ? 500 : 1000) * (i == 1 && round == 2 ? 0.5 : 1), 0);
    advice[1].dropped = true;
    advise_conclude(&question, advice, 3);
    cr_expect(isnan(advise_ratio(&question, &advice[0], &advice[1]).high));
    char text[4096];
    const struct advice_decision decision = advise_decide(&question, advice, 3);
    advise_details(&question, advice, 3, &decision, text, sizeof text);
    expect_words(text, " Memory (v) is not slower and at most 10 % faster");
    cr_expect_not(strstr(text, "Disk (v)"), "%s", text);
    advise_verdict(&question, advice, 3, &decision, text, sizeof text);
    cr_expect_str_eq(text, "Best here: generating (v); no other way is more than 10 % faster.");
}

/* Rounds 1 to 3 are 1, 0.9 and 1.1 times as fast, for all ways. The ratio of the first two is 1.2 in each of
 * them by chance, that of the last two scatters as much as all rates do. */
Test(advise, the_noise_of_all_ways_counts)
{
    static const double rates[5][3] = {{1000, 900, 1100},
                                       {1200, 1080, 1320},
                                       {1050, 920, 1080},
                                       {2000 * 1.04, 1800 * 0.97, 2200},
                                       {3000 * 0.96, 2700 * 1.03, 3300 * 1.01}};
    struct advice_question question = five_ms;
    struct advice advice[5] = {0};
    question.estimated = false;
    question.model = "cnn";
    for (size_t i = 0; i < 5; i++)
        for (size_t round = 0; round < 3; round++)
            advise_add(&question, &advice[i], NAN, rates[i][round], 0);
    const struct ratio lucky = advise_ratio(&question, &advice[0], &advice[1]),
                       unlucky = advise_ratio(&question, &advice[3], &advice[4]);
    advise_note_noise(&question, advice, 5);
    cr_expect(question.noise_freedom == 15 - 5 - 3 + 1 && sqrt(question.noise) > 0.01 &&
                  sqrt(question.noise) < 0.05,
              "%g, %g", question.noise_freedom, sqrt(question.noise));
    const struct ratio first = advise_ratio(&question, &advice[0], &advice[1]),
                       last = advise_ratio(&question, &advice[3], &advice[4]);
    cr_expect_float_eq(first.value, 1.2, 1e-9);
    cr_expect(first.low < 1.18 && first.high > 1.22 && lucky.low > 1.199 && lucky.high < 1.201, "%g to %g",
              first.low, first.high);
    cr_expect(last.high / last.low < 0.7 * unlucky.high / unlucky.low, "%g to %g instead of %g to %g",
              last.low, last.high, unlucky.low, unlucky.high);
    /* Without any noise, two runs may still differ. */
    for (size_t i = 0; i < 2; i++)
        for (size_t round = 0; round < 3; round++)
            advice[i].reached_per_s[round] = 100;
    advise_note_noise(&question, advice, 2);
    const struct ratio equal = advise_ratio(&question, &advice[0], &advice[1]);
    cr_expect(question.noise == 0 && equal.low < 0.995 && equal.high > 1.005, "%g to %g", equal.low,
              equal.high);
}

static double uniform(uint32_t *state)
{
    *state = *state * UINT32_C(1664525) + UINT32_C(1013904223);
    return (*state + 0.5) / 4294967296.0;
}

/* Returns a normally distributed random number (Box and Muller). */
static double normal(uint32_t *state)
{
    const double unit[] = {uniform(state), uniform(state)};
    return sqrt(-2 * log(unit[0])) * cos(2 * 3.14159265358979 * unit[1]);
}

/* Simulates advise with a network: 3 to 5 rounds, with looks after 3, 4 and 5, and the best way. Of the runs,
 * a share `slow` has 0.4 to 0.9 of its rate, because another process delays it. For them, up to ten rounds.
 */
static size_t simulate(const double *rates, size_t count, double noise, double slow, uint32_t *state)
{
    struct advice_question question = five_ms;
    struct advice advice[8];
    question.estimated = false;
    question.model = "cnn";
    for (size_t i = 0; i < count; i++)
        advice[i] =
            (struct advice){.name = "a", .variant = "v", .place = (enum advise_place)(ADVISE_GENERATED + i)};
    for (size_t round = 0; round < 5 || (round < 10 && advise_lacks_rounds(&question, advice, count));
         round++) {
        const double load = 0.1 * normal(state);
        for (size_t i = 0; i < count; i++) {
            const double delay = uniform(state) < slow ? 0.4 + 0.5 * uniform(state) : 1;
            if (!advice[i].dropped)
                advise_add(&question, &advice[i], NAN, delay * rates[i] * exp(load + noise * normal(state)),
                           0);
        }
        if (round < 2 || round == 5 || round == 7 || round == 9) /* as advise.c looks */
            continue;
        advise_note_noise(&question, advice, count);
        advise_drop(&question, advice, count);
        const struct advice_decision decision = advise_decide(&question, advice, count);
        if (decision.decided)
            return decision.best;
    }
    advise_conclude(&question, advice, count);
    const struct advice_decision decision = advise_decide(&question, advice, count);
    return decision.decided ? decision.best : count;
}

/* Ways whose rates are not just at the margin give the same verdict again and again, although other processes
 * delay one of 20 or of 10 runs: on average, at most one of 500 verdicts differs. */
Test(advise, verdicts_repeat)
{
    static const struct {
        double rates[5], noise;
        size_t best;
    } cases[] = {{{80, 50, 82, 84, 85}, 0.03, 0},
                 {{80, 60, 100, 101, 103}, 0.03, 2},
                 {{40, 42, 90, 120, 122}, 0.03, 3},
                 {{100, 20, 101, 100, 99}, 0.02, 0}};
    uint32_t state = 2;
    int all = 0;
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int slow = 5; slow <= 10; slow += 5) {
            int wrong = 0;
            for (int run = 0; run < 500; run++)
                wrong += simulate(cases[i].rates, 5, cases[i].noise, slow / 100.0, &state) != cases[i].best;
            cr_expect(wrong <= 4, "case %zu, %d %% slow: %d of 500 verdicts differ", i, slow, wrong);
            all += wrong;
        }
    cr_expect((size_t)all <= 2 * COUNT_OF(cases), "%d of %zu verdicts differ", all, 1000 * COUNT_OF(cases));
}

Test(advise, too_few_or_too_different_rounds_are_undecided)
{
    struct advice once[] = {repeated("generating", ADVISE_GENERATED, 20000, 0, 1),
                            repeated("disk", ADVISE_DISK, 40000, 0, 1)};
    expect_undecided(
        once, 2,
        "Undecided: generating (v) or disk (v), because 1 round cannot tell which is faster; try "
        "--time 120, or a less busy machine.");
    /* Both keep the step busy in both rounds, so their capped rates have no scatter. */
    struct advice lucky[] = {repeated("generating", ADVISE_GENERATED, 90000, 0.01, 2),
                             repeated("disk", ADVISE_DISK, 90000, 0.01, 2)};
    expect_undecided(
        lucky, 2,
        "Undecided: generating (v) or disk (v), because 2 rounds cannot tell which is faster; try "
        "--time 120, or a less busy machine.");
    struct ratio rate = advise_mean(lucky[0].reached_per_s, 2, 0.95);
    cr_expect(rate.value > 51199 && isnan(rate.low) && isnan(rate.high));
    struct advice enough[] = {repeated("generating", ADVISE_GENERATED, 90000, 0.01, ADVISE_ROUNDS_MIN),
                              repeated("disk", ADVISE_DISK, 90000, 0.01, ADVISE_ROUNDS_MIN)};
    expect_best(enough, 2, 0, "so the step never waits");
    struct advice often[] = {repeated("generating", ADVISE_GENERATED, 20000, 0.2, 6),
                             repeated("disk", ADVISE_DISK, 21000, 0, 6)};
    expect_undecided(
        often, 2,
        "Undecided: generating (v) or disk (v), because 6 rounds only show that the latter is 0.8 "
        "to 1.4 times as fast; try --time 600, or a less busy machine.");
}

/* The load of the machine grows tenfold, for both ways. */
Test(advise, slow_changes_of_the_load_do_not_matter)
{
    struct advice advice[] = {{.name = "generating", .variant = "v", .place = ADVISE_GENERATED},
                              {.name = "disk", .variant = "v", .place = ADVISE_DISK}};
    for (size_t i = 0; i < 6; i++) {
        double idle = pow(10, -(double)i / 5);
        advise_add(&five_ms, &advice[0], 20000 * idle, NAN, NAN);
        advise_add(&five_ms, &advice[1], (24000 + 100 * (double)(i % 2)) * idle, NAN, NAN);
    }
    expect_best(advice, 2, 1, "Disk (v)");
}

/* The same bytes cannot come faster from disk than from memory. */
Test(advise, disk_never_beats_memory)
{
    struct advice advice[] = {way("disk", ADVISE_DISK, 40000), way("memory", ADVISE_MEMORY, 20000)};
    expect_best(advice, 2, 0,
                " Disk (v) seemed 100 % faster than memory. This is noise: the same bytes cannot come faster "
                "from there.");
    advise_drop(&five_ms, advice, 2);
    cr_expect_not(advice[1].dropped);
    struct advice turned[] = {advice[1], advice[0]}; /* memory as if it needed less */
    expect_best(turned, 2, 0, "Memory (v)");
    turned[1].variant = "w"; /* other code reads the disk */
    cr_expect_eq(advise_decide(&five_ms, turned, 2).best, 1);
}

/* Decides many times with random rates. With 98 % confidence, each kind of wrong decision has a probability
 * of 1 %. */
Test(advise, wrong_decisions_are_rare)
{
    enum { TIMES = 4000, ROUNDS = 6 };
    const double truths[] = {1, 1.1, 1.4};
    uint32_t state = 1;
    for (size_t t = 0; t < COUNT_OF(truths); t++) {
        size_t first = 0, second = 0;
        for (size_t i = 0; i < TIMES; i++) {
            struct advice advice[] = {{.name = "a", .variant = "v", .place = ADVISE_DISK},
                                      {.name = "b", .variant = "w", .place = ADVISE_MEMORY}};
            for (size_t round = 0; round < ROUNDS; round++)
                for (size_t w = 0; w < 2; w++) {
                    double normal = -6; /* a sum of 12 uniform numbers */
                    for (size_t u = 0; u < 12; u++) {
                        state = 1664525 * state + 1013904223;
                        normal += state / 4294967296.0;
                    }
                    advise_add(&five_ms, &advice[w], 10000 * (w ? truths[t] : 1) * exp(0.05 * normal), NAN,
                               NAN);
                }
            struct advice_decision decision = advise_decide(&five_ms, advice, 2);
            first += decision.decided && decision.best == 0;
            second += decision.decided && decision.best == 1;
        }
        cr_expect(truths[t] > 1.1 || second < 0.015 * TIMES, "%g: %zu", truths[t], second);
        cr_expect(truths[t] < 1.1 || first < 0.015 * TIMES, "%g: %zu", truths[t], first);
        cr_expect(truths[t] != 1.4 || second > 0.9 * TIMES, "%zu", second);
        cr_expect(truths[t] != 1 || first > 0.2 * TIMES, "%zu", first);
    }
}

/* ---- The output ---- */

/* Every number is different, so that no column can have the value of another. */
Test(advise, columns_have_their_own_values)
{
    struct advice_question question = five_ms;
    question.samples = 1234;
    question.bytes = 5.6e9;
    question.measured = 700;
    question.measured_bytes = 4.2e9;
    question.estimated = false;
    struct advice advice[] = {{.name = "disk",
                               .variant = "w",
                               .reason = {.text = "no disk"},
                               .stall_share = NAN,
                               .disk_bytes = NAN,
                               .memory_bytes = NAN,
                               .joules_per_image = NAN},
                              {.name = "the URL", .variant = "u", .reason = {.text = "no network"}},
                              {.name = "files from disk", .variant = "x", .reason = {.text = "no disk"}},
                              {.name = "memory",
                               .variant = "v",
                               .place = ADVISE_MEMORY,
                               .disk_bytes = 2e9,
                               .memory_bytes = 3e9,
                               .joules_per_image = 0.5},
                              {.name = "fast", .variant = "f", .place = ADVISE_GPU_MEMORY},
                              {.name = "slow", .variant = "s", .place = ADVISE_GPU_MEMORY}};
    for (size_t i = 0; i < 4; i++) {
        advise_add(&question, &advice[3], i % 2 ? 12000 : 12500, i % 2 ? 38000 : 40000, 0.25);
        advise_add(&question, &advice[4], i ? NAN : 12600, i % 2 ? 39900 : 42000, 0.125);
        advise_add(&question, &advice[5], i % 2 ? 11000 : 12000, i % 2 ? 100 : 1000, 0.5);
    }
    cr_assert_eq(chdir(folder), 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_not_null(freopen(i ? "csv" : "table", "w", stdout));
        cr_assert_eq(advise_print("set", i ? FORMAT_CSV : FORMAT_TABLE, &question, advice, COUNT_OF(advice)),
                     STATUS_OK);
    }
    EXPECT(0, "cat table csv");
    EXPECT_OUT("advise: data set, 1234 samples, 5.6 GB (measured: 700 samples, 4.2 GB); images 224 x 224; "
               "batch 256; a step takes 5 ms; 4 rounds in 20 s\n");
    EXPECT_OUT("\nway                    variant        images/s  +-95%  waits/%     used/s  +-95%  disk/GB  "
               "memory/GB J/1000 images speed\n"
               "memory                 v                 12247   3.8%       25      38987   4.8%        2  "
               "        3           500 best\n"
               "fast                   f                 12600      -     12.5      40937   4.8%        0  "
               "        0             0 equal\n"
               "slow                   s                 11489   8.3%       50        316   729%        0  "
               "        0             0 slower\n"
               "\nNot measured (no disk): disk (w), files from disk (x)\n"
               "\nNot measured (no network): the URL (u)\n"
               "\nMemory (v) delivers 12,200 images/s of 224 x 224 pixels. A step of 5 ms on 256 images "
               "consumes\n51,200 images/s, and so the step waits 25 %");
    EXPECT_OUT("\nBest here: memory (v); no other way is more than 10 % faster.\nway,");
    EXPECT_OUT("way,variant,best,images_per_s,images_per_s_low,images_per_s_high,stall_share,reached_per_s,"
               "reached_per_s_low,reached_per_s_high,rounds,disk_bytes,memory_bytes,joules_per_image,speed,"
               "reason\n"
               "disk,w,0,,,,,,,,0,,,,,no disk\n"
               "the URL,u,0,");
    EXPECT_OUT("\nmemory,v,1,12247.4");
    EXPECT_OUT(",0.25,38987.1", ",4,2e+09,3e+09,0.5,best,\n");
}

/* With --compute train:MODEL, the page names the network, what measured its step, and a command. */
Test(advise, the_page_names_the_network_and_the_command)
{
    struct advice_question question = five_ms;
    struct advice advice[] = {way("generating", ADVISE_GENERATED, 60000), way("disk", ADVISE_DISK, 10000)};
    question.estimated = false;
    question.model = "vit-tiny";
    question.engine = "train-vit";
    char command[] = "fdsl-bench --workload train --data 'a b' --feed live";
    advice[0].command = command;
    cr_assert_eq(chdir(folder), 0);
    cr_assert_not_null(freopen("table", "w", stdout));
    cr_assert_eq(advise_print("set", FORMAT_TABLE, &question, advice, 2), STATUS_OK);
    EXPECT(0, "cat table");
    EXPECT_OUT("; a step takes 5 ms (vit-tiny, measured with train-vit); 6 rounds in 20 s\n",
               "\n\nTo train on these images:\n    fdsl-bench --workload train --data 'a b' --feed live\n"
               "\nBest here: generating (v); ");
    if (format_check(FORMAT_JSON) != STATUS_OK)
        return;
    cr_assert_not_null(freopen("json", "w", stdout));
    cr_assert_eq(advise_print("set", FORMAT_JSON, &question, advice, 2), STATUS_OK);
    EXPECT(0, "cat json");
    EXPECT_OUT("\"model\": \"vit-tiny\"", "\"engine\": \"train-vit\"",
               "\"command\": \"fdsl-bench --workload train --data 'a b' --feed live\"");
}

/* ---- With a network ---- */

/* Two ways, whose rates scatter by 1 %, and the limit. */
static const struct advice_question *trained(struct advice *advice, double live, double read)
{
    static struct advice_question question;
    question = five_ms;
    question.estimated = false;
    question.model = "vit-tiny";
    question.engine = "train-vit";
    question.samples = 100000;
    question.nodes = 4;
    question.gradient_bytes = 20e6;
    question.exchange_ranks = 2;
    question.exchange_s = (struct ratio){0.002, 0.001, 0.004};
    question.prepare_s = (struct ratio){1e-4, 0.8e-4, 1.25e-4};
    question.prepare_bytes = 1e4;
    const char *const names[] = {"the step without input", "generating", "a prepared set, memory"};
    const enum advise_place places[] = {ADVISE_CONSTANT, ADVISE_GENERATED, ADVISE_PREPARED};
    const double rates[] = {51200, live, read};
    for (size_t w = 0; w < 3; w++) {
        advice[w] =
            (struct advice){.name = names[w], .variant = w == 2 ? "load" : "live", .place = places[w]};
        for (size_t i = 0; i < 4; i++)
            advise_add(&question, &advice[w], NAN, rates[w] * (i % 2 ? 1.01 : 1 / 1.01), 0);
    }
    advise_conclude(&question, advice, 3);
    return &question;
}

/* A prepared set has other images, so it does not stand in for the set if that could not be read. */
Test(advise, a_set_that_cannot_be_read_leaves_the_verdict_undecided)
{
    struct advice advice[4];
    const struct advice_question *question = trained(advice, 20000, 20100);
    cr_expect(advise_decide(question, advice, 3).decided);
    advice[3] = (struct advice){.name = "shards from memory", .variant = "load", .place = ADVISE_MEMORY};
    advise_miss(&advice[3]);
    struct advice_decision decision = advise_decide(question, advice, 4);
    cr_expect(!decision.decided && decision.rival == 4);
}

/* The limit is faster than all ways, but delivers no images. */
Test(advise, the_step_without_input_is_never_best)
{
    struct advice advice[3];
    const struct advice_question *question = trained(advice, 20000, 20100);
    struct advice_decision decision = advise_decide(question, advice, 3);
    cr_expect(decision.decided && decision.best == 1);
    advise_drop(question, advice, 3);
    cr_expect(!advice[0].dropped && !advice[1].dropped && !advice[2].dropped);
    cr_expect_float_eq(question->step_s, 0.005, 1e-9);
    question = trained(advice, 20000, 30000);
    cr_expect_eq(advise_decide(question, advice, 3).best, 2);
}

/* An open difference is no difference at the end, unless nothing is known about it. */
Test(advise, with_a_network_open_differences_count_as_equal_at_the_end)
{
    const double scatters[] = {1.03, 3};
    for (size_t s = 0; s < 2; s++) {
        struct advice advice[3];
        struct advice_question question = *trained(advice, 20000, 22000);
        for (size_t i = 0; i < 4; i++)
            advice[2].reached_per_s[i] = 22000 * (i % 2 ? scatters[s] : 1 / scatters[s]);
        question.over = false;
        cr_expect_not(advise_decide(&question, advice, 3).decided);
        question.over = true;
        struct advice_decision decision = advise_decide(&question, advice, 3);
        cr_expect(decision.decided == (s == 0) && decision.best == 1);
        char text[1024];
        advise_verdict(&question, advice, 3, &decision, text, sizeof text);
        if (s == 0)
            cr_expect_str_eq(
                text, "Best here: generating (live); no other way is certainly more than 10 % faster.");
    }
}

/* 100 us per image are saved by an image that takes 25 us instead of 50 in 4 epochs. */
Test(advise, preparing_pays_after_some_epochs_or_never)
{
    struct advice advice[3];
    const struct advice_question *question = trained(advice, 20000, 40000);
    struct ratio pays = advise_pays(question, &advice[1], &advice[2]);
    cr_expect_float_eq(pays.value, 4, 1e-6, "%g", pays.value);
    cr_expect(pays.low < 3.21 && pays.low > 2.8 && pays.high > 4.99 && pays.high < 5.6, "%g %g", pays.low,
              pays.high);
    question = trained(advice, 20000, 10000);
    cr_expect(isinf(advise_pays(question, &advice[1], &advice[2]).value));
    question = trained(advice, 20000, 20000);
    for (size_t i = 0; i < 4; i++)
        advice[2].reached_per_s[i] = 20000 * (i % 2 ? 1.1 : 1 / 1.1);
    cr_expect(isnan(advise_pays(question, &advice[1], &advice[2]).value));
    cr_expect(isnan(advise_pays(question, NULL, &advice[2]).value));
}

/* 256 images take 12.8 ms, and the exchange 1 to 4 ms. */
Test(advise, rates_of_several_nodes_follow_from_the_step_and_the_exchange)
{
    struct advice advice[3];
    struct advice_question question = *trained(advice, 20000, 40000);
    struct ratio rate = advise_on_nodes(&question, &advice[1]);
    cr_expect_float_eq(rate.value, 4 * 256 / 0.0148, 1, "%g", rate.value);
    cr_expect(rate.low < 4 * 256 / 0.0168 && rate.low > 0.95 * 4 * 256 / 0.0168, "%g", rate.low);
    cr_expect(rate.high > 4 * 256 / 0.0138 && rate.high < 1.05 * 4 * 256 / 0.0138, "%g", rate.high);
    question.overlaps = true;
    rate = advise_on_nodes(&question, &advice[1]);
    cr_expect(rate.high > 80000 && rate.high < 1.05 * 80000, "%g", rate.high);
    question.exchange_s = (struct ratio){0.03, 0.02, 0.04};
    cr_expect_float_eq(advise_on_nodes(&question, &advice[1]).high, 4 * 256 / 0.02, 1);
}

Test(advise, the_page_has_the_costs_of_an_epoch)
{
    struct advice advice[3];
    const struct advice_question *question = trained(advice, 20000, 40000);
    advice[2].disk_bytes = 1e9;
    advice[2].memory_bytes = 2e9;
    advice[2].joules_per_image = 0.01;
    cr_assert_eq(chdir(folder), 0);
    cr_assert_not_null(freopen("table", "w", stdout));
    cr_assert_eq(advise_print("set", FORMAT_TABLE, question, advice, 3), STATUS_OK);
    EXPECT(0, "cat table");
    EXPECT_OUT(
        "(vit-tiny, trained with train-vit)",
        "\na prepared set, memory load          40000   1.8%    78.1        0       2.5         1        "
        "1          2 best\n",
        "It takes less time than generating in each epoch from 4 epochs on\n(4 to 6).\n",
        "\n4 nodes, each with 256 images per step: an all-reduce of 20 MB of gradients takes 2 ms (1 to 4)",
        "\ngenerating             live          69189 ");
}

/* ---- The command ---- */

#if defined(HAVE_XXHASH)

/* The verdict is the last line. On a busy machine it may be undecided. */
#define VERDICT_BEST "\n\nBest here: "
#define VERDICT_OPEN "\n\nUndecided: "

#define ADVISE       "$P advise --compute 1000 --batch 4 --time 5 "

/* Returns whether the output names a way of which nothing was measured, such as "disk (v)". Line ends may
 * be inside the name. */
static bool says_missing(const char *way)
{
    char *text = strdup(out);
    for (char *end = text; (end = strchr(end, '\n'));)
        *end = ' ';
    const char *missing = strstr(text, " Not measured (");
    bool says_way = missing && strstr(missing, way);
    free(text);
    return says_way;
}

Test(advise, each_way_to_get_images_is_measured)
{
    EXPECT(0,
           "$P --prepare d --from synth --res 24 --samples 12 --shards 2 && " ADVISE "--data d --out rows");
    cr_expect(says("\nshards from memory "), "%s", out);
    cr_expect(says("\nshards from disk ") || says_missing("shards from disk (shards-omp)"), "%s", out);
    EXPECT_OUT("\ngenerating on the ");
    cr_expect(says(VERDICT_BEST) || says(VERDICT_OPEN), "%s", out);
    EXPECT_PRINTS(0, "rates only\n",
                  "awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next } $(at[\"copy_share\"]) "
                  "$(at[\"displacement\"]) != \"\" || $(at[\"items_per_s\"]) <= 0 { exit 1 } END { print "
                  "\"rates only\" }' rows/load.csv");
    EXPECT(
        0,
        "grep -c ^synth/ rows/synth.csv && grep -c ^load/ rows/load.csv && awk -F, 'NR == 1 { for (i = 1; i "
        "<= NF; i++) at[$i] = i } END { print $(at[\"res\"]) }' rows/synth.csv");
    cr_expect(says("24"), "the generated images have another size: %s", out);
}

#ifdef _OPENMP
/* Computes the columns from the rows of the measurements, which --out keeps, and from the data set. A step of
 * 0.1 ms consumes 120,000 images per second, so that it waits for some of the sources. */
static const char values_check[] =
    "import csv, json, math, os\n"
    "STEP_S, BATCH, RES, CHANNELS = 1e-4, 12, 24, 1\n"
    "COLUMNS = ['images_per_s', 'stall_share', 'reached_per_s', 'rounds', 'disk_bytes', 'memory_bytes',\n"
    "           'joules_per_image']\n"
    "WAYS = [('generating on the CPU', 'synth', ''), ('shards from disk', 'load', 'cold'),\n"
    "        ('shards from memory', 'load', 'warm')]\n"
    "disk = sum(os.path.getsize('d/' + name) for name in os.listdir('d') if name.endswith('.tar'))\n"
    "mean = lambda values: math.exp(sum(map(math.log, values)) / len(values))\n"
    "def expected(kind):\n"
    "    for way, workload, cache in WAYS:\n"
    "        with open(f'{kind}/{workload}.csv') as file:\n"
    "            rows = [row for row in csv.DictReader(file) if row.get('cache', '') == cache]\n"
    "        if not rows:\n"
    "            assert cache == 'cold', f'{way} was not measured'  # some file systems keep files in "
    "memory\n"
    "            continue\n"
    "        speeds, needed = [float(row['items']) / float(row['time_mean_s']) for row in rows], BATCH / "
    "STEP_S\n"
    "        reached = mean([min(speed, needed) for speed in speeds])\n"
    "        memory = float(rows[-1]['peak_memory_bytes']) if cache else RES * RES * CHANNELS * BATCH\n"
    "        yield way, [mean(speeds), 1 - reached / needed, reached, len(rows), disk if cache else 0,\n"
    "                    memory + (disk if cache == 'warm' else 0), None]\n"
    "def number(text):\n"
    "    return None if text in ('', None) else float(text)\n"
    "def compare(kind, rows):\n"
    "    for way, values in expected(kind):\n"
    "        for column, value in zip(COLUMNS, values):\n"
    "            got = number(rows[way][column])\n"
    "            same = got == value if value is None or got is None else abs(got - value) <= 1e-6 * "
    "abs(value) + 1e-12\n"
    "            assert same or column == 'rounds' and got > value, f'{kind}: {way}: {column} is {got}, not "
    "{value}'\n"
    "        low, high = number(rows[way]['images_per_s_low']), number(rows[way]['images_per_s_high'])\n"
    "        assert values[3] < 3 or low < values[0] < high, (low, high)\n"
    "    for row in rows.values():\n"
    "        assert (row['images_per_s'] in ('', None)) == bool(row['reason']), row\n"
    "    return [way for way, row in rows.items() if row['best'] in ('1', 1)]\n"
    "def rows_of(rows):\n"
    "    return {row['way']: row for row in rows if row['variant'] in ('omp', 'shards-omp')}\n"
    "with open('csv.txt') as file:\n"
    "    assert len(compare('csv', rows_of(csv.DictReader(file)))) <= 1\n"
    "if os.path.exists('json.txt'):\n"
    "    with open('json.txt') as file:\n"
    "        document = json.load(file)\n"
    "    best = compare('json', rows_of(document['rows']))\n"
    "    about = document['advice']\n"
    "    assert (about['batch'], about['step_s'], about['res']) == (BATCH, STEP_S, RES), about\n"
    "    assert about['decided'] == len(best) and about['verdict'].startswith(\n"
    "        'Best here: ' + best[0] if best else 'Undecided: '), about\n"
    "with open('table.txt') as file:\n"
    "    text = file.read()\n"
    "assert f'data d, 12 samples, {disk / 1e9:.3g} GB; images 24 x 24; batch 12; a step takes 0.1 ms' in "
    "text, text\n"
    "assert text.split('\\n')[-2].startswith(('Best here: ', 'Undecided: ')), text\n"
    "for way, values in expected('table'):\n"
    "    cells = next(line for line in text.split('\\n') if line.startswith(way) and '-gpu' not in line)"
    "[35:].split()\n"
    "    wanted = [values[0], None, 100 * values[1], values[2], None, values[4] / 1e9, values[5] / 1e9]\n"
    "    assert cells.pop() in ('best', 'equal', 'slower', 'open') and cells.pop() == 'unknown', cells\n"
    "    assert len(cells) == len(wanted), cells\n"
    "    for cell, value in zip(cells, wanted):\n"
    "        if value is not None:\n"
    "            assert abs(float(cell) - value) <= 0.006 * abs(value) + 1e-9, f'table: {way}: {cell} is not "
    "{value}'\n"
    "        else:\n"
    "            assert cell == '-' or float(cell.rstrip('%')) >= 0, cell\n";

Test(advise, values_are_those_of_the_rows_and_the_set)
{
    static const char *const formats[] = {"table", "csv", "json"};
    if (run("python3 -c ''") != 0)
        cr_skip_test("python3 is not installed");
    put_text("check.py", values_check);
    EXPECT(0, "$P --prepare d --from synth --res 24 --samples 12 --shards 2 --encode npy");
    for (size_t i = 0; i < COUNT_OF(formats); i++) {
        if (run("CUDA_VISIBLE_DEVICES= $P advise --compute 0.1 --batch 12 --time 2 --data d --out %s "
                "--format %s >%s.txt 2>err.txt",
                formats[i], formats[i], formats[i]) == 0)
            continue;
        EXPECT(0, "grep 'this build has no jansson' err.txt && rm %s.txt", formats[i]);
    }
    EXPECT(0, "python3 check.py 2>&1");
}
#endif

/* Computes the columns of training runs from their rows: those of the first epoch of each run do not count.
 * Each measurement is a run of its own, because no run waits with OMP_WAIT_POLICY=active. */
static const char training_check[] =
    "import csv, itertools, json, math, os\n"
    "with open('json.txt') as file:\n"
    "    document = json.load(file)\n"
    "with open('rows/train.csv') as file:\n"
    "    rows = list(csv.DictReader(file))\n"
    "runs = []\n"
    "for row in rows:\n"
    "    if row['epoch'] == '1':\n"
    "        runs.append([])\n"
    "    else:\n"
    "        runs[-1].append(row)\n"
    "rates = {}\n"
    "for run in runs[1:]:  # the first one only measures how long runs must be\n"
    "    key = run[0]['feed'], bool(run[0]['resident_bytes']), 'prepared' in run[0]['data']\n"
    "    of_epochs = sorted(float(row['items']) / float(row['time_mean_s']) for row in run)\n"
    "    rates.setdefault(key, []).append(of_epochs[len(of_epochs) // 2])\n"
    "ways = {row['way']: row for row in document['rows']}\n"
    "about = document['advice']\n"
    "mean = lambda values: math.exp(sum(map(math.log, values)) / len(values))\n"
    "def fits(rate, runs):  # runs that another process delayed do not count\n"
    "    return any(abs(rate / mean(some) - 1) < 1e-5 for n in range(len(runs), 0, -1)\n"
    "               for some in itertools.combinations(runs, n))\n"
    "def expect(way, key):\n"
    "    if ways[way]['reason']:  # on a busy machine\n"
    "        assert 'was over before the first measurement' in ways[way]['reason'], ways[way]\n"
    "        return\n"
    "    rate = ways[way]['reached_per_s']\n"
    "    assert fits(rate, rates[key]), (way, ways[way], rates)\n"
    "    assert abs(ways[way]['epoch_s'] * rate / 40 - 1) < 1e-5, ways[way]\n"
    "    assert ways[way]['rounds'] == len(rates[key]), (way, rates)\n"
    "    t = about['batch'] / rate + about['exchange_s']\n"
    "    assert abs(ways[way]['nodes_per_s'] / (3 * about['batch'] / t) - 1) < 1e-5, ways[way]\n"
    "expect('the step without input', ('constant', False, False))\n"
    "expect('generating', ('live', False, False))\n"
    "expect('a prepared set, memory', ('load', False, True))\n"
    "expect('files in host memory', ('load', True, False))\n"
    "assert fits(about['batch'] / about['step_s'], rates['constant', False, False]), about\n"
    "assert about['epoch_images'] == 40 and about['prepare_s_per_image'] > 0, about\n"
    "disk = sum(os.path.getsize('d/' + name) for name in os.listdir('d') if name.endswith('.tar'))\n"
    "for way, size in ('shards from memory', disk), ('generating', 0):\n"
    "    assert ways[way]['reason'] or ways[way]['disk_bytes'] == size, ways\n"
    "# Twice the bytes between 2 ranks take 4 ms; between 3 ranks, 4 / 3 as many bytes cross a link.\n"
    "assert abs(about['exchange_s'] - 0.002 * (2 / 3) / (1 / 2)) < 1e-6, about\n"
    "assert ways['generated and read']['reason'] or ways['generated and read']['mix'], ways\n"
    "assert ways['the set in GPU memory']['reason'] == 'there is no GPU', ways\n";

Test(advise, with_a_network_the_values_are_those_of_training_runs)
{
    if (run("python3 -c ''") != 0 || format_check(FORMAT_JSON) != STATUS_OK)
        cr_skip_test("python3 or jansson is not installed");
    put_text("check.py", training_check);
    EXPECT(0, "$P --prepare d --from synth --res 16 --classes 2 --samples 40 --shards 2");
    EXPECT(
        0,
        "p=$((4 * (16 * 16 * 3 + 1) * 10)); printf 'rank,ranks,array_bytes,time_us\\n0,2,%%s,9\\nall,2,%%s,"
        "4000\\nall,2,1,7\\n' $p $((2 * p)) >ex.csv; mkdir t; "
        "CUDA_VISIBLE_DEVICES= OMP_WAIT_POLICY=active TMPDIR=t $P advise --data d --compute train:logreg "
        "--classes 10 --batch 4 --out-res 16 --threads 1 --time 4 --nodes 3 --exchange-rows ex.csv --out "
        "rows --format json "
        ">json.txt && ls -A t | wc -l");
    EXPECT_OUT("0\n");
    EXPECT(0, "python3 check.py 2>&1");
    expect_refused(
        2, "no rows of --workload exchange on 2 or more ranks",
        "echo rank,ranks >none.csv; CUDA_VISIBLE_DEVICES= $P advise --data d --compute train:logreg "
        "--batch 4 --out-res 16 --time 4 --nodes 3 --exchange-rows none.csv");
    expect_refused(
        2, "--compute train:logreg: a sample has 8 images; give the time of a step: --compute MS",
        "$P --prepare v --samples 2 --sample-shape 3,8,16,16 >v.txt; CUDA_VISIBLE_DEVICES= $P advise "
        "--data v --compute train:logreg");
    expect_refused(2, "--exchange-rows gone.csv: No such file",
                   "CUDA_VISIBLE_DEVICES= $P advise --data d --compute train:logreg --batch 4 --out-res 16 "
                   "--time 4 --nodes 3 --exchange-rows gone.csv");
    /* Rows of another advise in the same folder would be taken for own ones. */
    EXPECT(124, "timeout 6 flock rows $P advise --data d --compute 5 --out rows 2>&1");
    EXPECT_OUT("rows: waiting for process");
}

/* The run of a way goes on in the next round, unless its epochs were much longer than expected. What it
 * trained right after its pause does not count. */
static const char turns_check[] =
    "import csv, itertools, json, math\n"
    "key = lambda row: (row['feed'], row['resident_bytes'], row['data'])\n"
    "with open('turns/train.csv') as file:\n"
    "    rows = list(csv.DictReader(file))\n"
    "with open('turns.json') as file:\n"
    "    ways = {row['way']: row for row in json.load(file)['rows']}\n"
    "if ways['a prepared set, memory']['rounds'] < 2:\n"
    "    raise SystemExit  # on a busy machine\n"
    "runs = sum(row['epoch'] == '1' for row in rows)\n"
    "rounds = sum(way['rounds'] for way in ways.values() if not way['reason'])\n"
    "assert runs - 1 < rounds, (runs, ways)\n"
    "rounds = [list(some) for of, some in itertools.groupby(rows[3:], key) if 'prepared' in of[2]]\n"
    "epochs = [int(row['epoch']) for some in rounds for row in some]\n"
    "assert all(b in (1, a + 1) for a, b in zip([0] + epochs, epochs)), epochs\n"
    "way = ways['a prepared set, memory']\n"
    "assert len(rounds) == way['rounds'] >= 2, (len(rounds), way)\n"
    "rates = lambda some: [float(row['items']) / float(row['time_mean_s']) for row in some]\n"
    "medians = [[sorted(rates(some)[-n:])[n // 2] for n in range(3, len(some))] for some in rounds]\n"
    "least, most = min(map(min, medians)), max(map(max, medians))  # a delayed run does not count\n"
    "assert least <= way['reached_per_s'] * 1.00001 <= 1.00002 * most, (way, medians)\n";

Test(advise, with_a_network_a_run_waits_for_its_next_round)
{
    if (run("python3 -c ''") != 0 || format_check(FORMAT_JSON) != STATUS_OK)
        cr_skip_test("python3 or jansson is not installed");
    put_text("turns.py", turns_check);
    EXPECT(0, "$P --prepare d --from synth --res 16 --classes 2 --samples 40 --shards 2");
    EXPECT_PRINTS(0, "0\n",
                  "mkdir t; CUDA_VISIBLE_DEVICES= TMPDIR=t $P advise --data d --compute train:cnn "
                  "--classes 10 --batch 4 --out-res 16 --threads 1 --time 2 --out turns --format json "
                  ">turns.json && ls -A t | wc -l");
    EXPECT(0, "python3 turns.py 2>&1");
}

/* The system kills a process if memory runs out. The other ways are measured all the same. */
Test(advise, with_a_network_a_run_may_be_killed)
{
    EXPECT(0, "$P --prepare d --from synth --res 16 --classes 2 --samples 40 --shards 2");
    EXPECT_PRINTS(
        0, "the step without input constant ",
        "{ CUDA_VISIBLE_DEVICES= $P advise --data d --compute train:logreg --classes 10 --batch 4 "
        "--out-res 16 --threads 1 --time 8 --out killed & for i in $(seq 1500); do "
        "grep -q live killed/train.csv && break; sleep 0.02; done 2>grep.txt; "
        "for run in $(cat /proc/$!/task/$!/children); do :; done; kill -KILL $run || exit 9; wait $!; }");
}

/* GPU variants are in the table even if they cannot run. The CPU variants deliver decoded images. */
Test(advise, impossible_ways_are_listed_with_a_reason)
{
    EXPECT(0, "$P --prepare d --from synth --res 24 --samples 12 --shards 2 --encode npy");
    EXPECT_PRINTS(0, "\nNot measured (", "CUDA_VISIBLE_DEVICES= " ADVISE "--data d --out rows");
    cr_expect(
        says_missing(": generating on the GPU (fused), shards from disk (shards-gpu), shards from memory "
                     "(shards-gpu), the set in GPU memory (gpu-resident) "),
        "%s", out);
    cr_expect(!says("Not measured (variant '"),
              "a run reported the reason, but no run is needed to know it: %s", out);
    EXPECT_OUT("(waits are computed, because there is no GPU)");
    EXPECT_OUT("images 24 x 24; batch 4; a step takes 1000 ms");
    EXPECT(0, "tr , '\\n' < rows/load.csv | grep -cx order+copy+decode");
}

/* Expects that the latest run read `items` samples. */
static void expect_items(const char *items)
{
    EXPECT_PRINTS(0, items,
                  "awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == \"items\") c = i } "
                  "END { print \"items \" $c }' rows/load.csv");
}

/* --subset measures a temporary folder of links to the first shards, and removes this folder. */
Test(advise, a_part_of_a_large_set_is_measured)
{
    EXPECT(0, "$P --prepare d --from synth --res 24 --samples 40 --shards 4 && mkdir t && TMPDIR=t " ADVISE
              "--data d --subset 50K --out rows && echo left: $(ls -A t)");
    EXPECT_OUT("40 samples, ", "(measured: 20 samples, ", "left:\n");
    expect_items("items 20\n");
}

/* If one shard is more than enough, an index lists the samples that are read. */
Test(advise, a_part_of_a_large_shard_is_measured)
{
    EXPECT(0, "$P --prepare d --from synth --res 24 --samples 40 --shards 1 && rm d/*.index && "
              "size=$(stat -c %%s d/*.tar) && " ADVISE "--data d --subset $((size / 4)) --out rows");
    EXPECT_OUT("40 samples, ", "(measured: 10 samples, ");
    expect_items("items 10\n");
}

/* The part has 64 MB, which are 129.5 samples, so an index lists 130. They are in four of five shards of 43;
 * with 129, the fourth would be an empty part of the index. */
Test(advise, a_fraction_of_a_sample_counts_as_a_sample)
{
    EXPECT(0, "$P --prepare d --sample-shape 1,1,703,703 --dtype u8 --samples 215 --shards 5 && " ADVISE
              "--threads 1 --data d --out rows");
    EXPECT_OUT("215 samples, ", "(measured: 130 samples, ");
    expect_items("items 130\n");
}

/* Only a few files are read, to look at the set and to measure. The fourth, which is only a pointer of Git
 * LFS, is not. */
Test(advise, a_part_of_a_folder_of_files_is_measured)
{
    EXPECT(
        0,
        "$P --prepare d --from synth --res 24 --classes 4 --samples 400 --store imagefolder && rm d/*.index "
        "&& printf 'version https://git-lfs.github.com/spec/v1\\noid sha256:%%064d\\nsize 9\\n' 0 "
        ">d/0000/$(ls d/0000 | sed -n 4p); " ADVISE "--data d --out-res 16 --subset 1 --out rows");
    EXPECT_OUT("400 samples, ", "(measured: 1 sample, ", "\nfiles from memory ");
    expect_items("items 1\n");
    EXPECT(0, "$P --prepare f --store files --from synth --res 24 --samples 400 && rm f/*.index && " ADVISE
              "--data f --threads 1 --out rows");
    EXPECT_OUT("400 samples, ", "(measured: 100 samples, ");
    expect_items("items 100\n");
}

/* A sample of --prepare's default is a volume: several images. */
Test(advise, volumes_count_as_several_images)
{
    EXPECT(0, "$P --prepare d --samples 10 --shards 2 --sample-shape 3,8,16,24 && " ADVISE
              "--data d --out rows --format csv >out.csv && " ADVISE "--data d");
    EXPECT_OUT("; images 24 x 24; batch 8; a step takes 1000 ms", "\nshards from memory ");
    if (run("python3 -c ''") == 0)
        EXPECT(0,
               "python3 -c 'import csv\n"
               "row = [r for r in csv.DictReader(open(\"rows/load.csv\")) if r[\"cache\"] == \"warm\"]\n"
               "way = [r for r in csv.DictReader(open(\"out.csv\")) if r[\"way\"] == \"shards from memory\" "
               "and not r[\"reason\"]]\n"
               "rates = [8 * float(r[\"items\"]) / float(r[\"time_mean_s\"]) for r in row]\n"
               "assert {r[\"batch\"] for r in row} == {\"1\"}\n"
               "assert min(rates) <= 1.001 * float(way[0][\"images_per_s\"]) <= 1.002 * max(rates), "
               "(rates, way)'");
    expect_refused(2, "--out-res: a sample has 8 images", ADVISE "--data d --out-res 8");
}

/* All ways keep a step of one second busy, so three rounds decide. */
Test(advise, ways_are_measured_in_turn_until_the_verdict_is_certain)
{
    EXPECT_PRINTS(
        0, "; 3 rounds in ",
        "$P --prepare d --from synth --res 24 --samples 12 --shards 2 && $P advise --compute 1000 --batch "
        "4 --time 60 --data d --out rows");
    EXPECT_OUT("\n\nBest here: generating on the ");
    if (says_missing("shards from disk (shards-omp)")) /* the file system is in memory */
        return;
    EXPECT_PRINTS(0, "cold warm warm cold cold warm\n",
                  "awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == \"cache\") c = i; next } "
                  "{ printf \"%%s%%s\", (NR == 2 ? \"\" : \" \"), $c } END { print \"\" }' rows/load.csv");
}

Test(advise, the_time_is_announced_before_the_measurements)
{
    EXPECT(0, "$P --prepare d --from synth --res 8 --samples 4 --shards 1 && " ADVISE
              "--data d 2>&1 >/dev/null");
    cr_expect(says("fdsl-bench: measures ") && says(" in turn, for at most 5 s (--time)"), "%s", out);
}

Test(advise, files_and_urls_have_their_own_ways)
{
    EXPECT_PRINTS(0, "way,variant,best,images_per_s,images_per_s_low,",
                  "$P --prepare f --store files --from synth --res 24 --samples 12 --encode png && " ADVISE
                  "--data f --out-res 16 --format csv");
    cr_expect(says("\nfiles from memory,") && says("\nfiles from disk,") && !says("shards"), "%s", out);
    if (run(ADVISE "--data f --format json") == 0) /* builds without jansson cannot write JSON */
        EXPECT_OUT("\"verdict\": \"", "\"way\": \"files from disk\"");
#ifdef HAVE_CURL
    EXPECT_PRINTS(0, "\nshards from memory ",
                  "$P --prepare s --from synth --res 24 --samples 12 --shards 1 && " ADVISE
                  "--data file://$PWD/s");
#endif
}

Test(advise, wrong_options_and_data_are_refused)
{
    expect_refused(2, "name the data set with --data DIR or URL", "$P advise --compute 5");
    expect_refused(2, "unexpected argument 'photos'; write --data photos", "$P advise photos --compute 5");
    expect_refused(2, "unexpected argument 'photos'; write --data photos", "$P advise --compute 5 photos");
    expect_refused(2, "say how long a training step takes: --compute MS", "$P advise --data x");
    expect_refused(2, "x: No such file or directory", "$P advise --data x --compute 5");
    expect_refused(2, "did you mean '--compute'?", "$P advise --data x --computed 5");
    expect_refused(2, "--compute", "$P advise --data x --compute fast");
    expect_refused(2, "--image", "$P advise --data . --compute 5 --image ';;'");
    expect_refused(2, "x: No such file or directory", "$P advise --data x --compute train:vit-tiny");
    expect_refused(2, "--nodes is for --compute train:MODEL; add that, or drop --nodes",
                   "$P advise --data x --compute 5 --nodes 2");
    expect_refused(2, "--exchange-rows is for --nodes; add that, or drop --exchange-rows",
                   "$P advise --data x --compute train:logreg --exchange-rows rows.csv");
    expect_refused(2, "--compute: 'lenett' is not one of logreg, lenet, ",
                   "$P advise --data x --compute train:lenett");
    expect_refused(2, "did you mean 'lenet'?", "$P advise --data x --compute train:lenett");
    expect_refused(2, "--compute: '' is not one of logreg, lenet, ", "$P advise --data x --compute train");
    expect_refused(2, "--compute: 'trainer' is not a number", "$P advise --data x --compute trainer");
    expect_refused(4, "--device 1000: ", "$P advise --data x --compute 5 --device 1000");
    expect_refused(2, "unknown command 'advice'; did you mean 'advise'?", "$P advice");
    EXPECT(0, "$P --prepare d --from synth --res 8 --samples 4 --shards 1 && touch file");
    expect_refused(1, "bytes here, but 16777216 may be needed; raise the limit with ulimit -f",
                   "ulimit -f 1024 && $P advise --data d --compute train:logreg");
    expect_refused(2, "--cache-dir is for data at a URL", ADVISE "--data d --cache-dir c");
    expect_refused(2, "--out file/rows: cannot create the folder", ADVISE "--data d --out file/rows");
    expect_refused(2, "--out file: this is a file", ADVISE "--data d --out file");
    expect_refused(2, "'cls' is not an image, and advise compares images", ADVISE "--data d --member cls");
    EXPECT(0, "mkdir bad && for i in 1 2 3; do echo broken >bad/$i.png; echo $i >bad/$i.cls; done");
    expect_refused(1, "sample '1': ", ADVISE "--data bad");
    expect_refused(1, "; --on-error skip omits such samples", ADVISE "--data bad");
}

Test(advise, no_files_are_left)
{
    EXPECT_PRINTS(0, "left:\n",
                  "$P --prepare d --from synth --res 8 --samples 4 --shards 1 && mkdir t && TMPDIR=t " ADVISE
                  "--data d && echo left: $(ls -A t)");
    EXPECT_PRINTS(0, "143 left:\n",
                  ": ; (TMPDIR=t; export TMPDIR; exec $P advise --data d --compute 1000 "
                  "--batch 4 --time 100 --margin 0.1) & p=$!; "
                  "for i in $(seq 500); do [ -z \"$(ls -A t)\" ] || break; sleep 0.01; done; "
                  "kill $p; wait $p; echo $? left: $(ls -A t)");
}

/* Rank 0 measures in runs of one rank. All other ranks print nothing. */
Test(advise, under_a_launcher_only_rank_0_advises)
{
    EXPECT_PRINTS(0, "\nshards from memory ",
                  "$P --prepare d --from synth --res 8 --samples 4 --shards 1 && OMPI_COMM_WORLD_SIZE=2 "
                  "OMPI_COMM_WORLD_RANK=0 timeout 60 " ADVISE "--data d");
    EXPECT_EXACTLY(0, "", "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 " ADVISE "--data d");
}

#endif
