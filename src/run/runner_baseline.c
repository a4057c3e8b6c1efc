/* The baseline and the speed-ups over it. */
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "run/runner_parts.h"

/* Returns the index of the variant with this name among the chosen variants, or settings->variant_count if it
 * is not chosen. */
static size_t find_chosen(const struct settings *settings, const char *name)
{
    size_t i = 0;
    while (i < settings->variant_count && strcmp(settings->variants[i]->name, name) != 0)
        i++;
    return i;
}

enum status runner_choose_baseline(struct runner *runner)
{
    struct settings *settings = runner->settings;
    const char *const *names = settings->workload->baselines;
    size_t place = settings->variant_count;
    if (settings->baseline)
        place = find_chosen(settings, settings->baseline);
    for (; !settings->baseline && place == settings->variant_count && *names; names++)
        place = find_chosen(settings, *names);
    if (settings->baseline && place == settings->variant_count && !variant_find(settings->baseline))
        return variant_unknown("--baseline: ", settings->baseline);
    if (settings->baseline && place == settings->variant_count)
        return status_set(STATUS_USAGE,
                          "--baseline %s: it is not among the variants that run; add it to --variant",
                          settings->baseline);
    if (place == settings->variant_count)
        return STATUS_OK;
    const struct variant_entry *entry = settings->variants[place];
    memmove(&settings->variants[1], &settings->variants[0], place * sizeof *settings->variants);
    settings->variants[0] = runner->baseline.entry = entry;
    return STATUS_OK;
}

void runner_free_baseline(struct runner *runner)
{
    free(runner->baseline.own.item_s);
    free(runner->baseline.all.item_s);
}

/* Inserts a time in ascending order. */
static enum status add_time(struct baseline_times *times, double item_s)
{
    size_t i = times->count;
    TRY(ALLOCATED(array_grow(&times->item_s, times->count, sizeof *times->item_s),
                  "out of memory for the times of the baseline"));
    for (; i > 0 && times->item_s[i - 1] > item_s; i--)
        times->item_s[i] = times->item_s[i - 1];
    times->item_s[i] = item_s;
    times->count++;
    return STATUS_OK;
}

enum status runner_compare(struct runner *runner, bool all, const struct result *result, struct row *row)
{
    struct baseline *baseline = &runner->baseline;
    struct baseline_times *times = all ? &baseline->all : &baseline->own;
    double item_s = result->bench.time.median / result->work.items;
    bool itself = baseline->entry == runner->entry;
    if (itself)
        TRY(add_time(times, item_s));
    if (times->count == 0)
        return STATUS_OK;
    /* The median over the baseline's rows; there may be one row per epoch. */
    row_positive(row, "speedup", itself ? 1 : stats_quantile(times->item_s, times->count, 0.5) / item_s);
    if (row_value(row, "speedup"))
        row_text(row, "baseline", baseline->entry->name);
    return STATUS_OK;
}
