/* Common part of the CPU load variants: the threads, their sample orders, buffers and checksums, and the
 * delivery of complete batches. A variant adds the code that reads a sample from its file into a slot. */
#ifndef FDSL_CPU_LOAD_READER_H
#define FDSL_CPU_LOAD_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/variant.h"
#include "load/input.h"
#include "load/verifier.h"

/* ---- The bandwidth of copies: an upper bound on the rate of any loader that copies every byte with as many
 * threads (reader.c) ---- */

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

/* ---- Readers ---- */

#define READER_LOST UINT32_MAX /* value of worker->held[i] if slot i holds no sample */

/* Latency histogram of system calls. Each range from 2^n to 2^(n+1) ns has 32 bins, so percentiles are
 * accurate to 3 %. The size is fixed, and adding a value takes a few instructions. */
#define LATENCY_BINS (60 * 32)

struct latency {
    uint64_t count, bins[LATENCY_BINS];
};

/* Adds a duration in nanoseconds. */
void latency_add(struct latency *latency, uint64_t duration_ns);

/* Returns the p-quantile in seconds, 0 <= p <= 1: the middle of its bin, or 0 if the histogram is empty. */
double latency_quantile_s(const struct latency *latency, double p);

struct reader;

/* State of one thread. Its buffer has slots of reader->stride bytes. A batch is up to load->given->batch
 * consecutive slots. */
struct worker {
    const struct load *load;
    struct reader *reader;
    struct order order; /* order of the current epoch */
    uint64_t epoch;
    uint8_t *slots;
    uint32_t *held;     /* per slot: number of the sample that it holds, or READER_LOST */
    uint32_t delivered; /* number of samples of the epoch in delivered batches; not used by all variants */
    uint32_t next;      /* atomic, for worker_take(): index of the first sample that no thread has taken */

    struct checksum checksum; /* of delivered samples */
    struct losses losses;     /* samples that could not be read or decoded */
    struct latency *latency;  /* LOAD_CALLS histograms */
    double decode_s, augment_s;
    struct image_scratch decoded;
    uint8_t *images; /* decoded or augmented images of the batch, stored consecutively for the consumer */
    size_t images_bytes, images_room;

    struct failure failure; /* of the run; STATUS_OK if it succeeded */
};

/* Reads and delivers the samples of worker->order. Each variant passes such a function to reader_open(). */
typedef enum status reader_epoch(struct worker *worker);

struct reader {
    const struct load *load;
    reader_epoch *epoch;
    int threads;
    size_t stride;
    uint32_t slots; /* per worker */
    struct worker *workers;
    struct verifier verifier;
    struct copier copier; /* for reader_copy() */
    struct load_result result;
};

/* Sets up `threads` workers with at least `slots` slots each, in whole batches. A variant that allocates more
 * buffers adds their bytes to result.memory_bytes. The caller closes `reader`, even after a failure. */
enum status reader_open(struct reader *reader, const struct load *load, int threads, uint32_t slots,
                        reader_epoch *epoch);
void reader_close(struct reader *reader);

/* Returns the distance of the slots of a worker in bytes. */
size_t reader_stride(const struct load *load);

/* Returns the number of slots per worker for a variant that reads samples in shard order. With this number of
 * slots, a sample is copied only once, directly into its slot of a batch. */
uint32_t reader_stream_slots(const struct load *load);

/* Implements ready() of the variants. Prepares the page cache and computes the expected checksum. Here, and
 * in all functions up to reader_verify_slots(), `state` is a struct whose first member is a struct reader. */
enum status reader_ready(void *state, uint64_t number);

/* Implements run() of the variants: each worker calls reader->epoch(). STATUS_WRONG if the checksum of the
 * delivered samples differs from the plain reader's (data/plain_reader.h). */
enum status reader_run(void *state, uint64_t number, struct run_time *time);

/* Implements fetch() of the variants. `result` is a struct load_result. */
enum status reader_fetch(void *state, void *result);

/* The members of struct variant that most variants have in common. */
#define READER_VARIANT(traits_) \
    .platform = "cpu", .traits = &(traits_), .ready = reader_ready, .run = reader_run, .fetch = reader_fetch

/* Implements copy() of the variants' struct load_traits. The worker threads copy the working set into their
 * buffers (copier_measure()). */
enum status reader_copy(void *state, double *bytes_per_s);

/* Implements verify_slots() of the variants' struct load_traits. Checks the samples in all slots. */
enum status reader_verify_slots(void *state, uint64_t *wrong);

/* Delivers a complete batch: the samples in the `count` consecutive slots from `slot` on. Decodes them if
 * requested, adds them to the checksum, and passes the batch to the consumer, if there is one. */
enum status worker_deliver(struct worker *worker, uint32_t slot, uint32_t count);

/* worker_take() takes the next samples of a share, at most a batch: `*count` from index `*first` of
 * share->order on. Returns false if none is left. A thread whose own share is finished may take samples of
 * others, if worker_helps(): if there are other threads, batches have no consumer, and any lost sample ends
 * the run. Then it also takes at most half of what is left, rounded up. So threads end at nearly the same
 * time, even if there are fewer batches than threads. */
bool worker_take(struct worker *share, uint32_t *first, uint32_t *count);
bool worker_helps(const struct worker *worker);

/* These functions are for variants that read samples in shard order. `arrival` counts the samples read in the
 * epoch, from 0. worker_slot() returns the slot to write the sample to. worker_arrived() records that the
 * slot is filled, or that the sample is lost, and delivers the batches that are complete. */
uint8_t *worker_slot(struct worker *worker, uint32_t arrival);
enum status worker_arrived(struct worker *worker, uint32_t arrival, uint32_t sample, bool lost);

/* Records that a sample could not be read or decoded; the error message is already set. Returns STATUS_OK if
 * the sample may be skipped, otherwise `status`. */
enum status worker_lose(struct worker *worker, uint32_t sample, enum status status);

/* Allocates zeroed memory, in huge pages if available, and touches every page. Returns NULL if memory runs
 * out. The caller frees it with buffer_close() and the same size. */
void *buffer_open(size_t bytes);
void buffer_close(void *buffer, size_t bytes);

/* Returns the number of bytes that buffer_open(bytes) allocates: whole huge pages. */
size_t buffer_allocated(size_t bytes);

#endif
