/* Generated images as a source of streams: the checks of the configuration, and the generator of a stream. */
#include "lib/sources.h"

#include <string.h>

#include "core/generator.h"
#include "data/checksum.h"
#include "data/generated_stream.h"

#define COUNT_MAX ((UINT64_C(1) << 31) - 1) /* the limit of draw_order() */

/* Hashes everything that determines the pixels of the canvases, which images they are, and their targets. */
static uint64_t hash_images(const struct images *images)
{
    const struct synth *synth = &images->synth;
    const uint64_t words[] = {images->count, images->fresh,     synth->seed, (uint64_t)synth->formula,
                              synth->res,    synth->class_count};
    uint64_t hash = checksum_seeded(words, sizeof words, 2);
    if (synth->set) /* the published random stream of the set */
        hash = checksum_seeded(synth->set->name, strlen(synth->set->name), hash);
    if (formula_is_system(formulas[synth->formula])) {
        hash = checksum_seeded(&synth->ifs, sizeof synth->ifs, hash);
        hash = checksum_seeded(&synth->points, sizeof synth->points, hash);
    }
    if (synth_is_color(synth))
        hash = checksum_seeded(&synth->color, sizeof synth->color, hash);
    _Static_assert(sizeof *synth->colors == 34 * sizeof(uint32_t) && sizeof synth->color == 16,
                   "the parameters of colours have no gaps");
    _Static_assert(sizeof *synth->classes == 40 &&
                       sizeof *synth->systems == 16 + IFS_MAPS_MAX * IFS_MAP_VALUES * sizeof(double) &&
                       sizeof *synth->solids == 40 + IFS_MAPS_MAX * IFS3D_COEFFICIENTS * sizeof(double) &&
                       sizeof synth->ifs == 28,
                   "the parameters of a class have no gaps");
    size_t bytes;
    const void *table = synth_class_table(synth, &bytes);
    return checksum_seeded(table, bytes, hash);
}

/* Streams hold labels as int32_t, and -1 means that a sample is masked. */
static enum status check_ids(const struct synth *synth)
{
    for (uint32_t c = 0; c < synth->class_count; c++)
        if (synth->classes[c].id > INT32_MAX)
            return status_set(STATUS_USAGE,
                              "class_list: class %u is out of range; in streams, an id must be below 2^31",
                              synth->classes[c].id);
    return STATUS_OK;
}

/* Reads the random numbers of a published set, so that streams need not do so. */
static enum status prepare_published(const struct synth *synth)
{
    const struct published_stream *stream = formulas[synth->formula]->published;
    struct published *published;
    int threads;
    if (!synth->set || !stream)
        return STATUS_OK;
    TRY(lib_threads("threads", 0, &threads));
    TRY(stream->open(synth, threads, &published));
    stream->close(published);
    return STATUS_OK;
}

enum status images_open(const struct fdsl_config *config, uint64_t count, int fresh, struct images *images)
{
    if (count < 1 || count > COUNT_MAX)
        return status_set(STATUS_USAGE, "count: %llu is out of range; it must be 1 to %llu",
                          (unsigned long long)count, (unsigned long long)COUNT_MAX);
    if (fresh != 0 && fresh != 1)
        return status_set(STATUS_USAGE, "fresh: %d is neither 0 nor 1", fresh);
    if (config->device != FDSL_CPU)
        return status_set(STATUS_USAGE, "device: it is %d; set the device of a stream in its configuration",
                          config->device);
    if (config->threads != 0)
        return status_set(STATUS_USAGE, "threads: it is %d; set num_threads of a stream's configuration",
                          config->threads);
    TRY(lib_find_generator(config->generator, &images->generator));
    TRY(lib_images_input(config, &images->synth));
    TRY(check_ids(&images->synth));
    if (synth_cloud_bytes(&images->synth))
        return status_set(STATUS_USAGE, "preset: streams have no point clouds; set it to mv-fractaldb-1k, "
                                        "which has the same images and labels");
    TRY(prepare_published(&images->synth));
    images->count = (uint32_t)count;
    images->fresh = fresh ? generated_stream_fresh(images->synth.turns) : 0;
    images->hash = hash_images(images);
    return STATUS_OK;
}

void images_free(struct images *images)
{
    synth_free(&images->synth);
}

/* ---- Streams ---- */

void images_get_format(const struct images *images, struct image_output *output, uint64_t *transform)
{
    const struct synth_output *own = &images->synth.output;
    const uint32_t words[] = {own->res, (uint32_t)own->fit, own->channels, (uint32_t)own->layout,
                              (uint32_t)own->type};
    output->type = own->type;
    output->interleaved = own->layout == OUTPUT_NHWC;
    *transform = checksum_seeded(words, sizeof words, 3);
    if (own->type != DTYPE_U8) {
        *transform = checksum_seeded(own->scale, own->channels * sizeof *own->scale, *transform);
        *transform = checksum_seeded(own->bias, own->channels * sizeof *own->bias, *transform);
    }
}

static uint64_t label_of(const void *state, uint64_t number)
{
    const struct synth *synth = &((const struct images *)state)->synth;
    return synth_label(synth, synth_image_at(synth->first, 1, synth->turns, number, 0));
}

enum status images_mixed_source(const struct images *images, const struct fdsl_stream_config *config,
                                uint32_t batch, struct device_mixed_source *source)
{
    *source = (struct device_mixed_source){
        .host_numbers = lib_generator_needs_host(images->generator), .label = label_of, .state = images};
    return lib_generator_open(&images->synth, images->generator, config->device, config->num_threads, batch,
                              &source->generator);
}

enum status images_stream_open(const struct images *images, const struct fdsl_stream_config *config,
                               const struct images_plan *plan, struct stream **stream,
                               struct device_batches **batches)
{
    struct generated_stream_request request = {.fresh = images->fresh,
                                               .number = plan->number,
                                               .count = images->count,
                                               .sample_bytes = synth_output_bytes(&images->synth),
                                               .mask_bytes = synth_mask_bytes(&images->synth),
                                               .type = images->synth.output.type,
                                               .plan = plan->plan,
                                               .ahead = config->prefetch,
                                               .held = config->held};
    TRY(lib_generator_open(&images->synth, images->generator, config->device, config->num_threads,
                           plan->plan.capacity, &request.generator));
    if (config->device < 0)
        return generated_stream_open(&request, stream);
    struct device_order order = plan->order;
    order.fresh = images->fresh;
    order.host_numbers = lib_generator_needs_host(images->generator);
    order.captures = plan->even && !order.host_numbers;
    TRY(device_images_open(config->device, &request, &order, batches));
    *stream = &(*batches)->stream;
    return STATUS_OK;
}
