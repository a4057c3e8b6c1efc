/* Tests the search for the share of read samples with simulated machines, whose best share is known. */
#include <math.h>
#include <stdio.h>

#include <criterion/criterion.h>

#include "core/portable.h"
#include "run/bench.h"

/* A machine. A step without reading takes 1 - 1 unit of time -, and generating all of its samples takes
 * `generate`. Reading all of its samples takes 1 / rate, and longer while the step computes: `contention` is
 * the share of the reading rate that computing takes away. Steps wait for a part `floor` of their time
 * without any reason, if they do not wait longer for reading. A part `seeming` is measured as waiting,
 * without longer steps, if some samples are generated and more than a tenth is read. */
struct machine {
    double rate, generate, contention, floor;
    double noise; /* relative, of stalls and times */
    double seeming;
    uint32_t hiccup; /* the probe, from 1 on, in which another process delays reading; 0: none */
};

static double busy_of(const struct machine *machine, double share)
{
    return (1 + machine->generate * (1 - share)) / (1 - machine->floor);
}

/* Returns the time that reading takes if a step takes `step` and computes for `busy` of it. */
static double reading_of(const struct machine *machine, double share, double step, double busy)
{
    return share / (machine->rate * (1 - machine->contention * fmin(1, busy / step)));
}

static double step_of(const struct machine *machine, double share)
{
    const double busy = busy_of(machine, share);
    double step = busy;
    for (int i = 0; i < 100; i++)
        step = fmax(busy, reading_of(machine, share, step, busy));
    return step;
}

/* Returns the largest share with which steps do not wait for reading. */
static double best_of(const struct machine *machine)
{
    double low = 0, high = 1;
    for (int i = 0; i < 60; i++) {
        const double share = (low + high) / 2;
        *(step_of(machine, share) > busy_of(machine, share) * (1 + 1e-9) ? &high : &low) = share;
    }
    return low;
}

/* A random number from -1 to 1. */
static double jitter(uint32_t *state)
{
    *state = *state * UINT32_C(1664525) + UINT32_C(1013904223);
    return *state / 2147483648.0 - 1;
}

/* Searches with at most `most` measurements, and returns the share. With at most four, the second half is
 * hurried. */
static double search_share(const struct machine *machine, uint32_t seed, uint32_t most, uint32_t *probes)
{
    struct share_search search = {.parts = 100};
    for (uint32_t share; search.tries < most && (share = share_search_next(&search)) > 0;) {
        search.hurried = most <= 4 && search.tries >= 2;
        cr_assert(search.count <= SHARE_PROBES && share <= 100);
        for (uint32_t i = 0; i < search.count; i++)
            cr_assert(search.probes[i].share != share || (i + 1 == search.count && !search.probes[i].twice),
                      "share %u was measured before", share);
        const double part = share / 100.0, busy = busy_of(machine, part);
        double step = step_of(machine, part) * (1 + machine->noise * jitter(&seed));
        if (search.tries + 1 == machine->hiccup)
            step *= 1.2;
        const double waits =
            fmax(0, 1 - busy * (1 - machine->floor) / step) * (1 + machine->noise * jitter(&seed));
        share_search_add(&search, share, waits + (share > 10 && share < 100 ? machine->seeming : 0), step);
    }
    cr_assert_gt(search.count, 0);
    *probes = search.tries;
    return share_search_best(&search)->share / 100.0;
}

static void expect_best(const struct machine *machine, double below, double above, uint32_t most)
{
    const double best = best_of(machine);
    for (uint32_t seed = 0; seed < (machine->noise > 0 ? 20 : 1); seed++) {
        uint32_t probes;
        const double share = search_share(machine, seed, UINT32_MAX, &probes);
        cr_expect(
            share >= (1 - below) * best - 0.01 && share <= (1 + above) * best + 0.01 && probes <= most,
            "rate %g, generate %g, contention %g, floor %g, hiccup %u, seed %u: %g of %g after %u probes",
            machine->rate, machine->generate, machine->contention, machine->floor, machine->hiccup, seed,
            share, best, probes);
    }
}

static const double rates[] = {0.11, 0.17, 0.3, 0.5, 0.71, 0.9, 0.97, 1.1, 5};

Test(share_search, finds_the_best_share_of_machines)
{
    static const double generate[] = {0, 0.5, 2}, contention[] = {0, 0.3, 0.6}, floors[] = {0, 0.05, 0.25};
    for (size_t r = 0; r < COUNT_OF(rates); r++)
        for (size_t g = 0; g < COUNT_OF(generate); g++)
            for (size_t c = 0; c < COUNT_OF(contention); c++)
                for (size_t f = 0; f < COUNT_OF(floors); f++)
                    for (int noise = 0; noise < 2; noise++)
                        expect_best(&(struct machine){rates[r], generate[g], contention[c], floors[f],
                                                      0.01 * noise, 0, 0},
                                    0.08, 0.05, SHARE_PROBES + 3);
}

/* Ordinary machines need few probes, each of which takes seconds. */
Test(share_search, ends_soon)
{
    for (size_t r = 0; r < COUNT_OF(rates); r++) {
        expect_best(&(struct machine){.rate = rates[r]}, 0.06, 0.03, 6);
        expect_best(&(struct machine){.rate = rates[r], .generate = 0.3}, 0.06, 0.03, 6);
    }
    expect_best(&(struct machine){.rate = 3}, 0, 0, 1);
}

/* If the time is over after four measurements, steps do not wait with the share. With few exceptions, it is
 * at least a third of the best one. */
Test(share_search, few_measurements_give_a_safe_share)
{
    uint32_t small = 0;
    for (size_t r = 0; r < COUNT_OF(rates); r++)
        for (uint32_t seed = 0; seed < 20; seed++) {
            const struct machine machine = {
                .rate = rates[r], .generate = 0.03, .contention = 0.2, .floor = 0.01, .noise = 0.02};
            const double best = best_of(&machine);
            uint32_t probes;
            const double share = search_share(&machine, seed, 4, &probes);
            cr_expect(share <= 1.05 * best + 0.01, "rate %g, seed %u: %g of %g", machine.rate, seed, share,
                      best);
            small += share < best / 3;
        }
    cr_expect(small <= 4, "%u shares are small", small);
}

/* A probe that another process delays is repeated. The first one is not: it only gives the next share. */
Test(share_search, survives_a_delayed_probe)
{
    for (size_t r = 0; r < COUNT_OF(rates); r++)
        for (uint32_t hiccup = 1; hiccup <= 6; hiccup++)
            expect_best(&(struct machine){.rate = rates[r], .generate = 0.2, .hiccup = hiccup}, 0.06, 0.03,
                        SHARE_PROBES);
}

/* Stalls count only if they lengthen the steps. */
Test(share_search, compares_steps_with_those_that_read_little)
{
    for (size_t r = 0; r < COUNT_OF(rates); r++)
        expect_best(&(struct machine){.rate = rates[r], .generate = 0.02, .seeming = 0.04}, 0.06, 0.03, 6);
}

/* A share below 1 % is rounded to 1 %. */
Test(share_search, ends_at_the_smallest_share)
{
    uint32_t probes;
    cr_expect_float_eq(search_share(&(struct machine){.rate = 1e-4}, 0, UINT32_MAX, &probes), 0.01, 1e-9);
    cr_expect(probes <= SHARE_PROBES, "%u probes", probes);
}

/* A third of the best share stays in reserve, except if all samples can be read. */
Test(share_search, a_third_stays_in_reserve)
{
    struct share_search search = {.parts = 100};
    share_search_add(&search, 60, 0, 1);
    cr_expect_eq(share_search_choice(&search), 40);
    share_search_add(&search, 100, 0.4, 2);
    cr_expect_eq(share_search_choice(&search), 40);
    share_search_add(&search, 1, 0, 1);
    search.probes[0].share = 2;
    cr_expect_eq(share_search_choice(&search), 1);
    search = (struct share_search){.parts = 100};
    share_search_add(&search, 100, 0, 1);
    cr_expect_eq(share_search_choice(&search), 100);
}
