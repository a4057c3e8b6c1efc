/* Wall-clock time, CPU time, and choices that depend on the time. */
#ifndef FDSL_CORE_TIMER_H
#define FDSL_CORE_TIMER_H

#include <stdint.h>
#include <time.h>
#include <unistd.h>

/* Returns the time of a clock in seconds; negative if the clock cannot be read. */
static inline double timer_clock_s(clockid_t clock)
{
    struct timespec now;
    return clock_gettime(clock, &now) == 0 ? (double)now.tv_sec + 1e-9 * (double)now.tv_nsec : -1;
}

/* Returns seconds since an arbitrary fixed point. Monotonic. */
static inline double timer_now_s(void)
{
    return timer_clock_s(CLOCK_MONOTONIC);
}

/* Returns the seconds of CPU time that all threads of this process have used. */
static inline double timer_cpu_s(void)
{
    return timer_clock_s(CLOCK_PROCESS_CPUTIME_ID);
}

/* Returns a number in [0, bound), bound >= 1, derived from the clock and the process id: an unpredictable
 * choice, such as which timed run to verify. Results must never depend on it. */
static inline uint64_t unpredictable_below(uint64_t bound)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t mixed = (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 30 ^ (uint64_t)getpid() << 48;
    mixed *= UINT64_C(0x9e3779b97f4a7c15); /* every input bit reaches the high bits */
    return (mixed >> 32) % bound;
}

#endif
