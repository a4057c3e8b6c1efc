/* Choices that must not be foreseen: what is verified after the fact. Never for anything that a result
 * depends on. */
#ifndef FDSL_CORE_CHANCE_H
#define FDSL_CORE_CHANCE_H

#include <stdint.h>
#include <time.h>
#include <unistd.h>

/* A number below `bound` >= 1 that the clock and the process id decide. */
static inline uint64_t chance_below(uint64_t bound)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t mixed = (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 30 ^ (uint64_t)getpid() << 48;
    mixed *= UINT64_C(0x9e3779b97f4a7c15); /* the high bits depend on all of them */
    return (mixed >> 32) % bound;
}

#endif
