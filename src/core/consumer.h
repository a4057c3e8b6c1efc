/* An accelerator at work beside the loading: every batch that a run delivers is consumed by a training step
 * on the GPU, a kernel of known length or the trainer's own. What the accelerator waits for is measured by
 * events around each step.
 *
 * C, no CUDA header: cuda/common/consumer.cu implements it, consumer_none.c where CUDA is not built in. A
 * consumer is a table of functions and its state behind it, so that tests can bring their own. */
#ifndef FDSL_CORE_CONSUMER_H
#define FDSL_CORE_CONSUMER_H

#include <stdint.h>

#include "core/batch.h"
#include "core/step_backend.h"
#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* What was measured when it was opened, with no loader beside it. */
struct consumer_facts {
    double length_s; /* of a step: as asked for, or of the trainer's own as measured */
    double alone_s;  /* the median time of a step on a whole batch, with nothing beside it */

    /* Steps without a gap beside pinned copies to the device without a gap: the rate of those copies over
     * what it is alone, and the time of those steps over what it is alone. NaN where the two were never side
     * by side. */
    double bus_share, bus_slowdown;
};

/* What was measured from consumer_begin() to consumer_finish(). Without a step all is 0, and no loss. A batch
 * is whole where the step on it can be held against alone_s: of a task those of `share` samples, else all.
 */
struct consumer_times {
    uint64_t steps, whole_steps; /* all, and those on whole batches */
    double first_wait_s;         /* from consumer_begin() until the first step began */
    double wait_s;               /* the sum of the gaps: from the end of each step until the next one began */
    double busy_s;               /* the sum of the times of steps, as they ran */
    double whole_s;              /* the same of those on whole batches */
    double span_s;               /* from consumer_begin() until the last step ended */
    double loss;                 /* step_backend_loss() behind the last step; NaN where nobody learns */
};

struct consumer;

struct consumer_type {
    enum status (*renew)(struct consumer *consumer);
    enum status (*begin)(struct consumer *consumer);
    enum status (*take_host)(struct consumer *consumer, const struct batch *batch);
    enum status (*take_device)(struct consumer *consumer, const struct batch *batch, void *ready_event,
                               void **done_event);
    enum status (*wait)(struct consumer *consumer, void *done_event);
    enum status (*finish)(struct consumer *consumer, struct consumer_times *times);
    void (*close)(struct consumer *consumer);
};

/* The first member of each implementation's own struct. */
struct consumer {
    const struct consumer_type *type;
    struct consumer_facts facts;
};

/* Makes a consumer on CUDA device `device`, whose step is the trainer's on a task that was chosen, or where
 * `task` is NULL takes `step_s` seconds while the device does nothing else: within 2 %, or within 10 % with
 * a warning. It is calibrated and measured here, which takes a second or so, so nothing else should run.
 * STATUS_UNAVAILABLE without a GPU, STATUS_USAGE where what the trainer needs does not fit its memory,
 * STATUS_FAILED where that runs out or the step cannot be calibrated; then nothing is left allocated. The
 * caller closes it. */
enum status consumer_open(int device, double step_s, const struct task *task, struct consumer **consumer);

/* Another variant's batches come: what was learnt is forgotten. Waits for all steps. */
static inline enum status consumer_renew(struct consumer *consumer)
{
    return consumer->type->renew(consumer);
}

/* A span begins, when the steps before it have ended. */
static inline enum status consumer_begin(struct consumer *consumer)
{
    return consumer->type->begin(consumer);
}

/* Takes a batch in host memory: copies it to the device by way of a small ring of pinned buffers, and runs a
 * step behind the copy. Blocks while the ring is full; when it returns, the batch may be overwritten. Any
 * thread may call it, several at a time. STATUS_FAILED where memory runs out or CUDA fails. */
static inline enum status consumer_take_host(struct consumer *consumer, const struct batch *batch)
{
    return consumer->type->take_host(consumer, batch);
}

/* Takes a batch in device memory, which stays as it is until its step has ended; `*batch` itself need not.
 * The step waits, on the device, for `ready_event` (a cudaEvent_t that has
 * been recorded; NULL: the batch is ready now); `*done_event` (NULL: not wanted) becomes a cudaEvent_t that
 * is recorded behind the step, so after it the batch may be overwritten. The event is the consumer's, and is
 * recorded anew CONSUMER_STEPS_AHEAD steps later. Blocks while so many steps, or fewer of the trainer's, are
 * under way; else it returns at once. Any thread may call it. */
#define CONSUMER_STEPS_AHEAD 256
static inline enum status consumer_take_device(struct consumer *consumer, const struct batch *batch,
                                               void *ready_event, void **done_event)
{
    return consumer->type->take_device(consumer, batch, ready_event, done_event);
}

/* The calling thread waits until the step of a `done_event` has ended. */
static inline enum status consumer_wait(struct consumer *consumer, void *done_event)
{
    return consumer->type->wait(consumer, done_event);
}

/* Waits for all steps and tells what they took and waited. Ends the span. */
static inline enum status consumer_finish(struct consumer *consumer, struct consumer_times *times)
{
    return consumer->type->finish(consumer, times);
}

/* Waits for all steps and frees it; NULL is allowed. */
static inline void consumer_close(struct consumer *consumer)
{
    if (consumer)
        consumer->type->close(consumer);
}

FDSL_C_END

#endif
