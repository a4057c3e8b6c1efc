/* Rows of embeddings: opens the files, chooses rows with the code of the workload `ops`, and opens streams.
 */
#include "lib/sources.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "data/checksum.h"
#include "data/embeddings.h"
#include "data/generated_stream.h"
#include "ops/job.h"
#include "ops/row_batches.h"
#include "ops/rows_device.h"
#include "ops/select.h"

#define NORM_LEAST     1e-15 /* the square of a smaller norm is not a normal float */
#define NORM_MOST      1e19

#define STREAMED_BYTES ((uint64_t)256 << 20) /* of device memory, for rows that are not resident */

/* A set of files, shared by all sources that are selected from it. */
struct rows_set {
    struct embeddings *set;
    int32_t *labels; /* one per row of the set; NULL: none */
    uint32_t align;
    uint64_t hash;
    atomic_uint users;
};

/* Rows in the memory of a device. */
struct resident {
    struct rows_device *rows; /* all are resident */
    int device;
    bool of_set; /* rows_device_numbers() returns the numbers of rows in the set */
    atomic_uint users;
};

struct rows {
    struct rows_set *shared;
    pthread_mutex_t lock; /* protects `numbers` and `unlisted` until rows_list() has returned */
    uint32_t *numbers;    /* of the rows in the set; NULL: all rows in their order, or `unlisted` */
    bool unlisted;        /* the numbers are only on the device: few callers need them */
    uint64_t count;
    enum dtype type; /* of the rows; differs from that of the set if fdsl_rows_select() converts them */
    uint64_t hash;
    uint64_t filtered, invalid, duplicates, unsampled; /* rows that were removed */
    struct resident *resident;                         /* NULL: the rows are in their files */
    const atomic_bool *cancel;                         /* of rows_select(), until it returns; NULL: none */
};

static enum dtype stored_type(const struct rows *rows)
{
    return rows->shared->set->dtype;
}

static void release_set(struct rows_set *shared)
{
    if (atomic_fetch_sub(&shared->users, 1) > 1)
        return;
    embeddings_close(shared->set);
    free(shared->labels);
    free(shared);
}

static void release_resident(struct resident *resident)
{
    if (!resident || atomic_fetch_sub(&resident->users, 1) > 1)
        return;
    rows_device_close(resident->rows);
    free(resident);
}

void rows_free(struct rows *rows)
{
    if (!rows)
        return;
    release_resident(rows->resident);
    pthread_mutex_destroy(&rows->lock);
    if (rows->shared)
        release_set(rows->shared);
    free(rows->numbers);
    free(rows);
}

/* ---- Opening ---- */

static enum status open_set(const struct fdsl_rows_config *config, struct rows_set *shared)
{
    const char *tensor = config->tensor ? config->tensor : "";
    if (config->tensor && !*config->tensor)
        return status_set(STATUS_USAGE, "tensor: it is empty; name a tensor, or leave it out");
    if (config->labels && !*config->labels)
        return status_set(STATUS_USAGE, "labels: it is empty; leave it out for rows without labels");
    TRY(status_prefix(embeddings_open(config->path, tensor, &shared->set), "path"));
    if (shared->set->rows == 0)
        return status_set(STATUS_USAGE, "path: %s: all its tensors have 0 rows", config->path);
    if (shared->set->rows > UINT32_MAX)
        return status_set(STATUS_TOO_LARGE, "path: %s has more than 2^32 - 1 rows", config->path);
    if (config->labels)
        TRY(status_prefix(
            embedding_labels(shared->set, config->labels, INT32_MIN, INT32_MAX, &shared->labels), "labels"));
    return status_prefix(embedding_hash(shared->set, shared->labels, &shared->hash), "path");
}

static enum status open_all(const struct fdsl_rows_config *config, struct rows *self)
{
    if (!config->path || !*config->path)
        return status_set(STATUS_USAGE, "path: it is %s", config->path ? "empty" : "NULL");
    TRY(lib_check_count("align", config->align, 1, EMBEDDINGS_ALIGN_MAX));
    self->shared = calloc(1, sizeof *self->shared);
    TRY(ALLOCATED(self->shared, "out of memory"));
    self->shared->users = 1;
    self->shared->align = config->align;
    TRY(open_set(config, self->shared));
    self->count = self->shared->set->rows;
    self->type = stored_type(self);
    self->hash = self->shared->hash;
    return STATUS_OK;
}

enum fdsl_status fdsl_rows_config_init(struct fdsl_rows_config *config, size_t size)
{
    static const struct fdsl_rows_config defaults = {.size = sizeof defaults, .align = 1};
    return lib_set_config(config, size, &defaults, sizeof defaults);
}

enum status rows_open(const struct fdsl_rows_config *config, struct rows **rows)
{
    *rows = NULL;
#ifndef HAVE_XXHASH
    return status_set(STATUS_UNAVAILABLE, "path: this libfdsl was built without xxHash, which rows need");
#endif
    struct rows *self = *rows = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    pthread_mutex_init(&self->lock, NULL);
    const enum status status = open_all(config, self);
    if (status == STATUS_OK)
        return STATUS_OK;
    const struct failure failure = status_save(status);
    rows_free(self);
    *rows = NULL;
    return status_restore(&failure);
}

/* ---- Describing ---- */

uint32_t rows_count(const struct rows *rows)
{
    return (uint32_t)rows->count;
}

bool rows_labelled(const struct rows *rows)
{
    return rows->shared->labels != NULL;
}

uint64_t rows_hash(const struct rows *rows)
{
    return rows->hash;
}

void rows_describe(const struct rows *rows, struct fdsl_source_info *info)
{
    const struct embeddings *set = rows->shared->set;
    info->samples = rows->count;
    info->bytes = rows->count * embeddings_row_bytes(set);
    info->files = (uint32_t)set->file_count;
    info->width = (uint32_t)embeddings_width(set->columns, rows->shared->align);
    info->columns = set->columns;
    info->dtype = dtype_names[rows->type];
    info->labelled = rows_labelled(rows);
    info->rows_found = set->rows;
    info->filtered = rows->filtered;
    info->invalid = rows->invalid;
    info->duplicates = rows->duplicates;
    info->unsampled = rows->unsampled;
}

/* ---- Selecting ---- */

enum fdsl_status fdsl_select_config_init(struct fdsl_select_config *config, size_t size)
{
    static const struct fdsl_select_config defaults = {
        .size = sizeof defaults, .norm_max = NORM_MOST, .dtype = "auto", .device = FDSL_CPU};
    return lib_set_config(config, size, &defaults, sizeof defaults);
}

/* Gets a floating-point type by its name; "auto" is `automatic`. */
static enum status find_type(const char *name, enum dtype automatic, enum dtype *type)
{
    static const char *const names[] = {"auto", "f32", "f16", "bf16", NULL};
    const enum dtype types[] = {automatic, DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    int index;
    TRY(lib_find_name("dtype", name, names, &index));
    *type = types[index];
    return STATUS_OK;
}

static enum status check_norm(const char *name, double norm)
{
    if (norm == 0 || (norm >= NORM_LEAST && norm <= NORM_MOST)) /* rejects NaN, too */
        return STATUS_OK;
    return status_set(STATUS_USAGE, "%s: %g is out of range; it must be 0, or %g to %g", name, norm,
                      NORM_LEAST, NORM_MOST);
}

static enum status check_steps(const struct rows *from, const struct fdsl_select_config *config)
{
    TRY(lib_check_flag("validate", config->validate));
    TRY(check_norm("norm_min", config->norm_min));
    TRY(check_norm("norm_max", config->norm_max));
    if (config->norm_min > config->norm_max)
        return status_set(STATUS_USAGE, "norm_min: %g is larger than norm_max, %g", config->norm_min,
                          config->norm_max);
    if (!config->validate && (config->norm_min != 0 || config->norm_max != NORM_MOST))
        return status_set(STATUS_USAGE, "validate: norm_min and norm_max have an effect only if it is 1");
    TRY(lib_check_flag("dedup", config->dedup));
    if (from->type != stored_type(from) && (config->validate || config->dedup))
        return status_set(STATUS_USAGE, "%s: the rows were converted to %s; do it before they are converted",
                          config->validate ? "validate" : "dedup", dtype_names[from->type]);
    return STATUS_OK;
}

static enum status check_choice(const struct rows *from, const struct fdsl_select_config *config)
{
    if (config->keep && config->keep_count != from->count)
        return status_set(STATUS_USAGE, "keep_count: it is %llu, but the source has %llu rows",
                          (unsigned long long)config->keep_count, (unsigned long long)from->count);
    if (!config->keep && config->keep_count)
        return status_set(STATUS_USAGE, "keep: it is NULL, but keep_count is %llu",
                          (unsigned long long)config->keep_count);
    if (!config->labels && config->label_count)
        return status_set(STATUS_USAGE, "labels: it is NULL, but label_count is %llu",
                          (unsigned long long)config->label_count);
    if (config->labels && !rows_labelled(from))
        return status_set(STATUS_USAGE, "labels: the rows have no labels; open them with `labels`");
    return STATUS_OK;
}

static int compare_labels(const void *a, const void *b)
{
    const int64_t one = *(const int64_t *)a, two = *(const int64_t *)b;
    return (one > two) - (one < two);
}

enum status rows_list(struct rows *rows)
{
    enum status status = STATUS_OK;
    pthread_mutex_lock(&rows->lock);
    if (rows->unlisted) {
        rows->numbers = malloc(rows->count * sizeof *rows->numbers);
        status = ALLOCATED(rows->numbers, "out of memory for a list of rows");
        if (status == STATUS_OK)
            status = rows_device_numbers(rows->resident->rows, 0, rows->count, rows->numbers);
        rows->unlisted = status != STATUS_OK;
        if (rows->unlisted) {
            free(rows->numbers);
            rows->numbers = NULL;
        }
    }
    pthread_mutex_unlock(&rows->lock);
    return status;
}

/* Returns whether some rows of the set were removed or are in another order. */
static bool chosen(struct rows *rows)
{
    pthread_mutex_lock(&rows->lock);
    const bool result = rows->numbers || rows->unlisted;
    pthread_mutex_unlock(&rows->lock);
    return result;
}

/* The rows are listed. */
static uint32_t number_at(const struct rows *rows, uint64_t i)
{
    return rows->numbers ? rows->numbers[i] : (uint32_t)i;
}

/* Lists the rows that the caller's choice keeps. `labels` are sorted. */
static void filter(const struct rows *from, const struct fdsl_select_config *config, const int64_t *labels,
                   struct rows *self)
{
    for (uint64_t i = 0; i < from->count; i++) {
        const uint32_t number = number_at(from, i);
        const int64_t label = from->shared->labels ? from->shared->labels[number] : 0;
        if ((!config->keep || config->keep[i]) &&
            (!labels || bsearch(&label, labels, config->label_count, sizeof *labels, compare_labels)))
            self->numbers[self->count++] = number;
    }
    self->filtered += from->count - self->count;
}

static enum status choose(const struct rows *from, const struct fdsl_select_config *config, struct rows *self)
{
    TRY(check_choice(from, config));
    if (!config->keep && !config->labels) {
        self->count = from->count;
        return STATUS_OK;
    }
    FREED int64_t *labels = NULL;
    if (config->labels) {
        labels = malloc((config->label_count + 1) * sizeof *labels);
        TRY(ALLOCATED(labels, "out of memory for the labels"));
        memcpy(labels, config->labels, config->label_count * sizeof *labels);
        qsort(labels, config->label_count, sizeof *labels, compare_labels);
    }
    self->numbers = malloc((from->count + 1) * sizeof *self->numbers);
    TRY(ALLOCATED(self->numbers, "out of memory for a list of rows"));
    filter(from, config, labels, self);
    return STATUS_OK;
}

/* The arguments of ops_select(), which runs on the threads of lib_on_threads(). */
struct selecting {
    const struct rows *from;
    const struct ops_select *how;
    struct rows *self;
    struct ops_selected selected;
};

static enum status run_steps(void *context)
{
    struct selecting *selecting = context;
    const struct rows *self = selecting->self;
    return ops_select(self->shared->set, self->numbers ? self->numbers : selecting->from->numbers,
                      self->count, selecting->how, &selecting->selected);
}

static enum status check_left(const struct rows *from, const struct rows *self)
{
    return self->count > 0
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "no row is left of %llu: %llu were removed by `keep` or `labels`, %llu are invalid",
                     (unsigned long long)from->count, (unsigned long long)(self->filtered - from->filtered),
                     (unsigned long long)(self->invalid - from->invalid));
}

/* Runs the steps of `ops` on the rows that were chosen. */
static enum status select_rows(const struct rows *from, const struct ops_select *how, struct rows *self)
{
    struct selecting selecting = {from, how, self, {0}};
    TRY(lib_on_threads(how->threads, run_steps, &selecting));
    free(self->numbers);
    self->numbers = selecting.selected.rows;
    self->count = selecting.selected.count;
    self->invalid += selecting.selected.invalid;
    self->duplicates += selecting.selected.duplicates;
    self->unsampled += selecting.selected.unsampled;
    return check_left(from, self);
}

/* Returns the hash of the list of rows, as a device computes it (rows_device_info.numbers_hash). */
static uint64_t hash_numbers(const struct rows *self)
{
    uint64_t sum = 0;
    if (self->unlisted)
        return rows_device_info(self->resident->rows).numbers_hash;
    for (uint64_t k = 0; k < self->count; k++)
        sum += rows_device_number_hash(k, self->numbers[k]);
    return sum;
}

/* Hashes which rows of the set were chosen, and their type. */
static void set_hash(struct rows *self)
{
    const struct rows_set *shared = self->shared;
    uint64_t i = 0;
    while (self->count == shared->set->rows && i < self->count && number_at(self, i) == i)
        i++;
    if (i == shared->set->rows) { /* all rows in their order */
        free(self->numbers);
        self->numbers = NULL;
    }
    self->hash = shared->hash;
    if (self->numbers || self->unlisted) {
        const uint64_t words[] = {self->count, hash_numbers(self)};
        self->hash = checksum_seeded(words, sizeof words, self->hash);
    }
    if (self->type != stored_type(self))
        self->hash = checksum_seeded(&self->type, sizeof self->type, self->hash);
}

/* ---- Rows on a device ---- */

/* Implements rows_device_copy: copies rows first .. first + count - 1 of `context`, a struct rows. */
static enum status copy_rows(void *context, uint64_t first, uint64_t count, void *to)
{
    const struct rows *rows = context;
    const struct embeddings *set = rows->shared->set;
    const size_t row_bytes = embeddings_row_bytes(set);
    if (rows->cancel && atomic_load(rows->cancel))
        return status_set(STATUS_FAILED, "the selection was cancelled");
    for (uint64_t i = 0, run; i < count; i += run) {
        const uint64_t number = number_at(rows, first + i);
        run = 1;
        while (i + run < count && number_at(rows, first + i + run) == number + run)
            run++;
        TRY(embeddings_read(set, number, run, (uint8_t *)to + i * row_bytes));
    }
    return STATUS_OK;
}

/* Implements rows_device_check. */
static enum status check_rows(void *context)
{
    const struct rows *rows = context;
    return embeddings_check_files(rows->shared->set);
}

/* Lists the labels of all rows. */
static enum status list_labels(const struct rows *rows, int32_t **labels)
{
    *labels = NULL;
    if (!rows_labelled(rows))
        return STATUS_OK;
    *labels = malloc(rows->count * sizeof **labels);
    TRY(ALLOCATED(*labels, "out of memory for the labels"));
    for (uint64_t i = 0; i < rows->count; i++)
        (*labels)[i] = rows->shared->labels[number_at(rows, i)];
    return STATUS_OK;
}

/* Copies rows to a device, and runs steps on them there. `limit` 0: all free memory. */
static enum status send_rows(struct rows *rows, const struct rows_device_steps *steps, int device,
                             uint64_t limit, int threads, struct rows_device **sent)
{
    const struct embeddings *set = rows->shared->set;
    FREED int32_t *labels = NULL;
    TRY(rows_list(rows));
    TRY(list_labels(rows, &labels));
    const struct rows_device_request request = {.copy = copy_rows,
                                                .check = check_rows,
                                                .context = rows,
                                                .rows = rows->count,
                                                .width = set->columns,
                                                .dtype = set->dtype,
                                                .labels = labels,
                                                .steps = *steps,
                                                .device = device,
                                                .memory_limit = limit,
                                                .threads = threads};
    return status_prefix(rows_device_open(&request, sent), "device");
}

/* Runs steps on rows that are on a device. */
static enum status wrap_rows(const struct resident *from, const struct rows_device_steps *steps,
                             struct rows_device **wrapped)
{
    const struct rows_device_info info = rows_device_info(from->rows);
    const struct rows_device_tensor tensor = {.values = info.values,
                                              .rows = info.rows,
                                              .stride = info.stride,
                                              .width = info.width,
                                              .dtype = info.dtype,
                                              .labels = info.labels,
                                              .numbers = from->of_set ? info.numbers : NULL,
                                              .device = info.device};
    return status_prefix(rows_device_wrap(&tensor, steps, 0, NULL, wrapped), "device");
}

/* Replaces self->resident by `rows`, whose input were the rows of `self`, and self->numbers by those of the
 * rows that are left. Takes `rows` over; `of_set` is that of struct resident. Sets `*removed` to the number
 * of the others. */
static enum status accept(struct rows *self, struct rows_device *rows, int device, bool of_set,
                          uint64_t *removed)
{
    struct resident *resident = malloc(sizeof *resident);
    if (!resident) {
        rows_device_close(rows);
        return status_set(STATUS_EXHAUSTED, "out of memory");
    }
    *resident = (struct resident){rows, device, of_set, 1};
    release_resident(self->resident);
    self->resident = resident;
    const struct rows_device_info info = rows_device_info(rows);
    if (info.resident_rows < info.rows)
        return status_set(STATUS_TOO_LARGE, "device: its memory has room for %llu of the %llu rows",
                          (unsigned long long)info.resident_rows, (unsigned long long)info.rows);
    *removed = self->count - info.rows;
    if (*removed == 0)
        return STATUS_OK;
    if (of_set) {
        free(self->numbers);
        self->numbers = NULL;
        self->unlisted = true;
        self->count = info.rows;
        return STATUS_OK;
    }
    uint32_t *numbers = malloc((info.rows + 1) * sizeof *numbers);
    TRY(ALLOCATED(numbers, "out of memory for a list of rows"));
    const enum status status = rows_device_numbers(rows, 0, info.rows, numbers);
    for (uint64_t i = 0; status == STATUS_OK && i < info.rows; i++)
        numbers[i] = number_at(self, numbers[i]);
    free(self->numbers);
    self->numbers = numbers;
    self->count = info.rows;
    return status;
}

/* Runs one step on a device: on the rows that are there, or on those in the files. */
static enum status run_on_device(struct rows *self, const struct rows_device_steps *steps, int device,
                                 int threads, uint64_t *removed)
{
    struct rows_device *rows = NULL;
    const struct resident *there = self->resident;
    const bool wraps = there && there->device == device, of_set = wraps ? there->of_set : !chosen(self);
    TRY(wraps ? wrap_rows(there, steps, &rows) : send_rows(self, steps, device, 0, threads, &rows));
    return accept(self, rows, device, of_set, removed);
}

/* Runs the mask and dedup on the device, and converts the rows. The numbers of invalid rows and of duplicates
 * are counted apart, so both steps need two passes. */
static enum status select_on_device(struct rows *self, const struct ops_select *how, int device)
{
    const enum dtype to = self->type;
    const struct rows_device_steps none = {.to = to, .align = self->shared->align};
    struct rows_device_steps mask = none, dedup = none;
    uint64_t invalid = 0, duplicates = 0;
    mask.mask = true;
    mask.norm_min = how->norm_min;
    mask.norm_max = how->norm_max;
    dedup.dedup = true;
    if (how->dedup)
        mask.to = DTYPE_STORED;
    if (how->mask)
        TRY(run_on_device(self, &mask, device, how->threads, &invalid));
    if (how->dedup && self->count > 0)
        TRY(run_on_device(self, &dedup, device, how->threads, &duplicates));
    const bool there = self->resident && rows_device_info(self->resident->rows).dtype == to;
    if (!how->mask && !how->dedup && !there)
        TRY(run_on_device(self, &none, device, how->threads, &invalid));
    self->invalid += invalid;
    self->duplicates += duplicates;
    return STATUS_OK;
}

/* Returns whether the device does all steps, on rows that are there. */
static bool stays_on_device(const struct rows *from, const struct fdsl_select_config *config)
{
    return from->resident && from->resident->device == config->device && !config->keep && !config->labels &&
           !config->sample;
}

/* Chooses rows that go to a device. The CPU draws samples. */
static enum status select_for_device(struct rows *from, const struct fdsl_select_config *config,
                                     struct ops_select how, struct rows *self)
{
    if (stays_on_device(from, config)) {
        atomic_fetch_add(&from->resident->users, 1);
        self->resident = from->resident;
    }
    if (config->sample) {
        TRY(select_rows(from, &how, self));
        how.mask = how.dedup = false;
    } else if (self->resident && self->resident->of_set) {
        self->unlisted = chosen(from);
    } else if (!self->numbers && from->numbers) {
        self->numbers = malloc(self->count * sizeof *self->numbers);
        TRY(ALLOCATED(self->numbers, "out of memory for a list of rows"));
        memcpy(self->numbers, from->numbers, self->count * sizeof *self->numbers);
    }
    TRY(check_left(from, self));
    TRY(select_on_device(self, &how, config->device));
    return check_left(from, self);
}

static enum status select_from(struct rows *from, const struct fdsl_select_config *config, struct rows *self)
{
    struct ops_select how = {.mask = config->validate,
                             .norm_min = (float)config->norm_min,
                             .norm_max = (float)config->norm_max,
                             .dedup = config->dedup,
                             .sample = config->sample,
                             .seed = config->seed,
                             .cancel = self->cancel};
    TRY(check_steps(from, config));
    TRY(find_type(config->dtype, from->type, &self->type));
    if (from->type != stored_type(from) && self->type != from->type)
        return status_set(STATUS_USAGE, "dtype: the rows were converted to %s already",
                          dtype_names[from->type]);
    TRY(lib_threads("num_threads", config->num_threads, &how.threads));
    TRY(lib_check_device(config->device));
    if (!stays_on_device(from, config))
        TRY(rows_list(from));
    TRY(choose(from, config, self));
    TRY(config->device < 0 ? select_rows(from, &how, self) : select_for_device(from, config, how, self));
    set_hash(self);
    return STATUS_OK;
}

enum status rows_select(struct rows *from, const struct fdsl_select_config *config, const atomic_bool *cancel,
                        struct rows **rows)
{
    struct rows *self = *rows = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    *self = (struct rows){.shared = from->shared,
                          .filtered = from->filtered,
                          .invalid = from->invalid,
                          .duplicates = from->duplicates,
                          .unsampled = from->unsampled,
                          .cancel = cancel};
    pthread_mutex_init(&self->lock, NULL);
    atomic_fetch_add(&from->shared->users, 1);
    const enum status status = select_from(from, config, self);
    self->cancel = NULL;
    if (status == STATUS_OK)
        return STATUS_OK;
    const struct failure failure = status_save(status);
    rows_free(self);
    *rows = NULL;
    return status_restore(&failure);
}

/* ---- Streams ---- */

enum status rows_check_format(const struct rows *rows, const struct fdsl_stream_config *config,
                              struct rows_format *format)
{
    TRY(find_type(config->dtype, rows->type, &format->type));
    if (rows->type != stored_type(rows) && format->type != rows->type)
        return status_set(STATUS_USAGE, "dtype: the rows were converted to %s already; leave it out",
                          dtype_names[rows->type]);
    format->width = (uint32_t)embeddings_width(rows->shared->set->columns, rows->shared->align);
    const uint32_t words[] = {(uint32_t)format->type, format->width};
    format->transform = checksum_seeded(words, sizeof words, 2);
    return STATUS_OK;
}

struct rows_order rows_order(const struct rows *rows, bool shuffle, uint64_t seed, uint64_t epoch)
{
    return (struct rows_order){rows, shuffle, draw_rows(seed, epoch, (uint32_t)rows->count)};
}

uint32_t rows_order_at(const struct rows_order *order, uint32_t position)
{
    return number_at(order->rows, order->shuffle ? draw_order_at(&order->order, position) : position);
}

#if defined(_OPENMP) && defined(HAVE_XXHASH)
static void convert_fast(const void *row, enum dtype from, enum dtype to, uint32_t columns, void *out)
{
    const struct ops_format format = {.from = from,
                                      .to = to == DTYPE_F32   ? OPS_F32
                                            : to == DTYPE_F16 ? OPS_F16
                                                              : OPS_BF16,
                                      .columns = columns};
    ops_convert_fast(&format, row, out, NULL);
}
#else
#define convert_fast NULL
#endif

/* Opens a stream in the memory of a device. */
static enum status open_device_stream(struct rows *rows, const struct fdsl_stream_config *config,
                                      const struct rows_format *format, const struct rows_plan *plan,
                                      struct device_batches **batches)
{
    const struct rows_device_steps steps = {.to = format->type, .align = rows->shared->align};
    const struct resident *there =
        rows->resident && rows->resident->device == config->device ? rows->resident : NULL;
    struct row_batches_request request = {.owned = true,
                                          .labels = rows_labelled(rows),
                                          .seed = plan->seed,
                                          .shuffle = plan->shuffle,
                                          .global = plan->global,
                                          .rank = plan->rank,
                                          .ranks = plan->ranks,
                                          .steps = plan->plan.steps,
                                          .capacity = plan->plan.capacity,
                                          .slots = config->prefetch + config->held};
    int threads;
    TRY(lib_threads("num_threads", config->num_threads, &threads));
    embeddings_warn_idle(format->width, "set align to 8 or 16");
    if (there && format->type == rows_device_info(there->rows).dtype) {
        request.rows = there->rows;
        request.owned = false;
    } else if (there)
        TRY(wrap_rows(there, &steps, &request.rows));
    else
        TRY(send_rows(rows, &steps, config->device, config->resident ? 0 : STREAMED_BYTES, threads,
                      &request.rows));
    return row_batches_open(&request, batches);
}

enum status rows_stream_open(struct rows *rows, const struct fdsl_stream_config *config,
                             const struct rows_format *format, const struct rows_plan *plan,
                             struct stream **stream, struct device_batches **batches)
{
    const struct rows_set *shared = rows->shared;
    struct embedding_rows reader = {.set = shared->set,
                                    .labels = shared->labels,
                                    .to = format->type,
                                    .width = format->width,
                                    .convert = convert_fast};
    struct generated_stream_request request = {.count = (uint32_t)shared->set->rows,
                                               .sample_bytes = format->width * dtype_bytes(format->type),
                                               .type = format->type,
                                               .plan = plan->plan,
                                               .ahead = config->prefetch,
                                               .held = config->held};
    *stream = NULL;
    if (config->device >= 0) {
        TRY(open_device_stream(rows, config, format, plan, batches));
        *stream = &(*batches)->stream;
        return STATUS_OK;
    }
    TRY(rows_list(rows));
    TRY(lib_threads("num_threads", config->num_threads, &reader.threads));
    TRY(embedding_rows_open(&reader, &request.generator));
    TRY(lib_pooled_open(reader.threads, &request.generator));
    return generated_stream_open(&request, stream);
}
