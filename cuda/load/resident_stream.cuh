/* Streams the part of a data set that does not fit in device memory. Threads read the samples of this part
 * into two pinned buffers in turn. While the threads fill one buffer, the other is copied and unpacked. */
#ifndef FDSL_CUDA_LOAD_RESIDENT_STREAM_CUH
#define FDSL_CUDA_LOAD_RESIDENT_STREAM_CUH

#include "load/delivery.cuh"

/* A buffer: a table of struct unpack_entry, and the samples. */
struct resident_stage {
    uint8_t *host, *device;
    cudaEvent_t unpacked; /* recorded after the kernels that read the buffer */
};

struct resident_stream {
    struct delivery *delivery;
    const uint8_t *bytes; /* the resident samples, in device memory */
    uint32_t kept; /* samples 0 to kept - 1 are resident. The order of an epoch is a random permutation,
                    * so about the same share of each batch is resident. */
    int threads;
    uint32_t entries_max;
    uint64_t stage_bytes; /* size of a buffer, including the table */
    struct resident_stage stages[2];
    uint32_t next;        /* the buffer to fill next */
    bool *failed;         /* per sample of a buffer: whether it could not be read */
    uint64_t moved_bytes; /* bytes copied to the device in this run */
};

/* Sets the sizes of the buffers. Returns the total size of both buffers in bytes, which is needed once in
 * pinned memory and once in device memory. arrays.bytes_max must be set before the call. */
uint64_t resident_stream_plan(struct resident_stream *stream, struct delivery *delivery, int threads);

/* Allocates the buffers. Samples 0 to kept - 1 are at `bytes`. */
enum status resident_stream_open(struct resident_stream *stream, const uint8_t *bytes, uint32_t kept);
void resident_stream_close(struct resident_stream *stream);

/* Unpacks `count` samples into consecutive slots from `slot` on. Records in queue->held which sample is in
 * which slot. */
enum status resident_stream_gather(struct resident_stream *stream, struct output_queue *queue,
                                   const uint32_t *samples, uint32_t count, uint32_t slot);

/* Reads all members of a sample to `bytes`, each at its offset array->at[] minus `first`. Keeps the latest
 * file open in `*fd` and its number in `*file`. STATUS_FAILED with file and offset. */
enum status resident_read_sample(const struct delivery *delivery, uint32_t number, int *fd, uint32_t *file,
                                 uint8_t *bytes, uint64_t first);

#endif
