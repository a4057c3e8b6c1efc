/* Decodes WebP files with libwebp. */
#include "data/image_formats.h"

#include <string.h>
#ifdef HAVE_WEBP
#include <webp/decode.h>
#endif

#include "data/resample.h"

#ifdef HAVE_WEBP

#define HEADER_BYTES 25 /* RIFF header, chunk header, and the header of a lossless image */
#define RIFF_BYTES   12
#define CHUNK_BYTES  8 /* name and size */

/* Returns the orientation in the chunk EXIF, 1 to 8, or 1 if there is none. Some programs write the prefix of
 * JPEG files before the EXIF data. */
static uint32_t find_orientation(const uint8_t *bytes, size_t size)
{
    static const uint8_t prefix[6] = {'E', 'x', 'i', 'f', 0, 0};
    for (size_t at = RIFF_BYTES; at < size && size - at >= CHUNK_BYTES;) {
        const uint8_t *data = bytes + at + CHUNK_BYTES;
        const size_t left = size - at - CHUNK_BYTES;
        size_t length = bytes[at + 4] | (size_t)bytes[at + 5] << 8 | (size_t)bytes[at + 6] << 16 |
                        (size_t)bytes[at + 7] << 24;
        if (length > left)
            return 1;
        if (memcmp(bytes + at, "EXIF", 4) == 0) {
            const size_t skip =
                length >= sizeof prefix && memcmp(data, prefix, sizeof prefix) == 0 ? sizeof prefix : 0;
            const uint32_t orientation = orientation_in_exif(data + skip, length - skip);
            return orientation ? orientation : 1;
        }
        at += CHUNK_BYTES + length + length % 2; /* chunks are padded to an even size */
    }
    return 1;
}

static enum status failure(VP8StatusCode code)
{
    if (code == VP8_STATUS_OUT_OF_MEMORY)
        return status_set(STATUS_EXHAUSTED, "out of memory for a WebP decoder");
    return status_set(STATUS_FAILED, "libwebp: %s",
                      code == VP8_STATUS_NOT_ENOUGH_DATA ? "the file was truncated"
                                                         : "the file is damaged, or is no WebP image");
}

/* Reads the header. */
static enum status begin(const uint8_t *bytes, size_t size, WebPBitstreamFeatures *features)
{
    TRY(image_check_size("WebP", size, HEADER_BYTES));
    VP8StatusCode code = WebPGetFeatures(bytes, size, features);
    if (code != VP8_STATUS_OK)
        return failure(code);
    return features->has_animation
               ? status_set(STATUS_FAILED,
                            "an animated WebP image has several pictures; only single pictures are decoded")
               : STATUS_OK;
}

enum status webp_shape(const uint8_t *bytes, size_t size, uint32_t *width, uint32_t *height)
{
    WebPBitstreamFeatures features;
    TRY(begin(bytes, size, &features));
    *width = (uint32_t)features.width;
    *height = (uint32_t)features.height;
    return STATUS_OK;
}

enum status webp_decode(const uint8_t *bytes, size_t size, uint8_t *pixels, uint32_t *orientation)
{
    WebPDecoderConfig config;
    if (!WebPInitDecoderConfig(&config))
        return status_set(STATUS_UNAVAILABLE, "libwebp has another version than the one of this build");
    TRY(begin(bytes, size, &config.input));
    const size_t stride = (size_t)config.input.width * 3;
    config.output.colorspace = MODE_RGB;
    config.output.is_external_memory = 1;
    config.output.u.RGBA.rgba = pixels;
    config.output.u.RGBA.stride = (int)stride;
    config.output.u.RGBA.size = stride * (size_t)config.input.height;
    VP8StatusCode code = WebPDecode(bytes, size, &config);
    WebPFreeDecBuffer(&config.output);
    if (code != VP8_STATUS_OK)
        return failure(code);
    *orientation = find_orientation(bytes, size);
    return STATUS_OK;
}

#else

enum status webp_shape(const uint8_t *bytes, size_t size, uint32_t *width, uint32_t *height)
{
    (void)bytes, (void)size, (void)width, (void)height;
    return status_set(STATUS_UNAVAILABLE,
                      "this build has no WebP support: install libwebp (libwebp-dev) and build again");
}

enum status webp_decode(const uint8_t *bytes, size_t size, uint8_t *pixels, uint32_t *orientation)
{
    (void)pixels, (void)orientation;
    return webp_shape(bytes, size, &(uint32_t){0}, &(uint32_t){0});
}

#endif
