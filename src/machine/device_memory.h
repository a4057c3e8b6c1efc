/* Memory and streams of CUDA devices, for libfdsl, whose callers need no CUDA of their own. This header
 * includes no CUDA header. cuda/common/device.cu implements it. In builds without CUDA, device_none.c
 * does; its functions return STATUS_UNAVAILABLE.
 *
 * A stream is a cudaStream_t. Functions with the parameter `device` make that device current,
 * except device_check_pointer(). */
#ifndef FDSL_MACHINE_DEVICE_MEMORY_H
#define FDSL_MACHINE_DEVICE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

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

/* Enqueues a copy on `stream` and waits until the copy is complete. Each end may be host or device memory. */
enum status device_copy(int device, void *to, const void *from, size_t bytes, void *stream);

/* Waits for the work on `stream`. */
enum status device_wait(int device, void *stream);

/* Makes later work on `after` wait for the work on `before`, unless one of them is being captured. */
enum status device_order(int device, void *before, void *after);

/* Returns whether `stream` is being captured into a graph; false after an error. `device` -1: the current
 * one. */
bool device_capturing(int device, void *stream);

/* Loads the kernel of device_add(). CUDA loads kernels at their first launch, and must not do so during a
 * capture. */
enum status device_load(int device);

/* Enqueues `*word += step` on `stream`; `word` is device memory. */
enum status device_add(int device, uint64_t *word, uint64_t step, void *stream);

/* Checks that CUDA kernels on `device` can use `pointer`. If not, STATUS_USAGE with a message that begins
 * with `name`. */
enum status device_check_pointer(int device, const char *name, const void *pointer);

FDSL_C_END

#endif
