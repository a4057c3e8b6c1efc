/* Forward pass of attention, on tensor cores. It keeps the largest score of each row so far, and rescales the
 * row's sums when it finds a larger score (Milakov and Gimelshein, "Online normalizer calculation for
 * softmax", 2018). For the backward pass, it saves the logarithm of each row's sum of exponentials. */
#include "train/vit/attention_parts.cuh"

/* Keys and values in shared memory, and the queries of a warp. */
template <int DEPTH> struct tiles {
    const struct line<DEPTH> *keys, *values;
    uint32_t count; /* number of keys */
    uint32_t queries[DEPTH / 16][4];
};

/* Computes the scores of the TILE keys from key `at` on, without the factor f (see attention_parts.cuh). */
template <int DEPTH>
static __device__ __forceinline__ void tile_scores(const struct tiles<DEPTH> *tiles, uint32_t at,
                                                   float scores[TILE / 8][4])
{
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
        for (int i = 0; i < 4; i++)
            scores[n][i] = 0;
#pragma unroll
    for (int group = 0; group < TILE; group += GROUP)
        add_scores<DEPTH>(scores + group / 8, tiles->queries, tiles->keys, at + group);
}

/* Adds the values of the tile that begins at key `at`, weighted by the softmax of its scores `now`. First
 * issues the matrix products for the scores `next` of the next tile, so that tensor cores compute them while
 * other units compute exponentials. */
template <int DEPTH>
static __device__ __forceinline__ void take_tile(const struct tiles<DEPTH> *tiles, uint32_t at,
                                                 struct softmax *softmax, float now[TILE / 8][4],
                                                 float next[TILE / 8][4], float sums[DEPTH / 8][4])
{
    const float factor = LOG2E / sqrtf((float)DEPTH);
    if (at >= tiles->count)
        return;
    if (at + TILE < tiles->count)
        tile_scores<DEPTH>(tiles, at + TILE, next);
    take_scores<DEPTH, TILE>(softmax, &now[0][0], factor, tiles->count - at, &sums[0][0]);
#pragma unroll
    for (int group = 0; group < TILE; group += GROUP) {
        uint32_t left[4];
        pack_weights(now + group / 8, left);
        add_weighted<DEPTH>(sums, left, tiles->values, at + group);
    }
}

/* Block (x, head, sample) computes the outputs of the rows starting at x * (rows per block). */
template <int DEPTH>
static __global__ void __launch_bounds__(32 * WARPS_MAX, 2)
    attention_kernel(const bf16 *rows, uint32_t tokens, uint32_t width, bf16 *outputs, float *logs)
{
    extern __shared__ __align__(16) unsigned char shared[];
    struct line<DEPTH> *keys = reinterpret_cast<struct line<DEPTH> *>(shared);
    struct line<DEPTH> *values = keys + span_of(tokens, TILE);
    const struct head head = head_of(rows, tokens, width, blockIdx.z, DEPTH, blockIdx.y);
    const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * GROUP;
    struct tiles<DEPTH> tiles = {
        keys, values
    };
    float sums[DEPTH / 8][4] = {}, scores[2][TILE / 8][4];
    struct softmax softmax = {{-INFINITY, -INFINITY}, {}};
    load_rows<DEPTH>(tiles.queries, head.q, head.apart, first, tokens);
    for (uint32_t begin = 0; begin < tokens; begin += SPAN) {
        if (begin > 0)
            __syncthreads();
        copy_rows<DEPTH, TILE>(keys, head.k, head.apart, begin, tokens);
        copy_rows<DEPTH, TILE>(values, head.v, head.apart, begin, tokens);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        tiles.count = first >= tokens ? 0 : tokens - begin < SPAN ? tokens - begin : SPAN;
        if (tiles.count > 0)
            tile_scores<DEPTH>(&tiles, 0, scores[0]);
        for (uint32_t at = 0; at < tiles.count; at += 2 * TILE) {
            take_tile<DEPTH>(&tiles, at, &softmax, scores[0], scores[1], sums);
            take_tile<DEPTH>(&tiles, at + TILE, &softmax, scores[1], scores[0], sums);
        }
    }
    if (first >= tokens)
        return;
    float scale[2];
    size_t line = ((size_t)blockIdx.z * gridDim.y + blockIdx.y) * tokens;
    for (int half = 0; half < 2; half++) {
        float sum = row_sum(softmax.sum[half]);
        uint32_t row = first + threadIdx.x % 32 / 4 + 8 * half;
        scale[half] = 1 / sum;
        if (threadIdx.x % 4 == 0 && row < tokens)
            logs[line + row] = softmax.most[half] + log2f(sum);
    }
    store_rows<DEPTH>(outputs + (size_t)blockIdx.z * tokens * width + blockIdx.y * DEPTH, width, first,
                      tokens, sums, scale);
}

template <int DEPTH>
static enum status forward(const struct vit_rows *rows, const struct launch *launch, const bf16 *inputs,
                           bf16 *outputs, float *logs, cudaStream_t stream)
{
    TRY(allow(attention_kernel<DEPTH>, launch));
    attention_kernel<DEPTH><<<launch->grid, launch->threads, launch->bytes, stream>>>(
        inputs, rows->tokens, rows->width, outputs, logs);
    CUDA_TRY_LAUNCH("attention_kernel");
    return STATUS_OK;
}

enum status vit_attention(const struct vit_rows *rows, uint32_t heads, const bf16 *inputs, bf16 *outputs,
                          float *logs, cudaStream_t stream)
{
#if HAVE_HOPPER
    bool hopper;
    TRY(hopper_fits(rows, heads, &hopper));
    if (hopper)
        return hopper_forward(rows, heads, inputs, outputs, logs, stream);
#endif
    const struct launch launch = launch_of(rows, heads, 1);
    switch (rows->width / heads) {
    case 16:
        return forward<16>(rows, &launch, inputs, outputs, logs, stream);
    case 32:
        return forward<32>(rows, &launch, inputs, outputs, logs, stream);
    case 64:
        return forward<64>(rows, &launch, inputs, outputs, logs, stream);
    default:
        return refuse_depth(rows->width / heads);
    }
}
