/* Types shared by set_stream.c (batches, threads, the consumer) and set_stream_load.c (the samples of a
 * batch). No other file includes this header. */
#ifndef FDSL_DATA_SET_STREAM_PARTS_H
#define FDSL_DATA_SET_STREAM_PARTS_H

#include <pthread.h>
#include <stdatomic.h>

#include "core/status.h"
#include "data/image.h"
#include "data/npy.h"
#include "data/resident.h"
#include "data/set_files.h"
#include "data/set_stream.h"

#define NO_FILE  SIZE_MAX
#define DECODED  (SIZE_MAX - 1) /* an image that is decoded already */
#define NO_SHARD UINT32_MAX
#define NAMED    3    /* masked samples of a batch that a report names */
#define GAP_MAX  4096 /* image and label are read at once if at most this many bytes are between them */

enum slot_state { SLOT_FREE, SLOT_LISTING, SLOT_FILLING, SLOT_READY, SLOT_HELD };

/* The memory of a batch, and the work on it. All members except `claimed` are protected by the stream's lock,
 * or do not change while threads fill the batch. */
struct slot {
    uint8_t *values, *masks; /* masks: NULL if the samples have none */
    int32_t *labels;
    uint32_t *numbers;
    uint64_t *read;
    uint32_t *direct; /* per sample: shard that it was read from directly, not compared yet; NO_SHARD: none */
    /* Only with request.device_bytes, per sample: */
    uint64_t *places; /* as set_stream_places() returns them */
    uint64_t *edges;  /* hash of what was read (hash_read()) */
    /* Only with mixing: */
    struct mix mix;
    int32_t *partners;         /* labels of the partners */
    _Atomic uint8_t *complete; /* per pair of partners: how many of them are loaded */
    /* Only with device_share: */
    struct set_stream_file *files; /* by sample while threads fill the batch, then without gaps */
    uint32_t file_count;           /* set when the batch is delivered */
    size_t *file_at;               /* per sample: offset of its file in `bytes`; NO_FILE: none; DECODED */
    uint8_t *bytes;
    size_t bytes_room;
    uint8_t *pixels; /* of images that are decoded already; NULL: there are none */
    size_t pixels_room;
    _Atomic size_t pixels_used;
    enum slot_state state;
    struct stream_position at;
    uint32_t count, own;      /* own: samples of the batch, without partners that follow them */
    _Atomic uint32_t claimed; /* samples that threads have taken; `count` or more: none is left */
    uint32_t users;           /* threads that fill the batch */
    uint32_t masked;
    uint32_t masked_at[NAMED]; /* the first masked samples, in ascending order */
    uint32_t fault_at;         /* index of the sample that `fault` is about */
    bool fails;                /* `fault` ends the stream; otherwise it is that of a masked sample */
    struct failure fault;      /* the first in the order of the samples; status STATUS_OK: none */
};

/* A sample that the consumer keeps. The consumer's thread sets `place` last. */
struct kept {
    _Atomic uint64_t place; /* SET_STREAM_LOADED: it does not keep the sample */
    uint64_t edges;
    int32_t label;
    struct jpeg_shape shape; /* with random crops */
    bool device;             /* set_stream_on_device() of the number with which it was kept */
};

struct set_stream;

/* A thread, and what it counts while it fills a batch. */
struct worker {
    struct set_stream *self;
    pthread_t thread;
    struct image_scratch scratch;
    uint8_t *image, *label;         /* bytes of members */
    uint8_t *changed;               /* scratch memory of image_output_store() */
    uint8_t header[NPY_HEADER_MAX]; /* of arrays that have the shape and type of the request */
    size_t header_bytes;
    bool header_known;
    uint8_t gap[GAP_MAX];              /* bytes between image and label */
    uint64_t image_edges, label_edges; /* checksum_edges() of what was read for the sample */
    uint32_t width, height;            /* of its image, upright, before it was cut out */
    bool broken;                       /* the latest failure is that of a sample, and may be masked */
    uint64_t bytes, memory_bytes;
    uint32_t timed; /* number of samples that the times of the next sample are for; 0: it is not timed */
    double read_s, decode_s;
};

struct set_stream {
    struct stream stream; /* must be the first member */
    struct set_stream_request request;
    struct set_files *files;
    struct resident resident; /* by the place of a sample in request.samples */
    struct kept *kept;        /* as `resident`; NULL without request.device_bytes */
    uint32_t kept_count;      /* samples that the consumer keeps; only for its thread */
    bool crops;               /* the consumer keeps whole images */
    size_t pixel_bytes;       /* with `crops`: memory of a batch for decoded images */
    _Atomic bool wants;       /* the consumer has room for further samples */
    size_t sample_bytes, slot_bytes, image_bytes, label_bytes;
    size_t mask_bytes;          /* of a mask in a batch; 0: samples have labels */
    double image_mean;          /* mean size of an image file in bytes */
    uint32_t slot_count, chunk; /* chunk: samples that a thread takes at a time */
    bool direct;                /* all images are arrays whose values the batch has as they are stored */
    struct slot *slots;
    struct worker *workers;
    int worker_count;  /* running threads */
    uint32_t reported; /* batches with masked samples that were reported; only for the consumer's thread */
    bool mixes;        /* request.mixing is on */
    struct shape shape;

    pthread_mutex_t lock; /* protects everything below, and the slots */
    pthread_cond_t work;  /* for workers: there may be something to do */
    pthread_cond_t done;  /* for the consumer: a batch is finished, or no thread works any more */
    uint32_t idle;        /* waiting workers */
    bool woken;           /* the consumer has woken a worker, which does not run yet */
    bool waiting;         /* the consumer waits */
    bool started;         /* stream_next() was called: threads may list batches */
    bool cancelled, draining, closing, listing;
    /* Batches have sequence numbers since the latest seek. Those from `taken` to `listed` - 1 are in
     * queue[number % ahead]; samples are handed out from number `serving` on. */
    struct slot **queue;
    uint64_t taken, serving, listed;
    uint64_t failed;                         /* the first batch that fails; NONE: no one does */
    struct stream_position take_at, list_at; /* of the batches `taken` and `listed` */
    uint64_t epochs_open; /* with by_epoch: batches of epochs below this one may be prepared */
    uint32_t ready, held; /* finished batches, and batches of the consumer */
    struct stream_stats stats;
    uint64_t calls, ready_sum; /* of stream_next(); the sum of `ready` */
};

/* Returns the element type of the batches. */
static inline enum dtype type_of(const struct set_stream_request *request)
{
    return request->output ? request->output->type : request->type;
}

/* STATUS_USAGE if the plan must not name a sample. */
static inline enum status check_number(const struct set_stream_request *request, uint32_t number)
{
    const uint64_t end = (uint64_t)request->count * request->copies;
    return number < end ? STATUS_OK
                        : status_set(STATUS_USAGE, "the plan names sample %u of %llu", number,
                                     (unsigned long long)end);
}

/* Returns the sample of the data set that has a number of the plan. */
static inline const struct dataset_sample *sample_of(const struct set_stream_request *request,
                                                     uint32_t number)
{
    const uint32_t at = number % request->count;
    return &request->dataset->samples[request->samples ? request->samples[at] : at];
}

/* Returns what is known of a sample that the consumer keeps, by its number in the plan; NULL if it does not
 * keep it, or keeps a copy that another decoder has decoded. */
static inline const struct kept *kept_of(const struct set_stream *self, uint32_t number)
{
    const struct set_stream_request *request = &self->request;
    const bool valid = number < (uint64_t)request->count * request->copies;
    struct kept *kept = self->kept && valid ? &self->kept[number % request->count] : NULL;
    const bool there = kept && atomic_load_explicit(&kept->place, memory_order_acquire) != SET_STREAM_LOADED;
    return there && kept->device == set_stream_on_device(number, request->device_share) ? kept : NULL;
}

/* ---- set_stream_load.c ---- */

/* Returns whether all images of a request are arrays that may be read directly into the batch. */
bool set_load_reads_directly(const struct set_stream_request *request);

/* Fetches what describes samples `begin` to `end` - 1 of a batch into the cache, and the bytes of their
 * images, all at the same time. */
void set_load_prefetch(const struct set_stream *self, const struct slot *slot, uint32_t begin, uint32_t end);

/* Fills the place of sample `i` of a batch. A failure is that of the sample if worker->broken is set,
 * otherwise that of the stream. If slot->direct[i] is a shard afterwards, the sample was read from it without
 * a comparison of the file, which the caller does when the batch is filled. */
enum status set_load_sample(struct worker *worker, struct slot *slot, uint32_t i);

/* STATUS_USAGE if an image does not have the shape and the type of the request. */
enum status set_load_check_shape(const struct set_stream_request *request, const struct image *image);

/* Only with mixing: prepares the mixtures of a batch that was listed. Then, for each sample that is loaded:
 * mixes it with its partner if that is loaded, too. Then sets the labels of the partners. */
void set_mix_begin(const struct set_stream *self, struct slot *slot);
void set_mix_sample(const struct set_stream *self, struct slot *slot, uint32_t i);
void set_mix_partners(const struct slot *slot);

#endif
