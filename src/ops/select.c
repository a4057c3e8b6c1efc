#include "ops/select.h"

#include <stdlib.h>
#include <string.h>

#include "core/variant.h"
#include "data/embedding_rows.h"
#include "machine/host.h"
#include "ops/job.h"

#define CHUNK_BYTES ((size_t)16 << 20) /* rows that are read before the variant runs on them */
#define CHUNK_ROWS  65536

#ifdef HAVE_XXHASH

#ifdef _OPENMP
extern const struct variant variant_ops_omp;
static const struct variant *const variant = &variant_ops_omp;
#else
extern const struct variant variant_ops_naive;
static const struct variant *const variant = &variant_ops_naive;
#endif

/* Reads all rows, in chunks, and runs the variant on each chunk. */
struct scan {
    const struct ops_select *how;
    struct generator *reader; /* its samples are the rows to select from */
    const uint32_t *rows;     /* NULL: rows 0, 1, ... */
    uint64_t count, chunk_rows;
    uint8_t *memory;  /* room for the rows of a chunk */
    uint8_t *kept;    /* one per row */
    uint64_t *hashes; /* one per row; NULL without dedup */

    struct ops ops; /* the input of the variant: a chunk */
    struct ops_control control;
    struct ops_part part;
    void *state; /* of the variant, for chunks of ops.count rows; NULL: none */
};

static void scan_close(struct scan *scan)
{
    if (scan->state)
        variant->teardown(scan->state);
    generator_close(scan->reader);
    free(scan->memory);
    free(scan->kept);
    free(scan->hashes);
}

static enum status read_chunk(struct scan *scan, uint64_t first, uint64_t count)
{
    const struct generator_numbers numbers = {.first = first};
    return generator_make(scan->reader, &numbers, (uint32_t)count, scan->memory, NULL, NULL);
}

/* Sets the variant up for chunks of `count` rows. */
static enum status set_up(struct scan *scan, uint64_t count)
{
    const struct resources resources = {.threads = scan->how->threads};
    if (scan->state && scan->ops.count == count)
        return STATUS_OK;
    if (scan->state)
        variant->teardown(scan->state);
    scan->state = NULL;
    scan->ops.count = count;
    scan->part = (struct ops_part){scan->memory, 0, count};
    return variant->setup(&resources, &scan->ops, &scan->state);
}

static enum status scan_chunk(struct scan *scan, uint64_t first, uint64_t count)
{
    struct run_time unused;
    struct ops_fetch kept = {OPS_KEPT, 0, count, scan->kept + first, {0}};
    struct ops_fetch hashes = {OPS_HASHES, 0, count, scan->hashes + (scan->hashes ? first : 0), {0}};
    TRY(read_chunk(scan, first, count));
    TRY(set_up(scan, count));
    TRY(variant->run(scan->state, 0, &unused));
    if (scan->how->mask)
        TRY(variant->fetch(scan->state, &kept));
    return scan->how->dedup ? variant->fetch(scan->state, &hashes) : STATUS_OK;
}

static enum status scan_open(const struct embeddings *set, struct scan *scan)
{
    const struct embedding_rows reader = {.set = set,
                                          .numbers = scan->rows,
                                          .to = set->dtype,
                                          .width = set->columns,
                                          .threads = scan->how->threads};
    const size_t row_bytes = embeddings_row_bytes(set);
    uint64_t rows = CHUNK_BYTES / row_bytes;
    rows = rows > CHUNK_ROWS ? CHUNK_ROWS : rows > 0 ? rows : 1;
    scan->chunk_rows = rows < scan->count ? rows : scan->count;
    scan->memory = ops_allocate(scan->chunk_rows * row_bytes);
    scan->kept = malloc(scan->count);
    if (scan->how->dedup) {
        TRY(memory_check((duplicates_slots(scan->count) + scan->count) * sizeof *scan->hashes,
                         "the hashes of the rows", "select fewer rows at a time"));
        scan->hashes = malloc(scan->count * sizeof *scan->hashes);
    }
    TRY(ALLOCATED(scan->memory && scan->kept && (scan->hashes || !scan->how->dedup),
                  "out of memory to select rows"));
    memset(scan->kept, 1, scan->count);
    scan->ops = (struct ops){.steps = {[OPS_MASK] = scan->how->mask, [OPS_HASH] = scan->how->dedup},
                             .format = {.from = set->dtype, .columns = set->columns},
                             .norm_min = scan->how->norm_min,
                             .norm_max = scan->how->norm_max,
                             .parts = &scan->part,
                             .part_count = 1,
                             .row_bytes = row_bytes,
                             .control = &scan->control};
    return embedding_rows_open(&reader, &scan->reader);
}

static enum status drop_duplicates(const struct scan *scan)
{
    FREED uint64_t *table = malloc(duplicates_slots(scan->count) * sizeof *table);
    TRY(ALLOCATED(table, "out of memory for a hash table of %llu rows", (unsigned long long)scan->count));
    duplicates_drop(scan->how->threads, scan->hashes, scan->count, scan->kept, table);
    return STATUS_OK;
}

static uint64_t count_kept(const struct scan *scan)
{
    uint64_t kept = 0;
    for (uint64_t i = 0; i < scan->count; i++)
        kept += scan->kept[i];
    return kept;
}

/* Computes scan->kept, and counts what the steps remove. */
static enum status choose(const struct embeddings *set, struct scan *scan, struct ops_selected *selected)
{
    TRY(scan_open(set, scan));
    for (uint64_t first = 0, count; first < scan->count; first += count) {
        count = scan->count - first < scan->chunk_rows ? scan->count - first : scan->chunk_rows;
        if (scan->how->cancel && atomic_load(scan->how->cancel))
            return status_set(STATUS_FAILED, "the selection was cancelled");
        TRY(scan_chunk(scan, first, count));
    }
    const uint64_t valid = count_kept(scan);
    selected->invalid = scan->count - valid;
    if (scan->how->dedup)
        TRY(drop_duplicates(scan));
    selected->duplicates = valid - count_kept(scan);
    return STATUS_OK;
}

/* Lists the rows that are left, or draws some of them. */
static enum status list(const struct scan *scan, struct ops_selected *selected)
{
    const uint64_t left = scan->count - selected->invalid - selected->duplicates;
    const uint64_t sample = scan->how->sample;
    if (sample > left)
        return status_set(STATUS_USAGE, "sample: only %llu of %llu rows can be drawn; lower it",
                          (unsigned long long)left, (unsigned long long)scan->count);
    FREED uint32_t *all = malloc((left + 1) * sizeof *all);
    TRY(ALLOCATED(all, "out of memory for a list of rows"));
    uint64_t at = 0;
    for (uint64_t i = 0; i < scan->count; i++)
        if (!scan->kept || scan->kept[i])
            all[at++] = scan->rows ? scan->rows[i] : (uint32_t)i;
    selected->unsampled = sample ? left - sample : 0;
    selected->count = left - selected->unsampled;
    selected->rows = malloc((selected->count + 1) * sizeof *selected->rows);
    TRY(ALLOCATED(selected->rows, "out of memory for a list of rows"));
    const struct ops drawn = {.steps = {[OPS_COMPACT] = true}, .sample = sample, .seed = scan->how->seed};
    const struct ops_draw draw = ops_draw(&drawn, 0, left);
    for (uint64_t i = 0; i < selected->count; i++)
        selected->rows[i] = all[sample ? ops_drawn(&draw, i) : i];
    return STATUS_OK;
}

enum status ops_select(const struct embeddings *set, const uint32_t *rows, uint64_t count,
                       const struct ops_select *how, struct ops_selected *selected)
{
    struct scan scan = {.how = how, .rows = rows, .count = count};
    enum status status = STATUS_OK;
    *selected = (struct ops_selected){0};
    if (count > 0 && (how->mask || how->dedup))
        status = choose(set, &scan, selected);
    if (status == STATUS_OK)
        status = list(&scan, selected);
    scan_close(&scan);
    return status;
}

#else

enum status ops_select(const struct embeddings *set, const uint32_t *rows, uint64_t count,
                       const struct ops_select *how, struct ops_selected *selected)
{
    (void)set, (void)rows, (void)count, (void)how;
    *selected = (struct ops_selected){0};
    return status_set(STATUS_UNAVAILABLE, "not built: this build has no xxHash");
}

#endif
