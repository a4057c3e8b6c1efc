/* A network in device memory: the data of each layer and the functions that compute it. The kernels of its
 * layers run on one stream, in the same order in every run. */
#ifndef FDSL_CUDA_TRAIN_NETWORK_CUH
#define FDSL_CUDA_TRAIN_NETWORK_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/check.cuh"
#include "core/status.h"
#include "train/engine.h"
#include "train/layer_precision.h"
#include "train/operands.cuh"
#include "train/loss.h"

#define BLOCK 256 /* threads per block of kernels with one element per thread */

typedef __nv_bfloat16 bf16;
typedef __half fp16;

/* Instantiates a function template for both 16-bit types of tensors. */
#define EACH_HALF(name)                       \
    template decltype(name<bf16>) name<bf16>; \
    template decltype(name<fp16>) name<fp16>;

/* Format of GEMM operands. Sums, parameters and their gradients are fp32. Tensors between layers are stored
 * in 16 bits if GEMM operands have 16 bits, otherwise in fp32. */
enum precision { PRECISION_FP32, PRECISION_TF32, PRECISION_BF16, PRECISION_FP16 };

/* Returns the size of a stored value. */
static inline size_t stored_bytes(enum precision precision)
{
    return precision == PRECISION_BF16 || precision == PRECISION_FP16 ? sizeof(uint16_t) : sizeof(float);
}

/* Calls `visit` with a value of the type in which tensors are stored. */
template <class Visit> static inline enum status with_stored(enum precision precision, const Visit &visit)
{
    return precision == PRECISION_BF16   ? visit(__nv_bfloat16())
           : precision == PRECISION_FP16 ? visit(__half())
                                         : visit(float());
}

/* A layer and its tensors, each (batch, ...), in the type of with_stored(). ReLU and dropout run in place:
 * `in` equals `out`, and in_delta equals out_delta. */
struct device_layer {
    const struct layer *layer;
    void *in, *out;
    /* Gradients of the loss with respect to `in` and `out`. in_delta is NULL if it is not needed. A gradient
     * may have the memory of its tensor, as no value of the tensor is needed after the gradient is stored:
     * see open_tensor() in engine.cu. */
    void *in_delta, *out_delta;
    bool in_last, out_last; /* whether `in` and `out` are channels last (stored.cuh); never in fp32 */
    float *logits;          /* last layer only: gets the outputs, in fp32, instead of `out` */
    /* A ReLU is fused into its neighbours where possible. In the forward pass, the preceding layer applies it
     * if that layer has a GEMM or is an addition. In the backward pass, the next layer that does not run in
     * place applies the ReLU's mask, unless that layer is an addition. */
    bool relu;        /* the forward pass of this layer also applies the ReLU after it */
    bool relu_before; /* the backward pass also applies the mask of the ReLU before this layer */
    bool forward_done, backward_done; /* ReLU only: a neighbour computes this pass */
    struct windows forward, backward; /* convolution only: windows over `in`, and over `out_delta` */
    uint8_t *largest;                 /* pooling only: per output, the maximum's index in its window */
    struct {                          /* only convolutions that packed_conv.cu computes; otherwise NULL */
        uint16_t *weights, *opposite; /* (out, tap, in), and (in, opposite tap, out) */
    } packed;
    const struct device_layer *added; /* LAYER_ADD only: the earlier layer whose output is added */
    void *library;                    /* cuDNN's state for this layer; NULL if cuDNN does not compute it */
    bool measures;                    /* cuDNN only: choose algorithms by measurement */
};

/* Data about the current batch that all layers use. Pointers are to device memory. */
struct pass {
    cudaStream_t stream;
    uint32_t count; /* samples of this rank */
    uint32_t total; /* samples of the step on all ranks; the gradients are those of their mean loss */
    bool training;
    enum precision precision;
    uint64_t seed;
    uint32_t epoch;
    const uint32_t *numbers; /* sample numbers, which select the random draws */
    const float *parameters;
    float *gradients;
    float *workspace;     /* WORKSPACE_VALUES floats */
    enum gradients_of of; /* what a backward pass computes */
};

/* The device memory that an engine allocates. */
struct allocations {
    void **blocks;
    uint32_t count, room; /* blocks in use, and entries of `blocks` */
    uint64_t bytes;
    struct memory_account *account; /* train->memory: receives what is allocated; NULL: none */
    enum memory_part part;          /* of the next allocations */
};

/* Returns whether memory is only counted. Pointers are then not valid, and kernels must not run. */
static inline bool allocations_plan(const struct allocations *allocations)
{
    return allocations->account && allocations->account->plans;
}

/* Allocates device memory; allocations_free() frees it. Returns STATUS_TOO_LARGE, with a remedy in the
 * message, if device memory or the limit of the account runs out. If memory is only counted, `*pointer`
 * becomes an address that is not NULL. */
enum status allocate_bytes(struct allocations *allocations, void **pointer, size_t bytes);
void allocations_free(struct allocations *allocations);

template <class T>
static inline enum status allocate(struct allocations *allocations, T **pointer, size_t count)
{
    return allocate_bytes(allocations, reinterpret_cast<void **>(pointer), count * sizeof(T));
}

/* Allocates device memory and enqueues zeroing it. */
template <class T>
static inline enum status allocate_zeros(struct allocations *allocations, T **pointer, size_t count,
                                         cudaStream_t stream)
{
    TRY(allocate(allocations, pointer, count));
    return allocations_plan(allocations)
               ? STATUS_OK
               : CUDA_STATUS(cudaMemsetAsync(*pointer, 0, count * sizeof(T), stream));
}

/* Allocates device memory and enqueues a copy of `bytes` bytes of host memory to it. */
template <class T>
static inline enum status allocate_copy(struct allocations *allocations, T **pointer, const void *from,
                                        size_t bytes, cudaStream_t stream)
{
    void *copy;
    TRY(allocate_bytes(allocations, &copy, bytes));
    if (!allocations_plan(allocations))
        CUDA_TRY(cudaMemcpyAsync(copy, from, bytes, cudaMemcpyHostToDevice, stream));
    *pointer = static_cast<T *>(copy);
    return STATUS_OK;
}

/* ---- State, progress and graphs ---- */

/* Enqueues a copy of an arena between host and device, in either direction. */
enum status arena_copy(const struct train *train, float *to, const float *from, cudaStream_t stream);

/* Enqueues a copy of the parameters and, when training, of the optimizer's moments and the moving average, in
 * either direction. A state in device memory has an average if train_averages(). A state in host memory may
 * lack it: see struct train_state. */
enum status state_copy(const struct train *train, const struct train_state *to,
                       const struct train_state *from, cudaStream_t stream);

/* Enqueues a reset of an engine's totals, which are in device memory. */
enum status totals_clear(struct train_totals *totals, cudaStream_t stream);

/* The progress of an engine: its totals, copied to pinned host memory while steps run. The copies are
 * enqueued whether or not progress is displayed. A zeroed struct device_progress may be closed, but not read.
 */
struct device_progress {
    struct train_totals *seen; /* pinned memory: the totals at the latest copy */
    uint32_t steps;            /* steps enqueued since that copy */
};
enum status device_progress_open(struct device_progress *progress);
void device_progress_close(struct device_progress *progress);
/* Call after enqueuing `steps` steps. Once TRAIN_PROGRESS_STEPS steps have accumulated, enqueues a copy of
 * `totals` (device memory) to the host. */
enum status device_progress_step(struct device_progress *progress, const struct train_totals *totals,
                                 uint32_t steps, cudaStream_t stream);
/* Call when the totals have been reset and no step is running. */
void device_progress_clear(struct device_progress *progress);
/* Writes the latest progress to `into`. The device may write `seen` concurrently. Each field is read whole,
 * but the fields may come from different copies. */
void device_progress_read(const struct device_progress *progress, struct train_progress *into);

/* Ends the capture of a graph that began on `stream`, and instantiates the graph. `status` is the status of
 * the captured calls. */
enum status capture_end(cudaStream_t stream, enum status status, cudaGraphExec_t *into);

/* ---- Layers ---- */

/* Implementation of a kind of layer. Before the first pass, `prepare` creates the layer's resources for
 * batches of up to `batch` samples. `release` frees these resources except device memory; it is called even
 * if `prepare` failed. Both may be NULL.
 *
 * Forward functions fill layer->out. Backward functions read layer->out_delta. With GRADIENTS_OF_INPUTS, they
 * fill layer->in_delta, unless it is NULL. With GRADIENTS_OF_WEIGHTS, they fill the gradients of the layer's
 * parameters in pass->gradients. A pass with GRADIENTS_OF_WEIGHTS alone visits only layers with parameters,
 * and follows a pass with GRADIENTS_OF_INPUTS. */
struct layer_passes {
    enum status (*prepare)(struct device_layer *layer, enum precision precision, uint32_t batch,
                           struct allocations *allocations, cudaStream_t stream);
    enum status (*forward)(const struct device_layer *layer, const struct pass *pass);
    enum status (*backward)(const struct device_layer *layer, const struct pass *pass);
    void (*release)(struct device_layer *layer);
};

/* Our own implementation of each kind of layer (layers.cu). */
extern const struct layer_passes own_passes[LAYER_KINDS];

/* Convolutions by cuDNN, for the engines that serve as baselines (cudnn.cu): in strict fp32, or in TF32 on
 * tensor cores if cuDNN chooses it. */
extern const struct layer_passes cudnn_conv_fp32, cudnn_conv_tf32;
/* Loads cuDNN. Returns STATUS_UNAVAILABLE, with a remedy in the message, if it is missing. */
enum status cudnn_probe(void);

/* The functions of layers with GEMMs, for the table `own_passes`. */
enum status conv_prepare(struct device_layer *layer, enum precision precision, uint32_t batch,
                         struct allocations *allocations, cudaStream_t stream);
enum status conv_forward(const struct device_layer *layer, const struct pass *pass);
enum status conv_backward(const struct device_layer *layer, const struct pass *pass);
enum status linear_forward(const struct device_layer *layer, const struct pass *pass);
enum status linear_backward(const struct device_layer *layer, const struct pass *pass);
/* Returns whether packed_conv.cu computes a convolution whose tensors are channels last. */
bool packed_takes(const struct layer *conv, enum precision precision);
/* Convolutions in 16-bit formats (packed_conv.cu). packed_prepare() allocates layer->packed if both tensors
 * of the convolution are channels last and packed_takes(). */
enum status packed_prepare(struct device_layer *layer, enum precision precision,
                           struct allocations *allocations);
enum status packed_forward(const struct device_layer *layer, const struct pass *pass);
enum status packed_backward(const struct device_layer *layer, const struct pass *pass);

/* Calls `visit` for all LAYER_ADD layers before `end` that use the output of `layer`, in order. */
template <class Visit>
static inline enum status visit_adds(const struct device_layer *layer, const struct device_layer *end,
                                     const Visit &visit)
{
    for (const struct device_layer *add = layer + 1; add < end; add++)
        if (add->added == layer)
            TRY(visit(add));
    return STATUS_OK;
}

/* Adds `count` values of `from` to those of `to`; both are stored tensors. */
enum status stored_add(const struct pass *pass, const void *from, uint32_t count, void *to);

/* Zeroes each element of `deltas` where the element of `values` (a ReLU's output) is not positive; both are
 * stored tensors. */
enum status relu_mask(const struct pass *pass, const void *values, void *deltas, uint32_t count);

/* Convert a batch of `count` samples between a stored tensor and fp32 values in C order. */
enum status stored_from(enum precision precision, const struct shape *shape, bool last, uint32_t count,
                        const float *from, void *to, cudaStream_t stream);
enum status stored_into(enum precision precision, const struct shape *shape, bool last, uint32_t count,
                        const void *from, float *to, cudaStream_t stream);

/* Computes the gradient of the layer's bias: the sum of layer->out_delta over samples and positions. */
enum status bias_backward(const struct device_layer *layer, const struct pass *pass);

/* ---- Samples ---- */

/* A data set in device memory. `labels` and `multi_hot` always cover the whole set. */
struct device_set {
    const void *values;
    uint32_t *labels;
    uint32_t *multi_hot;    /* as in struct data_set; NULL: each sample has one class */
    struct train_held held; /* which samples are in `values` */
    bool gray;              /* `values` has only the first channel of each sample; the others are equal */
};

/* Enqueues copies of the data sets to device memory. For inference, copies only the test set. Always copies
 * the labels of a set. Copies its values too, except for training samples that a feed delivers (feed.cuh),
 * and except in the later stages of a pipeline. */
enum status device_sets_open(const struct train *train, struct device_set sets[DATA_PARTS],
                             struct allocations *allocations, cudaStream_t stream);

/* The samples of a batch in device memory: sample numbers, labels, and moves (shift, flip, erasing). If the
 * samples are mixed, entry count + j is the partner of sample j (train_entries()). */
struct device_batch {
    uint32_t *numbers, *labels;
    const uint32_t *multi_hot; /* that of the set */
    struct draw_move *moves;
    struct mix mix;
    bool erase_last; /* samples are erased after they are mixed (augment.erase_last); only with a mix */
};

/* Allocates the arrays for batches of up to `capacity` samples. */
enum status device_batch_allocate(const struct train *train, uint32_t capacity, struct device_batch *batch,
                                  struct allocations *allocations);

/* Returns where device_set.values has entry `j` of a batch of `count` samples. */
static __device__ __forceinline__ uint32_t stored_at(const struct train_held &held,
                                                     const struct device_batch &batch, uint32_t count,
                                                     uint32_t j)
{
    return held.alone ? train_held_at(&held, count, j) : batch.numbers[j];
}

/* Chooses the samples of a part of a step, their partners, their moves, and how they are mixed. The results
 * are the same as those of train_batch(), box_move() and train_mix() on the host. `part` comes from
 * train_part(), and has at least one sample. */
enum status batch_draw(const struct train *train, const struct device_set *set, struct device_batch *batch,
                       uint32_t epoch, uint32_t step, const struct share *part, cudaStream_t stream);
/* Chooses the samples first, first + 1, ..., first + count - 1, without moves. */
enum status batch_list(const struct device_set *set, struct device_batch *batch, uint32_t first,
                       uint32_t count, cudaStream_t stream);
/* How to compute the values of a batch of `samples` samples from a set. */
struct gather_plan {
    enum dtype type;
    struct shape shape;
    uint32_t samples;
    size_t sample_bytes; /* size of a sample in the set */
    struct train_held held;
    bool gray;
    float scale[DATA_CHANNELS_MAX], offset[DATA_CHANNELS_MAX];
};
struct gather_plan gather_plan_of(const struct data *data, const struct device_set *set, uint32_t samples);

/* Returns the address of the stored sample of entry `j` of the batch. */
static __device__ __forceinline__ const uint8_t *stored_sample(const struct gather_plan &plan,
                                                               const uint8_t *stored,
                                                               const struct device_batch &batch, uint32_t j)
{
    return stored + stored_at(plan.held, batch, plan.samples, j) * plan.sample_bytes;
}

/* Returns the value at row y and column x of a plane of a sample, after moving and normalising the image, and
 * with `erases` also after erasing it. `first` is the index of the plane's first value in the sample. */
static __device__ __forceinline__ float gathered(const struct gather_plan &plan, const uint8_t *sample,
                                                 const struct draw_move &move, bool erases, uint32_t channel,
                                                 uint32_t first, uint32_t y, uint32_t x)
{
    int32_t from = draw_moved(&move, plan.shape.height, plan.shape.width, y, x);
    const uint32_t equal = plan.gray ? channel * plan.shape.depth * plan.shape.height * plan.shape.width : 0;
    float value = from < 0 ? 0 : data_value(plan.type, sample, first - equal + (size_t)from);
    value = fmaf(value, plan.scale[channel], plan.offset[channel]);
    return erases ? box_erased(&move.erase, y, x, first + y * plan.shape.width + x, value) : value;
}

/* Writes the moved, normalised, erased and mixed values of a batch to `values`. The result is the same as
 * that of data_gather() and mix_samples() on the host. */
enum status batch_gather(const struct data *data, const struct device_set *set,
                         const struct device_batch *batch, uint32_t count, float *values,
                         cudaStream_t stream);

/* ---- Loss and parameters ---- */

/* State of the loss scaling, in device memory. The host never waits for the scale. The engine's totals()
 * returns the number of skipped steps. */
struct device_scale {
    struct loss_scale now;
    /* If the gradients of this step contain an Inf or a NaN: 1 + the number of the last layer, in the order
     * of the table, that has one. The backward pass begins with the last layer, so there the overflow began.
     * Otherwise 0. */
    uint32_t overflowed;
    uint32_t skipped; /* steps skipped since the last totals() */
    struct layer_places places;
    uint32_t steps[MODEL_LAYERS_MAX]; /* per layer of the table: skipped steps whose overflow began there */
};

#define LOSS_MASKED 2 /* in device_losses.right: the sample does not count */

struct device_losses {
    float *losses; /* per sample */
    uint32_t
        *right; /* per sample: whether the prediction is correct; LOSS_MASKED if its label is DATA_MASKED */
    struct train_totals *totals;
    struct device_scale *scale; /* loss scaling; NULL: none */
};

/* Computes the loss of each sample of the batch. Writes the gradient of the logits to `deltas`, multiplied by
 * the loss scale if there is one. Adds the batch to losses->totals. A sample whose label is DATA_MASKED does
 * not count, and its part of a mixture has weight 0. If the loss is not finite, records `step`
 * in bad_step, unless an earlier step is recorded there. With loss scaling, only NaN is bad, because loss
 * scaling handles overflows to Inf. `deltas` may be `logits`. */
enum status loss_take(const struct train *train, const float *logits, const struct device_batch *batch,
                      const struct pass *pass, uint64_t step, float *deltas,
                      const struct device_losses *losses);

/* Allocates the state. Its scale is set later. */
enum status scaling_open(const struct model *model, struct allocations *allocations,
                         struct device_scale **scale, cudaStream_t stream);

/* scaling_check() sets `overflowed` if one of `values` gradients is not finite. scaling_unscale() does so
 * too, and divides them by the scale. */
enum status scaling_check(struct device_scale *scale, size_t values, const float *gradients,
                          cudaStream_t stream);
enum status scaling_unscale(struct device_scale *scale, size_t values, float *gradients, cudaStream_t stream);

/* Call after the optimizer. Counts the step and its layer if it was skipped, updates the scale, and clears
 * `overflowed`. */
enum status scaling_step(const struct loss_scale_rule *rule, struct device_scale *scale, cudaStream_t stream);

/* Clipping of gradients (optimizer.cu); in device memory. The host never waits for the norm. The order of the
 * sums depends only on the number of gradients, so all ranks get the same bits. */
struct device_clip;

/* Allocates `*clip` if the optimizer clips gradients; else sets it to NULL. */
enum status clip_open(const struct train *train, struct allocations *allocations, struct device_clip **clip);

/* Computes the norm of the gradients, and from it clip->factor. `values` is the number of gradients, a
 * multiple of 4. Adds the norm to the totals, unless loss scaling skips the step. Does nothing if `clip` is
 * NULL. `scale` may be NULL. */
enum status clip_find(const struct optimizer *optimizer, size_t values, const float *gradients,
                      const struct device_scale *scale, struct device_clip *clip, struct train_totals *totals,
                      cudaStream_t stream);

/* Copies train_update_of() of all tensors to the device. An entry is for MODEL_ALIGNMENT parameters of one
 * tensor, because tensors begin at multiples of this number. */
enum status groups_open(const struct train *train, struct allocations *allocations,
                        struct tensor_update **groups, cudaStream_t stream);

/* The memory of updates that need whole tensors (train_needs_tensors()), on the device. Pointers that the
 * optimizer does not need are NULL. */
struct device_tensors {
    bool tensor_cores; /* the engine sets it: Muon may round the factors of its GEMMs to TF32 */
    float *adjusted;   /* an arena: with clip_adaptive the clipped gradients, with Muon the directions */
    struct tensor_unit *units; /* of optimizer_clip_unit() */
    uint32_t unit_count;
    /* Parts of the tensors whose values are added up: with LAMB of all tensors, with Muon of hidden matrices.
     * `ends`: per tensor, the number of parts of this tensor and those before. */
    struct tensor_part *parts;
    uint32_t part_count, *ends;
    double2 *sums;      /* per part: sums of squares */
    float *trust;       /* per tensor: update.trust */
    float *norms;       /* Muon, per tensor: the factor that divides a matrix by its norm */
    float *squares;     /* Muon: room for two squares and a matrix */
    float *workspace;   /* Muon: WORKSPACE_VALUES floats */
    size_t square_most; /* Muon: room of a square */
};

/* Allocates the arrays. Does nothing unless train_needs_tensors(). */
enum status tensors_open(const struct train *train, struct allocations *allocations,
                         struct device_tensors *tensors, cudaStream_t stream);

/* What the update of parameters may need beyond the optimizer. Each pointer may be NULL. */
struct update_extras {
    const struct device_scale *scale; /* nothing is updated if scale->overflowed is set */
    const struct device_clip *clip;
    const struct tensor_update *groups; /* groups[i] applies to the MODEL_ALIGNMENT parameters from
                                           MODEL_ALIGNMENT * i on */
    void *rounded; /* gets the new parameters, rounded to fp16 if `to_fp16` is set, else to bf16 */
    bool to_fp16;
    const float *trust, *directions; /* set by tensors_adjust() */
};

/* Call before parameters_update() if train_needs_tensors(): the pass over whole tensors (optimizer.h). Sets
 * extras->trust and extras->directions, and `*gradients` to the clipped gradients. extras->groups must be
 * set. */
enum status tensors_adjust(const struct train *train, const struct update *update,
                           const struct device_tensors *tensors, const struct train_state *state,
                           struct update_extras *extras, const float **gradients, cudaStream_t stream);

/* Runs optimizer_apply() on all parameters, and updates their moving average, if there is one. The arrays
 * have `values` elements, and room for a multiple of 4. */
enum status parameters_update(const struct update *update, size_t values, const float *gradients,
                              const struct update_extras *extras, const struct train_state *state,
                              cudaStream_t stream);

/* Adds `count` values of `from` to those of `to`. */
enum status values_add(const float *from, size_t count, float *to, cudaStream_t stream);

/* ---- Launches ---- */

/* Number of blocks with BLOCK threads for `elements` elements. */
static inline uint32_t blocks_for(size_t elements)
{
    return (uint32_t)((elements + BLOCK - 1) / BLOCK);
}

/* Returns the index of this thread in the grid, which is also the index of the element that it computes. */
static __device__ __forceinline__ uint32_t own_element(void)
{
    return blockIdx.x * BLOCK + threadIdx.x;
}

#endif
