/* Locks on files that several processes append to. */
#ifndef FDSL_CORE_LOCK_H
#define FDSL_CORE_LOCK_H

#include <stdbool.h>

#include "core/status.h"

#define LOCK_TIMEOUT_S 60 /* unless lock_set_timeout() sets another */

/* Sets how long lock_take() waits, in seconds, for the whole program. */
void lock_set_timeout(double seconds);

/* Locks an open file until it is closed: `operation` is LOCK_SH or LOCK_EX of flock(). While another process
 * holds the lock this waits, and after a second says for whom. STATUS_FAILED with that process's number and
 * command (where /proc/locks shows them) after the timeout, or once a signal is held
 * (file_hold_signals()). Some cluster file systems are mounted without locks: then `*locked` is false and
 * the status is STATUS_OK, because losing a row is worse than the small risk of two that mix. */
enum status lock_take(int fd, const char *path, int operation, bool *locked);

#endif
