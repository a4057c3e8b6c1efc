/* The variant `ops-omp`: vectors and threads. The rows are divided into tiles that fit into the L2 cache.
 *
 * If the steps allow it, threads read each row from memory only once. A thread computes the mask of a tile,
 * and gets the number of rows kept so far from the previous tile. It then writes the results of its own kept
 * rows while the tile is in the cache. Removing duplicates, permuting, and computing the scale of NVFP4
 * require all rows first; a second pass then writes the results. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "core/timer.h"
#include "core/variant.h"
#include "data/checksum.h"
#include "machine/host.h"
#include "omp_kernel.h"
#include "ops/job.h"

#define TILE_BYTES  ((size_t)64 << 10)
#define TILE_ROWS   1024  /* maximum rows per tile */
#define MASK_FACTOR 16    /* if rows are only masked, tiles may be larger by up to this factor */
#define MASK_TILES  16    /* minimum number of these larger tiles per thread */
#define LIST_ROWS   65536 /* rows per tile of a pass that only lists kept rows */
#define SPINS       1000  /* polls before a waiting thread yields its core */

/* The time of each step on one thread. */
struct clock {
    _Alignas(OPS_ALIGNMENT) double step_s[OPS_STEPS];
    double now_s;
};

struct omp {
    const struct ops *ops;
    const struct ops_kernel *kernel;
    struct ops_results results;
    int threads;
    uint64_t tile_rows;
    uint64_t *ends; /* per tile: 1 + the number of kept rows up to its end; 0 while unknown */
    size_t ends_bytes;
    struct clock *clocks;
    /* The state of the current run: */
    uint64_t shift, next_tile;
    uint64_t last; /* number of the last tile in the latest pass */
    uint64_t kept; /* number of kept rows; only without compaction */
    struct ops_format format;
    struct ops_draw draw;
    uint32_t *largest; /* per thread: the bits of the largest finite magnitude */
};

/* ---- Kernels ---- */

/* The kernel for any machine uses the definitions in ops/row.h. */

FDSL_FMA_CLONES static float scalar_square_sum(const void *row, enum dtype type, uint32_t columns)
{
    return ops_square_sum(row, type, columns);
}

static uint32_t scalar_largest_finite(const void *row, enum dtype type, uint32_t columns, uint32_t largest)
{
    return ops_largest_finite(row, type, columns, largest);
}

static void scalar_convert(const struct ops_format *format, const void *row, uint8_t *values, uint8_t *scales)
{
    ops_convert_row(format, row, values, scales);
}

const struct ops_kernel ops_kernel_scalar = {scalar_square_sum, scalar_largest_finite, scalar_convert};

/* Each kernel is CPU code for one instruction set. */
static const struct ops_kernel *const kernels[ISAS] = {
    [ISA_SCALAR] = &ops_kernel_scalar,
#if defined(__x86_64__)
    [ISA_AVX2] = &ops_kernel_avx2,
    [ISA_AVX512] = &ops_kernel_avx512,
#endif
};

void ops_convert_fast(const struct ops_format *format, const void *row, uint8_t *values, uint8_t *scales)
{
    static const struct ops_kernel *fastest; /* isa_best() takes longer than a row */
    const struct ops_kernel *kernel = __atomic_load_n(&fastest, __ATOMIC_RELAXED);
    if (!kernel) {
        kernel = kernels[isa_best()];
        __atomic_store_n(&fastest, kernel, __ATOMIC_RELAXED);
    }
    kernel->convert(format, row, values, scales);
}

/* ---- Set-up ---- */

/* Returns whether no step writes results per output row. */
static bool only_masks(const struct ops *ops)
{
    return !ops->steps[OPS_COMPACT] && !ops->steps[OPS_PERMUTE] && !ops->steps[OPS_CONVERT] &&
           !ops->steps[OPS_HASH];
}

/* Returns the number of rows per tile. If rows are only masked, a tile need not fit into the cache, and long
 * tiles interrupt the prefetching of rows less often. */
static uint64_t choose_tile_rows(const struct ops *ops, int threads)
{
    uint64_t rows = TILE_BYTES / ops->row_bytes;
    rows = rows < 1 ? 1 : rows > TILE_ROWS ? TILE_ROWS : rows;
    uint64_t share = ops->count / ((uint64_t)threads * MASK_TILES);
    if (!only_masks(ops) || share < rows)
        return rows;
    return share < rows * MASK_FACTOR ? share : rows * MASK_FACTOR;
}

static void omp_teardown(void *state)
{
    struct omp *omp = state;
    ops_results_free(&omp->results);
    free(omp->ends);
    free(omp->clocks);
    free(omp->largest);
    free(omp);
}

static enum status omp_setup(const struct resources *resources, const void *input, void **state)
{
    struct omp *omp = *state = calloc(1, sizeof *omp);
    TRY(ALLOCATED(omp, "out of memory"));
    omp->ops = input;
    omp->kernel = kernels[isa_best()];
    omp->threads = resources->threads;
    omp->tile_rows = choose_tile_rows(omp->ops, omp->threads);
    uint64_t tile_count = (omp->ops->count + omp->tile_rows - 1) / omp->tile_rows;
    omp->ends = calloc(tile_count + 1, sizeof *omp->ends);
    omp->clocks = ops_allocate((size_t)omp->threads * sizeof *omp->clocks);
    omp->largest = calloc((size_t)omp->threads, sizeof *omp->largest);
    TRY(ALLOCATED(omp->ends && omp->clocks && omp->largest, "out of memory"));
    TRY(ops_results_open(omp->ops, &omp->results));
    omp->ends_bytes = tile_count * sizeof *omp->ends;
    omp->results.summary.memory_bytes += omp->ends_bytes;
    return STATUS_OK;
}

/* ---- Steps ---- */

/* Adds the time since the last call on this thread to a step. */
static void end_step(const struct omp *omp, int thread, enum ops_step step)
{
    struct clock *clock = &omp->clocks[thread];
    if (!omp->ops->control->timed)
        return;
    double now_s = timer_now_s();
    clock->step_s[step] += now_s - clock->now_s;
    clock->now_s = now_s;
}

static void begin_clock(const struct omp *omp, int thread)
{
    if (omp->ops->control->timed)
        omp->clocks[thread].now_s = timer_now_s();
}

/* Returns row i of the current run. */
static const uint8_t *row_at(const struct omp *omp, uint64_t i)
{
    return ops_row(omp->ops, ops_position(omp->ops, omp->shift, i));
}

static void mask(const struct omp *omp, uint64_t begin, uint64_t end)
{
    const struct ops *ops = omp->ops;
    for (uint64_t i = begin; i < end; i++)
        omp->results.kept[i] =
            ops_in_bounds(omp->kernel->square_sum(row_at(omp, i), ops->format.from, ops->format.columns),
                          ops->norm_min, ops->norm_max);
}

/* Hashes the rows that the mask keeps, or all rows if there is no mask. */
static void hash_candidates(const struct omp *omp, uint64_t begin, uint64_t end)
{
    const struct ops *ops = omp->ops;
    if (!ops->steps[OPS_MASK])
        memset(omp->results.kept + begin, 1, end - begin);
    for (uint64_t i = begin; i < end; i++)
        if (omp->results.kept[i])
            omp->results.row_hashes[i] = checksum_whole(row_at(omp, i), ops->row_bytes);
}

/* Returns the number of rows that the tiles before `tile` keep. Tiles are started in order, so the previous
 * tile is being computed or complete. */
static uint64_t kept_before(const struct omp *omp, uint64_t tile)
{
    uint64_t end;
    if (tile == 0)
        return 0;
    for (unsigned spins = 0; (end = __atomic_load_n(&omp->ends[tile - 1], __ATOMIC_ACQUIRE)) == 0; spins++)
        if (spins >= SPINS)
            sched_yield();
    return end - 1;
}

/* Lists the kept rows of a tile, and returns the index of the first one within the list. Without compaction
 * there is no list. Tiles then do not wait for each other. */
static uint64_t list_kept(struct omp *omp, uint64_t tile, uint64_t begin, uint64_t end)
{
    const uint8_t *kept = omp->results.kept;
    uint64_t count = 0;
    for (uint64_t i = begin; i < end; i++)
        count += !kept || kept[i];
    if (!omp->ops->steps[OPS_COMPACT]) {
        __atomic_fetch_add(&omp->kept, count, __ATOMIC_RELAXED);
        return begin;
    }
    uint64_t first = kept_before(omp, tile), at = first;
    __atomic_store_n(&omp->ends[tile], 1 + first + count, __ATOMIC_RELEASE);
    for (uint64_t i = begin; omp->results.rows && i < end; i++)
        if (!kept || kept[i])
            omp->results.rows[at++] = i;
    return first;
}

/* Returns the row of the current run from which output row j is computed. */
static uint64_t source_of(const struct omp *omp, uint64_t j)
{
    uint64_t at = omp->ops->steps[OPS_PERMUTE] ? ops_drawn(&omp->draw, j) : j;
    return omp->results.rows ? omp->results.rows[at] : at;
}

/* Copies or converts the values of output rows. */
static void write_values(const struct omp *omp, uint64_t begin, uint64_t end, const uint64_t *sources)
{
    size_t value_bytes = ops_array_bytes(omp->ops, OPS_VALUES);
    size_t scale_bytes = ops_array_bytes(omp->ops, OPS_SCALES);
    for (uint64_t j = begin; j < end; j++)
        omp->kernel->convert(&omp->format, row_at(omp, sources[j - begin]),
                             omp->results.values + j * value_bytes,
                             scale_bytes ? omp->results.scales + j * scale_bytes : NULL);
}

/* Writes the results of output rows, at most TILE_ROWS. */
static void write_outputs(const struct omp *omp, int thread, uint64_t begin, uint64_t end)
{
    const struct ops *ops = omp->ops;
    const struct ops_results *results = &omp->results;
    const enum ops_step place = ops->steps[OPS_PERMUTE] ? OPS_PERMUTE : OPS_COMPACT;
    uint64_t sources[TILE_ROWS];
    for (uint64_t j = begin; j < end; j++)
        sources[j - begin] = source_of(omp, j);
    for (uint64_t j = begin; results->order && j < end; j++)
        results->order[j] = ops->first + ops_position(ops, omp->shift, sources[j - begin]);
    end_step(omp, thread, place);
    if (results->values)
        write_values(omp, begin, end, sources);
    end_step(omp, thread, ops->steps[OPS_CONVERT] ? OPS_CONVERT : place);
    for (uint64_t j = begin; results->hashes && j < end; j++)
        results->hashes[j] = results->row_hashes
                                 ? results->row_hashes[sources[j - begin]]
                                 : checksum_whole(row_at(omp, sources[j - begin]), ops->row_bytes);
    end_step(omp, thread, OPS_HASH);
}

/* ---- Passes ---- */

/* Returns whether the scale of the tensor depends on the output rows. */
static bool needs_scale(const struct ops *ops)
{
    return ops->steps[OPS_CONVERT] && ops->format.to == OPS_NVFP4 && !ops->scaled;
}

/* Returns whether results can be written only after all rows were read. */
static bool needs_two_passes(const struct ops *ops)
{
    return ops->steps[OPS_DEDUP] || ops->steps[OPS_PERMUTE] || needs_scale(ops);
}

static uint64_t tile_end(uint64_t begin, uint64_t count, uint64_t tile_rows)
{
    return count - begin < tile_rows ? count : begin + tile_rows;
}

/* The work that the threads do on each tile of input rows. */
enum pass {
    PASS_READ, /* mask, and hashes if duplicates are removed */
    PASS_LIST, /* the list of the kept rows, after PASS_READ */
    PASS_ALL   /* mask, list, and results */
};

struct pass_over {
    struct omp *omp;
    enum pass pass;
    uint64_t tile_rows, tile_count;
};

static void pass_tile(const struct pass_over *over, uint64_t tile, int thread)
{
    struct omp *omp = over->omp;
    const struct ops *ops = omp->ops;
    uint64_t begin = tile * over->tile_rows, end = tile_end(begin, ops->count, over->tile_rows), first;
    if (over->pass != PASS_LIST && ops->steps[OPS_MASK])
        mask(omp, begin, end);
    end_step(omp, thread, OPS_MASK);
    if (over->pass == PASS_READ && ops->steps[OPS_DEDUP])
        hash_candidates(omp, begin, end);
    end_step(omp, thread, OPS_DEDUP);
    if (over->pass == PASS_READ)
        return;
    first = list_kept(omp, tile, begin, end);
    end_step(omp, thread, OPS_COMPACT);
    if (over->pass == PASS_ALL && ops->steps[OPS_COMPACT])
        write_outputs(omp, thread, first, omp->ends[tile] - 1);
    else if (over->pass == PASS_ALL && !only_masks(ops))
        write_outputs(omp, thread, begin, end);
}

/* parallel_for() may start tasks in any order, so threads take the numbers of tiles from a counter. */
static void take_tiles(void *context, uint64_t task, int thread)
{
    const struct pass_over *over = context;
    struct omp *omp = over->omp;
    uint64_t tile;
    (void)task;
    begin_clock(omp, thread);
    while ((tile = __atomic_fetch_add(&omp->next_tile, 1, __ATOMIC_RELAXED)) < over->tile_count)
        pass_tile(over, tile, thread);
}

static void pass_over_rows(struct omp *omp, enum pass pass)
{
    const uint64_t rows = pass == PASS_LIST ? LIST_ROWS : omp->tile_rows;
    struct pass_over over = {omp, pass, rows, (omp->ops->count + rows - 1) / rows};
    omp->next_tile = 0;
    omp->last = over.tile_count - 1;
    parallel_for(omp->threads, (uint64_t)omp->threads, take_tiles, &over);
}

/* Finds the largest finite magnitude of a tile of output rows. */
static void find_largest(void *context, uint64_t task, int thread)
{
    const struct omp *omp = context;
    const struct ops_format *format = &omp->format;
    uint64_t begin = task * omp->tile_rows,
             end = tile_end(begin, omp->results.summary.outputs, omp->tile_rows);
    begin_clock(omp, thread);
    for (uint64_t j = begin; j < end; j++)
        omp->largest[thread] = omp->kernel->largest_finite(row_at(omp, source_of(omp, j)), format->from,
                                                           format->columns, omp->largest[thread]);
    end_step(omp, thread, OPS_CONVERT);
}

static void write_tile(void *context, uint64_t task, int thread)
{
    const struct omp *omp = context;
    uint64_t begin = task * omp->tile_rows;
    begin_clock(omp, thread);
    write_outputs(omp, thread, begin, tile_end(begin, omp->results.summary.outputs, omp->tile_rows));
}

/* Sets the number of kept rows and of output rows, after all kept rows were counted. */
static void count_outputs(struct omp *omp)
{
    struct ops_summary *summary = &omp->results.summary;
    const uint64_t count = omp->ops->count;
    const bool compacts = omp->ops->steps[OPS_COMPACT];
    summary->kept = count;
    if (count && omp->results.kept)
        summary->kept = compacts ? omp->ends[omp->last] - 1 : omp->kept;
    summary->outputs = ops_outputs(omp->ops, summary->kept);
}

static void run_two_passes(struct omp *omp, uint64_t number)
{
    const struct ops *ops = omp->ops;
    struct ops_results *results = &omp->results;
    double begin_s = timer_now_s();
    if (ops->steps[OPS_MASK] || ops->steps[OPS_DEDUP])
        pass_over_rows(omp, PASS_READ);
    if (ops->steps[OPS_DEDUP]) {
        begin_s = timer_now_s();
        duplicates_drop(omp->threads, results->row_hashes, ops->count, results->kept, results->table);
        omp->clocks[0].step_s[OPS_DEDUP] += (timer_now_s() - begin_s) * omp->threads;
    }
    if (results->kept || results->rows)
        pass_over_rows(omp, PASS_LIST);
    count_outputs(omp);
    omp->draw = ops_draw(ops, number, results->summary.kept);
    uint64_t tasks = (results->summary.outputs + omp->tile_rows - 1) / omp->tile_rows;
    if (needs_scale(ops)) {
        uint32_t largest = 0;
        memset(omp->largest, 0, (size_t)omp->threads * sizeof *omp->largest);
        parallel_for(omp->threads, tasks, find_largest, omp);
        for (int thread = 0; thread < omp->threads; thread++)
            largest = omp->largest[thread] > largest ? omp->largest[thread] : largest;
        omp->format.tensor_scale = nvfp4_tensor_scale(largest);
    }
    parallel_for(omp->threads, tasks, write_tile, omp);
}

static enum status omp_run(void *state, uint64_t number, struct run_time *time)
{
    struct omp *omp = state;
    const struct ops *ops = omp->ops;
    (void)time;
    omp->shift = ops_shift(ops, number);
    omp->format = ops->format;
    omp->kept = 0;
    memset(omp->ends, 0, omp->ends_bytes);
    memset(omp->clocks, 0, (size_t)omp->threads * sizeof *omp->clocks);
    if (needs_two_passes(ops)) {
        run_two_passes(omp, number);
    } else {
        pass_over_rows(omp, PASS_ALL);
        count_outputs(omp);
    }
    for (int step = 0; step < OPS_STEPS; step++) {
        double sum_s = 0;
        for (int thread = 0; thread < omp->threads; thread++)
            sum_s += omp->clocks[thread].step_s[step];
        omp->results.summary.step_s[step] = ops->control->timed ? sum_s / omp->threads : -1;
    }
    omp->results.summary.tensor_scale = omp->format.tensor_scale;
    omp->results.summary.number = number;
    return ops_check_rows(ops);
}

static enum status omp_fetch(void *state, void *result)
{
    const struct omp *omp = state;
    return ops_results_fetch(omp->ops, &omp->results, result);
}

static enum status omp_stream(void *state, double *bytes_per_s)
{
    const struct omp *omp = state;
    return stream_triad(omp->threads, omp->ops->count * omp->ops->row_bytes, bytes_per_s);
}

static const struct ops_traits traits = {.stream = omp_stream};

const struct variant variant_ops_omp = {
    .platform = "cpu",
    .threaded = true,
    .instruction_set = isa_best_name,
    .traits = &traits,
    .setup = omp_setup,
    .run = omp_run,
    .fetch = omp_fetch,
    .teardown = omp_teardown,
};
