/* Command-line options as tables: one line an option gives parsing, checking, --help and the CSV column. */
#ifndef FDSL_CORE_OPTIONS_H
#define FDSL_CORE_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/status.h"

/* An option that is not given and has no default is false, 0, NaN, -1 or NULL; so a count without a default
 * wants a minimum of 1. */
enum option_kind {
    OPTION_FLAG,   /* bool; takes no argument */
    OPTION_COUNT,  /* uint64_t in [minimum, maximum] */
    OPTION_REAL,   /* double in [minimum, maximum] */
    OPTION_CHOICE, /* int: an index into `choices` */
    OPTION_TEXT,   /* const char *, never empty; points into argv or to the default */
    OPTION_OUTPUT  /* a text that names a file to be written: no two may name the same one */
};

struct option_spec {
    const char *name;     /* without the dashes; in CSV, '-' becomes '_' */
    const char *argument; /* its placeholder in --help, NULL for a flag */
    enum option_kind kind;
    size_t offset;        /* of the value within the struct that the table fills */
    const char *fallback; /* the default as text, NULL for none; a flag has none */
    double minimum, maximum;
    const char *const *choices; /* NULL-terminated */
    bool column;                /* it is a parameter of the workload, with one CSV column of its name */
    const char *help;
};

/* One table and the struct that it fills. */
struct option_table {
    const struct option_spec *specs;
    size_t count;
    void *values;
};

#define OPTION_TABLES_MAX 3

struct options {
    struct option_table tables[OPTION_TABLES_MAX]; /* the core's, then those of what runs */
    size_t table_count;
    int file_options;     /* the first of the arguments come from a file: later ones may repeat them */
    unsigned char *given; /* per spec, tables in order: 0, or where it was given */
    /* STATUS_USAGE, with where it belongs, of a name that no table has; STATUS_OK: nobody knows. Or NULL. */
    enum status (*explain)(void *context, const char *name);
    void *explain_context;
};

/* Writes every default into the structs of options->tables, then the command line's values. `--name value`
 * and `--name=value` are the same, an unambiguous beginning of a name will do, a former name works with a
 * warning, and -h and -v stand for flags named "help" and "verbose". Allocates options->given;
 * options_free() frees it, also after a failure. STATUS_USAGE with one clear line for an unknown option (with
 * the nearest known one), an ambiguous one, one given twice, a missing or unexpected argument, a value that
 * is no number, or one out of range. */
enum status options_parse(struct options *options, int argc, char *const argv[]);
void options_free(struct options *options);

/* The value of an option before the parse, or NULL: what the tables are may depend on it. Understands
 * `--name value`, `--name=value` and beginnings of the name that begin no other one in `specs`. */
const char *options_peek(const struct option_spec *specs, size_t count, int argc, char *const argv[],
                         const char *name);

/* Whether the option was on the command line. */
bool options_given(const struct options *options, const char *name);

/* The value as text for a row: empty when the option is absent, 0 or 1 for a flag, and for a real number the
 * fewest digits that read back the same. */
void options_text(const struct option_spec *spec, const void *values, char *text, size_t size);

/* A number that tells options apart which make a difference: of the value of each, and of a file to be
 * written (OPTION_OUTPUT) whether there is one. */
uint64_t options_hash(const struct options *options);

/* Prints the table as --help shows it, a line or two an option. */
void options_help(FILE *stream, const struct option_spec *specs, size_t count);

/* A whole number from `text` in [minimum, maximum], decimal; STATUS_USAGE with a message that begins with
 * `name`. */
enum status parse_count(const char *name, const char *text, double minimum, double maximum, uint64_t *value);

/* The same for a finite real number. */
enum status parse_real(const char *name, const char *text, double minimum, double maximum, double *value);

/* The candidate nearest to `word` by edit distance, or NULL where none is near enough to suggest. */
const char *nearest_word(const char *word, const char *const *candidates, size_t count);

/* Writes "a", "a and b" or "a, b and c" into a buffer of `size` bytes; what does not fit is cut. */
void list_words(char *text, size_t size, const char *const *words, size_t count);

#endif
