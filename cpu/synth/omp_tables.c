/* Computes the constant tables of `omp`, once per setup(). */
#include <math.h>
#include <string.h>

#include "omp_kernel.h"
#include "synth/input.h"

static void fill_gradients(const struct synth *synth, struct omp_tables *tables)
{
    memcpy(tables->gradients, synth->gradients, sizeof tables->gradients);
    for (uint32_t cell = 0; cell < NOISE_PERIOD; cell++) {
        for (uint32_t side = 0; side < 2; side++) {
            uint32_t hash = noise_permutation[(cell + side) % NOISE_PERIOD] & 15;
            tables->hashes[side][cell % 32] |= hash << (4 * (cell / 32));
        }
        tables->hash_gradients[noise_permutation[cell] & 15] = 0x1p-24f * synth->gradients[cell];
    }
}

/* Bounds the noise by its extremes at PLACES positions per cell, plus a margin for the positions in between.
 * The slope of the noise is at most 1 + 15/8 = 2.875 times the steepest gradient. The factor 6 is about twice
 * 2.875, so the margin also covers rounding. */
static void fill_noise_bounds(struct omp_tables *tables)
{
    enum { PLACES = 512 };
    const float margin = 6 * NOISE_LIMIT / (2 * PLACES); /* slope times half the distance between positions */
    for (uint32_t cell = 0; cell < NOISE_PERIOD; cell++)
        for (uint32_t place = 0; place < PLACES; place++) {
            float noise = noise_at(tables->gradients, cell, (float)place / PLACES);
            tables->noise_low = fminf(tables->noise_low, noise - margin);
            tables->noise_high = fmaxf(tables->noise_high, noise + margin);
        }
}

static void fill_patterns(struct omp_tables *tables)
{
    for (int32_t major = 0; major <= OMP_SHORT; major++)
        for (int32_t minor = 0; minor <= major; minor++)
            for (int32_t s = 0; s < OMP_SHORT; s++)
                tables->patterns[OMP_SHORT * major + minor][s] =
                    omp_pack_step(s, major ? (2 * minor * s + major) / (2 * major) : 0);
}

void omp_fill_tables(const struct synth *synth, int32_t pitch, struct omp_tables *tables)
{
    fill_gradients(synth, tables);
    fill_noise_bounds(tables);
    fill_patterns(tables);
    for (int octant = 0; octant < OCTANT_COUNT; octant++) {
        int32_t x = octant & OCTANT_LEFT ? -1 : 1, y = octant & OCTANT_UP ? -1 : 1;
        bool steep = octant & OCTANT_STEEP;
        tables->step_pixel[octant] = steep ? omp_pack_step(y * pitch, x) : omp_pack_step(x, y * pitch);
    }
    for (uint32_t mask = 0; mask < COUNT_OF(tables->compress); mask++)
        for (uint32_t lane = 0, set = 0; lane < 8; lane++)
            if (mask >> lane & 1)
                tables->compress[mask] |= (uint64_t)lane << (8 * set++);
}
