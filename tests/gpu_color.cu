/* Compares the fractals in colour that `fused` draws with those of `naive` and `omp`, bit for bit: images,
 * labels and multi-hot labels, for odd sizes and all outputs. Then plants faults, which the comparison must
 * detect, and prints the times per image. make check-gpu runs this program.
 *
 *     gpu_color [--short] [--times]
 *
 * --short: few small cases and no times; for compute-sanitizer. --times: only the times.
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_generated.cuh"

#define FEW 12 /* images; more take `naive` too long */

/* A change that only the device sees. The comparison must detect it. */
enum fault { FAULT_NONE, FAULT_COEFFICIENT, FAULT_CHOICE, FAULT_SEED };

struct trial {
    bool several, patches;
    uint32_t classes, res, batch;
    uint32_t out_res; /* 0: the whole canvas */
    enum output_fit fit;
    enum dtype type;
    enum output_layout layout;
    bool listed; /* random image numbers, some of them large and some repeated, instead of consecutive ones */
    enum fault fault;
};

static void open_synth(const struct trial *trial, struct synth *synth)
{
    const bool whole = trial->out_res == 0;
    const double mean[] = {0.4, 0.5, 0.6}, deviation[] = {0.25, 0.5, 0.75};
    *synth = {};
    synth_set_formula(synth, trial->several ? FORMULA_MULTIFRACTAL : FORMULA_COLORFRACTAL);
    synth->points = !trial->patches;
    synth->res = trial->res;
    synth->batch = synth->stride = trial->batch;
    synth->seed = 7;
    synth->first = 5;
    synth->output.type = trial->type;
    synth->output.layout = trial->layout;
    synth->output.fit = whole ? OUTPUT_WHOLE : trial->fit;
    synth->output.res = whole ? trial->res : trial->out_res;
    synth->output.channels = COLOR_CHANNELS;
    synth->output.color = true;
    output_set_scale(&synth->output, synth->res, mean, deviation);
    must(synth_draw_classes(synth, nullptr, formula_names[synth->formula], trial->classes));
    for (uint32_t c = 0; c < synth->class_count; c++)
        synth->rows[c].id += 3; /* as of a file: the number of a class is not its index */
    must(synth_fill_tables(synth));
}

/* Changes what the device reads, after the reference has drawn its images. */
static void plant(enum fault fault, struct synth *synth)
{
    for (uint32_t c = 0; c < synth->class_count; c++) {
        if (fault == FAULT_COEFFICIENT)
            synth->colors[c].map[1][4] *= 1.01f;
        else if (fault == FAULT_CHOICE)
            synth->colors[c].below[0] += 20;
    }
    synth->seed += fault == FAULT_SEED;
}

static void compare(const struct trial *trial)
{
    struct synth synth;
    struct generated_batch right, ours;
    char text[256];
    open_synth(trial, &synth);
    const uint32_t count = trial->batch + (trial->batch < FEW ? (trial->batch + 1) / 2 : 5);
    const std::vector<uint64_t> numbers = numbers_of(trial->listed, count);
    generate_on_host(&synth, numbers, FEW, &right);
    plant(trial->fault, &synth);
    generate_on_device(&synth, numbers, trial->listed, true, &ours);
    const uint32_t images = count_wrong(right.images, ours.images, count);
    const uint32_t labels =
        count_wrong(right.labels, ours.labels, count) + count_wrong(right.masks, ours.masks, count);
    snprintf(text, sizeof text,
             "%s of %u classes, %s, %u^2, batch %u, output %u^2 %s %s %s%s%s: %u images, %u labels differ",
             formula_names[synth.formula], trial->classes, trial->patches ? "patches" : "points", trial->res,
             trial->batch, synth.output.res, fit_name(synth.output.fit), dtype_names[trial->type],
             trial->layout == OUTPUT_NCHW ? "nchw" : "nhwc", trial->listed ? ", listed" : "",
             trial->fault ? ", planted fault" : "", images, labels);
    report((images + labels == 0) == (trial->fault == FAULT_NONE), text);
    synth_free(&synth);
}

/* Compares two runs of a variant with the reference. */
static void compare_runs(const struct variant *variant, const char *name)
{
    const struct trial trial = {true, false, 30, 70, 9, 0, OUTPUT_CROP, DTYPE_U8, OUTPUT_NCHW};
    const struct resources resources = {.threads = 1, .device = 0};
    struct synth synth;
    void *state = nullptr;
    struct run_time time;
    char text[256];
    uint32_t images = 0, labels = 0;
    open_synth(&trial, &synth);
    std::vector<uint8_t> right(synth_image_bytes(&synth)), ours(right.size());
    std::vector<uint8_t> right_hot(synth.class_count), hot(synth.class_count);
    void *scratch = aligned_alloc(64, color_scratch_bytes(&synth.color));
    must(variant->setup(&resources, &synth, &state));
    for (uint64_t run : {1, 40}) {
        must(variant_run(variant, state, run, &time));
        for (uint64_t j = 0; j < synth.batch; j++) {
            const struct philox_key key = synth_image_key(&synth, synth_run_image(&synth, run, j));
            struct synth_fetch fetch = {.j = j, .pixels = ours.data(), .mask = hot.data()};
            must(variant->fetch(state, &fetch));
            color_draw_plain(&synth.color, synth.colors, key, 0, scratch, right.data());
            color_multi_hot(&synth.color, key, right_hot.data());
            images += right != ours;
            labels += right_hot != hot;
        }
    }
    snprintf(text, sizeof text, "two runs of %s: %u images, %u labels differ", name, images, labels);
    report(images + labels == 0, text);
    variant->teardown(state);
    free(scratch);
    synth_free(&synth);
}

static void compare_all(bool brief)
{
    const enum output_fit crop = OUTPUT_CROP, resize = OUTPUT_RESIZE;
    const enum output_layout planes = OUTPUT_NCHW, pixels = OUTPUT_NHWC;
    const struct trial shorts[] = {
        {true, false, 7, 61, 3, 0, crop, DTYPE_U8, planes, true},
        {false, true, 3, 40, 2, 23, resize, DTYPE_F16, pixels},
        {false, false, 3, 33, 3, 17, crop, DTYPE_U8, planes, true},
    };
    const struct trial trials[] = {
        {true, false, 1000, 224, 7, 0, crop, DTYPE_U8, planes, true},
        {false, false, 1000, 224, 7, 0, crop, DTYPE_U8, planes, true},
        {true, false, 1000, 224, 256, 0, crop, DTYPE_U8, planes},
        {false, false, 1000, 224, 256, 0, crop, DTYPE_F16, planes},
        {true, true, 100, 224, 64, 0, crop, DTYPE_F16, pixels, true},
        {false, true, 100, 224, 64, 0, crop, DTYPE_U8, planes},
        {true, false, 1, 1, 5, 0, crop, DTYPE_U8, planes, true},
        {false, false, 1, 1, 5, 0, crop, DTYPE_F32, planes, true},
        {true, false, 50, 3, 11, 0, crop, DTYPE_U8, pixels, true},
        {true, false, 50, 31, 1100, 0, crop, DTYPE_U8, planes, true}, /* several slices */
        {false, false, 50, 97, 11, 0, crop, DTYPE_F32, pixels, true},
        {true, false, 50, 257, 11, 101, crop, DTYPE_BF16, planes, true},
        {false, true, 50, 300, 11, 224, crop, DTYPE_U8, planes, true},
        {true, false, 50, 224, 11, 112, resize, DTYPE_U8, planes, true},
        {false, false, 50, 224, 64, 96, resize, DTYPE_F16, planes},
        {true, true, 50, 101, 5, 211, resize, DTYPE_F32, pixels, true}, /* larger than the canvas */
        {false, false, 5, 1031, 2, 1, resize, DTYPE_BF16, planes, true},
        {true, false, 5, 4099, 1, 700, resize, DTYPE_U8, planes, true},
        {true, false, 7, 224, 7, 0, crop, DTYPE_U8, planes, false, FAULT_COEFFICIENT},
        {false, false, 7, 224, 7, 0, crop, DTYPE_U8, planes, false, FAULT_COEFFICIENT},
        {true, false, 7, 224, 7, 0, crop, DTYPE_U8, planes, false, FAULT_CHOICE},
        {true, false, 7, 224, 7, 0, crop, DTYPE_U8, planes, false, FAULT_SEED},
    };
    for (const struct trial &trial : shorts)
        compare(&trial);
    compare_runs(&variant_fused, "fused");
    compare_runs(&variant_fused_graph, "fused-graph");
    for (const struct trial &trial : trials)
        if (!brief)
            compare(&trial);
}

/* ---- Times ---- */

/* Prints the median time per image of the generator. */
static void print_times(const struct trial *trial)
{
    const struct generator_request request = {
        .on_device = true, .resources = {.threads = 1, .device = 0}, .batch = trial->batch};
    struct synth synth;
    struct generator *generator;
    struct device_clock clock = {};
    uint8_t *images, *hot;
    int64_t *labels;
    std::vector<double> times_s, objects_s, composing_s;
    open_synth(trial, &synth);
    must(cudaMalloc(&images, trial->batch * synth_output_bytes(&synth)));
    must(cudaMalloc(&hot, trial->batch * synth_mask_bytes(&synth) + 1));
    must(cudaMalloc(&labels, trial->batch * sizeof *labels));
    must(synth_generator_open(&synth, &variant_fused, &request, &generator));
    must(device_clock_open(&clock));
    const struct generator_targets targets = {labels, hot};
    struct color_plan *plan;
    must(color_plan_open(0, &synth, &plan));
    for (uint32_t run = 0; run < RUNS; run++) {
        const struct generator_numbers numbers = {nullptr, run * trial->batch, nullptr, nullptr};
        const struct fused_call call = {nullptr, run, nullptr, images, labels, hot};
        struct run_time time;
        double objects = 0, composing = 0;
        must(device_clock_begin(&clock));
        must(generator_make(generator, &numbers, trial->batch, images, &targets, clock.stream));
        must(device_clock_end(&clock, &time));
        must(color_plan_time(plan, &call, &clock, &objects, &composing));
        if (run < RUNS / 4)
            continue;
        times_s.push_back(time.device_s);
        objects_s.push_back(objects);
        composing_s.push_back(composing);
    }
    auto per_image_us = [&](const std::vector<double> &times) { return 1e6 / trial->batch * median(times); };
    printf("%-12s %-7s %4u^2 to %4u^2 %-4s %s batch %4u %8.3f us per image (clouds and objects %.3f, "
           "composition %.3f)\n",
           formula_names[synth.formula], trial->patches ? "patches" : "points", trial->res, synth.output.res,
           dtype_names[trial->type], trial->layout == OUTPUT_NCHW ? "nchw" : "nhwc", trial->batch,
           per_image_us(times_s), per_image_us(objects_s), per_image_us(composing_s));
    fflush(stdout);
    color_plan_close(plan);
    generator_close(generator);
    device_clock_close(&clock);
    must(cudaFree(labels));
    must(cudaFree(hot));
    must(cudaFree(images));
    synth_free(&synth);
}

static void print_all_times(void)
{
    const enum output_fit crop = OUTPUT_CROP, resize = OUTPUT_RESIZE;
    const enum output_layout planes = OUTPUT_NCHW, pixels = OUTPUT_NHWC;
    for (bool several : {true, false}) {
        const struct trial trials[] = {
            {several, false, 1000, 224, 256, 0, crop, DTYPE_U8, planes},
            {several, false, 1000, 224, 1024, 0, crop, DTYPE_U8, planes},
            {several, false, 1000, 224, 1, 0, crop, DTYPE_U8, planes},
            {several, false, 1000, 224, 32, 0, crop, DTYPE_U8, planes},
            {several, false, 1000, 224, 256, 0, crop, DTYPE_F16, planes},
            {several, false, 1000, 224, 256, 0, crop, DTYPE_U8, pixels},
            {several, true, 1000, 224, 256, 0, crop, DTYPE_U8, planes},
            {several, false, 1000, 256, 256, 224, resize, DTYPE_F16, planes},
        };
        for (const struct trial &trial : trials)
            print_times(&trial);
    }
}

int main(int argc, char **argv)
{
    bool brief = false, times = false;
    for (int i = 1; i < argc; i++) {
        brief = brief || strcmp(argv[i], "--short") == 0;
        times = times || strcmp(argv[i], "--times") == 0;
    }
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_color: %s\n", status_text());
        return 4;
    }
    if (!times)
        compare_all(brief);
    if (!brief)
        print_all_times();
    return failures ? 3 : 0;
}
