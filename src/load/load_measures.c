/* The columns of `load`, in addition to those that every workload has. */
#include "load/load_parts.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/stats.h"
#include "core/timer.h"
#include "machine/host.h"

/* The columns of the latencies of a system call. */
#define LATENCY(call, name, words)                                                     \
    {                                                                                  \
        call "_" name "_s", VALUE_REAL, COMBINE_MAX, "s",                              \
            .about = words " latency of " call " calls, in one extra run", .digits = 4 \
    }
#define LATENCIES(call)                                                      \
    LATENCY(call, "p50", "median"), LATENCY(call, "p99", "99th percentile"), \
        LATENCY(call, "p999", "99.9th percentile")

const struct column load_columns[] = {
    {"timed_stages", VALUE_WORD, COMBINE_FIRST, "", .about = "the stages that the time of a run includes"},
    {"store", VALUE_WORD, COMBINE_FIRST, "", .about = "how the samples are stored: files or shards"},
    {"shards", VALUE_INTEGER, COMBINE_MAX, "", .about = "number of shards; empty for single files"},
    {"sample_bytes", VALUE_REAL, COMBINE_MAX, "bytes", .about = "mean size of a sample"},
    {"skipped", VALUE_INTEGER, COMBINE_SUM, "",
     .about = "broken samples that --on-error skip left out of an epoch, or --on-error mask delivered "
              "without values; empty if the number is unknown"},
    {"jpeg_warnings", VALUE_INTEGER, COMBINE_SUM, "",
     .about = "warnings of libjpeg-turbo in the last timed run that are no damage"},
    {"displacement", VALUE_REAL, COMBINE_MEAN, "",
     .about = "mean distance of a sample from its position in sorted order, divided by the number of samples "
              "of the thread; about 1/3 for a random order",
     .digits = DECIMALS(4)},
    {"shards_per_batch", VALUE_REAL, COMBINE_MEAN, "",
     .about = "mean number of shards whose samples a batch mixes", .digits = 4},
    {"resident_share_before", VALUE_REAL, COMBINE_MIN, "",
     .about = "share of the data set in the page cache before the last timed run", .digits = DECIMALS(4)},
    {"resident_share_after", VALUE_REAL, COMBINE_MIN, "",
     .about = "share of the data set in the page cache after the last timed run", .digits = DECIMALS(4)},
    {"storage_read_bytes", VALUE_INTEGER, COMBINE_SUM, "bytes",
     .about = "bytes that Linux read from storage devices for this process during the last timed run",
     .better = BETTER_LOWER},
    {"copy_bytes_per_s", VALUE_REAL, COMBINE_NONE, "bytes/s",
     .about = "bandwidth of copying the same data on the same threads: an upper bound for the loader",
     .digits = 6},
    {"copy_share", VALUE_REAL, COMBINE_NONE, "", .about = "rate of loading divided by the rate of copying",
     .digits = DECIMALS(4)},
    {"gds", VALUE_WORD, COMBINE_FIRST, "",
     .about = "how GPUDirect Storage read: directly, or through the compatibility mode"},
    {"decoded_by", VALUE_WORD, COMBINE_FIRST, "", .about = "the decoder of the images"},
    {"resident_share", VALUE_REAL, COMBINE_MIN, "",
     .about = "share of the data set that is resident in device memory", .digits = DECIMALS(4)},
    {"resident_samples", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "samples whose files a variant that streams keeps in the memory of each rank"},
    {"resident_device_samples", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "samples that stream-gpu keeps in device memory, of each rank, after the timed runs"},
    {"jpeg_engine_share", VALUE_REAL, COMBINE_MAX, "",
     .about = "utilisation of the GPU's JPEG engines at the end of the timed runs", .digits = DECIMALS(2)},
    {"cpu_cores", VALUE_REAL, COMBINE_SUM, "",
     .about = "CPU time of all threads divided by the time of a run", .digits = 3},
    LATENCIES("open"),
    LATENCIES("read"),
    LATENCIES("close"),
    {"decode_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time that a thread spends decoding in the last timed run", .digits = 6},
    {"augment_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time that a thread spends augmenting in the last timed run", .digits = 6},
    MEMORY_COLUMNS,
    {"checksum", VALUE_HASH, COMBINE_SUM, "",
     .about = "sum of the hashes of all samples that the last timed run delivered"},
    COMPUTE_COLUMNS,
    {"cpu_clock_hz", VALUE_REAL, COMBINE_MEAN, "Hz",
     .about = "clock of the CPU threads, which all compute, right after a run", .digits = 4},
    {"pinned_share", VALUE_REAL, COMBINE_MIN, "",
     .about = "share of the bytes that the last timed run copied to the GPU directly from the page cache",
     .digits = DECIMALS(4)},
    {"pin_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time to map and pin the shards, before the first run; includes reading of what is not in the "
              "page cache",
     .digits = 4},
    {"copy_share_error", VALUE_REAL, COMBINE_NONE, "",
     .about = "half the width of the 95 % confidence interval of copy_share, relative to copy_share; empty "
              "with fewer than 6 independent rounds",
     .digits = 3, .better = BETTER_LOWER},
    {.name = NULL},
};

/* Measures the quality of the order of each worker of this rank, and takes the mean over them. A batch of a
 * stream is this rank's share of it. */
static enum status measure_order(const struct load *load, const struct variant *variant, int threads,
                                 struct row *row)
{
    struct order_plan plan = load_variant_plan(load, variant, threads);
    CLOSED_BY(order_close) struct order order = {0};
    double displacement = 0, shards = 0;
    const uint32_t workers = plan.workers / load->ranks;
    const uint32_t batch =
        plan.lanes ? (uint32_t)order_step_share(&plan, 0, load->rank).count : (uint32_t)load->given->batch;
    bool batches = plan.shards > 0 && batch > 0;
    TRY(order_open(&plan, &order));
    for (uint32_t w = 0; w < workers; w++) {
        struct order_quality quality = {0};
        order_make(&plan, 1, load->rank * workers + w, &order);
        TRY(order_measure(&plan, &order, batch ? batch : 1, &quality));
        displacement += quality.displacement / workers;
        shards += quality.shards / workers;
        batches = batches && order.count >= batch;
    }
    row_real(row, "displacement", displacement);
    if (batches)
        row_real(row, "shards_per_batch", shards);
    return STATUS_OK;
}

/* Measures the latency of open, read and close in one extra run in which every call is timed. */
static enum status measure_calls(const struct load *load, const struct variant *variant, void *state,
                                 struct row *row)
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
            row_real(row, columns_of[call][q], result->latency_s[call][q]);
    return STATUS_OK;
}

#define COPY_ROUNDS 9
#define COPY_TIME_S 3.0 /* the first round always runs; no other round starts after this time */

/* Measures the copy bandwidth, which is an upper bound on the rate of the loader, and the CPU cores that a
 * run uses. Copies of the working set alternate with runs, so that both see the same machine state. */
static enum status copy_in_turn(const struct load *load, const struct variant *variant, void *state,
                                struct load_result *result, struct row *row)
{
    const struct load_traits *traits = variant->traits;
    double copies[COPY_ROUNDS], shares[COPY_ROUNDS], cores[COPY_ROUNDS], clocks_hz[COPY_ROUNDS];
    struct stats stats;
    double begin_s = timer_now_s();
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
        clocks_hz[rounds] = env_clock_hz(result->threads);
        double rate = (result->moved_bytes ? (double)result->moved_bytes : bytes) / run_s;
        TRY(traits->copy(state, &copies[rounds]));
        shares[rounds] = rate / copies[rounds];
        rounds++;
    }
    TRY(stats_compute(shares, rounds, &stats));
    if (isfinite(stats.median_error))
        row_real(row, "copy_share_error", stats.median_error);
    row_real(row, "copy_bytes_per_s", stats_middle(copies, rounds));
    row_real(row, "copy_share", stats_middle(shares, rounds));
    row_real(row, "cpu_cores", stats_middle(cores, rounds));
    row_positive(row, "cpu_clock_hz", stats_middle(clocks_hz, rounds));
    return STATUS_OK;
}

static enum status measure_copy_and_order(const struct load *load, const struct variant *variant, void *state,
                                          struct row *row)
{
    FREED struct load_result *result = malloc(sizeof *result);
    TRY(ALLOCATED(result, "out of memory for the result of a run"));
    TRY(copy_in_turn(load, variant, state, result, row));
    return measure_order(load, variant, result->threads, row);
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

enum status load_observe(const void *input, const struct variant *variant, void *state, struct row *row)
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
        row_count(row, "skipped", (load->rank ? 0 : dataset->skipped) + result->skipped / load->epochs);
    if (!result->before.hidden)
        row_real(row, "resident_share_before", cache_share(&result->before));
    if (!after.hidden)
        row_real(row, "resident_share_after", cache_share(&after));
    if (result->device_known)
        row_count(row, "storage_read_bytes", result->device_bytes);
    row_memory(row, result->useful_bytes, (double)result->memory_bytes);
    row_hash(row, "checksum", result->checksum.sum);
    if (result->gds)
        row_text(row, "gds", result->gds);
    if (result->decoder)
        row_text(row, "decoded_by", result->decoder);
    if (result->decoder && result->jpeg_engine_share >= 0)
        row_real(row, "jpeg_engine_share", result->jpeg_engine_share);
    if (((const struct load_traits *)variant->traits)->streams)
        row_real(row, "first_batch_s", result->first_batch_s);
    if (((const struct load_traits *)variant->traits)->streams)
        row_count(row, "resident_samples", result->resident);
    if (((const struct load_traits *)variant->traits)->ring) {
        row_count(row, "chunk", result->chunk_bytes >> 10); /* may differ from the option's default */
        row_real(row, "pinned_share", result->pinned_share);
    }
    row_positive(row, "pin_s", result->pin_s);
    if (result->resident_device)
        row_count(row, "resident_device_samples", result->resident_device);
    if (((const struct load_traits *)variant->traits)->resident)
        row_real(row, "resident_share", load->control->resident_share);
    if (load->given->decode) {
        row_count(row, "jpeg_warnings", result->jpeg_warnings);
        row_real(row, "decode_s", result->decode_s);
    }
    if (load->given->augment)
        row_real(row, "augment_s", result->augment_s);
    return STATUS_OK;
}

enum status load_measure(const void *input, const struct variant *variant, void *state, struct row *row)
{
    const struct load *load = input;
    const struct load_traits *traits = variant->traits;
    const struct dataset *dataset = load->dataset;
    bool kept = load->given->cache == LOAD_WARM || !traits->timed_unless_warm;
    const char *timed = kept ? traits->timed : traits->timed_unless_warm;
    char stages[128];
    if (traits->resident && load->control->resident_share < 1)
        timed = traits->timed_unless_resident;
    snprintf(stages, sizeof stages, "%s%s%s", timed, load->given->decode ? "+decode" : "",
             load->given->augment ? "+augment" : "");
    row_text(row, "timed_stages", stages);
    row_text(row, "store", dataset->shards ? "shards" : "files");
    if (dataset->shards)
        row_count(row, "shards", dataset->file_count);
    if (traits->streams) /* its default is not that of the option */
        row_count(row, "shuffle", load_stream_plan(load).shuffle_buffer);
    row_real(row, "sample_bytes", (double)dataset->bytes / dataset->sample_count);
    if (load->given->rates_only)
        return STATUS_OK;
    if (traits->calls)
        TRY(measure_calls(load, variant, state, row));
    return measure_copy_and_order(load, variant, state, row);
}

enum status load_check_total(const void *input, const struct row *total)
{
    const struct load *load = input;
    const struct dataset *dataset = load->dataset;
    const struct value *checksum = row_value(total, "checksum");
    if (dataset->uncounted || row_get_real(total, "skipped") > dataset->skipped)
        return STATUS_OK; /* the lost samples are not known, so there is no expected checksum */
    uint64_t sum = 0;
    for (uint32_t i = 0; i < dataset->sample_count; i++)
        sum += dataset->samples[i].edges;
    sum *= load->epochs;
    if (checksum->integer == sum)
        return STATUS_OK;
    return status_set(STATUS_WRONG,
                      "the ranks together did not deliver the samples of the data set (checksum %016" PRIx64
                      ", expected %016" PRIx64 "); the time is not recorded",
                      checksum->integer, sum);
}
