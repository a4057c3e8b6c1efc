/* How the ranks divide a step: the memory that it needs (--memory-limit), the weights of ranks (--balance),
 * and the choice of the best way (--parallel auto). */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/options.h"
#include "core/parallel.h"
#include "core/portable.h"
#include "core/text.h"
#include "machine/comm.h"
#include "train/engine.h"
#include "train/train.h"
#include "train/trainer.h"

/* ---- Memory ---- */

#define LIMIT_LEAST_BYTES 1024.0
#define LIMIT_MOST_BYTES  0x1p60

/* ---- Accounts ---- */

uint64_t memory_total(const struct memory_account *account)
{
    uint64_t total = 0;
    for (int part = 0; part < MEMORY_PARTS; part++)
        total += account->bytes[part];
    return total;
}

enum status memory_take(struct memory_account *account, enum memory_part part, uint64_t bytes)
{
    if (!account)
        return STATUS_OK;
    const uint64_t used = memory_total(account);
    if (account->limit_bytes && !account->plans && bytes > 0 && used + bytes > account->limit_bytes)
        return status_set(STATUS_TOO_LARGE,
                          "--memory-limit: %.3f GB in use, %.3f GB more needed, but the limit is %.3f GB; "
                          "lower --batch",
                          1e-9 * (double)used, 1e-9 * (double)bytes, 1e-9 * (double)account->limit_bytes);
    account->bytes[part] += bytes;
    return STATUS_OK;
}

/* Prints a row of the table. */
static void print_row(const char *name, uint64_t planned, const uint64_t *allocated, const char *note)
{
    char second[64] = "";
    if (allocated)
        snprintf(second, sizeof second, " %12.1f", 1e-6 * (double)*allocated);
    status_say("  %-12s %11.1f%s%s", name, 1e-6 * (double)planned, second, note);
}

void memory_print(const char *title, const struct memory_account *planned,
                  const struct memory_account *allocated, uint64_t measured_bytes)
{
    static const char *const names[MEMORY_PARTS] = {
        [MEMORY_ACTIVATIONS] = "activations", [MEMORY_PARAMETERS] = "parameters",
        [MEMORY_GRADIENTS] = "gradients",     [MEMORY_OPTIMIZER] = "optimizer",
        [MEMORY_WORKSPACE] = "workspace",     [MEMORY_SAMPLES] = "samples",
        [MEMORY_STREAM] = "stream",           [MEMORY_CONTEXT] = "context"};
    const uint64_t planned_bytes = memory_total(planned), sum = allocated ? memory_total(allocated) : 0;
    char note[96] = "";
    if (allocated)
        snprintf(note, sizeof note, "  (%.1f MB in use: %+.1f %% of the plan)", 1e-6 * (double)measured_bytes,
                 100 * ((double)measured_bytes / (double)planned_bytes - 1));
    status_say("%s", title);
    status_say("  %-12s %11s%s", "", "planned MB", allocated ? " allocated MB" : "");
    for (int part = 0; part < MEMORY_PARTS; part++)
        print_row(names[part], planned->bytes[part], allocated ? &allocated->bytes[part] : NULL, "");
    print_row("total", planned_bytes, allocated ? &sum : NULL, note);
}

uint64_t memory_largest_batch(uint64_t small, uint64_t small_bytes, uint64_t large, uint64_t large_bytes,
                              uint64_t limit_bytes)
{
    if (large_bytes <= small_bytes || large <= small)
        return large_bytes <= limit_bytes ? large : small_bytes <= limit_bytes ? small : 0;
    const double each = (double)(large_bytes - small_bytes) / (double)(large - small),
                 fixed = (double)small_bytes - each * (double)small,
                 batch = floor(((double)limit_bytes - fixed) / each);
    return batch >= 1 ? (uint64_t)batch : 0;
}

/* ---- --memory-limit ---- */

enum status memory_limit_parse(const char *text, uint32_t ranks, uint64_t *limits)
{
    uint32_t count = 0;
    for (const char *at = text; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char word[32];
        uint64_t bytes;
        if (snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at) >= (int)sizeof word)
            return status_set(STATUS_USAGE, "--memory-limit: '%.80s' is not a size, such as 16G", at);
        TRY(parse_bytes("--memory-limit", word, LIMIT_LEAST_BYTES, LIMIT_MOST_BYTES, &bytes));
        if (count < ranks)
            limits[count] = bytes;
        count++;
    }
    for (uint32_t i = 1; count == 1 && i < ranks; i++)
        limits[i] = limits[0];
    return count == 1 || count == ranks
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--memory-limit %.80s has %" PRIu32 " sizes, but there %s %" PRIu32
                            " rank%s; give one size, or one per rank",
                            text, count, ranks == 1 ? "is" : "are", ranks, ranks == 1 ? "" : "s");
}

/* ---- --balance ---- */

#define WEIGHT_MAX 1e6

/* ---- The option ---- */

/* Parses the numbers of "3:1" into `weights`, which has room for `ranks`. Sets `*count` to the number of
 * weights in the text, even if it exceeds `ranks`. */
static enum status parse_weights(const char *text, uint32_t ranks, double *weights, uint32_t *count)
{
    double sum = 0;
    *count = 0;
    for (const char *at = text; at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
        char number[32];
        uint64_t weight;
        snprintf(number, sizeof number, "%.*s", (int)strcspn(at, ":"), at);
        if (parse_count("--balance", number, 0, WEIGHT_MAX, &weight) != STATUS_OK)
            return status_set(STATUS_USAGE,
                              "--balance: '%.80s' is not equal, measured, memory or a list of whole "
                              "numbers from 0 to %.0f, such as 3:1",
                              text, WEIGHT_MAX);
        if (*count < ranks)
            weights[*count] = (double)weight;
        sum += (double)weight;
        ++*count;
    }
    return sum > 0 ? STATUS_OK
                   : status_set(STATUS_USAGE,
                                "--balance %.80s leaves no samples to any rank; give at least "
                                "one rank a number above 0",
                                text);
}

enum status balance_parse(const char *text, uint32_t ranks, enum balance *balance, double *weights)
{
    static const char *const names[] = {"equal", "measured", "memory"}; /* indexed by enum balance */
    uint32_t count;
    for (uint32_t i = 0; i < ranks; i++)
        weights[i] = 1;
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (strcmp(text, names[i]) == 0) {
            *balance = (enum balance)i;
            return STATUS_OK;
        }
    *balance = BALANCE_FIXED;
    TRY(parse_weights(text, ranks, weights, &count));
    return count == ranks ? STATUS_OK
                          : status_set(STATUS_USAGE,
                                       "--balance %.80s has %" PRIu32 " number%s, but there %s %" PRIu32
                                       " rank%s; give one number per rank",
                                       text, count, count == 1 ? "" : "s", ranks == 1 ? "is" : "are", ranks,
                                       ranks == 1 ? "" : "s");
}

/* ---- Shares by speed ---- */

/* Returns the time of the slowest rank. */
static double step_s(const double *speeds, uint32_t ranks, const uint32_t *shares)
{
    double longest_s = 0;
    for (uint32_t i = 0; i < ranks; i++)
        if (shares[i] > 0)
            longest_s = fmax(longest_s, shares[i] / speeds[i]);
    return longest_s;
}

double balance_gain(const double *speeds, uint32_t ranks, const uint32_t *now, const uint32_t *next)
{
    return 1 - step_s(speeds, ranks, next) / step_s(speeds, ranks, now);
}

double balance_improve(const double *speeds, uint32_t ranks, double gain_min, const uint32_t *now,
                       uint32_t *next)
{
    uint32_t batch = 0;
    bool known = true;
    for (uint32_t i = 0; i < ranks; i++) {
        batch += now[i];
        known &= isfinite(speeds[i]) && speeds[i] > 0;
    }
    if (known) {
        partition_divide(speeds, ranks, batch, 1, next);
        double gain = balance_gain(speeds, ranks, now, next);
        if (gain > gain_min)
            return gain;
    }
    memcpy(next, now, ranks * sizeof *next);
    return 0;
}

bool balance_continues(const struct checkpoint *checkpoint, enum balance balance, uint32_t ranks,
                       uint32_t batch)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < checkpoint->share_count; i++)
        sum += checkpoint->shares[i];
    return checkpoint->balance == balance && checkpoint->share_count == ranks && sum == batch;
}

/* ---- The choice of a division ---- */

#define GB 1e-9

static uint32_t gpus_of(const struct parallel_way *way)
{
    return way->stages * way->replicas;
}

/* Returns the name of what has a part of the step. */
static const char *part_of(const struct parallel_way *way)
{
    return way->on_cpu ? "rank" : "GPU";
}

uint32_t parallel_ways(uint32_t gpus, struct parallel_way ways[PARALLEL_WAYS_MAX])
{
    uint32_t count = 0;
    for (uint32_t stages = 1; stages <= gpus; stages++)
        for (int recomputes = 0; gpus % stages == 0 && recomputes < 2 && count < PARALLEL_WAYS_MAX;
             recomputes++)
            ways[count++] = (struct parallel_way){stages, gpus / stages, recomputes > 0, false};
    return count;
}

/* Writes the name of a way, such as "data parallel on 4 GPUs, recomputing". */
static void parallel_name(const struct parallel_way *way, char name[PARALLEL_NAME])
{
    const char *part = part_of(way);
    if (gpus_of(way) == 1)
        snprintf(name, PARALLEL_NAME, "one %s", part);
    else if (way->stages == 1)
        snprintf(name, PARALLEL_NAME, "data parallel on %" PRIu32 " %ss", way->replicas, part);
    else if (way->replicas == 1)
        snprintf(name, PARALLEL_NAME, "a pipeline of %" PRIu32 " %ss", way->stages, part);
    else
        snprintf(name, PARALLEL_NAME, "%" PRIu32 " pipelines of %" PRIu32 " %ss", way->replicas, way->stages,
                 part);
    if (way->recomputes)
        text_append(name, PARALLEL_NAME, ", recomputing");
}

/* Returns the GPU with the least room besides the planned memory. */
static uint32_t tightest(const struct parallel_plan *plan, const uint64_t *room_bytes)
{
    uint32_t worst = 0;
    for (uint32_t i = 1; i < gpus_of(&plan->way); i++)
        if ((double)room_bytes[i] - (double)plan->needed_bytes[i] <
            (double)room_bytes[worst] - (double)plan->needed_bytes[worst])
            worst = i;
    return worst;
}

/* Returns whether a plan fits into the memory of each GPU: `room_bytes`, one per GPU. */
static bool parallel_fits(const struct parallel_plan *plan, const uint64_t *room_bytes)
{
    const uint32_t worst = tightest(plan, room_bytes);
    return plan->needed_bytes[worst] <= room_bytes[worst];
}

/* Returns the plan that exceeds the memory of a GPU least, and sets `*missing` to the bytes that it lacks. */
static const struct parallel_plan *smallest(const struct parallel_plan *plans, uint32_t count,
                                            const uint64_t *room_bytes, double *missing)
{
    const struct parallel_plan *least = plans;
    *missing = INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t worst = tightest(&plans[i], room_bytes);
        const double lacks = (double)plans[i].needed_bytes[worst] - (double)room_bytes[worst];
        if (lacks < *missing) {
            *missing = lacks;
            least = &plans[i];
        }
    }
    return least;
}

/* Returns the number of GPUs on which the parts of `plan` would fit: with data parallel, if the samples are
 * divided among more of them; else, if the whole memory of all stages is divided evenly. 0 if none would. */
static uint32_t gpus_needed(const struct parallel_plan *plan, const uint64_t *room_bytes,
                            uint64_t context_bytes, bool pipeline)
{
    const uint32_t worst = tightest(plan, room_bytes), gpus = gpus_of(&plan->way);
    const double room = (double)room_bytes[worst] - (double)context_bytes;
    double divided = 0;
    if (!pipeline) {
        const double fits =
            floor(((double)room_bytes[worst] - (double)plan->needed_bytes[worst]) / plan->sample_bytes) +
            (double)plan->samples;
        return plan->way.stages == 1 && plan->sample_bytes > 0 && fits >= 1
                   ? (uint32_t)ceil((double)plan->samples * gpus / fits)
                   : 0;
    }
    for (uint32_t i = 0; i < gpus; i++)
        divided += (double)plan->needed_bytes[i] - (double)context_bytes;
    /* Each replica of the plan has the whole network. */
    return room > 0 ? (uint32_t)ceil(divided / plan->way.replicas / room) : 0;
}

/* Names the smallest set-up that would fit, because no plan does. */
static void refuse(const struct parallel_plan *plans, uint32_t count, const uint64_t *room_bytes,
                   uint64_t context_bytes, char *why, size_t size)
{
    double missing;
    char name[PARALLEL_NAME];
    const struct parallel_plan *least = smallest(plans, count, room_bytes, &missing);
    const uint32_t worst = tightest(least, room_bytes);
    const uint32_t by_data = gpus_needed(least, room_bytes, context_bytes, false),
                   by_stages = gpus_needed(least, room_bytes, context_bytes, true);
    const char *part = part_of(&least->way);
    parallel_name(&least->way, name);
    snprintf(why, size,
             "nothing fits; %s comes closest: %s %" PRIu32 " needs %.3f GB of %.3f GB; what would fit: ",
             name, part, worst, GB * (double)least->needed_bytes[worst], GB * (double)room_bytes[worst]);
    const double fits =
        least->sample_bytes > 0 ? (double)least->samples - ceil(missing / least->sample_bytes) : 0;
    const size_t before = strlen(why);
    if (fits >= 1)
        text_append(why, size, "%.0f samples per %s instead of %" PRIu64 ", ", fits, part, least->samples);
    const bool by_more = by_data > gpus_of(&least->way) || by_stages > gpus_of(&least->way);
    if (by_data > gpus_of(&least->way))
        text_append(why, size, "%" PRIu32 " %ss (data parallel, --scaling strong), ", by_data, part);
    else if (by_more)
        text_append(why, size, "about %" PRIu32 " %ss (pipeline), ", by_stages, part);
    text_append(why, size, "%s%.3f GB per %s", strlen(why) > before ? "or " : "",
                GB * (double)least->needed_bytes[worst], part);
}

/* Writes why `chosen` was chosen, and why not the others. */
static void explain(const struct parallel_plan *plans, uint32_t count, const uint64_t *room_bytes, int chosen,
                    char *why, size_t size)
{
    char name[PARALLEL_NAME];
    parallel_name(&plans[chosen].way, name);
    snprintf(why, size, "%s (%.3f ms per step)", name, 1e3 * plans[chosen].step_s);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t worst = tightest(&plans[i], room_bytes);
        if ((int)i == chosen)
            continue;
        parallel_name(&plans[i].way, name);
        if (!parallel_fits(&plans[i], room_bytes))
            text_append(why, size, "; %s needs %.3f GB of %.3f GB", name,
                        GB * (double)plans[i].needed_bytes[worst], GB * (double)room_bytes[worst]);
        else
            text_append(why, size, "; %s takes %.3f ms", name, 1e3 * plans[i].step_s);
    }
}

int parallel_choose(const struct parallel_plan *plans, uint32_t count, const uint64_t *room_bytes,
                    uint64_t context_bytes, char *why, size_t size)
{
    int chosen = PARALLEL_NONE;
    for (uint32_t i = 0; i < count; i++)
        if (parallel_fits(&plans[i], room_bytes) && !isnan(plans[i].step_s) &&
            (chosen == PARALLEL_NONE || plans[i].step_s < (1 - PARALLEL_GAIN) * plans[chosen].step_s))
            chosen = (int)i;
    if (chosen == PARALLEL_NONE)
        refuse(plans, count, room_bytes, context_bytes, why, size);
    else
        explain(plans, count, room_bytes, chosen, why, size);
    return chosen;
}

/* ---- --parallel auto ---- */

/* Plans the memory of each way to divide a step, measures the steps of those that fit, and sets the options
 * of the one that parallel_choose() chooses. A run that resumes takes the choice of its checkpoint, without
 * measuring. */

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
