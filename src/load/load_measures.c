/* The columns of `load`, in addition to those that every workload has. */
#include "load/load_parts.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/stats.h"
#include "core/timer.h"

const struct measure load_measures[] = {
    {"timed_stages", COMBINE_FIRST},
    {"store", COMBINE_FIRST},
    {"shards", COMBINE_MAX},
    {"sample_bytes", COMBINE_MAX},
    {"skipped", COMBINE_SUM},
    {"jpeg_warnings", COMBINE_SUM},
    {"displacement", COMBINE_MEAN},
    {"shards_per_batch", COMBINE_MEAN},
    {"resident_share_before", COMBINE_MIN},
    {"resident_share_after", COMBINE_MIN},
    {"storage_read_bytes", COMBINE_SUM},
    {"copy_bytes_per_s", COMBINE_NONE},
    {"copy_share", COMBINE_NONE},
    {"gds", COMBINE_FIRST},
    {"decoded_by", COMBINE_FIRST},
    {"resident_share", COMBINE_MIN},
    {"jpeg_engine_share", COMBINE_MAX},
    {"cpu_cores", COMBINE_SUM},
    {"open_p50_s", COMBINE_MAX},
    {"open_p99_s", COMBINE_MAX},
    {"open_p999_s", COMBINE_MAX},
    {"read_p50_s", COMBINE_MAX},
    {"read_p99_s", COMBINE_MAX},
    {"read_p999_s", COMBINE_MAX},
    {"close_p50_s", COMBINE_MAX},
    {"close_p99_s", COMBINE_MAX},
    {"close_p999_s", COMBINE_MAX},
    {"decode_s", COMBINE_MAX},
    {"augment_s", COMBINE_MAX},
    MEMORY_MEASURES,
    {"checksum", COMBINE_HASHES},
    COMPUTE_MEASURES,
    {NULL, COMBINE_FIRST},
};

/* Measures the quality of the order of each thread, and takes the mean over the threads. */
static enum status measure_order(const struct load *load, const struct variant *variant, int threads,
                                 struct measures *measures)
{
    struct order_plan plan = load_variant_plan(load, variant, threads);
    CLOSED_BY(order_close) struct order order = {0};
    double displacement = 0, shards = 0;
    bool batches = plan.shards > 0;
    TRY(order_open(&plan, &order));
    for (uint32_t w = 0; w < (uint32_t)threads; w++) {
        struct order_quality quality = {0};
        order_make(&plan, 1, load->rank * (uint32_t)threads + w, &order);
        TRY(order_measure(&plan, &order, load->given->batch, &quality));
        displacement += quality.displacement / threads;
        shards += quality.shards / threads;
        batches = batches && order.count >= load->given->batch;
    }
    measures_put(measures, "displacement", "%.4f", displacement);
    if (batches)
        measures_put(measures, "shards_per_batch", "%.4g", shards);
    return STATUS_OK;
}

/* Measures the latency of open, read and close in one extra run in which every call is timed. */
static enum status measure_calls(const struct load *load, const struct variant *variant, void *state,
                                 struct measures *measures)
{
    static const char *const columns_of[LOAD_CALLS][LOAD_QUANTILES] = {
        {"open_p50_s", "open_p99_s", "open_p999_s"},
        {"read_p50_s", "read_p99_s", "read_p999_s"},
        {"close_p50_s", "close_p99_s", "close_p999_s"}};
    struct run_time unused;
    FREED struct load_result *result = malloc(sizeof *result);
    TRY(ALLOCATED(result, "out of memory for the result of a run"));
    load->control->timed_calls = true;
    enum status status = variant_run(variant, state, 0, &unused);
    load->control->timed_calls = false;
    TRY(status);
    TRY(variant->fetch(state, result));
    for (int call = 0; call < LOAD_CALLS; call++)
        for (int q = 0; q < LOAD_QUANTILES; q++)
            measures_real(measures, columns_of[call][q], result->latency_s[call][q], 4);
    return STATUS_OK;
}

#define COPY_ROUNDS 9
#define COPY_TIME_S 3.0 /* the first round always runs; no other round starts after this time */

/* Measures the copy bandwidth, which is an upper bound on the rate of the loader, and the CPU cores that a
 * run uses. Copies of the working set alternate with runs, so that both see the same machine state. */
static enum status copy_in_turn(const struct load *load, const struct variant *variant, void *state,
                                struct load_result *result, struct measures *measures)
{
    const struct load_traits *traits = variant->traits;
    double copies[COPY_ROUNDS], shares[COPY_ROUNDS], cores[COPY_ROUNDS], begin_s = timer_now_s();
    double bytes = load_work(load, variant).bytes;
    size_t rounds = 0;
    while (rounds < COPY_ROUNDS && (rounds == 0 || timer_now_s() - begin_s < COPY_TIME_S)) {
        struct run_time unused;
        if (variant->ready)
            TRY(variant->ready(state, rounds));
        double run_begin_s = timer_now_s(), cpu_begin_s = timer_cpu_s();
        TRY(variant->run(state, rounds, &unused));
        double run_s = timer_now_s() - run_begin_s;
        cores[rounds] = (timer_cpu_s() - cpu_begin_s) / run_s;
        TRY(variant->fetch(state, result));
        double rate = (result->moved_bytes ? (double)result->moved_bytes : bytes) / run_s;
        TRY(traits->copy(state, &copies[rounds]));
        shares[rounds] = rate / copies[rounds];
        rounds++;
    }
    measures_put(measures, "copy_bytes_per_s", "%.6g", stats_middle(copies, rounds));
    measures_put(measures, "copy_share", "%.4f", stats_middle(shares, rounds));
    measures_put(measures, "cpu_cores", "%.3g", stats_middle(cores, rounds));
    return STATUS_OK;
}

static enum status measure_copy_and_order(const struct load *load, const struct variant *variant, void *state,
                                          struct measures *measures)
{
    FREED struct load_result *result = malloc(sizeof *result);
    TRY(ALLOCATED(result, "out of memory for the result of a run"));
    TRY(copy_in_turn(load, variant, state, result, measures));
    return measure_order(load, variant, result->threads, measures);
}

/* Counts the row (status_caveat()) if the latest warm run read from a storage device, or if too few pages are
 * resident after the run. */
static void warn_of_cooling(const struct load *load, const struct load_result *result,
                            const struct cache_pages *after)
{
    uint64_t read = result->device_known ? result->device_bytes : 0;
    if (load->given->cache == LOAD_WARM &&
        (read > 0 || (!after->hidden && cache_share(after) < WARM_SHARE_MIN)))
        status_caveat(
            "did not stay warm", "stop processes that read files or need the memory, or use --cache any",
            "--cache warm: the latest run read %llu bytes from a storage device, and %.1f %% of the data set "
            "is in the page cache: another process evicts pages or needs the memory, so not all runs of "
            "this row were warm",
            (unsigned long long)read, 100 * cache_share(after));
}

enum status load_observe(const void *input, const struct variant *variant, void *state,
                         struct measures *measures)
{
    const struct load *load = input;
    const struct dataset *dataset = load->dataset;
    struct cache_pages after;
    FREED struct load_result *result = malloc(sizeof *result);
    TRY(ALLOCATED(result, "out of memory for the result of a run"));
    TRY(variant->fetch(state, result));
    TRY(load_resident(load, &after));
    warn_of_cooling(load, result, &after);
    if (!dataset->uncounted)
        measures_put(
            measures, "skipped", "%llu",
            (unsigned long long)((load->rank ? 0 : dataset->skipped) + result->skipped / load->epochs));
    if (!result->before.hidden)
        measures_put(measures, "resident_share_before", "%.4f", cache_share(&result->before));
    if (!after.hidden)
        measures_put(measures, "resident_share_after", "%.4f", cache_share(&after));
    if (result->device_known)
        measures_put(measures, "storage_read_bytes", "%llu", (unsigned long long)result->device_bytes);
    measures_memory(measures, result->useful_bytes, (double)result->memory_bytes);
    measures_put(measures, "checksum", "%016llx", (unsigned long long)result->checksum.sum);
    if (result->gds)
        measures_put(measures, "gds", "%s", result->gds);
    if (result->decoder)
        measures_put(measures, "decoded_by", "%s", result->decoder);
    if (result->decoder && result->jpeg_engine_share >= 0)
        measures_put(measures, "jpeg_engine_share", "%.2f", result->jpeg_engine_share);
    if (((const struct load_traits *)variant->traits)->resident)
        measures_put(measures, "resident_share", "%.4f", load->control->resident_share);
    if (load->given->decode) {
        measures_put(measures, "jpeg_warnings", "%llu", (unsigned long long)result->jpeg_warnings);
        measures_put(measures, "decode_s", "%.6g", result->decode_s);
    }
    if (load->given->augment)
        measures_put(measures, "augment_s", "%.6g", result->augment_s);
    return STATUS_OK;
}

enum status load_measure(const void *input, const struct variant *variant, void *state,
                         struct measures *measures)
{
    const struct load *load = input;
    const struct load_traits *traits = variant->traits;
    const struct dataset *dataset = load->dataset;
    bool kept = load->given->cache == LOAD_WARM || !traits->timed_unless_warm;
    const char *timed = kept ? traits->timed : traits->timed_unless_warm;
    if (traits->resident && load->control->resident_share < 1)
        timed = traits->timed_unless_resident;
    measures_put(measures, "timed_stages", "%s%s%s", timed, load->given->decode ? "+decode" : "",
                 load->given->augment ? "+augment" : "");
    measures_put(measures, "store", "%s", dataset->shards ? "shards" : "files");
    if (dataset->shards)
        measures_put(measures, "shards", "%u", dataset->file_count);
    measures_put(measures, "sample_bytes", "%.9g", (double)dataset->bytes / dataset->sample_count);
    if (load->given->rates_only)
        return STATUS_OK;
    if (traits->calls)
        TRY(measure_calls(load, variant, state, measures));
    return measure_copy_and_order(load, variant, state, measures);
}

enum status load_check_total(const void *input, const struct measures *total)
{
    const struct load *load = input;
    const struct dataset *dataset = load->dataset;
    const char *skipped = measures_get(total, "skipped"), *checksum = measures_get(total, "checksum");
    if (dataset->uncounted || strtoull(skipped, NULL, 10) > dataset->skipped)
        return STATUS_OK; /* the lost samples are not known, so there is no expected checksum */
    uint64_t sum = 0;
    for (uint32_t i = 0; i < dataset->sample_count; i++)
        sum += dataset->samples[i].edges;
    sum *= load->epochs;
    if (strtoull(checksum, NULL, 16) == sum)
        return STATUS_OK;
    return status_set(
        STATUS_WRONG,
        "the ranks together did not deliver the samples of the data set (checksum %s, expected %016" PRIx64
        "); the time is not recorded",
        checksum, sum);
}
