/* Tests which samples of a step each rank trains: equal shares, given shares, and shares by measured speed.
 */
#include "core/portable.h"
#include "train/trainer.h"
#include "train_support.h"

TestSuite(train_shares, .timeout = 120);

/* ---- Shares ---- */

/* Checks that the samples of all ranks in a step, in rank order, are those that a single rank would have. */
static void expect_division(const struct train *alone, uint32_t ranks, const uint32_t *shares)
{
    uint32_t all[64], mine[64];
    const struct draw_order order = draw_order(1, 2, alone->data->sets[DATA_TRAIN].count);
    uint64_t of_epoch = 0;
    for (uint32_t step = 0; step < train_steps(alone); step++) {
        uint32_t count = train_batch(alone, &order, step, all), done = 0;
        for (uint32_t rank = 0; rank < ranks; rank++) {
            struct train train = *alone;
            train.rank = rank;
            train.ranks = ranks;
            train.shares = shares;
            train.share_max = shares ? train_room(&train, false) : 0;
            const struct share share = train_share(&train, step);
            cr_expect(share.first == done && share.total == count && share.count <= train_share_max(&train));
            cr_expect_eq(train_batch(&train, &order, step, mine), share.count);
            cr_expect(memcmp(mine, all + done, share.count * sizeof *mine) == 0);
            done += (uint32_t)share.count;
            of_epoch += step == 0 ? train_share_of_epoch(&train) : 0;
        }
        cr_expect_eq(done, count, "%u ranks, batch %u, step %u", ranks, alone->batch, step);
    }
    cr_expect_eq(of_epoch, alone->drop_last ? train_steps(alone) * alone->batch : order.count);
}

Test(train_shares, ranks_divide_the_samples_of_each_step)
{
    struct data data = {.feed = DATA_STORED};
    for (uint32_t count = 1; count < 40; count += 6)
        for (uint32_t batch = 1; batch <= count; batch++)
            for (uint32_t ranks = 1; ranks < 8; ranks++)
                for (int drop_last = 0; drop_last <= 1; drop_last++) {
                    const struct train alone = {.data = &data, .batch = batch, .drop_last = drop_last};
                    data.sets[DATA_TRAIN].count = count;
                    cr_expect_eq(train_steps(&alone),
                                 drop_last ? count / batch : (count + batch - 1) / batch);
                    expect_division(&alone, ranks, NULL);
                }
}

Test(train_shares, ranks_divide_the_samples_by_share)
{
    static const uint32_t shares[][4] = {{3, 1}, {1, 0, 2}, {0, 0, 5, 0}, {9, 1, 1, 2}, {1, 6}};
    struct data data = {.feed = DATA_STORED};
    for (size_t c = 0; c < COUNT_OF(shares); c++) {
        uint32_t batch = shares[c][0] + shares[c][1] + shares[c][2] + shares[c][3];
        for (uint32_t count = batch; count < 60; count++) {
            data.sets[DATA_TRAIN].count = count;
            expect_division(&(struct train){.data = &data, .batch = batch}, 4, shares[c]);
        }
    }
}

/* ---- Balance ---- */

static enum balance parsed(const char *text, double *weights)
{
    enum balance balance;
    must(balance_parse(text, 3, &balance, weights));
    return balance;
}

Test(train_shares, balance_is_read_from_text)
{
    static const char *const wrong[] = {"",      "3",           "3:1",    "1:2:3:4", "1:2:x",
                                        "1:2:",  ":1:2",        "1:-1:2", "0:0:0",   "0.5:1:1",
                                        "Equal", "1:2:1000001", "1:1:1 "};
    double weights[3];
    enum balance balance;
    cr_expect(parsed("equal", weights) == BALANCE_EQUAL && weights[0] == 1 && weights[2] == 1);
    cr_expect(parsed("measured", weights) == BALANCE_MEASURED && weights[1] == 1);
    cr_expect(parsed("memory", weights) == BALANCE_MEMORY);
    cr_expect(parsed("3:0:1000000", weights) == BALANCE_FIXED && weights[0] == 3 && weights[1] == 0 &&
              weights[2] == 1e6);
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        cr_expect_eq(balance_parse(wrong[i], 3, &balance, weights), STATUS_USAGE, "'%s'", wrong[i]);
        cr_expect(strstr(status_text(), "--balance"), "%s", status_text());
    }
    must(balance_parse("7", 1, &balance, weights));
}

/* The ranks compute 300 and 100 samples/s. */
Test(train_shares, shares_follow_speeds)
{
    static const double speeds[] = {300, 100};
    static const uint32_t equal[] = {32, 32}, fair[] = {48, 16}, nearly[] = {47, 17};
    uint32_t next[2];
    cr_expect_float_eq(balance_improve(speeds, 2, BALANCE_GAIN_MIN, equal, next), 0.5, 1e-12);
    cr_expect_arr_eq(next, fair, sizeof next);
    cr_expect_eq(balance_improve(speeds, 2, BALANCE_GAIN_MIN, fair, next), 0);
    cr_expect_arr_eq(next, fair, sizeof next);
    /* The new shares shorten a step from 0.17 s to 0.16 s. */
    cr_expect_float_eq(balance_improve(speeds, 2, 0.058, nearly, next), 1. / 17, 1e-12);
    cr_expect_arr_eq(next, fair, sizeof next);
    cr_expect_eq(balance_improve(speeds, 2, 0.059, nearly, next), 0);
    cr_expect_arr_eq(next, nearly, sizeof next);
}

/* Each rank keeps at least one sample. Otherwise, its speed could not be measured. */
Test(train_shares, a_very_slow_rank_keeps_one_sample)
{
    static const double speeds[] = {1000, 1e-3, 1000};
    static const uint32_t now[] = {5, 5, 5}, wanted[] = {7, 1, 7};
    uint32_t next[3];
    cr_expect(balance_improve(speeds, 3, BALANCE_GAIN_MIN, now, next) > 0.7);
    cr_expect_arr_eq(next, wanted, sizeof next);
}

Test(train_shares, unknown_speeds_change_nothing)
{
    static const double speeds[][2] = {{NAN, 1}, {1, INFINITY}, {0, 1}, {1, -1}};
    static const uint32_t now[] = {9, 1};
    uint32_t next[2] = {0};
    for (size_t i = 0; i < COUNT_OF(speeds); i++) {
        cr_expect_eq(balance_improve(speeds[i], 2, 0, now, next), 0);
        cr_expect_arr_eq(next, now, sizeof next, "case %zu", i);
    }
}

/* For any speeds, new shares have the same sum, give each rank a sample, and do not make a step longer. */
Test(train_shares, new_shares_are_valid_and_no_slower)
{
    for (uint32_t seed = 0; seed < 2000; seed++) {
        double speeds[5];
        uint32_t now[5], next[5], sum = 0, new_sum = 0, ranks = 1 + seed % 5;
        for (uint32_t i = 0; i < ranks; i++) {
            const struct philox_block draw = philox(philox_key(3), seed, i, 0, 0);
            speeds[i] = 1 + draw.word[0] % (seed % 3 ? 1000 : 4);
            now[i] = 1 + draw.word[1] % 60;
            sum += now[i];
        }
        double gain = balance_improve(speeds, ranks, BALANCE_GAIN_MIN, now, next);
        for (uint32_t i = 0; i < ranks; i++) {
            new_sum += next[i];
            cr_expect(next[i] > 0);
        }
        cr_expect_eq(new_sum, sum);
        cr_expect(gain == 0 || gain > BALANCE_GAIN_MIN);
        cr_expect_eq(gain > 0, memcmp(now, next, ranks * sizeof *now) != 0, "seed %u", seed);
        cr_expect_float_eq(balance_gain(speeds, ranks, now, next), gain, 1e-12);
    }
}

Test(train_shares, shares_of_a_checkpoint_continue_only_in_the_same_division)
{
    uint32_t shares[] = {18, 0, 6};
    const struct checkpoint kept = {.shares = shares, .share_count = 3, .balance = BALANCE_MEASURED},
                            none = {.balance = BALANCE_MEASURED};
    cr_expect(balance_continues(&kept, BALANCE_MEASURED, 3, 24));
    cr_expect(!balance_continues(&kept, BALANCE_MEMORY, 3, 24) &&
              !balance_continues(&kept, BALANCE_MEASURED, 2, 24) &&
              !balance_continues(&kept, BALANCE_MEASURED, 3, 25) &&
              !balance_continues(&none, BALANCE_MEASURED, 3, 24));
    shares[2] = UINT32_MAX; /* the sum must not wrap to 24 */
    shares[1] = 7;
    cr_expect(!balance_continues(&kept, BALANCE_MEASURED, 3, 24));
}
