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
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif

#include "core/array.h"
#include "core/file.h"
#include "core/portable.h"
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

/* Describes the values of an array, except their position in a file. */
static void npy_describe(const struct npy_header *header, struct tensor *tensor)
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

/* ---- Zip archives ---- */

/* Zip archives: their directory, for files of torch.save() and of NumPy, and NumPy's archives of arrays
 * (.npz), whose members are .npy files. */

/* ---- The directory ---- */

/* Field offsets and signatures are those of PKWARE's APPNOTE.TXT, version 6.3.10. */
#define LOCAL_BYTES     30
#define LOCAL_MAGIC     0x04034B50
#define MEMBER_BYTES    46
#define MEMBER_MAGIC    0x02014B50
#define END_BYTES       22
#define END_MAGIC       0x06054B50
#define LOCATOR_BYTES   20
#define LOCATOR_MAGIC   0x07064B50
#define END64_BYTES     56
#define END64_MAGIC     0x06064B50
#define EXTRA64         1                     /* number of the extra field with sizes of 64 bits */
#define FLAGS_KNOWN     0x0808                /* sizes follow the data; names are UTF-8 */
#define FLAG_DESCRIPTOR 0x0008                /* sizes follow the data */
#define FLAGS_DEFLATE   0x0006                /* how hard the writer tried to compress; of no effect */
#define DEFLATED        8                     /* compression method */
#define RATIO_MAX       1032                  /* bytes that deflate can store in one byte */
#define DIRECTORY_MAX   (UINT64_C(256) << 20) /* bytes of the central directory */
#define COMMENT_MAX     65535                 /* bytes of the comment after the end record */

#define AGAIN           "; write the file again" /* what to do about an archive that is not valid */

/* Reads `count` bytes, little-endian. */
static uint64_t number(const uint8_t *bytes, unsigned count)
{
    uint64_t value = 0;
    for (unsigned i = count; i > 0; i--)
        value = value << 8 | bytes[i - 1];
    return value;
}

/* ---- The end of the archive ---- */

struct directory {
    uint64_t members, begin, bytes;
    uint64_t end; /* offset of the first end record; the directory must end there */
};

/* Reads the zip64 records, if the archive has them. They precede the end record. */
static enum status read_end64(const struct tensor_file *file, struct directory *directory)
{
    uint8_t locator[LOCATOR_BYTES], end[END64_BYTES];
    if (file->bytes < END_BYTES + LOCATOR_BYTES + END64_BYTES)
        return STATUS_OK;
    uint64_t at = file->bytes - END_BYTES - LOCATOR_BYTES;
    TRY(tensor_file_read(file, at, locator, sizeof locator));
    if (number(locator, 4) != LOCATOR_MAGIC)
        return STATUS_OK;
    at -= END64_BYTES;
    TRY(tensor_file_read(file, at, end, sizeof end));
    if (number(locator + 8, 8) != at || number(end, 4) != END64_MAGIC ||
        number(end + 4, 8) != END64_BYTES - 12)
        return status_set(STATUS_FAILED, "its zip64 records at offset %" PRIu64 " are not valid" AGAIN, at);
    struct directory large = {number(end + 32, 8), number(end + 48, 8), number(end + 40, 8), at};
    if ((directory->members != 0xFFFF && directory->members != large.members) ||
        (directory->begin != UINT32_MAX && directory->begin != large.begin) ||
        (directory->bytes != UINT32_MAX && directory->bytes != large.bytes))
        return status_set(STATUS_FAILED, "its zip64 records contradict the record at its end" AGAIN);
    *directory = large;
    return STATUS_OK;
}

/* Refuses a file whose last bytes are no end record. Looks for one before a comment. */
static enum status refuse_end(const struct tensor_file *file)
{
    const uint64_t count = file->bytes < END_BYTES + COMMENT_MAX ? file->bytes : END_BYTES + COMMENT_MAX;
    FREED uint8_t *bytes = malloc(count);
    TRY(ALLOCATED(bytes, "out of memory"));
    TRY(tensor_file_read(file, file->bytes - count, bytes, count));
    for (uint64_t at = count - END_BYTES; at > 0; at--)
        if (number(bytes + at - 1, 4) == END_MAGIC)
            return status_set(STATUS_FAILED,
                              "its zip archive ends %" PRIu64
                              " bytes before the end of the file: a comment or "
                              "other bytes follow; write the file again without them",
                              count - (at - 1) - END_BYTES);
    return status_set(STATUS_FAILED,
                      "not a zip archive, or truncated: there is no end record of an archive in its last "
                      "%" PRIu64 " bytes" AGAIN,
                      count);
}

static enum status read_end(const struct tensor_file *file, struct directory *directory)
{
    uint8_t end[END_BYTES];
    if (file->bytes < END_BYTES)
        return status_set(STATUS_FAILED, "not a zip archive: it has only %" PRIu64 " bytes" AGAIN,
                          file->bytes);
    uint64_t at = file->bytes - END_BYTES;
    TRY(tensor_file_read(file, at, end, sizeof end));
    if (number(end, 4) != END_MAGIC)
        return refuse_end(file);
    if (number(end + 4, 4) != 0 || number(end + 8, 2) != number(end + 10, 2) || number(end + 20, 2) != 0)
        return status_set(STATUS_FAILED, "the record at its end is not valid" AGAIN);
    *directory = (struct directory){number(end + 10, 2), number(end + 16, 4), number(end + 12, 4), at};
    TRY(read_end64(file, directory));
    if (directory->begin > directory->end || directory->bytes != directory->end - directory->begin)
        return status_set(STATUS_FAILED,
                          "its central directory of %" PRIu64 " bytes at offset %" PRIu64
                          " does not end at offset %" PRIu64 AGAIN,
                          directory->bytes, directory->begin, directory->end);
    if (directory->bytes > DIRECTORY_MAX || directory->members > directory->bytes / MEMBER_BYTES)
        return status_set(STATUS_FAILED,
                          "its central directory of %" PRIu64 " bytes cannot list %" PRIu64
                          " members, or is too large" AGAIN,
                          directory->bytes, directory->members);
    return STATUS_OK;
}

/* ---- Members ---- */

static enum status check_name(const char *name, size_t length)
{
    bool safe = true;
    for (size_t i = 0; i < length; i++)
        safe &= (unsigned char)name[i] >= ' ' && name[i] != 127 && name[i] != '\\';
    for (const char *part = name; safe; part = strchr(part, '/') + 1) {
        size_t size = strcspn(part, "/");
        safe = size > 0 && !(size == 1 && part[0] == '.') && !(size == 2 && memcmp(part, "..", 2) == 0);
        if (part[size] == '\0')
            break;
    }
    return safe ? STATUS_OK
                : status_set(STATUS_FAILED, "its member '%.200s' has a name that is not a plain path" AGAIN,
                             name);
}

/* Replaces each 32-bit size or offset that is 0xFFFFFFFF by its 64-bit value from the extra field. */
static enum status read_extra(const uint8_t *extra, size_t size, struct zip_member *member)
{
    uint64_t *fields[] = {&member->bytes, &member->stored, &member->begin};
    for (size_t at = 0; size - at >= 4;) {
        size_t id = number(extra + at, 2), length = number(extra + at + 2, 2);
        at += 4;
        if (length > size - at)
            break;
        size_t next = at + length;
        for (size_t i = 0; id == EXTRA64 && i < COUNT_OF(fields); i++)
            if (*fields[i] == UINT32_MAX) {
                if (next - at < 8)
                    return status_set(STATUS_FAILED, "its member '%.200s' lacks its size or offset" AGAIN,
                                      member->name);
                *fields[i] = number(extra + at, 8);
                at += 8;
            }
        at = next;
    }
    return STATUS_OK;
}

/* Returns the name of a method of compression. */
static const char *method_name(unsigned method)
{
    static const struct {
        unsigned method;
        const char *name;
    } names[] = {{0, "stored"}, {8, "deflate"}, {9, "Deflate64"}, {12, "bzip2"},
                 {14, "LZMA"},  {93, "zstd"},   {95, "xz"}};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (names[i].method == method)
            return names[i].name;
    return "unknown";
}

/* Refuses encrypted members, and members that are compressed in a way that is not read. */
static enum status check_method(const struct zip_member *member, unsigned flags, bool deflated)
{
    const bool unpacks = member->method == DEFLATED && deflated;
    if (member->method != 0 && !unpacks)
        return status_set(
            STATUS_FAILED,
            "its member '%.200s' is compressed (method %u, %s); only stored%s members are read: "
            "write the file with %s",
            member->name, member->method, method_name(member->method), deflated ? " and deflated" : "",
            deflated ? "numpy.savez() or numpy.savez_compressed()" : "torch.save()");
    if (flags & 1)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' is encrypted; write the file without a password",
                          member->name);
    if (flags & ~(FLAGS_KNOWN | (unpacks ? FLAGS_DEFLATE : 0)))
        return status_set(STATUS_FAILED, "its member '%.200s' has unknown flags (0x%x)" AGAIN, member->name,
                          flags);
    if (unpacks ? member->bytes / RATIO_MAX <= member->stored : member->bytes == member->stored)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "its member '%.200s' cannot have %" PRIu64 " bytes: only %" PRIu64 " are stored" AGAIN,
                      member->name, member->bytes, member->stored);
}

/* Reads one record of the central directory. Moves the name by one byte, to end it with a zero. */
static enum status read_member(uint8_t **at, const uint8_t *end, bool deflated, struct zip_member *member)
{
    uint8_t *record = *at;
    if (end - record < MEMBER_BYTES || number(record, 4) != MEMBER_MAGIC)
        return status_set(STATUS_FAILED, "its central directory is not valid" AGAIN);
    size_t name = number(record + 28, 2), extra = number(record + 30, 2), comment = number(record + 32, 2);
    unsigned flags = (unsigned)number(record + 8, 2);
    if ((size_t)(end - record) < MEMBER_BYTES + name + extra + comment)
        return status_set(STATUS_FAILED, "its central directory is not valid" AGAIN);
    *member = (struct zip_member){.name = (char *)record + MEMBER_BYTES - 1,
                                  .begin = number(record + 42, 4),
                                  .bytes = number(record + 24, 4),
                                  .stored = number(record + 20, 4),
                                  .crc = (uint32_t)number(record + 16, 4),
                                  .method = (unsigned)number(record + 10, 2)};
    memmove(record + MEMBER_BYTES - 1, record + MEMBER_BYTES, name);
    record[MEMBER_BYTES - 1 + name] = '\0';
    TRY(check_name(member->name, name));
    TRY(read_extra(record + MEMBER_BYTES + name, extra, member));
    TRY(check_method(member, flags, deflated));
    *at = record + MEMBER_BYTES + name + extra + comment;
    return STATUS_OK;
}

/* Compares a member with its local header, and sets the offset of its data. All members must end at or before
 * the offset `end`. */
static enum status read_local(const struct tensor_file *file, uint64_t end, struct zip_member *member)
{
    uint8_t local[LOCAL_BYTES];
    size_t length = strlen(member->name);
    FREED char *name = malloc(length + 1);
    TRY(ALLOCATED(name, "out of memory"));
    if (member->begin > end || end - member->begin < LOCAL_BYTES + length)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' at offset %" PRIu64 " is outside the archive" AGAIN,
                          member->name, member->begin);
    TRY(tensor_file_read(file, member->begin, local, sizeof local));
    TRY(tensor_file_read(file, member->begin + LOCAL_BYTES, name, length));
    uint64_t begin = member->begin + LOCAL_BYTES + length + number(local + 28, 2);
    uint64_t size = number(local + 22, 4);
    unsigned flags = (unsigned)number(local + 6, 2);
    bool same_size = flags & FLAG_DESCRIPTOR || size == member->bytes || size == UINT32_MAX;
    if (number(local, 4) != LOCAL_MAGIC || flags & ~(FLAGS_KNOWN | FLAGS_DEFLATE) ||
        number(local + 8, 2) != member->method || number(local + 26, 2) != length ||
        memcmp(name, member->name, length) != 0 || !same_size)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' differs from its local header at offset %" PRIu64 AGAIN,
                          member->name, member->begin);
    if (begin > end || member->stored > end - begin)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' of %" PRIu64 " bytes at offset %" PRIu64
                          " reaches beyond the end of the members, %" PRIu64 AGAIN,
                          member->name, member->stored, begin, end);
    member->offset = begin;
    return STATUS_OK;
}

static int compare_begins(const void *a, const void *b)
{
    const struct zip_member *one = a, *two = b;
    return one->begin < two->begin ? -1 : one->begin > two->begin;
}

static int compare_names(const void *a, const void *b)
{
    const struct zip_member *one = a, *two = b;
    return strcmp(one->name, two->name);
}

/* Refuses members that overlap or share a name. Leaves them sorted by name. */
static enum status check_members(struct zip *zip)
{
    struct zip_member *members = zip->members;
    if (zip->count == 0)
        return STATUS_OK;
    qsort(members, zip->count, sizeof *members, compare_begins);
    for (size_t i = 1; i < zip->count; i++)
        if (members[i].begin < members[i - 1].offset + members[i - 1].stored)
            return status_set(STATUS_FAILED, "its members '%.200s' and '%.200s' overlap" AGAIN,
                              members[i - 1].name, members[i].name);
    qsort(members, zip->count, sizeof *members, compare_names);
    for (size_t i = 1; i < zip->count; i++)
        if (strcmp(members[i].name, members[i - 1].name) == 0)
            return status_set(STATUS_FAILED, "it has two members named '%.200s'" AGAIN, members[i].name);
    return STATUS_OK;
}

enum status zip_list(const struct tensor_file *file, bool deflated, struct zip *zip)
{
    struct directory directory = {0};
    *zip = (struct zip){0};
    TRY(read_end(file, &directory));
    zip->directory = malloc(directory.bytes + 1);
    zip->members = calloc(directory.members + 1, sizeof *zip->members);
    TRY(ALLOCATED(zip->directory && zip->members, "out of memory for its %" PRIu64 " members",
                  directory.members));
    TRY(tensor_file_read(file, directory.begin, zip->directory, directory.bytes));
    uint8_t *at = (uint8_t *)zip->directory, *end = at + directory.bytes;
    for (; zip->count < directory.members; zip->count++) {
        TRY(read_member(&at, end, deflated, &zip->members[zip->count]));
        TRY(read_local(file, directory.begin, &zip->members[zip->count]));
    }
    if (at != end)
        return status_set(STATUS_FAILED,
                          "its central directory lists more members than its end record" AGAIN);
    return check_members(zip);
}

void zip_free(struct zip *zip)
{
    free(zip->members);
    free(zip->directory);
    *zip = (struct zip){0};
}

const struct zip_member *zip_find(const struct zip *zip, const char *name)
{
    const struct zip_member wanted = {.name = name};
    return zip->count ? bsearch(&wanted, zip->members, zip->count, sizeof wanted, compare_names) : NULL;
}

/* ---- Members with arrays ---- */

#ifdef HAVE_ZLIB

#define PIECE 65536 /* bytes that are read or unpacked at once */

/* Position in a member. Hashes the unpacked bytes. */
struct reader {
    const struct tensor_file *file;
    uint64_t at, left; /* of the stored bytes */
    bool deflated, ended;
    z_stream stream;
    uint8_t *piece; /* PIECE stored bytes; owned */
    uint32_t crc;
};

static enum status reader_open(const struct tensor_file *file, const struct zip_member *member,
                               struct reader *reader)
{
    *reader = (struct reader){.file = file,
                              .at = member->offset,
                              .left = member->stored,
                              .piece = malloc(PIECE),
                              .crc = (uint32_t)crc32(0, NULL, 0)};
    TRY(ALLOCATED(reader->piece, "out of memory"));
    reader->deflated = member->method == DEFLATED && inflateInit2(&reader->stream, -MAX_WBITS) == Z_OK;
    return ALLOCATED(member->method != DEFLATED || reader->deflated, "out of memory for zlib");
}

static void reader_close(struct reader *reader)
{
    if (reader->deflated)
        inflateEnd(&reader->stream);
    free(reader->piece);
}

/* Reads the next piece of stored bytes, at most `most`. */
static enum status next_piece(struct reader *reader, uint64_t most, size_t *count)
{
    *count = (size_t)(most < PIECE ? most : PIECE);
    *count = reader->left < *count ? (size_t)reader->left : *count;
    TRY(tensor_file_read(reader->file, reader->at, reader->piece, *count));
    reader->at += *count;
    reader->left -= *count;
    return STATUS_OK;
}

/* Unpacks up to `room` bytes, at most PIECE. Sets `*got` to their number, which is 0 only at the end. */
static enum status inflate_some(struct reader *reader, uint8_t *to, size_t room, size_t *got)
{
    z_stream *stream = &reader->stream;
    for (*got = 0; *got == 0 && !reader->ended;) {
        if (stream->avail_in == 0 && reader->left > 0) {
            size_t count;
            TRY(next_piece(reader, PIECE, &count));
            stream->next_in = reader->piece;
            stream->avail_in = (uInt)count;
        }
        stream->next_out = to;
        stream->avail_out = (uInt)room;
        int result = inflate(stream, Z_NO_FLUSH);
        *got = room - stream->avail_out;
        reader->ended = result == Z_STREAM_END;
        if (result != Z_OK && result != Z_STREAM_END)
            return status_set(STATUS_FAILED, "its compressed data is damaged: %s" AGAIN,
                              stream->msg ? stream->msg : "it ends too early");
    }
    return STATUS_OK;
}

/* Reads the next `count` bytes of the member. STATUS_FAILED if the member ends before. */
static enum status take(struct reader *reader, uint8_t *to, uint64_t count)
{
    for (uint64_t done = 0; done < count;) {
        uint64_t left = count - done;
        size_t got = (size_t)(left < PIECE ? left : PIECE);
        uint8_t *bytes = to + done;
        if (reader->deflated)
            TRY(inflate_some(reader, bytes, got, &got));
        else
            TRY(next_piece(reader, left, &got));
        if (got == 0)
            return status_set(STATUS_FAILED, "its data ends after %" PRIu64 " of %" PRIu64 " bytes" AGAIN,
                              done, count);
        if (!reader->deflated)
            memcpy(bytes, reader->piece, got);
        reader->crc = (uint32_t)crc32(reader->crc, bytes, (uInt)got);
        done += got;
    }
    return STATUS_OK;
}

/* Checks, after all bytes were taken, that nothing follows and that the CRC is right. */
static enum status check_end(struct reader *reader, const struct zip_member *member)
{
    uint8_t excess;
    size_t got = 0;
    if (reader->deflated)
        TRY(inflate_some(reader, &excess, 1, &got));
    if (got > 0 || reader->left > 0 || reader->stream.avail_in > 0)
        return status_set(STATUS_FAILED, "its data has more than %" PRIu64 " bytes" AGAIN, member->bytes);
    if (reader->crc == member->crc)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "its data has the CRC %08x, but the archive lists %08x: the file is damaged" AGAIN,
                      reader->crc, member->crc);
}

/* Reads a whole member: `skipped` bytes that are only hashed, then the others to `to`. If `to` is NULL, all
 * bytes are only hashed. */
static enum status read_member_data(const struct tensor_file *file, const struct zip_member *member,
                                    uint64_t skipped, uint8_t *to)
{
    CLOSED_BY(reader_close) struct reader reader;
    FREED uint8_t *unused = malloc(PIECE);
    TRY(reader_open(file, member, &reader));
    TRY(ALLOCATED(unused, "out of memory"));
    for (uint64_t left = to ? skipped : member->bytes, count; left > 0; left -= count) {
        count = left < PIECE ? left : PIECE;
        TRY(take(&reader, unused, count));
    }
    if (to)
        TRY(take(&reader, to, member->bytes - skipped));
    return check_end(&reader, member);
}

/* ---- Arrays of NumPy ---- */

/* Reads the header of an array. If this program cannot read its type, such as text or objects, sets
 * tensor->fault; the CRC then shows that the header is not damaged. */
static enum status read_array(const struct tensor_file *file, const struct zip_member *member,
                              struct tensor *tensor)
{
    CLOSED_BY(reader_close) struct reader reader;
    size_t count = member->bytes < NPY_HEADER_READ ? (size_t)member->bytes : NPY_HEADER_READ;
    FREED uint8_t *bytes = malloc(count + 1);
    struct npy_header header;
    TRY(reader_open(file, member, &reader));
    TRY(ALLOCATED(bytes, "out of memory"));
    TRY(take(&reader, bytes, count));
    if (npy_header_parse(bytes, count, &header) != STATUS_OK) {
        TRY(read_member_data(file, member, 0, NULL));
        snprintf(tensor->type, sizeof tensor->type, "%s", *header.type ? header.type : "unknown");
        tensor->fault = "it is not a plain array of numbers; save numbers with numpy.savez()";
        return STATUS_OK;
    }
    TRY(npy_header_check(&header, member->bytes));
    npy_describe(&header, tensor);
    tensor->member = *member;
    tensor->member.name = NULL;
    tensor->offset = member->method == DEFLATED ? UINT64_MAX : member->offset + header.data;
    return STATUS_OK;
}

static int compare_positions(const void *a, const void *b)
{
    const struct zip_member *one = a, *two = b;
    return one->offset < two->offset ? -1 : one->offset > two->offset;
}

/* Adds the arrays in the order in which the archive stores them. Other members are not arrays. */
static enum status list_arrays(struct tensor_file *file, const struct zip *zip)
{
    if (zip->count > 0)
        qsort(zip->members, zip->count, sizeof *zip->members, compare_positions);
    for (size_t i = 0; i < zip->count; i++) {
        const struct zip_member *member = &zip->members[i];
        struct tensor tensor = {.name = NULL};
        if (!text_ends_in(member->name, ".npy"))
            continue;
        TRY(status_prefix(read_array(file, member, &tensor), "array '%.80s'", member->name));
        tensor.name = strndup(member->name, strlen(member->name) - strlen(".npy"));
        TRY(tensor_file_add(file, &tensor));
    }
    return STATUS_OK;
}

enum status npz_list(struct tensor_file *file)
{
    CLOSED_BY(zip_free) struct zip zip;
    TRY(zip_list(file, true, &zip));
    return list_arrays(file, &zip);
}

bool tensor_is_packed(const struct tensor *tensor)
{
    return tensor->member.method == DEFLATED;
}

enum status tensor_read(const struct tensor_file *file, const struct tensor *tensor, void *values)
{
    if (tensor->member.offset == 0)
        return values ? tensor_file_read(file, tensor->offset, values, tensor->bytes) : STATUS_OK;
    return read_member_data(file, &tensor->member, tensor->member.bytes - tensor->bytes, values);
}

#else

enum status npz_list(struct tensor_file *file)
{
    (void)file;
    return status_set(STATUS_UNAVAILABLE,
                      "this build reads no .npz: install zlib (zlib1g-dev) and build again");
}

bool tensor_is_packed(const struct tensor *tensor)
{
    (void)tensor;
    return false;
}

enum status tensor_read(const struct tensor_file *file, const struct tensor *tensor, void *values)
{
    return values ? tensor_file_read(file, tensor->offset, values, tensor->bytes) : STATUS_OK;
}

#endif
