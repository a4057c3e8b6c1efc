/* The kernels of the engines `resnet` and `resnet-amp` (engine.cu). T is the 16-bit type of the
 * tensors: bf16 or fp16. They are in NHWC order: (sample, height, width, channel). A row is a pixel of a
 * sample; it has `channels` values, a multiple of 8. Sums are in fp32 or fp64, in an order that depends only
 * on the sizes, so repeated runs give the same bits. All functions with a `stream` enqueue their work on it
 * and return. */
#ifndef FDSL_CUDA_TRAIN_RESNET_KERNELS_CUH
#define FDSL_CUDA_TRAIN_RESNET_KERNELS_CUH

#include "train/network.cuh"
#include "train/mma.cuh"
#include "train/resnet/geometry.h"

#define RESNET_CHANNELS_MAX 2048 /* channels of a tensor */
#define RESNET_TILE_ROWS    128 /* rows per block of a convolution, which writes one partial sum per column */
#define RESNET_PARTS        1056 /* maximum number of partial sums per column of the other kernels */

/* ---- Eight adjacent values: 16 bytes ---- */

struct eight {
    float value[8];
};

template <class T> static __device__ __forceinline__ struct eight unpack8(uint4 words)
{
    struct eight all;
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 values = values_of<T>(word[i]);
        all.value[2 * i] = values.x;
        all.value[2 * i + 1] = values.y;
    }
    return all;
}

template <class T> static __device__ __forceinline__ uint4 pack8(const struct eight &all)
{
    return {pack<T>(all.value[0], all.value[1]), pack<T>(all.value[2], all.value[3]),
            pack<T>(all.value[4], all.value[5]), pack<T>(all.value[6], all.value[7])};
}

template <class T> static __device__ __forceinline__ struct eight load8(const T *from)
{
    return unpack8<T>(*reinterpret_cast<const uint4 *>(from));
}

static __device__ __forceinline__ struct eight load8(const float *from)
{
    const float4 low = reinterpret_cast<const float4 *>(from)[0],
                 high = reinterpret_cast<const float4 *>(from)[1];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

/* ---- Batch normalisation (norm.cu) ---- */

/* Values per channel that a normalisation computes from the sums over a batch, each an array of `channels`
 * values in fp32. The output is scale * input + shift. With the gradient g of the output, the gradient of the
 * input is slope * g + bend * input + rest. */
enum norm_values {
    NORM_SCALE,
    NORM_SHIFT,
    NORM_MEAN,
    NORM_INVERSE,
    NORM_SLOPE,
    NORM_BEND,
    NORM_REST,
    NORM_VALUES
};

struct resnet_norm {
    uint32_t channels;
    const float *weight, *bias; /* fp32 */
    float *values;              /* NORM_VALUES arrays */
    float *partial;             /* partial sums: (part, 2, channel) */
};

/* Computes mean, inverse, scale and shift from the partial sums of the inputs and of their squares over
 * `rows` rows. Writes the mean and the unbiased variance, times `share`, to `mean` and `variance`. */
enum status resnet_moments(const struct resnet_norm *norm, uint32_t parts, size_t rows, float share,
                           float *mean, float *variance, cudaStream_t stream);
/* Computes scale and shift from running statistics. */
enum status resnet_running(const struct resnet_norm *norm, const float *mean, const float *variance,
                           cudaStream_t stream);
/* Computes slope, bend and rest from the partial sums of g and of g times the normalised input over `rows`
 * rows. Writes the gradients of weight and bias. */
enum status resnet_slopes(const struct resnet_norm *norm, uint32_t parts, size_t rows, float *weight,
                          float *bias, cudaStream_t stream);

/* A normalisation over the rows of all ranks: begin() writes this rank's part of two sums per channel, in
 * fp32, the caller adds up `sums` over all ranks, and end() continues as resnet_moments() or resnet_slopes()
 * with the sums over `all` rows. With `parts` 0, this rank has no rows. `shift` has a value near the mean of
 * each channel, the same on all ranks: the running mean. resnet_shared_slopes_begin() writes the gradients of
 * weight and bias of this rank's rows. */
struct resnet_shared {
    size_t rows, all; /* of this rank; of all ranks */
    float *sums;      /* 2 arrays of `channels` values */
};
enum status resnet_shared_moments_begin(const struct resnet_norm *norm, const struct resnet_shared *shared,
                                        uint32_t parts, const float *shift, cudaStream_t stream);
enum status resnet_shared_moments_end(const struct resnet_norm *norm, const struct resnet_shared *shared,
                                      const float *shift, float *mean, float *variance, cudaStream_t stream);
enum status resnet_shared_slopes_begin(const struct resnet_norm *norm, const struct resnet_shared *shared,
                                       uint32_t parts, float *weight, float *bias, cudaStream_t stream);
enum status resnet_shared_slopes_end(const struct resnet_norm *norm, const struct resnet_shared *shared,
                                     cudaStream_t stream);

/* Computes outputs = ReLU(norm(inputs) + shortcut). `shortcut` may be NULL: nothing is added. If `other` is
 * not NULL, it normalises the shortcut first. */
template <class T>
enum status resnet_apply(const struct resnet_norm *norm, size_t rows, const T *inputs,
                         const struct resnet_norm *other, const T *shortcut, T *outputs, cudaStream_t stream);
/* Computes in_deltas = slope * deltas + bend * inputs + rest. Both arrays of gradients may be the same. */
template <class T>
enum status resnet_norm_backward(const struct resnet_norm *norm, size_t rows, const T *deltas,
                                 const T *inputs, T *in_deltas, cudaStream_t stream);

/* ---- Convolutions (conv.cu, conv_weights.cu) ---- */

/* A normalisation whose gradients a convolution's backward pass prepares: it writes the partial sums of the
 * gradients and of their products with the normalisation's `inputs` to norm->partial. */
template <class T> struct resnet_summed {
    const struct resnet_norm *norm; /* NULL: none */
    const T *inputs;
};

/* Returns the number of partial sums per column that a forward pass with `rows` rows writes. */
static inline uint32_t resnet_parts(size_t rows)
{
    return (uint32_t)((rows + RESNET_TILE_ROWS - 1) / RESNET_TILE_ROWS);
}

/* Computes outputs = convolution of inputs. Unless `partial` is NULL, writes partial sums of the outputs and
 * of their squares to it. */
template <class T>
enum status resnet_forward(const struct conv_shape *shape, uint32_t samples, const T *inputs,
                           const T *weights, T *outputs, float *partial, cudaStream_t stream);

/* Changes of the gradients of a convolution's inputs before they are stored. */
template <class T> struct resnet_after {
    const T *added; /* is added, in the layout of the inputs; NULL: nothing. May be the result's array */
    const T *relu;  /* outputs of a ReLU, whose mask is then applied; NULL: none */
    struct resnet_summed<T> summed[2];
};

/* Computes the gradients of the inputs from those of the outputs. `opposite` has the weights as (in, tap,
 * out). Sets `*parts` to the number of partial sums per column for the normalisations. */
template <class T>
enum status resnet_inputs(const struct conv_shape *shape, uint32_t samples, const T *deltas,
                          const T *opposite, const struct resnet_after<T> *after, T *in_deltas,
                          uint32_t *parts, cudaStream_t stream);

/* Returns the number of partial sums per column that resnet_inputs() writes. */
uint32_t resnet_input_parts(const struct conv_shape *shape, uint32_t samples);

/* Returns the room in values that resnet_weights() needs. */
size_t resnet_room(const struct conv_shape *shape, uint32_t samples);
/* Computes the gradients of the weights as (out, in, tap y, tap x), in fp32. For the first convolution,
 * `image_channels` is the number of channels of an image, otherwise 0. */
template <class T>
enum status resnet_weights(const struct conv_shape *shape, uint32_t samples, const T *inputs, const T *deltas,
                           uint32_t image_channels, float *room, float *gradients, cudaStream_t stream);

/* ---- Images, pooling, weights (pool.cu) ---- */

/* Gathers a batch as batch_gather() does, but writes padded images of IMAGE_CHANNELS values per pixel; see
 * stem_shape_of(). Does not write the padding. */
template <class T>
enum status resnet_gather(const struct data *data, const struct device_set *set,
                          const struct device_batch *batch, uint32_t count, const struct conv_shape *stem,
                          T *images, cudaStream_t stream);

/* Max-pooling of 3 x 3 with stride 2 and padding 1. */
struct resnet_pool {
    uint32_t height, width, out_height, out_width;
    struct resnet_norm norm; /* of the pooling's inputs, before a ReLU */
};
/* Computes outputs = max-pooling of ReLU(norm(inputs)). `largest` gets the index in its window of each
 * output's maximum. */
template <class T>
enum status resnet_pool_forward(const struct resnet_pool *pool, uint32_t samples, const T *inputs, T *outputs,
                                uint8_t *largest, cudaStream_t stream);
/* Computes the gradients of the normalisation's outputs, and their partial sums as struct resnet_summed. */
template <class T>
enum status resnet_pool_backward(const struct resnet_pool *pool, uint32_t samples, const T *deltas,
                                 const uint8_t *largest, const T *inputs, T *in_deltas, uint32_t *parts,
                                 cudaStream_t stream);

/* Computes the mean of each channel over the `pixels` rows of each sample. */
template <class T>
enum status resnet_mean(uint32_t samples, uint32_t pixels, uint32_t channels, const T *inputs, T *means,
                        cudaStream_t stream);
/* Computes the gradients of the mean's inputs, which are outputs of a ReLU, and applies its mask; see struct
 * resnet_after. */
template <class T>
enum status resnet_mean_backward(uint32_t samples, uint32_t pixels, uint32_t channels, const T *deltas,
                                 const struct resnet_after<T> *after, T *in_deltas, uint32_t *parts,
                                 cudaStream_t stream);

/* How to convert the weights of a convolution. */
template <class T> struct resnet_packing {
    size_t from; /* offset of the weights (out, in, tap y, tap x) in the arena */
    uint32_t outputs, inputs, kernel;
    uint32_t first_block; /* of the kernel, for this convolution; set by resnet_pack_blocks() */
    bool stem;            /* the first convolution: rows of 7 taps of STEM_CHANNELS values; no `opposite` */
    T *weights, *opposite;
};
/* Numbers the blocks of the kernel, and returns their number. */
template <class T> uint32_t resnet_pack_blocks(struct resnet_packing<T> *packs, uint32_t count);
/* Writes `weights` and `opposite` of all convolutions. `packs` is in device memory. */
template <class T>
enum status resnet_pack(const struct resnet_packing<T> *packs, uint32_t count, uint32_t blocks,
                        const T *parameters, cudaStream_t stream);

/* ---- Kernels that visit each value of a tensor once ----
 * A thread has one group of 8 channels, whose values per channel it keeps in registers, and every LANES-th
 * row of its block's share. */

/* The rows `first`, `first` + `step`, ... below `end` of a thread, and its first channel. */
struct spread {
    size_t first, end, step;
    uint32_t channel, lane, lanes;
    bool idle; /* the thread has no channels */
};

static __device__ __forceinline__ struct spread spread_of(size_t rows, uint32_t channels)
{
    const uint32_t groups = channels / 8, lanes = BLOCK / groups, lane = threadIdx.x / groups;
    struct spread own;
    own.channel = (threadIdx.x - lane * groups) * 8;
    own.lane = lane;
    own.lanes = lanes;
    own.idle = lane >= lanes;
    own.first = own.idle ? rows : (size_t)blockIdx.x * lanes + lane;
    own.end = rows;
    own.step = (size_t)gridDim.x * lanes;
    return own;
}

/* Returns the number of blocks: `each` rows per thread, but at most `most` blocks. */
static inline uint32_t spread_blocks(size_t rows, uint32_t channels, uint32_t each, uint32_t most)
{
    const size_t lanes = BLOCK / (channels / 8), blocks = (rows + lanes * each - 1) / (lanes * each);
    return (uint32_t)(blocks < most ? blocks : most);
}

/* Adds up 8 sums of each thread over the lanes of the block, in order, and writes those of each channel to
 * `to`. All threads of the block call it. `scratch` has 8 * BLOCK values. */
static __device__ __forceinline__ void spread_sums(const struct spread &own, const float (&sums)[8],
                                                   uint32_t channels, float *scratch, float *to)
{
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (!own.idle)
            scratch[own.lane * channels + own.channel + i] = sums[i];
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < channels; c += BLOCK) {
        float sum = 0;
        for (uint32_t l = 0; l < own.lanes; l++)
            sum += scratch[l * channels + c];
        to[c] = sum;
    }
}

#endif
