#include "common/image_decoder.cuh"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "core/phase.h"

uint32_t image_decoder_tolerance(enum decoder kind)
{
    return kind == DECODER_HARDWARE ? 1 : kind == DECODER_HYBRID ? 3 : 0;
}

#ifdef HAVE_NVJPEG
#include <nvjpeg.h>

static_assert(NVJPEG_STATUS_ALLOCATOR_FAILURE == (int)NVJPEG_CODE_MEMORY, "exhausted.h has another code");

/* ---- The library ---- */

#define FUNCTIONS(X)           \
    X(CreateExV2)              \
    X(Destroy)                 \
    X(GetHardwareDecoderInfo)  \
    X(JpegStateCreate)         \
    X(JpegStateDestroy)        \
    X(DecodeBatchedInitialize) \
    X(DecodeBatched)

static struct {
    bool there;
#define MEMBER(name) decltype(&nvjpeg##name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
} nvjpeg;

/* libnvjpeg.so.N is the library of CUDA N. The name without a number exists only if the toolkit's development
 * files are installed. */
#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)
#define LIBRARY  "libnvjpeg.so." TEXT(NVJPEG_VER_MAJOR)

/* Loads the library, once per process. STATUS_UNAVAILABLE, with the remedy, if it is missing or too old. */
static enum status open_library(void)
{
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    void *handle = nvjpeg.there ? NULL : dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!nvjpeg.there && !handle)
        handle = dlopen("libnvjpeg.so", RTLD_NOW | RTLD_LOCAL);
    if (nvjpeg.there)
        return STATUS_OK;
    if (!handle)
        return status_set(STATUS_UNAVAILABLE,
                          "nvJPEG not found (" LIBRARY ", part of the CUDA toolkit); install it, or decode "
                          "with %sdecoder cpu",
                          OPTION_DASHES);
#define FIND(name)                                                                   \
    *(void **)&nvjpeg.name = dlsym(handle, "nvjpeg" #name);                          \
    if (!nvjpeg.name)                                                                \
        return status_set(STATUS_UNAVAILABLE,                                        \
                          "the nvJPEG library has no nvjpeg" #name                   \
                          "; install a newer version, or decode with %sdecoder cpu", \
                          OPTION_DASHES);
    FUNCTIONS(FIND)
#undef FIND
    nvjpeg.there = true;
    return STATUS_OK;
}

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
                            "out of memory to decode images with nvJPEG; free memory, or use %sdecoder cpu",
                            OPTION_DASHES)
               : STATUS_OK;
}

/* Returns nvJPEG's status. */
static int create(struct image_decoder *decoder, nvjpegBackend_t backend)
{
    nvjpegDevAllocatorV2_t device = {allocate_device, release_device, decoder};
    nvjpegPinnedAllocatorV2_t pinned = {allocate_pinned, release_pinned, decoder};
    int status = nvjpeg.CreateExV2(backend, &device, &pinned, NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION,
                                   &decoder->handle);
    if (status == NVJPEG_STATUS_SUCCESS)
        return status;
    (void)cudaGetLastError();
    decoder->handle = NULL;
    return status;
}

static bool create_hardware(struct image_decoder *decoder)
{
    unsigned engines = 0, cores = 0;
    if (create(decoder, NVJPEG_BACKEND_HARDWARE) != NVJPEG_STATUS_SUCCESS)
        return false;
    if (nvjpeg.GetHardwareDecoderInfo(decoder->handle, &engines, &cores) == NVJPEG_STATUS_SUCCESS &&
        engines > 0)
        return true;
    (void)nvjpeg.Destroy(decoder->handle);
    decoder->handle = NULL;
    return false;
}

enum status image_decoder_open(struct image_decoder *decoder, enum decoder wanted)
{
    decoder->kind = DECODER_CPU;
    if (wanted == DECODER_CPU)
        return STATUS_OK;
    enum status status = open_library();
    if (status != STATUS_OK && wanted == DECODER_AUTO) {
        status_warn("images are decoded on the CPU: %s", status_text());
        return STATUS_OK;
    }
    TRY(status);
    decoder->kind = DECODER_HARDWARE;
    if (wanted != DECODER_HYBRID && create_hardware(decoder))
        return STATUS_OK;
    if (wanted == DECODER_HARDWARE)
        return status_in_library
                   ? status_set(STATUS_UNAVAILABLE, "this GPU has no JPEG engines; use hybrid or cpu")
                   : status_value(STATUS_UNAVAILABLE, "decoder", "hardware",
                                  ": this GPU has no JPEG engines; use --decoder hybrid or cpu");
    decoder->kind = DECODER_HYBRID;
    int code = create(decoder, NVJPEG_BACKEND_GPU_HYBRID);
    TRY(check_memory(code, cudaSuccess));
    return code == NVJPEG_STATUS_SUCCESS
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE, "nvJPEG cannot be used with this GPU; use %sdecoder cpu",
                            OPTION_DASHES);
}

void image_decoder_close(struct image_decoder *decoder)
{
    if (decoder->handle)
        (void)nvjpeg.Destroy(decoder->handle);
    decoder->handle = NULL;
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
    batch->images = calloc(room, sizeof(nvjpegImage_t));
    batch->broken = static_cast<bool *>(calloc(room, sizeof *batch->broken));
    TRY(ALLOCATED(batch->files && batch->sizes && batch->images && batch->broken,
                  "out of memory for batches of %u images", room));
    int code = nvjpeg.JpegStateCreate(decoder->handle, &batch->state);
    TRY(check_memory(code, cudaGetLastError()));
    return code == NVJPEG_STATUS_SUCCESS
               ? STATUS_OK
               : status_set(STATUS_FAILED, "nvjpegJpegStateCreate failed (status %d)", code);
}

void image_batch_close(struct image_batch *batch)
{
    if (batch->state)
        (void)nvjpeg.JpegStateDestroy(batch->state);
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
    nvjpegImage_t *image = static_cast<nvjpegImage_t *>(batch->images) + i;
    image->channel[0] = pixels;
    image->pitch[0] = (size_t)3 * width;
}

/* Decodes `count` images of the batch, from number `first` on. Returns nvJPEG's status. */
static int decode(struct image_decoder *decoder, struct image_batch *batch, uint32_t first, uint32_t count,
                  cudaStream_t stream)
{
    std::unique_lock<std::mutex> guard(decoder->turn, std::defer_lock);
    if (decoder->kind == DECODER_HARDWARE)
        guard.lock();
    if (count != batch->begun) {
        int status =
            nvjpeg.DecodeBatchedInitialize(decoder->handle, batch->state, (int)count, 1, NVJPEG_OUTPUT_RGBI);
        batch->begun = status == NVJPEG_STATUS_SUCCESS ? count : 0;
        if (status != NVJPEG_STATUS_SUCCESS)
            return status;
    }
    return nvjpeg.DecodeBatched(decoder->handle, batch->state, batch->files + first, batch->sizes + first,
                                static_cast<nvjpegImage_t *>(batch->images) + first, stream);
}

/* Fails if memory or CUDA, and not an image, is the cause of nvJPEG's status. */
static enum status check_cause(int code)
{
    cudaError_t error = code == NVJPEG_STATUS_SUCCESS ? cudaSuccess : cudaGetLastError();
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
    int code = decode(decoder, batch, 0, batch->count, stream);
    TRY(check_cause(code));
    for (uint32_t i = 0; code != NVJPEG_STATUS_SUCCESS && i < batch->count; i++) {
        /* The state is in use: the GPU may not have fetched what the CPU has decoded for the latest call. */
        CUDA_TRY(cudaStreamSynchronize(stream));
        int own = decode(decoder, batch, i, 1, stream);
        TRY(check_cause(own));
        batch->broken[i] = own != NVJPEG_STATUS_SUCCESS;
    }
    return STATUS_OK;
}

#else

enum status image_decoder_open(struct image_decoder *decoder, enum decoder wanted)
{
    decoder->kind = DECODER_CPU;
    if (wanted == DECODER_AUTO)
        status_warn("images are decoded on the CPU: this build has no nvjpeg.h");
    return wanted == DECODER_AUTO || wanted == DECODER_CPU
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE, "not built: this build has no nvjpeg.h; use %sdecoder cpu",
                            OPTION_DASHES);
}

void image_decoder_close(struct image_decoder *decoder)
{
    (void)decoder;
}

enum status image_batch_open(struct image_decoder *decoder, uint32_t room, struct image_batch *batch)
{
    (void)decoder, (void)room;
    *batch = {};
    return STATUS_OK;
}

void image_batch_close(struct image_batch *batch)
{
    (void)batch;
}

void image_batch_add(struct image_batch *batch, const uint8_t *file, size_t size, uint8_t *pixels,
                     uint32_t width)
{
    (void)batch, (void)file, (void)size, (void)pixels, (void)width;
}

enum status image_batch_decode(struct image_decoder *decoder, struct image_batch *batch, cudaStream_t stream)
{
    (void)decoder, (void)batch, (void)stream;
    return STATUS_OK;
}

#endif
