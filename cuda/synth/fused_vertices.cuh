/* First kernel of `fused`: computes the ends of all lines. */
#ifndef FDSL_CUDA_SYNTH_FUSED_VERTICES_CUH
#define FDSL_CUDA_SYNTH_FUSED_VERTICES_CUH

#include "common/shared.cuh"
#include "common/stream.cuh"
#include "synth/fused.cuh"

/* ---- Noise ---- */

#define FUSED_GRADIENTS NOISE_PERIOD

/* Returns the same value as noise_of_draw() with fewer instructions; only the sign of a zero may differ.
 * `make check-gpu` compares all 2^32 draws.
 *
 * noise_of_draw() returns the noise at position cell + t, with t in [0, 1). The cell and t are bits 8 to 39
 * of draw * 10000 = 16 * (625 draw). These are the low word of floor(625 draw / 16) = 39 draw + floor(draw /
 * 16). The upper 8 bits of this word are the cell, the lower 24 are t * 2^24. The code keeps t scaled by
 * 2^24. The constants of the polynomial contain the inverse powers of two, and the gradients contain 2^-24.
 * Scaling by powers of two is exact here, because no value comes near the limits of float's range.
 * `gradients`: shared address of the table of fused_fill_gradients(). */
static __device__ __forceinline__ float fused_noise(uint32_t gradients, uint32_t draw)
{
    static_assert(NOISE_RANGE == 10000 && NOISE_PERIOD == 256, "39, 4 and 24 follow from these");
    const uint32_t place = 39 * draw + (draw >> 4);
    const uint2 both = shared_load2(gradients + (place >> 24) * (uint32_t)sizeof(float2));
    const float2 gradient = make_float2(__uint_as_float(both.x), __uint_as_float(both.y));
    float t = (float)(place & 0xFFFFFF);
    float fade = t * t * t * fmaf(fmaf(t, 6 * 0x1p-120f, -15 * 0x1p-96f), t, 10 * 0x1p-72f);
    float from_left = gradient.x * t;
    float rise = fmaf(gradient.y, t - 0x1p24f, -from_left);
    return fmaf(fade, rise, from_left);
}

/* Fills the table of fused_noise() with the gradients at both ends of each cell. `threads` threads call this,
 * each with its own number; then the block waits. */
static __device__ __forceinline__ void fused_fill_gradients(const float *gradients, float2 *table,
                                                            uint32_t thread, uint32_t threads)
{
    for (uint32_t i = thread; i < FUSED_GRADIENTS; i += threads)
        table[i] = make_float2(gradients[i] * 0x1p-24f, gradients[i + 1] * 0x1p-24f);
}

/* ---- Shapes ---- */

/* The shapes of an image that has several. A warp or a block computes them once, in shared memory. */
struct fused_shapes {
    struct philox_key key; /* of the image */
    struct line_shape shape[FUSED_WARP];
    /* The numbers of groups, units and orbits of the shapes before each one. The last entry has the totals.
     */
    uint32_t groups[FUSED_WARP + 1], units[FUSED_WARP + 1], orbits[FUSED_WARP + 1];
};

/* Shapes in shared memory; empty if the formula has one shape per image. */
struct fused_no_shapes {
};
template <formula_id Formula>
using fused_shapes_memory =
    std::conditional_t<(line_rules_of(Formula).shapes > 1), struct fused_shapes, struct fused_no_shapes>;

static __device__ __forceinline__ uint32_t fused_groups_of(const struct atom_class &class_)
{
    return (class_.vertices + FUSED_LINES - 1) / FUSED_LINES;
}

static __device__ __forceinline__ uint32_t fused_quads_of(uint32_t orbits)
{
    return (orbits + FUSED_ORBITS - 1) / FUSED_ORBITS;
}

/* Returns the identity of image `place`. */
static __device__ __forceinline__ struct synth_image fused_image_at(const fused_job &job, uint32_t place)
{
    const fused_number of = fused_number_at(job, place);
    return synth_image_at(job.input.first, job.input.stride, job.input.turns, of.run, of.j);
}

/* Computes the shapes of image `place`, one per lane. All lanes of one warp must call this. */
template <formula_id Formula>
static __device__ __forceinline__ void fused_fill_shapes(const fused_job &job, uint32_t place,
                                                         struct fused_shapes *self)
{
    constexpr struct line_rules rules = line_rules_of(Formula);
    static_assert(rules.shapes <= FUSED_WARP, "a lane per shape");
    const struct device_input &input = job.input;
    const uint32_t lane = threadIdx.x % FUSED_WARP;
    const struct synth_image id = fused_image_at(job, place);
    struct philox_key key = atom_image_key(&rules, input.seed, 0, id.instance);
    struct line_shape shape = line_shape(&rules, key, lane, input.classes, 0, input.class_count, input.res);
    uint32_t groups = 0, units = 0, orbits = 0;
    if (lane < rules.shapes) {
        const struct atom_class &class_ = input.classes[shape.class_index];
        groups = fused_groups_of(class_);
        units = groups * fused_quads_of(class_.orbits);
        orbits = class_.orbits;
    }
    self->shape[lane] = shape;
    if (lane == 0) {
        self->key = key;
        self->groups[0] = self->units[0] = self->orbits[0] = 0;
    }
    self->groups[lane + 1] = fused_running_sum(groups);
    self->units[lane + 1] = fused_running_sum(units);
    self->orbits[lane + 1] = fused_running_sum(orbits);
}

/* ---- A group: the vertices of a warp, one per lane ---- */

struct fused_group {
    struct philox_key key; /* of the image */
    float noise;           /* of the class */
    uint32_t orbits;
    uint32_t number; /* of the class */
    uint32_t slot;   /* number of the shape in its image */
    uint32_t before; /* number of orbits of the shapes before */
    uint32_t vertex;
    float cosine, sine, advance;
    struct atom_point start;
    size_t first_unit; /* index of the group's first unit; it has fused_quads_of(orbits) units */
};

/* The step lengths of a vertex per axis, in an even orbit and in the odd orbit after it. The caller
 * multiplies them by the vertex's direction. */
struct fused_steps {
    float2 even, odd;
};

/* The part of atom_noise_block() that is the same in all orbits of a vertex. The first three rounds of Philox
 * multiply five different words, but only two of them depend on the orbit. */
struct fused_draws {
    uint32_t start;                                     /* word 0 of the key */
    uint32_t second, third_even, third_odd, third_last; /* what rounds 1 and 2 combine with these two */
    struct philox_key keys[PHILOX_ROUNDS - 3];          /* of the other rounds */
};

/* Many: the draws of many orbits follow. The round keys then are in uniform registers. */
template <bool Many> static __device__ __forceinline__ fused_draws fused_draws_of(const fused_group &group)
{
    uint32_t high, low, low_second;
    const struct philox_key first = philox_round_key(group.key, 1), second = philox_round_key(group.key, 2);
    fused_draws self;
    self.start = group.key.word[0];
    philox_multiply(PHILOX_M0, group.vertex, &high, &low);
    self.second = keep(low ^ first.word[1]);
    philox_multiply(PHILOX_M1, high ^ group.slot ^ group.key.word[1], &high, &low_second);
    self.third_even = keep(low_second ^ second.word[0]);
    philox_multiply(PHILOX_M0, high ^ first.word[0], &high, &low);
    self.third_odd = keep(high ^ second.word[1]);
    self.third_last = keep(low);
#pragma unroll
    for (uint32_t round = 3; round < PHILOX_ROUNDS; round++) {
        struct philox_key key = philox_round_key(group.key, round);
        if (Many)
            key = {{fused_uniform(key.word[0]), fused_uniform(key.word[1])}};
        self.keys[round - 3] = key;
    }
    return self;
}

/* Returns atom_noise_block() of the vertex and a pair of orbits. */
static __device__ __forceinline__ struct philox_block fused_draw(const fused_draws &draws, uint32_t pair)
{
    uint32_t high, low;
    struct philox_block block;
    philox_multiply(PHILOX_M0, pair ^ draws.start, &high, &low);
    block.word[2] = low ^ draws.third_odd;
    block.word[3] = draws.third_last;
    philox_multiply(PHILOX_M1, high ^ draws.second, &high, &block.word[1]);
    block.word[0] = high ^ draws.third_even;
#pragma unroll
    for (uint32_t round = 3; round < PHILOX_ROUNDS; round++)
        block = philox_round(block, draws.keys[round - 3]);
    return block;
}

/* Returns the step lengths in orbits 2 pair and 2 pair + 1. */
static __device__ __forceinline__ fused_steps fused_steps_of(const fused_group &group,
                                                             const fused_draws &draws, uint32_t gradients,
                                                             uint32_t pair)
{
    struct philox_block block = fused_draw(draws, pair);
    float p = group.noise;
    fused_steps steps;
    steps.even.x = fmaf(-p, fused_noise(gradients, block.word[0]), group.advance);
    steps.even.y = fmaf(-p, fused_noise(gradients, block.word[1]), group.advance);
    steps.odd.x = fmaf(-p, fused_noise(gradients, block.word[2]), group.advance);
    steps.odd.y = fmaf(-p, fused_noise(gradients, block.word[3]), group.advance);
    return steps;
}

/* Returns the words that the orbits of unit `quad` paint, with 0 for orbits beyond the last one. */
template <formula_id Formula>
static __device__ __forceinline__ uint4 fused_values(const fused_group &group, uint32_t quad)
{
    constexpr struct line_rules rules = line_rules_of(Formula);
    struct philox_block block = atom_gray_block(group.key, group.slot, quad);
    uint32_t values[FUSED_ORBITS];
#pragma unroll
    for (uint32_t k = 0; k < FUSED_ORBITS; k++) {
        uint32_t orbit = quad * FUSED_ORBITS + k, gray = atom_gray_of_draw(&rules, block.word[k]);
        uint32_t value = rules.masked ? (group.before + orbit + 1) << FUSED_MASK_ORDER |
                                            group.number << FUSED_MASK_SHIFT | gray
                                      : (orbit + 1) << FUSED_ORDER | gray;
        values[k] = orbit < group.orbits ? value : 0;
    }
    return make_uint4(values[0], values[1], values[2], values[3]);
}

/* Writes the struct fused_card and the label of image `place`. The label is 0 if images have several shapes.
 * `middle`: of the shape, or of the canvas. */
template <formula_id Formula>
static __device__ __forceinline__ void fused_write_card(const fused_job &job, const struct image_input &input,
                                                        uint32_t rank, uint32_t place, uint32_t units,
                                                        const struct atom_point &middle)
{
    constexpr struct line_rules rules = line_rules_of(Formula);
    const struct synth_output &output = job.output;
    const fused_call call = fused_call_of(job);
    size_t pixels = (size_t)output.res * output.res,
           bytes = pixels * output.channels * dtype_bytes(output.type);
    fused_card card = {job.canvases ? job.canvases + place * bytes
                                    : call.images + (job.begin + place) * bytes,
                       nullptr,
                       {0, 0},
                       units,
                       place,
                       0,
                       0};
    if (rules.masked && call.masks)
        card.mask =
            job.canvases ? job.mask_canvases + place * pixels : call.masks + (job.begin + place) * pixels;
    if (output.fit == OUTPUT_CROP)
        card.corner = output_crop(input.key, input.res, output.res);
    const float scale = output.fit == OUTPUT_RESIZE ? (float)output.res / (float)input.res : 1.0f;
    card.middle_x = (middle.x - (float)card.corner.x) * scale / (float)job.tiling.out_width - 0.5f;
    card.middle_y = (middle.y - (float)card.corner.y) * scale / (float)job.tiling.out_height - 0.5f;
    job.cards[rank] = card;
    if (rules.shapes == 1)
        call.labels[job.begin + place] = input.class_.id;
    else
        call.labels[job.begin + place] = 0;
}

/* Sets the fields of a group of a shape, except `slot` and `before`. `number`: of the group in its shape.
 * Lanes after the last vertex use vertex 0. The first of these lanes closes the polygon. Lines between two of
 * them have length 0. */
static __device__ __forceinline__ void fused_set_group(const struct image_input &input,
                                                       const struct line_shape &shape, uint32_t number,
                                                       size_t first_unit, fused_group *self)
{
    const uint32_t v = number * FUSED_LINES + threadIdx.x % FUSED_WARP;
    self->key = input.key;
    self->noise = input.class_.noise;
    self->orbits = input.class_.orbits;
    self->number = input.class_.id;
    self->vertex = v < input.class_.vertices ? v : 0;
    self->cosine = input.spokes.cosine[self->vertex];
    self->sine = input.spokes.sine[self->vertex];
    self->advance = input.spokes.advance[self->vertex];
    self->start = line_start(&shape, self->cosine, self->sine);
    self->first_unit = first_unit + (size_t)number * fused_quads_of(self->orbits);
}

/* Returns the parameters of an image with one shape, whose identity is `id`. The key is unset. */
static __device__ __forceinline__ struct image_input fused_input_of(const fused_job &job,
                                                                    const struct synth_image &id)
{
    return image_input_of(job.input, id.class_index, job.input.classes, job.input.spoke_offset);
}

/* Opens group `number` of image `place`, whose parameters are `input`, if it exists. `card`: this lane also
 * writes the card of the image, whose rank is `rank`. For formulas with one shape per image. */
template <formula_id Formula>
static __device__ __forceinline__ void
fused_open_group(const fused_job &job, const struct synth_image &id, struct image_input input, uint32_t rank,
                 uint32_t place, uint32_t number, bool card, fused_group *self)
{
    constexpr struct line_rules rules = line_rules_of(Formula);
    const uint32_t groups = fused_groups_of(input.class_);
    input.key = atom_image_key(&rules, job.input.seed, input.class_.id, id.instance);
    const struct line_shape shape = line_shape(&rules, input.key, 0, &input.class_, 0, 1, input.res);
    if (card)
        fused_write_card<Formula>(job, input, rank, place, groups * fused_quads_of(input.class_.orbits),
                                  shape.centre);
    if (number >= groups)
        return;
    self->slot = self->before = 0;
    fused_set_group(input, shape, number, fused_first_unit(job, place), self);
}

/* Opens group `number` of image `place`, which exists. Groups are counted over all shapes of the image. All
 * lanes of a warp must call this. `card`: as in the other function of this name. */
template <formula_id Formula>
static __device__ __forceinline__ void
fused_open_group(const fused_job &job, const struct fused_shapes &shapes, uint32_t rank, uint32_t place,
                 uint32_t number, bool card, fused_group *self)
{
    const uint32_t lane = threadIdx.x % FUSED_WARP;
    const uint32_t slot = __popc(__ballot_sync(FUSED_ALL, shapes.groups[lane + 1] <= number));
    const struct line_shape shape = shapes.shape[slot];
    struct image_input input =
        image_input_of(job.input, shape.class_index, job.input.classes, job.input.spoke_offset);
    input.key = shapes.key;
    self->slot = slot;
    self->before = shapes.orbits[slot];
    fused_set_group(input, shape, number - shapes.groups[slot],
                    fused_first_unit(job, place) + shapes.units[slot], self);
    if (card)
        fused_write_card<Formula>(job, input, rank, place, shapes.units[FUSED_WARP],
                                  {0.5f * (float)input.res, 0.5f * (float)input.res});
}

/* Initialises the group's units `first`, `first` + `step`, ... as invisible. */
template <formula_id Formula, uint32_t Parts>
static __device__ __forceinline__ void fused_begin_units(const fused_job &job, const fused_group &group,
                                                         uint32_t first, uint32_t step)
{
    for (uint32_t quad = first; quad < fused_quads_of(group.orbits); quad += step) {
        const size_t unit = group.first_unit + quad;
#pragma unroll
        for (uint32_t part = 0; part < Parts; part++)
            job.boxes[unit * Parts + part] = make_uint2(FUSED_NOWHERE, FUSED_NOWHERE);
        job.values[unit] = fused_values<Formula>(group, quad);
    }
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

/* Returns the bounding box of the lane's ends. */
static __device__ __forceinline__ fused_box fused_own_box(const int2 at[FUSED_ORBITS])
{
    return {
        min(min(at[0].x, at[1].x), min(at[2].x, at[3].x)), min(min(at[0].y, at[1].y), min(at[2].y, at[3].y)),
        max(max(at[0].x, at[1].x), max(at[2].x, at[3].x)), max(max(at[0].y, at[1].y), max(at[2].y, at[3].y))};
}

/* Returns the bounding box of all lanes' ends. `own`: of the lane's ends. */
static __device__ __forceinline__ fused_box fused_box_of(const fused_box &own)
{
    return {__reduce_min_sync(FUSED_ALL, own.low_x), __reduce_min_sync(FUSED_ALL, own.low_y),
            __reduce_max_sync(FUSED_ALL, own.high_x), __reduce_max_sync(FUSED_ALL, own.high_y)};
}

/* Returns whether a box touches the image. `last` is the index of the image's last row and column. */
static __device__ __forceinline__ bool fused_visible(const fused_box &box, int32_t last)
{
    return box.low_x <= last && box.low_y <= last && box.high_x >= 0 && box.high_y >= 0;
}

/* Returns the bounding box of the lines of the calling lane's part. `own`: of the lane's ends. */
static __device__ __forceinline__ fused_box fused_part_box(fused_box own)
{
    /* A line ends in the next lane. The last lane has no line. */
    fused_box box = {min(own.low_x, __shfl_down_sync(FUSED_ALL, own.low_x, 1)),
                     min(own.low_y, __shfl_down_sync(FUSED_ALL, own.low_y, 1)),
                     max(own.high_x, __shfl_down_sync(FUSED_ALL, own.high_x, 1)),
                     max(own.high_y, __shfl_down_sync(FUSED_ALL, own.high_y, 1))};
#pragma unroll
    for (uint32_t apart = 1; apart < FUSED_PART; apart *= 2)
        box = {min(box.low_x, __shfl_xor_sync(FUSED_ALL, box.low_x, apart)),
               min(box.low_y, __shfl_xor_sync(FUSED_ALL, box.low_y, apart)),
               max(box.high_x, __shfl_xor_sync(FUSED_ALL, box.high_x, apart)),
               max(box.high_y, __shfl_xor_sync(FUSED_ALL, box.high_y, apart))};
    return box;
}

/* Stores a unit: each lane stores its end to `ends`, and the first lane of each part stores its box to `to`.
 * `box`: of the unit. */
template <bool Wide, uint32_t Parts>
static __device__ __forceinline__ void fused_store_unit(fused_box box, int32_t last, uint2 *to,
                                                        fused_end<Wide> *ends, const int2 at[FUSED_ORBITS])
{
    const uint32_t lane = threadIdx.x % FUSED_WARP;
    fused_store_end(ends + lane, at);
    if (Parts > 1)
        box = fused_part_box(fused_own_box(at));
    if (Wide) { /* clamp, so that corners can be packed; no tile extends beyond the image */
        box.low_x = min(max(box.low_x, -1), last + 1);
        box.low_y = min(max(box.low_y, -1), last + 1);
        box.high_x = max(min(box.high_x, last), -1);
        box.high_y = max(min(box.high_y, last), -1);
    }
    if (lane % (FUSED_WARP / Parts) == 0)
        to[lane / (FUSED_WARP / Parts)] =
            make_uint2(FUSED_PACK(box.low_x, box.low_y), FUSED_PACK(box.high_x, box.high_y));
}

/* ---- Groups outside the image ----
 *
 * A group stays invisible for as long as its distance from the image exceeds the distance that it can move.
 * Per orbit, a vertex moves along x by cosine * (advance - p * noise), and the noise is bounded. In a cell
 * with gradients g and h, the noise is a mean of g t and h (t - 1), with weights 1 - fade and fade. Its
 * magnitude is therefore at most max(|g|, |h|) * (t + fade (1 - 2 t)) <= max(|g|, |h|) / 2. */

#define FUSED_NOISE_LIMIT (0.5f * NOISE_LIMIT)

/* The least number of units in which a group's vertices can move by a pixel; may be infinite. */
struct fused_drift {
    float left, right, up, down;
};

/* Returns the least number of units per pixel, over all lanes, for movements of `value` pixels per orbit. The
 * bit patterns of non-negative floats have the order of the floats. */
static __device__ __forceinline__ float fused_slowness(float value)
{
    const uint32_t most = __reduce_max_sync(FUSED_ALL, __float_as_uint(fmaxf(value, 0.0f)));
    return __fdividef(1 - 0x1p-16f, FUSED_ORBITS * __uint_as_float(most));
}

template <bool Wide> static __device__ __forceinline__ fused_drift fused_drift_of(const fused_group &group)
{
    /* Upper bound of the rounding error per orbit, for positions below 2^23 (Wide) or 2^14. */
    const float rounding = Wide ? 1.0f : 0x1p-8f;
    float noise = fabsf(group.noise) * FUSED_NOISE_LIMIT;
    float either_x = fmaf(fabsf(group.cosine), noise, rounding), right = group.cosine * group.advance;
    float either_y = fmaf(fabsf(group.sine), noise, rounding), down = group.sine * group.advance;
    return {fused_slowness(either_x - right), fused_slowness(either_x + right),
            fused_slowness(either_y - down), fused_slowness(either_y + down)};
}

/* Returns the number of further units in which a group stays invisible. `box`: of its ends in the latest
 * unit. The margin of two pixels covers the conversion to pixels and the rounding of this function, because
 * positions are below 2^23. */
static __device__ __forceinline__ uint32_t fused_hidden(const fused_box &box, const fused_drift &drift,
                                                        int32_t last)
{
    float x = fmaxf((float)(box.low_x - last - 2) * drift.left, (float)(-box.high_x - 2) * drift.right);
    float y = fmaxf((float)(box.low_y - last - 2) * drift.up, (float)(-box.high_y - 2) * drift.down);
    /* A product of 0 and infinity is NaN, which fmaxf() ignores; the conversion saturates. */
    return fused_uniform((uint32_t)fmaxf(fmaxf(x, y), 0.0f));
}

/* ---- The kernel for many images: one warp per group ---- */

/* A block has few warps, because warps end at different times and a block frees its resources only after its
 * last warp. */
#define VERTICES_BLOCK  64
#define VERTICES_BLOCKS 16                                              /* blocks per multiprocessor */
#define VERTICES_WARPS  (VERTICES_BLOCKS * VERTICES_BLOCK / FUSED_WARP) /* warps per multiprocessor */

static __device__ __forceinline__ int2 fused_pixel(struct atom_point point)
{
    return make_int2((int)point.x, (int)point.y);
}

/* Moves a vertex by the orbits of a unit and returns its pixel after each of them. */
static __device__ __forceinline__ void fused_walk_unit(const fused_group &group, const fused_draws &draws,
                                                       uint32_t gradients, uint32_t quad,
                                                       struct atom_point *point, int2 at[FUSED_ORBITS])
{
#pragma unroll
    for (uint32_t half = 0; half < FUSED_ORBITS / 2; half++) {
        fused_steps steps = fused_steps_of(group, draws, gradients, FUSED_ORBITS / 2 * quad + half);
        point->x = fmaf(group.cosine, steps.even.x, point->x);
        point->y = fmaf(group.sine, steps.even.y, point->y);
        at[2 * half] = fused_pixel(*point);
        point->x = fmaf(group.cosine, steps.odd.x, point->x);
        point->y = fmaf(group.sine, steps.odd.y, point->y);
        at[2 * half + 1] = fused_pixel(*point);
    }
}

/* Computes the vertices of a group, orbit by orbit, and stores the visible units. The number of units is
 * uniform, so the compiler knows that the lanes do not diverge. */
template <bool Wide, formula_id Formula, uint32_t Parts>
static __device__ __forceinline__ void fused_walk_group(const fused_job &job, const fused_group &group,
                                                        uint32_t gradients)
{
    fused_begin_units<Formula, Parts>(job, group, threadIdx.x % FUSED_WARP, FUSED_WARP);
    __syncwarp();
    struct atom_point point = group.start;
    const fused_drift drift = fused_drift_of<Wide>(group);
    const fused_draws draws = fused_draws_of<true>(group);
    const int32_t last = (int32_t)job.input.res - 1;
    const uint32_t quads = fused_uniform(fused_quads_of(group.orbits));
    uint2 *to = job.boxes + group.first_unit * Parts;
    fused_end<Wide> *ends = static_cast<fused_end<Wide> *>(job.ends) + group.first_unit * FUSED_WARP;
    int2 at[FUSED_ORBITS];
#pragma unroll 1
    for (uint32_t quad = 0; quad < quads; quad++) {
        fused_walk_unit(group, draws, gradients, quad, &point, at);
        fused_box box = fused_box_of(fused_own_box(at));
        if (fused_visible(box, last)) {
            fused_store_unit<Wide, Parts>(box, last, to + quad * Parts, ends + quad * FUSED_WARP, at);
            continue;
        }
        const uint32_t hidden = fused_hidden(box, drift, last);
        if (hidden >= quads - quad - 1)
            return;
        const uint32_t end = quad + hidden;
#pragma unroll 1
        while (quad < end)
            fused_walk_unit(group, draws, gradients, ++quad, &point, at);
    }
}

template <bool Wide, formula_id Formula, uint32_t Parts>
static __global__ void __launch_bounds__(VERTICES_BLOCK, VERTICES_BLOCKS)
    fused_vertices_kernel(const __grid_constant__ fused_job job)
{
    __shared__ float2 gradients[FUSED_GRADIENTS];
    __shared__ fused_shapes_memory<Formula> memory[VERTICES_BLOCK / FUSED_WARP];
    wait_for_previous();
    allow_next();
    fused_fill_gradients(job.input.gradients, gradients, threadIdx.x, VERTICES_BLOCK);
    __syncthreads();
    const uint32_t table = shared_address(gradients);
    const uint32_t task = blockIdx.x * (VERTICES_BLOCK / FUSED_WARP) + threadIdx.x / FUSED_WARP;
    uint32_t rank = task / job.groups, number = task % job.groups;
    uint32_t lane = threadIdx.x % FUSED_WARP;
    fused_group group;
    if (rank >= job.count)
        return;
    const uint32_t place = fused_place(job, rank);
    const bool card = number == 0 && lane == 0;
    if constexpr (line_rules_of(Formula).shapes > 1) {
        struct fused_shapes &shapes = memory[threadIdx.x / FUSED_WARP];
        fused_fill_shapes<Formula>(job, place, &shapes);
        __syncwarp();
        for (; number < shapes.groups[FUSED_WARP]; number += job.groups) {
            fused_open_group<Formula>(job, shapes, rank, place, number, card && number == 0, &group);
            fused_walk_group<Wide, Formula, Parts>(job, group, table);
        }
    } else {
        const struct synth_image id = fused_image_at(job, place);
        const struct image_input input = fused_input_of(job, id);
        if (number >= fused_groups_of(input.class_))
            return;
        fused_open_group<Formula>(job, id, input, rank, place, number, card, &group);
        fused_walk_group<Wide, Formula, Parts>(job, group, table);
    }
}

/* ---- The kernel for few images: one block per group, orbits in parallel ---- */

/* Returns the rank of image `place` by work. All threads of the block must call this. */
static __device__ __forceinline__ uint32_t fused_rank(const fused_job &job, uint32_t place)
{
    const float mine = fused_work(job, place);
    uint32_t before = 0;
    for (uint32_t begin = 0; begin < job.count; begin += blockDim.x) {
        const uint32_t k = begin + threadIdx.x;
        before += __syncthreads_count(k < job.count && fused_before(fused_work(job, k), k, mine, place));
    }
    return before;
}

/* A unit in shared memory has a row per orbit and axis. A row contains the steps of 32 vertices, and later
 * their positions. */
#define SPLIT_UNIT_ROWS  (2 * FUSED_ORBITS)
#define SPLIT_UNIT_BYTES (SPLIT_UNIT_ROWS * FUSED_WARP * sizeof(float))

/* Replaces the steps along one axis by positions: `position` plus the running sum of steps. An axis uses
 * every other row. Returns the last position. Only this function is serial over the orbits. It loads the
 * steps of a unit while it adds up those of the unit before. */
static __device__ __forceinline__ float fused_add_up(float *row, uint32_t quads, float direction,
                                                     float position)
{
    const uint32_t stride = 2 * FUSED_WARP;
    float next[FUSED_ORBITS];
#pragma unroll
    for (uint32_t k = 0; k < FUSED_ORBITS; k++)
        next[k] = row[k * stride];
#pragma unroll 2
    for (uint32_t quad = 0; quad < quads; quad++, row += FUSED_ORBITS * stride) {
        float steps[FUSED_ORBITS];
#pragma unroll
        for (uint32_t k = 0; k < FUSED_ORBITS; k++) {
            steps[k] = next[k];
            next[k] = quad + 1 < quads ? row[(FUSED_ORBITS + k) * stride] : 0;
        }
#pragma unroll
        for (uint32_t k = 0; k < FUSED_ORBITS; k++) {
            position = fmaf(direction, steps[k], position);
            row[k * stride] = position;
        }
    }
    return position;
}

/* Stores the steps of unit `quad` in its eight rows. */
static __device__ __forceinline__ void fused_fill_rows(const fused_group &group, const fused_draws &draws,
                                                       uint32_t gradients, uint32_t quad, float *rows)
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++, rows += 4 * FUSED_WARP) {
        fused_steps steps = fused_steps_of(group, draws, gradients, 2 * quad + half);
        rows[0 * FUSED_WARP] = steps.even.x;
        rows[1 * FUSED_WARP] = steps.even.y;
        rows[2 * FUSED_WARP] = steps.odd.x;
        rows[3 * FUSED_WARP] = steps.odd.y;
    }
}

/* Computes the vertices of a group with the block's `Warps` warps, and stores the visible units. Processes
 * `Quads` units at a time in shared memory. */
template <bool Wide, uint32_t Parts, uint32_t Warps, uint32_t Quads>
static __device__ __forceinline__ void fused_split_group(const fused_job &job, const fused_group &group,
                                                         uint32_t gradients, float *split_rows)
{
    const fused_draws draws = fused_draws_of<false>(group);
    const uint32_t warp = threadIdx.x / FUSED_WARP, lane = threadIdx.x % FUSED_WARP;
    const uint32_t warps = Warps, unit_rows = SPLIT_UNIT_ROWS * FUSED_WARP;
    fused_end<Wide> *ends = static_cast<fused_end<Wide> *>(job.ends);
    int32_t last = (int32_t)job.input.res - 1;
    float position = warp == 0 ? group.start.x : group.start.y;
    const uint32_t quads = fused_quads_of(group.orbits);
    for (uint32_t begin = 0; begin < quads; begin += Quads) {
        uint32_t count = min(quads - begin, Quads);
        for (uint32_t i = warp; i < count; i += warps)
            fused_fill_rows(group, draws, gradients, begin + i, split_rows + i * unit_rows + lane);
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
            fused_box box = fused_box_of(fused_own_box(at));
            if (fused_visible(box, last))
                fused_store_unit<Wide, Parts>(box, last, job.boxes + unit * Parts, ends + unit * FUSED_WARP,
                                              at);
        }
        __syncthreads();
    }
}

template <bool Wide, formula_id Formula, uint32_t Parts, uint32_t Warps, uint32_t Quads>
static __global__ void __launch_bounds__(Warps *FUSED_WARP, VERTICES_WARPS / Warps)
    fused_vertices_split_kernel(const __grid_constant__ fused_job job)
{
    wait_for_previous();
    allow_next();
    extern __shared__ float split_rows[];
    __shared__ float2 gradients[FUSED_GRADIENTS];
    __shared__ fused_shapes_memory<Formula> shapes;
    __shared__ fused_group opened[FUSED_WARP]; /* the block's group, which the first warp opens */
    constexpr bool one = line_rules_of(Formula).shapes == 1;
    /* Every image has a first group, but few have the last. So the first blocks, one per image, all have
     * work, and are distributed evenly over the multiprocessors. */
    const uint32_t place = blockIdx.x % job.count;
    uint32_t number = blockIdx.x / job.count;
    const uint32_t lane = threadIdx.x % FUSED_WARP;
    const bool first_warp = threadIdx.x < FUSED_WARP;
    /* If an image has one shape, its last block usually has no group, and writes the card. */
    const bool card = number == (one ? job.groups - 1 : 0);
    struct synth_image id = {};
    struct image_input input = {};
    uint32_t groups = 0;
    if constexpr (one) {
        id = fused_image_at(job, place);
        input = fused_input_of(job, id);
        groups = fused_groups_of(input.class_);
        if (!card && number >= groups)
            return;
    } else if (first_warp)
        fused_fill_shapes<Formula>(job, place, &shapes);
    if (!first_warp)
        fused_fill_gradients(job.input.gradients, gradients, threadIdx.x - FUSED_WARP,
                             (Warps - 1) * FUSED_WARP);
    const uint32_t rank = job.order && card ? fused_rank(job, place) : place;
    if constexpr (!one) {
        __syncthreads();
        groups = shapes.groups[FUSED_WARP];
    }
    bool writes = card && threadIdx.x == 0;
    do {
        if (first_warp) {
            if constexpr (one)
                fused_open_group<Formula>(job, id, input, rank, place, number, writes, &opened[lane]);
            else
                fused_open_group<Formula>(job, shapes, rank, place, number, writes, &opened[lane]);
            writes = false;
        }
        __syncthreads();
        if (number >= groups)
            return;
        fused_group group = opened[lane];
        /* The last warps have fewer units to compute. */
        fused_begin_units<Formula, Parts>(job, group, Warps * FUSED_WARP - 1 - threadIdx.x,
                                          Warps * FUSED_WARP);
        fused_split_group<Wide, Parts, Warps, Quads>(job, group, shared_address(gradients), split_rows);
        number += job.groups;
    } while (number < groups);
}

#endif
