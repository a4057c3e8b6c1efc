#include "synth/formula.h"

#include <string.h>

#define FORMULA(symbol, name, ...) extern const struct formula formula_##name;
#include "synth/formulas.def"
#undef FORMULA

const struct formula *const formulas[FORMULA_COUNT] = {
#define FORMULA(symbol, name, ...) [FORMULA_##symbol] = &formula_##name,
#include "synth/formulas.def"
#undef FORMULA
};

const char *const formula_names[FORMULA_COUNT + 1] = {
#define FORMULA(symbol, name, ...) [FORMULA_##symbol] = #name,
#include "synth/formulas.def"
#undef FORMULA
};

static size_t find_parameter(const struct formula *formula, const char *name)
{
    size_t i = 0;
    while (i < formula->parameter_count && strcmp(formula->parameters[i].name, name) != 0)
        i++;
    return i;
}

double formula_value(const struct formula *formula, const struct class_row *row, const char *name)
{
    size_t i = find_parameter(formula, name);
    return i < formula->parameter_count ? row->value[i] : 0;
}

bool formula_set(const struct formula *formula, struct class_row *row, const char *name, double value)
{
    size_t i = find_parameter(formula, name);
    if (i == formula->parameter_count)
        return false;
    row->value[i] = value;
    return true;
}

const struct formula_preset *formula_preset(const struct formula *formula, const char *name)
{
    for (const struct formula_preset *preset = formula->presets; preset && preset->name; preset++)
        if (strcmp(preset->name, name) == 0)
            return preset;
    return NULL;
}

const struct formula *formula_of_preset(const char *name)
{
    for (size_t i = 0; i < FORMULA_COUNT; i++)
        if (strcmp(formulas[i]->name, name) == 0 || formula_preset(formulas[i], name))
            return formulas[i];
    return NULL;
}

uint32_t formula_preset_classes(const struct formula_preset *preset)
{
    return !preset ? 0 : preset->set ? preset->set->classes : preset->classes;
}
