/* The workload `exchange`: all-reduces (sums of arrays over all ranks). docs/exchange.md describes it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/workload.h"
#include "machine/comm.h"
#include "machine/host.h"
#include "train/allreduce.h"
#include "train/job.h"

static const char *const types[] = {"f32", "bf16", NULL};
enum { TYPE_F32, TYPE_BF16 };

struct exchange_parameters {
    uint64_t bytes;
    int type;
};

#define AT(field) offsetof(struct exchange_parameters, field)
static const struct option_spec options[] = {
    {"bytes", "N", OPTION_BYTES, AT(bytes), .fallback = "1M", .minimum = 1, .maximum = 0x1p40,
     .column = COLUMN,
     .help = "size of each rank's array in bytes; N may end with K, M or G (powers of 1024). --bytes "
             "1K:256M:2x measures 1K, 2K, 4K, ... 256M"},
    {"dtype", "TYPE", OPTION_CHOICE, AT(type), .fallback = "f32", .choices = types, .column = COLUMN,
     .help = "element type"},
};

static const struct option_section sections[] = {
    {"arrays", "bytes"},
    {NULL, NULL},
};

static const struct column columns[] = {
    {"timed_stages", VALUE_WORD, COMBINE_FIRST, "", .about = "the stages that the time of a run includes"},
    {"count", VALUE_INTEGER, COMBINE_FIRST, "", .about = "values in the array of a rank"},
    {"redop", VALUE_WORD, COMBINE_FIRST, "", .about = "the reduction: always sum"},
    {"calls", VALUE_INTEGER, COMBINE_FIRST, "", .about = "all-reduces per run"},
    {"time_us", VALUE_REAL, COMBINE_COMPUTED, "us", .about = "median time per all-reduce", .digits = 5},
    {"algbw_gbs", VALUE_REAL, COMBINE_COMPUTED, "GB/s",
     .about = "bytes of the array divided by the time of an all-reduce", .digits = 5},
    {"busbw_gbs", VALUE_REAL, COMBINE_COMPUTED, "GB/s",
     .about = "algbw_gbs times 2 (N - 1) / N with N ranks: the rate over the links of a rank", .digits = 5},
    {"checksum", VALUE_HASH, COMBINE_COMMON, "", .about = "hash of the sums of the last timed run"},
    {"memory_bytes", VALUE_INTEGER, COMBINE_SUM, "bytes",
     .about = "GPU memory of the method without the array", .better = BETTER_LOWER},
    {"nccl_version", VALUE_WORD, COMBINE_FIRST, "",
     .about = "version of the NCCL library; only for the variant nccl"},
    {.name = NULL},
};
static const char *const shown[] = {"count", "time_us", "algbw_gbs", "busbw_gbs", NULL};
static const char *const baselines[] = {"nccl", "mpi", NULL};

/* ---- Opening ---- */

static void allreduce_close(void *input)
{
    free(input);
}

static enum status allreduce_open(const struct options *given, void *parameters_,
                                  const struct partition *partition, void **input)
{
    const struct exchange_parameters *parameters = parameters_;
    size_t value_bytes = dtype_bytes(parameters->type == TYPE_BF16 ? DTYPE_BF16 : DTYPE_F32);
    struct allreduce_job *job = *input = malloc(sizeof *job);
    (void)given;
    TRY(ALLOCATED(job, "out of memory"));
    if (parameters->bytes % value_bytes)
        return status_number(STATUS_USAGE, "bytes", (double)parameters->bytes,
                             ": not a multiple of %zu bytes, the size of one %s value; give a multiple",
                             value_bytes, types[parameters->type]);
    if (partition->ranks == 1)
        status_warn(
            "one rank exchanges nothing, so there are no bandwidths; start more ranks with: mpirun -n N");
    *job = (struct allreduce_job){.bytes = parameters->bytes,
                                  .count = parameters->bytes / value_bytes,
                                  .bf16 = parameters->type == TYPE_BF16,
                                  .rank = (uint32_t)partition->rank,
                                  .ranks = (uint32_t)partition->ranks};
    return STATUS_OK;
}

static enum status exchange_accepts(const void *input, const struct variant *variant)
{
    const struct allreduce_traits *traits = variant->traits;
    return !((const struct allreduce_job *)input)->bf16 || traits->bf16
               ? STATUS_OK
               : status_set(STATUS_USAGE, "it adds up f32 only; use --dtype f32");
}

/* There is no roofline, because the peak rates of the links between ranks are not known. */
static struct work exchange_work(const void *input, const struct variant *variant)
{
    (void)variant;
    return (struct work){.items = ALLREDUCE_CALLS,
                         .bytes =
                             (double)ALLREDUCE_CALLS * (double)((const struct allreduce_job *)input)->bytes};
}

/* ---- Verification ---- */

/* With N ranks, the first call computes the sum S of N terms, and each later call multiplies by N. The result
 * of k calls is S N^(k-1).
 *
 * A value of the type has p significant bits, and each rounding has a relative error of at most u = 2^-p. All
 * terms are positive, so the relative error of a sum is at most that of its worst term, plus one rounding per
 * addition. A method may round the result of each of the N - 1 additions of a call to the type, or add up in
 * fp32 and round once to the type. Either way, a call has at most N roundings. After k calls, the relative
 * error is at most (1 + u)^(kN) - 1.
 *
 * If N is a power of two and N^2 times the largest term is at most 2^p, no addition rounds. After each call,
 * each value is a power of two times an integer, and the integer is at most N times the largest term. A
 * partial sum is at most N such values, so its integer has at most p bits. */
double allreduce_tolerance(const struct allreduce_job *job)
{
    double ranks = job->ranks, significand = job->bf16 ? 0x1p8 : 0x1p24;
    bool power_of_two = (job->ranks & (job->ranks - 1)) == 0;
    if (power_of_two && ranks * ranks * allreduce_term_max(job->ranks) <= significand)
        return 0;
    return expm1(ALLREDUCE_CALLS * ranks * log1p(1 / significand));
}

uint64_t allreduce_count_wrong(const struct allreduce_job *job, uint64_t number, const void *values)
{
    double tolerance = allreduce_tolerance(job);
    double growth = ALLREDUCE_UNIT * pow(job->ranks, ALLREDUCE_CALLS - 1);
    uint64_t wrong = 0;
    for (size_t i = 0; i < job->count; i++) {
        uint32_t sum = 0;
        for (uint32_t rank = 0; rank < job->ranks; rank++)
            sum += allreduce_term(job, number, rank, i);
        double exact = sum * growth;
        double value = job->bf16 ? float_from_bits((uint32_t)((const uint16_t *)values)[i] << 16)
                                 : ((const float *)values)[i];
        wrong += !(fabs(value - exact) <= tolerance * exact); /* counts NaN */
    }
    return wrong;
}

struct update allreduce_update(int call)
{
    const struct optimizer adam = {.kind = OPTIMIZER_ADAM, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 0.25};
    const struct schedule schedule = {.kind = SCHEDULE_CONSTANT, .rate = 0.125};
    return optimizer_at(&adam, &schedule, (uint64_t)call);
}

/* Returns the value of a parameter after a run. `sum` is the sum of the gradients in the first call. */
static float updated_parameter(const struct allreduce_job *job, const struct update *updates, float sum,
                               bool grows)
{
    float parameter = 0, m = 0, v = 0;
    for (int call = 0; call < ALLREDUCE_CALLS; call++) {
        const float once = sum;
        optimizer_step(&updates[call], sum, &parameter, &m, &v);
        for (uint32_t rank = 1; grows && rank < job->ranks; rank++)
            sum += once;
    }
    return parameter;
}

uint64_t allreduce_count_wrong_parameters(const struct allreduce_job *job, uint64_t number, bool grows,
                                          const float *parameters)
{
    struct update updates[ALLREDUCE_CALLS];
    uint64_t wrong = 0;
    for (int call = 0; call < ALLREDUCE_CALLS; call++)
        updates[call] = allreduce_update(call);
    for (size_t i = 0; i < job->count; i++) {
        float sum = allreduce_gradient(job, number, 0, i);
        for (uint32_t rank = 1; rank < job->ranks; rank++)
            sum += allreduce_gradient(job, number, rank, i);
        wrong += !(updated_parameter(job, updates, sum, grows) == parameters[i]); /* counts NaN */
    }
    return wrong;
}

/* Returns the number of wrong values in the result of the latest run. */
static uint64_t count_wrong(const struct allreduce_job *job, const struct allreduce_traits *traits,
                            const struct allreduce_result *result)
{
    return traits->updates
               ? allreduce_count_wrong_parameters(job, result->number, traits->grows, result->values)
               : allreduce_count_wrong(job, result->number, result->values);
}

/* Copies the values of the latest run into new memory, which the caller frees, even after a failure. */
static enum status fetch_values(const struct allreduce_job *job, const struct variant *variant, void *state,
                                struct allreduce_result *result)
{
    *result = (struct allreduce_result){.values = malloc(job->bytes)};
    if (!result->values)
        return status_set(STATUS_EXHAUSTED, "out of memory for a copy of %zu bytes; lower --bytes",
                          job->bytes);
    return variant->fetch(state, result);
}

static enum status exchange_verify(const void *input, const struct variant *variant, void *state,
                                   uint64_t number, uint64_t *wrong)
{
    const struct allreduce_job *job = input;
    struct allreduce_result result;
    enum status status = fetch_values(job, variant, state, &result);
    if (status == STATUS_OK)
        *wrong = result.number == number ? count_wrong(job, variant->traits, &result) : job->count;
    free(result.values);
    return status;
}

/* Checks, even without --verify, that all ranks have bit-identical sums. */
static enum status exchange_check_total(const void *input, const struct row *total)
{
    (void)input;
    return row_value(total, "checksum")
               ? STATUS_OK
               : status_set(STATUS_WRONG, "the ranks have different sums; the time is not recorded");
}

/* ---- Rows ---- */

static enum status exchange_observe(const void *input, const struct variant *variant, void *state,
                                    struct row *row)
{
    const struct allreduce_job *job = input;
    const struct allreduce_traits *traits = variant->traits;
    struct allreduce_result result;
    enum status status = fetch_values(job, variant, state, &result);
    if (status == STATUS_OK)
        row_hash(row, "checksum", fnv_add(FNV_BEGIN, result.values, job->bytes));
    free(result.values);
    row_text(row, "timed_stages", traits->updates ? "all-reduce+update" : "all-reduce");
    row_count(row, "count", job->count);
    row_text(row, "redop", "sum");
    row_count(row, "calls", ALLREDUCE_CALLS);
    if (traits->memory_bytes)
        row_count(row, "memory_bytes", traits->memory_bytes(state));
    if (traits->nccl_version)
        row_text(row, "nccl_version", traits->nccl_version());
    return status;
}

/* The bandwidths are defined as in nccl-tests. To all-reduce an array of B bytes, N ranks must on average
 * send 2 B (N - 1) / N bytes, and receive as many. If the links are the limit, the bus bandwidth does not
 * depend on N. */
static void exchange_rates(const void *input, double median_s, struct row *row)
{
    const struct allreduce_job *job = input;
    double call_s = median_s / ALLREDUCE_CALLS, algbw_gbs = 1e-9 * (double)job->bytes / call_s;
    row_real(row, "time_us", 1e6 * call_s);
    if (job->ranks == 1) /* nothing is sent */
        return;
    row_real(row, "algbw_gbs", algbw_gbs);
    row_real(row, "busbw_gbs", algbw_gbs * 2 * (job->ranks - 1) / job->ranks);
}

const struct workload workload_exchange = {
    .name = "exchange",
    .schema = "exchange/1",
    .summary = "all-reduces: adds up arrays over all ranks, as training does with gradients",
    .item = "all-reduces",
    .options = options,
    .option_count = COUNT_OF(options),
    .option_sections = sections,
    .parameters_bytes = sizeof(struct exchange_parameters),
    .columns = columns,
    .shown = shown,
    .baselines = baselines,
    .open = allreduce_open,
    .close = allreduce_close,
    .repartition = job_stay,
    .accepts = exchange_accepts,
    .work = exchange_work,
    .verify = exchange_verify,
    .observe = exchange_observe,
    .rates = exchange_rates,
    .checks.item = "values",
    .ranks = {.joint = true, .check_total = exchange_check_total},
};

/* ---- The variant mpi: arrays in host memory ---- */

struct allreduce_mpi {
    const struct allreduce_job *job;
    struct comm_reducer *reducer;
    float *values;
    uint64_t number; /* of the latest run */
};

static void mpi_teardown(void *state)
{
    struct allreduce_mpi *mpi = state;
    comm_reducer_close(mpi->reducer);
    free(mpi->values);
    free(mpi);
}

/* The reducer needs memory for a second array, and verification for a third. */
static enum status mpi_setup(const struct resources *resources, const void *input, void **state)
{
    const struct allreduce_job *job = input;
    struct allreduce_mpi *mpi = *state = calloc(1, sizeof *mpi);
    (void)resources;
    enum status status = memory_check(3 * job->bytes, "the arrays", "lower --bytes");
    if (status == STATUS_OK && !(mpi && (mpi->values = malloc(job->bytes))))
        status = status_set(STATUS_EXHAUSTED, "out of memory for an array of %zu bytes", job->bytes);
    TRY(comm_agree(status));
    mpi->job = job;
    mpi->number = UINT64_MAX;
    return comm_reducer_open(job->count, &mpi->reducer);
}

static enum status mpi_ready(void *state, uint64_t number)
{
    struct allreduce_mpi *mpi = state;
    for (size_t i = 0; i < mpi->job->count; i++)
        allreduce_fill(mpi->job, number, i, mpi->values);
    mpi->number = number;
    return STATUS_OK;
}

static enum status mpi_run(void *state, uint64_t number, struct run_time *time)
{
    struct allreduce_mpi *mpi = state;
    (void)number, (void)time;
    for (int i = 0; i < ALLREDUCE_CALLS; i++)
        TRY(comm_reduce(mpi->reducer, STATUS_OK, mpi->values));
    return STATUS_OK;
}

static enum status mpi_fetch(void *state, void *result_)
{
    const struct allreduce_mpi *mpi = state;
    struct allreduce_result *result = result_;
    memcpy(result->values, mpi->values, mpi->job->bytes);
    result->number = mpi->number;
    return STATUS_OK;
}

static const struct allreduce_traits mpi_traits = {0};
const struct variant variant_exchange_mpi = {.platform = "cpu",
                                             .instruction_set = isa_scalar_name, /* sums are plain loops */
                                             .traits = &mpi_traits,
                                             .setup = mpi_setup,
                                             .ready = mpi_ready,
                                             .run = mpi_run,
                                             .fetch = mpi_fetch,
                                             .teardown = mpi_teardown};
