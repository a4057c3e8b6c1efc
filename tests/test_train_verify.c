/* Tests that --verify of training detects faults, both before the first epoch and after a timed epoch. */
#include "train/trainer.h"
#include "train_support.h"

#include <criterion/redirect.h>

static struct train_job job_of(const struct net *net)
{
    return (struct train_job){
        .train = net->train, .initial = net->initial, .epochs = 1, .verify_steps = 6, .keep = 1};
}

static char verdict[128];

static uint64_t wrong_of(const struct engine *engine, const struct net *net, uint32_t steps)
{
    struct train_job job = job_of(net);
    job.verify_steps = steps;
    const struct resources resources = {.threads = 1};
    uint64_t wrong;
    void *trainer;
    must(trainer_open(engine, &resources, &job, &trainer));
    must(trainer_verify(NULL, NULL, trainer, 0, &wrong));
    trainer_verdict(NULL, trainer, verdict, sizeof verdict);
    trainer_close(trainer);
    return wrong;
}

/* ---- Before the first epoch ---- */

static enum status totals_off(void *state, struct train_totals *totals)
{
    enum status status = engine_naive.totals(state, totals);
    totals->loss *= 1.0003;
    return status;
}

static enum status get_off(void *state, struct train_state *into)
{
    enum status status = engine_naive.get(state, into);
    into->parameters[3] += 0.002f; /* a parameter of the first tensor */
    return status;
}

/* Verification must detect a loss with a relative error of 0.0003, and a small error of one parameter. */
Test(train_verify, verification_detects_small_errors)
{
    struct net net;
    struct engine lossy = engine_naive, drifting = engine_naive;
    lossy.totals = totals_off;
    drifting.get = get_off;
    net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 40, 9, 0.1f);
    cr_expect_eq(wrong_of(&engine_naive, &net, 6), 0);
    cr_expect_eq(wrong_of(&lossy, &net, 6), 6);
    cr_expect_eq(wrong_of(&drifting, &net, 6), 1);
    cr_expect_str_eq(verdict, "0 of 6 losses and 1 of 10 tensors");
    net_close(&net);
}

static uint32_t steps_left; /* steps until late_steps() repeats a step */

static enum status late_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    return engine_naive.steps(state, epoch, first - (steps_left-- == 0), count);
}

/* Verification must check every step, although it copies the reference's state to the engine several times.
 * The 17th of 23 steps uses wrong samples and must be detected. A tensor that is wrong several times counts
 * once. */
Test(train_verify, verification_checks_every_step)
{
    struct net net;
    struct engine late = engine_naive, drifting = engine_naive;
    late.steps = late_steps;
    drifting.get = get_off;
    steps_left = 16;
    net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 40, 9, 0.1f);
    cr_expect_eq(wrong_of(&engine_naive, &net, 23), 0);
    cr_expect_eq(wrong_of(&drifting, &net, 23), 1);
    cr_expect_gt(wrong_of(&late, &net, 23), 0);
    cr_expect_neq(strncmp(verdict, "0 of", 4), 0, "%s", verdict);
    net_close(&net);
}

static size_t moved; /* the parameter that get_moved() changes */

static enum status get_moved(void *state, struct train_state *into)
{
    enum status status = engine_naive.get(state, into);
    into->parameters[moved] += 0.01f;
    return status;
}

/* The gradient of a key's bias is 0 except for rounding errors, and Adam scales it up to a full update. So
 * with Adam, verification must skip these biases, but no other parameters. With SGD, it must check all
 * parameters. */
Test(train_verify, biases_of_keys_are_verified_except_with_adam)
{
    struct engine moving = engine_naive;
    struct net net;
    moving.get = get_moved;
    net_open(&net, &engine_naive, table_of("vit-micro"), (struct shape){1, 1, 8, 12}, 4, 40, 9, 0.1f);
    const struct model_tensor *bias = net.model.tensors;
    while (bias->idle_values == 0)
        bias++;
    cr_expect_str_eq(bias->name, "blocks.0.attn.qkv.bias");
    const struct optimizer adam = {.kind = OPTIMIZER_ADAM, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
    for (size_t i = 16; i < 96; i += 32) { /* the bias of a query, a key, and a value */
        moved = bias->first + i;
        net.train.optimizer = (struct optimizer){.kind = OPTIMIZER_SGD, .momentum = 0.9};
        cr_expect_eq(wrong_of(&engine_naive, &net, 6), 0, "%s", verdict);
        cr_expect_eq(wrong_of(&moving, &net, 6), 1, "%s", verdict);
        net.train.optimizer = adam;
        cr_expect_eq(wrong_of(&engine_naive, &net, 6), 0, "%s", verdict);
        cr_expect_eq(wrong_of(&moving, &net, 6), i != 48, "%s", verdict);
    }
    net_close(&net);
}

static bool moves_moment; /* whether get_turned() also negates the moment */

/* Moves parameter `moved` in the opposite direction. */
static const float *turned_from;
static enum status get_turned(void *state, struct train_state *into)
{
    enum status status = engine_naive.get(state, into);
    into->parameters[moved] = 2 * turned_from[moved] - into->parameters[moved];
    if (moves_moment)
        into->m[moved] = -into->m[moved];
    return status;
}

/* Adam's first step moves each parameter by the learning rate in the direction of its gradient's sign.
 * Rounding may change the sign of a tiny gradient, which verification must accept. It must not accept the
 * other direction if the gradient is large, or if the gradient has the right sign. */
Test(train_verify, adam_may_move_values_with_tiny_gradients_in_the_other_direction)
{
    struct engine turning = engine_naive;
    struct net net;
    struct train_state after = {0};
    turning.get = get_turned;
    net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 40, 9, 0.1f);
    net.train.optimizer =
        (struct optimizer){.kind = OPTIMIZER_ADAM, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
    net_reopen(&net, &engine_naive);
    cr_assert(train_state_for(&net.train, &after));
    must(engine_naive.steps(net.state, 0, 0, 1));
    must(engine_naive.get(net.state, &after));
    turned_from = net.initial;
    const struct model_tensor *tensor = &net.model.tensors[2]; /* the weights of the second convolution */
    size_t least = tensor->first, most = tensor->first;
    double norm = 0;
    for (size_t i = tensor->first; i < tensor->first + tensor->values; i++) {
        norm += after.m[i] * after.m[i];
        if (after.m[i] != 0 && (fabsf(after.m[i]) < fabsf(after.m[least]) || after.m[least] == 0))
            least = i;
        most = fabsf(after.m[i]) > fabsf(after.m[most]) ? i : most;
    }
    cr_assert(fabsf(after.m[least]) < 1e-3 * sqrt(norm) && fabsf(after.m[most]) > 2e-2 * sqrt(norm));
    moves_moment = true;
    moved = least;
    cr_expect_eq(wrong_of(&turning, &net, 1), 0, "%s", verdict);
    moved = most;
    cr_expect_eq(wrong_of(&turning, &net, 1), 1, "%s", verdict);
    moves_moment = false;
    moved = least;
    cr_expect_eq(wrong_of(&turning, &net, 1), 1, "%s", verdict);
    train_state_free(&after);
    net_close(&net);
}

/* The warning names the tensors that are wrong, with their errors and the bound. */
Test(train_verify, a_warning_names_the_wrong_tensors, .init = cr_redirect_stderr)
{
    struct engine drifting = engine_naive;
    struct net net;
    char text[1024] = "";
    drifting.get = get_off;
    net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 40, 9, 0.1f);
    cr_expect_eq(wrong_of(&drifting, &net, 6), 1);
    fflush(stderr);
    FILE *redirected = cr_get_redirected_stderr();
    cr_assert(fgets(text, sizeof text, redirected));
    cr_expect(strstr(text, " exceed 0.01: ") && strstr(text, net.model.tensors[0].name) &&
                  !strstr(text, net.model.tensors[1].name),
              "%s", text);
    net_close(&net);
}

/* Makes the change of each call twice as large, as wrong gradients would. */
static struct train_state before_steps, after_steps;
static size_t state_values;

static enum status steps_doubled(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    TRY(engine_naive.get(state, &before_steps));
    TRY(engine_naive.steps(state, epoch, first, count));
    TRY(engine_naive.get(state, &after_steps));
    for (size_t i = 0; i < state_values; i++)
        after_steps.parameters[i] += after_steps.parameters[i] - before_steps.parameters[i];
    return engine_naive.set(state, &after_steps);
}

/* Opens a network with initial parameters that classify all samples. */
static void open_trained(struct net *net)
{
    net_open(net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 12, 6, 0);
    state_values = net->model.arena_values;
    cr_assert(train_state_for(&net->train, &before_steps) && train_state_for(&net->train, &after_steps));
    for (uint32_t epoch = 0; epoch < 80; epoch++)
        must(engine_naive.steps(net->state, epoch, 0, train_steps(&net->train)));
    must(engine_naive.get(net->state, &after_steps));
    memcpy(net->initial, after_steps.parameters, state_values * sizeof *net->initial);
}

/* Makes the losses of a trained network smaller: scales the weights of its last layer. */
static void sharpen(const struct net *net)
{
    const struct model_tensor *weight = &net->model.tensors[net->model.tensor_count - 2];
    for (size_t i = weight->first; i < weight->first + weight->values; i++)
        net->initial[i] *= 1.5f;
}

/* Where the losses are almost 0, the rounding of probabilities near 1 is as large as the gradients or larger.
 * That is no fault, but these are: a parameter that moved, and changes twice as large where the gradients are
 * still larger than the rounding. */
Test(train_verify, gradients_below_the_rounding_of_probabilities_are_no_fault)
{
    struct engine drifting = engine_naive, doubling = engine_naive;
    struct net net;
    drifting.get = get_off;
    doubling.steps = steps_doubled;
    open_trained(&net);
    for (int sharper = 0; sharper < 5; sharper++) {
        cr_expect_eq(wrong_of(&engine_naive, &net, 10), 0, "%d: %s", sharper, verdict);
        cr_expect_gt(wrong_of(&drifting, &net, 10), 0, "%d: %s", sharper, verdict);
        if (sharper < 3)
            cr_expect_gt(wrong_of(&doubling, &net, 10), 0, "%d: %s", sharper, verdict);
        sharpen(&net);
    }
    train_state_free(&before_steps);
    train_state_free(&after_steps);
    net_close(&net);
}

/* Adam divides gradients by their size, so it also scales their rounding up. */
Test(train_verify, vanished_gradients_of_adam_are_no_fault)
{
    const struct resources resources = {.threads = 1};
    struct net net;
    struct run_time unused;
    struct train_epoch epoch;
    uint64_t wrong;
    void *trainer;
    net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 12, 6, 0);
    net.train.optimizer =
        (struct optimizer){.kind = OPTIMIZER_ADAM, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
    net.train.schedule.rate = 0.009;
    struct train_job job = job_of(&net);
    job.epochs = 400;
    must(trainer_open(&engine_naive, &resources, &job, &trainer));
    for (uint32_t i = 1; i <= job.epochs; i++) {
        must(trainer_run(trainer, 1, &unused));
        if (i % 100 == 0) {
            must(trainer_verify(NULL, NULL, trainer, 1, &wrong));
            trainer_verdict(NULL, trainer, verdict, sizeof verdict);
            cr_expect_eq(wrong, 0, "%s", verdict);
        }
        must(trainer_finish(trainer, &epoch));
    }
    cr_expect_lt(epoch.loss, 1e-7);
    trainer_close(trainer);
    net_close(&net);
}

/* ---- Timed epochs are verified ---- */

/* The engines below omit steps or discard their results, but claim to have used all TIMED_SAMPLES samples, in
 * batches of 4. */
enum { TIMED_SAMPLES = 123 };
static uint64_t claimed;

static void claim(uint32_t first, uint32_t count)
{
    uint32_t end = 4 * (first + count);
    claimed += (end < TIMED_SAMPLES ? end : TIMED_SAMPLES) - 4 * first;
}

/* Runs only the first two steps of an epoch. */
static enum status two_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    claim(first, count);
    return first < 2 ? engine_naive.steps(state, epoch, first, count < 2 - first ? count : 2 - first)
                     : STATUS_OK;
}

/* Omits the last step of a call with more than five steps. */
static enum status few_of_many(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    claim(first, count);
    return engine_naive.steps(state, epoch, first, count > 5 ? count - 1 : count);
}

/* Runs only the first epoch. */
static enum status one_epoch(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    claim(first, count);
    return epoch == 0 ? engine_naive.steps(state, epoch, first, count) : STATUS_OK;
}

/* Runs all steps. In a call with more than five steps, discards the result of the last one. */
static enum status forgetful(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    claim(first, count);
    if (count <= 5)
        return engine_naive.steps(state, epoch, first, count);
    struct train_state kept;
    cr_assert(train_state_new(1 << 16, &kept)); /* larger than the network needs */
    TRY(engine_naive.steps(state, epoch, first, count - 1));
    TRY(engine_naive.get(state, &kept));
    TRY(engine_naive.steps(state, epoch, first + count - 1, 1));
    TRY(engine_naive.set(state, &kept));
    train_state_free(&kept);
    return STATUS_OK;
}

static enum status claimed_totals(void *state, struct train_totals *totals)
{
    TRY(engine_naive.totals(state, totals));
    totals->samples = claimed;
    claimed = 0;
    return STATUS_OK;
}

/* Trains two epochs with an engine. If `verifies` is true, verifies each epoch. Returns the number of wrong
 * items in both epochs. */
static uint64_t train_two(const struct engine *engine, const struct net *net, bool verifies,
                          struct train_epoch *epoch)
{
    struct train_job job = job_of(net);
    const struct resources resources = {.threads = 1};
    struct run_time unused;
    uint64_t all_wrong = 0, wrong = 0;
    void *trainer;
    job.epochs = 2;
    must(trainer_open(engine, &resources, &job, &trainer));
    for (int i = 0; i < 2; i++) {
        claimed = 0;
        must(trainer_run(trainer, 1, &unused));
        if (verifies)
            must(trainer_verify(NULL, NULL, trainer, 1, &wrong));
        all_wrong += wrong;
        trainer_verdict(NULL, trainer, verdict, sizeof verdict);
        must(trainer_finish(trainer, epoch));
    }
    trainer_close(trainer);
    return all_wrong;
}

static void open_timed(struct net *net)
{
    net_open(net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, TIMED_SAMPLES, 4, 0);
}

Test(train_verify, epoch_is_verified_after_timing)
{
    struct net net;
    struct train_epoch plain, verified;
    open_timed(&net);
    train_two(&engine_naive, &net, false, &plain);
    cr_expect_eq(train_two(&engine_naive, &net, true, &verified), 0, "%s", verdict);
    cr_expect(plain.loss == verified.loss && plain.test.loss == verified.test.loss &&
                  plain.test.accuracy == verified.test.accuracy,
              "verification changes the results of the epoch");
    cr_expect(strstr(verdict, "of epoch 2 (step "), "%s", verdict);
    net_close(&net);
}

Test(train_verify, detects_omitted_steps)
{
    enum status (*const faults[])(void *, uint32_t, uint32_t, uint32_t) = {two_steps, few_of_many, one_epoch,
                                                                           forgetful};
    struct net net;
    struct train_epoch unused;
#ifdef __SANITIZE_ADDRESS__
    const int draws = 1;
#else
    const int draws = 4; /* the fault must be detected whichever step is drawn */
#endif
    open_timed(&net);
    for (size_t f = 0; f < COUNT_OF(faults); f++)
        for (int i = 0; i < draws; i++) {
            struct engine engine = engine_naive;
            engine.totals = claimed_totals;
            engine.steps = faults[f];
            cr_expect_gt(train_two(&engine, &net, true, &unused), 0, "fault %zu: %s", f, verdict);
        }
    net_close(&net);
}
