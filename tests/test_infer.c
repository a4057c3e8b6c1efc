/* Tests the workload `infer` on the command line with files of tensors, and its predictions. */
#include <math.h>
#include <stdint.h>

#include "cells.h"
#include "core/portable.h"
#include "train_cli.h"

#if defined HAVE_XXHASH && defined HAVE_JANSSON

TestSuite(infer, .init = shell_set_up, .fini = shell_tear_down, .timeout = 300);

#define RUN   "$P --variant infer-naive --loops 10 --batch 10 --format csv "
#define TRAIN "$P " SMALL "--epochs 3 --checkpoint k --export a.safetensors >/dev/null"
#define DATA  "--data digits --test-size 50 "

/* Python that reads the predictions in p.csv, as `rows`. */
#define PREDICTIONS "python3 -c 'import csv; rows = list(csv.DictReader(open(\"p.csv\"))); "

/* A file of --export gives the same row and the same predictions as the checkpoint. */
Test(infer, reads_exported_parameters)
{
    EXPECT(0, TRAIN);
    EXPECT(0, RUN "--checkpoint k --predictions p.csv --top 10");
    const double accuracy = number(out, 1, "test_acc"), loss = number(out, 1, "test_loss");
    EXPECT(0, RUN DATA "--checkpoint a.safetensors --predictions q.csv --top 10 --verify");
    cr_expect(number(out, 1, "test_acc") == accuracy && number(out, 1, "test_loss") == loss);
    cr_expect(number(out, 1, "wrong") == 0 && number(out, 1, "test_samples") == 50);
    cr_expect_str_eq(value(out, 1, "epoch"), "");
    cr_expect_str_eq(value(out, 1, "model"), "logreg");
    EXPECT(0, "cmp p.csv q.csv");
    /* A folder whose name looks like an option does not change the model. */
    EXPECT(0, "$P --prepare 'a model=cnn' --from digits --samples 60 && $P --variant train-naive --data 'a "
              "model=cnn' --model logreg --batch 8 --epochs 1 --export b.safetensors >/dev/null && " RUN
              "--data 'a model=cnn' --checkpoint b.safetensors");
    /* the probabilities sum to 1, are sorted, and have the accuracy and the loss of the row */
    EXPECT(0, PREDICTIONS
           "p = [[float(r[\"probability_%%d\" %% k]) for k in range(1, 11)] for r in rows]; "
           "assert len(rows) == 50 and all(abs(sum(q) - 1) < 1e-7 and q == sorted(q)[::-1] for q in p); "
           "assert all(sorted(int(r[\"class_%%d\" %% k]) for k in range(1, 11)) == list(range(10)) for r in "
           "rows); "
           "assert [r[\"key\"] for r in rows] == [str(i) for i in range(50)]; import math; "
           "print(sum(r[\"label\"] == r[\"class_1\"] for r in rows) / 50, -sum(math.log(q[[r[\"class_%%d\" "
           "%% k] "
           "for k in range(1, 11)].index(r[\"label\"])]) for r, q in zip(rows, p)) / 50)'");
    double share, mean;
    cr_assert_eq(sscanf(out, "%lf %lf", &share, &mean), 2);
    cr_expect_float_eq(share, accuracy, 1e-6);
    cr_expect_float_eq(mean, loss, 1e-6 * loss + 1e-7);
    EXPECT(0, RUN DATA "--checkpoint a.safetensors --predictions q.csv");
    EXPECT_EXACTLY(0, "12 5\n",
                   "head -1 q.csv | tr , '\\n' | wc -l | tr '\\n' ' '; cut -d, -f1-3 p.csv >x; "
                   "cut -d, -f1-3 q.csv | cmp - x && head -1 q.csv | grep -o class | wc -l");
}

/* Each prediction has the key of its sample: in shards, in class folders, in files of records. */
Test(infer, predictions_have_the_keys_of_the_samples)
{
    EXPECT(0, TRAIN);
    EXPECT(0, "$P --prepare d --from digits --samples 100");
    EXPECT_PRINTS(0, "100 predictions written to p.csv",
                  RUN "--test-data d --checkpoint a.safetensors --predictions p.csv");
    EXPECT(0,
           "cut -d, -f1,2 p.csv | tail -n +2 > keys; cut -d, -f1,2 d/samples.csv | tail -n +2 | cmp - keys");
    EXPECT_PRINTS(0, "only the held-out part of d is tested (10 samples)",
                  RUN "--data d --checkpoint a.safetensors --predictions p.csv");
    EXPECT(0, PREDICTIONS "own = {r[\"key\"]: r[\"label\"] for r in csv.DictReader(open(\"d/samples.csv\"), "
                          "fieldnames=[\"key\", \"label\"])}; "
                          "assert len(rows) == 10 and all(own[r[\"key\"]] == r[\"label\"] for r in rows)'");
    EXPECT(0, "$P --prepare f --from dataset --source d --store imagefolder && rm f/*.csv f/*.index f/*.txt; "
              "mv f/3 'f/3,\"x\"' 2>/dev/null; ls f");
    EXPECT(0, RUN "--test-data f --checkpoint a.safetensors --predictions p.csv");
    EXPECT(0,
           PREDICTIONS "import os; assert len(rows) == 100 and len({r[\"key\"] for r in rows}) == 100; "
                       "folders = sorted(next(os.walk(\"f\"))[1]); "
                       "assert all(r[\"key\"].split(\"/\")[0] == folders[int(r[\"label\"])] for r in rows)'");
}

/* A broken sample that is skipped has no row, and the others keep their keys. */
Test(infer, skipped_samples_have_no_prediction)
{
    EXPECT(0, TRAIN);
    EXPECT(0, "$P --prepare d --from digits --samples 60 --store files && "
              "echo no > d/not-imagefolder/000/000007.png && rm d/*.index");
    EXPECT_PRINTS(0, "59 predictions written",
                  RUN "--test-data d --on-error skip --checkpoint a.safetensors --predictions p.csv");
    EXPECT(0, "cut -d, -f1 p.csv | grep -c 000007; tail -n +2 p.csv | cut -d, -f1,2 | sed 's|.*/||' > keys; "
              "cut -d, -f1,2 d/samples.csv | tail -n +2 | grep -v ^000007 | cmp - keys");
}

/* Files of other programs need --model, --mean and --std. */
Test(infer, reads_the_files_of_other_programs)
{
#define TIMM "--checkpoint %s/tests/data/checkpoints/timm.pth.tar "
    EXPECT_PRINTS(2, "timm.pth.tar: it does not name its model; add --model NAME", RUN DATA TIMM, root);
    EXPECT_PRINTS(2, "it does not say how its samples are normalised; add --mean and --std",
                  RUN DATA TIMM "--model vit-micro", root);
    EXPECT_PRINTS(0, "32 of 32 tensors taken from",
                  RUN DATA TIMM "--model vit-micro --mean 0.5 --std 0.25 --verify", root);
    cr_expect(number(out, 1, "wrong") == 0 && number(out, 1, "mean") == 0.5);
    EXPECT_PRINTS(0, "positions interpolated from 7x7 to 5x5",
                  RUN "--data synth --res 20 --test-size 20 " TIMM "--model vit-micro --mean 0.5 --std 1",
                  root);
    EXPECT_PRINTS(2, "it lacks head.bias, the last layer of vit-micro",
                  "sed 's/head.bias/heed.bias/' %s/tests/data/checkpoints/timm.pth.tar > x.pt; " RUN DATA
                  "--checkpoint x.pt --model vit-micro --mean 0.5 --std 0.25",
                  root);
}

Test(infer, rejects_unsuitable_options_and_files)
{
    EXPECT(0, TRAIN);
    EXPECT(0, "echo mine > mine.csv && cp a.safetensors n.safetensors && printf '\\377\\377\\377\\177' | "
              "dd of=n.safetensors bs=1 conv=notrunc status=none seek=$(($(stat -c %%s n.safetensors) - 4))");
    static const struct {
        const char *options, *words;
    } bad[] = {
        {"--checkpoint a.safetensors", "does not say with which samples to test; add --test-data, or --data"},
        {DATA "--checkpoint b.safetensors", "--checkpoint b.safetensors: No such file"},
        {DATA "--checkpoint a.safetensors --model cnn", "its model is logreg, not cnn; drop --model"},
        {DATA "--checkpoint a.safetensors --mean 0.5 --std 1", "says how its samples are normalised"},
        {DATA "--checkpoint a.safetensors --mean 0.5", "--mean needs --std; add that"},
        {"--checkpoint k --model logreg", "--model is for files of tensors, such as .safetensors"},
        {"--checkpoint k --mean 0.5 --std 1", "--mean is for files of tensors"},
        {"--checkpoint k --top 3", "--top needs --predictions FILE"},
        {"--checkpoint k --top 11 --predictions p", "--top 11: the network has 10 classes"},
        {"--checkpoint k --predictions mine.csv", "--predictions: mine.csv exists and is not a file of"},
        {"--checkpoint k --predictions none/p", "--predictions: "},
        {DATA "--checkpoint n.safetensors", "its fc1.bias has values that are NaN or infinite"},
        {"--data clips --checkpoint a.safetensors", "logreg"},
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        run("%s%s 2>&1 >/dev/null | grep -v 'tensors taken'", RUN, bad[i].options);
        cr_expect(strstr(out, bad[i].words), "%s: %s", bad[i].options, out);
    }
    EXPECT(2, "$P --variant infer-naive,infer-naive --checkpoint k --predictions p");
    EXPECT(0, "cat mine.csv");
    cr_expect_str_eq(out, "mine\n");
    /* - is stdout, and the rows go to stderr. */
    EXPECT(0, RUN "--checkpoint k --predictions p.csv");
    EXPECT(0, RUN "--checkpoint k --predictions - 2>rows >q.csv && cmp p.csv q.csv && ! test -e ./- && grep "
                  "infer-naive, rows");
    EXPECT_PRINTS(1, "stdout could not be written", RUN "--checkpoint k --predictions - >/dev/full");
    EXPECT_PRINTS(2, "--out: it does not write to stdout; name a file, or ./-", RUN "--checkpoint k --out -");
    /* An earlier file of predictions is replaced. */
    EXPECT(0, RUN "--checkpoint k --predictions p.csv && " RUN "--checkpoint k --predictions p.csv");
}

#endif
