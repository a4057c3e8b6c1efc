/* Copies out of mappings whose files may shrink: what is gone raises SIGBUS, and here becomes an answer.
 * Looking at the size before would leave a race. */
#ifndef FDSL_CPU_LOAD_GUARD_H
#define FDSL_CPU_LOAD_GUARD_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

/* The handler of the process, from guard_open() to guard_close(). Guards nest. Begins with zeros. */
struct guard {
    bool open;
    struct sigaction before;
};

/* STATUS_FAILED where SIGBUS cannot be caught. */
enum status guard_open(struct guard *guard);
void guard_close(struct guard *guard);

/* memcpy(), false where a page of the source is gone or its device fails. Under an open guard; in any thread.
 */
bool guarded_copy(uint8_t *to, const uint8_t *from, size_t bytes);

#endif
