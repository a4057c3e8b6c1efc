#include "synth/lines.h"

#include <math.h>

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
