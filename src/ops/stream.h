/* The memory bandwidth of the CPU. */
#ifndef FDSL_OPS_STREAM_H
#define FDSL_OPS_STREAM_H

#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* Measures STREAM triad, a[i] = b[i] + 3 c[i], on `threads` threads: 24 bytes per element, the best of a few
 * repetitions. The three arrays together have `bytes` bytes, but at least 192 KiB and at most 384 MiB.
 * STATUS_EXHAUSTED if memory runs out. */
enum status stream_triad(int threads, uint64_t bytes, double *bytes_per_s);

FDSL_C_END

#endif
