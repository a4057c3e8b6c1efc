/* Messages about options that the parser refuses. They suggest the option that is probably meant. */
#include "core/options_parts.h"

#include <stdlib.h>
#include <string.h>

#include "core/words.h"

#define NAME_BYTES 80 /* "--name" is truncated to this length in messages */

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
    {"checkpoint-hist", "keep", NULL},
    {"clip-grad", "clip-norm", NULL},
    {"data-dir", "data", NULL},
    {"decay-epochs", "lr-step", NULL},
    {"decay-milestones", "lr-milestones", NULL},
    {"decay-rate", "lr-gamma", NULL},
    {"grad-accum", "accumulate", NULL},
    {"grad-accum-steps", "accumulate", NULL},
    {"grad-checkpointing", "checkpoint-activations", NULL},
    {"hflip", "flip", NULL},
    {"img-size", "out-res", NULL},
    {"initial-checkpoint", "init", NULL},
    {"log-interval", "log-steps", NULL},
    {"lr-cycle-limit", "lr-cycles", NULL},
    {"min-lr", "lr-min", NULL},
    {"model-ema", "ema", NULL},
    {"model-ema-decay", "ema", NULL},
    {"num-classes", "classes", NULL},
    {"opt-betas", "beta1", "B --beta2 B"},
    {"opt-eps", "epsilon", NULL},
    {"output", "checkpoint", NULL},
    {"pretrained", "init", "FILE"},
    {"recovery-interval", "checkpoint-steps", NULL},
    {"remode", NULL, NULL},
    {"reprob", "erasing", NULL},
    {"sched", "lr-schedule", NULL},
    {"smoothing", "label-smoothing", NULL},
    {"train-interpolation", "interpolation", NULL},
    {"val", "data", "DIR, with the folders DIR/train and DIR/val"},
    {"warmup-epochs", "lr-warmup", NULL},
    {"warmup-lr", NULL, NULL},
    {"wd", "weight-decay", NULL},
    {"workers", "threads", NULL},
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
                          "docs/train_recipe.md",
                          shown, argument);
    enum status status =
        options->explain ? options->explain(options->explain_context, foreign->ours) : STATUS_OK;
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "unknown option '%.*s'", shown, argument);
}

static enum status explain_unknown(const struct options *options, const char *argument)
{
    char name[WORD_MAX + 2]; /* truncated names are too long for a suggestion anyway */
    option_name(argument, name, sizeof name);
    size_t length = strcspn(argument, "=");
    int shown = (int)(length < NAME_BYTES ? length : NAME_BYTES);
    size_t index;
    /* options->explain() speaks of other commands, but "-help" may be meant for this one. */
    if (option_has_name(options, name, &index))
        return status_set(STATUS_USAGE, "unknown option '%.*s'; did you mean '--%s'?", shown, argument, name);
    if (options->explain)
        TRY(options->explain(options->explain_context, name));
    const struct foreign *foreign = find_foreign(name);
    if (foreign && foreign->ours && option_has_name(options, foreign->ours, &index))
        return status_set(STATUS_USAGE, "unknown option '%.*s'; did you mean '--%s%s%s'?", shown, argument,
                          foreign->ours, foreign->value ? " " : "", foreign->value ? foreign->value : "");
    if (foreign)
        TRY(explain_foreign(options, shown, argument, foreign));

    size_t count = option_spec_count(options);
    const char **names = calloc(count + 1, sizeof *names);
    TRY(ALLOCATED(names, "out of memory for %zu option names", count));
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
            text_append(matches, sizeof matches, "%s--%s", found++ ? " or " : "", spec->name);
    if (length > 0 && found > 1 && strncmp(argument, "--", 2) == 0)
        return status_about(
            status_set(STATUS_USAGE, "option '--%s' is ambiguous: it could be %s", name, matches), name);
    return status_about(explain_unknown(options, argument), name);
}

enum status option_explain_abbreviation(const struct options *options, const struct option_spec *spec,
                                        const char *argument)
{
    char name[WORD_MAX + 2];
    option_name(argument, name, sizeof name);
    if (!options->explain || strncmp(argument, "--", 2) != 0 || strcmp(name, spec->name) == 0)
        return STATUS_OK;
    return options->explain(options->explain_context, name);
}

/* Sets the message for an option without its value. */
enum status option_explain_missing(const struct option_spec *spec)
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

static bool is_word_of_flags(const char *text)
{
    static const char *const words[] = {"true", "yes", "on", "false", "no", "off", NULL};
    return is_one_of(text, words);
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
    if (option_has_name(options, argument, &index))
        return status_set(STATUS_USAGE, "unexpected argument '%s'; did you mean '--%s'?", argument, argument);
    if (options->explain) {
        enum status status = options->explain(options->explain_context, argument);
        if (status != STATUS_OK)
            return status_prefix(status, "unexpected argument '%.80s'", argument);
    }
    return options->operand
               ? status_set(STATUS_USAGE, "unexpected argument '%.80s'; write --%s %.80s", argument,
                            options->operand, argument)
               : status_set(STATUS_USAGE, "unexpected argument '%.80s'; options begin with --", argument);
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
