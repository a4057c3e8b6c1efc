/* Guarded reads of file mappings. If a mapped file shrinks, access to the lost pages raises SIGBUS. A guarded
 * copy or function returns false instead. A check of the file size before the copy would leave a race. */
#ifndef FDSL_MACHINE_GUARD_H
#define FDSL_MACHINE_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Initialise with zeros. Guards nest: opening the first one installs the signal handler, and closing the last
 * one removes it. Opening and closing are thread safe. */
struct guard {
    bool open, fills;
    int range; /* the number of its range, from 1; 0: none */
};

#define GUARD_RANGES 256 /* guards that may have a range at the same time */

FDSL_C_BEGIN

/* Catches SIGBUS in this process until guard_close(). Closing a guard that is not open does nothing.
 * STATUS_FAILED with the reason. */
enum status guard_open(struct guard *guard);
void guard_close(struct guard *guard);

/* After guard_fill(), accesses to lost pages outside guard_run() and guard_copy() read zeros, on any thread,
 * and the program continues with these wrong values. guard_filled() returns whether an access has read such
 * zeros since guard_fill(). guard_close() ends this behaviour. Only one open guard may fill at a time. */
void guard_fill(struct guard *guard);
bool guard_filled(void);

/* As guard_fill(), but only for lost pages of these bytes, a whole mapping. Several guards may have a range.
 * guard_filled() does not count them: the caller compares the size of the file after its accesses. Close the
 * guard before the mapping is unmapped. STATUS_EXHAUSTED if GUARD_RANGES guards have a range. */
enum status guard_fill_range(struct guard *guard, const void *begin, size_t bytes);

/* Calls `work(context)`. Returns false if `work` accessed a page that no longer exists. The access interrupts
 * `work`, which therefore must not hold a lock, allocate memory or change the shared state of a library while
 * it reads mapped pages. Needs an open guard. Thread safe, but only reads by the calling thread are guarded:
 * each thread of a parallel region must call guard_run() itself. `work` must not call functions of this
 * header. */
bool guard_run(void (*work)(void *context), void *context);

/* Copies `bytes` bytes. Returns false if a page of the source no longer exists. Needs an open guard. Thread
 * safe. */
bool guard_copy(uint8_t *to, const uint8_t *from, size_t bytes);

FDSL_C_END

#endif
