#include "run/share_search.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#define PRECISION 20 /* the search ends when two shares differ by less than 1/20 */
#define FEW       8  /* to find stalls that do not come from reading, this part of a share is measured */

/* Returns the shares per second at which the samples of a probe were read. */
static double rate_of(const struct share_probe *probe)
{
    return probe->share / probe->step_s;
}

/* Returns the probe with the smallest share; NULL: there is none. */
static const struct share_probe *smallest(const struct share_search *search)
{
    const struct share_probe *least = NULL;
    for (uint32_t i = 0; i < search->count; i++)
        if (!least || search->probes[i].share < least->share)
            least = &search->probes[i];
    return least;
}

double share_search_floor(const struct share_search *search)
{
    const struct share_probe *least = smallest(search);
    double best = 0;
    for (uint32_t i = 0; i < search->count; i++)
        best = fmax(best, rate_of(&search->probes[i]));
    return least && least->stall > SHARE_STALL && 2 * rate_of(least) < best ? least->stall : 0;
}

static bool waits(const struct share_search *search, const struct share_probe *probe)
{
    return probe->stall > share_search_floor(search) + SHARE_STALL;
}

/* Finds the largest share with which steps do not wait, and the smallest larger one with which they wait.
 * NULL: there is none. */
static void find_ends(const struct share_search *search, const struct share_probe **low,
                      const struct share_probe **high)
{
    *low = *high = NULL;
    for (uint32_t i = 0; i < search->count; i++) {
        const struct share_probe *probe = &search->probes[i];
        if (!waits(search, probe) && (!*low || probe->share > (*low)->share))
            *low = probe;
    }
    for (uint32_t i = 0; i < search->count; i++) {
        const struct share_probe *probe = &search->probes[i];
        if (waits(search, probe) && (!*low || probe->share > (*low)->share) &&
            (!*high || probe->share < (*high)->share))
            *high = probe;
    }
}

const struct share_probe *share_search_best(const struct share_search *search)
{
    const struct share_probe *low, *high;
    find_ends(search, &low, &high);
    return low ? low : smallest(search);
}

/* Solves s / R = b(s). With `low`, b is the line through both probes, otherwise constant. */
static double solve(const struct share_search *search, const struct share_probe *low,
                    const struct share_probe *high)
{
    const double rate = rate_of(high), idle = fmax(0, high->stall - share_search_floor(search)),
                 busy_s = high->step_s * (1 - idle);
    if (!low)
        return rate * busy_s;
    const double slope = rate * (low->step_s - busy_s) / (high->share - low->share);
    const double share = (rate * busy_s + slope * high->share) / (1 + slope);
    return slope > -0.5 ? share : (low->share + high->share) / 2.0;
}

/* Returns the difference of shares that does not matter. */
static uint32_t part_of(uint32_t share)
{
    return share < PRECISION ? 1 : share / PRECISION;
}

uint32_t share_search_next(const struct share_search *search)
{
    const struct share_probe *low, *high;
    if (search->count == 0)
        return search->parts;
    find_ends(search, &low, &high);
    if (!high || high->share == 1 || search->count == SHARE_PROBES)
        return 0;
    const uint32_t least = low ? low->share : 0, gap = high->share - least;
    const uint32_t unit = part_of(high->share), above = part_of(least);
    if (low && gap <= unit)
        return 0;
    if (!low && search->count == 2 && high->share >= FEW) /* the first solution was wrong */
        return high->share / FEW;
    if (gap < above + unit)
        return least + gap / 2;
    return (uint32_t)fmin(fmax(solve(search, low, high), least + above), high->share - unit);
}
