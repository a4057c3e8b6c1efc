/* Declarations that published.c (numbers and drawing), published_states.c (tables and states of streams) and
 * ifs_*.c (classes of iterated function systems) share. */
#ifndef FDSL_SYNTH_PUBLISHED_PARTS_H
#define FDSL_SYNTH_PUBLISHED_PARTS_H

#include <limits.h>

#include "core/portable.h"
#include "synth/published.h"
#include "synth/published_random.h"

/* Before a function: the compiler generates a second version for AVX2, which has vectors of 8 words. The
 * dynamic linker picks one at program start. Both versions give the same bits. */
#if defined(__x86_64__) && defined(__linux__) && !defined(FDSL_SANITIZED)
#define WIDE_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define WIDE_CLONES
#endif

struct cursor;

struct published {
    const struct published_set *set; /* &own_set */
    struct published_set own_set;
    uint32_t users;                  /* how often it is open */
    struct published_class *classes; /* set->classes */
    struct twister *states;          /* one per block: the stream before the first number of each block */
    struct cursor *_Atomic
        *cursors; /* one per block: the stream after the latest image of a block, or NULL */

    /* For each number of vertices q: cos(2 pi v / q), v = 0 .. q - 1, then the sines. */
    double *directions;
};

/* Draws the parameters of a class. Leaves class_->number, and what the law does not have, unchanged. */
void published_draw_class(enum published_law law, struct twister *stream, struct published_class *class_);

/* Moves `stream` from the beginning of a block to that of the next block of the same script thread. Sets the
 * parameters of the class that is the block (not SegRCDB). */
void published_skip_block(const struct published *published, uint32_t block, struct twister *stream);

/* Stores the path of a file in the cache folder; "" if the environment names no folder. */
void cache_path(const char *name, char path[PATH_MAX]);

/* Creates the folders of a path that do not exist. An error shows when the file is written. */
void cache_make_folders(char *path);

/* Replaces the last value of each map, its probability, by the share of its determinant. */
struct ifs_system;
void ifs_set_probabilities(struct ifs_system *system);

/* Returns the cosines of polygons with this number of vertices; the sines follow. */
static inline const double *published_cosines(const struct published *published, uint32_t vertices)
{
    enum { FIRST = PUBLISHED_VERTICES_MIN };
    return published->directions + ((size_t)vertices * (vertices - 1) - FIRST * (FIRST - 1));
}

#endif
