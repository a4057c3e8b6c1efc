/* The input of `ops`: generated rows, or rows of files. */
#include <stdlib.h>

#include "core/parallel.h"
#include "core/timer.h"
#include "machine/host.h"
#include "ops/ops_parts.h"
#ifdef _OPENMP
#include <omp.h>
#endif

#define TASK_ROWS  256
#define PAGE_BYTES 4096

const uint8_t *ops_span(const struct ops *ops, uint64_t position, uint64_t *count)
{
    size_t low = 0, high = ops->part_count; /* invariant: parts[low].first <= position < parts[high].first */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        *(ops->parts[middle].first <= position ? &low : &high) = middle;
    }
    uint64_t at = position - ops->parts[low].first;
    *count = ops->parts[low].count - at;
    return ops->parts[low].rows + at * ops->row_bytes;
}

enum status ops_check_rows(const struct ops *ops)
{
    if (!ops->set || !guard_filled())
        return STATUS_OK;
    TRY(embeddings_check_files(ops->set));
    return status_set(STATUS_FAILED, "a file of --data could not be read: input/output error");
}

static int threads(void)
{
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

/* ---- Generated rows ---- */

static void generate(void *context, uint64_t task, int thread)
{
    const struct ops_job *job = context;
    const struct ops *ops = &job->ops;
    (void)thread;
    for (uint64_t i = task * TASK_ROWS; i < (task + 1) * TASK_ROWS && i < ops->count; i++)
        input_fill(&job->generated, ops->first + i, job->memory + i * ops->row_bytes);
}

static enum status generate_rows(struct ops_job *job)
{
    struct ops *ops = &job->ops;
    uint64_t bytes = ops->count * ops->row_bytes;
    TRY(memory_check(bytes, "the rows", "lower --rows or --columns"));
    if (job->described)
        return STATUS_OK;
    job->memory = ops_allocate(bytes);
    TRY(ALLOCATED(job->memory, "out of memory for the rows; lower --rows or --columns"));
    parallel_for(threads(), (ops->count + TASK_ROWS - 1) / TASK_ROWS, generate, job);
    job->parts[0] = (struct ops_part){job->memory, 0, ops->count};
    ops->part_count = 1;
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

static enum status read_rows(struct ops_job *job)
{
    double begin_s = timer_now_s();
    list_parts(job);
    parallel_for(threads(), (job->ops.count + TASK_ROWS - 1) / TASK_ROWS, touch, &job->ops);
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
        return job->described ? STATUS_OK : read_rows(job);
    return generate_rows(job);
}

void ops_rows_free(struct ops_job *job)
{
    free(job->memory);
    free(job->parts);
    guard_close(&job->guard);
    embeddings_close(job->set);
}
