/* train-graph, forward through the linear layers. dense_kernel computes fc1's sums over slices of its inputs.
 * head_kernel has one block per sample. It adds the slices and computes ReLU, dropout, fc2, the loss, and the
 * gradients back to fc1's output. */
#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/graph/kernels.cuh"

/* ---- fc1: a block computes 64 samples over one slice of the inputs ---- */

#define ROWS    64
#define THREADS 256

template <class NET> struct slice {
    static constexpr int depth = NET::split_depth;
    static constexpr int pitch = depth * 2 + 16; /* bytes; eight consecutive rows are in different banks */
    static constexpr int weight = ROWS * pitch;
    static constexpr int bytes = weight + HIDDEN * pitch;
    static_assert(pitch / 16 % 2 == 1, "an odd number of pieces of 16 bytes");
};

/* Starts copying one half of the slice's inputs to shared memory, for LINES samples or rows of weights. */
template <class NET, int LINES>
static __device__ __forceinline__ void take_half(const __nv_bfloat16 *from, int half, uint8_t *to)
{
    constexpr int pieces = NET::split_depth / 16; /* 16-byte pieces in half a row */
#pragma unroll 4
    for (int i = threadIdx.x; i < LINES * pieces; i += THREADS) {
        int line = i / pieces, at = i % pieces + half * pieces;
        copy_async16(to + line * slice<NET>::pitch + 16 * at, from + (size_t)line * NET::features + 8 * at);
    }
}

template <class NET>
static __global__ void __launch_bounds__(THREADS, 1)
    dense_kernel(const __grid_constant__ struct graph_plan plan)
{
    typedef slice<NET> at;
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t row = blockIdx.y * ROWS, column = blockIdx.x * NET::split_depth;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp % 2 * 32, n0 = warp / 2 * 32;
    const __nv_bfloat16 *samples = plan.pooled + (size_t)row * NET::features + column;
    take_half<NET, HIDDEN>(plan.fc1_weight + column, 0, shared + at::weight);
    take_half<NET, HIDDEN>(plan.fc1_weight + column, 1, shared + at::weight);
    wait_for_previous();
    allow_next();
    take_half<NET, ROWS>(samples, 0, shared);
    copy_commit();
    take_half<NET, ROWS>(samples, 1, shared);
    copy_commit();
    if (row >= plan.step->count) {
        copy_wait<0>();
        return;
    }
    uint32_t from_a = shared_address(shared) + (m0 + lane % 16) * at::pitch + lane / 16 * 16;
    uint32_t from_b =
        shared_address(shared) + at::weight + (n0 + lane % 8 + lane / 16 * 8) * at::pitch + lane / 8 % 2 * 16;
    float c[2][4][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half == 0)
            copy_wait<1>();
        else
            copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int s = half * NET::split_depth / 32; s < (half + 1) * NET::split_depth / 32; s++) {
            uint32_t a[2][4], b[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++)
                mma_load4(a[m], from_a + m * 16 * at::pitch + s * 32);
#pragma unroll
            for (int n = 0; n < 2; n++)
                mma_load4(b[n], from_b + n * 16 * at::pitch + s * 32);
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    multiply(c[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
    float *sums =
        plan.split_sums + ((size_t)blockIdx.x * plan.rows + row + m0 + lane / 4) * HIDDEN + n0 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *reinterpret_cast<float2 *>(sums + (16 * m + 8 * h) * HIDDEN + 8 * n) =
                    make_float2(c[m][n][2 * h], c[m][n][2 * h + 1]);
}

/* ---- The head: one block per sample, one thread per hidden value ---- */

/* Returns the hidden value of this thread: adds the slices in order, then applies bias, ReLU, and dropout's
 * factor `kept`. */
template <class NET, bool TRAINING>
static __device__ __forceinline__ float take_hidden(const struct graph_plan &plan, uint32_t row, float kept)
{
    const float *sums = plan.split_sums + (size_t)row * HIDDEN + threadIdx.x;
    float part[NET::splits], sum = 0;
#pragma unroll
    for (int s = 0; s < NET::splits; s++)
        part[s] = sums[(size_t)s * plan.rows * HIDDEN];
#pragma unroll
    for (int s = 0; s < NET::splits; s++)
        sum += part[s];
    /* The factor of the first dropout is applied here, where sums are fp32. */
    float scale = TRAINING ? 256.0f / (256 - DROPOUT1_THRESHOLD) : 1;
    float value = larger(fmaf(scale, sum, plan.state.parameters[plan.tensors[FC1_B] + threadIdx.x]), 0);
    return kept == 0 ? 0 : value * kept;
}

/* Computes the softmax cross-entropy of a sample. One warp runs this, with one lane per class. Stores the
 * loss, whether the prediction is correct, and the gradient of the batch's mean loss with respect to the
 * logits. A sample whose label is DATA_MASKED has weight 0. */
static __device__ __forceinline__ void take_loss(const struct graph_plan &plan, uint32_t row, uint32_t label,
                                                 const float *logits, float *deltas)
{
    uint32_t lane = threadIdx.x;
    bool real = lane < plan.classes;
    float logit = real ? logits[lane] : -INFINITY, best = logit;
    uint32_t guess = lane;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) { /* if logits are equal, the lower class wins */
        float other = __shfl_xor_sync(~0u, best, offset);
        uint32_t position = __shfl_xor_sync(~0u, guess, offset);
        if (other > best || (other == best && position < guess)) {
            best = other;
            guess = position;
        }
    }
    best = __shfl_sync(~0u, best, 0);
    float log_sum = logf(warp_sum(real ? expf(logit - best) : 0));
    float log_p = logit - best - log_sum;
    float wanted = plan.smoothing / (float)plan.classes + (lane == label ? 1 - plan.smoothing : 0);
    bool masked = label == DATA_MASKED;
    float loss = warp_sum(real && !masked ? -wanted * log_p : 0);
    if (real) {
        float delta = masked ? 0 : (expf(log_p) - wanted) / (float)plan.step->total;
        deltas[lane] = delta;
        plan.logit_delta[(size_t)row * plan.classes + lane] = delta;
    }
    if (lane == 0) {
        plan.losses[row] = loss;
        plan.right[row] = masked ? LOSS_MASKED : guess == label;
    }
}

template <class NET, bool TRAINING>
static __global__ void __launch_bounds__(HIDDEN) head_kernel(const __grid_constant__ struct graph_plan plan)
{
    __shared__ float hidden[HIDDEN], logits[GRAPH_CLASSES], deltas[GRAPH_CLASSES];
    __shared__ float weight[GRAPH_CLASSES * HIDDEN], bias[GRAPH_CLASSES]; /* of fc2 */
    uint32_t row = blockIdx.x;
    int lane = threadIdx.x % 32;
    if (row >=
        plan.step->count) { /* past the end of a short batch: zeros add nothing to the weight gradients */
        if (TRAINING)
            plan.hidden_delta[(size_t)row * HIDDEN + threadIdx.x] = __float2bfloat16(0);
        return;
    }
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < plan.classes * HIDDEN; i += HIDDEN)
        weight[i] = plan.state.parameters[plan.tensors[FC2_W] + i];
    if (threadIdx.x < plan.classes)
        bias[threadIdx.x] = plan.state.parameters[plan.tensors[FC2_B] + threadIdx.x];
    float kept = 1;
    uint32_t label = 0;
    if (TRAINING) {
        uint32_t number = plan.order[plan.step->first + row];
        struct philox_block draw =
            draw_dropout(plan.seed, plan.step->epoch, number, DROPOUT2_NUMBER, threadIdx.x);
        kept = draw_kept(draw, threadIdx.x, DROPOUT2_THRESHOLD) ? 256.0f / (256 - DROPOUT2_THRESHOLD) : 0;
        label = plan.labels[number];
    }
    wait_for_previous();
    allow_next();
    float value = take_hidden<NET, TRAINING>(plan, row, kept);
    hidden[threadIdx.x] = value;
    __syncthreads();
    for (uint32_t k = threadIdx.x / 32; k < plan.classes; k += HIDDEN / 32) {
        float sum = 0;
#pragma unroll
        for (int i = lane; i < HIDDEN; i += 32)
            sum = fmaf(hidden[i], weight[k * HIDDEN + i], sum);
        sum = warp_sum(sum);
        if (lane == 0)
            logits[k] = sum + bias[k];
    }
    __syncthreads();
    if (!TRAINING) {
        if (threadIdx.x < plan.classes)
            plan.logits[(size_t)row * plan.classes + threadIdx.x] = logits[threadIdx.x];
        return;
    }
    if (threadIdx.x < 32)
        take_loss(plan, row, label, logits, deltas);
    __syncthreads();
    float delta = 0;
    for (uint32_t k = 0; k < plan.classes; k++)
        delta = fmaf(deltas[k], weight[k * HIDDEN + threadIdx.x], delta);
    /* If ReLU or dropout set the value to 0, its gradient is 0. */
    delta = value == 0 ? 0 : delta * (256.0f / (256 - DROPOUT2_THRESHOLD));
    plan.hidden[(size_t)row * HIDDEN + threadIdx.x] = value;
    plan.hidden_delta[(size_t)row * HIDDEN + threadIdx.x] = __float2bfloat16(delta);
}

template <class NET, bool TRAINING>
static enum status launch(const struct graph_plan *plan, cudaStream_t stream)
{
    TRY(launch_overlapped(dense_kernel<NET>, "dense_kernel",
                          dim3(NET::splits, (plan->batch + ROWS - 1) / ROWS), THREADS, slice<NET>::bytes,
                          plan, stream));
    return launch_overlapped(head_kernel<NET, TRAINING>, "head_kernel", dim3(plan->batch), HIDDEN, 0, plan,
                             stream);
}

enum status graph_dense(const struct graph_plan *plan, bool colour, bool training, cudaStream_t stream)
{
    if (colour)
        return training ? launch<graph_colour, true>(plan, stream)
                        : launch<graph_colour, false>(plan, stream);
    return training ? launch<graph_gray, true>(plan, stream) : launch<graph_gray, false>(plan, stream);
}
