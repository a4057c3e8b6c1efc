/* A consumer runs a training step on the GPU for every batch that a run delivers. The step is a kernel of
 * known duration or a real training step. Events around each step measure how long the GPU waits for batches.
 *
 * This header is plain C and includes no CUDA header. cuda/common/consumer.cu implements
 * consumer_open(); in builds without CUDA, cuda/common/device_none.c does. A consumer is a table of
 * functions followed by its state, so tests can supply their own consumer. */
#ifndef FDSL_CORE_CONSUMER_H
#define FDSL_CORE_CONSUMER_H

#include <stdint.h>

#include "core/batch.h"
#include "core/step_backend.h"
#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* Values that consumer_open() measured while no loader was running. */
struct consumer_facts {
    double length_s; /* time per step: as requested, or as measured for a real training step */
    double alone_s;  /* median time of a step on a whole batch while nothing else runs */

    /* These values are measured while back-to-back steps and back-to-back copies from pinned memory to the
     * device run concurrently. bus_share: copy rate, divided by the rate of copies alone. bus_slowdown: step
     * time, divided by the time of steps alone. A value is NaN if the overlap was too short to measure it. */
    double bus_share, bus_slowdown;
};

/* Values that were measured from consumer_begin() to consumer_finish(). If no step ran, all values except
 * `loss` are 0. Only steps on whole batches are comparable to alone_s. With a task, a whole batch has
 * task.share samples; without a task every batch is whole. */
struct consumer_times {
    uint64_t steps, whole_steps; /* all steps, and steps on whole batches */
    double first_wait_s;         /* from consumer_begin() to the start of the first step */
    double wait_s;               /* sum of the gaps between the end of a step and the start of the next */
    double busy_s;               /* sum of the step times */
    double whole_s;              /* sum of the times of steps on whole batches */
    double span_s;               /* from consumer_begin() to the end of the last step */
    double loss;                 /* step_backend_loss() after the last step; NaN without training */
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

/* Creates a consumer on CUDA device `device`. With a `task` (completed by task_choose()), each step trains a
 * network, and `step_s` is ignored. If `task` is NULL, each step is a kernel that takes `step_s` seconds on
 * an otherwise idle device. Calibration errors of up to 2 % are accepted silently, errors of up to 10 % with
 * a warning. Calibrates and measures for about a second (longer if a step takes more than 10 ms), during
 * which nothing else should run. The caller closes it with consumer_close(). STATUS_UNAVAILABLE without a
 * GPU; STATUS_USAGE if training does not fit in the device's memory; STATUS_EXHAUSTED if memory runs out,
 * STATUS_FAILED if the step cannot be calibrated. Nothing is left allocated after a failure. */
enum status consumer_open(int device, double step_s, const struct task *task, struct consumer **consumer);

/* Waits for all steps, then resets the training state. Called before another variant delivers batches. */
static inline enum status consumer_renew(struct consumer *consumer)
{
    return consumer->type->renew(consumer);
}

/* Waits for all earlier steps, then starts a new measurement. */
static inline enum status consumer_begin(struct consumer *consumer)
{
    return consumer->type->begin(consumer);
}

/* Consumes a batch in host memory: copies it to the device through a small ring of pinned buffers and runs a
 * step after the copy. Blocks while the ring is full. When it returns, the batch may be overwritten. Thread
 * safe. STATUS_FAILED if memory runs out or CUDA fails. */
static inline enum status consumer_take_host(struct consumer *consumer, const struct batch *batch)
{
    return consumer->type->take_host(consumer, batch);
}

/* Consumes a batch in device memory. The values must not change until the step has ended; the struct `batch`
 * may. On the device, the step waits for `ready_event`, a recorded cudaEvent_t (NULL: the batch is ready
 * now). If `done_event` is not NULL, `*done_event` becomes a cudaEvent_t that is recorded after the step;
 * after that event, the batch may be overwritten. The consumer owns the event and records it again
 * CONSUMER_STEPS_AHEAD steps later. Blocks while CONSUMER_STEPS_AHEAD steps (fewer for real training steps)
 * are in flight; otherwise returns immediately. Thread safe. */
#define CONSUMER_STEPS_AHEAD 256
static inline enum status consumer_take_device(struct consumer *consumer, const struct batch *batch,
                                               void *ready_event, void **done_event)
{
    return consumer->type->take_device(consumer, batch, ready_event, done_event);
}

/* Blocks the calling thread until the step that records `done_event` has ended. */
static inline enum status consumer_wait(struct consumer *consumer, void *done_event)
{
    return consumer->type->wait(consumer, done_event);
}

/* Ends the measurement: waits for all steps and fills `times`. */
static inline enum status consumer_finish(struct consumer *consumer, struct consumer_times *times)
{
    return consumer->type->finish(consumer, times);
}

/* Waits for all steps and frees the consumer; NULL is allowed. */
static inline void consumer_close(struct consumer *consumer)
{
    if (consumer)
        consumer->type->close(consumer);
}

FDSL_C_END

#endif
