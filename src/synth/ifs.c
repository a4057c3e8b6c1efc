/* Images of iterated function systems (ifs.h) on the host, and the bank of their orbits. */
#include "synth/ifs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/parallel.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/checksum.h"
#include "machine/host.h"
#include "synth/formula.h"
#include "synth/published.h"

/* ---- Classes ---- */

/* The published weights: factors of a, b, c, d, e, f. Rows 0 .. 24 of the file weights_0.4.csv of the
 * published script: each but row 2 scales one coefficient. */
static const double ifs_weights[IFS_WEIGHTS][6] = {
    {0.2, 1, 1, 1, 1, 1}, {0.6, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1},   {1.4, 1, 1, 1, 1, 1},
    {1.8, 1, 1, 1, 1, 1}, {1, 0.2, 1, 1, 1, 1}, {1, 0.6, 1, 1, 1, 1}, {1, 1.4, 1, 1, 1, 1},
    {1, 1.8, 1, 1, 1, 1}, {1, 1, 0.2, 1, 1, 1}, {1, 1, 0.6, 1, 1, 1}, {1, 1, 1.4, 1, 1, 1},
    {1, 1, 1.8, 1, 1, 1}, {1, 1, 1, 0.2, 1, 1}, {1, 1, 1, 0.6, 1, 1}, {1, 1, 1, 1.4, 1, 1},
    {1, 1, 1, 1.8, 1, 1}, {1, 1, 1, 1, 0.2, 1}, {1, 1, 1, 1, 0.6, 1}, {1, 1, 1, 1, 1.4, 1},
    {1, 1, 1, 1, 1.8, 1}, {1, 1, 1, 1, 1, 0.2}, {1, 1, 1, 1, 1, 0.6}, {1, 1, 1, 1, 1, 1.4},
    {1, 1, 1, 1, 1, 1.8}};

void ifs_system(const struct class_row *row, struct ifs_system *system)
{
    memset(system, 0, sizeof *system);
    system->id = row->id;
    system->maps = (uint32_t)row->value[0];
    for (uint32_t m = 0; m < system->maps; m++)
        memcpy(system->map[m], &row->value[1 + IFS_MAP_VALUES * m], sizeof system->map[m]);
}

struct ifs_system ifs_weighted(const struct ifs_rules *rules, const struct ifs_system *system,
                               uint32_t weight)
{
    struct ifs_system weighted = *system;
    const uint32_t row = ifs_weight_row(system, weight);
    for (uint32_t m = 0; rules->weights && m < weighted.maps; m++)
        for (int i = 0; i < 6; i++)
            weighted.map[m][i] *= ifs_weights[row][i];
    return weighted;
}

enum status ifs_check(const struct formula *formula, const struct class_row *row)
{
    const uint32_t maps = (uint32_t)row->value[0];
    const size_t count = formula->parameter_count, values = (count - 1) / (size_t)formula->parameters[0].most;
    double sum = 0;
    for (uint32_t m = 1; m <= maps; m++)
        sum += row->value[values * m];
    for (size_t i = 1 + values * maps; i < count; i++)
        if (row->value[i] != 0)
            return status_set(STATUS_USAGE, "%s is %.9g, but the class has %u maps, so it must be 0",
                              formula->parameters[i].name, row->value[i], maps);
    return fabs(sum - 1) <= 1e-6
               ? STATUS_OK
               : status_set(STATUS_USAGE, "the probabilities p1 to p%u have the sum %.9g; it must be 1", maps,
                            sum);
}

/* ---- Random choices ---- */

void ifs_uniforms(uint32_t count, double *uniforms)
{
    struct twister twister;
    twister_seed(&twister, 100);
    for (uint32_t i = 0; i < count; i++)
        uniforms[i] = twister_random(&twister);
}

/* Counts the sums of probabilities that are below u. They ascend, so this is the first one that is not. */
void ifs_choices(const struct ifs_system *system, const double *uniforms, uint32_t count, uint8_t *choices)
{
    double sums[IFS_MAPS_MAX], sum = 0;
    for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
        sums[m] = m < system->maps ? sum += system->map[m][6] : INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t choice = 0;
        for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
            choice += uniforms[i] > sums[m];
        choices[i] = choice < system->maps ? (uint8_t)choice : IFS_REPEAT;
    }
}

/* ---- The definition ---- */

static void walk(const struct ifs_system *system, const double *uniforms, uint32_t points,
                 struct ifs_point *orbit)
{
    orbit[0] = (struct ifs_point){0, 0};
    for (uint32_t i = 0; i + 1 < points; i++)
        orbit[i + 1] = ifs_step(system, ifs_choice(system, uniforms[i]), orbit[i]);
}

/* Returns the number of points that are drawn, and the extent of both axes. */
static uint32_t measure(const struct ifs_point *orbit, uint32_t points, struct ifs_axis axes[2])
{
    uint32_t first = 0;
    while (first < points && !isnan(orbit[first].x))
        first++;
    const uint32_t left = ifs_drawn(first, points);
    for (first = 0; first < left && !isnan(orbit[first].y);)
        first++;
    const uint32_t drawn = ifs_drawn(first, left);
    struct ifs_point least = {0, 0}, most = {0, 0};
    for (uint32_t i = 0; i < drawn; i++) {
        least = (struct ifs_point){fmin(least.x, orbit[i].x), fmin(least.y, orbit[i].y)};
        most = (struct ifs_point){fmax(most.x, orbit[i].x), fmax(most.y, orbit[i].y)};
    }
    axes[0] = ifs_axis(least.x, most.x);
    axes[1] = ifs_axis(least.y, most.y);
    return drawn;
}

/* Sets pixel (x, y) of the drawing, whose row 0 is the lowest one of flip 0. */
static void set_pixel(uint8_t *canvas, uint32_t res, uint32_t flip, uint32_t x, uint32_t y, uint8_t gray)
{
    const uint32_t row = flip & 1 ? y : res - 1 - y, column = flip & 2 ? res - 1 - x : x;
    canvas[(size_t)row * res + column] = gray;
}

/* Pastes the square of a cell over what is there, ones and zeros. */
static void paste(uint8_t *canvas, uint32_t res, uint32_t flip, uint32_t x, uint32_t y, uint32_t mask)
{
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t j = 0; j < 3; j++)
            set_pixel(canvas, res, flip, x + 1 + j, y + 1 + i, mask >> (8 - 3 * i - j) & 1 ? IFS_GRAY : 0);
}

void ifs_draw(const struct ifs_rules *rules, const struct ifs_system *system, uint64_t seed,
              uint64_t instance, bool points, uint32_t res, const double *uniforms, struct ifs_point *scratch,
              uint8_t *canvas)
{
    const struct ifs_instance shown = ifs_instance(rules, instance);
    const struct ifs_system orbit = ifs_weighted(rules, system, shown.weight);
    const struct philox_key key = ifs_mask_key(rules, seed, system->id, shown.drawing);
    struct ifs_axis axes[2];
    walk(&orbit, uniforms, rules->points, scratch);
    const uint32_t drawn = measure(scratch, rules->points, axes);
    memset(canvas, 0, (size_t)res * res);
    for (uint32_t i = 0; i < drawn; i++) {
        const uint32_t x = ifs_cell(&axes[0], scratch[i].x, res), y = ifs_cell(&axes[1], scratch[i].y, res);
        const uint32_t cell = y * res + x;
        if (points)
            set_pixel(canvas, res, shown.flip, x, y, IFS_GRAY);
        else
            paste(canvas, res, shown.flip, x, y, ifs_mask_of(ifs_mask_block(key, cell / 8), cell));
    }
}

/* ---- Groups of orbits ---- */

/* Orbits of a class share their choices, so vectors compute several weights at once, with the arithmetic of
 * ifs_step() and ifs_cell(), operation by operation. Weights are the lanes of a vector. */
enum {
    LANES = 8,                /* of a vector */
    VECTORS = 2,              /* of a group */
    GROUP = LANES * VECTORS,  /* orbits of a group */
    CHUNK = 64,               /* points whose cells are computed at once */
    ALIGNMENT = IFS_ALIGNMENT /* bytes of a vector */
};

typedef double wide __attribute__((vector_size(LANES * sizeof(double)), aligned(ALIGNMENT)));
typedef int64_t wide_mask __attribute__((vector_size(LANES * sizeof(double)), aligned(ALIGNMENT)));
typedef int32_t narrow __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(ALIGNMENT / 2)));
typedef uint32_t numbers __attribute__((vector_size(LANES * sizeof(uint32_t)), aligned(ALIGNMENT / 2)));

#if defined(__x86_64__) && defined(__linux__) && !defined(FDSL_SANITIZED) && !defined(__clang__)
#define VECTOR_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define VECTOR_CLONES
#endif
#define INLINED static inline __attribute__((always_inline))

/* Sets `a` to `b` in the lanes in which the comparison of vectors is true. */
#define REPLACE_IF(compared, a, b) \
    ((a) = (wide)(((wide_mask)(b) & (compared)) | ((wide_mask)(a) & ~(compared))))

enum { X, Y, AXES };

struct group {
    wide map[IFS_MAPS_MAX][6][VECTORS]; /* weighted coefficients */
    wide point[AXES][VECTORS];          /* the current points */
    wide least[AXES][VECTORS], most[AXES][VECTORS];
    wide low[AXES][VECTORS], range[AXES][VECTORS], inverse[AXES][VECTORS]; /* of struct ifs_axis */
    wide chunk[CHUNK][AXES][VECTORS];                                      /* points */
    numbers cells[CHUNK][VECTORS];                                         /* their cells */
    uint32_t drawn[GROUP];                                                 /* points that are drawn */
};

/* Moves all points. The map is constant; its address is that of the chosen map. */
INLINED void step(const wide map[6][VECTORS], int vectors, wide x[VECTORS], wide y[VECTORS])
{
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
        const wide old = x[v];
        x[v] = (old * map[0][v] + y[v] * map[1][v]) + map[4][v];
        y[v] = (old * map[2][v] + y[v] * map[3][v]) + map[5][v];
    }
}

/* Walks to the last point, and finds the extents. */
INLINED void walk_group(struct group *group, int vectors, const uint8_t *choices, uint32_t steps)
{
    const wide zero = {0};
    wide x[VECTORS], y[VECTORS], least[AXES][VECTORS], most[AXES][VECTORS];
    for (int v = 0; v < vectors; v++)
        x[v] = y[v] = least[X][v] = least[Y][v] = most[X][v] = most[Y][v] = zero;
    for (uint32_t i = 0; i < steps; i++) {
        if (choices[i] == IFS_REPEAT)
            continue;
        step(group->map[choices[i]], vectors, x, y);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            REPLACE_IF(x[v] < least[X][v], least[X][v], x[v]);
            REPLACE_IF(x[v] > most[X][v], most[X][v], x[v]);
            REPLACE_IF(y[v] < least[Y][v], least[Y][v], y[v]);
            REPLACE_IF(y[v] > most[Y][v], most[Y][v], y[v]);
        }
    }
    for (int v = 0; v < vectors; v++) {
        group->point[X][v] = x[v];
        group->point[Y][v] = y[v];
        for (int axis = 0; axis < AXES; axis++) {
            group->least[axis][v] = least[axis][v];
            group->most[axis][v] = most[axis][v];
        }
    }
}

/* Stores the current points and those of the next steps, `count` in all, and walks one step further.
 * `choices` are those of these `count` steps. */
INLINED void fill_chunk(struct group *group, int vectors, const uint8_t *choices, uint32_t count)
{
    wide x[VECTORS], y[VECTORS];
    for (int v = 0; v < vectors; v++) {
        x[v] = group->point[X][v];
        y[v] = group->point[Y][v];
    }
    for (uint32_t i = 0; i < count; i++) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            group->chunk[i][X][v] = x[v];
            group->chunk[i][Y][v] = y[v];
        }
        if (choices[i] != IFS_REPEAT)
            step(group->map[choices[i]], vectors, x, y);
    }
    for (int v = 0; v < vectors; v++) {
        group->point[X][v] = x[v];
        group->point[Y][v] = y[v];
    }
}

/* Computes the cells of a chunk: by division if `exact`, else as ifs_cell_fast(). Returns whether no place
 * was near an integer or not a number, so that the cells are those of ifs_cell(). Compares the distances of
 * places from the middle between two integers as bits, of which those of NaN are the largest. */
INLINED bool chunk_cells(struct group *group, int vectors, uint32_t count, uint32_t res, bool exact)
{
    const wide zero = {0}, side = zero + (double)(res - 2 * IFS_PAD), pad = zero + (double)IFS_PAD;
    const wide limit = zero + (0.5 - IFS_NEAR);
    const wide_mask magnitude = (wide_mask){0} + INT64_MAX;
    wide_mask farthest[AXES][VECTORS] = {0}; /* several, so that no comparison waits for another */
    for (uint32_t i = 0; i < count; i++) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            narrow cell[AXES];
            for (int axis = 0; axis < AXES; axis++) {
                const wide distance = group->chunk[i][axis][v] - group->low[axis][v];
                wide place = exact ? (distance / group->range[axis][v]) * side + pad
                                   : (distance * group->inverse[axis][v]) * side + pad;
                if (exact)
                    place = (wide)((wide_mask)place & (place >= zero));
                cell[axis] = __builtin_convertvector(place, narrow);
                const wide fraction = place - __builtin_convertvector(cell[axis], wide);
                const wide_mask bits = (wide_mask)(fraction - 0.5) & magnitude;
                const wide_mask farther = bits > farthest[axis][v];
                farthest[axis][v] = (bits & farther) | (farthest[axis][v] & ~farther);
            }
            group->cells[i][v] =
                (numbers)cell[Y] * res + (numbers)cell[X]; /* of points that are not drawn, any */
        }
    }
    bool far = true;
    for (int axis = 0; axis < AXES; axis++)
        for (int v = 0; v < vectors; v++)
            for (int lane = 0; lane < LANES; lane++)
                far = far && farthest[axis][v][lane] < ((wide_mask)limit)[lane];
    return far;
}

/* Computes the cells of the next `count` points. */
INLINED void next_cells(struct group *group, int vectors, const uint8_t *choices, uint32_t count,
                        uint32_t res)
{
    fill_chunk(group, vectors, choices, count);
    if (!chunk_cells(group, vectors, count, res, false))
        chunk_cells(group, vectors, count, res, true);
}

/* Computes the cells of the next `count` points of a group of one orbit. The lanes of the vectors are
 * consecutive points; the extents of all lanes are those of the orbit. */
VECTOR_CLONES static void cells_single(struct group *group, const uint8_t *choices, uint32_t count,
                                       uint32_t res)
{
    double x = group->point[X][0][0], y = group->point[Y][0][0];
    for (uint32_t i = 0; i < CHUNK; i++) { /* after the last point, its copies */
        group->chunk[i / LANES][X][0][i % LANES] = x;
        group->chunk[i / LANES][Y][0][i % LANES] = y;
        if (i >= count || choices[i] == IFS_REPEAT)
            continue;
        const wide(*map)[VECTORS] = group->map[choices[i]];
        const double old = x;
        x = (old * map[0][0][0] + y * map[1][0][0]) + map[4][0][0];
        y = (old * map[2][0][0] + y * map[3][0][0]) + map[5][0][0];
    }
    group->point[X][0][0] = x;
    group->point[Y][0][0] = y;
    if (!chunk_cells(group, 1, CHUNK / LANES, res, false))
        chunk_cells(group, 1, CHUNK / LANES, res, true);
}

VECTOR_CLONES static void walk_one(struct group *group, const uint8_t *choices, uint32_t steps)
{
    walk_group(group, 1, choices, steps);
}

VECTOR_CLONES static void walk_all(struct group *group, const uint8_t *choices, uint32_t steps)
{
    walk_group(group, VECTORS, choices, steps);
}

VECTOR_CLONES static void cells_one(struct group *group, const uint8_t *choices, uint32_t count, uint32_t res)
{
    next_cells(group, 1, choices, count, res);
}

VECTOR_CLONES static void cells_all(struct group *group, const uint8_t *choices, uint32_t count, uint32_t res)
{
    next_cells(group, VECTORS, choices, count, res);
}

/* ---- The bank ---- */

struct ifs_bank {
    struct ifs_rules rules;
    const struct ifs_system *systems;
    const double *uniforms;
    uint64_t count; /* orbits of all systems */
    uint32_t res;
    bool points;
    pthread_mutex_t mutex; /* held while orbits are computed */
    struct ifs_bank_facts facts;
    void *file; /* the mapping that has all maps; NULL: each map was allocated */
    size_t file_bytes;
    struct guard guard;      /* of the mapping: if the file is truncated, lost pages read as zeros */
    int fd;                  /* of this file */
    struct timespec time;    /* its time of modification when it was verified */
    struct ifs_orbit *known; /* facts of each orbit that is computed */
    uint8_t *maps[];         /* of each orbit; NULL: not computed */
};

/* Memory of one thread. */
struct builder {
    struct group *group;
    uint8_t *choices;          /* of all points; the last point has none */
    struct ifs_point *scratch; /* the points of an orbit that overflows */
    uint32_t *rasters, *row;   /* `width` rasters; one row of pixels */
};

/* One call of ifs_bank_need(). */
struct order {
    struct ifs_bank *bank;
    uint64_t *orbits; /* those that are missing, in ascending order */
    uint8_t **maps;   /* their new maps */
    size_t count, groups;
    size_t *first;  /* index of the first orbit of each group, and at the end, `count` */
    uint32_t width; /* maximum number of orbits per group */
    int threads;
    struct builder *builders;
};

/* A raster holds for each cell (point + 1) * OWNERS for the last point in it, or 0. The square of a cell ends
 * three rows and columns after it. The last IFS_PAD columns are empty, so the end of a row serves as margin
 * of the next one. */
enum { OWNERS = 16 };

static size_t raster_margin(uint32_t res)
{
    return 3 * (size_t)res + 3;
}

static size_t raster_words(uint32_t res)
{
    return raster_margin(res) + (size_t)res * res;
}

/* Draws orbits on rasters with margin, from the first point on. */
static void draw_rasters(const struct ifs_bank *bank, const struct builder *builder, uint32_t count)
{
    const uint32_t points = bank->rules.points, res = bank->res;
    struct group *group = builder->group;
    memset(builder->rasters, 0, count * raster_words(res) * sizeof *builder->rasters);
    for (uint32_t first = 0; first < points; first += CHUNK) {
        const uint32_t left = points - first < CHUNK ? points - first : CHUNK;
        (count > LANES ? cells_all
         : count > 1   ? cells_one
                       : cells_single)(group, builder->choices + first, left, res);
        for (uint32_t lane = 0; lane < count; lane++) {
            uint32_t *raster = builder->rasters + lane * raster_words(res) + raster_margin(res);
            const uint32_t drawn = group->drawn[lane] > first ? group->drawn[lane] - first : 0;
            for (uint32_t i = 0; i < left && i < drawn; i++)
                raster[count > 1 ? group->cells[i][lane / LANES][lane % LANES]
                                 : group->cells[i / LANES][0][i % LANES]] = (first + i + 1) * OWNERS;
        }
    }
}

/* Writes a row of an owner map. `row` is row y of the drawing in a raster. */
VECTOR_CLONES static void own_row(const uint32_t *restrict row, uint32_t res, uint32_t *restrict latest,
                                  uint8_t *restrict map)
{
    const uint32_t *const up1 = row - res, *const up2 = up1 - res, *const up3 = up2 - res;
    for (uint32_t x = 0; x < res; x++) {
        uint32_t most = up1[(ptrdiff_t)x - 1] | 8;
#define CONTEND(cell, owner) most = ((cell) | (owner)) > most ? ((cell) | (owner)) : most
        CONTEND(up1[(ptrdiff_t)x - 2], 7);
        CONTEND(up1[(ptrdiff_t)x - 3], 6);
        CONTEND(up2[(ptrdiff_t)x - 1], 5);
        CONTEND(up2[(ptrdiff_t)x - 2], 4);
        CONTEND(up2[(ptrdiff_t)x - 3], 3);
        CONTEND(up3[(ptrdiff_t)x - 1], 2);
        CONTEND(up3[(ptrdiff_t)x - 2], 1);
        CONTEND(up3[(ptrdiff_t)x - 3], 0);
#undef CONTEND
        latest[x] = most < OWNERS ? IFS_NO_OWNER : most % OWNERS;
    }
    for (uint32_t x = 0; x + 1 < res; x += 2)
        map[x / 2] = (uint8_t)(latest[x] | latest[x + 1] << 4);
    if (res % 2)
        map[res / 2] = (uint8_t)(latest[res - 1] | IFS_NO_OWNER << 4);
}

VECTOR_CLONES static uint32_t count_cells(const uint32_t *raster, uint32_t res)
{
    uint32_t cells = 0;
    for (size_t i = 0; i < raster_words(res); i++)
        cells += raster[i] != 0;
    return cells;
}

/* Converts a raster to a map. */
static void finish_map(const struct ifs_bank *bank, const struct builder *builder, const uint32_t *raster,
                       uint8_t *map)
{
    const uint32_t res = bank->res;
    const size_t pitch = ifs_map_pitch(bank->points, res);
    memset(map, bank->points ? 0 : IFS_NO_OWNER << 4 | IFS_NO_OWNER, ifs_map_bytes(bank->points, res));
    for (uint32_t y = 0; y < res; y++, map += pitch) {
        const uint32_t *row = raster + raster_margin(res) + (size_t)(res - 1 - y) * res;
        for (uint32_t x = 0; bank->points && x < res; x++)
            map[x / 8] |= (uint8_t)((row[x] != 0) << x % 8);
        if (!bank->points)
            own_row(row, res, builder->row, map);
    }
}

/* Returns how many lanes compute `count` orbits. Those without an orbit of their own copy lane 0: if they
 * were empty, chunk_cells() would compute every chunk twice. */
static uint32_t lanes_of(uint32_t count)
{
    return count > LANES ? GROUP : LANES;
}

static void set_axes(struct group *group, uint32_t lane, const struct ifs_axis axes[AXES])
{
    for (int axis = 0; axis < AXES; axis++) {
        group->low[axis][lane / LANES][lane % LANES] = axes[axis].low;
        group->range[axis][lane / LANES][lane % LANES] = axes[axis].range;
        group->inverse[axis][lane / LANES][lane % LANES] = axes[axis].inverse;
    }
}

/* Finds the extents of the orbits of a group, and how many of their points are drawn. */
static void measure_group(const struct ifs_bank *bank, const struct builder *builder,
                          const struct ifs_system *systems, uint32_t count)
{
    const uint32_t points = bank->rules.points;
    struct group *group = builder->group;
    struct ifs_axis axes[AXES];
    (count > LANES ? walk_all : walk_one)(group, builder->choices, points - 1);
    for (uint32_t lane = count; lane-- > 0;) { /* lane 0 last, for the copies */
        const uint32_t v = lane / LANES, l = lane % LANES;
        group->drawn[lane] = points;
        for (int axis = 0; axis < AXES; axis++)
            axes[axis] = ifs_axis(group->least[axis][v][l], group->most[axis][v][l]);
        if (isnan(group->point[X][v][l]) || isnan(group->point[Y][v][l])) { /* once NaN, always NaN */
            walk(&systems[lane], bank->uniforms, points, builder->scratch);
            group->drawn[lane] = measure(builder->scratch, points, axes);
        }
        set_axes(group, lane, axes);
    }
    for (uint32_t lane = count; lane < lanes_of(count); lane++)
        set_axes(group, lane, axes);
}

/* Computes the maps of a group. */
static void build_group(void *context, uint64_t task, int thread)
{
    const struct order *order = context;
    const struct ifs_bank *bank = order->bank;
    const struct builder *builder = &order->builders[thread];
    const size_t first = order->first[task];
    const uint32_t count = (uint32_t)(order->first[task + 1] - first), orbits = ifs_orbits(&bank->rules);
    const struct ifs_system *system = &bank->systems[order->orbits[first] / orbits];
    struct ifs_system systems[GROUP];
    memset(builder->group, 0, sizeof *builder->group);
    ifs_choices(system, bank->uniforms, bank->rules.points - 1, builder->choices);
    builder->choices[bank->rules.points - 1] = IFS_REPEAT;
    for (uint32_t lane = 0; lane < lanes_of(count); lane++) {
        const uint64_t orbit = order->orbits[first + (lane < count ? lane : 0)];
        systems[lane] = ifs_weighted(&bank->rules, system, (uint32_t)(orbit % orbits));
        for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
            for (int i = 0; i < 6; i++)
                builder->group->map[m][i][lane / LANES][lane % LANES] = systems[lane].map[m][i];
    }
    measure_group(bank, builder, systems, count);
    memset(builder->group->point, 0, sizeof builder->group->point);
    draw_rasters(bank, builder, count);
    for (uint32_t lane = 0; lane < count; lane++) {
        const uint32_t *raster = builder->rasters + lane * raster_words(bank->res);
        bank->known[order->orbits[first + lane]] = (struct ifs_orbit){
            count_cells(raster, bank->res), builder->group->drawn[lane] < bank->rules.points};
        finish_map(bank, builder, raster, order->maps[first + lane]);
    }
}

enum status ifs_bank_open(const struct ifs_rules *rules, const struct ifs_system *systems, uint32_t count,
                          const double *uniforms, uint32_t res, bool points, struct ifs_bank **bank)
{
    const uint64_t orbits = (uint64_t)count * ifs_orbits(rules);
    *bank = calloc(1, sizeof **bank + orbits * sizeof *(*bank)->maps);
    if (*bank && !((*bank)->known = calloc(orbits, sizeof *(*bank)->known))) {
        free(*bank);
        *bank = NULL;
    }
    TRY(ALLOCATED(*bank, "out of memory for the orbits of %u classes; lower %s", count,
                  OPTION_OR_FIELD("--classes", "classes")));
    (*bank)->rules = *rules;
    (*bank)->systems = systems;
    (*bank)->uniforms = uniforms;
    (*bank)->count = orbits;
    (*bank)->res = res;
    (*bank)->points = points;
    pthread_mutex_init(&(*bank)->mutex, NULL);
    return STATUS_OK;
}

void ifs_bank_close(struct ifs_bank *bank)
{
    if (!bank)
        return;
    for (uint64_t i = 0; !bank->file && i < bank->count; i++)
        free(bank->maps[i]);
    if (bank->file) {
        guard_close(&bank->guard);
        munmap(bank->file, bank->file_bytes);
        close(bank->fd);
    }
    pthread_mutex_destroy(&bank->mutex);
    free(bank->known);
    free(bank);
}

enum status ifs_bank_check(const struct ifs_bank *bank)
{
    struct stat info;
    if (!bank->file)
        return STATUS_OK;
    return fstat(bank->fd, &info) == 0 && (uint64_t)info.st_size == bank->file_bytes &&
                   info.st_mtim.tv_sec == bank->time.tv_sec && info.st_mtim.tv_nsec == bank->time.tv_nsec
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "the file of orbits in %s was changed while it was in use; run again, which "
                            "checks it and computes it anew if it is damaged",
                            OPTION_OR_FIELD("--cache-dir", "cache_dir"));
}

/* Gives an empty bank all its orbits: those of a mapped file of `bytes` bytes, which ifs_bank_close() unmaps
 * and closes (`fd`). `guard` guards the mapping; the bank closes it. `time` is its time of modification
 * before it was verified. `maps` are ifs_map_stride() bytes each. `facts` has cells * 2 + overflows of each
 * orbit (struct ifs_orbit). `seconds` is the time of getting them. */
static void ifs_bank_adopt(struct ifs_bank *bank, int fd, const struct guard *guard, struct timespec time,
                           void *file, size_t bytes, const uint8_t *maps, const uint32_t *facts,
                           double seconds)
{
    const size_t stride = ifs_map_stride(bank->points, bank->res);
    bank->file = file;
    bank->file_bytes = bytes;
    bank->fd = fd;
    bank->guard = *guard;
    bank->time = time;
    for (uint64_t i = 0; i < bank->count; i++) {
        bank->maps[i] = (uint8_t *)file + (maps - (const uint8_t *)file) + i * stride; /* not written */
        bank->known[i] = (struct ifs_orbit){facts[i] >> 1, facts[i] & 1};
    }
    bank->facts = (struct ifs_bank_facts){bank->count, bytes, seconds};
}

/* Lists the orbits that are missing, each one once, and divides them into groups of one class. */
static enum status list_missing(const uint64_t *orbits, size_t count, struct order *order)
{
    const struct ifs_bank *bank = order->bank;
    const uint64_t of_class = ifs_orbits(&bank->rules);
    size_t listed = 0;
    for (size_t i = 0; i < count; i++)
        listed += !bank->maps[orbits[i]];
    if (listed == 0)
        return STATUS_OK;
    order->orbits = malloc(listed * sizeof *order->orbits);
    order->maps = calloc(listed, sizeof *order->maps);
    order->first = malloc((listed + 1) * sizeof *order->first);
    TRY(ALLOCATED(order->orbits && order->maps && order->first, "out of memory for a list of orbits"));
    for (size_t i = listed = 0; i < count; i++)
        if (!bank->maps[orbits[i]])
            order->orbits[listed++] = orbits[i];
    qsort(order->orbits, listed, sizeof *order->orbits, compare_u64);
    for (size_t i = 0; i < listed; i++) {
        const uint64_t orbit = order->orbits[i];
        if (order->count && order->orbits[order->count - 1] == orbit)
            continue;
        if (!order->count || order->orbits[order->count - 1] / of_class != orbit / of_class ||
            order->count - order->first[order->groups - 1] == order->width)
            order->first[order->groups++] = order->count;
        order->orbits[order->count++] = orbit;
    }
    order->first[order->groups] = order->count;
    return STATUS_OK;
}

static bool make_builder(const struct order *order, struct builder *builder)
{
    const struct ifs_bank *bank = order->bank;
    builder->group = aligned_alloc(ALIGNMENT, sizeof *builder->group);
    builder->choices = malloc(bank->rules.points);
    builder->scratch = malloc(bank->rules.points * sizeof *builder->scratch);
    builder->rasters = malloc(order->width * raster_words(bank->res) * sizeof *builder->rasters);
    builder->row = malloc(bank->res * sizeof *builder->row);
    return builder->group && builder->choices && builder->scratch && builder->rasters && builder->row;
}

/* Allocates the new maps, and the memory of the threads. */
static enum status make_order(struct order *order)
{
    const struct ifs_bank *bank = order->bank;
    const size_t map_bytes = ifs_map_bytes(bank->points, bank->res);
    const size_t thread_bytes = bank->rules.points * (1 + sizeof(struct ifs_point)) +
                                order->width * raster_words(bank->res) * sizeof(uint32_t);
    const char *remedy =
        OPTION_OR_FIELD("lower --classes, --res or --threads", "lower classes, res or threads");
    if ((size_t)order->threads > order->groups)
        order->threads = (int)order->groups;
    TRY(memory_check(order->count * map_bytes + (size_t)order->threads * thread_bytes, "the bank of orbits",
                     remedy));
    order->builders = calloc((size_t)order->threads, sizeof *order->builders);
    bool made = order->builders != NULL;
    for (int i = 0; made && i < order->threads; i++)
        made = make_builder(order, &order->builders[i]);
    for (size_t i = 0; made && i < order->count; i++)
        made = (order->maps[i] = aligned_alloc(ALIGNMENT, ifs_map_stride(bank->points, bank->res)));
    return ALLOCATED(made, "out of memory for a bank of %zu orbits; %s", order->count, remedy);
}

/* Computes the missing orbits and adds them to the bank. */
static void fill_order(struct order *order)
{
    struct ifs_bank *bank = order->bank;
    const double begin_s = timer_now_s();
    parallel_for(order->threads, order->groups, build_group, order);
    for (size_t i = 0; i < order->count; i++) {
        bank->maps[order->orbits[i]] = order->maps[i];
        order->maps[i] = NULL;
    }
    bank->facts.orbits += order->count;
    bank->facts.bytes += order->count * ifs_map_bytes(bank->points, bank->res);
    bank->facts.seconds += timer_now_s() - begin_s;
}

static void free_order(struct order *order)
{
    for (size_t i = 0; order->maps && i < order->count; i++)
        free(order->maps[i]);
    for (int i = 0; order->builders && i < order->threads; i++) {
        struct builder *builder = &order->builders[i];
        free(builder->group);
        free(builder->choices);
        free(builder->scratch);
        free(builder->rasters);
        free(builder->row);
    }
    free(order->builders);
    free(order->orbits);
    free(order->maps);
    free(order->first);
}

enum { RASTER_BYTES = 1 << 24 }; /* of one thread, unless one raster has more */

enum status ifs_bank_need(struct ifs_bank *bank, const uint64_t *orbits, size_t count, int threads)
{
    const size_t fitting = RASTER_BYTES / (raster_words(bank->res) * sizeof(uint32_t));
    struct order order = {.bank = bank,
                          .threads = threads,
                          .width = fitting < 1       ? 1
                                   : fitting < GROUP ? (uint32_t)fitting
                                                     : GROUP};
    TRY(ifs_bank_check(bank));
    pthread_mutex_lock(&bank->mutex);
    enum status status = list_missing(orbits, count, &order);
    if (status == STATUS_OK && order.count)
        status = make_order(&order);
    if (status == STATUS_OK && order.count)
        fill_order(&order);
    pthread_mutex_unlock(&bank->mutex);
    free_order(&order);
    return status;
}

const uint8_t *ifs_bank_map(const struct ifs_bank *bank, uint64_t orbit)
{
    return bank->maps[orbit];
}

struct ifs_orbit ifs_bank_orbit(const struct ifs_bank *bank, uint64_t orbit)
{
    return bank->known[orbit];
}

struct ifs_bank_facts ifs_bank_facts(struct ifs_bank *bank)
{
    pthread_mutex_lock(&bank->mutex);
    const struct ifs_bank_facts facts = bank->facts;
    pthread_mutex_unlock(&bank->mutex);
    return facts;
}

/* ---- The bank in a cache file ---- */

/* A bank of orbits (ifs.h) in a cache file. The file has all orbits of a set. It is mapped read-only, so the
 * processes of a machine share its pages. It is written under another name and then renamed, so a mapping
 * stays valid if the file is replaced. Nobody may write to it: it has no permission for that, and a bank
 * checks the time of modification before and after each batch (ifs_bank_check()).
 *
 * The file has a header, which is compared as a whole, the maps in the order of the orbits, one 32-bit word
 * of facts per orbit, and a hash of all this. */

enum { VERSION = 1, HEADER_BYTES = 4096, PART_ORBITS = 800 };

struct header {
    char magic[8];
    uint32_t version, classes, res, points;
    struct ifs_rules rules;
    uint32_t unused;                  /* 0 */
    uint64_t orbits, stride, systems; /* stride: of the maps; systems: the hash of the classes */
};
_Static_assert(sizeof(struct header) == 80, "the header has no gaps");

/* A bank that has a file, and the parts of the file. */
struct kept {
    struct header header;
    const struct ifs_system *systems;
    const double *uniforms;
    struct ifs_bank *bank;
    int threads;
    size_t class_bytes; /* of the maps of a class */
    uint64_t *hashes;   /* of the maps of each class */
    double begin_s;     /* of opening */
    char path[PATH_MAX];
};

static size_t file_bytes(const struct kept *kept)
{
    const struct header *header = &kept->header;
    return HEADER_BYTES + header->orbits * (header->stride + sizeof(uint32_t)) + sizeof(uint64_t);
}

/* ---- Hashes ---- */

/* Maps of consecutive classes. */
struct hashing {
    const uint8_t *maps;
    size_t class_bytes;
    uint32_t first; /* class */
    uint64_t *hashes;
};

static void hash_class(void *context, uint64_t task, int thread)
{
    const struct hashing *hashing = context;
    const uint64_t c = hashing->first + task;
    (void)thread;
    hashing->hashes[c] =
        checksum_seeded(hashing->maps + task * hashing->class_bytes, hashing->class_bytes, c);
}

static void hash_classes(const struct kept *kept, const uint8_t *maps, uint32_t first, uint32_t count)
{
    struct hashing hashing = {maps, kept->class_bytes, first, kept->hashes};
    parallel_for(kept->threads, count, hash_class, &hashing);
}

/* Returns the hash at the end of the file, after hash_classes() for all classes. */
static uint64_t hash_all(const struct kept *kept, const uint32_t *facts)
{
    uint64_t hash = checksum_seeded(&kept->header, sizeof kept->header, 0);
    hash = checksum_seeded(kept->hashes, kept->header.classes * sizeof *kept->hashes, hash);
    return checksum_seeded(facts, kept->header.orbits * sizeof *facts, hash);
}

/* ---- Reading ---- */

/* Returns whether the mapping is the file that the header describes, unchanged. */
static bool is_intact(const struct kept *kept, const uint8_t *file)
{
    const size_t rest = file_bytes(kept) - sizeof(uint64_t);
    uint64_t stored;
    if (memcmp(file, &kept->header, sizeof kept->header) != 0)
        return false;
    hash_classes(kept, file + HEADER_BYTES, 0, kept->header.classes);
    memcpy(&stored, file + rest, sizeof stored);
    return stored == hash_all(kept, (const uint32_t *)(file + HEADER_BYTES +
                                                       kept->header.orbits * kept->header.stride));
}

/* Maps the file, and gives its orbits to the bank. Sets `*found` to false if there is no file, or if it is
 * broken or foreign, which is said once if `says` is set. `*found` is also false if it cannot be mapped. */
static void take_file(struct kept *kept, bool says, bool *found)
{
    const size_t bytes = file_bytes(kept);
    struct stat info;
    *found = false;
    const int fd = open(kept->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* do not wait for a pipe's writer */
    if (fd < 0)
        return;
    const bool fits = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size == bytes;
    void *file = fits ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    struct guard guard = {.open = false};
    *found = file != MAP_FAILED && guard_open(&guard) == STATUS_OK &&
             guard_fill_range(&guard, file, bytes) == STATUS_OK && is_intact(kept, file);
    if (*found) {
        const uint8_t *maps = (const uint8_t *)file + HEADER_BYTES;
        ifs_bank_adopt(kept->bank, fd, &guard, info.st_mtim, file, bytes, maps,
                       (const uint32_t *)(maps + kept->header.orbits * kept->header.stride),
                       timer_now_s() - kept->begin_s);
    } else {
        guard_close(&guard);
        close(fd);
        if (file != MAP_FAILED)
            munmap(file, bytes);
        if (says)
            status_warn("%s is damaged or belongs to other orbits; computing it again", kept->path);
    }
}

/* ---- Writing ---- */

/* Computes the orbits of `count` classes from class `first` on, and copies them to `maps` and `facts`. */
static enum status compute_part(const struct kept *kept, uint32_t first, uint32_t count, uint8_t *maps,
                                uint32_t *facts)
{
    const struct header *header = &kept->header;
    const size_t orbits = (size_t)count * ifs_orbits(&header->rules);
    const size_t map_bytes = ifs_map_bytes(header->points, header->res);
    struct ifs_bank *bank;
    FREED uint64_t *every = malloc(orbits * sizeof *every);
    TRY(ALLOCATED(every, "out of memory for orbits"));
    for (size_t i = 0; i < orbits; i++)
        every[i] = i;
    TRY(ifs_bank_open(&header->rules, kept->systems + first, count, kept->uniforms, header->res,
                      header->points, &bank));
    const enum status status = ifs_bank_need(bank, every, orbits, kept->threads);
    for (size_t i = 0; status == STATUS_OK && i < orbits; i++) {
        const struct ifs_orbit orbit = ifs_bank_orbit(bank, i);
        memcpy(maps + i * header->stride, ifs_bank_map(bank, i), map_bytes);
        memset(maps + i * header->stride + map_bytes, 0, header->stride - map_bytes);
        facts[i] = orbit.cells << 1 | orbit.overflows;
    }
    ifs_bank_close(bank);
    return status;
}

static enum status write_parts(const struct kept *kept, struct file_writer *writer, uint8_t *maps,
                               uint32_t *facts)
{
    const struct header *header = &kept->header;
    const uint32_t orbits = ifs_orbits(&header->rules);
    const uint32_t part = orbits < PART_ORBITS ? PART_ORBITS / orbits : 1;
    struct progress progress;
    enum status status = STATUS_OK;
    progress_begin(&progress, true);
    for (uint32_t first = 0; status == STATUS_OK && first < header->classes; first += part) {
        const uint32_t count = header->classes - first < part ? header->classes - first : part;
        status = compute_part(kept, first, count, maps, facts + (size_t)first * orbits);
        if (status == STATUS_OK) {
            hash_classes(kept, maps, first, count);
            status = file_add(writer, maps, count * kept->class_bytes);
        }
        if (progress_due(&progress))
            progress_show(&progress, "computing orbits for --cache-dir: classes %u of %u", (unsigned)first,
                          (unsigned)header->classes);
    }
    progress_clear(&progress);
    return status;
}

/* Computes all orbits and writes the file. */
static enum status write_file(const struct kept *kept)
{
    const struct header *header = &kept->header;
    const size_t part = PART_ORBITS * header->stride;
    struct file_writer writer;
    uint64_t hash;
    FREED uint8_t *begin = calloc(1, HEADER_BYTES);
    FREED uint8_t *maps = malloc(part > kept->class_bytes ? part : kept->class_bytes);
    FREED uint32_t *facts = malloc(header->orbits * sizeof *facts);
    TRY(ALLOCATED(begin && maps && facts, "out of memory for orbits"));
    memcpy(begin, header, sizeof *header);
    TRY(file_begin(&writer, kept->path));
    enum status status = file_add(&writer, begin, HEADER_BYTES);
    if (status == STATUS_OK)
        status = write_parts(kept, &writer, maps, facts);
    if (status == STATUS_OK)
        status = file_add(&writer, facts, header->orbits * sizeof *facts);
    hash = status == STATUS_OK ? hash_all(kept, facts) : 0;
    if (status == STATUS_OK)
        status = file_add(&writer, &hash, sizeof hash);
    if (status == STATUS_OK && fchmod(writer.fd, 0444) != 0)
        status = status_set(STATUS_FAILED, "%s cannot be made read-only: %s", kept->path, strerror(errno));
    if (status == STATUS_OK)
        return file_end(&writer);
    file_abandon(&writer);
    return status;
}

/* ---- Opening ---- */

/* Locks an open file. Waits as long as another process computes orbits. Some file systems have no locks,
 * which
 * `*locked` says; then several processes may compute the same file, of which the last one remains. */
static enum status wait_for_lock(int fd, const char *path, bool *locked)
{
    const double begin_s = timer_now_s();
    *locked = false;
    for (bool said = false; flock(fd, LOCK_EX | LOCK_NB) != 0;) {
        if (errno == ENOSYS || errno == EOPNOTSUPP || errno == ENOLCK)
            return STATUS_OK;
        if (errno != EWOULDBLOCK && errno != EINTR)
            return status_set(STATUS_FAILED, "%s cannot be locked: %s", path, strerror(errno));
        if (file_signal_held())
            return status_set(STATUS_FAILED, "interrupted while another process computes orbits");
        if (!said && timer_now_s() - begin_s > 1) {
            status_say("%s: waiting for another process, which computes the orbits", path);
            said = true;
        }
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
    *locked = true;
    return STATUS_OK;
}

/* Removes temporary files that killed processes left, which may be as large as the bank. The caller holds the
 * lock, so no other process writes one. */
static void remove_temporaries(const struct kept *kept, const char *folder)
{
    const char *name = strrchr(kept->path, '/') + 1;
    const size_t length = strlen(name);
    DIR *directory = opendir(folder);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (strncmp(entry->d_name, name, length) == 0 && text_ends_in(entry->d_name, ".tmp"))
            (void)unlinkat(dirfd(directory), entry->d_name, 0); /* may fail: it only wastes space */
    if (directory)
        closedir(directory);
}

/* Takes the file, or writes it first. One process of those that use the folder writes; the others wait. */
static enum status take_or_write(struct kept *kept, const char *folder)
{
    bool found, locked;
    char lock[PATH_MAX + 8];
    const int cause = mkdir(folder, 0777) == 0 ? 0 : errno;
    if (cause != 0 && access(folder, F_OK) != 0)
        return status_set(STATUS_FAILED, "cannot create the folder %s: %s", folder, strerror(cause));
    take_file(kept, access(kept->path, F_OK) == 0, &found);
    if (found)
        return STATUS_OK;
    snprintf(lock, sizeof lock, "%s.lock", kept->path);
    const int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return status_set(STATUS_FAILED, "cannot create %s: %s", lock, strerror(errno));
    enum status status = wait_for_lock(fd, lock, &locked);
    if (status == STATUS_OK && locked)
        remove_temporaries(kept, folder);
    if (status == STATUS_OK) {
        take_file(kept, false, &found); /* another process may have written it */
        status = found ? STATUS_OK : write_file(kept);
        if (status == STATUS_OK && !found) {
            take_file(kept, false, &found);
            if (!found)
                status = status_set(STATUS_FAILED, "%s was written, but cannot be read again", kept->path);
        }
    }
    lock_close(fd);
    return status;
}

enum status ifs_bank_open_kept(const char *folder, int threads, const struct ifs_rules *rules,
                               const struct ifs_system *systems, uint32_t count, const double *uniforms,
                               uint32_t res, bool points, struct ifs_bank **bank)
{
    TRY(ifs_bank_open(rules, systems, count, uniforms, res, points, bank));
#ifndef HAVE_XXHASH
    (void)folder, (void)threads, (void)take_or_write;
    return status_set(STATUS_UNAVAILABLE, "%s needs xxHash, which this build lacks",
                      OPTION_OR_FIELD("--cache-dir", "cache_dir"));
#else
    FREED struct kept *kept = calloc(1, sizeof *kept);
    FREED uint64_t *hashes = malloc(count * sizeof *hashes);
    TRY(ALLOCATED(kept && hashes, "out of memory for orbits"));
    *kept = (struct kept){.header = {.magic = "fdslbank",
                                     .version = VERSION,
                                     .classes = count,
                                     .res = res,
                                     .points = points,
                                     .rules = *rules,
                                     .orbits = (uint64_t)count * ifs_orbits(rules),
                                     .stride = ifs_map_stride(points, res),
                                     .systems = checksum_seeded(systems, count * sizeof *systems, 0)},
                          .systems = systems,
                          .uniforms = uniforms,
                          .bank = *bank,
                          .threads = threads,
                          .hashes = hashes,
                          .begin_s = timer_now_s()};
    kept->class_bytes = ifs_orbits(rules) * kept->header.stride;
    const int length = snprintf(kept->path, sizeof kept->path, "%s/fractals-%016" PRIx64 ".bank", folder,
                                checksum_seeded(&kept->header, sizeof kept->header, 0));
    const enum status status = length < (int)sizeof kept->path
                                   ? take_or_write(kept, folder)
                                   : status_set(STATUS_USAGE, "the path is too long");
    return status_prefix(status, "%s %s", OPTION_OR_FIELD("--cache-dir", "cache_dir"), folder);
#endif
}
