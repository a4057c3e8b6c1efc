/* `fused` for fractals in colour (synth/color.h): the kernels and the plan, whose interface is in
 * fused.cuh. docs/notes/synth.md has measurements.
 *
 *   clouds   A block computes the clouds of an image in shared memory, and stores its labels.
 *   objects  A block draws an object. Each thread is a walker. It walks twice over the same points: first it
 *            finds their extent, then it counts them in shared memory. The first walk keeps its choices.
 *   compose  A block makes a tile of an image: it looks up each pixel, blurs the tile if the image is
 *            blurred, and writes the output.
 *   reduce   Only if the output is resized: `compose` writes canvases, which this kernel resizes. */
#include <stdlib.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "synth/fused.cuh"
#include "synth/fused_output.cuh"

#define SKY_BLOCK     1024u
#define SKY_CELLS     (COLOR_SKY * COLOR_SKY)
#define SKY_PITCH     ((SKY_CELLS + 15) / 16 * 16) /* bytes from the clouds of an image to the next */
#define SKY_BYTES     (SKY_CELLS * sizeof(int16_t))
#define COMPOSE_BLOCK 256u
#define REDUCE_BLOCK  256u
#define TILE          32u /* side of a tile in pixels; COMPOSE_BLOCK threads write four pixels each */
#define BORDER        (TILE + 2)
#define CHOICES       16u /* choices of a map per word */
#define CHOICE_WORDS  (COLOR_EIGHT * COLOR_BLOCKS / CHOICES)
#define WARPS         (COLOR_WALKERS / FUSED_WARP)
#define OBJECT_BLOCKS 5     /* per multiprocessor: as many as fit in shared memory with COLOR_SIDE_MANY */
#define SLICE_MAX     1024u /* images at a time */

static_assert(CHOICE_WORDS * CHOICES == COLOR_BURN + COLOR_STEPS, "choices fill whole words");
static_assert(COLOR_PALETTE == COLOR_WALKERS, "a thread computes a colour");
static_assert(COMPOSE_BLOCK * 4 == TILE * TILE, "a thread writes a run");

/* The arguments of the kernels, for one slice of a call. All pointers are to device memory. */
struct color_job {
    struct color_rules rules;
    struct line_rules lines;      /* for the key of an image */
    uint64_t seed, first, stride; /* as in struct synth */
    uint32_t turns;
    const struct color_system *systems;
    struct synth_output output;
    struct fused_call call;
    const struct fused_call *stored; /* NULL: use `call` */
    uint64_t begin;                  /* index in the call of the slice's first image */
    uint8_t *grades;                 /* of the objects of all images of the slice */
    uint8_t *skies;                  /* SKY_PITCH per image */
    uint32_t *palettes;              /* (1 + COLOR_OBJECTS_MAX) * COLOR_PALETTE per image */
    struct color_card *cards;        /* one per image */
    uint8_t *canvases; /* three planes per image, to be resized; NULL: `compose` writes the output */
};

/* The values of an image that the composition reads. */
struct alignas(16) color_card {
    struct color_view view;
    uint32_t weight;             /* of the blur */
    struct output_corner corner; /* upper left corner of the crop; (0, 0) without a crop */
    void *output;                /* destination of the image */
};

/* An image of the slice. */
struct color_image {
    struct fused_call call;
    uint64_t j; /* its index in the call */
    struct philox_key key;
    uint32_t class_index;
    uint32_t id; /* of the class; 0 if images show several classes, as synth_label() */
};

static __device__ __forceinline__ color_image image_at(const color_job &job, uint32_t place)
{
    color_image image;
    image.call = job.stored ? *job.stored : job.call;
    const struct fused_call &call = image.call;
    image.j = job.begin + place;
    const uint64_t run = call.listed ? 0 : call.number + (call.counter ? *call.counter : 0);
    const struct synth_image id =
        synth_image_at(job.first, job.stride, job.turns, run, call.listed ? call.listed[image.j] : image.j);
    image.class_index = id.class_index;
    image.id = job.rules.several ? 0 : job.systems[id.class_index].id;
    image.key = atom_image_key(&job.lines, job.seed, image.id, id.instance);
    return image;
}

/* Returns the grades of an object. */
static __device__ __forceinline__ uint8_t *grades_of(const color_job &job, uint32_t place, uint32_t slot)
{
    const uint32_t side = color_side(&job.rules), objects = job.rules.several ? COLOR_OBJECTS_MAX : 1;
    return job.grades + ((size_t)place * objects + slot) * side * side;
}

static __device__ __forceinline__ uint32_t *palette_of(const color_job &job, uint32_t place, uint32_t slot)
{
    return job.palettes + ((size_t)place * (1 + COLOR_OBJECTS_MAX) + slot) * COLOR_PALETTE;
}

/* ---- Clouds ---- */

extern __shared__ uint4 color_shared[];

/* Fills the card of an image. All threads of a block call it. */
static __device__ __forceinline__ void fill_card(const color_job &job, const color_image &image,
                                                 uint32_t place)
{
    color_card &card = job.cards[place];
    const struct synth_output &output = job.output;
    const uint32_t res = job.rules.res;
    if (threadIdx.x < COLOR_OBJECTS_MAX) {
        card.view.place[threadIdx.x] = color_place(&job.rules, image.key, threadIdx.x);
        card.view.grades[threadIdx.x] = grades_of(job, place, threadIdx.x);
    }
    if (threadIdx.x != 0)
        return;
    card.view.objects = color_objects(&job.rules, image.key);
    card.view.res = res;
    card.view.side = color_side(&job.rules);
    card.view.sky_step = ((COLOR_SKY - 1) << 16) / res;
    card.view.sky = job.skies + (size_t)place * SKY_PITCH;
    card.view.palettes = palette_of(job, place, 0);
    card.weight = color_blur(image.key);
    card.corner = {0, 0};
    if (output.fit == OUTPUT_CROP)
        card.corner = output_crop(image.key, res, output.res);
    card.output =
        image.call.images + image.j * output.res * output.res * output.channels * dtype_bytes(output.type);
}

/* A block computes the clouds of an image. */
static __global__ void __launch_bounds__(SKY_BLOCK) color_sky_kernel(const __grid_constant__ color_job job)
{
    __shared__ int32_t least, most;
    int16_t *values = reinterpret_cast<int16_t *>(color_shared);
    const color_image image = image_at(job, blockIdx.x);
    const struct color_sky sky = color_sky(image.key);
    const uint32_t last = COLOR_SKY - 1;
    if (threadIdx.x < 4)
        values[(threadIdx.x / 2) * last * COLOR_SKY + threadIdx.x % 2 * last] =
            (int16_t)sky.corner[threadIdx.x];
    fill_card(job, image, blockIdx.x);
    if (threadIdx.x == 0) {
        least = INT16_MAX;
        most = INT16_MIN;
    }
    __syncthreads();
    for (uint32_t level = 1; level <= COLOR_SKY_LEVELS; level++) {
        const int32_t amplitude = color_amplitude(sky, level);
        for (uint32_t phase = 0; phase < 2; phase++) {
            const uint32_t count = color_sky_count(level, phase);
            for (uint32_t b = threadIdx.x; 8 * b < count; b += SKY_BLOCK) {
                const struct philox_block block = color_noise_block(image.key, level, phase, b);
                struct color_spot spot = color_spot(level, phase, 8 * b);
#pragma unroll
                for (uint32_t i = 0; i < 8; i++) {
                    if (8 * b + i < count)
                        color_sky_value(values, level, phase, spot, color_noise(block, i, amplitude));
                    spot = color_next_spot(level, phase, spot);
                }
            }
            __syncthreads();
        }
    }
    int32_t low = INT16_MAX, high = INT16_MIN;
    for (uint32_t i = threadIdx.x; i < SKY_CELLS; i += SKY_BLOCK) {
        low = min(low, (int32_t)values[i]);
        high = max(high, (int32_t)values[i]);
    }
    for (uint32_t step = FUSED_WARP / 2; step > 0; step /= 2) {
        low = min(low, __shfl_xor_sync(FUSED_ALL, low, step));
        high = max(high, __shfl_xor_sync(FUSED_ALL, high, step));
    }
    if (threadIdx.x % FUSED_WARP == 0) {
        atomicMin(&least, low);
        atomicMax(&most, high);
    }
    __syncthreads();
    const struct color_shades scale = color_shades(least, most);
    uint32_t *shades = reinterpret_cast<uint32_t *>(job.skies + (size_t)blockIdx.x * SKY_PITCH);
    for (uint32_t i = threadIdx.x; 4 * i < SKY_CELLS; i += SKY_BLOCK) {
        uint32_t four = 0;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            if (4 * i + k < SKY_CELLS)
                four |= color_shade(scale, values[4 * i + k]) << 8 * k;
        shades[i] = four;
    }
    if (threadIdx.x < COLOR_PALETTE)
        palette_of(job, blockIdx.x, 0)[threadIdx.x] = color_of(color_tint(image.key, 0), 0, threadIdx.x);
    if (threadIdx.x == 0)
        image.call.labels[image.j] = image.id;
    if (!job.rules.several || !image.call.masks)
        return;
    uint8_t *label = image.call.masks + image.j * job.rules.class_count;
    for (uint32_t c = threadIdx.x; c < job.rules.class_count; c += SKY_BLOCK)
        label[c] = 0;
    __syncthreads();
    if (threadIdx.x < color_objects(&job.rules, image.key))
        label[color_class(&job.rules, image.key, threadIdx.x, 0)] = 1;
}

/* ---- Objects ---- */

/* A map of an object in shared memory: maps begin in different banks. */
struct alignas(16) color_map {
    float4 linear; /* a, b, c, d */
    float2 moved;  /* e, f */
};

static __device__ __forceinline__ struct color_point step_by(const color_map &map, struct color_point point)
{
    const float4 linear = map.linear;
    const float2 moved = map.moved;
    const float values[6] = {linear.x, linear.y, linear.z, linear.w, moved.x, moved.y};
    return color_step(values, point);
}

/* The extent of points. */
struct color_extent {
    float x_least, x_most, y_least, y_most;
};

/* Walks for the first time. Stores the choices, and returns the extent of the drawn points. */
static __device__ __forceinline__ color_extent first_walk(struct philox_key key, uint32_t slot,
                                                          const uint32_t below[COLOR_MAPS_MAX],
                                                          const color_map *maps, struct color_point point,
                                                          uint32_t *choices)
{
    color_extent extent = {INFINITY, -INFINITY, INFINITY, -INFINITY};
    for (uint32_t word = 0; word < CHOICE_WORDS; word++) {
        uint32_t packed = 0;
#pragma unroll
        for (uint32_t half = 0; half < CHOICES / COLOR_EIGHT; half++) {
            const struct philox_block block =
                color_choices(key, slot, threadIdx.x, word * (CHOICES / COLOR_EIGHT) + half);
#pragma unroll
            for (uint32_t i = 0; i < COLOR_EIGHT; i++) {
                const uint32_t at = half * COLOR_EIGHT + i, choice = color_choice(below, block, i);
                packed |= choice << 2 * at;
                point = step_by(maps[choice], point);
                if (word * CHOICES + at >= COLOR_BURN) {
                    extent.x_least = fminf(extent.x_least, point.x);
                    extent.x_most = fmaxf(extent.x_most, point.x);
                    extent.y_least = fminf(extent.y_least, point.y);
                    extent.y_most = fmaxf(extent.y_most, point.y);
                }
            }
        }
        choices[word * COLOR_WALKERS + threadIdx.x] = packed;
    }
    return extent;
}

/* Walks again, and counts the drawn points. Two counts share a word. */
static __device__ __forceinline__ void second_walk(const color_map *maps, struct color_point point,
                                                   const uint32_t *choices, struct color_axis x,
                                                   struct color_axis y, uint32_t side, uint32_t *counts)
{
    for (uint32_t word = 0; word < CHOICE_WORDS; word++) {
        const uint32_t packed = choices[word * COLOR_WALKERS + threadIdx.x];
#pragma unroll
        for (uint32_t i = 0; i < CHOICES; i++) {
            point = step_by(maps[packed >> 2 * i & 3], point);
            if (word * CHOICES + i >= COLOR_BURN) {
                const uint32_t cell = color_cell(x, point.x) * side + color_cell(y, point.y);
                atomicAdd(counts + cell / 2, 1u << cell % 2 * 16);
            }
        }
    }
}

/* Returns the extent of all threads. `room` has an entry per warp. */
static __device__ __forceinline__ color_extent extent_of_block(color_extent extent, color_extent *room)
{
    auto join = [&](const color_extent &other) {
        extent.x_least = fminf(extent.x_least, other.x_least);
        extent.x_most = fmaxf(extent.x_most, other.x_most);
        extent.y_least = fminf(extent.y_least, other.y_least);
        extent.y_most = fmaxf(extent.y_most, other.y_most);
    };
    for (uint32_t step = FUSED_WARP / 2; step > 0; step /= 2)
        join({__shfl_xor_sync(FUSED_ALL, extent.x_least, step),
              __shfl_xor_sync(FUSED_ALL, extent.x_most, step),
              __shfl_xor_sync(FUSED_ALL, extent.y_least, step),
              __shfl_xor_sync(FUSED_ALL, extent.y_most, step)});
    if (threadIdx.x % FUSED_WARP == 0)
        room[threadIdx.x / FUSED_WARP] = extent;
    __syncthreads();
    for (uint32_t warp = 0; warp < WARPS; warp++)
        join(room[warp]);
    return extent;
}

/* Returns how many points add 1 to each of four cells of a row: two 16-bit counts per word. `four`: number of
 * the cells' run. No sum exceeds 16 bits, because a point adds at most 1 to a cell. */
template <bool Patches>
static __device__ __forceinline__ uint2 counts_at(const uint32_t *counts, uint32_t pattern, uint32_t side,
                                                  uint32_t four)
{
    if (!Patches)
        return make_uint2(counts[2 * four], counts[2 * four + 1]);
    const uint32_t runs = side / 4, column = four % runs, words = side / 2;
    const int32_t row = (int32_t)(four / runs);
    uint2 sums = make_uint2(0, 0);
#pragma unroll
    for (int32_t i = 0; i < 3; i++) {
        const int32_t from = row - (i - 1); /* the row of the points */
        if ((uint32_t)from >= side)
            continue;
        const uint32_t *at = counts + (uint32_t)from * words + 2 * column;
        const uint32_t before = column > 0 ? at[-1] : 0, first = at[0], second = at[1];
        const uint32_t after = column + 1 < runs ? at[2] : 0, bits = pattern >> 3 * i;
        if (bits & 1) { /* the points are a column to the right */
            sums.x += first >> 16 | second << 16;
            sums.y += second >> 16 | after << 16;
        }
        if (bits & 2) {
            sums.x += first;
            sums.y += second;
        }
        if (bits & 4) {
            sums.x += first << 16 | before >> 16;
            sums.y += second << 16 | first >> 16;
        }
    }
    return sums;
}

/* A block draws object blockIdx.y of image blockIdx.x. */
template <bool Patches>
static __global__ void __launch_bounds__(COLOR_WALKERS, OBJECT_BLOCKS)
    color_object_kernel(const __grid_constant__ color_job job)
{
    __shared__ color_map maps[COLOR_MAPS_MAX];
    __shared__ color_extent room[WARPS];
    __shared__ uint32_t most;
    const uint32_t slot = blockIdx.y, side = color_side(&job.rules), cells = side * side;
    const color_image image = image_at(job, blockIdx.x);
    if (slot >= color_objects(&job.rules, image.key))
        return;
    uint32_t *counts = reinterpret_cast<uint32_t *>(color_shared), *choices = counts + cells / 2;
    const struct color_system &system =
        job.systems[color_class(&job.rules, image.key, slot, image.class_index)];
    if (threadIdx.x < COLOR_MAPS_MAX * 6) {
        const uint32_t m = threadIdx.x / 6, i = threadIdx.x % 6;
        reinterpret_cast<float *>(maps + m)[i] =
            color_value(&system, color_jitter(&job.rules, &system, image.key, slot), m, i);
    }
    for (uint32_t i = threadIdx.x; i < cells / 8; i += COLOR_WALKERS)
        color_shared[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0)
        most = 0;
    __syncthreads();
    const uint32_t below[COLOR_MAPS_MAX] = {system.below[0], system.below[1], system.below[2], 0};
    const struct color_point start = color_start(reinterpret_cast<const float *>(maps));
    const color_extent extent =
        extent_of_block(first_walk(image.key, slot, below, maps, start, choices), room);
    second_walk(maps, start, choices, color_axis(extent.x_least, extent.x_most, side),
                color_axis(extent.y_least, extent.y_most, side), side, counts);
    __syncthreads();

    const uint32_t pattern = color_pattern(&job.rules, image.key);
    uint32_t own = 0;
    for (uint32_t i = threadIdx.x; i < cells / 4; i += COLOR_WALKERS) {
        const uint2 four = counts_at<Patches>(counts, pattern, side, i);
        own = max(own, max(max(four.x & 0xffff, four.x >> 16), max(four.y & 0xffff, four.y >> 16)));
    }
    for (uint32_t step = FUSED_WARP / 2; step > 0; step /= 2)
        own = max(own, __shfl_xor_sync(FUSED_ALL, own, step));
    if (threadIdx.x % FUSED_WARP == 0)
        atomicMax(&most, own);
    __syncthreads();
    own = most;
    uint32_t *grades = reinterpret_cast<uint32_t *>(grades_of(job, blockIdx.x, slot));
    for (uint32_t i = threadIdx.x; i < cells / 4; i += COLOR_WALKERS) {
        const uint2 four = counts_at<Patches>(counts, pattern, side, i);
        grades[i] = four.x || four.y
                        ? color_grade(four.x & 0xffff, own) | color_grade(four.x >> 16, own) << 8 |
                              color_grade(four.y & 0xffff, own) << 16 | color_grade(four.y >> 16, own) << 24
                        : 0;
    }
    palette_of(job, blockIdx.x, 1 + slot)[threadIdx.x] =
        color_of(color_tint(image.key, 1 + slot), 1 + slot, threadIdx.x);
}

/* ---- Composition ---- */

/* Fills the tile whose first pixel on the canvas is (x, y), and a border of `border` pixels around it. Pixels
 * outside the canvas are those of its edge. */
static __device__ __forceinline__ void fill_tile(const struct color_view &view, int32_t x, int32_t y,
                                                 int32_t border, uint32_t *colors)
{
    const uint32_t side = TILE + 2 * (uint32_t)border;
    const int32_t last = (int32_t)view.res - 1;
    for (uint32_t i = threadIdx.x; i < side * side; i += COMPOSE_BLOCK) {
        const int32_t column = x - border + (int32_t)(i % side), row = y - border + (int32_t)(i / side);
        colors[i] = color_pixel(&view, (uint32_t)min(max(column, 0), last), (uint32_t)min(max(row, 0), last));
    }
}

/* Stores channel `c` of pixels (y, x) .. (y, x + 3), except those in column `end` and beyond. */
static __device__ __forceinline__ void store_channel(const output_sink &sink, uint32_t c, uint32_t y,
                                                     uint32_t x, uint32_t end, const uint32_t sums[4])
{
    if (sink.output.layout == OUTPUT_NCHW && sink.four && x + 4 <= end) {
        store_plane(sink, c, y, x, sums);
        return;
    }
#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
        if (x + k < end)
            output_store_channels(&sink.output, sink.area, sums[k], y, x + k, c, c + 1, sink.image);
}

/* A block makes tile (blockIdx.x, blockIdx.y) of image blockIdx.z. A thread writes four pixels. `Canvas`:
 * writes canvases instead of outputs. */
template <bool Canvas>
static __global__ void __launch_bounds__(COMPOSE_BLOCK)
    color_compose_kernel(const __grid_constant__ color_job job)
{
    constexpr uint32_t words = sizeof(struct color_card) / sizeof(uint32_t);
    static_assert(words <= COMPOSE_BLOCK, "a thread copies a word");
    __shared__ struct color_card card;
    __shared__ uint32_t colors[BORDER * BORDER], blurred[BORDER * TILE];
    const uint32_t res = job.rules.res, x = blockIdx.x * TILE, y = blockIdx.y * TILE;
    if (threadIdx.x < words)
        reinterpret_cast<uint32_t *>(&card)[threadIdx.x] =
            reinterpret_cast<const uint32_t *>(job.cards + blockIdx.z)[threadIdx.x];
    __syncthreads();
    const uint32_t weight = card.weight;
    const int32_t left = (int32_t)(Canvas ? x : card.corner.x + x),
                  top = (int32_t)(Canvas ? y : card.corner.y + y);
    if (weight)
        fill_tile(card.view, left, top, 1, colors);
    else
        fill_tile(card.view, left, top, 0, colors);
    __syncthreads();
    if (weight) {
        for (uint32_t i = threadIdx.x; i < BORDER * TILE; i += COMPOSE_BLOCK) {
            const uint32_t *at = colors + i / TILE * BORDER + i % TILE;
            blurred[i] = color_blurred(weight, at[0], at[1], at[2]);
        }
        __syncthreads();
    }
    const uint32_t row = threadIdx.x / (TILE / 4), column = threadIdx.x % (TILE / 4) * 4;
    const uint32_t side = Canvas ? res : job.output.res;
    if (y + row >= side || x + column >= side)
        return;
    uint32_t four[4];
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        const uint32_t *at = blurred + row * TILE + column + k;
        four[k] =
            weight ? color_blurred(weight, at[0], at[TILE], at[2 * TILE]) : colors[row * TILE + column + k];
    }
    const output_sink sink = {job.output, 1, card.output, side % 4 == 0};
#pragma unroll
    for (uint32_t c = 0; c < COLOR_CHANNELS; c++) {
        const uint32_t sums[4] = {four[0] >> 8 * c & 255, four[1] >> 8 * c & 255, four[2] >> 8 * c & 255,
                                  four[3] >> 8 * c & 255};
        if (!Canvas) {
            store_channel(sink, c, y + row, x + column, side, sums);
            continue;
        }
        uint8_t *to =
            job.canvases + ((COLOR_CHANNELS * (size_t)blockIdx.z + c) * res + y + row) * res + x + column;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            if (x + column + k < side)
                to[k] = (uint8_t)sums[k];
    }
}

/* Resizes canvases. A thread makes a pixel of the output in image blockIdx.y. */
static __global__ void __launch_bounds__(REDUCE_BLOCK)
    color_reduce_kernel(const __grid_constant__ color_job job)
{
    const struct synth_output &output = job.output;
    const uint32_t i = blockIdx.x * REDUCE_BLOCK + threadIdx.x, res = job.rules.res, place = blockIdx.y;
    if (i >= output.res * output.res)
        return;
    const struct fused_call call = job.stored ? *job.stored : job.call;
    const uint32_t y = i / output.res, x = i % output.res;
    const size_t plane = (size_t)res * res;
    const size_t bytes = (size_t)output.res * output.res * output.channels * dtype_bytes(output.type);
    const struct output_span rows = output_span(y, res, output.res),
                             columns = output_span(x, res, output.res);
    for (uint32_t c = 0; c < COLOR_CHANNELS; c++) {
        const uint8_t *canvas = job.canvases + (COLOR_CHANNELS * (size_t)place + c) * plane;
        auto row_at = [&](uint32_t row) {
            const uint8_t *first = canvas + (size_t)row * res;
            return [first](uint32_t column) { return (uint32_t)first[column]; };
        };
        const uint64_t sum = span_sum<uint64_t>(output.res, rows, columns, row_at);
        output_store_channels(&output, output_area(output.fit, res), sum, y, x, c, c + 1,
                              call.images + (job.begin + place) * bytes);
    }
}

/* ---- The plan ---- */

struct color_plan {
    const struct synth *synth;
    int device;
    struct color_job job; /* the call, `stored` and `begin` are unset */
    void *memory;         /* of all pointers in the job */
    size_t memory_bytes;
    uint32_t slice;      /* images at a time */
    size_t object_bytes; /* shared memory of a block of color_object_kernel() */
};

typedef void color_kernel(const struct color_job job);

static color_kernel *object_kernel(const struct color_plan *plan)
{
    return plan->job.rules.patches ? color_object_kernel<true> : color_object_kernel<false>;
}

static color_kernel *compose_kernel(const struct color_job *job)
{
    return job->canvases ? color_compose_kernel<true> : color_compose_kernel<false>;
}

enum { PARTS = 5 };

/* Returns the bytes of a slice's image in device memory: grades, clouds, palettes, card and canvas. */
static void image_sizes(const struct color_plan *plan, size_t sizes[PARTS])
{
    const struct synth *synth = plan->synth;
    const uint32_t side = color_side(&synth->color);
    sizes[0] = (size_t)(synth->color.several ? COLOR_OBJECTS_MAX : 1) * side * side;
    sizes[1] = SKY_PITCH;
    sizes[2] = (1 + COLOR_OBJECTS_MAX) * COLOR_PALETTE * sizeof(uint32_t);
    sizes[3] = sizeof(struct color_card);
    sizes[4] = synth->output.fit == OUTPUT_RESIZE ? synth_image_bytes(synth) : 0;
}

static size_t aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Allocates the memory of the plan, for as many images at a time as fit. */
static enum status allocate(struct color_plan *plan)
{
    const struct synth *synth = plan->synth;
    const size_t systems = aligned(synth->class_count * sizeof *synth->colors);
    size_t free_bytes, sizes[PARTS], image = 0, end = systems;
    TRY(device_free_bytes(plan->device, &free_bytes));
    free_bytes -= free_bytes / 32; /* margin, because allocations are rounded up to pages */
    image_sizes(plan, sizes);
    for (size_t size : sizes)
        image += size;
    plan->slice = synth->batch < SLICE_MAX ? (uint32_t)synth->batch : SLICE_MAX;
    while (plan->slice > 1 && systems + plan->slice * image + PARTS * 256 > free_bytes)
        plan->slice /= 2;
    if (systems + image + PARTS * 256 > free_bytes)
        return status_set(
            STATUS_TOO_LARGE,
            "fused needs %.2f GB of device memory for one image, but %.2f GB are free; lower %s",
            1e-9 * (double)(systems + image), 1e-9 * (double)free_bytes,
            OPTION_OR_FIELD("--batch or --res", "batch or res"));
    size_t offsets[PARTS];
    for (int i = 0; i < PARTS; i++) {
        offsets[i] = end;
        end += aligned(plan->slice * sizes[i]);
    }
    CUDA_TRY(cudaMalloc(&plan->memory, end));
    plan->memory_bytes = end;
    uint8_t *memory = static_cast<uint8_t *>(plan->memory);
    CUDA_TRY(cudaMemcpy(memory, synth->colors, synth->class_count * sizeof *synth->colors,
                        cudaMemcpyHostToDevice));
    plan->job.systems = reinterpret_cast<const struct color_system *>(memory);
    plan->job.grades = memory + offsets[0];
    plan->job.skies = memory + offsets[1];
    plan->job.palettes = reinterpret_cast<uint32_t *>(memory + offsets[2]);
    plan->job.cards = reinterpret_cast<struct color_card *>(memory + offsets[3]);
    /* A block copies whole cards, of which the gaps between members are never written. */
    CUDA_TRY(cudaMemset(plan->job.cards, 0, plan->slice * sizeof *plan->job.cards));
    CUDA_TRY(cudaStreamSynchronize(nullptr)); /* before other streams write cards */
    plan->job.canvases = sizes[4] ? memory + offsets[4] : nullptr;
    return STATUS_OK;
}

/* Loads the kernels, which CUDA must not do during a capture. */
static enum status load_kernels(struct color_plan *plan)
{
    color_kernel *const all[] = {color_sky_kernel, object_kernel(plan), compose_kernel(&plan->job),
                                 color_reduce_kernel};
    for (color_kernel *kernel : all) {
        cudaFuncAttributes attributes;
        CUDA_TRY(cudaFuncGetAttributes(&attributes, kernel));
    }
    TRY(allow_shared(color_sky_kernel, SKY_BYTES));
    return allow_shared(object_kernel(plan), plan->object_bytes);
}

static enum status open_plan(struct color_plan *plan)
{
    const struct synth *synth = plan->synth;
    const uint32_t side = color_side(&synth->color);
    struct color_job *job = &plan->job;
    int most;
    CUDA_TRY(cudaSetDevice(plan->device));
    CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, plan->device));
    plan->object_bytes =
        (size_t)side * side * sizeof(uint16_t) + CHOICE_WORDS * COLOR_WALKERS * sizeof(uint32_t);
    const size_t needed = 1024 + (plan->object_bytes > SKY_BYTES ? plan->object_bytes : SKY_BYTES);
    if (needed > (size_t)most)
        return status_set(
            STATUS_UNAVAILABLE,
            "fused draws colours in %zu bytes of shared memory per block, but this device has %d; "
            "use omp",
            needed, most);
    job->rules = synth->color;
    job->lines = synth->rules;
    job->seed = synth->seed;
    job->first = synth->first;
    job->stride = synth->stride;
    job->turns = synth->turns;
    job->output = synth->output;
    TRY(allocate(plan));
    return load_kernels(plan);
}

enum status color_plan_open(int device, const struct synth *synth, struct color_plan **plan)
{
    struct color_plan *self = static_cast<struct color_plan *>(calloc(1, sizeof *self));
    TRY(ALLOCATED(self, "out of memory"));
    self->synth = synth;
    self->device = device;
    enum status status = open_plan(self);
    if (status != STATUS_OK)
        color_plan_close(self);
    else
        *plan = self;
    return status;
}

void color_plan_close(struct color_plan *plan)
{
    if (!plan)
        return;
    (void)cudaFree(plan->memory); /* errors are ignored, because no result depends on them */
    free(plan);
}

uint64_t color_plan_bytes(const struct color_plan *plan)
{
    return plan->memory_bytes;
}

static enum status enqueue_objects(const struct color_plan *plan, const struct color_job *job, uint32_t count,
                                   cudaStream_t stream)
{
    RANGE(VERTICES);
    const dim3 objects(count, job->rules.several ? COLOR_OBJECTS_MAX : 1);
    color_sky_kernel<<<count, SKY_BLOCK, SKY_BYTES, stream>>>(*job);
    CUDA_TRY_LAUNCH("color_sky_kernel");
    object_kernel(plan)<<<objects, COLOR_WALKERS, plan->object_bytes, stream>>>(*job);
    return CUDA_LAUNCHED("color_object_kernel");
}

static enum status enqueue_composition(const struct color_job *job, uint32_t count, cudaStream_t stream)
{
    RANGE(PAINTING);
    const uint32_t side = job->canvases ? job->rules.res : job->output.res;
    const uint32_t tiles = (side + TILE - 1) / TILE, pixels = job->output.res * job->output.res;
    compose_kernel(job)<<<dim3(tiles, tiles, count), COMPOSE_BLOCK, 0, stream>>>(*job);
    CUDA_TRY_LAUNCH("color_compose_kernel");
    if (!job->canvases)
        return STATUS_OK;
    color_reduce_kernel<<<dim3((pixels + REDUCE_BLOCK - 1) / REDUCE_BLOCK, count), REDUCE_BLOCK, 0, stream>>>(
        *job);
    return CUDA_LAUNCHED("color_reduce_kernel");
}

/* Calls run() for each slice of a call: its job and its number of images. */
template <class Run>
static enum status for_slices(const struct color_plan *plan, const struct fused_call *call,
                              const struct fused_call *stored, uint64_t count, Run run)
{
    struct color_job job = plan->job;
    if (call)
        job.call = *call;
    job.stored = stored;
    for (job.begin = 0; job.begin < count; job.begin += plan->slice)
        TRY(run(&job, (uint32_t)(count - job.begin < plan->slice ? count - job.begin : plan->slice)));
    return STATUS_OK;
}

enum status color_plan_enqueue(const struct color_plan *plan, const struct fused_call *call,
                               const struct fused_call *stored, uint64_t count, cudaStream_t stream)
{
    return for_slices(plan, call, stored, count, [&](const struct color_job *job, uint32_t images) {
        TRY(enqueue_objects(plan, job, images, stream));
        return enqueue_composition(job, images, stream);
    });
}

enum status color_plan_time(const struct color_plan *plan, const struct fused_call *call,
                            const struct device_clock *clock, double *objects_s, double *composing_s)
{
    return for_slices(
        plan, call, nullptr, plan->synth->batch, [&](const struct color_job *job, uint32_t images) {
            TRY(device_clock_add(clock, objects_s,
                                 [&] { return enqueue_objects(plan, job, images, clock->stream); }));
            return device_clock_add(clock, composing_s,
                                    [&] { return enqueue_composition(job, images, clock->stream); });
        });
}
