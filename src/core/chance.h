/* Unpredictable choices, such as which timed run to verify. Results must never depend on them. */
#ifndef FDSL_CORE_CHANCE_H
#define FDSL_CORE_CHANCE_H

#include <stdint.h>
#include <time.h>
#include <unistd.h>

/* Returns a number in [0, bound), bound >= 1, derived from the clock and the process id. */
static inline uint64_t chance_below(uint64_t bound)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t mixed = (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 30 ^ (uint64_t)getpid() << 48;
    mixed *= UINT64_C(0x9e3779b97f4a7c15); /* every input bit reaches the high bits */
    return (mixed >> 32) % bound;
}

#endif
