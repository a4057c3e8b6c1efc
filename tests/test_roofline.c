/* Tests the roofline: peak rates, the minimum work of generating and training, and the output of the
 * program. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/roofline.h"
#include "must.h"
#include "run/report.h"
#include "run/rows.h"
#include "train/model.h"
#include "train/trainer.h"
#include "cell.h"

TestSuite(roofline, .timeout = 60);

static void expect_near(double got, double wanted, const char *what)
{
    cr_expect(fabs(got - wanted) <= 1e-9 * fabs(wanted), "%s: %.9g, not %.9g", what, got, wanted);
}

static struct machine_peaks h200(void)
{
    const struct gpu_facts facts = {.major = 9,
                                    .minor = 0,
                                    .multiprocessors = 132,
                                    .clock_hz = 1.98e9,
                                    .memory_clock_hz = 3.201e9,
                                    .memory_bus_bits = 6016,
                                    .cache_bytes = 60 << 20,
                                    .registers_bytes = 256 << 10,
                                    .bus_bytes_per_s = 63e9};
    return roofline_gpu_peaks(&facts);
}

/* ---- Peaks ---- */

Test(roofline, an_h200_has_the_expected_peaks)
{
    const struct machine_peaks peaks = h200();
    expect_near(peaks.flops_per_s[UNIT_FP32], 66.90816e12, "fp32");
    expect_near(peaks.flops_per_s[UNIT_TF32], 535.26528e12, "TF32");
    expect_near(peaks.flops_per_s[UNIT_HALF], 1070.53056e12, "bf16");
    expect_near(peaks.memory_bytes_per_s, 4.814304e12, "memory"); /* the data sheet gives 4.8 TB/s */
    expect_near(peaks.cache_bytes, 62914560, "second-level cache");
    expect_near(peaks.chip_bytes, 62914560 + 132 * 524288.0, "the chip");
    expect_near(peaks.bus_bytes_per_s, 63e9, "bus");
}

/* Peak rates published by NVIDIA, in TFLOP/s, with the clock that they refer to. */
Test(roofline, peaks_equal_the_published_ones)
{
    static const struct {
        int major, minor, multiprocessors;
        double clock_hz;
        enum unit unit;
        double published;
    } cases[] = {
        {8, 0, 108, 1.41e9, UNIT_FP32, 19.5},    {8, 0, 108, 1.41e9, UNIT_TF32, 156},
        {8, 0, 108, 1.41e9, UNIT_HALF, 312},     {8, 6, 84, 1.74e9, UNIT_FP32, 37.4},
        {8, 6, 84, 1.74e9, UNIT_TF32, 74.8},     {8, 6, 84, 1.74e9, UNIT_HALF, 149.7},
        {8, 9, 142, 2.52e9, UNIT_FP32, 91.6},    {8, 9, 142, 2.49e9, UNIT_TF32, 181},
        {8, 9, 142, 2.49e9, UNIT_HALF, 362},     {9, 0, 132, 1.98e9, UNIT_FP32, 66.9},
        {9, 0, 132, 1.83e9, UNIT_TF32, 494.7},   {9, 0, 132, 1.83e9, UNIT_HALF, 989.4},
        {12, 0, 170, 2.407e9, UNIT_FP32, 104.8},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const struct gpu_facts facts = {.major = cases[i].major,
                                        .minor = cases[i].minor,
                                        .multiprocessors = cases[i].multiprocessors,
                                        .clock_hz = cases[i].clock_hz};
        double tera = 1e-12 * roofline_gpu_peaks(&facts).flops_per_s[cases[i].unit];
        cr_expect(fabs(tera / cases[i].published - 1) < 3e-3, "%d.%d, unit %d: %g, not %g", cases[i].major,
                  cases[i].minor, (int)cases[i].unit, tera, cases[i].published);
    }
}

Test(roofline, each_architecture_has_its_flops_per_multiprocessor)
{
    static const struct {
        int major, minor;
        double flops[UNIT_COUNT];
    } cases[] = {{8, 0, {128, 1024, 2048}},
                 {8, 6, {256, 512, 1024}},
                 {8, 9, {256, 512, 1024}},
                 {9, 0, {256, 2048, 4096}},
                 {10, 0, {256, 4096, 8192}},
                 {12, 0, {256, 512, 1024}},
                 {7, 5, {0, 0, 0}} /* unknown architectures */,
                 {9, 9, {0, 0, 0}}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const struct gpu_facts facts = {
            .major = cases[i].major, .minor = cases[i].minor, .multiprocessors = 1, .clock_hz = 1};
        const struct machine_peaks peaks = roofline_gpu_peaks(&facts);
        for (int unit = 0; unit < UNIT_COUNT; unit++)
            cr_expect_eq(peaks.flops_per_s[unit], cases[i].flops[unit], "%d.%d, unit %d", cases[i].major,
                         cases[i].minor, unit);
    }
}

Test(roofline, each_instruction_set_has_its_flops_per_core)
{
#if defined(__x86_64__)
    cr_expect_eq(roofline_cpu_flops_per_cycle("avx512"), 64);
    cr_expect_eq(roofline_cpu_flops_per_cycle("avx2"), 32);
#if !defined(__AVX__)
    cr_expect_eq(roofline_cpu_flops_per_cycle("scalar"), 16);
#endif
#endif
    cr_expect_eq(roofline_cpu_flops_per_cycle("none such"), 0);
}

/* ---- Work divided by peaks ---- */

static const struct machine_peaks machine = {.flops_per_s = {100, 400, 800},
                                             .memory_bytes_per_s = 10,
                                             .cache_bytes = 7,
                                             .chip_bytes = 20,
                                             .bus_bytes_per_s = 2};

static const struct {
    const char *name;
    struct least_work work;
    struct roofline wanted;
} works[] = {
    {"none", {.flops = 0}, {.peak_bytes_per_s = 10}},
    {"compute", {.flops = 800, .once_bytes = 27}, {800, 100, 20, 10, BOUND_COMPUTE, 8}},
    {"memory", {.flops = 800, .once_bytes = 97}, {800, 100, 90, 10, BOUND_MEMORY, 9}},
    {"tensor cores", {.flops = 800, .unit = UNIT_HALF}, {800, 800, 0, 10, BOUND_COMPUTE, 1}},
    {"TF32", {.flops = 800, .unit = UNIT_TF32}, {800, 400, 0, 10, BOUND_COMPUTE, 2}},
    {"in the cache", {.once_bytes = 7}, {.peak_bytes_per_s = 10}},
    {"one byte more than the cache", {.once_bytes = 8}, {0, 0, 1, 10, BOUND_MEMORY, 0.1}},
    {"on the chip", {.round_bytes = 20, .rounds = 1000}, {.peak_bytes_per_s = 10}},
    {"rounds", {.once_bytes = 17, .round_bytes = 25, .rounds = 4}, {0, 0, 30, 10, BOUND_MEMORY, 3}},
    {"bus", {.flops = 100, .bus_bytes = 6}, {100, 100, 6, 2, BOUND_BUS, 3}},
};

static void expect_roofline(const struct roofline *got, const struct roofline *wanted, const char *name)
{
    cr_expect_eq(got->flops, wanted->flops, "%s: flops %g", name, got->flops);
    cr_expect_eq(got->bytes, wanted->bytes, "%s: bytes %g", name, got->bytes);
    cr_expect_eq(got->peak_flops, wanted->peak_flops, "%s: peak_flops %g", name, got->peak_flops);
    cr_expect_eq(got->peak_bytes_per_s, wanted->peak_bytes_per_s, "%s: peak_bytes_per_s %g", name,
                 got->peak_bytes_per_s);
    cr_expect_eq(got->bound, wanted->bound, "%s: bound '%s'", name, roofline_bound_name(got->bound));
    cr_expect_eq(got->floor_s, wanted->floor_s, "%s: floor %g s", name, got->floor_s);
}

Test(roofline, the_larger_bound_is_the_roofline)
{
    for (size_t i = 0; i < COUNT_OF(works); i++) {
        const struct roofline got = roofline_of(&works[i].work, &machine);
        expect_roofline(&got, &works[i].wanted, works[i].name);
    }
}

Test(roofline, without_a_peak_there_is_no_bound)
{
    const struct least_work work = {.flops = 5, .once_bytes = 1e9};
    const struct machine_peaks unknown = {.cache_bytes = 7};
    const struct roofline got = roofline_of(&work, &unknown), wanted = {.flops = 5};
    expect_roofline(&got, &wanted, "nothing known");
    const struct least_work over_bus = {.bus_bytes = 6};
    const struct roofline bus = roofline_of(&over_bus, &unknown), bus_wanted = {.bytes = 6};
    expect_roofline(&bus, &bus_wanted, "bus unknown");
}

Test(roofline, bounds_have_names)
{
    cr_expect_str_eq(roofline_bound_name(BOUND_UNKNOWN), "");
    cr_expect_str_eq(roofline_bound_name(BOUND_COMPUTE), "compute");
    cr_expect_str_eq(roofline_bound_name(BOUND_MEMORY), "memory");
    cr_expect_str_eq(roofline_bound_name(BOUND_BUS), "bus");
}

/* Two of three ranks share a GPU. The other rank has its own GPU and takes longer. */
Test(roofline, the_roofline_of_all_ranks_is_that_of_the_slowest)
{
    const struct roofline part = {100, 40, 5, 8, BOUND_COMPUTE, 2.5},
                          large = {10, 40, 24, 8, BOUND_MEMORY, 3};
    const struct rank_facts facts[] = {{.roofline = part, .sharers = 2},
                                       {.roofline = large, .sharers = 1},
                                       {.roofline = part, .sharers = 2}};
    const struct roofline wanted = {210, 80, 34, 16, BOUND_MEMORY, 3}, all = ranks_roofline(facts, 3);
    expect_roofline(&all, &wanted, "together");
}

/* ---- The minimum work of a workload ---- */

/* Reads the settings of a command line, whose words are separated by single blanks. */
static void read_settings(struct settings *settings, const char *line)
{
    static char text[512];
    char *argv[64] = {(char *)"fdsl-bench"}, *rest = text, *word;
    int argc = 1;
    snprintf(text, sizeof text, "%s", line);
    while ((word = strsep(&rest, " ")))
        argv[argc++] = word;
    must(settings_read(settings, &(struct config){.argc = argc, .argv = argv}));
}

/* Returns the work of a command line for a variant. */
static struct work work_of(const char *line, const struct variant *variant)
{
    struct settings settings;
    const struct partition alone = {0, 1, false, NULL};
    void *input;
    read_settings(&settings, line);
    must(settings.workload->open(&settings.options, settings.parameters, &alone, &input));
    const struct work work = settings.workload->work(input, variant);
    settings.workload->close(input);
    settings_free(&settings);
    return work;
}

/* On small canvases, most lines are outside or painted over, and a correct program may skip them. Only
 * writing the images is necessary work. So the minimum work must contain nothing else. Otherwise the share of
 * the peak could exceed 100 %. */
Test(roofline, no_image_needs_more_than_its_pixels)
{
    static const char *const formulas[] = {"uji", "visualatom"}, *const orbits[] = {"1", "5000"},
                             *const widths[] = {"0", "10"}, *const noises[] = {"0", "1"},
                             *const sizes[] = {"16", "512"};
    const struct machine_peaks peaks = h200();
    const struct variant *const naive = variant_find("naive")->variant;
    for (int i = 0; i < 32; i++) {
        const char *res = sizes[i & 1];
        char line[256];
        snprintf(line, sizeof line,
                 "--variant naive --formula %s --orbits %s --noise %s --line-width %s --batch 4096 --res %s",
                 formulas[i >> 1 & 1], orbits[i >> 2 & 1], noises[i >> 3 & 1], widths[i >> 4 & 1], res);
        const struct work work = work_of(line, naive);
        double side = strtod(res, NULL),
               bytes = 4096 * (side * side + 8); /* each image has a label of 8 bytes */
        cr_expect_eq(work.least.flops, 0);
        cr_expect_eq(work.least.once_bytes, bytes, "%g", work.least.once_bytes);
        cr_expect_eq(work.bytes, bytes);
        cr_expect(work.least.round_bytes == 0 && work.least.bus_bytes == 0);
        const struct roofline roofline = roofline_of(&work.least, &peaks);
        double writing_s =
            bytes / peaks.memory_bytes_per_s; /* time of a program that only writes the images */
        cr_expect_leq(roofline.floor_s, writing_s);
        cr_expect_eq(roofline.bound, side > 100 ? BOUND_MEMORY : BOUND_UNKNOWN);
    }
}

/* Multiply-adds of the layers of cnn per sample of 28 x 28 pixels, computed by hand. */
#define CONV1 (26 * 26 * 32 * 9.0)
#define CONV2 (24 * 24 * 64 * 32 * 9.0)
#define DENSE (9216 * 128.0 + 1280)

static struct model cnn(void)
{
    struct model model;
    cr_assert_eq(model_build(&model_tables[2], (struct shape){1, 1, 28, 28}, 10, &model), STATUS_OK);
    cr_assert_str_eq(model.name, "cnn");
    return model;
}

Test(roofline, a_network_has_the_flops_computed_by_hand)
{
    static const struct {
        struct model_savings savings;
        double multiply_adds;
    } cases[] = {
        {{0}, 2 * CONV1 + 3 * (CONV2 + DENSE)},
        {{.pooled_gradients = true}, 2 * CONV1 + CONV2 + 3 * DENSE},
        {{.convolutions = true}, 3 * DENSE},
        {{.backward = true}, CONV1 + CONV2 + DENSE},
        {{.backward = true, .pooled_gradients = true}, CONV1 + CONV2 + DENSE},
        {{.backward = true, .convolutions = true}, DENSE},
    };
    const struct model model = cnn();
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        cr_expect_eq(model_flops(&model, &cases[i].savings), 2 * cases[i].multiply_adds, "case %zu: %.9g", i,
                     model_flops(&model, &cases[i].savings));
}

/* At 2.28 million samples per second on an H200, train-graph reaches 15.2 % of the peak. */
Test(roofline, train_graph_is_near_15_percent)
{
    const struct model model = cnn();
    const struct engine graph = {.unit = UNIT_HALF};
    const struct machine_peaks peaks = h200();
    const struct least_work work = {.flops = 60000 * model_flops(&model, &graph.savings),
                                    .unit = graph.unit,
                                    .once_bytes = 60000 * 784.0};
    const struct roofline roofline = roofline_of(&work, &peaks);
    double share = roofline.floor_s / (60000 / 2.28e6);
    cr_expect(share > 0.152 && share < 0.153, "%g", share);
    cr_expect_eq(roofline.bound, BOUND_COMPUTE);
}

/* Returns the work of an epoch of 500 samples in batches of 64, with this engine and these options. */
static struct work training(const struct engine *engine, const char *options)
{
    const struct variant variant = {.platform = "cuda", .traits = engine};
    char line[256];
    snprintf(
        line, sizeof line,
        "--variant train-naive --model logreg --train-size 500 --test-size 10 --batch 64 --data digits %s",
        options);
    return work_of(line, &variant);
}

/* Engines declare which multiplications by zero they skip. The minimum work omits these multiplications. */
Test(roofline, variants_that_skip_zeros_declare_it)
{
    static const struct {
        const char *variant;
        bool skips;
    } cases[] = {{"train-naive", false}, {"train-omp", true}, {"train-omp-blas", true}, {"infer-omp", true}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const struct variant *variant = variant_find(cases[i].variant)->variant;
        const struct engine *engine = variant ? variant->traits : NULL;
        if (!engine)
            continue; /* not built */
        cr_expect_eq(engine->savings.pooled_gradients, cases[i].skips, "%s", cases[i].variant);
        cr_expect(!engine->savings.backward && !engine->savings.convolutions, "%s", cases[i].variant);
        cr_expect_eq(engine->unit, UNIT_FP32, "%s", cases[i].variant);
    }
}

Test(roofline, the_work_of_an_epoch_includes_optimizer_state)
{
    static const struct {
        const char *options;
        double tensors; /* number of arrays: parameters and optimizer state */
    } cases[] = {{"--feed stored --optimizer sgd --momentum 0", 1},
                 {"--feed stored --optimizer sgd --momentum 0.9", 2},
                 {"--feed stored --optimizer adam", 3},
                 {"--feed stored --optimizer adamw", 3},
                 {"--feed stored --optimizer adam --ema 0.9", 4}}; /* one more for the moving average */
    const struct engine half = {.unit = UNIT_HALF}, plain = {.unit = UNIT_FP32};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const struct work work = training(&half, cases[i].options);
        cr_expect_eq(work.items, 500);
        cr_expect_eq(work.least.flops, 500 * 2 * 2 * 7840.0); /* forward, and the gradient of the weights */
        cr_expect_eq(work.least.unit, UNIT_HALF);
        cr_expect_eq(work.least.once_bytes, 500 * 784.0);
        cr_expect_eq(work.least.round_bytes, cases[i].tensors * 4 * 7850, "%s", cases[i].options);
        cr_expect_eq(work.least.rounds, 2 * 8.0); /* each of 8 steps reads and writes the tensors once */
    }
    const struct work constant = training(&plain, "--feed constant --optimizer adam");
    cr_expect_eq(constant.least.unit, UNIT_FP32);
    cr_expect_eq(constant.least.once_bytes, 0, "constant samples stay in the cache and must not count");
}

/* ---- Output of the program ---- */

static const char *avx2(void)
{
    return "avx2";
}

/* The run has 1e9 floating-point operations and 8 threads. The CPU's maximum clock is 3 GHz, and the process
 * may use 5 cores. */
Test(roofline, peaks_of_a_cpu_use_physical_cores_and_instruction_set)
{
    struct settings settings = {.resources.threads = 8};
    const struct variant threaded = {.platform = "cpu", .threaded = true, .instruction_set = avx2},
                         single = {.platform = "cpu", .instruction_set = avx2}, silent = {.platform = "cpu"};
    struct variant_entry entry = {"x", "train", "NOTHING", "", &threaded};
    struct runner runner = {.settings = &settings, .entry = &entry};
    const struct work work = {.bytes = 1, .least = {.flops = 1e9, .once_bytes = 1e15}};
    runner.env.max_clock_hz = 3e9;
    runner.env.allowed_threads = 10;
    runner.env.allowed_cores = 5;
    struct roofline roofline = runner_roofline(&runner, &work);
#if defined(__x86_64__)
    const struct roofline wanted = {1e9, 5 * 32 * 3e9, 0, 0, BOUND_COMPUTE, 1e9 / (5 * 32 * 3e9)};
    expect_roofline(&roofline, &wanted, "8 threads");
    entry.variant = &single;
    roofline = runner_roofline(&runner, &work);
    cr_expect_eq(roofline.peak_flops, 32 * 3e9);
#endif
    entry.variant = &silent;
    roofline = runner_roofline(&runner, &work);
    cr_expect(roofline.peak_flops == 0 && roofline.floor_s == 0);
    entry.variant = &threaded;
    runner.env.max_clock_hz = 0; /* no driver reports the clock */
    roofline = runner_roofline(&runner, &work);
    cr_expect(roofline.peak_flops == 0 && roofline.floor_s == 0 && roofline.flops == 1e9);
}

Test(roofline, peaks_of_a_gpu_are_used)
{
    const struct variant variant = {.platform = "cuda"};
    const struct variant_entry entry = {"x", "train", "NOTHING", "", &variant};
    struct runner runner = {.entry = &entry};
    runner.device.peaks = machine;
    for (size_t i = 0; i < COUNT_OF(works); i++) {
        const struct work work = {.least = works[i].work};
        const struct roofline got = runner_roofline(&runner, &work);
        expect_roofline(&got, &works[i].wanted, works[i].name);
    }
}

/* Expects a row with this roofline to have these cells. */
static void expect_columns(const struct roofline *roofline, const char *const *wanted)
{
    static const char *const columns[] = {"flops", "bytes",         "peak_flops_per_s", "peak_bytes_per_s",
                                          "bound", "roofline_share"};
    struct settings settings;
    read_settings(&settings, "--variant naive");
    const struct runner runner = {
        .settings = &settings, .entry = settings.variants[0], .partition = {0, 1, false}};
    const struct result result = {.work.items = 1, .bench.time.median = 4, .roofline = *roofline};
    const struct row_columns *table;
    struct row row;
    must(columns_of(settings.workload, &table));
    row_open(&row, table->row);
    runner_set_result(&runner, &result, &row);
    for (size_t i = 0; i < COUNT_OF(columns); i++)
        cr_expect_str_eq(cell(&row, columns[i]), wanted[i], "%s", columns[i]);
    row_free(&row);
    settings_free(&settings);
}

Test(roofline, a_row_has_the_roofline)
{
    const struct roofline known = {800, 1000, 20, 10, BOUND_MEMORY, 2}, unknown = {.flops = 800};
    expect_columns(&known, (const char *const[]){"800", "20", "1000", "10", "memory", "0.5"});
    expect_columns(&unknown, (const char *const[]){"800", "", "", "", "", ""});
}

/* Expects the printed table of a result with this roofline to contain this text. */
static void expect_cell(const struct roofline *roofline, const char *wanted)
{
    char text[4096] = "", path[] = "/tmp/fdsl-XXXXXX";
    struct settings settings;
    struct report *report;
    struct row row = {0};
    read_settings(&settings, "--variant naive");
    row_text(&row, "variant", "fast");
    row_real(&row, "items", 1);
    row_real(&row, "time_median_s", 4);
    row_real(&row, "median_error", 0.01);
    row_positive(&row, "roofline_share", roofline->floor_s / 4);
    row_text(&row, "bound", roofline_bound_name(roofline->bound));
    cr_assert(close(mkstemp(path)) == 0 && freopen(path, "w", stdout));
    must(report_begin(&settings, NULL, &report));
    must(report_add(report, &row, 1));
    must(report_end(report));
    fflush(stdout);
    FILE *file = fopen(path, "r");
    cr_assert(file && fread(text, 1, sizeof text - 1, file) > 0);
    fclose(file);
    unlink(path);
    cr_expect(strstr(text, wanted), "'%s' is not in:\n%s", wanted, text);
    settings_free(&settings);
}

Test(roofline, the_table_has_the_bound)
{
    expect_cell(&(const struct roofline){.bound = BOUND_COMPUTE, .floor_s = 0.5}, " 12.50% compute ");
    expect_cell(&(const struct roofline){.bound = BOUND_BUS, .floor_s = 3}, " 75.00% bus ");
    expect_cell(&(const struct roofline){.flops = 9}, " -               - ");
}
