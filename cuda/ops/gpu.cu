/* Runs of the GPU variants. A run reads the rows once or twice. The first pass determines which rows are
 * kept; the second pass writes the output rows. If the index of an output row depends only on the rows before
 * it, and shared memory has room for output rows, the fused variant does both in one pass. */
#include "ops/write.cuh"

#include <new>

#include "common/cub.cuh"
#include "common/stream.cuh"
#include "core/timer.h"
#include "machine/device.h"

/* ---- Between the passes ---- */

/* Runs between the passes: drops duplicates, lists the kept rows, and computes the arguments of the second
 * pass. */
/* Copies struct run_words of the run to gpu->host_words, and waits for the copy. */
static enum status gpu_fetch_words(struct gpu_ops *gpu)
{
    CUDA_TRY(cudaMemcpyAsync(gpu->host_words, gpu->arrays.words, sizeof *gpu->host_words,
                             cudaMemcpyDeviceToHost, gpu->compute));
    CUDA_TRY(cudaStreamSynchronize(gpu->compute));
    return STATUS_OK;
}

/* Lists the rows with kept[i] = 1. Stores their number in words->kept. */
static cudaError_t list_rows(struct gpu_ops *gpu, void *scratch, size_t *scratch_bytes)
{
    return list_flagged(scratch, scratch_bytes, gpu->arrays.kept, gpu->arrays.rows, &gpu->arrays.words->kept,
                        static_cast<int64_t>(gpu->ops->count), gpu->compute);
}

/* Sorts `count` listed rows by their hashes. Rows with equal hashes stay in order. */
static cudaError_t sort_rows(struct gpu_ops *gpu, uint64_t count, void *scratch, size_t *scratch_bytes)
{
    return sort_pairs(scratch, scratch_bytes, gpu->sorted_hashes[0], gpu->sorted_hashes[1], gpu->arrays.rows,
                      gpu->sorted_rows, static_cast<int64_t>(count), 64, gpu->compute);
}

/* Computes the bytes of scratch memory for gpu_select(). */
static enum status gpu_select_plan(struct gpu_ops *gpu)
{
    size_t list_bytes = 0, sort_bytes = 0;
    bool dedup = gpu->ops->steps[OPS_DEDUP];
    gpu->scratch_bytes = 0;
    if (gpu->lists && (dedup || !gpu->steps->fused))
        CUDA_TRY(list_rows(gpu, NULL, &list_bytes));
    if (dedup)
        CUDA_TRY(sort_rows(gpu, gpu->ops->count, NULL, &sort_bytes));
    gpu->scratch_bytes = list_bytes > sort_bytes ? list_bytes : sort_bytes;
    return STATUS_OK;
}

static enum status list_kept(struct gpu_ops *gpu)
{
    size_t bytes = gpu->scratch_bytes;
    if (gpu->ops->count > 0)
        CUDA_TRY(list_rows(gpu, gpu->scratch, &bytes));
    TRY(gpu_fetch_words(gpu));
    return STATUS_OK;
}

static __global__ void __launch_bounds__(BLOCK_THREADS)
    list_hashes(const uint32_t *rows, const uint64_t *row_hashes, uint64_t count, uint64_t *hashes)
{
    for (uint64_t k = blockIdx.x * BLOCK_THREADS + threadIdx.x; k < count; k += gridDim.x * BLOCK_THREADS)
        hashes[k] = row_hashes[rows[k]];
}

/* Keeps only the first of consecutive rows with equal hashes. */
static __global__ void __launch_bounds__(BLOCK_THREADS)
    drop_equal(const uint64_t *hashes, const uint32_t *rows, uint64_t count, uint8_t *kept)
{
    for (uint64_t k = blockIdx.x * BLOCK_THREADS + threadIdx.x + 1; k < count; k += gridDim.x * BLOCK_THREADS)
        if (hashes[k] == hashes[k - 1])
            kept[rows[k]] = 0;
}

static enum status drop_duplicates(struct gpu_ops *gpu)
{
    size_t bytes = gpu->scratch_bytes;
    unsigned blocks;
    TRY(list_kept(gpu));
    uint64_t count = gpu->host_words->kept;
    if (count == 0)
        return STATUS_OK;
    TRY(grid_for(gpu, list_hashes, (count + WARP_LANES - 1) / WARP_LANES, &blocks));
    list_hashes<<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->arrays.rows, gpu->arrays.row_hashes, count,
                                                            gpu->sorted_hashes[0]);
    CUDA_TRY_LAUNCH("list_hashes");
    CUDA_TRY(sort_rows(gpu, count, gpu->scratch, &bytes));
    drop_equal<<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->sorted_hashes[1], gpu->sorted_rows, count,
                                                           gpu->arrays.kept);
    CUDA_TRY_LAUNCH("drop_equal");
    return gpu_step_done(gpu, OPS_DEDUP);
}

static __global__ void __launch_bounds__(BLOCK_THREADS)
    find_largest(const __grid_constant__ struct gpu_job job)
{
    uint32_t largest = 0;
    for (uint64_t j = blockIdx.x * BLOCK_THREADS + threadIdx.x; j < job.outputs;
         j += gridDim.x * BLOCK_THREADS)
        largest = max(largest, job.arrays.row_largest[source_of(job, j)]);
    largest = __reduce_max_sync(ALL_LANES, largest);
    if (threadIdx.x % WARP_LANES == 0)
        atomicMax(&job.arrays.words->largest, largest);
}

static enum status scale_tensor(struct gpu_ops *gpu)
{
    unsigned blocks;
    if (gpu->job.outputs == 0)
        return STATUS_OK;
    TRY(grid_for(gpu, find_largest, (gpu->job.outputs + WARP_LANES - 1) / WARP_LANES, &blocks));
    find_largest<<<blocks, BLOCK_THREADS, 0, gpu->compute>>>(gpu->job);
    CUDA_TRY_LAUNCH("find_largest");
    TRY(gpu_fetch_words(gpu));
    gpu->summary.tensor_scale = gpu->job.format.tensor_scale = nvfp4_tensor_scale(gpu->host_words->largest);
    return STATUS_OK;
}

/* Drops duplicates and lists the kept rows, unless the first pass has listed them. Computes the number of
 * output rows, the permutation and the scale of the tensor. */
static enum status gpu_select(struct gpu_ops *gpu)
{
    const struct ops *ops = gpu->ops;
    struct gpu_job *job = &gpu->job;
    uint64_t kept = ops->count;
    if (ops->steps[OPS_DEDUP])
        TRY(drop_duplicates(gpu));
    if (gpu->lists) {
        if (ops->steps[OPS_DEDUP] || !gpu->steps->fused)
            TRY(list_kept(gpu));
        else
            TRY(gpu_fetch_words(gpu));
        kept = gpu->host_words->kept;
        TRY(gpu_step_done(gpu, OPS_COMPACT));
    }
    job->candidates = kept;
    job->outputs = ops_outputs(ops, kept);
    if (job->permutes)
        job->draw = ops_draw(ops, gpu->summary.number, kept);
    return gpu->scaled ? scale_tensor(gpu) : STATUS_OK;
}

/* ---- Results ---- */

/* Memory for the results of a run and for intermediate results: one allocation, the arena. Every run
 * allocates a new arena: with --pool from a stream-ordered pool, otherwise with cudaMalloc(). */
#define ARRAY_ALIGNMENT 256

/* An array in the arena. */
struct part {
    void **pointer;
    uint64_t bytes;
};

#define PARTS_MAX 16

/* Lists the arrays. The first `*cleared` of them are cleared before a run. */
static size_t list_parts(struct gpu_ops *gpu, struct part parts[PARTS_MAX], size_t *cleared)
{
    const struct ops *ops = gpu->ops;
    struct gpu_arrays *arrays = &gpu->arrays;
    uint64_t count = ops->count, outputs = ops_outputs(ops, count);
    bool dedup = ops->steps[OPS_DEDUP], tiles = gpu->steps->fused && gpu->lists && !dedup;
    bool results =
        !gpu->target; /* all results are in the arena; a target has its own memory for its results */
    const struct part all[] = {
        {(void **)&arrays->words, sizeof *arrays->words},
        {(void **)&gpu->counts, tiles ? gpu_fused_tiles(gpu) : 0},
        {(void **)&arrays->kept, results || dedup ? count * ops_array_bytes(ops, OPS_KEPT) : 0},
        {(void **)&arrays->order, results ? outputs * ops_array_bytes(ops, OPS_ORDER) : 0},
        {(void **)&arrays->values, results ? outputs * ops_array_bytes(ops, OPS_VALUES) : 0},
        {(void **)&arrays->scales, results ? outputs * ops_array_bytes(ops, OPS_SCALES) : 0},
        {(void **)&arrays->hashes, results ? outputs * ops_array_bytes(ops, OPS_HASHES) : 0},
        {(void **)&arrays->rows, results && gpu->lists && !gpu->one_pass ? count * sizeof *arrays->rows : 0},
        {(void **)&arrays->row_hashes, dedup ? count * sizeof *arrays->row_hashes : 0},
        {(void **)&arrays->row_largest, gpu->scaled ? count * sizeof *arrays->row_largest : 0},
        {(void **)&gpu->sorted_hashes[0], dedup ? count * sizeof *gpu->sorted_hashes[0] : 0},
        {(void **)&gpu->sorted_hashes[1], dedup ? count * sizeof *gpu->sorted_hashes[1] : 0},
        {(void **)&gpu->sorted_rows, dedup ? count * sizeof *gpu->sorted_rows : 0},
        {(void **)&gpu->scratch, gpu->scratch_bytes},
    };
    for (size_t i = 0; i < COUNT_OF(all); i++)
        parts[i] = all[i];
    *cleared = 2;
    return COUNT_OF(all);
}

/* Sets the pointers to the arrays of an arena at `base`. Sets gpu->arena_bytes and gpu->cleared_bytes. */
static void place_parts(struct gpu_ops *gpu, uint8_t *base)
{
    struct part parts[PARTS_MAX];
    size_t cleared, count = list_parts(gpu, parts, &cleared);
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++) {
        *parts[i].pointer = parts[i].bytes && base ? base + at : NULL;
        at += (parts[i].bytes + ARRAY_ALIGNMENT - 1) / ARRAY_ALIGNMENT * ARRAY_ALIGNMENT;
        if (i < cleared)
            gpu->cleared_bytes = at;
    }
    gpu->arena_bytes = at;
    if (gpu->target) {
        gpu->arrays.values = gpu->target->values;
        gpu->arrays.rows = gpu->target->rows;
    }
}

/* Computes the size of the arena. */
static enum status gpu_results_plan(struct gpu_ops *gpu)
{
    TRY(gpu_select_plan(gpu));
    place_parts(gpu, NULL);
    gpu->summary.memory_bytes = gpu->arena_bytes + (gpu->ops->resident ? 0 : 2 * gpu_input_bytes(gpu));
    return STATUS_OK;
}

/* Returns STATUS_TOO_LARGE if input and results need more device memory than is free, or more than
 * --gpu-memory-limit allows. */
static enum status gpu_check_memory(const struct gpu_ops *gpu)
{
    const struct ops *ops = gpu->ops;
    size_t free_bytes, total_bytes;
    uint64_t input_bytes = gpu_input_bytes(gpu), bytes = input_bytes + gpu->arena_bytes;
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    bool limited = ops->memory_limit && ops->memory_limit < free_bytes;
    if (bytes <= (limited ? ops->memory_limit : free_bytes))
        return STATUS_OK;
    return status_set(STATUS_TOO_LARGE,
                      "%s (%.4g GB) and results (%.4g GB) need %.4g GB of GPU memory, but %s %.4g GB; %s",
                      ops->resident ? "the resident rows" : "the ring of chunks", 1e-9 * (double)input_bytes,
                      1e-9 * (double)gpu->arena_bytes, 1e-9 * (double)bytes,
                      limited ? "--gpu-memory-limit allows" : "the GPU's free memory is",
                      1e-9 * (double)(limited ? ops->memory_limit : free_bytes),
                      ops->resident ? "drop --resident, use fewer rows, --sample or a smaller --to"
                                    : "use --sample, a smaller --to, or a smaller --chunk or --ring");
}

enum status gpu_pool_open(struct gpu_ops *gpu)
{
    cudaMemPoolProps properties = {};
    uint64_t threshold = UINT64_MAX;
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = gpu->device;
    CUDA_TRY(cudaMemPoolCreate(&gpu->pool, &properties));
    CUDA_TRY(cudaMemPoolSetAttribute(gpu->pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    return STATUS_OK;
}

enum status gpu_arena_free(struct gpu_ops *gpu)
{
    uint8_t *arena = gpu->arena;
    gpu->arena = NULL;
    if (!arena)
        return STATUS_OK;
    if (gpu->pool)
        CUDA_TRY(cudaFreeAsync(arena, gpu->compute));
    else
        CUDA_TRY(cudaFree(arena));
    return STATUS_OK;
}

/* Allocates a new arena. If there is a first pass, clears the arena's words and counts. */
static enum status gpu_results_renew(struct gpu_ops *gpu)
{
    void *arena = NULL;
    TRY(gpu_arena_free(gpu));
    if (gpu->pool)
        CUDA_TRY(cudaMallocFromPoolAsync(&arena, gpu->arena_bytes, gpu->pool, gpu->compute));
    else
        CUDA_TRY(cudaMalloc(&arena, gpu->arena_bytes));
    gpu->arena = static_cast<uint8_t *>(arena);
    place_parts(gpu, gpu->arena);
    if (gpu->reads)
        CUDA_TRY(cudaMemsetAsync(arena, 0, gpu->cleared_bytes, gpu->compute));
    return STATUS_OK;
}

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

uint64_t gpu_value_bytes(const struct gpu_ops *gpu)
{
    return gpu->target ? gpu->target->value_bytes : ops_array_bytes(gpu->ops, OPS_VALUES);
}

enum status gpu_plan(struct gpu_ops *gpu)
{
    plan_passes(gpu);
    TRY(gpu_input_plan(gpu));
    return gpu_results_plan(gpu);
}

enum status gpu_device_open(struct gpu_ops *gpu)
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

void gpu_device_close(struct gpu_ops *gpu)
{
    if (gpu->compute)
        (void)cudaStreamSynchronize(gpu->compute);
    if (gpu->pool)
        (void)cudaMemPoolDestroy(gpu->pool);
    (void)cudaFreeHost(gpu->host_words);
    destroy(gpu->begin, gpu->end, gpu->compute, gpu->copies);
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
    TRY(gpu_device_open(gpu));
    TRY(gpu_plan(gpu));
    TRY(gpu_check_memory(gpu));
    if (ops->pool)
        TRY(gpu_pool_open(gpu));
    return gpu_input_open(gpu);
}

void gpu_ops_teardown(void *state)
{
    struct gpu_ops *gpu = static_cast<struct gpu_ops *>(state);
    (void)cudaSetDevice(gpu->device);
    gpu_input_close(gpu);
    (void)gpu_arena_free(gpu);
    gpu_device_close(gpu);
    (void)cudaFree(gpu->copy_target);
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
    job->row_stride = gpu->target && gpu->target->input ? gpu->target->stride : ops->row_bytes;
    job->unaligned = gpu->target && gpu->target->unaligned;
    job->value_bytes = gpu_value_bytes(gpu);
    job->pad_bytes = gpu->target ? (uint32_t)gpu->target->pad_bytes : 0;
    job->scale_bytes = ops_array_bytes(ops, OPS_SCALES);
    job->first = ops->first;
    job->count = ops->count;
    job->shift = ops_shift(ops, number);
    job->outputs = ops_outputs(ops, ops->count);
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

static enum status begin_run(struct gpu_ops *gpu, uint64_t number)
{
    TRY(gpu_results_renew(gpu));
    begin_job(gpu, number);
    return do_steps(gpu);
}

/* Waits for the end of the run, and completes the summary. */
static enum status end_run(struct gpu_ops *gpu)
{
    const bool *steps = gpu->ops->steps;
    if (steps[OPS_MASK] || steps[OPS_DEDUP]) {
        TRY(gpu_fetch_words(gpu));
        gpu->summary.kept = gpu->host_words->kept;
    }
    CUDA_TRY(cudaStreamSynchronize(gpu->compute));
    gpu->summary.outputs = ops_outputs(gpu->ops, gpu->summary.kept);
    return STATUS_OK;
}

enum status gpu_run_once(struct gpu_ops *gpu)
{
    TRY(begin_run(gpu, 0));
    return end_run(gpu);
}

enum status gpu_ops_run(void *state, uint64_t number, struct run_time *time)
{
    struct gpu_ops *gpu = static_cast<struct gpu_ops *>(state);
    float elapsed_ms;
    CUDA_TRY(cudaSetDevice(gpu->device));
    TRY(begin_timing(gpu));
    TRY(begin_run(gpu, number));
    CUDA_TRY(cudaEventRecord(gpu->end, gpu->compute));
    TRY(end_run(gpu));
    CUDA_TRY(cudaEventElapsedTime(&elapsed_ms, gpu->begin, gpu->end));
    time->device_s = gpu->resident ? 1e-3 * (double)elapsed_ms : -1;
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
