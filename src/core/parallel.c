#include "core/parallel.h"

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

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
