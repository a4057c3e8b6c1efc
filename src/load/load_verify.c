/* Verification of `load`: computes which samples a run must deliver, and compares them with the samples that
 * it delivered. */
#include <stdlib.h>

#include "data/checksum.h"
#include "data/dataset.h"
#include "load/load_parts.h"
#include "load/order.h"

struct order_plan load_plan(const struct load *load, int threads)
{
    const struct dataset *dataset = load->dataset;
    struct order_plan plan = {.seed = load->seed,
                              .samples = dataset->sample_count,
                              .shards = dataset->shards ? dataset->file_count : 0,
                              .shard_first = dataset->shard_first,
                              .shuffle_buffer = load->shuffle_buffer,
                              .workers = load->ranks * (uint32_t)threads};
    return plan;
}

struct order_plan load_variant_plan(const struct load *load, const struct variant *variant, int threads)
{
    struct order_plan plan = load_plan(load, threads);
    plan.keyed = ((const struct load_traits *)variant->traits)->keyed;
    return plan;
}

/* Calls `visit` for every sample that the threads of this rank read in `epoch`. */
static enum status visit_epoch(const struct load *load, const struct order_plan *plan, uint64_t epoch,
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
        TRY(visit_epoch(load, plan, number * load->epochs + i, expect, &expecting));
    return STATUS_OK;
}

static void want(void *context, uint32_t sample)
{
    uint8_t *wanted = context;
    wanted[sample]++;
}

enum status load_check_closely(void *input, bool closely)
{
    struct load_job *job = input;
    struct load_control *control = &job->control;
    if (!closely && !control->whole)
        return STATUS_OK;
    if (closely) {
        TRY(dataset_hash(&job->dataset));
        control->seen = calloc(job->dataset.sample_count, 1);
        TRY(ALLOCATED(control->seen, "out of memory to verify"));
        job->epochs = job->load.epochs;
        job->lost = control->lost;
        job->load.epochs = 1;
    } else {
        free(control->seen);
        control->seen = NULL;
        job->load.epochs = job->epochs;
        control->lost = job->lost;
    }
    control->whole = closely;
    return STATUS_OK;
}

/* A run with control->whole sets control->seen[i] to its number of correct deliveries of sample i. A delivery
 * is correct if it has the hash over all bytes that the plain reader (data/plain_reader.h) computed. This
 * function counts the samples whose number of correct deliveries differs from the number that the epoch
 * requires. Skipped samples do not count as wrong. */
static enum status count_unseen(const struct load_job *job, const struct variant *variant, uint64_t number,
                                const struct load_result *result, uint64_t *wrong)
{
    struct order_plan plan = load_variant_plan(&job->load, variant, 1);
    FREED uint8_t *wanted = calloc(job->dataset.sample_count, 1);
    TRY(ALLOCATED(wanted, "out of memory to verify"));
    TRY(visit_epoch(&job->load, &plan, number, want, wanted));
    for (uint32_t i = 0; i < job->dataset.sample_count; i++)
        *wrong += job->control.seen[i] != wanted[i];
    *wrong -= *wrong < result->skipped ? *wrong : result->skipped;
    return STATUS_OK;
}

enum status load_verify(const void *input, const struct variant *variant, void *state, uint64_t number,
                        uint64_t *wrong)
{
    const struct load_job *job = input;
    const struct load_traits *traits = variant->traits;
    *wrong = 0;
    FREED struct load_result *result = malloc(sizeof *result);
    TRY(ALLOCATED(result, "out of memory to verify"));
    TRY(variant->fetch(state, result));
    if (result->number != number) {
        *wrong = (uint64_t)load_work(input, variant).items;
        return STATUS_OK;
    }
    return job->control.whole ? count_unseen(job, variant, number, result, wrong)
                              : traits->verify_slots(state, wrong);
}
