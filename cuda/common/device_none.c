/* Stubs of the device functions for builds without CUDA: there is no device, and queries give the reason. */
#include "machine/device.h"

int device_count(void)
{
    return 0;
}

enum status device_probe(int device)
{
    (void)device;
    return status_set(STATUS_UNAVAILABLE, "not built: this build has no CUDA");
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
