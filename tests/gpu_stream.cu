/* Tests streams of batches in device memory (common/device_stream.cuh). Batches must equal those of the host
 * stream: exactly where a CPU thread decodes, and within image_decoder_tolerance() where the device does. The
 * same samples must have the same bits in every run, for any size of batches and chunks, and any number of
 * threads. Broken files, seeks, cancels and many openings must have the documented results. make check-gpu
 * runs this program.
 *
 *     gpu_stream [--short] [DECODER ...]
 *     gpu_stream --times [FOLDER]
 *
 * --short: fewer cases and no planted faults; for compute-sanitizer. DECODER: cpu, hardware or hybrid
 * (default: all). Only one process at a time should use the engines of a GPU. --times: the rates of batches
 * of 256 samples of a data set, read and from device memory, and what their bytes allow; without FOLDER, of
 * 8,192 arrays of 3 x 224 x 224 bytes in shards in /dev/shm. Then the times of changes of colour.
 *
 * compute-sanitizer does not detect races between CUDA streams, so the test provokes them, as gpu_live does:
 * steps have random or long durations, copy their batch, and overwrite it. Planted faults show that the test
 * detects races, wrong crops, samples in wrong places, and values that differ too much.
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_files.cuh"

#include <map>
#include <thread>

#include "common/device_stream.cuh"
#include "common/jitter.cuh"
#include "data/set_stream.h"
#include "data/tar.h"
#include "machine/device.h"

#define EPOCHS 2
#define POISON 0xaa

static bool brief;
static int failures;

static void tell(bool well, const std::string &what)
{
    printf("%s  %s\n", well ? "ok    " : "FAILED", what.c_str());
    failures += !well;
}

/* ---- Streams ---- */

/* What a stream delivers. */
struct trial {
    const struct files *files;
    enum fit_how how;
    uint32_t res, channels, batch;
    double share;
    int threads;
    uint64_t seed;
    bool masks, by_epoch;
    uint64_t slow_ns; /* as in struct consumer */
    uint32_t chunk;   /* as in struct device_stream_request */
    uint64_t device_bytes;
    uint32_t copies; /* as in struct set_stream_request; 0: one */
};

/* Returns the number of samples of an epoch. */
static uint32_t samples_of(const struct trial *trial)
{
    return trial->files->count * (trial->copies ? trial->copies : 1);
}

static uint32_t steps_of(const struct trial *trial)
{
    return (samples_of(trial) + trial->batch - 1) / trial->batch;
}

static size_t bytes_of(const struct trial *trial)
{
    return (size_t)trial->channels * trial->res * trial->res;
}

static std::atomic<uint64_t> latest_listed; /* the largest epoch that a plan has listed */

/* Implements stream_plan.list: another permutation in each epoch. */
static uint32_t list(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct trial *trial = static_cast<const struct trial *>(context);
    const uint32_t all = samples_of(trial);
    const struct draw_order order = draw_order(3, (uint32_t)epoch, all);
    const uint32_t first = (uint32_t)step * trial->batch, left = all - first;
    const uint32_t count = left < trial->batch ? left : trial->batch;
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = draw_order_at(&order, first + i);
    if (epoch > latest_listed)
        latest_listed = epoch;
    return count;
}

static struct stream *open_host(const struct trial *trial, const struct dataset *dataset, bool pinned)
{
    struct set_stream_request request = {};
    struct stream *stream;
    request.dataset = dataset;
    request.fit.how = trial->how;
    request.fit.res = trial->res;
    request.fit.channels = request.channels = trial->channels;
    request.fit.seed = trial->seed;
    request.fit.unscaled = true;
    request.depth = 1;
    request.height = request.width = trial->res;
    request.type = DTYPE_U8;
    request.plan = {steps_of(trial), trial->batch, list, trial, trial->by_epoch};
    request.threads = trial->threads;
    request.ahead = 2;
    request.held = DEVICE_STREAM_HELD;
    request.on_error = trial->masks ? SET_STREAM_MASK : SET_STREAM_FAIL;
    request.device_share = pinned ? trial->share : 0;
    request.device_bytes = pinned ? trial->device_bytes : 0;
    request.copies = trial->copies;
    request.resident_bytes = pinned && trial->threads > 4 ? UINT64_MAX : 0;
    request.allocate = pinned ? device_stream_pin : NULL;
    request.deallocate = pinned ? device_stream_unpin : NULL;
    must(set_stream_open(&request, &stream));
    return stream;
}

/* The function `next` of host streams, which also counts the files that they hand on, and cuts off those of
 * every `refuse`-th sample, so that nvJPEG refuses them. */
static const struct stream_type *original;
static struct stream_type watching;
static uint32_t refuse;
static uint64_t handed_on, left_out; /* left_out: samples that the host stream left out of batches */
static bool exchange;                /* a planted fault: exchange pairs of resident samples of a batch */

static bool is_refused(uint32_t number)
{
    return refuse > 0 && number % refuse == refuse - 1;
}

static void watch_places(const struct stream *stream, const struct stream_batch *batch)
{
    uint64_t *places = const_cast<uint64_t *>(set_stream_places(stream, batch)), *first = NULL;
    for (uint32_t i = 0; places && i < batch->samples.count; i++) {
        if (places[i] == SET_STREAM_LOADED)
            continue;
        left_out++;
        if (exchange && first)
            std::swap(places[i], *first);
        first = first ? NULL : &places[i];
    }
}

static enum status watch_next(struct stream *stream, struct stream_batch *batch)
{
    uint32_t count;
    TRY(original->next(stream, batch));
    const struct set_stream_file *files = set_stream_files(stream, batch, &count);
    for (uint32_t i = 0; i < count; i++)
        if (is_refused(batch->numbers[files[i].index]))
            const_cast<struct set_stream_file *>(files)[i].size = 100;
    handed_on += count;
    watch_places(stream, batch);
    return STATUS_OK;
}

/* Opens a stream on the device. `decoder` may be NULL. */
static struct stream *open_device(const struct trial *trial, const struct dataset *dataset,
                                  struct image_decoder *decoder)
{
    const struct device_stream_request request = {.decoder = decoder,
                                                  .res = trial->res,
                                                  .channels = trial->channels,
                                                  .chunk = trial->chunk,
                                                  .capacity = trial->batch,
                                                  .sample_bytes = bytes_of(trial),
                                                  .by_epoch = trial->by_epoch,
                                                  .ahead = 2,
                                                  .held = 1,
                                                  .resident_bytes = trial->device_bytes};
    struct stream *host = open_host(trial, dataset, true), *stream;
    original = host->type;
    watching = *host->type;
    watching.next = watch_next;
    host->type = &watching;
    must(device_stream_open(host, &request, &stream));
    return stream;
}

/* The samples of one or two epochs, by epoch and number. */
struct record {
    std::map<std::pair<uint64_t, uint32_t>, std::vector<uint8_t>> values;
    std::map<std::pair<uint64_t, uint32_t>, int32_t> labels;
    uint64_t masked;
};

static void add(struct record *record, const struct stream_batch *batch, const uint8_t *values,
                const int32_t *labels)
{
    const size_t bytes = batch->samples.stride;
    for (uint32_t i = 0; i < batch->samples.count; i++) {
        const std::pair<uint64_t, uint32_t> key = {batch->epoch, batch->numbers[i]};
        record->values[key] = std::vector<uint8_t>(values + i * bytes, values + (i + 1) * bytes);
        record->labels[key] = labels[i];
    }
    record->masked += batch->masked;
}

/* Takes the samples of the host stream, which libjpeg decodes. */
static struct record take_host(struct trial trial, const struct dataset *dataset)
{
    struct record record = {};
    trial.threads = 4;
    struct stream *stream = open_host(&trial, dataset, false);
    for (uint32_t i = 0; i < EPOCHS * steps_of(&trial); i++) {
        struct stream_batch batch;
        must(stream_next(stream, &batch));
        add(&record, &batch, static_cast<const uint8_t *>(batch.samples.values), batch.labels);
        must(stream_release(stream, &batch, NULL));
    }
    stream_close(stream);
    return record;
}

/* ---- A consumer ---- */

enum order_fault { NO_FAULT, RELEASED_EARLY, NOT_WAITED };

/* A consumer that enqueues steps without waiting for the device. */
struct consumer {
    cudaStream_t steps, hasty;
    cudaEvent_t done;
    uint32_t taken, room; /* batches */
    size_t batch_bytes;
    uint64_t slow_ns; /* duration of three of four steps; 0: most steps take no time, others up to 2 ms */
    uint8_t *copies;  /* pinned memory for `room` batches */
    int32_t *labels;  /* pinned memory; labels of the device */
    std::vector<struct stream_batch> batches;
    std::vector<std::vector<uint32_t>> numbers;
    std::vector<std::vector<int32_t>> host_labels;
};

static void open_consumer(struct consumer *self, const struct trial *trial, uint32_t room)
{
    self->room = room;
    self->slow_ns = trial->slow_ns;
    self->batch_bytes = trial->batch * bytes_of(trial);
    must(cudaStreamCreateWithFlags(&self->steps, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&self->hasty, cudaStreamNonBlocking));
    must(cudaEventCreateWithFlags(&self->done, cudaEventDisableTiming));
    must(cudaMallocHost(&self->copies, room * self->batch_bytes));
    must(cudaMallocHost(&self->labels, room * trial->batch * sizeof *self->labels));
}

static void close_consumer(struct consumer *self)
{
    must(cudaStreamSynchronize(self->steps));
    must(cudaStreamSynchronize(self->hasty));
    must(cudaFreeHost(self->copies));
    must(cudaFreeHost(self->labels));
    must(cudaEventDestroy(self->done));
    must(cudaStreamDestroy(self->steps));
    must(cudaStreamDestroy(self->hasty));
}

/* Enqueues a step that takes a while, copies the batch and overwrites it; and releases the batch. */
static void use(struct consumer *self, struct stream *stream, const struct stream_batch *batch,
                enum order_fault fault)
{
    const struct batch *samples = &batch->samples;
    void *values = const_cast<void *>(samples->values);
    const cudaStream_t reads = fault == NOT_WAITED ? self->hasty : self->steps;
    const uint32_t at = self->taken++, capacity = (uint32_t)(self->batch_bytes / samples->stride);
    self->batches.push_back(*batch);
    self->numbers.emplace_back(batch->numbers, batch->numbers + samples->count);
    self->host_labels.emplace_back(batch->labels, batch->labels + samples->count);
    if (fault != NOT_WAITED)
        must(cudaStreamWaitEvent(self->steps, static_cast<cudaEvent_t>(batch->ready), 0));
    if (fault == RELEASED_EARLY)
        must(stream_release(stream, batch, NULL));
    spin_kernel<<<1, 1, 0, self->steps>>>(self->slow_ns && at % 4 != 3 ? self->slow_ns
                                          : drawn(4, at, 0) % 3        ? 0
                                                                       : drawn(4, at, 1) % 2000000);
    must(cudaMemcpyAsync(self->copies + at * self->batch_bytes, values, samples->bytes,
                         cudaMemcpyDeviceToHost, reads));
    must(cudaMemcpyAsync(self->labels + (size_t)at * capacity, samples->labels,
                         samples->count * sizeof *samples->labels, cudaMemcpyDeviceToHost, reads));
    must(cudaMemsetAsync(values, POISON, samples->bytes, reads));
    if (fault == NOT_WAITED)
        must(cudaStreamWaitEvent(self->steps, static_cast<cudaEvent_t>(batch->ready), 0));
    must(cudaGetLastError());
    must(cudaEventRecord(self->done, self->steps));
    if (fault != RELEASED_EARLY)
        must(stream_release(stream, batch, self->done));
}

/* Takes a batch from the stream and uses it. */
static enum status step(struct consumer *self, struct stream *stream, enum order_fault fault)
{
    struct stream_batch batch;
    must_have(self->taken < self->room ? self : NULL);
    TRY(stream_next(stream, &batch));
    use(self, stream, &batch, fault);
    return STATUS_OK;
}

/* Waits for all steps, and returns their samples. Labels must be the same on the host and on the device. */
static struct record results(struct consumer *self)
{
    struct record record = {};
    must(cudaStreamSynchronize(self->steps));
    must(cudaStreamSynchronize(self->hasty));
    for (uint32_t i = 0; i < self->taken; i++) {
        struct stream_batch *batch = &self->batches[i];
        const size_t capacity = batch->samples.stride ? self->batch_bytes / batch->samples.stride : 0;
        batch->numbers = self->numbers[i].data();
        add(&record, batch, self->copies + i * self->batch_bytes, self->host_labels[i].data());
        if (memcmp(self->labels + i * capacity, self->host_labels[i].data(),
                   batch->samples.count * sizeof(int32_t)) != 0)
            record.masked = UINT64_MAX / 2; /* no caller expects this number */
    }
    return record;
}

static struct stream_stats taken; /* of the latest stream of take_device(), after its last batch */
static uint64_t grown;            /* by how much its memory on the device grew after the first epoch */

static struct record take_device(const struct trial *trial, const struct dataset *dataset,
                                 struct image_decoder *decoder, enum order_fault fault)
{
    struct consumer consumer = {};
    const uint32_t steps = EPOCHS * steps_of(trial);
    struct stream *stream = open_device(trial, dataset, decoder);
    open_consumer(&consumer, trial, steps);
    for (uint32_t i = 0; i < steps; i++) {
        must(step(&consumer, stream, fault));
        if (i + 1 == steps_of(trial))
            grown = device_stream_memory_bytes(stream);
    }
    const struct record record = results(&consumer);
    stream_stats(stream, &taken);
    grown = device_stream_memory_bytes(stream) - grown;
    stream_close(stream);
    close_consumer(&consumer);
    return record;
}

/* ---- Comparison ---- */

struct comparison {
    uint64_t wrong; /* samples */
    int largest;    /* difference of two bytes */
};

/* Compares samples of the device with those of the host. Samples of CPU threads must be equal. Refused files
 * must be zeros with the label STREAM_MASKED. */
static struct comparison compare(const struct trial *trial, const struct record *right,
                                 const struct record *found, uint32_t tolerance)
{
    struct comparison result = {};
    for (const auto &[key, values] : found->values) {
        const bool device = set_stream_on_device(key.second, trial->share);
        const bool jpeg = kind_of(trial->files, key.second % trial->files->count) < PNG_FILE;
        const bool refused = device && jpeg && is_refused(key.second);
        const std::vector<uint8_t> &wanted = right->values.at(key);
        const int32_t label = refused ? STREAM_MASKED : right->labels.at(key);
        int largest = 0;
        for (size_t i = 0; i < values.size(); i++) {
            const int apart = abs((int)values[i] - (refused ? 0 : (int)wanted[i]));
            largest = apart > largest ? apart : largest;
        }
        const int most = device && jpeg && !refused ? (int)tolerance : 0;
        result.wrong += largest > most || found->labels.at(key) != label;
        result.largest = largest > result.largest ? largest : result.largest;
    }
    return result;
}

static std::string text_of(const struct trial *trial, const char *decoder)
{
    char text[160];
    snprintf(text, sizeof text, "%s, %s, %s %u^2 x %u, share %g, batch %u, %d threads", decoder,
             trial->files->name, fit_names[trial->how], trial->res, trial->channels, trial->share,
             trial->batch, trial->threads);
    return text;
}

/* ---- Cases ---- */

static double share_for(const struct image_decoder *decoder, double share)
{
    return decoder->kind == DECODER_CPU ? 0 : share;
}

static const struct files some = {"some", 300, 40, 190, 0}, tiny = {"tiny", 120, 8, 60, 0},
                          spoilt = {"broken", 150, 40, 120, 23}, large = {"large", 3, 6800, 6850, 0};

static const uint32_t batches[] = {1, 3, 61, 256};
static const int threads[] = {1, 4, 16};
static const double shares[] = {0, 0.3, 1};
static const uint32_t chunks[] = {0, 7, 64};
static const struct trial sets[] = {
    {&some, FIT_RESIZE, 64, 3}, {&some, FIT_CROP, 33, 3}, {&some, FIT_RANDOM_RESIZED_CROP, 57, 3},
    {&tiny, FIT_RESIZE, 41, 1}, {&some, FIT_CROP, 40, 1}, {&tiny, FIT_RANDOM_RESIZED_CROP, 224, 3}};

/* Compares with the host, and runs of the same samples with each other. */
static void compare_all(struct image_decoder *decoder)
{
    const uint32_t tolerance = image_decoder_tolerance(decoder->kind);
    uint32_t run = 0;
    for (size_t s = 0; s < (brief ? 2 : COUNT_OF(sets)); s++) {
        struct trial trial = sets[brief ? 2 + s : s];
        struct dataset dataset;
        trial.seed = 5;
        trial.batch = 64;
        open_files(trial.files, &dataset);
        const struct record right = take_host(trial, &dataset);
        const size_t end = decoder->kind == DECODER_CPU ? 1 : brief ? 2 : COUNT_OF(shares);
        for (size_t i = brief && end > 1 ? 1 : 0; i < end; i++) {
            struct record first;
            trial.share = share_for(decoder, shares[i]);
            for (uint32_t repeat = 0; repeat < (brief ? 1 : 3); repeat++, run++) {
                trial.batch = brief ? 61 : batches[run % COUNT_OF(batches)];
                trial.threads = threads[run / 2 % COUNT_OF(threads)];
                trial.chunk = chunks[run % COUNT_OF(chunks)];
                handed_on = 0;
                const struct record found = take_device(&trial, &dataset, decoder, NO_FAULT);
                const struct comparison result = compare(&trial, &right, &found, tolerance);
                if (repeat == 0)
                    first = found;
                const bool same = first.values == found.values && first.labels == found.labels;
                const bool decoded = (handed_on > 0) == (trial.share > 0);
                tell(result.wrong == 0 && found.masked == 0 && same && decoded &&
                         found.values.size() == EPOCHS * trial.files->count,
                     text_of(&trial, decoder_names[decoder->kind]) + ": " + std::to_string(result.wrong) +
                         " wrong, largest difference " + std::to_string(result.largest) + ", " +
                         std::to_string(handed_on) + " files on the device" +
                         (same ? "" : ", other bits than before"));
            }
        }
        dataset_close(&dataset);
    }
}

/* The comparison must find other crops, a missing difference of one, and samples in each other's places. */
static void plant_differences(struct image_decoder *decoder)
{
    struct trial trial = sets[2];
    struct dataset dataset;
    trial.batch = 61;
    trial.threads = 4;
    trial.share = share_for(decoder, 0.3);
    trial.seed = 6;
    open_files(trial.files, &dataset);
    const uint32_t tolerance = image_decoder_tolerance(decoder->kind);
    const struct record right = take_host(trial, &dataset);
    struct record found = take_device(&trial, &dataset, decoder, NO_FAULT);
    trial.seed = 5;
    const struct record others = take_host(trial, &dataset);
    const uint64_t crops = compare(&trial, &others, &found, tolerance).wrong;
    tell(2 * crops > found.values.size(), "planted fault: crops of another seed: " + std::to_string(crops) +
                                              " of " + std::to_string(found.values.size()) + " wrong");
    auto one = found.values.begin(), two = std::next(one);
    std::swap(one->second, two->second);
    const uint64_t swapped = compare(&trial, &right, &found, tolerance).wrong;
    tell(swapped == 2,
         "planted fault: two samples in each other's places: " + std::to_string(swapped) + " wrong");
    std::swap(one->second, two->second);
    one->second[7] = (uint8_t)(right.values.at(one->first)[7] ^ 4);
    found.labels.rbegin()->second++;
    const uint64_t changed = compare(&trial, &right, &found, tolerance).wrong;
    tell(changed == 2, "planted fault: one byte and one label: " + std::to_string(changed) + " wrong");
    dataset_close(&dataset);
}

/* Slow steps: the host, the engines and the copies are ahead of the steps as far as they can. With `several`,
 * each batch has several chunks of files. */
static void provoke(struct image_decoder *decoder, bool several, enum order_fault fault)
{
    static const char *const names[] = {"", ", planted fault: batch released too early",
                                        ", planted fault: step does not wait"};
    struct trial trial = sets[0];
    struct dataset dataset;
    trial.batch = 32;
    trial.chunk = several ? 5 : 0;
    trial.threads = 8;
    trial.share = share_for(decoder, several ? 1 : 0.5);
    trial.slow_ns = 30000000;
    trial.device_bytes = several ? trial.files->count / 2 * bytes_of(&trial) : 0;
    open_files(trial.files, &dataset);
    const struct record right = take_host(trial, &dataset);
    const struct record found = take_device(&trial, &dataset, decoder, fault);
    const struct comparison result = compare(&trial, &right, &found, image_decoder_tolerance(decoder->kind));
    tell((fault == NO_FAULT) == (result.wrong == 0), std::string("order, ") + decoder_names[decoder->kind] +
                                                         (several ? ", several chunks" : "") + names[fault] +
                                                         ": " + std::to_string(result.wrong) + " of " +
                                                         std::to_string(found.values.size()) + " wrong");
    dataset_close(&dataset);
}

/* Broken files of both kinds: those that a CPU thread finds, and those that nvJPEG refuses. */
static void mask_broken(struct image_decoder *decoder)
{
    struct trial trial = {&spoilt, FIT_RANDOM_RESIZED_CROP, 33, 3, 16, share_for(decoder, 0.6), 4, 5, true};
    struct dataset dataset;
    uint64_t broken = 0;
    open_files(trial.files, &dataset);
    const struct record right = take_host(trial, &dataset);
    refuse = 11;
    for (uint32_t n = 0; n < trial.files->count; n++) {
        const enum kind kind = kind_of(trial.files, n);
        broken +=
            kind == TRUNCATED || (kind < PNG_FILE && is_refused(n) && set_stream_on_device(n, trial.share));
    }
    struct record found;
    struct comparison result = {};
    for (uint32_t round = 0; round < (decoder->kind != DECODER_HYBRID ? 1 : brief ? 3 : 20); round++) {
        trial.batch = round % 2 ? 64 : 16; /* all files of a batch with a refused one are decoded again */
        found = take_device(&trial, &dataset, decoder, NO_FAULT);
        result.wrong += compare(&trial, &right, &found, image_decoder_tolerance(decoder->kind)).wrong;
    }
    refuse = 0;
    const uint64_t unmasked = compare(&trial, &right, &found, image_decoder_tolerance(decoder->kind)).wrong;
    tell(result.wrong == 0 && found.masked == EPOCHS * broken &&
             (found.masked > right.masked) == (trial.share > 0),
         std::string("masked, ") + decoder_names[decoder->kind] + ": " + std::to_string(result.wrong) +
             " wrong, " + std::to_string(found.masked) + " masked, " + std::to_string(right.masked) +
             " of them by the host");
    if (trial.share > 0)
        tell(unmasked == found.masked - right.masked,
             "planted fault: masked samples that should not be: " + std::to_string(unmasked) + " wrong");
    dataset_close(&dataset);
}

/* Returns the first step of an epoch that has one of the samples for which `broken` is set. */
static uint32_t first_step(const struct trial *trial, uint32_t epoch, const std::vector<bool> &broken)
{
    std::vector<uint32_t> numbers(trial->batch);
    for (uint32_t i = 0; i < steps_of(trial); i++) {
        const uint32_t count = list(trial, epoch, i, numbers.data());
        for (uint32_t j = 0; j < count; j++)
            if (broken[numbers[j]])
                return i;
    }
    return UINT32_MAX;
}

/* Takes batches until the stream fails or `most` were taken. Returns their number. */
static uint32_t take_until(struct consumer *consumer, struct stream *stream, uint32_t most,
                           enum status *status)
{
    uint32_t steps = 0;
    while (steps < most && (*status = step(consumer, stream, NO_FAULT)) == STATUS_OK)
        steps++;
    return steps;
}

/* Without masks, the step of the first broken sample fails, and all steps before it are right. The failure is
 * repeated. A seek ends it: another epoch fails at its own step. */
static void fail_broken(struct image_decoder *decoder, bool by_device)
{
    struct trial trial = {by_device ? &some : &spoilt, FIT_RESIZE, 33, 3, 5, share_for(decoder, 0.6), 4, 5};
    trial.device_bytes = UINT64_MAX;
    struct dataset dataset;
    struct consumer consumer = {};
    std::vector<bool> broken(trial.files->count);
    open_files(trial.files, &dataset);
    refuse = by_device ? 97 : 0;
    for (uint32_t n = 0; n < trial.files->count; n++)
        broken[n] = by_device ? kind_of(trial.files, n) < PNG_FILE && is_refused(n) &&
                                    set_stream_on_device(n, trial.share)
                              : kind_of(trial.files, n) == TRUNCATED;
    struct stream *stream = open_device(&trial, &dataset, decoder);
    open_consumer(&consumer, &trial, EPOCHS * steps_of(&trial));
    uint32_t wrong_steps = 0;
    bool repeated = true;
    std::string text;
    for (uint32_t epoch = 0; epoch < EPOCHS; epoch++) {
        enum status status, again = STATUS_OK;
        must(stream_seek(stream, {epoch, 0}));
        const uint32_t steps = take_until(&consumer, stream, steps_of(&trial), &status);
        text = status_text();
        take_until(&consumer, stream, 1, &again);
        repeated &= status == STATUS_FAILED && again == status && text == status_text();
        wrong_steps += steps != first_step(&trial, epoch, broken);
    }
    trial.masks = true; /* so that the host continues */
    refuse = 0;
    const struct record right = take_host(trial, &dataset), found = results(&consumer);
    const struct comparison result = compare(&trial, &right, &found, image_decoder_tolerance(decoder->kind));
    tell(wrong_steps == 0 && repeated && text.find(".jpg") != std::string::npos && result.wrong == 0,
         std::string("fails, ") + decoder_names[decoder->kind] +
             (by_device ? ", by nvJPEG" : ", by the host") + ": " + std::to_string(wrong_steps) +
             " wrong steps" + (repeated ? "" : ", not repeated") + ": " + text.substr(0, 150));
    stream_close(stream);
    close_consumer(&consumer);
    dataset_close(&dataset);
}

/* Seeks forwards, backwards and to the current position, refused seeks, a cancel, and a plan that is known
 * epoch by epoch. */
static void jump(struct image_decoder *decoder, bool by_epoch)
{
    struct trial trial = {&some,   FIT_RANDOM_RESIZED_CROP, 57, 3, 16, share_for(decoder, 0.6), 4, 5, false,
                          by_epoch};
    trial.device_bytes = by_epoch ? UINT64_C(3) << 20 : 0; /* about half of the images */
    const struct stream_position to[] = {{0, 0}, {1, 3}, {0, 7}, {0, 8}, {1, steps_of(&trial) - 1}, {0, 2}};
    struct dataset dataset;
    struct consumer consumer = {};
    struct stream_batch batch;
    enum status status = STATUS_OK;
    uint32_t wrong = 0;
    open_files(trial.files, &dataset);
    const struct record right = take_host(trial, &dataset);
    struct stream *stream = open_device(&trial, &dataset, decoder);
    open_consumer(&consumer, &trial, 3 * steps_of(&trial));
    for (const struct stream_position &at : to) {
        must(stream_seek(stream, at));
        const uint32_t taken = consumer.taken;
        take_until(&consumer, stream, at.epoch == 0 ? 1 : at.step == 3 ? 4 : 1, &status);
        wrong += status != STATUS_OK || consumer.batches[taken].epoch != at.epoch ||
                 consumer.batches[taken].step != at.step;
        wrong +=
            stream_seek(stream, {0, steps_of(&trial)}) != STATUS_USAGE; /* the position does not change */
        take_until(&consumer, stream, at.step + 1 == steps_of(&trial) ? 0 : 1, &status);
        wrong += status != STATUS_OK || (at.epoch == 0 && consumer.batches.back().step != at.step + 1);
    }
    must(stream_next(stream, &batch));
    wrong += stream_seek(stream, {0, 0}) != STATUS_OK; /* a batch is held, and stays valid */
    must(stream_release(stream, &batch, NULL));
    wrong += stream_release(stream, &batch, NULL) != STATUS_USAGE;
    std::thread canceller([stream] {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        stream_cancel(stream);
    });
    take_until(&consumer, stream, steps_of(&trial), &status);
    canceller.join();
    wrong += stream_next(stream, &batch) != STATUS_FAILED;
    must(stream_seek(stream, {0, 0}));
    latest_listed = 0;
    take_until(&consumer, stream, steps_of(&trial), &status);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    wrong += status != STATUS_OK || (latest_listed == 0) != by_epoch;
    const struct record found = results(&consumer);
    const struct comparison result = compare(&trial, &right, &found, image_decoder_tolerance(decoder->kind));
    struct stream_stats stats;
    stream_stats(stream, &stats);
    wrong += stats.batches < consumer.taken || stats.memory_bytes <= device_stream_memory_bytes(stream) ||
             stats.wait_s <= 0 || stats.bytes == 0;
    tell(wrong == 0 && result.wrong == 0, std::string("seeks and cancels, ") + decoder_names[decoder->kind] +
                                              (by_epoch ? ", by epoch" : "") + ": " + std::to_string(wrong) +
                                              " wrong results, " + std::to_string(result.wrong) +
                                              " wrong samples");
    stream_close(stream);
    close_consumer(&consumer);
    dataset_close(&dataset);
}

static size_t count_threads(void)
{
    size_t threads = 0;
    for (const auto &task : std::filesystem::directory_iterator("/proc/self/task"))
        threads += task.exists();
    return threads;
}

/* Opens and closes streams in the middle of an epoch. The memory of the device and the number of threads must
 * not grow after the first openings. */
static void open_often(struct image_decoder *decoder)
{
    struct trial trial = {&some, FIT_RESIZE, 57, 3, 61, share_for(decoder, 0.6), 4, 5};
    trial.device_bytes = UINT64_MAX;
    const uint32_t rounds = brief ? 6 : 200;
    size_t free_first = 0, free_last = 0, all = 0, threads_first = 0, threads_last = 0;
    struct dataset dataset;
    open_files(trial.files, &dataset);
    for (uint32_t round = 0; round < rounds; round++) {
        struct consumer consumer = {};
        enum status status = STATUS_OK;
        struct stream *stream = open_device(&trial, &dataset, decoder);
        open_consumer(&consumer, &trial, 8);
        take_until(&consumer, stream, round % 4, &status);
        must(status);
        must(cudaStreamSynchronize(consumer.steps));
        stream_close(stream);
        close_consumer(&consumer);
        must(cudaMemGetInfo(&free_last, &all));
        threads_last = count_threads();
        if (round == (brief ? 3 : 20)) {
            free_first = free_last;
            threads_first = threads_last;
        }
    }
    const double grown = (double)free_first - (double)free_last;
    char text[192];
    snprintf(text, sizeof text, "%u openings, %s: %+.1f MB of %.0f MB of device memory, %+d threads", rounds,
             decoder_names[decoder->kind], 1e-6 * grown, 1e-6 * (double)(all - free_last),
             (int)threads_last - (int)threads_first);
    tell(grown <= 0.01 * (double)(all - free_last) && threads_last <= threads_first, text);
    dataset_close(&dataset);
}

/* Returns how many samples can stay on the device: those that are not broken. */
static uint32_t count_whole(const struct trial *trial)
{
    uint32_t whole = 0;
    for (uint32_t n = 0; n < trial->files->count; n++) {
        const enum kind kind = kind_of(trial->files, n);
        whole +=
            kind != TRUNCATED && !(kind < PNG_FILE && is_refused(n) && set_stream_on_device(n, trial->share));
    }
    return whole;
}

/* Returns whether the number of samples that were left out of batches is right if `kept` samples stay.
 * Batches that were listed before a sample was kept have its values; so have copies that another decoder
 * decodes. Batches of the next epoch are prepared, too. */
static bool right_left_out(const struct trial *trial, uint64_t kept)
{
    const uint32_t copies = trial->copies ? trial->copies : 1, ahead = 6 * trial->batch;
    const bool same = copies == 1 || trial->share == 0 || trial->share == 1;
    const uint64_t most = kept ? kept * (EPOCHS * copies - 1) + ahead : 0,
                   least = same && kept > 1 ? kept * (EPOCHS - 1) * copies : kept > 0;
    return left_out <= most && left_out + (kept > 1 ? ahead : 0) >= least;
}

/* Samples that stay on the device: batches must be the same, whatever fits, and the host must read only the
 * rest. With random crops, whole images stay, and their number is known only if there is room for all. */
static void stay(struct image_decoder *decoder)
{
    const uint64_t all = UINT64_MAX;
    const struct {
        struct trial trial;
        uint64_t kept; /* samples; with random crops, KB */
    } cases[] = {
        {{&some, FIT_RESIZE, 64, 3, 32, 0.5, 4}, 0},
        {{&some, FIT_RESIZE, 64, 3, 32, 0.5, 16}, 1},
        {{&some, FIT_RESIZE, 64, 3, 32, 0.5, 4}, 150},
        {{&some, FIT_RESIZE, 64, 3, 61, 1, 16}, all},
        {{&some, FIT_RESIZE, 57, 3, 7, 0.5, 1}, 299},
        {{&tiny, FIT_RESIZE, 41, 1, 5, 0.5, 4}, all},
        {{&tiny, FIT_RESIZE, 34, 1, 16, 0.5, 4, .copies = 3}, 60},
        {{&spoilt, FIT_RESIZE, 33, 3, 8, 0.6, 4, .masks = true}, all},
        {{&some, FIT_RANDOM_RESIZED_CROP, 57, 3, 32, 0.5, 4, 5}, 120},
        {{&some, FIT_RANDOM_RESIZED_CROP, 57, 3, 61, 1, 16, 5, .chunk = 7}, 6000},
        {{&some, FIT_RANDOM_RESIZED_CROP, 57, 3, 32, 0.5, 16, 5}, all},
        {{&some, FIT_CROP, 33, 1, 7, 0.5, 1, 5}, all},
        {{&tiny, FIT_RANDOM_RESIZED_CROP, 224, 3, 16, 0.5, 4, 5, .copies = 3}, all},
        {{&spoilt, FIT_RANDOM_RESIZED_CROP, 33, 3, 8, 0.6, 4, 5, .masks = true}, all},
    };
    for (const auto &item : cases) {
        struct trial trial = item.trial;
        struct dataset dataset;
        const bool crops = trial.how != FIT_RESIZE;
        trial.share = share_for(decoder, trial.share);
        trial.device_bytes = crops             ? (item.kept == all ? 64 << 10 : item.kept) << 10
                             : item.kept < all ? item.kept * bytes_of(&trial) + 7
                                               : all;
        refuse = trial.masks ? 11 : 0;
        const uint64_t whole = count_whole(&trial), kept = item.kept < whole ? item.kept : whole;
        open_files(trial.files, &dataset);
        const struct record right = take_host(trial, &dataset);
        left_out = 0;
        const struct record found = take_device(&trial, &dataset, decoder, NO_FAULT);
        const struct comparison result =
            compare(&trial, &right, &found, image_decoder_tolerance(decoder->kind));
        const uint64_t stayed = taken.resident_device;
        tell(result.wrong == 0 && found.values.size() == (size_t)EPOCHS * samples_of(&trial) &&
                 right_left_out(&trial, stayed) && (grown == 0 || trial.share > 0 || crops) &&
                 (crops && item.kept < all ? stayed > 0 && stayed < whole : stayed == kept),
             std::string("stay, ") + text_of(&trial, decoder_names[decoder->kind]) + ": " +
                 std::to_string(result.wrong) + " wrong, largest difference " +
                 std::to_string(result.largest) + ", " + std::to_string(stayed) + " of " +
                 std::to_string(whole) + " samples stay, " + std::to_string(left_out) + " not read again");
        refuse = 0;
        exchange = true;
        left_out = 0;
        if (!brief && item.kept == all && !trial.copies && !trial.masks) {
            const struct record exchanged = take_device(&trial, &dataset, decoder, NO_FAULT);
            const uint64_t wrong =
                compare(&trial, &right, &exchanged, image_decoder_tolerance(decoder->kind)).wrong;
            tell(2 * wrong > left_out && wrong <= left_out,
                 "planted fault: exchanged samples: " + std::to_string(wrong) + " of " +
                     std::to_string(left_out) + " wrong");
        }
        exchange = false;
        dataset_close(&dataset);
    }
}

/* Images of 150 MB: each is a chunk of its own, and the scratch areas grow. */
static void decode_large(struct image_decoder *decoder)
{
    struct trial trial = {&large, FIT_RANDOM_RESIZED_CROP, 96, 3, 3, share_for(decoder, 1), 4, 5};
    struct dataset dataset;
    open_files(trial.files, &dataset);
    const struct record right = take_host(trial, &dataset);
    const struct record found = take_device(&trial, &dataset, decoder, NO_FAULT);
    const struct comparison result = compare(&trial, &right, &found, image_decoder_tolerance(decoder->kind));
    tell(result.wrong == 0, text_of(&trial, decoder_names[decoder->kind]) + ": " +
                                std::to_string(result.wrong) + " wrong, largest difference " +
                                std::to_string(result.largest));
    dataset_close(&dataset);
}

/* ---- Times ---- */

#define TIMED_BATCH  256
#define TIMED_EPOCHS 8

static uint32_t timed_samples;

/* Implements stream_plan.list. */
static uint32_t list_timed(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    (void)context;
    const struct draw_order order = draw_order(3, (uint32_t)epoch, timed_samples);
    for (uint32_t i = 0; i < TIMED_BATCH; i++)
        numbers[i] = draw_order_at(&order, (uint32_t)step * TIMED_BATCH + i);
    return TIMED_BATCH;
}

static double seconds_of(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Takes the batches of an epoch. The consumer waits only for the events. */
static void take_epoch(struct stream *stream, uint64_t steps, cudaStream_t consumer, cudaEvent_t done)
{
    for (uint64_t i = 0; i < steps; i++) {
        struct stream_batch batch;
        must(stream_next(stream, &batch));
        must(cudaStreamWaitEvent(consumer, static_cast<cudaEvent_t>(batch.ready), 0));
        must(cudaEventRecord(done, consumer));
        must(stream_release(stream, &batch, done));
    }
    must(cudaStreamSynchronize(consumer));
}

/* Measures the epochs after the first one. */
static void time_stream(const struct dataset *dataset, uint64_t device_bytes)
{
    struct set_stream_request request = {};
    struct stream *host, *stream;
    cudaStream_t consumer;
    cudaEvent_t done;
    const std::vector<uint32_t> labels(dataset->sample_count);
    request.dataset = dataset;
    must(set_stream_find_shape(&request));
    request.plan = {timed_samples / TIMED_BATCH, TIMED_BATCH, list_timed, NULL, false};
    request.labels = labels.data();
    request.threads = 16;
    request.ahead = 4;
    request.held = DEVICE_STREAM_HELD;
    request.device_bytes = device_bytes;
    request.allocate = device_stream_pin;
    request.deallocate = device_stream_unpin;
    const size_t bytes =
        (size_t)request.channels * request.depth * request.height * request.width * dtype_bytes(request.type);
    must(set_stream_open(&request, &host));
    const struct device_stream_request to = {.capacity = TIMED_BATCH,
                                             .sample_bytes = bytes,
                                             .ahead = 4,
                                             .held = 1,
                                             .resident_bytes = device_bytes};
    must(device_stream_open(host, &to, &stream));
    must(cudaStreamCreateWithFlags(&consumer, cudaStreamNonBlocking));
    must(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    take_epoch(stream, request.plan.steps, consumer, done);
    struct stream_stats first, last;
    stream_stats(stream, &first);
    const double begin_s = seconds_of(CLOCK_MONOTONIC), own_s = seconds_of(CLOCK_THREAD_CPUTIME_ID),
                 all_s = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    for (uint32_t epoch = 1; epoch <= TIMED_EPOCHS; epoch++)
        take_epoch(stream, request.plan.steps, consumer, done);
    const double batches = (double)TIMED_EPOCHS * (double)request.plan.steps,
                 took_s = seconds_of(CLOCK_MONOTONIC) - begin_s;
    stream_stats(stream, &last);
    printf(
        "%6llu resident: %9.0f samples/s, %7.1f us per batch, %5.0f GB/s; CPU time per batch: consumer %.1f "
        "us, all threads %.1f us; %.0f MB read per epoch, %+lld bytes of memory\n",
        (unsigned long long)last.resident_device, batches * TIMED_BATCH / took_s, 1e6 * took_s / batches,
        1e-9 * (double)bytes * TIMED_BATCH * batches / took_s,
        1e6 * (seconds_of(CLOCK_THREAD_CPUTIME_ID) - own_s) / batches,
        1e6 * (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - all_s) / batches,
        1e-6 * (double)(last.bytes - first.bytes) / TIMED_EPOCHS,
        (long long)(last.memory_bytes - first.memory_bytes));
    stream_close(stream);
    must(cudaEventDestroy(done));
    must(cudaStreamDestroy(consumer));
}

/* Prints how long a copy of the bytes of a batch takes, from pinned memory and within the device. */
static void time_copies(size_t bytes)
{
    for (const bool within : {false, true}) {
        const uint32_t rounds = 50;
        void *from, *to;
        must(within ? cudaMalloc(&from, bytes) : cudaMallocHost(&from, bytes));
        must(cudaMalloc(&to, bytes));
        must(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
        must(cudaDeviceSynchronize());
        const double begin_s = seconds_of(CLOCK_MONOTONIC);
        for (uint32_t i = 0; i < rounds; i++)
            must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, 0));
        must(cudaDeviceSynchronize());
        printf("a copy of %.1f MB %s takes %.1f us\n", 1e-6 * (double)bytes,
               within ? "within the device" : "from pinned memory",
               1e6 * (seconds_of(CLOCK_MONOTONIC) - begin_s) / rounds);
        must(within ? cudaFree(from) : cudaFreeHost(from));
        must(cudaFree(to));
    }
}

/* Writes shards of arrays of 3 x 224 x 224 bytes. */
static void write_raw(const std::string &path)
{
    const uint32_t shards = 8, samples = 1024, bytes = 3 * 224 * 224;
    std::string header = "{'descr': '|u1', 'fortran_order': False, 'shape': (3, 224, 224), }";
    header.resize(117, ' ');
    header = std::string("\x93NUMPY\1\0\x76\0", 10) + header + "\n"; /* 128 bytes */
    std::vector<uint8_t> values(bytes + TAR_BLOCK_BYTES);
    std::filesystem::create_directories(path);
    for (uint32_t s = 0; s < shards; s++) {
        FILE *file = static_cast<FILE *>(
            must_have(fopen((path + "/m-00000" + std::to_string(s) + ".tar").c_str(), "wb")));
        for (uint32_t i = 0; i < samples; i++) {
            uint8_t block[TAR_BLOCK_BYTES];
            const size_t size = header.size() + bytes, whole = (size + 511) / 512 * 512 - header.size();
            must(tar_header(block, (std::to_string(100000 + s * samples + i) + ".npy").c_str(), size));
            memset(values.data(), (int)(i % 251), bytes);
            must_have(fwrite(block, sizeof block, 1, file) && fwrite(header.data(), header.size(), 1, file) &&
                              fwrite(values.data(), whole, 1, file)
                          ? file
                          : NULL);
        }
        std::vector<uint8_t> end(2 * TAR_BLOCK_BYTES);
        must_have(fwrite(end.data(), end.size(), 1, file) && fclose(file) == 0 ? file : NULL);
    }
}

static void time_folder(const char *path)
{
    struct members choice;
    struct dataset dataset;
    struct set_stream_request request = {};
    must(members_parse(NULL, NULL, NULL, &choice));
    must(dataset_open(path, false, &choice, NULL, &dataset));
    timed_samples = dataset.sample_count / TIMED_BATCH * TIMED_BATCH;
    must_have(timed_samples ? &dataset : NULL);
    request.dataset = &dataset;
    must(set_stream_find_shape(&request));
    const size_t bytes =
        (size_t)request.channels * request.depth * request.height * request.width * dtype_bytes(request.type);
    printf("%u samples of %zu bytes\n", timed_samples, bytes);
    time_copies(TIMED_BATCH * bytes);
    for (const uint64_t kept : {0u, 1u, timed_samples / 2, timed_samples})
        time_stream(&dataset, kept * bytes);
    dataset_close(&dataset);
}

/* Times changes of colour of TIMED_BATCH images of 3 x 224 x 224, all of which are changed. The bound is the
 * time in which a copy on the device moves the bytes of an image that the kernels must read and write. */
static void time_changes(void)
{
    static const struct {
        const char *name;
        struct jitter jitter;
        uint32_t passes; /* reads and writes of an image */
    } cases[] = {
        {"brightness", {1, {0.6f, 1, 1, 0}, {1.4f, 1, 1, 0}, 0, 0, 1, 1, 1}, 2},
        {"brightness, saturation, hue", {1, {0.6f, 1, 0.6f, -0.1f}, {1.4f, 1, 1.4f, 0.1f}, 0, 0, 1, 1, 1}, 2},
        {"all four", {1, {0.6f, 0.6f, 0.6f, -0.1f}, {1.4f, 1.4f, 1.4f, 0.1f}, 0, 0, 1, 1, 1}, 3},
        {"SimCLR: p 0.8, 0.2, blur 0.5",
         {0.8f, {0.2f, 0.2f, 0.2f, -0.2f}, {1.8f, 1.8f, 1.8f, 0.2f}, 0.2f, 0.5f, 23, 0.1f, 2},
         3},
        {"blur of 23 pixels", {0, {1, 1, 1, 0}, {1, 1, 1, 0}, 0, 1, 23, 0.1f, 2}, 2},
        {"blur of 9 pixels", {0, {1, 1, 1, 0}, {1, 1, 1, 0}, 0, 1, 9, 0.1f, 2}, 2},
    };
    const struct shape shape = {3, 1, 224, 224};
    const size_t bytes = TIMED_BATCH * shape_values(&shape);
    uint8_t *from, *to;
    uint32_t *numbers;
    void *memory;
    cudaEvent_t begin, end;
    float copy_ms = 0, ms = 0;
    must(cudaMalloc(&from, bytes));
    must(cudaMalloc(&to, bytes));
    must(cudaMalloc(&memory, jitter_batch_bytes(&shape, TIMED_BATCH)));
    must(cudaMalloc(&numbers, TIMED_BATCH * sizeof *numbers));
    must(cudaMemset(numbers, 0, TIMED_BATCH * sizeof *numbers));
    must(cudaMemset(from, 0x5b, bytes));
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
    for (size_t i = 0; i <= COUNT_OF(cases); i++) {
        struct jitter_batch batch;
        const bool copies = i == 0;
        if (!copies)
            must(jitter_batch_open(&cases[i - 1].jitter, &shape, 1, TIMED_BATCH, memory, &batch));
        for (uint32_t k = 0; k < 60; k++) {
            if (k == 10)
                must(cudaEventRecord(begin));
            if (copies)
                must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr));
            else
                must(jitter_batch_run(&batch, k, numbers, TIMED_BATCH, from, to, nullptr));
        }
        must(cudaEventRecord(end));
        must(cudaEventSynchronize(end));
        must(cudaEventElapsedTime(&ms, begin, end));
        copy_ms = copies ? ms : copy_ms;
        const double bound_ms = copies ? ms : copy_ms / 2 * cases[i - 1].passes;
        printf("%-30s %7.1f ns per image, %.2f of the bound\n", copies ? "copy" : cases[i - 1].name,
               1e6 * ms / 50 / TIMED_BATCH, bound_ms / ms);
    }
    must(cudaEventDestroy(begin));
    must(cudaEventDestroy(end));
    for (void *array :
         {static_cast<void *>(from), static_cast<void *>(to), static_cast<void *>(numbers), memory})
        must(cudaFree(array));
}

/* ---- Running all tests ---- */

static void test_decoder(enum decoder kind)
{
    struct image_decoder decoder = {};
    const enum status status = image_decoder_open(&decoder, kind);
    if (status == STATUS_UNAVAILABLE) {
        printf("skipped  %s: %s\n", decoder_names[kind], status_text());
        return;
    }
    must(status);
    compare_all(&decoder);
    provoke(&decoder, false, NO_FAULT);
    provoke(&decoder, true, NO_FAULT);
    stay(&decoder);
    mask_broken(&decoder);
    fail_broken(&decoder, false);
    if (kind != DECODER_CPU)
        fail_broken(&decoder, true);
    jump(&decoder, false);
    jump(&decoder, true);
    open_often(&decoder);
    if (!brief) {
        plant_differences(&decoder);
        provoke(&decoder, false, RELEASED_EARLY);
        provoke(&decoder, false, NOT_WAITED);
        decode_large(&decoder);
    }
    image_decoder_close(&decoder);
}

/* ---- Changes of colour ---- */

/* Returns the index in the output of value `at` of an image whose values are planes. */
static size_t ordered(const struct shape *shape, enum jitter_order order, size_t at)
{
    const size_t pixels = shape->height * shape->width, depth = shape->depth, channels = shape->channels;
    const size_t c = at / (depth * pixels), d = at / pixels % depth, pixel = at % pixels;
    return order == JITTER_PLANES   ? at
           : order == JITTER_FRAMES ? (d * channels + c) * pixels + pixel
                                    : (d * pixels + pixel) * channels + c;
}

/* Compares the changes of a batch with those on the host. */
static bool same_changes(const struct shape *shape, const struct jitter *jitter, enum jitter_order order)
{
    const uint32_t count = 9;
    const size_t values = shape_values(shape);
    std::vector<uint8_t> right(count * values), mine(count * values), other(shape->height * shape->width);
    std::vector<uint32_t> numbers(count);
    struct jitter_batch batch;
    void *memory;
    uint8_t *from, *to;
    uint32_t *listed;
    for (size_t i = 0; i < right.size(); i++)
        right[i] = static_cast<uint8_t>(philox(philox_key(4), static_cast<uint32_t>(i), 0, 0, 0).word[0]);
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = 31 * i + 5;
    must(cudaMalloc(&memory, jitter_batch_bytes(shape, count)));
    must(cudaMalloc(&from, right.size()));
    must(cudaMalloc(&to, right.size()));
    must(cudaMalloc(&listed, count * sizeof *listed));
    must(cudaMemset(to, POISON, right.size()));
    must(cudaMemcpy(from, right.data(), right.size(), cudaMemcpyHostToDevice));
    must(cudaMemcpy(listed, numbers.data(), count * sizeof *listed, cudaMemcpyHostToDevice));
    must(jitter_batch_open(jitter, shape, 11, count, memory, &batch));
    batch.order = order;
    must(jitter_batch_run(&batch, 2, listed, count, from, to, nullptr));
    must(cudaMemcpy(mine.data(), to, mine.size(), cudaMemcpyDeviceToHost));
    bool same = true;
    for (uint32_t i = 0; i < count; i++) {
        jitter_apply(jitter, shape, 11, 2, numbers[i], right.data() + i * values, other.data());
        for (size_t k = 0; k < values; k++)
            same &= mine[i * values + ordered(shape, order, k)] == right[i * values + k];
    }
    for (void *array :
         {memory, static_cast<void *>(from), static_cast<void *>(to), static_cast<void *>(listed)})
        must(cudaFree(array));
    return same;
}

/* Images and clips of odd sizes, with each kernel. Kinds: 1: blur; 2: no contrast; 4: nothing else. */
static void test_changes(void)
{
    static const uint32_t sizes[][3] = {{1, 1, 1},     {1, 3, 3},      {1, 5, 7},   {2, 17, 13},
                                        {3, 33, 64},   {7, 8, 12},     {1, 32, 68}, {1, 65, 129},
                                        {1, 224, 224}, {16, 112, 112}, {1, 40, 200}};
    for (const auto &size : sizes)
        for (uint32_t channels = 1; channels <= 3; channels += 2) {
            const struct shape shape = {channels, size[0], size[1], size[2]};
            bool same = true;
            for (uint32_t kind = 0; kind < 6; kind++)
                for (uint32_t radius : {0u, 1u, 3u, 11u, 31u}) {
                    struct jitter jitter = {kind & 4 ? 0 : 0.8f,
                                            {0.4f, 0.2f, 0, -0.4f},
                                            {1.4f, 1.8f, 3, 0.3f},
                                            0.3f,
                                            kind & 1 ? 0.6f : 0,
                                            2 * radius + 1,
                                            0.1f,
                                            4};
                    if (kind & 2)
                        jitter.low[JITTER_CONTRAST] = jitter.high[JITTER_CONTRAST] = 1;
                    if (radius >= std::min(size[1], size[2]) || (!(kind & 1) && radius))
                        continue;
                    for (enum jitter_order order : {JITTER_PLANES, JITTER_FRAMES, JITTER_INTERLEAVED})
                        same &= same_changes(&shape, &jitter, order);
                }
            tell(same, "colours and blur are those of the host: " + std::to_string(channels) + "x" +
                           std::to_string(size[0]) + "x" + std::to_string(size[1]) + "x" +
                           std::to_string(size[2]));
        }
}

int main(int argc, char **argv)
{
    char made[] = "/tmp/gpu_stream-XXXXXX";
    const int first = argc > 1 && strcmp(argv[1], "--short") == 0 ? 2 : 1;
    brief = first == 2;
    setvbuf(stdout, NULL, _IOLBF, 0); /* print each line immediately */
    device_use_all_queues();
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_stream: %s\n", status_text());
        return 4;
    }
    must(cudaSetDevice(0));
    device_stream_use(0);
    if (argc > 1 && strcmp(argv[1], "--times") == 0) {
        char raw[] = "/dev/shm/gpu_stream-XXXXXX";
        if (argc == 2)
            write_raw(static_cast<char *>(must_have(mkdtemp(raw))));
        time_folder(argc == 2 ? raw : argv[2]);
        time_changes();
        if (argc == 2)
            std::filesystem::remove_all(raw);
        return 0;
    }
    folder = static_cast<char *>(must_have(mkdtemp(made)));
    test_changes();
    for (enum decoder kind : {DECODER_CPU, DECODER_HARDWARE, DECODER_HYBRID}) {
        bool wanted = first == argc;
        for (int i = first; i < argc; i++)
            wanted |= strcmp(argv[i], decoder_names[kind]) == 0;
        if (wanted)
            test_decoder(kind);
    }
    std::filesystem::remove_all(folder);
    return failures ? 3 : 0;
}
