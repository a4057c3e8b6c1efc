/* Files of class parameters in the format of the published scripts: one file per class, one `key,value` line
 * per parameter, lines that end with CR LF, numbers as Python prints them. */
#ifndef FDSL_SYNTH_PUBLISHED_FILES_H
#define FDSL_SYNTH_PUBLISHED_FILES_H

#include <stddef.h>

#include "core/status.h"
#include "synth/published.h"

#define PUBLISHED_REPR_BYTES 32

/* Writes a finite number as Python's repr() of a float: the fewest digits that read back as the same double.
 * Returns `text`. */
const char *published_repr(double value, char text[PUBLISHED_REPR_BYTES]);

/* Reads the classes of a folder, or of one file. Files of a folder have names such as 00042.csv, whose number
 * is the class's; other names are skipped. If the folder has none, but a folder `param`, reads that one.
 * Lines may end with LF or CR LF, and may have any order. All files are of the same law, which the keys
 * decide. On success, `*classes` is an array of `*count` >= 1 classes with ascending numbers, which the
 * caller frees. STATUS_USAGE names the file and the line. Checks the form, but not the limits of a formula.
 */
enum status published_files_read(const char *path, enum published_law *law, struct published_class **classes,
                                 size_t *count);

/* Reads one class from the text of a file, terminated by a zero. Messages begin with `name`. */
enum status published_text_read(const char *name, char *text, enum published_law *law,
                                struct published_class *class_);

/* Writes the text of a class's file, terminated by a zero. Returns its length. */
#define PUBLISHED_TEXT_BYTES 512
size_t published_text_write(enum published_law law, const struct published_class *class_,
                            char text[PUBLISHED_TEXT_BYTES]);

/* Writes one file per class into a folder, which it creates if necessary. Files get the names and the bytes
 * of the published script; VisualAtom's script writes none, so its files have the keys of RCDB and the two
 * frequencies. Replaces files of the same names, each atomically. */
enum status published_files_write(const char *folder, enum published_law law,
                                  const struct published_class *classes, size_t count);

#endif
