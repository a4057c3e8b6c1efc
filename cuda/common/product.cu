#include "common/product.cuh"

#include <stdint.h>

#include "common/check.cuh"

/* Multiplies float32 matrices A and B of SIDE x SIDE values. k is the index that the sums run over. A block
 * computes one tile of C from a part of the range of k, so C contains only partial sums, which are never
 * used. The parts are short, so that a block takes only some tens of microseconds. The duration of a step is
 * set in units. A wave is as many blocks as the device runs concurrently. In one unit, each block of a wave
 * advances by DEPTH along k.
 *
 * A step is many kernels of a few waves each, as a step of a network is. With a single kernel, kernels of the
 * same priority would start only after the last block of the step has started. nvJPEG's own kernels have this
 * priority, so the JPEG engines would wait for the end of every step. */
#define SIDE         PRODUCT_SIDE
#define TILE         PRODUCT_TILE
#define DEPTH        PRODUCT_DEPTH
#define BLOCK        256 /* threads: 16 x 16; each computes 4 x 4 values of the tile */
#define WAVE_UNITS   24  /* maximum number of units per block */
#define TILES        (SIDE / TILE * (SIDE / TILE))

#define KERNEL_WAVES 4   /* intended number of waves per kernel: 0.1 to 0.2 ms */
#define KERNELS_MAX  128 /* per step, because a device queues only about a thousand launches */

static __global__ void __launch_bounds__(BLOCK) fill_kernel(float *values, size_t count)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < count) /* values in [-1, 1) with varied bits, like weights; zeros would draw less power */
        values[i] = (float)(int32_t)((uint32_t)i * 2654435761u) * 0x1p-31f;
}

static enum status fill_noise(float *values, size_t count, cudaStream_t stream)
{
    fill_kernel<<<(unsigned)((count + BLOCK - 1) / BLOCK), BLOCK, 0, stream>>>(values, count);
    return CUDA_LAUNCHED("fill_kernel");
}

/* Runs the blocks of a step from number `first` on. Each block computes `units` units; the first `deep`
 * blocks of the step compute one more. */
static __global__ void __launch_bounds__(BLOCK)
    product_kernel(const float *a, const float *b, float *c, unsigned first, unsigned units, unsigned deep)
{
    const unsigned block = first + blockIdx.x;
    __shared__ float rows[DEPTH][TILE + 4], columns[DEPTH][TILE];
    unsigned tile = block % TILES, x = threadIdx.x % 16, y = threadIdx.x / 16;
    unsigned row = tile / (SIDE / TILE) * TILE, column = tile % (SIDE / TILE) * TILE;
    unsigned begin = block / TILES * WAVE_UNITS; /* each pass over the tiles begins at another k */
    float sums[4][4] = {};
    if (block < deep)
        units++;
    for (unsigned unit = 0; unit < units; unit++) {
        unsigned depth = (begin + unit) * DEPTH % SIDE;
        for (unsigned i = threadIdx.x; i < TILE * DEPTH; i += BLOCK) {
            rows[i % DEPTH][i / DEPTH] = a[(size_t)(row + i / DEPTH) * SIDE + depth + i % DEPTH];
            columns[i / TILE][i % TILE] = b[(size_t)(depth + i / TILE) * SIDE + column + i % TILE];
        }
        __syncthreads();
        for (unsigned d = 0; d < DEPTH; d++)
            for (unsigned i = 0; i < 4; i++)
                for (unsigned j = 0; j < 4; j++)
                    sums[i][j] = fmaf(rows[d][4 * y + i], columns[d][4 * x + j], sums[i][j]);
        __syncthreads();
    }
    for (unsigned i = 0; i < 4; i++)
        for (unsigned j = 0; j < 4; j++)
            c[(size_t)(row + 4 * y + i) * SIDE + column + 4 * x + j] = sums[i][j];
}

static unsigned waves_of(const struct product *product)
{
    return (product->units + WAVE_UNITS - 1) / WAVE_UNITS;
}

unsigned product_kernels(const struct product *product)
{
    const unsigned kernels = (waves_of(product) + KERNEL_WAVES - 1) / KERNEL_WAVES;
    return kernels < KERNELS_MAX ? kernels : KERNELS_MAX;
}

enum status product_launch(const struct product *product, cudaStream_t stream)
{
    const size_t values = (size_t)SIDE * SIDE;
    const unsigned waves = waves_of(product), kernels = product_kernels(product);
    for (unsigned k = 0; k < kernels; k++) {
        const unsigned first = waves * k / kernels, end = waves * (k + 1) / kernels;
        product_kernel<<<product->wave *(end - first), BLOCK, 0, stream>>>(
            product->matrices, product->matrices + values, product->matrices + 2 * values,
            product->wave * first, product->units / waves, product->units % waves * product->wave);
        CUDA_TRY_LAUNCH("product_kernel");
    }
    return STATUS_OK;
}

enum status product_open(int device, cudaStream_t stream, struct product *product)
{
    const size_t values = (size_t)3 * SIDE * SIDE;
    int multiprocessors, blocks;
    CUDA_TRY(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, product_kernel, BLOCK, 0));
    product->wave = (unsigned)(multiprocessors * blocks);
    enum status allocated = CUDA_STATUS(cudaMalloc(&product->matrices, values * sizeof(float)));
    if (allocated == STATUS_EXHAUSTED)
        return status_set(STATUS_EXHAUSTED,
                          "GPU %d does not have %.0f MB of free memory for the matrices of the step; free "
                          "memory, or choose another GPU with %s",
                          device, 1e-6 * (double)(values * sizeof(float)),
                          OPTION_OR_FIELD("--device", "device"));
    TRY(allocated);
    product->units = WAVE_UNITS;
    return fill_noise(product->matrices, values, stream);
}

void product_close(struct product *product)
{
    (void)cudaFree(product->matrices);
    product->matrices = nullptr;
}
