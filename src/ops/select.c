#include "ops/select.h"

#include <stdlib.h>
#include <string.h>

#include "core/variant.h"
#include "data/embeddings.h"
#include "machine/host.h"

#define CHUNK_BYTES ((size_t)16 << 20) /* rows that are read before the variant runs on them */
#define CHUNK_ROWS  65536

/* ---- The check of rows ---- */

static enum status scan_chunk(struct ops_scan *scan, uint64_t first, uint64_t count)
{
    struct ops_fetch kept = {OPS_KEPT, 0, count, scan->kept + first, {0}};
    struct ops_fetch hashes = {OPS_HASHES, 0, count, scan->hashes + (scan->hashes ? first : 0), {0}};
    void *state;
    TRY(scan->run(scan->context, first, count, &state));
    if (scan->mask)
        TRY(scan->variant->fetch(state, &kept));
    return scan->hash ? scan->variant->fetch(state, &hashes) : STATUS_OK;
}

static enum status drop_duplicates(const struct ops_scan *scan)
{
    FREED uint64_t *table = malloc(duplicates_slots(scan->count) * sizeof *table);
    TRY(ALLOCATED(table, "out of memory for a hash table of %llu rows", (unsigned long long)scan->count));
    duplicates_drop(scan->threads, scan->hashes, scan->count, scan->kept, table);
    return STATUS_OK;
}

static uint64_t count_kept(const struct ops_scan *scan)
{
    uint64_t kept = 0;
    for (uint64_t i = 0; i < scan->count; i++)
        kept += scan->kept[i];
    return kept;
}

enum status ops_scan(struct ops_scan *scan)
{
    const uint64_t words = (scan->dedup ? duplicates_slots(scan->count) : 0) + scan->count;
    if (scan->hash)
        TRY(memory_check(words * sizeof *scan->hashes, "the hashes of the rows", scan->advice));
    scan->kept = malloc(scan->count);
    scan->hashes = scan->hash ? malloc(scan->count * sizeof *scan->hashes) : NULL;
    TRY(ALLOCATED(scan->kept && (scan->hashes || !scan->hash), "out of memory for the hashes of %llu rows",
                  (unsigned long long)scan->count));
    memset(scan->kept, 1, scan->count);
    for (uint64_t first = 0, count; first < scan->count; first += count) {
        count = scan->count - first < scan->chunk ? scan->count - first : scan->chunk;
        if (scan->cancel && atomic_load(scan->cancel))
            return status_set(STATUS_FAILED, "the selection was cancelled");
        TRY(scan_chunk(scan, first, count));
    }
    scan->valid = count_kept(scan);
    if (scan->dedup)
        TRY(drop_duplicates(scan));
    scan->left = count_kept(scan);
    return STATUS_OK;
}

void ops_scan_free(struct ops_scan *scan)
{
    free(scan->kept);
    free(scan->hashes);
    scan->kept = NULL;
    scan->hashes = NULL;
}

#ifdef HAVE_XXHASH

/* ---- Rows of files ---- */

#ifdef _OPENMP
extern const struct variant variant_ops_omp;
static const struct variant *const variant = &variant_ops_omp;
#else
extern const struct variant variant_ops_naive;
static const struct variant *const variant = &variant_ops_naive;
#endif

/* Reads rows in chunks, and runs the variant on each chunk. */
struct reading {
    const struct ops_select *how;
    struct generator *reader; /* its samples are the rows to select from */
    uint8_t *memory;          /* room for the rows of a chunk */
    struct ops ops;           /* the input of the variant: a chunk */
    struct ops_control control;
    struct ops_part part;
    void *state; /* of the variant, for chunks of ops.count rows; NULL: none */
};

static void reading_close(struct reading *reading)
{
    if (reading->state)
        variant->teardown(reading->state);
    generator_close(reading->reader);
    free(reading->memory);
}

/* Sets the variant up for chunks of `count` rows. */
static enum status set_up(struct reading *reading, uint64_t count)
{
    const struct resources resources = {.threads = reading->how->threads};
    if (reading->state && reading->ops.count == count)
        return STATUS_OK;
    if (reading->state)
        variant->teardown(reading->state);
    reading->state = NULL;
    reading->ops.count = count;
    reading->part = (struct ops_part){reading->memory, 0, count};
    return variant->setup(&resources, &reading->ops, &reading->state);
}

/* Implements ops_scan.run. */
static enum status read_and_run(void *context, uint64_t first, uint64_t count, void **state)
{
    struct reading *reading = context;
    const struct generator_numbers numbers = {.first = first};
    struct run_time unused;
    TRY(generator_make(reading->reader, &numbers, (uint32_t)count, reading->memory, NULL, NULL));
    TRY(set_up(reading, count));
    *state = reading->state;
    return variant->run(reading->state, 0, &unused);
}

static enum status reading_open(const struct embeddings *set, const uint32_t *rows, uint64_t chunk,
                                struct reading *reading)
{
    const struct ops_select *how = reading->how;
    const struct embedding_rows reader = {
        .set = set, .numbers = rows, .to = set->dtype, .width = set->columns, .threads = how->threads};
    reading->ops = (struct ops){.steps = {[OPS_MASK] = how->mask, [OPS_HASH] = how->dedup},
                                .format = {.from = set->dtype, .columns = set->columns},
                                .norm_min = how->norm_min,
                                .norm_max = how->norm_max,
                                .parts = &reading->part,
                                .part_count = 1,
                                .row_bytes = embeddings_row_bytes(set),
                                .control = &reading->control};
    reading->memory = ops_allocate(chunk * reading->ops.row_bytes);
    TRY(ALLOCATED(reading->memory, "out of memory to select rows"));
    return embedding_rows_open(&reader, &reading->reader);
}

/* Checks the rows of a set. */
static enum status check(const struct embeddings *set, const uint32_t *rows, const struct ops_select *how,
                         struct reading *reading, struct ops_scan *scan)
{
    uint64_t chunk = CHUNK_BYTES / embeddings_row_bytes(set);
    chunk = chunk > CHUNK_ROWS ? CHUNK_ROWS : chunk > 0 ? chunk : 1;
    scan->chunk = chunk < scan->count ? chunk : scan->count;
    scan->mask = how->mask;
    scan->hash = scan->dedup = how->dedup;
    scan->threads = how->threads;
    scan->advice = "select fewer rows at a time";
    scan->cancel = how->cancel;
    scan->variant = variant;
    scan->run = read_and_run;
    TRY(reading_open(set, rows, scan->chunk, reading));
    return ops_scan(scan);
}

/* Lists the rows that are left, or draws some of them. */
static enum status list(const struct ops_scan *scan, const uint32_t *rows, const struct ops_select *how,
                        struct ops_selected *selected)
{
    const uint64_t left = scan->left, sample = how->sample;
    if (sample > left)
        return status_set(STATUS_USAGE, "sample: only %llu of %llu rows can be drawn; lower it",
                          (unsigned long long)left, (unsigned long long)scan->count);
    FREED uint32_t *all = malloc((left + 1) * sizeof *all);
    TRY(ALLOCATED(all, "out of memory for a list of rows"));
    uint64_t at = 0;
    for (uint64_t i = 0; i < scan->count; i++)
        if (!scan->kept || scan->kept[i])
            all[at++] = rows ? rows[i] : (uint32_t)i;
    selected->unsampled = sample ? left - sample : 0;
    selected->count = left - selected->unsampled;
    selected->rows = malloc((selected->count + 1) * sizeof *selected->rows);
    TRY(ALLOCATED(selected->rows, "out of memory for a list of rows"));
    const struct ops drawn = {.steps = {[OPS_COMPACT] = true}, .sample = sample, .seed = how->seed};
    const struct ops_draw draw = ops_draw(&drawn, 0, left);
    for (uint64_t i = 0; i < selected->count; i++)
        selected->rows[i] = all[sample ? ops_drawn(&draw, i) : i];
    return STATUS_OK;
}

enum status ops_select(const struct embeddings *set, const uint32_t *rows, uint64_t count,
                       const struct ops_select *how, struct ops_selected *selected)
{
    struct reading reading = {.how = how};
    struct ops_scan scan = {.count = count, .context = &reading, .valid = count, .left = count};
    enum status status = STATUS_OK;
    *selected = (struct ops_selected){0};
    if (count > 0 && (how->mask || how->dedup))
        status = check(set, rows, how, &reading, &scan);
    selected->invalid = count - scan.valid;
    selected->duplicates = scan.valid - scan.left;
    if (status == STATUS_OK)
        status = list(&scan, rows, how, selected);
    ops_scan_free(&scan);
    reading_close(&reading);
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
