/* What every run of every variant must prove: that it delivered what the plain reader read, each sample once,
 * from a page cache in the state that was asked for. */
#ifndef FDSL_LOAD_PROOF_H
#define FDSL_LOAD_PROOF_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "load/load.h"

/* Begins with a load and the plan of its orders. */
struct proof {
    const struct load *load;
    struct order_plan plan;
    struct tally expected; /* of the run that comes next */
    uint64_t lost;         /* samples, by the first run */
    bool ran;
    bool expects, settled; /* `expected` is known; all was brought into the page cache */
    uint64_t device_bytes; /* read by this process before the run */
};

FDSL_C_BEGIN

/* Before a run, untimed: the page cache, whose resident pages are counted, and what the run must deliver. */
enum status proof_ready(struct proof *proof, uint64_t number, struct cache_pages *before);

/* Whether the samples that a run lost are to be told of: once, as all runs of a row must lose as many. */
bool proof_lost_anew(const struct proof *proof, const struct tally *lost);

/* Holds what the run delivered, and what it could not read, against what the plain reader read. STATUS_WRONG
 * where they differ; STATUS_FAILED where runs lose more or less than those before them, or everything. */
enum status proof_finish(struct proof *proof, uint64_t number, const struct tally *delivered,
                         const struct tally *lost);

/* Bytes that this process had read from devices since proof_ready(). */
uint64_t proof_device_bytes(const struct proof *proof);

FDSL_C_END

#endif
