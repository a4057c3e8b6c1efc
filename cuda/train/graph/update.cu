/* train-graph, the last kernels of a step. update_kernel adds the partial gradients of the convolutions and
 * updates their parameters. With several ranks, it only stores the gradients, and apply_kernel updates all
 * parameters after the exchange. The other kernels here run between steps. They write the order of an epoch,
 * the position in the training run, and the bf16 copies of parameters after graph_set(). */
#include "common/check.cuh"
#include "train/graph/kernels.cuh"

#define VALUES  64 /* parameters per block; GROUPS threads share the sum of each */
#define GROUPS  4
#define THREADS (VALUES * GROUPS)

/* Adds the partial sums of the groups in order. Thread i < VALUES returns the sum of value i. */
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

template <class NET>
static __global__ void __launch_bounds__(THREADS)
    update_kernel(const __grid_constant__ struct graph_plan plan)
{
    constexpr uint32_t share = GRAPH_PARTS_MAX / GROUPS;
    const struct update update = *plan.step->update;
    uint32_t value = blockIdx.x * VALUES + threadIdx.x % VALUES, first = threadIdx.x / VALUES;
    uint32_t begin = plan.tensors[CONV2_W], own = value - begin;
    bool conv2 = value >= begin && own < CONV2_CHANNELS * CONV2_DEPTH;
    /* conv2's sums are stored as (64, 9 taps, 32), the arena as (64, 32, 9 taps). */
    uint32_t o = own / CONV2_DEPTH, tap = own % CONV2_DEPTH / CONV1_CHANNELS, c = own % CONV1_CHANNELS;
    uint32_t place = conv2 ? begin + o * CONV2_DEPTH + c * CONV_TAPS + tap : value;
    struct parameter parameter = {};
    if (first == 0 && !plan.apart)
        parameter = load_parameter(plan, update, place);
    const float *sums = plan.conv_sums + value;
    float parts[share], part = 0;
    wait_for_previous();
    allow_next();
#pragma unroll
    for (uint32_t p = 0; p < share; p++) { /* all loads start before the first sum */
        uint32_t at = GROUPS * p + first;
        parts[p] = at < plan.parts ? sums[(size_t)at * NET::conv_parameters] : 0;
    }
#pragma unroll
    for (uint32_t p = 0; p < share; p++)
        part += parts[p];
    float gradient = add_groups(part);
    if (first > 0)
        return;
    float weight = step_parameter(plan, update, place, gradient, parameter);
    if (conv2 && !plan.apart)
        plan.conv2_weight[conv2_place(plan.hopper, o, tap, c)] = __float2bfloat16(weight);
}

enum status graph_update(const struct graph_plan *plan, bool colour, cudaStream_t stream)
{
    uint32_t blocks = (colour ? graph_colour::conv_parameters : graph_gray::conv_parameters) / VALUES;
    return launch_overlapped(colour ? update_kernel<graph_colour> : update_kernel<graph_gray>,
                             "update_kernel", dim3(blocks), THREADS, 0, plan, stream);
}

/* ---- With several ranks ---- */

/* Writes the bf16 copy of parameter `at`, if it has one. */
static __device__ __forceinline__ void copy_parameter(const struct graph_plan &plan, uint32_t at, float value)
{
    uint32_t conv2 = at - plan.tensors[CONV2_W], fc1 = at - plan.tensors[FC1_W];
    if (at >= plan.tensors[FC1_W] && at < plan.tensors[FC1_B])
        plan.fc1_weight[fc1] = __float2bfloat16(value);
    else if (at >= plan.tensors[CONV2_W] && conv2 < CONV2_CHANNELS * CONV2_DEPTH) {
        uint32_t o = conv2 / CONV2_DEPTH, c = conv2 % CONV2_DEPTH / CONV_TAPS, tap = conv2 % CONV_TAPS;
        plan.conv2_weight[conv2_place(plan.hopper, o, tap, c)] = __float2bfloat16(value);
    }
}

/* Updates the parameters whose gradients have the indices first to end - 1 of gradient_place(). Each thread
 * updates four adjacent parameters. Tensors begin at multiples of four. */
static __global__ void __launch_bounds__(THREADS)
    apply_kernel(const __grid_constant__ struct graph_plan plan, uint32_t first, uint32_t end)
{
    const struct update update = *plan.step->update;
    uint32_t place = first + 4 * (blockIdx.x * THREADS + threadIdx.x);
    uint32_t behind = plan.arena_values - plan.tensors[FC1_B];
    uint32_t at = place < behind ? place + plan.tensors[FC1_B] : place - behind;
    bool moments = optimizer_moments(update.kind) > 1;
    if (place >= end)
        return;
    float gradient[4], parameter[4], m[4], v[4] = {};
    *reinterpret_cast<float4 *>(gradient) = *reinterpret_cast<const float4 *>(plan.gradients + place);
    *reinterpret_cast<float4 *>(parameter) = *reinterpret_cast<const float4 *>(plan.state.parameters + at);
    *reinterpret_cast<float4 *>(m) = *reinterpret_cast<const float4 *>(plan.state.m + at);
    if (moments)
        *reinterpret_cast<float4 *>(v) = *reinterpret_cast<const float4 *>(plan.state.v + at);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        optimizer_step(&update, gradient[i], &parameter[i], &m[i], &v[i]);
        copy_parameter(plan, at + i, parameter[i]);
    }
    *reinterpret_cast<float4 *>(plan.state.parameters + at) = *reinterpret_cast<const float4 *>(parameter);
    *reinterpret_cast<float4 *>(plan.state.m + at) = *reinterpret_cast<const float4 *>(m);
    if (moments)
        *reinterpret_cast<float4 *>(plan.state.v + at) = *reinterpret_cast<const float4 *>(v);
}

enum status graph_apply(const struct graph_plan *plan, uint32_t first, uint32_t end, cudaStream_t stream)
{
    uint32_t fours = (end - first) / 4;
    apply_kernel<<<(fours + THREADS - 1) / THREADS, THREADS, 0, stream>>>(*plan, first, end);
    return CUDA_LAUNCHED("apply_kernel");
}

/* ---- Between steps ---- */

static __global__ void order_kernel(const struct draw_order order, uint32_t *numbers)
{
    uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i < order.count)
        numbers[i] = draw_order_at(&order, i);
}

/* One thread takes tens of microseconds for an update, which would delay a step. */
static __global__ void updates_kernel(const __grid_constant__ struct graph_plan plan, uint64_t first)
{
    uint32_t step = blockIdx.x * THREADS + threadIdx.x;
    if (step < plan.steps)
        plan.updates[step] = optimizer_at(&plan.optimizer, &plan.schedule, first + step);
}

enum status graph_order(const struct graph_plan *plan, const struct draw_order *order, uint32_t epoch,
                        cudaStream_t stream)
{
    order_kernel<<<(plan->samples + THREADS - 1) / THREADS, THREADS, 0, stream>>>(*order, plan->order);
    TRY(CUDA_LAUNCHED("order_kernel"));
    updates_kernel<<<(plan->steps + THREADS - 1) / THREADS, THREADS, 0, stream>>>(*plan, (uint64_t)epoch *
                                                                                             plan->steps);
    return CUDA_LAUNCHED("updates_kernel");
}

static __global__ void go_to_kernel(const struct graph_position position, struct graph_position *to)
{
    *to = position;
}

enum status graph_go_to(const struct graph_plan *plan, const struct graph_position *position,
                        cudaStream_t stream)
{
    go_to_kernel<<<1, 1, 0, stream>>>(*position, plan->position);
    return CUDA_LAUNCHED("go_to_kernel");
}

template <class NET> static __global__ void refresh_kernel(const __grid_constant__ struct graph_plan plan)
{
    uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i < HIDDEN * NET::features)
        plan.fc1_weight[i] = __float2bfloat16(plan.state.parameters[plan.tensors[FC1_W] + i]);
    if (i < CONV2_CHANNELS * CONV2_DEPTH) {
        uint32_t o = i / CONV2_DEPTH, tap = i % CONV2_DEPTH / CONV1_CHANNELS, c = i % CONV1_CHANNELS;
        plan.conv2_weight[conv2_place(plan.hopper, o, tap, c)] = __float2bfloat16(
            plan.state.parameters[plan.tensors[CONV2_W] + o * CONV2_DEPTH + c * CONV_TAPS + tap]);
    }
}

enum status graph_refresh(const struct graph_plan *plan, bool colour, cudaStream_t stream)
{
    if (colour)
        refresh_kernel<graph_colour>
            <<<HIDDEN * graph_colour::features / THREADS, THREADS, 0, stream>>>(*plan);
    else
        refresh_kernel<graph_gray><<<HIDDEN * graph_gray::features / THREADS, THREADS, 0, stream>>>(*plan);
    return CUDA_LAUNCHED("refresh_kernel");
}
