/* The formula `rcdb`: radial contours (RCDB; docs/formulas.md). */
#include "core/portable.h"
#include "synth/lines.h"

/* Every image draws its own start circle and centre, so `radius` to `start_y` have no effect on them. They
 * are the values of instance 0 in the published set. */
/* clang-format off */
static const struct formula_parameter parameters[] = {
    {"vertices", PARAMETER_INTEGER, 1, LINES_VERTICES_MAX, LAW_EXPONENTIAL, "nvertex_min", "nvertex_max", .turn = 0},
    {"orbits", PARAMETER_INTEGER, 1, LINES_ORBITS_MAX, LAW_UNIFORM, "norbits_min", "norbits_max", .turn = 1},
    {"noise", PARAMETER_DOUBLE, -LINES_REACH_MAX, LINES_REACH_MAX, LAW_UNIFORM, "noisecoef_min", NULL, .span = 4,
     .turn = 2},
    {"line_width", PARAMETER_DOUBLE, -LINES_REACH_MAX, LINES_REACH_MAX, LAW_UNIFORM, NULL, "linewidth_max",
     .turn = 3},
    {"radius", PARAMETER_INTEGER, 0, LINES_REACH_MAX, LAW_UNIFORM, "startrad_min", "startrad_max", .turn = 4},
    {"oval_x", PARAMETER_DOUBLE, 0, LINES_REACH_MAX, LAW_UNIFORM, NULL, "oval_max", .low = 1, .turn = 5},
    {"oval_y", PARAMETER_DOUBLE, 0, LINES_REACH_MAX, LAW_UNIFORM, NULL, "oval_max", .low = 1, .turn = 6},
    {"start_x", PARAMETER_DOUBLE, -LINES_REACH_MAX, LINES_REACH_MAX, .low = 256, .turn = 7},
    {"start_y", PARAMETER_DOUBLE, -LINES_REACH_MAX, LINES_REACH_MAX, .low = 256, .turn = 8},
};
/* clang-format on */

static const struct published_set set_1k = {.name = "rcdb-1k",
                                            .law = PUBLISHED_RCDB,
                                            .threads = 40,
                                            .classes = 1000,
                                            .instances = 1000,
                                            .block_images = 1000,
                                            .res = PUBLISHED_RES,
                                            .background = 255};
static const struct published_set set_21k = {.name = "rcdb-21k",
                                             .law = PUBLISHED_RCDB,
                                             .threads = 40,
                                             .classes = 21000,
                                             .instances = 1000,
                                             .block_images = 1000,
                                             .res = PUBLISHED_RES,
                                             .background = 255};

static const struct formula_preset presets[] = {
    {.name = "rcdb-1k", .rows = published_rows, .set = &set_1k},
    {.name = "rcdb-21k", .rows = published_rows, .set = &set_21k},
    {.name = NULL},
};

const struct formula formula_rcdb = {
    .name = "rcdb",
    .summary = "draws the radial contours of RCDB (CVPR 2022), dark to light lines on white",
    .id = FORMULA_RCDB,
    .family = FAMILY_LINES,
    .targets = TARGET_LABEL,
    .parameters = parameters,
    .parameter_count = COUNT_OF(parameters),
    .mean_key = "nvertex_mean",
    .published_keys = "Vertex=vertices,Perlin_noise=noise,line_width=line_width,Center_rad=radius,"
                      "Line_num=orbits,Oval_rate_x=oval_x,Oval_rate_y=oval_y,start_pos_h=start_y,"
                      "start_pos_w=start_x",
    .id_most = UINT32_MAX,
    .classes = 1000,
    .presets = presets,
    .check = lines_check,
    .canvas = 512,
    .published = &published_lines,
};
