#include "common/fit.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "data/image.h"

#define TILE_WIDTH    32
#define TILE_HEIGHT   32
#define BLOCK_THREADS 256
#define BAND_ROWS     32                           /* input rows that are resized at a time */
#define TILE_STEP     (BLOCK_THREADS / TILE_WIDTH) /* rows between two outputs of a thread */
#define THREAD_ROWS   (TILE_HEIGHT / TILE_STEP)    /* outputs of a thread */
/* Length of an array for the 16-bit weights of one output. The array fills an odd number of 32-bit words. So
 * threads of a warp that read weights of different outputs access different banks of shared memory. */
#define TAPS_MAX (2 * PICTURE_SCALE_MAX + 2)
static_assert(TAPS_MAX / 2 % 2 == 1, "the row length of the weights must be an odd number of words");

/* The input pixels of one output pixel along an axis: `count` pixels from pixel `first` on. */
struct taps {
    uint32_t first, count;
};

struct colour {
    int32_t of[3]; /* red, green, blue */
};

/* The weights of a tile's outputs, and the input rows of a band, resized to the width of the tile. */
struct tile {
    struct resample_axis across, down;
    struct taps columns[TILE_WIDTH], rows[TILE_HEIGHT];
    int16_t column_weights[TILE_WIDTH][TAPS_MAX], row_weights[TILE_HEIGHT][TAPS_MAX];
    uchar4 band[BAND_ROWS][TILE_WIDTH];
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

/* Resizes one row at one column. Weights are not negative, so the result is a byte per colour. */
static __device__ __forceinline__ uchar4 resize_row(const struct tile &tile, uint32_t column,
                                                    const uint8_t *row)
{
    const struct taps taps = tile.columns[column];
    const uint8_t *from = row + 3 * taps.first;
    int32_t half = 1 << (tile.across.bits - 1);
    struct colour sum = {half, half, half};
    for (uint32_t i = 0; i < taps.count; i++, from += 3)
        for (int c = 0; c < 3; c++)
            sum.of[c] += tile.column_weights[column][i] * from[c];
    return make_uchar4(static_cast<uint8_t>(sum.of[0] >> tile.across.bits),
                       static_cast<uint8_t>(sum.of[1] >> tile.across.bits),
                       static_cast<uint8_t>(sum.of[2] >> tile.across.bits), 0);
}

/* Resizes the input rows from `first` up to `end` at the columns of the tile. All threads of the block must
 * call this. */
static __device__ void resize_band(const struct fit_entry &entry, uint32_t columns, uint32_t first,
                                   uint32_t end, struct tile *tile)
{
    uint32_t column = threadIdx.x % TILE_WIDTH;
    __syncthreads(); /* the previous band is no longer needed */
    for (uint32_t row = threadIdx.x / TILE_WIDTH; first + row < end && column < columns; row += TILE_STEP)
        tile->band[row][column] =
            resize_row(*tile, column, entry.pixels + static_cast<uint64_t>(first + row) * entry.stride);
    __syncthreads();
}

/* Adds the input rows of a band, from `first` up to `end`, to one output. */
static __device__ __forceinline__ void add_band(const struct tile &tile, uint32_t column, uint32_t row,
                                                uint32_t first, uint32_t end, struct colour *sum)
{
    const struct taps taps = tile.rows[row];
    uint32_t last = min(taps.first + taps.count, end);
    for (uint32_t y = max(taps.first, first); y < last; y++) {
        int32_t weight = tile.row_weights[row][y - taps.first];
        uchar4 pixel = tile.band[y - first][column];
        sum->of[0] += weight * pixel.x;
        sum->of[1] += weight * pixel.y;
        sum->of[2] += weight * pixel.z;
    }
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

/* One block per tile of an image. Each thread computes THREAD_ROWS pixels of one column. Rows are resized and
 * rounded first, once per tile, then columns. */
template <enum dtype T>
static __global__ __launch_bounds__(BLOCK_THREADS) void fit_kernel(const __grid_constant__ struct fit fit)
{
    __shared__ struct tile tile;
    uint32_t across = (fit.res + TILE_WIDTH - 1) / TILE_WIDTH,
             down = (fit.res + TILE_HEIGHT - 1) / TILE_HEIGHT;
    uint32_t image = blockIdx.x / (across * down), within = blockIdx.x - image * across * down;
    uint32_t x = within % across * TILE_WIDTH, y = within / across * TILE_HEIGHT;
    uint32_t columns = min(TILE_WIDTH, fit.res - x), rows = min(TILE_HEIGHT, fit.res - y);
    uint32_t column = threadIdx.x % TILE_WIDTH, row = threadIdx.x / TILE_WIDTH;
    const struct fit_entry entry = fit.entries[image];
    make_weights(entry, fit.res, x, y, &tile);
    struct colour sums[THREAD_ROWS];
    for (struct colour &sum : sums)
        sum.of[0] = sum.of[1] = sum.of[2] = 1 << (tile.down.bits - 1);
    uint32_t end = tile.rows[rows - 1].first + tile.rows[rows - 1].count;
    for (uint32_t first = tile.rows[0].first; first < end; first += BAND_ROWS) {
        uint32_t band_end = min(first + BAND_ROWS, end);
        resize_band(entry, columns, first, band_end, &tile);
        if (column < columns)
            for (uint32_t i = 0; i < THREAD_ROWS; i++)
                if (row + i * TILE_STEP < rows)
                    add_band(tile, column, row + i * TILE_STEP, first, band_end, &sums[i]);
    }
    for (uint32_t i = 0; i < THREAD_ROWS; i++) {
        for (int32_t &value : sums[i].of)
            value >>= tile.down.bits;
        if (column < columns && row + i * TILE_STEP < rows)
            put_pixel<T>(fit, entry, x + column, y + row + i * TILE_STEP, sums[i]);
    }
}

enum status fit_launch(const struct fit *fit, cudaStream_t stream)
{
    uint64_t tiles =
        (uint64_t)((fit->res + TILE_WIDTH - 1) / TILE_WIDTH) * ((fit->res + TILE_HEIGHT - 1) / TILE_HEIGHT);
    if (fit->count == 0)
        return STATUS_OK;
    if (tiles * fit->count > INT32_MAX)
        return status_set(STATUS_USAGE,
                          "%u images of %u x %u pixels are too many for one kernel launch; lower %s",
                          fit->count, fit->res, fit->res, OPTION_OR_FIELD("--chunk", "out_res"));
    RANGE(UNPACK);
    void (*kernel)(const struct fit) = fit->tensor == DTYPE_STORED ? fit_kernel<DTYPE_STORED>
                                       : fit->tensor == DTYPE_F32  ? fit_kernel<DTYPE_F32>
                                       : fit->tensor == DTYPE_F16  ? fit_kernel<DTYPE_F16>
                                                                   : fit_kernel<DTYPE_BF16>;
    kernel<<<static_cast<uint32_t>(tiles * fit->count), BLOCK_THREADS, 0, stream>>>(*fit);
    CUDA_TRY_LAUNCH("fit_kernel");
    return STATUS_OK;
}

/* ---- Samples in their final form ---- */

#define BLOCK_WORDS (4 * BLOCK_THREADS) /* words that a block copies */

/* Each block copies BLOCK_WORDS words of one sample, or the rest of it. */
template <class T>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    move_kernel(const struct fit_move *moves, uint64_t words, uint32_t blocks, const T *from, T *to)
{
    const uint32_t sample = blockIdx.x / blocks;
    const struct fit_move move = moves[sample];
    const uint64_t first = static_cast<uint64_t>(blockIdx.x - sample * blocks) * BLOCK_WORDS + threadIdx.x;
    from += move.from * words;
    to += move.to * words;
#pragma unroll
    for (uint32_t i = 0; i < BLOCK_WORDS; i += BLOCK_THREADS)
        if (first + i < words)
            to[first + i] = from[first + i];
}

template <class T>
static enum status launch_move(const struct fit_move *moves, uint32_t count, size_t bytes, const void *from,
                               void *to, cudaStream_t stream)
{
    const uint64_t words = bytes / sizeof(T), blocks = (words + BLOCK_WORDS - 1) / BLOCK_WORDS;
    if (blocks * count > INT32_MAX)
        return status_set(STATUS_USAGE, "%u samples of %zu bytes are too many for one kernel launch; %s",
                          count, bytes, OPTION_OR_FIELD("lower --batch", "lower batch_size"));
    move_kernel<T><<<static_cast<uint32_t>(blocks * count), BLOCK_THREADS, 0, stream>>>(
        moves, words, static_cast<uint32_t>(blocks), static_cast<const T *>(from), static_cast<T *>(to));
    return CUDA_LAUNCHED("move_kernel");
}

enum status fit_move_launch(const struct fit_move *moves, uint32_t count, size_t bytes, const void *from,
                            void *to, cudaStream_t stream)
{
    if (count == 0)
        return STATUS_OK;
    return bytes % sizeof(uint4) == 0      ? launch_move<uint4>(moves, count, bytes, from, to, stream)
           : bytes % sizeof(uint32_t) == 0 ? launch_move<uint32_t>(moves, count, bytes, from, to, stream)
                                           : launch_move<uint8_t>(moves, count, bytes, from, to, stream);
}
