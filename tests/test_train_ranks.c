/* Tests training on several ranks without MPI. The ranks are threads of this process, each with its own
 * engine, and an exchange that this file defines adds up their gradients. */
#include <pthread.h>

#include "core/portable.h"
#include "cpu_engines.h"
#include "train/trainer.h"
#include "train_support.h"

TestSuite(train_ranks, .timeout = 120);

/* ---- Ranks as threads ---- */

#define RANKS_MAX 13

/* Data that all ranks can read. `parts` and `statuses` are the latest gradients and status of each rank. */
struct meeting {
    pthread_barrier_t barrier;
    uint32_t ranks;
    const float *parts[RANKS_MAX];
    enum status statuses[RANKS_MAX];
};

/* One rank and its results. `own` and `sums` are its gradients before and after the latest exchange. */
struct member {
    struct exchange exchange;
    struct meeting *meeting;
    const struct engine *engine;
    struct train train;
    const struct train_state *begin;
    const uint32_t *shares; /* shares of all ranks, one epoch after another; NULL: equal */
    uint32_t epochs;
    float *own, *sums;
    size_t own_count;
    struct train_state end;
    float *gradients;
    struct train_totals totals;
    enum status status;
};

static enum status add_up(struct exchange *exchange, enum status status, float *gradients, size_t count)
{
    struct member *member = exchange->state;
    struct meeting *meeting = member->meeting;
    uint32_t rank = member->train.rank;
    member->own = realloc(member->own, count * sizeof(float));
    member->sums = realloc(member->sums, count * sizeof(float));
    memcpy(member->own, gradients, count * sizeof(float));
    member->own_count = count;
    meeting->parts[rank] = member->own;
    meeting->statuses[rank] = status;
    pthread_barrier_wait(&meeting->barrier);
    for (uint32_t i = 0; i < meeting->ranks; i++)
        if (meeting->statuses[i] != STATUS_OK)
            status = status_set(meeting->statuses[i], "rank %u failed", i);
    memcpy(member->sums, meeting->parts[0], count * sizeof(float));
    for (uint32_t i = 1; i < meeting->ranks; i++)
        for (size_t j = 0; j < count; j++)
            member->sums[j] += meeting->parts[i][j];
    pthread_barrier_wait(&meeting->barrier);
    memcpy(gradients, member->sums, count * sizeof(float));
    return status;
}

static const struct exchange_method by_threads = {.name = "threads", .sum = add_up};

static enum status train_all(struct member *member, void *state)
{
    const struct engine *engine = member->engine;
    TRY(engine->set(state, member->begin));
    for (uint32_t epoch = 0; epoch < member->epochs; epoch++) {
        if (member->shares)
            member->train.shares = member->shares + (size_t)epoch * member->train.ranks;
        TRY(engine->steps(state, epoch, 0, train_steps(&member->train)));
    }
    TRY(engine->totals(state, &member->totals));
    TRY(engine->gradients(state, member->gradients));
    return engine->get(state, &member->end);
}

static void *be_rank(void *context)
{
    struct member *member = context;
    const struct resources resources = {.threads = 2};
    size_t values = member->train.model->arena_values;
    void *state = NULL;
    member->gradients = calloc(values, sizeof(float));
    member->status = member->gradients && train_state_new(values, &member->end) ? STATUS_OK : STATUS_FAILED;
    if (member->status == STATUS_OK)
        member->status = member->engine->open(&member->train, &resources, &state);
    if (member->status == STATUS_OK)
        member->status = train_all(member, state);
    if (state)
        member->engine->close(state);
    return NULL;
}

static void member_free(struct member *member)
{
    train_state_free(&member->end);
    free(member->gradients);
    free(member->own);
    free(member->sums);
}

/* Trains `epochs` epochs on `ranks` ranks, and stores the ranks with their results in `members`. `shares` has
 * the shares of all ranks in each epoch; NULL: equal. Rank i has the engine engine_of[i]. The caller frees
 * the members. */
static void train_mixed(const struct engine *const *engine_of, const struct net *net, uint32_t ranks,
                        const uint32_t *shares, uint32_t epochs, struct member *members)
{
    struct meeting meeting = {.ranks = ranks};
    pthread_t threads[RANKS_MAX];
    const struct train_state begin = {.parameters = net->initial, .m = net->zeros, .v = net->zeros};
    cr_assert(ranks <= RANKS_MAX && pthread_barrier_init(&meeting.barrier, NULL, ranks) == 0);
    for (uint32_t i = 0; i < ranks; i++) {
        struct member *member = &members[i];
        *member = (struct member){.exchange = {.method = &by_threads, .state = member},
                                  .meeting = &meeting,
                                  .engine = engine_of[i],
                                  .train = net->train,
                                  .begin = &begin,
                                  .shares = shares,
                                  .epochs = epochs};
        member->train.rank = i;
        member->train.ranks = ranks;
        member->train.shares = shares;
        member->train.share_max = shares ? train_room(&member->train, epochs > 1) : 0;
        member->train.exchange = &member->exchange;
        for (uint32_t j = 1; j < ranks; j++)
            if (engine_of[j] != engine_of[0])
                member->exchange.mixed = &net->model;
    }
    for (uint32_t i = 0; i < ranks; i++)
        cr_assert(pthread_create(&threads[i], NULL, be_rank, &members[i]) == 0);
    for (uint32_t i = 0; i < ranks; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&meeting.barrier);
}

static void train_with(const struct engine *engine, const struct net *net, uint32_t ranks,
                       const uint32_t *shares, uint32_t epochs, struct member *members)
{
    const struct engine *engine_of[RANKS_MAX];
    for (uint32_t i = 0; i < ranks; i++)
        engine_of[i] = engine;
    train_mixed(engine_of, net, ranks, shares, epochs, members);
}

static void train_on(const struct engine *engine, const struct net *net, uint32_t ranks, uint32_t epochs,
                     struct member *members)
{
    train_with(engine, net, ranks, NULL, epochs, members);
}

static void free_all(struct member *members, uint32_t ranks)
{
    for (uint32_t i = 0; i < ranks; i++)
        member_free(&members[i]);
}

static bool same_bits(const float *one, const float *other, size_t count)
{
    return memcmp(one, other, count * sizeof(float)) == 0;
}

/* ---- Gradients ---- */

#define BATCH 13

/* Trains `net` for one step. Sets `bounds` to the largest difference between two computed sums of each
 * gradient, for any two orders of addition. In a network of one linear layer, a gradient is a sum of one term
 * per sample. The function trains with one sample per rank, so the gradients of a rank before the exchange
 * are the terms of its sample. With u = 2^-24, the computed sum of n terms is within n u sum |term| of the
 * exact sum, to first order. Two computed sums differ by at most twice this amount. */
static void find_bounds(const struct engine *engine, const struct net *net, size_t *count, double **bounds)
{
    struct member members[BATCH];
    train_on(engine, net, BATCH, 1, members);
    *count = members[0].own_count;
    *bounds = calloc(*count, sizeof **bounds);
    for (uint32_t rank = 0; rank < BATCH; rank++)
        for (size_t i = 0; i < *count; i++)
            (*bounds)[i] += fabs((double)members[rank].own[i]) * 2 * BATCH * 0x1p-24 * 1.001;
    free_all(members, BATCH);
}

/* Returns the sum of the losses of all ranks, each a sum of at most 13 losses in double precision. */
static double total_loss(const struct member *members, uint32_t ranks)
{
    double sum = 0;
    for (uint32_t i = 0; i < ranks; i++)
        sum += members[i].totals.loss;
    return sum;
}

/* Ways to divide a batch of 13 samples, which no number of ranks from 2 to 12 divides evenly. */
static const struct {
    uint32_t ranks, shares[7];
} divisions[] = {{2, {0}},
                 {3, {0}},
                 {4, {0}},
                 {5, {0}},
                 {6, {0}},
                 {7, {0}},
                 {2, {10, 3}},
                 {2, {1, 12}},
                 {2, {0, 13}},
                 {3, {4, 0, 9}},
                 {3, {11, 1, 1}},
                 {4, {0, 6, 0, 7}},
                 {5, {1, 2, 3, 4, 3}}};

/* Returns the shares of a case, or NULL for equal parts. */
static const uint32_t *shares_of(size_t number)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < divisions[number].ranks; i++)
        sum += divisions[number].shares[i];
    cr_assert(sum == 0 || sum == BATCH);
    return sum ? divisions[number].shares : NULL;
}

Test(train_ranks, gradients_differ_only_by_the_order_of_their_sums)
{
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        struct net net;
        struct member one, members[7];
        double *bounds;
        size_t count, different = 0;
        net_open(&net, cpu_engines[e], &model_tables[0], (struct shape){1, 1, 9, 7}, 5, BATCH, BATCH, 0.1f);
        find_bounds(cpu_engines[e], &net, &count, &bounds);
        train_on(cpu_engines[e], &net, 1, 1, &one);
        for (size_t d = 0; d < COUNT_OF(divisions); d++) {
            uint32_t ranks = divisions[d].ranks;
            train_with(cpu_engines[e], &net, ranks, shares_of(d), 1, members);
            for (size_t i = 0; i < count; i++) {
                double off = fabs((double)members[0].sums[i] - one.sums[i]);
                cr_assert(off <= bounds[i], "%s, case %zu, %u ranks: gradient %zu: %g > %g",
                          cpu_engines[e]->name, d, ranks, i, off, bounds[i]);
                different += off > 0;
            }
            cr_expect(fabs(total_loss(members, ranks) - one.totals.loss) <= 1e-12 * one.totals.loss);
            free_all(members, ranks);
        }
        cr_expect(different > 0, "the order of the sums never differs, so the bound is not tested");
        free(bounds);
        member_free(&one);
        net_close(&net);
    }
}

/* Compares training on several ranks with training on one rank. Per step, rounding changes the gradients of a
 * convolution by about 1e-7 of their norm. A sample that is left out, repeated or weighted wrongly changes
 * them by more than 1e-2. */
static void expect_equal_training(const struct engine *engine, const struct net *net, uint32_t ranks,
                                  const uint32_t *shares, uint32_t epochs)
{
    struct member one, members[RANKS_MAX], again[RANKS_MAX];
    size_t values = net->model.arena_values;
    uint64_t samples = 0;
    train_on(engine, net, 1, epochs, &one);
    train_with(engine, net, ranks, shares, epochs, members);
    train_with(engine, net, ranks, shares, epochs, again);
    for (uint32_t i = 0; i < ranks; i++) {
        cr_assert_eq(members[i].status, STATUS_OK);
        cr_expect(same_bits(members[i].end.parameters, members[0].end.parameters, values), "rank %u", i);
        cr_expect(same_bits(members[i].end.m, members[0].end.m, values), "rank %u", i);
        cr_expect(same_bits(again[i].end.parameters, members[i].end.parameters, values), "repeated");
        samples += members[i].totals.samples;
    }
    cr_expect_eq(samples, one.totals.samples);
    double gradients = relative_error(members[0].gradients, one.gradients, values),
           parameters = relative_error(members[0].end.parameters, one.end.parameters, values);
    cr_expect(gradients < 1e-4 && parameters < 1e-5, "%s, %u ranks: gradients %g, parameters %g",
              engine->name, ranks, gradients, parameters);
    member_free(&one);
    free_all(members, ranks);
    free_all(again, ranks);
}

/* With 23 samples in batches of 7, the last step has 2 samples, so some ranks have none. */
Test(train_ranks, ranks_without_samples_take_part_in_short_steps)
{
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++)
        for (uint32_t ranks = 2; ranks <= 5; ranks++) {
            struct net net;
            net_open(&net, cpu_engines[e], &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 23, 7, 0.1f);
            expect_equal_training(cpu_engines[e], &net, ranks, NULL, 2);
            net_close(&net);
        }
}

Test(train_ranks, a_batch_may_be_smaller_than_the_number_of_ranks)
{
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        struct net net;
        net_open(&net, cpu_engines[e], &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 6, 3, 0.1f);
        expect_equal_training(cpu_engines[e], &net, 5, NULL, 2);
        net_close(&net);
    }
}

/* 23 samples in batches of 7: an epoch without the last batch must equal the first 3 steps of an epoch. */
Test(train_ranks, the_last_batch_can_be_dropped)
{
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        struct net net;
        struct train_totals totals;
        struct train_state whole, dropped;
        net_open(&net, cpu_engines[e], &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 23, 7, 0.1f);
        cr_assert(train_state_new(net.model.arena_values, &whole) &&
                  train_state_new(net.model.arena_values, &dropped));
        must(cpu_engines[e]->steps(net.state, 0, 0, 3));
        must(cpu_engines[e]->get(net.state, &whole));
        net.train.drop_last = true;
        net_reopen(&net, cpu_engines[e]);
        cr_assert_eq(train_steps(&net.train), 3);
        must(cpu_engines[e]->steps(net.state, 0, 0, train_steps(&net.train)));
        must(cpu_engines[e]->totals(net.state, &totals));
        must(cpu_engines[e]->get(net.state, &dropped));
        cr_expect_eq(totals.samples, 21);
        cr_expect(same_bits(whole.parameters, dropped.parameters, net.model.arena_values));
        expect_equal_training(cpu_engines[e], &net, 3, NULL, 2);
        train_state_free(&whole);
        train_state_free(&dropped);
        net_close(&net);
    }
}

/* The ranks train on 23 samples in batches of 7. The shares change between epochs: one rank first gets no
 * samples, and later most of them. */
Test(train_ranks, shares_may_change_between_epochs)
{
    static const uint32_t shares[3][3] = {{5, 2, 0}, {0, 1, 6}, {3, 3, 1}};
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        struct net net;
        net_open(&net, cpu_engines[e], &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 23, 7, 0.1f);
        expect_equal_training(cpu_engines[e], &net, 3, shares[0], 3);
        net_close(&net);
    }
}

/* A rank with a small share, or none, must still test on the whole test set. */
Test(train_ranks, a_rank_without_a_share_tests_like_the_others)
{
    static const uint32_t shares[] = {0, 4, 1};
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        struct net net;
        float logits[3][5 * 4];
        net_open(&net, cpu_engines[e], &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 6, 5, 0);
        net.train.ranks = 3;
        net.train.shares = shares;
        for (uint32_t rank = 0; rank < 3; rank++) {
            net.train.rank = rank;
            net.train.share_max = train_room(&net.train, false);
            net_reopen(&net, cpu_engines[e]);
            must(cpu_engines[e]->evaluate(net.state, DATA_TEST, 0, 5, logits[rank]));
            cr_expect(same_bits(logits[rank], logits[0], COUNT_OF(logits[0])), "rank %u", rank);
        }
        net_close(&net);
    }
}

#ifdef _OPENMP
/* Engines with different layouts train together, as CPU and GPU engines do. After each update, their
 * parameters must be bit-identical. */
Test(train_ranks, different_engines_train_together)
{
    static const struct engine *const mixes[][3] = {{&engine_naive, &engine_omp, &engine_naive},
                                                    {&engine_omp, &engine_naive, &engine_omp}};
    static const uint32_t shares[2][3] = {{5, 2, 0}, {1, 3, 3}};
    for (size_t m = 0; m < COUNT_OF(mixes); m++)
        for (int kind = 0; kind < OPTIMIZER_KINDS; kind++) {
            struct net net;
            struct member one, members[3];
            net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 23, 7, 0.1f);
            net.train.optimizer = (struct optimizer){.kind = kind,
                                                     .momentum = 0.9,
                                                     .beta1 = 0.9,
                                                     .beta2 = 0.999,
                                                     .epsilon = 1e-3,
                                                     .weight_decay = 0.01};
            train_on(&engine_naive, &net, 1, 2, &one);
            train_mixed(mixes[m], &net, 3, shares[0], 2, members);
            for (uint32_t i = 0; i < 3; i++) {
                cr_assert_eq(members[i].status, STATUS_OK, "%s", status_text());
                cr_expect(
                    same_bits(members[i].end.parameters, members[0].end.parameters, net.model.arena_values) &&
                        same_bits(members[i].end.v, members[0].end.v, net.model.arena_values),
                    "mix %zu, optimizer %d, rank %u", m, kind, i);
            }
            double off =
                relative_error(members[0].end.parameters, one.end.parameters, net.model.arena_values);
            cr_expect(off < 1e-4, "mix %zu, optimizer %d: %g", m, kind, off);
            member_free(&one);
            free_all(members, 3);
            net_close(&net);
        }
}
#endif

/* A dropout mask, a shift or a flip that depended on the rank would change the gradients. */
Test(train_ranks, dropout_and_augmentation_do_not_depend_on_the_rank)
{
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        struct net net;
        net_open(&net, cpu_engines[e], &model_tables[2], (struct shape){1, 1, 10, 10}, 4, 11, 5, 0);
        net.train.augment = (struct augment){.shift = 2, .flip = true};
        expect_equal_training(cpu_engines[e], &net, 3, NULL, 2);
        net_close(&net);
    }
}

/* Opens LeNet with 23 canvases; a step has 6 samples with 3 copies each. */
static void open_canvases(struct net *net, const struct engine *engine, struct mixing mixing)
{
    net_open(net, engine, &model_tables[1], (struct shape){3, 1, 16, 16}, 4, 46, 18, 0.1f);
    data_add_canvases(&net->data, 25, 21);
    net->train.augment = augment_all(16, 16);
    net->train.mixing = mixing;
}

/* A rank augments the partners of its samples, even if the partners belong to other ranks. The last step has
 * 10 samples. */
Test(train_ranks, augmented_and_mixed_samples_are_those_of_one_rank)
{
    static const struct mixing mixings[] = {{0, 0}, {0, 1}, {0.8, 0}};
    static const uint32_t shares[2][3] = {{11, 7, 0}, {2, 9, 7}};
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++)
        for (size_t m = 0; m < COUNT_OF(mixings); m++) {
            struct net net;
            open_canvases(&net, cpu_engines[e], mixings[m]);
            expect_equal_training(cpu_engines[e], &net, 2, NULL, 2);
            expect_equal_training(cpu_engines[e], &net, 3, shares[0], 2);
            net_close(&net);
        }
}

#ifdef _OPENMP
Test(train_ranks, engines_augment_and_mix_the_same_samples)
{
    struct net net;
    struct member of_naive, of_omp;
    open_canvases(&net, &engine_naive, (struct mixing){0.8, 1});
    train_on(&engine_naive, &net, 1, 2, &of_naive);
    train_on(&engine_omp, &net, 1, 2, &of_omp);
    const double off = relative_error(of_omp.end.parameters, of_naive.end.parameters, net.model.arena_values);
    cr_expect(off < 1e-5, "%g", off);
    cr_expect_float_eq(of_omp.totals.loss, of_naive.totals.loss, 1e-5 * of_naive.totals.loss);
    cr_expect_eq(of_omp.totals.samples, 2 * 46);
    member_free(&of_naive);
    member_free(&of_omp);
    net_close(&net);
}
#endif

/* Opens a net with generated training samples and this feed: stored or live. */
static void open_synth(struct net *net, const struct engine *engine, int feed)
{
    const struct data_request request = {.name = "synth",
                                         .train_size = 13,
                                         .test_size = 5,
                                         .classes = 4,
                                         .res = 24,
                                         .batch = 5,
                                         .feed = feed,
                                         .resources = {.threads = 1}};
    net_open(net, engine, &model_tables[1], (struct shape){1, 1, 24, 24}, 4, 13, 5, 0);
    data_close(&net->data);
    must(data_open(&request, &net->data));
    data_normalise(&net->data, true);
    must(model_build(&model_tables[1], net->data.shape, 4, &net->model));
    free(net->initial);
    free(net->zeros);
    net->initial = calloc(net->model.arena_values, sizeof(float));
    net->zeros = calloc(net->model.arena_values, sizeof(float));
    model_initialise(&net->model, 3, net->initial);
}

/* Each rank generates its own samples. These samples must be those of a stored set. */
Test(train_ranks, live_samples_are_those_of_one_rank)
{
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        struct net stored, live;
        struct member of_stored[3], of_live[3];
        open_synth(&stored, cpu_engines[e], DATA_STORED);
        open_synth(&live, cpu_engines[e], DATA_LIVE);
        expect_equal_training(cpu_engines[e], &live, 3, NULL, 2);
        train_on(cpu_engines[e], &stored, 3, 2, of_stored);
        train_on(cpu_engines[e], &live, 3, 2, of_live);
        cr_expect(same_bits(of_live[0].end.parameters, of_stored[0].end.parameters, live.model.arena_values));
        free_all(of_stored, 3);
        free_all(of_live, 3);
        net_close(&stored);
        net_close(&live);
    }
}
