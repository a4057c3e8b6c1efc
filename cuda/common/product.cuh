/* The step of --compute MS: kernels of adjustable duration that keep the device busy as training does. */
#ifndef FDSL_CUDA_COMMON_PRODUCT_CUH
#define FDSL_CUDA_COMMON_PRODUCT_CUH

#include <cuda_runtime.h>
#include <stddef.h>

#include "core/status.h"

/* A step multiplies square matrices A and B; C receives the sums. Tiles of C are numbered row by row, and
 * block i computes tile i mod (number of tiles). Several blocks can compute the same tile, from different
 * first columns of A: block i starts at column i / (number of tiles) * 24 * PRODUCT_DEPTH, modulo
 * PRODUCT_SIDE. In one unit of work, each of `wave` blocks advances by PRODUCT_DEPTH columns of A and rows of
 * B. */
#define PRODUCT_SIDE  2048
#define PRODUCT_TILE  64
#define PRODUCT_DEPTH 8

struct product {
    float *matrices; /* A, B, C */
    unsigned wave;   /* blocks that the device runs concurrently */
    unsigned units;  /* units per step; the duration is proportional to them */
};

/* Allocates the matrices and fills them on `stream`. Sets `units` such that a step is one wave of blocks.
 * STATUS_FAILED, with a remedy in the message, if memory runs out. The caller calls product_close(), even
 * after a failure; product_close() also accepts a zeroed struct. */
enum status product_open(int device, cudaStream_t stream, struct product *product);
void product_close(struct product *product);

/* Returns the number of kernels of a step. */
unsigned product_kernels(const struct product *product);

/* Enqueues one step of product->units units. STATUS_FAILED if the launch fails. */
enum status product_launch(const struct product *product, cudaStream_t stream);

#endif
