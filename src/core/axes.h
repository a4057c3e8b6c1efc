/* Axes: lists and ranges as values of options. `--res 224,512` lists values, `--batch 1:256:2x` doubles from
 * 1 to 256, `--orbits 50:200:50` counts from 50 to 200 in steps of 50, and `1,8:64:2x` is a list that
 * contains a range. A combination has one value of every axis. Not thread-safe. */
#ifndef FDSL_CORE_AXES_H
#define FDSL_CORE_AXES_H

#include <stdbool.h>
#include <stddef.h>

#include "core/options.h"

#define AXES_MAX         16
#define AXIS_TEXT_BYTES  64    /* room for any number, and for any word that an option accepts */
#define COMBINATIONS_MAX 10000 /* more combinations than this are probably a typing error */

struct axis {
    const struct option_spec *spec;
    void *values;                   /* the struct that stores the option's value */
    char (*texts)[AXIS_TEXT_BYTES]; /* owned: `count` different values, as options_text() writes them */
    size_t count;
};

/* All axes, in the order of the command line. Initialise with zeros; axes_free() frees the values. */
struct axes {
    struct axis at[AXES_MAX];
    size_t count;
};

/* Returns whether `text` has the form of a list or a range and the option accepts lists and ranges. An option
 * accepts them if it takes a number or a word and has a CSV column. */
bool axes_accept(const struct option_spec *spec, const char *text);

/* Appends an axis for an option that has no axis yet. Stores each value in the struct `values` to check it.
 * STATUS_USAGE for an invalid value or range, a value that occurs twice, or too many values or axes. */
enum status axes_add(struct axes *axes, const struct option_spec *spec, void *values, const char *text);

/* Removes the axis of the option, if it has one. Called when a later value replaces the list. */
void axes_remove(struct axes *axes, const struct option_spec *spec);

/* axes_combinations() returns the number of combinations, which is 1 if there are no axes. axes_check()
 * returns STATUS_USAGE if there are more than COMBINATIONS_MAX combinations. */
size_t axes_combinations(const struct axes *axes);
enum status axes_check(const struct axes *axes);

/* Returns the value of axis number `axis` in a combination. The last axis changes fastest. */
const char *axes_text(const struct axes *axes, size_t axis, size_t combination);

/* Returns the width of a column for the name and the values of axis number `axis`, in characters. */
int axes_width(const struct axes *axes, size_t axis);

/* Returns the axis of the option with this name, or NULL. */
const struct axis *axes_find(const struct axes *axes, const char *name);

/* Stores the values of a combination in the options' structs. */
enum status axes_select(const struct axes *axes, size_t combination);

/* Writes a combination as options ("--res 224 --batch 8") into a buffer of `size` bytes, truncated if it does
 * not fit. */
void axes_describe(const struct axes *axes, size_t combination, char *text, size_t size);

/* Writes the options with which a user continues at combination number `combination`. They replace the
 * options of the same names in the original command. The text describes one or more commands, at most one per
 * axis, for example "--res 16 --batch 4,8, then with --res 32". Writes "" if `combination` is 0. Returns
 * false if the text does not fit into `size` bytes. */
bool axes_describe_rest(const struct axes *axes, size_t combination, char *text, size_t size);

void axes_free(struct axes *axes);

#endif
