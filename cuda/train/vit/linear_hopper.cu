/* Linear layers on tokens of at most 192 values, for compute capability 9.0: their outputs, and the gradients
 * of their inputs. Such a product reads and writes memory for longer than it multiplies. A block therefore
 * keeps the weights in shared memory, and loads rows well before it needs them. The results replace the rows
 * in shared memory, and the hardware for bulk copies writes them while the block goes on. The kernels start
 * before the one before them ends, and load their weights until then. */
#include <cuda.h>

#include "common/check.cuh"
#include "train/vit/norm_hopper.cuh"

#define GROUPS    3 /* warpgroups that multiply; another one loads */
#define STAGES    6 /* groups of HEIGHT rows in shared memory */
#define TILES_MAX 3 /* tiles along a token: at most 192 values */

/* `empty` is for a stage whose results have been read by the copies. */
template <int TILES> struct linear_memory {
    tile_row weights[TILES][TILES * TILE_WIDTH], rows[STAGES][TILES][HEIGHT];
    uint64_t ready, full[STAGES], empty[STAGES];
    float bias[TILES * TILE_WIDTH];
};

template <class T> struct linear_plan {
    CUtensorMap inputs, weights, outputs; /* `outputs` in parts of 16 rows */
    uint32_t units;                       /* groups of HEIGHT rows */
    const T *bias;                        /* NULL: zeros */
};

/* Starts loading weights, from row `first` on; by one thread. */
template <int TILES>
static __device__ void load_weights(tile_row (&weights)[TILES][TILES * TILE_WIDTH], const CUtensorMap *map,
                                    uint32_t first, uint64_t *ready)
{
    barrier_expect(ready, sizeof weights);
    for (int tile = 0; tile < TILES; tile++)
        map_load(weights[tile], map, tile * TILE_WIDTH, first, ready);
}

/* Loads the rows of all units of the block; by one thread. */
template <class T, int TILES>
static __device__ void load_all(struct linear_memory<TILES> *memory, const struct linear_plan<T> &plan)
{
    uint32_t number = 0;
    for (uint32_t unit = blockIdx.x; unit < plan.units; unit += gridDim.x, number++) {
        const uint32_t stage = number % STAGES;
        barrier_wait(&memory->empty[stage], number / STAGES % 2 ^ 1);
        barrier_expect(&memory->full[stage], sizeof memory->rows[stage]);
        for (int tile = 0; tile < TILES; tile++)
            map_load(memory->rows[stage][tile], &plan.inputs, tile * TILE_WIDTH, unit * HEIGHT,
                     &memory->full[stage]);
    }
}

/* The sums of a product begin with the biases of the columns. */
template <int TILES>
static __device__ __forceinline__ void begin_sums(const float *bias, float (&sums)[TILES * TILE_WIDTH / 2])
{
#pragma unroll
    for (int n = 0; n < TILES * TILE_WIDTH / 8; n++) {
        const float2 by = *reinterpret_cast<const float2 *>(bias + 8 * n + threadIdx.x % 4 * 2);
        sums[4 * n] = sums[4 * n + 2] = by.x;
        sums[4 * n + 1] = sums[4 * n + 3] = by.y;
    }
}

/* Adds rows weights^T to the sums or, with BACK, rows weights. */
template <class T, int TILES, bool BACK>
static __device__ __forceinline__ void multiply(tile_row (&rows)[TILES][HEIGHT],
                                                tile_row (&weights)[TILES][TILES * TILE_WIDTH],
                                                float (&sums)[TILES * TILE_WIDTH / 2])
{
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const uint64_t a = wgmma_tile(rows[tile]);
        const uint64_t b =
            BACK ? wgmma_tile(weights[0][tile * TILE_WIDTH], sizeof weights[0]) : wgmma_tile(weights[tile]);
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++)
            wgmma<T, TILES * TILE_WIDTH, 0, BACK>(
                sums, a + step * WGMMA_NEXT, b + step * (BACK ? WGMMA_NEXT_TRANSPOSED : WGMMA_NEXT), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_ended(sums);
}

/* Block (x, y) computes columns y * TILES * TILE_WIDTH, ... of units x, x + gridDim.x, ... Its warpgroups
 * take the units in turn. */
template <class T, int TILES, bool BACK>
static __global__ void __launch_bounds__(128 * GROUPS + 128, 1)
    linear_kernel(const __grid_constant__ struct linear_plan<T> plan)
{
    constexpr uint32_t WIDTH = TILES * TILE_WIDTH;
    extern __shared__ __align__(1024) unsigned char shared[];
    auto *memory = reinterpret_cast<struct linear_memory<TILES> *>(shared);
    const uint32_t group = own_group(), row = threadIdx.x / 32 % 4 * 16;
    const bool leads = threadIdx.x % 32 == 0; /* this thread copies the results of its warp */
    if (threadIdx.x == 0) {
        barrier_init(&memory->ready, 1);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(&memory->full[stage], 1);
            barrier_init(&memory->empty[stage], 4);
        }
        bulk_fence();
        load_weights<TILES>(memory->weights, &plan.weights, blockIdx.y * WIDTH, &memory->ready);
    }
    for (uint32_t i = 2 * threadIdx.x; i < WIDTH; i += 2 * blockDim.x)
        *reinterpret_cast<float2 *>(memory->bias + i) =
            plan.bias ? values_of<T>(*reinterpret_cast<const uint32_t *>(plan.bias + blockIdx.y * WIDTH + i))
                      : float2{0, 0};
    __syncthreads();
    wait_for_previous();
    allow_next();
    if (group == GROUPS) {
        if (threadIdx.x % 128 == 0)
            load_all<T>(memory, plan);
        return;
    }
    barrier_wait(&memory->ready, 0);
    uint32_t number = group, last = STAGES; /* `last`: the stage of the previous unit of this warpgroup */
    for (uint32_t unit = blockIdx.x + group * gridDim.x; unit < plan.units;
         unit += GROUPS * gridDim.x, number += GROUPS) {
        const uint32_t stage = number % STAGES;
        auto &rows = memory->rows[stage];
        float sums[WIDTH / 2];
        begin_sums<TILES>(memory->bias, sums);
        barrier_wait(&memory->full[stage], number / STAGES % 2);
        multiply<T, TILES, BACK>(rows, memory->weights, sums);
        if (leads && last < STAGES) {
            bulk_store_wait();
            barrier_arrive(&memory->empty[last]);
        }
        last = stage;
        meet_group(); /* all warps have read the rows */
#pragma unroll
        for (int step = 0; step < WIDTH / 16; step++) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                word[i] = pack<T>(sums[8 * step + 2 * i], sums[8 * step + 2 * i + 1]);
            put_fragment(rows[step / 4], row, step % 4 * 16, word);
        }
        bulk_fence();
        __syncwarp();
        if (leads)
            for (int tile = 0; tile < TILES; tile++)
                map_store(&rows[tile][row], &plan.outputs, blockIdx.y * WIDTH + tile * TILE_WIDTH,
                          unit * HEIGHT + row);
        __syncwarp();
    }
    if (leads)
        bulk_store_wait();
}

/* ---- A layer at the end of a branch, the sum with the shortcut, and the normalisation of the sum ---- */

/* Each warpgroup has rows of its own. `inputs` later has the outputs of the normalisation, and `sums` first
 * has the shortcut. */
template <int TILES> struct branch_memory {
    tile_row weights[TILES][TILES * TILE_WIDTH];
    struct branch_rows {
        tile_row inputs[TILES][HEIGHT], sums[TILES][HEIGHT];
    } rows[GROUPS];
    uint64_t ready, loaded[GROUPS];
    float bias[TILES * TILE_WIDTH], norm_weight[TILES * TILE_WIDTH], norm_bias[TILES * TILE_WIDTH];
};

template <class T> struct branch_plan {
    CUtensorMap inputs, weights, shortcut, sums, outputs; /* the last two in parts of 16 rows */
    uint32_t rows, units;
    const T *bias;
    struct vit_norm<T> norm;
};

/* Warpgroup g of block b processes units b + g * gridDim.x, b + (g + GROUPS) * gridDim.x, ... */
template <class T, int TILES>
static __global__ void __launch_bounds__(128 * GROUPS, 1)
    branch_kernel(const __grid_constant__ struct branch_plan<T> plan)
{
    constexpr uint32_t WIDTH = TILES * TILE_WIDTH;
    extern __shared__ __align__(1024) unsigned char shared[];
    auto *memory = reinterpret_cast<struct branch_memory<TILES> *>(shared);
    const uint32_t group = own_group(), row = threadIdx.x / 32 % 4 * 16;
    const bool leads = threadIdx.x % 32 == 0; /* this thread copies the results of its warp */
    auto &rows = memory->rows[group];
    uint64_t *loaded = &memory->loaded[group];
    uint32_t unit = blockIdx.x + group * gridDim.x;
    const auto load = [&]() {
        if (threadIdx.x % 128 != 0 || unit >= plan.units)
            return;
        barrier_expect(loaded, sizeof rows);
        for (int tile = 0; tile < TILES; tile++)
            map_load(rows.inputs[tile], &plan.inputs, tile * TILE_WIDTH, unit * HEIGHT, loaded);
        for (int tile = 0; tile < TILES; tile++)
            map_load(rows.sums[tile], &plan.shortcut, tile * TILE_WIDTH, unit * HEIGHT, loaded);
    };
    if (threadIdx.x == 0) {
        barrier_init(&memory->ready, 1);
        for (int i = 0; i < GROUPS; i++)
            barrier_init(&memory->loaded[i], 1);
        bulk_fence();
        load_weights<TILES>(memory->weights, &plan.weights, 0, &memory->ready);
    }
    for (uint32_t i = 2 * threadIdx.x; i < WIDTH; i += 2 * blockDim.x) {
        *reinterpret_cast<float2 *>(memory->bias + i) =
            values_of<T>(*reinterpret_cast<const uint32_t *>(plan.bias + i));
        *reinterpret_cast<float2 *>(memory->norm_weight + i) =
            *reinterpret_cast<const float2 *>(plan.norm.weight + i);
        *reinterpret_cast<float2 *>(memory->norm_bias + i) =
            *reinterpret_cast<const float2 *>(plan.norm.bias + i);
    }
    __syncthreads();
    wait_for_previous();
    allow_next();
    load();
    barrier_wait(&memory->ready, 0);
    for (uint32_t parity = 0; unit < plan.units; parity ^= 1) {
        const uint32_t first = unit * HEIGHT, count = plan.rows - first;
        float sums[WIDTH / 2];
        begin_sums<TILES>(memory->bias, sums);
        barrier_wait(loaded, parity);
        multiply<T, TILES, false>(rows.inputs, memory->weights, sums);
        meet_group(); /* all warps have read the inputs */
        add_shortcut<T>(rows.sums, plan.norm, (const T *)nullptr, row, first, count, sums, [](int) {});
        normalise<T>(rows.inputs, plan.norm, memory->norm_weight, memory->norm_bias, row, first, count, sums,
                     [](int) {});
        bulk_fence();
        __syncwarp();
        if (leads) {
            for (int tile = 0; tile < TILES; tile++) {
                map_store(&rows.sums[tile][row], &plan.sums, tile * TILE_WIDTH, first + row);
                map_store(&rows.inputs[tile][row], &plan.outputs, tile * TILE_WIDTH, first + row);
            }
            bulk_store_wait();
        }
        __syncwarp();
        meet_group(); /* the copies have read all rows */
        unit += GROUPS * gridDim.x;
        load();
    }
}

/* ---- Launches ---- */

enum status linear_hopper_fits(const struct vit_linear *linear, bool back, bool *fits)
{
    const bool square = linear->in == linear->out;
    TRY(on_hopper(fits));
    *fits = *fits && linear->in % TILE_WIDTH == 0 && linear->in <= TILES_MAX * TILE_WIDTH &&
            (square || (!back && linear->out % linear->in == 0)) && linear->apart == linear->out;
    return STATUS_OK;
}

template <class T, int TILES, bool BACK>
static enum status launch(const struct linear_plan<T> *plan, uint32_t columns, uint32_t spared,
                          cudaStream_t stream)
{
    const uint32_t bytes = sizeof(struct linear_memory<TILES>);
    uint32_t processors;
    TRY(processors_of(&processors));
    const uint32_t most = blocks_beside(processors, spared, columns);
    const struct early_launch launch = {dim3(plan->units < most ? plan->units : most, columns),
                                        128 * GROUPS + 128, bytes, 1};
    return launch_early(linear_kernel<T, TILES, BACK>, &launch, stream, *plan);
}

template <class T>
enum status linear_hopper(const struct vit_linear *linear, bool back, uint32_t spared, const T *inputs,
                          const T *weights, const T *bias, T *outputs, cudaStream_t stream)
{
    const uint32_t width = linear->in, columns = linear->out / width;
    struct linear_plan<T> plan = {
    };
    plan.units = (linear->rows + HEIGHT - 1) / HEIGHT;
    plan.bias = bias;
    TRY(describe_tiles<T>(inputs, linear->rows, width, HEIGHT, &plan.inputs));
    TRY(describe_tiles<T>(weights, linear->out, width, width, &plan.weights));
    TRY(describe_tiles<T>(outputs, linear->rows, linear->out, 16, &plan.outputs));
#define LAUNCH(tiles)                                              \
    (back ? launch<T, tiles, true>(&plan, columns, spared, stream) \
          : launch<T, tiles, false>(&plan, columns, spared, stream))
    switch (width / TILE_WIDTH) {
    case 1:
        return LAUNCH(1);
    case 2:
        return LAUNCH(2);
    default:
        return LAUNCH(3);
    }
#undef LAUNCH
}

template <class T, int TILES>
static enum status launch_branch(const struct branch_plan<T> *plan, cudaStream_t stream)
{
    uint32_t processors;
    TRY(processors_of(&processors));
    const struct early_launch launch = {plan->units < processors ? plan->units : processors, 128 * GROUPS,
                                        sizeof(struct branch_memory<TILES>), 1};
    return launch_early(branch_kernel<T, TILES>, &launch, stream, *plan);
}

enum status branch_hopper_fits(const struct vit_linear *linear, bool *fits)
{
    TRY(linear_hopper_fits(linear, false, fits));
    *fits = *fits && linear->in == linear->out;
    return STATUS_OK;
}

template <class T>
enum status branch_hopper(const struct vit_linear *linear, const T *inputs, const T *weights, const T *bias,
                          const struct vit_norm<T> *norm, const T *shortcut, cudaStream_t stream)
{
    const uint32_t rows = linear->rows, width = linear->in;
    struct branch_plan<T> plan = {
    };
    plan.rows = rows;
    plan.units = (rows + HEIGHT - 1) / HEIGHT;
    plan.bias = bias;
    plan.norm = *norm;
    TRY(describe_tiles<T>(inputs, rows, width, HEIGHT, &plan.inputs));
    TRY(describe_tiles<T>(weights, width, width, width, &plan.weights));
    TRY(describe_tiles<T>(shortcut, rows, width, HEIGHT, &plan.shortcut));
    TRY(describe_tiles<T>(norm->sums, rows, width, 16, &plan.sums));
    TRY(describe_tiles<T>(norm->outputs, rows, width, 16, &plan.outputs));
    switch (width / TILE_WIDTH) {
    case 1:
        return launch_branch<T, 1>(&plan, stream);
    case 2:
        return launch_branch<T, 2>(&plan, stream);
    default:
        return launch_branch<T, 3>(&plan, stream);
    }
}

EACH_HALF(linear_hopper)
EACH_HALF(branch_hopper)
