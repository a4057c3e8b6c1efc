/* The sample source `embeddings`: reads sets of embeddings, drops bad rows and duplicates, and converts the
 * rest. Each sample consists of a file with some of the rows and a file with the hashes of these rows. */
#include <inttypes.h>
#include <stdatomic.h>
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

#define FILE_BYTES (UINT64_C(128) << 20) /* default size of the rows in an output file */
#define TASK_ROWS  256

enum encoding { SAFETENSORS, NPY };
enum part { VALUES, SCALES, TENSOR_SCALE, PARTS };

struct embeddings_parameters {
    const char *source, *tensor;
    double norm_min, norm_max;
    uint64_t rows_per_file;
    int to, fp8, encoding;
    bool dedup;
};

struct cleaner {
    struct embeddings *set;
    struct guard guard;
    int threads;
    float norm_min, norm_max;
    struct ops_format format;
    enum encoding encoding;
    uint8_t *kept;    /* per row of the set */
    uint64_t *hashes; /* XXH3-64 of each row of the set, until open() returns */
    uint8_t *rows;    /* per thread: a row and its converted values, aligned */
    size_t row_bytes, row_room;
    uint64_t kept_count, rows_per_file;
    uint64_t *starts; /* per output file: its first row in the set */
    atomic_bool lost; /* a row could not be read */
};

static void embeddings_source_close(void *state)
{
    struct cleaner *cleaner = state;
    guard_close(&cleaner->guard);
    embeddings_close(cleaner->set);
    free(cleaner->kept);
    free(cleaner->hashes);
    free(cleaner->rows);
    free(cleaner->starts);
    free(cleaner);
}

/* ---- Reading rows ---- */

/* Copies a row of the set into this thread's memory. */
static const uint8_t *read_row(struct cleaner *cleaner, uint64_t row, int thread)
{
    const struct embeddings_part *parts = cleaner->set->parts;
    size_t low = 0,
           high = cleaner->set->part_count; /* invariant: parts[low].first <= row < parts[high].first */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        *(parts[middle].first <= row ? &low : &high) = middle;
    }
    uint8_t *copy = cleaner->rows + (size_t)thread * cleaner->row_room;
    if (!guard_copy(copy, parts[low].values + (row - parts[low].first) * cleaner->row_bytes,
                    cleaner->row_bytes))
        atomic_store(&cleaner->lost, true);
    return copy;
}

/* Returns STATUS_FAILED if a row could not be read or a file was changed. */
static enum status check_lost(struct cleaner *cleaner)
{
    TRY(embeddings_check_files(cleaner->set));
    return atomic_load(&cleaner->lost)
               ? status_set(STATUS_FAILED, "a file of the set could not be read: input/output error")
               : STATUS_OK;
}

/* ---- Choosing rows ---- */

FDSL_FMA_CLONES static bool row_valid(const struct cleaner *cleaner, const uint8_t *row)
{
    return ops_in_bounds(ops_square_sum(row, cleaner->format.from, cleaner->format.columns),
                         cleaner->norm_min, cleaner->norm_max);
}

struct scan {
    struct cleaner *cleaner;
    uint32_t *largest; /* per thread: bits of the largest finite magnitude of its valid rows */
};

static void scan_rows(void *context, uint64_t task, int thread)
{
    const struct scan *scan = context;
    struct cleaner *cleaner = scan->cleaner;
    for (uint64_t i = task * TASK_ROWS; i < (task + 1) * TASK_ROWS && i < cleaner->set->rows; i++) {
        const uint8_t *row = read_row(cleaner, i, thread);
        cleaner->hashes[i] = checksum_whole(row, cleaner->row_bytes);
        cleaner->kept[i] = row_valid(cleaner, row);
        if (cleaner->kept[i] && cleaner->format.to == OPS_NVFP4)
            scan->largest[thread] =
                ops_largest_finite(row, cleaner->format.from, cleaner->format.columns, scan->largest[thread]);
    }
}

static uint64_t count_kept(const struct cleaner *cleaner)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < cleaner->set->rows; i++)
        count += cleaner->kept[i];
    return count;
}

static enum status drop_duplicates(struct cleaner *cleaner)
{
    uint64_t bytes = duplicates_slots(cleaner->set->rows) * sizeof(uint64_t);
    TRY(memory_check(bytes, "the hash table of --dedup", "prepare fewer rows at a time"));
    FREED uint64_t *table = malloc(bytes);
    TRY(ALLOCATED(table, "out of memory for the hash table of --dedup"));
    duplicates_drop(cleaner->threads, cleaner->hashes, cleaner->set->rows, cleaner->kept, table);
    return STATUS_OK;
}

/* Computes cleaner->kept and, for NVFP4, the scale of the tensor. */
static enum status choose_rows(struct cleaner *cleaner, bool dedup)
{
    uint64_t rows = cleaner->set->rows;
    struct scan scan = {cleaner, calloc((size_t)cleaner->threads, sizeof *scan.largest)};
    TRY(ALLOCATED(scan.largest, "out of memory"));
    parallel_for(cleaner->threads, (rows + TASK_ROWS - 1) / TASK_ROWS, scan_rows, &scan);
    uint32_t largest = 0;
    for (int i = 0; i < cleaner->threads; i++)
        largest = scan.largest[i] > largest ? scan.largest[i] : largest;
    free(scan.largest);
    TRY(check_lost(cleaner));
    if (cleaner->format.to == OPS_NVFP4)
        cleaner->format.tensor_scale = nvfp4_tensor_scale(largest);
    uint64_t valid = count_kept(cleaner);
    if (dedup)
        TRY(drop_duplicates(cleaner));
    cleaner->kept_count = count_kept(cleaner);
    char duplicates[64] = "";
    if (dedup)
        snprintf(duplicates, sizeof duplicates, ", and %" PRIu64 " are duplicates",
                 valid - cleaner->kept_count);
    status_say("embeddings: %" PRIu64 " of %" PRIu64 " rows are kept; %" PRIu64 " are invalid%s",
               cleaner->kept_count, rows, rows - valid, duplicates);
    return cleaner->kept_count > 0
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "none of the %" PRIu64 " rows has a norm from %g to %g; change --norm-min or "
                            "--norm-max",
                            rows, (double)cleaner->norm_min, (double)cleaner->norm_max);
}

/* Finds the first row of each output file. */
static enum status find_starts(struct cleaner *cleaner, uint64_t files)
{
    cleaner->starts = malloc(files * sizeof *cleaner->starts);
    TRY(ALLOCATED(cleaner->starts, "out of memory"));
    uint64_t kept = 0;
    for (uint64_t i = 0; i < cleaner->set->rows; i++) {
        if (cleaner->kept[i] && kept % cleaner->rows_per_file == 0)
            cleaner->starts[kept / cleaner->rows_per_file] = i;
        kept += cleaner->kept[i];
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

static void convert_rows(void *context, uint64_t task, int thread)
{
    struct product *product = context;
    const struct ops_format *format = &product->cleaner->format;
    size_t value_bytes = ops_value_bytes(format->to, format->columns);
    size_t scale_bytes = ops_scale_bytes(format->to, format->columns);
    uint8_t *room = product->cleaner->rows + (size_t)thread * product->cleaner->row_room;
    uint8_t *converted = room + product->cleaner->row_room / 2;
    for (uint64_t j = task * TASK_ROWS; j < (task + 1) * TASK_ROWS && j < product->count; j++) {
        const uint8_t *row = read_row(product->cleaner, product->numbers[j], thread);
        uint8_t *values = product->values + j * value_bytes, *scales = product->scales + j * scale_bytes;
        for (uint32_t block = 0; block < scale_bytes; block++)
            ops_convert_block(format, row, block, converted, scales);
        for (uint32_t i = 0; scale_bytes == 0 && i < format->columns; i++)
            ops_store(format, ops_value(row, format->from, i), converted, i);
        memcpy(values, ops_copies(format->from, format->to) ? row : converted, value_bytes);
        product->hashes[j] = hash_row(values, value_bytes, scales, scale_bytes);
    }
}

/* Lists the rows of an output file. */
static enum status find_rows(struct product *product, uint64_t number)
{
    const struct cleaner *cleaner = product->cleaner;
    uint64_t begin = number * cleaner->rows_per_file, left = cleaner->kept_count - begin;
    product->count = left < cleaner->rows_per_file ? left : cleaner->rows_per_file;
    product->numbers = malloc(product->count * sizeof *product->numbers);
    product->hashes = malloc(product->count * sizeof *product->hashes);
    TRY(ALLOCATED(product->numbers && product->hashes, "out of memory for the rows of a file"));
    uint64_t row = cleaner->starts[number];
    for (uint64_t j = 0; j < product->count; row++)
        if (cleaner->kept[row])
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

/* Allocates the memory of an output file. Writes its header and, for NVFP4, the scale of the tensor. */
static enum status begin_file(struct product *product)
{
    static const char *const about[] = {"fdsl-bench", "embeddings", NULL};
    const struct ops_format *format = &product->cleaner->format;
    struct safetensor tensors[PARTS];
    char npy[NPY_HEADER_MAX], shape[NPY_SHAPE_MAX], *header = npy;
    size_t count = describe_tensors(product, tensors), length;
    snprintf(shape, sizeof shape, "%" PRIu64 ", %" PRIu32, product->count, format->columns);
    if (product->cleaner->encoding == NPY)
        length = npy_header_make(npy, format->to == OPS_F32 ? "<f4" : "<f2", shape);
    else
        TRY(safetensors_header(about, tensors, count, &header, &length));
    product->size = length;
    for (size_t i = 0; i < count; i++)
        product->size += tensors[i].bytes;
    product->bytes = malloc(product->size);
    if (product->bytes) {
        memcpy(product->bytes, header, length);
        product->values = product->bytes + length;
        product->scales = product->values + tensors[VALUES].bytes;
        if (count == PARTS)
            memcpy(product->scales + tensors[SCALES].bytes, &format->tensor_scale,
                   sizeof format->tensor_scale);
    }
    if (header != npy)
        free(header);
    return ALLOCATED(product->bytes,
                     "out of memory for a file of %zu bytes; lower "
                     "--rows-per-file",
                     product->size);
}

static enum status make_file(struct cleaner *cleaner, uint64_t number, struct source_sample *sample)
{
    struct product product = {.cleaner = cleaner};
    enum status status = find_rows(&product, number);
    if (status == STATUS_OK)
        status = begin_file(&product);
    if (status == STATUS_OK) {
        parallel_for(cleaner->threads, (product.count + TASK_ROWS - 1) / TASK_ROWS, convert_rows, &product);
        status = check_lost(cleaner);
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
    uint64_t begin = number * cleaner->rows_per_file, left = cleaner->kept_count - begin;
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

static enum status check_encoding(const struct cleaner *cleaner)
{
    if (cleaner->encoding == SAFETENSORS || cleaner->format.to == OPS_F32 || cleaner->format.to == OPS_F16)
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      "--encode npy: NumPy has no type %s; use --encode safetensors, or --to f16",
                      ops_type_names[cleaner->format.to]);
}

static enum status allocate(struct cleaner *cleaner)
{
    uint64_t rows = cleaner->set->rows;
    size_t largest = cleaner->format.columns * sizeof(float);
    cleaner->row_room = 2 * ((largest + 2 * OPS_ALIGNMENT - 1) / OPS_ALIGNMENT * OPS_ALIGNMENT);
    TRY(memory_check(rows * (sizeof *cleaner->hashes + 1), "the hashes of the rows",
                     "prepare fewer rows at a time"));
    cleaner->kept = calloc(rows + 1, 1);
    cleaner->hashes = malloc((rows + 1) * sizeof *cleaner->hashes);
    cleaner->rows = ops_allocate((size_t)cleaner->threads * cleaner->row_room);
    return ALLOCATED(cleaner->kept && cleaner->hashes && cleaner->rows,
                     "out of memory for the hashes of %" PRIu64 " rows", rows);
}

static void fill_cleaner(const struct embeddings_parameters *parameters, struct cleaner *cleaner)
{
    enum dtype from = cleaner->set->dtype;
    cleaner->format = (struct ops_format){
        .from = from,
        .to = parameters->to == 0 ? ops_stored_type(from) : (enum ops_type)(parameters->to - 1),
        .columns = cleaner->set->columns,
        .saturate = parameters->fp8 == 0,
    };
    cleaner->norm_min = (float)parameters->norm_min;
    cleaner->norm_max = (float)parameters->norm_max;
    cleaner->encoding = (enum encoding)parameters->encoding;
    cleaner->row_bytes = cleaner->set->columns * dtype_bytes(from);
}

static enum status embeddings_source_open(const struct source_request *request, struct source_facts *facts,
                                          void **state)
{
    const struct embeddings_parameters *parameters = request->parameters;
    TRY(check_options(request));
    struct cleaner *cleaner = *state = calloc(1, sizeof *cleaner);
    TRY(ALLOCATED(cleaner, "out of memory"));
    cleaner->threads = request->resources.threads;
    TRY(embeddings_open(parameters->source, parameters->tensor ? parameters->tensor : "", &cleaner->set));
    if (cleaner->set->rows == 0)
        return status_set(STATUS_FAILED, "%s: all its tensors have 0 rows; name files with rows",
                          parameters->source);
    fill_cleaner(parameters, cleaner);
    TRY(check_encoding(cleaner));
    TRY(guard_open(&cleaner->guard));
    TRY(allocate(cleaner));
    TRY(choose_rows(cleaner, parameters->dedup));
    size_t bytes = ops_value_bytes(cleaner->format.to, cleaner->format.columns) +
                   ops_scale_bytes(cleaner->format.to, cleaner->format.columns);
    cleaner->rows_per_file = parameters->rows_per_file ? parameters->rows_per_file : FILE_BYTES / bytes;
    facts->samples = (cleaner->kept_count - 1) / cleaner->rows_per_file + 1;
    facts->sample_bytes = cleaner->rows_per_file * bytes;
    facts->rows = cleaner->kept_count;
    facts->identity =
        checksum_whole((const uint8_t *)cleaner->hashes, cleaner->set->rows * sizeof *cleaner->hashes);
    free(cleaner->hashes);
    cleaner->hashes = NULL;
    return find_starts(cleaner, facts->samples);
}

static const char *const encodings[] = {"safetensors", "npy", NULL};
static const char *const targets[] = {"stored", "f32", "f16", "bf16", "fp8", "nvfp4", "mxfp4", NULL};

#define AT(field) offsetof(struct embeddings_parameters, field)
static const struct option_spec options[] = {
    {"source", "PATHS", OPTION_TEXT, AT(source),
     .help = "files (.npy, .safetensors, .pt, .pth, .pth.tar) and folders with such files, separated by ','; "
             "shell patterns are allowed"},
    {"tensor", "NAME", OPTION_TEXT, AT(tensor), .column = COLUMN,
     .help = "read the tensors with this name or pattern (default: the floating-point tensors of each file)"},
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
