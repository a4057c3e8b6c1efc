/* The sum at the end of a branch and its normalisation, and the backward pass of both, in kernels for compute
 * capability 9.0 whose warpgroups hold the branch's outputs, or the gradients of the normalised values, as
 * sums of wgmma (see hopper.cuh). The values are staged in tiles of HEIGHT rows. Each warp processes its 16
 * rows, from row `row` of the tiles on, which are rows `first` + `row` and so on of the batch. Only the first
 * `count` rows of the tiles exist. After each tile, the functions that stage values call done(tile). */
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

/* ---- Backward ---- */

/* The moments and factors of a lane's rows, `row` + lane / 4 and the eighth row after it. Zeros for rows that
 * do not exist. */
struct norm_rows {
    struct vit_moments moments[2];
    float factor[2]; /* of stochastic depth */
};

template <class T>
static __device__ __forceinline__ struct norm_rows norm_rows_at(const struct vit_norm<T> &norm, uint32_t row,
                                                                uint32_t first, uint32_t count)
{
    struct norm_rows rows = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t own = row + threadIdx.x % 32 / 4 + 8 * half;
        if (own >= count)
            continue;
        rows.moments[half] = norm.moments[first + own];
        rows.factor[half] = norm.factors ? norm.factors[(first + own) / norm.rows.tokens] : 1;
    }
    return rows;
}

/* The sums over all rows of a warp: the gradients of the normalisation's weight, of its bias, and of the bias
 * of the branch's last layer. In each tile, a lane has columns 2 * lane and 2 * lane + 1. The kernel sets
 * them to zero, and keeps them in registers until its last row. */
#define NORM_SUMS 3
template <int TILES> struct norm_columns {
    float2 sums[NORM_SUMS][TILES];
};

/* Adds up the values of two lanes 2 COUNT apart. The upper lane keeps sums COUNT to 2 COUNT - 1, the other
 * one the sums before them. */
template <int COUNT> static __device__ __forceinline__ void keep_half(float (&part)[TILE_WIDTH / 4])
{
    const bool upper = threadIdx.x & 2 * COUNT;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float low = part[i], high = part[COUNT + i];
        part[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2 * COUNT);
    }
}

/* Adds the sums over a warp's rows to `sum`; part[2 n + i] has the sum over the lane's two rows, for column
 * 8 n + 2 (lane % 4) + i of a tile. */
static __device__ __forceinline__ void sum_rows16(float (&part)[TILE_WIDTH / 4], float2 *sum)
{
    keep_half<8>(part);
    keep_half<4>(part);
    keep_half<2>(part);
    *sum = {sum->x + part[0], sum->y + part[1]};
}

/* Backward pass of the normalisation and of the sum at the end of the branch before it: computes what
 * vit_add_norm_backward() computes, from the gradients of the normalisation's outputs in `sums`, which are
 * not rounded. `x` has the inputs of the normalisation, and `later` the gradients that arrive through the
 * next shortcut. Both tiles, and the sums, have zeros in rows that do not exist. `weight` is that of the
 * normalisation, in any memory, and `rows` comes from norm_rows_at().
 *
 * Replaces `x` by the gradients of the normalisation's inputs and, if `branch` is true, `later` by the
 * products of these with the factors. Adds to `columns`; see write_columns(). Overwrites `sums`. */
template <class T, int TILES, class Done>
static __device__ __forceinline__ void
normalise_back(tile_row (&x)[TILES][HEIGHT], tile_row (&later)[TILES][HEIGHT], bool branch,
               const float *weight, const struct norm_rows &rows, uint32_t row,
               float (&sums)[TILES * TILE_WIDTH / 2], struct norm_columns<TILES> *columns, Done done)
{
    constexpr float SHARE = 1.0f / (TILES * TILE_WIDTH);
    const uint32_t lane = threadIdx.x % 32;
    float shift[2];                           /* x' = (x - mean) * scale = x * scale + shift */
    float2 gradient[2] = {}, product[2] = {}; /* sums of g = weight * delta and of g x' over a row */
#pragma unroll
    for (int half = 0; half < 2; half++)
        shift[half] = -rows.moments[half].mean * rows.moments[half].scale;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        float weight_part[TILE_WIDTH / 4], bias_part[TILE_WIDTH / 4];
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++) {
            uint32_t word[4];
            get_fragment(x[tile], row, 16 * step, word);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int half = i % 2, at = 4 * step + i / 2 * 2;
                const float2 by =
                    *reinterpret_cast<const float2 *>(weight + tile * TILE_WIDTH + 4 * at + lane % 4 * 2);
                const float2 in = values_of<T>(word[i]);
                const float2 along = {fmaf(in.x, rows.moments[half].scale, shift[half]),
                                      fmaf(in.y, rows.moments[half].scale, shift[half])};
                float *delta = sums + tile * TILE_WIDTH / 2 + 8 * step + 2 * i;
                weight_part[at] = half ? fmaf(delta[0], along.x, weight_part[at]) : delta[0] * along.x;
                weight_part[at + 1] =
                    half ? fmaf(delta[1], along.y, weight_part[at + 1]) : delta[1] * along.y;
                bias_part[at] = half ? bias_part[at] + delta[0] : delta[0];
                bias_part[at + 1] = half ? bias_part[at + 1] + delta[1] : delta[1];
                delta[0] *= by.x;
                delta[1] *= by.y;
                gradient[half] = {gradient[half].x + delta[0], gradient[half].y + delta[1]};
                product[half] = {fmaf(delta[0], along.x, product[half].x),
                                 fmaf(delta[1], along.y, product[half].y)};
            }
        }
        sum_rows16(weight_part, &columns->sums[0][tile]);
        sum_rows16(bias_part, &columns->sums[1][tile]);
    }
    /* The gradient of x is scale * (g - mean of g - x' * mean of g x') = scale * g + slope * x + add. */
    float slope[2], add[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float scale = rows.moments[half].scale;
        const float mean = row_sum(gradient[half].x + gradient[half].y) * SHARE;
        const float along = row_sum(product[half].x + product[half].y) * SHARE;
        slope[half] = -scale * scale * along;
        add[half] = -scale * fmaf(along, shift[half], mean);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        float part[TILE_WIDTH / 4];
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++) {
            uint32_t word[4], more[4];
            get_fragment(x[tile], row, 16 * step, word);
            get_fragment(later[tile], row, 16 * step, more);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int half = i % 2, at = 4 * step + i / 2 * 2;
                const float scale = rows.moments[half].scale, factor = rows.factor[half];
                const float2 in = values_of<T>(word[i]), by = values_of<T>(more[i]);
                const float *delta = sums + tile * TILE_WIDTH / 2 + 8 * step + 2 * i;
                word[i] = pack<T>(fmaf(scale, delta[0], fmaf(slope[half], in.x, by.x + add[half])),
                                  fmaf(scale, delta[1], fmaf(slope[half], in.y, by.y + add[half])));
                const float2 rounded = values_of<T>(word[i]);
                if (branch)
                    more[i] = pack<T>(factor * rounded.x, factor * rounded.y);
                part[at] = half ? fmaf(factor, rounded.x, part[at]) : factor * rounded.x;
                part[at + 1] = half ? fmaf(factor, rounded.y, part[at + 1]) : factor * rounded.y;
            }
            put_fragment(x[tile], row, 16 * step, word);
            if (branch)
                put_fragment(later[tile], row, 16 * step, more);
        }
        sum_rows16(part, &columns->sums[2][tile]);
        done(tile);
    }
}

/* Writes a warpgroup's sums (NORM_SUMS, 64 TILES) to `partial`, in device memory: the partial sums for
 * weight, bias and branch_bias of struct vit_norm_deltas. `room` is shared memory of the warpgroup that it
 * does not use otherwise. */
template <int TILES>
static __device__ __forceinline__ void write_columns(const struct norm_columns<TILES> &columns,
                                                     float (&room)[4][NORM_SUMS * TILES * TILE_WIDTH],
                                                     float *partial)
{
#pragma unroll
    for (int i = 0; i < NORM_SUMS * TILES; i++)
        reinterpret_cast<float2 *>(room[threadIdx.x / 32 % 4] + i * TILE_WIDTH)[threadIdx.x % 32] =
            columns.sums[i / TILES][i % TILES];
    meet_group();
    for (uint32_t i = threadIdx.x % 128; i < NORM_SUMS * TILES * TILE_WIDTH; i += 128)
        partial[i] = room[0][i] + room[1][i] + room[2][i] + room[3][i];
}

#endif
