/* Runs whose batches are consumed (--compute): a variant around another one, which hands every batch over to
 * the accelerator's training step and waits as a training loop does. */
#ifndef FDSL_RUN_CONSUMED_H
#define FDSL_RUN_CONSUMED_H

#include "core/consumer.h"
#include "core/variant.h"
#include "core/workload.h"

/* What consumed_variant.setup() takes as its input. All but the consumer's state is constant. */
struct consumed_job {
    const struct workload *workload;
    const struct variant *variant; /* which makes the batches */
    void *input;                   /* the workload's, for that variant */
    struct consumer *consumer;
};

/* The variant around that of a job. A run's time is the wall clock's, steps among it:
 *
 * - Where a run makes one batch (workload->batches.hand_over), batches alternate between two states of the
 * variant where they stay on the device: a run waits for the step before the last, whose batch it overwrites,
 * makes its own while the last one's step runs, and hands it over. Host batches are copied away as they are
 * handed over, so one state is enough.
 * - Where a run delivers many (workload->batches.set_consumer), the variant hands them over itself, and the
 * run ends when the last step has. */
extern const struct variant consumed_variant;

/* The variant's own state that made the latest batch: for the workload's verify(), deliver() and measure().
 */
void *consumed_latest(void *state);

/* After the timed runs: waits for their last steps, and sets the measures COMPUTE_MEASURES and
 * `*wait_share`. STATUS_FAILED when a step fails. */
enum status consumed_end(void *state, struct measures *measures, double *wait_share);

/* From now on the variant's own runs hand nothing over. */
void consumed_detach(void *state);

#endif
