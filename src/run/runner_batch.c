/* --batch max: finds the largest batch that fits into memory, by trial. */
#include <inttypes.h>
#include <stdio.h>

#include "core/phase.h"
#include "machine/comm.h"
#include "machine/host.h"
#include "run/runner_parts.h"

#define FIRST     64 /* the first batch size tried, if the limits allow it */
#define PRECISION 32 /* steps are 1/32 of the batch; the search ends when the interval is below two steps */
#define KEPT      16 /* on a CPU, 1/16 of the memory that was free before the search must stay free */

struct search {
    struct runner *runner;
    uint64_t kept_bytes;
    uint32_t probes;
    char reason[512]; /* the error message of the smallest batch size that did not fit */
};

bool runner_wants_largest(const struct settings *settings)
{
    const struct workload *workload = settings->workload;
    return workload->largest.given && workload->largest.given(settings->parameters) == OPTION_MAX;
}

/* Sets up the variant, runs one step, and tears the variant down. */
static enum status run_step(const struct search *search)
{
    struct runner *runner = search->runner;
    const struct workload *workload = runner->settings->workload;
    const struct variant *variant = runner->entry->variant;
    void *state = NULL;
    TRY(comm_agree(workload->accepts ? workload->accepts(runner->input, variant) : STATUS_OK));
    phase_enter(PHASE_SETUP);
    enum status status = comm_agree(variant->setup(&runner->settings->resources, runner->input, &state));
    if (status == STATUS_OK)
        status = workload->largest.probe(state);
    if (status == STATUS_OK && !runner_on_gpu(runner))
        status = memory_check(search->kept_bytes, "--batch max: a reserve", "lower --batch");
    status = comm_agree(status);
    if (state) {
        phase_enter(PHASE_TEARDOWN);
        variant->teardown(state);
    }
    phase_enter(PHASE_IDLE);
    return status;
}

/* Tries a batch size. The batch does not fit if memory ran out, or if the variant refuses work of this size.
 * All ranks have the same status, so all ranks decide alike. */
static enum status try_batch(struct search *search, uint64_t batch, bool *fits)
{
    struct runner *runner = search->runner;
    const struct settings *settings = runner->settings;
    char phase[96];
    snprintf(phase, sizeof phase, "--batch max: trying %" PRIu64, batch);
    runner_show_phase(runner, phase);
    search->probes++;
    TRY(comm_agree(
        settings->workload->largest.set(runner->input, settings->parameters, &runner->partition, batch, 0)));
    enum status status = run_step(search);
    *fits = status == STATUS_OK;
    if (*fits)
        return STATUS_OK;
    if (status != STATUS_EXHAUSTED && status != STATUS_TOO_LARGE)
        return status_prefix(status, "--batch max, trying %" PRIu64, batch);
    snprintf(search->reason, sizeof search->reason, "%s", status_text());
    return STATUS_OK;
}

/* Doubles the batch size until a batch does not fit, then bisects the interval. `*batch` becomes the largest
 * size that fits, or 0 if none fits. `*above` becomes the smallest size that was too large, or 0 if no size
 * was too large. */
static enum status find(struct search *search, uint64_t least, uint64_t most, uint64_t *batch,
                        uint64_t *above)
{
    uint64_t next = least > FIRST ? least : FIRST;
    *batch = *above = 0;
    while (*above == 0 && *batch < most) {
        bool fits;
        next = next < most ? next : most;
        TRY(try_batch(search, next, &fits));
        *(fits ? batch : above) = next;
        next *= 2;
    }
    while (*above > 0 && *above > least) {
        uint64_t low = *batch ? *batch : least - 1, unit = *batch > PRECISION ? *batch / PRECISION : 1;
        uint64_t steps = (*above - low) / 2 / unit;
        bool fits;
        if (steps == 0)
            break;
        TRY(try_batch(search, low + steps * unit, &fits));
        *(fits ? batch : above) = low + steps * unit;
    }
    return STATUS_OK;
}

enum status runner_find_batch(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    struct search search = {.runner = runner, .kept_bytes = memory_available_bytes() / KEPT};
    uint64_t least, most, batch, above;
    if (settings->variant_count > 1)
        return status_set(STATUS_USAGE,
                          "--batch max: each variant needs a different amount of memory; name one "
                          "with --variant, or give --batch a number");
    if (settings->dry_run)
        return STATUS_OK;
    workload->largest.range(runner->input, settings->parameters, &runner->partition, &least, &most);
    runner->entry = settings->variants[0];
    enum status status = find(&search, least, most, &batch, &above);
    runner_show_phase(runner, NULL);
    TRY(status);
    if (batch == 0)
        return status_set(STATUS_TOO_LARGE, "--batch max: not even a batch of %" PRIu64 " fits: %s", least,
                          search.reason);
    if (above)
        status_say("--batch max: %" PRIu64 " fits, %" PRIu64 " does not (%" PRIu32 " tried)", batch, above,
                   search.probes);
    else
        status_say("--batch max: %" PRIu64 " fits; the data set is too small for more (%" PRIu32 " tried)",
                   batch, search.probes);
    return comm_agree(
        workload->largest.set(runner->input, settings->parameters, &runner->partition, batch, search.probes));
}
