/* The bandwidth of copies: an upper bound on the rate of any loader that copies every byte with as many
 * threads. */
#ifndef FDSL_CPU_LOAD_COPIER_H
#define FDSL_CPU_LOAD_COPIER_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "load/input.h"

/* The caller sets the first three members, and zeroes the others. */
struct copier {
    const struct load *load;
    int threads;
    size_t stride; /* distance of the samples in a buffer */
    uint8_t *set;  /* the working set in memory: set_bytes allocated, copied_bytes used */
    size_t set_bytes, copied_bytes;
};

/* Measures the bandwidth in bytes per second. The threads copy the working set into the buffers, one buffer
 * per thread with room for a batch: once batch by batch and once sample by sample. The result is the faster
 * rate. For local shards, the working set is their memory mappings; for files and remote shards, it is
 * anonymous memory of the same size. At most 2 GiB are copied. STATUS_FAILED if a shard is truncated. */
enum status copier_measure(struct copier *copier, uint8_t *const *buffers, double *bytes_per_s);

/* Unmaps the working set. The next measurement maps it again. */
void copier_forget(struct copier *copier);

#endif
