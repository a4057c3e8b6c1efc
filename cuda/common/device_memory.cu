#include "machine/device.h"

#include "common/check.cuh"

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
    cudaError_t error = cudaMalloc(memory, bytes);
    device_restore_capture(mode);
    if (error != cudaErrorMemoryAllocation)
        return cuda_status(error, "cudaMalloc", __FILE__, __LINE__);
    (void)cudaGetLastError();
    return status_set(
        STATUS_EXHAUSTED,
        "CUDA device %d does not have %.2f GB of free memory; free memory, or use another device", device,
        1e-9 * (double)bytes);
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
    CUDA_TRY(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

enum status device_wait(int device, void *stream)
{
    TRY(use(device));
    CUDA_TRY(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
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
    CUDA_TRY(cudaFuncGetAttributes(&attributes, add_kernel));
    return STATUS_OK;
}

enum status device_add(int device, uint64_t *word, uint64_t step, void *stream)
{
    TRY(use(device));
    add_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(word, step);
    CUDA_TRY_LAUNCH("add_kernel");
    return STATUS_OK;
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
        return status_set(STATUS_USAGE, "%s: memory of CUDA device %d, but the generator uses device %d",
                          name, attributes.device, device);
    if (attributes.type == cudaMemoryTypeUnregistered && !uses_all_memory(device))
        return status_set(STATUS_USAGE,
                          "%s: host memory, which CUDA device %d cannot use; give device memory", name,
                          device);
    return STATUS_OK;
}
