/* Shared by the parts of the engine: engine_open.cu (memory), engine.cu (steps on the whole network) and
 * stage.cu (stages of a pipeline). No other file includes this header. */
#ifndef FDSL_CUDA_TRAIN_ENGINE_PARTS_CUH
#define FDSL_CUDA_TRAIN_ENGINE_PARTS_CUH

#include "train/device_engine.cuh"
#include "train/engine.cuh"

/* The samples of a batch, and the layers' activations and gradients for them. A stage of a pipeline has a
 * slot for each micro-batch whose activations it keeps; otherwise there is one slot. */
struct slot {
    float *inputs;
    struct device_batch batch;
    /* all[0] describes the input; all[1 + i] describes layer i. */
    struct device_layer all[1 + MODEL_LAYERS_MAX];
};

struct network : device_engine {
    enum precision precision;
    float *workspace;
    /* Gradients of one micro-batch or part, before they are added to `gradients`. NULL if a step has only
     * one.
     */
    float *added;
    struct slot *slots;
    uint32_t slot_count;
    struct slot *slot;           /* the current slot; `batch` is its batch */
    struct device_layer *layers; /* slot->all + 1: the layers of the current slot */
    struct layer input;          /* describes the input as the output of a layer */
    struct layer_passes passes[LAYER_KINDS];
};

static inline struct network *network_of(void *state)
{
    return device_engine_as<struct network>(state);
}

/* Opens a state that device_engine_new() has created. The caller has set `precision` and `passes`. The caller
 * calls network_close(), even after a failure. */
enum status network_open(struct network *network);
void network_close(void *state);

/* Makes slot `number` and its batch the current ones. */
void network_choose(struct network *network, uint32_t number);

/* Returns the pass over the samples of the current slot. */
struct pass network_pass(const struct network *network, const struct share *share, bool training,
                         uint32_t epoch);

struct device_layer *network_last_layer(const struct network *network);

enum status network_forward(struct network *network, const struct pass *pass);

/* Runs the backward pass of one layer. The backward passes of all later layers must have run before. */
enum status network_backward_layer(struct network *network, const struct device_layer *self,
                                   const struct pass *pass);

enum status network_update(struct device_engine *network, const struct update *update);

/* Defined in stage.cu. */
extern "C" const struct stage_functions cuda_stages;

#endif
