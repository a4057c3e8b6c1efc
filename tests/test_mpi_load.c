/* Tests ranks that read data sets. A rank whose data set differs from that of rank 0 must be refused. A
 * rank that fails during the timing must end all ranks. Each rank can run in its own folder, so that one
 * command names different data sets. Skipped if the build has no MPI or mpirun is missing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "mpirun.h"

#include "data/npy.h"

TestSuite(mpi_load, .init = start, .fini = stop, .timeout = 400);

#define READ "--variant %s --data set --cache any --warmups 0 --warmup-time 0 --min-samples 1 "

/* Creates the data set NAME/set. */
static void prepare(const char *name, const char *options)
{
    shell("mkdir %s && $PROGRAM --prepare %s/set %s", name, name, options);
    if (strstr(err, "not built"))
        cr_skip_test("this build cannot prepare data sets");
    cr_assert(status == 0, "%s", err);
}

/* Runs two ranks, each in its own folder. */
static void run_apart(const char *arguments)
{
    shell("timeout 150 mpirun --bind-to none -n 1 sh -c 'cd one; exec $PROGRAM %s' : "
          "-n 1 sh -c 'cd two; exec $PROGRAM %s'",
          arguments, arguments);
}

Test(mpi_load, data_that_differ_from_those_of_rank_0_are_refused)
{
    static const char *const others[] = {"--samples 79 --shards 4 --sample-shape 50 --dtype u8",
                                         "--samples 80 --shards 4 --sample-shape 25 --dtype f16",
                                         "--samples 80 --shards 5 --sample-shape 50 --dtype u8"};
    char line[256];
    snprintf(line, sizeof line, READ "--min-time 0 --max-time 0 --verify", "shards");
    prepare("one", "--samples 80 --shards 4 --sample-shape 50 --dtype u8");
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        prepare("two", others[i]);
        run_apart(line);
        cr_expect(status == 2 && strstr(err, "fdsl-bench: rank 1: its data differ from those of rank 0"),
                  "%s: %d: %s", others[i], status, err);
        shell("rm -r two");
    }
    shell("cp -r one two");
    run_apart(line);
    cr_expect(status == 0, "the same data in another folder are refused: %s", err);
}

/* Writes three rows of two values, of which only the last one differs between folders. */
static void put_rows(const char *path, float last)
{
    const float values[] = {1, 1, 1, 1, 1, last};
    char header[NPY_HEADER_MAX];
    const size_t bytes = npy_header_make(header, "<f4", "3, 2");
    FILE *file = fopen(path, "wb");
    cr_assert(file && fwrite(header, bytes, 1, file) == 1 && fwrite(values, sizeof values, 1, file) == 1 &&
              fclose(file) == 0);
}

Test(mpi_load, embeddings_that_differ_from_those_of_rank_0_are_refused)
{
    shell("mkdir one two");
    put_rows("one/rows.npy", 1);
    for (int last = 1; last <= 2; last++) {
        put_rows("two/rows.npy", (float)last);
        run_apart("--variant ops-omp --data rows.npy --loops 1");
        if (strstr(err, "not built"))
            cr_skip_test("this build has no xxHash");
        cr_expect(last == 1 ? status == 0
                            : status == 2 && strstr(err, "rank 1: its data differ from those of rank 0"),
                  "%d: %d: %s", last, status, err);
    }
}

Test(mpi_load, classes_of_another_file_are_refused)
{
    static const char *const folders[] = {"one", "two"};
    for (int i = 0; i < 2; i++) {
        shell("mkdir %s; $PROGRAM " MIXED "--classes %d --batch 4 --write-classes %s/classes.csv", folders[i],
              3 + i, folders[i]);
        if (strstr(err, "not built"))
            cr_skip_test("this build has no presets");
        cr_assert(status == 0, "%s", err);
    }
    run_apart("--variant naive --class classes.csv --batch 3 --res 32 --loops 1");
    cr_expect(status == 2 && strstr(err, "rank 1: its data differ from those of rank 0"), "%d: %s", status,
              err);
}

Test(mpi_load, ranks_prepare_one_data_set)
{
    static const char *const others[] = {"--samples 41", "--samples 40 --help",
                                         "--samples 40 --from cuonter"};
    static const char *const words[] = {"rank 1: its options or the files",
                                        "rank 1: its options differ from those", "rank 1: unknown source"};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        shell("timeout 150 mpirun -n 1 $PROGRAM --prepare set --samples 40 : -n 1 $PROGRAM --prepare set %s",
              others[i]);
        if (strstr(err, "not built"))
            cr_skip_test("this build cannot prepare data sets");
        cr_expect(status == 2 && strstr(err, words[i]), "%s: %d: %s", others[i], status, err);
        cr_expect(access("set", F_OK) != 0, "a folder was created");
    }
}

/* Files disappear from the data set of rank 1. Rank 0 reads another folder, so only rank 1 notices. */
Test(mpi_load, a_rank_that_fails_during_the_timing_ends_all)
{
    static const char line[] = READ "--min-time 1 --out ../rows.csv";
    char arguments[512];
    int ended;
    prepare("one", "--store files --samples 40 --sample-shape 50 --dtype u8");
    shell("cp -r one two");
    snprintf(arguments, sizeof arguments, line, "files");
    pid_t pid =
        start_ranks(1, "-n 1 sh -c 'cd one; exec $PROGRAM %s' : -n 1 sh -c 'cd two; exec $PROGRAM %s'",
                    arguments, arguments);
    wait_until_held();
    cr_assert(system("rm two/set/not-imagefolder/000/*7.*") == 0);
    let_go();
    cr_assert(ends_within(pid, 30, &ended), "the ranks continue");
    read_text("stderr.txt", err);
    cr_expect(WIFEXITED(ended) && WEXITSTATUS(ended) == 1, "%x: %s", ended, err);
    cr_expect(strstr(err, "fdsl-bench: rank 1: ") && strstr(err, "No such file"), "%s", err);
    cr_expect(access("rows.csv", F_OK) != 0, "rows were written");
}

/* The ranks have no sample in common, and the row of all ranks has those of both epochs. In the last batch of
 * an epoch, 80 mod 7 = 3 samples are left. */
Test(mpi_load, ranks_of_a_stream_share_each_batch)
{
    static const int counts[] = {1, 2, 4, 8};
    prepare("one", "--samples 80 --shards 4 --sample-shape 5,10 --dtype u8");
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        char line[512];
        snprintf(
            line, sizeof line,
            "rm -f rows.csv; cd one && timeout 100 mpirun --bind-to none --oversubscribe -n %d $PROGRAM " READ
            "--min-time 0 --max-time 0 --batch 7 --epochs 2 --lanes 4 --shuffle 30 --threads 2 --verify "
            "--out ../rows.csv",
            counts[i], "stream");
        shell("%s", line);
        if (status == 4)
            cr_skip_test("%s", err);
        cr_assert_eq(status, 0, "%d ranks: %s", counts[i], err);
        shell("awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } "
              "%s { print $at[\"items\"], $at[\"wrong\"], $at[\"checksum\"] > \"found\" }' rows.csv && "
              "cp -n found first && cmp found first && grep -q '^160 0 ' found",
              counts[i] > 1 ? "$at[\"rank\"] == \"all\"" : "NR == 2");
        cr_expect_eq(status, 0, "%d ranks: %s", counts[i], err);
    }
}
