#include "data/labelled_files.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "data/unpack.h"
#include "machine/host.h"

#define TYPE_BYTE  0x08
#define VALUES_MAX (UINT64_C(1) << 34) /* far more than any IDX data set has */

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

/* Unpacked data. The buffer grows with them: a wrong header causes no large allocation. */
struct unpacked {
    uint8_t *bytes;
    size_t size, room;
    uint64_t most; /* size that the IDX header requires; 0: not known yet */
};

/* Implements add() of unpack_bytes(). */
static enum status add(void *context, const void *bytes, size_t size)
{
    struct unpacked *data = context;
    const size_t end = data->size + size, twice = 2 * data->room;
    if (data->most && end > data->most)
        return status_set(STATUS_FAILED, "its IDX header requires %" PRIu64 " bytes, but the file has more",
                          data->most);
    if (end > data->room) {
        data->room = end > twice ? end : data->most && twice > data->most ? (size_t)data->most : twice;
        uint8_t *larger = realloc(data->bytes, data->room);
        TRY(ALLOCATED(larger, "out of memory for a gzip file"));
        data->bytes = larger;
    }
    memcpy(data->bytes + data->size, bytes, size);
    data->size = end;
    if (data->most || end < IDX_HEADER_MAX)
        return STATUS_OK;
    struct idx idx;
    size_t header = 0;
    TRY(read_header(data->bytes, end, &idx, &header, &data->most));
    data->most += header;
    return memory_check(data->most, "the unpacked IDX file", "is its header damaged?");
}

enum status idx_take(uint8_t *bytes, size_t size, struct idx *idx)
{
    enum status status = STATUS_OK;
    *idx = (struct idx){0};
    if (idx_is_gzip(bytes, size)) {
        struct unpacked data = {0};
        status = unpack_bytes(&(struct unpack_input){.bytes = bytes, .size = size}, add, &data);
        free(bytes);
        bytes = data.bytes;
        size = data.size;
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
    return status_prefix(idx_take((uint8_t *)bytes, size, idx), "%s", path);
}

void idx_free(struct idx *idx)
{
    free(idx->owned);
    *idx = (struct idx){0};
}

/* ---- CIFAR-10 and CIFAR-100 ---- */

const struct cifar_layout cifar_layouts[] = {[CIFAR_10] = {"CIFAR-10", 1, 0, {10}},
                                             [CIFAR_100_FINE] = {"CIFAR-100", 2, 1, {20, 100}},
                                             [CIFAR_100_COARSE] = {"CIFAR-100", 2, 0, {20, 100}}};
const char *const cifar_label_names[] = {"fine", "coarse", NULL};

enum status cifar_count(const struct cifar_layout *layout, uint64_t size, uint64_t *count)
{
    const uint32_t bytes = cifar_record_bytes(layout);
    *count = size / bytes;
    return size > 0 && size % bytes == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "not a binary %s file: its size, %" PRIu64
                            " bytes, is not a positive multiple of %" PRIu32 ", the record size",
                            layout->name, size, bytes);
}

enum status cifar_check_labels(const struct cifar_layout *layout, uint64_t number, const uint8_t *labels)
{
    for (uint32_t i = 0; i < layout->labels; i++)
        if (labels[i] >= layout->classes[i])
            return status_set(STATUS_FAILED, "not a binary %s file: record %" PRIu64 " has label %u",
                              layout->name, number, labels[i]);
    return STATUS_OK;
}

enum status cifar_parse(enum cifar_kind kind, const uint8_t *bytes, size_t size, struct cifar *cifar)
{
    const struct cifar_layout *layout = cifar->layout = &cifar_layouts[kind];
    cifar->records = bytes;
    TRY(cifar_count(layout, size, &cifar->count));
    for (uint64_t i = 0; i < cifar->count; i++)
        TRY(cifar_check_labels(layout, i, bytes + i * cifar_record_bytes(layout)));
    return STATUS_OK;
}
