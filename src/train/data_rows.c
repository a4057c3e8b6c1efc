/* Reads rows of embeddings and their labels: both sets, or the test set and a generator for the training set.
 */
#include "train/data_rows.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/array.h"
#include "core/parallel.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/dataset.h"
#include "data/embeddings.h"
#include "data/image_formats.h"
#include "data/remote.h"
#include "data/tensor_file.h"
#include "machine/guard.h"
#include "train/data_fill.h"

#define CLASSES_MAX   (1 << 24)
#define LABELS_TENSOR "labels" /* default name of the tensor with the labels */
#define BLOCK         65536    /* labels that are read at a time */
#define TASK_ROWS     64       /* rows that a thread copies at a time */
#define CHECK_S                                                                               \
    0.05 /* a stream compares its files with those that were opened this often, because a set \
            may have thousands */
#define THREAD_BYTES (1 << 18) /* starting a thread takes longer than copying fewer bytes */

struct data_rows {
    struct embeddings *sets[DATA_PARTS]; /* owned; both parts of a divided set have sets[DATA_TRAIN] */
    uint32_t *numbers[DATA_PARTS];       /* owned; of each sample, the number of its row in the set */
    struct guard guard;
    uint64_t hash; /* rows_hash() */
};

/* ---- What the request names ---- */

/* Returns whether a folder has files of tensors and neither subfolders, shards nor other images: in a data
 * set of images, a file such as model.pt belongs to something else, and .npy files may be images. */
static bool has_only_tensors(const char *path)
{
    bool tensors = false, others = false;
    DIR *folder = opendir(path);
    for (const struct dirent *entry; folder && !others && (entry = readdir(folder));) {
        const char *name = entry->d_name, *dot = strrchr(name, '.');
        struct stat info;
        const bool npy = text_ends_in(name, ".npy"), known = *name != '.' && tensor_file_named(name);
        tensors |= known && !npy;
        others |= *name != '.' && fstatat(dirfd(folder), name, &info, 0) == 0 && S_ISDIR(info.st_mode);
        others |=
            dot && dot != name &&
            (text_ends_in(name, ".tar") ? !known : image_format(dot + 1, NULL, 0) != IMAGE_NONE && !npy);
    }
    if (folder)
        closedir(folder);
    return tensors && !others;
}

bool rows_named(const struct data_request *request)
{
    if (data_is_generated(request->name))
        return false;
    return request->labels || request->test_labels || request->tensor || tensor_file_named(request->name) ||
           has_only_tensors(request->name);
}

/* Rejects options that are for images. */
static enum status check_request(const struct data_request *request)
{
    const struct {
        bool given;
        const char *option;
    } others[] = {{request->image, "image"},
                  {request->label, "label"},
                  {request->fit.res > 0, "out-res"},
                  {request->skip || request->mask, "on-error"}};
    for (size_t i = 0; i < COUNT_OF(others); i++)
        if (others[i].given)
            return status_option(STATUS_USAGE, others[i].option,
                                 " is for images, but --data %s has rows of embeddings; drop --%s%s",
                                 request->name, others[i].option, i == 1 ? ", or use --labels" : "");
    const char *const names[] = {request->name, request->test_name};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (names[i] && remote_is(names[i]))
            return status_option(
                STATUS_USAGE, i ? "test-data" : "data",
                " %s is a URL, but rows of embeddings are read from local files; download them", names[i]);
    return request->test_labels && !request->test_name
               ? status_set(STATUS_USAGE, "--test-labels needs --test-data, the rows that the labels are for")
               : STATUS_OK;
}

/* ---- Labels ---- */

/* Integer types, as the formats name them. */
static const struct label_type {
    const char *names[3];
    uint32_t bytes;
    bool is_signed;
} label_types[] = {{{"|u1", "U8", "uint8"}, 1, false},  {{"|i1", "I8", "int8"}, 1, true},
                   {{"|b1", "BOOL", "bool"}, 1, false}, {{"<u2", "U16", "uint16"}, 2, false},
                   {{"<i2", "I16", "int16"}, 2, true},  {{"<u4", "U32", "uint32"}, 4, false},
                   {{"<i4", "I32", "int32"}, 4, true},  {{"<u8", "U64", "uint64"}, 8, false},
                   {{"<i8", "I64", "int64"}, 8, true}};

static const struct label_type *find_type(const char *name)
{
    for (size_t i = 0; i < COUNT_OF(label_types); i++)
        for (size_t k = 0; k < COUNT_OF(label_types[i].names); k++)
            if (strcmp(label_types[i].names[k], name) == 0)
                return &label_types[i];
    return NULL;
}

/* Returns a little-endian integer of the file. A negative value becomes a number above INT64_MAX. */
static uint64_t read_integer(const uint8_t *bytes, const struct label_type *type)
{
    uint64_t value = 0;
    for (uint32_t i = 0; i < type->bytes; i++)
        value |= (uint64_t)bytes[i] << 8 * i;
    const bool negative = type->is_signed && bytes[type->bytes - 1] & 0x80;
    return negative && type->bytes < 8 ? value | UINT64_MAX << 8 * type->bytes : value;
}

/* Checks that a tensor is a list of `rows` integers: of one axis, or of two axes of which one has length 1.
 */
static enum status check_labels(const struct tensor *tensor, uint64_t rows, const struct label_type *type)
{
    uint64_t values = 0;
    if (!type)
        return status_set(STATUS_FAILED,
                          "the labels have the type %s; convert them to integers, such as int64",
                          tensor->type);
    if (tensor->fault && strcmp(tensor->type, "<u2") != 0) /* <u2 is only in doubt for values of bfloat16 */
        return status_set(STATUS_FAILED, "%s", tensor->fault);
    if (tensor->axes < 1 || tensor->axes > 2 || !tensor_values(tensor->shape, tensor->axes, &values) ||
        (tensor->axes == 2 && tensor->shape[0] != 1 && tensor->shape[1] != 1))
        return status_set(STATUS_FAILED,
                          "the labels have %" PRIu32 " axes; they need one, with a label per row",
                          tensor->axes);
    return values == rows ? STATUS_OK
                          : status_set(STATUS_FAILED,
                                       "there are %" PRIu64 " labels for %" PRIu64
                                       " rows; give one label per row, in the order of the rows",
                                       values, rows);
}

static enum status read_tensor(const struct tensor_file *file, const struct tensor *tensor, uint64_t rows,
                               uint32_t *labels)
{
    const struct label_type *type = find_type(tensor->type);
    FREED uint8_t *block = malloc((size_t)BLOCK * 8);
    TRY(ALLOCATED(block, "out of memory for labels"));
    TRY(check_labels(tensor, rows, type));
    for (uint64_t first = 0; first < rows; first += BLOCK) {
        const uint64_t count = rows - first < BLOCK ? rows - first : BLOCK;
        TRY(tensor_file_read(file, tensor->offset + first * type->bytes, block, count * type->bytes));
        for (uint64_t i = 0; i < count; i++) {
            const uint64_t label = read_integer(block + i * type->bytes, type);
            if (label >= CLASSES_MAX)
                return status_set(STATUS_FAILED, "label %" PRIu64 " is %" PRId64 "; labels are 0 to %d",
                                  first + i, (int64_t)label, CLASSES_MAX - 1);
            labels[first + i] = (uint32_t)label;
        }
    }
    return STATUS_OK;
}

/* Finds the tensor with this name. A format without names has one tensor, which any name matches. */
static enum status find_labels(const struct tensor_file *file, const char *name, const struct tensor **tensor)
{
    char list[400] = "";
    for (size_t i = 0; i < file->count; i++) {
        *tensor = &file->tensors[i];
        if (strcmp((*tensor)->name, name) == 0 || (file->count == 1 && !*(*tensor)->name))
            return STATUS_OK;
        if (i < 4)
            text_append(list, sizeof list, "%s'%.60s'", i ? ", " : "", (*tensor)->name);
    }
    return status_set(
        STATUS_FAILED,
        "it has no tensor '%.80s' for the labels, but %s%s; name the tensor, or a file of labels, "
        "with --labels",
        name, *list ? list : "none", file->count > 4 ? " and more" : "");
}

/* Reads the `rows` labels in the tensor `name` of a file. */
static enum status read_file(const char *path, const char *name, uint64_t rows, uint32_t *labels)
{
    CLOSED_BY(tensor_file_close) struct tensor_file file;
    const struct tensor *tensor = NULL;
    TRY(tensor_file_open(path, &file));
    enum status status = find_labels(&file, name, &tensor);
    if (status == STATUS_OK)
        status = read_tensor(&file, tensor, rows, labels);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s", path);
}

/* Reads one label per row of the set. `from` is a file, or the name of a tensor in the files of the rows. */
static enum status read_labels(const struct embeddings *set, const char *from, uint32_t *labels)
{
    const char *name = from ? from : LABELS_TENSOR;
    if (from && (tensor_file_named(from) || access(from, F_OK) == 0))
        return read_file(from, LABELS_TENSOR, set->rows, labels);
    for (size_t first = 0, next; first < set->part_count; first = next) {
        const struct embeddings_part *part = &set->parts[first];
        uint64_t rows = 0;
        if (text_ends_in(part->file, ".npy"))
            return status_set(STATUS_USAGE, "%s has no labels; name a file of labels with --labels",
                              part->file);
        for (next = first; next < set->part_count && set->parts[next].file == part->file; next++)
            rows += set->parts[next].rows;
        TRY(read_file(part->file, name, rows, labels + part->first));
    }
    return STATUS_OK;
}

/* ---- Rows ---- */

static const struct embeddings_part *part_of(const struct embeddings *set, uint64_t row)
{
    return &set->parts[embeddings_find(set, row)];
}

/* A row to decode with guard_run(). */
struct stored_row {
    const struct embeddings *set;
    uint64_t row;
    uint8_t *to;
};

static void decode_row(void *context)
{
    const struct stored_row *row = context;
    embeddings_decode(row->set, row->row, row->to);
}

/* Returns whether the row could be read. */
static bool read_row(const struct embeddings *set, uint64_t row, size_t row_bytes, uint8_t *to)
{
    const struct embeddings_part *part = part_of(set, row);
    struct stored_row stored = {set, row, to};
    return part->values ? guard_copy(to, part->values + (row - part->first) * row_bytes, row_bytes)
                        : guard_run(decode_row, &stored);
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

/* Copies rows out of the mapped files, and checks them. */
struct copy {
    const struct embeddings *set;
    const uint32_t *numbers; /* of samples: their rows in the set */
    const uint64_t *samples; /* NULL: 0, 1, ..., count - 1 */
    uint64_t count;
    size_t row_bytes;
    uint8_t *to;
    bool unchecked;           /* the files are not compared with those that were opened */
    atomic_bool lost;         /* a row could not be read */
    _Atomic uint64_t bad_row; /* smallest number of a row with a value that is not finite; UINT64_MAX: none */
};

static void copy_task(void *context, uint64_t task, int thread)
{
    struct copy *copy = context;
    (void)thread;
    for (uint64_t i = task * TASK_ROWS; i < (task + 1) * TASK_ROWS && i < copy->count; i++) {
        const uint64_t row = copy->numbers[copy->samples ? copy->samples[i] : i];
        uint8_t *to = copy->to + i * copy->row_bytes;
        if (!read_row(copy->set, row, copy->row_bytes, to)) {
            atomic_store(&copy->lost, true);
            return;
        }
        uint64_t known = atomic_load(&copy->bad_row);
        if (has_bad(copy->set->dtype, to, copy->set->columns))
            while (row < known && !atomic_compare_exchange_weak(&copy->bad_row, &known, row))
                ;
    }
}

static enum status copy_rows(struct copy *copy, int threads)
{
    const struct embeddings *set = copy->set;
    const uint64_t useful = copy->count * copy->row_bytes / THREAD_BYTES + 1;
    atomic_init(&copy->lost, false);
    atomic_init(&copy->bad_row, UINT64_MAX);
    parallel_for(useful < (uint64_t)threads ? (int)useful : threads,
                 (copy->count + TASK_ROWS - 1) / TASK_ROWS, copy_task, copy);
    const uint64_t row = atomic_load(&copy->bad_row);
    if (!copy->unchecked || atomic_load(&copy->lost) || row != UINT64_MAX)
        TRY(embeddings_check_files(set));
    if (atomic_load(&copy->lost))
        return status_set(STATUS_FAILED, "a file of the rows could not be read: input/output error");
    if (row == UINT64_MAX)
        return STATUS_OK;
    const struct embeddings_part *part = part_of(set, row);
    return status_set(STATUS_FAILED,
                      "%s%s%s: row %" PRIu64 " has a value that is not finite; remove the row and its label",
                      part->file, *part->tensor ? ": " : "", part->tensor, row - part->first);
}

/* ---- Choosing rows ---- */

/* Sets the samples of a part: the rows that are held out (`held` is 1), that are not (0), or all (-1), at
 * most `limit`. */
static enum status choose(struct data *data, enum data_part part, const struct embeddings *set,
                          const uint32_t *labels, const uint8_t *flags, int held, uint64_t limit)
{
    struct data_set *into = &data->sets[part];
    uint32_t **numbers = &data->rows->numbers[part];
    *numbers = malloc((set->rows + 1) * sizeof **numbers);
    into->labels = malloc((set->rows + 1) * sizeof *into->labels);
    TRY(ALLOCATED(*numbers && into->labels, "out of memory for the list of rows"));
    for (uint64_t row = 0; row < set->rows && into->count < limit; row++)
        if (held < 0 || flags[row] == held) {
            into->labels[into->count] = labels[row];
            (*numbers)[into->count++] = (uint32_t)row;
        }
    return STATUS_OK;
}

/* Sets `*flags`: 1 for each row that is held out. The key of a row is its number. The caller frees it. */
static enum status hold_out(const struct embeddings *set, const uint32_t *labels, double share,
                            uint8_t **flags)
{
    FREED struct dataset_candidate *candidates = malloc((set->rows + 1) * sizeof *candidates);
    *flags = calloc(set->rows + 1, 1);
    TRY(ALLOCATED(candidates && *flags, "out of memory to hold out rows"));
    for (uint64_t row = 0; row < set->rows; row++)
        candidates[row] = (struct dataset_candidate){(int32_t)labels[row], (uint32_t)row, stream_hash(row)};
    dataset_hold_out(candidates, (uint32_t)set->rows, share, *flags);
    return STATUS_OK;
}

/* Copies the values of a part into memory. */
static enum status store(const struct data_request *request, struct data *data, enum data_part part,
                         const struct embeddings *set)
{
    struct data_set *into = &data->sets[part];
    TRY(data_check_memory(into->count, data->sample_bytes, data_size_options[part]));
    into->values = malloc(into->count * data->sample_bytes + 1);
    TRY(ALLOCATED(into->values, "out of memory for %" PRIu32 " rows; lower %s", into->count,
                  data_size_options[part]));
    struct copy copy = {.set = set,
                        .numbers = data->rows->numbers[part],
                        .count = into->count,
                        .row_bytes = data->sample_bytes,
                        .to = into->values};
    return copy_rows(&copy, request->resources.threads);
}

/* Sets data->sums and the hash from rows that are evenly distributed over the training set. */
static enum status measure(const struct data_request *request, struct data *data,
                           const struct embeddings *set)
{
    const uint64_t count = data->sets[DATA_TRAIN].count, most = count < DATA_MEASURED ? count : DATA_MEASURED;
    FREED uint64_t *samples = malloc((most + 1) * sizeof *samples);
    FREED uint8_t *values = malloc(most * data->sample_bytes + 1);
    TRY(ALLOCATED(samples && values, "out of memory to measure rows"));
    for (uint64_t i = 0; i < most; i++)
        samples[i] = i * count / most;
    struct copy copy = {.set = set,
                        .numbers = data->rows->numbers[DATA_TRAIN],
                        .samples = samples,
                        .count = most,
                        .row_bytes = data->sample_bytes,
                        .to = values};
    TRY(copy_rows(&copy, request->resources.threads));
    for (uint64_t i = 0; i < most; i++)
        data_add_sums(data, values + i * data->sample_bytes, 0, &data->sums[0]);
    data->measured = (uint32_t)most;
#ifdef HAVE_XXHASH
    data->rows->hash = XXH3_64bits_withSeed(values, most * data->sample_bytes, count ^ set->rows << 32);
#endif
    return STATUS_OK;
}

/* ---- Opening ---- */

/* Opens the files of a part, and reads its labels. */
static enum status open_part(const struct data_request *request, enum data_part part, struct embeddings **set,
                             uint32_t **labels)
{
    const bool test = part == DATA_TEST;
    const char *path = test ? request->test_name : request->name, *option = test ? "--test-data" : "--data";
    /* A tensor has the same name in the files of both sets; a file of labels is for one of them. */
    const bool file =
        request->labels && (tensor_file_named(request->labels) || access(request->labels, F_OK) == 0);
    const char *from = !test || (!request->test_labels && !file) ? request->labels : request->test_labels;
    enum status status = embeddings_open(path, request->tensor ? request->tensor : "", set);
    if (status != STATUS_OK)
        return status_prefix(status, "%s", option);
    if ((*set)->rows > DATA_SAMPLES_MAX)
        return status_set(STATUS_TOO_LARGE, "%s %s has %" PRIu64 " rows; at most %" PRIu64 " are supported",
                          option, path, (*set)->rows, DATA_SAMPLES_MAX);
    *labels = malloc(((*set)->rows + 1) * sizeof **labels);
    TRY(ALLOCATED(*labels, "out of memory for the labels"));
    if (test && !from && file)
        return status_set(STATUS_USAGE, "--test-data %s: name the labels of its rows with --test-labels",
                          path);
    return read_labels(*set, from, *labels);
}

/* Sets the shape of the samples. Both sets have it, because one network sees both. */
static enum status take_shape(const struct embeddings *set, struct data *data)
{
    if (data->sample_values == 0) {
        data->shape = (struct shape){1, 1, 1, set->columns};
        data->type = set->dtype;
        data->sample_values = set->columns;
        data->sample_bytes = set->columns * dtype_bytes(set->dtype);
    }
    return data->type == set->dtype && data->sample_values == set->columns
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "the training set has rows of %zu values of %s, but the test set has rows of %" PRIu32
                     " values of %s; both need the same",
                     data->sample_values, dtype_names[data->type], set->columns, dtype_names[set->dtype]);
}

/* Chooses the samples of a part and reads their values, or with DATA_LOAD measures the training set. */
static enum status fill_part(const struct data_request *request, enum data_part part,
                             const struct embeddings *set, const uint32_t *labels, const uint8_t *flags,
                             struct data *data)
{
    const bool train = part == DATA_TRAIN;
    const uint64_t size = train ? request->train_size : request->test_size;
    TRY(take_shape(set, data));
    TRY(choose(data, part, set, labels, flags, !data->split ? -1 : !train, size ? size : UINT64_MAX));
    return train && data->feed == DATA_LOAD ? measure(request, data, set) : store(request, data, part, set);
}

/* Opens and fills both parts from one set, or each from its own. */
static enum status open_parts(const struct data_request *request, struct data *data,
                              uint32_t *labels[DATA_PARTS], uint8_t **flags)
{
    struct embeddings **sets = data->rows->sets;
    const double share = request->test_share > 0 ? request->test_share : DATA_TEST_SHARE;
    data->split = !request->test_name;
    if (!request->test_only || data->split)
        TRY(open_part(request, DATA_TRAIN, &sets[DATA_TRAIN], &labels[DATA_TRAIN]));
    if (data->split)
        TRY(hold_out(sets[DATA_TRAIN], labels[DATA_TRAIN], share, flags));
    else
        TRY(open_part(request, DATA_TEST, &sets[DATA_TEST], &labels[DATA_TEST]));
    if (!request->test_only)
        TRY(fill_part(request, DATA_TRAIN, sets[DATA_TRAIN], labels[DATA_TRAIN], *flags, data));
    const int from = data->split ? DATA_TRAIN : DATA_TEST;
    return fill_part(request, DATA_TEST, sets[from], labels[from], *flags, data);
}

enum status rows_open(const struct data_request *request, struct data *data)
{
    uint32_t *labels[DATA_PARTS] = {NULL};
    uint8_t *flags = NULL;
    TRY(check_request(request));
    data->rows = calloc(1, sizeof *data->rows);
    TRY(ALLOCATED(data->rows, "out of memory"));
    TRY(guard_open(&data->rows->guard));
    enum status status = open_parts(request, data, labels, &flags);
    for (int part = 0; part < DATA_PARTS; part++) {
        free(labels[part]);
        if (part == DATA_TRAIN && data->feed == DATA_LOAD)
            continue; /* the streams read from it */
        embeddings_close(data->rows->sets[part]);
        data->rows->sets[part] = NULL;
    }
    free(flags);
    return status;
}

void rows_close(struct data *data)
{
    for (int part = 0; data->rows && part < DATA_PARTS; part++) {
        embeddings_close(data->rows->sets[part]);
        free(data->rows->numbers[part]);
    }
    if (data->rows)
        guard_close(&data->rows->guard);
    free(data->rows);
    data->rows = NULL;
}

uint64_t rows_hash(const struct data *data)
{
    return data->rows->hash;
}

/* ---- The generator ---- */

struct reader {
    struct generator generator; /* must be the first member */
    const struct data *data;
    int threads;
    double checked_s; /* when the files were checked last */
};

static enum status reader_make(struct generator *generator, const struct generator_numbers *numbers,
                               uint32_t count, void *samples, int64_t *labels, void *stream)
{
    struct reader *reader = (struct reader *)generator;
    const struct data_rows *rows = reader->data->rows;
    const double now_s = timer_now_s();
    const bool checks = now_s - reader->checked_s >= CHECK_S;
    (void)stream;
    struct copy copy = {.set = rows->sets[DATA_TRAIN],
                        .numbers = rows->numbers[DATA_TRAIN],
                        .samples = numbers->list,
                        .count = count,
                        .row_bytes = reader->data->sample_bytes,
                        .to = samples,
                        .unchecked = !checks};
    reader->checked_s = checks ? now_s : reader->checked_s;
    for (uint32_t i = 0; labels && i < count; i++)
        labels[i] = reader->data->sets[DATA_TRAIN].labels[numbers->list[i]];
    return copy_rows(&copy, reader->threads);
}

static uint64_t reader_memory_bytes(const struct generator *generator)
{
    (void)generator;
    return 0; /* the files are mapped */
}

static void reader_close(struct generator *generator)
{
    free(generator);
}

enum status rows_generator(const struct data *data, int threads, struct generator **generator)
{
    static const struct generator_type type = {reader_make, reader_memory_bytes, reader_close};
    struct reader *reader = calloc(1, sizeof *reader);
    *generator = NULL;
    TRY(ALLOCATED(reader, "out of memory for a stream"));
    *reader = (struct reader){{&type}, data, threads > 1 ? threads : 1, 0};
    *generator = &reader->generator;
    return STATUS_OK;
}
