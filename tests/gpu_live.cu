/* Tests training samples that arrive on the device batch by batch. Live samples must be bit-identical to
 * samples generated on the host, and loaded ones to those in files. Both must arrive in the right order on
 * two streams. Training must have the same result with live, loaded and stored samples. make check-gpu runs
 * this program.
 *
 *     gpu_live [--short] [--loaded]
 *
 * --short: fewer cases and steps, no planted faults; for compute-sanitizer. --loaded: only loaded samples.
 *
 * compute-sanitizer does not detect races between CUDA streams, so the test provokes them. Steps are randomly
 * slower or faster than the generator. Each step copies its batch and then overwrites the buffer with a fixed
 * byte. If a read or a write happens too early, a copy is wrong. Two planted faults show that the test
 * detects this.
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_learner.cuh"

#include <filesystem>
#include <string>

#include "core/philox.h"
#include "machine/device.h"
#include "train/data_mixture.h"
#include "train/engines.cuh"
#include "train/feed.cuh"

#define THREADS 8
#define POISON  0xaa

static bool brief;
static int failures;

static void tell(bool well, const char *what)
{
    printf("%s  %s\n", well ? "ok    " : "FAILED", what);
    failures += !well;
}

/* ---- Data ---- */

struct set {
    uint32_t classes, res, count, batch;
    bool fresh;
    const char *generator; /* NULL: the default */
    bool augmented;        /* training crops, changes, erases, repeats and mixes the samples */
};

#define COPIES 3 /* copies of each sample in a step, if `augmented` */

static void open_data(const struct set *set, enum data_feed feed, struct data *data)
{
    struct data_request request = {};
    request.name = "synth";
    request.train_size = set->count;
    request.test_size = 5;
    request.classes = set->classes;
    request.res = set->res;
    request.batch = set->batch;
    request.feed = feed;
    request.fresh = set->fresh;
    if (set->augmented)
        request.fit = {.how = FIT_RANDOM_RESIZED_CROP,
                       .res = set->res * 2 / 3,
                       .channels = 3,
                       .seed = 0,
                       .unscaled = false};
    request.resources = {.threads = THREADS, .device = 0};
    must(data_open(&request, data));
    data_normalise(data, true);
}

static void make_on_host(const struct data *data, const uint64_t *numbers, uint32_t count, uint8_t *samples)
{
    const struct generator_request request = {
        .on_device = false, .resources = {.threads = THREADS, .device = 0}, .batch = count};
    struct generator *generator;
    must(data_generator(data, &request, &generator));
    const struct generator_numbers listed = {numbers, 0, nullptr, nullptr};
    must(generator_make(generator, &listed, count, samples, nullptr, nullptr));
    generator_close(generator);
}

/* ---- The generator ---- */

/* Compares images that the device generates with those of the host. The sample numbers are random numbers
 * below 2^47, and some occur twice. The last batch may be short. */
static void compare_generators(const struct set *set)
{
    struct data data;
    open_data(set, DATA_LIVE, &data);
    const uint32_t count = set->count;
    size_t bytes = count * data.sample_bytes;
    auto *numbers = static_cast<uint64_t *>(must_have(malloc(count * sizeof(uint64_t))));
    for (uint32_t i = 0; i < count; i++) {
        struct philox_block block = philox(philox_key(1), i, 0, 0, 0);
        numbers[i] = i % 5 == 4 ? numbers[i - 1] : (uint64_t)(block.word[0] % 4096) << block.word[1] % 36;
    }
    auto *right = static_cast<uint8_t *>(must_have(malloc(bytes)));
    auto *mine = static_cast<uint8_t *>(must_have(malloc(bytes)));
    make_on_host(&data, numbers, count, right);

    const struct generator_request request = {
        .on_device = true, .resources = {.threads = 1, .device = 0}, .batch = set->batch};
    struct generator *generator;
    uint64_t *device_numbers;
    uint8_t *samples;
    cudaStream_t stream;
    must(data_generator(&data, &request, &generator));
    must(cudaMalloc(&device_numbers, count * sizeof *numbers));
    must(cudaMalloc(&samples, set->batch * data.sample_bytes));
    must(cudaStreamCreate(&stream));
    must(cudaMemcpy(device_numbers, numbers, count * sizeof *numbers, cudaMemcpyHostToDevice));
    for (uint32_t at = 0; at < count; at += set->batch) {
        uint32_t some = count - at < set->batch ? count - at : set->batch;
        const struct generator_numbers listed = {device_numbers + at, 0, nullptr, nullptr};
        must(generator_make(generator, &listed, some, samples, nullptr, stream));
        must(cudaMemcpyAsync(mine + at * data.sample_bytes, samples, some * data.sample_bytes,
                             cudaMemcpyDeviceToHost, stream));
    }
    must(cudaStreamSynchronize(stream));
    char text[128];
    snprintf(text, sizeof text,
             "generator: %u images of %u^2, %u classes, batch %u, %.1f MB of device memory", count, set->res,
             set->classes, set->batch, 1e-6 * (double)generator_memory_bytes(generator));
    tell(memcmp(mine, right, bytes) == 0, text);
    generator_close(generator);
    must(cudaFree(samples));
    must(cudaFree(device_numbers));
    must(cudaStreamDestroy(stream));
    free(mine);
    free(right);
    free(numbers);
    data_close(&data);
}

/* ---- Lists of image numbers ---- */

/* Returns the number of pixels that are black in exactly one of two images. */
static uint64_t count_apart(const uint8_t *one, const uint8_t *other, size_t pixels)
{
    uint64_t apart = 0;
    for (size_t i = 0; i < pixels; i++)
        apart += (one[i] != 0) != (other[i] != 0);
    return apart;
}

/* Generates each image in a separate call, and again by lists of numbers. The generator paints overlapping
 * lines in any order, so the two versions of an image may differ in their grays, but not in which pixels are
 * painted. A painted pixel is black only if the gray of its orbit is 0, which happens in one of 256 cases. As
 * a control, compares each image with another one. */
static void compare_lists(const struct set *set)
{
    struct data data;
    open_data(set, DATA_LIVE, &data);
    const size_t image = data.sample_bytes, bytes = set->count * image;
    const struct generator_request request = {.on_device = true,
                                              .resources = {.threads = 1, .device = 0},
                                              .batch = set->batch,
                                              .variant = set->generator};
    auto *numbers = static_cast<uint64_t *>(must_have(malloc(set->count * sizeof(uint64_t))));
    for (uint32_t i = 0; i < set->count; i++)
        numbers[i] = (uint64_t)(set->count - i) * 7 + ((uint64_t)(i % 3) << 33);
    auto *alone = static_cast<uint8_t *>(must_have(malloc(bytes)));
    auto *mine = static_cast<uint8_t *>(must_have(malloc(bytes)));
    struct generator *generator;
    uint64_t *device_numbers;
    uint8_t *samples;
    must(data_generator(&data, &request, &generator));
    must(cudaMalloc(&device_numbers, set->count * sizeof *numbers));
    must(cudaMalloc(&samples, set->batch * image));
    must(cudaMemcpy(device_numbers, numbers, set->count * sizeof *numbers, cudaMemcpyHostToDevice));
    for (uint32_t i = 0; i < set->count; i++) {
        const struct generator_numbers one = {nullptr, numbers[i], nullptr, nullptr};
        must(generator_make(generator, &one, 1, samples, nullptr, nullptr));
        must(cudaMemcpy(alone + i * image, samples, image, cudaMemcpyDeviceToHost));
    }
    for (uint32_t at = 0; at < set->count; at += set->batch) {
        const uint32_t some = set->count - at < set->batch ? set->count - at : set->batch;
        const struct generator_numbers list = {device_numbers + at, 0, nullptr, numbers + at};
        must(generator_make(generator, &list, some, samples, nullptr, nullptr));
        must(cudaMemcpy(mine + at * image, samples, some * image, cudaMemcpyDeviceToHost));
    }
    uint64_t painted = 0, apart = 0, control = 0;
    auto *black = static_cast<uint8_t *>(must_have(calloc(1, image)));
    for (uint32_t i = 0; i < set->count; i++) {
        painted += count_apart(alone + i * image, black, image);
        apart += count_apart(alone + i * image, mine + i * image, image);
        control += count_apart(alone + i * image, mine + (i + 1) % set->count * image, image);
    }
    char text[192];
    snprintf(
        text, sizeof text,
        "lists of %s: %u images of %u^2: %llu of %llu painted pixels differ; between different images: %llu",
        set->generator, set->count, set->res, (unsigned long long)apart, (unsigned long long)painted,
        (unsigned long long)control);
    tell(painted > 0 && 20 * apart < painted && 5 * control > painted, text);
    generator_close(generator);
    must(cudaFree(samples));
    must(cudaFree(device_numbers));
    free(black);
    free(mine);
    free(alone);
    free(numbers);
    data_close(&data);
}

/* ---- Order on two streams ---- */

static __global__ void spin_kernel(uint64_t ns)
{
    uint64_t begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < ns);
}

/* Returns the duration of step `i`: 0, up to 0.3 ms, or up to 3 ms. */
static uint64_t step_ns(uint32_t i)
{
    struct philox_block block = philox(philox_key(2), i, 0, 0, 0);
    return block.word[0] % 3 == 0 ? 0 : block.word[1] % (block.word[0] % 3 == 1 ? 300000 : 3000000);
}

enum order_fault { NO_FAULT, RELEASED_EARLY, NOT_WAITED };

/* Returns the bytes of the largest batch of this rank. */
static size_t batch_bytes(const struct train *train)
{
    return train_generated(train, train_share_max(train)) * train->data->sample_bytes;
}

/* Runs `steps` steps, and copies the batch of each step to `copies`. `labels`: those of the training set, in
 * device memory; only for loaded samples. */
static void run_steps(struct device_feed *feed, uint32_t steps, enum order_fault fault, uint32_t *labels,
                      uint8_t *copies)
{
    const struct train *train = feed->train;
    const size_t bytes = batch_bytes(train);
    uint32_t an_epoch = train_steps(train);
    cudaStream_t training, hasty;
    must(cudaStreamCreateWithFlags(&training, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&hasty, cudaStreamNonBlocking));
    device_feed_plan_timings(feed, steps);
    for (uint32_t i = 0; i < steps; i++) {
        struct device_set set = {};
        set.labels = labels;
        must(device_feed_take(feed, i / an_epoch, i % an_epoch, training, &set));
        void *samples = const_cast<void *>(set.values);
        if (fault == RELEASED_EARLY)
            must(device_feed_release(feed, training));
        if (fault == RELEASED_EARLY)
            spin_kernel<<<1, 1, 0, training>>>(2000000);
        must(cudaMemcpyAsync(copies + i * bytes, samples, bytes, cudaMemcpyDeviceToDevice,
                             fault == NOT_WAITED ? hasty : training));
        must(cudaMemsetAsync(samples, POISON, bytes, training));
        if (fault != RELEASED_EARLY)
            must(device_feed_release(feed, training));
        spin_kernel<<<1, 1, 0, training>>>(step_ns(i));
        must(cudaGetLastError());
    }
    must(cudaStreamSynchronize(training));
    must(cudaStreamSynchronize(hasty));
    must(cudaStreamDestroy(training));
    must(cudaStreamDestroy(hasty));
}

/* Returns the number of steps that read wrong samples. */
static uint32_t count_wrong(const struct train *train, uint32_t steps, const uint8_t *copies)
{
    const struct data *data = train->data;
    uint32_t wrong = 0, an_epoch = train_steps(train), all = data->sets[DATA_TRAIN].count;
    auto *numbers = static_cast<uint32_t *>(must_have(malloc(train->batch * sizeof(uint32_t))));
    auto *live = static_cast<uint64_t *>(must_have(malloc(train->batch * sizeof(uint64_t))));
    auto *right = static_cast<uint8_t *>(must_have(malloc(train->batch * data->sample_bytes)));
    for (uint32_t i = 0; i < steps; i++) {
        struct draw_order order = draw_order(train->seed, i / an_epoch, all);
        uint32_t count = train_batch(train, &order, i % an_epoch, numbers);
        for (uint32_t j = 0; j < count; j++)
            live[j] = data_number(data->fresh, i / an_epoch, numbers[j]);
        make_on_host(data, live, count, right);
        wrong +=
            memcmp(copies + i * train->batch * data->sample_bytes, right, count * data->sample_bytes) != 0;
    }
    free(right);
    free(live);
    free(numbers);
    return wrong;
}

static void provoke(const struct set *set, enum order_fault fault)
{
    static const char *const names[] = {"", ", planted fault: buffer released too early",
                                        ", planted fault: step does not wait"};
    struct data data;
    struct allocations allocations = {};
    struct device_feed feed;
    struct train train = {};
    struct train_totals totals;
    uint8_t *copies;
    const uint32_t steps = brief ? 7 : 60;
    open_data(set, DATA_LIVE, &data);
    train.data = &data;
    train.seed = 5;
    train.batch = set->batch;
    train.generator = set->generator;
    const struct resources resources = {.threads = THREADS, .device = 0};
    size_t bytes = (size_t)steps * set->batch * data.sample_bytes;
    must(device_feed_open(&feed, &train, &resources, &allocations));
    must(cudaMalloc(&copies, bytes));
    run_steps(&feed, steps, fault, nullptr, copies);
    must(device_feed_totals(&feed, steps, &totals));
    auto *host = static_cast<uint8_t *>(must_have(malloc(bytes)));
    must(cudaMemcpy(host, copies, bytes, cudaMemcpyDeviceToHost));
    uint32_t wrong = count_wrong(&train, steps, host);
    char text[192];
    snprintf(text, sizeof text,
             "order%s%s: %u steps, batch %u of %u, %u^2%s%s: %u wrong; per step: generated in %.2f ms, "
             "waited %.2f ms",
             set->generator ? " by " : "", set->generator ? set->generator : "", steps, set->batch,
             set->count, set->res, set->fresh ? ", fresh" : "", names[fault], wrong,
             1e3 * totals.generate_s / steps, 1e3 * totals.data_s / steps);
    tell(fault == NO_FAULT ? wrong == 0 : wrong > 0, text);
    free(host);
    must(cudaFree(copies));
    device_feed_close(&feed);
    allocations_free(&allocations);
    data_close(&data);
}

/* ---- Loaded samples ---- */

/* Files of a data set with a training set and a test set, in class folders. Each training sample has its own
 * pixels. Every `broken`-th training sample is a truncated file; 0: none. With several ranks, the feed is
 * that of the last rank, and the samples are mixed with partners. */
struct files {
    uint32_t count, classes, res, batch, broken, ranks;
};

static std::string folder; /* with a folder per struct files; removed at the end */

static bool is_broken(const struct files *files, uint32_t number)
{
    return files->broken > 0 && number % files->broken == files->broken - 1;
}

/* Returns the value of a pixel. Samples begin with their numbers. */
static uint8_t pixel_of(uint32_t number, uint32_t i)
{
    return (uint8_t)(i < 4 ? number >> 8 * i : philox(philox_key(number), i / 4, 0, 0, 0).word[i % 4]);
}

/* Writes an array of NumPy with three channels. Leaves out the second half of a broken one. */
static void write_array(const std::string &path, uint32_t number, uint32_t res, bool broken)
{
    char header[129] = "\x93NUMPY\x01", text[120];
    const uint32_t values = 3 * res * res;
    snprintf(text, sizeof text, "{'descr': '|u1', 'fortran_order': False, 'shape': (3, %u, %u), }", res, res);
    header[7] = 0;
    header[8] = 118; /* bytes after the first ten, in two bytes */
    header[9] = 0;
    snprintf(header + 10, sizeof header - 10, "%-117.117s\n", text);
    FILE *file = static_cast<FILE *>(must_have(fopen(path.c_str(), "wb")));
    bool written = fwrite(header, 128, 1, file) == 1;
    for (uint32_t i = 0; i < (broken ? values / 2 : values); i++)
        written = fputc(pixel_of(number, i), file) != EOF && written;
    must_have(fclose(file) == 0 && written ? file : NULL);
}

/* Writes the files, and returns the path of the data set. Sample n is the n-th file in the order of the set.
 */
static std::string write_files(const struct files *files)
{
    static int sets;
    const std::string set = folder + "/" + std::to_string(sets++);
    for (uint32_t n = 0; n < files->count; n++) {
        char name[64];
        const uint32_t label = (uint32_t)((uint64_t)n * files->classes / files->count);
        for (const char *part : {"train", "test"}) {
            snprintf(name, sizeof name, "/%s/%03u", part, label);
            std::filesystem::create_directories(set + name);
            snprintf(name, sizeof name, "/%s/%03u/%06u.npy", part, label, n);
            if (strcmp(part, "train") == 0 || n < 5)
                write_array(set + name, n, files->res, strcmp(part, "train") == 0 && is_broken(files, n));
        }
    }
    return set;
}

static void open_files(const struct files *files, const std::string &set, enum data_feed feed, bool mask,
                       struct data *data)
{
    struct data_request request = {};
    request.name = set.c_str();
    request.classes = files->classes;
    request.batch = files->batch;
    request.feed = feed;
    request.mask = mask;
    request.lanes = 8;
    request.shuffle = 64;
    request.ahead = 3;
    request.resources = {.threads = THREADS, .device = 0};
    must(data_open(&request, data));
    data_normalise(data, true);
}

/* Copies the labels of the training set to the device. */
static uint32_t *labels_on_device(const struct data *data)
{
    const struct data_set *set = &data->sets[DATA_TRAIN];
    uint32_t *labels;
    must(cudaMalloc(&labels, set->count * sizeof *labels));
    must(cudaMemcpy(labels, set->labels, set->count * sizeof *labels, cudaMemcpyHostToDevice));
    return labels;
}

/* Returns the number of steps whose samples are wrong. Broken samples must be zeros. Adds to `*masked` the
 * number of broken samples. */
static uint32_t count_wrong_files(const struct files *files, const struct train *train, uint32_t steps,
                                  const uint8_t *copies, uint32_t *masked)
{
    const uint32_t bytes = (uint32_t)train->data->sample_bytes, an_epoch = train_steps(train);
    uint32_t wrong = 0;
    auto *numbers = static_cast<uint32_t *>(must_have(malloc(2 * train->batch * sizeof(uint32_t))));
    for (uint32_t i = 0; i < steps; i++, copies += batch_bytes(train)) {
        const struct draw_order order = train_order(train, i / an_epoch);
        const uint32_t count = train_generated(train, train_batch(train, &order, i % an_epoch, numbers));
        bool right = true;
        for (uint32_t j = 0; j < count; j++) {
            const bool broken = is_broken(files, numbers[j]);
            *masked += broken;
            for (uint32_t at = 0; at < bytes; at++)
                right &= copies[j * bytes + at] == (broken ? 0 : pixel_of(numbers[j], at));
        }
        wrong += !right;
    }
    free(numbers);
    return wrong;
}

/* Returns the number of wrong labels on the device after an epoch or more. Frees `labels`. */
static uint32_t count_wrong_labels(const struct files *files, uint32_t *labels)
{
    uint32_t wrong = 0;
    auto *host = static_cast<uint32_t *>(must_have(malloc(files->count * sizeof(uint32_t))));
    must(cudaMemcpy(host, labels, files->count * sizeof *host, cudaMemcpyDeviceToHost));
    for (uint32_t n = 0; n < files->count; n++)
        wrong += host[n] != (is_broken(files, n) ? DATA_MASKED
                                                 : (uint32_t)((uint64_t)n * files->classes / files->count));
    must(cudaFree(labels));
    free(host);
    return wrong;
}

static void provoke_loading(const struct files *files, enum order_fault fault)
{
    static const char *const names[] = {"", ", planted fault: buffer released too early",
                                        ", planted fault: step does not wait"};
    const std::string set = write_files(files);
    const struct resources resources = {.threads = THREADS, .device = 0};
    struct data data;
    struct allocations allocations = {};
    struct device_feed feed;
    struct train train = {};
    struct train_totals totals = {};
    uint8_t *copies;
    open_files(files, set, DATA_LOAD, true, &data);
    train.data = &data;
    train.seed = 5;
    train.batch = files->batch;
    train.ranks = files->ranks;
    train.rank = files->ranks ? files->ranks - 1 : 0;
    train.mixing.mixup = files->ranks > 1 ? 0.8 : 0;
    const uint32_t steps = brief ? train_steps(&train) + 1 : 3 * train_steps(&train) + 1;
    const size_t bytes = steps * batch_bytes(&train);
    must(device_feed_open(&feed, &train, &resources, &allocations));
    must(cudaMalloc(&copies, bytes));
    uint32_t *labels = labels_on_device(&data);
    run_steps(&feed, steps, fault, labels, copies);
    must(device_feed_totals(&feed, steps, &totals));
    auto *host = static_cast<uint8_t *>(must_have(malloc(bytes)));
    must(cudaMemcpy(host, copies, bytes, cudaMemcpyDeviceToHost));
    uint32_t masked = 0, wrong = count_wrong_files(files, &train, steps, host, &masked);
    const uint32_t wrong_labels = count_wrong_labels(files, labels);
    char text[192];
    snprintf(text, sizeof text,
             "order of loaded samples: %u steps, batch %u of %u, %u^2%s%s: %u wrong, %u masked, %u wrong "
             "labels; per step: waited %.2f ms",
             steps, files->batch, files->count, files->res, files->ranks ? ", the last of several ranks" : "",
             names[fault], wrong, masked, wrong_labels, 1e3 * totals.data_s / steps);
    tell((fault == NO_FAULT ? wrong == 0 : wrong > 0) && (wrong_labels == 0 || files->ranks),
         text); /* a rank masks what it reads */
    free(host);
    must(cudaFree(copies));
    device_feed_close(&feed);
    allocations_free(&allocations);
    data_close(&data);
}

/* Compares the steps of a mixture on the device with those of its stream in host memory: values, labels, and
 * which samples are masked. */
static void provoke_mixing(const struct files *files, enum order_fault fault)
{
    const std::string set = write_files(files);
    const struct resources resources = {.threads = THREADS, .device = 0};
    const struct data_mix_texts texts = {"load:0.4,synth:0.6", nullptr, nullptr, DATA_MIX_OFFSET, 0};
    struct data_request request = {};
    struct data data;
    struct allocations allocations = {};
    struct device_feed feed;
    struct feed_stream host = {};
    struct train train = {};
    uint8_t *copies;
    request.name = set.c_str();
    request.batch = files->batch;
    request.feed = DATA_MIXED;
    request.mix = &texts;
    request.fit.how = FIT_RESIZE;
    request.fit.res = files->res;
    request.fit.channels = 3;
    request.mask = true;
    request.lanes = 8;
    request.shuffle = 64;
    request.ahead = 3;
    request.resources = resources;
    must(data_open(&request, &data));
    train.data = &data;
    train.seed = 5;
    train.batch = files->batch;
    train.ranks = files->ranks;
    train.rank = files->ranks ? files->ranks - 1 : 0;
    train.mixing.mixup = files->ranks > 1 ? 0.8 : 0;
    must(data_mixture_plan(&data, train.seed, train.batch, false));
    const uint32_t steps = (brief ? 1 : 3) * train_steps(&train);
    const size_t bytes = steps * batch_bytes(&train);
    must(device_feed_open(&feed, &train, &resources, &allocations));
    must(cudaMalloc(&copies, bytes));
    uint32_t *labels = labels_on_device(&data);
    run_steps(&feed, steps, fault, labels, copies);
    const uint32_t count = data.sets[DATA_TRAIN].count;
    auto *on_device = static_cast<uint32_t *>(must_have(malloc(count * sizeof(uint32_t))));
    must(cudaMemcpy(on_device, labels, count * sizeof *on_device, cudaMemcpyDeviceToHost));
    auto *values = static_cast<uint8_t *>(must_have(malloc(bytes)));
    must(cudaMemcpy(values, copies, bytes, cudaMemcpyDeviceToHost));
    must(feed_stream_open(&train, THREADS, 1, DECODER_CPU, nullptr, nullptr, &host));
    auto *numbers = static_cast<uint32_t *>(must_have(malloc(2 * train.batch * sizeof(uint32_t))));
    uint32_t wrong = 0, masked = 0, wrong_labels = 0;
    for (uint32_t i = 0; i < steps; i++) {
        const uint32_t epoch = i / train_steps(&train), step = i % train_steps(&train);
        struct stream_batch batch;
        const uint32_t own = feed_stream_list(&host, epoch, step, numbers);
        must(feed_stream_next(&host, epoch, step, numbers, train_generated(&train, own), &batch));
        wrong += memcmp(values + i * batch_bytes(&train), batch.samples.values, batch.samples.bytes) != 0;
        masked += batch.masked;
        must(stream_release(host.stream, &batch, nullptr));
    }
    /* The labels of the last epoch; a rank has those of its samples. */
    for (uint32_t n = 0; n < count; n++)
        wrong_labels += on_device[n] != data.sets[DATA_TRAIN].labels[n];
    char text[192];
    snprintf(text, sizeof text,
             "a mixture: %u steps, batch %u of %u, %u^2%s%s: %u wrong, %u masked, %u wrong labels", steps,
             files->batch, count, files->res, files->ranks ? ", the last of several ranks" : "",
             fault == NO_FAULT ? "" : ", planted fault", wrong, masked, wrong_labels);
    tell(fault == NO_FAULT ? wrong == 0 && wrong_labels == 0 : wrong > 0, text);
    free(numbers);
    free(values);
    free(on_device);
    feed_stream_close(&host);
    must(cudaFree(labels));
    must(cudaFree(copies));
    device_feed_close(&feed);
    allocations_free(&allocations);
    data_close(&data);
}

/* Returns the number of threads of this process. */
static size_t count_threads(void)
{
    size_t threads = 0;
    for (const auto &task : std::filesystem::directory_iterator("/proc/self/task"))
        threads += task.exists();
    return threads;
}

/* Opens and closes feeds in the middle of an epoch, after jumps. From the fourth time on, the memory of the
 * device and the number of threads must stay the same. The last sample is truncated and not masked: its step
 * must fail, with the name of its file, and the steps before must not. */
static void leave_early(struct files files)
{
    const struct resources resources = {.threads = THREADS, .device = 0};
    const uint32_t rounds = brief ? 6 : 40;
    size_t free_first = 0, free_last = 0, all, threads_first = 0, threads_last = 0;
    struct data data;
    struct train train = {};
    enum status status = STATUS_OK;
    cudaStream_t training;
    uint32_t step = 0, failing = 0;
    char text[192], name[64];
    files.broken = 0;
    const std::string set = write_files(&files);
    open_files(&files, set, DATA_LOAD, false, &data);
    snprintf(name, sizeof name, "/train/%03u/%06u.npy", files.classes - 1, files.count - 1);
    std::filesystem::resize_file(set + name, 200);
    train.data = &data;
    train.seed = 5;
    train.batch = files.batch;
    const uint32_t an_epoch = train_steps(&train);
    const struct draw_order order = train_order(&train, 0);
    while (draw_order_at(&order, failing) != files.count - 1)
        failing++;
    failing /= files.batch;
    uint32_t *labels = labels_on_device(&data);
    must(cudaStreamCreateWithFlags(&training, cudaStreamNonBlocking));
    for (uint32_t round = 0; round <= rounds; round++) {
        struct allocations allocations = {};
        struct device_feed feed;
        must(device_feed_open(&feed, &train, &resources, &allocations));
        for (uint32_t i = 0; i < round % 4; i++) {
            struct device_set of = {};
            of.labels = labels;
            const uint32_t to = (round + 5 * i) % an_epoch;
            if (to == failing)
                continue;
            must(device_feed_take(&feed, 0, to, training, &of));
            must(device_feed_release(&feed, training));
        }
        for (step = 0; round == rounds && status == STATUS_OK && step < an_epoch; step++) {
            struct device_set of = {};
            of.labels = labels;
            status = device_feed_take(&feed, 0, step, training, &of);
            if (status == STATUS_OK)
                must(device_feed_release(&feed, training));
        }
        device_feed_close(&feed);
        must(cudaStreamSynchronize(training));
        allocations_free(&allocations);
        must(cudaMemGetInfo(&free_last, &all));
        threads_last = count_threads();
        if (round == 3) {
            free_first = free_last;
            threads_first = threads_last;
        }
    }
    snprintf(
        text, sizeof text,
        "loaded samples, left in the middle of an epoch %u times: %+.1f MB of device memory, %+d threads",
        rounds, 1e-6 * ((double)free_first - (double)free_last), (int)threads_last - (int)threads_first);
    tell(free_last == free_first && threads_last == threads_first, text);
    snprintf(text, sizeof text, "a broken sample fails its step, %u of %u: step %u: %.100s", failing + 1,
             an_epoch, step, status_text());
    tell(status == STATUS_FAILED && step == failing + 1 && strstr(status_text(), strrchr(name, '/') + 1),
         text);
    must(cudaFree(labels));
    must(cudaStreamDestroy(training));
    data_close(&data);
}

/* ---- Training ---- */

static void augment_all(const struct shape *shape, struct train *train)
{
    train->augment.crop = true;
    train->augment.operations = 2;
    train->augment.magnitude = 28;
    train->augment.repeats = COPIES;
    train->augment.erasing = 0.25f;
    train->augment.height = shape->height;
    train->augment.width = shape->width;
    train->mixing = {0.8, 1};
}

/* Trains two epochs and sets `into` to the final parameters and moments. Without `broken`, each epoch is one
 * call of the engine. With `broken`, the engine runs one step, restarts from the initial state and runs the
 * first epoch with one call per step. Another engine then runs the second epoch. */
static void learn(const struct set *set, const struct model_table *table, enum data_feed feed, bool broken,
                  struct train_state *into, size_t *values, uint64_t *memory_bytes)
{
    struct data data;
    struct model model;
    struct train train = {};
    struct train_state begin;
    void *state;
    const struct resources resources = {.threads = THREADS, .device = 0};
    open_data(set, feed, &data);
    must(model_build(table, data.shape, data.classes, &model));
    train.model = &model;
    train.data = &data;
    train.seed = 5;
    train.batch = set->batch;
    train.generator = set->generator;
    train.augment = {.shift = 2, .flip = true};
    if (set->augmented)
        augment_all(&data.shape, &train);
    train.optimizer = {OPTIMIZER_ADAM, 0.9, 0.9, 0.999, 1e-8, 0};
    train.schedule = {SCHEDULE_CONSTANT, 0.001, 0, 1, 1, 1};
    if (!train_state_new(model.arena_values, into) || !train_state_new(model.arena_values, &begin))
        must_have(nullptr);
    model_initialise(&model, 5, begin.parameters);
    must(engine_cuda.open(&train, &resources, &state));
    must(engine_cuda.set(state, &begin));
    uint32_t steps = train_steps(&train);
    if (broken) { /* as in a run with --verify that is resumed */
        must(engine_cuda.steps(state, 0, 0, 1));
        must(engine_cuda.set(state, &begin));
        for (uint32_t i = 0; i < steps; i++)
            must(engine_cuda.steps(state, 0, i, 1));
        must(engine_cuda.get(state, into));
        engine_cuda.close(state);
        must(engine_cuda.open(&train, &resources, &state));
        must(engine_cuda.set(state, into));
    } else
        must(engine_cuda.steps(state, 0, 0, steps));
    must(engine_cuda.steps(state, 1, 0, steps));
    must(engine_cuda.get(state, into));
    *values = model.arena_values;
    *memory_bytes = engine_cuda.memory_bytes(state);
    engine_cuda.close(state);
    train_state_free(&begin);
    data_close(&data);
}

static void compare_training(const struct set *set, const struct model_table *table)
{
    struct train_state stored = {}, live, broken;
    size_t values;
    uint64_t stored_bytes = 0, live_bytes;
    if (!set->fresh)
        learn(set, table, DATA_STORED, false, &stored, &values, &stored_bytes);
    learn(set, table, DATA_LIVE, false, &live, &values, &live_bytes);
    learn(set, table, DATA_LIVE, true, &broken, &values, &live_bytes);
    char text[192];
    snprintf(text, sizeof text,
             "%s%s%s: %u^2, batch %u of %u%s%s: same parameters %s (live %.1f MB, stored %.1f MB)",
             table->name, set->generator ? " by " : "", set->generator ? set->generator : "", set->res,
             set->batch, set->count, set->fresh ? ", fresh" : "", set->augmented ? ", augmented, mixed" : "",
             set->fresh ? "epoch by epoch and step by step" : "live, stored and step by step",
             1e-6 * (double)live_bytes, 1e-6 * (double)stored_bytes);
    tell((set->fresh || same_arenas(&stored, &live, values)) && same_arenas(&live, &broken, values), text);
    train_state_free(&stored);
    train_state_free(&live);
    train_state_free(&broken);
}

/* ---- Running all tests ---- */

static const struct set generated[] = {{1, 24, 7, 1, false, nullptr, false},
                                       {7, 33, 23, 7, false, nullptr, false},
                                       {1000, 64, 600, 257, false, nullptr, false},
                                       {1000, 224, 300, 256, false, nullptr, false}};
/* With --short, only the first two of these sets run. The generator `omp` runs on the host, where a batch
 * takes longer than a step. */
static const struct set ordered[] = {
    {10, 64, 37, 1, false, nullptr, false},        {10, 64, 61, 7, true, "omp", false},
    {1000, 224, 1000, 256, false, nullptr, false}, {1000, 64, 2000, 257, true, nullptr, false},
    {10, 64, 61, 7, true, nullptr, false},         {1000, 64, 2000, 257, false, "omp", false}};
static const struct set learnt[] = {
    {7, 32, 37, 1, false, nullptr, false},    {10, 33, 61, 7, false, "omp", false},
    {10, 48, 61, 21, false, nullptr, true},   {1000, 64, 600, 257, false, nullptr, false},
    {10, 64, 300, 64, true, nullptr, false},  {10, 33, 61, 7, false, nullptr, false},
    {1000, 64, 600, 257, true, "omp", false}, {10, 49, 61, 21, false, "omp", true},
    {1000, 64, 600, 255, true, nullptr, true}};
/* With --short, only the first of these sets runs. */
static const struct files loaded[] = {{41, 3, 16, 7, 6, 0},  {500, 10, 64, 64, 0, 0},
                                      {37, 4, 9, 1, 5, 0},   {300, 7, 112, 257, 11, 0},
                                      {64, 1, 33, 64, 0, 0}, {43, 3, 16, 7, 6, 3}};
/* Lists of numbers for generators that paint lines in any order. */
static const struct set listed[] = {{7, 64, 23, 7, false, "gbase", false},
                                    {7, 64, 23, 7, false, "bat", false},
                                    {1000, 128, 300, 256, false, "gbase", false},
                                    {1000, 128, 300, 256, false, "bat", false}};

static void test_live(void)
{
    const size_t some = brief ? 2 : COUNT_OF(generated);
    for (size_t i = 0; i < some; i++)
        compare_generators(&generated[i]);
    for (size_t i = 0; i < (brief ? 1 : COUNT_OF(listed)); i++)
        compare_lists(&listed[i]);
    for (size_t i = 0; i < (brief ? 2 : COUNT_OF(ordered)); i++)
        provoke(&ordered[i], NO_FAULT);
    for (int fault = brief ? NOT_WAITED + 1 : RELEASED_EARLY; fault <= NOT_WAITED; fault++)
        provoke(&ordered[2], (enum order_fault)fault);
    for (size_t i = 0; i < (brief ? 3 : COUNT_OF(learnt)); i++)
        compare_training(&learnt[i], &model_tables[brief ? 1 : 1 + i % 2]);
}

static void test_loaded(void)
{
    char made[] = "/tmp/gpu_live-XXXXXX";
    folder = static_cast<char *>(must_have(mkdtemp(made)));
    for (size_t i = 0; i < (brief ? 1 : COUNT_OF(loaded)); i++)
        provoke_loading(&loaded[i], NO_FAULT);
    for (int fault = brief ? NOT_WAITED + 1 : RELEASED_EARLY; fault <= NOT_WAITED; fault++)
        provoke_loading(&loaded[1], (enum order_fault)fault);
    for (size_t i = 0; i < (brief ? 1 : COUNT_OF(loaded)); i++)
        provoke_mixing(&loaded[i], NO_FAULT);
    for (int fault = brief ? NOT_WAITED + 1 : RELEASED_EARLY; fault <= NOT_WAITED; fault++)
        provoke_mixing(&loaded[1], (enum order_fault)fault);
    leave_early(loaded[0]);
    std::filesystem::remove_all(folder);
}

int main(int argc, char **argv)
{
    bool only_loaded = false;
    for (int i = 1; i < argc; i++) {
        brief |= strcmp(argv[i], "--short") == 0;
        only_loaded |= strcmp(argv[i], "--loaded") == 0;
    }
    setvbuf(stdout, NULL, _IOLBF, 0); /* print each line immediately */
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_live: %s\n", status_text());
        return 4;
    }
    must(cudaSetDevice(0));
    test_loaded();
    if (!only_loaded)
        test_live();
    return failures ? 3 : 0;
}
