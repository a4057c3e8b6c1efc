/* The program under mpirun: the images that ranks make together, their rows, and how they fail.
 *
 * FDSL_BENCH names the program; the default is ./fdsl-bench. Skipped where the build has no MPI or mpirun is
 * not there. Nothing here depends on how fast the machine is, or on how many cores it has. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <criterion/criterion.h>

#include <dirent.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cells.h"
#include "core/portable.h"
#include "core/timer.h"

/* Images that take microseconds, and three samples of them whatever they say. */
#define TINY                                                                                           \
    "--variant " VARIANTS " --res 32 --vertices 20 --orbits 4 --radius 3 --warmups 1 --warmup-time 0 " \
    "--min-samples 3 --min-time 0 --max-time 0 "
#define MIXED \
    "--variant " VARIANTS " --res 32 --warmups 0 --warmup-time 0 --min-samples 1 --min-time 0 --max-time 0 "

enum { TEXT_MAX = 1 << 20 };

static char program[PATH_MAX], folder[] = "/tmp/fdsl-mpi-XXXXXX";
static int status;
static char out[TEXT_MAX], err[TEXT_MAX];

/* ---- Running ---- */

/* A whole file, or nothing where there is none; `text` has room for TEXT_MAX. */
static void read_text(const char *path, char *text)
{
    FILE *file = fopen(path, "r");
    size_t bytes = file ? fread(text, 1, TEXT_MAX - 1, file) : 0;
    text[bytes] = '\0';
    if (file)
        fclose(file);
}

/* Runs a shell command. "PROGRAM" in it stands for the program, $PROGRAM. */
static void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void shell(const char *format, ...)
{
    char command[8192];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command - 32, format, arguments);
    va_end(arguments);
    strcat(command, " >stdout.txt 2>stderr.txt");
    FILE *pipe = popen(command, "r");
    cr_assert_not_null(pipe);
    int ended = pclose(pipe);
    status = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
    read_text("stdout.txt", out);
    read_text("stderr.txt", err);
}

/* Runs the program on that many ranks, or without mpirun for 0. */
static void run(int ranks, const char *arguments)
{
    if (ranks)
        shell("timeout 50 mpirun --bind-to none -n %d $PROGRAM %s", ranks, arguments);
    else
        shell("$PROGRAM %s", arguments);
}

static void run_well(int ranks, const char *arguments)
{
    run(ranks, arguments);
    cr_assert(status == 0, "%d ranks, %s: exit %d: %s", ranks, arguments, status, err);
}

/* Every test has a folder of its own, and a launcher of its own. What is set makes mpirun start anywhere: as
 * root, with more ranks than cores, and without looking for networks. */
static void start(void)
{
    static const char *const foreign[] = {"OMPI_COMM_WORLD_SIZE",
                                          "OMPI_COMM_WORLD_RANK",
                                          "MV2_COMM_WORLD_SIZE",
                                          "PMI_SIZE",
                                          "PMI_RANK",
                                          "PMIX_RANK",
                                          "SLURM_STEP_NUM_TASKS",
                                          "SLURM_PROCID",
                                          "SLURM_JOB_ID",
                                          "SLURM_JOBID"};
    static const char *const own[][2] = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                         {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                         {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                                         {"OMPI_MCA_pml", "ob1"},
                                         {"OMPI_MCA_btl", "self,vader,tcp"},
                                         {"OMPI_MCA_btl_tcp_if_include", "lo"},
                                         {"OMPI_MCA_oob_tcp_if_include", "lo"}};
#ifndef HAVE_MPI
    cr_skip_test("this build has no MPI");
#endif
    if (system("command -v mpirun >/dev/null") != 0)
        cr_skip_test("mpirun is not installed");
    const char *path = getenv("FDSL_BENCH");
    cr_assert_not_null(realpath(path && *path ? path : "./fdsl-bench", program),
                       "build the program first, or set FDSL_BENCH");
    for (size_t i = 0; i < COUNT_OF(foreign); i++)
        unsetenv(foreign[i]);
    for (size_t i = 0; i < COUNT_OF(own); i++)
        setenv(own[i][0], own[i][1], 1);
    setenv("PROGRAM", program, 1);
    /* MPI's parts leave memory behind and are gone when that is reported, so it cannot be told by name. */
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
    cr_assert_not_null(mkdtemp(folder));
    cr_assert(chdir(folder) == 0);
}

static void stop(void)
{
    char command[64];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert(chdir("/") == 0 && system(command) == 0);
}

TestSuite(mpi, .init = start, .fini = stop, .timeout = 120);

/* ---- Images ---- */

/* The digest of what all ranks made; the variants agree on it. */
static const char *digest_of(int ranks, const char *arguments)
{
    static char digest[17];
    run_well(ranks, arguments);
    size_t rows = ranks > 1 ? (size_t)ranks + 1 : 1;
    const char *text = value(out, rows, "digest");
    cr_expect(strlen(text) == 16 && strcmp(text, "0000000000000000") != 0, "%s", text);
    memcpy(digest, text, 16);
    if (VARIANT_COUNT > 1)
        cr_expect_str_eq(value(out, 2 * rows, "digest"), digest, "%s", arguments);
    return digest;
}

#ifdef HAVE_XXHASH
Test(mpi, ranks_make_the_images_of_one)
{
    static const struct {
        int ranks;
        const char *how;
    } splits[] = {{2, "--batch 6"},
                  {3, "--batch 4"},
                  {4, "--batch 3"},
                  {1, "--batch 12 --scaling strong"},
                  {2, "--batch 12 --scaling strong"},
                  {4, "--batch 12 --scaling strong"}};
    char line[512], reference[64];
    snprintf(reference, sizeof reference, "%s", digest_of(0, TINY "--instance 7 --batch 12 --format csv"));
    for (size_t i = 0; i < COUNT_OF(splits); i++) {
        snprintf(line, sizeof line, TINY "--instance 7 %s --format csv", splits[i].how);
        cr_expect_str_eq(digest_of(splits[i].ranks, line), reference, "%d ranks, %s", splits[i].ranks, line);
    }
}

Test(mpi, so_do_uneven_shares)
{
    static const char line[] = TINY "--batch 11 --scaling strong --format csv";
    char reference[64];
    snprintf(reference, sizeof reference, "%s", digest_of(0, line));
    for (int ranks = 2; ranks <= 4; ranks++)
        cr_expect_str_eq(digest_of(ranks, line), reference, "%d ranks", ranks);
}

#ifdef HAVE_INIH
/* Neither the classes nor the shares divide each other; and outputs that are converted. */
Test(mpi, so_do_mixed_batches)
{
    char reference[64];
    snprintf(reference, sizeof reference, "%s",
             digest_of(0, MIXED "--classes 5 --batch 12 --output f32 --out-res 17 --format csv"));
    cr_expect_str_eq(digest_of(3, MIXED "--classes 5 --batch 4 --output f32 --out-res 17 --format csv"),
                     reference);
    cr_expect_str_eq(
        digest_of(4, MIXED "--classes 5 --batch 12 --output f32 --out-res 17 --scaling strong --format csv"),
        reference);
}
#endif
#endif

/* The oracle has the definition of an image, and knows nothing of how ranks share. */
Test(mpi, every_rank_verifies_its_own)
{
    run_well(3, TINY "--batch 4 --verify --format csv");
    for (size_t row = 1; row <= 4 * VARIANT_COUNT; row++) {
        cr_expect_str_eq(value(out, row, "verified"), "yes");
        cr_expect_str_eq(value(out, row, "wrong"), "0");
    }
}

/* As the monitor of rank 0 saw it: the check takes the oracle hundreds of milliseconds. */
Test(mpi, wrong_images_would_show_before_anything_is_timed)
{
    static char seen[TEXT_MAX];
    run_well(2,
             "--variant naive --res 256 --vertices 2000 --orbits 50 --batch 8 --min-time 0.2 --max-time 0.2 "
             "--verify --monitor monitor.csv:10");
    read_text("monitor.csv", seen);
    bool verified = false, timed = false;
    for (size_t row = 1; row < count_of(seen, "\n"); row++) {
        if (strcmp(value(seen, row, "rank"), "0") != 0)
            continue;
        bool timing = strcmp(value(seen, row, "phase"), "timed") == 0;
        verified |= strcmp(value(seen, row, "phase"), "verify") == 0;
        timed |= timing;
        cr_expect(verified || !timing, "row %zu is timed, and nothing was verified", row);
    }
    cr_expect(verified && timed);
}

/* ---- Rows ---- */

Test(mpi, a_row_a_rank_and_one_of_all)
{
    static const double batches[] = {3, 3, 2, 8};
    static const char *const names[] = {"0", "1", "2", "all"};
    run_well(3, TINY "--batch 8 --scaling strong --threads 1 --format csv");
    cr_expect(count_of(out, "\n") == 1 + 4 * VARIANT_COUNT && !strchr(out, '\r'), "%s", out);
    for (size_t row = 1; row <= 4 * VARIANT_COUNT; row++) {
        size_t i = (row - 1) % 4;
        double median_s = number(out, row, "time_median_s");
        cr_expect_str_eq(value(out, row, "ranks"), "3");
        cr_expect_str_eq(value(out, row, "rank"), names[i]);
        cr_expect_str_eq(value(out, row, "scaling"), "strong");
        cr_expect_str_eq(value(out, row, "timed"), "clear+draw");
        cr_expect_str_empty(value(out, row, "ranks_per_device"), "no device here");
        cr_expect(number(out, row, "batch") == batches[i] && number(out, row, "items") == batches[i]);
        cr_expect(number(out, row, "samples") == number(out, 1 + (row - 1) / 4 * 4, "samples"));
        cr_expect(number(out, row, "threads") == (i < 3 ? 1 : 3));
        cr_expect(fabs(number(out, row, "items_per_s") * median_s / batches[i] - 1) < 1e-3);
        if (i < 3) {
            cr_expect_str_empty(value(out, row, "imbalance"));
            cr_expect_str_empty(value(out, row, "efficiency"));
            cr_expect(number(out, row, "time_min_s") <= number(out, row + 3 - i, "time_min_s"));
        } else {
            cr_expect(number(out, row, "imbalance") >= 1);
            cr_expect(number(out, row, "efficiency") > 0);
        }
    }
}

/* Rows of a run are known by its time: the ranks' own rows, that of all, and what each rank's monitor saw. */
Test(mpi, a_run_has_one_time)
{
    static char seen[TEXT_MAX];
    char time_utc[64];
    bool watched[3] = {false};
    run_well(3, TINY "--batch 2 --monitor monitor.csv:10 --format csv");
    read_text("monitor.csv", seen);
    snprintf(time_utc, sizeof time_utc, "%.63s", value(out, 1, "time_utc"));
    cr_assert(strlen(time_utc) == strlen("2026-01-31T12:34:56Z"), "%s", time_utc);
    cr_expect(count_of(out, time_utc) == 4 * VARIANT_COUNT, "%s", out);
    for (size_t row = 1; row < count_of(seen, "\n"); row++) {
        cr_expect_str_eq(value(seen, row, "time_utc"), time_utc);
        watched[(size_t)number(seen, row, "rank") % COUNT_OF(watched)] = true;
    }
    cr_expect(watched[0] && watched[1] && watched[2]);
}

Test(mpi, one_rank_under_mpirun_has_the_row_of_a_program_alone)
{
    run_well(1, TINY "--batch 3 --format csv");
    cr_expect(count_of(out, "\n") == 1 + VARIANT_COUNT);
    cr_expect_str_eq(value(out, 1, "ranks"), "1");
    cr_expect_str_eq(value(out, 1, "rank"), "0");
    cr_expect_str_empty(value(out, 1, "scaling"));
    cr_expect_str_empty(value(out, 1, "imbalance"));
    cr_expect_str_empty(value(out, 1, "efficiency"));
}

/* The row of all is over when the slowest rank is, sample by sample. */
Test(mpi, samples_are_of_every_rank_and_sum_up_to_the_row_of_all)
{
    static char rows[TEXT_MAX], samples[TEXT_MAX];
    run_well(3, TINY "--batch 2 --min-samples 7 --out rows.csv --samples samples.csv");
    read_text("rows.csv", rows);
    read_text("samples.csv", samples);
    cr_expect(count_of(rows, "\n") == 1 + 4 * VARIANT_COUNT);
    cr_expect(count_of(samples, "\n") == 1 + 3 * 7 * VARIANT_COUNT);
    for (size_t v = 0; v < VARIANT_COUNT; v++) {
        double fastest = INFINITY;
        for (size_t i = 0; i < 7; i++) {
            double slowest = 0;
            for (size_t rank = 0; rank < 3; rank++) {
                size_t row = v * 21 + rank * 7 + i + 1;
                cr_expect(number(samples, row, "rank") == (double)rank);
                cr_expect(number(samples, row, "sample") == (double)i);
                slowest = fmax(slowest, number(samples, row, "wall_s"));
            }
            fastest = fmin(fastest, slowest);
        }
        cr_expect(fastest == number(rows, 4 * v + 4, "time_min_s"));
    }
}

Test(mpi, the_table_has_a_line_a_variant_without_colours)
{
    run_well(2, TINY "--batch 3 --verify");
    cr_expect(count_of(out, "\n") == 3 + VARIANT_COUNT, "%s", out);
    cr_expect(strstr(out, "on 2 ranks, weak scaling: 6 images a run"), "%s", out);
    cr_expect(strstr(out, "imbalance efficiency"), "%s", out);
    cr_expect(!strchr(out, '\033') && !strchr(out, '\r'),
              "mpirun gives ranks a terminal, whatever it writes to");
}

#ifdef HAVE_JANSSON
Test(mpi, json_holds_the_rows_of_all)
{
    run_well(2, TINY "--batch 3 --format json");
    cr_expect(count_of(out, "\"environment\"") == 1);
    cr_expect(count_of(out, "\"rank\": \"all\"") == VARIANT_COUNT, "%s", out);
    cr_expect(count_of(out, "\"rank\": 1") == VARIANT_COUNT);
    cr_expect(count_of(out, "\"settled\"") == 3 * VARIANT_COUNT);
}
#endif

/* Whoever called malloc() for a leak is the second line of its report: what MPI leaves behind is not ours. */
Test(mpi, ranks_leave_no_memory_behind)
{
    if (!strstr(program, "/san/"))
        cr_skip_test("this build is not under a sanitizer");
    setenv("ASAN_OPTIONS", "detect_leaks=1", 1);
    setenv("LSAN_OPTIONS", "exitcode=0", 1);
    run_well(3, TINY "--batch 2 --verify --out rows.csv --samples samples.csv --format csv");
    cr_expect(strstr(err, "LeakSanitizer"), "no report: %s", err);
    for (const char *line = err; line; line = strchr(line + 1, '\n')) {
        const char *second = strstr(line, "    #1 "), *end = second ? strchr(second, '\n') : NULL;
        if (!end)
            break;
        cr_expect(!memmem(second, (size_t)(end - second), " src/", 5) &&
                      !memmem(second, (size_t)(end - second), " mpi/", 5),
                  "%.*s", (int)(end - second), second);
        line = end - 1;
    }
}

/* ---- Cores ---- */

/* The process ids of the children of a process that run our program; at most 8. */
static int children_of(pid_t parent, pid_t *children)
{
    int count = 0;
    DIR *directory = opendir("/proc");
    cr_assert_not_null(directory);
    for (const struct dirent *entry; (entry = readdir(directory)) && count < 8;) {
        char path[300], line[512] = "", name[64] = "";
        int pid, above;
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        FILE *file = fopen(path, "r");
        if (!file)
            continue;
        if (fgets(line, sizeof line, file) && sscanf(line, "%d (%63[^)]) %*c %d", &pid, name, &above) == 3 &&
            above == parent && strcmp(name, "fdsl-bench") == 0)
            children[count++] = pid;
        fclose(file);
    }
    closedir(directory);
    return count;
}

/* Starts mpirun on its own, its output in files. */
static pid_t start_ranks(const char *ranks, const char *arguments)
{
    char command[4096];
    snprintf(command, sizeof command, "exec mpirun --bind-to none -n %s $PROGRAM %s >stdout.txt 2>stderr.txt",
             ranks, arguments);
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0) {
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    return pid;
}

static void nap(void)
{
    nanosleep(&(struct timespec){0, 20000000}, NULL);
}

/* Waits at most so long for a process to end. */
static bool ends_within(pid_t pid, double limit_s, int *ended)
{
    for (double begin_s = timer_now_s(); timer_now_s() - begin_s < limit_s; nap())
        if (waitpid(pid, ended, WNOHANG) == pid)
            return true;
    return false;
}

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

Test(mpi, ranks_share_out_the_cores_that_they_have_in_common)
{
    cpu_set_t allowed;
    cr_assert(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    if (CPU_COUNT(&allowed) < 2)
        cr_skip_test("one hardware thread is nothing to share");
    pid_t ranks[8], mpirun = start_ranks("2", "--variant naive --min-time 30 --max-time 30");
    bool shared_out = false;
    for (double begin_s = timer_now_s(); !shared_out && timer_now_s() - begin_s < 30; nap())
        shared_out = children_of(mpirun, ranks) == 2 && apart(ranks, 2);
    int ended;
    kill(mpirun, SIGTERM);
    cr_assert(ends_within(mpirun, 20, &ended));
    cr_expect(shared_out, "both ranks could run on the same cores");
}

Test(mpi, each_has_as_many_threads_as_it_got)
{
    cpu_set_t allowed;
    cr_assert(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    if (VARIANT_COUNT < 2 || CPU_COUNT(&allowed) < 2 || CPU_COUNT(&allowed) > 64)
        cr_skip_test("no second thread here");
    run_well(2, TINY "--batch 2 --format csv");
    double cores = number(out, 4, "threads") + number(out, 5, "threads");
    cr_expect(cores == CPU_COUNT(&allowed) || strstr(err, "more ranks than cores"), "%g", cores);
    cr_expect(number(out, 6, "threads") == cores);
    run_well(2, TINY "--batch 2 --bind none --format csv");
    cr_expect(number(out, 4, "threads") == CPU_COUNT(&allowed));
}

/* The launcher gives each of two ranks a hardware thread, and there are more. */
Test(mpi, cores_that_idle_are_warned_of_where_a_variant_would_use_them)
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
        cr_skip_test("no third hardware thread here");
    shell(line, cpus[0], "", cpus[1], "");
    cr_expect(count_of(err, "leaves the rest idle") == 1, "%s", err);
    shell(line, cpus[0], "--variant naive", cpus[1], "--variant naive");
    cr_expect(status == 0 && !strstr(err, "idle"), "%s", err);
}

Test(mpi, more_ranks_than_cores_are_warned_of)
{
    cpu_set_t allowed;
    int cpu = 0;
    cr_assert(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    while (!CPU_ISSET(cpu, &allowed))
        cpu++;
    shell("taskset -c %d mpirun --bind-to none -n 2 $PROGRAM " TINY "--batch 2", cpu);
    cr_expect(status == 0, "exit %d: %s", status, err);
    cr_expect(count_of(err, "more ranks than cores") == 1, "%s", err);
}

#ifdef _OPENMP
/* libgomp then binds the first thread of each rank to the first core, before main() begins. */
Test(mpi, cores_that_openmp_has_taken_away_are_warned_of)
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

/* ---- Failures ---- */

/* The program's own lines on stderr; mpirun adds some of its own. */
static void expect_refusal(int expected, const char *words)
{
    cr_expect(status == expected, "exit %d, not %d: %s", status, expected, err);
    cr_expect(count_of(err, "fdsl-bench: ") == 1, "not said once: %s", err);
    cr_expect(strstr(err, words), "'%s' is not in: %s", words, err);
    cr_expect(*out == '\0', "%s", out);
}

Test(mpi, what_makes_no_sense_is_said_once)
{
    run(3, "--variant ompp");
    expect_refusal(2, "unknown variant 'ompp'; did you mean 'omp'?");
    run(3, TINY "--batch 2 --scaling strong");
    expect_refusal(2, "more ranks (3) than images (--batch 2)");
    run(2, TINY "--device 0");
    expect_refusal(2, "CUDA_VISIBLE_DEVICES");
    run(2, TINY "--npy x.npy");
    expect_refusal(2, "--npy is for one rank");
    run(2, TINY "--out missing/rows.csv");
    expect_refusal(2, "its folder does not exist");
    run(2, "--version");
    cr_expect(status == 0 && count_of(out, "fdsl-bench") == 1, "%s%s", out, err);
}

Test(mpi, ranks_with_different_options_are_refused)
{
    static const char *const others[] = {"--batch 3", "--samples samples.csv", "--scaling strong",
                                         "--bind none", "--dry-run"};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        shell("timeout 50 mpirun --bind-to none -n 1 $PROGRAM %s : -n 1 $PROGRAM %s %s --out rows.csv",
              TINY "--batch 2 --out rows.csv", TINY "--batch 2", others[i]);
        expect_refusal(2, "fdsl-bench: rank 1: its options are not those of rank 0; give all");
        cr_expect(access("rows.csv", F_OK) != 0 && access("samples.csv", F_OK) != 0, "no rows");
    }
}

Test(mpi, ranks_may_write_different_files)
{
    shell("timeout 50 mpirun --bind-to none -n 1 $PROGRAM %s --monitor 0.csv : -n 1 $PROGRAM %s --monitor "
          "1.csv",
          TINY "--batch 2", TINY "--batch 2");
    cr_expect(status == 0, "exit %d: %s", status, err);
    cr_expect(access("0.csv", F_OK) == 0 && access("1.csv", F_OK) == 0);
}

Test(mpi, a_rank_that_mpi_knows_nothing_of_is_refused)
{
    setenv("PMIX_RANK", "3", 1);
    run(0, TINY "--batch 2 --out rows.csv");
    expect_refusal(4, "started as rank 3 of several (PMIX_RANK)");
    cr_expect(access("rows.csv", F_OK) != 0, "no rows");
}

/* Address space for the program, but not for its batch. */
Test(mpi, a_rank_that_fails_ends_all_with_its_message)
{
    static const char line[] = "--variant naive --res 4096 --batch 64 --vertices 3 --orbits 1 --warmups 0 "
                               "--warmup-time 0 --min-samples 1 --min-time 0 --max-time 0";
    if (strstr(program, "/san/"))
        cr_skip_test("a sanitizer wants all of the address space");
    shell("timeout 50 mpirun --bind-to none -n 1 $PROGRAM %s --out rows.csv "
          ": -n 1 sh -c 'ulimit -v 1200000; exec $PROGRAM %s --out rows.csv'",
          line, line);
    expect_refusal(1, "fdsl-bench: rank 1: naive: out of memory for a batch of 64 images; lower --batch");
    cr_expect(access("rows.csv", F_OK) != 0, "no rows");
}

/* Hundredths of a second that a process has computed. */
static int computed(pid_t pid)
{
    static char line[TEXT_MAX];
    char path[64];
    unsigned long user = 0, system_ = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    read_text(path, line);
    if (sscanf(line, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system_) !=
        2)
        return 0;
    return (int)(100 * (user + system_) / (unsigned long)sysconf(_SC_CLK_TCK));
}

/* Whether the process ends within a second; who has inherited it may not have asked for its status yet. */
static bool is_gone(pid_t pid)
{
    static char line[TEXT_MAX];
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    for (int i = 0; i < 50; i++, nap()) {
        read_text(path, line);
        if (!*line || strstr(line, ") Z "))
            return true;
    }
    return false;
}

/* Rank 2 sleeps while rank 0 runs alone: when it has computed for a while, all are being timed. */
Test(mpi, a_rank_that_is_killed_ends_all_and_the_rows_stay_whole)
{
    static const char line[] =
        "--variant naive --res 256 --vertices 500 --orbits 50 --batch 2 --out rows.csv "
        "--samples samples.csv --min-time %g --max-time %g";
    static char before[TEXT_MAX], rows[TEXT_MAX];
    char arguments[512];
    pid_t ranks[8] = {0};
    snprintf(arguments, sizeof arguments, line, 0.0, 0.0);
    run_well(4, arguments);
    read_text("rows.csv", before);
    cr_assert(count_of(before, "\n") == 6, "%s", before);

    snprintf(arguments, sizeof arguments, line, 4.0, 60.0);
    pid_t mpirun = start_ranks("4", arguments);
    for (double begin_s = timer_now_s(); timer_now_s() - begin_s < 60; nap())
        if (children_of(mpirun, ranks) == 4 && computed(ranks[2]) > 50)
            break;
    cr_assert(computed(ranks[2]) > 50);
    cr_assert(kill(ranks[2], SIGKILL) == 0);
    int ended;
    cr_assert(ends_within(mpirun, 10, &ended), "the others go on without it");
    cr_expect(!(WIFEXITED(ended) && WEXITSTATUS(ended) == 0), "a killed rank is no success");
    for (int i = 0; i < 4; i++)
        cr_expect(is_gone(ranks[i]), "rank %d is still there", i);
    read_text("rows.csv", rows);
    cr_expect_str_eq(rows, before);
    cr_expect(system("ls | grep -q tmp") != 0, "temporary files are left");
}
