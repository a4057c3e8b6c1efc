/* The formula `rcdb`: radial contours (RCDB; docs/formulas.md). */
#include "synth/lines.h"

#define SET(name_, classes_)                                                                             \
    {                                                                                                    \
        .name = (name_), .law = PUBLISHED_RCDB, .threads = 40, .classes = (classes_), .instances = 1000, \
        .block_images = 1000, .res = PUBLISHED_RES, .background = 255                                    \
    }
static const struct published_set set_1k = SET("rcdb-1k", 1000), set_21k = SET("rcdb-21k", 21000);

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
    .parameters = lines_radial_parameters,
    .parameter_count = LINES_RADIAL_PARAMETERS,
    .mean_key = "nvertex_mean",
    .published_keys = "Vertex=vertices,Perlin_noise=noise,line_width=line_width,Center_rad=radius,Line_num="
                      "orbits,Oval_rate_x=oval_x,Oval_rate_y=oval_y,start_pos_h=start_y,start_pos_w=start_x",
    .id_most = UINT32_MAX,
    .classes = 1000,
    .presets = presets,
    .check = lines_check,
    .canvas = 512,
    .published = &published_lines,
};
