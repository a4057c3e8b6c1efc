/* The results of a run: sizes, and arrays in host memory. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "machine/host.h"
#include "ops/duplicates.h"
#include "ops/job.h"

size_t ops_array_bytes(const struct ops *ops, enum ops_array array)
{
    const bool *steps = ops->steps;
    bool values = steps[OPS_COMPACT] || steps[OPS_CONVERT] || ops->sample;
    switch (array) {
    case OPS_KEPT:
        return steps[OPS_MASK] || steps[OPS_DEDUP];
    case OPS_ORDER:
        return steps[OPS_COMPACT] || steps[OPS_PERMUTE] ? sizeof(uint64_t) : 0;
    case OPS_VALUES:
        return values ? ops_value_bytes(ops->format.to, ops->format.columns) : 0;
    case OPS_SCALES:
        return values ? ops_scale_bytes(ops->format.to, ops->format.columns) : 0;
    default:
        return steps[OPS_HASH] ? sizeof(uint64_t) : 0;
    }
}

uint64_t ops_outputs(const struct ops *ops, uint64_t kept)
{
    uint64_t outputs = ops->steps[OPS_COMPACT] ? kept : ops->count;
    return ops->sample && ops->sample < outputs ? ops->sample : outputs;
}

struct ops_draw ops_draw(const struct ops *ops, uint64_t number, uint64_t kept)
{
    uint64_t rows = ops->steps[OPS_COMPACT] ? kept : ops->count;
    uint64_t batches = ops->sample && ops->sample <= rows ? rows / ops->sample : 1;
    return (struct ops_draw){permutation_begin(ops->seed + number / batches, rows),
                             number % batches * ops->sample};
}

double ops_least_bytes(const struct ops *ops, uint64_t kept)
{
    uint64_t outputs = ops_outputs(ops, kept);
    bool all = ops->steps[OPS_MASK] || ops->steps[OPS_DEDUP];
    bool some = ops_array_bytes(ops, OPS_VALUES) || ops->steps[OPS_HASH];
    double bytes = (double)(all ? ops->count : some ? outputs : 0) * (double)ops->row_bytes;
    for (int array = 0; array < OPS_ARRAYS; array++)
        bytes += (double)(array == OPS_KEPT ? ops->count : outputs) *
                 (double)ops_array_bytes(ops, (enum ops_array)array);
    return bytes;
}

#define HUGE_PAGE ((size_t)2 << 20)

void *ops_allocate(size_t bytes)
{
    bool large = bytes >= HUGE_PAGE;
    size_t unit = large ? HUGE_PAGE : OPS_ALIGNMENT;
    if (bytes > SIZE_MAX - unit)
        return NULL;
    bytes = bytes ? (bytes + unit - 1) / unit * unit : unit;
    void *memory = aligned_alloc(unit, bytes);
    if (memory && large)
        madvise(memory, bytes, MADV_HUGEPAGE); /* only a hint */
    return memory;
}

/* Returns the bytes of all arrays. If `results` is not NULL, also allocates the arrays, and returns
 * UINT64_MAX if memory runs out. */
static uint64_t each_array(const struct ops *ops, struct ops_results *results)
{
    uint64_t outputs = ops_outputs(ops, ops->count), count = ops->count;
    bool dedup = ops->steps[OPS_DEDUP];
    const uint64_t bytes[] = {
        count * ops_array_bytes(ops, OPS_KEPT),
        outputs * ops_array_bytes(ops, OPS_ORDER),
        outputs * ops_array_bytes(ops, OPS_VALUES),
        outputs * ops_array_bytes(ops, OPS_SCALES),
        outputs * ops_array_bytes(ops, OPS_HASHES),
        ops->steps[OPS_COMPACT] ? count * sizeof(uint64_t) : 0,
        dedup ? duplicates_slots(count) * sizeof(uint64_t) : 0,
        dedup ? count * sizeof(uint64_t) : 0,
    };
    void *arrays[COUNT_OF(bytes)] = {NULL};
    uint64_t sum = 0;
    bool complete = true;
    for (size_t i = 0; i < COUNT_OF(bytes); i++) {
        if (results && bytes[i])
            complete &= (arrays[i] = ops_allocate(bytes[i])) != NULL;
        sum += bytes[i];
    }
    if (results)
        *results = (struct ops_results){.kept = arrays[0],
                                        .order = arrays[1],
                                        .values = arrays[2],
                                        .scales = arrays[3],
                                        .hashes = arrays[4],
                                        .rows = arrays[5],
                                        .table = arrays[6],
                                        .row_hashes = arrays[7]};
    return complete ? sum : UINT64_MAX;
}

enum status ops_results_open(const struct ops *ops, struct ops_results *results)
{
    TRY(memory_check(each_array(ops, NULL), "the results", "lower --rows or --columns"));
    uint64_t bytes = each_array(ops, results);
    if (bytes == UINT64_MAX)
        return status_set(STATUS_EXHAUSTED, "out of memory for the results; lower --rows or --columns");
    results->summary.number = UINT64_MAX;
    results->summary.memory_bytes = bytes;
    return STATUS_OK;
}

void ops_results_free(struct ops_results *results)
{
    free(results->kept);
    free(results->order);
    free(results->values);
    free(results->scales);
    free(results->hashes);
    free(results->rows);
    free(results->table);
    free(results->row_hashes);
}

enum status ops_results_fetch(const struct ops *ops, const struct ops_results *results,
                              struct ops_fetch *fetch)
{
    const void *const arrays[OPS_ARRAYS] = {results->kept, results->order, results->values, results->scales,
                                            results->hashes};
    size_t bytes = ops_array_bytes(ops, fetch->array);
    fetch->summary = results->summary;
    if (fetch->to && bytes && fetch->count)
        memcpy(fetch->to, (const uint8_t *)arrays[fetch->array] + fetch->first * bytes, fetch->count * bytes);
    return STATUS_OK;
}
