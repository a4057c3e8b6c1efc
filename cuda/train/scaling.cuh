/* Loss scaling on the device. The host learns which steps were skipped only from totals(). */
#ifndef FDSL_CUDA_TRAIN_SCALING_CUH
#define FDSL_CUDA_TRAIN_SCALING_CUH

#include "core/status.h"
#include "train/loss_scale.h"

#include <cuda_runtime.h>

/* In device memory. */
struct device_scale {
    struct loss_scale now;
    uint32_t overflowed; /* whether the gradients of this step contain an Inf or a NaN */
    uint32_t skipped;    /* steps skipped since the last totals() */
};

/* Divides the gradients by the scale and checks that all are finite. */
enum status scaling_unscale(struct device_scale *scale, size_t values, float *gradients, cudaStream_t stream);

/* Call after the optimizer: counts the step if it was skipped, updates the scale, and clears the overflow
 * flag. */
enum status scaling_step(struct device_scale *scale, cudaStream_t stream);

#endif
