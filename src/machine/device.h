/* Queries of CUDA devices for the host program. This header includes no CUDA header. cuda/common/device.cu
 * implements it; in builds without CUDA, cuda/common/device_none.c does. */
#ifndef FDSL_MACHINE_DEVICE_H
#define FDSL_MACHINE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/roofline.h"
#include "core/status.h"
#include "core/variant.h"

FDSL_C_BEGIN

struct device_info {
    char name[256];
    char pci_bus_id[32];   /* "0000:01:00.0" */
    char runtime[16];      /* version of the linked CUDA runtime: "13.0" */
    char driver_cuda[16];  /* newest CUDA version that the driver supports */
    char architecture[16]; /* "sm_90" */
    int code_architecture; /* architecture that this build's device code was compiled for: 90 for sm_90 */
    bool compiled_at_load; /* the driver compiles kernels from PTX when they are loaded */
    int multiprocessors;
    uint64_t memory_bytes, memory_free_bytes;
    struct machine_peaks peaks; /* at the maximum clocks that the driver reports */
};

/* Returns the number of devices visible to this process (CUDA_VISIBLE_DEVICES); 0 without CUDA. */
int device_count(void);

/* Writes the PCI bus id of CUDA device `device` ("0000:01:00.0") without creating a context, which would take
 * device memory. STATUS_UNAVAILABLE or STATUS_FAILED with the reason. */
enum status device_pci_bus_id(int device, char *text, int size);

/* Returns STATUS_OK if CUDA device `device` can be used, else STATUS_UNAVAILABLE with the reason. */
enum status device_probe(int device);

/* Implements variant.probe for variants that need only a usable device. */
static inline enum status device_probe_variant(const struct resources *resources)
{
    return device_probe(resources->device);
}

/* Describes the code in this build that CUDA device `device` runs: its architecture (90 for sm_90), and
 * whether the driver compiles it from PTX. STATUS_UNAVAILABLE or STATUS_FAILED with the reason. */
enum status device_code(int device, int *architecture, bool *at_load);

/* Describes CUDA device `device`. STATUS_UNAVAILABLE or STATUS_FAILED with the reason. */
enum status device_describe(int device, struct device_info *info);

FDSL_C_END

#endif
