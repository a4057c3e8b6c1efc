#include "run/share_search.h"

#include <math.h>
#include <stddef.h>

#define PRECISION 20 /* the search ends when two shares differ by less than 1/20 */
#define SURPRISE  0.05
#define FEW       16   /* this part of all samples is read for comparison */
#define SAFETY    0.85 /* reading that just keeps up on average is late now and then */
#define LONG      0.1 /* a share with which steps wait longer is halved, because the rate of reading varies */

/* Returns the shares per second at which the samples of a probe were read. */
static double rate_of(const struct share_probe *probe)
{
    return probe->share / probe->step_s;
}

/* Returns the probe with the smallest share, or with `largest` that with the largest. There is one. */
static const struct share_probe *outermost(const struct share_search *search, bool largest)
{
    const struct share_probe *found = search->probes;
    for (uint32_t i = 1; i < search->count; i++)
        if ((search->probes[i].share > found->share) == largest)
            found = &search->probes[i];
    return found;
}

/* Returns the probe whose steps do not depend on the rate of reading: that with the smallest share, if it was
 * read at less than half of the rate that reading has reached. NULL: none. */
static const struct share_probe *unread(const struct share_search *search)
{
    const struct share_probe *least = outermost(search, false);
    double best = 0;
    for (uint32_t i = 0; i < search->count; i++)
        best = fmax(best, rate_of(&search->probes[i]));
    return search->count > 0 && 2 * rate_of(least) < best ? least : NULL;
}

double share_search_floor(const struct share_search *search)
{
    const struct share_probe *least = unread(search);
    return least && least->stall > SHARE_STALL ? least->stall : 0;
}

/* Returns the share of a probe's time in which steps waited for samples that are read, as its stalls say. */
static double stall_of(const struct share_search *search, const struct share_probe *probe)
{
    return fmax(0, 1 - (1 - probe->stall) / (1 - share_search_floor(search)));
}

/* Returns how long a step with this probe's share takes without this waiting. */
static double busy_of(const struct share_search *search, const struct share_probe *probe)
{
    return probe->step_s * (1 - stall_of(search, probe));
}

double share_search_wait(const struct share_search *search, const struct share_probe *probe)
{
    const struct share_probe *least = unread(search), *most = outermost(search, true);
    const double stall = stall_of(search, probe);
    if (!least || probe == least || probe == most)
        return stall;
    const double slope = (busy_of(search, most) - least->step_s) / (most->share - (double)least->share),
                 expected_s = least->step_s + slope * (probe->share - (double)least->share);
    return fmax(0, fmin(stall, 1 - expected_s / probe->step_s));
}

static bool waits(const struct share_search *search, const struct share_probe *probe)
{
    return share_search_wait(search, probe) > SHARE_STALL;
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

bool share_search_found(const struct share_search *search)
{
    const struct share_probe *low, *high;
    find_ends(search, &low, &high);
    return low && low != unread(search);
}

const struct share_probe *share_search_best(const struct share_search *search)
{
    const struct share_probe *low, *high;
    find_ends(search, &low, &high);
    return low ? low : outermost(search, false);
}

uint32_t share_search_choice(const struct share_search *search)
{
    const uint32_t best = share_search_best(search)->share, reserved = 2 * best / 3;
    return best == search->parts ? best : reserved > 0 ? reserved : 1;
}

/* Solves s / R = b(s). With `low`, b is the line through both probes, otherwise constant. */
static double solve(const struct share_search *search, const struct share_probe *low,
                    const struct share_probe *high)
{
    const double rate = rate_of(high), busy_s = busy_of(search, high);
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

/* Returns whether steps waited much longer in the latest probe than the earlier ones let expect, or at all
 * although few samples were read. */
static bool surprises(const struct share_search *search)
{
    const struct share_probe *low, *high, *latest = &search->probes[search->count - 1];
    struct share_search before = *search;
    if (latest == unread(search) && !latest->twice && latest->stall > SURPRISE)
        return true;
    before.count--;
    find_ends(&before, &low, &high);
    if (!high || latest->twice || !waits(search, latest))
        return false;
    const double expected = 1 - rate_of(high) * busy_of(search, latest) / latest->share;
    return latest->stall > fmax(0, expected) + SURPRISE;
}

void share_search_add(struct share_search *search, uint32_t share, double stall, double step_s)
{
    struct share_probe *latest = search->count ? &search->probes[search->count - 1] : NULL;
    const bool again = latest && latest->share == share;
    search->tries++;
    if (!again)
        latest = &search->probes[search->count++];
    if (!again || stall < latest->stall)
        *latest = (struct share_probe){share, stall, step_s, false};
    latest->twice = again;
}

uint32_t share_search_next(const struct share_search *search)
{
    const struct share_probe *low, *high;
    if (search->count == 0)
        return search->parts;
    if (search->count == 1 && waits(search, search->probes) && search->parts >= FEW)
        return search->parts / FEW;
    if (!search->hurried && surprises(search))
        return search->probes[search->count - 1].share;
    find_ends(search, &low, &high);
    if (!high || high->share == 1 || search->count == SHARE_PROBES)
        return 0;
    const uint32_t least = low ? low->share : 0, gap = high->share - least;
    const uint32_t unit = part_of(high->share), above = part_of(least);
    if (low && gap <= unit)
        return 0;
    if (gap < above + unit)
        return least + gap / 2;
    double share = solve(search, low, high);
    if (search->count == 2)
        share *= SAFETY;
    if (search->count > 2 && ((search->count == 3 && share_search_wait(search, high) > LONG) ||
                              (search->hurried && low == unread(search))))
        share = fmin(share, high->share / 2.0);
    return (uint32_t)fmin(fmax(share, least + above), high->share - unit);
}
