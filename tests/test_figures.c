/* scripts/figures.py and scripts/report.py from outside: which rows they take, what they refuse, what they
 * draw.
 *
 * The rows under tests/data/figures are made up for these tests; they are no measurements. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <criterion/criterion.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define FIXTURES  "tests/data/figures"
#define REFERENCE "results/reference"

static const char *const names[] = {"vertices",          "resolution",      "batch",
                                    "training",          "ladder",          "stages",
                                    "scaling",           "monitor",         "roofline",
                                    "loading",           "loading_threads", "loading_cold",
                                    "loading_latency",   "loading_loops",   "learning_loss",
                                    "learning_accuracy", "learning_time",   "fine_tuning",
                                    "monitor_loading",   "break_even",      "training_time"};
#define OF_IMAGES   9  /* the first ones */
#define OF_LOADING  14 /* and what follows them, up to here */
#define OF_LEARNING 17 /* likewise; the others are of images and loading, and of a GPU */

/* The text of a command's stdout and stderr, and its exit status. */
static char out[1 << 16];
static int status;

static char folder[] = "/tmp/fdsl-figures-XXXXXX"; /* of this test; `D` in commands */

/* Runs a shell command in which $D is the folder of this test. */
static void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void shell(const char *format, ...)
{
    char command[4096];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(command, sizeof command - 8, format, arguments);
    va_end(arguments);
    cr_assert(length > 0 && (size_t)length < sizeof command - 8);
    FILE *pipe = popen(command, "r");
    cr_assert_not_null(pipe);
    size_t got = fread(out, 1, sizeof out - 1, pipe);
    out[got] = '\0';
    int wait_status = pclose(pipe);
    status = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
}

#define FIGURES "scripts/figures.py --work $D/work --out $D/out --results $D/results "
/* Writes the numbers alone, and what it would run. */
#define SELECT FIGURES "--commands "
#define REPORT "scripts/report.py --work $D/work --out $D/report.html --results $D/results "
#define BOTH   " 2>&1"

static void open_folder(void)
{
    shell("python3 -c '' && gnuplot --version");
    if (status != 0)
        cr_skip_test("python3 or gnuplot is not installed");
    cr_assert_not_null(mkdtemp(folder));
    setenv("D", folder, 1);
    shell("mkdir $D/results $D/reference && cp " REFERENCE "/published_*.csv $D/reference");
}

static void remove_folder(void)
{
    if (!strstr(folder, "XXXXXX"))
        shell("rm -rf '%s'", folder);
}

TestSuite(figures, .init = open_folder, .fini = remove_folder, .timeout = 120);

static bool says(const char *text)
{
    return strstr(out, text) != NULL;
}

/* ---- What is drawn ---- */

Test(figures, all_are_drawn_in_three_formats)
{
    shell("cp " FIXTURES "/* $D/results && " FIGURES BOTH);
    cr_assert_eq(status, 0, "%s", out);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        shell("cd $D/out && head -c 8 %s.png | grep -q PNG && head -c 5 %s.pdf | grep -q %%PDF- && "
              "tail -c 8 %s.pdf | grep -q EOF && test $(stat -c %%s %s.png) -gt 5000",
              names[i], names[i], names[i], names[i]);
        cr_assert_eq(status, 0, "%s", names[i]);
        shell("tests/check_page.py $D/out/%s.svg" BOTH, names[i]);
        cr_assert_eq(status, 0, "%s.svg: %s", names[i], out);
    }
    shell("ls -A $D/out | wc -l");
    cr_assert_eq(atoi(out), (int)(3 * sizeof names / sizeof *names), "temporary files are left: %s", out);
}

Test(figures, shipped_rows_are_enough)
{
    shell(FIGURES BOTH);
    cr_assert_eq(status, 0, "%s", out);
    for (size_t i = 0; i < OF_IMAGES; i++) {
        char line[64];
        snprintf(line, sizeof line, "drawn   %s/out/%s.", folder, names[i]);
        cr_assert(says(line), "%s: %s", names[i], out);
    }
}

Test(figures, some_by_name)
{
    shell(FIGURES "ladder batch" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    shell("ls $D/out | tr '\\n' ' '");
    cr_assert_str_eq(out, "batch.pdf batch.png batch.svg ladder.pdf ladder.png ladder.svg ");
}

Test(figures, missing_data_names_the_command_and_is_no_failure)
{
    shell(FIGURES "--reference $D/reference" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("skipped scaling: no data; to measure it: scripts/sweep.sh configs/sweep_scaling.tsv"),
              "%s", out);
    cr_assert(says("skipped ladder: no data; to measure it: ./fdsl-bench --variant gbase,mem,rng,bat,fused"));
    cr_assert(says("skipped stages:") && says("skipped monitor:") && says("skipped roofline:"), "%s", out);
    cr_assert(
        says("skipped break_even: no data; to measure it: scripts/break_even.sh DIR results/break_even"));
    cr_assert(says("skipped monitor_loading: no data; to measure it: scripts/break_even.sh DIR "));
    for (size_t i = OF_IMAGES; i < OF_LEARNING; i++) {
        char line[160];
        snprintf(line, sizeof line, "skipped %s: no data; to measure it: %s", names[i],
                 i < OF_LOADING
                     ? "scripts/reference_load.sh DIR results/load.csv"
                     : "./fdsl-bench --workload train --variant all --model lenet --out results/train.csv");
        cr_assert(says(line), "%s: %s", names[i], out);
    }
    cr_assert(says("skipped fine_tuning: no data; to measure it: scripts/fine_tuning.sh DIR"));
    cr_assert(says("no rows of yours; to measure them: scripts/sweep.sh configs/sweep_vertices.tsv"), "%s",
              out);
}

Test(figures, long_names_and_single_points)
{
    shell("sed \"s/Made-up Accelerator X1/A 'quoted' <\\&> $(printf 'very long %%.0s' $(seq "
          "20))name/\" " FIXTURES "/synth.csv > $D/results/a.csv; " FIGURES BOTH);
    cr_assert_eq(status, 0, "%s", out);
    shell("head -2 " FIXTURES "/synth.csv > $D/results/a.csv; " FIGURES "--reference $D/reference" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    shell("for f in $D/out/*.svg; do tests/check_page.py $f || exit 1; done" BOTH);
    cr_assert_eq(status, 0, "%s", out);
}

Test(figures, commands_are_shown)
{
    shell("mkdir $D/out; " FIGURES "--commands ladder | sh" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    shell("head -c 8 $D/out/ladder.png | grep -q PNG && test -s $D/out/ladder.pdf");
    cr_assert_eq(status, 0);
}

/* ---- Which rows are taken ---- */

/* The block of the batch figure's data with our rows of `fused`, "x median low high" a line: the first of a
 * GPU with rows of fused alone. */
static void fused_over_batch(void)
{
    shell(SELECT "--reference $D/reference batch" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    shell("sed '/^$/q' $D/work/batch.dat | cut -f 1,2 | tr '\\t\\n' '  '");
}

Test(figures, newest_row_wins)
{
    shell("cd " FIXTURES
          " && (head -1 synth.csv; grep ',fused,.*,64,512,' synth.csv; grep ',fused,.*,16,512,' synth.csv)"
          " > $D/results/b.csv && (head -1 synth.csv; grep ',fused,.*,64,512,' synth.csv |"
          " sed 's/2026-01-02/2026-01-03/; s/,0\\.000152,/,0.000076,/g') > $D/results/a.csv && cat "
          "$D/results/a.csv");
    cr_assert(says("0.000076"), "%s", out);
    fused_over_batch();
    cr_assert_str_eq(out, "16 3.5 64 1.1875  ", "the newer, though its file comes first: %s", out);
}

Test(figures, other_hosts_are_other_series)
{
    shell("cd " FIXTURES " && (head -1 synth.csv; grep ',fused,.*,\\(64\\|16\\),512,' synth.csv;"
          " grep ',fused,.*,\\(64\\|16\\),512,' synth.csv | sed s/node01/node02/) > $D/results/a.csv");
    shell(SELECT "--reference $D/reference batch && grep -c 'yours, node0[12]' $D/work/batch.vars && "
                 "grep '^series = ' $D/work/batch.vars" BOTH);
    cr_assert(says("series = 4"), "ours twice, the published points and the published code: %s", out);
}

Test(figures, rows_of_single_ranks_do_not_count)
{
    shell("cp " FIXTURES "/sweep_scaling.csv $D/results && " SELECT
          "--reference $D/reference scaling && sed '/^$/q' $D/work/scaling.dat | "
          "cut -f 1,2 | tr '\\t\\n' '  '; grep cell_text $D/work/scaling.vars" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("\n1 500000 2 991000 4 1944000  "), "%s", out);
    cr_assert(says("'99.1 %', '97.2 %', '99.1 %', '92.2 %'"), "%s", out);
}

Test(figures, other_jobs_do_not_count)
{
    /* Another output, another noise, and images found wrong. */
    shell("cd " FIXTURES " && (head -1 synth.csv; grep ',fused,.*,\\(16\\|64\\),512,' synth.csv; "
          "grep ',fused,.*,1,512,' synth.csv | sed 's/,u8,/,f16,/'; grep ',fused,.*,4,512,' synth.csv | "
          "sed 's/,2,0.002,25,/,3,0.002,25,/'; grep ',fused,.*,4,512,' synth.csv | sed 's/,yes,0$/,yes,7/') "
          "> $D/results/a.csv");
    fused_over_batch();
    cr_assert_str_eq(out, "16 3.5 64 2.375  ", "%s", out);
    shell(SELECT "--reference $D/reference batch" BOTH);
    cr_assert(says("a row of fused with wrong images is left out"), "%s", out);
}

Test(figures, unverified_rows_are_named)
{
    shell("sed 's/,yes,0$/,no,/' " FIXTURES "/synth.csv > $D/results/a.csv; " SELECT
          "ladder && grep '^array caption' $D/work/ladder.vars" BOTH);
    cr_assert(says("not verified: bat, fused, gbase, mem, rng); NVIDIA H200 (reference rows"),
              "of the device alone that they are of: %s", out);
    cr_assert(!says("All images verified"), "%s", out);
}

Test(figures, the_older_schema_is_read_too)
{
    shell(SELECT "ladder && grep -o 'NVIDIA H200 (reference rows' $D/work/ladder.vars" BOTH);
    cr_assert(says("NVIDIA H200 (reference rows"), "%s", out);
}

Test(figures, what_is_no_measurement_is_left_out)
{
    shell("cd $D/results && printf 'time_utc,host\\nnow,here\\n' > env.csv && printf "
          "'vertices,orbits\\n3,4\\n' > classes.csv"
          " && : > empty.csv && (head -1 $OLDPWD/" FIXTURES "/synth.csv | sed 's/$/,sample/') > samples.csv");
    cr_assert_eq(status, 0);
    shell(SELECT "training" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("classes.csv: no rows of a run, left out") && !says("env.csv"), "%s", out);
}

Test(figures, the_last_run_of_a_monitor_file)
{
    shell("(cat " FIXTURES "/monitor.csv; sed -n '2,9p' " FIXTURES
          "/monitor.csv) > $D/results/monitor.csv; " SELECT
          "monitor && sed '/^$/q' $D/work/monitor.dat | grep -c ." BOTH);
    cr_assert(says("\n8\n"), "%s", out);
}

/* Rows of omp by ranks and threads a rank, made from the fixture: 1000 images a second whatever the ranks. */
#define ON_CPU(ranks, threads, batch, scaling)                                               \
    "grep ',weak,.*,0.991,' " FIXTURES                                                       \
    "/sweep_scaling.csv | sed 's/,fused,Made-up Accelerator X1,[^,]*,[^,]*,2,/,omp,Made-up " \
    "9000,,," ranks ",/; s/,all,2,weak,1,2048,/,all," threads "," scaling ",," batch         \
    ",/; s/,991000,/,1000,/; s/,1,2048,/,,2048,/'; "

Test(figures, ranks_that_share_cores_are_not_joined)
{
    shell("{ head -1 " FIXTURES "/sweep_scaling.csv; " ON_CPU("2", "16", "64", "weak")
              ON_CPU("4", "16", "128", "weak") "} > $D/results/a.csv; " SELECT
                                               "--reference $D/reference scaling && cat "
                                               "$D/work/scaling.vars $D/work/scaling.dat" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("'8 threads a rank at 2, 4 at 4'") && says("array joined[1] = [0]"), "%s", out);
    cr_assert(says("\t1009.08174\t0.454285714\t") && says("\t1009.08174\t0.908571429\t"),
              "no loss is a row's own rate over its efficiency: %s", out);
}

Test(figures, ranks_of_as_many_threads_are_joined)
{
    shell("{ head -1 " FIXTURES "/sweep_scaling.csv; " ON_CPU("2", "8", "64", "weak")
              ON_CPU("4", "16", "128", "weak") "} > $D/results/a.csv; " SELECT
                                               "--reference $D/reference scaling && cat "
                                               "$D/work/scaling.vars" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("'4 threads a rank'") && says("array joined[1] = [1]"), "%s", out);
}

/* The fixture's row of omp with 1000 vertices, batch 32, with these vertices and this batch. */
#define OMP(vertices, batch)                                                                             \
    "grep ',omp,.*,32,512,1000,' " FIXTURES "/synth.csv | sed 's/,32,512,1000,/," batch ",512," vertices \
    ",/'; "

Test(figures, yours_leave_the_reference_in_its_place)
{
    shell(SELECT "vertices && grep '^series = ' $D/work/vertices.vars" BOTH);
    cr_assert(says("series = 8"), "ours and the published: %s", out);
    shell("{ head -1 " FIXTURES "/synth.csv; " OMP("300", "32")
              OMP("700", "32") "} > $D/results/a.csv; " SELECT
                               "vertices && grep '^series = ' $D/work/vertices.vars" BOTH);
    cr_assert(says("series = 9") && !says("of yours"), "%s", out);
}

Test(figures, rows_on_no_line_are_counted)
{
    shell("{ head -1 " FIXTURES "/synth.csv; " OMP("300", "32") OMP("700", "32") OMP("700", "8")
              OMP("500", "16") "} > $D/results/a.csv; " FIGURES "vertices batch" BOTH);
    cr_assert(says("vertices.{png,svg,pdf} (2 rows of yours on no line, which keeps all else fixed: omp, "
                   "batch 8, 16)"),
              "%s", out);
    cr_assert(says("batch.{png,svg,pdf} (no rows of yours; to measure them:"), "%s", out);
}

Test(figures, a_point_alone_is_drawn_without_a_line)
{
    shell("{ head -1 " FIXTURES "/synth.csv; " OMP(
        "300",
        "32") "} > $D/results/a.csv; " SELECT
              "vertices && grep '^array legend_style\\|^array legend_text' $D/work/vertices.vars" BOTH);
    cr_assert(says("'omp, batch 32'") && says(", 12.1, ") && !says("of yours"), "%s", out);
}

Test(figures, axis_of_vertices_fits_its_range)
{
    shell(SELECT "vertices && grep '^array x_tick_text' $D/work/vertices.vars" BOTH);
    cr_assert(says("['200', '400', '600', '800', '1000']"), "%s", out);
    shell("{ head -1 " FIXTURES "/synth.csv; " OMP("1000", "32") OMP("10000", "32")
              OMP("100000", "32") "} > $D/results/a.csv; " SELECT
                                  "vertices && grep '^array x_tick_text' $D/work/vertices.vars" BOTH);
    cr_assert(says("['200', '500', '1000', '2000', '5000', '10000', '20000', '50000', '100000']"), "%s", out);
}

Test(figures, ceilings_are_all_named)
{
    /* A second GPU near the first, and a third ceiling of memory. */
    shell("cp " FIXTURES "/*.csv " FIXTURES "/env.json $D/results; " SELECT
          "roofline && tail -9 $D/work/roofline.dat; grep slope_text $D/work/roofline.vars" BOTH);
    cr_assert(says("Made-up Accelerator X1: 40 T/s\t1\n") && says("NVIDIA H200: 33.5 T/s\t-1\n"), "%s", out);
    cr_assert(says("Intel Xeon, 1 thread: ") && says("Intel Xeon, 16 threads: "), "%s", out);
    cr_assert(says("['4.81 TB/s', '3 TB/s']"), "%s", out);
}

Test(figures, files_from_elsewhere)
{
    shell("{ printf '\\357\\273\\277'; cat " FIXTURES "/synth.csv; } > $D/results/a.csv; head -1 " FIXTURES
          "/synth.csv > $D/results/b.csv; " SELECT "--reference $D/reference ladder" BOTH
          "&& cat $D/work/ladder.vars");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("Made-up Accelerator X1 (rows of yours"), "a byte-order mark is no part of the header: %s",
              out);
    cr_assert(says("b.csv: a header without rows"), "%s", out);
}

/* ---- Loading ---- */

/* Draws figures of loading from the fixture alone, through a filter of its lines, and shows what they are of.
 */
#define LOADING(filter, names)                                              \
    "{ { " filter "; } < " FIXTURES "/load.csv > $D/results/a.csv; " SELECT \
    "--reference $D/reference " names " && cat $D/work/loading*.vars $D/work/loading*.dat; }" BOTH

Test(figures, loading_tells_orders_apart)
{
    shell(LOADING("grep '^schema\\|,shards-mmap,'", "loading"));
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("'copying alone', 'samples in order', 'shards-mmap', 'samples shuffled', 'shards-mmap'"),
              "%s", out);
    cr_assert(says("array series_style[3] = [91, 15, 55]"), "%s", out);
    cr_assert(says("\n\n2\t0.14\t0.1302\t0.1512\n16\t0.6\t0.558\t0.648\n\n"), "in order: %s", out);
    cr_assert(says("\n\n2\t0.25\t0.2325\t0.27\n16\t1.3\t1.209\t1.404\n192.125\t7\t6.51\t7.56\n"), "%s", out);
    cr_assert(says("2\t0.064\t"), "copies of 2 KiB at 32 GB/s: %s", out);
}

Test(figures, other_loaders_are_on_the_device_of_their_host)
{
    shell(LOADING("cat", "loading loading_threads") "; grep -c '^NVIDIA\\|unnamed' $D/work/loading*.vars");
    cr_assert(says("'torch-shards'") && says("'torch-files'") && !says("unnamed"), "%s", out);
    cr_assert(says("\n1\t1.09226667e+09\t") && says("\n2\t297890909\t"), "torch-files over workers: %s", out);
    shell(LOADING("grep '^schema\\|,torch-'", "loading"));
    cr_assert_eq(status, 0, "a host without rows of ours: %s", out);
    cr_assert(says("'unnamed device'") && says("revision not named"), "%s", out);
}

Test(figures, other_loading_does_not_count)
{
    /* Files that were decoded; shards with samples left out, or wrong. Columns: variant, decode, skipped,
     * wrong. */
    shell(LOADING("awk -F, -v OFS=, 'NR > 1 && $7 ~ /^files/ { $25 = 1 } $7 == \"shards\" { $52 = 3 } "
                  "$7 == \"shards-uring\" { $74 = 2 } !/torch/'",
                  "loading"));
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("a row of shards-uring with wrong samples is left out"), "%s", out);
    cr_assert(says("'copying alone', 'samples in order', 'shards-mmap', 'samples shuffled', 'shards-mmap']"),
              "%s", out);
}

Test(figures, cold_bars_stand_beside_warm_ones_of_their_size)
{
    shell(LOADING("cat", "loading_cold"));
    cr_assert(says("\n0.8\t60\t55.8\t64.8\t60.0 µs\t× 1\n"), "%s", out);
    cr_assert(says("\n1.2\t4.2\t3.906\t4.536\t4.20 µs\t× 1\n"), "%s", out);
    cr_assert(says("5.2\t0.2\t0.186\t0.216\t200 ns\t× 21\n"), "%s", out);
    cr_assert(says("1024 KiB cold, 256 KiB warm"), "%s", out);
    static const char *const partly[] = {",cold,", ",shards,.*,cold,", ",shards,.*\\|files-uring,.*,cold,"};
    for (size_t i = 0; i < sizeof partly / sizeof *partly; i++) {
        shell("grep '^schema\\|%s' " FIXTURES "/load.csv > $D/results/a.csv; " FIGURES
              "--reference $D/reference loading_cold" BOTH,
              partly[i]);
        cr_assert(status == 0 && says("drawn   "), "%s", out);
    }
}

Test(figures, loops_are_of_the_video_set)
{
    shell(LOADING("cat", "loading_loops"));
    cr_assert(says("500 loops") && says("1\t11\t10.23\t11.88\t11.0 µs\t× 1\n"), "%s", out);
    shell(LOADING("grep -v video", "loading_loops"));
    cr_assert(says("skipped loading_loops: no data"), "%s", out);
}

Test(figures, threads_keep_to_one_size)
{
    shell(LOADING("grep -v torch", "loading_threads"));
    cr_assert(says("'yours, 16 KiB a sample'"), "%s", out);
    cr_assert(!says("\n1\t1.46285714e+10\t"), "2 KiB of shards-omp: %s", out);
    cr_assert(says("\n1\t2.92571429e+09\t") && says("\n4\t1.17028571e+10\t"), "%s", out);
}

/* ---- Generate or read ---- */

Test(figures, break_even_has_a_line_a_source_under_what_a_step_lets_through)
{
    shell("cp " FIXTURES "/break_even_*.csv $D/results; " SELECT
          "break_even && cat $D/work/break_even.vars $D/work/break_even.dat" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("series = 13\n"), "%s", out);
    cr_assert(says("\n0.5\t512000\n") && says("\n20\t12800\n"), "batch over step: %s", out);
    cr_assert(says("\n0.5\t509960\n1\t254980\n"), "fused: %s", out);
    cr_assert(says("'read, page cache cold'") && says("'shards-omp png'"), "%s", out);
    cr_assert(says("Made-up GPU 9000, Made-up 9000 (rows of yours, host node02"), "%s", out);
}

Test(figures, break_even_says_which_wins)
{
    shell("scripts/break_even.py " FIXTURES "/break_even_synth.csv " FIXTURES "/break_even_load.csv" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("  no step  gpu-resident (warm)\n"), "%s", out);
    cr_assert(says("   0.5 ms  fused, gpu-resident (warm), shards-gpu (warm)\n"), "%s", out);
    cr_assert(says("generating with fused against reading"), "%s", out);
    cr_assert(says("shards-omp, warm             generating wins below a step of 0.95 ms, and from there on"),
              "%s", out);
    cr_assert(
        says("files-omp, cold              generating wins at every step (56.9 times as fast at 0.5 ms"),
        "%s", out);
    cr_assert(says("gpu-resident, warm           equal at every step"), "%s", out);
    shell("grep -v ,fused, " FIXTURES
          "/break_even_synth.csv | grep -v ,bat, > $D/a.csv; scripts/break_even.py $D/a.csv " FIXTURES
          "/break_even_load.csv" BOTH);
    cr_assert(says("generating with omp") &&
                  says("shards-omp, warm             reading wins below a step of"),
              "%s", out);
    cr_assert(says("shards-omp png, warm         reading wins below a step of 19 ms"), "%s", out);
}

/* A step takes as long on a short batch: 156 images a step would keep a reader that never waits under the
 * line. */
Test(figures, break_even_takes_whole_batches_alone_and_tells_what_idles)
{
    shell("awk -F , -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } $at[\"compute_ms\"] == 0.5 && "
          "$at[\"cache\"] == \"warm\" && $at[\"variant\"] == \"files-omp\" { $at[\"steps\"] = 6400 } "
          "$at[\"compute_ms\"] == 5 && $at[\"variant\"] == \"gpu-resident\" { $at[\"utilisation\"] = 0.7 } "
          "1' " FIXTURES "/break_even_load.csv > $D/a.csv; scripts/break_even.py " FIXTURES
          "/break_even_synth.csv $D/a.csv" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("files-omp beside 0.5 ms is left out: its steps had 156 images, not 256"), "%s", out);
    cr_assert(says("(1.71 times as fast at 1 ms, "), "%s", out);
    cr_assert(says("50,996  0.4 % (30)"), "%s", out);
    shell("cp $D/a.csv $D/a_loaders.csv; scripts/break_even.py " FIXTURES
          "/break_even_synth.csv $D/a_loaders.csv" BOTH);
    cr_assert(status == 2 && says("no rows of generating and of reading"), "%s", out);
}

Test(figures, break_even_needs_both_halves)
{
    shell("scripts/break_even.py " FIXTURES "/break_even_synth.csv " FIXTURES "/break_even_synth.csv" BOTH);
    cr_assert(status == 2 && says("no rows of generating and of reading"), "%s", out);
    shell("scripts/break_even.py " FIXTURES "/monitor.csv " FIXTURES "/break_even_load.csv" BOTH);
    cr_assert(status == 2 && says("no rows of a run"), "%s", out);
    shell("scripts/break_even.py nowhere.csv" BOTH);
    cr_assert_eq(status, 2, "%s", out);
}

Test(figures, rows_beside_a_step_are_of_no_other_figure)
{
    shell("awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == \"compute_ms\") c = i } NR == 1 || "
          "$c' " FIXTURES "/break_even_load.csv > $D/results/a.csv; " SELECT
          "--reference $D/reference loading_threads" BOTH);
    cr_assert(says("skipped loading_threads: no data"), "%s", out);
}

Test(figures, loaders_over_time_are_the_newest_timed_runs)
{
    shell("cp " FIXTURES "/monitor_loading.csv " FIXTURES "/break_even_load.csv $D/results; " SELECT
          "monitor_loading && cat $D/work/monitor_loading.vars $D/work/monitor_loading.dat" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("series = 2\n") && says("'files-gpu'") && says("'shards-gpu'"), "%s", out);
    cr_assert(says("x_high = 11.5\n"), "24 looks, 0.5 s apart: %s", out);
    cr_assert(says("% of the time'"), "the row of the same run tells the wait: %s", out);
    shell("grep -v shards-gpu " FIXTURES "/monitor_loading.csv > $D/results/monitor_loading.csv; " SELECT
          "monitor_loading && cat $D/work/monitor_loading.vars" BOTH);
    cr_assert(says("(reference, host"), "without shards-gpu the user's are no pair: %s", out);
}

/* ---- What is refused ---- */

static const struct {
    const char *make; /* a command that writes its file to stdout, from the fixture "$F" */
    const char *says;
} refused[] = {
    {"head -c -20 $F", "bad.csv, line 35: 59 fields where the header has 66"},
    {"head -c -1 $F", "this last row has no end and may be torn; end or delete it"},
    {"head -1 $F | head -c 100", "bad.csv, line 1: this last row has no end"},
    {"head -3 $F | sed '3s/,[^,]*$//'",
     "bad.csv, line 3: 65 fields where the header has 66; repair or delete this row"},
    {"head -3 $F | sed '3s,^synth/3,synth/9,'",
     "bad.csv, line 3: unknown schema 'synth/9' (known: synth/2, synth/3, synth/4"},
    {"head -3 $F | sed '3s,^synth/3,synth/2,'", "bad.csv, line 3: schema 'synth/2' after rows of 'synth/3'"},
    {"head -3 $F | sed '1s/time_median_s/median/'",
     "bad.csv, line 1: rows of synth/3 have a column 'time_median_s'"},
    {"head -3 $F; head -3 $F", "bad.csv, line 4: a second header; delete this line"},
    {"head -3 $F; head -3 " FIXTURES "/monitor.csv",
     "bad.csv, line 4: a second header; its columns are others"},
    {"head -3 $F | sed '3s/,0.000576,/,fast,/'", "bad.csv, line 3: time_median_s is 'fast', no number"},
    {"head -3 $F | sed '3s/,0.000576,/,-1,/'",
     "bad.csv, line 3: time_median_s is -1; repair or delete this row"},
    {"head -3 $F | sed '3s/node01/\"node01/'", "bad.csv, line 3: "},
    {"head -3 $F | sed '3s/node01/\\xff/'", "bad.csv, line 3: not UTF-8 text"},
    {"head -3 $F | sed '3s/node01/\\x00/'", "bad.csv, line 3: a NUL byte"},
    {"sed '1s/,sample_bytes,/,bytes,/' " FIXTURES "/load.csv",
     "bad.csv, line 1: rows of load/3 have a column 'sample_bytes'"},
    {"sed '2s/,2048,0,/,0,0,/' " FIXTURES "/load.csv", "bad.csv, line 2: sample_bytes is 0; repair"},
    {"sed '2s/,1.9e-06,/,soon,/' " FIXTURES "/load.csv", "bad.csv, line 2: open_p50_s is 'soon', no number"},
    {"sed 's/,100,/,nan,/2' " FIXTURES "/monitor.csv | sed '3s/^\\(.*\\),0.100,/\\1,inf,/'",
     "bad.csv, line 3: time_s is 'inf'"},
};

Test(figures, bad_files_are_refused)
{
    setenv("F", FIXTURES "/synth.csv", 1);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        shell("{ %s; } > $D/results/bad.csv; " FIGURES BOTH, refused[i].make);
        cr_expect_eq(status, 2, "%s: %d, %s", refused[i].make, status, out);
        cr_expect(says(refused[i].says), "%s: %s", refused[i].make, out);
        cr_expect(strchr(out, '\n') == strrchr(out, '\n') && !says("Traceback"), "one line: %s", out);
        shell("ls $D/out 2>/dev/null | wc -l");
        cr_expect_eq(atoi(out), 0, "nothing is drawn from what is left");
    }
    shell("printf '{' > $D/results/env.json; rm $D/results/bad.csv; " FIGURES BOTH);
    cr_expect_eq(status, 2);
    cr_expect(says("write it again with: ./fdsl-bench --env --format json"), "%s", out);
}

Test(figures, usage)
{
    shell(FIGURES "lader" BOTH);
    cr_expect_eq(status, 2);
    cr_expect_str_eq(out, "figures: no figure 'lader'; did you mean ladder?\n");
    shell(FIGURES "--colour" BOTH);
    cr_expect_eq(status, 2);
    cr_expect(says("--colour") && !says("Traceback"), "%s", out);
    shell(FIGURES "--help && " FIGURES "--list && " REPORT "--help");
    cr_expect_eq(status, 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        cr_expect(says(names[i]), "%s", out);
}

Test(figures, without_gnuplot)
{
    shell("mkdir $D/bin && ln -s $(python3 -c 'import sys; print(sys.executable)') $D/bin/python3 && "
          "PATH=$D/bin " FIGURES BOTH);
    cr_expect_neq(status, 0);
    shell("PATH=$D/bin $D/bin/python3 " FIGURES BOTH);
    cr_expect_eq(status, 4);
    cr_expect(says("install it with: scripts/setup.sh plots"), "%s", out);
}

Test(figures, folders_that_cannot_be_written)
{
    shell(": > $D/out; " FIGURES "batch" BOTH);
    cr_expect_eq(status, 1);
    cr_expect(says("name another folder") && !says("Traceback"), "%s", out);
    shell("mkdir $D/report.html; " REPORT BOTH);
    cr_expect_eq(status, 1);
    cr_expect(says("report.html cannot be written") && !says("Traceback"), "%s", out);
    shell(FIGURES "--results /nowhere" BOTH);
    cr_expect_eq(status, 2);
    cr_expect_str_eq(out, "figures: /nowhere: no such folder; --results names one with CSV files\n");
}

Test(figures, no_torn_figure_where_there_is_no_room)
{
    shell("ulimit -f 60; " FIGURES "batch" BOTH); /* in blocks of 512 bytes: less than a PNG takes */
    cr_expect_eq(status, 1);
    cr_expect(says("batch.png cannot be written: File too large; free some room") && !says("Traceback"), "%s",
              out);
    shell("ls -A $D/out | wc -l");
    cr_expect_eq(atoi(out), 0);
    shell("{ " FIGURES "batch >/dev/full; } 2>&1");
    cr_expect_eq(status, 1);
    cr_expect_str_eq(out, "figures: stdout cannot be written: No space left on device\n");
}

/* ---- Learning ---- */

/* A line a variant, of the job that most of them have, each epoch's newest row; inference may lie beside. */
Test(figures, learning_takes_one_job)
{
    shell("cp " FIXTURES "/train.csv $D/results && cd $D/results && head -n 1 train.csv > other.csv && "
          "sed -n 2p train.csv | sed 's/,lenet,64,/,lenet,32,/; s/1\\.44690[0-9]*/7.5/' >> other.csv");
    shell(SELECT "learning_loss >/dev/null && cat $D/work/learning_loss.vars $D/work/learning_loss.dat" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("series = 2") && says("train-naive") && says("torch-cpu") &&
                  says("batch 64, adam at 0.001"),
              "%s", out);
    cr_expect(!says("\t7.5"), "%s", out);
    /* Rows from before there were feeds are of samples that are stored; one constant batch teaches nothing.
     */
    shell(
        "cd $D/results && for feed in stored constant; do for variant in train-omp train-cuda train-graph; "
        "do "
        "awk -F, -v OFS=, -v feed=$feed -v variant=$variant 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; "
        "$at[\"label_smoothing\"] = \"label_smoothing,feed,fresh\"; print; next } "
        "$at[\"variant\"] == \"train-naive\" { $1 = \"train/2\"; $at[\"variant\"] = variant; "
        "$at[\"label_smoothing\"] = $at[\"label_smoothing\"] \",\" feed \",\"; print }' train.csv "
        "> $feed-$variant.csv; done; done; rm stored-train-cuda.csv stored-train-graph.csv");
    shell(SELECT "learning_loss >/dev/null && cat $D/work/learning_loss.vars" BOTH);
    cr_expect(says("series = 3") && says("train-omp") && says("torch-cpu") && !says("train-graph"), "%s",
              out);
    shell("sed -i 's|^train/1|train/9|' $D/results/other.csv && " SELECT "learning_loss" BOTH);
    cr_expect_eq(status, 2);
    cr_expect(says("other.csv, line 2: unknown schema 'train/9'"), "%s", out);
}

/* A line a size of the training set and a beginning, over the seeds; a size that was trained one way alone
 * has none. */
Test(figures, fine_tuning_beside_scratch)
{
    shell("cp " FIXTURES
          "/fine_tuning.csv $D/results && cd $D/results && head -n 1 fine_tuning.csv > other.csv && "
          "sed -n 2p fine_tuning.csv | sed 's/,digits,100,/,digits,50,/; "
          "s/,5,7850,100,200,/,5,7850,50,200,/' >> other.csv");
    shell(SELECT "fine_tuning >/dev/null && cat $D/work/fine_tuning.vars $D/work/fine_tuning.dat" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("series = 4") && says("'100 samples'") && says("'400 samples'") && !says("'50 samples'"),
              "%s", out);
    cr_expect(says("'pre-trained'") && says("'from scratch'") &&
                  says("Medians and extremes of 1 seed a line."),
              "%s", out);
}

/* The same images, live and loaded; the published points have ours beside them. Rows of another job, or of
 * what was never loaded, are on no line. */
Test(figures, training_live_against_loaded)
{
    shell("cp " FIXTURES
          "/live_training.csv $D/results && cd $D/results && head -n 1 live_training.csv > other.csv && "
          "sed -n 2p live_training.csv | sed 's/,lenet,32,/,lenet,64,/; s/2026-11-21/2026-11-22/' >> "
          "other.csv");
    shell(SELECT
          "training_time training >/dev/null && cat $D/work/training_time.vars $D/work/training_time.dat "
          "$D/work/training.vars" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("series = 4") && says("generated live") && says("one constant batch") &&
                  says("loaded from shards") && says("loaded from files"),
              "%s", out);
    cr_expect(says("lenet with 943836 parameters, batch 32") &&
                  says("the losses are the same in every digit"),
              "%s", out);
    cr_expect(says("\n0.64\t") && says("\n1.92\t"), "%s", out); /* thousands */
    cr_expect(says("ours, another network") && says("series = 7"), "%s", out);
    shell("sed -i '/shards/s/,2\\.16870378,/,2.16870379,/' $D/results/live_training.csv && " SELECT
          "training_time >/dev/null && cat $D/work/training_time.vars" BOTH);
    cr_expect(status == 0 && !says("the same in every digit"), "%s", out);
    shell("sed -i '/,live,/d' $D/results/live_training.csv && " SELECT
          "--reference $D/reference training_time" BOTH);
    cr_expect(says("skipped training_time: no data; to measure it: scripts/live_training.sh DIR"), "%s", out);
}

/* What is of the reference alone says so; rows of the user's that are half of what a figure needs are said to
 * be that. */
Test(figures, training_without_rows_of_yours)
{
    shell("cp " FIXTURES "/live_training.csv " FIXTURES "/fine_tuning.csv $D/reference && python3 -c '"
          "import csv, sys\n"
          "rows = list(csv.DictReader(open(sys.argv[1])))\n"
          "out = csv.DictWriter(open(sys.argv[2], \"w\"), rows[0])\n"
          "out.writeheader()\n"
          "out.writerows([row for row in rows if not row[\"init\"]][:3])' " FIXTURES
          "/fine_tuning.csv $D/results/half.csv && " FIGURES
          "--reference $D/reference training training_time fine_tuning" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_expect(says("training.{png,svg,pdf} (no rows of yours; to measure them: scripts/live_training.sh DIR"),
              "%s", out);
    cr_expect(says("training_time.{png,svg,pdf} (no rows of yours; to measure them:"), "%s", out);
    cr_expect(says("fine_tuning.{png,svg,pdf} (3 rows of yours, of which none are both pre-trained and from"),
              "%s", out);
}

/* ---- The report ---- */

Test(figures, report_stands_alone)
{
    shell("cp " FIXTURES "/* $D/results && sed -i 's/X1/<X\\&1>/' $D/results/*.csv && " REPORT
          "&& tests/check_page.py $D/report.html" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    shell("grep -c '<svg' $D/report.html");
    cr_assert_eq(atoi(out), (int)(sizeof names / sizeof *names));
    shell("grep -o '<pre>mpirun [^<]* 4 [^<]*\\|<dd>128.0 GiB' $D/report.html");
    cr_assert(
        says(
            "mpirun --bind-to none -n 4 ./fdsl-bench --variant fused --batch 1024 --scaling weak --verify") &&
            says("--scaling strong") && says("128.0 GiB"),
        "%s", out);
}

Test(figures, report_repeats_threads)
{
    shell("{ head -1 " FIXTURES "/sweep_scaling.csv; " ON_CPU("2", "16", "64", "weak")
              ON_CPU("2", "5", "64", "strong") "} > $D/results/a.csv; " REPORT
                                               "--reference $D/reference; grep -o '<pre>mpirun "
                                               "[^<]*' $D/report.html" BOTH);
    cr_assert(
        says("mpirun --bind-to none -n 2 ./fdsl-bench --variant omp --scaling weak --threads 8 --verify\n"),
        "%s", out);
    cr_assert(says("./fdsl-bench --variant omp --batch 64 --scaling strong --verify\n"),
              "parts that differ are what they are by default: %s", out);
}

Test(figures, report_without_rows)
{
    shell(REPORT "--reference $D/reference && tests/check_page.py $D/report.html" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    shell("grep -c 'to measure it\\|To measure it' $D/report.html");
    cr_assert_eq(atoi(out), 17, "%s", out);
}

Test(figures, report_of_loading)
{
    shell("cp " FIXTURES "/load.csv $D/results && " REPORT
          "--reference $D/reference && tests/check_page.py $D/report.html && grep -o '<h3>[0-9]* "
          "samples[^<]*\\|"
          "<pre>[^<]*' $D/report.html" BOTH);
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("<pre>./fdsl-bench --variant shards,shards-mmap,shards-uring,shards-omp --data "
                   "data/2048-shards --shuffle 0 --threads 1 --verify\n"),
              "%s", out);
    cr_assert(says("--variant files,files-uring --data data/2048-files --cache cold --verify\n"), "%s", out);
    cr_assert(says("<pre>scripts/compare_loading.py --files data/16384-files --batch 32 --workers 2\n"), "%s",
              out);
    cr_assert(says("1000 samples of 192.1 KiB, 10 shards, samples shuffled, cache warm, batch 32\n"), "%s",
              out);
    /* Columns: ranks, rank, scaling, batch; the last of all ranks is their sum. */
    shell("awk -F, -v OFS=, '$7 == \"shards-omp\" && $13 == 2 { $11 = 2; $12 = \"all\"; $14 = \"strong\"; "
          "$17 = "
          "128 } NR == 1 || $17 == 128' " FIXTURES "/load.csv > $D/results/load.csv && " REPORT
          "--reference $D/reference && grep -o '<pre>mpirun[^<]*' $D/report.html | head -1" BOTH);
    cr_assert(says("-n 2 ./fdsl-bench --variant shards-omp --data data/2048-shards --batch 64 --shuffle 0 "
                   "--scaling strong --threads 1 --verify\n"),
              "%s", out);
}

#define TINY " --warmups 0 --warmup-time 0 --min-samples 1 --min-time 0 --max-time 0"
#define ODD                                                                                               \
    " --res 40 --batch 3 --vertices 20 --orbits 4 --formula visualatom --seed 7 --instance 5 --noise 1.5" \
    " --line-width 0.25 --radius 3 --oval-x 1.1 --oval-y 1.7 --freq1 3 --freq2 6"

/* The parameters of all rows, without what differs from run to run. */
#define PARAMETERS "cut -d, -f 7,11- %s | sed 's/,u8,\\|,f16,/&\\n/' | grep -v '^[^s]*e-'"

Test(figures, commands_repeat_their_rows)
{
    static const char *const jobs[] = {
        ODD, " --res 24 --batch 4 --classes 3 --preset visualatom",
        ODD " --output f16 --channels 3 --layout nhwc --out-res 20 --fit crop --mean 0.5"};
    const char *program = getenv("FDSL_BENCH");
    setenv("B", program ? program : "./fdsl-bench", 1);
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        const char *variant = i == 2 ? "omp" : "naive";
        shell("rm -f $D/results/a.csv; \"$B\" --variant %s %s" TINY " --out $D/results/a.csv" BOTH, variant,
              jobs[i]);
        if (status == 2 || status == 4) /* a build without omp, or without presets */
            continue;
        cr_assert_eq(status, 0, "%s", out);
        shell(REPORT "&& grep -o '<pre>./fdsl-bench [^<]*' $D/report.html | head -9 | grep -m 1 -- '%s' | "
                     "sed 's/^<pre>..fdsl-bench//; s/&#x27;/'\\''/g' > $D/command; "
                     "eval \"$B $(cat $D/command)" TINY " --out $D/b.csv\"; cat $D/command" BOTH,
              i == 1 ? "--classes 3" : "--res 40");
        cr_assert_eq(status, 0, "%s", out);
        shell("python3 -c 'import csv, sys\n"
              "a, b = (list(csv.DictReader(open(path)))[-1] for path in sys.argv[1:])\n"
              "columns = list(a)\n"
              "wrong = [c for c in columns[columns.index(\"batch\"):columns.index(\"warmups\")] if a[c] != "
              "b[c]]\n"
              "print(wrong)\nsys.exit(bool(wrong))' $D/results/a.csv $D/b.csv; s=$?; rm -f $D/b.csv; exit "
              "$s" BOTH);
        cr_assert_eq(status, 0, "columns that differ: %s", out);
    }
}

Test(figures, commands_repeat_their_rows_of_loading)
{
    static const char *const jobs[] = {"shards --shuffle 0 --batch 3 --seed 5 --cache any --decode",
                                       "shards-mmap --epochs 2 --prefetch 1 --augment --shift 2 --mean 0.5",
                                       "shards-omp --threads 2 --on-error skip"};
    const char *program = getenv("FDSL_BENCH");
    setenv("B", program ? program : "./fdsl-bench", 1);
    shell("\"$B\" --prepare $D/set --layout shards --shards 2 --samples 20 --sample-shape 3,4,4 --dtype "
          "u8" BOTH);
    if (status == 4) /* a build that cannot */
        cr_skip_test("%s", out);
    cr_assert_eq(status, 0, "%s", out);
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        shell("rm -f $D/results/a.csv $D/b.csv; \"$B\" --data $D/set --variant %s" TINY
              " --out $D/results/a.csv" BOTH,
              jobs[i]);
        if (status == 4) /* without omp, say */
            continue;
        cr_assert_eq(status, 0, "%s", out);
        shell(REPORT
              "--reference $D/reference && grep -o '<pre>./fdsl-bench [^<]*--data [^<]*' $D/report.html |"
              " sed 's/^<pre>..fdsl-bench//' > $D/command; "
              "eval \"$B $(cat $D/command)" TINY " --out $D/b.csv\"; cat $D/command" BOTH);
        cr_assert_eq(status, 0, "%s", out);
        shell("python3 -c 'import csv, sys\n"
              "a, b = (list(csv.DictReader(open(path)))[-1] for path in sys.argv[1:])\n"
              "columns = list(a)\n"
              "columns = columns[columns.index(\"data\"):columns.index(\"warmups\")] + [\"variant\", "
              "\"threads\", \"cache\"]\n"
              "wrong = [c for c in columns if a[c] != b[c]]\n"
              "print(wrong)\nsys.exit(bool(wrong))' $D/results/a.csv $D/b.csv" BOTH);
        cr_assert_eq(status, 0, "columns that differ: %s", out);
    }
}
