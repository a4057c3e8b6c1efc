#include "data/labelled_files.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif

#include "core/file.h"
#include "machine/host.h"

#define TYPE_BYTE  0x08
#define VALUES_MAX (UINT64_C(1) << 34) /* far more than any IDX data set has */
#define FIRST_ROOM ((size_t)1 << 20)   /* initial size of the unpacked data */
#define PIECE      ((size_t)1 << 30)   /* bytes passed to zlib at a time; zlib's counters have 32 bits */

static uint32_t big_endian(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

/* Parses the header: type, axes and shape. Sets `*header` and `*values` to the sizes of the header and of the
 * values, in bytes. `bytes` must hold IDX_HEADER_MAX bytes, or the whole file if it is shorter. */
static enum status read_header(const uint8_t *bytes, size_t size, struct idx *idx, size_t *header,
                               uint64_t *values)
{
    *idx = (struct idx){0};
    if (size < 4 || bytes[0] != 0 || bytes[1] != 0)
        return status_set(STATUS_FAILED, "not an IDX file: it does not begin with two zero bytes");
    if (bytes[2] != TYPE_BYTE)
        return status_set(STATUS_FAILED,
                          "the IDX file has values of type 0x%02x; only 0x08, unsigned bytes, is supported",
                          bytes[2]);
    if (bytes[3] == 0 || bytes[3] > IDX_AXES_MAX)
        return status_set(STATUS_FAILED, "the IDX file has %u axes; 1 to %d are supported", bytes[3],
                          IDX_AXES_MAX);
    idx->axes = bytes[3];
    *header = 4 + 4 * (size_t)idx->axes;
    *values = 1;
    for (uint32_t i = 0; i < idx->axes && *header <= size; i++) {
        idx->shape[i] = big_endian(bytes + 4 + 4 * i);
        if (idx->shape[i] > 0 && *values > VALUES_MAX / idx->shape[i])
            return status_set(STATUS_FAILED, "the IDX file has too many values");
        *values *= idx->shape[i];
    }
    return STATUS_OK;
}

enum status idx_parse_header(const uint8_t *bytes, size_t size, struct idx *idx, size_t *offset)
{
    uint64_t values = 0;
    *offset = 0;
    TRY(read_header(bytes, size, idx, offset, &values));
    return *offset <= size && values == size - *offset
               ? STATUS_OK
               : status_set(STATUS_FAILED, "its IDX header requires %" PRIu64 " bytes, but the file has %zu",
                            (uint64_t)*offset + values, size);
}

enum status idx_parse(const uint8_t *bytes, size_t size, struct idx *idx)
{
    size_t offset;
    TRY(idx_parse_header(bytes, size, idx, &offset));
    idx->values = bytes + offset;
    return STATUS_OK;
}

enum status idx_check_pair(const char *images_name, const struct idx *images, const char *labels_name,
                           const struct idx *labels)
{
    if (images->axes != 3)
        return status_set(STATUS_FAILED, "%s holds no images: it has %u ax%s, but images have three",
                          images_name, images->axes, images->axes == 1 ? "is" : "es");
    if (images->shape[1] == 0 || images->shape[2] == 0)
        return status_set(STATUS_FAILED, "%s holds no images: its header says %u x %u pixels", images_name,
                          images->shape[1], images->shape[2]);
    return labels->axes == 1 && labels->shape[0] == images->shape[0]
               ? STATUS_OK
               : status_set(STATUS_FAILED, "%s does not hold one label for each of the %u images of %s",
                            labels_name, images->shape[0], images_name);
}

/* ---- gzip ---- */

bool idx_is_gzip(const uint8_t *bytes, size_t size)
{
    return size > 2 && bytes[0] == 0x1F && bytes[1] == 0x8B;
}

#ifdef HAVE_ZLIB

/* State of unpacking a file of consecutive gzip members. */
struct gzip {
    z_stream stream;
    const uint8_t *packed;
    size_t left; /* packed bytes not yet passed to zlib */
    bool ended;  /* a member has ended and the next has not begun */
};

/* Unpacks the next `wanted` bytes, or fewer at the end of the file. Sets `*got` to the number of unpacked
 * bytes. */
static enum status unpack(struct gzip *gzip, uint8_t *bytes, size_t wanted, size_t *got)
{
    z_stream *stream = &gzip->stream;
    for (*got = 0; *got < wanted;) {
        if (stream->avail_in == 0) {
            stream->next_in = (Bytef *)(uintptr_t)gzip->packed; /* zlib does not write to it */
            stream->avail_in = (uInt)(gzip->left < PIECE ? gzip->left : PIECE);
            gzip->packed += stream->avail_in;
            gzip->left -= stream->avail_in;
        }
        if (gzip->ended && stream->avail_in == 0)
            return STATUS_OK;
        if (gzip->ended)
            inflateReset(stream);
        size_t room = wanted - *got < PIECE ? wanted - *got : PIECE;
        stream->next_out = bytes + *got;
        stream->avail_out = (uInt)room;
        int result = inflate(stream, Z_NO_FLUSH);
        *got += room - stream->avail_out;
        gzip->ended = result == Z_STREAM_END;
        if (result != Z_OK && result != Z_STREAM_END)
            return status_set(STATUS_FAILED, "damaged or truncated gzip file: %s",
                              stream->msg ? stream->msg : "unexpected end of file");
    }
    return STATUS_OK;
}

/* Unpacks the whole file. The IDX header states the size, but the buffer grows with the data. A wrong header
 * therefore does not cause a large allocation. */
static enum status unpack_all(struct gzip *gzip, uint8_t **bytes, size_t *size)
{
    uint8_t head[IDX_HEADER_MAX];
    size_t header = 0, room = 0;
    uint64_t values = 0;
    struct idx idx;
    TRY(unpack(gzip, head, sizeof head, size));
    TRY(read_header(head, *size, &idx, &header, &values));
    TRY(memory_check(header + values, "the unpacked IDX file", "is its header damaged?"));
    size_t most = header + (size_t)values + 1; /* one extra byte detects excess data */
    if (most < sizeof head)
        most = sizeof head;
    do {
        size_t larger = room ? 2 * room : FIRST_ROOM;
        larger = larger < most ? larger : most;
        uint8_t *moved = realloc(*bytes, larger);
        TRY(ALLOCATED(moved, "out of memory for a gzip file"));
        if (room == 0)
            memcpy(moved, head, *size);
        *bytes = moved;
        room = larger;
        size_t got = 0;
        TRY(unpack(gzip, *bytes + *size, room - *size, &got));
        *size += got;
    } while (*size == room && room < most);
    return *size <= header + values
               ? STATUS_OK
               : status_set(STATUS_FAILED, "its IDX header requires %" PRIu64 " bytes, but the file has more",
                            (uint64_t)header + values);
}

static enum status unzip(const uint8_t *packed, size_t packed_size, uint8_t **bytes, size_t *size)
{
    struct gzip gzip = {.packed = packed, .left = packed_size};
    *bytes = NULL;
    if (inflateInit2(&gzip.stream, 15 + 16) != Z_OK) /* + 16 selects the gzip format */
        return status_set(STATUS_EXHAUSTED, "out of memory for zlib");
    enum status status = unpack_all(&gzip, bytes, size);
    inflateEnd(&gzip.stream);
    return status;
}

#else

static enum status unzip(const uint8_t *packed, size_t packed_size, uint8_t **bytes, size_t *size)
{
    (void)packed, (void)packed_size, (void)size;
    *bytes = NULL;
    return status_set(STATUS_UNAVAILABLE,
                      "the file is gzipped, but this build has no zlib: unpack it with gunzip, "
                      "or install zlib (zlib1g-dev) and build again");
}

#endif

enum status idx_take(uint8_t *bytes, size_t size, struct idx *idx)
{
    enum status status = STATUS_OK;
    *idx = (struct idx){0};
    if (idx_is_gzip(bytes, size)) {
        uint8_t *packed = bytes;
        status = unzip(packed, size, &bytes, &size);
        free(packed);
    }
    if (status == STATUS_OK)
        status = idx_parse(bytes, size, idx);
    idx->owned = bytes;
    return status;
}

enum status idx_read(const char *path, struct idx *idx)
{
    char *bytes;
    size_t size;
    *idx = (struct idx){0};
    TRY(file_read(path, &bytes, &size));
    enum status status = idx_take((uint8_t *)bytes, size, idx);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s", path);
}

void idx_free(struct idx *idx)
{
    free(idx->owned);
    *idx = (struct idx){0};
}

/* ---- CIFAR-10 ---- */

enum status cifar_count(uint64_t size, uint64_t *count)
{
    *count = size / CIFAR_RECORD_BYTES;
    return size > 0 && size % CIFAR_RECORD_BYTES == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "not a binary CIFAR-10 file: its size, %" PRIu64
                            " bytes, is not a positive multiple of %d, the record size",
                            size, CIFAR_RECORD_BYTES);
}

enum status cifar_check_label(uint64_t number, uint8_t label)
{
    return label < CIFAR_CLASSES
               ? STATUS_OK
               : status_set(STATUS_FAILED, "not a binary CIFAR-10 file: record %" PRIu64 " has label %u",
                            number, label);
}

enum status cifar_parse(const uint8_t *bytes, size_t size, struct cifar *cifar)
{
    cifar->records = bytes;
    TRY(cifar_count(size, &cifar->count));
    for (uint64_t i = 0; i < cifar->count; i++)
        TRY(cifar_check_label(i, cifar_label(cifar, i)));
    return STATUS_OK;
}
