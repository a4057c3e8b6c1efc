/* Attention for compute capability 9.0 (H100, H200), for heads of 64 values and up to ROWS tokens. These
 * kernels compute what those of attention.cu compute, but with wgmma. A warpgroup
 * multiplies 64 rows at a time, and the tensor cores read the other operand directly from shared memory. A
 * block has the queries, keys and values of all tokens of one head in shared memory.
 *
 * The 64 rows of the last warpgroup can extend beyond the ROWS rows of a tile. The warpgroup then reads rows
 * of the next tile in shared memory. These rows affect only the results of rows that do not exist, and such
 * results are not stored. */
#include "train/vit/attention.cuh"
#include "train/vit/hopper.cuh"

#define DEPTH 64
#define ROWS  208 /* maximum number of tokens, rounded up to a multiple of GROUP */

/* Rows of a head in shared memory, in the format of hopper.cuh. */
struct tile {
    tile_row row[ROWS];
};

/* ---- Rows in shared memory ---- */

/* Starts copying the rows of a head to a tile. Rows from `count` on are zeros. */
template <class T>
static __device__ __forceinline__ void copy_tile(struct tile *tile, const T *from, size_t apart,
                                                 uint32_t count)
{
    for (uint32_t first = threadIdx.x / 32 * GROUP; first < ROWS; first += blockDim.x / 32 * GROUP)
        copy_rows16(tile->row, first, count, from, apart);
}

/* Multiplies the sums of columns 16 * step to 16 * step + 15 by factor[0] (upper 8 rows of the warp) or
 * factor[1] (lower 8 rows), and packs them into a fragment. */
template <class T>
static __device__ __forceinline__ void fragment_of(const float *sums, int step, const float factor[2],
                                                   uint32_t word[4])
{
    for (int i = 0; i < 4; i++)
        word[i] = pack<T>(sums[8 * step + 2 * i] * factor[i % 2], sums[8 * step + 2 * i + 1] * factor[i % 2]);
}

/* Writes the sums of a warp's 16 rows, from row `first` on, to global memory, times `factor`. Stages them in
 * the same rows of `tile`, so that the stores to global memory are coalesced. Does not write rows from
 * `count` on. */
template <class T>
static __device__ __forceinline__ void write_rows(struct tile *tile, uint32_t first, uint32_t count,
                                                  const float (&sums)[DEPTH / 2], const float factor[2],
                                                  T *to, size_t apart)
{
    if (first >= count)
        return;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        uint32_t word[4];
        fragment_of<T>(sums, step, factor, word);
        put_fragment(tile->row, first, 16 * step, word);
    }
    __syncwarp();
    write_rows16(tile->row, first, count, to, apart);
    __syncwarp(); /* the caller may overwrite the rows of `tile` */
}

/* Starts sums = rows others^T, for the warpgroup's 64 rows and N other rows. */
template <class T, int N>
static __device__ __forceinline__ void start_scores(float (&sums)[N / 2], const uint16_t *rows,
                                                    const uint16_t *others)
{
    const uint64_t a = wgmma_tile(rows), b = wgmma_tile(others);
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++)
        wgmma<T, N, 0, 0>(sums, a + step * WGMMA_NEXT, b + step * WGMMA_NEXT, step > 0);
    wgmma_commit();
}

/* Starts sums += weights others, for N other rows. */
template <class T, int N>
static __device__ __forceinline__ void
start_weighted(float (&sums)[DEPTH / 2], const uint32_t (&weights)[N / 16][4], const uint16_t *others)
{
    const uint64_t b = wgmma_tile(others);
#pragma unroll
    for (int step = 0; step < N / 16; step++)
        wgmma<T, DEPTH, 1>(sums, weights[step], b + step * WGMMA_NEXT_TRANSPOSED, true);
    wgmma_commit();
}

/* ---- Forward ---- */

#define FORWARD_GROUPS 2 /* warpgroups; each processes every second group of 64 queries */

struct forward_memory {
    struct tile queries, keys, values;
};

/* Adds N keys, from key `first` on, to the softmax and the sums of a warpgroup's queries. */
template <class T, int N>
static __device__ __forceinline__ void take_keys(const struct forward_memory *memory, const uint16_t *queries,
                                                 uint32_t first, uint32_t tokens, struct softmax *softmax,
                                                 float (&sums)[DEPTH / 2])
{
    const float factor = LOG2E / sqrtf((float)DEPTH), ones[2] = {1, 1};
    float scores[N / 2];
    uint32_t weights[N / 16][4];
    wgmma_fence();
    start_scores<T, N>(scores, queries, memory->keys.row[first]);
    wgmma_wait<0>();
    wgmma_ended(scores);
    take_scores<DEPTH, N>(softmax, scores, factor, tokens - first, sums);
#pragma unroll
    for (int step = 0; step < N / 16; step++)
        fragment_of<T>(scores, step, ones, weights[step]);
    wgmma_fence();
    start_weighted<T, N>(sums, weights, memory->values.row[first]);
    wgmma_wait<0>();
    wgmma_ended(sums);
}

/* Blocks (head, sample, any) compute the outputs of this head for this sample. Each has a part of the
 * queries, and all keys and values. */
template <class T>
static __global__ void __launch_bounds__(128 * FORWARD_GROUPS, 2)
    hopper_kernel(const T *rows, uint32_t tokens, uint32_t width, T *outputs, float *logs)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    struct forward_memory *memory = reinterpret_cast<struct forward_memory *>(shared);
    const uint32_t number = blockIdx.x, sample = blockIdx.y, lane = threadIdx.x % 32;
    const struct head<T> head = head_of<T>(rows, tokens, width, sample, DEPTH, number);
    wait_for_previous();
    allow_next();
    copy_tile<T>(&memory->queries, head.q, head.apart, tokens);
    copy_tile<T>(&memory->keys, head.k, head.apart, tokens);
    copy_tile<T>(&memory->values, head.v, head.apart, tokens);
    copy_commit();
    copy_wait<0>();
    wgmma_publish();
    __syncthreads();
    logs += ((size_t)sample * gridDim.x + number) * tokens;
    for (uint32_t begin = (blockIdx.z * FORWARD_GROUPS + threadIdx.x / 128) * HEIGHT; begin < tokens;
         begin += gridDim.z * FORWARD_GROUPS * HEIGHT) {
        const uint32_t first = begin + threadIdx.x / 32 % 4 * GROUP;
        float sums[DEPTH / 2] = {}, scale[2];
        struct softmax softmax = {{-INFINITY, -INFINITY}, {}};
        uint32_t key = 0;
        for (; key + 64 <= ROWS && key < tokens; key += 64)
            take_keys<T, 64>(memory, memory->queries.row[begin], key, tokens, &softmax, sums);
        if (key < tokens)
            take_keys<T, ROWS % 64>(memory, memory->queries.row[begin], key, tokens, &softmax, sums);
        for (int half = 0; half < 2; half++) {
            const float sum = row_sum(softmax.sum[half]);
            const uint32_t row = first + lane / 4 + 8 * half;
            scale[half] = 1 / sum;
            if (lane % 4 == 0 && row < tokens)
                logs[row] = softmax.most[half] + log2f(sum);
        }
        meet_group(); /* all warps have read the queries, which the outputs overwrite */
        write_rows<T>(&memory->queries, first, tokens, sums, scale,
                      outputs + (size_t)sample * tokens * width + number * DEPTH, width);
    }
}

/* ---- Backward ---- */

#define BACK_GROUPS ((ROWS + HEIGHT - 1) / HEIGHT)
#define STEP        32 /* queries that a warpgroup processes at a time */

/* `ds` has one tile per 64 queries, with one row per key. write_rows() stages the gradients of keys in
 * `queries`, those of values in `deltas`, and those of queries in `ds`. `numbers` has one entry for this
 * sample and one for the next. `columns` has, for each warp, the sums over its rows of the gradients of
 * queries, keys and values. */
struct back_memory {
    struct tile keys, values, queries, deltas, ds[BACK_GROUPS];
    struct query_numbers {
        float logs[ROWS], dots[ROWS];
    } numbers[2];
    float columns[4 * BACK_GROUPS][3][DEPTH];
};

/* The arguments of vit_attention_backward() that the kernel needs. */
template <class T> struct back_plan {
    const T *rows, *outputs, *deltas;
    const float *logs;
    uint32_t samples, tokens, width;
    T *row_deltas;
    float *partial;
};

/* Returns the index of the first value of the block's head of a sample, in arrays with `width` values per
 * token. The block's head is blockIdx.x. */
template <class T>
static __device__ __forceinline__ size_t value_at(const struct back_plan<T> &plan, uint32_t sample)
{
    return (size_t)sample * plan.tokens * plan.width + blockIdx.x * DEPTH;
}

template <class T>
static __device__ __forceinline__ head<T> head_at(const struct back_plan<T> &plan, uint32_t sample)
{
    return head_of<T>(plan.rows, plan.tokens, plan.width, sample, DEPTH, blockIdx.x);
}

/* Computes e[i] (see attention.cuh) with two threads per query, and copies the logarithms. Queries
 * after the last get a logarithm of infinity, so their weights are 0. */
template <class T>
static __device__ __forceinline__ void load_numbers(const struct back_plan<T> &plan, uint32_t sample,
                                                    struct back_memory::query_numbers *numbers)
{
    const uint32_t row = threadIdx.x / 2;
    if (row >= ROWS)
        return;
    const size_t at = value_at<T>(plan, sample) + (row < plan.tokens ? row : 0) * (size_t)plan.width +
                      threadIdx.x % 2 * (DEPTH / 2);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < DEPTH / 2; i += 8) {
        const uint4 a = *reinterpret_cast<const uint4 *>(plan.outputs + at + i);
        const uint4 b = *reinterpret_cast<const uint4 *>(plan.deltas + at + i);
        const uint32_t words[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
        for (int j = 0; j < 4; j++) {
            const float2 output = values_of<T>(words[0][j]), delta = values_of<T>(words[1][j]);
            sum = fmaf(output.x, delta.x, sum);
            sum = fmaf(output.y, delta.y, sum);
        }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (threadIdx.x % 2 == 0) {
        numbers->dots[row] = sum;
        numbers->logs[row] = row < plan.tokens
                                 ? plan.logs[((size_t)sample * gridDim.x + blockIdx.x) * plan.tokens + row]
                                 : INFINITY;
    }
}

/* Adds the terms of N queries, from query `query` on, to the gradients of a warpgroup's keys and values.
 * Stores ds of these queries and keys. `begin` is the warpgroup's first key, `first` the warp's. */
template <class T, int N>
static __device__ __forceinline__ void
take_queries(struct back_memory *memory, const struct back_memory::query_numbers *numbers, uint32_t begin,
             uint32_t first, uint32_t query, uint32_t tokens, float (&key_sums)[DEPTH / 2],
             float (&value_sums)[DEPTH / 2])
{
    const float factor = LOG2E / sqrtf((float)DEPTH), ones[2] = {1, 1};
    const uint32_t lane = threadIdx.x % 32, column = query + lane % 4 * 2;
    /* For keys after the last, ds must be 0: otherwise it could be infinite, and infinity times 0 (the key)
     * is NaN. */
    const bool inside[2] = {first + lane / 4 < tokens, first + lane / 4 + 8 < tokens};
    float weights[N / 2], ds[N / 2];
    uint32_t left[2][N / 16][4];
    wgmma_fence();
    start_scores<T, N>(weights, memory->keys.row[0] + begin * TILE_WIDTH, memory->queries.row[query]);
    start_scores<T, N>(ds, memory->values.row[0] + begin * TILE_WIDTH, memory->deltas.row[query]);
    wgmma_wait<1>();
    wgmma_ended(weights);
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const float2 log = *reinterpret_cast<const float2 *>(&numbers->logs[column + 8 * n]);
        for (int i = 0; i < 4; i++)
            weights[4 * n + i] = exp2_of(fmaf(weights[4 * n + i], factor, i % 2 ? -log.y : -log.x));
    }
#pragma unroll
    for (int step = 0; step < N / 16; step++)
        fragment_of<T>(weights, step, ones, left[0][step]);
    wgmma_fence();
    start_weighted<T, N>(value_sums, left[0], memory->deltas.row[query]);
    wgmma_wait<1>();
    wgmma_ended(ds);
#pragma unroll
    for (int step = 0; step < N / 16; step++) {
        for (int i = 0; i < 4; i++) {
            const float2 dot =
                *reinterpret_cast<const float2 *>(&numbers->dots[column + 16 * step + i / 2 * 8]);
            const float2 weight = values_of<T>(left[0][step][i]);
            const float *value = ds + 8 * step + 2 * i;
            left[1][step][i] =
                inside[i % 2] ? pack<T>(weight.x * (value[0] - dot.x), weight.y * (value[1] - dot.y)) : 0;
        }
        if (first < ROWS)
            put_fragment(memory->ds[query / 64].row, first, query % 64 + 16 * step, left[1][step]);
    }
    wgmma_fence();
    start_weighted<T, N>(key_sums, left[1], memory->queries.row[query]);
    wgmma_wait<0>();
    wgmma_ended(value_sums);
    wgmma_ended(key_sums);
}

/* Starts sums = ds^T keys for the warpgroup's queries. */
template <class T>
static __device__ __forceinline__ void start_queries(struct back_memory *memory, uint32_t tokens,
                                                     float (&sums)[DEPTH / 2])
{
    const uint64_t a = wgmma_tile(&memory->ds[threadIdx.x / 128]), b = wgmma_tile(&memory->keys);
    wgmma_fence();
    wgmma<T, DEPTH, 1, 1>(sums, a, b, false);
    for (uint32_t step = 1; step * 16 < tokens; step++)
        wgmma<T, DEPTH, 1, 1>(sums, a + step * WGMMA_NEXT_TRANSPOSED, b + step * WGMMA_NEXT_TRANSPOSED, true);
    wgmma_commit();
}

/* Writes the gradients of a warp's rows of queries (`which` is 0), keys (1) or values (2), and stores the
 * sums of their columns. */
template <class T>
static __device__ __forceinline__ void
finish_rows(struct back_memory *memory, struct tile *tile, uint32_t first, uint32_t tokens,
            const float (&sums)[DEPTH / 2], float factor, T *to, size_t apart, uint32_t which)
{
    const float factors[2] = {factor, factor};
    write_rows<T>(tile, first, tokens, sums, factors, to, apart);
    sum_columns<DEPTH>(sums, factor, first, tokens, memory->columns[threadIdx.x / 32][which]);
}

/* Adds up the column sums that finish_rows() has stored for each warp, and writes the totals. */
template <class T>
static __device__ __forceinline__ void write_columns(struct back_memory *memory,
                                                     const struct back_plan<T> &plan, uint32_t sample)
{
    const uint32_t which = threadIdx.x / DEPTH, column = threadIdx.x % DEPTH;
    if (which >= 3)
        return;
    float sum = 0;
    for (uint32_t warp = 0; warp < 4 * BACK_GROUPS; warp++)
        sum += memory->columns[warp][which][column];
    plan.partial[((size_t)sample * 3 + which) * plan.width + blockIdx.x * DEPTH + column] = sum;
}

/* Block (head, y) processes the head of samples y, y + gridDim.y, ... The block starts to copy rows of the
 * next sample when it no longer needs those of this sample. Each warp copies to the tile rows in which it has
 * staged gradients itself, so these copies need no barrier. While it processes its last sample, the block
 * copies this sample again, but does not use the copy. */
template <class T>
static __global__ void __launch_bounds__(128 * BACK_GROUPS, 1)
    hopper_back_kernel(const struct back_plan<T> plan)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    struct back_memory *memory = reinterpret_cast<struct back_memory *>(shared);
    const float factor = 1 / sqrtf((float)DEPTH);
    const uint32_t begin = threadIdx.x / 128 * HEIGHT, first = threadIdx.x / 32 * GROUP, tokens = plan.tokens;
    const uint32_t apart = 3 * plan.width;
    uint32_t turn = 0;
    copy_tile<T>(&memory->keys, head_at<T>(plan, blockIdx.y).k, apart, tokens);
    copy_tile<T>(&memory->values, head_at<T>(plan, blockIdx.y).v, apart, tokens);
    copy_tile<T>(&memory->queries, head_at<T>(plan, blockIdx.y).q, apart, tokens);
    copy_tile<T>(&memory->deltas, plan.deltas + value_at<T>(plan, blockIdx.y), plan.width, tokens);
    load_numbers<T>(plan, blockIdx.y, memory->numbers);
    for (uint32_t sample = blockIdx.y; sample < plan.samples; sample += gridDim.y, turn ^= 1) {
        const uint32_t next = sample + gridDim.y < plan.samples ? sample + gridDim.y : sample;
        T *result = plan.row_deltas + 3 * value_at<T>(plan, sample) - 2 * blockIdx.x * DEPTH;
        float key_sums[DEPTH / 2] = {}, value_sums[DEPTH / 2] = {}, query_sums[DEPTH / 2];
        uint32_t query = 0;
        copy_commit();
        copy_wait<0>();
        wgmma_publish();
        __syncthreads();
        for (; query + STEP <= ROWS && query < tokens; query += STEP)
            take_queries<T, STEP>(memory, &memory->numbers[turn], begin, first, query, tokens, key_sums,
                                  value_sums);
        if (query < tokens)
            take_queries<T, ROWS % STEP>(memory, &memory->numbers[turn], begin, first, query, tokens,
                                         key_sums, value_sums);
        wgmma_publish();
        __syncthreads(); /* ds is complete; queries, values and deltas may be overwritten */
        copy_tile<T>(&memory->values, head_at<T>(plan, next).v, apart, tokens);
        finish_rows<T>(memory, &memory->queries, first, tokens, key_sums, factor, result + plan.width, apart,
                       1);
        copy_tile<T>(&memory->queries, head_at<T>(plan, next).q, apart, tokens);
        start_queries<T>(memory, tokens, query_sums);
        finish_rows<T>(memory, &memory->deltas, first, tokens, value_sums, 1, result + 2 * plan.width, apart,
                       2);
        copy_tile<T>(&memory->deltas, plan.deltas + value_at<T>(plan, next), plan.width, tokens);
        load_numbers<T>(plan, next, &memory->numbers[turn ^ 1]);
        wgmma_wait<0>();
        wgmma_ended(query_sums);
        __syncthreads(); /* keys and ds may be overwritten */
        copy_tile<T>(&memory->keys, head_at<T>(plan, next).k, apart, tokens);
        finish_rows<T>(memory, &memory->ds[0], first, tokens, query_sums, factor, result, apart, 0);
        __syncthreads();
        write_columns<T>(memory, plan, sample);
    }
    copy_commit();
    copy_wait<0>();
}

/* ---- Launches ---- */

template <class T> enum status hopper_fits(const struct vit_attention<T> *attention, bool *fits)
{
    TRY(on_hopper(fits));
    *fits = *fits && attention->rows.tokens <= ROWS && attention->rows.width / attention->heads == DEPTH;
    return STATUS_OK;
}

/* If the heads of all samples are fewer than the multiprocessors, two blocks divide the queries of a head.
 * The bits of the results do not depend on this. */
template <class T> enum status hopper_forward(const struct vit_attention<T> *attention, cudaStream_t stream)
{
    const struct vit_rows *rows = &attention->rows;
    uint32_t processors;
    TRY(processors_of(&processors));
    const uint32_t heads = attention->heads * rows->samples, parts = 2 * heads <= processors ? 2 : 1;
    const struct early_launch launch = {dim3(attention->heads, rows->samples, parts), 128 * FORWARD_GROUPS,
                                        sizeof(struct forward_memory), 1};
    return launch_early(hopper_kernel<T>, &launch, stream, attention->inputs, rows->tokens, rows->width,
                        attention->outputs, attention->logs);
}

template <class T>
enum status hopper_backward(const struct vit_attention<T> *attention, const T *out_deltas, T *in_deltas,
                            float *partial, cudaStream_t stream)
{
    const struct vit_rows *rows = &attention->rows;
    const struct back_plan<T> plan = {
        attention->inputs, attention->outputs, out_deltas, attention->logs, rows->samples, rows->tokens,
            rows->width, in_deltas, partial
    };
    uint32_t processors;
    TRY(processors_of(&processors));
    const uint32_t most = blocks_beside(processors, attention->spared, attention->heads);
    const struct launch launch = {dim3(attention->heads, rows->samples < most ? rows->samples : most),
                                  128 * BACK_GROUPS, sizeof(struct back_memory)};
    TRY(allow(hopper_back_kernel<T>, &launch));
    hopper_back_kernel<T><<<launch.grid, launch.threads, launch.bytes, stream>>>(plan);
    return CUDA_LAUNCHED("the backward kernel of attention");
}

EACH_HALF(hopper_fits)
EACH_HALF(hopper_forward)
EACH_HALF(hopper_backward)
