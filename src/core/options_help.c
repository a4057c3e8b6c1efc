/* Prints option tables for --help, and the defaults of options->defaults for --dry-run. */
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

void options_help(FILE *stream, const struct option_spec *specs, size_t count, const char *const *defaults)
{
    for (size_t i = 0; i < count; i++) {
        const struct option_spec *spec = &specs[i];
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
