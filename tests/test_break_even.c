/* Tests scripts/compare/break_even.sh with a tiny table and without a GPU: its measurements, its output, and
 * how it continues an earlier run.
 *
 * The environment variable FDSL_BENCH names the program; the default is ./fdsl-bench. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <stdlib.h>
#include <unistd.h>

#include "command.h"

static char folder[] =
    "/tmp/fdsl-break-even-XXXXXX"; /* temporary folder of the current test; $D in commands */

static void open_folder(void)
{
    shell("python3 -c ''");
    if (status != 0)
        cr_skip_test("python3 is not installed");
    cr_assert_not_null(mkdtemp(folder));
    setenv("D", folder, 1);
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* hides the GPUs of the machine */
    setenv("SAMPLES", "70", 1);
    setenv("TIME", "0.01", 1);
    setenv("OMP_NUM_THREADS", "2", 1);
}

static void remove_folder(void)
{
    if (!strstr(folder, "XXXXXX"))
        shell("rm -rf '%s'", folder);
}

TestSuite(break_even, .init = open_folder, .fini = remove_folder, .timeout = 120);

#define HEADER     "variant\\tbatch\\tres\\tclasses\\tcompute\\twarmup-time\\tmax-time\\n"
#define QUICK      "\\t0\\t0.01\\n"
#define BREAK_EVEN "scripts/compare/break_even.sh $D/data $D/rows $D/t.tsv"

static void put_table(const char *lines)
{
    SHELL(0, "printf '# made up\\n\\n" HEADER "%s' > $D/t.tsv", lines);
}

#ifdef HAVE_XXHASH
#ifdef HAVE_INIH
Test(break_even, without_a_gpu_training_steps_are_skipped)
{
    put_table("naive\\t16\\t24\\t3\\t-" QUICK "naive\\t16\\t24\\t3\\t5" QUICK "bat\\t16\\t24\\t3\\t-" QUICK);
    SHELL_PRINTS(0, "only rates without a step are compared: --compute: no", BREAK_EVEN);
    EXPECT_OUT("bat is skipped: ", "generated\n  naive ", "read, page cache warm\n  files ", "\n  shards ",
               " images instead of 70, so that all batches are full: a multiple of ",
               "Break-even of generating with naive vs. reading:\n  files, warm ",
               "Disk space that generating saves:\n  files ");
    cr_expect(!says("size of the samples"), "%s", out);
    shell("grep -c ^synth $D/rows_synth.csv; cut -d, -f7 $D/rows_load.csv | sort -u | tr '\\n' ' '");
    expect(0, "1\n"); /* the other lines of the table were skipped */
    expect(0, "files ");

    /* Prints the rows that break one of three rules: all batches of all threads are full; runs with a warm
     * page cache have 4 epochs; the shuffle buffer has at most a quarter of the samples that a thread reads
     * from shards. */
    shell(
        "awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next } $at[\"items\"] %% ($at[\"batch\"] "
        "* $at[\"threads\"] * $at[\"epochs\"]) || ($at[\"cache\"] == \"warm\" && $at[\"epochs\"] != 4) || "
        "($at[\"store\"] == \"shards\" && 4 * $at[\"shuffle\"] > $at[\"items\"] / $at[\"epochs\"] / "
        "$at[\"threads\"])' $D/rows_load.csv");
    cr_expect_str_eq(out, "", "%s", out);

    /* A second call repeats no measurement. */
    SHELL_PRINTS(0, "generating: 0 finished, 1 finished before", BREAK_EVEN);
    EXPECT_OUT("reading: 0 finished, ");

    /* The data set that was measured is replaced by a different one. So the size of the measured set on disk
     * is unknown, and the size of its samples is used: 24 x 24 pixels, the .npy header (128 bytes) and the
     * label. */
    shell("scripts/figures/break_even.py $D/rows_synth.csv $D/rows_load.csv; rm -r $D/data/files; "
          "${FDSL_BENCH:-./fdsl-bench} "
          "--prepare $D/data/files --store files --from synth --samples 7 --res 64 >&2; "
          "scripts/figures/break_even.py $D/rows_synth.csv $D/rows_load.csv");
    EXPECT_OUT("; 0.705 GB per million (sum of the sample sizes, ");
}
#endif
#endif

Test(break_even, errors_are_reported_before_anything_is_created)
{
    put_table("naive\\t16\\t24\\t3\\t-" QUICK "naive\\t16\\t32\\t3\\t-" QUICK);
    SHELL_PRINTS(2, "column 'res' has 2 values", BREAK_EVEN);
    put_table("bat\\t16\\t24\\t3\\t-" QUICK);
    SHELL_PRINTS(4, "no generator of the table is available here", BREAK_EVEN);
    put_table("naive\\t16\\t24\\t3\\t5" QUICK);
    SHELL_PRINTS(4, "has no line without a step", BREAK_EVEN);
    SHELL_PRINTS(2, "SAMPLES=many: give a whole number", "SAMPLES=many " BREAK_EVEN);
    SHELL_PRINTS(2, "TIME=soon: give seconds", "TIME=soon " BREAK_EVEN);
    SHELL_PRINTS(2, "usage: scripts/compare/break_even.sh DIR FILE", "scripts/compare/break_even.sh $D/data");
    SHELL_PRINTS(2, "nowhere: no such folder", "scripts/compare/break_even.sh $D/data $D/nowhere/rows");
    shell("ls -A $D/data");
    cr_expect_str_eq(out, "");
}
