/* `ops-fused`: one kernel does all steps in one pass over the rows. This is possible if the index of an
 * output row depends only on the rows before it, and if shared memory has room for the output rows. Otherwise
 * this kernel is only the first of two passes (gpu.cu).
 *
 * One block per multiprocessor runs until no rows are left. Block b processes tiles b, b + blocks, ... of
 * consecutive rows. The warps of a block have two roles:
 *
 * - A consumer processes one row of a tile at a time in registers, while its next row is being copied to
 * shared memory. The consumers publish the number of kept rows of the tile as soon as the norms of all its
 * rows are known. A consumer that keeps its row converts the row and stores it in an output tile in shared
 * memory.
 * - The writer adds up the counts of all earlier tiles (struct scan) and copies output tiles to device
 * memory. Only the writer therefore waits for the counts of other blocks. A consumer waits for the writer
 * only if its next output tile is still in use.
 *
 * If the kernel drops no rows, there is no writer: consumers write to device memory. */
#include "machine/device.h"
#include "common/barrier.cuh"
#include "ops/fused_plan.h"
#include "ops/write.cuh"

/* ---- Kept rows before a tile ---- */

/* Tiles of consecutive rows are numbered in order. When the rows of a tile have been examined, a warp
 * publishes how many of them are kept. One warp per block reads these counts in order and adds them up. It
 * reads a window of SCAN_TILES tiles at a time. Each lane reads SCAN_LANE_TILES of them. */

#define SCAN_LANE_TILES 16
#define SCAN_TILES      (SCAN_LANE_TILES * WARP_LANES)
#define NOT_KNOWN       0xFFFFFFFFu

struct scan {
    uint32_t first, sum; /* the window's first tile, a multiple of SCAN_LANE_TILES; kept rows before it */
    uint32_t known;      /* number of tiles with known counts before the first unknown count of the window */
    uint32_t words[SCAN_LANE_TILES / 4]; /* the lane's counts, one byte each: 1 + count, 0 if not known */
    uint32_t before;                     /* kept rows before the lane's tiles, if they are known */
};

/* Returns the number of kept rows of the first `tiles` tiles of a lane, whose counts are known. */
static __device__ __forceinline__ uint32_t scan_sum(const uint32_t (&words)[SCAN_LANE_TILES / 4],
                                                    uint32_t tiles)
{
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < SCAN_LANE_TILES / 4; i++) {
        uint32_t bytes = min(max(tiles, 4 * i) - 4 * i, 4u);
        uint32_t mask = bytes == 4 ? 0xFFFFFFFFu : (1u << 8 * bytes) - 1;
        sum = __dp4a(words[i] & mask, 0x01010101u, sum);
    }
    return sum - tiles;
}

/* Returns the number of a lane's counts before its first unknown count. */
static __device__ __forceinline__ uint32_t scan_known(const uint32_t (&words)[SCAN_LANE_TILES / 4])
{
    uint32_t known = 0;
#pragma unroll
    for (uint32_t i = 0; i < SCAN_LANE_TILES / 4; i++) {
        /* Marks bytes that are 0. Only the lowest set bit is exact. */
        uint32_t zeros = (words[i] - 0x01010101u) & ~words[i] & 0x80808080u;
        if (known == 4 * i)
            known += zeros ? (__ffs((int)zeros) - 1) / 8 : 4;
    }
    return known;
}

/* Reads the counts of the window. `counts` is aligned to 16 bytes and ends with SCAN_TILES zeros. */
static __device__ __forceinline__ void scan_read(struct scan &scan, const uint8_t *counts)
{
    uint32_t lane = threadIdx.x % WARP_LANES;
    words_poll(counts + scan.first + lane * SCAN_LANE_TILES, scan.words);
    uint32_t known = scan_known(scan.words), sum = scan_sum(scan.words, known), total = sum;
    uint32_t partial = __ballot_sync(ALL_LANES, known < SCAN_LANE_TILES);
    uint32_t last = partial ? __ffs((int)partial) - 1 : WARP_LANES; /* the first lane with an unknown count */
    scan.known = last * SCAN_LANE_TILES + (partial ? __shfl_sync(ALL_LANES, known, last % WARP_LANES) : 0);
#pragma unroll
    for (uint32_t distance = 1; distance < WARP_LANES; distance *= 2) {
        uint32_t other = __shfl_up_sync(ALL_LANES, total, distance);
        total += lane >= distance ? other : 0;
    }
    scan.before = scan.sum + total - sum;
}

/* Returns the number of kept rows before `tile`. Lanes may pass different tiles. Returns NOT_KNOWN if the
 * number is not known yet, or if the tile is not in the window. */
static __device__ __forceinline__ uint32_t scan_before(const struct scan &scan, uint32_t tile)
{
    uint32_t offset = tile - scan.first, lane = offset / SCAN_LANE_TILES % WARP_LANES;
    uint32_t words[SCAN_LANE_TILES / 4], before = __shfl_sync(ALL_LANES, scan.before, lane);
#pragma unroll
    for (uint32_t i = 0; i < SCAN_LANE_TILES / 4; i++)
        words[i] = __shfl_sync(ALL_LANES, scan.words[i], lane);
    bool known = offset < SCAN_TILES && offset <= scan.known;
    return known ? before + scan_sum(words, offset % SCAN_LANE_TILES) : NOT_KNOWN;
}

/* Moves the window forward. The new window begins at or before `tile`; all counts before it are known. */
static __device__ __forceinline__ void scan_move(struct scan &scan, uint32_t tile)
{
    uint32_t lanes = min(min(tile - scan.first, scan.known) / SCAN_LANE_TILES, WARP_LANES - 1u);
    scan.sum = __shfl_sync(ALL_LANES, scan.before, lanes);
    scan.first += lanes * SCAN_LANE_TILES;
}

/* ---- The kernel ---- */

#define REPORTS 64 /* entries of pipeline.reports: at least OUTPUTS_MAX + the number of groups */
/* A word of pipeline.reports counts reports in units of REPORT. Its lower bits say which rows are kept. */
#define REPORT (1u << 16)

struct fused_job {
    struct gpu_job job;
    struct chunk chunk;
    struct fused_plan plan;
    bool lists;  /* the kernel drops the rows that are not kept */
    bool writes; /* the kernel writes results of output rows */
    uint32_t tiles;
    uint8_t *counts; /* per tile of this launch */
};

struct pipeline {
    uint64_t loaded[CONSUMERS_MAX];                 /* barriers: the consumer's next row has been copied */
    uint64_t full[OUTPUTS_MAX], empty[OUTPUTS_MAX]; /* barriers, between consumers and writer */
    uint64_t hashes[OUTPUTS_MAX][TILE_ROWS_MAX];
    uint32_t reports[REPORTS], kept[REPORTS]; /* per tile; `kept` has a bit per row */
    uint32_t listed;                          /* kept rows before this launch */
    struct hash_keys keys;
};
static_assert(sizeof(struct pipeline) == PIPELINE_BYTES, "fused_plan.h has another size");

/* A slot in a ring of barriers. `parity` is the parity of the phase in which the slot is used. */
struct place {
    uint32_t slot, parity;
};

static __device__ __forceinline__ void advance(struct place &place, uint32_t step, uint32_t size)
{
    place.slot += step;
    if (place.slot >= size) {
        place.slot -= size;
        place.parity ^= 1;
    }
}

/* Returns tile number `turn` of this block. */
static __device__ __forceinline__ uint32_t tile_of_turn(uint32_t turn)
{
    return blockIdx.x + turn * gridDim.x;
}

/* ---- Consumers ---- */

/* The state of a consumer. */
struct consumer {
    uint32_t row;        /* index within each tile of the row that this consumer processes */
    struct place output; /* slot of the current output tile */
    uint8_t *buffer;     /* shared memory for the consumer's next row */
    uint64_t *loaded;
    uint32_t parity; /* parity of the next phase of `loaded` */
    uint32_t kept;
};

/* Begins to copy the consumer's row of a tile to its buffer. */
static __device__ __forceinline__ void begin_load(const struct fused_job &fused, const struct consumer &self,
                                                  uint32_t tile)
{
    uint64_t i = (uint64_t)tile * fused.plan.tile_rows + self.row;
    if (fused.plan.loads_bulk && threadIdx.x % WARP_LANES == 0 && tile < fused.tiles && i < fused.chunk.count)
        bulk_load(self.buffer, fused.chunk.rows + i * fused.job.row_stride, fused.job.row_bytes, self.loaded);
}

/* Takes the row that was copied to the buffer, and begins to copy the consumer's row of tile `next`. */
template <enum row_kind KIND, enum dtype TYPE>
static __device__ __forceinline__ void take_row(const struct fused_job &fused, struct consumer &self,
                                                struct window<TYPE, QUADS> &window, uint32_t next)
{
    barrier_wait(self.loaded, self.parity);
    self.parity ^= 1;
    window_move<KIND>(window, self.buffer, 0, fused.job.format.columns / 4);
    __syncwarp();
    begin_load(fused, self, next);
}

static __device__ __forceinline__ uint32_t rows_of_tile(const struct fused_job &fused, uint32_t tile)
{
    uint64_t left = fused.chunk.count - (uint64_t)tile * fused.plan.tile_rows;
    return left < fused.plan.tile_rows ? (uint32_t)left : fused.plan.tile_rows;
}

/* Reports whether a row is kept. The last report of a tile publishes the number of kept rows. The entries of
 * `reports` and `kept` may be reused, because the writer has finished the tile that used them before. */
static __device__ __forceinline__ void report(const struct fused_job &fused, struct pipeline &pipeline,
                                              const struct consumer &self, uint32_t turn, bool kept)
{
    uint32_t entry = turn % REPORTS, tile = tile_of_turn(turn), mine = REPORT | (uint32_t)kept << self.row;
    if (threadIdx.x % WARP_LANES != 0)
        return;
    uint32_t reports = atomicAdd(&pipeline.reports[entry], mine) + mine;
    if (reports / REPORT < rows_of_tile(fused, tile))
        return;
    pipeline.kept[entry] = reports & (REPORT - 1);
    pipeline.reports[entry] = 0;
    count_publish(fused.counts + tile, __popc(reports & (REPORT - 1)));
}

/* Returns whether a row is kept. If fused.lists is set, also calls report(). */
template <enum dtype TYPE, enum row_kind KIND>
static __device__ __forceinline__ bool examine_row(const struct fused_job &fused, struct pipeline &pipeline,
                                                   struct consumer &self, uint32_t turn,
                                                   struct window<TYPE, QUADS> &window, const uint8_t *row)
{
    const struct gpu_job &job = fused.job;
    bool kept = !job.masks || ops_in_bounds(warp_square_sum<KIND>(window, row, job.format.columns),
                                            job.norm_min, job.norm_max);
    self.kept += kept;
    if (fused.lists)
        report(fused, pipeline, self, turn, kept);
    return kept;
}

/* values_in_tile() and scales_in_tile() return the addresses of a row's values and scales in an output tile.
 * A tile has all values before all scales. */
static __device__ __forceinline__ uint8_t *values_in_tile(const struct fused_plan &plan, uint8_t *outputs,
                                                          uint32_t slot, uint32_t row)
{
    return outputs + slot * plan.tile_rows * (plan.value_bytes + plan.scale_bytes) + row * plan.value_bytes;
}

static __device__ __forceinline__ uint8_t *scales_in_tile(const struct fused_plan &plan, uint8_t *outputs,
                                                          uint32_t slot, uint32_t row)
{
    return values_in_tile(plan, outputs, slot, plan.tile_rows) + row * plan.scale_bytes;
}

/* Computes the results of row `i`. The values, scales and hash of an output row go to the output tile if
 * fused.lists is set, else to device memory. */
template <enum dtype TYPE, enum row_kind KIND, bool FP4>
static __device__ __forceinline__ void
process_row(const struct fused_job &fused, struct pipeline &pipeline, const struct consumer &self, uint64_t i,
            bool kept, struct window<TYPE, QUADS> &window, const uint8_t *row, uint8_t *outputs)
{
    const struct gpu_job &job = fused.job;
    const struct gpu_arrays &arrays = job.arrays;
    bool first_lane = threadIdx.x % WARP_LANES == 0, written = fused.writes && (kept || !fused.lists);
    uint32_t slot = self.output.slot;
    uint64_t hash = 0;
    if (arrays.kept && first_lane)
        arrays.kept[i] = kept;
    if ((arrays.hashes && written) || (arrays.row_hashes && kept))
        hash = warp_hash<KIND>(pipeline.keys, window, row, job.row_bytes);
    if (arrays.row_hashes && first_lane)
        arrays.row_hashes[i] = hash;
    if (arrays.row_largest) {
        uint32_t largest = warp_largest<TYPE>(row, job.format.columns);
        if (first_lane)
            arrays.row_largest[i] = largest;
    }
    if (!written)
        return;
    if (first_lane && arrays.hashes)
        *(fused.lists ? &pipeline.hashes[slot][self.row] : arrays.hashes + i) = hash;
    if (first_lane && arrays.order && !fused.lists)
        arrays.order[i] = number_of(job, i);
    if (arrays.values) {
        uint8_t *values = fused.lists ? values_in_tile(fused.plan, outputs, slot, self.row)
                                      : arrays.values + i * job.value_bytes;
        warp_convert<KIND, FP4>(job.format, window, row, values,
                                fused.lists ? scales_in_tile(fused.plan, outputs, slot, self.row)
                                            : arrays.scales + i * job.scale_bytes);
        warp_pad(values, job.value_bytes, job.pad_bytes);
    }
}

/* Hands the warp's row of the output tile to the writer. */
static __device__ __forceinline__ void hand_over(const struct fused_job &fused, struct pipeline &pipeline,
                                                 struct consumer &self)
{
    if (fused.plan.stores_bulk)
        bulk_fence();
    __syncwarp();
    if (threadIdx.x % WARP_LANES < fused.plan.arrivals)
        barrier_arrive(&pipeline.full[self.output.slot]);
    advance(self.output, fused.plan.groups, fused.plan.outputs);
}

template <enum dtype TYPE, enum row_kind KIND, bool FP4>
static __device__ void consume(const struct fused_job &fused, struct pipeline &pipeline, uint8_t *buffers,
                               uint8_t *outputs)
{
    const struct fused_plan &plan = fused.plan;
    uint32_t warp = threadIdx.x / WARP_LANES, group = warp / plan.tile_rows;
    struct consumer self = {warp % plan.tile_rows,  {group, 0}, buffers + warp * fused.job.row_bytes,
                            &pipeline.loaded[warp], 0,          0};
    begin_load(fused, self, tile_of_turn(group));
    for (uint32_t turn = group; tile_of_turn(turn) < fused.tiles; turn += plan.groups) {
        uint32_t tile = tile_of_turn(turn);
        uint64_t i = (uint64_t)tile * plan.tile_rows + self.row;
        const uint8_t *row = fused.chunk.rows + i * fused.job.row_stride;
        bool exists = i < fused.chunk.count;
        struct window<TYPE, QUADS> window;
        if (KIND != ROW_ANY && plan.loads_bulk && exists)
            take_row<KIND>(fused, self, window, tile_of_turn(turn + plan.groups));
        bool kept = exists && examine_row<TYPE, KIND>(fused, pipeline, self, turn, window, row);
        if (fused.lists)
            barrier_wait(&pipeline.empty[self.output.slot], self.output.parity ^ 1);
        if (exists)
            process_row<TYPE, KIND, FP4>(fused, pipeline, self, fused.chunk.first + i, kept, window, row,
                                         outputs);
        if (fused.lists)
            hand_over(fused, pipeline, self);
    }
    if (self.kept && threadIdx.x % WARP_LANES == 0)
        atomicAdd((unsigned long long *)&fused.job.arrays.words->kept, self.kept);
}

/* ---- The writer: one warp ---- */

template <class UNIT>
static __device__ __forceinline__ void copy_units(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    for (uint32_t i = threadIdx.x % WARP_LANES; i < bytes / sizeof(UNIT); i += WARP_LANES)
        reinterpret_cast<UNIT *>(to)[i] = reinterpret_cast<const UNIT *>(from)[i];
}

/* Copies the values or scales of an output row to device memory, where rows are contiguous. */
static __device__ __forceinline__ void copy_output(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    if (bytes % 8 == 0)
        copy_units<uint64_t>(to, from, bytes);
    else if (bytes % 4 == 0)
        copy_units<uint32_t>(to, from, bytes);
    else
        copy_units<uint8_t>(to, from, bytes);
}

/* Writes the values of consecutive output rows. */
static __device__ __forceinline__ void write_values(const struct fused_job &fused, uint8_t *to,
                                                    const uint8_t *from, uint32_t rows)
{
    const struct fused_plan &plan = fused.plan;
    uint64_t bytes = fused.job.value_bytes;
    if (plan.stores_bulk) {
        if (threadIdx.x % WARP_LANES == 0)
            bulk_store(to, from, rows * plan.value_bytes);
    } else {
        for (uint32_t row = 0; row < rows; row++)
            copy_output(to + row * bytes, from + row * plan.value_bytes, bytes);
    }
}

/* Returns the lowest `most` set bits of a word. */
static __device__ __forceinline__ uint32_t first_bits(uint32_t word, uint64_t most)
{
    while (__popc(word) > most)
        word &= ~(1u << (31 - __clz((int)word)));
    return word;
}

/* Writes output tile number `turn` of this block. `before` is the number of kept rows before this tile. Lane
 * l writes the order, the list entry and the hash of row l. */
static __device__ __forceinline__ void write_tile(const struct fused_job &fused,
                                                  const struct pipeline &pipeline, uint32_t turn,
                                                  uint32_t slot, uint64_t before, uint8_t *outputs)
{
    const struct gpu_job &job = fused.job;
    const struct gpu_arrays &arrays = job.arrays;
    const struct fused_plan &plan = fused.plan;
    uint32_t lane = threadIdx.x % WARP_LANES, kept = pipeline.kept[turn % REPORTS], tile = tile_of_turn(turn);
    if (tile == fused.tiles - 1 && lane == 0)
        arrays.words->listed = before + __popc(kept);
    if (kept >> lane & 1) {
        uint64_t j = before + __popc(kept & ((1u << lane) - 1));
        uint64_t i = fused.chunk.first + (uint64_t)tile * plan.tile_rows + lane;
        if (arrays.order)
            arrays.order[j] = number_of(job, i);
        if (arrays.rows)
            arrays.rows[j] = (uint32_t)i;
        if (arrays.hashes)
            arrays.hashes[j] = pipeline.hashes[slot][lane];
    }
    if (!arrays.values || before >= job.outputs)
        return;
    uint64_t j = before;
    for (uint32_t left = first_bits(kept, job.outputs - before), count; left; j += count) {
        uint32_t row = __ffs((int)left) - 1;
        count = __ffs((int)~(left >> row)) - 1; /* consecutive kept rows, which are adjacent in the output */
        left &= left + (1u << row);
        write_values(fused, arrays.values + j * job.value_bytes, values_in_tile(plan, outputs, slot, row),
                     count);
        if (arrays.scales)
            for (uint32_t k = 0; k < count; k++)
                copy_output(arrays.scales + (j + k) * job.scale_bytes,
                            scales_in_tile(plan, outputs, slot, row + k), job.scale_bytes);
    }
}

/* Writes the block's tiles in order, several at a time. Lane l waits for the block's tile number `turn` + l.
 */
static __device__ __forceinline__ void write_tiles(const struct fused_job &fused, struct pipeline &pipeline,
                                                   uint8_t *outputs)
{
    const struct fused_plan &plan = fused.plan;
    uint32_t lane = threadIdx.x % WARP_LANES, count;
    struct place next = {0, 0};
    struct scan scan = {};
    scan.sum = pipeline.listed;
    for (uint32_t turn = 0; tile_of_turn(turn) < fused.tiles; turn += count) {
        uint32_t tile = tile_of_turn(turn + lane);
        struct place place = next;
        advance(place, lane < plan.outputs ? lane : 0, plan.outputs);
        scan_read(scan, fused.counts);
        uint32_t before = scan_before(scan, tile);
        bool ready = lane < plan.outputs && tile < fused.tiles && before != NOT_KNOWN &&
                     barrier_complete(&pipeline.full[place.slot], place.parity);
        uint32_t waits = __ballot_sync(ALL_LANES, !ready);
        count = waits ? __ffs((int)waits) - 1 : WARP_LANES;
        for (uint32_t k = 0; k < count; k++) {
            uint32_t slot = __shfl_sync(ALL_LANES, place.slot, k);
            /* Only lane k has observed that this barrier is complete. Every lane must observe it before it
             * reads the tile. */
            barrier_wait(&pipeline.full[slot], __shfl_sync(ALL_LANES, place.parity, k));
            write_tile(fused, pipeline, turn + k, slot, __shfl_sync(ALL_LANES, before, k), outputs);
        }
        if (count > 0)
            bulk_store_wait();
        for (uint32_t k = 0; k < count; k++) /* all lanes have read the tiles, so each of them arrives */
            barrier_arrive(&pipeline.empty[__shfl_sync(ALL_LANES, place.slot, k)]);
        advance(next, count, plan.outputs);
        scan_move(scan, tile_of_turn(turn + count));
    }
}

/* ---- The kernel ---- */

template <enum dtype TYPE, enum row_kind KIND, bool FP4>
static __global__ void __launch_bounds__((CONSUMERS_MAX + 1) * WARP_LANES, 1)
    fused_rows(const __grid_constant__ struct fused_job fused)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ struct pipeline pipeline;
    const struct fused_plan &plan = fused.plan;
    uint32_t consumers = plan.groups * plan.tile_rows, warp = threadIdx.x / WARP_LANES;
    if (threadIdx.x < consumers)
        barrier_init(&pipeline.loaded[threadIdx.x], 1);
    if (threadIdx.x < OUTPUTS_MAX) {
        barrier_init(&pipeline.full[threadIdx.x], plan.tile_rows * plan.arrivals);
        barrier_init(&pipeline.empty[threadIdx.x], WARP_LANES);
        hash_keys_begin(pipeline.keys);
    }
    for (uint32_t entry = threadIdx.x; entry < REPORTS; entry += blockDim.x)
        pipeline.reports[entry] = 0;
    bulk_fence();
    if (threadIdx.x == 0) /* no race: words->listed changes only after all blocks have published counts */
        pipeline.listed = (uint32_t)fused.job.arrays.words->listed;
    __syncthreads();
    if (warp < consumers)
        consume<TYPE, KIND, FP4>(fused, pipeline, shared + plan.buffers_at, shared);
    else
        write_tiles(fused, pipeline, shared);
}

/* ---- The host ---- */

static struct fused_plan make_plan(const struct gpu_ops *gpu)
{
    const struct ops *ops = gpu->ops;
    struct fused_shape shape = {};
    shape.shared_bytes = (uint64_t)gpu->shared_bytes;
    shape.bulk = gpu->bulk;
    shape.stores = gpu->lists && gpu->one_pass;
    shape.columns = ops->format.columns;
    shape.row_bytes = ops->row_bytes;
    shape.value_bytes = gpu_value_bytes(gpu);
    shape.unaligned = gpu->target && gpu->target->unaligned;
    shape.scale_bytes = ops_array_bytes(ops, OPS_SCALES);
    return fused_plan(&shape);
}

bool gpu_fused_fits(const struct gpu_ops *gpu)
{
    return make_plan(gpu).fits;
}

uint64_t gpu_fused_tiles(const struct gpu_ops *gpu)
{
    /* The tiles of each chunk begin at a multiple of SCAN_LANE_TILES. */
    return gpu->ops->count / make_plan(gpu).tile_rows + gpu->chunks * (1 + SCAN_LANE_TILES) + SCAN_TILES;
}

/* Chooses the arrays that the kernel fills: all of them if there is one pass, else those that the second pass
 * needs. */
static void choose_results(const struct gpu_ops *gpu, struct fused_job *fused)
{
    struct gpu_arrays *arrays = &fused->job.arrays;
    fused->lists = gpu->lists && !gpu->ops->steps[OPS_DEDUP];
    if (!gpu->one_pass) {
        arrays->order = arrays->hashes = NULL;
        arrays->values = arrays->scales = NULL;
    }
    if (!fused->lists)
        arrays->rows = NULL;
    fused->writes = arrays->order || arrays->rows || arrays->values || arrays->hashes;
}

template <enum dtype TYPE, enum row_kind KIND, bool FP4>
static enum status launch(struct gpu_ops *gpu, const struct fused_job &fused)
{
    const struct fused_plan &plan = fused.plan;
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute cooperative = {};
    cooperative.id = cudaLaunchAttributeCooperative; /* blocks wait for each other */
    cooperative.val.cooperative = 1;
    config.gridDim = fused.tiles < (unsigned)gpu->multiprocessors ? fused.tiles : gpu->multiprocessors;
    config.blockDim = (plan.groups * plan.tile_rows + (fused.lists ? 1 : 0)) * WARP_LANES;
    config.dynamicSmemBytes = plan.shared_bytes;
    config.stream = gpu->compute;
    config.attrs = &cooperative;
    config.numAttrs = fused.lists ? 1 : 0;
    CUDA_TRY(cudaFuncSetAttribute(fused_rows<TYPE, KIND, FP4>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)plan.shared_bytes));
    CUDA_TRY(cudaLaunchKernelEx(&config, fused_rows<TYPE, KIND, FP4>, fused));
    CUDA_TRY_LAUNCH("fused_rows");
    return STATUS_OK;
}

static enum status fused_read(struct gpu_ops *gpu, const struct chunk *chunk)
{
    struct fused_job fused = {};
    fused.job = gpu->job;
    fused.chunk = *chunk;
    fused.plan = make_plan(gpu);
    fused.tiles = (uint32_t)((chunk->count + fused.plan.tile_rows - 1) / fused.plan.tile_rows);
    fused.counts = gpu->counts + gpu->tiles;
    gpu->tiles += (fused.tiles + SCAN_LANE_TILES - 1) / SCAN_LANE_TILES * SCAN_LANE_TILES;
    choose_results(gpu, &fused);
    /* If only norms are needed, a kernel with more warps per multiprocessor is faster. */
    if (!fused.lists && !fused.writes && !gpu->arrays.row_hashes && !gpu->arrays.row_largest)
        return gpu_read_steps(gpu, chunk);
    return for_rows(
        gpu->job, [&]<enum dtype TYPE, enum row_kind KIND, bool FP4>() {
            return launch<TYPE, KIND, FP4>(gpu, fused);
        });
}

static enum status fused_write(struct gpu_ops *gpu, const struct chunk *chunk)
{
    return gpu_write(gpu, chunk, &gpu->arrays);
}

const struct gpu_steps gpu_fused_steps = {.fused = true, .read = fused_read, .write = fused_write};

static enum status fused_setup(const struct resources *resources, const void *input, void **state)
{
    return gpu_ops_open(resources, input, &gpu_fused_steps, state);
}

extern "C" const struct variant variant_ops_fused = {.platform = "cuda",
                                                     .wants_own_architecture = true,
                                                     .traits = &gpu_ops_traits,
                                                     .probe = device_probe_variant,
                                                     .setup = fused_setup,
                                                     .run = gpu_ops_run,
                                                     .fetch = gpu_ops_fetch,
                                                     .teardown = gpu_ops_teardown};
