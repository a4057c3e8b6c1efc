/* The gradients of a convolution's weights on the tensor cores of compute capability 9.0, with wgmma: see
 * weights.cuh. The rows of both operands run along the summed dimension, so both are transposed. */
#include "train/resnet/weights.cuh"
#include "train/vit/hopper.cuh"

/* A warpgroup multiplies 64 outputs by all columns or, if the tile has only 64 outputs, by half of the
 * columns. */
template <class T, int ROWS, int COLUMNS> struct weights_wgmma {
    static constexpr int GROUPS =
        ROWS / HEIGHT * (COLUMNS / TILE_WIDTH);             /* products of 64 x 64 per stage and 16 pixels */
    static constexpr int OWN = GROUPS < 2 ? 1 : GROUPS / 2; /* those of a warpgroup */
    float sums[OWN][TILE_WIDTH / 2];

    static __device__ __forceinline__ void publish(void)
    {
        wgmma_publish();
    }

    /* Returns the tiles of outputs and of columns of the warpgroup's product `own`. With one product in all,
     * both warpgroups compute it. */
    static __device__ __forceinline__ int row_of(void)
    {
        return ROWS > HEIGHT ? threadIdx.x / 128 : 0;
    }
    static __device__ __forceinline__ int column_of(int own)
    {
        return ROWS > HEIGHT ? own : COLUMNS > TILE_WIDTH ? threadIdx.x / 128 : 0;
    }

    __device__ __forceinline__ void start(const uint4 *stage)
    {
        const uint4 *windows = stage + DEPTH * (ROWS / 8);
        const uint64_t a = wgmma_tile(stage + row_of() * DEPTH * 8);
        wgmma_fence();
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            const uint64_t b = wgmma_tile(windows + column_of(own) * DEPTH * 8);
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++)
                wgmma<T, TILE_WIDTH, 1, 1>(sums[own], a + k * WGMMA_NEXT_TRANSPOSED,
                                           b + k * WGMMA_NEXT_TRANSPOSED, true);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void end(void)
    {
        wgmma_wait<0>();
#pragma unroll
        for (int own = 0; own < OWN; own++)
            wgmma_ended(sums[own]);
    }

    __device__ __forceinline__ void store(const struct weights_plan<T> &plan, uint32_t first_row,
                                          uint32_t first_column, float *to)
    {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const uint32_t row = first_row + row_of() * HEIGHT + warp * 16 + lane / 4;
        if (GROUPS < 2 && threadIdx.x >= 128)
            return;
#pragma unroll
        for (int own = 0; own < OWN; own++)
#pragma unroll
            for (int n = 0; n < TILE_WIDTH / 8; n++) {
                const float *of = sums[own] + 4 * n;
                const uint32_t column = first_column + column_of(own) * TILE_WIDTH + 8 * n + lane % 4 * 2;
                store_pair<T>(plan, row, column, of[0], of[1], to);
                store_pair<T>(plan, row + 8, column, of[2], of[3], to);
            }
    }
};

template <class T>
enum status weights_hopper_launch(struct weights_plan<T> *plan, uint32_t parts, cudaStream_t stream)
{
    return weights_launch_any<T, weights_wgmma>(plan, parts, stream);
}

EACH_HALF(weights_hopper_launch)
