/* Chunks of shards on their way to the device: each worker has a ring of buffers, reads runs of samples into
 * them, has them brought to the device and unpacked there. Reading, copies and kernels overlap. Without a
 * consumer a worker reads its own share, and waits for events of its chunks alone. Beside one all read what
 * is wanted first, whose share it may be of, and no stream waits for a step: the host does, before it reads
 * what would overwrite its batch. A variant adds how bytes get from a shard into a buffer. */
#ifndef FDSL_CUDA_LOAD_RING_CUH
#define FDSL_CUDA_LOAD_RING_CUH

#include "load/delivery.cuh"

#define PIECES_MAX 256 /* of a chunk */

/* A shard as a share's readers have it open, until the last one has read its piece. Where there is nothing to
 * close, nor to complain of, there is none. */
struct opened {
    void *handle;       /* the variant's; or NULL */
    uint32_t users;     /* pieces, and the share while it stands in this shard; atomic */
    char failure[1024]; /* why it could not be opened */
};

/* Consecutive samples of one shard, and their bytes in a buffer. */
struct piece {
    uint32_t shard, first, count; /* samples from number `first` on */
    uint32_t arrival;             /* of the first one */
    uint64_t offset, bytes;       /* in the shard */
    uint64_t at;                  /* in the buffer */
    struct opened *opened;        /* NULL: see there */
    void *handle;                 /* the variant's, of the shard */
    bool broken;                  /* the shard could not be opened */
    bool read;                    /* its bytes have been asked for */
    uint64_t got;                 /* bytes that came */
    int error;                    /* errno, where fewer came than were asked for; 0: the file ends */
};

struct chunk {
    struct ring_share *share; /* of whose epoch it is */
    struct piece *pieces;
    uint32_t piece_count, samples;
    uint64_t bytes; /* up to the end of the last piece */
    bool launched;  /* its events have been recorded */
};

/* How far a share has been read. One worker at a time changes it: who has claimed it. */
struct ring_share {
    struct output_queue *queue;
    struct opened *opened; /* the shard of the segment at hand */
    bool broken;           /* it could not be opened */
    uint32_t epochs;       /* begun */
    uint64_t lost;         /* samples, in the epochs before */

    /* Where the next chunk begins. */
    uint32_t segment, within, arrival;
    uint32_t asked; /* segments that the kernel was asked to read ahead */

    /* Under delivery_guard(). */
    bool claimed;
    uint32_t under_way; /* chunks that have been planned, and not launched */
};

struct ring_worker;

/* How bytes get into buffers. */
struct ring_type {
    bool on_device;      /* straight into those on the device; else into pinned ones, which are copied */
    uint32_t pieces_max; /* of a chunk */
    uint32_t alignment;  /* of what is read, its begin and its end in the shard; 1: any */
    enum status (*open)(struct ring_worker *worker,
                        struct piece *piece);                /* its shard is open as `handle`; or NULL */
    void (*close)(struct ring_worker *worker, void *handle); /* or NULL */
    /* Begins to read a chunk, whose buffer is number `index`, and ends it: then `got` is known of all pieces.
     */
    enum status (*start)(struct ring_worker *worker, uint32_t index);
    enum status (*complete)(struct ring_worker *worker, uint32_t index);
};

struct ring_worker {
    struct output_queue *queue;
    struct ring *ring;
    cudaStream_t copies;
    uint8_t *host, *device; /* ring->buffers of ring->buffer_bytes each: pinned, and on the device */
    cudaEvent_t *copied, *unpacked;
    struct chunk *chunks; /* by buffer */
    uint64_t started, completed;
    void *own; /* the variant's */
};

struct ring {
    struct delivery delivery; /* first: variants share its functions */
    const struct ring_type *type;
    uint32_t buffers;
    uint32_t table_max;    /* samples of a chunk at most */
    uint64_t data_bytes;   /* of a buffer; the table is behind them */
    uint64_t buffer_bytes; /* with it */
    uint64_t span;         /* see delivery_span() */
    struct ring_worker *workers;
    struct ring_share *shares; /* by worker */
};

/* Makes the rings and all that is behind them. STATUS_USAGE where they do not fit. On failure the caller
 * still closes it. */
enum status ring_open(struct ring *ring, const struct resources *resources, const struct load *load,
                      const struct ring_type *type);
void ring_close(struct ring *ring);

enum status ring_run(struct ring *ring, uint64_t number);

/* One copy of as many bytes as the set has through the same rings by the same threads: what pinned memory
 * gives.
 */
enum status ring_copy(void *state, double *bytes_per_s);

/* look() of the variants' traits. */
enum status ring_look(void *state, uint64_t *wrong);

/* The buffers of a worker. */
static inline uint8_t *ring_host(const struct ring_worker *worker, uint32_t index)
{
    return worker->host + index * worker->ring->buffer_bytes;
}

static inline uint8_t *ring_device(const struct ring_worker *worker, uint32_t index)
{
    return worker->device + index * worker->ring->buffer_bytes;
}

#endif
