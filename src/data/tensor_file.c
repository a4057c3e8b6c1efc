#include "data/tensor_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "data/npy.h"
#include "data/safetensors.h"
#include "data/torch_file.h"

#define VALUES_MAX (UINT64_C(1) << 62)

/* ---- Helpers of the readers ---- */

enum status tensor_file_read(const struct tensor_file *file, uint64_t offset, void *bytes, size_t count)
{
    for (size_t done = 0; done < count;) {
        ssize_t got = pread(file->fd, (char *)bytes + done, count - done, (off_t)(offset + done));
        if (got < 0 && errno != EINTR)
            return status_set(STATUS_FAILED, "cannot be read: %s", strerror(errno));
        if (got == 0)
            return status_set(STATUS_FAILED,
                              "it ends at offset %" PRIu64 ", but %" PRIu64 " bytes are needed; the file was "
                              "truncated: write it again",
                              offset + done, offset + count);
        done += got > 0 ? (size_t)got : 0;
    }
    return STATUS_OK;
}

enum status tensor_file_add(struct tensor_file *file, const struct tensor *tensor)
{
    if (!tensor->name || !array_grow(&file->tensors, file->count, sizeof *file->tensors)) {
        free(tensor->name);
        return status_set(STATUS_EXHAUSTED, "out of memory for its list of tensors");
    }
    file->tensors[file->count++] = *tensor;
    return STATUS_OK;
}

bool tensor_values(const uint64_t *shape, uint32_t axes, uint64_t *values)
{
    bool empty = false;
    *values = 1;
    for (uint32_t i = 0; i < axes; i++)
        empty |= shape[i] == 0;
    for (uint32_t i = 0; i < axes && !empty; i++) {
        if (shape[i] > VALUES_MAX / *values)
            return false;
        *values *= shape[i];
    }
    *values = empty ? 0 : *values;
    return true;
}

/* ---- .npy ---- */

/* NumPy has no bfloat16. Extensions of NumPy store it as raw bytes ("<V2", which npy_header_parse() refuses);
 * this program stores it as "<u2". */
static const char *npy_fault(const struct npy_header *header)
{
    if (header->type[0] == '>')
        return "its values are big-endian: convert them with array.astype(array.dtype.newbyteorder('<'))";
    if (header->fortran && header->axes > 1)
        return "its values are in Fortran order: convert them with numpy.ascontiguousarray()";
    if (strcmp(header->type, "<u2") == 0)
        return "it has integers of 16 bits; NumPy has no bfloat16, so save bfloat16 values as .safetensors";
    return header->axes > TENSOR_AXES_MAX ? "it has more than 8 axes" : NULL;
}

static enum status npy_list(struct tensor_file *file)
{
    FREED uint8_t *bytes = malloc(NPY_HEADER_READ);
    size_t count = file->bytes < NPY_HEADER_READ ? (size_t)file->bytes : NPY_HEADER_READ;
    struct npy_header header;
    TRY(ALLOCATED(bytes, "out of memory"));
    TRY(tensor_file_read(file, 0, bytes, count));
    TRY(npy_header_parse(bytes, count, &header));
    TRY(npy_header_check(&header, file->bytes));
    struct tensor tensor = {.name = strdup(""),
                            .fault = npy_fault(&header),
                            .axes = header.axes,
                            .offset = header.data,
                            .bytes = header.values * header.value_bytes};
    tensor.readable = dtype_from_npy(header.type, &tensor.dtype) && tensor.dtype != DTYPE_U8;
    tensor.real = tensor.readable || header.type[1] == 'f' || tensor.fault;
    memcpy(tensor.type, header.type, sizeof header.type);
    memcpy(tensor.shape, header.shape, sizeof tensor.shape);
    return tensor_file_add(file, &tensor);
}

/* ---- Opening ---- */

static const struct {
    const char *suffix;
    enum status (*list)(struct tensor_file *file);
} formats[] = {{".npy", npy_list},
               {".safetensors", safetensors_list},
               {".pt", torch_list},
               {".pth", torch_list},
               {".pth.tar", torch_list} /* timm */};

/* Returns the number of the format, or COUNT_OF(formats). */
static size_t find_format(const char *path)
{
    size_t i = 0;
    while (i < COUNT_OF(formats) && !text_ends_in(path, formats[i].suffix))
        i++;
    return i;
}

bool tensor_file_named(const char *path)
{
    return find_format(path) < COUNT_OF(formats);
}

static enum status open_regular(struct tensor_file *file)
{
    struct stat info;
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* do not wait for the writer of a pipe */
    if (file->fd < 0 || fstat(file->fd, &info) != 0)
        return status_set(STATUS_FAILED, "cannot be read: %s", strerror(errno));
    if (!S_ISREG(info.st_mode))
        return status_set(STATUS_FAILED, "not a regular file; name a file, not a device or a pipe");
    file->bytes = (uint64_t)info.st_size;
    char begin[FILE_POINTER_BYTES];
    ssize_t count = pread(file->fd, begin, sizeof begin, 0);
    return count > 0 ? file_refuse_pointer(begin, (size_t)count) : STATUS_OK;
}

enum status tensor_file_open(const char *path, struct tensor_file *file)
{
    size_t format = find_format(path);
    *file = (struct tensor_file){.path = path, .fd = -1};
    if (format == COUNT_OF(formats))
        return status_set(STATUS_FAILED,
                          "%s: not a file of tensors; its name must end in .npy (as numpy.save() "
                          "writes), .safetensors, .pt, .pth or .pth.tar",
                          path);
    enum status status = open_regular(file);
    if (status == STATUS_OK)
        status = formats[format].list(file);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s", path);
}

void tensor_file_close(struct tensor_file *file)
{
    for (size_t i = 0; i < file->count; i++)
        free(file->tensors[i].name);
    free(file->tensors);
    if (file->fd >= 0)
        close(file->fd);
    *file = (struct tensor_file){.path = file->path, .fd = -1};
}
