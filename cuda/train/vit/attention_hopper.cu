/* Attention for compute capability 9.0 (H100, H200), for heads of 64 values and up to MAIN + LAST tokens, but
 * more than 128: with fewer, a warpgroup would have none. These kernels compute what those of attention.cu
 * compute, but with wgmma, whose operands are in shared memory.
 *
 * A block processes a head of several samples. It has MAIN_GROUPS warpgroups, each of which has 64 of the
 * first MAIN tokens, and a last warpgroup for all else, so that these never wait for memory: it loads the
 * next sample, and computes what concerns the tokens from MAIN on, of which there are LAST at most (a picture
 * of 14 x 14 patches has 197 tokens). They are columns of its products, so wgmma does not multiply 64 rows
 * for a few tokens. Results are staged in shared memory, from which bulk copies write them. */
#include "train/vit/attention.cuh"
#include "train/vit/hopper.cuh"

#define DEPTH       64
#define MAIN_GROUPS 3                      /* all warpgroups but the last */
#define MAIN        (MAIN_GROUPS * HEIGHT) /* tokens that these process */
#define LAST        8                      /* further tokens, at most */
#define ROWS        208                    /* MAIN + LAST, rounded up to a multiple of GROUP */
#define THREADS     (128 * MAIN_GROUPS + 128)
#define WARPS       (THREADS / 32)

/* Registers per thread of the other warpgroups, and of the last one. */
#define FORWARD_MAIN_REGISTERS 152
#define FORWARD_LAST_REGISTERS 56
#define BACK_MAIN_REGISTERS    144
#define BACK_LAST_REGISTERS    80

/* Rows of a head in shared memory, in the format of hopper.cuh. */
struct tile {
    tile_row row[ROWS];
};

/* Returns its argument. The compiler computes what depends on it in each iteration of a loop: there are too
 * few registers for values of all iterations. */
static __device__ __forceinline__ uint32_t anew(uint32_t number)
{
    asm volatile("" : "+r"(number));
    return number;
}

/* Arrives at a barrier, for all lanes of a warp. */
static __device__ __forceinline__ void arrive(uint64_t *barrier)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        barrier_arrive(barrier);
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

/* Stages the sums of a warp's 16 rows, times `factor`, in 16 rows of a tile. Rows that are not `inside` (of
 * the upper 8 rows, and of the lower 8) are zeros. */
template <class T>
static __device__ __forceinline__ void stage_rows(tile_row *rows, const float (&sums)[DEPTH / 2],
                                                  const float factor[2], const bool inside[2])
{
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        uint32_t word[4];
        fragment_of<T>(sums, step, factor, word);
#pragma unroll
        for (int i = 0; i < 4; i++)
            word[i] = inside[i % 2] ? word[i] : 0;
        put_fragment(rows, 0, 16 * step, word);
    }
}

/* Starts sums = rows others^T, for the warpgroup's 64 rows and N other rows; `a` and `b` describe them. */
template <class T, int N>
static __device__ __forceinline__ void start_scores(float (&sums)[N / 2], uint64_t a, uint64_t b)
{
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++)
        wgmma<T, N, 0, 0>(sums, a + step * WGMMA_NEXT, b + step * WGMMA_NEXT, step > 0);
    wgmma_commit();
}

/* Starts sums += weights others, or sums = weights others, for N other rows, described by `b`. */
template <class T, int N, bool ADD = true>
static __device__ __forceinline__ void start_weighted(float (&sums)[DEPTH / 2],
                                                      const uint32_t (&weights)[N / 16][4], uint64_t b)
{
#pragma unroll
    for (int step = 0; step < N / 16; step++)
        wgmma<T, DEPTH, 1>(sums, weights[step], b + step * WGMMA_NEXT_TRANSPOSED, ADD || step > 0);
    wgmma_commit();
}

/* Starts sums = columns^T others, for the 64 columns of ROWS rows, described by `a`, and the LAST columns of
 * `others`, which wgmma_pieces() can describe. */
template <class T>
static __device__ __forceinline__ void start_columns(float (&sums)[LAST / 2], uint64_t a,
                                                     const uint16_t (&others)[ROWS][LAST])
{
    const uint64_t b = wgmma_pieces(shared_at(others) / 16, 8, 0);
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++)
        wgmma<T, LAST, 1, 1>(sums, a + step * WGMMA_NEXT_TRANSPOSED, b + step * 16, step > 0);
    wgmma_commit();
}

/* Returns the first of 64 tokens. Of the last 64, only those from MAIN on are new, which the last warp has.
 */
static __device__ __forceinline__ uint32_t last_begin(int group)
{
    return group < MAIN_GROUPS ? group * HEIGHT : ROWS - HEIGHT;
}

/* ---- Forward ---- */

/* `weights` has those of the tokens from MAIN on. `most` and `sum` have, for each warp of the last warpgroup,
 * the largest score and the sum of the exponentials of the warp's keys. */
struct forward_memory {
    struct head_tiles {
        struct tile queries, keys, values;
    } samples[2];
    uint16_t weights[ROWS][LAST];
    float most[4][LAST], sum[4][LAST];
    uint64_t full[2], empty[2];
};

template <class T> struct forward_plan {
    CUtensorMap inputs, outputs; /* in parts of ROWS and of 16 rows */
    uint32_t samples, tokens, width;
    T *results;
    float *logs;
};

template <class T>
static __device__ __forceinline__ void load_sample(struct forward_memory *memory,
                                                   const struct forward_plan<T> &plan, uint32_t sample,
                                                   uint32_t number)
{
    struct forward_memory::head_tiles *to = &memory->samples[number % 2];
    uint64_t *full = &memory->full[number % 2];
    barrier_wait(&memory->empty[number % 2], number / 2 % 2 ^ 1);
    barrier_expect(full, sizeof *to);
    sample_load(to->queries.row, &plan.inputs, blockIdx.x * DEPTH, sample, full);
    sample_load(to->keys.row, &plan.inputs, plan.width + blockIdx.x * DEPTH, sample, full);
    sample_load(to->values.row, &plan.inputs, 2 * plan.width + blockIdx.x * DEPTH, sample, full);
}

/* Adds N keys, from key `first` on, to the softmax and the sums of a warpgroup's queries, from their scores,
 * which are complete, as the sums are. Only the first `valid` of these keys exist. */
template <class T, int N, bool FIRST>
static __device__ __forceinline__ void take_keys(struct forward_memory::head_tiles *in, uint32_t first,
                                                 uint32_t valid, struct softmax *softmax,
                                                 float (&sums)[DEPTH / 2], float (&scores)[N / 2])
{
    const float factor = LOG2E / sqrtf((float)DEPTH), ones[2] = {1, 1};
    float none[DEPTH / 2] = {};
    uint32_t weights[N / 16][4];
    wgmma_ended(scores);
    if (!FIRST)
        wgmma_ended(sums);
    take_scores<DEPTH, N>(softmax, scores, factor, valid, FIRST ? none : sums);
#pragma unroll
    for (int step = 0; step < N / 16; step++)
        fragment_of<T>(scores, step, ones, weights[step]);
    wgmma_fence();
    start_weighted<T, N, !FIRST>(sums, weights, wgmma_tile(in->values.row[first]));
}

/* Computes the outputs of the warpgroup's 64 tokens in all samples of the block. */
template <class T>
static __device__ __forceinline__ void forward_main(struct forward_memory *memory,
                                                    const struct forward_plan<T> &plan, uint32_t group)
{
    const uint32_t lane = threadIdx.x % 32, begin = group * HEIGHT, tokens = plan.tokens;
    const uint32_t first = begin + threadIdx.x / 32 % 4 * GROUP;
    const bool all[2] = {true, true}; /* bulk copies leave out rows that do not exist */
    uint32_t number = 0;
    for (uint32_t sample = blockIdx.y; sample < plan.samples; sample += gridDim.y, number++) {
        struct forward_memory::head_tiles *in = &memory->samples[number % 2];
        const uint64_t queries = wgmma_tile(in->queries.row[begin]);
        float sums[DEPTH / 2], scale[2], even[64 / 2], odd[64 / 2], last[16 / 2];
        struct softmax softmax = {{-INFINITY, -INFINITY}, {}};
        barrier_wait(&memory->full[number % 2], number / 2 % 2);
        wgmma_fence();
        start_scores<T, 64>(even, queries, wgmma_tile(&in->keys));
        start_scores<T, 64>(odd, queries, wgmma_tile(in->keys.row[64]));
        if (number > 0) {
            if (lane == 0)
                bulk_store_wait(); /* of the previous sample, whose memory is now free */
            arrive(&memory->empty[(number - 1) % 2]);
        }
        wgmma_wait<1>();
        take_keys<T, 64, true>(in, 0, 64, &softmax, sums, even);
        start_scores<T, 64>(even, queries, wgmma_tile(in->keys.row[128]));
        wgmma_wait<1>();
        take_keys<T, 64, false>(in, 64, 64, &softmax, sums, odd);
        start_scores<T, 16>(last, queries, wgmma_tile(in->keys.row[MAIN]));
        wgmma_wait<1>();
        take_keys<T, 64, false>(in, 128, tokens - 128, &softmax, sums, even);
        wgmma_wait<0>();
        take_keys<T, 16, false>(in, MAIN, tokens > MAIN ? tokens - MAIN : 0, &softmax, sums, last);
        for (int half = 0; half < 2; half++) {
            const float sum = row_sum(softmax.sum[half]);
            const uint32_t row = first + lane / 4 + 8 * half;
            scale[half] = 1 / sum;
            if (lane % 4 == 0 && row < tokens)
                plan.logs[((size_t)sample * gridDim.x + blockIdx.x) * tokens + row] =
                    softmax.most[half] + log2f(sum);
        }
        wgmma_wait<0>();
        wgmma_ended(sums);
        meet_group(); /* all warps have read the queries, which the outputs overwrite */
        stage_rows<T>(&in->queries.row[first], sums, scale, all);
        bulk_fence();
        __syncwarp();
        if (lane == 0 && first < tokens)
            sample_store(&in->queries.row[first], &plan.outputs, blockIdx.x * DEPTH, first, sample);
        __syncwarp();
    }
    if (lane == 0)
        bulk_store_wait();
}

/* Returns the maximum over the 8 lanes that hold a column. */
static __device__ __forceinline__ float column_max(float value)
{
    for (int apart = 4; apart < 32; apart *= 2)
        value = fmaxf(value, __shfl_xor_sync(~0u, value, apart));
    return value;
}

/* Computes the outputs of the tokens from MAIN on, times sum[0] and sum[1], for two tokens per lane: a matrix
 * (values, tokens) of which each warp has 16 rows. most[i]: their largest scores. */
template <class T>
static __device__ __forceinline__ void
forward_last(struct forward_memory *memory, struct forward_memory::head_tiles *in, uint32_t warp,
             uint32_t tokens, float (&sums)[LAST / 2], float (&most)[2], float (&sum)[2])
{
    const float factor = LOG2E / sqrtf((float)DEPTH);
    const uint32_t lane = threadIdx.x % 32, column = lane % 4 * 2;
    float scores[MAIN_GROUPS + 1][LAST / 2];
    wgmma_fence();
#pragma unroll
    for (int group = 0; group <= MAIN_GROUPS; group++)
        start_scores<T, LAST>(scores[group], wgmma_tile(in->keys.row[last_begin(group)]),
                              wgmma_tile(in->queries.row[MAIN]));
    wgmma_wait<0>();
#pragma unroll
    for (int group = 0; group <= MAIN_GROUPS; group++)
        wgmma_ended(scores[group]);
#pragma unroll
    for (int i = 0; i < LAST / 2; i++)
        if (warp < 3 || MAIN + lane / 4 + i / 2 * 8 >= tokens)
            scores[MAIN_GROUPS][i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float own = -INFINITY;
#pragma unroll
        for (int group = 0; group <= MAIN_GROUPS; group++)
            own = fmaxf(own, fmaxf(scores[group][i], scores[group][i + 2]));
        own = column_max(own);
        if (lane < 4)
            memory->most[warp][column + i] = factor * own;
    }
    meet_group();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float own = 0;
        most[i] = -INFINITY;
        for (int other = 0; other < 4; other++)
            most[i] = fmaxf(most[i], memory->most[other][column + i]);
#pragma unroll
        for (int group = 0; group <= MAIN_GROUPS; group++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float *score = &scores[group][2 * half + i];
                *score = exp2_of(fmaf(*score, factor, -most[i]));
                own += *score;
            }
        own = column_sum(own);
        if (lane < 4)
            memory->sum[warp][column + i] = own;
    }
#pragma unroll
    for (int group = 0; group <= MAIN_GROUPS; group++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (group < MAIN_GROUPS || warp == 3)
                *reinterpret_cast<uint32_t *>(
                    &memory->weights[last_begin(group) + 16 * warp + lane / 4 + 8 * half][column]) =
                    pack<T>(scores[group][2 * half], scores[group][2 * half + 1]);
    wgmma_publish();
    meet_group();
    wgmma_fence();
    start_columns<T>(sums, wgmma_tile(&in->values), memory->weights);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] = 0;
        for (int other = 0; other < 4; other++)
            sum[i] += memory->sum[other][column + i];
    }
    wgmma_wait<0>();
    wgmma_ended(sums);
}

/* Writes what forward_last() has computed. */
template <class T>
static __device__ __forceinline__ void write_last(const struct forward_plan<T> &plan, uint32_t sample,
                                                  uint32_t warp, const float (&sums)[LAST / 2],
                                                  const float (&most)[2], const float (&sum)[2])
{
    const uint32_t lane = threadIdx.x % 32, row = MAIN + lane / 4, token = MAIN + lane % 4 * 2;
    T *to = plan.results + ((size_t)sample * plan.tokens + row) * plan.width + blockIdx.x * DEPTH +
            16 * warp + lane % 4 * 2;
    const float scale[2] = {1 / sum[0], 1 / sum[1]};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t word = transpose8(pack<T>(sums[2 * half] * scale[0], sums[2 * half + 1] * scale[1]));
        if (row < plan.tokens)
            *reinterpret_cast<uint32_t *>(to + 8 * half) = word;
    }
    for (int i = 0; i < 2; i++)
        if (warp == 0 && lane < 4 && token + i < plan.tokens)
            plan.logs[((size_t)sample * gridDim.x + blockIdx.x) * plan.tokens + token + i] =
                most[i] + log2f(sum[i]);
}

/* Loads samples, and computes the outputs of tokens from MAIN on. */
template <class T>
static __device__ __forceinline__ void forward_rest(struct forward_memory *memory,
                                                    const struct forward_plan<T> &plan)
{
    const uint32_t warp = threadIdx.x / 32 % 4;
    const bool leads = threadIdx.x % 128 == 0;
    uint32_t number = 0;
    if (leads) {
        load_sample(memory, plan, blockIdx.y, 0);
        if (blockIdx.y + gridDim.y < plan.samples)
            load_sample(memory, plan, blockIdx.y + gridDim.y, 1);
    }
    __syncwarp();
    for (uint32_t sample = blockIdx.y; sample < plan.samples; sample += gridDim.y, number++) {
        /* Also without tokens from MAIN on: only then is `empty` in its phase for this sample. */
        barrier_wait(&memory->full[number % 2], number / 2 % 2);
        if (leads && number > 0 && sample + gridDim.y < plan.samples)
            load_sample(memory, plan, sample + gridDim.y, number + 1);
        __syncwarp();
        if (plan.tokens > MAIN) {
            float sums[LAST / 2], most[2], sum[2];
            forward_last<T>(memory, &memory->samples[number % 2], warp, plan.tokens, sums, most, sum);
            arrive(&memory->empty[number % 2]);
            write_last<T>(plan, sample, warp, sums, most, sum);
        } else {
            arrive(&memory->empty[number % 2]);
        }
    }
}

/* Block (head, y) processes the head of samples y, y + gridDim.y, ... */
template <class T>
static __global__ void __launch_bounds__(THREADS, 1)
    hopper_kernel(const __grid_constant__ struct forward_plan<T> plan)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    struct forward_memory *memory = reinterpret_cast<struct forward_memory *>(shared);
    const uint32_t group = own_group();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(&memory->full[i], 1);
            barrier_init(&memory->empty[i], WARPS);
        }
        bulk_fence();
    }
    __syncthreads();
    wait_for_previous();
    allow_next();
    if (group < MAIN_GROUPS) {
        raise_registers<FORWARD_MAIN_REGISTERS>();
        forward_main<T>(memory, plan, group);
    } else {
        lower_registers<FORWARD_LAST_REGISTERS>();
        forward_rest<T>(memory, plan);
    }
}

/* ---- Backward ---- */

#define STEP 48 /* queries that a warpgroup processes at a time */

/* `ds` has one tile per 64 queries, with one row per key. `left` has ds of the next 16 queries, 8 at a time.
 * After a sample, `ds` has each warp's gradients of queries (rows 0 to 63), keys (64 to 127) and values (128
 * to 191), on their way to memory. `numbers` has one entry for this sample and one for the next. `weights`
 * and `last_ds` are those of the keys from MAIN on.
 *
 * Barriers: `keys_full`, `queries_full` and `rest_full`: loads have ended. `finished`: all sums over the
 * queries of a sample are complete. `staged`: its gradients are in `ds`, and its keys are no longer needed.
 * `written`: they have been read from there, and the numbers of the next sample are complete. */
struct back_memory {
    struct tile keys[2], values, queries, deltas, ds[MAIN_GROUPS];
    uint16_t left[2][ROWS][LAST], weights[ROWS][LAST], last_ds[ROWS][LAST], ones[16][LAST];
    struct query_numbers {
        float logs[ROWS], dots[ROWS];
    } numbers[2];
    uint64_t keys_full[2], queries_full, rest_full, finished, staged, written;
};

/* The arguments of vit_attention_backward() that the kernel needs. */
template <class T> struct back_plan {
    CUtensorMap inputs, forward, deltas, results; /* in parts of ROWS rows, but 16 for `results` */
    const T *outputs, *out_deltas;
    const float *logs;
    uint32_t samples, tokens, width;
    T *row_deltas;
    float *partial;
};

template <class T>
static __device__ __forceinline__ void load_keys(struct back_memory *memory, const struct back_plan<T> &plan,
                                                 uint32_t sample, uint32_t number)
{
    uint64_t *full = &memory->keys_full[number % 2];
    barrier_expect(full, sizeof(struct tile));
    sample_load(memory->keys[number % 2].row, &plan.inputs, plan.width + blockIdx.x * DEPTH, sample, full);
}

template <class T>
static __device__ __forceinline__ void load_rest(struct back_memory *memory, const struct back_plan<T> &plan,
                                                 uint32_t sample)
{
    barrier_expect(&memory->queries_full, sizeof(struct tile));
    sample_load(memory->queries.row, &plan.inputs, blockIdx.x * DEPTH, sample, &memory->queries_full);
    barrier_expect(&memory->rest_full, 2 * sizeof(struct tile));
    sample_load(memory->values.row, &plan.inputs, 2 * plan.width + blockIdx.x * DEPTH, sample,
                &memory->rest_full);
    sample_load(memory->deltas.row, &plan.deltas, blockIdx.x * DEPTH, sample, &memory->rest_full);
}

/* Starts loading into L2 what load_rest() and load_numbers() need. */
template <class T>
static __device__ __forceinline__ void fetch_rest(const struct back_plan<T> &plan, uint32_t sample)
{
    const uint32_t column = blockIdx.x * DEPTH;
    sample_fetch(&plan.forward, column, sample);
    sample_fetch(&plan.deltas, column, sample);
    sample_fetch(&plan.inputs, column, sample);
    sample_fetch(&plan.inputs, 2 * plan.width + column, sample);
}

/* Loads 16 bytes. The compiler does not move this load behind the ones that follow, to save registers. */
static __device__ __forceinline__ uint4 load_early(const void *from)
{
    uint4 words;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}

/* Computes e[i] (see attention.cuh) with eight threads per query, and copies the logarithms. Queries after
 * the last get a logarithm of infinity, so their weights are 0. `thread` is a number below COUNT. Starts
 * BATCH loads at a time. */
template <class T, int COUNT>
static __device__ __forceinline__ void load_numbers(const struct back_plan<T> &plan, uint32_t sample,
                                                    struct back_memory::query_numbers *numbers,
                                                    uint32_t thread)
{
    constexpr int BATCH = 7, ROUNDS = (ROWS + COUNT / 8 - 1) / (COUNT / 8);
    thread = anew(thread);
    const size_t head = (size_t)sample * plan.tokens * plan.width + blockIdx.x * DEPTH + thread % 8 * 8;
    const float *logs = plan.logs + ((size_t)sample * gridDim.x + blockIdx.x) * plan.tokens;
#pragma unroll
    for (int first = 0; first < ROUNDS; first += BATCH) {
        uint4 outputs[BATCH], deltas[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH && first + i < ROUNDS; i++) {
            const uint32_t row = thread / 8 + (first + i) * COUNT / 8;
            const size_t at = head + (row < plan.tokens ? row : 0) * (size_t)plan.width;
            outputs[i] = load_early(plan.outputs + at);
            deltas[i] = load_early(plan.out_deltas + at);
        }
#pragma unroll
        for (int i = 0; i < BATCH && first + i < ROUNDS; i++) {
            const uint32_t row = thread / 8 + (first + i) * COUNT / 8;
            const uint32_t words[2][4] = {{outputs[i].x, outputs[i].y, outputs[i].z, outputs[i].w},
                                          {deltas[i].x, deltas[i].y, deltas[i].z, deltas[i].w}};
            float sum = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 output = values_of<T>(words[0][j]), delta = values_of<T>(words[1][j]);
                sum = fmaf(output.x, delta.x, sum);
                sum = fmaf(output.y, delta.y, sum);
            }
            for (int apart = 4; apart > 0; apart /= 2)
                sum += __shfl_xor_sync(~0u, sum, apart);
            if (thread % 8 == 0 && row < ROWS)
                numbers->dots[row] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < (ROWS + COUNT - 1) / COUNT; i++) {
        const uint32_t row = thread + i * COUNT;
        if (row < ROWS)
            numbers->logs[row] = row < plan.tokens ? logs[row] : INFINITY;
    }
}

/* Computes the weights of N queries from their scores. `logs` are those of the first query. */
template <class T, int N>
static __device__ __forceinline__ void weigh(const float (&scores)[N / 2], const float *logs,
                                             uint32_t (&weights)[N / 16][4])
{
    const float factor = LOG2E / sqrtf((float)DEPTH);
#pragma unroll
    for (int step = 0; step < N / 16; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 log =
                *reinterpret_cast<const float2 *>(logs + 16 * step + i / 2 * 8 + threadIdx.x % 4 * 2);
            const float *value = scores + 8 * step + 2 * i;
            weights[step][i] =
                pack<T>(exp2_of(fmaf(value[0], factor, -log.x)), exp2_of(fmaf(value[1], factor, -log.y)));
        }
}

/* Computes ds of N queries from `products`, which are g . v. `inside`: these keys exist. For others, ds must
 * be 0: otherwise it could be infinite, and infinity times 0 (the key) is NaN. */
template <class T, int N>
static __device__ __forceinline__ void differ(const float (&products)[N / 2], const float *dots,
                                              const uint32_t (&weights)[N / 16][4], const bool inside[2],
                                              uint32_t (&ds)[N / 16][4])
{
#pragma unroll
    for (int step = 0; step < N / 16; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 dot =
                *reinterpret_cast<const float2 *>(dots + 16 * step + i / 2 * 8 + threadIdx.x % 4 * 2);
            const float2 weight = values_of<T>(weights[step][i]);
            const float *value = products + 8 * step + 2 * i;
            ds[step][i] =
                inside[i % 2] ? pack<T>(weight.x * (value[0] - dot.x), weight.y * (value[1] - dot.y)) : 0;
        }
}

/* Starts sums = ds^T keys for the warpgroup's queries. */
template <class T>
static __device__ __forceinline__ void start_queries(uint64_t a, uint64_t b, float (&sums)[DEPTH / 2])
{
    wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < ROWS / 16; step++)
        wgmma<T, DEPTH, 1, 1>(sums, a + step * WGMMA_NEXT_TRANSPOSED, b + step * WGMMA_NEXT_TRANSPOSED,
                              step > 0);
    wgmma_commit();
}

/* Computes the gradients of 64 queries, keys and values in all samples of the block, from STEP queries at a
 * time. `products` are first the scores, then g . v. While a warpgroup waits for them, others compute. */
template <class T>
static __device__ __forceinline__ void back_main(struct back_memory *memory, const struct back_plan<T> &plan,
                                                 uint32_t group)
{
    const float factor = 1 / sqrtf((float)DEPTH), factors[2] = {factor, factor}, ones[2] = {1, 1};
    const uint32_t lane = threadIdx.x % 32, own = threadIdx.x / 32 % 4 * GROUP, begin = group * HEIGHT,
                   first = begin + own, tokens = plan.tokens;
    const bool inside[2] = {first + lane / 4 < tokens, first + lane / 4 + 8 < tokens};
    const uint64_t row = sizeof(tile_row) >> 4; /* in units of descriptors */
    const uint64_t value_rows = wgmma_tile(memory->values.row[begin]), queries = wgmma_tile(&memory->queries),
                   deltas = wgmma_tile(&memory->deltas);
    uint32_t number = 0;
    for (uint32_t sample = blockIdx.y; sample < plan.samples; sample += gridDim.y, number++) {
        const struct back_memory::query_numbers *numbers = &memory->numbers[number % 2];
        const uint64_t keys = wgmma_tile(&memory->keys[number % 2]), key_rows = keys + begin * row;
        float key_sums[DEPTH / 2] = {}, value_sums[DEPTH / 2] = {}, products[STEP / 2], last[16 / 2];
        uint32_t last_weights[1][4], last_ds[1][4];
        barrier_wait(&memory->keys_full[number % 2], number / 2 % 2);
        barrier_wait(&memory->queries_full, number % 2);
        wgmma_fence();
        start_scores<T, STEP>(products, key_rows, queries);
        if (number > 0) {
            if (lane == 0)
                bulk_store_wait();
            arrive(&memory->written);
        }
        barrier_wait(&memory->written, number % 2 ^ 1);
        barrier_wait(&memory->rest_full, number % 2);
#pragma unroll
        for (uint32_t query = 0; query < MAIN; query += STEP) {
            uint32_t weights[STEP / 16][4], ds[STEP / 16][4];
            if (query == 0)
                wgmma_wait<0>();
            else
                wgmma_wait<1>();
            wgmma_ended(products);
            weigh<T, STEP>(products, numbers->logs + query, weights);
            wgmma_fence();
            start_scores<T, STEP>(products, value_rows, deltas + query * row);
            start_weighted<T, STEP>(value_sums, weights, deltas + query * row);
            wgmma_wait<1>();
            wgmma_ended(products);
            differ<T, STEP>(products, numbers->dots + query, weights, inside, ds);
            wgmma_fence();
            if (query + STEP < MAIN)
                start_scores<T, STEP>(products, key_rows, queries + (query + STEP) * row);
            else
                start_scores<T, 16>(last, key_rows, queries + MAIN * row);
            start_weighted<T, STEP>(key_sums, ds, queries + query * row);
#pragma unroll
            for (int step = 0; step < STEP / 16; step++)
                put_fragment(memory->ds[(query + 16 * step) / 64].row, first, (query + 16 * step) % 64,
                             ds[step]);
        }
        wgmma_wait<1>(); /* at most LAST further queries */
        wgmma_ended(last);
        weigh<T, 16>(last, numbers->logs + MAIN, last_weights);
        wgmma_fence();
        start_scores<T, 16>(last, value_rows, deltas + MAIN * row);
        start_weighted<T, 16>(value_sums, last_weights, deltas + MAIN * row);
        wgmma_wait<1>();
        wgmma_ended(last);
        differ<T, 16>(last, numbers->dots + MAIN, last_weights, inside, last_ds);
        store4(memory->left[lane / 16][first + lane % 16], last_ds[0]);
        wgmma_fence();
        start_weighted<T, 16>(key_sums, last_ds, queries + MAIN * row);
        wgmma_wait<0>();
        wgmma_ended(value_sums);
        wgmma_ended(key_sums);
        wgmma_publish();
        arrive(&memory->finished);
        barrier_wait(&memory->finished, number % 2);
        if (threadIdx.x == 0 && sample + gridDim.y < plan.samples)
            load_rest(memory, plan, sample + gridDim.y);
        __syncwarp();
        float query_sums[DEPTH / 2];
        start_queries<T>(wgmma_tile(&memory->ds[group]), keys, query_sums);
        wgmma_wait<0>();
        wgmma_ended(query_sums);
        meet_group(); /* all warps have read the tile of ds */
        tile_row *staged = memory->ds[group].row + anew(own);
        stage_rows<T>(staged, query_sums, factors, inside);
        stage_rows<T>(staged + HEIGHT, key_sums, factors, inside);
        stage_rows<T>(staged + 2 * HEIGHT, value_sums, ones, inside);
        bulk_fence();
        arrive(&memory->staged);
        if (lane == 0 && first < tokens)
            for (uint32_t which = 0; which < 3; which++)
                sample_store(staged + which * HEIGHT, &plan.results, which * plan.width + blockIdx.x * DEPTH,
                             first, sample);
        __syncwarp();
    }
    if (lane == 0)
        bulk_store_wait();
}

/* Computes weights and ds for the keys from MAIN on. Each warp has 16 of 64 queries. The last 64 queries
 * begin at ROWS - 64, and only those from MAIN on, which the last warp has, are new. */
template <class T>
static __device__ __forceinline__ void last_weights(struct back_memory *memory, struct tile *keys,
                                                    const struct back_memory::query_numbers *numbers,
                                                    uint32_t warp, uint32_t tokens)
{
    const float factor = LOG2E / sqrtf((float)DEPTH);
    const uint32_t lane = anew(threadIdx.x % 32), column = lane % 4 * 2;
    const uint64_t key = wgmma_tile(keys->row[MAIN]), value = wgmma_tile(memory->values.row[MAIN]);
    const bool inside[2] = {MAIN + column < tokens, MAIN + column + 1 < tokens};
    float scores[MAIN_GROUPS + 1][LAST / 2], products[MAIN_GROUPS + 1][LAST / 2];
    wgmma_fence();
#pragma unroll
    for (int group = 0; group <= MAIN_GROUPS; group++) {
        start_scores<T, LAST>(scores[group], wgmma_tile(memory->queries.row[last_begin(group)]), key);
        start_scores<T, LAST>(products[group], wgmma_tile(memory->deltas.row[last_begin(group)]), value);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int group = 0; group <= MAIN_GROUPS; group++) {
        wgmma_ended(scores[group]);
        wgmma_ended(products[group]);
        if (group == MAIN_GROUPS && warp < 3)
            break;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t query = last_begin(group) + 16 * warp + lane / 4 + 8 * half;
            const float log = numbers->logs[query], dot = numbers->dots[query];
            const uint32_t weights = pack<T>(exp2_of(fmaf(scores[group][2 * half], factor, -log)),
                                             exp2_of(fmaf(scores[group][2 * half + 1], factor, -log)));
            const float2 weight = values_of<T>(weights);
            const uint32_t ds = pack<T>(inside[0] ? weight.x * (products[group][2 * half] - dot) : 0,
                                        inside[1] ? weight.y * (products[group][2 * half + 1] - dot) : 0);
            *reinterpret_cast<uint32_t *>(&memory->weights[query][column]) = weights;
            *reinterpret_cast<uint32_t *>(&memory->last_ds[query][column]) = ds;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint16_t *to = group < MAIN_GROUPS
                                   ? part_at(memory->ds[group].row + MAIN, column + i, 2 * warp + half)
                                   : memory->left[half][MAIN + column + i];
                to[lane / 4] = (uint16_t)(ds >> 16 * i);
            }
        }
    }
}

/* Writes a warp's 16 columns, from `first` on, of a gradient of the tokens from MAIN on. Sets columns[0] and
 * columns[1] to the sums over these tokens of columns first + lane / 4 and first + lane / 4 + 8. */
template <class T>
static __device__ __forceinline__ void write_last(const struct back_plan<T> &plan, uint32_t sample,
                                                  uint32_t which, uint32_t first, float factor,
                                                  const float (&sums)[LAST / 2], float (&columns)[2])
{
    const uint32_t lane = threadIdx.x % 32, row = MAIN + lane / 4, token = MAIN + lane % 4 * 2;
    T *to = plan.row_deltas + ((size_t)sample * plan.tokens + row) * 3 * plan.width + which * plan.width +
            blockIdx.x * DEPTH + first + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float a = factor * sums[2 * half], b = factor * sums[2 * half + 1];
        const uint32_t word = transpose8(pack<T>(a, b));
        if (row < plan.tokens)
            *reinterpret_cast<uint32_t *>(to + 8 * half) = word;
        columns[half] = row_sum((token < plan.tokens ? a : 0) + (token + 1 < plan.tokens ? b : 0));
    }
}

/* Adds the sums of the staged gradients over the tokens to `columns`; see write_last(). */
template <class T>
static __device__ __forceinline__ void add_columns(struct back_memory *memory, float (&columns)[3][2])
{
    const uint64_t ones = wgmma_pieces(shared_at(memory->ones) / 16, 8, 0);
    float sums[3][LAST / 2];
    wgmma_fence();
#pragma unroll
    for (int which = 0; which < 3; which++)
#pragma unroll
        for (int group = 0; group < MAIN_GROUPS; group++)
#pragma unroll
            for (int step = 0; step < HEIGHT / 16; step++)
                wgmma<T, LAST, 1, 1>(sums[which],
                                     wgmma_tile(memory->ds[group].row[which * HEIGHT + 16 * step]), ones,
                                     group + step > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int which = 0; which < 3; which++) {
        wgmma_ended(sums[which]);
        for (int half = 0; half < 2; half++)
            columns[which][half] += sums[which][2 * half];
    }
}

/* Loads keys and numbers, computes the gradients of queries, keys and values from MAIN on, and the sums of
 * all gradients over the tokens. Warp w has columns 16 w to 16 w + 15. */
template <class T>
static __device__ __forceinline__ void back_rest(struct back_memory *memory, const struct back_plan<T> &plan)
{
    const float factor = 1 / sqrtf((float)DEPTH);
    const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, first = 16 * warp,
                   tokens = plan.tokens;
    const bool leads = threadIdx.x % 128 == 0;
    uint32_t number = 0;
    if (leads) {
        load_keys(memory, plan, blockIdx.y, 0);
        load_rest(memory, plan, blockIdx.y);
        if (blockIdx.y + gridDim.y < plan.samples)
            load_keys(memory, plan, blockIdx.y + gridDim.y, 1);
    }
    __syncwarp();
    for (uint32_t sample = blockIdx.y; sample < plan.samples; sample += gridDim.y, number++) {
        const uint32_t next = sample + gridDim.y;
        struct tile *keys = &memory->keys[number % 2];
        float columns[3][2] = {};
        if (leads && next < plan.samples)
            fetch_rest(plan, next);
        __syncwarp();
        barrier_wait(&memory->keys_full[number % 2], number / 2 % 2);
        barrier_wait(&memory->queries_full, number % 2);
        barrier_wait(&memory->rest_full, number % 2);
        if (tokens > MAIN) {
            float key_sums[LAST / 2], value_sums[LAST / 2];
            last_weights<T>(memory, keys, &memory->numbers[number % 2], warp, tokens);
            wgmma_publish();
            meet_group();
            wgmma_fence();
            start_columns<T>(value_sums, wgmma_tile(&memory->deltas), memory->weights);
            start_columns<T>(key_sums, wgmma_tile(&memory->queries), memory->last_ds);
            wgmma_wait<0>();
            wgmma_ended(value_sums);
            wgmma_ended(key_sums);
            write_last<T>(plan, sample, 1, first, factor, key_sums, columns[1]);
            write_last<T>(plan, sample, 2, first, 1, value_sums, columns[2]);
        }
        arrive(&memory->finished);
        if (next < plan.samples)
            load_numbers<T, 128>(plan, next, &memory->numbers[(number + 1) % 2], threadIdx.x % 128);
        barrier_wait(&memory->finished, number % 2);
        if (tokens > MAIN) {
            float sums[LAST / 2];
            wgmma_fence();
            start_columns<T>(sums, wgmma_tile(keys), memory->left[0]);
            wgmma_wait<0>();
            wgmma_ended(sums);
            write_last<T>(plan, sample, 0, first, factor, sums, columns[0]);
        }
        barrier_wait(&memory->staged, number % 2);
        meet_group(); /* all warps have read the keys */
        if (leads && next + gridDim.y < plan.samples)
            load_keys(memory, plan, next + gridDim.y, number);
        __syncwarp();
        add_columns<T>(memory, columns);
        arrive(&memory->written);
        if (lane % 4 == 0)
            for (uint32_t which = 0; which < 3; which++)
                for (uint32_t half = 0; half < 2; half++)
                    plan.partial[((size_t)sample * 3 + which) * plan.width + blockIdx.x * DEPTH + first +
                                 lane / 4 + 8 * half] = columns[which][half];
    }
}

/* Block (head, y) processes the head of samples y, y + gridDim.y, ... */
template <class T>
static __global__ void __launch_bounds__(THREADS, 1)
    hopper_back_kernel(const __grid_constant__ struct back_plan<T> plan)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    struct back_memory *memory = reinterpret_cast<struct back_memory *>(shared);
    const uint32_t group = own_group();
    if (threadIdx.x == 0) {
        barrier_init(&memory->keys_full[0], 1);
        barrier_init(&memory->keys_full[1], 1);
        barrier_init(&memory->queries_full, 1);
        barrier_init(&memory->rest_full, 1);
        barrier_init(&memory->finished, WARPS);
        barrier_init(&memory->staged, 4 * MAIN_GROUPS);
        barrier_init(&memory->written, WARPS);
        bulk_fence();
    }
    /* ds of the keys after the last ones, which no warp has */
    for (uint32_t i = threadIdx.x; i < (ROWS - MAIN) * TILE_WIDTH * MAIN_GROUPS; i += THREADS)
        memory->ds[i / ((ROWS - MAIN) * TILE_WIDTH)]
            .row[MAIN + i / TILE_WIDTH % (ROWS - MAIN)][i % TILE_WIDTH] = 0;
    for (uint32_t i = threadIdx.x; i < 2 * ROWS * LAST; i += THREADS)
        memory->left[i / (ROWS * LAST)][i / LAST % ROWS][i % LAST] = 0;
    if (threadIdx.x < 16 * LAST)
        memory->ones[threadIdx.x / LAST][threadIdx.x % LAST] = (uint16_t)pack<T>(1, 1);
    wgmma_publish();
    load_numbers<T, THREADS>(plan, blockIdx.y, memory->numbers, threadIdx.x);
    __syncthreads();
    if (group < MAIN_GROUPS) {
        raise_registers<BACK_MAIN_REGISTERS>();
        back_main<T>(memory, plan, group);
    } else {
        lower_registers<BACK_LAST_REGISTERS>();
        back_rest<T>(memory, plan);
    }
}

/* ---- Launches ---- */

template <class T> enum status hopper_fits(const struct vit_attention<T> *attention, bool *fits)
{
    TRY(on_hopper(fits));
    *fits = *fits && attention->rows.tokens > MAIN - HEIGHT && attention->rows.tokens <= MAIN + LAST &&
            attention->rows.width / attention->heads == DEPTH;
    return STATUS_OK;
}

/* The blocks of a kernel: all run at the same time, one per multiprocessor. */
static enum status grid_of(const struct vit_rows *rows, uint32_t heads, uint32_t spared, dim3 *grid)
{
    uint32_t processors;
    TRY(processors_of(&processors));
    const uint32_t most = blocks_beside(processors, spared, heads);
    *grid = dim3(heads, rows->samples < most ? rows->samples : most);
    return STATUS_OK;
}

template <class T> enum status hopper_forward(const struct vit_attention<T> *attention, cudaStream_t stream)
{
    const struct vit_rows *rows = &attention->rows;
    struct forward_plan<T> plan = {
    };
    struct early_launch launch = {dim3(), THREADS, sizeof(struct forward_memory), 1};
    TRY(describe_samples<T>(attention->inputs, rows->samples, rows->tokens, 3 * rows->width, ROWS,
                            &plan.inputs));
    TRY(describe_samples<T>(attention->outputs, rows->samples, rows->tokens, rows->width, 16, &plan.outputs));
    plan.samples = rows->samples;
    plan.tokens = rows->tokens;
    plan.width = rows->width;
    plan.results = attention->outputs;
    plan.logs = attention->logs;
    TRY(grid_of(rows, attention->heads, 0, &launch.grid));
    return launch_early(hopper_kernel<T>, &launch, stream, plan);
}

template <class T>
enum status hopper_backward(const struct vit_attention<T> *attention, const T *out_deltas, T *in_deltas,
                            float *partial, cudaStream_t stream)
{
    const struct vit_rows *rows = &attention->rows;
    struct back_plan<T> plan = {
    };
    struct launch launch = {dim3(), THREADS, sizeof(struct back_memory)};
    TRY(describe_samples<T>(attention->inputs, rows->samples, rows->tokens, 3 * rows->width, ROWS,
                            &plan.inputs));
    TRY(describe_samples<T>(attention->outputs, rows->samples, rows->tokens, rows->width, ROWS,
                            &plan.forward));
    TRY(describe_samples<T>(out_deltas, rows->samples, rows->tokens, rows->width, ROWS, &plan.deltas));
    TRY(describe_samples<T>(in_deltas, rows->samples, rows->tokens, 3 * rows->width, 16, &plan.results));
    plan.outputs = attention->outputs;
    plan.out_deltas = out_deltas;
    plan.logs = attention->logs;
    plan.samples = rows->samples;
    plan.tokens = rows->tokens;
    plan.width = rows->width;
    plan.row_deltas = in_deltas;
    plan.partial = partial;
    TRY(grid_of(rows, attention->heads, attention->spared, &launch.grid));
    TRY(allow(hopper_back_kernel<T>, &launch));
    hopper_back_kernel<T><<<launch.grid, launch.threads, launch.bytes, stream>>>(plan);
    return CUDA_LAUNCHED("the backward kernel of attention");
}

EACH_HALF(hopper_fits)
EACH_HALF(hopper_forward)
EACH_HALF(hopper_backward)
