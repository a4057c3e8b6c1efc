/* A stream of the samples of a data set: class folders, or tar shards on a disk or at a URL. CPU threads read
 * and decode each sample directly into its place in a batch. */
#ifndef FDSL_DATA_SET_STREAM_H
#define FDSL_DATA_SET_STREAM_H

#include "core/stream.h"
#include "data/dataset.h"
#include "data/image.h"

/* A broken sample. */
enum set_stream_error {
    SET_STREAM_FAIL, /* ends the stream with the file, the key and the reason */
    SET_STREAM_MASK  /* becomes zeros with the label STREAM_MASKED; the first few are reported */
};

struct set_stream_request {
    /* The samples. Sample number n of the plan is sample samples[n] of the data set; NULL: sample n. Both
     * arrays and the data set must outlive the stream. */
    const struct dataset *dataset;
    const uint32_t *samples;
    const uint32_t *labels; /* by the plan's number; NULL: the stream reads the label of each sample */

    /* What a sample becomes: an image of this shape and type, channels first. With fit.res, images are
     * resized and cropped by the epoch and the plan's number of the sample (image_fit()); otherwise each
     * image must have this shape. */
    struct image_fit fit;
    uint32_t channels, depth, height, width;
    enum dtype type;

    struct stream_plan plan;
    int threads;    /* at least 1 */
    uint32_t ahead; /* number of batches that are prepared before the consumer takes them, at least 1 */
    enum set_stream_error on_error;

    /* Allocate the memory of a batch, for example pinned memory; NULL: 64-byte aligned host memory. */
    enum status (*allocate)(size_t bytes, void **memory);
    void (*deallocate)(void *memory);
};

FDSL_C_BEGIN

/* Opens a stream at epoch 0, step 0, and starts its threads. STATUS_EXHAUSTED if memory or threads run out;
 * nothing is then left allocated. A file that is replaced, truncated or shortened while it is read is a
 * failure, never a mixture of old and new bytes. */
enum status set_stream_open(const struct set_stream_request *request, struct stream **stream);

FDSL_C_END

#endif
