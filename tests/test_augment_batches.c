/* Tests batches of augmented samples (train/feed.h). Batches must depend neither on threads nor on ranks, the
 * partners of mixed samples must be augmented, and engines must train on the same samples. */
#include "train_support.h"

#include "train/augment.h"
#include "train/feed.h"

LAYERS(classifier, false, {.kind = LAYER_LINEAR, .channels = 0});

/* The mixings of the tests below: none, MixUp and CutMix. */
static const struct mixing mixings[] = {{0, 0}, {0.8, 0}, {0, 1}};

static void open_augmented(struct net *net, const struct engine *engine, struct mixing mixing)
{
    net_open(net, engine, &classifier, (struct shape){3, 1, 9, 7}, 4, 20, 6, 0);
    data_add_canvases(&net->data, 12, 10);
    net->train.augment = augment_all(9, 7);
    net->train.mixing = mixing;
    net_reopen(net, engine);
}

static void gather_step(const struct train *train, int threads, uint32_t epoch, uint32_t step, float *values)
{
    struct feed feed = {0};
    uint32_t numbers[12];
    float partner[189];
    const struct mix mix = train_mix(train, epoch, step);
    const struct draw_order order = draw_order(train->seed, epoch, train->data->sets[DATA_TRAIN].count);
    const uint32_t count = train_batch(train, &order, step, numbers);
    must(feed_open(train, &(struct resources){.threads = threads}, &feed));
    must(feed_step(&feed, epoch, step, numbers, count));
    for (uint32_t j = 0; j < count; j++)
        feed_gather(&feed, &mix, epoch, numbers, count, j, partner, values + j * train->data->sample_values);
    feed_close(&feed);
}

static void compare_threads_and_ranks(struct mixing mixing)
{
    struct net net;
    float one[6 * 189], four[6 * 189], ranks[6 * 189];
    open_augmented(&net, &engine_naive, mixing);
    gather_step(&net.train, 1, 1, 2, one);
    gather_step(&net.train, 4, 1, 2, four);
    cr_expect_eq(memcmp(one, four, sizeof one), 0);
    for (uint32_t rank = 0; rank < 3; rank++) {
        struct train part = net.train;
        part.rank = rank;
        part.ranks = 3;
        gather_step(&part, 2, 1, 2, ranks + rank * 2 * 189);
    }
    cr_expect_eq(memcmp(one, ranks, sizeof one), 0);
    net_close(&net);
}

Test(augment_batches, batches_depend_neither_on_threads_nor_on_ranks)
{
    for (size_t i = 0; i < COUNT_OF(mixings); i++)
        compare_threads_and_ranks(mixings[i]);
}

/* The expected mixed batch is computed from the batch without mixing. The step has 2 samples with 3 copies
 * each. */
Test(augment_batches, partners_are_the_augmented_samples_at_the_mirrored_index)
{
    for (size_t i = 1; i < COUNT_OF(mixings); i++) {
        struct net net;
        float alone[6 * 189], mixed[6 * 189];
        open_augmented(&net, &engine_naive, mixings[i]);
        gather_step(&net.train, 2, 1, 2, mixed);
        const struct mix mix = train_mix(&net.train, 1, 2);
        net.train.mixing = mixings[0];
        gather_step(&net.train, 2, 1, 2, alone);
        for (uint32_t n = 0; n < 6 * 189; n++) {
            const uint32_t at = n % 189, y = at / 7 % 9, x = at % 7;
            const float wanted = mix_value(&mix, y, x, alone[n], alone[(5 - n / 189) * 189 + at]);
            cr_assert_float_eq(mixed[n], wanted, 1e-6, "%u: %g, not %g", n, (double)mixed[n], (double)wanted);
        }
        cr_expect(mix.share < 1 && memcmp(alone, mixed, sizeof alone) != 0);
        net_close(&net);
    }
}

/* With erase_last, samples are mixed before they are erased: the partner's noise is not in the result, and
 * the sample's own noise is not mixed. */
Test(augment_batches, samples_may_be_erased_after_they_are_mixed)
{
    for (size_t i = 1; i < COUNT_OF(mixings); i++) {
        struct net net;
        float mixed[6 * 189], last[6 * 189];
        uint32_t numbers[12], erased = 0;
        open_augmented(&net, &engine_naive, mixings[i]);
        net.train.augment.erase_last = true;
        gather_step(&net.train, 2, 1, 2, last);
        const struct augment augment = net.train.augment;
        net.train.augment.erasing = 0;
        gather_step(&net.train, 2, 1, 2, mixed);
        const struct draw_order order = draw_order(net.train.seed, 1, 20);
        cr_assert_eq(train_batch(&net.train, &order, 2, numbers), 6);
        for (uint32_t n = 0; n < 6 * 189; n++) {
            const struct draw_move move = box_move(&augment, net.train.seed, 1, numbers[n / 189]);
            const uint32_t at = n % 189;
            erased += move.erase.box.height > 0;
            cr_assert_eq(last[n], box_erased(&move.erase, at / 7 % 9, at % 7, at, mixed[n]), "%u", n);
        }
        cr_expect(erased > 0 && erased < 6 * 189);
        net_close(&net);
    }
}

/* A step has 2 samples with 3 copies each. The last step has only 2 entries: two copies of one sample. */
Test(augment_batches, a_step_has_copies_of_its_samples)
{
    struct net net;
    uint32_t numbers[6], count = 20;
    open_augmented(&net, &engine_naive, mixings[0]);
    struct draw_order order = draw_order(net.train.seed, 1, count);
    cr_expect_eq(train_steps(&net.train), 4);
    for (uint32_t step = 0; step < 4; step++) {
        uint32_t samples = train_batch(&net.train, &order, step, numbers);
        cr_assert_eq(samples, step == 3 ? 2 : 6);
        uint32_t distinct = step == 3 ? 1 : 2;
        for (uint32_t j = 0; j < samples; j++)
            cr_expect_eq(numbers[j], draw_order_at(&order, 2 * step + j % distinct) + j / distinct * count,
                         "step %u, %u", step, j);
    }
    net_close(&net);
}

static void compare_with_oracle(struct mixing mixing)
{
    struct net net, oracle;
    struct train_totals mine, right;
    open_augmented(&net, &engine_naive, mixing);
    open_augmented(&oracle, &engine_oracle, mixing);
    must(net.engine->steps(net.state, 1, 0, 4));
    must(oracle.engine->steps(oracle.state, 1, 0, 4));
    must(net.engine->totals(net.state, &mine));
    must(oracle.engine->totals(oracle.state, &right));
    cr_expect_float_eq(mine.loss, right.loss, 1e-4 * right.loss);
    cr_expect_eq(mine.samples, 20);
    net_close(&net);
    net_close(&oracle);
}

Test(augment_batches, engines_train_on_the_same_samples)
{
    for (size_t i = 0; i < COUNT_OF(mixings); i++)
        compare_with_oracle(mixings[i]);
}

Test(augment_batches, images_of_two_channels_are_refused)
{
    struct net net;
    struct feed feed = {0};
    net_open(&net, &engine_naive, &classifier, (struct shape){2, 1, 9, 7}, 4, 20, 6, 0);
    net.train.augment = augment_all(9, 7);
    cr_expect_eq(feed_open(&net.train, &(struct resources){.threads = 1}, &feed), STATUS_USAGE);
    cr_expect(strstr(status_text(), "one or three channels"), "%s", status_text());
    feed_close(&feed);
    net_close(&net);
}
