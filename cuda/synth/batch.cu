#include "synth/batch.cuh"

#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/device.h"

enum status device_batch_probe(const struct resources *resources)
{
    return device_probe(resources->device);
}

enum status device_free_bytes(int device, size_t *bytes)
{
    size_t total;
    CUDA_TRY(cudaSetDevice(device));
    CUDA_TRY(cudaMemGetInfo(bytes, &total));
    return STATUS_OK;
}

/* Where each table begins in the one allocation that holds them all. */
struct layout {
    size_t classes, offsets, spokes, gradients, bytes;
};

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
    layout.spokes = place(&layout.bytes, 3 * synth->spoke_offset[synth->class_count] * sizeof(float));
    layout.gradients = place(&layout.bytes, NOISE_TABLE_COUNT * sizeof(float));
    return layout;
}

static enum status check_memory(const struct device_batch *batch, size_t bytes)
{
    size_t free_bytes;
    TRY(device_free_bytes(batch->device, &free_bytes));
    if (bytes <= free_bytes)
        return STATUS_OK;
    return status_set(
        STATUS_USAGE,
        "a batch of %llu images needs %.2f GB of device memory and %.2f GB are free; lower --batch or --res",
        (unsigned long long)batch->synth->batch, 1e-9 * (double)bytes, 1e-9 * (double)free_bytes);
}

/* On the batch's own stream: it does not wait for the default one, where a copy from pageable memory may
 * return before it has arrived. */
static enum status copy_table(struct device_batch *batch, void *to, const void *from, size_t bytes)
{
    CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, batch->stream));
    CUDA_TRY(cudaStreamSynchronize(batch->stream));
    return STATUS_OK;
}

static enum status copy_tables(struct device_batch *batch, const struct layout *layout)
{
    const struct synth *synth = batch->synth;
    static_assert(sizeof(size_t) == sizeof(uint64_t), "offsets are copied as they are");
    size_t vertices = synth->spoke_offset[synth->class_count];
    char *base = static_cast<char *>(batch->tables);
    TRY(copy_table(batch, base + layout->classes, synth->classes,
                   synth->class_count * sizeof *synth->classes));
    TRY(copy_table(batch, base + layout->offsets, synth->spoke_offset,
                   (synth->class_count + 1) * sizeof *synth->spoke_offset));
    TRY(copy_table(batch, base + layout->spokes, synth->spoke_tables, 3 * vertices * sizeof(float)));
    TRY(copy_table(batch, base + layout->gradients, synth->gradients, sizeof synth->gradients));
    batch->input.classes = reinterpret_cast<const struct atom_class *>(base + layout->classes);
    batch->input.spoke_offset = reinterpret_cast<const uint64_t *>(base + layout->offsets);
    batch->input.spoke_tables = reinterpret_cast<const float *>(base + layout->spokes);
    batch->input.gradients = reinterpret_cast<const float *>(base + layout->gradients);
    return STATUS_OK;
}

static enum status make(struct device_batch *batch, size_t scratch_bytes)
{
    const struct synth *synth = batch->synth;
    struct layout layout = lay_out(synth);
    size_t pixel_bytes = synth->batch * synth_image_bytes(synth);
    TRY(check_memory(batch, layout.bytes + pixel_bytes + scratch_bytes));
    CUDA_TRY(cudaStreamCreateWithFlags(&batch->stream, cudaStreamNonBlocking));
    CUDA_TRY(cudaEventCreate(&batch->begin));
    CUDA_TRY(cudaEventCreate(&batch->end));
    CUDA_TRY(cudaMalloc(&batch->tables, layout.bytes));
    CUDA_TRY(cudaMalloc(&batch->input.pixels, pixel_bytes));
    return copy_tables(batch, &layout);
}

enum status device_batch_open(struct device_batch *batch, const struct resources *resources,
                              const struct synth *synth, size_t scratch_bytes)
{
    *batch = {};
    batch->synth = synth;
    batch->device = resources->device;
    batch->input.formula = synth->formula;
    batch->input.res = synth->res;
    batch->input.class_count = synth->class_count;
    batch->input.batch = synth->batch;
    batch->input.seed = synth->seed;
    batch->input.first = synth->first;
    enum status status = make(batch, scratch_bytes);
    if (status != STATUS_OK)
        device_batch_close(batch);
    return status;
}

void device_batch_close(struct device_batch *batch)
{
    /* Nothing can be done about an error here, and nothing depends on it. */
    (void)cudaFree(batch->input.pixels);
    (void)cudaFree(batch->tables);
    if (batch->end)
        (void)cudaEventDestroy(batch->end);
    if (batch->begin)
        (void)cudaEventDestroy(batch->begin);
    if (batch->stream)
        (void)cudaStreamDestroy(batch->stream);
    *batch = {};
}

enum status device_batch_begin(struct device_batch *batch, uint64_t run)
{
    const struct synth *synth = batch->synth;
    batch->run = run;
    CUDA_TRY(cudaSetDevice(batch->device));
    CUDA_TRY(cudaEventRecord(batch->begin, batch->stream));
    CUDA_TRY(cudaMemsetAsync(batch->input.pixels, 0, synth->batch * synth_image_bytes(synth), batch->stream));
    return STATUS_OK;
}

enum status device_batch_end(struct device_batch *batch, struct run_time *time)
{
    float elapsed_ms;
    CUDA_TRY(cudaEventRecord(batch->end, batch->stream));
    CUDA_TRY(cudaEventSynchronize(batch->end));
    CUDA_TRY(cudaEventElapsedTime(&elapsed_ms, batch->begin, batch->end));
    time->device_s = 1e-3 * elapsed_ms;
    return STATUS_OK;
}

enum status device_batch_fetch(struct device_batch *batch, struct synth_fetch *fetch)
{
    size_t bytes = synth_image_bytes(batch->synth);
    CUDA_TRY(cudaSetDevice(batch->device));
    CUDA_TRY(
        cudaMemcpy(fetch->pixels, batch->input.pixels + fetch->j * bytes, bytes, cudaMemcpyDeviceToHost));
    return STATUS_OK;
}
