/* The formula `segrcdb`: 32 radial contours per image, with a mask (SegRCDB, mask mode M1; docs/formulas.md).
 */
#include "synth/lines.h"

static const struct published_set set = {.name = "segrcdb",
                                         .law = PUBLISHED_SEGRCDB,
                                         .threads = 40,
                                         .classes = 254,
                                         .first_class = 1,
                                         .instances = 20000,
                                         .block_images = 20,
                                         .res = PUBLISHED_RES,
                                         .has_masks = true};

static const struct formula_preset presets[] = {
    {.name = "segrcdb", .rows = published_rows, .set = &set},
    {.name = "segrcdb-ranges"},
    {.name = NULL},
};

const struct formula formula_segrcdb = {
    .name = "segrcdb",
    .summary = "draws 32 radial contours per image and their mask, as SegRCDB (ICCV 2023)",
    .id = FORMULA_SEGRCDB,
    .family = FAMILY_LINES,
    .targets = TARGET_MASK,
    .parameters = lines_radial_parameters,
    .parameter_count = LINES_RADIAL_PARAMETERS - 2, /* a centre is drawn for every shape */
    .mean_key = "nvertex_mean",
    .published_keys = "Category_num=class,Vertex=vertices,Perlin_noise=noise,line_width=line_width,Center_"
                      "rad=radius,Line_num=orbits,Oval_rate_x=oval_x,Oval_rate_y=oval_y,Color_Gray=class",
    .id_least = 1, /* 0 is the background of masks, which have one byte per pixel */
    .id_most = 255,
    .classes = 254,
    .presets = presets,
    .check = lines_check,
    .canvas = 512,
    .published = &published_lines,
};
