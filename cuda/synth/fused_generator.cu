/* `fused` as a generator (core/generator.h): generates images by number on the caller's stream. If possible,
 * a full batch is one launch of a CUDA graph. */
#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/generator.h"
#include "machine/device.h"
#include "synth/fused.h"

struct fused_generator {
    struct generator generator; /* must be first */
    struct synth synth;
    int device;
    struct fused_plan *plan;
    struct fused_graph *graph;
    int priority; /* priority of the stream on which the graph was recorded */
    /* The stream of the previous call and whether it has this priority. If a new stream has the address of a
     * destroyed one, its kernels may get the other priority; the images are the same. */
    bool known, suits;
    cudaStream_t stream;
    int64_t *labels; /* destination of the labels if the caller passes NULL */
};

/* Sets `*fits` to whether the graph can generate `count` images on `stream`. `stream` must have the priority
 * of the stream on which the graph was recorded, because the graph's kernels keep that priority. A stream
 * that is being captured does not fit: the caller's graph must contain the kernels themselves, because the
 * generator's graph changes with each launch. */
static enum status check_graph(struct fused_generator *self, uint32_t count, cudaStream_t stream, bool *fits)
{
    int priority;
    *fits = count == self->synth.batch && !device_capturing(-1, stream);
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

static enum status make(struct generator *generator, const struct generator_numbers *numbers, uint32_t count,
                        void *samples, int64_t *labels, void *stream_)
{
    struct fused_generator *self = reinterpret_cast<struct fused_generator *>(generator);
    cudaStream_t stream = static_cast<cudaStream_t>(stream_);
    const struct fused_call call = {numbers->list, numbers->first, numbers->counter,
                                    static_cast<uint8_t *>(samples), labels ? labels : self->labels};
    bool fits;
    TRY(check_graph(self, count, stream, &fits));
    return fits ? fused_graph_launch(self->graph, &call, stream)
                : fused_enqueue(self->plan, &call, count, stream);
}

static uint64_t memory_bytes(const struct generator *generator)
{
    const struct fused_generator *self = reinterpret_cast<const struct fused_generator *>(generator);
    return fused_memory_bytes(self->plan) + sizeof(struct fused_call) +
           self->synth.batch * sizeof *self->labels;
}

static void free_all(struct generator *generator)
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

static const struct generator_type type = {make, memory_bytes, free_all};

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
    return open_graph(self, background);
}

enum status fused_generator_open(const struct generator_request *request, const struct synth *synth,
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
        free_all(&self->generator);
    else
        *generator = &self->generator;
    return status;
}
