#include "common/fit.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "data/image.h"

#define TILE_WIDTH    32
#define TILE_HEIGHT   8
#define BLOCK_THREADS (TILE_WIDTH * TILE_HEIGHT)
/* Length of an array for the 16-bit weights of one output. The array fills an odd number of 32-bit words. So
 * threads of a warp that read weights of different outputs access different banks of shared memory. */
#define TAPS_MAX (2 * PICTURE_SCALE_MAX + 2)
static_assert(TAPS_MAX / 2 % 2 == 1, "the row length of the weights must be an odd number of words");

/* The input pixels of one output pixel along an axis: `count` pixels from pixel `first` on. */
struct taps {
    uint32_t first, count;
};

/* The weights of a tile's outputs. */
struct tile {
    struct resample_axis across, down;
    struct taps columns[TILE_WIDTH], rows[TILE_HEIGHT];
    int16_t column_weights[TILE_WIDTH][TAPS_MAX], row_weights[TILE_HEIGHT][TAPS_MAX];
};

/* Computes the weights for outputs from column `x` and row `y` on. Thread t computes the weights of one
 * column or of one row. All threads of the block must call this. */
static __device__ void make_weights(const struct fit_entry &entry, uint32_t res, uint32_t x, uint32_t y,
                                    struct tile *tile)
{
    uint32_t t = threadIdx.x;
    if (t == 0)
        tile->across = resample_axis(entry.width, res);
    if (t == 32)
        tile->down = resample_axis(entry.height, res);
    __syncthreads();
    if (t < TILE_WIDTH && x + t < res)
        tile->columns[t].count =
            resample_weights(&tile->across, x + t, &tile->columns[t].first, tile->column_weights[t]);
    t -= TILE_WIDTH;
    if (t < TILE_HEIGHT && y + t < res)
        tile->rows[t].count =
            resample_weights(&tile->down, y + t, &tile->rows[t].first, tile->row_weights[t]);
    __syncthreads();
}

struct colour {
    int32_t of[3]; /* red, green, blue */
};

/* Resizes one row at one column. */
static __device__ __forceinline__ struct colour resize_row(const struct tile &tile, uint32_t column,
                                                           const uint8_t *row)
{
    const struct taps taps = tile.columns[column];
    const uint8_t *from = row + 3 * taps.first;
    int32_t half = 1 << (tile.across.bits - 1);
    struct colour sum = {half, half, half};
    for (uint32_t i = 0; i < taps.count; i++, from += 3)
        for (int c = 0; c < 3; c++)
            sum.of[c] += tile.column_weights[column][i] * from[c];
    for (int c = 0; c < 3; c++)
        sum.of[c] >>= tile.across.bits;
    return sum;
}

/* Computes one pixel of the output: rows are resized and rounded first, then the column. */
static __device__ struct colour resize(const struct fit_entry &entry, const struct tile &tile,
                                       uint32_t column, uint32_t row)
{
    const struct taps taps = tile.rows[row];
    const uint8_t *from = entry.pixels + static_cast<uint64_t>(taps.first) * entry.stride;
    int32_t half = 1 << (tile.down.bits - 1);
    struct colour sum = {half, half, half};
    for (uint32_t i = 0; i < taps.count; i++, from += entry.stride) {
        struct colour resized = resize_row(tile, column, from);
        for (int c = 0; c < 3; c++)
            sum.of[c] += tile.row_weights[row][i] * resized.of[c];
    }
    for (int c = 0; c < 3; c++)
        sum.of[c] >>= tile.down.bits;
    return sum;
}

template <enum dtype T>
static __device__ __forceinline__ void put(const struct fit &fit, uint64_t slot, uint64_t i, uint32_t channel,
                                           int32_t byte)
{
    uint8_t *values = fit.slots + slot * fit.stride;
    float value = fmaf(static_cast<float>(byte), fit.scale[channel], fit.bias[channel]);
    if constexpr (T == DTYPE_STORED)
        values[i] = static_cast<uint8_t>(byte);
    else if constexpr (T == DTYPE_F32)
        reinterpret_cast<float *>(values)[i] = value;
    else if constexpr (T == DTYPE_F16)
        reinterpret_cast<__half *>(values)[i] = __float2half_rn(value);
    else
        reinterpret_cast<__nv_bfloat16 *>(values)[i] = __float2bfloat16_rn(value);
}

/* Writes the pixel at column `a` and row `b` of the resized part. */
template <enum dtype T>
static __device__ void put_pixel(const struct fit &fit, const struct fit_entry &entry, uint32_t a, uint32_t b,
                                 struct colour pixel)
{
    uint32_t res = fit.res;
    if (entry.turn.flip_x)
        a = res - 1 - a;
    if (entry.turn.flip_y)
        b = res - 1 - b;
    uint32_t x = entry.turn.transpose ? b : a, y = entry.turn.transpose ? a : b;
    if (entry.flip)
        x = res - 1 - x;
    uint64_t at = static_cast<uint64_t>(y) * res + x, plane = static_cast<uint64_t>(res) * res;
    if (fit.channels == 1) { /* the conversion to gray is the same as in image_fit() */
        int32_t gray = (19595 * pixel.of[0] + 38470 * pixel.of[1] + 7471 * pixel.of[2] + 32768) >> 16;
        put<T>(fit, entry.slot, at, 0, gray);
        return;
    }
    for (uint32_t c = 0; c < 3; c++)
        put<T>(fit, entry.slot, fit.interleaved ? 3 * at + c : c * plane + at, c, pixel.of[c]);
}

/* One block per tile of an image, one thread per pixel. Each thread resizes all rows that its pixel needs.
 * Adjacent threads therefore repeat work, but this takes far less time than decoding and needs no buffer. */
template <enum dtype T>
static __global__ __launch_bounds__(BLOCK_THREADS) void fit_kernel(const __grid_constant__ struct fit fit)
{
    __shared__ struct tile tile;
    uint32_t across = (fit.res + TILE_WIDTH - 1) / TILE_WIDTH,
             down = (fit.res + TILE_HEIGHT - 1) / TILE_HEIGHT;
    uint32_t image = blockIdx.x / (across * down), within = blockIdx.x - image * across * down;
    uint32_t x = within % across * TILE_WIDTH, y = within / across * TILE_HEIGHT;
    uint32_t column = threadIdx.x % TILE_WIDTH, row = threadIdx.x / TILE_WIDTH;
    const struct fit_entry entry = fit.entries[image];
    make_weights(entry, fit.res, x, y, &tile);
    if (x + column < fit.res && y + row < fit.res)
        put_pixel<T>(fit, entry, x + column, y + row, resize(entry, tile, column, row));
}

enum status fit_launch(const struct fit *fit, cudaStream_t stream)
{
    uint64_t tiles =
        (uint64_t)((fit->res + TILE_WIDTH - 1) / TILE_WIDTH) * ((fit->res + TILE_HEIGHT - 1) / TILE_HEIGHT);
    if (fit->count == 0)
        return STATUS_OK;
    if (tiles * fit->count > INT32_MAX)
        return status_set(STATUS_USAGE,
                          "%u images of %u x %u pixels are too many for one kernel launch; lower --chunk",
                          fit->count, fit->res, fit->res);
    RANGE(UNPACK);
    void (*kernel)(const struct fit) = fit->tensor == DTYPE_STORED ? fit_kernel<DTYPE_STORED>
                                       : fit->tensor == DTYPE_F32  ? fit_kernel<DTYPE_F32>
                                       : fit->tensor == DTYPE_F16  ? fit_kernel<DTYPE_F16>
                                                                   : fit_kernel<DTYPE_BF16>;
    kernel<<<static_cast<uint32_t>(tiles * fit->count), BLOCK_THREADS, 0, stream>>>(*fit);
    CUDA_TRY_LAUNCH("fit_kernel");
    return STATUS_OK;
}
