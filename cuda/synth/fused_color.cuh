/* `fused` for fractals in colour (synth/color.h): the plan, with the interface of struct fused_plan
 * (fused.cuh). docs/fused.md explains the design.
 *
 *   clouds   A block computes the clouds of an image in shared memory, and stores its labels.
 *   objects  A block draws an object. Each thread is a walker. It walks twice over the same points: first it
 *            finds their extent, then it counts them in shared memory. The first walk keeps its choices.
 *   compose  A block makes a tile of an image: it looks up each pixel, blurs the tile if the image is
 *            blurred, and writes the output.
 *   reduce   Only if the output is resized: `compose` writes canvases, which this kernel resizes. */
#ifndef FDSL_CUDA_SYNTH_FUSED_COLOR_CUH
#define FDSL_CUDA_SYNTH_FUSED_COLOR_CUH

#include "synth/fused.cuh"

struct color_plan;
enum status color_plan_open(int device, const struct synth *synth, struct color_plan **plan);

/* Enqueues the first `count` images of a call, which is `stored`, in device memory, if that is not NULL. */
enum status color_plan_enqueue(const struct color_plan *plan, const struct fused_call *call,
                               const struct fused_call *stored, uint64_t count, cudaStream_t stream);

/* Times the clouds and objects, and the composition: see fused_time_stages(). */
enum status color_plan_time(const struct color_plan *plan, const struct fused_call *call,
                            const struct device_clock *clock, double *objects_s, double *composing_s);

uint64_t color_plan_bytes(const struct color_plan *plan);
void color_plan_close(struct color_plan *plan); /* accepts NULL */

#endif
