/* The functions of ops/rows_device.h and ops/row_batches.h for builds without CUDA or without xxHash: no set
 * can be opened. */
#include "ops/row_batches.h"

static enum status unavailable(struct rows_device **rows)
{
    if (rows)
        *rows = NULL;
    return status_set(STATUS_UNAVAILABLE, "not built: sets of embeddings on a device need CUDA and xxHash");
}

enum status rows_device_open(const struct rows_device_request *request, struct rows_device **rows)
{
    (void)request;
    return unavailable(rows);
}

enum status rows_device_wrap(const struct rows_device_tensor *tensor, const struct rows_device_steps *steps,
                             uint64_t memory_limit, void *stream, struct rows_device **rows)
{
    (void)tensor, (void)steps, (void)memory_limit, (void)stream;
    return unavailable(rows);
}

void rows_device_close(struct rows_device *rows)
{
    (void)rows;
}

enum status rows_device_trim(int device)
{
    (void)device;
    return unavailable(NULL);
}

struct rows_device_info rows_device_info(const struct rows_device *rows)
{
    (void)rows;
    return (struct rows_device_info){0};
}

enum status rows_device_numbers(const struct rows_device *rows, uint64_t first, uint64_t count, uint32_t *to)
{
    (void)rows, (void)first, (void)count, (void)to;
    return unavailable(NULL);
}

enum status rows_device_reserve(struct rows_device *rows, uint64_t count)
{
    (void)rows, (void)count;
    return unavailable(NULL);
}

void rows_device_ahead(struct rows_device *rows, bool shuffle, uint64_t seed, uint64_t epoch, uint64_t first,
                       uint64_t count)
{
    (void)rows, (void)shuffle, (void)seed, (void)epoch, (void)first, (void)count;
}

enum status rows_device_gather(struct rows_device *rows, bool shuffle, uint64_t seed, uint64_t epoch,
                               uint64_t first, uint64_t count, void *out, int64_t *labels, void *stream)
{
    (void)rows, (void)shuffle, (void)seed, (void)epoch, (void)first, (void)count, (void)out, (void)labels,
        (void)stream;
    return unavailable(NULL);
}

enum status rows_device_gather_step(struct rows_device *rows, bool shuffle, uint64_t seed,
                                    const uint64_t *step, uint64_t count, void *out, int64_t *labels,
                                    void *stream)
{
    (void)rows, (void)shuffle, (void)seed, (void)step, (void)count, (void)out, (void)labels, (void)stream;
    return unavailable(NULL);
}

enum status rows_device_gather_numbers(struct rows_device *rows, const uint32_t *numbers, bool on_device,
                                       uint64_t count, void *out, int64_t *labels, void *stream)
{
    (void)rows, (void)numbers, (void)on_device, (void)count, (void)out, (void)labels, (void)stream;
    return unavailable(NULL);
}

enum status row_batches_open(const struct row_batches_request *request, struct device_batches **batches)
{
    if (request->owned)
        rows_device_close(request->rows);
    *batches = NULL;
    return unavailable(NULL);
}
