/* train-graph, backward pass of fc2 and of fc1's bias. Sums the gradients over the samples, updates fc2's
 * parameters and fc1's bias, and adds up the totals. This work is small and independent of the convolutions,
 * so a few extra blocks of conv_back_kernel do it concurrently. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_HEAD_BACK_CUH
#define FDSL_CUDA_TRAIN_GRAPH_HEAD_BACK_CUH

#include "train/graph/kernels.cuh"

/* Number of extra blocks. Up to GRAPH_PARTS_MAX (128) blocks process the samples, which leaves 4 of an H200's
 * 132 multiprocessors. */
#define HEAD_BLOCKS  4

#define HEAD_CLASSES 4 /* classes that a block processes at a time */

/* Updates fc2's weights of classes k to k + HEAD_CLASSES - 1. Thread i sums the products for hidden value i %
 * 128 over every fourth sample, for all of these classes. Then it adds the four partial sums of class k + i /
 * 128 in order. `shared` has room for HEAD_CLASSES * THREADS floats. */
template <int THREADS>
static __device__ __forceinline__ void update_classes(const struct graph_plan &plan,
                                                      const struct update &update, uint32_t k, float *shared)
{
    constexpr uint32_t groups = THREADS / HIDDEN;
    static_assert(groups == HEAD_CLASSES, "one group of threads per class");
    uint32_t count = plan.step->count, n = threadIdx.x % HIDDEN, own = threadIdx.x / HIDDEN;
    float sums[HEAD_CLASSES] = {}, sum = 0;
#pragma unroll 4
    for (uint32_t j = own; j < count; j += groups) {
        float hidden = plan.hidden[(size_t)j * HIDDEN + n];
#pragma unroll
        for (uint32_t c = 0; c < HEAD_CLASSES; c++)
            sums[c] = fmaf(plan.logit_delta[(size_t)j * plan.classes + min(k + c, plan.classes - 1)], hidden,
                           sums[c]);
    }
#pragma unroll
    for (uint32_t c = 0; c < HEAD_CLASSES; c++)
        shared[c * THREADS + threadIdx.x] = sums[c];
    __syncthreads();
#pragma unroll
    for (uint32_t g = 0; g < groups; g++)
        sum += shared[own * THREADS + g * HIDDEN + n];
    if (k + own < plan.classes)
        step_parameter(plan, update, plan.tensors[FC2_W] + (k + own) * HIDDEN + n, sum);
    __syncthreads();
}

/* Updates fc1's bias. Each group of 128 threads sums every fourth sample. The first group adds the partial
 * sums in order. `shared` has room for THREADS floats. */
template <int THREADS>
static __device__ __forceinline__ void update_hidden_bias(const struct graph_plan &plan,
                                                          const struct update &update, float *shared)
{
    constexpr uint32_t groups = THREADS / HIDDEN;
    uint32_t count = plan.step->count, n = threadIdx.x % HIDDEN;
    float sum = 0;
#pragma unroll 8
    for (uint32_t j = threadIdx.x / HIDDEN; j < count; j += groups)
        sum += __bfloat162float(plan.hidden_delta[(size_t)j * HIDDEN + n]);
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < HIDDEN) {
        sum = 0;
#pragma unroll
        for (uint32_t g = 0; g < groups; g++)
            sum += shared[g * HIDDEN + n];
        step_parameter(plan, update, plan.tensors[FC1_B] + n, sum);
    }
    __syncthreads();
}

/* Updates fc2's bias. A warp sums the gradients of a class, and each of its lanes sums every 32nd sample. */
template <int THREADS>
static __device__ __forceinline__ void update_last_bias(const struct graph_plan &plan,
                                                        const struct update &update)
{
    uint32_t count = plan.step->count;
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

/* Adds the batch's losses and correct predictions to the totals, and advances the position. Thread i sums
 * samples i, i + THREADS, ...; a tree reduction adds these sums. */
template <int THREADS>
static __device__ __forceinline__ void add_totals(const struct graph_plan &plan, double *sums)
{
    uint32_t *rights = reinterpret_cast<uint32_t *>(sums + THREADS);
    uint32_t count = plan.step->count, correct = 0;
    double sum = 0;
    for (uint32_t j = threadIdx.x; j < count; j += THREADS) {
        sum += plan.losses[j];
        correct += plan.right[j];
    }
    sums[threadIdx.x] = sum;
    rights[threadIdx.x] = correct;
    block_sums<THREADS>(sums, rights);
    if (threadIdx.x != 0)
        return;
    plan.totals->loss += sums[0];
    plan.totals->correct += rights[0];
    plan.totals->samples += count;
    if (!isfinite(sums[0]) && plan.totals->bad_step == TRAIN_FINE)
        plan.totals->bad_step = plan.step->number;
    /* No other kernel reads the position now, because only the first kernel of a step reads it. */
    plan.position->step++;
    plan.position->number++;
}

/* Runs block `block` of HEAD_BLOCKS. The last block updates the biases and the totals. The others share the
 * classes of fc2. `shared` has room for THREADS * 16 bytes. */
template <int THREADS>
static __device__ __forceinline__ void head_back(const struct graph_plan &plan, uint32_t block,
                                                 uint8_t *shared)
{
    const struct update update = plan.step->update;
    if (block < HEAD_BLOCKS - 1) {
        for (uint32_t k = block * HEAD_CLASSES; k < plan.classes; k += (HEAD_BLOCKS - 1) * HEAD_CLASSES)
            update_classes<THREADS>(plan, update, k, reinterpret_cast<float *>(shared));
        return;
    }
    update_hidden_bias<THREADS>(plan, update, reinterpret_cast<float *>(shared));
    update_last_bias<THREADS>(plan, update);
    add_totals<THREADS>(plan, reinterpret_cast<double *>(shared));
}

#endif
