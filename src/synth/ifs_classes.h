/* Classes of iterated function systems (ifs.h): the search of FractalDB, the built-in lists that it found,
 * 1p-frac, and the class files of the published scripts. */
#ifndef FDSL_SYNTH_IFS_CLASSES_H
#define FDSL_SYNTH_IFS_CLASSES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/status.h"
#include "synth/formula.h"
#include "synth/ifs.h"

struct twister;

/* Converts a system to a class, the inverse of ifs_system(). */
void ifs_row(const struct ifs_system *system, struct class_row *row);

/* ---- Parameters of the formulas: the number of maps, then of each map its coefficients and probability.
 * Values of maps that a class does not have are 0 ---- */

#define IFS_MAPS_PARAMETER(most)                     \
    {                                                \
        "maps", PARAMETER_INTEGER, 2, most, .low = 2 \
    }
#define IFS_PARAMETER(name, most)                       \
    {                                                   \
        name, PARAMETER_DOUBLE, -(most), most, .low = 0 \
    }
#define IFS_PROBABILITY(m)                       \
    {                                            \
        "p" #m, PARAMETER_DOUBLE, 0, 1, .low = 0 \
    }
#define IFS_COEFFICIENT(name) IFS_PARAMETER(name, 1e6) /* of fractals in black and white */

/* ---- Search ----
 *
 * The classes of a seed are the candidates of one stream of NumPy's random numbers whose fractal fills enough
 * of its image, exactly as the published script finds them. Seed 1 and threshold 0.2 give FractalDB. */

#define IFS_THRESHOLD     0.2  /* of FractalDB */
#define IFS_THRESHOLD_MIN 0.01 /* candidates that are less dense have no extent */
#define IFS_THRESHOLD_MAX 0.35 /* 100000 points visit at most 0.38 of the cells */

struct ifs_search {
    uint32_t seed;
    uint32_t classes; /* number of classes to find, at least 1 */
    double threshold; /* least share of the cells of a 512 x 512 image that the orbit visits */
    int threads;
    bool quiet; /* show no progress */
};

/* A class that was found. Its id is its number among them. */
struct ifs_found {
    struct ifs_system system;
    uint64_t candidate; /* its number in the stream, from 0 */
};

/* Finds the first search->classes classes of a stream, in its order. The result does not depend on the number
 * of threads. STATUS_USAGE if the threshold is outside the limits; STATUS_FAILED if too few of many
 * candidates reach it; STATUS_EXHAUSTED if memory runs out. */
enum status ifs_search(const struct ifs_search *search, struct ifs_found *found);

/* Converts the first `count` classes of a search on parallel_threads() threads. */
enum status ifs_search_rows(uint32_t seed, double threshold, uint32_t count, struct class_row *rows);

/* Draws the maps of the next candidate. Leaves the stream at the IFS_SEARCH_WORDS words that choose the maps
 * of its orbit. */
#define IFS_SEARCH_WORDS 200000u
void ifs_draw_candidate(struct twister *stream, struct ifs_system *system);

/* ---- Presets ---- */

/* The contents of configs/fractaldb.bin, little-endian. It has the maps of the first classes of FractalDB. Of
 * all classes, it has the gaps between their candidates in the stream of the search. The stream is stored at
 * every IFS_LIST_STEP-th class, so that the other maps are read from it in parallel. The probabilities of
 * maps follow from their coefficients. */
enum { IFS_LIST_BEGIN = 1000, IFS_LIST_MAPS = 3646, IFS_LIST_COUNT = 21000, IFS_LIST_STEP = 500 };
struct ifs_list {
    double maps[IFS_LIST_MAPS][6];
    uint32_t states[IFS_LIST_COUNT / IFS_LIST_STEP][625]; /* struct twister */
    uint16_t gaps[IFS_LIST_COUNT];                        /* candidates since the class before */
    uint8_t counts[IFS_LIST_BEGIN];                       /* maps of a class */
    uint8_t attempts[IFS_LIST_BEGIN];                     /* of classes of the preset 1p-frac */
};

/* Writes a cache file of classes; the path comes from cache_path(). Warns if it fails; `set` is the name of
 * the set. */
void ifs_cache_write(char *path, const char *set, const void *classes, size_t bytes);

/* Implements rows() of the presets of FractalDB and OFDB. More than IFS_LIST_BEGIN classes are read from a
 * cache file. If there is none, they are computed, and the file is written. */
enum status ifs_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows);

/* A set like 1p-frac: its classes are one system of two maps, whose coefficients vary a little. */
struct ifs_one {
    uint64_t seed;
    double sigma; /* sum of the maps' singular values, the smaller one of each map counted twice; varies by
                     0.1 with the seed */
    double delta; /* largest relative deviation of a coefficient */
};

/* The preset 1p-frac, with the values of the published script. */
extern const struct ifs_one ifs_one_frac;

/* Draws attempt number `attempt` at class `id`. A pure function of its arguments. */
void ifs_draw_one(const struct ifs_one *one, uint32_t id, uint32_t attempt, struct ifs_system *system);

/* Draws classes 0 .. count - 1. For each, takes the first attempt whose images of patches are expected to
 * have more than 5 % set pixels on a canvas of rules->res. `attempts` receives its number; NULL: not wanted.
 * STATUS_FAILED if there is none among many. */
enum status ifs_draw_ones(const struct ifs_one *one, const struct ifs_rules *rules, uint32_t count,
                          struct class_row *rows, uint8_t *attempts);

/* Implements rows() of the preset 1p-frac. */
enum status ifs_one_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows);

/* Implements rows() of the presets of FAMILY_COLOR: systems of 2 to 4 maps, whose singular values are sampled
 * with a given sum, as Anderson and Farrell (WACV 2022) do. A row is a function of its number. */
enum status ifs_sampled_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows);

/* ---- Orbits of a set ---- */

/* Statistics of an orbit. */
struct ifs_look {
    float fill;     /* share of the cells that are occupied */
    float lit;      /* expected share of set pixels in an image of patches */
    bool overflows; /* of struct ifs_orbit */
};

/* Computes all orbits of `count` systems on canvases of `res` pixels per side, and writes what they look
 * like: ifs_orbits() per system. Shows progress. STATUS_EXHAUSTED if memory runs out. */
enum status ifs_look(const struct ifs_rules *rules, const struct ifs_system *systems, uint32_t count,
                     const double *uniforms, uint32_t res, struct ifs_look *looks);

/* Replaces the weights of orbits whose images have an expected share of set pixels below `least` by those
 * that leave the class as it is. STATUS_USAGE if the rules have no weights. */
enum status ifs_replace_dark(const struct ifs_rules *rules, struct ifs_system *systems, uint32_t count,
                             const double *uniforms, uint32_t res, double least);

/* The distribution of a share of pixels over the orbits of a set. */
enum { IFS_DARKS = 4 };
extern const double ifs_darks[IFS_DARKS]; /* 0.001, 0.01, 0.05, 0.2 */
struct ifs_shares {
    double mean, quartiles[3];
    uint64_t below[IFS_DARKS]; /* orbits with a smaller share than ifs_darks */
};

#define IFS_OBJECTS_MAX 5 /* objects of an image in colour */

/* The report of --describe on a set. */
struct ifs_report {
    uint32_t classes, orbits, points, flips, res; /* orbits: per class; points: per orbit */
    double maps;                                  /* per class, on average */
    uint64_t overflows, overflow_classes;         /* orbits that overflow, and classes with such an orbit */
    struct ifs_shares fill, lit;                  /* of struct ifs_look */
    /* Fractals in colour only; `fill` and `lit` are then of struct color_look, and there are no orbits. */
    uint32_t images;                   /* that were examined; 0: other fractals */
    uint64_t objects[IFS_OBJECTS_MAX]; /* objects[n]: images with n + 1 objects */
    uint32_t shown_least, shown_most;  /* over the classes: images that show a class */
    double shown_mean;
};

/* Computes the report of `count` systems, as ifs_look(). */
enum status ifs_describe(const struct ifs_rules *rules, const struct ifs_system *systems, uint32_t count,
                         const double *uniforms, uint32_t res, struct ifs_report *report);

/* Prints the report on the set `name`. */
void ifs_report_print(const char *name, const struct ifs_report *report, FILE *stream);

/* Computes the distribution of a share of pixels, and sorts `shares`. */
struct ifs_shares ifs_distribute(float *shares, size_t count);

/* Prints the distribution of a share of pixels of `count` orbits, and sorts `shares`. */
void ifs_print_shares(const char *what, float *shares, size_t count, FILE *stream);

/* ---- Names of published files ---- */

/* Writes the name of an image's file without ".png", as the scripts name it in the folder of its class. Those
 * of 1p-frac, which have the class number twice, differ from those of FractalDB. `name` has room for
 * PUBLISHED_NAME_BYTES (class.h). */
void ifs_image_name(const struct ifs_rules *rules, uint32_t id, uint64_t instance, char *name);

/* Returns the number of digits to which the names of class folders are padded: 2 for 1p-frac, so that the
 * sorted order of its folders is 00, 01, ..., 10, 100, 101, ... */
int ifs_name_digits(const struct ifs_rules *rules);

/* ---- Published class files ----
 *
 * One file per class, one line a,b,c,d,e,f,p per map, or a,b,...,l,p of a map of space (ifs3d.h), numbers as
 * "%.18e". `values` is the number of values of a line: ifs_values_of(). */

static inline uint32_t ifs_values_of(const struct formula *formula)
{
    return formula->family == FAMILY_IFS3D ? IFS3D_MAP_VALUES : IFS_MAP_VALUES;
}

/* Reads a class from the text of a file, terminated by a zero, which it changes. Messages begin with `name`.
 * Checks the form, but not the limits of the formula. Empty lines may end the text. */
enum status ifs_text_read(const char *name, char *text, uint32_t values, struct class_row *row);

/* Writes the text of a class's file, terminated by a zero. Returns the length. */
size_t ifs_text_write(const struct class_row *row, uint32_t values, char *text, size_t size);

#endif
