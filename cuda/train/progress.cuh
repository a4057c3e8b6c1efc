/* The progress of a device engine: its totals, copied to pinned host memory while steps run. The copies are
 * enqueued whether or not progress is displayed. */
#ifndef FDSL_CUDA_TRAIN_PROGRESS_CUH
#define FDSL_CUDA_TRAIN_PROGRESS_CUH

#include <string.h>

#include "common/check.cuh"
#include "train/engine.h"

/* A zeroed struct device_progress may be closed, but not read. */
struct device_progress {
    struct train_totals *seen; /* pinned memory: the totals at the latest copy */
    uint32_t steps;            /* steps enqueued since that copy */
};

static inline enum status device_progress_open(struct device_progress *progress)
{
    CUDA_TRY(cudaMallocHost(&progress->seen, sizeof *progress->seen));
    memset(progress->seen, 0, sizeof *progress->seen);
    return STATUS_OK;
}

static inline void device_progress_close(struct device_progress *progress)
{
    (void)cudaFreeHost(progress->seen); /* nothing depends on an error here */
    progress->seen = nullptr;
}

/* Call after enqueuing `steps` steps. Once TRAIN_PROGRESS_STEPS steps have accumulated, enqueues a copy of
 * `totals` (device memory) to the host. */
static inline enum status device_progress_step(struct device_progress *progress,
                                               const struct train_totals *totals, uint32_t steps,
                                               cudaStream_t stream)
{
    progress->steps += steps;
    if (progress->steps < TRAIN_PROGRESS_STEPS)
        return STATUS_OK;
    progress->steps = 0;
    CUDA_TRY(cudaMemcpyAsync(progress->seen, totals, sizeof *totals, cudaMemcpyDeviceToHost, stream));
    return STATUS_OK;
}

/* Call when the totals have been reset and no step is running. */
static inline void device_progress_clear(struct device_progress *progress)
{
    memset(progress->seen, 0, sizeof *progress->seen);
    progress->steps = 0;
}

/* Writes the latest progress to `into`. The device may write `seen` concurrently. Each field is read whole,
 * but the fields may come from different copies. */
static inline void device_progress_read(const struct device_progress *progress, struct train_progress *into)
{
    const volatile struct train_totals *seen = progress->seen;
    into->loss = seen->loss;
    into->correct = seen->correct;
    into->samples = seen->samples;
}

#endif
