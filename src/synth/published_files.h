/* Files of class parameters in the format of the published scripts, one file per class. For line formulas:
 * one `key,value` line per parameter, lines that end with CR LF, numbers as Python prints them;
 * formula->published_keys lists the keys of a formula. For iterated function systems: ifs_classes.h. */
#ifndef FDSL_SYNTH_PUBLISHED_FILES_H
#define FDSL_SYNTH_PUBLISHED_FILES_H

#include <dirent.h>
#include <stddef.h>

#include "core/status.h"
#include "synth/formula.h"

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
