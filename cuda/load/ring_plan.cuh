/* The part of a ring that decides which samples a chunk contains: consecutive samples of a share. A chunk
 * consists of pieces, each with samples of a single shard. */
#ifndef FDSL_CUDA_LOAD_RING_PLAN_CUH
#define FDSL_CUDA_LOAD_RING_PLAN_CUH

#include "load/ring.cuh"

#define PIECE_ALIGNMENT 512 /* in bytes; tar members have the same alignment */

static inline uint64_t align_to(uint64_t bytes, uint64_t alignment)
{
    return (bytes + alignment - 1) / alignment * alignment;
}

/* Plans the next chunk of a share that the worker has claimed. The chunk gets the next samples in reading
 * order, until the buffer, its table or the list of pieces is full, or the span ends. Opens the shards. */
enum status ring_plan_chunk(struct ring_worker *worker, struct ring_share *share, struct chunk *chunk);

/* Drops one reference to an open shard, which may be NULL. Closes the shard if that was the last reference.
 */
void ring_release(struct ring_worker *worker, struct open_shard *opened);

#endif
