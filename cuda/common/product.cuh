/* A kernel of any length that fills the device as training does: the step of --compute MS. */
#ifndef FDSL_CUDA_COMMON_PRODUCT_CUH
#define FDSL_CUDA_COMMON_PRODUCT_CUH

#include <cuda_runtime.h>
#include <stddef.h>

#include "core/status.h"

/* Matrices are square. Block i makes tile i of C, in rows of tiles, and from the first tile on again behind
 * the last; in a unit it goes so many columns of A and rows of B on, those of the first round from the first.
 */
#define PRODUCT_SIDE  2048
#define PRODUCT_TILE  64
#define PRODUCT_DEPTH 8

struct product {
    float *matrices; /* A, B, C */
    unsigned wave;   /* blocks that the device runs at a time */
    unsigned units;  /* of a step; the length in time is proportional to it */
};

/* Makes the matrices, enqueued on `stream`, for a product of one wave of blocks. STATUS_FAILED where memory
 * runs out. The caller closes it, also after a failure; a zeroed one may be closed. */
enum status product_open(int device, cudaStream_t stream, struct product *product);
void product_close(struct product *product);

/* Enqueues one. */
enum status product_launch(const struct product *product, cudaStream_t stream);

#endif
