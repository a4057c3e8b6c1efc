#include "lib/pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"

struct pool_thread {
    struct pool *pool;
    int number;
    pthread_t id;
};

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    int threads;  /* including the caller's */
    int started;  /* number of threads in `members` */
    int busy;     /* threads in `members` that have not finished the current job */
    uint64_t job; /* number of the current job */
    bool closing;
    parallel_task *task;
    void *context;
    uint64_t count;
    atomic_uint_fast64_t next; /* number of the first task that no thread has taken */
    struct pool_thread members[];
};

static _Thread_local struct pool *current;

static void work(struct pool *pool, int thread)
{
    uint64_t task;
    while ((task = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed)) < pool->count)
        pool->task(pool->context, task, thread);
}

static void *run_thread(void *argument)
{
    struct pool_thread *self = argument;
    struct pool *pool = self->pool;
    uint64_t done = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->job == done && !pool->closing)
            pthread_cond_wait(&pool->begin, &pool->lock);
        if (pool->closing)
            break;
        done = pool->job;
        pthread_mutex_unlock(&pool->lock);
        work(pool, self->number);
        pthread_mutex_lock(&pool->lock);
        if (--pool->busy == 0)
            pthread_cond_signal(&pool->end);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Starts the threads with all signals blocked, so that only the caller's threads receive signals. */
static enum status start_threads(struct pool *pool)
{
    sigset_t all, before;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool->started < pool->threads - 1 && error == 0; pool->started += error == 0) {
        struct pool_thread *member = &pool->members[pool->started];
        *member = (struct pool_thread){.pool = pool, .number = pool->started + 1};
        error = pthread_create(&member->id, NULL, run_thread, member);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "cannot start %d threads: %s; lower threads", pool->threads,
                      strerror(error));
}

enum status pool_open(int threads, struct pool **pool)
{
    struct pool *self = calloc(1, sizeof *self + (size_t)threads * sizeof *self->members);
    TRY(ALLOCATED(self, "out of memory"));
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->begin, NULL);
    pthread_cond_init(&self->end, NULL);
    self->threads = threads;
    enum status status = start_threads(self);
    if (status != STATUS_OK)
        pool_close(self);
    else
        *pool = self;
    return status;
}

void pool_close(struct pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    pthread_cond_broadcast(&pool->begin);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++)
        pthread_join(pool->members[i].id, NULL);
    pthread_cond_destroy(&pool->end);
    pthread_cond_destroy(&pool->begin);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void pool_use(struct pool *pool)
{
    current = pool;
}

/* `threads` is the size of the pool, or 1 if the variant uses no pool. */
void parallel_for(int threads, uint64_t count, parallel_task *task, void *context)
{
    struct pool *pool = current;
    if (!pool || threads == 1 || count <= 1) {
        for (uint64_t i = 0; i < count; i++)
            task(context, i, 0);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->task = task;
    pool->context = context;
    pool->count = count;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    pool->busy = pool->started;
    pool->job++;
    pthread_cond_broadcast(&pool->begin);
    pthread_mutex_unlock(&pool->lock);
    work(pool, 0);
    pthread_mutex_lock(&pool->lock);
    while (pool->busy > 0)
        pthread_cond_wait(&pool->end, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
