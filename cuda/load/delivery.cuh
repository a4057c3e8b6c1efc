/* Code that all GPU variants of `load` share. A worker is a thread that reads its share of the samples. Each
 * worker has a reading order, a checksum, and slots in device memory. A slot stores one converted sample. If
 * there is a consumer (a training step), complete batches are delivered to it. Each variant implements its
 * own transfer of the bytes to the device.
 *
 * A sample consists of members: the files that belong to it, for example an image and a label. */
#ifndef FDSL_CUDA_LOAD_DELIVERY_CUH
#define FDSL_CUDA_LOAD_DELIVERY_CUH

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

#include "core/status.h"
#include "core/variant.h"
#include "load/arrays.h"
#include "data/plain_reader.h"
#include "load/input.h"
#include "load/verifier.h"
#include "load/unpack.cuh"

#define DELIVERY_LOST UINT32_MAX /* in queue->held: no sample, or a sample that could not be read */

struct delivery;

/* Room for one batch: load->given->batch consecutive slots. */
struct batch_buffer {
    cudaEvent_t ready; /* recorded after the kernel that unpacks the batch's last sample */
    cudaEvent_t done;  /* the consumer's event after the step on the batch; valid if `handed` */
    uint64_t step;     /* number of the step on the batch; valid if `handed` */
    uint32_t filled;   /* samples that have arrived or are lost; used only if samples arrive as a stream */
    uint32_t count;    /* samples in the batch */
    bool waiting;      /* the batch is delivered; its slots must not be overwritten before `done` */
    bool handed;       /* the consumer has received the batch; protected by the delivery's lock */
};

/* Memory of a worker for --verify. `tensor`, `labels` and `hashes` are copies of a group of slots in host
 * memory. */
struct delivery_check {
    uint8_t *tensor;
    int32_t *labels;
    uint64_t *hashes;
    uint8_t *wanted, *read; /* `wanted`: expected values of one slot; `read`: bytes of one member */
    struct image_scratch scratch;
    uint64_t wrong; /* number of wrong slots that delivery_verify_slots() found */
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

    uint32_t *held;       /* per slot: number of the sample in it, or DELIVERY_LOST */
    uint32_t *held_epoch; /* per slot: epoch of the sample in it; used only with --decode */
    struct batch_buffer *buffers;

    /* The next four fields are used only if samples arrive as a stream. Batches are counted from the start of
     * the run. Buffers are reused in round-robin order, also across epochs. */
    uint64_t base;             /* number of batches before the current epoch */
    uint64_t delivered, freed; /* number of batches delivered, and of batches whose slots are free again */
    uint32_t first;            /* slot of the epoch's first sample */

    struct losses losses;   /* samples that could not be read in this run */
    uint64_t jpeg_warnings; /* accepted warnings of libjpeg in this run (data/image_formats.h) */
    bool stopped;           /* failed only because another worker failed */
    struct failure failure; /* of the run; STATUS_OK if it succeeded */

    /* For --verify */
    struct plain plain;
    struct delivery_check check;

    void *own; /* the variant's data for this worker */
};

struct delivery {
    const struct load *load;
    int device;
    uint32_t workers, slots, buffers; /* `slots` and `buffers` are numbers per worker */
    uint64_t stride, slot_bytes;      /* bytes from slot to slot; bytes of values per slot */
    struct convert convert;
    struct image_fit fit;                                   /* with --decode: how images are decoded */
    uint32_t tolerance;                                     /* with --decode: see image_decoder_tolerance() */
    struct pixel_values pixel_values[AUGMENT_CHANNELS_MAX]; /* with --decode: per channel */
    struct arrays arrays;
    struct array_sample *samples; /* copy of arrays.samples on the device */
    struct output_queue *queues;
    struct checksum *checksums; /* device memory: one per worker, for the current run */
    struct verifier verifier;
    struct load_result result;

    /* The consumer receives one batch per worker in turn, no matter which worker is ready first. The order of
     * batches therefore does not depend on timing. */
    std::mutex lock;
    std::condition_variable changed; /* signals that state protected by `lock` has changed */
    std::deque<uint32_t> *ready;     /* per worker: complete buffers that wait for their turn */
    uint64_t *left;                  /* per worker: batches not yet passed to the consumer in this run */
    uint32_t next;                   /* worker whose turn it is */
    uint64_t steps;                  /* batches passed to the consumer so far */
    /* The lowest number of a worker that has failed, so that the others stop; `workers` if there is none. */
    std::atomic<uint32_t> failed;

    /* The threads of all workers but the first. They start in the first run, which warms up, and wait between
     * runs, because starting 15 threads takes a noticeable part of a run of 10 ms. */
    std::vector<std::thread> threads;
    std::condition_variable begins, ends; /* a run begins, or the threads must end; a thread ends its work */
    enum status (*read)(struct output_queue *queue); /* what the workers do in this run */
    uint64_t runs;                                   /* number of runs that have begun */
    uint32_t working;                                /* number of threads that work */
    bool closing;
};

/* Examines the samples and computes slot sizes. Allocates no device memory. `packed` is passed to
 * arrays_open() (load/arrays.h); `keyed` becomes a field of struct order_plan (load/order.h). The caller
 * closes the delivery, even after a failure. */
enum status delivery_begin(struct delivery *delivery, const struct resources *resources,
                           const struct load *load, bool packed, bool keyed, uint32_t workers);

/* Creates the workers' queues with at least `slots` slots each, rounded up to whole batches. The variant will
 * allocate `more_bytes` of device memory itself. Sets result.memory_bytes to all device memory, including
 * `more_bytes`; the variant adds the size of its host buffers. STATUS_TOO_LARGE if less device memory is
 * free. */
enum status delivery_open(struct delivery *delivery, uint64_t slots, uint64_t more_bytes);
void delivery_close(struct delivery *delivery);

/* Implements setup() of variants. STATE is a struct whose first member is a struct delivery. Creates a STATE
 * and calls OPEN with it. */
template <class STATE,
          enum status (*OPEN)(STATE *state, const struct resources *resources, const struct load *load)>
static enum status delivery_setup(const struct resources *resources, const void *input, void **state)
{
    STATE *created = new (std::nothrow) STATE();
    *state = created;
    return created ? OPEN(created, resources, static_cast<const struct load *>(input))
                   : status_set(STATUS_EXHAUSTED, "out of memory");
}

/* Implements ready() of variants whose state has a struct delivery as its first member. Prepares run
 * `number`. */
enum status delivery_ready(void *state, uint64_t number);

/* Performs a run. Each worker calls `read` once, in its own thread; `read` reads the worker's share of all
 * epochs. STATUS_WRONG if the checksum of the delivered samples is wrong. With load->control->whole, the
 * caller examines load->control->seen instead. */
enum status delivery_run(struct delivery *delivery, uint64_t number,
                         enum status (*read)(struct output_queue *queue));

/* Calls `work` once per worker, in the workers' threads. Call between runs. Returns the failure of one
 * worker. */
enum status delivery_each(struct delivery *delivery, enum status (*work)(struct output_queue *queue));

/* Helper for `read`: calls `epoch` for each epoch and records the epoch's end. */
enum status queue_each_epoch(struct output_queue *queue, enum status (*epoch)(struct output_queue *queue));

/* Records the end of an epoch in which `lost` samples were lost. */
void queue_note(struct output_queue *queue, uint64_t lost);

/* Implements fetch() of variants whose state has a struct delivery as its first member. `result` points to a
 * struct load_result. */
enum status delivery_fetch(void *state, void *result);

/* Returns the conversion of the values of a channel, with its mean and standard deviation. */
struct convert delivery_convert(const struct delivery *delivery, uint32_t channel);

/* Returns the arguments of unpack_launch(). The caller adds the samples to unpack. */
struct unpack queue_job(const struct output_queue *queue);

/* Returns whether a worker has failed. */
static inline bool delivery_failed(const struct delivery *delivery)
{
    return delivery->failed < delivery->workers;
}

/* Returns STATUS_FAILED if another worker has failed. Call before each chunk, so that workers stop soon. */
enum status queue_check_failed(struct output_queue *queue);

/* Call before writing to a slot or its entry in `held`. If a step reads the slot's previous batch, makes the
 * queue's stream wait for that step. With load->control->whole, the host waits for the step instead, and
 * checks the batch. */
enum status queue_reserve(struct output_queue *queue, uint32_t slot);

/* Delivers the batch in the `count` slots from `slot` on. The work that fills these slots must be enqueued on
 * the queue's stream before the call. */
enum status queue_deliver(struct output_queue *queue, uint32_t slot, uint32_t count);

/* Call this only with load->control->whole. Waits until the batch in the `count` slots starting at `slot`
 * is ready. Compares the values, label and hash of each sample with the expected ones. Counts correct samples
 * in load->control->seen. */
enum status queue_check(struct output_queue *queue, uint32_t slot, uint32_t count);

/* Frees the buffers and zeroes the struct. */
void delivery_check_free(struct delivery_check *check);

/* Implements verify_slots() of struct load_traits: counts slots with wrong values, labels or hashes. Each
 * worker checks at most a few thousand of its slots, in its own thread. */
enum status delivery_verify_slots(void *state, uint64_t *wrong);

/* Takes the lock if there is a consumer. Without a consumer, no worker accesses another worker's state. */
static inline std::unique_lock<std::mutex> delivery_guard(struct delivery *delivery)
{
    std::unique_lock<std::mutex> guard(delivery->lock, std::defer_lock);
    if (delivery->load->control->consumer)
        guard.lock();
    return guard;
}

/* ---- Samples that arrive as a stream, in chunks in any order ----
 *
 * A worker's share is read segment by segment. A segment is a run of consecutive samples of one shard. The
 * arrival number of a sample is its index in this reading order, from 0 in each epoch. Hold delivery_guard()
 * when calling queue_batch(), queue_fill(), queue_advance(), queue_make_room() or queue_handed(). */

/* queue_slot() returns the slot of the sample with this arrival number. queue_batch() returns the number of
 * the first batch that may contain this sample or another sample of the same shuffle buffer. If `arrival` is
 * the number of samples in the epoch, queue_batch() returns the first batch of the next epoch. */
uint32_t queue_slot(const struct output_queue *queue, uint32_t arrival);
uint64_t queue_batch(const struct output_queue *queue, uint32_t arrival);

/* queue_fill() records that `count` samples, starting at arrival number `arrival`, are lost or being
 * unpacked. queue_advance() delivers complete batches in order, up to the first incomplete batch. */
void queue_fill(struct output_queue *queue, uint32_t arrival, uint32_t count);
enum status queue_advance(struct output_queue *queue);

/* Ends an epoch whose batches are all delivered. The next epoch continues with the following buffers. */
void queue_next_epoch(struct output_queue *queue);

/* queue_make_room() returns whether the slots of the first `end` samples of the epoch may be written. To make
 * room, it frees slots of batches whose steps have ended, except with load->control->whole. If it returns
 * false, wait until queue_handed() returns true: the consumer has then received the oldest batch. Then call
 * queue_free(). queue_free() waits for the step on that batch, checks the batch if load->control->whole is
 * set, and frees its slots. Call queue_free() without the lock, and from one thread at a time. */
bool queue_make_room(struct output_queue *queue, uint64_t end);
bool queue_handed(const struct output_queue *queue);
enum status queue_free(struct output_queue *queue);

/* A span is a range of consecutive samples. A chunk never crosses the end of its span. delivery_span()
 * returns the number of samples in a span. The size of a span is the smallest multiple of the shuffle buffer
 * that is at least `target`. Without shuffling, it is 4 times `target`, but at most the size of the data set.
 *
 * delivery_stream_slots() returns the number of slots per worker: one batch plus one span. With a consumer,
 * it adds the larger of the two a second time. A span longer than a worker's share counts as the share. */
uint64_t delivery_span(const struct load *load, uint64_t target);
uint64_t delivery_stream_slots(const struct load *load, uint32_t workers, uint64_t span);

/* Records that a sample could not be read; the error message is already set. STATUS_OK if the
 * sample may be skipped, otherwise `status`. */
enum status queue_lose(struct output_queue *queue, uint32_t sample, enum status status);

/* ---- Device memory ---- */

/* Measures the rate of copies of `bytes` each, in bytes per second. With cudaMemcpyHostToDevice, copies from
 * pinned memory to the device. With cudaMemcpyDeviceToDevice, copies within the device and counts bytes read
 * plus bytes written. */
enum status device_copy_rate(int device, uint64_t bytes, enum cudaMemcpyKind kind, double *bytes_per_s);

#endif
