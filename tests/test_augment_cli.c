/* Tests augmentation of training on the command line: the options, --verify, resumed runs, and the files of
 * --save-batch. */
#include "cells.h"
#include "train_cli.h"

TestSuite(augment_cli, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

#define SYNTH                                                                                    \
    "--model logreg --data synth --res 24 --out-res 16 --train-size 40 --test-size 6 --batch 8 " \
    "--fit random-resized-crop --flip --erasing 0.5 --repeats 2 "
#define AUGMENTED SYNTH "--rand-augment 28 "

Test(augment_cli, runs_on_the_cpu_equal_the_reference)
{
    static const char *const extra[] = {"", "--mixup 0.8 --cutmix 1 --loss bce", "--accumulate 3",
                                        "--accumulate 7 --mixup 0.8 --cutmix 1 --erase-last"};
    for (size_t i = 0; i < COUNT_OF(extra); i++) {
        EXPECT(0,
               "$P --variant train-naive,train-omp " AUGMENTED "--interpolation bicubic --epochs 2 --verify "
               "--verify-steps 3 --format csv %s 2>/dev/null",
               extra[i]);
        cr_expect_eq(count_of(out, "\n"), 5, "%s", out);
        for (size_t row = 1; row <= 4; row++)
            expect_cells(out, row, "wrong=0;items=40;interpolation=bicubic;rand_augment_ops=2");
    }
}

/* The policies of other programs, with fills that differ between channels. */
Test(augment_cli, policies_on_the_cpu_equal_the_reference)
{
    EXPECT(
        0,
        "$P --variant train-naive,train-omp " SYNTH "--interpolation random --epochs 1 --verify "
        "--verify-steps 3 --format csv --channels 3 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 "
        "--rand-augment pdp2026,rand-m9-mstd0.5-inc1,rand-m3-n3-p0.9-mmax5,rand-m100-mmax100-p1 2>/dev/null");
    for (size_t row = 1; row <= 8; row++)
        expect_cells(out, row, "wrong=0;items=40;interpolation=random");
    expect_cells(out, 1, "rand_augment=pdp2026");
    expect_cells(out, 3, "rand_augment=rand-m9-mstd0.5-inc1");
    expect_cells(out, 5, "rand_augment=rand-m3-n3-p0.9-mmax5");
}

#ifdef HAVE_XXHASH
/* Live and stored samples are crops of the same canvases, and a resumed run continues with the same crops. */
Test(augment_cli, live_stored_and_resumed_runs_give_the_same_parameters)
{
    EXPECT(0, "$P --variant train-omp " AUGMENTED "--epochs 2 --export live");
    EXPECT(0, "$P --variant train-omp " AUGMENTED "--epochs 2 --feed stored --export stored");
    EXPECT(0, "$P --variant train-omp " AUGMENTED "--epochs 1 --checkpoint c");
    EXPECT(0, "$P --variant train-omp " AUGMENTED "--epochs 2 --checkpoint c --resume --export resumed");
    EXPECT(0, "cmp live stored && cmp live resumed");
    EXPECT(0, "$P --variant train-omp " AUGMENTED "--epochs 2 --seed 1 --export other");
    EXPECT(1, "cmp -s live other");
}
#endif

#if defined HAVE_PNG && defined HAVE_XXHASH
/* Without augmentation, the files are the samples of a data set. */
Test(augment_cli, saved_images_are_the_samples_of_the_first_step)
{
    EXPECT_EXACTLY(0, "fdsl-bench: 8 images written to images\n",
                   "$P --variant train-naive " AUGMENTED "--epochs 1 --save-batch 8:images --dry-run");
    EXPECT(0, "test $(ls images | wc -l) -eq 8");
    EXPECT(0, "$P --variant train-naive " AUGMENTED "--epochs 1 --cutmix 1 --save-batch 8:mixed --dry-run");
    EXPECT(1, "diff -q images mixed");
    EXPECT(0, "ls images | grep -cE '^00000[0-7]-[0-9]+[.]png$' | grep -x 8");
    EXPECT(0, "ls mixed | grep -cE '^00000[0-7]-[0-9]+[+][0-9]+[.]png$' | grep -x 8");
    EXPECT(0, "$P --prepare set --from digits --samples 40 --store files --encode png");
    EXPECT(0,
           "$P --variant train-naive --model logreg --data set --batch 4 --save-batch 4:samples --dry-run");
    EXPECT(0, "for image in samples/*.png; do "
              "found=$(find set -name '*.png' -size -9k -exec cmp -s $image {} ';' -print) && "
              "label=${image##*-} && [ \"$(cat ${found%%.png}.cls)\" = ${label%%.png} ] || exit 1; done");
}
#endif

#if defined HAVE_PNG && defined HAVE_INIH
/* An epoch of one step has the same samples in any order, so that the losses differ only by rounding. */
Test(augment_cli, streams_crop_by_the_same_filters_as_stored_samples)
{
    static const char *const filters[] = {"bilinear", "bicubic", "random",
                                          "bilinear --crop-scale 0.3,0.5 --crop-ratio 0.5,1"};
    double losses[4];
    EXPECT(0, "$P --prepare set --from synth --samples 24 --classes 3 --res 40 --store imagefolder --encode "
              "png --preset lowercompute");
    for (size_t i = 0; i < COUNT_OF(filters); i++) {
        double loss[2];
        for (int load = 0; load < 2; load++) {
            EXPECT(0,
                   "$P --variant train-omp --model logreg --data set --test-data set --feed %s --out-res 16 "
                   "--fit random-resized-crop --interpolation %s --mean 0.5 --std 0.5 --batch 24 --epochs 1 "
                   "--format csv",
                   load ? "load" : "stored", filters[i]);
            loss[load] = strtod(value(out, 1, "train_loss"), NULL);
        }
        cr_expect_float_eq(loss[0], loss[1], 1e-6 * loss[0], "%s: %.9g, not %.9g", filters[i], loss[1],
                           loss[0]);
        losses[i] = loss[1];
    }
    cr_expect(losses[0] != losses[1] && losses[1] != losses[2] && losses[0] != losses[2] &&
              losses[0] != losses[3]);
}
#endif

#define CROPS "--out-res 16 --fit random-resized-crop "

Test(augment_cli, invalid_augmentation_options_are_refused)
{
    expect_refusal(2, "--variant train-naive --interpolation bicubic",
                   "--interpolation needs --fit random-resized-crop");
    static const char *const crops[][2] = {
        {"--crop-scale 0.5,1", "--crop-scale needs --out-res PIXELS --fit random-resized-crop"},
        {"--out-res 16 --crop-ratio 1,1", "--crop-ratio needs --out-res PIXELS --fit random-resized-crop"},
        {CROPS "--crop-scale 0.5,0.2", "--crop-scale: 0.5 is larger than 0.2"},
        {CROPS "--crop-scale 0,1", "--crop-scale: 0 to 1 is out of range; both must be 0.0001 to 1"},
        {CROPS "--crop-scale 0.5", "--crop-scale: '0.5' is not a range; give MIN,MAX"},
        {CROPS "--crop-ratio 0.5,8", "--crop-ratio: 0.5 to 8 is out of range; both must be 0.142857 to 7"},
        {CROPS "--crop-ratio 1,x", "--crop-ratio: 'x' is not a number"},
    };
    for (size_t i = 0; i < COUNT_OF(crops); i++) {
        char line[128];
        snprintf(line, sizeof line, "--variant train-naive %s", crops[i][0]);
        expect_refusal(2, line, crops[i][1]);
    }
    expect_refusal(2, "--variant train-naive --rand-augment-ops 3",
                   "--rand-augment-ops needs --rand-augment POLICY");
    static const char *const policies[][2] = {
        {"31", "'31' is out of range; it must be 0 to 30"},
        {"rend-m9", "'rend-m9' is neither a magnitude from 0 to 30 nor a policy; write 28,"},
        {"rand-m9-w0",
         "'rand-m9-w0' has the part 'w0'; the parts of timm that are known here are m, n, mstd"},
        {"rand-m", "'' is not a number"},
        {"rand-m9-m5", "'rand-m9-m5' has the part 'm' twice; drop one"},
        {"pdp2026-m9-m9", "'pdp2026-m9-m9' has the part 'm' twice; drop one"},
        {"rand-m9-mmax101", "'101' is out of range; it must be 1 to 100"},
        {"rand-n1.5", "'rand-n1.5' has no whole number of operations"},
        {"rand-m9-inc0", "'rand-m9-inc0' has inc0, which timm reads as inc1; leave inc out"},
        {"pdp2026-m31", "'31' is out of range; it must be 0 to 30"},
        {"pdp2026-mstd1", "'pdp2026-mstd1' has the part 'mstd1'"},
        {"rand-n3 --rand-augment-ops 2", "--rand-augment-ops needs a policy without -n in --rand-augment"},
        {"9 --interpolation bicubic", "--interpolation needs --fit random-resized-crop"},
    };
    for (size_t i = 0; i < COUNT_OF(policies); i++) {
        char line[128];
        snprintf(line, sizeof line, "--variant train-naive --rand-augment %s", policies[i][0]);
        expect_refusal(2, line, policies[i][1]);
    }
    expect_refusal(2, "--variant train-naive --erase-last --mixup 1", "--erase-last needs --erasing P");
    expect_refusal(2, "--variant train-naive --erase-last --erasing 0.5",
                   "--erase-last needs --mixup or --cutmix");
    expect_refusal(2, "--variant train-naive --batch 9 --repeats 2",
                   "--repeats 2 does not divide the 9 samples");
    expect_refusal(2, "--variant train-naive --batch max --repeats 2", "give --batch a number");
    expect_refusal(2, "--variant train-naive --data clips --model cnn3d --rand-augment 9",
                   "8-bit images with one or three channels are needed");
    expect_refusal(2, "--variant train-naive --save-batch 4", "give a number and a folder");
    expect_refusal(2, "--variant train-naive --train-size 100 --batch 8 --save-batch 9:x",
                   "the first step has only 8 samples");
}
