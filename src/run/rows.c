/* Rows of results: the values of a variant on one rank, and the row of all ranks together. */
#include "run/rows.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"
#include "machine/nvml.h"

/* ---- The row of a rank ---- */

bool runner_on_gpu(const struct runner *runner)
{
    return strcmp(runner->entry->variant->platform, "cuda") == 0;
}

static int runner_threads(const struct runner *runner)
{
    return runner->entry->variant->threaded ? runner->settings->resources.threads : 1;
}

#define CPU_SPAN_MIN_S 0.25 /* a shorter span has too few context switches to judge */

void runner_cpu_use(const struct runner *runner, const struct bench *bench, double *share,
                    double *preempted_per_s)
{
    const struct workload *workload = runner->settings->workload;
    const char *cache = workload->cache ? workload->cache(runner->input) : "warm";
    int threads = runner_threads(runner), allowed = runner->env.allowed_threads;
    *share = *preempted_per_s = NAN;
    if (runner_on_gpu(runner) || runner->consumer || strcmp(cache, "warm") != 0 ||
        bench->span_s < CPU_SPAN_MIN_S)
        return;
    *share = bench->cpu_s / (bench->span_s * (allowed > 0 && allowed < threads ? allowed : threads));
    *preempted_per_s = (double)bench->preempted / bench->span_s;
}

static int runner_cores(const struct runner *runner)
{
    int threads = runner_threads(runner), allowed = runner->env.allowed_cores;
    return allowed > 0 && allowed < threads ? allowed : threads;
}

struct roofline runner_roofline(const struct runner *runner, const struct work *work)
{
    const struct variant *variant = runner->entry->variant;
    if (runner_on_gpu(runner))
        return roofline_of(&work->least, &runner->device.peaks);
    struct machine_peaks peaks = {0};
    if (variant->instruction_set)
        peaks.flops_per_s[UNIT_FP32] = roofline_cpu_flops_per_cycle(variant->instruction_set()) *
                                       runner->env.max_clock_hz * runner_cores(runner);
    return roofline_of(&work->least, &peaks);
}

/* Sets the columns of the options that have an effect on the variant. */
static void set_options(const struct runner *runner, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    const void *parameters = runner->settings->parameters;
    for (size_t i = 0; i < workload->option_count; i++) {
        const struct option_spec *spec = &workload->options[i];
        const void *value = (const char *)parameters + spec->offset;
        char column[64], text[4096];
        if (spec->column != COLUMN ||
            (workload->applies && !workload->applies(parameters, runner->entry->variant, spec->name)))
            continue;
        options_column(spec, column, sizeof column);
        options_text(spec, parameters, text, sizeof text);
        if (spec->kind == OPTION_FLAG)
            row_flag(row, column, *(const bool *)value);
        else if (*text && (spec->kind == OPTION_COUNT || spec->kind == OPTION_BYTES))
            row_count(row, column, *(const uint64_t *)value);
        else /* a real number has the digits that were given */
            row_text(row, column, text);
    }
}

void runner_set_run(const struct runner *runner, const struct result *result, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    const struct variant *variant = runner->entry->variant;
    bool on_gpu = runner_on_gpu(runner);
    row_text(row, "schema", workload->schema);
    row_text(row, "time_utc", *runner->time_utc ? runner->time_utc : runner->env.time_utc);
    row_text(row, "host", runner->env.host);
    row_text(row, "job_id", runner->env.job_id);
    row_text(row, "revision", runner->env.revision);
    row_text(row, "workload", workload->name);
    row_text(row, "variant", runner->entry->name);
    row_text(row, "device", on_gpu ? runner->device.name : runner->env.cpu_model);
    row_text(row, "driver", on_gpu ? runner->driver : "");
    row_text(row, "cuda", on_gpu ? runner->device.runtime : "");
    row_count(row, "ranks", runner->partition.ranks);
    row_count(row, "rank", runner->partition.rank);
    row_count(row, "threads", (unsigned long long)runner_threads(runner));
    if (runner->partition.ranks > 1 && !workload->ranks.joint)
        row_text(row, "scaling", settings_scaling(runner->settings));
    if (on_gpu)
        row_count(row, "ranks_per_device", (unsigned long long)runner->sharers);
    if (on_gpu && runner->settings->gpu_others.known)
        row_count(row, "gpu_others", (unsigned long long)runner->settings->gpu_others.count);
    set_options(runner, row);
    if (runner->watched.sm_clock_mhz > 0)
        row_count(row, "sm_clock_mhz", (unsigned long long)runner->watched.sm_clock_mhz);
    if (runner->watched.mem_clock_mhz > 0)
        row_count(row, "memory_clock_mhz", (unsigned long long)runner->watched.mem_clock_mhz);
    row_text(row, "instruction_set", variant->instruction_set ? variant->instruction_set() : "");
    row_text(row, "cache", workload->cache ? workload->cache(runner->input) : "");
    row_flag(row, "verified", result->verified);
    if (result->verified || workload->checks.every_run)
        row_count(row, "wrong", result->wrong);
}

void runner_set_result(const struct runner *runner, const struct result *result, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    const struct bench *bench = &result->bench;
    const struct stats *time = &bench->time;
    const struct roofline *roofline = &result->roofline;
    char throttled[128];
    row_count(row, "warmups", result->runs_before + bench->warmups);
    row_count(row, "samples", bench->count);
    if (!workload->epochs.more) /* each epoch is a row */
        row_flag(row, "settled", bench->settled);
    row_real(row, "median_error", time->median_error);
    row_real(row, "time_min_s", time->min);
    row_real(row, "time_median_s", time->median);
    row_real(row, "time_mean_s", time->mean);
    row_real(row, "time_p95_s", time->p95);
    row_real(row, "time_p99_s", time->p99);
    row_real(row, "wall_s", bench->wall_s);
    row_real(row, "items", result->work.items);
    if (!workload->ranks.joint || comm_size() > 1) { /* one rank alone has nothing to exchange */
        row_positive(row, "items_per_s", result->work.items / time->median);
        row_positive(row, "bytes_per_s", result->work.bytes / time->median);
    }
    row_positive(row, "flops", roofline->flops);
    row_positive(row, "bytes", roofline->bytes);
    row_positive(row, "peak_flops_per_s", roofline->peak_flops);
    row_positive(row, "peak_bytes_per_s", roofline->peak_bytes_per_s);
    row_text(row, "bound", roofline_bound_name(roofline->bound));
    row_positive(row, "roofline_share", roofline->floor_s / time->median);
    if (bench->count > 1) {
        row_real(row, "time_sd_s", time->sd);
        row_real(row, "time_cv", time->cv);
    }
    row_count(row, "outliers", time->outliers);
    row_text(row, "throttled", nvml_throttle_words(result->throttle_reasons, throttled, sizeof throttled));
    row_positive(row, "energy_j_per_item", result->run_j / result->work.items);
}

/* ---- Samples ---- */

/* Makes the row of a sample. The first columns are those of the row, so that samples and rows can be joined.
 */
static void make_sample(const struct row_columns *columns, const struct row *whole,
                        const struct sample *sample, size_t number, struct row *row)
{
    row_open(row, columns->sample);
    for (size_t i = 0; i < columns->shared; i++)
        row_copy(row, i, whole);
    row_count(row, "sample", number);
    row_real(row, "wall_s", sample->wall_s);
    row_real(row, "device_s", sample->device_s >= 0 ? sample->device_s : NAN);
}

enum status runner_append_samples(const struct workload *workload, const char *path, const struct row *ranks,
                                  size_t rank_count, const struct sample *samples, size_t count)
{
    const struct row_columns *columns;
    size_t total = rank_count * count;
    FREED struct row *rows = calloc(total, sizeof *rows);
    TRY(ALLOCATED(rows, "--samples-out: out of memory for %zu samples", total));
    TRY(columns_of(workload, &columns));
    for (size_t i = 0; i < total; i++)
        make_sample(columns, &ranks[i / count], &samples[i], i % count, &rows[i]);
    enum status status = csv_append(path, rows, total); /* checks the rows first */
    for (size_t i = 0; i < total; i++)
        row_free(&rows[i]);
    return status;
}

/* ---- All ranks ---- */

void ranks_free_rows(struct row *rows)
{
    for (int i = 0; rows && i <= comm_size(); i++)
        row_free(&rows[i]);
    free(rows);
}

/* Gathers `bytes` bytes of each rank on rank 0. On rank 0, `*all` becomes new memory that the caller frees;
 * on other ranks it becomes NULL. */
static enum status gather(const void *mine, size_t bytes, void **all)
{
    bool leads = comm_rank() == 0;
    *all = leads ? malloc((size_t)comm_size() * bytes) : NULL;
    enum status status = STATUS_OK;
    if (leads && !*all)
        status = status_set(STATUS_EXHAUSTED, "out of memory for the results of %d ranks", comm_size());
    status = comm_agree(status);
    if (status == STATUS_OK)
        status = comm_gather(mine, bytes, *all);
    if (status != STATUS_OK) {
        free(*all);
        *all = NULL;
    }
    return status;
}

/* Makes the rows of all ranks from their values and texts. `word_bytes` is the distance between the texts of
 * two ranks. */
static enum status take_rows(const struct row *mine, const struct value *values, const char *words,
                             size_t word_bytes, struct row **rows)
{
    *rows = calloc((size_t)comm_size() + 1, sizeof **rows);
    TRY(ALLOCATED(*rows, "out of memory for the rows of %d ranks", comm_size()));
    for (size_t i = 0; i < (size_t)comm_size(); i++) {
        struct row *row = &(*rows)[i];
        row_open(row, mine->columns);
        row->words = malloc(word_bytes);
        row->failed |= !row->words;
        TRY(row_check(row));
        row->word_bytes = word_bytes;
        memcpy(row->values, values + i * row->count, row->count * sizeof *values);
        memcpy(row->words, words + i * word_bytes, word_bytes);
    }
    return STATUS_OK;
}

static enum status gather_rows(const struct row *mine, struct row **rows)
{
    double longest = (double)mine->word_bytes;
    TRY(comm_max(&longest, 1));
    size_t word_bytes = (size_t)longest;
    FREED void *values = NULL, *words = NULL;
    FREED char *padded = calloc(1, word_bytes);
    TRY(comm_agree(ALLOCATED(padded, "out of memory for a row of %zu bytes", word_bytes)));
    memcpy(padded, mine->words, mine->word_bytes);
    TRY(gather(mine->values, mine->count * sizeof *mine->values, &values));
    TRY(gather(padded, word_bytes, &words));
    return comm_agree(values ? take_rows(mine, values, words, word_bytes, rows) : STATUS_OK);
}

enum status ranks_gather(const struct row *mine, const struct rank_facts *my_facts, struct row **rows,
                         struct rank_facts **facts)
{
    *rows = NULL;
    void *all = NULL;
    enum status status = gather_rows(mine, rows);
    if (status == STATUS_OK)
        status = gather(my_facts, sizeof *my_facts, &all);
    *facts = all;
    if (status != STATUS_OK) {
        ranks_free_rows(*rows);
        *rows = NULL;
    }
    return status;
}

enum status ranks_gather_samples(const struct bench *bench, struct sample **samples)
{
    void *all;
    enum status status = gather(bench->samples, bench->count * sizeof *bench->samples, &all);
    *samples = all;
    return status;
}

struct roofline ranks_roofline(const struct rank_facts *facts, uint64_t count)
{
    struct roofline all = {0};
    for (uint64_t i = 0; i < count; i++)
        roofline_add(&all, &facts[i].roofline, facts[i].sharers);
    return all;
}

/* Returns the number that a row shows. */
static double shown(const struct value *value)
{
    if (value->type == VALUE_INTEGER)
        return (double)value->integer;
    if (value->digits == 0 || value->real == 0)
        return value->real;
    int decimals =
        value->digits < 0 ? -value->digits : value->digits - 1 - (int)floor(log10(fabs(value->real)));
    return rint(value->real * pow(10, decimals)) / pow(10, decimals);
}

static bool is_same(const struct row *a, const struct row *b, size_t column)
{
    char first[VALUE_TEXT_MAX], second[VALUE_TEXT_MAX];
    return strcmp(row_cell(a, column, first), row_cell(b, column, second)) == 0;
}

/* Sets the value of a column that all ranks have. */
static void combine(const struct row *rows, int count, size_t column, enum combine how, struct value *total)
{
    double smallest = INFINITY, largest = -INFINITY, mean = 0, sum = 0;
    *total = rows[0].values[column];
    for (int i = 0; i < count; i++) {
        const struct value *value = &rows[i].values[column];
        double number = shown(value);
        smallest = fmin(smallest, number);
        largest = fmax(largest, number);
        mean += number / count;
        sum += number;
        if (i > 0 && how == COMBINE_SUM && value->type != VALUE_REAL)
            total->integer += value->integer; /* exact, and for hashes modulo 2^64 */
    }
    if (how == COMBINE_SUM && total->type != VALUE_REAL)
        return;
    double real = how == COMBINE_MIN    ? smallest
                  : how == COMBINE_MAX  ? largest
                  : how == COMBINE_MEAN ? mean
                                        : sum;
    *total = (struct value){.type = VALUE_REAL, .real = real};
}

void ranks_combine(const struct row *rows, int count, struct row *total)
{
    for (size_t column = 0; column < total->count; column++) {
        enum combine how = total->columns[column].combine;
        bool known = true, same = true;
        for (int i = 0; i < count; i++) {
            known &= rows[i].values[column].type != VALUE_ABSENT;
            same &= is_same(&rows[0], &rows[i], column);
        }
        if (how == COMBINE_FIRST || (how == COMBINE_COMMON && same))
            row_copy(total, column, &rows[0]);
        else if (how != COMBINE_COMMON && how != COMBINE_COMPUTED && how != COMBINE_NONE && known)
            combine(rows, count, column, how, &total->values[column]);
    }
}

double ranks_efficiency(const struct partition *partition, double alone_s, double together_s)
{
    return alone_s / (partition->strong ? (double)partition->ranks * together_s : together_s);
}

/* ---- Warnings ---- */

#define CPU_SHARE_MIN   0.9  /* warn if threads got less than this share of the CPU time available to them */
#define PREEMPTED_MAX_S 10.0 /* warn above this number of involuntary context switches per second */

static void warn_of_median(const struct settings *settings, const char *variant, const struct bench *bench)
{
    const char *more = settings->loops ? "raise --loops or reduce background load"
                                       : "raise --max-time or reduce background load";
    if (bench->count < STATS_INTERVAL_MIN)
        status_caveat("took too few samples for the error of the median",
                      settings->loops ? "raise --loops" : "raise --min-samples",
                      "%s: too few samples (%zu) for the error of the median; take at least %d with --%s",
                      variant, bench->count, STATS_INTERVAL_MIN, settings->loops ? "loops" : "min-samples");
    else if (!bench->settled && isinf(bench->time.median_error))
        status_caveat("did not settle", more,
                      "%s: the error of the median is unknown: samples are correlated, so %zu of them are "
                      "worth only %.0f independent ones; %s",
                      variant, bench->count, bench->time.effective, more);
    else if (!bench->settled)
        status_caveat("did not settle", more, "%s: median uncertain by +-%.1f %% after %zu samples; %s",
                      variant, 100 * bench->time.median_error, bench->count, more);
    else if (bench->time.outliers * 10 > bench->count)
        status_caveat("had many outliers", "stop other processes on this machine",
                      "%s: %zu of %zu samples are outliers; other processes may be using this machine",
                      variant, bench->time.outliers, bench->count);
}

/* Warns if other processes used the cores, because a median can settle even on a busy machine. Describes the
 * rank that got the smallest share of its cores. */
static void warn_of_busy_cores(const struct runner *runner, const struct rank_facts *facts)
{
    bool one = runner_threads(runner) == 1;
    double share = 1, preempted = 0;
    for (uint64_t i = 0; i < runner->partition.ranks; i++)
        if (facts[i].cpu_share < share && facts[i].preempted_per_s > PREEMPTED_MAX_S) {
            share = facts[i].cpu_share;
            preempted = facts[i].preempted_per_s;
        }
    if (share < CPU_SHARE_MIN)
        status_caveat("lost CPU time to other processes, so times are too long", "stop other processes",
                      "%s: its thread%s got %.0f %% of the CPU time of %s and %s preempted %.0f times per "
                      "second, so times are too long: stop other processes%s",
                      runner->entry->name, one ? "" : "s", 100 * share, one ? "its core" : "their cores",
                      one ? "was" : "were", preempted, one ? "" : ", or lower --threads");
}

void runner_warn(const struct runner *runner, const struct result *result, const struct rank_facts *facts)
{
    const struct settings *settings = runner->settings;
    char words[128];
    if (*nvml_throttle_words(result->throttle_reasons, words, sizeof words))
        status_caveat("ran while the GPU's clocks were throttled",
                      "cool the GPU, raise its power limit, or compare only with throttled runs",
                      "%s: the GPU's clocks were throttled (%s); cool the GPU, raise its power limit, or "
                      "compare only with runs that were throttled too",
                      runner->entry->name, words);
    if (!settings->workload->epochs.more) /* runs that are not repeated have no median error */
        warn_of_median(settings, runner->entry->name, &result->bench);
    warn_of_busy_cores(runner, facts);
}

void runner_warn_of_options(const struct settings *settings)
{
    const struct workload *workload = settings->workload;
    for (size_t i = 0; i < workload->option_count; i++) {
        const char *option = workload->options[i].name;
        if (options_given(&settings->options, option) && !settings_uses(settings, option) &&
            workload->applies(settings->parameters, NULL, option))
            status_warn("--%s has no effect with --variant %s and these options; drop it, or choose the "
                        "variant or the options that it needs (--help)",
                        option, settings->variant_names);
    }
}

void runner_warn_of_few_looks(const struct runner *runner, double wall_s)
{
    const struct settings *settings = runner->settings;
    size_t looks = monitor_timed_samples(runner->monitor);
    double enough_s = 1e-3 * (double)settings->monitor_period_ms * (MONITOR_SAMPLES_MIN + 1);
    char remedy[64];
    if (!runner->monitor || looks >= MONITOR_SAMPLES_MIN || settings->workload->epochs.more)
        return;
    if (settings->loops)
        snprintf(remedy, sizeof remedy, "--loops %.0f", ceil(enough_s / wall_s));
    else
        snprintf(remedy, sizeof remedy, "--min-time %g", enough_s);
    status_caveat("got too few samples of --monitor",
                  settings->loops ? "raise --loops" : "raise --min-time or shorten the period",
                  "%s: --monitor took only %zu sample%s during the timed runs, but meaningful statistics "
                  "need %d; sample longer with %s%s",
                  runner->entry->name, looks, looks == 1 ? "" : "s", MONITOR_SAMPLES_MIN, remedy,
                  settings->monitor_period_ms > MONITOR_PERIOD_MIN_MS ? ", or use a shorter period" : "");
}
