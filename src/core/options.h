/* Command-line options as tables: one line per option defines parsing, checks, --help and the CSV column. An
 * INI file (--config FILE) can have options, too; they come before those of the command line. */
#ifndef FDSL_CORE_OPTIONS_H
#define FDSL_CORE_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/status.h"

struct axes;

/* An option that is not given and has no default has the value false, 0, NaN, -1 or NULL, depending on its
 * kind. A count without a default therefore needs a minimum of at least 1, unless its value 0 has the same
 * effect as not giving the option. The word "none" means "not given". It cancels a value of
 * options->defaults, for example one that a recipe sets. Real numbers accept "none" if they have no default
 * or the default 0. Texts of numbers and of words accept it if they have no default; so do counts and sizes
 * whose minimum is at least 1. */
enum option_kind {
    OPTION_FLAG,   /* bool; takes no argument */
    OPTION_COUNT,  /* uint64_t in [minimum, maximum], or OPTION_MAX for "max" if `choices` is option_max */
    OPTION_BYTES,  /* uint64_t in [minimum, maximum]; K, M and G after the number multiply it by 1024, 1024^2
                      and 1024^3. Or OPTION_ALL for "all" if `choices` is option_all */
    OPTION_REAL,   /* double in [minimum, maximum] */
    OPTION_CHOICE, /* int: an index into `choices` */
    OPTION_TEXT,   /* const char *, never empty; points into argv or to the default. With maximum > minimum,
                      it is a text of numbers in [minimum, maximum], for parse_channels(). With `choices`
                      option_words, it is one word of a list, as a number is */
    OPTION_OUTPUT  /* a text that names an output file: no two options may name the same file */
};

/* `choices` of a count that also accepts "max", and the value that is stored for this word. */
extern const char *const option_max[];
#define OPTION_MAX UINT64_C(0)

/* `choices` of a size that also accepts "all", and the value that is stored for this word. */
extern const char *const option_all[];
#define OPTION_ALL UINT64_MAX

/* `choices` of a text of which a list gives one combination for each word. */
extern const char *const option_words[];

/* `choices` of an output that "-" sends to stdout. The option's user then calls file_take_stdout(). */
extern const char *const option_stdout[];

/* Whether an option has a CSV column. Option tables use false and true. COLUMN_APART: the runner or
 * the workload adds the column itself, for example with what a default turned out to be. Options that take a
 * number or a word and have a column accept lists and ranges (axes.c). */
enum option_column { COLUMN_NONE = false, COLUMN = true, COLUMN_APART };

struct option_spec {
    const char *name;     /* without the dashes; in CSV, '-' becomes '_' */
    const char *argument; /* the placeholder in --help; NULL for a flag */
    enum option_kind kind;
    size_t offset;        /* offset of the value in the struct that the table fills */
    const char *fallback; /* the default as text, NULL for none; a flag has none */
    double minimum, maximum;
    const char *const *choices; /* NULL-terminated */
    enum option_column column;
    const char *help;
};

/* A row of a table, for macros that stand for rows. */
#define OPTION_ROW(...) \
    {                   \
        __VA_ARGS__     \
    }

/* One table and the struct that it fills. */
struct option_table {
    const struct option_spec *specs;
    size_t count;
    void *values;
};

/* A section of --help: the options of a table from `first` up to the one before the next section. Sections
 * with the same title are printed as one, also if they are in different tables. */
struct option_section {
    const char *title, *first;
};

/* A table for --help. `sections` ends with an entry whose title is NULL, and is in the order in which the
 * titles are printed. One of its sections begins with the first option of the table. */
struct option_group {
    const struct option_spec *specs;
    size_t count;
    const struct option_section *sections;
};

/* The command line, after the options of the --config file, if there is one. */
struct config {
    char **argv; /* owned: program name, options of the file, command line; NULL-terminated */
    int argc;
    const char *path; /* path of the file; points into the arguments of main(); NULL: no file */
    int file_options; /* argv[1] to argv[file_options] come from the file */
    int *lines;       /* owned: argv[i] comes from line lines[i] of the file; NULL without file options */
    bool is_row; /* set by the caller: the command line is a row of --table, with the options for all rows */
    char **command; /* what follows "--" on the command line, NULL-terminated; NULL without "--"; not owned */
};

#define OPTION_TABLES_MAX 3

struct options {
    struct option_table tables[OPTION_TABLES_MAX]; /* common options, then the workload's */
    size_t table_count;
    /* New defaults: pairs of an option's name and the text of its value, NULL-terminated. A flag can only get
     * the text "yes". NULL: none. */
    const char *const *defaults;
    const struct config *config; /* the --config file: its options come first in argv, later options override
                                    them. NULL: no file */
    size_t operands_max;         /* maximum number of arguments that are not options, such as file names */
    const char **operands; /* array of operands_max pointers into argv; may be NULL if operands_max is 0 */
    size_t operand_count;
    unsigned char *given; /* owned; one value per option of all tables: 0 if the option was not given, else
                             where and under which name */
    struct axes *axes;    /* receives lists and ranges; the tables' structs get the first value of each. NULL:
                           * lists are refused. The caller frees it with axes_free() */
    /* Called for a name that no table has: returns STATUS_USAGE with a message that says where the option
     * belongs, or STATUS_OK if no part of the program knows the name. May be NULL. */
    enum status (*explain)(void *context, const char *name);
    void *explain_context;
    const char *operand; /* option for which an argument without a name is probably meant; NULL: none */
    const char *help;    /* the arguments that print the help, such as "compare --help"; NULL: --help */
};

/* Writes all defaults into the structs of options->tables, then the values of the command line. Accepts
 * `--name value`, `--name=value`, and -h and -v for flags named "help" and "verbose". A name may be
 * abbreviated to an unambiguous prefix, unless options->explain() knows the prefix as a name. In a file of
 * --config, a flag has a value: true, yes, on, false, no or off. Allocates options->given; call
 * options_free(), even after a failure. STATUS_USAGE for an unknown option (suggests the nearest name), an
 * ambiguous prefix, a repeated option that takes a value, a missing or unexpected argument, or a value that
 * is not a number or is out of range. If the option is in a file, the message names the file and the line. */
enum status options_parse(struct options *options, int argc, char *const argv[]);
void options_free(struct options *options);

/* Parses `text` and stores the value in the struct `values`. Texts are not copied. STATUS_USAGE with a
 * message that begins with the option's name. */
enum status option_set(const struct option_spec *spec, void *values, const char *text);

/* Fills `config` with the command line up to "--". If the command line contains --config, the options of that
 * file come first. A line "name = value" means --name=value, even for a flag. Section headings are ignored.
 * The caller calls config_free(), even after a failure. STATUS_USAGE if the file cannot be read (the message
 * names it) or a line is invalid (the message names file and line). STATUS_UNAVAILABLE in a build without
 * inih. */
enum status config_read(int argc, char *argv[], struct config *config);
void config_free(struct config *config);

/* Returns whether the option accepts the value "none"; see enum option_kind. */
bool option_takes_none(const struct option_spec *spec);

/* Finds the value of an option in `argv` without options_parse(). Returns NULL if the option is not given.
 * Used for options that decide which tables options_parse() gets. Accepts `--name value`, `--name=value` and
 * prefixes that are unique in `specs`. The text belongs to `argv`. */
const char *options_peek(const struct option_spec *specs, size_t count, int argc, char *const argv[],
                         const char *name);

/* Returns whether the option was on the command line or in the configuration file, with a value other than
 * "none". */
bool options_given(const struct options *options, const char *name);

/* Returns the value of a flag. Returns false if no table has it. */
bool options_flag(const struct options *options, const char *name);

/* Returns the value of a text option. Returns NULL if it has none, or if no table has the option. */
const char *options_word(const struct options *options, const char *name);

/* Returns whether a table has an option with this name. */
bool option_in_table(const struct option_spec *specs, size_t count, const char *name);

/* Returns whether `text` is one of the choices of an option. */
bool options_is_choice(const struct option_spec *spec, const char *text);

/* Refuses all given options except those in `allowed`, which ends with NULL. `what` is the option or the
 * command to which they do not apply. */
enum status options_check_only(const struct options *options, const char *what, const char *const *allowed);

/* Appends the sentence of --help about an option, with the words of a choice. */
void options_describe(const struct option_spec *spec, char *text, size_t size);

/* Writes the value as text for a CSV row: "" for an option without a value, 0 or 1 for a flag, the shortest
 * text that parses to the same double for a real number. A text option with a maximum above its minimum is a
 * list of numbers: equal values give equal texts. */
void options_text(const struct option_spec *spec, const void *values, char *text, size_t size);

/* Writes the name of the option's CSV column: the option's name with '_' for '-'. The column of --bytes is
 * array_bytes, because every row has a column bytes for the roofline. */
void options_column(const struct option_spec *spec, char *column, size_t size);

/* Returns a hash of all option values and axes. For an output file (OPTION_OUTPUT), the hash covers only
 * whether one is given, because ranks may write to different files. `besides` is a NULL-terminated list of
 * options, or NULL. An option in this list is hashed only if it has a list or range. */
uint64_t options_hash(const struct options *options, const char *const *besides);

/* Prints the options of one table for --help. `defaults` is as in struct options. */
void options_help(FILE *stream, const struct option_spec *specs, size_t count, const char *const *defaults);

/* Prints the options of several tables for --help, section by section. With `brief`, prints only the names,
 * and one paragraph per section, which begins with the topic of the section. */
void options_help_sections(FILE *stream, const struct option_group *groups, size_t count,
                           const char *const *defaults, bool brief);

/* Prints the options of one topic. A topic is the title of a section, in which '-' stands for ' ', or the
 * name of an option. STATUS_USAGE for an unknown topic (suggests the nearest one). */
enum status options_help_topic(FILE *stream, const struct option_group *groups, size_t count,
                               const char *const *defaults, const char *topic);

/* Prints the options of a table whose name or description contains a word in any case: with a heading, or
 * with `brief` only their names in a line that begins with the title. Returns whether there are any. */
bool options_help_search(FILE *stream, const struct option_group *group, const char *const *defaults,
                         const char *title, const char *word, bool brief);

/* Returns whether the value of an option is its default, which options->defaults may replace. `values` is the
 * struct of the option's table. */
bool options_is_default(const struct options *options, const struct option_spec *spec, const void *values);

/* Prints, as a command line, those options of options->defaults that were not given and for which `applies`
 * returns true. Prints nothing if there are none. */
void options_print_defaults(FILE *stream, const struct options *options,
                            bool (*applies)(const void *context, const char *name), const void *context);

/* Parses a decimal integer in [minimum, maximum]. STATUS_USAGE with a message that begins with `name`. */
enum status parse_count(const char *name, const char *text, double minimum, double maximum, uint64_t *value);

/* Parses a size in bytes in [minimum, maximum]: a decimal integer, and optionally K, M or G. STATUS_USAGE
 * with a message that begins with `name`. */
enum status parse_bytes(const char *name, const char *text, double minimum, double maximum, uint64_t *value);

/* Parses a finite real number in [minimum, maximum]. STATUS_USAGE with a message that begins with `name`. */
enum status parse_real(const char *name, const char *text, double minimum, double maximum, double *value);

/* Reads up to `most` numbers that commas separate. STATUS_USAGE, with a message that begins with `name`. */
enum status parse_reals(const char *name, const char *text, double minimum, double maximum, uint32_t most,
                        double *values, uint32_t *count);

/* Parses one value for all channels, "V", or one value per channel, "V,V,V", each in [minimum, maximum]. Sets
 * all PARSE_CHANNELS_MAX values. STATUS_USAGE with a message that begins with `name`. */
#define PARSE_CHANNELS_MAX 3
enum status parse_channels(const char *name, const char *text, uint32_t channels, double minimum,
                           double maximum, double values[PARSE_CHANNELS_MAX]);

/* ---- Lists and ranges as values (axes.c) ---- */

/* Axes: lists and ranges as values of options. `--res 224,512` lists values, `--batch 1:256:2x` doubles from
 * 1 to 256, `--orbits 50:200:50` counts from 50 to 200 in steps of 50, and `1,8:64:2x` is a list that
 * contains a range. A combination has one value of every axis. Not thread-safe. */

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
