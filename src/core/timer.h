/* Wall-clock time, CPU time, and choices that depend on the time. */
#ifndef FDSL_CORE_TIMER_H
#define FDSL_CORE_TIMER_H

#include <pthread.h>
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

/* Initialises a condition whose timed waits end at a time of timer_deadline(). */
static inline void timer_cond_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Returns the time that is `seconds`, at least 0, from now. */
static inline struct timespec timer_deadline(double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    const double end_s = 1e-9 * (double)until.tv_nsec + seconds;
    const time_t whole_s = (time_t)end_s;
    until.tv_sec += whole_s;
    until.tv_nsec = (long)(1e9 * (end_s - (double)whole_s));
    return until;
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
