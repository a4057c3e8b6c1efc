/* Compares the GEMMs on tensor cores with GEMMs in fp32 on CUDA cores, for equality. Operands are integers
 * from -3 to 3, which every format represents exactly. Sums are below 2^24, so fp32 computes them exactly in
 * any order. In 16 bits, the outputs and the gradients of inputs are the exact sums, rounded once. So any
 * difference is an error, such as a wrong index or a missing barrier, and no tolerance can hide it. Tests
 * convolutions and linear layers of odd sizes: their outputs, and the gradients of their inputs and
 * parameters, in both orders of axes, and with gradients of inputs in the memory of the inputs. Also
 * compares GELU and its derivative with their definition in double precision. make check-gpu runs this
 * program.
 *
 *     gpu_tensor [--short]   --short: only small batches
 *
 * Prints one line per case and storage. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_learner.cuh"

#include "core/philox.h"
#include "machine/device.h"
#include "train/multiply.cuh"
#include "train/network.cuh"
#include "train/vit/fragments.cuh"

#define LARGEST     3
#define SHORT_BATCH 9

/* ---- Cases ---- */

struct trial {
    enum layer_kind kind;
    struct shape in;
    uint32_t out, kernel[MODEL_AXES], padding[MODEL_AXES]; /* out: output channels */
    uint32_t batch;
    bool relu, relu_before;
};

static const struct trial trials[] = {
    {LAYER_LINEAR, {1, 1, 1, 1}, 1, {}, {}, 1, false, false},
    {LAYER_LINEAR, {7, 1, 5, 3}, 13, {}, {}, 7, false, false},
    {LAYER_LINEAR, {31, 1, 1, 1}, 65, {}, {}, 33, true, true},
    {LAYER_LINEAR, {64, 1, 12, 12}, 128, {}, {}, 256, true, false}, /* fc1 of cnn */
    {LAYER_LINEAR, {128, 1, 1, 1}, 10, {}, {}, 257, false, true},
    {LAYER_LINEAR, {129, 1, 1, 1}, 1000, {}, {}, 65, false, false},
    {LAYER_CONV, {1, 1, 1, 1}, 1, {1, 1, 1}, {0, 0, 0}, 1, false, false},
    {LAYER_CONV, {3, 1, 7, 5}, 5, {1, 3, 2}, {0, 1, 0}, 1, false, false},
    {LAYER_CONV, {1, 1, 28, 28}, 6, {1, 5, 5}, {0, 2, 2}, 7, true, false}, /* lenet */
    {LAYER_CONV, {6, 1, 14, 14}, 16, {1, 5, 5}, {0, 0, 0}, 257, false, true},
    {LAYER_CONV, {1, 1, 28, 28}, 32, {1, 3, 3}, {0, 0, 0}, 65, true, false}, /* cnn */
    {LAYER_CONV, {32, 1, 26, 26}, 64, {1, 3, 3}, {0, 0, 0}, 1, true, true},
    {LAYER_CONV, {32, 1, 26, 26}, 64, {1, 3, 3}, {0, 0, 0}, 256, true, true},
    {LAYER_CONV, {33, 1, 13, 11}, 67, {1, 3, 3}, {0, 2, 2}, 17, false, true},
    {LAYER_CONV, {70, 1, 9, 10}, 31, {1, 1, 1}, {0, 1, 1}, 5, false, false},
    {LAYER_CONV, {16, 2, 4, 4}, 32, {3, 3, 3}, {1, 1, 1}, 3, true, true}, /* cnn3d */
    {LAYER_CONV, {5, 5, 9, 8}, 70, {2, 3, 1}, {1, 0, 0}, 7, false, true},
    {LAYER_CONV, {128, 1, 8, 8}, 130, {1, 3, 3}, {0, 1, 1}, 9, true, true},
    /* Channel counts for which bf16 and fp16 use packed copies (packed_conv.cu). */
    {LAYER_CONV, {8, 1, 7, 5}, 24, {1, 3, 2}, {0, 1, 2}, 1, false, true},
    {LAYER_CONV, {40, 1, 9, 10}, 72, {1, 1, 1}, {0, 1, 1}, 5, true, false},
    {LAYER_CONV, {16, 5, 4, 3}, 8, {2, 3, 1}, {1, 0, 0}, 7, false, true},
    {LAYER_CONV, {128, 1, 9, 7}, 128, {1, 3, 3}, {0, 1, 1}, 33, true, true},
};

/* ---- Layers on the device ---- */

/* A layer with its tensors: random inputs and gradients of outputs in C order, and stored tensors. */
struct bench {
    struct model model;
    struct layer_spec spec;
    struct allocations allocations;
    struct device_layer layer;
    struct pass pass;
    size_t in_values, out_values; /* values in the batch */
    float *in, *out_delta, *results;
    void *kept; /* for gradients of the input that do not overwrite it */
};

/* A format, and how tensors are stored. */
struct storage {
    const char *name;
    enum precision precision;
    bool last;       /* channels last, where possible */
    bool overwrites; /* gradients of the input have the memory of the input */
};
static const struct storage exact = {"fp32", PRECISION_FP32, false, false};
static const struct storage storages[] = {
    {"fp32 in place", PRECISION_FP32, false, true},
    {"tf32", PRECISION_TF32, false, false},
    {"bf16", PRECISION_BF16, false, true},
    {"fp16", PRECISION_FP16, false, false},
    {"bf16 channels last", PRECISION_BF16, true, true},
    {"fp16 channels last", PRECISION_FP16, true, true},
};

static __global__ void fill_kernel(float *values, size_t count, uint32_t stream)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < count)
        values[i] =
            (float)philox_below(philox(philox_key(3), (uint32_t)i, stream, 0, 0).word[0], 2 * LARGEST + 1) -
            LARGEST;
}

static float *filled(struct bench *bench, size_t count, uint32_t stream)
{
    float *values;
    must(allocate(&bench->allocations, &values, count));
    fill_kernel<<<blocks_for(count), BLOCK>>>(values, count, stream);
    must(cudaGetLastError());
    return values;
}

/* Allocates floats with all bits set (NaN), so that a value that no kernel writes is detected. A stored
 * tensor of as many values fits. */
static float *cleared(struct bench *bench, size_t count)
{
    float *values;
    must(allocate(&bench->allocations, &values, count));
    must(cudaMemset(values, 0xff, count * sizeof *values));
    return values;
}

static void open_bench(const struct trial *trial, struct bench *bench)
{
    bench->spec = {.kind = trial->kind, .channels = trial->out, .kernel = {}, .padding = {}, .rate = 0};
    memcpy(bench->spec.kernel, trial->kernel, sizeof trial->kernel);
    memcpy(bench->spec.padding, trial->padding, sizeof trial->padding);
    const struct model_table table = {"one", "", trial->in.depth > 1, &bench->spec, 1};
    const struct layer_spec tail = {
        .kind = LAYER_LINEAR, .channels = 0, .kernel = {}, .padding = {}, .rate = 0};
    const struct layer_spec both[] = {bench->spec, tail};
    struct model_table whole = table;
    whole.layers = both;
    whole.layer_count = 2;
    must(model_build(&whole, trial->in, 1, &bench->model));
    const struct layer *layer = &bench->model.layers[0];
    bench->in_values = layer->in_values * trial->batch;
    bench->out_values = layer->out_values * trial->batch;
    bench->layer.layer = layer;
    bench->in = filled(bench, bench->in_values, 1);
    bench->out_delta = filled(bench, bench->out_values, 2);
    bench->results = cleared(bench, bench->in_values + bench->out_values);
    bench->layer.in = cleared(bench, bench->in_values);
    bench->layer.out_delta = cleared(bench, bench->out_values);
    bench->layer.out = cleared(bench, bench->out_values);
    bench->kept = cleared(bench, bench->in_values);
    bench->layer.relu = trial->relu;
    bench->layer.relu_before = trial->relu_before;
    bench->pass.count = trial->batch;
    bench->pass.training = true;
    bench->pass.of = GRADIENTS_OF_BOTH;
    bench->pass.parameters = filled(bench, bench->model.arena_values, 4);
    bench->pass.gradients = cleared(bench, bench->model.arena_values);
    must(allocate(&bench->allocations, &bench->pass.workspace, WORKSPACE_VALUES));
}

/* Runs a layer forward and backward. Returns its outputs, the gradients of the input and the gradients of the
 * parameters in host memory, which the caller frees. */
static float *results(struct bench *bench, const struct storage *storage)
{
    const struct layer *layer = &bench->model.layers[0];
    const enum precision precision = storage->precision;
    struct device_layer *own = &bench->layer;
    struct pass *pass = &bench->pass;
    const bool conv = layer->spec.kind == LAYER_CONV;
    /* the layer's parameters end where the next layer's begin */
    const size_t parameters = bench->model.layers[1].weight, bytes = sizeof(float);
    const size_t in = bench->in_values, out = bench->out_values;
    float *values = static_cast<float *>(malloc((in + out + parameters) * bytes));
    if (!values)
        exit(1);
    pass->precision = precision;
    own->packed = {};
    own->in_last = storage->last && conv;
    own->out_last = storage->last;
    own->in_delta = storage->overwrites ? own->in : bench->kept;
    must(stored_from(precision, &layer->in, own->in_last, pass->count, bench->in, own->in, NULL));
    must(stored_from(precision, &layer->out, own->out_last, pass->count, bench->out_delta, own->out_delta,
                     NULL));
    if (conv)
        must(conv_prepare(own, precision, pass->count, &bench->allocations, NULL));
    must(conv ? conv_forward(own, pass) : linear_forward(own, pass));
    must(conv ? conv_backward(own, pass) : linear_backward(own, pass));
    must(stored_into(precision, &layer->out, own->out_last, pass->count, own->out, bench->results, NULL));
    must(stored_into(precision, &layer->in, own->in_last, pass->count, own->in_delta, bench->results + out,
                     NULL));
    must(cudaDeviceSynchronize());
    must(cudaMemcpy(values, bench->results, (out + in) * bytes, cudaMemcpyDefault));
    must(cudaMemcpy(values + out + in, pass->gradients, parameters * bytes, cudaMemcpyDefault));
    must(cudaMemset(own->out, 0xff, out * bytes));
    must(cudaMemset(own->in_delta, 0xff, in * bytes));
    must(cudaMemset(pass->gradients, 0xff, parameters * bytes));
    return values;
}

/* Rounds exact results as they are stored. */
static float rounded(float value, enum precision precision)
{
    return precision == PRECISION_BF16   ? __bfloat162float(__float2bfloat16_rn(value))
           : precision == PRECISION_FP16 ? __half2float(__float2half_rn(value))
                                         : value;
}

/* Returns how many values differ from exact ones that are rounded to `precision`. NaN always differs. */
static size_t differences(const float *mine, const float *right, size_t count, enum precision precision)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i++)
        found += mine[i] != rounded(right[i], precision);
    return found;
}

/* Prints one line per storage. Returns the number of storages whose results differ from fp32. */
static int run(const struct trial *trial)
{
    int failures = 0;
    struct bench bench = {};
    open_bench(trial, &bench);
    float *right = results(&bench, &exact);
    const struct layer *layer = &bench.model.layers[0];
    size_t in = bench.in_values, out = bench.out_values, own = layer->weight_values + layer->bias_values;
    for (const struct storage &each : storages) {
        float *mine = results(&bench, &each);
        size_t wrong[3] = {
            differences(mine, right, out, each.precision),
            differences(mine + out, right + out, in, each.precision),
            differences(mine + out + in, right + out + in, layer->weight_values, PRECISION_FP32) +
                differences(mine + out + in + layer->bias, right + out + in + layer->bias, layer->bias_values,
                            PRECISION_FP32),
        };
        bool well = wrong[0] + wrong[1] + wrong[2] == 0;
        printf("%s  %s %s %ux%ux%ux%u to %u, kernel %ux%ux%u, batch %u: differences: %zu of %zu outputs, "
               "%zu of %zu gradients of inputs, %zu of %zu gradients of parameters\n",
               well ? "ok    " : "FAILED", each.name, trial->kind == LAYER_CONV ? "conv" : "linear",
               trial->in.channels, trial->in.depth, trial->in.height, trial->in.width, trial->out,
               trial->kernel[0], trial->kernel[1], trial->kernel[2], trial->batch, wrong[0], out, wrong[1],
               in, wrong[2], own);
        failures += !well;
        free(mine);
    }
    free(right);
    allocations_free(&bench.allocations);
    return failures;
}

/* ---- GELU ---- */

#define PATTERNS 0x10000u /* of 16 bits */

/* Computes GELU of all bf16 and then of all fp16 numbers. */
static __global__ void gelu_patterns(float *inputs, struct gelu_pair *pairs, float *alone)
{
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    const uint16_t bits = (uint16_t)i;
    inputs[i] =
        i < PATTERNS ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
    pairs[i] = gelu_both(inputs[i]);
    alone[i] = gelu(inputs[i]);
}

/* Prints a line. Returns the number of values with too large errors. */
static int run_gelu(void)
{
    const uint32_t count = 2 * PATTERNS;
    float *inputs, *alone;
    struct gelu_pair *pairs;
    double most[3] = {}; /* absolute error, relative error from -3 to 0, absolute error of the derivative */
    int failures = 0;
    must(cudaMallocManaged(&inputs, count * sizeof *inputs));
    must(cudaMallocManaged(&alone, count * sizeof *alone));
    must(cudaMallocManaged(&pairs, count * sizeof *pairs));
    gelu_patterns<<<count / 256, 256>>>(inputs, pairs, alone);
    must(cudaGetLastError());
    must(cudaDeviceSynchronize());
    for (uint32_t i = 0; i < count; i++) {
        const double x = inputs[i], share = erfc(-x * sqrt(0.5)) / 2;
        failures += isnan(x) && !isnan(pairs[i].value);
        if (!isfinite(x))
            continue;
        /* Rounding, and values below the normal ones, are no errors of the formula. */
        const double error = fmax(0, fabs(pairs[i].value - x * share) - fabs(x * share) * 0x1p-22);
        const double relative = x < -1e-30 && x >= -3 ? error / -(x * share) : 0;
        const double slope = fabs(pairs[i].slope - share - x * exp(-x * x / 2) / sqrt(2 * M_PI));
        failures += !(error < 3.2e-6 && relative < 2.5e-4 && slope < 4e-5 && alone[i] == pairs[i].value);
        most[0] = fmax(most[0], error);
        most[1] = fmax(most[1], relative);
        most[2] = fmax(most[2], slope);
    }
    printf(
        "%s  gelu: errors of at most %.2g, relative ones of %.2g from -3 to 0, and %.2g of the derivative; "
        "%d of %u values are wrong\n",
        failures ? "FAILED" : "ok    ", most[0], most[1], most[2], failures, count);
    for (void *memory : {(void *)inputs, (void *)alone, (void *)pairs})
        must(cudaFree(memory));
    return failures;
}

int main(int argc, char **argv)
{
    int failures = 0;
    bool brief = argc > 1 && strcmp(argv[1], "--short") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0); /* print each line immediately */
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_tensor: %s\n", status_text());
        return 4;
    }
    failures += run_gelu();
    for (const struct trial &trial : trials)
        if (!brief || trial.batch <= SHORT_BATCH)
            failures += run(&trial);
    return failures ? 3 : 0;
}
