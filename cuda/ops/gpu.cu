/* Runs of the GPU variants. A run reads the rows once or twice. The first pass determines which rows are
 * kept; the second pass writes the output rows. If the index of an output row depends only on the rows before
 * it, and shared memory has room for output rows, the fused variant does both in one pass. */
#include "ops/gpu.cuh"

#include <new>

#include "common/stream.cuh"
#include "core/timer.h"
#include "machine/device.h"

/* ---- Setup ---- */

static void plan_passes(struct gpu_ops *gpu)
{
    const struct ops *ops = gpu->ops;
    const bool *steps = ops->steps;
    gpu->lists = steps[OPS_COMPACT] && (steps[OPS_MASK] || steps[OPS_DEDUP]);
    gpu->scaled = ops_array_bytes(ops, OPS_VALUES) && ops->format.to == OPS_NVFP4;
    gpu->one_pass = gpu->steps->fused && !steps[OPS_DEDUP] && !steps[OPS_PERMUTE] && !gpu->scaled;
    gpu->one_pass = gpu->one_pass && gpu_fused_fits(gpu);
    gpu->reads = gpu->one_pass || steps[OPS_MASK] || steps[OPS_DEDUP] || gpu->scaled;
}

static enum status open_device(struct gpu_ops *gpu)
{
    int architecture;
    bool at_load;
    TRY(device_code(gpu->device, &architecture, &at_load));
    gpu->bulk = architecture >= 90;
    CUDA_TRY(cudaDeviceGetAttribute(&gpu->multiprocessors, cudaDevAttrMultiProcessorCount, gpu->device));
    CUDA_TRY(
        cudaDeviceGetAttribute(&gpu->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu->device));
    CUDA_TRY(cudaStreamCreateWithFlags(&gpu->compute, cudaStreamNonBlocking));
    CUDA_TRY(cudaStreamCreateWithFlags(&gpu->copies, cudaStreamNonBlocking));
    CUDA_TRY(cudaEventCreate(&gpu->begin));
    CUDA_TRY(cudaEventCreate(&gpu->end));
    CUDA_TRY(cudaMallocHost(&gpu->host_words, sizeof *gpu->host_words));
    return STATUS_OK;
}

enum status gpu_ops_open(const struct resources *resources, const void *input, const struct gpu_steps *steps,
                         void **state)
{
    const struct ops *ops = static_cast<const struct ops *>(input);
    struct gpu_ops *gpu = new (std::nothrow) struct gpu_ops();
    *state = gpu;
    TRY(ALLOCATED(gpu, "out of memory"));
    gpu->ops = ops;
    gpu->steps = steps;
    gpu->device = resources->device;
    gpu->threads = resources->threads;
    gpu->summary.number = UINT64_MAX;
    if (ops->count > ROWS_MAX)
        return status_set(STATUS_USAGE,
                          "this rank has %llu rows, but GPU variants support at most %llu per rank; use more "
                          "ranks or a smaller set",
                          (unsigned long long)ops->count, (unsigned long long)ROWS_MAX);
    CUDA_TRY(cudaSetDevice(gpu->device));
    TRY(open_device(gpu));
    plan_passes(gpu);
    TRY(gpu_input_plan(gpu));
    TRY(gpu_results_plan(gpu));
    TRY(gpu_check_memory(gpu));
    TRY(gpu_results_open(gpu));
    return gpu_input_open(gpu);
}

void gpu_ops_teardown(void *state)
{
    struct gpu_ops *gpu = static_cast<struct gpu_ops *>(state);
    (void)cudaSetDevice(gpu->device);
    gpu_input_close(gpu);
    gpu_results_close(gpu);
    (void)cudaFreeHost(gpu->host_words);
    (void)cudaFree(gpu->copy_target);
    destroy(gpu->begin, gpu->end, gpu->compute, gpu->copies);
    delete gpu;
}

/* ---- A run ---- */

#define HOLD_NS 50000 /* longer than the host takes to enqueue a run of one kernel */

static __global__ void hold()
{
    uint64_t begin_ns, now_ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin_ns));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns));
    while (now_ns - begin_ns < HOLD_NS);
}

/* Records the event at which device time begins. Work on resident rows may take only microseconds, less than
 * the host takes to enqueue it. The kernel hold() therefore delays the event until this work has been
 * enqueued. */
static enum status begin_timing(struct gpu_ops *gpu)
{
    if (gpu->resident) {
        hold<<<1, 1, 0, gpu->compute>>>();
        CUDA_TRY_LAUNCH("hold");
    }
    CUDA_TRY(cudaEventRecord(gpu->begin, gpu->compute));
    return STATUS_OK;
}

static void begin_job(struct gpu_ops *gpu, uint64_t number)
{
    const struct ops *ops = gpu->ops;
    struct gpu_job *job = &gpu->job;
    *job = {};
    job->format = ops->format;
    job->norm_min = ops->norm_min;
    job->norm_max = ops->norm_max;
    job->masks = ops->steps[OPS_MASK];
    job->permutes = ops->steps[OPS_PERMUTE];
    job->row_bytes = (uint32_t)ops->row_bytes;
    job->value_bytes = ops_array_bytes(ops, OPS_VALUES);
    job->scale_bytes = ops_array_bytes(ops, OPS_SCALES);
    job->first = ops->first;
    job->count = ops->count;
    job->shift = ops_shift(ops, number);
    job->arrays = gpu->arrays;
    gpu->summary.number = number;
    gpu->summary.kept = ops->count;
    gpu->summary.tensor_scale = 0;
    gpu->summary.copied_bytes = 0;
    gpu->tiles = 0;
    for (int step = 0; step < OPS_STEPS; step++)
        gpu->summary.step_s[step] = gpu->steps->fused ? -1 : 0;
    gpu_step_begin(gpu);
}

void gpu_step_begin(struct gpu_ops *gpu)
{
    if (gpu->ops->control->timed)
        gpu->step_begin_s = timer_now_s();
}

enum status gpu_step_done(struct gpu_ops *gpu, enum ops_step step)
{
    if (!gpu->ops->control->timed)
        return STATUS_OK;
    CUDA_TRY(cudaStreamSynchronize(gpu->compute));
    gpu->summary.step_s[step] += timer_now_s() - gpu->step_begin_s;
    gpu->step_begin_s = timer_now_s();
    return STATUS_OK;
}

enum status gpu_fetch_words(struct gpu_ops *gpu)
{
    CUDA_TRY(cudaMemcpyAsync(gpu->host_words, gpu->arrays.words, sizeof *gpu->host_words,
                             cudaMemcpyDeviceToHost, gpu->compute));
    CUDA_TRY(cudaStreamSynchronize(gpu->compute));
    return STATUS_OK;
}

static enum status second_pass(struct gpu_ops *gpu)
{
    const struct gpu_arrays *arrays = &gpu->arrays;
    struct chunk all = {gpu->resident, 0, gpu->ops->count, gpu->job.shift};
    if (gpu->job.outputs == 0)
        return STATUS_OK;
    if (!arrays->values && !arrays->hashes)
        return arrays->order ? gpu_write_order(gpu) : STATUS_OK;
    return gpu->resident ? gpu->steps->write(gpu, &all) : gpu_input_pass(gpu, gpu->steps->write);
}

static enum status do_steps(struct gpu_ops *gpu)
{
    if (gpu->reads)
        TRY(gpu_input_pass(gpu, gpu->steps->read));
    if (gpu->one_pass)
        return STATUS_OK;
    TRY(gpu_select(gpu));
    return second_pass(gpu);
}

enum status gpu_ops_run(void *state, uint64_t number, struct run_time *time)
{
    struct gpu_ops *gpu = static_cast<struct gpu_ops *>(state);
    const bool *steps = gpu->ops->steps;
    float elapsed_ms;
    CUDA_TRY(cudaSetDevice(gpu->device));
    TRY(begin_timing(gpu));
    TRY(gpu_results_renew(gpu));
    begin_job(gpu, number);
    TRY(do_steps(gpu));
    CUDA_TRY(cudaEventRecord(gpu->end, gpu->compute));
    if (steps[OPS_MASK] || steps[OPS_DEDUP]) {
        TRY(gpu_fetch_words(gpu));
        gpu->summary.kept = gpu->host_words->kept;
    }
    CUDA_TRY(cudaStreamSynchronize(gpu->compute));
    CUDA_TRY(cudaEventElapsedTime(&elapsed_ms, gpu->begin, gpu->end));
    time->device_s = gpu->resident ? 1e-3 * (double)elapsed_ms : -1;
    gpu->summary.outputs = ops_outputs(gpu->ops, gpu->summary.kept);
    return STATUS_OK;
}

enum status gpu_ops_fetch(void *state, void *result)
{
    const struct gpu_ops *gpu = static_cast<const struct gpu_ops *>(state);
    const struct gpu_arrays *arrays = &gpu->arrays;
    const void *const from[OPS_ARRAYS] = {arrays->kept, arrays->order, arrays->values, arrays->scales,
                                          arrays->hashes};
    struct ops_fetch *fetch = static_cast<struct ops_fetch *>(result);
    size_t bytes = ops_array_bytes(gpu->ops, fetch->array);
    fetch->summary = gpu->summary;
    CUDA_TRY(cudaSetDevice(gpu->device));
    if (fetch->to && bytes && fetch->count)
        CUDA_TRY(cudaMemcpy(fetch->to,
                            static_cast<const uint8_t *>(from[fetch->array]) + fetch->first * bytes,
                            fetch->count * bytes, cudaMemcpyDeviceToHost));
    return STATUS_OK;
}

/* ---- The reference bandwidth ---- */

#define COPY_MAX_BYTES ((uint64_t)1 << 30)

/* Measures the rate of a copy within the device, which counts bytes read plus bytes written. Copies as many
 * rows as the run has output rows, but at most about COPY_MAX_BYTES. If the set is large enough, consecutive
 * calls copy different rows, because rows that were just copied would be in the cache. */
static enum status copy_resident(struct gpu_ops *gpu, double *bytes_per_s)
{
    const struct ops *ops = gpu->ops;
    uint64_t rows = ops_outputs(ops, ops->count), limit = COPY_MAX_BYTES / ops->row_bytes;
    rows = rows < limit ? rows : limit + 1 < ops->count ? limit + 1 : ops->count;
    uint64_t bytes = rows * ops->row_bytes, places = ops->count / rows;
    const uint8_t *from = gpu->resident + gpu->copies_measured++ % places * bytes;
    float elapsed_ms;
    if (!gpu->copy_target) {
        CUDA_TRY(cudaMalloc(&gpu->copy_target, bytes));
        CUDA_TRY(cudaMemsetAsync(gpu->copy_target, 0, bytes, gpu->compute));
    }
    CUDA_TRY(cudaStreamSynchronize(gpu->compute));
    TRY(begin_timing(gpu));
    CUDA_TRY(cudaMemcpyAsync(gpu->copy_target, from, bytes, cudaMemcpyDeviceToDevice, gpu->compute));
    CUDA_TRY(cudaEventRecord(gpu->end, gpu->compute));
    CUDA_TRY(cudaStreamSynchronize(gpu->compute));
    CUDA_TRY(cudaEventElapsedTime(&elapsed_ms, gpu->begin, gpu->end));
    *bytes_per_s = 2e3 * (double)bytes / (double)elapsed_ms;
    return STATUS_OK;
}

static enum status gpu_stream(void *state, double *bytes_per_s)
{
    struct gpu_ops *gpu = static_cast<struct gpu_ops *>(state);
    CUDA_TRY(cudaSetDevice(gpu->device));
    *bytes_per_s = 0;
    if (gpu->ops->count == 0)
        return STATUS_OK;
    return gpu->resident ? copy_resident(gpu, bytes_per_s) : gpu_input_copy_rate(gpu, bytes_per_s);
}

const struct ops_traits gpu_ops_traits = {.stream = gpu_stream, .device = true};
