/* Tests the workload `ops`: generated rows; results, compared with simple code in this suite; faults that
 * verification must detect; and refused options. */
#include "ops_support.h"

#include <math.h>

#include "../cpu/ops/omp_kernel.h"
#include "data/checksum.h"
#include "machine/host.h"
#include "ops/fused_plan.h"
#include "ops/ops.h"

TestSuite(ops, .timeout = 300);

/* ---- Generated rows ---- */

static double norm_of(const struct ops *ops, uint64_t i)
{
    double sum = 0;
    for (uint32_t c = 0; c < ops->format.columns; c++)
        sum += pow((double)ops_value(ops->parts->rows + i * ops->row_bytes, ops->format.from, c), 2);
    return sqrt(sum);
}

Test(ops, share_of_bad_rows_is_exact)
{
    static const char *const types[] = {"f32", "f16", "bf16"};
    static const unsigned columns[] = {1, 2, 3, 16, 100, 768};
    for (size_t t = 0; t < COUNT_OF(types); t++)
        for (size_t c = 0; c < COUNT_OF(columns); c++) {
            struct job job;
            unsigned small = 0, large = 0, nan = 0, infinite = 0, zero = 0;
            open_well(&job, "--rows 2000 --dim %u --dtype %s --bad 0.05", columns[c], types[t]);
            for (uint64_t i = 0; i < 2000; i++) {
                double norm = norm_of(job.ops, i);
                nan += isnan(norm);
                infinite += isinf(norm);
                zero += norm == 0;
                small += norm > 0 && norm < 0.1;
                large += isfinite(norm) && norm > 100;
            }
            cr_expect(small == 20 && large == 20 && nan == 20 && infinite == 20 && zero == 20,
                      "%s, %u columns: %u %u %u %u %u", types[t], columns[c], small, large, nan, infinite,
                      zero);
            close_job(&job);
        }
}

Test(ops, rows_do_not_depend_on_their_neighbours)
{
    struct job all, part;
    open_well(&all, "--rows 100 --dim 7 --duplicates 0.3 --seed 5");
    cr_assert_eq(open_rank(&part, 1, 3, "--rows 100 --dim 7 --duplicates 0.3 --seed 5"), STATUS_OK);
    cr_expect(part.ops->first == 34 && part.ops->count == 33);
    cr_expect_arr_eq(part.ops->parts->rows, all.ops->parts->rows + 34 * all.ops->row_bytes,
                     33 * all.ops->row_bytes);
    close_job(&all);
    open_well(&all, "--rows 100 --dim 7 --duplicates 0.3 --seed 6");
    cr_expect_arr_neq(part.ops->parts->rows, all.ops->parts->rows + 34 * all.ops->row_bytes,
                      33 * all.ops->row_bytes);
    close_job(&part);
    close_job(&all);
}

Test(ops, duplicates_are_copies_of_earlier_rows)
{
    struct generated_rows input = generated_begin(3, 8, DTYPE_F32, 0.1, 0.4);
    unsigned copies = 0;
    for (uint64_t row = 0; row < 1000; row++) {
        uint64_t source = generated_source(&input, row);
        cr_assert(source <= row && (source == row || !generated_is_bad(&input, row)));
        cr_assert_eq(generated_source(&input, source), source);
        copies += source < row;
    }
    cr_expect(copies > 300 && copies <= 400, "%u", copies);
    /* If all rows are chosen as duplicates, there is no row to copy, so every row is its own source. */
    input = generated_begin(3, 8, DTYPE_F32, 0, 1);
    cr_expect_eq(generated_source(&input, 0), 0);
    cr_expect_eq(generated_source(&input, 999), 999);
}

Test(ops, duplicates_are_dropped_on_any_number_of_threads)
{
    enum { COUNT = 200000, VALUES = 10007 }; /* several tasks of TASK_ROWS rows each */
    static uint64_t hashes[COUNT], table[1 << 19];
    static uint8_t kept[COUNT], first_kept[COUNT];
    cr_assert_leq(duplicates_slots(COUNT), COUNT_OF(table));
    for (int threads = 1; threads <= 4; threads += 3) {
        for (uint64_t i = 0; i < COUNT; i++) {
            hashes[i] = i * i % VALUES * 65536; /* the low 16 bits of all hashes are equal */
            kept[i] = i % 11 != 0;
        }
        duplicates_drop(threads, hashes, COUNT, kept, table);
        if (threads == 1)
            memcpy(first_kept, kept, COUNT);
        cr_expect_arr_eq(kept, first_kept, COUNT, "%d threads", threads);
    }
    static uint8_t seen[VALUES];
    for (uint64_t i = 0; i < COUNT; i++) {
        bool expected = i % 11 != 0 && !seen[i * i % VALUES];
        if (i % 11 != 0)
            seen[i * i % VALUES] = 1;
        cr_assert_eq(first_kept[i], expected, "row %llu", (unsigned long long)i);
    }
}

/* ---- Results ---- */

/* Computes norms in double precision. Compares which rows are kept, their order, values and hashes. */
Test(ops, each_step_has_the_expected_results)
{
    struct job job;
    void *state;
    open_well(&job, "--rows 500 --dim 20 --to f32 --bad 0.25");
    const struct variant *variant = set_up(&job, "ops-naive", &state);
    cr_assert_eq(wrong_rows(&job, variant, state, 7, 7), 0);
    uint8_t *kept = results_of(&job, variant, state, OPS_KEPT);
    uint64_t *order = results_of(&job, variant, state, OPS_ORDER);
    uint8_t *values = results_of(&job, variant, state, OPS_VALUES);
    uint64_t *hashes = results_of(&job, variant, state, OPS_HASHES), j = 0;
    for (uint64_t i = 0; i < 500; i++) {
        uint64_t row = (i + 7) % 500;
        double norm = norm_of(job.ops, row);
        const uint8_t *stored = job.ops->parts->rows + row * job.ops->row_bytes;
        cr_assert_eq(kept[i], norm >= 0.1 && norm <= 100, "row %llu", (unsigned long long)row);
        if (!kept[i])
            continue;
        cr_assert_eq(order[j], row);
        cr_assert_eq(hashes[j], checksum_whole(stored, job.ops->row_bytes));
        cr_assert_arr_eq(values + j * 80, stored, 80);
        j++;
    }
    cr_expect(j == 375 && summary_of(variant, state).kept == 375 &&
              summary_of(variant, state).outputs == 375);
    free(kept);
    free(order);
    free(values);
    free(hashes);
    variant->teardown(state);
    close_job(&job);
}

Test(ops, samples_of_an_epoch_have_no_row_twice)
{
    struct job job;
    void *state;
    unsigned seen[2][300] = {{0}}, both = 0; /* seen[epoch][row] */
    open_well(&job, "--rows 300 --dim 5 --steps mask,compact,permute,convert --sample 100");
    const struct variant *variant = set_up(&job, "ops-naive", &state);
    for (unsigned run = 0; run < 4; run++) {
        cr_assert_eq(wrong_rows(&job, variant, state, run, run), 0);
        cr_assert_eq(summary_of(variant, state).outputs, 100);
        uint64_t *order = results_of(&job, variant, state, OPS_ORDER);
        for (int j = 0; j < 100; j++)
            cr_assert_eq(seen[run / 2][order[j]]++, 0, "row %d of run %u", (int)order[j], run);
        free(order);
    }
    for (int i = 0; i < 300; i++)
        both += seen[0][i] && seen[1][i];
    cr_expect_lt(both, 180, "two epochs must draw different samples");
    variant->teardown(state);
    close_job(&job);
}

Test(ops, dedup_keeps_the_first_row)
{
    struct job job;
    void *state;
    open_well(&job, "--rows 400 --dim 6 --dedup --duplicates 0.5");
    const struct variant *variant = set_up(&job, "ops-naive", &state);
    cr_assert_eq(wrong_rows(&job, variant, state, 0, 0), 0);
    uint8_t *kept = results_of(&job, variant, state, OPS_KEPT);
    for (uint64_t i = 0; i < 400; i++) {
        bool copy = false;
        for (uint64_t k = 0; k < i; k++)
            copy |= memcmp(job.ops->parts->rows + i * 24, job.ops->parts->rows + k * 24, 24) == 0;
        double norm = norm_of(job.ops, i);
        cr_expect_eq(kept[i], norm >= 0.1 && norm <= 100 && !copy, "row %llu", (unsigned long long)i);
    }
    for (uint64_t number = 1; number < 900; number += 101)
        cr_expect_eq(wrong_rows(&job, variant, state, number, number), 0);
    free(kept);
    variant->teardown(state);
    close_job(&job);
}

/* ---- ops-omp ---- */

/* Runs `ops-omp` with each instruction set, and compares each result with the oracle. */
static void verify_omp(const char *options)
{
    static const char *const isas[] = {"avx512", "avx2", "scalar"};
    struct job job;
    open_well(&job, "%s", options);
    for (size_t i = 0; i < COUNT_OF(isas); i++) {
        void *state;
        if (!isa_force(isas[i]))
            continue;
        const struct variant *variant = set_up(&job, "ops-omp", &state);
        for (uint64_t number = 0; variant && number < 3; number++)
            cr_expect_eq(wrong_rows(&job, variant, state, number, number), 0, "%s, %s, run %llu", options,
                         isas[i], (unsigned long long)number);
        if (variant)
            variant->teardown(state);
    }
    isa_force(NULL);
    close_job(&job);
}

Test(ops, omp_is_bit_identical_to_the_oracle)
{
    static const unsigned columns[] = {1, 3, 16, 31, 127, 128, 129, 768, 4096}, rows[] = {0, 1, 7, 1031};
    static const char *const types[] = {"f32", "f16", "bf16"}, *const to[] = {"f32", "f16",   "bf16",
                                                                              "fp8", "nvfp4", "mxfp4"};
    char line[256];
    for (size_t c = 0; c < COUNT_OF(columns); c++)
        for (size_t t = 0; t < COUNT_OF(to); t++) {
            snprintf(line, sizeof line, "--rows %u --dim %u --dtype %s --to %s --bad 0.3 --seed %zu",
                     columns[c] < 1000 ? rows[(c + t) % 4] : 37, columns[c], types[(c + t) % 3], to[t], c);
            verify_omp(line);
        }
}

/* Fills a row with random bits. Among its values are NaN with any sign and payload, infinity, subnormal
 * values, and values halfway between two values of smaller types. */
static void fill_with_kinds(uint32_t *bits, size_t count, enum dtype type)
{
    for (size_t i = 0; i < count; i++) {
        struct philox_block random = philox(philox_key(7), (uint32_t)i, (uint32_t)type, 0, 0);
        uint32_t kind = random.word[1] % 4, word = random.word[0];
        if (type == DTYPE_F32)
            bits[i] = kind == 0   ? word | 0x7F800000
                      : kind == 1 ? word & 0xFFFFF000
                      : kind == 2 ? (word & 0x81FFFFFF) | 0x38000000
                                  : word;
        else
            bits[i] = kind == 0 ? word | 0x7C007C00 : word;
    }
    bits[3] = 0xFF800000;
}

static const struct {
    const char *name; /* name of the instruction set */
    const struct ops_kernel *kernel;
} kernels[] = {
#if defined(__x86_64__)
    {"avx512", &ops_kernel_avx512},
    {"avx2", &ops_kernel_avx2},
#endif
    {"scalar", &ops_kernel_scalar}};

/* Compares sums of squares directly. Few rows have norms near a bound, so the mask would rarely show that a
 * sum was computed in another order. */
Test(ops, omp_adds_squares_in_the_same_order)
{
    static float row[4099];
    for (uint32_t i = 0; i < COUNT_OF(row); i++)
        row[i] = (float)philox(philox_key(1), i, 0, 0, 0).word[0] * 0x1p-32f;
    for (size_t k = 0; k < COUNT_OF(kernels); k++)
        for (uint32_t columns = 1; isa_force(kernels[k].name) && columns <= 4099;
             columns += columns < 400 ? 1 : 1233)
            for (int type = 0; type < 3; type++) {
                static const enum dtype types[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
                float sum = kernels[k].kernel->square_sum(row, types[type], columns);
                float expected = ops_square_sum(row, types[type], columns);
                cr_expect(memcmp(&sum, &expected, sizeof sum) == 0 || (isnan(sum) && isnan(expected)),
                          "%s: %u columns, type %d", kernels[k].name, columns, type);
            }
}

Test(ops, omp_converts_every_kind_of_value)
{
    enum { COLUMNS = 5003 };
    static uint32_t bits[COLUMNS + 1];
    static uint8_t values[2][4 * COLUMNS], scales[2][COLUMNS];
    for (int type = 0; type < 3; type++)
        for (int to = OPS_F32; to <= OPS_MXFP4; to++)
            for (size_t k = 0; k < COUNT_OF(kernels); k++) {
                static const enum dtype types[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
                const struct ops_format format = {types[type], (enum ops_type)to, COLUMNS, k % 2, 0.01f};
                if (!isa_force(kernels[k].name))
                    continue;
                fill_with_kinds(bits, COLUMNS + 1, format.from);
                const uint8_t *row = (const uint8_t *)bits + k; /* rows of files may be unaligned */
                ops_convert_row(&format, row, values[0], scales[0]);
                kernels[k].kernel->convert(&format, row, values[1], scales[1]);
                cr_expect(memcmp(values[0], values[1], ops_value_bytes(format.to, COLUMNS)) == 0 &&
                              memcmp(scales[0], scales[1], ops_scale_bytes(format.to, COLUMNS)) == 0,
                          "%s: type %d to %d", kernels[k].name, type, to);
                cr_expect_eq(kernels[k].kernel->largest_finite(row, format.from, COLUMNS, 5),
                             ops_largest_finite(row, format.from, COLUMNS, 5));
            }
}

Test(ops, omp_computes_all_lists_of_steps)
{
    static const char *const options[] = {
        "--steps mask",
        "--steps compact",
        "--steps permute",
        "--steps convert --to bf16",
        "--steps hash",
        "--steps mask,convert,hash --to fp8 --fp8 nan",
        "--steps mask,compact,permute",
        "--steps mask,compact,permute,convert,hash --to mxfp4",
        "--steps compact,permute,hash --sample 300",
        "--steps permute --sample 2003",
        "--dedup --duplicates 0.4",
        "--dedup --duplicates 0.4 --steps compact,permute,convert,hash --to nvfp4",
        "--norm-min 0 --norm-max 1e19 --steps mask,compact,permute,hash --sample 1",
    };
    char line[256];
    for (size_t i = 0; i < COUNT_OF(options); i++) {
        snprintf(line, sizeof line, "--rows 2003 --dim 50 --bad 0.2 %s", options[i]);
        verify_omp(line);
    }
    verify_omp("--rows 100003 --dim 4 --dedup --duplicates 0.2 --bad 0.01");
    verify_omp("--rows 100003 --dim 2 --to fp8");
}

/* ---- Verification ---- */

/* A variant under test returns the results of `real`, changed by this fault. */
static struct {
    const struct variant *real;
    enum ops_array array; /* the array with the fault; OPS_ARRAYS: none */
    uint64_t element;     /* the element whose first byte is changed */
    uint64_t every;       /* if not 0: changes every element whose number is a multiple of this instead */
    size_t value_bytes;   /* size of a row of OPS_VALUES */
    void (*change)(struct ops_summary *summary);
} fault = {.value_bytes = 48};

static enum status faulty_fetch(void *state, void *result)
{
    struct ops_fetch *fetch = result;
    TRY(fault.real->fetch(state, result));
    for (uint64_t i = 0; fetch->to && fetch->array == fault.array && i < fetch->count; i++) {
        uint64_t element = fetch->first + i;
        size_t bytes = fault.array == OPS_KEPT     ? 1
                       : fault.array == OPS_VALUES ? fault.value_bytes
                       : fault.array == OPS_SCALES ? 6
                                                   : 8;
        if (fault.every ? element % fault.every == 0 : element == fault.element)
            ((uint8_t *)fetch->to)[i * bytes] ^= 1;
    }
    if (fault.change)
        fault.change(&fetch->summary);
    return STATUS_OK;
}

static void change_number(struct ops_summary *summary)
{
    summary->number++;
}
static void change_kept(struct ops_summary *summary)
{
    summary->kept--;
}
static void change_outputs(struct ops_summary *summary)
{
    summary->outputs--;
}
static void change_scale(struct ops_summary *summary)
{
    summary->tensor_scale *= 1.0000002f;
}

Test(ops, planted_faults_are_detected)
{
    static void (*const changes[])(struct ops_summary *) = {change_number, change_kept, change_outputs,
                                                            change_scale};
    struct job job;
    void *state;
    uint64_t wrong;
    open_well(&job, "--rows 100 --dim 96 --steps mask,compact,permute,convert,hash --to nvfp4");
    fault.real = set_up(&job, "ops-naive", &state);
    struct variant faulty = *fault.real;
    faulty.fetch = faulty_fetch;
    fault.array = OPS_ARRAYS;
    cr_assert_eq(wrong_rows(&job, &faulty, state, 3, 3), 0);
    for (int array = 0; array < OPS_ARRAYS; array++)
        for (fault.element = 0; fault.element < 95; fault.element += 47) {
            fault.array = (enum ops_array)array;
            cr_assert_eq(job.workload->verify(job.input, &faulty, state, 3, &wrong), STATUS_OK);
            cr_expect_eq(wrong, 1, "array %d, element %d: %d wrong", array, (int)fault.element, (int)wrong);
        }
    fault.array = OPS_ARRAYS;
    for (size_t i = 0; i < COUNT_OF(changes); i++) {
        fault.change = changes[i];
        cr_assert_eq(job.workload->verify(job.input, &faulty, state, 3, &wrong), STATUS_OK);
        cr_expect_eq(wrong, 100, "change %zu", i);
    }
    fault.real->teardown(state);
    close_job(&job);
}

/* The rows are so long that verification compares them in several chunks. A wrong row counts once, in
 * whichever chunk it is. */
Test(ops, wrong_rows_of_all_chunks_are_counted)
{
    enum { ROWS = 5000 };
    struct job job;
    void *state;
    uint64_t wrong;
    open_well(&job, "--rows %d --dim 4096 --steps mask,compact,convert --to f32 --bad 0.5", ROWS);
    fault.real = set_up(&job, "ops-naive", &state);
    fault.array = OPS_VALUES;
    fault.value_bytes = 4 * 4096;
    struct variant faulty = *fault.real;
    struct run_time unused;
    faulty.fetch = faulty_fetch;
    cr_assert_eq(variant_run(&faulty, state, 3, &unused), STATUS_OK);
    for (fault.every = 1; fault.every <= ROWS / 2; fault.every *= 2) {
        cr_assert_eq(job.workload->verify(job.input, &faulty, state, 3, &wrong), STATUS_OK);
        cr_expect_eq(wrong, (ROWS / 2 + fault.every - 1) / fault.every, "every row %d: %d wrong",
                     (int)fault.every, (int)wrong);
    }
    fault.real->teardown(state);
    close_job(&job);
}

/* Changes the results of run 3, so that the variant claims that they are of run 4. */
static void claim_4(struct ops_summary *summary)
{
    summary->number = 4;
}

Test(ops, results_of_another_run_are_wrong)
{
    static const char *const steps[] = {"mask",    "compact", "permute",
                                        "convert", "hash",    "mask,compact,convert,hash"};
    for (size_t i = 0; i < COUNT_OF(steps); i++) {
        struct job job;
        void *state;
        open_well(&job, "--rows 100 --dim 9 --steps %s", steps[i]);
        fault.real = set_up(&job, "ops-naive", &state);
        fault.array = OPS_ARRAYS;
        fault.change = claim_4;
        struct variant faulty = *fault.real;
        faulty.fetch = faulty_fetch;
        cr_expect_gt(wrong_rows(&job, &faulty, state, 3, 4), 0, "%s", steps[i]);
        fault.real->teardown(state);
        close_job(&job);
    }
}

/* ---- Options ---- */

/* ---- The plans of ops-fused ---- */

/* Returns the bytes of shared memory that a plan needs at least. Floating-point numbers do not wrap. */
static double bytes_for(const struct fused_shape *shape, const struct fused_plan *plan, uint32_t tile_rows,
                        uint32_t groups, uint32_t outputs)
{
    double tile = 16 * (ceil((double)shape->value_bytes / 16) + ceil((double)shape->scale_bytes / 16));
    double buffers = plan->loads_bulk ? (double)groups * tile_rows * (double)shape->row_bytes : 0;
    return FIXED_BYTES + buffers + (shape->stores ? (double)outputs * tile_rows * tile : 0);
}

/* Returns what is wrong with a plan, or NULL. */
static const char *wrong_with(const struct fused_shape *shape, const struct fused_plan *plan)
{
    double limit = (double)shape->shared_bytes, tile_rows = plan->tile_rows, outputs = plan->outputs;
    if (!plan->fits)
        return !shape->stores                                       ? "no pass is possible"
               : bytes_for(shape, plan, 1, 1, OUTPUTS_MIN) <= limit ? "one pass would be possible"
                                                                    : NULL;
    if (plan->groups < 1 || tile_rows < 1 || plan->groups * tile_rows > CONSUMERS_MAX)
        return "number of warps";
    if (outputs < OUTPUTS_MIN * plan->groups || outputs > OUTPUTS_MAX)
        return "number of output tiles";
    if (bytes_for(shape, plan, plan->tile_rows, plan->groups, plan->outputs) !=
        FIXED_BYTES + (double)plan->shared_bytes)
        return "shared memory is not what tiles and buffers need";
    if (FIXED_BYTES + (double)plan->shared_bytes > limit)
        return "more shared memory than a block may have";
    if (plan->buffers_at % 16 != 0 || plan->buffers_at > plan->shared_bytes)
        return "position of the buffers";
    if (shape->stores && (plan->value_bytes < shape->value_bytes || plan->scale_bytes < shape->scale_bytes))
        return "room for an output row";
    for (uint32_t rows = TILE_ROWS_MAX; rows > 0; rows /= 2)
        for (uint32_t groups = CONSUMERS_MAX / TILE_ROWS_MAX; groups > 0; groups--) {
            if (rows == plan->tile_rows && groups == plan->groups)
                return NULL;
            if (bytes_for(shape, plan, rows, groups, OUTPUTS_MIN * groups) <= limit)
                return "a plan with more warps would fit";
        }
    return "unknown division of rows";
}

/* Maximum shared memory per block, from the table of technical specifications per compute capability in the
 * CUDA C++ Programming Guide. GPUs of 9.0 or newer have bulk copies, which code compiled for older GPUs does
 * not use. */
Test(ops, fused_plans_fit_the_shared_memory_of_every_gpu)
{
    static const struct {
        uint32_t kilobytes;
        bool bulk;
        const char *architectures;
    } gpus[] = {{163, false, "sm_80"},
                {99, false, "sm_86, sm_89, sm_120"},
                {227, false, "sm_90, sm_100"},
                {227, true, "sm_90, sm_100"},
                {99, true, "sm_120"}};
    static const enum dtype from[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    uint64_t one_pass = 0, two_passes = 0;
    for (size_t g = 0; g < COUNT_OF(gpus); g++)
        for (size_t f = 0; f < COUNT_OF(from); f++)
            for (enum ops_type to = OPS_F32; to <= OPS_MXFP4; to++)
                for (uint32_t columns = 1; columns <= 65536; columns++)
                    for (int outputs = 0; outputs <= 2;
                         outputs++) { /* none, those that --steps hash has, all */
                        struct fused_shape shape = {.shared_bytes = gpus[g].kilobytes * UINT64_C(1024),
                                                    .bulk = gpus[g].bulk,
                                                    .stores = outputs > 0,
                                                    .columns = columns,
                                                    .row_bytes = columns * dtype_bytes(from[f])};
                        if (outputs == 2) {
                            shape.value_bytes = ops_value_bytes(to, columns);
                            shape.scale_bytes = ops_scale_bytes(to, columns);
                        }
                        struct fused_plan plan = fused_plan(&shape);
                        const char *wrong = wrong_with(&shape, &plan);
                        cr_assert(!wrong, "%s, %s copies, type %zu to %d, %u columns, outputs %d: %s",
                                  gpus[g].architectures, gpus[g].bulk ? "bulk" : "plain", f, (int)to, columns,
                                  outputs, wrong);
                        *(plan.fits ? &one_pass : &two_passes) += 1;
                    }
    cr_expect(one_pass > 0 && two_passes > 0);
}

/* ---- Options ---- */

Test(ops, bad_options_are_refused)
{
    static const struct {
        const char *line, *says;
    } cases[] = {
        {"--steps mask,sort", "'sort' is not a step"},
        {"--steps mask,", "'' is not a step"},
        {"--steps dedup", "'dedup' is not a step"},
        {"--steps hash,mask", "in the order"},
        {"--steps mask,mask", "each step once"},
        {"--steps hash --to f16", "--to has an effect only with the step convert"},
        {"--steps mask --fp8 nan", "--fp8 has an effect only with the step convert"},
        {"--fp8 nan", "--fp8 has an effect only with --to fp8"},
        {"--steps mask,hash --dedup", "--dedup has an effect only with the step compact"},
        {"--steps compact --dedup", "--dedup has an effect only with the step hash"},
        {"--steps mask --sample 3", "--sample has an effect only with the step permute"},
        {"--steps permute --rows 40 --sample 41", "--sample 41: only 40 of 40 rows can be drawn"},
        {"--steps mask,compact,permute --rows 40 --bad 0.5 --sample 21", "only 20 of 40 rows can be drawn"},
        {"--steps hash --norm-min 1", "--norm-min has an effect only with the step mask"},
        {"--norm-min 1e-16", "--norm-min 1e-16: use 0 or at least 1e-15"},
        {"--norm-min 2 --norm-max 1", "--norm-min 2 is larger than --norm-max 1"},
        {"--dim 0", "--dim"},
        {"--dim 65537", "--dim"},
        {"--rows 4294967296", "--rows"},
        {"--bad 1.5", "--bad"},
    };
    struct job job;
    open_well(&job, "--rows 1");
    close_job(&job);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        cr_expect_eq(open_rank(&job, 0, 1, cases[i].line), STATUS_USAGE, "%s", cases[i].line);
        cr_expect(strstr(status_text(), cases[i].says), "%s: %s", cases[i].line, status_text());
        close_job(&job);
    }
    cr_expect_eq(open_rank(&job, 0, 1, "--rows 4294967295 --dim 65536"), STATUS_TOO_LARGE);
    cr_expect(strstr(status_text(), "lower --rows or --dim"), "%s", status_text());
    close_job(&job);
    cr_expect_eq(open_rank(&job, 0, 2, "--dedup"), STATUS_USAGE);
    cr_expect(strstr(status_text(), "--dedup compares all rows"), "%s", status_text());
    close_job(&job);
}
