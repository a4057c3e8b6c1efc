/* Divides one buffer among the activations and gradients of the engine `vit`. */
#include "train/vit/engine_parts.cuh"

#include "common/check.cuh"

#define PIECE_BYTES 256 /* alignment in the buffer of activations */

/* The division of a buffer into arrays. To measure the size that a buffer needs, set `buffer` to NULL. */
struct pieces {
    char *buffer;
    size_t used; /* bytes */
};

template <class T> static void take(struct pieces *pieces, T **array, size_t count)
{
    *array = pieces->buffer ? reinterpret_cast<T *>(pieces->buffer + pieces->used) : nullptr;
    pieces->used += (count * sizeof(T) + PIECE_BYTES - 1) / PIECE_BYTES * PIECE_BYTES;
}

static void arrange_saved(const struct vit *vit, struct pieces *pieces, struct saved *saved)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const size_t rows = (size_t)shape.samples * shape.tokens, values = rows * shape.width;
    take(pieces, &saved->norms1, values);
    take(pieces, &saved->qkv, 3 * values);
    take(pieces, &saved->mixed, values);
    take(pieces, &saved->sums2, values);
    take(pieces, &saved->norms2, values);
    take(pieces, &saved->hidden, rows * hidden_width(vit));
    take(pieces, &saved->active, rows * hidden_width(vit));
    take(pieces, &saved->moments1, rows);
    take(pieces, &saved->moments2, rows);
    take(pieces, &saved->logs, rows * vit->heads);
}

/* All blocks share the saved arrays of the first block if there is no backward pass, or if the backward pass
 * repeats the forward pass of each block. Without a backward pass, two arrays take turns as the inputs of the
 * blocks. */
static void arrange_blocks(struct vit *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const bool shared = vit->train->forward_only || vit->train->checkpoint_activations;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        struct block *block = &vit->blocks[i];
        if (vit->train->forward_only && i > 1)
            block->sums1 = block[-2].sums1;
        else
            take(pieces, &block->sums1, (size_t)shape.samples * shape.tokens * shape.width);
        if (shared && i > 0)
            block->saved = block[-1].saved;
        else
            arrange_saved(vit, pieces, &block->saved);
    }
}

static void arrange_deltas(struct vit *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const size_t rows = (size_t)shape.samples * shape.tokens, values = rows * shape.width;
    const uint32_t hidden = hidden_width(vit), wide = hidden > 3 * shape.width ? hidden : 3 * shape.width;
    take(pieces, &vit->deltas, values);
    take(pieces, &vit->in_deltas, values);
    take(pieces, &vit->wide_deltas, rows * wide);
    if (vit->path_count > 0)
        take(pieces, &vit->branch_deltas, values);
    take(pieces, &vit->class_deltas, (size_t)shape.samples * shape.width);
    take(pieces, &vit->logit_deltas, (size_t)shape.samples * vit->train->model->classes);
    take(pieces, &vit->logit_rounded, (size_t)shape.samples * vit->logit_apart);
}

/* Divides the buffer of activations and their gradients. */
static void arrange(struct vit *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const size_t samples = shape.samples;
    arrange_blocks(vit, pieces);
    take(pieces, &vit->patches, samples * vit->train->model->input_values);
    take(pieces, &vit->branch, samples * shape.tokens * shape.width);
    take(pieces, &vit->class_sums, samples * shape.width);
    take(pieces, &vit->class_norms, samples * shape.width);
    take(pieces, &vit->class_moments, samples);
    take(pieces, &vit->logits, samples * vit->train->model->classes);
    if (!vit->train->forward_only)
        arrange_deltas(vit, pieces);
}

enum status vit_open_activations(struct vit *vit)
{
    struct pieces pieces = {nullptr, 0};
    arrange(vit, &pieces);
    TRY(allocate(&vit->allocations, &pieces.buffer, pieces.used));
    pieces.used = 0;
    arrange(vit, &pieces);
    return STATUS_OK;
}
