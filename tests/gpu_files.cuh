/* Shared by the programs that test streams on a GPU: images of many shapes in class folders, and a kernel
 * that takes a given time. A failed call ends the program with status 1. */
#ifndef FDSL_TESTS_GPU_FILES_CUH
#define FDSL_TESTS_GPU_FILES_CUH

#include "gpu_learner.cuh"

#include <filesystem>
#include <string>
#include <vector>

#include "core/philox.h"
#include "data/dataset.h"
#include "data/image_formats.h"

static uint32_t drawn(uint32_t key, uint32_t number, uint32_t i)
{
    return philox(philox_key(key), number, i / 4, 0, 0).word[i % 4];
}

enum kind { COLOUR, GRAY, TURNED, PNG_FILE, TRUNCATED };

/* Images in class folders. Their sides are in [least, most]. */
struct files {
    const char *name;
    uint32_t count, least, most, broken; /* every `broken`-th file is truncated; 0: none */
};

static std::string folder; /* with a folder per struct files; removed at the end */

static enum kind kind_of(const struct files *files, uint32_t n)
{
    if (files->broken > 0 && n % files->broken == files->broken - 1)
        return TRUNCATED;
    return n % 16 == 3 ? GRAY : n % 16 == 7 ? PNG_FILE : n % 4 == 2 ? TURNED : COLOUR;
}

/* Returns waves with noise, which differ in all samples and channels. */
static std::vector<uint8_t> paint(uint32_t n, uint32_t width, uint32_t height, uint32_t channels)
{
    const uint32_t row = width * channels;
    std::vector<uint8_t> pixels((size_t)row * height);
    std::vector<float> across(row), down((size_t)height * channels);
    uint32_t noise = n * 2654435761u;
    for (uint32_t i = 0; i < row; i++)
        across[i] = sinf((0.02f + 1e-4f * (float)(drawn(1, n, 0) % 3000)) * (float)i + (float)(i % channels));
    for (uint32_t i = 0; i < height * channels; i++)
        down[i] = 100 * cosf((0.03f + 0.001f * (float)(n % 97)) * (float)i + (float)(i % channels * n % 7));
    for (uint32_t y = 0; y < height; y++)
        for (uint32_t i = 0; i < row; i++) {
            noise = noise * 1664525u + 1013904223u;
            pixels[(size_t)y * row + i] =
                (uint8_t)(128 + across[i] * down[y * channels + i % channels] + (float)(noise >> 28));
        }
    return pixels;
}

/* Inserts an EXIF header with an orientation after the first marker of a JPEG. */
static void turn(std::vector<uint8_t> *bytes, uint8_t orientation)
{
    const uint8_t exif[] = {0xff, 0xe1, 0, 34, 'E', 'x', 'i', 'f', 0, 0, 'M', 'M',         0, 42, 0, 0, 0, 8,
                            0,    1,    1, 18, 0,   3,   0,   0,   0, 1, 0,   orientation, 0, 0,  0, 0, 0, 0};
    bytes->insert(bytes->begin() + 2, exif, exif + sizeof exif);
}

static std::vector<uint8_t> encode(const struct files *files, uint32_t n)
{
    const enum kind kind = kind_of(files, n);
    const uint32_t range = files->most - files->least + 1, channels = kind == GRAY ? 1 : 3;
    const uint32_t width = files->least + drawn(2, n, 0) % range,
                   height = files->least + drawn(2, n, 1) % range;
    const std::vector<uint8_t> pixels = paint(n, width, height, channels);
    const struct jpeg_shape jpeg = {width, height, channels, 1, true};
    const struct png_shape png = {width, height, channels};
    void *bytes;
    size_t size;
    must(kind == PNG_FILE ? png_encode(pixels.data(), &png, &bytes, &size)
                          : jpeg_encode(pixels.data(), &jpeg, 60 + (int)(n % 36), &bytes, &size));
    std::vector<uint8_t> file((uint8_t *)bytes, (uint8_t *)bytes + size);
    free(bytes);
    if (kind == TURNED)
        turn(&file, (uint8_t)(1 + n / 4 % 8));
    if (kind == TRUNCATED)
        file.resize(size / 2);
    return file;
}

static std::string name_of(const struct files *files, uint32_t n)
{
    char name[64];
    snprintf(name, sizeof name, "/%u/%06u.%s", n * 3 / files->count, n,
             kind_of(files, n) == PNG_FILE ? "png" : "jpg");
    return name;
}

/* Writes the files unless they exist. Returns their folder. */
static std::string write_files(const struct files *files)
{
    const std::string path = folder + "/" + files->name;
    for (uint32_t n = 0; n < files->count && !std::filesystem::exists(path + name_of(files, n)); n++) {
        const std::vector<uint8_t> bytes = encode(files, n);
        std::filesystem::create_directories(path + "/" + std::to_string(n * 3 / files->count));
        FILE *file = static_cast<FILE *>(must_have(fopen((path + name_of(files, n)).c_str(), "wb")));
        const bool written = fwrite(bytes.data(), bytes.size(), 1, file) == 1;
        must_have(fclose(file) == 0 && written ? file : NULL);
    }
    return path;
}

/* Writes the files unless they exist, and opens them as a data set. Sample n is the n-th file. */
static inline void open_files(const struct files *files, struct dataset *dataset)
{
    const std::string path = write_files(files);
    struct members choice;
    must(members_parse(NULL, NULL, NULL, &choice));
    must(dataset_open(path.c_str(), false, &choice, NULL, dataset));
    must_have(dataset->sample_count == files->count ? dataset : NULL);
}

static __global__ void spin_kernel(uint64_t ns)
{
    uint64_t begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < ns);
}

#endif
