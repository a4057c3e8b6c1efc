/* Where a variant is in its life, for whoever watches from beside it: the monitor asks, and profilers see
 * each phase as a range. */
#ifndef FDSL_CORE_PHASE_H
#define FDSL_CORE_PHASE_H

#include "core/portable.h"

FDSL_C_BEGIN

enum phase {
    PHASE_IDLE, /* between variants */
    PHASE_SETUP,
    PHASE_VERIFY, /* the runs that are checked or handed to the user, and the checking */
    PHASE_WARM_UP,
    PHASE_TIMED,
    PHASE_MEASURE, /* the runs that measure more than time, and the writing of rows */
    PHASE_TEARDOWN
};

/* Ends the present phase and begins this one. By one thread alone, at one depth of ranges. */
void phase_enter(enum phase phase);

/* The present phase; any thread may ask. */
enum phase phase_now(void);

/* "idle", "setup", "verify", "warm-up", "timed", "measure", "teardown". */
const char *phase_name(enum phase phase);

FDSL_C_END

/* ---- Ranges ---- */

/* Named ranges for profilers (NVTX 3): the one place that knows of them. A range belongs to the thread that
 * opens it, and ranges nest. Without a profiler a range costs a load and a branch at each end; without NVTX
 * at build time, nothing. docs/profiling.md says what each name below covers: the names are stable. */

/* Stages of generating */
#define RANGE_CLEAR    "clear"
#define RANGE_NOISE    "noise"
#define RANGE_VERTICES "vertices"
#define RANGE_PAINTING "painting"
#define RANGE_DRAW     "draw"
/* Threads of loaders */
#define RANGE_READ   "read"
#define RANGE_COPY   "copy"
#define RANGE_UNPACK "unpack"
#define RANGE_WAIT   "wait"
/* Training steps */
#define RANGE_GATHER   "gather"
#define RANGE_FORWARD  "forward"
#define RANGE_BACKWARD "backward"
#define RANGE_UPDATE   "update"
#define RANGE_GENERATE "generate"
/* CUDA graphs: whatever was captured */
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

/* RANGE(READ); opens the range RANGE_READ until the end of the block, however that is left. */
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
