/* Transfers chunks of shards to the device. Each worker has a ring of buffers. The worker reads consecutive
 * samples into a buffer, copies the buffer to the device, and unpacks the samples there. Reading, copies and
 * kernels overlap.
 *
 * Without a consumer, a worker reads its own share and waits only for events of its own chunks. With a
 * consumer, a worker reads whichever chunk is needed first, from any share. Streams never wait for a training
 * step. Instead, the host waits for the step before it reads samples that will overwrite the step's batch.
 *
 * Each variant implements how bytes get from a shard into a buffer (struct ring_type). */
#ifndef FDSL_CUDA_LOAD_RING_CUH
#define FDSL_CUDA_LOAD_RING_CUH

#include "common/fit.cuh"
#include "common/image_decoder.cuh"
#include "data/image.h"
#include "load/delivery.cuh"

#define PIECES_MAX 256 /* maximum number of pieces per chunk */

/* An open shard, shared by the pieces that read from it. The last user closes it. Pointers to this struct are
 * NULL if there is nothing to close and no error to report. */
struct open_shard {
    void *handle;   /* owned by the variant; may be NULL */
    uint32_t users; /* atomic: pieces that read the shard, plus one while a share has more samples in it */
    struct failure failure; /* if the shard could not be opened */
};

/* With --decode, the memory for images, in bytes. */
struct picture_room {
    uint64_t pixels; /* for images that the device decodes, at their original size */
    uint64_t fitted; /* for images that the worker's thread decodes, at output size, in the chunk's buffer */
};

/* Consecutive samples of one shard, and their bytes in a buffer. */
struct piece {
    uint32_t shard, first, count; /* `count` samples, from sample number `first` on */
    uint32_t arrival;             /* index of sample `first` in the share's reading order */
    uint64_t offset, bytes;       /* range of bytes in the shard */
    uint64_t at;                  /* offset in the buffer, in bytes */
    const uint8_t *pinned;        /* pinned memory that has the bytes; NULL: the buffer has them */
    struct open_shard *opened;    /* may be NULL: see struct open_shard */
    void *handle;                 /* the variant's handle of the shard */
    bool broken;                  /* the shard could not be opened */
    bool read;                    /* a read is in flight (only `gds`) */
    uint64_t got;                 /* bytes read */
    struct picture_room room;     /* for images in the chunk's pieces up to and including this piece */
    int error; /* if fewer bytes were read than requested: errno, or 0 at the end of the file */
};

struct chunk {
    struct ring_share *share; /* share that the chunk belongs to */
    struct piece *pieces;
    uint32_t piece_count, samples, samples_max;
    uint64_t bytes;           /* from the start of the buffer to the end of the last piece */
    struct picture_room room; /* for all images of the chunk */
    uint32_t epoch;
    bool launched; /* whether the chunk's events are recorded */
};

/* The progress of reading the share of one queue. Only the worker that has claimed the share may change the
 * fields before `claimed`. */
struct ring_share {
    struct output_queue *queue;
    struct open_shard *opened; /* shard of the current segment */
    bool broken;               /* the shard of the current segment could not be opened */
    uint32_t epochs;           /* number of epochs started */
    uint64_t lost;             /* samples lost in earlier epochs */

    /* The next chunk begins at sample `within` of segment `segment`; `arrival` is the index of this sample in
     * the share's reading order. A segment is a run of consecutive samples of one shard. */
    uint32_t segment, within, arrival;
    uint32_t asked; /* number of segments that the operating system was asked to read ahead */

    /* Protected by delivery_guard(). */
    bool claimed;
    uint32_t in_flight; /* number of chunks that were claimed and are not yet delivered */
};

struct ring_worker;
struct rate_test;

/* The part of a variant that reads shards into buffers. */
struct ring_type {
    bool on_device;      /* true: reads into device buffers; false: into pinned buffers, which are copied */
    uint32_t pieces_max; /* maximum number of pieces per chunk */
    uint32_t alignment;  /* reads begin and end at multiples of this many bytes in the shard */
    /* Opens piece->shard and sets piece->handle, which may stay NULL. */
    enum status (*open)(struct ring_worker *worker, struct piece *piece);
    void (*close)(struct ring_worker *worker, void *handle); /* may be NULL */
    /* start() begins to read the chunk into buffer `index`. complete() waits for the read and sets `got` in
     * all pieces, unless start() has done so. */
    enum status (*start)(struct ring_worker *worker, uint32_t index);
    enum status (*complete)(struct ring_worker *worker, uint32_t index);
};

/* Memory of a worker that decodes images. */
struct ring_decoding {
    struct image_batch batch;
    uint8_t *pixels; /* device memory: the decoded images of a chunk */
    struct image_scratch scratch;
    double time_s; /* time spent on decoding in this run */
};

struct ring_worker {
    struct output_queue *queue;
    struct ring *ring;
    cudaStream_t copies;
    uint8_t *host, *device; /* pinned and device memory: ring->buffers buffers of ring->buffer_bytes each */
    cudaEvent_t *copied, *unpacked;
    cudaEvent_t unpacked_latest; /* the element of `unpacked` recorded last; NULL if there is none */
    struct chunk *chunks;        /* per buffer */
    uint64_t started, completed; /* how many chunks were started and completed in this run */
    /* bytes of all pieces that were copied in this run, and of those with `pinned` */
    uint64_t piece_bytes, pinned_bytes;
    struct ring_decoding *decoding; /* NULL unless images are decoded */
    void *own;                      /* the variant's data for this worker */
};

struct ring {
    struct delivery delivery; /* must be first, see delivery_ready() */
    const struct ring_type *type;
    uint32_t buffers;
    uint32_t table_max;       /* maximum number of samples per chunk, and of entries in its table */
    uint64_t data_bytes;      /* bytes of samples per buffer; the table of struct unpack_entry follows them */
    uint64_t buffer_bytes;    /* size of a buffer, including the table and, with --decode, fitted images */
    struct picture_room room; /* limit per chunk */
    struct image_decoder decoder;
    struct rate_test *rate; /* owned; NULL until ring_decode_rate() is called */
    uint64_t
        memory_bytes; /* result.memory_bytes without nvJPEG's memory, which grows during the first runs */
    uint64_t span;    /* see delivery_span() */
    struct ring_worker *workers;
    struct ring_share *shares; /* per worker */
};

/* Creates the rings and their delivery. `chunk_bytes`: bytes per buffer, unless a sample is larger.
 * STATUS_TOO_LARGE if they do not fit in memory. The caller closes the ring, even after a failure. */
enum status ring_open(struct ring *ring, const struct resources *resources, const struct load *load,
                      uint64_t chunk_bytes, const struct ring_type *type);
void ring_close(struct ring *ring);

/* Implements run() of variants whose state has a struct ring as its first member. */
enum status ring_run(void *state, uint64_t number, struct run_time *time);

/* Implements copy() of struct load_traits, for variants whose state has a struct ring as its first member.
 * Measures the rate of copies from pinned to device memory. Copies as many bytes as the data set has, but at
 * least 1 GiB and at most 4 GiB. Uses the same buffers as a run and the same number of threads. If nvJPEG
 * decodes images, measures the rate of nvJPEG instead (ring_decode_rate()). */
enum status ring_copy(void *state, double *bytes_per_s);

/* ring_host() and ring_device() return the address of a worker's buffer `index` in pinned memory and in
 * device memory. */
static inline uint8_t *ring_host(const struct ring_worker *worker, uint32_t index)
{
    return worker->host + index * worker->ring->buffer_bytes;
}

static inline uint8_t *ring_device(const struct ring_worker *worker, uint32_t index)
{
    return worker->device + index * worker->ring->buffer_bytes;
}

#define PIECE_ALIGNMENT 512 /* in bytes; tar members have the same alignment */

static inline uint64_t align_to(uint64_t bytes, uint64_t alignment)
{
    return (bytes + alignment - 1) / alignment * alignment;
}

/* ---- Decoding (ring_decode.cu) ---- */

/* The part of a ring that decodes images (--decode). A worker decodes the JPEG files of a chunk on the
 * device, and all other images in its own thread. Then one kernel fits all images into their slots. */

/* Opens the decoder of a ring. Without --chunk, raises `*chunk_bytes` so that the JPEG engines get large
 * batches. */
enum status ring_decode_begin(struct ring *ring, const struct load *load, uint64_t *chunk_bytes);

/* Limits ring->table_max to a batch of the JPEG engines, and computes the room for pixels, ring->room. Call
 * when ring->data_bytes and ring->table_max are known. The caller adds ring->room.fitted to the size of a
 * buffer. */
void ring_decode_size(struct ring *ring, const struct load *load);

/* Closes the decoder, after all workers. Does nothing to a ring that decodes nothing. */
void ring_decode_end(struct ring *ring);

/* Allocates a worker's memory for decoding. The caller closes it with ring_decode_close(), even after a
 * failure. */
enum status ring_decode_open(struct ring_worker *worker);
void ring_decode_close(struct ring_worker *worker);

/* Adds the room that the image of a sample needs to `*room`. Returns whether it still fits. */
bool ring_decode_fits(const struct ring *ring, uint32_t sample, struct picture_room *room);

/* Decodes the images of a chunk in host buffer `index`. `entries` are the `*count` entries of the chunk's
 * table; entries of broken images are removed, and their samples recorded as lost. Writes the fit entries
 * (struct fit_entry) to the buffer, from `*end` on. After them, writes the pixels of images that this thread
 * decoded. Sets `*fits` to the offset of the fit entries, and `*end` to the end of the pixels. */
enum status ring_decode(struct ring_worker *worker, uint32_t index, struct unpack_entry *entries,
                        uint32_t *count, uint64_t *fits, uint64_t *end);

/* Launches the kernel that fits the images of the chunk whose fit entries are at `fits` in device buffer
 * `index`. */
enum status ring_decode_launch(const struct ring_worker *worker, uint32_t index, uint64_t fits,
                               uint32_t count, cudaStream_t stream);

/* Measures the rate of nvJPEG alone, in bytes of samples per second. Each call decodes a batch of up to 256
 * images about 8 times, at least once per thread, from pinned memory; calls take turns through up to 8
 * batches from all parts of the data set. NaN if all these images are broken. The
 * workers' threads decode one at a time, because the rate depends on the speed of their CPUs. The first
 * call reads the images, and they stay until ring_decode_end(). Requires an image that the device decodes. */
enum status ring_decode_rate(struct ring *ring, double *bytes_per_s);

#endif
