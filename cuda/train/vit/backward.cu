/* The backward pass of the engine `vit`. */
#include "train/vit/engine_parts.cuh"

#include "common/check.cuh"

/* Computes the gradients of a layer's weights and, unless `in_deltas` is NULL, of its inputs. */
static enum status linear_backward(struct vit *vit, const struct layer *layer, uint32_t rows,
                                   const bf16 *inputs, const bf16 *deltas, bf16 *in_deltas)
{
    struct vit_linear linear = vit_linear_of(layer, rows);
    if (layer == vit->head)
        linear.apart = vit->logit_apart;
    TRY(vit_linear_weights(vit->multiplier, &linear, deltas, inputs, vit->added + layer->weight,
                           vit->stream));
    return in_deltas ? vit_linear_inputs(vit->multiplier, &linear, deltas, vit->parameters + layer->weight,
                                         in_deltas, vit->stream)
                     : STATUS_OK;
}

/* Returns the gradients of a branch's outputs. `factors` are those of its stochastic depth, or NULL. */
static bf16 *branch_deltas(const struct vit *vit, const float *factors)
{
    return factors ? vit->branch_deltas : vit->deltas;
}

/* Backward pass of a normalisation and of the sum that it normalises. `before` is the last layer of the
 * branch whose output is part of this sum, or NULL if there is no branch. Adds the gradient of the sum to
 * vit->deltas. The last normalisation of the network overwrites vit->deltas instead. */
static enum status norm_backward(struct vit *vit, const struct vit_norm *norm, const struct layer *layer,
                                 const struct layer *before)
{
    const struct vit_norm_deltas deltas = {.outputs = norm->first_tokens ? vit->class_deltas : vit->in_deltas,
                                           .later = norm->first_tokens ? nullptr : vit->deltas,
                                           .sums = vit->deltas,
                                           .branch = norm->factors ? vit->branch_deltas : nullptr,
                                           .weight = vit->added + layer->weight,
                                           .bias = vit->added + layer->bias,
                                           .branch_bias = before ? vit->added + before->bias : nullptr};
    return vit_add_norm_backward(norm, &deltas, &vit->sums, vit->stream);
}

/* Backward pass of the second branch of a block: two linear layers with a GELU between them. */
static enum status hidden_backward(struct vit *vit, const struct block *block, uint32_t rows)
{
    const struct saved *saved = &block->saved;
    const struct vit_linear fc2 = vit_linear_of(block->fc2, rows);
    const bf16 *deltas = branch_deltas(vit, block->factors2);
    TRY(linear_backward(vit, block->fc2, rows, saved->active, deltas, nullptr));
    TRY(vit_hidden_backward(vit->multiplier, &fc2, deltas, vit->parameters + block->fc2->weight,
                            saved->hidden, vit->wide_deltas, vit->added + block->fc1->bias, &vit->sums,
                            vit->stream));
    return linear_backward(vit, block->fc1, rows, saved->norms2, vit->wide_deltas, vit->in_deltas);
}

static enum status attention_backward(struct vit *vit, const struct block *block, uint32_t count)
{
    const struct saved *saved = &block->saved;
    const struct vit_rows shape = rows_of(vit, count);
    const uint32_t rows = count * shape.tokens;
    TRY(linear_backward(vit, block->proj, rows, saved->mixed, branch_deltas(vit, block->factors1),
                        vit->in_deltas));
    TRY(vit_attention_backward(&shape, vit->heads, saved->qkv, saved->mixed, saved->logs, vit->in_deltas,
                               vit->wide_deltas, vit->added + block->qkv->bias, &vit->sums, vit->stream));
    return linear_backward(vit, block->qkv, rows, saved->norms1, vit->wide_deltas, vit->in_deltas);
}

/* With --checkpoint-activations, all blocks share the saved arrays, so the forward pass of the block is
 * computed again. The last block is not computed again, because the arrays still have its results. */
static enum status block_backward(struct vit *vit, uint32_t i, uint32_t count)
{
    const struct block *block = &vit->blocks[i];
    const struct vit_norm norm1 = vit_norm1_of(vit, i, count, true),
                          norm2 = vit_norm2_of(vit, i, count, true);
    if (vit->train->checkpoint_activations && i + 1 < vit->block_count) {
        TRY(vit_add_norm(&norm1, nullptr, nullptr, vit->stream));
        TRY(vit_block_forward(vit, i, count, true));
    }
    TRY(hidden_backward(vit, block, count * norm1.rows.tokens));
    TRY(norm_backward(vit, &norm2, block->norm2, block->proj));
    TRY(attention_backward(vit, block, count));
    TRY(norm_backward(vit, &norm1, block->norm1, i > 0 ? block[-1].fc2 : nullptr));
    return vit_sums_finish(&vit->sums, vit->stream);
}

/* Backward pass of the last normalisation and the head. */
static enum status head_backward(struct vit *vit, uint32_t count)
{
    const struct vit_norm norm = vit_last_norm_of(vit, count, true);
    TRY(vit_logits_backward(vit->logit_deltas, count, vit->train->model->classes, vit->logit_apart,
                            vit->logit_rounded, vit->added + vit->head->bias, &vit->sums, vit->stream));
    TRY(linear_backward(vit, vit->head, count, vit->class_norms, vit->logit_rounded, vit->class_deltas));
    TRY(norm_backward(vit, &norm, vit->last_norm, vit->blocks[vit->block_count - 1].fc2));
    return vit_sums_finish(&vit->sums, vit->stream);
}

/* Backward pass of the first two layers: the patches and the tokens. */
static enum status patches_backward(struct vit *vit, uint32_t count)
{
    const struct vit_rows shape = rows_of(vit, count);
    const uint32_t rows = count * (shape.tokens - 1);
    TRY(vit_tokens_backward(&shape, vit->deltas, vit->added + vit->token_layer->weight,
                            vit->added + vit->token_layer->bias, vit->in_deltas, &vit->sums, vit->stream));
    TRY(vit_column_sums(vit->in_deltas, rows, shape.width, vit->added + vit->patch_layer->bias, &vit->sums,
                        vit->stream));
    TRY(vit_sums_finish(&vit->sums, vit->stream));
    return linear_backward(vit, vit->patch_layer, rows, vit->patches, vit->in_deltas, nullptr);
}

/* Computes and exchanges the gradients of a step that has only one part. A rank without samples in this step
 * contributes zeros. */
static enum status backward_exchange(struct vit *vit, uint32_t count)
{
    const struct model *model = vit->train->model;
    size_t end = model->arena_values;
    uint32_t layer = model->layer_count;
    if (count == 0)
        CUDA_TRY(cudaMemsetAsync(vit->gradients, 0, end * sizeof *vit->gradients, vit->stream));
    else
        TRY(head_backward(vit, count));
    TRY(device_engine_exchange(vit, layer - 3, layer, &end));
    layer -= 3;
    for (uint32_t i = vit->block_count; i-- > 0; layer -= BLOCK_LAYERS) {
        if (count > 0)
            TRY(block_backward(vit, i, count));
        TRY(device_engine_exchange(vit, layer - BLOCK_LAYERS, layer, &end));
    }
    if (count > 0)
        TRY(patches_backward(vit, count));
    TRY(device_engine_exchange(vit, 0, layer, &end));
    return device_engine_exchange_end(vit);
}

/* Computes the gradients of one of several parts of a step. The kernels overwrite vit->added. */
static enum status backward_part(struct vit *vit, uint32_t count)
{
    TRY(head_backward(vit, count));
    for (uint32_t i = vit->block_count; i-- > 0;)
        TRY(block_backward(vit, i, count));
    return patches_backward(vit, count);
}

enum status vit_backward(struct vit *vit, uint32_t count)
{
    return train_parts(vit->train) == 1 ? backward_exchange(vit, count) : backward_part(vit, count);
}
