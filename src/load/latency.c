#include "load/latency.h"

#include <math.h>
#include <stddef.h>

/* Returns the bin of a duration. Bins 0 to 31 hold the durations of 0 to 31 ns. From 32 ns on, each range
 * from 2^n to 2^(n+1) ns has 32 bins. */
static size_t bin_of(uint64_t duration_ns)
{
    if (duration_ns < 32)
        return (size_t)duration_ns;
    unsigned power = 63 - (unsigned)__builtin_clzll(duration_ns); /* at least 5 */
    return (size_t)(power - 4) * 32 + (size_t)((duration_ns >> (power - 5)) - 32);
}

static double middle_of(size_t bin)
{
    if (bin < 32)
        return (double)bin;
    return ldexp((double)(bin % 32) + 32.5, (int)(bin / 32) - 1);
}

void latency_add(struct latency *latency, uint64_t duration_ns)
{
    latency->bins[bin_of(duration_ns)]++;
    latency->count++;
}

void latency_merge(struct latency *latency, const struct latency *other)
{
    for (size_t i = 0; i < LATENCY_BINS; i++)
        latency->bins[i] += other->bins[i];
    latency->count += other->count;
}

double latency_quantile_s(const struct latency *latency, double p)
{
    uint64_t below = 0, wanted = (uint64_t)ceil(p * (double)latency->count);
    for (size_t i = 0; i < LATENCY_BINS; i++) {
        below += latency->bins[i];
        if (below > 0 && below >= wanted)
            return 1e-9 * middle_of(i);
    }
    return 0;
}
