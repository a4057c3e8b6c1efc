/* Declarations shared by consumer.cu (passes batches to steps) and consumer_measure.cu (measures steps alone
 * and concurrently with copies). No other file includes this header. */
#ifndef FDSL_CUDA_COMMON_CONSUMER_PARTS_CUH
#define FDSL_CUDA_COMMON_CONSUMER_PARTS_CUH

#include <cuda_runtime.h>
#include <pthread.h>

#include "common/product.cuh"
#include "core/consumer.h"
#include "core/step_backend.h"

#define RING 4 /* number of slots, which limits the number of host batches in flight */

/* The buffers of one host batch. */
struct slot {
    void *pinned, *device;
    size_t bytes;
    uint64_t turn;      /* number of times that this slot has been released */
    cudaEvent_t copied; /* recorded after the copy to the device */
    cudaEvent_t done;   /* recorded after the step on the slot's latest batch; NULL before the first batch */
};

struct cuda_consumer {
    struct consumer
        consumer; /* must be first: consumer.cu converts its address to the address of this struct */
    int device;
    pthread_mutex_t lock;   /* protects everything below, except the buffers of a slot that a thread owns */
    pthread_cond_t changed; /* signals that a slot's turn has changed */
    struct product product;
    struct step_backend *backend; /* runs the steps; if NULL, `product` runs them */
    unsigned ahead;               /* maximum number of steps in flight */
    uint32_t share; /* samples in a full batch; 0: the duration of a step does not depend on the batch */
    cudaStream_t steps, copies;
    cudaEvent_t origin; /* start of the span, which lasts from consumer_begin() to consumer_finish() */
    cudaEvent_t begins[CONSUMER_STEPS_AHEAD], ends[CONSUMER_STEPS_AHEAD];
    bool whole[CONSUMER_STEPS_AHEAD]; /* whether the step from begins[i] to ends[i] has a full batch */
    cudaEvent_t last_end;             /* end of the latest counted step */
    uint64_t enqueued, counted;       /* steps enqueued and steps counted since consumer_open() */
    uint64_t span_first;              /* number of the first step of the span */
    struct consumer_times span; /* sums over the counted steps of the span; span_s and loss are unused */
    uint64_t tickets;           /* number of host batches received so far */
    struct slot ring[RING];
};

/* Enqueues one step on `batch`. The matrix product ignores the batch. */
static inline enum status make_step(struct cuda_consumer *self, const struct batch *batch)
{
    return self->backend ? step_backend_step(self->backend, batch)
                         : product_launch(&self->product, self->steps);
}

/* Opens a matrix product and calibrates it to take `step_s` seconds. Fills self->consumer.facts. */
enum status measure_product(struct cuda_consumer *self, double step_s);

/* Measures the training step of self->backend for `task`. Fills self->consumer.facts. */
enum status measure_task(struct cuda_consumer *self, const struct task *task);

#endif
