#include "synth/batch.cuh"

#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "machine/device.h"
#include "common/stream.cuh"
#include "core/phase.h"
#include "synth/fused_output.cuh"

enum status device_free_bytes(int device, size_t *bytes)
{
    size_t total;
    CUDA_TRY(cudaSetDevice(device));
    CUDA_TRY(cudaMemGetInfo(bytes, &total));
    return STATUS_OK;
}

/* Offsets of the tables in their common allocation, and its size in bytes. */
struct layout {
    size_t classes, offsets, spokes, gradients, bytes;
};

/* Appends `bytes` to an allocation of `*end` bytes; returns their offset, a multiple of 256. */
static size_t place(size_t *end, size_t bytes)
{
    size_t begin = (*end + 255) / 256 * 256;
    *end = begin + bytes;
    return begin;
}

static struct layout lay_out(const struct synth *synth)
{
    struct layout layout = {};
    layout.classes = place(&layout.bytes, synth->class_count * sizeof(struct atom_class));
    layout.offsets = place(&layout.bytes, (synth->class_count + 1) * sizeof(uint64_t));
    if (synth->spoke_offset) /* fractals have no vertices */
        layout.spokes = place(&layout.bytes, 3 * synth->spoke_offset[synth->class_count] * sizeof(float));
    layout.gradients = place(&layout.bytes, NOISE_TABLE_COUNT * sizeof(float));
    return layout;
}

size_t device_input_bytes(const struct synth *synth)
{
    return lay_out(synth).bytes;
}

enum status device_check_memory(int device, const struct synth *synth, size_t bytes)
{
    size_t free_bytes;
    TRY(device_free_bytes(device, &free_bytes));
    if (bytes <= free_bytes)
        return STATUS_OK;
    return status_set(STATUS_TOO_LARGE,
                      "a batch of %llu images needs %.2f GB of device memory, but %.2f GB are free; lower %s",
                      (unsigned long long)synth->batch, 1e-9 * (double)bytes, 1e-9 * (double)free_bytes,
                      OPTION_OR_FIELD("--batch or --res", "batch or res"));
}

/* ---- Tables ---- */

/* Copies the tables on `stream` and waits for the copies. A plain cudaMemcpy() from pageable memory may
 * return before the data has reached the device. */
static enum status copy_tables(const struct synth *synth, char *base, const struct layout *layout,
                               cudaStream_t stream)
{
    static_assert(sizeof(size_t) == sizeof(uint64_t), "offsets are copied without conversion");
    size_t vertices = synth->spoke_offset[synth->class_count];
    const struct {
        size_t at;
        const void *from;
        size_t bytes;
    } copies[] = {
        {layout->classes, synth->classes, synth->class_count * sizeof *synth->classes},
        {layout->offsets, synth->spoke_offset, (synth->class_count + 1) * sizeof *synth->spoke_offset},
        {layout->spokes, synth->spoke_tables, 3 * vertices * sizeof(float)},
        {layout->gradients, synth->gradients, sizeof synth->gradients},
    };
    for (size_t i = 0; i < COUNT_OF(copies); i++)
        CUDA_TRY(cudaMemcpyAsync(base + copies[i].at, copies[i].from, copies[i].bytes, cudaMemcpyHostToDevice,
                                 stream));
    CUDA_TRY(cudaStreamSynchronize(stream));
    return STATUS_OK;
}

enum status device_input_open(int device, const struct synth *synth, struct device_input *input,
                              void **tables)
{
    struct layout layout = lay_out(synth);
    cudaStream_t stream;
    CUDA_TRY(cudaSetDevice(device));
    CUDA_TRY(cudaMalloc(tables, layout.bytes));
    CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    char *base = static_cast<char *>(*tables);
    enum status status = copy_tables(synth, base, &layout, stream);
    (void)cudaStreamDestroy(stream);
    *input = {};
    input->rules = synth->rules;
    input->res = synth->res;
    input->class_count = synth->class_count;
    input->turns = synth->turns;
    input->stride = synth->stride;
    input->seed = synth->seed;
    input->first = synth->first;
    input->classes = reinterpret_cast<const struct atom_class *>(base + layout.classes);
    input->spoke_offset = reinterpret_cast<const uint64_t *>(base + layout.offsets);
    input->spoke_tables = reinterpret_cast<const float *>(base + layout.spokes);
    input->gradients = reinterpret_cast<const float *>(base + layout.gradients);
    return status;
}

/* ---- The clock ---- */

enum status device_clock_open(struct device_clock *clock)
{
    TRY(stream_open(&clock->stream));
    CUDA_TRY(cudaEventCreate(&clock->begin));
    CUDA_TRY(cudaEventCreate(&clock->end));
    return STATUS_OK;
}

void device_clock_close(struct device_clock *clock)
{
    /* Errors are ignored, because no result depends on them. */
    destroy(clock->end, clock->begin, clock->stream);
    *clock = {};
}

enum status device_clock_begin(struct device_clock *clock)
{
    CUDA_TRY(cudaEventRecord(clock->begin, clock->stream));
    return STATUS_OK;
}

enum status device_clock_end(struct device_clock *clock, struct run_time *time)
{
    float elapsed_ms;
    CUDA_TRY(cudaEventRecord(clock->end, clock->stream));
    CUDA_TRY(cudaEventSynchronize(clock->end));
    CUDA_TRY(cudaEventElapsedTime(&elapsed_ms, clock->begin, clock->end));
    time->device_s = 1e-3 * elapsed_ms;
    return STATUS_OK;
}

/* ---- The batch ---- */

static enum status make(struct device_batch *batch, size_t scratch_bytes)
{
    const struct synth *synth = batch->synth;
    size_t pixel_bytes = synth->batch * synth_image_bytes(synth);
    batch->bytes = device_input_bytes(synth) + pixel_bytes + scratch_bytes;
    TRY(device_check_memory(batch->device, synth, batch->bytes));
    TRY(device_input_open(batch->device, synth, &batch->input, &batch->tables));
    TRY(device_clock_open(&batch->clock));
    CUDA_TRY(cudaMalloc(&batch->input.pixels, pixel_bytes));
    return STATUS_OK;
}

enum status device_batch_open(struct device_batch *batch, const struct resources *resources,
                              const struct synth *synth, size_t scratch_bytes)
{
    *batch = {};
    batch->synth = synth;
    batch->device = resources->device;
    enum status status = make(batch, scratch_bytes);
    if (status != STATUS_OK)
        device_batch_close(batch);
    return status;
}

void device_batch_close(struct device_batch *batch)
{
    (void)cudaFree(batch->input.pixels);
    (void)cudaFree(batch->tables);
    device_clock_close(&batch->clock);
    *batch = {};
}

enum status device_batch_begin(struct device_batch *batch, uint64_t run)
{
    const struct synth *synth = batch->synth;
    batch->run = run;
    CUDA_TRY(cudaSetDevice(batch->device));
    TRY(device_clock_begin(&batch->clock));
    RANGE(CLEAR);
    CUDA_TRY(cudaMemsetAsync(batch->input.pixels, 0, synth->batch * synth_image_bytes(synth),
                             batch->clock.stream));
    return STATUS_OK;
}

enum status device_batch_end(struct device_batch *batch, struct run_time *time)
{
    return device_clock_end(&batch->clock, time);
}

enum status device_batch_fetch(struct device_batch *batch, struct synth_fetch *fetch)
{
    size_t bytes = synth_image_bytes(batch->synth);
    CUDA_TRY(cudaSetDevice(batch->device));
    CUDA_TRY(
        cudaMemcpy(fetch->pixels, batch->input.pixels + fetch->j * bytes, bytes, cudaMemcpyDeviceToHost));
    return STATUS_OK;
}

/* ---- Conversion of canvases ---- */

#define CONVERT_BLOCK 256

/* Returns the weighted sum of the grays that output pixel (y, x) covers. */
static __device__ uint64_t covered_sum(const struct image_input &image, const struct synth_output &output,
                                       uint32_t y, uint32_t x)
{
    uint32_t res = image.res;
    if (output.fit != OUTPUT_RESIZE) {
        struct output_corner corner = {0, 0};
        if (output.fit == OUTPUT_CROP)
            corner = output_crop(image.key, res, output.res);
        return image.pixels[(size_t)(corner.y + y) * res + corner.x + x];
    }
    auto row_at = [&](uint32_t row) {
        const uint8_t *first = image.pixels + (size_t)row * res;
        return [first](uint32_t column) { return (uint32_t)first[column]; };
    };
    return span_sum<uint64_t>(output.res, output_span(y, res, output.res), output_span(x, res, output.res),
                              row_at);
}

/* One thread per output pixel. */
static __global__ void __launch_bounds__(CONVERT_BLOCK)
    convert_kernel(const struct device_input input, const struct synth_output output, const uint64_t *numbers,
                   uint64_t run, uint32_t count, uint8_t *images, int64_t *labels)
{
    uint64_t i = (uint64_t)blockIdx.x * CONVERT_BLOCK + threadIdx.x;
    uint32_t pixels = output.res * output.res;
    if (i >= (uint64_t)count * pixels)
        return;
    uint64_t j = i / pixels;
    uint32_t pixel = (uint32_t)(i - j * pixels), y = pixel / output.res, x = pixel % output.res;
    const struct image_input image =
        image_input_listed(input, input.classes, input.spoke_offset, numbers, run, j);
    size_t bytes = (size_t)pixels * output.channels * dtype_bytes(output.type);
    if (pixel == 0)
        labels[j] = image.class_.id;
    output_store(&output, output_area(output.fit, image.res), covered_sum(image, output, y, x), y, x,
                 images + j * bytes);
}

enum status convert_enqueue(const struct device_input *input, const struct synth_output *output,
                            const uint64_t *numbers, uint64_t run, uint32_t count, void *images,
                            int64_t *labels, cudaStream_t stream)
{
    uint64_t pixels = (uint64_t)count * output->res * output->res;
    convert_kernel<<<(unsigned)((pixels + CONVERT_BLOCK - 1) / CONVERT_BLOCK), CONVERT_BLOCK, 0, stream>>>(
        *input, *output, numbers, run, count, static_cast<uint8_t *>(images), labels);
    CUDA_TRY_LAUNCH("convert_kernel");
    return STATUS_OK;
}
