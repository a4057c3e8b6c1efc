/* A file as a whole, in memory. */
#ifndef FDSL_CORE_BYTES_H
#define FDSL_CORE_BYTES_H

#include <stddef.h>

#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* Reads a regular file. `*bytes`, which the caller frees, holds `*size` bytes and one more that is zero.
 * STATUS_FAILED with the path and the reason. */
enum status bytes_read(const char *path, char **bytes, size_t *size);

FDSL_C_END

#endif
