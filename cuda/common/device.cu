#include "machine/device.h"

#include <stdio.h>

#include "common/check.cuh"
#include "machine/nvml.h"

/* This kernel is never launched. Its attributes show whether this build has code for a device. */
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
                              ? "no driver, or a driver that is too old for this CUDA runtime"
                              : "the driver sees no GPU");
    if (error != cudaSuccess)
        return status_set(STATUS_UNAVAILABLE, "cannot initialise CUDA: %s", cudaGetErrorString(error));
    if (device >= count)
        return status_set(STATUS_UNAVAILABLE, "no CUDA device %d: there %s %d, numbered from 0; see %s",
                          device, count == 1 ? "is" : "are", count, OPTION_OR_FIELD("--device", "device"));
    /* Without this check, a build that has no code for this device would fail at its first launch. */
    cudaFuncAttributes attributes;
    error = cudaSetDevice(device);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, probe_kernel);
    (void)cudaGetLastError();
    if (error == cudaErrorMemoryAllocation)
        return status_set(STATUS_EXHAUSTED,
                          "CUDA device %d has no memory left for the program's kernels; free memory, or use "
                          "another device",
                          device);
    if (error != cudaSuccess)
        return status_set(STATUS_UNAVAILABLE, "CUDA device %d cannot run this build's kernels: %s", device,
                          cudaGetErrorString(error));
    return STATUS_OK;
}

enum status device_code(int device, int *architecture, bool *at_load)
{
    cudaFuncAttributes attributes;
    CUDA_TRY(cudaSetDevice(device));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, probe_kernel));
    /* If the program contains machine code for the device, ptxVersion equals binaryVersion. If the driver
     * compiled PTX when it loaded the code, binaryVersion is the device's architecture, and ptxVersion is
     * lower. */
    *architecture = attributes.ptxVersion;
    *at_load = attributes.ptxVersion < attributes.binaryVersion;
    return STATUS_OK;
}

/* CUDA reports the rated boost clock. Many devices run faster, up to the maximum clock that NVML reports. */
static double highest_clock_hz(const char *pci_bus_id, int rated_khz)
{
    struct gpu_state state;
    double rated_hz = 1e3 * rated_khz;
    bool known = nvml_gpu_state(pci_bus_id, &state) == STATUS_OK && state.sm_clock_max_mhz > 0;
    return known && 1e6 * state.sm_clock_max_mhz > rated_hz ? 1e6 * state.sm_clock_max_mhz : rated_hz;
}

/* Gets the peak rate of PCIe. Sets 0 if host and device have a faster, cache-coherent link (NVLink-C2C). */
static enum status bus_peak(int device, const char *pci_bus_id, double *bytes_per_s)
{
    int coherent = 0;
    CUDA_TRY(cudaDeviceGetAttribute(&coherent, cudaDevAttrHostNativeAtomicSupported, device));
    *bytes_per_s = coherent ? 0 : nvml_pcie_peak_bytes_per_s(pci_bus_id);
    return STATUS_OK;
}

static enum status describe_peaks(int device, const cudaDeviceProp *properties, struct device_info *info)
{
    int clock_khz = 0, memory_clock_khz = 0;
    double bus_bytes_per_s = 0;
    CUDA_TRY(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device));
    CUDA_TRY(cudaDeviceGetAttribute(&memory_clock_khz, cudaDevAttrMemoryClockRate, device));
    TRY(bus_peak(device, info->pci_bus_id, &bus_bytes_per_s));
    const struct gpu_facts gpu = {.major = properties->major,
                                  .minor = properties->minor,
                                  .multiprocessors = properties->multiProcessorCount,
                                  .clock_hz = highest_clock_hz(info->pci_bus_id, clock_khz),
                                  .memory_clock_hz = 1e3 * memory_clock_khz,
                                  .memory_bus_bits = properties->memoryBusWidth,
                                  .cache_bytes = static_cast<double>(properties->l2CacheSize),
                                  .registers_bytes = 4.0 * properties->regsPerMultiprocessor,
                                  .bus_bytes_per_s = bus_bytes_per_s};
    info->peaks = roofline_gpu_peaks(&gpu);
    return STATUS_OK;
}

enum status device_describe(int device, struct device_info *info)
{
    TRY(device_probe(device));
    cudaDeviceProp properties;
    int driver = 0;
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_TRY(cudaSetDevice(device));
    CUDA_TRY(cudaGetDeviceProperties(&properties, device));
    CUDA_TRY(cudaDriverGetVersion(&driver));
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    CUDA_TRY(cudaDeviceGetPCIBusId(info->pci_bus_id, sizeof info->pci_bus_id, device));
    snprintf(info->name, sizeof info->name, "%s", properties.name);
    snprintf(info->runtime, sizeof info->runtime, "%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    snprintf(info->driver_cuda, sizeof info->driver_cuda, "%d.%d", driver / 1000, driver % 1000 / 10);
    snprintf(info->architecture, sizeof info->architecture, "sm_%d%d", properties.major, properties.minor);
    TRY(device_code(device, &info->code_architecture, &info->compiled_at_load));
    info->multiprocessors = properties.multiProcessorCount;
    info->memory_bytes = total_bytes;
    info->memory_free_bytes = free_bytes;
    return describe_peaks(device, &properties, info);
}
