/* Tests --prepare when it is killed, and with several ranks. The folders are on a disk, because a program
 * that writes to memory ends before it can be killed. */
#include "shell.h"

#ifdef HAVE_XXHASH

TestSuite(prepare_killed, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

#define ENDED 7 /* exit status: the program ended before it could be killed */

/* Starts --prepare `rounds` times, and kills all its processes with SIGKILL. Each kill waits until more units
 * (shards or folders of files) are finished than at the previous kill. The last kill waits for about half of
 * all units. Writes the inode of the first unit to `inode`, and returns the number of finished units, or 0 if
 * the program once ended before it was killed, as it does if this process does not run for a while. */
static int kill_rounds(const char *launcher, const char *options, const char *first_place, int places,
                       int rounds, char inode[32])
{
    int kept = 0;
    EXPECT(0, "rm -rf a");
    for (int i = 1; i <= rounds; i++) {
        int goal = 1 + i * (places - 2) / (2 * rounds);
        int ended =
            run("{ %s $P --prepare a %s --threads 1 >log 2>&1 & p=$!; "
                "while set -- a/.prepare/*.part; ! { [ -e \"$1\" ] && [ $# -ge %d ]; } && kill -0 $p; do "
                "sleep 0.002; done; kill -9 $p $(cat /proc/$p/task/$p/children) 2>/dev/null; wait $p "
                "2>/dev/null; flock -w 20 a true; test -e a/.prepare/spec || exit %d; "
                "ls a/.prepare | grep -c '[.]part$'; }",
                launcher, options, goal, ENDED);
        if (ended == ENDED)
            return 0;
        cr_assert_eq(ended, 0, "%s", out);
        kept = atoi(out);
        cr_assert(kept >= goal && kept < places, "%d of %d units are finished, not at least %d", kept, places,
                  goal);
        EXPECT(0, "stat -c %%i a/%s", first_place);
        cr_assert(i == 1 || strncmp(inode, out, 32) == 0, "%s was written again", first_place);
        memcpy(inode, out, 32);
    }
    return kept;
}

/* After the kills, --prepare runs to completion. Finished units must be kept, and the result must equal that
 * of an uninterrupted run. */
static void kill_and_resume(const char *launcher, const char *options, const char *first_place, int places,
                            int rounds)
{
    char inode[32] = "";
    int kept = 0;
    EXPECT(0, "$P --prepare whole %s", options);
    for (int trial = 0; trial < 8 && kept == 0; trial++)
        kept = kill_rounds(launcher, options, first_place, places, rounds, inode);
    cr_assert_gt(kept, 0, "the program always ends before it can be killed");
    EXPECT(0, "%s $P --prepare a %s", launcher, options);
    char words[64];
    snprintf(words, sizeof words, "(%d of ", kept);
    cr_assert_not_null(strstr(out, words), "%s lacks %s", out, words);
    EXPECT(0, "diff -r whole a && test \"$(stat -c %%i a/%s)\" = %s", first_place, inode);
    EXPECT(0, "test -z \"$(find a -name '*.tmp' -o -name .prepare)\"");
    EXPECT(0, "$P --prepare a %s", options);
    cr_assert_not_null(strstr(out, "already complete"), "%s", out);
}

Test(prepare_killed, shards_resume)
{
    kill_and_resume("", "--samples 1000 --shards 100 --sample-shape 1000", "counter-000000.tar", 100, 5);
}

Test(prepare_killed, files_resume)
{
    kill_and_resume("", "--samples 3500 --sample-shape 10 --store files", "not-imagefolder/000/000000.npy", 4,
                    2);
}

#if defined(HAVE_PNG) && defined(HAVE_INIH)
Test(prepare_killed, synth_resumes)
{
    kill_and_resume("", "--from synth --classes 3 --samples 200 --shards 100 --res 32", "synth-000000.tar",
                    100, 4);
}
#endif

#define SMALL   "--samples 25 --shards 3 --sample-shape 3,5"
#define RESIZED "--from dataset --source j --out-res 20 "

#if defined HAVE_PNG && defined HAVE_JPEG
Test(prepare_killed, resizing_resumes)
{
    EXPECT(0, "$P --prepare j --from digits --samples 200 --encode jpeg --store files");
    kill_and_resume("", RESIZED "--encode png --shards 100", "dataset-000000.tar", 100, 3);
}
#endif

#ifdef HAVE_MPI
/* Environment variables with which mpirun can start anywhere. Leak detection is off, because MPI keeps
 * allocations. test_mpi.c detects leaks of the program itself. */
static const char ranks_settings[] =
    "ASAN_OPTIONS=detect_leaks=0 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
    "OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp "
    "OMPI_MCA_btl_tcp_if_include=lo OMPI_MCA_oob_tcp_if_include=lo";

Test(prepare_killed, ranks_write_the_same_bytes)
{
    char ranks[1024];
    snprintf(ranks, sizeof ranks, "%s timeout 60 mpirun --bind-to none -n 3 $P --threads 1", ranks_settings);
    if (run("command -v mpirun") != 0)
        cr_skip_test("mpirun is not installed");
    EXPECT(0, "$P --prepare a " SMALL " && %s --prepare b " SMALL " && diff -r a b", ranks);
    EXPECT(0, "rm b/counter-000001.tar && %s --prepare b " SMALL " && diff -r a b", ranks);
#if defined HAVE_PNG && defined HAVE_JPEG
    EXPECT(0,
           "$P --prepare j --from digits --samples 30 --encode jpeg && $P --prepare r " RESIZED
           "--shards 5 && %s --prepare s " RESIZED "--shards 5 && diff -r r s",
           ranks);
#endif
    EXPECT(0, "%s --prepare b " SMALL, ranks);
    cr_assert_not_null(strstr(out, "b: already complete"), "%s", out);
    cr_assert_neq(run("%s --prepare b " SMALL " --seed 1", ranks), 0);
    cr_assert_not_null(strstr(out, "other options (--seed=0 there, --seed=1 now)"), "%s", out);
}

Test(prepare_killed, ranks_resume)
{
    char launcher[1024];
    snprintf(launcher, sizeof launcher, "%s mpirun --bind-to none -n 3", ranks_settings);
    if (run("command -v mpirun") != 0)
        cr_skip_test("mpirun is not installed");
    kill_and_resume(launcher, "--samples 1000 --shards 100 --sample-shape 1000", "counter-000000.tar", 100,
                    2);
}
#endif

#endif
