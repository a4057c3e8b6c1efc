/* Verifies every run of every variant. A run must deliver what the plain reader read, each sample once,
 * starting from the requested page cache state. All runs of a row must lose the same samples. */
#ifndef FDSL_LOAD_VERIFIER_H
#define FDSL_LOAD_VERIFIER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "load/input.h"

struct verifier {
    const struct load *load;
    struct order_plan plan;   /* of the variant's orders */
    struct checksum expected; /* expected checksum of the next run */
    uint8_t *outcomes;        /* result of each sample in the runs so far; NULL if no sample may be lost */
    bool expects, settled;    /* `expected` is valid; the page cache was warmed up */
    bool device_known;        /* the kernel reports device_bytes */
    uint64_t device_bytes;
};

/* Samples that a worker could not read in a run. Set to zero before each run. */
struct losses {
    struct checksum checksum; /* sum of the expected checksums of these samples */
    bool first;               /* includes a sample that is visited for the first time */
    bool changed; /* a sample's result differs from an earlier run: read then and lost now, or the reverse */
    char why[1024]; /* error message of the first one */
};

FDSL_C_BEGIN

/* STATUS_FAILED if memory runs out. The caller closes the verifier, also after a failure. A zeroed verifier
 * may be closed. */
enum status verifier_open(struct verifier *verifier, const struct load *load, const struct order_plan *plan);
void verifier_close(struct verifier *verifier);

/* Prepares a run, untimed: brings the page cache into the requested state, counts resident pages into
 * `before`, and computes the expected checksum. */
enum status verifier_ready(struct verifier *verifier, uint64_t number, struct cache_pages *before);

/* Records that a sample could not be read; the error message is already set. STATUS_OK if it may be skipped,
 * otherwise `status`. Thread safe for different samples. */
enum status verifier_lose(struct verifier *verifier, struct losses *losses, uint32_t sample,
                          enum status status);

/* Records the end of an epoch with this order. `lost` of its samples were lost; all others were read. Thread
 * safe for different samples. */
void verifier_note(struct verifier *verifier, struct losses *losses, const struct order *order,
                   uint64_t lost);

/* Adds a worker's losses to the total. Warns of samples lost for the first time. */
void losses_merge(struct losses *all, const struct losses *one);

/* Compares the delivered checksum and the losses of all workers with what the plain reader read. STATUS_WRONG
 * if they differ. STATUS_FAILED if the run lost other samples than earlier runs, or all samples. */
enum status verifier_finish(struct verifier *verifier, uint64_t number, const struct checksum *delivered,
                            const struct losses *lost);

/* Bytes that this process has read from devices since verifier_ready(). False if the kernel does not report
 * it. */
bool verifier_device_bytes(const struct verifier *verifier, uint64_t *bytes);

FDSL_C_END

#endif
