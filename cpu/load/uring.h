/* io_uring for the load variants. */
#ifndef FDSL_CPU_LOAD_URING_H
#define FDSL_CPU_LOAD_URING_H

#include <liburing.h>

#include "core/variant.h"

/* STATUS_OK where the kernel lets this process have a ring with these operations, else STATUS_UNAVAILABLE and
 * the reason. `operations` ends in -1. */
enum status uring_probe(const int *operations);

/* Submits what is queued; what the kernel does not take now, uring_wait() does. STATUS_FAILED with the
 * reason.
 */
enum status uring_submit(struct io_uring *ring);

/* Submits what is queued and waits for at least one completion. STATUS_FAILED with the reason. */
enum status uring_wait(struct io_uring *ring);

#endif
