#include "data/embedding_rows.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/parallel.h"
#include "data/checksum.h"
#include "data/file_list.h"
#include "data/tensor_file.h"

/* ---- Labels ---- */

/* The names of the types of integers in .npy, .safetensors and .pt files. */
static const struct integers {
    const char *names[3];
    uint32_t bytes;
    bool is_signed;
} integer_types[] = {
    {{"<i8", "I64", "int64"}, 8, true},  {{"<i4", "I32", "int32"}, 4, true},
    {{"<i2", "I16", "int16"}, 2, true},  {{"|i1", "I8", "int8"}, 1, true},
    {{"<u8", "U64", ""}, 8, false},      {{"<u4", "U32", ""}, 4, false},
    {{"<u2", "U16", ""}, 2, false},      {{"|u1", "U8", "uint8"}, 1, false},
    {{"|b1", "BOOL", "bool"}, 1, false},
};

/* Returns NULL if the values of a tensor are not integers. */
static const struct integers *integers_of(const struct tensor *tensor)
{
    for (size_t i = 0; i < COUNT_OF(integer_types); i++)
        for (size_t j = 0; j < COUNT_OF(integer_types[i].names); j++)
            if (strcmp(tensor->type, integer_types[i].names[j]) == 0)
                return &integer_types[i];
    return NULL;
}

struct labels {
    int32_t *values;
    uint64_t count, room;
};

/* Returns label `i` of a tensor. Values beyond the range of int64_t become its maximum. */
static int64_t label_at(const struct integers *type, const uint8_t *values, uint64_t i)
{
    uint64_t bits = 0;
    memcpy(&bits, values + i * type->bytes, type->bytes); /* little-endian, like this machine */
    const unsigned unused = 64 - 8 * type->bytes;
    if (type->is_signed)
        return (int64_t)(bits << unused) >> unused;
    return bits > INT64_MAX ? INT64_MAX : (int64_t)bits;
}

static enum status add_labels(const struct integers *type, const uint8_t *values, uint64_t count,
                              struct labels *labels)
{
    for (uint64_t i = 0; i < count; i++) {
        const int64_t label = label_at(type, values, i);
        if (label < INT32_MIN || label > INT32_MAX)
            return status_set(STATUS_FAILED,
                              "the label of row %" PRIu64 ", %" PRId64
                              ", does not fit into 32 bits; number the classes from 0",
                              labels->count, label);
        labels->values[labels->count++] = (int32_t)label;
    }
    return STATUS_OK;
}

/* Appends the labels of a tensor. */
static enum status read_labels(const struct tensor_file *file, const struct tensor *tensor,
                               struct labels *labels)
{
    const struct integers *type = integers_of(tensor);
    if (!type)
        return status_set(STATUS_USAGE, "its values have the type %s; labels are integers", tensor->type);
    if (tensor->fault && strcmp(tensor->type, "<u2") != 0) /* <u2 is refused as rows only */
        return status_set(STATUS_FAILED, "%s", tensor->fault);
    if (tensor->axes != 1 && (tensor->axes != 2 || tensor->shape[1] != 1))
        return status_set(STATUS_USAGE, "it has %" PRIu32 " axes; labels need one, with a label per row",
                          tensor->axes);
    if (tensor->shape[0] > labels->room - labels->count)
        return status_set(STATUS_USAGE, "there are more labels than the %" PRIu64 " rows", labels->room);
    FREED uint8_t *values = malloc(tensor->bytes + 1);
    TRY(ALLOCATED(values, "out of memory for the labels"));
    TRY(tensor_read(file, tensor, values));
    return add_labels(type, values, tensor->shape[0], labels);
}

/* Finds the tensor with this name; NULL: the only tensor of integers. */
static enum status find_labels(const struct tensor_file *file, const char *name, const struct tensor **found)
{
    size_t count = 0;
    for (size_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = &file->tensors[i];
        if (name ? strcmp(tensor->name, name) == 0 : integers_of(tensor) != NULL) {
            *found = tensor;
            count++;
        }
    }
    if (count == 1)
        return STATUS_OK;
    if (name)
        return status_set(STATUS_USAGE, "it has no tensor '%.80s'", name);
    return status_set(STATUS_USAGE, "it has %zu tensors of integers; labels need a file with one", count);
}

/* Appends the labels of a file. */
static enum status add_file(const char *path, const char *name, struct labels *labels)
{
    CLOSED_BY(tensor_file_close) struct tensor_file file;
    const struct tensor *tensor = NULL;
    TRY(tensor_file_open(path, &file));
    enum status status = find_labels(&file, name, &tensor);
    if (status == STATUS_OK)
        status = read_labels(&file, tensor, labels);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s", path);
}

/* Reads a tensor of each file of the set. Each file must have as many labels as rows. */
static enum status labels_of_set(const struct embeddings *set, const char *name, struct labels *labels)
{
    for (size_t i = 0; i < set->part_count; i++) {
        const struct embeddings_part *part = &set->parts[i];
        if (i == 0 || part->number != part[-1].number)
            TRY(add_file(part->file, name, labels));
        const bool last = i + 1 == set->part_count || part[1].number != part->number;
        if (last && labels->count != part->first + part->rows)
            return status_set(STATUS_USAGE,
                              "%s: after this file there are %" PRIu64 " labels for %" PRIu64 " rows",
                              part->file, labels->count, part->first + part->rows);
    }
    return STATUS_OK;
}

static enum status labels_of_files(const char *path, struct labels *labels)
{
    struct paths paths;
    enum status status = paths_find(path, tensor_file_named, &paths);
    for (size_t i = 0; status == STATUS_OK && i < paths.count; i++)
        status = add_file(paths.names[i], NULL, labels);
    paths_free(&paths);
    TRY(status);
    return labels->count == labels->room
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%s: it has %" PRIu64 " labels, but there are %" PRIu64 " rows",
                            path, labels->count, labels->room);
}

enum status embedding_labels(const struct embeddings *set, const char *name, int32_t **result)
{
    struct labels labels = {.values = malloc((set->rows + 1) * sizeof *labels.values), .room = set->rows};
    *result = NULL;
    TRY(ALLOCATED(labels.values, "out of memory for the labels"));
    const enum status status = tensor_file_named(name) || strchr(name, '/')
                                   ? labels_of_files(name, &labels)
                                   : labels_of_set(set, name, &labels);
    if (status == STATUS_OK)
        *result = labels.values;
    else
        free(labels.values);
    return status;
}

/* ---- The hash ---- */

enum status embedding_hash(const struct embeddings *set, const int32_t *labels, uint64_t *hash)
{
    const size_t row_bytes = embeddings_row_bytes(set);
    FREED uint8_t *rows = malloc(2 * row_bytes);
    TRY(ALLOCATED(rows, "out of memory for two rows"));
    *hash = set->rows;
    for (size_t i = 0; i < set->part_count; i++) {
        const struct embeddings_part *part = &set->parts[i];
        const uint64_t words[] = {part->rows, set->columns, (uint64_t)set->dtype};
        *hash = checksum_seeded(words, sizeof words, *hash);
        if (part->rows == 0)
            continue;
        TRY(embeddings_read(set, part->first, 1, rows));
        TRY(embeddings_read(set, part->first + part->rows - 1, 1, rows + row_bytes));
        *hash = checksum_seeded(rows, 2 * row_bytes, *hash);
    }
    if (labels)
        *hash = checksum_seeded(labels, set->rows * sizeof *labels, *hash);
    return embeddings_check_files(set);
}

/* ---- The generator ---- */

#define TASK_ROWS  32    /* rows per task of parallel_for() */
#define READ_BYTES 65536 /* consecutive rows are read together, up to this size */

struct row_generator {
    struct generator generator; /* must be the first member */
    struct embedding_rows rows;
    size_t row_bytes, out_bytes;
    uint64_t read_rows;          /* rows that are read together */
    uint8_t *rooms;              /* per thread: read_rows rows */
    atomic_uint_least64_t *used; /* per file: the latest call that has read it */
    uint64_t call;
};

/* One call of the generator. */
struct call {
    struct row_generator *self;
    const uint64_t *numbers;
    uint64_t count;
    uint8_t *out;
    atomic_uint_least64_t failed; /* least position of a row that could not be read; UINT64_MAX: none */
};

static inline float load(const uint8_t *row, enum dtype type, uint32_t i)
{
    float value;
    uint16_t bits;
    if (type == DTYPE_F32) {
        memcpy(&value, row + 4 * (size_t)i, sizeof value);
        return value;
    }
    memcpy(&bits, row + 2 * (size_t)i, sizeof bits);
    return type == DTYPE_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

static inline void store(float value, enum dtype type, uint8_t *out, uint32_t i)
{
    if (type == DTYPE_F32) {
        const uint32_t bits = value != value ? 0x7FFFFFFF : float_bits(value);
        memcpy(out + 4 * (size_t)i, &bits, sizeof bits);
        return;
    }
    const uint16_t bits = type == DTYPE_F16 ? half_from_float(value) : bf16_from_float(value);
    memcpy(out + 2 * (size_t)i, &bits, sizeof bits);
}

/* Converts a row. Each case is a loop of its own, without a test per value. */
static void convert_plainly(const void *row, enum dtype from, enum dtype to, uint32_t columns, void *out)
{
#define CASE(FROM, TO)                         \
    if (from == (FROM) && to == (TO))          \
        for (uint32_t i = 0; i < columns; i++) \
    store(load(row, FROM, i), TO, out, i)
    CASE(DTYPE_F32, DTYPE_F16);
    CASE(DTYPE_F32, DTYPE_BF16);
    CASE(DTYPE_F16, DTYPE_F32);
    CASE(DTYPE_F16, DTYPE_BF16);
    CASE(DTYPE_BF16, DTYPE_F32);
    CASE(DTYPE_BF16, DTYPE_F16);
#undef CASE
}

/* Converts and pads a row. */
static void deliver(const struct row_generator *self, const uint8_t *row, uint8_t *out)
{
    const struct embedding_rows *rows = &self->rows;
    const enum dtype from = rows->set->dtype, to = rows->to;
    const uint32_t columns = rows->set->columns;
    const size_t bytes = columns * dtype_bytes(to);
    if (from == to)
        memcpy(out, row, bytes);
    else
        rows->convert(row, from, to, columns, out);
    memset(out + bytes, 0, self->out_bytes - bytes);
}

/* Notes which files were read, because they are compared with those that were opened. */
static void note_files(struct row_generator *self, uint64_t first, uint64_t count)
{
    const struct embeddings *set = self->rows.set;
    for (size_t at = embeddings_find(set, first); at < set->part_count; at++) {
        if (set->parts[at].first >= first + count)
            return;
        atomic_store_explicit(&self->used[set->parts[at].number], self->call, memory_order_relaxed);
    }
}

/* Reads `count` consecutive rows and delivers them. */
static bool read_run(struct row_generator *self, uint64_t first, uint64_t count, uint8_t *room, uint8_t *out)
{
    const bool direct = self->rows.set->dtype == self->rows.to && self->row_bytes == self->out_bytes;
    note_files(self, first, count);
    if (embeddings_read(self->rows.set, first, count, direct ? out : room) != STATUS_OK)
        return false;
    for (uint64_t i = 0; !direct && i < count; i++)
        deliver(self, room + i * self->row_bytes, out + i * self->out_bytes);
    return true;
}

static void fail_at(struct call *call, uint64_t position)
{
    uint_least64_t least = atomic_load(&call->failed);
    while (position < least && !atomic_compare_exchange_weak(&call->failed, &least, position))
        continue;
}

static void read_task(void *context, uint64_t task, int thread)
{
    struct call *call = context;
    struct row_generator *self = call->self;
    uint8_t *room = self->rooms + (size_t)thread * self->read_rows * self->row_bytes;
    const uint64_t end = (task + 1) * TASK_ROWS < call->count ? (task + 1) * TASK_ROWS : call->count;
    for (uint64_t j = task * TASK_ROWS, count; j < end; j += count) {
        count = 1;
        while (count < self->read_rows && j + count < end &&
               call->numbers[j + count] == call->numbers[j] + count)
            count++;
        if (!read_run(self, call->numbers[j], count, room, call->out + j * self->out_bytes)) {
            fail_at(call, j);
            return;
        }
    }
}

/* Compares the files that this call has read with those that were opened. */
static enum status check_used(struct row_generator *self)
{
    for (size_t i = 0; i < self->rows.set->file_count; i++)
        if (atomic_load_explicit(&self->used[i], memory_order_relaxed) == self->call)
            TRY(embeddings_check_file(self->rows.set, i));
    return STATUS_OK;
}

static enum status rows_make(struct generator *generator, const struct generator_numbers *numbers,
                             uint32_t count, void *samples, int64_t *labels, void *stream)
{
    struct row_generator *self = (struct row_generator *)generator;
    struct call call = {self, numbers->list, count, samples, UINT64_MAX};
    (void)stream;
    self->call++;
    for (uint32_t j = 0; j < count; j++)
        if (numbers->list[j] >= self->rows.set->rows)
            return status_set(STATUS_USAGE, "row %" PRIu64 " does not exist: the set has %" PRIu64 " rows",
                              numbers->list[j], self->rows.set->rows);
    parallel_for(self->rows.threads, (count + TASK_ROWS - 1) / TASK_ROWS, read_task, &call);
    TRY(check_used(self));
    if (call.failed != UINT64_MAX) { /* the message is that of another thread: read the row again */
        TRY(embeddings_read(self->rows.set, numbers->list[call.failed], 1, self->rooms));
        return status_set(STATUS_FAILED, "row %" PRIu64 " of the set could not be read",
                          numbers->list[call.failed]);
    }
    for (uint32_t j = 0; labels && j < count; j++)
        labels[j] = self->rows.labels ? self->rows.labels[numbers->list[j]] : 0;
    return STATUS_OK;
}

static uint64_t rows_memory_bytes(const struct generator *generator)
{
    const struct row_generator *self = (const struct row_generator *)generator;
    return (uint64_t)self->rows.threads * self->read_rows * self->row_bytes +
           self->rows.set->file_count * sizeof *self->used;
}

static void rows_close(struct generator *generator)
{
    struct row_generator *self = (struct row_generator *)generator;
    free(self->rooms);
    free(self->used);
    free(self);
}

static const struct generator_type row_generator_type = {rows_make, rows_memory_bytes, rows_close};

enum status embedding_rows_open(const struct embedding_rows *rows, struct generator **generator)
{
    struct row_generator *self = calloc(1, sizeof *self);
    *generator = NULL;
    TRY(ALLOCATED(self, "out of memory"));
    self->generator.type = &row_generator_type;
    self->rows = *rows;
    self->rows.convert = rows->convert ? rows->convert : convert_plainly;
    self->row_bytes = embeddings_row_bytes(rows->set);
    self->out_bytes = rows->width * dtype_bytes(rows->to);
    self->read_rows = self->row_bytes < READ_BYTES ? READ_BYTES / self->row_bytes : 1;
    self->rooms = malloc((size_t)rows->threads * self->read_rows * self->row_bytes);
    self->used = calloc(rows->set->file_count + 1, sizeof *self->used);
    if (self->rooms && self->used) {
        *generator = &self->generator;
        return STATUS_OK;
    }
    rows_close(&self->generator);
    return status_set(STATUS_EXHAUSTED, "out of memory for the rows");
}
