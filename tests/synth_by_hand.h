/* An input of the workload synth that is built without parsing options: two tiny classes, and a batch of
 * images of both. Suites use this input to test the oracle, which is the program's reference for images. */
#ifndef FDSL_TESTS_SYNTH_BY_HAND_H
#define FDSL_TESTS_SYNTH_BY_HAND_H

#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "synth/synth.h"

enum { RES = 48, VERTICES = 12, ORBITS = 5, BATCH = 7, CLASSES = 2, PIXELS = RES * RES };

static struct synth synth;

/* Fills the tables with rounded directions and a simple wave, which differ from the program's own tables. The
 * oracle must draw with the values that it finds in these tables. */
static inline void fill_spokes(const struct atom_class *class_, float *cosine, float *sine, float *advance)
{
    for (uint32_t v = 0; v < class_->vertices; v++) {
        double theta = 2 * M_PI * v / class_->vertices;
        cosine[v] = (float)cos(theta);
        sine[v] = (float)sin(theta);
        advance[v] = class_->noise + class_->line_width + (float)(0.5 * sin(class_->freq1 * theta));
    }
}

static inline void make_synth(enum formula_id formula, const struct atom_class *classes, uint32_t class_count,
                              uint64_t batch, uint32_t res)
{
    synth = (struct synth){.formula = formula,
                           .rules = line_rules_of(formula),
                           .res = res,
                           .batch = batch,
                           .stride = batch,
                           .seed = 0x123456789abcdefu,
                           .first = 1000,
                           .output = {.res = res, .channels = 1},
                           .class_count = class_count,
                           .turns = class_count,
                           .classes = calloc(class_count, sizeof *classes),
                           .spoke_offset = calloc(class_count + 1, sizeof(size_t))};
    for (uint32_t c = 0; c < class_count; c++) {
        uint64_t segments = (uint64_t)classes[c].vertices * classes[c].orbits;
        synth.classes[c] = classes[c];
        synth.spoke_offset[c + 1] = synth.spoke_offset[c] + classes[c].vertices;
        synth.vertices_max =
            classes[c].vertices > synth.vertices_max ? classes[c].vertices : synth.vertices_max;
        synth.orbits_max = classes[c].orbits > synth.orbits_max ? classes[c].orbits : synth.orbits_max;
        synth.segments_max = segments > synth.segments_max ? segments : synth.segments_max;
    }
    size_t stride = synth.spoke_offset[class_count];
    synth.spoke_tables = malloc(3 * stride * sizeof(float));
    for (uint32_t c = 0; c < class_count; c++) {
        float *first = synth.spoke_tables + synth.spoke_offset[c];
        fill_spokes(&classes[c], first, first + stride, first + 2 * stride);
    }
    noise_gradients(&synth.rules, synth.gradients);
}

static const struct atom_class tiny[CLASSES] = {
    {.id = 3,
     .vertices = VERTICES,
     .orbits = ORBITS,
     .oval_x = 1.5f,
     .oval_y = 1,
     .freq1 = 2,
     .noise = 3,
     .radius = 4,
     .line_width = 0.25f},
    {.id = 8, .vertices = 7, .orbits = 3, .oval_x = 1, .oval_y = 2, .freq1 = 1, .noise = 2, .radius = 5}};

static inline void make_tiny(enum formula_id formula)
{
    make_synth(formula, tiny, CLASSES, BATCH, RES);
}

static inline void start(void)
{
    make_tiny(FORMULA_UJI);
}

static inline void stop(void)
{
    free(synth.classes);
    free(synth.spoke_offset);
    free(synth.spoke_tables);
}

static inline struct synth_image image_at(uint64_t run, uint64_t j)
{
    uint64_t number = synth.first + run * synth.stride + j;
    return (struct synth_image){(uint32_t)(number % synth.class_count), number / synth.class_count};
}

#endif
