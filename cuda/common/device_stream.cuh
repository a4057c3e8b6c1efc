/* A stream whose batches are in device memory. It takes the batches of a host stream on a thread of its own
 * and copies them to the device. JPEG files that the host stream hands on undecoded (set_stream_files()) are
 * decoded on the device with nvJPEG, and one kernel per chunk of files fits them into their samples.
 *
 *     host stream  read and decode batch 2 ──────────── batch 3 ─────────────────────
 *     own thread   next 1 ─ decode chunks of batch 1 ── next 2 ─ decode chunks of batch 2 ──
 *     copies       copy 1 ─ fit chunk ─ fit chunk ─ ready 1 ─ copy 2 (after done 0) ─ fit chunk ...
 *     consumer     wait for ready 0 ─ step 0 ─ done 0 ───── wait for ready 1 ─ step 1 ─ done 1 ──
 *
 * The thread that calls the functions of the stream never waits for the device: stream_next() returns a batch
 * as soon as all its work is enqueued, with the event `ready`, and stream_release() takes an event.
 *
 * nvJPEG's engines do not wait for the CUDA stream of a call. They write only to scratch memory, and the
 * thread waits on the host until the kernel that read this memory has finished. Two scratch areas alternate,
 * so the engines decode one chunk while the kernel reads the other. The parts of a batch that become a chunk
 * depend only on the files of the batch.
 *
 * Samples can stay in device memory (`resident_bytes`): those that are delivered first, as many as fit. The
 * host stream then delivers later batches without them, and a kernel copies them from this memory. */
#ifndef FDSL_CUDA_COMMON_DEVICE_STREAM_CUH
#define FDSL_CUDA_COMMON_DEVICE_STREAM_CUH

#include <stddef.h>
#include <stdint.h>

#include "common/image_decoder.cuh"
#include "core/status.h"
#include "core/stream.h"

#define DEVICE_STREAM_HELD  2 /* number of batches of the host stream that a device stream holds at a time */
#define DEVICE_STREAM_CHUNK 256 /* nvJPEG's engines decode batches of 256 files 17 % faster than of 32 */

struct device_stream_request {
    /* Decodes the files that the host stream hands on; must outlive the stream. NULL or DECODER_CPU: it hands
     * on none. With another decoder, the host stream must be of set_stream_open(), with samples of bytes. */
    struct image_decoder *decoder;
    uint32_t res, channels; /* of the samples, if there is a decoder */
    uint32_t chunk;         /* maximum number of files that are decoded at a time; 0: DEVICE_STREAM_CHUNK */

    uint32_t capacity;   /* largest number of samples in a batch, at least 1 */
    size_t sample_bytes; /* the stride of the host stream's batches, at least 1 */
    size_t mask_bytes;   /* of a mask; 0: the batches have no masks */
    bool by_epoch;       /* stream_plan.by_epoch of the host stream */
    uint32_t ahead;      /* number of batches that are prepared on the device, at least 1 */
    uint32_t held;       /* number of batches that the consumer holds at a time, at least 1 */

    /* Device memory in which samples stay, in the form that they have in a batch; UINT64_MAX: all. 0: none.
     * Otherwise the host stream must be of set_stream_open(), with the same `device_bytes`. Does not change
     * the batches. */
    uint64_t resident_bytes;
};

/* Opens a stream on the current device. Takes over `host`, which is closed with the new stream, and also
 * after a failure. The host stream must allow DEVICE_STREAM_HELD batches to be held, in pinned memory.
 * Batches continue at host->at. `samples.values`, `samples.labels` and `masks` of a batch are in device
 * memory. stream_release() accepts an event of the same device. A file that nvJPEG refuses is a broken sample
 * (set_stream_break()). Its values are zero. stream_close() waits until the work of the stream is complete.
 * STATUS_EXHAUSTED if memory or threads run out, STATUS_TOO_LARGE if the resident samples need more device
 * memory than is free. */
enum status device_stream_open(struct stream *host, const struct device_stream_request *request,
                               struct stream **stream);

/* As stream_release(), but the memory is used again after the work that is enqueued on `consumer` now. It
 * takes less time than with an event. `consumer` must not be captured. The device must be current. Any thread
 * may call it. */
enum status device_stream_give_back(struct stream *stream, const struct stream_batch *batch,
                                    cudaStream_t consumer);

/* As stream_next(), for a consumer that returns the batch before it takes another one: the thread of the
 * stream is not woken before. */
enum status device_stream_borrow(struct stream *stream, struct stream_batch *batch);

/* Returns the numbers of the samples of a batch in device memory. They are complete with the batch, if the
 * host stream delivers labels. */
const uint32_t *device_stream_numbers(struct stream *stream, const struct stream_batch *batch);

/* Returns the memory on the device that the stream has allocated, in bytes, without nvJPEG's memory. */
uint64_t device_stream_memory_bytes(struct stream *stream);

/* The functions `allocate` and `deallocate` of a host stream: pinned memory for all devices. Threads of a
 * stream may call them. Before, device_stream_use() must have made the device known. */
void device_stream_use(int device);
enum status device_stream_pin(size_t bytes, void **memory);
void device_stream_unpin(void *memory);

#endif
