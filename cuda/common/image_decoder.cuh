/* Decodes batches of JPEG files with nvJPEG, into device memory. nvJPEG is loaded at run time, so that the
 * program starts without it. Builds without its header decode on the CPU only. */
#ifndef FDSL_CUDA_COMMON_IMAGE_DECODER_CUH
#define FDSL_CUDA_COMMON_IMAGE_DECODER_CUH

#include <atomic>
#include <mutex>

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"
#include "data/image.h"

struct nvjpegHandle;
struct nvjpegJpegState;

struct image_decoder {
    enum decoder kind; /* never DECODER_AUTO; if DECODER_CPU, do not call image_batch_decode() */
    struct nvjpegHandle *handle;
    /* The engines decode one batch at a time, so concurrent calls from several threads slow each other
     * down. */
    std::mutex turn;
    std::atomic<uint64_t> bytes; /* memory that nvJPEG has allocated, pinned and on the device */
};

/* A batch of at most `room` files, and nvJPEG's memory for it. One thread at a time can use it. */
struct image_batch {
    struct nvjpegJpegState *state;
    uint32_t room, count, begun; /* `begun`: number of images that nvJPEG expects per batch */
    const uint8_t **files;
    size_t *sizes;
    void *images; /* nvjpegImage_t per file */
    bool *broken; /* set by image_batch_decode(): nvJPEG could not decode the image */
};

/* Opens a decoder on the current device. DECODER_AUTO becomes DECODER_HARDWARE if the GPU has JPEG engines,
 * otherwise DECODER_HYBRID, or DECODER_CPU without nvJPEG. STATUS_UNAVAILABLE, with the remedy, if the wanted
 * kind does not exist here. The caller closes the decoder, even after a failure. */
enum status image_decoder_open(struct image_decoder *decoder, enum decoder wanted);
void image_decoder_close(struct image_decoder *decoder);

/* Returns the largest possible difference between a byte from the decoder and the same byte from
 * libjpeg-turbo, for images of image_suits_device(). The engines compute the same
 * coefficients and chroma as libjpeg; only their conversion to RGB may round differently. The hybrid
 * decoder's luma and chroma differ by at most 1 (measured). A colour value is at most Y + 1.772 (C - 128). So
 * it differs by at most 1 + 1.772 plus rounding, that is, by at most 3. A resized image has the same bounds,
 * because its pixels are weighted means with positive weights. */
uint32_t image_decoder_tolerance(enum decoder kind);

enum status image_batch_open(struct image_decoder *decoder, uint32_t room, struct image_batch *batch);
void image_batch_close(struct image_batch *batch);

/* Adds a file. Its bytes, preferably in pinned memory, must stay valid until the stream has decoded the
 * batch. `pixels`: device memory for three bytes per pixel, rows without gaps. */
void image_batch_add(struct image_batch *batch, const uint8_t *file, size_t size, uint8_t *pixels,
                     uint32_t width);

/* Decodes the batch on the stream. If nvJPEG refuses the batch, decodes each image alone, and sets `broken`
 * of those that it refuses again. STATUS_FAILED on CUDA errors. Thread safe for different batches. */
enum status image_batch_decode(struct image_decoder *decoder, struct image_batch *batch, cudaStream_t stream);

#endif
