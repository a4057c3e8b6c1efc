/* Matrix products fused with GELU, for compute capability 9.0 and rows of at most 192 inputs. The forward
 * pass computes the linear layer before GELU. The backward pass computes the gradients of the inputs of the
 * linear layer after GELU. The results are four times as wide as the inputs, so reading and writing them
 * takes longer than the products. These kernels read or write each of these values once; a matrix product and
 * a separate GELU access some of them two or three times.
 *
 * A block has BLOCK_ROWS rows of inputs in shared memory, and processes 64 columns of the result at a time.
 * An item is such a part of the result (BLOCK_ROWS rows, 64 columns), and each block processes consecutive
 * items. A multiprocessor runs two blocks, so that one block multiplies or loads while the other processes
 * its results. */
#include "common/check.cuh"
#include "train/vit/hopper.cuh"
#include "train/vit/kernels.cuh"

#define WARPS      8               /* two warpgroups */
#define BLOCK_ROWS VIT_HIDDEN_ROWS /* 16 per warp */
#define COLUMNS    64              /* columns of an item */
#define TILES_MAX  3               /* tiles along the summed dimension: at most 192 values */

/* Forward: `values` has hidden values and their GELU. Backward: `values` has the hidden values of this and
 * the next item, and `columns` has the sums over each warp's rows, for this and the previous item. */
template <int TILES> struct hidden_memory {
    tile_row inputs[TILES][BLOCK_ROWS];
    tile_row weights[TILES][COLUMNS];
    tile_row values[2][BLOCK_ROWS];
    float columns[2][WARPS][COLUMNS];
};

/* `inputs` (rows, 64 TILES). Forward: weights (columns, 64 TILES), bias (columns); the results are `hidden`,
 * and `results` with the GELU of `hidden`. Backward: weights (64 TILES, columns); `hidden` is read, and
 * `results` gets its gradients. `partial` (block of BLOCK_ROWS rows, columns) gets the sums of these
 * gradients over the rows of each block. */
template <class T> struct hidden_plan {
    uint32_t rows, columns;
    const T *inputs, *weights, *bias;
    T *hidden, *results;
    float *partial;
};

/* Where an item is in the matrices, and where a warp's rows are in the item. */
struct hidden_place {
    uint32_t block;       /* the item has rows BLOCK_ROWS * block to BLOCK_ROWS * block + BLOCK_ROWS - 1 */
    uint32_t column, row; /* first column of the item; the warp's first row in the tiles */
    uint32_t count; /* number of rows in the matrices from the tiles' first row on; may exceed BLOCK_ROWS */
    size_t at;      /* index of the item's first value in an array (rows, columns) */
};

template <class T>
static __device__ __forceinline__ struct hidden_place place_of(const struct hidden_plan<T> &plan,
                                                               uint32_t item)
{
    const uint32_t parts = plan.columns / COLUMNS, block = item / parts, column = item % parts * COLUMNS;
    return {block, column, threadIdx.x / 32 * 16, plan.rows - block * BLOCK_ROWS,
            (size_t)block * BLOCK_ROWS * plan.columns + column};
}

template <class T, int TILES>
static __device__ __forceinline__ void load_inputs(struct hidden_memory<TILES> *memory,
                                                   const struct hidden_plan<T> &plan,
                                                   const struct hidden_place &place)
{
    const T *from = plan.inputs + (size_t)place.block * BLOCK_ROWS * TILES * TILE_WIDTH;
    for (int tile = 0; tile < TILES; tile++)
        copy_rows16(memory->inputs[tile], place.row, place.count, from + tile * TILE_WIDTH,
                    TILES * TILE_WIDTH);
}

template <class T, int TILES, bool BACK>
static __device__ __forceinline__ void load_weights(struct hidden_memory<TILES> *memory,
                                                    const struct hidden_plan<T> &plan,
                                                    const struct hidden_place &place)
{
    for (uint32_t part = threadIdx.x / 32; part < TILES * COLUMNS / 16; part += WARPS) {
        const uint32_t tile = part / (COLUMNS / 16), row = part % (COLUMNS / 16) * 16;
        const size_t apart = BACK ? plan.columns : TILES * TILE_WIDTH;
        const T *from = BACK ? plan.weights + (size_t)tile * TILE_WIDTH * plan.columns + place.column
                             : plan.weights + (size_t)place.column * TILES * TILE_WIDTH + tile * TILE_WIDTH;
        copy_rows16(memory->weights[tile], row, COLUMNS, from, apart);
    }
}

/* Starts sums = inputs weights^T (forward) or inputs weights (backward) for the warpgroup's rows. */
template <class T, int TILES, bool BACK>
static __device__ __forceinline__ void start_product(struct hidden_memory<TILES> *memory,
                                                     float (&sums)[COLUMNS / 2])
{
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const uint64_t a = wgmma_tile(memory->inputs[tile][threadIdx.x / 128 * HEIGHT]);
        const uint64_t b = wgmma_tile(memory->weights[tile]);
#pragma unroll
        for (int step = 0; step < TILE_WIDTH / 16; step++)
            wgmma<T, COLUMNS, 0, BACK>(sums, a + step * WGMMA_NEXT,
                                       b + step * (BACK ? WGMMA_NEXT_TRANSPOSED : WGMMA_NEXT),
                                       tile + step > 0);
    }
    wgmma_commit();
}

/* Adds the bias, and writes hidden values and their GELU. GELU is computed from the rounded values, because
 * the backward pass reads the rounded values. */
template <class T, int TILES>
static __device__ __forceinline__ void
finish(struct hidden_memory<TILES> *memory, const struct hidden_plan<T> &plan,
       const struct hidden_place &place, const float (&sums)[COLUMNS / 2])
{
    const uint32_t column = place.column + threadIdx.x % 4 * 2;
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
        uint32_t hidden[4], active[4];
        for (int i = 0; i < 4; i++) {
            const float *sum = sums + 8 * step + 2 * i;
            const float2 bias =
                values_of<T>(*reinterpret_cast<const uint32_t *>(plan.bias + column + 16 * step + i / 2 * 8));
            hidden[i] = pack<T>(sum[0] + bias.x, sum[1] + bias.y);
            const float2 x = values_of<T>(hidden[i]);
            active[i] = pack<T>(gelu(x.x), gelu(x.y));
        }
        put_fragment(memory->values[0], place.row, 16 * step, hidden);
        put_fragment(memory->values[1], place.row, 16 * step, active);
    }
    __syncwarp();
    write_rows16(memory->values[0], place.row, place.count, plan.hidden + place.at, plan.columns);
    write_rows16(memory->values[1], place.row, place.count, plan.results + place.at, plan.columns);
    __syncwarp(); /* the next item overwrites the rows */
}

/* Multiplies the sums by the derivative of GELU at the hidden values, writes the products, and stores the
 * sums of their columns over the warp's rows. */
template <class T, int TILES>
static __device__ __forceinline__ void
finish_back(struct hidden_memory<TILES> *memory, const struct hidden_plan<T> &plan,
            const struct hidden_place &place, uint32_t which, float (&sums)[COLUMNS / 2])
{
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
        uint32_t word[4];
        get_fragment(memory->values[which], place.row, 16 * step, word);
        for (int i = 0; i < 4; i++) {
            const float2 x = values_of<T>(word[i]);
            float *sum = sums + 8 * step + 2 * i;
            sum[0] *= gelu_slope(x.x);
            sum[1] *= gelu_slope(x.y);
            word[i] = pack<T>(sum[0], sum[1]);
        }
        put_fragment(memory->values[which], place.row, 16 * step, word);
    }
    __syncwarp();
    write_rows16(memory->values[which], place.row, place.count, plan.results + place.at, plan.columns);
    sum_columns<COLUMNS>(sums, 1, place.row, place.count, memory->columns[which][threadIdx.x / 32]);
    __syncwarp(); /* the next item but one overwrites the rows */
}

/* Adds up the warps' column sums for an item that all warps have finished, and writes the totals. */
template <class T, int TILES>
static __device__ __forceinline__ void write_columns(struct hidden_memory<TILES> *memory,
                                                     const struct hidden_plan<T> &plan, uint32_t item,
                                                     uint32_t which)
{
    const struct hidden_place place = place_of<T>(plan, item);
    if (threadIdx.x >= COLUMNS)
        return;
    float sum = 0;
    for (int warp = 0; warp < WARPS; warp++)
        sum += memory->columns[which][warp][threadIdx.x];
    plan.partial[(size_t)place.block * plan.columns + place.column + threadIdx.x] = sum;
}

template <class T, int TILES, bool BACK>
static __global__ void __launch_bounds__(32 * WARPS, 2)
    hidden_kernel(const struct hidden_plan<T> plan, uint32_t items)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    struct hidden_memory<TILES> *memory = reinterpret_cast<struct hidden_memory<TILES> *>(shared);
    const uint32_t begin = (uint32_t)((uint64_t)items * blockIdx.x / gridDim.x);
    const uint32_t end = (uint32_t)((uint64_t)items * (blockIdx.x + 1) / gridDim.x);
    struct hidden_place place = place_of<T>(plan, begin);
    load_inputs<T>(memory, plan, place);
    load_weights<T, TILES, BACK>(memory, plan, place);
    if (BACK)
        copy_rows16(memory->values[0], place.row, place.count, plan.hidden + place.at, plan.columns);
    for (uint32_t item = begin; item < end; item++) {
        const bool more = item + 1 < end;
        const uint32_t which = (item - begin) % 2;
        const struct hidden_place next = place_of<T>(plan, more ? item + 1 : item);
        float sums[COLUMNS / 2];
        copy_commit();
        copy_wait<0>();
        wgmma_publish();
        __syncthreads(); /* the item's data are in shared memory, and all warps have finished the previous
                            item */
        start_product<T, TILES, BACK>(memory, sums);
        if (BACK && more)
            copy_rows16(memory->values[1 - which], next.row, next.count, plan.hidden + next.at, plan.columns);
        if (BACK && item > begin)
            write_columns<T>(memory, plan, item - 1, 1 - which);
        wgmma_wait<0>();
        wgmma_ended(sums);
        __syncthreads(); /* all warps have read inputs and weights */
        if (more)
            load_weights<T, TILES, BACK>(memory, plan, next);
        if (next.block != place.block)
            load_inputs<T>(memory, plan, next);
        if constexpr (BACK)
            finish_back<T>(memory, plan, place, which, sums);
        else
            finish<T>(memory, plan, place, sums);
        place = next;
    }
    __syncthreads();
    if (BACK)
        write_columns<T>(memory, plan, end - 1, (end - 1 - begin) % 2);
}

/* ---- Launches ---- */

enum status hidden_hopper_fits(uint32_t inner, uint32_t columns, bool *fits)
{
    TRY(on_hopper(fits));
    *fits = *fits && inner % TILE_WIDTH == 0 && inner <= TILES_MAX * TILE_WIDTH && columns % COLUMNS == 0;
    return STATUS_OK;
}

template <class T> static uint32_t blocks_of(const struct hidden_plan<T> *plan)
{
    return (plan->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
}

template <class T, int TILES, bool BACK>
static enum status launch(const struct hidden_plan<T> *plan, cudaStream_t stream)
{
    const uint32_t items = blocks_of<T>(plan) * (plan->columns / COLUMNS),
                   bytes = sizeof(struct hidden_memory<TILES>);
    int device, processors;
    CUDA_TRY(cudaGetDevice(&device));
    CUDA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    CUDA_TRY(cudaFuncSetAttribute(hidden_kernel<T, TILES, BACK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)bytes));
    const uint32_t most = 2 * (uint32_t)processors, blocks = items < most ? items : most;
    hidden_kernel<T, TILES, BACK><<<blocks, 32 * WARPS, bytes, stream>>>(*plan, items);
    return CUDA_LAUNCHED("hidden_kernel");
}

template <class T, bool BACK>
static enum status launch_any(const struct hidden_plan<T> *plan, uint32_t inner, cudaStream_t stream)
{
    switch (inner / TILE_WIDTH) {
    case 1:
        return launch<T, 1, BACK>(plan, stream);
    case 2:
        return launch<T, 2, BACK>(plan, stream);
    default:
        return launch<T, 3, BACK>(plan, stream);
    }
}

template <class T>
enum status hidden_hopper_forward(const struct vit_linear *linear, const T *inputs, const T *weights,
                                  const T *bias, T *hidden, T *active, cudaStream_t stream)
{
    const struct hidden_plan<T> plan = {
        linear->rows, linear->out, inputs, weights, bias, hidden, active, NULL
    };
    return launch_any<T, false>(&plan, linear->in, stream);
}

template <class T>
enum status hidden_hopper_backward(const struct vit_linear *linear, const T *out_deltas, const T *weights,
                                   const T *hidden, T *deltas, float *bias, struct vit_sums *sums,
                                   cudaStream_t stream)
{
    const struct hidden_plan<T> plan = {
        linear->rows, linear->in, out_deltas, weights, NULL, const_cast<T *>(hidden), deltas,
            vit_sums_room(sums)
    };
    const struct vit_sum sum = {NULL, blocks_of<T>(&plan), 1, linear->in, {bias}};
    TRY((launch_any<T, true>(&plan, linear->out, stream)));
    return vit_sums_add(sums, &sum);
}

EACH_HALF(hidden_hopper_forward)
EACH_HALF(hidden_hopper_backward)
