/* train-graph, the first kernel of a step on all devices: conv2 with mma.sync. */
#include "train/graph/forward.cuh"

#define WARPS 6
#define TILES 3 /* tiles of 16 pixels (4 pooling windows) and 64 channels that a warp computes at a time */

/* Computes conv2's sums for the 12 pooling windows of tiles 3 * unit to 3 * unit + 2, with rows as in pool().
 */
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

template <class NET> struct conv2_mma {
    typedef NET net;
    static constexpr int threads = 32 * WARPS;
    /* Shared memory offsets in bytes. */
    static constexpr int conv1 = 0;
    static constexpr int weight = conv1 + NET::pixels1 * 64;
    static constexpr int pooled = weight + CONV2_BYTES;
    static constexpr int argmax = pooled + CONV2_CHANNELS * pooled_pitch<NET>() * 2;
    static constexpr int image = argmax + NET::features;
    static constexpr int bias = image + NET::values * 2;
    static constexpr int bytes = bias + CONV1_CHANNELS * 4;
    static constexpr int blocks = 2 * (bytes + 1024) <= 228 * 1024 ? 2 : 1; /* blocks per SM with 228 KB */
    static_assert(image % 16 == 0 && argmax % 16 == 0 && bias % 4 == 0, "aligned");

    static __device__ __forceinline__ void take_weight(const struct graph_plan &plan, uint8_t *shared)
    {
        take_conv2_weight<threads>(plan, threadIdx.x, shared + weight);
    }

    static __device__ __forceinline__ uint32_t place(uint32_t pixel, uint32_t piece)
    {
        return conv1_piece(pixel, piece);
    }

    static __device__ __forceinline__ void publish(void)
    {
    }

    template <bool TRAINING>
    static __device__ __forceinline__ void run(const struct graph_plan &, uint32_t, uint8_t *shared,
                                               const float bias2[8])
    {
        for (int unit = threadIdx.x / 32; unit < (NET::windows + 4 * TILES - 1) / (4 * TILES);
             unit += WARPS) {
            float c[TILES][8][4];
            conv2_forward<NET>(shared_address(shared + conv1), shared_address(shared + weight), unit, c);
#pragma unroll
            for (int m = 0; m < TILES; m++)
                pool<NET>(c[m], bias2, 4 * (TILES * unit + m), reinterpret_cast<uint16_t *>(shared + pooled),
                          shared + argmax);
        }
    }
};

template <class NET, bool TRAINING>
static __global__ void __launch_bounds__(conv2_mma<NET>::threads, conv2_mma<NET>::blocks)
    forward_kernel(const __grid_constant__ struct graph_plan plan)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    forward<conv2_mma<NET>, TRAINING>(plan, shared);
}

template <class NET, bool TRAINING>
static enum status launch(const struct graph_plan *plan, cudaStream_t stream)
{
    return launch_forward<conv2_mma<NET>, TRAINING>(forward_kernel<NET, TRAINING>, plan, stream);
}

enum status graph_forward(const struct graph_plan *plan, bool colour, bool training, cudaStream_t stream)
{
#ifdef HAVE_HOPPER
    if (plan->hopper)
        return graph_forward_hopper(plan, training, stream);
#endif
    if (colour)
        return training ? launch<graph_colour, true>(plan, stream)
                        : launch<graph_colour, false>(plan, stream);
    return training ? launch<graph_gray, true>(plan, stream) : launch<graph_gray, false>(plan, stream);
}
