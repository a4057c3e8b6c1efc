/* `fused`: each lane of a warp draws a line on a canvas in shared memory, pixel by pixel.
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
#ifndef FDSL_CUDA_SYNTH_FUSED_STROKE_CUH
#define FDSL_CUDA_SYNTH_FUSED_STROKE_CUH

#include <stdint.h>

#include "common/shared.cuh"
#include "synth/fused.cuh"

static_assert(TILE_MOST <= 136, "the error bound is for up to 135 steps");
#define STROKE_MAJOR_MAX 127
#define STROKE_BIAS      (0x8000 + 4)
#define STROKE_STEPS     8 /* pixels per call of stroke_walk() */

/* A line that a lane is drawing. `at` is the next pixel in tile coordinates: major << 24 | minor << 16 |
 * fraction of minor. Adding `step` advances `at` by one pixel. */
struct stroke {
    uint32_t at, step;
    uint32_t
        place; /* bytes to the next canvas pixel: lower half along the minor, upper along the major axis */
    uint32_t value; /* value to paint; the larger value wins */
    int32_t left;   /* remaining pixels; stroke_walk() needs at least 1 */
};

/* Returns the address of the pixel at `at`: `canvas` + the dot product of its upper 2 bytes with `place`. */
static __device__ __forceinline__ uint32_t stroke_address(uint32_t canvas, uint32_t place, uint32_t at)
{
    uint32_t address;
    asm("dp2a.hi.u32.u32 %0, %1, %2, %3;" : "=r"(address) : "r"(place), "r"(at), "r"(canvas));
    return address;
}

/* Paints the next STROKE_STEPS pixels. If the line ends earlier, repaints its last pixel. */
static __device__ __forceinline__ void stroke_walk(stroke &self, uint32_t canvas)
{
    int32_t last = self.left - 1;
    shared_max(stroke_address(canvas, self.place, self.at), self.value);
#pragma unroll
    for (int32_t s = 1; s < STROKE_STEPS; s++)
        shared_max(stroke_address(canvas, self.place, self.at + self.step * (uint32_t)min(s, last)),
                   self.value);
    self.at += STROKE_STEPS * self.step;
    self.left -= STROKE_STEPS;
}

/* Returns a stroke for a lane without a line. It paints the value 0, which changes nothing. Each lane of the
 * warp paints to an address of its own. */
static __device__ __forceinline__ stroke stroke_none(uint32_t lane)
{
    return {lane << 16, 0, sizeof(uint32_t), 0, 1};
}

#endif
