/* The linear layer before GELU, fused with GELU, for compute capability 9.0 and few inputs. The hidden values
 * are four times as wide as the inputs, so reading and writing them takes longer than the products. These
 * kernels access each hidden value once, where a matrix product and a separate GELU access it two or three
 * times.
 *
 * A block has BLOCK_ROWS rows of inputs in shared memory, and processes 64 columns of the result at a time.
 * An item is one such part of the result, and each block has adjacent items. While a block processes an item,
 * it loads the weights of the next item. */
#include "common/check.cuh"
#include "train/vit/gelu.cuh"
#include "train/vit/hidden.cuh"
#include "train/vit/hopper.cuh"

#define WARPS      16              /* four warpgroups */
#define BLOCK_ROWS VIT_HIDDEN_ROWS /* 16 per warp */
#define COLUMNS    64              /* columns of an item */
#define TILES_MAX  3               /* tiles along the summed dimension: at most 192 values */

/* `values` has the hidden values of this and the next item in the backward pass. In the forward pass, it has
 * the hidden values and their GELU. `columns` has the sums over the rows of each warp, for this and the
 * previous item. */
template <int TILES> struct hidden_memory {
    tile_row inputs[TILES][BLOCK_ROWS];
    tile_row weights[2][TILES][COLUMNS];
    tile_row values[2][BLOCK_ROWS];
    float columns[2][WARPS][COLUMNS];
};

/* `inputs` (rows, 64 TILES). Forward: weights (columns, 64 TILES), bias (columns); the results are `hidden`
 * and `results`, the GELU of `hidden`. Backward: weights (64 TILES, columns); `hidden` is an input, `results`
 * has the gradients of `hidden`, and `partial` (BLOCK_ROWS rows, columns) their sums. */
struct plan {
    uint32_t rows, columns;
    const bf16 *inputs, *weights, *bias;
    bf16 *hidden, *results;
    float *partial;
};

/* An item: rows BLOCK_ROWS * block to BLOCK_ROWS * block + BLOCK_ROWS - 1, and COLUMNS columns from `column`
 * on. */
struct item {
    uint32_t block, column;
};

static __device__ __forceinline__ struct item item_at(const struct plan &plan, uint32_t number)
{
    const uint32_t parts = plan.columns / COLUMNS;
    return {number / parts, number % parts * COLUMNS};
}

static __device__ __forceinline__ struct item item_after(const struct plan &plan, struct item item)
{
    item.column += COLUMNS;
    return item.column < plan.columns ? item : (struct item){item.block + 1, 0};
}

/* Returns the number of rows from the item's first row on. */
static __device__ __forceinline__ uint32_t rows_from(const struct plan &plan, const struct item &item)
{
    return plan.rows - item.block * BLOCK_ROWS;
}

/* Returns the index of the item's first value in (rows, columns). */
static __device__ __forceinline__ size_t first_value(const struct plan &plan, const struct item &item)
{
    return (size_t)item.block * BLOCK_ROWS * plan.columns + item.column;
}

/* Returns this warp's first row in the tiles. */
static __device__ __forceinline__ uint32_t warp_row(void)
{
    return threadIdx.x / 32 * 16;
}

template <int TILES>
static __device__ __forceinline__ void load_inputs(struct hidden_memory<TILES> *memory,
                                                   const struct plan &plan, const struct item &item)
{
    for (int tile = 0; tile < TILES; tile++)
        copy_rows16(memory->inputs[tile], warp_row(), rows_from(plan, item),
                    plan.inputs + (size_t)item.block * BLOCK_ROWS * TILES * TILE_WIDTH + tile * TILE_WIDTH,
                    TILES * TILE_WIDTH);
}

/* Loads the weights of an item to buffer `which`. */
template <int TILES, bool BACK>
static __device__ __forceinline__ void load_weights(struct hidden_memory<TILES> *memory,
                                                    const struct plan &plan, const struct item &item,
                                                    uint32_t which)
{
    for (uint32_t part = threadIdx.x / 32; part < TILES * COLUMNS / 16; part += WARPS) {
        const uint32_t tile = part / (COLUMNS / 16), row = part % (COLUMNS / 16) * 16;
        const size_t apart = BACK ? plan.columns : TILES * TILE_WIDTH;
        const size_t at =
            BACK ? (size_t)tile * TILE_WIDTH * apart + item.column : item.column * apart + tile * TILE_WIDTH;
        copy_rows16(memory->weights[which][tile], row, COLUMNS, plan.weights + at, apart);
    }
}

/* Loads the hidden values of an item to buffer `which`. Each warp loads the rows that it needs. */
template <int TILES>
static __device__ __forceinline__ void load_hidden(struct hidden_memory<TILES> *memory,
                                                   const struct plan &plan, const struct item &item,
                                                   uint32_t which)
{
    copy_rows16(memory->values[which], warp_row(), rows_from(plan, item),
                plan.hidden + first_value(plan, item), plan.columns);
}

/* Waits until all copies of all threads so far are in shared memory. All warps have then finished what they
 * did before. */
static __device__ __forceinline__ void meet(void)
{
    copy_commit();
    copy_wait<0>();
    wgmma_publish();
    __syncthreads();
}

/* Starts sums = inputs weights for the warpgroup's rows. */
template <int TILES, bool BACK>
static __device__ __forceinline__ void start_product(struct hidden_memory<TILES> *memory, uint32_t which,
                                                     float (&sums)[COLUMNS / 2])
{
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const uint64_t a = wgmma_tile(memory->inputs[tile][threadIdx.x / 128 * HEIGHT]);
        const uint64_t b = wgmma_tile(memory->weights[which][tile]);
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++)
            wgmma<COLUMNS, 0, BACK>(sums, a + step * WGMMA_NEXT,
                                    b + step * (BACK ? WGMMA_NEXT_TRANSPOSED : WGMMA_NEXT), tile + step > 0);
    }
    wgmma_commit();
}

/* Adds the bias, and writes hidden values and their GELU. GELU is that of the rounded values, because the
 * backward pass reads the rounded values. */
template <int TILES>
static __device__ __forceinline__ void finish_forward(struct hidden_memory<TILES> *memory,
                                                      const struct plan &plan, const struct item &item,
                                                      const float (&sums)[COLUMNS / 2])
{
    const uint32_t column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
        uint32_t hidden[4], active[4];
        for (int i = 0; i < 4; i++) {
            const float2 bias = values_of(*reinterpret_cast<const uint32_t *>(
                plan.bias + item.column + 16 * step + i / 2 * 8 + column));
            const float *sum = sums + 8 * step + 2 * i;
            hidden[i] = pack(sum[0] + bias.x, sum[1] + bias.y);
            const float2 x = values_of(hidden[i]);
            active[i] = pack(gelu(x.x), gelu(x.y));
        }
        put_fragment(memory->values[0], warp_row(), 16 * step, hidden);
        put_fragment(memory->values[1], warp_row(), 16 * step, active);
    }
    __syncwarp();
    write_rows16(memory->values[0], warp_row(), rows_from(plan, item), plan.hidden + first_value(plan, item),
                 plan.columns);
    write_rows16(memory->values[1], warp_row(), rows_from(plan, item), plan.results + first_value(plan, item),
                 plan.columns);
    __syncwarp(); /* the next item overwrites the rows */
}

/* Multiplies the sums by the derivative of GELU, writes them, and adds up the columns of the warp's rows. */
template <int TILES>
static __device__ __forceinline__ void finish_back(struct hidden_memory<TILES> *memory,
                                                   const struct plan &plan, const struct item &item,
                                                   uint32_t which, float (&sums)[COLUMNS / 2])
{
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
        uint32_t word[4];
        get_fragment(memory->values[which], warp_row(), 16 * step, word);
        for (int i = 0; i < 4; i++) {
            const float2 x = values_of(word[i]);
            float *sum = sums + 8 * step + 2 * i;
            sum[0] *= gelu_slope(x.x);
            sum[1] *= gelu_slope(x.y);
            word[i] = pack(sum[0], sum[1]);
        }
        put_fragment(memory->values[which], warp_row(), 16 * step, word);
    }
    __syncwarp();
    write_rows16(memory->values[which], warp_row(), rows_from(plan, item),
                 plan.results + first_value(plan, item), plan.columns);
    sum_columns<COLUMNS>(sums, 1, warp_row(), rows_from(plan, item),
                         memory->columns[which][threadIdx.x / 32]);
    __syncwarp(); /* the next item but one overwrites the rows */
}

/* Adds up the sums of the warps for an item that all warps have finished. */
template <int TILES>
static __device__ __forceinline__ void write_columns(struct hidden_memory<TILES> *memory,
                                                     const struct plan &plan, const struct item &item,
                                                     uint32_t which)
{
    if (threadIdx.x >= COLUMNS)
        return;
    float sum = 0;
    for (int warp = 0; warp < WARPS; warp++)
        sum += memory->columns[which][warp][threadIdx.x];
    plan.partial[(size_t)item.block * plan.columns + item.column + threadIdx.x] = sum;
}

/* The items of a block. The last `left` items, with this one, are not finished yet. */
struct turn {
    struct item last, now;
    uint32_t left;
};

/* Finishes an item, whose product was started before. Before, starts the product of the next item, which the
 * tensor cores compute while the warps finish this item. The item's weights, and the hidden values of the
 * item before it, are in buffers that are free now. They take the weights of the next item but one, and the
 * hidden values of the next item. After the last item, a product is computed that is not used: only products
 * that are started unconditionally do not wait for the accesses to their registers. */
template <int TILES, bool BACK>
static __device__ __forceinline__ void take_item(struct hidden_memory<TILES> *memory, const struct plan &plan,
                                                 struct turn *turn, uint32_t which,
                                                 float (&sums)[COLUMNS / 2], float (&next_sums)[COLUMNS / 2])
{
    const struct item next = item_after(plan, turn->now);
    wgmma_wait<0>();
    meet();
    if (next.block != turn->now.block && turn->left > 1) {
        load_inputs(memory, plan, next);
        meet();
    }
    start_product<TILES, BACK>(memory, 1 - which, next_sums);
    if (turn->left > 2)
        load_weights<TILES, BACK>(memory, plan, item_after(plan, next), which);
    if (BACK && turn->left > 1)
        load_hidden(memory, plan, next, 1 - which);
    if (BACK && turn->last.block != UINT32_MAX)
        write_columns(memory, plan, turn->last, 1 - which);
    if constexpr (BACK)
        finish_back(memory, plan, turn->now, which, sums);
    else
        finish_forward(memory, plan, turn->now, sums);
    *turn = {turn->now, next, turn->left - 1};
}

template <int TILES, bool BACK>
static __global__ void __launch_bounds__(32 * WARPS, 1) hidden_kernel(const struct plan plan, uint32_t items)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char shared[];
    struct hidden_memory<TILES> *memory = reinterpret_cast<struct hidden_memory<TILES> *>(shared);
    const uint32_t begin = (uint32_t)((uint64_t)items * blockIdx.x / gridDim.x);
    const uint32_t end = (uint32_t)((uint64_t)items * (blockIdx.x + 1) / gridDim.x);
    struct turn turn = {{UINT32_MAX, 0}, item_at(plan, begin), end - begin};
    float sums[COLUMNS / 2], next_sums[COLUMNS / 2];
    load_inputs(memory, plan, turn.now);
    load_weights<TILES, BACK>(memory, plan, turn.now, 0);
    if (turn.left > 1)
        load_weights<TILES, BACK>(memory, plan, item_after(plan, turn.now), 1);
    if (BACK)
        load_hidden(memory, plan, turn.now, 0);
    meet();
    start_product<TILES, BACK>(memory, 0, sums);
    while (turn.left > 1) {
        take_item<TILES, BACK>(memory, plan, &turn, 0, sums, next_sums);
        take_item<TILES, BACK>(memory, plan, &turn, 1, next_sums, sums);
    }
    if (turn.left == 1)
        take_item<TILES, BACK>(memory, plan, &turn, 0, sums, next_sums);
    wgmma_wait<0>();
    __syncthreads();
    if (BACK)
        write_columns(memory, plan, turn.last, (end - begin + 1) % 2);
#endif
}

/* ---- Launches ---- */

enum status hidden_hopper_fits(uint32_t inner, uint32_t columns, bool *fits)
{
    *fits = false;
#ifdef HOPPER
    cudaFuncAttributes attributes;
    CUDA_TRY(cudaFuncGetAttributes(&attributes, hidden_kernel<1, true>));
    /* The driver may have compiled PTX of an older architecture, which has no wgmma. */
    *fits = attributes.ptxVersion == 90 && inner % TILE_WIDTH == 0 && inner <= TILES_MAX * TILE_WIDTH &&
            columns % COLUMNS == 0;
#endif
    return STATUS_OK;
}

static uint32_t blocks_of(const struct plan *plan)
{
    return (plan->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
}

template <int TILES, bool BACK> static enum status launch(const struct plan *plan, cudaStream_t stream)
{
    const uint32_t items = blocks_of(plan) * (plan->columns / COLUMNS),
                   bytes = sizeof(struct hidden_memory<TILES>);
    int device, processors;
    CUDA_TRY(cudaGetDevice(&device));
    CUDA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    CUDA_TRY(cudaFuncSetAttribute(hidden_kernel<TILES, BACK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)bytes));
    const uint32_t blocks = items < (uint32_t)processors ? items : (uint32_t)processors;
    hidden_kernel<TILES, BACK><<<blocks, 32 * WARPS, bytes, stream>>>(*plan, items);
    CUDA_TRY_LAUNCH("hidden_kernel");
    return STATUS_OK;
}

template <bool BACK>
static enum status launch_any(const struct plan *plan, uint32_t inner, cudaStream_t stream)
{
    switch (inner / TILE_WIDTH) {
    case 1:
        return launch<1, BACK>(plan, stream);
    case 2:
        return launch<2, BACK>(plan, stream);
    default:
        return launch<3, BACK>(plan, stream);
    }
}

enum status hidden_hopper_forward(const struct vit_linear *linear, const bf16 *inputs, const bf16 *weights,
                                  const bf16 *bias, bf16 *hidden, bf16 *active, cudaStream_t stream)
{
    const struct plan plan = {linear->rows, linear->out, inputs, weights, bias, hidden, active, NULL};
    return launch_any<false>(&plan, linear->in, stream);
}

enum status hidden_hopper_backward(const struct vit_linear *linear, const bf16 *out_deltas,
                                   const bf16 *weights, const bf16 *hidden, bf16 *deltas, float *sums,
                                   float *partial, cudaStream_t stream)
{
    const struct plan plan = {linear->rows, linear->in, out_deltas, weights, NULL, const_cast<bf16 *>(hidden),
                              deltas,       partial};
    const struct vit_sums all = {1, linear->in, {sums}};
    TRY(launch_any<true>(&plan, linear->out, stream));
    return vit_partial_sums(partial, blocks_of(&plan), &all, stream);
}
