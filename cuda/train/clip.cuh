/* Clipping of gradients on the device. The host never waits for the norm. The order of the sums depends only
 * on the number of gradients, so all ranks get the same bits. */
#ifndef FDSL_CUDA_TRAIN_CLIP_CUH
#define FDSL_CUDA_TRAIN_CLIP_CUH

#include "train/network.cuh"

#define CLIP_PARTS 1024 /* blocks, each of which adds up a part of the squares */

/* In device memory. */
struct device_clip {
    float factor;             /* multiplies the gradients of the current step */
    double parts[CLIP_PARTS]; /* sums of squares */
};

/* Allocates `*clip` if the optimizer clips gradients; else sets it to NULL. */
enum status clip_open(const struct train *train, struct allocations *allocations, struct device_clip **clip);

/* Computes the norm of the gradients, and from it clip->factor. `values` is the number of gradients, a
 * multiple of 4. Adds the norm to the totals, unless loss scaling skips the step. Does nothing if `clip` is
 * NULL. `scale` may be NULL. */
enum status clip_find(const struct optimizer *optimizer, size_t values, const float *gradients,
                      const struct device_scale *scale, struct device_clip *clip, struct train_totals *totals,
                      cudaStream_t stream);

#endif
