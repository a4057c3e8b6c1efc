/* The formula `ifs3d`: views of three-dimensional fractals (MV-FractalDB, ExFractalDB, 3D-OFDB,
 * PC-FractalDB; docs/formulas.md): their orbits, views and point clouds on the CPU, and the search of the
 * classes. */
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
#include "synth/class.h"
#include "synth/formula.h"
#include "synth/ifs_classes.h"
#include "synth/input.h"
#include "synth/published.h"

#if defined(__x86_64__) && defined(__linux__) && !defined(FDSL_SANITIZED) && !defined(__clang__)
#define VECTOR_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define VECTOR_CLONES
#endif

/* ---- The definition ---- */

static uint32_t choice_at(const struct ifs3d_system *system, struct philox_key key, uint32_t step)
{
    return ifs3d_choice(system->bounds, philox_word(ifs3d_choice_block(key, step / 4), step % 4));
}

/* The coefficients of all maps of a drawing. */
struct maps {
    double of[IFS_MAPS_MAX][IFS3D_COEFFICIENTS];
};

static void weigh(const struct ifs3d_system *system, uint32_t row, struct maps *maps)
{
    for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
        for (uint32_t i = 0; i < IFS3D_COEFFICIENTS; i++)
            maps->of[m][i] = ifs3d_coefficient(system, ifs3d_weight(row), m, i);
}

static struct ifs3d_frame walk_all(const struct ifs3d_system *system, uint32_t row, struct philox_key key,
                                   struct ifs3d_point *points)
{
    struct ifs3d_extent all = ifs3d_no_extent();
    struct maps maps;
    weigh(system, row, &maps);
    for (uint32_t walk = 0; walk < IFS3D_WALKS; walk++) {
        const struct ifs3d_span span = ifs3d_span(walk);
        struct ifs3d_extent extent = ifs3d_no_extent();
        struct ifs3d_point point = {{0, 0, 0}};
        for (uint32_t step = span.begin; step < span.end; step++) {
            point = ifs3d_step(maps.of[choice_at(system, key, step)], point);
            if (step < span.first)
                continue;
            points[step] = point;
            ifs3d_extend(&extent, point);
        }
        ifs3d_join(&all, &extent);
    }
    return ifs3d_frame(&all);
}

void ifs3d_walk(const struct ifs3d_system *system, uint32_t row, struct philox_key key,
                struct ifs3d_point *scratch, struct ifs3d_points *points)
{
    struct ifs3d_frame frame = walk_all(system, row, key, scratch);
    if (!frame.drawn && row != IFS3D_IDENTITY)
        frame = walk_all(system, IFS3D_IDENTITY, key, scratch);
    points->count = frame.drawn ? IFS3D_POINTS : 0;
    for (uint32_t i = 0; i < points->count; i++)
        for (int axis = 0; axis < 3; axis++)
            points->at[i][axis] = ifs3d_coordinate(&frame, scratch[i], axis);
}

enum { RUN = 1024 }; /* points whose pixels are computed at once */

VECTOR_CLONES static void find_pixels(const struct ifs3d_camera *camera, const float (*restrict points)[3],
                                      uint32_t count, uint32_t res, uint32_t *restrict pixels)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct ifs3d_pixel pixel = ifs3d_pixel(camera, points[i], res);
        pixels[i] = pixel.x == UINT32_MAX ? UINT32_MAX : pixel.y * res + pixel.x;
    }
}

void ifs3d_view(const struct ifs_rules *rules, const struct ifs3d_points *points, struct philox_key key,
                uint32_t view, uint32_t res, uint8_t *canvas)
{
    const struct ifs3d_camera camera = ifs3d_camera(rules, key, view);
    uint32_t pixels[RUN];
    memset(canvas, 0, (size_t)res * res);
    for (uint32_t first = 0; first < points->count; first += RUN) {
        const uint32_t count = points->count - first < RUN ? points->count - first : RUN;
        find_pixels(&camera, points->at + first, count, res, pixels);
        for (uint32_t i = 0; i < count; i++)
            if (pixels[i] != UINT32_MAX)
                canvas[pixels[i]] = IFS3D_GRAY;
    }
}

void ifs3d_cloud(const struct ifs3d_points *own, const struct ifs3d_points *other, float *cloud)
{
    const size_t own_values = 3 * IFS3D_CLOUD_OWN, all_values = 3 * IFS3D_CLOUD;
    memset(cloud, 0, all_values * sizeof *cloud);
    if (own->count)
        memcpy(cloud, own->at, own_values * sizeof *cloud);
    if (other->count)
        memcpy(cloud + own_values, other->at, (all_values - own_values) * sizeof *cloud);
}

/* The memory of synth_draw_solid(). */
struct scratch {
    struct ifs3d_points own, other;
    struct ifs3d_point walked[IFS3D_POINTS];
};

size_t synth_solid_scratch_bytes(void)
{
    return sizeof(struct scratch);
}

void synth_draw_solid(const struct synth *synth, struct synth_image image, void *scratch, uint8_t *canvas,
                      float *cloud)
{
    struct scratch *own = scratch;
    const struct ifs_instance shown = ifs_instance(&synth->ifs, image.instance);
    const struct philox_key key = synth_solid_key(synth, image.class_index, shown);
    const uint32_t row = ifs3d_row(&synth->ifs, shown);
    ifs3d_walk(&synth->solids[image.class_index], row, key, own->walked, &own->own);
    ifs3d_view(&synth->ifs, &own->own, key, shown.flip, synth->res, canvas);
    if (!cloud)
        return;
    const uint32_t other = ifs3d_partner(key, image.class_index, synth->class_count);
    ifs3d_walk(&synth->solids[other], row, synth_solid_key(synth, other, shown), own->walked, &own->other);
    ifs3d_cloud(&own->own, &own->other, cloud);
}

/* ---- Several walks at a time ---- */

enum { CHOICES = (IFS3D_POINTS + 3) / 4 * 4 };

/* All walks of a drawing. Coefficients of a map that does not exist are 0. */
struct walks {
    double by_coefficient[IFS3D_COEFFICIENTS][IFS_MAPS_MAX + 1];
    double x[IFS3D_WALKS], y[IFS3D_WALKS], z[IFS3D_WALKS];
    bool replaced; /* the weights, because a coordinate overflows */
    uint8_t choices[CHOICES];
    struct ifs3d_point points[IFS3D_WALKS * IFS3D_LENGTH];
};

VECTOR_CLONES static void choose_maps(const struct ifs3d_system *system, struct philox_key key,
                                      uint8_t *restrict choices)
{
    for (uint32_t block = 0; block < CHOICES / 4; block++) {
        const struct philox_block words = ifs3d_choice_block(key, block);
        for (uint32_t i = 0; i < 4; i++)
            choices[4 * block + i] = (uint8_t)ifs3d_choice(system->bounds, words.word[i]);
    }
}

/* Makes all steps. The walks move together: at step s, walk w makes the orbit's step w * IFS3D_LENGTH + s.
 * Walks whose step would be before the first one wait. */
VECTOR_CLONES static void make_steps(struct walks *restrict walks)
{
    const double(*restrict by)[IFS_MAPS_MAX + 1] = walks->by_coefficient;
    for (int64_t s = -IFS3D_BURN; s < IFS3D_LENGTH; s++) {
        const int first = s < 0 ? (int)((-s + IFS3D_LENGTH - 1) / IFS3D_LENGTH) : 0;
        const int end = s + (IFS3D_WALKS - 1) * IFS3D_LENGTH < IFS3D_POINTS ? IFS3D_WALKS : IFS3D_WALKS - 1;
        for (int w = first; w < end; w++) {
            const uint32_t c = walks->choices[s + (int64_t)w * IFS3D_LENGTH];
            const double x = walks->x[w], y = walks->y[w], z = walks->z[w];
            walks->x[w] = ((x * by[0][c] + y * by[1][c]) + z * by[2][c]) + by[9][c];
            walks->y[w] = ((x * by[3][c] + y * by[4][c]) + z * by[5][c]) + by[10][c];
            walks->z[w] = ((x * by[6][c] + y * by[7][c]) + z * by[8][c]) + by[11][c];
        }
        for (int w = 0; s >= 0 && w < end; w++)
            walks->points[s + (int64_t)w * IFS3D_LENGTH] =
                (struct ifs3d_point){{walks->x[w], walks->y[w], walks->z[w]}};
    }
}

static struct ifs3d_frame walk_together(const struct ifs3d_system *system, uint32_t row, struct walks *walks)
{
    const struct ifs3d_weight weight = ifs3d_weight(row);
    struct ifs3d_extent all = ifs3d_no_extent();
    memset(walks->by_coefficient, 0, sizeof walks->by_coefficient);
    memset(walks->x, 0, sizeof walks->x);
    memset(walks->y, 0, sizeof walks->y);
    memset(walks->z, 0, sizeof walks->z);
    for (uint32_t m = 0; m < system->maps; m++)
        for (uint32_t i = 0; i < IFS3D_COEFFICIENTS; i++)
            walks->by_coefficient[i][m] = ifs3d_coefficient(system, weight, m, i);
    make_steps(walks);
    for (uint32_t walk = 0; walk < IFS3D_WALKS; walk++) {
        const struct ifs3d_span span = ifs3d_span(walk);
        struct ifs3d_extent extent = ifs3d_no_extent();
        for (uint32_t i = span.first; i < span.end; i++)
            ifs3d_extend(&extent, walks->points[i]);
        ifs3d_join(&all, &extent);
    }
    return ifs3d_frame(&all);
}

void ifs3d_walk_fast(const struct ifs3d_system *system, uint32_t row, struct philox_key key, void *scratch,
                     struct ifs3d_points *points)
{
    struct walks *walks = scratch;
    choose_maps(system, key, walks->choices);
    struct ifs3d_frame frame = walk_together(system, row, walks);
    walks->replaced = !frame.drawn && row != IFS3D_IDENTITY;
    if (walks->replaced)
        frame = walk_together(system, IFS3D_IDENTITY, walks);
    points->count = frame.drawn ? IFS3D_POINTS : 0;
    for (uint32_t i = 0; i < points->count; i++)
        for (int axis = 0; axis < 3; axis++)
            points->at[i][axis] = ifs3d_coordinate(&frame, walks->points[i], axis);
}

size_t ifs3d_scratch_bytes(void)
{
    return sizeof(struct walks);
}

/* ---- The report of --describe ---- */

/* The drawings of a set, of which a task examines those of a class. */
struct looking {
    const struct synth *synth;
    struct progress progress;
    float *lit;             /* per drawing, the share of set pixels */
    _Atomic uint64_t dark;  /* drawings without points */
    _Atomic uint64_t grown; /* drawings that overflow, so that they have the weights of row IFS3D_IDENTITY */
    _Atomic bool failed;
};

static void look_at_class(void *context, uint64_t c, int thread)
{
    struct looking *looking = context;
    const struct synth *synth = looking->synth;
    const uint32_t weights = ifs_orbits(&synth->ifs);
    const size_t pixels = synth_image_bytes(synth);
    FREED struct ifs3d_points *points = malloc(sizeof *points);
    FREED struct walks *walks = aligned_alloc(64, (sizeof *walks + 63) / 64 * 64);
    FREED uint8_t *canvas = malloc(pixels);
    if (!points || !walks || !canvas) {
        looking->failed = true;
        return;
    }
    for (uint32_t w = 0; w < weights; w++) {
        const struct ifs_instance shown = ifs_instance(&synth->ifs, (uint64_t)w * synth->ifs.flips);
        const struct philox_key key = synth_solid_key(synth, (uint32_t)c, shown);
        const uint32_t row = ifs3d_row(&synth->ifs, shown);
        size_t lit = 0;
        ifs3d_walk_fast(&synth->solids[c], row, key, walks, points);
        ifs3d_view(&synth->ifs, points, key, 0, synth->res, canvas);
        for (size_t i = 0; i < pixels; i++)
            lit += canvas[i] != 0;
        looking->lit[c * weights + w] = (float)lit / (float)pixels;
        looking->dark += points->count == 0;
        looking->grown += walks->replaced;
    }
    if (thread == 0 && progress_due(&looking->progress))
        progress_show(&looking->progress, "computing orbits: class %u of %u", (unsigned)c,
                      (unsigned)synth->class_count);
}

enum status synth_describe_solids(const char *name, const struct synth *synth, FILE *stream)
{
    const uint32_t weights = ifs_orbits(&synth->ifs), count = synth->class_count;
    const size_t all = (size_t)count * weights;
    struct looking looking = {.synth = synth};
    size_t maps = 0;
    FREED float *lit = looking.lit = malloc(all * sizeof *lit);
    TRY(ALLOCATED(lit, "out of memory for the drawings of %u classes", (unsigned)count));
    progress_begin(&looking.progress, true);
    parallel_for(parallel_threads(), count, look_at_class, &looking);
    progress_clear(&looking.progress);
    TRY(ALLOCATED(!looking.failed, "out of memory for orbits; lower --threads or --res"));
    for (uint32_t c = 0; c < count; c++)
        maps += synth->solids[c].maps;
    fprintf(stream,
            "%s: %u classes of %.2f maps on average, %u weights per class, %u views of %u points, %u x %u "
            "pixels\n",
            name, (unsigned)count, (double)maps / count, (unsigned)weights, (unsigned)synth->ifs.flips,
            (unsigned)IFS3D_POINTS, (unsigned)synth->res, (unsigned)synth->res);
    fprintf(stream, "overflow: %llu drawings (%.1f %%), drawn without weights; without points: %llu\n",
            (unsigned long long)looking.grown, 100.0 * (double)looking.grown / (double)all,
            (unsigned long long)looking.dark);
    ifs_print_shares("set pixels of view 0", lit, all, stream);
    return STATUS_OK;
}

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
