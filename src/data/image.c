#include "data/image.h"

#include <stdlib.h>
#include <strings.h>

#include "data/npy.h"
#include "data/png_image.h"

static enum status decode_png(const uint8_t *data, size_t size, uint8_t **room, size_t *room_bytes,
                              struct image *image)
{
    struct png_shape shape;
    TRY(png_shape(data, size, &shape));
    size_t bytes = (size_t)shape.width * shape.height * shape.channels;
    if (bytes > *room_bytes) {
        uint8_t *larger = realloc(*room, bytes);
        if (!larger)
            return status_set(STATUS_FAILED, "out of memory for an image of %u x %u", shape.width,
                              shape.height);
        *room = larger;
        *room_bytes = bytes;
    }
    TRY(png_decode(data, size, *room, *room_bytes, &shape));
    *image = (struct image){.channels = shape.channels,
                            .depth = 1,
                            .height = shape.height,
                            .width = shape.width,
                            .type = DTYPE_U8,
                            .interleaved = true,
                            .pixels = *room};
    return STATUS_OK;
}

static enum status decode_npy(const uint8_t *data, size_t size, struct image *image, bool *is_image)
{
    struct npy_header header;
    enum dtype type;
    TRY(npy_header_parse(data, size, &header));
    TRY(npy_header_check(&header, size));
    *is_image = !header.fortran && header.axes >= 2 && header.axes <= 4 && dtype_from_npy(header.type, &type);
    for (uint32_t i = 0; *is_image && i < header.axes; i++)
        *is_image = header.shape[i] > 0 && header.shape[i] <= INT32_MAX;
    if (!*is_image)
        return STATUS_OK;
    const uint64_t *plane = &header.shape[header.axes - 2];
    *image = (struct image){.channels = header.axes > 2 ? (uint32_t)header.shape[0] : 1,
                            .depth = header.axes > 3 ? (uint32_t)header.shape[1] : 1,
                            .height = (uint32_t)plane[0],
                            .width = (uint32_t)plane[1],
                            .type = type,
                            .pixels = data + header.data};
    return STATUS_OK;
}

enum status image_decode(const char *extension, const uint8_t *data, size_t size, uint8_t **room,
                         size_t *room_bytes, struct image *image, bool *is_image)
{
    *is_image = strcasecmp(extension, "png") == 0;
    if (*is_image)
        return decode_png(data, size, room, room_bytes, image);
    if (strcasecmp(extension, "npy") == 0)
        return decode_npy(data, size, image, is_image);
    return STATUS_OK;
}
