#include "core/parallel.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/timer.h"

/* ---- Threads. libfdsl has its own definitions of both functions (src/lib/fdsl.c) ---- */

#ifdef _OPENMP

__attribute__((weak)) void parallel_for(int threads, uint64_t count, parallel_task *task, void *context)
{
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (uint64_t i = 0; i < count; i++)
        task(context, i, omp_get_thread_num());
}

__attribute__((weak)) int parallel_threads(void)
{
    return omp_get_max_threads();
}

#else

__attribute__((weak)) void parallel_for(int threads, uint64_t count, parallel_task *task, void *context)
{
    (void)threads;
    for (uint64_t i = 0; i < count; i++)
        task(context, i, 0);
}

__attribute__((weak)) int parallel_threads(void)
{
    return 1;
}

#endif

/* ---- Ranks ---- */

/* Returns the rank whose exact part exceeds its current share the most; ties go to the lowest rank. */
static uint32_t most_lacking(const double *weights, double sum, uint32_t count, uint32_t total,
                             const uint32_t *shares)
{
    uint32_t found = 0;
    double most = -INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        double lacking = total * weights[i] / sum - shares[i];
        if (lacking > most) {
            most = lacking;
            found = i;
        }
    }
    return found;
}

/* Returns the rank with the largest share. Ties go to the highest rank, so that, among ranks with equal
 * weights, a lower rank never gets fewer items. */
static uint32_t largest(const uint32_t *shares, uint32_t count)
{
    uint32_t found = 0;
    for (uint32_t i = 1; i < count; i++)
        if (shares[i] >= shares[found])
            found = i;
    return found;
}

void partition_divide(const double *weights, uint32_t count, uint32_t total, uint32_t least, uint32_t *shares)
{
    double sum = 0;
    uint32_t left = total;
    for (uint32_t i = 0; i < count; i++)
        sum += weights[i];
    for (uint32_t i = 0; i < count; i++) {
        double part = floor(total * weights[i] / sum);
        shares[i] = part < left ? (uint32_t)part : left; /* limits rounding errors */
        left -= shares[i];
    }
    for (; left > 0; left--)
        shares[most_lacking(weights, sum, count, total, shares)]++;
    for (uint32_t i = 0; i < count; i++)
        while (shares[i] < least) {
            shares[largest(shares, count)]--;
            shares[i]++;
        }
}

/* ---- A thread that ticks ---- */

struct ticker {
    double begin_s, period_s;
    ticker_tick *tick;
    void *context;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* signalled to stop the thread */
    bool stopping;
};

/* Sleeps until the next multiple of the period. Returns false if the thread must stop. */
static bool wait_for_next(struct ticker *ticker, double *number, uint64_t *missed)
{
    double next = fmax(*number + 1, floor((timer_now_s() - ticker->begin_s) / ticker->period_s) + 1);
    double whole_s, part_s = modf(ticker->begin_s + next * ticker->period_s, &whole_s);
    struct timespec at = {(time_t)whole_s, (long)(1e9 * part_s)};
    int waited = 0;
    *missed = (uint64_t)(next - *number - 1);
    *number = next;
    pthread_mutex_lock(&ticker->lock);
    while (!ticker->stopping && waited != ETIMEDOUT)
        waited = pthread_cond_timedwait(&ticker->wake, &ticker->lock, &at);
    bool stopping = ticker->stopping;
    pthread_mutex_unlock(&ticker->lock);
    return !stopping;
}

static void *run(void *argument)
{
    struct ticker *ticker = argument;
    double number = 0;
    uint64_t missed = 0;
    do
        ticker->tick(ticker->context, missed);
    while (wait_for_next(ticker, &number, &missed));
    return NULL;
}

int ticker_open(double period_s, ticker_tick *tick, void *context, struct ticker **ticker)
{
    pthread_condattr_t clock;
    struct ticker *self = *ticker = calloc(1, sizeof *self);
    if (!self)
        return ENOMEM;
    *self = (struct ticker){.begin_s = timer_now_s(), .period_s = period_s, .tick = tick, .context = context};
    pthread_mutex_init(&self->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* the clock of timer_now_s() */
    pthread_cond_init(&self->wake, &clock);
    pthread_condattr_destroy(&clock);
    int error = parallel_start(&self->thread, run, self);
    if (!error)
        return 0;
    pthread_cond_destroy(&self->wake);
    pthread_mutex_destroy(&self->lock);
    free(self);
    *ticker = NULL;
    return error;
}

void ticker_close(struct ticker *ticker)
{
    if (!ticker)
        return;
    pthread_mutex_lock(&ticker->lock);
    ticker->stopping = true;
    pthread_cond_signal(&ticker->wake);
    pthread_mutex_unlock(&ticker->lock);
    pthread_join(ticker->thread, NULL);
    pthread_cond_destroy(&ticker->wake);
    pthread_mutex_destroy(&ticker->lock);
    free(ticker);
}
