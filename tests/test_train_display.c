/* Tests that the progress display does not change the training. Trains twice on an engine that
 * records its calls, with stderr as a file and as a terminal, and compares the calls. */
#include <criterion/criterion.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../cpu/train/omp_engine.h"
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

static void train_epochs(void)
{
    struct engine engine = engine_naive;
    struct net net;
    struct run_time unused;
    struct train_epoch epoch;
    const struct resources resources = {.threads = 1};
    void *trainer;
    engine.set = recorded_set;
    engine.get = recorded_get;
    engine.steps = recorded_steps;
    engine.totals = recorded_totals;
    engine.evaluate = recorded_evaluate;
    net_open(&net, &engine_naive, &model_tables[0], (struct shape){1, 1, 8, 8}, 4, 40, 4, 0);
    const struct train_job job = {
        .train = net.train, .initial = net.initial, .epochs = EPOCHS, .identity = "test", .keep = 1};
    *calls = '\0';
    must(trainer_open(&engine, &resources, &job, &trainer));
    for (uint32_t i = 0; i < EPOCHS; i++) {
        must(trainer_run(trainer, i, &unused));
        must(trainer_finish(trainer, &epoch));
    }
    trainer_close(trainer);
    net_close(&net);
}

/* Trains with stderr redirected to `fd`, and closes `fd`. */
static void train_before(int fd)
{
    int before = dup(STDERR_FILENO);
    cr_assert(fd >= 0 && before >= 0 && dup2(fd, STDERR_FILENO) >= 0);
    close(fd);
    train_epochs();
    fflush(stderr);
    dup2(before, STDERR_FILENO);
    close(before);
}

Test(train_display, display_does_not_change_the_calls)
{
    char alone[sizeof calls], shown[1 << 14];
    FILE *file = tmpfile();
    cr_assert_not_null(file);
    train_before(dup(fileno(file)));
    cr_expect_eq(lseek(fileno(file), 0, SEEK_END), 0,
                 "progress was shown, although stderr is not a terminal");
    strcpy(alone, calls);
    fclose(file);

    int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK);
    if (terminal < 0)
        cr_skip_test("this system has no pseudo-terminals");
    cr_assert(grantpt(terminal) == 0 && unlockpt(terminal) == 0);
    int slave = open(ptsname(terminal), O_RDWR | O_NOCTTY);
    int kept = dup(slave); /* keeps the output readable after train_before() */
    train_before(slave);
    cr_expect_str_eq(calls, alone, "without a terminal:\n%s\nwith one:\n%s", alone, calls);
    cr_expect(strstr(alone, "steps 0 0 10\n") && strstr(alone, "steps 1 0 10\n"),
              "not one call per epoch: %s", alone);
    ssize_t length = read(terminal, shown, sizeof shown - 1);
    shown[length > 0 ? length : 0] = '\0';
    cr_expect(strstr(shown, "train-naive: epoch 1 of 2, step "), "progress is not shown: %s", shown);
    close(kept);
    close(terminal);
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
