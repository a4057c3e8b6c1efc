#include "core/options.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#ifdef HAVE_INIH
#include <ini.h>
#endif

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"

#define NAME_BYTES  80  /* "--name" is truncated to this length in messages */
#define FIRST_VALUE 256 /* what getopt_long() returns for spec 0; larger than any character */

const char *const option_max[] = {"max", NULL};
const char *const option_all[] = {"all", NULL};
const char *const option_words[] = {NULL};
const char *const option_stdout[] = {"-", NULL};

/* ---- Tables ---- */

/* An option of one of the tables. */
struct entry {
    const struct option_spec *spec; /* NULL: there is no such option */
    void *values;                   /* the struct that stores the option's value */
    size_t index;                   /* number of the option, counted over all tables in order */
};

static struct entry entry_at(const struct options *options, size_t index)
{
    struct entry entry = {.index = index};
    for (size_t t = 0; t < options->table_count; t++) {
        const struct option_table *table = &options->tables[t];
        if (index < table->count)
            return (struct entry){&table->specs[index], table->values, entry.index};
        index -= table->count;
    }
    return entry;
}

static struct entry entry_named(const struct options *options, const char *name)
{
    struct entry entry;
    for (size_t i = 0; (entry = entry_at(options, i)).spec; i++)
        if (strcmp(entry.spec->name, name) == 0)
            return entry;
    return entry;
}

static void *entry_value(const struct entry *entry)
{
    return (char *)entry->values + entry->spec->offset;
}

bool option_in_table(const struct option_spec *specs, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(specs[i].name, name) == 0)
            return true;
    return false;
}

static size_t spec_count(const struct options *options)
{
    size_t count = 0;
    for (size_t t = 0; t < options->table_count; t++)
        count += options->tables[t].count;
    return count;
}

/* Returns the short option letter, or 0. */
static char letter_of(const struct option_spec *spec)
{
    bool known = strcmp(spec->name, "help") == 0 || strcmp(spec->name, "verbose") == 0;
    return known && spec->kind == OPTION_FLAG ? spec->name[0] : '\0';
}

/* ---- Values ---- */

/* Writes the shortest text that parses to the same double. */
static void real_text(double value, char *text, size_t size)
{
    char shortest[64] = "";
    /* Looks for the fewest characters, not the fewest digits: 100, not 1e+02. */
    for (int digits = 1; digits <= 17; digits++) {
        char candidate[64];
        snprintf(candidate, sizeof candidate, "%.*g", digits, value);
        if (strtod(candidate, NULL) == value && (!*shortest || strlen(candidate) < strlen(shortest)))
            strcpy(shortest, candidate);
    }
    snprintf(text, size, "%s", shortest);
}

/* Converts a bound to a count. A double cannot represent 2^64 - 1 and stores 2^64, which means no limit. */
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

enum status parse_bytes(const char *name, const char *text, double minimum, double maximum, uint64_t *value)
{
    static const char suffixes[] = "KMG";
    size_t digits = strspn(text, "0123456789");
    const char *suffix = text[digits] ? strchr(suffixes, toupper((unsigned char)text[digits])) : NULL;
    if (digits == 0 || (text[digits] && (!suffix || text[digits + 1])))
        return status_set(STATUS_USAGE,
                          "%s: '%.80s' is not a size; write a number of bytes, or a number and K, M or G "
                          "(powers of 1024)",
                          name, text);
    unsigned shift = suffix ? 10 * (unsigned)(suffix - suffixes + 1) : 0;
    uint64_t least = count_bound(ceil(minimum)), most = count_bound(maximum);
    errno = 0;
    unsigned long long number = strtoull(text, NULL, 10);
    if (errno == ERANGE || number > most >> shift || number << shift < least)
        return status_set(STATUS_USAGE, "%s: '%.80s' is out of range; it must be %llu to %llu", name, text,
                          (unsigned long long)least, (unsigned long long)most);
    *value = number << shift;
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

enum status parse_reals(const char *name, const char *text, double minimum, double maximum, uint32_t most,
                        double *values, uint32_t *count)
{
    *count = 0;
    for (const char *at = text; at;) {
        const size_t length = strcspn(at, ",");
        char value[32];
        if (*count == most || length >= sizeof value)
            return status_set(STATUS_USAGE, "%s: '%.80s' is not a list of up to %u numbers", name, text,
                              most);
        snprintf(value, sizeof value, "%.*s", (int)length, at);
        TRY(parse_real(name, value, minimum, maximum, &values[(*count)++]));
        at = at[length] ? at + length + 1 : NULL;
    }
    return STATUS_OK;
}

enum status parse_channels(const char *name, const char *text, uint32_t channels, double minimum,
                           double maximum, double values[PARSE_CHANNELS_MAX])
{
    uint32_t count = 0;
    size_t bytes = strlen(text);
    if (bytes > 0 && text[bytes - 1] == ',')
        return status_set(STATUS_USAGE, "%s: '%.80s': a value is missing after the last comma", name, text);
    for (const char *at = text; at; count++) {
        size_t length = strcspn(at, ",");
        char value[80];
        if (length >= sizeof value)
            return status_set(STATUS_USAGE, "%s: '%.80s' is too long for a number", name, at);
        snprintf(value, sizeof value, "%.*s", (int)length, at);
        at = at[length] ? at + length + 1 : NULL;
        if (count < PARSE_CHANNELS_MAX)
            TRY(parse_real(name, value, minimum, maximum, &values[count]));
    }
    if (count != 1 && count != channels)
        return status_set(STATUS_USAGE,
                          "%s: '%.80s' has %u values for %u channel%s; give one, or one per channel", name,
                          text, count, channels, channels == 1 ? "" : "s");
    for (uint32_t c = count; c < PARSE_CHANNELS_MAX; c++)
        values[c] = values[0];
    return STATUS_OK;
}

bool options_is_choice(const struct option_spec *spec, const char *text)
{
    return spec->kind == OPTION_CHOICE && is_one_of(text, spec->choices);
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
        text_join(all, sizeof all, ", ", "%s", choices[i]);
    const char *nearest = nearest_word(text, choices, count);
    return status_set(STATUS_USAGE, "%s: '%.80s' is not one of %s%s%s%s", name, text, all,
                      nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
}

/* Returns whether the text of an option is a list of numbers. */
static bool is_numbers(const struct option_spec *spec)
{
    return spec->kind == OPTION_TEXT && spec->maximum > spec->minimum;
}

bool option_takes_none(const struct option_spec *spec)
{
    const bool whole = spec->kind == OPTION_COUNT || spec->kind == OPTION_BYTES;
    if (spec->fallback)
        return spec->kind == OPTION_REAL && strcmp(spec->fallback, "0") == 0;
    return spec->kind == OPTION_REAL || is_numbers(spec) || spec->choices == option_words ||
           (whole && spec->minimum >= 1);
}

static enum status set_default(const struct option_spec *spec, void *values);

enum status option_set(const struct option_spec *spec, void *values, const char *text)
{
    void *value = (char *)values + spec->offset;
    char name[NAME_BYTES];
    if (option_takes_none(spec) && strcmp(text, "none") == 0)
        return set_default(spec, values);
    snprintf(name, sizeof name, "--%s", spec->name);
    switch (spec->kind) {
    case OPTION_FLAG:
        *(bool *)value = true;
        return STATUS_OK;
    case OPTION_COUNT:
        if (spec->choices == option_max && strcmp(text, *option_max) == 0) {
            *(uint64_t *)value = OPTION_MAX;
            return STATUS_OK;
        }
        return parse_count(name, text, spec->minimum, spec->maximum, value);
    case OPTION_BYTES:
        if (spec->choices == option_all && strcmp(text, *option_all) == 0) {
            *(uint64_t *)value = OPTION_ALL;
            return STATUS_OK;
        }
        return parse_bytes(name, text, spec->minimum, spec->maximum, value);
    case OPTION_REAL:
        return parse_real(name, text, spec->minimum, spec->maximum, value);
    case OPTION_CHOICE:
        return parse_choice(name, text, spec->choices, value);
    case OPTION_TEXT:
    case OPTION_OUTPUT:
        /* An empty value usually comes from an unset variable in a script, so it must be an error. */
        if (!*text)
            return status_set(STATUS_USAGE, "%s: the value is empty; give one or omit %s", name, name);
        *(const char **)value = text;
        return STATUS_OK;
    }
    return status_set(STATUS_FAILED, "%s: its option table has an invalid kind", name);
}

/* Stores the default of the option. STATUS_FAILED if the table's default is invalid. */
static enum status set_default(const struct option_spec *spec, void *values)
{
    void *value = (char *)values + spec->offset;
    switch (spec->kind) {
    case OPTION_FLAG:
        *(bool *)value = false;
        return STATUS_OK;
    case OPTION_COUNT:
    case OPTION_BYTES:
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
    if (spec->fallback && option_set(spec, values, spec->fallback) != STATUS_OK)
        return status_prefix(STATUS_FAILED, "the default of an option is wrong");
    return STATUS_OK;
}

/* Writes a list "V,V,V" with the shortest text of each number, or as one number if all are equal, because one
 * value applies to all channels. Copies a list that has anything else. */
static void numbers_text(const char *list, char *text, size_t size)
{
    char first[64] = "", number[64];
    bool equal = true;
    text[0] = '\0';
    for (const char *at = list; at; at = *at ? at + 1 : NULL) {
        char *end;
        real_text(strtod(at, &end) + 0.0, number, sizeof number); /* + 0.0 turns -0 into 0 */
        if (end == at || (*end && *end != ',') || (*end && !end[1])) {
            snprintf(text, size, "%s", list);
            return;
        }
        if (at == list)
            strcpy(first, number);
        equal &= strcmp(first, number) == 0;
        text_join(text, size, ",", "%s", number);
        at = end;
    }
    if (equal)
        snprintf(text, size, "%s", first);
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
    case OPTION_BYTES:
        if (spec->choices == option_max && *(const uint64_t *)value == OPTION_MAX)
            snprintf(text, size, "%s", *option_max);
        else if (spec->choices == option_all && *(const uint64_t *)value == OPTION_ALL)
            snprintf(text, size, "%s", *option_all);
        else if (spec->fallback || *(const uint64_t *)value != 0)
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
        if (*(const char *const *)value && is_numbers(spec))
            numbers_text(*(const char *const *)value, text, size);
        else if (*(const char *const *)value)
            snprintf(text, size, "%s", *(const char *const *)value);
        break;
    }
}

void options_column(const struct option_spec *spec, char *column, size_t size)
{
    snprintf(column, size, "%s", strcmp(spec->name, "bytes") == 0 ? "array_bytes" : spec->name);
    for (char *c = column; (c = strchr(c, '-'));)
        *c = '_';
}

/* ---- Messages about refused options, which suggest the option that is probably meant ---- */

/* Option names of other programs, above all timm. These names are not accepted. The error message suggests
 * our option for the same purpose, followed by `value` unless it is NULL. `ours` is NULL if we have no such
 * option. */
static const struct foreign {
    const char *theirs, *ours, *value;
} foreigns[] = {
    {"aa", "rand-augment", NULL},
    {"amp", "variant", "train-amp"},
    {"aug-repeats", "repeats", NULL},
    {"batch-size", "batch", NULL},
    {"bce-loss", "loss", "bce"},
    {"bce-target-thresh", "bce-threshold", NULL},
    {"checkpoint-hist", "keep", NULL},
    {"clip-grad", "clip-norm", NULL},
    {"color-jitter-prob", "color-jitter-p", NULL},
    {"clip-mode", "clip-adaptive", NULL},
    {"cooldown-epochs", "lr-cooldown", NULL},
    {"crop-pct", NULL, NULL},
    {"data-dir", "data", NULL},
    {"decay-epochs", "lr-step", NULL},
    {"decay-milestones", "lr-milestones", NULL},
    {"decay-rate", "lr-gamma", NULL},
    {"dist-bn", NULL, NULL},
    {"gaussian-blur-prob", "blur", NULL},
    {"grad-accum", "accumulate", NULL},
    {"grad-accum-steps", "accumulate", NULL},
    {"grad-checkpointing", "checkpoint-activations", NULL},
    {"grayscale-prob", "grayscale", NULL},
    {"hflip", "flip", NULL},
    {"img-size", "out-res", NULL},
    {"in-chans", "channels", NULL},
    {"initial-checkpoint", "init", NULL},
    {"input-size", "out-res", NULL},
    {"log-interval", "log-steps", NULL},
    {"lr-cycle-limit", "lr-cycles", NULL},
    {"lr-noise-pct", "lr-noise-limit", NULL},
    {"lr-noise-std", NULL, NULL},
    {"min-lr", "lr-min", NULL},
    {"mixup-off-epoch", NULL, NULL},
    {"model-ema", "ema", NULL},
    {"model-ema-decay", "ema", NULL},
    {"model-ema-warmup", "ema-warmup", NULL},
    {"no-aug", NULL, NULL},
    {"num-classes", "classes", NULL},
    {"opt-betas", "beta1", "B --beta2 B"},
    {"opt-eps", "epsilon", NULL},
    {"output", "checkpoint", NULL},
    {"pretrained", "init", "FILE"},
    {"recovery-interval", "checkpoint-steps", NULL},
    {"recount", NULL, NULL},
    {"remode", NULL, NULL},
    {"reprob", "erasing", NULL},
    {"sched", "lr-schedule", NULL},
    {"smoothing", "label-smoothing", NULL},
    {"sync-bn", "sync-batch-norm", NULL},
    {"train-interpolation", "interpolation", NULL},
    {"val", "data", "DIR, with the folders DIR/train and DIR/val"},
    {"vflip", NULL, NULL},
    {"warmup-epochs", "lr-warmup", NULL},
    {"wd", "weight-decay", NULL},
    {"workers", "threads", NULL},
};

/* Example values for messages about options whose default is missing or switches the option off. */
static const struct {
    const char *name, *value;
} examples[] = {
    {"clip-norm", "1"},
    {"clip-value", "1"},
    {"clip-adaptive", "0.01"},
    {"cutmix", "1"},
    {"drop-path", "0.1"},
    {"ema", "0.9999"},
    {"erasing", "0.25"},
    {"label-smoothing", "0.1"},
    {"lr-warmup", "5"},
    {"mean", "0.5"},
    {"mixup", "0.8"},
    {"out-res", "224"},
    {"rand-augment", "9"},
    {"std", "0.25"},
    {"blur", "0.5"},
    {"grayscale", "0.2"},
    {"color-jitter", "0.4"},
    {"weight-decay", "0.05"},
    {"shift", "2"},
    {"lr-milestones", "30:60:80"},
};

/* Extracts the name from "--name=value" or "-name". */
static void option_name(const char *argument, char *name, size_t size)
{
    const char *first = argument + strspn(argument, "-");
    snprintf(name, size, "%.*s", (int)strcspn(first, "="), first);
}

static const struct foreign *find_foreign(const char *name)
{
    for (size_t i = 0; i < COUNT_OF(foreigns); i++)
        if (strcmp(name, foreigns[i].theirs) == 0)
            return &foreigns[i];
    return NULL;
}

/* Sets a message for the option name of another program if `options` do not contain our option. The message
 * says where our option belongs. Returns STATUS_OK if no part of the program knows our option. */
static enum status explain_foreign(const struct options *options, int shown, const char *argument,
                                   const struct foreign *foreign)
{
    if (!foreign->ours)
        return status_set(STATUS_USAGE,
                          "unknown option '%.*s': this option of timm has no equivalent here; see "
                          "docs/recipes.md",
                          shown, argument);
    enum status status =
        options->explain ? options->explain(options->explain_context, foreign->ours) : STATUS_OK;
    return status_prefix(status, "unknown option '%.*s'", shown, argument);
}

static enum status explain_unknown(const struct options *options, const char *argument)
{
    char name[WORD_MAX + 2]; /* truncated names are too long for a suggestion anyway */
    option_name(argument, name, sizeof name);
    size_t length = strcspn(argument, "=");
    int shown = (int)(length < NAME_BYTES ? length : NAME_BYTES);
    /* options->explain() speaks of other commands, but "-help" may be meant for this one. */
    if (entry_named(options, name).spec)
        return status_set(STATUS_USAGE, "unknown option '%.*s'; did you mean '--%s'?", shown, argument, name);
    if (options->explain)
        TRY(options->explain(options->explain_context, name));
    const struct foreign *foreign = find_foreign(name);
    if (foreign && foreign->ours && entry_named(options, foreign->ours).spec)
        return status_set(STATUS_USAGE, "unknown option '%.*s'; did you mean '--%s%s%s'?", shown, argument,
                          foreign->ours, foreign->value ? " " : "", foreign->value ? foreign->value : "");
    if (foreign)
        TRY(explain_foreign(options, shown, argument, foreign));

    size_t count = spec_count(options);
    const char **names = calloc(count + 1, sizeof *names);
    TRY(ALLOCATED(names, "out of memory for %zu option names", count));
    for (size_t i = 0; i < count; i++)
        names[i] = entry_at(options, i).spec->name;
    const char *nearest = nearest_word(name, names, count);
    free(names);

    if (nearest)
        return status_set(STATUS_USAGE, "unknown option '%.*s'; did you mean '--%s'?", shown, argument,
                          nearest);
    return status_set(STATUS_USAGE, "unknown option '%.*s'; see %s", shown, argument,
                      options->help ? options->help : "--help");
}

/* Sets the message for an argument that getopt_long() refused: it is an option of another command, ambiguous,
 * or unknown. */
static enum status explain_refused(const struct options *options, const char *argument)
{
    char name[WORD_MAX + 2], matches[512] = "";
    option_name(argument, name, sizeof name);
    size_t length = strlen(name), found = 0;
    const struct option_spec *spec;
    for (size_t i = 0; (spec = entry_at(options, i).spec); i++)
        if (strncmp(spec->name, name, length) == 0)
            text_append(matches, sizeof matches, "%s--%s", found++ ? " or " : "", spec->name);
    if (length > 0 && found > 1 && strncmp(argument, "--", 2) == 0) {
        if (options->explain)
            TRY(status_about(options->explain(options->explain_context, name), name));
        return status_about(
            status_set(STATUS_USAGE, "option '--%s' is ambiguous: it could be %s", name, matches), name);
    }
    return status_about(explain_unknown(options, argument), name);
}

/* Accepts an argument that abbreviates the name of `spec`, unless another command has an option with this
 * name: --samples of --prepare must not be read as --samples-out. */
static enum status explain_abbreviation(const struct options *options, const struct option_spec *spec,
                                        const char *argument)
{
    char name[WORD_MAX + 2];
    option_name(argument, name, sizeof name);
    if (!options->explain || strncmp(argument, "--", 2) != 0 || strcmp(name, spec->name) == 0)
        return STATUS_OK;
    return options->explain(options->explain_context, name);
}

/* Sets the message for an option without its value. */
static enum status explain_missing(const struct option_spec *spec)
{
    const char *example = spec->fallback;
    for (size_t i = 0; i < COUNT_OF(examples); i++)
        if (strcmp(spec->name, examples[i].name) == 0)
            example = examples[i].value;
    if (!example && spec->kind == OPTION_CHOICE)
        example = spec->choices[0];
    if (!example)
        example = spec->argument ? spec->argument : "VALUE";
    return status_set(STATUS_USAGE, "--%s needs a value, e.g. --%s %s", spec->name, spec->name, example);
}

/* The values of flags, in any case. */
static const char *const on[] = {"true", "yes", "on", NULL}, *const off[] = {"false", "no", "off", NULL};

static bool is_one_of_any_case(const char *word, const char *const *words)
{
    while (*words && strcasecmp(word, *words) != 0)
        words++;
    return *words;
}

/* Sets the message for an argument that is not an option. `previous` is the argument before it. */
static enum status explain_operand(const struct options *options, const char *previous, const char *argument)
{
    bool named = strncmp(previous, "--", 2) == 0;
    const struct option_spec *spec = named ? entry_named(options, previous + 2).spec : NULL;
    if (spec && spec->kind == OPTION_FLAG &&
        (is_one_of_any_case(argument, on) || is_one_of_any_case(argument, off)))
        return status_set(STATUS_USAGE, "unexpected argument '%s'; write %s=%s", argument, previous,
                          argument);
    if (entry_named(options, argument).spec)
        return status_set(STATUS_USAGE, "unexpected argument '%s'; did you mean '--%s'?", argument, argument);
    if (options->explain)
        TRY(status_prefix(options->explain(options->explain_context, argument), "unexpected argument '%.80s'",
                          argument));
    return options->operand
               ? status_set(STATUS_USAGE, "unexpected argument '%.80s'; write --%s %.80s", argument,
                            options->operand, argument)
               : status_set(STATUS_USAGE, "unexpected argument '%.80s'; options begin with --", argument);
}

/* Completes the message for a value that `spec` refused: if an option with a similar name accepts the value,
 * suggests that option. */
static enum status explain_value(const struct options *options, const struct option_spec *spec,
                                 const char *value)
{
    const struct option_spec *other;
    for (size_t i = 0; spec->kind == OPTION_CHOICE && (other = entry_at(options, i).spec); i++)
        if (other != spec && strstr(other->name, spec->name) && options_is_choice(other, value))
            return status_append(STATUS_USAGE, "; did you mean '--%s %s'?", other->name, value);
    return STATUS_USAGE;
}

/* ---- The command line ---- */

/* Returns the index of the spec for a return value of getopt_long(): FIRST_VALUE + index, or a short option's
 * letter. */
static size_t found_index(const struct options *options, int found)
{
    if (found >= FIRST_VALUE)
        return (size_t)(found - FIRST_VALUE);
    size_t index = 0;
    while (letter_of(entry_at(options, index).spec) != found)
        index++;
    return index;
}

/* Values of options->given: where the option was given. */
enum { GIVEN_IN_FILE = 1, GIVEN_HERE };

/* One option that getopt_long() has recognised. */
struct found {
    struct entry entry;
    const char *argument; /* the whole argument, such as "--name=value" */
    bool in_file;
};

/* Stores the value that getopt_long() found. A list or a range becomes an axis. */
static enum status take_value(struct options *options, const struct found *found)
{
    /* A value on the command line replaces a list in the --config file. */
    const struct entry *entry = &found->entry;
    if (options->axes)
        axes_remove(options->axes, entry->spec);
    if (options->axes && axes_accept(entry->spec, optarg))
        return axes_add(options->axes, entry->spec, entry->values, optarg);
    enum status status = option_set(entry->spec, entry->values, optarg);
    return status == STATUS_OK ? STATUS_OK : explain_value(options, entry->spec, optarg);
}

/* Stores optarg as the value of an option. `previous` is the last argument that getopt_long() has
 * consumed. */
static enum status take_option(struct options *options, struct found *found, const char *previous)
{
    const struct option_spec *spec = found->entry.spec;
    bool flag = spec->kind == OPTION_FLAG;
    unsigned char *given = &options->given[found->entry.index];
    unsigned char where = found->in_file ? GIVEN_IN_FILE : GIVEN_HERE;
    if (!flag && *given == where)
        return status_set(STATUS_USAGE, "--%s is given twice; drop one of them", spec->name);
    /* In `--out --verify` the value is missing; `--out=--verify` gives it explicitly. */
    if (!flag && optarg == previous && strncmp(optarg, "--", 2) == 0)
        return explain_missing(spec);
    TRY(take_value(options, found));
    *given = where;
    return STATUS_OK;
}

/* Handles a flag that has a value. `--verify=no` on the command line overrides `verify = yes` in a file. */
static enum status take_flag_value(struct options *options, struct found *found)
{
    const char *value = strchr(found->argument, '=') + 1;
    if (is_one_of_any_case(value, on))
        return take_option(options, found, NULL);
    if (!is_one_of_any_case(value, off))
        return status_set(STATUS_USAGE, "--%s: '%.80s' is not one of true, yes, on, false, no, off",
                          found->entry.spec->name, value);
    *(bool *)entry_value(&found->entry) = false;
    options->given[found->entry.index] = 0;
    return STATUS_OK;
}

/* `previous` is the argument before this one; "" if unknown. */
static enum status take_operand(struct options *options, const char *previous, const char *argument)
{
    if (options->operand_count == options->operands_max)
        return explain_operand(options, previous, argument);
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
        return explain_refused(options, argv[at]);
    bool refused = value == '?' || value == ':';
    struct found found = {.entry = entry_at(options, found_index(options, refused ? optopt : value)),
                          .argument = argv[at],
                          .in_file = in_file};
    const struct option_spec *spec = found.entry.spec;
    enum status status = explain_abbreviation(options, spec, argv[at]);
    if (status == STATUS_OK && value == ':')
        status = explain_missing(spec);
    else if (status == STATUS_OK)
        status =
            value == '?' ? take_flag_value(options, &found) : take_option(options, &found, argv[optind - 1]);
    return status_about(status, spec->name);
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
        const struct entry entry = entry_named(options, pair[0]);
        if (!entry.spec)
            return status_set(STATUS_FAILED, "there is no option --%s", pair[0]);
        TRY(option_set(entry.spec, entry.values, pair[1]));
    }
    return STATUS_OK;
}

enum status options_parse(struct options *options, int argc, char *const argv[])
{
    size_t count = spec_count(options);
    FREED struct option *list = calloc(count + 1, sizeof *list);
    options->given = calloc(count + 1, sizeof *options->given);
    options->operand_count = 0;
    TRY(ALLOCATED(list && options->given, "out of memory for %zu options", count));

    /* '-' makes getopt_long() return 1 for an argument that is not an option, without moving it to the end.
     * ':' makes it return ':' for a missing value. */
    char letters[8] = "-:";
    for (size_t i = 0; i < count; i++) {
        const struct entry entry = entry_at(options, i);
        const struct option_spec *spec = entry.spec;
        list[i] = (struct option){.name = spec->name,
                                  .has_arg = spec->kind == OPTION_FLAG ? no_argument : required_argument,
                                  .val = FIRST_VALUE + (int)i};
        if (letter_of(spec) && !strchr(letters, letter_of(spec)))
            text_append(letters, sizeof letters, "%c", letter_of(spec));
        TRY(set_default(spec, entry.values));
    }
    TRY(replace_defaults(options));
    TRY(parse_arguments(options, list, letters, argc, argv));
    if (options->axes) {
        TRY(axes_check(options->axes));
        TRY(axes_select(options->axes, 0));
    }
    return STATUS_OK;
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

uint64_t options_hash(const struct options *options, const char *const *besides)
{
    uint64_t hash = FNV_BEGIN;
    struct entry entry;
    for (size_t i = 0; (entry = entry_at(options, i)).spec; i++) {
        const struct option_spec *spec = entry.spec;
        char text[4096];
        if (besides && is_one_of(spec->name, besides))
            continue;
        options_text(spec, entry.values, text, spec->kind == OPTION_OUTPUT ? 2 : sizeof text);
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
    const struct entry entry = entry_named(options, name);
    if (!options->given || !entry.spec || options->given[entry.index] == 0)
        return false;
    char text[8] = "set"; /* may be truncated: only whether it is empty matters */
    if (option_takes_none(entry.spec))
        options_text(entry.spec, entry.values, text, sizeof text);
    return *text;
}

bool options_flag(const struct options *options, const char *name)
{
    const struct entry entry = entry_named(options, name);
    return entry.spec && *(const bool *)entry_value(&entry);
}

const char *options_word(const struct options *options, const char *name)
{
    const struct entry entry = entry_named(options, name);
    return entry.spec ? *(const char *const *)entry_value(&entry) : NULL;
}

enum status options_check_only(const struct options *options, const char *what, const char *const *allowed)
{
    const struct option_spec *spec;
    for (size_t i = 0; (spec = entry_at(options, i).spec); i++)
        if (!is_one_of(spec->name, allowed) && options_given(options, spec->name))
            return status_option(STATUS_USAGE, spec->name, " does not apply to %s; leave one out", what);
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

/* ---- The --config file ---- */

static enum status add_argument(struct config *config, char *argument)
{
    char **argv = argument ? realloc(config->argv, ((size_t)config->argc + 2) * sizeof *argv) : NULL;
    if (!argv) {
        free(argument);
        return status_set(STATUS_EXHAUSTED, "out of memory for the command line");
    }
    argv[config->argc++] = argument;
    argv[config->argc] = NULL;
    config->argv = argv;
    return STATUS_OK;
}

#ifdef HAVE_INIH
#define LINE_MAX_BYTES 190 /* inih's line buffer has 200 bytes */

/* The state of reading the file. inih calls take_line() for each option before it reads the next line. */
struct reading {
    struct config *config;
    const char *rest, *end; /* the unread text of the file, and its end */
    int line;               /* number of the latest line */
    enum status status;
};

/* Returns the next line for inih, like fgets(), without its indentation: inih would append an indented line
 * to the value above. A line that is too long or has a NUL byte ends the reading with an error. */
static char *next_line(char *line, int size, void *context)
{
    struct reading *reading = context;
    size_t length = strcspn(reading->rest, "\n");
    (void)size;
    if (reading->rest == reading->end || reading->status != STATUS_OK)
        return NULL;
    reading->line++;
    if (length > LINE_MAX_BYTES) {
        reading->status =
            status_option(STATUS_USAGE, "config", " %s: line %d has more than %d bytes; shorten it",
                          reading->config->path, reading->line, LINE_MAX_BYTES);
        return NULL;
    }
    if (reading->rest[length] == '\0' && reading->rest + length < reading->end) {
        reading->status =
            status_option(STATUS_USAGE, "config", " %s: line %d has a NUL byte; save it as UTF-8 text",
                          reading->config->path, reading->line);
        return NULL;
    }
    size_t indent = strspn(reading->rest, " \t");
    length += reading->rest[length] == '\n';
    memcpy(line, reading->rest + indent, length - indent);
    line[length - indent] = '\0';
    reading->rest += length;
    return line;
}

static int take_line(void *context, const char *section, const char *name, const char *value)
{
    struct reading *reading = context;
    struct config *config = reading->config;
    size_t bytes = strlen(name) + strlen(value) + sizeof "--=";
    (void)section;
    if (strcmp(name, "config") == 0) {
        reading->status =
            status_option(STATUS_USAGE, "config",
                          " %s: line %d: a file cannot include another file; copy its lines instead",
                          config->path, reading->line);
        return 0;
    }
    char *argument = malloc(bytes);
    int *lines = realloc(config->lines, ((size_t)config->argc + 1) * sizeof *lines);
    if (!argument || !lines) {
        free(argument);
        argument = NULL;
    } else {
        snprintf(argument, bytes, "--%s=%s", name, value);
        lines[config->argc] = reading->line;
    }
    if (lines)
        config->lines = lines;
    reading->status = add_argument(config, argument);
    config->file_options++;
    return reading->status == STATUS_OK;
}

static enum status read_config(struct config *config)
{
    struct reading reading = {.config = config};
    char *text;
    size_t size;
    if (file_read(config->path, &text, &size) != STATUS_OK)
        return status_prefix(STATUS_USAGE, "--config");
    reading.rest = text;
    reading.end = text + size;
    int line = ini_parse_stream(next_line, &reading, take_line, &reading);
    free(text);
    if (reading.status != STATUS_OK || line == 0)
        return reading.status;
    return status_option(STATUS_USAGE, "config", " %s: line %d is not an option; write \"name = value\"",
                         config->path, line);
}
#else
static enum status read_config(struct config *config)
{
    return status_option(STATUS_UNAVAILABLE, "config",
                         " %s: not built, because inih was not found; install libinih-dev and rebuild",
                         config->path);
}
#endif

enum status config_read(int argc, char *argv[], struct config *config)
{
    /* Without specs, options_peek() accepts only the full name. */
    *config = (struct config){.path = options_peek(NULL, 0, argc, argv, "config")};
    TRY(add_argument(config, strdup(argv[0])));
    if (config->path)
        TRY(read_config(config));
    for (int i = 1; i < argc && !config->command; i++)
        if (strcmp(argv[i], "--") == 0)
            config->command = argv + i + 1;
        else
            TRY(add_argument(config, strdup(argv[i])));
    return STATUS_OK;
}

void config_free(struct config *config)
{
    for (int i = 0; i < config->argc; i++)
        free(config->argv[i]);
    free(config->argv);
    free(config->lines);
    *config = (struct config){0};
}

/* ---- Help ---- */

#define HELP_COLUMN 26 /* column of the descriptions in --help */
#define HELP_WIDTH  80
#define BRIEF_WIDTH 100

/* Returns the default of an option: the value in `defaults` if there is one, else the value in the option
 * table. `defaults` may be NULL. */
static const char *default_of(const struct option_spec *spec, const char *const *defaults)
{
    for (; defaults && *defaults; defaults += 2)
        if (strcmp(defaults[0], spec->name) == 0)
            return defaults[1];
    return spec->fallback;
}

/* Removes the characters from `first` to `last` from a string. Does nothing if `last` is NULL. */
static void cut(char *first, const char *last)
{
    if (last)
        memmove(first, last + 1, strlen(last + 1) + 1);
}

void options_describe(const struct option_spec *spec, char *text, size_t size)
{
    text_append(text, size, "%s", spec->help);
    for (size_t c = 0; spec->kind == OPTION_CHOICE && spec->choices[c]; c++)
        text_append(text, size, "%s %s", c ? "," : ":", spec->choices[c]);
}

static void print_option(FILE *stream, const struct option_spec *spec, const char *const *defaults)
{
    char label[128] = "  ", text[1024] = "";
    if (letter_of(spec))
        text_append(label, sizeof label, "-%c, ", letter_of(spec));
    text_append(label, sizeof label, "--%s", spec->name);
    if (spec->kind != OPTION_FLAG)
        text_append(label, sizeof label, " %s", spec->argument ? spec->argument : "VALUE");

    options_describe(spec, text, sizeof text);
    const char *fallback = default_of(spec, defaults);
    char *usual = strstr(text, " (default: ");
    if (usual && fallback != spec->fallback) /* `defaults` overrides the help text */
        cut(usual, strchr(usual, ')'));
    if (fallback)
        text_append(text, sizeof text, " (default %s)", fallback);

    fprintf(stream, "%-*s", HELP_COLUMN, label);
    if (strlen(label) + 2 > HELP_COLUMN)
        fprintf(stream, "\n%*s", HELP_COLUMN, "");
    text_print_wrapped(stream, text, HELP_COLUMN, HELP_WIDTH);
}

void options_help(FILE *stream, const struct option_spec *specs, size_t count, const char *const *defaults)
{
    for (size_t i = 0; i < count; i++)
        print_option(stream, &specs[i], defaults);
}

/* Prints the options of a group that are in sections with this title; with `names`, appends their names
 * instead. */
static void print_section(FILE *stream, const struct option_group *group, const char *title,
                          const char *const *defaults, char *names, size_t size)
{
    bool inside = false;
    for (size_t i = 0; i < group->count; i++) {
        const struct option_spec *spec = &group->specs[i];
        for (const struct option_section *section = group->sections; section->title; section++)
            if (strcmp(section->first, spec->name) == 0)
                inside = strcmp(section->title, title) == 0;
        if (inside && names)
            text_append(names, size, " --%s", spec->name);
        else if (inside)
            print_option(stream, spec, defaults);
    }
}

/* Returns whether a section before this one has the same title. */
static bool is_printed(const struct option_group *groups, const struct option_section *section)
{
    for (;; groups++)
        for (const struct option_section *other = groups->sections; other->title; other++) {
            if (other == section)
                return false;
            if (strcmp(other->title, section->title) == 0)
                return true;
        }
}

#define TOPIC_BYTES 64
#define TOPICS_MAX  64

/* Writes the topic of --help that names a section: its title with '-' instead of ' '. */
static void topic_of(const struct option_section *section, char topic[TOPIC_BYTES])
{
    snprintf(topic, TOPIC_BYTES, "%s", section->title);
    for (char *at = topic; (at = strchr(at, ' '));)
        *at = '-';
}

void options_help_sections(FILE *stream, const struct option_group *groups, size_t count,
                           const char *const *defaults, bool brief)
{
    for (size_t g = 0; g < count; g++)
        for (const struct option_section *section = groups[g].sections; section->title; section++) {
            char names[1024] = "";
            if (is_printed(groups, section))
                continue;
            if (!brief)
                fprintf(stream, "\n%s:\n", section->title);
            for (size_t i = g; i < count; i++)
                print_section(stream, &groups[i], section->title, defaults, brief ? names : NULL,
                              sizeof names);
            if (brief) {
                char topic[TOPIC_BYTES];
                topic_of(section, topic);
                fprintf(stream, "  %-*s", HELP_COLUMN - 2, topic);
                text_print_wrapped(stream, names, HELP_COLUMN, BRIEF_WIDTH);
            }
        }
}

enum status options_help_topic(FILE *stream, const struct option_group *groups, size_t count,
                               const char *const *defaults, const char *topic)
{
    char topics[TOPICS_MAX][TOPIC_BYTES];
    const char *known[TOPICS_MAX];
    size_t known_count = 0;
    for (size_t g = 0; g < count; g++)
        for (const struct option_section *section = groups[g].sections; section->title; section++) {
            char own[TOPIC_BYTES];
            topic_of(section, own);
            if (known_count < TOPICS_MAX) {
                known[known_count] = strcpy(topics[known_count], own);
                known_count++;
            }
            if (strcmp(topic, own) != 0)
                continue;
            fprintf(stream, "%s:\n", section->title);
            for (size_t i = g; i < count; i++)
                print_section(stream, &groups[i], section->title, defaults, NULL, 0);
            return STATUS_OK;
        }
    for (size_t g = 0; g < count; g++)
        for (size_t i = 0; i < groups[g].count; i++)
            if (strcmp(topic, groups[g].specs[i].name) == 0) {
                print_option(stream, &groups[g].specs[i], defaults);
                return STATUS_OK;
            }
    const char *nearest = nearest_word(topic, known, known_count);
    return status_set(STATUS_USAGE, "--help: no topic or option is named '%.80s'%s%s%s", topic,
                      nearest ? "; did you mean '" : "; --help and --workload NAME --help list the topics",
                      nearest ? nearest : "", nearest ? "'?" : "");
}

bool options_help_search(FILE *stream, const struct option_group *group, const char *const *defaults,
                         const char *title, const char *word, bool brief)
{
    char names[1024] = "";
    for (size_t i = 0; i < group->count && *word; i++) {
        const struct option_spec *spec = &group->specs[i];
        char text[1024] = "";
        options_describe(spec, text, sizeof text);
        if (!strcasestr(spec->name, word) && !strcasestr(text, word))
            continue;
        if (!brief && !*names)
            fprintf(stream, "options of %s with '%s':\n", title, word);
        if (!brief)
            print_option(stream, spec, defaults);
        text_append(names, sizeof names, " --%s", spec->name);
    }
    if (brief && *names) {
        fprintf(stream, "  %-*s", HELP_COLUMN - 2, title);
        text_print_wrapped(stream, names, HELP_COLUMN, BRIEF_WIDTH);
    }
    return *names;
}

bool options_is_default(const struct options *options, const struct option_spec *spec, const void *values)
{
    struct option_spec usual = *spec; /* with its default in `value` */
    union {
        bool flag;
        uint64_t count;
        double real;
        int choice;
        const char *text;
    } value = {0};
    char texts[2][4096];
    usual.offset = 0;
    usual.fallback = default_of(spec, options->defaults);
    if (spec->kind == OPTION_FLAG)
        value.flag = usual.fallback != NULL;
    else if (set_default(&usual, &value) != STATUS_OK)
        return false;
    options_text(&usual, &value, texts[0], sizeof texts[0]);
    options_text(spec, values, texts[1], sizeof texts[1]);
    return strcmp(texts[0], texts[1]) == 0;
}

void options_print_defaults(FILE *stream, const struct options *options,
                            bool (*applies)(const void *context, const char *name), const void *context)
{
    bool any = false;
    for (const char *const *pair = options->defaults; pair && *pair; pair += 2) {
        const struct entry entry = entry_named(options, pair[0]);
        if (!entry.spec || options->given[entry.index] || !applies(context, pair[0]))
            continue;
        const bool flag = entry.spec->kind == OPTION_FLAG;
        if (flag && !*(const bool *)entry_value(&entry)) /* --name=no */
            continue;
        /* Print the text of the default, not the stored value: a run may have changed it, for example to the
         * batch of one rank. */
        fprintf(stream, "%s--%s%s%s", any ? " " : "", pair[0], flag ? "" : " ", flag ? "" : pair[1]);
        any = true;
    }
    if (any)
        fputc('\n', stream);
}
