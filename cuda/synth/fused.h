/* The interface of `fused`: generates images on the caller's stream into the caller's memory.
 *
 * fused_enqueue() and fused_graph_launch() do not wait for the device and do not allocate memory.
 * fused_enqueue() can be captured into a CUDA graph. */
#ifndef FDSL_CUDA_SYNTH_FUSED_H
#define FDSL_CUDA_SYNTH_FUSED_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"
#include "synth/input.h"

struct fused_plan;
struct fused_graph;
struct device_clock;

/* The images of a run and their destination. All pointers are to device memory. */
struct fused_call {
    const uint64_t *listed;  /* image numbers, relative to synth->first; NULL: the images of a run */
    uint64_t number;         /* run number; used only if `listed` is NULL */
    const uint64_t *counter; /* if not NULL, the kernels add `*counter` to `number` */
    uint8_t *images;         /* consecutive images of synth_output_bytes() each; 16-byte aligned */
    int64_t *labels;         /* class numbers of the images */
};

/* Creates a plan for batches of `synth` on a device: tables, scratch memory and CUDA kernels. `background`:
 * see struct generator_request. `synth` must outlive the plan. The caller closes the plan with fused_close().
 * STATUS_TOO_LARGE if there is not enough device memory, or if an image has too many lines. */
enum status fused_open(int device, const struct synth *synth, bool background, struct fused_plan **plan);

/* Enqueues the generation of the first `count` images of a call; `count` is at most synth->batch. The plan's
 * device must be current. A plan supports one run in flight at a time. STATUS_FAILED if a launch fails. */
enum status fused_enqueue(const struct fused_plan *plan, const struct fused_call *call, uint64_t count,
                          cudaStream_t stream);

/* Like fused_enqueue(), but the kernels read the call from device memory when they run. */
enum status fused_enqueue_stored(const struct fused_plan *plan, const struct fused_call *stored,
                                 uint64_t count, cudaStream_t stream);

/* Generates the images of a call one stage at a time, without overlap. Adds the device times of the stages,
 * in seconds, to `*vertices_s` (which includes the noise) and `*painting_s` (which includes the output). Uses
 * the clock's stream and waits for it. */
enum status fused_time_stages(const struct fused_plan *plan, const struct fused_call *call,
                              const struct device_clock *clock, double *vertices_s, double *painting_s);

/* Creates a CUDA graph of the kernels that generate `count` images. Launching the graph takes the host a
 * tenth of the time of fused_enqueue(), which launches each kernel. The kernels are recorded on `stream` and
 * on the plan's own streams. In all launches, each kernel has the priority of the stream on which it was
 * recorded. The plan's device must be current, and the plan must outlive the graph. The caller closes the
 * graph with fused_graph_close(). */
enum status fused_graph_open(const struct fused_plan *plan, uint64_t count, cudaStream_t stream,
                             struct fused_graph **graph);

/* Enqueues the generation of the graph's images for a call. `stream` must not be in a capture. Otherwise,
 * the rules of fused_enqueue() apply. */
enum status fused_graph_launch(struct fused_graph *graph, const struct fused_call *call, cudaStream_t stream);

/* Frees the graph; accepts NULL. */
void fused_graph_close(struct fused_graph *graph);

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
