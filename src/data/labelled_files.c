#include "data/labelled_files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "data/dataset.h"
#include "data/remote_cache.h"
#include "machine/host.h"

/* ---- IDX ---- */

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

/* Parses the header of a file of `size` bytes: magic 00 00 08 AXES, and big-endian lengths. `bytes` has its
 * first IDX_HEADER_MAX bytes, or all bytes if it is shorter. Sets `*offset` to the position of the values;
 * `idx->values` is NULL. Fails as idx_parse() does. */
static enum status idx_parse_header(const uint8_t *bytes, size_t size, struct idx *idx, size_t *offset)
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

/* Returns whether a file that begins with these `size` bytes is gzipped. */
static bool idx_is_gzip(const uint8_t *bytes, size_t size)
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

/* Indexed by enum cifar_kind. */
static const struct cifar_layout cifar_layouts[] = {[CIFAR_10] = {"CIFAR-10", 1, 0, {10}},
                                                    [CIFAR_100_FINE] = {"CIFAR-100", 2, 1, {20, 100}},
                                                    [CIFAR_100_COARSE] = {"CIFAR-100", 2, 0, {20, 100}}};
const char *const cifar_label_names[] = {"fine", "coarse", NULL};

/* Sets `*count` to the number of records of a file of `size` bytes. STATUS_FAILED if it is not a positive
 * whole number. */
static enum status cifar_count(const struct cifar_layout *layout, uint64_t size, uint64_t *count)
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

/* STATUS_FAILED if one of the labels of record `number` is not a class. */
static enum status cifar_check_labels(const struct cifar_layout *layout, uint64_t number,
                                      const uint8_t *labels)
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

/* ---- Data sets ---- */

/* Data sets in a few files of records. To add a format, write add() and a line of the table `formats`. */

#define FILES_MAX 8 /* of a set */

/* Adds a file to the list. Opens it, and sets `*fd` and its size. The caller closes the descriptor. */
static enum status add_file(struct dataset *dataset, const char *name, int *fd)
{
    struct stat info;
    const char *kept;
    *fd = -1;
    TRY(dataset_keep_name(dataset, name, strlen(name), &kept));
    TRY(dataset_add_file(dataset, kept, 0));
    TRY(dataset_file_open(dataset, dataset->file_count - 1, 0, fd));
    if (fstat(*fd, &info) == 0) {
        dataset_know_file(&dataset->files[dataset->file_count - 1], &info);
        return STATUS_OK;
    }
    return status_set(STATUS_FAILED, "%s/%s: %s", dataset->path, name, strerror(errno));
}

/* Adds a sample: `size` bytes of the file that was added last. */
static enum status add_record(struct dataset *dataset, uint64_t offset, uint64_t size, uint8_t label)
{
    char key[16];
    const char *kept;
    const int length = snprintf(key, sizeof key, "%06u", dataset->sample_count);
    TRY(dataset_keep_name(dataset, key, (size_t)length, &kept));
    TRY(dataset_add_sample(dataset, kept));
    struct dataset_sample *sample = &dataset->samples[dataset->sample_count - 1];
    sample->class_folder = label;
    sample->members = 1;
    return dataset_add_member(dataset, (struct dataset_member){.extension = RECORD_EXTENSION,
                                                               .offset = offset,
                                                               .size = size,
                                                               .file = dataset->file_count - 1});
}

/* ---- IDX ---- */

/* Unpacks a gzipped file, which was added last, into memory that is read like a file. */
static enum status unpack(struct dataset *dataset, const char *path, struct idx *images)
{
    struct dataset_file *file = &dataset->files[dataset->file_count - 1];
    CLOSED_BY(idx_free) struct idx unpacked;
    TRY(idx_read(path, &unpacked));
    uint64_t bytes = 1;
    for (uint32_t i = 0; i < unpacked.axes; i++)
        bytes *= unpacked.shape[i];
    file->memory = memfd_create("fdsl-records", MFD_CLOEXEC);
    file->unpacked = file->memory >= 0;
    if (file->unpacked && !file_write_all(file->memory, (const char *)unpacked.values, bytes))
        return status_set(status_of_errno(errno), "%s: cannot keep its contents in memory: %s", path,
                          strerror(errno));
    file->bytes = bytes;
    *images = unpacked;
    images->values = images->owned = NULL;
    return file->unpacked ? STATUS_OK
                          : status_set(status_of_errno(errno), "%s: no memory for its contents: %s", path,
                                       strerror(errno));
}

/* Reads the header of a file of images, and sets `*offset` to the position of the first image. */
static enum status open_images(struct dataset *dataset, const char *name, const char *path,
                               struct idx *images, size_t *offset)
{
    uint8_t head[FILE_POINTER_BYTES > IDX_HEADER_MAX ? FILE_POINTER_BYTES : IDX_HEADER_MAX];
    int fd;
    ssize_t count = -1;
    enum status status = add_file(dataset, name, &fd);
    if (status == STATUS_OK) {
        count = pread(fd, head, sizeof head, 0);
        if (count < 0)
            status = status_set(STATUS_FAILED, "%s: cannot be read: %s", path, strerror(errno));
    }
    if (fd >= 0)
        close(fd);
    TRY(status);
    *offset = 0;
    if (idx_is_gzip(head, (size_t)count))
        return unpack(dataset, path, images);
    status = file_refuse_pointer(head, (size_t)count);
    if (status == STATUS_OK)
        status = idx_parse_header(head, dataset->files[dataset->file_count - 1].bytes, images, offset);
    return status_prefix(status, "%s", path);
}

/* Writes the path of the file of labels, plain or gzipped: for x-images-idx3-ubyte, x-labels-idx1-ubyte. */
static enum status find_labels(const struct dataset *dataset, const char *images, char path[PATH_MAX])
{
    const int length = snprintf(path, PATH_MAX, "%s/%.*slabels-idx1-ubyte", dataset->path,
                                (int)(strstr(images, "images") - images), images);
    if (length + 4 > PATH_MAX)
        return status_set(STATUS_USAGE, "the path '%.80s...' is too long", dataset->path);
    if (access(path, F_OK) != 0)
        strcpy(path + length, ".gz");
    if (access(path, F_OK) != 0)
        path[length] = '\0'; /* the message about a missing file has the plain name */
    return STATUS_OK;
}

/* Adds the first of two files that exists: the images, plain or gzipped. */
static enum status add_idx(struct dataset *dataset, const struct record_format *format,
                           const char *const files[])
{
    (void)format;
    char paths[2][PATH_MAX];
    CLOSED_BY(idx_free) struct idx labels = {0};
    struct idx images;
    size_t offset;
    const char *name = files[faccessat(dataset->directory, files[0], F_OK, 0) != 0];
    TRY(find_labels(dataset, name, paths[1]));
    snprintf(paths[0], PATH_MAX, "%s/%s", dataset->path, name);
    TRY(open_images(dataset, name, paths[0], &images, &offset));
    TRY(idx_read(paths[1], &labels));
    TRY(idx_check_pair(paths[0], &images, paths[1], &labels));
    if (images.shape[0] == 0)
        return status_set(STATUS_FAILED, "%s has no images", paths[0]);
    dataset->raw = (struct image){
        .channels = 1, .depth = 1, .height = images.shape[1], .width = images.shape[2], .type = DTYPE_U8};
    const uint64_t size = image_values(&dataset->raw);
    for (uint32_t i = 0; i < images.shape[0]; i++)
        TRY(add_record(dataset, offset + i * size, size, labels.values[i]));
    return STATUS_OK;
}

/* ---- CIFAR-10 and CIFAR-100 ---- */

/* Adds the records of an open file, which was added last. Reads only their labels. */
static enum status add_cifar_records(struct dataset *dataset, const struct cifar_layout *layout, int fd)
{
    uint64_t count;
    TRY(cifar_count(layout, dataset->files[dataset->file_count - 1].bytes, &count));
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t at = i * cifar_record_bytes(layout);
        uint8_t labels[CIFAR_LABELS_MAX];
        if (pread(fd, labels, layout->labels, (off_t)at) != (ssize_t)layout->labels)
            return status_set(STATUS_FAILED, "offset %llu: cannot be read", (unsigned long long)at);
        TRY(cifar_check_labels(layout, i, labels));
        TRY(add_record(dataset, at + layout->labels, CIFAR_IMAGE_BYTES, labels[layout->own]));
    }
    return STATUS_OK;
}

static enum status add_cifar_file(struct dataset *dataset, const struct cifar_layout *layout,
                                  const char *name)
{
    char head[FILE_POINTER_BYTES];
    int fd;
    enum status status = add_file(dataset, name, &fd);
    if (status == STATUS_OK) {
        if (pread(fd, head, sizeof head, 0) == sizeof head)
            status = file_refuse_pointer(head, sizeof head);
        if (status == STATUS_OK)
            status = add_cifar_records(dataset, layout, fd);
        if (status != STATUS_OK)
            status_prefix(status, "%s/%s", dataset->path, name);
    }
    if (fd >= 0)
        close(fd);
    return status;
}

static enum status add_cifar(struct dataset *dataset, const struct record_format *format,
                             const char *const files[])
{
    const char *found[FILES_MAX] = {NULL};
    size_t count = 0;
    for (size_t i = 0; files[i]; i++)
        if (faccessat(dataset->directory, files[i], F_OK, 0) == 0)
            found[count++] = files[i];
    TRY(paths_check_distinct(dataset->directory, found, count));
    dataset->raw = (struct image){
        .channels = CIFAR_CHANNELS, .depth = 1, .height = CIFAR_SIDE, .width = CIFAR_SIDE, .type = DTYPE_U8};
    for (size_t i = 0; i < count; i++)
        TRY(add_cifar_file(dataset, &cifar_layouts[format->kind], found[i]));
    return STATUS_OK;
}

/* ---- Formats ---- */

/* The files of training sets and of test sets. */
static const char *const mnist_train[] = {"train-images-idx3-ubyte", "train-images-idx3-ubyte.gz", NULL};
static const char *const mnist_test[] = {"t10k-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz", NULL};
static const char *const cifar_train[] = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                                          "data_batch_4.bin", "data_batch_5.bin", NULL};
static const char *const cifar_test[] = {"test_batch.bin", NULL};
static const char *const cifar_100_train[] = {"train.bin", NULL};
static const char *const cifar_100_test[] = {"test.bin", NULL};

#define FORMAT(name, source, add, files, train_lacks, test_lacks, ...)                           \
    {                                                                                            \
        name, source, {files##_train, files##_test}, add, {train_lacks, test_lacks}, __VA_ARGS__ \
    }
#define IDX_LACKS(set) \
    "there is no " set "-images-idx3-ubyte, plain or gzipped; add it, because MNIST has four files"
#define TEST_LACKS(file) "there is no " file "; add this file, which has the test samples"
#define CIFAR_100_FORMAT(...)                                                                              \
    FORMAT("CIFAR-100", "cifar100", add_cifar, cifar_100, "there is no train.bin", TEST_LACKS("test.bin"), \
           __VA_ARGS__)

static const struct record_format coarse = CIFAR_100_FORMAT(20, CIFAR_100_COARSE, NULL);

static const struct record_format formats[] = {
    FORMAT("MNIST", "idx", add_idx, mnist, IDX_LACKS("train"), IDX_LACKS("t10k"), 10, 0, NULL),
    FORMAT("CIFAR-10", "cifar", add_cifar, cifar,
           "the folder has none of the files data_batch_1.bin to data_batch_5.bin",
           TEST_LACKS("test_batch.bin"), 10, CIFAR_10, NULL),
    CIFAR_100_FORMAT(100, CIFAR_100_FINE, &coarse),
};

static bool has_any(int directory, const char *const files[])
{
    bool found = false;
    for (; *files && !found; files++)
        found = faccessat(directory, *files, F_OK, 0) == 0;
    return found;
}

const struct record_format *record_format_find(const char *folder)
{
    const struct record_format *found = NULL;
    const int directory = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (size_t i = 0; directory >= 0 && !found && i < COUNT_OF(formats); i++)
        if (has_any(directory, formats[i].sets[0]) || has_any(directory, formats[i].sets[1]))
            found = &formats[i];
    if (directory >= 0)
        close(directory);
    return found;
}

enum status dataset_add_records(struct dataset *dataset, const struct record_format *format, bool test_set)
{
    if (!has_any(dataset->directory, format->sets[test_set]))
        return status_set(STATUS_USAGE, "--%s %s: %s", dataset->option, dataset->path,
                          format->lacks[test_set]);
    dataset->shards = dataset->records = true;
    dataset->shard_first = calloc(FILES_MAX + 1, sizeof *dataset->shard_first);
    TRY(DATASET_ALLOCATED(dataset->shard_first));
    TRY(format->add(dataset, format, format->sets[test_set]));
    for (uint32_t i = dataset->sample_count; i-- > 0;)
        dataset->shard_first[dataset->members[dataset->samples[i].member].file] = i;
    dataset->shard_first[dataset->file_count] = dataset->sample_count;
    return STATUS_OK;
}
