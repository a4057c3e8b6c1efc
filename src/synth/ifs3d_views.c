/* Orbits, views and point clouds of three-dimensional iterated function systems (ifs3d.h) on the CPU. */
#include "synth/input.h"

#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "synth/ifs_classes.h"
#include "synth/published_parts.h"

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
