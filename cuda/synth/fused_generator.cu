/* `fused` as a generator (core/generator.h): generates any list of images on the caller's stream. */
#include <stdlib.h>

#include "common/check.cuh"
#include "core/generator.h"
#include "synth/fused.h"

struct fused_generator {
    struct generator generator; /* must be first */
    struct synth synth;
    int device;
    struct fused_plan *plan;
    int64_t *labels; /* written but not used: callers derive the class from the image number */
};

static enum status make(struct generator *generator, const uint64_t *numbers, uint32_t count, void *samples,
                        void *stream)
{
    const struct fused_generator *self = reinterpret_cast<const struct fused_generator *>(generator);
    return fused_enqueue_listed(self->plan, numbers, count, static_cast<uint8_t *>(samples), self->labels,
                                static_cast<cudaStream_t>(stream));
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
    free(self);
}

static const struct generator_type type = {make, memory_bytes, free_all};

static enum status open_all(struct fused_generator *self)
{
    CUDA_TRY(cudaSetDevice(self->device));
    CUDA_TRY(cudaMalloc(&self->labels, self->synth.batch * sizeof *self->labels));
    return fused_open(self->device, &self->synth, &self->plan);
}

enum status fused_generator_open(int device, const struct synth *synth, uint32_t batch,
                                 struct generator **generator)
{
    struct fused_generator *self = static_cast<struct fused_generator *>(calloc(1, sizeof *self));
    if (!self)
        return status_set(STATUS_FAILED, "out of memory");
    self->generator.type = &type;
    self->synth = *synth;
    self->synth.batch = self->synth.stride = batch;
    self->device = device;
    enum status status = open_all(self);
    if (status != STATUS_OK)
        free_all(&self->generator);
    else
        *generator = &self->generator;
    return status;
}
