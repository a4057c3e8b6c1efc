/* Compares the images, masks and labels of the generator `fused` with those of `naive` and `omp`, bit for
 * bit, for every formula and for odd sizes. Then plants faults, which the comparison must detect, and prints
 * the time per image. make check-gpu runs this program.
 *
 *     gpu_formulas [--short] [--times] [--formula NAME]
 *
 * --short: few small cases and no times; for compute-sanitizer. --times: only the times.
 * --formula: only this formula.
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_generated.cuh"
#include "synth/class.h"

#define MANY 32 /* images; more take `naive` too long */

/* ---- Cases ---- */

/* A change of the classes that only the device sees. The comparison must detect it. */
enum fault { FAULT_NONE, FAULT_NOISE, FAULT_NUMBER, FAULT_GRADIENT };

struct trial {
    enum formula_id formula;
    uint32_t classes, res, batch;
    uint32_t out_res; /* 0: the whole canvas */
    enum output_fit fit;
    enum dtype type;
    uint32_t channels;
    bool listed; /* random image numbers, some of them large and some repeated, instead of consecutive ones */
    bool far;    /* some vertices are more than 2^14 pixels away */
    enum fault fault;
    uint32_t orbits; /* of every class, so that a tile has more lines than a list; 0: as drawn */
};

/* Sets the classes of a formula: those of its largest published set, or else of the ranges of its name. */
static void choose_classes(struct synth *synth, uint32_t count)
{
    const struct formula *formula = formulas[synth->formula];
    const char *name = formula->name;
    for (const struct formula_preset *preset = formula->presets; preset && preset->name; preset++)
        if (preset->set && preset->set->classes >= count)
            name = preset->name;
    must(synth_draw_classes(synth, nullptr, name, count));
}

static void open_synth(const struct trial *trial, struct synth *synth)
{
    *synth = {};
    synth_set_formula(synth, trial->formula);
    choose_classes(synth, trial->classes);
    for (uint32_t c = 0; trial->far && c < trial->classes; c += 2)
        (void)formula_set(formulas[trial->formula], &synth->rows[c], "noise", 60 + c);
    for (uint32_t c = 0; trial->orbits > 0 && c < trial->classes; c++)
        (void)formula_set(formulas[trial->formula], &synth->rows[c], "orbits", trial->orbits);
    synth->res = trial->res;
    synth->batch = synth->stride = trial->batch;
    synth->seed = 7;
    synth->first = 5;
    const bool whole = trial->out_res == 0;
    synth->output = {trial->type,
                     OUTPUT_NCHW,
                     whole ? OUTPUT_WHOLE : trial->fit,
                     whole ? trial->res : trial->out_res,
                     trial->channels,
                     {},
                     {}};
    const double mean[] = {0.4, 0.5, 0.6}, deviation[] = {0.25, 0.5, 0.75};
    output_set_scale(&synth->output, synth->res, mean, deviation);
    must(synth_fill_tables(synth));
}

/* Changes what the device reads. The tables of `synth` are shared with the reference, which has drawn its
 * images already. */
static void plant(enum fault fault, struct synth *synth)
{
    if (fault == FAULT_NOISE)
        for (uint32_t c = 0; c < synth->class_count; c++)
            synth->classes[c].noise *= 1 + 0x1p-20f;
    else if (fault == FAULT_NUMBER)
        for (uint32_t c = 0; c < synth->class_count; c++)
            synth->classes[c].id ^= 1;
    else if (fault == FAULT_GRADIENT)
        synth->gradients[77] = -synth->gradients[77];
}

/* ---- Comparison ---- */

static void compare(const struct trial *trial)
{
    struct synth synth;
    struct generated_batch right, ours, unmasked;
    char text[256];
    open_synth(trial, &synth);
    const uint32_t count = trial->batch + (trial->batch < MANY ? (trial->batch + 1) / 2 : 5);
    const std::vector<uint64_t> numbers = numbers_of(trial->listed, count);
    generate_on_host(&synth, numbers, MANY, &right);
    plant(trial->fault, &synth);
    generate_on_device(&synth, numbers, trial->listed, true, &ours);
    uint32_t images = count_wrong(right.images, ours.images, count);
    const uint32_t masks = count_wrong(right.masks, ours.masks, count);
    const uint32_t labels = count_wrong(right.labels, ours.labels, count);
    if (!right.masks.empty()) {
        generate_on_device(&synth, numbers, trial->listed, false, &unmasked);
        images += count_wrong(right.images, unmasked.images, count);
    }
    snprintf(text, sizeof text,
             "%s %u classes, %u^2, batch %u, output %u^2 %s %s x %u%s%s%s: %u images, %u masks, %u labels "
             "differ",
             formulas[trial->formula]->name, trial->classes, trial->res, trial->batch, synth.output.res,
             fit_name(synth.output.fit), dtype_names[trial->type], trial->channels,
             trial->listed ? ", listed" : "",
             trial->far      ? ", far"
             : trial->orbits ? ", many orbits"
                             : "",
             trial->fault ? ", planted fault" : "", images, masks, labels);
    report((images + masks + labels == 0) == (trial->fault == FAULT_NONE), text);
    synth_free(&synth);
}

static void compare_all(enum formula_id formula, bool brief)
{
    const bool masked = line_rules_of(formula).masked;
    const uint32_t few = 7, many = masked ? 254 : 1000;
    const enum output_fit crop = OUTPUT_CROP, resize = OUTPUT_RESIZE;
    const struct trial shorts[] = {
        {formula, many, 64, 7, 0, crop, DTYPE_U8, 1},
        {formula, 3, 224, 3, 100, crop, DTYPE_U8, 1, true},
        {formula, 3, 96, 3, 33, resize, DTYPE_F16, 3, true},
        {formula, few, 160, 1, 1, resize, DTYPE_U8, 1},
    };
    const struct trial trials[] = {
        {formula, 1, 512, 1, 0, crop, DTYPE_U8, 1},
        {formula, 3, 512, 3, 0, crop, DTYPE_U8, 1, true},
        {formula, many, 512, 7, 0, crop, DTYPE_U8, 1, true},
        {formula, many, 512, 256, 0, crop, DTYPE_U8, 1},
        {formula, many, 32, 256, 0, crop, DTYPE_U8, 1, true},
        {formula, many, 64, 400, 0, crop, DTYPE_U8, 1},        /* the kernels for many images */
        {formula, many, 33, 1100, 0, crop, DTYPE_U8, 1, true}, /* several slices */
        {formula, many, 224, 256, 0, crop, DTYPE_F16, 3, true},
        {formula, many, 1024, 7, 0, crop, DTYPE_U8, 1},
        {formula, many, 512, 7, 224, crop, DTYPE_U8, 1, true},
        {formula, many, 512, 64, 224, crop, DTYPE_F16, 1, true},
        {formula, many, 301, 3, 125, crop, DTYPE_U8, 3, true},
        {formula, many, 512, 7, 224, resize, DTYPE_U8, 1, true},
        {formula, many, 512, 64, 224, resize, DTYPE_BF16, 3},
        {formula, many, 224, 7, 512, resize, DTYPE_U8, 1}, /* larger than the canvas */
        {formula, many, 301, 3, 97, resize, DTYPE_F32, 1, true},
        {formula, many, 512, 7, 2, resize, DTYPE_U8, 1}, /* an output pixel covers more than a tile */
        {formula, many, 512, 3, 1, resize, DTYPE_F16, 1, true},
        {formula, few, 512, 7, 0, crop, DTYPE_U8, 1, true, true},
        {formula, few, 256, 300, 0, crop, DTYPE_U8, 1, true, true},
        {formula, few, 512, 7, 100, resize, DTYPE_U8, 1, false, true},
        {formula, few, 256, 3, 0, crop, DTYPE_U8, 1, true, false, FAULT_NONE, 900},
        {formula, few, 512, 7, 0, crop, DTYPE_U8, 1, false, false, FAULT_NOISE},
        {formula, few, 512, 7, 0, crop, DTYPE_U8, 1, false, false, FAULT_NUMBER},
        {formula, few, 512, 7, 0, crop, DTYPE_U8, 1, false, false, FAULT_GRADIENT},
    };
    for (const struct trial &trial : shorts)
        compare(&trial);
    if (!brief)
        for (const struct trial &trial : trials)
            compare(&trial);
}

/* ---- Times ---- */

/* Prints the median time per image of a formula: of the generator, and of the two stages without overlap. */
static void print_times(enum formula_id formula, uint32_t classes, uint32_t res, uint32_t batch)
{
    const struct trial trial = {formula, classes, res, batch, 0, OUTPUT_CROP, DTYPE_U8, 1};
    const struct generator_request request = {
        .on_device = true, .resources = {.threads = 1, .device = 0}, .batch = batch};
    struct synth synth;
    struct generator *generator;
    struct fused_plan *plan;
    struct device_clock clock = {};
    uint8_t *images, *masks = nullptr;
    int64_t *labels;
    open_synth(&trial, &synth);
    must(cudaMalloc(&images, batch * synth_output_bytes(&synth)));
    must(cudaMalloc(&labels, batch * sizeof *labels));
    if (synth_mask_bytes(&synth) > 0)
        must(cudaMalloc(&masks, batch * synth_mask_bytes(&synth)));
    must(synth_generator_open(&synth, &variant_fused, &request, &generator));
    must(fused_open(0, &synth, false, &plan));
    must(device_clock_open(&clock));
    const struct generator_targets targets = {labels, masks};
    std::vector<double> total_s, vertices_s, painting_s;
    for (uint32_t run = 0; run < RUNS; run++) {
        const struct generator_numbers numbers = {nullptr, run * batch, nullptr, nullptr};
        const struct fused_call call = {nullptr, run, nullptr, images, labels, masks};
        struct run_time time;
        double vertices = 0, painting = 0;
        must(device_clock_begin(&clock));
        must(generator_make(generator, &numbers, batch, images, &targets, clock.stream));
        must(device_clock_end(&clock, &time));
        must(fused_time_stages(plan, &call, &clock, &vertices, &painting));
        if (run < RUNS / 4)
            continue;
        total_s.push_back(time.device_s);
        vertices_s.push_back(vertices);
        painting_s.push_back(painting);
    }
    const double unit = 1e6 / batch;
    printf("%-11s %5u classes %5u^2 batch %4u %8.3f us per image; vertices %7.3f, painting %7.3f; %7.1f MB\n",
           formulas[formula]->name, classes, res, batch, unit * median(total_s), unit * median(vertices_s),
           unit * median(painting_s), 1e-6 * (double)generator_memory_bytes(generator));
    fflush(stdout);
    fused_close(plan);
    generator_close(generator);
    device_clock_close(&clock);
    must(cudaFree(masks));
    must(cudaFree(labels));
    must(cudaFree(images));
    synth_free(&synth);
}

int main(int argc, char **argv)
{
    bool brief = false, times = false;
    const char *only = nullptr;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--formula") == 0 && i + 1 < argc)
            only = argv[++i];
        brief = brief || strcmp(argv[i], "--short") == 0;
        times = times || strcmp(argv[i], "--times") == 0;
    }
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_formulas: %s\n", status_text());
        return 4;
    }
    std::vector<enum formula_id> all;
    for (enum formula_id formula : {FORMULA_RCDB, FORMULA_SEGRCDB, FORMULA_VISUALATOM, FORMULA_UJI})
        if (!only || strcmp(formulas[formula]->name, only) == 0)
            all.push_back(formula);
    if (all.empty()) {
        fprintf(stderr, "gpu_formulas: there is no formula %s\n", only);
        return 1;
    }
    for (enum formula_id formula : all)
        if (!times)
            compare_all(formula, brief);
    const struct {
        uint32_t res, batch;
    } sizes[] = {{224, 256}, {512, 1}, {512, 256}, {512, 512}, {512, 1024}, {1024, 256}};
    for (enum formula_id formula : all)
        for (auto size : sizes)
            if (!brief)
                print_times(formula, line_rules_of(formula).masked ? 254 : 1000, size.res, size.batch);
    return failures ? 3 : 0;
}
