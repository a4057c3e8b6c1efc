/* The workload `load`: its options, its input, and what its rows say. */
#include "load/load.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/consumed.h"
#include "core/timer.h"
#include "core/workload.h"

struct parameters {
    const char *data;
    uint64_t batch, shuffle, seed, epochs, depth, block, prefetch, shift, ring, chunk;
    double mean, std;
    int cache, on_error, tensor;
    struct compute compute;
    bool decode, augment;
    bool normalised; /* --mean or --std was given; load_open() finds out */
};

static const char *const tensors[] = {"raw", "f32", "f16", "bf16", NULL}; /* as enum tensor_type */
static const char *const caches[] = {"warm", "cold", "any", NULL};        /* as enum load_cache */
static const char *const on_errors[] = {"fail", "skip", NULL};

#define AT(field) offsetof(struct parameters, field)
static const struct option_spec options[] = {
    {"data", "DIR", OPTION_TEXT, AT(data), NULL, 0, 0, NULL, true,
     "the samples: a folder of files, or of tar shards; --prepare makes some"},
    {"batch", "N", OPTION_COUNT, AT(batch), "32", 1, 1 << 20, NULL, true, "samples delivered together"},
    {"shuffle", "N", OPTION_COUNT, AT(shuffle), "1000", 0, 1 << 24, NULL, true,
     "samples of shards that are shuffled together, after the shards are; 0 is none. Files are shuffled all"},
    {"seed", "N", OPTION_COUNT, AT(seed), "0", 0, 18446744073709551615.0, NULL, true,
     "seed of the order; every epoch has another one"},
    {"epochs", "N", OPTION_COUNT, AT(epochs), "1", 1, 1 << 20, NULL, true, "epochs a run"},
    {"depth", "N", OPTION_COUNT, AT(depth), "32", 1, 4096, NULL, true,
     "requests in flight of files-uring and shards-uring"},
    {"block", "KIB", OPTION_COUNT, AT(block), "256", 4, 1 << 16, NULL, true,
     "size of a read of shards and shards-uring"},
    {"prefetch", "N", OPTION_COUNT, AT(prefetch), "2", 0, 1 << 20, NULL, true,
     "shards that shards, shards-mmap, shards-omp and shards-gpu ask the kernel to read ahead, unless all is "
     "warm"},
    {"cache", "STATE", OPTION_CHOICE, AT(cache), "warm", 0, 0, caches, false,
     "the page cache before each run: all in it, nothing in it, or as it comes; the first two are measured, "
     "and "
     "refused where they cannot be had"},
    {"on-error", "WHAT", OPTION_CHOICE, AT(on_error), "fail", 0, 0, on_errors, true,
     "what a broken sample does: end the run, or be skipped and counted"},
    {"decode", NULL, OPTION_FLAG, AT(decode), NULL, 0, 0, NULL, true,
     "decode images: png by libpng, the header of npy"},
    {"augment", NULL, OPTION_FLAG, AT(augment), NULL, 0, 0, NULL, true,
     "shift, flip and normalise them into float32; decodes too"},
    {"shift", "PIXELS", OPTION_COUNT, AT(shift), "4", 0, 1 << 12, NULL, true,
     "the largest shift of --augment"},
    {"mean", "M", OPTION_REAL, AT(mean), "0", -1e6, 1e6, NULL, true,
     "what --augment and tensors on a GPU subtract, bytes being 0 to 1"},
    {"std", "S", OPTION_REAL, AT(std), "1", 1e-6, 1e6, NULL, true, "what they then divide by"},
    {"tensor", "TYPE", OPTION_CHOICE, AT(tensor), "f16", 0, 0, tensors, true,
     "what values become in the batch tensor of a GPU variant; raw: they stay what they are"},
    {"ring", "N", OPTION_COUNT, AT(ring), "2", 2, 64, NULL, true,
     "buffers of a thread of shards-gpu and gds"},
    {"chunk", "KIB", OPTION_COUNT, AT(chunk), "2048", 4, 1 << 20, NULL, true,
     "what shards-gpu and gds read and bring to the GPU at once"},
    COMPUTE_OPTION(AT(compute)),
};

static const struct measure measures[] = {
    {"timed", COMBINE_FIRST},
    {"layout", COMBINE_FIRST},
    {"shards", COMBINE_MAX},
    {"sample_bytes", COMBINE_MAX},
    {"skipped", COMBINE_SUM},
    {"displacement", COMBINE_MEAN},
    {"shards_a_batch", COMBINE_MEAN},
    {"resident_before", COMBINE_MIN},
    {"resident_after", COMBINE_MIN},
    {"device_bytes", COMBINE_SUM},
    {"copy_bytes_per_s", COMBINE_NONE},
    {"copy_share", COMBINE_NONE},
    {"gds", COMBINE_FIRST},
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
    {"tally", COMBINE_HASHES},
    CONSUMED_MEASURES,
    {NULL, COMBINE_FIRST},
};
enum measure_place {
    TIMED,
    LAYOUT,
    SHARDS,
    SAMPLE_BYTES,
    SKIPPED,
    DISPLACEMENT,
    SHARDS_A_BATCH,
    RESIDENT_BEFORE,
    RESIDENT_AFTER,
    DEVICE_BYTES,
    COPY_BYTES_PER_S,
    COPY_SHARE,
    GDS,
    LATENCIES, /* nine: three calls, three quantiles each */
    DECODE_S = LATENCIES + 9,
    AUGMENT_S,
    TALLY
};

/* The input, with what only this file needs. */
struct load_job {
    struct load load; /* first: variants see this */
    struct dataset dataset;
    struct load_control control;
    struct pictures pictures; /* where batches are learnt from */
};

/* ---- What variants ask ---- */

struct order_plan load_plan(const struct load *load, int threads)
{
    const struct dataset *dataset = load->dataset;
    struct order_plan plan = {.seed = load->seed,
                              .samples = dataset->sample_count,
                              .shards = dataset->shards ? dataset->file_count : 0,
                              .shard_first = dataset->shard_first,
                              .window = load->window,
                              .workers = load->ranks * (uint32_t)threads};
    return plan;
}

/* Calls `visit` for every sample that this rank reads in an epoch. */
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
    struct tally *tally;
};

static void expect(void *context, uint32_t sample)
{
    const struct expecting *expecting = context;
    const struct dataset_sample *expected = &expecting->dataset->samples[sample];
    tally_add(expecting->tally, expected->edges, expected->bytes);
}

enum status load_expect(const struct load *load, const struct order_plan *plan, uint64_t number,
                        struct tally *expected)
{
    struct expecting expecting = {load->dataset, expected};
    *expected = (struct tally){0};
    for (uint32_t i = 0; i < load->epochs; i++)
        TRY(visit_epoch(load, plan, number * load->epochs + i, expect, &expecting));
    return STATUS_OK;
}

/* Calls `act` with every file, open. Those that cannot be opened are skipped where that is wanted. */
static enum status each_file(const struct load *load,
                             enum status (*act)(void *context, int fd, uint64_t bytes), void *context)
{
    const struct dataset *dataset = load->dataset;
    for (uint32_t f = 0; f < dataset->file_count; f++) {
        int fd = dataset_file_open(dataset, f, 0);
        if (fd < 0 && load->skip)
            continue;
        if (fd < 0)
            return STATUS_FAILED;
        enum status status = act(context, fd, dataset->files[f].bytes);
        close(fd);
        if (status != STATUS_OK)
            return status_prefix(status, "%s/%s", dataset->path, dataset->files[f].name);
    }
    return STATUS_OK;
}

static enum status count_file(void *context, int fd, uint64_t bytes)
{
    return cache_count(fd, bytes, context);
}

static enum status evict_file(void *context, int fd, uint64_t bytes)
{
    (void)context, (void)bytes;
    return cache_evict(fd);
}

#define FILL_BYTES ((uint64_t)1 << 20)

static enum status fill_file(void *context, int fd, uint64_t bytes)
{
    (void)bytes;
    return cache_fill(fd, context, FILL_BYTES);
}

enum status load_resident(const struct load *load, struct cache_pages *pages)
{
    *pages = (struct cache_pages){0};
    return each_file(load, count_file, pages);
}

#define COLD_SHARE_MAX 0.01
#define WARM_SHARE_MIN 0.99
#define WARM_READS     3 /* at most, as other processes may evict */

/* Reads all files until their pages stay in the page cache. */
static enum status warm_up(const struct load *load, struct cache_pages *pages)
{
    void *buffer = malloc(FILL_BYTES);
    enum status status = buffer ? STATUS_OK : status_set(STATUS_FAILED, "out of memory");
    for (int i = 0; status == STATUS_OK && i < WARM_READS; i++) {
        status = each_file(load, fill_file, buffer);
        if (status == STATUS_OK)
            status = load_resident(load, pages);
        if (pages->hidden || cache_share(pages) >= WARM_SHARE_MIN)
            break;
    }
    free(buffer);
    return status;
}

enum status load_settle_cache(const struct load *load, struct cache_pages *pages)
{
    if (load->cache == LOAD_COLD) {
        TRY(each_file(load, evict_file, NULL));
        cache_drop_all();
    }
    TRY(load->cache == LOAD_WARM ? warm_up(load, pages) : load_resident(load, pages));
    if (load->cache == LOAD_COLD)
        cache_drop_all(); /* names too, where this process may: counting has opened every file */
    double share = cache_share(pages);
    if (load->cache != LOAD_ANY && pages->hidden)
        return status_set(STATUS_FAILED,
                          "--cache %s: only who owns the files or may write them is told what of them is in "
                          "the page cache; use --cache any",
                          load->cache == LOAD_COLD ? "cold" : "warm");
    if (load->cache == LOAD_COLD && share > COLD_SHARE_MAX)
        return status_set(
            STATUS_FAILED,
            "--cache cold: %.1f %% of the data set stays in the page cache (a file system in memory, or "
            "another process uses it); use --cache any",
            100 * share);
    if (load->cache == LOAD_WARM && share < WARM_SHARE_MIN)
        return status_set(STATUS_FAILED,
                          "--cache warm: only %.1f %% of the data set stays in the page cache, read %d "
                          "times: memory is too "
                          "small, or another process evicts; use --cache any",
                          100 * share, WARM_READS);
    return STATUS_OK;
}

/* ---- Opening ---- */

static enum status check_combination(const struct options *given, const struct parameters *parameters)
{
    if (!parameters->data)
        return status_set(STATUS_USAGE,
                          "say what to read with --data DIR; fdsl-bench --prepare DIR makes samples");
    if (parameters->cache == LOAD_COLD && parameters->epochs > 1)
        return status_set(STATUS_USAGE,
                          "--cache cold: the second epoch of a run would not be; drop --epochs");
    if (parameters->block % 4)
        return status_set(STATUS_USAGE, "--block: %llu KiB are no whole pages; take a multiple of 4",
                          (unsigned long long)parameters->block);
    if (parameters->chunk % 4)
        return status_set(STATUS_USAGE, "--chunk: %llu KiB are no whole pages; take a multiple of 4",
                          (unsigned long long)parameters->chunk);
    if (parameters->normalised && !parameters->augment && parameters->tensor == TENSOR_RAW &&
        options_given(given, "tensor"))
        return status_set(STATUS_USAGE, "--tensor raw holds the values as they are; drop --mean and --std");
    if (!parameters->augment && options_given(given, "shift"))
        return status_set(STATUS_USAGE, "--shift belongs to --augment; add it");
    return STATUS_OK;
}

static void load_close(void *input)
{
    struct load_job *job = input;
    dataset_close(&job->dataset);
    free(job);
}

static void fill_load(const struct parameters *parameters, struct load_job *job)
{
    job->load = (struct load){
        .dataset = &job->dataset,
        .control = &job->control,
        .seed = parameters->seed,
        .batch = (uint32_t)parameters->batch,
        .window = (uint32_t)parameters->shuffle,
        .epochs = (uint32_t)parameters->epochs,
        .depth = (uint32_t)parameters->depth,
        .block_bytes = (uint32_t)parameters->block << 10,
        .prefetch = (uint32_t)parameters->prefetch,
        .cache = (enum load_cache)parameters->cache,
        .skip = parameters->on_error,
        .decode = parameters->decode || parameters->augment,
        .augment = parameters->augment,
        .augmentation = {.shift = (uint32_t)parameters->shift,
                         .flip = true,
                         .mean = (float)parameters->mean,
                         .scale = (float)(1 / parameters->std),
                         .seed = parameters->seed},
        .tensor = (enum tensor_type)parameters->tensor,
        .mean = parameters->mean,
        .std = parameters->std,
        .ring = (uint32_t)parameters->ring,
        .chunk_bytes = parameters->chunk << 10,
        .normalised = parameters->normalised,
    };
}

static enum status load_move(void *input, void *parameters, const struct place *place)
{
    struct load_job *job = input;
    (void)parameters;
    job->load.rank = (uint32_t)place->rank;
    job->load.ranks = (uint32_t)place->ranks;
    return STATUS_OK;
}

/* What the trainer's step learns: the labels of the set, from its pictures. */
static enum status teach(struct parameters *parameters, struct load_job *job)
{
    if (parameters->on_error)
        return status_set(STATUS_USAGE, "--compute %s learns from whole batches; drop --on-error skip",
                          parameters->compute.text);
    enum status status = pictures_find(&job->dataset, &job->pictures);
    if (status != STATUS_OK)
        return status_prefix(status, "--compute %s", parameters->compute.text);
    struct lesson *lesson = &parameters->compute.lesson;
    lesson->channels = job->pictures.channels;
    lesson->height = job->pictures.height;
    lesson->width = job->pictures.width;
    lesson->classes = job->pictures.classes;
    lesson->batch = (uint32_t)parameters->batch;
    job->load.pictures = &job->pictures;
    return compute_teach(&parameters->compute);
}

static enum status load_open(const struct options *given, void *parameters_, const struct place *place,
                             void **input)
{
    struct parameters *parameters = parameters_;
    struct load_job *job;
#ifndef HAVE_XXHASH
    return status_set(STATUS_UNAVAILABLE, "not built: this build has no xxHash");
#endif
    parameters->normalised = options_given(given, "mean") || options_given(given, "std");
    TRY(check_combination(given, parameters));
    TRY(compute_read(&parameters->compute));
    parameters->decode |= parameters->augment;
    job = calloc(1, sizeof *job);
    if (!job)
        return status_set(STATUS_FAILED, "out of memory");
    enum status status = dataset_open(parameters->data, parameters->on_error, &job->dataset);
    if (status == STATUS_OK && job->dataset.sample_count < place->ranks)
        status = status_set(STATUS_USAGE, "--data %s: %u samples are too few for %llu ranks",
                            parameters->data, job->dataset.sample_count, (unsigned long long)place->ranks);
    if (status == STATUS_OK && parameters->cache == LOAD_COLD && place->ranks > 1)
        status = status_set(STATUS_USAGE, "--cache cold is for one rank: one would read in what another has "
                                          "evicted; take --cache any, or one rank with more --threads");
    if (status != STATUS_OK) {
        load_close(job);
        return status;
    }
    fill_load(parameters, job);
    if (compute_learns(&parameters->compute)) {
        status = teach(parameters, job);
        if (status != STATUS_OK) {
            load_close(job);
            return status;
        }
    }
    *input = job;
    return load_move(job, parameters, place);
}

static bool load_applies(const void *parameters_, const struct variant *variant, const char *option)
{
    static const char *const of_cpu[] = {"depth", "block", "decode", "augment"};
    const struct parameters *parameters = parameters_;
    const struct load_traits *traits = variant ? variant->traits : NULL;
    bool device = traits && traits->device;
    if (strcmp(option, "shift") == 0)
        return parameters->augment && !device;
    if (strcmp(option, "mean") == 0 || strcmp(option, "std") == 0)
        return device ? parameters->tensor != TENSOR_RAW : parameters->augment;
    if (strcmp(option, "tensor") == 0)
        return device;
    if (strcmp(option, "ring") == 0 || strcmp(option, "chunk") == 0)
        return device && traits->ring;
    if (strcmp(option, "shuffle") == 0)
        return !(traits && traits->keyed);
    for (size_t i = 0; device && i < COUNT_OF(of_cpu); i++)
        if (strcmp(option, of_cpu[i]) == 0)
            return false;
    return true;
}

static enum status accepts_options(const struct load *load, const struct load_traits *traits)
{
    if (traits->device && load->decode)
        return status_set(STATUS_USAGE, "it converts on the device, and neither decodes nor augments; drop "
                                        "--decode and --augment, or take a CPU variant");
    if (!traits->device && load->pictures && !load->decode)
        return status_set(STATUS_USAGE, "--compute train learns from pictures, and it delivers files as they "
                                        "are; add --decode, or --augment");
    if (!traits->device && load->normalised && !load->augment)
        return status_set(STATUS_USAGE,
                          "--mean and --std belong to --augment, and to GPU variants; add it, or drop them");
    return STATUS_OK;
}

static const struct compute *load_compute(const void *parameters)
{
    return &((const struct parameters *)parameters)->compute;
}

static void load_set_consumer(void *input, struct consumer *consumer)
{
    ((struct load_job *)input)->control.consumer = consumer;
}

static enum status load_accepts(const void *input, const struct variant *variant)
{
    const struct load *load = input;
    const struct load_traits *traits = variant->traits;
    if (traits->files && !load->dataset->shards && load->dataset->sample_bytes_max >= INT32_MAX)
        return status_set(STATUS_USAGE,
                          "it reads a file in one call, which ends at 2 GiB, and %s holds one of %llu bytes",
                          load->dataset->path, (unsigned long long)load->dataset->sample_bytes_max);
    if (load->dataset->shards ? traits->shards : traits->files) {
        TRY(accepts_options(load, traits));
        return traits->accepts ? traits->accepts(load) : STATUS_OK;
    }
    return status_set(STATUS_USAGE, "it reads %s, and %s holds %s",
                      traits->shards ? "shards" : "files of a sample each", load->dataset->path,
                      load->dataset->shards ? "shards" : "files");
}

static const char *load_cache_state(const void *input)
{
    return caches[((const struct load *)input)->cache];
}

/* What a run delivers: what was lost in the latest one is not in it. */
static struct work load_work(const void *input, const struct variant *variant)
{
    const struct load *load = input;
    struct order_plan plan = load_plan(load, 1);
    uint32_t begin, end;
    (void)variant;
    order_share(&plan, load->rank, &begin, &end);
    double items = (double)(end - begin) * load->epochs;
    double bytes = items * (double)load->dataset->bytes / load->dataset->sample_count;
    const struct tally *lost = &load->control->lost; /* the same in every run, which the reader sees to */
    return (struct work){.items = items - (double)lost->count, .bytes = bytes - (double)lost->bytes};
}

/* ---- Verification ---- */

static void want(void *context, uint32_t sample)
{
    uint8_t *wanted = context;
    wanted[sample]++;
}

/* The orders that one thread of this variant follows on each rank; their shares are the same for any number.
 */
static struct order_plan plan_of(const struct load *load, const struct variant *variant, int threads)
{
    struct order_plan plan = load_plan(load, threads);
    plan.keyed = ((const struct load_traits *)variant->traits)->keyed;
    return plan;
}

/* Epoch 0 once more, every byte of every sample compared with what the plain reader read. */
static enum status load_verify(const void *input, const struct variant *variant, void *state, uint64_t *wrong)
{
    struct load_job *job = (struct load_job *)(uintptr_t)input; /* made by load_open() */
    struct order_plan plan = plan_of(&job->load, variant, 1);
    struct load_result result;
    struct run_time unused;
    TRY(dataset_hash(&job->dataset));
    uint8_t *seen = calloc(job->dataset.sample_count, 1), *wanted = calloc(job->dataset.sample_count, 1);
    enum status status = seen && wanted ? STATUS_OK : status_set(STATUS_FAILED, "out of memory to verify");
    uint32_t epochs = job->load.epochs;
    job->load.epochs = 1;
    job->control.whole = true;
    job->control.seen = seen;
    if (status == STATUS_OK)
        status = variant_run(variant, state, 0, &unused);
    job->control.whole = false;
    job->control.seen = NULL;
    job->control.lost = (struct tally){0};
    job->load.epochs = epochs;
    if (status == STATUS_OK)
        status = variant->fetch(state, &result);
    if (status == STATUS_OK)
        status = visit_epoch(&job->load, &plan, 0, want, wanted);
    *wrong = 0;
    for (uint32_t i = 0; status == STATUS_OK && i < job->dataset.sample_count; i++)
        *wrong += seen[i] != wanted[i];
    if (status == STATUS_OK)
        *wrong -= *wrong < result.skipped ? *wrong : result.skipped;
    free(seen);
    free(wanted);
    return status;
}

/* ---- Measures ---- */

/* The mean over the threads, each with an order of its own. */
static enum status measure_order(const struct load *load, const struct variant *variant, int threads,
                                 char texts[][64])
{
    struct order_plan plan = plan_of(load, variant, threads);
    struct order order;
    double displacement = 0, shards = 0;
    bool batches = plan.shards > 0;
    enum status status = STATUS_OK;
    TRY(order_open(&plan, &order));
    for (uint32_t w = 0; status == STATUS_OK && w < (uint32_t)threads; w++) {
        struct order_quality quality = {0};
        order_make(&plan, 1, load->rank * (uint32_t)threads + w, &order);
        status = order_measure(&plan, &order, load->batch, &quality);
        displacement += quality.displacement / threads;
        shards += quality.shards / threads;
        batches = batches && order.count >= load->batch;
    }
    order_close(&order);
    TRY(status);
    snprintf(texts[DISPLACEMENT], 64, "%.4f", displacement);
    if (batches)
        snprintf(texts[SHARDS_A_BATCH], 64, "%.4g", shards);
    return STATUS_OK;
}

/* One run more, in which every call is timed. */
static enum status measure_calls(struct load_job *job, const struct variant *variant, void *state,
                                 char texts[][64])
{
    static const double quantiles[] = {0.5, 0.99, 0.999};
    struct run_time unused;
    struct load_result *result = malloc(sizeof *result);
    if (!result)
        return status_set(STATUS_FAILED, "out of memory for latencies");
    job->control.timed_calls = true;
    enum status status = variant_run(variant, state, 0, &unused);
    job->control.timed_calls = false;
    if (status == STATUS_OK)
        status = variant->fetch(state, result);
    for (int call = 0; status == STATUS_OK && call < LOAD_CALLS; call++)
        for (int q = 0; q < 3; q++)
            snprintf(texts[LATENCIES + 3 * call + q], 64, "%.4g",
                     latency_quantile_s(&result->latency[call], quantiles[q]));
    free(result);
    return status;
}

#define COPY_ROUNDS 9
#define COPY_TIME_S 3.0 /* no round begins later */

static int by_value(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* The wall that every loader stands before: copies of the working set, turn by turn with runs, so that both
 * see the same machine. */
static enum status copy_in_turn(const struct load *load, const struct variant *variant, void *state,
                                struct load_result *result, char texts[][64])
{
    const struct load_traits *traits = variant->traits;
    double copies[COPY_ROUNDS], shares[COPY_ROUNDS], begin_s = timer_now_s();
    double bytes = load_work(load, variant).bytes;
    size_t rounds = 0;
    while (rounds < COPY_ROUNDS && (rounds == 0 || timer_now_s() - begin_s < COPY_TIME_S)) {
        struct run_time unused;
        if (variant->ready)
            TRY(variant->ready(state, rounds));
        double run_begin_s = timer_now_s();
        TRY(variant->run(state, rounds, &unused));
        double run_s = timer_now_s() - run_begin_s;
        TRY(variant->fetch(state, result));
        double rate = (result->moved_bytes ? (double)result->moved_bytes : bytes) / run_s;
        TRY(traits->copy(state, &copies[rounds]));
        shares[rounds] = rate / copies[rounds];
        rounds++;
    }
    qsort(copies, rounds, sizeof *copies, by_value);
    qsort(shares, rounds, sizeof *shares, by_value);
    snprintf(texts[COPY_BYTES_PER_S], 64, "%.6g", copies[rounds / 2]);
    snprintf(texts[COPY_SHARE], 64, "%.4f", shares[rounds / 2]);
    return STATUS_OK;
}

static enum status measure_copy(const struct load *load, const struct variant *variant, void *state,
                                char texts[][64])
{
    struct load_result *result = malloc(sizeof *result);
    if (!result)
        return status_set(STATUS_FAILED, "out of memory for measures");
    enum status status = copy_in_turn(load, variant, state, result, texts);
    free(result);
    return status;
}

/* Rows that say warm while something was read from the device: another process evicts. */
static void warn_of_cooling(const struct load *load, const struct load_result *result,
                            const struct cache_pages *after)
{
    uint64_t read = result->device_known ? result->device_bytes : 0;
    if (load->cache == LOAD_WARM && (read > 0 || (!after->hidden && cache_share(after) < WARM_SHARE_MIN)))
        status_warn("--cache warm: the latest run read %llu bytes from a device, and %.1f %% of the data set "
                    "is in the page cache: another process evicts or needs the memory, and the row is not "
                    "of warm runs alone",
                    (unsigned long long)read, 100 * cache_share(after));
}

/* What is known of the latest timed run, and by how many threads. */
static enum status measure_run(const struct load *load, const struct variant *variant, void *state,
                               char texts[][64], int *threads)
{
    const struct dataset *dataset = load->dataset;
    struct cache_pages after;
    struct load_result *result = malloc(sizeof *result);
    if (!result)
        return status_set(STATUS_FAILED, "out of memory for measures");
    enum status status = variant->fetch(state, result);
    if (status == STATUS_OK)
        status = load_resident(load, &after);
    if (status == STATUS_OK) {
        *threads = result->threads;
        warn_of_cooling(load, result, &after);
        if (!dataset->uncounted)
            snprintf(
                texts[SKIPPED], 64, "%llu",
                (unsigned long long)((load->rank ? 0 : dataset->skipped) + result->skipped / load->epochs));
        if (!result->before.hidden)
            snprintf(texts[RESIDENT_BEFORE], 64, "%.4f", cache_share(&result->before));
        if (!after.hidden)
            snprintf(texts[RESIDENT_AFTER], 64, "%.4f", cache_share(&after));
        if (result->device_known)
            snprintf(texts[DEVICE_BYTES], 64, "%llu", (unsigned long long)result->device_bytes);
        snprintf(texts[TALLY], 64, "%016llx", (unsigned long long)result->tally.sum);
        if (result->gds)
            snprintf(texts[GDS], 64, "%s", result->gds);
        if (load->decode)
            snprintf(texts[DECODE_S], 64, "%.6g", result->decode_s);
        if (load->augment)
            snprintf(texts[AUGMENT_S], 64, "%.6g", result->augment_s);
    }
    free(result);
    return status;
}

static enum status load_measure(const void *input, const struct variant *variant, void *state,
                                char texts[][64])
{
    struct load_job *job = (struct load_job *)(uintptr_t)input; /* made by load_open() */
    const struct load_traits *traits = variant->traits;
    const struct dataset *dataset = &job->dataset;
    bool kept = job->load.cache == LOAD_WARM || !traits->timed_unless_warm;
    snprintf(texts[TIMED], 64, "%s%s%s", kept ? traits->timed : traits->timed_unless_warm,
             job->load.decode ? "+decode" : "", job->load.augment ? "+augment" : "");
    snprintf(texts[LAYOUT], 64, "%s", dataset->shards ? "shards" : "files");
    if (dataset->shards)
        snprintf(texts[SHARDS], 64, "%u", dataset->file_count);
    snprintf(texts[SAMPLE_BYTES], 64, "%.9g", (double)dataset->bytes / dataset->sample_count);
    int threads = 1;
    TRY(measure_run(&job->load, variant, state, texts,
                    &threads)); /* first: it asks for the latest timed run */
    TRY(measure_order(&job->load, variant, threads, texts));
    if (traits->calls)
        TRY(measure_calls(job, variant, state, texts));
    return measure_copy(&job->load, variant, state, texts);
}

static const char *const shown[] = {"skipped", NULL};

const struct workload workload_load = {
    .name = "load",
    .schema = "load/5",
    .summary = "samples read from files and from shards into batches",
    .item = "samples",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct parameters),
    .measures = measures,
    .shown = shown,
    .checks_runs = true,
    .shares_items = true,
    .open = load_open,
    .close = load_close,
    .move = load_move,
    .applies = load_applies,
    .accepts = load_accepts,
    .cache = load_cache_state,
    .compute = load_compute,
    .set_consumer = load_set_consumer,
    .work = load_work,
    .verify = load_verify,
    .measure = load_measure,
};
