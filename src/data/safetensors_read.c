/* Reads the headers of safetensors files. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/safetensors.h"

#ifdef HAVE_JANSSON

#include <jansson.h>

#define HEADER_BYTES_MAX 100000000 /* as in the format's reference implementation */

struct type {
    const char *name;
    uint32_t bytes;
    bool real, readable;
    enum dtype dtype;
};

/* Other types, for example of 4 and 6 bits, may occur in a file, but are not read. */
static const struct type types[] = {
    {"F32", 4, true, true, DTYPE_F32}, {"F16", 2, true, true, DTYPE_F16}, {"BF16", 2, true, true, DTYPE_BF16},
    {"F64", 8, true, false, 0},        {"F8_E4M3", 1, true, false, 0},    {"F8_E5M2", 1, true, false, 0},
    {"BOOL", 1, false, false, 0},      {"U8", 1, false, false, 0},        {"I8", 1, false, false, 0},
    {"U16", 2, false, false, 0},       {"I16", 2, false, false, 0},       {"U32", 4, false, false, 0},
    {"I32", 4, false, false, 0},       {"U64", 8, false, false, 0},       {"I64", 8, false, false, 0}};

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
    uint64_t values;
    if (!type_name || json_object_size(entry) != 3)
        return status_set(STATUS_FAILED, "its entry is not \"dtype\", \"shape\" and \"data_offsets\"");
    TRY(read_shape(json_object_get(entry, "shape"), tensor, &values));
    TRY(read_offsets(json_object_get(entry, "data_offsets"), data_bytes, tensor));
    const struct type *type = find_type(type_name);
    snprintf(tensor->type, sizeof tensor->type, "%s", type_name);
    if (!type)
        return STATUS_OK;
    tensor->real = type->real;
    tensor->readable = type->readable;
    tensor->dtype = type->dtype;
    if (values > UINT64_MAX / type->bytes || values * type->bytes != tensor->bytes)
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

static enum status check_metadata(const json_t *metadata)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return status_set(STATUS_FAILED, "its \"__metadata__\" is not an object");
    json_object_foreach((json_t *)metadata, key, value) if (!json_is_string(value)) return status_set(
        STATUS_FAILED, "its \"__metadata__\" has a value that is not a string: '%.80s'", key);
    return STATUS_OK;
}

static enum status read_tensors(json_t *root, uint64_t data, struct tensor_file *file)
{
    const char *name;
    json_t *entry;
    json_object_foreach(root, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            TRY(check_metadata(entry));
            continue;
        }
        struct tensor tensor = {.name = NULL};
        enum status status = read_tensor(entry, file->bytes - data, &tensor);
        if (status != STATUS_OK)
            return status_prefix(status, "tensor '%.80s'", name);
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
                          " bytes; at most %d are allowed: divide the tensors among "
                          "several files",
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
