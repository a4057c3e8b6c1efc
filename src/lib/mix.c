/* Mixtures of sources (fdsl_source_mix()): the checks of the configuration, and what the sources have
 * together. Their streams are opened by stream.c. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/checksum.h"
#include "lib/sources.h"

enum fdsl_status fdsl_mix_config_init(struct fdsl_mix_config *config, size_t size)
{
    static const struct fdsl_mix_config defaults = {
        .size = sizeof defaults, .epoch = FDSL_MIX_FIRST, .labels = "joined"};
    return lib_set_config(config, size, &defaults, sizeof defaults);
}

/* Returns a source's number of samples; 0: it is generated, and has no end in a mixture. */
static uint32_t finite_samples(const struct fdsl_source *source)
{
    return source->generates ? 0 : lib_source_samples(source);
}

static enum status check_part(const struct fdsl_source *source, uint32_t k)
{
    if (!source)
        return status_set(STATUS_USAGE, "sources: source %u is NULL", k);
    TRY(lib_source_check(source));
    TRY(lib_check_process("source", source->process));
    if (source->rows || source->mix)
        return status_set(STATUS_USAGE, "sources: source %u has %s; mix data sets and generated images", k,
                          source->rows ? "rows" : "other sources itself");
    return finite_samples(source) || source->generates
               ? STATUS_OK
               : status_set(STATUS_USAGE, "sources: source %u has no samples", k);
}

static enum status take_weight(const char *field, double weight, uint32_t *units)
{
    const double exact = weight * MIXTURE_UNITS;
    if (!(weight >= 0 && weight <= MIXTURE_MOST) || fabs(exact - rint(exact)) > 1e-6)
        return status_set(STATUS_USAGE,
                          "%s: %.17g is not a weight; it must be 0 to %d, with at most four decimals", field,
                          weight, MIXTURE_MOST);
    *units = (uint32_t)lrint(exact);
    return STATUS_OK;
}

static enum status take_weights(const struct fdsl_mix_config *config, struct mixture_request *request)
{
    TRY(lib_check_given("weights", config->weights));
    TRY(lib_check_count("change_count", config->change_count, 0, MIXTURE_PHASES - 1));
    if (config->change_count > 0) {
        TRY(lib_check_given("change_steps", config->change_steps));
        TRY(lib_check_given("change_weights", config->change_weights));
    }
    request->phase_count = 1 + config->change_count;
    for (uint32_t k = 0; k < config->count; k++)
        TRY(take_weight("weights", config->weights[k], &request->phases[0].of[k]));
    for (uint32_t i = 0; i < config->change_count; i++) {
        struct mixture_weights *phase = &request->phases[i + 1];
        phase->step = config->change_steps[i];
        if (phase->step == 0 || phase->step > UINT32_MAX)
            return status_set(STATUS_USAGE, "change_steps: %llu is out of range; it must be 1 to 2^32 - 1",
                              (unsigned long long)phase->step);
        for (uint32_t k = 0; k < config->count; k++)
            TRY(take_weight("change_weights", config->change_weights[i * config->count + k], &phase->of[k]));
    }
    return STATUS_OK;
}

/* Sets the classes of the mixture and their names. Joined classes have the names of the source with the most
 * classes. */
static enum status join_classes(const struct fdsl_mix_config *config, struct fdsl_source *self, bool offset)
{
    struct source_mixture *mix = self->mix;
    uint64_t total = 0;
    uint32_t largest = 0;
    for (uint32_t k = 0; k < mix->request.count; k++) {
        const struct fdsl_source *part = mix->sources[k];
        const uint32_t given = config->classes ? config->classes[k] : 0;
        mix->classes[k] = part->generates ? images_classes(&part->images) : part->classes;
        if (given && given < mix->classes[k])
            return status_set(STATUS_USAGE, "classes: source %u has %u classes, not %u", k, mix->classes[k],
                              given);
        mix->classes[k] = given ? given : mix->classes[k];
        if (offset && mix->classes[k] == 0 && k + 1 < mix->request.count)
            return status_set(STATUS_USAGE,
                              "classes: labels 'offset' needs the number of classes of source %u, which has "
                              "no class folders; set it",
                              k);
        if (offset)
            mix->request.sources[k].label_offset = (uint32_t)total;
        total += mix->classes[k];
        if (offset && total > INT32_MAX)
            return status_set(STATUS_USAGE,
                              "classes: sources 0 to %u have %llu classes together, but labels 'offset' must "
                              "be below 2^31 - 1; set the numbers of classes that they have",
                              k, (unsigned long long)total);
        if (part->classes > mix->sources[largest]->classes)
            largest = k;
    }
    if (!offset) {
        self->class_names = mix->sources[largest]->class_names;
        self->classes = mix->sources[largest]->classes;
        return STATUS_OK;
    }
    bool named = true;
    for (uint32_t k = 0; k < mix->request.count; k++)
        named &= mix->sources[k]->classes > 0 && mix->sources[k]->classes == mix->classes[k];
    if (!named)
        return STATUS_OK;
    mix->class_names = malloc((size_t)(total + 1) * sizeof *mix->class_names);
    TRY(ALLOCATED(mix->class_names, "out of memory for the names of classes"));
    for (uint32_t k = 0; k < mix->request.count; k++)
        for (uint32_t c = 0; c < mix->sources[k]->classes; c++)
            mix->class_names[self->classes++] = mix->sources[k]->class_names[c];
    self->class_names = mix->class_names;
    return STATUS_OK;
}

static enum status open_mix(const struct fdsl_mix_config *config, struct fdsl_source *self)
{
    static const char *const kinds[] = {"joined", "offset", NULL};
    int labels;
    TRY(lib_check_count("count", config->count, 1, MIXTURE_SOURCES));
    TRY(lib_check_given("sources", config->sources));
    TRY(lib_find_name("labels", config->labels, kinds, &labels));
    for (uint32_t k = 0; k < config->count; k++)
        TRY(check_part(config->sources[k], k));
    struct source_mixture *mix = self->mix = calloc(1, sizeof *mix);
    TRY(ALLOCATED(mix, "out of memory"));
    struct mixture_request *request = &mix->request;
    request->named = config->epoch;
    for (uint32_t k = 0; k < config->count; k++) {
        struct fdsl_source *part = config->sources[k];
        atomic_fetch_add(&part->users, 1);
        mix->sources[request->count++] = part;
        snprintf(request->sources[k].name, MIXTURE_NAME, "%u", k);
        request->sources[k].samples = finite_samples(part);
        if (request->named == FDSL_MIX_FIRST && !part->generates)
            request->named = k;
    }
    if (request->named == FDSL_MIX_FIRST)
        return status_set(STATUS_USAGE, "sources: all of them are generated; one must have an end");
    TRY(lib_check_count("epoch", request->named, 0, config->count - 1));
    TRY(take_weights(config, request));
    TRY(mixture_count(request, &mix->positions));
    TRY(join_classes(config, self, labels == 1));
    self->hash = mixture_hash(request);
    for (uint32_t k = 0; k < request->count; k++) {
        self->hash = checksum_seeded(&mix->sources[k]->hash, sizeof self->hash, self->hash);
        self->dataset.bytes += mix->sources[k]->dataset.bytes;
    }
    return STATUS_OK;
}

enum fdsl_status fdsl_source_mix(const struct fdsl_mix_config *config, struct fdsl_source **source)
{
    enum status status = lib_source_new(config, sizeof *config, source);
    if (status == STATUS_OK)
        status = open_mix(config, *source);
    return lib_source_end(status, source);
}

void mix_free(struct source_mixture *mix)
{
    if (!mix)
        return;
    for (uint32_t k = 0; k < mix->request.count; k++)
        lib_source_release(mix->sources[k]);
    free(mix->class_names);
    free(mix);
}
