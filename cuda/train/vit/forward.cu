/* The forward pass of the engine `vit`. */
#include "train/vit/engine_parts.cuh"

#include "common/check.cuh"

struct vit_linear vit_linear_of(const struct layer *layer, uint32_t rows)
{
    const uint32_t out = (uint32_t)layer->bias_values, in = (uint32_t)(layer->weight_values / out);
    return {rows, in, out, out};
}

static enum status linear_forward(struct vit *vit, const struct layer *layer, uint32_t rows,
                                  const bf16 *inputs, bf16 *outputs)
{
    const struct vit_linear linear = vit_linear_of(layer, rows);
    return vit_linear_forward(vit->multiplier, &linear, false, inputs, vit->parameters + layer->weight,
                              vit->parameters + layer->bias, outputs, vit->stream);
}

static struct vit_norm norm_of(const struct vit *vit, const struct layer *layer, uint32_t count,
                               const float *factors, bf16 *sums, bf16 *outputs, struct vit_moments *moments)
{
    return {.rows = rows_of(vit, count),
            .first_tokens = false,
            .factors = factors,
            .weight = vit->state.parameters + layer->weight,
            .bias = vit->state.parameters + layer->bias,
            .sums = sums,
            .outputs = outputs,
            .moments = moments};
}

struct vit_norm vit_norm1_of(const struct vit *vit, uint32_t i, uint32_t count, bool training)
{
    const struct block *block = &vit->blocks[i];
    return norm_of(vit, block->norm1, count, training && i > 0 ? block[-1].factors2 : nullptr, block->sums1,
                   block->saved.norms1, block->saved.moments1);
}

struct vit_norm vit_norm2_of(const struct vit *vit, uint32_t i, uint32_t count, bool training)
{
    const struct block *block = &vit->blocks[i];
    return norm_of(vit, block->norm2, count, training ? block->factors1 : nullptr, block->saved.sums2,
                   block->saved.norms2, block->saved.moments2);
}

struct vit_norm vit_last_norm_of(const struct vit *vit, uint32_t count, bool training)
{
    const struct block *last = &vit->blocks[vit->block_count - 1];
    struct vit_norm norm = norm_of(vit, vit->last_norm, count, training ? last->factors2 : nullptr,
                                   vit->class_sums, vit->class_norms, vit->class_moments);
    norm.first_tokens = true;
    return norm;
}

enum status vit_block_forward(struct vit *vit, uint32_t i, uint32_t count, bool training)
{
    const struct block *block = &vit->blocks[i];
    const struct saved *saved = &block->saved;
    const struct vit_rows shape = rows_of(vit, count);
    const struct vit_norm norm2 = vit_norm2_of(vit, i, count, training);
    const uint32_t rows = count * shape.tokens;
    TRY(linear_forward(vit, block->qkv, rows, saved->norms1, saved->qkv));
    TRY(vit_attention(&shape, vit->heads, saved->qkv, saved->mixed, saved->logs, vit->stream));
    TRY(linear_forward(vit, block->proj, rows, saved->mixed, vit->branch));
    TRY(vit_add_norm(&norm2, block->sums1, vit->branch, vit->stream));
    const struct vit_linear fc1 = vit_linear_of(block->fc1, rows);
    TRY(vit_hidden(vit->multiplier, &fc1, saved->norms2, vit->parameters + block->fc1->weight,
                   vit->parameters + block->fc1->bias, saved->hidden, saved->active, vit->stream));
    return linear_forward(vit, block->fc2, rows, saved->active, vit->branch);
}

enum status vit_forward(struct vit *vit, uint32_t count, bool training)
{
    const float *parameters = vit->state.parameters;
    const struct vit_norm first = vit_norm1_of(vit, 0, count, training);
    const uint32_t patches = first.rows.tokens - 1;
    TRY(linear_forward(vit, vit->patch_layer, count * patches, vit->patches, vit->branch));
    TRY(vit_tokens_norm(&first, vit->branch, parameters + vit->token_layer->bias,
                        parameters + vit->token_layer->weight, vit->stream));
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct vit_norm next = i + 1 < vit->block_count ? vit_norm1_of(vit, i + 1, count, training)
                                                              : vit_last_norm_of(vit, count, training);
        TRY(vit_block_forward(vit, i, count, training));
        TRY(vit_add_norm(&next, vit->blocks[i].saved.sums2, vit->branch, vit->stream));
    }
    const struct vit_linear head = vit_linear_of(vit->head, count);
    return vit_linear_forward(vit->multiplier, &head, true, vit->class_norms,
                              vit->parameters + vit->head->weight, parameters + vit->head->bias, vit->logits,
                              vit->stream);
}
