/* Convolutions as matrix products on tensor cores: the forward pass, and the gradients of the inputs. A block
 * computes RESNET_TILE_ROWS rows of the result. Threads copy the windows of the source directly into shared
 * memory, so the matrix of windows is never stored. The end of a block adds the gradient of a shortcut,
 * applies the mask of a ReLU and adds up what batch normalisation needs, which saves passes over the tensors.
 */
#include "common/check.cuh"
#include "train/resnet/kernels.cuh"

#define ROWS    RESNET_TILE_ROWS
#define DEPTH   32 /* values of a sum per stage */
#define UNITS   4  /* units of 16 bytes per line of a stage: DEPTH values */
#define STAGES  4
#define THREADS 256
#define OUTSIDE (-(1 << 29)) /* coordinate of rows beyond the last one: outside of every source */

/* What the end of a block does. */
enum ending {
    ENDING_PLAIN,
    ENDING_SQUARES, /* forward: partial sums of the results and of their squares */
    ENDING_BACK,    /* struct resnet_after */
};

struct conv_plan {
    struct conv_pass pass;
    struct divider sample, line; /* rows per sample, and per line */
    uint32_t rows, depth, column_tiles;
    uint32_t first_part; /* of this pass among those of its convolution */
    const bf16 *source, *weights;
    bf16 *result;
    float *partial; /* ENDING_SQUARES; NULL: no sums */
    const bf16 *added, *relu;
    const bf16 *inputs[2]; /* of normalisations; NULL: none */
    const float *moments[2];
    float *sums[2];
};

/* A row of the result. */
struct conv_row {
    uint32_t n, p, q;
};

static __device__ __forceinline__ struct conv_row row_of(const struct conv_plan &plan, uint32_t row)
{
    const uint32_t n = plan.sample.quotient(row), pixel = row - n * plan.sample.by;
    const uint32_t p = plan.line.quotient(pixel);
    return {n, p, pixel - p * plan.line.by};
}

/* Returns where a stage stores unit `unit` of a line. The order avoids bank conflicts. */
static __device__ __forceinline__ int unit_at(int line, int unit)
{
    return line * UNITS + (unit ^ (line >> 1 & 3));
}

/* The part of the operands that a thread copies: one unit of two rows (64 lines apart) of the source and of
 * LINES lines of the weights. */
template <int LINES> struct conv_copier {
    const bf16 *row[2];
    int32_t y[2], x[2];
    const bf16 *line[LINES];
    bool has_line[LINES];
    uint32_t channel, i, j; /* the unit of the next stage: tap (i, j) and its channel */

    __device__ __forceinline__ conv_copier(const struct conv_plan &plan, uint32_t first_row,
                                           uint32_t first_column)
    {
        const uint32_t own = threadIdx.x / UNITS;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t at = first_row + own + 64 * r;
            const struct conv_row place = row_of(plan, at < plan.rows ? at : 0);
            y[r] = at < plan.rows ? (int32_t)place.p * plan.pass.scale + plan.pass.first_y : OUTSIDE;
            x[r] = (int32_t)place.q * plan.pass.scale + plan.pass.first_x;
            row[r] = plan.source + place.n * plan.pass.image;
        }
#pragma unroll
        for (int l = 0; l < LINES; l++) {
            const uint32_t column = first_column + own + 64 * l;
            has_line[l] = column < plan.pass.columns;
            line[l] = plan.weights + (has_line[l] ? (size_t)column * plan.pass.weight_row : 0);
        }
        channel = threadIdx.x % UNITS * 8;
        i = j = 0;
        settle(plan.pass);
    }

    /* Moves to the tap that has `channel`. */
    __device__ __forceinline__ void settle(const struct conv_pass &pass)
    {
        while (channel >= pass.channels) {
            channel -= pass.channels;
            if (++j == pass.taps_x) {
                j = 0;
                i++;
            }
        }
    }

    /* Starts the copies of a stage: first ROWS lines of the source, then those of the weights. */
    __device__ __forceinline__ void copy(const struct conv_plan &plan, uint4 *stage)
    {
        const int own = (int)threadIdx.x / UNITS, unit = (int)threadIdx.x % UNITS;
        const bool deep = i < plan.pass.taps_y;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int32_t at_y = y[r] + (int32_t)i * plan.pass.step,
                          at_x = x[r] + (int32_t)j * plan.pass.step;
            const bool inside = deep && is_inside(&plan.pass, at_y, at_x);
            const bf16 *from = row[r] + (size_t)(uint32_t)at_y * plan.pass.line +
                               (size_t)(uint32_t)at_x * plan.pass.pixel + channel;
            copy_async16(stage + unit_at(own + 64 * r, unit), inside ? from : plan.source, inside);
        }
        const uint32_t weight = tap_at(&plan.pass, i, j) * plan.pass.channels + channel;
#pragma unroll
        for (int l = 0; l < LINES; l++) {
            const bool inside = deep && has_line[l];
            copy_async16(stage + ROWS * UNITS + unit_at(own + 64 * l, unit),
                         inside ? line[l] + weight : plan.weights, inside);
        }
        channel += DEPTH;
        settle(plan.pass);
    }
};

/* Rows and columns of a warp's part of a tile: 32 columns, and the rows that 8 warps leave. */
template <int COLUMNS> struct conv_tile {
    static constexpr int WARP_ROWS = ROWS * COLUMNS / 32 / (THREADS / 32), ROW_MMAS = WARP_ROWS / 16;
    static constexpr int ACROSS = COLUMNS / 32, STAGE = (ROWS + COLUMNS) * UNITS;
    static constexpr int PITCH = COLUMNS + 8; /* values per row of the results in shared memory */
    static constexpr int GROUPS = COLUMNS / 8, LANES = THREADS / GROUPS;
    static constexpr size_t BYTES = (size_t)STAGES * STAGE * sizeof(uint4);
};

template <int COLUMNS>
static __device__ __forceinline__ void multiply_stage(const uint4 *stage,
                                                      float (*sums)[4][4] /* [ROW_MMAS][4][4] */)
{
    typedef conv_tile<COLUMNS> tile;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int row = warp / tile::ACROSS * tile::WARP_ROWS, column = warp % tile::ACROSS * 32;
    const uint4 *weights = stage + ROWS * UNITS;
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        uint32_t a[tile::ROW_MMAS][4], b[2][4];
#pragma unroll
        for (int m = 0; m < tile::ROW_MMAS; m++)
            mma_load4(a[m], stage + unit_at(row + 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < 2; n++)
            mma_load4(b[n],
                      weights + unit_at(column + 16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < tile::ROW_MMAS; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                mma_16816(sums[m][n], a[m], &b[n / 2][n % 2 * 2], bf16());
    }
}

/* Stores a warp's results in shared memory, rounded to bf16. */
template <int COLUMNS>
static __device__ __forceinline__ void stage_results(float (*sums)[4][4], uint32_t *words)
{
    typedef conv_tile<COLUMNS> tile;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int row = warp / tile::ACROSS * tile::WARP_ROWS + lane / 4;
    const int column = warp % tile::ACROSS * 32 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < tile::ROW_MMAS; m++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float *of = sums[m][n];
            words[((row + 16 * m) * tile::PITCH + column + 8 * n) / 2] = pack(of[0], of[1]);
            words[((row + 16 * m + 8) * tile::PITCH + column + 8 * n) / 2] = pack(of[2], of[3]);
        }
}

/* Adds up the sums of all lanes, in order, and writes those of each column. */
template <int COLUMNS>
static __device__ __forceinline__ void write_sums(const float (&own)[8], bool valid, float *scratch,
                                                  uint32_t first_column, uint32_t columns, float *to)
{
    typedef conv_tile<COLUMNS> tile;
    const uint32_t group = threadIdx.x % tile::GROUPS, lane = threadIdx.x / tile::GROUPS;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++)
        scratch[lane * COLUMNS + group * 8 + i] = valid ? own[i] : 0;
    __syncthreads();
    if (threadIdx.x >= COLUMNS || first_column + threadIdx.x >= columns)
        return;
    float sum = 0;
    for (int l = 0; l < tile::LANES; l++)
        sum += scratch[l * COLUMNS + threadIdx.x];
    to[first_column + threadIdx.x] = sum;
}

/* Stores the results of a block; see enum ending. A thread stores 8 columns of every LANES-th row. */
template <int COLUMNS, enum ending ENDING>
static __device__ __forceinline__ void finish(const struct conv_plan &plan, uint32_t row_tile,
                                              uint32_t first_column, uint4 *shared)
{
    typedef conv_tile<COLUMNS> tile;
    const uint32_t group = threadIdx.x % tile::GROUPS, lane = threadIdx.x / tile::GROUPS;
    const uint32_t column = first_column + group * 8, columns = plan.pass.columns;
    const bool valid = column < columns;
    float sum[8] = {}, products[2][8] = {};
    struct eight mean[2] = {}, inverse[2] = {};
#pragma unroll
    for (int s = 0; s < 2; s++)
        if (ENDING == ENDING_BACK && plan.inputs[s] && valid) {
            mean[s] = load8(plan.moments[s] + NORM_MEAN * columns + column);
            inverse[s] = load8(plan.moments[s] + NORM_INVERSE * columns + column);
        }
    for (uint32_t r = lane; r < ROWS; r += tile::LANES) {
        const uint32_t row = row_tile * ROWS + r;
        if (!valid || row >= plan.rows)
            continue;
        size_t at = (size_t)row * columns;
        if (plan.pass.out_scale > 1) {
            const struct conv_row place = row_of(plan, row);
            at = result_at(&plan.pass, place.n, place.p, place.q);
        }
        at += column;
        uint4 words = shared[(r * tile::PITCH + group * 8) / 8];
        struct eight value = unpack8(words);
        if (ENDING == ENDING_BACK) {
            if (plan.added) {
                const struct eight added = load8(plan.added + at);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    value.value[i] += added.value[i];
            }
            if (plan.relu) {
                const struct eight relu = load8(plan.relu + at);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    value.value[i] = relu.value[i] > 0 ? value.value[i] : 0;
            }
            words = pack8(value);
            value = unpack8(words);
#pragma unroll
            for (int s = 0; s < 2; s++)
                if (plan.inputs[s]) {
                    const struct eight input = load8(plan.inputs[s] + at);
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        products[s][i] +=
                            value.value[i] * ((input.value[i] - mean[s].value[i]) * inverse[s].value[i]);
                }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum[i] += value.value[i];
            if (ENDING == ENDING_SQUARES)
                products[0][i] += value.value[i] * value.value[i];
        }
        *reinterpret_cast<uint4 *>(plan.result + at) = words;
    }
    float *scratch = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int s = 0; s < 2; s++) {
        float *to = ENDING == ENDING_SQUARES && s == 0 ? plan.partial
                    : ENDING == ENDING_BACK            ? plan.sums[s]
                                                       : nullptr;
        if (!to)
            continue;
        to += (size_t)(plan.first_part + row_tile) * 2 * columns;
        write_sums<COLUMNS>(sum, valid, scratch, first_column, columns, to);
        write_sums<COLUMNS>(products[s], valid, scratch, first_column, columns, to + columns);
    }
}

template <int COLUMNS, enum ending ENDING>
static __global__ void __launch_bounds__(THREADS, 2)
    conv_kernel(const __grid_constant__ struct conv_plan plan)
{
    typedef conv_tile<COLUMNS> tile;
    extern __shared__ uint4 shared[];
    const uint32_t row_tile = blockIdx.x / plan.column_tiles;
    const uint32_t first_column = (blockIdx.x - row_tile * plan.column_tiles) * COLUMNS;
    const uint32_t steps = (plan.depth + DEPTH - 1) / DEPTH;
    float sums[tile::ROW_MMAS][4][4] = {};
    conv_copier<COLUMNS / 64> copier(plan, row_tile * ROWS, first_column);
#pragma unroll
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < steps)
            copier.copy(plan, shared + s * tile::STAGE);
        copy_commit();
    }
    for (uint32_t s = 0; s < steps; s++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (s + STAGES - 1 < steps)
            copier.copy(plan, shared + (s + STAGES - 1) % STAGES * tile::STAGE);
        copy_commit();
        multiply_stage<COLUMNS>(shared + s % STAGES * tile::STAGE, sums);
    }
    copy_wait<0>();
    __syncthreads();
    stage_results<COLUMNS>(sums, reinterpret_cast<uint32_t *>(shared));
    __syncthreads();
    finish<COLUMNS, ENDING>(plan, row_tile, first_column, shared);
}

/* ---- Launches ---- */

template <int COLUMNS, enum ending ENDING>
static enum status launch(struct conv_plan *plan, cudaStream_t stream)
{
    typedef conv_tile<COLUMNS> tile;
    plan->column_tiles = (plan->pass.columns + COLUMNS - 1) / COLUMNS;
    CUDA_TRY(cudaFuncSetAttribute(conv_kernel<COLUMNS, ENDING>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)tile::BYTES));
    conv_kernel<COLUMNS, ENDING>
        <<<resnet_parts(plan->rows) * plan->column_tiles, THREADS, tile::BYTES, stream>>>(*plan);
    return CUDA_LAUNCHED("conv_kernel");
}

template <enum ending ENDING> static enum status launch(struct conv_plan *plan, cudaStream_t stream)
{
    return plan->pass.columns > 64 ? launch<128, ENDING>(plan, stream) : launch<64, ENDING>(plan, stream);
}

static struct conv_plan plan_of(const struct conv_pass *pass, uint32_t samples, const bf16 *source,
                                const bf16 *weights, bf16 *result)
{
    struct conv_plan plan = {};
    plan.pass = *pass;
    plan.rows = samples * pass->lines * pass->across;
    plan.depth = pass_depth(pass);
    plan.source = source;
    plan.weights = weights;
    plan.result = result;
    if (plan.rows > 0) {
        plan.sample = divider_of(pass->lines * pass->across);
        plan.line = divider_of(pass->across);
    }
    return plan;
}

enum status resnet_forward(const struct conv_shape *shape, uint32_t samples, const bf16 *inputs,
                           const bf16 *weights, bf16 *outputs, float *partial, cudaStream_t stream)
{
    const struct conv_pass pass = conv_forward_pass(shape);
    struct conv_plan plan = plan_of(&pass, samples, inputs, weights, outputs);
    plan.partial = partial;
    return partial ? launch<ENDING_SQUARES>(&plan, stream) : launch<ENDING_PLAIN>(&plan, stream);
}

uint32_t resnet_input_parts(const struct conv_shape *shape, uint32_t samples)
{
    uint32_t parts = 0;
    for (uint32_t y = 0; y < shape->stride; y++)
        for (uint32_t x = 0; x < shape->stride; x++) {
            const struct conv_pass pass = conv_input_pass(shape, y, x);
            parts += resnet_parts((size_t)samples * pass.lines * pass.across);
        }
    return parts;
}

enum status resnet_inputs(const struct conv_shape *shape, uint32_t samples, const bf16 *deltas,
                          const bf16 *opposite, const struct resnet_after *after, bf16 *in_deltas,
                          uint32_t *parts, cudaStream_t stream)
{
    *parts = 0;
    for (uint32_t y = 0; y < shape->stride; y++)
        for (uint32_t x = 0; x < shape->stride; x++) {
            const struct conv_pass pass = conv_input_pass(shape, y, x);
            struct conv_plan plan = plan_of(&pass, samples, deltas, opposite, in_deltas);
            if (plan.rows == 0)
                continue;
            plan.first_part = *parts;
            plan.added = after->added;
            plan.relu = after->relu;
            for (int s = 0; s < 2; s++)
                if (after->summed[s].norm) {
                    plan.inputs[s] = after->summed[s].inputs;
                    plan.moments[s] = after->summed[s].norm->values;
                    plan.sums[s] = after->summed[s].norm->partial;
                }
            const bool plain = !plan.added && !plan.relu && !plan.sums[0] && !plan.sums[1];
            TRY(plain ? launch<ENDING_PLAIN>(&plan, stream) : launch<ENDING_BACK>(&plan, stream));
            *parts += resnet_parts(plan.rows);
        }
    return STATUS_OK;
}
