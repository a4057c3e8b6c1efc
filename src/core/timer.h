/* Wall-clock time and CPU time. */
#ifndef FDSL_CORE_TIMER_H
#define FDSL_CORE_TIMER_H

#include <time.h>

/* Returns seconds since an arbitrary fixed point. Monotonic. */
static inline double timer_now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Returns the seconds of CPU time that all threads of this process have used. */
static inline double timer_cpu_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
