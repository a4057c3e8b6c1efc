/* `fused`, first kernel: where the ends of all lines stand. */
#ifndef FDSL_CUDA_SYNTH_FUSED_VERTICES_CUH
#define FDSL_CUDA_SYNTH_FUSED_VERTICES_CUH

#include "synth/fused.cuh"

/* ---- Noise ---- */

/* noise_of_draw(), bit for bit, in fewer instructions; check-gpu compares all 2^32 draws.
 *
 * The bits that count are 8 to 39 of draw * 10000 = 16 * (625 draw): the low word of floor(625 draw / 16) =
 * 39 draw + floor(draw / 16). Its upper 8 bits are the cell, the lower 24 are t * 2^24. All that follows
 * keeps t scaled so: powers of two are folded into constants and, as 2^-24, into the gradients, and change no
 * bit, as nothing here comes near the ends of float's range. */
static __device__ __forceinline__ float fused_noise(const float2 *gradients, uint32_t draw)
{
    uint32_t place = 39 * draw + (draw >> 4);
    float2 gradient = gradients[place >> 24];
    float t = (float)(place & 0xFFFFFF);
    float fade = t * t * t * fmaf(fmaf(t, 6 * 0x1p-120f, -15 * 0x1p-96f), t, 10 * 0x1p-72f);
    float from_left = gradient.x * t;
    float rise = fmaf(gradient.y, t - 0x1p24f, -from_left);
    return fmaf(fade, rise, from_left);
}

#define FUSED_GRADIENTS NOISE_PERIOD

/* Fills the table above, the gradients on both sides of a cell; all threads of the block. */
static __device__ __forceinline__ void fused_fill_gradients(const float *gradients, float2 *table)
{
    for (uint32_t i = threadIdx.x; i < FUSED_GRADIENTS; i += blockDim.x)
        table[i] = make_float2(gradients[i] * 0x1p-24f, gradients[i + 1] * 0x1p-24f);
    __syncthreads();
}

/* The steps of two orbits without their direction: what atom_advance() multiplies with it. */
struct fused_steps {
    float2 even, odd;
};

static __device__ __forceinline__ fused_steps fused_steps_of(struct philox_key key, const float2 *gradients,
                                                             uint32_t vertex, uint32_t pair, float p,
                                                             float advance)
{
    struct philox_block block = atom_noise_block(key, vertex, pair);
    fused_steps steps;
    steps.even.x = fmaf(-p, fused_noise(gradients, block.word[0]), advance);
    steps.even.y = fmaf(-p, fused_noise(gradients, block.word[1]), advance);
    steps.odd.x = fmaf(-p, fused_noise(gradients, block.word[2]), advance);
    steps.odd.y = fmaf(-p, fused_noise(gradients, block.word[3]), advance);
    return steps;
}

/* ---- Units ---- */

/* A warp's vertices, a lane each. */
struct fused_group {
    struct philox_key key;
    uint32_t vertex;
    float cosine, sine, advance, p;
    struct atom_point start;
    size_t first_unit; /* of the group; a pair of orbits each */
};

/* Group `group` of an image. Lanes past the last line's end take vertex 0: their lines have no length. */
static __device__ __forceinline__ fused_group fused_group_at(const fused_image &image, uint32_t group)
{
    const struct image_input &input = image.input;
    fused_group self;
    uint32_t v = group * FUSED_LINES + threadIdx.x % FUSED_WARP;
    /* The same in all lanes; so it can live in scalar registers. */
    self.key.word[0] = __reduce_or_sync(FUSED_ALL, input.key.word[0]);
    self.key.word[1] = __reduce_or_sync(FUSED_ALL, input.key.word[1]);
    self.vertex = v < input.class_.vertices ? v : 0;
    self.cosine = input.spokes.cosine[self.vertex];
    self.sine = input.spokes.sine[self.vertex];
    self.advance = input.spokes.advance[self.vertex];
    self.p = input.class_.noise;
    self.start =
        atom_start(&input.class_, atom_centre(input.key, input.formula, input.res), self.cosine, self.sine);
    self.first_unit = image.first_unit + (size_t)group * image.pairs;
    return self;
}

/* What an orbit paints; 0 past the last one. */
static __device__ __forceinline__ uint32_t fused_value(const struct image_input &input, uint32_t orbit)
{
    return orbit < input.class_.orbits ? (orbit + 1) << 8 | atom_gray(input.key, input.formula, orbit) : 0;
}

/* Begins the units of pairs `first`, `first` + `step`, ... of a group: nothing visible yet. */
static __device__ __forceinline__ void fused_begin_units(const fused_job &job, const fused_image &image,
                                                         const fused_group &group, uint32_t first,
                                                         uint32_t step)
{
    for (uint32_t pair = first; pair < image.pairs; pair += step)
        job.units[group.first_unit + pair] = {FUSED_NOWHERE, FUSED_NOWHERE,
                                              fused_value(image.input, 2 * pair),
                                              fused_value(image.input, 2 * pair + 1)};
}

static __device__ __forceinline__ void fused_store_ends(fused_ends<false> *ends, int2 even, int2 odd)
{
    ends->packed = make_uint2(FUSED_PACK(even.x, even.y), FUSED_PACK(odd.x, odd.y));
}

static __device__ __forceinline__ void fused_store_ends(fused_ends<true> *ends, int2 even, int2 odd)
{
    ends->xyxy = make_int4(even.x, even.y, odd.x, odd.y);
}

/* Stores a unit, a lane an end, if its box touches the image. */
template <bool Wide>
static __device__ __forceinline__ void fused_store_unit(const fused_job &job, size_t unit, int2 even,
                                                        int2 odd)
{
    int32_t low_x = __reduce_min_sync(FUSED_ALL, min(even.x, odd.x));
    int32_t low_y = __reduce_min_sync(FUSED_ALL, min(even.y, odd.y));
    int32_t high_x = __reduce_max_sync(FUSED_ALL, max(even.x, odd.x));
    int32_t high_y = __reduce_max_sync(FUSED_ALL, max(even.y, odd.y));
    int32_t last = (int32_t)job.input.res - 1;
    if (low_x > last || low_y > last || high_x < 0 || high_y < 0)
        return;
    uint32_t lane = threadIdx.x % FUSED_WARP;
    fused_store_ends(static_cast<fused_ends<Wide> *>(job.ends) + unit * FUSED_WARP + lane, even, odd);
    if (Wide) { /* what is beyond the image matters to no tile */
        low_x = max(low_x, -1);
        low_y = max(low_y, -1);
        high_x = min(high_x, last);
        high_y = min(high_y, last);
    }
    if (lane == 0)
        *reinterpret_cast<uint2 *>(&job.units[unit]) =
            make_uint2(FUSED_PACK(low_x, low_y), FUSED_PACK(high_x, high_y));
}

/* ---- The kernel for many images: a warp a group ---- */

#define VERTICES_BLOCK 256

template <bool Wide>
static __global__ void __launch_bounds__(VERTICES_BLOCK, 4)
    fused_vertices_kernel(const __grid_constant__ fused_job job)
{
    __shared__ float2 gradients[FUSED_GRADIENTS];
    fused_fill_gradients(job.input.gradients, gradients);
    uint64_t task = ((uint64_t)blockIdx.x * VERTICES_BLOCK + threadIdx.x) / FUSED_WARP;
    uint32_t place = (uint32_t)(task / job.groups), g = (uint32_t)(task % job.groups);
    if (place >= job.count)
        return;
    fused_image image = fused_image_at(job, place);
    if (g >= image.groups)
        return;
    fused_group group = fused_group_at(image, g);
    fused_begin_units(job, image, group, threadIdx.x % FUSED_WARP, FUSED_WARP);
    __syncwarp();
    struct atom_point point = group.start;
#pragma unroll 1
    for (uint32_t pair = 0; pair < image.pairs; pair++) {
        fused_steps steps = fused_steps_of(group.key, gradients, group.vertex, pair, group.p, group.advance);
        point.x = fmaf(group.cosine, steps.even.x, point.x);
        point.y = fmaf(group.sine, steps.even.y, point.y);
        int2 even = make_int2((int)point.x, (int)point.y);
        point.x = fmaf(group.cosine, steps.odd.x, point.x);
        point.y = fmaf(group.sine, steps.odd.y, point.y);
        fused_store_unit<Wide>(job, group.first_unit + pair, even, make_int2((int)point.x, (int)point.y));
    }
}

/* ---- The kernel for few images: a block a group, its orbits at once ---- */

#define SPLIT_BLOCK 1024
#define SPLIT_PAIRS 96 /* pairs of orbits in shared memory at a time */
#define SPLIT_BYTES (SPLIT_PAIRS * FUSED_WARP * sizeof(fused_steps))

/* Adds up the steps of one axis, in place: only this is serial. */
static __device__ __forceinline__ float fused_add_up(float *steps, uint32_t orbits, float direction,
                                                     float position)
{
#pragma unroll 8
    for (uint32_t k = 0; k < orbits; k++) {
        /* fused_steps of a pair are four floats: x, y, x, y */
        float *step = steps + (size_t)(k >> 1) * FUSED_WARP * 4 + (k & 1) * 2;
        position = fmaf(direction, *step, position);
        *step = position;
    }
    return position;
}

template <bool Wide>
static __global__ void __launch_bounds__(SPLIT_BLOCK)
    fused_vertices_split_kernel(const __grid_constant__ fused_job job)
{
    extern __shared__ float4 split_steps[];
    __shared__ float2 gradients[FUSED_GRADIENTS];
    fused_fill_gradients(job.input.gradients, gradients);
    uint32_t warp = threadIdx.x / FUSED_WARP, lane = threadIdx.x % FUSED_WARP;
    const uint32_t warps = SPLIT_BLOCK / FUSED_WARP;
    fused_image image = fused_image_at(job, blockIdx.x / job.groups);
    if (blockIdx.x % job.groups >= image.groups)
        return;
    fused_group group = fused_group_at(image, blockIdx.x % job.groups);
    fused_begin_units(job, image, group, threadIdx.x, SPLIT_BLOCK);
    float position = warp == 0 ? group.start.x : group.start.y;
    for (uint32_t begin = 0; begin < image.pairs; begin += SPLIT_PAIRS) {
        uint32_t count = min(image.pairs - begin, (uint32_t)SPLIT_PAIRS);
        for (uint32_t i = warp; i < count; i += warps) {
            fused_steps steps =
                fused_steps_of(group.key, gradients, group.vertex, begin + i, group.p, group.advance);
            split_steps[i * FUSED_WARP + lane] =
                make_float4(steps.even.x, steps.even.y, steps.odd.x, steps.odd.y);
        }
        __syncthreads();
        if (warp < 2)
            position = fused_add_up(reinterpret_cast<float *>(split_steps + lane) + warp, 2 * count,
                                    warp == 0 ? group.cosine : group.sine, position);
        __syncthreads();
        for (uint32_t i = warp; i < count; i += warps) {
            float4 at = split_steps[i * FUSED_WARP + lane];
            fused_store_unit<Wide>(job, group.first_unit + begin + i, make_int2((int)at.x, (int)at.y),
                                   make_int2((int)at.z, (int)at.w));
        }
        __syncthreads();
    }
}

/* ---- Which images first ---- */

#define ORDER_BLOCK 1024

/* Puts the images of the slice (at most ORDER_BLOCK) in order of falling work, so that no long one comes
 * last: the place of each is the number of those before it. One block. */
static __global__ void __launch_bounds__(ORDER_BLOCK)
    fused_order_kernel(const __grid_constant__ fused_job job)
{
    __shared__ uint64_t work[ORDER_BLOCK];
    uint32_t i = threadIdx.x;
    if (i < job.count) {
        struct synth_image id = synth_image_at(job.input.first, job.input.batch, job.input.class_count,
                                               fused_run(job), job.begin + i);
        const struct atom_class &class_ = job.input.classes[id.class_index];
        work[i] = (uint64_t)class_.vertices * class_.orbits;
    }
    __syncthreads();
    if (i >= job.count)
        return;
    uint32_t before = 0;
    for (uint32_t k = 0; k < job.count; k++)
        before += work[k] > work[i] || (work[k] == work[i] && k < i);
    job.order[before] = i;
}

#endif
