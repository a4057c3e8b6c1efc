/* GELU in the gemm before it, for compute capability 9.0 and tokens too wide for mlp_hopper.cu. The forward
 * pass computes the first linear layer of a block, and writes the hidden values and their GELU. The backward
 * pass multiplies the gradients of the outputs by the weights of the second layer, and by the derivative of
 * GELU. It writes the gradients of the hidden values and their sums over the rows. Kernels of their own for
 * GELU would read these matrices again.
 *
 * A block has two warpgroups that multiply, and one that loads. The two take tiles of ROWS x COLUMNS results
 * in turn. While one multiplies, the other one computes GELU and writes its results. One thread loads the
 * operands of all tiles in order, through one ring of stages.
 *
 * The blocks of a cluster process adjacent rows and the same columns. Each loads a part of the weights for
 * all of them. Consecutive tiles have the same rows, which therefore stay in L2. */
#include <cuda.h>

#include "common/check.cuh"
#include "train/vit/hopper.cuh"
#include "train/vit/kernels.cuh"

#define GROUPS         2                      /* warpgroups that multiply */
#define HALVES         2                      /* products of HEIGHT rows */
#define ROWS           (HALVES * HEIGHT)      /* of a tile */
#define COLUMNS        192                    /* of a tile */
#define TILES          (COLUMNS / TILE_WIDTH) /* parts of 64 columns */
#define CHUNKS         (HALVES * TILES)       /* parts of 64 x 64 results */
#define CLUSTER        2                      /* blocks */
#define STAGES         4                      /* each with operands for TILE_WIDTH summed values */
#define LOAD_REGISTERS 24
#define OWN_REGISTERS  240

/* Parts of 16 x 64 values per warp that are on their way to memory: hidden values and their GELU in turn. */
template <bool BACK> struct wide_results {
    tile_row staged[4 * GROUPS][4][16];
};

/* Hidden values from memory, and then their gradients. `columns` has the sums of the gradients over each
 * warp's rows. */
template <> struct wide_results<true> {
    tile_row staged[4 * GROUPS][TILES][16];
    uint64_t loaded[4 * GROUPS][TILES];
    float columns[GROUPS][4][COLUMNS];
};

/* `full`: a stage is loaded. `empty`: all warps of the cluster that multiply with it have read it. `turns`:
 * the other warpgroup has started its last product. A warpgroup waits for its turn, because a barrier tells
 * only the parity of a phase: before its turn, it could take an earlier phase of `full` for its own. */
template <bool BACK> struct wide_memory {
    struct {
        tile_row rows[ROWS], weights[COLUMNS];
    } stages[STAGES];
    struct wide_results<BACK> results;
    uint64_t full[STAGES], empty[STAGES], turns[GROUPS];
};

#define SHARED_MAX (227 * 1024) /* bytes per block */
static_assert(sizeof(struct wide_memory<false>) <= SHARED_MAX &&
                  sizeof(struct wide_memory<true>) <= SHARED_MAX,
              "a block has too little shared memory");

/* `inputs` are the gradients of the outputs with BACK. `hidden`, `active` and `deltas` are in parts of 16
 * rows. */
template <class T> struct wide_plan {
    CUtensorMap inputs, weights, hidden, active, deltas;
    uint32_t steps;         /* parts of TILE_WIDTH summed values */
    uint32_t across, tiles; /* tiles of a cluster: along the hidden values of a row, and all */
    uint32_t rows, hidden_width;
    const T *bias;
    float *partial; /* (tile along the rows, hidden value) */
};

/* The first row and column of a block's tile. */
struct wide_tile {
    uint32_t row, column;
};

template <class T>
static __device__ __forceinline__ struct wide_tile tile_at(const struct wide_plan<T> &plan, uint32_t tile)
{
    return {(tile / plan.across * CLUSTER + blockIdx.x % CLUSTER) * ROWS, tile % plan.across * COLUMNS};
}

/* ---- Loading; by one thread ---- */

/* Loads this block's part of the weights for all blocks of the cluster. */
template <bool BACK>
static __device__ __forceinline__ void load_weights(tile_row (&weights)[COLUMNS], const CUtensorMap *map,
                                                    uint32_t summed, uint32_t column, uint64_t *full)
{
    const uint16_t all = (1 << CLUSTER) - 1;
    if (BACK) {
        const uint32_t part = blockIdx.x % CLUSTER * (TILE_WIDTH / CLUSTER);
        for (int tile = 0; tile < TILES; tile++)
            map_load_shared(&weights[tile * TILE_WIDTH + part], map, column + tile * TILE_WIDTH,
                            summed + part, full, all);
    } else {
        const uint32_t part = blockIdx.x % CLUSTER * (COLUMNS / CLUSTER);
        map_load_shared(&weights[part], map, summed, column + part, full, all);
    }
}

template <class T, bool BACK>
static __device__ void load_tiles(struct wide_memory<BACK> *memory, const struct wide_plan<T> &plan)
{
    uint32_t number = 0;
    for (uint32_t at = blockIdx.x / CLUSTER; at < plan.tiles; at += gridDim.x / CLUSTER) {
        const struct wide_tile tile = tile_at(plan, at);
        for (uint32_t step = 0; step < plan.steps; step++, number++) {
            auto &stage = memory->stages[number % STAGES];
            uint64_t *full = &memory->full[number % STAGES];
            barrier_wait(&memory->empty[number % STAGES], number / STAGES % 2 ^ 1);
            barrier_expect(full, sizeof stage);
            map_load(stage.rows, &plan.inputs, step * TILE_WIDTH, tile.row, full);
            load_weights<BACK>(stage.weights, &plan.weights, step * TILE_WIDTH, tile.column, full);
        }
    }
}

/* ---- Products ---- */

/* Reports to all blocks of the cluster that this warp has read a stage. */
static __device__ __forceinline__ void release(uint64_t *empty)
{
    if (threadIdx.x % 32 < CLUSTER)
        barrier_arrive_at(empty, threadIdx.x % 32);
    __syncwarp();
}

/* Adds the products of a tile to the sums. `number`: stages that were filled before. `next`: the barrier for
 * the turn of the other warpgroup. */
template <class T, bool BACK>
static __device__ __forceinline__ void multiply(struct wide_memory<BACK> *memory, uint32_t number,
                                                uint32_t steps, uint64_t *next,
                                                float (&sums)[HALVES][COLUMNS / 2])
{
    for (uint32_t step = 0; step < steps; step++, number++) {
        auto &stage = memory->stages[number % STAGES];
        const uint64_t b = wgmma_tile(stage.weights, sizeof(tile_row) * TILE_WIDTH);
        barrier_wait(&memory->full[number % STAGES], number / STAGES % 2);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < TILE_WIDTH / 16; part++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                wgmma<T, COLUMNS, 0, BACK>(sums[half],
                                           wgmma_tile(&stage.rows[half * HEIGHT]) + part * WGMMA_NEXT,
                                           b + part * (BACK ? WGMMA_NEXT_TRANSPOSED : WGMMA_NEXT), true);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0)
            release(&memory->empty[(number - 1) % STAGES]);
    }
    if (threadIdx.x % 32 == 0)
        barrier_arrive(next);
    __syncwarp();
    wgmma_wait<0>();
    for (auto &half : sums)
        wgmma_ended(half);
    release(&memory->empty[(number - 1) % STAGES]);
}

/* ---- Forward: results ---- */

/* Writes this warp's results: hidden values and their GELU. `tile` has the first row of the warp. */
template <class T>
static __device__ __forceinline__ void write_both(tile_row (&staged)[4][16], const struct wide_plan<T> &plan,
                                                  struct wide_tile tile,
                                                  const float (&sums)[HALVES][COLUMNS / 2])
{
    const bool leads = threadIdx.x % 32 == 0;
#pragma unroll
    for (int part = 0; part < TILES; part++) {
        const uint32_t column = tile.column + part * TILE_WIDTH;
        uint32_t bias[TILE_WIDTH / 8] = {};
        if (column < plan.hidden_width)
#pragma unroll
            for (int n = 0; n < TILE_WIDTH / 8; n++)
                bias[n] =
                    *reinterpret_cast<const uint32_t *>(plan.bias + column + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            tile_row *hidden = staged[2 * half], *active = staged[2 * half + 1];
            if (leads)
                bulk_store_wait_but<1>(); /* the previous copies from `hidden` and `active` */
            __syncwarp();
#pragma unroll
            for (int step = 0; step < TILE_WIDTH / 16; step++) {
                uint32_t word[2][4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *sum = &sums[half][part * TILE_WIDTH / 2 + 8 * step + 2 * i];
                    const float2 by = values_of<T>(bias[2 * step + i / 2]);
                    const float low = sum[0] + by.x, high = sum[1] + by.y;
                    word[0][i] = pack<T>(low, high);
                    word[1][i] = pack<T>(gelu(low), gelu(high));
                }
                put_fragment(hidden, 0, 16 * step, word[0]);
                put_fragment(active, 0, 16 * step, word[1]);
            }
            bulk_fence();
            __syncwarp();
            if (leads) {
                map_store(hidden, &plan.hidden, column, tile.row + half * HEIGHT);
                map_store(active, &plan.active, column, tile.row + half * HEIGHT);
                bulk_store_commit();
            }
        }
    }
}

/* ---- Backward: results ---- */

/* Starts loading this warp's hidden values of a chunk; by one thread. `tile` has the first row of the warp.
 */
template <class T>
static __device__ __forceinline__ void load_hidden(tile_row (&staged)[TILES][16], uint64_t (&loaded)[TILES],
                                                   const struct wide_plan<T> &plan, struct wide_tile tile,
                                                   int chunk)
{
    barrier_expect(&loaded[chunk % TILES], sizeof staged[0]);
    map_load(staged[chunk % TILES], &plan.hidden, tile.column + chunk / HALVES * TILE_WIDTH,
             tile.row + chunk % HALVES * HEIGHT, &loaded[chunk % TILES]);
}

/* Starts loading the hidden values of the first TILES chunks, after the copies of the previous tile's
 * gradients have read shared memory. */
template <class T>
static __device__ __forceinline__ void load_first(tile_row (&staged)[TILES][16], uint64_t (&loaded)[TILES],
                                                  const struct wide_plan<T> &plan, struct wide_tile tile)
{
    if (threadIdx.x % 32 == 0) {
        bulk_store_wait_but<0>();
        for (int chunk = 0; chunk < TILES; chunk++)
            load_hidden<T>(staged, loaded, plan, tile, chunk);
    }
    __syncwarp();
}

/* Replaces hidden values by their gradients, and adds those to `totals`, for columns 16 * step, ... */
template <class T>
static __device__ __forceinline__ void slope_back(tile_row *staged, int step, const float *sums,
                                                  float (&totals)[4])
{
    uint32_t word[4];
    get_fragment(staged, 0, 16 * step, word);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = values_of<T>(word[i]);
        const float low = sums[2 * i] * gelu_both(x.x).slope, high = sums[2 * i + 1] * gelu_both(x.y).slope;
        word[i] = pack<T>(low, high);
        totals[i / 2 * 2] += low;
        totals[i / 2 * 2 + 1] += high;
    }
    put_fragment(staged, 0, 16 * step, word);
}

/* Writes this warp's gradients, and their sums over its rows to `columns`. load_first() has started the first
 * loads. `tile` has the first row of the warp. */
template <class T>
static __device__ __forceinline__ void
write_deltas(tile_row (&staged)[TILES][16], uint64_t (&loaded)[TILES], const struct wide_plan<T> &plan,
             struct wide_tile tile, const float (&sums)[HALVES][COLUMNS / 2], float (&columns)[COLUMNS])
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < TILES; part++) {
        float totals[TILE_WIDTH / 16][4] = {};
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int chunk = part * HALVES + half;
            barrier_wait(&loaded[chunk % TILES], chunk / TILES);
#pragma unroll
            for (int step = 0; step < TILE_WIDTH / 16; step++)
                slope_back<T>(staged[chunk % TILES], step, &sums[half][part * TILE_WIDTH / 2 + 8 * step],
                              totals[step]);
            bulk_fence();
            __syncwarp();
            if (lane == 0) {
                map_store(staged[chunk % TILES], &plan.deltas, tile.column + part * TILE_WIDTH,
                          tile.row + half * HEIGHT);
                bulk_store_commit();
                if (chunk > 0 && chunk + TILES - 1 < CHUNKS) {
                    bulk_store_wait_but<1>();
                    load_hidden<T>(staged, loaded, plan, tile, chunk + TILES - 1);
                }
            }
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < TILE_WIDTH / 4; i++) {
            const float total = column_sum(totals[i / 4][i % 4]);
            if (lane < 4)
                columns[part * TILE_WIDTH + i / 2 * 8 + lane * 2 + i % 2] = total;
        }
    }
}

/* Writes the sums of a tile's columns. */
template <class T>
static __device__ __forceinline__ void write_columns(const float (&columns)[4][COLUMNS],
                                                     const struct wide_plan<T> &plan, struct wide_tile tile)
{
    const uint32_t count = tile.row < plan.rows ? plan.hidden_width - tile.column : 0;
    float *to = plan.partial + (size_t)(tile.row / ROWS) * plan.hidden_width + tile.column;
    meet_group(); /* all warps have written their sums */
    for (uint32_t i = threadIdx.x % 128; i < COLUMNS && i < count; i += 128)
        to[i] = columns[0][i] + columns[1][i] + columns[2][i] + columns[3][i];
    meet_group();
}

/* ---- The kernel ---- */

template <class T, bool BACK>
static __global__ void __launch_bounds__(128 * GROUPS + 128, 1)
    wide_kernel(const __grid_constant__ struct wide_plan<T> plan)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    auto *memory = reinterpret_cast<struct wide_memory<BACK> *>(shared);
    const uint32_t group = own_group(), clusters = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(&memory->full[stage], 1);
            barrier_init(&memory->empty[stage], 4 * CLUSTER);
        }
        for (uint64_t &turn : memory->turns)
            barrier_init(&turn, 4);
        if constexpr (BACK)
            for (auto &warp : memory->results.loaded)
                for (uint64_t &loaded : warp)
                    barrier_init(&loaded, 1);
        bulk_fence();
    }
    meet_cluster(); /* other blocks use this block's barriers only after this */
    wait_for_previous();
    allow_next();
    if (group == GROUPS) {
        lower_registers<LOAD_REGISTERS>();
        if (threadIdx.x % 128 == 0)
            load_tiles<T, BACK>(memory, plan);
    } else {
        raise_registers<OWN_REGISTERS>();
        const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        auto &results = memory->results;
        auto &staged = results.staged[warp];
        uint32_t number = group * plan.steps, parity = group == 0;
        for (uint32_t at = blockIdx.x / CLUSTER + group * clusters; at < plan.tiles;
             at += GROUPS * clusters, number += GROUPS * plan.steps, parity ^= 1) {
            const struct wide_tile tile = tile_at(plan, at);
            const struct wide_tile own = {tile.row + warp % 4 * 16, tile.column};
            float sums[HALVES][COLUMNS / 2] = {};
            if constexpr (BACK)
                load_first<T>(staged, results.loaded[warp], plan, own);
            barrier_wait(&memory->turns[group], parity);
            multiply<T, BACK>(memory, number, plan.steps, &memory->turns[group ^ 1], sums);
            if constexpr (BACK) {
                write_deltas<T>(staged, results.loaded[warp], plan, own, sums,
                                results.columns[group][warp % 4]);
                write_columns<T>(results.columns[group], plan, tile);
            } else {
                write_both<T>(staged, plan, own, sums);
            }
        }
        if (threadIdx.x % 32 == 0)
            bulk_store_wait_but<0>();
    }
    meet_cluster(); /* until here, other blocks may write to this block's shared memory */
}

/* ---- Launches ---- */

enum status wide_hopper_fits(const struct vit_linear *first, bool *fits)
{
    TRY(on_hopper(fits));
    *fits =
        *fits && first->in % TILE_WIDTH == 0 && first->out % TILE_WIDTH == 0 && first->apart == first->out;
    return STATUS_OK;
}

uint32_t wide_hopper_parts(uint32_t rows)
{
    return (rows + ROWS - 1) / ROWS;
}

template <class T, bool BACK>
static enum status launch(const struct vit_mlp<T> *mlp, struct wide_plan<T> *plan, cudaStream_t stream)
{
    const uint32_t rows = mlp->first.rows, width = mlp->first.in, hidden = mlp->first.out;
    uint32_t processors;
    TRY(processors_of(&processors));
    TRY(describe_tiles<T>(mlp->hidden, rows, hidden, 16, &plan->hidden));
    plan->steps = width / TILE_WIDTH;
    plan->across = (hidden + COLUMNS - 1) / COLUMNS;
    plan->tiles = plan->across * ((wide_hopper_parts(rows) + CLUSTER - 1) / CLUSTER);
    plan->rows = rows;
    plan->hidden_width = hidden;
    const uint32_t most = processors / CLUSTER, clusters = plan->tiles < most ? plan->tiles : most;
    const struct early_launch launch = {clusters * CLUSTER, 128 * GROUPS + 128,
                                        sizeof(struct wide_memory<BACK>), CLUSTER};
    return launch_early(wide_kernel<T, BACK>, &launch, stream, *plan);
}

template <class T> enum status wide_hopper_forward(const struct vit_mlp<T> *mlp, cudaStream_t stream)
{
    const uint32_t rows = mlp->first.rows, width = mlp->first.in, hidden = mlp->first.out;
    struct wide_plan<T> plan = {
    };
    TRY(describe_tiles<T>(mlp->inputs, rows, width, ROWS, &plan.inputs));
    TRY(describe_tiles<T>(mlp->first_weights, hidden, width, COLUMNS / CLUSTER, &plan.weights));
    TRY(describe_tiles<T>(mlp->active, rows, hidden, 16, &plan.active));
    plan.bias = mlp->first_bias;
    return launch<T, false>(mlp, &plan, stream);
}

template <class T>
enum status wide_hopper_backward(const struct vit_mlp<T> *mlp, const T *out_deltas, T *deltas, float *bias,
                                 struct vit_sums *sums, cudaStream_t stream)
{
    const uint32_t rows = mlp->first.rows, width = mlp->first.in, hidden = mlp->first.out;
    const struct vit_sum sum = {NULL, wide_hopper_parts(rows), 1, hidden, {bias}};
    struct wide_plan<T> plan = {
    };
    TRY(describe_tiles<T>(out_deltas, rows, width, ROWS, &plan.inputs));
    TRY(describe_tiles<T>(mlp->second_weights, width, hidden, TILE_WIDTH / CLUSTER, &plan.weights));
    TRY(describe_tiles<T>(deltas, rows, hidden, 16, &plan.deltas));
    plan.partial = vit_sums_room(sums);
    TRY((launch<T, true>(mlp, &plan, stream)));
    return vit_sums_add(sums, &sum);
}

EACH_HALF(wide_hopper_forward)
EACH_HALF(wide_hopper_backward)
