/* Tests which rows the figures of loading and of break-even use. */
#include "figures.h"

TestSuite(figures_load, .init = open_folder, .fini = remove_folder, .timeout = 120);

/* ---- Loading ---- */

/* Draws figures of loading from the filtered lines of the fixture, and prints their data. */
#define LOADING(filter, names)                                              \
    "{ { " filter "; } < " FIXTURES "/load.csv > $D/results/a.csv; " SELECT \
    "--reference $D/reference " names " && cat $D/work/loading*.vars $D/work/loading*.dat; }"

Test(figures_load, each_order_has_its_own_lines)
{
    SHELL(0, LOADING("grep '^schema\\|,shards-mmap,'", "loading"));
    EXPECT_OUT("'memcpy alone', 'samples in order', 'shards-mmap', 'samples shuffled', 'shards-mmap'");
    EXPECT_OUT("array series_style[3] = [91, 15, 55]");
    EXPECT_OUT("panels = 2\n", "array panel_title[2] = ['samples in order', 'samples shuffled']",
               "array series_panel[3] = [0, 1, 2]", "array series_shift[3] = [1, 1, 1]");
    cr_assert(says("\n\n2\t0.14\t0.1302\t0.1512\n16\t0.6\t0.558\t0.648\n\n"),
              "the line of samples in order is wrong: %s", out);
    EXPECT_OUT("\n\n2\t0.25\t0.2325\t0.27\n16\t1.3\t1.209\t1.404\n192.125\t7\t6.51\t7.56\n");
    cr_assert(says("2\t0.064\t"), "not copies of 2 KiB at 32 GB/s: %s", out);
}

/* Points of one size are shifted sideways by variant; the ring of an unsettled point is shifted, too. */
Test(figures_load, points_of_one_size_are_shifted)
{
    SHELL(0, LOADING("awk -F, -v OFS=, '/,shards,.*,32,0,0,1,/ { $45 = \"no\" } NR == 1 || "
                     "/,shards(-mmap)?,.*,32,0,0,1,/'",
                     "loading"));
    EXPECT_OUT("panels = 1\n", "array series_panel[3] = [0, 1, 1]", "\narray series_shift[3] = [1, 1.04608");
    cr_expect(says(", 0.9559") || says("0.9559"), "%s", out);
    EXPECT_OUT("\t1\t1.04608");
    /* The outermost shifted point, of 2 KiB, has the margin of an unshifted one. */
    EXPECT_OUT("x_low = 1.47");
}

Test(figures_load, other_loaders_have_the_device_of_their_host)
{
    shell(LOADING("cat", "loading loading_threads") "; grep -c '^NVIDIA\\|unnamed' $D/work/loading*.vars");
    cr_assert(says("'torch-shards'") && says("'torch-files'") && !says("unnamed"), "%s", out);
    cr_assert(says("\n1\t1.09226667e+09\t") && says("\n2\t297890909\t"),
              "the line of torch-files over workers is wrong: %s", out);
    shell(LOADING("grep '^schema\\|,torch-'", "loading"));
    cr_assert_eq(status, 0, "rows of other loaders must be drawn even if their device is unknown: %s", out);
    EXPECT_OUT("'unnamed device'", "revision unknown");
    shell("sed 's/Made-up(R) Processor 9000/Newer/; s/,2026-/,2027-/; /,torch-/d' " FIXTURES
          "/load.csv > $D/results/newer.csv; " LOADING(
              "cat", "loading") " > /dev/null; grep -o \"legend_text.*\" $D/work/loading.vars");
    cr_assert(says("'Newer'") && strstr(out, "'torch-shards'") > strstr(out, "'Made-up"),
              "other loaders must be drawn under the device of their file, not of a newer file: %s", out);
}

/* The user has one row. The reference has rows of a device of the same name, and newer rows of another
 * device. */
Test(figures_load, one_row_of_yours_does_not_replace_reference_lines)
{
    SHELL(0,
          "cp " FIXTURES
          "/load.csv $D/reference && sed '1!{s/Made-up(R) Processor 9000/Newer/; s/,2026-/,2027-/}' " FIXTURES
          "/load.csv > $D/reference/newer.csv; grep -m 2 '^schema\\|,shards-mmap,.*,warm,' " FIXTURES
          "/load.csv > "
          "$D/results/a.csv; " SELECT
          "--reference $D/reference loading && cat $D/work/loading.vars && " FIGURES
          "--reference $D/reference loading");
    cr_assert(says("'yours', 'points with a cross', 'memcpy alone'") ||
                  says("'yours, node01', 'points with a cross'"),
              "%s", out);
    cr_assert(says("'shards-mmap', 'shards-uring'") && !says("'Newer'"), "%s", out);
    EXPECT_OUT("array series_crossed[", "] = [1, 1, 0, 0", "drawn   ");
    shell("rm $D/reference/*load.csv $D/reference/newer.csv; " SELECT
          "--reference $D/reference loading && cat "
          "$D/work/loading.vars");
    cr_assert(says("x_tick_text[3] = ['1', '2', '4']"), "not the ticks of a single size: %s", out);
}

Test(figures_load, rows_of_decoded_or_wrong_samples_are_ignored)
{
    /* Turns rows into rows of decoded files, and of shards with skipped or wrong samples. Column 7 is the
     * variant. */
    SHELL(0, LOADING("awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; print; next } "
                     "$7 ~ /^files/ { $at[\"decode\"] = 1 } $7 == \"shards\" { $at[\"skipped\"] = 3 } "
                     "$7 == \"shards-uring\" { $at[\"wrong\"] = 2 } !/torch/'",
                     "loading"));
    EXPECT_OUT("a row of shards-uring with wrong samples is skipped");
    EXPECT_OUT("'memcpy alone', 'samples in order', 'shards-mmap', 'samples shuffled', 'shards-mmap']");
}

Test(figures_load, cold_bars_are_next_to_warm_bars_of_their_size)
{
    shell(LOADING("cat", "loading_cold"));
    EXPECT_OUT("\n0.8\t60\t55.8\t64.8\t60.0 µs\t× 1\n", "\n1.2\t4.2\t3.906\t4.536\t4.20 µs\t× 1\n");
    EXPECT_OUT("5.2\t0.2\t0.186\t0.216\t200 ns\t× 21\n", "1024 KiB cold, 256 KiB warm");
    static const char *const partly[] = {",cold,", ",shards,.*,cold,", ",shards,.*\\|files-uring,.*,cold,"};
    for (size_t i = 0; i < sizeof partly / sizeof *partly; i++) {
        SHELL_PRINTS(0, "drawn   ",
                     "grep '^schema\\|%s' " FIXTURES "/load.csv > $D/results/a.csv; " FIGURES
                     "--reference $D/reference loading_cold",
                     partly[i]);
    }
}

/* The user's machine has one sample size; the reference machines have two. Only the user's size is drawn. */
Test(figures_load, one_axis_has_one_size)
{
    SHELL(
        0,
        "grep '^schema\\|data/2048-' " FIXTURES "/load.csv > $D/results/a.csv; "
        "sed -n '1p; /data\\/2048-/{s/,node01,/,node02,/; s/Processor 9000/Elsewhere/; p; s/2048-/131072-/; "
        "s/,2048,/,131072,/; p; s/,node02,/,node03,/; p; s/,node03,/,node04,/; p}' " FIXTURES
        "/load.csv > $D/reference/b.csv; " SELECT
        "--reference $D/reference loading_cold loading_latency loading_threads > /dev/null; "
        "cat $D/work/loading_cold.vars $D/work/loading_cold.dat; "
        "grep -ho '[0-9.]* KiB per sample' $D/work/loading_*.vars | sort -u");
    cr_assert(says("Samples of 2 KiB") && says("\n2 KiB per sample\n") && !says("128 KiB"), "%s", out);
    cr_assert(says("Elsewhere (reference)") && says("groups = 10"),
              "the reference is not at the user's size: %s", out);
}

Test(figures_load, the_figure_of_loops_uses_the_video_set)
{
    shell(LOADING("cat", "loading_loops"));
    EXPECT_OUT("500 loops", "1\t11\t10.23\t11.88\t11.0 µs\t× 1\n");
    shell(LOADING("grep -v video", "loading_loops"));
    EXPECT_OUT("skipped loading_loops: none of your ");
}

Test(figures_load, the_figure_of_threads_has_one_sample_size)
{
    shell(LOADING("grep -v torch", "loading_threads"));
    EXPECT_OUT("'yours, 16 KiB per sample'");
    cr_assert(!says("\n1\t1.46285714e+10\t"),
              "the line of samples of 16 KiB has a point of samples of 2 KiB: %s", out);
    EXPECT_OUT("\n1\t2.92571429e+09\t", "\n4\t1.17028571e+10\t");
}

/* ---- Generate or read ---- */

Test(figures_load, break_even_has_one_line_per_source_below_the_limit_of_the_step)
{
    SHELL(0, "cp " FIXTURES "/break_even_*.csv $D/results; " SELECT
             "break_even && cat $D/work/break_even.vars $D/work/break_even.dat");
    EXPECT_OUT("series = 13\n");
    cr_assert(says("\n0.5\t100\n") && says("\n20\t100\n"), "the limit is not 100 %%: %s", out);
    cr_assert(says("\n0.5\t23.1089109\n1\t46.2277228\n2\t92.4554455\n"), /* 256 images per step */
              "the line of bat is not its rate * step time / batch: %s", out);
    EXPECT_OUT("'read, page cache cold'", "'shards-omp png'");
    EXPECT_OUT("Made-up GPU 9000, Made-up 9000 (your rows, host node02");
}

Test(figures_load, sources_of_break_even_have_different_symbols)
{
    shell("cd scripts/figures && python3 -B -c 'import break_even, collections\n"
          "slots = {name.split()[0]: slot for name, slot in break_even.SLOTS.items()}\n"
          "print([slot for slot, n in collections.Counter(slots.values()).items() if n > 1])'");
    cr_assert_str_eq(out, "[]\n", "%s", out);
    shell("cd scripts/figures && python3 -B -c 'import devices, monitoring\n"
          "slots = [devices.SLOTS[name] for name in monitoring.LOADERS]\n"
          "print(len(slots) - len(set(slots)))'");
    cr_assert_str_eq(out, "0\n", "loaders of monitor_loading have the same symbol: %s", out);
}

Test(figures_load, break_even_reports_which_source_wins)
{
    SHELL(0,
          "scripts/figures/break_even.py " FIXTURES "/break_even_synth.csv " FIXTURES "/break_even_load.csv");
    EXPECT_OUT("  no step  gpu-resident (warm)\n");
    EXPECT_OUT("   0.5 ms  gpu-resident (warm), shards-gpu (warm), fused\n");
    EXPECT_OUT("generating with fused vs. reading");
    EXPECT_OUT("shards-omp, warm             generating wins for steps below 0.94 ms; equal for longer");
    EXPECT_OUT("files-omp, cold              generating wins at every step (56.8 times as fast at 0.5 ms");
    EXPECT_OUT("gpu-resident, warm           equal at every step");
    shell("grep -v ,fused, " FIXTURES
          "/break_even_synth.csv | grep -v ,bat, > $D/a.csv; scripts/figures/break_even.py $D/a.csv " FIXTURES
          "/break_even_load.csv");
    EXPECT_OUT("generating with omp", "shards-omp, warm             reading wins for steps below");
    EXPECT_OUT("shards-omp png, warm         reading wins for steps below 19 ms");
}

/* A step of a given duration takes as long on a partial batch as on a full one. So the rates of a reader
 * whose steps had 156 images, not 256, cannot be compared and are skipped. In a row of gpu-resident,
 * items_per_s exceeds the rate at which the step consumes images. For this row, the table must show the mean
 * rate, which follows from busy_share. */
Test(figures_load, break_even_skips_partial_batches_and_reports_stalls)
{
    SHELL(0,
          "awk -F , -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } $at[\"compute_ms\"] == 0.5 && "
          "$at[\"cache\"] == \"warm\" && $at[\"variant\"] == \"files-omp\" { $at[\"steps\"] = 6400 } "
          "$at[\"compute_ms\"] == 5 && $at[\"variant\"] == \"gpu-resident\" { $at[\"busy_share\"] = 0.7; "
          "$at[\"items_per_s\"] = 60000 } "
          "1' " FIXTURES "/break_even_load.csv > $D/a.csv; scripts/figures/break_even.py " FIXTURES
          "/break_even_synth.csv $D/a.csv");
    EXPECT_OUT("files-omp with a step of 0.5 ms is skipped: its steps had 156 images, not 256");
    EXPECT_OUT("(1.7 times as fast at 1 ms, ", "35,542  0.4 % (30)");
    SHELL(2, "cp $D/a.csv $D/a_loaders.csv; scripts/figures/break_even.py " FIXTURES
             "/break_even_synth.csv $D/a_loaders.csv");
    EXPECT_OUT("no rows of both generating and reading");
}

Test(figures_load, break_even_needs_rows_of_generating_and_reading)
{
    SHELL(2, "scripts/figures/break_even.py " FIXTURES "/break_even_synth.csv " FIXTURES
             "/break_even_synth.csv");
    EXPECT_OUT("no rows of both generating and reading");
    SHELL(2, "scripts/figures/break_even.py " FIXTURES "/monitor.csv " FIXTURES "/break_even_load.csv");
    EXPECT_OUT("no rows of a run");
    SHELL(2, "scripts/figures/break_even.py nowhere.csv");
}

Test(figures_load, rows_with_a_step_are_in_no_other_figure)
{
    shell("awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == \"compute_ms\") c = i } NR == 1 || "
          "$c' " FIXTURES "/break_even_load.csv > $D/results/a.csv; " SELECT
          "--reference $D/reference loading_threads");
    EXPECT_OUT("skipped loading_threads: none of your ");
}

Test(figures_load, loaders_over_time_use_the_newest_timed_runs)
{
    SHELL(0, "cp " FIXTURES "/monitor_loading.csv " FIXTURES "/break_even_load.csv $D/results; " SELECT
             "monitor_loading && cat $D/work/monitor_loading.vars $D/work/monitor_loading.dat");
    EXPECT_OUT("series = 2\n", "'files-gpu'", "'shards-gpu'");
    cr_assert(says("x_high = 11.5\n"), "not 24 samples, 0.5 s apart: %s", out);
    cr_assert(says("% of the time'") && says("GB/s'") && says("'throughput (GB/s)'") &&
                  !says("PCIe to the GPU"),
              "the wait and the bytes are not from the row of the same run: %s", out);
    shell("grep -v shards-gpu " FIXTURES "/monitor_loading.csv > $D/results/monitor_loading.csv; " SELECT
          "monitor_loading && cat $D/work/monitor_loading.vars");
    cr_assert(says("(reference, host"), "the user's rows are drawn, although shards-gpu is missing: %s", out);
}

/* The figure clips draws the runs of the monitor on a set that cnn3d also trains on; monitor_loading draws
 * the other runs. Without a GPU, the runs have no step. */
Test(figures_load, clips_are_drawn_with_the_training_on_the_same_set)
{
    SHELL(0, "cp " FIXTURES "/clips_*.csv $D/results; " SELECT
             "clips && cat $D/work/clips.vars $D/work/clips.dat");
    EXPECT_OUT("series = 4\n", "'files-omp'", "'GPU use (%)'", "'GPU waits 79 % of the time'",
               "'500 loops without a step'", "'files-gpu: 20.0 s'", "'cnn3d trains (train-bf16)'",
               "'from files: 150,750 clips/s'", "'from shards: 381,900 clips/s'",
               "'one constant batch: 402,000 clips/s'", "read 500 times while a step of 2 ms");
    shell(SELECT "--reference $D/reference monitor_loading");
    EXPECT_OUT(
        "skipped monitor_loading: none of your 8 rows of load has suitable parameters; to measure it: ");
    SHELL(0, "sed -i '/,-gpu,/d; /:05:01:/d' $D/results/clips_load.csv && "
             "sed -i 's/T05:01:/T05:00:/' $D/results/clips_monitor.csv && " SELECT
             "clips && cat $D/work/clips.vars");
    cr_expect(says("'500 loops without a step'") && !says("of the time'") && !says("while a step"), "%s",
              out);
    shell("sed -i 's/,cnn3d,/,cnn,/' $D/results/clips_train.csv && " SELECT "--reference $D/reference clips");
    EXPECT_OUT("skipped clips: none of your 8 rows of load has suitable parameters; to measure it: "
               "scripts/compare/clips.sh DIR results");
}

Test(figures_load, loading_on_several_ranks_is_drawn)
{
    SHELL(0, "cp " FIXTURES "/load_ranks.csv $D/results && " SELECT
             "loading_ranks --reference $D/reference >/dev/null && cat $D/work/loading_ranks.vars "
             "$D/work/loading_ranks.dat");
    EXPECT_OUT("series = 1", "'shards-gpu'", "'2 KiB per sample'", "95.0 %");
    EXPECT_OUT("1\t17104124.4\t", "2\t33214727\t");
}
