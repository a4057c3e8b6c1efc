/* The variants `fused` and `fused-graph` (docs/fused.md). Their images are bit-identical to those of `naive`,
 * the reference on the CPU. */
#include <stdlib.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "machine/device.h"
#include "synth/batch.cuh"
#include "synth/fused.h"

struct fused_batch {
    const struct synth *synth;
    int device;
    struct fused_plan *plan;
    struct device_clock clock;
    uint8_t *images;
    int64_t *labels;
    uint64_t latest; /* number of the latest run */
    /* fused-graph only: */
    cudaGraphExec_t graph;
    uint64_t *counter, *number; /* the run number: `counter` in device memory, `number` in pinned memory */
};

static void fused_teardown(void *state)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    if (self->graph)
        (void)cudaGraphExecDestroy(self->graph);
    (void)cudaFreeHost(self->number);
    (void)cudaFree(self->counter);
    (void)cudaFree(self->labels);
    (void)cudaFree(self->images);
    device_clock_close(&self->clock);
    fused_close(self->plan);
    free(self);
}

/* Enqueues a run on the stream, for capture. When the graph executes, the run reads its number from
 * self->number. */
static enum status record(struct fused_batch *self)
{
    CUDA_TRY(cudaMemcpyAsync(self->counter, self->number, sizeof *self->number, cudaMemcpyHostToDevice,
                             self->clock.stream));
    return fused_enqueue(self->plan, 0, self->counter, self->synth->batch, self->images, self->labels,
                         self->clock.stream);
}

static enum status capture(struct fused_batch *self)
{
    cudaGraph_t graph = nullptr;
    CUDA_TRY(cudaMalloc(&self->counter, sizeof *self->counter));
    CUDA_TRY(cudaMallocHost(&self->number, sizeof *self->number));
    CUDA_TRY(cudaStreamBeginCapture(self->clock.stream, cudaStreamCaptureModeThreadLocal));
    enum status status = record(self);
    cudaError_t error = cudaStreamEndCapture(self->clock.stream, &graph);
    if (status == STATUS_OK && error == cudaSuccess)
        error = cudaGraphInstantiate(&self->graph, graph, 0);
    if (graph)
        (void)cudaGraphDestroy(graph);
    return status != STATUS_OK ? status : cuda_status(error, "capturing a run", __FILE__, __LINE__);
}

static enum status make_batch(struct fused_batch *self, bool graph)
{
    const struct synth *synth = self->synth;
    size_t image_bytes = synth->batch * synth_output_bytes(synth),
           label_bytes = synth->batch * sizeof(int64_t);
    TRY(device_check_memory(self->device, synth, image_bytes + label_bytes + device_input_bytes(synth)));
    CUDA_TRY(cudaMalloc(&self->images, image_bytes));
    CUDA_TRY(cudaMalloc(&self->labels, label_bytes));
    TRY(device_clock_open(&self->clock));
    TRY(fused_open(self->device, synth, false, &self->plan));
    return graph ? capture(self) : STATUS_OK;
}

template <bool Graph>
static enum status fused_setup(const struct resources *resources, const void *input, void **state)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(calloc(1, sizeof *self));
    *state = self;
    if (!self)
        return status_set(STATUS_FAILED, "out of memory");
    self->synth = static_cast<const struct synth *>(input);
    self->device = resources->device;
    return make_batch(self, Graph);
}

static enum status fused_run(void *state, uint64_t number, struct run_time *time)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    CUDA_TRY(cudaSetDevice(self->device));
    self->latest = number;
    TRY(device_clock_begin(&self->clock));
    TRY(fused_enqueue(self->plan, number, nullptr, self->synth->batch, self->images, self->labels,
                      self->clock.stream));
    return device_clock_end(&self->clock, time);
}

static enum status fused_run_graph(void *state, uint64_t number, struct run_time *time)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    CUDA_TRY(cudaSetDevice(self->device));
    self->latest = *self->number = number; /* safe to overwrite: the previous run has ended */
    TRY(device_clock_begin(&self->clock));
    RANGE(GRAPH);
    CUDA_TRY(cudaGraphLaunch(self->graph, self->clock.stream));
    return device_clock_end(&self->clock, time);
}

static enum status fused_fetch(void *state, void *result)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    struct synth_fetch *fetch = static_cast<struct synth_fetch *>(result);
    size_t bytes = synth_output_bytes(self->synth);
    CUDA_TRY(cudaSetDevice(self->device));
    CUDA_TRY(cudaMemcpy(fetch->pixels, self->images + fetch->j * bytes, bytes, cudaMemcpyDeviceToHost));
    CUDA_TRY(cudaMemcpy(&fetch->label, self->labels + fetch->j, sizeof fetch->label, cudaMemcpyDeviceToHost));
    return STATUS_OK;
}

/* Noise and vertices are one kernel, so `*noise_s` is the time of both and `*vertices_s` is 0. */
static enum status fused_stages(void *state, double *noise_s, double *vertices_s, double *painting_s)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    *noise_s = *vertices_s = *painting_s = 0;
    CUDA_TRY(cudaSetDevice(self->device));
    return fused_time_stages(self->plan, self->latest, self->images, self->labels, &self->clock, noise_s,
                             painting_s);
}

static const uint8_t *fused_images(const void *state)
{
    return static_cast<const struct fused_batch *>(state)->images;
}

static const struct synth_traits traits = {.noise = SYNTH_NOISE_COUNTER,
                                           .outputs = true,
                                           .timed = "clear+draw",
                                           .images = fused_images,
                                           .generator_open = fused_generator_open,
                                           .stages = fused_stages};

extern "C" {
extern const struct variant variant_fused, variant_fused_graph;
const struct variant variant_fused = {.platform = "cuda",
                                      .traits = &traits,
                                      .probe = device_probe_variant,
                                      .setup = fused_setup<false>,
                                      .run = fused_run,
                                      .fetch = fused_fetch,
                                      .teardown = fused_teardown};
const struct variant variant_fused_graph = {.platform = "cuda",
                                            .traits = &traits,
                                            .probe = device_probe_variant,
                                            .setup = fused_setup<true>,
                                            .run = fused_run_graph,
                                            .fetch = fused_fetch,
                                            .teardown = fused_teardown};
}
