/* Latency histogram of system calls. Each range from 2^n to 2^(n+1) ns has 32 bins, so percentiles are
 * accurate to 3 %. The size is fixed, and adding a value takes a few instructions. */
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

/* Adds the counts of another histogram. */
void latency_merge(struct latency *latency, const struct latency *other);

/* Returns the p-quantile in seconds, 0 <= p <= 1: the middle of its bin, or 0 if the histogram is empty. */
double latency_quantile_s(const struct latency *latency, double p);

FDSL_C_END

#endif
