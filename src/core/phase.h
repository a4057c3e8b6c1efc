/* Where a variant is in its life, for whoever watches from beside it: the monitor asks, and profilers see
 * each phase as a range. */
#ifndef FDSL_CORE_PHASE_H
#define FDSL_CORE_PHASE_H

enum phase {
    PHASE_IDLE, /* between variants */
    PHASE_SETUP,
    PHASE_VERIFY, /* the runs that are checked or handed to the user, and the checking */
    PHASE_WARM_UP,
    PHASE_TIMED,
    PHASE_MEASURE, /* the runs that measure more than time, and the writing of rows */
    PHASE_TEARDOWN
};

/* Ends the present phase and begins this one. By one thread alone, at one depth of ranges (core/range.h). */
void phase_enter(enum phase phase);

/* The present phase; any thread may ask. */
enum phase phase_now(void);

/* "idle", "setup", "verify", "warm-up", "timed", "measure", "teardown". */
const char *phase_name(enum phase phase);

#endif
