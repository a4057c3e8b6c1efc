/* The kernel of convolutions as matrix products, for any kind of tensor core: the forward pass, and the
 * gradients of the inputs. A block computes RESNET_TILE_ROWS rows of the result. Threads copy the windows of
 * the source directly into shared memory, so the matrix of windows is never stored. The end of a block adds
 * the gradient of a shortcut, applies the mask of a ReLU and adds up what batch normalisation needs, which
 * saves passes over the tensors. */
#ifndef FDSL_CUDA_TRAIN_RESNET_CONV_CUH
#define FDSL_CUDA_TRAIN_RESNET_CONV_CUH

#include "common/check.cuh"
#include "train/resnet/kernels.cuh"

#define ROWS    RESNET_TILE_ROWS
#define DEPTH   64 /* values of a sum per stage */
#define UNITS   8  /* units of 16 bytes per line of a stage: DEPTH values */
#define STAGES  3
#define THREADS 256
#define BATCH   4
#define OUTSIDE (-(1 << 29)) /* coordinate of rows beyond the last one: outside of every source */

/* The work at the end of a block. */
enum ending {
    ENDING_PLAIN,
    ENDING_SQUARES, /* forward: partial sums of the results and of their squares */
    ENDING_BACK,    /* struct resnet_after */
};

template <class T> struct conv_plan {
    struct conv_pass pass;
    struct divider sample, line; /* rows per sample, and per line */
    uint32_t rows, depth, column_tiles;
    uint32_t first_part; /* of this pass among those of its convolution */
    const T *source, *weights;
    T *result;
    float *partial; /* ENDING_SQUARES; NULL: no sums */
    const T *added, *relu;
    const T *inputs[2]; /* of normalisations; NULL: none */
    float *sums[2];
};

/* A row of the result. */
struct conv_row {
    uint32_t n, p, q;
};

template <class T>
static __device__ __forceinline__ struct conv_row row_of(const struct conv_plan<T> &plan, uint32_t row)
{
    const uint32_t n = plan.sample.quotient(row), pixel = row - n * plan.sample.by;
    const uint32_t p = plan.line.quotient(pixel);
    return {n, p, pixel - p * plan.line.by};
}

/* Returns where a stage stores unit `unit` of a line. The order avoids bank conflicts. */
static __device__ __forceinline__ int unit_at(int line, int unit)
{
    return line * UNITS + (unit ^ (line & 7));
}

/* The part of the operands that a thread copies: one unit of every SPACE-th row of the source and of every
 * SPACE-th of the COLUMNS lines of the weights. */
template <class T, int COLUMNS> struct conv_copier {
    static constexpr int SPACE = THREADS / UNITS, HELD = ROWS / SPACE, LINES = COLUMNS / SPACE;
    const T *row[HELD];
    int32_t y[HELD], x[HELD];
    const T *weights;
    uint32_t lines;         /* lines of the weights from this thread's first one on */
    uint32_t channel, i, j; /* the unit of the next stage: tap (i, j) and its channel */

    __device__ __forceinline__ conv_copier(const struct conv_plan<T> &plan, uint32_t first_row,
                                           uint32_t first_column)
    {
        const uint32_t own = threadIdx.x / UNITS;
#pragma unroll
        for (int r = 0; r < HELD; r++) {
            const uint32_t at = first_row + own + SPACE * r;
            const struct conv_row place = row_of<T>(plan, at < plan.rows ? at : 0);
            y[r] = at < plan.rows ? (int32_t)place.p * plan.pass.scale + plan.pass.first_y : OUTSIDE;
            x[r] = (int32_t)place.q * plan.pass.scale + plan.pass.first_x;
            row[r] = plan.source + place.n * plan.pass.image;
        }
        lines = first_column + own < plan.pass.columns ? plan.pass.columns - first_column - own : 0;
        weights = plan.weights + (lines > 0 ? (size_t)(first_column + own) * plan.pass.weight_row : 0);
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
    __device__ __forceinline__ void copy(const struct conv_plan<T> &plan, uint4 *stage)
    {
        const int own = (int)threadIdx.x / UNITS, unit = (int)threadIdx.x % UNITS;
        const bool deep = i < plan.pass.taps_y;
#pragma unroll
        for (int r = 0; r < HELD; r++) {
            const int32_t at_y = y[r] + (int32_t)i * plan.pass.step,
                          at_x = x[r] + (int32_t)j * plan.pass.step;
            const bool inside = deep && is_inside(&plan.pass, at_y, at_x);
            const T *from = row[r] + (size_t)(uint32_t)at_y * plan.pass.line +
                            (size_t)(uint32_t)at_x * plan.pass.pixel + channel;
            copy_async16(stage + unit_at(own + SPACE * r, unit), inside ? from : plan.source, inside);
        }
        const T *weight = weights + tap_at(&plan.pass, i, j) * plan.pass.channels + channel;
#pragma unroll
        for (int l = 0; l < LINES; l++) {
            const bool inside = deep && (uint32_t)(SPACE * l) < lines;
            copy_async16(stage + ROWS * UNITS + unit_at(own + SPACE * l, unit),
                         inside ? weight + (size_t)(SPACE * l) * plan.pass.weight_row : plan.weights, inside);
        }
        channel += DEPTH;
        settle(plan.pass);
    }
};

/* A tile of the result. */
template <int COLUMNS> struct conv_tile {
    static constexpr int STAGE = (ROWS + COLUMNS) * UNITS;
    static constexpr int PITCH = COLUMNS + 8; /* values per row of the results in shared memory */
    static constexpr int GROUPS = COLUMNS / 8, LANES = THREADS / GROUPS;
    static constexpr size_t BYTES = (size_t)STAGES * STAGE * sizeof(uint4);
};

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

/* Adds the values of `words`. */
template <class T> static __device__ __forceinline__ void add8(struct eight &value, uint4 words)
{
    const struct eight added = unpack8<T>(words);
#pragma unroll
    for (int i = 0; i < 8; i++)
        value.value[i] += added.value[i];
}

/* Replaces values by 0 where the output of a ReLU in `words` is not positive. */
template <class T> static __device__ __forceinline__ void mask8(struct eight &value, uint4 words)
{
    const struct eight relu = unpack8<T>(words);
#pragma unroll
    for (int i = 0; i < 8; i++)
        value.value[i] = relu.value[i] > 0 ? value.value[i] : 0;
}

/* Stores the results of a block; see enum ending. A thread stores 8 columns of every LANES-th row. It loads
 * what BATCH rows need before it stores the first of them, because loads do not overtake stores. */
template <class T, int COLUMNS, enum ending ENDING>
static __device__ __forceinline__ void finish(const struct conv_plan<T> &plan, uint32_t row_tile,
                                              uint32_t first_column, uint4 *shared)
{
    typedef conv_tile<COLUMNS> tile;
    constexpr bool BACK = ENDING == ENDING_BACK;
    const uint32_t group = threadIdx.x % tile::GROUPS, lane = threadIdx.x / tile::GROUPS;
    const uint32_t column = first_column + group * 8, columns = plan.pass.columns;
    const bool valid = column < columns;
    float sum[8] = {}, products[2][8] = {};
#pragma unroll 1
    for (uint32_t first = 0; first < ROWS; first += BATCH * tile::LANES) {
        size_t at[BATCH];
        uint4 added[BATCH], relu[BATCH], inputs[2][BATCH];
        bool inside[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const uint32_t row = row_tile * ROWS + first + k * tile::LANES + lane;
            inside[k] = valid && row < plan.rows;
            at[k] = (size_t)row * columns;
            if (plan.pass.out_scale > 1 && inside[k]) {
                const struct conv_row place = row_of<T>(plan, row);
                at[k] = result_at(&plan.pass, place.n, place.p, place.q);
            }
            at[k] += column;
            if (BACK && inside[k]) {
                if (plan.added)
                    added[k] = *reinterpret_cast<const uint4 *>(plan.added + at[k]);
                if (plan.relu)
                    relu[k] = *reinterpret_cast<const uint4 *>(plan.relu + at[k]);
#pragma unroll
                for (int s = 0; s < 2; s++)
                    if (plan.inputs[s])
                        inputs[s][k] = *reinterpret_cast<const uint4 *>(plan.inputs[s] + at[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (!inside[k])
                continue;
            uint4 words = shared[((first + k * tile::LANES + lane) * tile::PITCH + group * 8) / 8];
            struct eight value = unpack8<T>(words);
            if (BACK) {
                if (plan.added)
                    add8<T>(value, added[k]);
                if (plan.relu)
                    mask8<T>(value, relu[k]);
                words = pack8<T>(value);
                value = unpack8<T>(words);
            }
            *reinterpret_cast<uint4 *>(plan.result + at[k]) = words;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sum[i] += value.value[i];
                if (ENDING == ENDING_SQUARES)
                    products[0][i] = fmaf(value.value[i], value.value[i], products[0][i]);
            }
#pragma unroll
            for (int s = 0; s < 2; s++)
                if (BACK && plan.inputs[s]) {
                    const struct eight input = unpack8<T>(inputs[s][k]);
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        products[s][i] = fmaf(value.value[i], input.value[i], products[s][i]);
                }
        }
    }
    float *scratch = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int s = 0; s < 2; s++) {
        float *to = ENDING == ENDING_SQUARES && s == 0 ? plan.partial : BACK ? plan.sums[s] : nullptr;
        if (!to)
            continue;
        to += (size_t)(plan.first_part + row_tile) * 2 * columns;
        write_sums<COLUMNS>(sum, valid, scratch, first_column, columns, to);
        write_sums<COLUMNS>(products[s], valid, scratch, first_column, columns, to + columns);
    }
}

/* MULTIPLIER multiplies the stages, and holds the sums of a thread: start() begins with a stage, end() waits
 * for it, and store() writes the sums to shared memory, rounded to T. */
template <class T, class MULTIPLIER, int COLUMNS, enum ending ENDING>
static __global__ void __launch_bounds__(THREADS, 2)
    conv_kernel(const __grid_constant__ struct conv_plan<T> plan)
{
    typedef conv_tile<COLUMNS> tile;
    extern __shared__ __align__(1024) uint4 shared[];
    const uint32_t row_tile = blockIdx.x / plan.column_tiles;
    const uint32_t first_column = (blockIdx.x - row_tile * plan.column_tiles) * COLUMNS;
    const uint32_t steps = (plan.depth + DEPTH - 1) / DEPTH;
    MULTIPLIER multiplier = {};
    conv_copier<T, COLUMNS> copier(plan, row_tile * ROWS, first_column);
#pragma unroll
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < steps)
            copier.copy(plan, shared + s * tile::STAGE);
        copy_commit();
    }
    for (uint32_t s = 0; s < steps; s++) {
        copy_wait<STAGES - 2>();
        MULTIPLIER::publish();
        __syncthreads(); /* the stage is in shared memory, and all warps have finished the previous one */
        multiplier.start(shared + s % STAGES * tile::STAGE);
        if (s + STAGES - 1 < steps)
            copier.copy(plan, shared + (s + STAGES - 1) % STAGES * tile::STAGE);
        copy_commit();
        multiplier.end();
    }
    copy_wait<0>();
    __syncthreads();
    multiplier.store(reinterpret_cast<uint32_t *>(shared), tile::PITCH);
    __syncthreads();
    finish<T, COLUMNS, ENDING>(plan, row_tile, first_column, shared);
}

template <class T, class MULTIPLIER, int COLUMNS, enum ending ENDING>
static enum status conv_launch(struct conv_plan<T> *plan, cudaStream_t stream)
{
    typedef conv_tile<COLUMNS> tile;
    plan->column_tiles = (plan->pass.columns + COLUMNS - 1) / COLUMNS;
    CUDA_TRY((cudaFuncSetAttribute(conv_kernel<T, MULTIPLIER, COLUMNS, ENDING>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)tile::BYTES)));
    conv_kernel<T, MULTIPLIER, COLUMNS, ENDING>
        <<<resnet_parts(plan->rows) * plan->column_tiles, THREADS, tile::BYTES, stream>>>(*plan);
    return CUDA_LAUNCHED("conv_kernel");
}

/* Launches the kernel for these columns, with a multiplier of the template MULTIPLIER. */
template <class T, template <class, int> class MULTIPLIER>
static enum status conv_launch_any(enum ending ending, struct conv_plan<T> *plan, cudaStream_t stream)
{
    if (plan->pass.columns > 64)
        return ending == ENDING_PLAIN ? conv_launch<T, MULTIPLIER<T, 128>, 128, ENDING_PLAIN>(plan, stream)
               : ending == ENDING_SQUARES
                   ? conv_launch<T, MULTIPLIER<T, 128>, 128, ENDING_SQUARES>(plan, stream)
                   : conv_launch<T, MULTIPLIER<T, 128>, 128, ENDING_BACK>(plan, stream);
    return ending == ENDING_PLAIN     ? conv_launch<T, MULTIPLIER<T, 64>, 64, ENDING_PLAIN>(plan, stream)
           : ending == ENDING_SQUARES ? conv_launch<T, MULTIPLIER<T, 64>, 64, ENDING_SQUARES>(plan, stream)
                                      : conv_launch<T, MULTIPLIER<T, 64>, 64, ENDING_BACK>(plan, stream);
}

/* Compute capability 9.0, with HAVE_HOPPER (conv_hopper.cu). */
template <class T>
enum status conv_hopper_launch(enum ending ending, struct conv_plan<T> *plan, cudaStream_t stream);

#endif
