/* Published data sets of line formulas, pixel for pixel: RCDB, SegRCDB and VisualAtom as their scripts draw
 * them.
 *
 * Each script runs as several processes ("script threads"). Each of these seeds Python's `random` once, and
 * draws the parameters of its classes and all their images from one stream of numbers. Image (c, i) therefore
 * depends on all numbers before it. This code keeps the state of the stream at the first image of every
 * block: a class, or 20 images of SegRCDB. From there it skips the numbers of the images in
 * between without drawing them.
 *
 * Arithmetic is IEEE double without fused operations, and the noise is float32, as in the scripts. */
#ifndef FDSL_SYNTH_PUBLISHED_H
#define FDSL_SYNTH_PUBLISHED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

#define PUBLISHED_RES          512  /* pixels per side of every canvas with a published stream */
#define PUBLISHED_VERTICES_MIN 3    /* of a polygon */
#define PUBLISHED_VERTICES_MAX 1000 /* of a polygon */

/* The rules by which a script draws: the order of its draws, and where it rounds. */
enum published_law {
    PUBLISHED_RCDB,
    PUBLISHED_SEGRCDB,
    PUBLISHED_VISUALATOM,
    PUBLISHED_FRACTALDB /* no stream: FAMILY_IFS (formula.h); only points are reproducible */
};

/* A data set that a published script makes. Constant. */
struct published_set {
    const char *name;
    enum published_law law;
    uint32_t threads; /* script thread t is seeded with t + 1, and draws a share of the set */
    uint32_t classes; /* their numbers begin with first_class */
    uint32_t first_class;
    uint64_t instances;    /* images per class; of the set, if an image shows several classes */
    uint32_t block_images; /* images between two stored states: `instances`, or a divisor of a thread's share
                              if an image shows several classes */
    uint32_t res;          /* side of its images: PUBLISHED_RES, except for PUBLISHED_FRACTALDB */
    uint8_t background;
    bool has_masks; /* an image shows several classes */
};

/* One image to draw. */
struct published_image {
    uint32_t class_index; /* 0 if an image shows several classes */
    uint64_t instance;    /* 0 .. set->instances - 1 */
    uint8_t *canvas;      /* res * res grays, row-major, `pitch` bytes per row */
    uint8_t *mask; /* the same for class numbers, 0 for the background; NULL: not wanted. Unchanged if the
                      set has no masks */
    size_t pitch;
    bool plain; /* draw line by line and pixel by pixel, with scalar arithmetic: the reference. Same result */
};

/* Returns the number of stored states. */
static inline uint32_t published_blocks(const struct published_set *set)
{
    return set->has_masks ? (uint32_t)(set->instances / set->block_images) : set->classes;
}

/* The parameters of a class, as the script draws them. Lengths are in pixels. */
struct published_class {
    uint32_t number;
    uint32_t vertices, orbits; /* Vertex, Line_num */
    double noise, line_width;  /* Perlin_noise, line_width */
    uint32_t radius;           /* Center_rad: of the start circle */
    double oval_x, oval_y;     /* Oval_rate_x, Oval_rate_y: stretch of the start circle */
    uint32_t wave1, wave2;     /* nami1, nami2: only VisualAtom */
    double start_h, start_w;   /* start_pos_h, start_pos_w: centre of instance 0; not SegRCDB */
};

/* A data set that is open for drawing. */
struct published;

struct remote_cancel;

/* While `cancel` is set by the calling thread, its openings end with STATUS_FAILED within about a second
 * after cancel->set becomes true, also while they wait for an opening by another thread. NULL: nothing ends
 * them. */
void published_cancel_by(const struct remote_cancel *cancel);

/* Returns what ends the openings of the calling thread, or NULL. Searches of classes end with it, too. */
const struct remote_cancel *published_cancel(void);

/* Opens a set. Reads the states of its streams from the cache folder, or computes them on `threads` threads
 * and stores them there. Shows progress. The folder is $XDG_CACHE_HOME/fdsl-bench, or ~/.cache/fdsl-bench. A
 * damaged file in it is replaced, with a warning. If the folder cannot be written, warns and continues.
 * The set that was opened last is kept, so that opening it again is cheap. Thread-safe. Close with
 * published_close(). STATUS_UNAVAILABLE if cos() or sin() of this C library round differently from those of
 * the published images; STATUS_EXHAUSTED if memory runs out; `*published` is then NULL. */
enum status published_open(const struct published_set *set, int threads, struct published **published);
void published_close(struct published *published);

/* Frees the set that is kept, if it is closed. */
void published_forget(void);

/* Returns set->classes classes, in the order of their numbers, owned by `published`. */
const struct published_class *published_classes(const struct published *published);

/* Draws one image. `scratch` has published_scratch_bytes() bytes, aligned like memory of malloc(). Drawing
 * the instances of a class in ascending order skips nothing twice, in any order of classes and on any thread.
 * Thread-safe: each thread has its own `scratch`. The pixels depend only on the set, the class and the
 * instance. */
void published_draw(const struct published *published, const struct published_image *image, void *scratch);
size_t published_scratch_bytes(const struct published *published);

#endif
