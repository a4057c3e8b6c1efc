/* A consumer runs a training step on the GPU for every batch that a run delivers. The step is a kernel of
 * known duration, which waits for the batch but does not read it. Events around each step measure how long
 * the GPU waits for batches.
 *
 * This header is plain C and includes no CUDA header. cuda/common/consumer.cu implements
 * consumer_open(); in builds without CUDA, cuda/common/device_none.c does. A consumer is a table of
 * functions followed by its state, so tests can supply their own consumer. */
#ifndef FDSL_CORE_CONSUMER_H
#define FDSL_CORE_CONSUMER_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* Values that were measured from consumer_begin() to consumer_finish(). If no step ran, all are 0. The span
 * from consumer_begin() to the end of the last step is the sum of the three times. */
struct consumer_times {
    uint64_t steps;
    double first_wait_s; /* from consumer_begin() to the start of the first step */
    double wait_s;       /* sum of the gaps between the end of a step and the start of the next */
    double busy_s;       /* sum of the step times */
};

struct consumer;

struct consumer_type {
    enum status (*begin)(struct consumer *consumer);
    enum status (*take_host)(struct consumer *consumer, const void *values, size_t bytes);
    enum status (*take_device)(struct consumer *consumer, void *ready_event, void **done_event);
    enum status (*wait)(struct consumer *consumer, void *done_event);
    enum status (*finish)(struct consumer *consumer, struct consumer_times *times);
    void (*close)(struct consumer *consumer);
};

/* The first member of each implementation's own struct. consumer_open() measures the values while no loader
 * runs. */
struct consumer {
    const struct consumer_type *type;
    double length_s; /* time per step, as requested */
    double alone_s;  /* median time of a step while nothing else runs */

    /* These values are measured while back-to-back steps and back-to-back copies from pinned memory to the
     * device run concurrently. bus_share: copy rate, divided by the rate of copies alone. bus_slowdown: step
     * time, divided by the time of steps alone. A value is NaN if the overlap was too short to measure it. */
    double bus_share, bus_slowdown;
};

/* Creates a consumer on CUDA device `device`, whose step takes `step_s` seconds on an otherwise idle device.
 * Calibration errors of up to 2 % are accepted silently, errors of up to 10 % with a warning. Calibrates and
 * measures for about a second (longer if a step takes more than 10 ms), during which nothing else should run.
 * The caller closes it with consumer_close(). STATUS_UNAVAILABLE without a GPU; STATUS_EXHAUSTED if memory
 * runs out, STATUS_FAILED if the step cannot be calibrated. Nothing is left allocated after a failure. */
enum status consumer_open(int device, double step_s, struct consumer **consumer);

/* Waits for all earlier steps, then starts a new measurement. */
static inline enum status consumer_begin(struct consumer *consumer)
{
    return consumer->type->begin(consumer);
}

/* Consumes a batch in host memory: copies its `bytes` bytes to the device through a small ring of pinned
 * buffers and runs a step after the copy. Blocks while the ring is full. When it returns, the batch may be
 * overwritten. Thread safe. STATUS_FAILED if memory runs out or CUDA fails. */
static inline enum status consumer_take_host(struct consumer *consumer, const void *values, size_t bytes)
{
    return consumer->type->take_host(consumer, values, bytes);
}

/* Consumes a batch in device memory, which must not change until the step has ended. On the device, the step
 * waits for `ready_event`, a recorded cudaEvent_t (NULL: the batch is ready now). If `done_event` is not
 * NULL, `*done_event` becomes a cudaEvent_t that is recorded after the step; after that event, the batch may
 * be overwritten. The consumer owns the event and records it again CONSUMER_STEPS_AHEAD steps later. Blocks
 * while CONSUMER_STEPS_AHEAD steps (fewer if a step has many kernels) are in flight; otherwise returns
 * immediately. Thread safe. */
#define CONSUMER_STEPS_AHEAD 256
static inline enum status consumer_take_device(struct consumer *consumer, void *ready_event,
                                               void **done_event)
{
    return consumer->type->take_device(consumer, ready_event, done_event);
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
