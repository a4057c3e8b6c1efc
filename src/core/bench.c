#include "core/bench.h"

#include <stdlib.h>

#include "core/range.h"
#include "core/timer.h"

/* One run, with its wall time and, where the variant gives it, its device time. */
static enum status timed_run(const struct variant *variant, void *state, uint64_t number,
                             struct sample *sample)
{
    struct run_time time = {.device_s = -1.0};
    if (variant->ready)
        TRY(variant->ready(state, number));
    double begin_s = timer_now_s();
    TRY(variant->run(state, number, &time));
    sample->wall_s = timer_now_s() - begin_s;
    sample->device_s = time.device_s;
    return STATUS_OK;
}

static enum status warm_up(const struct variant *variant, void *state, const struct bench_limits *limits,
                           struct bench *bench)
{
    struct sample unused;
    double begin_s = timer_now_s();
    range_push("warm-up");
    enum status status = STATUS_OK;
    while (status == STATUS_OK &&
           (bench->warmups < limits->warmups || timer_now_s() - begin_s < limits->warmup_time_s))
        status = timed_run(variant, state, ++bench->warmups, &unused);
    range_pop();
    return status;
}

static enum status add_sample(struct bench *bench, struct sample sample)
{
    if (bench->count == bench->capacity) {
        size_t capacity = bench->capacity ? 2 * bench->capacity : 64;
        struct sample *samples = realloc(bench->samples, capacity * sizeof *samples);
        if (!samples)
            return status_set(STATUS_FAILED, "out of memory for %zu samples; lower --max-time", capacity);
        bench->samples = samples;
        bench->capacity = capacity;
    }
    bench->samples[bench->count++] = sample;
    return STATUS_OK;
}

/* Fills bench->time and bench->wall_s from the samples so far. */
static enum status summarise(struct bench *bench)
{
    double *values = malloc(bench->count * sizeof *values);
    if (!values)
        return status_set(STATUS_FAILED, "out of memory for the statistics of %zu samples", bench->count);
    struct stats wall;
    for (size_t i = 0; i < bench->count; i++)
        values[i] = bench->samples[i].wall_s;
    enum status status = stats_compute(values, bench->count, &wall);
    bench->wall_s = wall.median;
    bench->time = wall;
    bench->on_device = bench->samples[0].device_s >= 0;
    if (bench->on_device) {
        for (size_t i = 0; i < bench->count; i++)
            values[i] = bench->samples[i].device_s;
        if (status == STATUS_OK)
            status = stats_compute(values, bench->count, &bench->time);
    }
    free(values);
    return status;
}

/* Whether to stop. The statistics cost a sort, so they are only renewed each time the number of samples has
 * grown by a sixteenth: their cost stays small beside even the shortest runs. */
static enum status decide(struct bench *bench, const struct bench_limits *limits, double elapsed_s,
                          size_t *next_look, bool *stop)
{
    if (bench->count < limits->min_samples)
        return STATUS_OK;
    bool out_of_time = elapsed_s >= limits->max_time_s;
    if (!out_of_time && (elapsed_s < limits->min_time_s || bench->count < *next_look))
        return STATUS_OK;
    *next_look = bench->count + bench->count / 16 + 1;
    TRY(summarise(bench));
    bench->settled = bench->time.median_error < limits->max_median_error;
    *stop = bench->settled || out_of_time;
    return STATUS_OK;
}

static enum status take_samples(const struct variant *variant, void *state, const struct bench_limits *limits,
                                bench_progress *progress, void *context, struct bench *bench)
{
    double begin_s = timer_now_s();
    size_t next_look = 0;
    bool stop = false;
    while (!stop) {
        struct sample sample;
        range_push("sample");
        enum status status = timed_run(variant, state, bench->warmups + bench->count + 1, &sample);
        range_pop();
        TRY(status);
        TRY(add_sample(bench, sample));
        double elapsed_s = timer_now_s() - begin_s;
        if (progress)
            progress(context, bench->count, elapsed_s, limits->max_time_s);
        TRY(decide(bench, limits, elapsed_s, &next_look, &stop));
    }
    return STATUS_OK;
}

enum status bench_measure(const struct variant *variant, void *state, const struct bench_limits *limits,
                          bench_progress *progress, void *context, struct bench *bench)
{
    *bench = (struct bench){0};
    enum status status = warm_up(variant, state, limits, bench);
    if (status == STATUS_OK)
        status = take_samples(variant, state, limits, progress, context, bench);
    if (status != STATUS_OK)
        bench_free(bench);
    return status;
}

void bench_free(struct bench *bench)
{
    free(bench->samples);
    *bench = (struct bench){0};
}
