/* What the GPU load variants share: workers, each with its order, its slots in device memory and its
 * checksum, and the delivery of whole batches, to a consumer where there is one. A variant adds how bytes get
 * there. */
#ifndef FDSL_CUDA_LOAD_DELIVERY_CUH
#define FDSL_CUDA_LOAD_DELIVERY_CUH

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>

#include <cuda_runtime.h>

#include "core/status.h"
#include "core/variant.h"
#include "load/arrays.h"
#include "load/device_memory.cuh"
#include "data/plain.h"
#include "load/input.h"
#include "load/verifier.h"
#include "load/unpack.cuh"

#define DELIVERY_LOST UINT32_MAX /* in queue->held: the slot's sample could not be read */

struct delivery;

/* Room for a batch: `batch` slots in a row. */
struct batch_buffer {
    cudaEvent_t ready; /* behind the kernel that unpacked its last sample */
    cudaEvent_t done;  /* the consumer's, behind the step on it, once it is handed over */
    uint64_t step;     /* the step's number on this consumer */
    uint32_t filled;   /* samples that have come: of a stream that is consumed */
    uint32_t count;    /* samples of the batch in it */
    bool waiting;      /* it has been delivered to a consumer, and must not be overwritten before `done` */
    bool handed;       /* the consumer has it. Under the delivery's lock */
};

/* Where the samples of a worker's share are delivered. */
struct output_queue {
    struct delivery *delivery;
    uint32_t number;    /* of the worker on this rank */
    struct order order; /* of the epoch under way */
    uint64_t epoch;
    cudaStream_t stream; /* its kernels, in order */

    /* On the device, by slot, and the checksum of the run: one of the delivery's. */
    uint8_t *tensor;
    int32_t *labels;
    uint64_t *hashes;
    struct checksum *checksum;

    uint32_t *held; /* the number of the sample in each slot */
    struct batch_buffer *buffers;

    /* Of samples that come in a stream, in batches of the run. Berths follow each other across epochs. */
    uint64_t base;             /* of the epochs before the one under way */
    uint64_t delivered, freed; /* as they became whole; and those whose slots may be written again */
    uint32_t first;            /* the slot of the epoch's first turn */

    struct losses losses; /* of the run: what could not be read */
    enum status status;
    bool told_off;      /* it failed because another did */
    char failure[1024]; /* why the run failed */

    /* To verify with */
    struct plain plain;
    uint8_t *wanted, *found, *read; /* a slot as it must be, and as it is; a member */

    void *own; /* the variant's */
};

struct delivery {
    const struct load *load;
    int device;
    uint32_t workers, slots, buffers; /* slots and buffers of a worker */
    uint64_t stride, slot_bytes;      /* of a slot, and what of it is values */
    struct convert convert;
    struct arrays arrays;
    struct array_sample *samples; /* arrays.samples on the device */
    struct output_queue *queues;
    struct checksum *checksums; /* of the run, by worker, on the device */
    struct verifier verifier;
    struct load_result result;

    /* Batches go to the consumer in strict turns over the workers, whoever is ready first: for a seed and a
     * number of workers their order is always the same. */
    std::mutex lock;
    std::condition_variable changed; /* what is under the lock, in a way that somebody may wait for */
    std::deque<uint32_t> *ready;     /* by worker: buffers that wait for their turn */
    uint64_t *left;                  /* by worker: batches that the run will still bring */
    uint32_t next;                   /* whose turn it is */
    uint64_t steps;                  /* handed over so far */
    std::atomic<bool> failed;        /* a worker has: the others stop */
};

/* Looks the samples up (packed: see load/arrays.h) and their slots' sizes, before anything is allocated. The
 * caller closes it, also after a failure. */
enum status delivery_begin(struct delivery *delivery, const struct resources *resources,
                           const struct load *load, bool packed, bool keyed, uint32_t workers);

/* Makes the workers with at least `slots` slots each, in whole batches. STATUS_USAGE where they, and
 * `more_bytes` that the variant will take, do not fit the device. */
enum status delivery_open(struct delivery *delivery, uint64_t slots, uint64_t more_bytes);
void delivery_close(struct delivery *delivery);

/* Before a run, and the run: worker by worker, each in a thread of its own, `read` reads all epochs.
 * STATUS_WRONG where what was delivered is not what the plain reader read. */
enum status delivery_ready(struct delivery *delivery, uint64_t number);
enum status delivery_run(struct delivery *delivery, uint64_t number,
                         enum status (*read)(struct output_queue *queue));

/* For `read`: calls `epoch` for one epoch after the other. */
enum status queue_each_epoch(struct output_queue *queue, enum status (*epoch)(struct output_queue *queue));

/* An epoch has been read, in which `lost` samples were lost. */
void queue_note(struct output_queue *queue, uint64_t lost);

/* fetch() of the variants. */
enum status delivery_fetch(struct delivery *delivery, struct load_result *result);

/* Fills a job of the kernel but for what is to be unpacked. */
struct unpack queue_job(const struct output_queue *queue);

/* STATUS_FAILED once another worker has failed: asked chunk by chunk, so that all stop soon. */
enum status queue_go_on(struct output_queue *queue);

/* Before slots are written, and before `held` is: the stream waits for the step that consumes what was
 * there. With --verify the host does, and looks whether the batch is still as it was delivered. */
enum status queue_reserve(struct output_queue *queue, uint32_t slot);

/* A batch is whole once the stream comes here: `count` samples from slot number `slot` on. */
enum status queue_deliver(struct output_queue *queue, uint32_t slot, uint32_t count);

/* With --verify: waits until the batch of `count` slots from `slot` on is ready, and looks at its bytes,
 * labels and values, sample by sample; `seen` of the load counts those that are right. */
enum status queue_check(struct output_queue *queue, uint32_t slot, uint32_t count);

/* look() of the variants' traits: the values and labels in the slots of all workers, or in some thousands of
 * each where they have more. */
enum status delivery_look(struct delivery *delivery, uint64_t *wrong);

/* The lock, taken where there is a consumer: without one no worker touches what is another's. */
static inline std::unique_lock<std::mutex> delivery_guard(struct delivery *delivery)
{
    std::unique_lock<std::mutex> guard(delivery->lock, std::defer_lock);
    if (delivery->load->control->consumer)
        guard.lock();
    return guard;
}

/* For samples that come in a stream, in whatever order chunks of it arrive. All under delivery_guard(), but
 * for queue_slot(), which asks for nothing that changes within an epoch. */

/* The slot where arrival number `arrival` of the epoch belongs; and the first batch of the run that it, or
 * one of its window, may be in. Behind the last arrival: the next epoch's first. */
uint32_t queue_slot(const struct output_queue *queue, uint32_t arrival);
uint64_t queue_batch(const struct output_queue *queue, uint32_t arrival);

/* `count` samples from this arrival on are there; then batches that are whole are delivered, in their order.
 */
void queue_fill(struct output_queue *queue, uint32_t arrival, uint32_t count);
enum status queue_advance(struct output_queue *queue);

/* All batches of the epoch have been delivered: buffers follow on those of the next. */
void queue_next_epoch(struct output_queue *queue);

/* Whether the slots of all turns below `turns` that have not been delivered may be written. If not, and
 * queue_handed() says that the consumer has the oldest batch, queue_free() waits for its step and frees its
 * slots: without the lock, one caller at a time. */
bool queue_make_room(struct output_queue *queue, uint64_t turns);
bool queue_handed(const struct output_queue *queue);
enum status queue_free(struct output_queue *queue);

/* Consecutive arrivals from a multiple of this on are brought in together: a window, or several until
 * `target` samples are in them. Slots of each of `workers`, for one batch; beside a consumer, for the next as
 * well.
 */
uint64_t delivery_span(const struct load *load, uint64_t target);
uint64_t delivery_stream_slots(const struct load *load, uint32_t workers, uint64_t span);

/* A sample could not be read, and the message says why: STATUS_OK where it may be skipped, else the failure.
 */
enum status queue_lose(struct output_queue *queue, uint32_t sample, enum status status);

#endif
