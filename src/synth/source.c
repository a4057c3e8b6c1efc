/* The source `synth`: VisualAtom images with their labels, made by any variant that gives the exact bits. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/partition.h"
#include "core/workload.h"
#include "data/npy.h"
#include "data/source.h"
#include "data/png_image.h"
#include "synth/generator.h"
#include "synth/input.h"

struct parameters {
    const char *variant;
    int encoding;
};

struct maker {
    enum source_encoding encoding;
    const struct workload *workload;
    void *input;
    const struct synth *synth; /* the input, as variants see it */
    const struct variant *variant;
    void *state;
    uint64_t run; /* the latest; UINT64_MAX: none */
    char shape[NPY_SHAPE_MAX];
};

static void synth_source_close(void *state)
{
    struct maker *maker = state;
    if (maker->state)
        maker->variant->teardown(maker->state);
    if (maker->input)
        maker->workload->close(maker->input);
    free(maker);
}

/* ---- Samples ---- */

static struct synth_image image_of(const struct synth *synth, uint64_t number)
{
    return synth_image_at(synth->first + number, 1, synth->class_count, 0, 0);
}

/* Finished images on their way into samples. */
struct finished {
    const struct maker *maker;
    uint64_t first;
    const uint8_t *pixels;
};

static enum status encode(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct finished *finished = state;
    const struct synth *synth = finished->maker->synth;
    const struct synth_output *output = &synth->output;
    const struct png_shape shape = {output->res, output->res, 1};
    size_t image_bytes = synth_output_bytes(synth), size;
    const uint8_t *pixels = finished->pixels + (number - finished->first) * image_bytes;
    void *bytes;
    TRY(source_add_label(sample, synth->classes[image_of(synth, number).class_index].id));
    if (finished->maker->encoding == SOURCE_NPY)
        return source_add_array(sample, dtype_npy(output->type), finished->maker->shape, pixels, image_bytes,
                                NULL);
    TRY(png_encode(pixels, &shape, &bytes, &size));
    source_add(sample, "png", bytes, size);
    return STATUS_OK;
}

/* Samples of one run of the variant, which is made unless it is the latest. */
static enum status make_of_run(struct maker *maker, uint64_t first, uint64_t count,
                               struct source_sample *samples)
{
    const struct synth *synth = maker->synth;
    size_t bytes = synth_output_bytes(synth);
    struct run_time time;
    if (maker->run != first / synth->batch) {
        maker->run = UINT64_MAX;
        TRY(maker->variant->run(maker->state, first / synth->batch, &time));
        maker->run = first / synth->batch;
    }
    uint8_t *pixels = malloc(count * bytes);
    if (!pixels)
        return status_set(STATUS_FAILED, "out of memory for %" PRIu64 " images; lower --batch", count);
    enum status status = STATUS_OK;
    for (uint64_t i = 0; i < count && status == STATUS_OK; i++) {
        struct synth_fetch fetch = {.j = (first + i) % synth->batch, .pixels = pixels + i * bytes};
        status = maker->variant->fetch(maker->state, &fetch);
    }
    const struct finished finished = {maker, first, pixels};
    if (status == STATUS_OK)
        status = source_make_all(encode, &finished, first, count, samples);
    free(pixels);
    return status;
}

static enum status synth_source_make(void *state, uint64_t first, uint64_t count,
                                     struct source_sample *samples)
{
    struct maker *maker = state;
    uint64_t batch = maker->synth->batch;
    for (uint64_t done = 0; done < count;) {
        uint64_t room = batch - (first + done) % batch, part = count - done < room ? count - done : room;
        TRY(make_of_run(maker, first + done, part, samples + done));
        done += part;
    }
    return STATUS_OK;
}

static enum status synth_source_generate(void *state, const struct generator_request *request,
                                         struct generator **generator)
{
    return synth_generator_open(((struct maker *)state)->synth, request, generator);
}

static uint64_t synth_source_label(const void *state, uint64_t number)
{
    const struct synth *synth = ((const struct maker *)state)->synth;
    return synth->classes[image_of(synth, number).class_index].id;
}

static void synth_source_describe(const void *state, uint64_t number, char texts[][SOURCE_TEXT_MAX])
{
    const struct synth *synth = ((const struct maker *)state)->synth;
    struct synth_image image = image_of(synth, number);
    snprintf(texts[0], SOURCE_TEXT_MAX, "%u", synth->classes[image.class_index].id);
    snprintf(texts[1], SOURCE_TEXT_MAX, "%" PRIu64, image.instance);
    snprintf(texts[2], SOURCE_TEXT_MAX, "%" PRIu64, synth->seed);
}

/* ---- Opening ---- */

static bool is_exact(const struct variant *variant)
{
    const struct synth_traits *traits = variant->traits;
    return traits->noise == SYNTH_NOISE_COUNTER && !traits->half && !traits->racy;
}

/* The variant that is asked for, or the fastest that every machine has. */
static enum status choose_variant(struct maker *maker, const char *name, const struct resources *resources)
{
    const struct variant_entry *entry = variant_find(name ? name : "omp");
    if (!name && !entry->variant)
        entry = variant_find("naive");
    if (!entry || strcmp(entry->workload, "synth") != 0)
        return status_set(STATUS_USAGE, "--variant %.80s: this is no variant of synth; --list shows them",
                          name);
    enum status status = variant_available(entry, resources);
    if (status == STATUS_OK && !is_exact(entry->variant))
        status = status_set(STATUS_USAGE, "it does not make the exact bits; naive, omp and fused do");
    if (status == STATUS_OK && maker->workload->accepts)
        status = maker->workload->accepts(maker->input, entry->variant);
    if (status != STATUS_OK)
        return status_prefix(status, "--variant %s", entry->name);
    maker->variant = entry->variant;
    return maker->variant->setup(resources, maker->input, &maker->state);
}

/* What shows the images of a run means nothing here. */
static enum status check_options(const struct source_request *request)
{
    static const char *const shows[] = {"png", "sheet", "npy", "write-classes"};
    for (size_t i = 0; i < COUNT_OF(shows); i++)
        if (options_given(request->options, shows[i]))
            return status_set(STATUS_USAGE,
                              "--%s shows images of a run; --prepare writes them into its folder", shows[i]);
    if (options_given(request->options, "compute"))
        return status_set(STATUS_USAGE, "--compute belongs to a run that is timed; --prepare times none");
    return STATUS_OK;
}

static enum status check_encoding(const struct maker *maker)
{
    const struct synth_output *output = &maker->synth->output;
    if (maker->encoding == SOURCE_NPY || (output->type == DTYPE_U8 && output->channels == 1))
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      "--encode png holds u8 images of one channel (all three would be the same "
                      "gray); add --encode npy for others");
}

static enum status fill_maker(struct maker *maker, const struct source_request *request,
                              struct source_facts *facts)
{
    const struct parameters *parameters = request->parameters;
    TRY(check_options(request));
    maker->encoding = (enum source_encoding)parameters->encoding;
    maker->workload = workload_find("synth");
    const struct partition alone = {.ranks = 1}; /* ranks share out shards, not the images of a batch */
    TRY(maker->workload->open(request->options, request->workload_parameters, &alone, &maker->input));
    maker->synth = maker->input;
    TRY(check_encoding(maker));
    const struct synth_output *output = &maker->synth->output;
    snprintf(maker->shape, sizeof maker->shape, "%u, %u, %u", output->channels, output->res, output->res);
    facts->samples = SOURCE_ENDLESS;
    facts->sample_bytes = synth_output_bytes(maker->synth) + NPY_HEADER_MAX;
#ifdef HAVE_XXHASH
    facts->identity =
        XXH3_64bits(maker->synth->classes, maker->synth->class_count * sizeof *maker->synth->classes);
#endif
    return choose_variant(maker, parameters->variant, &request->resources);
}

static enum status synth_source_open(const struct source_request *request, struct source_facts *facts,
                                     void **state)
{
    struct maker *maker = calloc(1, sizeof *maker);
    if (!maker)
        return status_set(STATUS_FAILED, "out of memory");
    maker->run = UINT64_MAX;
    enum status status = fill_maker(maker, request, facts);
    if (status != STATUS_OK) {
        synth_source_close(maker);
        return status;
    }
    *state = maker;
    return STATUS_OK;
}

#define AT(field) offsetof(struct parameters, field)
static const struct option_spec options[] = {
    {"variant", "NAME", OPTION_TEXT, AT(variant), NULL, 0, 0, NULL, false,
     "what makes the images: naive, omp or fused, whose bits are the same (default: omp)"},
    {"encode", "KIND", OPTION_CHOICE, AT(encoding), "png", 0, 0, source_encodings, true,
     "what an image becomes"},
};

static const char *const columns[] = {"class", "instance", "seed", NULL};
/* Classes count by what they are, and an array is always channel by channel. */
static const char *const indifferent[] = {"batch", "class", "preset-file", "layout", NULL};

const struct source source_synth = {
    .name = "synth",
    .summary = "VisualAtom images and their labels",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct parameters),
    .workload = "synth",
    .indifferent = indifferent,
    .columns = columns,
    .open = synth_source_open,
    .close = synth_source_close,
    .make = synth_source_make,
    .generate = synth_source_generate,
    .label = synth_source_label,
    .describe = synth_source_describe,
};
