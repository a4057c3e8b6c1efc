/* `ops-fused`: one kernel reads each row once from device memory and does all steps, if the place of an
 * output row depends only on the rows before it. Otherwise this kernel does the first pass.
 *
 * One block per multiprocessor stays until no rows are left. Its warps have different roles:
 *
 * - The dispatcher takes tiles of consecutive rows, in order.
 * - Consumers process one row of a tile at a time, while the next one is being copied to shared memory. A
 * consumer that keeps its row converts it to an output tile in shared memory. The number of kept rows of the
 * tile is published as soon as all its rows have been examined.
 * - The scanner, in one block only, computes the number of kept rows before each tile (scan.cuh).
 * - The writer waits for this number and copies output tiles to device memory. So only converted rows wait.
 *
 * If no rows are dropped, there is no scanner and no writer: consumers write to device memory. */
#include "machine/device.h"
#include "ops/scan.cuh"
#include "ops/write.cuh"

#define CONSUMERS_MAX 24 /* warps */
#define TILE_ROWS_MAX 8
#define BUFFERS       2 /* rows per consumer in shared memory: the one that it processes, and the next one */
#define POSTS         8 /* tiles that the dispatcher is ahead, at most: the order of writing should be kept */
#define TICKETS       2 /* tickets in flight */
#define OUTPUTS_MAX   32 /* output tiles in shared memory */
#define LAG_BYTES \
    131072        /* output tiles should suffice for this many bytes of rows that wait for the scanner */
#define LOADS   3 /* loads in flight per lane */
#define NO_TILE 0xFFFFFFFFu
#define REPORT  (1u << 16) /* counts the warps that have reported; the low bits say which rows are kept */

/* How a launch divides rows and shared memory. Warps of a group process one tile at a time. */
struct fused_plan {
    bool fits, staged,
        bulk; /* output tiles fit; rows are copied to shared memory; output rows are bulk copies */
    uint32_t tile_rows, groups, outputs;
    uint32_t output_bytes, scales_at; /* per output row in shared memory; offset of its scales */
    uint32_t shared_bytes;
};

struct fused_job {
    struct gpu_job job;
    struct chunk chunk;
    struct fused_plan plan;
    bool lists, writes; /* rows that are not kept are dropped; there are results per output row */
    uint32_t tiles;
    uint32_t *tickets;         /* of this launch: the next tile, and the blocks that have begun */
    uint32_t *counts, *before; /* per tile of this launch: kept rows of the tile and before the tile */
};

struct pipeline {
    uint64_t posted[POSTS], taken[POSTS]; /* barriers of `tile`, between dispatcher and consumers */
    uint64_t full[OUTPUTS_MAX],
        empty[OUTPUTS_MAX]; /* barriers of output tiles, between consumers and writer */
    uint64_t hashes[OUTPUTS_MAX][TILE_ROWS_MAX];
    uint32_t tile[POSTS];
    uint32_t output_tile[OUTPUTS_MAX], reports[OUTPUTS_MAX];
    uint32_t kept[OUTPUTS_MAX]; /* which rows of the tile are kept, as bits */
    struct hash_keys keys;
};

/* A place in a ring of barriers. `parity` is that of the phase in which the place is used. */
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

/* ---- The dispatcher: one thread ---- */

static __device__ __noinline__ void dispatch(const struct fused_job &fused, struct pipeline &pipeline)
{
    struct place at = {0, 0};
    uint32_t ends = 0, ahead[TICKETS];
#pragma unroll
    for (int i = 0; i < TICKETS; i++)
        ahead[i] = atomicAdd(&fused.tickets[0], 1);
    for (;;)
#pragma unroll
        for (int i = 0; i < TICKETS; i++) {
            uint32_t tile = ahead[i];
            if (tile < fused.tiles)
                ahead[i] = atomicAdd(&fused.tickets[0], 1);
            else if (ends++ == fused.plan.groups) /* each group has seen one end */
                return;
            barrier_wait(&pipeline.taken[at.slot], at.parity ^ 1);
            pipeline.tile[at.slot] = tile < fused.tiles ? tile : NO_TILE;
            barrier_arrive(&pipeline.posted[at.slot]);
            advance(at, 1, POSTS);
        }
}

/* ---- Consumers ---- */

/* What a consumer knows about itself. */
struct consumer {
    uint32_t row;        /* its row of each tile */
    struct place post;   /* of the next tile of its group */
    struct place output; /* of the current tile */
    uint8_t *buffers;    /* in shared memory */
    uint32_t kept;
};

static __device__ __forceinline__ uint32_t rows_of_tile(const struct fused_job &fused, uint32_t tile)
{
    uint64_t left = fused.chunk.count - (uint64_t)tile * fused.plan.tile_rows;
    return left < fused.plan.tile_rows ? (uint32_t)left : fused.plan.tile_rows;
}

static __device__ __forceinline__ const uint8_t *row_in_device(const struct fused_job &fused, uint32_t tile,
                                                               uint32_t row)
{
    return fused.chunk.rows + ((uint64_t)tile * fused.plan.tile_rows + row) * fused.job.row_bytes;
}

/* Takes the next tile of the group, and begins to copy the warp's row of it. */
static __device__ __forceinline__ uint32_t take_tile(const struct fused_job &fused, struct pipeline &pipeline,
                                                     struct consumer &self, uint32_t buffer)
{
    uint32_t lane = threadIdx.x % WARP_LANES, row_bytes = fused.job.row_bytes;
    barrier_wait(&pipeline.posted[self.post.slot], self.post.parity);
    uint32_t tile = pipeline.tile[self.post.slot];
    __syncwarp();
    if (lane == 0)
        barrier_arrive(&pipeline.taken[self.post.slot]);
    advance(self.post, fused.plan.groups, POSTS);
    if (fused.plan.staged && tile != NO_TILE && self.row < rows_of_tile(fused, tile)) {
        const uint8_t *from = row_in_device(fused, tile, self.row);
        uint8_t *to = self.buffers + buffer * row_bytes;
        for (uint32_t at = 16 * lane; at < row_bytes; at += 16 * WARP_LANES)
            copy_async(to + at, from + at);
    }
    copy_async_commit();
    return tile;
}

/* Reports whether a row is kept. The last report of a tile publishes their number. */
static __device__ __forceinline__ void report(const struct fused_job &fused, struct pipeline &pipeline,
                                              const struct consumer &self, uint32_t tile, bool kept)
{
    uint32_t slot = self.output.slot, mine = REPORT | (uint32_t)kept << self.row;
    if (threadIdx.x % WARP_LANES != 0)
        return;
    uint32_t reports = atomicAdd(&pipeline.reports[slot], mine) + mine;
    if (reports / REPORT < rows_of_tile(fused, tile))
        return;
    pipeline.kept[slot] = reports & (REPORT - 1);
    pipeline.reports[slot] = 0;
    word_publish(fused.counts + tile, __popc(reports & (REPORT - 1)));
}

/* Processes a row. If rows may be dropped, the results go to the output tile, else to device memory. */
template <enum dtype TYPE, bool FAST>
static __device__ __forceinline__ void process_row(const struct fused_job &fused, struct pipeline &pipeline,
                                                   struct consumer &self, uint32_t tile, const uint8_t *row,
                                                   uint8_t *outputs)
{
    const struct gpu_job &job = fused.job;
    const struct gpu_arrays &arrays = job.arrays;
    bool first_lane = threadIdx.x % WARP_LANES == 0;
    uint64_t i = fused.chunk.first + (uint64_t)tile * fused.plan.tile_rows + self.row, hash = 0;
    bool kept = !job.masks || ops_in_bounds(warp_square_sum<TYPE, FAST, LOADS>(row, job.format.columns),
                                            job.norm_min, job.norm_max);
    self.kept += kept;
    if (fused.lists)
        report(fused, pipeline, self, tile, kept);
    if (arrays.kept && first_lane)
        arrays.kept[i] = kept;
    bool written = fused.writes && (kept || !fused.lists);
    if ((arrays.hashes && written) || (arrays.row_hashes && kept))
        hash = warp_hash<TYPE, FAST>(pipeline.keys, row, job.row_bytes);
    if (arrays.row_hashes && first_lane)
        arrays.row_hashes[i] = hash;
    if (arrays.row_largest) {
        uint32_t largest = warp_largest<TYPE>(row, job.format.columns);
        if (first_lane)
            arrays.row_largest[i] = largest;
    }
    if (!written)
        return;
    uint64_t *hash_to = fused.lists ? &pipeline.hashes[self.output.slot][self.row] : arrays.hashes + i;
    uint8_t *output =
        outputs + (self.output.slot * fused.plan.tile_rows + self.row) * fused.plan.output_bytes;
    if (first_lane && arrays.hashes)
        *hash_to = hash;
    if (first_lane && arrays.order && !fused.lists)
        arrays.order[i] = number_of(job, i);
    if (arrays.values)
        warp_convert<TYPE, FAST, LOADS>(
            job.format, row, fused.lists ? output : arrays.values + i * job.value_bytes,
            fused.lists ? output + fused.plan.scales_at : arrays.scales + i * job.scale_bytes);
}

/* Hands the warp's row of the output tile to the writer. */
static __device__ __forceinline__ void hand_over(const struct fused_job &fused, struct pipeline &pipeline,
                                                 struct consumer &self, uint32_t tile)
{
    if (fused.plan.bulk)
        bulk_fence();
    __syncwarp();
    if (threadIdx.x % WARP_LANES == 0) {
        pipeline.output_tile[self.output.slot] = tile;
        barrier_arrive(&pipeline.full[self.output.slot]);
    }
    advance(self.output, fused.plan.groups, fused.plan.outputs);
}

template <enum dtype TYPE, bool FAST>
static __device__ void consume(const struct fused_job &fused, struct pipeline &pipeline, uint8_t *shared)
{
    const struct fused_plan &plan = fused.plan;
    uint32_t warp = threadIdx.x / WARP_LANES, group = warp / plan.tile_rows, row_bytes = fused.job.row_bytes;
    uint8_t *outputs = shared + (plan.staged ? plan.groups * plan.tile_rows * BUFFERS * row_bytes : 0);
    struct consumer self = {
        warp % plan.tile_rows, {group, 0}, {group, 0}, shared + warp * BUFFERS * row_bytes, 0};
    uint32_t tile = take_tile(fused, pipeline, self, 0);
    for (uint32_t buffer = 0; tile != NO_TILE; buffer ^= 1) {
        uint32_t next = take_tile(fused, pipeline, self, buffer ^ 1);
        copy_async_wait<1>();
        __syncwarp();
        if (fused.lists)
            barrier_wait(&pipeline.empty[self.output.slot], self.output.parity ^ 1);
        if (self.row < rows_of_tile(fused, tile))
            process_row<TYPE, FAST>(fused, pipeline, self, tile,
                                    plan.staged ? self.buffers + buffer * row_bytes
                                                : row_in_device(fused, tile, self.row),
                                    outputs);
        if (fused.lists)
            hand_over(fused, pipeline, self, tile);
        __syncwarp(); /* the next tile is copied to this buffer */
        tile = next;
    }
    if (fused.lists) {
        barrier_wait(&pipeline.empty[self.output.slot], self.output.parity ^ 1);
        hand_over(fused, pipeline, self, NO_TILE);
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

/* Copies the values or scales of an output row to device memory, where rows have no gaps. */
static __device__ __forceinline__ void copy_output(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    if (bytes % 8 == 0)
        copy_units<uint64_t>(to, from, bytes);
    else if (bytes % 4 == 0)
        copy_units<uint32_t>(to, from, bytes);
    else
        copy_units<uint8_t>(to, from, bytes);
}

/* Writes an output tile. `before` is the number of kept rows before it. Lane l writes what is small of row l.
 */
static __device__ void write_tile(const struct fused_job &fused, const struct pipeline &pipeline,
                                  uint32_t slot, uint64_t before, const uint8_t *outputs)
{
    const struct gpu_job &job = fused.job;
    const struct gpu_arrays &arrays = job.arrays;
    const struct fused_plan &plan = fused.plan;
    uint32_t lane = threadIdx.x % WARP_LANES, kept = pipeline.kept[slot];
    const uint8_t *rows = outputs + slot * plan.tile_rows * plan.output_bytes;
    if (kept >> lane & 1) {
        uint64_t j = before + __popc(kept & ((1u << lane) - 1));
        uint64_t i = fused.chunk.first + (uint64_t)pipeline.output_tile[slot] * plan.tile_rows + lane;
        if (arrays.order)
            arrays.order[j] = number_of(job, i);
        if (arrays.rows)
            arrays.rows[j] = (uint32_t)i;
        if (arrays.hashes)
            arrays.hashes[j] = pipeline.hashes[slot][lane];
        if (plan.bulk && arrays.values)
            bulk_store(arrays.values + j * job.value_bytes, rows + lane * plan.output_bytes,
                       (uint32_t)job.value_bytes);
    }
    for (uint32_t left = arrays.values && (!plan.bulk || arrays.scales) ? kept : 0; left; left &= left - 1) {
        uint32_t row = __ffs((int)left) - 1;
        const uint8_t *output = rows + row * plan.output_bytes;
        uint64_t j = before + __popc(kept & ((1u << row) - 1));
        if (!plan.bulk)
            copy_output(arrays.values + j * job.value_bytes, output, job.value_bytes);
        if (arrays.scales)
            copy_output(arrays.scales + j * job.scale_bytes, output + plan.scales_at, job.scale_bytes);
    }
}

/* Lane l watches output tile number `next` + l. Tiles are written in order, several at a time. */
static __device__ __noinline__ void write_tiles(const struct fused_job &fused, struct pipeline &pipeline,
                                                const uint8_t *outputs)
{
    const struct fused_plan &plan = fused.plan;
    uint32_t lane = threadIdx.x % WARP_LANES;
    struct place next = {0, 0};
    for (;;) {
        struct place mine = next;
        advance(mine, lane < plan.outputs ? lane : 0, plan.outputs);
        bool full = lane < plan.outputs && barrier_complete(&pipeline.full[mine.slot], mine.parity);
        uint32_t tile = full ? pipeline.output_tile[mine.slot] : NO_TILE;
        uint32_t before = tile != NO_TILE ? word_poll(fused.before + tile) : 0;
        uint32_t waits = __ballot_sync(ALL_LANES, before == 0);
        __syncwarp(); /* lanes read tiles whose barriers other lanes have observed */
        uint32_t count = waits ? __ffs((int)waits) - 1 : WARP_LANES;
        for (uint32_t k = 0; k < count; k++)
            write_tile(fused, pipeline, __shfl_sync(ALL_LANES, mine.slot, k),
                       __shfl_sync(ALL_LANES, before, k) - 1, outputs);
        if (count > 0)
            bulk_store_wait();
        __syncwarp();
        if (lane < count)
            barrier_arrive(&pipeline.empty[mine.slot]);
        advance(next, count, plan.outputs);
        if (count == 0 && __shfl_sync(ALL_LANES, full && tile == NO_TILE, 0))
            return;
    }
}

/* ---- The kernel ---- */

template <enum dtype TYPE, bool FAST>
static __global__ void __launch_bounds__((CONSUMERS_MAX + 3) * WARP_LANES, 1)
    fused_rows(const __grid_constant__ struct fused_job fused)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ struct pipeline pipeline;
    __shared__ bool scans;
    const struct fused_plan &plan = fused.plan;
    uint32_t consumers = plan.groups * plan.tile_rows, warp = threadIdx.x / WARP_LANES;
    if (threadIdx.x < POSTS) {
        barrier_init(&pipeline.posted[threadIdx.x], 1);
        barrier_init(&pipeline.taken[threadIdx.x], plan.tile_rows);
    }
    if (threadIdx.x < OUTPUTS_MAX) {
        barrier_init(&pipeline.full[threadIdx.x], plan.tile_rows);
        barrier_init(&pipeline.empty[threadIdx.x], 1);
        pipeline.reports[threadIdx.x] = 0;
        hash_keys_begin(pipeline.keys);
    }
    if (threadIdx.x ==
        0) /* the first block that runs, so that the scanner never waits for a free multiprocessor */
        scans = fused.lists && atomicAdd(&fused.tickets[1], 1) == 0;
    __syncthreads();
    if (warp < consumers)
        consume<TYPE, FAST>(fused, pipeline, shared);
    else if (threadIdx.x == consumers * WARP_LANES)
        dispatch(fused, pipeline);
    else if (warp == consumers + 1 && fused.lists)
        write_tiles(fused, pipeline, shared + (plan.staged ? consumers * BUFFERS * fused.job.row_bytes : 0));
    else if (warp == consumers + 2 && scans)
        scan(fused.counts, fused.before, fused.tiles, &fused.job.arrays.words->listed);
}

/* ---- The host ---- */

/* Fills the sizes for this number of warps. */
static struct fused_plan plan_for(const struct gpu_ops *gpu, bool staged, uint32_t tile_rows, uint32_t groups)
{
    const struct ops *ops = gpu->ops;
    uint64_t row_bytes = ops->row_bytes, value_bytes = ops_array_bytes(ops, OPS_VALUES);
    uint64_t room = (uint64_t)gpu->shared_bytes - sizeof(struct pipeline) - 256;
    uint64_t buffers = staged ? tile_rows * groups * BUFFERS * row_bytes : 0;
    struct fused_plan plan = {};
    plan.tile_rows = tile_rows;
    plan.groups = groups;
    plan.staged = staged;
    plan.bulk = gpu->bulk && value_bytes % 16 == 0;
    plan.scales_at = (uint32_t)((value_bytes + 15) / 16 * 16);
    plan.output_bytes = plan.scales_at + (uint32_t)((ops_array_bytes(ops, OPS_SCALES) + 15) / 16 * 16);
    plan.output_bytes = gpu->lists && gpu->one_pass ? plan.output_bytes : 0;
    if (buffers > room || (staged && row_bytes % 16 != 0))
        return plan;
    uint64_t outputs = plan.output_bytes ? (room - buffers) / (tile_rows * plan.output_bytes) : OUTPUTS_MAX;
    plan.outputs = (uint32_t)(outputs < OUTPUTS_MAX ? outputs : OUTPUTS_MAX);
    plan.fits = plan.outputs > groups;
    plan.shared_bytes = (uint32_t)buffers + plan.outputs * tile_rows * plan.output_bytes;
    return plan;
}

/* Chooses the largest number of warps that leaves enough room for output tiles. */
static struct fused_plan choose_plan(const struct gpu_ops *gpu, bool staged)
{
    struct fused_plan best = {};
    uint64_t best_lag = 0;
    for (uint32_t tile_rows = TILE_ROWS_MAX; tile_rows > 0; tile_rows /= 2)
        for (uint32_t groups = CONSUMERS_MAX / TILE_ROWS_MAX; groups > 0; groups--) {
            struct fused_plan plan = plan_for(gpu, staged, tile_rows, groups);
            uint64_t lag = plan.fits ? (plan.outputs - groups) * tile_rows * gpu->ops->row_bytes : 0;
            if (plan.fits && (lag >= LAG_BYTES || plan.outputs == OUTPUTS_MAX))
                return plan;
            if (lag > best_lag) {
                best = plan;
                best_lag = lag;
            }
        }
    return best;
}

static struct fused_plan make_plan(const struct gpu_ops *gpu)
{
    struct fused_plan plan = choose_plan(gpu, true);
    return plan.fits ? plan : choose_plan(gpu, false);
}

bool gpu_fused_fits(const struct gpu_ops *gpu)
{
    return make_plan(gpu).fits;
}

uint64_t gpu_fused_tiles(const struct gpu_ops *gpu)
{
    /* The tiles of each chunk begin at a multiple of SCAN_TILES. */
    return gpu->ops->count / make_plan(gpu).tile_rows + gpu->chunks * (1 + SCAN_TILES) + SCAN_STEP;
}

/* What the kernel fills: everything if there is one pass, else what the second pass needs. */
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

template <enum dtype TYPE, bool FAST>
static enum status launch(struct gpu_ops *gpu, const struct fused_job &fused)
{
    const struct fused_plan &plan = fused.plan;
    unsigned threads = (plan.groups * plan.tile_rows + (fused.lists ? 3 : 1)) * WARP_LANES;
    unsigned blocks =
        fused.tiles < (unsigned)gpu->multiprocessors ? fused.tiles : (unsigned)gpu->multiprocessors;
    CUDA_TRY(cudaFuncSetAttribute(fused_rows<TYPE, FAST>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)plan.shared_bytes));
    fused_rows<TYPE, FAST><<<blocks, threads, plan.shared_bytes, gpu->compute>>>(fused);
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
    fused.tickets = gpu->tickets + 2 * gpu->launches++;
    fused.counts = gpu->counts + gpu->tiles;
    fused.before = gpu->before + gpu->tiles;
    gpu->tiles += (fused.tiles + SCAN_TILES - 1) / SCAN_TILES * SCAN_TILES;
    choose_results(gpu, &fused);
    if (!fused.lists && !fused.writes && !gpu->arrays.row_hashes && !gpu->arrays.row_largest)
        return gpu_read_steps(gpu, chunk); /* only a mask, for which more warps fit into a multiprocessor */
    return for_rows(
        gpu->job, [&]<enum dtype TYPE, bool FAST>() { return launch<TYPE, FAST>(gpu, fused); });
}

static enum status fused_write(struct gpu_ops *gpu, const struct chunk *chunk)
{
    return gpu_write(gpu, chunk, &gpu->arrays);
}

static const struct gpu_steps steps = {.fused = true, .read = fused_read, .write = fused_write};

static enum status fused_setup(const struct resources *resources, const void *input, void **state)
{
    return gpu_ops_open(resources, input, &steps, state);
}

extern "C" const struct variant variant_ops_fused = {.platform = "cuda",
                                                     .wants_own_architecture = true,
                                                     .traits = &gpu_ops_traits,
                                                     .probe = device_probe_variant,
                                                     .setup = fused_setup,
                                                     .run = gpu_ops_run,
                                                     .fetch = gpu_ops_fetch,
                                                     .teardown = gpu_ops_teardown};
