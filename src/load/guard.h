/* Guarded copies from file mappings. If a mapped file shrinks, access to it raises SIGBUS; a guarded copy
 * returns a failure instead. Checking file sizes first would leave a race. */
#ifndef FDSL_LOAD_GUARD_H
#define FDSL_LOAD_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Initialise with zeros. Guards nest: the first one installs the signal handler, and the last one to close
 * removes it. One thread opens and closes all guards. */
struct guard {
    bool open;
};

FDSL_C_BEGIN

/* Catches SIGBUS in this process until guard_close(). Closing a guard that is not open does nothing.
 * STATUS_FAILED with the reason. */
enum status guard_open(struct guard *guard);
void guard_close(struct guard *guard);

/* Like memcpy(); returns false if a page of the source no longer exists. Needs an open guard. Thread safe. */
bool guard_copy(uint8_t *to, const uint8_t *from, size_t bytes);

FDSL_C_END

#endif
