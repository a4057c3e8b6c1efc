/* A stream of generated samples, or of samples that are in memory, such as a constant batch. */
#ifndef FDSL_DATA_GENERATED_STREAM_H
#define FDSL_DATA_GENERATED_STREAM_H

#include "core/generator.h"
#include "core/stream.h"

struct generated_stream_request {
    /* Generates samples on the host, at least plan.capacity at a time. The stream takes it over, and closes
     * it even if it cannot be opened. Sample n of the plan is the generator's sample n % count + e * fresh in
     * epoch e, counted from 0. */
    struct generator *generator;
    uint64_t fresh;
    /* Not NULL: sample n of the plan is the generator's sample number(context, e, n); `context` is that of
     * the plan. Must be a pure function. */
    uint64_t (*number)(const void *context, uint64_t epoch, uint32_t number);

    /* If `generator` is NULL: `in_memory` samples, one after another. Sample n of the plan is n % count,
     * which must be one of them. They must outlive the stream and must not change. */
    const void *values;
    uint32_t in_memory;

    uint32_t count; /* samples of the set, at least 1. Numbers of the plan from `count` on are copies */
    /* The label of sample n is labels[n % count]. NULL: the label that the generator gives; STATUS_USAGE if
     * there is no generator. Must outlive the stream. */
    const uint32_t *labels;

    size_t sample_bytes;
    size_t mask_bytes; /* size of the mask that the generator makes for each sample; 0: none */
    enum dtype type;
    struct stream_plan plan;
    struct stream_position begin; /* the first batch; zeros: the beginning */
    uint32_t ahead; /* number of batches that a thread of the stream generates before the consumer takes them.
                       0: no thread; stream_next() generates the batch. Ignored without a generator */
    uint32_t held;  /* number of batches that the consumer holds at a time; 0: one */

    /* Allocate the memory of a batch, as in struct set_stream_request; NULL: 64-byte aligned host memory. */
    enum status (*allocate)(size_t bytes, void **memory);
    void (*deallocate)(void *memory);
};

/* Returns the hash stream_batch.read of a sample for a number of the plan. `sample` is the generator's
 * number, or the number of the sample in memory. */
static inline uint64_t generated_stream_hash(uint64_t sample, uint32_t number)
{
    return stream_hash(sample ^ (uint64_t)number << 32);
}

/* Returns a value of `fresh` with which each epoch has new samples: an increment of sample numbers per epoch.
 * It is at least 2^32, so the samples of later epochs have numbers above those of all sets. It is a multiple
 * of the number of classes, so each sample keeps its label. */
static inline uint64_t generated_stream_fresh(uint32_t classes)
{
    return ((UINT64_C(1) << 32) + classes - 1) / classes * classes;
}

FDSL_C_BEGIN

/* Opens a stream. Generates nothing before the first stream_next(): a caller may seek before it.
 * STATUS_EXHAUSTED or STATUS_TOO_LARGE if memory or threads run out; `*stream` is then NULL. Values are in
 * host memory: stream_release() refuses an event (STATUS_USAGE). A failure of the generator ends the stream
 * at its step; later calls return it again, until a seek. Statistics: `generate_s` is the time of generating;
 * wait_s includes it if stream_next() generates. */
enum status generated_stream_open(const struct generated_stream_request *request, struct stream **stream);

FDSL_C_END

#endif
