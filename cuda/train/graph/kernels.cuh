/* Shared by the CUDA kernels of train-graph: the shapes of the network `cnn`, the memory layouts, and small
 * device functions. The convolutions of `cnn` are called conv1 and conv2, its linear layers fc1 and fc2.
 *
 * With one rank, a step is six kernels (docs/notes/engines.md). Matrices are bf16; sums, parameters and the
 * optimizer's state are fp32. All shapes are compile-time constants, so the compiler can fold index
 * arithmetic. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_KERNELS_CUH
#define FDSL_CUDA_TRAIN_GRAPH_KERNELS_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "common/check.cuh"
#include "common/shared.cuh"
#include "common/stream.cuh"
#include "core/portable.h"
#include "core/status.h"
#include "train/engine.h"
#include "train/mma.cuh"
#include "train/network.cuh"

/* ---- The network: layers 0 to 9 of `cnn` ---- */

#define CONV1_CHANNELS 32
#define CONV2_CHANNELS 64
#define CONV_TAPS      9
#define HIDDEN         128
#define GRAPH_CLASSES  32  /* maximum: each class takes one lane of a warp */
#define GRAPH_ROWS     128 /* batch buffers have a multiple of this many rows: tiles need no bounds checks */
/* Maximum number of blocks that share the samples of the convolutions' backward pass. */
#define GRAPH_PARTS_MAX 128
/* Number of steps whose loaded samples are on the device at the same time. A power of two. */
#define GRAPH_RING         32
#define DROPOUT1_NUMBER    5 /* layer index of the first dropout; selects its stream of random numbers */
#define DROPOUT2_NUMBER    8
#define DROPOUT1_THRESHOLD 64
#define DROPOUT2_THRESHOLD 128
/* The factor by which the first dropout multiplies kept values. */
#define KEPT_SCALE (256.0f / (256 - DROPOUT1_THRESHOLD))

enum graph_tensor { CONV1_W, CONV1_B, CONV2_W, CONV2_B, FC1_W, FC1_B, FC2_W, FC2_B, GRAPH_TENSORS };

/* Constants that follow from the shape of a sample. SPLITS: number of parts of fc1's forward sums, chosen so
 * that a batch of 256 occupies most multiprocessors of an H200. SLICE: inputs of fc1 per block in the
 * backward pass. */
template <int CHANNELS, int HEIGHT, int WIDTH, int SPLITS, int SLICE> struct graph_net {
    static constexpr int channels = CHANNELS, height = HEIGHT, width = WIDTH;
    static constexpr int values = channels * height * width;
    static constexpr int taps1 = CONV_TAPS * channels;
    static constexpr int depth1 =
        (taps1 + 1 + 15) / 16 * 16; /* taps, plus one for the bias, rounded up to a multiple of 16 */
    static constexpr int rows1 = height - 2, columns1 = width - 2, pixels1 = rows1 * columns1;
    static constexpr int rows2 = height - 4, columns2 = width - 4;
    static constexpr int window_columns = columns2 / 2, windows = rows2 / 2 * window_columns;
    static constexpr int features = CONV2_CHANNELS * windows;
    static constexpr int splits = SPLITS, split_depth = features / SPLITS, slice = SLICE;
    /* Number of values in the four convolution tensors. The arena stores them first, without gaps. */
    static constexpr int conv_parameters = CONV1_CHANNELS * taps1 + CONV1_CHANNELS +
                                           CONV2_CHANNELS * CONV_TAPS * CONV1_CHANNELS + CONV2_CHANNELS;
    static_assert(features % SPLITS == 0 && split_depth % 32 == 0,
                  "each half of a split is a multiple of 16");
    static_assert(features % SLICE == 0, "whole slices");
    static_assert(rows2 % 2 == 0 && columns2 % 4 == 0, "windows come in pairs");
    static_assert(conv_parameters % 64 == 0 && CONV1_CHANNELS * taps1 % MODEL_ALIGNMENT == 0, "no gaps");
};

typedef graph_net<1, 28, 28, 32, 72> graph_gray;
typedef graph_net<3, 32, 32, 28, 56> graph_colour;

/* ---- Memory layouts ---- */

/* conv2's weights as a GEMM operand: bf16 [64][9 taps x 32]. Rows are padded by 16 bytes, so eight
 * consecutive rows begin in different bank groups (four banks, 16 bytes). */
#define CONV2_DEPTH (CONV_TAPS * CONV1_CHANNELS)
#define CONV2_PITCH (CONV2_DEPTH * 2 + 16) /* bytes */
#define CONV2_BYTES (CONV2_CHANNELS * CONV2_PITCH)

/* Returns the index of a weight of conv2 in plan.conv2_weight. With `hopper`, the weights are (9 taps, 4
 * groups of inputs, 64 outputs, 8 inputs), without padding. */
FDSL_HD uint32_t conv2_place(bool hopper, uint32_t output, uint32_t tap, uint32_t input)
{
    return hopper ? ((tap * 4 + input / 8) * CONV2_CHANNELS + output) * 8 + input % 8
                  : output * (CONV2_PITCH / 2) + tap * CONV1_CHANNELS + input;
}

/* Returns the byte offset of a 16-byte piece of conv1's output in shared memory. A pixel has 32 bf16 values:
 * four pieces. They are swizzled by the pixel number. The same piece of eight consecutive pixels is then in
 * eight different bank groups. */
FDSL_HD uint32_t conv1_piece(uint32_t pixel, uint32_t piece)
{
    return pixel * 64 + ((piece ^ (pixel >> 1 & 3)) << 4);
}

/* Returns the byte offset of a 16-byte piece of the gradient of conv2's output in shared memory, swizzled. A
 * pixel has 64 bf16 values: eight pieces. */
FDSL_HD uint32_t delta_piece(uint32_t pixel, uint32_t piece)
{
    return pixel * 128 + ((piece ^ (pixel & 7)) << 4);
}

/* Position in the training run. The first kernel of a step reads it; add_totals() advances it. */
struct graph_position {
    uint32_t epoch, step; /* within the epoch */
    uint64_t number;      /* step number, counted over all epochs */
};

/* Data about the current step for its kernels. In training, the first kernel of the step writes it. In
 * inference, the host writes it. */
struct graph_step {
    uint32_t epoch, first, count; /* `count` samples from index `first` of the epoch's order */
    uint32_t total;  /* training only: samples of the step on all ranks; gradients are of their mean loss */
    uint32_t part;   /* inference only: number of the set; its samples are used in stored order */
    uint64_t number; /* step number, counted over all epochs */
    const struct update *update;
};

/* The samples of a rank in a step: `count` of the step's `total` samples, from index `first` of the step. */
struct graph_share {
    uint32_t first, count, total;
};

/* Kernel arguments of a step. They do not change from step to step. Pointers are to device memory. `batch` is
 * the maximum number of samples of this rank in a step. `rows` is `batch` rounded up to a multiple of
 * GRAPH_ROWS; rows past the batch are zero. `parts` is the number of blocks that share the samples in
 * graph_conv_back(). */
struct graph_plan {
    uint64_t seed;
    uint32_t batch, rows, samples, classes, parts;
    uint32_t steps, stride;         /* steps per epoch; samples of a full step on all ranks */
    struct graph_share share, last; /* this rank's samples of a full step, and of an epoch's last step */
    struct augment augment;
    struct optimizer optimizer;
    struct schedule schedule;
    float smoothing;
    float scale[3], offset[3];
    /* Samples of the sets. With `ring`, those of the training set are loaded (DATA_LOAD): values[DATA_TRAIN]
     * has room for the samples of GRAPH_RING steps, each `batch` samples, and step number n uses room n
     * modulo GRAPH_RING. */
    const uint8_t *values[DATA_PARTS];
    bool ring;
    const uint32_t *labels; /* labels of the training set */
    uint32_t *order;        /* sample numbers in the order of the epoch */
    struct graph_position *position;
    struct update *updates; /* of each step of the epoch */
    struct graph_step *step;
    struct train_state state;
    float *gradients;      /* `arena_values` values, in the order of gradient_place() */
    uint32_t arena_values; /* size of an arena */
    uint32_t tensors[GRAPH_TENSORS];
    bool keep_gradients; /* store the gradient of fc1's weights even without `apart` and `hopper`; all other
                            gradients are always stored */
    bool apart;   /* several ranks: the kernels only store gradients, and graph_apply() updates parameters */
    bool hopper;  /* compute capability 9.0, and samples of 1x28x28: the kernels of *_hopper.cu run */
    bool overlap; /* a kernel may start before the previous one ends: see launch_overlapped() */
    /* Parameters as GEMM operands. */
    __nv_bfloat16 *conv2_weight; /* CONV2_BYTES, in the order of conv2_place() */
    __nv_bfloat16 *fc1_weight;   /* (128, features) */
    /* Activations and their gradients. Each has `rows` samples; the shape of a sample is in parentheses. */
    __nv_bfloat16 *pooled; /* (features): after ReLU and dropout, before dropout's factor 4/3 */
    uint8_t *argmax; /* (features): bit i is set if pixel i of the window was the maximum; 0: no gradient */
    /* Only with `hopper`: conv1's output, in the order of kept_piece(), and the samples as
     * bf16, each in 16-byte pieces. */
    uint4 *conv1, *images;
    float *split_sums;           /* [splits][rows](128): partial sums of fc1 */
    float *hidden;               /* (128): after ReLU and dropout, with dropout's factor */
    __nv_bfloat16 *hidden_delta; /* (128) */
    float *logit_delta;          /* (classes) */
    float *logits;               /* (classes), inference only */
    float *losses;
    uint32_t *right;
    __nv_bfloat16 *pooled_delta; /* (features): gradient of conv2's output at the pixel that `argmax` marks */
    float *conv_sums;            /* [parts](conv_parameters): gradients summed over the samples of a block */
    struct train_totals *totals;
};

/* ---- Launches: each function enqueues kernels of a step on `stream` ---- */

enum status graph_forward(const struct graph_plan *plan, bool colour, bool training, cudaStream_t stream);
enum status graph_dense(const struct graph_plan *plan, bool colour, bool training, cudaStream_t stream);
enum status graph_dense_back(const struct graph_plan *plan, bool colour, cudaStream_t stream);
enum status graph_conv_back(const struct graph_plan *plan, bool colour, cudaStream_t stream);
/* With plan->hopper, graph_forward(), graph_dense_back() and graph_conv_back() call these. */
enum status graph_forward_hopper(const struct graph_plan *plan, bool training, cudaStream_t stream);
enum status graph_dense_back_hopper(const struct graph_plan *plan, cudaStream_t stream);
enum status graph_conv_back_hopper(const struct graph_plan *plan, cudaStream_t stream);
enum status graph_update(const struct graph_plan *plan, bool colour, cudaStream_t stream);
/* Only with plan->apart: updates the parameters whose exchanged gradients have the indices first to end - 1
 * of gradient_place(). `first` and `end` are multiples of four. */
enum status graph_apply(const struct graph_plan *plan, uint32_t first, uint32_t end, cudaStream_t stream);

/* Returns the shared memory per block, in bytes, of the kernel that needs the most. */
int graph_shared_bytes(bool colour);

/* These functions enqueue work between steps. graph_order() writes the order of an epoch, and the optimizer's
 * constants of its steps. graph_go_to() sets the position. graph_refresh() updates the bf16 copies of the
 * parameters after the parameters were set. */
enum status graph_order(const struct graph_plan *plan, const struct draw_order *order, uint32_t epoch,
                        cudaStream_t stream);
enum status graph_go_to(const struct graph_plan *plan, const struct graph_position *position,
                        cudaStream_t stream);
enum status graph_refresh(const struct graph_plan *plan, bool colour, cudaStream_t stream);

/* ---- Overlapping launches: see common/stream.cuh. Every kernel calls allow_next() directly after
 * wait_for_previous(). ---- */

/* Launches a kernel of a step with `bytes` bytes of dynamic shared memory. If plan->overlap is set, the
 * kernel may overlap the previous one. */
static inline enum status launch_overlapped(void (*kernel)(struct graph_plan), const char *name, dim3 blocks,
                                            int threads, int bytes, const struct graph_plan *plan,
                                            cudaStream_t stream)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute;
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = (size_t)bytes;
    config.stream = stream;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = plan->overlap;
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return cuda_status(cudaLaunchKernelEx(&config, kernel, *plan), name, __FILE__, __LINE__);
}

/* ---- Device functions ---- */

/* Computes c += a b, like mma_16816() for bf16. The asm is not volatile, so the compiler may move it. */
static __device__ __forceinline__ void multiply(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Transposes an 8 x 8 matrix of 16-bit values that is spread over the warp. */
static __device__ __forceinline__ uint32_t transposed(uint32_t word)
{
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

/* Returns the maximum, or NaN if either value is NaN. */
static __device__ __forceinline__ float larger(float a, float b)
{
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

static __device__ __forceinline__ uint32_t bf16_bits(float value)
{
    return __bfloat16_as_ushort(__float2bfloat16(value));
}

/* Returns the index in plan.gradients of the gradient of parameter `at` of the arena. The tensors after fc1's
 * weights come first, then the tensors before fc1's weights, then fc1's weights. All gradients except those
 * of fc1's weights are therefore contiguous, and one exchange adds them up. */
FDSL_HD uint32_t gradient_place(uint32_t arena_values, uint32_t fc1_bias, uint32_t at)
{
    return at < fc1_bias ? at + (arena_values - fc1_bias) : at - fc1_bias;
}

static __device__ __forceinline__ float *gradient_of(const struct graph_plan &plan, uint32_t at)
{
    return plan.gradients + gradient_place(plan.arena_values, plan.tensors[FC1_B], at);
}

/* A parameter and its moments. */
struct parameter {
    float value, m, v;
};

static __device__ __forceinline__ struct parameter load_parameter(const struct graph_plan &plan,
                                                                  const struct update &update, uint32_t at)
{
    return {plan.state.parameters[at], plan.state.m[at],
            optimizer_moments(update.kind) > 1 ? plan.state.v[at] : 0};
}

/* Stores the gradient of parameter `at` of the arena, whose present values are `old`. Then updates the
 * parameter and returns its new value. With plan.apart, does not update the parameter, because the ranks
 * exchange gradients first. */
static __device__ __forceinline__ float step_parameter(const struct graph_plan &plan,
                                                       const struct update &update, uint32_t at,
                                                       float gradient, struct parameter old)
{
    *gradient_of(plan, at) = gradient;
    if (plan.apart)
        return 0;
    optimizer_step(&update, gradient, &old.value, &old.m, &old.v);
    plan.state.parameters[at] = old.value;
    plan.state.m[at] = old.m;
    if (optimizer_moments(update.kind) > 1)
        plan.state.v[at] = old.v;
    return old.value;
}

/* Loads the parameter, too. */
static __device__ __forceinline__ float
step_parameter(const struct graph_plan &plan, const struct update &update, uint32_t at, float gradient)
{
    struct parameter old = {};
    if (!plan.apart)
        old = load_parameter(plan, update, at);
    return step_parameter(plan, update, at, gradient, old);
}

/* Returns the address of a training sample. It has row `row` in its step, which has number `step` over all
 * epochs, and it has number `number` in the set. */
template <class NET>
static __device__ __forceinline__ const uint8_t *training_sample(const struct graph_plan &plan, uint64_t step,
                                                                 uint32_t row, uint32_t number)
{
    uint32_t at = plan.ring ? (uint32_t)step % GRAPH_RING * plan.batch + row : number;
    return plan.values[DATA_TRAIN] + (size_t)at * NET::values;
}

/* Copies a sample, shifted and flipped by `move`, to shared memory as (channels, height, width). Bytes become
 * bf16, which represents them exactly. THREADS threads take part; `thread` is the number of this thread. */
template <class NET, int THREADS>
static __device__ __forceinline__ void take_image(const uint8_t *sample, const struct draw_move &move,
                                                  int thread, uint16_t *image)
{
#pragma unroll 8
    for (int i = thread; i < NET::values; i += THREADS) {
        uint32_t x = i % NET::width, y = i / NET::width % NET::height, plane = i / (NET::width * NET::height);
        int32_t from = draw_moved(&move, NET::height, NET::width, y, x);
        uint32_t byte = from < 0 ? 0 : sample[plane * (NET::width * NET::height) + (uint32_t)from];
        image[i] = (uint16_t)bf16_bits((float)byte);
    }
}

/* Returns the offset of tap k in the image, relative to the window's first pixel; 0 if k is padding of the
 * depth. */
template <class NET> static __device__ __forceinline__ int tap_offset(int k)
{
    return k < NET::taps1
               ? k / CONV_TAPS * (NET::height * NET::width) + k % CONV_TAPS / 3 * NET::width + k % 3
               : 0;
}

/* Returns the index in the image of the first pixel of a window of conv1; `p` is the window's output
 * pixel. */
template <class NET> static __device__ __forceinline__ int window_first(int p)
{
    return p / NET::columns1 * NET::width + p % NET::columns1;
}

/* Computes conv1 with bias and ReLU. Reads the image in shared memory, and writes 16-byte pieces to shared
 * memory; place(pixel, piece) is their byte offset in `out`. WARPS warps take part; `warp` is the number of
 * this warp. The GEMM multiplies raw bytes by weights that include the scale of the normalisation. `bias`, in
 * shared memory, includes the offset of the normalisation. The backward kernel calls this function too, and
 * gets the same bits. */
template <class NET, int WARPS, class PLACE>
static __device__ __forceinline__ void conv1_forward(const struct graph_plan &plan, const uint16_t *image,
                                                     const float *bias, int warp, const PLACE &place,
                                                     uint8_t *out)
{
    constexpr int steps = NET::depth1 / 16, tiles = (NET::pixels1 + 15) / 16;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t b[steps][4][2];
    int taps[steps][4];
    float start[4][2];
    const float *weight = plan.state.parameters + plan.tensors[CONV1_W];
#pragma unroll
    for (int s = 0; s < steps; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int k = 16 * s + 8 * half + 2 * t;
            taps[s][2 * half] = tap_offset<NET>(k);
            taps[s][2 * half + 1] = tap_offset<NET>(k + 1);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *row = weight + (8 * n + g) * NET::taps1;
                float low = k < NET::taps1 ? row[k] * plan.scale[k / CONV_TAPS] : 0;
                float high = k + 1 < NET::taps1 ? row[k + 1] * plan.scale[(k + 1) / CONV_TAPS] : 0;
                b[s][n][half] = pack<bf16>(low, high);
            }
        }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        start[n][0] = bias[8 * n + 2 * t];
        start[n][1] = bias[8 * n + 2 * t + 1];
    }
    for (int tile = warp; tile < tiles; tile += WARPS) {
        int p[2], first[2];
        float c[4][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            p[h] = 16 * tile + 8 * h + g;
            first[h] = window_first<NET>(min(p[h], NET::pixels1 - 1));
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            c[n][0] = c[n][2] = start[n][0];
            c[n][1] = c[n][3] = start[n][1];
        }
#pragma unroll
        for (int s = 0; s < steps; s++) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) { /* a[i]: pixels of half i % 2, taps of half i / 2 */
                uint32_t low = image[first[i % 2] + taps[s][2 * (i / 2)]];
                uint32_t high = image[first[i % 2] + taps[s][2 * (i / 2) + 1]];
                a[i] = low | high << 16;
            }
#pragma unroll
            for (int n = 0; n < 4; n++)
                multiply(c[n], a, b[s][n][0], b[s][n][1]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (p[h] < NET::pixels1)
                    *reinterpret_cast<uint32_t *>(out + place(p[h], n) + 4 * t) =
                        pack<bf16>(larger(c[n][2 * h], 0), larger(c[n][2 * h + 1], 0));
    }
}

/* Returns conv1's bias for output `o`, plus the contribution of the normalisation's offset. */
template <class NET> static __device__ __forceinline__ float conv1_bias(const struct graph_plan &plan, int o)
{
    const float *weight = plan.state.parameters + plan.tensors[CONV1_W] + o * NET::taps1;
    float sum = plan.state.parameters[plan.tensors[CONV1_B] + o];
#pragma unroll
    for (int k = 0; k < NET::taps1; k++)
        sum = fmaf(weight[k], plan.offset[k / CONV_TAPS], sum);
    return sum;
}

/* Starts copying conv2's weights to shared memory. The caller commits the copies, waits for them, and
 * synchronises the block. */
template <int THREADS>
static __device__ __forceinline__ void take_conv2_weight(const struct graph_plan &plan, int thread,
                                                         uint8_t *to)
{
    const uint8_t *from = reinterpret_cast<const uint8_t *>(plan.conv2_weight);
#pragma unroll 4
    for (int i = 16 * thread; i < CONV2_BYTES; i += 16 * THREADS)
        copy_async16(to + i, from + i);
}

/* ---- The kernels for compute capability 9.0 (*_hopper.cu), which multiply with wgmma ----
 *
 * Tensors in shared memory consist of matrices of 8 pixels by 8 channels, with 16 contiguous bytes per pixel.
 * A product of wgmma may begin at any pixel of them. Every tap of a convolution is therefore a constant
 * offset, and the same data serve as rows, as columns and as the summed dimension. */

#define ROW_PIECES   (4 * graph_gray::columns1) /* distance between rows of conv1's output, in pieces */
#define CONV1_PIECES (4 * graph_gray::pixels1)
#define IMAGE_PIECES (graph_gray::values / 8)
#define WEIGHT_BYTES (CONV2_CHANNELS * CONV2_DEPTH * 2)

/* Returns the index of a 16-byte piece of conv1's output. A row of pixels has four pieces per pixel: all
 * first pieces of the row are stored first, then all second ones. */
FDSL_HD uint32_t kept_piece(uint32_t pixel, uint32_t piece)
{
    return (pixel / graph_gray::columns1 * 4 + piece) * graph_gray::columns1 + pixel % graph_gray::columns1;
}

static __device__ __forceinline__ uint32_t kept_place(uint32_t pixel, uint32_t piece)
{
    return 16 * kept_piece(pixel, piece);
}

/* Starts copying conv2's weights, in the order of conv2_place(). */
template <int THREADS>
static __device__ __forceinline__ void take_conv2_pieces(const struct graph_plan &plan, uint8_t *to)
{
#pragma unroll 6
    for (uint32_t i = threadIdx.x; i < WEIGHT_BYTES / 16; i += THREADS)
        copy_async16(to + 16 * i, plan.conv2_weight + 8 * i);
}

#endif
