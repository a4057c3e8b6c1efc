#include "synth/atom.h"

#include <math.h>

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
