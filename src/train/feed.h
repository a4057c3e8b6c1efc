/* Delivers the samples of a step in host memory, from any feed (enum data_feed). For engines on the CPU. */
#ifndef FDSL_TRAIN_FEED_H
#define FDSL_TRAIN_FEED_H

#include "train/augment.h"
#include "train/engine.h"

/* ---- The stream of a rank, also for engines on a device (DATA_LOAD) ---- */

/* A zeroed struct is a closed stream. */
struct feed_stream {
    const struct train *train;
    struct stream *stream;      /* NULL: closed */
    struct feed_lister *lister; /* lists the samples of steps */
    struct stream_stats before; /* at the latest call of feed_stream_totals() */
    uint64_t masked, delivered; /* since then, as in struct train_totals */
};

FDSL_C_BEGIN

/* Returns the decoder that an engine on a device should open for its stream: that of train->decoding;
 * DECODER_CPU if the samples are not read or keep their size. DECODER_AUTO becomes DECODER_CPU also if the
 * share is 0 or no sample is named as a JPEG. */
enum decoder feed_decoder_wanted(const struct train *train);

/* Opens a stream whose batches are the samples of this rank, and then their partners, if train_generated()
 * counts them. In a stage of a pipeline, the batches are micro-batches: step feed_micro(). train->data->feed
 * must not be DATA_STORED. `train` must outlive the stream. `threads` threads read, decode or generate. The
 * caller holds at most `held` batches at a time. `decoder` is the decoder with which the caller decodes the
 * files of set_stream_files(), never DECODER_AUTO; DECODER_CPU: the stream has no such files. Sets
 * train->decoding to this decoder and to the share of its samples. STATUS_USAGE if train->decoding demands
 * another decoder, or a share that the decoder cannot have; the message names the option. `allocate` and
 * `deallocate` are as in struct set_stream_request. The caller closes the stream, even after a failure. */
enum status feed_stream_open(const struct train *train, int threads, uint32_t held, enum decoder decoder,
                             enum status (*allocate)(size_t bytes, void **memory),
                             void (*deallocate)(void *memory), struct feed_stream *feed);
/* Does all of this except opening the stream: sets what `request` says of the plan and of the device. For
 * mixtures, of which a device opens the sources; the caller sets feed->stream. */
enum status feed_stream_begin(const struct train *train, enum decoder decoder,
                              struct data_stream_request *request, struct feed_stream *feed);
void feed_stream_close(struct feed_stream *feed);

/* train_batch() of a step, in less time. */
uint32_t feed_stream_list(const struct feed_stream *feed, uint32_t epoch, uint32_t step, uint32_t *numbers);

/* Waits for the batch of a step, which has the `count` samples in `numbers`; `count` includes the partners.
 * The caller returns the batch with stream_release(). If the step is not the stream's next one, all batches
 * must have been released. Sets the labels of the batch's samples (data_take_labels()). STATUS_FAILED if a
 * sample cannot be read, unless data->masks is set. */
enum status feed_stream_next(struct feed_stream *feed, uint32_t epoch, uint32_t step, const uint32_t *numbers,
                             uint32_t count, struct stream_batch *batch);

/* Sets the members of the totals that only the stream knows, since the previous call. */
void feed_stream_totals(struct feed_stream *feed, struct train_totals *totals);

FDSL_C_END

/* ---- The feed of engines on the CPU ---- */

/* A zeroed struct is a closed feed. */
struct feed {
    const struct train *train;
    struct feed_stream stream; /* closed with DATA_STORED */
    struct stream_batch batch; /* of the latest step, if `held` is set */
    bool held;                 /* `batch` must be released */
    /* Samples of the latest step, by index in the batch; then those that they are mixed with, if
     * train_generated() counts them. NULL: all samples are in memory (DATA_STORED). */
    const uint8_t *samples;
    /* Only if augment_computes(): */
    struct augment_plan augment;
    uint8_t *images; /* computed from the samples of the latest step; same indices as `samples` */
    int threads;
    struct augment_scratch *scratch; /* one per thread */
};

FDSL_C_BEGIN

/* Opens the feed of train->data, which must outlive the feed. Its stream uses resources->threads threads.
 * The CPU decodes all samples of a stream; if train->decoding has a share of a device, it does so at full
 * size, so that the samples differ from those of the device only by rounding.
 * The caller closes the feed, even after a failure. */
enum status feed_open(const struct train *train, const struct resources *resources, struct feed *feed);
void feed_close(struct feed *feed);

/* Returns whether the samples of a step come from a stream, or are augmented. If so, feed_step() must be
 * called before each step. */
static inline bool feed_computes(const struct feed *feed)
{
    return feed->stream.stream || feed->images;
}

/* Prepares the `count` samples of a step and their partners, whose numbers come from train_batch(). Call it
 * outside parallel regions, because generators open their own. */
enum status feed_step(struct feed *feed, uint32_t epoch, uint32_t step, const uint32_t *numbers,
                      uint32_t count);

/* Sets the members of the totals that only the feed knows, for the steps since the previous call. */
void feed_totals(struct feed *feed, struct train_totals *totals);

/* Returns the address of the stored values of training sample `sample`, which has index `j` in the step. */
static inline const void *feed_stored(const struct feed *feed, uint32_t sample, uint32_t j)
{
    const struct data *data = feed->train->data;
    return feed->samples ? feed->samples + j * data_stored_bytes(data, DATA_TRAIN)
                         : data_sample(data, DATA_TRAIN, train_original(data, sample));
}

/* Returns the address of training sample `sample` for data_gather(); the sample has index `j` in the step.
 * The address is valid until the next feed_step(). */
static inline const void *feed_sample(const struct feed *feed, uint32_t sample, uint32_t j)
{
    return feed->images ? feed->images + j * feed->train->data->sample_bytes : feed_stored(feed, sample, j);
}

/* Computes the values that the network sees of the sample at index `j` of a step: augmented, normalised,
 * erased and mixed. The numbers of the step's `count` samples and of their partners come from train_batch();
 * if a step has several parts, each part passes the numbers of the whole step. `partner` has room for a
 * sample; it is used only if samples are mixed. */
void feed_gather(const struct feed *feed, const struct mix *mix, uint32_t epoch, const uint32_t *numbers,
                 uint32_t count, uint32_t j, float *partner, float *values);

/* Returns the bytes of memory that the feed uses. */
uint64_t feed_memory_bytes(const struct feed *feed);

FDSL_C_END

#endif
