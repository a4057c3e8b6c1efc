/* Tests sweeps under Slurm with a fake sbatch: job arrays and scaling jobs. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <sys/stat.h>

#include "cells.h"
#include "sweep_support.h"

TestSuite(sweep_slurm, .init = start, .fini = stop, .timeout = 120);

/* Creates a fake sbatch that only logs its arguments, and puts it on the PATH. */
static void pretend_sbatch(void)
{
    char path[PATH_MAX + 4096];
    put("sbatch", "#!/bin/sh\necho \"$@\" >>calls; echo \"4$(wc -l <calls);cluster\"\n");
    snprintf(path, sizeof path, "%s:%s", folder, getenv("PATH"));
    cr_assert(chmod("sbatch", 0755) == 0 && setenv("PATH", path, 1) == 0);
}

Test(sweep_slurm, a_table_becomes_an_array_and_a_merging_job)
{
    static char wanted[3 * PATH_MAX];
    pretend_sbatch();
    shell("slurm/submit.sh --redo configs/sweep_cpu.tsv --gpus=1");
    expect(0, "tasks:  job 41, 10 tasks; logs in results/sweep/cpu/log/\nrows:   job 42, ");
    snprintf(
        wanted, sizeof wanted,
        "--parsable --array=1-10 --output=results/sweep/cpu/log/task_%%a.log --gpus=1 slurm/sweep.sbatch "
        "%s/configs/sweep_cpu.tsv 0 --redo\n"
        "--parsable --dependency=afterok:41 --kill-on-invalid-dep=yes "
        "--output=results/sweep/cpu/log/collect.log slurm/collect.sbatch %s/configs/sweep_cpu.tsv\n",
        root, root);
    cr_expect_str_eq(get("calls"), wanted);
    cr_expect(exists("results/sweep/cpu/log"));
}

Test(sweep_slurm, a_table_with_an_error_is_not_submitted)
{
    pretend_sbatch();
    put("t.tsv", "variant\nnaiv\n");
    SHELL_PRINTS(2, "t.tsv, line 2: unknown variant 'naiv'", "slurm/submit.sh t.tsv");
    SHELL_PRINTS(2, "name a table", "slurm/submit.sh");
    SHELL_PRINTS(0, "Submits the unfinished", "slurm/submit.sh --help");
    cr_expect(!exists("calls"));
}

/* Expects a scaling job in an allocation of `most` ranks to list these tasks. The words that all tasks have
 * in common are removed. */
static void scale(const char *table, int most, const char *wanted)
{
    put("s.tsv", table);
    shell("SLURM_SUBMIT_DIR=$PWD SLURM_NTASKS=%d slurm/scale.sbatch s.tsv --dry-run | "
          "sed 's/, to run: / /; s/mpirun --bind-to none -n //; s/fdsl-bench //; s/--variant=//; "
          "s/--scaling=//'",
          most);
    cr_expect_str_eq(out, wanted);
}

Test(sweep_slurm, a_scaling_job_doubles_ranks_up_to_the_allocation)
{
    scale("# c\nvariant\tranks\tbatch\nnaive\t1\t8\nnaive\t2\t8\nnaive\t-\t9\n", 6,
          "task 1, line 3 naive --batch=8\ntask 2, line 3 2 naive --batch=8 weak\n"
          "task 3, line 3 4 naive --batch=8 weak\ntask 4, line 3 6 naive --batch=8 weak\n"
          "task 5, line 5 naive --batch=9\ntask 6, line 5 2 naive --batch=9 weak\n"
          "task 7, line 5 4 naive --batch=9 weak\ntask 8, line 5 6 naive --batch=9 weak\n");
    scale("variant\nnaive\n", 1, "task 1, line 2 naive\n");
}

Test(sweep_slurm, a_scaling_job_has_the_scalings_of_the_table)
{
    scale("variant\tranks\tscaling\nnaive\t1\tstrong\nomp\t1\t-"
          "\nomp\t2\tstrong\nomp\t4\tweak\nomp\t4\tstrong\n",
          2,
          "task 1, line 2 naive\ntask 2, line 2 2 naive strong\n"
          "task 3, line 3 omp\ntask 4, line 3 2 omp strong\ntask 5, line 3 2 omp weak\n");
    put("s.tsv", "variant\tbatch\tranks\tscaling\nnaive\t2\t2\tstrong\n");
    shell("SLURM_SUBMIT_DIR=$PWD SLURM_NTASKS=4 slurm/scale.sbatch s.tsv");
    expect(2, "s.tsv, line 2: --scaling strong: more ranks (4) than images");
    cr_expect(!exists("results"));
}

Test(sweep_slurm, without_a_cluster_prints_one_line)
{
    pretend_sbatch();
    put("sbatch",
        "#!/bin/sh\necho 'sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' >&2\n"
        "echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1\n");
    shell("slurm/submit.sh configs/sweep_cpu.tsv");
    expect(1, "submit.sh: sbatch finds no cluster from here; without a cluster, scripts/sweep/run.sh ");
    cr_expect(count_of(out, "\n") == 1, "%s", out);
    put("sbatch", "#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n");
    shell("slurm/submit.sh configs/sweep_cpu.tsv");
    expect(1, "submit.sh: sbatch refused: invalid partition specified: x\n");
}
