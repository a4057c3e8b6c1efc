/* The formula `fractaldb`: fractals of iterated function systems (FractalDB, 2D-OFDB; docs/formulas.md). */
#include "core/portable.h"
#include "synth/formula.h"
#include "synth/ifs.h"
#include "synth/ifs_classes.h"

#define VALUE IFS_COEFFICIENT
#define MAP(m)                                                                                \
    VALUE("a" #m), VALUE("b" #m), VALUE("c" #m), VALUE("d" #m), VALUE("e" #m), VALUE("f" #m), \
        IFS_PROBABILITY(m)

/* In the order of struct ifs_system. */
static const struct formula_parameter parameters[] = {
    IFS_MAPS_PARAMETER(IFS_MAPS_MAX), MAP(1), MAP(2), MAP(3), MAP(4), MAP(5), MAP(6), MAP(7),
};
_Static_assert(COUNT_OF(parameters) == IFS_PARAMETERS, "one parameter per value of a system");

static const struct ifs_rules rules = {
    .domain = 3, .points = 200000, .weights = IFS_WEIGHTS, .flips = 4, .res = 362};

/* OFDB has the first weights, which scale a by 0.2, and one drawing per class. */
static const struct ifs_rules ofdb_rules = {
    .domain = 3, .points = 200000, .weights = 1, .flips = 4, .res = 362};

/* 1p-frac has neither weights nor flips. */
static const struct ifs_rules one_rules = {
    .domain = 4, .points = 100000, .weights = 0, .flips = 1, .res = 512};

static const struct published_set fractaldb_1k = {
    .name = "fractaldb-1k", .law = PUBLISHED_FRACTALDB, .classes = 1000, .instances = 1000, .res = 362};
static const struct published_set fractaldb_10k = {
    .name = "fractaldb-10k", .law = PUBLISHED_FRACTALDB, .classes = 10000, .instances = 1000, .res = 362};
static const struct published_set ofdb_1k = {
    .name = "ofdb-1k", .law = PUBLISHED_FRACTALDB, .classes = 1000, .instances = 4, .res = 362};
static const struct published_set ofdb_21k = {
    .name = "ofdb-21k", .law = PUBLISHED_FRACTALDB, .classes = 21000, .instances = 4, .res = 362};

static enum status search_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    (void)preset;
    return ifs_search_rows(1, IFS_THRESHOLD, count, rows);
}

static const struct formula_preset presets[] = {
    {.name = "fractaldb", .rows = ifs_rows},
    {.name = "fractaldb-search", .rows = search_rows},
    {.name = "fractaldb-1k", .rows = ifs_rows, .set = &fractaldb_1k, .ifs = &rules},
    {.name = "fractaldb-10k", .rows = ifs_rows, .set = &fractaldb_10k, .ifs = &rules},
    {.name = "ofdb-1k", .rows = ifs_rows, .set = &ofdb_1k, .ifs = &ofdb_rules},
    {.name = "ofdb-21k", .rows = ifs_rows, .set = &ofdb_21k, .ifs = &ofdb_rules},
    {.name = "1p-frac", .rows = ifs_one_rows, .ifs = &one_rules, .classes = 1000},
    {.name = NULL},
};

const struct formula formula_fractaldb = {
    .name = "fractaldb",
    .summary = "draws fractals of iterated function systems, as FractalDB (ACCV 2020)",
    .id = FORMULA_FRACTALDB,
    .family = FAMILY_IFS,
    .targets = TARGET_LABEL,
    .parameters = parameters,
    .parameter_count = COUNT_OF(parameters),
    .mean_key = "threshold",
    .id_most = UINT32_MAX,
    .classes = 1000,
    .presets = presets,
    .check = ifs_check,
    .canvas = 362,
    .ifs = &rules,
    .unpublished = "the script draws the bits of its patches with an unseeded generator",
};
