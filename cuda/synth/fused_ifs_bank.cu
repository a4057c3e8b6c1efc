/* The bank of orbits in device memory (fused_ifs.cuh). */
#include <pthread.h>
#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/timer.h"
#include "synth/fused_ifs_orbits.cuh"

#define CHUNK_SEGMENTS 64u               /* segments per chunk, if there are many orbits */
#define CHUNK_THREADS  (1u << 16)        /* chunks that keep a device busy */
#define WALK_RESIDENT  4u                /* blocks that complete orbits, per multiprocessor */
#define SCRATCH_BYTES  ((size_t)1 << 30) /* maximum scratch memory of a group */

struct ifs_device_bank {
    struct ifs_device_bank *next; /* in the list of open banks */
    uint32_t users;
    pthread_mutex_t lock; /* held while orbits are computed */
    struct synth own;     /* a copy, because the first user may close its input; its tables remain */
    const struct synth *synth;
    int device;
    cudaStream_t stream, side; /* `side` completes the orbits whose chunks do not join */
    cudaEvent_t repaired;
    struct ifs_group group; /* the members that do not depend on the orbits */
    void *tables;
    uint64_t orbits;      /* of all classes */
    const uint8_t **maps; /* in host memory; NULL: the bank does not have the orbit */
    const uint8_t **device_maps;
    void **blocks; /* device memory of the maps */
    size_t block_count;
    uint32_t raster_bytes; /* shared memory of a block that rasters */
    uint32_t resident;     /* such blocks per multiprocessor */
    struct ifs_bank_facts facts;
};

const uint8_t *const *ifs_device_maps(const struct ifs_device_bank *bank)
{
    return bank->device_maps;
}

const struct ifs_system *ifs_device_systems(const struct ifs_device_bank *bank)
{
    return bank->group.systems;
}

struct ifs_bank_facts ifs_device_facts(struct ifs_device_bank *bank)
{
    pthread_mutex_lock(&bank->lock);
    const struct ifs_bank_facts facts = bank->facts;
    pthread_mutex_unlock(&bank->lock);
    return facts;
}

/* ---- Opening ---- */

typedef void ifs_kernel(const struct ifs_group group);

static ifs_kernel *raster_kernel_of(const struct ifs_device_bank *bank)
{
    return bank->synth->points ? ifs_raster_kernel<true> : ifs_raster_kernel<false>;
}

/* Divides maps into strips whose cells fit in shared memory. */
static enum status choose_strips(struct ifs_device_bank *bank)
{
    struct ifs_group *group = &bank->group;
    const bool points = bank->synth->points;
    const uint32_t res = bank->synth->res, halo = points ? 0 : 2;
    const size_t row_bytes = points ? ifs_map_pitch(true, res) : (size_t)res * sizeof(uint32_t);
    cudaFuncAttributes attributes;
    int most, multiprocessors, resident;
    CUDA_TRY(cudaFuncGetAttributes(&attributes, raster_kernel_of(bank)));
    CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, bank->device));
    const uint32_t fit = (uint32_t)(((size_t)most - attributes.sharedSizeBytes) / row_bytes);
    if (fit <= halo)
        return status_set(
            STATUS_TOO_LARGE,
            "fused needs %zu bytes of shared memory for a row of cells of a canvas of %u pixels, "
            "but the device has %d per block; lower %s",
            (halo + 1) * row_bytes, res, most, OPTION_OR_FIELD("--res", "res"));
    group->strips = (res + fit - halo - 1) / (fit - halo);
    group->rows = (res + group->strips - 1) / group->strips;
    bank->raster_bytes = (uint32_t)((group->rows + halo) * row_bytes);
    TRY(allow_shared(raster_kernel_of(bank), bank->raster_bytes));
    CUDA_TRY(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, bank->device));
    CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, raster_kernel_of(bank), IFS_SEGMENTS,
                                                           bank->raster_bytes));
    bank->resident = (uint32_t)resident;
    group->blocks = (uint32_t)(multiprocessors * resident);
    return STATUS_OK;
}

/* Returns the offset of the next member of an allocation, and adds `bytes` to its size. */
static size_t take(size_t *size, size_t bytes)
{
    const size_t offset = *size;
    *size += (bytes + 255) / 256 * 256;
    return offset;
}

static enum status copy_in(struct ifs_device_bank *bank, size_t offset, const void *from, size_t bytes)
{
    return CUDA_STATUS(cudaMemcpyAsync(static_cast<char *>(bank->tables) + offset, from, bytes,
                                       cudaMemcpyHostToDevice, bank->stream));
}

/* Copies the systems and uniform numbers to the device. */
static enum status copy_tables(struct ifs_device_bank *bank)
{
    const struct synth *synth = bank->synth;
    struct ifs_group *group = &bank->group;
    const size_t system_bytes = synth->class_count * sizeof *synth->systems,
                 uniform_bytes = (synth->ifs.points - 1) * sizeof *synth->uniforms;
    size_t size = 0;
    const size_t systems = take(&size, system_bytes), uniforms = take(&size, uniform_bytes),
                 maps = take(&size, bank->orbits * sizeof *bank->maps),
                 counter = take(&size, sizeof *group->listed_count);
    CUDA_TRY(cudaMalloc(&bank->tables, size));
    bank->facts.bytes = size;
    char *const tables = static_cast<char *>(bank->tables);
    CUDA_TRY(cudaMemsetAsync(tables + maps, 0, bank->orbits * sizeof *bank->maps, bank->stream));
    TRY(copy_in(bank, systems, synth->systems, system_bytes));
    TRY(copy_in(bank, uniforms, synth->uniforms, uniform_bytes));
    group->systems = reinterpret_cast<struct ifs_system *>(tables + systems);
    group->uniforms = reinterpret_cast<double *>(tables + uniforms);
    group->listed_count = reinterpret_cast<uint32_t *>(tables + counter);
    bank->device_maps = reinterpret_cast<const uint8_t **>(tables + maps);
    return CUDA_STATUS(cudaStreamSynchronize(bank->stream));
}

static enum status open_bank(struct ifs_device_bank *bank)
{
    const struct synth *synth = bank->synth;
    struct ifs_group *group = &bank->group;
    CUDA_TRY(cudaSetDevice(bank->device));
    TRY(stream_open(&bank->stream));
    TRY(stream_open(&bank->side));
    CUDA_TRY(cudaEventCreateWithFlags(&bank->repaired, cudaEventDisableTiming));
    group->rules = synth->ifs;
    group->res = synth->res;
    group->pitch = (synth->ifs.points + (size_t)IFS_EIGHT - 1) / IFS_EIGHT * IFS_EIGHT;
    group->length = (uint32_t)((synth->ifs.points + IFS_SEGMENTS - 1) / IFS_SEGMENTS);
    group->length = (group->length + IFS_EIGHT - 1) / IFS_EIGHT * IFS_EIGHT;
    bank->orbits = (uint64_t)synth->class_count * ifs_orbits(&synth->ifs);
    bank->maps = static_cast<const uint8_t **>(calloc(bank->orbits, sizeof *bank->maps));
    TRY(ALLOCATED(bank->maps, "out of memory for the addresses of %llu orbits",
                  (unsigned long long)bank->orbits));
    TRY(choose_strips(bank));
    return copy_tables(bank);
}

/* The open banks of this process. */
static struct ifs_device_bank *banks;
static pthread_mutex_t banks_lock = PTHREAD_MUTEX_INITIALIZER;

/* Frees a bank that is not in the list. */
static void free_bank(struct ifs_device_bank *bank)
{
    /* Errors are ignored, because no result depends on them. */
    destroy(bank->repaired, bank->side, bank->stream);
    for (size_t i = 0; i < bank->block_count; i++)
        (void)cudaFree(bank->blocks[i]);
    (void)cudaFree(bank->tables);
    pthread_mutex_destroy(&bank->lock);
    free(bank->blocks);
    free(bank->maps);
    free(bank);
}

/* Adds a new bank to the list. */
static enum status add_bank(int device, const struct synth *synth, struct ifs_device_bank **bank)
{
    struct ifs_device_bank *self = static_cast<struct ifs_device_bank *>(calloc(1, sizeof *self));
    TRY(ALLOCATED(self, "out of memory"));
    pthread_mutex_init(&self->lock, nullptr);
    self->own = *synth;
    self->synth = &self->own;
    self->device = device;
    enum status status = open_bank(self);
    if (status != STATUS_OK) {
        free_bank(self);
        return status;
    }
    self->next = banks;
    banks = *bank = self;
    return STATUS_OK;
}

enum status ifs_device_open(int device, const struct synth *synth, struct ifs_device_bank **bank)
{
    enum status status = STATUS_OK;
    pthread_mutex_lock(&banks_lock);
    *bank = banks;
    while (*bank && ((*bank)->device != device || (*bank)->own.systems != synth->systems ||
                     (*bank)->own.res != synth->res || (*bank)->own.points != synth->points))
        *bank = (*bank)->next;
    if (!*bank)
        status = add_bank(device, synth, bank);
    if (*bank)
        (*bank)->users++;
    pthread_mutex_unlock(&banks_lock);
    return status;
}

void ifs_device_close(struct ifs_device_bank *bank)
{
    if (!bank)
        return;
    pthread_mutex_lock(&banks_lock);
    if (--bank->users == 0) {
        struct ifs_device_bank **link = &banks;
        while (*link != bank)
            link = &(*link)->next;
        *link = bank->next;
        free_bank(bank);
    }
    pthread_mutex_unlock(&banks_lock);
}

/* ---- Computing orbits ---- */

/* The orbits of one call of ifs_device_need(), and the host's lists of a group. */
struct ifs_order {
    uint64_t *orbits; /* ascending */
    uint64_t count;
    uint8_t *block; /* their maps, in device memory */
    struct ifs_item *items;
    uint32_t *classes;
    char *scratch; /* device memory of a group */
    size_t scratch_bytes;
};

/* Lists the missing orbits, each one once. */
static enum status list_missing(const struct ifs_device_bank *bank, const uint64_t *wanted, uint64_t count,
                                struct ifs_order *order)
{
    order->orbits = static_cast<uint64_t *>(malloc(bank->orbits * sizeof *order->orbits));
    uint8_t *wants = static_cast<uint8_t *>(calloc(bank->orbits, 1));
    const bool made = order->orbits && wants;
    for (uint64_t i = 0; made && wanted && i < count; i++)
        wants[wanted[i]] = 1;
    for (uint64_t i = 0; made && i < bank->orbits; i++)
        if ((!wanted || wants[i]) && !bank->maps[i])
            order->orbits[order->count++] = i;
    free(wants);
    return ALLOCATED(made, "out of memory for a list of orbits");
}

/* The scratch memory of a group of `count` orbits of `rows` classes. `base` is its address, or NULL to get
 * only its size, which is returned. */
static size_t lay_out(struct ifs_group *group, char *base, uint64_t count, uint64_t rows)
{
    size_t size = 0;
    auto place = [&](auto *&member, size_t entries) {
        const size_t offset = take(&size, entries * sizeof *member);
        member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(base + offset);
    };
    struct ifs_item *items;
    uint32_t *classes;
    place(items, count);
    place(classes, rows);
    place(group->choices, rows * group->pitch);
    place(group->marks, count * IFS_SEGMENTS);
    place(group->reach, count * group->chunks);
    place(group->frames, count);
    place(group->listed, count);
    place(group->is_listed, count);
    place(group->cells, group->strips > 1 ? (count < group->blocks ? count : group->blocks) * group->length *
                                                (size_t)IFS_SEGMENTS
                                          : 0);
    group->items = items;
    group->classes = classes;
    return size;
}

/* Divides orbits into chunks: many if there are few orbits. */
static void choose_chunks(struct ifs_group *group, uint64_t count)
{
    const uint32_t segments = (group->rules.points + group->length - 1) / group->length;
    group->chunk = CHUNK_SEGMENTS;
    while (group->chunk > 1 && count * (segments / group->chunk) < CHUNK_THREADS)
        group->chunk /= 2;
    group->chunks = (segments + group->chunk - 1) / group->chunk;
}

/* Returns the scratch memory that an orbit needs at most, if no other orbit has its class. */
static size_t orbit_bytes(const struct ifs_device_bank *bank, uint64_t count)
{
    struct ifs_group group = bank->group;
    choose_chunks(&group, count);
    return lay_out(&group, nullptr, 1, 1);
}

static enum status check_room(const struct ifs_device_bank *bank, uint64_t count, size_t *scratch_bytes)
{
    const size_t map_bytes = ifs_map_bytes(bank->synth->points, bank->synth->res);
    const size_t least = orbit_bytes(bank, count);
    size_t free_bytes;
    TRY(device_free_bytes(bank->device, &free_bytes));
    free_bytes -= free_bytes / 32; /* margin, because allocations are rounded up to pages */
    if (count > (free_bytes > least ? free_bytes - least : 0) / map_bytes)
        return status_set(
            STATUS_TOO_LARGE,
            "fused needs %.2f GB of device memory for %llu orbits of %u classes, but %.2f GB are "
            "free; lower %s",
            1e-9 * ((double)count * (double)map_bytes + (double)least), (unsigned long long)count,
            bank->synth->class_count, 1e-9 * (double)free_bytes,
            bank->synth->points ? OPTION_OR_FIELD("--classes or --res", "classes or res")
                                : OPTION_OR_FIELD("--classes or --res, or set --draw points, which needs a "
                                                  "quarter of this",
                                                  "classes or res"));
    const size_t left = free_bytes - count * map_bytes;
    *scratch_bytes = left < SCRATCH_BYTES ? left : SCRATCH_BYTES < least ? least : SCRATCH_BYTES;
    return STATUS_OK;
}

static enum status make_order(struct ifs_device_bank *bank, struct ifs_order *order)
{
    const size_t map_bytes = ifs_map_bytes(bank->synth->points, bank->synth->res);
    TRY(check_room(bank, order->count, &order->scratch_bytes));
    const size_t all = order->count * orbit_bytes(bank, order->count);
    order->scratch_bytes = all < order->scratch_bytes ? all : order->scratch_bytes;
    order->items = static_cast<struct ifs_item *>(malloc(order->count * sizeof *order->items));
    order->classes = static_cast<uint32_t *>(malloc(bank->synth->class_count * sizeof *order->classes));
    void **blocks =
        static_cast<void **>(realloc(bank->blocks, (bank->block_count + 1) * sizeof *bank->blocks));
    bank->blocks = blocks ? blocks : bank->blocks;
    TRY(ALLOCATED(order->items && order->classes && blocks, "out of memory for a list of orbits"));
    CUDA_TRY(cudaMalloc(&order->block, order->count * map_bytes));
    bank->blocks[bank->block_count++] = order->block;
    bank->facts.bytes += order->count * map_bytes;
    return CUDA_STATUS(cudaMalloc(&order->scratch, order->scratch_bytes));
}

static void free_order(struct ifs_order *order)
{
    (void)cudaFree(order->scratch); /* errors are ignored, because no result depends on them */
    free(order->orbits);
    free(order->items);
    free(order->classes);
}

/* Describes an orbit. Applies its weights to ones, which gives the weights. */
static struct ifs_item item_of(const struct ifs_device_bank *bank, uint64_t orbit, uint32_t row, uint8_t *map)
{
    const struct synth *synth = bank->synth;
    const uint32_t of_class = ifs_orbits(&synth->ifs);
    struct ifs_item item = {(uint32_t)(orbit / of_class), row, map, {}};
    struct ifs_system ones = synth->systems[item.class_index];
    for (double &value : ones.map[0])
        value = 1;
    ones = ifs_weighted(&synth->ifs, &ones, (uint32_t)(orbit % of_class));
    for (int i = 0; i < 6; i++)
        item.factor[i] = ones.map[0][i];
    return item;
}

/* Takes as many orbits, from `begin` on, as the scratch memory allows, and fills the lists of the group. */
static void take_group(const struct ifs_device_bank *bank, struct ifs_order *order, uint64_t begin,
                       struct ifs_group *group)
{
    const uint32_t of_class = ifs_orbits(&bank->synth->ifs);
    const size_t map_bytes = ifs_map_bytes(bank->synth->points, bank->synth->res);
    *group = bank->group;
    choose_chunks(group, order->count);
    for (uint64_t i = begin; i < order->count; i++) {
        const uint64_t orbit = order->orbits[i];
        const uint32_t class_index = (uint32_t)(orbit / of_class);
        const uint32_t known = group->class_rows;
        const bool fresh = known == 0 || order->classes[known - 1] != class_index;
        struct ifs_group larger = *group;
        if (lay_out(&larger, nullptr, group->count + 1, known + fresh) > order->scratch_bytes)
            break;
        if (fresh)
            order->classes[group->class_rows++] = class_index;
        order->items[group->count++] =
            item_of(bank, orbit, group->class_rows - 1, order->block + i * map_bytes);
    }
    (void)lay_out(group, order->scratch, group->count, group->class_rows);
}

static unsigned blocks_of(uint64_t threads, uint32_t block)
{
    return (unsigned)((threads + block - 1) / block);
}

/* Enqueues the orbits' points, and waits for the number of orbits whose chunks do not join. */
static enum status compute_points(struct ifs_device_bank *bank, const struct ifs_order *order,
                                  const struct ifs_group *group, uint32_t *listed)
{
    cudaStream_t stream = bank->stream;
    CUDA_TRY(cudaMemcpyAsync(order->scratch, order->items, group->count * sizeof *order->items,
                             cudaMemcpyHostToDevice, stream));
    CUDA_TRY(cudaMemcpyAsync(const_cast<uint32_t *>(group->classes), order->classes,
                             group->class_rows * sizeof *order->classes, cudaMemcpyHostToDevice, stream));
    CUDA_TRY(cudaMemsetAsync(group->listed_count, 0, sizeof *group->listed_count, stream));
    ifs_choices_kernel<<<blocks_of(group->class_rows * (group->pitch / IFS_EIGHT), CHOICE_BLOCK),
                         CHOICE_BLOCK, 0, stream>>>(*group);
    CUDA_TRY_LAUNCH("ifs_choices_kernel");
    ifs_walk_kernel<<<blocks_of((uint64_t)group->count * group->chunks, WALK_BLOCK), WALK_BLOCK, 0, stream>>>(
        *group);
    CUDA_TRY_LAUNCH("ifs_walk_kernel");
    ifs_join_kernel<<<blocks_of(group->count, WALK_BLOCK), WALK_BLOCK, 0, stream>>>(*group);
    CUDA_TRY_LAUNCH("ifs_join_kernel");
    CUDA_TRY(cudaMemcpyAsync(listed, group->listed_count, sizeof *listed, cudaMemcpyDeviceToHost, stream));
    CUDA_TRY(cudaStreamSynchronize(stream));
    return STATUS_OK;
}

/* Enqueues the raster of the listed items (`late`) or of the others, on at most `blocks` blocks. */
static enum status raster(struct ifs_device_bank *bank, const struct ifs_group *group, bool late,
                          uint32_t blocks)
{
    struct ifs_group part = *group;
    part.late = late;
    raster_kernel_of(bank)<<<blocks, IFS_SEGMENTS, bank->raster_bytes, bank->stream>>>(part);
    return CUDA_LAUNCHED("ifs_raster_kernel");
}

static uint32_t least_of(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Computes the maps of a group. A single thread walks along a listed orbit, which takes most of the time.
 * While it does so, the other orbits are rastered, on the multiprocessors that the listed ones do not need.
 */
static enum status compute_group(struct ifs_device_bank *bank, const struct ifs_order *order,
                                 const struct ifs_group *group)
{
    uint32_t listed = 0;
    TRY(compute_points(bank, order, group, &listed));
    const uint32_t repairing = blocks_of(listed, WALK_BLOCK), spared = blocks_of(repairing, WALK_RESIDENT);
    const uint32_t left = group->blocks - least_of(spared * bank->resident, group->blocks / 2);
    if (listed > 0) {
        ifs_repair_kernel<<<repairing, WALK_BLOCK, 0, bank->side>>>(*group);
        CUDA_TRY_LAUNCH("ifs_repair_kernel");
        CUDA_TRY(cudaEventRecord(bank->repaired, bank->side));
    }
    TRY(raster(bank, group, false, least_of(group->count, left)));
    if (listed > 0) {
        CUDA_TRY(cudaStreamWaitEvent(bank->stream, bank->repaired, 0));
        TRY(raster(bank, group, true, least_of(listed, group->blocks)));
    }
    return CUDA_STATUS(cudaStreamSynchronize(bank->stream)); /* the next group reuses the lists */
}

static enum status compute(struct ifs_device_bank *bank, struct ifs_order *order)
{
    const size_t map_bytes = ifs_map_bytes(bank->synth->points, bank->synth->res);
    struct ifs_group group;
    TRY(make_order(bank, order));
    for (uint64_t begin = 0; begin < order->count; begin += group.count) {
        take_group(bank, order, begin, &group);
        TRY(compute_group(bank, order, &group));
    }
    for (uint64_t i = 0; i < order->count; i++)
        bank->maps[order->orbits[i]] = order->block + i * map_bytes;
    bank->facts.orbits += order->count;
    return CUDA_STATUS(
        cudaMemcpy(bank->device_maps, bank->maps, bank->orbits * sizeof *bank->maps, cudaMemcpyHostToDevice));
}

/* Returns whether the bank has all of these orbits. */
static bool has(const struct ifs_device_bank *bank, const uint64_t *orbits, uint64_t count)
{
    uint64_t i = 0;
    while (orbits && i < count && bank->maps[orbits[i]])
        i++;
    return bank->facts.orbits == bank->orbits || (orbits && i == count);
}

enum status ifs_device_need(struct ifs_device_bank *bank, const uint64_t *orbits, uint64_t count)
{
    enum status status = STATUS_OK;
    pthread_mutex_lock(&bank->lock);
    if (!has(bank, orbits, count)) {
        const double begin_s = timer_now_s();
        struct ifs_order order = {};
        status = CUDA_STATUS(cudaSetDevice(bank->device));
        if (status == STATUS_OK)
            status = list_missing(bank, orbits, count, &order);
        if (status == STATUS_OK && order.count > 0)
            status = compute(bank, &order);
        free_order(&order);
        bank->facts.seconds += timer_now_s() - begin_s;
    }
    pthread_mutex_unlock(&bank->lock);
    return status;
}
