/* Transfers chunks of shards to the device. Each worker has a ring of buffers. It reads consecutive samples
 * into a buffer, copies the buffer to the device, and unpacks the samples there. Reading, copies and kernels
 * overlap.
 *
 * Without a consumer, a worker reads its own share and waits only for events of its own chunks. With a
 * consumer, a worker reads whichever chunk is needed first, from any share. Streams never wait for a training
 * step. Instead, the host waits for the step before it reads samples that will overwrite the step's batch.
 *
 * A variant adds how bytes get from a shard into a buffer. */
#ifndef FDSL_CUDA_LOAD_RING_CUH
#define FDSL_CUDA_LOAD_RING_CUH

#include "load/delivery.cuh"

#define PIECES_MAX 256 /* per chunk */

/* An open shard, shared by the pieces that read from it. The last user closes it. Pointers to this struct are
 * NULL if there is nothing to close and no error to report. */
struct open_shard {
    void *handle;       /* owned by the variant; may be NULL */
    uint32_t users;     /* number of pieces, plus one while the share is inside this shard; atomic */
    char failure[1024]; /* reason, if it could not be opened */
};

/* Consecutive samples of one shard, and their bytes in a buffer. */
struct piece {
    uint32_t shard, first, count; /* samples from number `first` on */
    uint32_t arrival;             /* index of the first sample in the share's reading order */
    uint64_t offset, bytes;       /* range in the shard */
    uint64_t at;                  /* offset in the buffer */
    struct open_shard *opened;    /* may be NULL: see struct open_shard */
    void *handle;                 /* the variant's handle of the shard */
    bool broken;                  /* the shard could not be opened */
    bool read;                    /* the read was started */
    uint64_t got;                 /* bytes read */
    int error;                    /* errno if fewer bytes were read than requested; 0: end of file */
};

struct chunk {
    struct ring_share *share; /* share that the chunk belongs to */
    struct piece *pieces;
    uint32_t piece_count, samples;
    uint64_t bytes; /* up to the end of the last piece */
    bool launched;  /* its events are recorded */
};

/* Progress of reading a share. Only the worker that has claimed it may change it. */
struct ring_share {
    struct output_queue *queue;
    struct open_shard *opened; /* shard of the current segment */
    bool broken;               /* the shard of the current segment could not be opened */
    uint32_t epochs;           /* epochs started */
    uint64_t lost;             /* samples lost in earlier epochs */

    /* Start of the next chunk: segment of the order, sample in the segment, sample in the epoch. */
    uint32_t segment, within, arrival;
    uint32_t asked; /* segments that the operating system was asked to read ahead */

    /* Protected by delivery_guard(). */
    bool claimed;
    uint32_t in_flight; /* chunks that were claimed and are not yet delivered */
};

struct ring_worker;

/* How bytes get into buffers. */
struct ring_type {
    bool on_device;      /* true: reads into device buffers; false: into pinned buffers, which are copied */
    uint32_t pieces_max; /* per chunk */
    uint32_t alignment;  /* of the start and end of reads, in the shard; 1 for any */
    /* Opens piece->shard and sets piece->handle, which may stay NULL. */
    enum status (*open)(struct ring_worker *worker, struct piece *piece);
    void (*close)(struct ring_worker *worker, void *handle); /* may be NULL */
    /* start() begins to read the chunk into buffer `index`. complete() waits for the read and sets `got` in
     * all pieces, unless start() has done so. */
    enum status (*start)(struct ring_worker *worker, uint32_t index);
    enum status (*complete)(struct ring_worker *worker, uint32_t index);
};

struct ring_worker {
    struct output_queue *queue;
    struct ring *ring;
    cudaStream_t copies;
    uint8_t *host, *device; /* pinned and device memory: ring->buffers buffers of ring->buffer_bytes each */
    cudaEvent_t *copied, *unpacked;
    struct chunk *chunks;        /* per buffer */
    uint64_t started, completed; /* chunks of the run */
    void *own;                   /* data of the variant */
};

struct ring {
    struct delivery delivery; /* must be first, see delivery_ready() */
    const struct ring_type *type;
    uint32_t buffers;
    uint32_t table_max;    /* maximum samples per chunk: the entries of a table */
    uint64_t data_bytes;   /* per buffer; a table of struct unpack_entry follows */
    uint64_t buffer_bytes; /* including the table */
    uint64_t span;         /* see delivery_span() */
    struct ring_worker *workers;
    struct ring_share *shares; /* per worker */
};

/* Creates the rings and their delivery. STATUS_USAGE if they do not fit in memory. The caller closes the
 * ring, also after a failure. */
enum status ring_open(struct ring *ring, const struct resources *resources, const struct load *load,
                      const struct ring_type *type);
void ring_close(struct ring *ring);

/* Implements run() of the variants. The first member of `state` is the ring. */
enum status ring_run(void *state, uint64_t number, struct run_time *time);

/* Implements copy() of the variants' traits. Measures the rate of copies from pinned memory: copies as many
 * bytes as the set has (at least 1 GiB, at most 4 GiB) through the same rings, with the same threads. */
enum status ring_copy(void *state, double *bytes_per_s);

/* Return the address of buffer `index` of a worker, in pinned memory and in device memory. */
static inline uint8_t *ring_host(const struct ring_worker *worker, uint32_t index)
{
    return worker->host + index * worker->ring->buffer_bytes;
}

static inline uint8_t *ring_device(const struct ring_worker *worker, uint32_t index)
{
    return worker->device + index * worker->ring->buffer_bytes;
}

#endif
