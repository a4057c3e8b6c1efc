/* The plan of a launch of `ops-fused` (fused.cu): how many warps a block has, and how it divides its shared
 * memory. Plain C, so that a test can compute the plans of GPUs that are not there. */
#ifndef FDSL_CUDA_OPS_FUSED_PLAN_H
#define FDSL_CUDA_OPS_FUSED_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "common/xxh3.cuh"

#define WARP_LANES     32
#define CONSUMERS_MAX  27 /* warps; with more, a lane would have too few registers for its part of a row */
#define TILE_ROWS_MAX  9
#define OUTPUTS_MAX    32 /* output tiles in shared memory */
#define OUTPUTS_MIN    3  /* minimum per group, so that consumers seldom wait for the writer */
#define QUADS          8  /* maximum number of groups of four values that a lane has in registers */
#define ROW_VALUES_MAX (4 * WARP_LANES * QUADS) /* values of the longest row that fits a warp's registers */
/* Shared memory per block that is not for output tiles and buffers: struct pipeline, and the alignment of
 * what follows it. fused.cu checks the size of the struct. */
#define PIPELINE_BYTES 5856
#define FIXED_BYTES    (PIPELINE_BYTES + 256)

/* How a row can be read; see row.cuh. */
enum row_kind { ROW_ANY, ROW_ALIGNED, ROW_WHOLE };

static inline enum row_kind row_kind_of(uint64_t row_bytes, uint32_t columns)
{
    if (row_bytes % 16 != 0 || row_bytes <= XXH3_SHORT_MAX)
        return ROW_ANY;
    return columns % 256 == 0 ? ROW_WHOLE : ROW_ALIGNED;
}

/* Inputs of a plan. */
struct fused_shape {
    uint64_t shared_bytes; /* maximum shared memory per block */
    bool bulk;             /* the GPU has bulk copies */
    bool unaligned;        /* input rows are not aligned to 16 bytes */
    bool stores;           /* the kernel drops rows and writes results: it needs output tiles */
    uint32_t columns;
    uint64_t row_bytes, value_bytes, scale_bytes; /* per row, and per output row */
};

/* The division of rows and of shared memory for a launch. Warps of a group process one tile at a time. */
struct fused_plan {
    bool fits;        /* shared memory has room for the buffers and enough output tiles */
    bool loads_bulk;  /* rows are read with bulk copies */
    bool stores_bulk; /* values are written with bulk copies */
    uint32_t tile_rows, groups, outputs;
    uint32_t arrivals; /* lanes of a consumer that arrive at the barrier of an output tile: all lanes if the
                          writer reads the tile with plain loads, otherwise one lane */
    uint32_t value_bytes, scale_bytes; /* per output row in shared memory */
    uint32_t buffers_at, shared_bytes; /* shared memory: output tiles, then a buffer per consumer */
};

/* Returns the plan for this number of rows per tile and this number of groups. */
static inline struct fused_plan fused_plan_for(const struct fused_shape *shape, uint32_t tile_rows,
                                               uint32_t groups)
{
    uint64_t value_bytes = (shape->value_bytes + 15) / 16 * 16;
    uint64_t scale_bytes = (shape->scale_bytes + 15) / 16 * 16;
    uint64_t tile_bytes = shape->stores ? tile_rows * (value_bytes + scale_bytes) : 0, buffers = 0;
    uint64_t room = shape->shared_bytes > FIXED_BYTES ? shape->shared_bytes - FIXED_BYTES : 0;
    struct fused_plan plan = {false};
    plan.tile_rows = tile_rows;
    plan.groups = groups;
    plan.loads_bulk = shape->bulk && !shape->unaligned && shape->columns <= ROW_VALUES_MAX &&
                      row_kind_of(shape->row_bytes, shape->columns) != ROW_ANY;
    plan.stores_bulk = shape->bulk && shape->value_bytes % 16 == 0;
    plan.arrivals = plan.stores_bulk && !shape->scale_bytes ? 1 : WARP_LANES;
    plan.outputs = OUTPUTS_MAX;
    if (plan.loads_bulk)
        buffers = tile_rows * groups * shape->row_bytes;
    if (buffers > room)
        return plan;
    if (tile_bytes > 0 && (room - buffers) / tile_bytes < OUTPUTS_MAX)
        plan.outputs = (uint32_t)((room - buffers) / tile_bytes);
    plan.fits = plan.outputs >= OUTPUTS_MIN * groups;
    if (!plan.fits) /* the sizes below might exceed 32 bits */
        return plan;
    if (shape->stores) {
        plan.value_bytes = (uint32_t)value_bytes;
        plan.scale_bytes = (uint32_t)scale_bytes;
    }
    plan.buffers_at = (uint32_t)(plan.outputs * tile_bytes);
    plan.shared_bytes = (uint32_t)(plan.buffers_at + buffers);
    return plan;
}

/* Chooses the largest number of warps that leaves enough room for output tiles. If the plan does not fit, the
 * kernel cannot write the results, and a second pass does. Without `stores`, a plan always fits on GPUs with
 * FIXED_BYTES + 4 * ROW_VALUES_MAX bytes of shared memory per block. */
static inline struct fused_plan fused_plan(const struct fused_shape *shape)
{
    struct fused_plan plan = {false};
    for (uint32_t tile_rows = TILE_ROWS_MAX; tile_rows > 0; tile_rows /= 2)
        for (uint32_t groups = CONSUMERS_MAX / TILE_ROWS_MAX; groups > 0; groups--) {
            plan = fused_plan_for(shape, tile_rows, groups);
            if (plan.fits)
                return plan;
        }
    return plan;
}

#endif
