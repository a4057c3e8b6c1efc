/* The definition of the images of iterated function systems (IFS), shared by host and device code, and the
 * bank of their orbits.
 *
 * A class is a system of 2 to 7 affine maps. Its orbit begins at (0, 0); each step applies one map, which a
 * table of uniform numbers selects. The table is the same for all orbits. A row of 25 weights scales the
 * coefficients of all maps by constants, so a class has up to 25 orbits. The orbit is rastered to cells of a
 * square canvas. An image shows either the cells (`points`), or a square of 3 x 3 random bits per cell
 * (`patches`): of the squares that cover a pixel, the one of the point that comes last in the orbit decides.
 * All points of a cell share one mask of bits, so only the last visit of a cell counts.
 *
 * Arithmetic is IEEE double without fused operations, in the order of the published script, so the cells are
 * those of the published images, bit for bit, on every host and device. Masks come from Philox.
 *
 * Orientation. The published script draws with row 0 at the top and turns the canvas upside down once, before
 * it stores the four flips. A cell (column, row) is numbered in the orientation of the drawing: row * res +
 * column. Bitmaps and owner maps have the orientation of flip 0, that is, row y of a map is row res - 1 - y
 * of the drawing. This file defines the images; docs/formulas.md says how to use them. */
#ifndef FDSL_SYNTH_IFS_H
#define FDSL_SYNTH_IFS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "core/philox.h"
#include "core/portable.h"
#include "core/status.h"
#include "machine/guard.h"

#define IFS_MAPS_MAX    7                                   /* maps of a system */
#define IFS_MAP_VALUES  7                                   /* of a map: a, b, c, d, e, f, p */
#define IFS_PARAMETERS  (1 + IFS_MAPS_MAX * IFS_MAP_VALUES) /* of a class: maps, then those of each map */
#define IFS_WEIGHTS     25                                  /* rows of the table of weights */
#define IFS_IDENTITY    2                                   /* the row of them that is 1 */
#define IFS_PAD         6                                   /* margin of the raster, in cells */
#define IFS_RES_MIN     (2 * IFS_PAD + 1)                   /* side of the smallest canvas */
#define IFS_GRAY        127                                 /* of a point and of a set bit */
#define IFS_NO_OWNER    15u                                 /* nibble of a pixel that no square covers */
#define IFS_UNDONE      100u                                /* points dropped before an overflow */
#define IFS_STREAM_MASK 5u                                  /* Philox stream of the masks (atom.h) */
#define IFS_REPEAT      IFS_MAPS_MAX                        /* choice: no map, repeat the point */
#define IFS_ALIGNMENT   64u                                 /* bytes; of maps in host memory */

/* Values of --draw. */
enum ifs_draw_kind { DRAW_PATCHES, DRAW_POINTS };
#define IFS_DRAW_NAMES "patches", "points" /* in this order */

/* How the orbits and instances of a set are made. All members are 32-bit words: the struct has no gaps. */
struct ifs_rules {
    uint32_t domain;  /* last word of the counter that gives the key of a drawing: 3; 1p-frac: 4; ifs3d: 5 */
    uint32_t points;  /* points per orbit, at least 2 */
    uint32_t weights; /* orbits per class: rows 0 .. weights - 1 of ifs_weights; 0: one orbit, unweighted */
    uint32_t flips;   /* images per drawing: 4 or 1 flips, or the views of ifs3d.h */
    uint32_t res;     /* default side of the canvas */
    uint32_t sphere;  /* only ifs3d.h: 1: cameras are anywhere on a sphere; 0: on a circle */
    uint32_t cloud;   /* only ifs3d.h: points of the point cloud that is a target; 0: no such target */
};

/* Returns the number of orbits per class. */
FDSL_HD uint32_t ifs_orbits(const struct ifs_rules *rules)
{
    return rules->weights ? rules->weights : 1;
}

/* A class, or one of its orbits if the weights are multiplied into it. Rows beyond `maps` are 0. The struct
 * has no gaps. */
struct ifs_system {
    uint32_t id, maps;
    uint32_t replaced; /* bit w: orbit w has the weights of row IFS_IDENTITY instead of row w */
    uint32_t unused;   /* 0 */
    double map[IFS_MAPS_MAX][IFS_MAP_VALUES];
};

/* Returns the row of ifs_weights of orbit `weight`. */
FDSL_HD uint32_t ifs_weight_row(const struct ifs_system *system, uint32_t weight)
{
    return system->replaced >> weight & 1 ? IFS_IDENTITY : weight;
}

/* ---- Instances ---- */

/* The parts of an instance number. Flips share the masks. */
struct ifs_instance {
    uint32_t flip;    /* bit 0: upside down; bit 1: left and right exchanged */
    uint32_t weight;  /* orbit of the class */
    uint64_t drawing; /* number of the set of masks: weight + ifs_orbits() * count */
};

FDSL_HD struct ifs_instance ifs_instance(const struct ifs_rules *rules, uint64_t instance)
{
    const uint64_t drawing = instance / rules->flips;
    struct ifs_instance shown = {(uint32_t)(instance % rules->flips), (uint32_t)(drawing % ifs_orbits(rules)),
                                 drawing};
    return shown;
}

/* Returns the key of the masks of a drawing. `seed` is the seed of the run. */
FDSL_HD struct philox_key ifs_mask_key(const struct ifs_rules *rules, uint64_t seed, uint32_t class_id,
                                       uint64_t drawing)
{
    struct philox_block block =
        philox(philox_key(seed), (uint32_t)drawing, (uint32_t)(drawing >> 32), class_id, rules->domain);
    struct philox_key key = {{block.word[0], block.word[1]}};
    return key;
}

/* ---- Arithmetic without fused operations ---- */

FDSL_HD double ifs_multiply(double a, double b)
{
#ifdef __CUDA_ARCH__
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
}

FDSL_HD double ifs_add(double a, double b)
{
#ifdef __CUDA_ARCH__
    return __dadd_rn(a, b);
#else
    return a + b;
#endif
}

FDSL_HD double ifs_divide(double a, double b)
{
#ifdef __CUDA_ARCH__
    return __ddiv_rn(a, b);
#else
    return a / b;
#endif
}

/* ---- Orbits ---- */

/* Returns the map that the uniform number u selects: the first one whose probability, added to those before
 * it, is at least u. IFS_REPEAT if there is none. Weights do not change it. */
FDSL_HD uint32_t ifs_choice(const struct ifs_system *system, double u)
{
    double sum = 0;
    for (uint32_t m = 0; m < system->maps; m++) {
        sum = ifs_add(sum, system->map[m][6]);
        if (u <= sum)
            return m;
    }
    return IFS_REPEAT;
}

struct ifs_point {
    double x, y;
};

/* Returns the point after `point`. `choice` is the map that ifs_choice() returned. */
FDSL_HD struct ifs_point ifs_step(const struct ifs_system *system, uint32_t choice, struct ifs_point point)
{
    if (choice == IFS_REPEAT)
        return point;
    const double *map = system->map[choice];
    struct ifs_point next = {
        ifs_add(ifs_add(ifs_multiply(point.x, map[0]), ifs_multiply(point.y, map[1])), map[4]),
        ifs_add(ifs_add(ifs_multiply(point.x, map[2]), ifs_multiply(point.y, map[3])), map[5])};
    return next;
}

/* The points of an orbit that are drawn, if `first_nan` is the index of the first point with a coordinate x
 * that is NaN (the number of points if there is none): points 0 .. result - 1. The script deletes IFS_UNDONE
 * points before the first NaN and all later ones, first for x, then for y among the points that remain. Once
 * x is NaN, so are all later points; once y is NaN, so are the next x and all later y. Deleting for y
 * therefore has an effect only if u repeats the point IFS_UNDONE times in a row; call this function again
 * with the first NaN of y among the points that remain. */
FDSL_HD uint32_t ifs_drawn(uint32_t first_nan, uint32_t points)
{
    return first_nan >= points ? points : first_nan > IFS_UNDONE ? first_nan - IFS_UNDONE : 0;
}

/* ---- Raster ---- */

/* The extent of one axis of an orbit. */
struct ifs_axis {
    double low, range, inverse; /* inverse: 1 / range, rounded */
};

/* Returns the extent for the smallest and the largest coordinate of the points that are drawn. Both may be
 * infinite. They include 0 unless no point is drawn. */
FDSL_HD struct ifs_axis ifs_axis(double least, double most)
{
    struct ifs_axis axis = {least < 0 ? least : 0, 0, 0};
    axis.range = ifs_add(ifs_add(most, -axis.low), -ifs_add(least, -axis.low));
    axis.inverse = ifs_divide(1, axis.range);
    return axis;
}

/* Returns the column or row of a coordinate: IFS_PAD .. res - IFS_PAD. 0 for NaN, which arises from a range
 * that is 0, infinite or NaN, as the script's conversion does on x86-64. */
FDSL_HD uint32_t ifs_cell(const struct ifs_axis *axis, double value, uint32_t res)
{
    const double place = ifs_add(
        ifs_multiply(ifs_divide(ifs_add(value, -axis->low), axis->range), (double)(res - 2 * IFS_PAD)),
        IFS_PAD);
    return place >= 0 ? (uint32_t)place : 0;
}

/* A place farther than this from an integer has the same integer part if it is computed with the inverse
 * instead of a division: four roundings of a place below 2^14 change it by less than 2^-37. */
#define IFS_NEAR 0x1p-30

/* Returns the same as ifs_cell(), but divides only if the place is near an integer or not a number. */
FDSL_HD uint32_t ifs_cell_fast(const struct ifs_axis *axis, double value, uint32_t res)
{
    const double place = ifs_add(
        ifs_multiply(ifs_multiply(ifs_add(value, -axis->low), axis->inverse), (double)(res - 2 * IFS_PAD)),
        IFS_PAD);
    const double fraction = ifs_add(place, -floor(place));
    return fraction > IFS_NEAR && fraction < 1 - IFS_NEAR ? (uint32_t)place : ifs_cell(axis, value, res);
}

/* ---- Maps ---- */

/* Bitmaps, for `points`: bit x % 8 of byte x / 8 of row y is 1 if the cell is occupied. Owner maps, for
 * `patches`: nibble x of row y, the low nibble first, is the owner o of the pixel, or IFS_NO_OWNER. Of the
 * occupied cells whose square covers the pixel, the owner is the one whose last visit is the latest. o is the
 * bit of the owner's mask that the pixel shows. Both maps have the orientation of flip 0. Rows are padded to
 * multiples of 16 bytes; padding is 0 in a bitmap, and IFS_NO_OWNER in an owner map. */
FDSL_HD size_t ifs_map_pitch(bool points, uint32_t res)
{
    return ((points ? ((size_t)res + 7) / 8 : ((size_t)res + 1) / 2) + 15) / 16 * 16;
}

FDSL_HD size_t ifs_map_bytes(bool points, uint32_t res)
{
    return ifs_map_pitch(points, res) * res;
}

/* Returns the number of the owner's cell, for pixel (x, y) of an owner map and its owner o, 0 .. 8. The
 * square of cell (column, row) covers columns column + 1 .. column + 3, and the same rows. Bit 8 - 3 i - j of
 * a mask is at row + 1 + i and column + 1 + j of the drawing. */
FDSL_HD uint32_t ifs_owner_cell(uint32_t res, uint32_t x, uint32_t y, uint32_t o)
{
    const uint32_t i = (8 - o) / 3, j = (8 - o) % 3;
    return (res - 1 - y - 1 - i) * res + (x - 1 - j);
}

/* Returns the block of random words for the masks of cells 8 * block .. 8 * block + 7. */
FDSL_HD struct philox_block ifs_mask_block(struct philox_key key, uint32_t block)
{
    return philox(key, block, 0, IFS_STREAM_MASK, 0);
}

/* Returns the mask of 9 bits, 1 .. 511, for a half word. */
FDSL_HD uint32_t ifs_mask(uint32_t half)
{
    return 1 + (511 * half >> 16);
}

/* Returns the mask of a cell from its block: half cell % 8, where halves 2 w and 2 w + 1 are the lower and
 * the upper half of word w. */
FDSL_HD uint32_t ifs_mask_of(struct philox_block block, uint32_t cell)
{
    return ifs_mask(philox_word(block, cell >> 1) >> (cell & 1) * 16 & 0xffff);
}

/* ---- Host ---- */

FDSL_C_BEGIN

struct class_row;
struct formula;

/* Converts a class. The values of its row are the number of maps, then a, b, c, d, e, f, p of each map. */
void ifs_system(const struct class_row *row, struct ifs_system *system);

/* Returns orbit `weight` of a class: its system with the weights multiplied in. */
struct ifs_system ifs_weighted(const struct ifs_rules *rules, const struct ifs_system *system,
                               uint32_t weight);

/* Implements check() of a struct formula whose parameters are the number of maps, then the values of each
 * map, of which the last one is its probability: the probabilities add up to 1, and other maps have zeros. */
enum status ifs_check(const struct formula *formula, const struct class_row *row);

/* Writes the uniform numbers u_0 .. u_{count - 1} of all orbits: NumPy's seed 100. Step i from point i to
 * point i + 1 uses u_i. */
void ifs_uniforms(uint32_t count, double *uniforms);

/* Writes the choices of a class, ifs_choice() of each uniform number. */
void ifs_choices(const struct ifs_system *system, const double *uniforms, uint32_t count, uint8_t *choices);

/* The orbits of an input, as bitmaps or owner maps in host memory. They are computed when they are first
 * needed and then kept. Thread-safe. */
struct ifs_bank;

/* Creates an empty bank for `count` systems. They and the uniform numbers, those of ifs_uniforms(), must
 * outlive it. `points`: bitmaps instead of owner maps. The caller closes the bank. */
enum status ifs_bank_open(const struct ifs_rules *rules, const struct ifs_system *systems, uint32_t count,
                          const double *uniforms, uint32_t res, bool points, struct ifs_bank **bank);
void ifs_bank_close(struct ifs_bank *bank); /* accepts NULL */

/* Opens a bank whose orbits are kept in a file of `folder`, which is created if only its last part is
 * missing. If the file does not exist, or is broken, computes all orbits on up to `threads` threads and
 * writes it, while other processes that open the same bank wait. The file is verified by its hash and mapped
 * read-only. The caller closes the bank, even after an error. STATUS_FAILED with the reason if the folder or
 * the file cannot be written; STATUS_UNAVAILABLE in builds without xxHash. */
enum status ifs_bank_open_kept(const char *folder, int threads, const struct ifs_rules *rules,
                               const struct ifs_system *systems, uint32_t count, const double *uniforms,
                               uint32_t res, bool points, struct ifs_bank **bank);

/* Returns the bytes of a map in host memory, with those after its end that vector loads may read. */
static inline size_t ifs_map_stride(bool points, uint32_t res)
{
    return (ifs_map_bytes(points, res) / IFS_ALIGNMENT + 2) * IFS_ALIGNMENT;
}

/* Checks that the file of the bank is the one that was verified. If so, the maps that were read until now are
 * right. STATUS_FAILED if it was changed or truncated. A file that was replaced or removed is unchanged.
 * Without a file, returns STATUS_OK. */
enum status ifs_bank_check(const struct ifs_bank *bank);

/* Computes those of `count` orbits that the bank does not have yet, on up to `threads` threads. The number of
 * an orbit is the index of its system * ifs_orbits() + its weight. Waits while another thread computes
 * orbits. STATUS_EXHAUSTED if memory is too small; orbits that the bank has stay valid. Otherwise as
 * ifs_bank_check(). */
enum status ifs_bank_need(struct ifs_bank *bank, const uint64_t *orbits, size_t count, int threads);

/* Returns the map of an orbit for which ifs_bank_need() has returned STATUS_OK. */
const uint8_t *ifs_bank_map(const struct ifs_bank *bank, uint64_t orbit);

/* Facts of an orbit. */
struct ifs_orbit {
    uint32_t cells; /* occupied cells */
    bool overflows; /* a coordinate becomes NaN, so that the last points are not drawn */
};

/* Returns the facts of an orbit for which ifs_bank_need() has returned STATUS_OK. */
struct ifs_orbit ifs_bank_orbit(const struct ifs_bank *bank, uint64_t orbit);

/* The number of orbits in a bank, their bytes, and the time of computing them in seconds. */
struct ifs_bank_facts {
    uint64_t orbits, bytes;
    double seconds;
};
struct ifs_bank_facts ifs_bank_facts(struct ifs_bank *bank);

/* Draws an image by its definition: the orbit step by step, and each square over the earlier ones. The
 * reference. Writes res * res grays to `canvas`. `points`: draws cells instead of squares. `uniforms` are
 * those of ifs_uniforms(); `scratch` has room for rules->points points. */
void ifs_draw(const struct ifs_rules *rules, const struct ifs_system *system, uint64_t seed,
              uint64_t instance, bool points, uint32_t res, const double *uniforms, struct ifs_point *scratch,
              uint8_t *canvas);

FDSL_C_END

#endif
