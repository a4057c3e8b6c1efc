/* The loss and its gradient, and the update of the totals. */
#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/network.cuh"

#define ALL_LANES 0xffffffffu

/* ---- Warp reductions in a fixed order ---- */

struct candidate {
    float logit;
    uint32_t number; /* number of the class */
};

/* Returns the candidate with the larger logit; if logits are equal, the lower class. */
static __device__ __forceinline__ struct candidate better(struct candidate a, struct candidate b)
{
    bool b_wins = b.logit > a.logit || (b.logit == a.logit && b.number < a.number);
    return b_wins ? b : a;
}

static __device__ __forceinline__ struct candidate warp_best(struct candidate mine)
{
    for (int apart = 16; apart > 0; apart /= 2)
        mine = better(mine, {__shfl_xor_sync(ALL_LANES, mine.logit, apart),
                             __shfl_xor_sync(ALL_LANES, mine.number, apart)});
    return mine;
}

/* ---- The loss ---- */

struct loss_plan {
    uint32_t classes, count, total; /* see struct pass for `count` and `total` */
    float smoothing, share;         /* see struct target for `share` */
    const uint32_t *multi_hot;      /* of the samples; NULL: each has one class */
    struct binary_loss binary;
};

/* Returns this lane's part of the softmax cross-entropy of a sample. Writes the gradients of the sample's
 * logits to `deltas`. Subtracting `most`, the largest logit, prevents overflow of exp(). */
static __device__ __forceinline__ float cross_entropy(const struct loss_plan &plan, const float *own,
                                                      float most, const struct target &target, float factor,
                                                      float *deltas)
{
    const uint32_t lane = threadIdx.x % 32;
    const float weight = target_weight(&target);
    float sum = 0, loss = 0;
    for (uint32_t k = lane; k < plan.classes; k += 32)
        sum += expf(own[k] - most);
    float log_sum = logf(warp_sum(sum));
    for (uint32_t k = lane; k < plan.classes; k += 32) {
        float log_p = own[k] - most - log_sum,
              wanted = target_of(&target, nullptr, plan.smoothing, plan.classes, k);
        loss -= wanted * log_p;
        deltas[k] = (weight * expf(log_p) - wanted) / (float)plan.total * factor;
    }
    return loss;
}

/* Returns this lane's part of the binary cross-entropy of a sample. Writes the gradients of the sample's
 * logits to `deltas`. */
static __device__ __forceinline__ float binary_cross_entropy(const struct loss_plan &plan, const float *own,
                                                             const struct target &target, float factor,
                                                             float *deltas)
{
    const float weight = target_weight(&target), divisor = loss_binary_divisor(&plan.binary, plan.classes);
    float loss = 0, delta;
    for (uint32_t k = threadIdx.x % 32; k < plan.classes; k += 32) {
        const float wanted = target_of(&target, plan.multi_hot, plan.smoothing, plan.classes, k);
        loss += loss_binary_class(&plan.binary, own[k], wanted, weight, &delta);
        deltas[k] = delta / (divisor * (float)plan.total) * factor;
    }
    return loss / divisor;
}

/* Warp j computes sample j. A NaN never becomes the best candidate, but it propagates to the loss through the
 * sum. */
template <enum loss_kind KIND>
static __global__ void loss_kernel(const struct loss_plan plan, const float *logits, const uint32_t *labels,
                                   const struct device_scale *scale, float *deltas, float *losses,
                                   uint32_t *right)
{
    uint32_t j = own_element() / 32, lane = threadIdx.x % 32;
    if (j >= plan.count)
        return;
    const float *own = logits + (size_t)j * plan.classes;
    struct candidate best = {-INFINITY, plan.classes};
    for (uint32_t k = lane; k < plan.classes; k += 32)
        best = better(best, {own[k], k});
    best = warp_best(best);

    const struct target target = {labels[j], labels[plan.share < 1 ? plan.count + j : j], plan.share};
    float factor = scale ? scale->now.scale : 1, *own_deltas = deltas + (size_t)j * plan.classes, loss = 0;
    if (target_weight(&target) == 0)
        for (uint32_t k = lane; k < plan.classes; k += 32)
            own_deltas[k] = 0;
    else if (KIND == LOSS_BINARY)
        loss = binary_cross_entropy(plan, own, target, factor, own_deltas);
    else
        loss = cross_entropy(plan, own, best.logit, target, factor, own_deltas);
    loss = warp_sum(loss);
    if (lane == 0) {
        losses[j] = loss;
        right[j] = target.label == DATA_MASKED ? LOSS_MASKED
                   : best.number == plan.classes /* all logits are NaN */
                       ? 0
                       : target_has(KIND == LOSS_BINARY ? plan.multi_hot : nullptr, plan.classes,
                                    target.label, best.number);
    }
}

/* One block sums the batch. Thread i sums samples i, i + BLOCK, ...; a tree reduction adds these sums. */
static __global__ void totals_kernel(const float *losses, const uint32_t *right, uint32_t count,
                                     uint64_t step, bool scaled, struct train_totals *totals)
{
    __shared__ double sums[BLOCK];
    __shared__ uint32_t rights[BLOCK], samples[BLOCK];
    double sum = 0;
    uint32_t correct = 0, counted = 0;
    for (uint32_t i = threadIdx.x; i < count; i += BLOCK) {
        const uint32_t is = right[i];
        sum += losses[i];
        correct += is == 1;
        counted += is != LOSS_MASKED;
    }
    sums[threadIdx.x] = sum;
    rights[threadIdx.x] = correct;
    samples[threadIdx.x] = counted;
    block_sums<BLOCK>(sums, rights, samples);
    if (threadIdx.x != 0)
        return;
    totals->loss += sums[0];
    totals->correct += rights[0];
    totals->samples += samples[0];
    if ((scaled ? isnan(sums[0]) : !isfinite(sums[0])) && totals->bad_step == TRAIN_FINE)
        totals->bad_step = step;
}

enum status loss_take(const struct train *train, const float *logits, const struct device_batch *batch,
                      const struct pass *pass, uint64_t step, float *deltas,
                      const struct device_losses *losses)
{
    const struct loss_plan plan = {.classes = train->model->classes,
                                   .count = pass->count,
                                   .total = pass->total,
                                   .smoothing = train->smoothing,
                                   .share = batch->mix.share,
                                   .multi_hot = batch->multi_hot,
                                   .binary = train->binary};
    auto *kernel = train->loss == LOSS_BINARY ? loss_kernel<LOSS_BINARY> : loss_kernel<LOSS_CROSS_ENTROPY>;
    kernel<<<blocks_for((size_t)pass->count * 32), BLOCK, 0, pass->stream>>>(
        plan, logits, batch->labels, losses->scale, deltas, losses->losses, losses->right);
    CUDA_TRY_LAUNCH("loss_kernel");
    totals_kernel<<<1, BLOCK, 0, pass->stream>>>(losses->losses, losses->right, pass->count, step,
                                                 losses->scale != NULL, losses->totals);
    return CUDA_LAUNCHED("totals_kernel");
}
