/* The exchange with update in allreduce_peer.cu, and settings of its all-reduces for tests and measurements.
 */
#ifndef FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH
#define FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "train/exchange_shares.h"

#define PEERS_MAX 8 /* ranks */

/* All ranks must set the same values, and only between calls. 0 selects the default. */
struct allreduce_peer_tuning {
    int blocks;            /* maximum number of blocks per call */
    size_t one_shot_bytes; /* `peer` uses one shot for arrays of at most this size */
    size_t eager_bytes;    /* one shot uses eager_kernel() for arrays of at most this size */
    uint64_t timeout_ns;   /* of states that are opened later; 0 is not the default here */
};
extern struct allreduce_peer_tuning allreduce_peer_tuning;

/* Enqueues the update of parameters `first` to first + count - 1, for a state of a peer method with
 * ALLREDUCE_F32: adds up the gradients of all ranks in rank order, each rank its chunks (exchange_shares.h),
 * runs optimizer_step() on them, and writes the new parameters to all ranks. The gradients do not change. All
 * ranks must enqueue the same calls in the same order. `first` is a multiple of 4. A CUDA graph may capture
 * the call; each replay reads *arrays->update again. With one rank, updates all parameters. */
enum status allreduce_peer_update(void *state, const struct exchange_update *arrays, size_t first,
                                  size_t count, cudaStream_t stream);

#endif
