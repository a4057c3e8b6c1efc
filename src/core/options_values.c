/* Values of options: parsing and printing. */
#include "core/options_parts.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/words.h"

#define NAME_BYTES 80 /* "--name" is truncated to this length in messages */

const char *const option_max[] = {"max", NULL};

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
    return spec->kind == OPTION_REAL || is_numbers(spec) || (whole && spec->minimum >= 1);
}

enum status option_set(const struct option_spec *spec, void *values, const char *text)
{
    void *value = (char *)values + spec->offset;
    char name[NAME_BYTES];
    if (option_takes_none(spec) && strcmp(text, "none") == 0)
        return option_set_default(spec, values);
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

enum status option_set_default(const struct option_spec *spec, void *values)
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
