/* The variants `fused` and `fused-graph` (docs/fused.md). Their images are bit-identical to those of `naive`,
 * the reference on the CPU. */
#include <stdlib.h>

#include "common/check.cuh"
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
    uint64_t latest;           /* number of the latest run */
    struct fused_graph *graph; /* used only by fused-graph */
};

static void fused_teardown(void *state)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    fused_graph_close(self->graph);
    (void)cudaFree(self->labels);
    (void)cudaFree(self->images);
    device_clock_close(&self->clock);
    fused_close(self->plan);
    free(self);
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
    return graph ? fused_graph_open(self->plan, synth->batch, self->clock.stream, &self->graph) : STATUS_OK;
}

template <bool Graph>
static enum status fused_setup(const struct resources *resources, const void *input, void **state)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(calloc(1, sizeof *self));
    *state = self;
    TRY(ALLOCATED(self, "out of memory"));
    self->synth = static_cast<const struct synth *>(input);
    self->device = resources->device;
    return make_batch(self, Graph);
}

static struct fused_call call_of_run(const struct fused_batch *self, uint64_t number)
{
    return {nullptr, number, nullptr, self->images, self->labels};
}

static enum status fused_run(void *state, uint64_t number, struct run_time *time)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    const struct fused_call call = call_of_run(self, number);
    cudaStream_t stream = self->clock.stream;
    CUDA_TRY(cudaSetDevice(self->device));
    self->latest = number;
    TRY(device_clock_begin(&self->clock));
    TRY(self->graph ? fused_graph_launch(self->graph, &call, stream)
                    : fused_enqueue(self->plan, &call, self->synth->batch, stream));
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
    const struct fused_call call = call_of_run(self, self->latest);
    *noise_s = *vertices_s = *painting_s = 0;
    CUDA_TRY(cudaSetDevice(self->device));
    return fused_time_stages(self->plan, &call, &self->clock, noise_s, painting_s);
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
                                            .run = fused_run,
                                            .fetch = fused_fetch,
                                            .teardown = fused_teardown};
}
