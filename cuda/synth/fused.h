/* The interface of `fused`: generates images on the caller's stream into the caller's memory.
 *
 * fused_enqueue() neither waits for the device nor allocates memory, so it can be captured into a CUDA graph.
 */
#ifndef FDSL_CUDA_SYNTH_FUSED_H
#define FDSL_CUDA_SYNTH_FUSED_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"
#include "synth/input.h"

struct fused_plan;
struct device_clock;

/* Creates a plan for batches of `synth` on a device. `synth` must outlive the plan; the caller closes it.
 * STATUS_USAGE if device memory does not suffice. */
enum status fused_open(int device, const struct synth *synth, struct fused_plan **plan);

/* Enqueues run number `number` + *`counter`; `counter` is a word of device memory, or NULL for 0. Writes
 * synth->batch contiguous images of synth_output_bytes() to `images` (16-byte aligned) and their class
 * numbers to `labels`, both in device memory. The plan's device must be current, and a plan supports one run
 * in flight at a time. STATUS_FAILED if a launch fails. */
enum status fused_enqueue(struct fused_plan *plan, uint64_t number, const uint64_t *counter, uint8_t *images,
                          int64_t *labels, cudaStream_t stream);

/* Enqueues an explicit list of `count` images, at most synth->batch. `numbers`, in device memory, are
 * relative to synth->first. Otherwise like fused_enqueue(). */
enum status fused_enqueue_listed(struct fused_plan *plan, const uint64_t *numbers, uint64_t count,
                                 uint8_t *images, int64_t *labels, cudaStream_t stream);

/* Generates the images of a run one stage at a time, without overlap, and adds the device time of each stage
 * in seconds: vertices including noise, and painting including the output. Uses the clock's stream and waits
 * for it. */
enum status fused_time_stages(const struct fused_plan *plan, uint64_t number, uint8_t *images,
                              int64_t *labels, const struct device_clock *clock, double *vertices_s,
                              double *painting_s);

/* Returns the bytes of device memory that the plan has allocated. */
uint64_t fused_memory_bytes(const struct fused_plan *plan);

/* Frees the plan; accepts NULL. */
void fused_close(struct fused_plan *plan);

/* Creates a generator (core/generator.h) with its own plan: generator_open() of the variant's traits. The
 * tables of `synth` must outlive it. */
enum status fused_generator_open(int device, const struct synth *synth, uint32_t batch,
                                 struct generator **generator);

#endif
