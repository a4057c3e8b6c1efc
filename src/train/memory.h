/* The memory of a training run: what an engine allocates, by parts, and limits per rank (--memory-limit).
 *
 * An engine adds up what open() allocates in train->memory, if that is not NULL. With `plans` set, open()
 * computes the same sizes by the same code, but allocates nothing large except the generator or the stream of
 * the feed, and the state can only be closed. So the sizes are known before memory is used, and cannot differ
 * from those that are allocated. */
#ifndef FDSL_TRAIN_MEMORY_H
#define FDSL_TRAIN_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

enum memory_part {
    MEMORY_ACTIVATIONS, /* of a batch, and their gradients */
    MEMORY_PARAMETERS,  /* of the network, and their copies in 16 bits */
    MEMORY_GRADIENTS,
    MEMORY_OPTIMIZER, /* moments, moving average, and what updates need besides */
    MEMORY_WORKSPACE, /* scratch memory of kernels and libraries */
    MEMORY_SAMPLES,   /* data sets that are copied to the device */
    MEMORY_STREAM,    /* batches of the feed, augmentation, generator, decoder */
    MEMORY_CONTEXT,   /* on a GPU: CUDA's context and other processes; on a CPU: the rest of this process */
    MEMORY_PARTS
};

/* Bytes that one rank uses. Only open() and steps() of one engine write to it, one thread at a time. */
struct memory_account {
    uint64_t bytes[MEMORY_PARTS];
    uint64_t limit_bytes; /* maximum sum of all parts; 0: no limit */
    bool plans;           /* count, but do not allocate */
};

FDSL_C_BEGIN

/* Adds `bytes` bytes to a part. STATUS_TOO_LARGE, without adding them, if the sum would exceed the limit.
 * Does nothing if `account` is NULL. */
enum status memory_take(struct memory_account *account, enum memory_part part, uint64_t bytes);

/* Returns the sum of all parts. */
uint64_t memory_total(const struct memory_account *account);

/* Prints a table of the parts to stderr: `planned` (before the memory was allocated), and besides, unless
 * `allocated` is NULL, what was allocated and `measured_bytes`, the memory that is in use in all. `title` is
 * the first line. */
void memory_print(const char *title, const struct memory_account *planned,
                  const struct memory_account *allocated, uint64_t measured_bytes);

/* Returns the largest batch that fits into `limit_bytes`, if `large_bytes` are needed for a batch of `large`
 * samples and `small_bytes` for `small` < `large`, and the need grows linearly; 0 if none does. */
uint64_t memory_largest_batch(uint64_t small, uint64_t small_bytes, uint64_t large, uint64_t large_bytes,
                              uint64_t limit_bytes);

/* Parses the value of --memory-limit: one size for all ranks, such as "16G", or one per rank, such as
 * "16G,8G". Sets `limits` to the bytes of each rank. STATUS_USAGE with a remedy if a size is invalid, or if
 * there is neither one size nor one per rank. */
enum status memory_limit_parse(const char *text, uint32_t ranks, uint64_t *limits);

FDSL_C_END

#endif
