/* `fused` as a generator (core/generator.h): generates images by number on the caller's stream. */
#include <stdlib.h>

#include "common/check.cuh"
#include "core/generator.h"
#include "synth/fused.h"

struct fused_generator {
    struct generator generator; /* must be first */
    struct synth synth;
    int device;
    struct fused_plan *plan;
    int64_t *labels; /* destination of labels that the caller does not want */
};

static enum status make(struct generator *generator, const struct generator_numbers *numbers, uint32_t count,
                        void *samples, int64_t *labels, void *stream_)
{
    const struct fused_generator *self = reinterpret_cast<const struct fused_generator *>(generator);
    uint8_t *images = static_cast<uint8_t *>(samples);
    cudaStream_t stream = static_cast<cudaStream_t>(stream_);
    labels = labels ? labels : self->labels;
    return numbers->list
               ? fused_enqueue_listed(self->plan, numbers->list, count, images, labels, stream)
               : fused_enqueue(self->plan, numbers->first, numbers->counter, count, images, labels, stream);
}

static uint64_t memory_bytes(const struct generator *generator)
{
    const struct fused_generator *self = reinterpret_cast<const struct fused_generator *>(generator);
    return fused_memory_bytes(self->plan) + self->synth.batch * sizeof *self->labels;
}

static void free_all(struct generator *generator)
{
    struct fused_generator *self = reinterpret_cast<struct fused_generator *>(generator);
    /* Errors are ignored, because no result depends on them. */
    (void)cudaSetDevice(self->device);
    fused_close(self->plan);
    (void)cudaFree(self->labels);
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
    free(self);
}

static const struct generator_type type = {make, memory_bytes, free_all};

static enum status open_all(struct fused_generator *self, bool background)
{
    CUDA_TRY(cudaSetDevice(self->device));
    CUDA_TRY(cudaMalloc(&self->labels, self->synth.batch * sizeof *self->labels));
    return fused_open(self->device, &self->synth, background, &self->plan);
}

enum status fused_generator_open(const struct generator_request *request, const struct synth *synth,
                                 struct generator **generator)
{
    struct fused_generator *self = static_cast<struct fused_generator *>(calloc(1, sizeof *self));
    if (!self)
        return status_set(STATUS_FAILED, "out of memory");
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
