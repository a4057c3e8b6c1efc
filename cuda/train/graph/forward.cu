/* train-graph, the first kernel of a step: from a sample's bytes to fc1's input, one block per sample. The
 * block gathers, augments (shift, flip) and normalises the sample. conv1's output stays in shared memory,
 * where conv2 reads it as an implicit GEMM. ReLU and pooling are fused into the end of that GEMM; dropout
 * follows. For each pooled value, the kernel writes two bytes for the value and one byte for the argmax. */
#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/graph/kernels.cuh"

#define WARPS   6
#define THREADS (32 * WARPS)
#define TILES   3 /* tiles of 16 pixels (4 pooling windows) and 64 channels that a warp computes at a time */

/* Shared memory offsets in bytes. */
template <class NET> struct layout {
    static constexpr int conv1 = 0;
    static constexpr int weight = conv1 + NET::pixels1 * 64;
    static constexpr int pooled = weight + CONV2_BYTES;
    /* Distance between adjacent channels, in values. This distance puts the eight channels that a warp stores
     * at a time into different banks. The sixteen values that share a dropout draw stay contiguous. */
    static constexpr int pitch = NET::windows % 16 == 0 ? NET::windows + 8 : NET::windows;
    static constexpr int argmax = pooled + CONV2_CHANNELS * pitch * 2;
    static constexpr int image = argmax + NET::features;
    static constexpr int bias = image + NET::values * 2;
    static constexpr int bytes = bias + CONV1_CHANNELS * 4;
    static constexpr int blocks = 2 * (bytes + 1024) <= 228 * 1024 ? 2 : 1; /* blocks per SM with 228 KB */
    static_assert(image % 16 == 0 && argmax % 16 == 0 && bias % 4 == 0, "aligned");
};

/* Computes conv2's sums for the 12 pooling windows of tiles 3 * unit to 3 * unit + 2. Row r of a tile is
 * pixel (r / 8, r % 2) of its window r % 8 / 2. Two lanes therefore have the four pixels of a window, two
 * pixels each. */
template <class NET>
static __device__ __forceinline__ void conv2_forward(uint32_t conv1, uint32_t weight, int unit,
                                                     float c[TILES][8][4])
{
    int lane = threadIdx.x % 32, row = lane % 16, piece = lane / 16;
    uint32_t pixels[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        int window = min(4 * (TILES * unit + m) + row % 8 / 2, NET::windows - 1);
        int y = 2 * (window / NET::window_columns) + row / 8;
        int x = 2 * (window % NET::window_columns) + row % 2;
        pixels[m] = (uint32_t)(y * NET::columns1 + x);
#pragma unroll
        for (int n = 0; n < 8; n++)
            c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0;
    }
    /* This lane's row address for ldmatrix. A matrix is 8 outputs (rows) by 8 values of the depth. */
    weight += (lane % 8 + lane / 16 * 8) * CONV2_PITCH + lane / 8 % 2 * 16;
#pragma unroll
    for (int tap = 0; tap < CONV_TAPS; tap++) {
        uint32_t at[TILES];
#pragma unroll
        for (int m = 0; m < TILES; m++)
            at[m] = conv1 + conv1_piece(pixels[m] + tap / 3 * NET::columns1 + tap % 3, piece);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            uint32_t a[TILES][4], b[4][4];
#pragma unroll
            for (int m = 0; m < TILES; m++)
                mma_load4(a[m], at[m] ^ 32 * s);
#pragma unroll
            for (int n = 0; n < 4; n++)
                mma_load4(b[n], weight + n * 16 * CONV2_PITCH + tap * 64 + s * 32);
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply(c[m][2 * n], a[m], b[n][0], b[n][1]);
                    multiply(c[m][2 * n + 1], a[m], b[n][2], b[n][3]);
                }
        }
    }
}

/* Applies bias, ReLU and pooling. Lanes with even g = lane / 4 compute one channel, lanes with odd g compute
 * the next channel. The first of equal maxima is selected, as in the reference engine. */
template <class NET>
static __device__ __forceinline__ void pool(const float c[TILES][8][4], const float bias[8], int unit,
                                            uint16_t *values, uint8_t *argmax)
{
    int lane = threadIdx.x % 32, g = lane / 4;
    bool odd = g % 2;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        int window = 4 * (TILES * unit + m) + g / 2;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float *sums = c[m][n];
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
                values[channel * layout<NET>::pitch + window] = (uint16_t)bf16_bits(best);
                argmax[channel * NET::windows + window] = (uint8_t)peak;
            }
        }
    }
}

/* Applies dropout and writes the values to global memory. A thread processes 16 values at a time, with one
 * byte per value of one Philox block. */
template <class NET, bool TRAINING>
static __device__ __forceinline__ void drop(const struct graph_plan &plan, uint32_t epoch, uint32_t number,
                                            uint32_t row, const uint8_t *shared)
{
    uint4 *pooled = reinterpret_cast<uint4 *>(plan.pooled + (size_t)row * NET::features);
    uint4 *argmax = reinterpret_cast<uint4 *>(plan.argmax + (size_t)row * NET::features);
    for (int i = threadIdx.x; i < NET::features / 16; i += THREADS) {
        int channel = 16 * i / NET::windows, at = 16 * i % NET::windows;
        const uint4 *from = reinterpret_cast<const uint4 *>(shared + layout<NET>::pooled +
                                                            (channel * layout<NET>::pitch + at) * 2);
        union {
            uint4 all[2];
            uint32_t word[8];
        } value = {{from[0], from[1]}};
        union {
            uint4 all;
            uint32_t word[4];
        } peak = {reinterpret_cast<const uint4 *>(shared + layout<NET>::argmax)[i]};
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
template <class NET> static __device__ void clear_row(const struct graph_plan &plan, uint32_t row)
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
    step->update = optimizer_at(&plan.optimizer, &plan.schedule, plan.position->number);
}

template <class NET, bool TRAINING>
static __global__ void __launch_bounds__(THREADS, layout<NET>::blocks)
    forward_kernel(const __grid_constant__ struct graph_plan plan)
{
    typedef layout<NET> at;
    extern __shared__ __align__(1024) uint8_t shared[];
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
            clear_row<NET>(plan, row);
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
    take_conv2_weight<THREADS>(plan, threadIdx.x, shared + at::weight);
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
    conv1_forward<NET, WARPS>(plan, image, bias1, threadIdx.x / 32, shared + at::conv1);
    copy_wait<0>();
    __syncthreads();
    for (int unit = threadIdx.x / 32; unit < (NET::windows + 4 * TILES - 1) / (4 * TILES); unit += WARPS) {
        float c[TILES][8][4];
        conv2_forward<NET>(shared_address(shared + at::conv1), shared_address(shared + at::weight), unit, c);
        pool<NET>(c, bias2, unit, reinterpret_cast<uint16_t *>(shared + at::pooled), shared + at::argmax);
    }
    __syncthreads();
    drop<NET, TRAINING>(plan, epoch, number, row, shared);
}

template <class NET, bool TRAINING>
static enum status launch(const struct graph_plan *plan, cudaStream_t stream)
{
    struct graph_plan own = *plan;
    own.overlap &= TRAINING; /* inference starts with a copy, which cannot overlap */
    return launch_overlapped(forward_kernel<NET, TRAINING>, "forward_kernel", dim3(plan->batch + TRAINING),
                             THREADS, layout<NET>::bytes, &own, stream);
}

enum status graph_forward(const struct graph_plan *plan, bool colour, bool training, cudaStream_t stream)
{
    if (colour)
        return training ? launch<graph_colour, true>(plan, stream)
                        : launch<graph_colour, false>(plan, stream);
    return training ? launch<graph_gray, true>(plan, stream) : launch<graph_gray, false>(plan, stream);
}
