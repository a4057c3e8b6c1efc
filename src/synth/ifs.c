#include "synth/ifs.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "core/timer.h"
#include "machine/host.h"
#include "synth/formula.h"
#include "synth/published_random.h"

/* ---- Classes ---- */

/* Rows 0 .. 24 of the file weights_0.4.csv of the published script: each but row 2 scales one coefficient. */
const double ifs_weights[IFS_WEIGHTS][6] = {
    {0.2, 1, 1, 1, 1, 1}, {0.6, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1},   {1.4, 1, 1, 1, 1, 1},
    {1.8, 1, 1, 1, 1, 1}, {1, 0.2, 1, 1, 1, 1}, {1, 0.6, 1, 1, 1, 1}, {1, 1.4, 1, 1, 1, 1},
    {1, 1.8, 1, 1, 1, 1}, {1, 1, 0.2, 1, 1, 1}, {1, 1, 0.6, 1, 1, 1}, {1, 1, 1.4, 1, 1, 1},
    {1, 1, 1.8, 1, 1, 1}, {1, 1, 1, 0.2, 1, 1}, {1, 1, 1, 0.6, 1, 1}, {1, 1, 1, 1.4, 1, 1},
    {1, 1, 1, 1.8, 1, 1}, {1, 1, 1, 1, 0.2, 1}, {1, 1, 1, 1, 0.6, 1}, {1, 1, 1, 1, 1.4, 1},
    {1, 1, 1, 1, 1.8, 1}, {1, 1, 1, 1, 1, 0.2}, {1, 1, 1, 1, 1, 0.6}, {1, 1, 1, 1, 1, 1.4},
    {1, 1, 1, 1, 1, 1.8}};

void ifs_system(const struct class_row *row, struct ifs_system *system)
{
    memset(system, 0, sizeof *system);
    system->id = row->id;
    system->maps = (uint32_t)row->value[0];
    for (uint32_t m = 0; m < system->maps; m++)
        memcpy(system->map[m], &row->value[1 + IFS_MAP_VALUES * m], sizeof system->map[m]);
}

struct ifs_system ifs_weighted(const struct ifs_rules *rules, const struct ifs_system *system,
                               uint32_t weight)
{
    struct ifs_system weighted = *system;
    for (uint32_t m = 0; rules->weights && m < weighted.maps; m++)
        for (int i = 0; i < 6; i++)
            weighted.map[m][i] *= ifs_weights[weight][i];
    return weighted;
}

enum status ifs_check(const struct formula *formula, const struct class_row *row)
{
    const uint32_t maps = (uint32_t)row->value[0];
    double sum = 0;
    for (uint32_t m = 0; m < maps; m++)
        sum += row->value[1 + IFS_MAP_VALUES * m + 6];
    for (uint32_t i = 1 + IFS_MAP_VALUES * maps; i < IFS_PARAMETERS; i++)
        if (row->value[i] != 0)
            return status_set(STATUS_USAGE, "%s is %.9g, but the class has %u maps, so it must be 0",
                              formula->parameters[i].name, row->value[i], maps);
    return fabs(sum - 1) <= 1e-6 ? STATUS_OK
                                 : status_set(STATUS_USAGE,
                                              "the probabilities p1 to p%u have the sum %.9g; it must be 1",
                                              maps, sum);
}

/* ---- Random choices ---- */

void ifs_uniforms(uint32_t count, double *uniforms)
{
    struct twister twister;
    twister_seed(&twister, 100);
    for (uint32_t i = 0; i < count; i++)
        uniforms[i] = twister_random(&twister);
}

/* Counts the sums of probabilities that are below u. They ascend, so this is the first one that is not. */
void ifs_choices(const struct ifs_system *system, const double *uniforms, uint32_t count, uint8_t *choices)
{
    double sums[IFS_MAPS_MAX], sum = 0;
    for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
        sums[m] = m < system->maps ? sum += system->map[m][6] : INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t choice = 0;
        for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
            choice += uniforms[i] > sums[m];
        choices[i] = choice < system->maps ? (uint8_t)choice : IFS_REPEAT;
    }
}

/* ---- The definition ---- */

static void walk(const struct ifs_system *system, const double *uniforms, uint32_t points,
                 struct ifs_point *orbit)
{
    orbit[0] = (struct ifs_point){0, 0};
    for (uint32_t i = 0; i + 1 < points; i++)
        orbit[i + 1] = ifs_step(system, ifs_choice(system, uniforms[i]), orbit[i]);
}

/* Returns the number of points that are drawn, and the extent of both axes. */
static uint32_t measure(const struct ifs_point *orbit, uint32_t points, struct ifs_axis axes[2])
{
    uint32_t first = 0;
    while (first < points && !isnan(orbit[first].x))
        first++;
    const uint32_t left = ifs_drawn(first, points);
    for (first = 0; first < left && !isnan(orbit[first].y);)
        first++;
    const uint32_t drawn = ifs_drawn(first, left);
    struct ifs_point least = {0, 0}, most = {0, 0};
    for (uint32_t i = 0; i < drawn; i++) {
        least = (struct ifs_point){fmin(least.x, orbit[i].x), fmin(least.y, orbit[i].y)};
        most = (struct ifs_point){fmax(most.x, orbit[i].x), fmax(most.y, orbit[i].y)};
    }
    axes[0] = ifs_axis(least.x, most.x);
    axes[1] = ifs_axis(least.y, most.y);
    return drawn;
}

/* Sets pixel (x, y) of the drawing, whose row 0 is the lowest one of flip 0. */
static void set_pixel(uint8_t *canvas, uint32_t res, uint32_t flip, uint32_t x, uint32_t y, uint8_t gray)
{
    const uint32_t row = flip & 1 ? y : res - 1 - y, column = flip & 2 ? res - 1 - x : x;
    canvas[(size_t)row * res + column] = gray;
}

/* Pastes the square of a cell over what is there, ones and zeros. */
static void paste(uint8_t *canvas, uint32_t res, uint32_t flip, uint32_t x, uint32_t y, uint32_t mask)
{
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t j = 0; j < 3; j++)
            set_pixel(canvas, res, flip, x + 1 + j, y + 1 + i, mask >> (8 - 3 * i - j) & 1 ? IFS_GRAY : 0);
}

void ifs_draw(const struct ifs_rules *rules, const struct ifs_system *system, uint64_t seed,
              uint64_t instance, bool points, uint32_t res, const double *uniforms, struct ifs_point *scratch,
              uint8_t *canvas)
{
    const struct ifs_instance shown = ifs_instance(rules, instance);
    const struct ifs_system orbit = ifs_weighted(rules, system, shown.weight);
    const struct philox_key key = ifs_mask_key(rules, seed, system->id, shown.drawing);
    struct ifs_axis axes[2];
    walk(&orbit, uniforms, rules->points, scratch);
    const uint32_t drawn = measure(scratch, rules->points, axes);
    memset(canvas, 0, (size_t)res * res);
    for (uint32_t i = 0; i < drawn; i++) {
        const uint32_t x = ifs_cell(&axes[0], scratch[i].x, res), y = ifs_cell(&axes[1], scratch[i].y, res);
        const uint32_t cell = y * res + x;
        if (points)
            set_pixel(canvas, res, shown.flip, x, y, IFS_GRAY);
        else
            paste(canvas, res, shown.flip, x, y, ifs_mask_of(ifs_mask_block(key, cell / 8), cell));
    }
}
