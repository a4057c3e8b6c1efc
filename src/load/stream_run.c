#include "load/stream_run.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "core/parallel.h"
#include "core/timer.h"
#include "data/remote.h"

/* ---- The reference ---- */

/* Allocates the memory of a thread, unless it exists. */
static enum status reference_open(const struct stream_run *run, struct stream_reference *reference)
{
    if (reference->values)
        return STATUS_OK;
    reference->plain = (struct plain){.dataset = run->load->dataset, .fd = -1};
    reference->values = malloc((run->changes ? 4 : 1) * run->sample_bytes + run->mask_bytes + 1);
    TRY(ALLOCATED(reference->values, "out of memory for a sample"));
    reference->mask = reference->values + run->sample_bytes;
    reference->changed = reference->mask + run->mask_bytes;
    return STATUS_OK;
}

static void reference_close(struct stream_reference *reference)
{
    if (reference->plain.dataset)
        plain_close(&reference->plain);
    image_scratch_close(&reference->scratch);
    free(reference->bytes);
    free(reference->values);
}

/* Reads a member into reference->bytes. STATUS_FAILED if this is impossible. */
static enum status reference_read(struct stream_reference *reference, const struct dataset_sample *sample,
                                  const struct dataset_member *member)
{
    const struct dataset *dataset = reference->plain.dataset;
    if (member->size == UINT64_MAX) /* the file could not be opened with the data set */
        return dataset_at(dataset, sample, member, status_set(STATUS_FAILED, "its size is unknown"));
    if (member->size >= reference->room) {
        free(reference->bytes);
        reference->bytes = malloc(member->size + 1);
        reference->room = reference->bytes ? member->size + 1 : 0;
        TRY(ALLOCATED(reference->bytes, "out of memory for a sample of %llu bytes",
                      (unsigned long long)member->size));
    }
    return plain_member(&reference->plain, sample, member, reference->bytes);
}

/* Reads and decodes the image of a sample. STATUS_FAILED if the sample is broken. */
static enum status reference_image(struct stream_reference *reference, const struct image_fit *fit,
                                   uint32_t epoch, uint32_t number, struct image *image)
{
    const struct dataset *dataset = reference->plain.dataset;
    const struct dataset_sample *sample = &dataset->samples[number];
    const struct dataset_member *member = &dataset->members[sample->member + sample->image];
    bool is_image;
    if (sample->image == sample->members)
        return status_set(STATUS_FAILED, "sample '%s' has no image", sample->key);
    TRY(reference_read(reference, sample, member));
    TRY(image_fit(fit, members_format(member->extension), reference->bytes, member->size, epoch, number,
                  &reference->scratch, image, &is_image));
    if (!is_image)
        return dataset_at(dataset, sample, member,
                          status_set(STATUS_FAILED, "its %s is neither an image nor an array of an image",
                                     member->extension));
    return image_check_finite(image);
}

/* Reads and decodes the mask of the sample whose image was decoded last, with `fit`. STATUS_FAILED if the
 * mask is broken. */
static enum status reference_mask(struct stream_reference *reference, const struct image_fit *fit,
                                  uint32_t epoch, uint32_t number)
{
    const struct dataset *dataset = reference->plain.dataset;
    const struct dataset_sample *sample = &dataset->samples[number];
    const struct dataset_member *member = &dataset->members[sample->member + sample->label];
    const struct image_view of = {reference->scratch.width, reference->scratch.height, epoch, number, false};
    if (sample->label == sample->members)
        return dataset_lacks(dataset, sample, &dataset->choice.label, "label");
    TRY(reference_read(reference, sample, member));
    if (dataset->multi_hot) {
        uint32_t classes = dataset->multi_hot_classes;
        const uint8_t *label;
        TRY(members_multi_hot(reference->bytes, member->size, &classes, &label));
        memcpy(reference->mask, label, classes);
        return STATUS_OK;
    }
    return image_fit_mask(fit, &of, reference->bytes, member->size, &reference->scratch, reference->mask);
}

static bool all_are(uint8_t value, const uint8_t *bytes, size_t count)
{
    return count == 0 || (bytes[0] == value && memcmp(bytes, bytes + 1, count - 1) == 0);
}

/* A batch in host memory. */
struct shown {
    const uint8_t *values, *masks;
    const uint8_t *decoded; /* before changes on a device; NULL: not known */
};

static enum status show_batch(struct stream_run *run, struct shown *shown)
{
    const size_t values = run->request.plan.capacity * run->sample_bytes;
    const size_t masks = run->request.plan.capacity * run->mask_bytes;
    *shown = (struct shown){run->batch.samples.values, run->batch.masks, NULL};
    if (!run->type->copy)
        return STATUS_OK;
    if (!run->copied)
        run->copied = malloc(values + masks + (run->changes ? values : 0));
    TRY(ALLOCATED(run->copied, "out of memory to verify a batch"));
    uint8_t *decoded = run->changes ? run->copied + values + masks : NULL;
    *shown = (struct shown){run->copied, run->copied + values, decoded};
    return run->type->copy(run, run->copied, run->copied + values, decoded);
}

/* Returns whether the values of a sample are those that follow from its decoded bytes. `changed` is memory of
 * three samples. */
static bool changed_alike(const struct stream_run *run, uint32_t number, uint8_t *changed,
                          const uint8_t *decoded, const uint8_t *values)
{
    const struct set_stream_request *request = &run->request;
    const struct image image = {.channels = request->channels,
                                .depth = request->depth,
                                .height = request->height,
                                .width = request->width,
                                .type = DTYPE_U8,
                                .pixels = decoded};
    uint8_t *expected = changed + 2 * run->sample_bytes;
    image_output_store(&run->output, &image, (uint32_t)run->batch.epoch, number, changed, expected);
    return memcmp(values, expected, run->sample_bytes) == 0;
}

/* Compares the values of a sample. If the device may have decoded it, its bytes may differ a little.
 * `decoded` has the bytes before they were changed, or is NULL. */
static bool same_values(const struct stream_run *run, const struct stream_reference *reference,
                        uint32_t number, const uint8_t *decoded, const uint8_t *values)
{
    const uint8_t *expected = reference->values;
    if (run->changes && !changed_alike(run, number, reference->changed, decoded ? decoded : expected, values))
        return false;
    if (run->changes && !decoded)
        return true;
    values = decoded ? decoded : values;
    if (memcmp(values, expected, run->sample_bytes) == 0)
        return true;
    const struct pixels pixels = {.bytes = expected, .channels = 1, .height = 1, .width = run->sample_bytes};
    const struct pixel_form form = {.values = &run->bytes};
    return set_stream_on_device(number, run->request.device_share) &&
           pixels_match(&pixels, &form, run->tolerance, values);
}

/* Sets `*right` to whether a delivered sample has the values and the label or mask of the reference; or, if
 * the sample is broken, whether it was masked. */
static enum status compare_sample(const struct stream_run *run, struct stream_reference *reference,
                                  const struct shown *shown, uint64_t at, bool *right)
{
    const struct stream_batch *batch = &run->batch;
    const struct set_stream_request *request = &run->request;
    const uint32_t number = batch->numbers[at];
    const int32_t label = batch->labels[at];
    int32_t expected = 0;
    struct image image;
    const uint8_t *values = shown->values + at * run->sample_bytes;
    const uint8_t *decoded = shown->decoded ? shown->decoded + at * run->sample_bytes : NULL;
    const uint8_t *mask = run->mask_bytes ? shown->masks + at * run->mask_bytes : NULL;
    TRY(reference_open(run, reference));
    enum status status = reference_image(reference, &request->fit, (uint32_t)batch->epoch, number, &image);
    const bool fits = status == STATUS_OK && image.type == request->type &&
                      image_values(&image) * dtype_bytes(image.type) == run->sample_bytes;
    if (fits) /* before the mask is decoded: both use the same memory */
        image_store(&image, reference->values);
    if (status == STATUS_OK && mask)
        status = reference_mask(reference, &request->fit, (uint32_t)batch->epoch, number);
    else if (status == STATUS_OK && !request->labels)
        status = plain_label(&reference->plain, &run->load->dataset->samples[number], INT32_MAX, &expected);
    if (status != STATUS_OK) {
        *right = label == STREAM_MASKED && all_are(0, values, run->sample_bytes) &&
                 all_are(STREAM_IGNORED, mask, run->mask_bytes);
        return status == STATUS_FAILED ? STATUS_OK : status;
    }
    *right = label == expected && fits;
    if (*right)
        *right = same_values(run, reference, number, decoded, values) &&
                 (!mask || memcmp(mask, reference->mask, run->mask_bytes) == 0);
    return STATUS_OK;
}

/* The comparison of a batch. */
struct comparison {
    struct stream_run *run;
    struct shown shown;
    bool *right; /* per sample */
    pthread_mutex_t lock;
    uint64_t failed;        /* the first sample that could not be compared; UINT64_MAX: none. Atomic */
    struct failure failure; /* of this sample */
};

/* Samples after one that failed are left out. The earlier ones are not, so that the reported failure does not
 * depend on timing. */
static void compare_task(void *context, uint64_t at, int thread)
{
    struct comparison *comparison = context;
    struct stream_run *run = comparison->run;
    if (at > __atomic_load_n(&comparison->failed, __ATOMIC_RELAXED))
        return;
    const enum status status =
        compare_sample(run, &run->references[thread], &comparison->shown, at, &comparison->right[at]);
    if (status == STATUS_OK)
        return;
    pthread_mutex_lock(&comparison->lock);
    if (at < comparison->failed) {
        comparison->failure = status_save(status); /* messages are per thread */
        __atomic_store_n(&comparison->failed, at, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&comparison->lock);
}

/* Compares all samples of the batch. Adds the number of wrong ones to `*wrong`. With control->whole, counts
 * the right ones in control->seen, also those that were masked with good reason. */
static enum status compare_batch(struct stream_run *run, uint64_t *wrong)
{
    const struct stream_batch *batch = &run->batch;
    const uint32_t count = batch->samples.count;
    uint8_t *seen = run->load->control->seen;
    FREED bool *right = calloc((size_t)count + 1, sizeof *right);
    struct comparison comparison = {
        .run = run, .right = right, .lock = PTHREAD_MUTEX_INITIALIZER, .failed = UINT64_MAX};
    TRY(ALLOCATED(right, "out of memory to verify a batch"));
    TRY(show_batch(run, &comparison.shown));
    parallel_for(run->reference_count, count, compare_task, &comparison);
    if (comparison.failed != UINT64_MAX)
        return status_restore(&comparison.failure);
    for (uint32_t i = 0; i < count; i++) {
        if (!right[i]) {
            ++*wrong;
            load_note_wrong(run->load->control, batch->numbers[i]);
        } else if (seen && seen[batch->numbers[i]] < 255)
            seen[batch->numbers[i]]++;
    }
    return STATUS_OK;
}

/* ---- The stream ---- */

/* Implements stream_plan.list. */
static uint32_t list_step(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct stream_run *run = context;
    return epoch < __atomic_load_n(&run->listed, __ATOMIC_ACQUIRE)
               ? order_step(&run->verifier.plan, (uint32_t)epoch, (uint32_t)step, run->load->rank, numbers)
               : 0;
}

/* Describes the stream, except its plan. */
static struct set_stream_request request_for(const struct load *load)
{
    return (struct set_stream_request){.dataset = load->dataset,
                                       .fit = load->fit,
                                       .ahead = (uint32_t)load->given->prefetch,
                                       .resident_bytes = load->given->resident_bytes,
                                       .on_error = load->given->on_error == ON_ERROR_MASK ? SET_STREAM_MASK
                                                                                          : SET_STREAM_FAIL};
}

/* Sets how bytes are changed and stored. STATUS_USAGE if these samples cannot be changed so. */
static enum status set_output(const struct load *load, const struct set_stream_request *request,
                              struct image_output *output, bool *changes)
{
    static const double zeros[IMAGE_OUTPUT_CHANNELS_MAX] = {0}, ones[IMAGE_OUTPUT_CHANNELS_MAX] = {1, 1, 1};
    const struct shape shape = {request->channels, request->depth, request->height, request->width};
    const int axes = load->given->axes;
    TRY(jitter_read(&load->given->color, &output->color));
    *changes = jitter_on(&output->color) || axes != LOAD_CTHW;
    if (!*changes)
        return STATUS_OK;
    if (request->type != DTYPE_U8 || (request->channels != 1 && request->channels != 3))
        return status_set(STATUS_USAGE,
                          "--color-jitter, --grayscale, --blur and --axes are for bytes with one or three "
                          "channels, but samples are %s with %u; drop these options",
                          dtype_names[request->type], request->channels);
    if (axes != LOAD_CTHW && request->depth == 1)
        return status_option(STATUS_USAGE, "axes", " is for clips, but the samples are images; drop it");
    TRY(jitter_check(&output->color, &shape, &jitter_options));
    image_output_set(output, DTYPE_U8, axes == LOAD_THWC, zeros, ones);
    output->frames = axes == LOAD_TCHW;
    output->seed = load->given->seed;
    return STATUS_OK;
}

static bool has_label(const struct dataset_sample *sample)
{
    return sample->label < sample->members || sample->class_folder != LABEL_NONE;
}

/* Without --decode, the samples must be arrays, so that a row says what its runs did. */
static enum status check_members(const struct load *load, const struct dataset_sample *sample)
{
    const struct dataset_member *members = &load->dataset->members[sample->member];
    const uint32_t used = (sample->image < sample->members) + (sample->label < sample->members);
    if (sample->members > used)
        return status_set(STATUS_USAGE,
                          "delivers an image and a label, but sample '%s' has %u members; choose them with "
                          "--image and --label, or the image alone with --member",
                          sample->key, sample->members);
    if (!load->given->decode && !load->fit.raw.channels && sample->image < sample->members &&
        strcasecmp(members[sample->image].extension, "npy") != 0)
        return status_set(STATUS_USAGE,
                          "delivers decoded images, but sample '%s' is stored as .%s; add --decode",
                          sample->key, members[sample->image].extension);
    return STATUS_OK;
}

enum status stream_run_accepts(const struct load *load)
{
    struct set_stream_request request = request_for(load);
    bool images = false;
    for (uint32_t i = 0; i < load->dataset->sample_count; i++)
        images |= load->dataset->samples[i].image < load->dataset->samples[i].members;
    if (!images)
        return status_set(STATUS_USAGE, "delivers images and arrays, but the samples have none; name their "
                                        "member with --image");
    for (uint32_t i = 0; i < load->dataset->sample_count; i++)
        TRY(check_members(load, &load->dataset->samples[i]));
    struct image_output output = {.flip = false};
    bool changes;
    TRY(set_stream_find_shape(&request));
    return set_output(load, &request, &output, &changes);
}

bool stream_run_has_jpeg(const struct load *load)
{
    bool found = false;
    for (uint32_t i = 0; !found && i < load->dataset->sample_count; i++)
        found = set_stream_is_jpeg(load->dataset, &load->dataset->samples[i]);
    return found;
}

/* Describes the stream with its plan. */
static enum status fill_request(struct stream_run *run, int threads)
{
    const struct load *load = run->load;
    const struct order_plan *plan = &run->verifier.plan;
    bool labels = false;
    run->request = request_for(load);
    run->request.threads = threads;
    run->request.plan = (struct stream_plan){
        .steps = order_steps(plan),
        .capacity = (uint32_t)order_step_share(plan, 0, 0).count, /* rank 0 has the largest share */
        .list = list_step,
        .context = run};
    run->request.lanes = plan->lanes;
    run->request.shuffle = plan->shuffle_buffer;
    run->request.fit.whole = true; /* as in the stream, for the reference */
    TRY(set_stream_find_shape(&run->request));
    TRY(set_stream_plan_shards(load->dataset, plan->lanes, plan->shuffle_buffer, threads,
                               &run->request.shard_bytes));
    run->sample_bytes = (size_t)run->request.channels * run->request.depth * run->request.height *
                        run->request.width * dtype_bytes(run->request.type);
    TRY(set_output(load, &run->request, &run->output, &run->changes));
    run->request.output = run->changes && !run->type->change ? &run->output : NULL;
    run->mask_bytes = set_stream_mask_bytes(&run->request);
    for (uint32_t i = 0; i < load->dataset->sample_count; i++)
        labels |= has_label(&load->dataset->samples[i]);
    if (labels)
        return STATUS_OK;
    run->labels = calloc(load->dataset->sample_count, sizeof *run->labels);
    run->request.labels = run->labels;
    return ALLOCATED(run->labels, "out of memory for the labels");
}

/* Each thread that compares samples has a reader. More threads than processors would only need more memory
 * and open files. If shards are read or unpacked into memory, each reader would hold a whole one, so there is
 * only one. */
static enum status make_references(struct stream_run *run, int threads)
{
    const struct convert convert = convert_make(DTYPE_U8, DTYPE_STORED, 0, 1);
    pixel_values_set(&run->bytes, &convert);
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    run->reference_count = dataset_in_memory(run->load->dataset)     ? 1
                           : processors >= 1 && processors < threads ? (int)processors
                                                                     : threads;
    run->references = calloc((size_t)run->reference_count, sizeof *run->references);
    return ALLOCATED(run->references, "out of memory for %d threads", threads);
}

enum status stream_run_open(struct stream_run *run, const struct load *load, int threads)
{
    const struct order_plan plan = load_stream_plan(load);
    run->load = load;
    run->result.number = UINT64_MAX;
    run->result.threads = threads;
    run->result.jpeg_engine_share = -1;
    TRY(verifier_open(&run->verifier, load, &plan));
    TRY(fill_request(run, threads));
    TRY(make_references(run, threads));
    return run->type->open(run);
}

void stream_run_close(struct stream_run *run)
{
    stream_close(run->stream);
    for (int i = 0; run->references && i < run->reference_count; i++)
        reference_close(&run->references[i]);
    free(run->references);
    verifier_close(&run->verifier);
    free(run->labels);
    free(run->copied);
}

/* ---- A run ---- */

static enum status release(struct stream_run *run)
{
    if (!run->holds)
        return STATUS_OK;
    void *done = run->done ? run->done : run->type->change && run->changes ? run->batch.ready : NULL;
    run->holds = false;
    run->done = NULL;
    return stream_release(run->stream, &run->batch, done);
}

enum status stream_run_ready(void *state, uint64_t number)
{
    struct stream_run *run = state;
    const struct remote *remote = run->load->dataset->remote;
    TRY(release(run));
    if (remote && !remote_cached(remote)) { /* otherwise, later runs would find the shards in memory */
        stream_close(run->stream);
        run->stream = NULL;
        TRY(run->type->open(run));
    }
    return verifier_ready(&run->verifier, number, &run->result.before);
}

/* Counts a delivered sample. If its hash is not the expected one, the checksum of the run becomes wrong. */
static void count_sample(struct stream_run *run, uint32_t at)
{
    const uint32_t number = run->batch.numbers[at];
    const struct dataset_sample *sample = &run->load->dataset->samples[number];
    const bool masked = run->batch.labels[at] == STREAM_MASKED;
    const uint64_t read = run->batch.read[at];
    verifier_see(&run->verifier, &run->losses, number, masked);
    if (!masked)
        checksum_add(&run->result.checksum, read == set_stream_hash(sample, number) ? sample->edges : read,
                     sample->bytes);
}

static enum status take_batch(struct stream_run *run)
{
    struct consumer *consumer = run->load->control->consumer;
    const struct batch *samples = &run->batch.samples;
    uint64_t wrong = 0; /* control->seen tells which */
    for (uint32_t i = 0; i < samples->count; i++)
        count_sample(run, i);
    if (run->load->control->whole)
        TRY(compare_batch(run, &wrong));
    if (!consumer || samples->count == 0)
        return STATUS_OK;
    return run->type->wait ? consumer_take_device(consumer, run->batch.ready, &run->done)
                           : consumer_take_host(consumer, samples->values, samples->bytes);
}

/* Takes batches up to the last one of the run, which it keeps. */
static enum status take_batches(struct stream_run *run, double begin_s)
{
    bool first = true, last = false;
    while (!last) {
        TRY(release(run));
        TRY(stream_next(run->stream, &run->batch));
        run->holds = true;
        if (first)
            run->result.first_batch_s = timer_now_s() - begin_s;
        first = false;
        if (run->changes && run->type->change)
            TRY(run->type->change(run));
        last = run->batch.last && run->batch.epoch + 1 == run->end;
        TRY(take_batch(run));
    }
    return STATUS_OK;
}

/* Makes the first batch of a run the next one. With a training step, the stream prepares batches of the next
 * run during the current one, as in training. Otherwise each run prepares all of its batches; the stream has
 * then listed batches without samples after the previous run, which it discards when it is cancelled. */
static enum status seek(struct stream_run *run, uint64_t epoch)
{
    const struct stream_position at = run->stream->at;
    const bool continues = run->load->control->consumer != NULL;
    const bool there = continues && run->listed == UINT64_MAX && at.epoch == epoch && at.step == 0;
    run->end = epoch + run->load->epochs;
    if (there)
        return STATUS_OK;
    stream_cancel(run->stream);
    __atomic_store_n(&run->listed, continues ? UINT64_MAX : run->end, __ATOMIC_RELEASE);
    return stream_seek(run->stream, (struct stream_position){epoch, 0});
}

enum status stream_run_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    struct stream_run *run = state;
    struct load_result *result = &run->result;
    struct stream_stats before, after;
    const double begin_s = timer_now_s();
    result->number = number;
    result->checksum = (struct checksum){0};
    losses_clear(&run->losses);
    TRY(release(run));
    stream_stats(run->stream, &before);
    TRY(seek(run, number * run->load->epochs));
    TRY(take_batches(run, begin_s));
    if (run->type->wait)
        TRY(run->type->wait(run));
    stream_stats(run->stream, &after);
    result->skipped = run->losses.checksum.count;
    result->decode_s = (after.decode_s - before.decode_s) / result->threads;
    result->jpeg_warnings = after.jpeg_warnings - before.jpeg_warnings;
    result->memory_bytes = after.memory_bytes + after.shard_bytes;
    result->resident = after.resident;
    result->resident_device = after.resident_device;
    if (run->request.device_bytes > 0)
        run->load->control->resident_share = (double)after.resident_device / run->load->dataset->sample_count;
    return verifier_finish(&run->verifier, number, &result->checksum, &run->losses);
}

enum status stream_run_fetch(void *state, void *result)
{
    struct stream_run *run = state;
    run->result.device_known = verifier_device_bytes(&run->verifier, &run->result.device_bytes);
    run->result.useful_bytes =
        (double)run->request.plan.capacity * (double)(run->sample_bytes + run->mask_bytes);
    *(struct load_result *)result = run->result;
    return STATUS_OK;
}

enum status stream_run_verify(void *state, uint64_t *wrong)
{
    struct stream_run *run = state;
    *wrong = 0;
    return run->holds ? compare_batch(run, wrong) : STATUS_OK;
}
