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
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "common/check.cuh"
#include "core/generator.h"
#include "machine/device.h"
#include "synth/class.h"
#include "synth/fused.cuh"

extern "C" {
extern const struct variant variant_naive, variant_omp, variant_fused;
}

#define MANY    32 /* images; more take `naive` too long */
#define THREADS 16

static int failures;

static void must(enum status status)
{
    if (status != STATUS_OK) {
        printf("FAILED  %s\n", status_text());
        exit(1);
    }
}

static void must(cudaError_t error)
{
    must(cuda_status(error, "a call", __FILE__, __LINE__));
}

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

/* ---- Batches ---- */

struct batch {
    std::vector<uint8_t> images, masks;
    std::vector<int64_t> labels;
};

static std::vector<uint64_t> numbers_of(const struct trial *trial, uint32_t count)
{
    std::vector<uint64_t> numbers(count);
    for (uint32_t i = 0; i < count; i++) {
        struct philox_block block = philox(philox_key(1), i, 0, 0, 0);
        numbers[i] = i % 5 == 4 ? numbers[i - 1] : (uint64_t)(block.word[0] % 4096) << block.word[1] % 36;
        if (!trial->listed)
            numbers[i] = 11 + i;
    }
    return numbers;
}

/* Generates the images with `naive`, or with `omp` if there are many. */
static void generate_on_host(const struct synth *synth, const std::vector<uint64_t> &numbers,
                             struct batch *batch)
{
    const uint32_t count = (uint32_t)numbers.size();
    const bool many = count > MANY;
    const struct generator_request request = {
        .on_device = false, .resources = {.threads = many ? THREADS : 1, .device = 0}, .batch = count};
    struct generator *generator;
    batch->images.resize(count * synth_output_bytes(synth));
    batch->masks.resize(count * synth_mask_bytes(synth));
    batch->labels.resize(count);
    must(synth_generator_open(synth, many ? &variant_omp : &variant_naive, &request, &generator));
    const struct generator_numbers listed = {numbers.data(), 0, nullptr, nullptr};
    const struct generator_targets targets = {batch->labels.data(), batch->masks.data()};
    must(generator_make(generator, &listed, count, batch->images.data(), &targets, nullptr));
    generator_close(generator);
}

/* Generates the images in batches of trial->batch on the device. The last batch may be short. `masked`:
 * whether masks are wanted. */
static void generate_on_device(const struct trial *trial, const struct synth *synth,
                               const std::vector<uint64_t> &numbers, bool masked, struct batch *batch)
{
    const struct generator_request request = {
        .on_device = true, .resources = {.threads = 1, .device = 0}, .batch = trial->batch};
    const uint32_t count = (uint32_t)numbers.size();
    const size_t bytes = synth_output_bytes(synth), mask_bytes = masked ? synth_mask_bytes(synth) : 0;
    struct generator *generator;
    uint64_t *list;
    uint8_t *images, *masks;
    int64_t *labels;
    cudaStream_t stream;
    batch->images.resize(count * bytes);
    batch->masks.resize(count * mask_bytes);
    batch->labels.resize(count);
    must(synth_generator_open(synth, &variant_fused, &request, &generator));
    must(cudaMalloc(&list, count * sizeof *list));
    must(cudaMalloc(&images, trial->batch * bytes));
    must(cudaMalloc(&masks, trial->batch * mask_bytes + 1));
    must(cudaMalloc(&labels, trial->batch * sizeof *labels));
    must(cudaStreamCreate(&stream));
    must(cudaMemcpy(list, numbers.data(), count * sizeof *list, cudaMemcpyHostToDevice));
    must(cudaMemset(images, 0x5a, trial->batch * bytes));
    must(cudaMemset(masks, 0x5a, trial->batch * mask_bytes + 1));
    for (uint32_t at = 0; at < count; at += trial->batch) {
        uint32_t some = std::min(count - at, trial->batch);
        const struct generator_numbers listed = {trial->listed ? list + at : nullptr, numbers[at], nullptr,
                                                 nullptr};
        const struct generator_targets targets = {labels, mask_bytes ? masks : nullptr};
        must(generator_make(generator, &listed, some, images, &targets, stream));
        must(cudaMemcpyAsync(&batch->images[at * bytes], images, some * bytes, cudaMemcpyDeviceToHost,
                             stream));
        if (mask_bytes)
            must(cudaMemcpyAsync(&batch->masks[at * mask_bytes], masks, some * mask_bytes,
                                 cudaMemcpyDeviceToHost, stream));
        must(cudaMemcpyAsync(&batch->labels[at], labels, some * sizeof *labels, cudaMemcpyDeviceToHost,
                             stream));
        must(cudaStreamSynchronize(stream));
    }
    generator_close(generator);
    must(cudaStreamDestroy(stream));
    must(cudaFree(labels));
    must(cudaFree(masks));
    must(cudaFree(images));
    must(cudaFree(list));
}

/* ---- Comparison ---- */

/* Returns the number of images whose bytes differ. */
static uint32_t wrong_images(const std::vector<uint8_t> &one, const std::vector<uint8_t> &other,
                             uint32_t count)
{
    const size_t bytes = one.size() / count;
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < count; i++)
        wrong += memcmp(&one[i * bytes], &other[i * bytes], bytes) != 0;
    return wrong;
}

static void compare(const struct trial *trial)
{
    struct synth synth;
    struct batch right, ours, unmasked;
    open_synth(trial, &synth);
    const uint32_t count = trial->batch + (trial->batch < MANY ? (trial->batch + 1) / 2 : 5);
    const std::vector<uint64_t> numbers = numbers_of(trial, count);
    generate_on_host(&synth, numbers, &right);
    plant(trial->fault, &synth);
    generate_on_device(trial, &synth, numbers, true, &ours);
    uint32_t images = wrong_images(right.images, ours.images, count), masks = 0, labels = 0;
    if (!right.masks.empty()) {
        masks = wrong_images(right.masks, ours.masks, count);
        generate_on_device(trial, &synth, numbers, false, &unmasked);
        images += wrong_images(right.images, unmasked.images, count);
    }
    for (uint32_t i = 0; i < count; i++)
        labels += right.labels[i] != ours.labels[i];
    const bool equal = images + masks + labels == 0, well = equal == (trial->fault == FAULT_NONE);
    printf("%s  %s %u classes, %u^2, batch %u, output %u^2 %s %s x %u%s%s%s: %u images, %u masks, %u labels "
           "differ\n",
           well ? "ok    " : "FAILED", formulas[trial->formula]->name, trial->classes, trial->res,
           trial->batch, synth.output.res,
           synth.output.fit == OUTPUT_WHOLE    ? "whole"
           : synth.output.fit == OUTPUT_RESIZE ? "resized"
                                               : "cropped",
           dtype_names[trial->type], trial->channels, trial->listed ? ", listed" : "",
           trial->far      ? ", far"
           : trial->orbits ? ", many orbits"
                           : "",
           trial->fault ? ", planted fault" : "", images, masks, labels);
    fflush(stdout);
    failures += !well;
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

#define RUNS 40

static double median(std::vector<double> values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

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
