/* Classes of line formulas (atom.h), and the formulas `rcdb`, `segrcdb`, `uji` and `visualatom`
 * (docs/formulas.md, docs/visualatom.md). */
#include "synth/lines.h"

#include <math.h>
#include <string.h>

#include "core/portable.h"
#include "synth/published.h"

/* ---- Parameters ---- */

/* clang-format off */
const struct formula_parameter lines_radial_parameters[LINES_RADIAL_PARAMETERS] = {
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

/* ---- Tables of the definition (atom.h) ---- */

const uint8_t noise_permutation[NOISE_PERIOD] = {
    151, 160, 137, 91,  90,  15,  131, 13,  201, 95,  96,  53,  194, 233, 7,   225, 140, 36,  103, 30,
    69,  142, 8,   99,  37,  240, 21,  10,  23,  190, 6,   148, 247, 120, 234, 75,  0,   26,  197, 62,
    94,  252, 219, 203, 117, 35,  11,  32,  57,  177, 33,  88,  237, 149, 56,  87,  174, 20,  125, 136,
    171, 168, 68,  175, 74,  165, 71,  134, 139, 48,  27,  166, 77,  146, 158, 231, 83,  111, 229, 122,
    60,  211, 133, 230, 220, 105, 92,  41,  55,  46,  245, 40,  244, 102, 143, 54,  65,  25,  63,  161,
    1,   216, 80,  73,  209, 76,  132, 187, 208, 89,  18,  169, 200, 196, 135, 130, 116, 188, 159, 86,
    164, 100, 109, 198, 173, 186, 3,   64,  52,  217, 226, 250, 124, 123, 5,   202, 38,  147, 118, 126,
    255, 82,  85,  212, 207, 206, 59,  227, 47,  16,  58,  17,  182, 189, 28,  42,  223, 183, 170, 213,
    119, 248, 152, 2,   44,  154, 163, 70,  221, 153, 101, 155, 167, 43,  172, 9,   129, 22,  39,  253,
    19,  98,  108, 110, 79,  113, 224, 232, 178, 185, 112, 104, 218, 246, 97,  228, 251, 34,  242, 193,
    238, 210, 144, 12,  191, 179, 162, 241, 81,  51,  145, 235, 249, 14,  239, 107, 49,  192, 214, 31,
    181, 199, 106, 157, 184, 84,  204, 176, 115, 121, 50,  45,  127, 4,   150, 254, 138, 236, 205, 93,
    222, 114, 67,  29,  24,  72,  243, 141, 128, 195, 78,  66,  215, 61,  156, 180};

void noise_gradients(const struct line_rules *rules, float gradients[NOISE_TABLE_COUNT])
{
    for (int i = 0; i < NOISE_TABLE_COUNT; i++) {
        int hash = noise_permutation[i % NOISE_PERIOD];
        int gradient = (hash & 7) + 1;
        if (hash & 8)
            gradient = rules->steep ? -gradient : -1;
        gradients[i] = NOISE_SCALE * (float)gradient;
    }
}

/* Returns sin(n theta) for theta = 2 pi i / q. Full periods are removed in integer arithmetic, so high
 * frequencies lose no precision. */
static double wave_sine(uint32_t n, uint32_t i, uint32_t q)
{
    return sin(2 * M_PI * (double)((uint64_t)i * n % q) / q);
}

void atom_spokes_fill(const struct line_rules *rules, const struct atom_class *class_, float *cosine,
                      float *sine, float *advance)
{
    const uint32_t q = class_->vertices;
    const double p = (double)class_->noise / (double)rules->noise_factor;
    for (uint32_t i = 0; i < q; i++) {
        double theta = 2 * M_PI * (double)i / q;
        double wave = 0.5 * (wave_sine(class_->freq1, i, q) + wave_sine(class_->freq2, i, q));
        cosine[i] = (float)cos(theta);
        sine[i] = (float)sin(theta);
        advance[i] = (float)(p + (double)class_->line_width + wave);
    }
}

/* ---- Classes ---- */

void lines_class(const struct formula *formula, const struct class_row *row, struct atom_class *class_)
{
    const struct line_rules rules = line_rules_of(formula->id);
#define VALUE(name) formula_value(formula, row, name)
    *class_ = (struct atom_class){.id = row->id,
                                  .vertices = (uint32_t)VALUE("vertices"),
                                  .orbits = (uint32_t)VALUE("orbits"),
                                  .oval_x = (float)VALUE("oval_x"),
                                  .oval_y = (float)VALUE("oval_y"),
                                  .freq1 = (uint32_t)VALUE("freq1"),
                                  .freq2 = (uint32_t)VALUE("freq2"),
                                  .noise = rules.noise_factor * (float)VALUE("noise"),
                                  .radius = (uint32_t)VALUE("radius"),
                                  .line_width = (float)VALUE("line_width")};
#undef VALUE
}

static double start_reach(const struct line_rules *rules, const struct atom_class *class_)
{
    return fmax(class_->radius * (double)fmaxf(class_->oval_x, class_->oval_y), 2.0 * rules->start_radius);
}

/* Each orbit changes each coordinate of a vertex by at most |p| + |noise factor * noise| + |line width| + 1.
 * The last 1 bounds the wave. */
double lines_reach(const struct line_rules *rules, const struct atom_class *class_)
{
    double factor = fabs((double)class_->noise), p = factor / (double)rules->noise_factor;
    double step = p + factor * (double)NOISE_LIMIT + 1 + fabs((double)class_->line_width);
    return start_reach(rules, class_) + class_->orbits * step;
}

enum status lines_check(const struct formula *formula, const struct class_row *row)
{
    const struct line_rules rules = line_rules_of(formula->id);
    struct atom_class class_;
    lines_class(formula, row, &class_);
    double reach = lines_reach(&rules, &class_);
    if (reach <= LINES_REACH_MAX)
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      "vertices can get %.9g pixels away from the centre; the limit is %.9g: lower %s", reach,
                      LINES_REACH_MAX,
                      start_reach(&rules, &class_) > reach / 2 ? "radius, oval_x or oval_y"
                                                               : "orbits, noise or line_width");
}

/* ---- The formula `rcdb`: radial contours (RCDB) ---- */

#define RCDB_SET(name_, classes_)                                                                        \
    {                                                                                                    \
        .name = (name_), .law = PUBLISHED_RCDB, .threads = 40, .classes = (classes_), .instances = 1000, \
        .block_images = 1000, .res = PUBLISHED_RES, .background = 255                                    \
    }
static const struct published_set rcdb_1k = RCDB_SET("rcdb-1k", 1000), rcdb_21k = RCDB_SET("rcdb-21k", 21000);

static const struct formula_preset rcdb_presets[] = {
    {.name = "rcdb-1k", .rows = published_rows, .set = &rcdb_1k},
    {.name = "rcdb-21k", .rows = published_rows, .set = &rcdb_21k},
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
    .presets = rcdb_presets,
    .check = lines_check,
    .canvas = 512,
    .published = &published_lines,
};

/* ---- The formula `segrcdb`: 32 radial contours per image, with a mask (SegRCDB, mask mode M1) ---- */

static const struct published_set segrcdb_set = {.name = "segrcdb",
                                                 .law = PUBLISHED_SEGRCDB,
                                                 .threads = 40,
                                                 .classes = 254,
                                                 .first_class = 1,
                                                 .instances = 20000,
                                                 .block_images = 20,
                                                 .res = PUBLISHED_RES,
                                                 .has_masks = true};

static const struct formula_preset segrcdb_presets[] = {
    {.name = "segrcdb", .rows = published_rows, .set = &segrcdb_set},
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
    .presets = segrcdb_presets,
    .check = lines_check,
    .canvas = 512,
    .published = &published_lines,
};

/* ---- The formulas `uji` and `visualatom`: two interpretations of VisualAtom ---- */

/* clang-format off */
static const struct formula_parameter visualatom_parameters[] = {
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
 * The uji_presets of 1000 classes are the beginnings of these lists. */
static enum status paper_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    const int32_t vertices_max = strcmp(preset->name, "paper") == 0 ? 1000 : 400;
    const uint32_t seed = 42;
    struct twister stream;
    twister_seed_array(&stream, &seed, 1);
    for (uint32_t c = 0; c < count; c++) {
        rows[c] = (struct class_row){.id = c};
        double *value = rows[c].value; /* in the order of `visualatom_parameters` */
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

static const struct formula_preset uji_presets[] = {
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
    .parameters = visualatom_parameters,
    .parameter_count = COUNT_OF(visualatom_parameters),
    .id_most = UINT32_MAX,
    .presets = uji_presets,
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
    .parameters = visualatom_parameters,
    .parameter_count = COUNT_OF(visualatom_parameters),
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
