/* The sample source `embeddings`: reads sets of embeddings, drops bad rows and duplicates, and converts the
 * rest. A variant of `ops` checks the norms, hashes and converts. Each sample consists of a file with some of
 * the rows and a file with the hashes of these rows. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "data/checksum.h"
#include "data/embeddings.h"
#include "data/npy.h"
#include "data/tensor_file.h"
#include "data/source.h"
#include "machine/guard.h"
#include "machine/host.h"
#include "ops/ops.h"
#include "ops/select.h"

#define FILE_BYTES    (UINT64_C(128) << 20) /* default size of the rows in an output file */
#define DECODED_BYTES (UINT64_C(256) << 20) /* rows that are decoded for one run, if they are checked */
#define RUN_ROWS      (UINT64_C(1) << 24)   /* rows that are checked by one run */
#define TASK_ROWS     256
#define RING          4 /* chunks in flight on a GPU, and their size, as by default in `ops` */
#define CHUNK_BYTES   (UINT64_C(16) << 20)

enum encoding { SAFETENSORS, NPY };
enum part { VALUES, SCALES, TENSOR_SCALE, PARTS };
#define TENSORS_MAX (PARTS + 1) /* of a file: also the labels */

struct embeddings_parameters {
    const char *source, *tensor, *labels, *variant;
    double norm_min, norm_max;
    uint64_t rows_per_file, align;
    int to, fp8, encoding;
    bool dedup;
};

struct cleaner {
    struct embeddings *set;
    struct guard guard;
    struct resources resources;
    const struct variant *variant;
    void *state;    /* of the variant, while there are runs */
    struct ops ops; /* input of the variant: the rows of the next run */
    struct ops_control control;
    struct ops_part *parts; /* of `ops` */
    uint8_t *decoded;       /* rows of a run that cannot be read in place */
    struct ops_format format;
    enum encoding encoding;
    struct ops_scan scan; /* of all rows of the set; without hashes when open() returns */
    uint64_t rows_per_file;
    uint64_t *starts; /* per output file: its first row in the set */
    int32_t *labels;  /* per row of the set; NULL: the output has no labels */
};

/* ---- Runs of the variant ---- */

/* Ends the runs, and frees their memory. */
static void end_runs(struct cleaner *cleaner)
{
    if (cleaner->state)
        cleaner->variant->teardown(cleaner->state);
    free(cleaner->parts);
    free(cleaner->decoded);
    cleaner->state = NULL;
    cleaner->parts = NULL;
    cleaner->ops.parts = NULL;
    cleaner->decoded = NULL;
}

static void embeddings_source_close(void *state)
{
    struct cleaner *cleaner = state;
    end_runs(cleaner);
    guard_close(&cleaner->guard);
    embeddings_close(cleaner->set);
    ops_scan_free(&cleaner->scan);
    free(cleaner->starts);
    free(cleaner->labels);
    free(cleaner);
}

/* Prepares runs with these steps on at most `rows` rows. */
static enum status begin_runs(struct cleaner *cleaner, const bool steps[OPS_STEPS], uint64_t rows)
{
    struct ops *ops = &cleaner->ops;
    end_runs(cleaner);
    memcpy(ops->steps, steps, sizeof ops->steps);
    ops->count = rows;
    if (!embeddings_in_place(cleaner->set)) {
        TRY(memory_check(rows * ops->row_bytes, "the decoded rows of a file", "lower --rows-per-file"));
        cleaner->decoded = ops_allocate(rows * ops->row_bytes);
        TRY(ALLOCATED(cleaner->decoded, "out of memory for the decoded rows; lower --rows-per-file"));
    }
    return cleaner->variant->setup(&cleaner->resources, ops, &cleaner->state);
}

/* Makes room for `count` parts. */
static enum status allocate_parts(struct cleaner *cleaner, uint64_t count)
{
    free(cleaner->parts);
    cleaner->ops.parts = cleaner->parts = calloc(count + 1, sizeof *cleaner->parts);
    cleaner->ops.part_count = 0;
    return ALLOCATED(cleaner->parts, "out of memory for the list of rows");
}

/* Adds consecutive rows of one part of the set to the next run. */
static void add_rows(struct cleaner *cleaner, const uint8_t *rows, uint64_t count)
{
    struct ops_part *last = cleaner->parts + cleaner->ops.part_count++;
    const uint64_t before = cleaner->ops.part_count > 1 ? last[-1].first + last[-1].count : 0;
    *last = (struct ops_part){rows, before, count};
}

/* The rows of a run that have to be decoded. `numbers` is NULL if they are consecutive. */
struct decoding {
    struct cleaner *cleaner;
    uint64_t first;
    const uint64_t *numbers;
};

static void decode(void *context, uint64_t task, int thread)
{
    const struct decoding *decoding = context;
    const struct cleaner *cleaner = decoding->cleaner;
    const struct ops *ops = &cleaner->ops;
    (void)thread;
    for (uint64_t i = task * TASK_ROWS; i < (task + 1) * TASK_ROWS && i < ops->count; i++)
        embeddings_decode(cleaner->set, decoding->numbers ? decoding->numbers[i] : decoding->first + i,
                          cleaner->decoded + i * ops->row_bytes);
}

static uint64_t tasks_of(uint64_t rows)
{
    return (rows + TASK_ROWS - 1) / TASK_ROWS;
}

/* Takes `count` rows for the next run: those in `numbers`, in ascending order, or if `numbers` is NULL, the
 * rows from `first` on. */
static enum status take_rows(struct cleaner *cleaner, uint64_t first, const uint64_t *numbers, uint64_t count)
{
    const struct embeddings *set = cleaner->set;
    struct decoding decoding = {cleaner, first, numbers};
    cleaner->ops.count = count;
    if (cleaner->decoded) {
        parallel_for(cleaner->resources.threads, tasks_of(count), decode, &decoding);
        TRY(allocate_parts(cleaner, 1));
        add_rows(cleaner, cleaner->decoded, count);
        return STATUS_OK;
    }
    uint64_t runs = 1; /* of consecutive rows */
    for (uint64_t i = 1; numbers && i < count; i++)
        runs += numbers[i] != numbers[i - 1] + 1;
    TRY(allocate_parts(cleaner, runs + set->part_count));
    for (uint64_t i = 0, next; i < count; i = next) {
        const uint64_t row = numbers ? numbers[i] : first + i;
        const struct embeddings_part *part = embeddings_part_of(set, row);
        uint64_t most = part->first + part->rows - row;
        most = most < count - i ? most : count - i;
        for (next = numbers ? i + 1 : i + most; next - i < most && numbers[next] == row + (next - i);)
            next++;
        add_rows(cleaner, part->values + (row - part->first) * cleaner->ops.row_bytes, next - i);
    }
    return STATUS_OK;
}

static enum status run(struct cleaner *cleaner)
{
    struct run_time unused;
    TRY(variant_run(cleaner->variant, cleaner->state, 0, &unused));
    return ops_check_rows(&cleaner->ops);
}

/* Copies all elements of a result of the latest run. */
static enum status fetch(struct cleaner *cleaner, enum ops_array array, void *to)
{
    struct ops_fetch fetch = {array, 0, cleaner->ops.count, to, {0}};
    return cleaner->variant->fetch(cleaner->state, &fetch);
}

/* ---- Choosing rows ---- */

/* Implements ops_scan.run. */
static enum status check_rows(void *context, uint64_t first, uint64_t count, void **state)
{
    struct cleaner *cleaner = context;
    TRY(take_rows(cleaner, first, NULL, count));
    *state = cleaner->state;
    return run(cleaner);
}

/* The search for the largest finite magnitude of the kept rows. */
struct scan {
    const struct cleaner *cleaner;
    uint32_t *largest; /* per thread, as bits */
    uint8_t *rows;     /* per thread: a row, if rows are decoded */
};

static void scan_rows(void *context, uint64_t task, int thread)
{
    const struct scan *scan = context;
    const struct cleaner *cleaner = scan->cleaner;
    const struct embeddings *set = cleaner->set;
    const size_t bytes = cleaner->ops.row_bytes;
    uint8_t *copy = scan->rows + (size_t)thread * bytes;
    for (uint64_t i = task * TASK_ROWS; i < (task + 1) * TASK_ROWS && i < set->rows; i++) {
        const struct embeddings_part *part = embeddings_part_of(set, i);
        if (!cleaner->scan.kept[i])
            continue;
        if (!part->values)
            embeddings_decode(set, i, copy);
        scan->largest[thread] =
            ops_largest_finite(part->values ? part->values + (i - part->first) * bytes : copy,
                               cleaner->format.from, cleaner->format.columns, scan->largest[thread]);
    }
}

/* Computes the scale of NVFP4 for the whole set. Runs of the variant see only the rows of one file. */
static enum status scale_tensor(struct cleaner *cleaner)
{
    const size_t threads = (size_t)cleaner->resources.threads;
    FREED uint32_t *each = calloc(threads, sizeof *each);
    FREED uint8_t *rows = malloc(threads * cleaner->ops.row_bytes);
    struct scan scan = {cleaner, each, rows};
    uint32_t largest = 0;
    TRY(ALLOCATED(each && rows, "out of memory"));
    parallel_for(cleaner->resources.threads, tasks_of(cleaner->set->rows), scan_rows, &scan);
    for (size_t i = 0; i < threads; i++)
        largest = each[i] > largest ? each[i] : largest;
    cleaner->format.tensor_scale = nvfp4_tensor_scale(largest);
    return ops_check_rows(&cleaner->ops);
}

/* Runs the scan and, for NVFP4, computes the scale of the tensor. */
static enum status choose_rows(struct cleaner *cleaner, bool dedup)
{
    static const bool steps[OPS_STEPS] = {[OPS_MASK] = true, [OPS_HASH] = true};
    const uint64_t rows = cleaner->set->rows, most = embeddings_in_place(cleaner->set)
                                                         ? RUN_ROWS
                                                         : DECODED_BYTES / cleaner->ops.row_bytes;
    struct ops_scan *scan = &cleaner->scan;
    *scan = (struct ops_scan){.count = rows,
                              .chunk = most < rows ? most : rows,
                              .mask = true,
                              .hash = true,
                              .dedup = dedup,
                              .threads = cleaner->resources.threads,
                              .advice = "prepare fewer rows at a time",
                              .variant = cleaner->variant,
                              .run = check_rows,
                              .context = cleaner};
    TRY(begin_runs(cleaner, steps, scan->chunk));
    TRY(ops_scan(scan));
    end_runs(cleaner);
    if (cleaner->format.to == OPS_NVFP4)
        TRY(scale_tensor(cleaner));
    char duplicates[64] = "";
    if (dedup)
        snprintf(duplicates, sizeof duplicates, ", and %" PRIu64 " are duplicates", scan->valid - scan->left);
    status_say("embeddings: %" PRIu64 " of %" PRIu64 " rows are kept; %" PRIu64 " are invalid%s", scan->left,
               rows, rows - scan->valid, duplicates);
    return scan->left > 0
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "none of the %" PRIu64 " rows has a norm from %g to %g; change --norm-min or "
                            "--norm-max",
                            rows, (double)cleaner->ops.norm_min, (double)cleaner->ops.norm_max);
}

/* Finds the first row of each output file. */
static enum status find_starts(struct cleaner *cleaner, uint64_t files)
{
    cleaner->starts = malloc(files * sizeof *cleaner->starts);
    TRY(ALLOCATED(cleaner->starts, "out of memory"));
    uint64_t kept = 0;
    for (uint64_t i = 0; i < cleaner->set->rows; i++) {
        if (cleaner->scan.kept[i] && kept % cleaner->rows_per_file == 0)
            cleaner->starts[kept / cleaner->rows_per_file] = i;
        kept += cleaner->scan.kept[i];
    }
    return STATUS_OK;
}

/* ---- Producing files ---- */

/* An output file in memory. */
struct product {
    struct cleaner *cleaner;
    uint64_t count, *numbers; /* numbers of its rows in the set */
    uint8_t *bytes, *values, *scales;
    size_t size;
    uint64_t *hashes;
};

/* Returns the hash of the stored bytes of a row: its values, then its scales. */
static uint64_t hash_row(const uint8_t *values, size_t value_bytes, const uint8_t *scales, size_t scale_bytes)
{
    uint8_t joined[EMBEDDINGS_COLUMNS_MAX / 2 + EMBEDDINGS_COLUMNS_MAX / NVFP4_BLOCK + 2 * MXFP4_BLOCK];
    if (scale_bytes == 0)
        return checksum_whole(values, value_bytes);
    memcpy(joined, values, value_bytes);
    memcpy(joined + value_bytes, scales, scale_bytes);
    return checksum_whole(joined, value_bytes + scale_bytes);
}

static void hash_rows(void *context, uint64_t task, int thread)
{
    struct product *product = context;
    const struct ops_format *format = &product->cleaner->format;
    size_t value_bytes = ops_value_bytes(format->to, format->columns);
    size_t scale_bytes = ops_scale_bytes(format->to, format->columns);
    (void)thread;
    for (uint64_t j = task * TASK_ROWS; j < (task + 1) * TASK_ROWS && j < product->count; j++)
        product->hashes[j] = hash_row(product->values + j * value_bytes, value_bytes,
                                      product->scales + j * scale_bytes, scale_bytes);
}

/* Lists the rows of an output file. */
static enum status find_rows(struct product *product, uint64_t number)
{
    const struct cleaner *cleaner = product->cleaner;
    uint64_t begin = number * cleaner->rows_per_file, left = cleaner->scan.left - begin;
    product->count = left < cleaner->rows_per_file ? left : cleaner->rows_per_file;
    product->numbers = malloc(product->count * sizeof *product->numbers);
    product->hashes = malloc(product->count * sizeof *product->hashes);
    TRY(ALLOCATED(product->numbers && product->hashes, "out of memory for the rows of a file"));
    uint64_t row = cleaner->starts[number];
    for (uint64_t j = 0; j < product->count; row++)
        if (cleaner->scan.kept[row])
            product->numbers[j++] = row;
    return STATUS_OK;
}

/* Describes the tensors of an output file. Returns their number. */
static size_t describe_tensors(const struct product *product, struct safetensor tensors[PARTS])
{
    static const char *const types[] = {"F32", "F16", "BF16", "F8_E4M3", "U8", "U8"};
    const struct ops_format *format = &product->cleaner->format;
    size_t value_bytes = ops_value_bytes(format->to, format->columns);
    size_t scale_bytes = ops_scale_bytes(format->to, format->columns);
    tensors[VALUES] =
        (struct safetensor){.name = "embeddings",
                            .type = types[format->to],
                            .axes = 2,
                            .shape = {product->count, scale_bytes ? value_bytes : format->columns},
                            .bytes = product->count * value_bytes};
    tensors[SCALES] = (struct safetensor){.name = "scales",
                                          .type = format->to == OPS_NVFP4 ? "F8_E4M3" : "U8",
                                          .axes = 2,
                                          .shape = {product->count, scale_bytes},
                                          .bytes = product->count * scale_bytes};
    tensors[TENSOR_SCALE] =
        (struct safetensor){.name = "tensor_scale", .type = "F32", .bytes = sizeof format->tensor_scale};
    return scale_bytes == 0 ? SCALES : format->to == OPS_NVFP4 ? PARTS : TENSOR_SCALE;
}

/* Formats what precedes the rows in a .safetensors file. If the last block of a row of fp4 has padding, the
 * shapes do not show the number of values per row, so the metadata does. */
static enum status format_header(const struct ops_format *format, const struct safetensor *tensors,
                                 size_t count, char **header, size_t *size)
{
    char columns[16];
    const uint32_t block = ops_block(format->to);
    const bool padded = block && format->columns % block != 0;
    const char *const about[] = {"fdsl-bench", "embeddings", padded ? "columns" : NULL, columns, NULL};
    snprintf(columns, sizeof columns, "%" PRIu32, format->columns);
    return safetensors_header(about, tensors, count, header, size);
}

/* Writes the labels of the rows of a file, which come before the rows, because they need an alignment of 8
 * bytes. */
static void write_labels(const struct product *product, uint8_t *to)
{
    for (uint64_t j = 0; product->cleaner->labels && j < product->count; j++) {
        const int64_t label = product->cleaner->labels[product->numbers[j]];
        memcpy(to + j * sizeof label, &label, sizeof label);
    }
}

/* Allocates the memory of an output file. Writes its header, the labels and, for NVFP4, the scale of the
 * tensor. */
static enum status begin_file(struct product *product)
{
    const struct ops_format *format = &product->cleaner->format;
    struct safetensor all[TENSORS_MAX], *tensors = all + 1;
    char npy[NPY_HEADER_MAX], shape[NPY_SHAPE_MAX], *header = npy;
    const bool labelled = product->cleaner->labels != NULL;
    size_t count = describe_tensors(product, tensors), length;
    all[0] = (struct safetensor){.name = EMBEDDING_LABELS,
                                 .type = "I64",
                                 .axes = 1,
                                 .shape = {product->count},
                                 .bytes = labelled ? product->count * sizeof(int64_t) : 0};
    snprintf(shape, sizeof shape, "%" PRIu64 ", %" PRIu32, product->count, format->columns);
    if (product->cleaner->encoding == NPY)
        length = npy_header_make(npy, format->to == OPS_F32 ? "<f4" : "<f2", shape);
    else
        TRY(format_header(format, all + !labelled, count + labelled, &header, &length));
    product->size = length + all[0].bytes;
    for (size_t i = 0; i < count; i++)
        product->size += tensors[i].bytes;
    product->bytes = malloc(product->size);
    if (product->bytes) {
        memcpy(product->bytes, header, length);
        write_labels(product, product->bytes + length);
        product->values = product->bytes + length + all[0].bytes;
        product->scales = product->values + tensors[VALUES].bytes;
        if (count == PARTS)
            memcpy(product->scales + tensors[SCALES].bytes, &format->tensor_scale,
                   sizeof format->tensor_scale);
    }
    if (header != npy)
        free(header);
    return ALLOCATED(product->bytes, "out of memory for a file of %zu bytes; lower --rows-per-file",
                     product->size);
}

/* Converts the rows of an output file. */
static enum status convert_rows(struct product *product)
{
    struct cleaner *cleaner = product->cleaner;
    TRY(take_rows(cleaner, 0, product->numbers, product->count));
    TRY(run(cleaner));
    TRY(fetch(cleaner, OPS_VALUES, product->values));
    if (ops_block(cleaner->format.to))
        TRY(fetch(cleaner, OPS_SCALES, product->scales));
    parallel_for(cleaner->resources.threads, tasks_of(product->count), hash_rows, product);
    return STATUS_OK;
}

static enum status make_file(struct cleaner *cleaner, uint64_t number, struct source_sample *sample)
{
    struct product product = {.cleaner = cleaner};
    enum status status = find_rows(&product, number);
    if (status == STATUS_OK)
        status = begin_file(&product);
    if (status == STATUS_OK) {
        status = convert_rows(&product);
        source_add(sample, cleaner->encoding == NPY ? "npy" : "safetensors", product.bytes, product.size);
        source_add(sample, "xxh3", product.hashes, product.count * sizeof *product.hashes);
        product.hashes = NULL;
    }
    free(product.numbers);
    free(product.hashes);
    return status;
}

static enum status embeddings_source_make(void *state, uint64_t first, uint64_t count,
                                          struct source_sample *samples)
{
    for (uint64_t i = 0; i < count; i++)
        TRY(make_file(state, first + i, &samples[i]));
    return STATUS_OK;
}

static void embeddings_source_describe(const void *state, uint64_t number, char texts[][SOURCE_TEXT_MAX])
{
    const struct cleaner *cleaner = state;
    uint64_t begin = number * cleaner->rows_per_file, left = cleaner->scan.left - begin;
    snprintf(texts[0], SOURCE_TEXT_MAX, "%" PRIu64, begin);
    snprintf(texts[1], SOURCE_TEXT_MAX, "%" PRIu64,
             left < cleaner->rows_per_file ? left : cleaner->rows_per_file);
}

/* ---- Opening ---- */

static enum status check_options(const struct source_request *request)
{
    const struct embeddings_parameters *parameters = request->parameters;
    if (!parameters->source)
        return status_set(STATUS_USAGE, "name the files or folders to read with --source FILE|DIR[,...]");
    TRY(ops_check_bounds(parameters->norm_min, parameters->norm_max));
    if (options_given(request->options, "fp8") && parameters->to != 1 + OPS_FP8)
        return status_set(STATUS_USAGE, "--fp8 has an effect only with --to fp8; add it, or drop --fp8");
    return source_check_target(parameters->source, request->target);
}

/* Sets cleaner->variant, if a variant of ops can run. */
static enum status take_variant(struct cleaner *cleaner, const struct variant_entry *entry)
{
    if (strcmp(entry->workload, "ops") != 0)
        return status_set(STATUS_USAGE, "--variant %s: not a variant of ops; --list shows all variants",
                          entry->name);
    const enum status status = variant_available(entry, &cleaner->resources);
    cleaner->variant = entry->variant;
    return status_prefix(status, "--variant %s", entry->name);
}

/* Selects the first variant for --variant auto that can run. */
static enum status choose_automatically(struct cleaner *cleaner)
{
    const struct variant_entry **candidates;
    size_t count;
    TRY(variant_select("auto", "ops", &candidates, &count));
    enum status status = STATUS_UNAVAILABLE;
    for (size_t i = 0; i < count && status != STATUS_OK; i++)
        status = take_variant(cleaner, candidates[i]);
    free(candidates);
    return status;
}

/* Selects the requested variant. The default is ops-omp, or ops-naive if the build lacks ops-omp. */
static enum status choose_variant(struct cleaner *cleaner, const char *name)
{
    if (name && variant_is_auto(name))
        return choose_automatically(cleaner);
    if (name && (strchr(name, ',') || strcmp(name, "all") == 0))
        return status_set(STATUS_USAGE, "--variant %.80s: one variant writes the files; name one, or auto",
                          name);
    const struct variant_entry *entry = variant_find(name ? name : "ops-omp");
    if (!name && !entry->variant)
        entry = variant_find("ops-naive");
    return entry ? take_variant(cleaner, entry) : variant_unknown("--variant: ", name);
}

static enum status check_encoding(const struct cleaner *cleaner)
{
    if (cleaner->encoding == SAFETENSORS || cleaner->format.to == OPS_F32 || cleaner->format.to == OPS_F16)
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      "--encode npy: NumPy has no type %s; use --encode safetensors, or --to f16",
                      ops_type_names[cleaner->format.to]);
}

/* Sets `*to` to the type to which --to stored converts. Rows of NVFP4 would get another scale of the tensor,
 * and lose precision. */
static enum status keep_type(const struct embeddings *set, enum ops_type *to)
{
    static const enum ops_type types[] = {OPS_F32, OPS_F16, OPS_BF16, OPS_F32, OPS_FP8, OPS_NVFP4, OPS_MXFP4};
    *to = types[set->stored];
    return *to != OPS_NVFP4
               ? STATUS_OK
               : status_set(STATUS_USAGE, "rows that are stored as nvfp4 would be rounded again, because the "
                                          "scale of the set changes; choose a type with --to");
}

/* Reads the labels of the rows, if there are any to keep. */
static enum status read_labels(const char *name, struct cleaner *cleaner)
{
    if (!name)
        return STATUS_OK;
    if (cleaner->encoding == NPY)
        return status_set(STATUS_USAGE,
                          "--labels: a .npy file has no room for labels; use --encode safetensors");
    return status_prefix(embedding_labels(cleaner->set, name, INT32_MIN, INT32_MAX, &cleaner->labels),
                         "--labels");
}

static enum status fill_cleaner(const struct embeddings_parameters *parameters, struct cleaner *cleaner)
{
    struct ops *ops = &cleaner->ops;
    enum dtype from = cleaner->set->dtype;
    cleaner->format = (struct ops_format){
        .from = from,
        .to = (enum ops_type)(parameters->to - 1),
        .columns = cleaner->set->columns,
        .saturate = parameters->fp8 == 0,
    };
    if (parameters->to == 0)
        TRY(keep_type(cleaner->set, &cleaner->format.to));
    *ops = (struct ops){.format = cleaner->format,
                        .scaled = true,
                        .norm_min = (float)parameters->norm_min,
                        .norm_max = (float)parameters->norm_max,
                        .row_bytes = embeddings_row_bytes(cleaner->set),
                        .set = cleaner->set,
                        .control = &cleaner->control,
                        .async = true,
                        .pool = true,
                        .ring = RING,
                        .chunk_bytes = CHUNK_BYTES};
    cleaner->encoding = (enum encoding)parameters->encoding;
    return check_encoding(cleaner);
}

/* Opens the set, and checks that the options fit it. */
static enum status open_set(const struct embeddings_parameters *parameters, struct cleaner *cleaner)
{
    TRY(embeddings_open(parameters->source, parameters->tensor ? parameters->tensor : "", &cleaner->set));
    if (cleaner->set->rows == 0)
        return status_set(STATUS_FAILED, "%s: all its tensors have 0 rows; name files with rows",
                          parameters->source);
    const uint64_t align = parameters->align ? parameters->align : 1;
    TRY(status_prefix(embeddings_align(cleaner->set, (uint32_t)align), "--align"));
    TRY(fill_cleaner(parameters, cleaner));
    if (cleaner->format.to != OPS_F32)
        embeddings_warn_idle(cleaner->format.columns, "pad them with --align 8, if a GPU will train on them");
    return STATUS_OK;
}

static enum status embeddings_source_open(const struct source_request *request, struct source_facts *facts,
                                          void **state)
{
    static const bool steps[OPS_STEPS] = {[OPS_CONVERT] = true};
    const struct embeddings_parameters *parameters = request->parameters;
    TRY(check_options(request));
    struct cleaner *cleaner = *state = calloc(1, sizeof *cleaner);
    TRY(ALLOCATED(cleaner, "out of memory"));
    cleaner->resources = request->resources;
    TRY(choose_variant(cleaner, parameters->variant));
    TRY(guard_open(&cleaner->guard));
    guard_fill(&cleaner->guard);
    TRY(open_set(parameters, cleaner));
    TRY(read_labels(parameters->labels, cleaner));
    TRY(choose_rows(cleaner, parameters->dedup));
    size_t bytes = ops_value_bytes(cleaner->format.to, cleaner->format.columns) +
                   ops_scale_bytes(cleaner->format.to, cleaner->format.columns);
    cleaner->rows_per_file = parameters->rows_per_file ? parameters->rows_per_file : FILE_BYTES / bytes;
    facts->samples = (cleaner->scan.left - 1) / cleaner->rows_per_file + 1;
    facts->sample_bytes = cleaner->rows_per_file * bytes;
    facts->rows = cleaner->scan.left;
    facts->identity = checksum_whole((const uint8_t *)cleaner->scan.hashes,
                                     cleaner->set->rows * sizeof *cleaner->scan.hashes);
    if (cleaner->labels)
        facts->identity =
            checksum_seeded(cleaner->labels, cleaner->set->rows * sizeof *cleaner->labels, facts->identity);
    free(cleaner->scan.hashes);
    cleaner->scan.hashes = NULL;
    TRY(find_starts(cleaner, facts->samples));
    cleaner->ops.format = cleaner->format;
    return begin_runs(cleaner, steps,
                      cleaner->scan.left < cleaner->rows_per_file ? cleaner->scan.left
                                                                  : cleaner->rows_per_file);
}

static const char *const encodings[] = {"safetensors", "npy", NULL};
static const char *const targets[] = {"stored", "f32", "f16", "bf16", "fp8", "nvfp4", "mxfp4", NULL};

#define AT(field) offsetof(struct embeddings_parameters, field)
static const struct option_spec options[] = {
    {"source", "PATHS", OPTION_TEXT, AT(source),
     .help = "files (.npy, .npz, .safetensors, .pt, .pth, .pth.tar) and folders with such files, separated "
             "by ','; shell patterns are allowed"},
    {"tensor", "NAME", OPTION_TEXT, AT(tensor), .column = COLUMN,
     .help = "read the tensors with this name or pattern (default: the floating-point tensors of each file)"},
    {"labels", "NAME|PATHS", OPTION_TEXT, AT(labels), .column = COLUMN,
     .help = "labels of the rows: a tensor in their files, or files with one integer per row. The labels of "
             "the rows that are kept are written as the tensor labels"},
    {"variant", "NAME", OPTION_TEXT, AT(variant),
     .help = "variant of ops that checks, hashes and converts the rows: ops-naive, ops-omp, ops-cuda or "
             "ops-fused; auto: the best one that can run here. The files are the same (default: ops-omp)"},
    {"align", "N", OPTION_COUNT, AT(align), .minimum = 1, .maximum = EMBEDDINGS_ALIGN_MAX, .column = COLUMN,
     .help = "pad rows with zeros to a multiple of N values; 8 or 16 suit tensor cores"},
    {"norm-min", "X", OPTION_REAL, AT(norm_min), .fallback = "0.1", .maximum = OPS_NORM_MOST,
     .column = COLUMN, .help = "smallest valid norm: 0, or at least 1e-15; other rows are dropped"},
    {"norm-max", "X", OPTION_REAL, AT(norm_max), .fallback = "100", .minimum = OPS_NORM_LEAST,
     .maximum = OPS_NORM_MOST, .column = COLUMN, .help = "largest valid norm"},
    {"dedup", NULL, OPTION_FLAG, AT(dedup), .column = COLUMN,
     .help = "drop rows whose hash equals that of an earlier row"},
    {"to", "TYPE", OPTION_CHOICE, AT(to), .fallback = "stored", .choices = targets, .column = COLUMN,
     .help = "type that rows are converted to; stored keeps the type of the files. TYPE is one of"},
    {"fp8", "MODE", OPTION_CHOICE, AT(fp8), .fallback = "saturate", .choices = ops_fp8_modes,
     .column = COLUMN,
     .help = "result for magnitudes that are too large for fp8: 448 (saturate) or NaN (nan). MODE is one of"},
    {"encode", "KIND", OPTION_CHOICE, AT(encoding), .fallback = "safetensors", .choices = encodings,
     .column = COLUMN, .help = "file format; npy supports only f32 and f16. KIND is one of"},
    {"rows-per-file", "N", OPTION_COUNT, AT(rows_per_file), .minimum = 1, .maximum = 1e9, .column = COLUMN,
     .help = "rows per file (default: about 128 MiB per file)"},
};

const struct source source_embeddings = {
    .name = "embeddings",
    .summary = "cleaned sets of embeddings: rows with valid norms, converted, optionally without duplicates",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct embeddings_parameters),
    .whole_files = true,
    .columns = embeddings_sample_columns,
    .open = embeddings_source_open,
    .close = embeddings_source_close,
    .make = embeddings_source_make,
    .describe = embeddings_source_describe,
};
