#include "train/parallel_choice.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/text.h"

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

void parallel_name(const struct parallel_way *way, char name[PARALLEL_NAME])
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

bool parallel_fits(const struct parallel_plan *plan, const uint64_t *room_bytes)
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
