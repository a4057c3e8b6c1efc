/* Tests --dry-run of the workload `train`: what it checks, and which files it writes. */
#include <math.h>

#include "data/tensor_file.h"
#include "train_cli.h"

TestSuite(train_dry_run, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

#ifdef HAVE_XXHASH
/* A dry run must refuse what a run refuses, and change no checkpoint. */
Test(train_dry_run, a_dry_run_checks_the_checkpoints)
{
#define DRY_RUN "--model logreg --train-size 200 --test-size 50 --batch 16 --checkpoint k --dry-run "
    EXPECT_PRINTS(0, "--checkpoint k/ has no checkpoint: a run begins with the first epoch",
                  "$P " SMALL "--checkpoint k/ --resume --dry-run && test ! -e k");
    expect_refusal(2, "--checkpoint none/k --dry-run",
                   "its folder does not exist; create it with: mkdir -p 'none'");
    EXPECT(0, "$P " SMALL "--epochs 2 --checkpoint k && cp -r k before");
    EXPECT_EXACTLY(0, "fdsl-bench: --checkpoint k: 2 of 3 epochs are done: a run continues\n",
                   "$P --variant train-naive " DRY_RUN "--epochs 3 --resume");
    EXPECT_EXACTLY(0, "fdsl-bench: --checkpoint k: 2 of 2 epochs are done: nothing to do\n",
                   "$P --variant train-naive " DRY_RUN "--epochs 2 --resume");
    expect_refusal(2, DRY_RUN, "--checkpoint k holds checkpoints already: add --resume to continue");
    expect_refusal(2, DRY_RUN "--resume --lr 0.5", "other options: lr=0.001 in the checkpoint, 0.5 now");
    expect_refusal(2, DRY_RUN "--resume --export-step x",
                   "--export-step writes the first step, but --resume");
    expect_refusal(
        2, "--model lenet --train-size 200 --test-size 50 --batch 16 --checkpoint k --resume --dry-run",
        "belong to another model: logreg");
    expect_refusal(2,
                   "--model logreg --train-size 201 --test-size 50 --batch 16 --checkpoint k --resume "
                   "--dry-run --ranks 1",
                   "belong to other samples: --train-size 200 in the checkpoint, 201 now");
    /* With --batch max, the batch is not known, so options are not compared. */
    EXPECT(0, "$P --variant train-naive --model logreg --train-size 200 --test-size 50 --batch max "
              "--checkpoint k --resume --dry-run");
    EXPECT(0,
           "rm k/.lock before/.lock && $P --variant train-naive " DRY_RUN "--resume && test ! -e k/.lock && "
           "touch k/.lock before/.lock");
    run("flock k/.lock timeout 60 $P --variant train-naive " DRY_RUN "--resume");
    expect_line(2, "another training run is writing there");
    EXPECT(0, "diff -r k before");
    EXPECT(0, "truncate -s 50 k/epoch-000002.ckpt");
    EXPECT(0, "$P --variant train-naive " DRY_RUN "--epochs 3 --resume");
    EXPECT_OUT("truncated", "1 of 3 epochs are done");
    EXPECT(0, "truncate -s 50 k/*.ckpt");
    EXPECT_PRINTS(1, "k/epoch-000001.ckpt: this checkpoint is truncated",
                  "$P --variant train-naive " DRY_RUN "--resume");
    EXPECT_PRINTS(1, "no checkpoint in k can be used, because all are damaged",
                  "$P --variant infer-naive --checkpoint k --dry-run");
    expect_refusal(1, "--model logreg --train-size 200 --init k/epoch-000001.ckpt --dry-run", "truncated");
}
#endif

/* With --dry-run, the program writes the files that need no training, names them, and ends. */
Test(train_dry_run, a_dry_run_writes_the_first_step_and_the_data)
{
    EXPECT_PRINTS(0, "fdsl-bench: the first step was written to first\n", "$P " SMALL "--export-step first");
    EXPECT_EXACTLY(0,
                   "fdsl-bench: the samples and the initial parameters were written to data\n"
                   "fdsl-bench: the first step was written to dry\n",
                   "$P " SMALL "--export-step dry --export-data data --dry-run");
    EXPECT(0, "cmp first dry && test -s data");
    expect_refusal(2, "--model logreg --train-size 20 --batch max --export-step x --dry-run",
                   "--export-step with --dry-run needs a known batch; give --batch a number");
}

#ifdef HAVE_JANSSON
enum { FIRST_BATCH = 16, FIRST_VALUES = 784, FIRST_CLASSES = 10 };

static void read_tensor(const struct tensor_file *file, const char *name, float *to, size_t values)
{
    for (size_t i = 0; i < file->count; i++)
        if (strcmp(file->tensors[i].name, name) == 0) {
            cr_assert_eq(tensor_file_read(file, file->tensors[i].offset, to, values * sizeof *to), STATUS_OK);
            return;
        }
    cr_assert_fail("no tensor %s", name);
}

/* The gradient of a linear layer and of cross entropy is the mean over the samples of
 * (softmax(weight x + bias) - target) x. The exported gradient comes from the engine's own step, so inputs of
 * other samples, of another epoch or with other augmentation do not give this gradient. */
static void expect_inputs_of_the_step(const char *options)
{
    static float inputs[FIRST_BATCH][FIRST_VALUES], targets[FIRST_BATCH][FIRST_CLASSES], bias[FIRST_CLASSES];
    static float weight[FIRST_CLASSES][FIRST_VALUES], gradient[FIRST_CLASSES][FIRST_VALUES];
    static double expected[FIRST_CLASSES][FIRST_VALUES];
    char path[4096];
    struct tensor_file file;
    double worst = 0, largest = 0;
    EXPECT(0, "$P " SMALL "--epochs 1 --dry-run --export-step s.safetensors %s", options);
    snprintf(path, sizeof path, "%s/s.safetensors", folder);
    cr_assert_eq(tensor_file_open(path, &file), STATUS_OK, "%s", status_text());
    read_tensor(&file, "inputs", inputs[0], FIRST_BATCH * FIRST_VALUES);
    read_tensor(&file, "targets", targets[0], FIRST_BATCH * FIRST_CLASSES);
    read_tensor(&file, "before.fc1.weight", weight[0], FIRST_CLASSES * FIRST_VALUES);
    read_tensor(&file, "before.fc1.bias", bias, FIRST_CLASSES);
    read_tensor(&file, "gradient.fc1.weight", gradient[0], FIRST_CLASSES * FIRST_VALUES);
    tensor_file_close(&file);
    memset(expected, 0, sizeof expected);
    for (int j = 0; j < FIRST_BATCH; j++) {
        double odds[FIRST_CLASSES], sum = 0;
        for (int c = 0; c < FIRST_CLASSES; c++) {
            double logit = bias[c];
            for (int i = 0; i < FIRST_VALUES; i++)
                logit += (double)weight[c][i] * inputs[j][i];
            sum += odds[c] = exp(logit);
        }
        for (int c = 0; c < FIRST_CLASSES; c++)
            for (int i = 0; i < FIRST_VALUES; i++)
                expected[c][i] += (odds[c] / sum - targets[j][c]) * inputs[j][i] / FIRST_BATCH;
    }
    for (int c = 0; c < FIRST_CLASSES; c++)
        for (int i = 0; i < FIRST_VALUES; i++) {
            worst = fmax(worst, fabs(expected[c][i] - gradient[c][i]));
            largest = fmax(largest, fabs(expected[c][i]));
        }
    cr_expect(worst < 1e-5 * largest && largest > 0, "%s: difference %g of %g", options, worst, largest);
}

Test(train_dry_run, the_first_step_has_the_inputs_that_the_engine_saw)
{
    static const char *const options[] = {"",
                                          "--shift 3",
                                          "--flip",
                                          "--shift 2 --flip --seed 5",
                                          "--rand-augment 9",
                                          "--erasing 0.9",
                                          "--mixup 0.8",
                                          "--cutmix 1",
                                          "--mixup 0.8 --cutmix 1 --shift 2",
                                          "--label-smoothing 0.1 --shift 2",
                                          "--repeats 2 --shift 3",
                                          "--data synth --res 28 --classes 10",
                                          "--data synth --res 28 --classes 10 --feed live"};
    for (size_t i = 0; i < COUNT_OF(options); i++)
        expect_inputs_of_the_step(options[i]);
}
#endif

/* Generating these samples would take minutes. Only their number and their shape matter. */
Test(train_dry_run, a_dry_run_does_not_generate_the_samples, .timeout = 20)
{
    EXPECT(0, "timeout 10 $P --variant train-naive --data digits --train-size 1000000 --dry-run");
    EXPECT(0, "timeout 10 $P --variant train-naive --data synth --res 32 --test-size 2000000 --dry-run");
    EXPECT_PRINTS(0, "--batch 101 is more than the 100 samples to train on: a batch has 100",
                  "$P --variant train-naive --train-size 100 --batch 101 --dry-run");
    EXPECT(0, "timeout 10 $P --variant ops-naive --rows 1000000 --dim 512 --dry-run");
    EXPECT(0, "echo 'dry-run = no' >no.ini && $P --config no.ini " SMALL "--epochs 1");
}
