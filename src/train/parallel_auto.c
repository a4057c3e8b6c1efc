/* --parallel auto: plans the memory of each way to divide a step, measures the steps of those that fit, and
 * sets the options of the one that parallel_choice.h chooses. A run that resumes takes the choice of its
 * checkpoint, without measuring. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"
#include "train/parallel_choice.h"
#include "train/train_parts.h"

bool train_chooses(const void *parameters)
{
    return ((const struct train_parameters *)parameters)->chooses;
}

/* The choice for a variant: what is given, and the candidates. */
struct choosing {
    const struct options *given;
    struct opened *opened;
    struct train_parameters *parameters;
    struct train_parameters asked; /* the parameters before the choice */
    const struct partition *partition;
    const struct variant *variant;
    const struct resources *resources;
    struct parallel_plan plans[PARALLEL_WAYS_MAX];
    uint32_t count;
    uint64_t *needed, *room; /* per candidate and rank; per rank */
};

/* Sets the options of a way. STATUS_USAGE or STATUS_UNAVAILABLE if the options or the variant exclude it.
 * Collective. */
static enum status set_way(struct choosing *choosing, const struct parallel_way *way)
{
    struct train_parameters *parameters = choosing->parameters;
    *parameters = choosing->asked;
    parameters->chooses = false;
    parameters->parallel = way->stages > 1 ? PARALLEL_PIPELINE : PARALLEL_DATA;
    if (way->stages > 1)
        parameters->stages = way->stages;
    parameters->replicated = way->replicas > 1;
    parameters->checkpoint_activations = way->recomputes;
    enum status status = train_replan(choosing->given, parameters, choosing->partition, choosing->opened);
    if (status == STATUS_OK)
        status = workload_train.suits(choosing->given, parameters, choosing->variant);
    if (status == STATUS_OK)
        status = workload_train.accepts(choosing->opened, choosing->variant);
    return comm_agree(status);
}

/* Turns off what a trial must not read or write. */
static void make_trial(struct choosing *choosing)
{
    struct train_job *job = &choosing->opened->job;
    job->checkpoints = job->step_path = job->log_path = job->state_path = NULL;
    job->resume = job->shows_memory = false;
    job->begin = NULL;
}

/* Adds a way to the candidates with its planned memory, unless it is excluded, or no cut into its stages
 * fits. */
static enum status add_way(struct choosing *choosing, const struct parallel_way *way)
{
    const size_t ranks = (size_t)choosing->partition->ranks;
    uint64_t *needed = choosing->needed + choosing->count * ranks;
    if ((choosing->asked.checkpoint_activations && !way->recomputes) ||
        (way->stages > 1 && options_given(choosing->given, "stages") &&
         way->stages != choosing->asked.stages))
        return STATUS_OK;
    enum status status = set_way(choosing, way);
    if (status == STATUS_USAGE || status == STATUS_UNAVAILABLE)
        return STATUS_OK;
    TRY(status);
    make_trial(choosing);
    status =
        train_plan_ranks(choosing->opened, choosing->variant, choosing->resources, needed, choosing->room);
    if (way->stages > 1 && (status == STATUS_TOO_LARGE || status == STATUS_EXHAUSTED))
        return STATUS_OK; /* no cut fits */
    TRY(status);
    choosing->plans[choosing->count++] =
        (struct parallel_plan){.way = *way,
                               .needed_bytes = needed,
                               .step_s = NAN,
                               .samples = train_part_max(&choosing->opened->job.train)};
    return STATUS_OK;
}

/* Measures the step of a candidate that fits. If it does not fit after all, leaves the time unknown. */
static enum status measure(struct choosing *choosing, struct parallel_plan *plan)
{
    void *state = NULL;
    TRY(set_way(choosing, &plan->way));
    make_trial(choosing);
    enum status status = comm_agree(choosing->variant->setup(choosing->resources, choosing->opened, &state));
    if (status == STATUS_OK)
        status = comm_agree(trainer_probe_step(state, &plan->step_s));
    if (state)
        choosing->variant->teardown(state);
    if (status == STATUS_TOO_LARGE || status == STATUS_EXHAUSTED) {
        plan->step_s = NAN;
        return STATUS_OK;
    }
    return status;
}

/* For the message if nothing fits: sets by how much the memory of a data-parallel way grows per sample, from
 * a plan with half of the batch. */
static enum status find_growth(struct choosing *choosing, struct parallel_plan *plan, uint64_t *scratch)
{
    struct train *train = &choosing->opened->job.train;
    const uint32_t ranks = (uint32_t)choosing->partition->ranks, batch = train->batch;
    if (plan->way.stages > 1 || plan->samples < 2 || choosing->opened->data.mixture)
        return STATUS_OK;
    TRY(set_way(choosing, &plan->way));
    make_trial(choosing);
    train->batch =
        train->batch / 2 > ranks * train_parts(train) ? train->batch / 2 : ranks * train_parts(train);
    train->shares = NULL;
    train->share_max = 0;
    choosing->opened->job.shares = NULL;
    const uint64_t samples = train_part_max(train);
    const enum status status =
        train_plan_ranks(choosing->opened, choosing->variant, choosing->resources, scratch, scratch + ranks);
    train->batch = batch;
    TRY(status);
    if (samples < plan->samples && scratch[0] < plan->needed_bytes[0])
        plan->sample_bytes = (double)(plan->needed_bytes[0] - scratch[0]) / (double)(plan->samples - samples);
    return STATUS_OK;
}

/* Chooses among the candidates: by the name in a checkpoint, or by measuring. Sets `*chosen` to the index;
 * PARALLEL_NONE if nothing fits. Rank 0 decides for all, because names and times are the same only there. */
static enum status decide(struct choosing *choosing, int *chosen, char *why, size_t size)
{
    char name[PARALLEL_NAME], kept[PARALLEL_NAME] = "";
    const size_t ranks = (size_t)choosing->partition->ranks;
    enum status status = STATUS_OK;
    *chosen = PARALLEL_NONE;
    if (choosing->asked.resume && comm_rank() == 0)
        status = resume_take_choice(choosing->asked.checkpoint, kept, sizeof kept);
    TRY(comm_agree(status));
    TRY(comm_spread(kept, sizeof kept));
    for (uint32_t i = 0; *kept && i < choosing->count; i++) {
        parallel_name(&choosing->plans[i].way, name);
        if (strcmp(name, kept) == 0 && parallel_fits(&choosing->plans[i], choosing->room)) {
            *chosen = (int)i;
            snprintf(why, size, "%s, as before the checkpoint", name);
            return STATUS_OK;
        }
    }
    bool fits = false;
    for (uint32_t i = 0; i < choosing->count; i++)
        fits |= parallel_fits(&choosing->plans[i], choosing->room);
    for (uint32_t i = 0; i < choosing->count; i++)
        if (fits && parallel_fits(&choosing->plans[i], choosing->room))
            TRY(measure(choosing, &choosing->plans[i]));
        else if (!fits)
            TRY(find_growth(choosing, &choosing->plans[i], choosing->needed + choosing->count * ranks));
    *chosen = parallel_choose(choosing->plans, choosing->count, choosing->room,
                              choosing->opened->context_bytes, why, size);
    return comm_spread(chosen, sizeof *chosen);
}

/* Lists the candidates, chooses one, and sets its options. `choosing` has room for the candidates. */
static enum status choose(struct choosing *choosing)
{
    static char name[PARALLEL_NAME]; /* of the choice, for the checkpoints of this run */
    struct parallel_way ways[PARALLEL_WAYS_MAX];
    const uint32_t count = parallel_ways((uint32_t)choosing->partition->ranks, ways);
    char why[1024];
    int chosen;
    for (uint32_t i = 0; i < count; i++) {
        ways[i].on_cpu = strcmp(choosing->variant->platform, "cuda") != 0;
        TRY(add_way(choosing, &ways[i]));
    }
    if (choosing->count == 0)
        return set_way(choosing, &ways[0]); /* says what excludes it */
    TRY(decide(choosing, &chosen, why, sizeof why));
    if (chosen == PARALLEL_NONE)
        return status_set(STATUS_TOO_LARGE, "--parallel auto: %s", why);
    TRY(set_way(choosing, &choosing->plans[chosen].way));
    parallel_name(&choosing->plans[chosen].way, name);
    choosing->opened->job.choice = name;
    if (!isnan(choosing->plans[chosen].step_s))
        choosing->opened->chosen_step_s = choosing->plans[chosen].step_s;
    status_say("--parallel auto: %s", why);
    return STATUS_OK;
}

enum status train_choose(const struct options *given, void *input, void *parameters,
                         const struct partition *partition, const struct variant *variant,
                         const struct resources *resources)
{
    const size_t ranks = (size_t)partition->ranks;
    struct choosing choosing = {.given = given,
                                .opened = input,
                                .parameters = parameters,
                                .asked = *(struct train_parameters *)parameters,
                                .partition = partition,
                                .variant = variant,
                                .resources = resources};
    /* Room for all candidates, for a plan of find_growth(), and for the ranks. */
    FREED uint64_t *numbers = calloc((PARALLEL_WAYS_MAX + 3) * ranks, sizeof *numbers);
    TRY(comm_agree(ALLOCATED(numbers, "out of memory to choose")));
    choosing.needed = numbers;
    choosing.room = numbers + (PARALLEL_WAYS_MAX + 2) * ranks;
    return choose(&choosing);
}
