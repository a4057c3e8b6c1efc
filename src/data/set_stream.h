/* A stream of the samples of a data set: class folders, or tar shards on a disk or at a URL. CPU threads read
 * and decode each sample directly into its place in a batch. */
#ifndef FDSL_DATA_SET_STREAM_H
#define FDSL_DATA_SET_STREAM_H

#include "core/stream.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/image_output.h"

/* A broken sample: its bytes were read, but they are no image or no label, or differ from the hash in the
 * index. With both values, a file that cannot be opened or read, or that changed after dataset_open(), ends
 * the stream; so do images that need --out-res, because their shapes differ. */
enum set_stream_error {
    SET_STREAM_FAIL, /* ends the stream with the file, the key and the reason */
    SET_STREAM_MASK  /* becomes zeros with the label STREAM_MASKED; the first few are reported as warnings */
};

struct set_stream_request {
    /* The samples. Sample number n of the plan is sample samples[n % count] of the data set; NULL: sample
     * n % count. Numbers from `count` on are copies, with their own random crops. Both arrays and the data
     * set, which dataset_open() opened, must outlive the stream. */
    const struct dataset *dataset;
    const uint32_t *samples;
    const uint32_t *labels; /* labels[n % count]; a sample with the label (uint32_t)STREAM_MASKED is broken.
                               NULL: the stream reads the label of each sample */
    uint32_t count;         /* elements of each array; 0: all samples of the data set */
    uint32_t copies;        /* the plan's numbers are below count * copies; 0: one */

    /* Each sample becomes an image of this shape and type, channels first. With fit.res, images are
     * resized and cropped by the epoch and the plan's number of the sample (image_fit()); otherwise each
     * image must have this shape. */
    struct image_fit fit;
    uint32_t channels, depth, height, width;
    enum dtype type;
    const struct image_output *output; /* for images of bytes: how their values are stored; must outlive the
                                          stream. NULL: as they are, channels first, not mirrored */

    struct stream_plan plan;
    struct stream_position begin; /* the first batch; zeros: the beginning */
    int threads;                  /* at least 1 */
    uint32_t ahead; /* number of batches that are prepared before the consumer takes them, at least 1 */
    uint32_t held;  /* number of batches that the consumer holds at a time; 0: one. It may hold more, but the
                       stream then prepares fewer; STATUS_USAGE if it holds ahead + held batches and asks for
                       another one */
    enum set_stream_error on_error;

    /* Shards of a URL without a cache folder are held in memory: together at most this many bytes, or one
     * shard if it is larger. 0: SET_STREAM_SHARD_BYTES. */
    uint64_t shard_bytes;

    /* Allocate the memory of a batch, for example pinned memory; NULL: 64-byte aligned host memory. */
    enum status (*allocate)(size_t bytes, void **memory);
    void (*deallocate)(void *memory);
};

#define SET_STREAM_SHARD_BYTES (UINT64_C(1) << 30)

/* Returns the hash stream_batch.read of a sample that is read for a number of the plan. Sums of these hashes
 * show whether an epoch has each sample once, under its own number. */
static inline uint64_t set_stream_hash(const struct dataset_sample *sample, uint32_t number)
{
    uint64_t hash = (sample->key_hash ^ (uint64_t)number << 32 ^ number) + sample->edges;
    hash = (hash ^ hash >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    hash = (hash ^ hash >> 27) * UINT64_C(0x94D049BB133111EB);
    return hash ^ hash >> 31;
}

FDSL_C_BEGIN

/* Opens a stream, and starts its threads, which begin to prepare batches at the first stream_next(): a caller
 * may seek before it, and nothing is read in vain. STATUS_EXHAUSTED if memory or
 * threads run out, STATUS_TOO_LARGE if the batches do not fit into memory, STATUS_USAGE if the fit and the
 * shape contradict each other; nothing is then left allocated, and `*stream` is NULL. Values are in host
 * memory: stream_release() refuses an event (STATUS_USAGE), so the caller waits for it first. */
enum status set_stream_open(const struct set_stream_request *request, struct stream **stream);

FDSL_C_END

#endif
