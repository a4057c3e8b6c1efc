/* Opens engines on a device, runs their steps in parts, and reads their totals. A step is a sequence of
 * asynchronous launches. The host does not wait for the sums of losses before totals(). */
#include "train/device_engine.cuh"

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "train/exchange.h"

/* ---- Exchanges that also update the parameters (exchange_method.updates) ---- */

static size_t moment_values(const struct train *train)
{
    const size_t values = train->model->arena_values;
    return exchange_updates(train->exchange) ? exchange_share_room(values, train->ranks) : values;
}

/* Allocates the optimizer's moments and enqueues zeroing them. If the exchange updates the parameters, the
 * moments cover only this rank's chunks of the arena (train/exchange.h), otherwise the whole arena. */
static enum status moments_open(const struct train *train, struct train_state *state,
                                struct allocations *allocations, cudaStream_t stream)
{
    TRY(allocate_zeros(allocations, &state->m, moment_values(train), stream));
    return allocate_zeros(allocations, &state->v, moment_values(train), stream);
}

/* If the exchange updates the parameters, allocates arrays->update and passes `arrays` to the exchange; the
 * caller has set the other members. `arrays` must outlive the exchange's steps. Otherwise does nothing. */
static enum status shared_update_open(const struct train *train, struct allocations *allocations,
                                      struct exchange_update *arrays)
{
    struct update *update;
    if (!exchange_updates(train->exchange))
        return STATUS_OK;
    TRY(allocate(allocations, &update, 1));
    arrays->update = update;
    train->exchange->update = arrays;
    return STATUS_OK;
}

static __global__ void store_kernel(const struct update update, struct update *to)
{
    *to = update;
}

/* Call before the first part of a step: enqueues storing the update of the step for the exchange. */
static enum status shared_update_begin(const struct exchange_update *arrays, const struct update *update,
                                       cudaStream_t stream)
{
    store_kernel<<<1, 1, 0, stream>>>(*update, const_cast<struct update *>(arrays->update));
    return CUDA_LAUNCHED("store_kernel");
}

/* ---- Opening and closing ---- */

enum status device_engine_open(struct device_engine *engine)
{
    CUDA_TRY(cudaSetDevice(engine->device));
    CUDA_TRY(cudaStreamCreateWithFlags(&engine->stream, cudaStreamNonBlocking));
    CUDA_TRY(cudaEventCreate(&engine->gather_begin));
    return CUDA_STATUS(cudaEventCreate(&engine->gather_end));
}

/* Opens the augmentation of the next step. A step in parts would need the samples of its next part, loading a
 * batch can keep the host waiting, and a step reads its rows of multi-hot labels until it ends: then, each
 * step augments its own samples. */
static enum status ahead_open(struct device_engine *engine)
{
    const struct train *train = engine->train;
    struct device_ahead *ahead = &engine->ahead;
    if (!engine->augment.images || train->stage || train_parts(train) > 1 || train->data->feed == DATA_LOAD ||
        train->data->multi_hot)
        return STATUS_OK;
    TRY(device_batch_allocate(train, engine->capacity, &ahead->batch, &engine->allocations));
    CUDA_TRY(cudaEventCreateWithFlags(&ahead->ready, cudaEventDisableTiming));
    CUDA_TRY(cudaEventCreateWithFlags(&ahead->taken, cudaEventDisableTiming));
    return stream_open(&ahead->stream, true);
}

enum status device_engine_open_data(struct device_engine *engine)
{
    const struct resources resources = {.threads = engine->threads, .device = engine->device};
    if (engine->train->forward_only)
        CUDA_TRY(cudaMallocHost(&engine->results,
                                (size_t)engine->capacity * engine->train->model->classes * sizeof(float)));
    TRY(device_sets_open(engine->train, engine->sets, &engine->allocations, engine->stream));
    engine->allocations.part = MEMORY_STREAM;
    TRY(device_augment_open(engine->train, &engine->allocations, &engine->augment));
    TRY(ahead_open(engine));
    return device_feed_open(&engine->feed, engine->train, &resources, &engine->allocations);
}

static enum status clear_totals(struct device_engine *engine)
{
    struct device_scale *scale = engine->losses.scale;
    engine->steps = 0;
    if (scale)
        CUDA_TRY(cudaMemsetAsync(&scale->skipped, 0, sizeof scale->skipped, engine->stream));
    return totals_clear(engine->losses.totals, engine->stream);
}

enum status device_engine_open_learning(struct device_engine *engine)
{
    const struct train *train = engine->train;
    const size_t values = train->model->arena_values;
    engine->allocations.part = MEMORY_OPTIMIZER;
    TRY(moments_open(train, &engine->state, &engine->allocations, engine->stream));
    if (train_averages(train))
        TRY(allocate(&engine->allocations, &engine->state.ema, values));
    TRY(clip_open(train, &engine->allocations, &engine->clip));
    if (train->model->transformer || train->model->normalises || train_needs_tensors(train))
        TRY(groups_open(train, &engine->allocations, &engine->groups, engine->stream));
    TRY(tensors_open(train, &engine->allocations, &engine->tensors, engine->stream));
    engine->shared.groups = engine->groups;
    TRY(shared_update_open(train, &engine->allocations, &engine->shared));
    engine->allocations.part = MEMORY_GRADIENTS;
    TRY(allocate_zeros(&engine->allocations, &engine->gradients, values, engine->stream));
    engine->shared.gradients = engine->gradients;
    engine->shared.parameters = engine->state.parameters;
    engine->shared.m = engine->state.m;
    engine->shared.v = engine->state.v;
    engine->allocations.part = MEMORY_WORKSPACE;
    TRY(allocate(&engine->allocations, &engine->losses.losses, engine->capacity));
    TRY(allocate(&engine->allocations, &engine->losses.right, engine->capacity));
    TRY(allocate(&engine->allocations, &engine->losses.totals, 1));
    TRY(device_progress_open(&engine->progress));
    return allocations_plan(&engine->allocations) ? STATUS_OK : clear_totals(engine);
}

void device_engine_stop(struct device_engine *engine)
{
    (void)cudaSetDevice(engine->device);
    for (cudaStream_t stream : {engine->stream, engine->ahead.stream})
        if (stream)
            (void)cudaStreamSynchronize(stream);
}

void device_engine_close(struct device_engine *engine)
{
    device_feed_close(&engine->feed);
    device_progress_close(&engine->progress);
    (void)cudaFreeHost(engine->results); /* nothing depends on an error here */
    allocations_free(&engine->allocations);
    destroy(engine->ahead.ready, engine->ahead.taken, engine->ahead.stream);
    destroy(engine->gather_end, engine->gather_begin, engine->stream);
}

/* ---- Copying the state ---- */

/* Copies this rank's chunks of an arena in host memory to the device. */
static enum status set_share(const struct train *train, const float *arena, float *share)
{
    const size_t bytes = moment_values(train) * sizeof *share;
    float *own = static_cast<float *>(malloc(bytes));
    TRY(ALLOCATED(own, "out of memory for moments"));
    exchange_share_take(arena, train->model->arena_values, own);
    enum status status = CUDA_STATUS(cudaMemcpy(share, own, bytes, cudaMemcpyHostToDevice));
    free(own);
    return status;
}

/* Fills an arena in host memory from the chunks of all ranks. */
static enum status get_share(const struct train *train, enum status status, const float *share, float *arena)
{
    const size_t bytes = moment_values(train) * sizeof *share;
    float *own = static_cast<float *>(malloc(bytes));
    if (status == STATUS_OK && !own)
        status = status_set(STATUS_EXHAUSTED, "out of memory for moments");
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaMemcpy(own, share, bytes, cudaMemcpyDeviceToHost));
    status = exchange_share_collect(status, own, train->model->arena_values, arena);
    free(own);
    return status;
}

/* Copies the state, without moments that are divided among ranks, and waits for the copies. */
static enum status copy_and_wait(const struct train *train, const struct train_state *to,
                                 const struct train_state *from, cudaStream_t stream)
{
    TRY(exchange_updates(train->exchange) ? arena_copy(train, to->parameters, from->parameters, stream)
                                          : state_copy(train, to, from, stream));
    return CUDA_STATUS(cudaStreamSynchronize(stream));
}

/* Copy the parameters and, when training, the moments between host and device, and wait for the copies. With
 * an exchange that updates the parameters, state_get() is collective: it gathers the moments of all ranks. */
static enum status state_set(const struct train *train, const struct train_state *to,
                             const struct train_state *from, cudaStream_t stream)
{
    TRY(copy_and_wait(train, to, from, stream));
    if (!exchange_updates(train->exchange))
        return STATUS_OK;
    TRY(set_share(train, from->m, to->m));
    TRY(set_share(train, from->v, to->v));
    CUDA_TRY(cudaDeviceSynchronize()); /* a copy from pageable memory may return before it is complete */
    return STATUS_OK;
}

static enum status state_get(const struct train *train, struct train_state *to,
                             const struct train_state *from, cudaStream_t stream)
{
    enum status status = copy_and_wait(train, to, from, stream);
    if (!exchange_updates(train->exchange))
        return status;
    TRY(get_share(train, status, from->m, to->m));
    return get_share(train, STATUS_OK, from->v, to->v);
}

static struct device_engine *engine_of(void *state)
{
    return static_cast<struct device_engine *>(state);
}

/* Copies the loss scale, and waits for the copy. */
static enum status copy_scale(struct device_engine *engine, struct loss_scale *to,
                              const struct loss_scale *from)
{
    CUDA_TRY(cudaMemcpyAsync(to, from, sizeof *to, cudaMemcpyDefault, engine->stream));
    return CUDA_STATUS(cudaStreamSynchronize(engine->stream));
}

enum status device_engine_set(void *state, const struct train_state *from)
{
    struct device_engine *engine = engine_of(state);
    CUDA_TRY(cudaSetDevice(engine->device));
    TRY(state_set(engine->train, &engine->state, from, engine->stream));
    struct device_scale *scale = engine->losses.scale;
    const struct loss_scale now =
        from->scale.scale > 0 ? from->scale : loss_scale_begin(&engine->train->scaling);
    if (!scale)
        return STATUS_OK;
    CUDA_TRY(cudaMemsetAsync(scale->steps, 0, sizeof scale->steps, engine->stream));
    return copy_scale(engine, &scale->now, &now);
}

enum status device_engine_get(void *state, struct train_state *into)
{
    struct device_engine *engine = engine_of(state);
    CUDA_TRY(cudaSetDevice(engine->device));
    TRY(state_get(engine->train, into, &engine->state, engine->stream));
    return engine->losses.scale ? copy_scale(engine, &into->scale, &engine->losses.scale->now) : STATUS_OK;
}

enum status device_engine_gradients(void *state, float *gradients)
{
    struct device_engine *engine = engine_of(state);
    CUDA_TRY(cudaSetDevice(engine->device));
    TRY(arena_copy(engine->train, gradients, engine->gradients, engine->stream));
    return CUDA_STATUS(cudaStreamSynchronize(engine->stream));
}

enum status device_engine_overflows(void *state, uint32_t *steps)
{
    struct device_engine *engine = engine_of(state);
    struct device_scale *scale = engine->losses.scale;
    CUDA_TRY(cudaSetDevice(engine->device));
    CUDA_TRY(cudaMemcpyAsync(steps, scale->steps, engine->train->model->layer_count * sizeof *steps,
                             cudaMemcpyDeviceToHost, engine->stream));
    CUDA_TRY(cudaMemsetAsync(scale->steps, 0, sizeof scale->steps, engine->stream));
    return CUDA_STATUS(cudaStreamSynchronize(engine->stream));
}

/* ---- The update ---- */

enum status device_engine_update(struct device_engine *engine, const struct update *update)
{
    const struct train *train = engine->train;
    const size_t values = train->model->arena_values;
    struct device_scale *scale = engine->losses.scale;
    const float *gradients = engine->gradients;
    struct update_extras extras = {.scale = scale,
                                   .clip = engine->clip,
                                   .groups = engine->groups,
                                   .rounded = engine->shared.rounded,
                                   .to_fp16 = engine->to_fp16};
    RANGE(UPDATE);
    if (scale) /* running statistics are not scaled */
        TRY(scaling_unscale(scale, train->model->trained_values, engine->gradients, engine->stream));
    TRY(clip_find(&train->optimizer, train->model->trained_values, gradients, scale, engine->clip,
                  engine->losses.totals, engine->stream));
    if (train_needs_tensors(train))
        TRY(tensors_adjust(train, update, &engine->tensors, &engine->state, &extras, &gradients,
                           engine->stream));
    TRY(parameters_update(update, values, gradients, &extras, &engine->state, engine->stream));
    return scale ? scaling_step(&train->scaling, scale, engine->stream) : STATUS_OK;
}

/* ---- Exchanging gradients ---- */

enum status device_engine_exchange(struct device_engine *engine, uint32_t first, uint32_t end_layer,
                                   size_t *end, cudaStream_t stream)
{
    const struct model *model = engine->train->model;
    struct exchange *exchange = engine->train->exchange;
    size_t begin;
    for (uint32_t i = end_layer; exchange && i-- > first;) {
        if (!exchange_is_part(model, &model->layers[i], *end, &begin))
            continue;
        TRY(exchange->method->begin(exchange, engine->gradients + begin, *end - begin, stream));
        *end = begin;
    }
    return STATUS_OK;
}

enum status device_engine_exchange_end(struct device_engine *engine)
{
    struct exchange *exchange = engine->train->exchange;
    return exchange ? exchange->method->end(exchange, engine->stream) : STATUS_OK;
}

/* ---- Steps ---- */

/* Makes a part of a step the current batch. `set` has the samples of this rank in the step, or all samples.
 * `skipped`: samples of this rank before this part. */
static enum status gather_part(struct device_engine *engine, const struct device_set *set, uint32_t epoch,
                               uint32_t step, const struct share *part, uint32_t skipped)
{
    const uint32_t count = (uint32_t)part->count;
    struct device_set of = *set;
    RANGE(GATHER);
    of.held.skipped = skipped;
    TRY(batch_draw(engine->train, &of, engine->batch, epoch, step, part, engine->stream));
    TRY(device_augment_run(&engine->augment, epoch, engine->batch->numbers, count, &of, engine->stream));
    return engine->functions->gather(engine, &of, epoch, true, count);
}

/* Computes the gradients of the samples of this rank. With `timed`, records the events around the gather of
 * the first part. Samples of the feed are released after the last gather. A rank without samples takes an
 * empty batch, so that the feed stays at the steps that are computed. */
static enum status learn_parts(struct device_engine *engine, uint32_t epoch, uint32_t step,
                               const struct share *share, bool timed)
{
    const struct train *train = engine->train;
    struct device_set set = engine->sets[DATA_TRAIN];
    const bool delivered = device_feed_delivers(&engine->feed);
    const uint32_t parts = train_parts(train);
    if (timed)
        CUDA_TRY(cudaEventRecord(engine->gather_begin, engine->stream));
    if (delivered)
        TRY(device_feed_take(&engine->feed, epoch, step, engine->stream, &set));
    for (uint32_t i = 0; i < parts; i++) {
        const struct share part = train_part(train, share, i);
        if (part.count > 0)
            TRY(gather_part(engine, &set, epoch, step, &part, (uint32_t)(part.first - share->first)));
        if (delivered && i == parts - 1)
            TRY(device_feed_release(&engine->feed, engine->stream));
        if (timed && i == 0)
            CUDA_TRY(cudaEventRecord(engine->gather_end, engine->stream));
        if (part.count > 0 || i == 0)
            TRY(engine->functions->learn_part(engine, epoch, step, &part, i));
    }
    return STATUS_OK;
}

/* Enqueues the augmentation of the samples of a step on the stream of engine->ahead, once the images of the
 * previous step have been gathered. */
static enum status prepare(struct device_engine *engine, uint32_t epoch, uint32_t step)
{
    const struct train *train = engine->train;
    struct device_ahead *ahead = &engine->ahead;
    const struct share share = train_share(train, step);
    const uint32_t count = (uint32_t)share.count;
    const bool delivered = device_feed_delivers(&engine->feed);
    RANGE(GATHER);
    ahead->set = engine->sets[DATA_TRAIN];
    CUDA_TRY(cudaStreamWaitEvent(ahead->stream, ahead->taken, 0));
    if (delivered)
        TRY(device_feed_take(&engine->feed, epoch, step, ahead->stream, &ahead->set));
    if (count > 0) {
        TRY(batch_draw(train, &ahead->set, &ahead->batch, epoch, step, &share, ahead->stream));
        TRY(device_augment_run(&engine->augment, epoch, ahead->batch.numbers, count, &ahead->set,
                               ahead->stream));
    }
    if (delivered)
        TRY(device_feed_release(&engine->feed, ahead->stream));
    ahead->prepared = true;
    return CUDA_STATUS(cudaEventRecord(ahead->ready, ahead->stream));
}

/* Computes the gradients of the samples of this rank, which engine->ahead augments. With `more`, augments
 * those of the next step, too. */
static enum status learn_prepared(struct device_engine *engine, uint32_t epoch, uint32_t step,
                                  const struct share *share, bool timed, bool more)
{
    struct device_ahead *ahead = &engine->ahead;
    if (!ahead->prepared)
        TRY(prepare(engine, epoch, step));
    if (timed)
        CUDA_TRY(cudaEventRecord(engine->gather_begin, engine->stream));
    CUDA_TRY(cudaStreamWaitEvent(engine->stream, ahead->ready, 0));
    if (share->count > 0) {
        TRY(batch_draw(engine->train, &ahead->set, engine->batch, epoch, step, share, engine->stream));
        TRY(engine->functions->gather(engine, &ahead->set, epoch, true, (uint32_t)share->count));
    }
    CUDA_TRY(cudaEventRecord(ahead->taken, engine->stream));
    if (timed)
        CUDA_TRY(cudaEventRecord(engine->gather_end, engine->stream));
    ahead->prepared = false;
    if (more)
        TRY(prepare(engine, epoch, step + 1));
    return engine->functions->learn_part(engine, epoch, step, share, 0);
}

/* `more`: device_engine_steps() computes the next step, too. */
static enum status learn(struct device_engine *engine, uint32_t epoch, uint32_t step, bool timed, bool more)
{
    const struct train *train = engine->train;
    const struct share share = train_share(train, step);
    const uint64_t number = (uint64_t)epoch * train_steps(train) + step;
    const struct update update = optimizer_at(&train->optimizer, &train->schedule, number);
    const bool shared = exchange_updates(train->exchange);
    size_t end = train->model->arena_values;
    if (shared)
        TRY(shared_update_begin(&engine->shared, &update, engine->stream));
    TRY(engine->ahead.stream ? learn_prepared(engine, epoch, step, &share, timed, more)
                             : learn_parts(engine, epoch, step, &share, timed));
    if (train_parts(train) > 1) {
        TRY(device_engine_exchange(engine, 0, train->model->layer_count, &end, engine->stream));
        TRY(device_engine_exchange_end(engine));
    }
    return shared ? STATUS_OK : engine->functions->update(engine, &update);
}

enum status device_engine_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    struct device_engine *engine = engine_of(state);
    const uint32_t timed = first + count / 2;
    CUDA_TRY(cudaSetDevice(engine->device));
    device_feed_plan_timings(&engine->feed, count);
    engine->ahead.prepared = false; /* a step of an earlier call may have failed */
    for (uint32_t step = first; step < first + count; step++) {
        TRY(learn(engine, epoch, step, step == timed, step + 1 < first + count));
        TRY(device_progress_step(&engine->progress, engine->losses.totals, 1, engine->stream));
    }
    engine->steps += count;
    return STATUS_OK;
}

/* For stored samples, `data_s` is the gather time of one step times the number of steps, because events
 * around every step would slow the steps down. If a feed delivers the samples, it extrapolates `data_s` from
 * several steps. `data_s` is not known for stages, or for steps in parts. */
enum status device_engine_totals(void *state, struct train_totals *totals)
{
    struct device_engine *engine = engine_of(state);
    const struct train *train = engine->train;
    const struct device_losses *losses = &engine->losses;
    float gather_ms = 0;
    uint32_t skipped = 0;
    CUDA_TRY(cudaSetDevice(engine->device));
    CUDA_TRY(cudaMemcpyAsync(totals, losses->totals, sizeof *totals, cudaMemcpyDeviceToHost, engine->stream));
    if (losses->scale)
        CUDA_TRY(cudaMemcpyAsync(&skipped, &losses->scale->skipped, sizeof skipped, cudaMemcpyDeviceToHost,
                                 engine->stream));
    CUDA_TRY(cudaStreamSynchronize(engine->stream));
    TRY(exchange_settle(train->exchange));
    totals->skipped = skipped;
    if (engine->steps > 0 && !train->stage)
        CUDA_TRY(cudaEventElapsedTime(&gather_ms, engine->gather_begin, engine->gather_end));
    totals->data_s = 1e-3 * gather_ms * (double)engine->steps;
    const double gather_s = totals->data_s;
    if (device_feed_delivers(&engine->feed))
        TRY(device_feed_totals(&engine->feed, engine->steps, totals));
    if (engine->ahead.stream) /* the times of the feed are those of the other stream */
        totals->data_s = gather_s;
    if (train->stage || train_parts(train) > 1)
        totals->data_s = -1;
    device_progress_clear(&engine->progress);
    return clear_totals(engine);
}

void device_engine_progress(const void *state, struct train_progress *progress)
{
    device_progress_read(&static_cast<const struct device_engine *>(state)->progress, progress);
}

/* ---- Stages of pipelines ---- */

/* Copies the labels of a micro-batch from the data in host memory, where the pipeline has put them. */
static enum status copy_labels(struct device_engine *engine, const struct micro *micro)
{
    const struct data *data = engine->train->data;
    const uint32_t entries = train_entries(engine->train, micro->count);
    uint32_t *labels = static_cast<uint32_t *>(malloc(entries * sizeof *labels));
    TRY(ALLOCATED(labels, "cuda: out of memory"));
    for (uint32_t j = 0; j < entries; j++)
        labels[j] = data->sets[DATA_TRAIN].labels[train_original(data, micro->numbers[j])];
    enum status status = CUDA_STATUS(cudaMemcpyAsync(engine->batch->labels, labels, entries * sizeof *labels,
                                                     cudaMemcpyHostToDevice, engine->stream));
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaStreamSynchronize(engine->stream));
    free(labels);
    return status;
}

/* Draws a micro-batch of training samples; in the first stage, gathers them. */
static enum status take_to_learn(struct device_engine *engine, const struct micro *micro)
{
    const struct train *train = engine->train;
    const struct share share = {.first = micro->first, .count = micro->count, .total = micro->total};
    const uint32_t step = (uint32_t)(micro->step % train_steps(train));
    struct device_set set = engine->sets[DATA_TRAIN];
    if (!train->stage->first) {
        TRY(batch_draw(train, &set, engine->batch, micro->epoch, step, &share, engine->stream));
        return train->data->feed == DATA_LOAD ? copy_labels(engine, micro) : STATUS_OK;
    }
    engine->steps++;
    if (!device_feed_delivers(&engine->feed))
        return gather_part(engine, &set, micro->epoch, step, &share, 0);
    TRY(device_feed_take(&engine->feed, micro->epoch, feed_micro(train, micro), engine->stream, &set));
    TRY(gather_part(engine, &set, micro->epoch, step, &share, 0));
    return device_feed_release(&engine->feed, engine->stream);
}

enum status device_stage_take(struct device_engine *engine, const struct micro *micro)
{
    const struct device_set *set = &engine->sets[micro->part];
    if (micro->training)
        return take_to_learn(engine, micro);
    TRY(batch_list(set, engine->batch, micro->first, micro->count, engine->stream));
    return engine->train->stage->first ? engine->functions->gather(engine, set, 0, false, micro->count)
                                       : STATUS_OK;
}

enum status device_stage_copy(const struct device_engine *engine, void *to, const void *from, size_t bytes)
{
    return CUDA_STATUS(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, engine->stream));
}

enum status device_stage_clear(void *state)
{
    struct device_engine *engine = engine_of(state);
    CUDA_TRY(cudaSetDevice(engine->device));
    return CUDA_STATUS(cudaMemsetAsync(engine->gradients, 0,
                                       engine->train->model->arena_values * sizeof *engine->gradients,
                                       engine->stream));
}

enum status device_stage_sum(void *state, bool *overflowed)
{
    struct device_engine *engine = engine_of(state);
    struct device_scale *scale = engine->losses.scale;
    size_t end = engine->train->model->arena_values;
    uint32_t found = 0;
    CUDA_TRY(cudaSetDevice(engine->device));
    if (scale)
        CUDA_TRY(cudaMemsetAsync(&scale->overflowed, 0, sizeof scale->overflowed, engine->stream));
    TRY(device_engine_exchange(engine, 0, engine->train->model->layer_count, &end, engine->stream));
    TRY(device_engine_exchange_end(engine));
    if (scale) {
        TRY(scaling_check(scale, engine->train->model->arena_values, engine->gradients, engine->stream));
        CUDA_TRY(cudaMemcpyAsync(&found, &scale->overflowed, sizeof found, cudaMemcpyDeviceToHost,
                                 engine->stream));
    }
    CUDA_TRY(cudaStreamSynchronize(engine->stream));
    *overflowed |= found != 0;
    return STATUS_OK;
}

enum status device_stage_update(void *state, uint64_t step, bool overflowed)
{
    struct device_engine *engine = engine_of(state);
    const struct train *train = engine->train;
    const struct update update = optimizer_at(&train->optimizer, &train->schedule, step);
    const uint32_t skips = overflowed;
    CUDA_TRY(cudaSetDevice(engine->device));
    if (engine->losses.scale)
        CUDA_TRY(cudaMemcpyAsync(&engine->losses.scale->overflowed, &skips, sizeof skips,
                                 cudaMemcpyHostToDevice, engine->stream));
    TRY(engine->functions->update(engine, &update));
    TRY(device_progress_step(&engine->progress, engine->losses.totals, 1, engine->stream));
    return CUDA_STATUS(cudaStreamSynchronize(engine->stream));
}

enum status device_stage_pin(void *memory, size_t bytes)
{
    return CUDA_STATUS(cudaHostRegister(memory, bytes, cudaHostRegisterDefault));
}

void device_stage_unpin(void *memory)
{
    (void)cudaHostUnregister(memory); /* nothing depends on an error here */
}

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(struct stage_handle), "a handle of CUDA");

/* Reports an error of sharing memory, and clears it, so that the next check does not see it. */
static enum status sharing(cudaError_t error)
{
    (void)cudaGetLastError();
    return error == cudaSuccess
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE, "GPU memory cannot be shared: %s", cudaGetErrorString(error));
}

enum status device_stage_share(size_t bytes, void **memory, struct stage_handle *handle)
{
    CUDA_TRY(cudaMalloc(memory, bytes));
    return sharing(cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t *>(handle), *memory));
}

enum status device_stage_map(const struct stage_handle *handle, void **memory)
{
    return sharing(cudaIpcOpenMemHandle(memory, *reinterpret_cast<const cudaIpcMemHandle_t *>(handle),
                                        cudaIpcMemLazyEnablePeerAccess));
}

/* Ignores errors, because nothing depends on them. */
void device_stage_release(void *memory, bool mapped)
{
    (void)(mapped ? cudaIpcCloseMemHandle(memory) : cudaFree(memory));
}

/* ---- Inference ---- */

static enum status evaluate_batch(struct device_engine *engine, enum data_part part, uint32_t first,
                                  uint32_t count, float *logits)
{
    const struct device_set *set = &engine->sets[part];
    const float *results;
    TRY(batch_list(set, engine->batch, first, count, engine->stream));
    TRY(engine->functions->gather(engine, set, 0, false, count));
    TRY(engine->functions->infer(engine, count, &results));
    return CUDA_STATUS(cudaMemcpyAsync(logits, results,
                                       (size_t)count * engine->train->model->classes * sizeof *logits,
                                       cudaMemcpyDeviceToHost, engine->stream));
}

enum status device_engine_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                   float *logits)
{
    struct device_engine *engine = engine_of(state);
    const uint32_t batch = engine->capacity, classes = engine->train->model->classes;
    /* A copy to pageable memory would block the host until the kernels have ended. */
    const bool pinned = engine->results && count <= batch;
    CUDA_TRY(cudaSetDevice(engine->device));
    for (uint32_t done = 0; done < count; done += batch) {
        const uint32_t left = count - done;
        TRY(evaluate_batch(engine, part, first + done, left < batch ? left : batch,
                           pinned ? engine->results : logits + (size_t)done * classes));
    }
    CUDA_TRY(cudaStreamSynchronize(engine->stream));
    if (pinned)
        memcpy(logits, engine->results, (size_t)count * classes * sizeof *logits);
    return STATUS_OK;
}

uint64_t device_engine_memory_bytes(const void *state)
{
    const struct device_engine *engine = static_cast<const struct device_engine *>(state);
    return engine->allocations.bytes + device_feed_memory_bytes(&engine->feed);
}

void *device_engine_test_samples(const void *state)
{
    return const_cast<void *>(
        static_cast<const void *>(static_cast<const struct device_engine *>(state)->sets[DATA_TEST].values));
}
