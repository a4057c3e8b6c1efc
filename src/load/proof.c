#include "load/proof.h"

enum status proof_ready(struct proof *proof, uint64_t number, struct cache_pages *before)
{
    const struct load *load = proof->load;
    if (load->cache != LOAD_WARM || !proof->settled)
        TRY(load_settle_cache(load, before));
    proof->settled = true;
    if (!proof->expects || load->ranks > 1) /* one rank reads the same samples in every epoch */
        TRY(load_expect(load, &proof->plan, number, &proof->expected));
    proof->expects = true;
    proof->device_bytes = cache_device_bytes();
    return STATUS_OK;
}

uint64_t proof_device_bytes(const struct proof *proof)
{
    return cache_device_bytes() - proof->device_bytes;
}

bool proof_lost_anew(const struct proof *proof, const struct tally *lost)
{
    return !proof->load->control->whole && lost->count > 0 && (!proof->ran || lost->count != proof->lost);
}

/* A row's runs must all lose as many samples: else their times are of different work. */
static enum status check_lost(struct proof *proof, uint64_t number, uint64_t lost)
{
    if (proof->ran && lost != proof->lost)
        return status_set(
            STATUS_FAILED,
            "run %llu could not read %llu samples and runs before it %llu: the data set changes "
            "while it is measured; mend it, and run again",
            (unsigned long long)number, (unsigned long long)lost, (unsigned long long)proof->lost);
    if (lost == proof->expected.count)
        return status_set(STATUS_FAILED,
                          "run %llu could read none of its %llu samples; see the warning above",
                          (unsigned long long)number, (unsigned long long)lost);
    proof->lost = lost;
    proof->ran = true;
    return STATUS_OK;
}

enum status proof_finish(struct proof *proof, uint64_t number, const struct tally *delivered,
                         const struct tally *lost)
{
    const struct load *load = proof->load;
    const struct tally *expected = &proof->expected;
    struct tally all = *lost;
    load->control->lost = *lost;
    if (load->control->whole) /* that is one epoch, and checked sample by sample */
        return STATUS_OK;
    TRY(check_lost(proof, number, lost->count));
    tally_merge(&all, delivered);
    if (all.count == expected->count && all.bytes == expected->bytes && all.sum == expected->sum)
        return STATUS_OK;
    return status_set(STATUS_WRONG,
                      "run %llu delivered %llu samples and %llu bytes (hash %016llx) where %llu and %llu "
                      "(hash %016llx) are right",
                      (unsigned long long)number, (unsigned long long)all.count,
                      (unsigned long long)all.bytes, (unsigned long long)all.sum,
                      (unsigned long long)expected->count, (unsigned long long)expected->bytes,
                      (unsigned long long)expected->sum);
}
