/* Shared by the parts of the engine: engine.cu (steps on the whole network) and stage.cu (stages of a
 * pipeline). No other file includes this header. */
#ifndef FDSL_CUDA_TRAIN_ENGINE_PARTS_CUH
#define FDSL_CUDA_TRAIN_ENGINE_PARTS_CUH

#include "train/augment.cuh"
#include "train/clip.cuh"
#include "train/engine.cuh"
#include "train/feed.cuh"
#include "train/shared_update.cuh"
#include "train/network.cuh"
#include "train/progress.cuh"

/* The samples of a batch, and the layers' activations and gradients for them. A stage of a pipeline has a
 * slot for each micro-batch whose activations it keeps; otherwise there is one slot. */
struct slot {
    float *inputs;
    struct device_batch batch;
    /* all[0] describes the input; all[1 + i] describes layer i. */
    struct device_layer all[1 + MODEL_LAYERS_MAX];
};

struct network {
    const struct train *train;
    enum precision precision;
    int device, threads; /* threads: of the host, for live samples that the host draws */
    uint32_t capacity;   /* maximum number of samples in a slot */
    cudaStream_t stream;
    struct allocations allocations;
    struct train_state state; /* device memory */
    float *gradients, *workspace;
    /* If a step has several micro-batches or parts: the gradients of one, before they are added. Else NULL.
     */
    float *added;
    struct exchange_update shared; /* for an exchange that updates the parameters */
    struct device_set sets[DATA_PARTS];
    struct device_feed feed; /* live training samples */
    struct device_augment augment;
    struct device_losses losses;
    struct device_clip *clip; /* NULL: gradients are not clipped */
    struct device_progress progress;
    struct slot *slots;
    uint32_t slot_count;
    struct slot *slot;           /* the current slot */
    struct device_layer *layers; /* slot->all + 1: the layers of the current slot */
    struct layer input;          /* describes the input as the output of a layer */
    struct layer_passes passes[LAYER_KINDS];
    /* Events before and after the gather of one step: the middle step of the latest call of steps(). By then,
     * launches are queued, so the measured time contains no launch latency. */
    cudaEvent_t gather_begin, gather_end;
    uint64_t steps; /* since the last totals() */
};

/* Makes slot `number` the current one. */
void network_choose(struct network *network, uint32_t number);

/* Returns the pass over the samples of the current slot. */
struct pass network_pass(const struct network *network, const struct share *share, bool training,
                         uint32_t epoch);

struct device_layer *network_last_layer(const struct network *network);

enum status network_forward(struct network *network, const struct pass *pass);

/* Runs the backward pass of one layer. The backward passes of all later layers must have run before. */
enum status network_backward_layer(struct network *network, const struct device_layer *self,
                                   const struct pass *pass);

enum status network_update(struct network *network, uint64_t number);

/* stage.cu */
extern "C" const struct stage_functions cuda_stages;

#endif
