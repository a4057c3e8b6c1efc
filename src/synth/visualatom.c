/* The formulas `uji` and `visualatom`: two interpretations of VisualAtom (docs/visualatom.md). */
#include <string.h>

#include "core/portable.h"
#include "synth/lines.h"
#include "synth/published_random.h"

/* clang-format off */
static const struct formula_parameter parameters[] = {
    {"vertices", PARAMETER_INTEGER, 1, LINES_VERTICES_MAX, LAW_UNIFORM, "nvertex_min", "nvertex_max", .turn = 0},
    {"orbits", PARAMETER_INTEGER, 1, LINES_ORBITS_MAX, LAW_UNIFORM, "norbits_min", "norbits_max", .turn = 1},
    {"oval_x", PARAMETER_FLOAT, 0, LINES_REACH_MAX, LAW_UNIFORM, NULL, "oval_max", .low = 1, .turn = 2},
    {"oval_y", PARAMETER_FLOAT, 0, LINES_REACH_MAX, LAW_UNIFORM, NULL, "oval_max", .low = 1, .turn = 3},
    {"freq1", PARAMETER_INTEGER, 0, LINES_FREQ_MAX, LAW_UNIFORM, "freq_min", "freq_max", .turn = 7},
    {"freq2", PARAMETER_INTEGER, 0, LINES_FREQ_MAX, LAW_DIFFERENT, "freq_min", "freq_max", .turn = 8},
    {"noise", PARAMETER_FLOAT, -LINES_REACH_MAX, LINES_REACH_MAX, LAW_UNIFORM, "noisecoef_min", NULL, .span = 4,
     .turn = 4},
    {"radius", PARAMETER_INTEGER, 0, LINES_REACH_MAX, LAW_UNIFORM, "startrad_min", NULL, .span = 50, .turn = 5},
    {"line_width", PARAMETER_FLOAT, -LINES_REACH_MAX, LINES_REACH_MAX, LAW_UNIFORM, NULL, "linewidth_max",
     .turn = 6},
};
/* clang-format on */

/* Files of configs/, embedded by classes_cfg.S */
extern const char paper_1000_csv[], lowercompute_1000_csv[];

/* Draws class lists of any length as the published pre-training of uji does: Python's random, seeded with 42.
 * The presets of 1000 classes are the beginnings of these lists. */
static enum status paper_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    const int32_t vertices_max = strcmp(preset->name, "paper") == 0 ? 1000 : 400;
    const uint32_t seed = 42;
    struct twister stream;
    twister_seed_array(&stream, &seed, 1);
    for (uint32_t c = 0; c < count; c++) {
        rows[c] = (struct class_row){.id = c};
        double *value = rows[c].value; /* in the order of `parameters` */
        value[0] = python_randint(&stream, 200, vertices_max);
        value[1] = python_randint(&stream, 1, 200);
        value[2] = (float)twister_uniform(&stream, 1, 2);
        value[3] = (float)twister_uniform(&stream, 1, 2);
        value[4] = python_randint(&stream, 0, 20);
        do
            value[5] = python_randint(&stream, 0, 20);
        while (value[5] == value[4] && value[4] != 0);
        value[6] = (float)twister_uniform(&stream, 2, 6);
        value[7] = python_randint(&stream, 0, 50);
        value[8] = (float)twister_uniform(&stream, 0, 0.01);
    }
    return STATUS_OK;
}

static const struct formula_preset presets[] = {
    {.name = "paper-1000", .csv = paper_1000_csv, .classes = 1000},
    {.name = "lowercompute-1000", .csv = lowercompute_1000_csv, .classes = 1000},
    {.name = "paper", .rows = paper_rows},
    {.name = "paper-lowercompute", .rows = paper_rows},
    {.name = NULL},
};

const struct formula formula_uji = {
    .name = "uji",
    .summary = "follows the code of hpca-uji/fdsl-gpu-pipeline",
    .id = FORMULA_UJI,
    .family = FAMILY_LINES,
    .targets = TARGET_LABEL,
    .parameters = parameters,
    .parameter_count = COUNT_OF(parameters),
    .id_most = UINT32_MAX,
    .presets = presets,
    .check = lines_check,
    .paper = true,
    .canvas = 512,
    .unpublished = "its published program draws with cuRAND, whose stream depends on the launch",
};

/* The set that the published script draws. The download VisualAtom-1k (Zenodo 7945009) is of another version.
 */
static const struct published_set script_1k = {.name = "visualatom-script-1k",
                                               .law = PUBLISHED_VISUALATOM,
                                               .threads = 20,
                                               .classes = 1000,
                                               .instances = 1000,
                                               .block_images = 1000,
                                               .res = PUBLISHED_RES};

static const struct formula_preset visualatom_presets[] = {
    {.name = "paper-1000", .csv = paper_1000_csv, .classes = 1000},
    {.name = "lowercompute-1000", .csv = lowercompute_1000_csv, .classes = 1000},
    {.name = "paper", .rows = paper_rows},
    {.name = "paper-lowercompute", .rows = paper_rows},
    {.name = "visualatom-script-1k", .rows = published_rows, .set = &script_1k},
    {.name = NULL},
};

const struct formula formula_visualatom = {
    .name = "visualatom",
    .summary = "follows the renderer of the released VisualAtom data set",
    .id = FORMULA_VISUALATOM,
    .family = FAMILY_LINES,
    .targets = TARGET_LABEL,
    .parameters = parameters,
    .parameter_count = COUNT_OF(parameters),
    .published_keys = "Vertex=vertices,Perlin_noise=noise,line_width=line_width,Center_rad=radius,"
                      "Line_num=orbits,Oval_rate_x=oval_x,Oval_rate_y=oval_y,start_pos_h=start_y,"
                      "start_pos_w=start_x,nami1=freq1,nami2=freq2",
    .id_most = UINT32_MAX,
    .presets = visualatom_presets,
    .check = lines_check,
    .paper = true,
    .canvas = 512,
    .published = &published_lines,
};
