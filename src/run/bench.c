#include "run/bench.h"

#include <stdlib.h>
#include <sys/resource.h>

#include "core/array.h"
#include "core/phase.h"
#include "core/timer.h"

/* Performs one run and measures its wall time and, if the variant supports it, its device time. */
static enum status timed_run(const struct variant *variant, void *state, uint64_t number,
                             struct sample *sample)
{
    struct run_time time = {.device_s = -1.0};
    if (variant->ready)
        TRY(variant->ready(state, number));
    double begin_s = timer_now_s();
    TRY(variant->run(state, number, &time));
    sample->wall_s = timer_now_s() - begin_s + time.other_s;
    sample->device_s = time.device_s;
    return STATUS_OK;
}

/* With several ranks, returns the worst status of all ranks, and replaces each value by its maximum over all
 * ranks. */
static enum status keep_step(struct bench_together *together, enum status status, double *values,
                             size_t count)
{
    return together ? together->vote(status, values, count) : status;
}

static enum status warm_up(const struct variant *variant, void *state, const struct bench_limits *limits,
                           struct bench *bench, struct bench_together *together)
{
    struct sample unused;
    double begin_s = timer_now_s();
    enum status status = STATUS_OK;
    for (;;) {
        bool warm = bench->warmups >= limits->warmups && timer_now_s() - begin_s >= limits->warmup_time_s;
        double more = !warm;
        TRY(keep_step(together, status, &more, 1));
        if (more == 0)
            return STATUS_OK;
        status = timed_run(variant, state, ++bench->warmups, &unused);
    }
}

/* Makes room for one more sample. */
static enum status make_room(struct bench *bench)
{
    return ALLOCATED(array_grow(&bench->samples, bench->count, sizeof *bench->samples),
                     "out of memory for %zu samples; lower --max-time or --loops", bench->count + 1);
}

/* Computes the statistics and bench->settled from bench->samples, which must not be empty. */
static enum status summarise(struct bench *bench, double max_median_error)
{
    double *values = malloc(bench->count * sizeof *values);
    TRY(ALLOCATED(values, "out of memory for the statistics of %zu samples", bench->count));
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

/* Sets `*enough` if there are enough samples. All ranks reach the same decision, because all pass the same
 * samples and elapsed time. Computing the statistics sorts all samples. To keep this cost low even for the
 * shortest runs, the statistics are computed again only when the number of samples has grown by 1/16, or when
 * the time is over. */
static enum status decide(struct bench *bench, const struct bench_limits *limits, double elapsed_s,
                          struct bench_together *together, bool *enough)
{
    *enough = false;
    if (bench->count < limits->min_samples)
        return STATUS_OK;
    bool out_of_time = elapsed_s >= limits->max_time_s;
    size_t next_look = bench->looked ? bench->looked + bench->looked / 16 + 1 : 0;
    if (!out_of_time && (elapsed_s < limits->min_time_s || bench->count < next_look))
        return STATUS_OK;
    enum status status = summarise(bench, limits->max_median_error);
    double more = !(bench->settled || out_of_time);
    TRY(keep_step(together, status, &more, 1)); /* summarise() may fail on a single rank */
    *enough = more == 0;
    return STATUS_OK;
}

static enum status take_sample(const struct variant *variant, void *state, uint64_t number,
                               struct bench *bench, struct sample *sample)
{
    TRY(make_room(bench));
    range_push("sample");
    enum status status = timed_run(variant, state, number, sample);
    range_pop();
    return status;
}

/* A clock reading, and the CPU time and involuntary context switches of this process until this reading. */
struct usage {
    double clock_s, cpu_s;
    uint64_t preempted;
};

static struct usage usage_now(void)
{
    struct rusage usage = {0};
    getrusage(RUSAGE_SELF, &usage); /* cannot fail with these arguments */
    const struct timeval *user = &usage.ru_utime, *kernel = &usage.ru_stime;
    double cpu_s = (double)(user->tv_sec + kernel->tv_sec) + 1e-6 * (double)(user->tv_usec + kernel->tv_usec);
    return (struct usage){timer_now_s(), cpu_s, (uint64_t)usage.ru_nivcsw};
}

static void keep_usage(struct bench *bench, const struct usage *begin)
{
    struct usage end = usage_now();
    bench->span_s = end.clock_s - begin->clock_s;
    bench->cpu_s = end.cpu_s - begin->cpu_s;
    bench->preempted = end.preempted - begin->preempted;
}

static enum status take_samples(const struct variant *variant, void *state, const struct bench_limits *limits,
                                bench_progress *progress, void *context, struct bench *bench,
                                struct bench_together *together)
{
    struct bench *deciding = together ? &together->bench : bench;
    struct usage begin = usage_now();
    for (bool enough = false; !enough;) {
        struct sample sample = {0};
        enum status status = take_sample(variant, state, bench->warmups + bench->count + 1, bench, &sample);
        if (status == STATUS_OK && together)
            status = make_room(deciding);
        double elapsed_s = timer_now_s() - begin.clock_s;
        if (status == STATUS_OK && progress)
            progress(context, bench->count + 1, elapsed_s, limits->max_time_s);
        /* Either all ranks measure device time, or it is negative on all ranks. */
        double slowest[] = {sample.wall_s, sample.device_s, elapsed_s};
        TRY(keep_step(together, status, slowest, COUNT_OF(slowest)));
        bench->samples[bench->count++] = sample;
        bench->timed_s += sample.wall_s;
        if (together)
            deciding->samples[deciding->count++] = (struct sample){slowest[0], slowest[1]};
        TRY(decide(deciding, limits, slowest[2], together, &enough));
    }
    keep_usage(bench, &begin);
    return together ? summarise(bench, limits->max_median_error) : STATUS_OK;
}

enum status bench_measure(const struct variant *variant, void *state, const struct bench_limits *limits,
                          bench_progress *progress, void *context, struct bench *bench,
                          struct bench_together *together)
{
    *bench = (struct bench){0};
    if (together)
        together->bench = *bench;
    phase_enter(PHASE_WARM_UP);
    enum status status = warm_up(variant, state, limits, bench, together);
    if (status == STATUS_OK) {
        if (together)
            together->bench.warmups = bench->warmups;
        phase_enter(PHASE_TIMED);
        status = take_samples(variant, state, limits, progress, context, bench, together);
    }
    if (status != STATUS_OK) {
        bench_free(bench);
        if (together)
            bench_free(&together->bench);
    }
    return status;
}

void bench_free(struct bench *bench)
{
    free(bench->samples);
    *bench = (struct bench){0};
}
