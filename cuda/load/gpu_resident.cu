/* `gpu-resident`: the whole data set is read into device memory once, before any timing. Each epoch sorts the
 * sample numbers by random keys. A kernel gathers and converts several batches at a time in that order.
 * During a run, no samples cross the bus. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <cub/device/device_radix_sort.cuh>

#include "common/check.cuh"
#include "machine/device.h"
#include "load/delivery.cuh"

/* Tensor bytes per launch. Launches are large, because the start and end of a launch take about 5 µs. */
#define LAUNCH_BYTES ((uint64_t)256 << 20)
#define LAUNCHES     2                    /* there are slots for this many launches */
#define STAGE_BYTES  ((uint64_t)16 << 20) /* pinned buffer for the upload */
#define COPY_BYTES   ((uint64_t)1 << 30)  /* size of a copy that measures the bandwidth */
#define KEY_THREADS  256

struct resident {
    struct delivery delivery;
    uint8_t *bytes; /* all samples, consecutive */
    uint64_t *keys[2];
    uint32_t *order[2]; /* sample numbers: [0] ascending, [1] sorted by key; keys[i] belongs to order[i] */
    void *scratch;      /* scratch memory of the sort */
    size_t scratch_bytes;
    cudaGraphExec_t sorting;
    uint32_t launch_slots;
};

/* ---- The order ---- */

static __global__ void make_keys(uint64_t seed, uint64_t epoch, uint32_t count, uint64_t *keys,
                                 uint32_t *samples)
{
    uint32_t i = blockIdx.x * KEY_THREADS + threadIdx.x;
    if (i >= count)
        return;
    keys[i] = order_key(seed, epoch, i);
    samples[i] = i;
}

static cudaError_t sort(struct resident *resident, void *scratch, size_t *scratch_bytes, cudaStream_t stream)
{
    return cub::DeviceRadixSort::SortPairs(
        scratch, *scratch_bytes, resident->keys[0], resident->keys[1], resident->order[0], resident->order[1],
        static_cast<int64_t>(resident->delivery.load->dataset->sample_count), 0, ORDER_KEY_BITS, stream);
}

/* Records the sort as a CUDA graph, because launching its kernels takes longer than running them. */
static enum status record_sort(struct resident *resident)
{
    cudaStream_t stream = resident->delivery.queues[0].stream;
    cudaGraph_t graph = NULL;
    CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    cudaError_t error = sort(resident, resident->scratch, &resident->scratch_bytes, stream);
    cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    error = error == cudaSuccess ? ended : error;
    if (error == cudaSuccess)
        error = cudaGraphInstantiate(&resident->sorting, graph, 0);
    if (graph)
        (void)cudaGraphDestroy(graph);
    return cuda_status(error, "recording the sort", __FILE__, __LINE__);
}

/* Computes the order of the epoch. The sort is stable: equal keys stay in order of sample number, as in
 * order_make(). */
static enum status make_order(struct resident *resident, const struct output_queue *queue)
{
    const struct load *load = resident->delivery.load;
    uint32_t count = load->dataset->sample_count;
    make_keys<<<(count + KEY_THREADS - 1) / KEY_THREADS, KEY_THREADS, 0, queue->stream>>>(
        load->seed, queue->epoch, count, resident->keys[0], resident->order[0]);
    CUDA_TRY_LAUNCH("make_keys");
    CUDA_TRY(cudaGraphLaunch(resident->sorting, queue->stream));
    return STATUS_OK;
}

/* ---- An epoch ---- */

/* Copies `count` sample numbers of the order to the host, which needs them to know which sample is in which
 * slot. */
static enum status fetch_order(struct resident *resident, struct output_queue *queue, uint32_t begin,
                               uint32_t count)
{
    CUDA_TRY(cudaMemcpyAsync(queue->order.samples, resident->order[1] + begin, count * sizeof(uint32_t),
                             cudaMemcpyDeviceToHost, queue->stream));
    CUDA_TRY(cudaStreamSynchronize(queue->stream));
    return STATUS_OK;
}

/* This rank's share of the order starts at `begin`. Gathers samples [index, index + count) of the share into
 * consecutive slots, and delivers them in batches. */
static enum status gather(struct resident *resident, struct output_queue *queue, uint32_t begin,
                          uint32_t index, uint32_t count)
{
    const struct load *load = resident->delivery.load;
    uint32_t slot = index % resident->delivery.slots;
    struct unpack job = queue_job(queue);
    job.bytes = resident->bytes;
    job.order = resident->order[1] + begin + index;
    job.slot = slot;
    job.count = count;
    for (uint32_t i = 0; i < count; i += load->batch)
        TRY(queue_reserve(queue, slot + i));
    TRY(unpack_launch(&job, queue->stream));
    for (uint32_t i = 0; load->control->whole && i < count; i++)
        queue->held[slot + i] = queue->order.samples[index + i];
    for (uint32_t i = 0; i < count; i += load->batch)
        TRY(queue_deliver(queue, slot + i, count - i < load->batch ? count - i : load->batch));
    return STATUS_OK;
}

static enum status resident_epoch(struct output_queue *queue)
{
    struct resident *resident = static_cast<struct resident *>(queue->own);
    const struct load *load = resident->delivery.load;
    uint32_t begin, end, step = resident->launch_slots;
    order_share(&resident->delivery.verifier.plan, load->rank, &begin, &end);
    TRY(make_order(resident, queue));
    if (load->control->whole)
        TRY(fetch_order(resident, queue, begin, end - begin));
    for (uint32_t index = 0; index < end - begin; index += step)
        TRY(gather(resident, queue, begin, index, end - begin - index < step ? end - begin - index : step));
    return STATUS_OK;
}

static enum status resident_read(struct output_queue *queue)
{
    return queue_each_epoch(queue, resident_epoch);
}

/* ---- Loading the set ---- */

static enum status read_member(const struct dataset *dataset, const struct dataset_member *member, int fd,
                               uint8_t *bytes)
{
    for (uint64_t got = 0; got < member->size;) {
        ssize_t count = pread(fd, bytes + got, member->size - got, (off_t)(member->offset + got));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return status_set(STATUS_FAILED, "%s/%s: offset %llu: %s", dataset->path,
                              dataset->files[member->file].name, (unsigned long long)(member->offset + got),
                              count < 0 ? strerror(errno) : "the file ends inside a member");
        got += (uint64_t)count;
    }
    return STATUS_OK;
}

/* Computes the layout of the set: one sample after another, each packed as load/arrays.h describes. Makes all
 * offsets relative to the first byte of the set, so that a kernel needs only the sample's number. Returns the
 * size of the set in bytes. */
static uint64_t lay_out(struct arrays *arrays, uint32_t count)
{
    uint64_t set_bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct array_sample *sample = &arrays->samples[i];
        for (uint32_t m = 0; m < sample->members; m++)
            sample->at[m] += set_bytes;
        sample->values += set_bytes;
        arrays->extents[i].begin = set_bytes;
        set_bytes += array_align(arrays->extents[i].bytes);
    }
    return set_bytes;
}

/* Reads all members of a sample into a buffer. Byte `first` of the set goes to address `bytes`. Keeps the
 * latest file open in `*fd` and its number in `*file`. */
static enum status read_sample(const struct resident *resident, uint32_t number, int *fd, uint32_t *file,
                               uint8_t *bytes, uint64_t first)
{
    const struct dataset *dataset = resident->delivery.load->dataset;
    const struct array_sample *array = &resident->delivery.arrays.samples[number];
    for (uint32_t m = 0; m < array->members; m++) {
        const struct dataset_member *member = &dataset->members[dataset->samples[number].member + m];
        if (*fd < 0 || *file != member->file) {
            if (*fd >= 0)
                close(*fd);
            *file = member->file;
            *fd = dataset_file_open(dataset, member->file, 0);
            if (*fd < 0)
                return STATUS_FAILED;
        }
        TRY(read_member(dataset, member, *fd, bytes + (array->at[m] - first)));
    }
    return STATUS_OK;
}

/* Uploads the set to resident->bytes, through the pinned buffer `stage` of `stage_bytes` bytes. */
static enum status fill(struct resident *resident, uint8_t *stage, uint64_t stage_bytes)
{
    const struct dataset *dataset = resident->delivery.load->dataset;
    const struct array_extent *extents = resident->delivery.arrays.extents;
    int fd = -1;
    uint32_t file = 0, number = 0;
    enum status status = STATUS_OK;
    while (status == STATUS_OK && number < dataset->sample_count) {
        uint64_t begin = extents[number].begin, held = 0;
        for (; status == STATUS_OK && number < dataset->sample_count; number++) {
            uint64_t end = extents[number].begin + extents[number].bytes - begin;
            if (end > stage_bytes)
                break;
            status = read_sample(resident, number, &fd, &file, stage, begin);
            held = end;
        }
        if (status == STATUS_OK)
            status = cuda_status(cudaMemcpy(resident->bytes + begin, stage, held, cudaMemcpyHostToDevice),
                                 "cudaMemcpy of the set", __FILE__, __LINE__);
    }
    if (fd >= 0)
        close(fd);
    return status;
}

static enum status bring_in(struct resident *resident, uint64_t set_bytes, uint64_t stage_bytes)
{
    uint8_t *stage;
    CUDA_TRY(cudaMalloc(&resident->bytes, set_bytes));
    CUDA_TRY(cudaMallocHost(&stage, stage_bytes));
    memset(stage, 0, stage_bytes); /* the gaps between samples are copied but never used */
    enum status status = fill(resident, stage, stage_bytes);
    (void)cudaFreeHost(stage);
    return status;
}

/* ---- The variant ---- */

static void resident_teardown(void *state)
{
    struct resident *resident = static_cast<struct resident *>(state);
    (void)cudaFree(resident->bytes);
    for (int i = 0; i < 2; i++) {
        (void)cudaFree(resident->keys[i]);
        (void)cudaFree(resident->order[i]);
    }
    (void)cudaFree(resident->scratch);
    if (resident->sorting)
        (void)cudaGraphExecDestroy(resident->sorting);
    delivery_close(&resident->delivery);
    delete resident;
}

static enum status open_order(struct resident *resident)
{
    uint32_t count = resident->delivery.load->dataset->sample_count;
    for (int i = 0; i < 2; i++) {
        CUDA_TRY(cudaMalloc(&resident->keys[i], count * sizeof *resident->keys[i]));
        CUDA_TRY(cudaMalloc(&resident->order[i], count * sizeof *resident->order[i]));
    }
    CUDA_TRY(cudaMalloc(&resident->scratch, resident->scratch_bytes));
    return record_sort(resident);
}

/* Adds the data set to the useful bytes. Adds the pinned buffer of the upload to the memory. This buffer is
 * freed before the memory for the order is allocated, so only the larger of the two counts. */
static void count_memory(struct delivery *delivery, uint64_t stage_bytes, uint64_t order_bytes)
{
    delivery->result.useful_bytes += (double)delivery->load->dataset->bytes;
    delivery->result.memory_bytes += stage_bytes > order_bytes ? stage_bytes - order_bytes : 0;
}

static enum status open_resident(struct resident *resident, const struct resources *resources,
                                 const struct load *load)
{
    struct delivery *delivery = &resident->delivery;
    uint32_t count = load->dataset->sample_count;
    TRY(delivery_begin(delivery, resources, load, true, true, 1));
    CUDA_TRY(cudaSetDevice(delivery->device));
    CUDA_TRY(sort(resident, NULL, &resident->scratch_bytes, NULL)); /* only computes scratch_bytes */
    uint64_t set_bytes = lay_out(&delivery->arrays, count);
    uint64_t batches = LAUNCH_BYTES / (load->batch * delivery->stride);
    uint64_t all_batches = ((uint64_t)count + load->batch - 1) / load->batch;
    batches = batches < 1 ? 1 : batches < all_batches ? batches : all_batches;
    uint64_t order_bytes = resident->scratch_bytes + /* keys and numbers: see open_order() */
                           count * (2 * sizeof *resident->keys[0] + 2 * sizeof *resident->order[0]);
    uint64_t kept_bytes = set_bytes + order_bytes, largest = delivery->arrays.bytes_max;
    uint64_t stage_bytes = largest > STAGE_BYTES ? largest : STAGE_BYTES;
    TRY(device_check_room(delivery->device, kept_bytes + LAUNCHES * batches * load->batch * delivery->stride,
                          "the set and its batches need",
                          "use a smaller set, or shards-gpu, which reads the set in every epoch"));
    TRY(delivery_open(delivery, LAUNCHES * batches * load->batch, kept_bytes));
    count_memory(delivery, stage_bytes, order_bytes);
    TRY(bring_in(resident, set_bytes, stage_bytes));
    resident->launch_slots = (uint32_t)(batches * load->batch);
    delivery->queues[0].own = resident;
    return open_order(resident);
}

static enum status resident_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    struct delivery *delivery = &static_cast<struct resident *>(state)->delivery;
    TRY(delivery_run(delivery, number, resident_read));
    const struct checksum *checksum = &delivery->result.checksum;
    /* Bytes read plus bytes written. */
    delivery->result.moved_bytes = checksum->bytes + checksum->count * delivery->slot_bytes;
    return STATUS_OK;
}

/* Timed runs do not copy the order to the host. The order of the last epoch is still on the device; this
 * function fetches it to learn which sample is in which slot. */
static enum status resident_verify_slots(void *state, uint64_t *wrong)
{
    struct resident *resident = static_cast<struct resident *>(state);
    struct delivery *delivery = &resident->delivery;
    struct output_queue *queue = &delivery->queues[0];
    uint32_t begin, end, slots = delivery->slots;
    CUDA_TRY(cudaSetDevice(delivery->device));
    order_share(&delivery->verifier.plan, delivery->load->rank, &begin, &end);
    TRY(fetch_order(resident, queue, begin, end - begin));
    for (uint32_t i = 0; i < slots; i++)
        queue->held[i] = DELIVERY_LOST;
    for (uint32_t index = end - begin > slots ? end - begin - slots : 0; index < end - begin; index++)
        queue->held[index % slots] = queue->order.samples[index];
    return delivery_verify_slots(delivery, wrong);
}

/* Measures a copy within device memory. Counts bytes read plus bytes written, like result.moved_bytes. */
static enum status resident_copy(void *state, double *bytes_per_s)
{
    const struct delivery *delivery = &static_cast<struct resident *>(state)->delivery;
    size_t free_bytes, total_bytes;
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    uint64_t bytes = free_bytes / 4 < COPY_BYTES ? free_bytes / 4 : COPY_BYTES;
    return device_copy_rate(delivery->device, bytes, cudaMemcpyDeviceToDevice, bytes_per_s);
}

static const struct load_traits traits = {.shards = true,
                                          .files = true,
                                          .device = true,
                                          .resident = true,
                                          .keyed = true,
                                          .timed = "order+gather",
                                          .copy = resident_copy,
                                          .verify_slots = resident_verify_slots};

extern "C" const struct variant variant_gpu_resident = {.platform = "cuda",
                                                        .traits = &traits,
                                                        .probe = device_probe_variant,
                                                        .setup =
                                                            delivery_setup<struct resident, open_resident>,
                                                        .ready = delivery_ready,
                                                        .run = resident_run,
                                                        .fetch = delivery_fetch,
                                                        .teardown = resident_teardown};
