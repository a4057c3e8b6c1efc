/* Tests --recipe on the command line, and the checks and messages for options of recipes. */
#include "cells.h"
#include "train_cli.h"

TestSuite(train_recipe, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

#define PAPER  "$P --variant train-naive --recipe paper --dry-run "
#define LOGREG PAPER "--model logreg --data digits --train-size 300 --test-size 9 "

/* A recipe replaces defaults. Options on the command line override the recipe. Options of the recipe that
 * have no effect are not refused. */
Test(train_recipe, a_recipe_replaces_defaults)
{
    EXPECT_PRINTS(0, "--out-res 224 --channels 3 --mean 0.5 --std 0.5 --batch 256 --drop-last",
                  LOGREG "--flip=no --lr 0.5");
    cr_expect(!strstr(out, "--flip") && !strstr(out, "--lr 0") && !strstr(out, "--data"), "%s", out);
    EXPECT_EXACTLY(0, "", "$P --variant train-naive --model logreg --recipe none --dry-run");
    expect_refusal(2, "--recipe papers", "did you mean 'paper'?");
    expect_refusal(2, "--preset uji", "--preset needs --data synth; add that");
}

/* The recipes of published scripts; docs/recipes.md has all values. Their lines are accepted as options. */
Test(train_recipe, recipes_of_published_scripts_have_their_values)
{
    static const char *const recipes[][3] = {
        {"pdp2026", "--epochs 300",
         "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --batch 1024 --fit random-resized-crop "
         "--interpolation bicubic --rand-augment pdp2026-m28 --rand-augment-ops 2 --erase-last --lr-schedule "
         "step --lr-gamma 0.5 --lr-step-updates 42000 --lr-warmup-updates 5000 --warmup-lr 1e-6\n"},
        {"cvpr2023", "--epochs 90",
         "--batch 8190 --repeats 3 --fit random-resized-crop --interpolation random --rand-augment "
         "rand-m9-mstd0.5-inc1 --erase-last --lr-schedule cosine --lr-min 1e-5 --lr-overlap "
         "--lr-warmup-updates 5000 --warmup-lr 1e-6\n"},
        {"deit", "--epochs 300 --data synth --preset paper-1000 --train-size 100000",
         "--batch 1023 --repeats 3 --fit random-resized-crop --interpolation bicubic --flip --rand-augment "
         "rand-m9-mstd0.5-inc1 --lr-schedule cosine --lr-min 1e-5 --lr-overlap --lr-warmup 5 --warmup-lr "
         "1e-6 --ema 0.99996\n"},
    };
    for (size_t i = 0; i < COUNT_OF(recipes); i++) {
        EXPECT(0, "$P --variant train-omp --model vit-tiny --dry-run --recipe %s %s >line; cat line",
               recipes[i][0], recipes[i][1]);
        cr_expect(strstr(out, recipes[i][2]), "%s: %s", recipes[i][0], out);
        EXPECT(0, "$P --variant train-omp --model vit-tiny --dry-run %s $(cat line)", recipes[i][1]);
    }
    EXPECT(0,
           "$P --variant train-omp --recipe pdp2026 --epochs 1 --dry-run --lr-step-updates none --lr-step 3 "
           "--lr-warmup-updates none --data digits --batch 8 --train-size 64 2>&1");
    cr_expect(strstr(out, "--lr-step 3: the learning rate does not decay") && !strstr(out, "--data"), "%s",
              out);
    expect_refusal(2, "--recipe pdp2026 --lr-step 3",
                   "--lr-step needs --lr-step-updates none; add that, or drop --lr-step");
    expect_refusal(2, "--lr-warmup-updates 3 --lr-warmup 1",
                   "--lr-warmup needs --lr-warmup-updates none; add that, or drop --lr-warmup");
    expect_refusal(2, "--lr-overlap", "--lr-overlap needs --lr-schedule cosine, polynomial or tanh");
    expect_refusal(2, "--train-size 64 --batch 8 --epochs 2 --lr-schedule cosine --lr-warmup-updates 16",
                   "--lr-warmup-updates 16 leaves none of the 2 epochs for the decay; lower --lr-warmup-up");
}

/* --dry-run prints only options that have an effect, so the line is accepted as options. */
Test(train_recipe, dry_run_prints_options_that_are_accepted)
{
    EXPECT(0, LOGREG "--raw >line");
    EXPECT_PRINTS(0, "--out-res 224 --channels 3 --batch 256", "cat line");
    cr_expect(!strstr(out, "--mean") && !strstr(out, "--std") && !strstr(out, "--drop-path"), "%s", out);
    EXPECT(0, "$P --variant train-naive --model logreg --data digits --train-size 300 --test-size 9 --raw "
              "--dry-run "
              "$(cat line)");
    EXPECT_PRINTS(0, "--drop-path 0.1",
                  PAPER "--data digits --train-size 300 --model vit-micro --out-res 28 --channels 1");
#ifdef HAVE_INIH
    EXPECT(0,
           PAPER "--model logreg --feed stored --train-size 256 --test-size 4 --res 32 --out-res 32 >line");
    EXPECT(0, "cat line");
    cr_expect(strstr(out, "--data synth") && !strstr(out, "--fresh"), "%s", out);
    EXPECT(0, "$P --variant train-naive --model logreg --feed stored --train-size 256 --test-size 4 --res 32 "
              "--out-res 32 --dry-run $(cat line)");
#endif
}

/* Each part of the recipe can be switched off. */
Test(train_recipe, each_part_can_be_switched_off)
{
    EXPECT(0, LOGREG "--mixup none --cutmix none --erasing none --weight-decay none --label-smoothing none");
    cr_expect_null(strstr(out, "--mixup"), "%s", out);
    EXPECT_EXACTLY(0,
                   "--batch 256 --drop-last --optimizer adamw --lr 0.001 --lr-schedule cosine "
                   "--lr-warmup 1.28 --weight-decay 0.05 --label-smoothing 0.1 --flip --erasing 0.25 "
                   "--mixup 0.8 --cutmix 1\n",
                   LOGREG "--rand-augment none --out-res none --std none --drop-path none");
#define ROWS                                                                                              \
    "$P --variant train-naive --model logreg --recipe paper --data digits --train-size 40 --test-size 9 " \
    "--batch 8 --epochs 1 --lr-warmup 0 --out-res none --format csv "
    EXPECT(0, ROWS "--rand-augment none,3 --raw 2>&1");
    expect_cells(out, 1, "rand_augment=;out_res=;mean=;std=");
    expect_cells(out, 2, "rand_augment=3");
    EXPECT(0, ROWS "2>&1");
    expect_cells(out, 1, "mean=0.5;std=0.5");
    EXPECT_PRINTS(0, "recipe paper",
                  ROWS
                  "--flip=no | cat; $P --variant train-naive --model logreg --recipe paper --data digits "
                  "--train-size 40 --test-size 9 --batch 8 --epochs 1 --lr-warmup 0 --out-res none");
    expect_refusal(2, "--recipe paper --flip no", "unexpected argument 'no'; write --flip=no");
}

/* The help of a recipe has one default for each option. */
Test(train_recipe, help_has_one_default_per_option)
{
    EXPECT_PRINTS(0, "--drop-path RATE rate of stochastic depth",
                  "$P --workload train --recipe paper --help -v | tr -s '\\n ' ' '");
    EXPECT_OUT("in the first block (default 0.1) --", "as --fit says; none: keep their size (default 224)");
    EXPECT_PRINTS(0, "in the first block (default: the network's own rate) --",
                  "$P --workload train --help -v | tr -s '\\n ' ' '");
}

Test(train_recipe, mean_and_std_belong_together)
{
    expect_refusal(2, "--mean 0.5", "--mean needs --std S; add that");
    expect_refusal(2, "--std 0.5", "--std needs --mean M; add that");
    expect_refusal(2, "--raw --std 0.5 --mean 0.5", "--mean normalises samples, but --raw leaves them");
}

/* Three values are those of the channels, not a sweep. */
Test(train_recipe, mean_and_std_have_one_value_or_one_per_channel)
{
    static const char *const values[] = {"--mean 0.5 --std 0.25", "--mean 0.5,0.5,0.5 --std 0.25",
                                         "--mean 0.5 --std 0.25,0.25,0.2"};
    char loss[3][64];
    for (int i = 0; i < 3; i++) {
        EXPECT(0,
               "$P --variant train-naive --model logreg --data synth --res 14 --out-res 14 --train-size 40 "
               "--test-size 9 --batch 8 --epochs 1 --format csv %s",
               values[i]);
        snprintf(loss[i], sizeof loss[i], "%s", value(out, 1, "train_loss"));
        cr_expect_str_eq(value(out, 2, "train_loss"), "", "%s: two rows", values[i]);
    }
    cr_expect_str_eq(value(out, 1, "std"), "0.25,0.25,0.2");
    cr_expect_str_eq(loss[0], loss[1]);
    cr_expect_str_neq(loss[0], loss[2]);
    expect_refusal(2, "--mean 0.5,0.5,0.5 --std 1", "--mean: '0.5,0.5,0.5' has 3 values for 1 channel");
    expect_refusal(2, "--data t --out-res 8 --mean 0 --std 1,2", "--std: '1,2' has 2 values for 3 channels");
    expect_refusal(2, "--mean 0 --std 1,0", "--std: '0' is out of range");
}

/* --resume compares numbers, not their texts. */
Test(train_recipe, resumes_with_equal_numbers_in_other_texts)
{
#define BY_MEAN "$P " SMALL "--checkpoint k --resume --format csv "
    EXPECT(0, BY_MEAN "--epochs 1 --mean 0.50 --std .25");
    cr_expect_str_eq(value(out, 1, "mean"), "0.5");
    EXPECT(0, BY_MEAN "--epochs 2 --mean 0.5 --std 25e-2");
    cr_expect_str_eq(value(out, 1, "epoch"), "2");
    EXPECT_PRINTS(2, "mean=0.5 in the checkpoint, 0.51 now; give --mean 0.5, or name another folder",
                  BY_MEAN "--epochs 3 --mean 0.51 --std 0.25");
}

Test(train_recipe, reports_schedules_without_effect)
{
#define FEW "$P --variant train-naive --model logreg --train-size 64 --test-size 9 --batch 8 --dry-run "
    expect_refusal(2, "--train-size 64 --batch 8 --lr-schedule cosine --epochs 2 --lr-cycles 17",
                   "--lr-cycles 17: there are only 16 steps after the warm-up; lower --lr-cycles");
    EXPECT_EXACTLY(0, "", FEW "--lr-schedule cosine --epochs 2 --lr-cycles 16");
    EXPECT_PRINTS(0, "--lr-step 2: the learning rate does not decay within 2 epochs",
                  FEW "--lr-schedule step --lr-step 2 --epochs 2");
    EXPECT_PRINTS(0, "--lr-milestones 1:2: the last one is not reached within 2",
                  FEW "--lr-schedule multistep --lr-milestones 1:2 --epochs 2");
    EXPECT_PRINTS(0, "--lr-warmup 1: the learning rate does not reach --lr within 1 epoch;",
                  FEW "--lr-warmup 1 --epochs 1");
    EXPECT_PRINTS(0, "--lr-noise 2: there is no noise within 2 epochs;",
                  FEW "--lr-schedule cosine --epochs 2 --lr-noise 2");
    EXPECT_EXACTLY(0, "", FEW "--epochs 2 --lr-noise 1.75");
    /* Targets of ten classes are from 0.01 to 0.91. */
    expect_refusal(2, "--train-size 64 --loss bce --label-smoothing 0.1 --bce-threshold 0.92",
                   "--bce-threshold 0.92 would make all targets equal, because they are from 0.01 to 0.91;");
    expect_refusal(2, "--train-size 64 --loss bce --label-smoothing 0.1 --bce-threshold 0.005",
                   "--bce-threshold 0.005 would make all targets equal");
    expect_refusal(2, "--train-size 64 --loss bce --bce-threshold 1", "--bce-threshold 1 would make");
    EXPECT_EXACTLY(0, "", FEW "--loss bce --label-smoothing 0.1 --bce-threshold 0.9");
    EXPECT_EXACTLY(0, "", FEW "--loss bce --bce-threshold 0");
    /* With a list, too, each warning names the option once. */
    EXPECT(0, FEW "--lr-schedule step --lr-step 2,3 --epochs 2 2>&1");
    cr_expect(says("warning: --lr-step 2: the learning") && says("warning: --lr-step 3: the learning"), "%s",
              out);
    EXPECT_EXACTLY(0, "", FEW "--lr-warmup 1 --epochs 2 --lr-schedule step --lr-step 1.75");
    expect_refusal(
        2, "--train-size 64 --batch 8 --lr-schedule tanh --epochs 2 --lr-cooldown 1.5 --lr-warmup 0.5",
        "--lr-cooldown 1.5 leaves none of the 2 epochs for the decay; lower --lr-cooldown or");
}

/* Options of optimizers, schedules and losses that have no effect, or exclude each other. */
Test(train_recipe, options_without_effect_are_refused)
{
    static const char *const refused[][2] = {
        {"--muon-lr 0.1", "--muon-lr needs --optimizer muon"},
        {"--optimizer lamb --momentum 0.8", "--momentum needs --optimizer sgd or muon"},
        {"--optimizer muon --lr 0",
         "--lr 0: --muon-lr follows the schedule of --lr; give a --lr of more than 0"},
        {"--warmup-lr 0", "--warmup-lr needs --lr-warmup EPOCHS or --lr-warmup-updates N"},
        {"--lr-cooldown 1", "--lr-cooldown needs --lr-schedule cosine, polynomial or tanh"},
        {"--lr-k-decay 2", "--lr-k-decay needs --lr-schedule cosine, polynomial or tanh"},
        {"--lr-schedule cosine --lr-cycle-decay 0.5", "--lr-cycle-decay needs --lr-cycles N"},
        {"--lr-schedule cosine --lr-cycle-mul 2", "--lr-cycle-mul needs --lr-cycles N"},
        {"--lr-schedule cosine --lr-cycles 8 --lr-cycle-mul 100",
         "--lr-cycle-mul 100: the first of 8 cycles would have less than one step"},
        {"--lr-noise-limit 0.5", "--lr-noise-limit needs --lr-noise EPOCH"},
        {"--lr-step 0", "--lr-step"},
        {"--ema-warmup", "--ema-warmup needs --ema DECAY"},
        {"--bce-sum", "--bce-sum needs --loss bce"},
        {"--bce-threshold 0.2", "--bce-threshold needs --loss bce"},
        {"--bce-pos-weight 2", "--bce-pos-weight needs --loss bce"},
        {"--clip-norm 1 --clip-value 1",
         "--clip-value: gradients are clipped in one way, and --clip-norm is"},
        {"--clip-value 1 --clip-adaptive 1", "--clip-adaptive: gradients are clipped in one way"},
        {"--loss-scale 1024",
         "--loss-scale works only with train-amp, train-vit-amp and train-resnet-amp; drop it"},
        {"--loss-scale-growth 3",
         "--loss-scale-growth works only with train-amp, train-vit-amp and train-resnet-amp; drop it"},
        {"--loss-scale-backoff 0.25",
         "--loss-scale-backoff works only with train-amp, train-vit-amp and train-resnet-amp; drop it"},
        {"--loss-scale-interval 9",
         "--loss-scale-interval works only with train-amp, train-vit-amp and train-resnet-amp; drop it"},
        {"--model lenet --fp32-layers fc1", "it has one precision for all layers; drop --fp32-layers"},
        {"--model lenet --fp32-layers conv9", "--fp32-layers: no layer of lenet with parameters matches"},
        {"--model lenet --dropout 0.1", "--dropout: lenet has no dropout layers; use --model cnn or cnn3d"},
    };
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        char options[160];
        snprintf(options, sizeof options, "--train-size 20 --test-size 9 --batch 5 %s", refused[i][0]);
        expect_refusal(2, options, refused[i][1]);
    }
}

/* The last layer begins as its options say, also with the parameters of a file. */
Test(train_recipe, initialises_the_last_layer)
{
#define HEAD \
    "$P --variant train-naive --model lenet --train-size 20 --test-size 9 --batch 5 --lr 0 --epochs 1 "
    EXPECT(0, HEAD "--export a.safetensors");
    EXPECT(0, HEAD "--export b.safetensors --head-init-scale 0.5 --head-init-bias -3");
    EXPECT(0, HEAD "--export c.safetensors --init a.safetensors --head-init-scale 0.5 --head-init-bias -3");
    /* The files end with the 84 * 10 weights and the 10 biases of the last layer. */
    EXPECT(0,
           "for f in a b c; do tail -c 3400 $f.safetensors | od -An -v -t f4 -w4 | awk '{ print $1 }' > $f; "
           "done; cmp b c; paste a b | awk '$2 == -3 { bias++ } ($1 / 2 - $2) ^ 2 < 1e-14 { half++ } "
           "END { print bias, half }'");
    cr_expect_str_eq(out, "10 840\n", "%s", out);
}

Test(train_recipe, dropout_changes_the_rate_of_the_network)
{
#define CNN \
    "$P --variant train-naive --model cnn --train-size 20 --test-size 9 --batch 5 --epochs 1 --format csv "
    char loss[3][64];
    static const char *const rates[] = {"", "--dropout 0", "--dropout 0.9"};
    for (size_t i = 0; i < COUNT_OF(rates); i++) {
        EXPECT(0, CNN "%s", rates[i]);
        snprintf(loss[i], sizeof loss[i], "%s", value(out, 1, "train_loss"));
    }
    cr_expect(strcmp(loss[0], loss[1]) != 0 && strcmp(loss[1], loss[2]) != 0, "%s %s %s", loss[0], loss[1],
              loss[2]);
}

Test(train_recipe, misleading_output_names_are_refused)
{
    expect_refusal(2, "--export a.pt",
                   "--export a.pt: the file has the format safetensors; name it a.safetensors");
    expect_refusal(2, "--export-step b.c/a.npz", "name it b.c/a.safetensors");
    EXPECT_EXACTLY(0, "1\n",
                   FEW "--export a.b/c 2>&1 | grep 'does not exist' | wc -l"); /* the dot is that of a folder,
                                                                                  which does not exist */
    EXPECT(0, "mkdir used && touch used/x");
    expect_refusal(2, "--save-batch 4:used", "the folder used contains files; name a new or an empty folder");
    expect_refusal(2, "--save-batch 4:used/x", "used/x cannot be used: Not a directory; name another folder");
    expect_refusal(2, SMALL "--save-batch 17:new", "the first step has only 16 samples");
    EXPECT(0, "test ! -e new");
    expect_refusal(2, "--batch max --repeats 2", "--repeats needs a known batch");
    expect_refusal(2, "--log used", "--log: used is a folder; name a regular file\n");
}

Test(train_recipe, option_names_of_other_programs_get_a_suggestion)
{
    static const char *const names[][2] = {{"smoothing", "label-smoothing"},
                                           {"reprob", "erasing"},
                                           {"color-jitter-prob", "color-jitter-p"},
                                           {"gaussian-blur-prob", "blur"},
                                           {"grayscale-prob", "grayscale"},
                                           {"aa", "rand-augment"},
                                           {"model-ema", "ema"},
                                           {"model-ema-decay", "ema"},
                                           {"warmup-epochs", "lr-warmup"},
                                           {"clip-grad", "clip-norm"},
                                           {"clip-mode", "clip-adaptive"},
                                           {"cooldown-epochs", "lr-cooldown"},
                                           {"bce-target-thresh", "bce-threshold"},
                                           {"model-ema-warmup", "ema-warmup"},
                                           {"grad-accum", "accumulate"},
                                           {"grad-accum-steps", "accumulate"},
                                           {"hflip", "flip"},
                                           {"amp", "variant train-amp"},
                                           {"opt-betas", "beta1 B --beta2 B"},
                                           {"lr-cycle-limit", "lr-cycles"},
                                           {"checkpoint-hist", "keep"},
                                           {"log-interval", "log-steps"},
                                           {"wd", "weight-decay"},
                                           {"output", "checkpoint"}};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        char options[64], words[128];
        snprintf(options, sizeof options, "--%s 1", names[i][0]);
        snprintf(words, sizeof words, "unknown option '--%s'; did you mean '--%s'?", names[i][0],
                 names[i][1]);
        expect_refusal(2, options, words);
    }
    expect_refusal(2, "--lr-noise-std 1", "'--lr-noise-std': this option of timm has no equivalent here");
    expect_refusal(2, "--sched cosine", "did you mean '--lr-schedule cosine'?");
    expect_refusal(2, "--variant all --train-size 5", "workloads train and infer; add --workload train");
    EXPECT_PRINTS(2, "its options: --workload train --help", "$P train --help");
    expect_refusal(2, "--mixup", "--mixup needs a value, e.g. --mixup 0.8");
}

#ifdef HAVE_XXHASH
Test(train_recipe, refused_resumption_says_which_option_to_give)
{
    static const char *const cases[][2] = {
        {"--ema 0.9 --drop-last",
         "drop-last=0 in the checkpoint, 1 now; give --drop-last=no, or name another"},
        {"--ema 0.8", "ema=0.9 in the checkpoint, 0.8 now; give --ema 0.9, or name another folder"},
        {"--ema 0.9 --clip-norm 1", "no clip-norm in the checkpoint, 1 now; drop --clip-norm, or name"}};
    EXPECT(0, "$P " SMALL "--epochs 1 --ema 0.9 --checkpoint k");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char options[256];
        snprintf(options, sizeof options, SMALL "--checkpoint k --resume %s", cases[i][0]);
        expect_refusal(2, options, cases[i][1]);
    }
    EXPECT(0, "truncate -s 500 k/*.ckpt");
    expect_refusal(1, SMALL "--ema 0.9 --checkpoint k --resume",
                   "no checkpoint in k can be used, because all are damaged; delete them");
#ifdef HAVE_INIH
#define DRAWN SMALL "--data synth --res 8 --feed stored --checkpoint s "
    EXPECT(0, "$P " DRAWN "--epochs 1");
    expect_refusal(2, DRAWN "--resume --preset visualatom",
                   "belong to other samples: --preset not given in the checkpoint, visualatom now; give the "
                   "same samples");
#endif
}
#endif

/* A mixture has no copies of samples, which a recipe asks for. */
Test(train_recipe, recipes_train_on_mixtures)
{
    EXPECT(0, "$P --prepare set --from synth --formula rcdb --classes 3 --res 32 --samples 60 --encode png");
#define MIXED                                                                                    \
    "$P --variant train-omp --model vit-micro --data set --feed mixed --mix load:0.5,synth:0.5 " \
    "--formula rcdb --classes 3 --out-res 28 --batch 12 --epochs 1 --lr-warmup none --test-share 0.2 "
    EXPECT_PRINTS(0, "--recipe deit: a mixture resizes crops by the bilinear filter", MIXED "--recipe deit");
    EXPECT_PRINTS(2, "--repeats", MIXED "--recipe deit --repeats 3");
}
