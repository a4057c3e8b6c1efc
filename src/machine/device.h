/* Queries of CUDA devices for the host program. This header includes no CUDA header. cuda/common/device.cu
 * implements it; in builds without CUDA, cuda/common/device_none.c does. */
#ifndef FDSL_MACHINE_DEVICE_H
#define FDSL_MACHINE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

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

/* Gives the streams of this process 32 hardware queues instead of 8, unless the user has set their number.
 * Streams that share a queue wait for each other: nvJPEG's own streams would wait for the training step. Must
 * be called before CUDA is initialised. */
static inline void device_use_all_queues(void)
{
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

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

/* ---- Memory and streams, for libfdsl, whose callers need no CUDA of their own ---- */

/* A stream is a cudaStream_t. Functions with the parameter `device` make that device current, except
 * device_check_pointer(). cuda/common/device.cu implements the functions. In builds without CUDA they
 * return STATUS_UNAVAILABLE. */

FDSL_C_BEGIN

/* Returns the current device of this thread; -1 without CUDA or after an error. */
int device_current(void);

/* Makes `device` current; ignores -1 and errors. */
void device_restore(int device);

/* After this call, allocating and freeing in this thread cannot invalidate any thread's capture of a stream.
 * Returns the mode for device_restore_capture(). */
int device_relax_capture(void);
void device_restore_capture(int mode);

/* Allocates device memory; the caller frees it with device_free(). Both functions call device_relax_capture()
 * and restore the mode. */
enum status device_alloc(int device, size_t bytes, void **memory);
void device_free(int device, void *memory);

/* Makes the device current. Returns STATUS_TOO_LARGE if it has less than `bytes` bytes of free memory. The
 * message begins with `what` ("the batches need"), gives both sizes, and ends with `remedy`. */
enum status device_check_room(int device, uint64_t bytes, const char *what, const char *remedy);

/* Enqueues a copy on `stream` and waits until the copy is complete. Each end may be host or device memory. */
enum status device_copy(int device, void *to, const void *from, size_t bytes, void *stream);

/* Waits for the work on `stream`. */
enum status device_wait(int device, void *stream);

/* Makes later work on `after` wait for the work on `before`, unless one of them is being captured. */
enum status device_order(int device, void *before, void *after);

/* Opens a stream that does not wait for the default stream; device_stream_destroy() waits for its work and
 * ignores NULL. */
enum status device_stream_create(int device, void **stream);
void device_stream_destroy(int device, void *stream);

/* Records an event, a cudaEvent_t, after the work on `stream`. Creates it if `*event` is NULL; the caller
 * destroys it. */
enum status device_event_record(int device, void **event, void *stream);
void device_event_destroy(int device, void *event);

/* Makes later work on `stream` wait for an event. */
enum status device_event_wait(int device, void *event, void *stream);

/* Returns whether `stream` is being captured into a graph; false after an error. `device` -1: the current
 * one. */
bool device_capturing(int device, void *stream);

/* Loads the kernel of device_add(). CUDA loads kernels at their first launch, and must not do so during a
 * capture. */
enum status device_load(int device);

/* Enqueues `*word += step` on `stream`; `word` is device memory. */
enum status device_add(int device, uint64_t *word, uint64_t step, void *stream);

/* Returns whether `pointer` is memory that CUDA allocated on `device`; false without CUDA. */
bool device_has(int device, const void *pointer);

/* Checks that CUDA kernels on `device` can use `pointer`. If not, STATUS_USAGE with a message that begins
 * with `name`. */
enum status device_check_pointer(int device, const char *name, const void *pointer);

FDSL_C_END

#endif
