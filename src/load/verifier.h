/* Verifies every run of the workload `load`. A run must start with the page cache in the requested state. It
 * must deliver or report as lost every sample of the rank once per epoch, and the checksum of these samples
 * must equal that of the plain reader (data/plain_reader.h). All runs of a row must lose the same samples,
 * unless every run decodes a different part of each image. */
#ifndef FDSL_LOAD_VERIFIER_H
#define FDSL_LOAD_VERIFIER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "load/input.h"

/* State of the verification of one variant. */
struct verifier {
    const struct load *load;
    struct order_plan plan;   /* order plan of the variant */
    struct checksum expected; /* expected checksum of the next run */
    uint8_t *outcomes;        /* outcome of each sample in the runs so far; NULL if no sample may be lost */
    bool expects;             /* `expected` is valid */
    bool settled;             /* the page cache was in the requested state before an earlier run */
    bool device_known;        /* Linux reports device_bytes */
    uint64_t device_bytes;    /* bytes that the process had read from storage devices at verifier_ready() */
};

#define LOSSES_TOLD 8 /* number of samples per worker and run whose error messages are kept */

/* Samples that a worker could not read in a run. */
struct losses {
    struct checksum checksum;        /* sum of the expected checksums of these samples */
    uint64_t fresh;                  /* number of these samples that no earlier run lost */
    bool changed;                    /* a sample was read in an earlier run and is lost now, or the reverse */
    struct failure why[LOSSES_TOLD]; /* failures of the first `fresh` samples */
};

/* Call before each run. Does not clear the messages in `why`, because this would take time in short runs. */
static inline void losses_clear(struct losses *losses)
{
    losses->checksum.count = losses->checksum.bytes = losses->checksum.sum = 0;
    losses->fresh = 0;
    losses->changed = false;
}

FDSL_C_BEGIN

/* Calls `visit` for every sample that the threads of this rank read in `epoch`. */
enum status load_visit_epoch(const struct load *load, const struct order_plan *plan, uint64_t epoch,
                             void (*visit)(void *context, uint32_t sample), void *context);

/* Opens a verifier for all runs of a variant. STATUS_EXHAUSTED if memory runs out. The caller closes the
 * verifier, even after a failure. A zeroed verifier may be closed. */
enum status verifier_open(struct verifier *verifier, const struct load *load, const struct order_plan *plan);
void verifier_close(struct verifier *verifier);

/* Prepares a run, outside the timing. Brings the page cache into the requested state, stores the number of
 * resident pages in `before`, and computes the expected checksum. With LOAD_WARM, only the first run prepares
 * and counts the page cache. */
enum status verifier_ready(struct verifier *verifier, uint64_t number, struct cache_pages *before);

/* Records that a sample could not be read; the error message is already set. Returns STATUS_OK if the sample
 * may be skipped, otherwise `status`. Thread safe for different samples. */
enum status verifier_lose(struct verifier *verifier, struct losses *losses, uint32_t sample,
                          enum status status);

/* Records that a stream delivered a sample, or that it masked the sample. For the consumer's thread. */
void verifier_see(struct verifier *verifier, struct losses *losses, uint32_t sample, bool masked);

/* Records the end of an epoch with this order. The epoch lost `lost` samples and read all others. Thread safe
 * for different samples. */
void verifier_note(struct verifier *verifier, struct losses *losses, const struct order *order,
                   uint64_t lost);

/* Adds a worker's losses to the total. Warns about samples that are lost for the first time. */
void losses_merge(struct losses *all, const struct losses *one);

/* Compares the sum of the delivered and the lost checksums of all workers with the expected checksum.
 * STATUS_WRONG if they differ; with control->whole, the caller examines control->seen instead. STATUS_FAILED
 * if the run lost all samples, or did not lose the same samples as earlier runs (unless every run decodes a
 * different part of each image). */
enum status verifier_finish(struct verifier *verifier, uint64_t number, const struct checksum *delivered,
                            const struct losses *lost);

/* Sets `*bytes` to the number of bytes that this process has read from storage devices since
 * verifier_ready(). Returns false if Linux does not report it. */
bool verifier_device_bytes(const struct verifier *verifier, uint64_t *bytes);

FDSL_C_END

#endif
