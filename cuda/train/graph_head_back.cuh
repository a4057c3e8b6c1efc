/* train-graph, what the head leaves to be summed over the samples: the gradients of fc2 and of fc1's bias,
 * with the optimizer's steps, and the totals. It is little, and needs nothing of the convolutions, so a few
 * blocks of their kernel do it beside the others. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_HEAD_BACK_CUH
#define FDSL_CUDA_TRAIN_GRAPH_HEAD_BACK_CUH

#include "train/graph.cuh"

#define HEAD_BLOCKS 4 /* an H200 has 132 multiprocessors, and GRAPH_PARTS_MAX of them take samples */

/* One number for each hidden value, summed over the samples: thread i takes value i % 128 of every fourth
 * sample, and the four sums are added in their order. The result is thread i's, i < HIDDEN. */
template <int THREADS, class TERM>
static __device__ __forceinline__ float sum_samples(uint32_t count, TERM term, float *shared)
{
    constexpr uint32_t groups = THREADS / HIDDEN;
    float sum = 0;
#pragma unroll 16
    for (uint32_t j = threadIdx.x / HIDDEN; j < count; j += groups)
        sum += term(j);
    __syncthreads();
    shared[threadIdx.x] = sum;
    __syncthreads();
    sum = shared[threadIdx.x % HIDDEN];
#pragma unroll
    for (uint32_t g = 1; g < groups; g++)
        sum += shared[g * HIDDEN + threadIdx.x % HIDDEN];
    return sum;
}

/* fc2's bias: a warp a class, a lane every 32nd sample. */
template <int THREADS>
static __device__ __forceinline__ void update_last_bias(const struct graph_plan &plan,
                                                        const struct update &update)
{
    uint32_t count = plan.moment->count;
    for (uint32_t k = threadIdx.x / 32; k < plan.classes; k += THREADS / 32) {
        float sum = 0;
#pragma unroll 8
        for (uint32_t j = threadIdx.x % 32; j < count; j += 32)
            sum += plan.logit_delta[(size_t)j * plan.classes + k];
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0)
            step_parameter(plan, update, plan.tensors[FC2_B] + k, sum);
    }
}

/* The batch's losses and right answers: thread i of samples i, i + THREADS, ... and then a tree. */
template <int THREADS>
static __device__ __forceinline__ void add_totals(const struct graph_plan &plan, double *sums)
{
    uint32_t *rights = reinterpret_cast<uint32_t *>(sums + THREADS);
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

/* Block `block` of HEAD_BLOCKS: classes are dealt out, the last two have the rest. `shared` has room for
 * THREADS times 12 bytes. */
template <int THREADS>
static __device__ __forceinline__ void head_back(const struct graph_plan &plan, uint32_t block,
                                                 uint8_t *shared)
{
    const struct update update = plan.moment->update;
    uint32_t count = plan.moment->count, n = threadIdx.x % HIDDEN;
    for (uint32_t k = block; k < plan.classes; k += HEAD_BLOCKS) {
        float sum = sum_samples<THREADS>(
            count,
            [&](uint32_t j) {
                return plan.logit_delta[(size_t)j * plan.classes + k] * plan.hidden[(size_t)j * HIDDEN + n];
            },
            reinterpret_cast<float *>(shared));
        if (threadIdx.x < HIDDEN)
            step_parameter(plan, update, plan.tensors[FC2_W] + k * HIDDEN + n, sum);
    }
    if (block == HEAD_BLOCKS - 2) {
        float sum = sum_samples<THREADS>(
            count, [&](uint32_t j) { return __bfloat162float(plan.hidden_delta[(size_t)j * HIDDEN + n]); },
            reinterpret_cast<float *>(shared));
        if (threadIdx.x < HIDDEN)
            step_parameter(plan, update, plan.tensors[FC1_B] + n, sum);
    }
    if (block == HEAD_BLOCKS - 1) {
        __syncthreads();
        update_last_bias<THREADS>(plan, update);
        add_totals<THREADS>(plan, reinterpret_cast<double *>(shared));
    }
}

#endif
