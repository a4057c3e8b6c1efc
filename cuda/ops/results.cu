/* Memory for the results of a run and for intermediate results: one allocation, the arena. Every run
 * allocates a new arena: with --pool from a stream-ordered pool, otherwise with cudaMalloc(). */
#include "ops/gpu.cuh"

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
    const struct part all[] = {
        {(void **)&arrays->words, sizeof *arrays->words},
        {(void **)&gpu->counts, tiles ? gpu_fused_tiles(gpu) : 0},
        {(void **)&arrays->kept, count * ops_array_bytes(ops, OPS_KEPT)},
        {(void **)&arrays->order, outputs * ops_array_bytes(ops, OPS_ORDER)},
        {(void **)&arrays->values, outputs * ops_array_bytes(ops, OPS_VALUES)},
        {(void **)&arrays->scales, outputs * ops_array_bytes(ops, OPS_SCALES)},
        {(void **)&arrays->hashes, outputs * ops_array_bytes(ops, OPS_HASHES)},
        {(void **)&arrays->rows, gpu->lists && !gpu->one_pass ? count * sizeof *arrays->rows : 0},
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
}

enum status gpu_results_plan(struct gpu_ops *gpu)
{
    TRY(gpu_select_plan(gpu));
    place_parts(gpu, NULL);
    gpu->summary.memory_bytes = gpu->arena_bytes + (gpu->ops->resident ? 0 : 2 * gpu_input_bytes(gpu));
    return STATUS_OK;
}

enum status gpu_check_memory(const struct gpu_ops *gpu)
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

/* Creates a private memory pool, which keeps freed memory for the next run. */
enum status gpu_results_open(struct gpu_ops *gpu)
{
    cudaMemPoolProps properties = {};
    uint64_t threshold = UINT64_MAX;
    if (!gpu->ops->pool)
        return STATUS_OK;
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = gpu->device;
    CUDA_TRY(cudaMemPoolCreate(&gpu->pool, &properties));
    CUDA_TRY(cudaMemPoolSetAttribute(gpu->pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    return STATUS_OK;
}

static enum status free_arena(struct gpu_ops *gpu)
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

void gpu_results_close(struct gpu_ops *gpu)
{
    (void)free_arena(gpu);
    if (gpu->compute)
        (void)cudaStreamSynchronize(gpu->compute);
    if (gpu->pool)
        (void)cudaMemPoolDestroy(gpu->pool);
}

enum status gpu_results_renew(struct gpu_ops *gpu)
{
    void *arena = NULL;
    TRY(free_arena(gpu));
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
