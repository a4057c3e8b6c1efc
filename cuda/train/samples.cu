/* Copies the data sets to device memory. Gathers a batch from a set: chooses its samples and their moves
 * (shift, flip, erasing), then computes their values. */
#include "common/check.cuh"
#include "train/network.cuh"

enum status device_sets_open(const struct train *train, struct device_set sets[DATA_PARTS],
                             struct allocations *allocations, cudaStream_t stream)
{
    const struct data *data = train->data;
    const struct stage *stage = train->stage;
    allocations->part = MEMORY_SAMPLES;
    for (int part = train->forward_only ? DATA_TEST : DATA_TRAIN; part < DATA_PARTS; part++) {
        const struct data_set *set = &data->sets[part];
        const bool delivered = part == DATA_TRAIN && (data->feed == DATA_LIVE || data->feed == DATA_LOAD);
        if (!delivered && (!stage || stage->first))
            TRY(allocate_copy(allocations, &sets[part].values, set->values,
                              (size_t)data_held(data, (enum data_part)part) *
                                  data_stored_bytes(data, (enum data_part)part),
                              stream));
        TRY(allocate_copy(allocations, &sets[part].labels, set->labels, set->count * sizeof *set->labels,
                          stream));
        if (data->multi_hot)
            TRY(allocate_copy(allocations, &sets[part].multi_hot, set->multi_hot,
                              (size_t)set->count * multi_hot_words(data->classes) * sizeof *set->multi_hot,
                              stream));
    }
    return STATUS_OK;
}

enum status device_batch_allocate(const struct train *train, uint32_t capacity, struct device_batch *batch,
                                  struct allocations *allocations)
{
    const uint32_t entries = train_entries(train, capacity);
    TRY(allocate(allocations, &batch->numbers, entries));
    TRY(allocate(allocations, &batch->labels, entries));
    return allocate(allocations, &batch->moves, entries);
}

static __global__ void draw_kernel(const struct train_pick pick, const struct share share, uint32_t entries,
                                   const struct augment augment, uint64_t seed, uint32_t epoch,
                                   const uint32_t *labels, const struct device_batch batch)
{
    uint32_t j = own_element();
    if (j >= entries)
        return;
    uint32_t number = train_picked(&pick, train_entry(&share, j));
    batch.numbers[j] = number;
    batch.labels[j] = labels[number % pick.order.count];
    batch.moves[j] = box_move(&augment, seed, epoch, number);
}

enum status batch_draw(const struct train *train, const struct device_set *set, struct device_batch *batch,
                       uint32_t epoch, uint32_t step, const struct share *part, cudaStream_t stream)
{
    struct draw_order order = train_order(train, epoch);
    uint32_t entries = train_entries(train, (uint32_t)part->count);
    batch->mix = train_mix(train, epoch, step);
    batch->multi_hot = set->multi_hot;
    batch->erase_last = train->augment.erase_last && batch->mix.share < 1;
    draw_kernel<<<blocks_for(entries), BLOCK, 0, stream>>>(train_pick(train, &order, step), *part, entries,
                                                           train->augment, train->seed, epoch, set->labels,
                                                           *batch);
    return CUDA_LAUNCHED("draw_kernel");
}

static const struct mix not_mixed = {.share = 1};

static __global__ void list_kernel(uint32_t first, uint32_t count, const uint32_t *labels,
                                   const struct device_batch batch)
{
    uint32_t j = own_element();
    if (j >= count)
        return;
    batch.numbers[j] = first + j;
    batch.labels[j] = labels[first + j];
    batch.moves[j] = {};
}

enum status batch_list(const struct device_set *set, struct device_batch *batch, uint32_t first,
                       uint32_t count, cudaStream_t stream)
{
    batch->mix = not_mixed;
    batch->multi_hot = set->multi_hot;
    batch->erase_last = false;
    list_kernel<<<blocks_for(count), BLOCK, 0, stream>>>(first, count, set->labels, *batch);
    return CUDA_LAUNCHED("list_kernel");
}

/* ---- Values ---- */

struct gather_plan gather_plan_of(const struct data *data, const struct device_set *set, uint32_t samples)
{
    struct gather_plan plan = {.type = data->type,
                               .shape = data->shape,
                               .samples = samples,
                               .sample_bytes = data->sample_bytes / (set->gray ? data->shape.channels : 1),
                               .held = set->held,
                               .gray = set->gray};
    for (uint32_t c = 0; c < data->shape.channels; c++) {
        plan.scale[c] = data->scale[c];
        plan.offset[c] = data->offset[c];
    }
    return plan;
}

/* `count`: values in the batch; `values_per_sample` divides by the values per sample. */
template <bool MIXES>
static __global__ void gather_kernel(const struct gather_plan plan, uint32_t count,
                                     const struct divider values_per_sample, const uint8_t *stored,
                                     const struct device_batch batch, float *values)
{
    uint32_t i = own_element();
    if (i >= count)
        return;
    uint32_t j = values_per_sample.quotient(i), element = i - j * values_per_sample.by;
    uint32_t x = element % plan.shape.width, y = element / plan.shape.width % plan.shape.height;
    uint32_t plane = element / plan.shape.width / plan.shape.height; /* (channel, depth) */
    auto value = [&](uint32_t entry) {
        return gathered(plan, stored_sample(plan, stored, batch, entry), batch.moves[entry],
                        !MIXES || !batch.erase_last, plane / plan.shape.depth,
                        plane * plan.shape.height * plan.shape.width, y, x);
    };
    float own = value(j);
    if (MIXES)
        own = mix_value(&batch.mix, y, x, own, value(plan.samples + j));
    values[i] = MIXES && batch.erase_last ? box_erased(&batch.moves[j].erase, y, x, element, own) : own;
}

enum status batch_gather(const struct data *data, const struct device_set *set,
                         const struct device_batch *batch, uint32_t count, float *values, cudaStream_t stream)
{
    const uint32_t all = count * (uint32_t)data->sample_values;
    auto *kernel = batch->mix.share < 1 ? gather_kernel<true> : gather_kernel<false>;
    kernel<<<blocks_for(all), BLOCK, 0, stream>>>(gather_plan_of(data, set, count), all,
                                                  divider_of((uint32_t)data->sample_values),
                                                  static_cast<const uint8_t *>(set->values), *batch, values);
    return CUDA_LAUNCHED("gather_kernel");
}
