/* Tests checkpoints, tests and rows within an epoch of training. */
#include "same_state.h"

#include "cells.h"
#include "core/portable.h"
#include "shell.h"

TestSuite(train_steps, .init = shell_set_up, .fini = shell_tear_down, .timeout = 300);

/* Epochs of 13 steps. */
#define SMALL  "$P --variant train-naive --model logreg --train-size 200 --test-size 50 --batch 16 "
#define THREE  SMALL "--epochs 3 "
#define LOGGED SMALL "--log log.csv --log-steps 5 --test-steps 7 "

#ifdef _OPENMP
#define TRAINED "train-omp"
#else
#define TRAINED "train-naive"
#endif
/* Epochs of 13 steps of a transformer. Most options of recipes work with it. */
#define RECIPE                                                                                         \
    "$P --variant " TRAINED " --threads 2 --model vit-micro --train-size 50 --test-size 20 --batch 4 " \
    "--epochs 2 --optimizer adamw --lr 0.003 --lr-schedule cosine --weight-decay 0.05 --shift 1 --flip "
#define ROWS  "--log-steps 4 --test-steps 9 "
#define STOPS ROWS "--checkpoint-steps 5 --keep 99 "

/* Compares the step, the epoch and the number of samples in row `row` of the log. If `tested` is true, the
 * row must have test results; otherwise it must have none. */
static void expect_row(size_t row, double step, double epoch, double samples, bool tested)
{
    cr_expect(number(out, row, "step") == step && number(out, row, "epoch") == epoch &&
                  number(out, row, "samples_seen") == samples,
              "row %zu: %s", row, out);
    cr_expect_eq(*value(out, row, "test_acc") != '\0', tested, "row %zu: %s", row, out);
    cr_expect_eq(*value(out, row, "test_loss") != '\0', tested, "row %zu: %s", row, out);
}

/* The log must have a row after every 5th step, after every 7th step, and after each epoch. The rows after
 * every 7th step and after epochs have test results. */
Test(train_steps, the_log_has_rows_within_epochs)
{
    EXPECT(0, LOGGED "--epochs 2 --lr-schedule cosine --out rows.csv");
    char log[1 << 16];
    EXPECT(0, "cat log.csv");
    cr_assert_lt(strlen(out), sizeof log);
    memcpy(log, out, strlen(out) + 1);
    cr_assert_eq(count_of(out, "\n"), 1 + 10, "%s", out);
    static const struct {
        double step, epoch, samples;
        bool tested;
    } wanted[] = {{5, 1, 80, false},   {7, 1, 112, true},   {10, 1, 160, false}, {13, 1, 200, true},
                  {14, 2, 216, true},  {15, 2, 232, false}, {20, 2, 312, false}, {21, 2, 328, true},
                  {25, 2, 392, false}, {26, 2, 400, true}};
    for (size_t i = 0; i < COUNT_OF(wanted); i++)
        expect_row(i + 1, wanted[i].step, wanted[i].epoch, wanted[i].samples, wanted[i].tested);
    expect_cells(log, 1, "schema=steps/1;variant=train-naive;model=logreg;gpu_memory_bytes=");
    cr_expect(number(log, 2, "items_per_s") > 0 && number(log, 10, "lr") < number(log, 1, "lr"), "%s", log);
    /* The mean over the rows of an epoch, weighted by samples, is the mean over the epoch. */
    double losses = 0, right = 0;
    for (size_t i = 0; i < 4; i++) {
        double samples = wanted[i].samples - (i ? wanted[i - 1].samples : 0);
        losses += samples * number(log, i + 1, "loss");
        right += samples * number(log, i + 1, "accuracy");
    }
    EXPECT(0, "cat rows.csv");
    cr_expect_float_eq(losses / 200, number(out, 1, "train_loss"), 1e-6, "%s", out);
    cr_expect_float_eq(right / 200, number(out, 1, "train_acc"), 1e-6, "%s", out);
    cr_expect_eq(number(log, 4, "test_loss"), number(out, 1, "test_loss"), "%s", log);
    cr_expect_eq(number(log, 10, "lr"), number(out, 2, "last_lr"), "%s", log);
}

/* Rows, tests and checkpoints within epochs do not change the parameters. --verify, which repeats each epoch,
 * finds no error. */
Test(train_steps, rows_tests_and_checkpoints_do_not_change_the_parameters)
{
    EXPECT(0, THREE "--shift 2 --export whole");
#ifdef HAVE_XXHASH
    EXPECT(0, LOGGED "--epochs 3 --shift 2 --export stopped --checkpoint k --checkpoint-steps 4 --verify");
#else
    EXPECT(0, LOGGED "--epochs 3 --shift 2 --export stopped --verify");
#endif
    EXPECT(0, "cmp whole stopped");
}

/* Returns the sum of the column over the first `rows` rows, each multiplied by its number of steps. */
static double sum_over_steps(const char *log, size_t rows, const char *column)
{
    double sum = 0, before = 0;
    for (size_t i = 1; i <= rows; i++) {
        const double step = number(log, i, "step");
        sum += (step - before) * number(log, i, column);
        before = step;
    }
    return sum;
}

/* A step in several parts (--accumulate) counts as one update of the parameters. The row of an epoch has the
 * mean of the gradient norms of its steps. */
Test(train_steps, rows_count_updates_and_have_norms)
{
    static char whole[sizeof out], parts[sizeof out];
    EXPECT(0, RECIPE ROWS "--log whole.csv --clip-norm 0.5");
    EXPECT(0, RECIPE ROWS "--log parts.csv --clip-norm 0.5 --accumulate 3 --out rows.csv");
    EXPECT(
        0,
        "columns() { cut -d, -f 7-14,17 \"$1\"; }; columns whole.csv > a; columns parts.csv > b; diff a b");
    EXPECT(0, "cat whole.csv");
    snprintf(whole, sizeof whole, "%s", out);
    EXPECT(0, "cat parts.csv");
    snprintf(parts, sizeof parts, "%s", out);
    const size_t rows = count_of(parts, "\n") - 1;
    cr_assert_eq(number(parts, rows, "step"), 26, "%s", parts);
    cr_expect_eq(number(parts, rows, "samples_seen"), 100);
    for (size_t i = 1; i <= rows; i++) {
        cr_expect_float_eq(number(parts, i, "loss"), number(whole, i, "loss"), 1e-3, "%s%s", whole, parts);
        cr_expect_float_eq(number(parts, i, "gradient_norm"), number(whole, i, "gradient_norm"),
                           1e-2 * number(whole, i, "gradient_norm"), "%s%s", whole, parts);
    }
    size_t first = 0; /* the number of rows of the first epoch */
    while (first < rows && number(parts, first + 1, "epoch") == 1)
        first++;
    EXPECT(0, "cat rows.csv");
    cr_expect_float_eq(sum_over_steps(parts, first, "gradient_norm") / 13, number(out, 1, "gradient_norm"),
                       1e-4, "%s", out);
    EXPECT_PRINTS(0, " gradient_norm ",
                  RECIPE ROWS "--log none.csv && cut -d, -f 18 none.csv | sort -u | tr '\\n' ' '");
    EXPECT(0, "test $(cut -d, -f 18 none.csv | sort -u | grep -c .) -eq 1");
}

Test(train_steps, rejects_invalid_options)
{
    static const char *const cases[][2] = {
        {"--log-steps 5", "--log-steps needs --log FILE; add that, or drop --log-steps"},
        {"--test-steps 5", "--test-steps needs --log FILE; add that, or drop --test-steps"},
        {"--checkpoint-steps 5", "--checkpoint-steps needs --checkpoint DIR; add that"},
        {"--log log.csv --log-steps 0", "--log-steps"},
        {"--log /dev/full", "--log: /dev/full is a device or pipe"},
        {"--log same --out same", "name the same file"},
        {"--log log.csv --lr 0.1,0.01", "--log is for one combination"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        run(SMALL "%s", cases[i][0]);
        expect_line(2, cases[i][1]);
    }
}

/* Figures cannot tell the rows of two training runs with the same seed apart. */
Test(train_steps, rows_of_another_training_give_a_warning)
{
    EXPECT(0, LOGGED "--epochs 1 --checkpoint k");
    cr_expect(!says("already has rows"), "%s", out);
    EXPECT(0, LOGGED "--epochs 2 --checkpoint k --resume");
    cr_expect(!says("already has rows"), "%s", out);
    EXPECT(0, LOGGED "--epochs 1 --seed 3");
    cr_expect(!says("already has rows"), "%s", out);
    EXPECT_PRINTS(0, "--log log.csv already has rows of another training run with this variant",
                  LOGGED "--epochs 1");
}

/* A file with other columns is refused before training begins, and does not change. */
Test(train_steps, other_files_are_refused)
{
    EXPECT(0, "printf 'schema,x\\nother/1,2\\n' > log.csv && cp log.csv before");
    run(LOGGED "--epochs 1000000");
    expect_line(2, "--log: log.csv has other columns (column 2 is 'x', not 'time_utc'); name another file");
    EXPECT(0, "cmp log.csv before");
}

/* A limit on the size of files has the effect of a full disk. */
Test(train_steps, a_full_disk_ends_training_and_leaves_complete_rows)
{
    run("(trap '' XFSZ; ulimit -f 1; " SMALL "--log log.csv --log-steps 1 --epochs 100 --format csv)");
    cr_expect_eq(status, 1, "%s", out);
    EXPECT_OUT("--log: log.csv: a row could not be written (File too large)");
    EXPECT_EXACTLY(
        0, "\n",
        "test $(grep -c . log.csv) -gt 1 && awk -F, 'NF != 23 { exit 1 }' log.csv && tail -c 1 log.csv");
}

#ifdef HAVE_XXHASH

/* Training is killed several times, each time after another checkpoint within an epoch. It must end with the
 * parameters and the rows of an uninterrupted training run with the same options. If training ends before it
 * can be killed, as on a busy machine, it begins again. */
static void kill_within_epochs(const char *variant, const char *options, bool averages)
{
    char train[512], whole[PATH_MAX], killed[PATH_MAX];
    snprintf(train, sizeof train,
             "$P --variant %s --threads 2 %s --train-size 200 --test-size 20 --batch 4 --epochs 3 "
             "--lr-schedule cosine --shift 1 --checkpoint-steps 3 --log-steps 4 --keep 2",
             variant, options);
    EXPECT(0, "%s --checkpoint whole --log whole.csv --out whole_rows.csv --export whole.safetensors", train);
    EXPECT_PRINTS(
        0, "3 kills",
        "for trial in 1 2 3 4 5 6; do kills=0; rm -rf k log.csv rows.csv killed.safetensors; "
        "for i in 1 2 3; do before=$(ls k 2>/dev/null | tail -n 1); "
        "%s --checkpoint k --log log.csv --out rows.csv --export killed.safetensors --resume >/dev/null 2>&1 "
        "& p=$!; "
        "until ls k 2>/dev/null | grep -v tmp | tail -n 1 | grep step | grep -qvx -- \"${before:-none}\" || "
        "! kill -0 $p 2>/dev/null; do sleep 0.00$i; done; "
        "kill -9 $p 2>/dev/null && kills=$((kills + 1)); wait $p; done; [ $kills != 3 ] || break; done; "
        "echo $kills kills",
        train);
    EXPECT_PRINTS(
        0,
        " done: continuing", /* epochs, if an epoch ended between the last look at the folder and the kill */
        "ls k | grep step && %s --checkpoint k --log log.csv --out rows.csv --export killed.safetensors "
        "--resume",
        train);
    EXPECT(0, "cmp whole.safetensors killed.safetensors");
    snprintf(whole, sizeof whole, "%s/whole/epoch-000003.ckpt", folder);
    snprintf(killed, sizeof killed, "%s/k/epoch-000003.ckpt", folder);
    expect_same_state(whole, killed, averages);
    /* Training loss, training accuracy, norms and test results of each epoch. */
    EXPECT(0, "columns() { awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } { print $at[\"epoch\"], "
              "$at[\"train_loss\"], $at[\"train_acc\"], $at[\"test_loss\"], $at[\"gradient_norm\"], "
              "$at[\"ema_test_loss\"] }' \"$1\"; }; "
              "columns whole_rows.csv > a; columns rows.csv > b; cat a b; cmp a b");
    /* A killed run may have written rows that the resumed run writes again, with the same values. */
    EXPECT(0, "steps() { cut -d, -f 7-18,22- \"$1\" | sort -u; }; steps whole.csv > a; steps log.csv > b; "
              "diff a b");
    EXPECT_EXACTLY(0, ".lock epoch-000002.step-0000000047.ckpt epoch-000003.ckpt ", "ls -A k | tr '\\n' ' '");
}

Test(train_steps, runs_killed_within_an_epoch_resume_bit_exactly)
{
    kill_within_epochs("train-naive", "--model lenet", false);
}

#ifdef _OPENMP
Test(train_steps, runs_of_train_omp_killed_within_an_epoch_resume_bit_exactly)
{
    kill_within_epochs("train-omp", "--model lenet", false);
}

Test(train_steps, recipes_killed_within_an_epoch_resume_bit_exactly)
{
    kill_within_epochs("train-omp",
                       "--model vit-micro --clip-norm 0.5 --accumulate 3 --ema 0.9 --layer-decay 0.8 "
                       "--drop-path 0.2",
                       true);
}
#endif

/* Resumes from a copy of a checkpoint within an epoch. The files of an uninterrupted run are in the folder
 * `whole`. Expects the resumed run to have the same final state, last row and log rows. */
static void resume_from(const char *name, const char *options, bool averages)
{
    char whole[PATH_MAX], again[PATH_MAX];
    EXPECT(0, "rm -rf again && mkdir -p again && cp whole/%s again", name);
    EXPECT_PRINTS(0, " steps are done: continuing",
                  RECIPE STOPS "%s --checkpoint again --resume --log again/log.csv --out again/rows.csv",
                  options);
    snprintf(whole, sizeof whole, "%s/whole/epoch-000002.ckpt", folder);
    snprintf(again, sizeof again, "%s/again/epoch-000002.ckpt", folder);
    expect_same_state(whole, again, averages);
    EXPECT(
        0,
        "columns() { awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } END { print $at[\"epoch\"], "
        "$at[\"train_loss\"], $at[\"train_acc\"], $at[\"test_loss\"], $at[\"gradient_norm\"], "
        "$at[\"ema_test_loss\"], $at[\"ema_test_acc\"] }' \"$1\"; }; "
        "columns whole/rows.csv > a; columns again/rows.csv > b; cat a b; cmp a b");
    EXPECT(0, "rows=$(($(grep -c . again/log.csv) - 1)); test $rows -gt 2; "
              "steps() { tail -n $rows \"$1\" | cut -d, -f 7-18,22-; }; "
              "steps whole/log.csv > a; steps again/log.csv > b; diff a b");
}

/* Log rows, tests and checkpoints within epochs must not change the final state. Training must resume
 * bit-exactly from a checkpoint within an epoch. Tests single options of recipes, and several at once. */
Test(train_steps, recipes_resume_within_an_epoch)
{
    static const struct {
        const char *options;
        bool averages;
    } cases[] = {
        {"--ema 0.9", true},
        {"--clip-norm 0.5", false},
        {"--accumulate 3", false},
        {"--drop-path 0.2", false},
        {"--mixup 0.8 --cutmix 1 --loss bce", false},
        {"--ema 0.9 --clip-norm 0.5 --accumulate 3 --drop-path 0.2 --layer-decay 0.8", true},
        {"--ema 0.9 --clip-norm 0.5 --drop-path 0.2 --mixup 0.8 --cutmix 1 --drop-last", true},
        {"--accumulate 3 --mixup 0.8 --cutmix 1", false},
        {"--ema 0.9 --accumulate 2 --clip-norm 0.5 --mixup 0.8 --data synth --res 28 --classes 5 --feed live",
         true},
    };
#ifdef FDSL_SANITIZED
    const size_t first = 5; /* the cases from here on combine the options of the cases before */
#else
    const size_t first = 0;
#endif
    char whole[PATH_MAX], alone[PATH_MAX];
    for (size_t i = first; i < COUNT_OF(cases); i++) {
        EXPECT(0, "rm -rf whole alone; " RECIPE "%s --checkpoint alone", cases[i].options);
        EXPECT(0,
               "mkdir whole && " RECIPE STOPS
               "%s --checkpoint whole --log whole/log.csv --out whole/rows.csv",
               cases[i].options);
        snprintf(whole, sizeof whole, "%s/whole/epoch-000002.ckpt", folder);
        snprintf(alone, sizeof alone, "%s/alone/epoch-000002.ckpt", folder);
        expect_same_state(alone, whole, cases[i].averages);
        resume_from("epoch-000000.step-0000000010.ckpt", cases[i].options, cases[i].averages);
        resume_from("$(cd whole && ls epoch-000001.step-*.ckpt | tail -n 1)", cases[i].options,
                    cases[i].averages);
    }
}

/* Optimizers, schedules and losses: the engine agrees with the oracle, also after the run; a run that resumes
 * within an epoch has the bits of one that does not; and the number of threads changes no bit. */
Test(train_steps, optimizers_agree_and_resume_bit_exactly)
{
    static const char *const cases[] = {
        "--model lenet --optimizer lamb --lr 0.01 --weight-decay 0.02 --clip-norm 1",
        "--model vit-micro --optimizer lamb --weight-decay 0.05 --ema 0.9 --ema-warmup --lr-schedule tanh "
        "--lr-cooldown 0.5 --lr-warmup 0.5 --warmup-lr 1e-5",
        "--model lenet --optimizer muon --momentum 0.95 --weight-decay 0.02 --lr-schedule cosine --lr-cycles "
        "2 "
        "--lr-cycle-decay 0.5 --lr-k-decay 1.5 --lr-noise 0.5",
        "--model vit-micro --optimizer muon --clip-adaptive 0.05 --ema 0.9 --layer-decay 0.8 --accumulate 2",
        "--model cnn --optimizer sgd --clip-value 0.01 --dropout 0.1 --loss bce --bce-sum --bce-threshold "
        "0.2 "
        "--bce-pos-weight 2 --mixup 0.8 --head-init-scale 0.1 --head-init-bias -2 --lr-schedule step "
        "--lr-step 0.75",
    };
#define UPDATED "$P --variant " TRAINED " --train-size 50 --test-size 20 --batch 8 --epochs 2 %s "
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        EXPECT(0, "rm -rf whole parts [abc].safetensors");
        EXPECT(0, UPDATED "--threads 2 --verify --export a.safetensors --format csv", cases[i]);
        expect_cells(out, 2, "wrong=0");
        EXPECT(0, UPDATED "--threads 2 --checkpoint whole --checkpoint-steps 3 --keep 99", cases[i]);
        EXPECT(0, "mkdir parts && cp whole/epoch-000001.step-0000000002.ckpt parts");
        EXPECT(0,
               UPDATED "--threads 2 --checkpoint parts --checkpoint-steps 3 --resume --export b.safetensors",
               cases[i]);
        EXPECT(0, "cmp a.safetensors b.safetensors");
        EXPECT(0, UPDATED "--threads 3 --export c.safetensors", cases[i]);
        EXPECT(0, "cmp a.safetensors c.safetensors");
    }
}

/* A resumed run does not have the state at the beginning of its first epoch. So --verify repeats only the
 * steps after the checkpoint. */
Test(train_steps, a_resumed_epoch_passes_verification)
{
    EXPECT(0,
           THREE "--checkpoint k --checkpoint-steps 5 --keep 100 --out whole.csv --export whole.safetensors");
    EXPECT(0, "mkdir one && cp k/epoch-000001.step-0000000007.ckpt one");
    EXPECT(
        0, THREE
        "--checkpoint one --checkpoint-steps 5 --resume --verify --export resumed.safetensors --format csv");
    expect_cells(out, 1, "epoch=2;wrong=0;items=200");
    cr_expect(number(out, 1, "time_median_s") > 0, "%s", out);
    EXPECT(0, "cmp whole.safetensors resumed.safetensors");
    /* --init accepts a checkpoint within an epoch. */
    EXPECT(0, SMALL "--init k/epoch-000001.step-0000000007.ckpt --epochs 1");
}

Test(train_steps, resuming_within_an_epoch_checks_options)
{
    EXPECT(0, THREE "--checkpoint k --checkpoint-steps 5");
    EXPECT_EXACTLY(0, "epoch-000002.step-0000000009.ckpt\n", "rm k/epoch-000003.ckpt; ls k | tail -n 1");
    EXPECT(2, THREE "--checkpoint k --resume --drop-last"); /* other options */
    EXPECT(2, THREE "--checkpoint k --resume --export-step s");
    run(SMALL "--checkpoint k --resume --epochs 2 --export s");
    expect_line(2,
                "the latest checkpoint in k is within epoch 3, but --epochs is 2; raise --epochs, or delete");
}

#endif
