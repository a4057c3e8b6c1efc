#include "core/options_parts.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "core/axes.h"
#include "core/config.h"
#include "core/fnv.h"
#include "core/words.h"

#define FIRST_VALUE 256 /* what getopt_long() returns for spec 0; larger than any character */

/* ---- The command line ---- */

const struct option_spec *option_spec_at(const struct options *options, size_t index, void **values)
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

bool option_has_name(const struct options *options, const char *name, size_t *index)
{
    const struct option_spec *spec;
    void *values = NULL;
    for (*index = 0; (spec = option_spec_at(options, *index, &values)); ++*index)
        if (strcmp(spec->name, name) == 0)
            return true;
    return false;
}

bool option_in_table(const struct option_spec *specs, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(specs[i].name, name) == 0)
            return true;
    return false;
}

size_t option_spec_count(const struct options *options)
{
    size_t count = 0;
    for (size_t t = 0; t < options->table_count; t++)
        count += options->tables[t].count;
    return count;
}

char option_letter(const struct option_spec *spec)
{
    bool known = strcmp(spec->name, "help") == 0 || strcmp(spec->name, "verbose") == 0;
    return known && spec->kind == OPTION_FLAG ? spec->name[0] : '\0';
}

/* Returns the index of the spec for a return value of getopt_long(): FIRST_VALUE + index, or a short option's
 * letter. */
static size_t found_index(const struct options *options, int found)
{
    if (found >= FIRST_VALUE)
        return (size_t)(found - FIRST_VALUE);
    void *values;
    size_t index = 0;
    while (option_letter(option_spec_at(options, index, &values)) != found)
        index++;
    return index;
}

/* Values of options->given: where the option was given. */
enum { GIVEN_IN_FILE = 1, GIVEN_HERE };

/* One option that getopt_long() has recognised. */
struct found {
    const struct option_spec *spec;
    size_t index;
    void *values;
    const char *argument; /* the whole argument, such as "--name=value" */
    bool in_file;
};

/* Returns the option for a return value of getopt_long(). */
static struct found resolve(const struct options *options, int value, const char *argument, bool in_file)
{
    struct found found = {.index = found_index(options, value), .argument = argument, .in_file = in_file};
    found.spec = option_spec_at(options, found.index, &found.values);
    return found;
}

/* Stores the value that getopt_long() found. A list or a range becomes an axis. */
static enum status take_value(struct options *options, const struct found *found)
{
    /* A value on the command line replaces a list in the --config file. */
    if (options->axes)
        axes_remove(options->axes, found->spec);
    if (options->axes && axes_accept(found->spec, optarg))
        return axes_add(options->axes, found->spec, found->values, optarg);
    enum status status = option_set(found->spec, found->values, optarg);
    return status == STATUS_OK ? STATUS_OK : option_explain_value(options, found->spec, optarg);
}

/* Stores optarg as the value of an option. `previous` is the last argument that getopt_long() has
 * consumed. */
static enum status take_option(struct options *options, struct found *found, const char *previous)
{
    bool flag = found->spec->kind == OPTION_FLAG;
    unsigned char *given = &options->given[found->index];
    unsigned char where = found->in_file ? GIVEN_IN_FILE : GIVEN_HERE;
    if (!flag && *given == where)
        return status_set(STATUS_USAGE, "--%s is given twice; drop one of them", found->spec->name);
    /* In `--out --verify` the value is missing; `--out=--verify` gives it explicitly. */
    if (!flag && optarg == previous && strncmp(optarg, "--", 2) == 0)
        return option_explain_missing(found->spec);
    TRY(take_value(options, found));
    *given = where;
    return STATUS_OK;
}

static bool is_one_of_any_case(const char *word, const char *const *words)
{
    while (*words && strcasecmp(word, *words) != 0)
        words++;
    return *words;
}

/* Handles a flag that has a value. `--verify=no` on the command line overrides `verify = yes` in a file. */
static enum status take_flag_value(struct options *options, struct found *found)
{
    static const char *const on[] = {"true", "yes", "on", NULL}, *const off[] = {"false", "no", "off", NULL};
    const char *value = strchr(found->argument, '=') + 1;
    if (is_one_of_any_case(value, on))
        return take_option(options, found, NULL);
    if (!is_one_of_any_case(value, off))
        return status_set(STATUS_USAGE, "--%s: '%.80s' is not one of true, yes, on, false, no, off",
                          found->spec->name, value);
    *(bool *)((char *)found->values + found->spec->offset) = false;
    options->given[found->index] = 0;
    return STATUS_OK;
}

/* `previous` is the argument before this one; "" if unknown. */
static enum status take_operand(struct options *options, const char *previous, const char *argument)
{
    if (options->operand_count == options->operands_max)
        return option_explain_operand(options, previous, argument);
    options->operands[options->operand_count++] = argument;
    return STATUS_OK;
}

/* Handles `value`, which getopt_long() returned for the argument argv[at]. */
static enum status take_found(struct options *options, int value, int at, char *const argv[])
{
    bool in_file = options->config && at <= options->config->file_options;
    if (value == 1)
        return take_operand(options, argv[at - 1], optarg);
    if (value == '?' && optopt < FIRST_VALUE)
        return option_explain_refused(options, argv[at]);
    bool refused = value == '?' || value == ':';
    struct found found = resolve(options, refused ? optopt : value, argv[at], in_file);
    enum status status = option_explain_abbreviation(options, found.spec, argv[at]);
    if (status == STATUS_OK && value == ':')
        status = option_explain_missing(found.spec);
    else if (status == STATUS_OK)
        status =
            value == '?' ? take_flag_value(options, &found) : take_option(options, &found, argv[optind - 1]);
    return status_about(status, found.spec->name);
}

/* Prefixes the message with file and line if the argument argv[at] comes from a --config file. `config` may
 * be NULL. */
static enum status locate(const struct config *config, int at, enum status status)
{
    if (!config || at > config->file_options)
        return status;
    return status_prefix(status, "--config %s: line %d", config->path, config->lines[at]);
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
            return locate(options->config, at, status);
    }
    while (optind < argc) /* arguments after "--" */
        TRY(take_operand(options, "", argv[optind++]));
    return STATUS_OK;
}

static enum status replace_defaults(const struct options *options)
{
    for (const char *const *pair = options->defaults; pair && *pair; pair += 2) {
        size_t index;
        void *values = NULL;
        if (!option_has_name(options, pair[0], &index))
            return status_set(STATUS_FAILED, "there is no option --%s", pair[0]);
        const struct option_spec *spec = option_spec_at(options, index, &values);
        TRY(option_set(spec, values, pair[1]));
    }
    return STATUS_OK;
}

enum status options_parse(struct options *options, int argc, char *const argv[])
{
    size_t count = option_spec_count(options);
    FREED struct option *list = calloc(count + 1, sizeof *list);
    options->given = calloc(count + 1, sizeof *options->given);
    options->operand_count = 0;
    TRY(ALLOCATED(list && options->given, "out of memory for %zu options", count));

    /* '-' makes getopt_long() return 1 for an argument that is not an option, without moving it to the end.
     * ':' makes it return ':' for a missing value. */
    char letters[8] = "-:";
    for (size_t i = 0; i < count; i++) {
        void *values;
        const struct option_spec *spec = option_spec_at(options, i, &values);
        list[i].name = spec->name;
        list[i].has_arg = spec->kind == OPTION_FLAG ? no_argument : required_argument;
        list[i].val = FIRST_VALUE + (int)i;
        if (option_letter(spec) && !strchr(letters, option_letter(spec)))
            text_append(letters, sizeof letters, "%c", option_letter(spec));
        TRY(option_set_default(spec, values));
    }
    TRY(replace_defaults(options));
    TRY(parse_arguments(options, list, letters, argc, argv));
    if (options->axes) {
        TRY(axes_check(options->axes));
        TRY(axes_select(options->axes, 0));
    }
    return STATUS_OK;
}

enum status options_set(struct options *options, const char *name, const char *text)
{
    size_t index;
    void *values = NULL;
    if (!option_has_name(options, name, &index))
        return status_set(STATUS_FAILED, "there is no option --%s", name);
    options->given[index] = GIVEN_HERE;
    const struct option_spec *spec = option_spec_at(options, index, &values);
    return status_about(option_set(spec, values, text), name);
}

void options_free(struct options *options)
{
    free(options->given);
    options->given = NULL;
}

/* Hashes a text with its terminating zero, so that "ab", "c" and "a", "bc" have different hashes. */
static uint64_t hash_text(uint64_t hash, const char *text)
{
    return fnv_add(hash, text, strlen(text) + 1);
}

static bool is_among(const char *name, const char *const *names)
{
    for (; names && *names; names++)
        if (strcmp(name, *names) == 0)
            return true;
    return false;
}

uint64_t options_hash(const struct options *options, const char *const *besides)
{
    uint64_t hash = FNV_BEGIN;
    const struct option_spec *spec;
    void *values;
    for (size_t i = 0; (spec = option_spec_at(options, i, &values)); i++) {
        char text[4096];
        if (is_among(spec->name, besides))
            continue;
        options_text(spec, values, text, spec->kind == OPTION_OUTPUT ? 2 : sizeof text);
        if (spec->kind == OPTION_OUTPUT && *text)
            *text = '1';
        hash = hash_text(hash_text(hash, spec->name), text);
    }
    for (size_t i = 0; options->axes && i < options->axes->count; i++) {
        const struct axis *axis = &options->axes->at[i];
        hash = hash_text(hash, axis->spec->name);
        for (size_t j = 0; j < axis->count; j++)
            hash = hash_text(hash, axis->texts[j]);
    }
    return hash;
}

bool options_given(const struct options *options, const char *name)
{
    size_t index;
    void *values = NULL;
    if (!options->given || !option_has_name(options, name, &index) || options->given[index] == 0)
        return false;
    const struct option_spec *spec = option_spec_at(options, index, &values);
    char text[8] = "set"; /* may be truncated: only whether it is empty matters */
    if (option_takes_none(spec))
        options_text(spec, values, text, sizeof text);
    return *text;
}

bool options_flag(const struct options *options, const char *name)
{
    size_t index;
    void *values = NULL;
    if (!option_has_name(options, name, &index))
        return false;
    const struct option_spec *spec = option_spec_at(options, index, &values);
    return *(const bool *)((const char *)values + spec->offset);
}

enum status options_check_only(const struct options *options, const char *what, const char *const *allowed)
{
    for (size_t t = 0; t < options->table_count; t++)
        for (size_t i = 0; i < options->tables[t].count; i++) {
            const char *name = options->tables[t].specs[i].name;
            if (!is_one_of(name, allowed) && options_given(options, name))
                return status_option(STATUS_USAGE, name, " does not apply to %s; leave one out", what);
        }
    return STATUS_OK;
}

/* ---- Before the parse ---- */

/* Returns whether the first `length` characters of `letters` are `name`, or a prefix of `name` and of no
 * other option. */
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
