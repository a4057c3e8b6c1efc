/* Queries of devices, and their memory and streams for libfdsl (machine/device.h). */
#include "machine/device.h"

#include <stdio.h>

#include "common/check.cuh"
#include "machine/nvml.h"

/* ---- Queries ---- */

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
    return CUDA_STATUS(cudaDeviceGetPCIBusId(text, size, device));
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

/* ---- Memory and streams ---- */

int device_current(void)
{
    int device = -1;
    if (cudaGetDevice(&device) == cudaSuccess)
        return device;
    (void)cudaGetLastError();
    return -1;
}

void device_restore(int device)
{
    if (device >= 0 && device != device_current() && cudaSetDevice(device) != cudaSuccess)
        (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
}

/* Makes the device current, unless it is current already. If this fails, returns the error of device_probe(),
 * which says more. Returns CUDA's error if device_probe() finds no problem. */
static enum status use(int device)
{
    cudaError_t error = device == device_current() ? cudaSuccess : cudaSetDevice(device);
    if (error == cudaSuccess)
        return STATUS_OK;
    TRY(device_probe(device));
    return cuda_status(error, "cudaSetDevice", __FILE__, __LINE__);
}

/* Exchanges the capture mode of this thread; ignores errors. */
static int exchange_capture(int mode_)
{
    cudaStreamCaptureMode mode = static_cast<cudaStreamCaptureMode>(mode_);
    if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess)
        (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
    return mode;
}

int device_relax_capture(void)
{
    return exchange_capture(cudaStreamCaptureModeRelaxed);
}

void device_restore_capture(int mode)
{
    (void)exchange_capture(mode);
}

enum status device_alloc(int device, size_t bytes, void **memory)
{
    TRY(use(device));
    int mode = device_relax_capture();
    enum status status = CUDA_STATUS(cudaMalloc(memory, bytes));
    device_restore_capture(mode);
    if (status != STATUS_EXHAUSTED)
        return status;
    return status_set(
        STATUS_EXHAUSTED,
        "CUDA device %d does not have %.2f GB of free memory; free memory, or use another device", device,
        1e-9 * (double)bytes);
}

enum status device_check_room(int device, uint64_t bytes, const char *what, const char *remedy)
{
    size_t free_bytes, total_bytes;
    TRY(use(device));
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (bytes <= free_bytes)
        return STATUS_OK;
    return status_set(STATUS_TOO_LARGE, "%s %.2f GB of device memory, but %.2f GB are free; %s", what,
                      1e-9 * (double)bytes, 1e-9 * (double)free_bytes, remedy);
}

void device_free(int device, void *memory)
{
    if (use(device) != STATUS_OK)
        return;
    int mode = device_relax_capture();
    (void)cudaFree(memory);
    device_restore_capture(mode);
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
}

enum status device_copy(int device, void *to, const void *from, size_t bytes, void *stream)
{
    TRY(use(device));
    CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
    return CUDA_STATUS(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

enum status device_wait(int device, void *stream)
{
    TRY(use(device));
    return CUDA_STATUS(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

static __global__ void add_kernel(uint64_t *word, uint64_t step)
{
    *word += step;
}

static enum status check_capture(cudaStream_t stream, bool *captured)
{
    cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(stream, &state);
    /* CUDA returns this error for the default stream while a blocking stream is being captured. */
    if (error == cudaErrorStreamCaptureImplicit) {
        (void)cudaGetLastError();
        *captured = true;
        return STATUS_OK;
    }
    CUDA_TRY(error);
    *captured = *captured || state != cudaStreamCaptureStatusNone;
    return STATUS_OK;
}

/* Destroys its event even if the event is not complete. CUDA allows this, and frees the event when it
 * completes. */
enum status device_order(int device, void *before, void *after)
{
    const cudaStream_t first = static_cast<cudaStream_t>(before), second = static_cast<cudaStream_t>(after);
    bool captured = false;
    cudaEvent_t event;
    TRY(use(device));
    TRY(check_capture(first, &captured));
    TRY(check_capture(second, &captured));
    if (captured)
        return STATUS_OK;
    CUDA_TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaError_t error = cudaEventRecord(event, first);
    if (error == cudaSuccess)
        error = cudaStreamWaitEvent(second, event, 0);
    (void)cudaEventDestroy(event);
    return cuda_status(error, "ordering two streams", __FILE__, __LINE__);
}

enum status device_stream_create(int device, void **stream)
{
    cudaStream_t created;
    TRY(use(device));
    CUDA_TRY(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking));
    *stream = created;
    return STATUS_OK;
}

void device_stream_destroy(int device, void *stream)
{
    if (!stream || use(device) != STATUS_OK)
        return;
    (void)cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
}

enum status device_event_record(int device, void **event, void *stream)
{
    cudaEvent_t created;
    TRY(use(device));
    if (!*event) {
        CUDA_TRY(cudaEventCreateWithFlags(&created, cudaEventDisableTiming));
        *event = created;
    }
    return CUDA_STATUS(cudaEventRecord(static_cast<cudaEvent_t>(*event), static_cast<cudaStream_t>(stream)));
}

void device_event_destroy(int device, void *event)
{
    if (!event || use(device) != STATUS_OK)
        return;
    (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
}

enum status device_event_wait(int device, void *event, void *stream)
{
    TRY(use(device));
    return CUDA_STATUS(
        cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
}

bool device_capturing(int device, void *stream)
{
    bool captured = false;
    return (device < 0 || use(device) == STATUS_OK) &&
           check_capture(static_cast<cudaStream_t>(stream), &captured) == STATUS_OK && captured;
}

enum status device_load(int device)
{
    cudaFuncAttributes attributes;
    TRY(use(device));
    return CUDA_STATUS(cudaFuncGetAttributes(&attributes, add_kernel));
}

enum status device_add(int device, uint64_t *word, uint64_t step, void *stream)
{
    TRY(use(device));
    add_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(word, step);
    return CUDA_LAUNCHED("add_kernel");
}

/* Returns whether the device can access all host memory, even through pointers that are not registered with
 * CUDA. */
static bool uses_all_memory(int device)
{
    int pageable = 0;
    if (cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device) != cudaSuccess)
        (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
    return pageable != 0;
}

enum status device_check_pointer(int device, const char *name, const void *pointer)
{
    cudaPointerAttributes attributes;
    CUDA_TRY(cudaPointerGetAttributes(&attributes, pointer));
    if (attributes.type == cudaMemoryTypeDevice && attributes.device != device)
        return status_set(STATUS_USAGE, "%s: memory of CUDA device %d, but this call uses device %d", name,
                          attributes.device, device);
    if (attributes.type == cudaMemoryTypeUnregistered && !uses_all_memory(device))
        return status_set(STATUS_USAGE,
                          "%s: host memory, which CUDA device %d cannot use; give device memory", name,
                          device);
    return STATUS_OK;
}

bool device_has(int device, const void *pointer)
{
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
        (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
        return false;
    }
    return (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged) &&
           attributes.device == device;
}
