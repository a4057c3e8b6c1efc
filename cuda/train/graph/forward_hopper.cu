/* train-graph, the first kernel of a step for samples of 1x28x28 on compute capability 9.0: conv2 with wgmma.
 * It also stores conv1's output and the image for the backward pass. */
#include "train/graph/forward.cuh"
#include "train/vit/hopper.cuh"

typedef graph_gray net;

#define WARPGROUPS 3
#define TILE       8 /* a warpgroup computes 8 x 8 pixels and 64 channels at a time */

struct conv2_wgmma {
    typedef ::net net;
    static constexpr int threads = 128 * WARPGROUPS;
    /* Shared memory offsets in bytes. */
    static constexpr int conv1 = 0;
    static constexpr int weight = conv1 + net::pixels1 * 64;
    static constexpr int pooled = weight + WEIGHT_BYTES;
    static constexpr int argmax = pooled + CONV2_CHANNELS * pooled_pitch<net>() * 2;
    static constexpr int image = argmax + net::features;
    static constexpr int bias = image + net::values * 2;
    static constexpr int bytes = bias + CONV1_CHANNELS * 4;
    static constexpr int across = net::columns2 / TILE, tiles = net::rows2 / TILE * across;
    static_assert(2 * (bytes + 1024) <= 228 * 1024, "two blocks per multiprocessor");
    static_assert(net::columns2 % TILE == 0 && net::rows2 % TILE == 0, "whole tiles");
    static_assert(image % 16 == 0 && argmax % 16 == 0 && bias % 4 == 0, "aligned");

    static __device__ __forceinline__ void take_weight(const struct graph_plan &plan, uint8_t *shared)
    {
        take_conv2_pieces<threads>(plan, shared + weight);
    }

    static __device__ __forceinline__ uint32_t place(uint32_t pixel, uint32_t piece)
    {
        return kept_place(pixel, piece);
    }

    static __device__ __forceinline__ void publish(void)
    {
        wgmma_publish();
    }

    static __device__ __forceinline__ void keep_conv1(const struct graph_plan &plan, uint32_t row,
                                                      const uint8_t *shared)
    {
        uint4 *to = plan.conv1 + (size_t)row * CONV1_PIECES,
              *images = plan.images + (size_t)row * IMAGE_PIECES;
        for (uint32_t i = threadIdx.x; i < CONV1_PIECES; i += threads)
            to[i] = reinterpret_cast<const uint4 *>(shared + conv1)[i];
        for (uint32_t i = threadIdx.x; i < IMAGE_PIECES; i += threads)
            images[i] = reinterpret_cast<const uint4 *>(shared + image)[i];
    }

    /* Starts computing conv2's sums for a tile. Row 8 y + x of the sums is pixel (y, x) of the tile. */
    static __device__ __forceinline__ void multiply(uint32_t shared, int tile, float (&sums)[32])
    {
        int pixel = tile / across * TILE * ROW_PIECES + tile % across * TILE;
        uint32_t inputs = keep((shared + conv1) / 16 + pixel), weights = keep((shared + weight) / 16);
#pragma unroll
        for (int tap = 0; tap < CONV_TAPS; tap++)
#pragma unroll
            for (int s = 0; s < 2; s++)
                wgmma<bf16, 64, 0, 0>(
                    sums,
                    wgmma_pieces(inputs + tap / 3 * ROW_PIECES + tap % 3 + 2 * s * net::columns1,
                                 net::columns1, ROW_PIECES),
                    wgmma_pieces(weights + (4 * tap + 2 * s) * CONV2_CHANNELS, CONV2_CHANNELS, 8),
                    tap + s > 0);
    }

    template <bool TRAINING>
    static __device__ __forceinline__ void run(const struct graph_plan &plan, uint32_t row, uint8_t *shared,
                                               const float bias2[8])
    {
        uint32_t base = shared_address(shared);
        int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32;
        static_assert(tiles % WARPGROUPS == 0, "an equal number of tiles for each");
#pragma unroll 1
        for (int tile = group; tile < tiles; tile += WARPGROUPS) {
            float sums[32];
            wgmma_fence();
            multiply(base, tile, sums);
            wgmma_commit();
            if (TRAINING && tile == group)
                keep_conv1(plan, row, shared);
            wgmma_wait<0>();
            wgmma_ended(sums);
            int window =
                (tile / across * (TILE / 2) + warp) * net::window_columns + tile % across * (TILE / 2);
            pool<net>(reinterpret_cast<const float(&)[8][4]>(sums), bias2, window,
                      reinterpret_cast<uint16_t *>(shared + pooled), shared + argmax);
        }
    }
};

template <bool TRAINING>
static __global__ void __launch_bounds__(conv2_wgmma::threads, 2)
    forward_hopper_kernel(const __grid_constant__ struct graph_plan plan)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    forward<conv2_wgmma, TRAINING>(plan, shared);
}

enum status graph_forward_hopper(const struct graph_plan *plan, bool training, cudaStream_t stream)
{
    return training ? launch_forward<conv2_wgmma, true>(forward_hopper_kernel<true>, plan, stream)
                    : launch_forward<conv2_wgmma, false>(forward_hopper_kernel<false>, plan, stream);
}
