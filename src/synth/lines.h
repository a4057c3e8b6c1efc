/* Classes of line formulas (atom.h), as host code sees them. */
#ifndef FDSL_SYNTH_LINES_H
#define FDSL_SYNTH_LINES_H

#include "synth/formula.h"

/* Limits on all classes, drawn or read. LINES_REACH_MAX keeps coordinates of vertices below 2^24, where
 * float32 represents every integer exactly. */
#define LINES_VERTICES_MAX 1048576u
#define LINES_ORBITS_MAX   1048576u
#define LINES_FREQ_MAX     1048576u  /* a frequency n has the effect of n mod vertices */
#define LINES_REACH_MAX    8388608.0 /* largest distance of a vertex from the centre in pixels: 2^23 */

/* The parameters of radial contours (RCDB, SegRCDB). The last two are a centre. RCDB draws a start circle and
 * a centre for every image, so `radius` and the parameters after it have no effect on its images: they are
 * the values of instance 0 in the published set. */
#define LINES_RADIAL_PARAMETERS 9

FDSL_C_BEGIN

extern const struct formula_parameter lines_radial_parameters[LINES_RADIAL_PARAMETERS];

/* Converts a class to what drawing needs: float32, with the noise factor of the formula. Parameters that the
 * formula lacks are 0. */
void lines_class(const struct formula *formula, const struct class_row *row, struct atom_class *class_);

/* Returns an upper bound on the distance of any vertex of the class from the centre, in pixels. */
double lines_reach(const struct line_rules *rules, const struct atom_class *class_);

/* Implements check() of a struct formula: the reach is at most LINES_REACH_MAX. */
enum status lines_check(const struct formula *formula, const struct class_row *row);

/* The published streams of line formulas, for struct formula; published.h describes them. */
extern const struct published_stream published_lines;

/* Implements rows() of a struct formula_preset with a set. May compute the states of the set. */
enum status published_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows);

/* Converts a class of a set. */
void published_row(const struct formula *formula, const struct published_class *class_,
                   struct class_row *row);

FDSL_C_END

#endif
