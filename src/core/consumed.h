/* Runs whose batches are consumed (--compute): a variant around another one, which hands every batch over to
 * the accelerator's training step and waits as a training loop does. */
#ifndef FDSL_CORE_CONSUMED_H
#define FDSL_CORE_CONSUMED_H

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
 * - Where a run makes one batch (workload->hand_over), batches alternate between two states of the variant
 * where they stay on the device: a run waits for the step before the last, whose batch it overwrites, makes
 * its own while the last one's step runs, and hands it over. Host batches are copied away as they are handed
 * over, so one state is enough.
 * - Where a run delivers many (workload->set_consumer), the variant hands them over itself, and the run ends
 * when the last step has. */
extern const struct variant consumed_variant;

/* The variant's own state that made the latest batch: for the workload's verify(), deliver() and measure().
 */
void *consumed_latest(void *state);

/* The columns that every workload with --compute lists in its measures, in this order; the first one's name,
 * and how many they are. */
#define CONSUMED_MEASURES                                                                      \
    {CONSUMED_FIRST, COMBINE_MEAN}, {"steps", COMBINE_SUM}, {"wait_share", COMBINE_MAX},       \
        {"first_wait_s", COMBINE_MAX}, {"step_s", COMBINE_MEAN}, {"utilisation", COMBINE_MIN}, \
        {"slowdown", COMBINE_MAX}, {"bus_share", COMBINE_MIN}, {"bus_slowdown", COMBINE_MAX},  \
    {                                                                                          \
        "loss", COMBINE_MEAN                                                                   \
    }
#define CONSUMED_FIRST   "compute_ms"
#define CONSUMED_COLUMNS 10

/* After the timed runs: waits for their last steps, and fills the texts of CONSUMED_MEASURES and
 * `*wait_share`. STATUS_FAILED when a step fails. */
enum status consumed_end(void *state, char texts[][64], double *wait_share);

/* From now on the variant's own runs hand nothing over. */
void consumed_detach(void *state);

#endif
