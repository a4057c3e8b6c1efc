/* The current phase of a variant. The monitor reads it, and profilers show each phase as a range. */
#ifndef FDSL_CORE_PHASE_H
#define FDSL_CORE_PHASE_H

#include "core/portable.h"

FDSL_C_BEGIN

enum phase {
    PHASE_IDLE, /* between variants */
    PHASE_SETUP,
    PHASE_VERIFY, /* untimed runs whose results are verified or delivered, and the verification */
    PHASE_WARM_UP,
    PHASE_TIMED,
    PHASE_MEASURE, /* untimed runs that measure further columns, and the output of rows */
    PHASE_TEARDOWN
};

/* Ends the current phase and begins `phase`. Only one thread may call it. Each phase is a range for
 * profilers, so all calls from one PHASE_IDLE to the next must be at the same nesting depth of ranges. */
void phase_enter(enum phase phase);

/* Returns the current phase. Thread safe. */
enum phase phase_now(void);

/* Returns the name of a phase: "idle", "setup", "verify", "warm-up", "timed", "measure" or "teardown". */
const char *phase_name(enum phase phase);

FDSL_C_END

/* ---- Ranges ---- */

/* Named ranges for profilers. Only this header and phase.c use NVTX 3. A range belongs to the thread that
 * opens it, and ranges nest. Without a profiler, a range costs one load and one branch at each end. In a
 * build without NVTX it costs nothing. docs/monitor.md says what each name covers; the names are stable. */

/* Stages of image generation */
#define RANGE_CLEAR    "clear"
#define RANGE_NOISE    "noise"
#define RANGE_VERTICES "vertices"
#define RANGE_PAINTING "painting"
#define RANGE_DRAW     "draw"
/* Loader threads */
#define RANGE_READ   "read"
#define RANGE_COPY   "copy"
#define RANGE_UNPACK "unpack"
#define RANGE_DECODE "decode"
#define RANGE_WAIT   "wait"
/* Training steps */
#define RANGE_GATHER   "gather"
#define RANGE_FORWARD  "forward"
#define RANGE_BACKWARD "backward"
#define RANGE_UPDATE   "update"
#define RANGE_GENERATE "generate"
#define RANGE_EXCHANGE "exchange"
/* Launches of a CUDA graph */
#define RANGE_GRAPH "graph"

FDSL_C_BEGIN

#ifdef HAVE_NVTX
void range_push(const char *name);
void range_pop(void);
#else
static inline void range_push(const char *name)
{
    (void)name;
}
static inline void range_pop(void)
{
}
#endif

FDSL_C_END

/* RANGE(READ); opens the range RANGE_READ. The range ends when control leaves the enclosing block, even by a
 * return. */
#ifdef __cplusplus
struct range_scope {
    explicit range_scope(const char *name)
    {
        range_push(name);
    }
    range_scope(const range_scope &) = delete;
    ~range_scope()
    {
        range_pop();
    }
};
#define RANGE(name) const range_scope range_scope_(RANGE_##name)
#else
static inline void range_end_(const char *const *name)
{
    (void)name;
    range_pop();
}
#define RANGE(name)           RANGE_AT_(RANGE_##name, __LINE__)
#define RANGE_AT_(name, line) RANGE_NAMED_(name, line)
#define RANGE_NAMED_(name, line) \
    __attribute__((cleanup(range_end_))) const char *const range_##line = (range_push(name), name)
#endif

#endif
