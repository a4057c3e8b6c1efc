/* Implements device_set_open() of data/device_batches.h. A batch of a data set is in a slot of a device
 * stream, as bytes with planes of channels. One kernel on the caller's stream stores it in the form that the
 * caller wants, in the caller's memory or in memory of the slot: so only bytes are copied from the host, and
 * fill() writes each value once. */
#include "data/device_batches.h"

#include <new>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <pthread.h>
#include <stdlib.h>

#include "common/calls.cuh"
#include "common/check.cuh"
#include "common/device_stream.cuh"
#include "common/jitter.cuh"
#include "common/stream.cuh"
#include "data/mixing.h"
#include "data/random_boxes.h"
#include "data/random_draws.h"
#include "machine/device.h"

#define BLOCK 256

/* ---- Storing a batch ---- */

/* Arguments of the kernels. All pointers are device pointers. */
struct store {
    const uint8_t *from; /* `count` images of bytes, planes of channels */
    const int32_t *from_labels;
    const uint32_t *numbers; /* for flips */
    void *to;
    int64_t *labels;                                 /* NULL: not wanted */
    uint32_t count, channels, height, width, blocks; /* height: of all frames of a clip; blocks: per image */
    uint32_t frame; /* pixels of a frame, if frames are before channels; otherwise those of a sample */
    uint32_t epoch;
    uint64_t seed;
    bool flip;
    /* Only for mixed_kernel() and target_kernel(): */
    bool interleaved;
    uint32_t rows;    /* of a frame */
    uint32_t entries; /* images in `from`: `count`, and the partners that follow (mix_partner()) */
    struct augment erase;
    struct mix mix;
    float scale[IMAGE_OUTPUT_CHANNELS_MAX], offset[IMAGE_OUTPUT_CHANNELS_MAX];
};

static __device__ __forceinline__ uint64_t own_thread(void)
{
    return static_cast<uint64_t>(blockIdx.x) * BLOCK + threadIdx.x;
}

/* Every kernel has at least `count` threads. */
static __device__ __forceinline__ void store_label(const struct store &store)
{
    const uint64_t i = own_thread();
    if (store.labels && i < store.count)
        store.labels[i] = store.from_labels[i]; /* STREAM_MASKED is -1 */
}

static __global__ void __launch_bounds__(BLOCK) label_kernel(const __grid_constant__ struct store store)
{
    store_label(store);
}

/* Copies the images as they are. Adjacent threads copy adjacent words. */
static __global__ void __launch_bounds__(BLOCK)
    copy_kernel(const __grid_constant__ struct store store, uint64_t bytes)
{
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * BLOCK, words = bytes / sizeof(uint4);
    store_label(store);
    for (uint64_t i = own_thread(); i < words; i += stride)
        static_cast<uint4 *>(store.to)[i] = reinterpret_cast<const uint4 *>(store.from)[i];
    const uint64_t rest = words * sizeof(uint4) + own_thread();
    if (rest < bytes)
        static_cast<uint8_t *>(store.to)[rest] = store.from[rest];
}

/* `N` elements in one access to memory. */
template <class T, int N> struct alignas(N * sizeof(T)) vector_of {
    T element[N];
};

/* Computes image_output.values: the same rounded operations, so the same bits. */
template <class T>
static __device__ __forceinline__ T convert(const struct store &store, uint32_t channel, uint8_t byte)
{
    const float value = fmaf(static_cast<float>(byte), store.scale[channel], store.offset[channel]);
    if constexpr (sizeof(T) == 1)
        return byte;
    else if constexpr (sizeof(T) == 4)
        return value;
    else if constexpr (std::is_same_v<T, __half>)
        return __float2half_rn(value);
    else
        return __float2bfloat16_rn(value);
}

/* Reads `N` pixels of a plane, from pixel `x` of a row on; mirrored from the right if `flips` is set. */
template <int N>
static __device__ __forceinline__ vector_of<uint8_t, N> read_pixels(const uint8_t *row, uint32_t width,
                                                                    uint32_t x, bool flips)
{
    using bytes = vector_of<uint8_t, N>;
    if (!flips)
        return *reinterpret_cast<const bytes *>(row + x);
    const bytes mirrored = *reinterpret_cast<const bytes *>(row + width - N - x);
    bytes result;
#pragma unroll
    for (int i = 0; i < N; i++)
        result.element[i] = mirrored.element[N - 1 - i];
    return result;
}

/* Each thread converts `N` adjacent pixels of one row, in all `C` channels. `N` divides the width, and all
 * accesses are aligned. A masked image becomes zeros, as on the host. */
template <class T, int C, bool INTERLEAVED, int N>
static __global__ void __launch_bounds__(BLOCK) store_kernel(const __grid_constant__ struct store store)
{
    const uint32_t image = blockIdx.x / store.blocks, plane = store.height * store.width;
    const uint32_t pixel = ((blockIdx.x - image * store.blocks) * BLOCK + threadIdx.x) * N;
    __shared__ bool flips;
    if (store.flip && threadIdx.x == 0)
        flips = draw_flip(store.seed, store.epoch, store.numbers[image]);
    __syncthreads();
    store_label(store);
    if (pixel >= plane)
        return;
    const uint32_t y = pixel / store.width, x = pixel - y * store.width;
    const bool masked = store.from_labels[image] == STREAM_MASKED;
    const uint64_t first = static_cast<uint64_t>(image) * C * plane;
    const uint32_t group = pixel / store.frame; /* the frame, or 0 */
    T *to = static_cast<T *>(store.to) + first;
    vector_of<T, N> out[C];
#pragma unroll
    for (int c = 0; c < C; c++) {
        const uint8_t *row = store.from + first + static_cast<uint64_t>(c) * plane + y * store.width;
        const vector_of<uint8_t, N> in = read_pixels<N>(row, store.width, x, store.flip && flips);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const T value = masked ? static_cast<T>(0.0f) : convert<T>(store, c, in.element[i]);
            if constexpr (INTERLEAVED)
                out[(i * C + c) / N].element[(i * C + c) % N] = value;
            else
                out[c].element[i] = value;
        }
    }
#pragma unroll
    for (int c = 0; c < C; c++) {
        T *at = INTERLEAVED ? to + static_cast<uint64_t>(C) * pixel + c * N
                            : to + static_cast<uint64_t>(group * (C - 1) + c) * store.frame + pixel;
        *reinterpret_cast<vector_of<T, N> *>(at) = out[c];
    }
}

/* ---- Erasing and mixing ---- */

/* The parameters of an image, which all threads of a block read. */
struct drawn_image {
    bool flips, masked;
    struct draw_erase erase;
};

static __device__ struct drawn_image draw_image(const struct store &store, uint32_t image)
{
    const uint32_t number = store.numbers[image];
    return {store.flip && draw_flip(store.seed, store.epoch, number),
            store.from_labels[image] == STREAM_MASKED,
            box_erase(&store.erase, store.seed, store.epoch, number)};
}

template <class T> static __device__ __forceinline__ T from_float(float value)
{
    if constexpr (sizeof(T) == 1)
        return static_cast<uint8_t>(augment_nearest(value));
    else if constexpr (sizeof(T) == 4)
        return value;
    else if constexpr (std::is_same_v<T, __half>)
        return __float2half_rn(value);
    else
        return __float2bfloat16_rn(value);
}

/* Returns the value at (c, y, x) of an image before it is mixed: that of image_output_store(). */
template <class T>
static __device__ __forceinline__ T unmixed(const struct store &store, const struct drawn_image &drawn,
                                            uint32_t image, uint32_t c, uint32_t y, uint32_t x)
{
    const struct image_box &box = drawn.erase.box;
    const uint32_t width = store.width, row = c * store.height + y, in_frame = y % store.rows;
    if (drawn.masked)
        return static_cast<T>(0.0f);
    if constexpr (sizeof(T) > 1) /* the noise is normalised */
        if (in_frame - box.top < box.height && x - box.left < box.width)
            return from_float<T>(box_erased(&drawn.erase, in_frame, x, row * width + x, 0));
    const uint64_t first = static_cast<uint64_t>(image) * store.channels * store.height * width;
    return convert<T>(store, c, store.from[first + row * width + (drawn.flips ? width - 1 - x : x)]);
}

/* Each thread stores one pixel of an image, in all channels, erased and mixed: the values of
 * image_output_store() and mix_images(). */
template <class T>
static __global__ void __launch_bounds__(BLOCK) mixed_kernel(const __grid_constant__ struct store store)
{
    const uint32_t image = blockIdx.x / store.blocks, plane = store.height * store.width;
    const uint32_t pixel = (blockIdx.x - image * store.blocks) * BLOCK + threadIdx.x;
    const bool mixes = store.mix.share < 1;
    const uint32_t partner = mixes ? mix_partner(store.count, store.entries, image) : image;
    __shared__ struct drawn_image own, other;
    if (threadIdx.x == 0)
        own = draw_image(store, image);
    if (mixes && threadIdx.x == BLOCK - 1)
        other = draw_image(store, partner);
    __syncthreads();
    store_label(store);
    if (pixel >= plane)
        return;
    const uint32_t y = pixel / store.width, x = pixel - y * store.width;
    const bool cut = mixes && store.mix.cut && mix_cuts(&store.mix, y, x);
    T *to = static_cast<T *>(store.to) + static_cast<uint64_t>(image) * store.channels * plane;
    for (uint32_t c = 0; c < store.channels; c++) {
        T value = cut ? unmixed<T>(store, other, partner, c, y, x) : unmixed<T>(store, own, image, c, y, x);
        if (mixes && !store.mix.cut) {
            const T second = unmixed<T>(store, other, partner, c, y, x);
            value = from_float<T>(
                mix_value(&store.mix, y, x, static_cast<float>(value), static_cast<float>(second)));
        }
        to[store.interleaved ? pixel * store.channels + c
                             : (pixel / store.frame * (store.channels - 1) + c) * store.frame + pixel] =
            value;
    }
}

/* Each thread stores the weight of one class in one image. */
static __global__ void __launch_bounds__(BLOCK)
    target_kernel(const __grid_constant__ struct store store, uint32_t classes, float *targets)
{
    const uint64_t i = own_thread();
    if (i >= static_cast<uint64_t>(store.count) * classes)
        return;
    const uint32_t image = static_cast<uint32_t>(i / classes), k = static_cast<uint32_t>(i % classes);
    const uint32_t partner = mix_partner(store.count, store.entries, image);
    const struct target target = {static_cast<uint32_t>(store.from_labels[image]),
                                  static_cast<uint32_t>(store.from_labels[partner]), store.mix.share};
    targets[i] = mix_weight(&target, k);
}

typedef void store_function(const struct store);

template <class T, int C, bool INTERLEAVED> static store_function *find_width(uint32_t width)
{
    return width % 4 == 0 ? store_kernel<T, C, INTERLEAVED, 4> : store_kernel<T, C, INTERLEAVED, 1>;
}

template <class T> static store_function *find_layout(const struct store *store, bool interleaved)
{
    return store->channels == 1 ? find_width<T, 1, false>(store->width)
           : interleaved        ? find_width<T, 3, true>(store->width)
                                : find_width<T, 3, false>(store->width);
}

/* Returns the kernel for the images of `output`. */
static store_function *find_kernel(const struct store *store, const struct image_output *output)
{
    const bool interleaved = output->interleaved;
    return output->type == DTYPE_F16    ? find_layout<__half>(store, interleaved)
           : output->type == DTYPE_BF16 ? find_layout<__nv_bfloat16>(store, interleaved)
           : output->type == DTYPE_F32  ? find_layout<float>(store, interleaved)
                                        : find_layout<uint8_t>(store, interleaved);
}

/* The same for images that are erased or mixed. */
static store_function *find_mixed_kernel(const struct image_output *output)
{
    return output->type == DTYPE_F16    ? mixed_kernel<__half>
           : output->type == DTYPE_BF16 ? mixed_kernel<__nv_bfloat16>
           : output->type == DTYPE_F32  ? mixed_kernel<float>
                                        : mixed_kernel<uint8_t>;
}

/* ---- Data sets ---- */

/* The memory of the batch that next() delivers from a slot. */
struct set_slot {
    int64_t *labels; /* within set_batches.labels */
    float *targets;  /* behind `images`, with mixing */
    void *images;    /* NULL: not allocated, or the images are those of the device stream */
    void *changes;   /* memory of `color`, then with blur the changed bytes; NULL: colours do not change */
    struct jitter_batch color;
    uint8_t *changed; /* NULL: the bytes of the device stream are changed in place */
};

struct set_batches {
    struct device_batches base; /* must be the first member */
    int device;
    struct stream *inner; /* a device stream */
    struct image_decoder *decoder;
    const struct image_output *output;
    struct store store;                /* what all batches have in common */
    store_function *kernel;            /* NULL: the images are the bytes of the device stream */
    uint64_t sample_bytes, mask_bytes; /* mask_bytes 0: there are no masks */
    struct mixing mixing;
    uint64_t mix_seed;
    struct shape shape;
    struct stream_plan plan;
    uint32_t (*own)(const void *context, uint64_t epoch, uint64_t step); /* set_stream_request.own */
    uint32_t capacity, slot_count;
    uint32_t classes; /* of the targets; 0: there are none */
    struct set_slot *slots;
    int64_t *labels;       /* device memory for all slots */
    uint64_t device_bytes; /* memory of the slots on the device */
    uint64_t partners;     /* that were left out of batches */
    pthread_mutex_t lock;  /* protects `device_bytes` and `partners` */
};

static struct set_batches *set_of(struct device_batches *batches)
{
    return reinterpret_cast<struct set_batches *>(batches);
}

static struct set_batches *set_of(struct stream *stream)
{
    return reinterpret_cast<struct set_batches *>(stream);
}

/* Returns whether images differ from the bytes of the device stream. */
static bool converts(const struct set_batches *self)
{
    return self->kernel != nullptr;
}

/* Leaves the partners out of a batch that was taken. Returns the number of images with them. */
static uint32_t leave_partners(struct set_batches *self, struct stream_batch *batch)
{
    const uint32_t entries = batch->samples.count;
    if (!self->own)
        return entries;
    batch->samples.count = self->own(self->plan.context, batch->epoch, batch->step);
    batch->samples.bytes = batch->samples.count * batch->samples.stride;
    if (entries == batch->samples.count)
        return entries;
    pthread_mutex_lock(&self->lock);
    self->partners += entries - batch->samples.count;
    pthread_mutex_unlock(&self->lock);
    return entries;
}

static enum status store_targets(const struct set_batches *self, const struct store *store, float *targets,
                                 cudaStream_t stream)
{
    const uint64_t values = (uint64_t)store->count * self->classes;
    if (!targets)
        return STATUS_OK;
    target_kernel<<<(uint32_t)((values + BLOCK - 1) / BLOCK), BLOCK, 0, stream>>>(*store, self->classes,
                                                                                  targets);
    return CUDA_LAUNCHED("target_kernel");
}

/* Enqueues changes of colour of a batch of `entries` images, if there are any, and sets samples.values to the
 * changed bytes. */
static enum status change_colors(const struct set_batches *self, struct stream_batch *batch, uint32_t entries,
                                 cudaStream_t stream)
{
    const struct set_slot *slot = &self->slots[batch->slot];
    uint8_t *from = static_cast<uint8_t *>(const_cast<void *>(batch->samples.values));
    uint8_t *to = slot->changed ? slot->changed : from;
    if (!slot->changes || batch->samples.count == 0)
        return STATUS_OK;
    TRY(jitter_batch_run(&slot->color, static_cast<uint32_t>(batch->epoch),
                         device_stream_numbers(self->inner, batch), entries, from, to, stream));
    batch->samples.values = to;
    return STATUS_OK;
}

/* Enqueues that a batch of `entries` images is stored. `to->images` NULL: only the labels. */
static enum status store_batch(const struct set_batches *self, const struct stream_batch *batch,
                               uint32_t entries, const struct device_parts *to, cudaStream_t stream)
{
    const struct batch *samples = &batch->samples;
    struct store store = self->store;
    void *const images = to->images;
    if (samples->count == 0)
        return STATUS_OK;
    store.from = static_cast<const uint8_t *>(samples->values);
    store.from_labels = samples->labels;
    store.numbers = device_stream_numbers(self->inner, batch);
    store.to = images;
    store.labels = to->labels;
    store.count = samples->count;
    store.entries = entries;
    store.epoch = (uint32_t)batch->epoch;
    if (mixing_on(&self->mixing))
        store.mix = mix_draw(&self->mixing, self->mix_seed, store.epoch, (uint32_t)batch->step, &self->shape);
    TRY(store_targets(self, &store, to->targets, stream));
    if (!images) {
        label_kernel<<<(store.count + BLOCK - 1) / BLOCK, BLOCK, 0, stream>>>(store);
        return CUDA_LAUNCHED("label_kernel");
    }
    if (!converts(self)) {
        const uint64_t bytes = samples->count * self->sample_bytes;
        const uint64_t blocks = (bytes / sizeof(uint4) + store.count + BLOCK - 1) / BLOCK + 1;
        copy_kernel<<<(uint32_t)(blocks < INT32_MAX ? blocks : INT32_MAX), BLOCK, 0, stream>>>(store, bytes);
        return CUDA_LAUNCHED("copy_kernel");
    }
    const uint64_t blocks = (uint64_t)store.count * store.blocks;
    if (blocks > INT32_MAX)
        return status_set(
            STATUS_USAGE,
            "batch_size: %u images of %u x %u pixels are too many for one kernel launch; lower it",
            store.count, store.height, store.width);
    self->kernel<<<(uint32_t)blocks, BLOCK, 0, stream>>>(store);
    return CUDA_LAUNCHED("store_kernel");
}

/* Allocates the images of all slots, at the first next() that needs them. */
static enum status allocate_images(struct set_batches *self)
{
    const uint64_t images =
        stream_aligned((uint64_t)self->capacity * self->sample_bytes * dtype_bytes(self->output->type));
    const uint64_t bytes = images + (uint64_t)self->capacity * self->classes * sizeof(float);
    for (uint32_t i = 0; i < self->slot_count && converts(self); i++) {
        if (self->slots[i].images)
            continue;
        TRY(device_alloc(self->device, bytes, &self->slots[i].images));
        if (self->classes)
            self->slots[i].targets =
                reinterpret_cast<float *>(static_cast<uint8_t *>(self->slots[i].images) + images);
        pthread_mutex_lock(&self->lock);
        self->device_bytes += bytes;
        pthread_mutex_unlock(&self->lock);
    }
    return STATUS_OK;
}

/* Lets `consumer` wait for an event. Most batches are complete; asking takes less time than waiting. */
static enum status wait_for(cudaEvent_t event, cudaStream_t consumer)
{
    {
        struct relaxed_capture relaxed; /* cudaEventQuery() would end captures */
        if (cudaEventQuery(event) == cudaSuccess)
            return STATUS_OK;
    }
    (void)cudaGetLastError(); /* it is not complete; another error comes back */
    return CUDA_STATUS(cudaStreamWaitEvent(consumer, event, 0));
}

/* Takes the next batch, and lets `consumer` wait until it is complete. `borrows`: it is returned at once. */
static enum status take(struct set_batches *self, cudaStream_t consumer, bool borrows,
                        struct stream_batch *batch)
{
    TRY(borrows ? device_stream_borrow(self->inner, batch) : stream_next(self->inner, batch));
    self->base.stream.at = self->inner->at;
    return wait_for(static_cast<cudaEvent_t>(batch->ready), consumer);
}

/* Returns a batch after a failure. Ignores errors, so that the message of that failure stays. */
static enum status abandon(struct set_batches *self, const struct stream_batch *batch, enum status status)
{
    const struct failure failure = status_save(status);
    (void)stream_release(self->inner, batch, NULL);
    return status_restore(&failure);
}

static enum status set_next(struct device_batches *batches, void *cuda_stream, struct stream_batch *batch,
                            struct device_parts *parts)
{
    struct set_batches *self = set_of(batches);
    const cudaStream_t consumer = static_cast<cudaStream_t>(cuda_stream);
    batch->ready = NULL;
    TRY(calls_refuse_capture(cuda_stream, "batches of data sets"));
    TRY(allocate_images(self));
    enum status status = take(self, consumer, false, batch);
    if (status != STATUS_OK && !batch->ready)
        return status;
    const struct set_slot *slot = &self->slots[batch->slot];
    const uint32_t entries = leave_partners(self, batch);
    *parts = {slot->images, slot->labels, slot->targets, const_cast<uint8_t *>(batch->masks)};
    if (status == STATUS_OK)
        status = change_colors(self, batch, entries, consumer);
    if (status == STATUS_OK)
        status = store_batch(self, batch, entries, parts, consumer);
    if (!parts->images)
        parts->images = const_cast<void *>(batch->samples.values);
    return status == STATUS_OK ? STATUS_OK : abandon(self, batch, status);
}

static enum status set_fill(struct device_batches *batches, const struct device_parts *to, void *cuda_stream,
                            struct stream_batch *batch)
{
    struct set_batches *self = set_of(batches);
    const cudaStream_t consumer = static_cast<cudaStream_t>(cuda_stream);
    batch->ready = NULL;
    TRY(calls_refuse_capture(cuda_stream, "batches of data sets"));
    enum status status = take(self, consumer, true, batch);
    if (status != STATUS_OK && !batch->ready)
        return status;
    const uint32_t entries = leave_partners(self, batch);
    if (status == STATUS_OK)
        status = change_colors(self, batch, entries, consumer);
    if (status == STATUS_OK)
        status = store_batch(self, batch, entries, to, consumer);
    if (status == STATUS_OK && to->masks && batch->samples.count > 0)
        status = CUDA_STATUS(cudaMemcpyAsync(to->masks, batch->masks, batch->samples.count * self->mask_bytes,
                                             cudaMemcpyDeviceToDevice, consumer));
    if (status != STATUS_OK)
        return abandon(self, batch, status);
    status = device_stream_give_back(self->inner, batch, consumer);
    if (status == STATUS_OK)
        return STATUS_OK;
    struct relaxed_capture relaxed;
    (void)cudaStreamSynchronize(consumer); /* the kernel that reads the batch */
    return abandon(self, batch, status);
}

static enum status set_release(struct device_batches *batches, const struct stream_batch *batch,
                               void *cuda_stream)
{
    struct set_batches *self = set_of(batches);
    TRY(calls_refuse_capture(cuda_stream, "the release of a batch"));
    return device_stream_give_back(self->inner, batch, static_cast<cudaStream_t>(cuda_stream));
}

static bool set_wait(struct stream *stream, double seconds)
{
    return stream_wait(set_of(stream)->inner, seconds);
}

static enum status set_seek(struct stream *stream, struct stream_position to)
{
    return stream_seek(set_of(stream)->inner, to);
}

static void set_stats(struct stream *stream, struct stream_stats *stats)
{
    struct set_batches *self = set_of(stream);
    stream_stats(self->inner, stats);
    pthread_mutex_lock(&self->lock);
    stats->memory_bytes += self->device_bytes + self->decoder->bytes;
    stats->samples -= self->partners;
    pthread_mutex_unlock(&self->lock);
}

static void set_cancel(struct stream *stream)
{
    stream_cancel(set_of(stream)->inner);
}

static void set_close(struct stream *stream)
{
    struct set_batches *self = set_of(stream);
    struct relaxed_capture relaxed;
    (void)cudaSetDevice(self->device);
    stream_close(self->inner); /* waits for the consumer's work on all batches */
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++) {
        (void)cudaFree(self->slots[i].images);
        (void)cudaFree(self->slots[i].changes);
    }
    (void)cudaFree(self->labels);
    if (self->decoder)
        image_decoder_close(self->decoder);
    delete self->decoder;
    pthread_mutex_destroy(&self->lock);
    delete[] self->slots;
    delete self;
}

static const struct stream_type set_stream_functions = {
    nullptr, set_wait, nullptr, set_seek, set_stats, set_cancel, set_close,
};
static const struct device_batches_type set_functions = {set_next, set_fill, set_release, nullptr};

/* Opens the decoder, and decides its share. */
static enum status open_decoder(struct set_batches *self, enum decoder wanted, double *share)
{
    self->decoder = new (std::nothrow) image_decoder{};
    TRY(ALLOCATED(self->decoder, "out of memory"));
    const enum status status = image_decoder_open(self->decoder, wanted);
    if (status != STATUS_OK)
        return status_prefix(status, "decoder");
    if (self->decoder->kind == DECODER_CPU && *share > 0)
        return status_set(STATUS_USAGE,
                          "device_share: it is %g, but the CPU decodes all of these samples; leave it at -1",
                          *share);
    *share = *share < 0 ? set_stream_share(self->decoder->kind) : *share;
    return STATUS_OK;
}

static enum status open_inner(struct set_batches *self, const struct set_stream_request *request,
                              double share, uint32_t held)
{
    struct set_stream_request from = *request;
    struct stream *host;
    from.mixing = {0, 0};
    from.held = DEVICE_STREAM_HELD;
    from.device_share = share;
    from.allocate = device_stream_pin;
    from.deallocate = device_stream_unpin;
    device_stream_use(self->device);
    TRY(set_stream_open(&from, &host));
    /* Another thread may have called device_stream_use(), and the line above may have used its device. */
    const enum status current = CUDA_STATUS(cudaSetDevice(self->device));
    if (current != STATUS_OK) {
        stream_close(host);
        return current;
    }
    const struct device_stream_request to = {.decoder = share > 0 ? self->decoder : nullptr,
                                             .res = request->fit.res,
                                             .channels = request->channels,
                                             .chunk = 0,
                                             .capacity = request->plan.capacity,
                                             .sample_bytes = self->sample_bytes,
                                             .mask_bytes = self->mask_bytes,
                                             .by_epoch = request->plan.by_epoch,
                                             .ahead = request->ahead,
                                             .held = held,
                                             .resident_bytes = request->device_bytes};
    TRY(device_stream_open(host, &to, &self->inner));
    self->base.stream.at = self->inner->at;
    return STATUS_OK;
}

/* Allocates what changes of colour need. Batches of different slots may be in use on different CUDA streams.
 */
static enum status open_changes(struct set_batches *self)
{
    const struct image_output *output = self->output;
    const uint64_t bytes = stream_aligned(jitter_batch_bytes(&self->shape, self->capacity));
    const bool apart = output->color.blur > 0;
    if (!jitter_on(&output->color))
        return STATUS_OK;
    for (uint32_t i = 0; i < self->slot_count; i++) {
        struct set_slot *slot = &self->slots[i];
        const uint64_t all = bytes + (apart ? self->capacity * self->sample_bytes : 0);
        TRY(device_alloc(self->device, all, &slot->changes));
        self->device_bytes += all;
        slot->changed = apart ? static_cast<uint8_t *>(slot->changes) + bytes : nullptr;
        TRY(jitter_batch_open(&output->color, &self->shape, output->seed, self->capacity, slot->changes,
                              &slot->color));
    }
    return STATUS_OK;
}

/* CUDA loads kernels at their first launch, and must not do so during a capture. */
static enum status load_kernels(const struct set_batches *self)
{
    cudaFuncAttributes attributes;
    if (converts(self))
        CUDA_TRY(cudaFuncGetAttributes(&attributes, self->kernel));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, target_kernel));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, label_kernel));
    return CUDA_STATUS(cudaFuncGetAttributes(&attributes, copy_kernel));
}

static enum status open_set(struct set_batches *self, const struct set_stream_request *request,
                            enum decoder wanted, double share, uint32_t held)
{
    const struct image_output *output = self->output;
    const uint64_t pixels = (uint64_t)request->depth * request->height * request->width;
    const bool mixes = mixing_on(&request->mixing), changes = mixes || output->erase.erasing > 0;
    const uint32_t per_block = BLOCK * (request->width % 4 == 0 && !changes ? 4 : 1);
    void *memory;
    self->store.channels = request->channels;
    self->store.height = request->depth * request->height;
    self->store.rows = request->height;
    self->store.frame = (uint32_t)(output->frames ? pixels / request->depth : pixels);
    self->store.width = request->width;
    self->store.blocks = (uint32_t)((pixels + per_block - 1) / per_block);
    self->store.flip = output->flip;
    self->store.seed = output->seed;
    self->store.interleaved = output->interleaved;
    self->store.erase = output->erase;
    self->store.mix.share = 1;
    self->mixing = request->mixing;
    self->mix_seed = request->mix_seed;
    self->classes = mixes ? request->classes : 0;
    self->shape = {request->channels, request->depth, request->height, request->width};
    self->plan = request->plan;
    self->own = request->own;
    memcpy(self->store.scale, output->scale, sizeof self->store.scale);
    memcpy(self->store.offset, output->offset, sizeof self->store.offset);
    if (changes)
        self->kernel = find_mixed_kernel(output);
    else if (output->type != DTYPE_U8 || output->flip ||
             ((output->interleaved || output->frames) && request->channels > 1))
        self->kernel = find_kernel(&self->store, output);
    self->sample_bytes = request->channels * pixels;
    self->mask_bytes = set_stream_mask_bytes(request);
    self->capacity = request->plan.capacity;
    self->slot_count = request->ahead + held;
    self->slots = new (std::nothrow) set_slot[self->slot_count]{};
    TRY(ALLOCATED(self->slots, "out of memory for a stream"));
    TRY(open_decoder(self, wanted, &share));
    TRY(load_kernels(self));
    const uint64_t capacity = ((uint64_t)self->capacity * sizeof(int64_t) + STREAM_ALIGN - 1) / STREAM_ALIGN *
                              STREAM_ALIGN / sizeof(int64_t);
    self->device_bytes = self->slot_count * capacity * sizeof(int64_t);
    TRY(device_alloc(self->device, self->device_bytes, &memory));
    self->labels = static_cast<int64_t *>(memory);
    for (uint32_t i = 0; i < self->slot_count; i++)
        self->slots[i].labels = self->labels + i * capacity;
    TRY(open_changes(self));
    return open_inner(self, request, share, held);
}

enum status device_set_open(int device, const struct set_stream_request *request, enum decoder wanted,
                            double share, const struct image_output *output, uint32_t held,
                            struct device_batches **batches)
{
    *batches = nullptr;
    const enum status probed = device_probe(device);
    if (probed != STATUS_OK)
        return status_prefix(probed, "device");
    struct set_batches *self = new (std::nothrow) set_batches{};
    TRY(ALLOCATED(self, "out of memory for a stream"));
    self->base = {{&set_stream_functions, request->begin}, &set_functions};
    self->device = device;
    self->output = output;
    pthread_mutex_init(&self->lock, NULL);
    const int mode = device_relax_capture();
    const enum status status = open_set(self, request, wanted, share, held);
    if (status == STATUS_OK)
        *batches = &self->base;
    else {
        const struct failure failure = status_save(status);
        set_close(&self->base.stream);
        device_restore_capture(mode);
        return status_restore(&failure);
    }
    device_restore_capture(mode);
    return STATUS_OK;
}
