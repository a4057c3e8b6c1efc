/* Generators (core/generator.h) of images. */
#include <stdlib.h>
#include <string.h>

#include "core/generator.h"
#include "core/variant.h"
#include "synth/input.h"

/* A generator on the host: a variant, and `call`, which names the images that the variant's next run
 * generates. */
struct host_generator {
    struct generator generator; /* must be the first member */
    struct synth synth;
    struct synth_call call;
    const struct variant *variant;
    void *state;
};

static enum status host_make(struct generator *generator, const struct generator_numbers *numbers,
                             uint32_t count, void *samples, const struct generator_targets *targets,
                             void *stream)
{
    struct host_generator *self = (struct host_generator *)generator;
    struct run_time unused;
    (void)stream;
    self->call = (struct synth_call){
        .numbers = numbers->list, .first = numbers->first, .count = count, .images = samples};
    if (targets)
        self->call.targets = *targets;
    return variant_run(self->variant, self->state, 0, &unused);
}

/* Returns the bytes of the canvases. Omits the tables, which are small by comparison. */
static uint64_t host_memory_bytes(const struct generator *generator)
{
    const struct host_generator *self = (const struct host_generator *)generator;
    const struct synth_traits *traits = self->variant->traits;
    return traits->canvas_bytes(self->state);
}

static void host_close(struct generator *generator)
{
    struct host_generator *self = (struct host_generator *)generator;
    if (self->state)
        self->variant->teardown(self->state);
    free(self);
}

static const struct generator_type host_type = {host_make, host_memory_bytes, host_close};

static enum status host_open(const struct synth *synth, const struct variant *variant,
                             const struct generator_request *request, struct generator **generator)
{
    struct host_generator *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    self->generator.type = &host_type;
    self->synth = *synth;
    self->synth.batch = self->synth.stride = request->batch;
    self->synth.call = &self->call;
    self->variant = variant;
    enum status status = variant->setup(&request->resources, &self->synth, &self->state);
    if (status != STATUS_OK) {
        host_close(&self->generator);
        return status;
    }
    *generator = &self->generator;
    return STATUS_OK;
}

enum status synth_check_formula(const struct synth *synth, const struct variant *variant)
{
    const struct synth_traits *traits = variant->traits;
    const struct formula *formula = formulas[synth->formula];
    if (!traits->formulas && !formula->paper)
        return status_set(STATUS_USAGE,
                          "does not draw the formula %s, only uji and visualatom; use naive, omp or fused",
                          formula->name);
    if (synth->set && !synth_is_ifs(synth) && strcmp(variant->platform, "cpu") != 0)
        return status_set(STATUS_USAGE, "does not draw published random streams; use naive or omp");
    return STATUS_OK;
}

enum status synth_check_cache(const struct synth *synth, const struct variant *variant)
{
    const struct synth_traits *traits = variant->traits;
    if (!synth->cache_dir || (traits->bank && strcmp(variant->platform, "cpu") == 0))
        return STATUS_OK;
    return status_set(STATUS_USAGE, "%s keeps the orbits of omp; %s",
                      OPTION_OR_FIELD("--cache-dir", "cache_dir:"),
                      OPTION_OR_FIELD("this variant does not use them: drop --cache-dir",
                                      "this generator or device does not use them: leave it out"));
}

enum status synth_generator_open(const struct synth *synth, const struct variant *variant,
                                 const struct generator_request *request, struct generator **generator)
{
    const struct synth_traits *traits = variant->traits;
    TRY(synth_check_formula(synth, variant));
    if (variant->probe)
        TRY(variant->probe(&request->resources));
    if (!request->on_device)
        return host_open(synth, variant, request, generator);
    return traits->generator_open(request, synth, generator);
}
