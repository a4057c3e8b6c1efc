#include "load/verifier.h"

#include <stdlib.h>

#include "data/set_stream.h"

/* ---- Expected samples ---- */

struct order_plan load_plan(const struct load *load, int threads)
{
    const struct dataset *dataset = load->dataset;
    struct order_plan plan = {.seed = load->given->seed,
                              .samples = dataset->sample_count,
                              .shards = dataset->shards ? dataset->file_count : 0,
                              .shard_first = dataset->shard_first,
                              .shuffle_buffer = load->given->shuffle,
                              .workers = load->ranks * (uint32_t)threads};
    return plan;
}

struct order_plan load_stream_plan(const struct load *load)
{
    struct order_plan plan = load_plan(load, 1);
    plan.lanes = (uint32_t)load->given->lanes;
    plan.batch = (uint32_t)load->given->batch;
    if (load->given->default_shuffle)
        plan.shuffle_buffer = STREAM_SHUFFLE;
    return plan;
}

enum status load_visit_epoch(const struct load *load, const struct order_plan *plan, uint64_t epoch,
                             void (*visit)(void *context, uint32_t sample), void *context)
{
    uint32_t threads = plan->workers / load->ranks;
    struct order order;
    TRY(order_open(plan, &order));
    for (uint32_t w = 0; w < threads; w++) {
        order_make(plan, epoch, load->rank * threads + w, &order);
        for (uint32_t i = 0; i < order.count; i++)
            visit(context, order.samples[i]);
    }
    order_close(&order);
    return STATUS_OK;
}

struct expecting {
    const struct dataset *dataset;
    struct checksum *checksum;
};

static void expect(void *context, uint32_t sample)
{
    const struct expecting *expecting = context;
    const struct dataset_sample *expected = &expecting->dataset->samples[sample];
    checksum_add(expecting->checksum, expected->edges, expected->bytes);
}

enum status load_expect(const struct load *load, const struct order_plan *plan, uint64_t number,
                        struct checksum *expected)
{
    struct expecting expecting = {load->dataset, expected};
    *expected = (struct checksum){0};
    for (uint32_t i = 0; i < load->epochs; i++)
        TRY(load_visit_epoch(load, plan, number * load->epochs + i, expect, &expecting));
    return STATUS_OK;
}

/* ---- Runs ---- */

/* Outcome of a sample in the runs so far. All runs of a row must lose the same samples; otherwise their times
 * measure different work. A comparison of counts is not enough, because every epoch assigns different samples
 * to a rank. */
enum outcome { OUTCOME_UNKNOWN, OUTCOME_READ, OUTCOME_LOST };

/* Returns whether every run decodes a different part of each image. If so, a damaged image is lost only in
 * the runs that decode the damaged part. */
static bool parts_vary(const struct load *load)
{
    return load->fit.res && load->fit.how != FIT_RESIZE;
}

enum status verifier_open(struct verifier *verifier, const struct load *load, const struct order_plan *plan)
{
    *verifier = (struct verifier){.load = load, .plan = *plan};
    if (load->given->on_error == ON_ERROR_FAIL)
        return STATUS_OK;
    verifier->outcomes = calloc(load->dataset->sample_count, 1);
    return ALLOCATED(verifier->outcomes, "out of memory for the outcomes of samples");
}

void verifier_close(struct verifier *verifier)
{
    free(verifier->outcomes);
    verifier->outcomes = NULL;
}

enum status verifier_ready(struct verifier *verifier, uint64_t number, struct cache_pages *before)
{
    const struct load *load = verifier->load;
    if (load->given->cache != LOAD_WARM || !verifier->settled)
        TRY(load_settle_cache(load, before));
    verifier->settled = true;
    if (!verifier->expects || load->ranks > 1) /* a single rank reads the same samples in every run */
        TRY(load_expect(load, &verifier->plan, number, &verifier->expected));
    verifier->expects = true;
    verifier->device_known = cache_device_bytes(&verifier->device_bytes);
    return STATUS_OK;
}

bool verifier_device_bytes(const struct verifier *verifier, uint64_t *bytes)
{
    uint64_t now;
    if (!verifier->device_known || !cache_device_bytes(&now))
        return false;
    *bytes = now - verifier->device_bytes;
    return true;
}

enum status verifier_lose(struct verifier *verifier, struct losses *losses, uint32_t sample,
                          enum status status)
{
    const struct dataset_sample *lost = &verifier->load->dataset->samples[sample];
    if (status != STATUS_FAILED)
        return status;
    if (!load_skips(verifier->load))
        return dataset_advise_skip(status);
    uint8_t *outcome = &verifier->outcomes[sample];
    if (*outcome != OUTCOME_LOST && losses->fresh++ < LOSSES_TOLD)
        losses->why[losses->fresh - 1] = status_save(status);
    losses->changed |= *outcome == OUTCOME_READ && !parts_vary(verifier->load);
    *outcome = OUTCOME_LOST;
    checksum_add(&losses->checksum, lost->edges, lost->bytes);
    return STATUS_OK;
}

void verifier_see(struct verifier *verifier, struct losses *losses, uint32_t sample, bool masked)
{
    const struct dataset_sample *seen = &verifier->load->dataset->samples[sample];
    const enum outcome now = masked ? OUTCOME_LOST : OUTCOME_READ;
    if (verifier->outcomes) {
        losses->changed |= verifier->outcomes[sample] != OUTCOME_UNKNOWN && verifier->outcomes[sample] != now;
        verifier->outcomes[sample] = (uint8_t)now;
    }
    if (masked)
        checksum_add(&losses->checksum, seen->edges, seen->bytes);
}

void verifier_note(struct verifier *verifier, struct losses *losses, const struct order *order, uint64_t lost)
{
    uint64_t known = 0;
    for (uint32_t i = 0; verifier->outcomes && i < order->count; i++) {
        uint8_t *outcome = &verifier->outcomes[order->samples[i]];
        known += *outcome == OUTCOME_LOST;
        if (*outcome == OUTCOME_UNKNOWN)
            *outcome = OUTCOME_READ;
    }
    losses->changed |= known != lost && !parts_vary(verifier->load);
}

void losses_merge(struct losses *all, const struct losses *one)
{
    for (uint64_t i = 0; i < one->fresh && i < LOSSES_TOLD; i++)
        status_warn_own("skipped in a run: %s", one->why[i].text);
    if (one->fresh > LOSSES_TOLD)
        status_warn_own("skipped in a run: %llu more samples",
                        (unsigned long long)(one->fresh - LOSSES_TOLD));
    checksum_merge(&all->checksum, &one->checksum);
    all->changed |= one->changed;
}

static enum status check_lost(uint64_t number, uint64_t delivered, const struct losses *lost)
{
    if (lost->changed)
        return status_set(STATUS_FAILED,
                          "run %llu lost %llu sample%s, but not the same samples as earlier runs: "
                          "the data set changes while it is measured; repair it and run again",
                          (unsigned long long)number, (unsigned long long)lost->checksum.count,
                          lost->checksum.count == 1 ? "" : "s");
    if (lost->checksum.count > 0 && delivered == 0)
        return status_set(STATUS_FAILED,
                          "run %llu could read none of its %llu samples; see the warning above",
                          (unsigned long long)number, (unsigned long long)lost->checksum.count);
    return STATUS_OK;
}

enum status verifier_finish(struct verifier *verifier, uint64_t number, const struct checksum *delivered,
                            const struct losses *lost)
{
    const struct load *load = verifier->load;
    const struct checksum *expected = &verifier->expected;
    struct checksum all = lost->checksum;
    load->control->lost = lost->checksum;
    TRY(check_lost(number, delivered->count, lost));
    checksum_merge(&all, delivered);
    if (load->control->whole || /* control->seen verifies samples one by one */
        (all.count == expected->count && all.bytes == expected->bytes && all.sum == expected->sum))
        return STATUS_OK;
    return status_set(
        STATUS_WRONG,
        "%s: run %llu delivered %llu samples and %llu bytes (hash %016llx), expected %llu and "
        "%llu (hash %016llx); the files changed after they were first read, or the variant has a fault",
        load->dataset->path, (unsigned long long)number, (unsigned long long)all.count,
        (unsigned long long)all.bytes, (unsigned long long)all.sum, (unsigned long long)expected->count,
        (unsigned long long)expected->bytes, (unsigned long long)expected->sum);
}
