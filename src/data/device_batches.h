/* Streams of batches in device memory for libfdsl. A batch is handed over on a CUDA stream of the caller: the
 * calling thread never waits for the device. This header includes no CUDA header: a CUDA stream is a void *,
 * NULL for the default stream. cuda/common/device_batches.cu and device_images.cu implement the functions; in
 * builds without CUDA, they return STATUS_UNAVAILABLE (cuda/common/device_none.c). */
#ifndef FDSL_DATA_DEVICE_BATCHES_H
#define FDSL_DATA_DEVICE_BATCHES_H

#include "core/generator.h"
#include "core/stream.h"
#include "data/generated_stream.h"
#include "data/mixture.h"
#include "data/set_stream.h"

struct device_batches;

/* What a batch is for the consumer, in device memory. The next batch in the same slot has the same addresses.
 */
struct device_parts {
    void *images;
    int64_t *labels; /* NULL: not wanted */
    float *targets;  /* with mixing: (count, classes) weights; NULL: not wanted */
    uint8_t *masks;  /* of images that have them, aligned to 16 bytes; NULL: not wanted */
};

struct device_batches_type {
    enum status (*next)(struct device_batches *self, void *cuda_stream, struct stream_batch *batch,
                        struct device_parts *parts);
    enum status (*fill)(struct device_batches *self, const struct device_parts *to, void *cuda_stream,
                        struct stream_batch *batch);
    enum status (*release)(struct device_batches *self, const struct stream_batch *batch, void *cuda_stream);
    enum status (*locate)(struct device_batches *self); /* NULL: the position is always known */
};

/* The first member of each implementation's own struct. `stream` has the functions wait, seek, stats, cancel
 * and close of core/stream.h; the functions below replace stream_next() and stream_release(). */
struct device_batches {
    struct stream stream; /* must be the first member */
    const struct device_batches_type *type;
};

/* Takes the next batch. `cuda_stream` waits until it is complete. `batch->samples.values` and
 * `batch->samples.labels` are not set: `parts` has their addresses, with labels in int64. Failures as
 * stream_next(). The device of the stream must be current in the calling thread, also for the following two
 * functions. */
static inline enum status device_batches_next(struct device_batches *self, void *cuda_stream,
                                              struct stream_batch *batch, struct device_parts *parts)
{
    return self->type->next(self, cuda_stream, batch, parts);
}

/* Enqueues on `cuda_stream` that the next batch is stored in device memory of the caller; `to->images` is
 * aligned to 16 bytes. Allocates nothing. If `cuda_stream` is being captured, batches of
 * data sets are refused (STATUS_USAGE). Generated batches are captured: each replay then stores the batch at
 * the stream's position, and moves it on; `batch->last` is false. */
static inline enum status device_batches_fill(struct device_batches *self, const struct device_parts *to,
                                              void *cuda_stream, struct stream_batch *batch)
{
    return self->type->fill(self, to, cuda_stream, batch);
}

/* Returns a batch of device_batches_next(). Its memory is used again after the work that is enqueued on
 * `cuda_stream` now. Any thread may call it. */
static inline enum status device_batches_release(struct device_batches *self,
                                                 const struct stream_batch *batch, void *cuda_stream)
{
    return self->type->release(self, batch, cuda_stream);
}

/* Sets stream.at to the position after all batches that were delivered, also by replays of a captured call.
 * To be called before stream.at is used. */
static inline enum status device_batches_locate(struct device_batches *self)
{
    return self->type->locate ? self->type->locate(self) : STATUS_OK;
}

FDSL_C_BEGIN

/* Opens a stream of a data set. `request` is that of the host stream, without memory and share; its `output`,
 * if there is one, stores bytes, channels first. Images are erased and mixed on the device; `classes` is then
 * the number of classes of the targets.
 * `wanted` is the decoder, and `share` its share, below 0: the decoder's own (set_stream_share()). Messages
 * name the fields `decoder` and `device_share`. DECODER_AUTO becomes DECODER_CPU, with a warning if nvJPEG is
 * missing. `output` says how images are stored; `held` batches are held at a time. All must outlive the
 * stream. The device becomes current in the calling thread. STATUS_UNAVAILABLE if the device or the wanted
 * decoder does not exist; STATUS_EXHAUSTED or STATUS_TOO_LARGE if memory runs out. The caller closes the
 * stream with stream_close(), which waits for the work that uses its memory. */
enum status device_set_open(int device, const struct set_stream_request *request, enum decoder wanted,
                            double share, const struct image_output *output, uint32_t held,
                            struct device_batches **batches);

/* The order of generated images, which a device can compute. */
struct device_order {
    uint64_t seed, fresh, steps;
    uint32_t count, global; /* samples of the set, and of a step of all ranks */
    uint32_t rank, ranks;
    bool shuffle;      /* false: the order of the numbers */
    bool host_numbers; /* the generator needs the numbers in host memory, too */
    bool captures;     /* a captured fill is possible: all steps have the same number of samples on this rank,
                          and the generator reads numbers from device memory alone */
};

/* Opens a stream of generated images. `request` is that of a host stream: generator (on this device; taken
 * over, and closed even after a failure), plan, sample_bytes, mask_bytes, type, ahead and held. `plan` lists
 * what `order` describes. Otherwise as device_set_open(). */
enum status device_images_open(int device, const struct generated_stream_request *request,
                               const struct device_order *order, struct device_batches **batches);

/* A source of a mixture: a stream of a data set, or a generator on the device. */
struct device_mixed_source {
    struct device_batches *set;  /* NULL: generated */
    struct generator *generator; /* for plan.capacity samples */
    bool host_numbers;           /* the generator needs the numbers in host memory, too */
    uint64_t (*label)(const void *state, uint64_t sample); /* of a sample of the generator */
    const void *state;                                     /* must outlive the stream */
};

/* Opens the stream of a mixture (data/mixture.h). Takes over the sources and the plans, also after a failure;
 * each data set has the plan mixture_plan_of(). All images have `sample_bytes` bytes. Batches have labels;
 * `numbers` are positions. Otherwise as device_set_open(). */
enum status device_mixed_open(int device, const struct mixture *mixture, struct mixture_plans *plans,
                              const struct device_mixed_source *sources, uint64_t sample_bytes,
                              enum dtype type, uint32_t held, struct device_batches **batches);

FDSL_C_END

#endif
