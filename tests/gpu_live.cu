/* Tests live training samples on the device. They must be bit-identical to samples generated on the host, and
 * arrive in the right order on two streams. Training must have the same result with live and with stored
 * samples. make check-gpu runs this program.
 *
 *     gpu_live [--short]   --short: fewer cases and steps, no planted faults; for compute-sanitizer
 *
 * compute-sanitizer does not detect races between CUDA streams, so the test provokes them. Steps are randomly
 * slower or faster than the generator. Each step copies its batch and then overwrites the buffer with a fixed
 * byte. If a read or a write happens too early, a copy is wrong. Two planted faults show that the test
 * detects this.
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_learner.cuh"

#include "core/philox.h"
#include "machine/device.h"
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

/* Runs `steps` steps, and copies the batch of each step to `copies`. */
static void run_steps(struct device_feed *feed, uint32_t steps, enum order_fault fault, uint8_t *copies)
{
    const struct train *train = feed->train;
    size_t bytes = train->batch * train->data->sample_bytes;
    uint32_t an_epoch = train_steps(train);
    cudaStream_t training, hasty;
    must(cudaStreamCreateWithFlags(&training, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&hasty, cudaStreamNonBlocking));
    device_feed_plan_timings(feed, steps);
    for (uint32_t i = 0; i < steps; i++) {
        struct device_set set = {};
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
    run_steps(&feed, steps, fault, copies);
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
/* Lists of numbers for generators that paint lines in any order. */
static const struct set listed[] = {{7, 64, 23, 7, false, "gbase", false},
                                    {7, 64, 23, 7, false, "bat", false},
                                    {1000, 128, 300, 256, false, "gbase", false},
                                    {1000, 128, 300, 256, false, "bat", false}};

int main(int argc, char **argv)
{
    brief = argc > 1 && strcmp(argv[1], "--short") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0); /* print each line immediately */
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_live: %s\n", status_text());
        return 4;
    }
    must(cudaSetDevice(0));
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
    return failures ? 3 : 0;
}
