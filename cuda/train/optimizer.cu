/* Between the gradients and the new parameters: loss scaling, clipping, and the optimizer. */
#include <stdlib.h>

#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/layer_gemm.cuh"
#include "train/mma.cuh"
#include "train/network.cuh"

/* ---- Loss scaling ---- */

enum status scaling_open(const struct model *model, struct allocations *allocations,
                         struct device_scale **scale, cudaStream_t stream)
{
    struct device_scale own = {};
    layer_places_of(model, &own.places);
    TRY(allocate_copy(allocations, scale, &own, sizeof own, stream));
    return CUDA_STATUS(cudaStreamSynchronize(stream));
}

/* The check before atomicMax() saves most of these operations when all gradients have overflowed. */
static __global__ void unscale_kernel(struct device_scale *scale, size_t values, float *gradients)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= values)
        return;
    float gradient = gradients[i];
    if (!isfinite(gradient)) {
        const uint32_t layer = layer_places_find(&scale->places, i) + 1;
        if (layer > *static_cast<volatile uint32_t *>(&scale->overflowed))
            atomicMax(&scale->overflowed, layer);
    }
    gradients[i] = gradient / scale->now.scale;
}

static __global__ void check_kernel(struct device_scale *scale, size_t values, const float *gradients)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < values && !isfinite(gradients[i]))
        scale->overflowed = true;
}

enum status scaling_check(struct device_scale *scale, size_t values, const float *gradients,
                          cudaStream_t stream)
{
    check_kernel<<<blocks_for(values), BLOCK, 0, stream>>>(scale, values, gradients);
    return CUDA_LAUNCHED("check_kernel");
}

enum status scaling_unscale(struct device_scale *scale, size_t values, float *gradients, cudaStream_t stream)
{
    unscale_kernel<<<blocks_for(values), BLOCK, 0, stream>>>(scale, values, gradients);
    return CUDA_LAUNCHED("unscale_kernel");
}

static __global__ void scale_kernel(const struct loss_scale_rule rule, struct device_scale *scale)
{
    scale->skipped += scale->overflowed > 0;
    if (scale->overflowed > 0)
        scale->steps[scale->overflowed - 1]++;
    loss_scale_step(&rule, &scale->now, scale->overflowed > 0);
    scale->overflowed = 0;
}

enum status scaling_step(const struct loss_scale_rule *rule, struct device_scale *scale, cudaStream_t stream)
{
    scale_kernel<<<1, 1, 0, stream>>>(*rule, scale);
    return CUDA_LAUNCHED("scale_kernel");
}

/* ---- Clipping ---- */

#define CLIP_PARTS 1024 /* blocks, each of which adds up a part of the squares */

struct device_clip {
    float factor;             /* multiplies the gradients of the current step */
    double parts[CLIP_PARTS]; /* sums of squares */
};

/* Adds up one value per thread of a block. Only the result of thread 0 is valid. */
static __device__ double block_sum(double own)
{
    __shared__ double sums[BLOCK];
    sums[threadIdx.x] = own;
    block_sums<BLOCK>(sums);
    return sums[0];
}

static __global__ void __launch_bounds__(BLOCK)
    squares_kernel(size_t groups, const float4 *gradients, struct device_clip *clip)
{
    double sum = 0;
    for (size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x; i < groups; i += (size_t)CLIP_PARTS * BLOCK) {
        const float4 gradient = gradients[i];
        sum += (double)gradient.x * gradient.x + (double)gradient.y * gradient.y +
               (double)gradient.z * gradient.z + (double)gradient.w * gradient.w;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        clip->parts[blockIdx.x] = sum;
}

/* One block adds up the parts. */
static __global__ void __launch_bounds__(BLOCK)
    factor_kernel(double clip_norm, const struct device_scale *scale, struct device_clip *clip,
                  struct train_totals *totals)
{
    double sum = 0;
    for (uint32_t i = threadIdx.x; i < CLIP_PARTS; i += BLOCK)
        sum += clip->parts[i];
    sum = block_sum(sum);
    if (threadIdx.x != 0)
        return;
    clip->factor = (float)optimizer_clip(clip_norm, sqrt(sum));
    if (scale && scale->overflowed)
        return;
    totals->norms += sqrt(sum);
    totals->normed++;
}

enum status clip_open(const struct train *train, struct allocations *allocations, struct device_clip **clip)
{
    *clip = nullptr;
    return train->optimizer.clip_norm > 0 ? allocate(allocations, clip, 1) : STATUS_OK;
}

enum status clip_find(const struct optimizer *optimizer, size_t values, const float *gradients,
                      const struct device_scale *scale, struct device_clip *clip, struct train_totals *totals,
                      cudaStream_t stream)
{
    if (!clip)
        return STATUS_OK;
    squares_kernel<<<CLIP_PARTS, BLOCK, 0, stream>>>(values / 4, reinterpret_cast<const float4 *>(gradients),
                                                     clip);
    CUDA_TRY_LAUNCH("squares_kernel");
    factor_kernel<<<1, BLOCK, 0, stream>>>(optimizer->clip_norm, scale, clip, totals);
    return CUDA_LAUNCHED("factor_kernel");
}

/* ---- Updates that need whole tensors: opening ---- */

/* A unit of optimizer_clip_unit(): consecutive values of an arena. */
struct tensor_unit {
    uint32_t first, values;
    bool clips; /* false: only copied */
};

/* At most PART_VALUES values of a tensor, in groups of four. The last group may contain zeros after the
 * tensor. */
struct tensor_part {
    uint32_t first, fours;
};

#define PART_VALUES 8192

enum status groups_open(const struct train *train, struct allocations *allocations,
                        struct tensor_update **groups, cudaStream_t stream)
{
    const struct model *model = train->model;
    const size_t entries = model->arena_values / MODEL_ALIGNMENT, bytes = entries * sizeof **groups;
    struct tensor_update *own = static_cast<struct tensor_update *>(calloc(1, bytes));
    TRY(ALLOCATED(own, "out of memory for the update rules"));
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const struct model_tensor *tensor = &model->tensors[i];
        const size_t end = (tensor->first + tensor->values + MODEL_ALIGNMENT - 1) / MODEL_ALIGNMENT;
        for (size_t entry = tensor->first / MODEL_ALIGNMENT; entry < end; entry++)
            own[entry] = train_update_of(train, tensor);
    }
    enum status status = allocate_copy(allocations, groups, own, bytes, stream);
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaStreamSynchronize(stream));
    free(own);
    return status;
}

static enum status units_open(const struct model *model, struct allocations *allocations,
                              struct device_tensors *tensors, cudaStream_t stream)
{
    size_t count = 0, bytes;
    for (uint32_t t = 0; t < model->tensor_count; t++)
        count += train_rows_of(&model->tensors[t]);
    bytes = count * sizeof *tensors->units;
    struct tensor_unit *units = static_cast<struct tensor_unit *>(malloc(bytes)), *unit = units;
    TRY(ALLOCATED(units, "out of memory to clip gradients"));
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        const size_t rows = train_rows_of(tensor), columns = tensor->values / rows;
        for (size_t r = 0; r < rows; r++)
            *unit++ = {(uint32_t)(tensor->first + r * columns), (uint32_t)columns,
                       !tensor->head && !tensor->is_statistic};
    }
    tensors->unit_count = (uint32_t)count;
    enum status status = allocate_copy(allocations, &tensors->units, units, bytes, stream);
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaStreamSynchronize(stream));
    free(units);
    return status;
}

/* Returns the number of parts of a tensor. Writes them to `parts`, unless that is NULL. */
static uint32_t parts_of(const struct train *train, const struct model_tensor *tensor,
                         struct tensor_part *parts)
{
    const size_t end = (tensor->values + 3) / 4, step = PART_VALUES / 4;
    uint32_t count = 0;
    if (tensor->is_statistic || (train->optimizer.kind == OPTIMIZER_MUON && !tensor->hidden))
        return 0;
    for (size_t at = 0; at < end; at += step, count++)
        if (parts)
            parts[count] = {(uint32_t)(tensor->first / 4 + at),
                            (uint32_t)(end - at < step ? end - at : step)};
    return count;
}

static enum status parts_open(const struct train *train, struct allocations *allocations,
                              struct device_tensors *tensors, cudaStream_t stream)
{
    const struct model *model = train->model;
    uint32_t ends[MODEL_TENSORS_MAX], count = 0;
    float trust[MODEL_TENSORS_MAX];
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        const size_t rows = train_rows_of(tensor);
        ends[t] = count += parts_of(train, tensor, nullptr);
        trust[t] = (float)optimizer_matrix_scale(rows, tensor->values / rows);
    }
    struct tensor_part *parts = static_cast<struct tensor_part *>(malloc((count + 1) * sizeof *parts));
    TRY(ALLOCATED(parts, "out of memory for the optimizer"));
    for (uint32_t t = 0; t < model->tensor_count; t++)
        (void)parts_of(train, &model->tensors[t], parts + (t ? ends[t - 1] : 0));
    tensors->part_count = count;
    enum status status =
        allocate_copy(allocations, &tensors->parts, parts, (count + 1) * sizeof *parts, stream);
    if (status == STATUS_OK)
        status = allocate_copy(allocations, &tensors->ends, ends, sizeof ends, stream);
    if (status == STATUS_OK)
        status = allocate_copy(allocations, &tensors->trust, trust, sizeof trust, stream);
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaStreamSynchronize(stream));
    free(parts);
    TRY(status);
    TRY(allocate(allocations, &tensors->norms, model->tensor_count));
    return allocate_zeros(allocations, &tensors->sums, count + 1, stream);
}

/* Muon: allocates the scratch memory of the Newton-Schulz iteration. */
static enum status squares_open(const struct model *model, struct allocations *allocations,
                                struct device_tensors *tensors)
{
    size_t matrix = 0;
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        const size_t rows = train_rows_of(tensor), columns = tensor->values / rows;
        const size_t count = rows < columns ? rows : columns;
        const size_t square = (count * count + MODEL_ALIGNMENT - 1) / MODEL_ALIGNMENT * MODEL_ALIGNMENT;
        if (tensor->hidden && square > tensors->square_most)
            tensors->square_most = square;
        if (tensor->hidden && tensor->values > matrix)
            matrix = tensor->values;
    }
    TRY(allocate(allocations, &tensors->workspace, WORKSPACE_VALUES));
    return allocate(allocations, &tensors->squares, 2 * tensors->square_most + matrix + 1);
}

enum status tensors_open(const struct train *train, struct allocations *allocations,
                         struct device_tensors *tensors, cudaStream_t stream)
{
    const bool muon = train->optimizer.kind == OPTIMIZER_MUON, clips = train->optimizer.clip_adaptive > 0;
    if (!train_needs_tensors(train))
        return STATUS_OK;
    if (muon || clips)
        TRY(allocate_zeros(allocations, &tensors->adjusted, train->model->arena_values, stream));
    if (clips)
        TRY(units_open(train->model, allocations, tensors, stream));
    if (optimizer_needs_tensors(train->optimizer.kind))
        TRY(parts_open(train, allocations, tensors, stream));
    return muon ? squares_open(train->model, allocations, tensors) : STATUS_OK;
}

/* ---- Updates that need whole tensors: the pass before the update ---- */

/* Adds up two values per thread of a block. Only the results of thread 0 are valid. */
static __device__ double2 block_sums_of(double2 own)
{
    __shared__ double first[BLOCK], second[BLOCK];
    first[threadIdx.x] = own.x;
    second[threadIdx.x] = own.y;
    block_sums<BLOCK>(first, second);
    return {first[0], second[0]};
}

/* One block per unit: clips its gradients. */
static __global__ void __launch_bounds__(BLOCK)
    units_kernel(double clip_adaptive, const struct tensor_unit *units, const float *parameters,
                 const float *gradients, float *clipped)
{
    __shared__ float factor;
    const struct tensor_unit unit = units[blockIdx.x];
    double2 sums = {0, 0};
    for (uint32_t i = unit.first + threadIdx.x; i < unit.first + unit.values; i += BLOCK) {
        sums.x += (double)parameters[i] * parameters[i];
        sums.y += (double)gradients[i] * gradients[i];
    }
    sums = block_sums_of(sums);
    if (threadIdx.x == 0)
        factor = unit.clips ? (float)optimizer_clip_unit(clip_adaptive, sums.x, sums.y) : 1;
    __syncthreads();
    for (uint32_t i = unit.first + threadIdx.x; i < unit.first + unit.values; i += BLOCK)
        clipped[i] = gradients[i] * factor;
}

/* The arrays of a step, in groups of four values. */
struct tensor_arrays {
    const float4 *gradients;
    float4 *parameters, *m, *v, *directions;
};

static __device__ __forceinline__ void add_squares(double2 *sums, float parameter, float direction)
{
    sums->x += (double)parameter * parameter;
    sums->y += (double)direction * direction;
}

/* LAMB: updates the moments of a value, and adds to the sums. */
static __device__ __forceinline__ void lamb_value(const struct update &update, float gradient,
                                                  float parameter, float *m, float *v, double2 *sums)
{
    optimizer_moments_step(&update, optimizer_clipped(&update, gradient), m, v);
    add_squares(sums, parameter, optimizer_direction(&update, parameter, *m, *v));
}

/* Muon: updates the momentum of a value, and adds to the sums. Returns its direction. */
static __device__ __forceinline__ float muon_value(const struct update &update, float gradient, float *m,
                                                   double2 *sums)
{
    const float direction = optimizer_momentum(&update, optimizer_clipped(&update, gradient), m);
    add_squares(sums, direction, 0);
    return direction;
}

/* One block per part. */
static __global__ void __launch_bounds__(BLOCK)
    parts_kernel(struct update all, const struct tensor_part *parts, const struct update_extras extras,
                 const struct tensor_arrays arrays, double2 *sums)
{
    const struct tensor_part part = parts[blockIdx.x];
    double2 sum = {0, 0};
    if (extras.scale && extras.scale->overflowed)
        return;
    if (extras.clip)
        all.clip = extras.clip->factor;
    const struct update update = optimizer_of(&all, extras.groups[part.first / (MODEL_ALIGNMENT / 4)]);
    for (uint32_t i = part.first + threadIdx.x; i < part.first + part.fours; i += BLOCK) {
        const float4 gradient = arrays.gradients[i];
        float4 m = arrays.m[i];
        if (update.kind == OPTIMIZER_MUON) {
            float4 direction;
            direction.x = muon_value(update, gradient.x, &m.x, &sum);
            direction.y = muon_value(update, gradient.y, &m.y, &sum);
            direction.z = muon_value(update, gradient.z, &m.z, &sum);
            direction.w = muon_value(update, gradient.w, &m.w, &sum);
            arrays.directions[i] = direction;
        } else {
            const float4 parameter = arrays.parameters[i];
            float4 v = arrays.v[i];
            lamb_value(update, gradient.x, parameter.x, &m.x, &v.x, &sum);
            lamb_value(update, gradient.y, parameter.y, &m.y, &v.y, &sum);
            lamb_value(update, gradient.z, parameter.z, &m.z, &v.z, &sum);
            lamb_value(update, gradient.w, parameter.w, &m.w, &v.w, &sum);
            arrays.v[i] = v;
        }
        arrays.m[i] = m;
    }
    sum = block_sums_of(sum);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}

/* One block per tensor: adds up its parts. */
static __global__ void __launch_bounds__(BLOCK)
    tensor_sums_kernel(struct update all, const struct device_tensors tensors,
                       const struct tensor_update *groups)
{
    const uint32_t t = blockIdx.x, begin = t ? tensors.ends[t - 1] : 0, end = tensors.ends[t];
    double2 sum = {0, 0};
    if (begin == end)
        return;
    for (uint32_t i = begin + threadIdx.x; i < end; i += BLOCK) {
        sum.x += tensors.sums[i].x;
        sum.y += tensors.sums[i].y;
    }
    sum = block_sums_of(sum);
    if (threadIdx.x != 0)
        return;
    const struct update update =
        optimizer_of(&all, groups[tensors.parts[begin].first / (MODEL_ALIGNMENT / 4)]);
    if (update.kind == OPTIMIZER_MUON)
        tensors.norms[t] = (float)(1 / (sqrt(sum.x) + MUON_EPSILON));
    else
        tensors.trust[t] = (float)optimizer_trust(update.decay, sum.x, sum.y);
}

static __global__ void normalise_kernel(const float *from, const float *factor, size_t values, float *to)
{
    const size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < values)
        to[i] = from[i] * *factor;
}

/* An output of a GEMM: factor * sum + added_factor * added. `added` may be NULL. */
struct series_out {
    float *values;
    const float *added;
    float factor, added_factor;
    uint32_t stride;

    __device__ size_t index(uint32_t row, uint32_t column) const
    {
        return (size_t)row * stride + column;
    }
    __device__ float finished(uint32_t, uint32_t, float sum, size_t at) const
    {
        return added ? factor * sum + added_factor * added[at] : factor * sum;
    }
    __device__ void put_one(uint32_t row, uint32_t column, float sum) const
    {
        const size_t at = index(row, column);
        values[at] = finished(row, column, sum, at);
    }
    __device__ void put(uint32_t row, uint32_t column, uint32_t columns, const float sums[4]) const
    {
        put_four(*this, stride % 4 == 0 && columns % 4 == 0, row, column, columns, sums);
    }
};

template <class Left, class Right>
static enum status series_gemm(const struct device_tensors *tensors, const Left &left, const Right &right,
                               const struct series_out &into, const struct gemm &size, cudaStream_t stream)
{
    return tensors->tensor_cores
               ? tensor_multiply<as_tf32, 64, 64>(stream, tensors->workspace, left, right, into, size)
               : multiply<2, 1>(stream, tensors->workspace, left, right, into, size);
}

/* Muon: one iteration on a matrix. As the matrices of products are symmetric, both operands of a product can
 * be read along or across their rows. */
static enum status iterate(const struct device_tensors *tensors, uint32_t rows, uint32_t columns,
                           const float *from, float *to, cudaStream_t stream)
{
    const bool tall = rows > columns;
    const uint32_t count = tall ? columns : rows, length = tall ? rows : columns;
    float *gram = tensors->squares, *factors = gram + tensors->square_most;
    const matrix<true> by_row = {from, columns}, squares = {gram, count}, series = {factors, count};
    const matrix<false> by_column = {from, columns};
    const struct series_out into_gram = {gram, nullptr, 1, 0, count},
                            into_factors = {factors, gram, (float)MUON_C, (float)MUON_B, count},
                            into_matrix = {to, from, 1, (float)MUON_A, columns};
    const struct gemm gram_size = {.rows = count, .columns = count, .depth = length},
                      square_size = {.rows = count, .columns = count, .depth = count},
                      matrix_size = {.rows = rows, .columns = columns, .depth = count};
    TRY(tall ? series_gemm(tensors, by_column, by_column, into_gram, gram_size, stream)
             : series_gemm(tensors, by_row, by_row, into_gram, gram_size, stream));
    TRY(series_gemm(tensors, squares, squares, into_factors, square_size, stream));
    return tall ? series_gemm(tensors, by_row, series, into_matrix, matrix_size, stream)
                : series_gemm(tensors, series, by_column, into_matrix, matrix_size, stream);
}

/* Muon: replaces the directions of a hidden matrix by the result of the Newton-Schulz iteration. */
static enum status orthogonalise(const struct device_tensors *tensors, const struct model_tensor *tensor,
                                 uint32_t index, cudaStream_t stream)
{
    const uint32_t rows = (uint32_t)train_rows_of(tensor), columns = (uint32_t)(tensor->values / rows);
    float *matrix = tensors->adjusted + tensor->first, *next = tensors->squares + 2 * tensors->square_most;
    normalise_kernel<<<blocks_for(tensor->values), BLOCK, 0, stream>>>(matrix, tensors->norms + index,
                                                                       tensor->values, next);
    CUDA_TRY_LAUNCH("normalise_kernel");
    static_assert(MUON_ITERATIONS % 2 == 1, "the last iteration writes to `matrix`");
    for (int i = 0; i < MUON_ITERATIONS; i++)
        TRY(iterate(tensors, rows, columns, i % 2 ? matrix : next, i % 2 ? next : matrix, stream));
    return STATUS_OK;
}

enum status tensors_adjust(const struct train *train, const struct update *update,
                           const struct device_tensors *tensors, const struct train_state *state,
                           struct update_extras *extras, const float **gradients, cudaStream_t stream)
{
    const struct model *model = train->model;
    if (tensors->units) {
        units_kernel<<<tensors->unit_count, BLOCK, 0, stream>>>(
            train->optimizer.clip_adaptive, tensors->units, state->parameters, *gradients, tensors->adjusted);
        CUDA_TRY_LAUNCH("units_kernel");
        *gradients = tensors->adjusted;
    }
    extras->trust = tensors->trust;
    extras->directions = tensors->adjusted;
    if (tensors->part_count == 0)
        return STATUS_OK;
    const struct tensor_arrays arrays = {
        reinterpret_cast<const float4 *>(*gradients), reinterpret_cast<float4 *>(state->parameters),
        reinterpret_cast<float4 *>(state->m), reinterpret_cast<float4 *>(state->v),
        reinterpret_cast<float4 *>(tensors->adjusted)};
    parts_kernel<<<tensors->part_count, BLOCK, 0, stream>>>(*update, tensors->parts, *extras, arrays,
                                                            tensors->sums);
    CUDA_TRY_LAUNCH("parts_kernel");
    tensor_sums_kernel<<<model->tensor_count, BLOCK, 0, stream>>>(*update, *tensors, extras->groups);
    CUDA_TRY_LAUNCH("tensor_sums_kernel");
    for (uint32_t t = 0; tensors->squares && t < model->tensor_count; t++)
        if (model->tensors[t].hidden)
            TRY(orthogonalise(tensors, &model->tensors[t], t, stream));
    return STATUS_OK;
}

/* ---- The parameter update ---- */

#define STEP_VALUES 4 /* values per thread: 16 bytes of fp32 */

template <bool TENSORS>
static __device__ __forceinline__ void update_value(const struct update &update, float gradient,
                                                    float *parameter, float *m, float *v)
{
    if (TENSORS)
        optimizer_apply(&update, gradient, parameter, m, v);
    else
        optimizer_step(&update, gradient, parameter, m, v);
}

/* `TENSORS`: some rules need whole tensors; extras.trust and extras.directions are set. */
template <bool TENSORS>
static __global__ void __launch_bounds__(BLOCK)
    update_kernel(struct update all, size_t count, const float4 *gradients, const struct update_extras extras,
                  float4 *parameters, float4 *m, float4 *v, float4 *averages)
{
    const size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= count || (extras.scale && extras.scale->overflowed))
        return;
    if (extras.clip)
        all.clip = extras.clip->factor;
    float4 gradient = gradients[i], parameter = parameters[i], first = m[i], second = v[i];
    struct update update =
        extras.groups ? optimizer_of(&all, extras.groups[i * STEP_VALUES / MODEL_ALIGNMENT]) : all;
    if (TENSORS) {
        update.trust = extras.trust[extras.groups[i * STEP_VALUES / MODEL_ALIGNMENT].index];
        if (update.kind == OPTIMIZER_MUON)
            gradient = reinterpret_cast<const float4 *>(extras.directions)[i];
    }
    update_value<TENSORS>(update, gradient.x, &parameter.x, &first.x, &second.x);
    update_value<TENSORS>(update, gradient.y, &parameter.y, &first.y, &second.y);
    update_value<TENSORS>(update, gradient.z, &parameter.z, &first.z, &second.z);
    update_value<TENSORS>(update, gradient.w, &parameter.w, &first.w, &second.w);
    parameters[i] = parameter;
    m[i] = first;
    v[i] = second;
    if (averages) {
        float4 average = averages[i];
        average.x = optimizer_average(&update, average.x, parameter.x);
        average.y = optimizer_average(&update, average.y, parameter.y);
        average.z = optimizer_average(&update, average.z, parameter.z);
        average.w = optimizer_average(&update, average.w, parameter.w);
        averages[i] = average;
    }
    if (extras.rounded)
        static_cast<uint2 *>(extras.rounded)[i] =
            extras.to_fp16
                ? uint2{pack<fp16>(parameter.x, parameter.y), pack<fp16>(parameter.z, parameter.w)}
                : uint2{pack<bf16>(parameter.x, parameter.y), pack<bf16>(parameter.z, parameter.w)};
}

enum status parameters_update(const struct update *update, size_t values, const float *gradients,
                              const struct update_extras *extras, const struct train_state *state,
                              cudaStream_t stream)
{
    const size_t count = (values + STEP_VALUES - 1) / STEP_VALUES;
    auto *kernel = extras->trust ? update_kernel<true> : update_kernel<false>;
    kernel<<<blocks_for(count), BLOCK, 0, stream>>>(
        *update, count, reinterpret_cast<const float4 *>(gradients), *extras,
        reinterpret_cast<float4 *>(state->parameters), reinterpret_cast<float4 *>(state->m),
        reinterpret_cast<float4 *>(state->v), reinterpret_cast<float4 *>(state->ema));
    return CUDA_LAUNCHED("update_kernel");
}
