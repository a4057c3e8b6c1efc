#include "synth/ifs_classes.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "synth/published_parts.h"
#include "synth/published_random.h"

enum {
    POINTS = IFS_SEARCH_WORDS / 2, /* of the orbit of a candidate */
    RES = 512,                     /* side of its raster */
    GROUP = 4,  /* orbits that a thread computes at a time, so that they hide each other's latency */
    BLOCK = 256 /* points of an orbit that are computed at a time */
};

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
