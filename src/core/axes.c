#include "core/options.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/text.h"

/* Tolerance for rounding errors: a computed value may exceed the end of its range by this fraction of the
 * step. In a range that multiplies, the tolerance is this fraction of the end. */
#define ROUNDING 1e-9

static bool is_whole(const struct option_spec *spec)
{
    return spec->kind == OPTION_COUNT || spec->kind == OPTION_BYTES;
}

bool axes_accept(const struct option_spec *spec, const char *text)
{
    bool kind = is_whole(spec) || spec->kind == OPTION_REAL || spec->kind == OPTION_CHOICE ||
                spec->choices == option_words;
    return kind && spec->column && strpbrk(text, ",:");
}

/* ---- Values ---- */

static enum status add_value(struct axis *axis, const char *text)
{
    const struct option_spec *spec = axis->spec;
    TRY(option_set(spec, axis->values, text));
    if (axis->count == COMBINATIONS_MAX)
        return status_set(STATUS_USAGE, "--%s has more than %d values; raise the step", spec->name,
                          COMBINATIONS_MAX);
    TRY(ALLOCATED(array_grow(&axis->texts, axis->count, sizeof *axis->texts),
                  "out of memory for the values of --%s", spec->name));
    char *mine = axis->texts[axis->count];
    options_text(spec, axis->values, mine, AXIS_TEXT_BYTES);
    if (!*mine) /* options_text() writes nothing for "none", and for a count of 0 without a default */
        strcpy(mine, option_takes_none(spec) ? "none" : "0");
    for (size_t i = 0; i < axis->count; i++)
        if (strcmp(axis->texts[i], mine) == 0)
            return status_set(STATUS_USAGE, "--%s: %s occurs twice; drop one of them", spec->name, mine);
    axis->count++;
    return STATUS_OK;
}

/* The parts of "first:last:step". In "first:last:2x", the step is a factor, and `multiplies` is true. */
struct range {
    const char *whole, *first, *last, *step;
    bool multiplies;
};

static enum status refuse_range(const struct axis *axis, const struct range *range, const char *reason)
{
    return status_set(STATUS_USAGE, "--%s: '%.80s' %s", axis->spec->name, range->whole, reason);
}

static enum status refuse_step(const struct axis *axis, const struct range *range)
{
    const char *reason = "does not grow; use a step above 0";
    if (range->multiplies && is_whole(axis->spec))
        reason = "does not grow; multiply by 2x or more, from a first value above 0";
    else if (range->multiplies)
        reason = "does not grow; multiply by more than 1x, from a first value above 0";
    return refuse_range(axis, range, reason);
}

#define SWAP     "write the smaller value first"
#define DESCENDS "is a range FIRST:LAST:STEP that descends; " SWAP

static enum status add_counts(struct axis *axis, const struct range *range)
{
    const struct option_spec *spec = axis->spec;
    uint64_t value, last, step;
    char name[80], text[AXIS_TEXT_BYTES];
    snprintf(name, sizeof name, "--%s", spec->name);
    enum status (*parse)(const char *, const char *, double, double, uint64_t *) =
        spec->kind == OPTION_BYTES ? parse_bytes : parse_count;
    TRY(parse(name, range->first, spec->minimum, spec->maximum, &value));
    TRY(parse(name, range->last, spec->minimum, spec->maximum, &last));
    TRY(parse(name, range->step, 0, 0x1p64, &step));
    if (value > last)
        return refuse_range(axis, range, DESCENDS);
    if (range->multiplies ? step < 2 || value == 0 : step == 0)
        return refuse_step(axis, range);
    for (;;) {
        snprintf(text, sizeof text, "%llu", (unsigned long long)value);
        TRY(add_value(axis, text));
        /* Compares without computing the next value, which may overflow. */
        if (range->multiplies ? value > last / step : step > last - value)
            return STATUS_OK;
        value = range->multiplies ? value * step : value + step;
    }
}

/* Adds the values of a range of real numbers. Computes each value from the first one, so that rounding errors
 * do not add up. Rounds each value to 15 digits: 0.1 + 2 * 0.1 becomes 0.3. */
static enum status add_reals(struct axis *axis, const struct range *range)
{
    const struct option_spec *spec = axis->spec;
    double first, last, step;
    char name[80], text[AXIS_TEXT_BYTES];
    snprintf(name, sizeof name, "--%s", spec->name);
    TRY(parse_real(name, range->first, spec->minimum, spec->maximum, &first));
    TRY(parse_real(name, range->last, spec->minimum, spec->maximum, &last));
    TRY(parse_real(name, range->step, 0, DBL_MAX, &step));
    if (first > last)
        return refuse_range(axis, range, DESCENDS);
    if (range->multiplies ? step <= 1 || first <= 0 : step <= 0)
        return refuse_step(axis, range);
    for (double i = 0;; i++) {
        double value = range->multiplies ? first * pow(step, i) : first + i * step;
        double error = ROUNDING * (range->multiplies ? last : step);
        if (value > last + error)
            return STATUS_OK;
        if (fabs(value) < error) /* -0.3 + 3 * 0.1 is not exactly 0 */
            value = 0;
        snprintf(text, sizeof text, "%.15g", value > last ? last : value);
        TRY(add_value(axis, i == 0 ? range->first : text));
    }
}

static enum status add_range(struct axis *axis, char *text)
{
    char whole[96], reason[96], *rest = text;
    snprintf(whole, sizeof whole, "%s", text);
    struct range range = {.whole = whole};
    range.first = strsep(&rest, ":");
    range.last = strsep(&rest, ":");
    range.step = rest;
    if (axis->spec->kind == OPTION_CHOICE || axis->spec->kind == OPTION_TEXT)
        return refuse_range(axis, &range, "is a range, but only numbers have ranges; write a list: A,B");
    if (!range.step || strchr(range.step, ':'))
        return refuse_range(axis, &range,
                            "is not a range; write FIRST:LAST:STEP to add, FIRST:LAST:2x to multiply");
    size_t length = strlen(range.step);
    if (range.step[0] == '-' && range.step[1])
        return refuse_range(axis, &range, "descends, but ranges ascend; " SWAP " and a step above 0");
    if (range.step[0] == 'x' && length > 1) {
        snprintf(reason, sizeof reason, "has its x before the factor; write %.40sx", range.step + 1);
        return refuse_range(axis, &range, reason);
    }
    range.multiplies = length > 1 && range.step[length - 1] == 'x';
    if (range.multiplies)
        rest[length - 1] = '\0';
    return is_whole(axis->spec) ? add_counts(axis, &range) : add_reals(axis, &range);
}

/* Adds the values of a list. Splits `list` at its commas, in place; `whole` is an intact copy for
 * messages. */
static enum status add_elements(struct axis *axis, char *list, const char *whole)
{
    const char *name = axis->spec->name;
    for (char *element; (element = strsep(&list, ","));) {
        element = trim(element); /* --config files may have spaces: "224, 512" */
        if (!*element)
            return status_set(STATUS_USAGE, "--%s: '%.80s' has an empty value; write 1,2 or 1:8:2x", name,
                              whole);
        if (is_whole(axis->spec) && element[0] == '0' && strspn(element, "0123456789") > 1)
            return status_set(STATUS_USAGE,
                              "--%s: '%.80s' has a value that begins with 0; write numbers without "
                              "thousands separators",
                              name, whole);
        TRY(strchr(element, ':') ? add_range(axis, element) : add_value(axis, element));
    }
    return STATUS_OK;
}

/* ---- Axes ---- */

enum status axes_add(struct axes *axes, const struct option_spec *spec, void *values, const char *text)
{
    if (axes->count == AXES_MAX)
        return status_set(STATUS_USAGE, "--%s: more than %d options have lists; run two sweeps", spec->name,
                          AXES_MAX);
    FREED char *list = strdup(text);
    TRY(ALLOCATED(list, "out of memory for the values of --%s", spec->name));
    /* Count the new axis even if adding its values fails, so that axes_free() frees them. */
    struct axis *axis = &axes->at[axes->count++];
    *axis = (struct axis){.spec = spec, .values = values};
    return add_elements(axis, list, text);
}

void axes_remove(struct axes *axes, const struct option_spec *spec)
{
    for (size_t i = 0; i < axes->count; i++)
        if (axes->at[i].spec == spec) {
            free(axes->at[i].texts);
            axes->count--;
            memmove(&axes->at[i], &axes->at[i + 1], (axes->count - i) * sizeof *axes->at);
            return;
        }
}

size_t axes_combinations(const struct axes *axes)
{
    size_t count = 1; /* cannot overflow: the loop stops above COMBINATIONS_MAX */
    for (size_t i = 0; i < axes->count && count <= COMBINATIONS_MAX; i++)
        count *= axes->at[i].count;
    return count;
}

enum status axes_check(const struct axes *axes)
{
    if (axes_combinations(axes) <= COMBINATIONS_MAX)
        return STATUS_OK;
    return status_set(
        STATUS_USAGE,
        "the lists and ranges have more than %d combinations; shorten them or run several sweeps",
        COMBINATIONS_MAX);
}

/* Returns the index of the value that axis number `axis` has in a combination. */
static size_t value_index(const struct axes *axes, size_t axis, size_t combination)
{
    for (size_t i = axes->count - 1; i > axis; i--)
        combination /= axes->at[i].count;
    return combination % axes->at[axis].count;
}

const char *axes_text(const struct axes *axes, size_t axis, size_t combination)
{
    return axes->at[axis].texts[value_index(axes, axis, combination)];
}

int axes_width(const struct axes *axes, size_t axis)
{
    size_t width = strlen(axes->at[axis].spec->name);
    for (size_t i = 0; i < axes->at[axis].count; i++)
        if (strlen(axes->at[axis].texts[i]) > width)
            width = strlen(axes->at[axis].texts[i]);
    return (int)width;
}

const struct axis *axes_find(const struct axes *axes, const char *name)
{
    for (size_t i = 0; i < axes->count; i++)
        if (strcmp(axes->at[i].spec->name, name) == 0)
            return &axes->at[i];
    return NULL;
}

enum status axes_select(const struct axes *axes, size_t combination)
{
    for (size_t i = 0; i < axes->count; i++)
        TRY(option_set(axes->at[i].spec, axes->at[i].values, axes_text(axes, i, combination)));
    return STATUS_OK;
}

void axes_describe(const struct axes *axes, size_t combination, char *text, size_t size)
{
    text[0] = '\0';
    for (size_t i = 0; i < axes->count; i++)
        text_join(text, size, " ", "--%s %s", axes->at[i].spec->name, axes_text(axes, i, combination));
}

/* Writes the values of the axis, starting at index `first`, as a list ("8,16") into a buffer of `size` bytes,
 * truncated if they do not fit. Returns the length before truncation. */
static size_t axis_join(const struct axis *axis, size_t first, char *text, size_t size)
{
    size_t used = 0;
    for (size_t i = first; i < axis->count; i++)
        used += (size_t)snprintf(text + (used < size ? used : size), used < size ? size - used : 0, "%s%s",
                                 i > first ? "," : "", axis->texts[i]);
    return used;
}

bool axes_describe_rest(const struct axes *axes, size_t combination, char *text, size_t size)
{
    size_t used = 0, end = axes->count;
    *text = '\0';
    while (end > 0 && value_index(axes, end - 1, combination) == 0)
        end--;
    /* Write one command for each axis with values that are not measured yet. The command gives the axis these
     * values, and the earlier axes their current values. It omits the later axes, because the original
     * command contains their lists. */
    for (size_t last = end; last-- > 0;) {
        const struct axis *axis = &axes->at[last];
        size_t first = value_index(axes, last, combination) + (last + 1 < end);
        if (first == axis->count)
            continue;
        used += (size_t)snprintf(text + used, size - used, "%s", used ? ", then with " : "");
        for (size_t i = 0; i < last && used < size; i++)
            used += (size_t)snprintf(text + used, size - used, "--%s %s ", axes->at[i].spec->name,
                                     axes_text(axes, i, combination));
        if (used < size)
            used += (size_t)snprintf(text + used, size - used, "--%s ", axis->spec->name);
        if (used < size)
            used += axis_join(axis, first, text + used, size - used);
        if (used >= size)
            return false;
    }
    return true;
}

void axes_free(struct axes *axes)
{
    for (size_t i = 0; i < axes->count; i++)
        free(axes->at[i].texts);
    *axes = (struct axes){0};
}
