/* The part that all GPU load variants share. A worker is a thread that reads a share of the samples. Each
 * worker has an order, a checksum and slots in device memory; a slot holds one converted sample. Complete
 * batches are delivered to a consumer, if there is one. Each variant implements its own transfer of the bytes
 * to the device. */
#ifndef FDSL_CUDA_LOAD_DELIVERY_CUH
#define FDSL_CUDA_LOAD_DELIVERY_CUH

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>

#include <cuda_runtime.h>

#include "core/status.h"
#include "core/variant.h"
#include "load/arrays.h"
#include "load/device_memory.cuh"
#include "data/plain.h"
#include "load/input.h"
#include "load/verifier.h"
#include "load/unpack.cuh"

#define DELIVERY_LOST UINT32_MAX /* in queue->held: no sample has arrived, or it could not be read */

struct delivery;

/* Room for one batch: `batch` consecutive slots. */
struct batch_buffer {
    cudaEvent_t ready; /* recorded after the kernel that unpacks the batch's last sample */
    cudaEvent_t done;  /* the consumer's event after the step on the batch; valid if `handed` */
    uint64_t step;     /* number of the step on the batch; valid if `handed` */
    uint32_t filled;   /* number of samples that have arrived, for samples that arrive as a stream */
    uint32_t count;    /* samples in the batch */
    bool waiting;      /* delivered for the consumer; must not be overwritten before `done` */
    bool handed;       /* the consumer has received it; protected by the delivery's lock */
};

/* Host memory for --verify: a group of slots copied from the device, and the expected content of a slot. */
struct delivery_check {
    uint8_t *tensor;
    int32_t *labels;
    uint64_t *hashes;
    uint8_t *wanted, *read; /* expected values of a slot; bytes of a member as read */
};

/* The output queue of one worker. It receives the samples of the worker's share. */
struct output_queue {
    struct delivery *delivery;
    uint32_t number;    /* worker number on this rank */
    struct order order; /* order of the current epoch */
    uint64_t epoch;
    cudaStream_t stream; /* runs the kernels that unpack into this queue's slots */

    /* Device memory, per slot; `checksum` is this worker's element of delivery->checksums. */
    uint8_t *tensor;
    int32_t *labels;
    uint64_t *hashes;
    struct checksum *checksum;

    uint32_t *held; /* per slot: number of its sample, or DELIVERY_LOST */
    struct batch_buffer *buffers;

    /* For samples that arrive as a stream. Batches are counted from the start of the run. Buffers are reused
     * in a circle, also across epochs. */
    uint64_t base;             /* batches of all epochs before the current one */
    uint64_t delivered, freed; /* batches delivered so far; batches whose slots may be overwritten */
    uint32_t first;            /* slot of the epoch's first sample */

    struct losses losses; /* samples of the run that could not be read */
    enum status status;
    bool stopped;       /* failed only because another worker failed */
    char failure[1024]; /* error message, if the run failed */

    /* For --verify */
    struct plain plain;
    struct delivery_check check;

    void *own; /* data of the variant */
};

struct delivery {
    const struct load *load;
    int device;
    uint32_t workers, slots, buffers; /* slots and buffers per worker */
    uint64_t stride, slot_bytes;      /* size of a slot; bytes of values in it */
    struct convert convert;
    struct arrays arrays;
    struct array_sample *samples; /* copy of arrays.samples on the device */
    struct output_queue *queues;
    struct checksum *checksums; /* per worker, for the current run, on the device */
    struct verifier verifier;
    struct load_result result;

    /* The consumer receives batches in rotation over the workers, no matter which worker is ready first. The
     * order of batches therefore depends only on the seed and the number of workers. */
    std::mutex lock;
    std::condition_variable changed; /* signals changes of state under the lock */
    std::deque<uint32_t> *ready;     /* per worker: buffers that wait for their turn */
    uint64_t *left;                  /* per worker: batches still to come in this run */
    uint32_t next;                   /* worker whose turn it is */
    uint64_t steps;                  /* batches passed to the consumer so far */
    std::atomic<bool> failed;        /* a worker has failed, so the others stop */
};

/* Examines the samples and computes slot sizes; allocates no device memory yet. `packed`: see load/arrays.h.
 * `keyed`: see load/order.h. The caller closes the delivery, also after a failure. */
enum status delivery_begin(struct delivery *delivery, const struct resources *resources,
                           const struct load *load, bool packed, bool keyed, uint32_t workers);

/* Creates the workers' queues with at least `slots` slots each, rounded up to whole batches. The variant will
 * allocate `more_bytes` in addition. STATUS_USAGE if all this does not fit in device memory. */
enum status delivery_open(struct delivery *delivery, uint64_t slots, uint64_t more_bytes);
void delivery_close(struct delivery *delivery);

/* Implements setup() of the variants: creates a STATE, whose first member is its delivery, and calls OPEN
 * with it. */
template <class STATE,
          enum status (*OPEN)(STATE *state, const struct resources *resources, const struct load *load)>
static enum status delivery_setup(const struct resources *resources, const void *input, void **state)
{
    STATE *created = new (std::nothrow) STATE();
    *state = created;
    return created ? OPEN(created, resources, static_cast<const struct load *>(input))
                   : status_set(STATUS_FAILED, "out of memory");
}

/* Implements ready() of the variants: prepares run `number`. The first member of `state` is the delivery. */
enum status delivery_ready(void *state, uint64_t number);

/* Performs a run. Each worker calls `read` once, in its own thread; `read` reads the worker's share of all
 * epochs. STATUS_WRONG if the delivered samples differ from those of the plain reader (data/plain.h). */
enum status delivery_run(struct delivery *delivery, uint64_t number,
                         enum status (*read)(struct output_queue *queue));

/* Helper for `read`: calls `epoch` for each epoch and records the epoch's end. */
enum status queue_each_epoch(struct output_queue *queue, enum status (*epoch)(struct output_queue *queue));

/* Records the end of an epoch in which `lost` samples were lost. */
void queue_note(struct output_queue *queue, uint64_t lost);

/* Implements fetch() of the variants. `result` points to a struct load_result. */
enum status delivery_fetch(void *state, void *result);

/* Returns arguments for unpack_launch(), complete except for the samples to unpack. */
struct unpack queue_job(const struct output_queue *queue);

/* Returns STATUS_FAILED if another worker has failed. Call before each chunk, so that workers stop soon. */
enum status queue_check_failed(struct output_queue *queue);

/* Call before writing to a slot or its entry in `held`. Makes the queue's stream wait for the step on the
 * batch that the slot belongs to. With --verify, the host waits for that step and then verifies the batch. */
enum status queue_reserve(struct output_queue *queue, uint32_t slot);

/* Delivers a batch that is complete at this point of the queue's stream: `count` samples from `slot` on. */
enum status queue_deliver(struct output_queue *queue, uint32_t slot, uint32_t count);

/* With --verify: waits until the batch of `count` slots from `slot` on is ready, and compares its values,
 * labels and hashes sample by sample. Counts correct samples in load->control->seen. */
enum status queue_check(struct output_queue *queue, uint32_t slot, uint32_t count);

/* Frees the buffers and zeroes the struct. */
void delivery_check_free(struct delivery_check *check);

/* Implements verify_slots() of the variants' traits: counts slots with wrong values, labels or hashes. Checks
 * all slots, or a few thousand per worker if there are more. */
enum status delivery_verify_slots(void *state, uint64_t *wrong);

/* Takes the lock if there is a consumer. Without a consumer, no worker touches the state of another. */
static inline std::unique_lock<std::mutex> delivery_guard(struct delivery *delivery)
{
    std::unique_lock<std::mutex> guard(delivery->lock, std::defer_lock);
    if (delivery->load->control->consumer)
        guard.lock();
    return guard;
}

/* ---- Samples that arrive as a stream, in chunks in any order ----
 *
 * Arrival i is the i-th sample that is read from the worker's segments in the epoch. Hold delivery_guard()
 * when calling queue_batch(), queue_fill(), queue_advance(), queue_make_room() or queue_handed(). */

/* queue_slot() returns the slot of arrival `arrival` of the epoch. queue_batch() returns the number of the
 * first batch that may contain this arrival or another one from the same shuffle buffer. If `arrival` is the
 * end of the epoch, this is the first batch of the next epoch. */
uint32_t queue_slot(const struct output_queue *queue, uint32_t arrival);
uint64_t queue_batch(const struct output_queue *queue, uint32_t arrival);

/* queue_fill() records that `count` samples from `arrival` on are present. queue_advance() delivers batches
 * that are complete, in order. */
void queue_fill(struct output_queue *queue, uint32_t arrival, uint32_t count);
enum status queue_advance(struct output_queue *queue);

/* Ends an epoch whose batches are all delivered. The next epoch continues with the following buffers. */
void queue_next_epoch(struct output_queue *queue);

/* queue_make_room() returns whether the slots of all samples with an index below `end` may be written. To
 * make room, it frees slots of batches whose steps have ended, except with --verify. If it returns false,
 * wait until queue_handed() returns true: the consumer then has the oldest batch. Then call queue_free(),
 * which waits for the step on that batch, verifies the batch with --verify, and frees its slots. Call
 * queue_free() without the lock, and from one thread at a time. */
bool queue_make_room(struct output_queue *queue, uint64_t end);
bool queue_handed(const struct output_queue *queue);
enum status queue_free(struct output_queue *queue);

/* delivery_span() returns the number of consecutive arrivals in a span; a chunk never crosses the end of its
 * span. A span consists of the fewest whole shuffle buffers that hold `target` samples. Without shuffling, it
 * has 4 times `target` samples, or the whole set if that is smaller. delivery_stream_slots() returns the
 * number of slots per worker: one batch plus one span and, with a consumer, additionally the larger of the
 * two. */
uint64_t delivery_span(const struct load *load, uint64_t target);
uint64_t delivery_stream_slots(const struct load *load, uint32_t workers, uint64_t span);

/* Records that a sample could not be read; the error message is already set. STATUS_OK if it may be skipped,
 * otherwise `status`. */
enum status queue_lose(struct output_queue *queue, uint32_t sample, enum status status);

#endif
