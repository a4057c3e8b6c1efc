/* Shared by the tests that compare the generator `fused` with `naive` and `omp`: gpu_formulas, gpu_fractal
 * and gpu_color. Prints one line per case, and counts the failures. */
#ifndef FDSL_TESTS_GPU_GENERATED_CUH
#define FDSL_TESTS_GPU_GENERATED_CUH

#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "common/check.cuh"
#include "core/generator.h"
#include "machine/device.h"
#include "synth/fused.cuh"

extern "C" {
extern const struct variant variant_naive, variant_omp, variant_fused, variant_fused_graph;
}

#define THREADS 16
#define RUNS    40 /* per time; a quarter of them is not counted */

static int failures;

static inline void must(enum status status)
{
    if (status != STATUS_OK) {
        printf("FAILED  %s\n", status_text());
        exit(1);
    }
}

static inline void must(cudaError_t error)
{
    must(cuda_status(error, "a call", __FILE__, __LINE__));
}

static inline void report(bool well, const char *text)
{
    printf("%s  %s\n", well ? "ok    " : "FAILED", text);
    fflush(stdout);
    failures += !well;
}

static inline double median(std::vector<double> values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

/* Images and their targets, in host memory. A vector is empty if the images do not have the target. */
struct generated_batch {
    std::vector<uint8_t> images, masks; /* `masks` also has multi-hot labels */
    std::vector<int64_t> labels;
    std::vector<float> points;
};

static inline void make_room(const struct synth *synth, uint32_t count, struct generated_batch *batch)
{
    batch->images.resize(count * synth_output_bytes(synth));
    batch->masks.resize(count * synth_mask_bytes(synth));
    batch->labels.resize(count);
    batch->points.resize(count * synth_cloud_bytes(synth) / sizeof(float));
}

/* Returns the numbers of images. `listed`: random ones, some of them large and some repeated. */
static inline std::vector<uint64_t> numbers_of(bool listed, uint32_t count)
{
    std::vector<uint64_t> numbers(count);
    for (uint32_t i = 0; i < count; i++) {
        struct philox_block block = philox(philox_key(1), i, 0, 0, 0);
        numbers[i] = i % 5 == 4 ? numbers[i - 1] : (uint64_t)(block.word[0] % 4096) << block.word[1] % 36;
        if (!listed)
            numbers[i] = 11 + i;
    }
    return numbers;
}

/* Generates the images with `naive`, or with `omp` if there are more than `few`. */
static inline void generate_on_host(const struct synth *synth, const std::vector<uint64_t> &numbers,
                                    uint32_t few, struct generated_batch *batch)
{
    const uint32_t count = (uint32_t)numbers.size();
    const bool many = count > few;
    const struct generator_request request = {
        .on_device = false, .resources = {.threads = many ? THREADS : 1, .device = 0}, .batch = count};
    struct generator *generator;
    make_room(synth, count, batch);
    must(synth_generator_open(synth, many ? &variant_omp : &variant_naive, &request, &generator));
    const struct generator_numbers listed = {numbers.data(), 0, nullptr, nullptr};
    const struct generator_targets targets = {batch->labels.data(),
                                              batch->masks.empty() ? nullptr : batch->masks.data(),
                                              batch->points.empty() ? nullptr : batch->points.data()};
    must(generator_make(generator, &listed, count, batch->images.data(), &targets, nullptr));
    generator_close(generator);
}

/* Allocates `count` values on the device, all bytes of which are 0x5a; NULL if there are none. */
template <typename T> static T *poisoned(size_t count)
{
    T *memory = nullptr;
    if (count == 0)
        return nullptr;
    must(cudaMalloc(&memory, count * sizeof *memory));
    must(cudaMemset(memory, 0x5a, count * sizeof *memory));
    return memory;
}

/* Enqueues the copy of `some` samples of `values` values each to sample `at` of a vector. */
template <typename T>
static void copy_back(std::vector<T> &to, uint32_t at, const T *from, uint32_t some, size_t values,
                      cudaStream_t stream)
{
    if (from)
        must(cudaMemcpyAsync(to.data() + at * values, from, some * values * sizeof *from,
                             cudaMemcpyDeviceToHost, stream));
}

/* Generates the images in batches of synth->batch on the device. The last batch may be short. `listed` is as
 * for numbers_of(). `masked`: whether masks are wanted. */
static inline void generate_on_device(const struct synth *synth, const std::vector<uint64_t> &numbers,
                                      bool listed, bool masked, struct generated_batch *batch)
{
    const uint32_t size = (uint32_t)synth->batch, count = (uint32_t)numbers.size();
    const struct generator_request request = {
        .on_device = true, .resources = {.threads = 1, .device = 0}, .batch = size};
    const size_t bytes = synth_output_bytes(synth), mask_bytes = masked ? synth_mask_bytes(synth) : 0,
                 cloud = synth_cloud_bytes(synth) / sizeof(float);
    struct generator *generator;
    cudaStream_t stream;
    make_room(synth, count, batch);
    must(synth_generator_open(synth, &variant_fused, &request, &generator));
    auto *list = poisoned<uint64_t>(count);
    auto *images = poisoned<uint8_t>(size * bytes), *masks = poisoned<uint8_t>(size * mask_bytes);
    auto *labels = poisoned<int64_t>(size);
    auto *points = poisoned<float>(size * cloud);
    const struct generator_targets targets = {labels, masks, points};
    must(cudaStreamCreate(&stream));
    must(cudaMemcpy(list, numbers.data(), count * sizeof *list, cudaMemcpyHostToDevice));
    for (uint32_t at = 0; at < count; at += size) {
        const uint32_t some = std::min(count - at, size);
        const struct generator_numbers which = {listed ? list + at : nullptr, numbers[at], nullptr, nullptr};
        must(generator_make(generator, &which, some, images, &targets, stream));
        copy_back(batch->images, at, images, some, bytes, stream);
        copy_back(batch->masks, at, masks, some, mask_bytes, stream);
        copy_back(batch->labels, at, labels, some, 1, stream);
        copy_back(batch->points, at, points, some, cloud, stream);
        must(cudaStreamSynchronize(stream));
    }
    generator_close(generator);
    must(cudaStreamDestroy(stream));
    must(cudaFree(points));
    must(cudaFree(labels));
    must(cudaFree(masks));
    must(cudaFree(images));
    must(cudaFree(list));
}

/* Returns the number of samples of which a target, or the image, differs. */
template <typename T>
static uint32_t count_wrong(const std::vector<T> &one, const std::vector<T> &other, uint32_t count)
{
    const size_t values = one.size() / count;
    uint32_t wrong = 0;
    for (uint32_t i = 0; values > 0 && i < count; i++)
        wrong += memcmp(&one[i * values], &other[i * values], values * sizeof(T)) != 0;
    return wrong;
}

static inline const char *fit_name(enum output_fit fit)
{
    return fit == OUTPUT_WHOLE ? "whole" : fit == OUTPUT_RESIZE ? "resized" : "cropped";
}

#endif
