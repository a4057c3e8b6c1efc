/* Tests MixUp, CutMix, soft targets, binary cross-entropy, and mixed steps in parts (--accumulate). */
#include "cpu_engines.h"
#include "train_support.h"

/* ---- The share ---- */

/* Beta(a, a) has the mean 1/2 and the variance 1 / (4 (2 a + 1)). */
Test(train_mix, shares_have_the_moments_of_the_beta_distribution)
{
    static const double alphas[] = {0.1, 0.5, 0.8, 1, 2, 30};
    enum { COUNT = 40000 };
    for (size_t i = 0; i < COUNT_OF(alphas); i++) {
        double sum = 0, squares = 0, variance = 1 / (4 * (2 * alphas[i] + 1));
        for (uint32_t step = 0; step < COUNT; step++) {
            double share = mix_beta(alphas[i], 5, step % 7, step);
            cr_assert(share >= 0 && share <= 1);
            sum += share;
            squares += (share - 0.5) * (share - 0.5);
        }
        cr_expect(fabs(sum / COUNT - 0.5) < 5 * sqrt(variance / COUNT), "alpha %g: mean %g", alphas[i],
                  sum / COUNT);
        cr_expect(fabs(squares / COUNT / variance - 1) < 0.03, "alpha %g: variance %g instead of %g",
                  alphas[i], squares / COUNT, variance);
    }
}

/* Beta(1, 1) is uniform. */
Test(train_mix, shares_of_alpha_1_are_uniform)
{
    enum { BINS = 20, COUNT = 20000 };
    uint32_t counts[BINS] = {0};
    for (uint32_t step = 0; step < COUNT; step++)
        counts[(uint32_t)(mix_beta(1, 3, 0, step) * BINS)]++;
    for (int i = 0; i < BINS; i++)
        cr_expect(abs((int)counts[i] - COUNT / BINS) < 5 * 31, "bin %d: %u", i,
                  counts[i]); /* 31: standard deviation of a count */
}

Test(train_mix, shares_of_extreme_alphas_are_finite)
{
    for (uint32_t step = 0; step < 1000; step++) {
        double small = mix_beta(1e-6, 1, 0, step), large = mix_beta(1000, 1, 0, step);
        cr_expect(small < 1e-6 || small > 1 - 1e-6, "%g", small);
        cr_expect(fabs(large - 0.5) < 0.07, "%g", large);
    }
}

/* Changes of the draws would change the results of all training with these options. */
Test(train_mix, known_shares_never_change)
{
    static const struct {
        double alpha;
        uint64_t seed;
        uint32_t epoch, step;
        double share;
    } known[] = {{0.8, UINT64_C(0), 0, 0, 0.566305342516529},
                 {0.8, UINT64_C(0), 0, 1, 0.135961063249737},
                 {1, UINT64_C(7), 3, 2, 0.736611928741675},
                 {0.1, UINT64_C(1), 0, 5, 0.999960590810857},
                 {4, UINT64_C(18446744073709551615), 299, 1000, 0.477545071166501}};
    for (size_t i = 0; i < COUNT_OF(known); i++) {
        double share = mix_beta(known[i].alpha, known[i].seed, known[i].epoch, known[i].step);
        cr_expect(fabs(share - known[i].share) < 1e-12, "%zu: %.15g", i, share);
    }
}

/* ---- The method and the rectangle ---- */

static const struct shape oblong = {3, 1, 7, 29};

Test(train_mix, each_method_is_drawn_as_often_if_both_are_on)
{
    const struct mixing both = {0.8, 1}, up = {0.8, 0}, cut = {0, 1};
    uint32_t cuts = 0;
    for (uint32_t step = 0; step < 10000; step++) {
        struct mix mix = mix_draw(&both, 1, 2, step, &oblong);
        cuts += mix.cut;
        cr_assert(!mix_draw(&up, 1, 2, step, &oblong).cut && mix_draw(&cut, 1, 2, step, &oblong).cut);
        if (!mix.cut)
            cr_assert_eq(mix.share, (float)mix_beta(0.8, 1, 2, step));
    }
    cr_expect(abs((int)cuts - 5000) < 250, "%u", cuts);
}

/* Before clipping, a side of the rectangle is 2 * floor(floor(n * sqrt(1 - share)) / 2), where n is the side
 * of the image. */
Test(train_mix, rectangles_follow_timm)
{
    const struct mixing cut = {0, 1};
    uint32_t clipped = 0, empty = 0;
    for (uint32_t step = 0; step < 2000; step++) {
        const struct mix mix = mix_draw(&cut, 9, 0, step, &oblong);
        const double side = sqrt(1 - mix_beta(1, 9, 0, step));
        const uint32_t height = (uint32_t)(7 * side) / 2 * 2, width = (uint32_t)(29 * side) / 2 * 2;
        const uint32_t is_high = mix.bottom - mix.top, is_wide = mix.right - mix.left;
        cr_assert(mix.top <= mix.bottom && mix.bottom <= 7 && mix.left <= mix.right && mix.right <= 29);
        cr_assert(is_high == height || (is_high < height && (mix.top == 0 || mix.bottom == 7)));
        cr_assert(is_wide == width || (is_wide < width && (mix.left == 0 || mix.right == 29)));
        cr_assert_eq(mix.share, (float)(1 - is_high * is_wide / (7.0 * 29)));
        clipped += is_high < height || is_wide < width;
        empty += mix.share >= 1;
    }
    cr_expect(clipped > 500 && empty > 0, "%u clipped, %u empty", clipped, empty);
}

/* ---- Values, targets, losses ---- */

Test(train_mix, values_match_hand_computed_ones)
{
    const struct shape shape = {2, 1, 2, 3};
    const float partner[12] = {10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120};
    float mixed[12], cut[12];
    const struct mix up = {.share = 0.25f},
                     over = {.share = 2 / 3.0f, .cut = true, .bottom = 1, .left = 1, .right = 3};
    for (int i = 0; i < 12; i++)
        mixed[i] = cut[i] = (float)i;
    mix_samples(&up, &shape, partner, mixed);
    mix_samples(&over, &shape, partner, cut);
    for (int i = 0; i < 12; i++) {
        cr_expect_eq(mixed[i], 0.25f * (float)i + 0.75f * partner[i]);
        cr_expect_eq(cut[i], i % 6 == 1 || i % 6 == 2 ? partner[i] : (float)i, "%d", i);
    }
}

Test(train_mix, targets_match_hand_computed_ones)
{
    static const struct {
        struct target target;
        float smoothing, wanted[4];
    } cases[] = {
        {{1, 1, 1}, 0, {0, 1, 0, 0}},
        {{1, 2, 1}, 0, {0, 1, 0, 0}},
        {{1, 2, 0}, 0, {0, 0, 1, 0}},
        {{1, 2, 0.3f}, 0, {0, 0.3f, 0.7f, 0}},
        {{2, 2, 0.3f}, 0, {0, 0, 1, 0}},
        {{1, 1, 1}, 0.1f, {0.025f, 0.925f, 0.025f, 0.025f}},
        {{1, 2, 0.3f}, 0.1f, {0.025f, 0.295f, 0.655f, 0.025f}},
        {{3, 0, 0.3f}, 1, {0.25f, 0.25f, 0.25f, 0.25f}},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (uint32_t k = 0; k < 4; k++) {
            float is = target_of(&cases[i].target, NULL, cases[i].smoothing, 4, k);
            cr_expect(fabsf(is - cases[i].wanted[k]) < 1e-7f, "%zu, class %u: %g", i, k, is);
        }
}

/* A sample that is not mixed must have the target that it had before targets were mixed, bit for bit. */
Test(train_mix, targets_without_mixing_are_exact)
{
    for (int i = 0; i <= 100; i++) {
        const float smoothing = (float)i / 100;
        const struct target target = {2, 2, 1};
        for (uint32_t k = 0; k < 5; k++)
            cr_expect_eq(target_of(&target, NULL, smoothing, 7, k),
                         smoothing / (float)7 + (k == 2 ? 1 - smoothing : 0));
    }
}

Test(train_mix, binary_cross_entropy_matches_hand_computed_values)
{
    static const struct {
        float logit, wanted, loss, delta;
    } cases[] = {
        {0, 0, 0.69314718f, 0.5f},
        {0, 1, 0.69314718f, -0.5f},
        {2, 1, 0.12692801f, -0.11920292f},
        {2, 0.3f, 1.5269280f, 0.5807971f},
        {-2, 0, 0.12692801f, 0.11920292f},
        {-1, 0.5f, 0.81326169f, -0.2310586f},
        {200, 1, 0, 0},
        {200, 0, 200, 1},
        {-200, 1, 200, -1},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        float delta, loss = loss_binary_weighted(cases[i].logit, cases[i].wanted, 1, &delta);
        cr_expect(fabsf(loss - cases[i].loss) < 1e-6f && fabsf(delta - cases[i].delta) < 1e-6f,
                  "%zu: loss %.8g, derivative %.8g", i, loss, delta);
    }
}

/* ---- Steps ---- */

LAYERS(only, false, {.kind = LAYER_LINEAR});

/* Computes the loss of a sample from its values and its target, with formulas that no engine uses. */
static double direct_loss(const struct net *net, const double *values, const double *wanted)
{
    const struct layer *layer = &net->model.layers[0];
    double logits[4], sum = 0, loss = 0;
    for (size_t k = 0; k < 4; k++) {
        logits[k] = net->initial[layer->bias + k];
        for (size_t i = 0; i < layer->in_values; i++)
            logits[k] += net->initial[layer->weight + k * layer->in_values + i] * values[i];
        sum += exp(logits[k]);
    }
    for (size_t k = 0; k < 4; k++) {
        const double p = 1 / (1 + exp(-logits[k]));
        loss -= net->train.loss == LOSS_BINARY ? (wanted[k] * log(p) + (1 - wanted[k]) * log(1 - p)) / 4
                                               : wanted[k] * log(exp(logits[k]) / sum);
    }
    return loss;
}

/* Returns whether a sample with this label shows a class: with multi-hot labels, `label` is its number. */
static bool shows(const struct net *net, uint32_t label, uint32_t k)
{
    return net->data.multi_hot ? philox(philox_key(3), label, DATA_TRAIN, k, 0).word[0] % 3 == 0 : k == label;
}

/* Returns the mean loss of a step with `count` samples, computed directly. */
static double direct_step(const struct net *net, uint32_t step, uint32_t count)
{
    enum { VALUES = 3 * 7 * 5 };
    const struct train *train = &net->train;
    const struct draw_order order = draw_order(train->seed, 0, net->data.sets[DATA_TRAIN].count);
    const struct mix mix = mix_draw(&train->mixing, train->seed, 0, step, &net->data.shape);
    double loss = 0;
    for (uint32_t j = 0; j < count; j++) {
        float pair[2][VALUES];
        double values[VALUES], wanted[4];
        uint32_t labels[2];
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t number = draw_order_at(&order, step * train->batch + (i ? count - 1 - j : j));
            labels[i] = net->data.sets[DATA_TRAIN].labels[number];
            data_gather(&net->data, data_sample(&net->data, DATA_TRAIN, number),
                        draw_move(&train->augment, train->seed, 0, number), pair[i]);
        }
        for (uint32_t i = 0; i < VALUES; i++) {
            const uint32_t y = i / 5 % 7, x = i % 5;
            const bool inside = y >= mix.top && y < mix.bottom && x >= mix.left && x < mix.right;
            values[i] = mix.cut ? (double)pair[inside][i]
                                : mix.share * (double)pair[0][i] + (1 - mix.share) * (double)pair[1][i];
        }
        for (uint32_t k = 0; k < 4; k++)
            wanted[k] =
                train->smoothing / 4 + (1 - train->smoothing) * (mix.share * shows(net, labels[0], k) +
                                                                 (1 - mix.share) * shows(net, labels[1], k));
        loss += direct_loss(net, values, wanted) / count;
    }
    return loss;
}

/* Compares every step of an epoch of 10 samples. The last step of batches of 4 is short. */
static void compare_steps(const struct engine *engine, struct mixing mixing, enum loss_kind loss,
                          bool multi_hot, uint32_t batch, uint32_t parts)
{
    struct net net;
    net_open(&net, &engine_oracle, &only, (struct shape){3, 1, 7, 5}, 4, 10, batch, 0.1f);
    if (multi_hot)
        data_random_multi_hot(&net.data);
    net.train.mixing = mixing;
    net.train.loss = loss;
    net.train.accumulate = parts;
    net.train.augment = (struct augment){.shift = 1, .flip = true};
    for (uint32_t step = 0; step < train_steps(&net.train); step++) {
        struct train_totals totals;
        net_reopen(&net, engine);
        must(engine->steps(net.state, 0, step, 1));
        must(engine->totals(net.state, &totals));
        const double is = totals.loss / (double)totals.samples,
                     wanted = direct_step(&net, step, (uint32_t)totals.samples);
        cr_expect(fabs(is - wanted) < 1e-5 * wanted,
                  "%s, mixup %g, cutmix %g, batch %u, %u parts, step %u: %g, not %g", engine->name,
                  mixing.mixup, mixing.cutmix, batch, parts, step, is, wanted);
    }
    net_close(&net);
}

Test(train_mix, losses_of_steps_match_a_direct_computation)
{
    static const struct mixing mixings[] = {{0.8, 0}, {0, 1}, {0.8, 1}};
    static const uint32_t batches[] = {1, 4, 5, 10};
    for (size_t i = 0; i < COUNT_OF(mixings); i++)
        for (size_t j = 0; j < COUNT_OF(batches); j++)
            for (int kind = 0; kind < 3; kind++) {
                const enum loss_kind loss = kind ? LOSS_BINARY : LOSS_CROSS_ENTROPY;
                compare_steps(&engine_oracle, mixings[i], loss, kind == 2, batches[j], 1);
                for (size_t e = 0; e < COUNT_OF(cpu_engines); e++)
                    for (uint32_t parts = 1; parts <= 7; parts += parts == 1 ? 2 : 4)
                        compare_steps(cpu_engines[e], mixings[i], loss, kind == 2, batches[j], parts);
            }
}

/* ---- Steps in parts, on several ranks ---- */

/* The loss and the gradients of a step, summed over all ranks. */
struct step_sums {
    double loss;
    float *gradients;
};

/* Computes a step rank by rank, each with the initial parameters, and adds up the results. */
static struct step_sums sums_of_step(struct net *net, const struct engine *engine, uint32_t ranks,
                                     const uint32_t *shares, uint32_t parts, uint32_t step)
{
    const size_t values = net->model.arena_values;
    const struct train whole = net->train;
    struct step_sums sums = {0, calloc(values, sizeof(float))};
    float *own = calloc(values, sizeof(float));
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct train_totals totals;
        net->train.rank = rank;
        net->train.ranks = ranks;
        net->train.shares = shares;
        net->train.accumulate = parts;
        net->train.share_max = train_room(&net->train, false);
        net_reopen(net, engine);
        must(engine->steps(net->state, 1, step, 1));
        must(engine->totals(net->state, &totals));
        must(engine->gradients(net->state, own));
        sums.loss += totals.loss;
        for (size_t i = 0; i < values; i++)
            sums.gradients[i] += own[i];
    }
    net->train = whole;
    free(own);
    return sums;
}

/* Compares steps in parts with the same steps of `train-naive` on one rank and without parts. */
static void compare_in_parts(struct net *net, const struct engine *engine, uint32_t ranks,
                             const uint32_t *shares)
{
    const size_t values = net->model.arena_values;
    for (uint32_t step = 0; step < train_steps(&net->train); step++) {
        const struct step_sums right = sums_of_step(net, &engine_naive, 1, NULL, 1, step);
        for (uint32_t parts = 1; parts <= 7; parts += parts == 1 ? 2 : 4) {
            const struct step_sums mine = sums_of_step(net, engine, ranks, shares, parts, step);
            double off = 0, norm = 0;
            for (size_t i = 0; i < values; i++) {
                off += pow((double)mine.gradients[i] - (double)right.gradients[i], 2);
                norm += pow((double)right.gradients[i], 2);
            }
            cr_expect(fabs(mine.loss - right.loss) < 1e-5 * right.loss && sqrt(off) < 1e-4 * sqrt(norm),
                      "%s, %u ranks, %u parts, step %u: loss %g instead of %g, gradients off by %g",
                      engine->name, ranks, parts, step, mine.loss, right.loss, sqrt(off / norm));
            free(mine.gradients);
        }
        free(right.gradients);
    }
}

/* train_held_at() must find each entry of a part among the samples of a rank. Partners must be at mirrored
 * indices. */
static void compare_places(const struct share *share, const struct share *part, bool partners)
{
    const struct train_held held = {true, partners, (uint32_t)share->count,
                                    (uint32_t)(part->first - share->first)};
    const uint32_t count = (uint32_t)part->count;
    for (uint32_t j = 0; j < 2 * count; j++) {
        const uint32_t at = train_held_at(&held, count, j);
        cr_assert(at < (partners ? 2 : 1) * held.count);
        cr_expect_eq(train_entry(share, at), train_entry(part, j));
        cr_expect(j < count || train_entry(part, j) == share->total - 1 - train_entry(part, j - count));
    }
}

/* Engines on a GPU generate all samples of a rank's share of a step at once. Each part of the step must then
 * find its samples and their partners among these samples. */
Test(train_mix, parts_find_their_partners_in_the_share)
{
    for (uint64_t total = 1; total < 20; total++)
        for (uint32_t ranks = 1; ranks <= 3; ranks++)
            for (uint32_t rank = 0; rank < ranks; rank++)
                for (uint32_t parts = 1; parts < 9; parts++) {
                    const struct train train = {.accumulate = parts};
                    const struct partition partition = {.rank = rank, .ranks = ranks, .strong = true};
                    const struct share share = partition_share(&partition, total);
                    for (uint32_t i = 0; i < parts; i++) {
                        const struct share part = train_part(&train, &share, i);
                        compare_places(&share, &part, true);
                        if (ranks == 1)
                            compare_places(&share, &part, false);
                    }
                }
}

/* Tests augmented copies and a short last step. The partner of a sample may be in another part, on another
 * rank, or both. A rank may have fewer samples than parts, or none. */
Test(train_mix, parts_mix_the_samples_of_the_whole_step, .timeout = 120)
{
    static const struct mixing mixings[] = {{0.8, 0}, {0, 1}};
    static const uint32_t uneven[] = {11, 7, 0};
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++)
        for (size_t i = 0; i < COUNT_OF(mixings); i++) {
            struct net net;
            net_open(&net, cpu_engines[e], &model_tables[1], (struct shape){3, 1, 16, 16}, 4, 46, 18, 0.1f);
            data_add_canvases(&net.data, 25, 21);
            net.train.augment = augment_all(16, 16);
            net.train.mixing = mixings[i];
            for (uint32_t ranks = 1; ranks <= 3; ranks++)
                compare_in_parts(&net, cpu_engines[e], ranks, NULL);
            compare_in_parts(&net, cpu_engines[e], 3, uneven);
            net_close(&net);
        }
}
