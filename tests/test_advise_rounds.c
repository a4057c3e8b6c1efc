/* Tests the rounds of fdsl-bench advise with simulated ways. advise starts its own program for each
 * measurement. Here, that is this test program, which then writes an invented row instead of measuring. */
#include "shell.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>

#include "run/advise.h"

#if defined(HAVE_XXHASH)

TestSuite(advise_rounds, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

static long of_environment(const char *name)
{
    const char *text = getenv(name);
    return text ? strtol(text, NULL, 10) : 0;
}

/* Appends a row to the file `rows`. All ways are equally fast, but their rates scatter, so no verdict is
 * certain. The environment says how long each run takes (RUN_MS), and during which run advise gets a signal
 * (SIGNAL_AT). */
static int pretend_to_measure(const char *rows)
{
    struct stat info = {0};
    FILE *counted = fopen("runs", "a"), *file = fopen(rows, "a");
    if (!counted || !file || fputc('.', counted) == EOF || fflush(counted) != 0 ||
        fstat(fileno(counted), &info) != 0)
        return STATUS_FAILED;
    if (info.st_size == of_environment("SIGNAL_AT"))
        kill(getppid(), SIGINT);
    poll(NULL, 0, (int)of_environment("RUN_MS"));
    if (ftell(file) == 0)
        fputs("items,time_mean_s\n", file);
    fprintf(file, "100,%g\n", 1 + (double)(uint32_t)((uint64_t)info.st_size * 2654435761u) / 0x1p32);
    return fclose(file) == 0 ? STATUS_OK : STATUS_FAILED;
}

/* Runs before main(): makes this program the command `advise`, and each run that advise starts. */
__attribute__((constructor)) static void become_program(int argc, char *argv[])
{
    if (argc > 4 && strcmp(argv[1], "--workload") == 0)
        _exit(pretend_to_measure(argv[4]));
    if (argc < 2 || strcmp(argv[1], "advise") != 0)
        return;
    file_remove_on_signals();
    enum status ended = advise_run(argc - 1, argv + 1);
    if (ended != STATUS_OK)
        status_print();
    fflush(stdout);
    _exit((int)ended);
}

/* Runs advise on a small set, with these variables in its environment. Counts the runs in `*runs`. */
static int advise_with(const char *environment, const char *time_s, size_t *runs)
{
    char self[PATH_MAX] = "";
    cr_assert_gt(readlink("/proc/self/exe", self, sizeof self - 1), 0);
    int ended =
        run("$P --prepare d --from synth --res 8 --samples 4 --shards 1 && mkdir t && "
            "env CUDA_VISIBLE_DEVICES= TMPDIR=t %s %s advise --data d --compute 0.1 --batch 4 --time %s",
            environment, self, time_s);
    char text[PATH_MAX];
    struct stat info;
    snprintf(text, sizeof text, "%s/runs", folder);
    *runs = stat(text, &info) == 0 ? (size_t)info.st_size : 0;
    return ended;
}

/* Three ways take part, so the 14th run is the second of the fifth round. */
Test(advise_rounds, a_signal_ends_the_rounds_and_the_finished_ones_give_a_verdict)
{
    size_t runs;
    cr_expect_eq(advise_with("SIGNAL_AT=14", "1000", &runs), 128 + SIGINT, "%d: %s", status, out);
    cr_expect_eq(runs, 14, "%zu", runs);
    EXPECT_OUT("interrupted: the verdict is that of the 4 finished rounds\n", "; 4 rounds in ",
               "\n\nUndecided: ", ", because 4 rounds ");
    EXPECT_EXACTLY(0, "left:\n", "echo left: $(ls -A t)");
}

/* The ninth run belongs to the third round. */
Test(advise_rounds, a_signal_before_the_end_of_the_third_round_gives_no_verdict)
{
    size_t runs;
    cr_expect_eq(advise_with("SIGNAL_AT=9", "1000", &runs), 128 + SIGINT, "%d: %s", status, out);
    cr_expect_eq(runs, 9, "%zu", runs);
    cr_expect(!says("ndecided") && !says("Best here") && !says("rounds in"), "%s", out);
    EXPECT_OUT("interrupted: no verdict, which needs 3 finished rounds\n");
    EXPECT_EXACTLY(0, "left:\n", "echo left: $(ls -A t)");
}

Test(advise_rounds, no_way_starts_after_the_time_is_over)
{
    size_t runs;
    cr_expect_eq(advise_with("RUN_MS=400", "0.5", &runs), 0, "%d: %s", status, out);
    cr_expect(runs == 1 || runs == 2, "%zu runs", runs);
    for (char *end = out; (end = strchr(end, '\n'));) /* line ends may be inside the sentence */
        *end = ' ';
    EXPECT_OUT("; 1 round in ");
    const char *missing =
        strstr(out, "Not measured (--time 0.5 was over before the first measurement of this "
                    "way; raise it): ");
    cr_assert(missing && strstr(missing, "shards from memory (shards-omp)"), "%s", out);
}

/* A round that has begun in time is not cut short, and no further round begins. */
Test(advise_rounds, the_time_ends_the_rounds)
{
    size_t runs;
    char rounds[32];
    cr_expect_eq(advise_with("RUN_MS=400", "4", &runs), 0, "%d: %s", status, out);
    cr_expect(runs > 0 && runs % 3 == 0 && runs <= 9, "%zu runs", runs);
    snprintf(rounds, sizeof rounds, "; %zu round%s in ", runs / 3, runs == 3 ? "" : "s");
    cr_expect(says(rounds), "%s", out);
}

#endif
