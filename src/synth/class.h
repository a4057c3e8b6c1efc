/* Class parameters of any formula: drawn from ranges, or taken from a CSV list. They can also be written as a
 * CSV list.
 *
 * A preset is either a section of an INI file, with a range for each parameter, or a list of the formula. The
 * program has a built-in copy of one INI file, configs/classes.cfg. A drawn class is a pure function of its
 * number and the preset's ranges and seed, so class c does not depend on the number of classes or processes.
 */
#ifndef FDSL_SYNTH_CLASS_H
#define FDSL_SYNTH_CLASS_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "synth/formula.h"

/* The ranges of a preset, both ends inclusive. */
struct class_ranges {
    const struct formula *formula;
    uint64_t seed;
    double mean; /* of LAW_EXPONENTIAL; fractals: the threshold of the search (ifs_classes.h, ifs3d.h) */
    double low[FORMULA_PARAMETERS_MAX], high[FORMULA_PARAMETERS_MAX]; /* per parameter of the formula */
};

#define CLASS_COUNT_MAX 1048576u /* maximum number of drawn classes */

FDSL_C_BEGIN

/* Reads the ranges of section `preset` from the INI file `path`, or from the built-in classes.cfg if path is
 * NULL. The keys of the section are those of the formula's parameters. STATUS_USAGE, with a message that
 * names the file and the reason, in these cases: the file is unreadable or malformed; the section is unknown
 * (the message suggests the nearest name, or lists some); a key is missing, unknown or repeated; a value is
 * not a number or exceeds a limit; or a minimum exceeds its maximum. STATUS_UNAVAILABLE if the build has no
 * inih. */
enum status class_ranges_read(const char *path, const char *preset, const struct formula *formula,
                              struct class_ranges *ranges);

/* Draws class number `id` from the ranges. The class is a pure function of `ranges` and `id`. */
void class_draw(const struct class_ranges *ranges, uint32_t id, struct class_row *row);

/* Checks the number and the parameters of a class against the limits of the formula. STATUS_USAGE, with a
 * message that names the class and the parameter. */
enum status class_check(const struct formula *formula, const struct class_row *row);

/* Checks that no two classes have the same id. STATUS_USAGE names the id. */
enum status class_check_unique(const struct class_row *rows, size_t count);

/* Reads a CSV list. Its header is "class" and the names of the formula's parameters; a byte order mark before
 * it is skipped. On success, `*rows` is an array of `*count` >= 1 classes, which the caller frees. All
 * classes are within the limits, and their ids are unique. STATUS_USAGE names the file, the line and, for a
 * bad value, the column. */
enum status class_read_csv(const char *path, const struct formula *formula, struct class_row **rows,
                           size_t *count);

/* Returns the first formula whose list has the header of this file; NULL if there is none, if the file cannot
 * be read, or if it is a pipe, from which class_read() could then not read the header again. */
const struct formula *class_formula_of(const char *path);

/* Reads classes from a CSV list, or from files of a published script: from a folder of them, or from one,
 * which lacks the header of a list (published_files_read()). Otherwise as class_read_csv(). */
enum status class_read(const char *path, const struct formula *formula, struct class_row **rows,
                       size_t *count);

/* Reads a list in the format of class_read_csv() from a text. Messages contain `name`. */
enum status class_read_text(const char *text, const char *name, const struct formula *formula,
                            struct class_row **rows, size_t *count);

/* Checks that class_write_csv() can write `path`, and that an existing file is empty or a list of classes.
 * STATUS_USAGE gives the reason and a remedy. */
enum status class_check_csv(const char *path, const struct formula *formula);

/* Writes classes in the format of class_read_csv(), atomically. Reals have the fewest digits that read back
 * as the same number. */
enum status class_write_csv(const char *path, const struct formula *formula, const struct class_row *rows,
                            size_t count);

FDSL_C_END

#endif
