#include "core/bench.h"

#include <stdlib.h>

#include "core/phase.h"
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

/* Whether it goes on, in step with the other ranks where there are any. */
static enum status keep_step(const struct bench_limits *limits, enum status status, bool *stop)
{
    return limits->vote ? limits->vote(status, stop) : status;
}

static enum status warm_up(const struct variant *variant, void *state, const struct bench_limits *limits,
                           struct bench *bench)
{
    struct sample unused;
    double begin_s = timer_now_s();
    enum status status = STATUS_OK;
    for (;;) {
        bool stop = bench->warmups >= limits->warmups && timer_now_s() - begin_s >= limits->warmup_time_s;
        status = keep_step(limits, status, &stop);
        if (status != STATUS_OK || stop)
            break;
        status = timed_run(variant, state, ++bench->warmups, &unused);
    }
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

enum status bench_summarise(struct bench *bench, double max_median_error)
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
    bench->looked = bench->count;
    bench->settled = bench->time.median_error < max_median_error;
    return status;
}

/* Whether this rank has enough. The statistics cost a sort, so they are only renewed each time the number of
 * samples has grown by a sixteenth: their cost stays small beside even the shortest runs. */
static enum status decide(struct bench *bench, const struct bench_limits *limits, double elapsed_s,
                          bool *enough)
{
    if (bench->count < limits->min_samples)
        return STATUS_OK;
    bool out_of_time = elapsed_s >= limits->max_time_s;
    size_t next_look = bench->looked ? bench->looked + bench->looked / 16 + 1 : 0;
    if (!out_of_time && (elapsed_s < limits->min_time_s || bench->count < next_look))
        return STATUS_OK;
    TRY(bench_summarise(bench, limits->max_median_error));
    *enough = bench->settled || out_of_time;
    return STATUS_OK;
}

static enum status take_sample(const struct variant *variant, void *state, struct bench *bench)
{
    struct sample sample;
    range_push("sample");
    enum status status = timed_run(variant, state, bench->warmups + bench->count + 1, &sample);
    range_pop();
    TRY(status);
    return add_sample(bench, sample);
}

static enum status take_samples(const struct variant *variant, void *state, const struct bench_limits *limits,
                                bench_progress *progress, void *context, struct bench *bench)
{
    double begin_s = timer_now_s();
    enum status status = STATUS_OK;
    bool enough = false;
    for (;;) {
        bool stop = enough;
        TRY(keep_step(limits, status, &stop));
        if (stop)
            break;
        status = take_sample(variant, state, bench);
        double elapsed_s = timer_now_s() - begin_s;
        if (status == STATUS_OK && progress)
            progress(context, bench->count, elapsed_s, limits->max_time_s);
        if (status == STATUS_OK && !enough)
            status = decide(bench, limits, elapsed_s, &enough);
    }
    /* Another rank may have wanted more. */
    return bench->looked < bench->count ? bench_summarise(bench, limits->max_median_error) : STATUS_OK;
}

enum status bench_measure(const struct variant *variant, void *state, const struct bench_limits *limits,
                          bench_progress *progress, void *context, struct bench *bench)
{
    *bench = (struct bench){0};
    phase_enter(PHASE_WARM_UP);
    enum status status = warm_up(variant, state, limits, bench);
    if (status == STATUS_OK) {
        phase_enter(PHASE_TIMED);
        status = take_samples(variant, state, limits, progress, context, bench);
    }
    if (status != STATUS_OK)
        bench_free(bench);
    return status;
}

void bench_free(struct bench *bench)
{
    free(bench->samples);
    *bench = (struct bench){0};
}
