#include "machine/gpu.h"

#include "machine/device.h"
#include "machine/nvml.h"

#define DEVICES_MAX 256

size_t gpu_most_free(const int64_t *free_bytes, size_t count)
{
    size_t best = 0;
    for (size_t i = 1; i < count; i++)
        if (free_bytes[i] > free_bytes[best])
            best = i;
    return best;
}

static enum status free_memory(int device, int64_t *free_bytes)
{
    char pci_bus_id[32];
    struct gpu_state state;
    TRY(device_pci_bus_id(device, pci_bus_id, sizeof pci_bus_id));
    TRY(nvml_gpu_state(pci_bus_id, &state));
    *free_bytes = state.memory_free_bytes;
    if (*free_bytes < 0)
        return status_set(STATUS_UNAVAILABLE, "NVML does not report the free memory of the GPU at %s",
                          pci_bus_id);
    return STATUS_OK;
}

enum status gpu_best(uint64_t *device)
{
    int64_t free_bytes[DEVICES_MAX];
    int count = device_count();
    if (count == 0)
        return status_prefix(device_probe(0), "--best-gpu"); /* device_probe() sets the reason */
    count = count < DEVICES_MAX ? count : DEVICES_MAX;
    for (int i = 0; i < count; i++)
        if (free_memory(i, &free_bytes[i]) != STATUS_OK)
            return status_prefix(STATUS_UNAVAILABLE, "--best-gpu cannot choose; use --device N");
    *device = gpu_most_free(free_bytes, (size_t)count);
    status_note("--best-gpu chose device %d of %d devices, with %.1f GB free", (int)*device, count,
                1e-9 * (double)free_bytes[*device]);
    return STATUS_OK;
}
