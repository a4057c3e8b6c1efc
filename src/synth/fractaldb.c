/* The formula `fractaldb`: fractals of iterated function systems (FractalDB, 2D-OFDB; docs/formulas.md). */
#include "core/portable.h"
#include "synth/formula.h"
#include "synth/ifs.h"

#define COEFFICIENT_MAX 1e6

#define VALUE(name) {name, PARAMETER_DOUBLE, -COEFFICIENT_MAX, COEFFICIENT_MAX, .low = 0}
#define MAP(m)                                                                                             \
    VALUE("a" #m), VALUE("b" #m), VALUE("c" #m), VALUE("d" #m), VALUE("e" #m), VALUE("f" #m),              \
    {                                                                                                      \
        "p" #m, PARAMETER_DOUBLE, 0, 1, .low = 0                                                           \
    }

/* In the order of struct ifs_system. Values of maps that a class does not have are 0. */
static const struct formula_parameter parameters[] = {
    {"maps", PARAMETER_INTEGER, 2, IFS_MAPS_MAX, .low = 2}, MAP(1), MAP(2), MAP(3), MAP(4), MAP(5), MAP(6),
    MAP(7),
};
_Static_assert(COUNT_OF(parameters) == IFS_PARAMETERS, "one parameter per value of a system");

static const struct ifs_rules rules = {
    .domain = 3, .points = 200000, .weights = IFS_WEIGHTS, .flips = 4, .res = 362};

const struct formula formula_fractaldb = {
    .name = "fractaldb",
    .summary = "draws fractals of iterated function systems, as FractalDB (ACCV 2020)",
    .id = FORMULA_FRACTALDB,
    .family = FAMILY_IFS,
    .targets = TARGET_LABEL,
    .parameters = parameters,
    .parameter_count = COUNT_OF(parameters),
    .id_most = UINT32_MAX,
    .classes = 1000,
    .check = ifs_check,
    .canvas = 362,
    .ifs = &rules,
};
