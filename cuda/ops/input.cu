/* Transfers rows to the device. Threads copy slices of rows into chunks of a ring in pinned memory. As soon
 * as a chunk is complete, one stream copies it to the ring's device memory. Kernels on another stream then
 * process it. */
#include <string.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

#include "common/stream.cuh"
#include "core/parallel.h"
#include "machine/host.h"
#include "ops/gpu.cuh"

#define SLICE_BYTES    ((uint64_t)1 << 20)
#define UPLOAD_BYTES   ((uint64_t)16 << 20) /* bytes per chunk when resident rows are uploaded */
#define UPLOAD_BUFFERS 4
#define PADDING        16 /* bulk copies read up to this many bytes after the last row */

/* A pass over all rows. */
struct stream {
    struct gpu_ops *gpu;
    gpu_chunk_function *pass;
    uint8_t *target; /* if not NULL, chunks are only copied to this array, not processed */
    uint64_t shift, chunks, slices, slice_rows, slices_per_chunk;
    std::mutex lock; /* protects everything below */
    std::condition_variable changed;
    uint64_t next, launched;            /* the next slice to copy; number of chunks launched */
    std::unique_ptr<uint64_t[]> copied; /* slices copied, per buffer */
    bool launching, failed;
    struct failure failure;
};

static uint64_t divide_up(uint64_t value, uint64_t by)
{
    return (value + by - 1) / by;
}

static uint64_t rows_of_chunk(const struct stream *stream, uint64_t chunk)
{
    uint64_t rows = stream->gpu->ring.chunk_rows, left = stream->gpu->ops->count - chunk * rows;
    return left < rows ? left : rows;
}

static void fail(struct stream *stream, enum status status)
{
    std::lock_guard<std::mutex> guard(stream->lock);
    if (!stream->failed)
        stream->failure = status_save(status);
    stream->failed = true;
    stream->changed.notify_all();
}

/* ---- Launching a chunk ---- */

static enum status wait_if_synchronous(const struct gpu_ops *gpu, cudaStream_t stream)
{
    if (!gpu->ops->async || gpu->ops->control->timed)
        CUDA_TRY(cudaStreamSynchronize(stream));
    return STATUS_OK;
}

static enum status launch_chunk(struct stream *stream, uint64_t number)
{
    struct gpu_ops *gpu = stream->gpu;
    struct chunk_ring *ring = &gpu->ring;
    uint64_t buffer = number % ring->buffers, first = number * ring->chunk_rows;
    uint64_t rows = rows_of_chunk(stream, number), bytes = rows * gpu->ops->row_bytes;
    uint8_t *device = stream->target ? stream->target + first * gpu->ops->row_bytes
                                     : ring->device + buffer * ring->chunk_bytes;
    struct chunk chunk = {device, first, rows, 0};
    CUDA_TRY(cudaStreamWaitEvent(gpu->copies, ring->computed[buffer]));
    CUDA_TRY(cudaMemcpyAsync(device, ring->host + buffer * ring->chunk_bytes, bytes, cudaMemcpyHostToDevice,
                             gpu->copies));
    CUDA_TRY(cudaEventRecord(ring->copied[buffer], gpu->copies));
    TRY(wait_if_synchronous(gpu, gpu->copies));
    if (stream->target)
        return STATUS_OK;
    CUDA_TRY(cudaStreamWaitEvent(gpu->compute, ring->copied[buffer]));
    gpu_step_begin(gpu);
    TRY(stream->pass(gpu, &chunk));
    CUDA_TRY(cudaEventRecord(ring->computed[buffer], gpu->compute));
    return wait_if_synchronous(gpu, gpu->compute);
}

/* Launches all complete chunks in order, unless another thread does. */
static void launch_complete(struct stream *stream, std::unique_lock<std::mutex> *guard)
{
    uint64_t buffers = stream->gpu->ring.buffers;
    while (!stream->launching && !stream->failed && stream->launched < stream->chunks) {
        uint64_t number = stream->launched, *copied = &stream->copied[number % buffers];
        if (*copied < divide_up(rows_of_chunk(stream, number), stream->slice_rows))
            return;
        *copied = 0;
        stream->launching = true;
        guard->unlock();
        enum status status = launch_chunk(stream, number);
        if (status != STATUS_OK)
            fail(stream, status);
        guard->lock();
        stream->launching = false;
        stream->launched++;
        stream->changed.notify_all();
    }
}

/* ---- Filling chunks ---- */

/* Copies rows [begin, begin + count) of the run to pinned memory. */
static enum status copy_rows(const struct stream *stream, uint64_t begin, uint64_t count, uint8_t *to)
{
    const struct ops *ops = stream->gpu->ops;
    const struct gpu_target *target = stream->gpu->target;
    if (target && target->copy)
        return target->copy(target->context, begin, count, to);
    while (count > 0) {
        uint64_t span;
        const uint8_t *rows = ops_span(ops, ops_position(ops, stream->shift, begin), &span);
        span = span < count ? span : count;
        memcpy(to, rows, span * ops->row_bytes);
        to += span * ops->row_bytes;
        begin += span;
        count -= span;
    }
    return STATUS_OK;
}

/* Waits until the buffer of a chunk can be written. Returns false after a failure. */
static bool reserve_buffer(struct stream *stream, uint64_t chunk)
{
    const struct chunk_ring *ring = &stream->gpu->ring;
    uint64_t buffers = stream->gpu->ops->async || stream->target ? ring->buffers : 1;
    std::unique_lock<std::mutex> guard(stream->lock);
    stream->changed.wait(guard, [&] { return stream->failed || stream->launched + buffers > chunk; });
    if (stream->failed)
        return false;
    guard.unlock();
    if (chunk < ring->buffers)
        return true;
    enum status status = cuda_status(cudaEventSynchronize(ring->copied[chunk % ring->buffers]),
                                     "waiting for a copy", __FILE__, __LINE__);
    if (status != STATUS_OK)
        fail(stream, status);
    return status == STATUS_OK;
}

/* Copies slices until none is left. */
static void fill(void *context, uint64_t task, int thread)
{
    struct stream *stream = static_cast<struct stream *>(context);
    const struct chunk_ring *ring = &stream->gpu->ring;
    size_t row_bytes = stream->gpu->ops->row_bytes;
    (void)task;
    (void)thread;
    struct relaxed_capture relaxed;
    (void)cudaSetDevice(stream->gpu->device); /* an error is ignored; the next CUDA call would report it */
    for (;;) {
        std::unique_lock<std::mutex> guard(stream->lock);
        if (stream->failed || stream->next == stream->slices)
            return;
        uint64_t slice = stream->next++;
        guard.unlock();
        uint64_t chunk = slice / stream->slices_per_chunk;
        uint64_t begin = slice % stream->slices_per_chunk * stream->slice_rows,
                 rows = rows_of_chunk(stream, chunk);
        if (begin >= rows)
            continue; /* the last chunk is shorter */
        if (!reserve_buffer(stream, chunk))
            return;
        uint64_t count = rows - begin < stream->slice_rows ? rows - begin : stream->slice_rows;
        enum status status =
            copy_rows(stream, chunk * ring->chunk_rows + begin, count,
                      ring->host + chunk % ring->buffers * ring->chunk_bytes + begin * row_bytes);
        if (status != STATUS_OK)
            return fail(stream, status);
        guard.lock();
        stream->copied[chunk % ring->buffers]++;
        launch_complete(stream, &guard);
    }
}

static enum status stream_rows(struct gpu_ops *gpu, gpu_chunk_function *pass, uint8_t *target, uint64_t shift)
{
    struct stream stream = {};
    uint64_t rows = SLICE_BYTES / gpu->ops->row_bytes;
    stream.gpu = gpu;
    stream.pass = pass;
    stream.target = target;
    stream.shift = shift;
    stream.slice_rows = rows < 1 ? 1 : rows;
    stream.chunks = divide_up(gpu->ops->count, gpu->ring.chunk_rows);
    stream.slices_per_chunk = divide_up(gpu->ring.chunk_rows, stream.slice_rows);
    stream.slices = stream.chunks * stream.slices_per_chunk;
    stream.copied.reset(new (std::nothrow) uint64_t[gpu->ring.buffers]());
    TRY(ALLOCATED(stream.copied, "out of memory"));
    (gpu->target ? gpu->target->parallel : parallel_for)(gpu->threads, (uint64_t)gpu->threads, fill, &stream);
    if (!target)
        gpu->summary.copied_bytes += gpu->ops->count * gpu->ops->row_bytes;
    if (stream.failed)
        return status_restore(&stream.failure);
    /* Waits for all copies, because the caller may then overwrite the buffers. */
    CUDA_TRY(cudaStreamSynchronize(gpu->copies));
    return ops_check_rows(gpu->ops);
}

/* ---- The ring ---- */

static enum status open_ring(struct gpu_ops *gpu, bool with_device)
{
    struct chunk_ring *ring = &gpu->ring;
    uint64_t bytes = ring->buffers * ring->chunk_bytes;
    TRY(memory_check(bytes, "the ring of chunks",
                     OPTION_OR_FIELD("lower --chunk or --ring", "free host memory")));
    ring->copied = new (std::nothrow) cudaEvent_t[ring->buffers]();
    ring->computed = new (std::nothrow) cudaEvent_t[ring->buffers]();
    TRY(ALLOCATED(ring->copied && ring->computed, "out of memory"));
    for (uint32_t i = 0; i < ring->buffers; i++) {
        CUDA_TRY(cudaEventCreateWithFlags(&ring->copied[i], cudaEventDisableTiming));
        CUDA_TRY(cudaEventCreateWithFlags(&ring->computed[i], cudaEventDisableTiming));
    }
    CUDA_TRY(cudaMallocHost(&ring->host, bytes));
    if (with_device)
        CUDA_TRY(cudaMalloc(&ring->device, bytes));
    return STATUS_OK;
}

static void close_ring(struct chunk_ring *ring)
{
    for (uint32_t i = 0; ring->copied && ring->computed && i < ring->buffers; i++)
        destroy(ring->copied[i], ring->computed[i]);
    delete[] ring->copied;
    delete[] ring->computed;
    ring->copied = ring->computed = NULL;
    (void)cudaFreeHost(ring->host);
    (void)cudaFree(ring->device);
    ring->host = ring->device = NULL;
}

static void plan_ring(struct gpu_ops *gpu, uint64_t chunk_bytes, uint32_t buffers)
{
    uint64_t row_bytes = gpu->ops->row_bytes, rows = chunk_bytes / row_bytes;
    uint64_t count = gpu->ops->count;
    rows = rows < count ? rows : count;
    gpu->ring.chunk_rows = rows < 1 ? 1 : rows;
    gpu->ring.chunk_bytes = divide_up(gpu->ring.chunk_rows * row_bytes, 256) * 256 + PADDING * 16;
    gpu->ring.buffers = buffers;
}

enum status gpu_input_plan(struct gpu_ops *gpu)
{
    const struct ops *ops = gpu->ops;
    plan_ring(gpu, ops->resident ? UPLOAD_BYTES : ops->chunk_bytes,
              ops->resident ? UPLOAD_BUFFERS : ops->ring);
    gpu->chunks = ops->resident ? 2 : divide_up(ops->count, gpu->ring.chunk_rows);
    return STATUS_OK;
}

uint64_t gpu_input_bytes(const struct gpu_ops *gpu)
{
    return gpu->ops->resident ? gpu->ops->count * gpu->ops->row_bytes + PADDING
                              : gpu->ring.buffers * gpu->ring.chunk_bytes;
}

enum status gpu_input_open(struct gpu_ops *gpu)
{
    if (!gpu->ops->resident)
        return open_ring(gpu, true);
    if (gpu->target) { /* the caller's rows */
        gpu->resident = const_cast<uint8_t *>(gpu->target->input);
        return STATUS_OK;
    }
    CUDA_TRY(cudaMalloc(&gpu->resident, gpu_input_bytes(gpu)));
    TRY(open_ring(gpu, false));
    TRY(stream_rows(gpu, NULL, gpu->resident, 0));
    close_ring(&gpu->ring);
    return STATUS_OK;
}

void gpu_input_close(struct gpu_ops *gpu)
{
    if (gpu->copies)
        (void)cudaStreamSynchronize(gpu->copies);
    if (gpu->compute)
        (void)cudaStreamSynchronize(gpu->compute);
    close_ring(&gpu->ring);
    if (!gpu->target)
        (void)cudaFree(gpu->resident);
    gpu->resident = NULL;
}

/* Passes resident rows as two chunks, or as one if the second is empty. The first chunk has the rows from the
 * run's first row to the end of the set. The second chunk has the rows before the run's first row. */
enum status gpu_input_pass(struct gpu_ops *gpu, gpu_chunk_function *pass)
{
    uint64_t count = gpu->ops->count, shift = gpu->job.shift;
    if (!gpu->resident)
        return stream_rows(gpu, pass, NULL, shift);
    const struct chunk parts[2] = {{gpu->resident + shift * gpu->ops->row_bytes, 0, count - shift, 0},
                                   {gpu->resident, count - shift, shift, 0}};
    for (int i = 0; i < 2; i++)
        if (parts[i].count > 0)
            TRY(pass(gpu, &parts[i]));
    return STATUS_OK;
}

#define COPY_BYTES ((uint64_t)1 << 30)
#define COPIES_MAX 256

enum status gpu_input_copy_rate(struct gpu_ops *gpu, double *bytes_per_s)
{
    const struct chunk_ring *ring = &gpu->ring;
    uint64_t copies = COPY_BYTES / ring->chunk_bytes;
    copies = copies < 1 ? 1 : copies < COPIES_MAX ? copies : COPIES_MAX;
    float elapsed_ms;
    CUDA_TRY(cudaEventRecord(gpu->begin, gpu->copies));
    for (uint64_t i = 0; i < copies; i++) {
        uint64_t at = i % ring->buffers * ring->chunk_bytes;
        CUDA_TRY(cudaMemcpyAsync(ring->device + at, ring->host + at, ring->chunk_bytes,
                                 cudaMemcpyHostToDevice, gpu->copies));
    }
    CUDA_TRY(cudaEventRecord(gpu->end, gpu->copies));
    CUDA_TRY(cudaEventSynchronize(gpu->end));
    CUDA_TRY(cudaEventElapsedTime(&elapsed_ms, gpu->begin, gpu->end));
    *bytes_per_s = 1e3 * (double)(copies * ring->chunk_bytes) / (double)elapsed_ms;
    return STATUS_OK;
}
