#include "run/consumed.h"

#include <stdlib.h>
#include <string.h>

#include "core/phase.h"

#define STATES_MAX 2

struct consumed {
    struct consumed_job job;
    int state_count, latest;
    void *states[STATES_MAX];
    void *done[STATES_MAX]; /* per state, the event after the step on its batch; NULL if there is none */
    bool timed;             /* the latest run was a timed one */
    /* The sum over all measurements. If a run delivers many batches, each run is one measurement. Otherwise
     * all timed runs together are one measurement. first_wait_s is the first wait of the first measurement;
     * wait_s includes the first waits of all later measurements. */
    struct consumer_times sum;
};

void *consumed_latest(void *state)
{
    const struct consumed *self = state;
    return self->states[self->latest];
}

/* Returns whether a run of the wrapped variant delivers many batches, which the variant passes to the
 * consumer itself. */
static bool delivers_many(const struct consumed *self)
{
    return self->job.workload->batches.set_consumer;
}

static void set_consumer(const struct consumed *self, struct consumer *consumer)
{
    if (delivers_many(self))
        self->job.workload->batches.set_consumer(self->job.input, consumer);
}

static void consumed_teardown(void *state)
{
    struct consumed *self = state;
    struct consumer_times unused;
    /* Ignore errors of the remaining steps, because no result depends on them. */
    (void)consumer_finish(self->job.consumer, &unused);
    set_consumer(self, NULL);
    for (int i = 0; i < self->state_count; i++)
        if (self->states[i])
            self->job.variant->teardown(self->states[i]);
    free(self);
}

static enum status consumed_setup(const struct resources *resources, const void *input, void **state)
{
    const struct consumed_job *job = input;
    struct consumed *self = *state = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    self->job = *job;
    bool on_device = strcmp(job->variant->platform, "cuda") == 0;
    self->state_count = on_device && !delivers_many(self) ? STATES_MAX : 1;
    TRY(consumer_begin(job->consumer));
    set_consumer(
        self,
        job->consumer); /* before setup(), because a variant with a consumer may allocate more buffers */
    for (int i = 0; i < self->state_count; i++)
        TRY(job->variant->setup(resources, job->input, &self->states[i]));
    return STATUS_OK;
}

static enum status consumed_ready(void *state, uint64_t number)
{
    const struct consumed *self = state;
    const struct variant *variant = self->job.variant;
    return variant->ready ? variant->ready(self->states[(self->latest + 1) % self->state_count], number)
                          : STATUS_OK;
}

/* Ends a measurement and adds it to the sum. Only the wait before the very first step is counted separately
 * (first_wait_s), because a training loop starts only once. The waits at the start of later epochs count as
 * stalls (wait_s). */
static enum status add_span(struct consumed *self)
{
    struct consumer_times times, *sum = &self->sum;
    TRY(consumer_finish(self->job.consumer, &times));
    *(sum->steps == 0 ? &sum->first_wait_s : &sum->wait_s) += times.first_wait_s;
    sum->steps += times.steps;
    sum->wait_s += times.wait_s;
    sum->busy_s += times.busy_s;
    return STATUS_OK;
}

/* Produces one batch while the training step on the previous batch runs. */
static enum status run_one(struct consumed *self, uint64_t number)
{
    const struct consumed_job *job = &self->job;
    int turn = (self->latest + 1) % self->state_count;
    struct run_time unused;
    if (self->done[turn])
        TRY(consumer_wait(job->consumer, self->done[turn]));
    self->done[turn] = NULL;
    self->latest = turn;
    TRY(job->variant->run(self->states[turn], number, &unused));
    return job->workload->batches.hand_over(job->input, job->variant, self->states[turn], job->consumer,
                                            &self->done[turn]);
}

/* Runs a wrapped variant that delivers many batches, and waits for the training steps on all of them. */
static enum status run_many(struct consumed *self, uint64_t number, bool timed)
{
    struct run_time unused;
    struct consumer_times times;
    TRY(consumer_begin(self->job.consumer));
    TRY(self->job.variant->run(self->states[0], number, &unused));
    return timed ? add_span(self) : consumer_finish(self->job.consumer, &times);
}

static enum status consumed_run(void *state, uint64_t number, struct run_time *time)
{
    struct consumed *self = state;
    bool timed = phase_now() == PHASE_TIMED;
    time->device_s = -1;
    if (delivers_many(self))
        return run_many(self, number, timed);
    if (timed && !self->timed) /* the measurement covers all timed runs and no earlier step */
        TRY(consumer_begin(self->job.consumer));
    self->timed = timed;
    return run_one(self, number);
}

static enum status consumed_fetch(void *state, void *result)
{
    const struct consumed *self = state;
    return self->job.variant->fetch(consumed_latest(state), result);
}

enum status consumed_end(void *state, struct row *row)
{
    struct consumed *self = state;
    const struct consumer_times *sum = &self->sum;
    const struct consumer *consumer = self->job.consumer;
    if (!delivers_many(self))
        TRY(add_span(self));
    if (sum->steps == 0)
        return status_set(STATUS_FAILED, "no step ran: the timed runs delivered no batch");
    double step_s = sum->busy_s / (double)sum->steps, after_first_s = sum->wait_s + sum->busy_s;
    row_real(row, "compute_ms", 1e3 * consumer->length_s);
    row_count(row, "steps", sum->steps);
    row_real(row, "stall_share", sum->wait_s / after_first_s);
    row_real(row, "first_batch_s", sum->first_wait_s);
    row_real(row, "step_s", step_s);
    row_real(row, "busy_share", sum->busy_s / (sum->first_wait_s + after_first_s));
    row_real(row, "slowdown", step_s / consumer->alone_s);
    row_real(row, "bus_share", consumer->bus_share);
    row_real(row, "bus_slowdown", consumer->bus_slowdown);
    return STATUS_OK;
}

void consumed_detach(void *state)
{
    set_consumer(state, NULL);
}

const struct variant consumed_variant = {
    .platform = "cuda",
    .setup = consumed_setup,
    .ready = consumed_ready,
    .run = consumed_run,
    .fetch = consumed_fetch,
    .teardown = consumed_teardown,
};
