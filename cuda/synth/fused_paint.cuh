/* Second kernel of `fused`: draws the lines of a tile on a canvas in shared memory, then writes the tile's
 * output. */
#ifndef FDSL_CUDA_SYNTH_FUSED_PAINT_CUH
#define FDSL_CUDA_SYNTH_FUSED_PAINT_CUH

#include <stddef.h>
#include <type_traits>

#include "common/shared.cuh"
#include "common/stream.cuh"
#include "synth/fused.cuh"
#include "synth/fused_output.cuh"
#include "synth/atom.h"

/* ---- Strokes ---- */

/* Each lane of a warp draws a line on a canvas in shared memory, pixel by pixel.
 *
 * Pixel s of a line is s steps from its beginning along the major axis, and m(s) = floor((2 minor s + major)
 * / (2 major)) steps along the minor axis (atom.h). For short lines, m(s) is the integer part of bias + s *
 * slope, in fixed point with 16 fraction bits. Lines inside a tile are short: they have at most 135 steps.
 * Other lines count as short up to STROKE_MAJOR_MAX steps.
 *
 * The integer part is exact. All errors below are in units of 2^-16 pixel. The slope is minor / major * 2^16
 * + 1, rounded down. The quotient has an error of at most 2 ulp = 2^-6. The slope is therefore at most 1 +
 * 2^-6 too large and 2^-6 too small. The bias is half a pixel plus 4, and 4 exceeds 135 * 2^-6. The sum is
 * therefore never too small. It is too large by at most 135 * (1 + 2^-6) + 4 < 142. The exact value is a
 * multiple of 1 / (2 major) pixel. An error below 2^16 / (2 * 135) = 242 never reaches the next integer. */
static_assert(TILE_MOST <= 136, "the error bound is for up to 135 steps");
#define STROKE_MAJOR_MAX 127
#define STROKE_BIAS      (0x8000 + 4)
#define STROKE_STEPS     8 /* pixels per call of path_walk() */

/* A line, from its beginning. `at` is the next pixel in tile coordinates: major << 24 | minor << 16 |
 * fraction of minor. Adding `step` advances `at` by one pixel. */
struct stroke {
    uint32_t at, step;
    uint32_t
        place; /* bytes to the next canvas pixel: lower half along the minor, upper along the major axis */
    uint32_t value; /* value to paint; the larger value wins */
    int32_t left;   /* remaining pixels; path_of() needs at least 1 */
};

/* A stroke that a lane is drawing, from its end with the smaller major coordinate on. So `at` grows, and one
 * instruction advances it and stops it at `last`. */
struct path {
    uint32_t at, last;
    uint32_t step;         /* positive; below 2^25 */
    uint32_t place, value; /* as in struct stroke */
};

/* Returns value / by with an error of at most 2 ulp. Subnormal numbers count as 0. */
static __device__ __forceinline__ float quotient(float value, float by)
{
    float result;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(value), "f"(by));
    return result;
}

/* Returns `value`, which the compiler then keeps in a register instead of computing it again. */
static __device__ __forceinline__ uint32_t pin(uint32_t value)
{
    return __shfl_sync(FUSED_ALL, value, threadIdx.x % FUSED_WARP);
}

/* Returns the address of the pixel at `at`: `canvas` + the dot product of its upper 2 bytes with `place`. */
static __device__ __forceinline__ uint32_t stroke_address(uint32_t canvas, uint32_t place, uint32_t at)
{
    uint32_t address;
    asm("dp2a.hi.u32.u32 %0, %1, %2, %3;" : "=r"(address) : "r"(place), "r"(at), "r"(canvas));
    return address;
}

static __device__ __forceinline__ struct path path_of(const stroke &self)
{
    const uint32_t end = self.at + (uint32_t)(self.left - 1) * self.step;
    return {min(self.at, end), max(self.at, end), (uint32_t)abs((int32_t)self.step), self.place, self.value};
}

/* Paints the next STROKE_STEPS pixels. If the line ends earlier, repaints its last pixel. Returns whether
 * pixels remain. */
static __device__ __forceinline__ bool path_walk(path &self, uint32_t canvas)
{
    uint32_t at = self.at;
    shared_max(stroke_address(canvas, self.place, at), self.value);
#pragma unroll
    for (int32_t s = 1; s < STROKE_STEPS; s++) {
        at = __viaddmin_u32(at, self.step, self.last);
        shared_max(stroke_address(canvas, self.place, at), self.value);
    }
    self.at += STROKE_STEPS * self.step; /* at most (TILE_MOST - 1 + STROKE_STEPS) << 24 */
    return self.at <= self.last;
}

/* Returns the number of pixels that remain after path_walk(): 1 to 127. The distance between two of them is a
 * multiple of 2^24, plus or minus at most 127 * 65537, which is less than 2^23. */
static __device__ __forceinline__ uint32_t path_left(const path &self)
{
    return (self.last - self.at + (1 << 23) >> 24) + 1;
}

/* Returns a stroke for a lane without a line. It paints the value 0, which changes nothing. Each lane of the
 * warp paints to an address of its own. */
static __device__ __forceinline__ stroke stroke_none(uint32_t lane)
{
    return {lane << 16, 1 << 24, sizeof(uint32_t), 0, 1};
}

/* ---- Queues ----
 *
 * A warp queues the lines that touch its tile. When a queue has 32 entries, the warp draws them, so that all
 * its lanes have work. There are three kinds of entries: lines inside the tile, lines that cross its border,
 * and strokes. A stroke is the rest of a line whose first pixels have been drawn. If tiles have few lines,
 * there is no queue of strokes: the lanes divide the rests of 32 lines among themselves. */

#define QUEUE_LINES   96  /* at most 31 waiting lines, plus 62 of two orbits */
#define QUEUE_FEW     94  /* at most 31 waiting lines of each kind, plus 32 of a part of a unit */
#define QUEUE_STROKES 64  /* at most 31 waiting strokes, plus 32 */
#define LONG_FEW      3   /* long lines that a warp draws one after another, each with all lanes */
#define SPLIT_STROKES 128 /* strokes that all warps draw together at the end of a tile */

enum queue_kind { QUEUE_STROKE, QUEUE_INSIDE, QUEUE_CROSSING, QUEUE_KINDS };

template <bool Few> struct line_queues {
    uint2 inside[QUEUE_LINES];    /* x: coordinates of both ends, one byte each; y: value */
    uint4 strokes[QUEUE_STROKES]; /* struct path: at, last, value, step | steep << 31 */
    uint32_t
        crossing[QUEUE_LINES]; /* unit << 7 | lane << 2 | orbit in unit: the index of the line's first end */
};

/* Lines inside the tile fill the array from its beginning, other lines from its end, where y is unused. */
template <> struct line_queues<true> {
    uint2 lines[QUEUE_FEW];
};

/* The sizes of a painting kernel. They change no image.
 * Warps: per block. Blocks: per multiprocessor.
 * Long: many lines are longer than STROKE_MAJOR_MAX, or need many calls of path_walk().
 * Few: many tiles are empty or have few lines. The boxes are those of parts of units. */
template <uint32_t Warps = 16, uint32_t Blocks = 2, bool Long = false, bool Few = false> struct paint_sizes {
    static constexpr uint32_t warps = Warps, blocks = Blocks, block = Warps * FUSED_WARP;
    static constexpr bool is_long = Long, few = Few;
    static constexpr uint32_t parts = Few ? FUSED_PARTS : 1; /* boxes per unit */
    static constexpr uint32_t hits = Few ? 1536 : 2048;      /* maximum length of a block's list */
    static_assert(hits % block == 0, "each thread tests the same number of boxes");
};

#define HIT_WHOLE 0x8000u /* in the list: the unit is inside the tile */

template <class Sizes> struct paint_shared {
    line_queues<Sizes::few> queues[Sizes::warps];
    uint32_t counts[QUEUE_KINDS][Sizes::warps];
    uint16_t hits[Sizes::hits];              /* the block's list: units or parts whose boxes touch the tile */
    uint32_t found;                          /* number of hits */
    alignas(16) uint32_t canvas[FUSED_WARP]; /* continues beyond the struct, row by row */
};

/* The position of a queue entry: the warp, and the index in that warp's queue. */
struct queue_place {
    uint32_t warp, at;
};

/* Returns the position of entry `i`, counted over the queues of all warps; `counts` has each queue's size. */
template <uint32_t Warps>
static __device__ __forceinline__ queue_place queue_find(const uint32_t *counts, uint32_t i)
{
    queue_place place = {0, i};
    while (place.warp < Warps && place.at >= counts[place.warp])
        place.at -= counts[place.warp++];
    return place;
}

/* ---- A warp that paints ---- */

template <bool Wide, formula_id Formula, class Sizes = paint_sizes<>> struct painter {
    using queues = line_queues<Sizes::few>;
    static constexpr uint32_t PAINT_WARPS = Sizes::warps, PAINT_BLOCK = Sizes::block,
                              PAINT_HITS = Sizes::hits, PAINT_BATCHES = PAINT_HITS / PAINT_BLOCK;
    static constexpr bool Long = Sizes::is_long, Few = Sizes::few;
    /* Units inside a tile are queued faster. Boxes of Wide units are clamped, so they do not tell. */
    static constexpr bool Whole = !Few && !Wide;
    paint_shared<Sizes> *shared;
    struct tile tile;
    int32_t res;
    uint32_t canvas, mine;              /* shared-memory addresses of the canvas and of the warp's queues */
    uint32_t inside, crossing, strokes; /* number of entries in each queue; no strokes if Few */
    uint32_t steep, flat;               /* stroke.place for major axis y, and for major axis x */
    uint32_t warp, lane, lower;         /* `lower`: mask of the lanes below this one */
    /* Adding `here` to packed coordinates makes them relative to the tile, and biased. If `beyond` is then
     * added, the top bit of a field is set if the point is right of the tile (x) or below it (y). */
    uint32_t here;
    uint32_t beyond;
    const uint2 *boxes; /* per unit of the image */
    const uint4 *values;
    const fused_end<Wide> *ends;

    /* Returns the number of lower lanes in `mask`. */
    __device__ __forceinline__ uint32_t rank(uint32_t mask) const
    {
        return __popc(mask & lower);
    }

    /* -- From lines to strokes -- */

    /* Returns the slope of a line in fixed point, with the sign of `minor`; see "Strokes" above. `major` is
     * not negative. */
    static __device__ __forceinline__ int32_t slope_of(int32_t major, int32_t minor)
    {
        /* If major is 0, minor is 0, too. The quotient is then NaN, which the conversion turns into 0. */
        return (int32_t)quotient((float)(minor * 65536), (float)major) + (minor < 0 ? -1 : 1);
    }

    /* Returns the stroke of a whole line with these differences between its ends, from (0, 0) on, and its
     * slope.
     */
    __device__ __forceinline__ stroke stroke_along(int32_t dx, int32_t dy, uint32_t value,
                                                   int32_t *slope) const
    {
        const bool is_steep = abs(dy) >= abs(dx);
        const int32_t major = is_steep ? dy : dx, minor = is_steep ? dx : dy, length = max(abs(dx), abs(dy));
        *slope = slope_of(length, minor);
        stroke self;
        self.at = minor < 0 ? 0xFFFF - STROKE_BIAS : STROKE_BIAS;
        self.step = (uint32_t)(major < 0 ? -(1 << 24) : 1 << 24) + (uint32_t)*slope;
        self.place = is_steep ? steep : flat;
        self.value = value;
        self.left = length + paints_points();
        return self;
    }

    /* Returns the stroke of a whole line in tile coordinates, and its slope. The first pixel may be outside
     * the tile. */
    __device__ __forceinline__ stroke stroke_of(int2 from, int2 to, uint32_t value, int32_t *slope) const
    {
        stroke self = stroke_along(to.x - from.x, to.y - from.y, value, slope);
        const bool is_steep = self.place == steep;
        self.at +=
            ((uint32_t)(is_steep ? from.y : from.x) << 24) + ((uint32_t)(is_steep ? from.x : from.y) << 16);
        return self;
    }

    /* Converts a queue entry, a line inside the tile, to a stroke. */
    __device__ __forceinline__ stroke stroke_inside(uint2 entry) const
    {
        int32_t dx, dy, slope;
        asm("dp4a.u32.s32 %0, %1, 0x000100FF, 0;" : "=r"(dx) : "r"(entry.x)); /* byte 2 minus byte 0 */
        asm("dp4a.u32.s32 %0, %1, 0x0100FF00, 0;" : "=r"(dy) : "r"(entry.x)); /* byte 3 minus byte 1 */
        stroke self = stroke_along(dx, dy, entry.y, &slope);
        self.at = __byte_perm(entry.x, self.at, self.place == steep ? 0x1054 : 0x0154);
        return self;
    }

    /* Returns the first step s at which a line has made `count` minor steps, where `count` is at least 1. The
     * result is limited to STROKE_MAJOR_MAX + 1. */
    static __device__ __forceinline__ int32_t first_step(int32_t count, int32_t slope)
    {
        int32_t way = (min(count, STROKE_MAJOR_MAX + 1) << 16) - STROKE_BIAS;
        /* For s up to STROKE_MAJOR_MAX, the quotient has an error of at most 2^-16. The converted quotient is
         * therefore the exact step or one less. */
        int32_t s = (int32_t)(quotient((float)way, (float)slope) + 0x1p-8f);
        s += s * slope < way;
        return min(s, STROKE_MAJOR_MAX + 1);
    }

    /* Clips a stroke to the tile. */
    __device__ __forceinline__ void clip(stroke &self, int2 from, int2 to, int32_t slope) const
    {
        bool is_steep = self.place == steep;
        int32_t major = is_steep ? to.y - from.y : to.x - from.x,
                minor = is_steep ? to.x - from.x : to.y - from.y;
        int32_t begin_major = is_steep ? from.y : from.x, begin_minor = is_steep ? from.x : from.y;
        int32_t size_major = is_steep ? tile.height : tile.width,
                size_minor = is_steep ? tile.width : tile.height;
        int32_t first = major < 0 ? begin_major - (size_major - 1) : -begin_major;
        int32_t end = major < 0 ? begin_major + 1 : size_major - begin_major;
        /* The number of minor steps until the line enters the tile, and until it leaves the tile. */
        int32_t enter = minor < 0 ? begin_minor - (size_minor - 1) : -begin_minor;
        int32_t leave = minor < 0 ? begin_minor + 1 : size_minor - begin_minor;
        if (enter > 0)
            first = max(first, first_step(enter, abs(slope)));
        end = leave > 0 ? min(end, first_step(leave, abs(slope))) : 0;
        first = max(first, 0);
        self.left = min(self.left, end) - first;
        self.at += (uint32_t)first * self.step;
    }

    static __device__ __forceinline__ int2 unpack(uint32_t packed)
    {
        int32_t x = (int16_t)packed;
        return make_int2(x, ((int32_t)packed - x) >> 16);
    }

    static __device__ __forceinline__ int2 unpack(int2 point)
    {
        return point;
    }

    /* Draws one long line with the whole warp, one pixel per lane at a time. `between` has the ends (x, y)
     * and (z, w). Computes m(s) of "Strokes" in integers. */
    __device__ __forceinline__ void draw_long(int4 between, uint32_t value) const
    {
        /* Packed ends are less than 2^15 apart, so 2 minor s + major < 2^32: 32 bits suffice. */
        using whole = std::conditional_t<Wide, uint64_t, uint32_t>;
        constexpr struct line_rules rules = line_rules_of(Formula);
        struct line line = line_begin(&rules, between.x, between.y, between.z, between.w);
        bool is_steep = line.major_y != 0, back = line.major_x + line.major_y < 0;
        int32_t begin = is_steep ? line.y : line.x, size = is_steep ? tile.height : tile.width;
        int32_t first = max(back ? begin - (size - 1) : -begin, 0);
        int32_t end = min(back ? begin + 1 : size - begin, line.left);
        for (int32_t s = first + (int32_t)lane; s < end; s += FUSED_WARP) {
            whole steps = (2 * (whole)line.minor * (whole)s + (whole)line.major) / (2 * (whole)line.major);
            int32_t x = line.x + s * line.major_x + (int32_t)steps * line.minor_x;
            int32_t y = line.y + s * line.major_y + (int32_t)steps * line.minor_y;
            if ((uint32_t)x < (uint32_t)tile.width && (uint32_t)y < (uint32_t)tile.height)
                shared_max(canvas + 4 * ((uint32_t)y * tile.pitch + (uint32_t)x), value);
        }
    }

    /* Draws a long line per lane, pixel by pixel, in those lanes where `mine` is set. */
    __device__ __forceinline__ void draw_own_long(bool mine, int2 from, int2 to, uint32_t value) const
    {
        using whole = std::conditional_t<Wide, uint64_t, uint32_t>; /* as in draw_long() */
        constexpr struct line_rules rules = line_rules_of(Formula);
        struct line line = line_begin(&rules, from.x, from.y, to.x, to.y);
        bool is_steep = line.major_y != 0, back = line.major_x + line.major_y < 0;
        int32_t begin = is_steep ? line.y : line.x, size = is_steep ? tile.height : tile.width;
        int32_t first = max(back ? begin - (size - 1) : -begin, 0);
        int32_t end = mine ? min(back ? begin + 1 : size - begin, line.left) : 0;
        whole sum = 2 * (whole)line.minor * (whole)first + (whole)line.major, around = 2 * (whole)line.major;
        whole steps = mine ? sum / around : 0;
        uint32_t rest = (uint32_t)(sum - steps * around);
        int32_t x = line.x + first * line.major_x + (int32_t)steps * line.minor_x;
        int32_t y = line.y + first * line.major_y + (int32_t)steps * line.minor_y;
        for (int32_t s = first; s < end; s++) {
            if ((uint32_t)x < (uint32_t)tile.width && (uint32_t)y < (uint32_t)tile.height)
                shared_max(canvas + 4 * ((uint32_t)y * tile.pitch + (uint32_t)x), value);
            rest += 2 * (uint32_t)line.minor;
            bool carry = rest >= (uint32_t)around;
            rest -= carry ? (uint32_t)around : 0;
            x += line.major_x + (carry ? line.minor_x : 0);
            y += line.major_y + (carry ? line.minor_y : 0);
        }
        __syncwarp();
    }

    /* Converts a queue entry, a line that crosses the tile's border, to a stroke. Draws long lines
     * immediately, and returns stroke_none() for them. */
    __device__ __forceinline__ stroke stroke_crossing(uint32_t entry, bool valid) const
    {
        const auto *end = reinterpret_cast<const std::conditional_t<Wide, int2, uint32_t> *>(ends) + entry;
        int2 from = unpack(end[0]), to = unpack(end[FUSED_ORBITS]);
        uint32_t value = reinterpret_cast<const uint32_t *>(values)[entry >> 7 << 2 | entry % FUSED_ORBITS];
        constexpr struct line_rules rules = line_rules_of(Formula);
        valid = valid && line_drawn(&rules, from.x, from.y, to.x, to.y, res);
        from = make_int2(from.x - tile.x, from.y - tile.y);
        to = make_int2(to.x - tile.x, to.y - tile.y);
        bool is_long = max(abs(to.x - from.x), abs(to.y - from.y)) > STROKE_MAJOR_MAX;
        uint32_t longs = __ballot_sync(FUSED_ALL, valid && is_long);
        if (Long && __popc(longs) > LONG_FEW) {
            draw_own_long(valid && is_long, from, to, value);
            longs = 0;
        }
        for (; longs; longs &= longs - 1) {
            int source = __ffs(longs) - 1;
            draw_long(make_int4(__shfl_sync(FUSED_ALL, from.x, source),
                                __shfl_sync(FUSED_ALL, from.y, source), __shfl_sync(FUSED_ALL, to.x, source),
                                __shfl_sync(FUSED_ALL, to.y, source)),
                      __shfl_sync(FUSED_ALL, value, source));
        }
        int32_t slope;
        valid = valid && !is_long;
        to = valid ? to : from;
        stroke self = stroke_of(from, to, value, &slope);
        clip(self, from, to, slope);
        return valid && self.left > 0 ? self : stroke_none(lane);
    }

    /* Converts a queue entry of a stroke to a struct path. */
    __device__ __forceinline__ path path_again(uint4 entry) const
    {
        return {entry.x, entry.y, entry.w & 0x7FFFFFFF, (int32_t)entry.w < 0 ? steep : flat, entry.z};
    }

    /* -- Queues -- */

    /* Return the addresses of entries of the queues at address `queue`. */
    static __device__ __forceinline__ uint32_t inside_at(uint32_t queue, uint32_t i)
    {
        if constexpr (Few)
            return queue + i * (uint32_t)sizeof(uint2);
        else
            return queue + (uint32_t)offsetof(queues, inside) + i * (uint32_t)sizeof(uint2);
    }

    static __device__ __forceinline__ uint32_t crossing_at(uint32_t queue, uint32_t i)
    {
        if constexpr (Few)
            return queue + (QUEUE_FEW - 1) * (uint32_t)sizeof(uint2) - i * (uint32_t)sizeof(uint2);
        else
            return queue + (uint32_t)offsetof(queues, crossing) + i * (uint32_t)sizeof(uint32_t);
    }

    /* take_stroke(), take_inside() and take_crossing() remove the last 32 entries of a queue, one per
     * lane. */
    __device__ __forceinline__ path take_stroke()
    {
        strokes -= FUSED_WARP;
        return path_again(shared_load4(mine + offsetof(queues, strokes) + (strokes + lane) * sizeof(uint4)));
    }

    __device__ __forceinline__ stroke take_inside()
    {
        inside -= FUSED_WARP;
        return stroke_inside(shared_load2(inside_at(mine, inside + lane)));
    }

    __device__ __forceinline__ stroke take_crossing()
    {
        crossing -= FUSED_WARP;
        return stroke_crossing(shared_load(crossing_at(mine, crossing + lane)), true);
    }

    /* Paints STROKE_STEPS pixels of each lane's path and queues the rest. */
    __device__ __forceinline__ void walk(path self)
    {
        const bool more = path_walk(self, canvas);
        const uint32_t mask = __ballot_sync(FUSED_ALL, more);
        /* Bit 2 of `place` is set if it is `steep`, because the pitch is even. */
        shared_store_if(more, mine + offsetof(queues, strokes) + (strokes + rank(mask)) * sizeof(uint4),
                        make_uint4(self.at, self.last, self.value, (self.place << 29) + self.step));
        strokes += __popc(mask);
        __syncwarp();
    }

    /* Paints the strokes of all lanes. Each lane paints the first STROKE_STEPS pixels of its stroke. Then the
     * lanes divide the other parts of STROKE_STEPS pixels among themselves. */
    __device__ __forceinline__ void walk_together(path first) const
    {
        const uint32_t left = path_walk(first, canvas) ? path_left(first) : 0;
        if (!__any_sync(FUSED_ALL, left > 0))
            return;
        /* The parts of this lane's stroke have the numbers begin .. end - 1, counted over all lanes. */
        const uint32_t count = (left + STROKE_STEPS - 1) / STROKE_STEPS, end = fused_running_sum(count);
        const uint32_t all = __reduce_max_sync(FUSED_ALL, end), begin = end - count;
        const uint32_t packed = left | (first.place == steep ? 0x100 : 0) | begin << 16;
#pragma unroll 1
        for (uint32_t base = 0; base < all; base += FUSED_WARP) {
            const uint32_t i = base + lane;
            uint32_t owner = 0; /* the lane whose stroke has part i */
#pragma unroll
            for (uint32_t step = FUSED_WARP / 2; step > 0; step /= 2)
                owner += __shfl_sync(FUSED_ALL, end, owner + step - 1) <= i ? step : 0;
            const uint32_t other = __shfl_sync(FUSED_ALL, packed, owner);
            const uint32_t skip = (i - (other >> 16)) * STROKE_STEPS;
            path part;
            part.step = __shfl_sync(FUSED_ALL, first.step, owner);
            part.at = __shfl_sync(FUSED_ALL, first.at, owner) + skip * part.step;
            part.last = __shfl_sync(FUSED_ALL, first.last, owner);
            part.value = __shfl_sync(FUSED_ALL, first.value, owner);
            part.place = other & 0x100 ? steep : flat;
            if (i >= all)
                part = path_of(stroke_none(lane));
            path_walk(part, canvas);
        }
    }

    /* Draws up to 32 paths, one per lane. */
    __device__ __forceinline__ void draw_paths(const path &self)
    {
        if constexpr (Few)
            walk_together(self);
        else
            walk(self);
    }

    /* Processes entries until every queue has fewer than 32. There is a single call of walk(), because walk()
     * is inlined: further calls would enlarge the code. */
    __device__ __forceinline__ void work()
    {
        for (;;) {
            path self;
            bool again = false;
            if constexpr (!Few) {
                again = strokes >= FUSED_WARP;
                if (again)
                    self = take_stroke();
            }
            if (again)
                ;
            else if (inside >= FUSED_WARP)
                self = path_of(take_inside());
            else if (crossing >= FUSED_WARP)
                self = path_of(take_crossing());
            else
                return;
            __syncwarp();
            draw_paths(self);
        }
    }

    /* -- Units -- */

    /* Returns on which sides of the tile an end is. Bit 31 is set if the end is below the tile, bit 30 if
     * above, bit 15 if right, bit 14 if left of it. The other bits are undefined. The fields of `end` have 15
     * bits. */
    __device__ __forceinline__ uint32_t sides(uint32_t end) const
    {
        /* Bits 31 and 15 come from end + beyond, bits 30 and 14 from ~end. */
        uint32_t result;
        asm("lop3.b32 %0, %1, %2, 0x80008000, 0xb1;" : "=r"(result) : "r"(end + beyond), "r"(end));
        return result;
    }

    /* Returns whether the formula paints end points. Only then do lines of length zero have a pixel. */
    static __device__ constexpr bool paints_points()
    {
        return line_rules_of(Formula).ends;
    }

    /* Queues those lines of an orbit whose bounding boxes touch the tile. The ends are packed. Surplus orbits
     * of the last unit have value 0, so that drawing their lines changes nothing. */
    __device__ __forceinline__ void push(uint32_t packed, uint32_t entry, uint32_t value)
    {
        const uint32_t end = packed + here;
        push_pair(end, __shfl_down_sync(FUSED_ALL, end, 1), true, entry, value);
    }

    /* Queues the lines of an orbit of a unit that is inside the tile. */
    __device__ __forceinline__ void push_inside(uint32_t packed, uint32_t value)
    {
        const uint32_t end = packed + here, next = __shfl_down_sync(FUSED_ALL, end, 1);
        /* In the last lane, `next` is `end`. */
        const bool valid = paints_points() ? lane < FUSED_LINES : end != next;
        const uint32_t mask = __ballot_sync(FUSED_ALL, valid);
        if (valid)
            shared_store(inside_at(mine, inside + rank(mask)),
                         make_uint2(__byte_perm(end, next, 0x6420), value));
        inside += __popc(mask);
    }

    /* Queues the line from `end` to `next`, which are relative to the tile and biased, if it is valid and its
     * bounding box touches the tile. */
    __device__ __forceinline__ void push_pair(uint32_t end, uint32_t next, bool valid, uint32_t entry,
                                              uint32_t value)
    {
        const uint32_t all = 0xC000C000u;
        uint32_t a = sides(end), b = sides(next), outside;
        asm("lop3.b32 %0, %1, %2, 0xC000C000, 0x80;" : "=r"(outside) : "r"(a), "r"(b));
        bool is_inside = ((a | b) & all) == 0;
        push_lines(valid && is_inside && (end != next || paints_points()),
                   valid && outside == 0 && !is_inside, __byte_perm(end, next, 0x6420), entry, value);
    }

    /* Queues those lines of an orbit whose bounding boxes touch the tile. The ends are not packed. */
    __device__ __forceinline__ void push(int2 end, uint32_t entry, uint32_t value)
    {
        push_line(end,
                  make_int2(__shfl_down_sync(FUSED_ALL, end.x, 1), __shfl_down_sync(FUSED_ALL, end.y, 1)),
                  lane < FUSED_LINES, entry, value);
    }

    /* Queues a line if it is valid and its bounding box touches the tile. */
    __device__ __forceinline__ void push_line(uint32_t end, uint32_t next, bool valid, uint32_t entry,
                                              uint32_t value)
    {
        push_pair(end + here, next + here, valid, entry, value);
    }

    __device__ __forceinline__ void push_line(int2 end, int2 next, bool line, uint32_t entry, uint32_t value)
    {
        end.x -= tile.x;
        end.y -= tile.y;
        next.x -= tile.x;
        next.y -= tile.y;
        bool is_inside = line && in_tile(end) && in_tile(next);
        bool touches = line && min(end.x, next.x) < tile.width && max(end.x, next.x) >= 0 &&
                       min(end.y, next.y) < tile.height && max(end.y, next.y) >= 0;
        bool is_point = end.x == next.x && end.y == next.y;
        push_lines(is_inside && (!is_point || paints_points()), touches && !is_inside,
                   (uint32_t)end.x | (uint32_t)end.y << 8 | (uint32_t)next.x << 16 | (uint32_t)next.y << 24,
                   entry, value);
    }

    __device__ __forceinline__ bool in_tile(int2 point) const
    {
        return (uint32_t)point.x < (uint32_t)tile.width && (uint32_t)point.y < (uint32_t)tile.height;
    }

    /* Appends each lane's line to a queue. `bytes`: the four coordinates of a line inside the tile. */
    __device__ __forceinline__ void push_lines(bool is_inside, bool is_crossing, uint32_t bytes,
                                               uint32_t entry, uint32_t value)
    {
        if (Few && !__any_sync(FUSED_ALL, is_inside || is_crossing))
            return;
        uint32_t inside_mask = __ballot_sync(FUSED_ALL, is_inside);
        uint32_t crossing_mask = __ballot_sync(FUSED_ALL, is_crossing);
        if (is_inside)
            shared_store(inside_at(mine, inside + rank(inside_mask)), make_uint2(bytes, value));
        if (is_crossing)
            shared_store(crossing_at(mine, crossing + rank(crossing_mask)), entry);
        inside += __popc(inside_mask);
        crossing += __popc(crossing_mask);
    }

    /* The boxes of up to PAINT_HITS units, which the threads of the block test. */
    struct box_set {
        uint2 box[PAINT_BATCHES];
    };

    /* Loads the boxes of units begin .. end - 1, at most PAINT_HITS. */
    __device__ __forceinline__ box_set load_boxes(uint32_t begin, uint32_t end) const
    {
        box_set self;
#pragma unroll
        for (uint32_t k = 0; k < PAINT_BATCHES; k++) {
            self.box[k] = make_uint2(FUSED_NOWHERE, FUSED_NOWHERE);
            if (Few && k * PAINT_BLOCK >= end - begin) /* often, there are fewer than PAINT_BLOCK boxes */
                continue;
            uint32_t u = begin + k * PAINT_BLOCK + threadIdx.x;
            if (u < end)
                self.box[k] = __ldg(boxes + u);
        }
        return self;
    }

    /* Returns which boxes of the calling thread touch the tile, one bit per box. If Whole, bit PAINT_BATCHES
     * + k says whether box k is inside the tile. */
    __device__ __forceinline__ uint32_t test_boxes(const box_set &set, uint32_t count) const
    {
        /* A box touches the tile unless its high corner is left of or above the tile, or its low corner is
         * right of or below the tile. */
        uint32_t outside = FUSED_BIAS - FUSED_PACK(tile.width, tile.height), hits = 0;
#pragma unroll
        for (uint32_t k = 0; k < PAINT_BATCHES; k++) {
            if (Few && k * PAINT_BLOCK >= count)
                break;
            bool hit = ((~(set.box[k].y + here) & 0x40004000u) |
                        ((set.box[k].x + here + outside) & 0x80008000u)) == 0;
            hits |= (uint32_t)hit << k;
            const bool whole = ((~(set.box[k].x + here) & 0x40004000u) |
                                ((set.box[k].y + here + outside) & 0x80008000u)) == 0;
            if (Whole)
                hits |= (uint32_t)whole << (PAINT_BATCHES + k);
        }
        return hits;
    }

    /* Lists the units whose boxes touch the tile. `hits`: from test_boxes(). All threads of the block must
     * call this. */
    __device__ __forceinline__ void list(uint32_t hits)
    {
        uint32_t masks[PAINT_BATCHES], all = 0;
#pragma unroll
        for (uint32_t k = 0; k < PAINT_BATCHES; k++) {
            masks[k] = __ballot_sync(FUSED_ALL, hits >> k & 1);
            all += __popc(masks[k]);
        }
        if (all == 0)
            return;
        uint32_t at =
            __shfl_sync(FUSED_ALL, lane == 0 ? shared_add(shared_address(&shared->found), all) : 0, 0);
#pragma unroll
        for (uint32_t k = 0; k < PAINT_BATCHES; k++) {
            const uint32_t whole = hits >> (PAINT_BATCHES + k) & 1;
            if (hits >> k & 1)
                shared->hits[at + rank(masks[k])] =
                    (uint16_t)(k * PAINT_BLOCK + threadIdx.x | whole * HIT_WHOLE);
            at += __popc(masks[k]);
        }
    }

    /* A line of a part of a unit. Lane l has the line l / FUSED_ORBITS of the part, in the orbit l %
     * FUSED_ORBITS. */
    struct part_load {
        std::conditional_t<Wide, int2, uint32_t> from, to;
        uint32_t entry, value;
        bool valid;
    };

    __device__ __forceinline__ part_load load_part(uint32_t part) const
    {
        const uint32_t unit = part / FUSED_PARTS, orbit = lane % FUSED_ORBITS;
        const uint32_t line = part % FUSED_PARTS * FUSED_PART + lane / FUSED_ORBITS;
        const fused_end<Wide> *end = ends + (size_t)unit * FUSED_WARP + line;
        const bool valid = line < FUSED_LINES;
        return {__ldg(&end->at[orbit]), __ldg(&end[valid ? 1 : 0].at[orbit]), unit << 7 | line << 2 | orbit,
                __ldg(reinterpret_cast<const uint32_t *>(values + unit) + orbit), valid};
    }

    /* Draws the lines of the listed parts of units. Fewer than 32 lines of each kind stay queued. The next
     * part is loaded while the current one is processed. */
    __device__ __forceinline__ void draw_parts(uint32_t begin)
    {
        uint32_t found = fused_uniform(shared->found), hits = shared_address(shared->hits);
        if (warp >= found)
            return;
        part_load next = load_part(begin + shared_load16(hits + warp * sizeof(uint16_t)));
#pragma unroll 1
        for (uint32_t i = warp; i < found; i += PAINT_WARPS) {
            part_load part = next;
            if (i + PAINT_WARPS < found)
                next = load_part(begin + shared_load16(hits + (i + PAINT_WARPS) * sizeof(uint16_t)));
            push_line(part.from, part.to, part.valid, part.entry, part.value);
            __syncwarp();
            if (max(inside, crossing) >= FUSED_WARP)
                work();
        }
    }

    /* A unit that is being loaded from memory. Bit 31 of `unit` is set if it is inside the tile. */
    struct load {
        uint32_t unit;
        fused_end<Wide> end;
        uint4 values;
    };

    /* Loads a unit of the list, where units are counted from `begin` on. */
    __device__ __forceinline__ load load_unit(uint32_t begin, uint32_t hit) const
    {
        const uint32_t unit = begin + hit % HIT_WHOLE;
        load self;
        self.unit = unit | (hit & HIT_WHOLE) << 16;
        const uint4 *from = reinterpret_cast<const uint4 *>(ends + (size_t)unit * FUSED_WARP + lane);
#pragma unroll
        for (size_t k = 0; k < sizeof self.end / sizeof *from; k++)
            reinterpret_cast<uint4 *>(&self.end)[k] = __ldg(from + k);
        self.values = __ldg(values + unit);
        return self;
    }

    /* Queues the lines of a unit, two orbits at a time. Processes queues that reach 32 entries. */
    __device__ __forceinline__ void draw_unit(const load &unit)
    {
#pragma unroll 1
        for (uint32_t orbit = 0; orbit < FUSED_ORBITS; orbit += 2) {
            uint32_t entry = unit.unit << 7 | lane << 2 | orbit;
            const auto first = orbit ? unit.end.at[2] : unit.end.at[0],
                       second = orbit ? unit.end.at[3] : unit.end.at[1];
            const uint32_t first_value = orbit ? unit.values.z : unit.values.x;
            const uint32_t second_value = orbit ? unit.values.w : unit.values.y;
            bool whole = false;
            if constexpr (Whole) {
                whole = (int32_t)unit.unit < 0;
                if (whole) {
                    push_inside(first, first_value);
                    push_inside(second, second_value);
                }
            }
            if (!whole) {
                push(first, entry, first_value);
                push(second, entry | 1, second_value);
            }
            __syncwarp();
            if (max(inside, crossing) >= FUSED_WARP)
                work();
        }
    }

    /* Draws the lines of the listed units. Fewer than 32 lines of each kind stay queued. The next unit is
     * loaded while the current one is processed. */
    __device__ __forceinline__ void draw(uint32_t begin)
    {
        uint32_t found = fused_uniform(shared->found), hits = shared_address(shared->hits);
        if (warp >= found)
            return;
        load next = load_unit(begin, shared_load16(hits + warp * sizeof(uint16_t)));
        for (uint32_t i = warp; i < found; i += PAINT_WARPS) {
            load unit = next;
            if (i + PAINT_WARPS < found)
                next = load_unit(begin, shared_load16(hits + (i + PAINT_WARPS) * sizeof(uint16_t)));
            draw_unit(unit);
        }
    }

    /* -- The end: the warps of a block share the entries that remain in their queues -- */

    /* Publishes the number of entries in this warp's queue to the other warps, through shared memory. */
    __device__ __forceinline__ void publish(enum queue_kind kind, uint32_t count)
    {
        if (lane == 0)
            shared->counts[kind][warp] = count;
    }

    /* Returns the number of entries in the queues of all warps. */
    __device__ __forceinline__ uint32_t published(enum queue_kind kind) const
    {
        return __reduce_add_sync(FUSED_ALL, lane < PAINT_WARPS ? shared->counts[kind][lane] : 0);
    }

    /* Returns the address of a warp's queues. */
    __device__ __forceinline__ uint32_t queue_of(uint32_t other) const
    {
        return mine + (other - warp) * (uint32_t)sizeof(queues);
    }

    /* Draws the lines that remain in all queues, 32 per warp at a time. */
    __device__ __forceinline__ void finish_lines()
    {
        publish(QUEUE_INSIDE, inside);
        publish(QUEUE_CROSSING, crossing);
        __syncthreads();
        uint32_t all_inside = published(QUEUE_INSIDE), all_crossing = published(QUEUE_CROSSING);
        uint32_t loads_inside = (all_inside + FUSED_WARP - 1) / FUSED_WARP;
        uint32_t loads = loads_inside + (all_crossing + FUSED_WARP - 1) / FUSED_WARP;
        inside = crossing = 0;
        for (uint32_t load = warp; load < loads; load += PAINT_WARPS) {
            stroke self;
            if (load < loads_inside) {
                uint32_t i = load * FUSED_WARP + lane;
                queue_place place =
                    queue_find<PAINT_WARPS>(shared->counts[QUEUE_INSIDE], min(i, all_inside - 1));
                self = stroke_inside(shared_load2(inside_at(queue_of(place.warp), place.at)));
                self = i < all_inside ? self : stroke_none(lane);
            } else {
                uint32_t i = (load - loads_inside) * FUSED_WARP + lane;
                queue_place place =
                    queue_find<PAINT_WARPS>(shared->counts[QUEUE_CROSSING], min(i, all_crossing - 1));
                self = stroke_crossing(shared_load(crossing_at(queue_of(place.warp), place.at)),
                                       i < all_crossing);
            }
            draw_paths(path_of(self));
            if constexpr (!Few)
                work();
        }
    }

    /* Draws at most SPLIT_STROKES strokes that remain in all queues. Each batch of 32 strokes has `sharing`
     * warps, which draw its parts of STROKE_STEPS pixels in turn. */
    __device__ __forceinline__ void split_strokes(uint32_t all)
    {
        static_assert(SPLIT_STROKES / FUSED_WARP <= PAINT_WARPS, "each batch has a warp");
        const uint32_t batches = (all + FUSED_WARP - 1) / FUSED_WARP;
        if (batches == 0)
            return;
        /* Division by 1 to 4. The compiler would call a function, and then assume that lanes diverge. */
        static_assert(SPLIT_STROKES == 4 * FUSED_WARP, "at most four batches");
        const uint32_t inverse = batches == 3 ? 21846 : 65536 >> batches / 2;
        const uint32_t sharing = PAINT_WARPS * inverse >> 16, part = warp * inverse >> 16;
        const uint32_t batch = warp - part * batches;
        if (part >= sharing)
            return;
        const queue_place place =
            queue_find<PAINT_WARPS>(shared->counts[QUEUE_STROKE], min(batch * FUSED_WARP + lane, all - 1));
        path self = path_again(shared->queues[place.warp].strokes[place.at]);
        int32_t left = (int32_t)path_left(self) - (int32_t)(part * STROKE_STEPS);
        self.at += part * STROKE_STEPS * self.step;
        while (__any_sync(FUSED_ALL, left > 0)) {
            path now = left > 0 ? self : path_of(stroke_none(lane));
            path_walk(now, canvas);
            self.at += sharing * STROKE_STEPS * self.step;
            left -= (int32_t)(sharing * STROKE_STEPS);
        }
    }

    /* Draws the strokes that remain in all queues, 32 per warp at a time. */
    __device__ __forceinline__ void finish_strokes()
    {
        publish(QUEUE_STROKE, strokes);
        __syncthreads();
        uint32_t all = published(QUEUE_STROKE);
        if (Long && all <= SPLIT_STROKES) {
            split_strokes(all);
            return;
        }
        for (uint32_t base = warp * FUSED_WARP; base < all; base += PAINT_BLOCK) {
            queue_place place =
                queue_find<PAINT_WARPS>(shared->counts[QUEUE_STROKE], min(base + lane, all - 1));
            path self = path_again(shared->queues[place.warp].strokes[place.at]);
            /* Lanes beyond the last entry draw the last entry again, which changes nothing. */
            for (;;) {
                const bool more = path_walk(self, canvas);
                if (!__any_sync(FUSED_ALL, more))
                    break;
                self = more ? self : path_of(stroke_none(lane));
            }
        }
    }

    /* Draws an image's units on the canvas. All threads of the block must call this. The caller has listed
     * the first units, or parts of them, and has waited for it. */
    __device__ __forceinline__ void paint(uint32_t unit_count)
    {
        for (uint32_t begin = 0; begin < unit_count; begin += PAINT_HITS) {
            if (begin > 0) {
                __syncthreads();
                if (threadIdx.x == 0)
                    shared->found = 0;
                __syncthreads();
                const uint32_t end = min(unit_count, begin + PAINT_HITS);
                list(test_boxes(load_boxes(begin, end), end - begin));
                __syncthreads();
            }
            if constexpr (Few)
                draw_parts(begin);
            else
                draw(begin);
        }
        finish_lines();
        if constexpr (!Few)
            finish_strokes();
    }
};

/* ---- The kernel ---- */

/* The last images of a slice, whose tiles are painted in order of work. */
#define PAINT_LAST 32

/* The tile of a block. */
struct paint_place {
    uint32_t rank; /* of the image */
    uint32_t column, row;
};

/* Returns the tile that is number `number` in order of their distance from the middle of the image's shape.
 * All lanes of a warp must call this. An image has at most FUSED_WARP tiles. */
static __device__ __forceinline__ uint32_t tile_by_distance(const fused_job &job, const fused_card &card,
                                                            uint32_t number)
{
    const uint32_t lane = threadIdx.x % FUSED_WARP, count = job.tiling.columns * job.tiling.rows;
    const float x = (float)(lane % job.tiling.columns) - card.middle_x;
    const float y = (float)(lane / job.tiling.columns) - card.middle_y;
    const float distance = lane < count ? fmaf(x, x, y * y) : INFINITY;
    uint32_t before = 0;
    for (uint32_t other = 0; other < count; other++)
        before += fused_before(-__shfl_sync(FUSED_ALL, distance, other), other, -distance, lane);
    return __ffs(__ballot_sync(FUSED_ALL, lane < count && before == number)) - 1;
}

/* Returns the tile of this block. The tiles of an image follow each other, except those of the last images:
 * there, the tiles with the most lines begin first, so that no block begins a tile with many lines when the
 * others end. */
static __device__ __forceinline__ paint_place paint_place_of(const fused_job &job)
{
    const uint32_t columns = job.tiling.columns, tiles = columns * job.tiling.rows;
    const uint32_t last = min(job.count, PAINT_LAST), begin = job.count - last;
    if (tiles > FUSED_WARP || blockIdx.z < begin)
        return {blockIdx.z, blockIdx.x, blockIdx.y};
    const uint32_t number = (blockIdx.z - begin) * tiles + blockIdx.y * columns + blockIdx.x;
    const uint32_t rank = begin + number % last, tile = tile_by_distance(job, job.cards[rank], number / last);
    return {rank, tile % columns, tile / columns};
}

/* Returns the area of a tile. */
static __device__ __forceinline__ struct tile tile_at(const fused_job &job, const fused_card &card,
                                                      const paint_place &place)
{
    const struct fused_tiling &tiling = job.tiling;
    uint32_t res = job.input.res, out_res = job.output.res;
    struct tile tile;
    tile.out_x = place.column * tiling.out_width;
    tile.out_y = place.row * tiling.out_height;
    tile.out_width = min(tiling.out_width, out_res - tile.out_x);
    tile.out_height = min(tiling.out_height, out_res - tile.out_y);
    tile.pitch = tiling.pitch;
    if (job.output.fit == OUTPUT_RESIZE) {
        tile.x = (int32_t)output_span(tile.out_x, res, out_res).first;
        tile.y = (int32_t)output_span(tile.out_y, res, out_res).first;
        tile.width = (int32_t)output_span(tile.out_x + tile.out_width - 1, res, out_res).last + 1 - tile.x;
        tile.height = (int32_t)output_span(tile.out_y + tile.out_height - 1, res, out_res).last + 1 - tile.y;
        return tile;
    }
    tile.x = (int32_t)(card.corner.x + tile.out_x);
    tile.y = (int32_t)(card.corner.y + tile.out_y);
    tile.width = (int32_t)tile.out_width;
    tile.height = (int32_t)tile.out_height;
    return tile;
}

template <bool Wide, formula_id Formula, class Sizes>
static __device__ __forceinline__ painter<Wide, Formula, Sizes>
painter_of(const fused_job &job, paint_shared<Sizes> *shared, const struct tile &tile, size_t first_unit)
{
    uint32_t lane = threadIdx.x % FUSED_WARP, warp = fused_uniform(threadIdx.x / FUSED_WARP);
    painter<Wide, Formula, Sizes> self;
    self.shared = shared;
    self.tile = tile;
    self.res = (int32_t)job.input.res;
    self.lower = keep((1u << lane) - 1);
    /* `lower` >> 31 is 0; the compiler does not see it, and keeps the sum in a register per lane. */
    self.canvas = shared_address(shared->canvas) + (self.lower >> 31);
    self.mine = shared_address(&shared->queues[warp]);
    self.inside = self.crossing = self.strokes = 0;
    self.steep = keep(4 * tile.pitch << 16 | 4);
    self.flat = keep(4 << 16 | 4 * tile.pitch);
    self.warp = warp;
    self.lane = lane;
    self.here = fused_uniform(FUSED_BIAS - FUSED_PACK(tile.x, tile.y));
    /* The last lane has no line of its own, so its ends always count as outside. */
    self.beyond = pin(Sizes::few || lane < FUSED_LINES ? FUSED_BIAS - FUSED_PACK(tile.width, tile.height)
                                                       : 0x80008000u);
    self.boxes = keep(job.boxes + first_unit * Sizes::parts);
    self.values = keep(job.values + first_unit);
    self.ends = keep(static_cast<const fused_end<Wide> *>(job.ends) + first_unit * FUSED_WARP);
    return self;
}

/* Fills the block's canvas with a word. */
template <class Sizes>
static __device__ __forceinline__ void clear_canvas(const fused_job &job, paint_shared<Sizes> *shared,
                                                    uint32_t word)
{
    uint32_t vectors = job.tiling.pitch * job.tiling.height / 4;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < vectors; i += Sizes::block)
        reinterpret_cast<uint4 *>(shared->canvas)[i] = make_uint4(word, word, word, word);
}

/* One block paints one tile. The grid has columns (x) and rows (y) of tiles, and images (z). */
template <bool Wide, formula_id Formula, class Sizes>
static __global__ void __launch_bounds__(Sizes::block, Sizes::blocks)
    fused_paint_kernel(const __grid_constant__ fused_job job)
{
    extern __shared__ uint4 paint_memory[];
    constexpr struct line_rules rules = line_rules_of(Formula);
    paint_shared<Sizes> *shared = reinterpret_cast<paint_shared<Sizes> *>(paint_memory);
    wait_for_previous();
    const paint_place place = paint_place_of(job);
    const fused_card card = job.cards[place.rank];
    const uint32_t units = fused_uniform(card.units * Sizes::parts), count = min(units, Sizes::hits);
    if (threadIdx.x == 0)
        shared->found = 0;
    struct tile tile = tile_at(job, card, place);
    painter<Wide, Formula, Sizes> painter =
        painter_of<Wide, Formula>(job, shared, tile, fused_first_unit(job, card.place));
    const uint32_t hits = painter.test_boxes(painter.load_boxes(0, count), count);
    if constexpr (Sizes::few)
        if (!fused_uniform(__syncthreads_or(hits)) && units <= Sizes::hits &&
            write_empty<rules.masked>(job, place.rank, tile, rules.background))
            return;
    clear_canvas(job, shared, rules.background);
    __syncthreads();
    painter.list(hits);
    __syncthreads();
    painter.paint(units);
    __syncthreads();
    write_tile<rules.masked, Sizes::few>(job, place.rank, tile, shared->canvas);
}

#endif
