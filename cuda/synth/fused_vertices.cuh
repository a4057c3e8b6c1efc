/* First kernel of `fused`: computes the ends of all lines. */
#ifndef FDSL_CUDA_SYNTH_FUSED_VERTICES_CUH
#define FDSL_CUDA_SYNTH_FUSED_VERTICES_CUH

#include "synth/fused.cuh"

/* ---- Noise ---- */

/* Returns the same value as noise_of_draw() with fewer instructions; only the sign of a zero may differ.
 * `make check-gpu` compares all 2^32 draws.
 *
 * noise_of_draw() returns the noise at position cell + t, with t in [0, 1). The cell and t are bits 8 to 39
 * of draw * 10000 = 16 * (625 draw). These are the low word of floor(625 draw / 16) = 39 draw + floor(draw /
 * 16). The upper 8 bits of this word are the cell, the lower 24 are t * 2^24. The code keeps t scaled by
 * 2^24. The constants of the polynomial contain the inverse powers of two, and the gradients contain 2^-24.
 * Scaling by powers of two is exact here, because no value comes near the limits of float's range. */
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

/* Fills the table of fused_noise() with the gradients at both ends of each cell. All threads of the block
 * must call this. */
static __device__ __forceinline__ void fused_fill_gradients(const float *gradients, float2 *table)
{
    for (uint32_t i = threadIdx.x; i < FUSED_GRADIENTS; i += blockDim.x)
        table[i] = make_float2(gradients[i] * 0x1p-24f, gradients[i + 1] * 0x1p-24f);
    __syncthreads();
}

/* ---- A group: the vertices of a warp, one per lane ---- */

struct fused_group {
    struct image_input input;
    uint32_t vertex;
    float cosine, sine, advance;
    struct atom_point start;
    uint32_t quads;    /* number of units */
    size_t first_unit; /* index of the group's first unit */
};

/* The step lengths of a vertex per axis, in an even orbit and in the odd orbit after it. The caller
 * multiplies them by the vertex's direction. */
struct fused_steps {
    float2 even, odd;
};

/* Returns the step lengths in orbits 2 pair and 2 pair + 1. */
static __device__ __forceinline__ fused_steps fused_steps_of(const fused_group &group,
                                                             const float2 *gradients, uint32_t pair)
{
    struct philox_block block = atom_noise_block(group.input.key, 0, group.vertex, pair);
    float p = group.input.class_.noise;
    fused_steps steps;
    steps.even.x = fmaf(-p, fused_noise(gradients, block.word[0]), group.advance);
    steps.even.y = fmaf(-p, fused_noise(gradients, block.word[1]), group.advance);
    steps.odd.x = fmaf(-p, fused_noise(gradients, block.word[2]), group.advance);
    steps.odd.y = fmaf(-p, fused_noise(gradients, block.word[3]), group.advance);
    return steps;
}

/* Returns the values that the orbits of a unit paint, with 0 for orbits beyond the last one. */
static __device__ __forceinline__ uint4 fused_values(const struct image_input &input, uint32_t quad)
{
    struct philox_block block = atom_gray_block(input.key, 0, quad);
    uint32_t values[FUSED_ORBITS];
#pragma unroll
    for (uint32_t k = 0; k < FUSED_ORBITS; k++) {
        uint32_t orbit = quad * FUSED_ORBITS + k;
        values[k] = orbit < input.class_.orbits
                        ? (orbit + 1) << 8 | atom_gray_of_draw(&input.rules, block.word[k])
                        : 0;
    }
    return make_uint4(values[0], values[1], values[2], values[3]);
}

/* Writes the struct fused_card and the label of image `place`. */
static __device__ __forceinline__ void fused_write_card(const fused_job &job, const struct image_input &input,
                                                        uint32_t place, uint32_t units)
{
    const struct synth_output &output = job.output;
    const fused_call call = fused_call_of(job);
    size_t bytes = (size_t)output.res * output.res * output.channels * dtype_bytes(output.type);
    fused_card card = {job.canvases ? job.canvases + place * bytes
                                    : call.images + (job.begin + place) * bytes,
                       {0, 0},
                       units};
    if (output.fit == OUTPUT_CROP)
        card.corner = output_crop(input.key, input.res, output.res);
    job.cards[place] = card;
    call.labels[job.begin + place] = input.class_.id;
}

/* Opens group `number` of the image with rank `rank` by work (fused_place()); returns false if there is none.
 * The calling thread initialises units `first`, `first` + `step`, ... of the group as invisible. Lanes after
 * the last vertex use vertex 0. The first of these lanes closes the polygon. Lines between two of them have
 * length 0. */
static __device__ __forceinline__ bool fused_open_group(const fused_job &job, uint32_t rank, uint32_t number,
                                                        uint32_t first, uint32_t step, fused_group *self)
{
    uint32_t place = fused_place(job, rank), v = number * FUSED_LINES + threadIdx.x % FUSED_WARP;
    const fused_number of = fused_number_at(job, place);
    self->input = image_input_at(job.input, job.input.classes, job.input.spoke_offset, of.run, of.j);
    const struct image_input &input = self->input;
    uint32_t groups = (input.class_.vertices + FUSED_LINES - 1) / FUSED_LINES;
    if (number >= groups)
        return false;
    self->quads = (input.class_.orbits + FUSED_ORBITS - 1) / FUSED_ORBITS;
    self->first_unit = fused_first_unit(job, place) + (size_t)number * self->quads;
    self->vertex = v < input.class_.vertices ? v : 0;
    self->cosine = input.spokes.cosine[self->vertex];
    self->sine = input.spokes.sine[self->vertex];
    self->advance = input.spokes.advance[self->vertex];
    const struct line_shape shape = image_shape(input);
    self->start = line_start(&shape, self->cosine, self->sine);
    for (uint32_t quad = first; quad < self->quads; quad += step) {
        job.boxes[self->first_unit + quad] = make_uint2(FUSED_NOWHERE, FUSED_NOWHERE);
        job.values[self->first_unit + quad] = fused_values(input, quad);
    }
    if (number == 0 && first == 0)
        fused_write_card(job, input, place, groups * self->quads);
    /* The key is equal in all lanes. The reduction lets the compiler keep it in uniform registers. */
    self->input.key.word[0] = __reduce_or_sync(FUSED_ALL, input.key.word[0]);
    self->input.key.word[1] = __reduce_or_sync(FUSED_ALL, input.key.word[1]);
    return true;
}

/* ---- Units ---- */

static __device__ __forceinline__ void fused_store_end(fused_end<false> *end, const int2 at[FUSED_ORBITS])
{
    *reinterpret_cast<uint4 *>(end) = make_uint4(FUSED_PACK(at[0].x, at[0].y), FUSED_PACK(at[1].x, at[1].y),
                                                 FUSED_PACK(at[2].x, at[2].y), FUSED_PACK(at[3].x, at[3].y));
}

static __device__ __forceinline__ void fused_store_end(fused_end<true> *end, const int2 at[FUSED_ORBITS])
{
    reinterpret_cast<int4 *>(end)[0] = make_int4(at[0].x, at[0].y, at[1].x, at[1].y);
    reinterpret_cast<int4 *>(end)[1] = make_int4(at[2].x, at[2].y, at[3].x, at[3].y);
}

struct fused_box {
    int32_t low_x, low_y, high_x, high_y;
};

/* Returns the bounding box of all lanes' ends. */
static __device__ __forceinline__ fused_box fused_box_of(const int2 at[FUSED_ORBITS])
{
    return {__reduce_min_sync(FUSED_ALL, min(min(at[0].x, at[1].x), min(at[2].x, at[3].x))),
            __reduce_min_sync(FUSED_ALL, min(min(at[0].y, at[1].y), min(at[2].y, at[3].y))),
            __reduce_max_sync(FUSED_ALL, max(max(at[0].x, at[1].x), max(at[2].x, at[3].x))),
            __reduce_max_sync(FUSED_ALL, max(max(at[0].y, at[1].y), max(at[2].y, at[3].y)))};
}

/* Returns whether a box touches the image. `last` is the index of the image's last row and column. */
static __device__ __forceinline__ bool fused_visible(const fused_box &box, int32_t last)
{
    return box.low_x <= last && box.low_y <= last && box.high_x >= 0 && box.high_y >= 0;
}

/* Stores a unit: each lane stores its end to `ends`, and lane 0 stores the box to `*to`. */
template <bool Wide>
static __device__ __forceinline__ void fused_store_unit(fused_box box, int32_t last, uint2 *to,
                                                        fused_end<Wide> *ends, const int2 at[FUSED_ORBITS])
{
    uint32_t lane = threadIdx.x % FUSED_WARP;
    fused_store_end(ends + lane, at);
    if (Wide) { /* clamp, so that corners can be packed; no tile extends beyond the image */
        box.low_x = max(box.low_x, -1);
        box.low_y = max(box.low_y, -1);
        box.high_x = min(box.high_x, last);
        box.high_y = min(box.high_y, last);
    }
    if (lane == 0)
        *to = make_uint2(FUSED_PACK(box.low_x, box.low_y), FUSED_PACK(box.high_x, box.high_y));
}

/* ---- Groups that stay outside the image ----
 *
 * A group is done when its distance from the image exceeds the distance that it can move in the remaining
 * orbits. Per orbit, a vertex moves along x by cosine * (advance - p * noise), and the noise is bounded. In a
 * cell with gradients g and h, the noise is a mean of g t and h (t - 1), with weights 1 - fade and fade. Its
 * magnitude is therefore at most max(|g|, |h|) * (t + fade (1 - 2 t)) <= max(|g|, |h|) / 2. */

#define FUSED_NOISE_LIMIT (0.5f * NOISE_LIMIT)

/* Upper bounds on the movement of a group's vertices per orbit, in pixels. */
struct fused_drift {
    float left, right, up, down;
};

/* Returns the maximum of 0 and all lanes' values. The bit patterns of non-negative floats have the order of
 * the floats. */
static __device__ __forceinline__ float fused_largest(float value)
{
    return __uint_as_float(__reduce_max_sync(FUSED_ALL, __float_as_uint(fmaxf(value, 0.0f))));
}

template <bool Wide> static __device__ __forceinline__ fused_drift fused_drift_of(const fused_group &group)
{
    /* Upper bound of the rounding error per orbit, for positions below 2^23 (Wide) or 2^14. */
    const float rounding = Wide ? 1.0f : 0x1p-8f;
    float noise = fabsf(group.input.class_.noise) * FUSED_NOISE_LIMIT;
    float either_x = fmaf(fabsf(group.cosine), noise, rounding), right = group.cosine * group.advance;
    float either_y = fmaf(fabsf(group.sine), noise, rounding), down = group.sine * group.advance;
    return {fused_largest(either_x - right), fused_largest(either_x + right), fused_largest(either_y - down),
            fused_largest(either_y + down)};
}

/* Returns whether a group whose ends are in `box` stays invisible in the next `orbits` orbits. */
static __device__ __forceinline__ bool fused_gone(const fused_box &box, const fused_drift &drift,
                                                  int32_t last, uint32_t orbits)
{
    float left = fmaf(drift.left, (float)orbits, 2.0f), right = fmaf(drift.right, (float)orbits, 2.0f);
    float up = fmaf(drift.up, (float)orbits, 2.0f), down = fmaf(drift.down, (float)orbits, 2.0f);
    return (float)(box.low_x - last) > left || (float)-box.high_x > right || (float)(box.low_y - last) > up ||
           (float)-box.high_y > down;
}

/* ---- The kernel for many images: one warp per group ---- */

/* A block has few warps, because warps end at different times and a block frees its resources only after its
 * last warp. */
#define VERTICES_BLOCK 64

static __device__ __forceinline__ int2 fused_pixel(struct atom_point point)
{
    return make_int2((int)point.x, (int)point.y);
}

/* Moves a vertex by a pair of orbits and returns its pixel after each of them. */
static __device__ __forceinline__ void fused_walk_pair(const fused_group &group, const float2 *gradients,
                                                       uint32_t pair, struct atom_point *point, int2 at[2])
{
    fused_steps steps = fused_steps_of(group, gradients, pair);
    point->x = fmaf(group.cosine, steps.even.x, point->x);
    point->y = fmaf(group.sine, steps.even.y, point->y);
    at[0] = fused_pixel(*point);
    point->x = fmaf(group.cosine, steps.odd.x, point->x);
    point->y = fmaf(group.sine, steps.odd.y, point->y);
    at[1] = fused_pixel(*point);
}

template <bool Wide>
static __global__ void __launch_bounds__(VERTICES_BLOCK, 16)
    fused_vertices_kernel(const __grid_constant__ fused_job job)
{
    __shared__ float2 gradients[FUSED_GRADIENTS];
    fused_fill_gradients(job.input.gradients, gradients);
    uint64_t task = ((uint64_t)blockIdx.x * VERTICES_BLOCK + threadIdx.x) / FUSED_WARP;
    uint32_t rank = (uint32_t)(task / job.groups), number = (uint32_t)(task % job.groups);
    fused_group group;
    if (rank >= job.count ||
        !fused_open_group(job, rank, number, threadIdx.x % FUSED_WARP, FUSED_WARP, &group))
        return;
    __syncwarp();
    struct atom_point point = group.start;
    fused_drift drift = fused_drift_of<Wide>(group);
    int32_t last = (int32_t)job.input.res - 1;
    uint2 *to = job.boxes + group.first_unit;
    fused_end<Wide> *ends = static_cast<fused_end<Wide> *>(job.ends) + group.first_unit * FUSED_WARP;
#pragma unroll 1
    for (uint32_t quad = 0; quad < group.quads; quad++, to++, ends += FUSED_WARP) {
        int2 at[FUSED_ORBITS];
        fused_walk_pair(group, gradients, 2 * quad, &point, at);
        fused_walk_pair(group, gradients, 2 * quad + 1, &point, at + 2);
        fused_box box = fused_box_of(at);
        if (fused_visible(box, last))
            fused_store_unit<Wide>(box, last, to, ends, at);
        else if (fused_gone(box, drift, last, (group.quads - quad - 1) * FUSED_ORBITS))
            return;
    }
}

/* ---- The kernel for few images: one block per group, orbits in parallel ---- */

#define SPLIT_BLOCK 512
#define SPLIT_QUADS 48 /* units processed at a time in shared memory */

/* Rows in shared memory, one per orbit and axis. A row contains the steps of 32 vertices, and later their
 * positions. */
#define SPLIT_ROWS  (SPLIT_QUADS * FUSED_ORBITS * 2)
#define SPLIT_BYTES (SPLIT_ROWS * FUSED_WARP * sizeof(float))

/* Replaces the steps along one axis by positions: `position` plus the running sum of steps. An axis uses
 * every other row. Returns the last position. Only this function is serial over the orbits. It issues the
 * loads of two units before it uses the loaded steps. */
static __device__ __forceinline__ float fused_add_up(float *row, uint32_t quads, float direction,
                                                     float position)
{
    const uint32_t stride = 2 * FUSED_WARP;
#pragma unroll 1
    for (uint32_t quad = 0; quad < quads; quad += 2, row += 2 * FUSED_ORBITS * stride) {
        /* If `quads` is odd, the last iteration also loads the unit after the last one. The buffer has room
         * for that unit. */
        float steps[2 * FUSED_ORBITS];
#pragma unroll
        for (uint32_t k = 0; k < 2 * FUSED_ORBITS; k++)
            steps[k] = row[k * stride];
#pragma unroll
        for (uint32_t k = 0; k < 2 * FUSED_ORBITS; k++) {
            position = quad + k / FUSED_ORBITS < quads ? fmaf(direction, steps[k], position) : position;
            row[k * stride] = position;
        }
    }
    return position;
}

/* Stores the steps of unit `quad` in its eight rows. */
static __device__ __forceinline__ void fused_fill_rows(const fused_group &group, const float2 *gradients,
                                                       uint32_t quad, float *rows)
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++, rows += 4 * FUSED_WARP) {
        fused_steps steps = fused_steps_of(group, gradients, 2 * quad + half);
        rows[0 * FUSED_WARP] = steps.even.x;
        rows[1 * FUSED_WARP] = steps.even.y;
        rows[2 * FUSED_WARP] = steps.odd.x;
        rows[3 * FUSED_WARP] = steps.odd.y;
    }
}

template <bool Wide>
static __global__ void __launch_bounds__(SPLIT_BLOCK)
    fused_vertices_split_kernel(const __grid_constant__ fused_job job)
{
    extern __shared__ float split_rows[];
    __shared__ float2 gradients[FUSED_GRADIENTS];
    fused_fill_gradients(job.input.gradients, gradients);
    const uint32_t warp = threadIdx.x / FUSED_WARP, lane = threadIdx.x % FUSED_WARP;
    const uint32_t warps = SPLIT_BLOCK / FUSED_WARP, unit_rows = 2 * FUSED_ORBITS * FUSED_WARP;
    fused_group group;
    if (!fused_open_group(job, blockIdx.x / job.groups, blockIdx.x % job.groups, threadIdx.x, SPLIT_BLOCK,
                          &group))
        return;
    fused_end<Wide> *ends = static_cast<fused_end<Wide> *>(job.ends);
    int32_t last = (int32_t)job.input.res - 1;
    float position = warp == 0 ? group.start.x : group.start.y;
    for (uint32_t begin = 0; begin < group.quads; begin += SPLIT_QUADS) {
        uint32_t count = min(group.quads - begin, (uint32_t)SPLIT_QUADS);
        for (uint32_t i = warp; i < count; i += warps)
            fused_fill_rows(group, gradients, begin + i, split_rows + i * unit_rows + lane);
        __syncthreads();
        if (warp < 2)
            position = fused_add_up(split_rows + warp * FUSED_WARP + lane, count,
                                    warp == 0 ? group.cosine : group.sine, position);
        __syncthreads();
        for (uint32_t i = warp; i < count; i += warps) {
            size_t unit = group.first_unit + begin + i;
            const float *rows = split_rows + i * unit_rows + lane;
            int2 at[FUSED_ORBITS];
#pragma unroll
            for (uint32_t k = 0; k < FUSED_ORBITS; k++)
                at[k] = fused_pixel({rows[2 * k * FUSED_WARP], rows[(2 * k + 1) * FUSED_WARP]});
            fused_box box = fused_box_of(at);
            if (fused_visible(box, last))
                fused_store_unit<Wide>(box, last, job.boxes + unit, ends + unit * FUSED_WARP, at);
        }
        __syncthreads();
    }
}

/* ---- Order of images ---- */

#define ORDER_BLOCK 1024

/* Orders the images of the slice (at most ORDER_BLOCK) by decreasing work, so that no image with much work
 * starts last. The rank of an image is the number of images before it. Launch with one block. */
static __global__ void __launch_bounds__(ORDER_BLOCK)
    fused_order_kernel(const __grid_constant__ fused_job job)
{
    __shared__ uint64_t work[ORDER_BLOCK];
    uint32_t i = threadIdx.x;
    if (i < job.count) {
        const fused_number of = fused_number_at(job, i);
        struct synth_image id =
            synth_image_at(job.input.first, job.input.stride, job.input.turns, of.run, of.j);
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
