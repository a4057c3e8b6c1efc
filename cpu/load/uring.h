/* io_uring helpers for the load variants. */
#ifndef FDSL_CPU_LOAD_URING_H
#define FDSL_CPU_LOAD_URING_H

#include <liburing.h>

#include "core/variant.h"

/* Checks that this process may create a ring and that Linux supports `operations`, which end with -1.
 * STATUS_UNAVAILABLE with the reason otherwise. */
enum status uring_probe(const int *operations);

/* Submits queued requests. Requests that Linux does not accept immediately stay queued until a later call
 * submits them. Returns STATUS_OK, or STATUS_FAILED with the reason. */
enum status uring_submit(struct io_uring *ring);

/* Submits queued requests and waits for at least one completion. Returns STATUS_OK, or STATUS_FAILED with the
 * reason. */
enum status uring_wait(struct io_uring *ring);

#endif
