/* What every run of every variant must prove: that it delivered what the plain reader read, each sample once,
 * from a page cache in the state that was asked for; and that all runs of a row lost the same samples. */
#ifndef FDSL_LOAD_VERIFIER_H
#define FDSL_LOAD_VERIFIER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "load/input.h"

struct verifier {
    const struct load *load;
    struct order_plan plan;   /* of its orders */
    struct checksum expected; /* of the run that comes next */
    uint8_t *fates;           /* by sample: what became of it in runs so far; NULL where none may be lost */
    bool expects, settled;    /* `expected` is known; all was brought into the page cache */
    bool device_known;        /* the kernel tells what this process had read before the run: */
    uint64_t device_bytes;
};

/* What a worker could not read in a run. Each run begins with zeros. */
struct losses {
    struct checksum checksum; /* expected of those samples */
    bool first;               /* among them is one that no run had come to before */
    bool changed;             /* a run before it had read one of them, or lost one that was read now */
    char why[1024];           /* of the first one */
};

FDSL_C_BEGIN

/* STATUS_FAILED when memory runs out. The caller closes it, also then; zeros may be closed. */
enum status verifier_open(struct verifier *verifier, const struct load *load, const struct order_plan *plan);
void verifier_close(struct verifier *verifier);

/* Before a run, untimed: the page cache, whose resident pages are counted, and what the run must deliver. */
enum status verifier_ready(struct verifier *verifier, uint64_t number, struct cache_pages *before);

/* A sample could not be read, and the message says why: STATUS_OK where it may be skipped, else the failure.
 * Threads may call it at once for samples of their own. */
enum status verifier_lose(struct verifier *verifier, struct losses *losses, uint32_t sample,
                          enum status status);

/* After an epoch in this order, in which `lost` samples were lost: the others have been read. Likewise. */
void verifier_note(struct verifier *verifier, struct losses *losses, const struct order *order,
                   uint64_t lost);

/* Adds what a worker lost to what all did. Warns of what is lost for the first time. */
void losses_merge(struct losses *all, const struct losses *one);

/* Holds what a run delivered, and what all its workers lost, against what the plain reader read. STATUS_WRONG
 * where they differ; STATUS_FAILED where other samples were lost than in runs before it, or all. */
enum status verifier_finish(struct verifier *verifier, uint64_t number, const struct checksum *delivered,
                            const struct losses *lost);

/* Bytes that this process has read from devices since verifier_ready(); false where the kernel does not tell.
 */
bool verifier_device_bytes(const struct verifier *verifier, uint64_t *bytes);

FDSL_C_END

#endif
