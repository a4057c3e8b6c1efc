/* The variants `fused` and `fused-graph`, and the generator of `fused` (docs/synth.md). Their images are
 * bit-identical to those of `naive`, the reference on the CPU. */
#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/generator.h"
#include "core/phase.h"
#include "machine/device.h"
#include "synth/fused.cuh"

/* ---- The graph ---- */

/* `fused` as a CUDA graph. Its first kernel copies the arguments of the run (struct fused_call) from a
 * kernel parameter to device memory, where the other kernels read them. Only this parameter changes between
 * launches. */
struct fused_graph {
    struct fused_call *stored; /* device memory */
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaGraphNode_t first;
};

/* Frees the graph; accepts NULL. */
static void fused_graph_close(struct fused_graph *graph)
{
    if (!graph)
        return;
    /* Errors are ignored, because no result depends on them. */
    destroy(graph->executable, graph->graph);
    (void)cudaFree(graph->stored);
    free(graph);
}

static __global__ void store_call_kernel(const struct fused_call call, struct fused_call *stored)
{
    allow_next();
    *stored = call;
}

static enum status record(const struct fused_plan *plan, const struct fused_graph *self, uint64_t count,
                          cudaStream_t stream)
{
    store_call_kernel<<<1, 1, 0, stream>>>(fused_call(), self->stored);
    CUDA_TRY_LAUNCH("store_call_kernel");
    return fused_enqueue_stored(plan, self->stored, count, stream);
}

static enum status capture(const struct fused_plan *plan, struct fused_graph *self, uint64_t count,
                           cudaStream_t stream)
{
    cudaFuncAttributes attributes; /* loads the kernel, which CUDA must not do during a capture */
    size_t roots = 1;
    CUDA_TRY(cudaFuncGetAttributes(&attributes, store_call_kernel));
    CUDA_TRY(cudaMalloc(&self->stored, sizeof *self->stored));
    CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enum status status = record(plan, self, count, stream);
    cudaError_t error = cudaStreamEndCapture(stream, &self->graph);
    TRY(status);
    TRY(cuda_status(error, "capturing a run", __FILE__, __LINE__));
    CUDA_TRY(cudaGraphGetRootNodes(self->graph, &self->first, &roots));
    CUDA_TRY(cudaGraphInstantiate(&self->executable, self->graph, 0));
    CUDA_TRY(cudaGraphUpload(self->executable, stream));
    CUDA_TRY(cudaStreamSynchronize(stream)); /* the upload must end first: launches may use other streams */
    return STATUS_OK;
}

/* Creates a CUDA graph of the kernels that generate `count` images. Launching the graph takes the host a
 * tenth of the time of fused_enqueue(), which launches each kernel. The kernels are recorded on `stream` and
 * on the plan's own streams. In all launches, each kernel has the priority of the stream on which it was
 * recorded. The plan's device must be current, and the plan must outlive the graph. The caller closes the
 * graph with fused_graph_close(). */
static enum status fused_graph_open(const struct fused_plan *plan, uint64_t count, cudaStream_t stream,
                                    struct fused_graph **graph)
{
    struct fused_graph *self = static_cast<struct fused_graph *>(calloc(1, sizeof *self));
    TRY(ALLOCATED(self, "out of memory"));
    enum status status = capture(plan, self, count, stream);
    if (status != STATUS_OK)
        fused_graph_close(self);
    else
        *graph = self;
    return status;
}

/* Enqueues the generation of the graph's images for a call. `stream` must not be in a capture. Otherwise,
 * the rules of fused_enqueue() apply. */
static enum status fused_graph_launch(struct fused_graph *graph, const struct fused_call *call,
                                      cudaStream_t stream)
{
    RANGE(GRAPH);
    struct fused_call copy = *call;
    void *parameters[] = {&copy, &graph->stored};
    cudaKernelNodeParams node = {};
    node.func = reinterpret_cast<void *>(store_call_kernel);
    node.gridDim = node.blockDim = dim3(1);
    node.kernelParams = parameters;
    CUDA_TRY(cudaGraphExecKernelNodeSetParams(graph->executable, graph->first, &node));
    CUDA_TRY(cudaGraphLaunch(graph->executable, stream));
    return STATUS_OK;
}

/* ---- The generator ---- */

/* `fused` as a generator (core/generator.h): generates images by number on the caller's stream. If possible,
 * a full batch is one launch of a CUDA graph. */
struct fused_generator {
    struct generator generator; /* must be first */
    struct synth synth;
    int device;
    struct fused_plan *plan;
    struct fused_graph *graph; /* NULL if fused_single() */
    int priority;              /* priority of the stream on which the graph was recorded */
    /* The stream of the previous call and whether it has this priority. If a new stream has the address of a
     * destroyed one, its kernels may get the other priority; the images are the same. */
    bool known, suits;
    cudaStream_t stream;
    int64_t *labels; /* destination of the labels if the caller wants none */
};

/* Sets `*fits` to whether the graph can generate `count` images on `stream`. `stream` must have the priority
 * of the stream on which the graph was recorded, because the graph's kernels keep that priority. A stream
 * that is being captured does not fit: the caller's graph must contain the kernels themselves, because the
 * generator's graph changes with each launch. */
static enum status check_graph(struct fused_generator *self, uint32_t count, cudaStream_t stream, bool *fits)
{
    int priority;
    *fits = self->graph && count == self->synth.batch && !device_capturing(-1, stream);
    if (!*fits)
        return STATUS_OK;
    if (!self->known || stream != self->stream) {
        CUDA_TRY(cudaStreamGetPriority(stream, &priority));
        self->known = true;
        self->stream = stream;
        self->suits = priority == self->priority;
    }
    *fits = self->suits;
    return STATUS_OK;
}

static enum status fused_make(struct generator *generator, const struct generator_numbers *numbers,
                              uint32_t count, void *samples, const struct generator_targets *targets,
                              void *stream_)
{
    struct fused_generator *self = reinterpret_cast<struct fused_generator *>(generator);
    cudaStream_t stream = static_cast<cudaStream_t>(stream_);
    const struct fused_call call = {numbers->list,
                                    numbers->first,
                                    numbers->counter,
                                    static_cast<uint8_t *>(samples),
                                    targets && targets->labels ? targets->labels : self->labels,
                                    targets ? targets->masks : nullptr,
                                    targets ? targets->points : nullptr};
    bool fits;
    TRY(check_graph(self, count, stream, &fits));
    return fits ? fused_graph_launch(self->graph, &call, stream)
                : fused_enqueue(self->plan, &call, count, stream);
}

static uint64_t fused_bytes(const struct generator *generator)
{
    const struct fused_generator *self = reinterpret_cast<const struct fused_generator *>(generator);
    return fused_memory_bytes(self->plan) + sizeof(struct fused_call) +
           self->synth.batch * sizeof *self->labels;
}

static void fused_free(struct generator *generator)
{
    struct fused_generator *self = reinterpret_cast<struct fused_generator *>(generator);
    /* Errors are ignored, because no result depends on them. */
    (void)cudaSetDevice(self->device);
    fused_graph_close(self->graph);
    fused_close(self->plan);
    (void)cudaFree(self->labels);
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
    free(self);
}

static const struct generator_type type = {fused_make, fused_bytes, fused_free};

/* Records the graph on a stream that has the priority of the plan's streams. */
static enum status open_graph(struct fused_generator *self, bool background)
{
    cudaStream_t stream;
    TRY(stream_open(&stream, background));
    enum status status = fused_graph_open(self->plan, self->synth.batch, stream, &self->graph);
    if (status == STATUS_OK)
        status = cuda_status(cudaStreamGetPriority(stream, &self->priority), "cudaStreamGetPriority",
                             __FILE__, __LINE__);
    cudaError_t error = cudaStreamDestroy(stream);
    return status != STATUS_OK ? status : cuda_status(error, "cudaStreamDestroy", __FILE__, __LINE__);
}

static enum status open_all(struct fused_generator *self, bool background)
{
    CUDA_TRY(cudaSetDevice(self->device));
    CUDA_TRY(cudaMalloc(&self->labels, self->synth.batch * sizeof *self->labels));
    TRY(fused_open(self->device, &self->synth, background, &self->plan));
    TRY(fused_need_all(self->plan)); /* the caller's numbers may be in device memory */
    return fused_single(self->plan) ? STATUS_OK : open_graph(self, background);
}

/* Implements generator_open() of struct synth_traits: creates a generator (core/generator.h) with its own
 * plan. The tables of `synth` must outlive the generator. The caller closes the generator with
 * generator_close(). */
static enum status fused_generator_open(const struct generator_request *request, const struct synth *synth,
                                        struct generator **generator)
{
    struct fused_generator *self = static_cast<struct fused_generator *>(calloc(1, sizeof *self));
    TRY(ALLOCATED(self, "out of memory"));
    self->generator.type = &type;
    self->synth = *synth;
    self->synth.batch = request->batch;
    self->synth.stride = 1; /* so that run number n begins with image n */
    self->device = request->resources.device;
    enum status status = open_all(self, request->background);
    if (status != STATUS_OK)
        fused_free(&self->generator);
    else
        *generator = &self->generator;
    return status;
}

/* ---- The variants ---- */

struct fused_batch {
    const struct synth *synth;
    int device;
    struct fused_plan *plan;
    struct device_clock clock;
    uint8_t *images, *masks; /* `masks`: NULL if the formula defines no masks */
    float *points;           /* NULL if the images have no point clouds */
    int64_t *labels;
    uint64_t latest;           /* number of the latest run */
    struct fused_graph *graph; /* used only by fused-graph */
};

static void fused_teardown(void *state)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    fused_graph_close(self->graph);
    (void)cudaFree(self->labels);
    (void)cudaFree(self->masks);
    (void)cudaFree(self->points);
    (void)cudaFree(self->images);
    device_clock_close(&self->clock);
    fused_close(self->plan);
    free(self);
}

static enum status make_batch(struct fused_batch *self, bool graph)
{
    const struct synth *synth = self->synth;
    size_t image_bytes = synth->batch * synth_output_bytes(synth),
           mask_bytes = synth->batch * synth_mask_bytes(synth),
           point_bytes = synth->batch * synth_cloud_bytes(synth),
           label_bytes = synth->batch * sizeof(int64_t);
    TRY(device_check_memory(self->device, synth,
                            image_bytes + mask_bytes + point_bytes + label_bytes +
                                device_input_bytes(synth)));
    CUDA_TRY(cudaMalloc(&self->images, image_bytes));
    if (mask_bytes > 0)
        CUDA_TRY(cudaMalloc(&self->masks, mask_bytes));
    if (point_bytes > 0)
        CUDA_TRY(cudaMalloc(&self->points, point_bytes));
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
    return {nullptr, number, nullptr, self->images, self->labels, self->masks, self->points};
}

static enum status fused_ready(void *state, uint64_t number)
{
    return fused_need(static_cast<struct fused_batch *>(state)->plan, number);
}

static enum status fused_run(void *state, uint64_t number, struct run_time *time)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    const struct fused_call call = call_of_run(self, number);
    cudaStream_t stream = self->clock.stream;
    CUDA_TRY(cudaSetDevice(self->device));
    self->latest = number;
    TRY(fused_need(self->plan, number)); /* does nothing after fused_ready() */
    TRY(device_clock_begin(&self->clock));
    TRY(self->graph ? fused_graph_launch(self->graph, &call, stream)
                    : fused_enqueue(self->plan, &call, self->synth->batch, stream));
    return device_clock_end(&self->clock, time);
}

static enum status fused_fetch(void *state, void *result)
{
    struct fused_batch *self = static_cast<struct fused_batch *>(state);
    struct synth_fetch *fetch = static_cast<struct synth_fetch *>(result);
    size_t bytes = synth_output_bytes(self->synth), mask_bytes = synth_mask_bytes(self->synth);
    CUDA_TRY(cudaSetDevice(self->device));
    CUDA_TRY(cudaMemcpy(fetch->pixels, self->images + fetch->j * bytes, bytes, cudaMemcpyDeviceToHost));
    if (fetch->mask && mask_bytes > 0)
        CUDA_TRY(
            cudaMemcpy(fetch->mask, self->masks + fetch->j * mask_bytes, mask_bytes, cudaMemcpyDeviceToHost));
    const size_t point_bytes = synth_cloud_bytes(self->synth);
    if (fetch->cloud && point_bytes > 0)
        CUDA_TRY(cudaMemcpy(fetch->cloud, self->points + fetch->j * (point_bytes / sizeof(float)),
                            point_bytes, cudaMemcpyDeviceToHost));
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

static struct ifs_bank_facts fused_batch_bank(const void *state)
{
    return fused_bank(static_cast<const struct fused_batch *>(state)->plan);
}

static const struct synth_traits traits = {.noise = SYNTH_NOISE_COUNTER,
                                           .outputs = true,
                                           .formulas = true,
                                           .timed = "clear+draw",
                                           .images = fused_images,
                                           .bank = fused_batch_bank,
                                           .generator_open = fused_generator_open,
                                           .stages = fused_stages};

extern "C" {
extern const struct variant variant_fused, variant_fused_graph;
const struct variant variant_fused = {.platform = "cuda",
                                      .traits = &traits,
                                      .probe = device_probe_variant,
                                      .setup = fused_setup<false>,
                                      .ready = fused_ready,
                                      .run = fused_run,
                                      .fetch = fused_fetch,
                                      .teardown = fused_teardown};
const struct variant variant_fused_graph = {.platform = "cuda",
                                            .traits = &traits,
                                            .probe = device_probe_variant,
                                            .setup = fused_setup<true>,
                                            .ready = fused_ready,
                                            .run = fused_run,
                                            .fetch = fused_fetch,
                                            .teardown = fused_teardown};
}
