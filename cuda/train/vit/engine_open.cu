/* Opens the engine `vit`: the networks that it supports, and arrays for training. */
#include "train/vit/engine_parts.cuh"

#include <stdlib.h>

#include "common/check.cuh"
#include "machine/device.h"

#define SAMPLES_MAX 32767 /* samples per batch; a grid has 2 blocks per sample along z, at most 65535 */

/* ---- Supported networks ---- */

static bool is_block(const struct layer *layer)
{
    static const enum layer_kind kinds[BLOCK_LAYERS] = {
        LAYER_NORM, LAYER_TOKEN_LINEAR, LAYER_ATTENTION, LAYER_TOKEN_LINEAR, LAYER_DROP_PATH, LAYER_ADD,
        LAYER_NORM, LAYER_TOKEN_LINEAR, LAYER_GELU,      LAYER_TOKEN_LINEAR, LAYER_DROP_PATH, LAYER_ADD};
    for (uint32_t i = 0; i < BLOCK_LAYERS; i++)
        if (layer[i].spec.kind != kinds[i])
            return false;
    return layer[5].spec.back == 6 && layer[11].spec.back == 6;
}

/* Returns whether the layers are those of a vision transformer: patches, tokens, blocks, selection of the
 * first token, norm, head. */
static bool is_vit(const struct model *model)
{
    const struct layer *layers = model->layers;
    const uint32_t count = model->layer_count;
    if (count < 5 + BLOCK_LAYERS || (count - 5) % BLOCK_LAYERS || layers[0].spec.kind != LAYER_PATCHES ||
        layers[1].spec.kind != LAYER_TOKENS || layers[count - 3].spec.kind != LAYER_SELECT ||
        layers[count - 2].spec.kind != LAYER_NORM || layers[count - 1].spec.kind != LAYER_LINEAR)
        return false;
    for (uint32_t i = 2; i + 3 < count; i += BLOCK_LAYERS)
        if (!is_block(&layers[i]))
            return false;
    return true;
}

/* Returns whether the kernels, which read 8 values at a time, support the sizes of the model. */
static bool has_sizes(const struct model *model)
{
    const struct layer *patches = &model->layers[0], *attention = &model->layers[4];
    const uint32_t width = attention->out.width, depth = width / attention->spec.heads;
    const uint32_t taps = patches->spec.kernel[1] * patches->spec.kernel[2] * patches->in.channels;
    return width <= VIT_WIDTH_MAX && width % 8 == 0 && taps % 8 == 0 &&
           patches->spec.kernel[1] == patches->spec.kernel[2] && (depth == 16 || depth == 32 || depth == 64);
}

enum status vit_accepts(const struct train *train)
{
    const struct model *model = train->model;
    if (!is_vit(model))
        return status_set(
            STATUS_USAGE,
            "it supports only vision transformers (vit-micro, vit-tiny, vit-small, vit-base), but "
            "this is %s; use %s",
            model->name, train->forward_only ? "infer-cuda" : "train-cuda");
    if (!has_sizes(model))
        return status_set(
            STATUS_USAGE,
            "it supports only widths up to %d and heads of 16, 32 or 64 values, with patches of "
            "a multiple of 8 values; use %s",
            VIT_WIDTH_MAX, train->forward_only ? "infer-omp" : "train-omp");
    if (train_part_max(train) > SAMPLES_MAX)
        return status_set(STATUS_TOO_LARGE,
                          "it supports at most %d samples per GPU at a time; lower --batch, or raise "
                          "--accumulate",
                          SAMPLES_MAX);
    return STATUS_OK;
}

/* ---- Opening ---- */

static void find_layers(struct vit *vit)
{
    const struct model *model = vit->train->model;
    vit->patch_layer = &model->layers[0];
    vit->token_layer = &model->layers[1];
    vit->last_norm = &model->layers[model->layer_count - 2];
    vit->head = &model->layers[model->layer_count - 1];
    vit->block_count = (model->layer_count - 5) / BLOCK_LAYERS;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct layer *layers = &model->layers[2 + i * BLOCK_LAYERS];
        vit->blocks[i].norm1 = &layers[0];
        vit->blocks[i].qkv = &layers[1];
        vit->blocks[i].proj = &layers[3];
        vit->blocks[i].norm2 = &layers[6];
        vit->blocks[i].fc1 = &layers[7];
        vit->blocks[i].fc2 = &layers[9];
    }
    vit->patch = vit->patch_layer->spec.kernel[1];
    vit->heads = model->layers[4].spec.heads;
    vit->logit_apart = (model->classes + 7) / 8 * 8;
}

/* Adds a layer of stochastic depth to `paths`. Returns the address of the layer's factors. If the layer drops
 * nothing, does not add it, and returns NULL. */
static const float *add_path(struct vit *vit, const struct layer *layer, struct vit_path *paths)
{
    if (layer->spec.rate == 0)
        return nullptr;
    paths[vit->path_count] = {layer->number, layer->spec.rate};
    return vit->factors + (size_t)vit->path_count++ * vit->capacity;
}

static enum status open_paths(struct vit *vit)
{
    struct vit_path paths[2 * BLOCKS_MAX];
    if (vit->train->forward_only)
        return STATUS_OK;
    TRY(allocate(&vit->allocations, &vit->factors, (size_t)2 * vit->block_count * vit->capacity));
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct layer *layers = &vit->train->model->layers[2 + i * BLOCK_LAYERS];
        vit->blocks[i].factors1 = add_path(vit, &layers[4], paths);
        vit->blocks[i].factors2 = add_path(vit, &layers[10], paths);
    }
    return vit->path_count == 0 ? STATUS_OK
                                : allocate_copy(&vit->allocations, &vit->paths, paths,
                                                vit->path_count * sizeof *paths, vit->stream);
}

/* Sets vit->groups. Each entry is for VIT_GROUP_VALUES parameters of one tensor, because tensors begin at
 * multiples of this number. */
static enum status open_groups(struct vit *vit)
{
    const struct model *model = vit->train->model;
    const size_t entries = model->arena_values / VIT_GROUP_VALUES, bytes = entries * sizeof *vit->groups;
    struct tensor_update *groups = static_cast<struct tensor_update *>(calloc(1, bytes));
    TRY(ALLOCATED(groups, "vit: out of memory"));
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const struct model_tensor *tensor = &model->tensors[i];
        const size_t end = (tensor->first + tensor->values + VIT_GROUP_VALUES - 1) / VIT_GROUP_VALUES;
        for (size_t entry = tensor->first / VIT_GROUP_VALUES; entry < end; entry++)
            groups[entry] = train_update_of(vit->train, tensor);
    }
    enum status status = allocate_copy(&vit->allocations, &vit->groups, groups, bytes, vit->stream);
    if (status == STATUS_OK)
        status = cuda_status(cudaStreamSynchronize(vit->stream), "cudaStreamSynchronize", __FILE__, __LINE__);
    free(groups);
    return status;
}

/* Returns the largest number of partial sums that a kernel writes. */
static size_t partial_values(const struct vit *vit)
{
    const struct vit_rows rows = rows_of(vit, vit->capacity);
    const size_t classes = vit->train->model->classes, tokens = (size_t)rows.tokens * rows.width;
    const size_t hidden_parts = ((size_t)rows.samples * rows.tokens + VIT_HIDDEN_ROWS - 1) / VIT_HIDDEN_ROWS;
    /* The backward passes of normalisation and of attention write three partial sums per column of a token.
     */
    const size_t sums[] = {
        VIT_PARTS * (size_t)3 * rows.width, VIT_PARTS * (size_t)hidden_width(vit),
        hidden_parts * hidden_width(vit),   VIT_SAMPLE_PARTS * tokens,
        VIT_SAMPLE_PARTS * classes,         (size_t)vit_attention_parts(&rows, vit->heads) * 3 * rows.width};
    size_t most = 0;
    for (size_t each : sums)
        most = each > most ? each : most;
    return most;
}

static enum status open_learning(struct vit *vit)
{
    const size_t values = vit->train->model->arena_values;
    TRY(allocate(&vit->allocations, &vit->sums.room, VIT_SUMS_MAX * partial_values(vit)));
    TRY(open_groups(vit));
    vit->shared.rounded = vit->parameters;
    vit->shared.groups = vit->groups;
    TRY(device_engine_open_learning(vit));
    vit->added = vit->gradients;
    return train_parts(vit->train) > 1 ? allocate_zeros(&vit->allocations, &vit->added, values, vit->stream)
                                       : STATUS_OK;
}

enum status vit_open_all(struct vit *vit)
{
    const struct train *train = vit->train;
    TRY(device_probe(vit->device));
    TRY(vit_accepts(train));
    find_layers(vit);
    TRY(device_engine_open(vit));
    TRY(vit_multiplier_open(&vit->allocations, &vit->multiplier));
    TRY(open_paths(vit));
    TRY(vit_open_activations(vit));
    TRY(allocate_zeros(&vit->allocations, &vit->state.parameters, train->model->arena_values, vit->stream));
    TRY(allocate(&vit->allocations, &vit->parameters, train->model->arena_values));
    TRY(device_batch_allocate(train, vit->capacity, &vit->samples, &vit->allocations));
    vit->batch = &vit->samples;
    TRY(device_engine_open_data(vit));
    if (!train->forward_only)
        TRY(open_learning(vit));
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    return STATUS_OK;
}
