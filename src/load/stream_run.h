/* Runs of the workload `load` that pull batches from a struct stream, as the trainer does: variants with
 * traits->streams. Run n delivers the epochs n * epochs to n * epochs + epochs - 1, in the order of train
 * --feed load (draw_lanes()). Of each batch, a rank takes the share that it would train on.
 *
 * Each batch is checked when it is delivered. stream_batch.read must be the hash of the sample that the plan
 * names, with the bytes that the plain reader (data/plain_reader.h) found; only then does the sample count
 * for the checksum, which is that of the other variants. While control->whole is set, each sample is also
 * decoded a second time, from the bytes of the plain reader, and all values are compared. */
#ifndef FDSL_LOAD_STREAM_RUN_H
#define FDSL_LOAD_STREAM_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/stream.h"
#include "core/variant.h"
#include "data/plain_reader.h"
#include "data/set_stream.h"
#include "load/convert.h"
#include "load/input.h"
#include "load/verifier.h"

struct stream_run;

/* What differs between variants. Batches are in host memory if wait() and copy() are NULL. */
struct stream_run_type {
    /* Opens run->stream, with run->request, which it may change before. */
    enum status (*open)(struct stream_run *run);

    /* Waits until the values of run->batch are complete. */
    enum status (*wait)(struct stream_run *run);

    /* Copies the values of run->batch, and its masks if it has some, to host memory. With run->changes, also
     * the bytes that were decoded. */
    enum status (*copy)(struct stream_run *run, uint8_t *values, uint8_t *masks, uint8_t *decoded);

    /* With run->changes: changes and orders the values of run->batch, and sets batch.ready to an event after
     * this. NULL: the threads of the stream do it. */
    enum status (*change)(struct stream_run *run);
};

/* Memory of a thread that compares samples: a sample as the plain reader reads it, and its decoded values and
 * mask. `values` owns the memory of `mask` and `changed`, too. */
struct stream_reference {
    struct plain plain;
    struct image_scratch scratch;
    uint8_t *bytes, *values, *mask;
    uint8_t *changed; /* memory of three samples, to verify changes */
    uint64_t room;    /* size of `bytes` */
};

/* The first member of the state of such a variant. Only one thread uses it; the threads of the stream call
 * only the plan, and those that compare samples only read it. */
struct stream_run {
    const struct load *load;
    const struct stream_run_type *type;
    struct stream *stream;
    struct set_stream_request request;
    uint32_t tolerance; /* largest difference of a byte that a device has decoded */
    uint32_t *labels;   /* zeros, for samples without labels; else NULL */
    bool changes;       /* bytes are stored as `output` says: --color-jitter, --grayscale, --blur, --axes */
    struct image_output output;
    size_t sample_bytes, mask_bytes; /* mask_bytes 0: samples have no masks */
    uint64_t end;                    /* the epoch after those of the run */
    uint64_t listed;           /* the plan lists no samples from this epoch on; read and written atomically */
    struct stream_batch batch; /* `holds`: a batch of the stream; after a run it is the last one */
    bool holds;
    void *done;      /* the event after the consumer's step on the batch, or NULL */
    uint8_t *copied; /* values and masks of a batch on a device, for comparisons; allocated when needed */
    struct verifier verifier;
    struct losses losses;
    struct pixel_values bytes;           /* bytes that are not converted */
    struct stream_reference *references; /* one per thread that compares samples */
    int reference_count;
    struct load_result result;
};

FDSL_C_BEGIN

/* Implements traits->accepts(): each sample must have an image, and no member but an image and a label or
 * mask. Reads the first image unless --out-res gives the shape. */
enum status stream_run_accepts(const struct load *load);

/* Returns whether a sample is named as a JPEG. */
bool stream_run_has_jpeg(const struct load *load);

/* Opens the stream of a variant that uses `threads` threads. `run` is zeroed, except for `type`. The caller
 * closes `run`, even after a failure. */
enum status stream_run_open(struct stream_run *run, const struct load *load, int threads);
void stream_run_close(struct stream_run *run);

/* Implement ready(), run() and fetch() of the variants. `state` is a struct whose first member is a struct
 * stream_run. Shards of a URL without a cache folder are read anew in each run. */
enum status stream_run_ready(void *state, uint64_t number);
enum status stream_run_run(void *state, uint64_t number, struct run_time *time);
enum status stream_run_fetch(void *state, void *result);

/* Implements traits->verify_slots(): compares all values of the last batch of the latest run. */
enum status stream_run_verify(void *state, uint64_t *wrong);

FDSL_C_END

#endif
