/* Tests the parts of scripts/compare/pretrain.py that need no PyTorch, and the figures of its rows.
 * tests/pretrain_test.py tests the other parts. The rows in tests/data/pretrain are invented. */
#include "figures.h"

#include "core/portable.h"
#include "data/random_draws.h"
#include "data/mixing.h"

TestSuite(pretrain, .init = open_folder, .fini = remove_folder, .timeout = 120);

#define ROWS     "tests/data/pretrain"
#define PRETRAIN "scripts/compare/pretrain.py "
/* Runs Python code with the modules of scripts/compare. */
#define PYTHON "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=scripts/compare python3 -c "

/* Each error in `refused` must be one line, and must be reported before PyTorch is imported. */
Test(pretrain, wrong_arguments_are_refused_before_pytorch_is_imported)
{
    shell(
        "mkdir -p $D/empty $D/bare/class-0 $D/few/a $D/few/b $D/named/a $D/named/b $D/deep/a/b $D/deep/b/b "
        "$D/shards && "
        "printf '\\211PNG\\r\\n\\032\\n\\0\\0\\0\\015IHDR\\0\\0\\0\\040\\0\\0\\0\\040' > $D/few/a/0.png && "
        "cp $D/few/a/0.png $D/few/b/1.png && cp $D/few/a/0.png $D/named/a && touch $D/named/b/x.png && "
        "touch $D/shards/a.tar && echo 'fdsl-index/1 --res=32 --classes=8 --out-res=16' > $D/shards/a.index");
    shell("mkdir -p $D/torch && echo 'raise SystemExit(99)' > $D/torch/__init__.py "
          "&& echo a,b > "
          "$D/other.csv && { head -n 1 " ROWS "/curve.csv; } > $D/curve.csv");
    static const struct {
        const char *options, *words;
    } refused[] = {
        {"--source folder", "--source folder needs --data DIR"},
        {"--source folder --data /nowhere", "--data /nowhere: no such folder; write one with --make-data"},
        {"--source folder --data $D/empty",
         "it has no class folders with images; write some with --make-data"},
        {"--source folder --data $D/bare", "it has no class folders with images"},
        {"--source shards --data $D/empty", "it has no tar files; write some with"},
        {"--source folder --data $D/few", "it has 2 class folders, but --classes is 1000; give --classes 2"},
        {"--order same --classes 2 --data $D/few",
         "its images have 32 x 32 pixels, but --res is 512; give --res 32"},
        {"--order same --classes 2 --data $D/few --images 9", "few has 2, and --order same uses all of them"},
        {"--order same --classes 2 --data $D/named", "--order same needs PNG files with the numbers 0 to N"},
        {"--order same --classes 2 --data $D/deep", "--order same needs PNG files with the numbers 0 to N"},
        {"--source shards --data $D/shards --res 32", "written with --classes 8, not 1000; give --classes 8"},
        {"--source shards --data $D/shards --classes 8", "written with --res 32, not 512; give --res 32"},
        {"--make-data $D/new", "--make-data is for --source folder or shards, not live"},
        {"--preset paper-100", "--preset paper-100: unknown; did you mean paper-1000?"},
        {"--batch 3", "--batch 3: MixUp and CutMix pair images; give an even number"},
        {"--batch 300 --images 299",
         "--images 299: fewer than the 300 images of one step (the global batch)"},
        {"--source bat --order same", "--order same is for --source live, omp and folder"},
        {"--source bat --order train", "--order train is for --source live and omp"},
        {"--order train --images 2147483648", "--images 2147483648: --order train needs fewer than 2^31"},
        {"--step-log $D/other.csv", "other.csv: its header is not that of steps/1; choose another file"},
        {"--order same", "--order same needs --data DIR or --images N"},
        {"--order same --images 1000000 --curve $D/new.csv", "--curve needs --evaluate"},
        {"--order same --data /nowhere", "--data /nowhere: no such folder; write one with --make-data"},
        {"--recipe pdp2026 --no-mixup", "--recipe pdp2026 has all parts of its script; drop --augment none"},
        {"--recipe deit --channels 1", "--recipe deit has images of 3 channels; drop --channels 1"},
        {"--recipe cvpr2023 --device cpu", "--amp fp16 needs a GPU; use --amp off"},
        {"--resume", "--resume and --checkpoint-steps need --checkpoint FILE"},
        {"--resume --checkpoint c",
         "--resume needs images that can begin at any step: --order train or same"},
        {"--res 128", "--out-res 224 is larger than --res 128"},
        {"--curve $D/new.csv", "--curve needs --evaluate"},
        {"--device cpu --source gbase", "--source gbase needs a GPU; on a CPU, use live or omp"},
        {"--out $D/other.csv", "other.csv: its header is not that of pretrain/1; choose another file"},
        {"--out $D/curve.csv", "curve.csv: its header is not that of pretrain/1; choose another file"},
        {"--out /dev/full", "/dev/full is a device, a pipe or a folder; name a regular file"},
        {"--data $D", "--data is for --source folder and shards, and for --order same, not for live"},
        {"--out /nowhere/rows.csv", "/nowhere/rows.csv cannot be written; create its folder"},
        {"--evaluate --curve " ROWS "/rows.csv", "rows.csv: its header is not that of pretrain-curve/1"},
    };
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        shell("PYTHONPATH=$D " PRETRAIN "%s", refused[i].options);
        expect_line(2, refused[i].words);
    }
    SHELL_PRINTS(2, "argument --batch: '0' is not a whole number of at least 1", PRETRAIN "--batch 0");
    shell(PRETRAIN "--seed 4294967296");
    expect(2, "argument --seed: '4294967296' is not a whole number from 0 to 4294967295");
    shell(PRETRAIN "--label-smoothing nan");
    expect(2, "argument --label-smoothing: 'nan' is not a number from 0 to 1");
    shell(PRETRAIN "--batch 255 --no-mixup --no-cutmix --source folder");
    expect_line(2, "--source folder needs --data DIR");
    shell("RANK=1 WORLD_SIZE=2 " PRETRAIN "--batch 3");
    cr_expect(status == 2 && out[0] == '\0', "a rank other than the first has printed: %s", out);
}

Test(pretrain, a_missing_package_is_named_with_its_remedy)
{
    shell("mkdir -p $D/torch && touch $D/torch/__init__.py && PYTHONPATH=$D python3 -S -E -c 'import sys; "
          "sys.path.insert(0, \"scripts/compare\"); sys.path.append(\"'$D'\"); import pretrain; "
          "sys.exit(pretrain.main([]))'");
    expect_line(4, "the Python package timm is not installed; to get it: pip install timm");
}

/* fdsl-bench is replaced by a script that writes two images as --prepare --store files does. No message names
 * the temporary folder. */
Test(pretrain, images_are_written_into_class_folders)
{
    shell("printf '%%s\\n' '#!/bin/sh' 'echo writing $2 | tee /dev/stderr; mkdir -p \"$2/000\" && cd "
          "\"$2/000\" "
          "&& touch ../synth.index' 'echo 1 > 000000.cls; "
          "echo 0 > 000001.cls; touch 000000.png 000001.png' > $D/bench && chmod +x $D/bench");
    SHELL(0, "cd $D && $OLDPWD/" PRETRAIN
             "--source folder --make-data data --images 2 --classes 2 --bench ./bench "
             "&& find data -type f | sort | tr '\\n' ' '");
    cr_expect_str_eq(out, "writing data\ndata: 2 images of 2 classes\n"
                          "data/class-000000/00000001.png data/class-000001/00000000.png ");
    shell(PRETRAIN "--source folder --make-data $D/data --images 2 --classes 2 --bench $D/bench");
    expect_line(2, "data: it exists; remove it, or choose another folder");
    shell(PRETRAIN "--source folder --make-data $D/b --images 2 --classes 2 --bench /nowhere");
    expect_line(2, "/nowhere: No such file or directory; build it, or name it with --bench");
    shell(PRETRAIN "--source folder --make-data $D/b --images 2 --classes 2 --bench false");
    expect_line(1, "fdsl-bench --prepare failed; see above");
    shell("printf '%%s\\n' '#!/bin/sh' 'mkdir $2; echo $2 is full >&2; exit 1' > $D/bench; " PRETRAIN
          "--source folder --make-data $D/new --images 2 --classes 2 --bench $D/bench; ls $D");
    cr_expect(says("/new is full\n") && says("see above\nbench\ndata\n") && !says(".part"), "%s", out);
}

/* The share is the speed relative to that of the newest row of `constant` with the same settings. */
Test(pretrain, share_of_constant_needs_the_same_settings)
{
    shell(
        PYTHON
        "'\n"
        "import pretrain_rows as r\n"
        "rows = r.read(\"" ROWS "/rows.csv\", r.COLUMNS)\n"
        "row = [row for row in rows if row[\"source\"] == \"live\"][0]\n"
        "limit = [row for row in rows if row[\"source\"] == \"constant\"][0]\n"
        "newer = {**limit, \"time_utc\": \"2026-02-01T00:00:00Z\", \"images_per_s\": \"17640\"}\n"
        "print([r.constant_share(row, rows), r.constant_share(row, rows + [newer]), r.constant_share(limit, "
        "[])])\n"
        "for column in r.SAME: assert r.constant_share({**row, column: \"other\"}, rows) is None, column\n'");
    expect_line(0, "[0.97, 0.485, 1.0]");
}

/* Options that set only the length of a run or the place of its output are not settings. */
Test(pretrain, settings_are_the_options_that_are_not_default)
{
    shell(PYTHON "'import pretrain as p\n"
                 "for words in (\"\", \"--lr 0.001 --steps 9 --held-out 5 --images 900 --seed 2\", "
                 "\"--channels-last --schedule-steps 12500 --lr-warmup 1000 --drop-path 0 --order same\"): "
                 "print([p.read_arguments(words.split()).settings])'");
    cr_expect_str_eq(out, "['']\n['']\n['--order same --channels-last --drop-path 0 --lr-warmup 1000 "
                          "--schedule-steps 12500']\n");
}

/* Rows are appended after one header, also by several processes at the same time. A file with another header
 * is not changed. */
Test(pretrain, rows_are_appended_under_a_lock)
{
    shell("for i in 1 2 3 4 5 6 7 8; do " PYTHON
          "'import pretrain_rows as r; r.append(\"'$D'/rows.csv\", [{\"schema\": r.SCHEMA, \"model\": "
          "\"a,b\"}] * 2, r.COLUMNS)' & "
          "done; wait; sort $D/rows.csv | uniq -c | sed 's/^ *//' | cut -c 1-25");
    expect(0, "16 pretrain/1,,,,,,\"a,b\",");
    EXPECT_OUT("1 schema,time_utc,host,jo");
    shell("echo a,b > $D/other.csv; " PYTHON
          "'import pretrain_rows as r; r.append(\"'$D'/other.csv\", [], r.COLUMNS)' 2>/dev/null; "
          "cat $D/other.csv");
    cr_expect_str_eq(out, "a,b\n");
}

Test(pretrain, throughput_is_drawn_with_published_points)
{
    SHELL(0, "cp -r " ROWS " $D/results && " SELECT "pretraining_tiny pretraining_base >/dev/null && cat "
             "$D/work/pretraining_tiny.vars $D/work/pretraining_tiny.dat $D/work/pretraining_base.dat");
    EXPECT_OUT("series = 6", "generated: fused", "loaded from PNG files", "loaded (LOAD)");
    cr_expect(says("4\t7496.89") && says("4\t3802.06"), "published points: %s", out);
    EXPECT_OUT("MixUp", "Published points were measured on other GPUs");
    /* A row of another batch is on no line. Repeated runs of one file and revision are a median with
     * whiskers, and the caption says so where the constant batch, the upper bound, is slower. */
    shell("cd $D/results/pretrain && { head -n 1 rows.csv; grep ',deit_tiny.*,live,.*X1,1,' rows.csv | sed "
          "'s/,256,/,128,/; "
          "s/8555.4/1111/; s/2026-01/2026-02/'; } > a.csv && cat rows.csv > b.csv && grep "
          "',deit_tiny.*,live,.*X1,1,' rows.csv | "
          "sed 's/8555.4/9555.4/; s/2026-01/2026-02/' >> b.csv && rm rows.csv");
    shell(SELECT "pretraining_tiny >/dev/null && cat $D/work/pretraining_tiny.dat; sed \"s/', '/ /g\" "
                 "$D/work/pretraining_tiny.vars");
    cr_expect(status == 0 && !says("1111") && says("\n1\t9055.4\t8555.4\t9555.4\n"), "%s", out);
    EXPECT_OUT("is slower than ''generated: fused'' on 1 GPU: equal runs differ by up to 12 %.",
               "y_high = 34444.8\n");
    /* On two GPUs, both runs of fused are faster; the spread on one GPU says nothing about two. */
    shell("(cd $D/results/pretrain && grep ',deit_tiny.*,live,.*X1,2,' b.csv | awk -F, -v OFS=, '{ $15 = "
          "18000; "
          "print; $15 = 18100; print }' > two && sed -i '/,deit_tiny.*,live,.*X1,2,/d' b.csv && cat two >> "
          "b.csv) && " SELECT
          "pretraining_tiny >/dev/null && sed \"s/', '/ /g\" $D/work/pretraining_tiny.vars");
    EXPECT_OUT(
        "on 1 GPU: equal runs differ by up to 12 %. It is also slower than ''generated: fused'' on 2 GPUs: "
        "every run of ''generated: fused'' was faster (runs: 2; of the constant batch: 1), and the cause is "
        "unknown.");
    shell("sed -i 's/^pretrain.1/pretrain\\/9/' $D/results/pretrain/a.csv && " SELECT "pretraining_tiny");
    expect_line(2, "a.csv, line 2: unknown schema 'pretrain/9'");
}

/* The figure shows the runs that have the same settings as the run with the most images. Case 1: two runs
 * have the same settings. Case 2: the run with the most images has a number of classes that no other run has,
 * so the figure has one line. Case 3: the two runs have different options, so the figure has one line. */
Test(pretrain, the_longest_run_is_drawn_by_source)
{
    /* case 1 */
    SHELL(0, "cp -r " ROWS " $D/results && " SELECT "pretraining_accuracy pretraining_loss >/dev/null && "
             "cat $D/work/pretraining_accuracy.* $D/work/pretraining_loss.dat");
    EXPECT_OUT("series = 2", "100\t17.69", "100\t4.792", "8,000 images/s");
    /* case 2 */
    SHELL(0,
          "cd $D/results/pretrain && sed -n '1p; 2s/,1000,0,100000,/,999,0,99000000,/p' curve.csv >long.csv "
          "&& cd - && " SELECT "pretraining_accuracy >/dev/null && cat $D/work/pretraining_accuracy.*");
    EXPECT_OUT("series = 1", "99000\t17.69");
    /* case 3 */
    shell("cd $D/results/pretrain && rm long.csv && sed -i '/,folder,/s/,yes,,/,yes,--lr 0.1,/' curve.csv && "
          "cd "
          "- && " SELECT "pretraining_accuracy >/dev/null && cat $D/work/pretraining_accuracy.*");
    cr_expect(status == 0 && says("series = 1"), "curves of other settings are drawn together: %s", out);
}

/* The figure leaves out rows of another model and rows of a CPU. */
Test(pretrain, rows_that_a_figure_leaves_out_are_reported)
{
    SHELL(0, "mkdir $D/results/pretrain && cd " ROWS
             " && { head -n 1 rows.csv; sed -n '2,3s/deit_tiny/vit_small/p; "
             "4s/Made-up Accelerator X1/cpu/p' rows.csv; } > $D/results/pretrain/rows.csv && cd - && " FIGURES
             "--reference $D/reference pretraining_tiny");
    EXPECT_OUT("skipped pretraining_tiny: 3 of your 3 rows of pretrain left out: they are of cpu, "
               "vit_small_patch16_224, but this figure shows deit_tiny_patch16_224 on GPUs; to measure");
    SHELL(0, "sed -n '5p' " ROWS "/rows.csv >> $D/results/pretrain/rows.csv && " FIGURES "pretraining_tiny");
    EXPECT_OUT("drawn   ", "(3 of your 4 rows of pretrain left out: ");
}

Test(pretrain, rows_in_the_wrong_folder_are_refused_with_the_right_one)
{
    shell("cp " ROWS "/curve.csv $D/results && " FIGURES "batch");
    expect_line(
        2, "curve.csv: rows of scripts/compare/pretrain.py must be in a subfolder pretrain of --results; "
           "move this file to ");
    EXPECT_OUT("/results/pretrain\n");
    SHELL(2, "mkdir $D/results/pretrain && mv $D/results/curve.csv $D/results/pretrain && " FIGURES
             "--results $D/results/pretrain batch");
    EXPECT_OUT("; give --results ", "/results\n");
}

Test(pretrain, without_rows_the_command_is_printed)
{
    SHELL(0, SELECT "--reference $D/reference pretraining_tiny pretraining_base pretraining_accuracy");
    EXPECT_OUT("skipped pretraining_tiny: no data; to measure it: scripts/compare/pretrain.py --model "
               "deit_tiny");
    EXPECT_OUT("skipped pretraining_accuracy: no data; to measure it: ", "--evaluate");
}

/* The Python code must give the same order of samples as the workload train. Tests small and odd numbers of
 * samples, and a seed above 2^32. */
Test(pretrain, the_order_of_samples_is_that_of_train)
{
    static const struct {
        uint64_t seed;
        uint32_t epoch, count;
    } cases[] = {{0, 0, 1}, {0, 1, 7}, {5, 0, 16}, {UINT64_C(77777777777), 3, 1000}, {0, 0, 1000000}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        shell(PYTHON "'import pretrain_order as p\n"
                     "order = p.Order(%llu, %u, %u)\n"
                     "print(*(order.at(i) for i in range(min(50, order.count))))'",
              (unsigned long long)cases[i].seed, cases[i].epoch, cases[i].count);
        const struct draw_order order = draw_order(cases[i].seed, cases[i].epoch, cases[i].count);
        char expected[1024], *end = expected;
        for (uint32_t j = 0; j < cases[i].count && j < 50; j++)
            end += snprintf(end, 16, "%s%u", j ? " " : "", draw_order_at(&order, j));
        expect_line(0, expected);
    }
}

/* The Python code must draw the same methods, shares and rectangles as the workload train, with both methods
 * and with each method alone. */
Test(pretrain, samples_are_mixed_as_by_train)
{
    static const struct mixing ways[] = {{0.8, 1}, {0.2, 0}, {0, 3}};
    const struct shape shape = {.channels = 3, .depth = 1, .height = 24, .width = 31};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        shell(PYTHON "'import pretrain_order as p, struct\n"
                     "for step in range(40): share, box = p.mix_of(9, 2, step, 24, 31, %g, %g); "
                     "print(\"%%.9g\" %% struct.unpack(\"f\", struct.pack(\"f\", share)), *(box[0], box[2], "
                     "box[1], box[3]) if box else (\"-\",))' | tr '\\n' ';'",
              ways[i].mixup, ways[i].cutmix);
        char expected[4096], *end = expected;
        for (uint32_t step = 0; step < 40; step++) {
            const struct mix mix = mix_draw(&ways[i], 9, 2, step, &shape);
            end += snprintf(end, 24, "%.9g", mix.share);
            end += mix.cut ? snprintf(end, 64, " %u %u %u %u;", mix.top, mix.left, mix.bottom, mix.right)
                           : snprintf(end, 8, " -;");
        }
        cr_expect_str_eq(out, expected);
    }
}

#define COMPARE                                                                                             \
    PYTHON "'import curves as c; rows = lambda factor, rate=1: {s: (factor * (3 if s <= 90 else 2), rate, " \
           "8) for s in range(10, 101, 10)}; sys = __import__(\"sys\")\n"

/* Only the steps that both programs have reached are compared. There is one row per 10 steps, so the last
 * tenth of 100 steps is one row. */
Test(pretrain, losses_are_compared_over_the_last_tenth_of_the_common_steps)
{
    SHELL(0, COMPARE "longer = {**rows(1.0), 110: (99.0, 1, 8)}\n"
                     "sys.exit(not c.compare(longer, rows(0.99), 2, None))'");
    EXPECT_OUT("steps: 110 in fdsl-bench, 100 in PyTorch, 100 in both\n");
    EXPECT_OUT("last tenth, 1 rows from step 100 on: mean loss 2.00000 in fdsl-bench, 1.98000 in PyTorch, "
               "ratio 1.01010\nwithin the bounds: 2 %\n");
    static const char *const outside[] = {"rows(1.0), rows(0.98), 2, None", "rows(1.0), rows(0.99), 2, 1",
                                          "rows(float(\"nan\")), rows(1.0), 2, None",
                                          "rows(1.0), {**rows(1.0), 10: (float(\"nan\"), 1, 8)}, 2, 2"};
    for (size_t i = 0; i < COUNT_OF(outside); i++) {
        shell(COMPARE "sys.exit(not c.compare(%s))'", outside[i]);
        cr_expect(status == 1 && says("OUTSIDE THE BOUNDS"), "%s: %s", outside[i], out);
    }
    SHELL(1, COMPARE "c.compare(rows(1), rows(1, 1.1), 2, None)'");
    EXPECT_OUT("the learning rates differ in step 10");
    shell("scripts/compare/curves.py $D --cpu");
    expect_line(2, "File exists; name a new folder");
    shell("FDSL_LIBRARY=$D/none.so scripts/compare/curves.py $D/new --cpu --bench /bin/true");
    expect_line(4, "none.so is missing, which pretrain.py needs; run `make lib`, or set FDSL_LIBRARY");
    shell("test ! -e $D/new");
    cr_expect_eq(status, 0, "a failed check left the folder");
    shell("scripts/compare/curves.py $D/new --cpu --steps 9 --lr-warmup 9 && ls $D");
    expect_line(2, "--steps 9: give at least 2, and more than --lr-warmup");
}
