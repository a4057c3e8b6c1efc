/* Classes of iterated function systems: their search, the built-in lists, 1p-frac and the published files;
 * and the formula `fractaldb` (FractalDB, 2D-OFDB; docs/formulas.md), which draws them. */
#include "synth/ifs_classes.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/file.h"
#include "core/parallel.h"
#include "core/portable.h"
#include "data/remote.h"
#include "synth/class.h"
#include "synth/formula.h"
#include "synth/ifs.h"
#include "synth/published.h"

enum {
    POINTS = IFS_SEARCH_WORDS / 2, /* of the orbit of a candidate */
    RES = 512,                     /* side of its raster */
    GROUP = 4,  /* orbits that a thread computes at a time, so that they hide each other's latency */
    BLOCK = 256 /* points of an orbit that are computed at a time */
};

/* Replaces the last value of each map, its probability, by the share of its determinant. */
static void ifs_set_probabilities(struct ifs_system *system)
{
    double sum = 0;
    for (uint32_t m = 0; m < system->maps; m++) {
        double *map = system->map[m];
        map[6] = fabs(map[0] * map[3] - map[1] * map[2]);
        sum += map[6];
    }
    for (uint32_t m = 0; m < system->maps; m++)
        system->map[m][6] /= sum;
}

/* ---- Candidates ---- */

void ifs_draw_candidate(struct twister *stream, struct ifs_system *system)
{
    *system = (struct ifs_system){.maps = (uint32_t)numpy_randint(stream, 2, IFS_MAPS_MAX + 1)};
    for (uint32_t m = 0; m < system->maps; m++)
        for (int i = 0; i < 6; i++)
            system->map[m][i] = twister_uniform(stream, -1, 1);
    ifs_set_probabilities(system);
}

typedef double pair __attribute__((vector_size(16))); /* x and y of a point */

/* A map as the columns of its matrix and its translation. */
struct step {
    pair by_x, by_y, shift;
};

/* A candidate while a thread tests it. */
struct candidate {
    struct ifs_found found;
    struct twister stream;               /* at the numbers that choose its maps */
    uint64_t bounds[IFS_MAPS_MAX];       /* number u of 53 bits chooses the first map with u <= bound */
    struct step steps[IFS_MAPS_MAX + 1]; /* the last one repeats the point */
    pair points[POINTS];
    double low[4], high[4]; /* limits of x, y, x, y of even and of odd points */
};

static void prepare(struct candidate *candidate)
{
    const struct ifs_system *system = &candidate->found.system;
    double sum = 0;
    for (uint32_t m = 0; m < system->maps; m++) {
        const double *map = system->map[m];
        sum += map[6];
        candidate->bounds[m] = (uint64_t)(sum * 0x1p53); /* u <= sum, for a whole number u, if and only if u
                                                            <= its whole part */
        candidate->steps[m] = (struct step){{map[0], map[2]}, {map[1], map[3]}, {map[4], map[5]}};
    }
    candidate->steps[system->maps] = (struct step){{1, 0}, {0, 1}, {0, 0}};
    candidate->points[0] = (pair){0, 0};
    memset(candidate->low, 0, sizeof candidate->low);
    memset(candidate->high, 0, sizeof candidate->high);
}

/* ---- Orbits ---- */

/* Draws which map makes each of the next points. `words` and `numbers` are scratch memory. */
WIDE_CLONES static void choose_maps(const struct candidate *candidate, const uint32_t *restrict words,
                                    uint64_t *restrict numbers, int64_t *restrict choices)
{
    for (int i = 0; i < BLOCK; i++) {
        numbers[i] = (uint64_t)(words[2 * i] >> 5) << 26 | words[2 * i + 1] >> 6;
        choices[i] = 0;
    }
    for (uint32_t m = 0; m < candidate->found.system.maps; m++) {
        const int64_t bound = (int64_t)candidate->bounds[m];
        for (int i = 0; i < BLOCK; i++)
            choices[i] += (int64_t)numbers[i] > bound;
    }
}

/* Computes BLOCK points of each orbit after point `first`. */
static void extend_orbits(struct candidate *group, int64_t choices[GROUP][BLOCK], int first)
{
    pair point[GROUP];
    for (int g = 0; g < GROUP; g++)
        point[g] = group[g].points[first];
    int count = first + BLOCK < POINTS ? BLOCK : POINTS - 1 - first;
    for (int i = 0; i < count; i++)
        for (int g = 0; g < GROUP; g++) {
            const struct step *step = &group[g].steps[choices[g][i]];
            pair x = {point[g][0], point[g][0]}, y = {point[g][1], point[g][1]};
            point[g] = (x * step->by_x + y * step->by_y) + step->shift;
            group[g].points[first + 1 + i] = point[g];
        }
}

WIDE_CLONES static void extend_limits(const pair *restrict points, int count, double *restrict low,
                                      double *restrict high)
{
    const double *value = (const double *)points;
    for (int i = 0; i + 1 < count; i += 2)
        for (int k = 0; k < 4; k++) {
            double v = value[2 * i + k];
            low[k] = v < low[k] ? v : low[k];
            high[k] = v > high[k] ? v : high[k];
        }
    for (int k = 0; k < 2 * (count % 2); k++) {
        double v = value[2 * (count - 1) + k];
        low[k] = v < low[k] ? v : low[k];
        high[k] = v > high[k] ? v : high[k];
    }
}

/* Memory of a thread. */
struct worker {
    struct candidate group[GROUP];
    uint32_t words[2 * BLOCK];
    uint64_t numbers[BLOCK];
    int64_t choices[GROUP][BLOCK];
    int32_t cells[2 * BLOCK];
    uint64_t visited[RES * RES / 64];
};

static void draw_orbits(struct worker *worker)
{
    for (int first = 0; first < POINTS - 1; first += BLOCK) {
        for (int g = 0; g < GROUP; g++) {
            twister_words(&worker->group[g].stream, worker->words, 2 * BLOCK);
            choose_maps(&worker->group[g], worker->words, worker->numbers, worker->choices[g]);
        }
        extend_orbits(worker->group, worker->choices, first);
        int count = first + BLOCK < POINTS ? BLOCK : POINTS - 1 - first;
        for (int g = 0; g < GROUP; g++)
            extend_limits(&worker->group[g].points[first + 1], count, worker->group[g].low,
                          worker->group[g].high);
    }
}

/* ---- Cells ---- */

/* Converts points to cells: columns and rows alternate. */
WIDE_CLONES static void find_cells(const pair *restrict points, int count, const double *low,
                                   const double *range, int32_t *restrict cells)
{
    const double *value = (const double *)points;
    const double low_x = low[0], low_y = low[1], range_x = range[0], range_y = range[1];
    for (int i = 0; i < count; i++) {
        cells[2 * i] = (int32_t)((value[2 * i] - low_x) / range_x * (RES - 2 * IFS_PAD) + IFS_PAD);
        cells[2 * i + 1] = (int32_t)((value[2 * i + 1] - low_y) / range_y * (RES - 2 * IFS_PAD) + IFS_PAD);
    }
}

/* Counts the visited cells. Returns early, with a count below `least`, once the points that remain are too
 * few to reach it. */
static uint32_t count_cells(struct worker *worker, const struct candidate *candidate, uint32_t least)
{
    const double *low = candidate->low, *high = candidate->high;
    const double from[2] = {fmin(low[0], low[2]), fmin(low[1], low[3])};
    const double range[2] = {fmax(high[0], high[2]) - from[0], fmax(high[1], high[3]) - from[1]};
    const pair last = candidate->points[POINTS - 1];
    uint32_t count = 0;
    if (!isfinite(last[0]) || !isfinite(last[1]) || !isfinite(range[0]) || !isfinite(range[1]) ||
        range[0] <= 0 || range[1] <= 0)
        return 0; /* once a coordinate is not finite, it stays so */
    memset(worker->visited, 0, sizeof worker->visited);
    for (int first = 0; first < POINTS && count + (uint32_t)(POINTS - first) >= least; first += BLOCK) {
        int part = POINTS - first < BLOCK ? POINTS - first : BLOCK;
        find_cells(&candidate->points[first], part, from, range, worker->cells);
        for (int i = 0; i < part; i++) {
            uint32_t cell = (uint32_t)(worker->cells[2 * i + 1] * RES + worker->cells[2 * i]);
            uint64_t *visited = &worker->visited[cell / 64], bit = UINT64_C(1) << cell % 64;
            count += !(*visited & bit);
            *visited |= bit;
        }
    }
    return count;
}

/* ---- The search ---- */

struct searching {
    const struct ifs_search *wish;
    uint32_t least; /* visited cells */
    struct worker **workers;
    struct progress progress;
    /* Under the lock: */
    pthread_mutex_t lock;
    struct twister stream;   /* at the next candidate */
    uint64_t candidates;     /* that were taken from the stream */
    struct ifs_found *found; /* in any order; the candidates that are not in work are complete */
    uint32_t count;
};

/* Returns the number of candidates after which the search gives up. */
static uint64_t candidates_max(const struct ifs_search *wish)
{
    return 10000 * (uint64_t)wish->classes + 100000;
}

/* Takes the next candidates from the stream. Returns false if enough classes were found. */
static bool take_group(struct searching *searching, struct candidate *group)
{
    pthread_mutex_lock(&searching->lock);
    bool more = searching->count < searching->wish->classes &&
                searching->candidates < candidates_max(searching->wish);
    for (int g = 0; more && g < GROUP; g++) {
        struct twister *stream = &searching->stream;
        group[g].found.candidate = searching->candidates++;
        ifs_draw_candidate(stream, &group[g].found.system);
        group[g].stream = *stream;
        twister_skip(stream, IFS_SEARCH_WORDS);
    }
    pthread_mutex_unlock(&searching->lock);
    return more;
}

static void show(struct searching *searching)
{
    pthread_mutex_lock(&searching->lock);
    const uint32_t count = searching->count;
    const uint64_t candidates = searching->candidates;
    pthread_mutex_unlock(&searching->lock);
    progress_show(&searching->progress, "searching classes: %u of %u, %" PRIu64 " candidates",
                  (unsigned)count, (unsigned)searching->wish->classes, candidates);
}

static void add_found(struct searching *searching, const struct ifs_found *found)
{
    pthread_mutex_lock(&searching->lock);
    searching->found[searching->count++] = *found;
    pthread_mutex_unlock(&searching->lock);
}

static void search_task(void *context, uint64_t task, int thread)
{
    struct searching *searching = context;
    struct worker *worker = searching->workers[task];
    while (take_group(searching, worker->group)) {
        for (int g = 0; g < GROUP; g++)
            prepare(&worker->group[g]);
        draw_orbits(worker);
        for (int g = 0; g < GROUP; g++) {
            struct ifs_found *found = &worker->group[g].found;
            if (count_cells(worker, &worker->group[g], searching->least) >= searching->least)
                add_found(searching, found);
        }
        if (thread == 0 && !searching->wish->quiet && progress_due(&searching->progress))
            show(searching);
    }
}

static int compare_found(const void *a, const void *b)
{
    const struct ifs_found *first = a, *second = b;
    return (first->candidate > second->candidate) - (first->candidate < second->candidate);
}

static enum status run_search(struct searching *searching, int threads, struct ifs_found *found)
{
    const struct ifs_search *wish = searching->wish;
    twister_seed(&searching->stream, wish->seed);
    progress_begin(&searching->progress, true);
    parallel_for(threads, (uint64_t)threads, search_task, searching);
    progress_clear(&searching->progress);
    if (searching->count < wish->classes)
        return status_set(
            STATUS_FAILED,
            "only %u of %" PRIu64 " candidates fill %.9g of the image, not %u; lower the threshold",
            (unsigned)searching->count, searching->candidates, wish->threshold, (unsigned)wish->classes);
    qsort(searching->found, searching->count, sizeof *searching->found, compare_found);
    memcpy(found, searching->found, wish->classes * sizeof *found);
    for (uint32_t i = 0; i < wish->classes; i++)
        found[i].system.id = i;
    return STATUS_OK;
}

enum status ifs_search(const struct ifs_search *wish, struct ifs_found *found)
{
    int threads = wish->threads > 1 ? wish->threads : 1;
    struct searching searching = {.wish = wish, .least = (uint32_t)ceil(wish->threshold * (RES * RES))};
    if (!(wish->threshold >= IFS_THRESHOLD_MIN && wish->threshold <= IFS_THRESHOLD_MAX))
        return status_set(STATUS_USAGE, "threshold %.9g is not in %.9g .. %.9g", wish->threshold,
                          IFS_THRESHOLD_MIN, IFS_THRESHOLD_MAX);
    pthread_mutex_init(&searching.lock, NULL);
    searching.found = malloc((wish->classes + (size_t)GROUP * (size_t)threads) * sizeof *searching.found);
    searching.workers = calloc((size_t)threads, sizeof *searching.workers);
    bool complete = searching.found && searching.workers;
    for (int i = 0; complete && i < threads; i++)
        complete = (searching.workers[i] = aligned_alloc(64, (sizeof(struct worker) + 63) / 64 * 64)) != NULL;
    enum status status =
        complete ? run_search(&searching, threads, found)
                 : status_set(STATUS_EXHAUSTED, "out of memory for the search; lower the number of threads");
    for (int i = 0; searching.workers && i < threads; i++)
        free(searching.workers[i]);
    free(searching.workers);
    free(searching.found);
    pthread_mutex_destroy(&searching.lock);
    return status;
}

enum status ifs_search_rows(uint32_t seed, double threshold, uint32_t count, struct class_row *rows)
{
    const struct ifs_search wish = {seed, count, threshold, parallel_threads(), false};
    FREED struct ifs_found *found = malloc(count * sizeof *found);
    TRY(ALLOCATED(found, "out of memory for %u classes", (unsigned)count));
    TRY(ifs_search(&wish, found));
    for (uint32_t c = 0; c < count; c++)
        ifs_row(&found[c].system, &rows[c]);
    return STATUS_OK;
}

void ifs_row(const struct ifs_system *system, struct class_row *row)
{
    *row = (struct class_row){.id = system->id, .value = {system->maps}};
    memcpy(row->value + 1, system->map, system->maps * sizeof *system->map);
}

/* ---- The built-in list ---- */

extern const struct ifs_list fractaldb_bin; /* configs/fractaldb.bin, embedded by classes_cfg.S */

_Static_assert(sizeof *fractaldb_bin.states == sizeof(struct twister), "the layout of configs/fractaldb.bin");

/* The lengths of the lists that are kept in a cache file, and the hash of their systems. */
static const struct {
    uint32_t count;
    uint64_t hash;
} lists[] = {{10000, UINT64_C(0xf1f8777bc5cd4987)}, {IFS_LIST_COUNT, UINT64_C(0xb919e2f15a58840b)}};

static void unpack_begin(uint32_t count, struct ifs_system *systems)
{
    const double(*map)[6] = fractaldb_bin.maps;
    for (uint32_t c = 0; c < count; c++) {
        systems[c] = (struct ifs_system){.id = c, .maps = fractaldb_bin.counts[c]};
        for (uint32_t m = 0; m < systems[c].maps; m++, map++)
            memcpy(systems[c].map[m], map, sizeof *map);
        ifs_set_probabilities(&systems[c]);
    }
}

/* Reads classes from the stream of the search. */
struct unpacking {
    struct ifs_system *systems;
    const struct remote_cancel *cancel; /* NULL: none */
    struct progress progress;
    uint32_t count;        /* classes to read */
    _Atomic uint32_t done; /* classes that were read */
};

static void unpack_step(void *context, uint64_t task, int thread)
{
    struct unpacking *unpacking = context;
    const uint32_t first = IFS_LIST_BEGIN + (uint32_t)task * IFS_LIST_STEP;
    struct twister stream;
    memcpy(&stream, fractaldb_bin.states[first / IFS_LIST_STEP], sizeof stream);
    for (uint32_t c = first; c < first + IFS_LIST_STEP && !(unpacking->cancel && unpacking->cancel->set);
         c++) {
        struct ifs_system *system = &unpacking->systems[c];
        for (uint32_t gap = c > first ? fractaldb_bin.gaps[c] : 0; gap > 1; gap--) {
            ifs_draw_candidate(&stream, system);
            twister_skip(&stream, IFS_SEARCH_WORDS);
        }
        ifs_draw_candidate(&stream, system);
        twister_skip(&stream, IFS_SEARCH_WORDS);
        system->id = c;
        unpacking->done++;
        if (thread == 0 && progress_due(&unpacking->progress))
            progress_show(&unpacking->progress,
                          "computing the classes of FractalDB, only on first use: %u of %u",
                          (unsigned)unpacking->done, (unsigned)unpacking->count);
    }
}

static enum status unpack(uint32_t count, struct ifs_system *systems)
{
    struct unpacking unpacking = {
        .systems = systems, .cancel = published_cancel(), .count = count - IFS_LIST_BEGIN};
    unpack_begin(IFS_LIST_BEGIN, systems);
    progress_begin(&unpacking.progress, true);
    parallel_for(parallel_threads(), (count - IFS_LIST_BEGIN) / IFS_LIST_STEP, unpack_step, &unpacking);
    progress_clear(&unpacking.progress);
    return unpacking.done == unpacking.count
               ? STATUS_OK
               : status_set(STATUS_FAILED, "computing the classes of FractalDB was stopped");
}

/* Reads the systems from the cache file. Returns false if there is none. Warns if it is damaged. */
static bool read_cache(const char *path, uint32_t count, uint64_t hash, struct ifs_system *systems)
{
    FREED char *bytes = NULL;
    size_t size = 0, expected = count * sizeof *systems;
    if (!path[0] || file_read(path, &bytes, &size) != STATUS_OK)
        return false;
    if (size == expected && fnv_add(FNV_BEGIN, bytes, size) == hash) {
        memcpy(systems, bytes, size);
        return true;
    }
    status_warn("%s is damaged; computing it again", path);
    return false;
}

void ifs_cache_write(char *path, const char *set, const void *classes, size_t bytes)
{
    cache_make_folders(path);
    if (!path[0] || file_write_atomic(path, classes, bytes) != STATUS_OK)
        status_warn("the classes of %s are computed at every start, because they cannot be stored%s%s; set "
                    "XDG_CACHE_HOME to a folder that can be written",
                    set, path[0] ? ": " : "", path[0] ? status_text() : "");
}

/* Gets the systems of a list from its cache file, or computes them and writes the file. */
static enum status get_list(uint32_t count, uint64_t hash, struct ifs_system *systems)
{
    char name[32], path[PATH_MAX];
    const size_t bytes = count * sizeof *systems;
    snprintf(name, sizeof name, "fractaldb-%u.ifs", (unsigned)count);
    cache_path(name, path);
    if (read_cache(path, count, hash, systems))
        return STATUS_OK;
    TRY(unpack(count, systems));
    if (fnv_add(FNV_BEGIN, systems, bytes) != hash)
        return status_set(STATUS_FAILED, "the classes of FractalDB are computed differently on this machine");
    ifs_cache_write(path, "FractalDB", systems, bytes);
    return STATUS_OK;
}

enum status ifs_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    const bool begin = count <= IFS_LIST_BEGIN;
    const size_t list = count > lists[0].count; /* the shorter one that is long enough */
    if (count > IFS_LIST_COUNT)
        return status_set(STATUS_USAGE,
                          "%s: the built-in list has %d classes, fewer than %u; lower it, or find more with "
                          "%s fractaldb-search",
                          OPTION_OR_FIELD("--classes", "classes"), IFS_LIST_COUNT, (unsigned)count,
                          OPTION_OR_FIELD("--preset", "preset"));
    FREED struct ifs_system *systems = malloc((begin ? count : lists[list].count) * sizeof *systems);
    TRY(ALLOCATED(systems, "out of memory for the classes of %s", preset->name));
    if (begin)
        unpack_begin(count, systems);
    else
        TRY(get_list(lists[list].count, lists[list].hash, systems));
    for (uint32_t c = 0; c < count; c++)
        ifs_row(&systems[c], &rows[c]);
    return STATUS_OK;
}

/* ---- Orbits of a set ---- */

/* A bank whose maps are examined, one task per orbit. */
struct looking {
    struct ifs_bank *bank;
    uint32_t res;
    struct ifs_look *looks;
};

/* Every pixel with an owner shows a bit, which is 1 with probability 256 / 511. Padding has no owner. */
static void look_at_orbit(void *context, uint64_t task, int thread)
{
    const struct looking *looking = context;
    const uint8_t *owners = ifs_bank_map(looking->bank, task);
    const size_t bytes = ifs_map_bytes(false, looking->res);
    uint32_t owned = 0;
    (void)thread;
    for (size_t i = 0; i < bytes; i++)
        owned += (uint32_t)((owners[i] & 15) != IFS_NO_OWNER) + (owners[i] >> 4 != IFS_NO_OWNER);
    const struct ifs_orbit orbit = ifs_bank_orbit(looking->bank, task);
    const double pixels = (double)looking->res * looking->res;
    looking->looks[task] = (struct ifs_look){(float)(orbit.cells / pixels),
                                             (float)(owned / pixels * 256 / 511), orbit.overflows};
}

/* Computes what the orbits look like, all of which fit in memory. */
static enum status look_at_part(const struct ifs_rules *rules, const struct ifs_system *systems,
                                uint32_t count, const double *uniforms, uint32_t res, struct ifs_look *looks)
{
    const size_t orbits = (size_t)count * ifs_orbits(rules);
    struct looking looking = {.res = res, .looks = looks};
    FREED uint64_t *numbers = malloc(orbits * sizeof *numbers);
    TRY(ALLOCATED(numbers, "out of memory for orbits"));
    for (size_t i = 0; i < orbits; i++)
        numbers[i] = i;
    TRY(ifs_bank_open(rules, systems, count, uniforms, res, false, &looking.bank));
    enum status status = ifs_bank_need(looking.bank, numbers, orbits, parallel_threads());
    if (status == STATUS_OK)
        parallel_for(parallel_threads(), orbits, look_at_orbit, &looking);
    ifs_bank_close(looking.bank);
    return status;
}

enum status ifs_look(const struct ifs_rules *rules, const struct ifs_system *systems, uint32_t count,
                     const double *uniforms, uint32_t res, struct ifs_look *looks)
{
    enum { PART = 32 }; /* classes at a time: 52 MB of maps of 25 orbits at 362 pixels */
    struct progress progress;
    enum status status = STATUS_OK;
    progress_begin(&progress, true);
    for (uint32_t first = 0; status == STATUS_OK && first < count; first += PART) {
        status = look_at_part(rules, systems + first, count - first < PART ? count - first : PART, uniforms,
                              res, looks + (size_t)first * ifs_orbits(rules));
        if (progress_due(&progress))
            progress_show(&progress, "computing orbits: classes %u of %u", (unsigned)first, (unsigned)count);
    }
    progress_clear(&progress);
    return status;
}

enum status ifs_replace_dark(const struct ifs_rules *rules, struct ifs_system *systems, uint32_t count,
                             const double *uniforms, uint32_t res, double least)
{
    const uint32_t orbits = ifs_orbits(rules);
    if (rules->weights == 0)
        return status_set(STATUS_USAGE, "%s replaces weights, but this set has none; drop it",
                          OPTION_OR_FIELD("--min-lit", "min_lit"));
    FREED struct ifs_look *looks = malloc((size_t)count * orbits * sizeof *looks);
    TRY(ALLOCATED(looks, "out of memory for the orbits of %u classes", (unsigned)count));
    TRY(ifs_look(rules, systems, count, uniforms, res, looks));
    for (uint32_t c = 0; c < count; c++)
        for (uint32_t w = 0; w < orbits; w++)
            if ((double)looks[(size_t)c * orbits + w].lit < least)
                systems[c].replaced |= 1u << w;
    return STATUS_OK;
}

static int compare_shares(const void *a, const void *b)
{
    const float first = *(const float *)a, second = *(const float *)b;
    return (first > second) - (first < second);
}

const double ifs_darks[IFS_DARKS] = {0.001, 0.01, 0.05, 0.2};

struct ifs_shares ifs_distribute(float *shares, size_t count)
{
    struct ifs_shares of = {0};
    double sum = 0;
    qsort(shares, count, sizeof *shares, compare_shares);
    for (size_t i = 0; i < count; i++) {
        sum += (double)shares[i];
        for (size_t d = 0; d < IFS_DARKS; d++)
            of.below[d] += (double)shares[i] < ifs_darks[d];
    }
    of.mean = sum / (double)count;
    of.quartiles[0] = (double)shares[count / 4];
    of.quartiles[1] = (double)shares[count / 2];
    of.quartiles[2] = (double)shares[count - 1 - count / 4];
    return of;
}

/* Sets the parts of a report that follow from the orbits. */
static enum status report_looks(const struct ifs_look *looks, struct ifs_report *report)
{
    const size_t all = (size_t)report->classes * report->orbits;
    FREED float *shares = malloc(2 * all * sizeof *shares);
    TRY(ALLOCATED(shares, "out of memory for the orbits of %u classes", (unsigned)report->classes));
    for (size_t c = 0, i = 0; c < report->classes; c++) {
        size_t of_class = 0;
        for (uint32_t w = 0; w < report->orbits; w++, i++) {
            of_class += looks[i].overflows;
            shares[i] = looks[i].fill;
            shares[all + i] = looks[i].lit;
        }
        report->overflows += of_class;
        report->overflow_classes += of_class > 0;
    }
    report->fill = ifs_distribute(shares, all);
    report->lit = ifs_distribute(shares + all, all);
    return STATUS_OK;
}

enum status ifs_describe(const struct ifs_rules *rules, const struct ifs_system *systems, uint32_t count,
                         const double *uniforms, uint32_t res, struct ifs_report *report)
{
    size_t maps = 0;
    FREED struct ifs_look *looks = malloc((size_t)count * ifs_orbits(rules) * sizeof *looks);
    TRY(ALLOCATED(looks, "out of memory for the orbits of %u classes", (unsigned)count));
    TRY(ifs_look(rules, systems, count, uniforms, res, looks));
    for (uint32_t c = 0; c < count; c++)
        maps += systems[c].maps;
    *report = (struct ifs_report){.classes = count,
                                  .orbits = ifs_orbits(rules),
                                  .points = rules->points,
                                  .flips = rules->flips,
                                  .res = res,
                                  .maps = (double)maps / count};
    return report_looks(looks, report);
}

/* `of` names what has the shares, such as orbits. */
static void print_shares(const char *what, const struct ifs_shares *shares, const char *of, double count,
                         FILE *stream)
{
    fprintf(stream, "%s: mean %.1f %%, quartiles %.1f %%, %.1f %%, %.1f %%\n", what, 100 * shares->mean,
            100 * shares->quartiles[0], 100 * shares->quartiles[1], 100 * shares->quartiles[2]);
    for (size_t d = 0; d < IFS_DARKS; d++)
        fprintf(stream, "  below %g %%: %" PRIu64 " %s (%.1f %%)\n", 100 * ifs_darks[d], shares->below[d], of,
                100 * (double)shares->below[d] / count);
}

void ifs_print_shares(const char *what, float *shares, size_t count, FILE *stream)
{
    const struct ifs_shares of = ifs_distribute(shares, count);
    print_shares(what, &of, "orbits", (double)count, stream);
}

/* Prints the report on fractals in colour. */
static void print_colors(const char *name, const struct ifs_report *report, FILE *stream)
{
    uint64_t objects = 0;
    fprintf(stream, "%s: %u classes of %.2f maps on average, %u images of %u x %u pixels examined\n", name,
            (unsigned)report->classes, report->maps, (unsigned)report->images, (unsigned)report->res,
            (unsigned)report->res);
    fprintf(stream, "objects per image:");
    for (uint32_t n = 0; n < IFS_OBJECTS_MAX; n++) {
        objects += (n + 1) * report->objects[n];
        if (report->objects[n])
            fprintf(stream, " %u: %.1f %%;", (unsigned)n + 1,
                    100 * (double)report->objects[n] / report->images);
    }
    fprintf(stream, " mean %.2f\n", (double)objects / report->images);
    fprintf(stream, "images that show a class: %.2f on average, %u to %u\n", report->shown_mean,
            (unsigned)report->shown_least, (unsigned)report->shown_most);
    print_shares("occupied cells", &report->fill, "objects", (double)objects, stream);
    print_shares("pixels that show objects", &report->lit, "images", report->images, stream);
}

void ifs_report_print(const char *name, const struct ifs_report *report, FILE *stream)
{
    if (report->images) {
        print_colors(name, report, stream);
        return;
    }
    const double orbits = (double)report->classes * report->orbits;
    fprintf(stream,
            "%s: %u classes of %.2f maps on average, %u orbits per class of %u points, %u flips, %u x %u "
            "pixels\n",
            name, (unsigned)report->classes, report->maps, (unsigned)report->orbits, (unsigned)report->points,
            (unsigned)report->flips, (unsigned)report->res, (unsigned)report->res);
    fprintf(stream, "overflow: %" PRIu64 " orbits (%.1f %%), of %" PRIu64 " classes\n", report->overflows,
            100 * (double)report->overflows / orbits, report->overflow_classes);
    print_shares("occupied cells", &report->fill, "orbits", orbits, stream);
    print_shares("set pixels of patches", &report->lit, "orbits", orbits, stream);
}

/* ---- 1p-frac ---- */

/* Uniform numbers of an image key, in pairs per Philox block. */
struct uniforms {
    struct philox_key key;
    uint32_t lane; /* second word of the counter */
    uint32_t used;
};

static double next_uniform(struct uniforms *uniforms, double low, double high)
{
    struct philox_block block = philox(uniforms->key, uniforms->used / 2, uniforms->lane, STREAM_SHAPE, 0);
    const uint32_t *word = block.word + uniforms->used++ % 2 * 2;
    return low + (high - low) * random_of_words(word[0], word[1]);
}

enum { ONE_MAPS = 2, ONE_DOMAIN = 4, SAMPLED_MAPS_MAX = 4, SAMPLED_DOMAIN = 10 };

const struct ifs_one ifs_one_frac = {0, 3.5, 0.1};

/* Singular values of `maps` maps whose weighted sum is sigma: the larger one, then the smaller one, of each.
 * Each value is uniform between the limits that the values before it leave. */
static void draw_singular_values(struct uniforms *uniforms, uint32_t maps, double sigma, double (*values)[2])
{
    double rest = sigma, least = sigma - 3.0 * maps + 3;
    for (uint32_t m = 0; m < maps - 1; m++) {
        values[m][0] = next_uniform(uniforms, fmax(0, least / 3), fmin(1, rest));
        least -= values[m][0];
        rest -= values[m][0];
        values[m][1] = next_uniform(uniforms, fmax(0, least / 2), fmin(values[m][0], rest / 2));
        least -= 2 * values[m][1] - 3;
        rest -= 2 * values[m][1];
    }
    double *last = values[maps - 1];
    last[1] = next_uniform(uniforms, fmax(0, (rest - 1) / 2), rest / 3);
    last[0] = rest - 2 * last[1];
}

struct matrix {
    double v[2][2];
};

static struct matrix times(struct matrix a, struct matrix b)
{
    struct matrix product;
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++)
            product.v[i][j] = a.v[i][0] * b.v[0][j] + a.v[i][1] * b.v[1][j];
    return product;
}

/* Cosine and sine are rounded to float32. C libraries compute them in double with different last bits, which
 * this rounding removes. */
static struct matrix rotation(double angle)
{
    const double cosine = (float)cos(angle), sine = (float)sin(angle);
    return (struct matrix){{{cosine, -sine}, {sine, cosine}}};
}

static struct matrix diagonal(double first, double second)
{
    return (struct matrix){{{first, 0}, {0, second}}};
}

/* Draws a system of `maps` maps, from the word that the uniform numbers have come to: matrices
 * R(alpha) B diag(s) R(beta) C with rotations R and diagonals B and C of signs, and translations. The
 * weighted sum of the singular values is from `least` to `most`. */
static void draw_system(struct uniforms *uniforms, uint32_t maps, double least, double most,
                        struct ifs_system *system)
{
    double signs[2 * SAMPLED_MAPS_MAX][2], angles[2 * SAMPLED_MAPS_MAX], singular[SAMPLED_MAPS_MAX][2];
    for (uint32_t i = 0; i < 4 * maps; i++)
        signs[i / 2][i % 2] = next_uniform(uniforms, 0, 1) < 0.5 ? -1 : 1;
    for (uint32_t i = 0; i < 2 * maps; i++)
        angles[i] = next_uniform(uniforms, -M_PI, M_PI);
    draw_singular_values(uniforms, maps, next_uniform(uniforms, least, most), singular);
    *system = (struct ifs_system){.maps = maps};
    for (uint32_t m = 0; m < maps; m++) {
        const double *left = signs[m], *right = signs[maps + m];
        struct matrix a = times(rotation(angles[m]), diagonal(left[0], left[1]));
        a = times(a, diagonal(singular[m][0], singular[m][1]));
        a = times(times(a, rotation(angles[maps + m])), diagonal(right[0], right[1]));
        memcpy(system->map[m], &a, sizeof a);
        system->map[m][4] = next_uniform(uniforms, -1, 1);
        system->map[m][5] = next_uniform(uniforms, -1, 1);
    }
    ifs_set_probabilities(system);
}

/* Draws the system that all classes of 1p-frac vary. */
static void draw_base(const struct ifs_one *one, struct ifs_system *system)
{
    const struct ifs_rules rules = {.domain = ONE_DOMAIN};
    struct uniforms uniforms = {.key = ifs_mask_key(&rules, one->seed, 0, 0)};
    draw_system(&uniforms, ONE_MAPS, one->sigma - 0.1, one->sigma + 0.1, system);
}

enum status ifs_sampled_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    const struct ifs_rules rules = {.domain = SAMPLED_DOMAIN};
    (void)preset;
    for (uint32_t c = 0; c < count; c++) {
        struct uniforms uniforms = {.key = ifs_mask_key(&rules, 0, c, 0)};
        struct ifs_system system;
        const uint32_t maps = 2 + (uint32_t)(3 * next_uniform(&uniforms, 0, 1));
        draw_system(&uniforms, maps, (5 + maps) / 2.0, (6 + maps) / 2.0, &system);
        system.id = c;
        ifs_row(&system, &rows[c]);
    }
    return STATUS_OK;
}

void ifs_draw_one(const struct ifs_one *one, uint32_t id, uint32_t attempt, struct ifs_system *system)
{
    const struct ifs_rules rules = {.domain = ONE_DOMAIN};
    struct uniforms uniforms = {.key = ifs_mask_key(&rules, one->seed, id, attempt), .lane = 1};
    draw_base(one, system);
    system->id = id;
    for (int m = 0; m < ONE_MAPS; m++)
        for (int i = 0; i < 6; i++)
            system->map[m][i] *= next_uniform(&uniforms, 1 - one->delta, 1 + one->delta);
}

enum { ONE_GROUP = 64, ONE_ATTEMPTS = 200 };
#define ONE_LIT 0.05f /* images with a smaller share of set pixels are drawn again */

/* Draws the next attempt of classes whose image is too dark, until there are none. `systems` have room for
 * `count` <= ONE_GROUP classes from number `first`. */
static enum status draw_bright(const struct ifs_one *one, const struct ifs_rules *rules,
                               const double *uniforms, uint32_t first, uint32_t count,
                               struct ifs_system *systems, uint8_t *attempts)
{
    struct ifs_look looks[ONE_GROUP];
    uint32_t dark[ONE_GROUP], left = count;
    for (uint32_t i = 0; i < count; i++)
        dark[i] = i;
    for (uint32_t attempt = 0; left > 0; attempt++) {
        FREED struct ifs_system *drawn = calloc(left, sizeof *drawn);
        TRY(ALLOCATED(drawn, "out of memory for classes"));
        if (attempt == ONE_ATTEMPTS)
            return status_set(STATUS_FAILED,
                              "class %u is nearly black in all of %d attempts; take another seed",
                              (unsigned)(first + dark[0]), ONE_ATTEMPTS);
        for (uint32_t i = 0; i < left; i++)
            ifs_draw_one(one, first + dark[i], attempt, &drawn[i]);
        TRY(look_at_part(rules, drawn, left, uniforms, rules->res, looks));
        uint32_t still = 0;
        for (uint32_t i = 0; i < left; i++) {
            systems[dark[i]] = drawn[i];
            attempts[dark[i]] = (uint8_t)attempt;
            if (looks[i].lit <= ONE_LIT)
                dark[still++] = dark[i];
        }
        left = still;
    }
    return STATUS_OK;
}

enum status ifs_draw_ones(const struct ifs_one *one, const struct ifs_rules *rules, uint32_t count,
                          struct class_row *rows, uint8_t *attempts)
{
    uint8_t part_attempts[ONE_GROUP];
    FREED struct ifs_system *systems = malloc(ONE_GROUP * sizeof *systems);
    FREED double *uniforms = malloc((rules->points - 1) * sizeof *uniforms);
    TRY(ALLOCATED(systems && uniforms, "out of memory for the orbits of classes"));
    ifs_uniforms(rules->points - 1, uniforms);
    for (uint32_t first = 0; first < count; first += ONE_GROUP) {
        uint32_t part = count - first < ONE_GROUP ? count - first : ONE_GROUP;
        TRY(draw_bright(one, rules, uniforms, first, part, systems, part_attempts));
        if (attempts)
            memcpy(attempts + first, part_attempts, part);
        for (uint32_t i = 0; i < part; i++)
            ifs_row(&systems[i], &rows[first + i]);
    }
    return STATUS_OK;
}

enum status ifs_one_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    if (count > IFS_LIST_BEGIN)
        return ifs_draw_ones(&ifs_one_frac, preset->ifs, count, rows, NULL);
    for (uint32_t c = 0; c < count; c++) {
        struct ifs_system system;
        ifs_draw_one(&ifs_one_frac, c, fractaldb_bin.attempts[c], &system);
        ifs_row(&system, &rows[c]);
    }
    return STATUS_OK;
}

/* ---- Published files ---- */

int ifs_name_digits(const struct ifs_rules *rules)
{
    return rules->domain == ONE_DOMAIN ? 2 : 5;
}

void ifs_image_name(const struct ifs_rules *rules, uint32_t id, uint64_t instance, char *name)
{
    const struct ifs_instance shown = ifs_instance(rules, instance);
    const uint32_t second = rules->domain == ONE_DOMAIN ? id : shown.weight;
    snprintf(name, PUBLISHED_NAME_BYTES, "%0*u_%02u_count_%" PRIu64 "_flip%u", ifs_name_digits(rules),
             (unsigned)id, (unsigned)second, shown.drawing / ifs_orbits(rules), (unsigned)shown.flip);
}

/* The names of the values of a line. */
static const char *values_text(uint32_t values)
{
    return values == IFS_MAP_VALUES ? "a,b,c,d,e,f,p" : "a,b,c,d,e,f,g,h,i,j,k,l,p";
}

static enum status read_map(char *line, uint32_t values, double *map)
{
    for (uint32_t i = 0; i < values; i++) {
        char *field = strsep(&line, ","), *end;
        if (!field)
            return status_set(STATUS_USAGE, "%u values, not %u: %s", (unsigned)i, (unsigned)values,
                              values_text(values));
        if (!field[0] || strspn(field, "0123456789.eE+-") != strlen(field))
            return status_set(STATUS_USAGE, "'%.40s' is not a number", field);
        map[i] = strtod(field, &end);
        if (*end || !isfinite(map[i]))
            return status_set(STATUS_USAGE, "'%.40s' is not a finite number", field);
    }
    if (line)
        return status_set(STATUS_USAGE, "more than %u values: nothing may follow %s", (unsigned)values,
                          values_text(values));
    return STATUS_OK;
}

static enum status read_maps(char *text, uint32_t values, struct class_row *row, uint32_t *number)
{
    uint32_t maps = 0;
    double *to = row->value + 1;
    for (*number = 1; text; ++*number) {
        char *line = strsep(&text, "\n");
        size_t length = strlen(line);
        if (length > 0 && line[length - 1] == '\r')
            line[--length] = '\0';
        if (length == 0) {
            if (text && text[strspn(text, "\r\n")])
                return status_set(STATUS_USAGE, "the line is blank: remove it");
            break;
        }
        if (maps == IFS_MAPS_MAX)
            return status_set(STATUS_USAGE, "a class has at most %d maps", IFS_MAPS_MAX);
        TRY(read_map(line, values, to + values * maps++));
    }
    row->value[0] = maps;
    return maps > 0 ? STATUS_OK : status_set(STATUS_USAGE, "the file is empty");
}

enum status ifs_text_read(const char *name, char *text, uint32_t values, struct class_row *row)
{
    uint32_t number;
    *row = (struct class_row){.id = row->id};
    if (read_maps(text, values, row, &number) == STATUS_OK)
        return STATUS_OK;
    return status_about(status_prefix(STATUS_USAGE, "%s, line %u", name, (unsigned)number), name);
}

size_t ifs_text_write(const struct class_row *row, uint32_t values, char *text, size_t size)
{
    size_t length = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < (uint32_t)row->value[0] * values && length < size; i++)
        length += (size_t)snprintf(text + length, size - length, "%.18e%c", row->value[1 + i],
                                   i % values == values - 1 ? '\n' : ',');
    return length;
}

/* ---- The formula ---- */

#define VALUE IFS_COEFFICIENT
#define MAP(m)                                                                                \
    VALUE("a" #m), VALUE("b" #m), VALUE("c" #m), VALUE("d" #m), VALUE("e" #m), VALUE("f" #m), \
        IFS_PROBABILITY(m)

/* In the order of struct ifs_system. */
static const struct formula_parameter fractaldb_parameters[] = {
    IFS_MAPS_PARAMETER(IFS_MAPS_MAX), MAP(1), MAP(2), MAP(3), MAP(4), MAP(5), MAP(6), MAP(7),
};
_Static_assert(COUNT_OF(fractaldb_parameters) == IFS_PARAMETERS, "one parameter per value of a system");

static const struct ifs_rules fractaldb_rules = {
    .domain = 3, .points = 200000, .weights = IFS_WEIGHTS, .flips = 4, .res = 362};

/* OFDB has the first weights, which scale a by 0.2, and one drawing per class. */
static const struct ifs_rules ofdb_rules = {
    .domain = 3, .points = 200000, .weights = 1, .flips = 4, .res = 362};

/* 1p-frac has neither weights nor flips. */
static const struct ifs_rules one_rules = {
    .domain = 4, .points = 100000, .weights = 0, .flips = 1, .res = 512};

static const struct published_set fractaldb_1k = {
    .name = "fractaldb-1k", .law = PUBLISHED_FRACTALDB, .classes = 1000, .instances = 1000, .res = 362};
static const struct published_set fractaldb_10k = {
    .name = "fractaldb-10k", .law = PUBLISHED_FRACTALDB, .classes = 10000, .instances = 1000, .res = 362};
static const struct published_set ofdb_1k = {
    .name = "ofdb-1k", .law = PUBLISHED_FRACTALDB, .classes = 1000, .instances = 4, .res = 362};
static const struct published_set ofdb_21k = {
    .name = "ofdb-21k", .law = PUBLISHED_FRACTALDB, .classes = 21000, .instances = 4, .res = 362};

static enum status search_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    (void)preset;
    return ifs_search_rows(1, IFS_THRESHOLD, count, rows);
}

static const struct formula_preset fractaldb_presets[] = {
    {.name = "fractaldb", .rows = ifs_rows},
    {.name = "fractaldb-search", .rows = search_rows},
    {.name = "fractaldb-1k", .rows = ifs_rows, .set = &fractaldb_1k, .ifs = &fractaldb_rules},
    {.name = "fractaldb-10k", .rows = ifs_rows, .set = &fractaldb_10k, .ifs = &fractaldb_rules},
    {.name = "ofdb-1k", .rows = ifs_rows, .set = &ofdb_1k, .ifs = &ofdb_rules},
    {.name = "ofdb-21k", .rows = ifs_rows, .set = &ofdb_21k, .ifs = &ofdb_rules},
    {.name = "1p-frac", .rows = ifs_one_rows, .ifs = &one_rules, .classes = 1000},
    {.name = NULL},
};

const struct formula formula_fractaldb = {
    .name = "fractaldb",
    .summary = "draws fractals of iterated function systems, as FractalDB (ACCV 2020)",
    .id = FORMULA_FRACTALDB,
    .family = FAMILY_IFS,
    .targets = TARGET_LABEL,
    .parameters = fractaldb_parameters,
    .parameter_count = COUNT_OF(fractaldb_parameters),
    .mean_key = "threshold",
    .id_most = UINT32_MAX,
    .classes = 1000,
    .presets = fractaldb_presets,
    .check = ifs_check,
    .canvas = 362,
    .ifs = &fractaldb_rules,
    .unpublished = "the script draws the bits of its patches with an unseeded generator",
};
