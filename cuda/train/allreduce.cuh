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

#endif
