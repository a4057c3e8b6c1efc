/* Detects ranks of this machine whose process has stopped, for example after SIGSTOP. The functions of comm.h
 * detect this in their own waits; the heartbeat also detects it while ranks wait elsewhere, for example in
 * GPU kernels of a library. Each rank has a thread that counts in shared memory and looks at the counts of
 * the other ranks. If a count does not change for too long, the thread prints the rank and ends its process,
 * so the launcher ends all ranks. A rank whose process runs without making progress is not detected. */
#ifndef FDSL_MACHINE_HEARTBEAT_H
#define FDSL_MACHINE_HEARTBEAT_H

#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

struct heartbeat;

/* Collective: starts the threads. A count may stay the same for `limit_s` seconds. `*heartbeat` must be NULL
 * before the call. It stays NULL if there is nothing to watch. If the ranks cannot share memory, it also
 * stays NULL, and a warning is printed. The caller closes it, even after a failure. */
enum status heartbeat_open(double limit_s, struct heartbeat **heartbeat);

/* Stops the thread. The other ranks then no longer expect this rank's count to change. Not collective.
 * Ignores NULL. */
void heartbeat_close(struct heartbeat *heartbeat);

FDSL_C_END

#endif
