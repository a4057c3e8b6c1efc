/* `fused` for callers: images made on a caller's stream, into a caller's memory.
 *
 * Nothing here waits for the device but fused_open() and fused_close(), and nothing is allocated between
 * them, so fused_enqueue() can be captured into a CUDA graph.
 */
#ifndef FDSL_CUDA_SYNTH_FUSED_H
#define FDSL_CUDA_SYNTH_FUSED_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"
#include "synth/input.h"

struct fused_plan;
struct device_clock;

/* Makes a plan for batches of `synth`, which outlives it, on a device. The caller closes it. STATUS_USAGE
 * where the memory does not suffice. */
enum status fused_open(int device, const struct synth *synth, struct fused_plan **plan);

/* Enqueues run number `number` + *`counter` (a word of device memory, or NULL: 0): synth->batch images of
 * synth_output_bytes() one after the other, from an address that 16 divides, and the numbers of their
 * classes. Both in device memory. The plan's device must be current, and at most one run of a
 * plan in work at a time. STATUS_FAILED where a launch fails. */
enum status fused_enqueue(struct fused_plan *plan, uint64_t number, const uint64_t *counter, uint8_t *images,
                          int64_t *labels, cudaStream_t stream);

/* The same for `count` images, at most synth->batch, of any numbers, counted from synth->first: these, too,
 * lie in device memory. */
enum status fused_enqueue_listed(struct fused_plan *plan, const uint64_t *numbers, uint64_t count,
                                 uint8_t *images, int64_t *labels, cudaStream_t stream);

/* Makes the images of a run stage by stage, none beside another, and adds the device's times of both stages
 * in seconds: vertices with their noise, and painting with all that follows. Uses the clock's stream, and
 * waits for it. */
enum status fused_time_stages(const struct fused_plan *plan, uint64_t number, uint8_t *images,
                              int64_t *labels, const struct device_clock *clock, double *vertices_s,
                              double *painting_s);

/* The device memory that the plan holds. */
uint64_t fused_memory_bytes(const struct fused_plan *plan);

/* Frees the plan; NULL is none. */
void fused_close(struct fused_plan *plan);

/* A generator (core/generator.h) over a plan of its own: generator_open() of the variant's traits. The tables
 * of `synth` outlive it. */
enum status fused_generator_open(int device, const struct synth *synth, uint32_t batch,
                                 struct generator **generator);

#endif
