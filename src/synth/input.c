#include "synth/input.h"

#include <math.h>
#include <stdlib.h>

#include "synth/class.h"

/* ---- Tables of the definition of images (atom.h) ---- */

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

void noise_gradients(enum formula formula, float gradients[NOISE_TABLE_COUNT])
{
    for (int i = 0; i < NOISE_TABLE_COUNT; i++) {
        int hash = noise_permutation[i % NOISE_PERIOD];
        int gradient = (hash & 7) + 1;
        if (hash & 8)
            gradient = formula == FORMULA_UJI ? -gradient : -1;
        gradients[i] = NOISE_SCALE * (float)gradient;
    }
}

/* Returns sin(n theta) for theta = 2 pi i / q. Full periods are removed in integer arithmetic, so high
 * frequencies lose no precision. */
static double wave_sine(uint32_t n, uint32_t i, uint32_t q)
{
    return sin(2 * M_PI * (double)((uint64_t)i * n % q) / q);
}

void atom_spokes_fill(const struct atom_class *class_, float *cosine, float *sine, float *advance)
{
    uint32_t q = class_->vertices;
    for (uint32_t i = 0; i < q; i++) {
        double theta = 2 * M_PI * (double)i / q;
        double wave = 0.5 * (wave_sine(class_->freq1, i, q) + wave_sine(class_->freq2, i, q));
        cosine[i] = (float)cos(theta);
        sine[i] = (float)sin(theta);
        advance[i] = (float)((double)class_->noise + (double)class_->line_width + wave);
    }
}

/* ---- Classes and their tables ---- */

enum status synth_draw_classes(struct synth *synth, const char *preset_file, const char *preset,
                               uint32_t count)
{
    struct class_ranges ranges;
    size_t listed;
    if (!preset_file && class_preset_is_list(preset)) {
        TRY(class_read_preset(preset, &synth->classes, &listed));
        if (count > listed)
            return status_set(STATUS_USAGE, "%s: preset %s has %zu classes, fewer than %u; lower it",
                              OPTION_OR_FIELD("--classes", "classes"), preset, listed, count);
        synth->class_count = count;
        return STATUS_OK;
    }
    enum status status = class_ranges_read(preset_file, preset, &ranges);
    if (status != STATUS_OK)
        return status_prefix(status, "%s",
                             preset_file ? OPTION_OR_FIELD("--preset-file", "preset_file")
                                         : OPTION_OR_FIELD("--preset", "preset"));
    synth->class_count = count;
    synth->classes = calloc(count, sizeof *synth->classes);
    TRY(ALLOCATED(synth->classes, "out of memory for %u classes; lower %s", count,
                  OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < count; c++) {
        class_draw(&ranges, c, &synth->classes[c]);
        TRY(class_check(&synth->classes[c]));
    }
    return STATUS_OK;
}

enum status synth_fill_tables(struct synth *synth)
{
    synth->spoke_offset = calloc((size_t)synth->class_count + 1, sizeof *synth->spoke_offset);
    TRY(ALLOCATED(synth->spoke_offset, "out of memory for %u classes; lower %s", synth->class_count,
                  OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < synth->class_count; c++) {
        const struct atom_class *class_ = &synth->classes[c];
        uint64_t segments = (uint64_t)class_->vertices * class_->orbits;
        synth->spoke_offset[c + 1] = synth->spoke_offset[c] + class_->vertices;
        if (class_->vertices > synth->vertices_max)
            synth->vertices_max = class_->vertices;
        if (class_->orbits > synth->orbits_max)
            synth->orbits_max = class_->orbits;
        if (segments > synth->segments_max)
            synth->segments_max = segments;
    }
    size_t stride = synth->spoke_offset[synth->class_count];
    TRY(memory_check(3 * sizeof(float) * (uint64_t)stride, "the classes' tables",
                     OPTION_OR_FIELD("lower --classes", "lower classes")));
    synth->spoke_tables = malloc(3 * stride * sizeof *synth->spoke_tables);
    TRY(ALLOCATED(synth->spoke_tables, "out of memory for the tables of %u classes; lower %s",
                  synth->class_count, OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < synth->class_count; c++) {
        float *first = synth->spoke_tables + synth->spoke_offset[c];
        atom_spokes_fill(&synth->classes[c], first, first + stride, first + 2 * stride);
    }
    noise_gradients(synth->formula, synth->gradients);
    return STATUS_OK;
}

void synth_free(struct synth *synth)
{
    free(synth->classes);
    free(synth->spoke_offset);
    free(synth->spoke_tables);
    synth->classes = NULL;
    synth->spoke_offset = NULL;
    synth->spoke_tables = NULL;
}
