/* Loss scaling, decided on the device: the host asks for steps and never learns which were skipped until it
 * asks for totals. */
#ifndef FDSL_CUDA_TRAIN_SCALING_CUH
#define FDSL_CUDA_TRAIN_SCALING_CUH

#include "core/status.h"
#include "train/loss_scale.h"

#include <cuda_runtime.h>

/* In device memory. */
struct device_scale {
    struct loss_scale now;
    uint32_t overflowed; /* whether the gradients of this step hold an Inf or a NaN */
    uint32_t skipped;    /* steps since the last totals() */
};

/* Divides the gradients by the scale, and finds out whether all are finite. */
enum status scaling_unscale(struct device_scale *scale, size_t values, float *gradients, cudaStream_t stream);

/* Behind the optimizer: counts the step, chooses the next scale, forgets the overflow. */
enum status scaling_step(struct device_scale *scale, cudaStream_t stream);

#endif
