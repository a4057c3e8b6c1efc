#include "load/idx.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif

#include "core/bytes.h"

#define TYPE_BYTE    0x08
#define UNPACKED_MAX (UINT64_C(1) << 34) /* far beyond any such data set */

static uint32_t big_endian(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

enum status idx_parse(const uint8_t *bytes, size_t size, struct idx *idx)
{
    *idx = (struct idx){0};
    if (size < 4 || bytes[0] != 0 || bytes[1] != 0)
        return status_set(STATUS_FAILED, "no IDX file: it does not begin with two zero bytes");
    if (bytes[2] != TYPE_BYTE)
        return status_set(STATUS_FAILED, "an IDX file of type 0x%02x; bytes, 0x08, are read", bytes[2]);
    if (bytes[3] == 0 || bytes[3] > IDX_AXES_MAX)
        return status_set(STATUS_FAILED, "an IDX file of %u axes; 1 to %d are read", bytes[3], IDX_AXES_MAX);
    idx->axes = bytes[3];
    size_t header = 4 + 4 * (size_t)idx->axes;
    uint64_t values = 1;
    for (uint32_t i = 0; i < idx->axes && header <= size; i++) {
        idx->shape[i] = big_endian(bytes + 4 + 4 * i);
        if (idx->shape[i] > 0 && values > UNPACKED_MAX / idx->shape[i])
            return status_set(STATUS_FAILED, "an IDX file with more values than are read");
        values *= idx->shape[i];
    }
    if (header > size || values != size - header)
        return status_set(STATUS_FAILED, "an IDX file of %" PRIu64 " bytes, by its header; it has %zu",
                          (uint64_t)header + values, size);
    idx->values = bytes + header;
    return STATUS_OK;
}

/* ---- gzip ---- */

static bool is_gzip(const char *bytes, size_t size)
{
    return size > 2 && (uint8_t)bytes[0] == 0x1F && (uint8_t)bytes[1] == 0x8B;
}

#ifdef HAVE_ZLIB

/* Makes room for more, up to the limit. */
static enum status grow(uint8_t **bytes, size_t *capacity)
{
    size_t larger = *capacity ? 2 * *capacity : 1 << 20;
    if (*capacity >= UNPACKED_MAX)
        return status_set(STATUS_FAILED, "a gzipped file of more than 16 GiB");
    uint8_t *moved = realloc(*bytes, larger);
    if (!moved)
        return status_set(STATUS_FAILED, "out of memory for a gzipped file");
    *bytes = moved;
    *capacity = larger;
    return STATUS_OK;
}

static enum status inflate_all(z_stream *stream, uint8_t **bytes, size_t *size)
{
    size_t capacity = 0;
    int result = Z_OK;
    while (result != Z_STREAM_END) {
        if (*size == capacity)
            TRY(grow(bytes, &capacity));
        size_t room = capacity - *size < 1 << 30 ? capacity - *size : 1 << 30;
        stream->next_out = *bytes + *size;
        stream->avail_out = (uInt)room;
        result = inflate(stream, Z_NO_FLUSH);
        *size += room - stream->avail_out;
        if (result != Z_OK && result != Z_STREAM_END)
            return status_set(STATUS_FAILED, "a gzipped file that is damaged or cut: %s",
                              stream->msg ? stream->msg : "it ends too soon");
    }
    return STATUS_OK;
}

static enum status unzip(const char *packed, size_t packed_size, uint8_t **bytes, size_t *size)
{
    *bytes = NULL;
    *size = 0;
    if (packed_size > UINT32_MAX)
        return status_set(STATUS_FAILED, "a gzipped file of more than 4 GiB");
    z_stream stream = {.next_in = (Bytef *)packed, .avail_in = (uInt)packed_size};
    if (inflateInit2(&stream, 15 + 16) != Z_OK) /* 16: gzip */
        return status_set(STATUS_FAILED, "out of memory for zlib");
    enum status status = inflate_all(&stream, bytes, size);
    inflateEnd(&stream);
    return status;
}

#else

static enum status unzip(const char *packed, size_t packed_size, uint8_t **bytes, size_t *size)
{
    (void)packed, (void)packed_size, (void)bytes, (void)size;
    return status_set(
        STATUS_UNAVAILABLE,
        "gzipped, and this build has no zlib: unpack it with gunzip, or install zlib (zlib1g-dev) "
        "and build again");
}

#endif

enum status idx_read(const char *path, struct idx *idx)
{
    char *bytes;
    uint8_t *whole;
    size_t size;
    *idx = (struct idx){0};
    TRY(bytes_read(path, &bytes, &size));
    enum status status = STATUS_OK;
    whole = (uint8_t *)bytes;
    if (is_gzip(bytes, size)) {
        uint8_t *unpacked = NULL;
        status = unzip(bytes, size, &unpacked, &size);
        free(bytes);
        whole = unpacked;
    }
    if (status == STATUS_OK)
        status = idx_parse(whole, size, idx);
    idx->owned = whole;
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s", path);
}

void idx_free(struct idx *idx)
{
    free(idx->owned);
    *idx = (struct idx){0};
}
