/* The input of `ops`: generated rows, or rows of files. */
#include <math.h>
#include <stdlib.h>

#include "core/dtype.h"
#include "core/parallel.h"
#include "core/philox.h"
#include "core/timer.h"
#include "machine/host.h"
#include "ops/ops.h"

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

enum status ops_rows_open(struct ops_job *job, const char *path, const char *tensor)
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

enum status ops_rows_take(struct ops_job *job, const struct partition *partition)
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

void ops_rows_free(struct ops_job *job)
{
    free(job->memory);
    free(job->parts);
    guard_close(&job->guard);
    embeddings_close(job->set);
}
