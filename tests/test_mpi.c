/* Tests the program under mpirun: the images of all ranks, their rows, and failures.
 *
 * The environment variable FDSL_BENCH names the program; the default is ./fdsl-bench. Skipped if the build
 * has no MPI or mpirun is missing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "mpirun.h"

TestSuite(mpi, .init = start, .fini = stop, .timeout = 400);

/* ---- Images ---- */

/* Returns the digest of the images of all ranks. Expects all variants to have the same digest. */
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
Test(mpi, ranks_generate_the_images_of_one_rank)
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

Test(mpi, uneven_shares_generate_the_images_of_one_rank)
{
    static const char line[] = TINY "--batch 11 --scaling strong --format csv";
    char reference[64];
    snprintf(reference, sizeof reference, "%s", digest_of(0, line));
    for (int ranks = 2; ranks <= 4; ranks++)
        cr_expect_str_eq(digest_of(ranks, line), reference, "%d ranks", ranks);
}

#ifdef HAVE_INIH
/* The numbers of images per rank are not multiples of the number of classes. Outputs are converted. */
Test(mpi, mixed_batches_generate_the_images_of_one_rank)
{
    char reference[64];
    snprintf(reference, sizeof reference, "%s",
             digest_of(0, MIXED "--classes 5 --batch 12 --dtype f32 --out-res 17 --format csv"));
    cr_expect_str_eq(digest_of(3, MIXED "--classes 5 --batch 4 --dtype f32 --out-res 17 --format csv"),
                     reference);
    cr_expect_str_eq(
        digest_of(4, MIXED "--classes 5 --batch 12 --dtype f32 --out-res 17 --scaling strong --format csv"),
        reference);
}
#endif
#endif

/* The reference computes each image from its definition. How the batch is divided among ranks does not
 * matter. */
Test(mpi, every_rank_verifies_its_images)
{
    run_well(3, TINY "--batch 4 --verify --format csv");
    for (size_t row = 1; row <= 4 * VARIANT_COUNT; row++) {
        cr_expect_str_eq(value(out, row, "verified"), "yes");
        cr_expect_str_eq(value(out, row, "wrong"), "0");
    }
}

/* The monitor of rank 0 sees the order of the phases, because verification takes hundreds of milliseconds. */
Test(mpi, images_are_verified_before_the_timing)
{
    static char seen[TEXT_MAX];
    run_well(2,
             "--variant naive --res 256 --vertices 2000 --orbits 50 --batch 4 --min-time 0.2 --max-time 0.2 "
             "--verify --monitor monitor.csv:10");
    read_text("monitor.csv", seen);
    bool verified = false, timed = false;
    const size_t rows = count_of(seen, "\n");
    for (size_t row = 1; row < rows; row++) {
        if (strcmp(value(seen, row, "rank"), "0") != 0)
            continue;
        bool timing = strcmp(value(seen, row, "phase"), "timed") == 0;
        verified |= strcmp(value(seen, row, "phase"), "verify") == 0;
        timed |= timing;
        cr_expect(verified || !timing, "row %zu is timed before the verification", row);
    }
    cr_expect(verified && timed);
}

/* ---- Rows ---- */

Test(mpi, each_rank_has_a_row_and_all_ranks_have_one)
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
        cr_expect_str_eq(value(out, row, "timed_stages"), "clear+draw");
        cr_expect_str_empty(value(out, row, "ranks_per_device"),
                            "a run without a device must have no ranks_per_device");
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

/* All rows of a run must have the same time_utc: the rows of single ranks, the row of all ranks, and the
 * rows of each rank's monitor. */
Test(mpi, rows_of_a_run_have_the_same_time)
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

Test(mpi, one_rank_under_mpirun_has_the_row_of_a_serial_run)
{
    run_well(1, TINY "--batch 3 --format csv");
    cr_expect(count_of(out, "\n") == 1 + VARIANT_COUNT);
    cr_expect_str_eq(value(out, 1, "ranks"), "1");
    cr_expect_str_eq(value(out, 1, "rank"), "0");
    cr_expect_str_empty(value(out, 1, "scaling"));
    cr_expect_str_empty(value(out, 1, "imbalance"));
    cr_expect_str_empty(value(out, 1, "efficiency"));
}

/* In the row of all ranks, each sample has the time of the slowest rank. */
Test(mpi, samples_of_every_rank_give_the_row_of_all_ranks)
{
    static char rows[TEXT_MAX], samples[TEXT_MAX];
    run_well(3, TINY "--batch 2 --min-samples 7 --out rows.csv --samples-out samples.csv");
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

Test(mpi, the_table_has_one_line_per_variant_and_no_colours)
{
    run_well(2, TINY "--batch 3 --verify");
    cr_expect(count_of(out, "\n") == 4 + VARIANT_COUNT,
              "not a caption, a header, one line per variant and a footnote: %s", out);
    cr_expect(strstr(out, "on 2 ranks, weak scaling: 6 images per run"), "%s", out);
    cr_expect(strstr(out, "imbalance efficiency"), "%s", out);
    cr_expect(!strchr(out, '\033') && !strchr(out, '\r'),
              "colours or progress, because mpirun gives ranks a terminal");
}

#ifdef HAVE_JANSSON
Test(mpi, json_has_the_rows_of_all_ranks)
{
    run_well(2, TINY "--batch 3 --format json");
    cr_expect(count_of(out, "\"environment\"") == 1);
    cr_expect(count_of(out, "\"rank\": \"all\"") == VARIANT_COUNT, "%s", out);
    cr_expect(count_of(out, "\"rank\": 1") == VARIANT_COUNT);
    cr_expect(count_of(out, "\"settled\"") == 3 * VARIANT_COUNT);
}
#endif

/* The second line of a leak report names the caller of malloc(). Only callers in src/ and mpi/ count, because
 * MPI itself leaks. */
Test(mpi, ranks_do_not_leak_memory)
{
    if (!strstr(program, "/san/"))
        cr_skip_test("this build is not under a sanitizer");
    setenv("ASAN_OPTIONS", "detect_leaks=1", 1);
    setenv("LSAN_OPTIONS", "exitcode=0", 1);
    run_well(3, TINY "--batch 2 --verify --out rows.csv --samples-out samples.csv --format csv");
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

/* ---- Failures ---- */

/* Expects this exit status and one line of the program on stderr, with these words. mpirun may print more
 * lines. */
static void expect_refusal(int expected, const char *words)
{
    cr_expect(status == expected, "exit %d, not %d: %s", status, expected, err);
    cr_expect(count_of(err, "fdsl-bench: ") == 1, "not one message: %s", err);
    cr_expect(strstr(err, words), "'%s' is not in: %s", words, err);
    cr_expect(*out == '\0', "%s", out);
}

Test(mpi, errors_are_printed_once)
{
    run(3, "--variant ompp");
    expect_refusal(2, "unknown variant 'ompp'; did you mean 'omp'?");
    run(3, TINY "--batch 2 --scaling strong");
    expect_refusal(2, "more ranks (3) than images (--batch 2)");
    run(2, TINY "--device 0");
    expect_refusal(2, "CUDA_VISIBLE_DEVICES");
    run(2, TINY "--npy x.npy");
    expect_refusal(2, "--npy needs a single rank");
    run(2, TINY "--out missing/rows.csv");
    expect_refusal(2, "its folder does not exist");
    run(2, "--version");
    cr_expect(status == 0 && count_of(out, "fdsl-bench") == 1, "%s%s", out, err);
}

Test(mpi, ranks_with_different_options_are_refused)
{
    static const char *const others[] = {"--batch 3", "--samples-out samples.csv", "--scaling strong",
                                         "--bind none", "--dry-run"};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        char line[1024];
        snprintf(line, sizeof line, TINY "--batch 2 %s --out rows.csv", others[i]);
        drop_repeated_in(line);
        shell("timeout 150 mpirun --bind-to none -n 1 $PROGRAM %s : -n 1 $PROGRAM %s",
              TINY "--batch 2 --out rows.csv", line);
        expect_refusal(2, "fdsl-bench: rank 1: its options differ from those of rank 0; give all");
        cr_expect(access("rows.csv", F_OK) != 0 && access("samples.csv", F_OK) != 0, "rows were written");
    }
}

Test(mpi, ranks_may_write_different_files)
{
    shell("timeout 150 mpirun --bind-to none -n 1 $PROGRAM %s --monitor 0.csv : -n 1 $PROGRAM %s --monitor "
          "1.csv",
          TINY "--batch 2", TINY "--batch 2");
    cr_expect(status == 0, "exit %d: %s", status, err);
    cr_expect(access("0.csv", F_OK) == 0 && access("1.csv", F_OK) == 0);
}

Test(mpi, a_rank_that_mpi_does_not_know_is_refused)
{
    setenv("PMIX_RANK", "3", 1);
    run(0, TINY "--batch 2 --out rows.csv");
    expect_refusal(4, "started as rank 3 of several (PMIX_RANK)");
    cr_expect(access("rows.csv", F_OK) != 0, "rows were written");
}

/* Variables of a launcher are set, but no launcher runs. So no rank 0 exists that could print errors. */
Test(mpi, a_rank_without_a_launcher_says_why_it_ends)
{
    setenv("PMI_RANK", "1", 1);
    setenv("PMI_SIZE", "2", 1);
    run(0, TINY "--batch 2 --out rows.csv");
    expect_refusal(4, "fdsl-bench: rank 1: started as one of 2 ranks (PMI_SIZE)");
    cr_expect(access("rows.csv", F_OK) != 0, "rows were written");
}

Test(mpi, errors_in_the_options_of_one_rank_are_printed)
{
    static const struct {
        const char *others, *words;
    } cases[] = {{"--bogus", "fdsl-bench: rank 1: unknown option '--bogus'"},
                 {"--variant ompp", "fdsl-bench: rank 1: unknown variant 'ompp'"},
                 {"--prepare folder", "fdsl-bench: rank 1: --prepare must be given to all ranks or to none"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        shell("timeout 150 mpirun --bind-to none -n 1 $PROGRAM %s : -n 1 $PROGRAM %s", TINY "--batch 2",
              cases[i].others);
        expect_refusal(2, cases[i].words);
    }
}

Test(mpi, a_rank_that_ended_before_the_run_is_named)
{
    /* `sleep` acts as a process of another job that also has rank 2. The program must not mistake it for the
     * missing rank 2. */
    shell("{ OMPI_COMM_WORLD_RANK=2 sleep 60 & timeout 150 mpirun --bind-to none -n 2 $PROGRAM %s "
          "--rank-timeout 1 "
          ": -n 1 true; ended=$?; kill $!; (exit $ended); }",
          TINY "--batch 2");
    cr_expect(status == 1, "exit %d: %s", status, err);
    /* If `true` ends late, the others have started MPI, and mpirun names the rank and ends the job. */
    cr_expect(strstr(err, "gave up waiting for rank 2 to start MPI after 1 s") ||
                  strstr(err, "mpirun has exited due to process rank 2"),
              "%s", err);
    cr_expect(*out == '\0', "%s", out);
}

/* Rank 1 has enough address space for the program, but not for its batch. */
Test(mpi, a_rank_that_fails_ends_all_with_its_message)
{
    static const char line[] = "--variant naive --res 4096 --batch 64 --vertices 3 --orbits 1 --warmups 0 "
                               "--warmup-time 0 --min-samples 1 --min-time 0 --max-time 0";
    if (strstr(program, "/san/"))
        cr_skip_test("a sanitizer needs all of the address space");
    shell("timeout 150 mpirun --bind-to none -n 1 $PROGRAM %s --out rows.csv "
          ": -n 1 sh -c 'ulimit -v 1200000; exec $PROGRAM %s --out rows.csv'",
          line, line);
    expect_refusal(1, "fdsl-bench: rank 1: naive: out of memory for a batch of 64 images; lower --batch");
    cr_expect(access("rows.csv", F_OK) != 0, "rows were written");
}

/* Between timed runs, ranks vote on whether to continue, and wait for each other. A rank that sleeps in this
 * wait would start its next run late. */
Test(mpi, ranks_stay_awake_between_timed_runs)
{
    int ended;
    pid_t mpirun = start_ranks(1, "-n 2 $PROGRAM --variant naive --res 64 --vertices 20 --orbits 4 --batch 2 "
                                  "--min-samples 5 --min-time 0 --max-time 0");
    wait_until_held();
    for (int i = 0; i < 25; i++)
        nap();
    cr_expect(access("slept", F_OK) != 0, "rank 0 sleeps while it waits for rank 1");
    let_go();
    cr_assert(ends_within(mpirun, 60, &ended));
    cr_expect(WIFEXITED(ended) && WEXITSTATUS(ended) == 0, "%x", ended);
}

/* Returns whether the process ends within a second. A zombie counts as ended, because its new parent may not
 * have reaped it yet. */
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

Test(mpi, a_rank_that_hangs_is_named)
{
    int ended;
    pid_t mpirun = start_ranks(2, "-n 4 $PROGRAM --variant naive --res 64 --vertices 20 --orbits 4 --batch 2 "
                                  "--out rows.csv --min-time 0.2 "
                                  "--max-error 100 --rank-timeout 15");
    wait_until_held();
    bool ends = ends_within(mpirun, 60, &ended);
    let_go();
    cr_assert(ends, "the other ranks do not end");
    cr_expect(WIFEXITED(ended) && WEXITSTATUS(ended) == 1, "%x", ended);
    read_text("stderr.txt", err);
    double waited_s = 0;
    const char *said = strstr(err, "fdsl-bench: gave up waiting for rank 2 after ");
    cr_expect(said && sscanf(strstr(said, " after "), " after %lf s", &waited_s) == 1 && waited_s >= 15, "%s",
              err);
    cr_expect(access("rows.csv", F_OK) != 0, "rows were written");
    cr_expect(access("noisy", F_OK) != 0, "a rank reports to rank 0 more than once that it is waiting");
}

Test(mpi, a_killed_rank_ends_all_and_rows_stay_complete)
{
    static const char line[] = "--variant naive --res 64 --vertices 20 --orbits 4 --batch 2 --min-samples 5 "
                               "--min-time 0 --max-time 0 --out rows.csv --samples-out samples.csv";
    static char before[TEXT_MAX], rows[TEXT_MAX];
    pid_t ranks[8] = {0};
    run_well(4, line);
    read_text("rows.csv", before);
    cr_assert(count_of(before, "\n") == 6, "%s", before);

    pid_t mpirun = start_ranks(2, "-n 4 $PROGRAM %s", line), held = wait_until_held();
    cr_assert(children_of(mpirun, ranks) == 4);
    cr_assert(kill(held, SIGKILL) == 0);
    let_go();
    int ended;
    cr_assert(ends_within(mpirun, 30, &ended), "the other ranks continue");
    cr_expect(!(WIFEXITED(ended) && WEXITSTATUS(ended) == 0), "exit status 0, although a rank was killed");
    for (int i = 0; i < 4; i++)
        cr_expect(is_gone(ranks[i]), "rank %d still runs", i);
    read_text("rows.csv", rows);
    cr_expect_str_eq(rows, before);
    cr_expect(system("ls | grep -q tmp") != 0, "temporary files remain");
}

/* ---- Lists and ranges ---- */

Test(mpi, ranks_run_the_same_combinations)
{
    run_well(2, "--variant naive --res 16,32 --batch 1:4:2x --vertices 20 --orbits 4 --radius 3 --warmups 0 "
                "--warmup-time 0 --min-samples 2 --min-time 0 --max-time 0 --verify --format csv");
    for (size_t i = 0; i < 6; i++)
        for (size_t j = 0; j < 3; j++) {
            size_t row = 3 * i + j + 1;
            cr_expect_eq(number(out, row, "res"), i < 3 ? 16 : 32, "row %zu", row);
            cr_expect_eq(number(out, row, "batch"), (1 << i % 3) * (j == 2 ? 2 : 1),
                         "row %zu: the row of all ranks is not the sum", row);
            cr_expect_str_eq(value(out, row, "rank"), j == 0 ? "0" : j == 1 ? "1" : "all");
            cr_expect_str_eq(value(out, row, "wrong"), "0");
        }
    cr_expect_eq(count_of(out, "\n"), 1 + 6 * 3);
}

Test(mpi, ranks_with_other_combinations_are_refused)
{
    static const char line[] = "$PROGRAM --variant naive --batch 2 --res";
    static const char *const others[] = {"16,32", "16,64", "16", "16,32,64"};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        shell("timeout 150 mpirun --bind-to none -n 1 %s 16,32 --dry-run : -n 1 %s %s --dry-run", line, line,
              others[i]);
        cr_expect_eq(status, i == 0 ? 0 : 2, "%s: exit %d: %s", others[i], status, err);
        cr_expect_eq(strstr(err, "rank 1: its options differ from those of rank 0") != NULL, i > 0, "%s",
                     err);
        cr_expect_str_eq(out, i == 0 ? "--res 16\n--res 32\n" : "");
    }
}
