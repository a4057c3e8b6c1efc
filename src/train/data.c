#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <unistd.h>

#include "core/options.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/checksum.h"
#include "data/dataset.h"
#include "data/generated_stream.h"
#include "data/remote.h"
#include "data/resident.h"
#include "data/set_stream.h"
#include "data/source.h"
#include "train/data.h"
#include "train/data_fill.h"
#include "train/data_mixture.h"
#include "train/given.h"

/* Opens a source with the option values in `parameters`, calls data_fill(), and closes the source. An error
 * of generated samples names --data; an error of files names the file. */
static enum status data_read(const struct data_request *request, const char *source, const void *parameters,
                             struct data_range range, uint64_t limit, struct data *data, enum data_part part)
{
    struct source_reader reader;
    const struct source_request with = {.parameters = parameters, .resources = request->resources};
    enum status status = source_open(source, &with, &reader);
    if (status == STATUS_OK)
        status = data_fill(&reader, range, limit, request->resources.threads, data, part);
    source_close(&reader);
    return data_is_generated(request->name) ? status_prefix(status, "--data %s", request->name) : status;
}

/* ---- Opening ---- */

#define DIGITS 10 /* number of classes */
#define CLIPS  8

/* A source that stays open to generate or read samples during training. */
struct data_source {
    struct source_reader reader;
    /* DATA_LOAD only: of each training sample, its index in the data set, and its label, which is DATA_MASKED
     * only if the label is broken. */
    uint32_t *samples, *labels;
};

static void close_source(struct data *data)
{
    if (data->source) {
        source_close(&data->source->reader);
        free(data->source->samples);
        free(data->source->labels);
    }
    free(data->source);
    data->source = NULL;
}

void data_close(struct data *data)
{
    for (int part = 0; part < DATA_PARTS; part++) {
        free(data->sets[part].values);
        free(data->sets[part].labels);
        free(data->sets[part].multi_hot);
        for (uint32_t i = 0; i < data->sets[part].key_count; i++)
            free(data->sets[part].keys[i]);
        free(data->sets[part].keys);
    }
    close_source(data);
    rows_close(data);
    data_mixture_close(data);
    *data = (struct data){0};
}

/* ---- Finding the sets ---- */

static bool file_there(const char *folder, const char *name, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX && access(path, F_OK) == 0;
}

/* Returns the size of a part of a generated set. */
static uint64_t generated_size(const struct data_request *request, int part)
{
    if (part == DATA_TRAIN)
        return request->train_size ? request->train_size : DATA_TRAIN_SIZE;
    return request->test_size ? request->test_size : DATA_TEST_SIZE;
}

/* Returns how many samples of a part are generated. */
static uint64_t generated_count(const struct data_request *request, int part)
{
    return request->describe ? 1 : generated_size(request, part);
}

/* Generates both sets. Test samples have numbers above all possible training numbers, so the test set does
 * not depend on the size of the training set. */
static enum status generate(const struct data_request *request, const char *source, struct data *data)
{
    static const struct generated_values values = {.encoding = SOURCE_NPY};
    uint64_t train = generated_count(request, DATA_TRAIN), test = generated_count(request, DATA_TEST);
    if (!request->test_only)
        TRY(data_read(request, source, &values, (struct data_range){0, train, -1}, train, data, DATA_TRAIN));
    return data_read(request, source, &values, (struct data_range){DATA_SAMPLES_MAX + 1, test, -1}, test,
                     data, DATA_TEST);
}

/* Returns the first part that is read. */
static int first_part(const struct data_request *request)
{
    return request->test_only ? DATA_TEST : DATA_TRAIN;
}

/* Returns the part after the last one that is read. */
static int end_part(const struct data_request *request)
{
    return request->train_only ? DATA_TEST : DATA_PARTS;
}

/* ---- Generated during training ---- */

/* Generates the labels of all training samples, also of those that are not in memory. */
static enum status label_all(const struct source_reader *reader, uint64_t count, struct data *data)
{
    struct data_set *set = &data->sets[DATA_TRAIN];
    if (count > set->count)
        TRY(data_check_memory(count - set->count, data_label_bytes(data), "--train-size"));
    TRY(data_room_for_labels(data, count, "--train-size", set));
    for (uint64_t n = set->count; n < count; n++) {
        set->labels[n] = data->multi_hot ? (uint32_t)n : (uint32_t)reader->source->label(reader->state, n);
        if (data->multi_hot)
            TRY(reader->source->multi_hot(reader->state, n, data_multi_hot(data, set, n)));
    }
    set->count = (uint32_t)count;
    return STATUS_OK;
}

/* Fills both sets from the source `synth`, which the caller has opened. */
static enum status fill_synth(const struct data_request *request, struct source_reader *reader,
                              struct data *data)
{
    uint64_t train = generated_count(request, DATA_TRAIN), test = generated_count(request, DATA_TEST);
    uint64_t measured = train < DATA_MEASURED ? train : DATA_MEASURED, held = train;
    if (data->feed == DATA_LIVE)
        held = measured;
    if (data->feed == DATA_CONSTANT) {
        held = request->batch > measured ? request->batch : measured;
        held = held < train ? held : train;
    }
    int threads = request->resources.threads;
    if (!request->test_only) {
        TRY(data_fill(reader, (struct data_range){0, held, -1}, held, threads, data, DATA_TRAIN));
        TRY(label_all(reader, train, data));
        data->held = (uint32_t)held;
        data->measured = (uint32_t)measured;
    }
    return request->train_only ? STATUS_OK
                               : data_fill(reader, (struct data_range){DATA_SAMPLES_MAX + 1, test, -1}, test,
                                           threads, data, DATA_TEST);
}

/* Warns if the training set has images of the test set. */
static void warn_of_period(const struct data_request *request, uint64_t period)
{
    const uint64_t train = generated_size(request, DATA_TRAIN), test = generated_size(request, DATA_TEST);
    const uint64_t first = period ? (DATA_SAMPLES_MAX + 1) % period : 0;
    if (period && !request->test_only && !request->train_only && (first < train || first + test > period))
        status_warn("--data %s: images of points repeat after %" PRIu64
                    " samples, so images of the test set are also in the training set, and its accuracy "
                    "shows only what was memorised; use --draw patches",
                    request->name, period);
}

/* Sets the number of classes, which the source has read or drawn. */
static enum status take_classes(const struct data_request *request, uint32_t classes, struct data *data)
{
    const uint64_t train = generated_size(request, DATA_TRAIN);
    if (request->classes && request->classes != classes)
        return status_number(STATUS_USAGE, "classes", (double)request->classes,
                             ": the file of --class has %" PRIu32 "; drop --classes", classes);
    if (!request->classes && !request->test_only && train < classes && classes > DIGITS)
        status_warn("--data %s: %" PRIu64 " training samples show only as many of its %" PRIu32
                    " classes; raise --train-size, or give --classes",
                    request->name, train, classes);
    data->classes = classes;
    data->fresh = request->fresh ? generated_stream_fresh(classes) : 0;
    return STATUS_OK;
}

static enum status open_synth(const struct data_request *request, struct data *data)
{
    struct data_source *source = data->source = calloc(1, sizeof *source);
    TRY(ALLOCATED(source, "out of memory"));
    const struct image_fit *fit = &request->fit;
    const bool fits = fit->res && fit->how != FIT_RANDOM_RESIZED_CROP;
    const struct synth_values values = {.encoding = SOURCE_NPY,
                                        .formula = request->formula,
                                        .preset = request->preset,
                                        .preset_file = request->preset_file,
                                        .class_file = request->class_file,
                                        .draw = request->draw,
                                        .min_lit = request->min_lit,
                                        .cache_dir = request->cache_dir,
                                        .cache_shared = request->mixed,
                                        .classes = data->classes,
                                        .res = (uint32_t)request->res,
                                        .out_res = fits ? fit->res : 0,
                                        .crop = fit->how == FIT_CROP,
                                        .channels = !fits                ? 0
                                                    : fit->channels == 1 ? 1
                                                                         : 3};
    if (fit->how != FIT_RANDOM_RESIZED_CROP)
        data->fit = (struct image_fit){0}; /* the source delivers images of this size */
    data->feed = request->feed < 0 ? DATA_LIVE : (enum data_feed)request->feed;
    enum status status =
        source_open("synth", &(struct source_request){.parameters = &values, .resources = request->resources},
                    &source->reader);
    data->gray = !source->reader.facts.colors;
    data->multi_hot = source->reader.facts.multi_hot;
    data->caches = source->reader.facts.caches;
    if (status == STATUS_OK)
        status = take_classes(request, source->reader.facts.classes, data);
    if (status == STATUS_OK)
        warn_of_period(request, source->reader.facts.period);
    if (status == STATUS_OK)
        status = fill_synth(request, &source->reader, data);
    if (data->feed != DATA_LIVE)
        close_source(data);
    return status_prefix(status, "--data %s", request->name);
}

enum status data_generator(const struct data *data, const struct generator_request *request,
                           struct generator **generator)
{
    const struct source_reader *reader = &data->source->reader;
    return reader->source->generate(reader->state, request, generator);
}

uint64_t data_generated_label(const void *state, uint64_t sample)
{
    const struct source_reader *reader = &((const struct data *)state)->source->reader;
    return reader->source->label(reader->state, sample);
}

/* ---- Folders ---- */

static uint64_t limit_of(const struct data_request *request, int part)
{
    uint64_t limit = part == DATA_TRAIN ? request->train_size : request->test_size;
    return limit ? limit : UINT64_MAX;
}

static double share_of(const struct data_request *request)
{
    return request->test_share > 0 ? request->test_share : DATA_TEST_SHARE;
}

enum status data_refuse_cache(const struct data_request *request)
{
    return !request->cache_dir ? STATUS_OK
                               : status_option(STATUS_USAGE, "cache-dir",
                                               " needs data at a URL%s or shards that are compressed; add "
                                               "that, or drop --cache-dir",
                                               request->mix ? ", images of FractalDB" : "");
}

/* Opens the data sets of a training set and a test set, or one data set for both. `paths` has NULL for a data
 * set that does not exist. With `records`, both sets are files of this format. The test set is opened first,
 * because it is usually smaller. A training set that is not read is opened too, to compare its class folders;
 * files of records have none. */
static enum status open_readers(const struct data_request *request, const char *const paths[DATA_PARTS],
                                const struct record_format *records, struct source_reader readers[DATA_PARTS],
                                struct data *data)
{
    for (int part = DATA_PARTS; part-- > 0;) {
        const char *image = records ? RECORD_EXTENSION : request->image;
        const struct dataset_values values = {
            .source = paths[part],
            .records = records,
            .test_set = part == DATA_TEST,
            .option = part == DATA_TEST && request->test_name ? "test-data" : "data",
            .cache_dir = request->cache_dir,
            .cache_bytes = request->cache_bytes,
            .image = image ? image : MEMBERS_IMAGE,
            .label = request->label ? request->label : MEMBERS_LABEL,
            .labels = part == DATA_TEST && request->test_labels ? request->test_labels : request->labels,
            .fit = -1,
            .encoding = -1};
        const struct source_request with = {
            .parameters = &values,
            .resources = request->resources,
            .skip = request->skip,
            .test_share = paths[DATA_TEST] || request->train_only ? 0 : share_of(request),
            .only_held = part == DATA_TRAIN && request->test_only,
            .allow_empty = part == DATA_TEST,
            .incomplete = request->mask,
            .streamed = request->feed == DATA_LOAD,
            .like = part == DATA_TRAIN ? readers[DATA_TEST].state : NULL};
        if (paths[part] && !(records && with.only_held) && part < end_part(request))
            TRY(source_open("dataset", &with, &readers[part]));
        data->caches |= readers[part].state && dataset_uses_cache(source_dataset_set(&readers[part]));
    }
    return data->caches || request->mixed ? STATUS_OK : data_refuse_cache(request);
}

/* Warns of the number of samples that are left out, because it changes the sets. */
static void tell_skipped(const struct data_request *request, const struct source_reader readers[DATA_PARTS],
                         struct data *data)
{
    bool uncounted = false;
    for (int part = first_part(request); part < end_part(request); part++)
        uncounted = uncounted || readers[part].facts.uncounted;
    data->skips = !uncounted;
    const uint32_t train = data->sets[DATA_TRAIN].skipped, test = data->sets[DATA_TEST].skipped;
    if (train + test > 0 || uncounted)
        status_warn("--data %s: skipped %" PRIu32 " broken sample%s of the training set and %" PRIu32
                    " of the test set%s",
                    request->name, train, train == 1 ? "" : "s", test,
                    uncounted ? ", and an unknown number more" : "");
}

/* ---- Samples that are read during training ---- */

/* Sets the labels of the training set, and what data_stream() needs, from the list of its samples. */
static enum status take_list(struct data_list *list, const struct source_reader *reader, struct data *data)
{
    struct data_source *source = data->source;
    struct data_set *set = &data->sets[DATA_TRAIN];
    const size_t bytes = (list->count + (size_t)1) * sizeof *list->labels;
    source->samples = malloc(bytes);
    source->labels = malloc(bytes);
    set->labels = malloc(bytes);
    TRY(ALLOCATED(source->samples && source->labels && set->labels, "out of memory for the labels"));
    for (uint32_t i = 0; i < list->count; i++)
        source->samples[i] =
            (uint32_t)(source_dataset_sample(reader, list->numbers[i]) - source_dataset_set(reader)->samples);
    memcpy(source->labels, list->labels, list->count * sizeof *list->labels);
    memcpy(set->labels, list->labels, list->count * sizeof *list->labels);
    set->multi_hot = list->multi_hot;
    list->multi_hot = NULL;
    for (uint32_t i = 0; i < list->count; i++)
        data_note_label(set, list->labels[i], list->numbers[i]);
    set->count = list->count;
    return STATUS_OK;
}

/* Lists the samples of the training set, and reads those that are measured. Moves the reader to
 * data->source. */
static enum status list_training_set(const struct data_request *request, struct source_reader *reader,
                                     struct data *data)
{
    struct data_list list = {0};
    const struct data_range range = {0, 0, data->split ? 0 : -1};
    data->shard_bytes = request->shard_bytes;
    TRY(set_stream_plan_shards(source_dataset_set(reader), request->lanes, request->shuffle,
                               request->resources.threads, &data->shard_bytes));
    data->source = calloc(1, sizeof *data->source);
    TRY(ALLOCATED(data->source, "out of memory"));
    enum status status = data_list_samples(reader, range, limit_of(request, DATA_TRAIN), data, &list);
    if (status == STATUS_OK)
        status = take_list(&list, reader, data);
    if (status == STATUS_OK) {
        const struct data_set set = data->sets[DATA_TRAIN];
        data->sets[DATA_TRAIN] = (struct data_set){0};
        status = data_measure(reader, &list, request->resources.threads, data);
        data->sets[DATA_TRAIN] = set;
    }
    if (status == STATUS_OK && data->resident_bytes == RESIDENT_ALL) {
        const struct resident_samples samples = {source_dataset_set(reader), data->source->samples,
                                                 list.count, false};
        (void)resident_fit(&samples, RESIDENT_ALL, &data->resident_bytes);
    }
    free(list.numbers);
    free(list.labels);
    free(list.multi_hot);
    return status;
}

/* Opens a stream of samples that are read. */
static enum status open_set_stream(const struct data *data, const struct data_stream_request *request,
                                   struct stream **stream)
{
    const struct data_source *source = data->source;
    struct set_stream_request with = {.dataset = source_dataset_set(&source->reader),
                                      .samples = source->samples,
                                      .labels = source->labels,
                                      .count = data->sets[DATA_TRAIN].count,
                                      .copies = request->copies,
                                      .fit = data->fit,
                                      .channels = data->shape.channels,
                                      .depth = data->shape.depth,
                                      .height = data->shape.height,
                                      .width = data->shape.width,
                                      .type = data->type,
                                      .lanes = data->lanes,
                                      .shuffle = data->shuffle,
                                      .plan = request->plan,
                                      .threads = request->threads,
                                      .ahead = data->ahead,
                                      .held = request->held,
                                      .shard_bytes = data->shard_bytes,
                                      .resident_bytes = data->resident_bytes,
                                      .on_error = data->masks ? SET_STREAM_MASK : SET_STREAM_FAIL,
                                      .device_share = request->device_share,
                                      .device_bytes = request->device_bytes,
                                      .allocate = request->allocate,
                                      .deallocate = request->deallocate};
    with.fit.seed = request->seed;
    with.fit.unscaled |= request->unscaled;
    return set_stream_open(&with, stream);
}

/* Returns the data whose samples data_read_hash() covers: of a mixture, those of the source that ends an
 * epoch. */
static const struct data *covered(const struct data *data)
{
    return data->mixture ? &data->mixture->sources[data->mixture->mix.named] : data;
}

bool data_stream_has_jpeg(const struct data *data)
{
    if (data->rows || data->given)
        return false;
    data = covered(data);
    const struct dataset *dataset = source_dataset_set(&data->source->reader);
    bool found = false;
    for (uint32_t i = 0; !found && i < data->sets[DATA_TRAIN].count; i++)
        found = set_stream_is_jpeg(dataset, &dataset->samples[data->source->samples[i]]);
    return found;
}

/* Opens a stream of samples that are generated, or that are in memory. They are prepared by the threads that
 * then train, so a further thread would only compete with them. Rows of embeddings that are read are prepared
 * in advance by a further thread, which mostly waits for the disk. */
static enum status open_generated_stream(const struct data *data, const struct data_stream_request *request,
                                         struct stream **stream)
{
    const struct data_set *set = &data->sets[DATA_TRAIN];
    struct generated_stream_request with = {
        .fresh = data->fresh,
        .count = set->count,
        .labels = set->labels,
        .sample_bytes = data_stored_bytes(data, DATA_TRAIN),
        .mask_bytes = data->multi_hot && data->feed == DATA_LIVE ? data->classes : 0,
        .type = data->type,
        .plan = request->plan,
        .ahead = data->ahead,
        .held = request->held,
        .allocate = request->allocate,
        .deallocate = request->deallocate};
    *stream = NULL;
    if (data->feed == DATA_LOAD) {
        TRY(rows_generator(data, request->threads, &with.generator));
        return generated_stream_open(&with, stream);
    }
    with.ahead = 0;
    if (data->feed != DATA_LIVE) {
        with.values = set->values;
        with.in_memory = data_held(data, DATA_TRAIN);
        return generated_stream_open(&with, stream);
    }
    const struct generator_request from = {.resources = {.threads = request->threads},
                                           .batch = request->plan.capacity};
    TRY(data_generator(data, &from, &with.generator));
    return generated_stream_open(&with, stream);
}

enum status data_stream(const struct data *data, const struct data_stream_request *request,
                        struct stream **stream)
{
    const bool reads = data->feed == DATA_LOAD && !data->rows;
    if (data->given)
        return given_stream(data, request, stream);
    if (data->mixture)
        return data_mixture_stream(data, request, stream);
    return (reads ? open_set_stream : open_generated_stream)(data, request, stream);
}

bool data_read_covers(const struct data *data, uint32_t epoch, uint32_t number)
{
    if (data->given)
        return false;
    return !data->mixture ||
           mixture_at(&data->mixture->plan, epoch, number).source == data->mixture->mix.named;
}

uint64_t data_epoch_hash(const struct data *data)
{
    const struct data *of = covered(data);
    uint64_t sum = 0;
    for (uint32_t n = 0; n < of->sets[DATA_TRAIN].count; n++)
        sum += data_read_hash(of, 0, n);
    return sum;
}

uint64_t data_read_hash(const struct data *data, uint32_t epoch, uint32_t number)
{
    if (data->mixture) {
        struct mixture_pass pass = {0};
        const struct mixture_pick pick = mixture_at(&data->mixture->plan, epoch, number);
        if (pick.source != data->mixture->mix.named)
            return 0;
        return data_read_hash(covered(data), epoch,
                              mixture_number(&data->mixture->plan, epoch, &pick, &pass));
    }
    if (data->rows)
        return generated_stream_hash(number % data->sets[DATA_TRAIN].count, number);
    const uint32_t sample = data->source->samples[number % data->sets[DATA_TRAIN].count];
    return set_stream_hash(&source_dataset_set(&data->source->reader)->samples[sample], number);
}

/* Returns whether the training set is all samples of a data set, in their order. */
static bool is_whole(const struct data *data, const struct dataset *dataset)
{
    bool whole = data->sets[DATA_TRAIN].count == dataset->sample_count;
    for (uint32_t i = 0; whole && i < dataset->sample_count; i++)
        whole = data->source->samples[i] == i;
    return whole;
}

enum status data_stream_state(const struct data *data, struct stream_state *state)
{
    const uint32_t count = data->sets[DATA_TRAIN].count;
    if (data->mixture)
        return status_set(STATUS_USAGE,
                          "a state of a stream is about one data set, and --feed mixed mixes several; "
                          "continue a mixture with --checkpoint and --resume");
    if (!(data->rows ? rows_are_whole(data) : is_whole(data, source_dataset_set(&data->source->reader))))
        return status_set(STATUS_USAGE,
                          "states of streams are about all samples of --data, but %" PRIu32 " of them are "
                          "trained on; name the test set with --test-data, and drop --train-size",
                          count);
    *state = (struct stream_state){.samples = count, .shuffle_buffer = data->shuffle};
    if (data->rows) {
        state->shuffle_buffer = data->shuffle ? count : 0;
        return rows_state_hash(data, &state->data);
    }
    state->lanes = data->shuffle ? data->lanes : 0;
    state->data = stream_state_hash(source_dataset_set(&data->source->reader));
    return STATUS_OK;
}

uint32_t data_take_labels(const struct data *data, const struct stream_batch *batch, uint32_t count)
{
    const uint32_t samples = data->sets[DATA_TRAIN].count;
    uint32_t masked = 0;
    for (uint32_t j = 0; batch->masks && data->multi_hot && j < batch->samples.count; j++) {
        uint32_t *row = data_multi_hot(data, &data->sets[DATA_TRAIN], batch->numbers[j] % samples);
        for (uint32_t w = 0; w < multi_hot_words(data->classes); w++)
            row[w] = multi_hot_pack(batch->masks + (size_t)j * data->classes, data->classes, w);
    }
    for (uint32_t j = 0; data->given && data->multi_hot && j < batch->samples.count; j++) {
        const bool masked_one = batch->masks[(size_t)j * data->classes] == STREAM_IGNORED;
        data->sets[DATA_TRAIN].labels[batch->numbers[j]] = masked_one ? DATA_MASKED : batch->numbers[j];
        masked += masked_one;
    }
    const bool labelled = data->mixture || data->given;
    for (uint32_t j = 0; labelled && batch->labels && !data->multi_hot && j < batch->samples.count; j++) {
        data->sets[DATA_TRAIN].labels[batch->numbers[j]] =
            batch->labels[j] == STREAM_MASKED ? DATA_MASKED : (uint32_t)batch->labels[j];
        masked += j < count && batch->labels[j] == STREAM_MASKED;
    }
    if (labelled || !data->masks)
        return masked;
    /* Two copies of a sample have one label: if one copy is masked, both are. */
    for (uint32_t j = 0; j < batch->samples.count; j++) {
        const uint32_t sample = batch->numbers[j] % samples;
        data->sets[DATA_TRAIN].labels[sample] = data->source->labels[sample];
    }
    for (uint32_t j = 0; batch->masked > 0 && j < batch->samples.count; j++)
        if (batch->labels[j] == STREAM_MASKED) {
            data->sets[DATA_TRAIN].labels[batch->numbers[j] % samples] = DATA_MASKED;
            masked += j < count;
        }
    return masked;
}

/* ---- Data sets ---- */

/* Reads a part of the data, or with DATA_LOAD lists its training samples. The reader of a data set that is
 * divided reads both parts. */
static enum status read_part(const struct data_request *request, struct source_reader readers[DATA_PARTS],
                             enum data_part part, struct data *data)
{
    struct source_reader *reader = &readers[data->split ? DATA_TRAIN : part];
    if (part == DATA_TRAIN && data->feed == DATA_LOAD)
        return list_training_set(request, reader, data);
    struct source_reader tolerant = *reader;
    tolerant.skip |= data->masks;
    return data_fill(&tolerant, (struct data_range){0, 0, data->split ? part == DATA_TEST : -1},
                     limit_of(request, part), request->resources.threads, data, part);
}

/* Returns whether a set has images without a header. */
static bool has_raw(const struct source_reader readers[DATA_PARTS])
{
    bool raw = false;
    for (int part = 0; part < DATA_PARTS; part++)
        raw |= readers[part].state && source_dataset_set(&readers[part])->raw.channels;
    return raw;
}

/* Sets the shape of the records. Both sets have it, because one network sees both. */
static enum status take_raw_shape(const struct source_reader readers[DATA_PARTS], const char *format,
                                  struct data *data)
{
    const bool tests = readers[DATA_TEST].state, trains = readers[DATA_TRAIN].state;
    const struct image *test = &source_dataset_set(&readers[tests ? DATA_TEST : DATA_TRAIN])->raw;
    const struct image *train = trains ? &source_dataset_set(&readers[DATA_TRAIN])->raw : test;
    data->fit.raw = *test;
    if (train->channels != test->channels || train->height != test->height || train->width != test->width)
        return train->channels && test->channels
                   ? status_set(STATUS_USAGE,
                                "the images of %s are %u x %u pixels in the training set, but %u x %u in the "
                                "test set",
                                format, train->height, train->width, test->height, test->width)
                   : status_set(STATUS_USAGE,
                                "%s: one of the training set and the test set has arrays, and the other has "
                                "image files; write both in one way",
                                format);
    return train->depth == test->depth && train->type == test->type && train->interleaved == test->interleaved
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "%s: the arrays of the training set and the test set have other types or axes; "
                            "write both in one way",
                            format);
}

/* Rejects --train-size or --test-size if a part has fewer samples. */
static enum status check_size(const struct data_request *request, int part, uint64_t count, bool split)
{
    const uint64_t wanted = part == DATA_TRAIN ? request->train_size : request->test_size;
    if (count >= wanted)
        return STATUS_OK;
    return split && part == DATA_TEST
               ? status_set(STATUS_USAGE,
                            "only %" PRIu64 " samples of the set are held out for testing; lower --test-size "
                            "%" PRIu64 ", raise --test-share, or name a test set with --test-data",
                            count, wanted)
               : status_set(STATUS_USAGE,
                            "%s %" PRIu64 ": there are only %" PRIu64 " samples; give at most this number",
                            data_size_options[part], wanted, count);
}

/* Takes the number of classes of multi-hot labels, which both sets must have. */
static enum status take_multi_hot(const struct data_request *request,
                                  const struct source_reader readers[DATA_PARTS], struct data *data)
{
    const bool tests = readers[DATA_TEST].state && readers[DATA_TRAIN].state;
    const struct source_facts *train = &readers[readers[DATA_TRAIN].state ? DATA_TRAIN : DATA_TEST].facts;
    const struct source_facts *test = &readers[tests ? DATA_TEST : DATA_TRAIN].facts;
    uint32_t classes = train->classes ? train->classes : test->classes; /* a set without samples has none */
    data->multi_hot = train->multi_hot;
    if (tests && train->multi_hot != test->multi_hot)
        return status_set(STATUS_USAGE,
                          "the samples of the %s set have multi-hot labels ('" MULTI_HOT_MEMBER
                          "'), but those of the other set have one class each; use sets of one kind",
                          train->multi_hot ? "training" : "test");
    if (!data->multi_hot)
        return STATUS_OK;
    if (tests && test->classes && test->classes != classes)
        return status_set(STATUS_USAGE,
                          "the multi-hot labels of the training set have %" PRIu32 " classes, but "
                          "those of the test set %" PRIu32 "; use sets of the same classes",
                          classes, test->classes);
    if (request->classes && request->classes != classes)
        return status_number(STATUS_USAGE, "classes", (double)request->classes,
                             ": the multi-hot labels have %" PRIu32 " classes; drop --classes", classes);
    data->classes = classes;
    return STATUS_OK;
}

/* Checks the sizes of both parts before samples are read. */
static enum status check_sizes(const struct data_request *request,
                               const struct source_reader readers[DATA_PARTS], bool split)
{
    for (int part = first_part(request); part < end_part(request); part++) {
        const struct source_facts *facts = &readers[split ? DATA_TRAIN : part].facts;
        uint64_t count = split ? 0 : facts->samples;
        for (uint64_t i = 0; split && i < facts->samples; i++)
            count += (facts->held && facts->held[i]) == (part == DATA_TEST);
        TRY(check_size(request, part, count, split));
    }
    return STATUS_OK;
}

enum status data_count_classes(struct data *data)
{
    const struct data_set *set = data_largest(data);
    if (data->classes == 0)
        data->classes = set->largest + 1;
    if (set->largest < data->classes)
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      "its label is %" PRIu32 ", the largest of the data, but there are only %" PRIu32
                      " classes; give --classes %" PRIu32 " or more",
                      set->largest, data->classes, set->largest + 1);
}

/* Counts the classes. A failure names the sample. */
static enum status count_classes(const struct source_reader readers[DATA_PARTS], struct data *data)
{
    const struct data_set *set = data_largest(data);
    const struct source_reader *reader = &readers[data->split ? DATA_TRAIN : set - data->sets];
    const enum status status = data_count_classes(data);
    return status == STATUS_OK ? STATUS_OK
                               : reader->source->locate(reader->state, set->largest_number, status);
}

/* Reads both sets from two data sets, or divides one. `paths` and `records` are as for open_readers(). */
static enum status read_datasets(const struct data_request *request, const char *const paths[DATA_PARTS],
                                 const struct record_format *records, struct data *data)
{
    struct source_reader readers[DATA_PARTS] = {{0}};
    if (request->test_share > 0 && paths[DATA_TEST])
        return status_set(STATUS_USAGE, "--test-share: %s %s %s; drop --test-share",
                          request->test_name ? "--test-data" : "--data",
                          request->test_name ? request->test_name : request->name,
                          request->test_name ? "is the test set, so nothing is held out"
                                             : "has a test set of its own, so nothing is held out");
    enum status status = open_readers(request, paths, records, readers, data);
    if (status == STATUS_OK && (records || has_raw(readers)))
        status = take_raw_shape(readers, records ? records->name : paths[DATA_TRAIN], data);
    data->split = !paths[DATA_TEST] && !request->train_only;
    if (status == STATUS_OK)
        status = take_multi_hot(request, readers, data);
    if (status == STATUS_OK)
        status = check_sizes(request, readers, data->split);
    for (int part = first_part(request); status == STATUS_OK && part < end_part(request); part++)
        status = read_part(request, readers, (enum data_part)part, data);
    if (status == STATUS_OK)
        status = count_classes(readers, data);
    if (status == STATUS_OK && !records)
        tell_skipped(request, readers, data);
    if (status == STATUS_OK && data->source) { /* the streams read from it */
        data->source->reader = readers[DATA_TRAIN];
        readers[DATA_TRAIN] = (struct source_reader){0};
    }
    for (int part = 0; part < DATA_PARTS; part++)
        source_close(&readers[part]);
    return status;
}

/* Reads both sets from files of records. */
static enum status open_records(const struct data_request *request, const struct record_format *records,
                                struct data *data)
{
    const char *const paths[DATA_PARTS] = {request->name, request->name};
    if (request->skip)
        return status_set(STATUS_USAGE,
                          "--data %s: --on-error skip is for single files and tar shards, but the folder has "
                          "files of %s; drop --on-error",
                          request->name, records->name);
    if (request->image || request->label)
        return status_set(STATUS_USAGE,
                          "--image and --label are for class folders and tar shards, but --data %s has files "
                          "of %s; drop them",
                          request->name, records->name);
    if (request->labels)
        return status_option(STATUS_USAGE, "labels",
                             " is for images in folders and shards, but --data %s has files of %s; drop it",
                             request->name, records->name);
    TRY(members_parse(RECORD_EXTENSION, NULL, NULL, &data->members));
    return read_datasets(request, paths, records, data);
}

/* Finds the folder of a part of a data set. Its name may also begin with a capital or have only capitals. */
static bool part_there(const char *folder, const char *const spellings[3], char path[PATH_MAX])
{
    bool there = false;
    for (size_t i = 0; i < 3 && !there; i++)
        there = file_there(folder, spellings[i], path);
    return there;
}

/* Returns whether a folder has images, but no labels, shards or index: it is a class, or unlabelled. */
static bool has_only_images(const char *path)
{
    static const char *const others[] = {".index", ".cls", ".json", ".txt", ".tar"};
    bool image = false, other = false;
    DIR *list = opendir(path);
    for (const struct dirent *entry; list && !other && (entry = readdir(list));) {
        const char *dot = strrchr(entry->d_name, '.');
        image |= dot && image_format(dot + 1, NULL, 0) != IMAGE_NONE;
        for (size_t i = 0; dot && i < COUNT_OF(others); i++)
            other |= strcasecmp(dot, others[i]) == 0;
    }
    if (list)
        closedir(list);
    return image && !other;
}

/* Returns whether the folder `part`, such as "train", is a class and not a part of the data set: it has only
 * images, and so has another folder beside it. */
static bool is_class(const char *folder, const char *part)
{
    char path[PATH_MAX];
    bool found = false;
    DIR *list = has_only_images(part) ? opendir(folder) : NULL;
    for (const struct dirent *entry; list && !found && (entry = readdir(list));)
        found = *entry->d_name != '.' && file_there(folder, entry->d_name, path) && strcmp(path, part) != 0 &&
                has_only_images(path);
    if (list)
        closedir(list);
    return found;
}

static __attribute__((noinline)) enum status open_datasets(const struct data_request *request,
                                                           struct data *data)
{
    static const char *const trains[] = {"train", "Train", "TRAIN"},
                             *const tested[] = {"test", "Test", "TEST"},
                             *const vals[] = {"val", "Val", "VAL"};
    char train[PATH_MAX], test[PATH_MAX];
    bool learn = part_there(request->name, trains, train);
    bool tests = part_there(request->name, tested, test) || (learn && part_there(request->name, vals, test));
    if (learn != tests && is_class(request->name, learn ? train : test))
        learn = tests = false;
    const char *const whole = request->url ? request->url : request->name;
    if (request->test_name && (learn || tests))
        return status_set(STATUS_USAGE,
                          "--data %s: with --test-data, all of it is trained on, but it has the folder %s; "
                          "drop --test-data, or name the folder of the training set",
                          request->name, learn ? train : test);
    const char *found = learn != tests ? strrchr(learn ? train : test, '/') + 1 : NULL;
    if (learn != tests)
        return status_set(
            STATUS_USAGE,
            "--data %s: the folder contains a data set '%s' but no '%s'; add the missing one, or name the "
            "folder %s, of which a part is then held out for testing (--test-share); if '%s' is a class, "
            "read a copy by --prepare --from dataset, which takes all folders as classes",
            request->name, found, learn ? "test' or 'val" : "train", learn ? train : test, found);
    const char *const two[DATA_PARTS] = {train, test};
    const char *const one[DATA_PARTS] = {whole, request->test_url ? request->test_url : request->test_name};
    return read_datasets(request, learn ? two : one, NULL, data);
}

static const char *const generated[] = {"digits", "clips", "synth", NULL};

bool data_is_generated(const char *name)
{
    return is_one_of(name, generated);
}

static enum status unknown(const char *name)
{
    const char *nearest = nearest_word(name, generated, COUNT_OF(generated) - 1);
    bool mnist = strcmp(name, "mnist") == 0;
    return status_set(STATUS_USAGE,
                      "--data %s: no such folder; digits, clips and synth need no folder%s%s%s%s", name,
                      nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "",
                      mnist ? "; scripts/setup/fetch_mnist.sh mnist downloads it" : "");
}

/* Checks --classes for the generated sets `digits` and `clips`, which have a fixed number of classes.
 * --classes may be larger than this number, but not smaller. */
static enum status check_classes(const struct data *data, const char *name, uint32_t classes)
{
    return data->classes >= classes
               ? STATUS_OK
               : status_number(STATUS_USAGE, "classes", (double)data->classes,
                               ": %s has %" PRIu32 " classes; give at least as many, or drop --classes", name,
                               classes);
}

/* Checks --test-data, for data that have a test set of their own: files of records, or if `records` is NULL,
 * generated samples. */
static enum status check_no_test(const struct data_request *request, const struct record_format *records)
{
    return !request->test_name
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--test-data is for class folders and tar shards, but --data %s has %s%s, with a "
                            "test set of their own; drop --test-data",
                            request->name, records ? "files of " : "generated samples",
                            records ? records->name : "");
}

/* Opens both sets from rows of embeddings. */
static enum status open_rows(const struct data_request *request, struct data *data)
{
    if (request->resident_bytes || request->resident_device_bytes)
        return status_option(STATUS_USAGE,
                             request->resident_bytes ? "resident-bytes" : "resident-device-bytes",
                             " has no effect on rows of embeddings; drop it, or use --feed stored");
    TRY(data_rows_open(request, data));
    for (int part = first_part(request); part < end_part(request); part++)
        TRY(check_size(request, part, data->sets[part].count, data->split));
    return STATUS_OK;
}

/* Opens both sets. Chooses their source by name, or by the contents of the folder. */
static enum status open_sets(const struct data_request *request, struct data *data)
{
    const struct record_format *records = record_format_find(request->name);
    if (records && request->coarse && records->coarse)
        records = records->coarse;
    bool digit = strcmp(request->name, "digits") == 0, synth = strcmp(request->name, "synth") == 0;
    bool clip = strcmp(request->name, "clips") == 0;
    if (request->feed == DATA_LIVE && !synth)
        return status_value(STATUS_USAGE, "feed", "live", " works only with --data synth; use --feed stored");
    if ((digit || clip || synth) && request->feed == DATA_LOAD)
        return status_set(STATUS_USAGE,
                          "--feed load reads files, but --data %s has generated samples; use --feed %s",
                          request->name, synth ? "live" : "stored");
    if (rows_named(request) || digit || clip)
        TRY(data_refuse_cache(request));
    if (rows_named(request))
        return open_rows(request, data);
    if (digit || clip || synth || records)
        TRY(check_no_test(request, records));
    if (data->classes == 0)
        data->classes = clip      ? CLIPS
                        : digit   ? DIGITS
                        : records ? records->classes
                                  : 0; /* synth: fill_synth() */
    if (digit || clip)
        TRY(check_classes(data, request->name, clip ? CLIPS : DIGITS));
    if (digit || clip)
        return generate(request, request->name, data);
    if (synth)
        return open_synth(request, data);
    if (!remote_is(request->name) && access(request->name, F_OK) != 0)
        return unknown(request->name);
    return records ? open_records(request, records, data) : open_datasets(request, data);
}

/* ---- Checks and hashes ---- */

static enum status check_sets(const struct data_request *request, struct data *data)
{
    for (int part = first_part(request); part < end_part(request); part++) {
        const struct data_set *set = &data->sets[part];
        if (set->count == 0 && set->skipped)
            return status_set(STATUS_FAILED,
                              "--data %s: all %" PRIu32 " samples to %s are broken; see the warnings above",
                              request->name, set->skipped, part == DATA_TRAIN ? "train on" : "test with");
        if (set->count == 0)
            return status_set(STATUS_FAILED,
                              "--data %s: there are no samples to %s; add samples, or use other data",
                              request->name, part == DATA_TRAIN ? "train on" : "test with");
    }
    return STATUS_OK;
}

/* Returns a hash of the samples of the training set that a stream reads, without reading them. */
static uint64_t hash_listed(const struct data *data)
{
    const struct dataset *dataset = source_dataset_set(&data->source->reader);
    uint64_t hash = 0;
    for (uint32_t i = 0; i < data->sets[DATA_TRAIN].count; i++) {
        const struct dataset_sample *sample = &dataset->samples[data->source->samples[i]];
        const uint64_t words[] = {sample->key_hash, sample->edges, sample->bytes};
        hash = checksum_seeded(words, sizeof words, hash);
    }
    return hash;
}

/* Sets the hashes of both sets: of their samples, then of their labels. All are 0 without xxHash: then there
 * are no checkpoints, and ranks do not compare their data. */
static void identify(struct data *data)
{
    for (int part = 0; part < DATA_PARTS; part++) {
        const struct data_set *set = &data->sets[part];
        const bool listed = part == DATA_TRAIN && data->feed == DATA_LOAD && (data->source || data->rows);
        uint64_t hash = !listed      ? checksum_seeded(set->values,
                                                       data_measured(data, (enum data_part)part) *
                                                           data_stored_bytes(data, (enum data_part)part),
                                                       0)
                        : data->rows ? data_rows_hash(data)
                                     : hash_listed(data);
        hash = checksum_seeded(set->labels, set->count * sizeof *set->labels, hash);
        if (data->multi_hot)
            hash = checksum_seeded(set->multi_hot,
                                   set->count * (data_label_bytes(data) - sizeof *set->labels), hash);
        data->hashes[part] = hash;
    }
}

/* After request->describe: sets the numbers of samples of both generated sets, and checks that they fit into
 * memory. */
static enum status claim_all(const struct data_request *request, struct data *data)
{
    data->held = data->measured = 1;
    for (int part = 0; part < DATA_PARTS; part++) {
        const uint64_t count = generated_size(request, part);
        const bool stored = part == DATA_TEST || data->feed == DATA_STORED;
        TRY(data_check_memory(count,
                              stored ? data_stored_bytes(data, (enum data_part)part) : data_label_bytes(data),
                              data_size_options[part]));
        data->sets[part].count = (uint32_t)count;
    }
    return STATUS_OK;
}

enum status data_open(const struct data_request *request, struct data *data)
{
    double begin_s = timer_now_s();
    *data = (struct data){.feed = request->feed == DATA_CONSTANT || request->feed == DATA_LOAD
                                      ? (enum data_feed)request->feed
                                      : DATA_STORED,
                          .fit = request->fit,
                          .centre = request->centre || request->feed == DATA_LOAD,
                          .masks = request->mask,
                          .keeps_keys = request->keys,
                          .lanes = request->lanes,
                          .shuffle = request->shuffle,
                          .ahead = request->ahead,
                          .shard_bytes = request->shard_bytes,
                          .resident_bytes = request->resident_bytes,
                          .resident_device_bytes = request->resident_device_bytes};
    TRY(members_parse(request->image, request->label, NULL, &data->members));
    if (request->given)
        return given_open(request->given, (uint32_t)request->batch, data);
    data->classes = (uint32_t)request->classes;
    if (request->feed == DATA_MIXED) {
        TRY(data_mixture_open(request, data));
        data->opening_s = timer_now_s() - begin_s;
        return STATUS_OK;
    }
    TRY(open_sets(request, data));
    const bool described = request->describe && data_is_generated(request->name);
    if (!described)
        TRY(check_sets(request, data));
    identify(data);
    if (described)
        TRY(claim_all(request, data));
    data->opening_s = timer_now_s() - begin_s;
    return STATUS_OK;
}

/* ---- Warnings ---- */

#define FEW 100 /* with fewer test samples, one sample changes the accuracy by more than 1 % */

/* Adds `by` to `seen` for each class of a sample. Returns how many of these classes were not seen before. */
static uint32_t see_classes(const struct data *data, const struct data_set *set, uint32_t i, uint32_t by,
                            uint32_t *seen)
{
    const uint32_t label = set->labels[i];
    const bool several = set->multi_hot && label != DATA_MASKED;
    uint32_t unseen = 0;
    for (uint32_t k = several ? 0 : label; k < data->classes; k = several ? k + 1 : data->classes)
        if (target_has(set->multi_hot, data->classes, label, k)) {
            unseen += seen[k] == 0;
            seen[k] += by;
        }
    return unseen;
}

void data_warn_of_classes(const struct data *data, const char *name, bool whole)
{
    if (data_is_generated(name))
        return;
    const struct data_set *train = &data->sets[DATA_TRAIN], *test = &data->sets[DATA_TEST];
    uint32_t *seen = calloc(data->classes, sizeof *seen);
    uint32_t missing = 0, unseen = 0, first = 0, single = 0;
    for (uint32_t i = 0; seen && i < train->count; i++)
        see_classes(data, train, i, 1, seen);
    for (uint32_t i = 0; seen && i < test->count; i++) /* then 1 means: one training and no test sample */
        missing += see_classes(data, test, i, 2, seen);
    for (uint32_t c = data->classes; whole && seen && c-- > 0;) {
        single += seen[c] == 1;
        if (seen[c] == 0) {
            unseen++;
            first = c;
        }
    }
    free(seen);
    if (single)
        status_say("--data %s: %" PRIu32 " class%s a single sample, which is trained on and never tested",
                   name, single, single == 1 ? " has" : "es have");
    if (unseen)
        status_warn("--data %s: the largest label is %" PRIu32 ", so there are %" PRIu32 " classes; %" PRIu32
                    " of them ha%s no sample (the first: class %" PRIu32
                    "); labels begin at 0, and class folders without a usable sample count as classes",
                    name, data->classes - 1, data->classes, unseen, unseen == 1 ? "s" : "ve", first);
    if (data->classes == 1)
        status_warn("--data %s: all samples have class 0, so there is nothing to learn; %s", name,
                    data->rows ? "compare --labels with the rows"
                               : "class folders must be directly in the folder of the data set");
    else if (missing)
        status_warn("--data %s: the test set has %" PRIu32 " class%s without a training sample; raise "
                    "--train-size, or use other data",
                    name, missing, missing == 1 ? "" : "es");
}

void data_warn_of_few(const struct data *data, const char *option, const char *name)
{
    static bool told;
    const uint32_t count = data->sets[DATA_TEST].count;
    if (told || count >= FEW || data_is_generated(name))
        return;
    told = true;
    status_warn_value(option, name,
                      ": the test set has only %" PRIu32
                      " sample%s, so a single sample changes the accuracy by %.3g %%; %s",
                      count, count == 1 ? "" : "s", 100.0 / count,
                      data->split
                          ? "add samples, raise --test-share, or name a larger test set with --test-data"
                          : "add test samples");
}
