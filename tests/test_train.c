/* Tests the parts of training: random draws, optimizers, schedules and checkpoints. */
#include <float.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "train/checkpoint.h"
#include "train/trainer.h"
#include "train_support.h"

/* ---- Draws ---- */

Test(train, an_order_contains_every_sample_once)
{
    static const uint32_t counts[] = {1, 2, 3, 5, 64, 65, 257, 1000, 60000};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        uint32_t count = counts[i];
        uint8_t *seen = calloc(count, 1);
        struct draw_order order = draw_order(9, 4, count);
        for (uint32_t index = 0; index < count; index++) {
            uint32_t sample = draw_order_at(&order, index);
            cr_assert_lt(sample, count);
            cr_assert(!seen[sample]++, "%u of %u occurs twice", sample, count);
        }
        free(seen);
    }
}

/* In a random permutation, the mean distance of an element from its original index is a third of the length.
 * The orders of two epochs agree at about one index. */
Test(train, orders_are_shuffled_and_differ_between_epochs)
{
    const uint32_t count = 10000;
    struct draw_order one = draw_order(1, 0, count), two = draw_order(1, 1, count),
                      other = draw_order(2, 0, count);
    double distance = 0;
    uint32_t same_epoch = 0, same_seed = 0, neighbours = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = draw_order_at(&one, i);
        distance += fabs((double)at - i) / count;
        same_epoch += at == draw_order_at(&two, i);
        same_seed += at == draw_order_at(&other, i);
        neighbours += i > 0 && at == draw_order_at(&one, i - 1) + 1;
    }
    cr_expect(fabs(distance / count - 1.0 / 3) < 0.01, "%g", distance / count);
    cr_expect(same_epoch < 8 && same_seed < 8 && neighbours < 8, "%u %u %u", same_epoch, same_seed,
              neighbours);
}

Test(train, dropout_keeps_the_expected_fraction)
{
    static const uint32_t thresholds[] = {0, 64, 128, 255};
    for (size_t t = 0; t < COUNT_OF(thresholds); t++) {
        uint32_t kept = 0, count = 100000;
        for (uint32_t i = 0; i < count; i++)
            kept += draw_kept(draw_dropout(3, 1, 7, 2, i), i, thresholds[t]);
        double expected = 1 - thresholds[t] / 256.0, error = sqrt(expected * (1 - expected) / count);
        cr_expect(fabs((double)kept / count - expected) <= 4 * error, "%u: %u", thresholds[t], kept);
    }
}

Test(train, shifts_stay_in_range)
{
    const struct augment augment = {.shift = 2, .flip = true};
    uint32_t seen[5][5] = {{0}}, flipped[5][5] = {{0}}, flips = 0;
    for (uint32_t sample = 0; sample < 5000; sample++) {
        struct draw_move move = draw_move(&augment, 1, 0, sample);
        cr_assert(abs(move.down) <= 2 && abs(move.right) <= 2);
        seen[move.down + 2][move.right + 2]++;
        flipped[move.down + 2][move.right + 2] += move.flip;
        flips += move.flip;
    }
    for (int i = 0; i < 25; i++) {
        uint32_t count = seen[i / 5][i % 5], mirrored = flipped[i / 5][i % 5];
        cr_expect(count > 120 && count < 280, "%d: %u", i, count);
        cr_expect(4 * mirrored > count && 4 * mirrored < 3 * count,
                  "not half of the samples with this shift are flipped: %u of %u", mirrored, count);
    }
    cr_expect(flips > 2300 && flips < 2700);
    const struct draw_move move = {.down = 1, .right = -1, .flip = true};
    cr_expect_eq(draw_moved(&move, 3, 4, 0, 0), 1 * 4 + 2); /* row 1, column 2 (the second to last) */
    cr_expect_eq(draw_moved(&move, 3, 4, 2, 0), -1);
    cr_expect_eq(draw_moved(&move, 3, 4, 0, 3), -1);
}

/* ---- Training history ---- */

Test(train, times_to_98_and_99_percent_are_set_once)
{
    static const double accuracies[] = {0.9799, 0.98, 0.9899, 0.97, 0.99, 1};
    struct train_history history = {.to_98_s = -1, .to_99_s = -1};
    for (int i = 0; i < 6; i++) {
        train_note_epoch(&history, 2, accuracies[i]);
        cr_expect_eq(history.epochs, (uint32_t)i + 1);
        cr_expect_eq(history.trained_s, 2 * (i + 1));
        cr_expect_eq(history.to_98_s, i < 1 ? -1 : 4, "epoch %d: %g", i + 1, history.to_98_s);
        cr_expect_eq(history.to_99_s, i < 4 ? -1 : 10, "epoch %d: %g", i + 1, history.to_99_s);
    }
}

/* ---- Optimizers, by hand ---- */

static void expect_steps(const struct optimizer *optimizer, const double expected[2])
{
    static const float gradients[2] = {0.5f, -0.25f};
    const struct schedule schedule = {.rate = 0.1};
    float parameter = 1, m = 0, v = 0;
    for (uint64_t step = 0; step < 2; step++) {
        struct update update = optimizer_at(optimizer, &schedule, step);
        optimizer_step(&update, gradients[step], &parameter, &m, &v);
        cr_expect(fabs(parameter - expected[step]) < 1e-6, "step %d: %.7f is not %.7f", (int)step, parameter,
                  expected[step]);
    }
}

Test(train, optimizers_match_hand_computed_values)
{
    /* SGD: the first update is -0.1 * 0.5. After the second gradient, the momentum is 0.9 * 0.5 - 0.25. */
    expect_steps(&(struct optimizer){.kind = OPTIMIZER_SGD, .momentum = 0.9}, (const double[]){0.95, 0.93});
    /* SGD with weight decay: the gradients are 0.5 + 0.2 * 1 and -0.25 + 0.2 * 0.93. */
    expect_steps(&(struct optimizer){.kind = OPTIMIZER_SGD, .weight_decay = 0.2},
                 (const double[]){0.93, 0.9364});
    /* Adam: m and v are 0.05 and 0.00025 after the first step, and 0.02 and 0.00031225 after the second. In
     * step t, m is divided by 1 - 0.9^t, and v by 1 - 0.999^t. */
    const double adam = 0.9 - 0.1 * (0.02 / 0.19) / sqrt(0.00031225 / 0.001999);
    expect_steps(&(struct optimizer){.kind = OPTIMIZER_ADAM, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8},
                 (const double[]){0.9, adam});
    /* AdamW: the updates are those of Adam, and before each update the parameter is multiplied by
     * 1 - 0.1 * 0.1. */
    expect_steps(
        &(struct optimizer){
            .kind = OPTIMIZER_ADAMW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.1},
        (const double[]){0.89, 0.89 * 0.99 + adam - 0.9});
}

Test(train, schedules_have_the_expected_rates)
{
    const struct schedule cosine = {.kind = SCHEDULE_COSINE, .rate = 2, .warmup_steps = 4, .total_steps = 24},
                          steps = {.kind = SCHEDULE_STEP, .rate = 2, .decay_steps = 10, .gamma = 0.5},
                          multistep = {.kind = SCHEDULE_MULTISTEP,
                                       .rate = 2,
                                       .gamma = 0.5,
                                       .milestone_count = 2,
                                       .milestones = {3, 7}},
                          cycles = {.kind = SCHEDULE_COSINE,
                                    .rate = 2,
                                    .least = 1,
                                    .warmup_steps = 4,
                                    .total_steps = 24,
                                    .cycles = 2},
                          overlap = {.kind = SCHEDULE_COSINE,
                                     .rate = 2,
                                     .warmup_steps = 4,
                                     .total_steps = 24,
                                     .overlaps = true},
                          square = {.kind = SCHEDULE_POLYNOMIAL, .rate = 8, .total_steps = 4, .power = 2};
    const double squares[] = {8, 4.5, 2, 0.5, 0, 0}, twice[] = {2, 2, 1, 0.5};
    for (uint64_t i = 0; i < COUNT_OF(squares); i++)
        cr_expect_float_eq(schedule_rate(&square, i), squares[i], 1e-15);
    for (uint64_t i = 0; i < COUNT_OF(twice); i++) /* steps 0, 2, 3 and 7 */
        cr_expect_float_eq(schedule_rate(&multistep, (const uint64_t[]){0, 2, 3, 7}[i]), twice[i], 1e-15);
    cr_expect_float_eq(schedule_rate(&cycles, 4), 2, 1e-15);
    cr_expect_float_eq(schedule_rate(&cycles, 9), 1.5, 1e-15);
    cr_expect_float_eq(schedule_rate(&cycles, 14), 2, 1e-15);
    cr_expect_float_eq(schedule_rate(&cycles, 19), 1.5, 1e-15);
    cr_expect_float_eq(schedule_rate(&cycles, 24), 1, 1e-15);
    cr_expect_float_eq(schedule_rate(&cosine, 0), 0.5, DBL_EPSILON);
    cr_expect_float_eq(schedule_rate(&cosine, 3), 2, DBL_EPSILON);
    cr_expect_float_eq(schedule_rate(&cosine, 4), 2, DBL_EPSILON);
    cr_expect_float_eq(schedule_rate(&cosine, 14), 1, 1e-15);
    cr_expect_float_eq(schedule_rate(&cosine, 24), 0, DBL_EPSILON);
    cr_expect_float_eq(schedule_rate(&overlap, 3), 2, DBL_EPSILON);
    cr_expect_float_eq(schedule_rate(&overlap, 4), 1 + sqrt(3) / 2, 1e-15); /* a sixth of half a turn */
    cr_expect_float_eq(schedule_rate(&overlap, 12), 1, 1e-15);
    cr_expect_float_eq(schedule_rate(&overlap, 24), 0, DBL_EPSILON);
    cr_expect_float_eq(schedule_rate(&steps, 9), 2, DBL_EPSILON);
    cr_expect_float_eq(schedule_rate(&steps, 10), 1, DBL_EPSILON);
    cr_expect_float_eq(schedule_rate(&steps, 25), 0.5, DBL_EPSILON);
}

Test(train, initial_parameters_cover_their_range)
{
    struct model model;
    must(model_build(&model_tables[2], (struct shape){1, 1, 28, 28}, 10, &model));
    float *parameters = malloc(model.arena_values * sizeof *parameters);
    model_initialise(&model, 0, parameters);
    for (uint32_t t = 0; t < model.tensor_count; t++) {
        const struct model_tensor *tensor = &model.tensors[t];
        float bound = tensor->spread, least = 1, most = -1;
        for (size_t i = 0; i < tensor->values; i++) {
            least = fminf(least, parameters[tensor->first + i]);
            most = fmaxf(most, parameters[tensor->first + i]);
        }
        cr_expect(least >= -bound && most < bound, "%s", tensor->name);
        cr_expect(tensor->values < 100 || (least < -0.9f * bound && most > 0.9f * bound), "%s", tensor->name);
        cr_expect_eq(tensor->first % MODEL_ALIGNMENT, 0);
    }
    free(parameters);
}

Test(train, half_precision_values_are_decoded)
{
    static const struct {
        uint16_t bits;
        float value;
    } known[] = {{0x3C00, 1},        {0xC000, -2}, {0x7BFF, 65504},
                 {0x0001, 0x1p-24f}, {0x8000, 0},  {0x3555, 0x1.554p-2f}};
    for (size_t i = 0; i < COUNT_OF(known); i++)
        cr_expect_eq(half_to_float(known[i].bits), known[i].value);
    cr_expect(isinf(half_to_float(0x7C00)) && isnan(half_to_float(0x7C01)));
}

/* ---- Input and output of an engine ---- */

/* After normalisation, each channel of the training set must have mean 0 and standard deviation 1. */
Test(train, samples_are_normalised)
{
    struct data data;
    data_random(&data, (struct shape){3, 1, 8, 8}, 4, 50, 5);
    float values[3 * 64];
    for (uint32_t c = 0; c < 3; c++) {
        double sum = 0, squares = 0;
        for (uint32_t n = 0; n < 50; n++) {
            data_gather(&data, data_sample(&data, DATA_TRAIN, n), (struct draw_move){0}, values);
            for (int i = 0; i < 64; i++) {
                sum += values[c * 64 + i];
                squares += values[c * 64 + i] * values[c * 64 + i];
            }
        }
        cr_expect(fabs(sum / 3200) < 1e-5 && fabs(squares / 3200 - 1) < 1e-5, "%g %g", sum, squares);
    }
    data_close(&data);
}

/* One engine runs all steps, including a short last batch, and evaluates all samples in one call. The other
 * engine makes one call per step, and one call per sample. */
Test(train, steps_and_logits_do_not_depend_on_call_sizes)
{
    const struct shape shape = {1, 1, 16, 16};
    struct net one, two;
    net_open(&one, &engine_naive, &model_tables[1], shape, 4, 19, 7, 0);
    net_open(&two, &engine_naive, &model_tables[1], shape, 4, 19, 7, 0);
    cr_assert_eq(train_steps(&one.train), 3);
    must(engine_naive.steps(one.state, 0, 0, 3));
    for (uint32_t step = 0; step < 3; step++)
        must(engine_naive.steps(two.state, 0, step, 1));
    struct train_totals totals;
    must(engine_naive.totals(one.state, &totals));
    cr_expect(totals.samples == 19 && totals.bad_step == TRAIN_FINE && totals.correct <= 19);
    float together[5 * 4], apart[5 * 4];
    must(engine_naive.evaluate(one.state, DATA_TEST, 0, 5, together));
    for (uint32_t i = 0; i < 5; i++)
        must(engine_naive.evaluate(two.state, DATA_TEST, i, 1, apart + 4 * i));
    cr_expect_arr_eq(together, apart, sizeof apart);
    net_close(&one);
    net_close(&two);
}

/* Compares counts of floating-point operations with counts by hand. Taps of a convolution on the zeros of the
 * padding do not count. test_roofline.c also tests the counts of the backward pass. */
Test(train, flops_match_hand_counts)
{
    struct model model;
    must(model_build(&model_tables[2], (struct shape){1, 1, 28, 28}, 10, &model));
    const double conv1 = 26 * 26 * 32 * 9.0, conv2 = 24 * 24 * 64 * 32 * 9.0, fc1 = 9216 * 128.0, fc2 = 1280;
    cr_expect_eq(model.multiplications, conv1 + conv2 + fc1 + fc2);
    const struct layer_spec specs[] = {
        {.kind = LAYER_CONV, .channels = 3, .kernel = {1, 3, 3}, .padding = {0, 1, 1}},
        {.kind = LAYER_LINEAR}};
    const struct model_table padded = {"padded", "", false, specs, COUNT_OF(specs)};
    must(model_build(&padded, (struct shape){2, 1, 4, 5}, 7, &model));
    /* At the first and at the last position of an axis, one of three taps is outside. So the axis of length
     * 4 has 3 * 4 - 2 = 10 taps, and the axis of length 5 has 3 * 5 - 2 = 13. */
    cr_expect_eq(model.multiplications, 2 * 3 * 10 * 13 + 60 * 7.0);
    cr_expect_eq(model_flops(&model, &(struct model_savings){.backward = true}), 2 * model.multiplications);
}

Test(train, nan_is_the_worst_value)
{
    cr_expect(isnan(worse(NAN, 1)) && isnan(worse(1, NAN)) && isnan(worse(worse(0, NAN), 2)));
    cr_expect_eq(worse(1, 2), 2);
    const float logits[] = {NAN, 0, 3, 1};
    const uint32_t labels[] = {0, 0};
    const struct data_set set = {.count = 2, .labels = (uint32_t *)labels};
    struct judgement judged;
    must(logits_judge(logits, &set, 2, &judged));
    cr_expect(isnan(judged.loss) && judged.accuracy == 0.5 && isnan(judged.precision));
}

/* Class 2 is never shown. */
Test(train, multi_hot_labels_are_judged_by_mean_average_precision)
{
    const float logits[] = {2, 0, 1, -1, 0, 9, 3, 1, 0, 0, 0, 0, NAN, 0, 0};
    uint32_t labels[] = {0, 1, 2, 3, 4}, rows[] = {1, 3, 0, 2, 1};
    const struct data_set set = {.count = 5, .labels = labels, .multi_hot = rows};
    struct judgement judged;
    must(logits_judge(logits, &set, 3, &judged));
    /* Class 0: shown by samples 0, 1 and 4, which have ranks 2, 4 and 5: (1/2 + 2/4 + 3/5) / 3. Class 1:
     * shown by samples 1 and 3, which tie with 0 and 4 at rank 5 of 5: 2/5. */
    cr_expect_float_eq(judged.precision, ((1 / 2.0 + 2 / 4.0 + 3 / 5.0) / 3 + 2 / 5.0) / 2, 1e-12, "%g",
                       judged.precision);
    cr_expect_eq(judged.accuracy, 1 / 5.0, "%g", judged.accuracy);
    double loss = 0;
    for (int i = 0; i < 12; i++) {
        const double x = logits[i], p = 1 / (1 + exp(-x));
        loss -= rows[i / 3] >> i % 3 & 1 ? log(p) : log(1 - p);
    }
    cr_expect(isnan(judged.loss));
    const struct data_set finite = {.count = 4, .labels = labels, .multi_hot = rows};
    must(logits_judge(logits, &finite, 3, &judged));
    cr_expect_float_eq(judged.loss, loss / 12, 1e-9, "%g", judged.loss);
}

/* ---- Checkpoints ---- */

#ifdef HAVE_XXHASH

static char folder[] = "/tmp/fdsl-train-XXXXXX";

static void make_folder(void)
{
    cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void)
{
    char command[PATH_MAX];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    cr_assert_eq(system(command), 0);
}

TestSuite(checkpoint, .init = make_folder, .fini = remove_folder, .timeout = 60);

#define VALUES 96

static struct option_value samples_of_test[] = {{"train-size", OPTION_VALUE_WHOLE, 200, 0, NULL},
                                                {"fit", OPTION_VALUE_WORD, 0, 0, (char *)"crop"}},
                           identity_of_test[] = {{"model", OPTION_VALUE_WORD, 0, 0, (char *)"lenet"},
                                                 {"batch", OPTION_VALUE_WHOLE, UINT64_MAX, 0, NULL},
                                                 {"lr", OPTION_VALUE_REAL, 0, 0.1, NULL},
                                                 {"flip", OPTION_VALUE_FLAG, 1, 0, NULL},
                                                 {"init", OPTION_VALUE_HASH, 0xfeed, 0, NULL}};

/* Expects that a list has the values of an array. */
static void expect_values(const struct option_values *list, const struct option_value *values, size_t count)
{
    cr_assert_eq(list->count, count);
    for (size_t i = 0; i < count; i++)
        cr_expect(option_value_same(&list->of[i], &values[i]) &&
                      option_values_find(list, values[i].name) == &list->of[i],
                  "%s", values[i].name);
}

static enum status write_rows(uint32_t epochs, uint32_t keep, const char *rows)
{
    float arenas[3][VALUES];
    uint32_t shares[] = {18, 6};
    for (int i = 0; i < 3 * VALUES; i++)
        arenas[i / VALUES][i % VALUES] = (float)i + (float)epochs / 16;
    struct checkpoint checkpoint = {.model = "lenet",
                                    .input = {1, 1, 16, 16},
                                    .classes = 7,
                                    .scale = {2},
                                    .offset = {-1},
                                    .history = {epochs, 1.5, -1, 0.25},
                                    .hashes = {11, 12},
                                    .data = (char *)"digits",
                                    .samples = {samples_of_test, COUNT_OF(samples_of_test)},
                                    .row = (char *)rows,
                                    .identity = {identity_of_test, COUNT_OF(identity_of_test)},
                                    .shares = shares,
                                    .share_count = 2,
                                    .balance = BALANCE_MEASURED,
                                    .state = {arenas[0], arenas[1], arenas[2], {0, 0}},
                                    .arena_values = VALUES};
    return checkpoint_write(folder, keep, &checkpoint);
}

static void write_one(uint32_t epochs, uint32_t keep)
{
    must(write_rows(epochs, keep, "a,b\n1,2\n"));
}

static void path_of(uint32_t epochs, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/epoch-%06u.ckpt", folder, epochs);
}

/* Earlier versions stored whole numbers of options that now accept real ones, such as --lr-step. */
Test(checkpoint, whole_numbers_equal_real_ones)
{
    const struct option_value whole = {"lr-step", OPTION_VALUE_WHOLE, 10, 0, NULL},
                              real = {"lr-step", OPTION_VALUE_REAL, 0, 10, NULL},
                              other = {"lr-step", OPTION_VALUE_REAL, 0, 10.75, NULL},
                              flag = {"lr-step", OPTION_VALUE_FLAG, 10, 10, NULL};
    cr_expect(option_value_same(&whole, &real) && option_value_same(&real, &whole));
    cr_expect(!option_value_same(&whole, &other) && !option_value_same(&other, &whole));
    cr_expect(!option_value_same(&flag, &real) && !option_value_same(&flag, &whole));
    cr_expect(!option_value_same(&whole, NULL) && option_value_same(NULL, NULL));
}

Test(checkpoint, a_written_checkpoint_is_read_back)
{
    struct checkpoint back;
    bool found;
    bool exists;
    must(checkpoint_read_latest(folder, true, &back, &found));
    must(checkpoint_exists(folder, &exists));
    cr_expect(!found && !exists);
    write_one(3, 2);
    must(checkpoint_read_latest(folder, true, &back, &found));
    must(checkpoint_exists(folder, &exists));
    cr_assert(found && exists);
    cr_expect_str_eq(back.data, "digits");
    cr_expect_str_eq(back.row, "a,b\n1,2\n");
    expect_values(&back.samples, samples_of_test, COUNT_OF(samples_of_test));
    cr_expect(back.hashes[DATA_TRAIN] == 11 && back.hashes[DATA_TEST] == 12);
    cr_expect_str_eq(back.model, "lenet");
    expect_values(&back.identity, identity_of_test, COUNT_OF(identity_of_test));
    cr_expect(back.share_count == 2 && back.shares[0] == 18 && back.shares[1] == 6 &&
              back.balance == BALANCE_MEASURED);
    cr_expect(back.input.height == 16 && back.classes == 7 && back.scale[0] == 2 && back.offset[0] == -1);
    cr_expect(back.history.epochs == 3 && back.history.trained_s == 1.5 && back.history.to_98_s == -1 &&
              back.history.to_99_s == 0.25);
    for (int i = 0; i < VALUES; i++)
        cr_expect(back.state.parameters[i] == (float)i + 3.0f / 16 &&
                  back.state.m[i] == (float)(i + VALUES) + 3.0f / 16 &&
                  back.state.v[i] == (float)(i + 2 * VALUES) + 3.0f / 16);
    checkpoint_free(&back);
}

/* Writes a checkpoint of logreg with these options, and returns what a run with other options gets. */
static enum status resume_with(struct option_value *was, size_t was_count, struct option_value *is,
                               size_t is_count)
{
    const struct train_job job = {.checkpoints = folder, .identity = {is, is_count}};
    float values[1] = {0};
    struct checkpoint old = {.model = "logreg",
                             .data = (char *)"digits",
                             .row = (char *)"",
                             .identity = {was, was_count},
                             .state = {values, values, values, {0, 0}},
                             .arena_values = 1};
    must(checkpoint_write(folder, 1, &old));
    return resume_check_options(&job, "logreg");
}

/* Before the data are read, the hashes are not known, and a batch may be larger than the training set. */
Test(checkpoint, options_are_compared_as_values)
{
    struct option_value was[] = {{"mean", OPTION_VALUE_WORD, 0, 0, (char *)"0.5,0.25,1"},
                                 {"batch", OPTION_VALUE_WHOLE, 20, 0, NULL},
                                 {"flip", OPTION_VALUE_FLAG, 0, 0, NULL},
                                 {"train-samples", OPTION_VALUE_HASH, 2, 0, NULL}},
                        is[COUNT_OF(was)];
    memcpy(is, was, sizeof is);
    is[3].whole = 1;
    must(resume_with(was, 4, is, 4));
    is[1].whole = 64;
    must(resume_with(was, 4, is, 4));
    is[1].whole = 10;
    cr_expect_eq(resume_with(was, 4, is, 4), STATUS_USAGE);
    cr_expect(strstr(status_text(), "batch=20 in the checkpoint, 10 now; use --batch 20"), "%s",
              status_text());
    is[0].word = (char *)"0.5,0.26,1";
    cr_expect_eq(resume_with(was, 4, is, 4), STATUS_USAGE);
    cr_expect(strstr(status_text(), "mean=0.5,0.25,1 in the checkpoint, 0.5,0.26,1 now"), "%s",
              status_text());
    cr_expect_eq(resume_with(was, 4, was, 2), STATUS_USAGE);
    cr_expect(strstr(status_text(), "flip=0 in the checkpoint, none now; give --flip=no"), "%s",
              status_text());
    cr_expect_eq(resume_with(was, 2, was, 4), STATUS_USAGE);
    cr_expect(strstr(status_text(), "no flip in the checkpoint, 0 now; drop --flip"), "%s", status_text());
}

/* Malformed options must be refused: the bytes of a file may be hostile. */
Test(checkpoint, malformed_options_are_refused)
{
    static const unsigned char good[] = {4, 1, 'a', 2, 0, 0, 0, 'x', 'y', 1, 1, 'b', 1, 0, 0, 0, 0, 0, 0, 0};
    static const struct {
        size_t at;
        unsigned char value;
    } faults[] = {{0, 0}, {0, 6}, {1, 0}, {1, 32}, {2, 0}, {3, 200}, {7, 0}, {9, 4}, {12, 2}, {19, 1}};
    struct option_values list;
    unsigned char bytes[sizeof good];
    for (size_t size = 0; size <= sizeof good; size++) {
        const bool whole = size == 0 || size == 9 || size == sizeof good;
        cr_expect_eq(option_values_decode(good, size, &list), whole ? STATUS_OK : STATUS_FAILED, "%zu", size);
        option_values_free(&list);
    }
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        memcpy(bytes, good, sizeof bytes);
        bytes[faults[i].at] = faults[i].value;
        cr_expect_eq(option_values_decode(bytes, sizeof bytes, &list), STATUS_FAILED, "fault %zu", i);
        option_values_free(&list);
    }
    memcpy(bytes, (unsigned char[]){3, 1, 'r', 0, 0, 0, 0, 0, 0, 0xf0, 0x7f}, 11); /* infinite */
    cr_expect_eq(option_values_decode(bytes, 11, &list), STATUS_FAILED);
    option_values_free(&list);
}

/* A checkpoint within an epoch has the sums of the steps so far. The moving average is a fourth arena. */
Test(checkpoint, a_checkpoint_within_an_epoch_is_read_back)
{
    float arenas[4][VALUES];
    for (int i = 0; i < 4 * VALUES; i++)
        arenas[i / VALUES][i % VALUES] = (float)i;
    const struct train_totals sums = {.loss = 1.5,
                                      .correct = 3,
                                      .samples = 8,
                                      .skipped = 1,
                                      .norms = 2.5,
                                      .normed = 4,
                                      .bad_step = TRAIN_FINE};
    struct checkpoint back, within = {.model = "lenet",
                                      .history = {2, 1.5, -1, -1},
                                      .partial = {5, sums, 0.5, 0.25},
                                      .data = (char *)"digits",
                                      .row = (char *)"",
                                      .state = {arenas[0], arenas[1], arenas[2], {0, 0}, arenas[3]},
                                      .arena_values = VALUES};
    bool found;
    must(checkpoint_write(folder, 2, &within));
    must(checkpoint_read_latest(folder, true, &back, &found));
    cr_assert(found && back.history.epochs == 2 && back.partial.steps == 5 && back.state.ema);
    cr_expect(back.partial.epoch_s == 0.5 && back.partial.exchange_s == 0.25);
    cr_expect(back.partial.totals.loss == 1.5 && back.partial.totals.samples == 8 &&
              back.partial.totals.norms == 2.5 && back.partial.totals.normed == 4 &&
              back.partial.totals.bad_step == TRAIN_FINE);
    cr_expect(memcmp(back.state.v, arenas[2], sizeof arenas[2]) == 0 &&
              memcmp(back.state.ema, arenas[3], sizeof arenas[3]) == 0);
    cr_expect_eq(checkpoint_parameters(&back), back.state.ema);
    checkpoint_free(&back);
}

Test(checkpoint, keeps_the_latest)
{
    char path[PATH_MAX];
    for (uint32_t epochs = 1; epochs <= 12; epochs++)
        write_one(epochs, 3);
    for (uint32_t epochs = 1; epochs <= 12; epochs++) {
        path_of(epochs, path);
        cr_expect_eq(access(path, F_OK) == 0, epochs > 9, "%u", epochs);
    }
}

/* Rows that are too long must be refused before anything is written. Rows of the maximum length must be
 * readable. */
Test(checkpoint, the_length_of_rows_is_limited)
{
    enum { LONGEST = 1 << 24 };
    struct checkpoint back;
    bool found;
    char *rows = malloc(LONGEST + 2);
    cr_assert_not_null(rows);
    memset(rows, 'r', LONGEST + 1);
    rows[LONGEST + 1] = '\0';
    write_one(1, 1);
    cr_expect_eq(write_rows(2, 1, rows), STATUS_FAILED);
    cr_expect(strstr(status_text(), folder) &&
                  strstr(status_text(), "the rows of all ranks is 16777217 bytes, but a checkpoint can hold "
                                        "only 16777216; start fewer ranks, or drop --checkpoint"),
              "%s", status_text());
    must(checkpoint_read_latest(folder, true, &back, &found));
    cr_expect(found && back.history.epochs == 1);
    checkpoint_free(&back);
    rows[LONGEST] = '\0';
    must(write_rows(2, 1, rows));
    must(checkpoint_read_latest(folder, true, &back, &found));
    cr_expect(found && back.history.epochs == 2 && strcmp(back.row, rows) == 0);
    checkpoint_free(&back);
    free(rows);
}

static void expect_fault(const char *path, const char *words)
{
    struct checkpoint back;
    cr_expect_eq(checkpoint_read(path, &back), STATUS_FAILED);
    cr_expect(strstr(status_text(), path) && strstr(status_text(), words), "'%s' lacks '%s'", status_text(),
              words);
    checkpoint_free(&back);
}

/* A flipped bit in any byte, and any truncation, must be detected. Tests every 7th byte and every 13th
 * length. */
Test(checkpoint, detects_damage)
{
    char path[PATH_MAX], *bytes;
    size_t size;
    write_one(1, 1);
    path_of(1, path);
    must(file_read(path, &bytes, &size));
    for (size_t at = 0; at < size; at += 7) {
        bytes[at] ^= 16;
        must(file_write_atomic(path, bytes, size));
        struct checkpoint back;
        cr_expect_eq(checkpoint_read(path, &back), STATUS_FAILED, "byte %zu", at);
        checkpoint_free(&back);
        bytes[at] ^= 16;
    }
    for (size_t length = 0; length < size; length += 13) {
        must(file_write_atomic(path, bytes, length));
        expect_fault(path, "truncated");
    }
    bytes[8] = 6; /* first byte of the schema */
    must(file_write_atomic(path, bytes, size));
    expect_fault(path, "has schema 6; this program reads 8");
    must(file_write_atomic(path, "hello", 5));
    expect_fault(path, "its first bytes are not those of a checkpoint; name another checkpoint");
    free(bytes);
}

/* If the latest checkpoint is damaged, the checkpoint before it must be read. If all checkpoints are damaged,
 * reading must fail. */
Test(checkpoint, reads_the_latest_undamaged_one)
{
    char path[PATH_MAX];
    struct checkpoint back;
    bool found;
    write_one(1, 3);
    write_one(2, 3);
    path_of(2, path);
    cr_assert_eq(truncate(path, 1000), 0);
    must(checkpoint_read_latest(folder, true, &back, &found));
    cr_expect(found && back.history.epochs == 1);
    checkpoint_free(&back);
    path_of(1, path);
    cr_assert_eq(truncate(path, 10), 0);
    cr_expect_eq(checkpoint_read_latest(folder, true, &back, &found), STATUS_FAILED);
    cr_expect(!found);
}

/* Only a checkpoint with detected damage may be skipped and later overwritten. A checkpoint of a newer
 * schema, and a file that cannot be read, must cause an error. */
Test(checkpoint, skips_only_damaged_ones)
{
    char path[PATH_MAX], *bytes;
    size_t size;
    struct checkpoint back;
    bool found;
    write_one(1, 3);
    write_one(2, 3);
    path_of(2, path);
    must(file_read(path, &bytes, &size));
    bytes[8] = 6;
    must(file_write_atomic(path, bytes, size));
    free(bytes);
    cr_expect_eq(checkpoint_read_latest(folder, true, &back, &found), STATUS_FAILED);
    cr_expect(!found && strstr(status_text(), "has schema 6"), "%s", status_text());
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(mkdir(path, 0777), 0); /* cannot be read, like a file of another user */
    cr_expect_eq(checkpoint_read_latest(folder, true, &back, &found), STATUS_FAILED);
    cr_expect(!found && strstr(status_text(), "not a regular file"), "%s", status_text());
    cr_expect_eq(checkpoint_read_latest("/dev/null", true, &back, &found), STATUS_FAILED);
    cr_expect_eq(checkpoint_exists("/dev/null", &found), STATUS_FAILED);
}

/* Only one training run may lock a folder. Locking removes incomplete files of a killed training run, but no
 * other file. */
Test(checkpoint, only_one_training_run_can_lock_a_folder)
{
    char path[PATH_MAX], other[PATH_MAX];
    int first, second;
    snprintf(path, sizeof path, "%s/epoch-000002.ckpt.123-0.tmp", folder);
    snprintf(other, sizeof other, "%s/mine.tmp", folder);
    must(file_write_atomic(path, "x", 1));
    must(file_write_atomic(other, "x", 1));
    must(checkpoint_lock(folder, true, &first));
    cr_expect(access(path, F_OK) != 0 && access(other, F_OK) == 0);
    cr_expect_eq(checkpoint_lock(folder, true, &second), STATUS_USAGE);
    cr_expect(strstr(status_text(), "another training run is writing there"), "%s", status_text());
    checkpoint_unlock(first);
    must(checkpoint_lock(folder, true, &second));
    checkpoint_unlock(second);
}

#endif
