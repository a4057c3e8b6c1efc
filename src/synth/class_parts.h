/* Declarations that class.c, class_csv.c and class_ranges.c share. */
#ifndef FDSL_SYNTH_CLASS_PARTS_H
#define FDSL_SYNTH_CLASS_PARTS_H

#include <stdio.h>

#include "synth/class.h"

/* A named number in a struct: a column of the CSV list, or a key of the INI file. */
struct number {
    const char *name;
    enum { NUMBER_U32, NUMBER_U64, NUMBER_FLOAT, NUMBER_DOUBLE } kind;
    size_t offset;
    double minimum, maximum;
};

/* Parses `text` into the field of `values` that `number` describes. STATUS_USAGE names the number. */
enum status number_parse(const struct number *number, const char *text, void *values);

/* Opens a text file, which the caller closes. Refuses character devices, because some, such as /dev/zero,
 * never end a line. */
enum status class_open(const char *path, FILE **stream);

/* The parameters of a class with their limits, in the column order of a CSV list. */
enum { CLASS_COLUMNS = 10 };
extern const struct number class_columns[CLASS_COLUMNS];

/* Returns a parameter of a class as a double. */
double class_column_value(const struct number *column, const struct atom_class *class_);

/* Checks a class like class_check(), but the message does not contain the class's number. */
enum status class_check_limits(const struct atom_class *class_);

/* A built-in preset that is a list of classes; `csv` is its text. */
struct class_list_preset {
    const char *name, *csv;
};
enum { CLASS_LIST_PRESETS = 2 };
extern const struct class_list_preset class_list_presets[CLASS_LIST_PRESETS];

#endif
