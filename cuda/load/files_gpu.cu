/* `files-gpu`: the baseline. It reads the files of each sample into pageable memory, one file at a time. Then
 * it copies the sample to the device, launches a kernel, and waits. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "machine/device.h"
#include "load/delivery.cuh"

#define BATCHES    2                   /* buffers: one is filled while another is consumed */
#define COPY_BYTES ((uint64_t)4 << 20) /* size of a pinned copy that measures the bandwidth */

struct files_gpu {
    struct delivery delivery;
    uint8_t *host, *device; /* buffers for one sample, one extra byte, and the sample's struct unpack_entry */
    uint64_t table;         /* offset of the struct unpack_entry */
};

static enum status read_member(const struct dataset *dataset, const struct dataset_member *member,
                               uint8_t *bytes)
{
    const char *name = dataset->files[member->file].name;
    /* Without O_NONBLOCK, open() would block if a pipe has replaced the file. */
    int fd = openat(dataset->directory, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return status_set(status_of_errno(errno), "%s/%s: cannot open: %s", dataset->path, name,
                          strerror(errno));
    uint64_t count = 0;
    ssize_t part = 1;
    while (part != 0 && count <= member->size) { /* asks for one byte more, to detect a file that grew */
        part = read(fd, bytes + count, member->size + 1 - count);
        if (part < 0 && errno != EINTR)
            break;
        count += part > 0 ? (uint64_t)part : 0;
    }
    int failure = part < 0 ? errno : 0;
    close(fd);
    if (failure)
        return status_set(STATUS_FAILED, "%s/%s: cannot read: %s", dataset->path, name, strerror(failure));
    if (count != member->size)
        return status_set(STATUS_FAILED,
                          "%s/%s: the file's size has changed: %llu bytes were read instead of %llu",
                          dataset->path, name, (unsigned long long)count, (unsigned long long)member->size);
    return STATUS_OK;
}

static enum status read_sample(struct files_gpu *files, uint32_t number)
{
    const struct dataset *dataset = files->delivery.load->dataset;
    const struct array_sample *array = &files->delivery.arrays.samples[number];
    RANGE(READ);
    for (uint32_t m = 0; m < array->members; m++)
        TRY(read_member(dataset, &dataset->members[dataset->samples[number].member + m],
                        files->host + array->at[m]));
    return STATUS_OK;
}

/* Copies a sample to the device, converts it, and waits. */
static enum status transfer(struct files_gpu *files, struct output_queue *queue, uint32_t number,
                            uint32_t slot)
{
    struct unpack_entry *entry = reinterpret_cast<struct unpack_entry *>(files->host + files->table);
    struct unpack job = queue_job(queue);
    *entry = {0, number, slot};
    /* Copy in the kernel's stream: cudaMemcpy() may return while the last bytes are in flight, and this
     * stream would not wait for them. */
    {
        RANGE(COPY);
        CUDA_TRY(cudaMemcpyAsync(files->device, files->host, files->table + sizeof *entry,
                                 cudaMemcpyHostToDevice, queue->stream));
    }
    job.bytes = files->device;
    job.entries = reinterpret_cast<const struct unpack_entry *>(files->device + files->table);
    job.count = 1;
    TRY(unpack_launch(&job, queue->stream));
    RANGE(WAIT);
    CUDA_TRY(cudaStreamSynchronize(queue->stream));
    return STATUS_OK;
}

static enum status files_gpu_epoch(struct output_queue *queue)
{
    struct files_gpu *files = static_cast<struct files_gpu *>(queue->own);
    const struct load *load = files->delivery.load;
    order_make(&files->delivery.verifier.plan, queue->epoch, load->rank, &queue->order);
    uint32_t count = queue->order.count, batch = load->given->batch;
    for (uint32_t index = 0; index < count; index++) {
        uint32_t slot = index % files->delivery.slots, number = queue->order.samples[index];
        TRY(queue_reserve(queue, slot));
        enum status status = read_sample(files, number);
        queue->held[slot] = status == STATUS_OK ? number : DELIVERY_LOST;
        TRY(status == STATUS_OK ? transfer(files, queue, number, slot) : queue_lose(queue, number, status));
        if (index % batch == batch - 1 || index == count - 1)
            TRY(queue_deliver(queue, slot / batch * batch, slot % batch + 1));
    }
    return STATUS_OK;
}

static enum status files_gpu_read(struct output_queue *queue)
{
    return queue_each_epoch(queue, files_gpu_epoch);
}

/* ---- The variant ---- */

static void files_gpu_teardown(void *state)
{
    struct files_gpu *files = static_cast<struct files_gpu *>(state);
    free(files->host);
    (void)cudaFree(files->device);
    delivery_close(&files->delivery);
    delete files;
}

static enum status open_files(struct files_gpu *files, const struct resources *resources,
                              const struct load *load)
{
    TRY(delivery_begin(&files->delivery, resources, load, true, false, 1));
    files->table = array_align(files->delivery.arrays.bytes_max + 1);
    uint64_t bytes = files->table + sizeof(struct unpack_entry);
    TRY(delivery_open(&files->delivery, (uint64_t)BATCHES * load->given->batch, bytes));
    files->delivery.queues[0].own = files;
    files->delivery.result.memory_bytes += bytes; /* files->host */
    files->host = static_cast<uint8_t *>(calloc(bytes, 1));
    TRY(ALLOCATED(files->host, "out of memory for a sample of %llu bytes", (unsigned long long)bytes));
    CUDA_TRY(cudaMalloc(&files->device, bytes));
    return STATUS_OK;
}

static enum status files_gpu_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    return delivery_run(&static_cast<struct files_gpu *>(state)->delivery, number, files_gpu_read);
}

static enum status files_gpu_copy(void *state, double *bytes_per_s)
{
    const struct delivery *delivery = &static_cast<struct files_gpu *>(state)->delivery;
    return device_copy_rate(delivery->device, COPY_BYTES, cudaMemcpyHostToDevice, bytes_per_s);
}

static const struct load_traits traits = {.shards = false,
                                          .files = true,
                                          .device = true,
                                          .timed = "order+open+read+close+transfer+unpack",
                                          .copy = files_gpu_copy,
                                          .verify_slots = delivery_verify_slots};

extern "C" const struct variant variant_files_gpu = {.platform = "cuda",
                                                     .traits = &traits,
                                                     .probe = device_probe_variant,
                                                     .setup = delivery_setup<struct files_gpu, open_files>,
                                                     .ready = delivery_ready,
                                                     .run = files_gpu_run,
                                                     .fetch = delivery_fetch,
                                                     .teardown = files_gpu_teardown};
