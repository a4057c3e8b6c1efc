/* Tests the exchange of gradients between ranks (train/exchange.h) with exchanges that this file defines.
 * Tests failed and wrong sums, and methods that an engine or an option excludes. */
#include "core/portable.h"
#include "cpu_engines.h"
#include "train/trainer.h"
#include "train_support.h"

TestSuite(train_exchange, .timeout = 120);

/* ---- Failures ---- */

static enum status failing_sum(struct exchange *exchange, enum status status, float *gradients, size_t count)
{
    uint32_t *left = exchange->state;
    (void)gradients, (void)count;
    return (*left)-- > 0 ? status : status_set(STATUS_FAILED, "planted");
}

/* After a failed exchange, the gradients are undefined and must not change the parameters. */
Test(train_exchange, a_failed_exchange_ends_the_steps_before_the_update)
{
    static const struct exchange_method method = {.name = "failing", .sum = failing_sum};
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        struct net net;
        struct train_state before, after;
        uint32_t left = 2;
        struct exchange exchange = {.method = &method, .state = &left};
        net_open(&net, cpu_engines[e], &model_tables[0], (struct shape){1, 1, 16, 16}, 4, 20, 5, 0);
        cr_assert(train_state_new(net.model.arena_values, &before) &&
                  train_state_new(net.model.arena_values, &after));
        must(cpu_engines[e]->steps(net.state, 0, 0, 2));
        must(cpu_engines[e]->get(net.state, &before));
        net.train.exchange = &exchange;
        net_reopen(&net, cpu_engines[e]);
        cr_expect_eq(cpu_engines[e]->steps(net.state, 0, 0, 4), STATUS_FAILED);
        cr_expect_str_eq(status_text(), "planted");
        must(cpu_engines[e]->get(net.state, &after));
        cr_expect_eq(memcmp(after.parameters, before.parameters, net.model.arena_values * sizeof(float)), 0,
                     "%s", cpu_engines[e]->name);
        train_state_free(&before);
        train_state_free(&after);
        net_close(&net);
    }
}

/* ---- Verification ---- */

static enum status scaled_sum(struct exchange *exchange, enum status status, float *gradients, size_t count)
{
    const float *factor = exchange->state;
    for (size_t i = 0; i < count; i++)
        gradients[i] *= *factor;
    return status;
}

/* The reference computes the steps without an exchange, so --verify must detect sums that are wrong. */
Test(train_exchange, verification_detects_a_wrong_sum)
{
    static const struct exchange_method method = {.name = "scaled", .sum = scaled_sum};
    static const float factors[] = {1, 1.02f};
    for (size_t i = 0; i < COUNT_OF(factors); i++) {
        struct net net;
        const struct resources resources = {.threads = 1};
        struct exchange exchange = {.method = &method, .state = (void *)(uintptr_t)&factors[i]};
        uint64_t wrong;
        void *trainer;
        net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 40, 9, 0.1f);
        struct train_job job = {
            .train = net.train, .initial = net.initial, .epochs = 1, .verify_steps = 5, .keep = 1};
        job.train.exchange = &exchange;
        must(trainer_open(&engine_naive, &resources, &job, &trainer));
        must(trainer_verify(NULL, NULL, trainer, 0, &wrong));
        cr_expect_eq(wrong > 0, i == 1, "factor %g: %llu wrong", (double)factors[i],
                     (unsigned long long)wrong);
        trainer_close(trainer);
        net_close(&net);
    }
}

/* ---- Methods ---- */

Test(train_exchange, engines_without_an_exchange_are_refused_with_the_reason)
{
    struct engine alone = engine_naive;
    const struct optimizer plain = {};
    alone.gradients_in = GRADIENTS_ALONE;
    for (int sync = 0; sync < 2; sync++) {
        must(exchange_probe(sync, &engine_naive, &plain));
        cr_expect_eq(exchange_probe(sync, &alone, &plain), STATUS_UNAVAILABLE);
        cr_expect_not_null(
            strstr(status_text(), "mpi: the gradients of this variant are not in host memory"));
    }
}

/* Probing needs no GPU. */
Test(train_exchange, exchanges_that_update_refuse_clipping_and_averages)
{
    struct engine engine = engine_naive;
    const struct optimizer plain = {.layer_decay = 0.75}, clips = {.clip_norm = 1},
                           averages = {.average = 0.9}, adapts = {.clip_adaptive = 0.01},
                           lamb = {.kind = OPTIMIZER_LAMB}, muon = {.kind = OPTIMIZER_MUON};
    int peer = 0, fused = 0;
    while (strcmp(exchange_names[peer], "peer") != 0)
        peer++;
    while (strcmp(exchange_names[fused], "peer-fused") != 0)
        fused++;
    engine.gradients_in = GRADIENTS_IN_DEVICE;
    engine.shares_update = true;
    if (exchange_probe(fused, &engine, &plain) != STATUS_OK) {
        cr_expect_not_null(strstr(status_text(), "needs a build with CUDA"), "%s", status_text());
        return;
    }
    must(exchange_probe(peer, &engine, &clips));
    must(exchange_probe(peer, &engine, &averages));
    must(exchange_probe(0, &engine, &clips));
    cr_expect_eq(exchange_probe(fused, &engine, &clips), STATUS_USAGE);
    cr_expect_not_null(strstr(status_text(), "use --sync peer, or drop --clip-norm"), "%s", status_text());
    cr_expect_eq(exchange_probe(fused, &engine, &averages), STATUS_USAGE);
    cr_expect_not_null(strstr(status_text(), "use --sync peer, or drop --ema"), "%s", status_text());
    must(exchange_probe(peer, &engine, &lamb));
    cr_expect_eq(exchange_probe(fused, &engine, &adapts), STATUS_USAGE);
    cr_expect_not_null(strstr(status_text(), "or drop --clip-adaptive"), "%s", status_text());
    cr_expect_eq(exchange_probe(fused, &engine, &lamb), STATUS_USAGE);
    cr_expect_eq(exchange_probe(fused, &engine, &muon), STATUS_USAGE);
    cr_expect_not_null(strstr(status_text(), "lamb and muon need whole tensors"), "%s", status_text());
}
