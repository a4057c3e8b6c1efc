#include "common/calls.cuh"

#include "common/check.cuh"
#include "common/stream.cuh"
#include "machine/device.h"

enum status calls_refuse_capture(void *cuda_stream, const char *what)
{
    return device_capturing(-1, cuda_stream)
               ? status_set(STATUS_USAGE,
                            "cuda_stream: it is being captured into a CUDA graph, which cannot "
                            "contain %s",
                            what)
               : STATUS_OK;
}

/* ---- Turns ---- */

enum status turn_open(struct turn *turn)
{
    return CUDA_STATUS(cudaEventCreateWithFlags(&turn->used, cudaEventDisableTiming));
}

void turn_close(struct turn *turn)
{
    if (turn->used)
        (void)cudaEventSynchronize(turn->used);
    destroy(turn->used);
}

enum status turn_begin(struct turn *turn, cudaStream_t stream)
{
    unsigned long long user;
    CUDA_TRY(cudaStreamGetId(stream, &user));
    const bool waits = !turn->uses || user != turn->user;
    turn->uses = false;
    if (waits)
        CUDA_TRY(cudaStreamWaitEvent(stream, turn->used, 0));
    turn->user = user;
    return STATUS_OK;
}

enum status turn_end(struct turn *turn, cudaStream_t stream)
{
    CUDA_TRY(cudaEventRecord(turn->used, stream));
    turn->uses = true;
    return STATUS_OK;
}

/* ---- The position ---- */

static __global__ void set_kernel(uint64_t *word, uint64_t value)
{
    *word = value;
}

enum status moving_open(struct moving *moving, int device)
{
    cudaFuncAttributes attributes;
    CUDA_TRY(cudaMalloc(&moving->position, sizeof *moving->position));
    CUDA_TRY(cudaEventCreateWithFlags(&moving->moved, cudaEventDisableTiming));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, set_kernel));
    return device_load(device);
}

void moving_close(struct moving *moving)
{
    if (moving->moved)
        (void)cudaEventSynchronize(moving->moved);
    (void)cudaFree(moving->position);
    destroy(moving->moved);
}

static enum status write_position(struct moving *moving, uint64_t position)
{
    CUDA_TRY(
        cudaMemcpyAsync(moving->position, &position, sizeof position, cudaMemcpyHostToDevice, moving->own));
    return CUDA_STATUS(cudaStreamSynchronize(moving->own));
}

enum status moving_locate(struct moving *moving)
{
    uint64_t position;
    if (!moving->moves)
        return STATUS_OK;
    struct relaxed_capture relaxed;
    CUDA_TRY(cudaEventSynchronize(moving->moved));
    CUDA_TRY(
        cudaMemcpyAsync(&position, moving->position, sizeof position, cudaMemcpyDeviceToHost, moving->own));
    CUDA_TRY(cudaStreamSynchronize(moving->own));
    *moving->at = moving_at(moving, position);
    return STATUS_OK;
}

enum status moving_on(struct moving *moving, cudaStream_t stream)
{
    const uint64_t next = moving_position(moving) + 1;
    *moving->at = moving_at(moving, next);
    if (!moving->moves)
        return STATUS_OK;
    set_kernel<<<1, 1, 0, stream>>>(moving->position, next);
    TRY(CUDA_LAUNCHED("set_kernel"));
    return CUDA_STATUS(cudaEventRecord(moving->moved, stream));
}

enum status moving_begin(struct moving *moving, const struct turn *turn)
{
    if (moving->moves)
        return STATUS_OK;
    struct relaxed_capture relaxed;
    if (turn)
        CUDA_TRY(cudaEventSynchronize(turn->used)); /* replays do not wait for it */
    TRY(write_position(moving, moving_position(moving)));
    moving->moves = true;
    return STATUS_OK;
}

enum status moving_capture(const struct moving *moving, int device, cudaStream_t stream)
{
    TRY(device_add(device, moving->position, 1, stream));
    return CUDA_STATUS(cudaEventRecordWithFlags(moving->moved, stream, cudaEventRecordExternal));
}

enum status moving_seek(struct moving *moving, struct stream_position to)
{
    if (!moving->moves)
        return STATUS_OK;
    struct relaxed_capture relaxed;
    TRY(moving_locate(moving)); /* waits for replays */
    return write_position(moving, to.epoch * moving->steps + to.step);
}
