/* The plan of `fused` for iterated function systems: the bank of an input, or the bitmaps of fractals in
 * space, and the kernel that makes images from them (fused_ifs.cuh). */
#include <stdlib.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "synth/fused_ifs_images.cuh"

/* The canvas rows of a tile, and the shared memory of a block, unless a single output row needs more.
 * Resizing takes more registers, so there are fewer blocks per multiprocessor, which can have larger tiles.
 */
#define TILE_ROWS(resized)  ((resized) ? 48u : 32u)
#define TILE_BYTES(resized) ((resized) ? (size_t)44 << 10 : (size_t)28 << 10)

typedef void ifs_image_function(const struct ifs_job job);

struct ifs_plan {
    const struct synth *synth;
    int device;
    struct ifs_device_bank *bank; /* NULL: fractals in space */
    struct ifs_solids *solids;    /* NULL: fractals of the plane */
    struct ifs_job job;           /* the call is unset */
    uint2 *spans;
    uint32_t tiles;
    size_t shared_bytes;
    ifs_image_function *kernel;
};

struct ifs_device_bank *ifs_plan_bank(const struct ifs_plan *plan)
{
    return plan->bank;
}

uint64_t ifs_plan_bytes(const struct ifs_plan *plan)
{
    return (plan->solids ? ifs_solids_bytes(plan->solids) : ifs_device_facts(plan->bank).bytes) +
           (plan->spans ? plan->synth->output.res * sizeof *plan->spans : 0);
}

static enum ifs_finish finish_of(const struct synth *synth)
{
    const struct synth_output *output = &synth->output;
    if (output->fit == OUTPUT_RESIZE)
        return output_area(output->fit, synth->res) <= UINT32_MAX / 255 ? IFS_MEANS : IFS_LARGE;
    return output->type == DTYPE_U8 && output->channels == 1 ? IFS_BYTES : IFS_VALUES;
}

template <bool Points, uint32_t Gray> static ifs_image_function *kernel_of(enum ifs_finish finish)
{
    return finish == IFS_BYTES    ? ifs_image_kernel<Points, IFS_BYTES, Gray>
           : finish == IFS_VALUES ? ifs_image_kernel<Points, IFS_VALUES, Gray>
           : finish == IFS_MEANS  ? ifs_image_kernel<Points, IFS_MEANS, Gray>
                                  : ifs_image_kernel<Points, IFS_LARGE, Gray>;
}

/* Returns whether the images show points, so that no random bits are needed. */
static bool shows_points(const struct synth *synth)
{
    return synth->points || synth_is_ifs3d(synth);
}

/* Returns the bytes of the random halves for `rows` canvas rows (fill_halves()). */
static size_t half_bytes(const struct synth *synth, uint32_t rows)
{
    return shows_points(synth) ? 0 : (((size_t)rows + 2) * synth->res / 8 + 5) * sizeof(uint4);
}

/* Returns the shared memory of a block for bands of `band` rows and, if `sums` is not 0, this many sums. */
static size_t tile_bytes(const struct ifs_plan *plan, uint32_t band, size_t sums)
{
    return half_bytes(plan->synth, band) + (size_t)band * plan->job.words * sizeof(uint32_t) +
           sums * sizeof(uint64_t);
}

/* Returns how many canvas rows `rows` output rows take at most. */
static uint32_t canvas_rows(const struct synth *synth, uint32_t rows)
{
    if (synth->output.fit != OUTPUT_RESIZE)
        return rows;
    const uint64_t most = (uint64_t)rows * synth->res / synth->output.res + 2;
    return (uint32_t)(most < synth->res ? most : synth->res);
}

/* Chooses tiles with as many rows as fit in TILE_BYTES and TILE_ROWS, all of about the same size. A tile has
 * several bands if a single output row takes more canvas rows than fit. */
static enum status choose_tiles(struct ifs_plan *plan)
{
    const struct synth *synth = plan->synth;
    struct ifs_job *job = &plan->job;
    const uint32_t out_res = synth->output.res;
    const bool resized = synth->output.fit == OUTPUT_RESIZE;
    int most;
    CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, plan->device));
    const size_t limit = (size_t)most - 1024; /* of what the kernel declares itself */
    auto fits = [&](uint32_t rows) {
        const uint32_t canvas = canvas_rows(synth, rows);
        return canvas <= TILE_ROWS(resized) && tile_bytes(plan, canvas, 0) <= TILE_BYTES(resized);
    };
    job->words = (synth->res + 31) / 32 + 1;
    job->words += job->words % 2; /* the sums are aligned */
    job->rows = 1;
    while (job->rows < out_res && fits(job->rows + 1))
        job->rows++;
    plan->tiles = (out_res + job->rows - 1) / job->rows;
    job->rows = (out_res + plan->tiles - 1) / plan->tiles;
    job->band = canvas_rows(synth, job->rows);
    size_t sums = 0;
    if (tile_bytes(plan, job->band, 0) > limit) {
        sums = resized ? (size_t)job->rows * ((out_res + 3) / 4 * 4) : 0;
        while (job->band > 1 && tile_bytes(plan, job->band, sums) > limit)
            job->band--;
    }
    job->halves = (uint32_t)half_bytes(synth, job->band);
    plan->shared_bytes = tile_bytes(plan, job->band, sums);
    if (plan->shared_bytes > limit)
        return status_set(
            STATUS_TOO_LARGE,
            "fused needs %zu bytes of shared memory for a canvas of %u pixels, but the device has "
            "%zu per block; lower %s",
            plan->shared_bytes, synth->res, limit, OPTION_OR_FIELD("--res", "res"));
    return STATUS_OK;
}

static enum status copy_spans(struct ifs_plan *plan)
{
    const struct synth *synth = plan->synth;
    const uint32_t out_res = synth->output.res;
    uint2 *spans = static_cast<uint2 *>(malloc(out_res * sizeof *spans));
    TRY(ALLOCATED(spans, "out of memory"));
    for (uint32_t j = 0; j < out_res; j++)
        spans[j] = ifs_pack_span(output_span(j, synth->res, out_res));
    cudaError_t error = cudaMalloc(&plan->spans, out_res * sizeof *spans);
    if (error == cudaSuccess)
        error = cudaMemcpy(plan->spans, spans, out_res * sizeof *spans, cudaMemcpyHostToDevice);
    free(spans);
    plan->job.spans = plan->spans;
    return cuda_status(error, "copying the spans of output pixels", __FILE__, __LINE__);
}

static enum status open_plan(struct ifs_plan *plan)
{
    const struct synth *synth = plan->synth;
    const enum ifs_finish finish = finish_of(synth);
    struct ifs_job *job = &plan->job;
    CUDA_TRY(cudaSetDevice(plan->device));
    if (synth_is_ifs3d(synth))
        TRY(ifs_solids_open(plan->device, synth, &plan->solids));
    else
        TRY(ifs_device_open(plan->device, synth, &plan->bank));
    job->rules = synth->ifs;
    job->lines = synth->rules;
    job->res = synth->res;
    job->turns = synth->turns;
    job->seed = synth->seed;
    job->first = synth->first;
    job->stride = synth->stride;
    job->output = synth->output;
    if (plan->solids) {
        job->solids = ifs_solids_systems(plan->solids);
        job->bitmaps = ifs_solids_bitmaps(plan->solids);
    } else {
        job->systems = ifs_device_systems(plan->bank);
        job->maps = ifs_device_maps(plan->bank);
    }
    plan->kernel = plan->solids    ? kernel_of<true, IFS3D_GRAY>(finish)
                   : synth->points ? kernel_of<true, IFS_GRAY>(finish)
                                   : kernel_of<false, IFS_GRAY>(finish);
    TRY(choose_tiles(plan));
    if (synth->output.fit == OUTPUT_RESIZE)
        TRY(copy_spans(plan));
    /* This loads the kernel, which CUDA must not do during a capture. */
    return allow_shared(plan->kernel, plan->shared_bytes);
}

enum status ifs_plan_open(int device, const struct synth *synth, struct ifs_plan **plan)
{
    struct ifs_plan *self = static_cast<struct ifs_plan *>(calloc(1, sizeof *self));
    TRY(ALLOCATED(self, "out of memory"));
    self->synth = synth;
    self->device = device;
    enum status status = open_plan(self);
    if (status != STATUS_OK)
        ifs_plan_close(self);
    else
        *plan = self;
    return status;
}

void ifs_plan_close(struct ifs_plan *plan)
{
    if (!plan)
        return;
    (void)cudaFree(plan->spans); /* errors are ignored, because no result depends on them */
    ifs_device_close(plan->bank);
    ifs_solids_close(plan->solids);
    free(plan);
}

enum status ifs_plan_enqueue(const struct ifs_plan *plan, const struct fused_call *call,
                             const struct fused_call *stored, uint64_t count, cudaStream_t stream)
{
    if (plan->solids)
        TRY(ifs_solids_enqueue(plan->solids, call, stored, count, stream));
    RANGE(PAINTING);
    struct ifs_job job = plan->job;
    if (call)
        job.call = *call;
    job.stored = stored;
    const dim3 tiles((unsigned)count, plan->tiles);
    plan->kernel<<<tiles, IMAGE_BLOCK, plan->shared_bytes, stream>>>(job);
    return CUDA_LAUNCHED("ifs_image_kernel");
}
