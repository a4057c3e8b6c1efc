/* Wall-clock time. */
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

#endif
