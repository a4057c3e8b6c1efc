/* Tests the wrapper that --compute puts around a variant, with a fake variant, workload and consumer. The
 * fakes log their calls, so that tests can check the order. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/phase.h"
#include "run/bench.h"
#include "cell.h"

TestSuite(consumed, .timeout = 60);

static const struct column steps_columns[] = {COMPUTE_COLUMNS, {.name = NULL}};

/* ---- The log ---- */

static char heard[4096];

#define hear(...) snprintf(heard + strlen(heard), sizeof heard - strlen(heard), __VA_ARGS__)

static void expect_heard(const char *expected)
{
    cr_expect_str_eq(heard, expected);
    heard[0] = '\0';
}

static enum status fail_at_run;
static int states_made, states_left, setup_fails_at;

struct fake_state {
    int name;
    uint64_t latest;
};

static enum status fake_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    cr_assert_str_eq(input, "input");
    if (++states_made == setup_fails_at)
        return status_set(STATUS_FAILED, "no memory for a second batch");
    struct fake_state *self = calloc(1, sizeof *self);
    self->name = states_made;
    states_left++;
    *state = self;
    return STATUS_OK;
}

static enum status fake_ready(void *state, uint64_t number)
{
    hear("ready %d:%d ", ((struct fake_state *)state)->name, (int)number);
    return STATUS_OK;
}

static enum status fake_run(void *state, uint64_t number, struct run_time *time)
{
    struct fake_state *self = state;
    time->device_s = 0.5; /* the time of the batch alone; the time of a run includes the step */
    self->latest = number;
    hear("run %d:%d ", self->name, (int)number);
    return fail_at_run ? status_set(fail_at_run, "the run broke") : STATUS_OK;
}

static enum status fake_fetch(void *state, void *result)
{
    *(uint64_t *)result = ((struct fake_state *)state)->latest;
    return STATUS_OK;
}

static void fake_teardown(void *state)
{
    states_left--;
    free(state);
}

static const struct variant on_device = {.platform = "cuda",
                                         .setup = fake_setup,
                                         .ready = fake_ready,
                                         .run = fake_run,
                                         .fetch = fake_fetch,
                                         .teardown = fake_teardown};

/* ---- The consumer ---- */

struct fake_consumer {
    struct consumer consumer;
    uint64_t taken;
    int events[8];
    struct consumer_times times; /* the result of finish() */
};

static enum status hear_begin(struct consumer *consumer)
{
    ((struct fake_consumer *)consumer)->taken = 0;
    hear("begin ");
    return STATUS_OK;
}

static enum status hear_take_host(struct consumer *consumer, const void *values, size_t bytes)
{
    ((struct fake_consumer *)consumer)->taken++;
    hear("host %s/%zu ", (const char *)values, bytes);
    return STATUS_OK;
}

static enum status hear_take_device(struct consumer *consumer, void *ready_event, void **done_event)
{
    struct fake_consumer *self = (struct fake_consumer *)consumer;
    cr_assert_null(ready_event);
    int *event = &self->events[self->taken++ % 8];
    *event = (int)self->taken;
    *done_event = event;
    hear("take ");
    return STATUS_OK;
}

static enum status hear_wait(struct consumer *consumer, void *done_event)
{
    (void)consumer;
    hear("wait %d ", *(int *)done_event);
    return STATUS_OK;
}

static enum status hear_finish(struct consumer *consumer, struct consumer_times *times)
{
    struct fake_consumer *self = (struct fake_consumer *)consumer;
    *times = self->times;
    hear("finish %d ", (int)self->taken);
    return STATUS_OK;
}

static const struct consumer_type hearing = {.begin = hear_begin,
                                             .take_host = hear_take_host,
                                             .take_device = hear_take_device,
                                             .wait = hear_wait,
                                             .finish = hear_finish};

/* ---- The workloads ---- */

static enum status hand_over_device(const void *input, const struct variant *variant, void *state,
                                    struct consumer *consumer, void **done_event)
{
    (void)input, (void)variant;
    hear("hand %d: ", (int)((const struct fake_state *)state)->latest);
    return consumer_take_device(consumer, NULL, done_event);
}

static enum status hand_over_host(const void *input, const struct variant *variant, void *state,
                                  struct consumer *consumer, void **done_event)
{
    (void)input, (void)variant, (void)state, (void)done_event;
    return consumer_take_host(consumer, "images", 6);
}

static struct consumer *told;

static void tell(void *input, struct consumer *consumer)
{
    (void)input;
    told = consumer;
    hear(consumer ? "consumer " : "none ");
}

static const struct workload one_batch = {.batches.hand_over = hand_over_device},
                             host_batch = {.batches.hand_over = hand_over_host},
                             many_batches = {.batches.set_consumer = tell};

/* ---- The wrapper and its results ---- */

static char input[] = "input";
static struct fake_consumer consumer;
static void *state;
static struct row row;

static enum status open_consumed(const struct workload *workload, const struct variant *variant)
{
    const struct resources resources = {.threads = 1};
    consumer = (struct fake_consumer){
        .consumer = {&hearing, .length_s = 0.25, .alone_s = 0.28, .bus_share = 0.75, .bus_slowdown = NAN}};
    row_free(&row);
    row_open(&row, steps_columns);
    const struct consumed_job job = {workload, variant, input, &consumer.consumer};
    return consumed_variant.setup(&resources, &job, &state);
}

static void expect_column(const char *name, const char *text, const char *why)
{
    cr_expect_str_eq(cell(&row, name), text, "%s is '%s': %s", name, cell(&row, name), why);
}

static void run(uint64_t number)
{
    struct run_time time = {0};
    cr_expect_eq(variant_run(&consumed_variant, state, number, &time), STATUS_OK, "%s", status_text());
    cr_expect_lt(time.device_s, 0, "a run must have no device time, only wall time");
}

static uint64_t latest(void)
{
    uint64_t number;
    cr_expect_eq(on_device.fetch(consumed_latest(state), &number), STATUS_OK);
    return number;
}

/* ---- One batch per run ---- */

Test(consumed, batches_on_the_device_alternate_between_two_states)
{
    cr_assert_eq(open_consumed(&one_batch, &on_device), STATUS_OK);
    cr_expect_eq(states_left, 2);
    expect_heard("begin ");
    run(1);
    run(0);
    expect_heard("ready 2:1 run 2:1 hand 1: take ready 1:0 run 1:0 hand 0: take ");
    cr_expect_eq(latest(), 0, "the result is not that of the latest run");
    run(2); /* overwrites the batch of run 1 after its step has ended */
    expect_heard("ready 2:2 wait 1 run 2:2 hand 2: take ");
    cr_expect_eq(latest(), 2);
    run(3);
    expect_heard("ready 1:3 wait 2 run 1:3 hand 3: take ");
    consumed_variant.teardown(state);
    expect_heard("finish 4 ");
    cr_expect_eq(states_left, 0);
}

Test(consumed, host_batches_are_copied_and_need_one_state)
{
    struct variant on_host = on_device;
    on_host.platform = "cpu";
    on_host.ready = NULL;
    cr_assert_eq(open_consumed(&host_batch, &on_host), STATUS_OK);
    cr_expect_eq(states_left, 1);
    run(1);
    run(2);
    expect_heard("begin run 1:1 host images/6 run 1:2 host images/6 ");
    consumed_variant.teardown(state);
}

Test(consumed, one_span_covers_all_timed_runs_and_nothing_before_them)
{
    cr_assert_eq(open_consumed(&one_batch, &on_device), STATUS_OK);
    phase_enter(PHASE_WARM_UP);
    run(1);
    heard[0] = '\0';
    phase_enter(PHASE_TIMED);
    run(2);
    run(3);
    phase_enter(PHASE_MEASURE);
    expect_heard("ready 1:2 begin run 1:2 hand 2: take ready 2:3 wait 1 run 2:3 hand 3: take ");
    consumer.times = (struct consumer_times){.steps = 2, .first_wait_s = 0.2, .wait_s = 0.1, .busy_s = 0.7};
    cr_expect_eq(consumed_end(state, &row), STATUS_OK);
    expect_heard("finish 2 ");
    expect_column("steps", "2", "not all steps");
    expect_column("stall_share", "0.125", "not wait_s divided by the span after the first wait");
    cr_expect_float_eq(row_get_real(&row, "stall_share"), 0.125, 1e-12);
    expect_column("first_batch_s", "0.2", "not first_wait_s");
    expect_column("step_s", "0.35", "not busy_s divided by the steps");
    expect_column("busy_share", "0.7", "not busy_s divided by the span");
    expect_column("slowdown", "1.25", "not step_s divided by the time alone");
    expect_column("compute_ms", "250", "not the requested duration in milliseconds");
    expect_column("bus_share", "0.75", "not that of the consumer");
    expect_column("bus_slowdown", "", "must be empty if never measured");
    consumed_variant.teardown(state);
}

Test(consumed, if_setup_of_the_second_state_fails_none_remains)
{
    setup_fails_at = 2;
    cr_expect_eq(open_consumed(&one_batch, &on_device), STATUS_FAILED);
    cr_expect(strstr(status_text(), "no memory for a second batch"));
    consumed_variant.teardown(state);
    cr_expect_eq(states_left, 0);
}

Test(consumed, a_failing_run_delivers_no_batch)
{
    struct run_time time;
    cr_assert_eq(open_consumed(&one_batch, &on_device), STATUS_OK);
    fail_at_run = STATUS_FAILED;
    cr_expect_eq(consumed_variant.run(state, 1, &time), STATUS_FAILED);
    expect_heard("begin run 2:1 ");
    consumed_variant.teardown(state);
    cr_expect_eq(states_left, 0);
}

/* ---- Many batches per run ---- */

Test(consumed, a_run_of_many_batches_ends_with_its_last_step)
{
    cr_assert_eq(open_consumed(&many_batches, &on_device), STATUS_OK);
    cr_expect_eq(states_left, 1,
                 "a variant of many batches has its own buffers, so it must have only one state");
    cr_expect_eq(told, &consumer.consumer);
    expect_heard("begin consumer ");
    consumer.times = (struct consumer_times){.steps = 1000, .busy_s = 9000};
    phase_enter(PHASE_WARM_UP);
    run(1);
    expect_heard("ready 1:1 begin run 1:1 finish 0 ");
    phase_enter(PHASE_TIMED);
    for (uint64_t number = 2; number < 4; number++) {
        consumer.times = (struct consumer_times){.steps = 5 * number - 5, /* 5 in run 2, 10 in run 3 */
                                                 .first_wait_s = 0.1 * (double)number,
                                                 .wait_s = 0.05,
                                                 .busy_s = 0.95 - 0.1 * (double)number};
        run(number);
    }
    phase_enter(PHASE_MEASURE);
    heard[0] = '\0';
    cr_expect_eq(consumed_end(state, &row), STATUS_OK);
    expect_heard(""); /* the consumer stays attached while timed runs are verified */
    consumed_detach(state);
    expect_heard("none "); /* later runs, such as those that measure copies, have no consumer */
    expect_column("steps", "15", "not the steps of both runs");
    expect_column("stall_share", "0.222222", "not (0.05 + 0.3 + 0.05) / (2 - 0.2)");
    expect_column("first_batch_s", "0.2", "not the value of the first run");
    cr_expect_float_eq(row_get_real(&row, "step_s"), 1.4 / 15, 1e-6);
    expect_column("busy_share", "0.7", "not the value over all steps");
    cr_expect_float_eq(row_get_real(&row, "slowdown"), 1.4 / 15 / 0.28, 1e-6);
    consumed_variant.teardown(state);
    cr_expect_null(told);
}

/* If a reader reads everything before it delivers its first batch, the GPU waits in every run. The wait
 * before the first batch of the first run must not count as a stall. The waits of later runs must count. */
Test(consumed, first_waits_of_later_runs_count_as_stalls)
{
    cr_assert_eq(open_consumed(&many_batches, &on_device), STATUS_OK);
    phase_enter(PHASE_TIMED);
    consumer.times = (struct consumer_times){.steps = 4, .first_wait_s = 0.9, .wait_s = 0, .busy_s = 0.1};
    for (uint64_t number = 1; number <= 10; number++)
        run(number);
    phase_enter(PHASE_MEASURE);
    cr_expect_eq(consumed_end(state, &row), STATUS_OK);
    cr_expect_float_eq(row_get_real(&row, "stall_share"), 9 * 0.9 / (10 - 0.9), 1e-12);
    expect_column("first_batch_s", "0.9", "not the first wait of the first run");
    expect_column("step_s", "0.025", "not the mean of all runs");
    expect_column("busy_share", "0.1", "not busy_s divided by the span");
    consumed_variant.teardown(state);
}

Test(consumed, runs_without_a_batch_are_an_error)
{
    cr_assert_eq(open_consumed(&many_batches, &on_device), STATUS_OK);
    phase_enter(PHASE_TIMED);
    run(1);
    cr_expect_eq(consumed_end(state, &row), STATUS_FAILED);
    cr_expect(strstr(status_text(), "no step ran"));
    consumed_variant.teardown(state);
}
