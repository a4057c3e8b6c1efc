/* The definition of the images and point clouds of three-dimensional iterated function systems, shared by
 * host and device code.
 *
 * A class is a system of 2 to 7 affine maps of space. A drawing of the class multiplies one coefficient of
 * all maps by a constant (145 rows of weights), walks through the points of the orbit, and scales and centres
 * them. Its 12 views show the points from 12 cameras, as white pixels on black.
 *
 * Published are the search of the classes, the weights, the arithmetic of a step, the scale, the centre, and
 * the cameras on a circle (MV-FractalDB). The published scripts seed none of their random numbers, so the
 * choice of the maps, the deviations of the cameras, the cameras on a sphere and the mixture of point clouds
 * are our own definition. They come from Philox, so a drawing is a pure function of (seed, class, instance).
 *
 * The orbit is divided into IFS3D_WALKS walks, which can be computed at the same time. All of them use the
 * choices of the one orbit. A walk begins at the origin, IFS3D_BURN steps before its first point. The maps
 * contract, so these steps nearly always lead to exactly the point of the orbit.
 *
 * Points are IEEE doubles without fused operations; cameras and pixels are float32 with explicit fmaf().
 * This file defines the images; docs/formulas.md says how to use them. */
#ifndef FDSL_SYNTH_IFS3D_H
#define FDSL_SYNTH_IFS3D_H

#include "synth/ifs.h"

#define IFS3D_COEFFICIENTS 12                                    /* of a map: a .. l */
#define IFS3D_MAP_VALUES   (IFS3D_COEFFICIENTS + 1)              /* of a map in a class: a .. l, p */
#define IFS3D_PARAMETERS   (1 + IFS_MAPS_MAX * IFS3D_MAP_VALUES) /* of a class */
#define IFS3D_WEIGHTS      145                                   /* rows of the table of weights */
#define IFS3D_IDENTITY     6                                     /* the row of them that is 1 */
#define IFS3D_POINTS       9999 /* points of an orbit; the origin is not one */
#define IFS3D_WALKS        32
#define IFS3D_LENGTH       313 /* points of a walk; the last walk has fewer */
#define IFS3D_BURN         512
#define IFS3D_VIEWS        12
#define IFS3D_GRAY         255
#define IFS3D_RANGE_MAX    1e25  /* an orbit that grows so far in a walk overflows in IFS3D_POINTS steps */
#define IFS3D_CLOUD        10000 /* points of a cloud */
#define IFS3D_CLOUD_OWN    8000  /* those of them that show the class of the image */
#define IFS3D_FOCAL        2.41421356237f /* cot(45 degrees / 2) */
#define IFS3D_DISTANCE     4.0f           /* of the camera from the centre */
#define IFS3D_NEAR         1.0f
#define IFS3D_FAR          100.0f

/* Philox streams of a drawing (atom.h has the others). */
enum ifs3d_stream { IFS3D_STREAM_CHOICES = 8, IFS3D_STREAM_CAMERA = 9, IFS3D_STREAM_MIX = 10 };

/* A class, as drawing needs it. The struct has no gaps. */
struct ifs3d_system {
    uint32_t id, maps;
    /* A random word w chooses the first map with w <= bound, that is, the first one whose probability, added
     * to those before it, is at least w / 2^32. The last map has the bound UINT32_MAX. */
    uint32_t bounds[IFS_MAPS_MAX];
    uint32_t unused; /* 0 */
    double map[IFS_MAPS_MAX][IFS3D_COEFFICIENTS];
};

struct ifs3d_point {
    double at[3];
};

/* ---- Weights ---- */

/* A row of the published weights: all coefficients of this index are multiplied by the factor. */
struct ifs3d_weight {
    uint32_t coefficient;
    double factor;
};

/* Returns a row of weights_ins145.csv. Row 108, the last one of the coefficient i, has 0.6, where the order
 * of the others would suggest 1.6. */
FDSL_HD struct ifs3d_weight ifs3d_weight(uint32_t row)
{
    const double factors[13] = {0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6};
    const uint32_t later = row < 13 ? 0 : row - 13, rest = later % 12;
    const uint32_t factor = row < 13 ? row : row == 108 ? 2 : rest + (rest >= IFS3D_IDENTITY);
    struct ifs3d_weight weight = {row < 13 ? 0 : 1 + later / 12, factors[factor]};
    return weight;
}

/* Returns a coefficient of a map of a drawing with these weights. */
FDSL_HD double ifs3d_coefficient(const struct ifs3d_system *system, struct ifs3d_weight weight, uint32_t map,
                                 uint32_t coefficient)
{
    const double value = system->map[map][coefficient];
    return coefficient == weight.coefficient ? ifs_multiply(value, weight.factor) : value;
}

/* Returns the row of weights of an instance. */
FDSL_HD uint32_t ifs3d_row(const struct ifs_rules *rules, struct ifs_instance shown)
{
    return rules->weights ? shown.weight : IFS3D_IDENTITY;
}

/* ---- Orbits ---- */

/* Returns the random words that choose the maps of steps 4 * block .. 4 * block + 3. */
FDSL_HD struct philox_block ifs3d_choice_block(struct philox_key key, uint32_t block)
{
    return philox(key, block, 0, IFS3D_STREAM_CHOICES, 0);
}

/* Returns the map that a random word chooses: the number of bounds below it. */
FDSL_HD uint32_t ifs3d_choice(const uint32_t bounds[IFS_MAPS_MAX], uint32_t word)
{
    uint32_t choice = 0;
    for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
        choice += word > bounds[m];
    return choice;
}

/* Returns the point after `point`, for the coefficients a .. l of a map. */
FDSL_HD struct ifs3d_point ifs3d_step(const double *map, struct ifs3d_point point)
{
    struct ifs3d_point next;
    for (int axis = 0; axis < 3; axis++)
        next.at[axis] = ifs_add(ifs_add(ifs_add(ifs_multiply(point.at[0], map[3 * axis]),
                                                ifs_multiply(point.at[1], map[3 * axis + 1])),
                                        ifs_multiply(point.at[2], map[3 * axis + 2])),
                                map[9 + axis]);
    return next;
}

/* The steps of a walk: it begins at the origin before step `begin`; its points are those after the steps
 * first .. end - 1. */
struct ifs3d_span {
    uint32_t begin, first, end;
};

FDSL_HD struct ifs3d_span ifs3d_span(uint32_t walk)
{
    const uint32_t first = walk * IFS3D_LENGTH, end = first + IFS3D_LENGTH;
    struct ifs3d_span span = {first > IFS3D_BURN ? first - IFS3D_BURN : 0, first,
                              end < IFS3D_POINTS ? end : IFS3D_POINTS};
    return span;
}

/* ---- Scale and centre ---- */

/* The smallest and the largest coordinate, and the sums of the coordinates of each axis. */
struct ifs3d_extent {
    double least, most, sum[3];
};

/* How the points of a drawing are scaled and centred. */
struct ifs3d_frame {
    double centre[3], scale;
    uint32_t drawn; /* 0: no point is drawn */
};

FDSL_HD struct ifs3d_extent ifs3d_no_extent(void)
{
    struct ifs3d_extent extent = {INFINITY, -INFINITY, {0, 0, 0}};
    return extent;
}

/* Adds a point of a walk. */
FDSL_HD void ifs3d_extend(struct ifs3d_extent *extent, struct ifs3d_point point)
{
    for (int axis = 0; axis < 3; axis++) {
        extent->least = point.at[axis] < extent->least ? point.at[axis] : extent->least;
        extent->most = point.at[axis] > extent->most ? point.at[axis] : extent->most;
        extent->sum[axis] = ifs_add(extent->sum[axis], point.at[axis]);
    }
}

/* Adds the next walk to the walks before it. */
FDSL_HD void ifs3d_join(struct ifs3d_extent *extent, const struct ifs3d_extent *walk)
{
    extent->least = walk->least < extent->least ? walk->least : extent->least;
    extent->most = walk->most > extent->most ? walk->most : extent->most;
    for (int axis = 0; axis < 3; axis++)
        extent->sum[axis] = ifs_add(extent->sum[axis], walk->sum[axis]);
}

/* Returns whether a number is neither infinite nor NaN. */
FDSL_HD bool ifs3d_finite(double value)
{
    return value - value == 0;
}

/* Returns the frame of a drawing. The published script scales all coordinates to -1 .. 1 and subtracts, from
 * each axis, the sum of its 9999 coordinates divided by 10000. This is the mean with one more point in the
 * middle of the range. If a coordinate overflows, or the range is above IFS3D_RANGE_MAX, no point is drawn.
 */
FDSL_HD struct ifs3d_frame ifs3d_frame(const struct ifs3d_extent *extent)
{
    const double middle = ifs_multiply(ifs_add(extent->least, extent->most), 0.5);
    const double range = ifs_add(extent->most, -extent->least);
    struct ifs3d_frame frame;
    frame.scale = ifs_divide(2, range);
    frame.drawn = range <= IFS3D_RANGE_MAX && ifs3d_finite(frame.scale);
    for (int axis = 0; axis < 3; axis++) {
        frame.centre[axis] = ifs_divide(ifs_add(extent->sum[axis], middle), IFS3D_POINTS + 1);
        frame.drawn = frame.drawn && ifs3d_finite(frame.centre[axis]);
    }
    return frame;
}

/* Returns a coordinate of a scaled and centred point. */
FDSL_HD float ifs3d_coordinate(const struct ifs3d_frame *frame, struct ifs3d_point point, int axis)
{
    return (float)ifs_multiply(ifs_add(point.at[axis], -frame->centre[axis]), frame->scale);
}

/* ---- Views ---- */

/* A camera: directions in space. Those to the right and up are multiplied by the focal length. */
struct ifs3d_camera {
    float right[3], up[3], forward[3];
};

FDSL_HD float ifs3d_reciprocal(float value)
{
#ifdef __CUDA_ARCH__
    return __frcp_rn(value);
#else
    return 1 / value;
#endif
}

FDSL_HD float ifs3d_root(float value)
{
#ifdef __CUDA_ARCH__
    return __fsqrt_rn(value);
#else
    return sqrtf(value);
#endif
}

/* Returns a number in [-1, 1). */
FDSL_HD float ifs3d_signed(uint32_t word)
{
    return fmaf(2, philox_unit(word), -1);
}

/* Returns the camera of a view that is on a circle around the y axis: at 30 degrees times (1 + view), and up
 * to pi degrees away from it. (The script takes a random angle of up to pi as degrees.) */
FDSL_HD struct ifs3d_camera ifs3d_circle(struct philox_key key, uint32_t view)
{
    const float half_root3 = 0.86602540378f; /* cosines of 30, 60, ... degrees */
    const float cosines[IFS3D_VIEWS] = {half_root3,  0.5f,  0, -0.5f, -half_root3, -1,
                                        -half_root3, -0.5f, 0, 0.5f,  half_root3,  1};
    const float cosine = cosines[view], sine = cosines[(view + 9) % IFS3D_VIEWS];
    const struct philox_block block = philox(key, view, 0, IFS3D_STREAM_CAMERA, 0);
    const float angle = 0.0548311356f * ifs3d_signed(block.word[0]); /* pi^2 / 180 */
    const float square = angle * angle;
    const float near_one = fmaf(square, fmaf(square, 1 / 24.0f, -0.5f), 1); /* Taylor series, to 2^-24 */
    const float near_zero = angle * fmaf(square, fmaf(square, 1 / 120.0f, -1 / 6.0f), 1);
    const float c = fmaf(cosine, near_one, -(sine * near_zero)), s = fmaf(sine, near_one, cosine * near_zero);
    struct ifs3d_camera camera = {{s, 0, c}, {0, 1, 0}, {c, 0, -s}};
    return camera;
}

/* Returns the camera of a view in a direction that is uniformly distributed on the sphere; y is up. The
 * method is that of Marsaglia, "Choosing a point from the surface of a sphere", Ann. Math. Stat. 43(2), 1972:
 * from a uniformly distributed point (a, b) of the unit disc. */
FDSL_HD struct ifs3d_camera ifs3d_sphere(struct philox_key key, uint32_t view)
{
    float a = 0, b = 0, square = 0;
    for (uint32_t attempt = 0; !(square > 0 && square < 1); attempt++) {
        const struct philox_block block = philox(key, view, attempt / 2, IFS3D_STREAM_CAMERA, 0);
        a = ifs3d_signed(attempt % 2 ? block.word[2] : block.word[0]);
        b = ifs3d_signed(attempt % 2 ? block.word[3] : block.word[1]);
        square = fmaf(a, a, b * b);
    }
    const float inverse = ifs3d_reciprocal(ifs3d_root(square)), away = ifs3d_root(1 - square);
    const float x = 2 * a * away, y = fmaf(-2, square, 1), z = 2 * b * away; /* forward */
    const float right_x = -(b * inverse), right_z = a * inverse;
    struct ifs3d_camera camera = {
        {right_x, 0, right_z}, {-(right_z * y), fmaf(right_z, x, -(right_x * z)), right_x * y}, {x, y, z}};
    return camera;
}

/* Returns the camera of a view. `key` is that of the drawing. */
FDSL_HD struct ifs3d_camera ifs3d_camera(const struct ifs_rules *rules, struct philox_key key, uint32_t view)
{
    struct ifs3d_camera camera = rules->sphere ? ifs3d_sphere(key, view) : ifs3d_circle(key, view);
    for (int i = 0; i < 3; i++) {
        camera.right[i] *= IFS3D_FOCAL;
        camera.up[i] *= IFS3D_FOCAL;
    }
    return camera;
}

FDSL_HD float ifs3d_along(const float direction[3], const float point[3], float start)
{
    return fmaf(direction[0], point[0], fmaf(direction[1], point[1], fmaf(direction[2], point[2], start)));
}

/* A pixel; outside: both numbers are UINT32_MAX. */
struct ifs3d_pixel {
    uint32_t x, y;
};

/* Returns the pixel that a scaled point is drawn on. A point that is too near has none. Row 0 is the lowest
 * one, as the script stores its images upside down. */
FDSL_HD struct ifs3d_pixel ifs3d_pixel(const struct ifs3d_camera *camera, const float point[3], uint32_t res)
{
    const float depth = ifs3d_along(camera->forward, point, IFS3D_DISTANCE), half = 0.5f * (float)res;
    const float inverse = ifs3d_reciprocal(depth);
    const float x = fmaf(ifs3d_along(camera->right, point, 0) * inverse, half, half);
    const float y = fmaf(ifs3d_along(camera->up, point, 0) * inverse, half, half);
    const bool inside =
        depth >= IFS3D_NEAR && depth <= IFS3D_FAR && x >= 0 && y >= 0 && x < (float)res && y < (float)res;
    const struct ifs3d_pixel pixel = {inside ? (uint32_t)x : UINT32_MAX, inside ? (uint32_t)y : UINT32_MAX};
    return pixel;
}

/* ---- Point clouds ---- */

/* The class that the last points of a cloud show: another one than `own`. `count` >= 2 is the number of
 * classes, `key` that of the drawing. */
FDSL_HD uint32_t ifs3d_partner(struct philox_key key, uint32_t own, uint32_t count)
{
    const uint32_t other = philox_below(philox(key, 0, 0, IFS3D_STREAM_MIX, 0).word[0], count - 1);
    return other + (other >= own);
}

/* ---- Host ---- */

FDSL_C_BEGIN

/* Converts a class. The values of its row are the number of maps, then a .. l, p of each map. */
void ifs3d_system(const struct class_row *row, struct ifs3d_system *system);

/* The scaled points of a drawing: x, y, z of each, in the order of the orbit. */
struct ifs3d_points {
    uint32_t count; /* IFS3D_POINTS, or 0 if no point is drawn */
    float at[IFS3D_POINTS][3];
};

/* Computes the points of a drawing step by step: the reference. The row of weights is `row`; if a coordinate
 * overflows, it is IFS3D_IDENTITY instead. `scratch` has room for IFS3D_POINTS points. */
void ifs3d_walk(const struct ifs3d_system *system, uint32_t row, struct philox_key key,
                struct ifs3d_point *scratch, struct ifs3d_points *points);

/* Computes the same bits, all walks at a time. `scratch` has ifs3d_scratch_bytes() bytes. */
void ifs3d_walk_fast(const struct ifs3d_system *system, uint32_t row, struct philox_key key, void *scratch,
                     struct ifs3d_points *points);
size_t ifs3d_scratch_bytes(void);

/* Draws a view of the points on a canvas of res * res grays. */
void ifs3d_view(const struct ifs_rules *rules, const struct ifs3d_points *points, struct philox_key key,
                uint32_t view, uint32_t res, uint8_t *canvas);

/* Writes the IFS3D_CLOUD points of a cloud, x, y, z of each: the first IFS3D_CLOUD_OWN points of a drawing,
 * then points of the other class's drawing. Points of a drawing that is not drawn are 0. */
void ifs3d_cloud(const struct ifs3d_points *own, const struct ifs3d_points *other, float *cloud);

/* ---- Classes ---- */

#define IFS3D_THRESHOLD     0.05 /* of MV-FractalDB: least variance of the coordinates of each axis */
#define IFS3D_THRESHOLD_MIN 0.001
#define IFS3D_THRESHOLD_MAX 0.3

/* Finds the first `count` classes of a stream of NumPy's random numbers, exactly as the published script does
 * if this seed is given to it. Shows progress. STATUS_USAGE if the threshold is outside the limits;
 * STATUS_FAILED if too few of many candidates reach it; STATUS_EXHAUSTED if memory runs out. */
enum status ifs3d_search(uint32_t seed, double threshold, uint32_t count, struct class_row *rows);

/* Writes the name of an image's file without ".png", as the script names it in the folder of its class.
 * `name` has room for PUBLISHED_NAME_BYTES (class.h). */
void ifs3d_image_name(const struct ifs_rules *rules, uint32_t id, uint64_t instance, char *name);

FDSL_C_END

#endif
