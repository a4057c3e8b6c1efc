#include "load/proof.h"

#include <stdio.h>
#include <stdlib.h>

/* What runs so far made of a sample. A row's runs must all lose the same ones: else their times are of
 * different work. Counts would not do, as ranks are dealt other samples in every epoch. */
enum fate { FATE_UNKNOWN, FATE_READ, FATE_LOST };

enum status proof_open(struct proof *proof, const struct load *load, const struct order_plan *plan)
{
    *proof = (struct proof){.load = load, .plan = *plan};
    if (!load->skip)
        return STATUS_OK;
    proof->fates = calloc(load->dataset->sample_count, 1);
    return proof->fates ? STATUS_OK : status_set(STATUS_FAILED, "out of memory for the fates of samples");
}

void proof_close(struct proof *proof)
{
    free(proof->fates);
    proof->fates = NULL;
}

enum status proof_ready(struct proof *proof, uint64_t number, struct cache_pages *before)
{
    const struct load *load = proof->load;
    if (load->cache != LOAD_WARM || !proof->settled)
        TRY(load_settle_cache(load, before));
    proof->settled = true;
    if (!proof->expects || load->ranks > 1) /* one rank reads the same samples in every epoch */
        TRY(load_expect(load, &proof->plan, number, &proof->expected));
    proof->expects = true;
    proof->device_known = cache_device_bytes(&proof->device_bytes);
    return STATUS_OK;
}

bool proof_device_bytes(const struct proof *proof, uint64_t *bytes)
{
    uint64_t now;
    if (!proof->device_known || !cache_device_bytes(&now))
        return false;
    *bytes = now - proof->device_bytes;
    return true;
}

enum status proof_lose(struct proof *proof, struct losses *losses, uint32_t sample, enum status status)
{
    const struct dataset_sample *lost = &proof->load->dataset->samples[sample];
    if (!proof->load->skip || status != STATUS_FAILED)
        return status;
    if (losses->tally.count == 0)
        snprintf(losses->why, sizeof losses->why, "%s", status_text());
    uint8_t *fate = &proof->fates[sample];
    losses->first |= *fate == FATE_UNKNOWN;
    losses->changed |= *fate == FATE_READ;
    *fate = FATE_LOST;
    tally_add(&losses->tally, lost->edges, lost->bytes);
    return STATUS_OK;
}

void proof_note(struct proof *proof, struct losses *losses, const struct order *order, uint64_t lost)
{
    uint64_t known = 0;
    for (uint32_t i = 0; proof->fates && i < order->count; i++) {
        uint8_t *fate = &proof->fates[order->samples[i]];
        known += *fate == FATE_LOST;
        if (*fate == FATE_UNKNOWN)
            *fate = FATE_READ;
    }
    losses->changed |= known != lost;
}

void losses_merge(struct losses *all, const struct losses *one)
{
    if (one->first || (one->changed && one->tally.count))
        status_warn_own("left out in a run: %s", one->why);
    tally_merge(&all->tally, &one->tally);
    all->first |= one->first;
    all->changed |= one->changed;
}

static enum status check_lost(uint64_t number, uint64_t delivered, const struct losses *lost)
{
    if (lost->changed)
        return status_set(
            STATUS_FAILED,
            "run %llu could not read %llu samples, and not those that runs before it could not: "
            "the data set changes while it is measured; mend it, and run again",
            (unsigned long long)number, (unsigned long long)lost->tally.count);
    if (lost->tally.count > 0 && delivered == 0)
        return status_set(STATUS_FAILED,
                          "run %llu could read none of its %llu samples; see the warning above",
                          (unsigned long long)number, (unsigned long long)lost->tally.count);
    return STATUS_OK;
}

enum status proof_finish(struct proof *proof, uint64_t number, const struct tally *delivered,
                         const struct losses *lost)
{
    const struct load *load = proof->load;
    const struct tally *expected = &proof->expected;
    struct tally all = lost->tally;
    load->control->lost = lost->tally;
    TRY(check_lost(number, delivered->count, lost));
    tally_merge(&all, delivered);
    if (load->control->whole || /* samples are checked one by one */
        (all.count == expected->count && all.bytes == expected->bytes && all.sum == expected->sum))
        return STATUS_OK;
    return status_set(STATUS_WRONG,
                      "%s: run %llu delivered %llu samples and %llu bytes (hash %016llx) where %llu and %llu "
                      "(hash %016llx) are right",
                      load->dataset->path, (unsigned long long)number, (unsigned long long)all.count,
                      (unsigned long long)all.bytes, (unsigned long long)all.sum,
                      (unsigned long long)expected->count, (unsigned long long)expected->bytes,
                      (unsigned long long)expected->sum);
}
