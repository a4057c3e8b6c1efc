/* Tests, without MPI, how a batch and cores are divided among ranks, and the row of all ranks. */
#include <criterion/criterion.h>

#include "core/parallel.h"
#include "machine/cores.h"
#include "run/settings.h"
#include "run/rows.h"
#include "cell.h"

TestSuite(partition, .timeout = 60);
TestSuite(cores, .timeout = 60);
TestSuite(ranks, .timeout = 60);

/* ---- Shares of a batch ---- */

Test(partition, weak_scaling_gives_each_rank_a_batch)
{
    for (uint64_t rank = 0; rank < 4; rank++) {
        const struct partition partition = {rank, 4, false, NULL};
        struct share share = partition_share(&partition, 7);
        cr_expect(share.first == 7 * rank && share.count == 7 && share.total == 28);
    }
}

Test(partition, strong_shares_are_contiguous_and_differ_by_at_most_one)
{
    for (uint64_t ranks = 1; ranks <= 9; ranks++)
        for (uint64_t batch = 0; batch <= 40; batch++) {
            uint64_t next = 0;
            for (uint64_t rank = 0; rank < ranks; rank++) {
                const struct partition partition = {rank, ranks, true, NULL};
                struct share share = partition_share(&partition, batch);
                cr_assert(share.first == next && share.total == batch);
                cr_assert(share.count == batch / ranks || share.count == batch / ranks + 1);
                next += share.count;
            }
            cr_assert(next == batch, "batch %d, %d ranks", (int)batch, (int)ranks);
        }
}

Test(partition, one_rank_has_the_whole_batch)
{
    for (int strong = 0; strong < 2; strong++) {
        const struct partition partition = {0, 1, strong, NULL};
        struct share share = partition_share(&partition, 13);
        cr_expect(share.first == 0 && share.count == 13 && share.total == 13);
    }
}

Test(partition, a_large_batch_does_not_overflow)
{
    const struct partition partition = {99998, 99999, true, NULL};
    struct share share = partition_share(&partition, UINT64_MAX);
    cr_expect(share.first + share.count == UINT64_MAX);
}

/* With weights, the parts of all ranks must be consecutive, and their sum must be the batch. If the batch
 * equals the sum of the weights, each rank must get its weight. In a smaller batch, no rank may get more. */
Test(partition, weights_divide_any_batch)
{
    static const uint32_t cases[][4] = {
        {3, 1, 0, 0}, {1, 0, 2, 4}, {0, 0, 0, 1}, {5, 7, 11, 13}, {40, 1, 1, 1}};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        uint64_t all = (uint64_t)cases[c][0] + cases[c][1] + cases[c][2] + cases[c][3];
        for (uint64_t batch = 0; batch <= all; batch++) {
            uint64_t next = 0;
            for (uint64_t rank = 0; rank < 4; rank++) {
                const struct partition partition = {rank, 4, true, cases[c]};
                struct share share = partition_share(&partition, batch);
                cr_assert(share.first == next && share.total == batch);
                cr_expect(share.count <= cases[c][rank] && (batch < all || share.count == cases[c][rank]));
                double off = (double)share.count - (double)(batch * cases[c][rank]) / (double)all;
                cr_expect(off > -1 && off < 1, "batch %d, rank %d: off by %g", (int)batch, (int)rank, off);
                next += share.count;
            }
            cr_expect_eq(next, batch);
        }
    }
}

/* Checks the sum and the minimum of the shares. A rank with a larger weight must not get less than a rank
 * with a smaller weight. If two ranks have the same weight, the lower rank must not get less. */
static void expect_fair(const double *weights, uint32_t count, uint32_t total, uint32_t least)
{
    uint32_t shares[7], again[7], sum = 0;
    partition_divide(weights, count, total, least, shares);
    partition_divide(weights, count, total, least, again);
    cr_expect_arr_eq(shares, again, count * sizeof *shares);
    for (uint32_t i = 0; i < count; i++) {
        sum += shares[i];
        cr_expect(shares[i] >= least && (weights[i] > 0 || shares[i] == least), "%u of weight %g: %u", i,
                  weights[i], shares[i]);
        for (uint32_t j = 0; j < count; j++)
            if (weights[i] > weights[j] || (weights[i] == weights[j] && i < j))
                cr_expect(shares[i] >= shares[j], "%u samples, least %u: rank %u has %u, rank %u has %u",
                          total, least, i, shares[i], j, shares[j]);
    }
    cr_expect_eq(sum, total);
}

Test(partition, items_are_divided_by_weight)
{
    static const double cases[][7] = {{1, 1, 1, 1, 1, 1, 1},
                                      {3, 1, 2, 1, 3, 1, 1},
                                      {0, 5, 0, 5, 1, 0, 2},
                                      {1e-9, 1e9, 1, 1, 2, 1, 1},
                                      {0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.7},
                                      {1. / 3, 2. / 3, 1, 1e5, 7, 7, 7}};
    for (size_t c = 0; c < COUNT_OF(cases); c++)
        for (uint32_t count = 2; count <= 7; count++)
            for (uint32_t total = 0; total < 60; total++)
                for (uint32_t least = 0; least <= 1 && least * count <= total; least++)
                    expect_fair(cases[c], count, total, least);
}

Test(partition, shares_are_exact_if_they_are_whole_numbers)
{
    static const struct {
        double weights[3];
        uint32_t total, shares[3];
    } cases[] = {{{3, 1, 0}, 24, {18, 6, 0}},
                 {{1, 0, 2}, 7, {2, 0, 5}},
                 {{1, 1, 1}, 11, {4, 4, 3}},
                 {{1, 2, 3}, 1200, {200, 400, 600}},
                 {{0.1, 0.1, 0.1}, 1 << 20, {349526, 349525, 349525}}};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        uint32_t shares[3];
        partition_divide(cases[c].weights, 3, cases[c].total, 0, shares);
        cr_expect_arr_eq(shares, cases[c].shares, sizeof shares, "case %zu: %u %u %u", c, shares[0],
                         shares[1], shares[2]);
    }
}

/* ---- Devices ---- */

Test(ranks, devices_are_read_from_a_list)
{
    static const char *const wrong[] = {
        "",       "0",          "0:",     "0:cuda", "0:cuda:",      "0:cuda:x", "0:cuda:-1",
        "x:cpu",  "0:cpux",     "0:cpu,", ",0:cpu", "0:cpu,,1:cpu", "4:cpu",    "0:cpu,1:cpu,0:cpu",
        "-1:cpu", "0:cuda:9999"};
    static const int wanted[] = {7, RANK_DEVICE_CPU, RANK_DEVICE_AUTO, 0};
    int device;
    for (uint64_t rank = 0; rank < 4; rank++) {
        cr_expect(rank_device_find("3:cuda:0,0:cuda:7,1:cpu", 4, rank, &device) == STATUS_OK &&
                  device == wanted[rank]);
        cr_expect(rank_device_find(NULL, 4, rank, &device) == STATUS_OK && device == RANK_DEVICE_AUTO);
    }
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        cr_expect_eq(rank_device_find(wrong[i], 4, 1, &device), STATUS_USAGE, "'%s'", wrong[i]);
        cr_expect(strstr(status_text(), "--rank-device"), "%s", status_text());
    }
}

/* ---- Shares of cores ---- */

/* Returns a set of hardware threads. Bit i of `bits` is thread i. */
static struct cores_mask mask(unsigned long bits)
{
    return (struct cores_mask){{bits}};
}

/* Plans the cores of `count` ranks, and expects this outcome. For each rank, `ranks` has the hardware threads
 * that the rank may use, and `expected` has the threads that it must get. The machine has `core_count` cores
 * of two threads each. As is usual on Linux, core i has the threads i and i + core_count. */
static void expect_plan(const unsigned long *ranks, int count, int core_count, enum cores_outcome outcome,
                        const unsigned long *expected)
{
    struct cores_mask masks[8], cores[16], allowed = mask((1ul << 2 * core_count) - 1);
    for (int i = 0; i < count; i++)
        masks[i] = mask(ranks[i]);
    for (int i = 0; i < core_count; i++)
        cores[i] = mask(1ul << i | 1ul << (i + core_count));
    for (int i = 0; i < count; i++) {
        struct cores_plan plan = cores_share_out(masks, NULL, count, i, &allowed, cores, core_count);
        cr_expect(plan.outcome == outcome, "rank %d: outcome %d", i, (int)plan.outcome);
        cr_expect(plan.mine.words[0] == expected[i], "rank %d: %lx, not %lx", i, plan.mine.words[0],
                  expected[i]);
    }
}

Test(cores, ranks_that_may_run_anywhere_get_whole_cores)
{
    expect_plan((const unsigned long[]){0xff, 0xff}, 2, 4, CORES_SPLIT, (const unsigned long[]){0x33, 0xcc});
    expect_plan((const unsigned long[]){0xff, 0xff, 0xff}, 3, 4, CORES_SPLIT,
                (const unsigned long[]){0x33, 0x44, 0x88});
}

Test(cores, only_cores_that_a_rank_may_use_are_divided)
{
    expect_plan((const unsigned long[]){0x66, 0x66}, 2, 4, CORES_SPLIT, (const unsigned long[]){0x22, 0x44});
    /* A core counts even if the ranks may use only one of its two hardware threads. */
    expect_plan((const unsigned long[]){0x03, 0x03}, 2, 4, CORES_SPLIT, (const unsigned long[]){0x01, 0x02});
}

/* Divides `core_count` cores, each with one hardware thread, and expects these numbers of cores per rank. */
static void expect_cores(const uint32_t *extra, int ranks, int core_count, const int *expected)
{
    struct cores_mask masks[4], allowed = mask((1ul << core_count) - 1), cores[64];
    unsigned long used = 0;
    for (int i = 0; i < core_count; i++)
        cores[i] = mask(1ul << i);
    for (int i = 0; i < ranks; i++)
        masks[i] = allowed;
    for (int i = 0; i < ranks; i++) {
        struct cores_plan plan = cores_share_out(masks, extra, ranks, i, &allowed, cores, core_count);
        cr_expect_eq(__builtin_popcountl(plan.mine.words[0]), expected[i], "%d cores, rank %d: %lx",
                     core_count, i, plan.mine.words[0]);
        cr_expect((plan.mine.words[0] & used) == 0 && plan.outcome == CORES_SPLIT);
        used |= plan.mine.words[0];
    }
    cr_expect_eq(used, allowed.words[0], "%d cores: %lx", core_count, used);
}

Test(cores, ranks_with_different_threads_get_cores_in_proportion)
{
    expect_cores((const uint32_t[]){11, 3}, 2, 16, (const int[]){12, 4});
    expect_cores((const uint32_t[]){11, 3}, 2, 32, (const int[]){24, 8});
    expect_cores((const uint32_t[]){0, 6}, 2, 8, (const int[]){1, 7});
    expect_cores((const uint32_t[]){99, 0, 0}, 3, 4, (const int[]){2, 1, 1});
    expect_cores((const uint32_t[]){99, 0, 0}, 3, 3, (const int[]){1, 1, 1});
}

Test(cores, overlapping_sets_are_divided_again)
{
    expect_plan((const unsigned long[]){0x77, 0xee}, 2, 4, CORES_SPLIT, (const unsigned long[]){0x33, 0xcc});
    expect_plan((const unsigned long[]){0x33, 0xcc, 0x33, 0xcc}, 4, 4, CORES_SPLIT,
                (const unsigned long[]){0x11, 0x22, 0x44, 0x88});
}

Test(cores, disjoint_sets_of_the_launcher_are_kept)
{
    static const unsigned long all[] = {0x33, 0xcc}, some[] = {0x11, 0x88};
    expect_plan(all, 2, 4, CORES_KEPT, all);
    expect_plan(some, 2, 4, CORES_IDLE, some);
}

Test(cores, more_ranks_than_cores_share_cores_in_turn)
{
    expect_plan((const unsigned long[]){0xf, 0xf, 0xf}, 3, 2, CORES_CROWDED,
                (const unsigned long[]){0x5, 0xa, 0x5});
    expect_plan((const unsigned long[]){0x5, 0x5}, 2, 2, CORES_CROWDED, (const unsigned long[]){0x5, 0x5});
}

Test(cores, a_single_rank_keeps_its_cores)
{
    static const unsigned long all[] = {0xff}, one[] = {0x11};
    expect_plan(all, 1, 4, CORES_KEPT, all);
    expect_plan(one, 1, 4, CORES_IDLE, one);
}

/* ---- The row of all ranks ---- */

/* Sets a value from its text. "" makes it absent. */
static void set_text(struct row *row, const struct column *column, const char *text)
{
    if (!*text || column->type == VALUE_WORD)
        row_text(row, column->name, text);
    else if (column->type == VALUE_REAL)
        row_real(row, column->name, strtod(text, NULL));
    else if (column->type == VALUE_HASH)
        row_hash(row, column->name, strtoull(text, NULL, 16));
    else
        row_count(row, column->name, strtoull(text, NULL, 10));
}

Test(ranks, the_row_of_all_ranks_combines_each_column)
{
    static const struct column columns[] = {{"threads", VALUE_INTEGER, COMBINE_SUM, .unit = ""},
                                            {"ranks_per_device", VALUE_INTEGER, COMBINE_MAX, .unit = ""},
                                            {"sm_clock_mhz", VALUE_INTEGER, COMBINE_MIN, .unit = ""},
                                            {"memory_clock_mhz", VALUE_INTEGER, COMBINE_MIN, .unit = ""},
                                            {"instruction_set", VALUE_WORD, COMBINE_COMMON, .unit = ""},
                                            {"same", VALUE_WORD, COMBINE_COMMON, .unit = ""},
                                            {"how", VALUE_WORD, COMBINE_FIRST, .unit = ""},
                                            {"stage_s", VALUE_REAL, COMBINE_MAX, .unit = "s"},
                                            {"hash", VALUE_HASH, COMBINE_SUM, .unit = ""},
                                            {"none", VALUE_HASH, COMBINE_SUM, .unit = ""},
                                            {"share", VALUE_REAL, COMBINE_MIN, "", .digits = DECIMALS(4)},
                                            {"moved", VALUE_REAL, COMBINE_MEAN, .unit = ""},
                                            {"mean", VALUE_REAL, COMBINE_MEAN, "", .digits = 2},
                                            {"alone", VALUE_REAL, COMBINE_NONE, .unit = ""},
                                            {"half", VALUE_REAL, COMBINE_MIN, .unit = ""},
                                            {"cores", VALUE_REAL, COMBINE_SUM, "", .digits = 3},
                                            {"rate", VALUE_REAL, COMBINE_SUM, .unit = ""},
                                            {.name = NULL}};
    static const struct {
        const char *before[2], *combined;
    } cells[] = {{{"3", "3"}, "6"},
                 {{"", ""}, ""},
                 {{"1980", "1500"}, "1500"}, /* the clock of the slowest GPU */
                 {{"3201", ""}, ""},         /* empty, because one rank does not know it */
                 {{"avx512", "avx2"}, ""},   /* empty, because ranks differ */
                 {{"avx2", "avx2"}, "avx2"},
                 {{"fast", "slow"}, "fast"},
                 {{"0.5", "0.25"}, "0.5"},
                 {{"8000000000000002", "8000000000000001"}, "0000000000000003"},
                 {{"", ""}, ""},
                 {{"1", "0.50004"}, "0.5"}, /* as the rows show it */
                 {{"0.75", "0.25"}, "0.5"},
                 {{"1240", "0.0126"}, "600.0065"}, /* the mean of 1200 and 0.013 */
                 {{"7", "7"}, ""},
                 {{"7", ""}, ""},
                 {{"0.75", "0.5"}, "1.25"},
                 {{"999.75", "2.5e+06"}, "2500999.75"}};
    struct row rows[2], total;
    row_open(&total, columns);
    for (int i = 0; i < 2; i++) {
        row_open(&rows[i], columns);
        for (size_t c = 0; c < COUNT_OF(cells); c++)
            set_text(&rows[i], &columns[c], cells[c].before[i]);
    }
    ranks_combine(rows, 2, &total);
    cr_assert_eq(row_check(&total), STATUS_OK);
    for (size_t c = 0; c < COUNT_OF(cells); c++)
        cr_expect_str_eq(cell(&total, columns[c].name), cells[c].combined, "%s is '%s', not '%s'",
                         columns[c].name, cell(&total, columns[c].name), cells[c].combined);
    row_free(&total);
    for (int i = 0; i < 2; i++)
        row_free(&rows[i]);
}

Test(ranks, efficiency_depends_on_the_scaling)
{
    const struct partition weak = {.ranks = 4}, strong = {.ranks = 4, .strong = true};
    cr_expect_eq(ranks_efficiency(&weak, 3, 3), 1, "weak scaling: each rank has the work of a single rank");
    cr_expect_eq(ranks_efficiency(&weak, 3, 6), 0.5);
    cr_expect_eq(ranks_efficiency(&strong, 12, 3), 1,
                 "strong scaling: all ranks together have the work of a single rank");
    cr_expect_eq(ranks_efficiency(&strong, 3, 3), 0.25);
}
