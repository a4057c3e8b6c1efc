/* Stubs of the functions on devices for builds without CUDA. Every returned status is STATUS_UNAVAILABLE. */
#include "core/consumer.h"
#include "data/device_batches.h"
#include "machine/device.h"

int device_count(void)
{
    return 0;
}

enum status device_probe(int device)
{
    (void)device;
    return status_set(STATUS_UNAVAILABLE,
                      "not built: this build has no CUDA; use the CPU, or build with nvcc");
}

enum status device_describe(int device, struct device_info *info)
{
    (void)info;
    return device_probe(device);
}

enum status device_pci_bus_id(int device, char *text, int size)
{
    (void)text;
    (void)size;
    return device_probe(device);
}

int device_current(void)
{
    return -1;
}

void device_restore(int device)
{
    (void)device;
}

int device_relax_capture(void)
{
    return 0;
}

void device_restore_capture(int mode)
{
    (void)mode;
}

enum status device_alloc(int device, size_t bytes, void **memory)
{
    (void)bytes, (void)memory;
    return device_probe(device);
}

void device_free(int device, void *memory)
{
    (void)device, (void)memory;
}

enum status device_copy(int device, void *to, const void *from, size_t bytes, void *stream)
{
    (void)to, (void)from, (void)bytes, (void)stream;
    return device_probe(device);
}

enum status device_wait(int device, void *stream)
{
    (void)stream;
    return device_probe(device);
}

enum status device_order(int device, void *before, void *after)
{
    (void)before, (void)after;
    return device_probe(device);
}

enum status device_stream_create(int device, void **stream)
{
    (void)stream;
    return device_probe(device);
}

void device_stream_destroy(int device, void *stream)
{
    (void)device, (void)stream;
}

enum status device_event_record(int device, void **event, void *stream)
{
    (void)event, (void)stream;
    return device_probe(device);
}

void device_event_destroy(int device, void *event)
{
    (void)device, (void)event;
}

enum status device_event_wait(int device, void *event, void *stream)
{
    (void)event, (void)stream;
    return device_probe(device);
}

bool device_has(int device, const void *pointer)
{
    (void)device, (void)pointer;
    return false;
}

bool device_capturing(int device, void *stream)
{
    (void)device, (void)stream;
    return false;
}

enum status device_load(int device)
{
    return device_probe(device);
}

enum status device_add(int device, uint64_t *word, uint64_t step, void *stream)
{
    (void)word, (void)step, (void)stream;
    return device_probe(device);
}

enum status device_check_pointer(int device, const char *name, const void *pointer)
{
    (void)name, (void)pointer;
    return device_probe(device);
}

enum status consumer_open(int device, double step_s, struct consumer **consumer)
{
    (void)step_s;
    *consumer = NULL;
    return status_prefix(device_probe(device), "--compute");
}

enum status device_mixed_open(int device, const struct mixture *mixture, struct mixture_plans *plans,
                              const struct device_mixed_source *sources, uint64_t sample_bytes,
                              enum dtype type, uint32_t held, struct device_batches **batches)
{
    (void)mixture, (void)sources, (void)sample_bytes, (void)type, (void)held;
    *batches = NULL;
    mixture_plans_close(plans); /* without CUDA, there are no sources on a device */
    return status_prefix(device_probe(device), "device");
}

enum status device_set_open(int device, const struct set_stream_request *request, enum decoder wanted,
                            double share, const struct image_output *output, uint32_t held,
                            struct device_batches **batches)
{
    (void)request, (void)wanted, (void)share, (void)output, (void)held;
    *batches = NULL;
    return status_prefix(device_probe(device), "device");
}

enum status device_images_open(int device, const struct generated_stream_request *request,
                               const struct device_order *order, struct device_batches **batches)
{
    (void)order;
    generator_close(request->generator);
    *batches = NULL;
    return status_prefix(device_probe(device), "device");
}
