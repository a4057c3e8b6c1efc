/* Fits decoded images into the samples of a batch on the device: cuts out a part of each image, resizes it,
 * turns it upright, flips it, normalises it, and writes it to its slot of a tensor. Before normalisation, the
 * bytes equal those that the CPU computes, because both use data/resample.h. */
#ifndef FDSL_CUDA_COMMON_FIT_CUH
#define FDSL_CUDA_COMMON_FIT_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/status.h"
#include "data/resample.h"

/* One decoded image that a kernel fits into its slot. */
struct fit_entry {
    const uint8_t *pixels;  /* device memory: the first pixel of the part; three bytes per pixel */
    uint32_t stride;        /* bytes per row */
    uint32_t width, height; /* of the part, in pixels */
    uint32_t slot;
    struct orientation turn; /* turns the image upright */
    bool flip;               /* mirror the upright image horizontally */
};

#define FIT_CHANNELS_MAX 3

/* Arguments of the kernel. All pointers are device pointers. */
struct fit {
    const struct fit_entry *entries;
    uint32_t count, res, channels; /* `channels`: 1 or 3 */
    bool interleaved;              /* NHWC instead of NCHW */
    enum dtype tensor;             /* DTYPE_STORED: bytes, without scale and bias */
    float scale[FIT_CHANNELS_MAX], bias[FIT_CHANNELS_MAX];
    uint8_t *slots;
    uint64_t stride; /* bytes per slot */
};

/* Launches the kernel on the stream; launches nothing if `count` is 0. Parts must be at most
 * PICTURE_SCALE_MAX (data/image.h) times as wide and as high as the output. STATUS_FAILED on CUDA errors. */
enum status fit_launch(const struct fit *fit, cudaStream_t stream);

/* A sample that is in device memory in its final form. */
struct fit_move {
    uint64_t from, to; /* its numbers in both arrays */
};

/* Launches a kernel that copies `count` samples of `bytes` bytes each from one array to another, which do not
 * overlap. All pointers are device pointers, the arrays as cudaMalloc() aligns them. Launches nothing if
 * `count` is 0. STATUS_FAILED on CUDA errors. */
enum status fit_move_launch(const struct fit_move *moves, uint32_t count, size_t bytes, const void *from,
                            void *to, cudaStream_t stream);

#endif
