/* A kernel of adjustable duration that loads the device like training: the step of --compute MS. */
#ifndef FDSL_CUDA_COMMON_PRODUCT_CUH
#define FDSL_CUDA_COMMON_PRODUCT_CUH

#include <cuda_runtime.h>
#include <stddef.h>

#include "core/status.h"

/* Matrices are square. Block i computes tile i mod (number of tiles) of C, row by row. In each unit it
 * advances by PRODUCT_DEPTH columns of A and rows of B; blocks of the first pass over the tiles begin at 0.
 */
#define PRODUCT_SIDE  2048
#define PRODUCT_TILE  64
#define PRODUCT_DEPTH 8

struct product {
    float *matrices; /* A, B, C */
    unsigned wave;   /* blocks that the device runs concurrently */
    unsigned units;  /* units per step; the duration is proportional to it */
};

/* Allocates the matrices and fills them on `stream`; the initial product is one wave of blocks. STATUS_FAILED
 * if memory runs out. The caller calls product_close(), even after a failure; it accepts a zeroed struct. */
enum status product_open(int device, cudaStream_t stream, struct product *product);
void product_close(struct product *product);

/* Enqueues one product. */
enum status product_launch(const struct product *product, cudaStream_t stream);

#endif
