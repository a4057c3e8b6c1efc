/* Guarded copies from file mappings. If a mapped file shrinks, access to the lost pages raises SIGBUS. A
 * guarded copy returns false instead. A check of the file size before the copy would leave a race. */
#ifndef FDSL_LOAD_GUARD_H
#define FDSL_LOAD_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Initialise with zeros. Guards nest: opening the first one installs the signal handler, and closing the last
 * one removes it. The same thread must open and close all guards. */
struct guard {
    bool open;
};

FDSL_C_BEGIN

/* Catches SIGBUS in this process until guard_close(). Closing a guard that is not open does nothing.
 * STATUS_FAILED with the reason. */
enum status guard_open(struct guard *guard);
void guard_close(struct guard *guard);

/* Copies `bytes` bytes. Returns false if a page of the source no longer exists. Needs an open guard. Thread
 * safe. */
bool guard_copy(uint8_t *to, const uint8_t *from, size_t bytes);

FDSL_C_END

#endif
