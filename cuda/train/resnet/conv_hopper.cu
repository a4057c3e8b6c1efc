/* Convolutions on the tensor cores of compute capability 9.0, with wgmma: see conv.cuh. */
#include "train/resnet/conv.cuh"
#include "train/vit/hopper.cuh"

static_assert(DEPTH == TILE_WIDTH, "a line of a stage must be a row of a tile");

/* A warpgroup multiplies 64 rows of the source by all columns. */
template <class T, int COLUMNS> struct conv_wgmma {
    float sums[COLUMNS / 2];

    static __device__ __forceinline__ void publish(void)
    {
        wgmma_publish();
    }

    __device__ __forceinline__ void start(const uint4 *stage)
    {
        const uint64_t a = wgmma_tile(stage + threadIdx.x / 128 * HEIGHT * UNITS);
        const uint64_t b = wgmma_tile(stage + ROWS * UNITS);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
            wgmma<T, COLUMNS, 0, 0>(sums, a + k * WGMMA_NEXT, b + k * WGMMA_NEXT, true);
        wgmma_commit();
    }

    __device__ __forceinline__ void end(void)
    {
        wgmma_wait<0>();
        wgmma_ended(sums);
    }

    __device__ __forceinline__ void store(uint32_t *words, int pitch)
    {
        const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            const float *of = sums + 4 * n;
            words[(row * pitch + 8 * n + lane % 4 * 2) / 2] = pack<T>(of[0], of[1]);
            words[((row + 8) * pitch + 8 * n + lane % 4 * 2) / 2] = pack<T>(of[2], of[3]);
        }
    }
};

template <class T>
enum status conv_hopper_launch(enum ending ending, struct conv_plan<T> *plan, cudaStream_t stream)
{
    return conv_launch_any<T, conv_wgmma>(ending, plan, stream);
}

EACH_HALF(conv_hopper_launch)
