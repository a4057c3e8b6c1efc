/* Device memory, copies of the state, progress and CUDA graphs, for all engines (network.cuh). */
#include "train/network.cuh"

#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"

/* ---- Memory ---- */

/* Ensures that the list of blocks has room for one more entry. */
static enum status make_room(struct allocations *allocations)
{
    if (allocations->count < allocations->room)
        return STATUS_OK;
    uint32_t room = allocations->room ? 2 * allocations->room : 64;
    void *blocks = realloc(allocations->blocks, room * sizeof *allocations->blocks);
    TRY(ALLOCATED(blocks, "cuda: out of memory"));
    allocations->blocks = static_cast<void **>(blocks);
    allocations->room = room;
    return STATUS_OK;
}

#define PAGE_BYTES    (UINT64_C(2) << 20) /* cudaMalloc() maps memory in pages of this size */
#define SHARED_BYTES  (UINT64_C(1) << 20) /* smaller allocations share pages */
#define PLANNED_BEGIN 256                 /* the address of memory that is only counted */

/* Returns the device memory that an allocation takes. */
static uint64_t taken_bytes(size_t bytes)
{
    return bytes < SHARED_BYTES ? bytes : (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

enum status allocate_bytes(struct allocations *allocations, void **pointer, size_t bytes)
{
    TRY(memory_take(allocations->account, allocations->part, taken_bytes(bytes)));
    if (allocations_plan(allocations)) {
        *pointer = reinterpret_cast<void *>(PLANNED_BEGIN);
        allocations->bytes += bytes;
        return STATUS_OK;
    }
    TRY(make_room(allocations));
    enum status allocated = CUDA_STATUS(cudaMalloc(pointer, bytes));
    if (allocated == STATUS_EXHAUSTED) {
        size_t free_bytes = 0, total_bytes = 0;
        CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
        return status_set(STATUS_TOO_LARGE,
                          "not enough device memory for the network: %.2f GB allocated, %.2f GB more needed, "
                          "%.2f GB free; lower --batch",
                          1e-9 * (double)allocations->bytes, 1e-9 * (double)bytes, 1e-9 * (double)free_bytes);
    }
    TRY(allocated);
    allocations->blocks[allocations->count++] = *pointer;
    allocations->bytes += bytes;
    return STATUS_OK;
}

void allocations_free(struct allocations *allocations)
{
    while (allocations->count > 0)
        (void)cudaFree(allocations->blocks[--allocations->count]);
    free(allocations->blocks);
    *allocations = {};
}

/* ---- State ---- */

enum status arena_copy(const struct train *train, float *to, const float *from, cudaStream_t stream)
{
    return CUDA_STATUS(
        cudaMemcpyAsync(to, from, train->model->arena_values * sizeof *to, cudaMemcpyDefault, stream));
}

enum status state_copy(const struct train *train, const struct train_state *to,
                       const struct train_state *from, cudaStream_t stream)
{
    TRY(arena_copy(train, to->parameters, from->parameters, stream));
    if (train->forward_only)
        return STATUS_OK;
    TRY(arena_copy(train, to->m, from->m, stream));
    TRY(arena_copy(train, to->v, from->v, stream));
    return train_averages(train) && to->ema
               ? arena_copy(train, to->ema, from->ema ? from->ema : from->parameters, stream)
               : STATUS_OK;
}

enum status totals_clear(struct train_totals *totals, cudaStream_t stream)
{
    static const struct train_totals none = {.bad_step = TRAIN_FINE};
    return CUDA_STATUS(cudaMemcpyAsync(totals, &none, sizeof none, cudaMemcpyHostToDevice, stream));
}

/* ---- Progress ---- */

enum status device_progress_open(struct device_progress *progress)
{
    CUDA_TRY(cudaMallocHost(&progress->seen, sizeof *progress->seen));
    memset(progress->seen, 0, sizeof *progress->seen);
    return STATUS_OK;
}

void device_progress_close(struct device_progress *progress)
{
    (void)cudaFreeHost(progress->seen); /* nothing depends on an error here */
    progress->seen = nullptr;
}

enum status device_progress_step(struct device_progress *progress, const struct train_totals *totals,
                                 uint32_t steps, cudaStream_t stream)
{
    progress->steps += steps;
    if (progress->steps < TRAIN_PROGRESS_STEPS)
        return STATUS_OK;
    progress->steps = 0;
    return CUDA_STATUS(
        cudaMemcpyAsync(progress->seen, totals, sizeof *totals, cudaMemcpyDeviceToHost, stream));
}

void device_progress_clear(struct device_progress *progress)
{
    memset(progress->seen, 0, sizeof *progress->seen);
    progress->steps = 0;
}

void device_progress_read(const struct device_progress *progress, struct train_progress *into)
{
    const volatile struct train_totals *seen = progress->seen;
    into->loss = seen->loss;
    into->correct = seen->correct;
    into->samples = seen->samples;
}

/* ---- Graphs ---- */

enum status capture_end(cudaStream_t stream, enum status status, cudaGraphExec_t *into)
{
    cudaGraph_t graph = NULL;
    cudaError_t error = cudaStreamEndCapture(stream, &graph);
    if (status == STATUS_OK)
        status = cuda_status(error, "cudaStreamEndCapture", __FILE__, __LINE__);
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaGraphInstantiate(into, graph, 0));
    if (graph)
        (void)cudaGraphDestroy(graph);
    return status;
}
