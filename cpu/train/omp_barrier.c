#include "omp_barrier.h"

#include <omp.h>
#include <stdint.h>

#define SPINS 1000 /* 10 to 50 microseconds, depending on the CPU */
#if defined(__x86_64__)
#define SPIN() __builtin_ia32_pause()
#else
#define SPIN() ((void)0)
#endif

void barrier_init(struct barrier *barrier)
{
    atomic_init(&barrier->arrived, 0);
    atomic_init(&barrier->passed, 0);
    pthread_mutex_init(&barrier->mutex, NULL);
    pthread_cond_init(&barrier->released, NULL);
}

void barrier_destroy(struct barrier *barrier)
{
    pthread_cond_destroy(&barrier->released);
    pthread_mutex_destroy(&barrier->mutex);
}

/* OpenMP's own barriers may spin for milliseconds, unless OMP_WAIT_POLICY is passive. If other processes also
 * need the cores, the spinning threads keep the last thread from running. In a measurement with other
 * processes, a training step with OpenMP's barriers took six times as much CPU time. This barrier therefore
 * spins briefly and then sleeps. */
void barrier_wait(struct barrier *barrier)
{
    uint32_t threads = (uint32_t)omp_get_num_threads(), round = atomic_load(&barrier->passed);
    if (threads == 1)
        return;
    if (atomic_fetch_add(&barrier->arrived, 1) + 1 == threads) {
        atomic_store(&barrier->arrived, 0);
        pthread_mutex_lock(&barrier->mutex);
        atomic_store(&barrier->passed, round + 1);
        pthread_cond_broadcast(&barrier->released);
        pthread_mutex_unlock(&barrier->mutex);
        return;
    }
    for (uint32_t spins = 0; spins < SPINS; spins++) {
        if (atomic_load(&barrier->passed) != round)
            return;
        SPIN();
    }
    pthread_mutex_lock(&barrier->mutex);
    while (atomic_load(&barrier->passed) == round)
        pthread_cond_wait(&barrier->released, &barrier->mutex);
    pthread_mutex_unlock(&barrier->mutex);
}
