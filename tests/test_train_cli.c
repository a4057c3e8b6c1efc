/* Tests training and inference on the command line: rows, learning, resuming after a kill, and invalid
 * options. */
#include "shell.h"

#include <stdint.h>

#include "cells.h"
#include "core/portable.h"
#include "train_cli.h"

/* With sanitizers, the program is several times slower, so tests train, kill and verify less. */
#ifdef FDSL_SANITIZED
#define SLOWER 5
#else
#define SLOWER 1
#endif
#define KILLS  (5 / SLOWER)
#define EPOCHS (45 / SLOWER)

TestSuite(train_cli, .init = shell_set_up, .fini = shell_tear_down, .timeout = 300);

#define FIXED   "--variant train-naive --model logreg --test-size 50 --epochs 1 "
#define LARGEST FIXED "--batch max "

/* ---- Rows ---- */

/* Options that contradict each other are refused before the data are opened: here, there are none. */
Test(train_cli, contradictions_are_refused_before_the_data_are_opened)
{
    static const char *const cases[][2] = {
        {"--batch 4 --accumulate 5", "--accumulate 5 is more than the 4 samples of a rank's step"},
        {"--lr-schedule multistep", "--lr-schedule multistep needs --lr-milestones"},
        {"--lr-schedule multistep --lr-milestones 3:2", "--lr-milestones 3:2: give at most"},
        {"--lr-schedule cosine --lr-min 1 --lr 0.1", "--lr-min 1 is more than the learning rate 0.1"},
        {"--parallel pipeline --batch 4 --microbatches 5", "--microbatches 5 is more than the 4 samples"},
        {"--parallel pipeline --stages 2", "--stages 2: each rank holds one stage, and there are 1 ranks"},
        {"--parallel pipeline --model resnet-micro", "resnet-micro normalises over the samples of a batch"},
        {"--parallel pipeline --model vit-tiny --schedule zb-h1",
         "--schedule zb-h1: the kernels of a transformer"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char options[160];
        snprintf(options, sizeof options, "--data none %s", cases[i][0]);
        expect_refusal(2, options, cases[i][1]);
    }
}

Test(train_cli, each_epoch_has_one_row)
{
    EXPECT(0, "$P " SMALL "--epochs 3 --format csv --verify");
    cr_expect_eq(count_of(out, "\n"), 4, "%s", out);
    for (size_t row = 1; row <= 3; row++) {
        cr_expect_str_eq(value(out, row, "schema"), "train/13");
        cr_expect_str_eq(value(out, row, "wrong"), "0");
        cr_expect_eq(number(out, row, "epoch"), (double)row);
        cr_expect(number(out, row, "items") == 200 && number(out, row, "steps") == 13);
        cr_expect(number(out, row, "samples") == 1 && number(out, row, "warmups") == 0);
        cr_expect_eq(number(out, row, "parameters"), 7850);
        /* 7840 multiply-adds forward, and as many for the gradient of the weights */
        cr_expect_eq(number(out, row, "flops"), 200 * 2 * 2 * 7840.0);
        cr_expect(number(out, row, "train_loss") > 0 && number(out, row, "data_share") < 1);
        cr_expect_str_eq(value(out, row, "momentum"), ""); /* only SGD has a momentum */
        cr_expect_str_eq(value(out, row, "skipped_steps"), "");
        cr_expect_str_eq(value(out, row, "loss_scale_last"), "");
    }
    cr_expect(number(out, 3, "train_loss") < number(out, 1, "train_loss"));
    cr_expect(number(out, 3, "trained_s") > number(out, 1, "trained_s"));
}

#ifndef FDSL_SANITIZED
Test(train_cli, learns_digits_in_one_epoch)
{
    EXPECT(0, "$P --variant train-naive --model lenet --epochs 1 --lr 0.003 --batch 32 --train-size 4000 "
              "--test-size 1000 --format csv");
    cr_expect_geq(number(out, 1, "test_acc"), 0.97, "%s", out);
}
#endif

/* The same command must give the same bits every time. Another seed must give other bits. */
Test(train_cli, the_same_command_gives_the_same_parameters)
{
    EXPECT(0, "$P " SMALL "--epochs 2 --shift 2 --flip --export a");
    EXPECT(0, "$P " SMALL "--epochs 2 --shift 2 --flip --export b");
    EXPECT(0, "cmp a b");
    EXPECT(0, "$P " SMALL "--epochs 2 --shift 2 --flip --export c --seed 1");
    EXPECT(1, "cmp a c");
}

#ifdef HAVE_XXHASH

/* ---- Resuming ---- */

/* Training is killed KILLS times, each time one epoch later plus a varying delay. It must end with the same
 * bits as an uninterrupted training run. An epoch takes some tens of milliseconds, so that training does not
 * end before the last kill. */
static void kill_and_resume(const char *variant, unsigned samples)
{
    char train[512];
    snprintf(
        train, sizeof train,
        "$P --variant %s --threads 2 --model lenet --train-size %u --test-size 50 --batch 10 --epochs %d "
        "--lr-schedule cosine --lr-warmup 0.5 --shift 1",
        variant, samples, EPOCHS);
    EXPECT(0, "%s --export whole", train);
    /* The function `ended` starts no process, because the loop calls it hundreds of times. */
    EXPECT(0,
           "ended() { for f in k/epoch-0000[0-9][0-9].ckpt; do n=${f#k/epoch-0000}; n=${n%%.ckpt}; done; "
           "case $n in [0-9][0-9]) [ $n -gt $1 ] ;; *) false ;; esac; }; kills=0; for i in $(seq %d); do "
           "%s --checkpoint k --resume --export killed >/dev/null 2>&1 & p=$!; "
           "until ended $i || ! kill -0 $p 2>/dev/null; do sleep 0.00$((i %% 10)); done; "
           "sleep 0.00$((i %% 10)); kill -9 $p 2>/dev/null && kills=$((kills + 1)); wait $p; done; echo "
           "$kills kills",
           KILLS, train);
    char last[128];
    snprintf(last, sizeof last, "%d kills", KILLS);
    cr_expect_not_null(strstr(out, last), "%s", out);
    EXPECT(0, "%s --checkpoint k --resume --export killed", train);
    EXPECT(0, "cmp whole killed");
    EXPECT(0, "ls -A k | tr -d '\n'");
    snprintf(last, sizeof last, ".lockepoch-%06d.ckptepoch-%06d.ckptepoch-%06d.ckpt", EPOCHS - 2, EPOCHS - 1,
             EPOCHS);
    cr_expect_str_eq(out, last);
}

Test(train_cli, killed_runs_resume_bit_exactly)
{
    kill_and_resume("train-naive", 50 / SLOWER);
}

#ifdef _OPENMP
Test(train_cli, killed_runs_of_train_omp_resume_bit_exactly)
{
    kill_and_resume("train-omp", 750 / SLOWER);
}
#endif

/* A run may have been killed after its last epoch, before the row or the export was written. --resume must
 * write them, and no row may occur twice. */
Test(train_cli, resume_restores_a_missing_export_or_row)
{
#define ON_AND_ON "$P " SMALL "--epochs 3 --checkpoint k --out r.csv --resume "
    EXPECT(0, ON_AND_ON "--export whole && cp r.csv rows");
    EXPECT(0, "sed -i '$d' r.csv && " ON_AND_ON "--export again --format csv");
    cr_expect_not_null(strstr(out, "r.csv: added 1 missing row of the resumed run"));
    cr_expect_not_null(strstr(out, "3 of 3 epochs are done: exported to again"), "%s", out);
    EXPECT(0, "cmp whole again && cmp rows r.csv");
    EXPECT(0, ON_AND_ON);
    cr_expect_str_eq(out, "fdsl-bench: 3 of 3 epochs are done: nothing to do\n");
    EXPECT(0, "$P " SMALL "--epochs 2 --checkpoint k --resume");
    cr_expect_str_eq(out,
                     "fdsl-bench: the checkpoint already has 3 epochs, but --epochs is 2: nothing to do\n");
    EXPECT(0, "cmp rows r.csv");
    EXPECT(0, "sed -i '$d' r.csv && $P " SMALL "--epochs 4 --checkpoint k --out r.csv --resume");
    EXPECT(0, "[ $(wc -l < r.csv) = 5 ] && head -n 4 r.csv | cmp - rows");
}

/* The export fails because of a limit on the size of files. The row must be written nevertheless. */
Test(train_cli, row_is_written_before_the_export)
{
    EXPECT(1, "trap '' XFSZ; ulimit -f 20; $P " SMALL "--epochs 1 --out r.csv --export e");
    cr_expect_not_null(strstr(out, "cannot be written"), "%s", out);
    EXPECT(0, "[ $(wc -l < r.csv) = 2 ] && [ ! -e e ]");
}

/* A truncated checkpoint is skipped with a warning. Training resumes from the checkpoint before it, and
 * repeats the epochs in between. */
Test(train_cli, resumes_from_the_checkpoint_before_a_truncated_one)
{
    EXPECT(0, "$P " SMALL "--epochs 4 --export whole");
    EXPECT(0, "$P " SMALL "--epochs 3 --checkpoint k && truncate -s 5000 k/epoch-000003.ckpt");
    EXPECT(0, "$P " SMALL "--epochs 4 --checkpoint k --resume --export again --format csv");
    cr_expect_not_null(strstr(out, "k/epoch-000003.ckpt: this checkpoint is truncated"));
    EXPECT(0, "cmp whole again");
    EXPECT(0, "$P " SMALL "--epochs 4 --checkpoint k --resume --format csv"); /* all epochs are done */
    cr_expect_str_eq(out, "fdsl-bench: 4 of 4 epochs are done: nothing to do\n");
}

/* A file that has the name of a checkpoint but does not begin like one is damaged. The message must not
 * mention files of tensors. */
Test(train_cli, a_checkpoint_that_lost_its_beginning_is_damaged)
{
    EXPECT(0,
           "$P " SMALL "--epochs 2 --checkpoint k && printf XXXX | dd of=k/epoch-000002.ckpt conv=notrunc");
    EXPECT(0, "$P " SMALL "--epochs 2 --checkpoint k --resume --dry-run");
    cr_expect_not_null(strstr(out, "k/epoch-000002.ckpt: this checkpoint is truncated or damaged: its first "
                                   "bytes are not those of a checkpoint; using the previous checkpoint"),
                       "%s", out);
    EXPECT(1, "$P --variant infer-naive --checkpoint k/epoch-000002.ckpt");
    cr_expect_not_null(strstr(out, "not those of a checkpoint; name another checkpoint of its folder"), "%s",
                       out);
    EXPECT(0, "rm k/epoch-000002.ckpt && truncate -s 0 k/epoch-000001.ckpt");
    expect_refusal(1, "--model logreg --train-size 200 --test-size 50 --batch 16 --checkpoint k --resume",
                   "all are damaged; delete them to start from the beginning, or name another folder. The "
                   "oldest: k/epoch-000001.ckpt: this checkpoint is truncated or damaged");
    cr_expect_null(strstr(out, "safetensors"), "%s", out);
}

/* 200 samples in steps of 16: 12 full steps, and one with 8 samples. */
Test(train_cli, the_last_batch_can_be_dropped)
{
    EXPECT(0, "$P " SMALL "--epochs 2 --drop-last --verify --checkpoint k --format csv");
    for (size_t row = 1; row <= 2; row++) {
        cr_expect_str_eq(value(out, row, "drop_last"), "1");
        cr_expect_str_eq(value(out, row, "steps"), "12");
        cr_expect_str_eq(value(out, row, "items"), "192");
        cr_expect_str_eq(value(out, row, "train_samples"), "200");
    }
    EXPECT(0, "$P " SMALL "--epochs 1 --format csv");
    cr_expect_str_eq(value(out, 1, "drop_last"), "0");
    cr_expect_str_eq(value(out, 1, "steps"), "13");
    cr_expect_str_eq(value(out, 1, "items"), "200");
    EXPECT(2, "$P " SMALL "--epochs 3 --checkpoint k --resume");
    cr_expect(strstr(out, "drop-last=1 in the checkpoint, 0 now"), "%s", out);
    EXPECT(0, "$P " SMALL "--epochs 3 --checkpoint k --resume --drop-last");
    EXPECT(0, "$P --variant train-naive --model logreg --train-size 50 --test-size 50 --batch 50 --epochs 1 "
              "--drop-last --format csv");
    cr_expect_str_eq(value(out, 1, "steps"), "1");
}

/* ---- Clipping, moving average, layer decay, stochastic depth ---- */

#define RECIPE                                                                                             \
    "--variant train-naive --model vit-micro --train-size 40 --test-size 30 --batch 12 --optimizer adamw " \
    "--weight-decay 0.05 --clip-norm 0.5 --ema 0.9 --layer-decay 0.75 --drop-path 0.2 --format csv "

/* A resumed run must continue the average bit-exactly. --export and `infer` take the average. */
Test(train_cli, resumes_the_moving_average)
{
    EXPECT(0, "$P " RECIPE "--epochs 2 --checkpoint whole --export whole.safetensors --verify");
    cr_expect_str_eq(value(out, 2, "wrong"), "0");
    cr_expect_gt(number(out, 2, "gradient_norm"), 0.5);
    cr_expect_neq(number(out, 2, "ema_test_loss"), number(out, 2, "test_loss"));
    char loss[64], accuracy[64];
    snprintf(loss, sizeof loss, "%s", value(out, 2, "ema_test_loss"));
    snprintf(accuracy, sizeof accuracy, "%s", value(out, 2, "ema_test_acc"));
    EXPECT(0, "$P " RECIPE "--epochs 1 --checkpoint parts");
    EXPECT(0, "$P " RECIPE "--epochs 2 --checkpoint parts --resume --export parts.safetensors");
    cr_expect_str_eq(value(out, 1, "ema_test_loss"), loss);
    EXPECT(0, "cmp whole.safetensors parts.safetensors");
    EXPECT(0, "$P --variant infer-naive --checkpoint whole --loops 1 --format csv");
    cr_expect_str_eq(value(out, 1, "test_loss"), loss);
    cr_expect_str_eq(value(out, 1, "test_acc"), accuracy);
    expect_refusal(2,
                   "--model vit-micro --train-size 40 --test-size 30 --batch 12 --optimizer adamw "
                   "--weight-decay 0.05 --clip-norm 0.5 --layer-decay 0.75 --drop-path 0.2 --checkpoint "
                   "whole --resume",
                   "ema=0.9 in the checkpoint, none now; give --ema 0.9, or name another folder");
}

Test(train_cli, columns_of_the_recipe_are_empty_without_it)
{
    EXPECT(0, "$P " SMALL "--epochs 1 --format csv");
    static const char *const names[] = {"gradient_norm", "ema_test_loss", "ema_test_acc", "clip_norm",
                                        "ema",           "layer_decay",   "drop_path"};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        cr_expect_str_eq(value(out, 1, names[i]), "", "%s", names[i]);
}

/* If a step has several parts (--accumulate), live samples are generated for the whole step, and each part
 * takes its own. */
static void take_parts_of_live_steps(const char *mixing)
{
#define PARTS                                                                                             \
    "--model lenet --data synth --res 32 --classes 5 --train-size 50 --test-size 10 --batch 20 --epochs " \
    "2 --format csv %s "
    EXPECT(0, "$P --variant train-naive " PARTS "--accumulate 3 --export naive.safetensors", mixing);
    EXPECT(0, "$P --variant train-naive " PARTS "--export whole.safetensors", mixing);
    EXPECT(0, "cmp naive.safetensors whole.safetensors");
#ifdef _OPENMP
    EXPECT(0, "$P --variant train-omp " PARTS "--accumulate 3 --verify --export live.safetensors", mixing);
    cr_expect_str_eq(value(out, 2, "wrong"), "0");
    cr_expect_str_eq(value(out, 2, "accumulate"), "3");
    EXPECT(0, "$P --variant train-omp " PARTS "--accumulate 3 --feed stored --export stored.safetensors",
           mixing);
    EXPECT(0, "cmp live.safetensors stored.safetensors");
#endif
}

Test(train_cli, live_steps_can_be_trained_in_parts)
{
    take_parts_of_live_steps("");
    take_parts_of_live_steps("--mixup 0.8 --cutmix 1");
}

/* The set is made before the network and the engine refuse it. */
#define FEW "--train-size 20 --test-size 10 --batch 10 "

Test(train_cli, refuses_options_of_transformers_elsewhere)
{
    expect_refusal(2, "--model lenet --train-size 20 --test-size 10 --batch 4 --accumulate 5",
                   "is more than the 4 samples of a rank's step");
    expect_refusal(2, FEW "--model lenet --layer-decay 0.5", "--layer-decay needs a transformer");
    expect_refusal(2, FEW "--model lenet --drop-path 0.1", "--drop-path needs a transformer");
    expect_refusal(2, FEW "--model lenet --parallel pipeline --clip-norm 1",
                   "--clip-norm needs --parallel data");
}

/* A checkpoint of a newer schema must not be overwritten, because a newer program may be able to read it. */
Test(train_cli, newer_schema_is_an_error)
{
    EXPECT(0, "$P " SMALL "--epochs 2 --checkpoint k");
    EXPECT(0, "printf '\\011' | dd of=k/epoch-000002.ckpt bs=1 seek=8 conv=notrunc && cp -r k before");
    expect_refusal(1, "--model logreg --train-size 200 --test-size 50 --batch 16 --checkpoint k --resume",
                   "has schema 9; this program reads 8");
    EXPECT(0, "diff -r k before");
    EXPECT(1, "$P --variant infer-naive --checkpoint k");
    EXPECT(0, "truncate -s 10 k/epoch-000002.ckpt");
    EXPECT_PRINTS(0, "k/epoch-000002.ckpt: this checkpoint is truncated; using the previous checkpoint",
                  "$P --variant infer-naive --checkpoint k --loops 1");
    EXPECT_PRINTS(0, "using the previous checkpoint", "$P " SMALL "--epochs 1 --init k");
}

Test(train_cli, rejects_checkpoints_of_other_trainings)
{
    EXPECT(0, "$P " SMALL "--epochs 1 --checkpoint k");
    expect_refusal(2, "--model logreg --train-size 200 --test-size 50 --batch 16 --checkpoint k",
                   "holds checkpoints already: add --resume");
    expect_refusal(2, "--model lenet --train-size 200 --test-size 50 --batch 16 --checkpoint k --resume",
                   "belong to another model: logreg");
    expect_refusal(2, "--model logreg --train-size 200 --test-size 50 --batch 17 --checkpoint k --resume",
                   "other options: batch=16 in the checkpoint, 17 now");
    expect_refusal(2,
                   "--model logreg --train-size 200 --test-size 50 --batch 16 --checkpoint k --resume "
                   "--lr-schedule cosine",
                   "other options: lr-schedule=constant in the checkpoint, cosine now");
    expect_refusal(2,
                   "--model logreg --train-size 200 --test-size 50 --batch 16 --checkpoint k --resume "
                   "--optimizer sgd",
                   "other options: optimizer=adam in the checkpoint, sgd now");
    /* Options are compared before the data are read. */
    expect_refusal(2, "--model logreg --data none --batch 16 --checkpoint k --resume --lr 0.5",
                   "other options: lr=0.001 in the checkpoint, 0.5 now");
    expect_refusal(2, "--model logreg --data none --batch 16 --checkpoint k --resume --clip-norm 1",
                   "other options: no clip-norm in the checkpoint, 1 now");
    expect_refusal(2, "--model logreg --data none --batch 16 --checkpoint k --resume", "no such folder");
    expect_refusal(2, "--model cnn --data none --batch max --checkpoint k --resume",
                   "belong to another model: logreg");
    expect_refusal(2, "--model logreg --train-size 201 --test-size 50 --batch 16 --checkpoint k --resume",
                   "belong to other samples: --train-size 200 in the checkpoint, 201 now; give the same");
    expect_refusal(2, "--model logreg --train-size 200 --batch 16 --resume", "--resume needs --checkpoint");
    expect_refusal(2, "--model logreg --train-size 200 --batch 16 --checkpoint /proc/no",
                   "cannot be created");
    expect_refusal(2, "--model logreg --checkpoint k/epoch-000001.ckpt", "is not a folder; give a folder");
    EXPECT(0, "truncate -s 50 k/*");
    expect_refusal(1, "--model logreg --train-size 200 --test-size 50 --batch 16 --checkpoint k --resume",
                   "truncated");
}

/* ---- The largest batch ---- */

Test(train_cli, the_largest_batch_is_the_whole_set)
{
    EXPECT(0, "$P " LARGEST "--train-size 200 --checkpoint k --format csv");
    cr_expect_not_null(strstr(out, "largest batch: 200 fits; the data set is too small for more (1 tried)"),
                       "%s", out);
    cr_expect(number(out, 1, "batch") == 200 && number(out, 1, "batch_probes") == 1);
    /* The search must not change the result: --batch 200 must give the same parameters. */
    EXPECT(0, "$P " LARGEST "--train-size 200 --export a >/dev/null && $P --batch 200 " FIXED
              "--train-size 200 --export b --format csv && cmp a b");
    cr_expect_str_eq(value(out, 1, "batch_probes"), "");
    EXPECT(0, "$P --variant infer-naive --loops 2 --batch max --checkpoint k --format csv");
    cr_expect(number(out, 1, "batch") == 50 && number(out, 1, "batch_probes") == 1);
    EXPECT(0, "$P " LARGEST "--train-size 7 --format csv");
    cr_expect(number(out, 1, "batch") == 7 && number(out, 1, "batch_probes") == 1);
    EXPECT(0, "$P " FIXED "--train-size 100 --batch 10,max --format csv");
    cr_expect(number(out, 1, "batch") == 10 && number(out, 2, "batch") == 100);
    EXPECT(0, "$P " LARGEST "--train-size 200 --dry-run");
}

Test(train_cli, batch_max_is_refused_where_it_does_not_apply)
{
    EXPECT(2, "$P --workload train --variant all --batch max --train-size 100 --test-size 10");
    EXPECT(2, "$P --variant naive --batch max");
    cr_expect_not_null(strstr(out, "only the workloads train and infer can search for the largest batch"),
                       "%s", out);
    EXPECT(2, "$P " LARGEST "--train-size 20 --export-data d");
    cr_expect_not_null(strstr(out, "give --batch a number"), "%s", out);
    EXPECT(2, "$P " FIXED "--train-size 20 --batch maximum");
}

#ifndef FDSL_SANITIZED /* sanitizers reserve more address space than the limit */
/* The limit of the address space leaves memory for a batch of some hundreds of samples. */
Test(train_cli, the_largest_batch_fits_into_memory)
{
    EXPECT(0, "ulimit -v 150000 && $P --variant train-naive --model lenet --train-size 2000 --test-size 50 "
              "--epochs 1 --batch max --format csv");
    double batch = number(out, 1, "batch"), probes = number(out, 1, "batch_probes");
    cr_expect(batch >= 1 && batch < 2000, "%s", out);
    cr_expect(probes >= 7 && probes <= 20, "%s", out);
    cr_expect_not_null(strstr(out, " does not ("), "%s", out);
}
#endif

/* ---- Inference ---- */

Test(train_cli, inference_has_the_results_of_training)
{
    EXPECT(0, "$P " SMALL "--epochs 4 --checkpoint k --format csv");
    double accuracy = number(out, 4, "test_acc"), loss = number(out, 4, "test_loss");
#define INFER "$P --variant infer-naive --train-size 200 --test-size 50 --loops 10 --format csv "
    EXPECT(0, INFER "--batch 10 --checkpoint k --verify");
    cr_expect_str_eq(value(out, 1, "schema"), "infer/8");
    cr_expect_float_eq(number(out, 1, "test_acc"), accuracy, 1e-6);
    cr_expect_float_eq(number(out, 1, "test_loss"), loss, 1e-6);
    cr_expect(number(out, 1, "items") == 10 && number(out, 1, "samples") == 10 &&
              number(out, 1, "wrong") == 0);
    cr_expect(number(out, 1, "epoch") == 4 && number(out, 1, "time_p99_s") > 0);
    cr_expect_eq(number(out, 1, "flops"), 10 * 2 * 7840.0); /* forward only */
    EXPECT(0, INFER "--batch 7 --checkpoint k/epoch-000002.ckpt");
    cr_expect_eq(number(out, 1, "test_samples"), 50); /* includes the samples after the last full batch */
    EXPECT(0, "$P --variant infer-naive --loops 10 --batch 10 --format csv --checkpoint k");
    cr_expect(number(out, 1, "train_size") == 200 && number(out, 1, "test_size") == 50);
    cr_expect_float_eq(number(out, 1, "test_acc"), accuracy, 1e-6);
    /* The table has the 99th percentile, as a latency per sample. */
    EXPECT(0, "$P --variant infer-naive --loops 10 --batch 1 --checkpoint k");
    double median, p99;
    char unit[2][8];
    const char *line = strstr(out, "\ninfer-naive ");
    cr_expect_not_null(strstr(out, "infer: checkpoint k batch 1; speed-up over infer-naive\n"), "%s", out);
    cr_expect_not_null(strstr(out, "    +-95%     p99/item        items/s"), "%s", out);
    cr_assert(line && sscanf(line, " infer-naive %lf %7s %*s %lf %7s", &median, unit[0], &p99, unit[1]) == 4,
              "%s", out);
    cr_expect(strcmp(unit[0], unit[1]) != 0 || p99 >= median, "%s", out);
    EXPECT(0, "$P --variant infer-naive --loops 10 --batch 10 --test-size 40 --checkpoint k");
    cr_expect_not_null(strstr(out, "the number of test samples differs from the number during training "
                                   "(--test-size 50 in the checkpoint, 40 now)"));
    EXPECT(
        0,
        "$P --variant infer-naive --loops 10 --batch 10 --data synth --res 28 --test-size 40 --checkpoint k");
    cr_expect_not_null(strstr(out, "these are not the test samples that were used"));
    cr_expect_not_null(strstr(out, "(--data digits in the checkpoint, synth now; "), "%s", out);
    EXPECT(0, "$P --prepare one --from digits --samples 100 --encode npy");
    EXPECT(0, "$P --variant infer-naive --loops 10 --batch 2 --data one --train-size none --test-size none "
              "--checkpoint k");
    cr_expect_not_null(strstr(out, "only the held-out part of one is tested ("), "%s", out);
    EXPECT(0, "$P --variant infer-naive --loops 10 --format csv --checkpoint k");
    cr_expect_str_eq(value(out, 1, "batch"), "50"); /* the size of the test set */
    /* Generated test samples must be the same for any number of training samples. */
    EXPECT(0, "$P --variant infer-naive --loops 10 --batch 10 --train-size 300 --checkpoint k");
    cr_expect_null(strstr(out, "these are not the test samples"), "%s", out);
    EXPECT(0, INFER "--batch 51 --checkpoint k --verify");
    cr_expect_not_null(strstr(out, "--batch 51 is more than the 50 samples to test with: a batch has 50"));
    cr_expect(number(out, 1, "batch") == 50 && number(out, 1, "items") == 50 && number(out, 1, "wrong") == 0);
    cr_expect_float_eq(number(out, 1, "test_acc"), accuracy, 1e-6);
    EXPECT(0, "$P --variant infer-naive --test-size 1 --loops 2 --batch 2 --format csv --checkpoint k");
    cr_expect(number(out, 1, "batch") == 1 && number(out, 1, "test_samples") == 1);
    EXPECT(2, INFER "--batch 10 --data clips --checkpoint k");
    cr_expect_not_null(strstr(
        out, "the network is for samples of 1x1x28x28 (channels, depth, height, width) and 10 classes"));
    EXPECT(2, "$P --variant infer-naive");
    cr_expect_not_null(strstr(out, "--checkpoint FILE"));
    EXPECT(2, INFER "--checkpoint k/none");
    EXPECT(2, "$P --variant infer-cuda --best-gpu --device 0 --checkpoint k");
    cr_expect_not_null(strstr(out, "--best-gpu chooses a device and --device names one"), "%s", out);
    EXPECT(2, "mkdir e && " INFER "--checkpoint e");
    cr_expect_not_null(strstr(out, "the folder has no checkpoint"));
}

#ifdef _OPENMP
/* A variant must continue from a checkpoint of another variant. */
Test(train_cli, omp_continues_from_a_checkpoint_of_naive)
{
    EXPECT(0, "$P " SMALL "--epochs 2 --export naive");
    EXPECT(0, "$P " SMALL "--epochs 1 --checkpoint k");
    EXPECT(0, "$P --variant train-omp --model logreg --train-size 200 --test-size 50 --batch 16 --epochs 2 "
              "--checkpoint k --resume --verify --out r.csv");
    EXPECT(0, "tail -n 1 r.csv | grep -q train-omp && [ $(wc -l < r.csv) = 3 ]"); /* a header and two rows */
}
#endif

#endif

/* ---- Exports ---- */

/* Parses the file as other programs do: first the length of the header, then the header, then the values. */
Test(train_cli, export_is_valid_safetensors)
{
    EXPECT(0, "$P " SMALL "--epochs 1 --export e");
    EXPECT(0, "cat e");
    uint64_t length;
    memcpy(&length, out, sizeof length);
    EXPECT(0, "wc -c < e");
    cr_expect_eq((uint64_t)atoll(out), 8 + length + 7850 * 4);
    EXPECT(0, "cat e");
    char *header = strndup(out + 8, (size_t)length);
    cr_assert(header && header[0] == '{');
    const char *weight = strstr(header, "\"fc1.weight\":"), *bias = strstr(header, "\"fc1.bias\":");
    cr_assert(weight && bias, "%s", header);
    cr_expect(strstr(weight, "\"dtype\":\"F32\"") && strstr(weight, "[10,784]"), "%s", header);
    unsigned begin, end;
    cr_assert_eq(sscanf(strstr(weight, "\"data_offsets\":["), "\"data_offsets\":[%u,%u]", &begin, &end), 2);
    cr_expect_eq(end - begin, 7840 * sizeof(float));
    float largest = 0;
    for (uint32_t i = 0; i < 7840; i++) {
        float value;
        memcpy(&value, out + 8 + length + begin + i * sizeof value, sizeof value);
        cr_assert(value > -1 && value < 1);
        largest = value > largest ? value : largest;
    }
    cr_expect_gt(largest, 0.03f); /* initial values are within 1/28 */
    cr_expect_not_null(strstr(header, ",\"input\":\"[1, 28, 28]\",\"classes\":\"10\",\"scale\":\"[0.0"), "%s",
                       header);
    cr_expect_not_null(strstr(header, "]\",\"offset\":\"[-"), "%s", header);
    free(header);
}

/* --export must overwrite only earlier exports and empty files. */
Test(train_cli, export_overwrites_only_exports)
{
    EXPECT(0, "echo mine > text && : > empty && head -c 99 /dev/zero > zeros");
    expect_refusal(2, "--export text --dry-run",
                   "text exists and is not a safetensors file of fdsl-bench; choose another");
    expect_refusal(2, "--export-step text", "text exists");
    expect_refusal(2, "--export-data zeros", "zeros exists");
    EXPECT(0, "[ \"$(cat text)\" = mine ]");
    EXPECT(0, "$P " SMALL "--epochs 1 --export empty && cp empty first && $P " SMALL
              "--epochs 2 --export empty");
    EXPECT(1, "cmp -s empty first");
}

/* Each epoch has its own start time, in whole seconds. If the first three epochs took more than a second, the
 * fourth epoch must start at a later time than the first. */
Test(train_cli, each_epoch_has_its_own_start_time)
{
    EXPECT(0,
           "$P --variant train-naive --model lenet --train-size 900 --test-size 10 --epochs 4 --format csv");
    char first[64];
    snprintf(first, sizeof first, "%.63s", value(out, 1, "time_utc"));
    cr_expect(number(out, 3, "trained_s") < 1 || strcmp(value(out, 4, "time_utc"), first) > 0, "%s", out);
}

#ifdef HAVE_JANSSON
Test(train_cli, json_numbers_are_not_strings)
{
    EXPECT(0, "$P " SMALL "--epochs 1 --format json");
    cr_expect(strstr(out, "\"epoch\": 1,") && strstr(out, "\"train_samples\": 200,"), "%s", out);
    cr_expect(strstr(out, "\"timed_stages\": \"gather+forward+backward+update\""), "%s", out);
    cr_expect(!strstr(out, "\"train_loss\": \"") && !strstr(out, "\"test_acc\": \""), "%s", out);
}
#endif

/* ---- Failures ---- */

Test(train_cli, non_finite_loss_ends_the_run)
{
    expect_refusal(1, "--model lenet --train-size 200 --test-size 50 --optimizer sgd --lr 1e20",
                   "epoch 1, step 2 of 4: the loss is not finite; ");
    cr_expect(strstr(out, "conv") || strstr(out, "fc"), "%s", out);
    EXPECT(0, "$P " SMALL "--epochs 2 --optimizer sgd --lr 1e38 --allow-nan --format csv");
    cr_expect_str_eq(value(out, 2, "train_loss"), "");
}

/* If the reference's own loss is not finite, nothing can be compared. The message must name the step. */
Test(train_cli, a_diverging_training_fails_verification)
{
    expect_refusal(1, "--model lenet --train-size 200 --test-size 50 --optimizer sgd --lr 1e38 --verify",
                   "the reference's own loss at step 3 is not finite");
    EXPECT(3,
           "$P --variant train-naive --model lenet --train-size 200 --test-size 50 --optimizer sgd --lr 1e20 "
           "--verify --verify-steps 5");
    cr_expect_not_null(strstr(out, " of 5 losses and 10 of 10 tensors are wrong"), "%s", out);
}

#ifdef _OPENMP
/* Adam amplifies rounding errors over 50 steps. --verify must not report this as an error of the engine. */
Test(train_cli, fifty_steps_of_adam_pass_verification)
{
    EXPECT(0,
           "$P --variant train-omp --train-size 200 --test-size 50 --batch 4 --epochs 1 --verify "
           "--verify-steps %d --format csv",
           50 / SLOWER);
    cr_expect_str_eq(value(out, 1, "wrong"), "0");
}
#endif

/* Trains two epochs on 20 samples, and compares the result with that of batches of 20 samples. */
static void expect_whole_set(const char *variant, unsigned batch)
{
#define TWENTY "$P --variant %s --train-size 20 --test-size 5 --drop-last --format csv "
    EXPECT(0, TWENTY "--epochs 2 --batch 20", variant);
    const double loss = number(out, 2, "train_loss");
    cr_expect_null(strstr(out, "more than the 20 samples"), "%s", out);
    EXPECT(0, TWENTY "--epochs 2 --batch %u --verify --checkpoint k%u", variant, batch, batch);
    cr_expect(strstr(out, "is more than the 20 samples to train on: a batch has 20"), "%s", out);
    cr_expect(number(out, 2, "batch") == 20 && number(out, 2, "steps") == 1 && number(out, 2, "items") == 20);
    cr_expect(number(out, 2, "wrong") == 0 && number(out, 2, "train_loss") == loss, "%s %u", variant, batch);
    /* The checkpoint has the batch that was used. */
    EXPECT(0, TWENTY "--epochs 3 --batch %u --checkpoint k%u --resume", variant, batch, batch);
    EXPECT(0, TWENTY "--epochs 4 --batch 20 --checkpoint k%u --resume", variant, batch);
    EXPECT(0, TWENTY "--epochs 5 --batch 33 --checkpoint k%u --resume", variant, batch);
    EXPECT(2, TWENTY "--epochs 6 --batch 19 --checkpoint k%u --resume", variant, batch);
    cr_expect(strstr(out, "batch=20 in the checkpoint, 19 now; use --batch 20"), "%s", out);
    EXPECT(0, "rm -r k%u", batch);
    EXPECT(0, "$P --variant %s --train-size 1 --test-size 1 --epochs 1 --batch 1", variant);
    EXPECT_PRINTS(0, "--batch 2 is more than the 1 sample to train on: a batch has 1",
                  "$P --variant %s --train-size 1 --test-size 1 --epochs 1 --batch 2", variant);
    EXPECT_PRINTS(0, "the default of --batch, 64, is more than the 1 sample to train on: a batch has 1",
                  "$P --variant %s --train-size 1 --test-size 1 --epochs 1", variant);
}

/* A batch has at most the samples of the set, in every engine for CPUs. */
Test(train_cli, a_batch_larger_than_the_set_takes_the_whole_set)
{
    expect_whole_set("train-naive --model lenet", 21);
#ifdef _OPENMP
    expect_whole_set("train-omp --model lenet", 1 << 20);
    expect_whole_set("train-omp --model vit-micro", 21);
#endif
    EXPECT(0, "$P --variant train-naive --model logreg --train-size 20 --test-size 5 --epochs 1 --batch 21 "
              "--repeats 3 --format csv");
    cr_expect_eq(number(out, 1, "batch"), 18); /* a multiple of --repeats */
}

Test(train_cli, rejects_invalid_options)
{
    expect_refusal(2, "--momentum 0.5", "--momentum needs --optimizer sgd or muon; add that");
    expect_refusal(2, "--lr-gamma 0.5", "--lr-gamma needs --lr-schedule step");
    expect_refusal(2, "--res 32", "--res needs --data synth");
    expect_refusal(2, "--data nowhere", "no such folder; digits, clips and synth need no folder\n");
    expect_refusal(2, "--data digit", "; did you mean 'digits'?\n");
    expect_refusal(2, "--data mnist", "; scripts/setup/fetch_mnist.sh mnist downloads it\n");
    expect_refusal(2, "--data digits --classes 5",
                   "--classes 5: digits has 10 classes; give at least as many");
    expect_refusal(2, "--data clips --model cnn3d --classes 7",
                   "--classes 7: clips has 8 classes; give at least");
    expect_refusal(2, "--data clips --model cnn " FEW, "these samples have a depth of 8; use cnn3d");
    expect_refusal(2, FEW "--lr-schedule cosine --lr-warmup 5", "leaves none of the 5 epochs");
    expect_refusal(2, "--export none/x", "its folder does not exist");
    expect_refusal(2, FEW "--model lenet --data synth --res 7", "lenet: its conv2 gets an input of ");
    expect_refusal(
        2, FEW "--model cnn3d",
        "cnn3d: its pool1 gets an input of 1 x 28 x 28 (depth, height, width), which is too small");
    expect_refusal(2, "--verify-steps 5", "--verify-steps needs --verify; add that");
    expect_refusal(2, "--fresh", "--fresh needs --data synth; add that");
    expect_refusal(2, "--generator omp", "--generator needs --data synth; add that");
    expect_refusal(2, "--data synth --feed stored --generator omp",
                   "--generator needs --feed live; add that");
    expect_refusal(2, "--data synth --generator bat --verify", "--verify: images of --generator bat differ");
    expect_refusal(2, "--data synth --generator gbase --export-step x",
                   "--export-step: images of --generator gbase differ from those of the reference; use");
    expect_refusal(2, "--data synth --generator bat --save-batch 2", "or drop --save-batch");
    expect_refusal(2, FEW "--data synth --res 28 --model lenet --generator fused",
                   "it runs on a CPU, and --generator fused generates images on a GPU; use --generator omp");
    expect_refusal(2, "--keep 2", "--keep needs --checkpoint");
    expect_refusal(2, "--loops 3", "--loops: train does not repeat runs");
    expect_refusal(2, "--warmups 3", "--warmups: train does not repeat runs");
    expect_refusal(2, "--max-time 3", "--max-time: train does not repeat runs");
    expect_refusal(2, FEW "--shift 28", "--shift 28: these samples are 28x28");
    expect_refusal(2, FEW "--cudnn-benchmark", "works only with train-cudnn and train-cudnn-tf32; drop it");
    /* These options are checked before any data are read, so the missing folder is not mentioned. */
    expect_refusal(2, ",train-omp --data nowhere --checkpoint k",
                   "--checkpoint works with one variant at a time, but --variant names 2");
    expect_refusal(2, ",train-omp --data nowhere --export x", "--export works with one variant at a time");
    expect_refusal(2, ",train-omp --data nowhere --export-step x", "--export-step works with one variant");
}

/* Sets that do not fit into memory must be rejected before they are generated. Sets that fit must be
 * accepted, even with very large samples. */
Test(train_cli, rejects_sets_larger_than_memory)
{
    expect_refusal(2, "--data digits --train-size 2147483647 --dry-run",
                   " GB available; lower --train-size\n");
    expect_refusal(2, "--data digits --train-size 9 --test-size 2147483647 --dry-run",
                   " GB available; lower --test-size\n");
#ifdef HAVE_INIH
    expect_refusal(2, "--data synth --res 256 --train-size 2000000000 --feed stored --dry-run",
                   " GB available; lower --train-size\n");
    EXPECT(0, "$P --variant train-naive --model cnn-fdsl --data synth --res 2600 --classes 2 --train-size 2 "
              "--test-size 1 --batch 2 --dry-run");
#endif
}

#ifdef HAVE_CUDA
Test(train_cli, single_network_engine_rejects_others)
{
    expect_refusal(2, "--variant train-graph --model lenet " FEW,
                   "supports only cnn with its own dropout rates on bytes");
    expect_refusal(2, "--variant train-graph --model cnn --classes 33 " FEW, "at most 32 classes");
    expect_refusal(2, "--variant train-graph --model cnn --dropout 0.1 " FEW, "its own dropout rates");
    expect_refusal(2, "--variant train-graph --model cnn --optimizer lamb " FEW,
                   "so it does not support --optimizer lamb or muon; use train-bf16");
    expect_refusal(2, "--variant train-graph --model cnn --clip-adaptive 1 " FEW,
                   "so it does not support --clip-adaptive; use train-bf16");
    expect_refusal(2, "--variant train-graph --model cnn --data synth --res 28 " FEW,
                   "supports only --feed stored and load");
    EXPECT(0, "$P --workload train --variant all --model logreg --train-size 20 --test-size 5 --batch 5 "
              "--epochs 1");
    cr_expect_not_null(strstr(out, "train-graph (supports only cnn"), "%s", out);
}
#endif
