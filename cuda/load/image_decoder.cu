#include "load/image_decoder.cuh"

#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"

/* ---- Memory, counted ---- */

static void count_bytes(void *context, uint64_t bytes)
{
    static_cast<struct image_decoder *>(context)->bytes += bytes;
}

static int allocate_device(void *context, void **memory, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    cudaError_t error = cudaMalloc(memory, bytes);
    if (error == cudaSuccess)
        count_bytes(context, bytes);
    return error;
}

static int allocate_pinned(void *context, void **memory, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    cudaError_t error = cudaMallocHost(memory, bytes);
    if (error == cudaSuccess)
        count_bytes(context, bytes);
    return error;
}

static int release_device(void *context, void *memory, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    count_bytes(context, 0 - (uint64_t)bytes);
    return cudaFree(memory);
}

static int release_pinned(void *context, void *memory, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    count_bytes(context, 0 - (uint64_t)bytes);
    return cudaFreeHost(memory);
}

/* ---- The decoder ---- */

/* Returns STATUS_EXHAUSTED, with a message, if nvJPEG failed for lack of memory, else STATUS_OK. `error` is
 * CUDA's last error after the call. */
static enum status check_memory(int code, cudaError_t error)
{
    return gpu_status_of(LIBRARY_NVJPEG, code, error, 0) == STATUS_EXHAUSTED
               ? status_set(STATUS_EXHAUSTED,
                            "out of memory to decode images with nvJPEG; lower --chunk or --threads")
               : STATUS_OK;
}

/* Returns nvJPEG's status. */
static int create(struct image_decoder *decoder, enum nvjpeg_backend backend)
{
    struct nvjpeg_device_memory device = {allocate_device, release_device, decoder};
    struct nvjpeg_pinned_memory pinned = {allocate_pinned, release_pinned, decoder};
    int status =
        decoder->library->create(backend, &device, &pinned, NVJPEG_INTERPOLATED_UPSAMPLING, &decoder->handle);
    if (status == NVJPEG_OK)
        return status;
    (void)cudaGetLastError();
    decoder->handle = NULL;
    return status;
}

static bool create_hardware(struct image_decoder *decoder)
{
    unsigned engines = 0, cores = 0;
    if (create(decoder, NVJPEG_HARDWARE) != NVJPEG_OK)
        return false;
    if (decoder->library->engines(decoder->handle, &engines, &cores) == NVJPEG_OK && engines > 0)
        return true;
    (void)decoder->library->destroy(decoder->handle);
    decoder->handle = NULL;
    return false;
}

static enum status open_state(struct image_decoder *decoder, nvjpeg_state *state)
{
    int code = decoder->library->state_create(decoder->handle, state);
    TRY(check_memory(code, cudaGetLastError()));
    return code == NVJPEG_OK ? STATUS_OK
                             : status_set(STATUS_FAILED, "nvjpegJpegStateCreate failed (status %d)", code);
}

static enum status open_engines(struct image_decoder *decoder)
{
    TRY(stream_open(&decoder->stream));
    CUDA_TRY(cudaEventCreateWithFlags(&decoder->decoded, cudaEventDisableTiming));
    return open_state(decoder, &decoder->state);
}

enum status image_decoder_open(struct image_decoder *decoder, enum decoder wanted)
{
    decoder->kind = DECODER_CPU;
    if (wanted == DECODER_CPU)
        return STATUS_OK;
    enum status status = nvjpeg_open(&decoder->library);
    if (status != STATUS_OK && wanted == DECODER_AUTO) {
        status_warn("images are decoded on the CPU: %s", status_text());
        return STATUS_OK;
    }
    TRY(status);
    decoder->kind = DECODER_HARDWARE;
    if (wanted != DECODER_HYBRID && create_hardware(decoder))
        return open_engines(decoder);
    if (wanted == DECODER_HARDWARE)
        return status_set(STATUS_UNAVAILABLE,
                          "--decoder hardware: this GPU has no JPEG engines; use --decoder hybrid or cpu");
    decoder->kind = DECODER_HYBRID;
    int code = create(decoder, NVJPEG_GPU_HYBRID);
    TRY(check_memory(code, cudaSuccess));
    return code == NVJPEG_OK
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE, "nvJPEG cannot be used with this GPU; use --decoder cpu");
}

void image_decoder_close(struct image_decoder *decoder)
{
    if (decoder->stream)
        (void)cudaStreamSynchronize(decoder->stream);
    if (decoder->state)
        (void)decoder->library->state_destroy(decoder->state);
    if (decoder->handle)
        (void)decoder->library->destroy(decoder->handle);
    destroy(decoder->decoded, decoder->stream);
    decoder->handle = NULL;
    decoder->state = NULL;
    decoder->stream = NULL;
    decoder->decoded = NULL;
}

uint32_t image_decoder_tolerance(enum decoder kind)
{
    return kind == DECODER_HARDWARE ? 1 : kind == DECODER_HYBRID ? 3 : 0;
}

/* ---- Batches ---- */

enum status image_batch_open(struct image_decoder *decoder, uint32_t room, struct image_batch *batch)
{
    *batch = {};
    if (decoder->kind == DECODER_CPU)
        return STATUS_OK;
    batch->room = room;
    batch->files = static_cast<const uint8_t **>(malloc(room * sizeof *batch->files));
    batch->sizes = static_cast<size_t *>(malloc(room * sizeof *batch->sizes));
    batch->images = static_cast<struct nvjpeg_image *>(calloc(room, sizeof *batch->images));
    batch->broken = static_cast<bool *>(calloc(room, sizeof *batch->broken));
    TRY(ALLOCATED(batch->files && batch->sizes && batch->images && batch->broken,
                  "out of memory for batches of %u images", room));
    return decoder->kind == DECODER_HARDWARE ? STATUS_OK : open_state(decoder, &batch->state);
}

void image_batch_close(const struct image_decoder *decoder, struct image_batch *batch)
{
    if (batch->state)
        (void)decoder->library->state_destroy(batch->state);
    free(batch->files);
    free(batch->sizes);
    free(batch->images);
    free(batch->broken);
    *batch = {};
}

void image_batch_add(struct image_batch *batch, const uint8_t *file, size_t size, uint8_t *pixels,
                     uint32_t width)
{
    uint32_t i = batch->count++;
    batch->files[i] = file;
    batch->sizes[i] = size;
    batch->images[i].channel[0] = pixels;
    batch->images[i].pitch[0] = (size_t)3 * width;
}

/* Decodes `count` images of the batch, from number `first` on, with a state that expects `*begun` images.
 * Returns nvJPEG's status. */
static int decode_on(const struct image_decoder *decoder, nvjpeg_state state, uint32_t *begun,
                     const struct image_batch *batch, uint32_t first, uint32_t count, cudaStream_t stream)
{
    const struct nvjpeg *library = decoder->library;
    if (count != *begun) {
        int status = library->batch_begin(decoder->handle, state, (int)count, 1, NVJPEG_INTERLEAVED_RGB);
        *begun = status == NVJPEG_OK ? count : 0;
        if (status != NVJPEG_OK)
            return status;
    }
    return library->batch_decode(decoder->handle, state, batch->files + first, batch->sizes + first,
                                 batch->images + first, stream);
}

/* Sets `*code` to nvJPEG's status. */
static enum status decode(struct image_decoder *decoder, struct image_batch *batch, uint32_t first,
                          uint32_t count, cudaStream_t stream, int *code)
{
    if (decoder->kind != DECODER_HARDWARE) {
        *code = decode_on(decoder, batch->state, &batch->begun, batch, first, count, stream);
        return STATUS_OK;
    }
    std::lock_guard<std::mutex> guard(decoder->turn);
    *code = decode_on(decoder, decoder->state, &decoder->begun, batch, first, count, decoder->stream);
    if (*code == NVJPEG_OK) {
        CUDA_TRY(cudaEventRecord(decoder->decoded, decoder->stream));
        CUDA_TRY(cudaStreamWaitEvent(stream, decoder->decoded, 0));
    }
    return STATUS_OK;
}

/* Fails if memory or CUDA, and not an image, is the cause of nvJPEG's status. */
static enum status check_cause(int code)
{
    cudaError_t error = code == NVJPEG_OK ? cudaSuccess : cudaGetLastError();
    TRY(check_memory(code, error));
    CUDA_TRY(error);
    return STATUS_OK;
}

enum status image_batch_decode(struct image_decoder *decoder, struct image_batch *batch, cudaStream_t stream)
{
    RANGE(DECODE);
    if (batch->count == 0)
        return STATUS_OK;
    memset(batch->broken, 0, batch->count * sizeof *batch->broken);
    int code, own;
    TRY(decode(decoder, batch, 0, batch->count, stream, &code));
    TRY(check_cause(code));
    for (uint32_t i = 0; code != NVJPEG_OK && i < batch->count; i++) {
        TRY(decode(decoder, batch, i, 1, stream, &own));
        TRY(check_cause(own));
        batch->broken[i] = own != NVJPEG_OK;
    }
    return STATUS_OK;
}
