/* Measures the device time that a training step needs for its samples before the network runs, in
 * microseconds per batch. Times the generation of the images, each kernel of the augmentation, and each
 * operation of RandAugment. There are four cases: no augmentation; the options of --recipe paper with
 * vit-tiny; and these options with random crops, resized by a bilinear or a bicubic filter.
 *
 *     gpu_augment_times
 *
 * Every batch has other images and other random numbers. Kernels are timed with events in a CUDA graph; the
 * row "no kernel" is the time between two events without a kernel. Exit status 4 without a GPU. */
#include <cxxabi.h>

#include "gpu_learner.cuh"

#include "machine/device.h"
#include "train/augment.cuh"
#include "train/vit/kernels.cuh"

#define BATCH   256
#define BATCHES 16 /* different batches; together, they do not fit into the L2 cache */
#define RUNS    5  /* measurements per batch */
#define PATCH   16
#define KERNELS 16 /* maximum number of kernels per batch */

template <class T> static T *device(size_t count)
{
    T *memory;
    must(cudaMalloc(&memory, count * sizeof(T)));
    return memory;
}

/* ---- The samples ---- */

struct trial {
    const char *name;
    bool crop, bicubic, augmented;
};

/* A training run, with the stored samples of BATCHES steps in device memory. */
struct run {
    struct data data;
    struct model model;
    struct train train;
    struct allocations allocations;
    struct device_augment augment;
    struct device_batch batch;
    uint32_t *labels;
    uint8_t *stored[BATCHES];
    bf16 *patches;
    cudaStream_t stream;
    cudaEvent_t begin, end;
};

static void open_data(const struct trial *trial, struct data *data)
{
    struct data_request request = {};
    request.name = "synth";
    request.preset = "paper-1000";
    request.train_size = 1000000;
    request.test_size = 1;
    request.classes = 1000;
    request.res = 512;
    request.batch = BATCH;
    request.feed = DATA_LIVE;
    request.fresh = true;
    request.fit = {.how = trial->crop ? FIT_RANDOM_RESIZED_CROP : FIT_RESIZE,
                   .res = 224,
                   .channels = 3,
                   .seed = 0,
                   .unscaled = false};
    request.resources = {.threads = 16, .device = 0};
    must(data_open(&request, data));
    const double half[3] = {0.5, 0.5, 0.5};
    data_normalise_by(data, half, half);
}

static void open_train(const struct trial *trial, struct run *run)
{
    struct train *train = &run->train;
    run->model.input = run->data.shape;
    *train = {};
    train->model = &run->model;
    train->data = &run->data;
    train->batch = BATCH;
    train->seed = 1;
    if (!trial->augmented)
        return;
    train->mixing = {0.8, 1};
    train->augment = {.shift = 0, .flip = true, .crop = trial->crop, .bicubic = trial->bicubic};
    train->augment.operations = 2;
    train->augment.magnitude = 28;
    train->augment.erasing = 0.25f;
    train->augment.height = run->data.shape.height;
    train->augment.width = run->data.shape.width;
}

static float elapsed_us(const struct run *run)
{
    float ms;
    must(cudaEventRecord(run->end, run->stream));
    must(cudaEventSynchronize(run->end));
    must(cudaEventElapsedTime(&ms, run->begin, run->end));
    return 1e3f * ms;
}

/* Generates the stored samples of all batches, and prints the time per batch. */
static void generate(struct run *run)
{
    const struct draw_order order = draw_order(run->train.seed, 0, run->data.sets[DATA_TRAIN].count);
    const struct generator_request request = {
        .on_device = true, .resources = {.threads = 1, .device = 0}, .batch = BATCH};
    struct generator *generator;
    uint32_t numbers[2 * BATCH];
    uint64_t listed[BATCH], *on_device[BATCHES];
    must(data_generator(&run->data, &request, &generator));
    for (uint32_t step = 0; step < BATCHES; step++) {
        (void)train_batch(&run->train, &order, step, numbers);
        for (uint32_t j = 0; j < BATCH; j++)
            listed[j] = numbers[j];
        on_device[step] = device<uint64_t>(BATCH);
        must(cudaMemcpy(on_device[step], listed, sizeof listed, cudaMemcpyHostToDevice));
        run->stored[step] = device<uint8_t>(BATCH * data_stored_bytes(&run->data, DATA_TRAIN));
    }
    for (int i = 0; i < 2; i++) { /* the first round loads the kernels */
        must(cudaStreamSynchronize(run->stream));
        must(cudaEventRecord(run->begin, run->stream));
        for (uint32_t step = 0; step < BATCHES; step++) {
            const struct generator_numbers of = {on_device[step], 0, nullptr, nullptr};
            must(generator_make(generator, &of, BATCH, run->stored[step], nullptr, run->stream));
        }
        const float us = elapsed_us(run) / BATCHES;
        if (i > 0)
            printf("    %8.1f            generation\n", us);
    }
    generator_close(generator);
    for (uint64_t *each : on_device)
        must(cudaFree(each));
}

static void open_run(const struct trial *trial, struct run *run)
{
    *run = {};
    must(cudaStreamCreate(&run->stream));
    must(cudaEventCreate(&run->begin));
    must(cudaEventCreate(&run->end));
    open_data(trial, &run->data);
    open_train(trial, run);
    const struct data_set *set = &run->data.sets[DATA_TRAIN];
    must(device_augment_open(&run->train, &run->allocations, &run->augment));
    must(device_batch_allocate(&run->train, BATCH, &run->batch, &run->allocations));
    must(allocate_copy(&run->allocations, &run->labels, set->labels, set->count * sizeof *set->labels,
                       run->stream));
    must(allocate(&run->allocations, &run->patches, BATCH * run->data.sample_values));
}

static void close_run(struct run *run)
{
    allocations_free(&run->allocations);
    for (uint8_t *each : run->stored)
        must(cudaFree(each));
    must(cudaEventDestroy(run->begin));
    must(cudaEventDestroy(run->end));
    must(cudaStreamDestroy(run->stream));
    data_close(&run->data);
}

/* Enqueues what a step does before the network: draws, images, patches. */
static void gather(struct run *run, uint32_t step, struct device_set *set)
{
    const struct share share = train_share(&run->train, step);
    *set = {run->stored[step], run->labels, nullptr, {true, false, BATCH, 0}};
    must(batch_draw(&run->train, set, &run->batch, 0, step, &share, run->stream));
    must(device_augment_run(&run->augment, 0, run->batch.numbers, BATCH, set, run->stream));
    must(vit_patches(&run->data, set, &run->batch, BATCH, PATCH, run->patches, run->stream));
}

/* ---- Times of kernels ---- */

struct timed {
    uint32_t count;
    cudaEvent_t events[KERNELS + 2];
    double us[2][KERNELS + 1]; /* sums, for steps with MixUp and with CutMix */
    uint32_t measured[2];      /* batches in these sums */
    char names[KERNELS][96];
};

static void name_kernel(const struct cudaKernelNodeParams *launch, char *name, size_t room)
{
    const char *symbol = "kernel";
    char *readable = nullptr;
    int status = -1;
#if CUDART_VERSION >= 12030
    must(cudaFuncGetName(&symbol, launch->func));
    readable = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
#endif
    const char *shown = status == 0 ? readable : symbol;
    snprintf(name, room, "%.*s, %u x %u x %u blocks of %u", (int)strcspn(shown, "("), shown,
             launch->gridDim.x, launch->gridDim.y, launch->gridDim.z, launch->blockDim.x);
    free(readable);
}

/* Adds events between the kernels of a captured stream, and at its ends. All nodes of the capture are
 * kernels, in order. */
static void add_events(cudaGraph_t captured, cudaGraph_t graph, struct timed *timed)
{
    cudaGraphNode_t nodes[KERNELS], last;
    size_t count = KERNELS;
    must(cudaGraphGetNodes(captured, nodes, &count));
    timed->count = (uint32_t)count;
    must(cudaGraphAddEventRecordNode(&last, graph, nullptr, 0, timed->events[0]));
    for (size_t i = 0; i < count; i++) {
        struct cudaKernelNodeParams launch;
        must(cudaGraphKernelNodeGetParams(nodes[i], &launch));
        name_kernel(&launch, timed->names[i], sizeof timed->names[i]);
        must(cudaGraphAddKernelNode(&last, graph, &last, 1, &launch));
        must(cudaGraphAddEventRecordNode(&last, graph, &last, 1, timed->events[i + 1]));
    }
    must(cudaGraphAddEventRecordNode(&last, graph, &last, 1, timed->events[count + 1]));
}

static void time_step(struct run *run, uint32_t step, struct timed *timed)
{
    cudaGraph_t captured, graph;
    cudaGraphExec_t exec;
    struct device_set set;
    must(cudaStreamBeginCapture(run->stream, cudaStreamCaptureModeRelaxed));
    gather(run, step, &set);
    must(cudaStreamEndCapture(run->stream, &captured));
    must(cudaGraphCreate(&graph, 0));
    add_events(captured, graph, timed);
    must(cudaGraphInstantiate(&exec, graph, 0));
    must(cudaGraphLaunch(exec, run->stream));
    must(cudaStreamSynchronize(run->stream));
    const bool cut = run->batch.mix.cut;
    timed->measured[cut]++;
    for (uint32_t i = 0; i <= timed->count; i++) {
        float ms;
        must(cudaEventElapsedTime(&ms, timed->events[i], timed->events[i + 1]));
        timed->us[cut][i] += 1e3 * ms;
    }
    must(cudaGraphExecDestroy(exec));
    must(cudaGraphDestroy(graph));
    must(cudaGraphDestroy(captured));
}

static void print_kernels(const struct timed *timed)
{
    for (uint32_t i = 0; i <= timed->count; i++) {
        printf("    ");
        for (int cut = 0; cut < 2; cut++)
            timed->measured[cut] ? printf("%8.1f  ", timed->us[cut][i] / timed->measured[cut])
                                 : printf("%8s  ", "");
        printf("%s\n", i < timed->count ? timed->names[i] : "no kernel");
    }
}

static void time_kernels(struct run *run)
{
    static struct timed timed;
    timed = {};
    for (cudaEvent_t &event : timed.events)
        must(cudaEventCreate(&event));
    for (int i = 0; i < RUNS; i++)
        for (uint32_t step = 0; step < BATCHES; step++)
            time_step(run, step, &timed);
    print_kernels(&timed);
    for (cudaEvent_t event : timed.events)
        must(cudaEventDestroy(event));
}

/* Prints the time per batch of all kernels, launched one after another as in a training step. */
static void time_all(struct run *run)
{
    struct device_set set;
    must(cudaEventRecord(run->begin, run->stream));
    for (int i = 0; i < RUNS; i++)
        for (uint32_t step = 0; step < BATCHES; step++)
            gather(run, step, &set);
    printf("    %8.1f            all kernels together\n", elapsed_us(run) / (RUNS * BATCHES));
}

/* ---- Times of operations ---- */

static const char *const operations[AUGMENT_OPERATIONS] = {
    "identity",     "shear x",  "shear y",  "translate x", "translate y", "rotate",
    "brightness",   "color",    "contrast", "sharpness",   "posterize",   "solarize",
    "autocontrast", "equalize", "invert",   "solarize-add"};

/* Prints the time per batch of each operation of a policy, if all images of the batch get it. The images are
 * those of the network without RandAugment, stored as gray and as RGB images. */
static void time_operations(struct run *run, const char *name, const struct augment_policy *policy)
{
    const struct shape *shape = &run->data.shape;
    const size_t bytes = BATCH * run->data.sample_bytes;
    uint8_t *to = device<uint8_t>(bytes);
    const double magnitude = policy->kind == AUGMENT_TIMM ? 9 : 28;
    const struct augment_numbers none = augment_numbers(policy, AUGMENT_IDENTITY, AUGMENT_OFF, 0, shape);
    must(device_augment_apply(shape, false, AUGMENT_IDENTITY, &none, BATCH, run->stored[0], to, run->stream));
    printf("operations of %s: gray images, without and with the negative sign, then RGB images\n", name);
    for (int operation = 0; operation < AUGMENT_OPERATIONS; operation++) {
        float us[4];
        for (int kind = 0; kind < 4; kind++) {
            const bool gray = kind < 2;
            const struct augment_numbers numbers =
                augment_numbers(policy, (enum augment_operation)operation,
                                kind & 1 ? AUGMENT_MINUS : AUGMENT_PLUS, magnitude, shape);
            must(cudaEventRecord(run->begin, run->stream));
            for (uint32_t step = 0; step < BATCHES; step++)
                must(device_augment_apply(shape, gray, (enum augment_operation)operation, &numbers, BATCH,
                                          run->stored[step], to, run->stream));
            us[kind] = elapsed_us(run) / BATCHES;
        }
        printf("    %8.1f  %8.1f  %8.1f  %8.1f  %s\n", us[0], us[1], us[2], us[3], operations[operation]);
    }
    must(cudaFree(to));
}

/* Times the operations of each policy. */
static void time_policies(struct run *run)
{
    static const struct augment_policy torchvision = {.kind = AUGMENT_TORCHVISION},
                                       pdp2026 = {.kind = AUGMENT_PDP2026, .fill = {128, 128, 128}},
                                       timm = {.kind = AUGMENT_TIMM,
                                               .fill = {128, 128, 128},
                                               .probability = 0.5,
                                               .deviation = 0,
                                               .limit = 10,
                                               .increasing = true,
                                               .bicubic = true};
    time_operations(run, "torchvision", &torchvision);
    time_operations(run, "pdp2026", &pdp2026);
    time_operations(run, "timm, bicubic", &timm);
}

int main(void)
{
    static const struct trial trials[] = {
        {"images without augmentation", false, false, false},
        {"--recipe paper", false, false, true},
        {"--recipe paper --fit random-resized-crop", true, false, true},
        {"--recipe paper --fit random-resized-crop --interpolation bicubic", true, true, true}};
    if (device_probe(0) != STATUS_OK)
        return fprintf(stderr, "gpu_augment_times: %s\n", status_text()), 4;
    printf("us per batch of %u; kernels: in steps with MixUp, and with CutMix\n", BATCH);
    for (const struct trial &trial : trials) {
        static struct run run;
        printf("%s\n", trial.name);
        open_run(&trial, &run);
        generate(&run);
        time_kernels(&run);
        time_all(&run);
        if (trial.augmented && !trial.crop)
            time_policies(&run);
        close_run(&run);
    }
    return 0;
}
