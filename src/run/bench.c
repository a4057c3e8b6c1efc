#include "run/bench.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "core/array.h"
#include "core/phase.h"
#include "core/timer.h"

/* ---- Timed runs ---- */

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

/* ---- A training step for every batch ---- */

#define STATES_MAX 2

struct consumed {
    struct consumed_job job;
    int state_count, latest;
    void *states[STATES_MAX];
    void *done[STATES_MAX]; /* per state, the event after the step on its batch; NULL if there is none */
    bool timed;             /* the latest run was a timed one */
    /* The sum over all measurements. If a run delivers many batches, each run is one measurement. Otherwise
     * all timed runs together are one measurement. first_wait_s is the first wait of the first measurement;
     * wait_s includes the first waits of all later measurements. */
    struct consumer_times sum;
};

void *consumed_latest(void *state)
{
    const struct consumed *self = state;
    return self->states[self->latest];
}

/* Returns whether a run of the wrapped variant delivers many batches, which the variant passes to the
 * consumer itself. */
static bool delivers_many(const struct consumed *self)
{
    return self->job.workload->batches.set_consumer;
}

static void set_consumer(const struct consumed *self, struct consumer *consumer)
{
    if (delivers_many(self))
        self->job.workload->batches.set_consumer(self->job.input, consumer);
}

static void consumed_teardown(void *state)
{
    struct consumed *self = state;
    struct consumer_times unused;
    /* Ignore errors of the remaining steps, because no result depends on them. */
    (void)consumer_finish(self->job.consumer, &unused);
    set_consumer(self, NULL);
    for (int i = 0; i < self->state_count; i++)
        if (self->states[i])
            self->job.variant->teardown(self->states[i]);
    free(self);
}

static enum status consumed_setup(const struct resources *resources, const void *input, void **state)
{
    const struct consumed_job *job = input;
    struct consumed *self = *state = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    self->job = *job;
    bool on_device = strcmp(job->variant->platform, "cuda") == 0;
    self->state_count = on_device && !delivers_many(self) ? STATES_MAX : 1;
    TRY(consumer_begin(job->consumer));
    set_consumer(
        self,
        job->consumer); /* before setup(), because a variant with a consumer may allocate more buffers */
    for (int i = 0; i < self->state_count; i++)
        TRY(job->variant->setup(resources, job->input, &self->states[i]));
    return STATUS_OK;
}

static enum status consumed_ready(void *state, uint64_t number)
{
    const struct consumed *self = state;
    const struct variant *variant = self->job.variant;
    return variant->ready ? variant->ready(self->states[(self->latest + 1) % self->state_count], number)
                          : STATUS_OK;
}

/* Ends a measurement and adds it to the sum. Only the wait before the very first step is counted separately
 * (first_wait_s), because a training loop starts only once. The waits at the start of later epochs count as
 * stalls (wait_s). */
static enum status add_span(struct consumed *self)
{
    struct consumer_times times, *sum = &self->sum;
    TRY(consumer_finish(self->job.consumer, &times));
    *(sum->steps == 0 ? &sum->first_wait_s : &sum->wait_s) += times.first_wait_s;
    sum->steps += times.steps;
    sum->wait_s += times.wait_s;
    sum->busy_s += times.busy_s;
    return STATUS_OK;
}

/* Produces one batch while the training step on the previous batch runs. */
static enum status run_one(struct consumed *self, uint64_t number)
{
    const struct consumed_job *job = &self->job;
    int turn = (self->latest + 1) % self->state_count;
    struct run_time unused;
    if (self->done[turn])
        TRY(consumer_wait(job->consumer, self->done[turn]));
    self->done[turn] = NULL;
    self->latest = turn;
    TRY(job->variant->run(self->states[turn], number, &unused));
    return job->workload->batches.hand_over(job->input, job->variant, self->states[turn], job->consumer,
                                            &self->done[turn]);
}

/* Runs a wrapped variant that delivers many batches, and waits for the training steps on all of them. */
static enum status run_many(struct consumed *self, uint64_t number, bool timed)
{
    struct run_time unused;
    struct consumer_times times;
    TRY(consumer_begin(self->job.consumer));
    TRY(self->job.variant->run(self->states[0], number, &unused));
    return timed ? add_span(self) : consumer_finish(self->job.consumer, &times);
}

static enum status consumed_run(void *state, uint64_t number, struct run_time *time)
{
    struct consumed *self = state;
    bool timed = phase_now() == PHASE_TIMED;
    time->device_s = -1;
    if (delivers_many(self))
        return run_many(self, number, timed);
    if (timed && !self->timed) /* the measurement covers all timed runs and no earlier step */
        TRY(consumer_begin(self->job.consumer));
    self->timed = timed;
    return run_one(self, number);
}

static enum status consumed_fetch(void *state, void *result)
{
    const struct consumed *self = state;
    return self->job.variant->fetch(consumed_latest(state), result);
}

enum status consumed_end(void *state, struct row *row)
{
    struct consumed *self = state;
    const struct consumer_times *sum = &self->sum;
    const struct consumer *consumer = self->job.consumer;
    if (!delivers_many(self))
        TRY(add_span(self));
    if (sum->steps == 0)
        return status_set(STATUS_FAILED, "no step ran: the timed runs delivered no batch");
    double step_s = sum->busy_s / (double)sum->steps, after_first_s = sum->wait_s + sum->busy_s;
    row_real(row, "compute_ms", 1e3 * consumer->length_s);
    row_count(row, "steps", sum->steps);
    row_real(row, "stall_share", sum->wait_s / after_first_s);
    row_real(row, "first_batch_s", sum->first_wait_s);
    row_real(row, "step_s", step_s);
    row_real(row, "busy_share", sum->busy_s / (sum->first_wait_s + after_first_s));
    row_real(row, "slowdown", step_s / consumer->alone_s);
    row_real(row, "bus_share", consumer->bus_share);
    row_real(row, "bus_slowdown", consumer->bus_slowdown);
    return STATUS_OK;
}

void consumed_detach(void *state)
{
    set_consumer(state, NULL);
}

const struct variant consumed_variant = {
    .platform = "cuda",
    .setup = consumed_setup,
    .ready = consumed_ready,
    .run = consumed_run,
    .fetch = consumed_fetch,
    .teardown = consumed_teardown,
};

/* ---- The search for a share ---- */

#define PRECISION 20 /* the search ends when two shares differ by less than 1/20 */
#define SURPRISE  0.05
#define FEW       16   /* this part of all samples is read for comparison */
#define SAFETY    0.85 /* reading that just keeps up on average is late now and then */
#define LONG      0.1 /* a share with which steps wait longer is halved, because the rate of reading varies */

/* Returns the shares per second at which the samples of a probe were read. */
static double rate_of(const struct share_probe *probe)
{
    return probe->share / probe->step_s;
}

/* Returns the probe with the smallest share, or with `largest` that with the largest. There is one. */
static const struct share_probe *outermost(const struct share_search *search, bool largest)
{
    const struct share_probe *found = search->probes;
    for (uint32_t i = 1; i < search->count; i++)
        if ((search->probes[i].share > found->share) == largest)
            found = &search->probes[i];
    return found;
}

/* Returns the probe whose steps do not depend on the rate of reading: that with the smallest share, if it was
 * read at less than half of the rate that reading has reached. NULL: none. */
static const struct share_probe *unread(const struct share_search *search)
{
    const struct share_probe *least = outermost(search, false);
    double best = 0;
    for (uint32_t i = 0; i < search->count; i++)
        best = fmax(best, rate_of(&search->probes[i]));
    return search->count > 0 && 2 * rate_of(least) < best ? least : NULL;
}

double share_search_floor(const struct share_search *search)
{
    const struct share_probe *least = unread(search);
    return least && least->stall > SHARE_STALL ? least->stall : 0;
}

/* Returns the share of a probe's time in which steps waited for samples that are read, as its stalls say. */
static double stall_of(const struct share_search *search, const struct share_probe *probe)
{
    return fmax(0, 1 - (1 - probe->stall) / (1 - share_search_floor(search)));
}

/* Returns how long a step with this probe's share takes without this waiting. */
static double busy_of(const struct share_search *search, const struct share_probe *probe)
{
    return probe->step_s * (1 - stall_of(search, probe));
}

double share_search_wait(const struct share_search *search, const struct share_probe *probe)
{
    const struct share_probe *least = unread(search), *most = outermost(search, true);
    const double stall = stall_of(search, probe);
    if (!least || probe == least || probe == most)
        return stall;
    const double slope = (busy_of(search, most) - least->step_s) / (most->share - (double)least->share),
                 expected_s = least->step_s + slope * (probe->share - (double)least->share);
    return fmax(0, fmin(stall, 1 - expected_s / probe->step_s));
}

static bool waits(const struct share_search *search, const struct share_probe *probe)
{
    return share_search_wait(search, probe) > SHARE_STALL;
}

/* Finds the largest share with which steps do not wait, and the smallest larger one with which they wait.
 * NULL: there is none. */
static void find_ends(const struct share_search *search, const struct share_probe **low,
                      const struct share_probe **high)
{
    *low = *high = NULL;
    for (uint32_t i = 0; i < search->count; i++) {
        const struct share_probe *probe = &search->probes[i];
        if (!waits(search, probe) && (!*low || probe->share > (*low)->share))
            *low = probe;
    }
    for (uint32_t i = 0; i < search->count; i++) {
        const struct share_probe *probe = &search->probes[i];
        if (waits(search, probe) && (!*low || probe->share > (*low)->share) &&
            (!*high || probe->share < (*high)->share))
            *high = probe;
    }
}

bool share_search_found(const struct share_search *search)
{
    const struct share_probe *low, *high;
    find_ends(search, &low, &high);
    return low && low != unread(search);
}

const struct share_probe *share_search_best(const struct share_search *search)
{
    const struct share_probe *low, *high;
    find_ends(search, &low, &high);
    return low ? low : outermost(search, false);
}

uint32_t share_search_choice(const struct share_search *search)
{
    const uint32_t best = share_search_best(search)->share, reserved = 2 * best / 3;
    return best == search->parts ? best : reserved > 0 ? reserved : 1;
}

/* Solves s / R = b(s). With `low`, b is the line through both probes, otherwise constant. */
static double solve(const struct share_search *search, const struct share_probe *low,
                    const struct share_probe *high)
{
    const double rate = rate_of(high), busy_s = busy_of(search, high);
    if (!low)
        return rate * busy_s;
    const double slope = rate * (low->step_s - busy_s) / (high->share - low->share);
    const double share = (rate * busy_s + slope * high->share) / (1 + slope);
    return slope > -0.5 ? share : (low->share + high->share) / 2.0;
}

/* Returns the difference of shares that does not matter. */
static uint32_t part_of(uint32_t share)
{
    return share < PRECISION ? 1 : share / PRECISION;
}

/* Returns whether steps waited much longer in the latest probe than the earlier ones let expect, or at all
 * although few samples were read. */
static bool surprises(const struct share_search *search)
{
    const struct share_probe *low, *high, *latest = &search->probes[search->count - 1];
    struct share_search before = *search;
    if (latest == unread(search) && !latest->twice && latest->stall > SURPRISE)
        return true;
    before.count--;
    find_ends(&before, &low, &high);
    if (!high || latest->twice || !waits(search, latest))
        return false;
    const double expected = 1 - rate_of(high) * busy_of(search, latest) / latest->share;
    return latest->stall > fmax(0, expected) + SURPRISE;
}

void share_search_add(struct share_search *search, uint32_t share, double stall, double step_s)
{
    struct share_probe *latest = search->count ? &search->probes[search->count - 1] : NULL;
    const bool again = latest && latest->share == share;
    search->tries++;
    if (!again)
        latest = &search->probes[search->count++];
    if (!again || stall < latest->stall)
        *latest = (struct share_probe){share, stall, step_s, false};
    latest->twice = again;
}

uint32_t share_search_next(const struct share_search *search)
{
    const struct share_probe *low, *high;
    if (search->count == 0)
        return search->parts;
    if (search->count == 1 && waits(search, search->probes) && search->parts >= FEW)
        return search->parts / FEW;
    if (!search->hurried && surprises(search))
        return search->probes[search->count - 1].share;
    find_ends(search, &low, &high);
    if (!high || high->share == 1 || search->count == SHARE_PROBES)
        return 0;
    const uint32_t least = low ? low->share : 0, gap = high->share - least;
    const uint32_t unit = part_of(high->share), above = part_of(least);
    if (low && gap <= unit)
        return 0;
    if (gap < above + unit)
        return least + gap / 2;
    double share = solve(search, low, high);
    if (search->count == 2)
        share *= SAFETY;
    if (search->count > 2 && ((search->count == 3 && share_search_wait(search, high) > LONG) ||
                              (search->hurried && low == unread(search))))
        share = fmin(share, high->share / 2.0);
    return (uint32_t)fmin(fmax(share, least + above), high->share - unit);
}
