#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

#include "data/checksum.h"

/* ---- Properties of the rows ---- */

void ops_oracle_free(struct ops_oracle *oracle)
{
    free(oracle->valid);
    free(oracle->hashes);
    free(oracle->by_hash);
    *oracle = (struct ops_oracle){0};
}

FDSL_FMA_CLONES static bool row_valid(const struct ops *ops, uint64_t position)
{
    const uint8_t *row = ops_row(ops, position);
    return !ops->steps[OPS_MASK] || ops_in_bounds(ops_square_sum(row, ops->format.from, ops->format.columns),
                                                  ops->norm_min, ops->norm_max);
}

enum status ops_oracle_open(const struct ops *ops, struct ops_oracle *oracle)
{
    uint64_t valid = 0;
    oracle->valid = malloc(ops->count + 1);
    TRY(ALLOCATED(oracle->valid, "out of memory for the mask of the rows"));
#pragma omp parallel for reduction(+ : valid)
    for (uint64_t i = 0; i < ops->count; i++)
        valid += oracle->valid[i] = row_valid(ops, i);
    oracle->valid_count = valid;
    return STATUS_OK;
}

static int by_hash_and_position(const void *a, const void *b, void *hashes)
{
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    uint64_t left_hash = ((const uint64_t *)hashes)[left], right_hash = ((const uint64_t *)hashes)[right];
    return left_hash != right_hash ? (left_hash > right_hash) - (left_hash < right_hash)
                                   : (left > right) - (left < right);
}

/* Returns the end of the group of equal hashes that begins at by_hash[begin]. */
static uint64_t group_end(const struct ops_oracle *oracle, uint64_t begin)
{
    uint64_t end = begin + 1, hash = oracle->hashes[oracle->by_hash[begin]];
    while (end < oracle->valid_count && oracle->hashes[oracle->by_hash[end]] == hash)
        end++;
    return end;
}

enum status ops_oracle_hash(const struct ops *ops, struct ops_oracle *oracle)
{
    uint64_t listed = 0;
    if (oracle->hashes)
        return STATUS_OK;
    oracle->hashes = malloc((ops->count + 1) * sizeof *oracle->hashes);
    oracle->by_hash = malloc((ops->count + 1) * sizeof *oracle->by_hash);
    TRY(ALLOCATED(oracle->hashes && oracle->by_hash, "out of memory for the hashes of the rows"));
#pragma omp parallel for
    for (uint64_t i = 0; i < ops->count; i++)
        oracle->hashes[i] = checksum_whole(ops_row(ops, i), ops->row_bytes);
    for (uint64_t i = 0; i < ops->count; i++)
        if (oracle->valid[i])
            oracle->by_hash[listed++] = i;
    qsort_r(oracle->by_hash, listed, sizeof *oracle->by_hash, by_hash_and_position, oracle->hashes);
    oracle->distinct = 0;
    for (uint64_t i = 0; i < listed; i = group_end(oracle, i))
        oracle->distinct++;
    return STATUS_OK;
}

/* ---- Expected results of a run ---- */

struct expected {
    const struct ops *ops;
    const struct ops_oracle *oracle;
    uint64_t shift;
    uint8_t *kept;  /* indexed by row of the run */
    uint64_t *rows; /* with compaction: the kept rows of the run, in order */
    struct ops_draw draw;
    struct ops_format format;
    uint64_t kept_count, outputs;
    uint8_t *wrong; /* indexed by row of the run */
};

/* Converts a position within this rank's rows to the row number within the run. */
static uint64_t row_of(const struct expected *expected, uint64_t position)
{
    return ops_position(expected->ops, (expected->ops->count - expected->shift) % expected->ops->count,
                        position);
}

/* For each group of equal hashes, keeps only the row that the run processes first. The run begins at position
 * `shift` and wraps around. This row is therefore the group's first row at or after `shift`, or the group's
 * first row if all are before `shift`. */
static void drop_duplicates(const struct expected *expected)
{
    const struct ops_oracle *oracle = expected->oracle;
    for (uint64_t begin = 0, end; begin < oracle->valid_count; begin = end) {
        uint64_t first = begin;
        end = group_end(oracle, begin);
        for (uint64_t i = end; i-- > begin;)
            if (oracle->by_hash[i] >= expected->shift)
                first = i;
        for (uint64_t i = begin; i < end; i++)
            expected->kept[row_of(expected, oracle->by_hash[i])] = i == first;
    }
}

/* Returns the row of the run from which output row j is computed. */
static uint64_t source_of(const struct expected *expected, uint64_t j)
{
    uint64_t at = expected->ops->steps[OPS_PERMUTE] ? ops_drawn(&expected->draw, j) : j;
    return expected->rows ? expected->rows[at] : at;
}

static const uint8_t *output_source(const struct expected *expected, uint64_t j)
{
    const struct ops *ops = expected->ops;
    return ops_row(ops, ops_position(ops, expected->shift, source_of(expected, j)));
}

static void expect_tensor_scale(struct expected *expected)
{
    uint32_t largest = 0;
    if (expected->format.to != OPS_NVFP4)
        return;
#pragma omp parallel for reduction(max : largest)
    for (uint64_t j = 0; j < expected->outputs; j++)
        largest = ops_largest_finite(output_source(expected, j), expected->format.from,
                                     expected->format.columns, largest);
    expected->format.tensor_scale = nvfp4_tensor_scale(largest);
}

static void expect_free(struct expected *expected)
{
    free(expected->kept);
    free(expected->rows);
    free(expected->wrong);
}

/* Computes the expected results of run `number`. The caller frees `expected`, even after a failure. */
static enum status expect(const struct ops *ops, struct ops_oracle *oracle, uint64_t number,
                          struct expected *expected)
{
    uint64_t kept = 0;
    *expected = (struct expected){.ops = ops,
                                  .oracle = oracle,
                                  .shift = ops_shift(ops, number),
                                  .kept = malloc(ops->count + 1),
                                  .wrong = calloc(ops->count + 1, 1),
                                  .format = ops->format};
    if (ops->steps[OPS_COMPACT])
        expected->rows = malloc((ops->count + 1) * sizeof *expected->rows);
    if (!expected->kept || !expected->wrong || (ops->steps[OPS_COMPACT] && !expected->rows))
        return status_set(STATUS_EXHAUSTED, "out of memory to verify");
    if (ops->steps[OPS_DEDUP] || ops->steps[OPS_HASH])
        TRY(ops_oracle_hash(ops, oracle));
    for (uint64_t i = 0; i < ops->count; i++)
        expected->kept[i] = oracle->valid[ops_position(ops, expected->shift, i)];
    if (ops->steps[OPS_DEDUP])
        drop_duplicates(expected);
    for (uint64_t i = 0; i < ops->count; i++)
        if (expected->kept[i]) {
            if (expected->rows)
                expected->rows[kept] = i;
            kept++;
        }
    expected->kept_count = kept;
    expected->outputs = ops_outputs(ops, kept);
    expected->draw = ops_draw(ops, number, kept);
    expect_tensor_scale(expected);
    return STATUS_OK;
}

/* ---- Comparison ---- */

#define CHUNK_BYTES ((uint64_t)16 << 20)

/* The parts of all results that belong to `count` output rows, beginning with row `first`. */
struct outputs {
    uint64_t first, count;
    uint8_t *results[OPS_ARRAYS];
    size_t bytes[OPS_ARRAYS];
};

static bool values_correct(const struct expected *expected, const struct outputs *outputs, uint64_t k,
                           uint8_t *scratch)
{
    const uint8_t *row = output_source(expected, outputs->first + k);
    const struct ops_format *format = &expected->format;
    size_t bytes = outputs->bytes[OPS_VALUES], scale_bytes = outputs->bytes[OPS_SCALES];
    ops_convert_row(format, row, scratch, scratch + bytes);
    return memcmp(scratch, outputs->results[OPS_VALUES] + k * bytes, bytes) == 0 &&
           (!scale_bytes ||
            memcmp(scratch + bytes, outputs->results[OPS_SCALES] + k * scale_bytes, scale_bytes) == 0);
}

/* Returns whether output row k of the outputs is correct. `scratch` has room for the values and scales of a
 * row. */
static bool output_correct(const struct expected *expected, const struct outputs *outputs, uint64_t k,
                           uint8_t *scratch)
{
    const struct ops *ops = expected->ops;
    uint64_t position = ops_position(ops, expected->shift, source_of(expected, outputs->first + k));
    if (outputs->bytes[OPS_ORDER] && ((uint64_t *)outputs->results[OPS_ORDER])[k] != ops->first + position)
        return false;
    if (outputs->bytes[OPS_HASHES] &&
        ((uint64_t *)outputs->results[OPS_HASHES])[k] != expected->oracle->hashes[position])
        return false;
    return !outputs->bytes[OPS_VALUES] || values_correct(expected, outputs, k, scratch);
}

/* Marks the input rows of wrong output rows in this part. */
static enum status compare_part(const struct expected *expected, const struct outputs *outputs)
{
    bool complete = true;
#pragma omp parallel reduction(&& : complete)
    {
        uint8_t *scratch = malloc(outputs->bytes[OPS_VALUES] + outputs->bytes[OPS_SCALES] + 1);
        complete = scratch;
#pragma omp for
        for (uint64_t k = 0; k < outputs->count; k++)
            if (scratch && !output_correct(expected, outputs, k, scratch))
                expected->wrong[source_of(expected, outputs->first + k)] = 1;
        free(scratch);
    }
    return ALLOCATED(complete, "out of memory to verify");
}

static enum status compare_outputs(const struct expected *expected, const struct variant *variant,
                                   void *state, struct outputs *outputs)
{
    uint64_t row_bytes = 1;
    for (int array = OPS_ORDER; array < OPS_ARRAYS; array++)
        row_bytes += outputs->bytes[array] = ops_array_bytes(expected->ops, (enum ops_array)array);
    uint64_t rows = CHUNK_BYTES / row_bytes + 1;
    for (int array = OPS_ORDER; array < OPS_ARRAYS; array++)
        if (outputs->bytes[array] && !(outputs->results[array] = malloc(rows * outputs->bytes[array])))
            return status_set(STATUS_EXHAUSTED, "out of memory to verify");
    for (uint64_t first = 0; row_bytes > 1 && first < expected->outputs; first += rows) {
        outputs->first = first;
        outputs->count = expected->outputs - first < rows ? expected->outputs - first : rows;
        for (int array = OPS_ORDER; array < OPS_ARRAYS; array++) {
            struct ops_fetch fetch = {
                (enum ops_array)array, first, outputs->count, outputs->results[array], {0}};
            if (outputs->bytes[array])
                TRY(variant->fetch(state, &fetch));
        }
        TRY(compare_part(expected, outputs));
    }
    return STATUS_OK;
}

static enum status compare_mask(const struct expected *expected, const struct variant *variant, void *state)
{
    FREED uint8_t *kept = malloc(expected->ops->count + 1);
    TRY(ALLOCATED(kept, "out of memory to verify"));
    struct ops_fetch fetch = {OPS_KEPT, 0, expected->ops->count, kept, {0}};
    TRY(variant->fetch(state, &fetch));
    for (uint64_t i = 0; i < expected->ops->count; i++)
        expected->wrong[i] |= kept[i] != expected->kept[i];
    return STATUS_OK;
}

static enum status compare(const struct expected *expected, const struct variant *variant, void *state,
                           uint64_t *wrong)
{
    struct outputs outputs = {0};
    enum status status = STATUS_OK;
    if (ops_array_bytes(expected->ops, OPS_KEPT))
        status = compare_mask(expected, variant, state);
    if (status == STATUS_OK)
        status = compare_outputs(expected, variant, state, &outputs);
    for (int array = 0; array < OPS_ARRAYS; array++)
        free(outputs.results[array]);
    *wrong = 0;
    for (uint64_t i = 0; i < expected->ops->count; i++)
        *wrong += expected->wrong[i];
    return status;
}

enum status ops_oracle_verify(const struct ops *ops, struct ops_oracle *oracle, const struct variant *variant,
                              void *state, uint64_t number, uint64_t *wrong)
{
    CLOSED_BY(expect_free) struct expected expected;
    TRY(expect(ops, oracle, number, &expected));
    struct ops_fetch fetch = {0};
    const struct ops_summary *summary = &fetch.summary;
    TRY(variant->fetch(state, &fetch));
    bool scaled = expected.format.to == OPS_NVFP4;
    if (summary->number == number && summary->kept == expected.kept_count &&
        summary->outputs == expected.outputs &&
        (!scaled || float_bits(summary->tensor_scale) == float_bits(expected.format.tensor_scale)))
        return compare(&expected, variant, state, wrong);
    *wrong = ops->count ? ops->count : 1;
    return STATUS_OK;
}
