/* Sets of embeddings in device memory. Opening a set is one run of `ops-fused` (gpu.cu, fused.cu) whose
 * results are written to the set's own memory. Batches are gathered by the kernels of gather.cu. */
#include "ops/rows_device.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <mutex>
#include <new>

#include "common/stream.cuh"
#include "core/philox.h"
#include "machine/device.h"
#include "ops/stage.cuh"
#include "ops/write.cuh"

#define CHUNK_BYTES  ((uint64_t)16 << 20) /* of the ring through which rows are copied */
#define CHUNKS       4
#define LIMIT_CHUNKS 64 /* a chunk has at most this part of the memory limit */
#define FREE_PART    32 /* without a limit, this part of the free memory stays free */

/* Restores the caller's current device and mode of captures at the end of a scope. */
struct device_scope {
    int device, mode;
    device_scope() : device(device_current()), mode(device_relax_capture())
    {
    }
    ~device_scope()
    {
        device_restore_capture(mode);
        device_restore(device);
    }
};

/* ---- Devices: streams, pinned words and a memory pool, which all sets of a device share ---- */

struct context {
    struct context *next;
    int device, users;
    std::mutex lock;    /* one set at a time is opened or closed */
    struct gpu_ops gpu; /* its streams and its pool last; the rest is only used while a set is opened */
};

static std::mutex contexts_lock; /* protects the list and `users` */
static struct context *contexts;

static struct context *find_context(int device)
{
    struct context *context = contexts;
    while (context && context->device != device)
        context = context->next;
    return context;
}

static enum status open_context(int device, struct context **opened)
{
    struct context *context = *opened = new (std::nothrow) struct context();
    TRY(ALLOCATED(context, "out of memory"));
    context->device = context->gpu.device = device;
    TRY(gpu_device_open(&context->gpu));
    TRY(gpu_pool_open(&context->gpu));
    TRY(gpu_gather_load());
    context->next = contexts;
    contexts = context;
    return STATUS_OK;
}

/* Sets `*found` to the context of a device, which is made current. */
static enum status context_acquire(int device, struct context **found)
{
    std::lock_guard<std::mutex> guard(contexts_lock);
    TRY(device_probe(device));
    struct context *context = find_context(device);
    enum status status = context ? STATUS_OK : open_context(device, &context);
    if (status != STATUS_OK) {
        struct failure failure = status_save(status);
        if (context)
            gpu_device_close(&context->gpu);
        delete context;
        return status_restore(&failure);
    }
    context->users++;
    *found = context;
    return STATUS_OK;
}

static void context_release(struct context *context)
{
    std::lock_guard<std::mutex> guard(contexts_lock);
    if (--context->users > 0)
        return;
    struct context **link = &contexts;
    while (*link != context)
        link = &(*link)->next;
    *link = context->next;
    gpu_device_close(&context->gpu);
    delete context;
}

/* Returns memory of the pool that no set uses to the device. */
static enum status trim_context(struct context *context)
{
    CUDA_TRY(cudaStreamSynchronize(context->gpu.compute));
    CUDA_TRY(cudaMemPoolTrimTo(context->gpu.pool, 0));
    return STATUS_OK;
}

enum status rows_device_trim(int device)
{
    struct device_scope scope;
    std::lock_guard<std::mutex> guard(contexts_lock);
    struct context *context = find_context(device);
    if (!context)
        return STATUS_OK;
    std::lock_guard<std::mutex> use(context->lock);
    CUDA_TRY(cudaSetDevice(device));
    return trim_context(context);
}

static cudaError_t pool_allocate(struct context *context, uint64_t bytes, void **memory)
{
    return cudaMallocFromPoolAsync(memory, bytes, context->gpu.pool, context->gpu.compute);
}

/* Allocates device memory; NULL for 0 bytes. Memory of closed sets that is too small for this is returned to
 * the device first. */
static enum status allocate(struct context *context, uint64_t bytes, void *pointer)
{
    void *memory = NULL;
    if (bytes > 0 && pool_allocate(context, bytes, &memory) != cudaSuccess) {
        (void)cudaGetLastError();
        TRY(trim_context(context));
        CUDA_TRY(pool_allocate(context, bytes, &memory));
    }
    memcpy(pointer, &memory, sizeof memory);
    return STATUS_OK;
}

static void release(struct context *context, void *memory)
{
    if (memory)
        (void)cudaFreeAsync(memory, context->gpu.compute);
}

/* Returns the bytes of device memory that a set may use. Memory of closed sets that has `enough` bytes is not
 * compared with the free memory, because that query takes longer than everything else. */
static enum status find_room(struct context *context, uint64_t limit, uint64_t enough, uint64_t *bytes)
{
    size_t free_bytes, total_bytes;
    uint64_t reserved = 0, used = 0;
    CUDA_TRY(cudaStreamSynchronize(context->gpu.compute));
    CUDA_TRY(cudaMemPoolGetAttribute(context->gpu.pool, cudaMemPoolAttrReservedMemCurrent, &reserved));
    CUDA_TRY(cudaMemPoolGetAttribute(context->gpu.pool, cudaMemPoolAttrUsedMemCurrent, &used));
    uint64_t room = reserved > used ? reserved - used : 0;
    if (room < enough) {
        CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
        room += free_bytes;
        room -= room / FREE_PART;
    }
    *bytes = limit && limit < room ? limit : room;
    return STATUS_OK;
}

/* ---- A set ---- */

struct rows_device {
    struct context *context;
    struct rows_device_info info;
    uint8_t *values;   /* resident rows; NULL: they belong to the caller */
    uint32_t *numbers; /* of the kept rows; NULL: all rows are kept */
    int32_t *labels;

    /* The steps, and the rows in host memory. */
    struct ops ops;
    struct ops_control control;
    struct ops_part *parts;
    struct gpu_target target;
    rows_device_check *check; /* NULL: none */
    uint32_t *kept;           /* a copy of `numbers` in host memory, if rows are not resident */

    /* Batches. */
    struct gpu_job job;    /* what the gathering of all batches has in common */
    struct chunk resident; /* the resident rows */
    struct gpu_staged staged;
    std::mutex gathering; /* protects `stage` */
    struct stage *stage;
    std::mutex recording; /* protects `uses` */
    struct use *uses;
};

/* ---- Work of the callers that reads a set ---- */

/* An event after the latest work on a CUDA stream, or in a graph. */
struct use {
    struct use *next;
    bool captured;
    unsigned long long stream; /* its number, which no other stream gets; not in a graph */
    cudaEvent_t done;
};

#define USES_MANY 16 /* above this number, events whose work is complete are used for other streams */

/* Returns an entry for a stream, or NULL. */
static struct use *find_use(const struct rows_device *rows, unsigned long long stream)
{
    struct use *complete = NULL;
    unsigned count = 0;
    for (struct use *use = rows->uses; use; use = use->next) {
        if (use->captured)
            continue;
        if (use->stream == stream)
            return use;
        count++;
        if (count > USES_MANY && !complete && cudaEventQuery(use->done) == cudaSuccess)
            complete = use;
    }
    (void)cudaGetLastError(); /* of events that are not complete */
    return complete;
}

static enum status add_use(struct rows_device *rows, bool captured, struct use **added)
{
    struct use *use = *added = new (std::nothrow) struct use();
    TRY(ALLOCATED(use, "out of memory"));
    use->next = rows->uses;
    use->captured = captured;
    rows->uses = use;
    return CUDA_STATUS(cudaEventCreateWithFlags(&use->done, cudaEventDisableTiming));
}

/* Records that work which reads the set was enqueued on a stream. If the stream is being captured, each
 * launch of the graph records it. */
static enum status record_use(struct rows_device *rows, cudaStream_t stream)
{
    const bool captured = device_capturing(-1, stream);
    std::lock_guard<std::mutex> guard(rows->recording);
    unsigned long long number = 0;
    struct use *use = NULL;
    if (!captured) {
        CUDA_TRY(cudaStreamGetId(stream, &number));
        use = rows->uses && !rows->uses->captured && rows->uses->stream == number ? rows->uses : NULL;
    }
    if (!use) { /* seldom */
        struct relaxed_capture relaxed;
        use = captured ? NULL : find_use(rows, number);
        if (!use)
            TRY(add_use(rows, captured, &use));
    }
    use->stream = number;
    return CUDA_STATUS(captured ? cudaEventRecordWithFlags(use->done, stream, cudaEventRecordExternal)
                                : cudaEventRecord(use->done, stream));
}

/* Waits for all work that reads the set. cudaDeviceSynchronize() would end captures of other threads. */
static void finish_uses(struct rows_device *rows)
{
    while (rows->uses) {
        struct use *use = rows->uses;
        rows->uses = use->next;
        if (use->done)
            (void)cudaEventSynchronize(use->done);
        destroy(use->done);
        delete use;
    }
}

/* ---- Arguments ---- */

/* Returns a failure whose message begins with the name of a field, which is no option of the program. */
static enum status __attribute__((format(printf, 3, 4)))
field_error(enum status code, const char *field, const char *format, ...)
{
    char text[256];
    va_list values;
    va_start(values, format);
    (void)vsnprintf(text, sizeof text, format, values);
    va_end(values);
    return status_about(status_set(code, "%s%s", field, text), field);
}

static enum status check_shape(uint64_t rows, uint32_t width, enum dtype dtype)
{
    if (rows > ROWS_MAX)
        return field_error(STATUS_USAGE, "rows", ": %llu, but a set on a device has at most %llu rows",
                           (unsigned long long)rows, (unsigned long long)ROWS_MAX);
    if (width < 1 || width > EMBEDDINGS_COLUMNS_MAX)
        return field_error(STATUS_USAGE, "width", ": %u; it must be from 1 to %d", (unsigned)width,
                           EMBEDDINGS_COLUMNS_MAX);
    if (dtype != DTYPE_F32 && dtype != DTYPE_F16 && dtype != DTYPE_BF16)
        return field_error(STATUS_USAGE, "dtype", ": rows must be f32, f16 or bf16");
    return STATUS_OK;
}

/* The limits are those of --norm-min and --norm-max: the square of a bound is then a normal float. */
static enum status check_steps(const struct rows_device_steps *steps)
{
    bool low = steps->norm_min == 0 || (steps->norm_min >= 1e-15f && steps->norm_min <= 1e19f);
    if (steps->mask && !low)
        return field_error(STATUS_USAGE, "norm_min", ": %g; it must be 0, or from 1e-15 to 1e19",
                           (double)steps->norm_min);
    if (steps->mask && !(steps->norm_max >= 1e-15f && steps->norm_max <= 1e19f))
        return field_error(STATUS_USAGE, "norm_max", ": %g; it must be from 1e-15 to 1e19",
                           (double)steps->norm_max);
    if (steps->mask && steps->norm_min > steps->norm_max)
        return field_error(STATUS_USAGE, "norm_min", ": %g is larger than norm_max, %g",
                           (double)steps->norm_min, (double)steps->norm_max);
    if (steps->to != DTYPE_F32 && steps->to != DTYPE_F16 && steps->to != DTYPE_BF16 &&
        steps->to != DTYPE_STORED)
        return field_error(STATUS_USAGE, "to", ": rows can be converted to f32, f16 or bf16");
    if (steps->align > EMBEDDINGS_COLUMNS_MAX)
        return field_error(STATUS_USAGE, "align", ": %u; it must be at most %d", (unsigned)steps->align,
                           EMBEDDINGS_COLUMNS_MAX);
    return STATUS_OK;
}

static enum status check_device(int device)
{
    return device >= 0 ? STATUS_OK : field_error(STATUS_USAGE, "device", ": %d is not a CUDA device", device);
}

static enum status check_request(const struct rows_device_request *request)
{
    const struct embeddings *set = request->set;
    if (!set == !request->copy)
        return field_error(STATUS_USAGE, "set", ": give either a set or a function that copies rows");
    if (request->threads < 1)
        return field_error(STATUS_USAGE, "threads", ": %d; it must be at least 1", request->threads);
    TRY(check_device(request->device));
    TRY(check_shape(set ? set->rows : request->rows, set ? set->columns : request->width,
                    set ? set->dtype : request->dtype));
    return check_steps(&request->steps);
}

static enum status check_tensor(const struct rows_device_tensor *tensor)
{
    uint64_t value = dtype_bytes(tensor->dtype), row = tensor->width * value;
    TRY(check_device(tensor->device));
    TRY(check_shape(tensor->rows, tensor->width, tensor->dtype));
    if (tensor->stride && (tensor->stride < row || tensor->stride % value != 0))
        return field_error(
            STATUS_USAGE, "stride", ": %llu bytes; it must be a multiple of %llu and at least %llu",
            (unsigned long long)tensor->stride, (unsigned long long)value, (unsigned long long)row);
    if ((uintptr_t)tensor->values % value != 0)
        return field_error(STATUS_USAGE, "values", ": the address must be a multiple of %llu",
                           (unsigned long long)value);
    return STATUS_OK;
}

/* Checks that a tensor is in the memory of its device. */
static enum status check_memory(const struct rows_device_tensor *tensor)
{
    cudaPointerAttributes attributes;
    if (tensor->rows == 0)
        return STATUS_OK;
    CUDA_TRY(cudaPointerGetAttributes(&attributes, tensor->values));
    if (attributes.type == cudaMemoryTypeManaged ||
        (attributes.type == cudaMemoryTypeDevice && attributes.device == tensor->device))
        return STATUS_OK;
    return field_error(STATUS_USAGE, "values", ": not in the memory of CUDA device %d", tensor->device);
}

/* ---- Opening a set ---- */

static enum ops_type type_of(enum dtype dtype)
{
    return dtype == DTYPE_F32 ? OPS_F32 : dtype == DTYPE_F16 ? OPS_F16 : OPS_BF16;
}

/* Describes the steps and the results. */
static void begin_set(struct rows_device *rows, const struct rows_device_steps *steps, uint64_t count,
                      uint32_t width, enum dtype from)
{
    enum dtype to = steps->to == DTYPE_STORED ? from : steps->to;
    uint32_t align = steps->align > 1 ? steps->align : 1, padded = (width + align - 1) / align * align;
    struct ops *ops = &rows->ops;
    ops->steps[OPS_MASK] = steps->mask;
    ops->steps[OPS_DEDUP] = steps->dedup;
    ops->steps[OPS_COMPACT] = steps->mask || steps->dedup;
    ops->steps[OPS_CONVERT] = true;
    ops->format = {from, type_of(to), width, false, 0};
    ops->norm_min = steps->norm_min;
    ops->norm_max = steps->norm_max;
    ops->count = count;
    ops->row_bytes = width * dtype_bytes(from);
    ops->control = &rows->control;
    ops->async = ops->pool = true;
    ops->ring = CHUNKS;
    rows->target.value_bytes = padded * dtype_bytes(to);
    rows->target.pad_bytes = (padded - width) * dtype_bytes(to);
    rows->target.unaligned = rows->target.pad_bytes > 0 && rows->target.value_bytes % 16 != 0;
    rows->target.parallel = stage_spread;
    rows->info.input_rows = rows->info.rows = count;
    rows->info.width = width;
    rows->info.padded_width = padded;
    rows->info.dtype = to;
    rows->info.stride = rows->target.value_bytes;
}

static bool drops(const struct rows_device *rows)
{
    return rows->ops.steps[OPS_COMPACT];
}

/* Returns the bytes of device memory for the labels while the set is opened. */
static uint64_t label_bytes(const struct rows_device *rows)
{
    return (drops(rows) ? 2 : 1) * rows->info.input_rows * sizeof(uint32_t);
}

/* Returns the bytes of rows->numbers: a word per row, and the hash of the list. */
static uint64_t number_bytes(const struct rows_device *rows)
{
    return (rows->info.input_rows + 1) / 2 * sizeof(uint64_t) + sizeof(uint64_t);
}

/* Returns the bytes of device memory that the set needs while it is opened, apart from values and labels. */
static uint64_t other_bytes(const struct gpu_ops *gpu, const struct rows_device *rows)
{
    uint64_t ring = rows->target.input ? 0 : gpu_input_bytes(gpu);
    return gpu->arena_bytes + ring + (drops(rows) ? number_bytes(rows) : 0);
}

/* Plans the run, and computes how many rows the memory has room for. If these are not all rows, the run
 * writes only the first ones. All labels are in device memory, in addition to the limit. */
static enum status plan_set(struct rows_device *rows, uint64_t limit, bool labels, uint64_t *capacity)
{
    struct gpu_ops *gpu = &rows->context->gpu;
    uint64_t room, count = rows->info.input_rows, label = labels ? label_bytes(rows) : 0;
    rows->ops.chunk_bytes = CHUNK_BYTES;
    TRY(gpu_plan(gpu));
    uint64_t other = other_bytes(gpu, rows), enough = count * rows->target.value_bytes + other + label;
    TRY(find_room(rows->context, limit ? limit + label : 0, enough, &room));
    bool scarce = room < enough;
    room = room > label ? room - label : 0;
    if (scarce && room / LIMIT_CHUNKS < CHUNK_BYTES) {
        rows->ops.chunk_bytes = room / LIMIT_CHUNKS;
        TRY(gpu_plan(gpu));
        other = other_bytes(gpu, rows);
    }
    *capacity = room > other ? (room - other) / rows->target.value_bytes : 0;
    *capacity = *capacity < count ? *capacity : count;
    if (*capacity == 0)
        return status_about(
            status_set(
                STATUS_TOO_LARGE,
                "%.4g MB of device memory remain for rows%s, but one row with its ring and lists needs "
                "%.4g MB; free device memory, or use another device",
                1e-6 * (double)room, labels ? " after the labels" : "",
                1e-6 * (double)(other + rows->target.value_bytes)),
            "memory_limit");
    if (*capacity == count)
        return STATUS_OK;
    if (drops(rows))
        rows->ops.sample = *capacity;
    else
        rows->ops.count = *capacity;
    return gpu_plan(gpu);
}

/* Runs the steps. The results are in rows->values and rows->numbers. */
static enum status run_steps(struct rows_device *rows)
{
    struct gpu_ops *gpu = &rows->context->gpu;
    enum status status = gpu_input_open(gpu);
    if (status == STATUS_OK)
        status = gpu_run_once(gpu);
    struct failure failure = status_save(status);
    gpu_input_close(gpu);
    enum status freed = gpu_arena_free(gpu);
    return status == STATUS_OK ? freed : status_restore(&failure);
}

/* Moves the resident rows to memory of their size, if they use less than three quarters of it. */
static enum status shrink(struct rows_device *rows, uint64_t capacity)
{
    struct context *context = rows->context;
    uint64_t resident = rows->info.resident_rows, bytes = resident * rows->info.stride;
    uint8_t *values = NULL;
    if (4 * resident >= 3 * capacity)
        return STATUS_OK;
    if (bytes > 0 && pool_allocate(context, bytes, reinterpret_cast<void **>(&values)) != cudaSuccess) {
        (void)cudaGetLastError(); /* no room for both: the rows stay where they are */
        return STATUS_OK;
    }
    if (bytes > 0)
        CUDA_TRY(
            cudaMemcpyAsync(values, rows->values, bytes, cudaMemcpyDeviceToDevice, context->gpu.compute));
    release(context, rows->values);
    rows->values = values;
    rows->info.memory_bytes -= (capacity - resident) * rows->info.stride;
    return trim_context(context);
}

/* Returns the number of blocks for kernels whose threads process every n-th row. */
static unsigned blocks_for(uint64_t rows)
{
    return (unsigned)(rows < 1024 * BLOCK_THREADS ? (rows - 1) / BLOCK_THREADS + 1 : 1024);
}

static __global__ void __launch_bounds__(BLOCK_THREADS)
    label_rows(const int32_t *from, const uint32_t *numbers, uint64_t count, int32_t *labels)
{
    for (uint64_t k = (uint64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x; k < count;
         k += (uint64_t)gridDim.x * BLOCK_THREADS)
        labels[k] = from[numbers[k]];
}

/* Copies the labels of the kept rows. `from` may be host or device memory. */
static enum status take_labels(struct rows_device *rows, const int32_t *from)
{
    struct context *context = rows->context;
    cudaStream_t stream = context->gpu.compute;
    uint64_t count = rows->info.input_rows, kept = rows->info.rows;
    int32_t *all = rows->labels;
    if (rows->numbers)
        TRY(allocate(context, count * sizeof *all, &all));
    enum status status =
        CUDA_STATUS(cudaMemcpyAsync(all, from, count * sizeof *all, cudaMemcpyDefault, stream));
    if (status == STATUS_OK && rows->numbers && kept > 0) {
        label_rows<<<blocks_for(kept), BLOCK_THREADS, 0, stream>>>(all, rows->numbers, kept, rows->labels);
        status = CUDA_LAUNCHED("label_rows");
    }
    if (rows->numbers)
        release(context, all);
    TRY(status);
    CUDA_TRY(cudaStreamSynchronize(stream));
    return STATUS_OK;
}

/* Replaces the numbers of the kept rows by their elements of `of` (NULL: not), and adds up the hash. */
static __global__ void __launch_bounds__(BLOCK_THREADS)
    number_rows(uint32_t *numbers, const uint32_t *of, uint64_t count, uint64_t *hash)
{
    uint64_t sum = 0;
    for (uint64_t k = (uint64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x; k < count;
         k += (uint64_t)gridDim.x * BLOCK_THREADS) {
        uint32_t number = numbers[k];
        if (of)
            numbers[k] = number = of[number];
        sum += rows_device_number_hash(k, number);
    }
    for (uint32_t distance = WARP_LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_down_sync(ALL_LANES, sum, distance);
    if (threadIdx.x % WARP_LANES == 0)
        atomicAdd((unsigned long long *)hash, sum);
}

/* Makes rows->numbers those of tensor.numbers, and computes their hash. Nothing else needs the numbers within
 * the input any more. */
static enum status finish_numbers(struct rows_device *rows, const uint32_t *of)
{
    struct context *context = rows->context;
    cudaStream_t stream = context->gpu.compute;
    const uint64_t count = rows->info.rows, bytes = number_bytes(rows);
    if (rows->info.input_rows == 0 || (!rows->numbers && !of))
        return STATUS_OK;
    std::lock_guard<std::mutex> guard(context->lock);
    CUDA_TRY(cudaSetDevice(context->device));
    if (!rows->numbers) { /* all rows are kept */
        TRY(allocate(context, bytes, &rows->numbers));
        rows->info.memory_bytes += bytes;
        CUDA_TRY(cudaMemcpyAsync(rows->numbers, of, count * sizeof *of, cudaMemcpyDeviceToDevice, stream));
        of = NULL;
    }
    uint64_t *hash = reinterpret_cast<uint64_t *>(rows->numbers) + bytes / sizeof *hash - 1;
    CUDA_TRY(cudaMemsetAsync(hash, 0, sizeof *hash, stream));
    if (count > 0) {
        number_rows<<<blocks_for(count), BLOCK_THREADS, 0, stream>>>(rows->numbers, of, count, hash);
        CUDA_TRY_LAUNCH("number_rows");
    }
    uint64_t *word = &context->gpu.host_words->listed; /* pinned, and used only with the lock */
    CUDA_TRY(cudaMemcpyAsync(word, hash, sizeof *word, cudaMemcpyDeviceToHost, stream));
    CUDA_TRY(cudaStreamSynchronize(stream));
    rows->info.numbers = rows->numbers;
    rows->info.numbers_hash = *word;
    return STATUS_OK;
}

/* Copies the numbers of the kept rows to host memory. */
static enum status fetch_numbers(struct rows_device *rows)
{
    rows->kept = new (std::nothrow) uint32_t[rows->info.rows];
    TRY(ALLOCATED(rows->kept, "out of memory for the list of rows"));
    return rows_device_numbers(rows, 0, rows->info.rows, rows->kept);
}

/* Allocates the memory of the set, runs the steps and takes the labels. The context is locked. */
static enum status fill_set(struct rows_device *rows, const int32_t *labels, uint64_t limit)
{
    struct context *context = rows->context;
    struct rows_device_info *info = &rows->info;
    uint64_t capacity, lists = info->input_rows * sizeof(uint32_t),
                       numbers = drops(rows) ? number_bytes(rows) : 0;
    TRY(plan_set(rows, limit, labels, &capacity));
    TRY(allocate(context, capacity * info->stride, &rows->values));
    TRY(allocate(context, numbers, &rows->numbers));
    TRY(allocate(context, labels ? lists : 0, &rows->labels));
    info->memory_bytes = capacity * info->stride + numbers + (rows->labels ? lists : 0);
    rows->target.values = rows->values;
    rows->target.rows = rows->numbers;
    TRY(run_steps(rows));
    TRY(rows->check ? rows->check(rows->target.context) : STATUS_OK);
    info->rows = drops(rows) ? context->gpu.summary.kept : info->input_rows;
    info->resident_rows = info->rows < capacity ? info->rows : capacity;
    TRY(shrink(rows, capacity));
    if (labels)
        TRY(take_labels(rows, labels));
    if (rows->numbers && info->resident_rows < info->rows)
        TRY(fetch_numbers(rows));
    return STATUS_OK;
}

static enum status fill_locked(struct rows_device *rows, const int32_t *labels, uint64_t limit, int threads,
                               void *after)
{
    struct context *context = rows->context;
    struct gpu_ops *gpu = &context->gpu;
    if (rows->info.input_rows == 0)
        return STATUS_OK;
    std::lock_guard<std::mutex> guard(context->lock);
    CUDA_TRY(cudaSetDevice(context->device));
    if (rows->target.input)
        TRY(device_order(context->device, after, gpu->compute));
    gpu->ops = &rows->ops;
    gpu->steps = &gpu_fused_steps;
    gpu->target = &rows->target;
    gpu->threads = threads;
    gpu->summary = {};
    enum status status = fill_set(rows, labels, limit);
    gpu->ops = NULL;
    gpu->target = NULL;
    return status;
}

/* Prepares the gathering of batches from rows that are `stride` bytes apart. */
static enum status begin_batches(struct rows_device *rows, const uint8_t *values, int threads)
{
    struct rows_device_info *info = &rows->info;
    struct gpu_job *job = &rows->job;
    uint32_t row_bytes = info->padded_width * (uint32_t)dtype_bytes(info->dtype);
    info->values = values;
    info->labels = rows->labels;
    job->format = {info->dtype, type_of(info->dtype), info->padded_width, false, 0};
    job->row_bytes = row_bytes;
    job->row_stride = info->stride;
    job->unaligned = ((uintptr_t)values | info->stride) % 16 != 0;
    job->value_bytes = row_bytes;
    job->count = job->candidates = info->rows;
    job->arrays.row_labels = rows->labels;
    rows->resident = {values, 0, info->resident_rows, 0};
    rows->staged.format = rows->ops.format;
    rows->staged.row_bytes = (uint32_t)rows->ops.row_bytes;
    rows->staged.stride = (rows->ops.row_bytes + 15) / 16 * 16;
    rows->staged.pad_bytes = (uint32_t)rows->target.pad_bytes;
    struct stage_source source = {&rows->ops,
                                  rows->target.copy,
                                  rows->check,
                                  rows->target.context,
                                  rows->kept,
                                  info->resident_rows,
                                  info->resident_rows < info->rows,
                                  rows->ops.row_bytes,
                                  rows->staged.stride,
                                  info->device,
                                  threads};
    return stage_open(&source, &rows->stage);
}

/* Lists the parts of a mapped set. */
static enum status list_parts(struct rows_device *rows, const struct embeddings *set)
{
    struct ops *ops = &rows->ops;
    ops->set = set;
    ops->parts = rows->parts = new (std::nothrow) struct ops_part[set->part_count + 1];
    TRY(ALLOCATED(rows->parts, "out of memory for the list of rows"));
    for (size_t i = 0; i < set->part_count; i++)
        if (set->parts[i].rows > 0)
            rows->parts[ops->part_count++] = {set->parts[i].values, set->parts[i].first, set->parts[i].rows};
    return STATUS_OK;
}

/* Implement rows_device_copy and rows_device_check for rows that must be decoded. */
static enum status read_decoded(void *context, uint64_t first, uint64_t count, void *to)
{
    return embeddings_read(static_cast<const struct embeddings *>(context), first, count, to);
}

static enum status check_decoded(void *context)
{
    return embeddings_check_files(static_cast<const struct embeddings *>(context));
}

static enum status open_rows(struct rows_device *rows, const struct rows_device_request *request)
{
    const struct embeddings *set = request->set;
    begin_set(rows, &request->steps, set ? set->rows : request->rows, set ? set->columns : request->width,
              set ? set->dtype : request->dtype);
    rows->info.device = request->device;
    rows->target.copy = request->copy;
    rows->check = request->copy ? request->check : NULL;
    rows->target.context = request->context;
    if (set && embeddings_in_place(set))
        TRY(list_parts(rows, set));
    if (set && !embeddings_in_place(set)) {
        rows->target.copy = read_decoded;
        rows->check = check_decoded;
        rows->target.context = const_cast<struct embeddings *>(set);
    }
    TRY(context_acquire(request->device, &rows->context));
    TRY(fill_locked(rows, request->labels, request->memory_limit, request->threads, NULL));
    TRY(finish_numbers(rows, NULL));
    rows->ops.count = rows->info.input_rows; /* plan_set() may have reduced it */
    return begin_batches(rows, rows->values, request->threads);
}

static enum status wrap_rows(struct rows_device *rows, const struct rows_device_tensor *tensor,
                             const struct rows_device_steps *steps, uint64_t limit, void *stream)
{
    const uint8_t *values = static_cast<const uint8_t *>(tensor->values);
    uint64_t row_bytes = tensor->width * dtype_bytes(tensor->dtype);
    uint64_t stride = tensor->stride ? tensor->stride : row_bytes;
    begin_set(rows, steps, tensor->rows, tensor->width, tensor->dtype);
    rows->info.device = tensor->device;
    TRY(context_acquire(tensor->device, &rows->context));
    TRY(check_memory(tensor));
    if (device_capturing(tensor->device, stream))
        return field_error(STATUS_USAGE, "stream", ": opening a set cannot be captured into a graph");
    bool copies = drops(rows) || rows->info.dtype != tensor->dtype || rows->target.pad_bytes > 0;
    rows->ops.resident = true;
    rows->target.input = values;
    rows->target.stride = stride;
    rows->target.unaligned = rows->target.unaligned || ((uintptr_t)values | stride) % 16 != 0;
    if (copies) {
        TRY(fill_locked(rows, tensor->labels, limit, 1, stream));
        values = rows->values;
    } else {
        rows->info.stride = stride;
        rows->info.resident_rows = tensor->rows;
        if (tensor->labels && tensor->rows > 0) {
            std::lock_guard<std::mutex> guard(rows->context->lock);
            TRY(device_order(tensor->device, stream, rows->context->gpu.compute));
            TRY(allocate(rows->context, tensor->rows * sizeof *rows->labels, &rows->labels));
            rows->info.memory_bytes = tensor->rows * sizeof *rows->labels;
            TRY(take_labels(rows, tensor->labels));
        }
    }
    if (rows->info.resident_rows < rows->info.rows)
        return status_about(
            status_set(
                STATUS_TOO_LARGE,
                "device memory has room for %llu of the %llu rows; free device memory, or keep fewer rows",
                (unsigned long long)rows->info.resident_rows, (unsigned long long)rows->info.rows),
            "memory_limit");
    TRY(finish_numbers(rows, tensor->numbers));
    return begin_batches(rows, values, 1);
}

/* Hands out a set, or closes it after a failure. */
static enum status finish(enum status status, struct rows_device *opened, struct rows_device **rows)
{
    if (status != STATUS_OK) {
        struct failure failure = status_save(status);
        rows_device_close(opened);
        return status_restore(&failure);
    }
    *rows = opened;
    return STATUS_OK;
}

enum status rows_device_open(const struct rows_device_request *request, struct rows_device **rows)
{
    struct device_scope scope;
    *rows = NULL;
    TRY(check_request(request));
    struct rows_device *opened = new (std::nothrow) struct rows_device();
    TRY(ALLOCATED(opened, "out of memory"));
    return finish(open_rows(opened, request), opened, rows);
}

enum status rows_device_wrap(const struct rows_device_tensor *tensor, const struct rows_device_steps *steps,
                             uint64_t memory_limit, void *stream, struct rows_device **rows)
{
    struct device_scope scope;
    *rows = NULL;
    TRY(check_tensor(tensor));
    TRY(check_steps(steps));
    struct rows_device *opened = new (std::nothrow) struct rows_device();
    TRY(ALLOCATED(opened, "out of memory"));
    return finish(wrap_rows(opened, tensor, steps, memory_limit, stream), opened, rows);
}

void rows_device_close(struct rows_device *rows)
{
    struct device_scope scope;
    if (!rows)
        return;
    struct context *context = rows->context;
    if (context) {
        (void)cudaSetDevice(context->device);
        finish_uses(rows);
        stage_close(rows->stage);
        context->lock.lock();
        release(context, rows->values);
        release(context, rows->numbers);
        release(context, rows->labels);
        context->lock.unlock();
        context_release(context);
        (void)cudaGetLastError(); /* clear errors, so that the next check does not see them */
    }
    delete[] rows->parts;
    delete[] rows->kept;
    delete rows;
}

struct rows_device_info rows_device_info(const struct rows_device *rows)
{
    struct rows_device_info info = rows->info;
    info.pinned_bytes = stage_bytes(rows->stage);
    return info;
}

enum status rows_device_numbers(const struct rows_device *rows, uint64_t first, uint64_t count, uint32_t *to)
{
    struct device_scope scope;
    if (first > rows->info.rows || count > rows->info.rows - first)
        return field_error(STATUS_USAGE, "count", ": rows %llu to %llu, but the set has %llu",
                           (unsigned long long)first, (unsigned long long)(first + count),
                           (unsigned long long)rows->info.rows);
    for (uint64_t i = 0; !rows->numbers && i < count; i++)
        to[i] = (uint32_t)(first + i);
    return rows->numbers && count ? device_copy(rows->info.device, to, rows->numbers + first,
                                                count * sizeof *to, rows->context->gpu.compute)
                                  : STATUS_OK;
}

/* ---- Batches ---- */

/* Makes a device current while a batch is enqueued. */
struct current_device {
    int before, device;
    explicit current_device(int device) : before(device_current()), device(device)
    {
        if (before != device)
            (void)cudaSetDevice(device); /* an error is ignored; the launch would report it */
    }
    ~current_device()
    {
        if (before != device)
            device_restore(before);
    }
};

static bool streams(const struct rows_device *rows)
{
    return rows->info.resident_rows < rows->info.rows;
}

static enum status begin_batch(const struct rows_device *rows, uint64_t count, void *out, int64_t *labels,
                               struct gpu_job *job)
{
    if (labels && !rows->labels)
        return field_error(STATUS_USAGE, "labels", ": the set has no labels");
    if ((uintptr_t)out % dtype_bytes(rows->info.dtype) != 0)
        return field_error(STATUS_USAGE, "out", ": the address must be a multiple of %zu",
                           dtype_bytes(rows->info.dtype));
    if (count > ROWS_MAX)
        return field_error(STATUS_USAGE, "count", ": %llu is too large", (unsigned long long)count);
    *job = rows->job;
    job->outputs = count;
    job->arrays.values = static_cast<uint8_t *>(out);
    job->arrays.labels = labels;
    return STATUS_OK;
}

static enum status enqueue(struct rows_device *rows, struct gpu_job *job, const struct gpu_staged *staged,
                           void *stream)
{
    cudaStream_t on = static_cast<cudaStream_t>(stream);
    job->unaligned = job->unaligned || (uintptr_t)job->arrays.values % 16 != 0;
    if (!staged->rows && gpu_gather_fits(job, rows->context->gpu.bulk))
        TRY(gpu_gather_bulk(job, &rows->resident, on));
    else
        TRY(gpu_gather_any(job, &rows->resident, staged, on));
    return record_use(rows, on);
}

/* Enqueues a batch that needs rows or numbers from the host. */
static enum status enqueue_staged(struct rows_device *rows, struct gpu_job *job,
                                  const struct stage_batch *batch, void *stream)
{
    struct device_scope scope;
    struct gpu_staged staged = rows->staged;
    struct stage_slot slot;
    CUDA_TRY(cudaSetDevice(rows->info.device));
    if (device_capturing(rows->info.device, stream))
        return field_error(STATUS_USAGE, "stream",
                           ": a batch that needs host memory cannot be captured into a graph");
    TRY(stage_take(rows->stage, batch, &slot));
    staged.rows = slot.rows;
    job->arrays.rows = slot.numbers;
    TRY(enqueue(rows, job, &staged, stream));
    return stage_done(rows->stage, &slot, static_cast<cudaStream_t>(stream));
}

enum status rows_device_reserve(struct rows_device *rows, uint64_t count)
{
    struct device_scope scope;
    if (!streams(rows))
        return STATUS_OK;
    std::lock_guard<std::mutex> guard(rows->gathering);
    CUDA_TRY(cudaSetDevice(rows->info.device));
    return stage_reserve(rows->stage, count);
}

static bool inside(const struct rows_device *rows, uint64_t first, uint64_t count)
{
    return first <= rows->info.rows && count <= rows->info.rows - first;
}

void rows_device_ahead(struct rows_device *rows, bool shuffle, uint64_t seed, uint64_t epoch, uint64_t first,
                       uint64_t count)
{
    if (!streams(rows) || count == 0 || !inside(rows, first, count))
        return;
    std::lock_guard<std::mutex> guard(rows->gathering);
    const struct stage_batch batch = {rows->info.rows, seed, epoch, first, count, NULL, !shuffle};
    stage_ahead(rows->stage, &batch);
}

enum status rows_device_gather(struct rows_device *rows, bool shuffle, uint64_t seed, uint64_t epoch,
                               uint64_t first, uint64_t count, void *out, int64_t *labels, void *stream)
{
    const struct gpu_staged none = {};
    struct gpu_job job;
    uint64_t all = rows->info.rows;
    if (!inside(rows, first, count))
        return field_error(STATUS_USAGE, "count", ": elements %llu to %llu, but the set has %llu rows",
                           (unsigned long long)first, (unsigned long long)(first + count),
                           (unsigned long long)all);
    TRY(begin_batch(rows, count, out, labels, &job));
    if (count == 0)
        return STATUS_OK;
    job.permutes = shuffle;
    job.consecutive = !shuffle;
    job.draw.first = first;
    if (shuffle)
        job.draw.permutation = permutation_begin(seed + epoch, all);
    if (!streams(rows)) {
        struct current_device current(rows->info.device);
        return enqueue(rows, &job, &none, stream);
    }
    std::lock_guard<std::mutex> guard(rows->gathering);
    const struct stage_batch batch = {all, seed, epoch, first, count, NULL, !shuffle};
    return enqueue_staged(rows, &job, &batch, stream);
}

/* STATUS_USAGE if rows are not in device memory, which the argument `name` requires. */
static enum status check_resident(const struct rows_device *rows, const char *name)
{
    return !streams(rows) ? STATUS_OK
                          : field_error(STATUS_USAGE, name,
                                        ": in device memory, but only %llu of %llu rows of the set are",
                                        (unsigned long long)rows->info.resident_rows,
                                        (unsigned long long)rows->info.rows);
}

enum status rows_device_gather_step(struct rows_device *rows, bool shuffle, uint64_t seed,
                                    const uint64_t *step, uint64_t count, void *out, int64_t *labels,
                                    void *stream)
{
    const struct gpu_staged none = {};
    struct gpu_job job;
    if (count < 1 || count > rows->info.rows)
        return field_error(STATUS_USAGE, "count", ": %llu, but the set has %llu rows",
                           (unsigned long long)count, (unsigned long long)rows->info.rows);
    TRY(check_resident(rows, "step"));
    TRY(begin_batch(rows, count, out, labels, &job));
    job.permutes = shuffle;
    job.consecutive = !shuffle;
    job.draw = {permutation_begin(seed, rows->info.rows), 0};
    job.seed = seed;
    job.step = step;
    struct current_device current(rows->info.device);
    return enqueue(rows, &job, &none, stream);
}

enum status rows_device_gather_numbers(struct rows_device *rows, const uint32_t *numbers, bool on_device,
                                       uint64_t count, void *out, int64_t *labels, void *stream)
{
    const struct gpu_staged none = {};
    struct gpu_job job;
    TRY(begin_batch(rows, count, out, labels, &job));
    if (on_device)
        TRY(check_resident(rows, "numbers"));
    for (uint64_t j = 0; !on_device && j < count; j++)
        if (numbers[j] >= rows->info.rows)
            return field_error(STATUS_USAGE, "numbers", ": row %u, but the set has %llu rows",
                               (unsigned)numbers[j], (unsigned long long)rows->info.rows);
    if (count == 0)
        return STATUS_OK;
    if (on_device) {
        struct current_device current(rows->info.device);
        job.arrays.rows = const_cast<uint32_t *>(numbers);
        return enqueue(rows, &job, &none, stream);
    }
    std::lock_guard<std::mutex> guard(rows->gathering);
    const struct stage_batch batch = {rows->info.rows, 0, 0, 0, count, numbers, false};
    return enqueue_staged(rows, &job, &batch, stream);
}
