/* The interface of `fused`: generates images on the caller's stream into the caller's memory.
 *
 * fused_enqueue() does not wait for the device and does not allocate memory. It can therefore be captured
 * into a CUDA graph. */
#ifndef FDSL_CUDA_SYNTH_FUSED_H
#define FDSL_CUDA_SYNTH_FUSED_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"
#include "synth/input.h"

struct fused_plan;
struct device_clock;

/* Creates a plan for batches of `synth` on a device: tables, scratch memory and CUDA kernels. `background`:
 * see struct generator_request. `synth` must outlive the plan. The caller closes the plan with fused_close().
 * STATUS_USAGE if there is not enough device memory, or if an image has too many lines. */
enum status fused_open(int device, const struct synth *synth, bool background, struct fused_plan **plan);

/* Enqueues the generation of the first `count` images of run number `number` + `*counter`. `count` is at most
 * synth->batch. `counter` points to device memory, which the kernels read; NULL counts as 0. Writes
 * consecutive images of synth_output_bytes() each to `images` (16-byte aligned) and their class numbers to
 * `labels`. Both are in device memory. The plan's device must be current. A plan supports one run in flight
 * at a time. STATUS_FAILED if a launch fails. */
enum status fused_enqueue(struct fused_plan *plan, uint64_t number, const uint64_t *counter, uint64_t count,
                          uint8_t *images, int64_t *labels, cudaStream_t stream);

/* Enqueues the generation of the `count` images that `numbers` lists. `numbers` is in device memory, and its
 * image numbers are relative to synth->first. The other arguments and rules are those of fused_enqueue(). */
enum status fused_enqueue_listed(struct fused_plan *plan, const uint64_t *numbers, uint64_t count,
                                 uint8_t *images, int64_t *labels, cudaStream_t stream);

/* Generates the images of a run one stage at a time, without overlap. Adds the device times of the stages, in
 * seconds, to `*vertices_s` (which includes the noise) and `*painting_s` (which includes the output). Uses
 * the clock's stream and waits for it. */
enum status fused_time_stages(const struct fused_plan *plan, uint64_t number, uint8_t *images,
                              int64_t *labels, const struct device_clock *clock, double *vertices_s,
                              double *painting_s);

/* Returns the bytes of device memory that the plan has allocated. */
uint64_t fused_memory_bytes(const struct fused_plan *plan);

/* Frees the plan; accepts NULL. */
void fused_close(struct fused_plan *plan);

/* Implements generator_open() of struct synth_traits: creates a generator (core/generator.h) with its own
 * plan. The tables of `synth` must outlive the generator. The caller closes the generator with
 * generator_close(). */
enum status fused_generator_open(const struct generator_request *request, const struct synth *synth,
                                 struct generator **generator);

#endif
