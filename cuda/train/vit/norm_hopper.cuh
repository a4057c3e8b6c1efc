/* The sum at the end of a branch and its normalisation, in kernels for compute capability 9.0 whose
 * warpgroups hold the branch's outputs as sums of wgmma (see hopper.cuh). The values are staged in tiles of
 * HEIGHT rows. Each warp processes its 16 rows, from row `row` of the tiles on, which are rows `first` +
 * `row` and so on of the batch. Only the first `count` rows of the tiles exist. After each tile, all
 * functions call done(tile). */
#ifndef FDSL_CUDA_TRAIN_VIT_NORM_HOPPER_CUH
#define FDSL_CUDA_TRAIN_VIT_NORM_HOPPER_CUH

#include "train/vit/hopper.cuh"
#include "train/vit/kernels.cuh"

/* Returns the sum over a row's values at `half` of a fragment, from the parts of each lane's columns: of
 * column 8 n + 2 (lane % 4) and the next one, in part n % 8. The order is that of the sums in norm.cu, so
 * that the bits are the same. */
static __device__ __forceinline__ float row_total(float (&part)[8])
{
    for (int apart = 4; apart > 0; apart /= 2)
        for (int n = 0; n < apart; n++)
            part[n] += part[n + apart];
    float sum = part[0] + __shfl_xor_sync(~0u, part[0], 2);
    return sum + __shfl_xor_sync(~0u, sum, 1);
}

/* Adds `bias`, unless it is NULL, to the sums, and the shortcut in `rows` to their product with the factor.
 * Replaces `sums` and `rows` by the rounded results. */
template <class T, int TILES, class Done>
static __device__ __forceinline__ void
add_shortcut(tile_row (&rows)[TILES][HEIGHT], const struct vit_norm<T> &norm, const T *bias, uint32_t row,
             uint32_t first, uint32_t count, float (&sums)[TILES * TILE_WIDTH / 2], Done done)
{
    const uint32_t lane = threadIdx.x % 32;
    float factor[2] = {1, 1};
    for (int half = 0; half < 2 && norm.factors; half++)
        if (row + lane / 4 + 8 * half < count)
            factor[half] = norm.factors[(first + row + lane / 4 + 8 * half) / norm.rows.tokens];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++) {
            uint32_t word[4];
            get_fragment(rows[tile], row, 16 * step, word);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t column = tile * TILE_WIDTH + 16 * step + i / 2 * 8 + lane % 4 * 2;
                const float2 in = values_of<T>(word[i]);
                float *sum = sums + tile * TILE_WIDTH / 2 + 8 * step + 2 * i;
                float2 by = {0, 0};
                if (bias)
                    by = values_of<T>(*reinterpret_cast<const uint32_t *>(bias + column));
                word[i] = pack<T>(fmaf(factor[i % 2], sum[0] + by.x, in.x),
                                  fmaf(factor[i % 2], sum[1] + by.y, in.y));
                const float2 rounded = values_of<T>(word[i]);
                sum[0] = rounded.x;
                sum[1] = rounded.y;
            }
            put_fragment(rows[tile], row, 16 * step, word);
        }
        done(tile);
    }
}

/* Normalises the sums, stages the results in `rows`, and writes the moments. `weight` and `bias` are those of
 * the normalisation, in any memory. */
template <class T, int TILES, class Done>
static __device__ __forceinline__ void
normalise(tile_row (&rows)[TILES][HEIGHT], const struct vit_norm<T> &norm, const float *weight,
          const float *bias, uint32_t row, uint32_t first, uint32_t count,
          float (&sums)[TILES * TILE_WIDTH / 2], Done done)
{
    const uint32_t lane = threadIdx.x % 32;
    const float width = (float)norm.rows.width;
    struct vit_moments moments[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float part[8] = {};
#pragma unroll
        for (int n = 0; n < 8; n++)
            for (int tile = 0; tile < TILES; tile++) {
                const float *value = sums + tile * TILE_WIDTH / 2 + 4 * n + 2 * half;
                part[n] += value[0] + value[1];
            }
        moments[half].mean = row_total(part) / width;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            part[n] = 0;
            for (int tile = 0; tile < TILES; tile++) {
                float *value = sums + tile * TILE_WIDTH / 2 + 4 * n + 2 * half;
                value[0] -= moments[half].mean;
                value[1] -= moments[half].mean;
                part[n] = fmaf(value[0], value[0], fmaf(value[1], value[1], part[n]));
            }
        }
        moments[half].scale = 1 / sqrtf(row_total(part) / width + (float)LAYER_NORM_EPSILON);
        const uint32_t own = row + lane / 4 + 8 * half;
        if (lane % 4 == 0 && own < count)
            norm.moments[first + own] = moments[half];
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t column = tile * TILE_WIDTH + 16 * step + i / 2 * 8 + lane % 4 * 2;
                const float2 by = *reinterpret_cast<const float2 *>(weight + column),
                             add = *reinterpret_cast<const float2 *>(bias + column);
                const float *value = sums + tile * TILE_WIDTH / 2 + 8 * step + 2 * i,
                            scale = moments[i % 2].scale;
                word[i] = pack<T>(fmaf(value[0] * scale, by.x, add.x), fmaf(value[1] * scale, by.y, add.y));
            }
            put_fragment(rows[tile], row, 16 * step, word);
        }
        done(tile);
    }
}

#endif
