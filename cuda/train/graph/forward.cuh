/* Shared by forward.cu and forward_hopper.cu, the first kernel of a step: from a sample's bytes to fc1's
 * input, one block per sample. The block gathers, augments (shift, flip) and normalises the sample. conv1's
 * output stays in shared memory, where conv2 reads it as an implicit GEMM. ReLU and pooling are fused into
 * the end of that GEMM; dropout follows. For each pooled value, the kernel writes two bytes for the value and
 * one byte for the argmax. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_FORWARD_CUH
#define FDSL_CUDA_TRAIN_GRAPH_FORWARD_CUH

#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/graph/kernels.cuh"

/* Distance between adjacent channels of the pooled values in shared memory, in values. This distance puts the
 * eight channels that a warp stores at a time into different banks. The sixteen values that share a dropout
 * draw stay contiguous. */
template <class NET> FDSL_HD constexpr int pooled_pitch(void)
{
    return NET::windows % 16 == 0 ? NET::windows + 8 : NET::windows;
}

/* Applies bias, ReLU and pooling to a warp's sums for four windows and 64 channels. Row r of the sums is
 * pixel (r / 8, r % 2) of window `start` + r % 8 / 2. Two lanes therefore have the four pixels of a window,
 * two pixels each. Lanes with even g = lane / 4 compute one channel, lanes with odd g compute the next
 * channel. The first of equal maxima is selected, as in the reference engine. */
template <class NET>
static __device__ __forceinline__ void pool(const float c[8][4], const float bias[8], int start,
                                            uint16_t *values, uint8_t *argmax)
{
    int lane = threadIdx.x % 32, g = lane / 4, window = start + g / 2;
    bool odd = g % 2;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float *sums = c[n];
        float top = __shfl_xor_sync(~0u, odd ? sums[0] : sums[1], 4);
        float bottom = __shfl_xor_sync(~0u, odd ? sums[2] : sums[3], 4);
        float own_top = odd ? sums[1] : sums[0], own_bottom = odd ? sums[3] : sums[2];
        float first = odd ? top : own_top, second = odd ? own_top : top;
        float third = odd ? bottom : own_bottom, fourth = odd ? own_bottom : bottom;
        uint32_t peak = second > first ? 2 : 1;
        float best = larger(first, second);
        peak = third > best ? 4 : peak;
        best = larger(best, third);
        peak = fourth > best ? 8 : peak;
        best = larger(best, fourth) + bias[n];
        if (best <= 0) {
            best = 0;
            peak = 0;
        }
        if (window < NET::windows) {
            int channel = 8 * n + 2 * (lane % 4) + odd;
            values[channel * pooled_pitch<NET>() + window] = (uint16_t)bf16_bits(best);
            argmax[channel * NET::windows + window] = (uint8_t)peak;
        }
    }
}

/* Applies dropout and writes the values to global memory. A thread processes 16 values at a time, with one
 * byte per value of one Philox block. */
template <class NET, int THREADS, bool TRAINING>
static __device__ __forceinline__ void drop(const struct graph_plan &plan, uint32_t epoch, uint32_t number,
                                            uint32_t row, const uint8_t *values, const uint8_t *peaks)
{
    uint4 *pooled = reinterpret_cast<uint4 *>(plan.pooled + (size_t)row * NET::features);
    uint4 *argmax = reinterpret_cast<uint4 *>(plan.argmax + (size_t)row * NET::features);
    for (int i = threadIdx.x; i < NET::features / 16; i += THREADS) {
        int channel = 16 * i / NET::windows, at = 16 * i % NET::windows;
        const uint4 *from =
            reinterpret_cast<const uint4 *>(values + (channel * pooled_pitch<NET>() + at) * 2);
        union {
            uint4 all[2];
            uint32_t word[8];
        } value = {{from[0], from[1]}};
        union {
            uint4 all;
            uint32_t word[4];
        } peak = {reinterpret_cast<const uint4 *>(peaks)[i]};
        if (TRAINING) {
            struct philox_block draw = draw_dropout(plan.seed, epoch, number, DROPOUT1_NUMBER, 16 * i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t kept = __vcmpgeu4(draw.word[j], DROPOUT1_THRESHOLD * 0x01010101u);
                peak.word[j] &= kept;
                value.word[2 * j] &= __byte_perm(kept, 0, 0x1100);
                value.word[2 * j + 1] &= __byte_perm(kept, 0, 0x3322);
            }
            argmax[i] = peak.all;
        }
        pooled[2 * i] = value.all[0];
        pooled[2 * i + 1] = value.all[1];
    }
}

/* Zeroes a row past the end of a short batch, so that it adds nothing to the weight gradients. */
template <class NET, int THREADS>
static __device__ void clear_row(const struct graph_plan &plan, uint32_t row)
{
    uint4 *pooled = reinterpret_cast<uint4 *>(plan.pooled + (size_t)row * NET::features);
    for (int i = threadIdx.x; i < NET::features / 8; i += THREADS)
        pooled[i] = make_uint4(0, 0, 0, 0);
}

/* Writes plan.step for the other kernels of the step. One thread of an extra block runs this, in parallel
 * with the blocks that compute samples. */
static __device__ void store_step(const struct graph_plan &plan, uint32_t first,
                                  const struct graph_share &share)
{
    struct graph_step *step = plan.step;
    step->epoch = plan.position->epoch;
    step->first = first;
    step->count = share.count;
    step->total = share.total;
    step->number = plan.position->number;
    step->update = plan.updates + plan.position->step;
}

/* The kernel. CONV2 computes conv2. It has shared memory offsets (`conv1`, `pooled`, `argmax`, `image`,
 * `bias`), THREADS, and these functions: take_weight() starts copying conv2's weights; place() returns the
 * byte offset of a 16-byte piece of conv1's output; run() computes conv2 and pool() after publish() and a
 * barrier. */
template <class CONV2, bool TRAINING>
static __device__ __forceinline__ void forward(const struct graph_plan &plan, uint8_t *shared)
{
    typedef CONV2 at;
    typedef typename CONV2::net NET;
    constexpr int THREADS = CONV2::threads;
    uint32_t epoch = 0, first, row = blockIdx.x, number;
    struct graph_share share = plan.share;
    if (TRAINING) {
        uint32_t step = plan.position->step;
        epoch = plan.position->epoch;
        if (step + 1 == plan.steps)
            share = plan.last;
        first = step * plan.stride + share.first;
    } else {
        first = plan.step->first;
        share.count = plan.step->count;
    }
    if (row >= share.count) {
        wait_for_previous();
        allow_next();
        if (TRAINING && row == plan.batch && threadIdx.x == 0)
            store_step(plan, first, share);
        if (TRAINING && row < plan.batch)
            clear_row<NET, THREADS>(plan, row);
        return;
    }
    number = TRAINING ? plan.order[first + row] : first + row;
    struct draw_move move = {};
    if (TRAINING)
        move = draw_move(&plan.augment, plan.seed, epoch, number);
    const uint8_t *sample = TRAINING ? training_sample<NET>(plan, plan.position->number, row, number)
                                     : plan.values[plan.step->part] + (size_t)number * NET::values;
    uint16_t *image = reinterpret_cast<uint16_t *>(shared + at::image);
    float *bias1 = reinterpret_cast<float *>(shared + at::bias);
    take_image<NET, THREADS>(sample, move, threadIdx.x, image);
    wait_for_previous(); /* the previous step's last kernel updates the convolutions' parameters */
    allow_next();
    CONV2::take_weight(plan, shared);
    copy_commit();
    if (threadIdx.x < CONV1_CHANNELS)
        bias1[threadIdx.x] = conv1_bias<NET>(plan, threadIdx.x);
    float bias2[8];
#pragma unroll
    for (int n = 0; n < 8; n++)
        bias2[n] =
            plan.state
                .parameters[plan.tensors[CONV2_B] + 8 * n + 2 * (threadIdx.x % 4) + threadIdx.x / 4 % 2];
    __syncthreads();
    conv1_forward<NET, THREADS / 32>(plan, image, bias1, threadIdx.x / 32, CONV2::place, shared + at::conv1);
    copy_wait<0>();
    CONV2::publish();
    __syncthreads();
    CONV2::template run<TRAINING>(plan, row, shared, bias2);
    __syncthreads();
    drop<NET, THREADS, TRAINING>(plan, epoch, number, row, shared + at::pooled, shared + at::argmax);
}

template <class CONV2, bool TRAINING>
static enum status launch_forward(void (*kernel)(struct graph_plan), const struct graph_plan *plan,
                                  cudaStream_t stream)
{
    struct graph_plan own = *plan;
    own.overlap &= TRAINING; /* inference starts with a copy, which cannot overlap */
    return launch_overlapped(kernel, "forward_kernel", dim3(plan->batch + TRAINING), CONV2::threads,
                             CONV2::bytes, &own, stream);
}

#endif
