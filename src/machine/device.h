/* The CUDA device, as the host program sees it. C, no CUDA header: device.cu implements it where CUDA is
 * built in, device_none.c where it is not. */
#ifndef FDSL_MACHINE_DEVICE_H
#define FDSL_MACHINE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/roofline.h"
#include "core/status.h"

FDSL_C_BEGIN

struct device_info {
    char name[256];
    char pci_bus_id[32];   /* "0000:01:00.0" */
    char runtime[16];      /* the CUDA runtime built in: "13.0" */
    char driver_cuda[16];  /* the newest CUDA that the driver supports */
    char architecture[16]; /* "sm_90" */
    int code_architecture; /* the one that this build's code for the device was compiled for: 90 for sm_90 */
    bool compiled_at_load; /* from PTX, by the driver, when kernels are loaded */
    int multiprocessors;
    uint64_t memory_bytes, memory_free_bytes;
    struct machine_peaks peaks; /* at the highest clocks that the driver tells */
};

/* The devices that this process sees (CUDA_VISIBLE_DEVICES); 0 where there is none, or no CUDA. */
int device_count(void);

/* Where device number `device` is on the bus ("0000:01:00.0"), without taking memory on it.
 * STATUS_UNAVAILABLE or STATUS_FAILED with the reason. */
enum status device_pci_bus_id(int device, char *text, int size);

/* STATUS_OK where device number `device` can be used, else STATUS_UNAVAILABLE and the reason. */
enum status device_probe(int device);

/* The architecture that this build's code for device number `device` was compiled for, 90 for sm_90, and
 * whether the driver compiles that code from PTX. STATUS_UNAVAILABLE or STATUS_FAILED with the reason. */
enum status device_code(int device, int *architecture, bool *at_load);

/* Fills `info`. STATUS_UNAVAILABLE or STATUS_FAILED with the reason. */
enum status device_describe(int device, struct device_info *info);

FDSL_C_END

#endif
