/* `fused`: a lane walks along a line, on a canvas in shared memory.
 *
 * Pixel s of a line is `major` axis s, minor axis m(s) = floor((2 minor s + major) / (2 major)) steps from
 * its beginning (line.h). For lines that are short enough m(s) is the whole part of bias + s * slope in
 * 16-bit fixed point: slope is minor / major * 2^16 + 1, rounded down after a quotient that is off by at most
 * 2 ulp, 2^-6, so at most 1 + 2^-6 too large and 2^-6 too small; bias is half a pixel plus 4, which outweighs
 * 135 times 2^-6. The sum is thus never too small, and too large by less than 135 * (1 + 2^-6) + 8 = 146 <
 * 2^16 / (2 * 135): less than what the next larger multiple of 1 / (2 major) is away. Short enough are lines
 * inside a tile, up to 135 steps, and of the others those of up to STROKE_MAJOR_MAX.
 */
#ifndef FDSL_CUDA_SYNTH_FUSED_STROKE_CUH
#define FDSL_CUDA_SYNTH_FUSED_STROKE_CUH

#include <stdint.h>

#include "common/shared.cuh"
#include "synth/fused.cuh"

static_assert(TILE_MOST <= 136, "see above");
#define STROKE_MAJOR_MAX 127
#define STROKE_BIAS      (0x8000 + 4)
#define STROKE_STEPS     8 /* walked at a time */

/* A lane's line on its way. `at` is major axis << 24 | minor axis << 16 | fraction of the minor axis, in
 * pixels of the tile, so that one addition makes a step. */
struct stroke {
    uint32_t at, step;
    uint32_t place; /* bytes from pixel to pixel of the canvas: along the minor axis, major axis << 16 */
    uint32_t value; /* what it paints; the larger value wins */
    int32_t left;   /* pixels to come, at least 1 */
};

/* Address of the pixel at `at`: the dot product of its upper two bytes with `place`. */
static __device__ __forceinline__ uint32_t stroke_address(uint32_t canvas, uint32_t place, uint32_t at)
{
    uint32_t address;
    asm("dp2a.hi.u32.u32 %0, %1, %2, %3;" : "=r"(address) : "r"(place), "r"(at), "r"(canvas));
    return address;
}

/* Paints the next STROKE_STEPS pixels. A line that ends sooner has its last pixel painted again. */
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

/* For a lane that has no line: nothing, painted at a place of its own. */
static __device__ __forceinline__ stroke stroke_none(uint32_t lane)
{
    return {lane << 16, 0, sizeof(uint32_t), 0, 1};
}

#endif
