/* The workload `load`: the samples of a directory, read into batches. Its input, as every variant sees it. */
#ifndef FDSL_LOAD_INPUT_H
#define FDSL_LOAD_INPUT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/consumer.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"
#include "data/checksum.h"
#include "load/augment.h"
#include "load/cache.h"
#include "load/convert.h"
#include "load/latency.h"
#include "load/order.h"
#include "load/pictures.h"

/* The state of the page cache that a run begins with. */
enum load_cache {
    LOAD_WARM, /* everything in it: read once before, and counted */
    LOAD_COLD, /* nothing in it: evicted before every run, and counted */
    LOAD_ANY   /* as it comes */
};

/* What the workload asks of a run beyond its results. Changed between runs. */
struct load_control {
    bool whole;       /* checksums are over every byte, and samples are checked one by one */
    bool timed_calls; /* open, read and close are timed each */
    uint8_t *seen;    /* with `whole`: how often each sample came right, up to 255 */

    struct checksum lost; /* what the latest run could not read; variants write it */

    struct consumer *consumer; /* takes every batch that is delivered; NULL: none */
};

/* The input: constant over all runs but for `control`, and `epochs`, which is 1 while control->whole. Run n
 * reads epochs n * epochs to n * epochs + epochs - 1.
 */
struct load {
    const struct dataset *dataset;
    struct load_control *control;
    uint64_t seed;
    uint32_t batch, shuffle_buffer, epochs;
    uint32_t rank, ranks;
    uint32_t depth;       /* requests in flight of the variants with io_uring */
    uint32_t block_bytes; /* of a request to a shard */
    uint32_t prefetch;    /* shards that the kernel is asked to read ahead */
    enum load_cache cache;
    bool skip, decode, augment;
    struct augmentation augmentation;
    enum dtype tensor; /* of the variants that deliver on a device, as are the four below */
    double mean, std;
    uint32_t ring;        /* buffers of a thread */
    uint64_t chunk_bytes; /* of a buffer, where no sample is larger */
    const struct pictures
        *pictures;   /* whose batches are learnt from (--compute train); NULL: nobody learns */
    bool normalised; /* --mean or --std was given, which needs such a variant where `augment` is off */
};

struct load_traits {
    bool shards, files; /* which layout it reads */
    bool device;        /* it delivers tensors on a device */
    bool resident;      /* from the device's own memory, not over the bus */
    bool ring;          /* it reads chunks into rings of buffers */
    bool keyed;         /* its orders are keyed */
    bool calls;         /* it makes open, read and close calls that can be timed */
    enum status (*accepts)(
        const struct load *load);  /* whether it can read this; NULL: whatever it may read */
    const char *timed;             /* what a run's time includes, for the column `timed` */
    const char *timed_unless_warm; /* the same where files are not kept open over runs; NULL: no other */

    /* The wall of any such loader, in bytes a second: of the CPU's, one copy of the working set into the same
     * buffers by the same threads; of those that deliver on a device, see docs/load_gpu.md. */
    enum status (*copy)(void *state, double *bytes_per_s);

    /* Counts into `*wrong` the samples that the latest run left in the buffers (as many as there are slots,
     * or some thousands of them) that are not, byte by byte, those of the data set. Their hashes are known:
     * load->control has been `whole` before. */
    enum status (*look)(void *state, uint64_t *wrong);
};

enum load_call { LOAD_OPEN, LOAD_READ, LOAD_CLOSE, LOAD_CALLS };

/* fetch() of every load variant fills this for its latest run. */
struct load_result {
    uint64_t number;            /* of the run; UINT64_MAX before the first */
    struct checksum checksum;   /* of what was delivered */
    uint64_t skipped;           /* samples that could not be read or decoded */
    struct cache_pages before;  /* resident when the run began; with LOAD_WARM, when all had been read */
    bool device_known;          /* the kernel tells of the next: */
    uint64_t device_bytes;      /* that the process had read from devices during the run */
    int threads;                /* that shared the run */
    uint64_t moved_bytes;       /* what copy() is compared with; 0: the bytes that were delivered */
    const char *gds;            /* how cuFile read: "gds" or "compat"; NULL: it did not */
    double decode_s, augment_s; /* of the run's time, where threads share it: the mean over them */
    struct latency latency[LOAD_CALLS]; /* with control->timed_calls */
};

FDSL_C_BEGIN

/* The orders that `threads` threads of this rank follow. */
struct order_plan load_plan(const struct load *load, int threads);

/* The checksum of this rank's part of run `number` as planned, from the plain reader. STATUS_FAILED when
 * memory runs out. */
enum status load_expect(const struct load *load, const struct order_plan *plan, uint64_t number,
                        struct checksum *expected);

/* Counts the resident pages of the whole data set. */
enum status load_resident(const struct load *load, struct cache_pages *pages);

/* Brings the page cache into the state that load->cache asks for and counts what is resident. STATUS_FAILED
 * where it does not get there: no run may be called warm or cold that is not. */
enum status load_settle_cache(const struct load *load, struct cache_pages *pages);

FDSL_C_END

#endif
