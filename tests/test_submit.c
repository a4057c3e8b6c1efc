/* Tests slurm/submit.sh. With --dry-run, it must need no Slurm and change no file. Without --dry-run, its
 * calls of a fake sbatch are tested. */
#include "shell.h"

static void start(void)
{
    shell_set_up();
    EXPECT(0, "ln -s %s/scripts %s/slurm %s/configs . && cp $P fdsl-bench", root, root, root);
    put_text("t.tsv", "variant\nnaive\nomp\n");
    setenv("FDSL_BENCH", program, 1);
}

TestSuite(submit, .init = start, .fini = shell_tear_down, .timeout = 60);

/* Puts a fake sbatch, which only logs its arguments, on the PATH of the following command. */
#define PRETEND                                                                         \
    "mkdir -p bin && echo 'echo \"$@\" >>calls; echo 4$(wc -l <calls)' >bin/sbatch && " \
    "sed -i 1i'#!/bin/sh' bin/sbatch && chmod +x bin/sbatch && PATH=$PWD/bin:$PATH "

Test(submit, a_dry_run_prints_the_commands)
{
    EXPECT_EXACTLY(
        0,
        "tasks:  2; JOB is the number that the first sbatch prints\n"
        "mkdir -p 'results/sweep/t/log'\n"
        "sbatch '--parsable' '--array=1-2' '--output=results/sweep/t/log/task_%a.log' '--gpus=1' "
        "'--comment=two words' 'slurm/sweep.sbatch' 't.tsv' '--redo'\n"
        "sbatch '--parsable' '--dependency=afterok:JOB' '--kill-on-invalid-dep=yes' "
        "'--output=results/sweep/t/log/collect.log' 'slurm/collect.sbatch' 't.tsv'\n",
        "slurm/submit.sh --dry-run --redo t.tsv --gpus=1 --comment='two words' | sed \"s|$PWD/||\"");
    EXPECT(1, "test -e results");
}

/* The printed commands must make the same calls of sbatch as submit.sh without --dry-run. */
Test(submit, printed_commands_equal_those_of_a_real_call)
{
    EXPECT(0, PRETEND "slurm/submit.sh --dry-run t.tsv --gpus=1 >printed");
    EXPECT(1, "test -e calls");
    EXPECT(0, "sed 1d printed | sed s/JOB/41/ >commands && " PRETEND "sh commands && mv calls printed_calls");
    EXPECT_PRINTS(0, "tasks:  job 41, 2 tasks", PRETEND "slurm/submit.sh t.tsv --gpus=1");
    EXPECT(0, "cmp calls printed_calls");
    EXPECT_EXACTLY(0, "2\n", "grep -c . calls");
}

Test(submit, a_dry_run_checks_the_table_and_the_options)
{
    put_text("t.tsv", "variant\nnaiv\n");
    EXPECT_PRINTS(2, "t.tsv:2: unknown variant 'naiv'", "slurm/submit.sh --dry-run t.tsv");
    expect_refused(2, "submit.sh: unknown option '--dri-run'; options of sbatch follow the table",
                   "slurm/submit.sh --dri-run t.tsv");
    expect_refused(
        2, "submit.sh: --dry-run after the table would be an option of sbatch; write it before the table",
        PRETEND "slurm/submit.sh t.tsv --gpus=1 --dry-run");
    expect_refused(2, "submit.sh: --redo after the table would be an option of sbatch; write it before",
                   PRETEND "slurm/submit.sh --dry-run t.tsv --redo");
    EXPECT(1, "test -e calls");
    expect_refused(2, "submit.sh: name a table", "slurm/submit.sh --dry-run");
}
