/* The search for the largest share of read samples in a mixture with which training steps do not wait for
 * them (--mix synth:auto). The runner measures steps with the share that share_search_next() returns, adds
 * the result with share_search_add(), and repeats this until the function returns 0.
 *
 * The model: a step without waiting takes b(s) seconds, which is linear in the share s, because generating a
 * sample takes time, too. Reading delivers at most R shares per second. Steps wait if s / R > b(s). A probe
 * with which steps wait gives R and b(s); the next share is the solution of s / R = b(s). Every solution is
 * measured, so an error of the model costs probes, but does not decide. If steps wait much longer than the
 * model says, the share is measured again, because another process may have delayed them. */
#ifndef FDSL_RUN_SHARE_SEARCH_H
#define FDSL_RUN_SHARE_SEARCH_H

#include <stdbool.h>
#include <stdint.h>

#define SHARE_PROBES 9
#define SHARE_STALL  0.02 /* steps that wait for at most this share of their time do not count as waiting */

/* The measurement of a share. */
struct share_probe {
    uint32_t share;
    double stall;  /* share of the time in which steps waited for samples */
    double step_s; /* duration of a step, including waiting */
    bool twice;    /* it was measured twice; this is the measurement with fewer stalls */
};

struct share_search {
    uint32_t parts; /* shares are from 1 to this number */
    uint32_t count; /* of probes, which have different shares */
    uint32_t tries; /* measurements */
    bool hurried;   /* no share is measured again, and one with which steps wait is halved */
    struct share_probe probes[SHARE_PROBES];
};

/* Returns the share to measure next: that of the latest probe once again, or one that no probe has. 0: the
 * search is complete. The first two probes read all samples, and few of them for comparison. The search is
 * complete if a share with which steps do not wait and one with which they wait differ by at most 5 %, or
 * after SHARE_PROBES probes. Pure. */
uint32_t share_search_next(const struct share_search *search);

/* Adds a measurement with this share. */
void share_search_add(struct share_search *search, uint32_t share, double stall, double step_s);

/* Returns whether a share was found with which steps do not wait, besides the one that is only measured for
 * comparison. Pure. */
bool share_search_found(const struct share_search *search);

/* Returns the probe with the largest share with which steps do not wait; if they wait with all shares, the
 * one with the smallest share. There is at least one probe. Pure. */
const struct share_probe *share_search_best(const struct share_search *search);

/* Returns the share to train with: that of share_search_best() if it is all samples, otherwise two thirds of
 * it. On hosts that are shared, reading is slower by a third for seconds, and a probe takes four. There is at
 * least one probe. Pure. */
uint32_t share_search_choice(const struct share_search *search);

/* Returns the share of the time in which steps wait however few samples are read, which counts as not
 * waiting: the stalls of the smallest share that was measured, if it was read at less than half of the rate
 * that reading has reached. 0 if that is not known. Pure. */
double share_search_floor(const struct share_search *search);

/* Returns the share of a probe's time by which waiting for samples that are read lengthens a step: its stalls
 * above that floor, but not more than the part by which the step is longer than expected. The expected
 * duration is linear in the share, between that of the smallest share and that of the largest one without its
 * stalls. Pure. */
double share_search_wait(const struct share_search *search, const struct share_probe *probe);

#endif
