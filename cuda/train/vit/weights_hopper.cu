/* The gradients of the weights of up to four linear layers in one launch, for compute capability 9.0 and
 * tokens of at most 192 values. A gradient is the product deltas^T inputs. It is divided into square tiles as
 * wide as a token, so that few values are loaded several times. An item of work adds up a tile over a part of
 * the rows, and writes a partial sum. All blocks run at the same time; with tiles of 192, each has a
 * multiprocessor of its own.
 *
 * The rows are divided into units of HEIGHT rows. The items of a tile take units in turn, and begin with the
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
    float *partial;          /* (part, out, in) */
    uint32_t in, out, parts; /* `parts`: of the rows */
    uint32_t first;          /* number of the first item of this layer */
};

/* The first `single` blocks have one item each. The other blocks share the other items. */
struct weights_plan {
    struct weights_part all[VIT_WEIGHTS_MAX];
    uint32_t count, items, single, units;
};

/* An item: columns `row` of the deltas and `column` of the inputs, and units last, last - apart, ... */
struct weights_item {
    const struct weights_part *of;
    uint32_t row, column, part, last, apart, units;
};

template <int TILES>
static __device__ __forceinline__ struct weights_item item_at(const struct weights_plan &plan, uint32_t item)
{
    constexpr uint32_t WIDTH = TILES * TILE_WIDTH;
    uint32_t which = 0;
    while (which + 1 < plan.count && item >= plan.all[which + 1].first)
        which++;
    const struct weights_part *of = &plan.all[which];
    const uint32_t across = of->in / WIDTH, tiles = across * (of->out / WIDTH);
    const uint32_t tile = (item - of->first) % tiles, part = (item - of->first) / tiles;
    const uint32_t last = plan.units - 1 - part;
    return {of, tile / across * WIDTH, tile % across * WIDTH, part, last, of->parts, last / of->parts + 1};
}

/* Returns the item of this block after `item`. */
static __device__ __forceinline__ uint32_t next_item(const struct weights_plan &plan, uint32_t item)
{
    return item < plan.single ? plan.items : item + gridDim.x - plan.single;
}

/* Loads the units of all items of a block; by one thread. */
template <int TILES>
static __device__ void load_items(struct weights_memory<TILES> *memory, const struct weights_plan &plan)
{
    uint32_t number = 0;
    for (uint32_t at = blockIdx.x; at < plan.items; at = next_item(plan, at)) {
        const struct weights_item item = item_at<TILES>(plan, at);
        for (uint32_t i = 0; i < item.units; i++, number++) {
            const uint32_t stage = number % STAGES, first = (item.last - i * item.apart) * HEIGHT;
            auto &into = memory->stages[stage];
            uint64_t *full = &memory->full[stage];
            barrier_wait(&memory->empty[stage], number / STAGES % 2 ^ 1);
            barrier_expect(full, sizeof into);
            for (int tile = 0; tile < TILES; tile++) {
                map_load(into.deltas[tile], &item.of->deltas, item.row + tile * TILE_WIDTH, first, full);
                map_load(into.inputs[tile], &item.of->inputs, item.column + tile * TILE_WIDTH, first, full);
            }
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

/* Writes the partial sum of an item. */
template <int TILES>
static __device__ __forceinline__ void write_item(const struct weights_item &item,
                                                  const float (&sums)[TILES * TILE_WIDTH / 2])
{
    const uint32_t lane = threadIdx.x % 32, in = item.of->in;
    float *to = item.of->partial +
                ((size_t)item.part * item.of->out + item.row + threadIdx.x / 32 * 16 + lane / 4) * in +
                item.column + lane % 4 * 2;
#pragma unroll
    for (uint32_t n = 0; n < TILES * TILE_WIDTH / 8; n++) {
        *reinterpret_cast<float2 *>(to + 8 * n) = {sums[4 * n], sums[4 * n + 1]};
        *reinterpret_cast<float2 *>(to + 8 * in + 8 * n) = {sums[4 * n + 2], sums[4 * n + 3]};
    }
}

template <class T, int TILES>
static __global__ void __launch_bounds__(128 * TILES + 128, 1)
    weights_kernel(const __grid_constant__ struct weights_plan plan)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    auto *memory = reinterpret_cast<struct weights_memory<TILES> *>(shared);
    const uint32_t group = own_group();
    const bool leads = threadIdx.x % 32 == 0; /* this thread releases stages for its warp */
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
            load_items(memory, plan);
        return;
    }
    uint32_t number = 0; /* units so far */
    for (uint32_t at = blockIdx.x; at < plan.items; at = next_item(plan, at)) {
        const struct weights_item item = item_at<TILES>(plan, at);
        float sums[TILES * TILE_WIDTH / 2] = {};
        for (uint32_t i = 0; i < item.units; i++, number++) {
            auto &stage = memory->stages[number % STAGES];
            barrier_wait(&memory->full[number % STAGES], number / STAGES % 2);
            start_unit<T, TILES>(stage.deltas[group], stage.inputs, sums);
            wgmma_wait<1>();
            if (i > 0 && leads)
                barrier_arrive(&memory->empty[(number - 1) % STAGES]);
            __syncwarp();
        }
        wgmma_wait<0>();
        wgmma_ended(sums);
        if (leads)
            barrier_arrive(&memory->empty[(number - 1) % STAGES]);
        write_item<TILES>(item, sums);
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
    for (uint32_t i = 0; i < count; i++) {
        const struct vit_linear *linear = &layers[i].linear;
        if (linear->in % edge || linear->out % edge || linear->apart != linear->out ||
            linear->rows != first->rows || tiles_of(linear, edge) > VIT_WEIGHTS_ITEMS)
            return 0;
    }
    return edge % TILE_WIDTH == 0 && edge <= TILES_MAX * TILE_WIDTH ? edge : 0;
}

/* Returns the number of parts of a layer's rows. It does not depend on the other layers of the launch. */
static uint32_t parts_of(const struct vit_linear *linear, uint32_t wanted, uint32_t edge)
{
    const uint32_t units = (linear->rows + HEIGHT - 1) / HEIGHT;
    const uint32_t most = VIT_WEIGHTS_ITEMS / tiles_of(linear, edge), fit = units < most ? units : most;
    return wanted < fit ? wanted : fit;
}

template <class T, int TILES>
static enum status launch(const struct weights_plan *plan, uint32_t blocks, cudaStream_t stream)
{
    const size_t bytes = sizeof(struct weights_memory<TILES>);
    TRY(allow_shared(weights_kernel<T, TILES>, bytes));
    weights_kernel<T, TILES><<<blocks, 128 * TILES + 128, bytes, stream>>>(*plan);
    return CUDA_LAUNCHED("weights_kernel");
}

template <class T>
enum status weights_hopper_fit(const struct vit_weights<T> *layers, uint32_t count,
                               const struct vit_sums *sums, bool *fit)
{
    const uint32_t edge = edge_of<T>(layers, count);
    size_t room = 0;
    for (uint32_t i = 0; edge > 0 && i < count; i++)
        room += (size_t)parts_of(&layers[i].linear, layers[i].parts, edge) * layers[i].linear.in *
                layers[i].linear.out;
    TRY(on_hopper(fit));
    *fit = *fit && edge > 0 && sums->used + room <= sums->size;
    return STATUS_OK;
}

template <class T>
enum status weights_hopper(const struct vit_weights<T> *layers, uint32_t count, struct vit_sums *sums,
                           cudaStream_t stream)
{
    const uint32_t edge = edge_of<T>(layers, count), rows = layers[0].linear.rows;
    struct weights_plan plan = {};
    uint32_t blocks = VIT_SIDE_BLOCKS;
    plan.count = count;
    plan.units = (rows + HEIGHT - 1) / HEIGHT;
    for (uint32_t i = 0; i < count; i++) {
        const struct vit_linear *linear = &layers[i].linear;
        struct weights_part *part = &plan.all[i];
        TRY(describe_tiles<T>(layers[i].deltas, rows, linear->out, HEIGHT, &part->deltas));
        TRY(describe_tiles<T>(layers[i].inputs, rows, linear->in, HEIGHT, &part->inputs));
        part->in = linear->in;
        part->out = linear->out;
        part->parts = parts_of(linear, layers[i].parts, edge);
        part->partial = vit_sums_room(sums);
        part->first = plan.items;
        plan.items += part->parts * tiles_of(linear, edge);
        const struct vit_sum sum = {NULL, part->parts, 1, linear->in * linear->out, {layers[i].gradients}};
        TRY(vit_sums_add(sums, &sum));
    }
    plan.single = count > 2 ? plan.all[2].first : plan.items;
    if (plan.single == plan.items || plan.single >= blocks)
        blocks = plan.single = plan.items;
    switch (edge / TILE_WIDTH) {
    case 1:
        return launch<T, 1>(&plan, blocks, stream);
    case 2:
        return launch<T, 2>(&plan, blocks, stream);
    default:
        return launch<T, 3>(&plan, blocks, stream);
    }
}

EACH_HALF(weights_hopper_fit)
EACH_HALF(weights_hopper)
