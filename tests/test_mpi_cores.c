/* Tests how the cores of a machine are divided among ranks under mpirun, and warnings about placements. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "mpirun.h"

TestSuite(mpi_cores, .init = start, .fini = stop, .timeout = 400);

static bool apart(const pid_t *ranks, int count)
{
    cpu_set_t all, one, both;
    CPU_ZERO(&all);
    for (int i = 0; i < count; i++) {
        if (sched_getaffinity(ranks[i], sizeof one, &one) != 0)
            return false;
        CPU_AND(&both, &all, &one);
        if (CPU_COUNT(&both) > 0)
            return false;
        CPU_OR(&all, &all, &one);
    }
    return true;
}

Test(mpi_cores, ranks_divide_the_cores_that_they_share)
{
    cpu_set_t allowed;
    cr_assert(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    if (CPU_COUNT(&allowed) < 2)
        cr_skip_test("this machine has only one hardware thread");
    int ended;
    pid_t ranks[8], mpirun = start_ranks(1, "-n 2 $PROGRAM --variant naive --res 64 --vertices 20 --orbits 4 "
                                            "--batch 2 --min-samples 5 --min-time 0 --max-time 0");
    wait_until_held();
    bool shared_out = children_of(mpirun, ranks) == 2 && apart(ranks, 2);
    let_go();
    cr_assert(ends_within(mpirun, 60, &ended));
    cr_expect(WIFEXITED(ended) && WEXITSTATUS(ended) == 0, "%x", ended);
    cr_expect(shared_out, "both ranks may run on the same cores");
}

Test(mpi_cores, each_rank_has_as_many_threads_as_cores)
{
    cpu_set_t allowed;
    cr_assert(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    if (VARIANT_COUNT < 2 || CPU_COUNT(&allowed) < 2 || CPU_COUNT(&allowed) > 64)
        cr_skip_test("needs OpenMP and 2 to 64 hardware threads");
    run_well(2, TINY "--batch 2 --format csv");
    double cores = number(out, 4, "threads") + number(out, 5, "threads");
    cr_expect(cores == CPU_COUNT(&allowed) || strstr(err, "more ranks than cores"), "%g", cores);
    cr_expect(number(out, 6, "threads") == cores);
    run_well(2, TINY "--batch 2 --bind none --format csv");
    cr_expect(number(out, 4, "threads") == CPU_COUNT(&allowed));
}

/* The launcher gives each of two ranks one hardware thread and leaves other hardware threads idle. */
Test(mpi_cores, idle_cores_give_a_warning_if_a_variant_would_use_them)
{
    static const char line[] = "mpirun --bind-to none -n 1 taskset -c %d $PROGRAM " TINY
                               "--batch 2 %s : -n 1 taskset -c %d $PROGRAM " TINY "--batch 2 %s";
    cpu_set_t allowed;
    int cpus[2] = {0}, count = 0;
    cr_assert(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    for (int cpu = 0; cpu < CPU_SETSIZE && count < 2; cpu++)
        if (CPU_ISSET(cpu, &allowed))
            cpus[count++] = cpu;
    if (VARIANT_COUNT < 2 || CPU_COUNT(&allowed) < 3)
        cr_skip_test("needs OpenMP and three hardware threads");
    shell(line, cpus[0], "", cpus[1], "");
    cr_expect(count_of(err, "so the other cores are idle") == 1, "%s", err);
    shell(line, cpus[0], "--variant naive", cpus[1], "--variant naive");
    cr_expect(status == 0 && !strstr(err, "idle"), "%s", err);
}

Test(mpi_cores, more_ranks_than_cores_give_a_warning)
{
    cpu_set_t allowed;
    int cpu = 0;
    cr_assert(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    while (!CPU_ISSET(cpu, &allowed))
        cpu++;
    shell("taskset -c %d mpirun --bind-to none -n 2 $PROGRAM " TINY "--batch 2", cpu);
    cr_expect(status == 0, "exit %d: %s", status, err);
    cr_expect(count_of(err, "more ranks than cores") == 1, "%s", err);
    shell("taskset -c %d mpirun --bind-to none -n 2 $PROGRAM " TINY "--batch 2 --threads 0,1 --dry-run", cpu);
    cr_expect(count_of(err, "--threads: 0 means 1 per rank here; this number is listed too") == 1, "%s", err);
}

#ifdef _OPENMP
/* With OMP_PROC_BIND, libgomp binds the first thread of each rank to the first core before main() begins. */
Test(mpi_cores, binding_by_openmp_gives_a_warning)
{
    setenv("OMP_PROC_BIND", "true", 1);
    run_well(2, TINY "--batch 2");
    cr_expect(count_of(err, "warning: OMP_PROC_BIND") == 1 && strstr(err, "ranks share cores"), "%s", err);
    run_well(0, TINY "--batch 2");
    cr_expect(count_of(err, "warning: OMP_PROC_BIND") == 1 && strstr(err, "--threads N"), "%s", err);
    run_well(0, TINY "--batch 2 --threads 1");
    cr_expect(!strstr(err, "OMP_PROC_BIND"), "%s", err);
}
#endif
