/* Attention, forward and backward, on tensor cores. No matrix of scores is in memory: a warp has 16 rows of
 * scores in registers and reads the other rows from shared memory. For queries q, keys k, values v and f = 1
 * / sqrt(d):
 *
 *     scores       s[i][j] = f q[i] . k[j]
 *     weights      p[i][j] = exp(s[i][j]) / sum over j of exp(s[i][j])
 *     outputs      o[i]    = sum over j of p[i][j] v[j]
 *
 * The forward pass keeps the largest score of each row so far, and rescales the sums when that changes
 * (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). It saves the logarithm of the
 * sum of exponentials. From it the backward pass computes the weights again (Dao, "FlashAttention-2", 2023).
 * With gradients g[i] of o[i]:
 *
 *     e[i]        = g[i] . o[i]
 *     ds[i][j]    = p[i][j] (g[i] . v[j] - e[i])
 *     dv[j]       = sum over i of p[i][j] g[i]
 *     dk[j]       = f sum over i of ds[i][j] q[i]
 *     dq[i]       = f sum over j of ds[i][j] k[j]
 *
 * If a head has at most WHOLE tokens and its values fit into shared memory, one block computes all of its
 * gradients: a warp owns 16 keys, passes over the queries, and leaves its ds in shared memory; then it owns
 * 16 queries, and multiplies their ds with the keys. With more tokens, ds does not fit. Then one half of the
 * blocks computes dq: a warp owns 16 queries and passes over the keys. The other half computes dk and dv: a
 * warp owns 16 keys and passes over the queries. Both halves compute the weights, so they need 7 products
 * instead of 5. No kernel needs atomic additions, so the bits are always the same. */
#include "train/mma.cuh"
#include "train/vit/kernels.cuh"

#define WARPS_MIN 4 /* per block */
#define WARPS_MAX 7
#define GROUP     16  /* rows of a warp */
#define SPAN      224 /* maximum number of rows that are in shared memory at a time */
#define TILE      32  /* keys whose scores the forward pass computes at a time */
#define WHOLE     208 /* maximum number of tokens of a head that one block passes back */
#define LOG2E     1.44269504088896340736f

/* A row in shared memory. It has 8 values of padding, so that ldmatrix reads 8 rows from different banks. */
template <int DEPTH> struct line {
    bf16 value[DEPTH + 8];
};

/* One head of one sample. */
struct head {
    const bf16 *q, *k, *v;
    uint32_t tokens;
    size_t apart; /* distance between tokens, in values */
};

static __device__ __forceinline__ float exp2_of(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&both);
}

/* Sum and maximum over the 4 lanes that hold a row. */
static __device__ __forceinline__ float row_sum(float value)
{
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

static __device__ __forceinline__ float row_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

/* Returns the rows that are in shared memory at a time: the tokens, up to a multiple of `unit`. */
static __host__ __device__ __forceinline__ uint32_t span_of(uint32_t tokens, uint32_t unit)
{
    const uint32_t rows = (tokens + unit - 1) / unit * unit;
    return rows < SPAN ? rows : SPAN;
}

static __device__ struct head head_of(const bf16 *rows, uint32_t tokens, uint32_t width, uint32_t sample,
                                      uint32_t depth, uint32_t number)
{
    const bf16 *first = rows + (size_t)sample * tokens * 3 * width + number * depth;
    return {first, first + width, first + 2 * width, tokens, (size_t)3 * width};
}

/* Starts copying the rows first, first + 1, ..., SPAN at most, to `lines`. Rows from `count` on become zeros,
 * up to a multiple of UNIT. */
template <int DEPTH, int UNIT = GROUP>
static __device__ __forceinline__ void copy_rows(struct line<DEPTH> *lines, const bf16 *from, size_t apart,
                                                 uint32_t first, uint32_t count)
{
    constexpr int CHUNKS = DEPTH / 8;
    const uint32_t rows = span_of(count - first, UNIT);
    for (uint32_t i = threadIdx.x; i < rows * CHUNKS; i += blockDim.x) {
        uint32_t row = i / CHUNKS, column = i % CHUNKS * 8;
        bool inside = first + row < count;
        copy_async16(&lines[row].value[column], from + (inside ? first + row : 0) * apart + column, inside);
    }
}

/* The 16 rows from `first` on as the left factor of products, one fragment per 16 columns. */
template <int DEPTH>
static __device__ __forceinline__ void load_rows(uint32_t rows[DEPTH / 16][4], const bf16 *from, size_t apart,
                                                 uint32_t first, uint32_t count)
{
    uint32_t lane = threadIdx.x % 32, row = first + lane / 4, column = lane % 4 * 2;
    for (int half = 0; half < 2; half++) {
        bool inside = row + 8 * half < count;
        const bf16 *values = from + (inside ? row + 8 * half : 0) * apart + column;
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step++)
            for (int part = 0; part < 2; part++)
                rows[step][half + 2 * part] =
                    inside ? *reinterpret_cast<const uint32_t *>(values + 16 * step + 8 * part) : 0;
    }
}

/* Adds rows * lines^T to `sums`, for the 16 lines from `first` on. */
template <int DEPTH>
static __device__ __forceinline__ void add_scores(float sums[2][4], const uint32_t rows[DEPTH / 16][4],
                                                  const struct line<DEPTH> *lines, uint32_t first)
{
    uint32_t lane = threadIdx.x % 32, row = first + lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        uint32_t word[4];
        mma_load4(word, &lines[row].value[16 * step + column]);
        mma_16816(sums[0], rows[step], word, bf16());
        mma_16816(sums[1], rows[step], word + 2, bf16());
    }
}

/* The results of add_scores() as the left factor of products. */
static __device__ __forceinline__ void pack_weights(const float weights[2][4], uint32_t left[4])
{
    for (int i = 0; i < 4; i++)
        left[i] = pack(weights[i / 2][2 * (i % 2)], weights[i / 2][2 * (i % 2) + 1]);
}

/* Adds left * lines to `sums`, for the 16 lines from `first` on. */
template <int DEPTH>
static __device__ __forceinline__ void add_weighted(float sums[DEPTH / 8][4], const uint32_t left[4],
                                                    const struct line<DEPTH> *lines, uint32_t first)
{
    uint32_t lane = threadIdx.x % 32, row = first + lane % 16, column = lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        uint32_t word[4];
        mma_load4_transposed(word, &lines[row].value[16 * step + column]);
        mma_16816(sums[2 * step], left, word, bf16());
        mma_16816(sums[2 * step + 1], left, word + 2, bf16());
    }
}

/* Writes 16 rows of sums, the upper 8 multiplied by factor[0] and the lower 8 by factor[1]. */
template <int DEPTH>
static __device__ __forceinline__ void store_rows(bf16 *to, size_t apart, uint32_t first, uint32_t count,
                                                  const float sums[DEPTH / 8][4], const float factor[2])
{
    uint32_t lane = threadIdx.x % 32, row = first + lane / 4, column = lane % 4 * 2;
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= count)
            return;
        bf16 *values = to + (row + 8 * half) * apart + column;
#pragma unroll
        for (int step = 0; step < DEPTH / 8; step++)
            *reinterpret_cast<uint32_t *>(values + 8 * step) =
                pack(sums[step][2 * half] * factor[half], sums[step][2 * half + 1] * factor[half]);
    }
}

/* ---- Forward ---- */

/* The softmax of 16 rows so far: largest score, and sum of exponentials, of the upper and the lower 8 rows.
 */
struct softmax {
    float most[2], sum[2];
};

/* Replaces the scores of a tile by exponentials relative to the largest score so far. Rescales the sums. */
template <int DEPTH>
static __device__ __forceinline__ void take_scores(struct softmax *softmax, float scores[TILE / 8][4],
                                                   float factor, uint32_t valid, float sums[DEPTH / 8][4])
{
    const uint32_t column = threadIdx.x % 4 * 2;
    if (valid < TILE) {
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
            for (int i = 0; i < 4; i++)
                scores[n][i] = 8 * n + column + i % 2 < valid ? scores[n][i] : -INFINITY;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = scores[0][2 * half], sum = 0;
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
            most = fmaxf(most, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        most = fmaxf(softmax->most[half], factor * row_max(most));
        const float shrink = exp2_of(softmax->most[half] - most);
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                scores[n][i] = exp2_of(fmaf(scores[n][i], factor, -most));
                sum += scores[n][i];
            }
        softmax->sum[half] = softmax->sum[half] * shrink + sum;
        softmax->most[half] = most;
#pragma unroll
        for (int step = 0; step < DEPTH / 8; step++)
            for (int i = 0; i < 2; i++)
                sums[step][2 * half + i] *= shrink;
    }
}

/* Keys and values in shared memory, and the queries of a warp. */
template <int DEPTH> struct tiles {
    const struct line<DEPTH> *keys, *values;
    uint32_t count; /* of keys */
    uint32_t queries[DEPTH / 16][4];
};

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

/* Adds the weighted values of the tile from `at` on, whose scores are `now`. Before, starts the products of
 * the next tile, so that tensor cores work while other units compute exponentials. */
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
    take_scores<DEPTH>(softmax, now, factor, tiles->count - at, sums);
#pragma unroll
    for (int group = 0; group < TILE; group += GROUP) {
        uint32_t left[4];
        pack_weights(now + group / 8, left);
        add_weighted<DEPTH>(sums, left, tiles->values, at + group);
    }
}

/* Block (x, head, sample) computes the outputs of the rows from x * rows per block on. */
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

/* ---- Backward ---- */

/* The gradients of one head's outputs, and the saved results of its forward pass. */
struct head_deltas {
    const bf16 *outputs, *deltas;
    const float *logs;
    size_t apart;
};

/* dot[0] and dot[1]: the products outputs . deltas of this lane's upper and lower row. */
template <int DEPTH>
static __device__ __forceinline__ void row_products(const struct head_deltas *head, uint32_t first,
                                                    uint32_t count, float dot[2])
{
    uint32_t lane = threadIdx.x % 32;
    for (int half = 0; half < 2; half++) {
        uint32_t row = first + lane / 4 + 8 * half;
        size_t at = (row < count ? row : 0) * head->apart + lane % 4 * (DEPTH / 4);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < DEPTH / 4; i += 2) {
            float2 a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(head->outputs + at + i));
            float2 b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(head->deltas + at + i));
            sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
        }
        dot[half] = row_sum(sum);
    }
}

/* What a block has in shared memory: two of queries, keys, values and gradients of outputs, and for each
 * query the logarithm and the product outputs . deltas. */
template <int DEPTH> struct room {
    struct line<DEPTH> *one, *other;
    float *logs, *dots;
};

/* Computes the gradients of 16 queries per warp. */
template <int DEPTH>
static __device__ void queries_backward(const struct head *head, const struct head_deltas *of, uint32_t first,
                                        const struct room<DEPTH> *room, bf16 *deltas)
{
    const float factor = 1 / sqrtf((float)DEPTH);
    const uint32_t tokens = head->tokens, column = threadIdx.x % 4 * 2;
    uint32_t queries[DEPTH / 16][4], out[DEPTH / 16][4];
    float sums[DEPTH / 8][4] = {}, dot[2], log[2];
    load_rows<DEPTH>(queries, head->q, head->apart, first, tokens);
    load_rows<DEPTH>(out, of->deltas, of->apart, first, tokens);
    row_products<DEPTH>(of, first, tokens, dot);
    for (int half = 0; half < 2; half++) {
        uint32_t row = first + threadIdx.x % 32 / 4 + 8 * half;
        log[half] = row < tokens ? of->logs[row] : 0;
    }
    for (uint32_t begin = 0; begin < tokens; begin += SPAN) {
        if (begin > 0)
            __syncthreads();
        copy_rows(room->one, head->k, head->apart, begin, tokens);
        copy_rows(room->other, head->v, head->apart, begin, tokens);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        const uint32_t count = tokens - begin < SPAN ? tokens - begin : SPAN;
        for (uint32_t group = 0; first < tokens && group < count; group += GROUP) {
            float scores[2][4] = {}, weights[2][4] = {};
            add_scores<DEPTH>(scores, queries, room->one, group);
            add_scores<DEPTH>(weights, out, room->other, group);
#pragma unroll
            for (int n = 0; n < 2; n++)
                for (int i = 0; i < 4; i++) {
                    bool valid = group + 8 * n + column + i % 2 < count;
                    float p = exp2_of(fmaf(scores[n][i], factor * LOG2E, -log[i / 2]));
                    weights[n][i] = valid ? p * (weights[n][i] - dot[i / 2]) : 0;
                }
            uint32_t left[4];
            pack_weights(weights, left);
            add_weighted<DEPTH>(sums, left, room->one, group);
        }
    }
    const float factors[2] = {factor, factor};
    store_rows<DEPTH>(deltas, head->apart, first, tokens, sums, factors);
}

/* Writes the logarithms and products of the queries from `begin` on to shared memory. Queries after the last
 * get a logarithm of infinity, so their weights are 0. */
template <int DEPTH>
static __device__ __forceinline__ void load_lines(const struct head_deltas *of, uint32_t begin,
                                                  uint32_t tokens, const struct room<DEPTH> *room)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t own = threadIdx.x / 32 * GROUP; own < SPAN && begin + own < tokens;
         own += blockDim.x / 32 * GROUP) {
        float dot[2];
        row_products<DEPTH>(of, begin + own, tokens, dot);
        for (int half = 0; half < 2 && lane % 4 == 0; half++) {
            uint32_t row = own + lane / 4 + 8 * half;
            room->dots[row] = dot[half];
            room->logs[row] = begin + row < tokens ? of->logs[begin + row] : INFINITY;
        }
    }
}

/* Keeps ds of 16 keys, from `first` on, and 16 queries, from `group` on, in shared memory: rows of keys,
 * which KEPT_APART values separate. Keys after the last have zeros. */
#define KEPT_APART (WHOLE + 8)
static __device__ __forceinline__ void keep(const uint32_t left[4], uint32_t first, uint32_t group,
                                            uint32_t tokens, bf16 *kept)
{
    const uint32_t lane = threadIdx.x % 32, key = first + lane / 4, query = group + lane % 4 * 2;
    for (int i = 0; i < 4; i++)
        *reinterpret_cast<uint32_t *>(&kept[(key + i % 2 * 8) * KEPT_APART + query + i / 2 * 8]) =
            key + i % 2 * 8 < tokens ? left[i] : 0;
}

/* Computes the gradients of 16 keys and 16 values per warp. Keeps ds in `kept`, unless it is NULL. */
template <int DEPTH>
static __device__ __forceinline__ void keys_backward(const struct head *head, const struct head_deltas *of,
                                                     uint32_t first, const struct room<DEPTH> *room,
                                                     bf16 *key_deltas, bf16 *value_deltas, bf16 *kept)
{
    const float factor = 1 / sqrtf((float)DEPTH);
    const uint32_t tokens = head->tokens, column = threadIdx.x % 4 * 2;
    uint32_t keys[DEPTH / 16][4], values[DEPTH / 16][4];
    float key_sums[DEPTH / 8][4] = {}, value_sums[DEPTH / 8][4] = {};
    load_rows<DEPTH>(keys, head->k, head->apart, first, tokens);
    load_rows<DEPTH>(values, head->v, head->apart, first, tokens);
    for (uint32_t begin = 0; begin < tokens; begin += SPAN) {
        if (begin > 0)
            __syncthreads();
        copy_rows(room->one, head->q, head->apart, begin, tokens);
        copy_rows(room->other, of->deltas, of->apart, begin, tokens);
        copy_commit();
        load_lines<DEPTH>(of, begin, tokens, room);
        copy_wait<0>();
        __syncthreads();
        const uint32_t count = tokens - begin < SPAN ? tokens - begin : SPAN;
        for (uint32_t group = 0; first < tokens && group < count; group += GROUP) {
            float weights[2][4] = {}, deltas[2][4] = {};
            add_scores<DEPTH>(weights, keys, room->one, group);
            add_scores<DEPTH>(deltas, values, room->other, group);
#pragma unroll
            for (int n = 0; n < 2; n++)
                for (int i = 0; i < 4; i++) {
                    uint32_t query = group + 8 * n + column + i % 2;
                    weights[n][i] = exp2_of(fmaf(weights[n][i], factor * LOG2E, -room->logs[query]));
                    deltas[n][i] = weights[n][i] * (deltas[n][i] - room->dots[query]);
                }
            uint32_t left[4];
            pack_weights(weights, left);
            add_weighted<DEPTH>(value_sums, left, room->other, group);
            pack_weights(deltas, left);
            add_weighted<DEPTH>(key_sums, left, room->one, group);
            if (kept)
                keep(left, first, group, tokens, kept);
        }
    }
    const float factors[2] = {factor, factor}, ones[2] = {1, 1};
    store_rows<DEPTH>(key_deltas, head->apart, first, tokens, key_sums, factors);
    store_rows<DEPTH>(value_deltas, head->apart, first, tokens, value_sums, ones);
}

/* Block (x, head, 2 sample) computes the gradients of queries, and block (x, head, 2 sample + 1) those of
 * keys and values. */
template <int DEPTH>
static __global__ void __launch_bounds__(32 * WARPS_MAX, 2)
    attention_back_kernel(const bf16 *rows, const bf16 *outputs, const float *logs, const bf16 *deltas,
                          uint32_t tokens, uint32_t width, bf16 *row_deltas)
{
    extern __shared__ __align__(16) unsigned char shared[];
    const uint32_t sample = blockIdx.z / 2, number = blockIdx.y, span = span_of(tokens, GROUP);
    const struct head head = head_of(rows, tokens, width, sample, DEPTH, number);
    const size_t at = (size_t)sample * tokens * width + number * DEPTH;
    const struct head_deltas of = {outputs + at, deltas + at,
                                   logs + ((size_t)sample * gridDim.y + number) * tokens, width};
    const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * GROUP;
    struct line<DEPTH> *lines = reinterpret_cast<struct line<DEPTH> *>(shared);
    float *numbers = reinterpret_cast<float *>(lines + 2 * span);
    const struct room<DEPTH> room = {
        lines, lines + span, numbers, numbers + span
    };
    bf16 *result = row_deltas + (head.q - rows);
    if (blockIdx.z % 2 == 0)
        queries_backward<DEPTH>(&head, &of, first, &room, result);
    else
        keys_backward<DEPTH>(&head, &of, first, &room, result + width, result + 2 * width, nullptr);
}

/* Computes the gradients of 16 queries per warp from the ds that keys_backward() kept. */
template <int DEPTH>
static __device__ __forceinline__ void kept_backward(const struct head *head, uint32_t first,
                                                     const struct line<DEPTH> *keys, const bf16 *kept,
                                                     bf16 *deltas)
{
    const float factor = 1 / sqrtf((float)DEPTH), factors[2] = {factor, factor};
    const uint32_t lane = threadIdx.x % 32, key = lane / 16 * 8 + lane % 8, query = first + lane / 8 % 2 * 8;
    float sums[DEPTH / 8][4] = {};
    for (uint32_t group = 0; group < head->tokens; group += GROUP) {
        uint32_t left[4];
        mma_load4_transposed(left, &kept[(group + key) * KEPT_APART + query]);
        add_weighted<DEPTH>(sums, left, keys, group);
    }
    store_rows<DEPTH>(deltas, head->apart, first, head->tokens, sums, factors);
}

/* Block (0, head, sample) computes all gradients of a head. */
template <int DEPTH>
static __global__ void __launch_bounds__(32 * WHOLE / GROUP, 1)
    attention_whole_kernel(const bf16 *rows, const bf16 *outputs, const float *logs, const bf16 *deltas,
                           uint32_t tokens, uint32_t width, bf16 *row_deltas)
{
    extern __shared__ __align__(16) unsigned char shared[];
    const uint32_t sample = blockIdx.z, number = blockIdx.y, span = span_of(tokens, GROUP);
    const struct head head = head_of(rows, tokens, width, sample, DEPTH, number);
    const size_t at = (size_t)sample * tokens * width + number * DEPTH;
    const struct head_deltas of = {outputs + at, deltas + at,
                                   logs + ((size_t)sample * gridDim.y + number) * tokens, width};
    const uint32_t first = threadIdx.x / 32 * GROUP;
    struct line<DEPTH> *lines = reinterpret_cast<struct line<DEPTH> *>(shared), *keys = lines + 2 * span;
    bf16 *kept = reinterpret_cast<bf16 *>(keys + span);
    float *numbers = reinterpret_cast<float *>(kept + span * KEPT_APART);
    const struct room<DEPTH> room = {
        lines, lines + span, numbers, numbers + span
    };
    bf16 *result = row_deltas + (head.q - rows);
    copy_rows(keys, head.k, head.apart, 0, tokens);
    keys_backward<DEPTH>(&head, &of, first, &room, result + width, result + 2 * width, kept);
    __syncthreads();
    kept_backward<DEPTH>(&head, first, keys, kept, result);
}

/* ---- Launches ---- */

/* The warps per block that leave the fewest warps without rows. */
static uint32_t warps_for(uint32_t tokens)
{
    const uint32_t groups = (tokens + GROUP - 1) / GROUP;
    uint32_t best = WARPS_MIN, least = UINT32_MAX;
    for (uint32_t warps = WARPS_MIN; warps <= WARPS_MAX; warps++) {
        const uint32_t idle = (groups + warps - 1) / warps * warps - groups;
        if (idle < least) {
            best = warps;
            least = idle;
        }
    }
    return best;
}

/* Where and how a kernel runs. */
struct launch {
    dim3 grid;
    uint32_t threads, bytes;
};

static struct launch launch_of(const struct vit_rows *rows, uint32_t heads, uint32_t halves)
{
    const uint32_t warps = warps_for(rows->tokens), depth = rows->width / heads;
    const uint32_t row_bytes = 2 * (depth + 8) * (uint32_t)sizeof(bf16) + 2 * (uint32_t)sizeof(float);
    return {dim3((rows->tokens + warps * GROUP - 1) / (warps * GROUP), heads, halves * rows->samples),
            32 * warps, span_of(rows->tokens, TILE) * row_bytes};
}

static struct launch launch_of_whole(const struct vit_rows *rows, uint32_t heads)
{
    const uint32_t span = span_of(rows->tokens, GROUP),
                   line = (rows->width / heads + 8) * (uint32_t)sizeof(bf16);
    const uint32_t kept = KEPT_APART * (uint32_t)sizeof(bf16), numbers = 2 * (uint32_t)sizeof(float);
    return {dim3(1, heads, rows->samples), 32 * span / GROUP, span * (3 * line + kept + numbers)};
}

/* Lets a kernel use this much shared memory. */
template <class KERNEL> static enum status allow(KERNEL *kernel, const struct launch *launch)
{
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)launch->bytes));
    return STATUS_OK;
}

/* Sets `*whole` if one block can compute all gradients of a head on the current device. */
static enum status can_be_whole(const struct vit_rows *rows, uint32_t heads, bool *whole)
{
    int device, most;
    CUDA_TRY(cudaGetDevice(&device));
    CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    *whole = rows->tokens <= WHOLE && launch_of_whole(rows, heads).bytes <= (uint32_t)most;
    return STATUS_OK;
}

static enum status refuse_depth(uint32_t depth)
{
    return status_set(STATUS_FAILED, "vit: no kernel for %u values per head", depth);
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

template <int DEPTH>
static enum status backward(const struct vit_rows *rows, uint32_t heads, const bf16 *inputs,
                            const bf16 *outputs, const float *logs, const bf16 *out_deltas, bf16 *in_deltas,
                            cudaStream_t stream)
{
    bool whole;
    TRY(can_be_whole(rows, heads, &whole));
    const struct launch launch = whole ? launch_of_whole(rows, heads) : launch_of(rows, heads, 2);
    auto *kernel = whole ? attention_whole_kernel<DEPTH> : attention_back_kernel<DEPTH>;
    TRY(allow(kernel, &launch));
    kernel<<<launch.grid, launch.threads, launch.bytes, stream>>>(inputs, outputs, logs, out_deltas,
                                                                  rows->tokens, rows->width, in_deltas);
    CUDA_TRY_LAUNCH("attention_back_kernel");
    return STATUS_OK;
}

enum status vit_attention(const struct vit_rows *rows, uint32_t heads, const bf16 *inputs, bf16 *outputs,
                          float *logs, cudaStream_t stream)
{
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

enum status vit_attention_backward(const struct vit_rows *rows, uint32_t heads, const bf16 *inputs,
                                   const bf16 *outputs, const float *logs, const bf16 *out_deltas,
                                   bf16 *in_deltas, cudaStream_t stream)
{
    switch (rows->width / heads) {
    case 16:
        return backward<16>(rows, heads, inputs, outputs, logs, out_deltas, in_deltas, stream);
    case 32:
        return backward<32>(rows, heads, inputs, outputs, logs, out_deltas, in_deltas, stream);
    case 64:
        return backward<64>(rows, heads, inputs, outputs, logs, out_deltas, in_deltas, stream);
    default:
        return refuse_depth(rows->width / heads);
    }
}
