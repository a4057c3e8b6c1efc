/* The patches and tokens before the first block of a vision transformer, and the factors of stochastic depth.
 * Also the backward pass of the tokens, the last layer, and the parameters in 16 bits. */
#include "common/check.cuh"
#include "train/augment.h"
#include "train/mma.cuh"
#include "train/vit/kernels.cuh"

#define TAPS 8 /* adjacent values of a patch that are written together: 16 bytes */

/* ---- Patches ---- */

struct patch_plan : gather_plan {
    uint32_t count;           /* threads, which compute equally many values */
    struct divider sample;    /* threads per sample */
    struct divider patch;     /* threads per patch */
    struct divider across;    /* patches per row of patches */
    struct divider size, row; /* `size`: pixels of a patch along an axis; `row`: pixels of a patch */
};

/* An entry of the batch: its stored sample, and how to move it; `erases`: and erase it, before it is mixed.
 */
struct patch_source {
    const uint8_t *sample;
    const struct draw_move *move;
    bool erases;
};

static __device__ __forceinline__ struct patch_source
source_of(const struct patch_plan &plan, const uint8_t *stored, const struct device_batch &batch, uint32_t j)
{
    return {stored_sample(plan, stored, batch, j), &batch.moves[j], !batch.erase_last};
}

/* The position in the image of one value of a patch. */
struct pixel {
    uint32_t channel, y, x;
};

/* Returns the position in the image of value `tap` of a patch. The values of a patch are in the order
 * (channel, y, x). */
static __device__ __forceinline__ struct pixel pixel_of(const struct patch_plan &plan, uint32_t patch,
                                                        uint32_t tap)
{
    uint32_t channel = plan.row.quotient(tap), in_plane = tap - channel * plan.row.by;
    uint32_t line = plan.size.quotient(in_plane), down = plan.across.quotient(patch);
    return {channel, down * plan.size.by + line,
            (patch - down * plan.across.by) * plan.size.by + in_plane - line * plan.size.by};
}

/* Returns the value of an entry at a position, after moving, normalising and perhaps erasing the image. */
static __device__ __forceinline__ float value_at(const struct patch_plan &plan,
                                                 const struct patch_source &source, struct pixel at)
{
    return gathered(plan, source.sample, *source.move, source.erases, at.channel,
                    at.channel * plan.shape.height * plan.shape.width, at.y, at.x);
}

/* `values` are the TAPS values from position `at` on. Replaces those in the erased rectangle by noise. A
 * Philox block has the noise of four adjacent values; the x coordinate of `at` is a multiple of four. */
static __device__ __forceinline__ void
erase_row(const struct patch_plan &plan, const struct draw_erase &erase, struct pixel at, float values[TAPS])
{
    const struct image_box &box = erase.box;
    if (at.y - box.top >= box.height || at.x >= box.left + box.width || at.x + TAPS <= box.left)
        return;
    const uint32_t first = (at.channel * plan.shape.height + at.y) * plan.shape.width + at.x;
#pragma unroll
    for (uint32_t t = 0; t < TAPS; t += 4) {
        const struct philox_block noise = box_noise(&erase, first + t);
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            if (at.x + t + k - box.left < box.width)
                values[t + k] = box_normal(noise.word[k]);
    }
}

/* Writes TAPS values of a row of an entry, from `at` on, moved, normalised and perhaps erased. If the image
 * has u8 values and is not shifted, loads all TAPS values at once, and reverses their order if the image is
 * mirrored. */
static __device__ __forceinline__ void
row_at(const struct patch_plan &plan, const struct patch_source &source, struct pixel at, float values[TAPS])
{
    const struct draw_move &move = *source.move;
    const uint32_t width = plan.shape.width, height = plan.shape.height;
    const uint32_t first = plan.gray ? 0 : at.channel * height * width;
    if (plan.type == DTYPE_U8 && move.down == 0 && move.right == 0) {
        const uint32_t x = move.flip ? width - TAPS - at.x : at.x;
        uint2 words = *reinterpret_cast<const uint2 *>(source.sample + first + at.y * width + x);
        if (move.flip)
            words = {__byte_perm(words.y, 0, 0x0123), __byte_perm(words.x, 0, 0x0123)};
#pragma unroll
        for (uint32_t t = 0; t < TAPS; t++)
            values[t] = augment_float((t < 4 ? words.x : words.y) >> 8 * (t % 4) & 255u);
    } else {
#pragma unroll
        for (uint32_t t = 0; t < TAPS; t++) {
            const int32_t from = draw_moved(&move, height, width, at.y, at.x + t);
            values[t] = from < 0 ? 0 : data_value(plan.type, source.sample, first + (size_t)from);
        }
    }
#pragma unroll
    for (uint32_t t = 0; t < TAPS; t++)
        values[t] = fmaf(values[t], plan.scale[at.channel], plan.offset[at.channel]);
    if (source.erases)
        erase_row(plan, move.erase, at, values);
}

/* Returns whether mixing changes any of the TAPS values from `at` on. */
static __device__ __forceinline__ bool mixes_row(const struct mix &mix, struct pixel at)
{
    return !mix.cut || (at.y >= mix.top && at.y < mix.bottom && at.x < mix.right && at.x + TAPS > mix.left);
}

/* Computes TAPS adjacent values of entry `j` of the batch. They begin with value `tap` of a patch, at
 * position `first`. ROWS: they are in one row of the image. */
template <class T, bool MIXES, bool ROWS>
static __device__ __forceinline__ uint4 taps_at(const struct patch_plan &plan,
                                                const struct device_batch &batch,
                                                const struct patch_source &own,
                                                const struct patch_source &partner, uint32_t patch,
                                                uint32_t tap, struct pixel first)
{
    float values[TAPS], others[TAPS];
    const bool mixes = MIXES && (!ROWS || mixes_row(batch.mix, first));
    if (ROWS) {
        row_at(plan, own, first, values);
        if (mixes)
            row_at(plan, partner, first, others);
    }
    const bool erases_last = MIXES && batch.erase_last;
#pragma unroll
    for (uint32_t t = 0; t < TAPS; t++) {
        struct pixel at = {first.channel, first.y, first.x + t};
        if (!ROWS) {
            at = pixel_of(plan, patch, tap + t);
            values[t] = value_at(plan, own, at);
            others[t] = mixes ? value_at(plan, partner, at) : 0;
        }
        if (mixes)
            values[t] = mix_value(&batch.mix, at.y, at.x, values[t], others[t]);
        if (erases_last && !ROWS)
            values[t] =
                box_erased(&own.move->erase, at.y, at.x,
                           (at.channel * plan.shape.height + at.y) * plan.shape.width + at.x, values[t]);
    }
    if (erases_last && ROWS)
        erase_row(plan, own.move->erase, first, values);
    return {pack<T>(values[0], values[1]), pack<T>(values[2], values[3]), pack<T>(values[4], values[5]),
            pack<T>(values[6], values[7])};
}

/* A thread computes GROUPS groups of TAPS adjacent values, which are in one row of a patch. GROUPS is 0 if
 * the side of a patch is not a multiple of TAPS: then a thread computes one group, in one or more rows. */
template <class T, bool MIXES, int GROUPS>
static __global__ void patches_kernel(const __grid_constant__ struct patch_plan plan, const uint8_t *stored,
                                      const __grid_constant__ struct device_batch batch, uint4 *patches)
{
    constexpr uint32_t EACH = GROUPS > 0 ? GROUPS : 1;
    const uint32_t i = own_element();
    if (i >= plan.count)
        return;
    const uint32_t j = plan.sample.quotient(i), part = i - j * plan.sample.by;
    const uint32_t patch = plan.patch.quotient(part), tap = (part - patch * plan.patch.by) * EACH * TAPS;
    const struct patch_source own = source_of(plan, stored, batch, j);
    const struct patch_source partner = MIXES ? source_of(plan, stored, batch, plan.samples + j) : own;
    const struct pixel first = pixel_of(plan, patch, tap);
#pragma unroll
    for (uint32_t g = 0; g < EACH; g++)
        patches[(size_t)i * EACH + g] = taps_at<T, MIXES, (GROUPS > 0)>(
            plan, batch, own, partner, patch, tap, {first.channel, first.y, first.x + g * TAPS});
}

template <class T, bool MIXES> static auto *patches_kernel_for(uint32_t patch)
{
    return patch % (2 * TAPS) == 0 ? patches_kernel<T, MIXES, 2>
           : patch % TAPS == 0     ? patches_kernel<T, MIXES, 1>
                                   : patches_kernel<T, MIXES, 0>;
}

template <class T>
enum status vit_patches(const struct data *data, const struct device_set *set,
                        const struct device_batch *batch, uint32_t count, uint32_t patch, T *patches,
                        cudaStream_t stream)
{
    const uint32_t each = patch % (2 * TAPS) == 0 ? 2 * TAPS : TAPS; /* values per thread */
    const uint32_t parts = (uint32_t)(data->sample_values / each), pixels = patch * patch;
    const struct patch_plan plan = {gather_plan_of(data, set, count),
                                    count * parts,
                                    divider_of(parts),
                                    divider_of(data->shape.channels * pixels / each),
                                    divider_of(data->shape.width / patch),
                                    divider_of(patch),
                                    divider_of(pixels)};
    auto *kernel =
        batch->mix.share < 1 ? patches_kernel_for<T, true>(patch) : patches_kernel_for<T, false>(patch);
    kernel<<<blocks_for(plan.count), BLOCK, 0, stream>>>(plan, static_cast<const uint8_t *>(set->values),
                                                         *batch, reinterpret_cast<uint4 *>(patches));
    return CUDA_LAUNCHED("patches_kernel");
}

/* ---- Stochastic depth ---- */

static __global__ void factors_kernel(const struct vit_path *layers, uint64_t seed, uint32_t epoch,
                                      const uint32_t *numbers, uint32_t count, uint32_t apart, float *factors)
{
    const uint32_t j = own_element();
    const struct vit_path path = layers[blockIdx.y];
    if (j < count)
        factors[blockIdx.y * apart + j] = draw_path(seed, epoch, numbers[j], path.number, path.rate);
}

enum status vit_factors(const struct vit_path *layers, uint32_t layer_count, uint64_t seed, uint32_t epoch,
                        const uint32_t *numbers, uint32_t count, uint32_t apart, float *factors,
                        cudaStream_t stream)
{
    factors_kernel<<<dim3(blocks_for(count), layer_count), BLOCK, 0, stream>>>(layers, seed, epoch, numbers,
                                                                               count, apart, factors);
    return CUDA_LAUNCHED("factors_kernel");
}

/* ---- Backward ---- */

/* Samples begin .. end - 1 are those of part blockIdx.y of gridDim.y. */
struct sample_part {
    uint32_t begin, end;
};

static __device__ __forceinline__ struct sample_part own_part(uint32_t samples)
{
    const uint32_t each = (samples + gridDim.y - 1) / gridDim.y;
    const uint32_t begin = blockIdx.y * each, end = begin + each;
    return {begin, end < samples ? end : samples};
}

/* A thread adds up the gradients of one pair of values of a token, over a part of the samples. */
template <class T>
static __global__ void tokens_back_kernel(const struct vit_rows rows, const uint32_t *deltas, float2 *partial,
                                          uint32_t *patches)
{
    const uint32_t pairs = rows.width / 2, i = own_element();
    const struct sample_part part = own_part(rows.samples);
    if (i >= rows.tokens * pairs)
        return;
    float2 sum = {0, 0};
#pragma unroll 4
    for (uint32_t j = part.begin; j < part.end; j++) {
        const uint32_t delta = deltas[(size_t)j * rows.tokens * pairs + i];
        const float2 value = values_of<T>(delta);
        sum = {sum.x + value.x, sum.y + value.y};
        if (i >= pairs)
            patches[(size_t)j * (rows.tokens - 1) * pairs + i - pairs] = delta;
    }
    partial[(size_t)blockIdx.y * rows.tokens * pairs + i] = sum;
}

template <class T>
enum status vit_tokens_backward(const struct vit_rows *rows, const T *deltas, float *positions,
                                T *patch_deltas, struct vit_sums *sums, cudaStream_t stream)
{
    const uint32_t values = rows->tokens * rows->width;
    const struct vit_sum sum = {NULL, VIT_SAMPLE_PARTS, 1, values, {positions}};
    tokens_back_kernel<T><<<dim3(blocks_for(values / 2), VIT_SAMPLE_PARTS), BLOCK, 0, stream>>>(
        *rows, reinterpret_cast<const uint32_t *>(deltas), reinterpret_cast<float2 *>(vit_sums_room(sums)),
        reinterpret_cast<uint32_t *>(patch_deltas));
    CUDA_TRY_LAUNCH("tokens_back_kernel");
    return vit_sums_add(sums, &sum);
}

/* A thread processes one class, over a part of the samples. */
template <class T>
static __global__ void logits_back_kernel(const float *deltas, uint32_t count, uint32_t classes,
                                          uint32_t apart, T *rounded, float *partial)
{
    const uint32_t k = own_element();
    const struct sample_part part = own_part(count);
    if (k >= apart)
        return;
    float sum = 0;
#pragma unroll 4
    for (uint32_t j = part.begin; j < part.end; j++) {
        const float delta = k < classes ? deltas[(size_t)j * classes + k] : 0;
        rounded[(size_t)j * apart + k] = T(delta);
        sum += delta;
    }
    if (k < classes)
        partial[(size_t)blockIdx.y * classes + k] = sum;
}

/* Converts the gradients of the logits (count, classes) to rows of `apart` values, padded with zeros. Writes
 * their sums over the samples to `bias`. */
template <class T>
static enum status logits_backward(const float *deltas, uint32_t count, uint32_t classes, uint32_t apart,
                                   T *rounded, float *bias, struct vit_sums *sums, cudaStream_t stream)
{
    const struct vit_sum sum = {NULL, VIT_CLASS_PARTS, 1, classes, {bias}};
    logits_back_kernel<T><<<dim3(blocks_for(apart), VIT_CLASS_PARTS), BLOCK, 0, stream>>>(
        deltas, count, classes, apart, rounded, vit_sums_room(sums));
    CUDA_TRY_LAUNCH("logits_back_kernel");
    return vit_sums_add(sums, &sum);
}

/* ---- Parameters ---- */

template <class T> static __global__ void round_kernel(const float2 *values, size_t pairs, uint32_t *rounded)
{
    const size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < pairs)
        rounded[i] = pack<T>(values[i].x, values[i].y);
}

template <class T> enum status vit_round(const float *values, size_t count, T *rounded, cudaStream_t stream)
{
    round_kernel<T><<<blocks_for(count / 2), BLOCK, 0, stream>>>(
        reinterpret_cast<const float2 *>(values), count / 2, reinterpret_cast<uint32_t *>(rounded));
    return CUDA_LAUNCHED("round_kernel");
}

template <class T> static __global__ void widen_kernel(const uint32_t *values, size_t pairs, float2 *wide)
{
    const size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < pairs)
        wide[i] = values_of<T>(values[i]);
}

template <class T> enum status vit_widen(const T *values, size_t count, float *wide, cudaStream_t stream)
{
    widen_kernel<T><<<blocks_for(count / 2), BLOCK, 0, stream>>>(reinterpret_cast<const uint32_t *>(values),
                                                                 count / 2, reinterpret_cast<float2 *>(wide));
    return CUDA_LAUNCHED("widen_kernel");
}

/* ---- The last layer ---- */

template <class T>
enum status vit_head_forward(struct vit_multiplier *multiplier, const struct vit_head<T> *head,
                             const T *inputs, float *logits, cudaStream_t stream)
{
    const struct vit_linear *linear = &head->linear;
    if (!head->wide_inputs)
        return vit_linear_forward<T>(multiplier, linear, true, inputs, head->weights, head->bias, logits,
                                     stream);
    TRY(vit_widen<T>(inputs, (size_t)linear->rows * linear->in, head->wide_inputs, stream));
    return vit_linear_forward<float>(multiplier, linear, true, head->wide_inputs, head->wide_weights,
                                     head->bias, logits, stream);
}

template <class T>
enum status vit_head_backward(struct vit_multiplier *multiplier, const struct vit_head<T> *head,
                              const T *inputs, const float *deltas, T *rounded, T *in_deltas, float *weight,
                              float *bias, struct vit_sums *sums, cudaStream_t stream)
{
    struct vit_linear linear = head->linear;
    TRY(logits_backward<T>(deltas, linear.rows, linear.out, head->apart, rounded, bias, sums, stream));
    if (head->wide_inputs) {
        TRY(vit_linear_weights<float>(multiplier, &linear, deltas, head->wide_inputs, weight, stream));
        TRY(vit_linear_inputs<float>(multiplier, &linear, 0, deltas, head->wide_weights, head->wide_deltas,
                                     stream));
        return vit_round<T>(head->wide_deltas, (size_t)linear.rows * linear.in, in_deltas, stream);
    }
    linear.apart = head->apart;
    TRY(vit_linear_weights<T>(multiplier, &linear, rounded, inputs, weight, stream));
    return vit_linear_inputs<T>(multiplier, &linear, 0, rounded, head->weights, in_deltas, stream);
}

EACH_HALF(vit_patches)
EACH_HALF(vit_tokens_backward)
EACH_HALF(vit_head_forward)
EACH_HALF(vit_head_backward)
EACH_HALF(vit_round)
EACH_HALF(vit_widen)
