/* All-reduce in device memory: replaces each value of an array by its sum over all ranks. allreduce_nccl.cu
 * and allreduce_peer.cu implement the methods. docs/distributed.md describes them.
 *
 * All ranks must open the same method with the same request, and must enqueue the same calls in the same
 * order. All ranks get the same bits, and repeated calls get the same bits. Calls of one state must not run
 * concurrently, because ranks wait for each other inside kernels. */
#ifndef FDSL_CUDA_TRAIN_ALLREDUCE_CUH
#define FDSL_CUDA_TRAIN_ALLREDUCE_CUH

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "train/exchange.h"

/* The format of the values, and the format in which ranks send them. Sums are fp32. */
enum allreduce_type {
    ALLREDUCE_F32,         /* float */
    ALLREDUCE_BF16,        /* bf16 */
    ALLREDUCE_F32_AS_BF16, /* float, sent as bf16: each value is rounded once before the sum, and each sum
                              once after it */
};

struct allreduce_request {
    int device;
    size_t count_max; /* maximum number of values per call */
    enum allreduce_type type;
    const struct comm_group *group; /* only for NCCL; NULL: all ranks */
};

struct allreduce_method {
    const char *name; /* as in --sync and --variant */

    /* Returns STATUS_OK if this rank can use the method on this device, else STATUS_UNAVAILABLE with the
     * reason. Not collective. */
    enum status (*probe)(int device);

    /* Collective: joins the ranks. `*state` is NULL before the call; the caller closes the state unless it is
     * NULL, even after a failure. All ranks return the same status. STATUS_UNAVAILABLE with the reason if
     * these ranks cannot use the method together, for example because they are on different machines. */
    enum status (*open)(const struct allreduce_request *request, void **state);

    /* Enqueues one all-reduce of `count` values, which are in memory of the device. The address must be a
     * multiple of 16 bytes. A CUDA graph may capture the call and replay it. */
    enum status (*enqueue)(void *state, void *values, size_t count, cudaStream_t stream);

    /* Call when enqueued work may be complete; does not wait for it. STATUS_FAILED with the rank if a rank
     * did not answer; all sums since then are undefined. */
    enum status (*check)(void *state);

    /* Collective, even after a failure of open(). All enqueued work must be complete. */
    void (*close)(void *state);

    uint64_t (*memory_bytes)(const void *state); /* device memory of the state; 0 if it is not known */
};

/* `peer` sums over NVLink or PCIe peer memory. It sums small arrays like peer-one-shot, and large arrays like
 * peer-two-shot. */
extern "C" const struct allreduce_method allreduce_nccl, allreduce_peer, allreduce_peer_one_shot,
    allreduce_peer_two_shot;

/* The version of the NCCL library, such as "2.28.3", after a successful probe; "" before. */
const char *allreduce_nccl_version(void);

/* ---- The methods named `peer` ---- */

/* Settings for tests and measurements. All ranks must set the same values, and only between calls. 0 selects
 * the default. */
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
