/* Shared by conv_back.cu and conv_back_hopper.cu: the backward pass of fc2 and of fc1's bias, which a few
 * extra blocks run concurrently, because this work is small and independent of the convolutions; and the
 * gradient of conv1's weights. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_CONV_BACK_CUH
#define FDSL_CUDA_TRAIN_GRAPH_CONV_BACK_CUH

#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/graph/kernels.cuh"

/* ---- fc2 and fc1's bias: gradients, updates, and the totals ---- */

/* Number of extra blocks. Up to GRAPH_PARTS_MAX (128) blocks process the samples, which leaves 4 of an H200's
 * 132 multiprocessors. */
#define HEAD_BLOCKS  4

#define HEAD_CLASSES 4 /* classes that a block processes at a time */

/* Updates fc2's weights of classes k to k + HEAD_CLASSES - 1. Each group of 128 threads sums the products
 * over its share of the samples, for all of these classes; the block then adds the groups' sums in order.
 * `shared` has room for HEAD_CLASSES * THREADS floats. */
template <int THREADS>
static __device__ __forceinline__ void update_classes(const struct graph_plan &plan,
                                                      const struct update &update, uint32_t k, float *shared)
{
    constexpr uint32_t groups = THREADS / HIDDEN;
    uint32_t count = plan.step->count, n = threadIdx.x % HIDDEN;
    float sums[HEAD_CLASSES] = {};
#pragma unroll 4
    for (uint32_t j = threadIdx.x / HIDDEN; j < count; j += groups) {
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
    for (uint32_t i = threadIdx.x; i < min(HEAD_CLASSES, plan.classes - k) * HIDDEN; i += THREADS) {
        float sum = 0;
#pragma unroll
        for (uint32_t g = 0; g < groups; g++)
            sum += shared[i / HIDDEN * THREADS + g * HIDDEN + i % HIDDEN];
        step_parameter(plan, update, plan.tensors[FC2_W] + k * HIDDEN + i, sum);
    }
    __syncthreads();
}

/* Updates fc1's bias. Each group of 128 threads sums its share of the samples. The first group adds the
 * partial sums in order. `shared` has room for THREADS floats. */
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

/* Adds the batch's losses and correct predictions to the totals, and advances the position. Masked samples
 * do not count. Thread i sums samples i, i + THREADS, ...; a tree reduction adds these sums. THREADS is a
 * power of two, and the other threads of the block only wait. `sums` has room for THREADS * 16 bytes. */
template <int THREADS>
static __device__ __forceinline__ void add_totals(const struct graph_plan &plan, double *sums)
{
    uint32_t *rights = reinterpret_cast<uint32_t *>(sums + THREADS), *samples = rights + THREADS;
    uint32_t count = plan.step->count, correct = 0, counted = 0;
    double sum = 0;
    for (uint32_t j = threadIdx.x; j < count && threadIdx.x < THREADS; j += THREADS) {
        const uint32_t is = plan.right[j];
        sum += plan.losses[j];
        correct += is == 1;
        counted += is != LOSS_MASKED;
    }
    if (threadIdx.x < THREADS) {
        sums[threadIdx.x] = sum;
        rights[threadIdx.x] = correct;
        samples[threadIdx.x] = counted;
    }
    block_sums<THREADS>(sums, rights, samples);
    if (threadIdx.x != 0)
        return;
    plan.totals->loss += sums[0];
    plan.totals->correct += rights[0];
    plan.totals->samples += samples[0];
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
    const struct update update = *plan.step->update;
    if (block < HEAD_BLOCKS - 1) {
        for (uint32_t k = block * HEAD_CLASSES; k < plan.classes; k += (HEAD_BLOCKS - 1) * HEAD_CLASSES)
            update_classes<THREADS>(plan, update, k, reinterpret_cast<float *>(shared));
        return;
    }
    update_hidden_bias<THREADS>(plan, update, reinterpret_cast<float *>(shared));
    update_last_bias<THREADS>(plan, update);
    add_totals<THREADS / 256 * 256>(plan, reinterpret_cast<double *>(shared));
}

/* ---- The gradient of conv2's output ---- */

/* Computes the gradients of the eight pixels of windows 2 * pair and 2 * pair + 1, for eight channels.
 * delta[c] has the gradients of channel c in both windows, peak[c] the bytes of `argmax`. Passes each pixel's
 * eight values, or zeros, to store(pixel, values), where pixel (y, x) has index (y + 2) * columns1 + x + 2.
 * Adds the gradients to `sums`, for conv2's bias. */
template <class NET, class STORE>
static __device__ __forceinline__ void spread_pair(const uint32_t delta[8], const uint32_t peak[8], int pair,
                                                   float sums[8], const STORE &store)
{
    int y = 2 * pair / NET::window_columns * 2, x = 2 * pair % NET::window_columns * 2;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        uint32_t value[4], which[4]; /* two channels each */
#pragma unroll
        for (int c = 0; c < 4; c++) {
            value[c] = __byte_perm(delta[2 * c], delta[2 * c + 1], w ? 0x7632 : 0x5410);
            which[c] = __byte_perm(peak[2 * c], peak[2 * c + 1], w ? 0x5511 : 0x4400);
            sums[2 * c] += which[c] & 0xff ? bf16_low(value[c]) : 0;
            sums[2 * c + 1] += which[c] & 0xff0000 ? bf16_high(value[c]) : 0;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { /* pixel (i / 2, i % 2) of the window has bit i */
            uint32_t word[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                uint32_t bit = which[c] >> i & 0x00010001u;
                word[c] = value[c] & (bit << 16) - bit; /* a 1 becomes 0xffff in its half */
            }
            store((y + i / 2 + 2) * NET::columns1 + x + 2 * w + i % 2 + 2,
                  make_uint4(word[0], word[1], word[2], word[3]));
        }
    }
}

/* Adds the sums over the lanes that have the same channels (those with equal lane / 2 % 4) to `bias2`. No
 * other warp adds to these elements. */
static __device__ __forceinline__ void add_bias2(float sums[8], float *bias2)
{
    int own = threadIdx.x % 2 + threadIdx.x % 32 / 8;
#pragma unroll
    for (int c = 0; c < 8; c++) {
        sums[c] += __shfl_xor_sync(~0u, sums[c], 1);
        sums[c] += __shfl_xor_sync(~0u, sums[c], 8);
        sums[c] += __shfl_xor_sync(~0u, sums[c], 16);
        if (own == 0)
            bias2[c] += sums[c];
    }
}

/* ---- conv1 ---- */

/* `c` is the gradient of conv2's input for TILES tiles of 16 pixels, from pixel `first_pixel` on. Applies
 * conv1's ReLU mask to it, multiplies it by the windows over the sample's bytes, and adds the products to
 * `sums`. The rows of `sums` are taps. One more row has factors of 1 instead of bytes; it becomes the
 * gradient of the bias. place(pixel, piece) is the byte offset in `conv1` of a 16-byte piece of conv1's
 * output. */
template <class NET, int TILES, class PLACE>
static __device__ __forceinline__ void
back_conv1(const uint8_t *conv1, const PLACE &place, const uint8_t *image_bytes, int first_pixel,
           const float c[TILES][4][4], float sums[NET::depth1 / 16][4][4])
{
    const uint16_t *image = reinterpret_cast<const uint16_t *>(image_bytes);
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        int tile = first_pixel + 16 * m;
        uint32_t b[4][2];
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int p = tile + 8 * h + g;
                uint32_t value = 0;
                if (p < NET::pixels1) {
                    uint32_t word = *reinterpret_cast<const uint32_t *>(conv1 + place(p, n) + 4 * t);
                    value =
                        pack<bf16>(word & 0xffff ? c[m][n][2 * h] : 0, word >> 16 ? c[m][n][2 * h + 1] : 0);
                }
                b[n][h] = transposed(value);
            }
        int first[2]; /* offsets for pixels 2t and 2t + 8 of the tile; the pixel after each of them is in the
                         same row */
#pragma unroll
        for (int h = 0; h < 2; h++)
            first[h] = window_first<NET>(min(tile + 8 * h + 2 * t, NET::pixels1 - 2));
#pragma unroll
        for (int s = 0; s < NET::depth1 / 16; s++) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) { /* a[i]: taps of half i % 2, pixels of half i / 2 */
                int k = 16 * s + 8 * (i % 2) + g;
                const uint16_t *from = image + first[i / 2] + tap_offset<NET>(k);
                uint32_t word = from[0] | (uint32_t)from[1] << 16;
                a[i] = k < NET::taps1 ? word : k == NET::taps1 ? 0x3f803f80u : 0;
            }
#pragma unroll
            for (int n = 0; n < 4; n++)
                multiply(sums[s][n], a, b[n][0], b[n][1]);
        }
    }
}

/* Warp `warp` writes its sums for conv1, (depth1, 32), to shared memory. */
template <class NET>
static __device__ __forceinline__ void leave_conv1(const float sums[NET::depth1 / 16][4][4], int warp,
                                                   float *to)
{
    int lane = threadIdx.x % 32;
    to += warp * (NET::depth1 * CONV1_CHANNELS) + lane / 4 * CONV1_CHANNELS + lane % 4 * 2;
#pragma unroll
    for (int s = 0; s < NET::depth1 / 16; s++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *reinterpret_cast<float2 *>(to + (16 * s + 8 * h) * CONV1_CHANNELS + 8 * n) =
                    make_float2(sums[s][n][2 * h], sums[s][n][2 * h + 1]);
}

/* Adds the sums of WARPS warps for conv1 and writes its gradients. Normalised values are scale * byte +
 * offset. The gradient of a weight is therefore scale times the sum of its tap, plus offset times the sum of
 * the row whose factors are 1. */
template <class NET, int WARPS, int THREADS>
static __device__ __forceinline__ void store_conv1(const struct graph_plan &plan, const float *left,
                                                   float *sums)
{
    for (int i = threadIdx.x; i < (NET::taps1 + 1) * CONV1_CHANNELS; i += THREADS) {
        int k = i / CONV1_CHANNELS, o = i % CONV1_CHANNELS;
        float of_bytes = 0, of_ones = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            of_bytes += left[w * NET::depth1 * CONV1_CHANNELS + k * CONV1_CHANNELS + o];
            of_ones += left[w * NET::depth1 * CONV1_CHANNELS + NET::taps1 * CONV1_CHANNELS + o];
        }
        if (k < NET::taps1)
            sums[o * NET::taps1 + k] =
                fmaf(plan.scale[k / CONV_TAPS], of_bytes, plan.offset[k / CONV_TAPS] * of_ones);
        else
            sums[CONV1_CHANNELS * NET::taps1 + o] = of_ones;
    }
}

#endif
