/* Locks on files that several processes append to. */
#ifndef FDSL_CORE_LOCK_H
#define FDSL_CORE_LOCK_H

#include <stdbool.h>

#include "core/status.h"

#define LOCK_TIMEOUT_S 60 /* the time that lock_take() waits by default */

/* Sets how many seconds lock_take() waits for a lock, in all threads. Returns the previous value. */
double lock_set_timeout(double seconds);

/* Locks an open file until it is closed; `operation` is LOCK_SH or LOCK_EX of flock(). Waits while another
 * process holds the lock, and after one second names that process on stderr. STATUS_FAILED after the timeout,
 * or when a signal is deferred (file_hold_signals()); the message names that process's id and command if
 * /proc/locks lists the lock. Some cluster file systems do not support locks. On these, `*locked` is false
 * and the status is STATUS_OK, because losing a row is worse than the small risk that two rows mix. */
enum status lock_take(int fd, const char *path, int operation, bool *locked);

#endif
