/* The formulas `colorfractal` and `multifractal`: fractals in colour over clouds, one or several per image,
 * as the images of Anderson and Farrell (WACV 2022) (docs/formulas.md). */
#include "core/portable.h"
#include "synth/color.h"
#include "synth/formula.h"
#include "synth/ifs_classes.h"

#define VALUE(name, most)                               \
    {                                                   \
        name, PARAMETER_DOUBLE, -(most), most, .low = 0 \
    }
#define MAP(m)                                                                                           \
    VALUE("a" #m, 1.1), VALUE("b" #m, 1.1), VALUE("c" #m, 1.1), VALUE("d" #m, 1.1), VALUE("e" #m, 1000), \
        VALUE("f" #m, 1000),                                                                             \
    {                                                                                                    \
        "p" #m, PARAMETER_DOUBLE, 0, 1, .low = 0                                                         \
    }
/* In the order of the values of struct color_system. Values of maps that a class does not have are 0. */
#define PARAMETERS                                                                               \
    {                                                                                            \
        {"maps", PARAMETER_INTEGER, 2, COLOR_MAPS_MAX, .low = 2}, MAP(1), MAP(2), MAP(3), MAP(4) \
    }

/* Formulas with different lists of parameters do not share presets. */
static const struct formula_parameter one_parameters[] = PARAMETERS, many_parameters[] = PARAMETERS;
_Static_assert(COUNT_OF(one_parameters) == COLOR_PARAMETERS, "one parameter per value of a system");

static const struct formula_preset one_presets[] = {
    {.name = "colorfractal", .rows = ifs_sampled_rows},
    {.name = "fractal-color-1k", .rows = ifs_sampled_rows, .classes = 1000},
    {.name = NULL},
};

static const struct formula_preset many_presets[] = {
    {.name = "multifractal", .rows = ifs_sampled_rows},
    {.name = "multifractal-1k", .rows = ifs_sampled_rows, .classes = 1000},
    {.name = NULL},
};

#define UNPUBLISHED "the script draws its images with unseeded generators"

const struct formula formula_colorfractal = {
    .name = "colorfractal",
    .summary = "draws one fractal in colour per image, in the manner of Anderson and Farrell (WACV 2022)",
    .id = FORMULA_COLORFRACTAL,
    .family = FAMILY_COLOR,
    .targets = TARGET_LABEL,
    .parameters = one_parameters,
    .parameter_count = COUNT_OF(one_parameters),
    .id_most = UINT32_MAX,
    .classes = 1000,
    .presets = one_presets,
    .check = color_check,
    .canvas = 224,
    .unpublished = UNPUBLISHED,
};

const struct formula formula_multifractal = {
    .name = "multifractal",
    .summary = "draws one to five fractals in colour per image; a multi-hot label tells their classes",
    .id = FORMULA_MULTIFRACTAL,
    .family = FAMILY_COLOR,
    .targets = TARGET_MULTI_HOT,
    .parameters = many_parameters,
    .parameter_count = COUNT_OF(many_parameters),
    .id_most = UINT32_MAX,
    .classes = 1000,
    .presets = many_presets,
    .check = color_check,
    .canvas = 224,
    .unpublished = UNPUBLISHED,
};
