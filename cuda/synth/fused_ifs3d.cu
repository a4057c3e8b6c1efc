/* `fused` for three-dimensional iterated function systems (synth/ifs3d.h). A block computes the orbit of a
 * drawing and the views of it that the batch has, as bitmaps. The kernel of fused_ifs_images.cuh makes the
 * images from them.
 *
 * The first warp walks: a lane per walk. It finds the extent of the points, and stores the first point of
 * each walk. Then each warp draws a view: its lanes walk again, from these points, and set bits in shared
 * memory. */
#include <stdlib.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "synth/fused_ifs.cuh"

#define SOLID_STRIDE \
    14u /* doubles from a map to the next: maps that lanes read at once are in different banks */
#define SOLID_BLOCKS ((IFS3D_POINTS + 3) / 4) /* Philox blocks of an orbit */

/* The arguments of the kernels. All pointers are to device memory. */
struct solid_job {
    struct ifs_rules rules;
    uint32_t res, turns, classes;
    uint64_t seed, first, stride; /* as in struct synth */
    const struct ifs3d_system *systems;
    uint8_t *bitmaps; /* one per image of the call */
    uint32_t words;   /* of a bitmap */
    uint32_t count;   /* images of the call */
    struct fused_call call;
    const struct fused_call *stored; /* NULL: use `call` */
};

typedef void solid_function(const struct solid_job job);

struct ifs_solids {
    struct solid_job job; /* the call is unset */
    solid_function *kernel;
    void *systems;
    uint8_t *bitmaps;
    uint32_t views; /* that a block draws at most */
    size_t shared_bytes;
    uint64_t bytes; /* of device memory */
};

/* ---- Drawings ---- */

/* An image of the call. */
struct solid_image {
    uint32_t class_index;
    struct ifs_instance shown;
};

static __device__ __forceinline__ solid_image solid_image_of(const solid_job &job, const fused_call &call,
                                                             uint64_t j)
{
    const uint64_t run = call.listed ? 0 : call.number + (call.counter ? *call.counter : 0);
    const struct synth_image image =
        synth_image_at(job.first, job.stride, job.turns, run, call.listed ? call.listed[j] : j);
    return {image.class_index, ifs_instance(&job.rules, image.instance)};
}

/* The shared memory of a block. */
struct solid_shared {
    double maps[IFS_MAPS_MAX * SOLID_STRIDE]; /* coefficients with weights */
    struct ifs3d_point starts[IFS3D_WALKS];
    struct ifs3d_extent extents[IFS3D_WALKS];
    struct ifs3d_frame frame;
    uint32_t choices[SOLID_BLOCKS]; /* a byte per step */
};

static __device__ __forceinline__ ifs3d_point solid_step(const solid_shared &own, uint32_t step,
                                                         ifs3d_point point)
{
    const uint32_t choice = reinterpret_cast<const uint8_t *>(own.choices)[step];
    const double2 *map = reinterpret_cast<const double2 *>(own.maps + choice * SOLID_STRIDE);
    double coefficients[IFS3D_COEFFICIENTS];
#pragma unroll
    for (uint32_t i = 0; i < IFS3D_COEFFICIENTS / 2; i++) {
        const double2 two = map[i];
        coefficients[2 * i] = two.x;
        coefficients[2 * i + 1] = two.y;
    }
    return ifs3d_step(coefficients, point);
}

/* Computes the first point of each walk, and the frame, by the first warp. */
static __device__ __forceinline__ void solid_walk(solid_shared &own)
{
    const uint32_t lane = threadIdx.x;
    const struct ifs3d_span span = ifs3d_span(lane);
    struct ifs3d_point point = {};
    struct ifs3d_extent extent = ifs3d_no_extent();
#pragma unroll 2
    for (uint32_t step = span.begin; step < span.first; step++)
        point = solid_step(own, step, point);
    own.starts[lane] = point;
    __syncwarp();
#pragma unroll 2
    for (uint32_t step = span.first; step < span.end; step++) {
        point = solid_step(own, step, point);
        ifs3d_extend(&extent, point);
    }
    own.extents[lane] = extent;
    __syncwarp();
    if (lane == 0) {
        struct ifs3d_extent all = ifs3d_no_extent();
        for (uint32_t walk = 0; walk < IFS3D_WALKS; walk++)
            ifs3d_join(&all, &own.extents[walk]);
        own.frame = ifs3d_frame(&all);
    }
}

/* Prepares the drawing of a class for solid_trace(), by the whole block. Returns its key. */
static __device__ struct philox_key solid_prepare(const solid_job &job, uint32_t class_index,
                                                  struct ifs_instance shown, solid_shared &own)
{
    const struct ifs3d_system *system = &job.systems[class_index];
    const struct philox_key key = ifs_mask_key(&job.rules, job.seed, system->id, shown.drawing);
    uint32_t row = ifs3d_row(&job.rules, shown), bounds[IFS_MAPS_MAX];
#pragma unroll
    for (uint32_t m = 0; m < IFS_MAPS_MAX; m++)
        bounds[m] = system->bounds[m];
    for (uint32_t b = threadIdx.x; b < SOLID_BLOCKS; b += blockDim.x) {
        const struct philox_block words = ifs3d_choice_block(key, b);
        uint32_t four = 0;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            four |= ifs3d_choice(bounds, words.word[i]) << 8 * i;
        own.choices[b] = four;
    }
    for (;;) {
        const struct ifs3d_weight weight = ifs3d_weight(row);
        for (uint32_t i = threadIdx.x; i < IFS_MAPS_MAX * IFS3D_COEFFICIENTS; i += blockDim.x) {
            const uint32_t map = i / IFS3D_COEFFICIENTS, coefficient = i % IFS3D_COEFFICIENTS;
            own.maps[map * SOLID_STRIDE + coefficient] = ifs3d_coefficient(system, weight, map, coefficient);
        }
        __syncthreads();
        if (threadIdx.x < IFS3D_WALKS)
            solid_walk(own);
        __syncthreads();
        if (own.frame.drawn || row == IFS3D_IDENTITY)
            return key;
        row = IFS3D_IDENTITY;
        __syncthreads(); /* all threads have read the frame */
    }
}

/* Calls take(index, coordinates) for the points of the walk of this lane. */
template <class Take> static __device__ __forceinline__ void solid_trace(const solid_shared &own, Take take)
{
    const uint32_t lane = threadIdx.x % FUSED_WARP;
    const struct ifs3d_span span = ifs3d_span(lane);
    const struct ifs3d_frame frame = own.frame;
    struct ifs3d_point point = own.starts[lane];
    if (!frame.drawn)
        return;
#pragma unroll 2
    for (uint32_t step = span.first; step < span.end; step++) {
        point = solid_step(own, step, point);
        const float at[3] = {ifs3d_coordinate(&frame, point, 0), ifs3d_coordinate(&frame, point, 1),
                             ifs3d_coordinate(&frame, point, 2)};
        take(step, at);
    }
}

/* ---- Views ---- */

extern __shared__ uint32_t solid_bits[];

/* Draws a view, by a warp. `bitmap` is the destination. Shared: bits are set in shared memory and then
 * copied. */
template <bool Shared>
static __device__ __forceinline__ void solid_draw(const solid_job &job, const solid_shared &own,
                                                  struct philox_key key, uint32_t view, uint32_t *bitmap)
{
    const uint32_t lane = threadIdx.x % FUSED_WARP, pitch = (uint32_t)ifs_map_pitch(true, job.res) / 4;
    uint32_t *bits = Shared ? solid_bits + threadIdx.x / FUSED_WARP * job.words : bitmap;
    const struct ifs3d_camera camera = ifs3d_camera(&job.rules, key, view);
    for (uint32_t i = lane; i < job.words; i += FUSED_WARP)
        bits[i] = 0;
    __syncwarp();
    solid_trace(own, [&](uint32_t, const float at[3]) {
        const struct ifs3d_pixel pixel = ifs3d_pixel(&camera, at, job.res);
        if (pixel.x != UINT32_MAX)
            atomicOr(bits + pixel.y * pitch + pixel.x / 32, 1u << pixel.x % 32);
    });
    __syncwarp();
    for (uint32_t i = lane; Shared && i < job.words; i += FUSED_WARP)
        bitmap[i] = bits[i];
}

/* A block per image draws this image and, with its other warps, the next views of the same drawing, which are
 * at distances of `turns` images. Blocks whose image is drawn by another one do nothing. Listed images are
 * drawn alone. */
template <bool Shared>
static __global__ void __launch_bounds__(IFS3D_VIEWS *FUSED_WARP)
    solid_views_kernel(const __grid_constant__ solid_job job)
{
    __shared__ struct solid_shared own;
    const fused_call call = job.stored ? *job.stored : job.call;
    const uint64_t j = blockIdx.x;
    const solid_image image = solid_image_of(job, call, j);
    const uint32_t warp = threadIdx.x / FUSED_WARP, view = image.shown.flip + warp;
    const uint64_t drawn = j + (uint64_t)warp * job.turns;
    if (!call.listed && image.shown.flip > 0 && j >= job.turns)
        return;
    const struct philox_key key = solid_prepare(job, image.class_index, image.shown, own);
    if (warp > 0 && (call.listed || view >= job.rules.flips || drawn >= job.count))
        return;
    solid_draw<Shared>(job, own, key, view, reinterpret_cast<uint32_t *>(job.bitmaps) + drawn * job.words);
}

/* ---- Point clouds ---- */

/* A block of one warp writes the points of the image's class (blockIdx.y 0) or of the other class (1). */
static __global__ void __launch_bounds__(FUSED_WARP)
    solid_clouds_kernel(const __grid_constant__ solid_job job)
{
    __shared__ struct solid_shared own;
    const fused_call call = job.stored ? *job.stored : job.call;
    const bool other = blockIdx.y > 0;
    const uint32_t count = other ? IFS3D_CLOUD - IFS3D_CLOUD_OWN : IFS3D_CLOUD_OWN;
    if (!call.points)
        return;
    const solid_image image = solid_image_of(job, call, blockIdx.x);
    float *to = call.points + ((size_t)blockIdx.x * IFS3D_CLOUD + (other ? IFS3D_CLOUD_OWN : 0)) * 3;
    uint32_t class_index = image.class_index;
    if (other) {
        const uint32_t id = job.systems[class_index].id;
        class_index = ifs3d_partner(ifs_mask_key(&job.rules, job.seed, id, image.shown.drawing), class_index,
                                    job.classes);
    }
    solid_prepare(job, class_index, image.shown, own);
    for (uint32_t i = threadIdx.x; !own.frame.drawn && i < 3 * count; i += FUSED_WARP)
        to[i] = 0;
    solid_trace(own, [&](uint32_t point, const float at[3]) {
        for (uint32_t axis = 0; point < count && axis < 3; axis++)
            to[3 * point + axis] = at[axis];
    });
}

/* ---- The plan ---- */

static enum status open_solids(int device, const struct synth *synth, struct ifs_solids *self)
{
    const size_t system_bytes = synth->class_count * sizeof *synth->solids;
    const size_t map_bytes = ifs_map_bytes(true, synth->res), bitmap_bytes = synth->batch * map_bytes;
    const uint64_t views = (synth->batch - 1) / synth->turns + 1;
    struct solid_job *job = &self->job;
    cudaFuncAttributes attributes;
    int most;
    TRY(device_check_memory(device, synth, system_bytes + bitmap_bytes));
    CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    CUDA_TRY(cudaMalloc(&self->systems, system_bytes));
    CUDA_TRY(cudaMemcpy(self->systems, synth->solids, system_bytes, cudaMemcpyHostToDevice));
    CUDA_TRY(cudaMalloc(&self->bitmaps, bitmap_bytes));
    self->bytes = system_bytes + bitmap_bytes;
    self->views = views < synth->ifs.flips ? (uint32_t)views : synth->ifs.flips;
    const bool shared = self->views * map_bytes + sizeof(struct solid_shared) <= (size_t)most - 1024;
    self->shared_bytes = shared ? self->views * map_bytes : 0;
    self->kernel = shared ? solid_views_kernel<true> : solid_views_kernel<false>;
    job->rules = synth->ifs;
    job->res = synth->res;
    job->turns = synth->turns;
    job->classes = synth->class_count;
    job->seed = synth->seed;
    job->first = synth->first;
    job->stride = synth->stride;
    job->systems = static_cast<const struct ifs3d_system *>(self->systems);
    job->bitmaps = self->bitmaps;
    job->words = (uint32_t)(map_bytes / 4);
    /* Loads the kernels, which CUDA must not do during a capture. */
    CUDA_TRY(cudaFuncGetAttributes(&attributes, solid_clouds_kernel));
    return allow_shared(self->kernel, self->shared_bytes);
}

enum status ifs_solids_open(int device, const struct synth *synth, struct ifs_solids **solids)
{
    struct ifs_solids *self = static_cast<struct ifs_solids *>(calloc(1, sizeof *self));
    TRY(ALLOCATED(self, "out of memory"));
    enum status status = open_solids(device, synth, self);
    if (status != STATUS_OK)
        ifs_solids_close(self);
    else
        *solids = self;
    return status;
}

void ifs_solids_close(struct ifs_solids *solids)
{
    if (!solids)
        return;
    (void)cudaFree(solids->systems); /* errors are ignored, because no result depends on them */
    (void)cudaFree(solids->bitmaps);
    free(solids);
}

const struct ifs3d_system *ifs_solids_systems(const struct ifs_solids *solids)
{
    return solids->job.systems;
}

const uint8_t *ifs_solids_bitmaps(const struct ifs_solids *solids)
{
    return solids->bitmaps;
}

uint64_t ifs_solids_bytes(const struct ifs_solids *solids)
{
    return solids->bytes;
}

enum status ifs_solids_enqueue(const struct ifs_solids *solids, const struct fused_call *call,
                               const struct fused_call *stored, uint64_t count, cudaStream_t stream)
{
    struct solid_job job = solids->job;
    RANGE(VERTICES);
    if (call)
        job.call = *call;
    job.stored = stored;
    job.count = (uint32_t)count;
    /* Listed images are drawn alone. */
    const uint32_t warps = call && call->listed ? 1 : solids->views;
    solids->kernel<<<(unsigned)count, warps * FUSED_WARP, solids->shared_bytes, stream>>>(job);
    CUDA_TRY_LAUNCH("solid_views_kernel");
    if (job.rules.cloud && (stored || call->points)) {
        solid_clouds_kernel<<<dim3((unsigned)count, 2), FUSED_WARP, 0, stream>>>(job);
        CUDA_TRY_LAUNCH("solid_clouds_kernel");
    }
    return STATUS_OK;
}
