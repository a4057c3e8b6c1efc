#include "load/ring.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "core/timer.h"
#include "data/random_draws.h"
#include "data/resample.h"

#define PIXEL_ALIGNMENT 256 /* alignment of decoded images, in bytes */
/* Room for decoded pixels, per byte of a chunk. Photographs of good quality have about 12 bytes of pixels per
 * byte of JPEG; a chunk that needs more room has fewer samples. */
#define PIXELS_PER_BYTE 16
#define FITTED_PER_BYTE 2 /* room for images that a thread decodes and fits, per byte of a chunk */

/* ---- Fitting images into slots ---- */

/* Cuts out a part of each decoded image, resizes it, turns it upright, flips it, normalises it, and writes it
 * to its slot of a tensor. Before normalisation, the bytes equal those that the CPU computes, because both
 * use data/resample.h. */
#define FIT_CHANNELS_MAX 3

/* Arguments of the kernel. All pointers are device pointers. */
struct fit {
    const struct fit_entry *entries;
    uint32_t count, res, channels; /* `channels`: 1 or 3 */
    bool interleaved;              /* NHWC instead of NCHW */
    enum dtype tensor;             /* DTYPE_STORED: bytes, without scale and bias */
    float scale[FIT_CHANNELS_MAX], bias[FIT_CHANNELS_MAX];
    uint8_t *slots;
    uint64_t stride; /* bytes per slot */
};

#define TILE_WIDTH    32
#define TILE_HEIGHT   8
#define BLOCK_THREADS (TILE_WIDTH * TILE_HEIGHT)
/* Length of an array for the 16-bit weights of one output. The array fills an odd number of 32-bit words. So
 * threads of a warp that read weights of different outputs access different banks of shared memory. */
#define TAPS_MAX (2 * PICTURE_SCALE_MAX + 2)
static_assert(TAPS_MAX / 2 % 2 == 1, "the row length of the weights must be an odd number of words");

/* The input pixels of one output pixel along an axis: `count` pixels from pixel `first` on. */
struct taps {
    uint32_t first, count;
};

/* The weights of a tile's outputs. */
struct tile {
    struct resample_axis across, down;
    struct taps columns[TILE_WIDTH], rows[TILE_HEIGHT];
    int16_t column_weights[TILE_WIDTH][TAPS_MAX], row_weights[TILE_HEIGHT][TAPS_MAX];
};

/* Computes the weights for outputs from column `x` and row `y` on. Thread t computes the weights of one
 * column or of one row. All threads of the block must call this. */
static __device__ void make_weights(const struct fit_entry &entry, uint32_t res, uint32_t x, uint32_t y,
                                    struct tile *tile)
{
    uint32_t t = threadIdx.x;
    if (t == 0)
        tile->across = resample_axis(entry.width, res);
    if (t == 32)
        tile->down = resample_axis(entry.height, res);
    __syncthreads();
    if (t < TILE_WIDTH && x + t < res)
        tile->columns[t].count =
            resample_weights(&tile->across, x + t, &tile->columns[t].first, tile->column_weights[t]);
    t -= TILE_WIDTH;
    if (t < TILE_HEIGHT && y + t < res)
        tile->rows[t].count =
            resample_weights(&tile->down, y + t, &tile->rows[t].first, tile->row_weights[t]);
    __syncthreads();
}

struct colour {
    int32_t of[3]; /* red, green, blue */
};

/* Resizes one row at one column. */
static __device__ __forceinline__ struct colour resize_row(const struct tile &tile, uint32_t column,
                                                           const uint8_t *row)
{
    const struct taps taps = tile.columns[column];
    const uint8_t *from = row + 3 * taps.first;
    int32_t half = 1 << (tile.across.bits - 1);
    struct colour sum = {half, half, half};
    for (uint32_t i = 0; i < taps.count; i++, from += 3)
        for (int c = 0; c < 3; c++)
            sum.of[c] += tile.column_weights[column][i] * from[c];
    for (int c = 0; c < 3; c++)
        sum.of[c] >>= tile.across.bits;
    return sum;
}

/* Computes one pixel of the output: rows are resized and rounded first, then the column. */
static __device__ struct colour resize(const struct fit_entry &entry, const struct tile &tile,
                                       uint32_t column, uint32_t row)
{
    const struct taps taps = tile.rows[row];
    const uint8_t *from = entry.pixels + static_cast<uint64_t>(taps.first) * entry.stride;
    int32_t half = 1 << (tile.down.bits - 1);
    struct colour sum = {half, half, half};
    for (uint32_t i = 0; i < taps.count; i++, from += entry.stride) {
        struct colour resized = resize_row(tile, column, from);
        for (int c = 0; c < 3; c++)
            sum.of[c] += tile.row_weights[row][i] * resized.of[c];
    }
    for (int c = 0; c < 3; c++)
        sum.of[c] >>= tile.down.bits;
    return sum;
}

template <enum dtype T>
static __device__ __forceinline__ void put(const struct fit &fit, uint64_t slot, uint64_t i, uint32_t channel,
                                           int32_t byte)
{
    uint8_t *values = fit.slots + slot * fit.stride;
    float value = fmaf(static_cast<float>(byte), fit.scale[channel], fit.bias[channel]);
    if constexpr (T == DTYPE_STORED)
        values[i] = static_cast<uint8_t>(byte);
    else if constexpr (T == DTYPE_F32)
        reinterpret_cast<float *>(values)[i] = value;
    else if constexpr (T == DTYPE_F16)
        reinterpret_cast<__half *>(values)[i] = __float2half_rn(value);
    else
        reinterpret_cast<__nv_bfloat16 *>(values)[i] = __float2bfloat16_rn(value);
}

/* Writes the pixel at column `a` and row `b` of the resized part. */
template <enum dtype T>
static __device__ void put_pixel(const struct fit &fit, const struct fit_entry &entry, uint32_t a, uint32_t b,
                                 struct colour pixel)
{
    uint32_t res = fit.res;
    if (entry.turn.flip_x)
        a = res - 1 - a;
    if (entry.turn.flip_y)
        b = res - 1 - b;
    uint32_t x = entry.turn.transpose ? b : a, y = entry.turn.transpose ? a : b;
    if (entry.flip)
        x = res - 1 - x;
    uint64_t at = static_cast<uint64_t>(y) * res + x, plane = static_cast<uint64_t>(res) * res;
    if (fit.channels == 1) { /* the conversion to gray is the same as in image_fit() */
        int32_t gray = (19595 * pixel.of[0] + 38470 * pixel.of[1] + 7471 * pixel.of[2] + 32768) >> 16;
        put<T>(fit, entry.slot, at, 0, gray);
        return;
    }
    for (uint32_t c = 0; c < 3; c++)
        put<T>(fit, entry.slot, fit.interleaved ? 3 * at + c : c * plane + at, c, pixel.of[c]);
}

/* One block per tile of an image, one thread per pixel. Each thread resizes all rows that its pixel needs.
 * Adjacent threads therefore repeat work, but this takes far less time than decoding and needs no buffer. */
template <enum dtype T>
static __global__ __launch_bounds__(BLOCK_THREADS) void fit_kernel(const __grid_constant__ struct fit fit)
{
    __shared__ struct tile tile;
    uint32_t across = (fit.res + TILE_WIDTH - 1) / TILE_WIDTH,
             down = (fit.res + TILE_HEIGHT - 1) / TILE_HEIGHT;
    uint32_t image = blockIdx.x / (across * down), within = blockIdx.x - image * across * down;
    uint32_t x = within % across * TILE_WIDTH, y = within / across * TILE_HEIGHT;
    uint32_t column = threadIdx.x % TILE_WIDTH, row = threadIdx.x / TILE_WIDTH;
    const struct fit_entry entry = fit.entries[image];
    make_weights(entry, fit.res, x, y, &tile);
    if (x + column < fit.res && y + row < fit.res)
        put_pixel<T>(fit, entry, x + column, y + row, resize(entry, tile, column, row));
}

/* Launches the kernel on the stream; launches nothing if `count` is 0. Parts must be at most
 * PICTURE_SCALE_MAX (data/image.h) times as wide and as high as the output. STATUS_FAILED on CUDA errors. */
static enum status fit_launch(const struct fit *fit, cudaStream_t stream)
{
    uint64_t tiles =
        (uint64_t)((fit->res + TILE_WIDTH - 1) / TILE_WIDTH) * ((fit->res + TILE_HEIGHT - 1) / TILE_HEIGHT);
    if (fit->count == 0)
        return STATUS_OK;
    if (tiles * fit->count > INT32_MAX)
        return status_set(STATUS_USAGE,
                          "%u images of %u x %u pixels are too many for one kernel launch; lower --chunk",
                          fit->count, fit->res, fit->res);
    RANGE(UNPACK);
    void (*kernel)(const struct fit) = fit->tensor == DTYPE_STORED ? fit_kernel<DTYPE_STORED>
                                       : fit->tensor == DTYPE_F32  ? fit_kernel<DTYPE_F32>
                                       : fit->tensor == DTYPE_F16  ? fit_kernel<DTYPE_F16>
                                                                   : fit_kernel<DTYPE_BF16>;
    kernel<<<static_cast<uint32_t>(tiles * fit->count), BLOCK_THREADS, 0, stream>>>(*fit);
    CUDA_TRY_LAUNCH("fit_kernel");
    return STATUS_OK;
}

/* ---- Room ---- */

static bool is_on_device(const struct ring *ring, uint32_t sample)
{
    return ring->decoder.kind != DECODER_CPU && ring->delivery.arrays.pictures[sample].on_device;
}

static uint64_t decoded_bytes(const struct jpeg_shape *shape)
{
    return align_to((uint64_t)3 * shape->width * shape->height, PIXEL_ALIGNMENT);
}

static uint64_t fitted_bytes(const struct load *load)
{
    return align_to((uint64_t)3 * load->fit.res * load->fit.res, PIXEL_ALIGNMENT);
}

bool ring_decode_fits(const struct ring *ring, uint32_t sample, struct picture_room *room)
{
    if (is_on_device(ring, sample))
        room->pixels += decoded_bytes(&ring->delivery.arrays.pictures[sample].shape);
    else
        room->fitted += fitted_bytes(ring->delivery.load);
    return room->pixels <= ring->room.pixels && room->fitted <= ring->room.fitted;
}

enum status ring_decode_begin(struct ring *ring, const struct load *load)
{
    uint64_t largest = 0;
    bool others = false;
    TRY(image_decoder_open(&ring->decoder, (enum decoder)load->given->decoder));
    ring->delivery.tolerance = image_decoder_tolerance(ring->decoder.kind);
    ring->delivery.result.decoder = decoder_names[ring->decoder.kind];
    for (uint32_t i = 0; i < load->dataset->sample_count; i++)
        if (is_on_device(ring, i)) {
            uint64_t bytes = decoded_bytes(&ring->delivery.arrays.pictures[i].shape);
            largest = bytes > largest ? bytes : largest;
        } else
            others = true;
    uint64_t pixels = PIXELS_PER_BYTE * ring->data_bytes, fitted = FITTED_PER_BYTE * ring->data_bytes;
    ring->room.pixels = largest == 0 ? 0 : pixels > largest ? pixels : largest;
    ring->room.fitted = !others ? 0 : fitted > fitted_bytes(load) ? fitted : fitted_bytes(load);
    return STATUS_OK;
}

enum status ring_decode_open(struct ring_worker *worker)
{
    struct ring *ring = worker->ring;
    worker->decoding = static_cast<struct ring_decoding *>(calloc(1, sizeof *worker->decoding));
    TRY(ALLOCATED(worker->decoding, "out of memory"));
    if (ring->room.pixels > 0)
        CUDA_TRY(cudaMalloc(&worker->decoding->pixels, ring->room.pixels));
    return image_batch_open(&ring->decoder, ring->table_max, &worker->decoding->batch);
}

void ring_decode_close(struct ring_worker *worker)
{
    if (!worker->decoding)
        return;
    image_batch_close(&worker->decoding->batch);
    image_scratch_close(&worker->decoding->scratch);
    (void)cudaFree(worker->decoding->pixels);
    free(worker->decoding);
}

/* ---- Decoding ---- */

/* A chunk that is being decoded. */
struct decoding {
    struct ring_worker *worker;
    const struct load *load;
    uint32_t index, epoch;
    uint64_t pixels, fitted; /* where the next image goes: offset in decoding->pixels, and in the buffer */
};

static const struct dataset_member *image_of(const struct decoding *job, uint32_t sample)
{
    const struct dataset_sample *from = &job->load->dataset->samples[sample];
    return &job->load->dataset->members[from->member + from->image];
}

/* Returns the address of an image file in the host buffer. */
static const uint8_t *file_of(const struct decoding *job, const struct unpack_entry *entry)
{
    const struct ring *ring = job->worker->ring;
    const struct dataset_sample *sample = &job->load->dataset->samples[entry->sample];
    return ring_host(job->worker, job->index) + entry->at +
           ring->delivery.arrays.samples[entry->sample].at[sample->image];
}

/* Decodes and fits an image in this thread. The kernel will then "resize" it to its own size, which changes
 * nothing. */
static enum status decode_here(struct decoding *job, const struct unpack_entry *entry, struct fit_entry *fit)
{
    const struct dataset_member *member = image_of(job, entry->sample);
    struct image_fit how = job->worker->ring->delivery.fit;
    struct image image;
    bool is_image;
    how.channels = 3;
    TRY(image_fit(&how, members_format(member->extension), file_of(job, entry), member->size, job->epoch,
                  entry->sample, &job->worker->decoding->scratch, &image, &is_image));
    if (!is_image)
        return status_set(STATUS_FAILED, "'%s' is not an image", member->extension);
    memcpy(ring_host(job->worker, job->index) + job->fitted, image.pixels, (size_t)3 * how.res * how.res);
    fit->pixels = ring_device(job->worker, job->index) + job->fitted;
    fit->width = fit->height = how.res;
    fit->stride = 3 * how.res;
    job->fitted += fitted_bytes(job->load);
    return STATUS_OK;
}

/* Decodes an image for the device in this thread, as nvJPEG would decode it. This is for files that are
 * damaged or unusual: libjpeg decides whether they are valid. */
static enum status decode_instead(struct decoding *job, const struct unpack_entry *entry, uint8_t *pixels)
{
    struct ring_worker *worker = job->worker;
    const struct jpeg_shape *shape = &worker->ring->delivery.arrays.pictures[entry->sample].shape;
    struct image image;
    TRY(image_decode_stored(file_of(job, entry), image_of(job, entry->sample)->size,
                            &worker->decoding->scratch, &image));
    if (image.width != shape->width || image.height != shape->height) /* these pixels could overflow */
        return status_set(STATUS_FAILED, "the size of this image has changed since the data set was opened");
    if (worker->unpacked_latest) /* the kernel of the previous chunk reads its pixels */
        CUDA_TRY(cudaEventSynchronize(worker->unpacked_latest));
    CUDA_TRY(
        cudaMemcpyAsync(pixels, image.pixels, image_values(&image), cudaMemcpyHostToDevice, worker->copies));
    CUDA_TRY(cudaStreamSynchronize(worker->copies)); /* the next image replaces the pixels in `scratch` */
    return STATUS_OK;
}

/* Adds an image to the batch that the device decodes. */
static enum status decode_there(struct decoding *job, const struct unpack_entry *entry, struct fit_entry *fit)
{
    struct ring_decoding *decoding = job->worker->decoding;
    const struct jpeg_shape *shape = &job->worker->ring->delivery.arrays.pictures[entry->sample].shape;
    const uint8_t *file = file_of(job, entry);
    size_t size = image_of(job, entry->sample)->size;
    uint8_t *pixels = decoding->pixels + job->pixels;
    struct image_box box;
    TRY(image_fit_part(&job->load->fit, shape, job->epoch, entry->sample, &box, &fit->turn));
    if (jpeg_intact(file, size, shape->width, shape->height)) /* pixels of another size could overflow */
        image_batch_add(&decoding->batch, file, size, pixels, shape->width);
    else
        TRY(decode_instead(job, entry, pixels));
    fit->stride = 3 * shape->width;
    fit->pixels = pixels + (uint64_t)box.top * fit->stride + 3 * box.left;
    fit->width = box.width;
    fit->height = box.height;
    job->pixels += decoded_bytes(shape);
    return STATUS_OK;
}

/* Records the sample of an entry as lost. The error message is already set. */
static enum status lose(struct decoding *job, const struct unpack_entry *entry, enum status status)
{
    struct output_queue *queue = job->worker->chunks[job->index].share->queue;
    const struct dataset *dataset = job->load->dataset;
    const struct dataset_member *member = image_of(job, entry->sample);
    queue->held[entry->slot] = DELIVERY_LOST;
    status_prefix(status, "%s/%s: offset %llu: sample '%s'", dataset->path, dataset->files[member->file].name,
                  (unsigned long long)member->offset, dataset->samples[entry->sample].key);
    return queue_lose(queue, entry->sample, status);
}

/* Decodes the images that this thread decodes, and adds the others to the batch. Removes entries of broken
 * images. */
static enum status decode_each(struct decoding *job, struct unpack_entry *entries, uint32_t *count,
                               struct fit_entry *fits)
{
    const struct load *load = job->load;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < *count; i++) {
        const struct unpack_entry entry = entries[i];
        struct fit_entry fit = {};
        enum status status = is_on_device(job->worker->ring, entry.sample) ? decode_there(job, &entry, &fit)
                                                                           : decode_here(job, &entry, &fit);
        if (status != STATUS_OK) {
            TRY(lose(job, &entry, status));
            continue;
        }
        fit.slot = entry.slot;
        fit.flip =
            load->given->augment &&
            draw_move(&load->augmentation.move, load->augmentation.seed, job->epoch, entry.sample).flip;
        entries[kept] = entry;
        fits[kept++] = fit;
    }
    *count = kept;
    return STATUS_OK;
}

/* Decodes the batch on the device. Removes entries of images that nvJPEG refused. The batch has the images of
 * the entries in the same order, without those that this thread decoded; `next` is the next one in it. */
static enum status decode_batch(struct decoding *job, struct unpack_entry *entries, uint32_t *count,
                                struct fit_entry *fits)
{
    struct ring *ring = job->worker->ring;
    struct image_batch *batch = &job->worker->decoding->batch;
    uint32_t kept = 0, next = 0;
    TRY(image_batch_decode(&ring->decoder, batch, job->worker->copies));
    for (uint32_t i = 0; i < *count; i++) {
        bool sent = next < batch->count && batch->files[next] == file_of(job, &entries[i]);
        if (sent && batch->broken[next++]) {
            TRY(lose(job, &entries[i], status_set(STATUS_FAILED, "nvJPEG cannot decode this image")));
            continue;
        }
        entries[kept] = entries[i];
        fits[kept++] = fits[i];
    }
    *count = kept;
    return STATUS_OK;
}

enum status ring_decode(struct ring_worker *worker, uint32_t index, struct unpack_entry *entries,
                        uint32_t *count, uint64_t *fits, uint64_t *end)
{
    const struct chunk *chunk = &worker->chunks[index];
    double begin_s = timer_now_s();
    *fits = align_to(*end, alignof(struct fit_entry));
    struct fit_entry *fit = reinterpret_cast<struct fit_entry *>(ring_host(worker, index) + *fits);
    struct decoding job = {worker, worker->ring->delivery.load,
                           index,  chunk->epoch,
                           0,      align_to(*fits + *count * sizeof *fit, PIXEL_ALIGNMENT)};
    worker->decoding->batch.count = 0;
    worker->decoding->scratch.jpeg_warnings = 0;
    TRY(decode_each(&job, entries, count, fit));
    chunk->share->queue->jpeg_warnings += worker->decoding->scratch.jpeg_warnings;
    if (worker->unpacked_latest) /* The kernel of the previous chunk reads its pixels. The JPEG engines do not
                                  * wait for the stream, so the host waits. */
        CUDA_TRY(cudaEventSynchronize(worker->unpacked_latest));
    TRY(decode_batch(&job, entries, count, fit));
    *end = job.fitted;
    worker->decoding->time_s += timer_now_s() - begin_s;
    return STATUS_OK;
}

enum status ring_decode_launch(const struct ring_worker *worker, uint32_t index, uint64_t fits,
                               uint32_t count, cudaStream_t stream)
{
    const struct output_queue *queue = worker->chunks[index].share->queue;
    const struct delivery *delivery = queue->delivery;
    struct fit fit = {};
    fit.entries = reinterpret_cast<const struct fit_entry *>(ring_device(worker, index) + fits);
    fit.count = count;
    fit.res = delivery->fit.res;
    fit.channels = delivery->fit.channels;
    fit.interleaved = delivery->load->given->interleaved;
    fit.tensor = delivery->convert.tensor;
    for (int c = 0; c < FIT_CHANNELS_MAX; c++) {
        const struct convert convert = delivery_convert(delivery, c);
        fit.scale[c] = convert.scale;
        fit.bias[c] = convert.bias;
    }
    fit.slots = queue->tensor;
    fit.stride = delivery->stride;
    return fit_launch(&fit, stream);
}

/* ---- nvJPEG alone ---- */

#define RATE_IMAGES 256
#define RATE_ROUNDS 8

/* Images in pinned memory, and room for their pixels. */
struct rate_test {
    struct image_batch batch;
    cudaStream_t stream;
    uint8_t *files, *pixels;
    uint64_t sample_bytes; /* size of the samples with these images, including their labels */
};

/* Chooses the images. Sets `*file_bytes` and `*pixel_bytes` to the memory that they need. */
static uint32_t choose_images(const struct ring *ring, uint32_t *chosen, uint64_t *file_bytes,
                              uint64_t *pixel_bytes)
{
    const struct dataset *dataset = ring->delivery.load->dataset;
    uint32_t count = 0;
    *file_bytes = *pixel_bytes = 0;
    for (uint32_t i = 0; i < dataset->sample_count && count < RATE_IMAGES; i++)
        if (is_on_device(ring, i)) {
            const struct dataset_sample *sample = &dataset->samples[i];
            *file_bytes += dataset->members[sample->member + sample->image].size;
            *pixel_bytes += decoded_bytes(&ring->delivery.arrays.pictures[i].shape);
            chosen[count++] = i;
        }
    return count;
}

static enum status fill_batch(struct ring *ring, struct rate_test *test)
{
    const struct dataset *dataset = ring->delivery.load->dataset;
    uint32_t chosen[RATE_IMAGES];
    uint64_t file_bytes, pixel_bytes, file_at = 0, pixel_at = 0;
    uint32_t count = choose_images(ring, chosen, &file_bytes, &pixel_bytes);
    struct plain *plain = &ring->delivery.queues[0].plain;
    TRY(image_batch_open(&ring->decoder, count, &test->batch));
    CUDA_TRY(cudaMallocHost(&test->files, file_bytes));
    CUDA_TRY(cudaMalloc(&test->pixels, pixel_bytes));
    TRY(stream_open(&test->stream));
    for (uint32_t i = 0; i < count; i++) {
        const struct dataset_sample *sample = &dataset->samples[chosen[i]];
        const struct dataset_member *member = &dataset->members[sample->member + sample->image];
        const struct jpeg_shape *shape = &ring->delivery.arrays.pictures[chosen[i]].shape;
        TRY(plain_bytes(plain, member, member->size, test->files + file_at));
        image_batch_add(&test->batch, test->files + file_at, member->size, test->pixels + pixel_at,
                        shape->width);
        file_at += member->size;
        pixel_at += decoded_bytes(shape);
        test->sample_bytes += sample->bytes;
    }
    return STATUS_OK;
}

static enum status time_batches(struct ring *ring, struct rate_test *test, double *bytes_per_s)
{
    double begin_s = 0;
    for (int round = -1; round < RATE_ROUNDS; round++) { /* round -1 allocates memory */
        TRY(image_batch_decode(&ring->decoder, &test->batch, test->stream));
        if (round < 0) {
            CUDA_TRY(cudaStreamSynchronize(test->stream));
            begin_s = timer_now_s();
        }
    }
    CUDA_TRY(cudaStreamSynchronize(test->stream));
    *bytes_per_s = (double)test->sample_bytes * RATE_ROUNDS / (timer_now_s() - begin_s);
    return STATUS_OK;
}

enum status ring_decode_rate(struct ring *ring, double *bytes_per_s)
{
    struct rate_test test = {};
    enum status status = fill_batch(ring, &test);
    if (status == STATUS_OK)
        status = time_batches(ring, &test, bytes_per_s);
    if (test.stream) {
        (void)cudaStreamSynchronize(test.stream);
        (void)cudaStreamDestroy(test.stream);
    }
    image_batch_close(&test.batch);
    (void)cudaFreeHost(test.files);
    (void)cudaFree(test.pixels);
    return status;
}
