/* Runs inference on any engine. A variant consists of an engine and the functions of this header;
 * cpu/train/variants.h and cuda/train/engines.cuh define variants in this way.
 *
 * Run number n evaluates batch n mod N, where N is the number of whole batches in the test set. */
#ifndef FDSL_TRAIN_INFERRER_H
#define FDSL_TRAIN_INFERRER_H

#include "core/status.h"
#include "core/variant.h"
#include "train/engine.h"

/* The input of the workload `infer`. */
struct infer_job {
    struct train train;      /* with forward_only set */
    const float *parameters; /* an arena (model.h) */
};

struct inferrer {
    const struct infer_job *job;
    const struct engine *engine;
    void *state; /* state of the engine */
    float *logits;
    uint64_t number; /* of the latest run; UINT64_MAX before the first run */
};

/* Output of inferrer_fetch(). */
struct infer_result {
    float *logits;   /* owned by the caller; room for one batch */
    uint64_t number; /* number of the latest run, which produced `logits`; UINT64_MAX before the first run */
};

FDSL_C_BEGIN

/* Implement setup(), run(), fetch() and teardown() of a variant (core/variant.h). `job` is a struct
 * infer_job. */
enum status inferrer_open(const struct engine *engine, const struct resources *resources, const void *job,
                          void **state);
enum status inferrer_run(void *state, uint64_t number, struct run_time *time);
enum status inferrer_fetch(void *state, void *result);
void inferrer_close(void *state);

/* Returns the bytes of memory that the engine uses. */
uint64_t inferrer_memory_bytes(const void *state);

FDSL_C_END

#endif
