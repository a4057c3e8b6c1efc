/* Settings of the all-reduces in allreduce_peer.cu, for tests and measurements. */
#ifndef FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH
#define FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH

#include <stddef.h>
#include <stdint.h>

#define PEERS_MAX 8 /* ranks */

/* All ranks must set the same values, and only between calls. 0 selects the default. */
struct allreduce_peer_tuning {
    int blocks;            /* maximum number of blocks per call */
    size_t one_shot_bytes; /* `peer` uses one shot for arrays of at most this size */
    size_t eager_bytes;    /* one shot uses eager_kernel() for arrays of at most this size */
    uint64_t timeout_ns;   /* applies to states that are opened later; here, 0 does not select the default */
};
extern struct allreduce_peer_tuning allreduce_peer_tuning;

#endif
