/* Tests the shuffles of `load`: all permutations must be equally likely. Orders are pure functions of the
 * seed and the epoch, so the counts in these tests never change. */
#include <criterion/criterion.h>

#include "load/order.h"

enum { ITEMS = 4, PERMUTATIONS = 24, EXPECTED = 200, EPOCHS = PERMUTATIONS * EXPECTED };

/* Chi-square with 23 degrees of freedom exceeds this value with a probability of 1 in 100,000. */
#define CHI_SQUARE_MAX 67.0

/* Returns the number of a permutation of 0 to 3. */
static unsigned number_of(const uint32_t *items)
{
    unsigned number = 0;
    for (unsigned i = 0; i < ITEMS; i++) {
        unsigned smaller = 0;
        for (unsigned j = i + 1; j < ITEMS; j++)
            smaller += items[j] < items[i];
        number = number * (ITEMS - i) + smaller;
    }
    return number;
}

static void expect_all_permutations(const struct order_plan *plan, const char *what)
{
    unsigned counts[PERMUTATIONS] = {0};
    double chi_square = 0;
    struct order order;
    cr_assert_eq(order_open(plan, &order), STATUS_OK, "%s", status_text());
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        order_make(plan, epoch, 0, &order);
        cr_assert_eq(order.count, ITEMS);
        counts[number_of(order.samples)]++;
    }
    for (size_t i = 0; i < PERMUTATIONS; i++) {
        double off = (double)counts[i] - EXPECTED;
        cr_expect_gt(counts[i], 0, "%s: permutation %zu never occurs", what, i);
        chi_square += off * off / EXPECTED;
    }
    cr_expect_lt(chi_square, CHI_SQUARE_MAX, "%s: chi-square %g", what, chi_square);
    order_close(&order);
}

/* A biased shuffle omits permutations or prefers some. For example, Sattolo's algorithm gives only
 * permutations of a single cycle. */
Test(order, permutations_are_equally_likely)
{
    static const uint32_t each[] = {0, 1, 2, 3, 4}, all[] = {0, 4};
    const struct order_plan files = {.seed = 7, .samples = ITEMS, .workers = 1};
    const struct order_plan shards = {
        .seed = 7, .samples = ITEMS, .shards = 4, .shard_first = each, .shuffle_buffer = 1, .workers = 1};
    const struct order_plan window = {
        .seed = 7, .samples = ITEMS, .shards = 1, .shard_first = all, .shuffle_buffer = 4, .workers = 1};
    const struct order_plan keyed = {.seed = 7, .samples = ITEMS, .workers = 1, .keyed = true};
    expect_all_permutations(&files, "files");
    expect_all_permutations(&shards, "shards");
    expect_all_permutations(&window, "a shuffle buffer");
    expect_all_permutations(&keyed, "a keyed order");
}

/* With many items, every item must reach every index equally often, including its original index. */
Test(order, every_item_reaches_every_index)
{
    enum { COUNT = 50, TIMES = 100, ROUNDS = COUNT * TIMES };
    static unsigned counts[COUNT][COUNT];
    const struct order_plan plan = {.seed = 3, .samples = COUNT, .workers = 1};
    struct order order;
    double chi_square = 0, own = 0;
    cr_assert_eq(order_open(&plan, &order), STATUS_OK);
    for (uint64_t epoch = 0; epoch < ROUNDS; epoch++) {
        order_make(&plan, epoch, 0, &order);
        for (size_t i = 0; i < COUNT; i++) {
            counts[i][order.samples[i]]++;
            own += order.samples[i] == i;
        }
    }
    for (size_t i = 0; i < COUNT; i++)
        for (size_t j = 0; j < COUNT; j++)
            chi_square += ((double)counts[i][j] - TIMES) * ((double)counts[i][j] - TIMES) / TIMES;
    /* Chi-square has 49 * 49 = 2401 degrees of freedom and a standard deviation of 69. In each round, on
     * average one item keeps its original index. The number of such items in all rounds has a standard
     * deviation of 71. */
    cr_expect(chi_square > 2401 - 5 * 69 && chi_square < 2401 + 5 * 69, "%g", chi_square);
    cr_expect(own > ROUNDS - 5 * 71 && own < ROUNDS + 5 * 71, "%g", own);
    order_close(&order);
}
