/* From stored samples to the input of a network: augmentation, normalisation, and the feed of engines on the
 * CPU. */
#include "train/feed.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/phase.h"
#include "data/random_boxes.h"
#include "data/random_draws.h"
#include "data/set_stream.h"
#include "train/augment.h"
#include "train/data_fill.h"
#include "train/data_mixture.h"
#include "train/engine.h"
#include "train/given.h"

/* ---- Augmentation ---- */

/* ---- The plan ---- */

static bool is_image(const struct shape *shape)
{
    return shape->channels == 1 || shape->channels == 3;
}

/* Returns whether pixels from outside have equal channels. */
static bool fills_gray(const struct augment_policy *policy)
{
    return policy->fill[0] == policy->fill[1] && policy->fill[0] == policy->fill[2];
}

enum status augment_plan(const struct train *train, struct augment_plan *plan)
{
    const struct data *data = train->data;
    const struct augment *augment = &train->augment;
    const struct shape *canvas = data->canvas_bytes ? &data->canvas : &data->shape;
    if (data->type != DTYPE_U8 || !is_image(&data->shape) || !is_image(canvas))
        return status_set(STATUS_USAGE,
                          "8-bit images with one or three channels are needed for --fit random-resized-crop, "
                          "--rand-augment, --color-jitter, --grayscale, --blur and --repeats; drop these "
                          "options, or use other --data");
    if (augment->operations > 0 && data->shape.depth > 1)
        return status_set(STATUS_USAGE,
                          "--rand-augment changes images, but these samples are clips of %u frames; "
                          "drop it, or use --color-jitter",
                          data->shape.depth);
    *plan = (struct augment_plan){.seed = train->seed,
                                  .samples = data->sets[DATA_TRAIN].count,
                                  .canvas = *canvas,
                                  .shape = data->shape,
                                  .crop = augment->crop,
                                  .range = augment->range,
                                  .bicubic = augment->bicubic || augment->random_filter,
                                  .random_filter = augment->random_filter,
                                  .flip = augment->flip,
                                  .color = augment->color,
                                  .gray = (data->gray || canvas->channels < data->shape.channels) &&
                                          (augment->operations == 0 || fills_gray(&augment->policy)),
                                  .rand = {augment->operations, augment->magnitude, augment->policy}};
    return jitter_check(&plan->color, &data->shape, &jitter_options);
}

/* ---- Crop, resize, flip ---- */

/* Returns the maximum number of input values from which one output value along an axis is computed. */
static uint32_t taps_of(const struct augment_plan *plan, uint32_t in, uint32_t out)
{
    return resample_axis_with(in, out, plan->bicubic).taps;
}

enum status augment_scratch_open(const struct augment_plan *plan, struct augment_scratch *scratch)
{
    const struct shape *canvas = &plan->canvas, *shape = &plan->shape;
    scratch->rows = malloc((size_t)canvas->height * shape->width);
    scratch->other = malloc(shape_values(shape));
    scratch->weights = malloc(taps_of(plan, canvas->height, shape->height) * sizeof *scratch->weights);
    scratch->first = malloc(shape->width * sizeof *scratch->first);
    scratch->count = malloc(shape->width * sizeof *scratch->count);
    scratch->across =
        malloc((size_t)taps_of(plan, canvas->width, shape->width) * shape->width * sizeof *scratch->across);
    return ALLOCATED(scratch->rows && scratch->other && scratch->weights && scratch->first &&
                         scratch->count && scratch->across,
                     "out of memory to augment samples");
}

void augment_scratch_close(struct augment_scratch *scratch)
{
    free(scratch->rows);
    free(scratch->other);
    free(scratch->weights);
    free(scratch->first);
    free(scratch->count);
    free(scratch->across);
    *scratch = (struct augment_scratch){0};
}

/* Resizes the rows of a box of a plane along x. */
static void resize_rows(const struct augment_scratch *scratch, const struct resample_axis *axis,
                        struct image_box box, const uint8_t *plane, uint32_t pitch)
{
    for (uint32_t y = 0; y < box.height; y++) {
        const uint8_t *row = plane + (size_t)(box.top + y) * pitch + box.left;
        for (uint32_t x = 0; x < axis->out; x++) {
            const int16_t *weights = scratch->across + (size_t)x * axis->taps;
            int32_t sum = 0;
            for (uint32_t t = 0; t < scratch->count[x]; t++)
                sum += weights[t] * row[scratch->first[x] + t];
            scratch->rows[(size_t)y * axis->out + x] = augment_shifted(sum, axis->bits);
        }
    }
}

/* Resizes scratch->rows, which resize_rows() has computed, along y. */
static void resize_columns(const struct augment_scratch *scratch, const struct resample_axis *axis,
                           uint32_t width, bool flip, uint8_t *plane)
{
    for (uint32_t y = 0; y < axis->out; y++) {
        uint32_t first, count = resample_weights(axis, y, &first, scratch->weights);
        for (uint32_t x = 0; x < width; x++) {
            int32_t sum = 0;
            for (uint32_t t = 0; t < count; t++)
                sum += scratch->weights[t] * scratch->rows[(size_t)(first + t) * width + x];
            plane[(size_t)y * width + (flip ? width - 1 - x : x)] = augment_shifted(sum, axis->bits);
        }
    }
}

/* Crops, resizes and flips each plane of an image. A canvas of one channel is resized once and copied to all
 * channels. */
static void resize(const struct augment_plan *plan, const uint8_t *stored, struct image_box box, bool bicubic,
                   bool flip, const struct augment_scratch *scratch, uint8_t *image)
{
    const struct shape *canvas = &plan->canvas, *shape = &plan->shape;
    const uint32_t there = canvas->channels * canvas->depth, planes = shape->channels * shape->depth;
    const size_t from = (size_t)canvas->height * canvas->width, to = (size_t)shape->height * shape->width;
    const struct resample_axis across = resample_axis_with(box.width, shape->width, bicubic);
    const struct resample_axis down = resample_axis_with(box.height, shape->height, bicubic);
    for (uint32_t x = 0; x < across.out; x++)
        scratch->count[x] =
            resample_weights(&across, x, &scratch->first[x], scratch->across + (size_t)x * across.taps);
    for (uint32_t k = 0; k < planes; k++) {
        if (k < there) {
            resize_rows(scratch, &across, box, stored + k * from, canvas->width);
            resize_columns(scratch, &down, shape->width, flip, image + k * to);
        } else
            memcpy(image + k * to, image + k % there * to, to);
    }
}

void augment_image(const struct augment_plan *plan, const uint8_t *stored, uint32_t epoch, uint32_t sample,
                   struct augment_scratch *scratch, uint8_t *image)
{
    resize(plan, stored, augment_box(plan, epoch, sample), augment_bicubic(plan, epoch, sample),
           augment_flips(plan, epoch, sample), scratch, image);
    rand_augment_apply(&plan->rand, &plan->shape, plan->seed, epoch, sample, image, scratch->other);
    jitter_apply(&plan->color, &plan->shape, plan->seed, epoch, sample, image, scratch->other);
}

/* ---- Stored samples and their normalisation ---- */

const void *data_sample(const struct data *data, enum data_part part, uint32_t sample)
{
    return (const uint8_t *)data->sets[part].values + (size_t)sample * data_stored_bytes(data, part);
}

#define BLOCK 65536 /* the sum of the squares of this many bytes fits into 32 bits */

/* Adds up bytes and their squares, exactly. The compiler vectorises the sums of 32 bits. */
FDSL_FMA_CLONES
static void add_bytes(const uint8_t *bytes, size_t count, uint64_t *sum, uint64_t *squares)
{
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        size_t end = begin + BLOCK < count ? begin + BLOCK : count;
        uint32_t part = 0, square = 0;
        for (size_t i = begin; i < end; i++) {
            part += bytes[i];
            square += (uint32_t)bytes[i] * bytes[i];
        }
        *sum += part;
        *squares += square;
    }
}

void data_add_sums(const struct data *data, const void *sample, uint32_t channel, struct data_sums *sums)
{
    const struct shape *stored = data->canvas_bytes ? &data->canvas : &data->shape;
    const size_t plane = shape_values(stored) / stored->channels;
    uint64_t byte_sum = 0, byte_squares = 0;
    if (data->type == DTYPE_U8)
        add_bytes((const uint8_t *)sample + channel * plane, plane, &byte_sum, &byte_squares);
    for (size_t i = 0; data->type != DTYPE_U8 && i < plane; i++) {
        double value = data_value(data->type, sample, channel * plane + i);
        sums->values += value;
        sums->squares += value * value;
    }
    sums->values += (double)byte_sum;
    sums->squares += (double)byte_squares;
}

static void moments(const struct data *data, uint32_t channel, double *mean, double *variance);

/* Computes mean and variance of a mixture from those of its sources, by their shares at the beginning. */
static void mixed_moments(const struct data *data, uint32_t channel, double *mean, double *variance)
{
    const struct data_mixture *mixture = data->mixture;
    double weights = 0, sum = 0, squares = 0;
    for (uint32_t k = 0; k < mixture->mix.count; k++) {
        const double weight = mixture->request.phases[0].of[k];
        double own_mean, own_variance;
        moments(&mixture->sources[k], channel, &own_mean, &own_variance);
        weights += weight;
        sum += weight * own_mean;
        squares += weight * (own_variance + own_mean * own_mean);
    }
    *mean = sum / weights;
    *variance = squares / weights - *mean * *mean;
}

/* Computes mean and variance of a channel over the measured training samples: the first ones, or with
 * DATA_LOAD those that data_open() has measured. A canvas of one channel counts for all channels. */
static void moments(const struct data *data, uint32_t channel, double *mean, double *variance)
{
    const struct shape *stored = data->canvas_bytes ? &data->canvas : &data->shape;
    const uint32_t samples = data_measured(data, DATA_TRAIN);
    if (data->mixture) {
        mixed_moments(data, channel, mean, variance);
        return;
    }
    const double count = (double)(shape_values(stored) / stored->channels) * samples;
    struct data_sums sums = data->feed == DATA_LOAD ? data->sums[channel] : (struct data_sums){0, 0};
    if (channel >= stored->channels)
        channel = 0;
    for (uint32_t n = 0; data->feed != DATA_LOAD && n < samples; n++)
        data_add_sums(data, data_sample(data, DATA_TRAIN, n), channel, &sums);
    *mean = sums.values / count;
    *variance = sums.squares / count - *mean * *mean;
}

void data_normalise(struct data *data, bool on)
{
    for (uint32_t c = 0; c < data->shape.channels; c++) {
        double mean = 0, variance = data->type == DTYPE_U8 ? 255.0 * 255.0 : 1;
        if (on)
            moments(data, c, &mean, &variance);
        double deviation = variance > 0 ? sqrt(variance) : 1; /* constant channel: shift only */
        data->scale[c] = (float)(1 / deviation);
        data->offset[c] = (float)(-mean / deviation);
    }
}

void data_normalise_by(struct data *data, const double mean[DATA_CHANNELS_MAX],
                       const double deviation[DATA_CHANNELS_MAX])
{
    const double unit = data->type == DTYPE_U8 ? 255 : 1;
    for (uint32_t c = 0; c < data->shape.channels; c++) {
        data->scale[c] = (float)(1 / (unit * deviation[c]));
        data->offset[c] = (float)(-mean[c] / deviation[c]);
    }
}

FDSL_FMA_CLONES
void data_gather(const struct data *data, const void *stored, struct draw_move move, float *values)
{
    const struct shape *shape = &data->shape;
    size_t plane = (size_t)shape->height * shape->width;
    for (uint32_t c = 0; c < shape->channels; c++)
        for (uint32_t t = 0; t < shape->depth; t++) {
            size_t first = ((size_t)c * shape->depth + t) * plane;
            for (uint32_t y = 0; y < shape->height; y++)
                for (uint32_t x = 0; x < shape->width; x++) {
                    int32_t from = draw_moved(&move, shape->height, shape->width, y, x);
                    float value = from < 0 ? 0 : data_value(data->type, stored, first + (size_t)from);
                    value = fmaf(value, data->scale[c], data->offset[c]);
                    *values++ = box_erased(&move.erase, y, x,
                                           (uint32_t)(first + (size_t)y * shape->width + x), value);
                }
        }
}

FDSL_FMA_CLONES
void data_erase(const struct shape *shape, const struct draw_erase *erase, float *values)
{
    const struct image_box box = erase->box;
    for (uint32_t plane = 0; plane < shape->channels * shape->depth; plane++)
        for (uint32_t y = box.top; y < box.top + box.height; y++)
            for (uint32_t x = box.left; x < box.left + box.width; x++) {
                const uint32_t i = (plane * shape->height + y) * shape->width + x;
                values[i] = box_erased(erase, y, x, i, values[i]);
            }
}

/* ---- The stream of a rank ---- */

/* Lists the samples of steps. One thread at a time uses the memo; others do without it. */
struct feed_lister {
    const struct train *train;
    pthread_mutex_t lock; /* protects all below */
    bool used;            /* the memo is that of `epoch` */
    uint64_t epoch;
    struct draw_memo memo;
};

/* Writes the first `count` entries of the list of a delivery. */
static void list_entries(struct feed_lister *lister, uint32_t epoch, uint32_t number,
                         const struct share *share, uint32_t count, uint32_t *numbers)
{
    struct draw_order order = train_order(lister->train, epoch);
    const bool alone = pthread_mutex_trylock(&lister->lock) == 0;
    if (alone && (!lister->used || lister->epoch != epoch))
        memset(&lister->memo, 0, sizeof lister->memo);
    if (alone) {
        lister->used = true;
        lister->epoch = epoch;
        order.memo = &lister->memo;
    }
    const struct train_pick pick = train_pick(lister->train, &order, number / feed_per_step(lister->train));
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = train_picked(&pick, train_entry(share, i));
    if (alone)
        pthread_mutex_unlock(&lister->lock);
}

/* Implements stream_plan.list. */
static uint32_t list_step(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    struct feed_lister *lister = (struct feed_lister *)context; /* the plan is constant, the memo is not */
    const struct share share = feed_share(lister->train, (uint32_t)step);
    const uint32_t count = train_generated(lister->train, (uint32_t)share.count);
    list_entries(lister, (uint32_t)epoch, (uint32_t)step, &share, count, numbers);
    return count;
}

uint32_t feed_stream_list(const struct feed_stream *feed, uint32_t epoch, uint32_t step, uint32_t *numbers)
{
    const struct share share = feed_share(feed->train, step);
    list_entries(feed->lister, epoch, step, &share, train_entries(feed->train, (uint32_t)share.count),
                 numbers);
    return (uint32_t)share.count;
}

enum decoder feed_decoder_wanted(const struct train *train)
{
    const struct data *data = train->data;
    const bool reads = data->feed == DATA_LOAD && data->fit.res > 0 && !train->forward_only;
    const struct train_decoding *decoding = train->decoding;
    if (!reads || !decoding)
        return DECODER_CPU;
    const bool chooses = decoding->decoder == DECODER_AUTO, bilinear = data->fit.filter == RESAMPLE_BILINEAR;
    return chooses && (decoding->share == 0 || !bilinear || !data_stream_has_jpeg(data)) ? DECODER_CPU
                                                                                         : decoding->decoder;
}

/* Decides which share of the samples `decoder` takes. */
static enum status decide_share(const struct train *train, enum decoder decoder)
{
    struct train_decoding *decoding = train->decoding;
    const char *name = decoder_names[decoder];
    if (!decoding)
        return STATUS_OK;
    if (decoding->decoder != DECODER_AUTO && decoding->decoder != decoder)
        return status_value(STATUS_USAGE, "decoder", decoder_names[decoding->decoder],
                            " cannot be used here; use --decoder %s or auto", name);
    if (decoder == DECODER_CPU && decoding->share > 0)
        return status_number(STATUS_USAGE, "device-share", decoding->share,
                             ": the CPU decodes all of these samples; drop --device-share");
    decoding->decoder = decoder;
    if (decoding->share < 0)
        decoding->share = set_stream_share(decoder);
    return STATUS_OK;
}

/* Prepares the stream of a rank: sets what the plan of its steps determines. */
static enum status begin_stream(const struct train *train, struct data_stream_request *request,
                                struct feed_stream *feed)
{
    *feed = (struct feed_stream){.train = train, .lister = calloc(1, sizeof *feed->lister)};
    TRY(ALLOCATED(feed->lister, "out of memory for a stream"));
    feed->lister->train = train;
    pthread_mutex_init(&feed->lister->lock, NULL);
    request->plan = (struct stream_plan){.steps = feed_steps(train),
                                         .capacity = train_generated(train, feed_share_max(train)),
                                         .list = list_step,
                                         .context = feed->lister,
                                         .by_epoch = train->shares != NULL};
    request->seed = train->seed;
    request->copies = train->augment.repeats ? train->augment.repeats : 1;
    request->threads = request->threads > 1 ? request->threads : 1;
    return STATUS_OK;
}

enum status feed_stream_begin(const struct train *train, enum decoder decoder,
                              struct data_stream_request *request, struct feed_stream *feed)
{
    *feed = (struct feed_stream){0};
    TRY(decide_share(train, decoder));
    request->device_share = train->decoding ? train->decoding->share : 0;
    request->device_bytes = train->data->resident_device_bytes;
    return begin_stream(train, request, feed);
}

enum status feed_stream_open(const struct train *train, int threads, uint32_t held, enum decoder decoder,
                             enum status (*allocate)(size_t bytes, void **memory),
                             void (*deallocate)(void *memory), struct feed_stream *feed)
{
    struct data_stream_request request = {
        .threads = threads, .held = held, .allocate = allocate, .deallocate = deallocate};
    TRY(feed_stream_begin(train, decoder, &request, feed));
    return data_stream(train->data, &request, &feed->stream);
}

void feed_stream_close(struct feed_stream *feed)
{
    stream_close(feed->stream);
    if (feed->lister)
        pthread_mutex_destroy(&feed->lister->lock);
    free(feed->lister);
    *feed = (struct feed_stream){0};
}

/* Checks that a batch has exactly these samples. Otherwise, the network would learn wrong labels. */
static enum status check_batch(const struct stream_batch *batch, uint32_t epoch, uint32_t step,
                               const uint32_t *numbers, uint32_t count, size_t sample_bytes)
{
    const bool same = batch->epoch == epoch && batch->step == step && batch->samples.count == count &&
                      (count == 0 || (batch->samples.stride == sample_bytes &&
                                      memcmp(batch->numbers, numbers, count * sizeof *numbers) == 0));
    return same ? STATUS_OK
                : status_set(STATUS_FAILED,
                             "epoch %u, step %u: the stream delivered other samples than those of the step",
                             epoch + 1, step + 1);
}

enum status feed_stream_next(struct feed_stream *feed, uint32_t epoch, uint32_t step, const uint32_t *numbers,
                             uint32_t count, struct stream_batch *batch)
{
    const struct train *train = feed->train;
    const struct stream_position *at = &feed->stream->at;
    const uint32_t own = count / train_generated(train, 1); /* without the partners */
    if (at->epoch != epoch || at->step != step)
        TRY(stream_seek(feed->stream, (struct stream_position){epoch, step}));
    TRY(stream_next(feed->stream, batch));
    enum status status =
        check_batch(batch, epoch, step, numbers, count, data_stored_bytes(train->data, DATA_TRAIN));
    if (status != STATUS_OK) {
        stream_release(feed->stream, batch, NULL);
        return status;
    }
    feed->masked += data_take_labels(train->data, batch, own);
    for (uint32_t j = 0; j < own; j++)
        if (data_read_covers(train->data, epoch, batch->numbers[j]))
            feed->delivered += batch->read[j];
    return STATUS_OK;
}

void feed_stream_totals(struct feed_stream *feed, struct train_totals *totals)
{
    struct stream_stats now;
    stream_stats(feed->stream, &now);
    totals->masked = feed->masked;
    totals->delivered = feed->delivered;
    totals->read_bytes = now.bytes - feed->before.bytes;
    totals->resident = now.resident;
    totals->resident_device = now.resident_device;
    totals->generate_s = now.generate_s - feed->before.generate_s;
    totals->stall_s = now.wait_s - feed->before.wait_s;
    totals->decode_s = now.decode_s - feed->before.decode_s;
    if (feed->train->data->rows && feed->train->data->feed == DATA_LOAD) { /* the generator read the rows */
        totals->read_bytes = (now.samples - feed->before.samples) * feed->train->data->sample_bytes;
        totals->decode_s = totals->generate_s;
        totals->generate_s = 0;
    }
    feed->before = now;
    feed->masked = feed->delivered = 0;
}

/* ---- The feed of an engine on the CPU ---- */

static enum status open_augment(const struct train *train, int threads, struct feed *feed)
{
    TRY(augment_plan(train, &feed->augment));
    feed->threads = threads;
    feed->images = malloc(train_generated(train, feed_share_max(train)) * train->data->sample_bytes);
    feed->scratch = calloc((size_t)threads, sizeof *feed->scratch);
    TRY(ALLOCATED(feed->images && feed->scratch, "out of memory for a batch of %u samples; lower --batch",
                  feed_share_max(train)));
    for (int i = 0; i < threads; i++)
        TRY(augment_scratch_open(&feed->augment, &feed->scratch[i]));
    return STATUS_OK;
}

enum status feed_open(const struct train *train, const struct resources *resources, struct feed *feed)
{
    *feed = (struct feed){.train = train};
    const bool first = !train->stage || train->stage->first;
    if (augment_computes(&train->augment) && !train->forward_only && first)
        TRY(open_augment(train, resources->threads > 1 ? resources->threads : 1, feed));
    struct data_stream_request request = {
        .threads = resources->threads, .held = 1, .unscaled = train->decoding && train->decoding->share > 0};
    if (train->data->feed != DATA_STORED && !train->forward_only && first) {
        TRY(begin_stream(train, &request, &feed->stream));
        TRY(data_stream(train->data, &request, &feed->stream.stream));
    }
    return memory_take(train->memory, MEMORY_STREAM, feed_memory_bytes(feed));
}

void feed_close(struct feed *feed)
{
    feed_stream_close(&feed->stream);
    for (int i = 0; feed->scratch && i < feed->threads; i++)
        augment_scratch_close(&feed->scratch[i]);
    free(feed->scratch);
    free(feed->images);
    *feed = (struct feed){0};
}

/* Computes the images of the `count` samples in `numbers`. `count` includes the partners that
 * train_generated() counts. Threads take samples in any order, which does not change the images. */
static void compute_images(const struct feed *feed, uint32_t epoch, const uint32_t *numbers, uint32_t count)
{
    RANGE(GATHER);
#pragma omp parallel for schedule(dynamic) num_threads(feed->threads)
    for (uint32_t j = 0; j < count; j++) {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        augment_image(&feed->augment, feed_stored(feed, numbers[j], j), epoch, numbers[j],
                      &feed->scratch[thread], feed->images + j * feed->train->data->sample_bytes);
    }
}

/* Takes the batch of a step from the stream, after the batch of the previous step is returned. */
static enum status take_batch(struct feed *feed, uint32_t epoch, uint32_t step, const uint32_t *numbers,
                              uint32_t count)
{
    struct feed_stream *stream = &feed->stream;
    RANGE(GATHER);
    if (feed->held)
        TRY(stream_release(stream->stream, &feed->batch, NULL));
    feed->held = false;
    TRY(feed_stream_next(stream, epoch, step, numbers, count, &feed->batch));
    feed->held = true;
    feed->samples = feed->batch.samples.values;
    return STATUS_OK;
}

void feed_totals(struct feed *feed, struct train_totals *totals)
{
    if (feed->stream.stream)
        feed_stream_totals(&feed->stream, totals);
}

enum status feed_step(struct feed *feed, uint32_t epoch, uint32_t step, const uint32_t *numbers,
                      uint32_t count)
{
    count = train_generated(feed->train, count);
    if (feed->stream.stream) /* also if this rank has no sample in the step */
        TRY(take_batch(feed, epoch, step, numbers, count));
    if (feed->images && count > 0)
        compute_images(feed, epoch, numbers, count);
    return STATUS_OK;
}

void feed_gather(const struct feed *feed, const struct mix *mix, uint32_t epoch, const uint32_t *numbers,
                 uint32_t count, uint32_t j, float *partner, float *values)
{
    const struct train *train = feed->train;
    const bool last = train->augment.erase_last && mix->share < 1;
    struct draw_move move = box_move(&train->augment, train->seed, epoch, numbers[j]);
    const struct draw_erase erase = move.erase;
    if (last)
        move.erase = (struct draw_erase){0};
    data_gather(train->data, feed_sample(feed, numbers[j], j), move, values);
    if (mix->share >= 1)
        return;
    const struct train_held held = {true, train_generated(train, 1) > 1, count, 0};
    const uint32_t other = numbers[count + j];
    move = box_move(&train->augment, train->seed, epoch, other);
    if (last)
        move.erase = (struct draw_erase){0};
    data_gather(train->data, feed_sample(feed, other, train_held_at(&held, count, count + j)), move, partner);
    mix_samples(mix, &train->data->shape, partner, values);
    if (last)
        data_erase(&train->data->shape, &erase, values);
}

uint64_t feed_memory_bytes(const struct feed *feed)
{
    const struct train *train = feed->train;
    const uint64_t images = feed->images ? train_generated(train, feed_share_max(train)) : 0;
    uint64_t bytes = images * train->data->sample_bytes;
    if (feed->stream.stream) {
        struct stream_stats stats;
        stream_stats(feed->stream.stream, &stats);
        bytes += stats.memory_bytes + stats.shard_bytes;
    }
    return bytes;
}

/* ---- Batches that the caller of the library hands over ---- */

enum status given_open(struct given *given, uint32_t batch, struct data *data)
{
    const uint32_t counts[DATA_PARTS] = {given->samples, batch};
    data->given = given;
    data->feed = DATA_LOAD;
    data->shape = given->shape;
    data->type = given->type;
    data->classes = given->classes;
    data->multi_hot = given->multi_hot;
    data->hashes[DATA_TRAIN] = given->identity;
    data->lanes = 1; /* numbers are positions: the caller has the order */
    data->shuffle = 0;
    data->sample_values = shape_values(&given->shape);
    data->sample_bytes = data->sample_values * dtype_bytes(given->type);
    for (int part = 0; part < DATA_PARTS; part++) {
        struct data_set *set = &data->sets[part];
        TRY(data_room_for_labels(data, counts[part], data_size_options[part], set));
        set->count = counts[part];
        for (uint32_t n = 0; n < set->count; n++)
            set->labels[n] = given->multi_hot ? n : 0;
    }
    data->sets[DATA_TEST].values = calloc(batch, data->sample_bytes);
    return ALLOCATED(data->sets[DATA_TEST].values, "out of memory for a batch of %" PRIu32 " samples", batch);
}

/* ---- The stream ---- */

struct given_batches {
    struct stream stream; /* must be the first member */
    struct given *given;
    struct stream_plan plan;
    size_t sample_bytes;
    uint32_t *numbers;
    uint64_t delivered;
};

static enum status next(struct stream *stream, struct stream_batch *batch)
{
    struct given_batches *self = (struct given_batches *)stream;
    const struct given *given = self->given;
    const struct stream_position at = stream->at;
    const uint32_t count = self->plan.list(self->plan.context, at.epoch, at.step, self->numbers);
    if (given->count != count)
        return status_set(STATUS_USAGE,
                          "epoch %" PRIu64 ", step %" PRIu64 ": the batch has %" PRIu32
                          " samples, but the step has %" PRIu32 " on this rank",
                          at.epoch + 1, at.step + 1, given->count, count);
    self->delivered += count;
    *batch = (struct stream_batch){.samples = {.values = given->values,
                                               .bytes = count * self->sample_bytes,
                                               .stride = self->sample_bytes,
                                               .count = count,
                                               .type = given->type,
                                               .labels = given->device_labels ? NULL : given->labels},
                                   .numbers = self->numbers,
                                   .labels = given->device_labels ? NULL : given->labels,
                                   .masks = given->rows,
                                   .share = given->share,
                                   .epoch = at.epoch,
                                   .step = at.step,
                                   .last = at.step + 1 == self->plan.steps,
                                   .ready = given->ready};
    return STATUS_OK;
}

static enum status release(struct stream *stream, const struct stream_batch *batch, void *done_event)
{
    const struct given *given = ((struct given_batches *)stream)->given;
    (void)batch;
    return given->release(given->context, done_event);
}

static enum status seek(struct stream *stream, struct stream_position to)
{
    return stream_check_position(&((struct given_batches *)stream)->plan, to);
}

static void stats(struct stream *stream, struct stream_stats *counted)
{
    *counted = (struct stream_stats){.samples = ((struct given_batches *)stream)->delivered};
}

static void cancel(struct stream *stream)
{
    (void)stream; /* nothing waits */
}

static void close_batches(struct stream *stream)
{
    free(((struct given_batches *)stream)->numbers);
    free(stream);
}

static const struct stream_type type = {
    .next = next, .release = release, .seek = seek, .stats = stats, .cancel = cancel, .close = close_batches};

enum status given_stream(const struct data *data, const struct data_stream_request *request,
                         struct stream **stream)
{
    struct given_batches *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory for a stream"));
    *self = (struct given_batches){.stream = {.type = &type},
                                   .given = data->given,
                                   .plan = request->plan,
                                   .sample_bytes = data->sample_bytes,
                                   .numbers = calloc(request->plan.capacity, sizeof *self->numbers)};
    *stream = &self->stream;
    return ALLOCATED(self->numbers, "out of memory for a stream");
}
