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
        "tasks:  2; JOBn is the number that the n-th sbatch prints\n"
        "mkdir -p 'results/sweep/t/log'\n"
        "sbatch '--parsable' '--array=1-2' '--output=results/sweep/t/log/task_%a.log' '--gpus=1' "
        "'--comment=two words' 'slurm/sweep.sbatch' 't.tsv' '0' '--redo'\n"
        "sbatch '--parsable' '--dependency=afterok:JOB1' '--kill-on-invalid-dep=yes' "
        "'--output=results/sweep/t/log/collect.log' 'slurm/collect.sbatch' 't.tsv'\n",
        "slurm/submit.sh --dry-run --redo t.tsv --gpus=1 --comment='two words' | sed \"s|$PWD/||\"");
    EXPECT(1, "test -e results");
}

/* The printed commands must make the same calls of sbatch as submit.sh without --dry-run. */
Test(submit, printed_commands_equal_those_of_a_real_call)
{
    EXPECT(0, PRETEND "slurm/submit.sh --dry-run t.tsv --gpus=1 >printed");
    EXPECT(1, "test -e calls");
    EXPECT(0,
           "sed 1d printed | sed s/JOB1/41/ >commands && " PRETEND "sh commands && mv calls printed_calls");
    EXPECT_PRINTS(0, "tasks:  job 41, 2 tasks", PRETEND "slurm/submit.sh t.tsv --gpus=1");
    EXPECT(0, "cmp calls printed_calls");
    EXPECT_EXACTLY(0, "2\n", "grep -c . calls");
}

Test(submit, a_dry_run_checks_the_table_and_the_options)
{
    put_text("t.tsv", "variant\nnaiv\n");
    EXPECT_PRINTS(2, "t.tsv, line 2: unknown variant 'naiv'", "slurm/submit.sh --dry-run t.tsv");
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

/* Puts a fake scontrol on the PATH, which prints these limits, and writes a table of `count` tasks. */
static void limit(const char *limits, int count)
{
    EXPECT(0,
           "mkdir -p bin && printf '#!/bin/sh\necho \"%s\"\n' >bin/scontrol && chmod +x bin/scontrol && "
           "{ printf 'variant\tres\tloops\tvertices\n'; seq -f 'naive\t8\t1\t%%.0f' 10 $((%d + 9)); } >t.tsv",
           limits, count);
}

/* Marks tasks first to last as finished, as their command files tell. */
static void finish_tasks(int first, int last)
{
    EXPECT(0,
           "mkdir -p results/sweep/t && for n in $(seq %d %d); do touch results/sweep/t/task_$n.csv; echo "
           "\"fdsl-bench --variant=naive --res=8 --loops=1 --vertices=$((n + 9))\" "
           ">results/sweep/t/task_$n.command; done",
           first, last);
}

Test(submit, a_long_table_becomes_several_arrays)
{
    limit("MaxArraySize = 1001\\\\nMaxJobCount=10000", 1200);
    EXPECT_PRINTS(0, "tasks:  job 41, 999 tasks; logs in results/sweep/t/log/\ntasks:  job 42, 201 tasks; ",
                  PRETEND "slurm/submit.sh t.tsv");
    EXPECT_EXACTLY(
        0,
        "--parsable --array=1-999 --output=results/sweep/t/log/task_%a.log slurm/sweep.sbatch t.tsv 0\n"
        "--parsable --array=0-200 --output=results/sweep/t/log/task_1%3a.log slurm/sweep.sbatch t.tsv 1000\n"
        "--parsable --dependency=afterok:41:42 --kill-on-invalid-dep=yes "
        "--output=results/sweep/t/log/collect.log slurm/collect.sbatch t.tsv\n",
        "sed \"s|$PWD/||\" calls");
}

/* Every unfinished task must be in exactly one array, and the job of an array must run the task with that
 * number. */
Test(submit, arrays_have_each_unfinished_task_once)
{
    limit("MaxArraySize = 4000\\\\nSchedulerParameters = x=1,max_array_tasks=99,y", 35);
    finish_tasks(3, 5);
    finish_tasks(10, 19);
    finish_tasks(34, 34);
    EXPECT(0, PRETEND "slurm/submit.sh --at-once 2 t.tsv --dependency=singleton");
    EXPECT_EXACTLY(0,
                   "1-2,6-9%2 task_%a.log --dependency=singleton 0\n"
                   "0-9%2 task_2%1a.log --dependency=singleton,afterany:41 20\n"
                   "0-3,5%2 task_3%1a.log --dependency=singleton,afterany:42 30\n",
                   "sed -n \"s|$PWD/||; s|--parsable --array=||; s|--output=.*/log/||; s|slurm/sweep.sbatch "
                   "t.tsv ||p\" calls");
    EXPECT_PRINTS(
        0, "task 35 of 35: ",
        "cp $P fdsl-bench; SLURM_SUBMIT_DIR=$PWD SLURM_ARRAY_TASK_ID=5 slurm/sweep.sbatch t.tsv 30");
    EXPECT_PRINTS(
        0, "task 6 of 35: ", "SLURM_SUBMIT_DIR=$PWD SLURM_ARRAY_TASK_ID=6 slurm/sweep.sbatch t.tsv --redo");
    /* The other spellings of --dependency. Of several, sbatch takes the last one. */
    EXPECT_EXACTLY(
        0, "--gpus=1 --dependency=afterok:7,afterany:JOB1\n",
        PRETEND
        "slurm/submit.sh --dry-run --at-once 2 t.tsv --dependency singleton -d 3 --depend=9 -dafterok:7 "
        "--gpus=1 | sed -n \"/JOB1'/{s/'//g; s/.*a.log //; s| slurm/.*||p; q}\"");
    expect_refused(2, "afterok:7?afterok:8: sbatch joins no further condition to one with '?'",
                   PRETEND "slurm/submit.sh --dry-run --at-once 2 t.tsv --dependency='afterok:7?afterok:8'");
    EXPECT(0, PRETEND "slurm/submit.sh --dry-run t.tsv --dependency='afterok:7?afterok:8'");
    expect_refused(2, "-d: its value is missing", PRETEND "slurm/submit.sh --dry-run t.tsv -d");
    EXPECT(0, "rm calls");
    finish_tasks(1, 35);
    EXPECT_PRINTS(0, "tasks:  all are finished\nrows:   job 41, ", PRETEND "slurm/submit.sh t.tsv");
    EXPECT_EXACTLY(0, "--parsable --output=results/sweep/t/log/collect.log slurm/collect.sbatch t.tsv\n",
                   "sed \"s|$PWD/||\" calls");
}

Test(submit, what_cannot_work_is_refused_before_the_first_job)
{
    limit("MaxArraySize = 1001\\\\nMaxJobCount = 20", 20);
    expect_refused(2, "20 tasks, but this cluster holds at most 20 jobs (MaxJobCount",
                   PRETEND "slurm/submit.sh t.tsv");
    limit("MaxArraySize = 0", 2);
    expect_refused(2, "this cluster permits no job arrays", PRETEND "slurm/submit.sh t.tsv");
    expect_refused(2, "--array=3: the arrays are the unfinished tasks",
                   PRETEND "slurm/submit.sh t.tsv --array=3");
    expect_refused(2, "--at-once '0': give the largest number", PRETEND "slurm/submit.sh --at-once 0 t.tsv");
    EXPECT(1, "test -e calls");
}

/* sbatch may refuse the second array, for example because of a limit on the jobs of a user. */
Test(submit, jobs_before_a_refused_one_are_named)
{
    limit("MaxArraySize = 1001", 1200);
    EXPECT(0, PRETEND
           "true && printf '#!/bin/sh\n[ -e first ] && { echo \"sbatch: error: too many\" >&2; exit 1; }\n"
           "touch first; echo 41\n' >bin/sbatch");
    EXPECT_PRINTS(1,
                  "submit.sh: submitted before: 41; when these jobs have ended, submit the table again for "
                  "the other tasks\n"
                  "submit.sh: sbatch refused: too many",
                  "PATH=$PWD/bin:$PATH slurm/submit.sh t.tsv");
}

/* A wrapper may print something else than sbatch --parsable does. */
Test(submit, an_answer_without_a_number_is_an_error)
{
    EXPECT(0, "mkdir bin && printf '#!/bin/sh\\necho Submitted\\n' >bin/sbatch && chmod +x bin/sbatch");
    EXPECT(1, "PATH=$PWD/bin:$PATH slurm/submit.sh t.tsv");
    cr_expect(says("sbatch refused: it printed 'Submitted' instead of the number of a job"), "%s", out);
}
