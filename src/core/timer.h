/* Wall-clock time and CPU time. */
#ifndef FDSL_CORE_TIMER_H
#define FDSL_CORE_TIMER_H

#include <time.h>

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

#endif
