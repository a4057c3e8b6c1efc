/* The gradients of the weights of one or two linear layers in one launch, for compute capability 9.0 and
 * tokens of at most 192 values. A gradient is the product deltas^T inputs. It is divided into square tiles as
 * wide as a token, so that few values are loaded several times. A block adds up a tile over a part of the
 * rows, and writes a partial sum. All blocks run at the same time, and each has a multiprocessor of its own.
 *
 * The rows are divided into units of HEIGHT rows. The blocks of a tile take units in turn, and begin with the
 * last unit: the previous kernel has just written the last rows, so they may still be in L2. */
#include <cuda.h>

#include "common/check.cuh"
#include "train/vit/hopper.cuh"
#include "train/vit/kernels.cuh"

#define STAGES    4 /* units in shared memory */
#define TILES_MAX 3 /* parts of 64 values along the edge of a tile */

/* A tile's columns of a unit, in parts of 64 columns. */
template <int TILES> struct weights_memory {
    struct {
        tile_row deltas[TILES][HEIGHT], inputs[TILES][HEIGHT];
    } stages[STAGES];
    uint64_t full[STAGES], empty[STAGES];
};

struct weights_part {
    CUtensorMap deltas, inputs;
    float *partial; /* (part, out, in) */
    uint32_t in, out;
};

struct weights_plan {
    struct weights_part all[VIT_WEIGHTS_MAX];
    uint32_t tiles, units; /* `tiles`: of the first product */
};

/* Loads the units of a block; by one thread. */
template <int TILES>
static __device__ void load_units(struct weights_memory<TILES> *memory, const struct weights_part &of,
                                  uint32_t row, uint32_t column, uint32_t last, uint32_t units)
{
    for (uint32_t number = 0; number < units; number++) {
        const uint32_t stage = number % STAGES, first = (last - number * gridDim.y) * HEIGHT;
        auto &into = memory->stages[stage];
        uint64_t *full = &memory->full[stage];
        barrier_wait(&memory->empty[stage], number / STAGES % 2 ^ 1);
        barrier_expect(full, sizeof into);
        for (int tile = 0; tile < TILES; tile++) {
            map_load(into.deltas[tile], &of.deltas, row + tile * TILE_WIDTH, first, full);
            map_load(into.inputs[tile], &of.inputs, column + tile * TILE_WIDTH, first, full);
        }
    }
}

/* Starts to add the products of a stage to the sums. A warpgroup has 64 rows of the tile and all columns. */
template <class T, int TILES>
static __device__ __forceinline__ void start_unit(tile_row (&deltas)[HEIGHT],
                                                  tile_row (&inputs)[TILES][HEIGHT],
                                                  float (&sums)[TILES * TILE_WIDTH / 2])
{
    const uint64_t a = wgmma_tile(deltas), b = wgmma_tile(inputs, sizeof inputs[0]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEIGHT / 16; step++)
        wgmma<T, TILES * TILE_WIDTH, 1, 1>(sums, a + step * WGMMA_NEXT_TRANSPOSED,
                                           b + step * WGMMA_NEXT_TRANSPOSED, true);
    wgmma_commit();
}

/* Block (tile, part) adds up units part, part + gridDim.y, ..., counted from the last one. */
template <class T, int TILES>
static __global__ void __launch_bounds__(128 * TILES + 128, 1)
    weights_kernel(const __grid_constant__ struct weights_plan plan)
{
    constexpr uint32_t WIDTH = TILES * TILE_WIDTH;
    extern __shared__ __align__(1024) unsigned char shared[];
    auto *memory = reinterpret_cast<struct weights_memory<TILES> *>(shared);
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    const bool second = blockIdx.x >= plan.tiles;
    const struct weights_part &of = plan.all[second];
    const uint32_t across = of.in / WIDTH, tile = blockIdx.x - (second ? plan.tiles : 0);
    const uint32_t row = tile / across * WIDTH, column = tile % across * WIDTH;
    const uint32_t last = plan.units - 1 - blockIdx.y, units = last / gridDim.y + 1;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(&memory->full[stage], 1);
            barrier_init(&memory->empty[stage], 4 * TILES);
        }
        bulk_fence();
    }
    __syncthreads();
    if (group == TILES) {
        if (threadIdx.x % 128 == 0)
            load_units(memory, of, row, column, last, units);
        return;
    }
    float sums[WIDTH / 2] = {};
    for (uint32_t number = 0; number < units; number++) {
        auto &stage = memory->stages[number % STAGES];
        barrier_wait(&memory->full[number % STAGES], number / STAGES % 2);
        start_unit<T, TILES>(stage.deltas[group], stage.inputs, sums);
        wgmma_wait<1>();
        if (number > 0 && lane == 0)
            barrier_arrive(&memory->empty[(number - 1) % STAGES]);
        __syncwarp();
    }
    wgmma_wait<0>();
    wgmma_ended(sums);
    float *to = of.partial + ((size_t)blockIdx.y * of.out + row + threadIdx.x / 32 * 16 + lane / 4) * of.in +
                column + lane % 4 * 2;
#pragma unroll
    for (uint32_t n = 0; n < WIDTH / 8; n++) {
        *reinterpret_cast<float2 *>(to + 8 * n) = {sums[4 * n], sums[4 * n + 1]};
        *reinterpret_cast<float2 *>(to + 8 * of.in + 8 * n) = {sums[4 * n + 2], sums[4 * n + 3]};
    }
}

/* ---- Launches ---- */

static uint32_t tiles_of(const struct vit_linear *linear, uint32_t edge)
{
    return linear->in / edge * (linear->out / edge);
}

/* Returns the edge of the tiles of layers, or 0 if their sizes do not fit. */
template <class T> static uint32_t edge_of(const struct vit_weights<T> *layers, uint32_t count)
{
    const struct vit_linear *first = &layers[0].linear;
    const uint32_t edge = first->in < first->out ? first->in : first->out;
    uint32_t tiles = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct vit_linear *linear = &layers[i].linear;
        if (linear->in % edge || linear->out % edge || linear->apart != linear->out ||
            linear->rows != first->rows)
            return 0;
        tiles += tiles_of(linear, edge);
    }
    return edge % TILE_WIDTH == 0 && edge <= TILES_MAX * TILE_WIDTH && tiles <= VIT_SIDE_BLOCKS ? edge : 0;
}

template <class T, int TILES>
static enum status launch(const struct weights_plan *plan, dim3 grid, cudaStream_t stream)
{
    const size_t bytes = sizeof(struct weights_memory<TILES>);
    TRY(allow_shared(weights_kernel<T, TILES>, bytes));
    weights_kernel<T, TILES><<<grid, 128 * TILES + 128, bytes, stream>>>(*plan);
    return CUDA_LAUNCHED("weights_kernel");
}

template <class T>
enum status weights_hopper_fit(const struct vit_weights<T> *layers, uint32_t count,
                               const struct vit_sums *sums, bool *fit)
{
    const uint32_t edge = edge_of<T>(layers, count);
    TRY(on_hopper(fit));
    *fit = *fit && edge > 0 && sums->used + (size_t)VIT_SIDE_BLOCKS * edge * edge <= sums->size;
    return STATUS_OK;
}

template <class T>
enum status weights_hopper(const struct vit_weights<T> *layers, uint32_t count, struct vit_sums *sums,
                           cudaStream_t stream)
{
    const uint32_t edge = edge_of<T>(layers, count), rows = layers[0].linear.rows;
    struct weights_plan plan = {};
    uint32_t tiles = 0;
    plan.tiles = tiles_of(&layers[0].linear, edge);
    plan.units = (rows + HEIGHT - 1) / HEIGHT;
    for (uint32_t i = 0; i < count; i++)
        tiles += tiles_of(&layers[i].linear, edge);
    const uint32_t most = VIT_SIDE_BLOCKS / tiles, parts = plan.units < most ? plan.units : most;
    for (uint32_t i = 0; i < count; i++) {
        const struct vit_linear *linear = &layers[i].linear;
        const struct vit_sum sum = {NULL, parts, 1, linear->in * linear->out, {layers[i].gradients}};
        struct weights_part *part = &plan.all[i];
        TRY(describe_tiles<T>(layers[i].deltas, rows, linear->out, HEIGHT, &part->deltas));
        TRY(describe_tiles<T>(layers[i].inputs, rows, linear->in, HEIGHT, &part->inputs));
        part->in = linear->in;
        part->out = linear->out;
        part->partial = vit_sums_room(sums);
        TRY(vit_sums_add(sums, &sum));
    }
    switch (edge / TILE_WIDTH) {
    case 1:
        return launch<T, 1>(&plan, dim3(tiles, parts), stream);
    case 2:
        return launch<T, 2>(&plan, dim3(tiles, parts), stream);
    default:
        return launch<T, 3>(&plan, dim3(tiles, parts), stream);
    }
}

EACH_HALF(weights_hopper_fit)
EACH_HALF(weights_hopper)
