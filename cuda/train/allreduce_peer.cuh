/* The exchange that also updates parameters (allreduce_peer_update.cu), and settings of the all-reduces in
 * allreduce_peer.cu for tests and measurements. */
#ifndef FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH
#define FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "train/exchange.h"

#define PEERS_MAX 8 /* maximum number of ranks */

/* All ranks must set the same values, and only between calls. 0 selects the default. */
struct allreduce_peer_tuning {
    int blocks;            /* maximum number of blocks per call */
    size_t one_shot_bytes; /* `peer` uses one shot for arrays of at most this size */
    size_t eager_bytes;    /* one shot uses eager_kernel() for arrays of at most this size */
    uint64_t timeout_ns;   /* applies to states that are opened later; here, 0 does not select the default */
};
extern struct allreduce_peer_tuning allreduce_peer_tuning;

/* Enqueues the update of parameters `first` to first + count - 1. `state` belongs to a peer method that was
 * opened with ALLREDUCE_F32. `first` is a multiple of 4. Each rank updates its own chunks of the parameters
 * (train/exchange.h): it adds up the chunks' gradients over all ranks in rank order, runs optimizer_step(),
 * and writes the new parameters to all ranks. A single rank updates all parameters. The gradients do not
 * change. All ranks must enqueue the same calls in the same order. A CUDA graph may capture the call; each
 * replay reads *arrays->update again. STATUS_FAILED if the launch fails. */
enum status allreduce_peer_update(void *state, const struct exchange_update *arrays, size_t first,
                                  size_t count, cudaStream_t stream);

#endif
