/* train-graph, backward through the convolutions, for samples of 1x28x28 on compute capability 9.0. It
 * computes what conv_back.cu computes, but with wgmma, and loads conv1's output, which the forward pass has
 * kept.
 *
 * Each of the three warpgroups computes the gradient of conv2's weights for a column of the taps, and keeps
 * the sums in registers over all samples of the block. It also computes the gradient of conv2's input for a
 * third of the pixels, and from it the gradient of conv1's weights, while the tensor cores work on the
 * weights of conv2. With one rank, it also updates a share of fc1's weights (98 % of all parameters) while it
 * waits for tensor cores. */
#include "train/graph/conv_back.cuh"
#include "train/vit/hopper.cuh"

typedef graph_gray net;

#define WARPS           (4 * WARPGROUPS)
#define THREADS         (32 * WARPS)
#define WARPGROUPS      3
#define PARTS_OF_SAMPLE 4

/* Shared memory offsets in bytes. As in conv_back.cu, the gradient of conv2's output has rows of the length
 * of conv1's, and zeros around it: pixel (y, x) has index (y + 2) * columns1 + x + 2. */
namespace at
{
constexpr int border = 2 * net::columns1 + 2, delta_pixels = net::pixels1 + border;
/* Distance between channels 8 i and 8 i + 8. It is one more than a multiple of 128 bytes, so that spread()
 * stores without bank conflicts. */
constexpr int plane = (delta_pixels + 6) / 8 * 128 + 16;
constexpr int conv1 = 0, conv1_bytes = net::pixels1 * 64;
constexpr int delta = conv1 + conv1_bytes;
constexpr int weight = delta + CONV2_CHANNELS / 8 * plane;
constexpr int images = weight + WEIGHT_BYTES,
              image_bytes = net::values * 2; /* this sample's, the next one's */
/* The gradients of the pooled values and their argmax. Eight channels at a time are contiguous; the gaps
 * between them let spread() load without bank conflicts. */
constexpr int pooled = images + 2 * image_bytes, pooled8 = 8 * net::windows * 2 + 32;
constexpr int argmax = pooled + CONV2_CHANNELS / 8 * pooled8, argmax8 = 8 * net::windows + 16;
constexpr int bias2 =
    argmax + CONV2_CHANNELS / 8 * argmax8; /* gradient of conv2's bias: a sum per two warps */
constexpr int update = bias2 + WARPS / 2 * CONV2_CHANNELS * 4; /* the optimizer's constants of the step */
constexpr int bytes = update + (int)sizeof(struct update);
constexpr int tiles = (net::pixels1 + 63) / 64; /* of conv2's input */
static_assert(plane / 16 >= delta_pixels && plane % 128 == 16, "as described");
static_assert(conv1_bytes % 16 == 0 && image_bytes % 16 == 0 && net::windows % 16 == 0 && bytes % 4 == 0,
              "aligned");
static_assert(bytes <= 227 * 1024, "limit per block since sm_90");
static_assert(WARPS * net::depth1 * CONV1_CHANNELS * 4 <= weight - delta, "the warps' sums fit");
static_assert(net::columns2 == 24 && net::rows2 % 2 == 0, "two rows are six groups of eight pixels");
} // namespace at

/* ---- Filling shared memory ---- */

/* Starts copying `pieces` pieces of 16 bytes, and leaves a gap of GAP bytes in `to` after each RUN of them.
 */
template <uint32_t RUN, uint32_t GAP>
static __device__ __forceinline__ void take_pieces(const void *from, uint32_t pieces, uint8_t *to)
{
    for (uint32_t i = threadIdx.x; i < pieces; i += THREADS)
        copy_async16(to + 16 * i + i / RUN * GAP, static_cast<const uint4 *>(from) + i);
}

/* Start copying what the forward pass has kept of a sample, and its gradients. */
static __device__ __forceinline__ void take_conv1(const struct graph_plan &plan, uint32_t row,
                                                  uint8_t *shared)
{
    take_pieces<CONV1_PIECES, 0>(plan.conv1 + (size_t)row * CONV1_PIECES, CONV1_PIECES, shared + at::conv1);
}

static __device__ __forceinline__ void take_image_and_argmax(const struct graph_plan &plan, uint32_t row,
                                                             uint32_t turn, uint8_t *shared)
{
    take_pieces<IMAGE_PIECES, 0>(plan.images + (size_t)row * IMAGE_PIECES, IMAGE_PIECES,
                                 shared + at::images + turn * at::image_bytes);
    take_pieces<net::windows / 2, at::argmax8 - 8 * net::windows>(plan.argmax + (size_t)row * net::features,
                                                                  net::features / 16, shared + at::argmax);
}

static __device__ __forceinline__ void take_deltas(const struct graph_plan &plan, uint32_t row,
                                                   uint8_t *shared)
{
    take_pieces<net::windows, at::pooled8 - 16 * net::windows>(
        plan.pooled_delta + (size_t)row * net::features, net::features / 8, shared + at::pooled);
}

/* Scatters the gradients of one sample to their argmax pixels. A lane takes two adjacent windows and eight
 * channels at a time; eight lanes cover two adjacent pairs of windows and four groups of channels. */
static __device__ __forceinline__ void spread(uint8_t *shared)
{
    constexpr int pairs = net::windows / 2;
    static_assert(pairs % 8 == 0, "whole warps");
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int piece = warp % 2 * 4 + lane / 2 % 4, own = lane % 2 + lane / 8 * 2;
    float sums[8] = {};
    for (int item = warp; item < pairs / 8 * 2; item += WARPS) {
        int pair = item / 2 * 8 + own;
        uint32_t delta[8], peak[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            int value = c * net::windows + 2 * pair;
            delta[c] =
                *reinterpret_cast<const uint32_t *>(shared + at::pooled + piece * at::pooled8 + 2 * value);
            peak[c] = *reinterpret_cast<const uint16_t *>(shared + at::argmax + piece * at::argmax8 + value);
        }
        spread_pair<net>(delta, peak, pair, sums, [&](uint32_t pixel, uint4 value) {
            *reinterpret_cast<uint4 *>(shared + at::delta + piece * at::plane + 16 * pixel) = value;
        });
    }
    add_bias2(sums, reinterpret_cast<float *>(shared + at::bias2) + warp / 2 * CONV2_CHANNELS + 8 * piece);
}

/* ---- Products ---- */

/* Starts adding the gradients of conv2's weights from a part of a sample's pixels to `sums`, a matrix of 64
 * outputs by (3 rows of taps, 32 inputs), for column `dx` of the taps. The sums run over 16 pixels at a time:
 * two groups of 8. */
static __device__ __forceinline__ void back_weights(uint32_t shared, int dx, int part, float (&sums)[48])
{
    constexpr int rows = net::rows2 / PARTS_OF_SAMPLE;
    uint32_t deltas = keep((shared + at::delta) / 16 + at::border + rows * part * net::columns1);
    uint32_t inputs = keep((shared + at::conv1) / 16 + rows * part * ROW_PIECES + dx);
#pragma unroll
    for (int y = 0; y < rows; y += 2)
#pragma unroll
        for (int s = 0; s < 3; s++) {
            int row = y + s / 2, column = s == 0 ? 0 : s == 1 ? 16 : 8;
            wgmma<bf16, 96, 1, 1>(
                sums,
                wgmma_pieces(deltas + row * net::columns1 + column, s == 1 ? net::columns1 - 16 : 8,
                             at::plane / 16),
                wgmma_pieces(inputs + row * ROW_PIECES + column, s == 1 ? ROW_PIECES - 16 : 8, net::columns1),
                true);
        }
}

/* Starts computing the gradient of conv2's input for 64 pixels from 64 * tile on: sums over 9 taps and 64
 * outputs. */
static __device__ __forceinline__ void back_inputs(uint32_t shared, int tile, float (&sums)[16])
{
    uint32_t deltas = keep((shared + at::delta) / 16 + at::border + 64 * tile);
    uint32_t weights = keep((shared + at::weight) / 16);
#pragma unroll
    for (int tap = 0; tap < CONV_TAPS; tap++)
#pragma unroll
        for (int s = 0; s < CONV2_CHANNELS / 16; s++)
            wgmma<bf16, 32, 0, 1>(
                sums,
                wgmma_pieces(deltas + 2 * s * (at::plane / 16) - (tap / 3 * net::columns1 + tap % 3),
                             at::plane / 16, 8),
                wgmma_pieces(weights + tap * (4 * CONV2_CHANNELS) + 16 * s, 8, CONV2_CHANNELS), tap + s > 0);
}

/* Writes the gradients of conv2's weights for column `dx` of the taps in the order of the weights: outputs,
 * taps, inputs. */
static __device__ __forceinline__ void store_weights(const float (&sums)[48], int dx, float *to)
{
    int lane = threadIdx.x % 32;
    to += (threadIdx.x % 128 / 32 * 16 + lane / 4) * CONV2_DEPTH + dx * CONV1_CHANNELS + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 12; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            *reinterpret_cast<float2 *>(to + 8 * h * CONV2_DEPTH + n / 4 * 3 * CONV1_CHANNELS + n % 4 * 8) =
                make_float2(sums[4 * n + 2 * h], sums[4 * n + 2 * h + 1]);
}

/* ---- fc1's weights ---- */

/* Four adjacent weights of fc1, their gradients, and their moments. */
struct four {
    float4 gradient, weight, m, v;
};

/* Loads weights 4 * i to 4 * i + 3. */
static __device__ __forceinline__ struct four load_four(const struct graph_plan &plan, uint32_t i)
{
    uint32_t at = plan.tensors[FC1_W] + 4 * i;
    struct four four;
    four.gradient = *reinterpret_cast<const float4 *>(gradient_of(plan, at));
    four.weight = *reinterpret_cast<const float4 *>(plan.state.parameters + at);
    four.m = *reinterpret_cast<const float4 *>(plan.state.m + at);
    four.v =
        *reinterpret_cast<const float4 *>(plan.state.v + at); /* zeros if the optimizer does not use them */
    return four;
}

/* Updates these weights and their bf16 copies. */
static __device__ __forceinline__ void step_four(const struct graph_plan &plan,
                                                 const struct update &constants, uint32_t i, struct four four)
{
    uint32_t at = plan.tensors[FC1_W] + 4 * i;
    const struct update update = constants; /* a copy, which stores cannot change, is loaded only once */
    optimizer_step(&update, four.gradient.x, &four.weight.x, &four.m.x, &four.v.x);
    optimizer_step(&update, four.gradient.y, &four.weight.y, &four.m.y, &four.v.y);
    optimizer_step(&update, four.gradient.z, &four.weight.z, &four.m.z, &four.v.z);
    optimizer_step(&update, four.gradient.w, &four.weight.w, &four.m.w, &four.v.w);
    *reinterpret_cast<float4 *>(plan.state.parameters + at) = four.weight;
    *reinterpret_cast<float4 *>(plan.state.m + at) = four.m;
    if (optimizer_moments(update.kind) > 1)
        *reinterpret_cast<float4 *>(plan.state.v + at) = four.v;
    *reinterpret_cast<uint2 *>(plan.fc1_weight + 4 * i) =
        make_uint2(pack<bf16>(four.weight.x, four.weight.y), pack<bf16>(four.weight.z, four.weight.w));
}

static __global__ void __launch_bounds__(THREADS, 1)
    conv_back_hopper_kernel(const __grid_constant__ struct graph_plan plan)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    if (blockIdx.x >= plan.parts) {
        head_back<THREADS>(plan, blockIdx.x - plan.parts, shared);
        return;
    }
    float *bias2 = reinterpret_cast<float *>(shared + at::bias2);
    float *to = plan.conv_sums + (size_t)blockIdx.x * net::conv_parameters;
    uint32_t count = plan.step->count, base = shared_address(shared);
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* the compiler knows that it is uniform */
    /* Loads from shared memory delay the loop below less than loads from global memory. */
    struct update &update = *reinterpret_cast<struct update *>(shared + at::update);
    if (threadIdx.x == 0)
        update = *plan.step->update;
    take_conv2_pieces<THREADS>(plan, shared + at::weight);
    if (blockIdx.x < count) {
        take_conv1(plan, blockIdx.x, shared);
        take_image_and_argmax(plan, blockIdx.x, 0, shared);
    }
    for (int i = threadIdx.x; i < (at::weight - at::delta) / 16; i += THREADS)
        reinterpret_cast<uint4 *>(shared + at::delta)[i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < WARPS / 2 * CONV2_CHANNELS; i += THREADS)
        bias2[i] = 0;
    wait_for_previous(); /* the previous kernel writes pooled_delta; earlier kernels write the other inputs */
    allow_next();
    if (blockIdx.x < count)
        take_deltas(plan, blockIdx.x, shared);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    float of_conv1[net::depth1 / 16][4][4] = {}, of_conv2[48] = {};
    /* With several ranks, fc1's weights are updated after the exchange. */
    uint32_t fours = plan.apart ? 0 : HIDDEN * net::features / 4, next = blockIdx.x * THREADS + threadIdx.x;
    struct four four; /* those that step_four() updates next */
    if (next < fours)
        four = load_four(plan, next);
    for (uint32_t row = blockIdx.x, turn = 0; row < count; row += plan.parts, turn ^= 1) {
        bool more = row + plan.parts < count;
        copy_wait<1>(); /* all copies except those of conv1's output */
        __syncthreads();
        spread(shared);
        copy_wait<0>();
        wgmma_publish();
        __syncthreads();
        if (more) {
            take_image_and_argmax(plan, row + plan.parts, turn ^ 1, shared);
            take_deltas(plan, row + plan.parts, shared);
        }
        copy_commit();
#pragma unroll 1
        for (int part = 0; part < PARTS_OF_SAMPLE; part++) {
            int tile = WARPGROUPS * part + group;
            float products[16];
            wgmma_fence();
            if (tile < at::tiles)
                back_inputs(base, tile, products);
            wgmma_commit();
            back_weights(base, group, part, of_conv2);
            wgmma_commit();
            if (next < fours)
                step_four(plan, update, next, four);
            next += plan.parts * THREADS;
            if (next < fours)
                four = load_four(plan, next);
            wgmma_wait<1>();
            wgmma_ended(products);
            if (tile < at::tiles)
                back_conv1<net, 1>(shared + at::conv1, kept_place,
                                   shared + at::images + turn * at::image_bytes,
                                   64 * tile + threadIdx.x % 128 / 32 * 16,
                                   reinterpret_cast<const float(&)[1][4][4]>(products), of_conv1);
            wgmma_wait<0>();
            wgmma_ended(of_conv2);
        }
        __syncthreads(); /* all threads have read the buffers before the next sample overwrites them */
        if (more)
            take_conv1(plan, row + plan.parts, shared);
        copy_commit();
    }
    while (next < fours) {
        step_four(plan, update, next, four);
        next += plan.parts * THREADS;
        if (next < fours)
            four = load_four(plan, next);
    }
    store_weights(of_conv2, group, to + CONV1_CHANNELS * (net::taps1 + 1));
    leave_conv1<net>(of_conv1, threadIdx.x / 32, reinterpret_cast<float *>(shared + at::delta));
    __syncthreads();
    store_conv1<net, WARPS, THREADS>(plan, reinterpret_cast<const float *>(shared + at::delta), to);
    if (threadIdx.x < CONV2_CHANNELS) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS / 2; i++)
            sum += bias2[i * CONV2_CHANNELS + threadIdx.x];
        to[net::conv_parameters - CONV2_CHANNELS + threadIdx.x] = sum;
    }
}

enum status graph_conv_back_hopper(const struct graph_plan *plan, cudaStream_t stream)
{
    return launch_overlapped(conv_back_hopper_kernel, "conv_back_hopper_kernel",
                             dim3(plan->parts + HEAD_BLOCKS), THREADS, at::bytes, plan, stream);
}
