/* A generator: makes samples by their numbers, any numbers in any order, into memory of the caller. So what
 * is learnt from need not be stored anywhere: who trains asks for the samples of a batch as it needs them.
 *
 * C, no CUDA header. A generator is a table of functions and its state behind it; rooms that know samples
 * make them (data/source.h), on the host or on a device. */
#ifndef FDSL_CORE_GENERATOR_H
#define FDSL_CORE_GENERATOR_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "core/variant.h"

FDSL_C_BEGIN

struct generator;

struct generator_type {
    enum status (*make)(struct generator *generator, const uint64_t *numbers, uint32_t count, void *samples,
                        void *stream);
    uint64_t (*memory_bytes)(const struct generator *generator);
    void (*close)(struct generator *generator);
};

/* The first member of each implementation's own struct. */
struct generator {
    const struct generator_type *type;
};

/* What a generator is opened for. */
struct generator_request {
    bool on_device; /* number resources.device; else on the host, by resources.threads threads */
    struct resources resources;
    uint32_t batch; /* samples at most at a time */
};

/* Makes samples numbers[0] to numbers[count - 1], 1 <= count <= the request's batch, one behind the other.
 * On the host they are there when it returns. On a device `numbers` and `samples` (from an address that 16
 * divides) lie in its memory, and the work is enqueued on `stream` (a cudaStream_t): nothing waits for it,
 * the device must be current, and at most one call's work may be under way at a time. */
static inline enum status generator_make(struct generator *generator, const uint64_t *numbers, uint32_t count,
                                         void *samples, void *stream)
{
    return generator->type->make(generator, numbers, count, samples, stream);
}

/* The memory that it holds, of the device where it works on one. */
static inline uint64_t generator_memory_bytes(const struct generator *generator)
{
    return generator->type->memory_bytes(generator);
}

/* Frees it, when its work has ended; NULL is allowed. */
static inline void generator_close(struct generator *generator)
{
    if (generator)
        generator->type->close(generator);
}

FDSL_C_END

#endif
