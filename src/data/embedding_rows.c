#include "data/embeddings.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/parallel.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/tensor_file.h"

/* ---- Labels ---- */

/* Integer types, as .npy, .safetensors and .pt files name them. */
static const struct label_type {
    const char *names[3];
    uint32_t bytes;
    bool is_signed;
} label_types[] = {{{"|u1", "U8", "uint8"}, 1, false},  {{"|i1", "I8", "int8"}, 1, true},
                   {{"|b1", "BOOL", "bool"}, 1, false}, {{"<u2", "U16", "uint16"}, 2, false},
                   {{"<i2", "I16", "int16"}, 2, true},  {{"<u4", "U32", "uint32"}, 4, false},
                   {{"<i4", "I32", "int32"}, 4, true},  {{"<u8", "U64", "uint64"}, 8, false},
                   {{"<i8", "I64", "int64"}, 8, true}};

/* Returns NULL if the values of a tensor are not integers. */
static const struct label_type *type_of(const struct tensor *tensor)
{
    for (size_t i = 0; i < COUNT_OF(label_types); i++)
        for (size_t k = 0; k < COUNT_OF(label_types[i].names); k++)
            if (strcmp(label_types[i].names[k], tensor->type) == 0)
                return &label_types[i];
    return NULL;
}

/* The labels of `room` rows. The first `count` were read. */
struct labels {
    int32_t *values;
    uint64_t count, room;
    int32_t least, most; /* the labels that are allowed */
};

/* Returns label `i` of a tensor. Values beyond the range of int64_t become its maximum. */
static int64_t label_at(const struct label_type *type, const uint8_t *values, uint64_t i)
{
    uint64_t bits = 0;
    memcpy(&bits, values + i * type->bytes, type->bytes); /* little-endian, like this machine */
    const unsigned unused = 64 - 8 * type->bytes;
    if (type->is_signed)
        return (int64_t)(bits << unused) >> unused;
    return bits > INT64_MAX ? INT64_MAX : (int64_t)bits;
}

static enum status wrong_count(uint64_t count, uint64_t rows)
{
    return status_set(STATUS_USAGE,
                      "there are %" PRIu64 " labels for %" PRIu64
                      " rows; give one label per row, in the order of the rows",
                      count, rows);
}

/* Checks that a tensor is a list of integers: of one axis, or of two axes of which one has length 1. */
static enum status check_tensor(const struct tensor *tensor, const struct labels *labels, uint64_t *count)
{
    if (!type_of(tensor))
        return status_set(STATUS_USAGE,
                          "the labels have the type %s; convert them to integers, such as int64",
                          tensor->type);
    if (tensor->fault && strcmp(tensor->type, "<u2") != 0) /* <u2 is only in doubt for values of bfloat16 */
        return status_set(STATUS_FAILED, "%s", tensor->fault);
    if (tensor->axes < 1 || tensor->axes > 2 || !tensor_values(tensor->shape, tensor->axes, count) ||
        (tensor->axes == 2 && tensor->shape[0] != 1 && tensor->shape[1] != 1))
        return status_set(STATUS_USAGE,
                          "the labels have %" PRIu32 " axes; they need one, with a label per row",
                          tensor->axes);
    return *count <= labels->room - labels->count ? STATUS_OK
                                                  : wrong_count(labels->count + *count, labels->room);
}

static enum status add_tensor(const struct tensor_file *file, const struct tensor *tensor,
                              struct labels *labels)
{
    uint64_t count;
    TRY(check_tensor(tensor, labels, &count));
    FREED uint8_t *values = malloc(tensor->bytes + 1);
    TRY(ALLOCATED(values, "out of memory for the labels"));
    TRY(tensor_read(file, tensor, values));
    for (uint64_t i = 0; i < count; i++) {
        const int64_t label = label_at(type_of(tensor), values, i);
        if (label < labels->least || label > labels->most)
            return status_set(STATUS_FAILED,
                              "label %" PRIu64 " is %" PRId64 "; labels are %" PRId32 " to %" PRId32, i,
                              label, labels->least, labels->most);
        labels->values[labels->count++] = (int32_t)label;
    }
    return STATUS_OK;
}

static enum status no_labels(const struct tensor_file *file, const char *name)
{
    char list[400] = "";
    for (size_t i = 0; i < file->count && i < 4; i++) {
        const struct tensor *tensor = &file->tensors[i];
        text_append(list, sizeof list, *tensor->name ? "%s'%.60s'" : "%sone without a name", i ? ", " : "",
                    tensor->name);
    }
    return status_set(STATUS_USAGE,
                      "it has no tensor '%.80s' for the labels, but %s%s; name the tensor, or a file of "
                      "labels, with %s",
                      name, *list ? list : "none", file->count > 4 ? " and more" : "",
                      OPTION_OR_FIELD("--labels", "labels"));
}

/* Finds the tensor with this name. NULL: "labels", or else the only tensor, or the only one of integers. */
static enum status find_labels(const struct tensor_file *file, const char *name, const struct tensor **found)
{
    const struct tensor *integers = NULL;
    size_t count = 0;
    for (size_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = *found = &file->tensors[i];
        if (strcmp(tensor->name, name ? name : EMBEDDING_LABELS) == 0 || (!name && file->count == 1))
            return STATUS_OK;
        if (type_of(tensor)) {
            integers = tensor;
            count++;
        }
    }
    *found = integers;
    return !name && count == 1 ? STATUS_OK : no_labels(file, name ? name : EMBEDDING_LABELS);
}

static enum status add_file(const char *path, const char *name, struct labels *labels)
{
    CLOSED_BY(tensor_file_close) struct tensor_file file;
    const struct tensor *tensor = NULL;
    TRY(tensor_file_open(path, &file));
    enum status status = find_labels(&file, name, &tensor);
    if (status == STATUS_OK)
        status = add_tensor(&file, tensor, labels);
    return status_prefix(status, "%s", path);
}

static enum status check_count(const struct labels *labels, const char *path)
{
    return labels->count == labels->room
               ? STATUS_OK
               : status_prefix(wrong_count(labels->count, labels->room), "%s", path);
}

/* Reads a tensor of each file of the set. Each file must have as many labels as rows. */
static enum status labels_of_set(const struct embeddings *set, const char *name, const struct labels *all)
{
    for (size_t first = 0, next; first < set->part_count; first = next) {
        const struct embeddings_part *part = &set->parts[first];
        struct labels labels = {all->values + part->first, 0, 0, all->least, all->most};
        for (next = first; next < set->part_count && set->parts[next].number == part->number; next++)
            labels.room += set->parts[next].rows;
        TRY(add_file(part->file, name, &labels));
        TRY(check_count(&labels, part->file));
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
    return check_count(labels, path);
}

bool embedding_labels_are_files(const char *name)
{
    return name && (tensor_file_named(name) || strchr(name, '/'));
}

enum status embedding_labels(const struct embeddings *set, const char *name, int32_t least, int32_t most,
                             int32_t **result)
{
    struct labels labels = {malloc((set->rows + 1) * sizeof *labels.values), 0, set->rows, least, most};
    *result = NULL;
    TRY(ALLOCATED(labels.values, "out of memory for the labels"));
    const enum status status = embedding_labels_are_files(name)
                                   ? labels_of_files(name, &labels)
                                   : labels_of_set(set, name ? name : EMBEDDING_LABELS, &labels);
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
    const struct generator_numbers *numbers;
    uint64_t count;
    uint8_t *out;
    atomic_uint_least64_t failed; /* least position of a row that cannot be delivered; UINT64_MAX: none */
};

/* Returns the row of the set at a position of the batch. */
static uint64_t row_at(const struct call *call, uint64_t position)
{
    const struct generator_numbers *numbers = call->numbers;
    const uint64_t sample = numbers->list ? numbers->list[position] : numbers->first + position;
    return call->self->rows.numbers ? call->self->rows.numbers[sample] : sample;
}

/* Returns whether a value of a row is infinite or NaN: all bits of its exponent are set. */
FDSL_FMA_CLONES static bool has_bad(enum dtype type, const void *row, uint32_t columns)
{
    const uint16_t exponent = type == DTYPE_F16 ? 0x7C00 : 0x7F80;
    uint32_t bad = 0;
    for (uint32_t i = 0; type == DTYPE_F32 && i < columns; i++)
        bad |= (((const uint32_t *)row)[i] & FLOAT_INFINITE) == FLOAT_INFINITE;
    for (uint32_t i = 0; type != DTYPE_F32 && i < columns; i++)
        bad |= (((const uint16_t *)row)[i] & exponent) == exponent;
    return bad;
}

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
    const struct embeddings_part *part = embeddings_part_of(set, first);
    for (; part < set->parts + set->part_count && part->first < first + count; part++)
        atomic_store_explicit(&self->used[part->number], self->call, memory_order_relaxed);
}

/* Reads `count` consecutive rows and delivers them. Returns how many come before one that cannot be read or
 * has a value that is refused. */
static uint64_t read_run(struct row_generator *self, uint64_t first, uint64_t count, uint8_t *room,
                         uint8_t *out)
{
    const struct embedding_rows *rows = &self->rows;
    const bool direct = rows->set->dtype == rows->to && self->row_bytes == self->out_bytes;
    uint8_t *row = direct ? out : room;
    note_files(self, first, count);
    if (embeddings_read(rows->set, first, count, row) != STATUS_OK)
        return 0;
    for (uint64_t i = 0; i < count; i++, row += self->row_bytes) {
        if (rows->finite && has_bad(rows->set->dtype, row, rows->set->columns))
            return i;
        if (!direct)
            deliver(self, row, out + i * self->out_bytes);
    }
    return count;
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
        const uint64_t first = row_at(call, j);
        count = 1;
        while (count < self->read_rows && j + count < end && row_at(call, j + count) == first + count)
            count++;
        const uint64_t read = read_run(self, first, count, room, call->out + j * self->out_bytes);
        if (read < count) {
            fail_at(call, j + read);
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

/* Says why a row was not delivered. Messages stay with the thread that sets them, so the row is read again.
 */
static enum status explain(const struct call *call)
{
    const struct row_generator *self = call->self;
    const struct embeddings *set = self->rows.set;
    const uint64_t row = row_at(call, call->failed);
    const struct embeddings_part *part = embeddings_part_of(set, row);
    TRY(embeddings_read(set, row, 1, self->rooms));
    const bool bad = self->rows.finite && has_bad(set->dtype, self->rooms, set->columns);
    return status_set(STATUS_FAILED, "%s%s%s: row %" PRIu64 " %s", part->file, *part->tensor ? ": " : "",
                      part->tensor, row - part->first,
                      bad ? "has a value that is not finite; --prepare DIR --from embeddings --labels NAME "
                            "writes a copy without such rows and their labels"
                          : "could not be read");
}

static enum status rows_make(struct generator *generator, const struct generator_numbers *numbers,
                             uint32_t count, void *samples, const struct generator_targets *targets,
                             void *stream)
{
    struct row_generator *self = (struct row_generator *)generator;
    struct call call = {self, numbers, count, samples, UINT64_MAX};
    (void)stream;
    self->call++;
    for (uint32_t j = 0; j < count; j++)
        if (row_at(&call, j) >= self->rows.set->rows)
            return status_set(STATUS_USAGE, "row %" PRIu64 " does not exist: the set has %" PRIu64 " rows",
                              row_at(&call, j), self->rows.set->rows);
    parallel_for(self->rows.threads, (count + TASK_ROWS - 1) / TASK_ROWS, read_task, &call);
    TRY(check_used(self));
    if (call.failed != UINT64_MAX)
        return explain(&call);
    for (uint32_t j = 0; targets && targets->labels && j < count; j++)
        targets->labels[j] = self->rows.labels ? self->rows.labels[row_at(&call, j)] : 0;
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
