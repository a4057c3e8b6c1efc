/* What the load variants share: threads, each with its order, its buffer and its checksum, and the delivery
 * of whole batches. A variant adds how a sample gets from its file into a slot. */
#ifndef FDSL_CPU_LOAD_READER_H
#define FDSL_CPU_LOAD_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/variant.h"
#include "load/input.h"
#include "load/verifier.h"

#define READER_LOST UINT32_MAX /* in worker->held: the slot's sample could not be read */

struct reader;

/* One thread. Its buffer is slots of reader->stride bytes; a batch is `batch` slots in a row. */
struct worker {
    const struct load *load;
    struct reader *reader;
    struct order order; /* of the epoch under way */
    uint64_t epoch;
    uint8_t *slots;
    uint32_t *held;     /* the number of the sample in each slot */
    uint32_t delivered; /* of those that arrive in a stream: turns delivered so far */

    struct checksum checksum; /* delivered */
    struct losses losses;     /* what could not be read */
    struct latency *latency;  /* LOAD_CALLS of them */
    double decode_s, augment_s;
    uint8_t *decoded; /* room of image_decode() */
    size_t decoded_bytes;
    uint8_t *images; /* of the batch in delivery, as they came out of decoding and augmentation, one behind
                      * the other: what a consumer gets */
    size_t images_bytes, images_room;
    int32_t *labels; /* room for a batch; theirs, where they are learnt from */
    uint32_t label_count;
    uint64_t image_count; /* of the run */

    enum status status;
    char failure[1024]; /* why the run failed */
};

struct reader {
    const struct load *load;
    int threads;
    size_t stride;
    uint32_t slots; /* a worker's */
    struct worker *workers;
    bool imageless; /* a run found no image to decode, and that was said */
    struct verifier verifier;
    uint8_t *set; /* the working set as memory, for reader_copy(): set_bytes of room, copied_bytes in it */
    size_t set_bytes, copied_bytes;
    struct load_result result;
};

/* Sets up `threads` workers with buffers of at least `slots` slots each, in whole batches. STATUS_FAILED with
 * nothing left allocated. */
enum status reader_open(struct reader *reader, const struct load *load, int threads, uint32_t slots);
void reader_close(struct reader *reader);

/* The slots that samples arriving in the order of shards need, so that each is written once, where it is
 * delivered. */
uint32_t reader_stream_slots(const struct load *load);

/* ready() of the variants, whose states begin with their reader: the page cache, and what the run must
 * deliver.
 */
enum status reader_ready(void *state, uint64_t number);

/* The run: `epoch` reads what worker->order says. STATUS_WRONG where what was delivered is not what the plain
 * reader read. */
enum status reader_run(struct reader *reader, uint64_t number, enum status (*epoch)(struct worker *worker));

/* fetch() of the variants: a struct load_result. */
enum status reader_fetch(void *state, void *result);

/* copy() of their traits: copies of the working set by the same threads into the same buffers, a batch at a
 * time and a sample at a time into its slot, of which the faster is the wall for any loader. The set is the
 * shards, mapped from the page cache, or as many bytes of plain memory. */
enum status reader_copy(void *state, double *bytes_per_s);

/* look() of their traits: the samples in all slots. */
enum status reader_look(void *state, uint64_t *wrong);

/* A batch is whole: `count` samples from slot number `slot` on. */
enum status worker_deliver(struct worker *worker, uint32_t slot, uint32_t count);

/* The slot where the arrival belongs, and the end of its filling. Batches are delivered
 * as they become whole. */
uint8_t *worker_slot(struct worker *worker, uint32_t arrival);
enum status worker_arrived(struct worker *worker, uint32_t arrival, uint32_t sample, bool lost);

/* A sample could not be read or decoded, and the message says why: STATUS_OK where it may be skipped, else
 * the failure. */
enum status worker_lose(struct worker *worker, uint32_t sample, enum status status);

/* Memory in huge pages where there are some, touched. NULL when there is none. */
void *buffer_open(size_t bytes);
void buffer_close(void *buffer, size_t bytes);

#endif
