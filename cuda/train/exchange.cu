/* Exchanges of gradients in device memory. `peer` and `nccl` add them up on the device (allreduce.cuh), on a
 * separate stream, while the engine computes the remaining gradients. `mpi` copies them to pinned host
 * memory, adds them up over MPI, and copies the sums back. While the host adds up one piece, the device
 * copies the next one and computes the remaining gradients. `mpi-cuda` passes the addresses of the gradients
 * to MPI, which adds up one part while the device computes the remaining gradients. */
#include "train/exchange.h"

#include <math.h>
#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "machine/comm.h"
#include "train/allreduce.cuh"
#include "train/engine.h"

/* ---- How long training waits ---- */

#define WAITS 64 /* maximum number of timed steps; the latest steps before settle() are timed */

/* Events on the training stream around the wait of each step. */
struct waits {
    cudaEvent_t begin[WAITS], end[WAITS];
    uint64_t steps; /* since the last settle() */
    bool captured;  /* the steps are captured, so they cannot be timed */
};

static enum status waits_open(struct waits *waits)
{
    for (int i = 0; i < WAITS; i++) {
        CUDA_TRY(cudaEventCreate(&waits->begin[i]));
        CUDA_TRY(cudaEventCreate(&waits->end[i]));
    }
    return STATUS_OK;
}

static void waits_close(struct waits *waits)
{
    for (int i = 0; i < WAITS; i++)
        destroy(waits->begin[i], waits->end[i]);
}

/* Call after the step has passed its last part to the exchange. From then on, `stream` only waits. `own` is a
 * stream of the exchange. If the step is being captured, so is `own`. */
static enum status waits_begin(struct waits *waits, cudaStream_t own, cudaStream_t stream)
{
    cudaStreamCaptureStatus capture;
    CUDA_TRY(cudaStreamIsCapturing(own, &capture));
    waits->captured = capture != cudaStreamCaptureStatusNone;
    if (!waits->captured)
        CUDA_TRY(cudaEventRecord(waits->begin[waits->steps % WAITS], stream));
    return STATUS_OK;
}

/* Makes `stream` wait for `done`. */
static enum status waits_end(struct waits *waits, cudaEvent_t done, cudaStream_t stream)
{
    CUDA_TRY(cudaStreamWaitEvent(stream, done, 0));
    if (!waits->captured)
        CUDA_TRY(cudaEventRecord(waits->end[waits->steps++ % WAITS], stream));
    return STATUS_OK;
}

/* Adds the waiting time of all steps, extrapolated from the timed steps, to `*spent_s`. */
static enum status waits_settle(struct waits *waits, double *spent_s)
{
    uint64_t timed = waits->steps < WAITS ? waits->steps : WAITS;
    double sum_ms = 0;
    for (uint64_t i = 0; i < timed; i++) {
        float one_ms;
        CUDA_TRY(cudaEventElapsedTime(&one_ms, waits->begin[i], waits->end[i]));
        sum_ms += one_ms;
    }
    *spent_s += waits->captured ? NAN : timed ? 1e-3 * sum_ms * (double)waits->steps / (double)timed : 0;
    waits->steps = 0;
    return STATUS_OK;
}

/* ---- peer and nccl ---- */

struct on_device {
    const struct allreduce_method *by;
    void *state;
    cudaStream_t stream;
    cudaEvent_t ready, done;
    struct waits waits;
};

static enum status on_device_probe(const struct engine *engine)
{
    return engine->gradients_in == GRADIENTS_IN_DEVICE || engine->gradients_in == GRADIENTS_IN_GRAPH
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE,
                            "the gradients of this variant are not in device memory; use --sync mpi");
}

static enum status open_own(struct on_device *self, int device)
{
    CUDA_TRY(cudaSetDevice(device));
    TRY(stream_open(&self->stream)); /* highest priority, so that the exchange starts before queued kernels of
                                        the engine */
    CUDA_TRY(cudaEventCreateWithFlags(&self->ready, cudaEventDisableTiming));
    CUDA_TRY(cudaEventCreateWithFlags(&self->done, cudaEventDisableTiming));
    TRY(waits_open(&self->waits));
    return self->by->probe(device);
}

template <const struct allreduce_method *BY, enum allreduce_type TYPE>
static enum status on_device_open(struct exchange *exchange)
{
    struct on_device *self = static_cast<struct on_device *>(calloc(1, sizeof *self));
    exchange->state = self;
    TRY(comm_agree(ALLOCATED(self, "out of memory")));
    self->by = BY;
    TRY(comm_agree(open_own(self, exchange->device)));
    const struct allreduce_request request = {
        .device = exchange->device, .count_max = exchange->count, .type = TYPE, .group = exchange->group};
    return BY->open(&request, &self->state);
}

static void on_device_close(struct exchange *exchange)
{
    struct on_device *self = static_cast<struct on_device *>(exchange->state);
    if (!self)
        return;
    /* Ignores errors: nothing can be done about them, and nothing depends on them. */
    if (self->stream)
        (void)cudaStreamSynchronize(self->stream);
    if (self->state)
        self->by->close(self->state);
    waits_close(&self->waits);
    destroy(self->ready, self->done, self->stream);
    free(self);
}

static enum status on_device_begin(struct exchange *exchange, float *gradients, size_t count, void *stream)
{
    struct on_device *self = static_cast<struct on_device *>(exchange->state);
    CUDA_TRY(cudaEventRecord(self->ready, static_cast<cudaStream_t>(stream)));
    CUDA_TRY(cudaStreamWaitEvent(self->stream, self->ready, 0));
    return self->by->enqueue(self->state, gradients, count, self->stream);
}

static enum status on_device_end(struct exchange *exchange, void *stream)
{
    struct on_device *self = static_cast<struct on_device *>(exchange->state);
    TRY(waits_begin(&self->waits, self->stream, static_cast<cudaStream_t>(stream)));
    CUDA_TRY(cudaEventRecord(self->done, self->stream));
    return waits_end(&self->waits, self->done, static_cast<cudaStream_t>(stream));
}

static enum status on_device_settle(struct exchange *exchange)
{
    struct on_device *self = static_cast<struct on_device *>(exchange->state);
    TRY(self->by->check(self->state));
    return waits_settle(&self->waits, &exchange->spent_s);
}

static enum status fused_probe(const struct engine *engine)
{
    TRY(on_device_probe(engine));
    if (engine->shares_update)
        return STATUS_OK;
    return status_set(
        STATUS_UNAVAILABLE,
        engine->scales_loss
            ? "this variant scales the loss, so it needs all sums before the update; use --sync "
              "peer"
            : "this variant updates the parameters in its own kernels; use --sync peer");
}

static enum status fused_begin(struct exchange *exchange, float *gradients, size_t count, void *stream)
{
    struct on_device *self = static_cast<struct on_device *>(exchange->state);
    const size_t first = (size_t)(gradients - exchange->update->gradients);
    CUDA_TRY(cudaEventRecord(self->ready, static_cast<cudaStream_t>(stream)));
    CUDA_TRY(cudaStreamWaitEvent(self->stream, self->ready, 0));
    return allreduce_peer_update(self->state, exchange->update, first, count, self->stream);
}

template <const struct allreduce_method *BY, enum allreduce_type TYPE = ALLREDUCE_F32>
static constexpr struct exchange_method on_device(const char *name, bool groups = false)
{
    return {.name = name,
            .rounds = TYPE == ALLREDUCE_F32_AS_BF16,
            .groups = groups,
            .probe = on_device_probe,
            .open = on_device_open<BY, TYPE>,
            .close = on_device_close,
            .begin = on_device_begin,
            .end = on_device_end,
            .settle = on_device_settle};
}

extern "C" {
const struct exchange_method exchange_peer = on_device<&allreduce_peer>("peer");
const struct exchange_method exchange_peer_bf16 =
    on_device<&allreduce_peer, ALLREDUCE_F32_AS_BF16>("peer-bf16");
const struct exchange_method exchange_peer_fused = {.name = "peer-fused",
                                                    .updates = true,
                                                    .probe = fused_probe,
                                                    .open = on_device_open<&allreduce_peer, ALLREDUCE_F32>,
                                                    .close = on_device_close,
                                                    .begin = fused_begin,
                                                    .end = on_device_end,
                                                    .settle = on_device_settle};
const struct exchange_method exchange_nccl = on_device<&allreduce_nccl>("nccl", true);
}

/* ---- mpi and mpi-cuda ---- */

struct piece {
    float *gradients, *host; /* device memory; pinned host memory, or NULL with mpi-cuda */
    size_t count;
    cudaEvent_t copied; /* recorded after the copy to the host; with mpi-cuda, when the gradients are final */
};

struct staged {
    float *host; /* room for all gradients; NULL with mpi-cuda */
    struct piece *pieces;
    struct exchange_pieces sums;
    size_t piece_max, piece_count; /* piece_count: pieces of the current step */
    size_t used;                   /* number of values in the pieces of the current step */
    cudaStream_t out, in;          /* copies to the host, and back */
    cudaEvent_t ready, done;
    struct waits waits;
};

static enum status staged_probe(const struct engine *engine)
{
    if (engine->gradients_in == GRADIENTS_IN_GRAPH)
        return status_set(STATUS_UNAVAILABLE,
                          "the host cannot add up gradients between kernels of a CUDA graph; use train-bf16");
    return on_device_probe(engine);
}

static enum status mpi_cuda_probe(const struct engine *engine)
{
    TRY(staged_probe(engine));
    return comm_cuda_probe();
}

static enum status open_staged(struct staged *self, int device, size_t count, bool copies)
{
    /* Each part of the gradients begins a new piece, so there may be one additional piece per layer. */
    self->piece_max = count / EXCHANGE_PIECE_VALUES + 1 + MODEL_LAYERS_MAX;
    self->pieces = static_cast<struct piece *>(calloc(self->piece_max, sizeof *self->pieces));
    TRY(ALLOCATED(self->pieces, "out of memory for the exchange"));
    CUDA_TRY(cudaSetDevice(device));
    if (copies)
        CUDA_TRY(cudaHostAlloc(&self->host, count * sizeof *self->host, cudaHostAllocDefault));
    TRY(stream_open(&self->out));
    TRY(stream_open(&self->in));
    for (cudaEvent_t *event : {&self->ready, &self->done})
        CUDA_TRY(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    for (size_t i = 0; i < self->piece_max; i++)
        CUDA_TRY(cudaEventCreateWithFlags(&self->pieces[i].copied, cudaEventDisableTiming));
    return waits_open(&self->waits);
}

template <bool COPIES> static enum status staged_open(struct exchange *exchange)
{
    struct staged *self = static_cast<struct staged *>(calloc(1, sizeof *self));
    exchange->state = self;
    if (self)
        self->sums.group = exchange->group;
    return comm_agree(self ? open_staged(self, exchange->device, exchange->count, COPIES)
                           : status_set(STATUS_EXHAUSTED, "out of memory"));
}

static void staged_close(struct exchange *exchange)
{
    struct staged *self = static_cast<struct staged *>(exchange->state);
    if (!self)
        return;
    /* Ignores errors: nothing can be done about them, and nothing depends on them. */
    for (cudaStream_t stream : {self->out, self->in})
        if (stream) {
            (void)cudaStreamSynchronize(stream);
            (void)cudaStreamDestroy(stream);
        }
    for (size_t i = 0; self->pieces && i < self->piece_max; i++)
        destroy(self->pieces[i].copied);
    exchange_pieces_free(&self->sums);
    destroy(self->ready, self->done);
    waits_close(&self->waits);
    (void)cudaFreeHost(self->host);
    free(self->pieces);
    free(self);
}

/* Enqueues the copy of a piece to the host, unless MPI reads it in device memory. */
static enum status take_piece(struct staged *self, float *gradients, size_t count)
{
    struct piece *piece = &self->pieces[self->piece_count++];
    piece->gradients = gradients;
    piece->host = self->host ? self->host + self->used : NULL;
    piece->count = count;
    self->used += count;
    if (piece->host)
        CUDA_TRY(cudaMemcpyAsync(piece->host, gradients, count * sizeof *gradients, cudaMemcpyDeviceToHost,
                                 self->out));
    return CUDA_STATUS(cudaEventRecord(piece->copied, self->out));
}

static enum status staged_begin(struct exchange *exchange, float *gradients, size_t count, void *stream)
{
    struct staged *self = static_cast<struct staged *>(exchange->state);
    CUDA_TRY(cudaEventRecord(self->ready, static_cast<cudaStream_t>(stream)));
    CUDA_TRY(cudaStreamWaitEvent(self->out, self->ready, 0));
    const size_t most = self->host ? EXCHANGE_PIECE_VALUES : count; /* MPI divides the others itself */
    for (size_t done = 0; done < count; done += most)
        TRY(take_piece(self, gradients + done, count - done < most ? count - done : most));
    return STATUS_OK;
}

/* Waits until a piece is in host memory, adds it up over all ranks, and enqueues the copy of the sums to the
 * device. With mpi-cuda, waits until it is final; MPI adds it up. */
static enum status add_up_piece(struct staged *self, struct piece *piece)
{
    const enum status copied = CUDA_STATUS(cudaEventSynchronize(piece->copied));
    if (!piece->host)
        return comm_cuda_sum(copied, piece->gradients, piece->count);
    TRY(exchange_piece_sum(&self->sums, (size_t)(piece - self->pieces), copied, piece->host, piece->count));
    return CUDA_STATUS(cudaMemcpyAsync(piece->gradients, piece->host, piece->count * sizeof *piece->host,
                                       cudaMemcpyHostToDevice, self->in));
}

static enum status staged_end(struct exchange *exchange, void *stream)
{
    struct staged *self = static_cast<struct staged *>(exchange->state);
    RANGE(EXCHANGE);
    TRY(waits_begin(&self->waits, self->out, static_cast<cudaStream_t>(stream)));
    for (size_t i = 0; i < self->piece_count; i++)
        TRY(add_up_piece(self, &self->pieces[i]));
    self->piece_count = self->used = 0;
    CUDA_TRY(cudaEventRecord(self->done, self->in));
    return waits_end(&self->waits, self->done, static_cast<cudaStream_t>(stream));
}

static enum status staged_settle(struct exchange *exchange)
{
    struct staged *self = static_cast<struct staged *>(exchange->state);
    return waits_settle(&self->waits, &exchange->spent_s);
}

template <bool COPIES>
static constexpr struct exchange_method over_mpi(const char *name,
                                                 enum status (*probe)(const struct engine *))
{
    return {.name = name,
            .named = !COPIES,
            .groups = COPIES,
            .probe = probe,
            .open = staged_open<COPIES>,
            .close = staged_close,
            .begin = staged_begin,
            .end = staged_end,
            .settle = staged_settle};
}

extern "C" {
const struct exchange_method exchange_staged = over_mpi<true>("mpi", staged_probe);
const struct exchange_method exchange_mpi_cuda = over_mpi<false>("mpi-cuda", mpi_cuda_probe);
}
