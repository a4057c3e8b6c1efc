/* Tests scripts/sweep/run.sh and slurm/: valid and invalid tables; the files of tasks that succeed, fail or
 * are killed; and calls of Slurm, which a fake replaces. make check-slurm uses a real Slurm.
 *
 * The environment variable FDSL_BENCH names the program; the default is ./fdsl-bench. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <criterion/criterion.h>

#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cells.h"
#include "command.h"
#include "core/portable.h"
#include "folder.h"
#include "sweep_support.h"

/* Columns of a table, and their values, for a run that takes microseconds. */
#define QUICK_COLUMNS "\tres\tbatch\torbits\twarmups\twarmup-time\tmin-samples\tmin-time\tmax-time"
#define QUICK         "\t32\t2\t4\t0\t0\t6\t0\t0"
#define HEADER        "variant\tvertices" QUICK_COLUMNS "\n"
#define TASK(number)  "naive\t" number QUICK "\n"
#define RANKS_HEADER  "variant\tranks" QUICK_COLUMNS "\n"

/* Runs the sweep of t.tsv with results in ./r. */
#define SWEEP "scripts/sweep/run.sh t.tsv --out r"
static void sweep(const char *table, const char *options)
{
    if (table)
        put("t.tsv", table);
    shell(SWEEP " %s", options);
}

/* Expects a merged file with a header and one complete row for each of these numbers of vertices, in this
 * order. */
static void expect_rows(const char *vertices)
{
    shell("awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == \"vertices\") v = i; width = NF; next }"
          "          { printf \"%%s%%s\", (NR > 2 ? \" \" : \"\"), (NF == width ? $v : \"torn\") }' "
          "r/sweep_t.csv");
    cr_expect_str_eq(out, vertices);
}

static void expect_no_leftovers(void)
{
    glob_t found;
    int none = glob("r/sweep/t/*.part*", 0, NULL, &found);
    cr_expect(none == GLOB_NOMATCH, "%s remains", none ? "?" : found.gl_pathv[0]);
    globfree(&found);
    cr_expect(glob("r/*.part*", 0, NULL, &found) == GLOB_NOMATCH);
    globfree(&found);
}

TestSuite(sweep, .init = start, .fini = stop, .timeout = 300);

/* ---- Tables ---- */

Test(sweep, every_task_has_its_rows_once_in_the_order_of_the_table)
{
    sweep("# a comment\n\n" HEADER TASK("30") "\n# another\n" TASK("20") "naive\t10" QUICK "\r\n", "");
    expect(0, "t: 3 finished, 0 finished before, 0 skipped, 0 failed\nrows of 3 tasks: r/sweep_t.csv\n");
    expect_rows("30 20 10");
    expect_no_leftovers();
}

Test(sweep, a_table_with_an_error_runs_nothing)
{
    static const struct {
        const char *table, *words;
    } faults[] = {
        {"variant\tbacth\nnaive\t1\n", "t.tsv, line 1: unknown column 'bacth'; did you mean 'batch'?"},
        {"variant\t--batch\nnaive\t1\n", "t.tsv, line 1: unknown column '--batch'; write it without dashes"},
        {"variant batch\nnaive 1\n",
         "t.tsv, line 1: unknown column 'variant batch'; separate columns by tabs"},
        {"\033[2J\nnaive\n", "t.tsv, line 1: unknown column '\\x1b[2J'"},
        {"variant\tranks\tscaling\tbatch\nnaive\t4\tstrong\t2\n",
         "t.tsv, line 2: --scaling strong: more ranks (4)"},
        {"variant\tranks\nnaive\t2000000\n", "t.tsv, line 2: --ranks"},
        {"variant\tranks\tdevice\nnaive\t2\t1\n",
         "t.tsv, line 2: --device and --best-gpu work only with one rank"},
        {"variant\tvert\nnaive\t1\n", "t.tsv, line 1: unknown column 'vert'; did you mean 'vertices'?"},
        {"variant\tbatch \nnaive\t1\n", "t.tsv, line 1: unknown column 'batch '"},
        {"variant\t\nnaive\t1\n", "t.tsv, line 1: unknown column ''"},
        {"variant\tout\nnaive\tx.csv\n", "t.tsv, line 1: column 'out' cannot be used in a table"},
        {"variant\thelp\nnaive\tyes\n", "t.tsv, line 1: column 'help' cannot be used in a table"},
        {"variant\tcolumns\nnaive\tyes\n", "t.tsv, line 1: column 'columns' cannot be used in a table"},
        {"variant\tconfig\nnaive\tx.ini\n", "t.tsv, line 1: column 'config' cannot be used in a table"},
        {"variant\tprepare\nnaive\tx\n", "t.tsv, line 1: column 'prepare' cannot be used in a table"},
        {"variant\texport-step\ntrain-naive\tx\n",
         "t.tsv, line 1: column 'export-step' cannot be used in a table"},
        {"variant\tcheckpoint\ntrain-naive\tx\n",
         "t.tsv, line 2: column 'checkpoint' can be used only with infer"},
        {"batch\tvariant\tbatch\n1\tnaive\t2\n", "t.tsv, line 1: column 'batch' occurs twice"},
        {HEADER TASK("1") "naiv\t2" QUICK "\n",
         "t.tsv, line 3: unknown variant 'naiv'; did you mean 'naive'?"},
        {HEADER TASK("1") TASK("two"), "t.tsv, line 3: --vertices: 'two' is not a whole number"},
        {"variant\tbatch\nnaive\t1\nnaive\n", "t.tsv, line 3: 1 cell, but the header has 2"},
        {"variant\tbatch\nnaive\t1\t2\n", "t.tsv, line 2: 3 cells, but the header has 2"},
        {"variant\tbatch\nnaive\t\n", "t.tsv, line 2: column 'batch' is empty"},
        {"variant\tverify\nnaive\tmaybe\n", "t.tsv, line 2: --verify: 'maybe' is not one of"},
        {"variant\tbatch\nnaive\tyes\n", "t.tsv, line 2: --batch needs a value"},
        {"variant\tbatch\nnaive\t1\nnaive\t2\nnaive\t1\n", "t.tsv, line 4: the same task as line 2"},
        {"variant\tranks\nnaive\t1\nnaive\t-\n", "t.tsv, line 3: the same task as line 2"},
        {"variant\tranks\nnaive\ttwo\n", "t.tsv, line 2: --ranks: 'two' is not a whole number"},
        {"variant\tranks\n-\t2\n", "t.tsv, line 2: no option is given"},
        {"batch\n3\n", "t.tsv, line 2: --variant NAME is missing"},
        {"variant\n", "t.tsv: no tasks"},
        {"", "t.tsv: no tasks"},
    };
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        sweep(faults[i].table, "");
        expect(2, faults[i].words);
        cr_expect(count_of(out, "\n") == 1, "not one line: %s", out);
        cr_expect(!exists("r"));
    }
}

/* In a table, an option whose value is a file or folder is allowed only if it names an input. */
Test(sweep, options_that_write_files_are_refused)
{
    shell(
        "$FDSL_BENCH --help -v | sed -nE 's/^  --([a-z-]+) [A-Z|]*(FILE|DIR).*/\\1/p' | sort -u | while read "
        "-r option; do printf 'variant\t%%s\nnaive\t-\n' $option > t.tsv; " SWEEP
        " --todo 2>&1 | grep -qF \"'$option' cannot\" || echo $option; done | paste -sd' '");
    cr_expect_str_eq(out, "checkpoint class data init preset-file\n");
}

/* A check generates all rows and samples of a task, which takes long. The first row of a table with a value
 * of `rows` or `train-size` keeps it, and later rows with the same value get a smaller number. */
static const char fewer[] = "awk -F '\\t' -v OFS='\\t' '/^#/ { next } !header++ { for (i = 1; i <= NF; i++) "
                            "if ($i == \"rows\" || $i == \"train-size\") at = i } "
                            "{ if (at && seen[$at]++) $at = 64 + NR; print }' %s >t.tsv";

Test(sweep, tables_in_configs_have_no_error)
{
    glob_t tables;
    cr_assert(glob("configs/sweep_*.tsv", 0, NULL, &tables) == 0);
    for (size_t i = 0; i < tables.gl_pathc; i++) {
        shell(fewer, tables.gl_pathv[i]);
        sweep(NULL, "--dry-run");
        expect(0, "task 1, line ");
    }
    globfree(&tables);
}

/* A process per line would make the check of a long table take minutes. */
Test(sweep, a_long_table_is_checked_in_one_call)
{
    shell("{ printf 'variant\tvertices\n'; seq -f 'naive\t%%.0f' 1200; } >t.tsv");
    put("counted", "#!/bin/sh\necho x >>calls\nexec \"$REAL_BENCH\" \"$@\"\n");
    cr_assert(chmod("counted", 0755) == 0 && setenv("REAL_BENCH", getenv("FDSL_BENCH"), 1) == 0 &&
              setenv("FDSL_BENCH", "./counted", 1) == 0);
    sweep(NULL, "--todo | tail -n 1");
    cr_expect_str_eq(out, "1200\n");
    cr_expect_str_eq(get("calls"), "x\nx\n", "one call lists the tasks, one checks them");
    sweep(NULL, "--dry-run --task 700");
    expect(0, "task 700, line 701, to run: fdsl-bench --variant=naive --vertices=700\n");
}

/* ---- The program reads the table ---- */

#define TABLE "$FDSL_BENCH --table t.tsv "

Test(sweep, the_program_checks_all_runs_of_a_table)
{
    put("t.tsv", "variant\tranks\tbatch\nnaive\t-\t2\ngbase\t-\t3\n");
    shell("CUDA_VISIBLE_DEVICES= " TABLE "--dry-run --format csv | cut -d , -f 1-4");
    cr_expect_str_eq(out, "task,line,ranks,status\n1,2,1,0\n2,3,1,4\n");
    shell("CUDA_VISIBLE_DEVICES= " TABLE "--dry-run --format csv --task 1 | tail -n 1");
    cr_expect_str_eq(out, "1,2,1,0,,fdsl-bench --variant=naive --batch=2,\n");
    put("t.tsv", "variant,ranks,scaling,batch\nnaive,1,-,2\nnaive,4,\"weak,strong\",2\n");
    shell(TABLE "--list --format csv | tail -n 1");
    cr_expect_str_eq(out, "2,3,4,0,,\"fdsl-bench --variant=naive --scaling=weak,strong --batch=2\",\n");
    shell(TABLE "--dry-run");
    expect(2, "--scaling strong: more ranks (4) than images (--batch 2)");
    expect(2, "fdsl-bench: t.tsv, line 3: 1 of 2 combinations failed\n");
    put("t.tsv", "variant\tbatch\nnaive\t2\nnaive\tx\nnaive\t3\nnaiv\t4\n");
    shell(TABLE "--dry-run --format csv 2>/dev/null");
    expect(2, "2,3,1,2,\"t.tsv, line 3: --batch: 'x' is not a whole number");
    expect(2, ",fdsl-bench --variant=naive --batch=x,batch\n3,4,1,0,,");
    expect(2, "\n4,5,1,2,");
    shell(TABLE "--dry-run --format csv >/dev/null");
    expect_line(2, "fdsl-bench: t.tsv, line 3: --batch: 'x'");
    shell(TABLE "--dry-run --task 1 --seed=3 --out 'a b.csv' --max-time=5 --verify");
    expect(2, "--seed does not apply to all workloads");
    shell(TABLE "--dry-run --task 1 --out 'a b.csv' --max-time=5 --verify");
    expect(0, "task 1, line 2: fdsl-bench --variant=naive --batch=2 --out 'a b.csv' --max-time=5 --verify\n");
    shell(TABLE "--dry-run --task 1 >/dev/full");
    cr_expect_eq(status, 1);
    shell("$FDSL_BENCH --table gone");
    expect(2, "gone: cannot be read: No such file or directory");
    shell("printf 'variant\tbatch\nnaive\t1\\0\n' >t.tsv; " TABLE);
    expect(2, "t.tsv, line 2: a NUL byte");
}

Test(sweep, the_program_quotes_commands_for_a_shell)
{
    put("t.tsv", "variant\tclass\nnaive\ta b'c$d\n");
    shell("words=$(" TABLE "--list --format csv | sed -n '2s/.*,\\(.*\\),$/\\1/p'); eval \"set -- $words\"; "
          "printf '%%s\n' \"$@\"");
    cr_expect_str_eq(out, "fdsl-bench\n--variant=naive\n--class=a b'c$d\n");
}

Test(sweep, the_program_runs_the_rows_of_a_table)
{
    put("t.tsv", HEADER TASK("30,31") "omp\t9" QUICK "\n");
    shell(TABLE "--out r.csv >printed");
    cr_expect_eq(status, 0, "%s", out);
    cr_expect_eq(number(get("r.csv"), 1, "vertices"), 30);
    cr_expect_eq(number(get("r.csv"), 2, "vertices"), 31);
    cr_expect_eq(number(get("r.csv"), 3, "vertices"), 9);
    shell(TABLE "--task 2 --format csv 2>/dev/null");
    cr_expect_str_eq(value(out, 1, "variant"), "omp");
    cr_expect_eq(count_of(out, "\n"), 2);
    put("t.tsv", RANKS_HEADER "naive\t1" QUICK "\nnaive\t3" QUICK "\n");
    shell(TABLE "--format csv | grep -c ^synth/");
    expect(0, "1\n");
    put("t.tsv", "variant\tworkload\tvertices" QUICK_COLUMNS "\nauto\tsynth\t7" QUICK "\n");
    shell(TABLE "--format csv 2>said; cat said >&2");
    expect(0, "fdsl-bench: --variant auto chose ");
    shell("CUDA_VISIBLE_DEVICES= " TABLE "--format csv 2>/dev/null");
    const char *chosen = value(out, 1, "variant");
    cr_expect(strcmp(chosen, "omp") == 0 || strcmp(chosen, "naive") == 0, "%s runs without a GPU", chosen);
    put("t.tsv", RANKS_HEADER "naive\t1" QUICK "\nnaive\t3" QUICK "\n");
    shell(TABLE);
    expect(4, "t.tsv, line 3: this task needs 3 ranks: mpirun --bind-to none -n 3 fdsl-bench --table t.tsv "
              "--task 2");
    expect(4, "t.tsv: 1 of 2 tasks failed");
    shell(TABLE "--task 2");
    cr_expect_eq(status, 4);
    shell(TABLE "--tas 1:2 --scale=2 --out 'a b.csv' --bind=none");
    expect(4, "t.tsv, line 2: this task needs 2 ranks: mpirun --bind-to none -n 2 fdsl-bench --table t.tsv "
              "--scale=2 --out 'a b.csv' --bind=none --task 2");
    shell("PMI_SIZE=2 PMI_RANK=0 " TABLE "--list");
    expect(2, "--table: a launcher starts one task; name it with --task N");
    put("t.tsv", HEADER TASK("30") TASK("x"));
    shell(TABLE "--out none.csv");
    expect(2, "t.tsv, line 3: --vertices: 'x'");
    cr_expect(!exists("none.csv"));
}

Test(sweep, several_tasks_print_one_header)
{
    put("t.tsv", HEADER TASK("8") TASK("9") TASK("7"));
    shell(TABLE "--format csv 2>/dev/null");
    cr_expect_eq(status, 0);
    cr_expect_eq(count_of(out, "schema,"), 1, "%s", out);
    cr_expect_eq(count_of(out, "\n"), 4);
    cr_expect_eq(number(out, 3, "vertices"), 7);
    shell(TABLE "--format json");
    expect_line(2, "use --format csv, or --out FILE");
}

/* Starts a sweep in the background, whose second task takes long, and waits until that task is running. */
#define SECOND_TASK_RUNS                                                \
    "$FDSL_BENCH --table t.tsv --out r.csv >printed 2>&1 & parent=$!; " \
    "until [ -s r.csv ] && sleep 0.5 && child=$(pgrep -P $parent); do sleep 0.1; done; "

Test(sweep, an_interrupted_table_says_which_tasks_are_left)
{
    put("t.tsv",
        "variant\tres\tmin-time\tmax-time\nnaive\t32\t0\t0\nnaive\t32,64\t60\t60\nomp\t32\t60\t60\n");
    shell(SECOND_TASK_RUNS "kill -TERM $parent; wait $parent; echo $?; cat printed; kill -0 $child");
    expect(1, "143\n");
    expect(1, "interrupted: 1 of 3 tasks are done; continue with --task 2:3: task 2 (line 3) starts again");
    expect(1, "interrupted: 0 of 2 combinations are done, with their rows in r.csv; the task starts again");
    cr_expect(!says("repeat") && !says("--res"), "%s", out);
}

Test(sweep, the_signal_that_ended_a_task_is_reported)
{
    put("t.tsv", "variant\tres\tmin-time\tmax-time\nnaive\t32\t0\t0\nnaive\t32\t60\t60\nomp\t32\t0\t0\n");
    shell(SECOND_TASK_RUNS "kill -KILL $child; wait $parent; echo $?; cat printed");
    expect(0, "1\n");
    expect(0, "t.tsv, line 3: the task was ended by signal 9 (Killed)");
    expect(0, "1 of 3 tasks failed");
    shell("rm r.csv; " SECOND_TASK_RUNS "kill -KILL $parent; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; "
          "read -r a b state d </proc/$child/stat && [ $state != Z ] || exit 7; done");
    cr_expect_eq(status, 7, "the task outlived its parent");
}

Test(sweep, options_of_the_command_line_apply_to_every_row)
{
    static const struct {
        const char *options, *words;
    } faults[] = {
        {"--batch 3", "--batch does not apply to all workloads; make it a column of the table"},
        {"--npy x.npy", "--npy does not apply to --table, because all tasks would write the same file"},
        {"--max-time 3", "t.tsv, line 2: --max-time is given here and on the command line"},
        {"--ranks 2 --dry-run", "ranks is a column of the table"},
        {"--task 3", "--task: '3' is out of range"},
        {"--task 2:1", "--task N:M: '1' is out of range"},
        {"--list --format json", "use --format csv"},
        {"-- true", "--table does not apply to -- COMMAND"},
    };
    put("t.tsv", HEADER TASK("8") TASK("9"));
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        shell(TABLE "%s", faults[i].options);
        expect(2, faults[i].words);
    }
    put("t.tsv", "variant\tverify\nnaive\tyes\nnaive\tno\n");
    shell(TABLE "--verify=no --dry-run");
    expect(2, "t.tsv, line 2: --verify is given here and on the command line; drop one of them");
    shell(TABLE "--verify --task 2");
    expect(2, "--verify is given here and on the command line");
    put("t.tsv", HEADER TASK("8") TASK("9"));
    put("t.tsv", "variant\nnaive\ntrain-naive\n");
    shell(TABLE "--dry-run --out none.csv");
    expect(2, "t.tsv, line 3: the workload is train, in line 2 it is synth, and one file of --out");
    shell(TABLE "--samples-out none.csv");
    expect(2, "one file of --samples-out cannot hold the rows of both");
    cr_expect(!exists("none.csv"));
    shell(TABLE "--dry-run --out none.csv --task 1");
    cr_expect_eq(status, 0, "%s", out);
    put("t.tsv", HEADER TASK("8") TASK("9"));
    shell("$FDSL_BENCH --variant naive --task 1");
    expect(2, "--task works only with --table FILE");
    shell(TABLE "--threads 1 --format csv 2>/dev/null");
    cr_expect_str_eq(value(out, 1, "threads"), "1");
}

Test(sweep, yes_sets_a_flag_and_a_dash_omits_an_option)
{
    sweep("variant\tverify\tvertices\nnaive\tyes\t-\nnaive\t-\t7\n", "--dry-run");
    expect(0, "task 1, line 2, to run: fdsl-bench --variant=naive --verify\n"
              "task 2, line 3, to run: fdsl-bench --variant=naive --vertices=7\n");
    cr_expect(!exists("r"));
    sweep(NULL, "--todo");
    cr_expect_str_eq(out, "1\n2\n");
}

Test(sweep, options_are_checked)
{
    static const struct {
        const char *options, *words;
    } faults[] = {
        {"--tsak 1", "unknown option '--tsak'"},
        {"--task", "--task '': give the number of a task"},
        {"--task 0", "--task '0': give the number of a task"},
        {"--task 2", "t.tsv: there is no task 2; the last task is 1"},
        {"other.tsv", "one table at a time"},
        {"--out ''", "--out needs a folder"},
        {"--todo --collect", "exclude each other"},
        {"--collect --redo", "exclude each other"},
        {"--collect --task 1", "exclude each other"},
    };
    put("t.tsv", HEADER TASK("9"));
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        sweep(NULL, faults[i].options);
        expect(2, faults[i].words);
    }
    shell("scripts/sweep/run.sh");
    expect(2, "name a table");
    shell("scripts/sweep/run.sh gone.tsv");
    expect(2, "gone.tsv is missing");
    shell("FDSL_BENCH=/gone " SWEEP);
    expect(4, "/gone does not exist; run make first");
    shell("scripts/sweep/run.sh --help");
    expect(0, "Runs the lines of a table through fdsl-bench");
    expect(0, "Exit status: ");
}

/* ---- Continuing ---- */

Test(sweep, finished_tasks_are_skipped_without_redo)
{
    sweep(HEADER TASK("8") TASK("9"), "");
    expect(0, "2 finished, 0 finished before");
    char *before = strdup(get("r/sweep/t/task_1.csv"));
    sweep(NULL, "");
    expect(0, "0 finished, 2 finished before");
    cr_expect_str_eq(get("r/sweep/t/task_1.csv"), before);
    sweep(NULL, "--redo");
    expect(0, "2 finished, 0 finished before");
    cr_expect_str_neq(get("r/sweep/t/task_1.csv"), before);
    expect_rows("8 9");
    free(before);
}

Test(sweep, an_edited_line_is_a_new_task)
{
    sweep(HEADER TASK("8") TASK("9"), "");
    sweep(HEADER TASK("7") TASK("9"), "--collect");
    expect(0, "(without 1)");
    expect_rows("9");
    sweep(NULL, "");
    expect(0, "1 finished, 1 finished before");
    expect_rows("7 9");
    sweep(HEADER TASK("7"), "");
    expect_rows("7");
}

Test(sweep, a_single_task_does_not_merge)
{
    sweep(HEADER TASK("8") TASK("9"), "--task 2");
    expect(0, "task 2 of 2: ");
    cr_expect(exists("r/sweep/t/task_2.csv") && !exists("r/sweep/t/task_1.csv") && !exists("r/sweep_t.csv"));
    sweep(NULL, "--task 2");
    expect(0, "finished before");
    sweep(NULL, "--dry-run");
    expect(0, "task 1, line 2, to run");
    expect(0, "task 2, line 3, finished");
    sweep(NULL, "--todo");
    cr_expect_str_eq(out, "1\n");
    sweep(NULL, "--todo --redo");
    cr_expect_str_eq(out, "1\n2\n");
    sweep(NULL, "--collect");
    expect(0, "rows of 1 task: r/sweep_t.csv (without 1)");
    expect_rows("9");
}

Test(sweep, incomplete_files_of_killed_tasks_are_ignored)
{
    sweep(HEADER TASK("8"), "");
    cr_assert(unlink("r/sweep/t/task_1.csv") == 0);
    put("r/sweep/t/task_1.csv.part", "schema,time_utc\nsynth/2,20");
    sweep(NULL, "--collect");
    expect(1, "no task of t is finished");
    sweep(NULL, "");
    expect(0, "1 finished");
    expect_rows("8");
    expect_no_leftovers();
}

Test(sweep, rows_with_other_columns_are_not_merged)
{
    sweep(HEADER TASK("8") TASK("9"), "");
    char *before = strdup(get("r/sweep_t.csv"));
    put("r/sweep/t/task_2.csv", "schema,variant\nsynth/1,naive\n");
    sweep(NULL, "--collect");
    expect(1, "task_2.csv and r/sweep/t/task_1.csv have different columns");
    cr_expect_str_eq(get("r/sweep_t.csv"), before);
    expect_no_leftovers();
    free(before);
}

/* ---- Tasks that fail ---- */

/* Sets MPIRUN to a launcher that runs `commands`. */
static void launch_with(const char *commands)
{
    char text[1024];
    snprintf(text, sizeof text, "#!/bin/sh\n%s\n", commands);
    put("launcher", text);
    cr_assert(chmod("launcher", 0755) == 0 && setenv("MPIRUN", "./launcher -n", 1) == 0);
}

Test(sweep, ranks_are_started_by_the_launcher)
{
    launch_with("echo \"$1 $2\" >ranks; shift 2; exec \"$@\"");
    sweep(RANKS_HEADER "naive\t1" QUICK "\n", "");
    expect(0, "1 finished");
    cr_expect(!exists("ranks"));
    sweep(RANKS_HEADER "naive\t3" QUICK "\n", "");
    expect(0, ": ./launcher -n 3 fdsl-bench --variant=naive ");
    cr_expect(strstr(get("r/sweep/t/task_1.command"), "./launcher -n 3 fdsl-bench --variant=naive "));
    cr_expect_str_eq(get("ranks"), "-n 3\n");
}

Test(sweep, a_failing_task_is_reported_and_others_continue)
{
    launch_with("echo 'fdsl-bench: the device caught fire' >&2; exit 3");
    sweep(RANKS_HEADER "naive\t1" QUICK "\nnaive\t2" QUICK "\nnaive\t-\t16\t2\t4\t0\t0\t6\t0\t0\n", "");
    expect(1, "task 2 of 3 failed (exit 3): ./launcher -n 2 fdsl-bench --variant=naive ");
    expect(1, "\nfdsl-bench: the device caught fire\n");
    expect(1, "2 finished, 0 finished before, 0 skipped, 1 failed (2)\n"
              "rows of 2 tasks: r/sweep_t.csv (without 2)");
    expect_no_leftovers();
    sweep(NULL, "--task 2");
    expect(1, "failed (exit 3)");
    launch_with("shift 2; exec \"$@\"");
    sweep(NULL, "");
    expect(0, "1 finished, 2 finished before, 0 skipped, 0 failed\nrows of 3 tasks: r/sweep_t.csv\n");
}

Test(sweep, unavailable_tasks_are_skipped)
{
    launch_with("echo noise >&2; echo 'fdsl-bench: this build has no MPI' >&2; exit 4");
    sweep(RANKS_HEADER "naive\t2" QUICK "\nnaive\t1" QUICK "\n", "");
    expect(0, "task 1 of 2: skipped: this build has no MPI\n");
    expect(0, "1 finished, 0 finished before, 1 skipped (1), 0 failed");
    cr_assert(setenv("MPIRUN", "/gone -n", 1) == 0);
    sweep(NULL, "--task 1");
    expect(2, "MPIRUN: there is no program '/gone'");
    launch_with("[ $3 = true ] || exit 4");
    sweep(RANKS_HEADER "naive\t2" QUICK "\n", "");
    expect(4, "0 finished, 0 finished before, 1 skipped (1), 0 failed");
    launch_with("shift 2; exec \"$@\"");
    sweep(NULL, "");
    cr_assert(setenv("MPIRUN", "./launcher --other -n", 1) == 0);
    sweep(NULL, "");
    expect(0, "0 finished, 1 finished before, 0 skipped"); /* a finished task needs no launcher: its rows may
                                                              be from another machine */
}

/* Open MPI's own message fills a screen, so the sweep prints a short one. */
Test(sweep, refusals_of_the_launcher_are_reported_before_the_first_task)
{
    static const char table[] = RANKS_HEADER "naive\t1" QUICK "\nnaive\t4" QUICK "\n";
    launch_with("printf '\\n-----\\nThere are not enough slots available in the system to satisfy the 4\\n' "
                ">&2; exit 1");
    sweep(table, "");
    expect(0,
           "tasks of 4 ranks are skipped: ./launcher has fewer slots than 4 ranks; to oversubscribe: export "
           "OMPI_MCA_rmaps_base_oversubscribe=1");
    expect(0, "1 finished, 0 finished before, 1 skipped (2), 0 failed");
    cr_expect(strstr(out, "are skipped") < strstr(out, "task 1 of 2"), "%s", out);
    launch_with("echo 'mpirun has detected an attempt to run as root.' >&2; exit 1");
    sweep(NULL, "");
    expect(0, "tasks of 4 ranks are skipped: ./launcher refuses to run as root; to allow it: export "
              "OMPI_ALLOW_RUN_AS_ROOT=1");
}

Test(sweep, tables_of_the_same_name_are_not_mixed)
{
    sweep(HEADER TASK("8"), "");
    cr_assert(mkdir("b", 0755) == 0);
    put("b/sweep_t.tsv", HEADER TASK("9"));
    shell("scripts/sweep/run.sh b/sweep_t.tsv --out r");
    expect(2, "r/sweep/t has the tasks of ");
    expect_rows("8");
    cr_assert(rename("t.tsv", "b/t.tsv") == 0);
    shell("scripts/sweep/run.sh b/t.tsv --out r");
    expect(0, "0 finished, 1 finished before");
}

Test(sweep, a_byte_order_mark_is_skipped)
{
    sweep("\xef\xbb\xbf" HEADER TASK("8"), "");
    expect(0, "1 finished");
}

Test(sweep, the_program_is_found_on_the_path)
{
    static char path[2 * PATH_MAX];
    put("t.tsv", HEADER TASK("8"));
    shell("mkdir bin && ln -s \"$FDSL_BENCH\" bin/bench-here");
    snprintf(path, sizeof path, "%s/bin:%s", folder, getenv("PATH"));
    cr_assert(setenv("PATH", path, 1) == 0);
    shell("FDSL_BENCH=bench-here " SWEEP);
    expect(0, "1 finished");
}

Test(sweep, warnings_of_a_task_are_printed)
{
    sweep("variant\twarmups\twarmup-time\tmin-samples\tmin-time\tmax-time\nnaive\t0\t0\t1\t0\t0\n", "");
    expect(0, "task 1 of 1: warning: the row took too few samples");
}

Test(sweep, results_that_cannot_be_written_are_an_error)
{
    put("r", "a file");
    sweep(HEADER TASK("8"), "");
    expect(2, "cannot write to r/sweep/t");
    cr_assert(unlink("r") == 0);
    shell("export PYTHONDONTWRITEBYTECODE=1; ulimit -f 0; " SWEEP);
    expect(1, "task 1 of 1 failed (cannot write to r/sweep/t)");
    expect_no_leftovers();
    sweep(NULL, "");
    cr_assert(status == 0 && unlink("r/sweep_t.csv") == 0 && mkdir("r/sweep_t.csv", 0755) == 0);
    put("r/sweep_t.csv/file", "");
    shell(SWEEP " >/dev/full");
    expect(1, "sweep/run.sh: stdout cannot be written");
    cr_expect(count_of(out, "\n") == 1, "%s", out);
    shell("export PYTHONDONTWRITEBYTECODE=1; ulimit -f 0; " SWEEP " --collect");
    expect(1, "r/sweep_t.csv could not be written");
    expect_no_leftovers();
}

Test(sweep, a_task_runs_in_one_process_at_a_time)
{
    sweep(HEADER TASK("8"), "");
    int fd = open("r/sweep/t/task_1.command", O_RDWR | O_CLOEXEC);
    cr_assert(fd >= 0 && flock(fd, LOCK_EX) == 0);
    sweep(NULL, "--redo");
    expect(1, "task 1 of 1: another process is running it");
    close(fd);
    sweep(NULL, "--redo");
    expect(0, "1 finished");
}

/* ---- Signals ---- */

/* Starts the sweep of one long task in its own process group, and waits until the task is running. */
static pid_t start_long(void)
{
    put("t.tsv", "variant\tmin-time\tmax-time\tres\nnaive\t60\t60\t32\n");
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0) {
        setpgid(0, 0);
        for (int number = 1; number < NSIG; number++)
            if (number != SIGKILL && number != SIGSTOP)
                signal(number, SIG_DFL);
        int fd = open("/dev/null", O_RDWR);
        if (dup2(fd, 1) == 1 && dup2(fd, 2) == 2)
            execl("scripts/sweep/run.sh", "scripts/sweep/run.sh", "t.tsv", "--out", "r", (char *)NULL);
        _exit(127);
    }
    while (!strstr(get("r/sweep/t/task_1.command"), "naive") && waitpid(pid, NULL, WNOHANG) == 0)
        usleep(10000);
    /* By now, the variant is usually running. An earlier signal must have the same effect. */
    usleep(300000);
    return pid;
}

/* Expects the program to end within 5 s. It inherited a lock on a file, so the lock is free when the program
 * has ended. */
static void expect_all_ended(void)
{
    int fd = open("r/sweep/t/task_1.command", O_RDWR | O_CLOEXEC), free_now = -1;
    for (int i = 0; i < 500 && free_now != 0; i++) {
        free_now = flock(fd, LOCK_EX | LOCK_NB);
        usleep(10000);
    }
    cr_expect(free_now == 0, "the program still runs after its sweep has ended");
    close(fd);
}

static void expect_ends(int number)
{
    int ended;
    pid_t pid = start_long();
    /* Only the script gets the signal, as under Slurm. The program must not outlive the script. */
    cr_assert(kill(pid, number) == 0 && waitpid(pid, &ended, 0) == pid);
    cr_expect(WIFEXITED(ended) && WEXITSTATUS(ended) == 128 + number, "signal %d: %x", number, ended);
    expect_all_ended();
    expect_no_leftovers();
    cr_expect(!exists("r/sweep/t/task_1.csv"));
}

Test(sweep, sigint_ends_the_sweep_without_leftovers)
{
    expect_ends(SIGINT);
}

Test(sweep, sigterm_ends_the_sweep_without_leftovers)
{
    expect_ends(SIGTERM);
}

Test(sweep, a_task_restarts_after_sigkill)
{
    pid_t pid = start_long();
    cr_assert(kill(-pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
    expect_all_ended();
    sweep(NULL, "--collect");
    expect(1, "no task of t is finished");
    sweep(HEADER TASK("8"), "");
    expect(0, "1 finished");
    expect_rows("8");
    expect_no_leftovers();
}

Test(sweep, an_interrupted_redo_is_continued_without_redo)
{
    launch_with("shift 2; exec \"$@\"");
    sweep(RANKS_HEADER "naive\t2" QUICK "\nnaive\t1" QUICK "\n", "");
    expect(0, "2 finished, 0 finished before");
    launch_with("[ $3 = true ] || { kill -TERM $PPID; exec sleep 9; }");
    sweep(NULL, "--redo");
    expect(143, "to continue, repeat the command without --redo");
    launch_with("shift 2; exec \"$@\"");
    sweep(NULL, "");
    expect(0, "2 finished, 0 finished before");
}
