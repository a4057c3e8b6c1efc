#include "train/inferrer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void inferrer_close(void *state)
{
    struct inferrer *inferrer = state;
    if (inferrer->state)
        inferrer->engine->close(inferrer->state);
    free(inferrer->logits);
    free(inferrer);
}

enum status inferrer_open(const struct engine *engine, const struct resources *resources, const void *job,
                          void **state)
{
    struct inferrer *inferrer = *state = calloc(1, sizeof *inferrer);
    TRY(ALLOCATED(inferrer, "out of memory"));
    inferrer->job = job;
    inferrer->engine = engine;
    inferrer->number = UINT64_MAX;
    const struct train *train = &inferrer->job->train;
    const struct train_state from = {
        .parameters = (float *)(uintptr_t)inferrer->job->parameters}; /* const cast: set() only reads it */
    inferrer->logits = malloc((size_t)train->batch * train->model->classes * sizeof *inferrer->logits);
    TRY(ALLOCATED(inferrer->logits, "out of memory for a batch"));
    TRY(engine->open(train, resources, &inferrer->state));
    return engine->set(inferrer->state, &from);
}

enum status inferrer_run(void *state, uint64_t number, struct run_time *time)
{
    struct inferrer *inferrer = state;
    const struct train *train = &inferrer->job->train;
    uint32_t batches = train->data->sets[DATA_TEST].count / train->batch;
    (void)time;
    inferrer->number = number;
    /* NaN marks the logits as not written. Several runs may evaluate the same samples, so the logits of an
     * earlier run would otherwise pass the verification of an engine that writes nothing. */
    inferrer->logits[0] = inferrer->logits[(size_t)train->batch * train->model->classes - 1] = NAN;
    return inferrer->engine->evaluate(inferrer->state, DATA_TEST, (uint32_t)(number % batches) * train->batch,
                                      train->batch, inferrer->logits);
}

enum status inferrer_fetch(void *state, void *result)
{
    const struct inferrer *inferrer = state;
    const struct train *train = &inferrer->job->train;
    struct infer_result *into = result;
    memcpy(into->logits, inferrer->logits,
           (size_t)train->batch * train->model->classes * sizeof *into->logits);
    into->number = inferrer->number;
    return STATUS_OK;
}

uint64_t inferrer_memory_bytes(const void *state)
{
    const struct inferrer *inferrer = state;
    return inferrer->engine->memory_bytes(inferrer->state);
}
