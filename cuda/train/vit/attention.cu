/* Attention on tensor cores, forward and backward (attention.cuh). A warp has 16 rows (queries or keys) in
 * registers, and reads the rows that it multiplies by them from shared memory.
 *
 * If a head has at most WHOLE tokens and the block's arrays fit into shared memory, one block computes all
 * gradients of a head. First, each warp takes 16 keys, loops over the queries, and stores its ds in shared
 * memory. Then each warp takes 16 queries, and multiplies their ds by the keys.
 *
 * Otherwise, one half of the blocks computes dq: a warp takes 16 queries and loops over the keys. The other
 * half computes dk and dv: a warp takes 16 keys and loops over the queries. Each half computes ds, so both
 * together need 7 matrix products instead of 5. */
#include "train/vit/attention.cuh"

#define WARPS_MIN 4 /* minimum warps per block */
#define WARPS_MAX 7
#define SPAN      224 /* maximum number of rows that are in shared memory at a time */
#define TILE      32  /* keys whose scores the forward pass computes at a time */
#define WHOLE     208 /* maximum number of tokens for which one block computes all gradients of a head */

/* ---- Rows in shared memory and in registers ---- */

/* A row in shared memory. It has 8 values of padding, so that ldmatrix reads 8 rows from different banks. */
template <class T, int DEPTH> struct line {
    T value[DEPTH + 8];
};

/* Returns the number of rows that are in shared memory at a time: `tokens` rounded up to a multiple of
 * `unit`, but at most SPAN. */
static __host__ __device__ __forceinline__ uint32_t span_of(uint32_t tokens, uint32_t unit)
{
    const uint32_t rows = (tokens + unit - 1) / unit * unit;
    return rows < SPAN ? rows : SPAN;
}

/* Starts copying up to SPAN of the `count` rows, from row `first` on, to `lines`. If fewer than SPAN rows
 * remain, pads `lines` with zeros to a multiple of UNIT rows. */
template <class T, int DEPTH, int UNIT = GROUP>
static __device__ __forceinline__ void copy_rows(struct line<T, DEPTH> *lines, const T *from, size_t apart,
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

/* Loads the 16 rows starting at `first` as the left operand of mma_16816(), one fragment per 16 columns. Rows
 * from `count` on are zeros. */
template <class T, int DEPTH>
static __device__ __forceinline__ void load_rows(uint32_t rows[DEPTH / 16][4], const T *from, size_t apart,
                                                 uint32_t first, uint32_t count)
{
    uint32_t lane = threadIdx.x % 32, row = first + lane / 4, column = lane % 4 * 2;
    for (int half = 0; half < 2; half++) {
        bool inside = row + 8 * half < count;
        const T *values = from + (inside ? row + 8 * half : 0) * apart + column;
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step++)
            for (int part = 0; part < 2; part++)
                rows[step][half + 2 * part] =
                    inside ? *reinterpret_cast<const uint32_t *>(values + 16 * step + 8 * part) : 0;
    }
}

/* Adds rows * lines^T to `sums`, for the 16 lines from `first` on. */
template <class T, int DEPTH>
static __device__ __forceinline__ void add_scores(float sums[2][4], const uint32_t rows[DEPTH / 16][4],
                                                  const struct line<T, DEPTH> *lines, uint32_t first)
{
    uint32_t lane = threadIdx.x % 32, row = first + lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        uint32_t word[4];
        mma_load4(word, &lines[row].value[16 * step + column]);
        mma_16816(sums[0], rows[step], word, T());
        mma_16816(sums[1], rows[step], word + 2, T());
    }
}

/* Converts results of add_scores() to the left operand of mma_16816(). */
template <class T>
static __device__ __forceinline__ void pack_weights(const float weights[2][4], uint32_t left[4])
{
    for (int i = 0; i < 4; i++)
        left[i] = pack<T>(weights[i / 2][2 * (i % 2)], weights[i / 2][2 * (i % 2) + 1]);
}

/* Adds left * lines to `sums`, for the 16 lines from `first` on. */
template <class T, int DEPTH>
static __device__ __forceinline__ void add_weighted(float sums[DEPTH / 8][4], const uint32_t left[4],
                                                    const struct line<T, DEPTH> *lines, uint32_t first)
{
    uint32_t lane = threadIdx.x % 32, row = first + lane % 16, column = lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        uint32_t word[4];
        mma_load4_transposed(word, &lines[row].value[16 * step + column]);
        mma_16816(sums[2 * step], left, word, T());
        mma_16816(sums[2 * step + 1], left, word + 2, T());
    }
}

/* Writes 16 rows of sums from row `first` on, without rows from `count` on. Multiplies the upper 8 rows by
 * factor[0] and the lower 8 by factor[1]. */
template <class T, int DEPTH>
static __device__ __forceinline__ void store_rows(T *to, size_t apart, uint32_t first, uint32_t count,
                                                  const float sums[DEPTH / 8][4], const float factor[2])
{
    uint32_t lane = threadIdx.x % 32, row = first + lane / 4, column = lane % 4 * 2;
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= count)
            return;
        T *values = to + (row + 8 * half) * apart + column;
#pragma unroll
        for (int step = 0; step < DEPTH / 8; step++)
            *reinterpret_cast<uint32_t *>(values + 8 * step) =
                pack<T>(sums[step][2 * half] * factor[half], sums[step][2 * half + 1] * factor[half]);
    }
}

/* ---- Launches ---- */

/* Returns the number of warps per block for which the fewest warps have no rows. */
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

/* `halves` is the number of blocks along z per sample. In the backward pass it is 2: one half of the blocks
 * computes the gradients of queries, the other half those of keys and values. */
static struct launch launch_of(const struct vit_rows *rows, uint32_t heads, uint32_t halves)
{
    const uint32_t warps = warps_for(rows->tokens), depth = rows->width / heads;
    const uint32_t row_bytes = 2 * (depth + 8) * (uint32_t)sizeof(uint16_t) + 2 * (uint32_t)sizeof(float);
    return {dim3((rows->tokens + warps * GROUP - 1) / (warps * GROUP), heads, halves * rows->samples),
            32 * warps, span_of(rows->tokens, TILE) * row_bytes};
}

static enum status refuse_depth(uint32_t depth)
{
    return status_set(STATUS_FAILED, "vit: there is no kernel for heads of %u values; use 16, 32 or 64",
                      depth);
}

/* ---- Forward ---- */

/* Keys and values in shared memory, and the queries of a warp. */
template <class T, int DEPTH> struct tiles {
    const struct line<T, DEPTH> *keys, *values;
    uint32_t count; /* number of keys */
    uint32_t queries[DEPTH / 16][4];
};

/* Computes the scores of the TILE keys from key `at` on, without the factor f (see attention.cuh). */
template <class T, int DEPTH>
static __device__ __forceinline__ void tile_scores(const struct tiles<T, DEPTH> *tiles, uint32_t at,
                                                   float scores[TILE / 8][4])
{
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
        for (int i = 0; i < 4; i++)
            scores[n][i] = 0;
#pragma unroll
    for (int group = 0; group < TILE; group += GROUP)
        add_scores<T, DEPTH>(scores + group / 8, tiles->queries, tiles->keys, at + group);
}

/* Adds the values of the tile that begins at key `at`, weighted by the softmax of its scores `now`. First
 * issues the matrix products for the scores `next` of the next tile, so that tensor cores compute them while
 * other units compute exponentials. */
template <class T, int DEPTH>
static __device__ __forceinline__ void take_tile(const struct tiles<T, DEPTH> *tiles, uint32_t at,
                                                 struct softmax *softmax, float now[TILE / 8][4],
                                                 float next[TILE / 8][4], float sums[DEPTH / 8][4])
{
    const float factor = LOG2E / sqrtf((float)DEPTH);
    if (at >= tiles->count)
        return;
    if (at + TILE < tiles->count)
        tile_scores<T, DEPTH>(tiles, at + TILE, next);
    take_scores<DEPTH, TILE>(softmax, &now[0][0], factor, tiles->count - at, &sums[0][0]);
#pragma unroll
    for (int group = 0; group < TILE; group += GROUP) {
        uint32_t left[4];
        pack_weights<T>(now + group / 8, left);
        add_weighted<T, DEPTH>(sums, left, tiles->values, at + group);
    }
}

/* Block (x, head, sample) computes the outputs of the rows starting at x * (rows per block). */
template <class T, int DEPTH>
static __global__ void __launch_bounds__(32 * WARPS_MAX, 2)
    attention_kernel(const T *rows, uint32_t tokens, uint32_t width, T *outputs, float *logs)
{
    extern __shared__ __align__(16) unsigned char shared[];
    struct line<T, DEPTH> *keys = reinterpret_cast<struct line<T, DEPTH> *>(shared);
    struct line<T, DEPTH> *values = keys + span_of(tokens, TILE);
    const struct head<T> head = head_of<T>(rows, tokens, width, blockIdx.z, DEPTH, blockIdx.y);
    const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * GROUP;
    struct tiles<T, DEPTH> tiles = {
        keys, values
    };
    float sums[DEPTH / 8][4] = {}, scores[2][TILE / 8][4];
    struct softmax softmax = {{-INFINITY, -INFINITY}, {}};
    load_rows<T, DEPTH>(tiles.queries, head.q, head.apart, first, tokens);
    for (uint32_t begin = 0; begin < tokens; begin += SPAN) {
        if (begin > 0)
            __syncthreads();
        copy_rows<T, DEPTH, TILE>(keys, head.k, head.apart, begin, tokens);
        copy_rows<T, DEPTH, TILE>(values, head.v, head.apart, begin, tokens);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        tiles.count = first >= tokens ? 0 : tokens - begin < SPAN ? tokens - begin : SPAN;
        if (tiles.count > 0)
            tile_scores<T, DEPTH>(&tiles, 0, scores[0]);
        for (uint32_t at = 0; at < tiles.count; at += 2 * TILE) {
            take_tile<T, DEPTH>(&tiles, at, &softmax, scores[0], scores[1], sums);
            take_tile<T, DEPTH>(&tiles, at + TILE, &softmax, scores[1], scores[0], sums);
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
    store_rows<T, DEPTH>(outputs + (size_t)blockIdx.z * tokens * width + blockIdx.y * DEPTH, width, first,
                         tokens, sums, scale);
}

template <class T, int DEPTH>
static enum status forward(const struct vit_attention<T> *attention, cudaStream_t stream)
{
    const struct vit_rows *rows = &attention->rows;
    const struct launch launch = launch_of(rows, attention->heads, 1);
    TRY(allow(attention_kernel<T, DEPTH>, &launch));
    attention_kernel<T, DEPTH><<<launch.grid, launch.threads, launch.bytes, stream>>>(
        attention->inputs, rows->tokens, rows->width, attention->outputs, attention->logs);
    return CUDA_LAUNCHED("attention_kernel");
}

template <class T>
enum status vit_attention_forward(const struct vit_attention<T> *attention, cudaStream_t stream)
{
#if HAVE_HOPPER
    bool hopper;
    TRY(hopper_fits<T>(attention, &hopper));
    if (hopper)
        return hopper_forward<T>(attention, stream);
#endif
    switch (attention->rows.width / attention->heads) {
    case 16:
        return forward<T, 16>(attention, stream);
    case 32:
        return forward<T, 32>(attention, stream);
    case 64:
        return forward<T, 64>(attention, stream);
    default:
        return refuse_depth(attention->rows.width / attention->heads);
    }
}

/* ---- Backward ---- */

/* The gradients of one head's outputs, and the saved results of its forward pass. */
template <class T> struct head_deltas {
    const T *outputs, *deltas;
    const float *logs;
    size_t apart;
};

/* Computes e[i], the dot product of an output and its gradient, for this lane's two rows of the 16 rows that
 * start at `first`: dot[0] for its row among the first 8, dot[1] for its row among the last 8. */
template <class T, int DEPTH>
static __device__ __forceinline__ void row_products(const struct head_deltas<T> *head, uint32_t first,
                                                    uint32_t count, float dot[2])
{
    uint32_t lane = threadIdx.x % 32;
    for (int half = 0; half < 2; half++) {
        uint32_t row = first + lane / 4 + 8 * half;
        size_t at = (row < count ? row : 0) * head->apart + lane % 4 * (DEPTH / 4);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < DEPTH / 4; i += 2) {
            float2 a = values_of<T>(*reinterpret_cast<const uint32_t *>(head->outputs + at + i));
            float2 b = values_of<T>(*reinterpret_cast<const uint32_t *>(head->deltas + at + i));
            sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
        }
        dot[half] = row_sum(sum);
    }
}

/* The sums over a warp's rows of the gradients of queries, keys and values. */
template <int DEPTH> struct column_sums {
    float query[DEPTH], key[DEPTH], value[DEPTH];
};

/* Arrays of a block in shared memory. `one` and `other` have keys and values in queries_backward(), and
 * queries and gradients of outputs in keys_backward(). For each query, `logs` has the saved logarithm, and
 * `dots` has e[i]. `columns` has one entry per warp. */
template <class T, int DEPTH> struct room {
    struct line<T, DEPTH> *one, *other;
    float *logs, *dots;
    struct column_sums<DEPTH> *columns;
};

/* `lines` has space for 2 * span rows, and `numbers` for the other arrays. */
template <class T, int DEPTH>
static __device__ __forceinline__ room<T, DEPTH> room_of(struct line<T, DEPTH> *lines, float *numbers,
                                                         uint32_t span)
{
    struct room<T, DEPTH> room;
    room.one = lines;
    room.other = lines + span;
    room.logs = numbers;
    room.dots = numbers + span;
    room.columns = reinterpret_cast<struct column_sums<DEPTH> *>(numbers + 2 * span);
    return room;
}

/* Adds up the warps' sums of columns `begin` to `end` - 1, and writes them to `partial`. Column c is value c
 * % DEPTH of the gradients of the queries (c / DEPTH = 0), keys (1) or values (2). These three are `width`
 * values apart in `partial`. */
template <class T, int DEPTH>
static __device__ __forceinline__ void write_columns(const struct room<T, DEPTH> *room, uint32_t begin,
                                                     uint32_t end, uint32_t width, float *partial)
{
    __syncthreads();
    for (uint32_t column = begin + threadIdx.x; column < end; column += blockDim.x) {
        float sum = 0;
        for (uint32_t warp = 0; warp < blockDim.x / 32; warp++)
            sum += reinterpret_cast<const float *>(room->columns + warp)[column];
        partial[column / DEPTH * width + column % DEPTH] = sum;
    }
}

/* Computes the gradients of 16 queries per warp. */
template <class T, int DEPTH>
static __device__ void queries_backward(const struct head<T> *head, const struct head_deltas<T> *of,
                                        uint32_t first, const struct room<T, DEPTH> *room, T *deltas)
{
    const float factor = 1 / sqrtf((float)DEPTH);
    const uint32_t tokens = head->tokens, column = threadIdx.x % 4 * 2;
    uint32_t queries[DEPTH / 16][4], out[DEPTH / 16][4];
    float sums[DEPTH / 8][4] = {}, dot[2], log[2];
    load_rows<T, DEPTH>(queries, head->q, head->apart, first, tokens);
    load_rows<T, DEPTH>(out, of->deltas, of->apart, first, tokens);
    row_products<T, DEPTH>(of, first, tokens, dot);
    for (int half = 0; half < 2; half++) {
        uint32_t row = first + threadIdx.x % 32 / 4 + 8 * half;
        log[half] = row < tokens ? of->logs[row] : 0;
    }
    for (uint32_t begin = 0; begin < tokens; begin += SPAN) {
        if (begin > 0)
            __syncthreads();
        copy_rows<T>(room->one, head->k, head->apart, begin, tokens);
        copy_rows<T>(room->other, head->v, head->apart, begin, tokens);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        const uint32_t count = tokens - begin < SPAN ? tokens - begin : SPAN;
        for (uint32_t group = 0; first < tokens && group < count; group += GROUP) {
            float scores[2][4] = {}, weights[2][4] = {};
            add_scores<T, DEPTH>(scores, queries, room->one, group);
            add_scores<T, DEPTH>(weights, out, room->other, group);
#pragma unroll
            for (int n = 0; n < 2; n++)
                for (int i = 0; i < 4; i++) {
                    bool valid = group + 8 * n + column + i % 2 < count;
                    float p = exp2_of(fmaf(scores[n][i], factor * LOG2E, -log[i / 2]));
                    weights[n][i] = valid ? p * (weights[n][i] - dot[i / 2]) : 0;
                }
            uint32_t left[4];
            pack_weights<T>(weights, left);
            add_weighted<T, DEPTH>(sums, left, room->one, group);
        }
    }
    const float factors[2] = {factor, factor};
    store_rows<T, DEPTH>(deltas, head->apart, first, tokens, sums, factors);
    sum_columns<DEPTH>(&sums[0][0], factor, first, tokens, room->columns[threadIdx.x / 32].query);
}

/* Fills room->logs and room->dots for the queries from `begin` on. Queries after the last get a logarithm of
 * infinity, so their weights are 0. */
template <class T, int DEPTH>
static __device__ __forceinline__ void load_lines(const struct head_deltas<T> *of, uint32_t begin,
                                                  uint32_t tokens, const struct room<T, DEPTH> *room)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t own = threadIdx.x / 32 * GROUP; own < SPAN && begin + own < tokens;
         own += blockDim.x / 32 * GROUP) {
        float dot[2];
        row_products<T, DEPTH>(of, begin + own, tokens, dot);
        for (int half = 0; half < 2 && lane % 4 == 0; half++) {
            uint32_t row = own + lane / 4 + 8 * half;
            room->dots[row] = dot[half];
            room->logs[row] = begin + row < tokens ? of->logs[begin + row] : INFINITY;
        }
    }
}

/* Stores ds of 16 keys, from `first` on, and 16 queries, from `group` on, in shared memory. A key has one
 * row; the distance between rows is KEPT_APART values. Keys after the last get zeros. */
#define KEPT_APART (WHOLE + 8)
template <class T>
static __device__ __forceinline__ void keep(const uint32_t left[4], uint32_t first, uint32_t group,
                                            uint32_t tokens, T *kept)
{
    const uint32_t lane = threadIdx.x % 32, key = first + lane / 4, query = group + lane % 4 * 2;
    for (int i = 0; i < 4; i++)
        *reinterpret_cast<uint32_t *>(&kept[(key + i % 2 * 8) * KEPT_APART + query + i / 2 * 8]) =
            key + i % 2 * 8 < tokens ? left[i] : 0;
}

/* Computes the gradients of 16 keys and 16 values per warp. Keeps ds in `kept`, unless it is NULL. */
template <class T, int DEPTH>
static __device__ __forceinline__ void
keys_backward(const struct head<T> *head, const struct head_deltas<T> *of, uint32_t first,
              const struct room<T, DEPTH> *room, T *key_deltas, T *value_deltas, T *kept)
{
    const float factor = 1 / sqrtf((float)DEPTH);
    const uint32_t tokens = head->tokens, column = threadIdx.x % 4 * 2;
    uint32_t keys[DEPTH / 16][4], values[DEPTH / 16][4];
    float key_sums[DEPTH / 8][4] = {}, value_sums[DEPTH / 8][4] = {};
    load_rows<T, DEPTH>(keys, head->k, head->apart, first, tokens);
    load_rows<T, DEPTH>(values, head->v, head->apart, first, tokens);
    for (uint32_t begin = 0; begin < tokens; begin += SPAN) {
        if (begin > 0)
            __syncthreads();
        copy_rows<T>(room->one, head->q, head->apart, begin, tokens);
        copy_rows<T>(room->other, of->deltas, of->apart, begin, tokens);
        copy_commit();
        load_lines<T, DEPTH>(of, begin, tokens, room);
        copy_wait<0>();
        __syncthreads();
        const uint32_t count = tokens - begin < SPAN ? tokens - begin : SPAN;
        for (uint32_t group = 0; first < tokens && group < count; group += GROUP) {
            float weights[2][4] = {}, deltas[2][4] = {};
            add_scores<T, DEPTH>(weights, keys, room->one, group);
            add_scores<T, DEPTH>(deltas, values, room->other, group);
#pragma unroll
            for (int n = 0; n < 2; n++)
                for (int i = 0; i < 4; i++) {
                    uint32_t query = group + 8 * n + column + i % 2;
                    weights[n][i] = exp2_of(fmaf(weights[n][i], factor * LOG2E, -room->logs[query]));
                    deltas[n][i] = weights[n][i] * (deltas[n][i] - room->dots[query]);
                }
            uint32_t left[4];
            pack_weights<T>(weights, left);
            add_weighted<T, DEPTH>(value_sums, left, room->other, group);
            pack_weights<T>(deltas, left);
            add_weighted<T, DEPTH>(key_sums, left, room->one, group);
            if (kept)
                keep<T>(left, first, group, tokens, kept);
        }
    }
    const float factors[2] = {factor, factor}, ones[2] = {1, 1};
    store_rows<T, DEPTH>(key_deltas, head->apart, first, tokens, key_sums, factors);
    store_rows<T, DEPTH>(value_deltas, head->apart, first, tokens, value_sums, ones);
    sum_columns<DEPTH>(&key_sums[0][0], factor, first, tokens, room->columns[threadIdx.x / 32].key);
    sum_columns<DEPTH>(&value_sums[0][0], 1, first, tokens, room->columns[threadIdx.x / 32].value);
}

/* Returns where block (x, head) of a sample writes its sums in `partial` (part, 3, width). Along the second
 * dimension are the sums for queries, keys and values. */
static __device__ __forceinline__ float *part_of(float *partial, uint32_t sample, uint32_t width,
                                                 uint32_t depth)
{
    return partial + ((size_t)sample * gridDim.x + blockIdx.x) * 3 * width + blockIdx.y * depth;
}

/* Block (x, head, 2 sample) computes the gradients of queries, and block (x, head, 2 sample + 1) those of
 * keys and values. */
template <class T, int DEPTH>
static __global__ void __launch_bounds__(32 * WARPS_MAX, 2)
    attention_back_kernel(const T *rows, const T *outputs, const float *logs, const T *deltas,
                          uint32_t tokens, uint32_t width, T *row_deltas, float *partial)
{
    extern __shared__ __align__(16) unsigned char shared[];
    const uint32_t sample = blockIdx.z / 2, number = blockIdx.y, span = span_of(tokens, GROUP);
    const struct head<T> head = head_of<T>(rows, tokens, width, sample, DEPTH, number);
    const size_t at = (size_t)sample * tokens * width + number * DEPTH;
    const struct head_deltas<T> of = {
        outputs + at, deltas + at, logs + ((size_t)sample * gridDim.y + number) * tokens, width
    };
    const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * GROUP;
    struct line<T, DEPTH> *lines = reinterpret_cast<struct line<T, DEPTH> *>(shared);
    float *numbers = reinterpret_cast<float *>(lines + 2 * span);
    const struct room<T, DEPTH> room = room_of<T>(lines, numbers, span);
    T *result = row_deltas + (head.q - rows);
    const bool keys = blockIdx.z % 2;
    if (keys)
        keys_backward<T, DEPTH>(&head, &of, first, &room, result + width, result + 2 * width, nullptr);
    else
        queries_backward<T, DEPTH>(&head, &of, first, &room, result);
    write_columns<T, DEPTH>(&room, keys ? DEPTH : 0, keys ? 3 * DEPTH : DEPTH, width,
                            part_of(partial, sample, width, DEPTH));
}

/* Computes the gradients of 16 queries per warp from the ds that keys_backward() kept. */
template <class T, int DEPTH>
static __device__ __forceinline__ void kept_backward(const struct head<T> *head, uint32_t first,
                                                     const struct line<T, DEPTH> *keys, const T *kept,
                                                     T *deltas, float *columns)
{
    const float factor = 1 / sqrtf((float)DEPTH), factors[2] = {factor, factor};
    const uint32_t lane = threadIdx.x % 32, key = lane / 16 * 8 + lane % 8, query = first + lane / 8 % 2 * 8;
    float sums[DEPTH / 8][4] = {};
    for (uint32_t group = 0; group < head->tokens; group += GROUP) {
        uint32_t left[4];
        mma_load4_transposed(left, &kept[(group + key) * KEPT_APART + query]);
        add_weighted<T, DEPTH>(sums, left, keys, group);
    }
    store_rows<T, DEPTH>(deltas, head->apart, first, head->tokens, sums, factors);
    sum_columns<DEPTH>(&sums[0][0], factor, first, head->tokens, columns);
}

/* Block (0, head, sample) computes all gradients of this head for this sample. */
template <class T, int DEPTH>
static __global__ void __launch_bounds__(32 * WHOLE / GROUP, 1)
    attention_whole_kernel(const T *rows, const T *outputs, const float *logs, const T *deltas,
                           uint32_t tokens, uint32_t width, T *row_deltas, float *partial)
{
    extern __shared__ __align__(16) unsigned char shared[];
    const uint32_t sample = blockIdx.z, number = blockIdx.y, span = span_of(tokens, GROUP);
    const struct head<T> head = head_of<T>(rows, tokens, width, sample, DEPTH, number);
    const size_t at = (size_t)sample * tokens * width + number * DEPTH;
    const struct head_deltas<T> of = {
        outputs + at, deltas + at, logs + ((size_t)sample * gridDim.y + number) * tokens, width
    };
    const uint32_t first = threadIdx.x / 32 * GROUP;
    struct line<T, DEPTH> *lines = reinterpret_cast<struct line<T, DEPTH> *>(shared),
                          *keys = lines + 2 * span;
    T *kept = reinterpret_cast<T *>(keys + span);
    float *numbers = reinterpret_cast<float *>(kept + span * KEPT_APART);
    const struct room<T, DEPTH> room = room_of<T>(lines, numbers, span);
    T *result = row_deltas + (head.q - rows);
    copy_rows<T>(keys, head.k, head.apart, 0, tokens);
    keys_backward<T, DEPTH>(&head, &of, first, &room, result + width, result + 2 * width, kept);
    __syncthreads();
    kept_backward<T, DEPTH>(&head, first, keys, kept, result, room.columns[threadIdx.x / 32].query);
    write_columns<T, DEPTH>(&room, 0, 3 * DEPTH, width, part_of(partial, sample, width, DEPTH));
}

/* ---- Launches of the backward pass ---- */

/* Returns the size of room.columns. */
static uint32_t columns_bytes(const struct vit_rows *rows, uint32_t heads, uint32_t warps)
{
    return warps * 3 * rows->width / heads * (uint32_t)sizeof(float);
}

static struct launch launch_of_whole(const struct vit_rows *rows, uint32_t heads)
{
    const uint32_t span = span_of(rows->tokens, GROUP),
                   line = (rows->width / heads + 8) * (uint32_t)sizeof(uint16_t);
    const uint32_t kept = KEPT_APART * (uint32_t)sizeof(uint16_t), numbers = 2 * (uint32_t)sizeof(float);
    return {dim3(1, heads, rows->samples), 32 * span / GROUP,
            span * (3 * line + kept + numbers) + columns_bytes(rows, heads, span / GROUP)};
}

static struct launch launch_of_halves(const struct vit_rows *rows, uint32_t heads)
{
    struct launch launch = launch_of(rows, heads, 2);
    launch.bytes += columns_bytes(rows, heads, launch.threads / 32);
    return launch;
}

/* Sets `*whole` to whether one block can compute all gradients of a head on the current device. */
static enum status can_be_whole(const struct vit_rows *rows, uint32_t heads, bool *whole)
{
    int device, most;
    CUDA_TRY(cudaGetDevice(&device));
    CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    *whole = rows->tokens <= WHOLE && launch_of_whole(rows, heads).bytes <= (uint32_t)most;
    return STATUS_OK;
}

template <class T, int DEPTH>
static enum status backward(const struct vit_attention<T> *attention, const T *out_deltas, T *in_deltas,
                            float *bias, struct vit_sums *sums, cudaStream_t stream)
{
    const struct vit_rows *rows = &attention->rows;
    bool whole;
    TRY(can_be_whole(rows, attention->heads, &whole));
    const struct launch launch =
        whole ? launch_of_whole(rows, attention->heads) : launch_of_halves(rows, attention->heads);
    const struct vit_sum sum = {NULL, launch.grid.x * rows->samples, 1, 3 * rows->width, {bias}};
    auto *kernel = whole ? attention_whole_kernel<T, DEPTH> : attention_back_kernel<T, DEPTH>;
    TRY(allow(kernel, &launch));
    kernel<<<launch.grid, launch.threads, launch.bytes, stream>>>(
        attention->inputs, attention->outputs, attention->logs, out_deltas, rows->tokens, rows->width,
        in_deltas, vit_sums_room(sums));
    CUDA_TRY_LAUNCH("the backward kernel of attention");
    return vit_sums_add(sums, &sum);
}

uint32_t vit_attention_parts(const struct vit_rows *rows, uint32_t heads)
{
    return launch_of_halves(rows, heads).grid.x * rows->samples; /* one block per head needs no more */
}

template <class T>
enum status vit_attention_backward(const struct vit_attention<T> *attention, const T *out_deltas,
                                   T *in_deltas, float *bias, struct vit_sums *sums, cudaStream_t stream)
{
#if HAVE_HOPPER
    const struct vit_rows *rows = &attention->rows;
    const struct vit_sum sum = {NULL, rows->samples, 1, 3 * rows->width, {bias}};
    bool hopper;
    TRY(hopper_fits<T>(attention, &hopper));
    if (hopper) {
        TRY(hopper_backward<T>(attention, out_deltas, in_deltas, vit_sums_room(sums), stream));
        return vit_sums_add(sums, &sum);
    }
#endif
    switch (attention->rows.width / attention->heads) {
    case 16:
        return backward<T, 16>(attention, out_deltas, in_deltas, bias, sums, stream);
    case 32:
        return backward<T, 32>(attention, out_deltas, in_deltas, bias, sums, stream);
    case 64:
        return backward<T, 64>(attention, out_deltas, in_deltas, bias, sums, stream);
    default:
        return refuse_depth(attention->rows.width / attention->heads);
    }
}

EACH_HALF(vit_attention_forward)
EACH_HALF(vit_attention_backward)
