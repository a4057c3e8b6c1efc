#include "synth/generator.h"

#include <stdlib.h>
#include <string.h>

#include "core/variant.h"

/* A generator on the host: a variant, and the list of images for its next run. */
struct host_generator {
    struct generator generator; /* must be the first member */
    struct synth synth;
    struct synth_list list;
    const struct variant *variant;
    void *state;
};

static enum status host_make(struct generator *generator, const uint64_t *numbers, uint32_t count,
                             void *samples, void *stream)
{
    struct host_generator *self = (struct host_generator *)generator;
    const struct synth_traits *traits = self->variant->traits;
    struct run_time unused;
    (void)stream;
    self->list = (struct synth_list){numbers, count};
    TRY(self->variant->run(self->state, 0, &unused));
    memcpy(samples, traits->images(self->state), count * synth_output_bytes(&self->synth));
    return STATUS_OK;
}

/* Counts only the images; canvases and tables are small by comparison. */
static uint64_t host_memory_bytes(const struct generator *generator)
{
    const struct host_generator *self = (const struct host_generator *)generator;
    return self->synth.batch * synth_output_bytes(&self->synth);
}

static void host_close(struct generator *generator)
{
    struct host_generator *self = (struct host_generator *)generator;
    if (self->state)
        self->variant->teardown(self->state);
    free(self);
}

static const struct generator_type host_type = {host_make, host_memory_bytes, host_close};

static enum status host_open(const struct synth *synth, const struct generator_request *request,
                             struct generator **generator)
{
    const struct variant *omp = variant_find("omp")->variant;
    struct host_generator *self = calloc(1, sizeof *self);
    if (!self)
        return status_set(STATUS_FAILED, "out of memory");
    self->generator.type = &host_type;
    self->synth = *synth;
    self->synth.batch = self->synth.stride = request->batch;
    self->synth.list = &self->list;
    self->variant = omp ? omp : variant_find("naive")->variant;
    enum status status = self->variant->setup(&request->resources, &self->synth, &self->state);
    if (status != STATUS_OK) {
        host_close(&self->generator);
        return status;
    }
    *generator = &self->generator;
    return STATUS_OK;
}

enum status synth_generator_open(const struct synth *synth, const struct generator_request *request,
                                 struct generator **generator)
{
    const struct variant_entry *fused = variant_find("fused");
    const struct synth_traits *traits;
    if (!request->on_device)
        return host_open(synth, request, generator);
    TRY(variant_available(fused, &request->resources));
    traits = fused->variant->traits;
    return traits->generator_open(request->resources.device, synth, request->batch, generator);
}
