/* Tests loss scaling without a GPU: the rule that changes the scale, verification with skipped steps, the
 * skipped steps that an epoch reports, layers in fp32, and the scale in checkpoints. */
#include "train_support.h"

#include <limits.h>
#include <stdio.h>

#include "train/layer_precision.h"
#include "train/trainer.h"

static const struct shape small = {1, 1, 8, 8};

/* ---- The rule ---- */

static const struct loss_scale_rule rule; /* the default */

static struct loss_scale after(struct loss_scale state, uint32_t steps, bool overflowed)
{
    for (uint32_t i = 0; i < steps; i++)
        loss_scale_step(&rule, &state, overflowed);
    return state;
}

Test(loss_scale, grows_only_after_good_steps)
{
    struct loss_scale state = after(loss_scale_begin(&rule), LOSS_SCALE_GROWTH - 1, false);
    cr_expect(state.scale == 65536 && state.good_steps == LOSS_SCALE_GROWTH - 1);
    struct loss_scale grown = after(state, 1, false), broken = after(state, 1, true);
    cr_expect(grown.scale == 2 * 65536 && grown.good_steps == 0);
    cr_expect(broken.scale == 32768 && broken.good_steps == 0);
    broken = after(broken, LOSS_SCALE_GROWTH, false);
    cr_expect(broken.scale == 65536, "%g", broken.scale);
}

Test(loss_scale, has_a_minimum_and_a_maximum)
{
    struct loss_scale state = after(loss_scale_begin(&rule), 1000, true);
    cr_expect(state.scale == LOSS_SCALE_LEAST && state.good_steps == 0);
    cr_expect(after(state, LOSS_SCALE_GROWTH, false).scale == 2 * LOSS_SCALE_LEAST);
    state = after(state, 100 * LOSS_SCALE_GROWTH, false);
    cr_expect(state.scale == LOSS_SCALE_MOST && state.good_steps == 0);
}

Test(loss_scale, follows_other_rules)
{
    const struct loss_scale_rule other = {.begin = 1024, .growth = 1.5f, .backoff = 0.25f, .steps = 3};
    struct loss_scale state = loss_scale_begin(&other);
    for (uint32_t i = 0; i < 3; i++)
        loss_scale_step(&other, &state, false);
    cr_expect(state.scale == 1536 && state.good_steps == 0, "%g", state.scale);
    loss_scale_step(&other, &state, true);
    cr_expect(state.scale == 384 && state.good_steps == 0, "%g", state.scale);
}

/* ---- The trainer ---- */

/* State of an engine that adds simulated overflow to the reference: the next `left` steps change no parameter
 * and are counted as skipped. */
static struct {
    uint32_t left;
    uint64_t skipped;
    uint32_t overflows[MODEL_LAYERS_MAX];
    struct loss_scale now, given;
} scaling;

static enum status set_scaled(void *state, const struct train_state *from)
{
    scaling.given = from->scale;
    scaling.now = from->scale.scale > 0 ? from->scale : loss_scale_begin(&rule);
    return engine_naive.set(state, from);
}

static enum status get_scaled(void *state, struct train_state *into)
{
    into->scale = scaling.now;
    return engine_naive.get(state, into);
}

static enum status steps_scaled(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++) {
        bool overflows = scaling.left > 0;
        loss_scale_step(&rule, &scaling.now, overflows);
        scaling.left -= overflows;
        scaling.skipped += overflows;
        scaling.overflows[scaling.left % 2] += overflows;
        if (!overflows)
            TRY(engine_naive.steps(state, epoch, i, 1));
    }
    return STATUS_OK;
}

static enum status totals_scaled(void *state, struct train_totals *totals)
{
    TRY(engine_naive.totals(state, totals));
    totals->skipped = scaling.skipped;
    scaling.skipped = 0;
    return STATUS_OK;
}

static enum status overflows_scaled(void *state, uint32_t *steps)
{
    (void)state;
    memcpy(steps, scaling.overflows, sizeof scaling.overflows);
    memset(scaling.overflows, 0, sizeof scaling.overflows);
    return STATUS_OK;
}

static struct engine scaled_engine(void)
{
    struct engine engine = engine_naive;
    engine.scales_loss = true;
    engine.set = set_scaled;
    engine.get = get_scaled;
    engine.steps = steps_scaled;
    engine.totals = totals_scaled;
    engine.overflows = overflows_scaled;
    return engine;
}

static struct train_job job_of(const struct net *net, uint32_t epochs, const char *folder)
{
    return (struct train_job){.train = net->train,
                              .initial = net->initial,
                              .epochs = epochs,
                              .verify_steps = 6,
                              .checkpoints = folder,
                              .resume = folder != NULL,
                              .keep = 1};
}

static uint64_t wrong_of(const struct engine *engine, const struct net *net, uint32_t overflows)
{
    const struct train_job job = job_of(net, 1, NULL);
    const struct resources resources = {.threads = 1};
    uint64_t wrong;
    void *trainer;
    must(trainer_open(engine, &resources, &job, &trainer));
    scaling.left = overflows;
    must(trainer_verify(NULL, NULL, trainer, 0, &wrong));
    cr_expect(scaling.now.scale == LOSS_SCALE_BEGIN, "verification has changed the scale");
    trainer_close(trainer);
    return wrong;
}

/* Verification must repeat a step that overflows until the step is applied, and then compare it. A step that
 * always overflows must count as wrong. */
Test(loss_scale, verification_compares_applied_steps)
{
    struct net net;
    const struct engine engine = scaled_engine();
    net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 40, 9, 0.1f);
    cr_expect_eq(wrong_of(&engine, &net, 0), 0);
    cr_expect_eq(wrong_of(&engine, &net, 5), 0);
    cr_expect_gt(wrong_of(&engine, &net, UINT32_MAX), 0);
    net_close(&net);
}

static struct train_epoch next_epoch(void *trainer)
{
    struct train_epoch epoch;
    struct run_time time;
    must(trainer_run(trainer, 0, &time));
    must(trainer_finish(trainer, &epoch));
    must(trainer_keep(NULL, trainer, ""));
    return epoch;
}

static void *open_trainer(const struct engine *engine, const struct train_job *job)
{
    const struct resources resources = {.threads = 1};
    void *trainer;
    must(trainer_open(engine, &resources, job, &trainer));
    return trainer;
}

Test(loss_scale, epoch_reports_skipped_steps)
{
    struct net net;
    const struct engine engine = scaled_engine();
    net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 40, 9, 0);
    const struct train_job job = job_of(&net, 2, NULL);
    void *trainer = open_trainer(&engine, &job);
    scaling.left = 3;
    struct train_epoch epoch = next_epoch(trainer);
    cr_expect(epoch.scales_loss && epoch.totals.skipped == 3 && epoch.loss_scale == 8192);
    cr_expect_str_eq(epoch.overflows, "conv1=2 relu1=1");
    epoch = next_epoch(trainer);
    cr_expect(epoch.scales_loss && epoch.totals.skipped == 0 && epoch.loss_scale == 8192);
    cr_expect_str_eq(epoch.overflows, "");
    trainer_close(trainer);
    trainer = open_trainer(&engine_naive, &job);
    epoch = next_epoch(trainer);
    cr_expect(!epoch.scales_loss && epoch.totals.skipped == 0);
    trainer_close(trainer);
    net_close(&net);
}

/* ---- Layers in fp32, and layers that overflow ---- */

static struct model lenet(void)
{
    struct model model;
    must(model_build(&model_tables[1], (struct shape){1, 1, 16, 16}, 4, &model));
    return model;
}

Test(layer_precision, patterns_choose_layers_with_parameters)
{
    struct model model = lenet();
    must(layer_precision_choose("conv*,fc2", &model));
    for (uint32_t i = 0; i < model.layer_count; i++) {
        const struct layer *layer = &model.layers[i];
        cr_expect_eq(layer->fp32, layer->spec.kind == LAYER_CONV || strcmp(layer->name, "fc2") == 0, "%s",
                     layer->name);
    }
    for (const char *const *wrong = (const char *const[]){"relu1", "conv1,", "fc", "conv1,none", NULL};
         *wrong; wrong++) {
        model = lenet();
        cr_expect_eq(layer_precision_choose(*wrong, &model), STATUS_USAGE, "%s", *wrong);
        cr_expect_not_null(strstr(status_text(), "its layers are conv1, conv2, fc1, fc2"), "%s",
                           status_text());
    }
}

static enum fp32_layer only_the_last(const struct layer *layer)
{
    return layer->spec.kind == LAYER_CONV ? FP32_NEVER
           : strcmp(layer->name, "fc1")   ? FP32_CHOSEN
                                          : FP32_ALWAYS;
}

Test(layer_precision, engines_refuse_layers_by_name)
{
    static const struct {
        const char *patterns, *reason;
    } wrong[] = {{"conv2,fc2", "cannot compute the layer conv2 in fp32; --fp32-layers may name fc2"},
                 {"fc1", "always computes the layer fc1 in fp32; drop --fp32-layers, or name one of fc2"}};
    const struct engine engine = {.keeps_fp32 = only_the_last};
    struct model model = lenet();
    cr_expect_eq(layer_precision_accepts(&engine_naive, &model), STATUS_OK);
    must(layer_precision_choose("fc*", &model));
    cr_expect_eq(layer_precision_accepts(&engine, &model), STATUS_OK);
    cr_expect_eq(layer_precision_accepts(&engine_naive, &model), STATUS_USAGE);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        model = lenet();
        must(layer_precision_choose(wrong[i].patterns, &model));
        cr_expect_eq(layer_precision_accepts(&engine, &model), STATUS_USAGE);
        cr_expect_not_null(strstr(status_text(), wrong[i].reason), "%s", status_text());
    }
}

/* Every parameter must be found in the layer that its tensor is named after. */
Test(layer_precision, parameters_are_found_in_their_layers)
{
    static const char *const names[] = {"lenet", "vit-micro", "resnet-micro", "logreg"};
    struct layer_places places;
    struct model model;
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        const struct model_table *table = model_tables;
        while (strcmp(table->name, names[n]) != 0)
            table++;
        must(model_build(table, (struct shape){1, 1, 28, 28}, 4, &model));
        layer_places_of(&model, &places);
        for (uint32_t t = 0; t < model.tensor_count; t++) {
            const struct model_tensor *tensor = &model.tensors[t];
            for (size_t i = 0; !tensor->is_statistic && i < tensor->values; i += i % 5 + 1) {
                const char *layer = model.layers[layer_places_find(&places, tensor->first + i)].name;
                const bool tokens =
                    strcmp(tensor->name, "pos_embed") == 0 || strcmp(tensor->name, "cls_token") == 0;
                cr_assert(tokens || strncmp(tensor->name, layer, strlen(layer)) == 0, "%s[%zu] is in %s",
                          tensor->name, i, layer);
            }
        }
    }
}

Test(layer_precision, overflows_are_listed_by_number)
{
    const struct model model = lenet();
    uint32_t steps[MODEL_LAYERS_MAX] = {0};
    char text[LAYER_OVERFLOWS_TEXT];
    layer_overflows_text(&model, steps, text);
    cr_expect_str_eq(text, "");
    for (uint32_t i = 0; i < model.layer_count; i++)
        steps[i] = 100 + i;
    layer_overflows_text(&model, steps, text);
    uint32_t shown = 0;
    for (const char *at = text; (at = strchr(at, '=')); at++)
        cr_expect_eq(strtoul(at + 1, NULL, 10), 100 + model.layer_count - ++shown, "%s", text);
    cr_expect_eq(shown, LAYER_OVERFLOWS_MAX);
}

/* ---- Checkpoints ---- */

#ifdef HAVE_XXHASH

/* The checkpoint stores the scale. An engine with loss scaling resumes with this scale, even if an engine
 * without loss scaling ran in between. */
Test(loss_scale, is_saved_in_checkpoints)
{
    char folder[] = "/tmp/fdsl-scale-XXXXXX", command[PATH_MAX];
    struct net net;
    const struct engine engine = scaled_engine();
    cr_assert_not_null(mkdtemp(folder));
    net_open(&net, &engine_naive, &model_tables[0], small, 3, 40, 9, 0);
    const struct train_job job = job_of(&net, 3, folder);
    void *trainer = open_trainer(&engine, &job);
    cr_expect_eq(scaling.given.scale, 0, "a new run must have no scale");
    scaling.left = 2;
    next_epoch(trainer);
    trainer_close(trainer);
    const struct loss_scale left = scaling.now;
    cr_expect(left.scale == 16384 && left.good_steps == 3);
    trainer = open_trainer(&engine_naive, &job);
    next_epoch(trainer);
    trainer_close(trainer);
    trainer = open_trainer(&engine, &job);
    cr_expect(scaling.given.scale == left.scale && scaling.given.good_steps == left.good_steps);
    trainer_close(trainer);
    net_close(&net);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    cr_assert_eq(system(command), 0);
}

#endif
