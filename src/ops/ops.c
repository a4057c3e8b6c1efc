/* The workload `ops`: options and verification. docs/ops.md describes it. */
#include <stdlib.h>
#include <string.h>

#include "ops/ops.h"

#define COLUMNS_MAX 65536

struct ops_parameters {
    uint64_t rows, columns, seed, sample, ring, chunk, gpu_memory_limit;
    double bad, duplicates, norm_min, norm_max;
    int dtype, to, fp8, async, pool;
    bool dedup, resident;
    const char *steps, *data, *tensor;
};

/* The choices of --dtype. After NULL follow types that only files have, which the column `dtype` shows. The
 * order is that of enum embeddings_type, with one more entry. */
static const char *const types[] = {"f32", "f16", "bf16", NULL, "f64", "fp8", "nvfp4", "mxfp4"};
static const enum dtype type_values[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
const char *const ops_type_names[] = {"f32", "f16", "bf16", "fp8", "nvfp4", "mxfp4", NULL};
const char *const ops_fp8_modes[] = {"saturate", "nan", NULL};
static const char *const switches[] = {"on", "off", NULL};
const char *const ops_step_names[OPS_STEPS] = {"mask", "dedup", "compact", "permute", "convert", "hash"};

#define AT(field) offsetof(struct ops_parameters, field)
static const struct option_spec options[] = {
    {"data", "PATH", OPTION_TEXT, AT(data), .column = COLUMN,
     .help = "read the rows from files: .npy, .npz, .safetensors, .pt, .pth or .pth.tar, a folder with such "
             "files, a pattern, or several of these separated by commas; the default is a generated set"},
    {"tensor", "NAME", OPTION_TEXT, AT(tensor), .column = COLUMN,
     .help = "tensor to read from each file of --data, or a pattern; by default, all floating-point tensors "
             "with two axes, or if a file has none, those with one axis, each as one row"},
    {"rows", "N", OPTION_COUNT, AT(rows), .fallback = "65536", .maximum = INPUT_ROWS_MAX, .column = COLUMN,
     .help = "rows of the generated set"},
    {"dim", "N", OPTION_COUNT, AT(columns), .fallback = "768", .minimum = 1, .maximum = COLUMNS_MAX,
     .column = COLUMN, .help = "values per row"},
    {"dtype", "TYPE", OPTION_CHOICE, AT(dtype), .fallback = "f32", .choices = types, .column = COLUMN,
     .help = "element type of the generated rows"},
    {"bad", "SHARE", OPTION_REAL, AT(bad), .fallback = "0.05", .maximum = 1, .column = COLUMN,
     .help = "share of bad rows among the generated rows. There are five kinds of bad rows, in turn: norm "
             "too small, norm too large, one NaN, one infinity, all zeros"},
    {"duplicates", "SHARE", OPTION_REAL, AT(duplicates), .fallback = "0", .maximum = 1, .column = COLUMN,
     .help = "share of the generated rows that are copies of earlier rows"},
    {"seed", "N", OPTION_COUNT, AT(seed), .fallback = "0", .maximum = 18446744073709551615.0,
     .column = COLUMN, .help = "seed of the generated rows and of the permutation"},
    {"steps", "LIST", OPTION_TEXT, AT(steps), .fallback = "mask,compact,convert,hash", .column = COLUMN,
     .help = "the steps, in this order: mask (validates norms), compact (keeps valid rows), permute "
             "(reorders rows at random), convert (to the type --to), hash (XXH3-64 of each row)"},
    {"norm-min", "X", OPTION_REAL, AT(norm_min), .fallback = "0.1", .maximum = OPS_NORM_MOST,
     .column = COLUMN, .help = "smallest valid norm: 0, or at least 1e-15"},
    {"norm-max", "X", OPTION_REAL, AT(norm_max), .fallback = "100", .minimum = OPS_NORM_LEAST,
     .maximum = OPS_NORM_MOST, .column = COLUMN, .help = "largest valid norm"},
    {"to", "TYPE", OPTION_CHOICE, AT(to), .fallback = "f16", .choices = ops_type_names, .column = COLUMN,
     .help = "type that rows are converted to. nvfp4 has one scale per 16 values, mxfp4 one per 32. TYPE is "
             "one of"},
    {"fp8", "MODE", OPTION_CHOICE, AT(fp8), .fallback = "saturate", .choices = ops_fp8_modes,
     .column = COLUMN,
     .help = "result for magnitudes that are too large for fp8: 448 (saturate) or NaN (nan). MODE is one of"},
    {"dedup", NULL, OPTION_FLAG, AT(dedup), .column = COLUMN,
     .help = "drop rows whose hash equals that of an earlier row; needs the steps compact and hash"},
    {"sample", "K", OPTION_COUNT, AT(sample), .minimum = 1, .maximum = INPUT_ROWS_MAX, .column = COLUMN,
     .help = "copy only a random batch of K rows per run: the next K rows of the permutation, which must "
             "have at least K; needs the step permute"},
    {"resident", NULL, OPTION_FLAG, AT(resident), .column = COLUMN,
     .help = "GPU variants: copy the set to GPU memory once, before the timing"},
    {"ring", "N", OPTION_COUNT, AT(ring), .fallback = "4", .minimum = 2, .maximum = 64, .column = COLUMN,
     .help = "GPU variants without --resident: chunks of rows in flight"},
    {"chunk", "KIB", OPTION_COUNT, AT(chunk), .fallback = "16384", .minimum = 4, .maximum = 1 << 20,
     .column = COLUMN, .help = "GPU variants without --resident: size of a chunk"},
    {"async", "MODE", OPTION_CHOICE, AT(async), .fallback = "on", .choices = switches, .column = COLUMN,
     .help = "GPU variants without --resident: with on, different chunks are filled, copied and processed at "
             "the same time; with off, each of these operations waits for the previous one. MODE is one of"},
    {"pool", "MODE", OPTION_CHOICE, AT(pool), .fallback = "on", .choices = switches, .column = COLUMN,
     .help = "GPU variants: allocate memory for the results of a run from a stream-ordered pool (on) or with "
             "cudaMalloc (off). MODE is one of"},
    {"gpu-memory-limit", "BYTES", OPTION_BYTES, AT(gpu_memory_limit), .minimum = 1,
     .maximum = 18446744073709551615.0, .column = COLUMN,
     .help = "GPU variants: largest amount of GPU memory for rows and results (default: all free memory)"},
};

static const struct option_section sections[] = {
    {"data", "data"},
    {"steps", "steps"},
    {"variants on a GPU", "resident"},
    {NULL, NULL},
};

static const char *const shown[] = {"rows_kept", "stream_share", NULL};
static const char *const baselines[] = {"ops-naive", NULL};

/* ---- Opening the input ---- */

static enum status read_steps(const char *text, bool steps[OPS_STEPS])
{
    int latest = -1;
    for (const char *name = text;;) {
        size_t length = strcspn(name, ",");
        int step = 0;
        while (step < OPS_STEPS && (step == OPS_DEDUP || strlen(ops_step_names[step]) != length ||
                                    memcmp(ops_step_names[step], name, length) != 0))
            step++;
        if (step == OPS_STEPS)
            return status_set(STATUS_USAGE,
                              "--steps: '%.*s' is not a step; the steps are mask, compact, permute, convert "
                              "and hash",
                              (int)length, name);
        if (step <= latest)
            return status_set(
                STATUS_USAGE,
                "--steps %s: name each step once, in the order mask, compact, permute, convert, hash", text);
        steps[latest = step] = true;
        if (!name[length])
            return STATUS_OK;
        name += length + 1;
    }
}

/* Rejects options that have no effect with these steps, so that no option is silently ignored. */
static enum status check_steps(const struct options *given, const struct ops_parameters *parameters,
                               const bool steps[OPS_STEPS])
{
    static const struct {
        const char *option;
        enum ops_step step;
    } needs[] = {{"norm-min", OPS_MASK}, {"norm-max", OPS_MASK}, {"to", OPS_CONVERT},    {"fp8", OPS_CONVERT},
                 {"dedup", OPS_COMPACT}, {"dedup", OPS_HASH},    {"sample", OPS_PERMUTE}};
    for (size_t i = 0; i < COUNT_OF(needs); i++)
        if (options_given(given, needs[i].option) && !steps[needs[i].step])
            return status_option(STATUS_USAGE, needs[i].option,
                                 " has an effect only with the step %s; add it to --steps",
                                 ops_step_names[needs[i].step]);
    if (options_given(given, "fp8") && parameters->to != OPS_FP8)
        return status_option(STATUS_USAGE, "fp8", " has an effect only with --to fp8; add it, or drop --fp8");
    return STATUS_OK;
}

enum status ops_check_bounds(double norm_min, double norm_max)
{
    if (norm_min > 0 && norm_min < OPS_NORM_LEAST)
        return status_number(STATUS_USAGE, "norm-min", norm_min,
                             ": use 0 or at least %g; the square of a smaller norm is too small for a float",
                             OPS_NORM_LEAST);
    if (norm_min > norm_max)
        return status_number(STATUS_USAGE, "norm-min", norm_min,
                             " is larger than --norm-max %g; change one of them", norm_max);
    return STATUS_OK;
}

/* Returns the number of rows that the mask and --dedup keep. */
static uint64_t count_kept(const struct ops_job *job)
{
    return job->ops.steps[OPS_DEDUP] ? job->oracle->distinct : job->oracle->valid_count;
}

/* A batch cannot have more rows than the permutation. */
static enum status check_sample(const struct ops_job *job)
{
    const struct ops *ops = &job->ops;
    uint64_t rows = ops->steps[OPS_COMPACT] ? count_kept(job) : ops->count;
    if (ops->sample <= rows)
        return STATUS_OK;
    return status_number(STATUS_USAGE, "sample", (double)ops->sample,
                         ": only %llu of %llu rows can be drawn%s; lower --sample", (unsigned long long)rows,
                         (unsigned long long)ops->count, ops->count < job->rows ? " on this rank" : "");
}

static enum status take_rows(struct ops_job *job, const struct partition *partition)
{
    ops_oracle_free(job->oracle);
    TRY(ops_rows_take(job, partition));
    if (job->described)
        return check_sample(job);
    TRY(ops_oracle_open(&job->ops, job->oracle));
    TRY(job->ops.steps[OPS_DEDUP] ? ops_oracle_hash(&job->ops, job->oracle) : STATUS_OK);
    TRY(ops_check_rows(&job->ops));
    return check_sample(job);
}

static enum status ops_repartition(void *input, void *parameters, const struct partition *partition)
{
    (void)parameters;
    return take_rows(input, partition);
}

static void ops_close(void *input)
{
    struct ops_job *job = input;
    if (job->oracle)
        ops_oracle_free(job->oracle);
    free(job->oracle);
    ops_rows_free(job);
    free(job);
}

/* Rejects options for generated rows if --data is given, and --tensor if it is not. */
static enum status check_data(const struct options *given, const struct ops_parameters *parameters,
                              const bool steps[OPS_STEPS])
{
    static const char *const generated[] = {"rows", "dim", "dtype", "bad", "duplicates"};
    for (size_t i = 0; parameters->data && i < COUNT_OF(generated); i++)
        if (options_given(given, generated[i]))
            return status_option(
                STATUS_USAGE, generated[i],
                " describes generated rows, and --data reads rows from files; drop one of them");
    if (parameters->tensor && !parameters->data)
        return status_set(STATUS_USAGE,
                          "--tensor has an effect only with --data; add --data PATH, or drop --tensor");
    if (parameters->data && options_given(given, "seed") && !steps[OPS_PERMUTE])
        return status_option(STATUS_USAGE, "seed", " is for generated rows and the step permute; drop it");
    return STATUS_OK;
}

/* With --data: sets --rows, --dim and --dtype to those of the files, so that CSV rows show them. */
static void describe_set(const struct embeddings *set, struct ops_parameters *parameters)
{
    parameters->rows = set->rows;
    parameters->columns = set->columns;
    parameters->dtype = (int)set->stored + (set->stored >= EMBEDDINGS_F64);
}

static void fill_ops(const struct ops_parameters *parameters, struct ops_job *job)
{
    struct ops *ops = &job->ops;
    enum dtype type = job->set ? job->set->dtype : type_values[parameters->dtype];
    uint32_t columns = (uint32_t)parameters->columns;
    ops->steps[OPS_DEDUP] = parameters->dedup;
    ops->format = (struct ops_format){
        .from = type,
        .to = ops->steps[OPS_CONVERT] ? (enum ops_type)parameters->to : ops_stored_type(type),
        .columns = columns,
        .saturate = parameters->fp8 == 0,
    };
    ops->norm_min = (float)parameters->norm_min;
    ops->norm_max = (float)parameters->norm_max;
    ops->sample = parameters->sample;
    ops->seed = parameters->seed;
    ops->row_bytes = columns * dtype_bytes(type);
    ops->control = &job->control;
    ops->set = job->set;
    job->rows = parameters->rows;
    ops->resident = parameters->resident;
    ops->async = parameters->async == 0;
    ops->pool = parameters->pool == 0;
    ops->ring = (uint32_t)parameters->ring;
    ops->chunk_bytes = parameters->chunk << 10;
    ops->memory_limit = parameters->gpu_memory_limit;
    job->generated =
        generated_begin(parameters->seed, columns, type, parameters->bad, parameters->duplicates);
}

static enum status ops_open(const struct options *given, void *parameters_, const struct partition *partition,
                            void **input)
{
    struct ops_parameters *parameters = parameters_;
#ifndef HAVE_XXHASH
    return status_set(STATUS_UNAVAILABLE, "not built: this build has no xxHash");
#endif
    struct ops_job *job = *input = calloc(1, sizeof *job);
    TRY(ALLOCATED(job && (job->oracle = calloc(1, sizeof *job->oracle)), "out of memory"));
    TRY(read_steps(parameters->steps, job->ops.steps));
    TRY(check_steps(given, parameters, job->ops.steps));
    TRY(ops_check_bounds(parameters->norm_min, parameters->norm_max));
    if (parameters->dedup && partition->ranks > 1)
        return status_set(STATUS_USAGE, "--dedup compares all rows with each other and needs a single rank; "
                                        "use one rank with more --threads");
    TRY(check_data(given, parameters, job->ops.steps));
    if (parameters->data) {
        TRY(ops_rows_open(job, parameters->data, parameters->tensor ? parameters->tensor : ""));
        describe_set(job->set, parameters);
    }
    fill_ops(parameters, job);
    /* --sample can be checked without the rows, unless it draws from the rows that are kept. */
    job->described = options_flag(given, "dry-run") && !(job->ops.sample && job->ops.steps[OPS_COMPACT]);
    return take_rows(job, partition);
}

static bool ops_applies(const void *parameters_, const struct variant *variant, const char *option)
{
    static const char *const device_options[] = {"resident", "ring", "chunk",
                                                 "async",    "pool", "gpu-memory-limit"};
    const struct ops_parameters *parameters = parameters_;
    const struct ops_traits *traits = variant ? variant->traits : NULL;
    bool steps[OPS_STEPS] = {false};
    for (size_t i = 0; i < COUNT_OF(device_options); i++)
        if (strcmp(option, device_options[i]) == 0)
            return (!variant || (traits && traits->device)) && (i == 0 || i > 3 || !parameters->resident) &&
                   (i < 5 || parameters->gpu_memory_limit);
    if (read_steps(parameters->steps, steps) != STATUS_OK)
        return true;
    if (strcmp(option, "tensor") == 0)
        return parameters->tensor != NULL;
    if (strcmp(option, "data") == 0)
        return parameters->data != NULL;
    if (parameters->data && (strcmp(option, "bad") == 0 || strcmp(option, "duplicates") == 0))
        return false;
    if (strcmp(option, "seed") == 0)
        return !parameters->data || steps[OPS_PERMUTE];
    if (strcmp(option, "norm-min") == 0 || strcmp(option, "norm-max") == 0)
        return steps[OPS_MASK];
    if (strcmp(option, "fp8") == 0)
        return steps[OPS_CONVERT] && parameters->to == OPS_FP8;
    if (strcmp(option, "to") == 0)
        return steps[OPS_CONVERT];
    return strcmp(option, "sample") != 0 || parameters->sample > 0;
}

/* ---- Work and verification ---- */

static struct work ops_work(const void *input, const struct variant *variant)
{
    const struct ops_job *job = input;
    const struct ops *ops = &job->ops;
    double bytes = ops_least_bytes(ops, count_kept(job));
    (void)variant;
    return (struct work){.items = (double)ops->count, .bytes = bytes, .least.once_bytes = bytes};
}

static enum status ops_verify(const void *input, const struct variant *variant, void *state, uint64_t number,
                              uint64_t *wrong)
{
    const struct ops_job *job = input;
    TRY(ops_oracle_verify(&job->ops, job->oracle, variant, state, number, wrong));
    return ops_check_rows(&job->ops);
}

const struct workload workload_ops = {
    .name = "ops",
    .schema = "ops/2",
    .summary = "validates, filters, samples, converts and hashes sets of embeddings",
    .item = "rows",
    .options = options,
    .option_count = COUNT_OF(options),
    .option_sections = sections,
    .parameters_bytes = sizeof(struct ops_parameters),
    .columns = ops_columns,
    .shown = shown,
    .baselines = baselines,
    .ranks.share_items = true,
    .open = ops_open,
    .close = ops_close,
    .repartition = ops_repartition,
    .applies = ops_applies,
    .work = ops_work,
    .verify = ops_verify,
    .observe = ops_observe,
    .measure = ops_measure,
};
