/* A stream delivers batches of samples, without end, epoch after epoch. Any source feeds any consumer: a
 * stream is a table of functions followed by its state, so neither side knows the other. The batches are a
 * pure function of the plan; they depend neither on the number of threads nor on their timing.
 *
 * The caller takes the next batch with stream_next(), uses it, and returns it with stream_release(). Between
 * both calls, the batch does not change. The stream prepares the following batches at the same time. After
 * the first batch, its own buffers grow only for larger images. Decoders, opened files and shards of a URL
 * still use memory. Batches may be released in any order. Only one thread may call the functions of a stream,
 * except stream_release(), stream_cancel() and stream_stats(), which any thread may call.
 *
 * This header is plain C and includes no CUDA header. */
#ifndef FDSL_CORE_STREAM_H
#define FDSL_CORE_STREAM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

#define STREAM_MASKED  (-1) /* the label of a broken sample, whose values are zero */
#define STREAM_IGNORED 255  /* all pixels of the mask of a broken sample, if samples have masks */

/* A batch of a stream. All arrays belong to the stream. */
struct stream_batch {
    struct batch samples;    /* samples.count is 0 if this rank has no sample in the step */
    const uint32_t *numbers; /* of the samples, in host memory */
    const int32_t *labels;   /* of the samples, in host memory; stream_next() sets it to samples.labels unless
                                the batch is on a device */
    const uint64_t
        *read; /* per sample: a hash of its number and of what was read or generated for it, in host memory */
    const int32_t *partners; /* the labels of the samples that they are mixed with (data/mixing.h), in host
                                memory; NULL: they are not mixed */
    float share;             /* weight of each sample in its mixture */
    const uint8_t *masks;    /* of the samples, one after another, where their values are; NULL: none */
    uint32_t masked;         /* number of broken samples among them */
    uint64_t epoch, step;    /* the step is counted within the epoch */
    bool last;               /* the last step of the epoch */
    void *ready;   /* a cudaEvent_t that is recorded when the values are complete; NULL: they are complete */
    uint32_t slot; /* for stream_release() */
};

/* The samples of every step. */
struct stream_plan {
    uint64_t steps;    /* per epoch, at least 1 */
    uint32_t capacity; /* largest number of samples in a batch, at least 1 */

    /* Writes the numbers of the samples of a step to `numbers`, which has room for `capacity`, and returns
     * how many there are. A number may occur more than once. Must be a pure function. The threads of the
     * stream call it, so it must be thread safe. */
    uint32_t (*list)(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers);
    const void *context; /* must outlive the stream */

    /* If true, the plan of an epoch is known only when its first batch is requested, for example because the
     * shares of ranks change. The stream then prepares no batch of the next epoch. */
    bool by_epoch;
};

/* The position of a consumer: the next batch that it will take. A stream continues with the same batches
 * after stream_seek() to a saved position, in any process and on any number of threads. */
struct stream_position {
    uint64_t epoch, step;
};

/* Counts since the stream was opened. */
struct stream_stats {
    uint64_t batches, samples, masked; /* delivered; without batches that were prepared and not taken */
    uint64_t bytes;                    /* read from files, of the members of samples */
    double wait_s;                     /* time that stream_next() waited */
    double read_s, decode_s;           /* sums over all threads */
    double generate_s;                 /* time of generating samples */
    double ready;                      /* mean number of finished batches at the calls of stream_next() */
    uint64_t jpeg_warnings;            /* accepted warnings of libjpeg */
    uint64_t memory_bytes;             /* allocated for batches and by threads */
    uint64_t shard_bytes;              /* size of the shards at a URL that are held in memory now */
    uint64_t resident;                 /* samples whose files stay in memory after they were read */
    uint64_t resident_device;          /* samples that are in device memory now */
};

/* Mixes the bits of a word. Words that differ give different hashes. */
FDSL_HD uint64_t stream_hash(uint64_t word)
{
    word = (word ^ word >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ word >> 27) * UINT64_C(0x94D049BB133111EB);
    return word ^ word >> 31;
}

/* ---- For implementations ---- */

/* Returns the position after `at`. */
static inline struct stream_position stream_after(const struct stream_plan *plan, struct stream_position at)
{
    const bool last = at.step + 1 >= plan->steps;
    at.epoch += last;
    at.step = last ? 0 : at.step + 1;
    return at;
}

#define STREAM_EPOCHS UINT32_MAX /* epochs have smaller numbers, because random draws take 32 bits */

/* STATUS_USAGE if the plan does not have a step. */
static inline enum status stream_check_position(const struct stream_plan *plan, struct stream_position at)
{
    if (at.epoch >= STREAM_EPOCHS)
        return status_set(STATUS_USAGE, "epoch %llu does not exist: the last one is 2^32 - 2",
                          (unsigned long long)at.epoch);
    return at.step < plan->steps
               ? STATUS_OK
               : status_set(STATUS_USAGE, "step %llu of epoch %llu does not exist: an epoch has %llu steps",
                            (unsigned long long)at.step, (unsigned long long)at.epoch,
                            (unsigned long long)plan->steps);
}

#define STREAM_ALIGN 256 /* of the values in host memory, in bytes: what DLPack asks for */

static inline size_t stream_aligned(size_t bytes)
{
    return (bytes + STREAM_ALIGN - 1) / STREAM_ALIGN * STREAM_ALIGN;
}

/* Allocates aligned host memory, which the caller frees. `bytes` is a multiple of STREAM_ALIGN. */
static inline enum status stream_allocate(size_t bytes, void **memory)
{
    *memory = aligned_alloc(STREAM_ALIGN, bytes);
    return ALLOCATED(*memory, "out of memory for a batch of %zu bytes", bytes);
}

/* ---- The interface ---- */

struct stream;

struct stream_type {
    enum status (*next)(struct stream *stream, struct stream_batch *batch);
    bool (*wait)(struct stream *stream, double seconds); /* NULL: stream_wait() returns true at once */
    enum status (*release)(struct stream *stream, const struct stream_batch *batch, void *done_event);
    enum status (*seek)(struct stream *stream, struct stream_position to);
    void (*stats)(struct stream *stream, struct stream_stats *stats);
    void (*cancel)(struct stream *stream);
    void (*close)(struct stream *stream);
};

/* The first member of each implementation's own struct. */
struct stream {
    const struct stream_type *type;
    struct stream_position at; /* the next batch; kept by stream_next() and stream_seek() */
};

/* Waits until the next batch is complete (on a device: enqueued) and describes it. If a sample cannot be
 * read, returns the failure at its step, after all earlier batches; later calls return it again.
 * STATUS_FAILED also after stream_cancel(). */
static inline enum status stream_next(struct stream *stream, struct stream_batch *batch)
{
    TRY(stream->type->next(stream, batch));
    if (!batch->ready)
        batch->labels = batch->samples.labels;
    stream->at = batch->last ? (struct stream_position){batch->epoch + 1, 0}
                             : (struct stream_position){batch->epoch, batch->step + 1};
    return STATUS_OK;
}

/* Waits until stream_next() would return at once, at most this long. Returns whether it would. For callers
 * that must handle signals while they wait. */
static inline bool stream_wait(struct stream *stream, double seconds)
{
    return !stream->type->wait || stream->type->wait(stream, seconds);
}

/* Returns a batch. The stream may overwrite it after `done_event`, a recorded cudaEvent_t; NULL means
 * immediately. */
static inline enum status stream_release(struct stream *stream, const struct stream_batch *batch,
                                         void *done_event)
{
    return stream->type->release(stream, batch, done_event);
}

/* Makes `to` the next batch. Discards the batches that were prepared for another position. Batches that the
 * caller holds stay valid. STATUS_USAGE if the epoch does not have the step. Clears a failure. */
static inline enum status stream_seek(struct stream *stream, struct stream_position to)
{
    TRY(stream->type->seek(stream, to));
    stream->at = to;
    return STATUS_OK;
}

static inline void stream_stats(struct stream *stream, struct stream_stats *stats)
{
    stream->type->stats(stream, stats);
}

/* Ends a waiting stream_next(), and makes later calls of it fail, until stream_seek(). Returns at once. */
static inline void stream_cancel(struct stream *stream)
{
    stream->type->cancel(stream);
}

/* Stops the threads and frees the stream with all its batches. On a device, all work on them must be
 * complete. NULL is allowed. */
static inline void stream_close(struct stream *stream)
{
    if (stream)
        stream->type->close(stream);
}

/* Copies the next batch into the caller's memory and releases it. `values` has room for plan.capacity
 * samples at the batches' stride; `labels` for as many labels, or is NULL. Sets `*count` to the number of
 * samples. STATUS_UNAVAILABLE if batches are on a device. */
static inline enum status stream_fill(struct stream *stream, void *values, int32_t *labels, uint32_t *count)
{
    struct stream_batch batch;
    enum status status = STATUS_OK;
    *count = 0;
    TRY(stream_next(stream, &batch));
    const struct batch *samples = &batch.samples;
    if (batch.ready)
        status = status_set(STATUS_UNAVAILABLE, "batches in device memory cannot be copied by the host");
    else if (labels && samples->count > 0 && !samples->labels)
        status = status_set(STATUS_UNAVAILABLE, "the stream has no labels");
    if (status == STATUS_OK && samples->count > 0) {
        memcpy(values, samples->values, samples->bytes);
        if (labels)
            memcpy(labels, samples->labels, samples->count * sizeof *labels);
        *count = samples->count;
    }
    const struct failure failure = status_save(status);
    TRY(stream_release(stream, &batch, NULL));
    return status == STATUS_OK ? STATUS_OK : status_restore(&failure);
}

FDSL_C_END

#endif
