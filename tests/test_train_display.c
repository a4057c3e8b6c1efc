/* Tests that the progress display does not change what is computed. Trains twice on an engine that
 * records its calls, with stderr as a file and as a terminal, and compares the calls. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "../cpu/train/omp_kernel.h"
#include "train/trainer.h"
#include "train_support.h"

TestSuite(train_display, .timeout = 60);

#define STEP_US 60000 /* duration of a step; an epoch takes several times the interval of the display */
#define EPOCHS  2

static char calls[4096]; /* calls of the recording engine, without progress() */

static void record(const char *call, uint32_t epoch, uint32_t first, uint32_t count)
{
    size_t used = strlen(calls);
    snprintf(calls + used, sizeof calls - used, "%s %u %u %u\n", call, epoch, first, count);
}

static enum status recorded_set(void *state, const struct train_state *from)
{
    record("set", 0, 0, 0);
    return engine_naive.set(state, from);
}

static enum status recorded_get(void *state, struct train_state *into)
{
    record("get", 0, 0, 0);
    return engine_naive.get(state, into);
}

static enum status recorded_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    record("steps", epoch, first, count);
    for (uint32_t i = 0; i < count; i++) {
        must(engine_naive.steps(state, epoch, first + i, 1));
        usleep(STEP_US);
    }
    return STATUS_OK;
}

static enum status recorded_totals(void *state, struct train_totals *totals)
{
    record("totals", 0, 0, 0);
    return engine_naive.totals(state, totals);
}

static enum status recorded_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                     float *logits)
{
    record("evaluate", part, first, count);
    return engine_naive.evaluate(state, part, first, count, logits);
}

/* An engine that records its calls. */
static struct engine recording(void)
{
    struct engine engine = engine_naive;
    engine.set = recorded_set;
    engine.get = recorded_get;
    engine.steps = recorded_steps;
    engine.totals = recorded_totals;
    engine.evaluate = recorded_evaluate;
    return engine;
}

/* Trains EPOCHS epochs of ten steps, and tests after every `test_steps` steps. */
static void train_epochs(const struct engine *engine, uint32_t test_steps, struct train_epoch *epoch)
{
    struct net net;
    struct run_time unused;
    const struct resources resources = {.threads = 1};
    void *trainer;
    net_open(&net, &engine_naive, &model_tables[0], (struct shape){1, 1, 8, 8}, 4, 40, 4, 0);
    const struct train_job job = {
        .train = net.train, .initial = net.initial, .epochs = EPOCHS, .keep = 1, .test_steps = test_steps};
    *calls = '\0';
    must(trainer_open(engine, &resources, &job, &trainer));
    for (uint32_t i = 0; i < EPOCHS; i++) {
        must(trainer_run(trainer, i, &unused));
        must(trainer_finish(trainer, epoch));
    }
    trainer_close(trainer);
    net_close(&net);
}

/* Trains with stderr redirected to `fd`, and closes `fd`. */
static void train_before(int fd, const struct engine *engine, uint32_t test_steps)
{
    struct train_epoch epoch;
    int before = dup(STDERR_FILENO);
    cr_assert(fd >= 0 && before >= 0 && dup2(fd, STDERR_FILENO) >= 0);
    close(fd);
    train_epochs(engine, test_steps, &epoch);
    fflush(stderr);
    dup2(before, STDERR_FILENO);
    close(before);
}

/* Trains with stderr on a pseudo-terminal, and copies what was shown to `shown`. */
static void train_on_terminal(const struct engine *engine, uint32_t test_steps, char *shown, size_t size)
{
    int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK);
    if (terminal < 0)
        cr_skip_test("this system has no pseudo-terminals");
    cr_assert(grantpt(terminal) == 0 && unlockpt(terminal) == 0);
    int slave = open(ptsname(terminal), O_RDWR | O_NOCTTY);
    int kept = dup(slave); /* keeps the output readable after train_before() */
    train_before(slave, engine, test_steps);
    ssize_t length = read(terminal, shown, size - 1);
    shown[length > 0 ? length : 0] = '\0';
    close(kept);
    close(terminal);
}

Test(train_display, display_does_not_change_the_calls)
{
    char alone[sizeof calls], shown[1 << 14];
    const struct engine engine = recording();
    FILE *file = tmpfile();
    cr_assert_not_null(file);
    train_before(dup(fileno(file)), &engine, 0);
    cr_expect_eq(lseek(fileno(file), 0, SEEK_END), 0,
                 "progress was shown, although stderr is not a terminal");
    strcpy(alone, calls);
    fclose(file);

    train_on_terminal(&engine, 0, shown, sizeof shown);
    cr_expect_str_eq(calls, alone, "without a terminal:\n%s\nwith one:\n%s", alone, calls);
    cr_expect(strstr(alone, "steps 0 0 10\n") && strstr(alone, "steps 1 0 10\n"),
              "not one call per epoch: %s", alone);
    cr_expect(strstr(shown, "train-naive: epoch 1 of 2, step "), "progress is not shown: %s", shown);
}

static enum status slow_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                 float *logits)
{
    usleep(10 * STEP_US);
    return engine_naive.evaluate(state, part, first, count, logits);
}

/* The trainer reads and clears the engine's totals, and then runs a test within an epoch. During this test,
 * the display must still count the steps before the test. */
Test(train_display, progress_does_not_fall_during_a_test)
{
    char shown[1 << 14];
    struct engine engine = recording();
    engine.evaluate = slow_evaluate;
    train_on_terminal(&engine, 5, shown, sizeof shown);
    bool stopped = false;
    unsigned epoch, step, last_epoch = 0, last = 0;
    for (const char *at = shown; (at = strstr(at, ": epoch ")); at++) {
        cr_assert_eq(sscanf(at, ": epoch %u of %*u, step %u of", &epoch, &step), 2, "%s", at);
        cr_expect(epoch != last_epoch || step >= last, "step %u after step %u: %s", step, last, shown);
        stopped |= step == 5;
        last_epoch = epoch, last = step;
    }
    cr_expect(stopped, "no line during the test after step 5: %s", shown);
}

/* In the first part of an epoch, reports an unknown waiting time (-1), as in a run that resumes on another
 * variant. In the second part, reports 1 s. */
static enum status half_known_totals(void *state, struct train_totals *totals)
{
    static bool later;
    must(engine_naive.totals(state, totals));
    totals->data_s = later ? 1 : -1;
    later = !later;
    return STATUS_OK;
}

Test(train_display, unknown_waiting_time_stays_unknown)
{
    struct train_epoch epoch;
    struct engine engine = recording();
    engine.totals = half_known_totals;
    train_epochs(&engine, 5, &epoch);
    cr_expect_eq(epoch.totals.data_s, -1, "%g", epoch.totals.data_s);
}

static void expect_progress(const struct engine *engine, void *state, uint64_t samples, double loss)
{
    struct train_progress progress;
    engine->progress(state, &progress);
    cr_expect_eq(progress.samples, samples, "%s", engine->name);
    cr_expect_eq(progress.loss, loss, "%s: %g, not %g", engine->name, progress.loss, loss);
}

/* progress() must count the steps since the latest call of totals(). It must not change the totals. */
static void follow(const struct engine *engine)
{
    struct net net;
    struct train_totals totals;
    struct train_progress progress;
    net_open(&net, engine, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 19, 7, 0);
    expect_progress(engine, net.state, 0, 0);
    must(engine->steps(net.state, 0, 0, 2));
    engine->progress(net.state, &progress);
    must(engine->steps(net.state, 0, 2, 1));
    engine->progress(net.state, &progress);
    must(engine->totals(net.state, &totals));
    cr_expect_eq(totals.samples, 19);
    cr_expect_eq(progress.samples, 19);
    cr_expect_eq(progress.correct, totals.correct);
    cr_expect_eq(progress.loss, totals.loss);
    expect_progress(engine, net.state, 0, 0);
    net_close(&net);
}

Test(train_display, progress_counts_steps_since_totals)
{
    follow(&engine_naive);
#ifdef _OPENMP
    follow(&engine_omp);
#endif
}
