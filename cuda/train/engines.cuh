/* The engines on GPUs, and templates for the variants that train or infer with one of them. */
#ifndef FDSL_CUDA_TRAIN_ENGINES_CUH
#define FDSL_CUDA_TRAIN_ENGINES_CUH

#include <cuda_runtime.h>

#include "machine/device.h"
#include "train/engine.h"
#include "train/trainer.h"

/* These engines compute a network layer by layer (engine.cu). engine_cuda computes in fp32. engine_tf32,
 * engine_bf16 and engine_amp (fp16 with loss scaling) run GEMMs on tensor cores. engine_cudnn and
 * engine_cudnn_tf32 have the convolutions of cuDNN; they exist only with HAVE_CUDNN. */
extern "C" const struct engine engine_cuda, engine_tf32, engine_bf16, engine_amp, engine_cudnn,
    engine_cudnn_tf32;

/* `cnn` in bf16 with fused kernels, replayed as a CUDA graph (graph/engine.cu). */
extern "C" const struct engine engine_graph;

/* Vision transformers on tensor cores (vit/engine.cu): engine_vit in bf16, engine_vit_amp in fp16 with loss
 * scaling. Sums, the optimizer and its copy of the parameters are in fp32. */
extern "C" const struct engine engine_vit, engine_vit_amp;

/* Residual networks on tensor cores, with the same precisions (resnet/engine.cu). */
extern "C" const struct engine engine_resnet, engine_resnet_amp;

/* For tests, with a state of engine_resnet or engine_resnet_amp: gets the output of a layer for the first
 * `count` samples of the latest training step, in C order. STATUS_UNAVAILABLE if the engine does not store
 * it. */
enum status resnet_output(void *state, uint32_t layer, uint32_t count, float *values);

/* Set if a CUDA kernel of engine_graph may overlap the end of the previous kernel. A change applies to
 * engines that are opened afterwards. Only a test sets this variable to false. That test requires the same
 * bits with and without overlap, because no sanitizer detects races between kernels. */
extern bool graph_overlaps;

/* Set if engine_graph may use kernels that are written for compute capability 9.0. A change applies to
 * engines that are opened afterwards. Only a test sets this variable to false, to run the kernels for all
 * devices. */
extern bool graph_hopper;

/* ---- Variants ---- */

template <const struct engine *ENGINE,
          enum status (*OPEN)(const struct engine *engine, const struct resources *resources, const void *job,
                              void **state)>
static enum status open_by(const struct resources *resources, const void *input, void **state)
{
    return OPEN(ENGINE, resources, input, state);
}

/* `own_architecture`: the value of wants_own_architecture in struct variant. */
template <const struct engine *ENGINE>
static constexpr struct variant
training_by(bool own_architecture = false,
            enum status (*probe)(const struct resources *) = device_probe_variant)
{
    return {.platform = "cuda",
            .wants_own_architecture = own_architecture,
            .traits = ENGINE,
            .probe = probe,
            .setup = open_by<ENGINE, trainer_open>,
            .run = trainer_run,
            .fetch = trainer_fetch,
            .teardown = trainer_close};
}

template <const struct engine *ENGINE>
static constexpr struct variant
inferring_by(bool own_architecture = false,
             enum status (*probe)(const struct resources *) = device_probe_variant)
{
    return {.platform = "cuda",
            .wants_own_architecture = own_architecture,
            .traits = ENGINE,
            .probe = probe,
            .setup = open_by<ENGINE, inferrer_open>,
            .run = inferrer_run,
            .fetch = inferrer_fetch,
            .teardown = inferrer_close};
}

#endif
