/* Layer normalisation, fused with the operation before it: the sum at the end of a branch, or the assembly of
 * the tokens from class token, patches and positions. One or more warps process a row; a lane holds pairs of
 * adjacent values. */
#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/vit/fragments.cuh"
#include "train/vit/kernels.cuh"

#define WARPS (BLOCK / 32)

/* The source of the values of a row. */
enum source {
    SOURCE_SUMS,   /* the existing sums */
    SOURCE_BRANCH, /* shortcut + factors * branch */
    SOURCE_TOKENS, /* tokens + positions */
};

template <class T> struct forward_plan {
    struct vit_norm<T> norm;
    uint32_t count;                       /* rows to normalise */
    const T *shortcut, *branch;           /* for SOURCE_TOKENS, `branch` has the patches */
    const float *class_token, *positions; /* only for SOURCE_TOKENS */
};

/* Returns values 2 * pair and 2 * pair + 1 of the row of a token of a sample. */
template <class T, enum source SOURCE>
static __device__ __forceinline__ float2 pair_at(const struct forward_plan<T> &plan, uint32_t sample,
                                                 uint32_t token, uint32_t pair, float factor)
{
    const struct vit_rows &rows = plan.norm.rows;
    const size_t at = ((size_t)sample * rows.tokens + token) * rows.width + 2 * pair;
    if (SOURCE == SOURCE_SUMS)
        return values_of<T>(*reinterpret_cast<const uint32_t *>(plan.norm.sums + at));
    if (SOURCE == SOURCE_BRANCH) {
        float2 in = values_of<T>(*reinterpret_cast<const uint32_t *>(plan.shortcut + at));
        float2 by = values_of<T>(*reinterpret_cast<const uint32_t *>(plan.branch + at));
        return {fmaf(factor, by.x, in.x), fmaf(factor, by.y, in.y)};
    }
    float2 in = reinterpret_cast<const float2 *>(plan.class_token)[pair];
    if (token > 0)
        in = values_of<T>(*reinterpret_cast<const uint32_t *>(
            plan.branch + ((size_t)sample * (rows.tokens - 1) + token - 1) * rows.width + 2 * pair));
    float2 position = reinterpret_cast<const float2 *>(plan.positions + (size_t)token * rows.width)[pair];
    return {in.x + position.x, in.y + position.y};
}

/* Each warp normalises one row. Lane l has up to PAIRS pairs of this row: l, l + 32, ... The moments are
 * computed from the rounded sums, because the backward pass reads the rounded sums. With up to 6 pairs, 32
 * registers suffice, so 8 blocks fill a multiprocessor. */
template <class T, int PAIRS, enum source SOURCE>
static __global__ void __launch_bounds__(BLOCK, PAIRS <= 6 ? 8 : 1)
    norm_kernel(const struct forward_plan<T> plan)
{
    const struct vit_rows &rows = plan.norm.rows;
    const uint32_t row = own_element() / 32, lane = threadIdx.x % 32, pairs = rows.width / 2;
    if (row >= plan.count)
        return;
    const uint32_t sample = plan.norm.first_tokens ? row : row / rows.tokens;
    const uint32_t token = plan.norm.first_tokens ? 0 : row - sample * rows.tokens;
    const float factor = plan.norm.factors ? plan.norm.factors[sample] : 1;
    const size_t at = (size_t)row * rows.width;
    float2 value[PAIRS];
    float sum = 0, squares = 0;
    /* All loads come before the first store, because the compiler cannot know that no store changes a value
     * that is loaded after it. */
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint32_t pair = 32 * i + lane;
        value[i] = pair < pairs ? pair_at<T, SOURCE>(plan, sample, token, pair, factor) : float2{0, 0};
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint32_t pair = 32 * i + lane;
        const uint32_t rounded = pack<T>(value[i].x, value[i].y);
        if (SOURCE != SOURCE_SUMS && pair < pairs)
            reinterpret_cast<uint32_t *>(plan.norm.sums + at)[pair] = rounded;
        value[i] = values_of<T>(rounded);
        sum += value[i].x + value[i].y;
    }
    const float mean = warp_sum(sum) / (float)rows.width;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        if (32 * i + lane < pairs) {
            value[i] = {value[i].x - mean, value[i].y - mean};
            squares = fmaf(value[i].x, value[i].x, fmaf(value[i].y, value[i].y, squares));
        }
    const float variance = warp_sum(squares) / (float)rows.width;
    const float scale = 1 / sqrtf(variance + (float)LAYER_NORM_EPSILON);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint32_t pair = 32 * i + lane;
        if (pair >= pairs)
            continue;
        float2 weight = reinterpret_cast<const float2 *>(plan.norm.weight)[pair];
        float2 bias = reinterpret_cast<const float2 *>(plan.norm.bias)[pair];
        reinterpret_cast<uint32_t *>(plan.norm.outputs + at)[pair] =
            pack<T>(fmaf(value[i].x * scale, weight.x, bias.x), fmaf(value[i].y * scale, weight.y, bias.y));
    }
    if (lane == 0)
        plan.norm.moments[row] = {mean, scale};
}

/* ---- Backward ---- */

template <class T> struct backward_plan {
    struct vit_norm<T> norm;
    struct vit_norm_deltas<T> deltas;
    uint32_t count; /* number of rows, one per token */
    float share;    /* 1 / width */
    float *partial; /* (block, sum, width), with the sums for weight, bias and branch_bias */
};

#define SUMS        3
#define ROWS        2 /* rows that a warp processes at a time */
#define BACK_BLOCKS 3 /* minimum number of blocks that a multiprocessor can run at a time */
/* Maximum number of blocks. All of them run at the same time on 132 multiprocessors (H100 SXM, H200). With
 * more, the last blocks would start when others have ended, and would then be too few to use all of the
 * memory's bandwidth. This number is constant, because the order of the sums must not depend on the GPU. */
#define BACK_PARTS (BACK_BLOCKS * 132)

/* Adds up, in a fixed order, the sums of the warps that have the same columns, and writes the totals to
 * `partial`. */
template <class T, int PAIRS, int SPLIT>
static __device__ void write_partial(const struct backward_plan<T> &plan, const float2 sums[SUMS][PAIRS])
{
    __shared__ float2 all[WARPS][32];
    const uint32_t pairs = plan.norm.rows.width / 2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float2 *partial = reinterpret_cast<float2 *>(plan.partial) + (size_t)blockIdx.x * SUMS * pairs;
#pragma unroll
    for (int which = 0; which < SUMS; which++)
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const uint32_t pair = 32 * (warp * PAIRS + i) + lane;
            __syncthreads();
            all[warp][lane] = sums[which][i];
            __syncthreads();
            if (warp >= SPLIT || pair >= pairs)
                continue;
            float2 sum = all[warp][lane];
            for (int other = warp + SPLIT; other < WARPS; other += SPLIT)
                sum = {sum.x + all[other][lane].x, sum.y + all[other][lane].y};
            partial[which * pairs + pair] = sum;
        }
}

/* Each row has two sums, and each of the SPLIT adjacent warps of the row has a part of them. Adds up these
 * parts. `turn` alternates between calls, so that a warp does not overwrite what another warp still reads. */
template <int SPLIT> static __device__ __forceinline__ void add_parts(float2 sums[ROWS], uint32_t turn)
{
    __shared__ float2 parts[2][WARPS][ROWS];
    const uint32_t warp = threadIdx.x / 32;
    if (SPLIT == 1)
        return;
    if (threadIdx.x % 32 == 0)
        for (int r = 0; r < ROWS; r++)
            parts[turn][warp][r] = sums[r];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sums[r] = {0, 0};
        for (int part = 0; part < SPLIT; part++) {
            const float2 more = parts[turn][warp / SPLIT * SPLIT + part][r];
            sums[r] = {sums[r].x + more.x, sums[r].y + more.y};
        }
    }
}

/* A row in the backward pass. */
struct row {
    uint32_t number;
    uint32_t line;   /* index of the row in the arrays of struct vit_norm */
    float factor;    /* of stochastic depth */
    bool inside;     /* the row exists */
    bool normalised; /* false: this row gets no gradient from the normalisation */
};

/* Computes the sample only if it is needed: an integer division takes as long as many other operations. */
template <class T>
static __device__ __forceinline__ struct row row_at(const struct backward_plan<T> &plan, uint32_t number)
{
    const bool inside = number < plan.count, normalised = inside && plan.deltas.outputs;
    if (!plan.norm.factors && !plan.norm.first_tokens)
        return {number, number, 1, inside, normalised};
    const uint32_t sample = number / plan.norm.rows.tokens;
    const bool first = number == sample * plan.norm.rows.tokens;
    return {number, plan.norm.first_tokens ? sample : number,
            inside && plan.norm.factors ? plan.norm.factors[sample] : 1, inside,
            normalised && (!plan.norm.first_tokens || first)};
}

/* The values of a row that a lane processes. */
template <class T, int PAIRS> struct row_part {
    struct row row;
    struct vit_moments moments;
    uint32_t x[PAIRS], delta[PAIRS], later[PAIRS];
};

/* Loads all values of a row that a lane needs. The kernel loads all its rows before it stores any, so that
 * loads do not wait for stores. Values that do not exist are zeros. */
template <class T, int PAIRS>
static __device__ __forceinline__ void load_part(const struct backward_plan<T> &plan, uint32_t number,
                                                 uint32_t first, struct row_part<T, PAIRS> *part)
{
    const uint32_t pairs = plan.norm.rows.width / 2;
    part->row = row_at<T>(plan, number);
    part->moments = part->row.normalised ? plan.norm.moments[part->row.line] : vit_moments{0, 0};
    const size_t at = (size_t)part->row.line * pairs + first, later = (size_t)number * pairs + first;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const bool inside = first + 32 * i < pairs, normalised = inside && part->row.normalised;
        part->x[i] = normalised ? reinterpret_cast<const uint32_t *>(plan.norm.sums)[at + 32 * i] : 0;
        part->delta[i] =
            normalised ? reinterpret_cast<const uint32_t *>(plan.deltas.outputs)[at + 32 * i] : 0;
        part->later[i] = inside && part->row.inside && plan.deltas.later
                             ? reinterpret_cast<const uint32_t *>(plan.deltas.later)[later + 32 * i]
                             : 0;
    }
}

/* Returns pair i of the normalised values x' (see norm_back_kernel()). */
template <class T, int PAIRS>
static __device__ __forceinline__ float2 normalised(const struct row_part<T, PAIRS> &part, int i)
{
    const float2 x = values_of<T>(part.x[i]);
    return {(x.x - part.moments.mean) * part.moments.scale, (x.y - part.moments.mean) * part.moments.scale};
}

/* Adds a row to the sums for weight and bias. Returns this lane's parts of the sums of g and of g x' (see
 * norm_back_kernel()). */
template <class T, int PAIRS>
static __device__ __forceinline__ float2 add_row(const struct row_part<T, PAIRS> &part,
                                                 const float2 weight[PAIRS], float2 sums[SUMS][PAIRS])
{
    float2 products = {0, 0};
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const float2 along = normalised<T>(part, i), delta = values_of<T>(part.delta[i]);
        const float2 gradient = {weight[i].x * delta.x, weight[i].y * delta.y};
        products.x += gradient.x + gradient.y;
        products.y = fmaf(gradient.x, along.x, fmaf(gradient.y, along.y, products.y));
        sums[0][i] = {fmaf(delta.x, along.x, sums[0][i].x), fmaf(delta.y, along.y, sums[0][i].y)};
        sums[1][i] = {sums[1][i].x + delta.x, sums[1][i].y + delta.y};
    }
    return products;
}

/* Stores the gradients of a row, and adds the branch's gradients to `branch_sums`. */
template <class T, int PAIRS>
static __device__ __forceinline__ void
store_row(const struct backward_plan<T> &plan, const struct row_part<T, PAIRS> &part,
          const float2 weight[PAIRS], float2 products, uint32_t first, float2 branch_sums[PAIRS])
{
    const uint32_t pairs = plan.norm.rows.width / 2;
    const float mean = products.x * plan.share, product = products.y * plan.share;
    const float scale = part.moments.scale, factor = part.row.factor;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const size_t at = (size_t)part.row.number * pairs + first + 32 * i;
        const float2 along = normalised<T>(part, i), delta = values_of<T>(part.delta[i]);
        const float2 later = values_of<T>(part.later[i]);
        if (first + 32 * i >= pairs)
            break;
        float2 in = {weight[i].x * delta.x - mean - along.x * product,
                     weight[i].y * delta.y - mean - along.y * product};
        const uint32_t rounded = pack<T>(fmaf(scale, in.x, later.x), fmaf(scale, in.y, later.y));
        reinterpret_cast<uint32_t *>(plan.deltas.sums)[at] = rounded;
        in = values_of<T>(rounded);
        in = {factor * in.x, factor * in.y};
        if (plan.deltas.branch)
            reinterpret_cast<uint32_t *>(plan.deltas.branch)[at] = pack<T>(in.x, in.y);
        branch_sums[i] = {branch_sums[i].x + in.x, branch_sums[i].y + in.y};
    }
}

/* With x' = (x - mean) * scale and g = weight * gradient of the output, the gradient of x is scale * (g -
 * mean of g - x' * mean of g x'). SPLIT adjacent warps share a row; each processes up to 64 * PAIRS columns
 * of it. */
template <class T, int PAIRS, int SPLIT>
static __global__ void __launch_bounds__(BLOCK, BACK_BLOCKS)
    norm_back_kernel(const struct backward_plan<T> plan)
{
    constexpr uint32_t AT_A_TIME = WARPS / SPLIT * ROWS; /* rows that a block processes at a time */
    const uint32_t warp = threadIdx.x / 32, pairs = plan.norm.rows.width / 2;
    const uint32_t first = warp % SPLIT * PAIRS * 32 + threadIdx.x % 32;
    float2 sums[SUMS][PAIRS] = {}, weight[PAIRS];
    uint32_t turn = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        weight[i] = first + 32 * i < pairs
                        ? reinterpret_cast<const float2 *>(plan.norm.weight)[first + 32 * i]
                        : float2{0, 0};
    for (uint32_t begin = blockIdx.x * AT_A_TIME; begin < plan.count; begin += gridDim.x * AT_A_TIME) {
        struct row_part<T, PAIRS> part[ROWS];
        float2 products[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            load_part<T>(plan, begin + warp / SPLIT * ROWS + r, first, &part[r]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            products[r] = add_row<T>(part[r], weight, sums);
            products[r] = {warp_sum(products[r].x), warp_sum(products[r].y)};
        }
        add_parts<SPLIT>(products, turn);
        turn ^= 1;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (part[r].row.inside)
                store_row<T>(plan, part[r], weight, products[r], first, sums[2]);
    }
    write_partial<T, PAIRS, SPLIT>(plan, sums);
}

/* ---- Launches ---- */

/* Calls LAUNCH(pairs), where `pairs` is a constant: the number of pairs per lane, at least width / 64. */
#define WITH_PAIRS(width, LAUNCH) \
    do {                          \
        if ((width) <= 64)        \
            LAUNCH(1);            \
        else if ((width) <= 192)  \
            LAUNCH(3);            \
        else if ((width) <= 384)  \
            LAUNCH(6);            \
        else if ((width) <= 768)  \
            LAUNCH(12);           \
        else                      \
            LAUNCH(16);           \
    } while (0)

template <class T, enum source SOURCE>
static enum status launch_forward(struct forward_plan<T> plan, cudaStream_t stream)
{
    const struct vit_rows *rows = &plan.norm.rows;
    plan.count = plan.norm.first_tokens ? rows->samples : rows->samples * rows->tokens;
    const uint32_t blocks = blocks_for((size_t)plan.count * 32);
#define LAUNCH(pairs) norm_kernel<T, pairs, SOURCE><<<blocks, BLOCK, 0, stream>>>(plan)
    WITH_PAIRS(rows->width, LAUNCH);
#undef LAUNCH
    return CUDA_LAUNCHED("norm_kernel");
}

template <class T>
enum status vit_add_norm(const struct vit_norm<T> *norm, const T *shortcut, const T *branch,
                         cudaStream_t stream)
{
    const struct forward_plan<T> plan = {
        *norm, 0, shortcut, branch, NULL, NULL
    };
    return branch ? launch_forward<T, SOURCE_BRANCH>(plan, stream)
                  : launch_forward<T, SOURCE_SUMS>(plan, stream);
}

template <class T>
enum status vit_tokens_norm(const struct vit_norm<T> *norm, const T *patches, const float *class_token,
                            const float *positions, cudaStream_t stream)
{
    const struct forward_plan<T> plan = {
        *norm, 0, NULL, patches, class_token, positions
    };
    return launch_forward<T, SOURCE_TOKENS>(plan, stream);
}

template <class T>
enum status vit_add_norm_backward(const struct vit_norm<T> *norm, const struct vit_norm_deltas<T> *deltas,
                                  struct vit_sums *sums, cudaStream_t stream)
{
    const uint32_t rows = norm->rows.samples * norm->rows.tokens, width = norm->rows.width;
    const uint32_t needed = (rows + ROWS - 1) / ROWS, blocks = needed < BACK_PARTS ? needed : BACK_PARTS;
    const struct backward_plan<T> plan = {
        *norm, *deltas, rows, 1 / (float)width, vit_sums_room(sums)
    };
    if (width <= 64)
        norm_back_kernel<T, 1, 1><<<blocks, BLOCK, 0, stream>>>(plan);
    else if (width <= 192)
        norm_back_kernel<T, 3, 1><<<blocks, BLOCK, 0, stream>>>(plan);
    else if (width <= 384)
        norm_back_kernel<T, 3, 2><<<blocks, BLOCK, 0, stream>>>(plan);
    else if (width <= 768)
        norm_back_kernel<T, 3, 4><<<blocks, BLOCK, 0, stream>>>(plan);
    else
        norm_back_kernel<T, 2, 8><<<blocks, BLOCK, 0, stream>>>(plan);
    CUDA_TRY_LAUNCH("norm_back_kernel");
    const struct vit_sum sum = {
        NULL, blocks, SUMS, width, {deltas->weight, deltas->bias, deltas->branch_bias}};
    return vit_sums_add(sums, &sum);
}

EACH_HALF(vit_add_norm)
EACH_HALF(vit_tokens_norm)
EACH_HALF(vit_add_norm_backward)
