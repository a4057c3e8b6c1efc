#include "data/tensor_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef HAVE_JANSSON
#include <jansson.h>
#endif

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "data/npy.h"

#define VALUES_MAX (UINT64_C(1) << 62)

/* ---- Helpers of the readers ---- */

enum status tensor_file_read(const struct tensor_file *file, uint64_t offset, void *bytes, size_t count)
{
    if (offset == UINT64_MAX)
        return status_set(STATUS_FAILED, "its values are compressed; save them with numpy.savez()");
    size_t done;
    if (!file_read_at(file->fd, bytes, count, offset, &done))
        return status_set(STATUS_FAILED, "cannot be read: %s", strerror(errno));
    if (done == count)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "it ends at offset %" PRIu64 ", but %" PRIu64
                      " bytes are needed; the file was truncated: write it again",
                      offset + done, offset + count);
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

void npy_describe(const struct npy_header *header, struct tensor *tensor)
{
    tensor->fault = npy_fault(header);
    tensor->axes = header->axes;
    tensor->bytes = header->values * header->value_bytes;
    if (dtype_from_npy(header->type, &tensor->dtype) && tensor->dtype != DTYPE_U8)
        tensor->code = TENSOR_PLAIN;
    else if (strcmp(header->type, "<f8") == 0)
        tensor->code = TENSOR_F64;
    tensor->real = tensor->code != TENSOR_OTHER || header->type[1] == 'f';
    memcpy(tensor->type, header->type, sizeof header->type);
    memcpy(tensor->shape, header->shape, sizeof tensor->shape);
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
    struct tensor tensor = {.name = strdup(""), .offset = header.data};
    npy_describe(&header, &tensor);
    tensor.real |= tensor.fault != NULL; /* its only tensor, so its fault is the reason for a refusal */
    return tensor_file_add(file, &tensor);
}

/* ---- Opening ---- */

static const struct {
    const char *suffix;
    enum status (*list)(struct tensor_file *file);
} formats[] = {{".npy", npy_list},  {".npz", npz_list},   {".safetensors", safetensors_list},
               {".pt", torch_list}, {".pth", torch_list}, {".pth.tar", torch_list} /* timm */};

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
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* do not wait for the writer of a pipe */
    if (file->fd < 0 || fstat(file->fd, &file->info) != 0)
        return status_set(STATUS_FAILED, "cannot be read: %s", strerror(errno));
    if (!S_ISREG(file->info.st_mode))
        return status_set(STATUS_FAILED, "not a regular file; name a file, not a device or a pipe");
    file->bytes = (uint64_t)file->info.st_size;
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
                          "%s: not a file of tensors; its name must end in .npy or .npz (as numpy.save() and "
                          "numpy.savez() write), .safetensors, .pt, .pth or .pth.tar",
                          path);
    enum status status = open_regular(file);
    if (status == STATUS_OK)
        status = formats[format].list(file);
    return status_prefix(status, "%s", path);
}

void tensor_file_close(struct tensor_file *file)
{
    for (size_t i = 0; i < file->count; i++)
        free(file->tensors[i].name);
    free(file->tensors);
    free(file->notes);
    if (file->fd >= 0)
        close(file->fd);
    *file = (struct tensor_file){.path = file->path, .fd = -1};
}

const char *tensor_file_note(const struct tensor_file *file, const char *key)
{
    const char *at = file->notes; /* keys and values, each with its zero; then an empty key */
    while (at && *at && strcmp(at, key) != 0) {
        at += strlen(at) + 1;
        at += strlen(at) + 1;
    }
    return at && *at ? at + strlen(at) + 1 : NULL;
}

/* ---- Writing safetensors ---- */

#define ALIGNMENT 8 /* alignment of the values; the header is padded to it */
/* Start of the header of every file that this program writes. */
#define BEGINNING "{\"__metadata__\":{\"format\":\"pt\",\"fdsl-bench\":"

/* Prints the header's text, without its length. */
static void print_header(FILE *stream, const char *const about[], const struct safetensor *tensors,
                         size_t count)
{
    uint64_t at = 0;
    fprintf(stream, BEGINNING "\"%s\"", about[1]);
    for (about += 2; *about; about += 2)
        fprintf(stream, ",\"%s\":\"%s\"", about[0], about[1]);
    fputc('}', stream);
    for (size_t i = 0; i < count; i++) {
        fprintf(stream, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", tensors[i].name, tensors[i].type);
        for (uint32_t axis = 0; axis < tensors[i].axes; axis++)
            fprintf(stream, "%s%" PRIu64, axis ? "," : "", tensors[i].shape[axis]);
        fprintf(stream, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", at, at + tensors[i].bytes);
        at += tensors[i].bytes;
    }
    fputc('}', stream);
    while (ftell(stream) % ALIGNMENT)
        fputc(' ', stream);
}

enum status safetensors_header(const char *const about[], const struct safetensor *tensors, size_t count,
                               char **header, size_t *size)
{
    uint64_t length = 0;
    *header = NULL;
    FILE *stream = open_memstream(header, size);
    TRY(ALLOCATED(stream, "out of memory"));
    fwrite(&length, sizeof length, 1, stream);
    print_header(stream, about, tensors, count);
    if (!text_close(stream)) {
        free(*header);
        *header = NULL;
        return status_set(STATUS_EXHAUSTED, "out of memory");
    }
    length = *size - sizeof length; /* little-endian, like every machine that this program is built for */
    memcpy(*header, &length, sizeof length);
    return STATUS_OK;
}

enum status safetensors_write(const char *path, const char *const about[], const struct safetensor *tensors,
                              size_t count)
{
    struct file_writer writer;
    FREED char *header = NULL;
    size_t size;
    TRY(safetensors_header(about, tensors, count, &header, &size));
    TRY(file_begin(&writer, path));
    TRY(file_add(&writer, header, size));
    for (size_t i = 0; i < count; i++)
        TRY(file_add(&writer, tensors[i].values, tensors[i].bytes));
    return file_end(&writer);
}

enum status safetensors_check(const char *path)
{
    static const struct file_kind ours = {"safetensors file of fdsl-bench", sizeof(uint64_t), BEGINNING,
                                          sizeof BEGINNING - 1};
    return file_check_kind(path, &ours);
}

/* ---- Reading safetensors ---- */

#ifdef HAVE_JANSSON

#define HEADER_BYTES_MAX 100000000 /* as in the format's reference implementation */

struct type {
    const char *name;
    uint32_t bits;
    bool real;
    enum tensor_code code;
    enum dtype dtype;
};

/* The types of version 0.8 of the format's reference implementation. Other types may occur in a file, but are
 * not read. */
static const struct type types[] = {
    {"F32", 32, true, TENSOR_PLAIN, DTYPE_F32},   {"F16", 16, true, TENSOR_PLAIN, DTYPE_F16},
    {"BF16", 16, true, TENSOR_PLAIN, DTYPE_BF16}, {"F64", 64, true, TENSOR_F64, 0},
    {"F8_E4M3", 8, true, TENSOR_FP8, 0},          {"F4", 4, true, TENSOR_FP4, 0},
    {"F8_E8M0", 8, true, TENSOR_E8M0, 0},         {"U8", 8, false, TENSOR_BYTES, 0},
    {"F8_E5M2", 8, true, TENSOR_OTHER, 0},        {"F8_E4M3FNUZ", 8, true, TENSOR_OTHER, 0},
    {"F8_E5M2FNUZ", 8, true, TENSOR_OTHER, 0},    {"F6_E2M3", 6, true, TENSOR_OTHER, 0},
    {"F6_E3M2", 6, true, TENSOR_OTHER, 0},        {"C64", 64, false, TENSOR_OTHER, 0},
    {"BOOL", 8, false, TENSOR_OTHER, 0},          {"I8", 8, false, TENSOR_OTHER, 0},
    {"U16", 16, false, TENSOR_OTHER, 0},          {"I16", 16, false, TENSOR_OTHER, 0},
    {"U32", 32, false, TENSOR_OTHER, 0},          {"I32", 32, false, TENSOR_OTHER, 0},
    {"U64", 64, false, TENSOR_OTHER, 0},          {"I64", 64, false, TENSOR_OTHER, 0}};

static const struct type *find_type(const char *name)
{
    for (size_t i = 0; i < COUNT_OF(types); i++)
        if (strcmp(types[i].name, name) == 0)
            return &types[i];
    return NULL;
}

/* ---- One tensor ---- */

static bool count_of(const json_t *value, uint64_t *count)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *count = (uint64_t)json_integer_value(value);
    return true;
}

/* Reads "shape". If the tensor has too many axes, sets tensor->fault; all lengths are still checked. */
static enum status read_shape(const json_t *shape, struct tensor *tensor, uint64_t *values)
{
    uint64_t lengths[64];
    size_t axes = json_array_size(shape);
    if (!json_is_array(shape) || axes > COUNT_OF(lengths))
        return status_set(STATUS_FAILED, "its \"shape\" is not a list of at most 64 lengths");
    for (size_t i = 0; i < axes; i++)
        if (!count_of(json_array_get(shape, i), &lengths[i]))
            return status_set(STATUS_FAILED, "its \"shape\" has an entry that is not a length");
    if (!tensor_values(lengths, (uint32_t)axes, values))
        return status_set(STATUS_FAILED, "its \"shape\" has more values than any file holds");
    tensor->axes = (uint32_t)axes;
    if (axes > TENSOR_AXES_MAX)
        tensor->fault = "it has more than 8 axes";
    else
        memcpy(tensor->shape, lengths, axes * sizeof *lengths);
    return STATUS_OK;
}

/* Reads "data_offsets": begin and end, counted from the end of the header. */
static enum status read_offsets(const json_t *offsets, uint64_t data_bytes, struct tensor *tensor)
{
    uint64_t begin, end;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !count_of(json_array_get(offsets, 0), &begin) || !count_of(json_array_get(offsets, 1), &end))
        return status_set(STATUS_FAILED, "its \"data_offsets\" are not two counts");
    if (begin > end || end > data_bytes)
        return status_set(STATUS_FAILED,
                          "its \"data_offsets\" %" PRIu64 " to %" PRIu64 " are not inside the file's %" PRIu64
                          " bytes of values; write the file again",
                          begin, end, data_bytes);
    tensor->offset = begin;
    tensor->bytes = end - begin;
    return STATUS_OK;
}

static enum status read_tensor(const json_t *entry, uint64_t data_bytes, struct tensor *tensor)
{
    const char *type_name = json_string_value(json_object_get(entry, "dtype"));
    uint64_t values = 0;
    if (!type_name || json_object_size(entry) != 3)
        return status_set(STATUS_FAILED, "its entry is not \"dtype\", \"shape\" and \"data_offsets\"");
    TRY(read_shape(json_object_get(entry, "shape"), tensor, &values));
    TRY(read_offsets(json_object_get(entry, "data_offsets"), data_bytes, tensor));
    const struct type *type = find_type(type_name);
    snprintf(tensor->type, sizeof tensor->type, "%s", type_name);
    if (!type)
        return STATUS_OK;
    tensor->real = type->real;
    tensor->code = type->code;
    tensor->dtype = type->dtype;
    if (values > UINT64_MAX / type->bits || values * type->bits % 8 != 0 ||
        values * type->bits / 8 != tensor->bytes)
        return status_set(STATUS_FAILED,
                          "its shape has %" PRIu64
                          " values of type %s, but its \"data_offsets\" span %" PRIu64
                          " bytes; write the file again",
                          values, type_name, tensor->bytes);
    return STATUS_OK;
}

/* ---- The file ---- */

static int compare_offsets(const void *a, const void *b)
{
    const struct tensor *one = a, *two = b;
    if (one->offset != two->offset)
        return one->offset < two->offset ? -1 : 1;
    return one->bytes < two->bytes ? -1 : one->bytes > two->bytes;
}

/* Checks that the values of the tensors follow one another and fill the file. Makes offsets count from the
 * beginning of the file. */
static enum status check_order(struct tensor_file *file, uint64_t data)
{
    uint64_t at = 0;
    if (file->count > 0)
        qsort(file->tensors, file->count, sizeof *file->tensors, compare_offsets);
    for (size_t i = 0; i < file->count; i++) {
        struct tensor *tensor = &file->tensors[i];
        if (tensor->offset != at)
            return status_set(STATUS_FAILED,
                              "tensor '%.80s' begins at offset %" PRIu64 " of the values, but the one before "
                              "it ends at %" PRIu64 ": they overlap, or leave a hole; write the file again",
                              tensor->name, tensor->offset, at);
        at += tensor->bytes;
        tensor->offset += data;
    }
    if (at != file->bytes - data)
        return status_set(STATUS_FAILED,
                          "its tensors have %" PRIu64 " bytes, but %" PRIu64
                          " bytes follow the header; write the file again",
                          at, file->bytes - data);
    return STATUS_OK;
}

/* Checks the metadata, and takes what --prepare wrote about its rows. */
static enum status read_metadata(const json_t *metadata, struct tensor_file *file)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return status_set(STATUS_FAILED, "its \"__metadata__\" is not an object");
    size_t size;
    json_object_foreach((json_t *)metadata, key, value) if (!json_is_string(value)) return status_set(
        STATUS_FAILED, "its \"__metadata__\" has a value that is not a string: '%.80s'", key);
    FILE *stream = open_memstream(&file->notes, &size);
    TRY(ALLOCATED(stream, "out of memory for its metadata"));
    json_object_foreach((json_t *)metadata, key, value) if (*key)
        fprintf(stream, "%s%c%s%c", key, '\0', json_string_value(value), '\0');
    fputc('\0', stream);
    TRY(ALLOCATED(text_close(stream), "out of memory for its metadata"));
    const char *ours = json_string_value(json_object_get(metadata, "fdsl-bench"));
    const char *columns = json_string_value(json_object_get(metadata, "columns"));
    file->prepared = ours && strcmp(ours, "embeddings") == 0;
    if (file->prepared && columns && strspn(columns, "0123456789") == strlen(columns))
        file->packed_columns = strtoull(columns, NULL, 10); /* checked where the rows are known */
    return STATUS_OK;
}

static enum status read_tensors(json_t *root, uint64_t data, struct tensor_file *file)
{
    const char *name;
    json_t *entry;
    json_object_foreach(root, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            TRY(read_metadata(entry, file));
            continue;
        }
        struct tensor tensor = {.name = NULL};
        TRY(status_prefix(read_tensor(entry, file->bytes - data, &tensor), "tensor '%.80s'", name));
        tensor.name = strdup(name);
        TRY(tensor_file_add(file, &tensor));
    }
    return check_order(file, data);
}

static enum status parse_header(const char *text, size_t size, struct tensor_file *file)
{
    json_error_t error;
    if (text[0] != '{')
        return status_set(STATUS_FAILED, "not a safetensors file: its header does not begin with '{'");
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return status_set(STATUS_FAILED, "its header is invalid JSON at offset %d: %s; write the file again",
                          error.position + 8, error.text);
    enum status status = read_tensors(root, sizeof(uint64_t) + size, file);
    json_decref(root);
    return status;
}

enum status safetensors_list(struct tensor_file *file)
{
    uint64_t size;
    if (file->bytes < sizeof size)
        return status_set(STATUS_FAILED, "not a safetensors file: it has only %" PRIu64 " bytes",
                          file->bytes);
    TRY(tensor_file_read(file, 0, &size, sizeof size)); /* little-endian, like this machine */
    if (size == 0 || size > file->bytes - sizeof size)
        return status_set(STATUS_FAILED,
                          "not a safetensors file, or truncated: its header should have %" PRIu64
                          " bytes, but the file has %" PRIu64 "; write it again",
                          size, file->bytes);
    if (size > HEADER_BYTES_MAX)
        return status_set(STATUS_FAILED,
                          "its header has %" PRIu64
                          " bytes; at most %d are allowed: divide the tensors among several files",
                          size, HEADER_BYTES_MAX);
    FREED char *text = malloc(size);
    TRY(ALLOCATED(text, "out of memory for its header of %" PRIu64 " bytes", size));
    TRY(tensor_file_read(file, sizeof size, text, size));
    return parse_header(text, size, file);
}

#else

enum status safetensors_list(struct tensor_file *file)
{
    (void)file;
    return status_set(STATUS_UNAVAILABLE, "this build reads no .safetensors: install jansson "
                                          "(libjansson-dev) and build again");
}

#endif
