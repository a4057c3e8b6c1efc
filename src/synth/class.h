/* Class parameters of any formula: drawn from ranges, or taken from a CSV list. They can also be written as a
 * CSV list.
 *
 * A preset is either a section of an INI file, with a range for each parameter, or a list of the formula. The
 * program has a built-in copy of one INI file, configs/classes.cfg. A drawn class is a pure function of its
 * number and the preset's ranges and seed, so class c does not depend on the number of classes or processes.
 */
#ifndef FDSL_SYNTH_CLASS_H
#define FDSL_SYNTH_CLASS_H

#include <dirent.h>
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

/* ---- Files of the published scripts ---- */

/* Files of class parameters in the format of the published scripts, one file per class. For line formulas:
 * one `key,value` line per parameter, lines that end with CR LF, numbers as Python prints them;
 * formula->published_keys lists the keys of a formula. For iterated function systems: ifs_classes.h. */

#define PUBLISHED_REPR_BYTES 32
#define PUBLISHED_TEXT_BYTES 4096 /* of the largest file, with a terminating zero */

/* Writes a finite number as Python's repr() of a float: the fewest digits that read back as the same double.
 * A power of two below 2^-17 may get one digit more. Returns `text`. */
const char *published_repr(double value, char text[PUBLISHED_REPR_BYTES]);

/* Sets a parameter by its column. Files may have columns that the formula does not draw with, such as a start
 * position. Their values follow those of the formula's parameters in the row, in the order of the keys.
 * Returns false if neither the formula nor its files have the column. */
bool published_set_column(const struct formula *formula, struct class_row *row, const char *column,
                          double value);

#define PUBLISHED_NAME_BYTES 48

/* Writes the name of an image's file without ".png", as the script of the set names it in the folder of the
 * class, or of all images if an image shows several classes. `row` is the class, if an image has one. */
void published_image_name(const struct published_set *set, const struct class_row *row, uint64_t instance,
                          char name[PUBLISHED_NAME_BYTES]);

/* Reads the classes of a folder, or of one file. Files of a folder have names such as 00042.csv, whose number
 * is the class's; other names are skipped. If the folder has none, but a folder `param`, reads that one.
 * Lines may end with LF or CR LF, and may have any order. On success, `*rows` is an array of `*count` >= 1
 * classes with ascending numbers, within the limits of the formula, which the caller frees. STATUS_USAGE
 * names the file and the line; also if the scripts of the formula write no such files. */
enum status published_files_read(const char *path, const struct formula *formula, struct class_row **rows,
                                 size_t *count);

/* Reads one class from the text of a file, terminated by a zero. `id` is its number unless the file has it.
 * Messages begin with `name`. Checks the form, but not the limits of the formula. */
enum status published_text_read(const char *name, char *text, const struct formula *formula, uint32_t id,
                                struct class_row *row);

/* Writes the text of a class's file, terminated by a zero. Omits columns with which the formula does not draw
 * if all of them are 0. Returns the length. */
size_t published_text_write(const struct formula *formula, const struct class_row *row,
                            char text[PUBLISHED_TEXT_BYTES]);

/* For CLOSED_BY(). Ignores NULL. */
static inline void folder_close(DIR **opened)
{
    if (*opened)
        closedir(*opened);
}

/* Checks that published_files_write() can write into `folder`, or create it. STATUS_USAGE gives the reason;
 * also if the scripts of the formula write no such files. */
enum status published_files_check(const char *folder, const struct formula *formula);

/* Writes one file per class into a folder, which it creates if necessary. Files get the names and the bytes
 * of the published script. Replaces files of the same names, each atomically. */
enum status published_files_write(const char *folder, const struct formula *formula,
                                  const struct class_row *rows, size_t count);

#endif
