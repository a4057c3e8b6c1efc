#include "core/fnv.h"
#include "core/options.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define NAME_BYTES  80  /* "--name" is truncated to this length in messages */
#define WORD_MAX    63  /* letters; longer words get no suggestion */
#define FIRST_VALUE 256 /* getopt_long's value for spec 0: above all characters */
#define HELP_COLUMN 26  /* column of the descriptions in --help */
#define HELP_WIDTH  80

/* ---- Words ---- */

static bool same_letter(char a, char b)
{
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Restricted Damerau-Levenshtein distance: insertions, deletions, substitutions and transpositions of
 * neighbours, each letter edited at most once. Ignores case. */
static size_t edit_distance(const char *a, size_t n, const char *b, size_t m)
{
    size_t rows[3][WORD_MAX + 1];
    size_t *before = rows[0], *last = rows[1], *here = rows[2];
    for (size_t j = 0; j <= m; j++)
        last[j] = before[j] = j;
    for (size_t i = 1; i <= n; i++) {
        here[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t cost = last[j - 1] + !same_letter(a[i - 1], b[j - 1]);
            cost = smaller(cost, smaller(last[j], here[j - 1]) + 1);
            if (i > 1 && j > 1 && same_letter(a[i - 1], b[j - 2]) && same_letter(a[i - 2], b[j - 1]))
                cost = smaller(cost, before[j - 2] + 1);
            here[j] = cost;
        }
        size_t *spare = before;
        before = last;
        last = here;
        here = spare;
    }
    return last[m];
}

const char *nearest_word(const char *word, const char *const *candidates, size_t count)
{
    const char *nearest = NULL;
    size_t length = strlen(word), best = SIZE_MAX;
    if (length == 0 || length > WORD_MAX)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        size_t other = strlen(candidates[i]);
        if (other == 0 || other > WORD_MAX)
            continue;
        size_t distance = edit_distance(word, length, candidates[i], other), cost = distance;
        /* A prefix of the candidate costs at most one error, the candidate plus extra letters at most two. */
        if (strncasecmp(word, candidates[i], smaller(length, other)) == 0)
            cost = smaller(distance, length < other ? 1 : 2);
        else if (distance > 1 + length / 3)
            continue;
        size_t rank = cost * (WORD_MAX + 1) + distance; /* among equal costs, the distance decides */
        if (rank < best) {
            best = rank;
            nearest = candidates[i];
        }
    }
    return nearest;
}

void list_words(char *text, size_t size, const char *const *words, size_t count)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s",
                                 i == 0           ? ""
                                 : i + 1 == count ? " and "
                                                  : ", ",
                                 words[i]);
}

/* ---- Values ---- */

/* Writes the shortest text that parses to the same double. */
static void real_text(double value, char *text, size_t size)
{
    char shortest[64] = "";
    for (int digits = 1; digits <= 17; digits++) { /* fewest characters, not digits: 100 instead of 1e+02 */
        char candidate[64];
        snprintf(candidate, sizeof candidate, "%.*g", digits, value);
        if (strtod(candidate, NULL) == value && (!*shortest || strlen(candidate) < strlen(shortest)))
            strcpy(shortest, candidate);
    }
    snprintf(text, size, "%s", shortest);
}

/* Converts a bound to a count. 2^64 - 1 as a double is 2^64, which means no limit. */
static uint64_t count_bound(double bound)
{
    if (bound >= 0x1p64)
        return UINT64_MAX;
    return bound > 0 ? (uint64_t)bound : 0;
}

enum status parse_count(const char *name, const char *text, double minimum, double maximum, uint64_t *value)
{
    bool negative = text[0] == '-';
    const char *digits = text + negative;
    if (!*digits || strspn(digits, "0123456789") != strlen(digits))
        return status_set(STATUS_USAGE, "%s: '%.80s' is not a whole number", name, text);

    uint64_t least = count_bound(ceil(minimum)), most = count_bound(maximum);
    errno = 0;
    unsigned long long number = strtoull(digits, NULL, 10);
    if (errno == ERANGE || (negative && number > 0) || number < least || number > most)
        return status_set(STATUS_USAGE, "%s: '%.80s' is out of range; it must be %llu to %llu", name, text,
                          (unsigned long long)least, (unsigned long long)most);
    *value = number;
    return STATUS_OK;
}

enum status parse_real(const char *name, const char *text, double minimum, double maximum, double *value)
{
    /* strtod() alone would also accept leading blanks, hexadecimal, "nan" and "inf". */
    char *end;
    double number = strtod(text, &end);
    if (!*text || *end || strspn(text, "0123456789.eE+-") != strlen(text))
        return status_set(STATUS_USAGE, "%s: '%.80s' is not a number", name, text);

    if (!isfinite(number) || number < minimum || number > maximum) {
        char least[32], most[32];
        real_text(minimum, least, sizeof least);
        real_text(maximum, most, sizeof most);
        return status_set(STATUS_USAGE, "%s: '%.80s' is out of range; it must be %s to %s", name, text, least,
                          most);
    }
    *value = number + 0.0; /* turns -0 into 0 */
    return STATUS_OK;
}

/* Appends to the text in a buffer of `size` bytes, truncated if it does not fit. */
static void __attribute__((format(printf, 3, 4))) append(char *text, size_t size, const char *format, ...)
{
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
}

static enum status parse_choice(const char *name, const char *text, const char *const *choices, int *value)
{
    size_t count = 0;
    for (; choices[count]; count++) {
        if (strcmp(text, choices[count]) == 0) {
            *value = (int)count;
            return STATUS_OK;
        }
    }
    char all[512] = "";
    for (size_t i = 0; i < count; i++)
        append(all, sizeof all, "%s%s", i ? ", " : "", choices[i]);
    const char *nearest = nearest_word(text, choices, count);
    return status_set(STATUS_USAGE, "%s: '%.80s' is not one of %s%s%s%s", name, text, all,
                      nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
}

static enum status set_value(const struct option_spec *spec, void *values, const char *text)
{
    void *value = (char *)values + spec->offset;
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "--%s", spec->name);
    switch (spec->kind) {
    case OPTION_FLAG:
        *(bool *)value = true;
        return STATUS_OK;
    case OPTION_COUNT:
        return parse_count(name, text, spec->minimum, spec->maximum, value);
    case OPTION_REAL:
        return parse_real(name, text, spec->minimum, spec->maximum, value);
    case OPTION_CHOICE:
        return parse_choice(name, text, spec->choices, value);
    case OPTION_TEXT:
    case OPTION_OUTPUT:
        /* Usually an unset variable in the user's script, so it must be an error. */
        if (!*text)
            return status_set(STATUS_USAGE, "%s: the value is empty; give one or leave %s out", name, name);
        *(const char **)value = text;
        return STATUS_OK;
    }
    return status_set(STATUS_FAILED, "%s: its option table has an invalid kind", name);
}

static enum status set_default(const struct option_spec *spec, void *values)
{
    void *value = (char *)values + spec->offset;
    switch (spec->kind) {
    case OPTION_FLAG:
        *(bool *)value = false;
        return STATUS_OK;
    case OPTION_COUNT:
        *(uint64_t *)value = 0;
        break;
    case OPTION_REAL:
        *(double *)value = NAN;
        break;
    case OPTION_CHOICE:
        *(int *)value = -1;
        break;
    case OPTION_TEXT:
    case OPTION_OUTPUT:
        *(const char **)value = NULL;
        break;
    }
    if (spec->fallback && set_value(spec, values, spec->fallback) != STATUS_OK)
        return status_prefix(STATUS_FAILED, "the default of an option is wrong");
    return STATUS_OK;
}

void options_text(const struct option_spec *spec, const void *values, char *text, size_t size)
{
    const void *value = (const char *)values + spec->offset;
    text[0] = '\0';
    switch (spec->kind) {
    case OPTION_FLAG:
        snprintf(text, size, "%d", *(const bool *)value);
        break;
    case OPTION_COUNT:
        if (spec->fallback || *(const uint64_t *)value != 0)
            snprintf(text, size, "%llu", (unsigned long long)*(const uint64_t *)value);
        break;
    case OPTION_REAL:
        if (!isnan(*(const double *)value))
            real_text(*(const double *)value, text, size);
        break;
    case OPTION_CHOICE:
        if (*(const int *)value >= 0)
            snprintf(text, size, "%s", spec->choices[*(const int *)value]);
        break;
    case OPTION_TEXT:
    case OPTION_OUTPUT:
        if (*(const char *const *)value)
            snprintf(text, size, "%s", *(const char *const *)value);
        break;
    }
}

/* ---- The command line ---- */

/* Returns the spec with this index, counted over all tables in order, or NULL past the last. */
static const struct option_spec *spec_at(const struct options *options, size_t index, void **values)
{
    for (size_t t = 0; t < options->table_count; t++) {
        const struct option_table *table = &options->tables[t];
        if (index < table->count) {
            *values = table->values;
            return &table->specs[index];
        }
        index -= table->count;
    }
    return NULL;
}

/* Renamed options. The old name works if no option has it now and one has the new name. */
static const struct renamed {
    const char *was, *now;
} renamed[] = {{"samples", "samples-out"}};

static bool has_name(const struct options *options, const char *name, size_t *index)
{
    const struct option_spec *spec;
    void *values = NULL;
    for (*index = 0; (spec = spec_at(options, *index, &values)); ++*index)
        if (strcmp(spec->name, name) == 0)
            return true;
    return false;
}

/* Whether the old name works with these tables; `*index` becomes the index of the option it stands for. */
static bool works(const struct options *options, const struct renamed *name, size_t *index)
{
    return !has_name(options, name->was, index) && has_name(options, name->now, index);
}

static size_t spec_count(const struct options *options)
{
    size_t count = 0;
    for (size_t t = 0; t < options->table_count; t++)
        count += options->tables[t].count;
    return count;
}

/* Returns the short option letter, or 0. */
static char short_letter(const struct option_spec *spec)
{
    bool known = strcmp(spec->name, "help") == 0 || strcmp(spec->name, "verbose") == 0;
    return known && spec->kind == OPTION_FLAG ? spec->name[0] : '\0';
}

/* Extracts the name from "--name=value" or "-name". */
static void option_name(const char *argument, char *name, size_t size)
{
    const char *first = argument + strspn(argument, "-");
    snprintf(name, size, "%.*s", (int)strcspn(first, "="), first);
}

static enum status explain_unknown(const struct options *options, const char *argument)
{
    char name[WORD_MAX + 2]; /* truncated names are too long for a suggestion anyway */
    option_name(argument, name, sizeof name);
    int shown = (int)smaller(strcspn(argument, "="), NAME_BYTES);
    if (options->explain)
        TRY(options->explain(options->explain_context, name));

    size_t count = spec_count(options);
    const char **names = calloc(count + 1, sizeof *names);
    if (!names)
        return status_set(STATUS_FAILED, "out of memory for %zu option names", count);
    void *values;
    for (size_t i = 0; i < count; i++)
        names[i] = spec_at(options, i, &values)->name;
    const char *nearest = nearest_word(name, names, count);
    free(names);

    if (nearest)
        return status_set(STATUS_USAGE, "unknown option '%.*s'; did you mean '--%s'?", shown, argument,
                          nearest);
    return status_set(STATUS_USAGE, "unknown option '%.*s'; see --help", shown, argument);
}

/* Sets the message for an argument that getopt_long() refused: it is either ambiguous or unknown. */
static enum status explain_refused(const struct options *options, const char *argument)
{
    char name[WORD_MAX + 2], matches[512] = "";
    option_name(argument, name, sizeof name);
    size_t length = strlen(name), found = 0;
    const struct option_spec *spec;
    void *values;
    for (size_t i = 0; (spec = spec_at(options, i, &values)); i++)
        if (strncmp(spec->name, name, length) == 0)
            append(matches, sizeof matches, "%s--%s", found++ ? " or " : "", spec->name);
    if (length > 0 && found > 1 && strncmp(argument, "--", 2) == 0)
        return status_set(STATUS_USAGE, "option '--%s' is ambiguous: it could be %s", name, matches);
    return explain_unknown(options, argument);
}

static enum status explain_missing(const struct option_spec *spec)
{
    const char *example = spec->fallback;
    if (!example && spec->kind == OPTION_CHOICE)
        example = spec->choices[0];
    if (!example)
        example = spec->argument ? spec->argument : "VALUE";
    return status_set(STATUS_USAGE, "--%s needs a value, e.g. --%s %s", spec->name, spec->name, example);
}

/* Returns the index of the spec for a return value of getopt_long(): the value of a spec or a letter. */
static size_t found_index(const struct options *options, int found)
{
    if (found >= FIRST_VALUE)
        return (size_t)(found - FIRST_VALUE);
    void *values;
    size_t index = 0;
    while (short_letter(spec_at(options, index, &values)) != found)
        index++;
    return index;
}

enum { GIVEN_IN_FILE = 1, GIVEN_HERE };

/* Stores the value of one option that getopt_long() has recognised. */
static enum status take_option(struct options *options, size_t index, const char *previous, bool in_file)
{
    void *values = NULL;
    const struct option_spec *spec = spec_at(options, index, &values);
    unsigned char where = in_file ? GIVEN_IN_FILE : GIVEN_HERE;
    if (spec->kind != OPTION_FLAG && options->given[index] == where)
        return status_set(STATUS_USAGE, "--%s is given twice; drop one of them", spec->name);
    /* In `--out --verify` the value is missing; `--out=--verify` gives it explicitly. */
    if (spec->kind != OPTION_FLAG && optarg == previous && strncmp(optarg, "--", 2) == 0)
        return explain_missing(spec);
    TRY(set_value(spec, values, optarg));
    options->given[index] = where;
    return STATUS_OK;
}

/* Returns the index of the option that getopt_long() found. Warns if it was given by its former name. */
static size_t resolve(const struct options *options, int found)
{
    size_t index = found_index(options, found), count = spec_count(options);
    if (index < count)
        return index;
    const struct renamed *name = &renamed[index - count];
    (void)works(options, name, &index);
    status_warn("--%s is now called --%s", name->was, name->now);
    return index;
}

/* Takes what getopt_long() found for the argument at `at`. */
static enum status take_found(struct options *options, int found, int at, char *const argv[])
{
    void *values = NULL;
    if (found == 1)
        return status_set(STATUS_USAGE, "unexpected argument '%.80s'; options begin with --", optarg);
    if (found == ':')
        return explain_missing(spec_at(options, resolve(options, optopt), &values));
    if (found == '?' && optopt >= FIRST_VALUE)
        return status_set(STATUS_USAGE, "--%s takes no value",
                          spec_at(options, resolve(options, optopt), &values)->name);
    if (found == '?')
        return explain_refused(options, argv[at]);
    return take_option(options, resolve(options, found), argv[optind - 1], at <= options->file_options);
}

static enum status parse_arguments(struct options *options, const struct option *list, const char *letters,
                                   int argc, char *const argv[])
{
    optind = 0; /* resets getopt after an earlier parse */
    opterr = 0;
    for (;;) {
        int at = optind ? optind : 1;
        int found = getopt_long(argc, argv, letters, list, NULL);
        if (found == -1)
            break;
        enum status status = take_found(options, found, at, argv);
        if (status != STATUS_OK)
            return at <= options->file_options ? status_prefix(status, "in the file of --config") : status;
    }
    if (optind < argc) /* after "--" */
        return status_set(STATUS_USAGE, "unexpected argument '%.80s'; options begin with --", argv[optind]);
    return STATUS_OK;
}

enum status options_parse(struct options *options, int argc, char *const argv[])
{
    size_t count = spec_count(options);
    struct option *list = calloc(count + COUNT_OF(renamed) + 1, sizeof *list);
    options->given = calloc(count + 1, sizeof *options->given);
    if (!list || !options->given) {
        free(list);
        return status_set(STATUS_FAILED, "out of memory for %zu options", count);
    }

    /* '-' makes getopt return 1 for an argument that is not an option, in its place. ':' makes it return ':'
     * for a missing value. */
    char letters[8] = "-:";
    enum status status = STATUS_OK;
    for (size_t i = 0; i < count && status == STATUS_OK; i++) {
        void *values;
        const struct option_spec *spec = spec_at(options, i, &values);
        list[i].name = spec->name;
        list[i].has_arg = spec->kind == OPTION_FLAG ? no_argument : required_argument;
        list[i].val = FIRST_VALUE + (int)i;
        if (short_letter(spec) && !strchr(letters, short_letter(spec)))
            append(letters, sizeof letters, "%c", short_letter(spec));
        status = set_default(spec, values);
    }
    struct option *end = list + count;
    for (size_t i = 0; i < COUNT_OF(renamed); i++) {
        size_t index;
        if (works(options, &renamed[i], &index))
            *end++ = (struct option){renamed[i].was, required_argument, NULL, FIRST_VALUE + (int)(count + i)};
    }
    if (status == STATUS_OK)
        status = parse_arguments(options, list, letters, argc, argv);
    free(list);
    return status;
}

void options_free(struct options *options)
{
    free(options->given);
    options->given = NULL;
}

/* Hashes a text and its terminating zero, so that neighbouring texts cannot run together. */
static uint64_t hash_text(uint64_t hash, const char *text)
{
    return fnv_add(hash, text, strlen(text) + 1);
}

uint64_t options_hash(const struct options *options)
{
    uint64_t hash = FNV_BEGIN;
    const struct option_spec *spec;
    void *values;
    for (size_t i = 0; (spec = spec_at(options, i, &values)); i++) {
        char text[4096];
        options_text(spec, values, text, spec->kind == OPTION_OUTPUT ? 2 : sizeof text);
        if (spec->kind == OPTION_OUTPUT && *text)
            *text = '1';
        hash = hash_text(hash_text(hash, spec->name), text);
    }
    return hash;
}

bool options_given(const struct options *options, const char *name)
{
    const struct option_spec *spec;
    void *values;
    for (size_t i = 0; options->given && (spec = spec_at(options, i, &values)); i++)
        if (strcmp(spec->name, name) == 0)
            return options->given[i] != 0;
    return false;
}

/* ---- Before the parse ---- */

/* Whether `letters` is the name of the option or a prefix that no other name has. */
static bool means_option(const struct option_spec *specs, size_t count, const char *letters, size_t length,
                         const char *name)
{
    size_t matches = 0;
    if (length == 0 || strncmp(letters, name, length) != 0)
        return false;
    for (size_t i = 0; i < count; i++)
        matches += strncmp(letters, specs[i].name, length) == 0;
    return matches == 1 || name[length] == '\0';
}

const char *options_peek(const struct option_spec *specs, size_t count, int argc, char *const argv[],
                         const char *name)
{
    const char *value = NULL;
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strncmp(argv[i], "--", 2) != 0)
            continue;
        const char *letters = argv[i] + 2;
        size_t length = strcspn(letters, "=");
        if (!means_option(specs, count, letters, length, name))
            continue;
        if (letters[length] == '=')
            value = letters + length + 1;
        else if (i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0)
            value = argv[i + 1];
    }
    return value;
}

/* ---- --help ---- */

static void print_wrapped(FILE *stream, const char *text)
{
    size_t column = HELP_COLUMN;
    while (*(text += strspn(text, " "))) {
        size_t length = strcspn(text, " ");
        if (column > HELP_COLUMN && column + 1 + length > HELP_WIDTH) {
            fprintf(stream, "\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        }
        bool first = column == HELP_COLUMN;
        fprintf(stream, "%s%.*s", first ? "" : " ", (int)length, text);
        column += length + !first;
        text += length;
    }
    fputc('\n', stream);
}

void options_help(FILE *stream, const struct option_spec *specs, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct option_spec *spec = &specs[i];
        char label[128] = "  ", text[1024] = "";
        if (short_letter(spec))
            append(label, sizeof label, "-%c, ", short_letter(spec));
        append(label, sizeof label, "--%s", spec->name);
        if (spec->kind != OPTION_FLAG)
            append(label, sizeof label, " %s", spec->argument ? spec->argument : "VALUE");

        append(text, sizeof text, "%s", spec->help);
        for (size_t c = 0; spec->kind == OPTION_CHOICE && spec->choices[c]; c++)
            append(text, sizeof text, "%s %s", c ? "," : ":", spec->choices[c]);
        if (spec->fallback)
            append(text, sizeof text, " (default %s)", spec->fallback);

        fprintf(stream, "%-*s", HELP_COLUMN, label);
        if (strlen(label) + 2 > HELP_COLUMN)
            fprintf(stream, "\n%*s", HELP_COLUMN, "");
        print_wrapped(stream, text);
    }
}
