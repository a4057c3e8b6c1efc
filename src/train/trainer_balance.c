/* --balance: the shares of the ranks, at the beginning and after each epoch. Rank 0 computes them, so that
 * all ranks have the same shares. */
#include "train/trainer_parts.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "machine/comm.h"
#include "machine/device.h"
#include "machine/host.h"

/* Free memory is rounded to multiples of 1/64 of the largest value, so equal machines get equal weights. */
#define MEMORY_STEPS 64
#define REPORT_GAIN  0.1  /* report a straggler if other shares would save a larger part of a step's time */
#define REPORT_MIN_S 0.25 /* after a shorter epoch, the measured speeds are too uncertain for a report */

/* ---- At the beginning ---- */

/* Returns the free memory in bytes of the device or the host on which the engine trains; 0: unknown. */
static uint64_t free_bytes(const struct engine *engine, const struct resources *resources)
{
    struct device_info info;
    if (engine->gradients_in != GRADIENTS_IN_DEVICE && engine->gradients_in != GRADIENTS_IN_GRAPH)
        return memory_available_bytes();
    return device_describe(resources->device, &info) == STATUS_OK ? info.memory_free_bytes : 0;
}

/* Collective: on rank 0, sets the weights to the free memory of the ranks, as multiples of 1/64 of the
 * largest value. */
static enum status weigh_memory(const struct trainer *trainer, const struct resources *resources,
                                double *weights)
{
    double mine = (double)free_bytes(trainer->engine, resources), largest = 0;
    TRY(comm_agree(mine > 0 ? STATUS_OK
                            : status_set(STATUS_UNAVAILABLE,
                                         "--balance memory: the free memory is not known here; give each "
                                         "rank a number, such as --balance 3:1")));
    TRY(comm_gather(&mine, sizeof mine, weights));
    if (comm_rank() > 0)
        return STATUS_OK;
    for (int i = 0; i < comm_size(); i++)
        largest = fmax(largest, weights[i]);
    for (int i = 0; i < comm_size(); i++)
        weights[i] = fmax(1, round(MEMORY_STEPS * weights[i] / largest));
    return STATUS_OK;
}

/* Returns whether the shares depend on measurements. A resumed run then needs the shares of the
 * checkpoint. */
static bool depends_on_measurements(const struct train_job *job)
{
    return job->balance == BALANCE_MEASURED || job->balance == BALANCE_MEMORY;
}

/* On rank 0: sets trainer->next to the shares in the checkpoint if they depend on measurements. Otherwise, or
 * if the checkpoint has no shares for this job, divides the samples of a step in proportion to `weights`. */
static void divide(struct trainer *trainer, const double *weights)
{
    const struct train_job *job = trainer->job;
    const struct train *train = &job->train;
    const char *kept = trainer->now.shares ? trainer->now.shares : "";
    if (!depends_on_measurements(job) ||
        !balance_read(kept, job->balance, train->ranks, train->batch, trainer->next))
        partition_divide(weights, train->ranks, train->batch, job->balance == BALANCE_FIXED ? 0 : 1,
                         trainer->next);
}

enum status trainer_take_shares(struct trainer *trainer, const struct resources *resources)
{
    const struct train_job *job = trainer->job;
    const size_t ranks = job->train.ranks;
    if (!job->shares)
        return STATUS_OK;
    trainer->next = malloc(ranks * sizeof *trainer->next);
    trainer->speeds = malloc(ranks * sizeof *trainer->speeds);
    TRY(comm_agree(ALLOCATED(trainer->next && trainer->speeds, "out of memory")));
    memcpy(trainer->speeds, job->weights, ranks * sizeof *trainer->speeds);
    if (job->balance == BALANCE_MEMORY)
        TRY(weigh_memory(trainer, resources, trainer->speeds));
    if (comm_rank() == 0)
        divide(trainer, trainer->speeds);
    TRY(comm_spread(trainer->next, ranks * sizeof *trainer->next));
    trainer_use_shares(trainer);
    trainer->train.share_max = train_room(&trainer->train, job->balance == BALANCE_MEASURED);
    return STATUS_OK;
}

void trainer_use_shares(struct trainer *trainer)
{
    if (trainer->next)
        memcpy(trainer->job->shares, trainer->next, trainer->train.ranks * sizeof *trainer->next);
}

/* ---- After an epoch ---- */

/* Returns the speed of this rank in samples per second, in the steps of the epoch that this process ran. The
 * time in which it waits for the exchange does not count. NaN if the exchange is not timed. */
static double own_speed(const struct trainer *trainer)
{
    const struct train_partial *done = &trainer->done, *before = &trainer->now.partial;
    const uint64_t samples = train_share_of_epoch(&trainer->train) -
                             (uint64_t)before->steps * train_share(&trainer->train, 0).count;
    return (double)samples / (done->epoch_s - before->epoch_s - (done->exchange_s - before->exchange_s));
}

/* On rank 0: warns once if other shares would save much time. */
static void report_straggler(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    const uint32_t *shares = job->shares;
    const double *speeds = trainer->speeds;
    uint32_t slow = 0, fast = 0;
    if (trainer->reported || trainer->done.epoch_s < REPORT_MIN_S)
        return;
    double gain = balance_improve(speeds, job->train.ranks, REPORT_GAIN, shares, trainer->next);
    memcpy(trainer->next, shares, job->train.ranks * sizeof *shares);
    if (gain == 0)
        return;
    for (uint32_t i = 1; i < job->train.ranks; i++) {
        slow = shares[i] / speeds[i] > shares[slow] / speeds[slow] ? i : slow;
        fast = shares[i] / speeds[i] < shares[fast] / speeds[fast] ? i : fast;
    }
    trainer->reported = true;
    status_warn("the ranks are uneven: rank %" PRIu32 " computes %" PRIu32 " samples of each step at %.0f "
                "samples/s, rank %" PRIu32 " computes %" PRIu32
                " at %.0f, and all ranks wait for the slowest; "
                "--balance measured divides the samples by speed, and would save about %.0f %% of the time",
                slow, shares[slow], speeds[slow], fast, shares[fast], speeds[fast], 100 * gain);
}

enum status trainer_rebalance(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    if (!job->shares)
        return STATUS_OK;
    double speed = own_speed(trainer);
    TRY(comm_gather(&speed, sizeof speed, trainer->speeds));
    if (job->balance == BALANCE_MEASURED) {
        if (comm_rank() == 0)
            (void)balance_improve(trainer->speeds, job->train.ranks, BALANCE_GAIN_MIN, job->shares,
                                  trainer->next);
        return comm_spread(trainer->next, job->train.ranks * sizeof *trainer->next);
    }
    if (comm_rank() == 0)
        report_straggler(trainer);
    return STATUS_OK;
}

enum status trainer_note_shares(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    free(trainer->now.shares);
    trainer->now.shares = NULL;
    if (!job->shares || !depends_on_measurements(job))
        return STATUS_OK;
    trainer->now.shares = balance_text(job->balance, trainer->next, job->train.ranks);
    return ALLOCATED(trainer->now.shares, "out of memory for the shares");
}
