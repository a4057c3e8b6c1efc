/* Streams of mixtures whose batches are in device memory (data/mixture.h): one kernel copies the samples of
 * the batches of all sources to their places in the mixed batch. Also a stream of samples that the device
 * generates, as a source. The thread that calls the functions never waits for the work on a batch that it
 * asks for: stream_next() enqueues this work and returns the event `ready`.
 *
 *     generator    gen 1 ───────────── gen 2 (after mix 0) ──────────
 *     device stream  decode 1 ─────────── decode 2 ───────────────────  (common/device_stream.cuh)
 *     mixing       mix 0 ── (after gen 1 and decode 1) ── mix 1 ──────
 *     consumer     wait for ready 0 ─ step 0 ─ done 0 ─ wait for ready 1 ─ step 1 ─ done 1 ──
 *
 * A slot has pinned memory for the numbers of its batch. Before it is written again, the host waits for the
 * copy of the batch that had the slot before, at least two batches ago. */
#ifndef FDSL_CUDA_COMMON_DEVICE_MIX_CUH
#define FDSL_CUDA_COMMON_DEVICE_MIX_CUH

#include <stddef.h>
#include <stdint.h>

#include "core/generator.h"
#include "core/status.h"
#include "core/stream.h"
#include "data/mixture.h"

struct device_mix_request {
    const struct mixture *mixture;           /* must outlive the stream */
    struct mixture_plans *plans;             /* taken over */
    struct stream *streams[MIXTURE_SOURCES]; /* taken over; one per source, on the current device, with its
                                                plan. Their labels in host memory are used */
    uint32_t capacity;                       /* largest number of samples in a batch */
    size_t sample_bytes;
    uint32_t held; /* number of batches that the consumer holds at a time, at least 1 */
};

/* Opens the stream of a mixture on the current device. `samples.values` and `samples.labels` of its batches
 * are in device memory; `numbers` are positions. A failure of a source ends the stream at its step. If the
 * stream cannot be opened, closes what it would have taken over. stream_close() waits until its work is
 * complete. */
enum status device_mix_open(const struct device_mix_request *request, struct stream **stream);

/* Returns the numbers of a batch in device memory. They are complete with the batch. */
const uint32_t *device_mix_numbers(struct stream *stream, const struct stream_batch *batch);

/* Returns the device memory that the stream has allocated, without that of its sources, in bytes. */
uint64_t device_mix_memory_bytes(struct stream *stream);

struct device_generated_request {
    struct generator *generator; /* on the current device, for plan.capacity samples; taken over */
    bool host_numbers;           /* the generator needs the numbers in host memory, too */
    uint64_t (*number)(const void *context, uint64_t epoch, uint32_t number); /* as in struct
                                                                                 generated_stream_request */
    /* Returns the label of a sample of the generator. */
    uint64_t (*label)(const void *state, uint64_t sample);
    const void *label_state;
    size_t sample_bytes;
    enum dtype type;
    struct stream_plan plan;
};

/* Opens a stream of generated samples on the current device. One batch is generated ahead. `samples.labels`
 * is NULL: labels are in host memory only. Otherwise as device_mix_open(). */
enum status device_generated_open(const struct device_generated_request *request, struct stream **stream);

#endif
