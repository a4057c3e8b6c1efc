/* train-graph, the last kernel of a step. It adds the partial gradients of the convolutions and updates their
 * parameters. The other kernels here run between steps. They write the order of an epoch, the position in the
 * training, and the bf16 copies of parameters after graph_set(). */
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
    const struct update update = plan.step->update;
    uint32_t value = blockIdx.x * VALUES + threadIdx.x % VALUES;
    float part = 0;
    wait_for_previous();
    allow_next();
#pragma unroll 32
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
    /* conv2's sums are stored as (64, 9 taps, 32), the arena as (64, 32, 9 taps). */
    uint32_t o = own / CONV2_DEPTH, tap = own % CONV2_DEPTH / CONV1_CHANNELS, c = own % CONV1_CHANNELS;
    float weight = step_parameter(plan, update, begin + o * CONV2_DEPTH + c * CONV_TAPS + tap, gradient);
    plan.conv2_weight[o * (CONV2_PITCH / 2) + own % CONV2_DEPTH] = __float2bfloat16(weight);
}

enum status graph_update(const struct graph_plan *plan, bool colour, cudaStream_t stream)
{
    uint32_t blocks = (colour ? graph_colour::conv_parameters : graph_gray::conv_parameters) / VALUES;
    return launch_overlapped(colour ? update_kernel<graph_colour> : update_kernel<graph_gray>,
                             "update_kernel", dim3(blocks), THREADS, 0, plan, stream);
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

static __global__ void go_to_kernel(const struct graph_position position, struct graph_position *to)
{
    *to = position;
}

enum status graph_go_to(const struct graph_plan *plan, const struct graph_position *position,
                        cudaStream_t stream)
{
    go_to_kernel<<<1, 1, 0, stream>>>(*position, plan->position);
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
        refresh_kernel<graph_colour>
            <<<HIDDEN * graph_colour::features / THREADS, THREADS, 0, stream>>>(*plan);
    else
        refresh_kernel<graph_gray><<<HIDDEN * graph_gray::features / THREADS, THREADS, 0, stream>>>(*plan);
    CUDA_TRY_LAUNCH("refresh_kernel");
    return STATUS_OK;
}
