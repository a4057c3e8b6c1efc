/* The formula `ifs3d`: views of three-dimensional fractals (MV-FractalDB, ExFractalDB, 3D-OFDB, PC-FractalDB;
 * docs/formulas.md), and the search of its classes. */
#include "synth/ifs3d.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/file.h"
#include "core/parallel.h"
#include "data/remote.h"
#include "synth/formula.h"
#include "synth/ifs_classes.h"
#include "synth/published.h"
#include "synth/published_files.h"
#include "synth/published_parts.h"
#include "synth/published_random.h"

/* ---- One class ---- */

void ifs3d_system(const struct class_row *row, struct ifs3d_system *system)
{
    double sum = 0;
    memset(system, 0, sizeof *system);
    system->id = row->id;
    system->maps = (uint32_t)row->value[0];
    for (uint32_t m = 0; m < IFS_MAPS_MAX; m++) {
        const double *map = &row->value[1 + IFS3D_MAP_VALUES * m];
        if (m < system->maps)
            memcpy(system->map[m], map, sizeof system->map[m]);
        sum += map[IFS3D_COEFFICIENTS];
        system->bounds[m] = m + 1 >= system->maps || sum >= 1 ? UINT32_MAX : (uint32_t)(sum * 0x1p32);
    }
}

void ifs3d_image_name(const struct ifs_rules *rules, uint32_t id, uint64_t instance, char *name)
{
    const struct ifs_instance shown = ifs_instance(rules, instance);
    snprintf(name, PUBLISHED_NAME_BYTES, "%06u_%05" PRIu64 "_%03u", (unsigned)id, shown.drawing,
             (unsigned)shown.flip);
}

/* ---- Candidates ---- */

/* Returns the absolute value of a determinant as NumPy computes it: the factors of LAPACK's dgetf2, and the
 * sum of the logarithms of the pivots. */
static double determinant(const double *matrix)
{
    double a[3][3], logarithm = 0;
    memcpy(a, matrix, sizeof a);
    for (int k = 0; k < 3; k++) {
        int pivot = k;
        for (int i = k + 1; i < 3; i++)
            if (fabs(a[i][k]) > fabs(a[pivot][k]))
                pivot = i;
        if (a[pivot][k] == 0)
            return 0;
        for (int j = 0; j < 3; j++) {
            const double swapped = a[k][j];
            a[k][j] = a[pivot][j];
            a[pivot][j] = swapped;
        }
        const double inverse = 1 / a[k][k];
        for (int i = k + 1; i < 3; i++) {
            a[i][k] *= inverse;
            for (int j = k + 1; j < 3; j++)
                a[i][j] -= a[i][k] * a[k][j];
        }
        logarithm += log(fabs(a[k][k]));
    }
    return exp(logarithm);
}

/* Draws the maps of the next candidate. Leaves the stream at the CANDIDATE_WORDS words of its orbit. */
enum { NUMBERS = IFS3D_POINTS + 1, CANDIDATE_WORDS = 2 * NUMBERS };

static void draw_candidate(struct twister *stream, struct class_row *row)
{
    double sum = 0;
    memset(row, 0, sizeof *row);
    const uint32_t maps = (uint32_t)numpy_randint(stream, 2, IFS_MAPS_MAX + 1);
    row->value[0] = maps;
    for (uint32_t m = 0; m < maps; m++) {
        double *map = &row->value[1 + IFS3D_MAP_VALUES * m];
        for (int i = 0; i < IFS3D_COEFFICIENTS; i++)
            map[i] = twister_uniform(stream, -1, 1);
        map[IFS3D_COEFFICIENTS] = determinant(map);
        sum += map[IFS3D_COEFFICIENTS];
    }
    for (uint32_t m = 0; m < maps; m++)
        row->value[1 + IFS3D_MAP_VALUES * m + IFS3D_COEFFICIENTS] /= sum;
}

/* A candidate in test. */
struct candidate {
    struct class_row row;
    uint64_t number;
    struct twister stream; /* at the numbers of its orbit */
};

/* The memory of a thread. */
struct tester {
    struct candidate candidate;
    uint32_t words[CANDIDATE_WORDS];
    double at[3][IFS3D_POINTS]; /* coordinates of the points */
};

/* Walks through the orbit. Returns the number of the first map whose summed probability is at least u. Keeps
 * the latest point if there is none. */
static void walk(struct tester *tester)
{
    const struct class_row *row = &tester->candidate.row;
    const uint32_t maps = (uint32_t)row->value[0];
    double sums[IFS_MAPS_MAX], sum = 0;
    struct ifs3d_point point = {{0, 0, 0}};
    for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
        sums[m] = m < maps ? sum += row->value[1 + IFS3D_MAP_VALUES * m + IFS3D_COEFFICIENTS] : INFINITY;
    twister_words(&tester->candidate.stream, tester->words, CANDIDATE_WORDS);
    for (uint32_t i = 0; i < IFS3D_POINTS; i++) {
        const double u = random_of_words(tester->words[2 * i], tester->words[2 * i + 1]);
        uint32_t choice = 0;
        for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
            choice += u > sums[m];
        if (choice < maps)
            point = ifs3d_step(&row->value[1 + IFS3D_MAP_VALUES * choice], point);
        for (int axis = 0; axis < 3; axis++)
            tester->at[axis][i] = point.at[axis];
    }
}

/* Returns the variance of an axis after scaling to -1 .. 1. Subtracting the centre does not change it but for
 * rounding, which the search ignores. */
static double variance(const double *values, double least, double range)
{
    double mean = 0, sum = 0;
    for (int i = 0; i < IFS3D_POINTS; i++)
        mean += (values[i] - least) / range * 2 - 1;
    mean /= IFS3D_POINTS;
    for (int i = 0; i < IFS3D_POINTS; i++) {
        const double deviation = (values[i] - least) / range * 2 - 1 - mean;
        sum += deviation * deviation;
    }
    return sum / IFS3D_POINTS;
}

/* Returns whether the variance of each axis is above the threshold. It is NaN if a coordinate overflows. */
static bool accepted(struct tester *tester, double threshold)
{
    double least = INFINITY, most = -INFINITY;
    walk(tester);
    if (!isfinite(tester->at[0][IFS3D_POINTS - 1]))
        return false; /* once a coordinate is not finite, all are, from the next step on */
    for (int axis = 0; axis < 3; axis++)
        for (int i = 0; i < IFS3D_POINTS; i++) {
            least = tester->at[axis][i] < least ? tester->at[axis][i] : least;
            most = tester->at[axis][i] > most ? tester->at[axis][i] : most;
        }
    for (int axis = 0; axis < 3; axis++)
        if (!(variance(tester->at[axis], least, most - least) > threshold))
            return false;
    return true;
}

/* ---- The search ---- */

struct search {
    double threshold;
    uint32_t wanted;
    const struct remote_cancel *cancel; /* NULL: none */
    struct tester **testers;
    struct progress progress;
    /* Under the lock: */
    pthread_mutex_t lock;
    struct twister stream; /* at the next candidate */
    uint64_t candidates;   /* that were taken from the stream */
    struct found {
        struct class_row row;
        uint64_t candidate;
    } * found; /* in any order; the candidates that are not in test are complete */
    uint32_t count;
};

/* Returns the number of candidates after which the search gives up. */
static uint64_t candidates_max(const struct search *search)
{
    return 10000 * (uint64_t)search->wanted + 100000;
}

static bool is_stopped(const struct search *search)
{
    return search->cancel && search->cancel->set;
}

/* Takes the next candidate from the stream. Returns false if enough classes were found. */
static bool take_candidate(struct search *search, struct candidate *candidate)
{
    pthread_mutex_lock(&search->lock);
    const bool more =
        search->count < search->wanted && search->candidates < candidates_max(search) && !is_stopped(search);
    if (more) {
        candidate->number = search->candidates++;
        draw_candidate(&search->stream, &candidate->row);
        candidate->stream = search->stream;
        twister_skip(&search->stream, CANDIDATE_WORDS);
    }
    pthread_mutex_unlock(&search->lock);
    return more;
}

static void search_task(void *context, uint64_t task, int thread)
{
    struct search *search = context;
    struct tester *tester = search->testers[task];
    while (take_candidate(search, &tester->candidate)) {
        if (accepted(tester, search->threshold)) {
            pthread_mutex_lock(&search->lock);
            search->found[search->count++] = (struct found){tester->candidate.row, tester->candidate.number};
            pthread_mutex_unlock(&search->lock);
        }
        if (thread == 0 && progress_due(&search->progress)) {
            pthread_mutex_lock(&search->lock);
            const uint32_t count = search->count;
            pthread_mutex_unlock(&search->lock);
            progress_show(&search->progress, "searching classes: %u of %u", (unsigned)count,
                          (unsigned)search->wanted);
        }
    }
}

static int compare_found(const void *a, const void *b)
{
    const struct found *first = a, *second = b;
    return (first->candidate > second->candidate) - (first->candidate < second->candidate);
}

static enum status run_search(struct search *search, int threads, struct class_row *rows)
{
    progress_begin(&search->progress, true);
    parallel_for(threads, (uint64_t)threads, search_task, search);
    progress_clear(&search->progress);
    if (search->count < search->wanted && is_stopped(search))
        return status_set(STATUS_FAILED, "searching the classes of ifs3d was stopped");
    if (search->count < search->wanted)
        return status_set(
            STATUS_FAILED,
            "only %u of %" PRIu64 " candidates have a variance above %.9g, not %u; lower the threshold",
            (unsigned)search->count, search->candidates, search->threshold, (unsigned)search->wanted);
    qsort(search->found, search->count, sizeof *search->found, compare_found);
    for (uint32_t i = 0; i < search->wanted; i++) {
        rows[i] = search->found[i].row;
        rows[i].id = i;
    }
    return STATUS_OK;
}

enum status ifs3d_search(uint32_t seed, double threshold, uint32_t count, struct class_row *rows)
{
    const int threads = parallel_threads();
    struct search search = {.threshold = threshold, .wanted = count, .cancel = published_cancel()};
    if (!(threshold >= IFS3D_THRESHOLD_MIN && threshold <= IFS3D_THRESHOLD_MAX))
        return status_set(STATUS_USAGE, "threshold %.9g is not in %.9g .. %.9g", threshold,
                          IFS3D_THRESHOLD_MIN, IFS3D_THRESHOLD_MAX);
    pthread_mutex_init(&search.lock, NULL);
    twister_seed(&search.stream, seed);
    search.found = malloc((count + (size_t)threads) * sizeof *search.found);
    search.testers = calloc((size_t)threads, sizeof *search.testers);
    bool complete = search.found && search.testers;
    for (int i = 0; complete && i < threads; i++)
        complete = (search.testers[i] = malloc(sizeof **search.testers)) != NULL;
    enum status status =
        complete ? run_search(&search, threads, rows)
                 : status_set(STATUS_EXHAUSTED, "out of memory for the search; lower the number of threads");
    for (int i = 0; search.testers && i < threads; i++)
        free(search.testers[i]);
    free(search.testers);
    free(search.found);
    pthread_mutex_destroy(&search.lock);
    return status;
}

enum { LIST_COUNT = 1000 };                    /* classes that are kept in a cache file */
#define LIST_HASH UINT64_C(0x68b1b7b9b5babea3) /* list_hash() of them */

/* Returns a hash of LIST_COUNT classes, with probabilities rounded to float32: their last bits depend on the
 * C library. */
static uint64_t list_hash(const struct class_row *rows)
{
    uint64_t hash = FNV_BEGIN;
    for (uint32_t c = 0; c < LIST_COUNT; c++) {
        struct class_row row = rows[c];
        for (uint32_t m = 0; m < IFS_MAPS_MAX; m++) {
            double *probability = &row.value[1 + IFS3D_MAP_VALUES * m + IFS3D_COEFFICIENTS];
            *probability = (float)*probability;
        }
        hash = fnv_add(fnv_add(hash, &row.id, sizeof row.id), row.value, sizeof row.value);
    }
    return hash;
}

/* Reads the list from its cache file. Returns NULL if there is none. Warns if it is damaged. */
static struct class_row *read_list(const char *path)
{
    char *bytes = NULL;
    size_t size = 0;
    if (!path[0] || file_read(path, &bytes, &size) != STATUS_OK)
        return NULL;
    struct class_row *rows = (struct class_row *)(void *)bytes;
    if (size == LIST_COUNT * sizeof *rows && list_hash(rows) == LIST_HASH)
        return rows;
    status_warn("%s is damaged; searching the classes again", path);
    free(bytes);
    return NULL;
}

/* Implements rows() of the presets: the search with seed 1. The first LIST_COUNT classes come from a cache
 * file. If there is none, they are searched, and the file is written. */
static enum status list_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    char path[PATH_MAX];
    (void)preset;
    if (count > LIST_COUNT)
        return ifs3d_search(1, IFS3D_THRESHOLD, count, rows);
    cache_path("ifs3d-1000.ifs", path);
    FREED struct class_row *list = read_list(path);
    if (!list) {
        list = calloc(LIST_COUNT, sizeof *list);
        TRY(ALLOCATED(list, "out of memory for classes"));
        TRY(ifs3d_search(1, IFS3D_THRESHOLD, LIST_COUNT, list));
        if (list_hash(list) != LIST_HASH)
            return status_set(STATUS_FAILED, "the classes of ifs3d are computed differently on this machine");
        ifs_cache_write(path, "ifs3d", list, LIST_COUNT * sizeof *list);
    }
    memcpy(rows, list, count * sizeof *rows);
    return STATUS_OK;
}

/* ---- The formula ---- */

#define VALUE IFS_COEFFICIENT
#define MAP(m)                                                                                               \
    VALUE("a" #m), VALUE("b" #m), VALUE("c" #m), VALUE("d" #m), VALUE("e" #m), VALUE("f" #m), VALUE("g" #m), \
        VALUE("h" #m), VALUE("i" #m), VALUE("j" #m), VALUE("k" #m), VALUE("l" #m), IFS_PROBABILITY(m)

static const struct formula_parameter parameters[] = {
    IFS_MAPS_PARAMETER(IFS_MAPS_MAX), MAP(1), MAP(2), MAP(3), MAP(4), MAP(5), MAP(6), MAP(7),
};
_Static_assert(COUNT_OF(parameters) == IFS3D_PARAMETERS, "one parameter per value of a system");

#define DRAWINGS(...)                                                                      \
    {                                                                                      \
        .domain = 5, .points = IFS3D_POINTS, .flips = IFS3D_VIEWS, .res = 224, __VA_ARGS__ \
    }

static const struct ifs_rules circle_rules = DRAWINGS(.weights = IFS3D_WEIGHTS);
static const struct ifs_rules sphere_rules = DRAWINGS(.weights = IFS3D_WEIGHTS, .sphere = 1);
static const struct ifs_rules cloud_rules = DRAWINGS(.weights = IFS3D_WEIGHTS, .cloud = IFS3D_CLOUD);
static const struct ifs_rules one_rules = DRAWINGS(.weights = 1); /* the first row, which scales a by 0.4 */

static const struct formula_preset presets[] = {
    {.name = "ifs3d", .rows = list_rows},
    {.name = "mv-fractaldb-1k", .rows = list_rows, .ifs = &circle_rules, .classes = 1000},
    {.name = "exfractaldb-1k", .rows = list_rows, .ifs = &sphere_rules, .classes = 1000},
    {.name = "3d-ofdb-1k", .rows = list_rows, .ifs = &one_rules, .classes = 1000},
    {.name = "pc-fractaldb-1k", .rows = list_rows, .ifs = &cloud_rules, .classes = 1000},
    {.name = NULL},
};

const struct formula formula_ifs3d = {
    .name = "ifs3d",
    .summary = "draws views of three-dimensional fractals, as ExFractalDB (CVPR 2022)",
    .id = FORMULA_IFS3D,
    .family = FAMILY_IFS3D,
    .targets = TARGET_LABEL | TARGET_POINTS,
    .parameters = parameters,
    .parameter_count = COUNT_OF(parameters),
    .mean_key = "threshold",
    .id_most = UINT32_MAX,
    .classes = 1000,
    .presets = presets,
    .check = ifs_check,
    .canvas = 224,
    .ifs = &circle_rules,
    .unpublished = "the scripts seed none of their random numbers",
};
