/* A thread that calls a function at fixed intervals while the main thread works. All signals are blocked in
 * the thread, so that the main thread handles them. */
#ifndef FDSL_MACHINE_TICKER_H
#define FDSL_MACHINE_TICKER_H

#include <stdint.h>

struct ticker;

/* A function that the thread calls. If a call takes longer than the period, the next call starts at the next
 * multiple of the period. `missed` is the number of skipped calls. */
typedef void ticker_tick(void *context, uint64_t missed);

/* Starts a thread that calls `tick` immediately and then every `period_s` seconds. Returns 0, or the errno if
 * the thread cannot be started; `*ticker` is then NULL. */
int ticker_open(double period_s, ticker_tick *tick, void *context, struct ticker **ticker);

/* Stops the thread after the current call. Ignores NULL. */
void ticker_close(struct ticker *ticker);

#endif
