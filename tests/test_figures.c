/* Tests scripts/figures/draw.py: which rows the figures of generating use, errors, and output files. */
#include "figures.h"

#include "cells.h"
#include "core/portable.h"

TestSuite(figures, .init = open_folder, .fini = remove_folder, .timeout = 120);

/* clang-format off */
static const char *const names[] = {
    "vertices", "resolution", "batch", "ladder", "stages", "scaling", "monitor", "roofline",
    "loading", "loading_threads", "loading_cold", "loading_latency", "loading_loops", "learning_loss",
    "learning_accuracy", "learning_time", "fine_tuning", "monitor_loading", "break_even", "training_time",
    "training", "training_base", "pretraining_tiny", "pretraining_base", "pretraining_accuracy", "pretraining_loss", "exchange",
    "training_ranks", "pipeline", "balance", "loading_ranks", "ops", "decoding", "learning_steps",
    "formulas", "fine_tuning_sets", "clips"
};
/* clang-format on */
#define OF_IMAGES 8 /* figures of generating, at the beginning of `names` */
/* The names of the figures of generating. */
#define GENERATING "vertices resolution batch ladder stages scaling monitor roofline "

/* ---- What is drawn ---- */

Test(figures, all_figures_are_drawn_in_three_formats)
{
    shell("cp " FIXTURES
          "/* $D/results && cp -r tests/data/pretrain tests/data/formulas $D/results && " FIGURES);
    cr_assert_eq(status, 0, "%s", out);
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        shell("cd $D/out && head -c 8 %s.png | grep -q PNG && head -c 5 %s.pdf | grep -q %%PDF- && "
              "tail -c 8 %s.pdf | grep -q EOF && test $(stat -c %%s %s.png) -gt 5000 && test -s %s.svg",
              names[i], names[i], names[i], names[i], names[i]);
        cr_assert_eq(status, 0, "%s", names[i]);
    }
    shell("tests/check_page.py $D/out/*.svg");
    cr_assert_eq(status, 0, "%s", out);
    shell("ls -A $D/out | wc -l");
    cr_assert_eq(atoi(out), (int)(3 * COUNT_OF(names)), "temporary files remain: %s", out);
}

Test(figures, figures_of_generating_need_only_reference_rows)
{
    shell(FIGURES GENERATING);
    cr_assert_eq(status, 0, "%s", out);
    for (size_t i = 0; i < OF_IMAGES; i++) {
        char line[64];
        snprintf(line, sizeof line, "drawn   %s/out/%s.", folder, names[i]);
        cr_assert(says(line), "%s: %s", names[i], out);
    }
}

/* Rows of sets on a GPU and on one core, beside the published scripts. Rows of ranges, and of several cores,
 * do not belong to the figure. One note names the rows that are missing. */
Test(figures, formulas_are_drawn_beside_their_scripts)
{
    shell("mkdir $D/scripts && cp results/reference/published_*.csv $D/scripts && cp " FIXTURES
          "/formulas.csv $D/results && " FIGURES
          "--reference $D/scripts --work $D/work formulas && cat $D/work/formulas.*");
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("50.0 µs") && says("× 1.24 k") && says("× 124 k") && says("× 8.5 M") && says("3.40 s"),
              "%s", out);
    cr_expect(
        says("(no rows of visualatom-script-1k (fused), segrcdb (fused), 1p-frac (fused), ofdb-1k (fused), "
             "paper-1000 (fused); to measure them: scripts/sweep/reference.sh"),
        "%s", out);
    shell("sed -i 's/,fused,/,bat,/; s/,rcdb-1k,/,rcdb,/' $D/results/formulas.csv && " FIGURES
          "--reference $D/scripts --work $D/work formulas && cat $D/work/formulas.dat");
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("(no rows of rcdb-1k (omp), fused; to measure them") && !says("50.0 µs") &&
                  says("62.0 ms"),
              "%s", out);
}

Test(figures, draws_figures_by_name)
{
    shell(FIGURES "ladder batch");
    cr_assert_eq(status, 0, "%s", out);
    shell("ls $D/out | tr '\\n' ' '");
    cr_assert_str_eq(out, "batch.pdf batch.png batch.svg ladder.pdf ladder.png ladder.svg ");
}

Test(figures, missing_data_skips_a_figure_and_names_the_command)
{
    shell(FIGURES "--reference $D/reference");
    cr_assert_eq(status, 0, "%s", out);
    size_t skipped = 0;
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        char line[64];
        snprintf(line, sizeof line, "  skipped %s: no data; ", names[i]);
        skipped += says(line);
    }
    cr_expect(skipped == count_of(out, "to measure it: ") && skipped >= 24, "%zu: %s", skipped, out);
    cr_expect_eq(skipped + count_of(out, "  drawn "), COUNT_OF(names), "%s", out);
    shell(FIGURES "--reference $D/reference | grep -oE '(scripts|configs)/[a-z_/.]+' | sort -u | xargs ls");
    cr_assert_eq(status, 0, "a command names a script or a table that does not exist: %s", out);
    cr_expect(says("configs/sweep_ops.tsv") && says("scripts/compare/break_even.sh"), "%s", out);
}

Test(figures, long_device_names_and_single_points_are_drawn)
{
    shell("sed \"s/Made-up Accelerator X1/'quoted' <\\&> $(printf 'very long %%.0s' $(seq "
          "20))name/\" " FIXTURES "/synth.csv > $D/results/a.csv; " FIGURES GENERATING);
    cr_assert_eq(status, 0, "%s", out);
    shell("head -2 " FIXTURES "/synth.csv > $D/results/a.csv; " FIGURES
          "--reference $D/reference " GENERATING);
    cr_assert_eq(status, 0, "%s", out);
    shell("tests/check_page.py $D/out/*.svg");
    cr_assert_eq(status, 0, "%s", out);
}

Test(figures, commands_of_gnuplot_are_printed)
{
    shell("mkdir $D/out; " FIGURES "--commands ladder | sh");
    cr_assert_eq(status, 0, "%s", out);
    shell("head -c 8 $D/out/ladder.png | grep -q PNG && test -s $D/out/ladder.pdf");
    cr_assert_eq(status, 0);
}

/* ---- Selection of rows ---- */

/* Prints "x median" for each point of `fused` in the batch figure. If only fused has rows, its points are the
 * first block of the data. */
static void fused_over_batch(void)
{
    shell(SELECT "--reference $D/reference batch");
    cr_assert_eq(status, 0, "%s", out);
    shell("sed '/^$/q' $D/work/batch.dat | cut -f 1,2 | tr '\\t\\n' '  '");
}

Test(figures, the_newest_row_is_drawn)
{
    shell("cd " FIXTURES " && (head -1 synth.csv; grep ',fused,.*,64,512,' synth.csv |"
          " sed 's/2026-01-02/2026-01-03/; s/,0\\.000152,/,0.000076,/g'; "
          "grep ',fused,.*,64,512,' synth.csv; grep ',fused,.*,16,512,' synth.csv)"
          " > $D/results/a.csv && cat $D/results/a.csv");
    cr_assert(says("0.000076"), "%s", out);
    fused_over_batch();
    cr_assert_str_eq(out, "16 3.5 64 1.1875  ", "not the newer row, which is the first: %s", out);
}

/* A line uses the rows of one file and one revision. A row of another file or revision is left out, even if
 * it is newer. */
Test(figures, a_line_has_rows_of_one_file_and_revision)
{
    static const char *const elsewhere[] = {"b.csv", "a.csv"};
    for (size_t i = 0; i < COUNT_OF(elsewhere); i++) {
        shell("rm -f $D/results/*; cd " FIXTURES
              " && (head -1 synth.csv; grep ',fused,.*,\\(64\\|16\\),512,' synth.csv) > $D/results/a.csv && "
              "head -1 synth.csv > $D/results/b.csv && grep ',fused,.*,4,512,' synth.csv | "
              "sed 's/2026-01-02/2026-01-03/; s/0123456789ab/ffffffffffff/' >> $D/results/%s",
              elsewhere[i]);
        fused_over_batch();
        cr_assert_str_eq(out, "16 3.5 64 2.375  ", "%s: %s", elsewhere[i], out);
        shell(SELECT "ladder > /dev/null; " FIGURES "batch");
        cr_assert(says("1 of your rows is on no line, because other parameters differ: fused"), "%s", out);
    }
}

/* A row whose median did not settle is drawn with a ring. A row without the column `settled` has no ring. */
Test(figures, rows_that_did_not_settle_are_marked)
{
    shell("awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } "
          "{ print $0, NR == 1 ? \"settled\" : $at[\"variant\"] == \"rng\" || $at[\"batch\"] == 64 ? "
          "\"no\" : \"yes\" }' " FIXTURES "/synth.csv > $D/results/a.csv; " SELECT
          "--reference $D/reference batch ladder > /dev/null; cd $D/work; "
          "for name in batch ladder; do grep '^ring_block' $name.vars; tail -4 $name.dat; done; "
          "grep -c 'not settled: ' *.vars; grep -c 'did not settle' *.vars");
    cr_assert(says("ring_block = 7\n") && says("\n64\t"), "%s", out);
    cr_assert(says("ring_block = 3\n"), "%s", out);
    cr_assert(says("batch.vars:1\nladder.vars:1\nbatch.vars:1\nladder.vars:1\n"), "%s", out);
    shell("cp " FIXTURES "/synth.csv $D/results/a.csv; " SELECT
          "--reference $D/reference ladder > /dev/null; cat $D/work/ladder.vars");
    cr_assert(says("ring_block = 0\n") && !says("settle"), "%s", out);
}

/* If the reference has several GPUs, the one with the most points is drawn, unless the user has rows of
 * another one. In `ladder`, the published code has a place of its own, away from the lines between the groups
 * at 1.5, 2.5, ... */
Test(figures, one_gpu_of_the_reference_is_drawn)
{
    SHELL(0, "cp " REFERENCE "/h200_synth.csv $D/reference; " SELECT
             "--reference $D/reference ladder > /dev/null && cat $D/work/ladder.dat");
    cr_expect(says("\n1.815\t") && says("\n1.185\t") && !says("\n1.46\t"), "%s", out);
    SHELL(0, "python3 -c '"
             "import csv, sys\n"
             "rows = list(csv.DictReader(open(sys.argv[1])))\n"
             "out = csv.DictWriter(open(sys.argv[2], \"w\"), rows[0])\n"
             "out.writeheader()\n"
             "for row in rows:\n"
             "    job = row[\"variant\"], row[\"batch\"], row[\"res\"], row[\"out_res\"], row[\"classes\"], "
             "row[\"dtype\"]\n"
             "    for n in (200, 400, 600, 1000) if job[1:] in ((\"32\", \"512\", \"512\", \"0\", \"u8\"),) "
             "else ():\n"
             "        out.writerow({**row, \"vertices\": n, \"device\": row[\"device\"].replace(\"H200\", "
             "\"X9\")})' "
             "$D/reference/h200_synth.csv $D/reference/x9.csv && " SELECT
             "--reference $D/reference vertices > /dev/null && cat $D/work/vertices.vars");
    EXPECT_OUT("'NVIDIA X9', 'reference', 'gbase, batch 32'");
    cr_expect(!says("'NVIDIA H200'"), "%s", out);
    SHELL(0, "cp $D/reference/h200_synth.csv $D/results; " SELECT
             "--reference $D/reference vertices > /dev/null && cat $D/work/vertices.vars");
    EXPECT_OUT("'NVIDIA H200', 'yours", "'NVIDIA H200', 'reference");
    cr_expect(!says("NVIDIA X9"), "%s", out);
}

Test(figures, stages_of_every_variant_are_drawn)
{
    shell("awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } "
          "$at[\"variant\"] == \"bat\" { $at[\"noise_s\"] = $at[\"vertices_s\"] = $at[\"painting_s\"] = "
          "0.0001 } "
          "$at[\"variant\"] == \"fused\" { $at[\"vertices_s\"] = 0.0001; $at[\"painting_s\"] = 0.0003 } "
          "1' " FIXTURES "/synth.csv > $D/results/a.csv; " SELECT
          "--reference $D/reference stages > /dev/null; cat $D/work/stages.vars $D/work/stages.dat");
    cr_assert(says("\tbat\tbatch 256") && says("\tfused\tbatch 256"), "%s", out);
    cr_assert(says("one stage in fused and omp."), "%s", out);
    cr_assert(!says("No stages measured"), "%s", out);
    shell("cp " FIXTURES "/synth.csv $D/results/a.csv; " SELECT
          "--reference $D/reference stages > /dev/null; grep -o 'No stages measured.*bat and fused' "
          "$D/work/stages.vars");
    cr_assert_eq(status, 0, "%s", out);
}

Test(figures, each_host_is_a_series)
{
    shell("cd " FIXTURES " && (head -1 synth.csv; grep ',fused,.*,\\(64\\|16\\),512,' synth.csv;"
          " grep ',fused,.*,\\(64\\|16\\),512,' synth.csv | sed s/node01/node02/) > $D/results/a.csv");
    shell(SELECT "--reference $D/reference batch && grep -c 'yours, node0[12]' $D/work/batch.vars && "
                 "grep '^series = ' $D/work/batch.vars");
    cr_assert(says("series = 4"), "not the two hosts, the published points and the published code: %s", out);
}

Test(figures, rows_of_single_ranks_are_ignored)
{
    shell("cp " FIXTURES "/sweep_scaling.csv $D/results && " SELECT
          "--reference $D/reference scaling && sed '/^$/q' $D/work/scaling.dat | "
          "cut -f 1,2 | tr '\\t\\n' '  '; grep cell_text $D/work/scaling.vars");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("\n1 500000 2 991000 4 1944000  "), "%s", out);
    cr_assert(says("'99.1 %', '97.2 %', '99.1 %', '92.2 %'"), "%s", out);
}

Test(figures, scaling_with_a_training_step_is_ignored)
{
    shell("awk -F , -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } { print } NR > 1 { "
          "$at[\"compute\"] = 5; $at[\"efficiency\"] = 0.5; sub(/^20../, \"2099\", $at[\"time_utc\"]); print "
          "}' " FIXTURES "/sweep_scaling.csv > $D/results/a.csv; " SELECT
          "--reference $D/reference scaling && grep cell_text $D/work/scaling.vars");
    cr_assert(says("'99.1 %', '97.2 %', '99.1 %', '92.2 %'"), "%s", out);
}

Test(figures, rows_with_other_parameters_are_ignored)
{
    /* The rows with batches 1 and 4 get another element type, another noise, or wrong images. */
    shell("cd " FIXTURES " && (head -1 synth.csv; grep ',fused,.*,\\(16\\|64\\),512,' synth.csv; "
          "grep ',fused,.*,1,512,' synth.csv | sed 's/,u8,/,f16,/'; grep ',fused,.*,4,512,' synth.csv | "
          "sed 's/,2,0.002,25,/,3,0.002,25,/'; grep ',fused,.*,4,512,' synth.csv | sed 's/,yes,0$/,yes,7/') "
          "> $D/results/a.csv");
    fused_over_batch();
    cr_assert_str_eq(out, "16 3.5 64 2.375  ", "%s", out);
    shell(SELECT "--reference $D/reference batch");
    cr_assert(says("a row of fused with wrong images is skipped"), "%s", out);
}

Test(figures, unverified_rows_are_named)
{
    shell("sed 's/,yes,0$/,no,/' " FIXTURES "/synth.csv > $D/results/a.csv; " SELECT
          "ladder && grep '^array caption' $D/work/ladder.vars");
    cr_assert(says("not verified: bat, fused, gbase, mem, rng); NVIDIA H200 (reference rows"),
              "unverified variants must be named at their own device only: %s", out);
    cr_assert(!says("All images verified"), "%s", out);
}

Test(figures, files_without_measurements_are_skipped)
{
    shell("cd $D/results && printf 'time_utc,host\\nnow,here\\n' > env.csv && printf "
          "'vertices,orbits\\n3,4\\n' > classes.csv"
          " && : > empty.csv && (head -1 $OLDPWD/" FIXTURES "/synth.csv | sed 's/$/,sample/') > samples.csv");
    cr_assert_eq(status, 0);
    shell(SELECT "vertices");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("classes.csv: no rows of a run; skipped") && !says("env.csv"), "%s", out);
}

Test(figures, the_last_run_of_a_monitor_file_is_drawn)
{
    shell("(cat " FIXTURES "/monitor.csv; sed -n '2,9p' " FIXTURES
          "/monitor.csv) > $D/results/monitor.csv; " SELECT
          "monitor && sed '/^$/q' $D/work/monitor.dat | grep -c .");
    cr_assert(says("\n8\n"), "%s", out);
}

Test(figures, a_monitor_figure_reports_omitted_runs_and_files)
{
    shell("(cat " FIXTURES "/monitor.csv; sed -n '2,9p' " FIXTURES "/monitor.csv) > $D/results/monitor.csv; "
          "cp " FIXTURES
          "/monitor.csv $D/results/a.csv; sed -i 's/2026-01/2025-01/' $D/results/a.csv; " FIGURES
          "--out $D/out monitor");
    cr_assert(
        says("drawn: monitor.csv, the last of its 2 runs (1 left out); the newest of 2 monitor files (1 "
             "left out)"),
        "%s", out);
    shell("cp " FIXTURES "/monitor.csv $D/results; rm $D/results/a.csv; " FIGURES "--out $D/out monitor");
    cr_assert(says("drawn   ") && !says("left out"), "%s", out);
}

/* The samples of monitor.csv as those of `count` GPUs of a rank: only the rows of the first GPU keep the
 * values of the process. Columns: 2 time_utc, 6 rank, 7 gpu, 10 phase, 21 cpu_cores, 22 rss_bytes. */
#define MONITOR_HEAD "head -1 " FIXTURES "/monitor.csv; "
#define MONITOR_GPUS(count, rank, changes)                                                             \
    "awk -F, -v OFS=, 'NR > 1 { for (g = 0; g < " count "; g++) { $6 = \"" rank "\"; $7 = g; " changes \
    " if (g) $21 = $22 = \"\"; print } }' " FIXTURES "/monitor.csv; "
#define MONITOR_VARS "> $D/results/m.csv; " SELECT "monitor && cat $D/work/monitor.vars"

Test(figures, a_monitor_figure_has_all_gpus)
{
    shell("{ " MONITOR_HEAD MONITOR_GPUS("2", "0", "") "} " MONITOR_VARS);
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("series = 2\n") && says("array gpu_name[2] = ['GPU 0', 'GPU 1']"), "%s", out);
    cr_expect(says("array gpu_style[2] = [16, 13]"), "%s", out);
    /* Lines: one of each GPU in 3 panels, two in those of clocks and PCIe, one in that of memory; the process
     */
    cr_expect(says("array line_block[18] = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0]"), "%s",
              out);
    cr_expect(says("[16, 13, 16, 13, 16, 13, 16, 13, 26, 23, 16, 13, 26, 23, 16, 13, 28, 18]"), "%s", out);
    cr_expect(says("64 samples per GPU at 100 ms intervals."), "%s", out);
    shell("{ " MONITOR_HEAD MONITOR_GPUS("10", "0", "") "} > $D/results/m.csv; " FIGURES
                                                        "monitor && cat $D/work/monitor.vars");
    cr_expect(says("series = 8\n") && says("8 of 10 GPUs") && says("GPU 7; 2 further GPUs left out"), "%s",
              out);
}

/* A rank whose last run ended before the run of the lowest rank began belongs to an older run. */
Test(figures, a_monitor_figure_has_all_ranks_of_the_run)
{
    shell("{ " MONITOR_HEAD MONITOR_GPUS("1", "10", "$7 = 3;") MONITOR_GPUS("1", "2", "")
              MONITOR_GPUS("1", "7", "sub(\"03:04:05\", \"02:04:05\", $2);") "} " MONITOR_VARS);
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("array gpu_name[2] = ['rank 2, GPU 0', 'rank 10, GPU 3']"), "%s", out);
    cr_expect(says("Phases are those of the first") && says("begins at its own start."), "%s", out);
    cr_expect(says("[16, 13, 16, 13, 16, 13, 16, 13, 26, 23, 16, 13, 26, 23, 16, 13, 26, 23, 16, 13]"), "%s",
              out);
}

Test(figures, a_monitor_figure_has_the_phases_of_a_program)
{
    shell("{ " MONITOR_HEAD MONITOR_GPUS("1", "0",
                                         "sub(\"warm-up\", \"load it\", $10); "
                                         "sub(\"timed\", \"train\", $10);") "} " MONITOR_VARS);
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("['setup', 'verify', 'measure', 'teardown', 'load it', 'train']"), "%s", out);
    cr_expect(says("array phase_slot[6] = [1, 2, 5, 6, 3, 4]"), "%s", out);
    /* More phases than shades: the further ones are white and not in the key. */
    shell("{ " MONITOR_HEAD MONITOR_GPUS("1", "0", "$10 = \"p\" int(NR / 8);") "} " MONITOR_VARS);
    cr_expect(says("array phase_name[6] = ['p0', 'p1', 'p2', 'p3', 'p4', 'p5']"), "%s", out);
    cr_expect(says("array band_slot[9] = [1, 2, 3, 4, 5, 6, 7, 7, 7]"), "%s", out);
}

Test(figures, points_with_different_threads_per_rank_are_not_joined)
{
    shell("{ head -1 " FIXTURES "/sweep_scaling.csv; " ON_CPU("2", "16", "64", "weak")
              ON_CPU("4", "16", "128", "weak") "} > $D/results/a.csv; " SELECT
                                               "--reference $D/reference scaling && cat "
                                               "$D/work/scaling.vars $D/work/scaling.dat");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("'8 threads per rank at 2, 4 at 4'") && says("array joined[1] = [0]"), "%s", out);
    cr_assert(says("\t1009.08174\t0.454285714\t") && says("\t1009.08174\t0.908571429\t"),
              "the line without loss must be a row's rate divided by its efficiency: %s", out);
}

Test(figures, points_with_equal_threads_per_rank_are_joined)
{
    shell("{ head -1 " FIXTURES "/sweep_scaling.csv; " ON_CPU("2", "8", "64", "weak")
              ON_CPU("4", "16", "128", "weak") "} > $D/results/a.csv; " SELECT
                                               "--reference $D/reference scaling && cat "
                                               "$D/work/scaling.vars");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("'4 threads per rank'") && says("array joined[1] = [1]"), "%s", out);
}

/* Shell command that prints the fixture's row of omp (1000 vertices, batch 32) with other vertices and
 * another batch. */
#define OMP(vertices, batch)                                                                             \
    "grep ',omp,.*,32,512,1000,' " FIXTURES "/synth.csv | sed 's/,32,512,1000,/," batch ",512," vertices \
    ",/'; "

Test(figures, your_rows_do_not_replace_reference_lines)
{
    shell(SELECT "vertices && grep '^series = ' $D/work/vertices.vars");
    cr_assert(says("series = 8"), "not the reference and the published series: %s", out);
    shell("{ head -1 " FIXTURES "/synth.csv; " OMP("300", "32") OMP(
        "700", "32") "} > $D/results/a.csv; " SELECT "vertices && grep '^series = ' $D/work/vertices.vars");
    cr_assert(says("series = 9") && !says("of yours"), "%s", out);
}

Test(figures, rows_on_no_line_are_counted)
{
    shell("{ head -1 " FIXTURES "/synth.csv; " OMP("300", "32") OMP("700", "32") OMP("700", "8")
              OMP("500", "16") "} > $D/results/a.csv; " FIGURES "vertices batch");
    cr_assert(
        says("vertices.{png,svg,pdf} (2 of your rows are on no line, because other parameters differ: omp, "
             "batch 8, 16)"),
        "%s", out);
    cr_assert(says("batch.{png,svg,pdf} (your 4 rows of synth are not drawn, because the figure has no "
                   "points with vertices 300, 500, "
                   "700; to measure the figure's rows: scripts/sweep/run.sh configs/sweep_batch.tsv)"),
              "%s", out);
    shell(FIGURES "ladder stages");
    cr_assert(says("ladder.{png,svg,pdf} (your 4 rows of synth are not drawn, because the figure has no "
                   "points with ") &&
                  says("stages.{png,svg,pdf} (your 4 rows of synth are not drawn, "),
              "%s", out);
    shell(FIGURES "--reference $D/reference ladder loading");
    cr_assert(says("skipped ladder: none of your 4 rows of synth has suitable parameters; to measure it: ") &&
                  says("skipped loading: no data; to measure it:"),
              "%s", out);
}

Test(figures, a_single_point_is_drawn_without_a_line)
{
    shell("{ head -1 " FIXTURES "/synth.csv; " OMP(
        "300", "32") "} > $D/results/a.csv; " SELECT
                     "vertices && grep '^array legend_style\\|^array legend_text' $D/work/vertices.vars");
    cr_assert(says("'omp, batch 32'") && says(", 12.1, ") && !says("of yours"), "%s", out);
}

Test(figures, axis_of_vertices_fits_its_range)
{
    shell(SELECT "vertices && grep '^array x_tick_text' $D/work/vertices.vars");
    cr_assert(says("['200', '400', '600', '800', '1000']"), "%s", out);
    shell("{ head -1 " FIXTURES "/synth.csv; " OMP("1000", "32") OMP("10000", "32")
              OMP("100000", "32") "} > $D/results/a.csv; " SELECT
                                  "vertices && grep '^array x_tick_text' $D/work/vertices.vars");
    cr_assert(says("['200', '500', '1000', '2000', '5000', '10,000', '20,000', '50,000', '100,000']"), "%s",
              out);
}

/* Writes rows with bounds. The rows of fused are bound by the bus. The changed columns are flops, bytes,
 * peak_bytes_per_s, bound and roofline_share. */
#define WITH_BOUNDS                                                                                \
    "awk -F, -v OFS=, 'NR == 1 { print } $7 == \"fused\" { $57 = 1; $59 = 6.3e10; $60 = \"bus\"; " \
    "$61 = ++n == 2 ? 0.75 : 0.5; print } $7 == \"omp\" { $56 = 5; print }' " FIXTURES             \
    "/synth.csv > $D/results/synth.csv; "

Test(figures, each_variant_has_the_bar_nearest_to_its_roofline)
{
    shell(WITH_BOUNDS "cp " FIXTURES "/live_training.csv $D/results; " SELECT
                      "--reference $D/reference roofline && cat $D/work/roofline.dat $D/work/roofline.vars");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("25\t-1\t25 % of 80 TFLOP/s, 158 µs\n\n\n75\t-3.3\t75 % of 63 GB/s, 1.11 µs\n"), "%s",
              out);
    cr_assert(says("-1\ttrain-cuda\n-3.3\tfused\n\n\n0\tMade-up Accelerator X1 (yours, made-up)\n"), "%s",
              out);
    cr_assert(says("['limited by', 'FLOPs', 'bus bandwidth']"), "%s", out);
}

Test(figures, reference_rows_have_correct_shares)
{
    shell("tests/check_rooflines.py " REFERENCE "/*.csv " FIXTURES "/live_training.csv");
    cr_assert(status == 0 && says(" 0 wrong\n") && !says("\n0 rows"), "%s", out);
}

Test(figures, wrong_shares_are_detected)
{
    static const char *const faults[][2] = {
        {"s/,0.2,/,1.2,/", "roofline_share is 1.2"},
        {"s/,0.2,/,0.1,/", "roofline_share is 0.1, but the other columns give 0.2"},
        {"s/,compute,/,memory,/", "bound is 'memory', not one of ('compute',)"},
        {"s/,compute,/,,/", "bound is '' with a roofline_share of 0.25"}};
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        shell("sed '%s' " FIXTURES "/live_training.csv > $D/a.csv; tests/check_rooflines.py $D/a.csv",
              faults[i][0]);
        cr_expect(status == 1 && says(faults[i][1]), "%s: %s", faults[i][0], out);
    }
}

/* Rows whose column `bound` is empty have no roofline, so they have no bar. */
Test(figures, rows_without_a_bound_are_not_drawn)
{
    shell("cp " FIXTURES "/synth.csv $D/results; " SELECT "--reference $D/reference roofline");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("skipped roofline: none of your 34 rows of synth has suitable parameters"), "%s", out);
}

Test(figures, byte_order_marks_and_files_without_rows_are_accepted)
{
    shell("{ printf '\\357\\273\\277'; cat " FIXTURES "/synth.csv; } > $D/results/a.csv; head -1 " FIXTURES
          "/synth.csv > $D/results/b.csv; " SELECT "--reference $D/reference ladder"
          "&& cat $D/work/ladder.vars");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("Made-up Accelerator X1 (your rows"),
              "a byte-order mark is read as part of the header: %s", out);
    cr_assert(says("b.csv: no rows after the header"), "%s", out);
}

/* ---- Errors ---- */

static const struct {
    const char *make; /* a command that writes a changed copy of the fixture "$F" to stdout */
    const char *says;
} refused[] = {
    {"head -c -30 $F", "bad.csv, line 35: 73 fields where the header has 89"},
    {"head -c -1 $F", "the last row has no newline and may be incomplete; complete or delete it"},
    {"head -1 $F | head -c 100", "bad.csv, line 1: the last row has no newline"},
    {"head -3 $F | sed '3s/,[^,]*$//'",
     "bad.csv, line 3: 88 fields where the header has 89; repair or delete this row"},
    {"head -3 $F | sed 's,^synth/8,synth/99,'",
     "bad.csv, line 2: unknown schema 'synth/99' (known: synth/8, "
     "load/14, ops/2, train/13, infer/8, exchange/1, steps/1, monitor/2)"},
    {"head -3 $F | sed '3s,^synth/8,synth/3,'", "bad.csv, line 3: schema 'synth/3' after rows of 'synth/8'"},
    {"head -3 $F | sed '1s/time_median_s/median/'", "bad.csv, line 2: time_median_s is '', not a number"},
    {"head -3 $F; head -3 $F", "bad.csv, line 4: a second header; delete this line"},
    {"head -3 $F; head -3 " FIXTURES "/monitor.csv", "bad.csv, line 4: a second header; its columns differ"},
    {"head -3 $F | sed '3s/,0.000576,/,fast,/'", "bad.csv, line 3: time_median_s is 'fast', not a number"},
    {"head -3 $F | sed '3s/,0.000576,/,-1,/'",
     "bad.csv, line 3: time_median_s is -1; repair or delete this row"},
    {"head -3 $F | sed '3s/node01/\"node01/'", "bad.csv, line 3: "},
    {"head -3 $F | sed '3s/node01/\\xff/'", "bad.csv, line 3: not UTF-8 text"},
    {"head -3 $F | sed '3s/node01/\\x00/'", "bad.csv, line 3: a NUL byte"},
    {"sed '1s/,sample_bytes,/,bytes,/' " FIXTURES "/load.csv",
     "bad.csv, line 2: sample_bytes is '', not a number"},
    {"sed '2s/,2048,0,/,0,0,/' " FIXTURES "/load.csv", "bad.csv, line 2: sample_bytes is 0; repair"},
    {"sed '2s/,1.9e-06,/,soon,/' " FIXTURES "/load.csv",
     "bad.csv, line 2: open_p50_s is 'soon', not a number"},
    {"sed 's/,100,/,nan,/2' " FIXTURES "/monitor.csv | sed '3s/^\\(.*\\),0.100,/\\1,inf,/'",
     "bad.csv, line 3: time_s is 'inf'"},
};

Test(figures, bad_files_are_refused)
{
    setenv("F", FIXTURES "/synth.csv", 1);
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        shell("{ %s; } > $D/results/bad.csv; " FIGURES, refused[i].make);
        cr_expect_eq(status, 2, "%s: %d, %s", refused[i].make, status, out);
        cr_expect(says(refused[i].says), "%s: %s", refused[i].make, out);
        cr_expect(strchr(out, '\n') == strrchr(out, '\n') && !says("Traceback"), "not one line: %s", out);
        shell("ls $D/out 2>/dev/null | wc -l");
        cr_expect_eq(atoi(out), 0, "figures are drawn from other files, although one file is bad");
    }
    shell("printf '{' > $D/results/env.json; rm $D/results/bad.csv; " FIGURES);
    cr_expect_eq(status, 2);
    cr_expect(says("write it again with: ./fdsl-bench --env --format json"), "%s", out);
}

/* A column that a file lacks is empty in its rows. A column that the program does not know is ignored, with
 * one note per file. */
Test(figures, files_may_lack_columns_and_have_others)
{
    SHELL(
        0,
        "sed '1s/,time_cv,/,colour,/; 1s/,outliers,/,shade,/' " FIXTURES
        "/synth.csv > $D/results/synth.csv && "
        "python3 -c \"import sys; sys.path.insert(0, 'scripts/figures'); import rows; notes = []; "
        "kind, found = rows.read_file('$D/results/synth.csv', notes); "
        "print(kind, {(row['time_cv'], row.texts['outliers'], 'colour' in row) for row in found}, *notes)\"");
    EXPECT_OUT("rows {(None, '', False)} ");
    EXPECT_OUT("synth.csv: ignored columns that fdsl-bench does not know: colour, shade\n");
    SHELL(1, "FDSL_BENCH=$D/none " FIGURES);
    EXPECT_OUT("the columns of rows are unknown, because ");
    EXPECT_OUT("build it with: make, or name another fdsl-bench with the environment variable FDSL_BENCH\n");
}

Test(figures, wrong_names_and_options_are_refused)
{
    shell(FIGURES "lader");
    cr_expect_eq(status, 2);
    cr_expect_str_eq(out, "figures: no figure 'lader'; did you mean ladder?\n");
    shell(FIGURES "--colour");
    cr_expect_eq(status, 2);
    cr_expect(says("--colour") && !says("Traceback"), "%s", out);
    shell(FIGURES "--help && " FIGURES "--list && " REPORT "--help");
    cr_expect_eq(status, 0);
    for (size_t i = 0; i < COUNT_OF(names); i++)
        cr_expect(says(names[i]), "%s", out);
}

/* The figure shows the combination of rank count and element type for which the user has the most points. */
Test(figures, all_reduces_have_one_line_per_variant)
{ /* the first figure has four lines of the fixture and five of the reference rows */
    shell("cp " FIXTURES "/exchange.csv $D/results && " SELECT
          "exchange >/dev/null && cat $D/work/exchange.vars $D/work/exchange.dat");
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("series = 9") && says("'mpi'") && says("'nccl'") && says("'peer-one-shot'") &&
                  says("'peer-two-shot'") && says("2 ranks, f32"),
              "%s", out);
    cr_expect(says("'1 KiB'") && says("'32 MiB'") && says("\n1024\t"), "%s", out);
    shell("sed -i '/,f32,/d' $D/results/exchange.csv && " SELECT
          "exchange >/dev/null && cat $D/work/exchange.vars");
    cr_expect(status == 0 && says("series = 1") && says("4 ranks, bf16") && !says("'mpi'"), "%s", out);
}

/* Bars are grouped by the value of --steps. Their colour shows which bandwidth is the reference: that of a
 * copy in GPU memory, of copies to the GPU, or of STREAM triad. Each bar shows the largest set. Sets with
 * another number of columns are left out. */
Test(figures, embedding_sets_have_one_bar_per_steps_and_variant)
{
    shell("cp " FIXTURES "/ops.csv $D/results && " SELECT "ops --reference $D/reference >/dev/null && "
          "scripts/figures/draw.py --work $D/work --out $D/out --results $D/results --reference $D/reference "
          "ops && "
          "cat $D/work/ops.vars $D/work/ops.dat");
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("kinds = 3") && says("kind_slot[3] = [6, 3, 5]") && says("x_high = 120"), "%s", out);
    cr_expect(says("110\t-2\t110 % of 4 TB/s, 4 M rows, not settled\n"), "%s", out);
    cr_expect(says("95\t") && says("25 % of 50 GB/s, 1 M rows, --async off\n"), "%s", out);
    cr_expect(says("70 % of 100 GB/s, 1 M rows\n") && !says("90 % of") && !says("40 % of"), "%s", out);
    cr_expect(says("\tmask; f16 rows\n") && says("\tmask, compact, convert to f16\n"), "%s", out);
    cr_expect(says("ops-omp, Made-up 9000 (yours)") && says("STREAM triad on the CPU"), "%s", out);
    cr_expect(
        says("2 of your rows are on no line, because other parameters differ: ops-omp, rows 1000, dim 64"),
        "%s", out);
}

/* Rows in the subfolder ops/ are drawn. Its files without rows cause no message. */
Test(figures, embedding_sets_of_the_reference_are_in_a_subfolder)
{
    shell(FIGURES "ops");
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("drawn ") && says("reference rows only") && !says("no rows of a run"), "%s", out);
    shell("mkdir $D/results/ops && sed 's|^ops/2,|ops/1,|' " FIXTURES
          "/ops.csv > $D/results/ops/a.csv; " FIGURES "ops");
    cr_expect(status == 2 && says("/ops/a.csv, line 2: unknown schema 'ops/1'"), "%s", out);
}

/* Each schedule has one line of measured bubbles and one line of the formula. No other figure of training
 * shows rows of pipelines. */
Test(figures, bubbles_have_lines_by_measurement_and_formula)
{
    shell("cp " FIXTURES "/pipeline.csv $D/results && " SELECT
          "pipeline learning_loss --reference $D/reference >/dev/null && cat $D/work/pipeline.vars "
          "$D/work/pipeline.dat; ls $D/work");
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("series = 4") && says("'1f1b, measured'") && says("'zb-h1, formula'") && says("2 stages"),
              "%s", out);
    cr_expect(says("\n8\t") && !says("learning_loss.vars"), "%s", out);
}

/* The figure shows the speed of all ranks together, divided by the sum of the speeds of single ranks. The
 * first two epochs are ignored. The runs of single ranks must have the same job as the run of all ranks, and
 * the same total number of threads. */
Test(figures, speeds_of_uneven_ranks_are_compared_with_single_ranks)
{
    shell("cp " FIXTURES "/balance.csv $D/results && " SELECT
          "balance --reference $D/reference >/dev/null && cat $D/work/balance.vars $D/work/balance.dat");
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("train-omp on 12 CPU threads and train-omp on 4 CPU threads, 1024 samples per step"), "%s",
              out);
    cr_expect(says("kinds = 2") && says("% of 28,") && says("\tequal") && says("\tmeasured"), "%s", out);
    shell("sed -i '/,0,4,,data/d; /,0,4,,,data/d' $D/results/balance.csv && " SELECT
          "balance --reference $D/reference; ls $D/work");
    cr_expect(says("skipped balance: none of your "), "%s", out);
}

Test(figures, without_gnuplot_the_message_names_its_package)
{
    shell("mkdir $D/bin && ln -s $(python3 -c 'import sys; print(sys.executable)') $D/bin/python3 && "
          "PATH=$D/bin " FIGURES);
    cr_expect_neq(status, 0);
    shell("PATH=$D/bin $D/bin/python3 " FIGURES);
    cr_expect_eq(status, 4);
    cr_expect(says("install it with: scripts/setup/packages.sh plots"), "%s", out);
}

Test(figures, unwritable_folders_are_reported)
{
    shell(": > $D/out; " FIGURES "batch");
    cr_expect_eq(status, 1);
    cr_expect(says("choose another folder") && !says("Traceback"), "%s", out);
    shell("mkdir $D/report.html; " REPORT "--reference $D/reference");
    cr_expect_eq(status, 1);
    cr_expect(says("report.html cannot be written") && !says("Traceback"), "%s", out);
    shell(FIGURES "--results /nowhere");
    cr_expect_eq(status, 2);
    cr_expect_str_eq(out, "figures: /nowhere: no such folder; --results must name a folder of CSV files\n");
}

Test(figures, a_full_disk_leaves_no_incomplete_figure)
{
    /* 60 blocks of 512 bytes are less than a PNG needs. Python must not cache truncated modules. */
    shell("export PYTHONDONTWRITEBYTECODE=1; ulimit -f 60; " FIGURES "batch");
    cr_expect_eq(status, 1);
    cr_expect(says("batch.png cannot be written: File too large; free some space") && !says("Traceback"),
              "%s", out);
    shell("ls -A $D/out | wc -l");
    cr_expect_eq(atoi(out), 0);
    shell("{ " FIGURES "batch >/dev/full; } 2>&1");
    cr_expect_eq(status, 1);
    cr_expect_str_eq(out, "figures: stdout cannot be written: No space left on device\n");
}
