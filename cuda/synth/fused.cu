/* The plan of `fused`: selects kernels, allocates memory, and launches the kernels. docs/synth.md
 * explains the algorithm, docs/notes/synth.md has measurements. */
#include <math.h>
#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "synth/lines.h"
#include "synth/fused.cuh"
#include "synth/fused_ifs.cuh"
#include "synth/fused_paint.cuh"
#include "synth/fused_vertices.cuh"

/* ---- Order of images ---- */

#define SLICE_MAX   1024 /* maximum number of images per slice */
#define ORDER_BLOCK 128

/* Orders the images of the slice (at most SLICE_MAX) by decreasing work, so that no image with much work
 * starts last. The rank of an image is the number of images before it. Each block ranks ORDER_BLOCK images.
 */
static __global__ void __launch_bounds__(ORDER_BLOCK)
    fused_order_kernel(const __grid_constant__ fused_job job)
{
    /* Padded to a whole number of vectors with images without work. */
    __shared__ float4 work[SLICE_MAX / 4];
    const uint32_t i = blockIdx.x * ORDER_BLOCK + threadIdx.x, vectors = (job.count + 3) / 4;
    float *each = reinterpret_cast<float *>(work);
    for (uint32_t k = threadIdx.x; k < 4 * vectors; k += ORDER_BLOCK)
        each[k] = k < job.count ? fused_work(job, k) : -1;
    __syncthreads();
    if (i >= job.count)
        return;
    const float mine = each[i];
    uint32_t before = 0;
    auto count = [&](float other, uint32_t k) { before += fused_before(other, k, mine, i); };
    for (uint32_t k = 0; k < vectors; k++) {
        const float4 others = work[k];
        count(others.x, 4 * k);
        count(others.y, 4 * k + 1);
        count(others.z, 4 * k + 2);
        count(others.w, 4 * k + 3);
    }
    job.order[before] = i;
}

/* ---- The third kernel ---- */

/* Third kernel of `fused`: resizes whole canvases. It runs only if one output pixel covers more canvas pixels
 * than fit in a tile. */
#define REDUCE_BLOCK 256

/* One thread per pixel of `output`. The canvases have one gray byte per pixel, and the masks one class
 * number. */
static __global__ void __launch_bounds__(REDUCE_BLOCK)
    fused_reduce_kernel(const __grid_constant__ fused_job job, const struct synth_output output)
{
    uint64_t i = (uint64_t)blockIdx.x * REDUCE_BLOCK + threadIdx.x;
    uint32_t res = job.input.res, pixels = output.res * output.res;
    if (i >= (uint64_t)job.count * pixels)
        return;
    uint32_t image = (uint32_t)(i / pixels), y = (uint32_t)(i % pixels) / output.res,
             x = (uint32_t)(i % pixels) % output.res;
    const uint8_t *canvas = job.canvases + (size_t)image * res * res;
    size_t bytes = (size_t)pixels * output.channels * dtype_bytes(output.type);
    auto row_at = [&](uint32_t row) {
        const uint8_t *first = canvas + (size_t)row * res;
        return [first](uint32_t column) { return (uint32_t)first[column]; };
    };
    uint64_t sum = span_sum<uint64_t>(output.res, output_span(y, res, output.res),
                                      output_span(x, res, output.res), row_at);
    const fused_call call = fused_call_of(job);
    output_store(&output, output_area(output.fit, res), sum, y, x, call.images + (job.begin + image) * bytes);
    if (job.mask_canvases && call.masks)
        call.masks[(job.begin + image) * pixels + i % pixels] =
            job.mask_canvases[((size_t)image * res + output_nearest(&output, res, 0, y)) * res +
                              output_nearest(&output, res, 0, x)];
}

/* ---- The plan ---- */

#define SLICE_BYTES ((size_t)1 << 31) /* maximum device memory of the slices in flight */
#define LANES_MAX   2
#define LANE_TILES  4                   /* tiles per multiprocessor that keep it busy */
#define HEAD_PART   4                   /* see choose_slice() */
#define SPLIT_BELOW 6                   /* groups per multiprocessor; see splits() */
#define UNITS_MAX   ((uint64_t)1 << 25) /* units per image; limited by the unit field of a queue entry */
#define OUT_MOST    512                 /* maximum side of a tile's output in pixels */
#define TILE_WORTH  96 /* minimum tile side that makes two blocks per multiprocessor worthwhile */
#define TILE_LEAST  32 /* minimum side of a tile's canvas */

/* Scratch memory for one slice in flight, and the stream of the slice's kernels. A struct fused_lane is
 * not a lane of a warp. */
struct fused_lane {
    uint2 *boxes;
    uint4 *values;
    void *ends;
    struct fused_card *cards;
    uint32_t *order;
    uint8_t *canvases, *mask_canvases; /* NULL unless fused_reduce_kernel() resizes them */
    /* Unused in the first lane, which uses the caller's stream: */
    cudaStream_t stream;
    cudaEvent_t done;
};

struct fused_plan {
    const struct synth *synth;
    struct ifs_plan
        *ifs; /* draws fractals; then the other members are unused. NULL: the formula draws something else */
    struct color_plan *color; /* draws fractals in colour; otherwise as `ifs` */
    int device, multiprocessors;
    bool background;      /* the streams of lanes have the lowest priority */
    bool overlap;         /* painting blocks may begin before the first kernel ends */
    struct fused_job job; /* fields that differ between slices are unset: the call, begin, count and the
                             memory of a lane */
    void *tables;
    struct fused_lane lanes[LANES_MAX];
    uint32_t lane_count;
    cudaEvent_t forked; /* recorded on the caller's stream at the start of a run; only with several lanes */
    uint32_t slice;     /* images per slice */
    uint32_t head;      /* images of the first slice of a run; at most `slice` */
    uint32_t side;      /* maximum side of a tile's canvas */
    bool wide;          /* coordinates may not fit packed words */
    bool split;         /* a block computes a group's vertices; otherwise a warp does */
    double groups;      /* average number of groups per image */
    size_t paint_bytes;
};

/* ---- Selection of kernels ---- */

/* Returns whether coordinates may be too large for packed words, that is, not within FUSED_NEAR of every
 * tile. A vertex is at most lines_reach() from the centre. The last unit may have up to FUSED_ORBITS - 1
 * surplus orbits, which move the vertex farther. For positions below 2^14, rounding adds at most 2^-11 per
 * orbit. The factor 1 + 2^-10 covers the rounding, because lines_reach() grows by at least 1 per orbit. */
static bool needs_wide(const struct synth *synth)
{
    double reach = 0;
    for (uint32_t c = 0; c < synth->class_count; c++) {
        struct atom_class class_ = synth->classes[c];
        class_.orbits += FUSED_ORBITS - 1;
        double one = lines_reach(&synth->rules, &class_);
        reach = one > reach ? one : reach;
    }
    return reach * (1 + 0x1p-10) + synth->res >= FUSED_NEAR - 1;
}

static uint32_t round_up(uint32_t value, uint32_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* Returns the words per canvas row, padding included. A row is a whole number of 16-byte vectors, and
 * adjacent rows begin in different banks. */
static uint32_t pitch_of(uint32_t width)
{
    return round_up(width, 8) + 4;
}

/* Computes the tiling of `output` with canvases of at most `side` pixels per side. Returns false if a single
 * output pixel covers more than such a canvas. */
static bool tile_with(const struct synth_output *output, uint32_t res, uint32_t side,
                      struct fused_tiling *tiling)
{
    uint64_t most = side;
    if (output->fit == OUTPUT_RESIZE) /* n output pixels span less than n * res / out_res + 2 canvas pixels */
        most = (uint64_t)(side - 2) * output->res / res;
    if (most == 0)
        return false;
    most = most < OUT_MOST ? most : OUT_MOST; /* an enlarged image could otherwise be a single tile */
    uint32_t count = (uint32_t)((output->res + most - 1) / most);
    uint32_t out_side = (output->res + count - 1) / count;
    if (round_up(out_side, 4) <= most)
        out_side = round_up(out_side, 4);
    tiling->out_width = tiling->out_height = out_side;
    tiling->columns = tiling->rows = (output->res + out_side - 1) / out_side;
    tiling->width = tiling->height =
        output->fit == OUTPUT_RESIZE ? (uint32_t)((uint64_t)out_side * res / output->res + 2) : out_side;
    tiling->pitch = pitch_of(tiling->width);
    return true;
}

/* Returns the shared memory of a painting block in bytes, for a canvas of this size. The canvas has at least
 * 32 words, because each lane without a line paints to its own word. */
static size_t paint_bytes(const struct fused_kernels *kernels, uint32_t width, uint32_t height)
{
    size_t words = (size_t)pitch_of(width) * height;
    return kernels->paint_fixed + (words < FUSED_WARP ? FUSED_WARP : words) * sizeof(uint32_t);
}

/* Returns the largest canvas side (TILE_MOST, TILE_MOST - 8, ...) for which a block needs at most `bytes`
 * bytes of shared memory; at least TILE_LEAST. */
static uint32_t side_within(const struct fused_kernels *kernels, size_t bytes)
{
    uint32_t side = TILE_MOST;
    while (side > TILE_LEAST && paint_bytes(kernels, side, side) > bytes)
        side -= 8;
    return side;
}

/* The kernels of all formulas, indexed by enum formula_id; NULL if the formula does not draw lines. */
static const struct fused_kernels *const kernels[] = {
#define KERNELS_LINES(name)                &fused_##name
#define KERNELS_IFS(name)                  nullptr
#define KERNELS_IFS3D(name)                nullptr
#define KERNELS_COLOR(name)                nullptr
#define FORMULA(symbol, name, family, ...) KERNELS_##family(name),
#include "synth/formulas.def"
#undef FORMULA
};

static const struct fused_kernels *kernels_of(const struct fused_plan *plan)
{
    return kernels[plan->synth->formula];
}

/* Sets the maximum side of a canvas, such that as many painting blocks fit on a multiprocessor as the kernel
 * is made for. If these are two, and the side would be below TILE_WORTH, sets it such that one block fits. */
static enum status choose_side(struct fused_plan *plan)
{
    int all, reserved, block;
    CUDA_TRY(cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, plan->device));
    CUDA_TRY(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, plan->device));
    CUDA_TRY(cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, plan->device));
    const struct fused_kernels *of = kernels_of(plan);
    plan->side = side_within(of, (size_t)(all / (int)of->paint_blocks - reserved));
    if (of->paint_blocks == 2 && plan->side < TILE_WORTH)
        plan->side = side_within(of, (size_t)block);
    return STATUS_OK;
}

/* Chooses tiles as large as possible, because a unit that touches two tiles is processed twice. Then halves
 * the side, if possible, until a slice has at least 3/4 as many tiles as the device has multiprocessors. */
static void choose_tiling(const struct fused_plan *plan, const struct synth_output *output,
                          struct fused_tiling *tiling)
{
    uint32_t res = plan->synth->res, side = plan->side;
    (void)tile_with(output, res, side, tiling);
    struct fused_tiling smaller;
    while (4 * (uint64_t)plan->slice * tiling->columns * tiling->rows < 3 * (uint64_t)plan->multiprocessors &&
           side / 2 >= TILE_LEAST && tile_with(output, res, side / 2, &smaller)) {
        *tiling = smaller;
        side /= 2;
    }
}

/* ---- Memory ---- */

static size_t end_bytes(const struct fused_plan *plan)
{
    return plan->wide ? sizeof(fused_end<true>) : sizeof(fused_end<false>);
}

/* Returns the scratch memory per image in bytes. */
static size_t image_bytes(const struct fused_plan *plan, bool reduce)
{
    return plan->job.units *
               (kernels_of(plan)->parts * sizeof(uint2) + sizeof(uint4) + FUSED_WARP * end_bytes(plan)) +
           sizeof(struct fused_card) + sizeof(uint32_t) +
           (reduce ? (plan->synth->rules.masked + 1) * synth_image_bytes(plan->synth) : 0);
}

/* Returns whether a block instead of a warp computes each group's vertices. This is faster if one warp per
 * group gives too few warps to occupy the multiprocessors. */
static bool splits(const struct fused_plan *plan, uint64_t images)
{
    return (double)images * plan->groups < (double)plan->multiprocessors * SPLIT_BELOW;
}

/* Chooses the number of lanes and of images per slice. Slices are of about equal size and as large as the
 * memory budget allows, with at least one slice per lane. There are two lanes if half the batch keeps the
 * device busy. Painting in one lane then overlaps with the last vertices of the other lane. If the vertices
 * depend on latency, the first of two slices is smaller, so that its painting begins earlier. `tiles`: number
 * of tiles per image. */
static enum status choose_slice(struct fused_plan *plan, bool reduce, uint64_t tiles)
{
    const struct synth *synth = plan->synth;
    size_t free_bytes, bytes = image_bytes(plan, reduce);
    TRY(device_free_bytes(plan->device, &free_bytes));
    free_bytes -= free_bytes / 32; /* margin, because allocations are rounded up to pages */
    if (plan->job.units > UNITS_MAX)
        return status_set(STATUS_TOO_LARGE, "fused supports up to %.2g lines per image, not %.2g; lower %s",
                          (double)UNITS_MAX * FUSED_LINES * FUSED_ORBITS,
                          (double)plan->job.units * FUSED_LINES * FUSED_ORBITS,
                          OPTION_OR_FIELD("--vertices or --orbits", "vertices or orbits"));
    if (bytes > free_bytes)
        return status_set(
            STATUS_TOO_LARGE,
            "fused needs %.2f GB of device memory for the lines of one image, but %.2f GB are free after "
            "the batch; lower %s",
            1e-9 * (double)bytes, 1e-9 * (double)free_bytes,
            OPTION_OR_FIELD("--batch, --vertices or --orbits", "batch, vertices or orbits"));
    size_t budget = free_bytes < SLICE_BYTES ? free_bytes : SLICE_BYTES;
    const uint64_t part = synth->batch / LANES_MAX;
    bool busy =
        part > 0 && (!splits(plan, part) || part * tiles >= LANE_TILES * (uint64_t)plan->multiprocessors);
    bool several = busy && bytes <= budget / LANES_MAX;
    plan->lane_count = several ? LANES_MAX : 1;
    uint64_t most = budget / plan->lane_count / bytes;
    most = most < 1 ? 1 : most > SLICE_MAX ? SLICE_MAX : most;
    uint64_t slices = (synth->batch + most - 1) / most;
    slices = slices < plan->lane_count ? plan->lane_count : slices;
    plan->slice = plan->head = (uint32_t)((synth->batch + slices - 1) / slices);
    const uint64_t head = synth->batch / HEAD_PART, rest = synth->batch - head;
    if (several && slices == LANES_MAX && head > 0 && rest <= most && splits(plan, rest)) {
        plan->head = (uint32_t)head;
        plan->slice = (uint32_t)rest;
    }
    return STATUS_OK;
}

/* Sets the numbers of groups and of units per image to their maxima, and the average number of groups. */
static void measure_classes(struct fused_plan *plan)
{
    const struct synth *synth = plan->synth;
    struct fused_job *job = &plan->job;
    uint64_t all = 0;
    for (uint32_t c = 0; c < synth->class_count; c++) {
        uint32_t groups = (synth->classes[c].vertices + FUSED_LINES - 1) / FUSED_LINES;
        size_t units = (size_t)groups * ((synth->classes[c].orbits + FUSED_ORBITS - 1) / FUSED_ORBITS);
        job->groups = groups > job->groups ? groups : job->groups;
        job->units = units > job->units ? units : job->units;
        all += groups;
    }
    job->units *= synth->rules.shapes;
    plan->groups = (double)all / synth->class_count * synth->rules.shapes;
}

/* If images have several shapes, sets the number of warps (or blocks) per image. The grid has about two waves
 * of warps, but no more warps than groups: a warp computes the shapes of its image before its first group. */
static void choose_warps(struct fused_plan *plan)
{
    if (plan->synth->rules.shapes == 1)
        return;
    double most = ceil(plan->groups), two_waves = 2.0 * VERTICES_WARPS * plan->multiprocessors / plan->slice;
    plan->job.groups = (uint32_t)(plan->split || most < two_waves ? most : ceil(two_waves));
}

/* Refuses images that the kernels cannot draw. */
static enum status check_images(const struct synth *synth)
{
    uint64_t orbits = (uint64_t)synth->rules.shapes * synth->orbits_max;
    if (synth->rules.masked && orbits > FUSED_MASK_ORBITS)
        return status_set(STATUS_TOO_LARGE,
                          "fused supports up to %u orbits per image with a mask, but %u shapes of %u orbits "
                          "have %llu; lower %s",
                          FUSED_MASK_ORBITS, synth->rules.shapes, synth->orbits_max,
                          (unsigned long long)orbits, OPTION_OR_FIELD("--orbits", "orbits"));
    return STATUS_OK;
}

static enum status open_lane(const struct fused_plan *plan, struct fused_lane *lane, bool reduce)
{
    size_t units = plan->slice * plan->job.units;
    CUDA_TRY(cudaMalloc(&lane->boxes, units * kernels_of(plan)->parts * sizeof(uint2)));
    CUDA_TRY(cudaMalloc(&lane->values, units * sizeof(uint4)));
    CUDA_TRY(cudaMalloc(&lane->cards, plan->slice * sizeof(struct fused_card)));
    CUDA_TRY(cudaMalloc(&lane->ends, units * FUSED_WARP * end_bytes(plan)));
    if (plan->synth->turns > 1)
        CUDA_TRY(cudaMalloc(&lane->order, plan->slice * sizeof(uint32_t)));
    if (reduce)
        CUDA_TRY(cudaMalloc(&lane->canvases, plan->slice * synth_image_bytes(plan->synth)));
    if (reduce && plan->synth->rules.masked)
        CUDA_TRY(cudaMalloc(&lane->mask_canvases, plan->slice * synth_image_bytes(plan->synth)));
    if (lane == plan->lanes)
        return STATUS_OK;
    TRY(stream_open(&lane->stream, plan->background));
    CUDA_TRY(cudaEventCreateWithFlags(&lane->done, cudaEventDisableTiming));
    return STATUS_OK;
}

static void close_lane(struct fused_lane *lane)
{
    /* Errors are ignored, because no result depends on them. */
    destroy(lane->done, lane->stream);
    (void)cudaFree(lane->mask_canvases);
    (void)cudaFree(lane->canvases);
    (void)cudaFree(lane->order);
    (void)cudaFree(lane->ends);
    (void)cudaFree(lane->cards);
    (void)cudaFree(lane->values);
    (void)cudaFree(lane->boxes);
}

static enum status open_lanes(struct fused_plan *plan, bool reduce)
{
    for (uint32_t i = 0; i < plan->lane_count; i++)
        TRY(open_lane(plan, &plan->lanes[i], reduce));
    if (plan->lane_count > 1)
        CUDA_TRY(cudaEventCreateWithFlags(&plan->forked, cudaEventDisableTiming));
    return STATUS_OK;
}

/* ---- The plan ---- */

static fused_kernel *paint_kernel_of(const struct fused_plan *plan)
{
    return kernels_of(plan)->paint[plan->wide];
}

static fused_kernel *vertices_kernel_of(const struct fused_plan *plan)
{
    const struct fused_kernels *of = kernels_of(plan);
    return plan->split ? of->vertices_split[plan->wide] : of->vertices[plan->wide];
}

/* Loads the kernels. CUDA would otherwise load them at their first launch, and it must not do so while a
 * stream is captured. */
static enum status load_kernels(const struct fused_plan *plan)
{
    cudaFuncAttributes attributes;
    CUDA_TRY(cudaFuncGetAttributes(&attributes, vertices_kernel_of(plan)));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, fused_order_kernel));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, fused_reduce_kernel));
    TRY(allow_shared(paint_kernel_of(plan), plan->paint_bytes));
    /* Painting blocks can run next to the last vertex blocks only if both kernels use the same shared-memory
     * carveout. */
    CUDA_TRY(cudaFuncSetAttribute(vertices_kernel_of(plan), cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared));
    if (plan->split)
        TRY(allow_shared(vertices_kernel_of(plan), kernels_of(plan)->split_bytes));
    return STATUS_OK;
}

static enum status make_plan(struct fused_plan *plan)
{
    const struct synth *synth = plan->synth;
    TRY(check_images(synth));
    CUDA_TRY(cudaSetDevice(plan->device));
    CUDA_TRY(cudaDeviceGetAttribute(&plan->multiprocessors, cudaDevAttrMultiProcessorCount, plan->device));
    TRY(device_input_open(plan->device, synth, &plan->job.input, &plan->tables));
    plan->wide = needs_wide(synth);
    measure_classes(plan);
    plan->job.output = synth->output;

    struct fused_tiling tiling;
    int architecture;
    bool at_load;
    TRY(choose_side(plan));
    bool reduce = !tile_with(&synth->output, synth->res, plan->side, &tiling);
    if (reduce) /* painting then writes canvases */
        plan->job.output = {DTYPE_U8, OUTPUT_NCHW, OUTPUT_WHOLE, synth->res, 1, {}, {}};
    TRY(choose_slice(plan, reduce, reduce ? 1 : (uint64_t)tiling.columns * tiling.rows));
    choose_tiling(plan, &plan->job.output, &plan->job.tiling);
    /* With several lanes, painting blocks that wait would take the place of the other lane's blocks. Device
     * code for older architectures cannot wait. */
    TRY(device_code(plan->device, &architecture, &at_load));
    plan->overlap = plan->lane_count == 1 && architecture >= 90;
    plan->split = splits(plan, plan->slice);
    choose_warps(plan);
    TRY(open_lanes(plan, reduce));

    plan->paint_bytes = paint_bytes(kernels_of(plan), plan->job.tiling.width, plan->job.tiling.height);
    return load_kernels(plan);
}

enum status fused_open(int device, const struct synth *synth, bool background, struct fused_plan **plan)
{
    struct fused_plan *self = static_cast<struct fused_plan *>(calloc(1, sizeof *self));
    TRY(ALLOCATED(self, "out of memory"));
    self->synth = synth;
    self->device = device;
    self->background = background;
    enum status status = synth_is_color(synth) ? color_plan_open(device, synth, &self->color)
                         : formula_is_system(formulas[synth->formula])
                             ? ifs_plan_open(device, synth, &self->ifs)
                             : make_plan(self);
    if (status != STATUS_OK)
        fused_close(self);
    else
        *plan = self;
    return status;
}

void fused_close(struct fused_plan *plan)
{
    if (!plan)
        return;
    ifs_plan_close(plan->ifs);
    color_plan_close(plan->color);
    for (uint32_t i = 0; i < LANES_MAX; i++)
        close_lane(&plan->lanes[i]);
    destroy(plan->forked);
    (void)cudaFree(plan->tables);
    free(plan);
}

/* ---- A run ---- */

/* Returns the job of one slice, which uses the memory of `lane`. The slice begins at image `begin` of a call
 * for `count` images. The other fields are copied from `from`. */
static struct fused_job slice_at(const struct fused_plan *plan, const struct fused_lane *lane,
                                 const struct fused_job *from, uint64_t begin, uint64_t count)
{
    const uint32_t most = begin == 0 ? plan->head : plan->slice;
    struct fused_job job = *from;
    job.begin = begin;
    job.count = (uint32_t)(count - begin < most ? count - begin : most);
    job.boxes = lane->boxes;
    job.values = lane->values;
    job.ends = lane->ends;
    job.cards = lane->cards;
    job.order = lane->order;
    job.canvases = lane->canvases;
    job.mask_canvases = lane->mask_canvases;
    return job;
}

/* Launches a kernel. `early`: its blocks may begin before the previous kernel of the stream ends. */
static enum status launch(fused_kernel *kernel, const char *name, dim3 blocks, uint32_t threads, size_t bytes,
                          bool early, const struct fused_job *job, cudaStream_t stream)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early;
    return cuda_status(cudaLaunchKernelEx(&config, kernel, *job), name, __FILE__, __LINE__);
}

static enum status enqueue_vertices(const struct fused_plan *plan, const struct fused_job *job,
                                    cudaStream_t stream)
{
    RANGE(VERTICES);
    const struct fused_kernels *of = kernels_of(plan);
    uint64_t groups = (uint64_t)job->count * job->groups;
    bool early = plan->overlap && job->stored; /* then the previous kernel has stored the call */
    if (job->order && !plan->split) {          /* blocks that compute groups also order the images */
        fused_order_kernel<<<(job->count + ORDER_BLOCK - 1) / ORDER_BLOCK, ORDER_BLOCK, 0, stream>>>(*job);
        CUDA_TRY_LAUNCH("fused_order_kernel");
        early = plan->overlap;
    }
    if (plan->split)
        return launch(vertices_kernel_of(plan), "fused_vertices_split_kernel", (unsigned)groups,
                      of->split_block, of->split_bytes, early, job, stream);
    const uint64_t warps = VERTICES_BLOCK / FUSED_WARP;
    return launch(vertices_kernel_of(plan), "fused_vertices_kernel", (unsigned)((groups + warps - 1) / warps),
                  VERTICES_BLOCK, 0, early, job, stream);
}

static enum status enqueue_painting(const struct fused_plan *plan, const struct fused_job *job,
                                    cudaStream_t stream)
{
    RANGE(PAINTING);
    const struct synth_output *output = &plan->synth->output;
    TRY(launch(paint_kernel_of(plan), "fused_paint_kernel",
               dim3(job->tiling.columns, job->tiling.rows, job->count), kernels_of(plan)->paint_block,
               plan->paint_bytes, plan->overlap, job, stream));
    if (job->canvases) {
        uint64_t pixels = (uint64_t)job->count * output->res * output->res;
        fused_reduce_kernel<<<(unsigned)((pixels + REDUCE_BLOCK - 1) / REDUCE_BLOCK), REDUCE_BLOCK, 0,
                              stream>>>(*job, *output);
        CUDA_TRY_LAUNCH("fused_reduce_kernel");
    }
    return STATUS_OK;
}

/* Makes the other lanes wait for the caller's stream. */
static enum status fork_lanes(const struct fused_plan *plan, cudaStream_t stream)
{
    if (plan->lane_count == 1)
        return STATUS_OK;
    CUDA_TRY(cudaEventRecord(plan->forked, stream));
    for (uint32_t i = 1; i < plan->lane_count; i++)
        CUDA_TRY(cudaStreamWaitEvent(plan->lanes[i].stream, plan->forked, 0));
    return STATUS_OK;
}

/* Makes the caller's stream wait for the other lanes. */
static enum status join_lanes(const struct fused_plan *plan, cudaStream_t stream)
{
    for (uint32_t i = 1; i < plan->lane_count; i++) {
        CUDA_TRY(cudaEventRecord(plan->lanes[i].done, plan->lanes[i].stream));
        CUDA_TRY(cudaStreamWaitEvent(stream, plan->lanes[i].done, 0));
    }
    return STATUS_OK;
}

/* Enqueues `count` images of the call that `from` contains, slice by slice. */
static enum status enqueue_all(const struct fused_plan *plan, const struct fused_job *from, uint64_t count,
                               cudaStream_t stream)
{
    TRY(fork_lanes(plan, stream));
    uint32_t turn = 0;
    for (uint64_t begin = 0; begin < count; turn = (turn + 1) % plan->lane_count) {
        const struct fused_lane *lane = &plan->lanes[turn];
        const struct fused_job slice = slice_at(plan, lane, from, begin, count);
        begin += slice.count;
        cudaStream_t own = turn == 0 ? stream : lane->stream;
        TRY(enqueue_vertices(plan, &slice, own));
        TRY(enqueue_painting(plan, &slice, own));
    }
    return join_lanes(plan, stream);
}

enum status fused_enqueue(const struct fused_plan *plan, const struct fused_call *call, uint64_t count,
                          cudaStream_t stream)
{
    if (plan->ifs)
        return ifs_plan_enqueue(plan->ifs, call, nullptr, count, stream);
    if (plan->color)
        return color_plan_enqueue(plan->color, call, nullptr, count, stream);
    struct fused_job job = plan->job;
    job.call = *call;
    return enqueue_all(plan, &job, count, stream);
}

enum status fused_enqueue_stored(const struct fused_plan *plan, const struct fused_call *stored,
                                 uint64_t count, cudaStream_t stream)
{
    if (plan->ifs)
        return ifs_plan_enqueue(plan->ifs, nullptr, stored, count, stream);
    if (plan->color)
        return color_plan_enqueue(plan->color, nullptr, stored, count, stream);
    struct fused_job job = plan->job;
    job.stored = stored;
    return enqueue_all(plan, &job, count, stream);
}

enum status fused_time_stages(const struct fused_plan *plan, const struct fused_call *call,
                              const struct device_clock *clock, double *vertices_s, double *painting_s)
{
    struct fused_job job = plan->job;
    uint64_t count = plan->synth->batch;
    if (plan->ifs)
        return device_clock_add(clock, painting_s,
                                [&] { return fused_enqueue(plan, call, count, clock->stream); });
    if (plan->color)
        return color_plan_time(plan->color, call, clock, vertices_s, painting_s);
    job.call = *call;
    for (uint64_t begin = 0; begin < count;) {
        const struct fused_job slice = slice_at(plan, plan->lanes, &job, begin, count);
        begin += slice.count;
        TRY(device_clock_add(clock, vertices_s,
                             [&] { return enqueue_vertices(plan, &slice, clock->stream); }));
        TRY(device_clock_add(clock, painting_s,
                             [&] { return enqueue_painting(plan, &slice, clock->stream); }));
    }
    return STATUS_OK;
}

/* ---- Fractals ---- */

/* Returns whether the images are made from a bank of orbits. */
static bool has_bank(const struct fused_plan *plan)
{
    return plan->ifs && ifs_plan_bank(plan->ifs);
}

bool fused_single(const struct fused_plan *plan)
{
    return has_bank(plan);
}

enum status fused_need(const struct fused_plan *plan, uint64_t number)
{
    const struct synth *synth = plan->synth;
    if (!has_bank(plan))
        return STATUS_OK;
    uint64_t *orbits = static_cast<uint64_t *>(malloc(synth->batch * sizeof *orbits));
    TRY(ALLOCATED(orbits, "out of memory for a list of orbits"));
    for (uint64_t j = 0; j < synth->batch; j++)
        orbits[j] = synth_orbit(synth, synth_image_at(synth->first, synth->stride, synth->turns, number, j));
    enum status status = ifs_device_need(ifs_plan_bank(plan->ifs), orbits, synth->batch);
    free(orbits);
    return status;
}

enum status fused_need_all(const struct fused_plan *plan)
{
    return has_bank(plan) ? ifs_device_need(ifs_plan_bank(plan->ifs), nullptr, 0) : STATUS_OK;
}

struct ifs_bank_facts fused_bank(const struct fused_plan *plan)
{
    struct ifs_bank_facts none = {};
    return has_bank(plan) ? ifs_device_facts(ifs_plan_bank(plan->ifs)) : none;
}

uint64_t fused_memory_bytes(const struct fused_plan *plan)
{
    if (plan->ifs)
        return ifs_plan_bytes(plan->ifs);
    if (plan->color)
        return color_plan_bytes(plan->color);
    return device_input_bytes(plan->synth) +
           (uint64_t)plan->lane_count * plan->slice * image_bytes(plan, plan->lanes[0].canvases != nullptr);
}
