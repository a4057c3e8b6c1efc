#include "data/embeddings.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "data/tensor_file.h"
#include "machine/host.h"

/* Linux limits a process to about 65,000 mappings. Therefore, files with at most this many bytes of values
 * are copied instead of mapped. */
#define COPY_BYTES         65536
#define OPEN_FILES         256   /* at most this many mapped files stay open for embeddings_read() */
#define PIECE_BYTES        65536 /* stored rows that embeddings_read() decodes at a time */
#define TENSOR_CORE_VALUES 8     /* lengths of matrices of 16-bit values must be multiples of 16 bytes */

const char *const embeddings_sample_columns[] = {"first_row", "rows", NULL};

struct embeddings_file {
    char *path; /* owned */
    struct stat info;
    void *mapping;   /* of the whole file, or NULL */
    uint8_t *copies; /* values of its tensors, or NULL; owned */
    int fd;          /* -1: embeddings_read() opens the file for each read */
};

#define SET_ALLOCATED(room) ALLOCATED(room, "out of memory for the list of embeddings")

/* ---- The tensors of a file ---- */

/* The tensors of a file, sorted by name. */
struct names {
    const struct tensor_file *file;
    const struct tensor **sorted; /* owned */
};

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const struct tensor *const *)a)->name, (*(const struct tensor *const *)b)->name);
}

static enum status names_open(const struct tensor_file *file, struct names *names)
{
    *names = (struct names){file, malloc((file->count + 1) * sizeof(const struct tensor *))};
    TRY(SET_ALLOCATED(names->sorted));
    for (size_t i = 0; i < file->count; i++)
        names->sorted[i] = &file->tensors[i];
    qsort(names->sorted, file->count, sizeof(const struct tensor *), compare_names);
    return STATUS_OK;
}

static void names_free(struct names *names)
{
    free(names->sorted);
}

/* A name: the first `length` bytes of `text`, and then `suffix`. */
struct joined {
    const char *text;
    size_t length;
    const char *suffix;
};

static int compare_joined(const void *a, const void *b)
{
    const struct joined *wanted = a;
    const char *name = (*(const struct tensor *const *)b)->name;
    int order = strncmp(wanted->text, name, wanted->length);
    return order ? order : strcmp(wanted->suffix, name + wanted->length);
}

/* Returns the tensor whose name is the first `length` bytes of `text` and then `suffix`, or NULL. */
static const struct tensor *find_tensor(const struct names *names, const char *text, size_t length,
                                        const char *suffix)
{
    const struct joined wanted = {text, length, suffix};
    const struct tensor **found =
        bsearch(&wanted, names->sorted, names->file->count, sizeof(const struct tensor *), compare_joined);
    return found ? *found : NULL;
}

/* Returns whether a tensor has the packed fp4 rows of a file that --prepare wrote. */
static bool is_packed_rows(const struct names *names, const struct tensor *tensor)
{
    return names->file->prepared && tensor->code == TENSOR_BYTES && strcmp(tensor->name, "embeddings") == 0;
}

/* The names of the tensors with the scales of rows of fp4: those of --prepare, and suffixes that other
 * programs add to the name of the rows. */
#define OUR_SCALES       "scales"
#define OUR_TENSOR_SCALE "tensor_scale"
#define SCALES           "_scale"
#define TENSOR_SCALE     "_scale_2"

/* Returns whether a tensor has the scales of rows of fp4. */
static bool is_scales(const struct names *names, const struct tensor *tensor)
{
    static const char *const suffixes[] = {SCALES, TENSOR_SCALE};
    const struct tensor *rows;
    if (strcmp(tensor->name, OUR_SCALES) == 0 || strcmp(tensor->name, OUR_TENSOR_SCALE) == 0)
        return (rows = find_tensor(names, "", 0, "embeddings")) && is_packed_rows(names, rows);
    for (size_t i = 0; i < COUNT_OF(suffixes); i++)
        if (text_ends_in(tensor->name, suffixes[i]) &&
            (rows = find_tensor(names, tensor->name, strlen(tensor->name) - strlen(suffixes[i]), "")))
            return rows->code == TENSOR_FP4;
    return false;
}

/* ---- Selecting tensors ---- */

/* Returns whether `tensor` is selected if the user names no tensor. */
static bool has_axes(const struct names *names, const struct tensor *tensor, uint32_t axes)
{
    return (tensor->real || is_packed_rows(names, tensor)) && tensor->axes == axes &&
           !is_scales(names, tensor);
}

/* Selects tensors of a file: those that match the pattern or, if the pattern is "", the floating-point
 * tensors with `axes` axes. Scales are selected only by their whole name. */
struct selection {
    struct names names;
    const char *pattern;
    uint32_t axes;
};

static bool is_selected(const struct tensor *tensor, const struct selection *selection)
{
    const char *pattern = selection->pattern;
    if (!*pattern)
        return has_axes(&selection->names, tensor, selection->axes);
    return fnmatch(pattern, tensor->name, 0) == 0 &&
           (!is_scales(&selection->names, tensor) || strcmp(pattern, tensor->name) == 0);
}

/* Returns 2 if the file has a floating-point tensor with two axes, else 1. */
static uint32_t default_axes(const struct names *names)
{
    for (size_t i = 0; i < names->file->count; i++)
        if (has_axes(names, &names->file->tensors[i], 2))
            return 2;
    return 1;
}

/* Sets a message for a file without selected tensors. The message lists the first tensors of the file. */
static enum status explain_none(const struct tensor_file *file, const char *pattern)
{
    char list[600] = "";
    text_append(list, sizeof list, file->count ? "it has " : "it has no tensors");
    for (size_t i = 0; i < file->count && i < 4; i++)
        text_append(list, sizeof list, "%s'%.60s' (%s, %" PRIu32 " axes)", i ? ", " : "",
                    file->tensors[i].name, file->tensors[i].type, file->tensors[i].axes);
    if (*pattern)
        return status_set(STATUS_FAILED, "no tensor matches %s '%.80s'; %s%s",
                          OPTION_OR_FIELD("--tensor", "tensor"), pattern, list,
                          file->count > 4 ? " and more" : "");
    return status_set(STATUS_FAILED,
                      "no floating-point tensor with 1 or 2 axes, of a type that is read; %s%s; convert it "
                      "to float32, or leave the file out",
                      list, file->count > 4 ? " and more" : "");
}

/* ---- The rows of a tensor ---- */

/* The rows of a selected tensor, and the tensor with their scales (NULL: none). */
struct rows {
    const struct tensor *tensor, *scales;
    enum embeddings_type stored;
    enum dtype dtype; /* type to which the rows are decoded */
    uint64_t count, columns;
    uint64_t value_bytes, scale_bytes; /* of a row */
    float tensor_scale;
};

static enum status read_tensor_scale(const struct names *names, const struct tensor *scale, const char *name,
                                     float *value)
{
    if (!scale || scale->code != TENSOR_PLAIN || scale->dtype != DTYPE_F32 || scale->bytes != sizeof *value)
        return status_set(STATUS_FAILED,
                          "its blocks have scales of fp8, as in NVFP4, but the file has no scale of the "
                          "whole tensor, a single F32 named '%.80s'",
                          name);
    return tensor_file_read(names->file, scale->offset, value, sizeof *value);
}

/* Finds the scales of rows of fp4, which say whether the rows are NVFP4 or MXFP4. */
static enum status find_scales(const struct names *names, struct rows *rows)
{
    const struct tensor *tensor = rows->tensor, *scales, *whole;
    bool ours = is_packed_rows(names, tensor);
    size_t length = strlen(tensor->name);
    char name[128];
    scales = ours ? find_tensor(names, "", 0, OUR_SCALES) : find_tensor(names, tensor->name, length, SCALES);
    whole = ours ? find_tensor(names, "", 0, OUR_TENSOR_SCALE)
                 : find_tensor(names, tensor->name, length, TENSOR_SCALE);
    if (!scales || scales->fault || scales->axes != tensor->axes ||
        (scales->axes == 2 && scales->shape[0] != tensor->shape[0]))
        return status_set(STATUS_FAILED,
                          "its values are fp4 (type %s), but the file has no tensor '%.80s%s' with a row of "
                          "scales for each row",
                          tensor->type, ours ? "" : tensor->name, ours ? OUR_SCALES : SCALES);
    rows->scales = scales;
    rows->scale_bytes = scales->shape[scales->axes - 1];
    rows->stored = scales->code == TENSOR_FP8 ? EMBEDDINGS_NVFP4 : EMBEDDINGS_MXFP4;
    if (scales->code != TENSOR_FP8 && scales->code != (ours ? TENSOR_BYTES : TENSOR_E8M0))
        return status_set(STATUS_FAILED, "its scales '%.80s' have the type %s; %s and F8_E4M3 are read",
                          scales->name, scales->type, ours ? "U8" : "F8_E8M0");
    snprintf(name, sizeof name, "%.80s%s", ours ? "" : tensor->name, ours ? OUR_TENSOR_SCALE : TENSOR_SCALE);
    return rows->stored == EMBEDDINGS_NVFP4 ? read_tensor_scale(names, whole, name, &rows->tensor_scale)
                                            : STATUS_OK;
}

/* Computes the number of values of a row of fp4, and checks that a row has a scale for each block. Rows of
 * --prepare are padded to whole blocks. */
static enum status size_fp4(const struct names *names, struct rows *rows)
{
    TRY(find_scales(names, rows));
    bool ours = is_packed_rows(names, rows->tensor);
    uint64_t block = rows->stored == EMBEDDINGS_NVFP4 ? NVFP4_BLOCK : MXFP4_BLOCK, blocks = rows->scale_bytes;
    uint64_t length = rows->columns; /* bytes of a row of --prepare, else values */
    if (ours) {
        if (length <= EMBEDDINGS_COLUMNS_MAX)
            rows->columns = names->file->packed_columns ? names->file->packed_columns : 2 * length;
        rows->value_bytes = length;
    } else {
        if (length % 2 != 0)
            return status_set(STATUS_FAILED, "its rows have an odd number of fp4 values, so that they would "
                                             "begin within a byte");
        rows->value_bytes = length / 2;
    }
    if (blocks != rows->columns / block + (rows->columns % block != 0) ||
        (ours && (length % (block / 2) != 0 || length / (block / 2) != blocks)))
        return status_set(STATUS_FAILED,
                          "a row has %" PRIu64 " values of fp4 and %" PRIu64
                          " scales, but each block of %" PRIu64 " values needs a scale; write the file again",
                          rows->columns, blocks, block);
    rows->dtype = rows->stored == EMBEDDINGS_NVFP4 ? DTYPE_F32 : DTYPE_BF16;
    return STATUS_OK;
}

/* Refuses values of fp8 for which the file seems to have scales, because fp8 is read without scales. */
static enum status refuse_scales(const struct names *names, const struct tensor *tensor)
{
    static const char *const suffixes[] = {SCALES, "_scale_inv", "_scales"};
    for (size_t i = 0; i < COUNT_OF(suffixes); i++)
        if (find_tensor(names, tensor->name, strlen(tensor->name), suffixes[i]))
            return status_set(STATUS_FAILED,
                              "its values are fp8, and the tensor '%.80s%s' seems to have their scales, "
                              "which this program does not apply: save the products as float16 or float32",
                              tensor->name, suffixes[i]);
    return STATUS_OK;
}

/* Computes the type and the sizes of rows. */
static enum status size_rows(const struct names *names, struct rows *rows)
{
    const struct tensor *tensor = rows->tensor;
    switch (tensor->code) {
    case TENSOR_PLAIN:
        rows->dtype = tensor->dtype;
        rows->stored = tensor->dtype == DTYPE_F32   ? EMBEDDINGS_F32
                       : tensor->dtype == DTYPE_F16 ? EMBEDDINGS_F16
                                                    : EMBEDDINGS_BF16;
        rows->value_bytes = rows->columns * dtype_bytes(tensor->dtype);
        return STATUS_OK;
    case TENSOR_F64:
        rows->stored = EMBEDDINGS_F64;
        rows->dtype = DTYPE_F32;
        rows->value_bytes = rows->columns * sizeof(double);
        return STATUS_OK;
    case TENSOR_FP8:
        TRY(refuse_scales(names, tensor));
        rows->stored = EMBEDDINGS_FP8;
        rows->dtype = DTYPE_F16;
        rows->value_bytes = rows->columns;
        return STATUS_OK;
    default:
        return size_fp4(names, rows);
    }
}

static enum status describe_rows(const struct names *names, const struct tensor *tensor, struct rows *rows)
{
    *rows = (struct rows){.tensor = tensor};
    if (tensor->fault)
        return status_set(STATUS_FAILED, "%s", tensor->fault);
    if (tensor->code == TENSOR_OTHER || tensor->code == TENSOR_E8M0 ||
        (tensor->code == TENSOR_BYTES && !is_packed_rows(names, tensor)))
        return status_set(STATUS_FAILED,
                          "its values have the type %s; convert them to float32, float16 or bfloat16",
                          tensor->type);
    if (tensor->axes != 1 && tensor->axes != 2)
        return status_set(STATUS_FAILED, "it has %" PRIu32 " axes; embeddings need 2, or 1 for a single row",
                          tensor->axes);
    rows->count = tensor->axes == 2 ? tensor->shape[0] : 1;
    rows->columns = tensor->shape[tensor->axes - 1];
    TRY(size_rows(names, rows));
    return rows->columns > 0 && rows->columns <= EMBEDDINGS_COLUMNS_MAX
               ? STATUS_OK
               : status_set(STATUS_FAILED, "it has %" PRIu64 " values per row; 1 to %d are supported",
                            rows->columns, EMBEDDINGS_COLUMNS_MAX);
}

/* ---- Adding files ---- */

/* Refuses a part whose type or number of values per row differs from that of the first part. */
static enum status check_same(const struct embeddings *set, const struct rows *rows)
{
    if (set->part_count == 0 || (set->columns == rows->columns && set->stored == rows->stored))
        return STATUS_OK;
    const struct embeddings_part *first = &set->parts[0];
    return status_set(STATUS_FAILED,
                      "it has %" PRIu64 " values per row of %s, but %s%s%.100s has %" PRIu32
                      " of %s; a set has one type and number of values per row: select tensors with %s, or "
                      "leave a file out",
                      rows->columns, embeddings_type_names[rows->stored], first->file,
                      *first->tensor ? ": " : "", first->tensor, set->columns,
                      embeddings_type_names[set->stored], OPTION_OR_FIELD("--tensor", "tensor"));
}

/* Adds rows whose values and scales are at these addresses. */
static enum status add_part(struct embeddings *set, const struct embeddings_file *file,
                            const struct rows *rows, const uint8_t *values, const uint8_t *scales)
{
    char *name = NULL;
    TRY(SET_ALLOCATED(array_grow(&set->parts, set->part_count, sizeof *set->parts) &&
                      (name = strdup(rows->tensor->name))));
    set->parts[set->part_count++] =
        (struct embeddings_part){.file = file->path,
                                 .tensor = name,
                                 .values = rows->tensor->code == TENSOR_PLAIN ? values : NULL,
                                 .stored = values,
                                 .scales = scales,
                                 .value_bytes = rows->value_bytes,
                                 .scale_bytes = rows->scale_bytes,
                                 .tensor_scale = rows->tensor_scale,
                                 .first = set->rows,
                                 .rows = rows->count,
                                 .number = (size_t)(file - set->files)};
    set->rows += rows->count;
    set->columns = set->stored_columns = (uint32_t)rows->columns;
    set->dtype = rows->dtype;
    set->stored = rows->stored;
    return STATUS_OK;
}

/* How the values of a file get into memory. */
struct provision {
    uint64_t bytes,
        packed_bytes; /* of all selected tensors with their scales; of those that are compressed */
    uint8_t *next;    /* free part of the file's copies */
};

/* Maps a file, unless its values are few or compressed, and allocates memory for copies of values. */
static enum status provide(const struct tensor_file *file, struct provision *provision,
                           struct embeddings_file *entry)
{
    bool few = provision->bytes <= COPY_BYTES;
    uint64_t copied = few ? provision->bytes : provision->packed_bytes;
    if (copied > COPY_BYTES)
        TRY(memory_check(copied, "the unpacked arrays", "save them with numpy.savez(), without compression"));
    if (copied > 0 || few) {
        entry->copies = malloc(copied + 1);
        TRY(SET_ALLOCATED(entry->copies));
        provision->next = entry->copies;
    }
    if (few || provision->packed_bytes == provision->bytes)
        return STATUS_OK;
    void *mapping = mmap(NULL, file->bytes, PROT_READ, MAP_SHARED, file->fd, 0);
    if (mapping == MAP_FAILED)
        return status_set(status_of_errno(errno), "cannot be mapped: %s%s", strerror(errno),
                          errno == ENOMEM ? "; raise vm.max_map_count, or join files" : "");
    entry->mapping = mapping;
    return STATUS_OK;
}

/* Sets `*values` to the values of a tensor, in the mapping or in a copy. Checks the CRC of a .npz. */
static enum status take_values(const struct tensor_file *file, const struct tensor *tensor,
                               const struct embeddings_file *entry, struct provision *provision,
                               const uint8_t **values)
{
    if (entry->mapping && !tensor_is_packed(tensor)) {
        *values = (const uint8_t *)entry->mapping + tensor->offset;
        return tensor_read(file, tensor, NULL);
    }
    uint8_t *copy = provision->next;
    *values = copy;
    provision->next += tensor->bytes;
    return tensor_read(file, tensor, copy);
}

/* Checks the selected tensors, and adds up their bytes. */
static enum status check_selected(const struct selection *selection, struct provision *provision)
{
    const struct tensor_file *file = selection->names.file;
    size_t selected = 0;
    for (size_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = &file->tensors[i];
        struct rows rows;
        if (!is_selected(tensor, selection))
            continue;
        enum status status = describe_rows(&selection->names, tensor, &rows);
        if (status != STATUS_OK)
            return *tensor->name ? status_prefix(status, "tensor '%.200s'", tensor->name) : status;
        provision->bytes += tensor->bytes + (rows.scales ? rows.scales->bytes : 0);
        provision->packed_bytes += tensor_is_packed(tensor) ? tensor->bytes : 0;
        selected++;
    }
    return selected ? STATUS_OK : explain_none(file, selection->pattern);
}

static enum status add_rows(struct embeddings *set, const struct selection *selection,
                            const struct tensor *tensor, struct provision *provision,
                            const struct embeddings_file *entry)
{
    const struct tensor_file *file = selection->names.file;
    const uint8_t *values, *scales = NULL;
    struct rows rows;
    TRY(describe_rows(&selection->names, tensor, &rows));
    enum status status = check_same(set, &rows);
    if (status == STATUS_OK)
        status = take_values(file, tensor, entry, provision, &values);
    if (status == STATUS_OK && rows.scales)
        status = take_values(file, rows.scales, entry, provision, &scales);
    if (status != STATUS_OK)
        return *tensor->name ? status_prefix(status, "tensor '%.200s'", tensor->name) : status;
    return add_part(set, entry, &rows, values, scales);
}

static enum status add_selected(struct embeddings *set, const struct selection *selection,
                                struct embeddings_file *entry)
{
    const struct tensor_file *file = selection->names.file;
    struct provision provision = {0};
    TRY(check_selected(selection, &provision));
    TRY(provide(file, &provision, entry));
    for (size_t i = 0; i < file->count; i++)
        if (is_selected(&file->tensors[i], selection))
            TRY(add_rows(set, selection, &file->tensors[i], &provision, entry));
    return STATUS_OK;
}

static enum status add_tensors(struct embeddings *set, const struct tensor_file *file, const char *pattern,
                               struct embeddings_file *entry)
{
    CLOSED_BY(names_free) struct names names;
    TRY(names_open(file, &names));
    const struct selection selection = {names, pattern, default_axes(&names)};
    return add_selected(set, &selection, entry);
}

/* Returns how many files stay open: not more than a quarter of the descriptors that the process may have. */
static size_t files_kept_open(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / 4 > OPEN_FILES)
        return OPEN_FILES;
    return (size_t)(limit.rlim_cur / 4);
}

static enum status add_file(struct embeddings *set, const char *path, const char *pattern)
{
    struct embeddings_file *entry = &set->files[set->file_count++];
    *entry = (struct embeddings_file){.path = strdup(path), .fd = -1};
    TRY(SET_ALLOCATED(entry->path));
    CLOSED_BY(tensor_file_close) struct tensor_file file;
    TRY(tensor_file_open(entry->path, &file));
    entry->info = file.info; /* of the size that was parsed, which is that of the mapping */
    if (file.skipped)
        status_warn(
            "%s: %" PRIu64 " tensors or NumPy arrays are in Python objects that are not read, such as "
            "ndarray, deque or Namespace, so their rows are missing; save them as tensors in a dict or list",
            path, file.skipped);
    TRY(status_prefix(add_tensors(set, &file, pattern, entry), "%s", path));
    if (entry->mapping && set->file_count <= files_kept_open())
        entry->fd = fcntl(file.fd, F_DUPFD_CLOEXEC, 0);
    return STATUS_OK;
}

/* ---- Reading rows ---- */

const char *const embeddings_type_names[] = {"f32", "f16", "bf16", "f64", "fp8", "nvfp4", "mxfp4"};

bool embeddings_in_place(const struct embeddings *set)
{
    return set->stored <= EMBEDDINGS_BF16 && set->columns == set->stored_columns;
}

enum status embeddings_align(struct embeddings *set, uint32_t multiple)
{
    const uint64_t columns = embeddings_width(set->columns, multiple);
    if (columns > EMBEDDINGS_COLUMNS_MAX)
        return status_set(STATUS_USAGE,
                          "rows of %" PRIu32 " values cannot be padded to a multiple of %" PRIu32
                          " values: at most %d values per row are supported",
                          set->columns, multiple, EMBEDDINGS_COLUMNS_MAX);
    for (size_t i = 0; columns != set->columns && i < set->part_count; i++)
        set->parts[i].values = NULL;
    set->columns = (uint32_t)columns;
    return STATUS_OK;
}

void embeddings_warn_idle(uint64_t columns, const char *remedy)
{
    if (columns % TENSOR_CORE_VALUES != 0)
        status_warn("the rows have %" PRIu64
                    " values, which is not a multiple of %d, so tensor cores would be partly idle; %s",
                    columns, TENSOR_CORE_VALUES, remedy);
}

const struct embeddings_part *embeddings_part_of(const struct embeddings *set, uint64_t row)
{
    size_t low = 0, high = set->part_count; /* invariant: parts[low].first <= row < parts[high].first */
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        *(set->parts[middle].first <= row ? &low : &high) = middle;
    }
    return &set->parts[low];
}

/* decode_f64() to decode_mxfp4() write `count` values of a stored row. */

static void decode_f64(const uint8_t *from, uint32_t count, float *to)
{
    for (uint32_t i = 0; i < count; i++) {
        double value;
        memcpy(&value, from + i * sizeof value, sizeof value);
        to[i] = float_from_double(value);
    }
}

static void decode_fp8(const uint16_t halves[256], const uint8_t *from, uint32_t count, uint16_t *to)
{
    for (uint32_t i = 0; i < count; i++)
        to[i] = halves[from[i]];
}

/* Returns value i of a row of fp4. */
static uint8_t fp4_code(const uint8_t *from, uint32_t i)
{
    return from[i / 2] >> (i % 2 ? 4 : 0) & 15;
}

static void decode_nvfp4(const uint8_t *from, const uint8_t *scales, float tensor_scale, uint32_t count,
                         float *to)
{
    float values[16] = {0};
    for (uint32_t i = 0; i < count; i++) {
        for (uint8_t code = 0; i % NVFP4_BLOCK == 0 && code < COUNT_OF(values); code++)
            values[code] = nvfp4_value(code, scales[i / NVFP4_BLOCK], tensor_scale);
        to[i] = values[fp4_code(from, i)];
    }
}

static void decode_mxfp4(const uint8_t *from, const uint8_t *scales, uint32_t count, uint16_t *to)
{
    uint16_t values[16] = {0};
    for (uint32_t i = 0; i < count; i++) {
        for (uint8_t code = 0; i % MXFP4_BLOCK == 0 && code < COUNT_OF(values); code++)
            values[code] = bf16_from_float(mxfp4_value(code, scales[i / MXFP4_BLOCK]));
        to[i] = values[fp4_code(from, i)];
    }
}

/* Writes a row whose stored values and scales are at these addresses. */
static void decode_row(const struct embeddings *set, const struct embeddings_part *part,
                       const uint8_t *values, const uint8_t *scales, void *to)
{
    const uint32_t count = set->stored_columns;
    const size_t bytes = count * dtype_bytes(set->dtype);
    switch (set->stored) {
    case EMBEDDINGS_F64:
        decode_f64(values, count, to);
        break;
    case EMBEDDINGS_FP8:
        decode_fp8(set->halves, values, count, to);
        break;
    case EMBEDDINGS_NVFP4:
        decode_nvfp4(values, scales, part->tensor_scale, count, to);
        break;
    case EMBEDDINGS_MXFP4:
        decode_mxfp4(values, scales, count, to);
        break;
    default:
        memcpy(to, values, bytes);
    }
    memset((uint8_t *)to + bytes, 0, embeddings_row_bytes(set) - bytes);
}

void embeddings_decode(const struct embeddings *set, uint64_t row, void *to)
{
    const struct embeddings_part *part = embeddings_part_of(set, row);
    const uint64_t i = row - part->first;
    decode_row(set, part, part->stored + i * part->value_bytes,
               part->scales ? part->scales + i * part->scale_bytes : NULL, to);
}

void embeddings_row(const struct embeddings *set, uint64_t row, float *to)
{
    if (set->dtype == DTYPE_F32) {
        embeddings_decode(set, row, to);
        return;
    }
    /* The row is read into the second half of `to`. Value i is widened after the values before it, so it does
     * not overwrite values that are still needed. */
    uint8_t *second = (uint8_t *)to + set->columns * sizeof(uint16_t);
    embeddings_decode(set, row, second);
    for (uint32_t i = 0; i < set->columns; i++) {
        uint16_t bits;
        memcpy(&bits, second + i * sizeof bits, sizeof bits);
        to[i] = set->dtype == DTYPE_F16 ? half_to_float(bits) : bf16_to_float(bits);
    }
}

/* ---- Opening ---- */

enum status embeddings_open(const char *path, const char *tensor, struct embeddings **set)
{
    struct paths paths;
    *set = NULL;
    enum status status = paths_find(path, tensor_file_named, &paths);
    if (status == STATUS_OK && paths.count == 0)
        status = status_set(STATUS_USAGE,
                            "%s: no file whose name ends in .npy, .npz, .safetensors, .pt, .pth or .pth.tar",
                            path);
    if (status == STATUS_OK)
        status = paths_check_distinct(AT_FDCWD, (const char *const *)paths.names, paths.count);
    struct embeddings *opened = calloc(1, sizeof *opened);
    if (opened)
        opened->files = calloc(paths.count + 1, sizeof *opened->files);
    if (status == STATUS_OK)
        status = SET_ALLOCATED(opened && opened->files);
    for (size_t i = 0; status == STATUS_OK && i < paths.count; i++)
        status = add_file(opened, paths.names[i], tensor);
    paths_free(&paths);
    for (unsigned code = 0; status == STATUS_OK && code < COUNT_OF(opened->halves); code++)
        opened->halves[code] = half_from_float(fp8_to_float((uint8_t)code));
    if (status == STATUS_OK)
        *set = opened;
    else
        embeddings_close(opened);
    return status;
}

void embeddings_close(struct embeddings *set)
{
    if (!set)
        return;
    for (size_t i = 0; i < set->part_count; i++)
        free((char *)set->parts[i].tensor);
    for (size_t i = 0; i < set->file_count; i++) {
        if (set->files[i].mapping)
            munmap(set->files[i].mapping, (size_t)set->files[i].info.st_size);
        if (set->files[i].fd >= 0)
            close(set->files[i].fd);
        free(set->files[i].copies);
        free(set->files[i].path);
    }
    free(set->files);
    free(set->parts);
    free(set);
}

/* ---- Checking and reading files ---- */

/* Returns whether this is the file that was opened, unchanged. */
static bool is_same(const struct stat *now, const struct stat *before)
{
    const struct file_identity one = file_identify(before), other = file_identify(now);
    return file_compare(&one, &other) == 0;
}

static enum status changed(const struct embeddings_file *file, const struct stat *now)
{
    char how[80] = "its time of change differs";
    if (file->info.st_size != now->st_size)
        snprintf(how, sizeof how, "it had %" PRIu64 " bytes and has %" PRIu64 " now",
                 (uint64_t)file->info.st_size, (uint64_t)now->st_size);
    return status_set(STATUS_FAILED,
                      "%s was changed while it was read: %s; read it again when nothing writes it",
                      file->path, how);
}

static enum status unreadable(const struct embeddings_file *file)
{
    return status_set(STATUS_FAILED, "%s: cannot be read any more: %s", file->path, strerror(errno));
}

enum status embeddings_check_file(const struct embeddings *set, size_t number)
{
    const struct embeddings_file *file = &set->files[number];
    struct stat info;
    if (stat(file->path, &info) != 0)
        return unreadable(file);
    return is_same(&info, &file->info) ? STATUS_OK : changed(file, &info);
}

enum status embeddings_check_files(const struct embeddings *set)
{
    for (size_t i = 0; i < set->file_count; i++)
        TRY(embeddings_check_file(set, i));
    return STATUS_OK;
}

static enum status read_open(const struct embeddings_file *file, int fd, uint64_t offset, uint8_t *to,
                             size_t bytes)
{
    const struct tensor_file opened = {.path = file->path, .fd = fd};
    return status_prefix(tensor_file_read(&opened, offset, to, bytes), "%s", file->path);
}

/* Reads a file that does not stay open. */
static enum status read_closed(const struct embeddings_file *file, uint64_t offset, uint8_t *to, size_t bytes)
{
    struct stat info;
    const int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return unreadable(file);
    enum status status = fstat(fd, &info) == 0 ? STATUS_OK : unreadable(file);
    if (status == STATUS_OK && !is_same(&info, &file->info))
        status = changed(file, &info);
    if (status == STATUS_OK)
        status = read_open(file, fd, offset, to, bytes);
    close(fd);
    return status;
}

/* Reads `bytes` bytes of a file that are at `from` in its mapping or in the copies of its values. */
static enum status read_stored(const struct embeddings_file *file, const uint8_t *from, uint8_t *to,
                               size_t bytes)
{
    const uint8_t *mapping = file->mapping;
    if (!mapping || from < mapping || from >= mapping + file->info.st_size) {
        memcpy(to, from, bytes);
        return STATUS_OK;
    }
    const uint64_t offset = (uint64_t)(from - mapping);
    return file->fd < 0 ? read_closed(file, offset, to, bytes) : read_open(file, file->fd, offset, to, bytes);
}

/* Reads and decodes `count` rows of a part, from its row `first` on. */
static enum status read_decoded(const struct embeddings *set, const struct embeddings_part *part,
                                uint64_t first, uint64_t count, uint8_t *to)
{
    const struct embeddings_file *file = &set->files[part->number];
    const size_t stored_bytes = part->value_bytes + part->scale_bytes;
    const uint64_t most = stored_bytes < PIECE_BYTES ? PIECE_BYTES / stored_bytes : 1;
    FREED uint8_t *values = malloc((most < count ? most : count) * stored_bytes + 1);
    TRY(SET_ALLOCATED(values));
    for (uint64_t done = 0, rows; done < count; done += rows) {
        rows = count - done < most ? count - done : most;
        uint8_t *scales = values + rows * part->value_bytes;
        TRY(read_stored(file, part->stored + (first + done) * part->value_bytes, values,
                        rows * part->value_bytes));
        if (part->scales)
            TRY(read_stored(file, part->scales + (first + done) * part->scale_bytes, scales,
                            rows * part->scale_bytes));
        for (uint64_t i = 0; i < rows; i++, to += embeddings_row_bytes(set))
            decode_row(set, part, values + i * part->value_bytes, scales + i * part->scale_bytes, to);
    }
    return STATUS_OK;
}

enum status embeddings_read(const struct embeddings *set, uint64_t first, uint64_t count, void *to)
{
    const size_t row_bytes = embeddings_row_bytes(set);
    uint8_t *at = to;
    for (const struct embeddings_part *part = embeddings_part_of(set, first); count > 0; part++) {
        const uint64_t inside = first - part->first, left = part->rows - inside;
        const uint64_t rows = count < left ? count : left;
        if (part->values)
            TRY(read_stored(&set->files[part->number], part->values + inside * row_bytes, at,
                            rows * row_bytes));
        else
            TRY(read_decoded(set, part, inside, rows, at));
        first += rows;
        count -= rows;
        at += rows * row_bytes;
    }
    return STATUS_OK;
}
