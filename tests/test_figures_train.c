/* Tests which rows the figures of training use. */
#include "figures.h"

#include "core/variant.h"

TestSuite(figures_train, .init = open_folder, .fini = remove_folder, .timeout = 120);

/* Only the job with the most lines is drawn. Each variant has one line, with the newest row of each epoch.
 * Rows of inference are ignored. */
Test(figures_train, figures_of_learning_draw_one_job)
{
    shell("cp " FIXTURES "/train.csv $D/results && cd $D/results && head -n 1 train.csv > other.csv && "
          "sed -n 2p train.csv | sed 's/,lenet,64,/,lenet,32,/; s/1\\.44690[0-9]*/7.5/' >> other.csv");
    SHELL(0, SELECT "learning_loss >/dev/null && cat $D/work/learning_loss.vars $D/work/learning_loss.dat");
    EXPECT_OUT("series = 2", "train-naive", "torch-cpu", "batch 64, adam at 0.001");
    cr_expect(!says("\t7.5"), "%s", out);
    /* Runs on one constant batch are not drawn. */
    shell(
        "cd $D/results && for feed in stored constant; do for variant in train-omp train-cuda train-graph; "
        "do "
        "awk -F, -v OFS=, -v feed=$feed -v variant=$variant 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; "
        "print; next } $at[\"variant\"] == \"train-naive\" { $at[\"variant\"] = variant; "
        "$at[\"feed\"] = feed; print }' train.csv "
        "> $feed-$variant.csv; done; done; rm stored-train-cuda.csv stored-train-graph.csv");
    shell(SELECT "learning_loss >/dev/null && cat $D/work/learning_loss.vars");
    cr_expect(says("series = 3") && says("train-omp") && says("torch-cpu") && !says("train-graph"), "%s",
              out);
    SHELL(2, "sed -i 's|^train/13|train/14|' $D/results/other.csv && " SELECT "learning_loss");
    EXPECT_OUT("other.csv, line 2: unknown schema 'train/14'");
}

/* The figure has one line per run in a file of --log. If a resumed run repeats steps, the later rows count.
 * Other figures ignore files of --log. */
Test(figures_train, steps_have_a_line_per_run)
{
    SHELL(0, "cp " FIXTURES "/steps.csv $D/results && " SELECT "learning_steps >/dev/null && "
             "cat $D/work/learning_steps.vars $D/work/learning_steps.dat");
    EXPECT_OUT("series = 2", "'train-cuda'", "'torch-cuda'");
    shell("grep -c '^7680\t' $D/work/learning_steps.dat");
    cr_expect_str_eq(out, "2\n");
    shell("sed 's/,0,lenet,/,1,lenet,/' $D/results/steps.csv > $D/results/other.csv && " SELECT
          "learning_steps >/dev/null && cat $D/work/learning_steps.vars");
    EXPECT_OUT("series = 4", "'train-cuda, seed 1, other'");
    shell(SELECT "learning_loss --reference $D/reference");
    EXPECT_OUT("skipped learning_loss: no data");
    SHELL(2, "sed -i '2s/,640,/,many,/' $D/results/steps.csv && " SELECT "learning_steps");
    EXPECT_OUT("steps.csv, line 2: samples_seen is 'many', not a number");
}

/* A row with a repeated step belongs to a new training run if its loss differs from the earlier loss of this
 * step. */
Test(figures_train, two_runs_in_one_file_have_two_lines)
{
    shell("cd $D/results && cp $OLDPWD/" FIXTURES
          "/steps.csv log.csv && awk -F, -v OFS=, 'NR == 1 { for (i = 1; "
          "i <= NF; i++) at[$i] = i } /train-cuda/ { $at[\"loss\"] *= 1.5; print }' log.csv > more && "
          "cat more >> log.csv && sed 's/X1,1,/X1,2,/; /torch-cuda/d' log.csv > ranks.csv && rm more");
    SHELL(0, SELECT "learning_steps >/dev/null && cat $D/work/learning_steps.vars");
    EXPECT_OUT("series = 5", "'torch-cuda'", "'train-cuda, 1 rank, log, run 1'",
               "'train-cuda, 1 rank, log, run 2'", "'train-cuda, 2 ranks, ranks, run 2'");
}

/* The caption names the options of the training run that is drawn. The note names those that other rows have.
 */
Test(figures_train, captions_and_notes_name_the_options)
{
    shell("cd $D/results && awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; print; next } "
          "$at[\"variant\"] == \"train-naive\" { print; $at[\"mixup\"] = 0.8; $at[\"clip_norm\"] = 2; "
          "$at[\"loss\"] = \"bce\"; sub(\"2026\", \"2027\", $at[\"time_utc\"]); print }' $OLDPWD/" FIXTURES
          "/train.csv > train.csv");
    SHELL(0, SELECT "learning_loss && cat $D/work/learning_loss.vars");
    EXPECT_OUT("adam at 0.001, loss bce, clip-norm 2, mixup 0.8",
               "'training loss (binary cross-entropy, mean over the epoch)'");
    shell(FIGURES "learning_loss");
    EXPECT_OUT("2 of your rows are on no line, because other parameters differ: train-naive, loss "
               "cross-entropy, clip_norm none, mixup 0)");
    /* The message does not name rows that were replaced by newer rows of the same training run. */
    shell("cd $D/results && sed '1d; s/2027/2028/' train.csv | grep 2028 >> train.csv; grep -v ',2026' "
          "train.csv > new; mv new train.csv");
    shell(FIGURES "learning_loss");
    cr_expect(!says("on no line"), "%s", out);
}

/* A module in place of the package tensorboardX prints its calls. */
Test(figures_train, rows_of_steps_are_written_for_tensorboard)
{
    shell("mkdir $D/with $D/none && cd $D/with && printf 'class SummaryWriter:\n"
          "    def __init__(self, folder): print(\"folder\", folder)\n"
          "    def add_scalar(self, name, value, step): print(name, value, step)\n"
          "    def flush(self): pass\n"
          "    def close(self): pass\n' > tensorboardX.py && mkdir -p torch && echo 'raise ImportError' > "
          "torch/__init__.py && cp -r torch $D/none && cp -r torch $D/none/tensorboardX && cp -r torch "
          "$D/none/wandb");
    SHELL(0,
          "PYTHONPATH=$D/with scripts/compare/log_to_boards.py " FIXTURES "/steps.csv --tensorboard boards");
    EXPECT_OUT("folder boards/lenet-torch-cuda-Made-up_Accelerator_X1-1-0\n", "lr 0.001 120\n");
    EXPECT_OUT("steps.csv: 24 rows of 2 runs; 3 repeated rows left out\n");
    SHELL(2, "mkdir -p $D/used/lenet-torch-cuda-Made-up_Accelerator_X1-1-0/x && PYTHONPATH=$D/with "
             "scripts/compare/log_to_boards.py " FIXTURES "/steps.csv --tensorboard $D/used");
    EXPECT_OUT("X1-1-0 has files of an earlier call; remove it, or name another folder");
    /* A resumed run repeats a row; a second run has another loss. */
    shell("cd $D && cat $OLDPWD/" FIXTURES
          "/steps.csv >steps.csv && sed -n 3p steps.csv >row && cat row >>steps.csv");
    SHELL(0, "PYTHONPATH=$D/with scripts/compare/log_to_boards.py $D/steps.csv --tensorboard boards");
    EXPECT_OUT("steps.csv: 24 rows of 2 runs; 4 repeated rows left out\n");
    shell("sed 's/,1.59174,/,1.6,/' $D/row >>$D/steps.csv");
    SHELL(1, "PYTHONPATH=$D/with scripts/compare/log_to_boards.py $D/steps.csv --tensorboard boards");
    EXPECT_OUT("train-cuda Made-up Accelerator X1 1 0 have different losses in step 20; use one file");
    SHELL(4,
          "PYTHONPATH=$D/none scripts/compare/log_to_boards.py " FIXTURES "/steps.csv --tensorboard boards");
    EXPECT_OUT("neither is installed: torch and tensorboard, or tensorboardX");
    SHELL(4, "PYTHONPATH=$D/none scripts/compare/log_to_boards.py " FIXTURES "/steps.csv --wandb project");
    EXPECT_OUT("--wandb needs the Python package wandb, which is not installed");
    SHELL(1,
          "PYTHONPATH=$D/with scripts/compare/log_to_boards.py " FIXTURES "/train.csv --tensorboard boards");
    EXPECT_OUT("train.csv: no column 'step'; name a file of --log");
}

/* A run on two ranks has the same job as a run on one rank with the whole batch, and a line of its own. The
 * command of the run on two ranks has the batch and the threads of one rank. */
Test(figures_train, training_on_several_ranks_has_its_own_line_and_command)
{
    shell("cp " FIXTURES "/train.csv $D/results && cd $D/results && "
          "awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; print; next } "
          "$at[\"variant\"] == \"train-naive\" { $at[\"variant\"] = \"train-omp\"; $at[\"ranks\"] = 2; "
          "$at[\"rank\"] = \"all\"; $at[\"scaling\"] = \"weak\"; $at[\"threads\"] = 6; $at[\"sync\"] = "
          "\"auto\"; $at[\"lr_scale\"] = \"linear\"; print }' train.csv > ranks.csv");
    shell(SELECT "learning_loss >/dev/null && cat $D/work/learning_loss.vars");
    EXPECT_OUT("series = 3", "'train-omp, 2 ranks'", "'train-naive'");
    shell(REPORT "--reference $D/reference && grep -o '<pre>mpirun[^<]*' $D/report.html");
    EXPECT_OUT("mpirun --bind-to none -n 2 ./fdsl-bench --variant train-omp", "--batch 32 ",
               "--lr-scale linear --scaling weak --threads 3\n");
}

/* With weak scaling, the global batch grows with the number of ranks, and the batch per rank is the same. */
Test(figures_train, throughput_over_ranks_has_a_line_per_variant)
{
    shell("cp " FIXTURES "/train.csv $D/results && cd $D/results && for ranks in 2 4; do "
          "awk -F, -v OFS=, -v ranks=$ranks 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; print; next } "
          "$at[\"variant\"] == \"train-naive\" { $at[\"ranks\"] = ranks; $at[\"rank\"] = \"all\"; "
          "$at[\"scaling\"] = \"weak\"; $at[\"batch\"] *= ranks; $at[\"threads\"] *= ranks; "
          "$at[\"items_per_s\"] *= 0.75 * ranks; $at[\"sync\"] = \"auto\"; $at[\"exchange\"] = \"mpi\"; "
          "print }' "
          "train.csv > ranks_$ranks.csv; done; cat ranks_2.csv > ranks.csv; sed 1d ranks_4.csv >> ranks.csv; "
          "sed 1d train.csv >> ranks.csv; rm train.csv ranks_*.csv");
    SHELL(0, SELECT "training_ranks && cat $D/work/training_ranks.vars");
    EXPECT_OUT("series = 1", "'exchange: mpi'", "'100.0 %', '75.0 %', '75.0 %'", "weak scaling");
    /* Without the rows of one rank, there is no efficiency. */
    shell("cd $D/results && awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } NR == 1 || "
          "$at[\"ranks\"] > 1' ranks.csv > several.csv && rm ranks.csv");
    SHELL(0, SELECT "training_ranks && cat $D/work/training_ranks.vars");
    EXPECT_OUT("series = 1", "cells = 0");
}

/* Every variant of training has a line, and so has an unknown variant. */
Test(figures_train, every_variant_has_a_line)
{
    for (size_t i = 0; i < variant_count; i++)
        if (strcmp(variant_table[i].workload, "train") == 0)
            shell("sed -n '1,3p' " FIXTURES "/train.csv | sed 's/train-naive/%s/' > $D/results/%s.csv",
                  variant_table[i].name, variant_table[i].name);
    shell("sed -n '1,3p' " FIXTURES "/train.csv | sed 's/train-naive/train-unheard-of/' > $D/results/a.csv");
    SHELL(0, SELECT "learning_loss learning_time >/dev/null && cat $D/work/learning_loss.vars");
    for (size_t i = 0; i < variant_count; i++)
        if (strcmp(variant_table[i].workload, "train") == 0)
            cr_expect(says(variant_table[i].name), "%s: %s", variant_table[i].name, out);
    EXPECT_OUT("train-unheard-of");
}

/* The figure has one line per training-set size and initialisation, over all seeds. A size with rows of only
 * one initialisation has no line. */
Test(figures_train, fine_tuning_is_compared_with_training_from_scratch)
{
    shell("cp " FIXTURES
          "/fine_tuning.csv $D/results && cd $D/results && head -n 1 fine_tuning.csv > other.csv && "
          "sed -n 2p fine_tuning.csv | sed 's/,digits,100,/,digits,50,/; "
          "s/,5,7850,100,200,/,5,7850,50,200,/' >> other.csv");
    SHELL(0, SELECT "fine_tuning >/dev/null && cat $D/work/fine_tuning.vars $D/work/fine_tuning.dat");
    cr_expect(says("series = 4") && says("'100 samples'") && says("'400 samples'") && !says("'50 samples'"),
              "%s", out);
    EXPECT_OUT("'pre-trained'", "'from scratch'", "One seed per");
}

/* The figure fine_tuning_sets has a group per set of images and a dot per size, at the mean error over the
 * seeds. Your newest file is drawn. */
Test(figures_train, sets_of_the_pretraining_are_compared)
{
    SHELL(0, "cp -r tests/data/formulas $D/results && cd $D/results/formulas && "
             "sed 's/,2026-/,2025-/; s/vit-micro/old-net/' rows.csv > older.csv && cd $OLDPWD && " SELECT
             "fine_tuning_sets >/dev/null && cat $D/work/fine_tuning_sets.vars $D/work/fine_tuning_sets.dat");
    EXPECT_OUT("groups = 3", "dots = 2", "'100 samples'", "'200 samples'", "\tfrom scratch\t",
               "\tRCDB-1k\t6.4 k images",
               "vit-micro, mnist, train-omp: 100 test samples; batch 50, adamw at 0.0005", "of 2 seeds",
               "rand-augment 28");
    EXPECT_OUT(
        "\n0.825\t87.5\t86\t89\t87.5 %\t\n"); /* errors of 14 % and 11 % of 100 samples: from scratch */
    SHELL(0, "scripts/figures/fine_tuning.py tests/data/formulas/rows.csv");
    EXPECT_OUT("| from scratch |  |  |  |  | 12.50 % (11.00 to 14.00) | 13.00 % (11.00 to 15.00) |",
               "| VisualAtom | 6,400 | ");
    SHELL(0, "sed '$d' tests/data/formulas/rows.csv > $D/few.csv && "
             "scripts/figures/fine_tuning.py $D/few.csv");
    EXPECT_OUT(", 1 of 2 seeds |");
    SHELL(2,
          "sed '2s|^train/13|load/14|' tests/data/formulas/rows.csv > $D/results/formulas/rows.csv; " SELECT
          "fine_tuning_sets");
    EXPECT_OUT("rows.csv, line 2: schema 'load/14' is not of training; move this file away");
    shell("rm -r $D/results/formulas; " SELECT "--reference $D/reference fine_tuning_sets");
    EXPECT_OUT("skipped fine_tuning_sets: no data; to measure it: scripts/compare/pretrain_formulas.py");
}

/* The figure training_time compares training runs on the same images, generated live and loaded. Rows of
 * other jobs, and of jobs without loaded samples, are on no line. */
Test(figures_train, training_on_live_images_is_compared_with_loaded_ones)
{
    shell("cp " FIXTURES
          "/live_training.csv $D/results && cd $D/results && head -n 1 live_training.csv > other.csv && "
          "sed -n 2p live_training.csv | sed 's/,lenet,32,/,lenet,64,/; s/2026-11-21/2026-11-22/' >> "
          "other.csv");
    SHELL(0, SELECT "training_time >/dev/null && cat $D/work/training_time.vars $D/work/training_time.dat");
    EXPECT_OUT("series = 4", "generated live", "one constant batch", "loaded from shards",
               "loaded from files", "lenet with 943,836", "parameters, batch 32", "images are identical");
    EXPECT_OUT("\n0.64\t", "\n1.92\t"); /* thousands of images */
    shell("sed -i '/shards/s/,2\\.16870378,/,2.16870379,/' $D/results/live_training.csv && " SELECT
          "training_time >/dev/null && cat $D/work/training_time.vars");
    cr_expect(status == 0 && !says("images are identical"), "%s", out);
    shell("sed -i '/,live,/d' $D/results/live_training.csv && " SELECT
          "--reference $D/reference training_time");
    EXPECT_OUT("skipped training_time: none of your 10 rows of train has suitable parameters; to measure "
               "it: scripts/compare/live_");
    shell("rm $D/results/*; " SELECT "--reference $D/reference training_time");
    EXPECT_OUT("skipped training_time: no data; to measure it: scripts/compare/live_training.sh DIR");
}

/* The figure training draws the second half of each run, by source of images and number of GPUs, beside
 * PyTorch's rows of the same GPU. Rows of ranks that share a GPU, and jobs with a single source, are left
 * out. */
Test(figures_train, training_throughput_is_drawn_by_source_and_number_of_gpus)
{
    SHELL(0, "cp " FIXTURES "/training.csv $D/results && " FIGURES
             "training && cat $D/work/training.vars $D/work/training.dat");
    EXPECT_OUT("of your ", " rows of train left out: ", " of the first half of a run");
    EXPECT_OUT("series = 10", "one constant batch", "generated live", "raw shards in memory",
               "JPEG shards in memory", "JPEG shards on a disk", "JPEG shards over HTTP", "PyTorch, compiled",
               "loaded (LOAD)", "generated (BAT)", "batch 256 per GPU", "figures, revision new");
    cr_expect(says("\n1\t32087.2354\t") && says("\n2\t62570.109\t"), "%s", out);
    SHELL(0, "python3 -c '"
             "import csv, sys\n"
             "rows = list(csv.DictReader(open(sys.argv[1])))\n"
             "more = [{**row, \"ranks\": 4, \"batch\": 2 * int(row[\"batch\"]), \"items_per_s\": 1.9 * "
             "float(row[\"items_per_s\"])} "
             "for row in rows if row[\"rank\"] == \"all\"]\n"
             "csv.DictWriter(open(sys.argv[1], \"a\"), rows[0]).writerows(more)' $D/results/training.csv "
             "&& " SELECT "training >/dev/null && cat $D/work/training.vars $D/work/training.dat");
    cr_expect(says("\n1\t32087.2354\t") && says("\n2\t62570.109\t") && says("\n4\t118883.207\t") &&
                  says("x_tick_text[3] = ['1', '2', '4']"),
              "%s", out);
    shell("sed -i '/,constant,/s/,weak,1,/,weak,2,/' $D/results/training.csv && " SELECT
          "training >/dev/null && cat $D/work/training.dat");
    cr_expect(status == 0 && !says("\n2\t62570.109\t"), "%s", out);
    shell("sed -i '/,load,/d; /,live,/d' $D/results/training.csv && " SELECT
          "--reference $D/reference training");
    EXPECT_OUT("skipped training: 9 of your 9 rows of train left out: ", " of the first half of a run",
               " of another job, or of one "
               "with a single source; to measure it: GPUS='1 2' scripts/compare/training.sh DIR "
               "results/training.csv");
}

/* If a figure cannot use the user's rows, it draws only reference rows, and a note says why. */
Test(figures_train, figures_of_training_say_why_your_rows_are_not_drawn)
{
    SHELL(0, "cp " FIXTURES "/live_training.csv " FIXTURES "/fine_tuning.csv $D/reference && python3 -c '"
             "import csv, sys\n"
             "rows = list(csv.DictReader(open(sys.argv[1])))\n"
             "out = csv.DictWriter(open(sys.argv[2], \"w\"), rows[0])\n"
             "out.writeheader()\n"
             "out.writerows([row for row in rows if not row[\"init\"]][:3])' " FIXTURES
             "/fine_tuning.csv $D/results/half.csv && " FIGURES
             "--reference $D/reference training_time fine_tuning");
    EXPECT_OUT("training_time.{png,svg,pdf} (your 3 rows of train are not drawn, because the figure has "
               "no points with variant "
               "train-omp; data digits; train_size 100");
    EXPECT_OUT("fine_tuning.{png,svg,pdf} (your 3 rows do not include pre-trained and from-scratch");
}
