/* What the GPU load variants share: workers, each with its order, its slots in device memory and its tally,
 * and the delivery of whole batches, to a consumer where there is one. A variant adds how bytes get there. */
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
#include "load/load.h"
#include "load/plain.h"
#include "load/proof.h"
#include "load/unpack.cuh"

#define DELIVERY_LOST UINT32_MAX /* in outlet->held: the slot's sample could not be read */

struct delivery;

/* Room for a batch: `batch` slots in a row. */
struct berth {
    cudaEvent_t ready;    /* behind the kernel that unpacked its last sample */
    cudaEvent_t consumed; /* behind the step on it, once it is handed over */
    uint32_t count;       /* samples of the batch in it */
    bool waiting; /* it has been delivered to a consumer, and must not be overwritten before `consumed` */
    bool handed;  /* the consumer has it: `consumed` is recorded. Under the delivery's lock */
};

/* Where a worker's samples are delivered. */
struct outlet {
    struct delivery *delivery;
    uint32_t number;    /* of the worker on this rank */
    struct order order; /* of the epoch under way */
    uint64_t epoch;
    cudaStream_t stream; /* its kernels, in order */

    /* On the device, by slot, and the tally of the run. */
    uint8_t *tensor;
    int32_t *labels;
    uint64_t *hashes;
    struct tally *tally;

    uint32_t *held; /* the number of the sample in each slot */
    struct berth *berths;
    uint32_t delivered; /* turns delivered so far */

    struct tally run;     /* of the latest run: delivered */
    struct losses losses; /* and what could not be read */
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
    uint32_t workers, slots, berths; /* slots and berths of a worker */
    uint64_t stride, slot_bytes;     /* of a slot, and what of it is values */
    struct convert convert;
    struct arrays arrays;
    struct array_sample *samples; /* arrays.samples on the device */
    struct outlet *outlets;
    struct proof proof;
    struct load_result result;

    /* Batches go to the consumer in strict turns over the workers, whoever is ready first: for a seed and a
     * number of workers their order is always the same. */
    std::mutex lock;
    std::condition_variable handed;
    std::deque<uint32_t> *queues; /* by worker: berths that wait for their turn */
    uint64_t *left;               /* by worker: batches that the run will still bring */
    uint32_t next;                /* whose turn it is */
    cudaStream_t relay;           /* waits for each step's event, which the consumer soon records anew, and
                                   * records the berth's own: there are more berths than steps ahead */
    std::atomic<bool> failed;     /* a worker has: the others stop */
};

/* Looks the samples up (packed: see load/arrays.h) and their slots' sizes, before anything is allocated. The
 * caller closes it, also after a failure. */
enum status delivery_begin(struct delivery *delivery, const struct resources *resources,
                           const struct load *load, bool packed, bool keyed, uint32_t workers);

/* Makes the workers with at least `slots` slots each, in whole batches. STATUS_USAGE where they, and
 * `more_bytes` that the variant will take, do not fit the device. */
enum status delivery_open(struct delivery *delivery, uint64_t slots, uint64_t more_bytes);
void delivery_close(struct delivery *delivery);

/* Before a run, and the run: worker by worker, each in a thread of its own, `epoch` is called for every
 * epoch. STATUS_WRONG where what was delivered is not what the plain reader read. */
enum status delivery_ready(struct delivery *delivery, uint64_t number);
enum status delivery_run(struct delivery *delivery, uint64_t number,
                         enum status (*epoch)(struct outlet *outlet));

/* fetch() of the variants. */
enum status delivery_fetch(struct delivery *delivery, struct load_result *result);

/* Fills a job of the kernel but for what is to be unpacked. */
struct unpack outlet_job(const struct outlet *outlet);

/* STATUS_FAILED once another worker has failed: asked chunk by chunk, so that all stop soon. */
enum status outlet_go_on(struct outlet *outlet);

/* Before slots are written, and before `held` is: the stream waits for the step that consumes what was
 * there. With --verify the host does, and looks whether the batch is still as it was delivered. */
enum status outlet_reserve(struct outlet *outlet, uint32_t slot);

/* A batch is whole once the stream comes here: `count` samples from slot number `slot` on. */
enum status outlet_deliver(struct outlet *outlet, uint32_t slot, uint32_t count);

/* For samples that come in a stream: the slot where arrival number `arrival` belongs; and that the first
 * `arrived` ones have, so that batches are delivered as they become whole. */
uint32_t outlet_slot(const struct outlet *outlet, uint32_t arrival);
enum status outlet_advance(struct outlet *outlet, uint32_t arrived);

/* Consecutive arrivals from a multiple of this on never share a slot with what is yet to be delivered: a
 * window, or several until `target` samples are in them. Slots that this takes of each of `workers`, one span
 * ahead of a consumer: none needs more than its share.
 */
uint64_t delivery_span(const struct load *load, uint64_t target);
uint64_t delivery_stream_slots(const struct load *load, uint32_t workers, uint64_t span);

/* A sample could not be read, and the message says why: STATUS_OK where it may be skipped, else the failure.
 */
enum status outlet_lose(struct outlet *outlet, uint32_t sample, enum status status);

/* Pinned copies to the device: `bytes` at a time from a buffer to another, `rounds` times. */
enum status device_copy_rate(int device, uint64_t bytes, enum cudaMemcpyKind kind, double *bytes_per_s);

/* Copies pageable memory to the device, where it is when this returns. cudaMemcpy() alone may return while
 * the last bytes are on their way, and streams that do not block do not wait for them. */
enum status device_put(void *to, const void *from, uint64_t bytes);

/* STATUS_USAGE where `bytes` do not fit the device's free memory: says both, and the remedy. */
enum status device_check_room(int device, uint64_t bytes, const char *what, const char *remedy);

#endif
