/* Implements data/device_batches.h. A batch of a data set is in a slot of a device stream, as bytes with
 * planes of channels. One kernel on the caller's stream stores it in the form that the caller wants, in the
 * caller's memory or in memory of the slot: so only bytes are copied from the host, and fill() writes each
 * value once.
 *
 * Generated batches are drawn by a generator, which has scratch memory for one call. So its calls are
 * ordered: each one waits for `used`, the event of the previous call. fill() draws into the caller's memory,
 * on the caller's stream. next() draws batches ahead into slots, on a stream of its own.
 *
 * A captured fill() reads the position from device memory and moves it on. The host then no longer knows the
 * position: `moves` is set, and locate() waits for the latest replay and reads it. cudaDeviceSynchronize()
 * would end captures of other threads, so the event `moved` follows all work that writes the position. */
#include "data/device_batches.h"

#include <new>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <pthread.h>
#include <stdlib.h>

#include "common/check.cuh"
#include "common/device_stream.cuh"
#include "common/stream.cuh"
#include "core/parallel.h"
#include "core/phase.h"
#include "core/timer.h"
#include "data/mixing.h"
#include "data/random_boxes.h"
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
    uint32_t count, channels, height, width, blocks; /* blocks: per image */
    uint32_t epoch;
    uint64_t seed;
    bool flip;
    /* Only for mixed_kernel() and target_kernel(): */
    bool interleaved;
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
                            : to + static_cast<uint64_t>(c) * plane + pixel;
        *reinterpret_cast<vector_of<T, N> *>(at) = out[c];
    }
}

/* ---- Erasing and mixing ---- */

/* What the threads of a block know about an image. */
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
    const uint32_t width = store.width, row = c * store.height + y;
    if (drawn.masked)
        return static_cast<T>(0.0f);
    if constexpr (sizeof(T) > 1) /* the noise is normalised */
        if (y - box.top < box.height && x - box.left < box.width)
            return from_float<T>(box_erased(&drawn.erase, y, x, row * width + x, 0));
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
        to[store.interleaved ? pixel * store.channels + c : c * plane + pixel] = value;
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
};

struct set_batches {
    struct device_batches base; /* must be the first member */
    int device;
    struct stream *inner; /* a device stream */
    struct image_decoder *decoder;
    const struct image_output *output;
    struct store store;     /* what all batches have in common */
    store_function *kernel; /* NULL: the images are the bytes of the device stream */
    uint64_t sample_bytes;
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

/* A CUDA graph would repeat the batch that was captured. The device is current. */
static enum status refuse_capture(void *cuda_stream, const char *what)
{
    return device_capturing(-1, cuda_stream)
               ? status_set(STATUS_USAGE,
                            "cuda_stream: it is being captured into a CUDA graph, which cannot "
                            "contain %s",
                            what)
               : STATUS_OK;
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
    TRY(refuse_capture(cuda_stream, "batches of data sets"));
    TRY(allocate_images(self));
    enum status status = take(self, consumer, false, batch);
    if (status != STATUS_OK && !batch->ready)
        return status;
    const struct set_slot *slot = &self->slots[batch->slot];
    const uint32_t entries = leave_partners(self, batch);
    *parts = {slot->images, slot->labels, slot->targets};
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
    TRY(refuse_capture(cuda_stream, "batches of data sets"));
    enum status status = take(self, consumer, true, batch);
    if (status != STATUS_OK && !batch->ready)
        return status;
    const uint32_t entries = leave_partners(self, batch);
    if (status == STATUS_OK)
        status = store_batch(self, batch, entries, to, consumer);
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
    TRY(refuse_capture(cuda_stream, "the release of a batch"));
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
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++)
        (void)cudaFree(self->slots[i].images);
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
                                             .by_epoch = request->plan.by_epoch,
                                             .ahead = request->ahead,
                                             .held = held};
    TRY(device_stream_open(host, &to, &self->inner));
    self->base.stream.at = self->inner->at;
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
    const uint64_t pixels = (uint64_t)request->height * request->width;
    const bool mixes = mixing_on(&request->mixing), changes = mixes || output->erase.erasing > 0;
    const uint32_t per_block = BLOCK * (request->width % 4 == 0 && !changes ? 4 : 1);
    void *memory;
    self->store.channels = request->channels;
    self->store.height = request->height;
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
    self->shape = {request->channels, 1, request->height, request->width};
    self->plan = request->plan;
    self->own = request->own;
    memcpy(self->store.scale, output->scale, sizeof self->store.scale);
    memcpy(self->store.offset, output->offset, sizeof self->store.offset);
    if (changes)
        self->kernel = find_mixed_kernel(output);
    else if (output->type != DTYPE_U8 || output->flip || (output->interleaved && request->channels > 1))
        self->kernel = find_kernel(&self->store, output);
    self->sample_bytes = request->channels * pixels;
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

/* ---- Generated images ---- */

enum slot_state { SLOT_FREE, SLOT_READY, SLOT_HELD };

/* Room for a batch of next(). */
struct image_slot {
    uint8_t *images; /* device memory */
    int64_t *labels; /* device memory, after the images */
    uint32_t *numbers;
    cudaEvent_t ready, done; /* the batch is complete; the consumer no longer uses it */
    enum slot_state state;
    uint64_t position;
    uint32_t count;
};

struct image_batches {
    struct device_batches base; /* must be the first member */
    int device;
    struct generated_stream_request request;
    struct device_order order;
    struct share share; /* of this rank in a full step */
    uint32_t slot_count;
    cudaStream_t own;        /* of next() */
    cudaEvent_t used;        /* the generator's latest work */
    unsigned long long user; /* number of the CUDA stream of this work; valid if `draws` is set */
    bool draws;
    uint64_t *numbers;      /* device memory: image numbers of a batch */
    uint64_t *position;     /* device memory, after `numbers`: the next batch of captured calls */
    cudaEvent_t moved;      /* the latest work that writes `position`, also in graphs */
    uint64_t *host_numbers; /* NULL unless the generator needs them */
    uint32_t *listed;       /* room for the numbers of a step; NULL unless the generator needs them */
    bool moves;             /* fill() was captured: replays move `position`, and other calls set it */

    pthread_mutex_t lock; /* protects everything below */
    struct image_slot *slots;
    struct image_slot **queue; /* SLOT_READY, in the order of their positions */
    uint32_t queued, held;
    bool cancelled;
    struct stream_stats stats;
    uint64_t calls, ready_sum;
};

static struct image_batches *images_of(struct device_batches *batches)
{
    return reinterpret_cast<struct image_batches *>(batches);
}

static struct image_batches *images_of(struct stream *stream)
{
    return reinterpret_cast<struct image_batches *>(stream);
}

/* A position counts steps over all epochs. */
static uint64_t position_of(const struct image_batches *self, struct stream_position at)
{
    return at.epoch * self->order.steps + at.step;
}

static struct stream_position at_position(const struct image_batches *self, uint64_t position)
{
    return {position / self->order.steps, position % self->order.steps};
}

/* Lists the image numbers of a batch, whose first sample has this offset in its step. `position` NULL: the
 * batch at `fixed`. */
static __global__ void __launch_bounds__(BLOCK)
    number_kernel(const __grid_constant__ struct device_order order, const uint64_t *position, uint64_t fixed,
                  uint32_t offset, uint32_t count, uint64_t *numbers)
{
    const uint32_t j = blockIdx.x * BLOCK + threadIdx.x;
    if (j >= count)
        return;
    const uint64_t at = position ? *position : fixed, epoch = at / order.steps;
    const uint32_t step = static_cast<uint32_t>(at - epoch * order.steps),
                   index = step * order.global + offset + j;
    const struct draw_order drawn = draw_order(order.seed, static_cast<uint32_t>(epoch), order.count);
    const uint32_t sample = order.shuffle ? draw_order_at(&drawn, index) : index;
    numbers[j] = sample + epoch * order.fresh;
}

static __global__ void set_kernel(uint64_t *word, uint64_t value)
{
    *word = value;
}

/* Returns the share of this rank in a step. */
static struct share share_at(const struct image_batches *self, uint64_t position)
{
    const struct partition ranks = {.rank = self->order.rank, .ranks = self->order.ranks, .strong = true};
    return partition_step(&ranks, self->order.count, self->order.global,
                          (uint32_t)(position % self->order.steps));
}

/* Lists the image numbers on the host, for generators that need them there. */
static const uint64_t *list_on_host(struct image_batches *self, uint64_t position)
{
    const struct stream_plan *plan = &self->request.plan;
    const struct stream_position at = at_position(self, position);
    if (!self->host_numbers)
        return nullptr;
    const uint32_t count = plan->list(plan->context, at.epoch, at.step, self->listed);
    for (uint32_t j = 0; j < count; j++)
        self->host_numbers[j] = self->listed[j] + at.epoch * self->order.fresh;
    return self->host_numbers;
}

/* Enqueues the generation of the batch at a position, or at self->position if `captured` is set. */
static enum status draw(struct image_batches *self, uint64_t position, bool captured,
                        const struct share *share, void *images, int64_t *labels, cudaStream_t stream)
{
    const uint32_t count = (uint32_t)share->count;
    RANGE(GENERATE);
    if (count == 0)
        return STATUS_OK;
    number_kernel<<<(count + BLOCK - 1) / BLOCK, BLOCK, 0, stream>>>(
        self->order, captured ? self->position : nullptr, position, (uint32_t)share->first, count,
        self->numbers);
    TRY(CUDA_LAUNCHED("number_kernel"));
    const struct generator_numbers listed = {self->numbers, 0, nullptr,
                                             captured ? nullptr : list_on_host(self, position)};
    return generator_make(self->request.generator, &listed, count, images, labels, stream);
}

/* As draw(), after the generator's previous work. On the same CUDA stream, this is the order anyway. */
static enum status draw_in_turn(struct image_batches *self, uint64_t position, const struct share *share,
                                void *images, int64_t *labels, cudaStream_t stream)
{
    unsigned long long user;
    CUDA_TRY(cudaStreamGetId(stream, &user));
    if (!self->draws || user != self->user)
        CUDA_TRY(cudaStreamWaitEvent(stream, self->used, 0));
    self->draws = false;
    TRY(draw(self, position, false, share, images, labels, stream));
    self->user = user;
    self->draws = true;
    return CUDA_STATUS(cudaEventRecord(self->used, stream));
}

static enum status write_position(struct image_batches *self, uint64_t position)
{
    CUDA_TRY(cudaMemcpyAsync(self->position, &position, sizeof position, cudaMemcpyHostToDevice, self->own));
    return CUDA_STATUS(cudaStreamSynchronize(self->own));
}

/* Waits for replays, and gets the position that they have reached. */
static enum status images_locate(struct device_batches *batches)
{
    struct image_batches *self = images_of(batches);
    uint64_t position;
    if (!self->moves)
        return STATUS_OK;
    struct relaxed_capture relaxed;
    CUDA_TRY(cudaEventSynchronize(self->moved));
    CUDA_TRY(cudaMemcpyAsync(&position, self->position, sizeof position, cudaMemcpyDeviceToHost, self->own));
    CUDA_TRY(cudaStreamSynchronize(self->own));
    self->base.stream.at = at_position(self, position);
    return STATUS_OK;
}

/* Moves the position after a batch was delivered. */
static enum status move_on(struct image_batches *self, uint64_t position, cudaStream_t stream)
{
    self->base.stream.at = at_position(self, position + 1);
    if (!self->moves)
        return STATUS_OK;
    set_kernel<<<1, 1, 0, stream>>>(self->position, position + 1);
    TRY(CUDA_LAUNCHED("set_kernel"));
    return CUDA_STATUS(cudaEventRecord(self->moved, stream));
}

static void describe(const struct image_batches *self, uint64_t position, uint32_t count,
                     struct stream_batch *batch)
{
    const struct stream_position at = at_position(self, position);
    *batch = {};
    batch->samples.count = count;
    batch->samples.stride = self->request.sample_bytes;
    batch->samples.bytes = count * self->request.sample_bytes;
    batch->samples.type = self->request.type;
    batch->epoch = at.epoch;
    batch->step = at.step;
    batch->last = at.step + 1 == self->order.steps;
}

static enum status check_cancelled(struct image_batches *self)
{
    pthread_mutex_lock(&self->lock);
    const bool cancelled = self->cancelled;
    pthread_mutex_unlock(&self->lock);
    return cancelled ? status_set(STATUS_FAILED, "the stream was cancelled") : STATUS_OK;
}

/* Removes the first batch of the queue. The caller holds the lock. */
static struct image_slot *pop(struct image_batches *self)
{
    struct image_slot *slot = self->queue[0];
    memmove(self->queue, self->queue + 1, --self->queued * sizeof *self->queue);
    return slot;
}

static void count_batch(struct image_batches *self, uint32_t count)
{
    self->stats.batches++;
    self->stats.samples += count;
}

/* ---- fill() ---- */

/* Before the first captured call: writes the position to the device, and waits for the generator. */
static enum status begin_moving(struct image_batches *self)
{
    CUDA_TRY(cudaEventSynchronize(self->used));
    TRY(write_position(self, position_of(self, self->base.stream.at)));
    self->moves = true;
    return STATUS_OK;
}

static enum status fill_captured(struct image_batches *self, void *images, int64_t *labels,
                                 cudaStream_t stream, struct stream_batch *batch)
{
    if (!self->order.captures)
        return status_set(STATUS_USAGE,
                          "cuda_stream: it is being captured into a CUDA graph, but the number of images per "
                          "step is not constant, or the generator is gbase or bat; set drop_last, or choose "
                          "the generator fused");
    if (!self->moves) {
        struct relaxed_capture relaxed;
        TRY(begin_moving(self));
    }
    TRY(draw(self, 0, true, &self->share, images, labels, stream));
    TRY(device_add(self->device, self->position, 1, stream));
    CUDA_TRY(cudaEventRecordWithFlags(self->moved, stream, cudaEventRecordExternal));
    describe(self, 0, (uint32_t)self->share.count, batch);
    batch->last = false;
    return STATUS_OK;
}

static enum status images_fill(struct device_batches *batches, const struct device_parts *to,
                               void *cuda_stream, struct stream_batch *batch)
{
    void *const images = to->images;
    int64_t *const labels = to->labels;
    struct image_batches *self = images_of(batches);
    const cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
    TRY(check_cancelled(self));
    if (device_capturing(-1, cuda_stream))
        return fill_captured(self, images, labels, stream, batch);
    TRY(images_locate(batches));
    const uint64_t position = position_of(self, self->base.stream.at);
    const struct share share = share_at(self, position);
    TRY(draw_in_turn(self, position, &share, images, labels, stream));
    TRY(move_on(self, position, stream));
    pthread_mutex_lock(&self->lock);
    while (self->queued > 0 && self->queue[0]->position <= position)
        pop(self)->state = SLOT_FREE;
    count_batch(self, (uint32_t)share.count);
    pthread_mutex_unlock(&self->lock);
    describe(self, position, (uint32_t)share.count, batch);
    return STATUS_OK;
}

/* ---- next() ---- */

static enum status open_image_slot(struct image_batches *self, struct image_slot *slot)
{
    const uint64_t capacity = self->request.plan.capacity;
    const uint64_t bytes = stream_aligned(capacity * self->request.sample_bytes),
                   labels = capacity * sizeof(int64_t);
    void *memory;
    CUDA_TRY(cudaMalloc(&memory, bytes + labels));
    slot->images = static_cast<uint8_t *>(memory);
    slot->labels = reinterpret_cast<int64_t *>(slot->images + bytes);
    slot->numbers = static_cast<uint32_t *>(malloc(capacity * sizeof *slot->numbers));
    TRY(ALLOCATED(slot->numbers, "out of memory for a batch"));
    pthread_mutex_lock(&self->lock);
    self->stats.memory_bytes += bytes + labels;
    pthread_mutex_unlock(&self->lock);
    CUDA_TRY(cudaEventCreateWithFlags(&slot->ready, cudaEventDisableTiming));
    return CUDA_STATUS(cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming));
}

static void close_image_slot(struct image_slot *slot)
{
    (void)cudaFree(slot->images);
    free(slot->numbers);
    destroy(slot->ready, slot->done);
    *slot = {};
}

/* Allocates the slots at the first call. */
static enum status open_image_slots(struct image_batches *self)
{
    if (self->slots[self->slot_count - 1].done) /* the last one that is opened */
        return STATUS_OK;
    struct relaxed_capture relaxed;
    for (uint32_t i = 0; i < self->slot_count; i++) {
        if (self->slots[i].done)
            continue;
        close_image_slot(&self->slots[i]); /* of an earlier failure */
        TRY(open_image_slot(self, &self->slots[i]));
    }
    return STATUS_OK;
}

/* Returns a free slot, or NULL. */
static struct image_slot *free_slot(struct image_batches *self)
{
    pthread_mutex_lock(&self->lock);
    struct image_slot *slot = nullptr;
    for (uint32_t i = 0; i < self->slot_count && !slot; i++)
        slot = self->slots[i].state == SLOT_FREE ? &self->slots[i] : nullptr;
    pthread_mutex_unlock(&self->lock);
    return slot;
}

/* Enqueues the generation of a batch into a slot, and appends it to the queue. */
static enum status draw_ahead(struct image_batches *self, struct image_slot *slot, uint64_t position)
{
    const struct stream_plan *plan = &self->request.plan;
    const struct stream_position at = at_position(self, position);
    const struct share share = share_at(self, position);
    slot->position = position;
    slot->count = plan->list(plan->context, at.epoch, at.step, slot->numbers);
    CUDA_TRY(cudaStreamWaitEvent(self->own, slot->done, 0));
    TRY(draw_in_turn(self, position, &share, slot->images, slot->labels, self->own));
    CUDA_TRY(cudaEventRecord(slot->ready, self->own));
    pthread_mutex_lock(&self->lock);
    slot->state = SLOT_READY;
    self->queue[self->queued++] = slot;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static enum status images_next(struct device_batches *batches, void *cuda_stream, struct stream_batch *batch,
                               struct device_parts *parts)
{
    struct image_batches *self = images_of(batches);
    const cudaStream_t consumer = static_cast<cudaStream_t>(cuda_stream);
    struct image_slot *slot;
    TRY(check_cancelled(self));
    TRY(refuse_capture(cuda_stream, "fdsl_stream_next(); use fdsl_stream_fill()"));
    TRY(open_image_slots(self));
    TRY(images_locate(batches));
    const uint64_t position = position_of(self, self->base.stream.at);
    pthread_mutex_lock(&self->lock);
    const uint32_t held = self->held;
    self->calls++;
    self->ready_sum += self->queued;
    while (self->queued > 0 && self->queue[0]->position != position) /* replays have moved the position */
        pop(self)->state = SLOT_FREE;
    pthread_mutex_unlock(&self->lock);
    if (held == self->slot_count)
        return status_set(STATUS_USAGE, "all %u batches of the stream are held; release one", held);
    /* Replays use the generator, too. They can be ordered with work on `consumer`, but not on `own`. */
    const uint32_t ahead = self->moves ? 0 : self->request.ahead;
    while (self->queued <= ahead && (slot = free_slot(self)))
        TRY(draw_ahead(self, slot, position + self->queued));
    CUDA_TRY(cudaStreamWaitEvent(consumer, self->queue[0]->ready, 0));
    TRY(move_on(self, position, consumer));
    pthread_mutex_lock(&self->lock);
    slot = pop(self);
    slot->state = SLOT_HELD;
    self->held++;
    count_batch(self, slot->count);
    pthread_mutex_unlock(&self->lock);
    describe(self, position, slot->count, batch);
    batch->numbers = slot->numbers;
    batch->slot = (uint32_t)(slot - self->slots);
    *parts = {slot->images, slot->labels, nullptr};
    return STATUS_OK;
}

static enum status images_release(struct device_batches *batches, const struct stream_batch *batch,
                                  void *cuda_stream)
{
    struct image_batches *self = images_of(batches);
    struct image_slot *slot = &self->slots[batch->slot];
    TRY(refuse_capture(cuda_stream, "the release of a batch"));
    CUDA_TRY(cudaEventRecord(slot->done, static_cast<cudaStream_t>(cuda_stream)));
    pthread_mutex_lock(&self->lock);
    slot->state = SLOT_FREE;
    self->held--;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

/* ---- The other functions ---- */

static enum status images_seek(struct stream *stream, struct stream_position to)
{
    struct image_batches *self = images_of(stream);
    TRY(stream_check_position(&self->request.plan, to));
    if (self->moves) {
        struct relaxed_capture relaxed;
        TRY(images_locate(&self->base)); /* waits for replays */
        TRY(write_position(self, position_of(self, to)));
    }
    pthread_mutex_lock(&self->lock);
    while (self->queued > 0)
        pop(self)->state = SLOT_FREE;
    self->cancelled = false;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static void images_stats(struct stream *stream, struct stream_stats *stats)
{
    struct image_batches *self = images_of(stream);
    pthread_mutex_lock(&self->lock);
    *stats = self->stats;
    stats->ready = self->calls ? (double)self->ready_sum / (double)self->calls : 0;
    pthread_mutex_unlock(&self->lock);
    stats->memory_bytes += generator_memory_bytes(self->request.generator);
}

static void images_cancel(struct stream *stream)
{
    struct image_batches *self = images_of(stream);
    pthread_mutex_lock(&self->lock);
    self->cancelled = true;
    pthread_mutex_unlock(&self->lock);
}

static void images_close(struct stream *stream)
{
    struct image_batches *self = images_of(stream);
    struct relaxed_capture relaxed;
    (void)cudaSetDevice(self->device);
    for (cudaEvent_t each : {self->moved, self->used})
        if (each)
            (void)cudaEventSynchronize(each);
    if (self->own)
        (void)cudaStreamSynchronize(self->own);
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++) {
        if (self->slots[i].done)
            (void)cudaEventSynchronize(self->slots[i].done);
        close_image_slot(&self->slots[i]);
    }
    generator_close(self->request.generator);
    (void)cudaFree(self->numbers);
    destroy(self->own, self->used, self->moved);
    free(self->host_numbers);
    free(self->listed);
    pthread_mutex_destroy(&self->lock);
    delete[] self->queue;
    delete[] self->slots;
    delete self;
}

static const struct stream_type image_stream_functions = {
    nullptr, nullptr, nullptr, images_seek, images_stats, images_cancel, images_close,
};
static const struct device_batches_type image_functions = {images_next, images_fill, images_release,
                                                           images_locate};

static enum status open_images(struct image_batches *self, bool host_numbers)
{
    const size_t capacity = self->request.plan.capacity;
    cudaFuncAttributes attributes;
    void *memory;
    self->slots = new (std::nothrow) image_slot[self->slot_count]{};
    self->queue = new (std::nothrow) image_slot *[self->slot_count] {};
    TRY(ALLOCATED(self->slots && self->queue, "out of memory for a stream"));
    if (host_numbers) {
        self->host_numbers = static_cast<uint64_t *>(malloc(capacity * sizeof *self->host_numbers));
        self->listed = static_cast<uint32_t *>(malloc(capacity * sizeof *self->listed));
        TRY(ALLOCATED(self->host_numbers && self->listed, "out of memory for a stream"));
    }
    CUDA_TRY(cudaMalloc(&memory, (capacity + 1) * sizeof *self->numbers));
    self->numbers = static_cast<uint64_t *>(memory);
    self->position = self->numbers + capacity;
    self->stats.memory_bytes = (capacity + 1) * sizeof *self->numbers;
    TRY(stream_open(&self->own, true)); /* the generator's own priority; delays training steps least */
    CUDA_TRY(cudaEventCreateWithFlags(&self->used, cudaEventDisableTiming));
    CUDA_TRY(cudaEventCreateWithFlags(&self->moved, cudaEventDisableTiming));
    /* CUDA must not load kernels during a capture. */
    CUDA_TRY(cudaFuncGetAttributes(&attributes, number_kernel));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, set_kernel));
    return device_load(self->device);
}

enum status device_images_open(int device, const struct generated_stream_request *request,
                               const struct device_order *order, struct device_batches **batches)
{
    *batches = nullptr;
    struct image_batches *self = new (std::nothrow) image_batches{};
    if (!self)
        generator_close(request->generator);
    TRY(ALLOCATED(self, "out of memory for a stream"));
    self->base = {{&image_stream_functions, request->begin}, &image_functions};
    self->device = device;
    self->request = *request;
    self->order = *order;
    self->slot_count = request->ahead + request->held;
    self->share = share_at(self, 0);
    pthread_mutex_init(&self->lock, NULL);
    const int mode = device_relax_capture();
    const enum status status = open_images(self, order->host_numbers);
    const struct failure failure = status_save(status);
    if (status == STATUS_OK)
        *batches = &self->base;
    else
        images_close(&self->base.stream);
    device_restore_capture(mode);
    return status == STATUS_OK ? STATUS_OK : status_restore(&failure);
}
