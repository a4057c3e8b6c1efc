/* The definition of the colour images of the family COLOR, shared by host and device code.
 *
 * A class is a system of 2 to 4 affine maps with singular values of at most 1. An object is a fractal of a
 * class: independent walkers apply maps that random numbers choose, the visits of each cell of a square
 * raster are counted, and the count of a cell becomes a grade of 1 to 255, relative to the largest count. A
 * palette turns grades into colours. Objects lie over a background of random clouds. This file defines
 * the images; docs/formulas.md says what differs from the published ones.
 *
 * Coordinates are float32 with explicit fused multiply-adds; everything else is in integers. No function is
 * used whose result depends on the machine, so all hosts and devices draw the same bits. All random numbers
 * come from Philox with the key of the image. */
#ifndef FDSL_SYNTH_COLOR_H
#define FDSL_SYNTH_COLOR_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/philox.h"
#include "core/portable.h"
#include "core/status.h"

#define COLOR_CHANNELS    3u
#define COLOR_MAPS_MAX    4                        /* maps of a class */
#define COLOR_PARAMETERS  (1 + COLOR_MAPS_MAX * 7) /* maps, then a, b, c, d, e, f, p of each */
#define COLOR_OBJECTS_MAX 5u                       /* objects of an image with several */
#define COLOR_WALKERS     256u                     /* of an object */
#define COLOR_EIGHT       8u                       /* choices per block of random words */
#define COLOR_BLOCKS      36u                      /* blocks of choices per walker */
#define COLOR_BURN        33u                      /* points of a walker that are not drawn */
#define COLOR_STEPS       (COLOR_EIGHT * COLOR_BLOCKS - COLOR_BURN) /* points of a walker that are drawn */
#define COLOR_POINTS      (COLOR_WALKERS * COLOR_STEPS)             /* fewer than 2^16: a count has 16 bits */
#define COLOR_SIDE_ONE    224u /* cells per side of the raster of an image with one object */
#define COLOR_SIDE_MANY   112u /* and of an image with several */
#define COLOR_SKY_LEVELS  8u
#define COLOR_SKY         ((1u << COLOR_SKY_LEVELS) + 1) /* side of the clouds */
#define COLOR_PALETTE     256u                           /* colours of an object, or of the clouds */

/* Random streams, the third words of Philox counters (atom.h). */
#define COLOR_STREAM_DRAW   6u /* what an image and its objects are like */
#define COLOR_STREAM_CHOICE 7u /* choices of the walkers */
#define COLOR_STREAM_SKY    8u /* noise of the clouds */

/* ---- Classes ---- */

/* A class, as drawing needs it. All members are 32-bit words: the struct has no gaps. */
struct color_system {
    uint32_t id, maps;
    uint32_t below[COLOR_MAPS_MAX]; /* map m is chosen by random numbers from below[m - 1] to below[m] - 1 */
    float map[COLOR_MAPS_MAX][6];   /* a, b, c, d, e, f; 0 beyond `maps` */
    float factor_most[COLOR_MAPS_MAX]; /* largest factor of a perturbed map: 1.1, or less to keep its singular
                                          values at most 1 */
};

/* The properties that all images of an input share. */
struct color_rules {
    uint32_t several; /* 1: several objects, each of its own class; 0: one object */
    uint32_t patches; /* 1: a point adds 1 to a pattern of cells around it; 0: to its own cell */
    uint32_t res;     /* side of the canvas in pixels */
    uint32_t class_count;
};

/* Returns the number of cells per side of a raster. */
FDSL_HD uint32_t color_side(const struct color_rules *rules)
{
    return rules->several ? COLOR_SIDE_MANY : COLOR_SIDE_ONE;
}

/* ---- What an image is like ---- */

/* Returns block `number` of the draws of an image (slot 0) or of object slot - 1. */
FDSL_HD struct philox_block color_block(struct philox_key key, uint32_t slot, uint32_t number)
{
    return philox(key, number, slot, COLOR_STREAM_DRAW, 0);
}

/* Returns an integer from `least` to `most`, both included. */
FDSL_HD uint32_t color_between(uint32_t word, uint32_t least, uint32_t most)
{
    return least + philox_below(word, most - least + 1);
}

/* Returns the number of objects of an image. */
FDSL_HD uint32_t color_objects(const struct color_rules *rules, struct philox_key key)
{
    return rules->several ? color_between(color_block(key, 0, 0).word[0], 1, COLOR_OBJECTS_MAX) : 1;
}

/* Returns the outer weight, in 256ths, of the blur of an image along an axis; 0: it is not blurred. */
FDSL_HD uint32_t color_blur(struct philox_key key)
{
    const uint32_t word = color_block(key, 0, 0).word[1];
    return word & 1 ? 0 : color_between(word, 27, 70);
}

/* Returns the pattern of an image, which is not empty: bit 3 i + j adds to the cell i - 1 rows and j - 1
 * columns away. */
FDSL_HD uint32_t color_pattern(const struct color_rules *rules, struct philox_key key)
{
    return rules->patches ? color_between(color_block(key, 0, 0).word[2], 1, 511) : 16;
}

/* Returns the index of the class of object `slot`. `class_index` is that of the image, if it has one object.
 */
FDSL_HD uint32_t color_class(const struct color_rules *rules, struct philox_key key, uint32_t slot,
                             uint32_t class_index)
{
    return rules->several ? philox_below(color_block(key, 1 + slot, 0).word[0], rules->class_count)
                          : class_index;
}

/* The place of an object on the canvas. */
struct color_place {
    int32_t x, y;            /* its upper left pixel, which may be outside the canvas */
    uint32_t width, height;  /* pixels */
    uint32_t step_x, step_y; /* cells per pixel, in 2^-16 */
    uint32_t orientation;    /* bit 0: upside down; bit 1: left and right exchanged; bit 2: transposed */
};

/* Returns a length that is at least a pixel. */
FDSL_HD uint32_t color_length(uint32_t pixels)
{
    return pixels ? pixels : 1;
}

FDSL_HD struct color_place color_place(const struct color_rules *rules, struct philox_key key, uint32_t slot)
{
    const struct philox_block block = color_block(key, 1 + slot, 1);
    const uint32_t res = rules->res;
    struct color_place place;
    place.orientation = block.word[0] & 7;
    if (rules->several) { /* a square, whose centre is anywhere on the canvas */
        const uint32_t share = color_between(block.word[1], 9830, 39322); /* 0.15 .. 0.6 */
        place.width = place.height = color_length((uint32_t)((uint64_t)res * share >> 16));
        place.x = (int32_t)philox_below(block.word[2], res) - (int32_t)(place.width / 2);
        place.y = (int32_t)philox_below(block.word[3], res) - (int32_t)(place.height / 2);
    } else { /* the canvas shows 0.5 .. 2 of its extent along each axis, moved by at most 0.2 of it */
        place.width = color_length((res << 16) / color_between(block.word[0], 32768, 131072));
        place.height = color_length((res << 16) / color_between(block.word[1], 32768, 131072));
        const int32_t right = (int32_t)color_between(block.word[2], 0, 26214) - 13107;
        const int32_t down = (int32_t)color_between(block.word[3], 0, 26214) - 13107;
        place.x = (((int32_t)res - (int32_t)place.width) >> 1) + (right * (int32_t)place.width >> 16);
        place.y = (((int32_t)res - (int32_t)place.height) >> 1) + (down * (int32_t)place.height >> 16);
    }
    place.step_x = (color_side(rules) << 16) / place.width;
    place.step_y = (color_side(rules) << 16) / place.height;
    return place;
}

/* ---- Walkers ---- */

struct color_point {
    float x, y;
};

/* The map of an object that is perturbed, and the factor of its values. */
struct color_jitter {
    uint32_t map;
    float factor;
};

FDSL_HD struct color_jitter color_jitter(const struct color_rules *rules, const struct color_system *system,
                                         struct philox_key key, uint32_t slot)
{
    struct color_jitter jitter = {0, 1};
    if (rules->several)
        return jitter;
    const struct philox_block block = color_block(key, 1 + slot, 2);
    jitter.map = philox_below(block.word[0], system->maps);
    jitter.factor = fmaf(philox_unit(block.word[1]), system->factor_most[jitter.map] - 0.8f, 0.8f);
    return jitter;
}

/* Returns value `i` of map `m` of an object. */
FDSL_HD float color_value(const struct color_system *system, struct color_jitter jitter, uint32_t m,
                          uint32_t i)
{
    return system->map[m][i] * (m == jitter.map ? jitter.factor : 1.0f);
}

/* Returns block `block` of the choices of a walker. */
FDSL_HD struct philox_block color_choices(struct philox_key key, uint32_t slot, uint32_t walker,
                                          uint32_t block)
{
    return philox(key, block, walker | slot << 16, COLOR_STREAM_CHOICE, 0);
}

/* Returns the map that choice `i`, 0 to COLOR_EIGHT - 1, of a block selects. */
FDSL_HD uint32_t color_choice(const uint32_t below[COLOR_MAPS_MAX], struct philox_block block, uint32_t i)
{
    const uint32_t half = philox_word(block, i / 2) >> i % 2 * 16 & 0xffff;
    return (uint32_t)(half >= below[0]) + (uint32_t)(half >= below[1]) + (uint32_t)(half >= below[2]);
}

/* Returns the point after `point`. */
FDSL_HD struct color_point color_step(const float map[6], struct color_point point)
{
    struct color_point next = {fmaf(map[0], point.x, fmaf(map[1], point.y, map[4])),
                               fmaf(map[2], point.x, fmaf(map[3], point.y, map[5]))};
    return next;
}

/* Returns the point at which all walkers start: the fixed point of the first map, or (0, 0) if the map hardly
 * contracts. */
FDSL_HD struct color_point color_start(const float map[6])
{
    const float right = 1 - map[0], down = 1 - map[3];
    const float determinant = fmaf(right, down, -(map[1] * map[2]));
    struct color_point start = {0, 0};
    if (fabsf(determinant) < 0x1p-10f)
        return start;
    start.x = fmaf(down, map[4], map[1] * map[5]) / determinant;
    start.y = fmaf(right, map[5], map[2] * map[4]) / determinant;
    return start;
}

/* ---- The raster ---- */

/* One axis of a raster. */
struct color_axis {
    float low, scale;
};

/* Returns the axis for the smallest and the largest coordinate of the points that are drawn. */
FDSL_HD struct color_axis color_axis(float least, float most, uint32_t side)
{
    const float range = most - least;
    struct color_axis axis = {least, range > 0x1p-40f ? (float)(side - 1) / range : 0};
    return axis;
}

/* Returns the row (from x) or the column (from y) of a coordinate. Each of the three roundings changes the
 * product by less than a part of 2^23, so it is less than the side. */
FDSL_HD uint32_t color_cell(struct color_axis axis, float value)
{
    return (uint32_t)((value - axis.low) * axis.scale);
}

/* Returns the grade of a cell: 0 if it has no count, else 1 to 255. */
FDSL_HD uint32_t color_grade(uint32_t count, uint32_t most)
{
    return most ? (255 * count + most - 1) / most : 0;
}

/* ---- Clouds ----
 *
 * Diamond-square on a square of COLOR_SKY values in 2^-12. Level k has cells of 2^(8 - k) values per side. It
 * first computes the centre of each cell of the level before, then the middle of each edge, as the mean of
 * four neighbours plus noise. Neighbours outside the square are those of the opposite side. */

struct color_sky {
    uint32_t ratio; /* of the amplitudes of a level and of the level before it, in 2^-16: exp(-decay) */
    int32_t corner[4];
};

FDSL_HD struct color_sky color_sky(struct philox_key key)
{
    const struct philox_block block = color_block(key, 0, 3);
    struct color_sky sky;
    sky.ratio = color_between(color_block(key, 0, 1).word[0], 29447, 43930); /* decay 0.8 .. 0.4 */
    for (uint32_t i = 0; i < 4; i++)
        sky.corner[i] = (int32_t)(philox_word(block, i) >> 20);
    return sky;
}

/* Returns the amplitude of the noise of a level, from 1 on. */
FDSL_HD int32_t color_amplitude(struct color_sky sky, uint32_t level)
{
    uint32_t amplitude = 2048;
    for (uint32_t k = 1; k < level; k++)
        amplitude = amplitude * sky.ratio >> 16;
    return (int32_t)amplitude;
}

/* Returns the block of random words for values 8 * block .. 8 * block + 7 of a phase of a level; phase 0:
 * centres, 1: edges. */
FDSL_HD struct philox_block color_noise_block(struct philox_key key, uint32_t level, uint32_t phase,
                                              uint32_t block)
{
    return philox(key, block, 2 * level + phase, COLOR_STREAM_SKY, 0);
}

/* Returns the noise of value `number` from its block. */
FDSL_HD int32_t color_noise(struct philox_block block, uint32_t number, int32_t amplitude)
{
    const uint32_t half = philox_word(block, number / 2) >> number % 2 * 16 & 0xffff;
    return ((int32_t)half - 32768) * amplitude >> 15;
}

/* Returns the number of centres, or of middles of edges, of a level. */
FDSL_HD uint32_t color_sky_count(uint32_t level, uint32_t phase)
{
    const uint32_t cells = 1u << (level - 1);
    return phase ? 2 * cells * (cells + 1) : cells * cells;
}

/* A value of the clouds that a level computes. */
struct color_spot {
    uint32_t row, column;
};

/* Returns the spot of value `number` of a phase of a level. Values are numbered row by row. Rows of edges
 * have one value less and one more in turn, so two rows together have 2 * cells + 1 values. */
FDSL_HD struct color_spot color_spot(uint32_t level, uint32_t phase, uint32_t number)
{
    const uint32_t cells = 1u << (level - 1), half = (COLOR_SKY - 1) >> level;
    struct color_spot spot;
    if (phase == 0) {
        spot.row = (2 * (number >> (level - 1)) + 1) * half;
        spot.column = (2 * (number & (cells - 1)) + 1) * half;
    } else {
        const uint32_t pair = number / (2 * cells + 1), rest = number % (2 * cells + 1);
        const bool second = rest >= cells;
        spot.row = (2 * pair + second) * half;
        spot.column = second ? 2 * (rest - cells) * half : (2 * rest + 1) * half;
    }
    return spot;
}

/* Returns the spot after `spot`. */
FDSL_HD struct color_spot color_next_spot(uint32_t level, uint32_t phase, struct color_spot spot)
{
    const uint32_t half = (COLOR_SKY - 1) >> level, last = COLOR_SKY - 1;
    spot.column += 2 * half;
    if (spot.column > last) {
        spot.row += (2 - phase) * half;
        spot.column = phase && spot.row / half % 2 ? 0 : half;
    }
    return spot;
}

/* Computes a value of a level from its neighbours, and stores it. */
FDSL_HD void color_sky_value(int16_t *values, uint32_t level, uint32_t phase, struct color_spot spot,
                             int32_t noise)
{
    const uint32_t half = (COLOR_SKY - 1) >> level, last = COLOR_SKY - 1;
    const uint32_t row = spot.row, column = spot.column;
    const uint32_t up = row >= half ? row - half : last - half, down = row + half <= last ? row + half : half;
    const uint32_t left = column >= half ? column - half : last - half;
    const uint32_t right = column + half <= last ? column + half : half;
    const int16_t *above = values + up * COLOR_SKY, *own = values + row * COLOR_SKY;
    const int16_t *below = values + down * COLOR_SKY;
    const int32_t sum = phase ? above[column] + below[column] + own[left] + own[right]
                              : above[left] + above[right] + below[left] + below[right];
    values[row * COLOR_SKY + column] = (int16_t)((sum >> 2) + noise);
}

/* The scale from values to shades. */
struct color_shades {
    int32_t least;
    uint64_t factor; /* floor(2^38 / range) + 1, or 0 */
};

FDSL_HD struct color_shades color_shades(int32_t least, int32_t most)
{
    struct color_shades shades = {least, 0};
    if (most > least)
        shades.factor = (UINT64_C(1) << 38) / (uint32_t)(most - least) + 1;
    return shades;
}

/* Returns the shade of a value: floor(255 * (value - least) / range). The product with the factor exceeds the
 * quotient by less than 2^23 / 2^38, and 1 / range is more, because ranges are below 2^15. */
FDSL_HD uint32_t color_shade(struct color_shades shades, int32_t value)
{
    return (uint32_t)((uint32_t)(value - shades.least) * 255 * shades.factor >> 38);
}

/* ---- Colours ---- */

/* Returns a * b / 255, rounded, for factors of 0 to 255. */
FDSL_HD uint32_t color_times(uint32_t a, uint32_t b)
{
    return (a * b + 127) / 255;
}

/* Returns red + green * 2^8 + blue * 2^16. All arguments are 0 to 255; the circle of hues has 256 parts. */
FDSL_HD uint32_t color_rgb(uint32_t hue, uint32_t saturation, uint32_t value)
{
    const uint32_t part = 6 * hue & 255;
    const uint32_t low = color_times(value, 255 - saturation);
    const uint32_t falling = color_times(value, 255 - color_times(saturation, part));
    const uint32_t rising = color_times(value, 255 - color_times(saturation, 255 - part));
    switch (6 * hue >> 8) {
    case 0:
        return value | rising << 8 | low << 16;
    case 1:
        return falling | value << 8 | low << 16;
    case 2:
        return low | value << 8 | rising << 16;
    case 3:
        return low | falling << 8 | value << 16;
    case 4:
        return rising | low << 8 | value << 16;
    default:
        return value | low << 8 | falling << 16;
    }
}

/* The words of a palette. */
struct color_tint {
    struct philox_block first, second; /* `second`: only of the clouds */
};

/* Returns the tint of the clouds (slot 0) or of object slot - 1. */
FDSL_HD struct color_tint color_tint(struct philox_key key, uint32_t slot)
{
    struct color_tint tint = {color_block(key, slot, slot ? 0 : 1), color_block(key, slot, 2)};
    return tint;
}

/* Returns the colour of a grade or shade in the palette of a slot. */
FDSL_HD uint32_t color_of(struct color_tint tint, uint32_t slot, uint32_t shade)
{
    const uint32_t shift = tint.first.word[1] >> 24;
    if (slot)
        return color_rgb((shade + shift) & 255, color_between(tint.first.word[2], 77, 255),
                         color_between(tint.first.word[3], 128, 255));
    const uint32_t hue = color_between(tint.first.word[2], 64, 255) * shade / 255;
    const uint32_t saturation = color_between(tint.first.word[3], 26, 76) * shade / 255 +
                                color_between(tint.second.word[0], 102, 153);
    const uint32_t value = color_between(tint.second.word[1], 77, 153) * shade / 255 +
                           color_between(tint.second.word[2], 102, 153);
    return color_rgb((hue + shift) & 255, saturation, value < 255 ? value : 255);
}

/* ---- Composition ---- */

/* An image before its objects and clouds are put together. */
struct color_view {
    uint32_t objects, res, side; /* side: of the rasters */
    uint32_t sky_step;           /* (COLOR_SKY - 1) / res in 2^-16 */
    struct color_place place[COLOR_OBJECTS_MAX];
    const uint8_t *grades[COLOR_OBJECTS_MAX]; /* side * side of each object */
    const uint8_t *sky;                       /* COLOR_SKY * COLOR_SKY shades */
    const uint32_t *palettes;                 /* that of the clouds, then those of the objects */
};

/* Returns the mean of four neighbours, weighted by the bits 8 to 15 of a position, times 2^16. */
FDSL_HD uint32_t color_mix(const uint8_t *above, const uint8_t *below, uint32_t left, uint32_t right,
                           uint32_t x, uint32_t y)
{
    const uint32_t to_right = x >> 8 & 255, down = y >> 8 & 255;
    return (256 - down) * ((256 - to_right) * above[left] + to_right * above[right]) +
           down * ((256 - to_right) * below[left] + to_right * below[right]);
}

/* Returns the position in a raster, in 2^-16 cells, of pixel `i` of an object with this step. */
FDSL_HD uint32_t color_position(uint32_t step, uint32_t side, uint32_t i, bool turned)
{
    const int32_t last = (int32_t)((side - 1) << 16);
    int32_t at = (int32_t)(i * step + (step >> 1)) - 32768;
    at = at < 0 ? 0 : at > last ? last : at;
    return (uint32_t)(turned ? last - at : at);
}

/* Returns the grade that an object has at a pixel of the canvas; 0: none. Rounded up, so that each set cell
 * shows. */
FDSL_HD uint32_t color_grade_at(const struct color_view *view, uint32_t slot, uint32_t x, uint32_t y)
{
    const struct color_place *place = &view->place[slot];
    const uint32_t column = (uint32_t)((int32_t)x - place->x), row = (uint32_t)((int32_t)y - place->y);
    if (column >= place->width || row >= place->height) /* negative numbers are large ones */
        return 0;
    const uint32_t across = color_position(place->step_x, view->side, column, place->orientation & 2);
    const uint32_t along = color_position(place->step_y, view->side, row, place->orientation & 1);
    const bool transposed = place->orientation & 4;
    const uint32_t u = transposed ? along : across, v = transposed ? across : along;
    const uint32_t left = u >> 16, up = v >> 16, last = view->side - 1;
    const uint8_t *above = view->grades[slot] + up * view->side;
    return (color_mix(above, above + (up < last ? view->side : 0), left, left + (left < last), u, v) +
            65535) >>
           16;
}

/* Returns the colour of a pixel before blurring. Later objects lie over earlier ones. */
FDSL_HD uint32_t color_pixel(const struct color_view *view, uint32_t x, uint32_t y)
{
    for (uint32_t slot = view->objects; slot-- > 0;) {
        const uint32_t grade = color_grade_at(view, slot, x, y);
        if (grade)
            return view->palettes[(1 + slot) * COLOR_PALETTE + grade];
    }
    const uint32_t u = x * view->sky_step, v = y * view->sky_step;
    const uint8_t *above = view->sky + (v >> 16) * COLOR_SKY;
    return view->palettes[(color_mix(above, above + COLOR_SKY, u >> 16, (u >> 16) + 1, u, v) + 32768) >> 16];
}

/* Returns the mean of three neighbours along an axis for each channel; the outer ones have this weight. */
FDSL_HD uint32_t color_blurred(uint32_t weight, uint32_t before, uint32_t middle, uint32_t after)
{
    const uint32_t inner = 256 - 2 * weight, red_blue = 0x00ff00ffu;
    const uint32_t outer = (before & red_blue) + (after & red_blue); /* 9 bits each, of 16 */
    const uint32_t green = (before >> 8 & 255) + (after >> 8 & 255);
    return ((weight * outer + inner * (middle & red_blue) + 0x00800080u) >> 8 & red_blue) |
           (weight * green + inner * (middle >> 8 & 255) + 128) >> 8 << 8;
}

/* ---- Host ---- */

FDSL_C_BEGIN

struct class_row;
struct formula;

/* Converts a class, which color_check() accepts. */
void color_system(const struct class_row *row, struct color_system *system);

/* Returns the bytes that color_draw() needs beside the canvas. */
size_t color_scratch_bytes(const struct color_rules *rules);

/* Draws an image. `systems`: all classes. `class_index`: the image's class, if it has one object. `canvas`
 * has three planes of res * res bytes: red, green, blue. `scratch` is aligned to 64 bytes. Thread-safe for
 * different memory. */
void color_draw(const struct color_rules *rules, const struct color_system *systems, struct philox_key key,
                uint32_t class_index, void *scratch, uint8_t *canvas);

/* As color_draw(), point by point: the reference. */
void color_draw_plain(const struct color_rules *rules, const struct color_system *systems,
                      struct philox_key key, uint32_t class_index, void *scratch, uint8_t *canvas);

/* The contents of an image: per object, the share of the cells of its raster that it visits; and the share of
 * the pixels of the canvas that show an object instead of clouds. */
struct color_look {
    uint32_t objects;
    float fill[COLOR_OBJECTS_MAX], lit;
};

/* Looks at an image without drawing it. Arguments are as for color_draw(). */
struct color_look color_look(const struct color_rules *rules, const struct color_system *systems,
                             struct philox_key key, uint32_t class_index, void *scratch);

/* Writes the multi-hot label of an image: class_count bytes, 1 if the image shows the class. */
void color_multi_hot(const struct color_rules *rules, struct philox_key key, uint8_t *label);

FDSL_C_END

#endif
