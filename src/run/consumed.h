/* --compute: a variant that wraps another variant, passes each batch to a training step on the GPU, and waits
 * for the steps as a training loop does. */
#ifndef FDSL_RUN_CONSUMED_H
#define FDSL_RUN_CONSUMED_H

#include "core/consumer.h"
#include "core/variant.h"
#include "core/workload.h"

/* The input of consumed_variant.setup(), which copies this struct. All pointers must stay valid as long as
 * the state. */
struct consumed_job {
    const struct workload *workload;
    const struct variant *variant; /* the variant that produces the batches */
    void *input;                   /* the workload's input for that variant */
    struct consumer *consumer;
};

/* The wrapping variant. The time of a run is wall time and includes the waits for training steps.
 *
 * If a run produces one batch (workload->batches.hand_over), batches on the device alternate between two
 * states of the wrapped variant. Run n waits for the training step on batch n - 2, and overwrites that batch
 * while the training step on batch n - 1 runs. Then it passes the new batch to the consumer. A batch in host
 * memory is copied when it is passed on, so one state is enough.
 *
 * If a run delivers many batches (workload->batches.set_consumer), the wrapped variant passes them to the
 * consumer itself, and the run ends when the last step has ended. */
extern const struct variant consumed_variant;

/* Returns the state of the wrapped variant that produced the latest batch, for the workload's verify(),
 * deliver() and measure(). */
void *consumed_latest(void *state);

/* Call after the timed runs: waits for their last steps and sets the columns COMPUTE_COLUMNS.
 * STATUS_FAILED if a step fails or none ran. */
enum status consumed_end(void *state, struct row *row);

/* Detaches the consumer from the wrapped variant. Later runs pass no batches to the consumer. */
void consumed_detach(void *state);

#endif
