/* The variant `stream-gpu`: batches in device memory, as an engine of the trainer on a GPU gets them with
 * --feed load. The GPU decodes the share --device-share of the JPEG files. */
#include <cmath>
#include <new>

#include "common/check.cuh"
#include "common/device_stream.cuh"
#include "common/image_decoder.cuh"
#include "common/jitter.cuh"
#include "common/stream.cuh"
#include "load/delivery.cuh"
#include "load/stream_run.h"
#include "machine/device.h"
#include "machine/nvml.h"

#define COPY_BYTES ((uint64_t)4 << 20) /* size of a pinned copy that measures the bandwidth */

struct stream_gpu {
    struct stream_run run; /* must be the first member */
    struct image_decoder decoder;
    int device;
    /* With run.changes: */
    struct jitter_batch jitter;
    cudaStream_t stream;
    cudaEvent_t event; /* after the latest changes */
    uint8_t *changed;  /* a batch; no consumer reads it. Followed by the memory of `jitter` */
    uint64_t changed_bytes;
};

static struct stream_gpu *of(void *state)
{
    return static_cast<struct stream_gpu *>(state);
}

/* ---- The stream ---- */

/* Allocates what changes need, once. */
static enum status open_changes(struct stream_gpu *gpu)
{
    const struct set_stream_request *request = &gpu->run.request;
    const struct image_output *output = &gpu->run.output;
    const struct shape shape = {request->channels, request->depth, request->height, request->width};
    const uint32_t capacity = request->plan.capacity;
    const uint64_t values = stream_aligned(capacity * gpu->run.sample_bytes);
    void *memory;
    if (!gpu->run.changes || gpu->changed)
        return STATUS_OK;
    gpu->changed_bytes = values + jitter_batch_bytes(&shape, capacity);
    TRY(device_alloc(gpu->device, gpu->changed_bytes, &memory));
    gpu->changed = static_cast<uint8_t *>(memory);
    CUDA_TRY(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    CUDA_TRY(cudaEventCreateWithFlags(&gpu->event, cudaEventDisableTiming | cudaEventBlockingSync));
    TRY(jitter_batch_open(&output->color, &shape, output->seed, capacity, gpu->changed + values,
                          &gpu->jitter));
    gpu->jitter.order = output->interleaved ? JITTER_INTERLEAVED
                        : output->frames    ? JITTER_FRAMES
                                            : JITTER_PLANES;
    return STATUS_OK;
}

static enum status open_streams(struct stream_run *run)
{
    struct stream_gpu *gpu = of(run);
    struct set_stream_request *from = &run->request;
    struct stream *host;
    const double wanted = run->load->given->device_share;
    CUDA_TRY(cudaSetDevice(gpu->device));
    device_stream_use(gpu->device);
    from->device_share = std::isnan(wanted) ? set_stream_share(gpu->decoder.kind) : wanted;
    from->fit.unscaled |= from->device_share > 0; /* as in the stream, for the reference */
    from->held = DEVICE_STREAM_HELD;
    from->device_bytes = run->load->given->resident_device_bytes;
    from->allocate = device_stream_pin;
    from->deallocate = device_stream_unpin;
    TRY(set_stream_open(from, &host));
    struct device_stream_request request = {};
    request.decoder = from->device_share > 0 ? &gpu->decoder : nullptr;
    request.res = from->height;
    request.channels = from->channels;
    request.capacity = from->plan.capacity;
    request.sample_bytes = run->sample_bytes;
    request.mask_bytes = run->mask_bytes;
    request.ahead = from->ahead;
    request.held = 1;
    request.resident_bytes = from->device_bytes;
    const enum status opened = open_changes(gpu);
    if (opened != STATUS_OK) {
        const struct failure failure = status_save(opened);
        stream_close(host);
        return status_restore(&failure);
    }
    return device_stream_open(host, &request, &run->stream);
}

static enum status change_batch(struct stream_run *run)
{
    struct stream_gpu *gpu = of(run);
    struct stream_batch *batch = &run->batch;
    if (batch->samples.count == 0)
        return STATUS_OK;
    CUDA_TRY(cudaStreamWaitEvent(gpu->stream, static_cast<cudaEvent_t>(batch->ready), 0));
    TRY(jitter_batch_run(&gpu->jitter, static_cast<uint32_t>(batch->epoch),
                         device_stream_numbers(run->stream, batch), batch->samples.count,
                         static_cast<const uint8_t *>(batch->samples.values), gpu->changed, gpu->stream));
    CUDA_TRY(cudaEventRecord(gpu->event, gpu->stream));
    batch->ready = gpu->event;
    return STATUS_OK;
}

static enum status wait_for_batch(struct stream_run *run)
{
    return run->batch.ready ? CUDA_STATUS(cudaEventSynchronize(static_cast<cudaEvent_t>(run->batch.ready)))
                            : STATUS_OK;
}

static enum status copy_batch(struct stream_run *run, uint8_t *values, uint8_t *masks, uint8_t *decoded)
{
    const void *changed = decoded ? of(run)->changed : run->batch.samples.values;
    TRY(wait_for_batch(run));
    if (run->mask_bytes)
        CUDA_TRY(cudaMemcpy(masks, run->batch.masks, run->batch.samples.count * run->mask_bytes,
                            cudaMemcpyDeviceToHost));
    if (decoded)
        CUDA_TRY(
            cudaMemcpy(decoded, run->batch.samples.values, run->batch.samples.bytes, cudaMemcpyDeviceToHost));
    return CUDA_STATUS(cudaMemcpy(values, changed, run->batch.samples.bytes, cudaMemcpyDeviceToHost));
}

/* Refuses a share that the decoder cannot have. */
static enum status check_share(const struct load *load, const struct image_decoder *decoder)
{
    if (decoder->kind != DECODER_CPU || !(load->given->device_share > 0))
        return STATUS_OK;
    return status_number(STATUS_USAGE, "device-share", load->given->device_share,
                         ": the CPU decodes all of these samples; drop --device-share");
}

static enum status stream_gpu_setup(const struct resources *resources, const void *input, void **state)
{
    static const struct stream_run_type type = {open_streams, wait_for_batch, copy_batch, change_batch};
    const struct load *load = static_cast<const struct load *>(input);
    const bool decodes = load->fit.res > 0 && stream_run_has_jpeg(load);
    struct stream_gpu *gpu = new (std::nothrow) stream_gpu{};
    *state = gpu;
    TRY(ALLOCATED(gpu, "out of memory"));
    gpu->device = resources->device;
    gpu->run.type = &type;
    CUDA_TRY(cudaSetDevice(gpu->device));
    TRY(image_decoder_open(&gpu->decoder, decodes ? (enum decoder)load->given->decoder : DECODER_CPU));
    TRY(check_share(load, &gpu->decoder));
    load->control->resident_share = 0;
    gpu->run.tolerance = image_decoder_tolerance(gpu->decoder.kind);
    return stream_run_open(&gpu->run, load, resources->threads);
}

static void stream_gpu_teardown(void *state)
{
    struct stream_gpu *gpu = of(state);
    stream_run_close(&gpu->run); /* waits for the events of all batches */
    image_decoder_close(&gpu->decoder);
    (void)cudaFree(gpu->changed);
    destroy(gpu->event);
    if (gpu->stream)
        (void)cudaStreamDestroy(gpu->stream);
    delete gpu;
}

/* ---- Results ---- */

/* Adds what concerns the decoder. The stream counts its own memory, also that on the device. */
static enum status stream_gpu_fetch(void *state, void *result_)
{
    struct stream_gpu *gpu = of(state);
    struct load_result *result = static_cast<struct load_result *>(result_);
    char pci_bus_id[32];
    TRY(stream_run_fetch(state, result));
    result->memory_bytes += gpu->decoder.bytes + gpu->changed_bytes;
    const uint64_t bytes = result->checksum.count * (gpu->run.sample_bytes + gpu->run.mask_bytes);
    const double share = gpu->run.load->control->resident_share;
    result->moved_bytes = share < 1 ? (uint64_t)((1 - share) * (double)bytes) : 2 * bytes;
    result->useful_bytes += (double)(result->resident_device * gpu->run.sample_bytes);
    if (!gpu->run.load->given->decode)
        return STATUS_OK;
    result->decoder = decoder_names[gpu->decoder.kind];
    TRY(device_pci_bus_id(gpu->device, pci_bus_id, sizeof pci_bus_id));
    result->jpeg_engine_share = nvml_jpeg_engine_share(pci_bus_id);
    return STATUS_OK;
}

/* Implements traits->copy(): the rate of copies from pinned memory to the device; within the device, of bytes
 * read plus bytes written, if all samples are resident. */
static enum status stream_gpu_copy(void *state, double *bytes_per_s)
{
    const struct stream_gpu *gpu = of(state);
    return gpu->run.load->control->resident_share < 1
               ? device_copy_rate(gpu->device, COPY_BYTES, cudaMemcpyHostToDevice, bytes_per_s)
               : device_copy_rate(gpu->device, 16 * COPY_BYTES, cudaMemcpyDeviceToDevice, bytes_per_s);
}

static const struct load_traits traits = {.shards = true,
                                          .files = true,
                                          .streams = true,
                                          .device = true,
                                          .decodes = true,
                                          .accepts = stream_run_accepts,
                                          .timed = "order+open+read+copy+transfer",
                                          .copy = stream_gpu_copy,
                                          .verify_slots = stream_run_verify};

extern "C" const struct variant variant_stream_gpu = {.platform = "cuda",
                                                      .threaded = true,
                                                      .traits = &traits,
                                                      .probe = device_probe_variant,
                                                      .setup = stream_gpu_setup,
                                                      .ready = stream_run_ready,
                                                      .run = stream_run_run,
                                                      .fetch = stream_gpu_fetch,
                                                      .teardown = stream_gpu_teardown};
