/* Classes: where their parameters come from.
 *
 * A preset is a set of ranges: a section of an INI file, or of configs/classes.cfg, which is built into the
 * program. A class drawn from it is a pure function of (ranges, seed, class number), so class c does not
 * depend on how many classes or processes there are. Exact classes can be read from CSV
 * and written to it. */
#ifndef FDSL_SYNTH_CLASS_H
#define FDSL_SYNTH_CLASS_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "synth/atom.h"

/* The ranges of a preset; both ends belong to them. */
struct class_ranges {
    uint64_t seed;
    uint32_t vertices_min, vertices_max;
    uint32_t orbits_min, orbits_max;
    double oval_max; /* ovality is drawn from 1 .. oval_max */
    uint32_t freq_min, freq_max;
    double noise_min, noise_max;     /* noise_max is noisecoef_min + 4 */
    uint32_t radius_min, radius_max; /* radius_max is startrad_min + 50 */
    double line_width_max;           /* drawn from 0 .. line_width_max */
};

/* Limits on any class, wherever it comes from. The reach keeps every coordinate an exact float32 integer. */
#define CLASS_VERTICES_MAX 1048576u
#define CLASS_ORBITS_MAX   1048576u
#define CLASS_FREQ_MAX     1048576u  /* beyond the vertices, frequencies only repeat */
#define CLASS_REACH_MAX    8388608.0 /* pixels from the centre: 2^23 */

FDSL_C_BEGIN

/* Reads the ranges of section `preset` from the INI file `path`, or from the built-in classes.cfg where path
 * is NULL. STATUS_USAGE, with file and reason, for a file that cannot be read or parsed, an unknown section
 * (with the nearest one), a missing, unknown or repeated key, a value that is no
 * number, an inverted range. */
enum status class_ranges_read(const char *path, const char *preset, struct class_ranges *ranges);

/* Class number `id` of these ranges. */
void class_draw(const struct class_ranges *ranges, uint32_t id, struct atom_class *class_);

/* The farthest that any vertex of the class can get from the centre, in pixels. */
double class_reach(const struct atom_class *class_);

/* Checks a class against the limits above. STATUS_USAGE names the class and the parameter. */
enum status class_check(const struct atom_class *class_);

/* Reads a CSV list with the header class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width.
 * `*classes` (the caller frees it) gets `*count` >= 1 of them, each checked, ids unique. STATUS_USAGE with
 * file, line and column otherwise. */
enum status class_read_csv(const char *path, struct atom_class **classes, size_t *count);

/* Checks that class_write_csv() could write `path`, and that what is there is such a list or empty.
 * STATUS_USAGE with the reason and a remedy. */
enum status class_check_csv(const char *path);

/* Writes the same format, atomically; reals in the fewest digits that read back to the same float. */
enum status class_write_csv(const char *path, const struct atom_class *classes, size_t count);

FDSL_C_END

#endif
