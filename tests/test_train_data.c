/* Tests training data on the command line: samples generated during training, and files with errors. */
#include "shell.h"

#include <stdint.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif

#include "cells.h"
#include "core/portable.h"
#include "data/npy.h"
#include "train_cli.h"

TestSuite(train_data, .init = shell_set_up, .fini = shell_tear_down, .timeout = 300);

/* ---- Live samples ---- */

#if defined(HAVE_INIH) && defined(HAVE_XXHASH)
#define LIVE_OF(res, train)                                                                             \
    "--variant train-naive --model logreg --data synth --classes 5 --res " #res " --train-size " #train \
    " --test-size 20 --batch 16 "
#define LIVE LIVE_OF(20, 90)

/* Samples that are generated during training (live) and stored samples must give the same parameters. A
 * resumed run may change from one to the other. */
Test(train_data, live_samples_equal_stored_ones)
{
    EXPECT(0, "$P " LIVE "--epochs 3 --export a --format csv --verify --shift 2");
    cr_expect_str_eq(value(out, 3, "feed"), "live");
    cr_expect_str_eq(value(out, 3, "wrong"), "0");
    cr_expect(number(out, 3, "generate_share") > 0 && number(out, 3, "generated_per_s") > 0);
    cr_expect(number(out, 3, "data_share") >= number(out, 3, "generate_share"));
    cr_expect(number(out, 3, "opening_s") > 0);
    EXPECT(0, "$P " LIVE "--epochs 3 --export b --feed stored --format csv --shift 2");
    cr_expect_str_eq(value(out, 3, "generate_share"), "");
    EXPECT(0, "cmp a b");
    EXPECT(0, "$P " LIVE "--epochs 1 --checkpoint c --shift 2");
    EXPECT(0, "$P " LIVE "--epochs 2 --checkpoint c --resume --feed stored --shift 2");
    EXPECT(0, "$P " LIVE "--epochs 3 --checkpoint c --resume --export d --shift 2");
    EXPECT(0, "cmp a d");
    EXPECT(0, "$P --variant infer-naive --checkpoint c --batch 7 --min-samples 1 --min-time 0 --max-time 0");
}

/* Rows say from which preset the classes come. Rows of other data have no preset. */
Test(train_data, rows_have_the_preset)
{
    EXPECT(0, "$P " LIVE "--epochs 1 --preset visualatom --format csv");
    cr_expect_str_eq(value(out, 1, "preset"), "visualatom");
    EXPECT(0, "$P --variant train-naive --model logreg --epochs 1 --train-size 20 --test-size 5 --batch 4 "
              "--recipe paper --data digits --out-res 28 --channels 1 --lr-warmup 0 --format csv");
    cr_expect_str_eq(value(out, 1, "preset"), "");
    cr_expect_str_eq(value(out, 1, "on_error"), "");
    cr_expect_str_eq(value(out, 1, "skipped"), "");
}

/* Formulas by name, by preset, by ranges in a file and by a file of classes; up to 21,000 classes. */
Test(train_data, trains_on_every_formula_with_labels)
{
    double loss[3];
    static const char *const formulas[] = {"uji", "visualatom", "rcdb"};
    for (int i = 0; i < 3; i++) {
        EXPECT(0, "$P " LIVE "--epochs 2 --formula %s --format csv --verify --shift 2 --export live",
               formulas[i]);
        cr_expect_str_eq(value(out, 2, "formula"), formulas[i]);
        cr_expect_str_eq(value(out, 2, "feed"), "live");
        cr_expect_str_eq(value(out, 2, "wrong"), "0");
        loss[i] = number(out, 2, "test_loss");
        cr_expect(loss[i] > 0 && (i == 0 || loss[i] != loss[i - 1]));
        EXPECT(0,
               "$P " LIVE
               "--epochs 2 --formula %s --feed stored --export stored --shift 2 && cmp live stored",
               formulas[i]);
    }
    EXPECT(0, "$P " LIVE "--epochs 2 --preset rcdb --format csv --shift 2");
    cr_expect_eq(number(out, 2, "test_loss"), loss[2]);
    EXPECT(0, "$P --variant naive --preset rcdb --classes 5 --batch 1 --write-classes c.csv --max-time 0.01");
    EXPECT(0, "$P " LIVE "--epochs 2 --class c.csv --format csv --shift 2");
    cr_expect_eq(number(out, 2, "test_loss"), loss[2]);
    EXPECT(0, "$P " LIVE "--epochs 2 --preset fractal-color-1k --format csv --verify --export live");
    cr_expect_str_eq(value(out, 2, "wrong"), "0");
    EXPECT(0, "$P " LIVE
              "--epochs 2 --preset fractal-color-1k --feed stored --export stored && cmp live stored");
    EXPECT_PRINTS(2, "has a mask instead of a label", "$P " LIVE "--preset segrcdb");
    EXPECT_PRINTS(2, "have colours", "$P " LIVE "--preset fractal-color-1k --out-res 20 --channels 1");
    EXPECT(0, "$P " LIVE "--epochs 1 --checkpoint k --formula rcdb --format csv");
    const double tested = number(out, 1, "test_loss");
    EXPECT(0, "$P --variant infer-naive --checkpoint k --loops 1 --format csv");
    cr_expect_str_eq(value(out, 1, "formula"), "rcdb");
    cr_expect_float_eq(number(out, 1, "test_loss"), tested, 1e-6 * tested);
    EXPECT(0,
           "sed -n '/^.rcdb.$/,/^$/p' %s/configs/classes.cfg | sed 's/rcdb/mine/' > mine.cfg && "
           "$P " LIVE "--epochs 2 --formula rcdb --preset mine --preset-file mine.cfg --format csv --shift 2",
           root);
    cr_expect_eq(number(out, 2, "test_loss"), loss[2]);
    EXPECT(0, "$P --variant train-omp --model logreg --data synth --formula rcdb --classes 21000 --res 8 "
              "--train-size 60 --test-size 20 --batch 20 --epochs 1 --format csv");
    cr_expect_str_eq(value(out, 1, "classes"), "21000");
    EXPECT(0, "$P --variant train-omp --model vit-micro --data synth --formula rcdb --classes 3 --res 32 "
              "--train-size 16 --test-size 4 --batch 8 --epochs 1 --format csv");
}

/* Images with several classes: live, stored and prepared samples have the same labels, and every engine
 * verifies. */
Test(train_data, trains_on_multi_hot_labels)
{
#define SEVERAL                                                                                         \
    "--variant train-naive --model logreg --data synth --preset multifractal-1k --classes 37 --res 20 " \
    "--train-size 90 --test-size 20 --batch 16 "
    EXPECT(0, "$P " SEVERAL "--loss bce --epochs 2 --verify --mixup 0.8 --cutmix 1 --export a --format csv");
    cr_expect_str_eq(value(out, 2, "wrong"), "0");
    cr_expect(number(out, 2, "test_map") > 0 && number(out, 2, "test_map") < 1);
    cr_expect(number(out, 2, "test_acc") <= 1 && number(out, 2, "train_acc") <= 1);
    EXPECT(0,
           "$P " SEVERAL "--loss bce --epochs 2 --mixup 0.8 --cutmix 1 --feed stored --export b && cmp a b");
    EXPECT(0, "$P " SEVERAL "--loss bce --epochs 2 --verify --fresh --checkpoint k --ema 0.9 --format csv");
    cr_expect_str_eq(value(out, 2, "wrong"), "0");
    const double loss = number(out, 2, "ema_test_loss"), precision = number(out, 2, "ema_test_map");
    EXPECT(0, "$P --variant infer-naive --checkpoint k --loops 1 --verify --format csv");
    cr_expect_float_eq(number(out, 1, "test_loss"), loss, 1e-6 * loss);
    cr_expect_float_eq(number(out, 1, "test_map"), precision, 1e-5);
    EXPECT(0,
           "$P --variant train-omp --model lenet --data synth --preset multifractal-1k --classes 37 --res 28 "
           "--train-size 90 --test-size 20 --batch 16 --loss bce --feed constant --epochs 1 --format csv");
    EXPECT_PRINTS(2, "use --loss bce", "$P " SEVERAL);
    EXPECT_PRINTS(2, "multi-hot labels; drop it",
                  "$P " SEVERAL "--loss bce --feed stored --export-data x --dry-run");
    EXPECT(0, "$P " SEVERAL "--loss bce --export-step s --epochs 1 && ! grep -qa '\"labels\"' s && "
              "grep -qa '\"targets\"' s");
    EXPECT(0, "$P --prepare set --from synth --preset multifractal-1k --classes 37 --res 20 --samples 110 "
              "--encode npy");
#define SET "--variant train-naive,train-omp --model logreg --data set --loss bce --batch 16 --epochs 2 "
    EXPECT(0, "$P " SET "--feed load --verify --format csv");
    cr_expect_str_eq(value(out, 2, "wrong"), "0");
    EXPECT(0, "$P " SET "--feed stored --verify --format csv");
    cr_expect_str_eq(value(out, 4, "wrong"), "0");
    EXPECT_PRINTS(2, "have 37 classes; drop --classes", "$P " SET "--classes 40");
    EXPECT_PRINTS(2, "use --loss bce", "$P --variant train-naive --model logreg --data set");
    EXPECT(0, "mkdir two && cd two && tar xf ../set/synth-000000.tar && rm 000003.multihot.npy && "
              "tar cf ../broken.tar --sort=name *");
    EXPECT_PRINTS(1, "it has no multi-hot label",
                  "$P --variant train-naive --model logreg --loss bce "
                  "--data broken.tar");
    /* Each label stays with its sample if broken samples before it are omitted. */
    EXPECT(0,
           "cd two && printf x >000002.npy && "
           "printf x >000003.npy && printf x >000003.multihot.npy && tar cf ../broken.tar --sort=name * && "
           "rm 000002.* 000003.* && tar cf ../clean.tar --sort=name *");
    EXPECT(0, "for d in broken clean; do $P --variant train-naive --model logreg --loss bce --data $d.tar "
              "--test-data $d.tar --on-error skip --epochs 2 --batch 16 --export $d || exit 1; done && cmp "
              "broken clean");
    EXPECT(0, "cd two && tar xf ../set/synth-000000.tar && rm 000003.multihot.npy && "
              "tar cf ../broken.tar --sort=name *");
    EXPECT_PRINTS(0, "1 training sample has no label",
                  "$P --variant train-naive --model logreg --loss bce "
                  "--data broken.tar --feed load --on-error mask --epochs 1");
    /* A sample that is left out does not change those after it. */
#define SKIPPED                                                                                      \
    "$P --variant train-naive --model logreg --loss bce --test-data set --epochs 1 --on-error skip " \
    "--export "
    EXPECT(0, "cd two && rm 000003.* && tar cf ../fewer.tar --sort=name * && echo >000003.npy && "
              "cp 000004.multihot.npy 000003.multihot.npy && tar cf ../skipped.tar --sort=name *");
    EXPECT(0, SKIPPED "c.safetensors --data fewer.tar && " SKIPPED "d.safetensors --data skipped.tar && "
                      "tail -c 1000 c.safetensors >c && tail -c 1000 d.safetensors | cmp c -");
}

/* Tests a network on the samples that a checkpoint names. The loss must be that of the run that wrote the
 * checkpoint. */
static void expect_same_test(const char *options, const char *trained)
{
    char column[4][64];
    static const char *const columns[] = {"preset", "out_res", "fit", "channels"};
    EXPECT(0, "$P %s--epochs 1 --checkpoint k --format csv", trained);
    const double loss = number(out, 1, "test_loss");
    for (size_t i = 0; i < COUNT_OF(columns); i++)
        snprintf(column[i], sizeof column[i], "%s", value(out, 1, columns[i]));
    EXPECT(0, "$P --variant infer-naive --checkpoint k --loops 1 --format csv %s", options);
    cr_expect_null(strstr(out, "these are not the test samples"), "%s", out);
    cr_expect_float_eq(number(out, 1, "test_loss"), loss, 1e-6 * loss, "%s", out);
    for (size_t i = 0; i < COUNT_OF(columns); i++)
        cr_expect_str_eq(value(out, 1, columns[i]), column[i]);
    EXPECT(0, "rm -r k");
}

/* Without --classes, a preset that is a list or a published set has all its classes; others have 10. A file
 * of classes decides itself. */
Test(train_data, a_preset_has_all_its_classes)
{
    static const struct {
        const char *options, *classes;
    } presets[] = {{"--preset fractaldb-1k", "1000"},
                   {"--preset 1p-frac", "1000"},
                   {"--preset exfractaldb-1k", "1000"},
                   {"--preset fractal-color-1k", "1000"},
                   {"--preset paper-1000", "1000"},
                   {"--preset ofdb-1k --classes 7", "7"},
                   {"--preset fractaldb", "10"},
                   {"--formula fractaldb", "10"},
                   {"--preset rcdb", "10"},
                   {"--preset paper", "10"},
                   {"--formula rcdb", "10"},
                   {"--preset ifs3d", "10"},
                   {"", "10"}};
    for (size_t i = 0; i < COUNT_OF(presets); i++) {
        EXPECT(0,
               "$P --variant train-omp --model logreg --data synth --res 13 --train-size 8 --test-size 4 "
               "--batch 8 --epochs 1 --feed stored --format csv %s",
               presets[i].options);
        cr_expect_str_eq(value(out, 1, "classes"), presets[i].classes, "%s", presets[i].options);
        cr_expect_eq(strstr(out, "8 training samples show only as many of its 1000 classes; raise") != NULL,
                     strcmp(presets[i].classes, "1000") == 0, "%s", out);
    }
}

#define FRACTALS(options)                                                                             \
    "--variant train-naive --model logreg --data synth --train-size 24 --test-size 9 --batch 8 --res" \
    " 40 " options " "

/* Compares training on live fractals with training on data that --prepare writes with the same options. */
static void expect_prepared(const char *options)
{
    char wanted[64];
    EXPECT(0, "$P " FRACTALS("--epochs 2 --format csv --verify %s"), options);
    cr_expect_str_eq(value(out, 2, "wrong"), "0");
    snprintf(wanted, sizeof wanted, "%s", value(out, 2, "test_loss"));
    EXPECT(0, "$P " FRACTALS("--epochs 2 --format csv --feed stored %s"), options);
    cr_expect_str_eq(value(out, 2, "test_loss"), wanted);
    EXPECT(0,
           "rm -rf a b && for s in 'a 24 0' 'b 9 2147483648'; do set -- $s && "
           "$P --prepare $1 --from synth --samples $2 --instance $3 --encode npy --res 40 %s; done",
           options);
    EXPECT(0, "$P --variant train-naive --model logreg --data a --test-data b --batch 8 --epochs 2 --format "
              "csv");
    cr_expect_str_eq(value(out, 2, "test_loss"), wanted, "%s", options);
}

/* Fractals show the images of the workload synth: patches, points, without dark ones, and classes of a file
 * with the orbits of a preset. */
Test(train_data, fractals_are_those_of_synth)
{
    EXPECT(0, "$P --preset fractaldb-1k --classes 3 --write-classes f.csv");
    expect_prepared("--preset fractaldb-1k --classes 3");
    expect_prepared("--preset fractaldb-1k --classes 3 --min-lit 0.2");
    expect_prepared("--class f.csv --preset ofdb-1k --draw points");
    expect_prepared("--class f.csv --preset 1p-frac");
    EXPECT(0, "$P --preset mv-fractaldb-1k --classes 3 --write-classes s.csv");
    expect_prepared("--class s.csv --preset exfractaldb-1k");
    EXPECT(0, "$P " FRACTALS("--epochs 1 --format csv --class f.csv --draw points --min-lit 0.25"));
    cr_expect_str_eq(value(out, 1, "draw"), "points");
    cr_expect_str_eq(value(out, 1, "min_lit"), "0.25");
    cr_expect_str_eq(value(out, 1, "classes"), "3");
    expect_same_test("", FRACTALS("--class f.csv --draw points --min-lit 0.25 --preset ofdb-1k"));
    EXPECT(0, "$P " FRACTALS("--epochs 1 --class f.csv --checkpoint k"));
    EXPECT(0, "$P " FRACTALS("--epochs 2 --class f.csv --checkpoint k --resume --draw patches --min-lit 0"));
    EXPECT(2, "$P " FRACTALS("--epochs 3 --class f.csv --checkpoint k --resume --min-lit 0.01"));
    cr_expect(strstr(out, "no min-lit in the checkpoint, 0.01 now; drop --min-lit"), "%s", out);
    EXPECT(2, "$P " FRACTALS("--epochs 3 --class f.csv --checkpoint k --resume --draw points"));
    cr_expect(strstr(out, "no draw in the checkpoint, points now; drop --draw"), "%s", out);
}

/* Images of points repeat, so training and test sets can share them. */
Test(train_data, says_that_test_images_of_points_are_trained_on)
{
    static const char shared[] = "so images of the test set are also in the training set";
    EXPECT_PRINTS(0, shared, "$P " FRACTALS("--epochs 1 --preset ofdb-1k --classes 2 --draw points"));
    EXPECT_PRINTS(0, shared, "$P " FRACTALS("--epochs 1 --preset 1p-frac --classes 40 --draw points"));
    EXPECT(0, "$P " FRACTALS("--epochs 1 --preset fractaldb --classes 2 --draw points"));
    cr_expect(!strstr(out, shared), "%s", out);
    EXPECT(0, "$P " FRACTALS("--epochs 1 --preset ofdb-1k --classes 2"));
    cr_expect(!strstr(out, shared), "%s", out);
}

Test(train_data, refuses_options_of_fractals_for_other_samples)
{
    static const struct {
        const char *options, *message;
    } refused[] = {
        {"--data synth --formula rcdb --draw points", "--draw: the formula rcdb draws no fractals"},
        {"--data synth --preset uji --min-lit 0.1",
         "--min-lit: the formula uji draws no fractals of the plane with weights; drop it"},
        {"--data synth --preset 1p-frac --min-lit 0.1", "--min-lit replaces weights, but this set has none"},
        {"--data synth --preset ofdb-1k --draw point", "--draw point is unknown; did you mean 'points'?"},
        {"--data synth --preset ofdb-1k --draw 7", "--draw 7 is unknown; use patches or points"},
        {"--data synth --class f.csv --preset uji", "--class replaces --preset; drop one of them"},
        {"--data synth --class f.csv --preset rcdb-1k", "--class replaces --preset; drop one of them"},
        {"--data synth --class f.csv --preset ofdb", "'ofdb' is not a preset of fractaldb; 1p-frac, ofdb-1k"},
        {"--data synth --class u.csv --preset ofdb-1k", "--class replaces --preset; drop one of them"},
        {"--data synth --class f.csv --preset 3d-ofdb-1k", "3d-ofdb-1k is a preset of the formula ifs3d"},
        {"--data synth --class f.csv --preset-file x", "--class replaces --preset-file; drop one of them"},
        {"--data digits --draw points", "--draw needs --data synth"},
        {"--data digits --min-lit 0", "--min-lit needs --data synth"},
    };
    EXPECT(0, "$P --preset fractaldb-1k --classes 3 --write-classes f.csv");
    EXPECT(0, "$P --preset uji --classes 3 --write-classes u.csv");
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        EXPECT(2, "$P --variant train-naive --model logreg %s", refused[i].options);
        cr_expect(strstr(out, refused[i].message), "%s: %s", refused[i].options, out);
    }
}

/* Formulas whose images have no label, unknown ones, and presets of another formula. */
Test(train_data, refuses_formulas_by_name)
{
    EXPECT(2, "$P " LIVE "--formula segrcdb");
    cr_expect(strstr(out, "the formula segrcdb shows several classes and has a mask instead of a label"),
              "%s", out);
    EXPECT(2, "$P " LIVE "--preset segrcdb");
    cr_expect(strstr(out, "mask instead of a label"), "%s", out);
    EXPECT(2, "$P " LIVE "--formula rcbd");
    cr_expect(strstr(out, "--formula rcbd is unknown; did you mean 'rcdb'?"), "%s", out);
    EXPECT(2, "$P " LIVE "--formula rcdb --preset paper-1000");
    cr_expect(strstr(out, "paper-1000 is a preset of the formula uji, not of rcdb"), "%s", out);
    EXPECT(0,
           "$P --variant naive --preset segrcdb --classes 3 --batch 1 --write-classes s.csv --max-time 0.01");
    EXPECT(2, "$P " LIVE "--formula segrcdb --class s.csv");
    EXPECT(2, "$P --variant train-naive --data digits --formula rcdb");
    cr_expect(strstr(out, "--data synth"), "%s", out);
}

/* `infer` takes the options of the samples and the normalisation from the checkpoint. */
Test(train_data, infer_tests_the_samples_of_the_training)
{
    expect_same_test("", LIVE "--preset lowercompute --out-res 14 --fit crop --channels 1 ");
    expect_same_test("--preset visualatom --classes 5 --out-res 14",
                     LIVE "--preset visualatom --out-res 14 --mean 0.5 --std 0.25 ");
    expect_same_test("", "--variant train-naive --model logreg --recipe paper --preset visualatom --res 40 "
                         "--classes 4 --out-res 20 --train-size 30 --test-size 9 --batch 8 --lr-warmup 0 ");
    EXPECT(0, "$P " LIVE "--epochs 1 --checkpoint k --preset visualatom --out-res 14");
    EXPECT(0, "$P --variant infer-naive --checkpoint k --loops 1 --preset uji --fit crop");
    cr_expect_not_null(strstr(out, "(--preset visualatom in the checkpoint, uji now; --fit resize in the "
                                   "checkpoint, crop now)"),
                       "%s", out);
    EXPECT(2, "$P --variant infer-naive --checkpoint k --loops 1 --data digits");
    cr_expect_not_null(strstr(out, "--data has samples of 3x1x14x14 and 10 classes"), "%s", out);
    EXPECT(2, "$P " LIVE "--epochs 2 --checkpoint k --resume --out-res 14");
    cr_expect_not_null(
        strstr(out, "belong to other samples: --preset visualatom in the checkpoint, not given now; give"),
        "%s", out);
}

/* Fresh samples differ between epochs. A resumed run must get the same samples as an uninterrupted one. */
Test(train_data, a_resumed_run_has_the_same_fresh_samples)
{
    EXPECT(0, "$P " LIVE "--epochs 2 --export a");
    EXPECT(0, "$P " LIVE "--epochs 2 --export b --fresh");
    EXPECT(1, "cmp a b");
    EXPECT(0, "$P " LIVE "--epochs 1 --checkpoint c --fresh");
    EXPECT(2, "$P " LIVE "--epochs 2 --checkpoint c --resume");
    cr_expect_not_null(
        strstr(out, "other options: fresh=1 in the checkpoint, none now; give --fresh, or name"), "%s", out);
    EXPECT(0, "$P " LIVE "--epochs 2 --checkpoint c --resume --fresh --export d");
    EXPECT(0, "cmp b d");
}

Test(train_data, rejects_invalid_live_options)
{
    EXPECT(2, "$P " LIVE_OF(20, 1001) "--export-data x --dry-run");
    cr_expect_not_null(strstr(out, "--export-data writes only stored samples; add --feed stored"), "%s", out);
    EXPECT(2, "$P " LIVE "--export-data x --dry-run --fresh");
    EXPECT(2, "$P " LIVE "--export-data x --dry-run --feed constant");
    EXPECT(0, "$P " LIVE_OF(20, 1001) "--export-data x --feed stored --dry-run");
    EXPECT(2, "$P " LIVE "--feed stored --fresh");
    cr_expect_not_null(strstr(out, "--fresh needs --feed live"), "%s", out);
    EXPECT(2, "$P " LIVE_OF(4097, 90));
    EXPECT_PRINTS(0, "--batch 91 is more than the 90 samples to train on",
                  "$P --variant train-naive --model logreg --data synth --classes 5 --res 20 --train-size 90 "
                  "--test-size 20 --batch 91 --epochs 1");
    EXPECT(2, "$P --variant train-naive --data digits --feed live");
    cr_expect_not_null(strstr(out, "--feed live works only with --data synth"), "%s", out);
    EXPECT(0, "$P --variant train-naive --model logreg --data digits --train-size 100 --test-size 20 --feed "
              "constant --format csv");
    cr_expect_str_eq(value(out, 1, "feed"), "constant");
}
#endif

/* ---- Files ---- */

/* fetch_mnist.sh must reject wrong files from a mirror. */
Test(train_data, rejects_files_of_a_bad_mirror)
{
    if (run("command -v curl") != 0)
        return; /* the script downloads with curl */
    EXPECT(0, "mkdir bad && for part in train t10k; do for kind in images-idx3 labels-idx1; do "
              "echo no > bad/$part-$kind-ubyte.gz; done; done");
    EXPECT(1, "MIRROR=file://$PWD/bad %s/scripts/setup/fetch_mnist.sh m", root);
    cr_expect_not_null(strstr(out, "is not train-images-idx3-ubyte.gz"), "%s", out);
    EXPECT(0, "! ls m/*.gz");
    EXPECT(2, "%s/scripts/setup/fetch_mnist.sh", root);
}

/* Writes IDX files with `images` images of 6 x 6 and `labels` labels up to `highest`. */
static void put_idx(const char *images_name, const char *labels_name, uint8_t images, uint8_t labels,
                    uint8_t highest)
{
    uint8_t pictures[16 + 255 * 36] = {0, 0, 8, 3, 0, 0, 0, images, 0, 0, 0, 6, 0, 0, 0, 6};
    uint8_t values[8 + 255] = {0, 0, 8, 1, 0, 0, 0, labels};
    for (int i = 0; i < images * 36; i++)
        pictures[16 + i] = (uint8_t)(i * 37);
    for (int i = 0; i < labels; i++)
        values[8 + i] = (uint8_t)(i % (highest + 1));
    put(images_name, pictures, 16 + (size_t)images * 36);
    put(labels_name, values, 8 + (size_t)labels);
}

#define ON "--model logreg --batch 4 --epochs 1 --data m "

Test(train_data, idx_files_are_read_and_their_faults_reported)
{
    EXPECT(0, "mkdir m");
    put_idx("m/train-images-idx3-ubyte", "m/train-labels-idx1-ubyte", 20, 20, 9);
    expect_refusal(2, ON, "there is no t10k-images-idx3-ubyte");
    put_idx("m/t10k-images-idx3-ubyte", "m/t10k-labels-idx1-ubyte", 10, 10, 9);
    EXPECT(0, "$P --variant train-naive " ON "--format csv");
    cr_expect(number(out, 1, "train_samples") == 20 && number(out, 1, "test_samples") == 10);
    EXPECT(0, "$P --variant stream --data m --batch 8 --max-time 0.1 --verify --format csv");
    cr_expect(number(out, 1, "wrong") == 0 && number(out, 1, "items") == 20, "%s", out);
    expect_refused(2, "reads single files or tar shards, but m has files of records",
                   "$P --variant files --data m");
    expect_refused(2,
                   "the folder has files of MNIST, which only train, infer and load --variant stream read; "
                   "--prepare DIR --from idx",
                   "$P advise --data m --compute 1");
    EXPECT(0, "$P --variant train-naive " ON "--checkpoint k >says && mkdir tested && cp m/t10k* tested && "
              "$P --variant infer-naive --checkpoint k --data tested --max-time 0.1 --format csv");
    cr_expect_eq(number(out, 1, "test_samples"), 10, "%s", out); /* without the files of the training set */
    expect_refusal(2, ON "--train-size 21", "--train-size 21: there are only 20");
    expect_refusal(
        2, ON "--classes 4",
        "m/train-images-idx3-ubyte: offset 340: sample '000009': its label is 9, the largest of the "
        "data, but there are only 4 classes; give --classes 10 or more\n");
    put_idx("m/train-images-idx3-ubyte", "m/train-labels-idx1-ubyte", 20, 19, 9);
    expect_refusal(1, ON, "does not hold one label for each of the 20 images");
    put_idx("m/train-images-idx3-ubyte", "m/train-labels-idx1-ubyte", 20, 20, 11);
    expect_refusal(
        2, ON, "its label is 11, the largest of the data, but there are only 10 classes; give --classes 12");
    EXPECT(0, "$P --variant train-naive " ON "--classes 12");
    put("m/train-images-idx3-ubyte", "\0\1\10\3", 4);
    expect_refusal(1, ON, "not an IDX file");
    put_idx("m/train-images-idx3-ubyte", "m/train-labels-idx1-ubyte", 20, 20, 9);
    put_idx("m/t10k-images-idx3-ubyte", "m/t10k-labels-idx1-ubyte", 0, 0, 9);
    expect_refusal(1, ON, "m/t10k-images-idx3-ubyte has no images");
}

#ifdef HAVE_ZLIB
Test(train_data, truncated_gzip_files_are_refused)
{
    EXPECT(0, "mkdir m");
    put_idx("m/train-images-idx3-ubyte", "m/train-labels-idx1-ubyte", 20, 20, 9);
    put_idx("m/t10k-images-idx3-ubyte", "m/t10k-labels-idx1-ubyte", 10, 10, 9);
    EXPECT(0, "gzip m/*");
    EXPECT(0, "$P --variant train-naive " ON);
    EXPECT(0, "gunzip m/*labels*"); /* each file may be plain or gzipped */
    EXPECT(0, "$P --variant train-naive " ON);
    EXPECT(0, "gzip m/*labels* && gunzip m/*images*");
    EXPECT(0, "$P --variant train-naive " ON);
    EXPECT(0, "gzip m/*images*");
    EXPECT(0, "truncate -s 100 m/train-images-idx3-ubyte.gz");
    expect_refusal(1, ON, "the gzip data are truncated");
}
#endif

Test(train_data, cifar_files_are_read_and_their_faults_reported)
{
    static uint8_t records[12 * 3073];
    EXPECT(0, "mkdir m");
    for (size_t i = 0; i < sizeof records; i++)
        records[i] = i % 3073 ? (uint8_t)(i * 7) : (uint8_t)(i / 3073 % 10);
    put("m/test_batch.bin", records, sizeof records);
    expect_refusal(2, ON, "the folder has none of the files data_batch_1.bin to data_batch_5.bin");
    put("m/data_batch_2.bin", records, sizeof records);
    EXPECT(0, "$P --variant train-naive " ON);
    put("m/data_batch_1.bin", records, sizeof records);
    EXPECT(0, "mv m/test_batch.bin t");
    expect_refusal(2, ON, "there is no test_batch.bin");
    EXPECT(0, "mv t m/test_batch.bin");
#ifdef _OPENMP
    EXPECT(0, "$P --variant train-omp --model cnn --batch 7 --epochs 1 --data m");
#endif
    EXPECT(
        0,
        "$P --variant train-naive --model lenet --flip --shift 4 --batch 7 --epochs 1 --data m --format csv");
    cr_expect_eq(number(out, 1, "train_samples"), 24);
    put("m/data_batch_2.bin", records, sizeof records - 1);
    expect_refusal(1, ON, "not a binary CIFAR-10 file: its size, 36875 bytes, is not");
}

/* Each record has a coarse label (n mod 20), a fine label (7 n mod 100) and an image. */
Test(train_data, cifar_100_has_fine_and_coarse_labels)
{
    static uint8_t records[100 * 3074];
    for (size_t i = 0; i < sizeof records; i++)
        records[i] = i % 3074 > 1   ? (uint8_t)(i % 3074 + i / 3074 * 31)
                     : i % 3074 > 0 ? (uint8_t)(i / 3074 * 7 % 100)
                                    : (uint8_t)(i / 3074 % 20);
    EXPECT(0, "mkdir m");
    put("m/train.bin", records, sizeof records);
    expect_refusal(2, ON, "--data m: there is no test.bin");
    put("m/test.bin", records, 20 * 3074);
    EXPECT(0, "$P --variant train-naive " ON "--format csv --checkpoint k");
    cr_expect(number(out, 1, "train_samples") == 100 && number(out, 1, "test_samples") == 20);
    cr_expect_str_eq(value(out, 1, "labels_of"), "fine");
    EXPECT(0, "$P --variant infer-naive --loops 2 --checkpoint k --predictions fine.csv");
    EXPECT(0, "$P --variant train-naive " ON "--format csv --checkpoint c --labels-of coarse");
    cr_expect_str_eq(value(out, 1, "labels_of"), "coarse");
    EXPECT(0, "$P --variant infer-naive --loops 2 --checkpoint c --predictions coarse.csv");
    for (int n = 0; n < 20; n += 19) {
        EXPECT(0, "sed -n %dp fine.csv | cut -d, -f1,2; sed -n %dp coarse.csv | cut -d, -f1,2", n + 2, n + 2);
        char rows[64];
        snprintf(rows, sizeof rows, "%06d,%d\n%06d,%d\n", n, n * 7 % 100, n, n);
        cr_expect_str_eq(out, rows);
    }
    expect_refusal(2, ON "--labels-of middle", "--labels-of: 'middle' is not one of fine, coarse");
    expect_refusal(
        2, "--data digits --labels-of fine",
        "--labels-of needs --data with the binary files of CIFAR-100; add that, or drop --labels-of");
    expect_refusal(2, ON "--classes 90", "give --classes 100 or more");
    records[3074 + 1] = 100;
    put("m/test.bin", records, 20 * 3074);
    expect_refusal(1, ON "--labels-of coarse",
                   "m/test.bin: not a binary CIFAR-100 file: record 1 has label 100");
    put("m/test.bin", records, 20 * 3074 - 1);
    expect_refusal(1, ON, "not a binary CIFAR-100 file: its size, 61479 bytes, is not");
}

#ifdef HAVE_XXHASH
/* Trains on data sets of --prepare: on one folder, of which a tenth of each class becomes the test set, and
 * on two folders, for training and testing. */
Test(train_data, a_folder_with_the_name_of_generated_data_is_warned_of)
{
#define NAMED \
    "mkdir -p digits; $P --variant train-naive --model logreg --train-size 64 --test-size 100 --dry-run "
    EXPECT_EXACTLY(0, "", NAMED);
    EXPECT_PRINTS(0,
                  "warning: --data digits names generated data; for the folder of this name, give --data ./",
                  NAMED "--data digits");
}

Test(train_data, data_sets_are_read_and_their_faults_reported)
{
    EXPECT(0, "$P --prepare m --from digits --samples 300");
    EXPECT(0, "$P --variant train-naive " ON "--format csv");
    double held_out = number(out, 1, "test_samples");
    cr_expect(strstr(out, "--data m: the test set has only ") &&
                  strstr(out, "name a larger test set with --test-data"),
              "%s", out);
    cr_expect(held_out > 10 && held_out < 60 && number(out, 1, "train_samples") == 300 - held_out);
    EXPECT(0, "$P --variant train-naive " ON "--image 'png;npy' --label cls --format csv");
    cr_expect_str_eq(value(out, 1, "image"), "png;npy");
    cr_expect_str_eq(value(out, 1, "label"), "cls");
    cr_expect_str_eq(value(out, 1, "on_error"), "fail");
    cr_expect_str_eq(value(out, 1, "skipped"), "0");
    EXPECT(0,
           "$P --variant train-naive " ON "--image 'png;npy' --checkpoint k >log && $P --variant infer-naive "
           "--checkpoint k --loops 1 --format csv");
    cr_expect_str_eq(value(out, 1, "image"), "png;npy");
    cr_expect_str_eq(value(out, 1, "label"), "");
    EXPECT(0, "mkdir two && $P --prepare two/train --from dataset --source m --store files");
    EXPECT(0, "$P --prepare two/test --from digits --samples 30");
    EXPECT(0, "$P --variant train-naive --model lenet --epochs 1 --data two --format csv");
    cr_expect(number(out, 1, "train_samples") == 300 && number(out, 1, "test_samples") == 30);
    EXPECT(0, "mkdir f && tar xf m/digits-000000.tar -C f");
    EXPECT(0, "$P --prepare odd --sample-shape 3,4,5 --classes 0 --samples 20");
    expect_refusal(
        1, "--model cnn3d --data odd",
        "sample '000000': it has no member for --label cls;json:label;txt;folder; its members are: npy;");
    EXPECT(0, "rm -r m && mkdir m && printf 3 > m/a.cls && printf 4 > m/a.txt");
    expect_refusal(1, ON,
                   "sample 'a': it has no member for --image jpg;jpeg;png;npy;ppm;bmp;pgm;tif;tiff;webp; its "
                   "members are: cls, txt;");
    EXPECT(0, "rm m/* && for i in 1 2 3 4 5 6 7 8 9; do cp f/00000$i.png m/; printf 3 > m/00000$i.cls; done");
    expect_refusal(1, ON "--image cls", "its cls is neither a PNG or JPEG image nor an array of |u1 or <f2");
    EXPECT(0, "printf %%070d 4 > m/000004.cls"); /* truncated to 64 digits, the label would be 0 */
    expect_refusal(1, ON, "m/000004.png: sample '000004': its cls is not a label");
    EXPECT(0, "printf '4\\0005' > m/000004.cls");
    expect_refusal(1, ON, "m/000004.png: sample '000004': its cls is not a label");
    EXPECT(0, "rm m/* && mkdir two/none");
    expect_refusal(2, "--data two/none", "--data two/none");
    cr_expect_null(strstr(strstr(out, "--data") + 1, "--data two/none: "), "%s", out);
    EXPECT(0, "rm -r two/test");
    expect_refusal(2, "--data two", "the folder contains a data set 'train' but no 'test' or 'val'");
    EXPECT(0, "$P --prepare two/val --from digits --samples 30");
    EXPECT(0, "$P --variant train-naive --model lenet --epochs 1 --data two --format csv");
    cr_expect(number(out, 1, "train_samples") == 300 && number(out, 1, "test_samples") == 30);
}
#endif

#if defined HAVE_XXHASH && defined HAVE_JPEG
/* Images of other sizes than the network's are resized, and --out-res is part of the rows. */
Test(train_data, images_of_data_sets_are_resized)
{
    EXPECT(0, "$P --prepare j --from digits --samples 200 --encode jpeg");
    EXPECT(0, "$P --variant train-naive --model lenet --epochs 1 --data j --out-res 20 --fit crop --channels "
              "1 --format csv");
    cr_expect(number(out, 1, "out_res") == 20 && number(out, 1, "channels") == 1);
    expect_refusal(2, "--data j --fit crop", "--fit needs --out-res PIXELS");
    expect_refusal(2, "--data j --out-res 20 --channels 2", "'2' is neither 1 nor 3");
    expect_refusal(2, "--data j --out-res 20 --fit random-resized-crop --export-data x",
                   "--export-data cannot write the samples of --fit random-resized-crop");
    expect_refusal(1, "--data j --out-res 40 --fit crop",
                   "28 x 28 pixels is too small for a crop of 40 x 40");
}
#endif

#ifdef HAVE_XXHASH
/* Broken samples end the run, or are skipped and counted. A resumed run must have the same samples, and
 * `infer` tests those of the training. */
Test(train_data, broken_samples_are_an_error_or_are_skipped)
{
#define SKIP "--model logreg --batch 4 --data m --on-error skip "
    EXPECT(0,
           "$P --prepare d --from digits --samples 100 --encode npy --store files && mkdir m && "
           "cp d/not-imagefolder/000/* m && for i in 00 31 32; do echo no > m/0000$i.npy; done && cp -r m b");
    expect_refusal(1, ON, "bench: m/000000.npy: sample '000000': ");
    expect_refusal(1, ON, "; --on-error skip omits such samples");
    EXPECT(0, "$P --variant train-naive " SKIP "--epochs 1 --checkpoint k --format csv");
    cr_expect_eq(number(out, 1, "train_samples") + number(out, 1, "test_samples"), 97);
    cr_expect(strstr(out, "warning: skipped in the training set: m/000031.npy: sample '000031': ") &&
                  strstr(out, "--data m: skipped 3 broken samples of the training set and 0 of the test set"),
              "%s", out);
    cr_expect_str_eq(value(out, 1, "on_error"), "skip");
    cr_expect_str_eq(value(out, 1, "skipped"), "3");
    EXPECT(0, "$P --variant infer-naive --checkpoint k --loops 1 --format csv");
    cr_expect_null(strstr(out, "not the test samples"), "%s", out);
    cr_expect_str_eq(value(out, 1, "on_error"), "skip");
    cr_expect_str_eq(value(out, 1, "skipped"), "0");
    EXPECT(0, "$P --variant train-naive " SKIP "--epochs 2 --checkpoint k --resume --format csv");
    cr_expect_str_eq(value(out, 1, "epoch"), "2");
    EXPECT(0, "cp d/not-imagefolder/000/000031.npy m");
    EXPECT_PRINTS(2, "the samples of --data m have changed",
                  "$P --variant train-naive " SKIP "--epochs 3 --checkpoint k --resume");
    EXPECT(0, "mkdir -p two/train two/test && cp d/not-imagefolder/000/* two/train && "
              "for i in 1 2 3; do echo no > two/test/$i.npy; echo 1 > two/test/$i.cls; done");
    EXPECT_PRINTS(1, "--data two: all 3 samples to test with are broken; see the warnings above",
                  "$P --variant train-naive --model logreg --data two --on-error skip");
    EXPECT_PRINTS(1, "all 100 samples to train on are broken",
                  "for f in two/train/*.npy; do echo no > $f; done; $P --variant train-naive --model logreg "
                  "--data two --on-error skip");
    cr_expect(strstr(out, "two/train/000007.npy") && !strstr(out, "two/train/000008.npy"), "%s", out);
    EXPECT(0, "rm m/*");
    expect_refusal(2, "--data digits --on-error skip", "--on-error needs --data DIR; add that, or drop");
    put_idx("m/train-images-idx3-ubyte", "m/train-labels-idx1-ubyte", 20, 20, 9);
    expect_refusal(2, SKIP, "the folder has files of MNIST; drop --on-error");
}

/* Broken samples that are not tested do not matter, with and without an index. */
Test(train_data, inference_reads_only_the_test_samples)
{
    EXPECT(0,
           "$P --prepare m --from digits --samples 100 --encode npy --store files && mkdir -p two/train && "
           "cp m/not-imagefolder/000/* two/train && cp -r two/train two/test && "
           "cp -r two/train flat && for d in m two flat; do $P --variant train-naive --model logreg --batch "
           "4 --data $d --epochs 1 "
           "--checkpoint $d.k || exit 1; done; rm m/not-imagefolder/000/000000.npy two/train/000001.npy; "
           "echo no >m/not-imagefolder/000/000003.npy; echo no >two/train/000000.npy");
    expect_refusal(1, ON, "m/not-imagefolder/000/000000.npy");
    EXPECT(0, "$P --variant infer-naive --checkpoint m.k --loops 1 && "
              "$P --variant infer-naive --checkpoint two.k --loops 1 && "
              "$P --variant infer-naive --checkpoint flat.k --loops 1");
    cr_expect_null(strstr(out, "not the test samples"), "%s", out);
    EXPECT(0, "$P --prepare s --from digits --samples 100 --encode npy && mkdir -p cut/train cut/test && "
              "cp s/*.tar cut/train && cp s/*.tar cut/test && truncate -s 50000 cut/train/*.tar && "
              "$P --variant train-naive --model logreg --batch 4 --data cut --epochs 1 --on-error skip "
              "--checkpoint cut.k && $P --variant infer-naive --checkpoint cut.k --loops 1");
    cr_expect_null(strstr(out, "not the test samples"), "%s", out);
    EXPECT(0, "mkdir few && cp two/test/00000[4-6].* few");
    expect_refusal(1, "--variant infer-naive --checkpoint m.k --data few",
                   "there are no samples to test with");
}

/* A tenth of each class is held out, or the share of --test-share. A checkpoint remembers the share. */
Test(train_data, a_share_of_every_class_is_held_out)
{
#define SHARE "--model logreg --batch 4 --data m --format csv "
    EXPECT(0, "$P --prepare m --from digits --samples 150 --store imagefolder");
    EXPECT(0, "$P --variant train-naive " SHARE "--epochs 1");
    cr_expect(number(out, 1, "train_samples") == 130 && number(out, 1, "test_samples") == 20); /* 2 of 15 */
    EXPECT(0, "$P --variant train-naive " SHARE "--test-share 0.4 --epochs 1 --checkpoint k");
    cr_expect(number(out, 1, "train_samples") == 90 && number(out, 1, "test_samples") == 60);
    const double accuracy = number(out, 1, "test_acc");
    EXPECT(0, "$P --variant train-naive " SHARE "--test-share 0.4 --epochs 2 --checkpoint k --resume");
    cr_expect_eq(number(out, 1, "epoch"), 2);
    EXPECT(0, "rm k/epoch-000002.ckpt && $P --variant infer-naive --loops 2 --format csv --checkpoint k");
    cr_expect(number(out, 1, "test_samples") == 60 && number(out, 1, "test_acc") == accuracy);
    cr_expect_null(strstr(out, "not the test samples"), "%s", out);
    EXPECT_PRINTS(2,
                  "fdsl-bench: the checkpoint was trained with --data m, but there is no such folder; if it "
                  "was moved, or for other data, give --data DIR\n",
                  "mv m moved && $P --variant infer-naive --loops 2 --checkpoint k");
    EXPECT(0, "$P --variant infer-naive --loops 2 --test-share 0.4 --data moved --format csv --checkpoint k "
              "&& mv moved m");
    cr_expect(number(out, 1, "test_acc") == accuracy);
    EXPECT_PRINTS(0, "(--test-share 0.4 in the checkpoint, 0.2 now)",
                  "$P --variant infer-naive --loops 2 --test-share 0.2 --checkpoint k");
    EXPECT_PRINTS(2, "belong to other samples: --test-share 0.4 in the checkpoint, not given now",
                  "$P --variant train-naive " SHARE "--epochs 2 --checkpoint k --resume");
    expect_refusal(2, SHARE "--test-share 0",
                   "--test-share: '0' is out of range; it must be 0.0001 to 0.9999");
    expect_refusal(2, SHARE "--test-share 10", "'10' is out of range");
    expect_refusal(2, SHARE "--test-size 1000",
                   " samples of the set are held out for testing; lower --test-size");
    expect_refusal(2, "--test-share 0.2", "--test-share needs --data DIR; add that, or drop --test-share");
    EXPECT(0, "mkdir two && cp -r m two/train && cp -r m two/val");
    expect_refusal(2, "--data two --test-share 0.2",
                   "--test-share: --data two has a test set of its own, so nothing is held out; drop");
}

/* A note counts the classes with one training sample and no test sample, also with a test set of its own. */
Test(train_data, classes_that_are_never_tested_are_counted)
{
    static const char never[] = "a single sample, which is trained on and never tested\n";
    EXPECT(
        0,
        "$P --prepare m --from digits --samples 40 --store imagefolder && mkdir m/x && cp \"$(find m -name "
        "000000.png)\" m/x && rm m/[!0-9x]*");
    EXPECT(0, "$P --variant train-naive " ON);
    cr_expect(strstr(out, "--data m: 1 class has ") && strstr(out, never), "%s", out);
    EXPECT(0, "cp -r m/x m/y && $P --variant train-naive " ON);
    cr_expect(strstr(out, "--data m: 2 classes have ") && strstr(out, never), "%s", out);
    EXPECT(0, "mkdir t && cp -r m t/train && mv m t/test && $P --variant train-naive --model logreg --batch "
              "4 --epochs 1 --data t");
    cr_expect_null(strstr(out, never), "%s", out);
    EXPECT(0,
           "rm t/train/x/* t/test/y/* && cp t/train/y/* t/train/x/1.png && cp t/train/y/* t/train/x/2.png && "
           "$P --variant train-naive --model logreg --batch 4 --epochs 1 --data t");
    cr_expect(strstr(out, "--data t: 1 class has ") && strstr(out, never), "%s", out);
}

/* The held-out samples must be the same, whichever samples are broken. Opening the set finds flipped bytes.
 */
Test(train_data, skipped_samples_do_not_change_the_split)
{
    EXPECT(0, "$P --prepare m --from digits --samples 100 --encode npy --store files");
    EXPECT(
        0,
        "$P --variant train-naive --model logreg --batch 4 --data m --epochs 1 --checkpoint k --format csv");
    const double train = number(out, 1, "train_samples"), test = number(out, 1, "test_samples");
    EXPECT(0, "for i in 00 03; do printf '\\377' | "
              "dd of=m/not-imagefolder/000/0000$i.npy bs=1 seek=200 conv=notrunc status=none; done; "
              "$P --variant train-naive " SKIP "--epochs 1 --format csv");
    cr_expect(number(out, 1, "train_samples") == train - 2 && number(out, 1, "test_samples") == test, "%s",
              out);
    EXPECT(0, "$P --variant infer-naive --checkpoint k --on-error skip --loops 1");
    cr_expect_null(strstr(out, "not the test samples"), "%s", out);
    int lost = 0; /* broken samples that are held out; no others replace them */
    EXPECT(0, "rm m/not-imagefolder/000/0000[0-5]?.npy; $P --variant train-naive " SKIP
              "--epochs 1 --format csv");
    const char *words = strstr(out, "broken samples of the training set and ");
    cr_assert(words && sscanf(words, "broken samples of the training set and %d", &lost) == 1 && lost > 0,
              "%s", out);
    cr_expect(number(out, 1, "train_samples") == train - (60 - lost) &&
                  number(out, 1, "test_samples") == test - lost,
              "%s", out);
}

/* If a shard is truncated, the truncated sample and the samples after it are skipped. Without an index, the
 * number of lost samples is unknown. */
Test(train_data, truncated_shards_are_skipped)
{
    EXPECT(0, "$P --prepare m --from digits --samples 100 --encode npy --shards 2 && truncate -s 50000 "
              "m/digits-000001.tar");
    expect_refusal(1, ON, "m/digits-000001.tar: offset 50000: the shard has 50000 bytes");
    EXPECT(0, "$P --variant train-naive " SKIP "--epochs 1 --format csv");
    double count = number(out, 1, "train_samples") + number(out, 1, "test_samples");
    int train, test;
    const char *words = strstr(out, "--data m: ");
    cr_assert(words && sscanf(words, "--data m: skipped %d broken samples of the training set and %d of the",
                              &train, &test) == 2,
              "%s", out);
    cr_expect(count > 50 && count < 100 && train + test == 100 - count, "%s", out);
    EXPECT(0, "rm m/*.index m/*.wids.json");
    expect_refusal(1, ON, "m/digits-000001.tar: offset ");
    EXPECT(0, "$P --variant train-naive " SKIP "--epochs 1 --format csv");
    cr_expect_str_eq(value(out, 1, "skipped"), "");
    cr_expect_not_null(strstr(out, "0 of the test set, and an unknown number more"), "%s", out);
}

/* A shard in the place of another one has the right size, but not the samples of the index. */
Test(train_data, samples_are_compared_with_the_index)
{
    EXPECT(0, "$P --prepare m --from digits --samples 100 --encode npy --shards 4 && "
              "cp m/digits-000000.tar m/digits-000002.tar");
    expect_refusal(1, ON, "sample '000050': m/digits-000002.tar: offset 0: the header names '000000.cls'");
    expect_refusal(1, ON, "--on-error skip omits such samples");
    EXPECT(0, "$P --variant train-naive " SKIP "--epochs 1 --format csv");
    cr_expect_eq(number(out, 1, "train_samples") + number(out, 1, "test_samples"), 75, "%s", out);
#if defined(HAVE_JANSSON) && defined(HAVE_CRYPTO)
    EXPECT(0, "rm m/*.index");
    expect_refusal(1, ON, "m/digits-000002.tar: the shard's md5 is ");
    expect_refusal(1, SKIP, "m/digits-000002.tar: the shard's md5 is ");
#endif
}

/* If images differ in size, the message says which option makes them equal. */
Test(train_data, the_message_about_sizes_names_a_remedy)
{
    uint8_t bytes[NPY_HEADER_MAX + 72] = {0};
    EXPECT(0, "mkdir m");
    for (int i = 0; i < 40; i++) {
        char name[32];
        size_t header = npy_header_make((char *)bytes, "|u1", i == 30 ? "8, 9" : "8, 8");
        snprintf(name, sizeof name, "m/k%02d.npy", i);
        put(name, bytes, header + (i == 30 ? 72 : 64));
        snprintf(name, sizeof name, "m/k%02d.cls", i);
        put(name, i % 2 ? "1" : "0", 1);
    }
    expect_refusal(2, "--model logreg --data m",
                   "8x8; add --out-res PIXELS, which gives all images one size");
    expect_refusal(2, "--model logreg --data m --on-error skip",
                   "bench: m/k30.npy: sample 'k30': it is u8 of");
    expect_refusal(2, "--model logreg --data m --out-res 8 --channels 1 --fit random-resized-crop",
                   "channels: use --feed load, which crops images of any size, or --fit resize");
    EXPECT(0,
           "$P --variant train-naive --model logreg --epochs 1 --batch 8 --data m --out-res 8 --channels 1 "
           "--fit random-resized-crop --feed load");
    EXPECT(0, "$P --variant train-naive --model logreg --epochs 1 --batch 8 --data m --out-res 8");
}

/* A label that is no class is reported with its sample, whichever feed reads it. Labels with gaps are one
 * warning, which says how many classes they imply. */
Test(train_data, messages_about_labels_name_the_sample_and_the_classes)
{
    static const char *const feeds[] = {"stored", "load"};
    EXPECT(0,
           "$P --prepare d --from digits --samples 40 --encode png --shards 1 && mkdir u m gap && "
           "tar xf d/*.tar -C u && "
           "for f in u/*[02468].cls; do echo 0 >$f; done && for f in u/*[13579].cls; do echo 1 >$f; done && "
           "echo 900 >u/000031.cls && tar cf gap/gap.tar -C u --sort=name . && "
           "echo 90000000 >u/000031.cls && tar cf m/m.tar -C u --sort=name .");
    for (size_t i = 0; i < COUNT_OF(feeds); i++) {
        char options[200];
        snprintf(options, sizeof options, "--model logreg --epochs 1 --data m --feed %s", feeds[i]);
        expect_refusal(1, options, "31': its label 90000000 is not a class from 0 to 16777215; --on-error ");
        cr_expect(strstr(out, "m/m.tar: offset "), "%s", out);
        snprintf(options, sizeof options, "--model logreg --epochs 1 --data gap --classes 9 --feed %s",
                 feeds[i]);
        expect_refusal(2, options, "31': its label is 900, the largest of the data, but there are only 9");
        EXPECT(0, "$P --variant train-naive --model logreg --epochs 1 --data gap --feed %s 2>&1", feeds[i]);
        cr_expect(strstr(out, "the largest label is 900, so there are 901 classes; 898 of them have no "
                              "sample (the first: class 2)"),
                  "%s", out);
    }
}

/* A half-precision value that is not finite must be reported when it is read, and not later as a bad learning
 * rate. */
Test(train_data, non_finite_halves_are_reported_with_their_sample)
{
    static const struct {
        uint16_t bits;
        const char *what;
    } bad[] = {{0x7E00, "NaN"}, {0xFC01, "NaN"}, {0x7C00, "infinite"}, {0xFC00, "infinite"}};
    uint8_t bytes[NPY_HEADER_MAX + 2 * 64];
    size_t header = npy_header_make((char *)bytes, "<f2", "1, 8, 8");
    EXPECT(0, "mkdir m");
    for (int i = 0; i < 40; i++) {
        char name[32];
        memset(bytes + header, i, 128); /* both bytes of a value are i, at most 0x27, so it is finite */
        snprintf(name, sizeof name, "m/k%02d.npy", i);
        put(name, bytes, header + 128);
        snprintf(name, sizeof name, "m/k%02d.cls", i);
        put(name, i % 2 ? "1" : "0", 1);
    }
    EXPECT(0, "$P --variant train-naive " ON);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char words[128];
        memset(bytes + header, 0, 128);
        memcpy(bytes + header + 2 * 37, &bad[i].bits, 2);
        put("m/k23.npy", bytes, header + 128);
        snprintf(words, sizeof words, "bench: m/k23.npy: sample 'k23': its value number 37 of 64 is %s",
                 bad[i].what);
        expect_refusal(1, ON, words);
        expect_refusal(1, ON "--allow-nan", words);
    }
}
#endif

#ifdef _OPENMP

/* Trains on generated samples. The network must classify at least 90 % of the test samples correctly.
 * Sanitizers make training many times slower. With a sanitizer, the training set is therefore small, and the
 * accuracy is not checked. */
static void expect_learns(const char *options, unsigned samples, unsigned tests, unsigned epochs)
{
#ifdef FDSL_SANITIZED
    samples = 70, tests = 20, epochs = 1;
#endif
    EXPECT(0, "$P --variant train-omp %s --train-size %u --test-size %u --epochs %u --format csv", options,
           samples, tests, epochs);
#ifndef FDSL_SANITIZED
    cr_expect_geq(number(out, epochs, "test_acc"), 0.9, "%s", out);
#endif
}

/* cnn-fdsl has no normalisation layers. It must learn nevertheless, within two epochs. */
Test(train_data, the_residual_network_learns)
{
    expect_learns("--model cnn-fdsl --lr 0.002 --batch 16", 1500, 500, 2);
}

/* The class of a clip is a motion, which no single frame shows. */
Test(train_data, learns_clips)
{
    expect_learns("--data clips --model cnn3d", 2000, 400, 4);
}
#endif
