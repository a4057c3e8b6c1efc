#include "machine/ticker.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "core/parallel.h"
#include "core/timer.h"

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
