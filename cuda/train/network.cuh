/* A network in device memory: what layers are given, and what they do. Kernels run one behind the other on
 * one stream, in an order that is the same in every run. */
#ifndef FDSL_CUDA_TRAIN_NETWORK_CUH
#define FDSL_CUDA_TRAIN_NETWORK_CUH

#include <cuda_runtime.h>

#include "core/status.h"
#include "train/engine.h"
#include "train/operands.cuh"
#include "train/scaling.cuh"

#define BLOCK 256 /* threads of the kernels that take an element a thread */

/* What products multiply; they add in fp32, and all tensors are fp32. */
enum precision { PRECISION_FP32, PRECISION_TF32, PRECISION_BF16, PRECISION_FP16 };

/* A layer and where its tensors are, each (batch, ...). A ReLU and a dropout work in place: `in` and `out`
 * are the same, and so are the gradients. */
struct device_layer {
    const struct layer *layer;
    float *in, *out;
    float *in_delta, *out_delta; /* the loss's gradients; in_delta is NULL where nobody wants it */
    /* A ReLU next to a layer with products needs no kernels of its own: forward the layer before it applies
     * it, and backward the layer behind it, a pool too. */
    bool relu, relu_before;           /* the neighbour is one, and this layer applies it */
    bool forward_done, backward_done; /* of a ReLU: a neighbour does */
    struct windows forward, backward; /* of a convolution: over `in`, and over `out_delta` */
    uint32_t *largest;                /* of a pool: which element of the sample each output was */
    struct {                          /* of a convolution that packed_conv.cu makes; else NULL: */
        uint16_t *in, *deltas;        /* copies in 16 bits, (sample, position, channel) */
        uint16_t *weights, *opposite; /* (out, tap, in), and (in, opposite tap, out) */
    } packed;
    const struct device_layer *added; /* of an addition: the earlier layer */
    void *library;                    /* what a library keeps of the layer, where one computes it */
};

/* What all layers must know of a batch on its way. */
struct pass {
    cudaStream_t stream;
    uint32_t count; /* samples */
    bool training;
    enum precision precision;
    uint64_t seed;
    uint32_t epoch;
    const uint32_t *numbers; /* of the samples */
    const float *parameters;
    float *gradients;
    float *workspace; /* WORKSPACE_VALUES */
};

/* All device memory of an engine. */
struct allocations {
    void *blocks[8 * MODEL_LAYERS_MAX];
    uint32_t count;
    uint64_t bytes;
};

/* Device memory until allocations_free(). STATUS_USAGE with a remedy where there is not enough. */
enum status allocate_bytes(struct allocations *allocations, void **pointer, size_t bytes);
void allocations_free(struct allocations *allocations);

template <class T>
static inline enum status allocate(struct allocations *allocations, T **pointer, size_t count)
{
    return allocate_bytes(allocations, reinterpret_cast<void **>(pointer), count * sizeof(T));
}

/* Who computes a kind of layer. Before the first pass, `prepare` makes what it needs for batches of up to so
 * many samples, and `release` frees what of that is no device memory, also after a failure; both may be NULL.
 */
struct layer_passes {
    enum status (*prepare)(struct device_layer *layer, uint32_t batch, struct allocations *allocations,
                           cudaStream_t stream);
    enum status (*forward)(const struct device_layer *layer, const struct pass *pass);
    enum status (*backward)(const struct device_layer *layer, const struct pass *pass);
    void (*release)(struct device_layer *layer);
};

/* The parts of a network, each in its file. Forward fills layer->out; backward fills layer->in_delta from
 * layer->out_delta, and the gradients of the layer's parameters. */
enum status conv_prepare(struct device_layer *layer, uint32_t batch, struct allocations *allocations,
                         cudaStream_t stream);
enum status conv_forward(const struct device_layer *layer, const struct pass *pass);
enum status conv_backward(const struct device_layer *layer, const struct pass *pass);
/* The same in 16 bits, of layers that packed_prepare() has given copies: it takes convolutions whose channels
 * allow it, in precisions that have 16 bits, and leaves all other layers. `learns`: there is a way back. */
enum status packed_prepare(struct device_layer *layer, enum precision precision, uint32_t batch, bool learns,
                           struct allocations *allocations);
enum status packed_forward(const struct device_layer *layer, const struct pass *pass);
enum status packed_backward(const struct device_layer *layer, const struct pass *pass);
enum status linear_forward(const struct device_layer *layer, const struct pass *pass);
enum status linear_backward(const struct device_layer *layer, const struct pass *pass);
enum status relu_forward(const struct device_layer *layer, const struct pass *pass);
enum status relu_backward(const struct device_layer *layer, const struct pass *pass);
enum status pool_forward(const struct device_layer *layer, const struct pass *pass);
enum status pool_backward(const struct device_layer *layer, const struct pass *pass);
enum status dropout_forward(const struct device_layer *layer, const struct pass *pass);
enum status dropout_backward(const struct device_layer *layer, const struct pass *pass);
enum status add_forward(const struct device_layer *layer, const struct pass *pass);
enum status add_backward(const struct device_layer *layer, const struct pass *pass);
enum status mean_forward(const struct device_layer *layer, const struct pass *pass);
enum status mean_backward(const struct device_layer *layer, const struct pass *pass);

/* Adds to layer->out_delta, which the next layer has stored, those of all additions that take the layer's
 * output: layers before `end`, in their order. */
enum status added_backward(const struct device_layer *layer, const struct device_layer *end,
                           const struct pass *pass);

/* Zeros in `deltas` where a ReLU's output is not above 0. */
enum status relu_mask(const float *values, float *deltas, uint32_t count, cudaStream_t stream);

/* The gradient of a bias: the sum of layer->out_delta over samples and positions. */
enum status bias_backward(const struct device_layer *layer, const struct pass *pass);

/* ---- Samples ---- */

/* A data set in device memory, or the values of a batch alone, one behind the other, with the set's labels.
 */
struct device_set {
    const void *values;
    const uint32_t *labels;
    bool batch_alone;
};

/* The samples of a batch: numbers in their set, labels, and how they are moved. */
struct device_batch {
    uint32_t *numbers, *labels;
    struct draw_move *moves;
};

/* Those of a step of an epoch: as train_batch() and draw_move(). */
enum status batch_draw(const struct train *train, const struct device_set *set,
                       const struct device_batch *batch, uint32_t epoch, uint32_t step, uint32_t count,
                       cudaStream_t stream);
/* Those from `first` on, in order and not moved. */
enum status batch_list(const struct device_set *set, const struct device_batch *batch, uint32_t first,
                       uint32_t count, cudaStream_t stream);
/* Their values, as data_gather(). */
enum status batch_gather(const struct data *data, const struct device_set *set,
                         const struct device_batch *batch, uint32_t count, float *values,
                         cudaStream_t stream);

/* ---- Loss and parameters ---- */

struct device_losses {
    float *losses;   /* of each sample */
    uint32_t *right; /* whether it was guessed */
    struct train_totals *totals;
    struct device_scale *scale; /* of the loss; NULL: it is not scaled */
};

/* The losses of the batch and `deltas`, the gradient of its logits, scaled; adds to the totals as of step
 * `step`. A bad loss is one that is no finite number; where it is scaled, one that is no number: infinite is
 * then an overflow, as any other. */
enum status loss_take(const struct train *train, const float *logits, const uint32_t *labels, uint32_t count,
                      uint64_t step, float *deltas, const struct device_losses *losses, cudaStream_t stream);

/* One optimizer_step() for all parameters; arrays of `values`. None where the gradients overflowed; `scale`
 * may be NULL. */
enum status parameters_update(const struct update *update, size_t values, const float *gradients,
                              const struct device_scale *scale, const struct train_state *state,
                              cudaStream_t stream);

/* ---- Launches ---- */

/* Blocks of BLOCK threads for so many elements. */
static inline uint32_t blocks_for(size_t elements)
{
    return (uint32_t)((elements + BLOCK - 1) / BLOCK);
}

/* The element of this thread. */
static __device__ __forceinline__ uint32_t own_element(void)
{
    return blockIdx.x * BLOCK + threadIdx.x;
}

#endif
