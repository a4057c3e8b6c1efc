#include "load/ring.cuh"

#include <stdlib.h>
#include <string.h>

#include <mutex>
#include <new>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "core/timer.h"
#include "data/random_draws.h"

#define PIXEL_ALIGNMENT 256 /* alignment of decoded images, in bytes */
/* Room for decoded pixels, per byte of a chunk. Photographs of good quality have about 12 bytes of pixels per
 * byte of JPEG; a chunk that needs more room has fewer samples. */
#define PIXELS_PER_BYTE 16
#define FITTED_PER_BYTE 2 /* room for images that a thread decodes and fits, per byte of a chunk */

/* nvJPEG needs about as long per image in small batches, but passing the turn to another thread takes about
 * 0.1 ms per batch (docs/notes/load.md). */
#define ENGINE_IMAGES 256
/* Without --chunk, limits the sum of one chunk per thread, whose pixels take up to PIXELS_PER_BYTE times as
 * much GPU memory. */
#define ENGINE_BYTES (UINT64_C(64) << 20)

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

enum status ring_decode_begin(struct ring *ring, const struct load *load, uint64_t *chunk_bytes)
{
    /* The files of most batches have less than 9/8 of the mean size. */
    const uint64_t batch_bytes =
        ENGINE_IMAGES * align_to(load->dataset->bytes / load->dataset->sample_count * 9 / 8, PIECE_ALIGNMENT);
    const uint64_t most_bytes = ENGINE_BYTES / ring->delivery.workers;
    TRY(image_decoder_open(&ring->decoder, (enum decoder)load->given->decoder));
    ring->delivery.tolerance = image_decoder_tolerance(ring->decoder.kind);
    ring->delivery.result.decoder = decoder_names[ring->decoder.kind];
    if (ring->decoder.kind == DECODER_HARDWARE)
        *chunk_bytes = load_large_chunk(load, (int)ring->delivery.workers,
                                        batch_bytes < most_bytes ? batch_bytes : most_bytes);
    return STATUS_OK;
}

void ring_decode_size(struct ring *ring, const struct load *load)
{
    uint64_t largest = 0;
    bool others = false;
    if (ring->decoder.kind == DECODER_HARDWARE && ring->table_max > ENGINE_IMAGES)
        ring->table_max = ENGINE_IMAGES;
    for (uint32_t i = 0; i < load->dataset->sample_count; i++)
        if (is_on_device(ring, i)) {
            uint64_t bytes = decoded_bytes(&ring->delivery.arrays.pictures[i].shape);
            largest = bytes > largest ? bytes : largest;
        } else
            others = true;
    uint64_t pixels = PIXELS_PER_BYTE * ring->data_bytes, fitted = FITTED_PER_BYTE * ring->data_bytes;
    pixels = pixels < ring->table_max * largest ? pixels : ring->table_max * largest;
    ring->room.pixels = largest == 0 ? 0 : pixels > largest ? pixels : largest;
    ring->room.fitted = !others ? 0 : fitted > fitted_bytes(load) ? fitted : fitted_bytes(load);
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

#define RATE_IMAGES 256 /* per batch */
#define RATE_ROUNDS 8
#define RATE_BYTES  (UINT64_C(256) << 20) /* limit of the files' bytes; one batch may exceed it */

/* Images in pinned memory, and room for the pixels of a batch. They are from all parts of the data set,
 * because the engines need longer for some images than for others. */
struct rate_test {
    std::mutex turn;
    double time_s;
    uint64_t bytes;       /* of the samples decoded in `time_s` */
    uint64_t batch_bytes; /* of the samples of a batch */
    uint32_t next;        /* index of the next image */
    struct image_batch batch;
    cudaStream_t stream;
    uint8_t *files, *pixels;
    uint32_t *chosen, count; /* sample numbers */
    uint64_t *at;            /* offsets of their files */
};

/* Chooses the images. Sets `*file_bytes` to the memory that their files need. */
static void choose_images(const struct ring *ring, struct rate_test *test, uint64_t *file_bytes)
{
    const struct dataset *dataset = ring->delivery.load->dataset;
    uint64_t all = 0, all_bytes = 0, next = 0, most = RATE_IMAGES * RATE_ROUNDS;
    for (uint32_t i = 0; i < dataset->sample_count; i++)
        if (is_on_device(ring, i)) {
            all++;
            all_bytes += dataset->samples[i].bytes;
        }
    const uint64_t fit = RATE_BYTES / (all_bytes / all + 1);
    most = fit < most ? fit : most;
    most = most > RATE_IMAGES ? most : RATE_IMAGES;
    most = most < all ? most : all;
    *file_bytes = 0;
    for (uint32_t i = 0; i < dataset->sample_count && test->count < most; i++)
        if (is_on_device(ring, i) && next++ * most / all == test->count) {
            const struct dataset_sample *sample = &dataset->samples[i];
            *file_bytes += dataset->members[sample->member + sample->image].size;
            test->chosen[test->count++] = i;
        }
}

/* Reads the files of the chosen images, and leaves out those that are broken. */
static enum status read_files(struct ring *ring, struct rate_test *test)
{
    const struct dataset *dataset = ring->delivery.load->dataset;
    uint64_t at = 0;
    uint32_t intact = 0;
    for (uint32_t i = 0; i < test->count; i++) {
        const uint32_t number = test->chosen[i];
        const struct dataset_sample *sample = &dataset->samples[number];
        const struct dataset_member *member = &dataset->members[sample->member + sample->image];
        const struct jpeg_shape *shape = &ring->delivery.arrays.pictures[number].shape;
        TRY(plain_bytes(&ring->delivery.queues[0].plain, member, member->size, test->files + at));
        if (!jpeg_intact(test->files + at, member->size, shape->width, shape->height))
            continue; /* pixels of another size could overflow */
        test->chosen[intact] = number;
        test->at[intact++] = at;
        at += member->size;
    }
    test->count = intact;
    return STATUS_OK;
}

/* Returns the memory for the pixels of any batch: of consecutive images, from the last one to the first. */
static uint64_t batch_pixel_bytes(const struct ring *ring, const struct rate_test *test)
{
    const struct array_picture *pictures = ring->delivery.arrays.pictures;
    const uint32_t size = test->count < RATE_IMAGES ? test->count : RATE_IMAGES;
    uint64_t sum = 0, most = 0;
    for (uint32_t i = 0; i < test->count + size; i++) {
        sum += decoded_bytes(&pictures[test->chosen[i % test->count]].shape);
        if (i >= size)
            sum -= decoded_bytes(&pictures[test->chosen[i - size]].shape);
        most = sum > most ? sum : most;
    }
    return most;
}

static enum status read_images(struct ring *ring, struct rate_test *test)
{
    uint64_t file_bytes;
    test->chosen = static_cast<uint32_t *>(malloc(RATE_IMAGES * RATE_ROUNDS * sizeof *test->chosen));
    test->at = static_cast<uint64_t *>(malloc(RATE_IMAGES * RATE_ROUNDS * sizeof *test->at));
    TRY(ALLOCATED(test->chosen && test->at, "out of memory"));
    choose_images(ring, test, &file_bytes);
    TRY(image_batch_open(&ring->decoder, RATE_IMAGES, &test->batch));
    CUDA_TRY(cudaMallocHost(&test->files, file_bytes));
    TRY(read_files(ring, test));
    if (test->count > 0)
        CUDA_TRY(cudaMalloc(&test->pixels, batch_pixel_bytes(ring, test)));
    return stream_open(&test->stream);
}

/* Fills the batch with the next images. */
static void next_batch(const struct ring *ring, struct rate_test *test)
{
    const struct dataset *dataset = ring->delivery.load->dataset;
    uint8_t *pixels = test->pixels;
    test->batch.count = 0;
    test->batch_bytes = 0;
    while (test->batch.count < RATE_IMAGES && test->batch.count < test->count) {
        const uint32_t i = test->next++ % test->count, number = test->chosen[i];
        const struct dataset_sample *sample = &dataset->samples[number];
        const struct jpeg_shape *shape = &ring->delivery.arrays.pictures[number].shape;
        image_batch_add(&test->batch, test->files + test->at[i],
                        dataset->members[sample->member + sample->image].size, pixels, shape->width);
        pixels += decoded_bytes(shape);
        test->batch_bytes += sample->bytes;
    }
}

/* Times the batch in the thread of a worker, while the other threads wait. */
static enum status time_batch(struct output_queue *queue)
{
    struct ring *ring = static_cast<struct ring_worker *>(queue->own)->ring;
    struct rate_test *test = ring->rate;
    const uint32_t share = RATE_ROUNDS / ring->delivery.workers, rounds = share > 1 ? share : 1;
    std::lock_guard<std::mutex> guard(test->turn);
    double begin_s = 0;
    for (uint32_t round = 0; round <= rounds; round++) { /* round 0 warms up */
        TRY(image_batch_decode(&ring->decoder, &test->batch, test->stream));
        if (round == 0) {
            CUDA_TRY(cudaStreamSynchronize(test->stream));
            begin_s = timer_now_s();
        }
    }
    CUDA_TRY(cudaStreamSynchronize(test->stream));
    test->time_s += timer_now_s() - begin_s;
    test->bytes += rounds * test->batch_bytes;
    return STATUS_OK;
}

static void close_rate(struct rate_test *test)
{
    if (!test)
        return;
    if (test->stream)
        (void)cudaStreamSynchronize(test->stream);
    destroy(test->stream);
    image_batch_close(&test->batch);
    (void)cudaFreeHost(test->files);
    (void)cudaFree(test->pixels);
    free(test->chosen);
    free(test->at);
    delete test;
}

static enum status open_rate(struct ring *ring)
{
    struct rate_test *test = new (std::nothrow) rate_test{};
    TRY(ALLOCATED(test, "out of memory"));
    enum status status = read_images(ring, test);
    if (status == STATUS_OK)
        ring->rate = test;
    else
        close_rate(test);
    return status;
}

enum status ring_decode_rate(struct ring *ring, double *bytes_per_s)
{
    if (!ring->rate)
        TRY(open_rate(ring));
    ring->rate->time_s = 0;
    ring->rate->bytes = 0;
    *bytes_per_s = NAN;
    if (ring->rate->count == 0) /* all chosen files are broken */
        return STATUS_OK;
    next_batch(ring, ring->rate);
    TRY(delivery_each(&ring->delivery, time_batch));
    *bytes_per_s = (double)ring->rate->bytes / ring->rate->time_s;
    return STATUS_OK;
}

void ring_decode_end(struct ring *ring)
{
    close_rate(ring->rate);
    image_decoder_close(&ring->decoder);
}
