/* A generator computes samples by number, in any order, into the caller's memory. A training loop can request
 * each batch when it needs it, so the data set need not be stored.
 *
 * This header includes no CUDA header. A generator is a table of functions followed by its state. Sample
 * sources create generators (data/source.h) on the host or on a device. */
#ifndef FDSL_CORE_GENERATOR_H
#define FDSL_CORE_GENERATOR_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "core/variant.h"

FDSL_C_BEGIN

struct generator;

/* The numbers of the samples that one call generates. On a device, `list` and `counter` are device memory. */
struct generator_numbers {
    const uint64_t *list;    /* one number per sample; NULL: consecutive numbers */
    uint64_t first;          /* if `list` is NULL: the number of the first sample */
    const uint64_t *counter; /* only on a device: address of a number that is added to `first`, or NULL */
    /* Only on a device: a copy of `list` in host memory, which some generators need and read during the call,
     * or NULL. */
    const uint64_t *host_list;
};

/* Arrays for the targets of the samples. A pointer is NULL if this target is not wanted; it is ignored if the
 * generator does not have the target. On a device, the pointers are to device memory. */
struct generator_targets {
    int64_t *labels; /* one number per sample */
    /* Per sample, the class number that each pixel of the output image shows, 0: background; or one byte per
     * class: 1 if the sample shows the class. */
    uint8_t *masks;
    float *points; /* per sample, a point cloud: x, y, z of each of its points */
};

struct generator_type {
    enum status (*make)(struct generator *generator, const struct generator_numbers *numbers, uint32_t count,
                        void *samples, const struct generator_targets *targets, void *stream);
    uint64_t (*memory_bytes)(const struct generator *generator);
    void (*close)(struct generator *generator);
};

/* The first member of each implementation's own struct. */
struct generator {
    const struct generator_type *type;
};

/* The parameters for opening a generator. */
struct generator_request {
    bool on_device; /* true: on CUDA device resources.device; false: on resources.threads CPU threads */
    struct resources resources;
    uint32_t batch; /* maximum number of samples per call */

    /* Variant of the workload that generates the samples; NULL: the default of the source. */
    const char *variant;

    /* Used only on a device. If true, the generator's own streams have the lowest priority and delay a
     * training step as little as possible. If false, they have the highest priority, so that the next batch
     * is ready in time. */
    bool background;
};

/* Generates `count` samples and stores them contiguously in `samples`, and their targets as `targets` says
 * (NULL: no targets); 1 <= count <= the request's batch. On the host, the samples are complete when the
 * function returns, and `stream` is NULL. On a device, `samples` (16-byte aligned) and the targets are device
 * memory, the device must be current, and the work is enqueued on `stream` (a cudaStream_t) without waiting.
 * At most one call per generator may be in flight. */
static inline enum status generator_make(struct generator *generator, const struct generator_numbers *numbers,
                                         uint32_t count, void *samples,
                                         const struct generator_targets *targets, void *stream)
{
    return generator->type->make(generator, numbers, count, samples, targets, stream);
}

/* Returns the memory that the generator has allocated, in bytes: device memory if it works on a device. */
static inline uint64_t generator_memory_bytes(const struct generator *generator)
{
    return generator->type->memory_bytes(generator);
}

/* Frees the generator; its work must have completed. NULL is allowed. */
static inline void generator_close(struct generator *generator)
{
    if (generator)
        generator->type->close(generator);
}

FDSL_C_END

#endif
