/* Latencies of system calls: a histogram whose bins are 1/32 of a power of two, so a percentile is known to 3
 * %. It takes no memory that grows, and adding is a few instructions. */
#ifndef FDSL_LOAD_LATENCY_H
#define FDSL_LOAD_LATENCY_H

#include <stdint.h>

#include "core/portable.h"

#define LATENCY_BINS (60 * 32)

struct latency {
    uint64_t count, bins[LATENCY_BINS];
};

FDSL_C_BEGIN

/* Adds a duration in nanoseconds. */
void latency_add(struct latency *latency, uint64_t duration_ns);

/* Adds another's. */
void latency_merge(struct latency *latency, const struct latency *other);

/* The p-quantile in seconds: the middle of the bin that holds it; 0 where nothing was added. */
double latency_quantile_s(const struct latency *latency, double p);

FDSL_C_END

#endif
