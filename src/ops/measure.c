/* The columns of `ops`, in addition to those that every workload has. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/stats.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/checksum.h"
#include "ops/ops.h"

const struct column ops_columns[] = {
    {"timed_stages", VALUE_WORD, COMBINE_FIRST, "", .about = "the stages that the time of a run includes"},
    {"load_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time until the rows of files were mapped and in the page cache; empty for generated rows",
     .digits = 6},
    {"rows_in", VALUE_INTEGER, COMBINE_SUM, "", .about = "input rows"},
    {"rows_kept", VALUE_INTEGER, COMBINE_SUM, "",
     .about = "rows that remain after the mask and the comparison of hashes"},
    {"duplicate_rows", VALUE_INTEGER, COMBINE_NONE, "",
     .about = "valid rows whose hash equals that of an earlier valid row; only with the step hash"},
    {"mask_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time to mask bad rows in one extra run, mean over the threads", .digits = 6},
    {"dedup_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time to compare hashes in one extra run, mean over the threads", .digits = 6},
    {"compact_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time to remove rows in one extra run, mean over the threads", .digits = 6},
    {"permute_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time to permute rows in one extra run, mean over the threads", .digits = 6},
    {"convert_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time to convert values in one extra run, mean over the threads", .digits = 6},
    {"hash_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time to hash rows in one extra run, mean over the threads", .digits = 6},
    {"least_bytes", VALUE_INTEGER, COMBINE_SUM, "bytes",
     .about = "bytes that any program must move for these steps"},
    {"stream_bytes_per_s", VALUE_REAL, COMBINE_NONE, "bytes/s",
     .about = "reference bandwidth: a copy on a GPU, STREAM triad on a CPU", .digits = 6},
    {"stream_share", VALUE_REAL, COMBINE_NONE, "",
     .about = "least_bytes divided by the time and by stream_bytes_per_s", .digits = 4},
    MEMORY_COLUMNS,
    {"error_max", VALUE_REAL, COMBINE_MAX, "", .about = "largest absolute error of converted values of run 0",
     .digits = 5},
    {"error_mean", VALUE_REAL, COMBINE_MEAN, "",
     .about = "mean relative error of converted values of run 0 that are not 0", .digits = 5},
    {"digest", VALUE_HASH, COMBINE_SUM, "", .about = "sum of the hashes of the output rows of run 0"},
    {.name = NULL},
};

static enum status summarize(const struct variant *variant, void *state, struct ops_summary *summary)
{
    struct ops_fetch fetch = {0};
    TRY(variant->fetch(state, &fetch));
    *summary = fetch.summary;
    return STATUS_OK;
}

/* Sets the memory columns. Memory efficiency is the bytes of the rows and the results, divided by the bytes
 * allocated. */
static void put_memory(const struct ops *ops, const struct ops_summary *summary, struct row *row)
{
    double rows = (double)ops->count * (double)ops->row_bytes, useful = rows;
    for (int array = 0; array < OPS_ARRAYS; array++)
        useful += (double)(array == OPS_KEPT ? ops->count : summary->outputs) *
                  (double)ops_array_bytes(ops, (enum ops_array)array);
    row_memory(row, useful, rows + (double)summary->memory_bytes);
}

enum status ops_observe(const void *input, const struct variant *variant, void *state, struct row *row)
{
    const struct ops *ops = input;
    struct ops_summary summary;
    char stages[64] = "";
    TRY(summarize(variant, state, &summary));
    for (int step = 0; step < OPS_STEPS; step++)
        if (ops->steps[step])
            text_join(stages, sizeof stages, "+", "%s", ops_step_names[step]);
    row_text(row, "timed_stages", stages);
    if (ops->set)
        row_real(row, "load_s", ((const struct ops_job *)input)->load_s);
    row_count(row, "rows_in", ops->count);
    row_count(row, "rows_kept", summary.kept);
    row_count(row, "least_bytes", (unsigned long long)ops_least_bytes(ops, summary.kept));
    put_memory(ops, &summary, row);
    return STATUS_OK;
}

/* ---- Extra runs ---- */

/* Measures the time of each step in one extra run. */
static enum status measure_steps(const struct ops *ops, const struct variant *variant, void *state,
                                 struct row *row)
{
    struct run_time unused;
    struct ops_summary summary;
    ops->control->timed = true;
    enum status status = variant_run(variant, state, 0, &unused);
    ops->control->timed = false;
    TRY(status);
    TRY(summarize(variant, state, &summary));
    for (int step = 0; step < OPS_STEPS; step++) {
        char column[32];
        snprintf(column, sizeof column, "%s_s", ops_step_names[step]);
        if (ops->steps[step] && summary.step_s[step] >= 0)
            row_real(row, column, summary.step_s[step]);
    }
    return STATUS_OK;
}

#define STREAM_ROUNDS 9
#define STREAM_TIME_S 2.0 /* the first round always runs; no other round starts after this time */

/* Measures the bandwidth of runs relative to the reference bandwidth. Runs alternate with measurements of the
 * reference bandwidth, so that both see the same state of the machine. */
static enum status measure_stream(const struct ops *ops, const struct variant *variant, void *state,
                                  struct row *row)
{
    const struct ops_traits *traits = variant->traits;
    double rates[STREAM_ROUNDS], shares[STREAM_ROUNDS], begin_s = timer_now_s();
    struct ops_summary summary;
    size_t rounds = 0;
    TRY(summarize(variant, state, &summary));
    double bytes = summary.copied_bytes ? (double)summary.copied_bytes : ops_least_bytes(ops, summary.kept);
    while (rounds < STREAM_ROUNDS && (rounds == 0 || timer_now_s() - begin_s < STREAM_TIME_S)) {
        struct run_time time = {.device_s = -1};
        double run_begin_s = timer_now_s();
        TRY(variant_run(variant, state, rounds, &time));
        double run_s = time.device_s >= 0 ? time.device_s : timer_now_s() - run_begin_s;
        TRY(traits->stream(state, &rates[rounds]));
        shares[rounds] = bytes / run_s / rates[rounds];
        rounds++;
    }
    row_real(row, "stream_bytes_per_s", stats_middle(rates, rounds));
    row_real(row, "stream_share", stats_middle(shares, rounds));
    return STATUS_OK;
}

/* ---- Results of run 0 ---- */

#define CHUNK_ROWS     1024
#define ERROR_VALUES   ((uint64_t)1 << 24) /* maximum number of values for the errors */
#define DIGEST_MEMBERS 3

/* Results of consecutive output rows. */
struct chunk {
    uint64_t first, count;
    uint64_t order[CHUNK_ROWS], hashes[CHUNK_ROWS];
    uint8_t *values, *scales;
};

struct errors {
    double largest, sum;
    uint64_t values;   /* number of values compared */
    uint64_t relative; /* number of these values that are not 0 before the conversion */
};

static double output_value(const struct ops *ops, float tensor_scale, const struct chunk *chunk, uint64_t k,
                           uint32_t i)
{
    enum ops_type to = ops->format.to;
    const uint8_t *values = chunk->values + k * ops_value_bytes(to, ops->format.columns);
    if (to == OPS_F32 || to == OPS_F16 || to == OPS_BF16)
        return (double)ops_value(values,
                                 to == OPS_F32   ? DTYPE_F32
                                 : to == OPS_F16 ? DTYPE_F16
                                                 : DTYPE_BF16,
                                 i);
    if (to == OPS_FP8)
        return (double)fp8_to_float(values[i]);
    uint8_t scale = chunk->scales[k * ops_scale_bytes(to, ops->format.columns) + i / ops_block(to)];
    double value = (double)fp4_to_float((uint8_t)(values[i / 2] >> 4 * (i % 2)));
    return to == OPS_MXFP4 ? value * ldexp(1, scale - 127)
                           : value * (double)fp8_to_float(scale) * (double)tensor_scale;
}

/* Adds the errors of the values that are finite before and after the conversion. */
static void add_errors(const struct ops *ops, float tensor_scale, const struct chunk *chunk,
                       struct errors *errors)
{
    for (uint64_t k = 0; k < chunk->count && errors->values < ERROR_VALUES; k++) {
        const uint8_t *row = ops_row(ops, chunk->order[k] - ops->first);
        for (uint32_t i = 0; i < ops->format.columns; i++) {
            double before = (double)ops_value(row, ops->format.from, i);
            double error = fabs(output_value(ops, tensor_scale, chunk, k, i) - before);
            if (!isfinite(error))
                continue;
            errors->values++;
            errors->largest = error > errors->largest ? error : errors->largest;
            errors->relative += before != 0;
            errors->sum += before != 0 ? error / fabs(before) : 0;
        }
    }
}

/* Returns the sum of one hash per row, over the row's number and results. The sums of several ranks therefore
 * add up to the sum of a single rank that has all rows, except with --sample and NVFP4. */
static uint64_t digest(const struct ops *ops, const struct chunk *chunk)
{
    size_t value_bytes = ops_array_bytes(ops, OPS_VALUES), scale_bytes = ops_array_bytes(ops, OPS_SCALES);
    uint64_t sum = 0;
    for (uint64_t k = 0; k < chunk->count; k++) {
        uint64_t members[DIGEST_MEMBERS] = {checksum_whole(chunk->values + k * value_bytes, value_bytes),
                                            checksum_whole(chunk->scales + k * scale_bytes, scale_bytes),
                                            ops->steps[OPS_HASH] ? chunk->hashes[k] : 0};
        sum += checksum_sample(chunk->order[k], members, DIGEST_MEMBERS);
    }
    return sum;
}

static enum status fetch_chunk(const struct ops *ops, const struct variant *variant, void *state,
                               struct chunk *chunk)
{
    void *const to[OPS_ARRAYS] = {NULL, chunk->order, chunk->values, chunk->scales, chunk->hashes};
    for (int array = OPS_ORDER; array < OPS_ARRAYS; array++) {
        struct ops_fetch fetch = {(enum ops_array)array, chunk->first, chunk->count, to[array], {0}};
        if (ops_array_bytes(ops, (enum ops_array)array))
            TRY(variant->fetch(state, &fetch));
    }
    for (uint64_t k = 0; !ops_array_bytes(ops, OPS_ORDER) && k < chunk->count; k++)
        chunk->order[k] = ops->first + chunk->first + k; /* run 0 does not rotate the rows */
    return STATUS_OK;
}

static enum status read_results(const struct ops *ops, const struct variant *variant, void *state,
                                struct chunk *chunk, struct row *row)
{
    struct ops_summary summary;
    struct errors errors = {0};
    uint64_t sum = 0;
    bool converts = ops->steps[OPS_CONVERT];
    TRY(summarize(variant, state, &summary));
    for (; chunk->first < summary.outputs; chunk->first += chunk->count) {
        uint64_t left = summary.outputs - chunk->first;
        chunk->count = left < CHUNK_ROWS ? left : CHUNK_ROWS;
        TRY(fetch_chunk(ops, variant, state, chunk));
        if (converts)
            add_errors(ops, summary.tensor_scale, chunk, &errors);
        sum += digest(ops, chunk);
    }
    row_hash(row, "digest", sum);
    if (converts && errors.values > 0)
        row_real(row, "error_max", errors.largest);
    if (converts && errors.relative > 0)
        row_real(row, "error_mean", errors.sum / (double)errors.relative);
    return STATUS_OK;
}

static enum status measure_results(const struct ops *ops, const struct variant *variant, void *state,
                                   struct row *row)
{
    FREED struct chunk *chunk = calloc(1, sizeof *chunk);
    FREED uint8_t *values = malloc(CHUNK_ROWS * ops_array_bytes(ops, OPS_VALUES) + 1);
    FREED uint8_t *scales = malloc(CHUNK_ROWS * ops_array_bytes(ops, OPS_SCALES) + 1);
    TRY(ALLOCATED(chunk && values && scales, "out of memory for the results"));
    chunk->values = values;
    chunk->scales = scales;
    return read_results(ops, variant, state, chunk, row);
}

enum status ops_measure(const void *input, const struct variant *variant, void *state, struct row *row)
{
    const struct ops_job *job = input;
    const struct ops *ops = &job->ops;
    TRY(measure_steps(ops, variant, state, row));
    TRY(measure_results(ops, variant, state, row));
    if (ops->steps[OPS_HASH]) {
        TRY(ops_oracle_hash(ops, job->oracle));
        row_count(row, "duplicate_rows", job->oracle->valid_count - job->oracle->distinct);
    }
    if (ops->count > 0)
        TRY(measure_stream(ops, variant, state, row));
    return ops_check_rows(ops);
}
