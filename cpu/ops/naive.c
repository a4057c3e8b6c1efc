/* The variant `ops-naive`: one thread, one row at a time, one pass over the data per step. */
#include <stdlib.h>
#include <string.h>

#include "core/timer.h"
#include "core/variant.h"
#include "data/checksum.h"
#include "machine/host.h"
#include "ops/job.h"

struct naive {
    const struct ops *ops;
    struct ops_results results;
    uint64_t shift; /* rotation of the rows in the current run */
};

static void naive_teardown(void *state)
{
    struct naive *naive = state;
    ops_results_free(&naive->results);
    free(naive);
}

static enum status naive_setup(const struct resources *resources, const void *input, void **state)
{
    struct naive *naive = *state = calloc(1, sizeof *naive);
    (void)resources;
    TRY(ALLOCATED(naive, "out of memory"));
    naive->ops = input;
    return ops_results_open(naive->ops, &naive->results);
}

/* Returns row i of the current run. */
static const uint8_t *row_at(const struct naive *naive, uint64_t i)
{
    return ops_row(naive->ops, ops_position(naive->ops, naive->shift, i));
}

FDSL_FMA_CLONES static bool row_valid(const struct ops *ops, const void *row)
{
    return ops_in_bounds(ops_square_sum(row, ops->format.from, ops->format.columns), ops->norm_min,
                         ops->norm_max);
}

static void mask(struct naive *naive)
{
    for (uint64_t i = 0; i < naive->ops->count; i++)
        naive->results.kept[i] = row_valid(naive->ops, row_at(naive, i));
}

/* Drops duplicates among the rows that the mask keeps, or among all rows if there is no mask. */
static void dedup(struct naive *naive)
{
    const struct ops *ops = naive->ops;
    struct ops_results *results = &naive->results;
    if (!ops->steps[OPS_MASK])
        memset(results->kept, 1, ops->count);
    for (uint64_t i = 0; i < ops->count; i++)
        if (results->kept[i])
            results->row_hashes[i] = checksum_whole(row_at(naive, i), ops->row_bytes);
    duplicates_drop(1, results->row_hashes, ops->count, results->kept, results->table);
}

/* Lists the kept rows. */
static void compact(struct naive *naive)
{
    struct ops_results *results = &naive->results;
    uint64_t kept = 0;
    for (uint64_t i = 0; i < naive->ops->count; i++)
        if (!results->kept || results->kept[i])
            results->rows[kept++] = i;
}

/* Returns the row of the current run from which output row j is computed. */
static uint64_t source_of(const struct naive *naive, const struct ops_draw *draw, uint64_t j)
{
    uint64_t at = draw ? ops_drawn(draw, j) : j;
    return naive->results.rows ? naive->results.rows[at] : at;
}

static void order(struct naive *naive, const struct ops_draw *draw)
{
    const struct ops *ops = naive->ops;
    for (uint64_t j = 0; j < naive->results.summary.outputs; j++)
        naive->results.order[j] = ops->first + ops_position(ops, naive->shift, source_of(naive, draw, j));
}

static const uint8_t *output_source(const struct naive *naive, const struct ops_draw *draw, uint64_t j)
{
    return row_at(naive, source_of(naive, draw, j));
}

static void convert(struct naive *naive, const struct ops_draw *draw)
{
    const struct ops *ops = naive->ops;
    struct ops_results *results = &naive->results;
    struct ops_format format = ops->format;
    size_t value_bytes = ops_value_bytes(format.to, format.columns);
    size_t scale_bytes = ops_scale_bytes(format.to, format.columns);
    if (format.to == OPS_NVFP4 && !ops->scaled) {
        uint32_t largest = 0;
        for (uint64_t j = 0; j < results->summary.outputs; j++)
            largest = ops_largest_finite(output_source(naive, draw, j), format.from, format.columns, largest);
        format.tensor_scale = nvfp4_tensor_scale(largest);
    }
    results->summary.tensor_scale = format.tensor_scale;
    for (uint64_t j = 0; j < results->summary.outputs; j++) {
        const uint8_t *row = output_source(naive, draw, j);
        ops_convert_row(&format, row, results->values + j * value_bytes,
                        scale_bytes ? results->scales + j * scale_bytes : NULL);
    }
}

static void hash(struct naive *naive, const struct ops_draw *draw)
{
    struct ops_results *results = &naive->results;
    for (uint64_t j = 0; j < results->summary.outputs; j++)
        results->hashes[j] = results->row_hashes
                                 ? results->row_hashes[source_of(naive, draw, j)]
                                 : checksum_whole(output_source(naive, draw, j), naive->ops->row_bytes);
}

/* Sets the time of a step to the time since `*begin_s`, and moves `*begin_s` to now. */
static void end_step(struct naive *naive, enum ops_step step, double *begin_s)
{
    double now_s = timer_now_s();
    naive->results.summary.step_s[step] = now_s - *begin_s;
    *begin_s = now_s;
}

/* Writes the values of the output rows in one step only: `convert` if there is one, else `permute`, else
 * `compact`. */
static enum status naive_run(void *state, uint64_t number, struct run_time *time)
{
    struct naive *naive = state;
    const struct ops *ops = naive->ops;
    struct ops_summary *summary = &naive->results.summary;
    struct ops_draw draw, *permuted = NULL;
    double begin_s = timer_now_s();
    (void)time;
    naive->shift = ops_shift(ops, number);
    if (ops->steps[OPS_MASK])
        mask(naive);
    end_step(naive, OPS_MASK, &begin_s);
    if (ops->steps[OPS_DEDUP])
        dedup(naive);
    end_step(naive, OPS_DEDUP, &begin_s);
    summary->kept = ops->count;
    for (uint64_t i = 0; naive->results.kept && i < ops->count; i++)
        summary->kept -= !naive->results.kept[i];
    summary->outputs = ops_outputs(ops, summary->kept);
    if (ops->steps[OPS_COMPACT])
        compact(naive);
    if (ops->steps[OPS_COMPACT] && !ops->steps[OPS_PERMUTE])
        order(naive, NULL);
    bool copies = naive->results.values && !ops->steps[OPS_CONVERT];
    if (copies && !ops->steps[OPS_PERMUTE])
        convert(naive, NULL);
    end_step(naive, OPS_COMPACT, &begin_s);
    if (ops->steps[OPS_PERMUTE]) {
        draw = ops_draw(ops, number, summary->kept);
        permuted = &draw;
        order(naive, permuted);
        if (copies)
            convert(naive, permuted);
    }
    end_step(naive, OPS_PERMUTE, &begin_s);
    if (ops->steps[OPS_CONVERT])
        convert(naive, permuted);
    end_step(naive, OPS_CONVERT, &begin_s);
    if (ops->steps[OPS_HASH])
        hash(naive, permuted);
    end_step(naive, OPS_HASH, &begin_s);
    summary->number = number;
    return ops_check_rows(ops);
}

static enum status naive_fetch(void *state, void *result)
{
    const struct naive *naive = state;
    return ops_results_fetch(naive->ops, &naive->results, result);
}

static enum status naive_stream(void *state, double *bytes_per_s)
{
    const struct ops *ops = ((const struct naive *)state)->ops;
    return stream_triad(1, ops->count * ops->row_bytes, bytes_per_s);
}

static const struct ops_traits traits = {.stream = naive_stream};

const struct variant variant_ops_naive = {
    .platform = "cpu",
    .instruction_set = isa_scalar_name,
    .traits = &traits,
    .setup = naive_setup,
    .run = naive_run,
    .fetch = naive_fetch,
    .teardown = naive_teardown,
};
