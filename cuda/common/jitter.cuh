/* Colour jitter, random grayscale and Gaussian blur on the device, with the same bits as jitter_apply() on
 * the host (data/jitter.h). */
#ifndef FDSL_CUDA_COMMON_JITTER_CUH
#define FDSL_CUDA_COMMON_JITTER_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "data/jitter.h"

/* The changes of one image, and the weights of its blur by distance. */
struct jitter_image {
    struct jitter_drawn drawn;
    uint16_t weights[JITTER_RADIUS_MAX + 1];
};

/* The axes of the output. The input has planes: (channels, frames, height, width). */
enum jitter_order {
    JITTER_PLANES,
    JITTER_FRAMES,     /* (frames, channels, height, width) */
    JITTER_INTERLEAVED /* (frames, height, width, channels) */
};

/* The settings of all batches, and memory for one batch. */
struct jitter_batch {
    struct jitter jitter;
    struct shape shape; /* of an image, with one or three channels */
    uint64_t seed;
    struct jitter_image *images;
    unsigned long long *sums; /* of the gray of each frame, before its contrast changes */
    enum jitter_order order;  /* JITTER_PLANES, unless the caller sets it after jitter_batch_open() */
};

/* Returns the size of the memory for batches of up to `count` images, in bytes. */
size_t jitter_batch_bytes(const struct shape *shape, uint32_t count);

/* Prepares changes for which jitter_check() returned STATUS_OK. `memory`, in device memory with the alignment
 * of cudaMalloc(), has jitter_batch_bytes(), and must outlive the batch; batches that share it must not run
 * at the same time. STATUS_FAILED on CUDA errors. */
enum status jitter_batch_open(const struct jitter *jitter, const struct shape *shape, uint64_t seed,
                              uint32_t count, void *memory, struct jitter_batch *batch);

/* Enqueues the changes of `count` images, whose numbers are in device memory, with at most three kernels. All
 * arrays are aligned to 4 bytes. `to` may be `from` without blur and with JITTER_PLANES, and must otherwise
 * be another array. Launches nothing if `count` is 0. */
enum status jitter_batch_run(const struct jitter_batch *batch, uint32_t epoch, const uint32_t *numbers,
                             uint32_t count, const uint8_t *from, uint8_t *to, cudaStream_t stream);

#endif
