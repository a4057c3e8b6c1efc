/* Messages about options that the parser refuses, with the option that is probably meant. */
#include "core/options_parts.h"

#include <stdlib.h>
#include <string.h>

#include "core/words.h"

#define NAME_BYTES 80 /* "--name" is truncated to this length in messages */

/* Names that other programs, above all timm, give to options. They are not accepted; the error message names
 * our option for the same purpose. */
static const struct {
    const char *theirs, *ours;
} foreign[] = {
    {"aa", "rand-augment"},
    {"aug-repeats", "repeats"},
    {"bce-loss", "loss"},
    {"clip-grad", "clip-norm"},
    {"decay-epochs", "lr-step"},
    {"decay-rate", "lr-gamma"},
    {"grad-accum", "accumulate"},
    {"grad-accum-steps", "accumulate"},
    {"hflip", "flip"},
    {"img-size", "out-res"},
    {"min-lr", "lr-min"},
    {"model-ema", "ema"},
    {"model-ema-decay", "ema"},
    {"num-classes", "classes"},
    {"reprob", "erasing"},
    {"sched", "lr-schedule"},
    {"smoothing", "label-smoothing"},
    {"train-interpolation", "interpolation"},
    {"warmup-epochs", "lr-warmup"},
};

/* Example values for messages about options whose default is missing or switches the option off. */
static const struct {
    const char *name, *value;
} examples[] = {
    {"clip-norm", "1"},       {"cutmix", "1"},       {"drop-path", "0.1"},
    {"ema", "0.9999"},        {"erasing", "0.25"},   {"label-smoothing", "0.1"},
    {"lr-warmup", "5"},       {"mean", "0.5"},       {"mixup", "0.8"},
    {"out-res", "224"},       {"rand-augment", "9"}, {"std", "0.25"},
    {"weight-decay", "0.05"}, {"shift", "2"},        {"lr-milestones", "30:60:80"},
};

/* Extracts the name from "--name=value" or "-name". */
static void option_name(const char *argument, char *name, size_t size)
{
    const char *first = argument + strspn(argument, "-");
    snprintf(name, size, "%.*s", (int)strcspn(first, "="), first);
}

/* Sets a message for the former name `was` of an option: its current name `now`, and where this option
 * belongs. Returns STATUS_OK if no part of the program knows the option. */
static enum status explain_former(const struct options *options, const char *was, const char *now)
{
    enum status status = options->explain ? options->explain(options->explain_context, now) : STATUS_OK;
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "--%s is now called --%s", was, now);
}

/* Sets a message for the option name of another program: it suggests our option `ours`. Returns STATUS_OK if
 * no part of the program knows `ours`. */
static enum status explain_foreign(const struct options *options, int shown, const char *argument,
                                   const char *ours)
{
    size_t index;
    if (option_has_name(options, ours, &index))
        return status_set(STATUS_USAGE, "unknown option '%.*s'; did you mean '--%s'?", shown, argument, ours);
    enum status status = options->explain ? options->explain(options->explain_context, ours) : STATUS_OK;
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "unknown option '%.*s'", shown, argument);
}

static enum status explain_unknown(const struct options *options, const char *argument)
{
    char name[WORD_MAX + 2]; /* truncated names are too long for a suggestion anyway */
    option_name(argument, name, sizeof name);
    size_t length = strcspn(argument, "=");
    int shown = (int)(length < NAME_BYTES ? length : NAME_BYTES);
    if (options->explain)
        TRY(options->explain(options->explain_context, name));
    for (size_t i = 0; i < option_former_count; i++)
        if (strcmp(name, option_formers[i].was) == 0)
            TRY(explain_former(options, name, option_formers[i].now));
    for (size_t i = 0; i < COUNT_OF(foreign); i++)
        if (strcmp(name, foreign[i].theirs) == 0)
            TRY(explain_foreign(options, shown, argument, foreign[i].ours));

    size_t count = option_spec_count(options);
    const char **names = calloc(count + 1, sizeof *names);
    if (!names)
        return status_set(STATUS_FAILED, "out of memory for %zu option names", count);
    void *values;
    for (size_t i = 0; i < count; i++)
        names[i] = option_spec_at(options, i, &values)->name;
    const char *nearest = nearest_word(name, names, count);
    free(names);

    if (nearest)
        return status_set(STATUS_USAGE, "unknown option '%.*s'; did you mean '--%s'?", shown, argument,
                          nearest);
    return status_set(STATUS_USAGE, "unknown option '%.*s'; see %s", shown, argument,
                      options->help ? options->help : "--help");
}

/* Sets the message for an argument that getopt_long() refused: it is either ambiguous or unknown. */
enum status option_explain_refused(const struct options *options, const char *argument)
{
    char name[WORD_MAX + 2], matches[512] = "";
    option_name(argument, name, sizeof name);
    size_t length = strlen(name), found = 0;
    const struct option_spec *spec;
    void *values;
    for (size_t i = 0; (spec = option_spec_at(options, i, &values)); i++)
        if (strncmp(spec->name, name, length) == 0)
            option_append(matches, sizeof matches, "%s--%s", found++ ? " or " : "", spec->name);
    if (length > 0 && found > 1 && strncmp(argument, "--", 2) == 0)
        return status_set(STATUS_USAGE, "option '--%s' is ambiguous: it could be %s", name, matches);
    return explain_unknown(options, argument);
}

/* Sets the message for an option without its value. `was` is the former name that was used, or NULL. */
enum status option_explain_missing(const struct option_spec *spec, const char *was)
{
    const char *example = spec->fallback;
    for (size_t i = 0; i < COUNT_OF(examples); i++)
        if (strcmp(spec->name, examples[i].name) == 0)
            example = examples[i].value;
    if (!example && spec->kind == OPTION_CHOICE)
        example = spec->choices[0];
    if (!example)
        example = spec->argument ? spec->argument : "VALUE";
    if (was)
        return status_set(STATUS_USAGE, "--%s is now called --%s and needs a value, e.g. --%s %s", was,
                          spec->name, spec->name, example);
    return status_set(STATUS_USAGE, "--%s needs a value, e.g. --%s %s", spec->name, spec->name, example);
}

static bool is_word_of_flags(const char *text)
{
    static const char *const words[] = {"true", "yes", "on", "false", "no", "off"};
    for (size_t i = 0; i < COUNT_OF(words); i++)
        if (strcmp(text, words[i]) == 0)
            return true;
    return false;
}

enum status option_explain_operand(const struct options *options, const char *previous, const char *argument)
{
    size_t index;
    void *values;
    if (strncmp(previous, "--", 2) == 0 && is_word_of_flags(argument) &&
        option_has_name(options, previous + 2, &index) &&
        option_spec_at(options, index, &values)->kind == OPTION_FLAG)
        return status_set(STATUS_USAGE, "unexpected argument '%s'; write %s=%s", argument, previous,
                          argument);
    if (options->explain) {
        enum status status = options->explain(options->explain_context, argument);
        if (status != STATUS_OK)
            return status_prefix(status, "unexpected argument '%.80s'", argument);
    }
    return status_set(STATUS_USAGE, "unexpected argument '%.80s'; options begin with --", argument);
}

enum status option_explain_value(const struct options *options, const struct option_spec *spec,
                                 const char *value)
{
    const struct option_spec *other;
    void *values;
    char message[1024];
    snprintf(message, sizeof message, "%s", status_text());
    for (size_t i = 0; spec->kind == OPTION_CHOICE && (other = option_spec_at(options, i, &values)); i++)
        if (other != spec && strstr(other->name, spec->name) && options_is_choice(other, value))
            return status_set(STATUS_USAGE, "%s; did you mean '--%s %s'?", message, other->name, value);
    return STATUS_USAGE;
}
