/* Loss scaling on the device. The host never waits for the scale. The engine's totals() returns the number of
 * skipped steps. */
#ifndef FDSL_CUDA_TRAIN_SCALING_CUH
#define FDSL_CUDA_TRAIN_SCALING_CUH

#include "core/status.h"
#include "train/loss.h"

#include <cuda_runtime.h>

/* State of the loss scaling, in device memory. */
struct device_scale {
    struct loss_scale now;
    uint32_t overflowed; /* whether the gradients of this step contain an Inf or a NaN */
    uint32_t skipped;    /* steps skipped since the last totals() */
};

/* Divides `values` gradients by the scale. Sets `overflowed` if one of them is not finite. */
enum status scaling_unscale(struct device_scale *scale, size_t values, float *gradients, cudaStream_t stream);

/* Call after the optimizer. Counts the step if it was skipped, updates the scale, and clears `overflowed`. */
enum status scaling_step(struct device_scale *scale, cudaStream_t stream);

#endif
