#include "train/shared_update.cuh"

#include <stdlib.h>

#include "common/check.cuh"

/* ---- Opening ---- */

static size_t moment_values(const struct train *train)
{
    const size_t values = train->model->arena_values;
    return exchange_updates(train->exchange) ? exchange_share_room(values, train->ranks) : values;
}

enum status moments_open(const struct train *train, struct train_state *state,
                         struct allocations *allocations, cudaStream_t stream)
{
    TRY(allocate_zeros(allocations, &state->m, moment_values(train), stream));
    return allocate_zeros(allocations, &state->v, moment_values(train), stream);
}

enum status shared_update_open(const struct train *train, struct allocations *allocations,
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

/* ---- Steps ---- */

static __global__ void store_kernel(const struct update update, struct update *to)
{
    *to = update;
}

enum status shared_update_begin(const struct exchange_update *arrays, const struct update *update,
                                cudaStream_t stream)
{
    store_kernel<<<1, 1, 0, stream>>>(*update, const_cast<struct update *>(arrays->update));
    CUDA_TRY_LAUNCH("store_kernel");
    return STATUS_OK;
}

/* ---- Copying the state ---- */

/* Copies this rank's chunks of an arena in host memory to the device. */
static enum status set_share(const struct train *train, const float *arena, float *share)
{
    const size_t bytes = moment_values(train) * sizeof *share;
    float *own = static_cast<float *>(malloc(bytes));
    TRY(ALLOCATED(own, "out of memory for moments"));
    exchange_share_take(arena, train->model->arena_values, own);
    enum status status = cuda_status(cudaMemcpy(share, own, bytes, cudaMemcpyHostToDevice),
                                     "copying moments to the device", __FILE__, __LINE__);
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
        status = cuda_status(cudaMemcpy(own, share, bytes, cudaMemcpyDeviceToHost),
                             "copying moments from the device", __FILE__, __LINE__);
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
    CUDA_TRY(cudaStreamSynchronize(stream));
    return STATUS_OK;
}

enum status state_set(const struct train *train, const struct train_state *to, const struct train_state *from,
                      cudaStream_t stream)
{
    TRY(copy_and_wait(train, to, from, stream));
    if (!exchange_updates(train->exchange))
        return STATUS_OK;
    TRY(set_share(train, from->m, to->m));
    TRY(set_share(train, from->v, to->v));
    CUDA_TRY(cudaDeviceSynchronize()); /* a copy from pageable memory may return before it is complete */
    return STATUS_OK;
}

enum status state_get(const struct train *train, struct train_state *to, const struct train_state *from,
                      cudaStream_t stream)
{
    enum status status = copy_and_wait(train, to, from, stream);
    if (!exchange_updates(train->exchange))
        return status;
    TRY(get_share(train, status, from->m, to->m));
    return get_share(train, STATUS_OK, from->v, to->v);
}
