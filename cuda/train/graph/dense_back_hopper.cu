/* train-graph, backward through fc1 for samples of 1x28x28 on compute capability 9.0. It computes what
 * dense_back.cu computes, but with wgmma: two warpgroups compute the gradient of fc1's inputs, two that of
 * its weights. It only stores the gradients of the weights: with one rank, conv_back_hopper.cu updates the
 * weights while it waits for tensor cores. */
#include "train/graph/kernels.cuh"
#include "train/vit/hopper.cuh"

typedef graph_gray net;

#define ROWS    128 /* samples per stage; the next stage is loaded concurrently */
#define THREADS 512
#define PIECES  (net::slice / 8)

/* Shared memory offsets in bytes. Matrices consist of pieces of 8 columns, each for all rows. Adjacent pieces
 * begin in different banks. */
namespace at
{
constexpr int piece = ROWS * 16 + 16;             /* of `weight`, `delta` and `input`; HIDDEN equals ROWS */
constexpr int weight = 0;                         /* (HIDDEN, slice) */
constexpr int delta = weight + PIECES * piece;    /* (ROWS, HIDDEN): gradients of the hidden values */
constexpr int input = delta + HIDDEN / 8 * piece; /* (ROWS, slice) */
constexpr int stage =
    (HIDDEN / 8 + PIECES) * piece; /* bytes of `delta` and `input` together; there are two stages */
constexpr int bytes = delta + 2 * stage;
static_assert(HIDDEN == ROWS && bytes <= 227 * 1024, "fits");
} // namespace at

/* Starts copying a matrix with ROWS rows of `pieces` * 16 bytes to shared memory. */
static __device__ __forceinline__ void take(const __nv_bfloat16 *from, size_t from_pitch, int pieces,
                                            uint8_t *to)
{
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * pieces; i += THREADS) {
        int row = i / pieces, piece = i % pieces;
        copy_async16(to + piece * at::piece + row * 16, from + row * from_pitch + 8 * piece);
    }
}

static __device__ __forceinline__ void take_inputs(const struct graph_plan &plan, uint32_t row,
                                                   uint32_t column, uint8_t *shared)
{
    take(plan.pooled + (size_t)row * net::features + column, net::features, PIECES,
         shared + row / ROWS % 2 * at::stage + at::input);
}

static __device__ __forceinline__ void take_deltas(const struct graph_plan &plan, uint32_t row,
                                                   uint8_t *shared)
{
    take(plan.hidden_delta + (size_t)row * HIDDEN, HIDDEN, HIDDEN / 8,
         shared + row / ROWS % 2 * at::stage + at::delta);
}

/* Computes the gradient of fc1's inputs for samples 64 * group to 64 * group + 63 of a stage: sums over the
 * hidden values. Writes those of sample `row` of the batch and the following ones. */
static __device__ __forceinline__ void back_inputs(const struct graph_plan &plan, uint32_t shared,
                                                   uint32_t stage, int group, uint32_t row, uint32_t column,
                                                   float (&sums)[PIECES * 4])
{
    uint32_t deltas = keep((shared + stage + at::delta) / 16 + 64 * group),
             weights = keep((shared + at::weight) / 16);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < HIDDEN / 16; s++)
        wgmma<bf16, net::slice, 0, 1>(sums,
                                      wgmma_pieces(deltas + 2 * s * (at::piece / 16), at::piece / 16, 8),
                                      wgmma_pieces(weights + 16 * s, 8, at::piece / 16), s > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_ended(sums);
    int lane = threadIdx.x % 32;
    __nv_bfloat16 *to = plan.pooled_delta +
                        (size_t)(row + 64 * group + threadIdx.x % 128 / 32 * 16 + lane / 4) * net::features +
                        column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < PIECES; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            *reinterpret_cast<uint32_t *>(to + (size_t)(8 * h) * net::features + 8 * n) =
                pack<bf16>(sums[4 * n + 2 * h] * KEPT_SCALE, sums[4 * n + 2 * h + 1] * KEPT_SCALE);
}

/* Adds the gradients of the weights of hidden values 64 * group to 64 * group + 63 to `sums`: sums over the
 * samples of a stage. */
static __device__ __forceinline__ void back_weights(uint32_t shared, uint32_t stage, int group,
                                                    float (&sums)[PIECES * 4])
{
    uint32_t deltas = keep((shared + stage + at::delta) / 16 + 8 * group * (at::piece / 16));
    uint32_t inputs = keep((shared + stage + at::input) / 16);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < ROWS / 16; s++)
        wgmma<bf16, net::slice, 1, 1>(sums, wgmma_pieces(deltas + 16 * s, 8, at::piece / 16),
                                      wgmma_pieces(inputs + 16 * s, 8, at::piece / 16), true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_ended(sums);
}

static __device__ __forceinline__ void
store_gradients(const struct graph_plan &plan, const float (&sums)[PIECES * 4], int group, uint32_t column)
{
    int lane = threadIdx.x % 32;
    uint32_t row = 64 * group + threadIdx.x % 128 / 32 * 16 + lane / 4;
    float *to = gradient_of(plan, plan.tensors[FC1_W] + row * net::features + column + lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < PIECES; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            *reinterpret_cast<float2 *>(to + 8 * h * net::features + 8 * n) =
                make_float2(sums[4 * n + 2 * h] * KEPT_SCALE, sums[4 * n + 2 * h + 1] * KEPT_SCALE);
}

/* At most 80 registers leave room for the blocks of the previous kernel. Older compilers lack the attribute.
 */
#if CUDART_VERSION >= 12040
#define MOST_REGISTERS __maxnreg__(80)
#else
#define MOST_REGISTERS __launch_bounds__(THREADS, 1)
#endif

static __global__ void MOST_REGISTERS dense_back_hopper_kernel(const __grid_constant__ struct graph_plan plan)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t column = blockIdx.x * net::slice, count = plan.step->count, base = shared_address(shared);
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    float sums[PIECES * 4] = {};
    take(plan.fc1_weight + column, net::features, PIECES, shared + at::weight);
    for (uint32_t row = 0; row < 2 * ROWS && row < count; row += ROWS)
        take_inputs(plan, row, column, shared);
    wait_for_previous();
    allow_next();
    for (uint32_t row = 0; row < 2 * ROWS; row += ROWS) {
        if (row < count)
            take_deltas(plan, row, shared);
        copy_commit();
    }
    for (uint32_t row = 0; row < count; row += ROWS) { /* rows past `count` are zero */
        copy_wait<1>();
        wgmma_publish();
        __syncthreads();
        uint32_t stage = row / ROWS % 2 * at::stage;
        if (group < 2)
            back_inputs(plan, base, stage, group, row, column, sums);
        else
            back_weights(base, stage, group - 2, sums);
        __syncthreads();
        if (row + 2 * ROWS < count) {
            take_inputs(plan, row + 2 * ROWS, column, shared);
            take_deltas(plan, row + 2 * ROWS, shared);
        }
        copy_commit();
    }
    if (group >= 2)
        store_gradients(plan, sums, group - 2, column);
}

enum status graph_dense_back_hopper(const struct graph_plan *plan, cudaStream_t stream)
{
    return launch_overlapped(dense_back_hopper_kernel, "dense_back_hopper_kernel",
                             dim3(net::features / net::slice), THREADS, at::bytes, plan, stream);
}
