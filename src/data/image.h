/* Decoder of images and volumes, shared by the workloads that read them. */
#ifndef FDSL_DATA_IMAGE_H
#define FDSL_DATA_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/jpeg_image.h"
#include "data/resample.h"

struct image {
    uint32_t channels, depth, height, width; /* depth is 1 except for volumes */
    enum dtype type;                         /* DTYPE_U8, DTYPE_F16 or DTYPE_F32 */
    bool interleaved; /* the channels of a pixel are adjacent; otherwise each channel is stored as a plane */
    const uint8_t *pixels; /* may be unaligned */
};

/* Returns the number of values. */
static inline size_t image_values(const struct image *image)
{
    return (size_t)image->channels * image->depth * image->height * image->width;
}

/* Memory of a thread that decodes images. Zero it before the first use. It owns its buffers, which grow as
 * needed. */
struct image_scratch {
    uint8_t *pixels; /* pixels of the latest image */
    size_t pixels_bytes;
    uint8_t *turned; /* upright pixels */
    size_t turned_bytes;
    uint8_t *resized; /* resized pixels, in the orientation of the stored image */
    size_t resized_bytes;
    struct jpeg_decoder *jpeg;
    uint64_t
        jpeg_warnings; /* accepted warnings (jpeg_warnings()) in all JPEGs so far; the owner may reset it */
    struct resampler resampler;
};

/* The formats that image_decode() reads. The first bytes of a file decide between PNG and JPEG, because
 * files with the extension of the other format exist in well-known data sets. */
enum image_format {
    IMAGE_NONE,
    IMAGE_NPY,
    IMAGE_PNG,
    IMAGE_JPEG,
    IMAGE_FOREIGN /* an image in a format that image_decode() does not read */
};

FDSL_C_BEGIN

void image_scratch_close(struct image_scratch *scratch);

/* Returns the size of the pixel buffers of `scratch`, in bytes. Memory of libjpeg and the weights of the
 * resampler are not included. */
uint64_t image_scratch_bytes(const struct image_scratch *scratch);

/* Returns the format of a member, from its extension (in any case) and its first bytes. IMAGE_NONE if the
 * extension is neither npy nor one of MEMBERS_IMAGEFOLDER. */
enum image_format image_format(const char *extension, const uint8_t *data, size_t size);

/* Decodes a member. PNG and JPEG are decoded into `scratch`, and are rotated and mirrored as their EXIF data
 * require. The result depends only on the bytes of the member. "npy" becomes a view of `data`, with axes
 * (height, width), (channels, height, width) or (channels, depth, height, width). `*is_image` is false for
 * members of other formats and for all other arrays. STATUS_FAILED, with the reason, for a broken member;
 * STATUS_UNAVAILABLE for a format that this build cannot decode. Each thread needs its own scratch. */
enum status image_decode(const char *extension, const uint8_t *data, size_t size,
                         struct image_scratch *scratch, struct image *image, bool *is_image);

/* Decodes a JPEG to RGB as it is stored: not turned upright, and gray repeated in all channels. This is what
 * decoders of GPUs compute. Otherwise as image_decode(). */
enum status image_decode_stored(const uint8_t *data, size_t size, struct image_scratch *scratch,
                                struct image *image);

/* Checks only the header of a PNG or JPEG member, without decoding pixels. Sets the shape in `image`, as
 * stored, without pixels. STATUS_OK and no channels for members of other formats; otherwise as
 * image_decode(). */
enum status image_check_header(const char *extension, const uint8_t *data, size_t size,
                               struct image_scratch *scratch, struct image *image);

/* Grows a buffer of a scratch to at least `bytes` bytes. The old content of the buffer is lost. */
enum status image_room(uint8_t **room, size_t *room_bytes, size_t bytes);

FDSL_C_END

#endif
