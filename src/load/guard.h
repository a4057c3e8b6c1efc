/* Copies out of mappings of files. A file that shrinks while it is mapped turns a copy into SIGBUS; a guarded
 * copy becomes a failure instead. Checking sizes alone would leave a race. */
#ifndef FDSL_LOAD_GUARD_H
#define FDSL_LOAD_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Begins zeroed. Guards nest: the first one catches the signal, the last one that closes lets it go. They are
 * opened and closed by one thread. */
struct guard {
    bool open;
};

FDSL_C_BEGIN

/* Catches SIGBUS in this process until guard_close(), which is safe on one that is not open. STATUS_FAILED
 * with the reason. */
enum status guard_open(struct guard *guard);
void guard_close(struct guard *guard);

/* memcpy(), false where a page of the source is gone. Any thread, under an open guard. */
bool guard_copy(uint8_t *to, const uint8_t *from, size_t bytes);

FDSL_C_END

#endif
