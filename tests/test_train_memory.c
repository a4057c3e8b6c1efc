/* Tests of planned memory (struct memory_account), of --memory-limit, and of --parallel auto. */
#include "train/engine.h"
#include "train/train.h"
#include "shell.h"

#include <math.h>

#include "core/array.h"
#include "cells.h"

TestSuite(train_memory, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

#define GIB (UINT64_C(1) << 30)

/* ---- Pure functions ---- */

Test(train_memory, limits_are_parsed)
{
    const struct {
        const char *text;
        uint32_t ranks;
        uint64_t limits[3]; /* the first is 0: refused */
    } cases[] = {{"16G", 1, {16 * GIB}},
                 {"16G,8G", 2, {16 * GIB, 8 * GIB}},
                 {"2048", 3, {2048, 2048, 2048}},
                 {"1K,2M,3g", 3, {1024, 2 << 20, 3 * GIB}},
                 {"16G,8G", 3, {0}},
                 {"16G,8G", 1, {0}},
                 {"16G,", 2, {0}},
                 {"1023", 1, {0}},
                 {"0", 1, {0}},
                 {"-1G", 1, {0}},
                 {"16T", 1, {0}},
                 {"99999999999G", 1, {0}},
                 {"0000000000000000000000000016384G", 1, {0}}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        uint64_t limits[3] = {0};
        const enum status parsed = memory_limit_parse(cases[i].text, cases[i].ranks, limits);
        cr_expect_eq(parsed, cases[i].limits[0] ? STATUS_OK : STATUS_USAGE, "%s", cases[i].text);
        for (uint32_t r = 0; parsed == STATUS_OK && r < cases[i].ranks; r++)
            cr_expect_eq(limits[r], cases[i].limits[r], "%s, rank %u", cases[i].text, r);
    }
}

Test(train_memory, an_account_stops_at_its_limit)
{
    struct memory_account account = {.limit_bytes = 100};
    cr_expect_eq(memory_take(NULL, MEMORY_STREAM, 1000), STATUS_OK);
    cr_expect_eq(memory_take(&account, MEMORY_STREAM, 60), STATUS_OK);
    cr_expect_eq(memory_take(&account, MEMORY_GRADIENTS, 41), STATUS_TOO_LARGE);
    cr_expect_eq(memory_take(&account, MEMORY_GRADIENTS, 40), STATUS_OK);
    cr_expect_eq(memory_take(&account, MEMORY_GRADIENTS, 0), STATUS_OK);
    cr_expect(memory_total(&account) == 100 && account.bytes[MEMORY_GRADIENTS] == 40);
    account.plans = true; /* a plan shows how much is needed */
    cr_expect_eq(memory_take(&account, MEMORY_SAMPLES, 1), STATUS_OK);
}

Test(train_memory, the_largest_batch_follows_from_two_plans)
{
    cr_expect_eq(memory_largest_batch(10, 200, 20, 300, 1000), 90); /* 100 + 10 per sample */
    cr_expect_eq(memory_largest_batch(10, 200, 20, 300, 999), 89);
    cr_expect_eq(memory_largest_batch(10, 200, 20, 300, 110), 1);
    cr_expect_eq(memory_largest_batch(10, 200, 20, 300, 109), 0);
    cr_expect_eq(memory_largest_batch(10, 200, 20, 200, 200), 20); /* the batch does not matter */
    cr_expect_eq(memory_largest_batch(10, 200, 20, 200, 199), 0);
}

Test(train_memory, the_ways_of_some_numbers_of_gpus)
{
    static const uint32_t counts[][2] = {{1, 2}, {2, 4}, {3, 4}, {4, 6}, {7, 4}, {8, 8}, {5040, 32}};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        struct parallel_way ways[PARALLEL_WAYS_MAX];
        const uint32_t count = parallel_ways(counts[i][0], ways);
        cr_expect_eq(count, counts[i][1], "%u GPUs: %u ways", counts[i][0], count);
        for (uint32_t k = 0; k < count; k++)
            cr_expect(ways[k].stages * ways[k].replicas == counts[i][0] && ways[k].recomputes == k % 2);
        cr_expect_eq(ways[0].stages, 1);
    }
}

Test(train_memory, the_choice_follows_from_plans_times_and_room)
{
    static const struct {
        const char *what;
        struct {
            struct parallel_way way;
            uint64_t needed[2];
            double step_s, sample_bytes;
        } plans[4]; /* 0 stages: the end */
        uint64_t room[2];
        int chosen;
        const char *says;
    } cases[] = {
        {"all fit: the fastest",
         {{{1, 2, false, false}, {10, 10}, 2, 0},
          {{2, 1, false, false}, {6, 6}, 1, 0},
          {{2, 1, true, false}, {4, 4}, 1.5, 0}},
         {20, 20},
         1,
         "a pipeline of 2 GPUs (1000.000 ms per step); data parallel on 2 GPUs takes 2000.000 ms"},
        {"all fit: the simplest of nearly equal ones",
         {{{1, 2, false, false}, {10, 10}, 1.02, 0}, {{2, 1, false, false}, {6, 6}, 1, 0}},
         {20, 20},
         0,
         "data parallel on 2 GPUs"},
        {"one GPU fits only with recomputing",
         {{{1, 1, false, false}, {17000000000, 0}, NAN, 0}, {{1, 1, true, false}, {9000000000, 0}, 0.3, 0}},
         {16000000000, 0},
         1,
         "one GPU, recomputing (300.000 ms per step); one GPU needs 17.000 GB of 16.000 GB"},
        {"exactly full fits", {{{1, 1, false, false}, {16, 0}, 1, 0}}, {16, 0}, 0, "one GPU"},
        {"the smaller GPU decides",
         {{{1, 2, false, false}, {10, 10}, 1, 0}, {{2, 1, false, false}, {14, 7}, 2, 0}},
         {16, 8},
         1,
         "a pipeline of 2 GPUs"},
        {"a plan that failed in its trial is out",
         {{{1, 2, false, false}, {10, 10}, NAN, 0}, {{2, 1, false, false}, {6, 6}, 2, 0}},
         {20, 20},
         1,
         "a pipeline"},
        {"nothing fits: fewer samples or more GPUs would",
         {{{1, 1, false, false}, {24000000000, 0}, NAN, 0.1e9}},
         {16000000000, 0},
         PARALLEL_NONE,
         "GPU 0 needs 24.000 GB of 16.000 GB; what would fit: 48 samples per GPU instead of 128, 3 GPUs "
         "(data "
         "parallel, --scaling strong), or 24.000 GB per GPU"},
        {"nothing fits: not even one sample, so the network must be cut",
         {{{1, 1, false, false}, {40000000000, 0}, NAN, 0.01e9}},
         {16000000000, 0},
         PARALLEL_NONE,
         "what would fit: about 3 GPUs (pipeline), or 40.000 GB per GPU"},
        {"nothing fits: no number of GPUs would",
         {{{1, 1, false, false}, {25000000, 0}, NAN, 0}},
         {0, 0},
         PARALLEL_NONE,
         "what would fit: 0.025 GB per GPU"},
        {"nothing fits: the closest is named",
         {{{1, 2, false, false}, {30000000000, 30000000000}, NAN, 0},
          {{2, 1, true, false}, {17000000000, 10000000000}, NAN, 0}},
         {16000000000, 16000000000},
         PARALLEL_NONE,
         "a pipeline of 2 GPUs, recomputing comes closest: GPU 0 needs 17.000 GB of 16.000 GB; what would "
         "fit: "
         "17.000 GB per GPU"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct parallel_plan plans[4];
        uint32_t count = 0;
        char why[1024];
        for (; count < 4 && cases[i].plans[count].way.stages; count++)
            plans[count] =
                (struct parallel_plan){cases[i].plans[count].way, cases[i].plans[count].needed,
                                       cases[i].plans[count].step_s, 128, cases[i].plans[count].sample_bytes};
        const int chosen = parallel_choose(plans, count, cases[i].room, 0, why, sizeof why);
        cr_expect_eq(chosen, cases[i].chosen, "%s: %d: %s", cases[i].what, chosen, why);
        cr_expect_not_null(strstr(why, cases[i].says), "%s: %s", cases[i].what, why);
    }
}

/* ---- The program ---- */

#define TRAIN "$P --variant train-naive --train-size 256 --test-size 20 --epochs 1 --format csv "

#define LENET \
    "$P --variant train-naive --model lenet --train-size 256 --test-size 20 --epochs 1 --format csv "

#ifndef FDSL_SANITIZED /* sanitizers use memory themselves */
/* Both variants allocate some ten MB, besides about as much of the process. */
Test(train_memory, the_plan_is_what_is_used)
{
    static const char *const runs[] = {
        "train-naive --model logreg --batch 256 --train-size 256",
        "train-naive --model lenet --batch 201 --train-size 201",
        "train-omp --threads 1 --model lenet --batch 256 --optimizer sgd --ema 0.9 --train-size 256",
        "train-omp --threads 2 --model vit-micro --batch 61 --mixup 0.5 --train-size 64",
        "train-omp --threads 1 --model cnn --batch 67 --accumulate 3 --train-size 67"};
    for (size_t i = 0; i < COUNT_OF(runs); i++) {
        EXPECT(0, "$P --variant %s --test-size 20 --epochs 1 --format csv --memory", runs[i]);
        const double planned = number(out, 1, "memory_planned_bytes"),
                     used = number(out, 1, "memory_used_bytes"), engine = number(out, 1, "memory_bytes");
        cr_expect(engine > 0 && planned > engine, "%s: %g of %g", runs[i], engine, planned);
        cr_expect_float_eq(used / planned, 1, 0.05, "%s: %g of %g bytes", runs[i], used, planned);
        cr_expect_not_null(strstr(out, "memory, after the last epoch"), "%s", out);
    }
    EXPECT(0, TRAIN "--model logreg");
    cr_expect_str_eq(value(out, 1, "memory_planned_bytes"), "");
    EXPECT(0, "$P --variant train-naive --model logreg --train-size 256 --memory --dry-run");
    cr_expect_not_null(strstr(out, "memory, as planned"), "%s", out);
}

Test(train_memory, a_limit_refuses_and_says_what_would_fit)
{
    EXPECT(2, LENET "--batch 256 --memory-limit 40M");
    const char *said = strstr(out, "but the limit is 0.042 GB; --batch ");
    cr_assert_not_null(said, "%s", out);
    const long fits = strtol(strstr(said, "--batch ") + 8, NULL, 10);
    cr_expect(fits > 20 && fits < 250, "%s", out);
    EXPECT(0, LENET "--batch %ld --memory-limit 40M", fits * 8 / 10);
    EXPECT(2, LENET "--batch %ld --memory-limit 40M", fits * 12 / 10);
    EXPECT(2, LENET "--batch 256 --memory-limit 40M --dry-run");
    EXPECT(0, LENET "--batch %ld --memory-limit 40M --dry-run", fits * 8 / 10);
    EXPECT(0, LENET "--batch max --memory-limit 40M");
    const double largest = number(out, 1, "batch");
    cr_expect(largest > 0.8 * (double)fits && largest < 1.2 * (double)fits, "%g, not %ld", largest, fits);
    EXPECT(2, LENET "--memory-limit 100M,1G");
}

Test(train_memory, auto_takes_what_fits_and_keeps_it)
{
    EXPECT(0, TRAIN "--model logreg --parallel auto --checkpoint k --memory-limit 200M");
    cr_expect_not_null(strstr(out, "--parallel auto: one rank ("), "%s", out);
    cr_expect(number(out, 1, "step_planned_s") > 0);
    EXPECT(0,
           "$P --variant train-naive --train-size 256 --test-size 20 --epochs 2 --format csv --model logreg "
           "--parallel auto --checkpoint k --memory-limit 200M --resume --export a");
    cr_expect_not_null(strstr(out, "one rank, as before the checkpoint"), "%s", out);
    EXPECT(0,
           "$P --variant train-naive --train-size 256 --test-size 20 --epochs 2 --format csv --model logreg "
           "--export b && cmp a b");
    EXPECT(2, TRAIN "--model cnn --batch 256 --parallel auto --memory-limit 30M");
    cr_expect_not_null(strstr(out, "--parallel auto: nothing fits; one rank comes closest"), "%s", out);
    EXPECT(2, TRAIN "--model logreg --batch max --parallel auto");
    cr_expect_not_null(strstr(out, "--parallel needs a known batch"), "%s", out);
}
#endif
