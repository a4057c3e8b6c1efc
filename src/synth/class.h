/* Class parameters: drawn from ranges, or taken from a CSV list. They can also be written as a CSV list.
 *
 * A preset is either a section of an INI file, with a range for each parameter, or a CSV list. The program
 * has built-in copies of one INI file, configs/classes.cfg, and of two lists of 1000 classes,
 * configs/paper_1000.csv and configs/lowercompute_1000.csv. A drawn class is a pure function of its number
 * and the preset's ranges and seed, so class c does not depend on the number of classes or processes. */
#ifndef FDSL_SYNTH_CLASS_H
#define FDSL_SYNTH_CLASS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "synth/atom.h"

/* The ranges of a preset, both ends inclusive. */
struct class_ranges {
    uint64_t seed;
    uint32_t vertices_min, vertices_max;
    uint32_t orbits_min, orbits_max;
    double oval_max; /* maximum of oval_x and oval_y; the minimum is 1 */
    uint32_t freq_min, freq_max;
    double noise_min, noise_max;     /* noise_max has no key in the file; it is noise_min + 4 */
    uint32_t radius_min, radius_max; /* radius_max has no key in the file; it is radius_min + 50 */
    double line_width_max;           /* maximum of the line width; the minimum is 0 */
};

/* Limits on all classes, drawn or read. CLASS_REACH_MAX keeps coordinates of vertices below 2^24, where
 * float32 represents every integer exactly. */
#define CLASS_VERTICES_MAX 1048576u
#define CLASS_ORBITS_MAX   1048576u
#define CLASS_FREQ_MAX     1048576u  /* a frequency n has the effect of n mod vertices */
#define CLASS_REACH_MAX    8388608.0 /* largest distance of a vertex from the centre in pixels: 2^23 */
#define CLASS_COUNT_MAX    1048576u  /* maximum number of drawn classes */

FDSL_C_BEGIN

/* Reads the ranges of section `preset` from the INI file `path`, or from the built-in classes.cfg if path is
 * NULL. STATUS_USAGE, with a message that names the file and the reason, in these cases: the file is
 * unreadable or malformed; the section is unknown (the message suggests the nearest name, or lists some); a
 * key is missing, unknown or repeated; a value is not a number or exceeds a limit; or a minimum exceeds its
 * maximum. STATUS_UNAVAILABLE if the build has no inih. */
enum status class_ranges_read(const char *path, const char *preset, struct class_ranges *ranges);

/* Draws class number `id` from the ranges. The class is a pure function of `ranges` and `id`. */
void class_draw(const struct class_ranges *ranges, uint32_t id, struct atom_class *class_);

/* Returns an upper bound on the distance of any vertex of the class from the centre, in pixels. */
double class_reach(const struct atom_class *class_);

/* Checks the parameters of a class against the limits CLASS_..._MAX. STATUS_USAGE, with a message that names
 * the class and the parameter. */
enum status class_check(const struct atom_class *class_);

/* Checks that no two classes have the same id. STATUS_USAGE names the id. */
enum status class_check_unique(const struct atom_class *classes, size_t count);

/* Reads a CSV list with the header class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width.
 * On success, `*classes` is an array of `*count` >= 1 classes, which the caller frees. All classes are within
 * the limits, and their ids are unique. STATUS_USAGE names the file, the line and, for a bad value, the
 * column. */
enum status class_read_csv(const char *path, struct atom_class **classes, size_t *count);

/* Returns whether the preset is a built-in list of classes. Other presets are sets of ranges. */
bool class_preset_is_list(const char *preset);

/* Reads the classes of a preset that is a built-in list. The results and errors are those of
 * class_read_csv(). */
enum status class_read_preset(const char *preset, struct atom_class **classes, size_t *count);

/* Checks that class_write_csv() can write `path`, and that an existing file is empty or a list of classes.
 * STATUS_USAGE gives the reason and a remedy. */
enum status class_check_csv(const char *path);

/* Writes classes in the format of class_read_csv(), atomically. Reals have the fewest digits that read back
 * as the same float. */
enum status class_write_csv(const char *path, const struct atom_class *classes, size_t count);

FDSL_C_END

#endif
