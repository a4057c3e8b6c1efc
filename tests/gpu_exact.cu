/* Compares, on the GPU, the closed forms in the variant `fused` with their definitions, for all inputs if
 * possible. make check-gpu runs this program. Prints one line per check. Exit status 3 if a check fails, 4
 * without a GPU. */
#include <stdio.h>

#include "machine/device.h"
#include "synth/fused_paint.cuh"
#include "synth/fused_vertices.cuh"

#define BLOCK 256

static __device__ void differ(unsigned long long *wrong, bool yes)
{
    if (yes)
        atomicAdd(wrong, 1);
}

/* Checks the noise of all 2^32 random words. Compares values, not bits, because +0 and -0 give the same
 * position. */
static __global__ void check_noise(const float *gradients, unsigned long long *wrong)
{
    __shared__ float2 table[FUSED_GRADIENTS];
    fused_fill_gradients(gradients, table, threadIdx.x, BLOCK);
    __syncthreads();
    for (uint64_t draw = blockIdx.x * BLOCK + threadIdx.x; draw < 1ull << 32; draw += gridDim.x * BLOCK) {
        float ours = fused_noise(shared_address(table), (uint32_t)draw);
        differ(wrong, !(ours == noise_of_draw(gradients, (uint32_t)draw)) || fabsf(ours) > FUSED_NOISE_LIMIT);
    }
}

using narrow = painter<false, FORMULA_UJI>;

static constexpr struct line_rules rules_uji = line_rules_of(FORMULA_UJI),
                                   rules_visualatom = line_rules_of(FORMULA_VISUALATOM);

/* Checks every pixel of one line for each slope and length that fit into a tile, in all eight octants. Each
 * thread block checks one slope and length. */
static __global__ void check_strokes(unsigned long long *wrong)
{
    int32_t major = blockIdx.x + 1, minor = blockIdx.y, sign_major = threadIdx.x & 1 ? -1 : 1;
    int32_t sign_minor = threadIdx.x & 2 ? -1 : 1;
    bool is_steep = threadIdx.x & 4;
    if (threadIdx.x >= 8 || minor > major || (major == minor && !is_steep))
        return;
    narrow painter = {};
    painter.steep = 1; /* differs from `flat`, so that the stroke's `place` shows which of the two was used */
    painter.flat = 2;
    int2 along = make_int2(is_steep ? sign_minor * minor : sign_major * major,
                           is_steep ? sign_major * major : sign_minor * minor);
    int2 from = make_int2(along.x < 0 ? TILE_MOST - 1 : 0, along.y < 0 ? TILE_MOST - 1 : 0);
    int2 to = make_int2(from.x + along.x, from.y + along.y);
    stroke self = painter.stroke_inside(
        make_uint2((uint32_t)(from.x | from.y << 8 | to.x << 16) | (uint32_t)to.y << 24, 1));
    const path path = path_of(self);
    constexpr struct line_rules rules = line_rules_of(FORMULA_UJI);
    struct line line = line_begin(&rules, from.x, from.y, to.x, to.y);
    const uint32_t pixels = (uint32_t)line.left;
    differ(wrong, self.left != line.left || (self.place == 1) != is_steep);
    differ(wrong, path.last - path.at != (pixels - 1) * path.step);
    for (uint32_t s = 0; line.left > 0; line_step(&line), self.at += self.step, s++) {
        int32_t major_at = (int32_t)(self.at >> 24), minor_at = (int32_t)(self.at >> 16 & 0xFF);
        differ(wrong,
               (is_steep ? minor_at : major_at) != line.x || (is_steep ? major_at : minor_at) != line.y);
        differ(wrong, path.at + (sign_major < 0 ? pixels - 1 - s : s) * path.step != self.at);
    }
    /* After path_walk(), at most STROKE_MAJOR_MAX pixels remain. */
    for (uint32_t s = STROKE_STEPS; s < pixels; s++)
        differ(wrong, path_left({path.at + s * path.step, path.last, path.step, 0, 0}) != pixels - s);
}

/* Checks first_step(): the step after which a line has moved a given number of pixels along its minor axis.
 * Tests every slope of a line of up to STROKE_MAJOR_MAX steps. */
static __global__ void check_first_steps(unsigned long long *wrong)
{
    int32_t major = blockIdx.x + 1, minor = blockIdx.y, count = threadIdx.x + 1;
    if (minor > major || count > STROKE_MAJOR_MAX + 1)
        return;
    int32_t s = 0;
    while (s < major && (2 * minor * s + major) / (2 * major) < count)
        s++;
    int32_t ours = narrow::first_step(count, narrow::slope_of(major, minor));
    differ(wrong, s < major ? ours != s : ours < major);
}

/* Checks the clipping of all lines whose end points are in or near a small tile. Exactly the pixels inside
 * the tile must remain. */
static __global__ void check_clips(int32_t width, int32_t height, unsigned long long *wrong)
{
    const int32_t around = 12;
    int32_t across = width + 2 * around, all = across * (height + 2 * around);
    narrow painter = {};
    painter.tile.width = width;
    painter.tile.height = height;
    painter.steep = 1;
    painter.flat = 2;
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < (int64_t)all * all;
         i += gridDim.x * BLOCK) {
        int32_t a = (int32_t)(i / all), b = (int32_t)(i % all), slope, inside = 0;
        int2 from = make_int2(a % across - around, a / across - around);
        int2 to = make_int2(b % across - around, b / across - around);
        stroke self = painter.stroke_of(from, to, 1, &slope);
        painter.clip(self, from, to, slope);
        constexpr struct line_rules rules = line_rules_of(FORMULA_UJI);
        for (struct line line = line_begin(&rules, from.x, from.y, to.x, to.y); line.left > 0;
             line_step(&line)) {
            if ((uint32_t)line.x >= (uint32_t)width || (uint32_t)line.y >= (uint32_t)height)
                continue;
            int32_t along = (int32_t)(self.at >> 24), minor = (int32_t)(self.at >> 16 & 0xFF);
            differ(wrong, (self.place == 1 ? minor : along) != line.x ||
                              (self.place == 1 ? along : minor) != line.y);
            self.at += self.step;
            inside++;
        }
        differ(wrong, max(self.left, 0) != inside);
    }
}

/* Checks the rounding of all 2^32 floats except NaN to half precision and bfloat16. */
static __global__ void check_rounding(unsigned long long *wrong)
{
    for (uint64_t bits = blockIdx.x * BLOCK + threadIdx.x; bits < 1ull << 32; bits += gridDim.x * BLOCK) {
        float value = __uint_as_float((uint32_t)bits);
        if (!isnan(value))
            differ(wrong,
                   half_bits(value) != half_from_float(value) || bf16_bits(value) != bf16_from_float(value));
    }
}

static unsigned long long *wrong;
static int failures;

/* Waits for the latest check that was launched, and prints its result. */
static void report(const char *what)
{
    cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess)
        error = cudaGetLastError();
    if (error != cudaSuccess)
        printf("FAILED  %s: %s\n", what, cudaGetErrorString(error));
    else
        printf("%s  %s: %llu differ\n", *wrong ? "FAILED" : "ok    ", what, *wrong);
    failures += error != cudaSuccess || *wrong;
    *wrong = 0;
}

int main(void)
{
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_exact: %s\n", status_text());
        return 4;
    }
    float *gradients;
    if (cudaMallocManaged(&gradients, NOISE_TABLE_COUNT * sizeof *gradients) != cudaSuccess ||
        cudaMallocManaged(&wrong, sizeof *wrong) != cudaSuccess)
        return 1;
    *wrong = 0;
    dim3 slopes(STROKE_MAJOR_MAX, STROKE_MAJOR_MAX + 1);
    noise_gradients(&rules_uji, gradients);
    check_noise<<<4096, BLOCK>>>(gradients, wrong);
    report("noise of all draws, uji");
    noise_gradients(&rules_visualatom, gradients);
    check_noise<<<4096, BLOCK>>>(gradients, wrong);
    report("noise of all draws, visualatom");
    check_strokes<<<dim3(TILE_MOST - 1, TILE_MOST), 32>>>(wrong);
    report("pixels of all lines inside a tile");
    check_first_steps<<<slopes, STROKE_MAJOR_MAX + 1>>>(wrong);
    report("minor steps of all slopes");
    const int32_t sizes[][2] = {{1, 1}, {3, 2}, {8, 31}, {32, 32}};
    for (const int32_t *size : sizes) {
        check_clips<<<4096, BLOCK>>>(size[0], size[1], wrong);
        report("lines clipped to a tile");
    }
    check_rounding<<<4096, BLOCK>>>(wrong);
    report("half and bfloat16 of all floats");
    return failures ? 3 : 0;
}
