/* Published data sets of line formulas, pixel for pixel: RCDB, SegRCDB and VisualAtom as their scripts draw
 * them.
 *
 * Each script runs as several processes ("script threads"). Each of these seeds Python's `random` once, and
 * draws the parameters of its classes and all their images from one stream of numbers. Image (c, i) therefore
 * depends on all numbers before it. This code keeps the state of the stream at the first image of every
 * block: a class, or PUBLISHED_SEG_BLOCK images of SegRCDB. From there it skips the numbers of the images in
 * between without drawing them.
 *
 * Arithmetic is IEEE double without fused operations, and the noise is float32, as in the scripts. */
#ifndef FDSL_SYNTH_PUBLISHED_H
#define FDSL_SYNTH_PUBLISHED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

#define PUBLISHED_RES          512  /* pixels per side of every published canvas */
#define PUBLISHED_VERTICES_MIN 3    /* of a polygon */
#define PUBLISHED_VERTICES_MAX 1000 /* of a polygon */
#define PUBLISHED_SEG_BLOCK    20   /* images of SegRCDB between two stored states */

/* The rules by which a script draws. */
enum published_law { PUBLISHED_RCDB, PUBLISHED_SEGRCDB, PUBLISHED_VISUALATOM };

/* A published set. Constant. */
struct published_set {
    const char *name;
    enum published_law law;
    uint32_t classes; /* numbers of classes begin with first_class */
    uint32_t first_class;
    uint32_t script_threads; /* script thread t is seeded with t + 1 */
    uint32_t blocks; /* a multiple of script_threads; block b belongs to thread b / (blocks / threads) */
    uint32_t block_images;
    uint8_t background;
    bool has_masks;
};

/* The parameters of a class, as the script draws them. Lengths are in pixels. */
struct published_class {
    uint32_t number;
    uint32_t vertices, orbits; /* Vertex, Line_num */
    double noise, line_width;  /* Perlin_noise, line_width */
    uint32_t radius;           /* Center_rad: of the start circle */
    double oval_x, oval_y;     /* Oval_rate_x, Oval_rate_y: stretch of the start circle */
    uint32_t wave1, wave2;     /* nami1, nami2: only VisualAtom */
    double start_h, start_w;   /* start_pos_h, start_pos_w: centre of instance 0; not SegRCDB */
    uint32_t gray;             /* Color_Gray: value in the mask, equal to the number; only SegRCDB */
};

/* A data set that is open for drawing. Functions that take it as const may be called by several threads. */
struct published;

/* What one thread needs to draw. */
struct published_worker;

/* Returns the set with this name ("rcdb-1k", "rcdb-21k", "segrcdb", "visualatom-script-1k"), or NULL. */
const struct published_set *published_set_find(const char *name);

/* Returns set number i, or NULL if there are no more. */
const struct published_set *published_set_at(size_t i);

/* Opens a set. Reads the states of its streams from the cache folder, or computes them on `threads` threads
 * and stores them there. Shows progress. The folder is $XDG_CACHE_HOME/fdsl-bench, or ~/.cache/fdsl-bench. A
 * damaged file in it is replaced, with a warning. If the folder cannot be written, warns and continues.
 * Free with published_close(), even after an error. STATUS_UNAVAILABLE if cos() or sin() of this C library
 * round differently from those of the published images; STATUS_EXHAUSTED if memory runs out. */
enum status published_open(const struct published_set *set, int threads, struct published **published);
void published_close(struct published *published);

/* Draws the parameters of the classes of a set, without opening it: SegRCDB. published_open() has drawn those
 * of the other sets. Returns set->classes classes, in the order of their numbers, owned by `published`. */
const struct published_class *published_classes(const struct published *published);

/* Creates or frees what a thread needs. STATUS_EXHAUSTED. */
enum status published_worker_open(const struct published *published, struct published_worker **worker);
void published_worker_close(struct published_worker *worker);

/* Draws one image: set->block_images instances per block. For RCDB and VisualAtom, `block` is the index of
 * the class and `instance` the number of the image in the class. For SegRCDB, image number n is instance
 * n % PUBLISHED_SEG_BLOCK of block n / PUBLISHED_SEG_BLOCK. `pixels` and, if the set has masks and `mask` is
 * not NULL, `mask` get PUBLISHED_RES * PUBLISHED_RES bytes each. A pixel of the mask is the number of the
 * class drawn there, or 0.
 *
 * Drawing the instances of a block in ascending order skips nothing twice, in any order of blocks and on any
 * thread. If `plain` is true, draws line by line and pixel by pixel, with scalar arithmetic: the reference,
 * with the same result. STATUS_EXHAUSTED if memory runs out. */
enum status published_draw(struct published *published, struct published_worker *worker, uint32_t block,
                           uint32_t instance, bool plain, uint8_t *pixels, uint8_t *mask);

#endif
