/* What consumer.cu (batches, and what steps on them waited for) and consumer_measure.cu (what a step takes
 * alone, and beside copies) share. Nothing else includes this. */
#ifndef FDSL_CUDA_COMMON_CONSUMER_PARTS_CUH
#define FDSL_CUDA_COMMON_CONSUMER_PARTS_CUH

#include <cuda_runtime.h>
#include <pthread.h>

#include "common/product.cuh"
#include "core/consumer.h"
#include "core/step_backend.h"

#define RING 4 /* host batches under way */

struct slot {
    void *pinned, *device;
    size_t bytes;
    uint64_t turn;      /* batches that have been through it */
    cudaEvent_t copied; /* the batch is on the device */
    cudaEvent_t done;   /* behind the step on it; NULL before the first */
};

struct cuda_consumer {
    struct consumer consumer; /* first */
    int device;
    pthread_mutex_t lock;   /* over all below, but for what a slot's own thread fills */
    pthread_cond_t changed; /* a slot's turn */
    struct product product;
    struct step_backend *backend; /* makes the steps; NULL: `product` does */
    unsigned ahead;               /* steps under way, at most */
    uint32_t share;               /* samples of a whole batch; 0: a step takes as long on any */
    cudaStream_t steps, copies;
    cudaEvent_t origin; /* where the span begins */
    cudaEvent_t begins[CONSUMER_STEPS_AHEAD], ends[CONSUMER_STEPS_AHEAD];
    bool whole[CONSUMER_STEPS_AHEAD]; /* the step between these events is on a whole batch */
    cudaEvent_t last_end;             /* of the latest step that was counted */
    uint64_t enqueued, counted;       /* steps since the opening */
    uint64_t span_first;              /* the first step of the span */
    struct consumer_times span;       /* of its steps that were counted; without span_s and loss */
    uint64_t tickets;                 /* host batches so far */
    struct slot ring[RING];
};

/* One step, enqueued: on `batch`, which a product does not look at. */
static inline enum status make_step(struct cuda_consumer *self, const struct batch *batch)
{
    return self->backend ? step_backend_step(self->backend, batch)
                         : product_launch(&self->product, self->steps);
}

/* Makes the step: a product that takes `step_s`. Fills the consumer's facts. */
enum status measure_product(struct cuda_consumer *self, double step_s);

/* The same of the learner's step on a task. */
enum status measure_task(struct cuda_consumer *self, const struct task *task);

#endif
