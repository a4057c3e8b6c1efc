/* train-graph, the last kernel of a step: adds up the gradients of all parameters but fc1's weights and takes the
 * optimizer's step with them, adds the batch to the totals, and moves on to the next step. And what happens between
 * steps: the order of an epoch, and bf16 copies of parameters that came from outside. */
#include "common/check.cuh"
#include "train/graph.cuh"

#define VALUES  64 /* parameters a block, whose sums are in GROUPS parts */
#define GROUPS  4
#define THREADS (VALUES * GROUPS)

/* The optimizer's step with parameter `at` of the arena; the new parameter. */
static __device__ __forceinline__ float step_parameter(const struct graph_plan &plan, const struct update &update,
                                                       size_t at, float gradient)
{
    float second = update.kind == OPTIMIZER_SGD ? 0 : plan.state.second[at];
    plan.gradients[at] = gradient;
    optimizer_step(&update, gradient, &plan.state.parameters[at], &plan.state.first[at], &second);
    if (update.kind != OPTIMIZER_SGD)
        plan.state.second[at] = second;
    return plan.state.parameters[at];
}

/* Adds the groups' parts in their order: the sum is thread i's, i < VALUES. */
static __device__ __forceinline__ float add_groups(float part)
{
    __shared__ float parts[GROUPS][VALUES];
    parts[threadIdx.x / VALUES][threadIdx.x % VALUES] = part;
    __syncthreads();
    float sum = parts[0][threadIdx.x % VALUES];
#pragma unroll
    for (int g = 1; g < GROUPS; g++)
        sum += parts[g][threadIdx.x % VALUES];
    return sum;
}

/* Parameters of the convolutions: their gradients are sums over the blocks of the kernel before. */
template <class NET>
static __device__ void update_conv(const struct graph_plan &plan, const struct update &update, uint32_t block)
{
    uint32_t value = block * VALUES + threadIdx.x % VALUES;
    float part = 0;
#pragma unroll 8
    for (uint32_t p = threadIdx.x / VALUES; p < plan.parts; p += GROUPS)
        part += plan.conv_sums[(size_t)p * NET::conv_parameters + value];
    float gradient = add_groups(part);
    if (threadIdx.x >= VALUES)
        return;
    uint32_t begin = plan.tensors[CONV2_W], own = value - begin;
    if (value < begin || own >= CONV2_CHANNELS * CONV2_DEPTH) {
        step_parameter(plan, update, value, gradient);
        return;
    }
    /* Of conv2's weights the sums lie as (64, 9 taps, 32), the arena as (64, 32, 9 taps). */
    uint32_t o = own / CONV2_DEPTH, tap = own % CONV2_DEPTH / CONV1_CHANNELS, c = own % CONV1_CHANNELS;
    float weight =
        step_parameter(plan, update, begin + o * CONV2_DEPTH + c * CONV_TAPS + tap, gradient);
    plan.conv2_weight[o * (CONV2_PITCH / 2) + own % CONV2_DEPTH] = __float2bfloat16(weight);
}

/* fc2's weights (a class in two blocks) and fc1's bias (behind them): sums over the samples. */
static __device__ void update_head(const struct graph_plan &plan, const struct update &update, uint32_t block)
{
    uint32_t k = block / 2, n = block % 2 * VALUES + threadIdx.x % VALUES, count = plan.moment->count;
    float part = 0;
    if (k < plan.classes) {
#pragma unroll 8
        for (uint32_t j = threadIdx.x / VALUES; j < count; j += GROUPS)
            part = fmaf(plan.logit_delta[(size_t)j * plan.classes + k], plan.hidden[(size_t)j * HIDDEN + n], part);
    } else {
#pragma unroll 8
        for (uint32_t j = threadIdx.x / VALUES; j < count; j += GROUPS)
            part += __bfloat162float(plan.hidden_delta[(size_t)j * HIDDEN + n]);
    }
    float gradient = add_groups(part);
    if (threadIdx.x < VALUES)
        step_parameter(plan, update,
                       k < plan.classes ? plan.tensors[FC2_W] + k * HIDDEN + n : plan.tensors[FC1_B] + n, gradient);
}

/* fc2's bias: a warp a class, a lane every 32nd sample. */
static __device__ void update_last_bias(const struct graph_plan &plan, const struct update &update)
{
    uint32_t count = plan.moment->count;
    for (uint32_t k = threadIdx.x / 32; k < plan.classes; k += THREADS / 32) {
        float sum = 0;
        for (uint32_t j = threadIdx.x % 32; j < count; j += 32)
            sum += plan.logit_delta[(size_t)j * plan.classes + k];
        for (int offset = 16; offset > 0; offset /= 2)
            sum += __shfl_xor_sync(~0u, sum, offset);
        if (threadIdx.x % 32 == 0)
            step_parameter(plan, update, plan.tensors[FC2_B] + k, sum);
    }
}

/* The batch's losses and right answers: thread i of samples i, i + THREADS, ... and then a tree. */
static __device__ void add_totals(const struct graph_plan &plan)
{
    __shared__ double sums[THREADS];
    __shared__ uint32_t rights[THREADS];
    uint32_t count = plan.moment->count, correct = 0;
    double sum = 0;
    for (uint32_t j = threadIdx.x; j < count; j += THREADS) {
        sum += plan.losses[j];
        correct += plan.right[j];
    }
    sums[threadIdx.x] = sum;
    rights[threadIdx.x] = correct;
    for (uint32_t half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
            rights[threadIdx.x] += rights[threadIdx.x + half];
        }
    }
    if (threadIdx.x != 0)
        return;
    plan.totals->loss += sums[0];
    plan.totals->correct += rights[0];
    plan.totals->samples += count;
    if (!isfinite(sums[0]) && plan.totals->bad_step == TRAIN_FINE)
        plan.totals->bad_step = plan.moment->number;
    /* Only the first kernel of a step reads it. */
    plan.place->step++;
    plan.place->number++;
}

template <class NET>
static __global__ void __launch_bounds__(THREADS) update_kernel(const __grid_constant__ struct graph_plan plan)
{
    constexpr uint32_t conv = NET::conv_parameters / VALUES;
    const struct update update = plan.moment->update;
    if (blockIdx.x < conv)
        update_conv<NET>(plan, update, blockIdx.x);
    else if (blockIdx.x < conv + 2 * plan.classes + 2)
        update_head(plan, update, blockIdx.x - conv);
    else {
        update_last_bias(plan, update);
        add_totals(plan);
    }
}

enum status graph_update(const struct graph_plan *plan, bool colour, cudaStream_t stream)
{
    uint32_t others = 2 * plan->classes + 3;
    if (colour)
        update_kernel<graph_colour>
            <<<graph_colour::conv_parameters / VALUES + others, THREADS, 0, stream>>>(*plan);
    else
        update_kernel<graph_gray><<<graph_gray::conv_parameters / VALUES + others, THREADS, 0, stream>>>(*plan);
    CUDA_TRY_LAUNCH("update_kernel");
    return STATUS_OK;
}

/* ---- Between steps ---- */

static __global__ void order_kernel(const struct draw_order order, uint32_t *numbers)
{
    uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i < order.count)
        numbers[i] = draw_order_at(&order, i);
}

enum status graph_order(const struct graph_plan *plan, uint32_t epoch, cudaStream_t stream)
{
    struct draw_order order = draw_order(plan->seed, epoch, plan->samples);
    order_kernel<<<(plan->samples + THREADS - 1) / THREADS, THREADS, 0, stream>>>(order, plan->order);
    CUDA_TRY_LAUNCH("order_kernel");
    return STATUS_OK;
}

static __global__ void go_to_kernel(const struct graph_place place, struct graph_place *to)
{
    *to = place;
}

enum status graph_go_to(const struct graph_plan *plan, const struct graph_place *place, cudaStream_t stream)
{
    go_to_kernel<<<1, 1, 0, stream>>>(*place, plan->place);
    CUDA_TRY_LAUNCH("go_to_kernel");
    return STATUS_OK;
}

template <class NET> static __global__ void refresh_kernel(const __grid_constant__ struct graph_plan plan)
{
    uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i < HIDDEN * NET::features)
        plan.fc1_weight[i] = __float2bfloat16(plan.state.parameters[plan.tensors[FC1_W] + i]);
    if (i < CONV2_CHANNELS * CONV2_DEPTH) {
        uint32_t o = i / CONV2_DEPTH, tap = i % CONV2_DEPTH / CONV1_CHANNELS, c = i % CONV1_CHANNELS;
        plan.conv2_weight[o * (CONV2_PITCH / 2) + i % CONV2_DEPTH] = __float2bfloat16(
            plan.state.parameters[plan.tensors[CONV2_W] + o * CONV2_DEPTH + c * CONV_TAPS + tap]);
    }
}

enum status graph_refresh(const struct graph_plan *plan, bool colour, cudaStream_t stream)
{
    if (colour)
        refresh_kernel<graph_colour><<<HIDDEN * graph_colour::features / THREADS, THREADS, 0, stream>>>(*plan);
    else
        refresh_kernel<graph_gray><<<HIDDEN * graph_gray::features / THREADS, THREADS, 0, stream>>>(*plan);
    CUDA_TRY_LAUNCH("refresh_kernel");
    return STATUS_OK;
}
