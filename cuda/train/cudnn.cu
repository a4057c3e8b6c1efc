/* Convolutions by cuDNN, for `train-cudnn` and `train-cudnn-tf32`: the baseline for our own kernels. Tensors
 * are fp32 in the layout of all our layers (batch, channels, ...). Only deterministic algorithms are used. A
 * layer chooses its algorithms once for each batch size, by cuDNN's estimate or by measurement.
 *
 * cudnn_probe() loads the library, so other variants run without it. The types come from cuDNN's header. The
 * calls belong to cuDNN's older API, which cuDNN 9 deprecates but still has in full. Programs normally call
 * the newer graph API through a separate C++ library (cudnn-frontend), which would be one more dependency
 * of this program. */
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>

#define CUDNN_DEPRECATED
#include <cudnn.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "train/network.cuh"

#define CUDNN_LIBRARY     "libcudnn.so.9"
#define ALGORITHMS_MAX    16
#define CUDNN_SCRATCH_MAX ((size_t)256 << 20) /* limit in bytes for the workspace of an algorithm */
#define MEASURED_RUNS     3                   /* timed runs per algorithm, after one run to load kernels */
#define CUDNN_AXES        (MODEL_AXES + 2)    /* axes of a tensor: sample, channel, and the kernel's axes */

/* ---- The library ---- */

#define FUNCTIONS(X)                            \
    X(Create)                                   \
    X(Destroy)                                  \
    X(SetStream)                                \
    X(GetErrorString)                           \
    X(CreateTensorDescriptor)                   \
    X(SetTensorNdDescriptorEx)                  \
    X(DestroyTensorDescriptor)                  \
    X(CreateFilterDescriptor)                   \
    X(SetFilterNdDescriptor)                    \
    X(DestroyFilterDescriptor)                  \
    X(CreateConvolutionDescriptor)              \
    X(SetConvolutionNdDescriptor)               \
    X(SetConvolutionMathType)                   \
    X(DestroyConvolutionDescriptor)             \
    X(GetConvolutionForwardAlgorithm_v7)        \
    X(GetConvolutionBackwardDataAlgorithm_v7)   \
    X(GetConvolutionBackwardFilterAlgorithm_v7) \
    X(ConvolutionForward)                       \
    X(ConvolutionBackwardData)                  \
    X(ConvolutionBackwardFilter)

static struct {
    bool there;
#define MEMBER(name) decltype(&cudnn##name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
} cudnn;

enum status cudnn_probe(void)
{
    if (cudnn.there)
        return STATUS_OK;
    void *library = dlopen(CUDNN_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return status_set(STATUS_UNAVAILABLE,
                          "needs cuDNN 9: %s; install it, or add its folder to LD_LIBRARY_PATH", dlerror());
#define FIND(name)                                         \
    *(void **)&cudnn.name = dlsym(library, "cudnn" #name); \
    if (!cudnn.name)                                       \
        return status_set(STATUS_UNAVAILABLE, "needs cuDNN 9: " CUDNN_LIBRARY " has no cudnn" #name);
    FUNCTIONS(FIND)
#undef FIND
    cudnn.there = true;
    return STATUS_OK;
}

static enum status cudnn_status(cudnnStatus_t result, const char *call, int line)
{
    static_assert(CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED == (int)CUDNN_CODE_HOST_MEMORY &&
                      CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED == (int)CUDNN_CODE_DEVICE_MEMORY,
                  "exhausted.h has other codes");
    enum status status = library_status(LIBRARY_CUDNN, result);
    return status == STATUS_OK ? STATUS_OK
                               : status_set(status, "cudnn%s failed: %s (%s:%d)", call,
                                            cudnn.GetErrorString(result), __FILE__, line);
}

/* Calls a cuDNN function, named without its prefix `cudnn`. If the call fails, returns the failure from the
 * calling function: STATUS_EXHAUSTED if memory ran out, else STATUS_FAILED. */
#define CUDNN_TRY(call) TRY(cudnn_status(cudnn.call, #call, __LINE__))

/* ---- One layer ---- */

/* The algorithms for one batch size. They are kept, so repeated steps use the same algorithms. */
struct algorithms {
    struct algorithms *next;
    uint32_t count; /* samples in the batch */
    cudnnConvolutionFwdAlgo_t forward;
    cudnnConvolutionBwdDataAlgo_t data;
    cudnnConvolutionBwdFilterAlgo_t filter;
};

struct convolution {
    cudnnHandle_t handle;
    cudnnTensorDescriptor_t in, out;
    cudnnFilterDescriptor_t weight;
    cudnnConvolutionDescriptor_t plan;
    cudaStream_t stream;
    struct algorithms *all, *now;     /* all: list of all batch sizes so far; now: the current batch size */
    struct allocations *allocations;  /* the engine's allocations, which own the workspace */
    void *scratch;                    /* the workspace */
    size_t scratch_bytes, held_bytes; /* requested size, allocated size */

    /* Only if layer->measures: an array that replaces the weights and their gradients in measured runs, and
     * events that time these runs. */
    float *stand_in;
    cudaEvent_t begin, end;
};

static void release(struct device_layer *layer)
{
    struct convolution *self = static_cast<struct convolution *>(layer->library);
    if (!self)
        return;
    /* Ignores errors: nothing can be done about them, and nothing depends on them. */
    if (self->plan)
        (void)cudnn.DestroyConvolutionDescriptor(self->plan);
    if (self->weight)
        (void)cudnn.DestroyFilterDescriptor(self->weight);
    if (self->out)
        (void)cudnn.DestroyTensorDescriptor(self->out);
    if (self->in)
        (void)cudnn.DestroyTensorDescriptor(self->in);
    if (self->handle)
        (void)cudnn.Destroy(self->handle);
    destroy(self->begin, self->end);
    while (self->all) {
        struct algorithms *next = self->all->next;
        free(self->all);
        self->all = next;
    }
    free(self);
    layer->library = nullptr;
}

/* Returns whether the convolution can be described as 2-D. cuDNN has more algorithms for 2-D than for 3-D. */
static bool flat(const struct layer *conv)
{
    return conv->in.depth == 1 && conv->spec.kernel[0] == 1 && conv->spec.padding[0] == 0;
}

/* Fills `axes` for a tensor of `count` samples, or for the weights of `count` output channels. Returns the
 * number of axes. */
static int axes_of(const struct layer *conv, uint32_t count, uint32_t channels,
                   const uint32_t lengths[MODEL_AXES], int axes[CUDNN_AXES])
{
    int used = 0;
    axes[used++] = (int)count;
    axes[used++] = (int)channels;
    for (int i = flat(conv); i < MODEL_AXES; i++)
        axes[used++] = (int)lengths[i];
    return used;
}

static enum status describe_tensor(const struct layer *conv, uint32_t count, const struct shape *shape,
                                   cudnnTensorDescriptor_t tensor)
{
    const uint32_t lengths[MODEL_AXES] = {shape->depth, shape->height, shape->width};
    int axes[CUDNN_AXES], used = axes_of(conv, count, shape->channels, lengths, axes);
    CUDNN_TRY(SetTensorNdDescriptorEx(tensor, CUDNN_TENSOR_NCHW, CUDNN_DATA_FLOAT, used, axes));
    return STATUS_OK;
}

static enum status describe_plan(const struct layer *conv, const struct convolution *self,
                                 cudnnMathType_t math)
{
    int axes[CUDNN_AXES], pads[MODEL_AXES], ones[MODEL_AXES], used = 0;
    for (int i = flat(conv); i < MODEL_AXES; i++, used++) {
        pads[used] = (int)conv->spec.padding[i];
        ones[used] = 1;
    }
    CUDNN_TRY(SetConvolutionNdDescriptor(self->plan, used, pads, ones, ones, CUDNN_CROSS_CORRELATION,
                                         CUDNN_DATA_FLOAT));
    CUDNN_TRY(SetConvolutionMathType(self->plan, math));
    used = axes_of(conv, conv->out.channels, conv->in.channels, conv->spec.kernel, axes);
    CUDNN_TRY(SetFilterNdDescriptor(self->weight, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, used, axes));
    return STATUS_OK;
}

static enum status create(struct convolution *self)
{
    CUDNN_TRY(Create(&self->handle));
    CUDNN_TRY(SetStream(self->handle, self->stream));
    CUDNN_TRY(CreateTensorDescriptor(&self->in));
    CUDNN_TRY(CreateTensorDescriptor(&self->out));
    CUDNN_TRY(CreateFilterDescriptor(&self->weight));
    CUDNN_TRY(CreateConvolutionDescriptor(&self->plan));
    return STATUS_OK;
}

/* ---- Calls ---- */

static const float one = 1, zero = 0;

/* The memory that a cuDNN call uses in addition to the arrays of struct device_layer. */
struct call_memory {
    const float *weight;
    float *gradient; /* gradient of the weights */
    void *scratch;
    size_t scratch_bytes;
};

/* compute() enqueues one pass of the convolution. The type of the algorithm selects the pass. */
static cudnnStatus_t compute(const struct device_layer *layer, const struct call_memory *memory,
                             cudnnConvolutionFwdAlgo_t algorithm)
{
    const struct convolution *self = static_cast<const struct convolution *>(layer->library);
    return cudnn.ConvolutionForward(self->handle, &one, self->in, layer->in, self->weight, memory->weight,
                                    self->plan, algorithm, memory->scratch, memory->scratch_bytes, &zero,
                                    self->out, layer->out);
}

static cudnnStatus_t compute(const struct device_layer *layer, const struct call_memory *memory,
                             cudnnConvolutionBwdFilterAlgo_t algorithm)
{
    const struct convolution *self = static_cast<const struct convolution *>(layer->library);
    return cudnn.ConvolutionBackwardFilter(self->handle, &one, self->in, layer->in, self->out,
                                           layer->out_delta, self->plan, algorithm, memory->scratch,
                                           memory->scratch_bytes, &zero, self->weight, memory->gradient);
}

static cudnnStatus_t compute(const struct device_layer *layer, const struct call_memory *memory,
                             cudnnConvolutionBwdDataAlgo_t algorithm)
{
    const struct convolution *self = static_cast<const struct convolution *>(layer->library);
    return cudnn.ConvolutionBackwardData(self->handle, &one, self->weight, memory->weight, self->out,
                                         layer->out_delta, self->plan, algorithm, memory->scratch,
                                         memory->scratch_bytes, &zero, self->in, layer->in_delta);
}

/* ---- Algorithms ---- */

/* Runs an algorithm several times and sets `*least_ms` to the shortest time. Ignores the first run. If cuDNN
 * cannot run the algorithm, sets INFINITY. */
template <class Algorithm>
static enum status time_runs(const struct device_layer *layer, const struct call_memory *memory,
                             Algorithm algorithm, float *least_ms)
{
    const struct convolution *self = static_cast<const struct convolution *>(layer->library);
    *least_ms = INFINITY;
    for (int run = 0; run <= MEASURED_RUNS; run++) {
        float ms;
        CUDA_TRY(cudaEventRecord(self->begin, self->stream));
        cudnnStatus_t result = compute(layer, memory, algorithm);
        if (library_status(LIBRARY_CUDNN, result) == STATUS_FAILED)
            return STATUS_OK; /* an algorithm that cuDNN lists but cannot run */
        TRY(cudnn_status(result, "Convolution", __LINE__));
        CUDA_TRY(cudaEventRecord(self->end, self->stream));
        CUDA_TRY(cudaEventSynchronize(self->end));
        CUDA_TRY(cudaEventElapsedTime(&ms, self->begin, self->end));
        if (run > 0 && ms < *least_ms)
            *least_ms = ms;
    }
    return STATUS_OK;
}

/* Allocates a workspace for an algorithm, and measures the algorithm with it (time_runs()). The runs write
 * only tensors that the pass of this layer overwrites next. */
template <class Found>
static enum status measure(const struct device_layer *layer, const Found *found, float *least_ms)
{
    const struct convolution *self = static_cast<const struct convolution *>(layer->library);
    struct allocations own = {};
    struct call_memory memory = {self->stand_in, self->stand_in, nullptr, found->memory};
    enum status status = allocate_bytes(&own, &memory.scratch, found->memory);
    if (status == STATUS_OK)
        status = time_runs(layer, &memory, found->algo, least_ms);
    allocations_free(&own);
    return status;
}

template <class Found> static bool is_eligible(const Found *found)
{
    return found->status == CUDNN_STATUS_SUCCESS && found->determinism == CUDNN_DETERMINISTIC &&
           found->memory <= CUDNN_SCRATCH_MAX;
}

/* Chooses an algorithm that is deterministic and within the workspace limit. If layer->measures, measures all
 * such algorithms and chooses the fastest one. Otherwise chooses the first one, because cuDNN sorts
 * algorithms by expected speed. Raises self->scratch_bytes to the algorithm's workspace if that is larger. */
template <class Found, class Algorithm>
static enum status choose(const struct device_layer *layer, const Found *found, int count,
                          Algorithm *algorithm)
{
    struct convolution *self = static_cast<struct convolution *>(layer->library);
    const Found *best = nullptr;
    float best_ms = INFINITY;
    for (int i = 0; i < count && (layer->measures || !best); i++) {
        float ms = 0;
        if (!is_eligible(&found[i]))
            continue;
        if (layer->measures)
            TRY(measure(layer, &found[i], &ms));
        if (ms < best_ms) {
            best = &found[i];
            best_ms = ms;
        }
    }
    if (!best)
        return status_set(STATUS_FAILED,
                          "%s: cuDNN has no deterministic algorithm with at most %zu MiB of workspace for "
                          "this convolution; use train-cuda",
                          layer->layer->name, CUDNN_SCRATCH_MAX >> 20);
    *algorithm = best->algo;
    self->scratch_bytes = best->memory > self->scratch_bytes ? best->memory : self->scratch_bytes;
    return STATUS_OK;
}

static enum status choose_all(const struct device_layer *layer, struct algorithms *into)
{
    const struct convolution *self = static_cast<const struct convolution *>(layer->library);
    cudnnConvolutionFwdAlgoPerf_t forward[ALGORITHMS_MAX];
    cudnnConvolutionBwdDataAlgoPerf_t data[ALGORITHMS_MAX];
    cudnnConvolutionBwdFilterAlgoPerf_t filter[ALGORITHMS_MAX];
    int count;
    CUDNN_TRY(GetConvolutionForwardAlgorithm_v7(self->handle, self->in, self->weight, self->plan, self->out,
                                                ALGORITHMS_MAX, &count, forward));
    TRY(choose(layer, forward, count, &into->forward));
    if (!layer->out_delta)
        return STATUS_OK; /* inference */
    CUDNN_TRY(GetConvolutionBackwardFilterAlgorithm_v7(self->handle, self->in, self->out, self->plan,
                                                       self->weight, ALGORITHMS_MAX, &count, filter));
    TRY(choose(layer, filter, count, &into->filter));
    if (!layer->in_delta)
        return STATUS_OK;
    CUDNN_TRY(GetConvolutionBackwardDataAlgorithm_v7(self->handle, self->weight, self->out, self->plan,
                                                     self->in, ALGORITHMS_MAX, &count, data));
    return choose(layer, data, count, &into->data);
}

/* Sets self->now to the algorithms for `count` samples, and chooses them if there are none yet. */
static enum status choose_once(const struct device_layer *layer, uint32_t count)
{
    struct convolution *self = static_cast<struct convolution *>(layer->library);
    struct algorithms *one_size = self->all;
    while (one_size && one_size->count != count)
        one_size = one_size->next;
    if (!one_size) {
        struct algorithms chosen = {.next = self->all, .count = count};
        TRY(choose_all(layer, &chosen));
        one_size = static_cast<struct algorithms *>(malloc(sizeof *one_size));
        TRY(ALLOCATED(one_size, "cudnn: out of memory"));
        *one_size = chosen;
        self->all = one_size;
    }
    self->now = one_size;
    return STATUS_OK;
}

/* Prepares for a batch of `count` samples. A short batch may need other algorithms and a larger workspace. */
static enum status plan_batch(const struct device_layer *layer, uint32_t count)
{
    struct convolution *self = static_cast<struct convolution *>(layer->library);
    if (self->now && self->now->count == count)
        return STATUS_OK;
    self->now = nullptr; /* stays NULL if a later call fails */
    TRY(describe_tensor(layer->layer, count, &layer->layer->in, self->in));
    TRY(describe_tensor(layer->layer, count, &layer->layer->out, self->out));
    TRY(choose_once(layer, count));
    if (self->scratch_bytes > self->held_bytes) {
        /* The old workspace stays allocated until the engine closes. */
        self->allocations->part = MEMORY_WORKSPACE;
        TRY(allocate_bytes(self->allocations, &self->scratch, self->scratch_bytes));
        self->held_bytes = self->scratch_bytes;
    }
    return STATUS_OK;
}

static enum status prepare_measurement(const struct device_layer *layer)
{
    struct convolution *self = static_cast<struct convolution *>(layer->library);
    CUDA_TRY(cudaEventCreate(&self->begin));
    CUDA_TRY(cudaEventCreate(&self->end));
    return allocate_zeros(self->allocations, &self->stand_in, layer->layer->weight_values, self->stream);
}

template <cudnnMathType_t MATH>
static enum status prepare(struct device_layer *layer, enum precision, uint32_t batch,
                           struct allocations *allocations, cudaStream_t stream)
{
    struct convolution *self = static_cast<struct convolution *>(calloc(1, sizeof *self));
    TRY(ALLOCATED(self, "cudnn: out of memory"));
    layer->library = self;
    self->allocations = allocations;
    self->stream = stream;
    TRY(create(self));
    TRY(describe_plan(layer->layer, self, MATH));
    if (layer->measures)
        TRY(prepare_measurement(layer));
    return plan_batch(layer, batch);
}

/* ---- Forward and backward ---- */

static struct call_memory memory_of(const struct device_layer *layer, const struct pass *pass)
{
    const struct convolution *self = static_cast<const struct convolution *>(layer->library);
    const size_t weight = layer->layer->weight;
    return {pass->parameters + weight, pass->gradients + weight, self->scratch, self->scratch_bytes};
}

static __global__ void finish_kernel(float *values, const float *bias, struct divider positions,
                                     uint32_t channels, bool relu, uint32_t count)
{
    uint32_t i = own_element();
    if (i >= count)
        return;
    float value = values[i] + bias[positions.quotient(i) % channels];
    values[i] = relu && value <= 0 ? 0 : value; /* NaN passes through */
}

static enum status forward(const struct device_layer *layer, const struct pass *pass)
{
    const struct convolution *self = static_cast<const struct convolution *>(layer->library);
    const struct layer *conv = layer->layer;
    const uint32_t channels = conv->out.channels, values = pass->count * (uint32_t)conv->out_values;
    const struct divider positions = divider_of((uint32_t)conv->out_values / channels);
    TRY(plan_batch(layer, pass->count));
    const struct call_memory memory = memory_of(layer, pass);
    TRY(cudnn_status(compute(layer, &memory, self->now->forward), "ConvolutionForward", __LINE__));
    finish_kernel<<<blocks_for(values), BLOCK, 0, pass->stream>>>(static_cast<float *>(layer->out),
                                                                  pass->parameters + conv->bias, positions,
                                                                  channels, layer->relu, values);
    return CUDA_LAUNCHED("finish_kernel");
}

static enum status backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct convolution *self = static_cast<const struct convolution *>(layer->library);
    const struct layer *conv = layer->layer;
    TRY(plan_batch(layer, pass->count));
    TRY(bias_backward(layer, pass));
    const struct call_memory memory = memory_of(layer, pass);
    TRY(cudnn_status(compute(layer, &memory, self->now->filter), "ConvolutionBackwardFilter", __LINE__));
    if (!layer->in_delta)
        return STATUS_OK;
    TRY(cudnn_status(compute(layer, &memory, self->now->data), "ConvolutionBackwardData", __LINE__));
    return layer->relu_before
               ? relu_mask(pass, layer->in, layer->in_delta, pass->count * (uint32_t)conv->in_values)
               : STATUS_OK;
}

const struct layer_passes cudnn_conv_fp32 = {prepare<CUDNN_FMA_MATH>, forward, backward, release};
const struct layer_passes cudnn_conv_tf32 = {prepare<CUDNN_DEFAULT_MATH>, forward, backward, release};
