/* The workload `ops`: its input (generated rows, or rows of files), options, verification and columns.
 * docs/ops.md describes it. */
#include "ops/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/parallel.h"
#include "core/philox.h"
#include "core/stats.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/checksum.h"
#include "machine/host.h"

#define TASK_ROWS  256
#define PAGE_BYTES 4096

/* ---- Generated rows ---- */

/* The last word of the Philox counter. Streams with different last words are independent. */
enum { STREAM_VALUES = 0x76616c73, STREAM_COLUMN = 0x636f6c73, STREAM_SOURCE = 0x64757073 };

enum { SOURCE_DRAWS = 64 };
enum kind { TOO_SMALL, TOO_LARGE, WITH_NAN, WITH_INFINITY, ZERO, KINDS };

static uint64_t fixed_share(double share)
{
    return (uint64_t)(share * 0x1p32 + 0.5);
}

struct generated_rows generated_begin(uint64_t seed, uint32_t columns, enum dtype dtype, double bad,
                                      double duplicates)
{
    return (struct generated_rows){seed, columns, dtype, fixed_share(bad), fixed_share(duplicates)};
}

/* If rows are chosen at equal distances, and `share` is the chosen share of all rows in units of 2^-32,
 * returns how many of the rows 0 to row - 1 are chosen. */
static uint64_t chosen_before(uint64_t share, uint64_t row)
{
    return row * share >> 32;
}

bool generated_is_bad(const struct generated_rows *rows, uint64_t row)
{
    return chosen_before(rows->bad, row + 1) > chosen_before(rows->bad, row);
}

/* Bad rows are not duplicates, so that the share of bad rows is exact. */
static bool wants_source(const struct generated_rows *rows, uint64_t row)
{
    return chosen_before(rows->duplicates, row + 1) > chosen_before(rows->duplicates, row) &&
           !generated_is_bad(rows, row);
}

/* Draws earlier rows until one is neither bad nor a duplicate. If none of SOURCE_DRAWS draws finds such a
 * row, `row` is not a duplicate. */
uint64_t generated_source(const struct generated_rows *rows, uint64_t row)
{
    if (row == 0 || !wants_source(rows, row))
        return row;
    for (uint32_t draw = 0; draw < SOURCE_DRAWS; draw++) {
        struct philox_block block =
            philox(philox_key(rows->seed), draw, (uint32_t)row, (uint32_t)(row >> 32), STREAM_SOURCE);
        uint64_t source = philox_below(block.word[0], (uint32_t)row);
        if (!generated_is_bad(rows, source) && !wants_source(rows, source))
            return source;
    }
    return row;
}

static void store(const struct generated_rows *rows, void *values, uint32_t column, float value)
{
    if (rows->dtype == DTYPE_F32)
        ((float *)values)[column] = value;
    else
        ((uint16_t *)values)[column] =
            rows->dtype == DTYPE_F16 ? half_from_float(value) : bf16_from_float(value);
}

/* Writes uniform values with a variance of 1 / columns, times `scale`, so the norm is near `scale`. In
 * each row, the magnitude of one value is drawn from the upper half of the range, so that the norm of a row
 * with few columns is not too small by chance. */
static void fill_values(const struct generated_rows *rows, uint64_t row, float scale, void *values)
{
    float largest = scale * (float)sqrt(3.0 / rows->columns);
    uint32_t raised = (uint32_t)(row % rows->columns);
    for (uint32_t first = 0; first < rows->columns; first += 4) {
        struct philox_block block =
            philox(philox_key(rows->seed), first / 4, (uint32_t)row, (uint32_t)(row >> 32), STREAM_VALUES);
        for (uint32_t i = 0; i < 4 && first + i < rows->columns; i++) {
            float value = 2 * philox_unit(block.word[i]) - 1;
            if (first + i == raised)
                value = copysignf(0.5f + 0.5f * fabsf(value), value);
            store(rows, values, first + i, value * largest);
        }
    }
}

void generated_fill(const struct generated_rows *rows, uint64_t row, void *values)
{
    uint64_t source = generated_source(rows, row);
    enum kind kind = (enum kind)(chosen_before(rows->bad, source) % KINDS);
    if (!generated_is_bad(rows, source)) {
        fill_values(rows, source, 1, values);
        return;
    }
    fill_values(rows, source,
                kind == TOO_SMALL   ? 1e-3f
                : kind == TOO_LARGE ? 1e3f
                : kind == ZERO      ? 0
                                    : 1,
                values);
    if (kind == WITH_NAN || kind == WITH_INFINITY) {
        struct philox_block block =
            philox(philox_key(rows->seed), 0, (uint32_t)source, (uint32_t)(source >> 32), STREAM_COLUMN);
        store(rows, values, philox_below(block.word[0], rows->columns),
              kind == WITH_NAN    ? NAN
              : block.word[1] & 1 ? INFINITY
                                  : -INFINITY);
    }
}

static void generate(void *context, uint64_t task, int thread)
{
    const struct ops_job *job = context;
    const struct ops *ops = &job->ops;
    (void)thread;
    for (uint64_t i = task * TASK_ROWS; i < (task + 1) * TASK_ROWS && i < ops->count; i++)
        generated_fill(&job->generated, ops->first + i, job->memory + i * ops->row_bytes);
}

/* Allocates memory for this rank's rows, which are then one part. `remedy` is for a machine without enough
 * memory, `advice` for memory that runs out. */
static enum status allocate_rows(struct ops_job *job, const char *what, const char *remedy,
                                 const char *advice)
{
    struct ops *ops = &job->ops;
    uint64_t bytes = ops->count * ops->row_bytes;
    TRY(memory_check(bytes, what, remedy));
    if (job->described)
        return STATUS_OK;
    job->memory = ops_allocate(bytes);
    TRY(ALLOCATED(job->memory, "out of memory for %s; %s", what, advice));
    job->parts[0] = (struct ops_part){job->memory, 0, ops->count};
    ops->part_count = 1;
    return STATUS_OK;
}

static enum status generate_rows(struct ops_job *job)
{
    TRY(allocate_rows(job, "the rows", "lower --rows or --dim", "lower --rows or --dim"));
    if (!job->described)
        parallel_for(parallel_threads(), (job->ops.count + TASK_ROWS - 1) / TASK_ROWS, generate, job);
    return STATUS_OK;
}

/* ---- Rows of files ---- */

/* Opens the files of --data and sets job->set. `tensor` is the value of --tensor, or "". Returns the errors
 * of guard_open() and embeddings_open(). */
static enum status ops_rows_open(struct ops_job *job, const char *path, const char *tensor)
{
    double begin_s = timer_now_s();
    TRY(guard_open(&job->guard));
    guard_fill(&job->guard);
    TRY(embeddings_open(path, tensor, &job->set));
    job->load_s = timer_now_s() - begin_s;
    return STATUS_OK;
}

/* Lists the parts of the set that contain this rank's rows. */
static void list_parts(struct ops_job *job)
{
    struct ops *ops = &job->ops;
    ops->part_count = 0;
    for (size_t i = 0; i < job->set->part_count; i++) {
        const struct embeddings_part *part = &job->set->parts[i];
        uint64_t begin = part->first > ops->first ? part->first : ops->first;
        uint64_t end = part->first + part->rows, last = ops->first + ops->count;
        end = end < last ? end : last;
        if (begin < end)
            job->parts[ops->part_count++] = (struct ops_part){
                part->values + (begin - part->first) * ops->row_bytes, begin - ops->first, end - begin};
    }
}

/* Reads at least one byte of each page, so that the page cache has all rows. */
static void touch(void *context, uint64_t task, int thread)
{
    const struct ops *ops = context;
    (void)thread;
    for (uint64_t i = task * TASK_ROWS; i < (task + 1) * TASK_ROWS && i < ops->count; i++) {
        const uint8_t *row = ops_row(ops, i);
        for (size_t at = 0; at < ops->row_bytes; at += PAGE_BYTES)
            (void)*(const volatile uint8_t *)(row + at);
        (void)*(const volatile uint8_t *)(row + ops->row_bytes - 1);
    }
}

static void decode(void *context, uint64_t task, int thread)
{
    const struct ops_job *job = context;
    const struct ops *ops = &job->ops;
    (void)thread;
    for (uint64_t i = task * TASK_ROWS; i < (task + 1) * TASK_ROWS && i < ops->count; i++)
        embeddings_decode(job->set, ops->first + i, job->memory + i * ops->row_bytes);
}

/* Reads the rows into the page cache, or decodes them into memory. */
static enum status read_rows(struct ops_job *job)
{
    double begin_s = timer_now_s();
    bool in_place = embeddings_in_place(job->set);
    if (!in_place)
        TRY(allocate_rows(job, "the decoded rows", "use fewer files, or more ranks on more machines",
                          "use fewer files"));
    if (job->described)
        return STATUS_OK;
    if (in_place)
        list_parts(job);
    uint64_t tasks = (job->ops.count + TASK_ROWS - 1) / TASK_ROWS;
    if (in_place)
        parallel_for(parallel_threads(), tasks, touch, &job->ops);
    else
        parallel_for(parallel_threads(), tasks, decode, job);
    job->load_s += timer_now_s() - begin_s;
    return ops_check_rows(&job->ops);
}

/* ---- Taking and freeing rows ---- */

/* Generates this rank's rows, or reads its rows of the files into the page cache, or decodes them into
 * memory, unless job->described is set. Replaces the rows of an earlier call. Then sets job->ops.first, count
 * and parts. STATUS_TOO_LARGE if the available memory is too small. STATUS_EXHAUSTED if an allocation fails,
 * STATUS_FAILED if a file cannot be read. */
static enum status ops_rows_take(struct ops_job *job, const struct partition *partition)
{
    struct share share = partition_share(partition, job->rows);
    free(job->memory);
    free(job->parts);
    job->memory = NULL;
    job->ops.first = share.first;
    job->ops.count = share.count;
    job->ops.parts = job->parts = calloc(job->set ? job->set->part_count + 1 : 1, sizeof *job->parts);
    TRY(ALLOCATED(job->parts, "out of memory for the list of rows"));
    if (job->set)
        return read_rows(job);
    return generate_rows(job);
}

static void ops_rows_free(struct ops_job *job)
{
    free(job->memory);
    free(job->parts);
    guard_close(&job->guard);
    embeddings_close(job->set);
}

/* ---- Columns, in addition to those that every workload has ---- */

/* The names of the steps, indexed by enum ops_step; --steps does not accept "dedup". */
static const char *const ops_step_names[OPS_STEPS] = {"mask",    "dedup",   "compact",
                                                      "permute", "convert", "hash"};

/* The workload's columns, and the functions of struct workload that fill them. */
static const struct column ops_columns[] = {
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

static enum status ops_observe(const void *input, const struct variant *variant, void *state, struct row *row)
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

static enum status ops_measure(const void *input, const struct variant *variant, void *state, struct row *row)
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

/* ---- Options ---- */

#define COLUMNS_MAX 65536

struct ops_parameters {
    uint64_t rows, columns, seed, sample, ring, chunk, gpu_memory_limit;
    double bad, duplicates, norm_min, norm_max;
    int dtype, to, fp8, async, pool;
    bool dedup, resident;
    const char *steps, *data, *tensor;
};

/* The choices of --dtype. After NULL follow types that only files have, which the column `dtype` shows. The
 * order is that of enum embeddings_type, with one more entry. */
static const char *const types[] = {"f32", "f16", "bf16", NULL, "f64", "fp8", "nvfp4", "mxfp4"};
static const enum dtype type_values[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
const char *const ops_type_names[] = {"f32", "f16", "bf16", "fp8", "nvfp4", "mxfp4", NULL};
const char *const ops_fp8_modes[] = {"saturate", "nan", NULL};
static const char *const switches[] = {"on", "off", NULL};

#define AT(field) offsetof(struct ops_parameters, field)
static const struct option_spec options[] = {
    {"data", "PATH", OPTION_TEXT, AT(data), .column = COLUMN,
     .help = "read the rows from files: .npy, .npz, .safetensors, .pt, .pth or .pth.tar, a folder with such "
             "files, a pattern, or several of these separated by commas; the default is a generated set"},
    {"tensor", "NAME", OPTION_TEXT, AT(tensor), .column = COLUMN,
     .help = "tensor to read from each file of --data, or a pattern; by default, all floating-point tensors "
             "with two axes, or if a file has none, those with one axis, each as one row"},
    {"rows", "N", OPTION_COUNT, AT(rows), .fallback = "65536", .maximum = INPUT_ROWS_MAX, .column = COLUMN,
     .help = "rows of the generated set"},
    {"dim", "N", OPTION_COUNT, AT(columns), .fallback = "768", .minimum = 1, .maximum = COLUMNS_MAX,
     .column = COLUMN, .help = "values per row"},
    {"dtype", "TYPE", OPTION_CHOICE, AT(dtype), .fallback = "f32", .choices = types, .column = COLUMN,
     .help = "element type of the generated rows"},
    {"bad", "SHARE", OPTION_REAL, AT(bad), .fallback = "0.05", .maximum = 1, .column = COLUMN,
     .help = "share of bad rows among the generated rows. There are five kinds of bad rows, in turn: norm "
             "too small, norm too large, one NaN, one infinity, all zeros"},
    {"duplicates", "SHARE", OPTION_REAL, AT(duplicates), .fallback = "0", .maximum = 1, .column = COLUMN,
     .help = "share of the generated rows that are copies of earlier rows"},
    {"seed", "N", OPTION_COUNT, AT(seed), .fallback = "0", .maximum = 18446744073709551615.0,
     .column = COLUMN, .help = "seed of the generated rows and of the permutation"},
    {"steps", "LIST", OPTION_TEXT, AT(steps), .fallback = "mask,compact,convert,hash", .column = COLUMN,
     .help = "the steps, in this order: mask (validates norms), compact (keeps valid rows), permute "
             "(reorders rows at random), convert (to the type --to), hash (XXH3-64 of each row)"},
    {"norm-min", "X", OPTION_REAL, AT(norm_min), .fallback = "0.1", .maximum = OPS_NORM_MOST,
     .column = COLUMN, .help = "smallest valid norm: 0, or at least 1e-15"},
    {"norm-max", "X", OPTION_REAL, AT(norm_max), .fallback = "100", .minimum = OPS_NORM_LEAST,
     .maximum = OPS_NORM_MOST, .column = COLUMN, .help = "largest valid norm"},
    {"to", "TYPE", OPTION_CHOICE, AT(to), .fallback = "f16", .choices = ops_type_names, .column = COLUMN,
     .help = "type that rows are converted to. nvfp4 has one scale per 16 values, mxfp4 one per 32. TYPE is "
             "one of"},
    {"fp8", "MODE", OPTION_CHOICE, AT(fp8), .fallback = "saturate", .choices = ops_fp8_modes,
     .column = COLUMN,
     .help = "result for magnitudes that are too large for fp8: 448 (saturate) or NaN (nan). MODE is one of"},
    {"dedup", NULL, OPTION_FLAG, AT(dedup), .column = COLUMN,
     .help = "drop rows whose hash equals that of an earlier row; needs the steps compact and hash"},
    {"sample", "K", OPTION_COUNT, AT(sample), .minimum = 1, .maximum = INPUT_ROWS_MAX, .column = COLUMN,
     .help = "copy only a random batch of K rows per run: the next K rows of the permutation, which must "
             "have at least K; needs the step permute"},
    {"resident", NULL, OPTION_FLAG, AT(resident), .column = COLUMN,
     .help = "GPU variants: copy the set to GPU memory once, before the timing"},
    {"ring", "N", OPTION_COUNT, AT(ring), .fallback = "4", .minimum = 2, .maximum = 64, .column = COLUMN,
     .help = "GPU variants without --resident: chunks of rows in flight"},
    {"chunk", "KIB", OPTION_COUNT, AT(chunk), .fallback = "16384", .minimum = 4, .maximum = 1 << 20,
     .column = COLUMN, .help = "GPU variants without --resident: size of a chunk"},
    {"async", "MODE", OPTION_CHOICE, AT(async), .fallback = "on", .choices = switches, .column = COLUMN,
     .help = "GPU variants without --resident: with on, different chunks are filled, copied and processed at "
             "the same time; with off, each of these operations waits for the previous one. MODE is one of"},
    {"pool", "MODE", OPTION_CHOICE, AT(pool), .fallback = "on", .choices = switches, .column = COLUMN,
     .help = "GPU variants: allocate memory for the results of a run from a stream-ordered pool (on) or with "
             "cudaMalloc (off). MODE is one of"},
    {"gpu-memory-limit", "BYTES", OPTION_BYTES, AT(gpu_memory_limit), .minimum = 1,
     .maximum = 18446744073709551615.0, .column = COLUMN,
     .help = "GPU variants: largest amount of GPU memory for rows and results (default: all free memory)"},
};

static const struct option_section sections[] = {
    {"data", "data"},
    {"steps", "steps"},
    {"variants on a GPU", "resident"},
    {NULL, NULL},
};

static const char *const shown[] = {"rows_kept", "stream_share", NULL};
static const char *const baselines[] = {"ops-naive", NULL};

/* ---- Opening the input ---- */

static enum status read_steps(const char *text, bool steps[OPS_STEPS])
{
    int latest = -1;
    for (const char *name = text;;) {
        size_t length = strcspn(name, ",");
        int step = 0;
        while (step < OPS_STEPS && (step == OPS_DEDUP || strlen(ops_step_names[step]) != length ||
                                    memcmp(ops_step_names[step], name, length) != 0))
            step++;
        if (step == OPS_STEPS)
            return status_set(STATUS_USAGE,
                              "--steps: '%.*s' is not a step; the steps are mask, compact, permute, convert "
                              "and hash",
                              (int)length, name);
        if (step <= latest)
            return status_set(
                STATUS_USAGE,
                "--steps %s: name each step once, in the order mask, compact, permute, convert, hash", text);
        steps[latest = step] = true;
        if (!name[length])
            return STATUS_OK;
        name += length + 1;
    }
}

/* Rejects options that have no effect with these steps, so that no option is silently ignored. */
static enum status check_steps(const struct options *given, const struct ops_parameters *parameters,
                               const bool steps[OPS_STEPS])
{
    static const struct {
        const char *option;
        enum ops_step step;
    } needs[] = {{"norm-min", OPS_MASK}, {"norm-max", OPS_MASK}, {"to", OPS_CONVERT},    {"fp8", OPS_CONVERT},
                 {"dedup", OPS_COMPACT}, {"dedup", OPS_HASH},    {"sample", OPS_PERMUTE}};
    for (size_t i = 0; i < COUNT_OF(needs); i++)
        if (options_given(given, needs[i].option) && !steps[needs[i].step])
            return status_option(STATUS_USAGE, needs[i].option,
                                 " has an effect only with the step %s; add it to --steps",
                                 ops_step_names[needs[i].step]);
    if (options_given(given, "fp8") && parameters->to != OPS_FP8)
        return status_option(STATUS_USAGE, "fp8", " has an effect only with --to fp8; add it, or drop --fp8");
    return STATUS_OK;
}

enum status ops_check_bounds(double norm_min, double norm_max)
{
    if (norm_min > 0 && norm_min < OPS_NORM_LEAST)
        return status_number(STATUS_USAGE, "norm-min", norm_min,
                             ": use 0 or at least %g; the square of a smaller norm is too small for a float",
                             OPS_NORM_LEAST);
    if (norm_min > norm_max)
        return status_number(STATUS_USAGE, "norm-min", norm_min,
                             " is larger than --norm-max %g; change one of them", norm_max);
    return STATUS_OK;
}

/* Returns the number of rows that the mask and --dedup keep. */
static uint64_t count_kept(const struct ops_job *job)
{
    return job->ops.steps[OPS_DEDUP] ? job->oracle->distinct : job->oracle->valid_count;
}

/* A batch cannot have more rows than the permutation. */
static enum status check_sample(const struct ops_job *job)
{
    const struct ops *ops = &job->ops;
    uint64_t rows = ops->steps[OPS_COMPACT] ? count_kept(job) : ops->count;
    if (ops->sample <= rows)
        return STATUS_OK;
    return status_number(STATUS_USAGE, "sample", (double)ops->sample,
                         ": only %llu of %llu rows can be drawn%s; lower --sample", (unsigned long long)rows,
                         (unsigned long long)ops->count, ops->count < job->rows ? " on this rank" : "");
}

static enum status take_rows(struct ops_job *job, const struct partition *partition)
{
    ops_oracle_free(job->oracle);
    TRY(ops_rows_take(job, partition));
    if (job->described)
        return check_sample(job);
    TRY(ops_oracle_open(&job->ops, job->oracle));
    TRY(job->ops.steps[OPS_DEDUP] ? ops_oracle_hash(&job->ops, job->oracle) : STATUS_OK);
    TRY(ops_check_rows(&job->ops));
    return check_sample(job);
}

static enum status ops_repartition(void *input, void *parameters, const struct partition *partition)
{
    (void)parameters;
    return take_rows(input, partition);
}

static void ops_close(void *input)
{
    struct ops_job *job = input;
    if (job->oracle)
        ops_oracle_free(job->oracle);
    free(job->oracle);
    ops_rows_free(job);
    free(job);
}

/* Hashes the first and the last row of each tensor, because the files that ranks read may differ. */
static uint64_t ops_identity(const void *input)
{
    return ((const struct ops_job *)input)->hash;
}

/* Rejects options for generated rows if --data is given, and --tensor if it is not. */
static enum status check_data(const struct options *given, const struct ops_parameters *parameters,
                              const bool steps[OPS_STEPS])
{
    static const char *const generated[] = {"rows", "dim", "dtype", "bad", "duplicates"};
    for (size_t i = 0; parameters->data && i < COUNT_OF(generated); i++)
        if (options_given(given, generated[i]))
            return status_option(
                STATUS_USAGE, generated[i],
                " describes generated rows, and --data reads rows from files; drop one of them");
    if (parameters->tensor && !parameters->data)
        return status_set(STATUS_USAGE,
                          "--tensor has an effect only with --data; add --data PATH, or drop --tensor");
    if (parameters->data && options_given(given, "seed") && !steps[OPS_PERMUTE])
        return status_option(STATUS_USAGE, "seed", " is for generated rows and the step permute; drop it");
    return STATUS_OK;
}

/* With --data: sets --rows, --dim and --dtype to those of the files, so that CSV rows show them. */
static void describe_set(const struct embeddings *set, struct ops_parameters *parameters)
{
    parameters->rows = set->rows;
    parameters->columns = set->columns;
    parameters->dtype = (int)set->stored + (set->stored >= EMBEDDINGS_F64);
}

static void fill_ops(const struct ops_parameters *parameters, struct ops_job *job)
{
    struct ops *ops = &job->ops;
    enum dtype type = job->set ? job->set->dtype : type_values[parameters->dtype];
    uint32_t columns = (uint32_t)parameters->columns;
    ops->steps[OPS_DEDUP] = parameters->dedup;
    ops->format = (struct ops_format){
        .from = type,
        .to = ops->steps[OPS_CONVERT] ? (enum ops_type)parameters->to : ops_stored_type(type),
        .columns = columns,
        .saturate = parameters->fp8 == 0,
    };
    ops->norm_min = (float)parameters->norm_min;
    ops->norm_max = (float)parameters->norm_max;
    ops->sample = parameters->sample;
    ops->seed = parameters->seed;
    ops->row_bytes = columns * dtype_bytes(type);
    ops->control = &job->control;
    ops->set = job->set;
    job->rows = parameters->rows;
    ops->resident = parameters->resident;
    ops->async = parameters->async == 0;
    ops->pool = parameters->pool == 0;
    ops->ring = (uint32_t)parameters->ring;
    ops->chunk_bytes = parameters->chunk << 10;
    ops->memory_limit = parameters->gpu_memory_limit;
    job->generated =
        generated_begin(parameters->seed, columns, type, parameters->bad, parameters->duplicates);
}

static enum status ops_open(const struct options *given, void *parameters_, const struct partition *partition,
                            void **input)
{
    struct ops_parameters *parameters = parameters_;
#ifndef HAVE_XXHASH
    return status_set(STATUS_UNAVAILABLE, "not built: this build has no xxHash");
#endif
    struct ops_job *job = *input = calloc(1, sizeof *job);
    TRY(ALLOCATED(job && (job->oracle = calloc(1, sizeof *job->oracle)), "out of memory"));
    TRY(read_steps(parameters->steps, job->ops.steps));
    TRY(check_steps(given, parameters, job->ops.steps));
    TRY(ops_check_bounds(parameters->norm_min, parameters->norm_max));
    if (parameters->dedup && partition->ranks > 1)
        return status_set(STATUS_USAGE, "--dedup compares all rows with each other and needs a single rank; "
                                        "use one rank with more --threads");
    TRY(check_data(given, parameters, job->ops.steps));
    if (parameters->data) {
        TRY(ops_rows_open(job, parameters->data, parameters->tensor ? parameters->tensor : ""));
        describe_set(job->set, parameters);
        if (partition->ranks > 1)
            TRY(embedding_hash(job->set, NULL, &job->hash));
    }
    fill_ops(parameters, job);
    /* --sample can be checked without the rows, unless it draws from the rows that are kept. */
    job->described = options_flag(given, "dry-run") && !(job->ops.sample && job->ops.steps[OPS_COMPACT]);
    return take_rows(job, partition);
}

static bool ops_applies(const void *parameters_, const struct variant *variant, const char *option)
{
    static const char *const device_options[] = {"resident", "ring", "chunk",
                                                 "async",    "pool", "gpu-memory-limit"};
    const struct ops_parameters *parameters = parameters_;
    const struct ops_traits *traits = variant ? variant->traits : NULL;
    bool steps[OPS_STEPS] = {false};
    for (size_t i = 0; i < COUNT_OF(device_options); i++)
        if (strcmp(option, device_options[i]) == 0)
            return (!variant || (traits && traits->device)) && (i == 0 || i > 3 || !parameters->resident) &&
                   (i < 5 || parameters->gpu_memory_limit);
    if (read_steps(parameters->steps, steps) != STATUS_OK)
        return true;
    if (strcmp(option, "tensor") == 0)
        return parameters->tensor != NULL;
    if (strcmp(option, "data") == 0)
        return parameters->data != NULL;
    if (parameters->data && (strcmp(option, "bad") == 0 || strcmp(option, "duplicates") == 0))
        return false;
    if (strcmp(option, "seed") == 0)
        return !parameters->data || steps[OPS_PERMUTE];
    if (strcmp(option, "norm-min") == 0 || strcmp(option, "norm-max") == 0)
        return steps[OPS_MASK];
    if (strcmp(option, "fp8") == 0)
        return steps[OPS_CONVERT] && parameters->to == OPS_FP8;
    if (strcmp(option, "to") == 0)
        return steps[OPS_CONVERT];
    return strcmp(option, "sample") != 0 || parameters->sample > 0;
}

/* ---- Work and verification ---- */

static struct work ops_work(const void *input, const struct variant *variant)
{
    const struct ops_job *job = input;
    const struct ops *ops = &job->ops;
    double bytes = ops_least_bytes(ops, count_kept(job));
    (void)variant;
    return (struct work){.items = (double)ops->count, .bytes = bytes, .least.once_bytes = bytes};
}

static enum status ops_verify(const void *input, const struct variant *variant, void *state, uint64_t number,
                              uint64_t *wrong)
{
    const struct ops_job *job = input;
    TRY(ops_oracle_verify(&job->ops, job->oracle, variant, state, number, wrong));
    return ops_check_rows(&job->ops);
}

const struct workload workload_ops = {
    .name = "ops",
    .schema = "ops/2",
    .summary = "validates, filters, samples, converts and hashes sets of embeddings",
    .item = "rows",
    .options = options,
    .option_count = COUNT_OF(options),
    .option_sections = sections,
    .parameters_bytes = sizeof(struct ops_parameters),
    .columns = ops_columns,
    .shown = shown,
    .baselines = baselines,
    .ranks.share_items = true,
    .ranks.identity = ops_identity,
    .open = ops_open,
    .close = ops_close,
    .repartition = ops_repartition,
    .applies = ops_applies,
    .work = ops_work,
    .verify = ops_verify,
    .observe = ops_observe,
    .measure = ops_measure,
};
