#include "common/device.h"

#include <stdio.h>

#include "common/check.cuh"

/* A kernel that says whether this build holds code for a device at all. */
static __global__ void probe_kernel(void)
{
}

int device_count(void)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    (void)cudaGetLastError();
    return error == cudaSuccess ? count : 0;
}

enum status device_pci_bus_id(int device, char *text, int size)
{
    CUDA_TRY(cudaDeviceGetPCIBusId(text, size, device));
    return STATUS_OK;
}

enum status device_probe(int device)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    (void)cudaGetLastError();
    if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice ||
        (error == cudaSuccess && count == 0))
        return status_set(STATUS_UNAVAILABLE, "no CUDA device (%s)",
                          error == cudaErrorInsufficientDriver
                              ? "no driver, or one older than CUDA's runtime needs"
                              : "the driver sees no GPU");
    if (error != cudaSuccess)
        return status_set(STATUS_UNAVAILABLE, "CUDA does not start: %s", cudaGetErrorString(error));
    if (device >= count)
        return status_set(STATUS_UNAVAILABLE, "no CUDA device %d: there %s %d, numbered from 0; see --device",
                          device, count == 1 ? "is" : "are", count);
    /* A build for other architectures only would fail at the first launch; say so here. */
    cudaFuncAttributes attributes;
    error = cudaSetDevice(device);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, probe_kernel);
    (void)cudaGetLastError();
    if (error != cudaSuccess)
        return status_set(STATUS_UNAVAILABLE, "CUDA device %d cannot run this build's kernels: %s", device,
                          cudaGetErrorString(error));
    return STATUS_OK;
}

/* 32-bit lanes that a multiprocessor issues to in a cycle: four schedulers of 32, but for the A100's 64. */
static int lanes(int major, int minor)
{
    return major == 8 && minor == 0 ? 64 : 128;
}

enum status device_describe(int device, struct device_info *info)
{
    TRY(device_probe(device));
    cudaDeviceProp properties;
    int driver = 0, clock_khz = 0, memory_clock_khz = 0;
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_TRY(cudaSetDevice(device));
    CUDA_TRY(cudaGetDeviceProperties(&properties, device));
    CUDA_TRY(cudaDriverGetVersion(&driver));
    CUDA_TRY(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device));
    CUDA_TRY(cudaDeviceGetAttribute(&memory_clock_khz, cudaDevAttrMemoryClockRate, device));
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    CUDA_TRY(cudaDeviceGetPCIBusId(info->pci_bus_id, sizeof info->pci_bus_id, device));
    snprintf(info->name, sizeof info->name, "%s", properties.name);
    snprintf(info->runtime, sizeof info->runtime, "%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    snprintf(info->driver_cuda, sizeof info->driver_cuda, "%d.%d", driver / 1000, driver % 1000 / 10);
    snprintf(info->architecture, sizeof info->architecture, "sm_%d%d", properties.major, properties.minor);
    info->multiprocessors = properties.multiProcessorCount;
    info->memory_bytes = total_bytes;
    info->memory_free_bytes = free_bytes;
    /* Two transfers a clock over the bus. */
    info->peak_bytes_per_s = 2e3 * memory_clock_khz * (properties.memoryBusWidth / 8.0);
    info->peak_operations_per_s =
        1e3 * clock_khz * (double)lanes(properties.major, properties.minor) * properties.multiProcessorCount;
    return STATUS_OK;
}
