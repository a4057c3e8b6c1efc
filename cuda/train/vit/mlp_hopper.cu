/* The two linear layers of a block and the GELU between them, for compute capability 9.0 and tokens of at
 * most 192 values. The hidden values are four times as wide as the tokens, so reading and writing them takes
 * longer than the products. The forward pass keeps them in registers. The backward pass computes them again,
 * and writes what the gradients of the weights need: the GELU of the hidden values, and the gradients of the
 * hidden values. It goes on with the backward pass of the normalisation before the layers.
 *
 * A warpgroup has the HEIGHT rows of a group, and goes through the hidden values in chunks of CHUNK columns.
 * A block of GROUPS warpgroups shares the weights of a chunk, which come through a ring of stages. A block
 * processes every gridDim.x-th set of GROUPS groups. While one warpgroup computes GELU, another one
 * multiplies. So, backward, the second one begins each set after the first GELU of the first one: at equal
 * times, both would multiply, and then both compute GELU. */
#include <cuda.h>

#include "common/check.cuh"
#include "train/vit/norm_hopper.cuh"

#define CHUNK      64  /* hidden values that a warpgroup processes at a time */
#define TILES_MAX  3   /* tiles along a token: at most 192 values */
#define HIDDEN_MAX 768 /* hidden values per token */

/* ---- Weights ---- */

/* The weights of both layers for a chunk of hidden values: of the first layer (CHUNK, 64 TILES), of the
 * second (64 TILES, CHUNK). */
template <int TILES> struct mlp_weights {
    tile_row first[TILES][CHUNK], second[TILES * TILE_WIDTH];
};

/* Each turn, the warpgroups use the next chunk, in stage turn % STAGES. `full` and `empty` are barriers for
 * the two layers. */
template <int TILES, int STAGES> struct mlp_ring {
    struct mlp_weights<TILES> weights[STAGES];
    uint64_t full[2][STAGES], empty[2][STAGES];
};

/* A stage and the parity of its barriers in this turn. */
template <int STAGES> struct mlp_turn {
    uint32_t stage, parity;
};

template <int STAGES> static __device__ __forceinline__ void advance(struct mlp_turn<STAGES> *turn)
{
    turn->stage = turn->stage + 1 == STAGES ? 0 : turn->stage + 1;
    turn->parity ^= turn->stage == 0;
}

/* Starts loading a chunk of the first (`layer` is 0) or the second layer, when all warpgroups have released
 * the stage. */
template <int TILES, int STAGES>
static __device__ __forceinline__ void load_chunk(struct mlp_ring<TILES, STAGES> *ring,
                                                  const CUtensorMap *map, uint32_t layer,
                                                  struct mlp_turn<STAGES> turn, uint32_t chunk)
{
    struct mlp_weights<TILES> *into = &ring->weights[turn.stage];
    uint64_t *full = &ring->full[layer][turn.stage];
    barrier_wait(&ring->empty[layer][turn.stage], turn.parity ^ 1);
    barrier_expect(full, sizeof into->first);
    if (layer == 1)
        map_load(into->second, map, chunk * CHUNK, 0, full);
    for (int tile = 0; tile < TILES && layer == 0; tile++)
        map_load(into->first[tile], map, tile * TILE_WIDTH, chunk * CHUNK, full);
}

template <int TILES, int STAGES, class Plan>
static __device__ __forceinline__ void load_both(struct mlp_ring<TILES, STAGES> *ring, const Plan &plan,
                                                 struct mlp_turn<STAGES> turn, uint32_t chunk)
{
    load_chunk(ring, &plan.first, 0, turn, chunk);
    load_chunk(ring, &plan.second, 1, turn, chunk);
}

/* Call this when this warp's products that read the stage have ended. */
template <int TILES, int STAGES>
static __device__ __forceinline__ void release(struct mlp_ring<TILES, STAGES> *ring, uint32_t layer,
                                               uint32_t stage)
{
    if (threadIdx.x % 32 == 0)
        barrier_arrive(&ring->empty[layer][stage]);
}

template <int TILES, int STAGES>
static __device__ void open_ring(struct mlp_ring<TILES, STAGES> *ring, uint32_t groups)
{
    for (int layer = 0; layer < 2; layer++)
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(&ring->full[layer][stage], 1);
            barrier_init(&ring->empty[layer][stage], 4 * groups);
        }
}

/* Copies the bias of the first layer to shared memory; by all threads. */
template <class T> static __device__ void copy_bias(float (&bias)[HIDDEN_MAX], const T *from, uint32_t chunks)
{
    for (uint32_t i = 2 * threadIdx.x; i < chunks * CHUNK; i += 2 * blockDim.x)
        *reinterpret_cast<float2 *>(bias + i) = values_of<T>(*reinterpret_cast<const uint32_t *>(from + i));
}

/* Starts hidden = rows first^T + bias. */
template <class T, int TILES>
static __device__ __forceinline__ void start_hidden(tile_row (&rows)[TILES][HEIGHT],
                                                    const struct mlp_weights<TILES> *weights,
                                                    const float *bias, float (&hidden)[CHUNK / 2])
{
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
        const float2 by = *reinterpret_cast<const float2 *>(bias + 8 * n + threadIdx.x % 4 * 2);
        hidden[4 * n] = hidden[4 * n + 2] = by.x;
        hidden[4 * n + 1] = hidden[4 * n + 3] = by.y;
    }
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++)
            wgmma<T, CHUNK, 0, 0>(hidden, wgmma_tile(rows[tile]) + step * WGMMA_NEXT,
                                  wgmma_tile(weights->first[tile]) + step * WGMMA_NEXT, true);
}

/* ---- Rows ---- */

/* Starts loading the rows of group `group`; the first thread of a warpgroup does this. Rows after the last
 * are zeros. */
template <int TILES>
static __device__ __forceinline__ void load_group(tile_row (&rows)[TILES][HEIGHT], const CUtensorMap *map,
                                                  uint32_t group, uint64_t *barrier)
{
    if (threadIdx.x % 128 == 0) {
        barrier_expect(barrier, sizeof rows);
        for (int tile = 0; tile < TILES; tile++)
            map_load(rows[tile], map, tile * TILE_WIDTH, group * HEIGHT, barrier);
    }
    __syncwarp();
}

/* Adds `bias` to the sums of a warp's 16 rows, and writes them. Stages them in the same rows of `rows`, from
 * row `row` on. */
template <class T, int TILES>
static __device__ __forceinline__ void
write_group(tile_row (&rows)[TILES][HEIGHT], uint32_t row, uint32_t count,
            const float (&sums)[TILES * TILE_WIDTH / 2], const T *bias, T *to)
{
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t column = tile * TILE_WIDTH + 16 * step + i / 2 * 8 + threadIdx.x % 4 * 2;
                const float *sum = sums + tile * TILE_WIDTH / 2 + 8 * step + 2 * i;
                const float2 by = values_of<T>(*reinterpret_cast<const uint32_t *>(bias + column));
                word[i] = pack<T>(sum[0] + by.x, sum[1] + by.y);
            }
            put_fragment(rows[tile], row, 16 * step, word);
        }
        __syncwarp();
        write_rows16(rows[tile], row, count, to + tile * TILE_WIDTH, TILES * TILE_WIDTH);
    }
}

/* ---- Forward ---- */

#define FORWARD_STAGES 3

template <int TILES, int GROUPS> struct forward_memory {
    tile_row rows[GROUPS][TILES][HEIGHT];
    struct mlp_ring<TILES, FORWARD_STAGES> ring;
    uint64_t loaded[GROUPS];
    float bias[HIDDEN_MAX];
};

/* If `outputs` is NULL, the kernel adds its outputs to the shortcut and normalises the sums. */
template <class T> struct forward_plan {
    CUtensorMap inputs, first, second, shortcut;
    uint32_t rows, chunks, sets; /* sets of GROUPS groups of HEIGHT rows */
    const T *first_bias, *second_bias;
    T *outputs;
    struct vit_norm<T> norm;
};

/* Computes GELU. The results are fragments of the second product. */
template <class T>
static __device__ __forceinline__ void activate(const float (&hidden)[CHUNK / 2],
                                                uint32_t (&active)[CHUNK / 16][4])
{
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            active[step][i] = pack<T>(gelu(hidden[8 * step + 2 * i]), gelu(hidden[8 * step + 2 * i + 1]));
}

/* Thread 0 also loads the weights: those of the next turn, when all warpgroups have ended the turn before the
 * previous one. So it rarely waits. */
template <class T, int TILES, int GROUPS>
static __global__ void __launch_bounds__(128 * GROUPS, 1)
    mlp_kernel(const __grid_constant__ struct forward_plan<T> plan)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    auto *memory = reinterpret_cast<struct forward_memory<TILES, GROUPS> *>(shared);
    auto *ring = &memory->ring;
    const uint32_t group = own_group(), row = threadIdx.x / 32 % 4 * 16;
    const uint32_t turns = (plan.sets - blockIdx.x + gridDim.x - 1) / gridDim.x * plan.chunks;
    struct mlp_turn<FORWARD_STAGES> turn = {
        0, 0
    };
    uint32_t number = 0; /* turns so far */
    float sums[TILES * TILE_WIDTH / 2];
    copy_bias<T>(memory->bias, plan.first_bias, plan.chunks);
    if (threadIdx.x == 0) {
        open_ring(ring, GROUPS);
        for (int i = 0; i < GROUPS; i++)
            barrier_init(&memory->loaded[i], 1);
        bulk_fence();
        for (uint32_t i = 0; i < FORWARD_STAGES && i < turns; i++)
            load_both(ring, plan, {i, 0}, i % plan.chunks);
    }
    __syncthreads();
    wait_for_previous();
    allow_next();
    for (uint32_t set = blockIdx.x, parity = 0; set < plan.sets; set += gridDim.x) {
        load_group(memory->rows[group], &plan.inputs, set * GROUPS + group, &memory->loaded[group]);
        for (float &sum : sums)
            sum = 0;
        for (uint32_t chunk = 0; chunk < plan.chunks; chunk++, number++) {
            const struct mlp_weights<TILES> *weights = &ring->weights[turn.stage];
            float hidden[CHUNK / 2];
            uint32_t active[CHUNK / 16][4];
            if (threadIdx.x == 0 && number + 1 >= FORWARD_STAGES && number + 1 < turns) {
                struct mlp_turn<FORWARD_STAGES> next = turn;
                advance(&next);
                load_both(ring, plan, next, chunk + 1 == plan.chunks ? 0 : chunk + 1);
            }
            __syncwarp();
            if (chunk == 0) {
                barrier_wait(&memory->loaded[group], parity);
                parity ^= 1;
            }
            barrier_wait(&ring->full[0][turn.stage], turn.parity);
            start_hidden<T>(memory->rows[group], weights, memory->bias + chunk * CHUNK, hidden);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_ended(hidden);
            release(ring, 0, turn.stage);
            if (chunk + 1 == plan.chunks) {
                meet_group(); /* all warps have read the rows, which the shortcut or the outputs overwrite */
                if (!plan.outputs)
                    load_group(memory->rows[group], &plan.shortcut, set * GROUPS + group,
                               &memory->loaded[group]);
            }
            activate<T>(hidden, active);
            barrier_wait(&ring->full[1][turn.stage], turn.parity);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < CHUNK / 16; step++)
                wgmma<T, TILES * TILE_WIDTH, 0>(sums, active[step],
                                                wgmma_tile(weights->second) + step * WGMMA_NEXT, true);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_ended(sums);
            release(ring, 1, turn.stage);
            advance(&turn);
        }
        const uint32_t first = (set * GROUPS + group) * HEIGHT,
                       count = plan.rows > first ? plan.rows - first : 0;
        if (plan.outputs) {
            write_group<T>(memory->rows[group], row, count, sums, plan.second_bias,
                           plan.outputs + (size_t)first * TILES * TILE_WIDTH);
        } else {
            barrier_wait(&memory->loaded[group], parity);
            parity ^= 1;
            auto &rows = memory->rows[group];
            const auto write = [&](T *to) {
                return [&rows, to, row, count](int tile) {
                    __syncwarp();
                    write_rows16(rows[tile], row, count, to + tile * TILE_WIDTH, TILES * TILE_WIDTH);
                };
            };
            const size_t at = (size_t)first * TILES * TILE_WIDTH;
            add_shortcut<T>(rows, plan.norm, plan.second_bias, row, first, count, sums,
                            write(plan.norm.sums + at));
            __syncwarp(); /* the normalised values overwrite the rows */
            normalise<T>(rows, plan.norm, plan.norm.weight, plan.norm.bias, row, first, count, sums,
                         write(plan.norm.outputs + at));
        }
        bulk_fence();
        meet_group();
    }
}

/* ---- Backward ---- */

#define BACK_STAGES    2
#define LOAD_REGISTERS 40 /* per thread of the warpgroup that loads weights */
#define BACK_REGISTERS 232

/* After the last chunk, `rows` has the inputs of the normalisation and `deltas` the gradients that arrive
 * through the next shortcut; then the results replace both. The latter gradients are those of the outputs,
 * which are there already, unless stochastic depth multiplies the outputs by factors.
 *
 * `staged` has 16 rows per warp of values that are on their way to memory. `columns` has the sums of the
 * gradients of hidden values over each warp's rows, for this and the previous turn. `totals` has their sums
 * over the warps of a warpgroup and over its groups. */
template <int TILES, int GROUPS> struct back_memory {
    tile_row rows[GROUPS][TILES][HEIGHT], deltas[GROUPS][TILES][HEIGHT];
    struct mlp_ring<TILES, BACK_STAGES> ring;
    uint64_t loaded[GROUPS], begun; /* `begun`: the first warp has ended its first GELU of a set */
    alignas(1024) tile_row staged[GROUPS][HEIGHT];
    struct {
        float columns[2][4][CHUNK], totals[HIDDEN_MAX];
    } sums[GROUPS];
    float bias[HIDDEN_MAX], norm_weight[TILES * TILE_WIDTH];
};

template <class T> struct back_plan {
    CUtensorMap inputs, out_deltas, first, second;
    CUtensorMap x, later;                               /* of the normalisation */
    CUtensorMap active, deltas, norm_sums, norm_branch; /* results, in parts of 16 rows */
    uint32_t rows, chunks, sets;
    const T *first_bias;
    struct vit_norm<T> norm;
    bool later_differs;  /* from out_deltas, so it must be loaded */
    bool branch;         /* compute `norm_branch` */
    float *partial;      /* (block, warpgroup, hidden value) */
    float *norm_partial; /* (block, warpgroup, NORM_SUMS, column) */
};

/* Starts deltas = out_deltas second. */
template <class T, int TILES>
static __device__ __forceinline__ void start_deltas(tile_row (&out_deltas)[TILES][HEIGHT],
                                                    const struct mlp_weights<TILES> *weights,
                                                    float (&deltas)[CHUNK / 2])
{
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++)
            wgmma<T, CHUNK, 0, 1>(deltas, wgmma_tile(out_deltas[tile]) + step * WGMMA_NEXT,
                                  wgmma_tile(weights->second[tile * TILE_WIDTH]) +
                                      step * WGMMA_NEXT_TRANSPOSED,
                                  tile + step > 0);
}

/* Replaces the gradients of the GELU of hidden values by the gradients of these values. Stores their GELU in
 * a warp's rows of `staged`, and returns the gradients also as fragments. */
template <class T>
static __device__ __forceinline__ void activate_back(const float (&hidden)[CHUNK / 2],
                                                     float (&deltas)[CHUNK / 2], tile_row *staged,
                                                     uint32_t (&words)[CHUNK / 16][4])
{
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++) {
        uint32_t active[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *sum = hidden + 8 * step + 2 * i;
            float *delta = deltas + 8 * step + 2 * i;
            const struct gelu_pair low = gelu_both(sum[0]), high = gelu_both(sum[1]);
            active[i] = pack<T>(low.value, high.value);
            delta[0] *= low.slope;
            delta[1] *= high.slope;
            words[step][i] = pack<T>(delta[0], delta[1]);
        }
        put_fragment(staged, 0, 16 * step, active);
    }
}

/* Writes a warp's 16 staged rows to columns from `column` on. The first lane waits for the end of this with
 * bulk_store_wait(). */
static __device__ __forceinline__ void write_staged(tile_row *staged, const CUtensorMap *map, uint32_t column,
                                                    uint32_t row)
{
    bulk_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        map_store(staged, map, column, row);
}

/* Waits until a warp's staged rows may be overwritten. */
static __device__ __forceinline__ void wait_staged(void)
{
    if (threadIdx.x % 32 == 0)
        bulk_store_wait();
    __syncwarp();
}

/* Writes the sums of the columns of a warp's 16 rows. */
static __device__ __forceinline__ void sum_chunk(const float (&deltas)[CHUNK / 2], float (&columns)[CHUNK])
{
    float part[CHUNK / 4];
    float2 sum = {0, 0};
#pragma unroll
    for (int i = 0; i < CHUNK / 4; i++)
        part[i] = deltas[i / 2 * 4 + i % 2] + deltas[i / 2 * 4 + 2 + i % 2];
    sum_rows16(part, &sum);
    reinterpret_cast<float2 *>(columns)[threadIdx.x % 32] = sum;
}

/* Adds the warps' column sums of a chunk, which all warps of the warpgroup have stored, to the totals. */
template <int TILES, int GROUPS>
static __device__ __forceinline__ void add_columns(struct back_memory<TILES, GROUPS> *memory, uint32_t group,
                                                   uint32_t which, uint32_t chunk)
{
    const uint32_t own = threadIdx.x % 128;
    if (own >= CHUNK)
        return;
    for (int warp = 0; warp < 4; warp++)
        memory->sums[group].totals[chunk * CHUNK + own] += memory->sums[group].columns[which][warp][own];
}

/* Loads the weights of all turns; by one thread of a warp of its own. */
template <class T, int TILES, int GROUPS>
static __device__ void load_turns(struct back_memory<TILES, GROUPS> *memory, const struct back_plan<T> &plan)
{
    struct mlp_turn<BACK_STAGES> turn = {
        0, 0
    };
    for (uint32_t set = blockIdx.x; set < plan.sets; set += gridDim.x)
        for (uint32_t chunk = 0; chunk < plan.chunks; chunk++, advance(&turn))
            load_both(&memory->ring, plan, turn, chunk);
}

template <class T, int TILES, int GROUPS>
static __global__ void __launch_bounds__(128 * GROUPS + 128, 1)
    mlp_back_kernel(const __grid_constant__ struct back_plan<T> plan)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    auto *memory = reinterpret_cast<struct back_memory<TILES, GROUPS> *>(shared);
    auto *ring = &memory->ring;
    const uint32_t group = own_group(), row = threadIdx.x / 32 % 4 * 16;
    copy_bias<T>(memory->bias, plan.first_bias, plan.chunks);
    for (uint32_t i = threadIdx.x; i < TILES * TILE_WIDTH; i += blockDim.x)
        memory->norm_weight[i] = plan.norm.weight[i];
    if (threadIdx.x == 0) {
        open_ring(ring, GROUPS);
        for (int i = 0; i < GROUPS; i++)
            barrier_init(&memory->loaded[i], 2);
        barrier_init(&memory->begun, 1);
        bulk_fence();
    }
    for (uint32_t i = threadIdx.x; i < sizeof memory->sums / sizeof(float); i += blockDim.x)
        reinterpret_cast<float *>(&memory->sums)[i] = 0;
    __syncthreads();
    if (group == GROUPS) {
        lower_registers<LOAD_REGISTERS>();
        if (threadIdx.x % 128 == 0)
            load_turns<T>(memory, plan);
        return;
    }
    raise_registers<BACK_REGISTERS>();
    auto &rows = memory->rows[group], &out_deltas = memory->deltas[group];
    uint64_t *loaded = &memory->loaded[group];
    tile_row *staged = memory->staged[group] + row;
    struct norm_columns<TILES> columns = {
    };
    struct mlp_turn<BACK_STAGES> turn = {
        0, 0
    };
    uint32_t which = 0, last = 0; /* which part of `columns`; the previous chunk */
    for (uint32_t set = blockIdx.x; set < plan.sets; set += gridDim.x) {
        const uint32_t own = set * GROUPS + group, first = own * HEIGHT;
        const struct norm_rows norm_rows =
            norm_rows_at<T>(plan.norm, row, first, plan.rows > first ? plan.rows - first : 0);
        float sums[TILES * TILE_WIDTH / 2] = {};
        load_group(rows, &plan.inputs, own, loaded);
        load_group(out_deltas, &plan.out_deltas, own, loaded);
        barrier_wait(loaded, 0);
        if (group > 0)
            barrier_wait(&memory->begun, set / gridDim.x % 2);
        for (uint32_t chunk = 0; chunk < plan.chunks; chunk++) {
            const struct mlp_weights<TILES> *weights = &ring->weights[turn.stage];
            float hidden[CHUNK / 2], deltas[CHUNK / 2];
            uint32_t words[CHUNK / 16][4];
            barrier_wait(&ring->full[0][turn.stage], turn.parity);
            barrier_wait(&ring->full[1][turn.stage], turn.parity);
            start_hidden<T>(rows, weights, memory->bias + chunk * CHUNK, hidden);
            start_deltas<T>(out_deltas, weights, deltas);
            wgmma_commit();
            wait_staged();
            meet_group(); /* the column sums of the previous turn are complete */
            add_columns(memory, group, which, last);
            which ^= 1;
            last = chunk;
            wgmma_wait<0>();
            wgmma_ended(hidden);
            wgmma_ended(deltas);
            release(ring, 1, turn.stage);
            if (chunk + 1 == plan.chunks) {
                meet_group(); /* all warps have read the rows */
                load_group(rows, &plan.x, own, loaded);
                if (plan.later_differs)
                    load_group(out_deltas, &plan.later, own, loaded);
                else if (threadIdx.x % 128 == 0)
                    barrier_arrive(loaded);
                __syncwarp();
            }
            activate_back<T>(hidden, deltas, staged, words);
            write_staged(staged, &plan.active, chunk * CHUNK, first + row);
            if (chunk == 0 && threadIdx.x == 0)
                barrier_arrive(&memory->begun);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < CHUNK / 16; step++)
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    wgmma<T, TILE_WIDTH, 1>(
                        reinterpret_cast<float(&)[TILE_WIDTH / 2]>(sums[tile * TILE_WIDTH / 2]), words[step],
                        wgmma_tile(weights->first[tile]) + step * WGMMA_NEXT_TRANSPOSED, true);
            wgmma_commit();
            sum_chunk(deltas, memory->sums[group].columns[which][threadIdx.x / 32 % 4]);
            wait_staged();
#pragma unroll
            for (int step = 0; step < CHUNK / 16; step++)
                put_fragment(staged, 0, 16 * step, words[step]);
            write_staged(staged, &plan.deltas, chunk * CHUNK, first + row);
            wgmma_wait<0>();
            wgmma_ended(sums);
            release(ring, 0, turn.stage);
            advance(&turn);
        }
        barrier_wait(loaded, 1);
        normalise_back<T>(
            rows, out_deltas, plan.branch, memory->norm_weight, norm_rows, row, sums, &columns,
            [&](int tile) {
                bulk_fence();
                __syncwarp();
                if (threadIdx.x % 32 == 0) {
                    map_store(&rows[tile][row], &plan.norm_sums, tile * TILE_WIDTH, first + row);
                    if (plan.branch)
                        map_store(&out_deltas[tile][row], &plan.norm_branch, tile * TILE_WIDTH, first + row);
                }
                __syncwarp();
            });
        wait_staged();
        meet_group(); /* the copies have read all rows */
    }
    add_columns(memory, group, which, last);
    for (uint32_t i = threadIdx.x % 128; i < CHUNK; i += 128)
        for (uint32_t column = i; column < plan.chunks * CHUNK; column += CHUNK)
            plan.partial[((size_t)blockIdx.x * GROUPS + group) * plan.chunks * CHUNK + column] =
                memory->sums[group].totals[column];
    write_columns<TILES>(columns, reinterpret_cast<float(&)[4][NORM_SUMS * TILES * TILE_WIDTH]>(rows),
                         plan.norm_partial +
                             ((size_t)blockIdx.x * GROUPS + group) * NORM_SUMS * TILES * TILE_WIDTH);
}

/* ---- Launches ---- */

enum status mlp_hopper_fits(const struct vit_linear *first, bool *fits)
{
    TRY(on_hopper(fits));
    *fits = *fits && first->in % TILE_WIDTH == 0 && first->in <= TILES_MAX * TILE_WIDTH &&
            first->out % CHUNK == 0 && first->out <= HIDDEN_MAX &&
            first->out > CHUNK; /* with one chunk, the first warpgroup could be two sets ahead: see `begun` */
    return STATUS_OK;
}

/* Sets the number of sets of GROUPS groups, and returns the number of blocks. */
template <int GROUPS> static uint32_t blocks_of(uint32_t rows, uint32_t processors, uint32_t *sets)
{
    *sets = (rows + GROUPS * HEIGHT - 1) / (GROUPS * HEIGHT);
    return *sets < processors ? *sets : processors;
}

template <class T, int TILES, int GROUPS>
static enum status launch(struct forward_plan<T> *plan, uint32_t processors, cudaStream_t stream)
{
    const struct early_launch launch = {blocks_of<GROUPS>(plan->rows, processors, &plan->sets), 128 * GROUPS,
                                        sizeof(struct forward_memory<TILES, GROUPS>), 1};
    return launch_early(mlp_kernel<T, TILES, GROUPS>, &launch, stream, *plan);
}

template <class T, int TILES, int GROUPS>
static enum status launch_back(struct back_plan<T> *plan, uint32_t processors,
                               const struct vit_norm_deltas<T> *norm, float *bias, struct vit_sums *sums,
                               cudaStream_t stream)
{
    const uint32_t bytes = sizeof(struct back_memory<TILES, GROUPS>), columns = plan->chunks * CHUNK,
                   blocks = blocks_of<GROUPS>(plan->rows, processors, &plan->sets);
    const struct vit_sum sum = {NULL, blocks * GROUPS, 1, columns, {bias}};
    const struct vit_sum norm_sums = {NULL,
                                      blocks * GROUPS,
                                      NORM_SUMS,
                                      plan->norm.rows.width,
                                      {norm->weight, norm->bias, norm->branch_bias}};
    plan->partial = vit_sums_room(sums);
    TRY(vit_sums_add(sums, &sum));
    plan->norm_partial = vit_sums_room(sums);
    TRY(allow_shared(mlp_back_kernel<T, TILES, GROUPS>, bytes));
    mlp_back_kernel<T, TILES, GROUPS><<<blocks, 128 * GROUPS + 128, bytes, stream>>>(*plan);
    CUDA_TRY_LAUNCH("mlp_back_kernel");
    return vit_sums_add(sums, &norm_sums);
}

/* Calls LAUNCH(TILES, GROUPS), with one warpgroup per block if the multiprocessors suffice for that. */
#define WITH_SIZES(mlp, processors, most, LAUNCH)                  \
    do {                                                           \
        const bool few = (mlp)->first.rows <= (processors)*HEIGHT; \
        switch ((mlp)->first.in / TILE_WIDTH) {                    \
        case 1:                                                    \
            return few ? LAUNCH(1, 1) : LAUNCH(1, most);           \
        case 2:                                                    \
            return few ? LAUNCH(2, 1) : LAUNCH(2, most);           \
        default:                                                   \
            return few ? LAUNCH(3, 1) : LAUNCH(3, most);           \
        }                                                          \
    } while (0)

template <class T>
enum status mlp_hopper_forward(const struct vit_mlp<T> *mlp, const struct vit_norm<T> *norm,
                               const T *shortcut, T *outputs, cudaStream_t stream)
{
    const uint32_t rows = mlp->first.rows, width = mlp->first.in, hidden = mlp->first.out;
    struct forward_plan<T> plan = {
    };
    uint32_t processors;
    TRY(processors_of(&processors));
    TRY(describe_tiles<T>(mlp->inputs, rows, width, HEIGHT, &plan.inputs));
    TRY(describe_tiles<T>(mlp->first_weights, hidden, width, CHUNK, &plan.first));
    TRY(describe_tiles<T>(mlp->second_weights, width, hidden, width, &plan.second));
    plan.rows = rows;
    plan.chunks = hidden / CHUNK;
    plan.first_bias = mlp->first_bias;
    plan.second_bias = mlp->second_bias;
    plan.outputs = outputs;
    if (!outputs)
        TRY(describe_tiles<T>(shortcut, rows, width, HEIGHT, &plan.shortcut));
    plan.norm = *norm;
#define LAUNCH(tiles, groups) launch<T, tiles, groups>(&plan, processors, stream)
    WITH_SIZES(mlp, processors, 3, LAUNCH);
#undef LAUNCH
}

template <class T>
enum status mlp_hopper_backward(const struct vit_mlp<T> *mlp, const T *out_deltas, T *deltas,
                                const struct vit_norm<T> *norm, const struct vit_norm_deltas<T> *norm_deltas,
                                float *bias, struct vit_sums *sums, cudaStream_t stream)
{
    const uint32_t rows = mlp->first.rows, width = mlp->first.in, hidden = mlp->first.out;
    struct back_plan<T> plan = {
    };
    uint32_t processors;
    TRY(processors_of(&processors));
    TRY(describe_tiles<T>(mlp->inputs, rows, width, HEIGHT, &plan.inputs));
    TRY(describe_tiles<T>(out_deltas, rows, width, HEIGHT, &plan.out_deltas));
    TRY(describe_tiles<T>(mlp->first_weights, hidden, width, CHUNK, &plan.first));
    TRY(describe_tiles<T>(mlp->second_weights, width, hidden, width, &plan.second));
    TRY(describe_tiles<T>(mlp->active, rows, hidden, 16, &plan.active));
    TRY(describe_tiles<T>(deltas, rows, hidden, 16, &plan.deltas));
    plan.rows = rows;
    plan.chunks = hidden / CHUNK;
    plan.first_bias = mlp->first_bias;
    plan.norm = *norm;
    plan.later_differs = norm_deltas->later != out_deltas;
    plan.branch = norm_deltas->branch != NULL;
    TRY(describe_tiles<T>(norm->sums, rows, width, HEIGHT, &plan.x));
    TRY(describe_tiles<T>(norm_deltas->later, rows, width, HEIGHT, &plan.later));
    TRY(describe_tiles<T>(norm_deltas->sums, rows, width, 16, &plan.norm_sums));
    if (plan.branch)
        TRY(describe_tiles<T>(norm_deltas->branch, rows, width, 16, &plan.norm_branch));
#define LAUNCH(tiles, groups) \
    launch_back<T, tiles, groups>(&plan, processors, norm_deltas, bias, sums, stream)
    WITH_SIZES(mlp, processors, 2, LAUNCH);
#undef LAUNCH
}

EACH_HALF(mlp_hopper_forward)
EACH_HALF(mlp_hopper_backward)
