/* Prints option tables for --help and the defaults of options->defaults for --dry-run; compares values with
 * defaults. */
#include "core/options_parts.h"

#include <string.h>

#define HELP_COLUMN 26 /* column of the descriptions in --help */
#define HELP_WIDTH  80

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

static void print_option(FILE *stream, const struct option_spec *spec, const char *const *defaults)
{
    char label[128] = "  ", text[1024] = "";
    if (option_letter(spec))
        text_append(label, sizeof label, "-%c, ", option_letter(spec));
    text_append(label, sizeof label, "--%s", spec->name);
    if (spec->kind != OPTION_FLAG)
        text_append(label, sizeof label, " %s", spec->argument ? spec->argument : "VALUE");

    text_append(text, sizeof text, "%s", spec->help);
    for (size_t c = 0; spec->kind == OPTION_CHOICE && spec->choices[c]; c++)
        text_append(text, sizeof text, "%s %s", c ? "," : ":", spec->choices[c]);
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
                fprintf(stream, "  %-*s", HELP_COLUMN - 2, section->title);
                text_print_wrapped(stream, names, HELP_COLUMN, HELP_WIDTH);
            }
        }
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
    else if (option_set_default(&usual, &value) != STATUS_OK)
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
        size_t index;
        void *values = NULL;
        if (!option_has_name(options, pair[0], &index) || options->given[index] || !applies(context, pair[0]))
            continue;
        const struct option_spec *spec = option_spec_at(options, index, &values);
        const bool flag = spec->kind == OPTION_FLAG;
        if (flag && !*(const bool *)((const char *)values + spec->offset)) /* --name=no */
            continue;
        /* Print the text of the default, not the stored value: a run may have changed it, for example to the
         * batch of one rank. */
        fprintf(stream, "%s--%s%s%s", any ? " " : "", pair[0], flag ? "" : " ", flag ? "" : pair[1]);
        any = true;
    }
    if (any)
        fputc('\n', stream);
}
