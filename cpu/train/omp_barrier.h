/* A barrier for the threads of one OpenMP parallel region. */
#ifndef FDSL_CPU_TRAIN_OMP_BARRIER_H
#define FDSL_CPU_TRAIN_OMP_BARRIER_H

#include <pthread.h>
#include <stdatomic.h>

struct barrier {
    atomic_uint arrived, passed; /* threads that have arrived in the current round; completed rounds */
    pthread_mutex_t mutex;
    pthread_cond_t released;
};

void barrier_init(struct barrier *barrier);
void barrier_destroy(struct barrier *barrier);

/* Waits until all threads of the current parallel region have called barrier_wait(). */
void barrier_wait(struct barrier *barrier);

#endif
